"""Gradients of all-gather + GEMM and of GEMM + all-gather, each as one schedule. `test_schedule_gemms.py` runs them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from schedule_cases import GATHER_GRADIENTS, JOIN_GRADIENTS
from schedule_interpreter import edited
from support.sim_toys import applicable, gpu
from support.slow import slow

from weft import plan
from weft.builders import AllGatherMatmulGradients, MatmulAllGatherGradients, NotApplicableError, named
from weft.errors import ScheduleError
from weft.operator.gpu_gemms import GemmTimer
from weft.ops import all_gather_matmul_gradients, matmul_all_gather_gradients
from weft.plan.gemms import ladder
from weft.schedule import Compute, Copy, Reduce, Wait
from weft.schedule.verify import verify

Problem = AllGatherMatmulGradients | MatmulAllGatherGradients
OPERATORS = {one.name: one for one in (all_gather_matmul_gradients.OPERATOR, matmul_all_gather_gradients.OPERATOR)}


@pytest.mark.parametrize("world", [3, slow(4), slow(8)])
@pytest.mark.parametrize("columns", [False, True])
def test_every_number_of_chunks_verifies(world: int, columns: bool) -> None:
    """The sizes are rows that no number of chunks divides, columns that are whole tiles, and columns that are not."""
    for m, n in ((1030, 1100), (9, 300)):
        found = applicable(MatmulAllGatherGradients(world, m, n, 4, "bf16", columns))
        assert len(found) == 1 + 4 * 2
        for schedule in found.values():
            verify(schedule)
    for name in ("direct[chunks=3]", "direct[chunks=7,last=columns]"):
        verify(named(MatmulAllGatherGradients(world, 1030, 300, 4, "bf16", columns), name).build())


@pytest.mark.parametrize(
    ("change", "name", "why"),
    [
        ({"world_size": 1}, "direct[chunks=2]", "there is only one rank, so there is nothing to send"),
        (
            {"n": 0},
            "direct[chunks=2]",
            "a size is 0, so there is nothing to multiply",
        ),
        (
            {"k": 0},
            "direct[chunks=1]",
            "a size is 0, so there is nothing to multiply",
        ),
        ({"m": 3}, "direct[chunks=4]", "rows of a product (3) cannot be cut into 4 pieces"),
        ({"n": 3}, "direct[chunks=4,last=columns]", "columns of a product (3) cannot be cut as 1:1:1:1"),
    ],
)
def test_what_cannot_overlap_is_refused_with_the_reason(change: dict[str, int], name: str, why: str) -> None:
    with pytest.raises(NotApplicableError, match=re.escape(why)):
        named(replace(MatmulAllGatherGradients(2, 14, 9, 4, "bf16"), **change), name).build()


@pytest.mark.parametrize(
    ("p", "name", "signals"),
    [
        (GATHER_GRADIENTS[2], "direct", ("arrived", "computed", "there", "credit")),
        (JOIN_GRADIENTS[4], "direct[chunks=2]", ("there", "credit")),
        (JOIN_GRADIENTS[5], "direct[chunks=4,last=columns]", ("there", "credit")),
    ],
    ids=str,
)
def test_each_wait_is_needed(p: Problem, name: str, signals: tuple[str, ...]) -> None:
    schedule = named(p, name).build()
    verify(schedule)
    for signal in signals:

        def kept(step: object, signal: str = signal) -> object:
            return None if isinstance(step, Wait) and step.signal == signal else step

        without = edited(schedule, kept)
        with pytest.raises(ScheduleError, match="no signal orders them"):
            verify(without)


@pytest.mark.parametrize("name", ["direct[chunks=4]", "direct[chunks=4,last=columns]"])
@pytest.mark.parametrize("columns", [False, True])
def test_each_element_is_rounded_once_and_copy_engines_send(name: str, columns: bool) -> None:
    """GEMMs do not accumulate, and write each element of both gradients once. No step packs columns."""
    p = MatmulAllGatherGradients(3, 26, 18, 4, "bf16", columns)
    (compute, sender) = named(p, name).build().of_rank(1)
    written = {buffer: np.zeros(shape, int) for buffer, shape in (("grad_x", (p.m, p.k)), ("grad_w", (p.k, p.n)))}
    summed = np.zeros((p.m, p.n), int)
    for step in compute.steps:
        if isinstance(step, Reduce):
            summed[step.out.row : step.out.row + step.out.rows, step.out.col : step.out.col + step.out.cols] += 1
            assert [part.buffer for part in step.parts] == ["g", "box", "box"]
        if isinstance(step, Compute):
            assert not step.accumulate
            out = step.out
            written[out.buffer][out.row : out.row + out.rows, out.col : out.col + out.cols] += 1
            assert step.inputs[0].cols == (p.n if out.buffer == "grad_x" else p.m)
    assert all((times == 1).all() for times in (*written.values(), summed))
    assert not any(isinstance(step, Copy) for step in compute.steps)
    sent = [step for step in sender.steps if isinstance(step, Copy)]
    assert all(step.by == "dma" and step.src.buffer == "g" for step in sent)
    assert sum(step.src.rows * step.src.cols for step in sent) == 2 * p.m * p.n


@pytest.mark.parametrize("p", [GATHER_GRADIENTS[2], JOIN_GRADIENTS[3]], ids=str)
def test_its_gemms_are_timed_on_random_matrices(p: Problem) -> None:
    """A first call on GPUs measures all GEMMs on which its choice depends."""
    op = OPERATORS[p.name]
    call = op.drawn(p, 0, torch.Generator().manual_seed(0))
    timer = GemmTimer(p, {**op.inputs(p, call), **op.outputs(call, p.world_size)})
    assert ladder(p)
    for shape in ladder(p):
        result = timer.gemm(shape)()
        assert result.shape == shape[:2]
        assert bool(result.isfinite().all())


def test_the_planner_hides_both_exchanges() -> None:
    """The planner hides both exchanges in layers of Llama-3-8B, and chooses serial for few tokens."""
    for n, name in (((3072,), "direct[add=gemm]"), ((7168, 7168), "direct")):
        choice = plan.choose(AllGatherMatmulGradients(2, 8192, n, 4096, "bf16"), gpu("h200", 2))
        assert choice.candidate.name == name
        reduced, serial = choice.row("direct").predicted_us, choice.row("serial").predicted_us
        assert choice.predicted_us <= reduced < 0.95 * serial  # type: ignore[operator]
    assert plan.choose(AllGatherMatmulGradients(2, 64, (512,), 512, "bf16"), gpu("h200", 2)).candidate.name == "serial"


def test_the_planner_hides_the_reduce_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem is the output layer of Llama-3-8B on eight ranks. With concatenated columns, serial needs an
    additional copy.
    """
    monkeypatch.setenv("WEFT_QUIET", "1")  # sizes that are too small to gain from overlap run serial
    for world, last in ((2, ""), (8, ",last=columns")):
        of_serial = []
        for columns in (False, True):
            p = MatmulAllGatherGradients(world, 8192, 128256 // world, 4096, "bf16", columns)
            choice, serial = plan.choose(p, gpu("h200", world)), plan.choose(p, gpu("h200", world)).row("serial")
            assert choice.candidate.name.startswith("direct")
            assert choice.candidate.name.endswith(f"{last}]")
            assert choice.predicted_us < 0.9 * serial.predicted_us  # type: ignore[operator]
            of_serial.append(serial.predicted_us)
        assert of_serial[1] > 1.03 * of_serial[0]  # type: ignore[operator]
    assert plan.choose(MatmulAllGatherGradients(2, 64, 512, 512, "bf16"), gpu("h200", 2)).candidate.name == "serial"
    text = plan.explain("matmul_all_gather_gradients", M=8192, N=8192, K=8192, ranks=2, hw="h200", gather_dim=-1)
    assert "gradients of [8192, 8192] @ [8192, 8192] on each of 2 ranks, all columns to each rank, bf16" in text
