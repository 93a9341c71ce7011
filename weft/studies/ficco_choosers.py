"""Two evaluations of rules that choose a FiCCO schedule: `sweep` fits the thresholds of the paper's heuristic, and
`judge_drawn` compares rules on random GEMMs.

The paper's heuristic compares a GEMM's sizes with thresholds. weft's closed form (`weft.plan.closed_form`) computes the
time of each schedule by formulas. `sweep` counts good picks on the same GEMMs to which it fits the thresholds. So its
counts are upper bounds for heuristics of this form.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", V-C, VI-D and figure 12(a).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weft.bench.core.tables import Record, ResultTable, table
from weft.bench.table_1 import TABLE_1, GatheredGemm
from weft.builders import AllGatherMatmul, named
from weft.hw import Machine
from weft.plan import static_pick
from weft.plan.closed_form import closed_form_pick
from weft.plan.predict import least_us, predict
from weft.sim import Model
from weft.studies.ficco_rows import EIGHT, NEAR, STUDIED, GemmRow

SEED, DRAWN = 28, 64
_MULTIPLES = {"m": 4096, "n": 1024, "k": 1024}
_PAPERS_RANKS, _ABOVE = 8, 5.0


# --- shapes drawn by a seed ---


def drawn(seed: int = SEED, count: int = DRAWN) -> list[GatheredGemm]:
    """Return `count` random GEMMs, drawn like the synthetic GEMMs of `table_1.toml`: their sizes, FLOPs per byte and
    memory traffic are within the ranges of the paper's table I.
    """
    rng, found = random.Random(seed), list[GatheredGemm]()
    papers = [gemm.sharded(_PAPERS_RANKS) for gemm in TABLE_1]
    allowed = [(min(values), max(values)) for values in ([g.op_to_byte for g in papers], [g.traffic for g in papers])]
    sizes = {
        name: (min(getattr(g, name) for g in TABLE_1), max(getattr(g, name) for g in TABLE_1)) for name in _MULTIPLES
    }
    while len(found) < count:
        drawn_sizes = {
            name: max(1, round(least * (most / least) ** rng.random() / _MULTIPLES[name])) * _MULTIPLES[name]
            for name, (least, most) in sizes.items()
        }
        gemm = GatheredGemm(f"d{len(found) + 1}", "SP+TP", "drawn", **drawn_sizes)
        mine = gemm.sharded(_PAPERS_RANKS)
        if all(least <= of <= most for of, (least, most) in zip((mine.op_to_byte, mine.traffic), allowed, strict=True)):
            found.append(gemm)
    return found


def judge_drawn(machine: Machine, model: Model, ranks: int, step: Callable[[str], None] = lambda what: None) -> Record:
    """Return a record with the losses of the closed form and of the heuristic on random GEMMs. A loss is 1 - (speedup
    of the chosen schedule / best speedup of the eight schedules).
    """
    lost: dict[str, list[float]] = {"closed_form": [], "heuristic": []}
    for gemm in drawn():
        step(f"GEMM {gemm.name} of {DRAWN}, drawn by seed {SEED}")
        mine = gemm.sharded(ranks)
        problem = AllGatherMatmul.even(mine.m, mine.n, mine.k, ranks)
        us = {name: predict(named(problem, name).build(), model, "queued", least_us(problem, model)) for name in EIGHT}
        picks = {"closed_form": closed_form_pick(problem, model), "heuristic": static_pick(problem, machine) or ""}
        for who, pick in picks.items():
            lost[who].append(1 - min(us.values()) / us[pick])
    return {"config": f"drawn-{DRAWN}", "variant": "choosers", "seed": SEED, "lost": lost}


def said_of_drawn(records: Sequence[Record]) -> list[str]:
    """Return one sentence on the picks for random GEMMs in the last run, as a list; empty if that run has none."""
    mine = [r for r in records if r.get("variant") == "choosers"]
    if not mine or mine[-1]["run"] != records[-1]["run"]:
        return []
    lost = mine[-1]["lost"]
    said = [
        f"{name} picks a schedule within {NEAR:.0%} of the fastest of eight for {sum(of <= NEAR for of in lost[who])} of them, and "
        f"loses at most {max(lost[who]):.1%} of the best speedup."
        for who, name in (("closed_form", "The closed form"), ("heuristic", "The paper's heuristic"))
    ]
    return [f"Another {len(lost['heuristic'])} GEMMs were drawn with seed {mine[-1]['seed']}. {' '.join(said)}"]


# --- the sweep ---


class Swept(NamedTuple):
    """The best result of one form of heuristic.

    form: a description of the heuristic's form, for the table.
    among: the name of a set of schedules, such as "all eight". The chosen schedule is compared with the fastest of the
        set.
    near: for each table of GEMMs, the number of GEMMs for which the best thresholds choose a schedule whose time is within
        `NEAR` of the fastest.
    thresholds: the best thresholds for each table of GEMMs, as text.
    """

    form: str
    among: str
    near: dict[str, int]
    thresholds: dict[str, str]


def sweep(rows: Sequence[GemmRow], tables: dict[str, str]) -> Iterator[Swept]:
    """Yield the best result of each form of heuristic. The forms are: one schedule for all GEMMs; the paper's thresholds,
    times a factor; and freely chosen thresholds.

    All forms choose among the paper's four schedules. A result is the number of GEMMs whose chosen schedule takes about as
    long as the fastest. First all forms are compared with the fastest of the paper's four schedules, then all forms with
    the fastest of all eight.

    tables: the tables of GEMMs, as {title: first letter of the names of the table's GEMMs}.
    """
    for among, names in (("the paper's four", tuple(STUDIED.values())), ("all eight", EIGHT)):
        forms = (
            ("one schedule for all", _constant),
            (f"the paper's rule: 2D if M <= K, thresholds T and {_ABOVE:g}T", _as_in_the_paper),
            ("the same rule with any limit of M / K and any two thresholds", _any_thresholds),
        )
        for form, best in forms:
            found = {title: best([r for r in rows if r.gemm.name.startswith(b)], names) for title, b in tables.items()}
            yield Swept(form, among, {t: of[0] for t, of in found.items()}, {t: of[1] for t, of in found.items()})


def sweep_table(rows: Sequence[GemmRow], tables: dict[str, str]) -> ResultTable:
    columns: dict[str, Callable[[Swept], str]] = {
        "form of the heuristic": lambda s: s.form,
        "fastest of": lambda s: s.among,
    }
    for title, begin in tables.items():
        count = sum(row.gemm.name.startswith(begin) for row in rows)
        columns[title] = lambda s, title=title, count=count: f"{s.near[title]} of {count}"  # type: ignore[misc]
        columns[f"{title}: tuned to"] = lambda s, title=title: s.thresholds[title]  # type: ignore[misc]
    said = f"Largest number of GEMMs within {NEAR:.0%} of the fastest schedule, with thresholds tuned for each set of GEMMs"
    return table(said, list(sweep(rows, tables)), columns)


def _near(rows: Sequence[GemmRow], among: Sequence[str]) -> dict[str, np.ndarray]:
    """Return {one of the paper's four schedules: bool array with an element for each row}. An element is True if the
    schedule's time for this GEMM is within `NEAR` of the fastest of `among`.
    """
    return {
        title: np.array([(lost := row.lost(name, among)) is not None and lost <= NEAR for row in rows])
        for title, name in STUDIED.items()
    }


def _constant(rows: Sequence[GemmRow], among: Sequence[str]) -> tuple[int, str]:
    counts = {title: int(near.sum()) for title, near in _near(rows, among).items()}
    best = max(counts, key=lambda title: counts[title])
    return counts[best], best


def _right(rows: Sequence[GemmRow], near: dict[str, np.ndarray], border: float, low: float, high: float) -> int:
    """Return the number of GEMMs for which the paper's decision tree (figure 12(a)) picks a schedule about as fast as the fastest.

    near: the result of `_near`, which says for each schedule and GEMM if the schedule is about as fast as the fastest.
    border: the largest M / K for which the tree picks the 2D schedule.
    low, high: for all other GEMMs, the limits in FLOPs between which the tree picks the second of three 1D schedules. Below
        `low` it picks the first, above `high` the third.
    """
    ratio, flop = (np.array(values) for values in zip(*((r.gemm.m / r.gemm.k, r.gemm.ops) for r in rows), strict=True))
    by_columns = ratio <= border
    chosen = {
        "uniform-fused-2D": by_columns,
        "uniform-fused-1D": ~by_columns & (flop < low),
        "hetero-unfused-1D": ~by_columns & (flop > high),
        "hetero-fused-1D": ~by_columns & (flop >= low) & (flop <= high),
    }
    return int(sum((near[title] & where).sum() for title, where in chosen.items()))


def _as_in_the_paper(rows: Sequence[GemmRow], among: Sequence[str]) -> tuple[int, str]:
    near, flops = _near(rows, among), sorted(row.gemm.ops for row in rows)
    lows = {f * beside for flop in flops for f in (flop, flop / _ABOVE) for beside in (1 - 1e-9, 1 + 1e-9)}
    count, low = max((_right(rows, near, 1.0, low, _ABOVE * low), -low) for low in lows)
    return count, f"T = {-low:.3g} FLOP"


def _any_thresholds(rows: Sequence[GemmRow], among: Sequence[str]) -> tuple[int, str]:
    near = _near(rows, among)
    flops = [0.0, *sorted(row.gemm.ops * (1 + 1e-9) for row in rows)]
    borders = [0.0, *sorted(row.gemm.m / row.gemm.k for row in rows)]
    count, *rest = max(
        (_right(rows, near, border, low, high), -border, -low, high)
        for border in borders for i, low in enumerate(flops) for high in flops[i:]
    )  # fmt: skip
    below = "never" if rest[1] == 0 else f"below {-rest[1]:.3g} FLOP"
    flat = f"if M / K <= {-rest[0]:.3g}" if rest[0] else "never"
    return count, f"2D {flat}; uniform 1D {below}; unfused above {rest[2]:.3g} FLOP"
