"""An operator's options in its benchmark: the meaning of their strings, and the schedules that calls with options take."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft import symm
from weft.bench.__main__ import options_of
from weft.bench.core.harness import Ranks
from weft.bench.core.operators import operator
from weft.bench.core.run import ceilings_for
from weft.bench.ops import any_operator
from weft.launch import Pool
from weft.operator import select


def _ranks(group: dist.ProcessGroup) -> Ranks:
    return Ranks(group, group, torch.device("cpu"))


def test_an_operators_own_options_are_measured_and_named() -> None:
    given = ["--preset", "24x10x16", "--ranks", "2", "--device", "cpu", "--option", "gather_dim=-1"]
    options = options_of(["matmul_all_gather", *given])
    (shape,) = operator("matmul_all_gather").presets(options)
    ((p, _),) = shape.problems("matmul_all_gather", 2, "fp32")
    assert (p.columns, shape.name) == (True, "24x10x16 gather_dim=-1")
    with pytest.raises(ValueError, match=r"gather_dim=-1: matmul_all_reduce has no such option \(matmul_all_gather"):
        options_of(["matmul_all_reduce", *given])
    with pytest.raises(ValueError, match=r"option=.*gather_dim.*: tensor_parallel has no options: do not pass it"):
        options_of(["tensor_parallel", *given[2:]])
    for wrong, said in {
        "gather_dim": "option 'gather_dim' has no value: write it as gather_dim=VALUE",
        "gather_dim=": "option 'gather_dim=' has no value: write it as gather_dim=VALUE",
        "=-1": "option '=-1' has no name: write NAME=VALUE, such as gather_dim=-1",
        "gather_dim=rows": "gather_dim=rows: give a whole number",
    }.items():
        with pytest.raises(ValueError, match=said):
            options_of(["matmul_all_gather", *given[:-1], wrong])


def _following(*options: str) -> tuple[str, Any]:
    """Return the name and the problem of a GEMM + all-reduce with these options."""
    given = [word for one in options for word in ("--option", one)]
    typed = options_of(["matmul_all_reduce", "--preset", "24x10x16", "--ranks", "2", "--device", "cpu", *given])
    (shape,) = operator("matmul_all_reduce").presets(typed)
    ((p, _),) = shape.problems("matmul_all_reduce", 2, "fp32")
    return shape.name, p


def test_an_options_text_is_what_its_type_says() -> None:
    name, p = _following("norm=false", "residual=no")
    assert (p.eps, p.residual, name) == (None, False, "24x10x16 norm=False residual=False")
    name, p = _following("norm=YES", "residual=true")
    assert (p.eps, p.residual, name) == (1e-6, True, "24x10x16 norm=True residual=True")
    with pytest.raises(ValueError, match=r"norm=maybe: give true or false \(1 or 0, yes or no\)"):
        _following("norm=maybe")
    with pytest.raises(
        ValueError, match="eps=1e-5: matmul_all_reduce has no such option; its own options are residual, norm"
    ):
        _following("eps=1e-5")


TAKEN = "two_shot[chunks=2,by=dma,add=gemm]"


def _chosen(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the schedules that a benchmark reports for an overlapped call: normally, after the operator has dropped
    the call, and without a call.
    """
    symm.communicator(group, "cpu").close()  # this also drops choices of other tests for this shape
    typed = options_of(
        ["matmul_all_reduce", "--preset", "8x4x8", "--ranks", "2", "--device", "cpu", "--option", "residual=true"]
    )
    op = operator("matmul_all_reduce")
    (shape,) = op.presets(typed)
    work, found, original = op.workload(shape, _ranks(group), typed), {}, select._names_near
    select._names_near = lambda *given, **named: (TAKEN, TAKEN)  # type: ignore[assignment]
    try:
        with contextlib.suppress(KeyError):
            found["not called"] = work.taken("weft", "queued")
        work.weft("weft", None)(0)
        work.called("weft")
        found["serial is noise"] = work.twins("queued")
    finally:
        select._names_near = original
    made, any_operator.prepared_calls = any_operator.prepared_calls, lambda op, group: []  # type: ignore[assignment]
    try:
        found["forgotten"] = work.taken("weft", "queued")
        with contextlib.suppress(RuntimeError):
            work.called("weft")
            found["of another problem"] = work.taken("weft", "queued")
    finally:
        any_operator.prepared_calls = made
        symm.communicator(group, "cpu").close()
    return found


def test_what_a_call_with_options_took_is_recorded_and_never_guessed(pool: Pool) -> None:
    for found in pool.run(_chosen, ranks=2):
        assert found == {"serial is noise": {}, "forgotten": TAKEN}


def _with_a_residual(group: dist.ProcessGroup) -> list[dict]:
    given = [
        "--preset",
        "24x10x16",
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--quick",
        "--seconds",
        "0.01",
        "--mode",
        "queued",
    ]
    options = options_of(["matmul_all_reduce", *given, "--option", "residual=true", "--option", "norm=false"])
    ranks, op = _ranks(group), operator("matmul_all_reduce")
    (shape,) = op.presets(options)
    found = op.measure(shape, ranks, options, ceilings_for(options, ranks), lambda what, share: None)
    assert not found.wrong
    return found.records


def test_a_run_with_options_is_measured(pool: Pool) -> None:
    rows = pool.run(_with_a_residual, ranks=2)[0]
    assert {r["config"] for r in rows} == {"24x10x16 residual=True norm=False"}
    assert [(r["variant"], r["chosen"] is None) for r in rows] == [("serial", True), ("weft", False)]
