"""Predictions by machine files alone, on random shapes whose records did not make these files.

`weft bench never-slower` drew the shapes and ran them on two H100s and two H200s. GEMMs and embeddings are judged in queued calls.
Experts are judged in graphs: outside graphs the CPU reads sizes, and the CPUs of these machines differ by a factor of 3.
docs/planning.md has the limits.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.slow import slow

from weft.bench.core.options import DTYPES
from weft.bench.never_slower.draw import Bounds, Drawn, draw
from weft.bench.ops.embedding_presets import EmbeddingPreset, Scale
from weft.bench.ops.moe_shape import MoeShape
from weft.builders import Problem, named
from weft.builders.problem import PROBLEMS, described
from weft.embedding.plan import problem_of
from weft.hw import load_machine
from weft.plan.predict import least_us, library_gemms, predict
from weft.sim import Model, model_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EXPERTS, EMBEDDING = ("all_to_all_matmul", "matmul_all_to_all"), "embedding_all_to_all"
BOUNDS = {
    "h100": Bounds("cuda", 2, 5000 * 989e6, 5000 * 3.35e6, 85e9 / 4),
    "h200": Bounds("cuda", 2, 5000 * 989e6, 5000 * 4.8e6, 150.7e9 / 4),
}
"""The limits of the shapes that these GPUs drew (`weft.bench.never_slower.draw.bounds_here`)."""


IN_ONE_LANE, SINCE = "combine_by_expert[chunks=1,by=kernel]", "2026-11-27T17:30"
"""This schedule has had three launches since this time. Older records of it are left out."""

ONE_KERNEL_SINCE = "2026-11-27T20:02"
"""Since this time, one kernel has sorted the rows of unfused combines. Older records of `serial` are left out: torch's functions
needed 13 launches, and copied at 0.42 times this rate."""


@cache
def _model(machine: str) -> Model:
    return model_of(load_machine(machine), 2)


@cache
def _records(machine: str) -> list[dict[str, Any]]:
    files = RESULTS.glob(f"{machine}-never-slower*.jsonl")
    lines = [line for file in sorted(files) for line in file.read_text().splitlines()]
    return [record for record in map(json.loads, lines) if "weft_ms" in record and not record["again"]]


def _problems(machine: str, record: dict[str, Any]) -> list[Problem]:
    """Return the problems of the two input sets, which differ only for experts."""
    op, config = record["op"], record["config"]
    if op == EMBEDDING:
        drawn: Drawn = draw(op, record["index"], record["seed"], BOUNDS[machine])
        assert isinstance(drawn, EmbeddingPreset)
        assert drawn.name == config
        sized = drawn.config(2, Scale(Fraction(1), Fraction(1)), DTYPES["fp32"])
        return [problem_of(sized.sharding, sized.batch_sizes, drawn.indices.exponent)]
    if op not in EXPERTS:
        m, n, k = map(int, config.split("x"))
        name = {"all_gather_scaled_matmul": "all_gather_matmul"}.get(op, op)
        return [described(name, m=m, n=n, k=k, ranks=2, dtype=record["dtype"])]
    (shape,) = MoeShape.named(config, {})
    kind: Any = PROBLEMS[op]
    even = kind.even(shape.rows, shape.n, shape.k, shape.experts // 2, 2, "bf16")
    splits = [tuple(map(tuple, shape.splits(2, which).tolist())) for which in (0, 1)]
    return [replace(even, splits=of, exact=not record["variant"].endswith("bounded")) for of in splits]


def _errors(machine: str, op: str, mode: str) -> list[float]:
    model, found = _model(machine), []
    for record in _records(machine):
        if (record["op"], record["mode"]) == (op, mode):
            problems = _problems(machine, record)
            if record["chosen"] == IN_ONE_LANE and record["date"] < SINCE:
                continue
            us = [predict(named(p, record["chosen"]).build(), model, mode, least_us(p, model)) for p in problems]  # type: ignore[arg-type]
            found.append(statistics.fmean(us) / (1e3 * statistics.median(record["weft_ms"])) - 1)
    return found


@pytest.mark.parametrize(
    ("op", "mode", "h100", "h200"),
    [
        ("all_gather_matmul", "queued", 0.07, 0.05),
        ("all_gather_scaled_matmul", "queued", 0.08, 0.07),
        ("matmul_reduce_scatter", "queued", 0.08, 0.06),
        ("scaled_matmul_reduce_scatter", "queued", 0.08, 0.06),
        ("matmul_all_reduce", "queued", 0.08, 0.07),
        ("matmul_all_gather", "queued", 0.06, 0.04),
        ("embedding_all_to_all", "queued", 0.10, 0.11),
        slow("all_to_all_matmul", "graph", 0.09, 0.12),
        slow("matmul_all_to_all", "graph", 0.07, 0.12),
    ],
)
def test_random_shapes_take_about_as_long_as_predicted(op: str, mode: str, h100: float, h200: float) -> None:
    """Limit the mean error. Each record is compared with the prediction for the schedule that ran."""
    for machine, most in (("h100", h100), ("h200", h200)):
        errors = _errors(machine, op, mode)
        assert len(errors) >= 12
        assert statistics.fmean(map(abs, errors)) < most, machine


def test_serial_combines_take_about_as_long_as_predicted() -> None:
    """Limit the mean error of queued calls. The CPU knows the sizes, so it does not wait."""
    model, errors = _model("h100"), []
    for record in _records("h100"):
        if (record["op"], record["mode"]) == ("matmul_all_to_all", "queued") and record["date"] >= ONE_KERNEL_SINCE:
            problems = _problems("h100", record)
            us = [predict(named(p, "serial").build(), model, "queued", least_us(p, model)) for p in problems]
            errors.append(statistics.fmean(us) / (1e3 * statistics.median(record["serial_ms"])) - 1)
    assert len(errors) >= 12
    assert statistics.fmean(map(abs, errors)) < 0.10


def _with_gemm(machine: str, record: dict[str, Any]) -> tuple[Problem, Model]:
    """Return the problem, and the model with the recorded time of its GEMM, as a first call would measure it."""
    (problem,) = _problems(machine, record)
    (gemm,) = library_gemms(problem)
    return problem, _model(machine).with_measured({gemm: 1e3 * record["computation_ms"]})


@pytest.mark.parametrize(
    ("op", "h100", "h200"),
    [
        ("all_gather_matmul", 0.025, 0.02),
        ("all_gather_scaled_matmul", 0.025, 0.03),
        ("matmul_reduce_scatter", 0.025, 0.03),
        ("scaled_matmul_reduce_scatter", 0.03, 0.03),
        ("matmul_all_reduce", 0.035, 0.02),
        ("matmul_all_gather", 0.03, 0.03),
    ],
)
def test_serial_takes_as_long_as_predicted_if_the_time_of_its_gemm_is_known(op: str, h100: float, h200: float) -> None:
    """Limit the mean error of queued calls of at least 100 us. Only the collective is predicted."""
    for machine, most in (("h100", h100), ("h200", h200)):
        errors = []
        for record in _records(machine):
            if (record["op"], record["mode"]) == (op, "queued") and statistics.median(record["serial_ms"]) >= 0.1:
                p, model = _with_gemm(machine, record)
                us = predict(named(p, "serial").build(), model, "queued", least_us(p, model))
                errors.append(us / (1e3 * statistics.median(record["serial_ms"])) - 1)
        assert len(errors) >= 8
        assert statistics.fmean(map(abs, errors)) < most, machine


@pytest.mark.parametrize(
    ("machine", "dtype", "most"),
    [("h100", "bf16", 0.08), ("h100", "fp8", 0.10), ("h200", "bf16", 0.06), ("h200", "fp8", 0.08)],
)
def test_gemms_take_about_as_long_as_predicted(machine: str, dtype: str, most: float) -> None:
    """Limit the mean error of GEMMs alone. The rates of the H100's GEMMs were fitted to seven other seeds."""
    errors = []
    for record in _records(machine):
        if record["op"] not in (*EXPERTS, EMBEDDING) and (record["dtype"], record["mode"]) == (dtype, "queued"):
            (gemm,) = library_gemms(*_problems(machine, record))
            errors.append(_model(machine).matmul_us(*gemm) / (1e3 * record["computation_ms"]) - 1)
    assert len(errors) >= 48
    assert statistics.fmean(map(abs, errors)) < most
