"""A step's kernel, which GPUs run, and its tiles, which all other executors run, do the same.

This is checked for every candidate, with invented sizes, against the documentation of each kernel
(`weft.schedule.kernels`).
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from support.slow import slow
from test_schedule_embedding import PROBLEMS

from weft.builders import AllToAllMatmul, EmbeddingAllToAll, MatmulAllToAll, NotApplicableError, candidates
from weft.builders import embedding_all_to_all as slices
from weft.builders.embedding_all_to_all import units_of
from weft.builders.problems.experts import ExpertsProblem
from weft.hw import load_machine
from weft.schedule import Compute, Copy, Draft, Expr, Index, Schedule, Set, Step, Tiles, value
from weft.schedule.kernels import (
    GroupedMatmul,
    OnlyExpertMatmul,
    Permute,
    PooledSlices,
    ReturningMatmul,
    SortedMatmul,
    TileKernel,
)
from weft.schedule.steps import substitute
from weft.schedule.text import from_json, to_json
from weft.sim import simulate
from weft.sim.machines import model_of

K = 8


def tiles_of(schedule: Schedule, rank: int) -> list[Tiles]:
    return [s for lane in schedule.of_rank(rank, expected=False) for s in lane.steps if isinstance(s, Tiles)]


def dispatches(
    world: int, experts: int, exact: bool, problem: type[ExpertsProblem] = AllToAllMatmul
) -> Iterator[tuple[str, Schedule]]:
    p = problem(world, experts, (12,) * world, 16, K, "bf16", most=20, exact=exact)
    for candidate in candidates(p):
        with contextlib.suppress(NotApplicableError):
            yield candidate.name, candidate.build()


Segment = tuple[str, int, int, str, int, int, int, str, int, bool]
"""A segment: (y, row of y, number of rows, x, row of x, column of x, number of columns, weights, row of the weights,
True if it adds to y).
"""


def by_kernel(kernel: GroupedMatmul, counts: list[list[int]], rank: int, k: int) -> list[Segment]:
    """Return the segments according to the docstring of `weft.kernels.grouped_matmul`, for the columns of `kernel`."""
    world, mine = len(counts), rank * kernel.experts
    found: list[Segment] = []
    for turn, expert in itertools.product(range(kernel.n_sources), range(kernel.n_experts)):
        source, expert = (rank + kernel.first_source + turn) % world, kernel.first_expert + expert
        y = sum(counts[s][mine + e] for s in range(world) for e in range(expert))
        y += sum(counts[s][mine + expert] for s in range(source))
        slot = (source - rank - 1) % world * kernel.slot_rows
        x, block = (kernel.tokens, sum(counts[rank][:mine])) if source == rank else (kernel.inbox, slot)
        first = block + sum(counts[source][mine : mine + expert])
        operands = (x, first, kernel.first_k, kernel.n_k, kernel.weights, expert * k + kernel.first_k)
        found.append((kernel.y, y, counts[source][mine + expert], *operands, kernel.adds))
    return sorted(found)


def by_sorted_kernel(kernel: SortedMatmul, counts: list[list[int]], rank: int, k: int) -> list[Segment]:
    """Return the segments according to the docstring of `SortedMatmul`: an expert's rows are at the same place in x and
    y.
    """
    mine = rank * kernel.experts
    of_expert = [sum(of_source[mine + e] for of_source in counts) for e in range(kernel.experts)]
    its = range(kernel.first_expert, kernel.first_expert + kernel.n_experts)
    firsts = [sum(of_expert[:e]) for e in range(kernel.experts)]
    return sorted(
        (kernel.y, firsts[e], of_expert[e], kernel.x, firsts[e], 0, k, kernel.weights, e * k, False) for e in its
    )


def require_sorted(step: Tiles, counts: list[list[int]], rank: int, inbox: str, most: int) -> None:
    """Check that the tiles copy each source's rows for each expert from their place of arrival to their place in expert
    order.
    """
    held, world, experts = {"counts": tuple(itertools.chain(*counts))}, len(counts), len(counts[0]) // len(counts)
    mine, found, wanted = rank * experts, [], []
    tiles = [substitute(step.body, {**held, step.index: number}) for number in range(value(step.extent))]
    for copy in itertools.chain(*tiles):
        assert isinstance(copy, Copy)
        found.append((copy.dst.row, copy.src.buffer, copy.src.row, copy.src.rows))
        assert (copy.dst.rows, copy.src.at, copy.dst.at) == (copy.src.rows, rank, rank)
    at = 0
    for expert, source in itertools.product(range(experts), range(world)):
        rows = counts[source][mine + expert]
        slot = (source - rank - 1) % world * most
        buffer, block = ("tokens", sum(counts[rank][:mine])) if source == rank else (inbox, slot)
        wanted.append((at, buffer, block + sum(counts[source][mine : mine + expert]), rows))
        at += rows
    assert set(found) <= set(wanted)
    assert len(found) == value(step.extent) * world


def by_tiles(step: Tiles, held: dict[str, Any]) -> list[Segment]:
    found: list[Segment] = []
    for number in range(value(step.extent)):
        for gemm in substitute(step.body, {**held, step.index: number}):
            assert isinstance(gemm, Compute)
            x, w = gemm.inputs
            assert gemm.op == "matmul"
            assert (x.rows, x.cols) == (gemm.out.rows, w.rows)
            assert (gemm.out.col, w.col) == (0, 0)
            operands = (x.buffer, x.row, x.col, x.cols, w.buffer, w.row)
            found.append((gemm.out.buffer, gemm.out.row, gemm.out.rows, *operands, gemm.accumulate))
    return sorted(found)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("world", "experts"), [(2, 1), (2, 8), (3, 2), slow(4, 3), slow(8, 4)])
def test_grouped_matmuls(world: int, experts: int, exact: bool) -> None:
    draw = random.Random(world)
    counts = [[draw.randint(0, 9) for _ in range(world * experts)] for _ in range(world)]
    held = {"counts": tuple(itertools.chain(*counts))}
    for name, schedule in dispatches(world, experts, exact):
        schedule = from_json(to_json(schedule))
        for rank in (0, world - 1):
            done: list[tuple[int, int, int]] = []
            for step in tiles_of(schedule, rank):
                if name.startswith("dispatch_sorted") and isinstance(step.kernel, Permute):
                    require_sorted(step, counts, rank, "inbox", 20)
                if isinstance(kernel := step.kernel, SortedMatmul):
                    assert by_sorted_kernel(kernel, counts, rank, K) == by_tiles(step, held), (name, rank)
                    its = range(kernel.first_expert, kernel.first_expert + kernel.n_experts)
                    done += itertools.product(range(world), its, range(K))
                if not isinstance(kernel, GroupedMatmul):
                    continue
                assert kernel.counts == "counts"
                assert by_kernel(kernel, counts, rank, K) == by_tiles(step, held), (name, rank)
                turns = range(kernel.first_source, kernel.first_source + kernel.n_sources)
                its = range(kernel.first_expert, kernel.first_expert + kernel.n_experts)
                segments = {(turn % world, expert) for turn in turns for expert in its}
                before = {(turn, expert) for turn, expert, _ in done}
                assert segments <= before if kernel.adds else not segments & before, (name, rank)
                of_k = range(kernel.first_k, kernel.first_k + kernel.n_k)
                done += [(*segment, k) for segment in segments for k in of_k]
            everything = [*itertools.product(range(world), range(experts), range(K))]
            assert sorted(done) == ([] if name == "serial" else everything), name


def test_other_tiles_of_a_grouped_matmul_are_noticed() -> None:
    counts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    held = {"counts": tuple(itertools.chain(*counts))}
    schedule = next(found for name, found in dispatches(3, 2, True) if "rest=each" in name)
    step = tiles_of(schedule, 1)[1]
    kernel, (gemm,) = step.kernel, step.body
    assert isinstance(kernel, GroupedMatmul)
    assert isinstance(gemm, Compute)
    assert by_kernel(kernel, counts, 1, K) == by_tiles(step, held)
    others: tuple[dict[str, Any], ...] = (
        {"slot_rows": 21}, {"first_source": 1}, {"n_sources": 2}, {"n_experts": 1}, {"first_expert": 1, "n_experts": 1}, {"y": "z"},
        {"first_k": 1}, {"n_k": 7}, {"adds": True},
    )  # fmt: skip
    for other in others:
        assert by_kernel(replace(kernel, **other), counts, 1, K) != by_tiles(step, held), other
    elsewhere = replace(step, body=(replace(gemm, out=replace(gemm.out, row=gemm.out.row + 1)),))
    assert by_kernel(kernel, counts, 1, K) != by_tiles(elsewhere, held)


def back_by_kernel(kernel: ReturningMatmul, counts: list[list[int]], rank: int, k: int) -> list[tuple[int, Segment]]:
    """Return (rank whose memory is written, segment) for each segment of `ReturningMatmul`.

    This follows the docstring of `weft.kernels.grouped_matmul`. counts: the arrived rows of each source; below them,
    the rows of this rank's tokens at each rank.
    """
    world = len(counts) // 2
    came, given = counts[:world], counts[world:]
    found: list[tuple[int, Segment]] = []
    for turn, expert in itertools.product(range(kernel.n_sources), range(kernel.n_experts)):
        source, expert = (rank + kernel.first_source + turn) % world, kernel.first_expert + expert
        x = sum(of_source[e] for of_source in came for e in range(expert)) + sum(came[s][expert] for s in range(source))
        slot = (source - rank - 1) % world * kernel.slot_rows
        at = rank if source == rank else value(kernel.at)
        y, block = (kernel.y, sum(map(sum, given[:rank]))) if source == rank else (kernel.outbox, slot)
        row = block + sum(came[source][:expert])
        found.append((at, (y, row, came[source][expert], kernel.h, x, 0, k, kernel.weights, expert * k, False)))
    return sorted(found)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("world", "experts"), [(2, 1), (2, 8), (3, 2), slow(4, 3), slow(8, 4)])
def test_returning_matmuls(world: int, experts: int, exact: bool) -> None:
    draw = random.Random(world)
    counts = [[draw.randint(0, 9) for _ in range(experts)] for _ in range(2 * world)]
    for name, schedule in dispatches(world, experts, exact, MatmulAllToAll):
        schedule = from_json(to_json(schedule))
        for rank in (0, world - 1):
            counts[world + rank] = counts[rank]  # rows that stay on this rank are for its own experts
            held = {"counts": tuple(itertools.chain(*counts))}
            done: list[tuple[int, int]] = []
            for step in tiles_of(schedule, rank):
                if isinstance(kernel := step.kernel, OnlyExpertMatmul):
                    (found_one,), rows = by_tiles(step, held), sum(map(sum, counts[:world]))
                    assert found_one == (kernel.made, 0, rows, kernel.h, 0, 0, K, kernel.weights, 0, False)
                    assert (name, kernel.counts, experts) == ("combine_by_expert[chunks=1,by=kernel]", "counts", 1)
                    assert schedule.buffer(kernel.made).rows == kernel.rows + (world - 1) * 20
                    done += itertools.product(range(world), range(experts))
                if not isinstance(kernel, ReturningMatmul):
                    continue
                assert kernel.counts == "counts"
                ats = {value(gemm.out.at) for gemm in step.body if isinstance(gemm, Compute)}
                found = back_by_kernel(kernel, counts, rank, K)
                assert [segment for _, segment in found] == by_tiles(step, held), (name, rank)
                assert {at for at, _ in found} == ats, (name, rank)
                assert ats == {(rank + kernel.first_source) % world} if "by=store" in name else {rank}, (name, rank)
                turns = range(kernel.first_source, kernel.first_source + kernel.n_sources)
                its = range(kernel.first_expert, kernel.first_expert + kernel.n_experts)
                done += [(turn % world, expert) for turn in turns for expert in its]
            everything = [(turn, expert) for turn in range(world) for expert in range(experts)]
            assert sorted(done) == ([] if name == "serial" else everything), name


def stored(body: tuple[Step, ...]) -> tuple[Index, Index, Index]:
    """Return the final rank, column and width of a tile's vectors."""
    *_, last = (step for step in body if isinstance(step, Copy | Compute))
    region = last.dst if isinstance(last, Copy) else last.out
    return region.at, region.col, region.cols


