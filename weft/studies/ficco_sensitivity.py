"""A sensitivity analysis of FiCCO's evaluation of table I: the results if an assumed number of the machine is 20% lower
or higher.

Each change is first simulated for one small GEMM, `_PROBE`. If none of its times changes by more than 0.1%, the report
lists the number as having no effect, and the other GEMMs are not simulated.

Each schedule is built once for all changes, because building it takes as long as simulating it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from weft.bench.core.tables import Record, ResultTable, geomean, table
from weft.bench.table_1 import TABLE_1, GatheredGemm, find_gemms
from weft.builders import AllGatherMatmul, named
from weft.hw import Machine
from weft.plan import static_pick
from weft.plan.closed_form import closed_form_pick
from weft.plan.predict import least_us, predict
from weft.sim.losses import communication_us, gemms_us
from weft.studies.ficco_rows import EIGHT, NEAR, SERIAL, SHARD, STUDIED, GemmRow
from weft.studies.pages import model_for, scaled

FACTORS = (0.8, 1.2)
_PROBE, _EFFECT = ("g14",), 1e-3


def simulate(machine: Machine, ranks: int, topology: str | None, step: Callable[[str, float], None]) -> Record:
    """Return a record with a line for each change of an assumed number of `machine`. A line has mean speedups, and how
    often FiCCO's heuristic and weft's closed form (`weft.plan.closed_form`) pick a schedule near the fastest one.

    step: called with a description of the next piece of work, and its fraction of all work.
    """
    keys = [key for key in machine if machine[key].source == "assumed"]
    changes: list[tuple[str, float | None]] = [("as it is", None), *itertools.product(keys, FACTORS)]
    machines = [machine if factor is None else scaled(machine, key, factor) for key, factor in changes]
    (probe,) = find_gemms(_PROBE)
    step(f"{len(keys)} assumed numbers at 80% and 120% for {probe.name}", 0.1)
    before, *now = _rows(probe, machines, ranks, topology)
    matters = [
        key == "heuristic.threshold" or any(abs(row.ms[name] / ms - 1) > _EFFECT for name, ms in before.ms.items())
        for (key, _), row in zip(changes[1:], now, strict=True)
    ]
    changes = list(itertools.compress(changes, [True, *matters]))
    machines = list(itertools.compress(machines, [True, *matters]))
    by_gemm = []
    gemms = [gemm for gemm in TABLE_1 if gemm.m % (ranks * ranks) == 0]
    for gemm in gemms:
        step(f"{len(changes) - 1} changed numbers for {gemm.name}", 0.9 / len(gemms))
        by_gemm.append(_rows(gemm, machines, ranks, topology))
    lines = [[*change, _summary(rows)] for change, rows in zip(changes, zip(*by_gemm, strict=True), strict=True)]
    without = sorted(set(keys) - {key for key, _ in changes})
    count = {} if len(gemms) == len(TABLE_1) else {"gemms": len(gemms)}
    return {"config": "sensitivity", "variant": "sensitivity", "lines": lines, "without": without, **count}


def _rows(gemm: GatheredGemm, machines: Sequence[Machine], ranks: int, topology: str | None) -> list[GemmRow]:
    """Return the results for one GEMM on each of `machines`."""
    mine = gemm.sharded(ranks)
    problem = AllGatherMatmul.even(mine.m, mine.n, mine.k, ranks)
    models = [model_for(machine, ranks, topology) for machine in machines]
    least = [least_us(problem, model) for model in models]
    ms: list[dict[str, float]] = [{} for _ in machines]
    for name in (SERIAL, SHARD, *EIGHT):
        schedule = named(problem, name).build()
        for of_machine, model, us in zip(ms, models, least, strict=True):
            of_machine[name] = predict(schedule, model, "queued", us) / 1e3
    return [
        GemmRow(
            gemm.name, mine, static_pick(problem, machine) or "", of_machine, gemms_us(problem, model) / 1e3,
            communication_us(problem, model) / 1e3, closed_form_pick(problem, model),
        )
        for machine, model, of_machine in zip(machines, models, ms, strict=True)
    ]  # fmt: skip


def _summary(rows: Sequence[GemmRow]) -> dict[str, float]:
    def near(pick: Callable[[GemmRow], str], among: Sequence[str]) -> float:
        return sum((row.lost(pick(row), among) or 0.0) <= NEAR for row in rows)

    return {
        "ideal": geomean([row.ideal for row in rows]) or 0.0,
        "shard": geomean([row.speedup(SHARD) or 0.0 for row in rows]) or 0.0,
        "1D": geomean([row.speedup(*EIGHT[:4]) or 0.0 for row in rows]) or 0.0,
        "2D": geomean([row.speedup(*EIGHT[4:]) or 0.0 for row in rows]) or 0.0,
        "heuristic": near(lambda row: row.pick, tuple(STUDIED.values())),
        "closed": near(lambda row: row.closed, EIGHT),
    }


def sensitivity_table(record: Record) -> ResultTable:
    count = record.get("gemms", len(TABLE_1))
    columns: dict[str, Callable[[Any], str]] = {
        "number": lambda line: line[0] if line[1] is None else f"{line[0]} x {line[1]:g}",
        "ideal": lambda line: f"{line[2]['ideal']:.2f}",
        "shard": lambda line: f"{line[2]['shard']:.2f}",
        "FiCCO 1D": lambda line: f"{line[2]['1D']:.2f}",
        "FiCCO 2D": lambda line: f"{line[2]['2D']:.2f}",
        "heuristic: picks within 3%": lambda line: f"{line[2]['heuristic']:.0f} of {count}",
        "closed form: picks within 3%": lambda line: f"{line[2]['closed']:.0f} of {count}",
    }
    title = (
        "Table I with one assumed number of the machine changed: geometric means of speedups, and how many picks are within "
        f"{NEAR:.0%} of the fastest schedule"
    )
    return table(title, record["lines"], columns)


def omitted(record: Record) -> str:
    """Return sentences that say from which schedules the heuristic and the closed form pick, and which assumed numbers the
    table omits.
    """
    return (
        "In the table of changed numbers, the heuristic picks from four schedules, and the closed form from eight. The table "
        f"omits numbers that change the times of {_PROBE[0]} by less than {_EFFECT:.1%}: {', '.join(record['without'])}."
    )
