"""Schedules of embedding_all_to_all: they verify, survive JSON, compute the pooled sums in random legal orders, match
the operator, and have simulated times close to measured times.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from schedule_interpreter import Tensors, edited, interpret
from support.reference import tables_of
from support.slow import mostly

from weft.builders import EmbeddingAllToAll, candidates, named
from weft.builders import embedding_all_to_all as slices
from weft.embedding import EmbeddingSharding
from weft.embedding.plan import kernel_of, problem_of
from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.runtime.null import NullSchedule
from weft.schedule import Collective, Schedule, Set, Step, Tiles, Wait
from weft.schedule.kernels import PooledSlices
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify
from weft.schedule.verify.issue_order import issue_order
from weft.sim import Model, Simulated, model_of, simulate
from weft.timeline import Timeline


def problem(batch_sizes: tuple[int, ...], owners: tuple[int, ...], dims: tuple[int, ...]) -> EmbeddingAllToAll:
    """Return a problem in which slot i has dims[i] columns and belongs to rank owners[i]."""
    columns = (0, *itertools.accumulate(dims))
    slots = tuple(
        tuple((columns[i], dims[i]) for i, owner in enumerate(owners) if owner == rank)
        for rank in range(len(batch_sizes))
    )
    return EmbeddingAllToAll(len(batch_sizes), batch_sizes, slots)


MIXED = (4, 1, 8, 2, 4)
PROBLEMS = (
    problem((3,), (0, 0, 0), (4, 4, 4)),
    problem((2, 2), (0, 0, 1, 1), (4, 4, 4, 4)),
    problem((3, 1), (1, 0, 0, 1, 1), MIXED),
    problem((0, 2), (0, 0, 0, 0, 0), MIXED),
    problem((2, 1, 3), (0, 1, 2, 1, 0), MIXED),
    problem((1, 0, 2), (2, 2, 2, 0, 0), MIXED),
    problem((2, 2, 2, 2), (0, 0, 1, 1, 2, 2, 3, 3), (4,) * 8),
    problem((2, 1, 0, 3), (3, 3, 1, 0, 1), MIXED),
)


def schedules(p: EmbeddingAllToAll, slice_size: int = 2) -> dict[str, Schedule]:
    found = {"serial": slices.serial(p)}
    for order in ("remote_first", "natural"):
        found[f"direct {order}"] = slices.direct(p, slice_size=slice_size, order=order)
        found[f"put {order}"] = slices.put(p, slice_size=slice_size, order=order)
    return found


def dims_of(p: EmbeddingAllToAll) -> tuple[int, ...]:
    return tuple(dim for _, dim in sorted(slot for of_rank in p.slots for slot in of_rank))


def inputs_of(p: EmbeddingAllToAll, runs: int) -> list[list[Tensors]]:
    rng = np.random.default_rng(7)
    shapes = {b.name: (b.rows, b.cols) for b in slices.serial(p).buffers if b.role == "input"}
    weights = rng.integers(-4, 5, (shapes["tables"][0], p.columns)).astype(float)
    result = []
    for _ in range(runs):
        bags = rng.integers(0, 1000, shapes["bags"]).astype(float)
        result.append([{"bags": bags, "tables": weights}] * p.world_size)
    return result


def expected(p: EmbeddingAllToAll, tensors: Tensors, rank: int) -> np.ndarray:
    """Compute the expected result slot by slot and bag by bag."""
    first, weights = sum(p.batch_sizes[:rank]), tensors["tables"]
    out = np.zeros((p.batch_sizes[rank], p.columns))
    for number, (column, dim) in enumerate(sorted(slot for of_rank in p.slots for slot in of_rank)):
        for sample in range(p.batch_sizes[rank]):
            bag = int(tensors["bags"][first + sample, number])
            for j in range(bag % 4):
                out[sample, column : column + dim] += weights[(5 * bag + 3 * j) % len(weights), column : column + dim]
    return out


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_every_schedule_verifies_and_pools(p: EmbeddingAllToAll) -> None:
    inputs = inputs_of(p, runs=2)
    for (name, schedule), seed in itertools.product(schedules(p).items(), range(2)):
        verify(schedule)
        assert from_json(to_json(schedule)) == schedule
        for run, found in enumerate(interpret(schedule, inputs, seed, dims=dims_of(p), keep=("out",))):
            for rank, size in enumerate(p.batch_sizes):
                wanted = expected(p, inputs[run][rank], rank)
                assert np.array_equal(found[rank]["out"][:size], wanted), (name, run, rank)


@pytest.mark.parametrize("p", mostly(PROBLEMS, *PROBLEMS[::2]), ids=str)
def test_every_schedule_prints_has_an_order_and_is_simulated(p: EmbeddingAllToAll) -> None:
    for schedule in schedules(p).values():
        for text in (schedule.table(), schedule.table(rank=p.world_size - 1)):
            assert max(map(len, text.splitlines())) <= 132
        assert "tiles of embedding_" in schedule.table()
        order = issue_order(schedule)
        assert {rank: len(steps) for rank, steps in order.items()} == {
            rank: sum(len(lane.steps) for lane in schedule.of_rank(rank)) for rank in range(p.world_size)
        }
        for mode in ("queued", "single"):
            assert simulate(schedule, h200(p.world_size), runs=2, mode=mode).end_us > 0
        timeline = Timeline()
        rank = type("Rank", (), {"rank": 0, "world_size": p.world_size})()
        shapes = {b.name: np.empty((b.rows, b.cols)) for b in schedule.buffers if b.role == "input"}
        NullSchedule(schedule, rank).run(shapes, timeline=timeline)
        waits = [s for lane in schedule.of_rank(0) for s in lane.steps if not isinstance(s, Set)]
        assert len(timeline) == len(waits)


def test_remote_samples_come_first_in_turn_around_the_ring_and_own_ones_last() -> None:
    (lane,) = slices.direct(PROBLEMS[6], slice_size=2, order="remote_first").of_rank(2)
    assert [step.body[0].out.at for step in lane.steps if isinstance(step, Tiles)] == [3, 0, 1, 2]  # type: ignore[union-attr]
    (lane,) = slices.direct(PROBLEMS[6], slice_size=2, order="natural").of_rank(2)
    assert [step.body[0].out.at for step in lane.steps if isinstance(step, Tiles)] == [0, 1, 2, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["direct", "put"])
def test_a_wait_that_is_missing_is_found(name: str) -> None:
    p = PROBLEMS[1]
    schedule = schedules(p)[f"{name} remote_first"]
    last = "done" if name == "direct" else "arrived"
    hasty = edited(schedule, lambda s: None if isinstance(s, Wait) and s.signal == last else s)
    inputs = inputs_of(p, runs=1)
    wrong = 0
    for seed in range(20):
        # Without the wait, this rank's run could end before a slow peer has stored its vectors.
        found = interpret(hasty, inputs, seed, dims=dims_of(p), keep=("out",))[0]
        wrong += any(not np.array_equal(found[r]["out"][:2], expected(p, inputs[0][r], r)) for r in range(2))
    assert wrong


def test_an_all_to_all_that_does_not_add_up_is_found() -> None:
    def narrow(step: Step) -> Step:
        return replace(step, src=replace(step.src, rows=3)) if isinstance(step, Collective) else step

    with pytest.raises(
        ScheduleError,
        match=(
            r"the ranks contribute \[3, 3\] rows of \[8, 8\] columns, but the shapes of dst are \[\(2, "
            r"16\)"
        ),
    ):
        verify(edited(slices.serial(PROBLEMS[1]), narrow))


def test_bad_problems_are_refused() -> None:
    for arguments, words in (
        ((2, (1,), (((0, 4),), ())), "one entry for each of 2 ranks"),
        ((1, (-1,), (((0, 4),),)), "must not be negative"),
        ((1, (1,), (((1, 4),),)), "a slot of 4 columns begins at column 1: it must begin at 0"),
        ((1, (1,), (((4, 4), (0, 4)),)), "sort each rank's slots .* by first column"),
        ((1, (1,), ((),)), "give at least one slot"),
        (
            (1, (1,), (((0, 4),),), ((1.0, 2.0),)),
            r"rows_read has \[2\] entries on the ranks, but slots has \[1\]: give one number for each slot",
        ),
        ((1, (1,), (((0, 4),),), (), "int3"), "dtype='int3' is not known"),
        (
            (1, (1,), (((0, 4),),), (), "fp32", ((),)),
            r"ids has \[0\] entries on the ranks, .*: give a pair \(rows, exponent\)",
        ),
        ((1, (1,), (((0, 4),),), (), "fp32", (((0, 1.0),),)), "rows=0 and zipf=1: rows must be at least 1"),
        ((1, (1,), (((0, 4),),), (), "fp32", (((9, -1.0),),)), r"rows=9 and zipf=-1: .* 0 \(uniform\) to 3"),
    ):
        with pytest.raises(ValueError, match=words):
            EmbeddingAllToAll(*arguments)
    with pytest.raises(ValueError, match="slice_size=0 must be at least 1"):
        slices.direct(PROBLEMS[0], slice_size=0, order="natural")


def test_they_are_candidates_the_one_without_overlap_first() -> None:
    names = [candidate.name for candidate in candidates(PROBLEMS[1])]
    assert names[0] == "serial"
    assert {"direct", "put", "put[slice_size=8]", "put[slice_size=8,order=natural]"} <= {*names}
    assert named(PROBLEMS[1], "put[slice_size=3]").build() == slices.put(PROBLEMS[1], slice_size=3)


# -- values that the operator takes from schedules


@pytest.mark.parametrize("transport", ["direct", "put"])
@pytest.mark.parametrize("order", ["remote_first", "natural"])
@pytest.mark.parametrize("world", [2, 3])
def test_the_schedule_says_what_the_operator_does(transport: str, order: str, world: int) -> None:
    sharding = EmbeddingSharding(tables_of((8, 3, 16, 1)), (0, 1, 0, 0), world)
    p = problem_of(sharding, (4, 2, 3)[:world])
    schedule = from_json(to_json(getattr(slices, transport)(p, slice_size=5, order=order)))
    assert kernel_of(schedule) == PooledSlices(transport, order, 5)  # type: ignore[arg-type]


def test_what_the_operators_kernel_cannot_do_is_no_plan() -> None:
    sharding = EmbeddingSharding(tables_of((8, 3)), (0, 1), 2)
    p = problem_of(sharding, (1, 1))
    for schedule in (
        slices.serial(p),
        edited(slices.direct(p, slice_size=5, order="natural"), lambda s: s if isinstance(s, Set) else None),
    ):
        with pytest.raises(ScheduleError, match="is not a schedule of embedding_all_to_all"):
            kernel_of(schedule)


def test_a_sharding_is_described_with_what_its_bags_read() -> None:
    sharding = EmbeddingSharding(tables_of((8, 3)), (1, 0), 2, rows_read=(10.0, 2.5))
    p = problem_of(sharding, (4, 2))
    assert p == EmbeddingAllToAll(2, (4, 2), (((8, 3),), ((0, 8),)), ((2.5,), (10.0,)), "fp32")


# -- simulated


def h200(world: int) -> Model:
    return model_of(load_machine("h200"), world)


def alike(tables: int, dim: int, batch: int, rows: int) -> EmbeddingAllToAll:
    """Return a problem of two ranks with `tables` tables each. batch: the global batch. rows: rows per bag."""
    slots = tuple(tuple(((r * tables + i) * dim, dim) for i in range(tables)) for r in range(2))
    return EmbeddingAllToAll(2, (batch // 2,) * 2, slots, ((rows,) * tables,) * 2)


# Times of queued fp32 calls on two H200s, in milliseconds, from benchmarks/results/h200-2-ranks.jsonl: `direct`, and
# `batched`, which is the same as `serial`. Predicted times are lower: by 2.5%, 15%, 2% and 14% for `direct`, and by 2%,
# 12%, 1% and 11% for `serial`.
MEASURED = {
    "pgas-weak": (alike(64, 64, 16384, 64), 4.327, 4.921),
    "pgas-strong": (alike(48, 64, 16384, 16), 0.977, 1.473),
    "grid-64x200k-d256-b4096-l32": (alike(64, 256, 4096, 16), 1.102, 1.711),
    "grid-128x100k-d128-b1024-l20": (alike(128, 128, 1024, 10), 0.210, 0.395),
}


@pytest.mark.parametrize("name", MEASURED)
def test_simulated_times_are_those_that_were_measured(name: str) -> None:
    p, direct_ms, serial_ms = MEASURED[name]
    us = {n: simulate(s, h200(2), runs=3).per_run_us for n, s in schedules(p, slice_size=8).items()}
    assert us["direct remote_first"] == pytest.approx(1e3 * direct_ms, rel=0.16)
    assert us["serial"] == pytest.approx(1e3 * serial_ms, rel=0.16)
    assert us["direct remote_first"] <= us["put remote_first"] < us["serial"]
    assert us["direct natural"] <= us["put natural"] < us["serial"]


def works(result: Simulated) -> int:
    return sum(len(lane.tasks) for lane in result.program.lanes)


def test_a_kernel_of_880_000_slices_is_one_task() -> None:
    """The engine needs one task for the slices of each destination, and at most 16 pulses for signals, for any number
    of slices.
    """
    few, many = (
        simulate(slices.put(alike(64, 64, 2 * samples, 64), slice_size=8, order="remote_first"), h200(2))
        for samples in (8, 55_000)
    )
    tiles = [s for lane in many.program.schedule.of_rank(0) for s in lane.steps if isinstance(s, Tiles)]
    assert sum(t.extent for t in tiles) == 880_000  # type: ignore[misc]
    assert works(many) == works(few) == 5
    assert len(many.events) == len(few.events) == 4
    assert sum(span.bytes for span in many.timeline) == 2 * 55_000 * 64 * 64 * 4


def test_uneven_slices_cost_what_they_move() -> None:
    """Slices differ in width, and bags in the number of rows. With many compute units, the time is that of the memory
    traffic, which is computed by hand. Rows of 8, 2 and 16 bytes each touch one block of 64 bytes.
    """
    p = EmbeddingAllToAll(1, (1000,), (((0, 4), (4, 1), (5, 8)),), ((2, 2, 7),), "fp16")
    model = replace(h200(1), compute_units=1 << 30)
    rows, ids, written = 64 * (2 + 2 + 7), 8 * (2 * (2 + 1) + (7 + 1)), 2 * (4 + 1 + 8)
    (lane,) = simulate(slices.direct(p, slice_size=1, order="remote_first"), model).program.lanes
    assert lane.tasks[0].work_us == pytest.approx(1000 * (rows + ids + written) / model.hbm_bytes_per_us)  # type: ignore[union-attr]
