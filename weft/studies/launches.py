"""Launch overhead of schedules with many steps, from records of `weft bench`: the CPU time of a call, and what CUDA
graphs save.

The CPU launches each step of a schedule: a GEMM, a copy, a signal or a wait. A schedule with more pieces has more
steps. For small sizes, launches take longer than the work.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV (other inefficiency
losses).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.bench.core.records import last_runs
from weft.bench.core.tables import Record, ResultTable, geomean, milliseconds, number, table
from weft.builders import described, named
from weft.studies.claims import Claim
from weft.studies.losses import spearman
from weft.studies.pages import block, where

_LEAST = 5  # schedules of a shape


class LaunchRow(NamedTuple):
    """The times of one schedule for one shape.

    steps: the number of steps that a rank launches in a call.
    cpu_us: the CPU time in us to launch a call, if calls are queued one after the other.
    ms: the time in ms per call, by timing mode.
    """

    config: str
    schedule: str
    steps: int
    cpu_us: float | None
    ms: dict[str, float]


def rows_of(records: Sequence[Record]) -> list[LaunchRow]:
    """Return a row for each pinned schedule, ordered by shape and then by number of steps. Raise `ValueError` if no
    schedule was pinned.
    """
    rows = []
    for of_config in last_runs(records, lambda r: (r["op"], r["config"], r["dtype"])).values():
        by: dict[str, dict[str, Record]] = {}
        for r in of_config:
            by.setdefault(r["variant"], {})[r["mode"]] = r
        mine = []
        for variant, modes in by.items():
            one = next(iter(modes.values()))
            if (steps := _steps(one, variant)) is not None:
                cpu_us = modes["queued"]["host_us"] if "queued" in modes else None
                ms = {mode: r["p50_ms"] for mode, r in modes.items()}
                mine.append(LaunchRow(one["config"], variant, steps, cpu_us, ms))
        rows += sorted(mine, key=lambda row: row.steps)
    if not rows:
        raise ValueError("no record has a pinned schedule: run weft bench with names of schedules in --variants")
    return rows


def _steps(r: Record, variant: str) -> int | None:
    """Return the number of steps that a rank launches in the schedule `variant`; None if the variant is not a
    schedule's name.
    """
    p = described(r["op"], m=r["m"], n=r["n"], k=r["k"], ranks=r["ranks"], dtype=r["dtype"])
    try:
        return sum(len(lane.steps) for lane in named(p, variant).build().of_rank(0))
    except ValueError:
        return None


def tables(rows: Sequence[LaunchRow]) -> list[ResultTable]:
    def ms(mode: str) -> Callable[[LaunchRow], str]:
        return lambda row: milliseconds(row.ms.get(mode))

    def saved(row: LaunchRow) -> str:
        single, graph = row.ms.get("single"), row.ms.get("graph")
        return "" if single is None or graph is None else f"{single / graph:.2f}x"

    columns: dict[str, Callable[[LaunchRow], str]] = {
        "M x N x K": lambda row: row.config,
        "schedule": lambda row: row.schedule,
        "steps": lambda row: str(row.steps),
        "CPU us": lambda row: number(row.cpu_us, 0),
        "single ms": ms("single"),
        "queued ms": ms("queued"),
        "graph ms": ms("graph"),
        "single / graph": saved,
    }
    return [table("Steps of a schedule, the CPU's time to launch them, and times by mode", rows, columns)]


def notes(records: Sequence[Record]) -> list[str]:
    return [where(records[-1]).replace(", queued", "")]


def claims(rows: Sequence[LaunchRow]) -> list[Claim]:
    """Return the paper's claims on launch overhead with the recorded numbers. Claims without records are left out."""
    by: dict[str, list[LaunchRow]] = {}
    for row in rows:
        by.setdefault(row.config, []).append(row)
    found = []
    growths = [
        spearman([row.steps for row in of], [row.cpu_us or 0.0 for row in of])
        for of in by.values()
        if len(of) >= _LEAST
    ]
    if growths:
        said = f"rank correlation of steps and CPU time {min(growths):+.2f} to {max(growths):+.2f}"
        what = "the CPU needs longer to launch finer schedules"
        found.append(Claim(what, "IV", "yes", said, held=min(growths) > 0))
    saved = {
        config: [row.ms["single"] / row.ms["graph"] for row in of if {"single", "graph"} <= row.ms.keys()]
        for config, of in by.items()
    }
    means = {config: mean for config, of in saved.items() if (mean := geomean(of)) is not None}
    if len(means) > 1:
        said = ", ".join(f"{mean:.2f}x for {config}" for config, mean in means.items())
        what = "graphs save launch overhead, mostly if operations are small (single / graph)"
        first, *others = means.values()
        found.append(Claim(what, "IV", "yes", said, held=first > 1 and first >= max(others)))
    return found


def markdown(records: Sequence[Record]) -> str:
    """Return the generated part of the report, as Markdown."""
    return block(notes(records), tables(rows_of(records)))
