"""Schedules of all-gather + GEMM: scaled GEMMs and tables. `test_schedule_gemms.py` runs them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_cases import BY_TENSOR, GATHER, SCALED_GATHER
from schedule_interpreter import edited
from support.sim_toys import applicable

from weft.builders import AllGatherMatmul, Scaled, candidates, named
from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.schedule import Compute
from weft.schedule.verify import verify
from weft.sim import model_of, simulate


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
    p = replace(SCALED_GATHER[1], n=(16,), scaled=Scaled("row", ("bf16",), (False,), (False,)))
    schedule = edited(candidates(p)[0].build(), lambda step: edit(step) if isinstance(step, Compute) else step)
    with pytest.raises(ScheduleError, match=re.escape(fault)):
        verify(schedule)


@pytest.mark.parametrize("hw", ["h200", "mi300x"])
def test_scaled_candidates_are_simulated_with_one_byte_on_the_wire(hw: str) -> None:
    plain = AllGatherMatmul.even(4096, 4096, 4096, 2)
    scaled = replace(plain, dtype="fp8", scaled=BY_TENSOR)
    model = model_of(load_machine(hw), 2)
    for name, schedule in applicable(scaled).items():
        ran, usual = simulate(schedule, model), simulate(named(plain, name).build(), model)
        assert sum(s.bytes for s in ran.timeline) * 2 == sum(s.bytes for s in usual.timeline)
        assert 0.4 * usual.end_us < ran.end_us < usual.end_us


def test_tables_of_all_candidates_fit_a_terminal() -> None:
    for problem in GATHER[4:6]:
        for schedule in applicable(problem).values():
            for text in (schedule.table(), schedule.table(rank=1)):
                assert max(map(len, text.splitlines())) <= 132
