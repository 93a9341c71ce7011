"""Every registered builder of all-gather + GEMM: its schedule verifies, survives JSON, can be issued from one thread,
and computes x @ w in random legal orders over several runs.

Inputs are small whole numbers, whose sums are exact in any order, so results are compared for equality. A planted
fault, a schedule that refills its buffer too early, shows that random orders find races.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import check_value, same, small_numbers
from schedule_interpreter import Tensors, edited, interpret
from support.slow import mostly

from weft.builders import AllGatherMatmul, Candidate, NotApplicableError, Scaled, candidates
from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.schedule import Compute, Copy, Schedule, Wait
from weft.schedule.verify import verify
from weft.sim import model_of, simulate

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
BY_ROW = Scaled("row", ("bf16", "fp32"), (True, False), (False, True))
BY_TENSOR = Scaled("tensor", ("bf16",), (False,), (False,))
SCALED = (
    AllGatherMatmul(1, (5,), (16, 32), 16, "fp8", scaled=BY_ROW),
    AllGatherMatmul(2, (6, 6), (16, 32), 16, "fp8", scaled=BY_ROW),
    AllGatherMatmul(3, (2, 5, 1), (16, 32), 16, "fp8", return_gathered=True, scaled=BY_ROW),
    AllGatherMatmul(4, (4, 4, 4, 4), (16,), 32, "fp8", scaled=BY_TENSOR),
)


def applicable(problem: AllGatherMatmul) -> list[tuple[Candidate, Schedule]]:
    """Return the candidates that support the problem. If candidates differ only in `by`, return only one of them,
    because these tests do not depend on it.
    """
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
    small = small_numbers(seed)

    def of_rank(rows: int) -> Tensors:
        found = {"x_shard": small(rows, problem.k)} | {f"w{i}": small(problem.k, n) for i, n in enumerate(problem.n)}
        if problem.scaled is not None:
            by_row = problem.scaled.by == "row"
            found["x_scale"] = small(rows if by_row else 1, 1)
            found |= {f"w_scale{i}": small(1, n if by_row else 1) for i, n in enumerate(problem.n)}
            found |= {f"bias{i}": small(1, n) for i, n in enumerate(problem.n) if problem.scaled.biased[i]}
        return found

    return [[of_rank(rows) for rows in problem.rows] for _ in range(runs)]


def expected(problem: AllGatherMatmul, inputs: list[list[Tensors]]) -> list[list[Tensors]]:
    results = []
    for ranks in inputs:
        x = np.concatenate([tensors["x_shard"] for tensors in ranks])
        gathered = {"x": x} if problem.return_gathered else {}
        scale = np.concatenate([t["x_scale"] for t in ranks]) if problem.scaled and problem.scaled.by == "row" else None
        results.append([
            {f"y{i}": product(x, scale, t, i) for i in range(len(problem.n))} | gathered for t in ranks
        ])  # fmt: skip
    return results


def product(x: np.ndarray, scale: np.ndarray | None, tensors: Tensors, i: int) -> np.ndarray:
    """Return x times weight i. scale: the scales of the rows of x; None if each rank applies its own scale, or if there
    are no scales.
    """
    scale = tensors.get("x_scale", np.ones(())) if scale is None else scale
    weights = tensors[f"w{i}"] * tensors.get(f"w_scale{i}", 1.0)
    return np.asarray((x * scale) @ weights + tensors.get(f"bias{i}", 0.0))


def check(problem: AllGatherMatmul, schedule: Schedule, name: str, seeds: range, runs: int) -> None:
    check_value(schedule)
    inputs = inputs_of(problem, runs, seed=len(name))
    wanted = expected(problem, inputs)
    for seed in seeds:
        assert same(interpret(schedule, inputs, seed), wanted), (problem, name, seed)


@pytest.mark.parametrize(
    "problem", [*mostly(PROBLEMS, *PROBLEMS[:4], PROBLEMS[5]), *mostly(SCALED, *SCALED[:3])], ids=str
)
def test_every_candidate_verifies_and_computes_the_product(problem: AllGatherMatmul) -> None:
    found = applicable(problem)
    assert any(candidate.builder == "serial" for candidate, _ in found)
    assert problem.world_size == 1 or any(candidate.builder == "shard" for candidate, _ in found)
    for candidate, schedule in found:
        check(problem, schedule, candidate.name, seeds=range(2), runs=2 if problem.world_size == 8 else 3)


def any_small_shape(data: st.DataObject) -> None:
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


@settings(max_examples=15)
@given(data=st.data())
def test_some_small_shapes(data: st.DataObject) -> None:
    any_small_shape(data)


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_any_small_shape(data: st.DataObject) -> None:
    any_small_shape(data)


def test_a_random_order_finds_a_buffer_that_is_filled_again_too_early() -> None:
    problem = AllGatherMatmul.even(8, 2, 4, 2)
    schedule = candidates(problem, ("shard",))[0].build()
    hasty = edited(schedule, lambda step: None if isinstance(step, Wait) and step.previous else step)
    inputs = inputs_of(problem, 3, seed=0)
    assert not all(same(interpret(hasty, inputs, seed), expected(problem, inputs)) for seed in range(20))


def test_scaled_gemms_have_schedules_that_overlap() -> None:
    found = {candidate.builder for candidate, _ in applicable(SCALED[1])}
    assert found == {"serial", "gather", "shard", "ficco_1d", "ficco_1d_collective"}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"dtype": "bf16"}, "dtype='bf16': scaled GEMMs need fp8 operands"),
        ({"k": 24}, "K=24 must be a positive multiple of 16 for fp8 GEMMs: use 16 or 32"),
        ({"n": (8,)}, "N of Bs[0]=8 must be a positive multiple of 16 for fp8 GEMMs: use 16"),
        ({"n": (16, 16)}, "one entry for each of the 2 weights (n=(16, 16))"),
        (
            {"scaled": replace(BY_TENSOR, out=("int32",))},
            "use bf16, fp16 or fp32, or, if there is one scale per tensor, fp8",
        ),
        (
            {"scaled": replace(BY_TENSOR, by="row", out=("fp8",))},
            "use bf16, fp16 or fp32, or, if there is one scale per tensor, fp8",
        ),
    ],
)
def test_what_scaled_gemms_cannot_be(change: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        replace(SCALED[3], **change)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda step: replace(step, inputs=step.inputs[:2]), "scaled_matmul has 2 inputs: pass"),
        (lambda step: replace(step, inputs=(*step.inputs[:3], step.inputs[2])), "scales of"),
        (lambda step: replace(step, inputs=(*step.inputs, step.inputs[2])), "the bias of an output of shape"),
        (lambda step: replace(step, inputs=(*step.inputs[2:], *step.inputs[:2])), "dtypes are"),
        (lambda step: replace(step, accumulate=True), "a scaled matmul does not accumulate"),
    ],
)
def test_faults_of_scaled_gemms_are_found(edit: Callable[[Compute], Compute], fault: str) -> None:
    p = replace(SCALED[1], n=(16,), scaled=Scaled("row", ("bf16",), (False,), (False,)))
    schedule = edited(candidates(p)[0].build(), lambda step: edit(step) if isinstance(step, Compute) else step)
    with pytest.raises(ScheduleError, match=re.escape(fault)):
        verify(schedule)


@pytest.mark.parametrize("hw", ["h200", "mi300x"])
def test_scaled_candidates_are_simulated_with_one_byte_on_the_wire(hw: str) -> None:
    plain = AllGatherMatmul.even(4096, 4096, 4096, 2)
    scaled = replace(plain, dtype="fp8", scaled=BY_TENSOR)
    model = model_of(load_machine(hw), 2)
    for candidate, schedule in applicable(scaled):
        other = next(c for c in candidates(plain) if c.name == candidate.name)
        ran, usual = simulate(schedule, model), simulate(other.build(), model)
        assert sum(s.bytes for s in ran.timeline) * 2 == sum(s.bytes for s in usual.timeline)
        assert 0.4 * usual.end_us < ran.end_us < usual.end_us


def test_tables_of_all_candidates_fit_a_terminal() -> None:
    for problem in PROBLEMS[4:6]:
        for _, schedule in applicable(problem):
            for text in (schedule.table(), schedule.table(rank=1)):
                assert max(map(len, text.splitlines())) <= 132
