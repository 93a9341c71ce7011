"""The grouped matmul kernel under Triton's interpreter, without a GPU. One process plays one rank after the exchange.

Cheapest first: offsets; then launches in one piece and in parts against float64, with tensor maps and with pointers.
Rows of y outside of the launched segments, memory around y, and unused rows of the slots (all NaN) must not change.
Then launches that accumulate over pieces of k, as in schedules; tables that promise more rows than there are; refused
arguments. See `tests/support/interpreted.py`.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grouped_matmul_rank import NAN, Case, Rank, same
from support.interpreted import play_all, wrong_in

from weft.builders import AllToAllMatmul, MatmulAllToAll, named
from weft.schedule import Tiles

CASES: dict[str, Case] = {
    "one rank": Case(1, 3),
    "one rank, one expert": Case(1, 1, n=16),
    "two ranks": Case(2, 4),
    "two ranks, bf16": Case(2, 4, dtype=torch.bfloat16),
    "two ranks, fp32": Case(2, 4, dtype=torch.float32),
    "three ranks": Case(3, 2),
    "five ranks": Case(5, 3, k=8, n=8),
    "many experts": Case(2, 19, k=8, n=8),
    "transposed weights": Case(2, 3, transposed=True),
    "stored in halves": Case(3, 2, parts=2),
    "stored in halves, transposed weights": Case(2, 2, n=72, parts=2, transposed=True, dtype=torch.bfloat16),
    "K and N that fill no block": Case(2, 3, k=40, n=40, dtype=torch.bfloat16),
    "awkward K and N": Case(2, 2, k=52, n=33),
    "awkward K and N, bf16": Case(2, 3, k=50, n=33, dtype=torch.bfloat16),
    "awkward K and N, fp32": Case(2, 3, k=50, n=33, dtype=torch.float32),
    "awkward K and N, transposed weights": Case(2, 3, k=37, n=70, transposed=True),
    "one column, one K": Case(2, 2, k=1, n=1, block_n=16),
    "one expert takes all": Case(2, 3, rows="one takes all"),
    "whole tiles": Case(2, 3, rows="whole tiles"),
    "own rows are none": Case(3, 2, rows="only peers send"),
    "no rows": Case(2, 3, rows="none"),
    "tokens with strides": Case(2, 3, tokens="strided"),
    "misaligned tokens": Case(2, 3, tokens="misaligned"),
    "transposed products": Case(2, 4, swap=True),
    "transposed products in parts": Case(
        2, 3, k=200, swap=True, splits=3, per_sm=5, transposed=True, dtype=torch.bfloat16
    ),
    "tiles in parts, in two rounds": Case(1, 1, k=96, rows="four tiles", splits=4, rounds=2, per_sm=3, n=32),
}


def play(case: Case) -> None:
    """Check launches on the first and the last rank: all rows at once; own rows, then peers' rows; each source and half
    of the experts separately.
    """
    for rank in sorted({0, case.world_size - 1}):
        held = Rank(case, rank, seed=rank)
        whole = held.launch({})
        held.check(whole)
        assert same(held.launch({"merged": True}), whole), "other bits in tiles with rows of all sources"
        own, peers = held.launch({"n_sources": 1}), held.launch({"first_source": 1})
        held.check(own, lambda source, expert, rank=rank: source == rank)
        held.check(peers, lambda source, expert, rank=rank: source != rank)
        assert same(own.where(~own.isnan(), peers), whole), (
            "own rows and peers' rows by themselves are not the same bits"
        )
    half = case.experts // 2
    held.check(held.launch({"first_expert": half}), lambda source, expert: expert >= half)
    held.check(held.launch({"first_expert": half, "merged": True}), lambda source, expert: expert >= half)
    by_source = [
        {"first_source": i, "n_sources": 1, "first_expert": first, "n_experts": count}
        for i in range(case.world_size)
        for first, count in ((0, half), (half, case.experts - half))
    ]
    assert same(held.launch(*by_source), whole)


def play_columns(case: Case) -> None:
    """Check launches that accumulate over pieces of k: two pieces on the first rank, three on the last.

    Either all sources are cut into pieces, or only the peers' rows. Sums are fp32 until they are rounded at the end of
    a launch.
    """
    k = case.k
    for rank, cuts in ((0, (0, k // 2 // 8 * 8, k)), (case.world_size - 1, (0, k // 3, k // 3 + 1, k))):
        pieces = [(a, b - a) for a, b in itertools.pairwise(cuts) if a < b]
        steps = [{"k": piece, "adds": s > 0} for s, piece in enumerate(pieces)]
        held = Rank(case, rank, seed=rank)
        y = held.launch(*steps)
        held.check(y, added=len(steps) - 1)
        by_source = [{**step, "first_source": i, "n_sources": 1} for step in steps for i in range(case.world_size)]
        assert same(held.launch(*by_source), y), "other bits by source"
        rest = [{**step, "first_source": 1} for step in steps]
        held.check(held.launch({"n_sources": 1}, *rest), added=len(steps) - 1)


def play_columns_without_room() -> None:
    """Repeat `play_too_many_rows` and `play_absurd_counts` with pieces of k."""
    for case in (Case(2, 3), Case(2, 3, n=33)):
        steps: list[dict[str, Any]] = [{"k": (0, 16)}, {"k": (16, 16), "adds": True}]
        held = Rank(case, 1, 5)
        held.check(held.launch(*steps, y_rows=int(held.counts.sum()) // 2), added=1)
        held.counts[0, 1], held.counts[1, 2], held.splits[2] = 150, 2**40, 2**33
        held.launch(*steps, y_rows=200)


def play_schedule() -> None:
    """Run the launches that the GPU executor makes from FiCCO's schedules by columns."""
    from weft.runtime.cuda.scratch import Scratch
    from weft.runtime.cuda.tile_kernels import GroupedMatmulCall

    for case in (Case(3, 2, k=40, n=16, dtype=torch.bfloat16), Case(2, 2, k=21, n=33, dtype=torch.float32)):
        held = Rank(case, 1, 3)
        w, e = case.world_size, case.experts
        counts = torch.zeros(w, w * e, dtype=torch.int64)
        counts[:, e : 2 * e], counts[1] = held.counts, held.splits
        dtype = "bf16" if case.dtype == torch.bfloat16 else "fp32"
        p = AllToAllMatmul(w, e, (held.slot_rows,) * w, case.n, case.k, dtype, most=held.slot_rows)
        for start, gemms in itertools.product(("uniform", "hetero"), ("fused", "unfused")):
            schedule = named(p, f"ficco_2d[start={start},gemms={gemms},steps=3,by=kernel]").build()
            own, comm = {"counts": counts, "inbox": held.inbox}, SimpleNamespace(world_size=w)
            context: Any = SimpleNamespace(schedule=schedule, rank=1, own=own, comm=comm)
            regions: Any = None  # not needed by these launches
            y = torch.full((int(held.counts.sum()) + 5, case.n), NAN, dtype=case.dtype)
            tensors = {"tokens": held.tokens, "w": held.w.flatten(0, 1), "y": y}
            steps = [step for lane in schedule.of_rank(1, expected=False) for step in lane.steps]
            launches = [
                GroupedMatmulCall(context, regions, step.kernel, 20.0, 0, Scratch(), 0)
                for step in steps
                if isinstance(step, Tiles)
            ]
            for launch in launches:
                launch(tensors, [])
            held.check(y, added=2)


