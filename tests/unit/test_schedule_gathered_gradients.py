"""All gradients of an all-gather + GEMM as one schedule: it verifies, is taken by GPUs, and gives the gradients in random legal
orders over several runs. Small whole numbers: sums are exact in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_up import require_runnable_on_gpus
from schedule_interpreter import Tensors, edited, interpret
from sim_toys import gpu
from test_schedule_candidates import check_order, same

from weft import plan
from weft.errors import ScheduleError
from weft.operator.gpu_gemms import GemmTimer
from weft.ops.all_gather_matmul_gradients import OPERATOR
from weft.plan.gemms import ladder
from weft.schedule import AllGatherMatmulGradients, NotApplicableError, Wait, named
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify

PROBLEMS = [
    AllGatherMatmulGradients(1, 5, (3,), 4, "fp32"),
    AllGatherMatmulGradients(2, 14, (3, 2), 4, "bf16"),
    AllGatherMatmulGradients(3, 15, (2, 5, 1), 3, "fp16"),
    AllGatherMatmulGradients(4, 36, (7,), 3, "fp32"),
    AllGatherMatmulGradients(8, 16, (3, 1), 2, "bf16"),
]


def calls(p: AllGatherMatmulGradients, runs: int) -> tuple[list[list[Tensors]], list[list[Tensors]]]:
    """(inputs, results) of each run and rank."""
    rng = np.random.default_rng(p.world_size)

    def small(rows: int, cols: int) -> np.ndarray:
        return rng.integers(-4, 5, (rows, cols)).astype(np.float64)

    inputs, expected = [], []
    for _ in range(runs):
        xs = [small(p.rows, p.k) for _ in range(p.world_size)]
        gs = [[small(p.m, n) for n in p.n] for _ in range(p.world_size)]
        ws = [[small(n, p.k) for n in p.n] for _ in range(p.world_size)]
        total = sum(g @ w for of_g, of_w in zip(gs, ws, strict=True) for g, w in zip(of_g, of_w, strict=True))
        inputs.append(
            [
                {"x_shard": xs[r]}
                | {f"g{i}": g for i, g in enumerate(gs[r])}
                | {f"gt{i}": g.T for i, g in enumerate(gs[r])}
                | {f"wt{i}": w for i, w in enumerate(ws[r])}
                for r in range(p.world_size)
            ]
        )
        expected.append(
            [
                {"grad_x": part} | {f"grad_wt{i}": g.T @ np.concatenate(xs) for i, g in enumerate(gs[r])}
                for r, part in enumerate(np.split(np.asarray(total), p.world_size))
            ]
        )
    return inputs, expected


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
@pytest.mark.parametrize("name", ["serial", "direct"])
def test_it_gives_the_gradients(p: AllGatherMatmulGradients, name: str) -> None:
    if name == "direct" and p.world_size == 1:
        with pytest.raises(NotApplicableError, match="nothing to send"):
            named(p, name).build()
        return
    schedule = named(p, name).build()
    verify(schedule)
    assert from_json(to_json(schedule)) == schedule
    check_order(schedule)
    for rank in {0, p.world_size - 1}:
        require_runnable_on_gpus(schedule, rank)
    inputs, expected = calls(p, 3)
    for seed in range(3):
        assert same(interpret(schedule, inputs, seed), expected)


@pytest.mark.parametrize("signal", ["arrived", "computed", "there", "free"])
def test_each_wait_is_needed(signal: str) -> None:
    schedule = named(PROBLEMS[2], "direct").build()
    verify(schedule)
    without = edited(schedule, lambda step: None if isinstance(step, Wait) and step.signal == signal else step)
    with pytest.raises(ScheduleError, match="nothing orders them"):
        verify(without)


def test_its_gemms_are_timed_on_random_matrices() -> None:
    """A first call on GPUs measures them, of all that its choice rests on."""
    p = PROBLEMS[2]
    call = OPERATOR.drawn(p, 0, torch.Generator().manual_seed(0))
    timer = GemmTimer(p, {**OPERATOR.inputs(p, call), **OPERATOR.outputs(call, p.world_size)})
    assert ladder(p)
    for shape in ladder(p):
        result = timer.gemm(shape)()
        assert result.shape == shape[:2]
        assert bool(result.isfinite().all())


def test_the_planner_hides_both_exchanges() -> None:
    """For the layers of Llama-3-8B, what is sent is hidden; a row of tokens is left to the library."""
    for n in ((3072,), (7168, 7168)):
        choice = plan.choose(AllGatherMatmulGradients(2, 8192, n, 4096, "bf16"), gpu("h200", 2))
        assert choice.candidate.name == "direct"
    assert plan.choose(AllGatherMatmulGradients(2, 64, (512,), 512, "bf16"), gpu("h200", 2)).candidate.name == "serial"
