"""The kernel of an exchange of rows under Triton's interpreter: ranges of random sizes and invalid ranges, tables that differ,
flags. `tests/support/interpreted.py` says how.

The interpreter runs programs one after the other, so all flags for which they wait are set.
"""

from __future__ import annotations

import torch
from support.interpreted import drawn, play_all, wrong_in


def play(seed: int) -> None:
    import triton
    import triton.language as tl

    from weft.kernels.round_trip import round_trip_kernel
    from weft.kernels.signals import FLAG, POISONED

    g, number = drawn(seed)

    def rows_of(count: int) -> torch.Tensor:
        return torch.randint(0, 2**15, (count, width), dtype=torch.int16, generator=g)

    ranks, counts, width = number(2, 5), number(1, 4), 8 * number(1, 40)
    row, n_own = number(0, ranks), number(0, 2)
    differs = number(0, ranks) if seed % 3 == 0 else None
    poisoned = seed % 5 == 4
    expected = torch.randint(0, 4, (ranks, counts), generator=g)
    table = torch.randint(0, 4, (ranks, counts), generator=g)
    table[row] = expected[row]
    sent = torch.full((ranks, ranks, counts), -1)
    sent[:, row] = expected
    sent[row] = -1  # the kernel sends its own table to itself
    if differs == row:
        table[row, 0] += 1
    elif differs is not None:
        sent[differs, row, -1] += 1
    of_rank = expected.sum(1).tolist()
    begins = [sum(of_rank[:r]) for r in range(ranks)]
    out = torch.full((sum(of_rank) + 2, width), 7, dtype=torch.int16)
    made, inbox, peers = rows_of(30), rows_of(20), torch.full((40, width), 7, dtype=torch.int16)
    wanted, wanted_peers = out.clone(), peers.clone()
    ranges, sizes = [], []

    def add(source: torch.Tensor, target: torch.Tensor, to: int, rows: int) -> None:
        first = number(0, len(source) - rows + 1)
        is_out = target is out
        ranges.append((source.data_ptr(), len(source), target.data_ptr() * (not is_out), len(target), int(is_out)))
        sizes.append((first, to, rows))
        (wanted if is_out else wanted_peers)[to : to + rows] = -1 if poisoned else source[first : first + rows]

    n_sends, at = number(1, 4), 0
    for _ in range(n_sends):
        rows = number(0, 9)
        add(made, peers, at, rows)
        at += rows + 1
    if seed % 2:  # like sizes of a failed group
        n_sends += 1
        ranges.append(ranges[0])
        sizes.append([(-1, 0, 2), (0, -3, 2), (2**40, 0, 1), (0, 0, -5)][number(0, 4)])
    for _ in range(n_own):
        add(made, out, begins[row], of_rank[row])
    for r in range(ranks):
        if r != row or not n_own:
            add(inbox, out, begins[r], of_rank[r])
    if differs is not None:
        wanted[begins[differs] : begins[differs] + of_rank[differs]] = -1
    tables = [torch.full((ranks, ranks, counts), -1) for _ in range(ranks)]
    tables[row] = sent
    flags = torch.tensor([FLAG, FLAG, POISONED if poisoned else FLAG, 0, 0, 0])
    words = torch.tensor([flags[i:].data_ptr() for i in range(6)])
    notes, arrivals, seen = (
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
    )
    pairs = [torch.tensor([notes[i:].data_ptr(), 5 + i]) for i in range(3)]
    targets = torch.tensor([t[row].data_ptr() for t in tables])
    round_trip_kernel[(number(ranks + 1, 9),)](
        torch.tensor(ranges), len(ranges), n_sends, n_own, torch.tensor(sizes), width, targets, table, table.numel(),
        words, 2, words[3:], 2, words[2:], 1, words[5:], 1, pairs[0], 1, pairs[1], 1, pairs[2], 1, arrivals, table, 0,
        expected, sent, seen, out.data_ptr(), len(out), counts, row, ranks,
        RANGES_P2=triton.next_power_of_2(len(ranges)), FLAGS_P2=2,
        ITEM=tl.int16, BLOCK=64, ALIGN=8, WORDS=2, WIDE=1, COUNTED=tl.int16, PTX=False,
    )  # fmt: skip
    if poisoned:  # only rows that came after the failure are lost
        wanted_peers[:] = 7
        for (source, *_, is_out), (first, to, rows) in zip(ranges[:n_sends], sizes[:n_sends], strict=True):
            assert source == made.data_ptr()
            assert not is_out
            if 0 <= first <= len(made) and to >= 0 and rows > 0:
                wanted_peers[to : to + rows] = made[first : first + rows]
        if n_own and differs != row:
            first = sizes[n_sends][0]
            wanted[begins[row] : begins[row] + of_rank[row]] = made[first : first + of_rank[row]]
    assert torch.equal(peers, wanted_peers)
    assert torch.equal(out, wanted)
    assert seen.tolist() == [0 if differs is None else 1 + differs, 0]
    for r, got in enumerate(tables):
        assert torch.equal(got[row], table), r
    assert notes.tolist() == [5, 6, 7]
    assert arrivals.tolist() == [0, 0]
    assert flags.tolist() == [0, 0, 0 if not poisoned else POISONED, FLAG, FLAG, 0 if poisoned else FLAG]


