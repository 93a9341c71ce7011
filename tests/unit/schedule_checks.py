"""Checks that every schedule must pass, for the tests of each operator's schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from schedule_interpreter import Tensors, edited, interpret
from support.made_up import require_runnable_on_gpus
from support.sim_toys import applicable

from weft import plan
from weft.builders import Problem, candidates
from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.schedule import Copy, Schedule, Tiles, Wait
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify
from weft.schedule.verify.issue_order import issue_order
from weft.sim import NULL, model_of, simulate

Small: TypeAlias = Callable[[int, int], np.ndarray]
OfRuns: TypeAlias = list[list[Tensors]]
"""For each run and rank, its tensors."""
OfRun: TypeAlias = Callable[[Any, Small], tuple[list[Tensors], list[Tensors]]]
"""A function of a problem that draws the inputs of a run, and returns (inputs, results), each for every rank."""


def builders(found: dict[str, Schedule]) -> set[str]:
    return {name.split("[")[0] for name in found}


def small_numbers(seed: int) -> Small:
    """Return a function that draws matrices of small whole numbers. Their sums are exact in any order, so results can
    be compared for equality.
    """
    rng = np.random.default_rng(seed)
    return lambda rows, cols: rng.integers(-4, 5, (rows, cols)).astype(np.float64)


def runs_of(p: Problem, of_run: OfRun, runs: int, seed: int) -> tuple[OfRuns, OfRuns]:
    """Return (inputs, results) of `runs` runs."""
    small = small_numbers(seed)
    made = [of_run(p, small) for _ in range(runs)]
    return [inputs for inputs, _ in made], [results for _, results in made]


def check_candidate(p: Problem, name: str, schedule: Schedule, of_run: OfRun, runs: int, seeds: int = 2) -> None:
    """Check that a schedule verifies, survives JSON, can be issued from one thread, and is accepted by the GPU executor.
    Check that it gives the wanted results over `runs` runs, in random legal orders.

    The GPU executor need not accept a serial schedule that packs or unpacks.
    """
    check_value(schedule)
    packs = name == "serial" and any(isinstance(step, Tiles) for lane in schedule.lanes for step in lane.steps)
    for rank in () if packs else {0, schedule.world_size - 1}:
        require_runnable_on_gpus(schedule, rank)
    inputs, wanted = runs_of(p, of_run, runs, len(name))
    for seed in range(seeds):
        assert same(interpret(schedule, inputs, seed), wanted), (p, name, seed)


def check_candidates(p: Problem, of_run: OfRun, overlapping: set[str]) -> None:
    """Check all candidates. They must be serial and, on several ranks, schedules of the builders `overlapping`.

    Of schedules that differ only in `Copy.by`, interpret only one, because the interpreter ignores `by`.
    """
    found = applicable(p)
    assert builders(found) == {"serial"} | (overlapping if p.world_size > 1 else set())
    interpreted = set[Schedule]()
    for name, schedule in found.items():
        alike = edited(schedule, lambda step: replace(step, by="dma") if isinstance(step, Copy) else step)
        seeds = 0 if alike in interpreted else 2
        interpreted.add(alike)
        check_candidate(p, name, schedule, of_run, runs=2 if p.world_size == 8 else 3, seeds=seeds)
        assert simulate(schedule, NULL).end_us >= 0


def assert_noticed(p: Problem, schedule: Schedule, of_run: OfRun) -> None:
    """Check that results differ in some order if no rank waits until its peers have read the data of the run before."""
    early = edited(schedule, lambda step: None if isinstance(step, Wait) and step.previous else step)
    inputs, wanted = runs_of(p, of_run, 3, seed=0)
    assert not all(same(interpret(early, inputs, seed), wanted) for seed in range(20))


def faults(schedule: Schedule) -> str:
    """Return the error of a schedule that fails verification."""
    with pytest.raises(ScheduleError) as error:
        verify(schedule)
    return str(error.value)


def check_rows_in_one_plan(p: Problem, rows: Iterable[int], other: Problem, running: int) -> None:
    """Check that problems that differ only in their number of rows share one choice of schedule.

    other: a problem of another family. running: the expected number of candidates that are worth running.
    """
    resized, model = [replace(p, m=m) for m in rows], model_of(load_machine("h200"), 2)  # type: ignore[type-var]
    assert sum(map(p.worth_running, candidates(p))) == running
    assert {one.family[0] for one in resized} == {p.family[0]} != {other.family[0]}
    assert p.resized(p.family[1]) == p
    assert len({plan.names_near(one, model, ("queued", "graph")) for one in (p, *resized)}) == 1


def check_value(schedule: Schedule) -> None:
    verify(schedule)
    assert from_json(to_json(schedule)) == schedule
    check_order(schedule)


def same(found: OfRuns, wanted: OfRuns) -> bool:
    return all(
        f.keys() == w.keys() and all(np.array_equal(f[name], w[name]) for name in w)
        for found_run, wanted_run in zip(found, wanted, strict=True)
        for f, w in zip(found_run, wanted_run, strict=True)
    )


def check_order(schedule: Schedule) -> None:
    """Check the order of issue: it interleaves each rank's lanes, and queues that block at a wait can still run to
    their end.
    """
    order = issue_order(schedule)
    for rank, issued in order.items():
        for lane in schedule.of_rank(rank, expected=False):
            assert tuple(step for name, step in issued if name == lane.name) == lane.steps
    counters: Counter[tuple] = Counter()
    at = dict.fromkeys(order, 0)
    moved = True
    while moved:
        moved = False
        for rank, issued in order.items():
            while at[rank] < len(issued):
                step = issued[at[rank]][1]
                waits = isinstance(step, Wait) and not step.previous
                if waits and counters[rank, step.signal, step.index] < step.count:
                    break
                counters.update(step.sets())
                at[rank] += 1
                moved = True
    assert at == {rank: len(issued) for rank, issued in order.items()}
