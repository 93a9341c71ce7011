"""Every registered way to do an operator: it verifies, keeps its value in JSON, can be issued from one thread, and computes
x @ w in random legal orders over several runs.

Small whole numbers, so that sums are exact in any order and results are compared for equality. That a random order would
notice is tested too, on a schedule that fills its buffer again too early.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_interpreter import Tensors, edited, interpret

from weft.schedule import AllGatherMatmul, Candidate, Copy, NotApplicableError, Schedule, Set, Wait, candidates
from weft.schedule.order import issue_order
from weft.schedule.text import from_json, table, to_json
from weft.schedule.verify import verify

PROBLEMS = (
    AllGatherMatmul.even(6, 3, 4, 1),
    AllGatherMatmul.even(16, 3, 8, 2),
    AllGatherMatmul(2, (8, 8), (3, 5, 1), 9, "fp32", return_gathered=True),
    AllGatherMatmul(2, (5, 0), (3,), 4, "fp16"),
    AllGatherMatmul(3, (7, 7, 7), (2, 3), 8, "bf16"),
    AllGatherMatmul(3, (2, 5, 1), (2, 3), 4, "fp32", return_gathered=True),
    AllGatherMatmul.even(20, 2, 6, 4),
    AllGatherMatmul(4, (4, 4, 4, 4), (2, 2), 5, "fp32", return_gathered=True),
    AllGatherMatmul.even(64, 2, 8, 8),
)


def applicable(problem: AllGatherMatmul) -> list[tuple[Candidate, Schedule]]:
    """The candidates that have a schedule. Of those that differ in nothing but by whom copies are done, which matters to
    none of this, one."""
    found: dict[Schedule, tuple[Candidate, Schedule]] = {}
    for candidate in candidates(problem):
        try:
            schedule = candidate.build()
        except NotApplicableError:
            continue
        found.setdefault(all_by_dma(schedule), (candidate, schedule))
    return list(found.values())


def all_by_dma(schedule: Schedule) -> Schedule:
    return edited(schedule, lambda step: replace(step, by="dma") if isinstance(step, Copy) else step)


def inputs_of(problem: AllGatherMatmul, runs: int, seed: int) -> list[list[Tensors]]:
    rng = np.random.default_rng(seed)

    def small(rows: int, cols: int) -> np.ndarray:
        return rng.integers(-4, 5, (rows, cols)).astype(np.float64)

    return [
        [
            {"x_shard": small(rows, problem.k)} | {f"w{i}": small(problem.k, n) for i, n in enumerate(problem.n)}
            for rows in problem.rows
        ]
        for _ in range(runs)
    ]


def expected(problem: AllGatherMatmul, inputs: list[list[Tensors]]) -> list[list[Tensors]]:
    results = []
    for ranks in inputs:
        x = np.concatenate([tensors["x_shard"] for tensors in ranks])
        gathered = {"x": x} if problem.return_gathered else {}
        results.append([{f"y{i}": x @ t[f"w{i}"] for i in range(len(problem.n))} | gathered for t in ranks])
    return results


def same(found: list[list[Tensors]], wanted: list[list[Tensors]]) -> bool:
    return all(
        f.keys() == w.keys() and all(np.array_equal(f[name], w[name]) for name in w)
        for found_run, wanted_run in zip(found, wanted, strict=True)
        for f, w in zip(found_run, wanted_run, strict=True)
    )


def check(problem: AllGatherMatmul, schedule: Schedule, name: str, seeds: range, runs: int) -> None:
    verify(schedule)
    assert from_json(to_json(schedule)) == schedule
    check_order(schedule)
    inputs = inputs_of(problem, runs, seed=len(name))
    wanted = expected(problem, inputs)
    for seed in seeds:
        assert same(interpret(schedule, inputs, seed), wanted), (problem, name, seed)


def check_order(schedule: Schedule) -> None:
    """Each rank's order is its lanes, interleaved, and queues that stop at a wait get to their end in that order."""
    order = issue_order(schedule)
    for rank, issued in order.items():
        for lane in schedule.of_rank(rank):
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
                if isinstance(step, Set):
                    counters[step.at, step.signal, step.index] += 1
                at[rank] += 1
                moved = True
    assert at == {rank: len(issued) for rank, issued in order.items()}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_candidate_verifies_and_computes_the_product(problem: AllGatherMatmul) -> None:
    found = applicable(problem)
    assert any(candidate.builder == "serial" for candidate, _ in found)
    assert problem.world_size == 1 or any(candidate.builder == "shard" for candidate, _ in found)
    for candidate, schedule in found:
        check(problem, schedule, candidate.name, seeds=range(2), runs=2 if problem.world_size == 8 else 3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_small_shape(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 4), label="world_size")
    sizes = st.integers(0, 9)
    even = data.draw(st.booleans(), label="even")
    rows = (
        [data.draw(sizes, label="rows")] * world if even else data.draw(st.lists(sizes, min_size=world, max_size=world))
    )
    n = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3), label="n")
    problem = AllGatherMatmul(
        world, tuple(rows), tuple(n), data.draw(sizes, label="k"), "fp32", data.draw(st.booleans())
    )
    candidate, schedule = data.draw(st.sampled_from(applicable(problem)), label="candidate")
    check(problem, schedule, candidate.name, seeds=range(2), runs=2)


def test_a_random_order_finds_a_buffer_that_is_filled_again_too_early() -> None:
    problem = AllGatherMatmul.even(8, 2, 4, 2)
    schedule = candidates(problem, ("shard",))[0].build()
    hasty = edited(schedule, lambda step: None if isinstance(step, Wait) and step.previous else step)
    inputs = inputs_of(problem, 3, seed=0)
    assert not all(same(interpret(hasty, inputs, seed), expected(problem, inputs)) for seed in range(20))


def test_tables_of_all_candidates_fit_a_terminal() -> None:
    for problem in PROBLEMS[4:6]:
        for _, schedule in applicable(problem):
            for text in (table(schedule), table(schedule, rank=1)):
                assert max(map(len, text.splitlines())) <= 132