def play_only_expert() -> None:
    """Multiply the rows of a rank's only expert: from a tensor with few more rows, by torch, and with many more rows, by the
    grouped kernel.
    """
    from weft.runtime.cuda.scratch import Scratch
    from weft.runtime.cuda.tile_kernels import OnlyExpertCall

    for transposed, dtype in ((False, "bf16"), (True, "bf16"), (False, "fp32")):
        p = MatmulAllToAll(2, 1, (12, 12), 24, 40, dtype, most=20, exact=False)
        schedule = named(p, "combine_by_expert[chunks=1,by=kernel]").build()
        g, kind = torch.Generator().manual_seed(1), torch.bfloat16 if dtype == "bf16" else torch.float32
        w = torch.randn(1, p.k, p.n, generator=g).to(kind)
        w = w.mT.contiguous().mT if transposed else w
        own = {"counts": torch.tensor([[7], [5], [3], [4]]), "made": (made := torch.full((60, p.n), NAN, dtype=kind))}
        context: Any = SimpleNamespace(schedule=schedule, rank=1, own=own, comm=SimpleNamespace(world_size=2))
        (step,) = [
            step for lane in schedule.of_rank(1, expected=False) for step in lane.steps if isinstance(step, Tiles)
        ]
        call = OnlyExpertCall(context, step.kernel, Scratch())  # type: ignore[arg-type]
        for rows, by_torch in ((15, True), (16, False), (50, False), (12, True)):
            h = torch.ones(rows, p.k, dtype=kind)
            h[:12] = torch.randn(12, p.k, generator=g).to(kind)
            made.fill_(NAN)
            call({"h": h, "w": w if transposed else w.flatten(0, 1)}, [])
            torch.testing.assert_close(made[:12].double(), h[:12].double() @ w[0].double(), rtol=2**-7, atol=1e-3)
            assert int(made.isfinite().all(1).sum()) == (rows if by_torch else 12), "rows that were multiplied"


