"""Collectives within a host, whose data travel with the rendezvous (`weft.runtime.shared_collectives`).

1. Each collective with sizes around those of a round, in every dtype, with 2 to 5 ranks of which one is late, many in a row.
   Copies are exact. Sums have the bits of a sum in the order of ranks, on all ranks.
2. Rows of unequal numbers, and calls that gloo must make because no sum has their dtype.
3. Rows for several experts, in both orders, with numbers that the receiver does not know. Calls of experts whose rows travel with
   the rendezvous give the bits of calls whose rows do not.
4. Ranks whose sizes differ although their calls look alike.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import failure_of, wait_for_failure
from support.on_ranks import assert_error, error_of, own_group
from support.slow import mostly

import weft
from weft import _core, symm
from weft.launch import Pool
from weft.runtime.collectives import all_gather_single, all_reduce_single, all_to_all_single, reduce_scatter_single
from weft.runtime.meeting import DATA_BYTES
from weft.runtime.unfused import Turn, all_gather, all_reduce, experts, experts_on_one_host, reduce_scatter
from weft.runtime.unfused.turn import turn_on

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
CPU = torch.device("cpu")


def turn_of(group: dist.ProcessGroup) -> Turn:
    turn = turn_on(group, CPU, "a test", 30.0)
    assert turn.shares_memory
    return turn


def drawn(seed: int, world: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return a tensor for each rank. Some elements are large, so that sums depend on the order."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(world, *shape, generator=generator)
    found *= torch.where(torch.rand(found.shape, generator=generator) < 0.2, 1000.0, 1.0)
    return list(found.to(dtype))


def summed(xs: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of ranks, rounded once."""
    total = xs[0] if xs[0].dtype == torch.float64 else xs[0].float()
    for x in xs[1:]:
        total = total + x
    return total.to(xs[0].dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def every_collective(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    own, rank, world = own_group(group), group.rank(), group.size()
    turn, choose = turn_of(own), random.Random(seed)
    for number in range(calls):
        dtype = choose.choice(DTYPES)
        of_round = DATA_BYTES // dtype.itemsize
        size = choose.choice(
            [0, 1, 3, 17, 1000, of_round // world, of_round, of_round + 1, 2 * of_round + choose.randrange(100)]
        )
        late, sleep_s = (
            choose.randrange(world),
            choose.choice([0.0, 0.001, 0.15]),
        )  # 0.15 s: longer than a wait in native code
        if rank == late:
            time.sleep(sleep_s)
        kind = choose.choice(["gather", "scatter", "reduce", "exchange"])
        if kind == "gather":
            xs, out = drawn(number, world, size, dtype=dtype), poisoned(world * size, dtype=dtype)
            turn.run(kind, all_gather_single, out, xs[rank].clone(), group=own)
            assert torch.equal(out, torch.cat(xs)), (kind, size, dtype)
        elif kind == "scatter":
            xs, out = drawn(number, world, world, size, dtype=dtype), poisoned(size, dtype=dtype)
            mine = xs[rank].clone()
            turn.run(kind, reduce_scatter_single, out, mine, group=own)
            assert torch.equal(out, summed(xs)[rank]), (kind, size, dtype)
            assert torch.equal(mine, xs[rank]), "the collective changes its input"
        elif kind == "reduce":
            xs = drawn(number, world, size, dtype=dtype)
            out = xs[rank].clone()
            turn.run(kind, all_reduce_single, out, group=own)
            assert torch.equal(out, summed(xs)), (kind, size, dtype)
        else:
            counts = [[choose.choice([0, min(1, size), size // 3, size]) for _ in range(world)] for _ in range(world)]
            xs = [
                one[: sum(counts[source])]
                for source, one in enumerate(drawn(number, world, world * size, 2, dtype=dtype))
            ]
            came = [counts[source][rank] for source in range(world)]
            out = poisoned(sum(came), 2, dtype=dtype)
            turn.run(kind, all_to_all_single, out, xs[rank].clone(), came, counts[rank], group=own)
            wanted = torch.cat([xs[source].split(counts[source])[rank] for source in range(world)])
            assert torch.equal(out, wanted), (kind, size, dtype, counts)


@pytest.mark.parametrize("ranks", mostly([2, 3, 4, 5], 3))
@pytest.mark.parametrize("seed", [1, 2])
def test_every_collective_in_a_row(pool: Pool, ranks: int, seed: int) -> None:
    pool.run(every_collective, seed, 40, ranks=ranks, timeout_s=120)


def of_matrices(group: dist.ProcessGroup) -> None:
    """Run the collectives of matrices with equal and unequal numbers of rows."""
    own, rank, world = own_group(group), group.rank(), group.size()
    turn = turn_of(own)
    for seed, rows in enumerate([[2] * world, [3, 0, 5, 1, 2][:world], [700] * world]):
        xs = [x[: rows[r]] for r, x in enumerate(drawn(seed, world, max(rows), 300))]
        assert torch.equal(all_gather(xs[rank], rows, rank, own, turn, "gather"), torch.cat(xs))
        wholes = drawn(seed + 10, world, sum(rows), 300)
        mine = wholes[rank].clone()
        assert torch.equal(reduce_scatter(mine, rows, rank, own, turn, "scatter"), summed(wholes).split(rows)[rank])
        assert torch.equal(all_reduce(mine, rows, rank, own, turn, "reduce"), summed(wholes))
        assert torch.equal(mine, wholes[rank]), "the collective changes its input"


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_matrices(pool: Pool, ranks: int) -> None:
    pool.run(of_matrices, ranks=ranks, timeout_s=60)


def of_other_dtypes(group: dist.ProcessGroup) -> None:
    own, rank, world = own_group(group), group.rank(), group.size()
    turn = turn_of(own)
    x = torch.full((3,), rank + 1)
    turn.run("sum", all_reduce_single, x, group=own)  # gloo makes this call
    assert x.tolist() == [world * (world + 1) // 2] * 3
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn):
        out = torch.ones(2 * world, 3).to(dtype)
        turn.run("copies", all_gather_single, out, torch.full((2, 3), rank % 2).to(dtype), group=own)
        assert out.float().tolist() == [[float(r % 2)] * 3 for r in range(world) for _ in range(2)]


def test_other_dtypes(pool: Pool) -> None:
    pool.run(of_other_dtypes, ranks=3, timeout_s=60)


def rows_of_experts(group: dist.ProcessGroup, seed: int) -> None:
    own, rank, world = own_group(group), group.rank(), group.size()
    turn, choose = turn_of(own), random.Random(seed)
    assert turn.native is not None
    for _ in range(12):
        experts, late = choose.choice([1, 2, 5]), choose.randrange(world)
        most = choose.choice([0, 3, DATA_BYTES // (8 * experts)])  # in fp32 with 3 columns: up to several rounds
        counts = [[[choose.randint(0, most) for _ in range(experts)] for _ in range(world)] for _ in range(world)]
        from_by_expert, to_by_expert = choose.choice([True, False]), choose.choice([True, False])
        places = [(target, e) for target in range(world) for e in range(experts)]

        def order(by_expert: bool, places: list[tuple[int, int]] = places) -> list[tuple[int, int]]:
            return sorted(places, key=lambda place: place[::-1]) if by_expert else places

        cells = {
            (source, target, e): torch.full((counts[source][target][e], 3), float(source * 100 + target * 10 + e))
            + torch.arange(counts[source][target][e])[:, None] / 2**14
            for source in range(world)
            for target, e in places
        }
        mine = torch.cat([cells[rank, target, e] for target, e in order(from_by_expert)])
        if rank == late:
            time.sleep(0.002)
        numbers = [n for row in counts[rank] for n in row]
        shared = _core.SharedCollective.exchange_rows(
            turn.native, mine.data_ptr(), numbers, 12, from_by_expert, to_by_expert
        )
        out = torch.empty(0)

        def ready(shared: Any = shared) -> None:
            nonlocal out
            out = torch.full((sum(shared.counts()), 3), float("nan"))
            shared.place(out.data_ptr(), out.nbytes)

        turn.carry("rows", shared, ready)
        assert shared.counts() == [n for source in range(world) for n in counts[source][rank]]
        assert torch.equal(out, torch.cat([cells[source, rank, e] for source, e in order(to_by_expert)]))


@pytest.mark.parametrize("ranks", mostly([2, 3, 5], 3))
def test_rows_of_experts(pool: Pool, ranks: int) -> None:
    pool.run(rows_of_experts, 7, ranks=ranks, timeout_s=120)


def experts_both_ways(group: dist.ProcessGroup) -> None:
    """Compare dispatch and combine whose rows travel with the rendezvous with calls whose rows do not, and with float64."""
    own, rank, world, local, k, n = own_group(group), group.rank(), group.size(), 2, 8, 6
    choose, has_room = random.Random(3), experts.has_room
    for number in range(8):
        splits = [[choose.choice([0, 1, 5, 700]) for _ in range(world * local)] for _ in range(world)]
        tokens = [drawn(number + r, 1, sum(splits[r]), k)[0] for r in range(world)]
        w, back = drawn(50, world * local, k, n), drawn(60, world * local, n, k)
        of_rank = slice(rank * local, (rank + 1) * local)
        given = torch.tensor(splits[rank])
        found = []
        for travels in (True, False):
            for module in (experts, experts_on_one_host):
                module.has_room = has_room if travels else lambda *_: False  # type: ignore[assignment]
            try:
                # The deadlines differ, so that native code does not repeat calls of the other kind.
                options: dict[str, Any] = {"group": own, "schedule": "serial", "deadline_s": 50.0 + travels}
                up, down = torch.stack(w[of_rank]), torch.stack(back[of_rank])
                h, received = weft.all_to_all_matmul(tokens[rank], up, given, return_received=True, **options)
                padded = weft.all_to_all_matmul(tokens[rank], up, given, max_rows=len(h) + 3, **options)
                y = weft.matmul_all_to_all(h, down, received, given, **options)
                again = weft.matmul_all_to_all(h, down, received, given, rows=len(y), **options)
            finally:
                experts.has_room = experts_on_one_host.has_room = has_room
            assert torch.equal(padded[: len(h)], h)
            assert torch.equal(y, again)
            found.append((h, received, y))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        parts = tokens[rank].double().split(splits[rank])
        wanted = torch.cat([x @ up.double() @ down.double() for x, up, down in zip(parts, w, back, strict=True)])
        scale = wanted.abs().max().item() if len(wanted) else 1.0
        torch.testing.assert_close(found[0][2].double(), wanted, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("ranks", mostly([2, 3, 5], 3))
def test_calls_of_experts_both_ways(pool: Pool, ranks: int) -> None:
    pool.run(experts_both_ways, ranks=ranks, timeout_s=120)


def other_tables(group: dist.ProcessGroup) -> None:
    """Let rank 1 pass a table that differs from those of its peers. Every rank refuses the call, and the group stays usable."""
    own, rank, world = own_group(group), group.rank(), group.size()
    splits, w = torch.full((2 * world,), 2), torch.ones(2, 8, 3)
    received = torch.full((world, 2), 2)

    def call(received: torch.Tensor, timeline: weft.Timeline | None = None) -> torch.Tensor:
        h = torch.full((4 * world + 1, 8), float(rank))
        return weft.matmul_all_to_all(h, w, received, splits, group=own, schedule="serial", timeline=timeline)

    right = torch.repeat_interleave(torch.arange(world), 4)[:, None].expand(-1, 3) * 8.0
    for number in range(4):
        timeline = weft.Timeline() if number % 2 else None  # native code makes no calls with a timeline
        assert torch.equal(call(received), right)
        wrong = received.clone()
        wrong[0] += torch.tensor([1, 0]) if rank == 1 else 0
        kind, text = failure_of(lambda wrong=wrong, timeline=timeline: call(wrong, timeline))
        assert (kind, "which expects 4 rows" in text) == ("RefusedError", True), text
    assert torch.equal(call(received), right)


def test_tables_that_do_not_agree_leave_the_rows(pool: Pool) -> None:
    pool.run(other_tables, ranks=3, timeout_s=60)


def wrong_arguments(group: dist.ProcessGroup) -> None:
    """Compare the error texts of wrong numbers of rows and sizes, which no rank sends."""
    exchange, shared, world = turn_of(own_group(group)).native, _core.SharedCollective, group.size()
    assert exchange is not None
    for numbers in ([], [1] * (world + 1), [1] * (world - 1) + [-1], [0] * (world * DATA_BYTES)):
        text = f"there are {len(numbers)} numbers of rows for {world} ranks: pass equally many for each rank"
        with pytest.raises(ValueError, match=text):
            shared.exchange_rows(exchange, 0, numbers, 4, False, False)
    for sent, received in (([4], [4] * world), ([4] * world, [4]), ([4] * world, [5] * world)):
        with pytest.raises(ValueError, match=f"pass two sizes for each of the {world} ranks, sent and received"):
            shared.all_to_all(exchange, 0, 0, sent, received)


def test_wrong_arguments(pool: Pool) -> None:
    pool.run(wrong_arguments, ranks=2, timeout_s=60)


def other_sizes(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """Let rank 1 send fewer rows than its peers expect."""
    own, rank, world = own_group(group), group.rank(), group.size()
    turn, counts = turn_of(own), [4] * world
    sent = [3 if rank == 1 and target != 1 else 4 for target in range(world)]
    out = torch.zeros(4 * world, 2)

    def call() -> None:
        turn.run("rows", all_to_all_single, out, torch.ones(sum(sent), 2), counts, sent, group=own)

    comm = symm.communicator(own, "cpu")
    first = failure_of(call)  # on rank 1 the call may succeed before its peers fail
    wait_for_failure(comm)
    return [first, error_of(comm.check)]


def test_rows_that_a_peer_does_not_expect(pool: Pool) -> None:
    for rank, (first, then) in enumerate(pool.run(other_sizes, ranks=3, timeout_s=60)):
        assert_error(then, "PoisonedGroupError", "which expects 32 bytes")
        if rank != 1:  # a rank may learn of the failure of its peer first
            assert first[0] in ("ValueError", "PoisonedGroupError"), first