def play_sends(seed: int) -> None:
    """Send rows of the caller's tensor, and wait for rows that stay where peers put them. Nothing is compared."""
    import triton.language as tl

    from weft.kernels.round_trip import round_trip_kernel
    from weft.kernels.signals import FLAG, POISONED

    g = torch.Generator().manual_seed(seed)
    width, poisoned, rows = 16, seed % 2, torch.randint(0, 9, (2,), generator=g).tolist()
    tokens = torch.randint(0, 2**15, (20, width), dtype=torch.int16, generator=g)
    inboxes, table = torch.full((2, 12, width), 7, dtype=torch.int16), torch.tensor([[5, 3, 2]])
    ranges = torch.tensor([(0, 0, inbox.data_ptr(), 12, 2) for inbox in inboxes])
    sizes = torch.tensor([(4, 2, rows[0]), (20 - rows[1], 1, rows[1])])
    counts = torch.full((3, 3, 3), 6)  # of three ranks; the kernel runs on rank 1
    flags, none = torch.tensor([FLAG, POISONED if poisoned else FLAG, 0]), torch.zeros(2, dtype=torch.int64)
    words, arrivals = torch.tensor([flags[i:].data_ptr() for i in range(3)]), torch.zeros(2, dtype=torch.int64)
    targets = torch.tensor([of_rank[1].data_ptr() for of_rank in counts])
    round_trip_kernel[(6,)](
        ranges, 2, 2, 0, sizes, width, targets, table, 3, words, 1, words[2:], 1, words[1:], 1, none, 0, none, 0, none, 0, none, 0,
        arrivals, counts[1], 9, table, table, torch.zeros(1, dtype=torch.int32), tokens.data_ptr(), 20, 0, 0, 3,
        RANGES_P2=2, FLAGS_P2=2, ITEM=tl.int16, BLOCK=64, ALIGN=8, WORDS=2, WIDE=1, COUNTED=tl.int16, PTX=False,
    )  # fmt: skip
    for inbox, (first, to, count) in zip(inboxes, sizes.tolist(), strict=True):
        assert torch.equal(inbox[to : to + count], tokens[first : first + count])
        assert (inbox[:to] == 7).all()
        assert (inbox[to + count :] == 7).all()
    for rank, of_rank in enumerate(counts):
        own = rank == 1 and poisoned
        assert of_rank.tolist() == [[-1] * 3] * 3 if own else of_rank.tolist() == [[6] * 3, table[0].tolist(), [6] * 3]
    assert flags.tolist() == [0, POISONED if poisoned else 0, FLAG]
    assert arrivals.tolist() == [0, 0]


RUNS = {str(seed): lambda seed=seed: play(seed) for seed in range(16)}
RUNS |= {f"sends {seed}": lambda seed=seed: play_sends(seed) for seed in range(6)}


def test_interpreted() -> None:
    assert wrong_in(__file__, RUNS) == {}


if __name__ == "__main__":
    play_all(RUNS)