def play_failed() -> None:
    """Pass the counts of a group that has failed, in the first launch or between two launches. y must be NaN."""
    for case in (Case(2, 3), Case(2, 3, n=33)):
        for adds in (False, True):
            held = Rank(case, 0, 6)
            held.counts[:] = -1
            assert held.launch({"adds": adds}).isnan().all()
        held = Rank(case, 0, 6)
        y = torch.zeros(int(held.counts.sum()), case.n, dtype=case.dtype)
        how: dict[str, Any] = {"rank": 0, "slot_rows": held.slot_rows}
        from weft.runtime.cuda import grouped_matmul

        config = grouped_matmul.Config(16, 32, 16, 2, 4, 2)
        grouped_matmul.launch(held.tokens, held.inbox, held.w, y, held.counts, held.splits, config=config, **how)
        assert not y.isnan().any()
        failed = torch.full_like(held.counts, -1)
        grouped_matmul.launch(held.tokens, held.inbox, held.w, y, failed, held.splits, config=config, adds=True, **how)
        assert y.isnan().all()


def play_back(case: Case) -> None:
    """Check launches with `back` on the first and the last rank, in one launch and in parts."""
    half = case.experts // 2
    for rank in sorted({0, case.world_size - 1}):
        held = Rank(case, rank, seed=rank)
        y, outbox = held.launch_back()
        held.check_back(y, outbox)
        merged = held.launch_back({"merged": True})
        assert same(merged[0], y), "other bits in tiles with rows of all sources"
        assert same(merged[1], outbox), "other bits in tiles with rows of all sources"
        held.check_back(*held.launch_back({"n_sources": 1}), lambda source, expert, rank=rank: source == rank)
        for part in ({"first_expert": half}, {"first_expert": half, "merged": True}):
            held.check_back(*held.launch_back(part), lambda source, expert: expert >= half)
        by_source = [
            {"first_source": i, "n_sources": 1, "first_expert": first, "n_experts": count}
            for i in [*range(1, case.world_size), 0]
            for first, count in ((0, half), (half, case.experts - half))
        ]
        again = held.launch_back(*by_source)
        assert same(again[0], y), "other bits by source"
        assert same(again[1], outbox), "other bits by source"


def play_back_without_room() -> None:
    """Pass an outbox and a y with fewer rows than the tables promise. Rows that fit must be right, and nothing else may
    be written.
    """
    for case in (Case(3, 3), Case(3, 3, n=33)):
        held = Rank(case, 1, 5)
        most = int(held.counts.sum(1).max())
        held.slot_rows = most // 2
        room = {"y_rows": int(held.splits[: 2 * case.experts].sum()) - 2, "outbox_rows": most - 1}
        for part in ({}, {"merged": True}):
            held.check_back(*held.launch_back(part))
            held.check_back(*held.launch_back(part, **room))