@pytest.mark.parametrize("transport", ["direct", "put"])
@pytest.mark.parametrize("order", ["remote_first", "natural"])
@pytest.mark.parametrize("p", PROBLEMS)
def test_pooled_slices(transport: str, order: Any, p: EmbeddingAllToAll) -> None:
    ranks = range(p.world_size)
    for slice_size, rank in itertools.product((1, 2, 5), ranks):
        schedule = from_json(to_json(getattr(slices, transport)(p, slice_size=slice_size, order=order)))
        tiles = tiles_of(schedule, rank)
        assert {step.kernel for step in tiles} <= {PooledSlices(transport, order, slice_size)}  # type: ignore[arg-type]
        wanted, found = [], []
        for to in (
            [*(r % p.world_size for r in range(rank + 1, rank + p.world_size)), rank]
            if order == "remote_first"
            else ranks
        ):
            units = units_of(p.slots[rank], slice_size)
            wanted += [(to, unit.column, unit.width) for _ in range(p.batch_sizes[to]) for unit in units]
        for step in tiles:
            bodies = [step.tile(number) for number in range(value(step.extent))]
            found += [stored(body) for body in bodies]
            staged = transport == "put" and value(stored(bodies[0])[0]) != rank
            kinds = [Compute, Copy, Set] if staged else [Compute]
            assert all([type(one) for one in body] == kinds for body in bodies)
        assert found == wanted, (slice_size, rank)


@dataclass(frozen=True)
class OfOneUnit(TileKernel):
    kind: ClassVar[str] = "made up: of one unit"
    unit_per_tile: ClassVar[bool] = True


@dataclass(frozen=True)
class OfSeveralUnits(OfOneUnit):
    kind: ClassVar[str] = "made up: of several units"
    least_part: ClassVar[int] = 512


def test_units_share_a_tile_only_if_the_kernel_says_so() -> None:
    """64 tiles are slower on 64 units than on twice as many."""
    us, tiles, k = [], 64, 8192
    for kernel in (OfOneUnit(), OfSeveralUnits()):
        d = Draft("tiles", 1)
        x, w = d.buffer("x", 128, k, "bf16", "input"), d.buffer("w", k, 128 * tiles, "bf16", "input")
        cols, y = (128 * Expr("t"), 128), d.buffer("y", 128, 128 * tiles, "bf16", "output")
        step = Compute("matmul", y.part(cols=cols), (x.part(), w.part(cols=cols)))
        d.lane("compute").tiles(kernel, "t", tiles, step)
        us.append(simulate(d.schedule(), model_of(load_machine("h100"), 1)).end_us)
    assert us[0] > 1.5 * us[1]
