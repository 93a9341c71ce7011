"""FiCCO's evaluation: its schedules compared with serial execution and with shard-based overlap, and how often its
heuristic chooses the fastest schedule.

`simulated` predicts the times from the model of a machine. `weft bench all_gather_matmul --preset table-1,synthetic`
measures them. Both kinds of records become the same tables and pictures:

    figure 13      speedups over the ratio of GEMM time to communication time
    figure 12(b)   the speedup of each schedule, and the heuristic's pick
    figure 14      mean speedups by kind of schedule
    figure 11(b)   the losses of each schedule by decomposition and contention, only simulated
    VI-D           how often the heuristic picks the fastest schedule, and what wrong picks lose

A time is the time per call in a series of consecutive calls ("queued"). A speedup is relative to serial: NCCL's
all-gather, then the GEMM. The ideal speedup is serial's time divided by the longer of the GEMM alone and the
communication alone. The paper defines eight schedules, and evaluates four, because the others "are strictly worse"
(V-B). Here all eight run. Each has as many steps as there are ranks.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", VI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from textwrap import fill
from typing import Any

from weft.bench.core.records import last_runs
from weft.bench.core.tables import Record, ResultTable, geomean, milliseconds, number, table
from weft.bench.table_1 import SYNTHETIC, TABLE_1, GatheredGemm
from weft.builders import AllGatherMatmul, NotApplicableError, candidates
from weft.hw import file_of, load_machine
from weft.plan import AUTOTUNE, static_pick
from weft.plan.closed_form import closed_form_pick
from weft.plan.predict import least_us, predict
from weft.sim.losses import communication_us, gemms_us
from weft.studies import ficco_choosers as choosers
from weft.studies import ficco_losses as losses
from weft.studies import ficco_sensitivity as sensitivity
from weft.studies.claims import claims_table
from weft.studies.ficco_claims import bars as bars_of
from weft.studies.ficco_claims import claims
from weft.studies.ficco_rows import ASYNCTP, EIGHT, KINDS, NAMED, NEAR, SERIAL, SHARD, STUDIED, WEFT, GemmRow, GemmRows
from weft.studies.pages import bars, block, figure, head, model_for, where

CLOSED = "closed form"
TABLES = {"table-1": "g", "synthetic": "s"}
"""{table: first letter of its GEMMs' names}."""
CLAIMS = "The paper's claims beside our numbers"
"""The title of the table of claims."""
PAPER_MOST = {"ideal": "to 1.7", "shard": "from 1/3.9", "FiCCO": "1D 1.6, 2D 1.7"}
PAPER_BEST = {"g": "16 of 16", "s": "81%, else 14%"}
PAPER_SAYS = (
    "The paper's numbers are from its text: the ideal from sections I and II-B, and shard overlap from I and VI-B. The best "
    "schedules are from VI-C (where 2D copies are emulated), and the heuristic is from VI-D. The text does not contain the "
    "numbers of figures 12 to 14."
)


def simulated(
    hw: str,
    ranks: int,
    topology: str | None = None,
    gemms: Sequence[GatheredGemm] | None = None,
    *,
    sensitive: bool = True,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> list[Record]:
    """Return records with the predicted time of each schedule for each GEMM, on `ranks` GPUs of machine `hw`. The
    predictions use only the machine file.

    gemms: the GEMMs to simulate. None: table I, the synthetic GEMMs, random GEMMs, and the sensitivity analysis.
    sensitive: False to omit the sensitivity analysis, which takes most of the time.
    progress: called with the name of the next GEMM, and the fraction of the work done since the last call.

    With 64 ranks, one GEMM of table I is omitted, because its M cannot be divided (`notes` says so).

    Raises `ValueError` for an unknown machine or topology, or if the number of ranks does not divide a GEMM's M. All
    GEMMs are checked before the first is simulated.
    """
    machine = load_machine(hw)
    model, found = model_for(machine, ranks, topology), list[Record]()
    wanted = {SERIAL, *(name for names in KINDS.values() for name in names)}
    common = head("all_gather_matmul", machine, ranks, topology)
    chosen, omitted = _divisible(gemms or (*TABLE_1, *SYNTHETIC), ranks)
    if omitted:
        common["omitted"] = [f"{gemm.name} (M={gemm.m})" for gemm in omitted]
    more = 4 * len(chosen) * sensitive  # the sensitivity takes as long as this many GEMMs
    drawn = 0.3 * choosers.DRAWN  # eight schedules for each of these, in place of 27
    steps = len(chosen) + (drawn + more) * (gemms is None)
    for gemm in chosen:
        progress(f"simulating {gemm.name}", bool(found) / steps)
        mine = gemm.sharded(ranks)
        problem = AllGatherMatmul.even(mine.m, mine.n, mine.k, ranks)
        of_gemm = {
            "config": gemm.name, "m": mine.m, "n": mine.n, "k": mine.k, "gemm_ms": gemms_us(problem, model) / 1e3,
            "communication_ms": communication_us(problem, model) / 1e3, "closed_form": closed_form_pick(problem, model),
        }  # fmt: skip
        for one in candidates(problem):
            with suppress(NotApplicableError):
                if one.name in wanted:
                    ms = predict(one.build(), model, "queued", least_us(problem, model)) / 1e3
                    lost = {"losses": losses.losses_of(one.name, problem, model)} if one.name in EIGHT else {}
                    found.append({**common, **of_gemm, "variant": one.name, "p50_ms": ms, **lost})
    if gemms is None:
        judged = choosers.judge_drawn(machine, model, ranks, lambda what: progress(f"simulating {what}", 0.3 / steps))
        found.append({**common, **judged})
    if gemms is None and sensitive:
        numbers = sensitivity.simulate(machine, ranks, topology, lambda what, part: progress(what, part * more / steps))
        found.append({**common, **numbers})
    return found


def _divisible(gemms: Sequence[GatheredGemm], ranks: int) -> tuple[list[GatheredGemm], list[GatheredGemm]]:
    """Return two lists: the GEMMs whose M can be divided into `ranks` shards of `ranks` pieces each, and the other GEMMs. Raise
    `ValueError` if the second list has more than one GEMM, or if the first list is empty.
    """
    chosen = [gemm for gemm in gemms if gemm.m % (ranks * ranks) == 0]
    omitted = [gemm for gemm in gemms if gemm not in chosen]
    if len(omitted) > 1 or not chosen:
        raise ValueError(
            f"ranks={ranks}: M={omitted[0].m} of {omitted[0].name} is not divisible into {ranks} shards of {ranks} pieces: "
            "use 2, 4, 8, 16, 32 or 64 ranks"
        )
    return chosen, omitted


def rows_of(records: Sequence[Record]) -> GemmRows:
    """Return a row for each of FiCCO's GEMMs in the records of `all_gather_matmul`, from the GEMM's last run.

    Raises `ValueError` if there are no such records, or if a GEMM lacks the time of serial, of the GEMM alone or of the
    communication alone.
    """
    mine = [r for r in records if r["op"] == "all_gather_matmul" and r["mode"] == "queued" and _gemm_of(r["config"])]
    if not mine:
        raise ValueError(
            "no records of FiCCO's GEMMs: run weft bench all_gather_matmul --preset table-1 --mode queued --json FILE"
        )
    rows = GemmRows()
    rows.mesh = mine[-1].get("topology") == "mesh"
    rows.others = {r["variant"]: r for r in records if r["run"] == mine[-1]["run"] and not _gemm_of(r["config"])}
    for of_run in last_runs(mine, itemgetter("config")).values():
        first, config = of_run[0], of_run[0]["config"]
        paper = _gemm_of(config)
        assert paper is not None
        gemm, ms = replace(paper, m=first["m"], n=first["n"], k=first["k"]), {r["variant"]: r["p50_ms"] for r in of_run}
        halves = first["gemm_ms"], first["communication_ms"]
        needed = {SERIAL: ms.get(SERIAL), "the GEMM alone": halves[0], "the communication alone": halves[1]}
        if missing := [what for what, time_ms in needed.items() if time_ms is None]:
            raise ValueError(
                f"{config} lacks the time of {' and of '.join(missing)}: run weft bench all_gather_matmul --preset {config} "
                "--mode queued --json FILE"
            )
        machine = load_machine(file_of(first["machine"].rpartition(" x ")[2]) or "mi300x")
        pick = static_pick(AllGatherMatmul.even(gemm.m, gemm.n, gemm.k, first["ranks"], first["dtype"]), machine)
        assert pick is not None
        lost = {r["variant"]: r["losses"] for r in of_run if "losses" in r}
        rows.append(GemmRow(config, gemm, pick, ms, *halves, first.get("closed_form", ""), lost))
    return rows


def _gemm_of(config: str) -> GatheredGemm | None:
    """Return the paper's GEMM that a configuration's name begins with, such as "g1" in "g1-m4"; None if it names none."""
    return next((gemm for gemm in (*TABLE_1, *SYNTHETIC) if gemm.name == config.partition("-")[0]), None)


def tables(rows: Sequence[GemmRow]) -> list[ResultTable]:
    """Return the tables of the report: speedups as in figures 13, 12(b) and 14, the choices of the heuristic and of
    weft, and the sensitivity analysis. Columns that were not recorded are omitted.
    """
    made = [_over_ratio(rows), _by_schedule(rows), _choices(rows), _by_kind(rows)]
    if all({*EIGHT} <= row.losses.keys() for row in rows):
        made.append(losses.losses_table(rows))
    known = {what: begin for what, begin in TABLES.items() if _named(rows, begin)}
    if all({*EIGHT, SHARD} <= row.ms.keys() for row in rows):
        made.append(choosers.sweep_table(rows, known))
        if set(known) == set(TABLES) and isinstance(rows, GemmRows) and rows.mesh:
            made.append(claims_table("Two targets of weft's closed form", [*bars_of(rows)]))
            made.insert(0, claims_table(CLAIMS, [*claims(rows)]))
    others = rows.others if isinstance(rows, GemmRows) else {}
    return [*made, *(sensitivity.sensitivity_table(one) for name, one in others.items() if name == "sensitivity")]


def _over_ratio(rows: Sequence[GemmRow]) -> ResultTable:
    def gained(row: GemmRow) -> str:
        best = row.speedup(*EIGHT)
        return "" if best is None or row.ideal <= 1 else f"{(1 - 1 / best) / (1 - 1 / row.ideal):.0%}"

    shown = ("shard", "shard, to all peers at once", "AsyncTP")
    kinds = {kind: KINDS[kind] for kind in shown if any(row.speedup(*KINDS[kind]) for row in rows)} | {"FiCCO": EIGHT}
    speedups = {kind: [of for row in rows if (of := row.speedup(*names))] for kind, names in kinds.items()}
    columns: dict[str, Callable[[GemmRow], str]] = {
        "GEMM": lambda row: row.config,
        "M x N x K": lambda row: str(row.gemm),
        "GEMM ms": lambda row: milliseconds(row.gemm_ms),
        "communication ms": lambda row: milliseconds(row.communication_ms),
        "ratio": lambda row: f"{row.ratio:.2f}",
        "serial ms": lambda row: milliseconds(row.ms[SERIAL]),
        "ideal": lambda row: f"{row.ideal:.2f}",
        **{kind: _speedup(*names) for kind, names in kinds.items()},
        "share of the ideal's gain": gained,
    }
    least = {kind: f"minimum {min(of):.2f}" for kind, of in speedups.items() if kind != "FiCCO"}
    most = {"GEMM": "maximum", "ideal": f"{max(row.ideal for row in rows):.2f}"}
    most["FiCCO"] = number(max(speedups["FiCCO"], default=None), 2)
    title = "Speedup over serial, by the ratio of GEMM to communication (figure 13)"
    return table(
        title, sorted(rows, key=lambda row: row.ratio), columns, [most | least, {"GEMM": "paper's", **PAPER_MOST}]
    )


def _by_schedule(rows: Sequence[GemmRow]) -> ResultTable:
    titles = {name: title for title, name in NAMED.items()}

    def lost(row: GemmRow, pick: str = "") -> str:
        part = row.lost(pick or row.pick, EIGHT)
        return "" if part is None else "-" if part == 0 else f"{part:.1%}"

    columns: dict[str, Callable[[GemmRow], str]] = {
        "GEMM": lambda row: row.config,
        **{title: _speedup(name) for title, name in STUDIED.items()},
        "best of eight": _speedup(*EIGHT),
        "fastest schedule": lambda row: titles.get(row.best(EIGHT) or "", ""),
        "heuristic's pick": lambda row: titles.get(row.pick, row.pick),
        "loss of the heuristic's pick": lost,
        "closed form's pick": lambda row: titles.get(row.closed, row.closed),
        "loss of the closed form's pick": lambda row: lost(row, row.closed) if row.closed else "",
    }
    return table("Speedup over serial of each schedule, and the heuristic's pick (figure 12b)", rows, columns)


def _choices(rows: Sequence[GemmRow]) -> ResultTable:
    """Return a table of how often FiCCO's heuristic, and weft's planner and closed form, chose the fastest schedule,
    and how much speedup wrong choices lose.
    """
    who_chooses, near = ("GEMMs", "who chooses", "choices", "fastest chosen"), f"within {NEAR:.0%} of the fastest"
    cells, four = list[tuple[str, ...]](), tuple(STUDIED.values())
    for (what, begin), (who, of, among, names) in product(
        TABLES.items(),
        (
            ("the heuristic", "", "the paper's four", four), ("the heuristic", "", "all eight", EIGHT),
            ("the closed form", CLOSED, "all eight", EIGHT),
            ("weft", WEFT, "all that ran", ()), ("weft, autotuned", AUTOTUNE, "all that ran", ()),
        ),
    ):  # fmt: skip
        picks = [(row, row.closed if of == CLOSED else of or row.pick) for row in _named(rows, begin)]
        parts = [row.lost(pick, names or tuple(row.ms)) for row, pick in picks]
        lost = [part for part in parts if part is not None]
        wrong = [part for part in lost if part > 0]
        if lost:
            cells.append((
                what, who, among, f"{len(lost) - len(wrong)} of {len(lost)}",
                f"{sum(part <= NEAR for part in lost)} of {len(lost)}",
                f"{sum(wrong) / len(wrong):.1%}" if wrong else "", f"{max(lost):.1%}", PAPER_BEST[begin] if names == four else "",
            ))  # fmt: skip
    title = "How often a choice is the fastest schedule, and what a wrong choice loses of the best speedup"
    return ResultTable(
        title,
        (*who_chooses, near, "mean loss of wrong choices", "largest loss", "paper: right choices, mean loss"),
        cells,
    )


def _by_kind(rows: Sequence[GemmRow]) -> ResultTable:
    def speedups(row: GemmRow) -> dict[str, float | None]:
        kinds = {kind: row.speedup(*names) for kind, names in KINDS.items()}
        chosen = {
            "FiCCO, chosen by the heuristic": row.speedup(row.pick),
            "FiCCO, chosen by the closed form": row.speedup(row.closed),
        }
        return {"ideal": row.ideal, **kinds, **chosen}

    sets = {**TABLES, "all": ""}
    found = {what: [speedups(row) for row in _named(rows, begin)] for what, begin in sets.items()}
    cells = [
        (kind, *(number(geomean([of for one in some if (of := one[kind]) is not None]), 2) for some in found.values()))
        for kind in found["all"][0]
    ]
    title = (
        "Geometric mean of the speedup over serial, with the fastest schedule of each kind for each GEMM (figure 14)"
    )
    return ResultTable(title, ("kind of schedule", *sets), [line for line in cells if any(line[1:])])


def _speedup(*names: str) -> Callable[[GemmRow], str]:
    return lambda row: number(row.speedup(*names), 2)


def _named(rows: Sequence[GemmRow], begin: str) -> list[GemmRow]:
    return [row for row in rows if row.gemm.name.startswith(begin)]


def notes(records: Sequence[Record]) -> list[str]:
    """Return sentences for the report: where its numbers come from, and how good the choices on random GEMMs were."""
    said = where(records[-1])
    if records[-1]["device"] != "simulated":
        return [f"{said} {_smaller(records)}".strip()]
    omitted = records[-1].get("omitted", ())
    why = [f"{', '.join(omitted)} is omitted: its M cannot be divided by the square of the number of ranks."]
    return [said, *(why if omitted else []), *choosers.said_of_drawn(records)]


def conclusions(rows: Sequence[GemmRow]) -> list[str]:
    """Return sentences for the report: how often a schedule that the paper leaves out is the fastest, and from which
    sections the paper's numbers are.
    """
    best = [name for row in rows if (name := row.best(EIGHT))]
    others, hetero = sum(name not in STUDIED.values() for name in best), sum("start=hetero" in name for name in best)
    changed = rows.others.get("sensitivity") if isinstance(rows, GemmRows) else None
    return [
        f"For {others} of {len(best)} GEMMs, the fastest schedule is one of the four that the paper omits. For {hetero} of "
        f"{len(best)}, the fastest schedule has a hetero start: the rank first multiplies its own shard as a whole.",
        *([] if changed is None else [sensitivity.omitted(changed)]),
        PAPER_SAYS,
    ]


def _smaller(records: Sequence[Record]) -> str:
    """Return a note on GEMMs that ran with a smaller M than in the paper. If M is now at most K, the heuristic chooses
    another schedule, so the note names these GEMMs.
    """
    made = {r["config"]: r for r in records if "-m" in r["config"]}
    if not made:
        return ""
    turned = [name for name, r in made.items() if (gemm := _gemm_of(name)) and gemm.m > gemm.k and r["m"] <= r["k"]]
    but = f" For {', '.join(turned)}, M is above K in the paper, but not here." if turned else ""
    have = "GEMM has" if len(made) == 1 else "GEMMs have"
    return f"{len(made)} {have} a fraction of the paper's M; g1-m4 has a quarter.{but}"


def markdown(records: Sequence[Record]) -> str:
    """Return the generated part of the report, as Markdown: a note on the runs, and the tables."""
    rows = rows_of(records)
    mine = [r for r in records if _gemm_of(r["config"]) or r["variant"] in ("choosers", "sensitivity")]
    shown = [table for table in tables(rows) if table.title != CLAIMS]  # docs/reproduction.md has the claims
    return block(notes(mine), shown, conclusions(rows))


# --- pictures ---

_COLOURS = ("#4063a3", "#2f7d5b", "#8fb6d8", "#e1812c", "#bbbbbb")


def draw(directory: Path, rows: Sequence[GemmRow], title: str) -> list[Path]:
    """Write three PNG files into `directory`, created if needed: speedups as in figures 13, 12(b) and 14.

    title: a description of the run.
    """
    figures = {"figure-13-ratio": _draw_ratio, "figure-12b-schedules": _draw_schedules, "figure-14-means": _draw_means}
    written = [directory / f"{name}.png" for name in figures]
    for path, paint in zip(written, figures.values(), strict=True):
        with figure(path, title, (12 if paint is _draw_schedules else 9, 4)) as (axis,):
            paint(axis, rows)
            axis.set_ylabel("speedup over serial", fontsize=9)
    return written


def _draw_ratio(axis: Any, rows: Sequence[GemmRow]) -> None:
    lines: dict[str, tuple[str, Callable[[GemmRow], float | None]]] = {
        "ideal": ("#888888", lambda row: row.ideal), "shard": ("#b8432f", lambda row: row.speedup(SHARD)),
        "AsyncTP": ("#e1812c", lambda row: row.speedup(ASYNCTP)), "FiCCO": ("#4063a3", lambda row: row.speedup(*EIGHT)),
    }  # fmt: skip
    for name, (colour, speedup) in lines.items():
        points = sorted((row.ratio, of) for row in rows if (of := speedup(row)) is not None)
        if points:
            axis.plot(*zip(*points, strict=True), "o-", markersize=4, linewidth=1, color=colour, label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("time of the GEMM / time of the communication", fontsize=9)


def _draw_schedules(axis: Any, rows: Sequence[GemmRow]) -> None:
    others = tuple(name for name in EIGHT if name not in STUDIED.values())
    series = {title: (name,) for title, name in STUDIED.items()} | {"best of the other four": others}
    heights = {title: [row.speedup(*names) or 0.0 for row in rows] for title, names in series.items()}
    label = "the heuristic's pick"
    for names, drawn in zip(series.values(), bars(axis, [row.config for row in rows], heights, _COLOURS), strict=True):
        picked = [bar for bar, row in zip(drawn, rows, strict=True) if names == (row.pick,)]
        places = [bar.get_x() + bar.get_width() / 2 for bar in picked], [bar.get_height() + 0.03 for bar in picked]
        axis.plot(*places, "v", color="black", markersize=4, label=label)
        label = ""


def _draw_means(axis: Any, rows: Sequence[GemmRow]) -> None:
    means = _by_kind(rows)
    kinds, *columns = zip(*means.cells, strict=True)
    heights = {
        what: [float(cell or 0) for cell in cells] for what, cells in zip(means.columns[1:], columns, strict=True)
    }
    bars(axis, [fill(kind, 14) for kind in kinds], heights, _COLOURS)