def play_back_absurd_counts() -> None:
    """Repeat `play_absurd_counts` with `back`."""
    for case in (Case(2, 3), Case(2, 3, n=33)):
        held = Rank(case, 0, 6)
        h = torch.cat([rows for _, _, rows in held.segments()])
        held.segments = lambda h=h: [(0, 0, h)]  # type: ignore[method-assign]
        held.counts[0, 1], held.counts[1, 0], held.counts[1, 2] = -7, 150, 2**40
        held.splits[2] = 2**33
        held.launch_back(y_rows=200)
        held.launch_back({"merged": True}, y_rows=200)


def play_random() -> None:
    g = torch.Generator().manual_seed(11)
    for seed in range(8):
        world, experts, k, n, flip, parts = (
            int(torch.randint(low, high, (), generator=g))
            for low, high in ((1, 7), (1, 7), (1, 9), (1, 12), (0, 2), (1, 3))
        )
        odd = 3 * (seed % 3 == 0)
        case = Case(world, experts, 8 * k + odd, 8 * n + odd, transposed=bool(flip), parts=parts)
        held = Rank(case, seed % world, seed)
        held.check(held.launch({}))
        held.check_back(*held.launch_back())


def play_shared_tiles(seeds: range) -> None:
    """Let 2 to 8 programs share each tile of the last round. Then use the same launcher again with other rows."""
    from weft.runtime.cuda import grouped_matmul

    shared = 0
    for seed in seeds:
        case = Case(
            1 + seed % 3, 1 + seed % 4, 16 * (2 + seed) + 8 * (seed % 2), 8 * (1 + seed), transposed=seed % 2 == 0,
            parts=1 + seed % 2, splits=2 + seed % 7, per_sm=4 + seed % 3, rows="none" if seed == 9 else "uneven",
        )  # fmt: skip
        held = Rank(case, seed % case.world_size, seed)
        held.check(held.launch({"merged": seed % 2 == 0}))
        held.check_back(*held.launch_back({"merged": seed % 2 == 1}))
        launcher = grouped_matmul.GroupedMatmulLauncher(
            held.inbox, held.counts, held.splits, rank=held.rank, slot_rows=held.slot_rows, config=case.config
        )
        launcher._scratch.memory.fill_(NAN)
        results = []
        for _ in range(2):
            y = torch.full((int(held.counts.sum()) + 5, case.n), NAN, dtype=case.dtype)
            launcher.launch(held.tokens, held.w, y)
            held.check(y)
            results.append(y)
        assert same(*results)
        assert not launcher._arrived.any(), "the next launch begins with programs that have arrived"
        shared += not launcher._scratch.memory.isnan().all()
    assert shared >= len(seeds) // 2, shared


