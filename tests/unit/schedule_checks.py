"""Checks that every schedule must pass, for the tests of each operator's schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
from schedule_interpreter import Tensors, interpret
from support.made_up import require_runnable_on_gpus

from weft import plan
from weft.builders import Problem, candidates
from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.schedule import Schedule, Wait
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify
from weft.schedule.verify.issue_order import issue_order
from weft.sim import model_of

Small: TypeAlias = Callable[[int, int], np.ndarray]
OfRuns: TypeAlias = list[list[Tensors]]
"""For each run and rank, its tensors."""


def builders(found: dict[str, Schedule]) -> set[str]:
    return {name.split("[")[0] for name in found}


def small_numbers(seed: int) -> Small:
    """Return a function that draws matrices of small whole numbers. Their sums are exact in any order, so results can
    be compared for equality.
    """
    rng = np.random.default_rng(seed)
    return lambda rows, cols: rng.integers(-4, 5, (rows, cols)).astype(np.float64)


def check(schedule: Schedule, inputs: OfRuns, wanted: OfRuns, *, seeds: int = 2, on_gpus: bool = True) -> None:
    """Check that a schedule verifies, survives JSON, can be issued from one thread, and is accepted by the GPU
    executor. Check that it gives the wanted results in random legal orders.
    """
    check_value(schedule)
    for rank in {0, schedule.world_size - 1} if on_gpus else ():
        require_runnable_on_gpus(schedule, rank)
    for seed in range(seeds):
        assert same(interpret(schedule, inputs, seed), wanted), (schedule.name, seed)


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
