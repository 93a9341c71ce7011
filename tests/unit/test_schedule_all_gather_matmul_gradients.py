"""Gradients of all-gather + GEMM and of GEMM + all-gather, each as one schedule.

Every candidate verifies, runs on GPUs, and gives the gradients in random legal orders over several runs. Inputs are
small whole numbers, whose sums are exact in any order, so results are compared for equality.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import Small, check_candidate, check_candidates, check_rows_in_one_plan
from schedule_interpreter import Tensors, edited
from support.sim_toys import applicable, gpu
from support.slow import mostly, slow

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
GATHERED: list[Problem] = [
    AllGatherMatmulGradients(1, 5, (3,), 4, "fp32"),
    AllGatherMatmulGradients(2, 14, (3, 2), 4, "bf16"),
    AllGatherMatmulGradients(3, 15, (2, 5, 1), 3, "fp16"),
    AllGatherMatmulGradients(4, 36, (7,), 3, "fp32"),
    AllGatherMatmulGradients(8, 16, (3, 1), 2, "bf16"),
]
SIZES = (
    (1, 5, 3, 4, "fp32"),
    (2, 14, 9, 4, "bf16"),
    (3, 11, 8, 3, "fp16"),
    (4, 1, 2, 3, "fp32"),
    (8, 9, 10, 2, "bf16"),
)
JOINED: list[Problem] = [MatmulAllGatherGradients(*sizes, columns) for sizes in SIZES for columns in (False, True)]


def of_gathered(p: AllGatherMatmulGradients, small: Small) -> tuple[list[Tensors], list[Tensors]]:
    ranks = range(p.world_size)
    xs, gs = [small(p.rows, p.k) for _ in ranks], [[small(p.m, n) for n in p.n] for _ in ranks]
    ws = [[small(n, p.k) for n in p.n] for _ in ranks]
    total = sum(g @ w for of_g, of_w in zip(gs, ws, strict=True) for g, w in zip(of_g, of_w, strict=True))
    inputs = [
        {"x_shard": xs[r]}
        | {f"g{i}": g for i, g in enumerate(gs[r])}
        | {f"gt{i}": g.T for i, g in enumerate(gs[r])}
        | {f"wt{i}": w for i, w in enumerate(ws[r])}
        for r in ranks
    ]
    parts = np.split(np.asarray(total), p.world_size)
    return inputs, [
        {"grad_x": parts[r]} | {f"grad_wt{i}": g.T @ np.concatenate(xs) for i, g in enumerate(gs[r])} for r in ranks
    ]


def of_joined(p: MatmulAllGatherGradients, small: Small) -> tuple[list[Tensors], list[Tensors]]:
    inputs = [{"g": small(*p.shape), "xt": small(p.k, p.m), "wt": small(p.n, p.k)} for _ in range(p.world_size)]
    parts = np.split(np.sum([one["g"] for one in inputs], axis=0), p.world_size, axis=int(p.columns))
    return inputs, [
        {"grad_x": own @ one["wt"], "grad_w": one["xt"] @ own} for own, one in zip(parts, inputs, strict=True)
    ]


def of_run(p: Problem, small: Small) -> tuple[list[Tensors], list[Tensors]]:
    return of_joined(p, small) if isinstance(p, MatmulAllGatherGradients) else of_gathered(p, small)


@pytest.mark.parametrize("p", mostly([*GATHERED, *JOINED], *GATHERED, *JOINED[:-2]), ids=str)
def test_every_candidate_gives_the_gradients(p: Problem) -> None:
    check_candidates(p, of_run, {"direct"})


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


@settings(max_examples=40)
@given(data=st.data())
def test_some_small_shapes(data: st.DataObject) -> None:
    world, m = data.draw(st.integers(1, 5), label="world_size"), data.draw(st.integers(0, 12), label="m")
    n, k = data.draw(st.integers(0, 12), label="n"), data.draw(st.integers(0, 3), label="k")
    p = MatmulAllGatherGradients(world, m, n, k, "fp32", data.draw(st.booleans(), label="columns"))
    name, schedule = data.draw(st.sampled_from(sorted(applicable(p).items(), key=lambda one: one[0])))
    check_candidate(p, name, schedule, of_run, runs=2, seeds=1)


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
        (GATHERED[2], "direct", ("arrived", "computed", "there", "credit")),
        (JOINED[4], "direct[chunks=2]", ("there", "credit")),
        (JOINED[5], "direct[chunks=4,last=columns]", ("there", "credit")),
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


@pytest.mark.parametrize("p", [GATHERED[2], JOINED[3]], ids=str)
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


def test_a_new_number_of_rows_is_no_new_plan() -> None:
    p = MatmulAllGatherGradients(2, 4096, 4096, 2048, "bf16")
    check_rows_in_one_plan(p, (4095, 4200, 3900), replace(p, columns=True), 3)