def play_too_many_rows() -> None:
    """Pass a y with fewer rows than the table promises. Rows that fit must be right, and nothing may be written beyond
    y.
    """
    for case in (Case(2, 3), Case(2, 3, n=33)):
        held = Rank(case, 1, 5)
        promised = int(held.counts.sum())
        for y_rows in (1, 16, promised // 2, promised - 1):
            held.check(held.launch({}, y_rows=y_rows))
            held.check(held.launch({"merged": True}, y_rows=y_rows))


def play_absurd_counts() -> None:
    """Pass tables that no exchange produces. Nothing outside of the tensors may be read or written, which would end the
    process.
    """
    for case in (Case(2, 3), Case(2, 3, n=33)):
        held = Rank(case, 0, 6)
        held.counts[0, 1], held.counts[1, 0], held.counts[1, 2] = -7, 150, 2**40
        held.splits[2] = 2**33
        held.launch({}, y_rows=200)
        sorted_rows = held.random(220, case.k)
        held.segments = lambda rows=sorted_rows: [(0, 0, rows)]  # type: ignore[method-assign]
        held.launch({"merged": True}, y_rows=200)


def play_refusals() -> None:
    """Check that invalid arguments are refused with their values."""
    good = Rank(Case(2, 3), 0, 1)
    wrong: dict[str, dict[str, Any]] = {
        r"pass counts \[W, 3\]": {"counts": torch.zeros(2, 4, dtype=torch.int64)},
        "int64 with contiguous rows": {"splits": good.splits.int()},
        r"slots is .*make it torch.float16 \[rows, 32\]": {"inbox": torch.zeros(9, 48, dtype=torch.float16)},
        "x is torch.float32": {"tokens": good.tokens.float()},
        "K or N must have stride 1": {"w": torch.zeros(3, 32, 96, dtype=torch.float16)[:, :, ::2]},
    }
    for message, change in wrong.items():
        held = Rank(Case(2, 3), 0, 1)
        vars(held).update(change)
        with pytest.raises(ValueError, match=message):
            held.launch({}, y_rows=100)
    with pytest.raises(ValueError, match="pass back or adds, not both"):
        good.launch({"back": True, "adds": True})
    for other in ({"adds": True}, {"n_sources": 1}):
        with pytest.raises(ValueError, match="merged=True needs adds=False and all 2 sources"):
            good.launch({"merged": True, **other})


OTHERS = {
    "random shapes": play_random,
    "tiles that programs share": lambda: play_shared_tiles(range(4)),
    "tiles that programs share, more": lambda: play_shared_tiles(range(10)),
    "more rows than y has": play_too_many_rows,
    "absurd counts": play_absurd_counts,
    "refusals": play_refusals,
    "back without room": play_back_without_room,
    "back by absurd counts": play_back_absurd_counts,
    "pieces of k without room": play_columns_without_room,
    "pieces of k in schedules": play_schedule,
    "the only expert of a rank": play_only_expert,
    "a group that has failed": play_failed,
}
# With `back`, try each value of each parameter only once: the loops over K are the same as without `back`.
BACK = (
    "tiles in parts, in two rounds",
    "transposed products in parts",
    "stored in halves",
    "awkward K and N",
    "no rows",
)
BACK_SLOW = (
    "two ranks, bf16",
    "one rank", "five ranks", "many experts", "stored in halves, transposed weights", "awkward K and N, transposed weights",
    "two ranks, fp32", "one column, one K", "one expert takes all", "own rows are none", "tokens with strides",
)  # fmt: skip
PIECES = ("awkward K and N", "no rows")  # with tensor maps: "pieces of k in schedules" and "pieces of k without room"
PIECES_SLOW = ("two ranks, bf16", "stored in halves", "awkward K and N, transposed weights", "own rows are none")
OTHERS |= {f"back, {name}": lambda name=name: play_back(CASES[name]) for name in BACK + BACK_SLOW}
OTHERS |= {f"pieces of k, {name}": lambda name=name: play_columns(CASES[name]) for name in PIECES + PIECES_SLOW}


SLOW: tuple[str, ...] = (
    "absurd counts", "pieces of k without room", "own rows are none",
    "tiles that programs share, more",
    "many experts", "five ranks", "random shapes", "awkward K and N, bf16", "awkward K and N, transposed weights",
    "awkward K and N, fp32", "stored in halves, transposed weights", "K and N that fill no block", "two ranks, fp32", "two ranks",
    "one rank, one expert", "stored in halves", "whole tiles", "three ranks", "one column, one K", "misaligned tokens",
    "tokens with strides", "one rank",
)  # fmt: skip
SLOW += tuple(f"back, {name}" for name in BACK_SLOW) + tuple(f"pieces of k, {name}" for name in PIECES_SLOW)


RUNS = {name: lambda case=case: play(case) for name, case in CASES.items()} | OTHERS


def test_interpreted() -> None:
    """Run all cases in one test, because starting a process takes as long as three cases."""
    assert wrong_in(__file__, [name for name in RUNS if name not in SLOW]) == {}


@pytest.mark.slow
def test_more_of_it_interpreted() -> None:
    assert wrong_in(__file__, SLOW) == {}


if __name__ == "__main__":
    play_all(RUNS)
