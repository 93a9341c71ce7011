"""A sensitivity analysis of FiCCO's evaluation of table I: the results if an assumed number of the machine is 20% lower
or higher.

Each change is first simulated for one small GEMM, `_PROBE`. If none of its times changes by more than 0.1%, the report
lists the number as having no effect, and the other GEMMs are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    probe = _times(find_gemms(_PROBE), machine, ranks, topology)
    lines: list[list[Any]] = [["as it is", None, _summary(list(_rows(TABLE_1, machine, ranks, topology)))]]
    keys = [key for key in machine if machine[key].source == "assumed"]
    for key in keys:
        step(f"{key} at 80% and 120%", 1 / len(keys))
        for factor in FACTORS:
            changed = scaled(machine, key, factor)
            now = _times(find_gemms(_PROBE), changed, ranks, topology)
            if key == "heuristic.threshold" or any(abs(now[name] / us - 1) > _EFFECT for name, us in probe.items()):
                lines.append([key, factor, _summary(list(_rows(TABLE_1, changed, ranks, topology)))])
    without = sorted(set(keys) - {line[0] for line in lines})
    return {"config": "sensitivity", "variant": "sensitivity", "lines": lines, "without": without}


def _times(gemms: Sequence[GatheredGemm], machine: Machine, ranks: int, topology: str | None) -> dict[str, float]:
    return {f"{row.config} {name}": ms for row in _rows(gemms, machine, ranks, topology) for name, ms in row.ms.items()}


def _rows(gemms: Sequence[GatheredGemm], machine: Machine, ranks: int, topology: str | None) -> Iterator[GemmRow]:
    model = model_for(machine, ranks, topology)
    for gemm in gemms:
        mine = gemm.sharded(ranks)
        problem = AllGatherMatmul.even(mine.m, mine.n, mine.k, ranks)
        least = least_us(problem, model)
        ms = {
            name: predict(named(problem, name).build(), model, "queued", least) / 1e3
            for name in (SERIAL, SHARD, *EIGHT)
        }
        halves = gemms_us(problem, model) / 1e3, communication_us(problem, model) / 1e3
        pick = static_pick(problem, machine)
        yield GemmRow(gemm.name, mine, pick or "", ms, *halves, closed_form_pick(problem, model))


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
    columns: dict[str, Callable[[Any], str]] = {
        "number": lambda line: line[0] if line[1] is None else f"{line[0]} x {line[1]:g}",
        "ideal": lambda line: f"{line[2]['ideal']:.2f}",
        "shard": lambda line: f"{line[2]['shard']:.2f}",
        "FiCCO 1D": lambda line: f"{line[2]['1D']:.2f}",
        "FiCCO 2D": lambda line: f"{line[2]['2D']:.2f}",
        "heuristic: picks within 3%": lambda line: f"{line[2]['heuristic']:.0f} of {len(TABLE_1)}",
        "closed form: picks within 3%": lambda line: f"{line[2]['closed']:.0f} of {len(TABLE_1)}",
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
