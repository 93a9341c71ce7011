"""Predictions from machine files alone, without measured GEMMs, against calls that were recorded on these machines."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from weft.builders import named
from weft.builders.problem import described
from weft.hw import load_machine
from weft.plan.choose import decide
from weft.plan.predict import least_us, predict
from weft.sim import Model, model_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHORT_US = 100.0


@cache
def model(machine: str, ranks: int) -> Model:
    return model_of(load_machine(machine), ranks)


def calls(file: str, mode: str) -> list[dict[str, Any]]:
    """Return the records of schedules, with the schedule's name as `variant`."""
    rows = [json.loads(line) for line in (RESULTS / f"{file}.jsonl").read_text().splitlines()]
    rows = [row | {"variant": row["chosen"] if row["variant"] == "weft" else row["variant"]} for row in rows]
    return [row for row in rows if row["mode"] == mode and row["variant"] not in (None, "asynctp")]


def error(row: dict[str, Any], machine: str) -> float:
    p = described(row["op"], m=row["m"], n=row["n"], k=row["k"], ranks=row["ranks"], dtype=row["dtype"])
    by = model(machine, row["ranks"])
    return abs(predict(named(p, row["variant"]).build(), by, row["mode"], least_us(p, by)) / (1e3 * row["p50_ms"]) - 1)


@pytest.mark.parametrize(
    ("file", "mode", "most", "most_short"),
    [
        ("h100-all_gather_matmul", "queued", 0.03, 0.13),
        ("h100-all_gather_matmul", "single", 0.15, None),
        ("h100-matmul_reduce_scatter", "queued", 0.04, 0.10),
        ("h200-all_gather_matmul", "queued", 0.06, 0.10),
        ("h200-all_gather_matmul", "single", 0.15, None),
        ("h200-all_gather_matmul-models", "queued", 0.08, 0.10),
        ("h200-all_gather_matmul-models", "graph", 0.08, 0.12),
        ("h200-all_gather_matmul-schedules", "queued", 0.06, None),
        ("h200-matmul_reduce_scatter", "queued", 0.05, 0.08),
        ("h200-matmul_reduce_scatter", "single", 0.20, None),
        ("h200-matmul_all_reduce", "queued", 0.04, 0.09),
        ("h200-matmul_all_gather", "queued", 0.06, 0.10),
    ],
)
def test_recorded_calls_take_about_as_long_as_predicted(
    file: str, mode: str, most: float, most_short: float | None
) -> None:
    """Check the mean error of calls of at least 100 us, and of shorter calls. For single calls, check the mean of all."""
    rows = calls(file, mode)
    machine = file.partition("-")[0]
    long = [row for row in rows if mode == "single" or 1e3 * row["p50_ms"] >= SHORT_US]
    short = [row for row in rows if row not in long]
    assert len(long) >= 8
    assert sum(error(row, machine) for row in long) / len(long) < most
    if most_short is not None:
        assert len(short) >= 4
        assert sum(error(row, machine) for row in short) / len(short) < most_short


def test_collectives_beside_matmuls_begin_late() -> None:
    """Kernels of collectives wait for compute units, like copies by kernel."""
    rows = [row for row in calls("h200-all_gather_matmul-schedules", "queued") if "collective" in row["variant"]]
    assert len(rows) >= 50
    assert sum(error(row, "h200") for row in rows) / len(rows) < 0.08


MANY = ("h100-matmul_all_gather_gradients", "h200-all_gather_matmul-schedules", "h100-t3", "h100-ficco-launches")
"""All records of GEMMs with at least 8 schedules of a shape. (The record of experts with as many schedules is older than their
kernels.)"""


def test_the_planner_picks_among_the_fastest_of_many_recorded_schedules() -> None:
    """Each of 27 groups is a shape and a mode with at least 8 recorded schedules.

    In 25 groups the planner's choice among them is within 3% of the fastest, and in the others within 8% and 13%. Without
    the planner's margins, the schedule with the shortest prediction is within 3% in 23 groups and within 23% in all. The
    misses are small GEMMs, for which predictions of schedules with many steps are too short.
    """
    groups: dict[tuple[Any, ...], dict[str, float]] = {}
    for file in MANY:
        for row in (row for mode in ("queued", "graph") for row in calls(file, mode)):
            if row["variant"] == "serial" or "[" in row["variant"] or row["variant"] == "gather":
                key = (
                    file[:4],
                    row["mode"],
                    row["ranks"],
                    row["op"],
                    row["m"],
                    row["n"],
                    row["k"],
                    row["dtype"],
                    row["config"],
                )
                took = groups.setdefault(key, {})
                took[row["variant"]] = min(row["p50_ms"], took.get(row["variant"], row["p50_ms"]))
    picked, shortest = [], []
    for (machine, mode, ranks, op, m, n, k, dtype, _), took in groups.items():
        if len(took) >= 8:
            p, by = described(op, m=m, n=n, k=k, ranks=ranks, dtype=dtype), model(machine, ranks)
            predicted = {name: predict(named(p, name).build(), by, mode, least_us(p, by)) for name in took}
            least_ms = min(took.values())
            shortest.append(took[min(predicted, key=predicted.__getitem__)] / least_ms - 1)
            picked.append(took[decide(p, by, mode=mode, among=frozenset(took)).candidate.name] / least_ms - 1)
    assert len(picked) >= 27
    assert sum(lost <= 0.03 for lost in picked) >= 0.9 * len(picked)
    assert max(picked) < 0.13
    assert sum(lost <= 0.03 for lost in shortest) >= 0.85 * len(shortest)
    assert max(shortest) < 0.23
