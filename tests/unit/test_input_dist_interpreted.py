"""The kernels of the input distribution under Triton's interpreter. One process runs all ranks and the exchanges
between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.interpreted import play_all, wrong_in

PATTERN = -7


@dataclass(frozen=True)
class Case:
    """A case. features: for each rank, the features that it receives, as indices of keys. bad: the kind of error in
    rank 0's input. sizes: the numbers of lengths that a program scans, reduces and counts at once.
    """

    keys: int
    features: tuple[tuple[int, ...], ...]
    batches: tuple[int, ...]
    weighted: bool = False
    offsets: bool = False
    ids: torch.dtype = torch.int64
    counts: torch.dtype = torch.int32
    longest: int = 5
    bad: str = ""
    sizes: tuple[int, int, int] = (1024, 8192, 4096)


TWO = ((0, 2), (1,))
CASES = {
    "two ranks": Case(3, TWO, (4, 4)),
    "uneven batches, weights": Case(3, TWO, (3, 5), weighted=True),
    "int32 ids, weights": Case(3, TWO, (2, 7), weighted=True, ids=torch.int32),
    "offsets": Case(4, ((3, 0), (2, 1)), (4, 3), offsets=True, counts=torch.int64),
    "unused and repeated keys": Case(5, ((4, 0), (0,), (2, 4)), (2, 3, 1), weighted=True),
    "a rank without features": Case(3, ((), (2, 0)), (3, 2)),
    "an empty batch": Case(3, TWO, (0, 2), weighted=True),
    "no ids": Case(3, TWO, (3, 2), longest=0),
    "many ids": Case(2, ((1,), (0,)), (300, 2), longest=40),
    "several blocks of lengths for a program": Case(2, ((1,), (0,)), (300, 41), sizes=(16, 32, 64)),
    "a block of lengths for each program": Case(2, ((1,), (0,)), (63, 64), sizes=(16, 32, 16), weighted=True),
    "a negative length": Case(3, TWO, (4, 4), bad="negative"),
    "a length beyond all ids": Case(3, TWO, (4, 4), bad="huge"),
    "lengths with another sum": Case(3, TWO, (4, 4), bad="sum"),
    "offsets with another sum": Case(3, TWO, (4, 4), offsets=True, bad="sum"),
    "values before the first offset": Case(3, TWO, (4, 4), offsets=True, bad="before"),
    "values after the last offset": Case(3, TWO, (4, 4), offsets=True, bad="after"),
    "offsets that begin and end too late": Case(3, TWO, (4, 4), offsets=True, bad="late"),
}


@dataclass(frozen=True)
class Exchanged:
    """A case of the exchange of headers. words: the number of words of the header for each rank. box: the size of a box in
    words. poisoned: a rank whose signals contain POISON.
    """

    words: tuple[int, ...]
    calls: int = 1
    box: int = 1024
    poisoned: int | None = None


@dataclass(frozen=True)
class Boxed:
    """A case of messages in boxes. room: how many more ids than it receives a rank has room for. unused: ids at the end of every
    input that are in no bag. wrong: the reason for which batches must be dropped, as a name in `weft.kernels.input_dist`.
    """

    features: tuple[tuple[int, ...], ...] = ((0, 2), (1,))
    batch: int = 4
    weighted: bool = False
    ids: torch.dtype = torch.int64
    longest: int = 5
    room: int = 3
    unused: int = 0
    calls: int = 3
    wrong: str = ""
    sizes: tuple[int, int, int] = (1024, 8192, 4096)


BOXES = {
    "boxes of two ranks": Boxed(),
    "boxes without room to spare, weights": Boxed(room=0, weighted=True),
    "boxes of int32 ids, unused ids at the end": Boxed(((1, 0), (2,), (0,)), ids=torch.int32, unused=5, weighted=True),
    "boxes of several blocks": Boxed(((1,), (0, 2)), batch=70, sizes=(16, 32, 64)),
    "boxes of no ids": Boxed(longest=0, unused=2),
    "boxes of a rank without features": Boxed(((), (2, 0)), batch=3),
    "boxes for too many ids": Boxed(room=-1, wrong="TOO_MANY", longest=9),
    "boxes of a refused batch": Boxed(wrong="REFUSED"),
    "boxes of another batch size": Boxed(wrong="OTHER_BATCH"),
    "boxes of other ids": Boxed(wrong="OTHER_BITS"),
}


EXCHANGES = {
    "headers of two ranks": Exchanged((5, 3), calls=3),
    "headers of three ranks": Exchanged((3, 300, 7), calls=4),
    "headers as large as a box": Exchanged((9, 9), box=9, calls=2),
    "a wait for headers that the watchdog ends": Exchanged((5, 3), poisoned=1),
}


def test_input_distribution() -> None:
    """Run all cases in one test, because starting a process takes longer than most cases."""
    assert wrong_in(__file__, CASES | EXCHANGES | BOXES) == {}


def play(case: Case) -> None:
    from weft.kernels.input_dist import HEAD
    from weft.runtime.cuda import input_dist
    from weft.runtime.cuda.input_dist import Pieces, header, pack, unpack

    input_dist._PROGRAMS = 8  # the interpreter runs programs one after the other
    input_dist._BAGS, input_dist._SUM, input_dist._COUNT = case.sizes
    world = len(case.features)
    flat = [key for own in case.features for key in own]
    pieces = Pieces(*torch.tensor([flat, [rank for rank, own in enumerate(case.features) for _ in own]]))
    index = torch.tensor([word for own in case.features for word in (0, 1, 2, *(HEAD + key for key in own))])
    bags: list[list[list[torch.Tensor]]] = []  # for each rank and key
    of_weights: list[list[list[torch.Tensor]]] = []
    owns, headers, messages = [], [], []
    for rank, batch in enumerate(case.batches):
        sizes = torch.randint(case.longest + 1, (case.keys, batch))
        bags.append([[torch.randint(1 << 30, (int(n),), dtype=case.ids) for n in row] for row in sizes])
        of_weights.append([[torch.randn(len(bag)) for bag in row] for row in bags[-1]])
        none, bad = torch.empty(0, dtype=case.ids), case.bad if rank == 0 else ""
        before, after = (3 * (bad == side) for side in ("before", "after"))
        ids = [bag for row in bags[-1] for bag in row]
        values = torch.cat([none.new_full((before,), PATTERN), *ids, none, none.new_full((after,), PATTERN)])
        weights = torch.cat([torch.empty(0), *(w for row in of_weights[-1] for w in row)])
        lengths = sizes.to(case.counts).flatten()
        begin = before or 3 * (bad == "late")
        offsets = begin + torch.cat([torch.zeros(1), sizes.flatten().cumsum(0)]).to(case.counts)
        if bad in ("negative", "huge", "sum"):
            lengths[1] = {"negative": -1, "huge": 1 << 30, "sum": int(lengths[1]) + 1}[bad]
        own = torch.full((HEAD + case.keys + 1,), PATTERN)
        bounds = offsets if case.offsets else None
        headers.append(header(lengths, bounds, case.keys, batch, values, index, own))
        owns.append(own)
        bits = 8 * case.ids.itemsize
        assert own[:HEAD].tolist() == [bool(bad), bits, batch]
        if not case.bad:
            assert own[HEAD:].tolist() == [*sizes.sum(1).tolist(), 0]
            item = case.ids.itemsize // 4 + case.weighted
            sent = [sum(int(sizes[key].sum()) * item + batch for key in own) for own in case.features]
            given = weights if case.weighted else None
            message = pack(values, lengths, given, own, pieces, batch, sum(sent))
            messages.append(message.split(sent))
    of_headers = [one.split([HEAD + len(own) for own in case.features]) for one in headers]
    for rank, features in enumerate(case.features):
        arrived = torch.stack([one[rank] for one in of_headers])
        assert arrived[:, 0].tolist() == [bool(case.bad), *[0] * (world - 1)]
        if case.bad or not features:
            continue
        rows = [[bags[source][key] for source in range(world)] for key in features]
        ids = torch.cat([torch.empty(0, dtype=case.ids), *(bag for row in rows for one in row for bag in one)])
        ends = [0]
        for row in rows:
            for one in row:
                for bag in one:
                    ends.append(ends[-1] + len(bag))
        numbers = torch.cat([arrived.flatten(), owns[rank]])
        received = torch.cat([of_rank[rank] for of_rank in messages])
        sizes_in = world, len(features), len(ids), len(ends) - 1
        values, offsets, weights = unpack(received, numbers, *sizes_in, case.ids, case.weighted)
        assert (values.dtype, values.tolist()) == (case.ids, ids.tolist())
        assert offsets.tolist() == ends
        if weights is not None:
            of_bags = [w for key in features for source in range(world) for w in of_weights[source][key]]
            torch.testing.assert_close(weights, torch.cat([torch.empty(0), *of_bags]), rtol=0, atol=0)


def play_boxes(case: Boxed) -> None:
    from weft.kernels import input_dist as device_code
    from weft.kernels.signals import R_PEER, R_STATUS, R_WANTED, RECORD_WORDS
    from weft.runtime.cuda import input_dist
    from weft.runtime.cuda.input_dist import Boxes, Pieces, header, pack, unpack

    input_dist._PROGRAMS = 8
    input_dist._BAGS, input_dist._SUM, input_dist._COUNT = case.sizes
    head, world = device_code.HEAD, len(case.features)
    keys = 1 + max(key for own in case.features for key in own)
    flat = [key for own in case.features for key in own]
    pieces = Pieces(*torch.tensor([flat, [rank for rank, own in enumerate(case.features) for _ in own]]))
    index = torch.tensor([word for own in case.features for word in (0, 1, 2, *(head + key for key in own))])
    none = torch.empty(0, dtype=case.ids)
    words = case.ids.itemsize // 4 + case.weighted
    box = keys * case.batch * (case.longest * words + 1)
    own_boxes = [torch.full((2 * world * box + 1,), PATTERN, dtype=torch.int32) for _ in range(world)]
    addresses = torch.tensor([one.data_ptr() for one in own_boxes])
    records = torch.zeros(world, RECORD_WORDS, dtype=torch.int64)
    for number in range(case.calls):
        bags, of_weights, headers, owns = [], [], [], []
        state = torch.full((1,), number)
        boxes = [Boxes(own_boxes[rank], addresses, state, records[rank], box, rank) for rank in range(world)]
        for rank in range(world):
            is_wrong = case.wrong if rank == 1 else ""
            batch = case.batch - (is_wrong == "OTHER_BATCH")
            ids_of = torch.int32 if is_wrong == "OTHER_BITS" else case.ids
            sizes = torch.randint(case.longest + 1, (keys, batch))
            bags.append([[torch.randint(1 << 30, (int(n),), dtype=case.ids) for n in row] for row in sizes])
            of_weights.append([[torch.randn(len(bag)) for bag in row] for row in bags[-1]])
            ids = [bag for row in bags[-1] for bag in row]
            values = torch.cat([none, *ids, none.new_full((case.unused,), PATTERN)]).to(ids_of)
            weights = torch.cat([torch.empty(0), *(w for row in of_weights[-1] for w in row), torch.zeros(case.unused)])
            lengths = sizes.flatten().to(torch.int32)
            if is_wrong == "REFUSED":
                lengths[0] = -1
            own = torch.full((head + keys + 1,), PATTERN)
            headers.append(header(lengths, None, keys, batch, values, index, own, True))
            pack(values, lengths, weights if case.weighted else None, own, pieces, batch, 0, boxes[rank])
            owns.append(own)
        state.fill_(number + 1)
        of_headers = [one.split([head + len(own) for own in case.features]) for one in headers]
        for rank, features in enumerate(case.features):
            if not features:
                continue
            rows = [[bags[source][key] for source in range(world)] for key in features]
            ids = torch.cat([none, *(bag for row in rows for one in row for bag in one)])
            ends = torch.tensor([0, *(len(bag) for row in rows for one in row for bag in one)]).cumsum(0)
            room = max(0, len(ids) + case.room)
            arrived = torch.stack([one[rank] for one in of_headers])
            sizes_in = world, len(features), room, world * len(features) * case.batch
            values, offsets, weights = unpack(none, arrived, *sizes_in, case.ids, case.weighted, boxes[rank])
            if case.wrong:
                assert not offsets.any()
                reason = getattr(device_code, case.wrong)
                assert (int(records[rank, R_STATUS]), int(records[rank, R_WANTED])) == (device_code.BAD_BATCH, reason)
                assert case.wrong == "TOO_MANY" or int(records[rank, R_PEER]) == 1
                continue
            assert not records.any()
            assert values[: len(ids)].tolist() == ids.tolist()
            assert offsets.tolist() == ends.tolist()
            if weights is not None:
                of_bags = [w for key in features for source in range(world) for w in of_weights[source][key]]
                assert torch.equal(weights[: len(ids)], torch.cat([torch.empty(0), *of_bags]))
    assert all(int(one[-1]) == PATTERN for one in own_boxes)


def play_exchange(case: Exchanged) -> None:
    from weft.kernels.signals import POISON, R_PEER, R_STATUS, RECORD_WORDS
    from weft.runtime.cuda.headers import launch_exchange

    world = len(case.words)
    regions = torch.full((world, world * (1 + 2 * case.box) + 1), PATTERN)
    regions[:, :world] = 0
    regions_at = torch.tensor([region.data_ptr() for region in regions])
    starts = torch.tensor([0, *case.words]).cumsum(0)
    records = torch.zeros(world, RECORD_WORDS, dtype=torch.int64)
    for number in range(case.calls):
        sent = [torch.randint(1 << 40, (sum(case.words),)) for _ in range(world)]
        if case.poisoned is not None:
            regions[case.poisoned, :world] = POISON
        # In the first round, ranks cannot wait for headers of ranks that run later. The second round repeats the call.
        for wait in (False, True) if case.poisoned is None else (True,):
            for rank in range(world) if case.poisoned is None else [case.poisoned]:
                state, words = torch.full((1,), number), case.words[rank]
                arrived = torch.full((world * words + 1,), PATTERN)
                given = sent[rank], starts, regions_at, state, records[rank], arrived
                launch_exchange(*given, case.box, 60.0, rank, world, wait)
                assert int(state) == number + 1
                if not wait or case.poisoned is not None:
                    continue
                wanted = torch.cat([one.split(case.words)[rank] for one in sent])
                assert arrived.tolist() == [*wanted.tolist(), PATTERN]
    assert (regions[:, -1] == PATTERN).all()
    assert records[:, R_STATUS].tolist() == [int(rank == case.poisoned) for rank in range(world)]
    assert not records[:, R_PEER].any() or case.poisoned is not None


if __name__ == "__main__":
    distributions = {name: lambda case=case: play(case) for name, case in CASES.items()}
    exchanges = {name: lambda case=case: play_exchange(case) for name, case in EXCHANGES.items()}
    play_all(distributions | exchanges | {name: lambda case=case: play_boxes(case) for name, case in BOXES.items()})
