"""FiCCO's evaluation: its schedules against serial and shard overlap on its GEMMs, and how often its heuristic picks the best.

`simulated` makes the records of a machine that nobody here owns. `weft bench all_gather_matmul --preset table-1,synthetic` makes
those of one that is there. From either come the same tables and pictures:

    figure 13        ideal, shard overlap and FiCCO's best over the ratio of the GEMM's time to the communication's
    figure 12(b)     each GEMM's four schedules, the best of all eight, and which one the heuristic picks
    choices          how often the heuristic's pick is the best, or within 3% of it, and what a wrong one loses (VI-D); and
                     weft's own choice, where it was measured
    figure 14        geometric means of each kind

Times are those of calls that follow one another ("queued"). A speedup is over serial: the library's all-gather, then its GEMM. The
ideal is serial over the longer of the GEMM alone and the communication alone: nothing lost, all hidden. The paper studies four of
its eight schedules, as the others "are strictly worse" (V-B); here all eight run, all by as many steps as there are ranks.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", VI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.core.tables import Record, geomean, milliseconds, number, share
from weft.bench.table_1 import SYNTHETIC, TABLE_1, Gemm
from weft.hw import file_of, load_machine
from weft.plan import AUTOTUNE, static_pick
from weft.plan.predict import least_us, predict
from weft.schedule import AllGatherMatmul, NotApplicableError, candidates
from weft.sim.losses import communication_us, gemms_us
from weft.studies.pages import Table, block, head, model_for, where
from weft.trace.pyplot import pyplot

SHARD = "shard[chunks=1,send=in_turn,by=dma]"
"""Shard overlap as the paper has it: one peer at a time, whole shards."""
ASYNCTP, SERIAL, WEFT = "asynctp", "serial", "weft"
NEAR = 0.03
_STARTS = ("uniform", "hetero")
_GEMMS = ("fused", "unfused")


def ficco(shape: str, start: str, gemms: str, by: str = "dma") -> str:
    """The candidate's name, with as many steps as ranks."""
    if by == "collective":
        return f"ficco_{shape}_collective[start={start},gemms={gemms},steps=0]"
    return f"ficco_{shape}[start={start},gemms={gemms},steps=0,by={by}]"


def _all_of(shape: str, by: str = "dma") -> tuple[str, ...]:
    return tuple(ficco(shape, start, gemms, by) for start in _STARTS for gemms in _GEMMS)


STUDIED = {
    "uniform-fused-1D": ficco("1d", "uniform", "fused"),
    "hetero-fused-1D": ficco("1d", "hetero", "fused"),
    "hetero-unfused-1D": ficco("1d", "hetero", "unfused"),
    "uniform-fused-2D": ficco("2d", "uniform", "fused"),
}
"""The paper's four, by its names."""
EIGHT = (*_all_of("1d"), *_all_of("2d"))
KINDS: dict[str, tuple[str, ...]] = {
    "shard": (SHARD,),
    "shard, to all at once": ("shard[chunks=1,send=at_once,by=dma]",),
    "AsyncTP": (ASYNCTP,),
    "FiCCO 1D": _all_of("1d"),
    "FiCCO 2D": _all_of("2d"),
    "FiCCO by the library": (*_all_of("1d", "collective"), *_all_of("2d", "collective")),
    "FiCCO by a kernel": (*_all_of("1d", "kernel"), *_all_of("2d", "kernel")),
    "weft's choice": (WEFT,),
    "weft, autotuned": (AUTOTUNE,),
}
"""Kinds of overlap, and the variants of which each GEMM has the fastest (figure 14)."""

PAPER = {"ideal": "to 1.7", "shard": "from 1/3.9", "ficco": "1D 1.6, 2D 1.7", "g": "16 of 16", "s": "81%, else 14%"}
PAPER_SAYS = (
    "The paper's numbers are of its text: the ideal of I and II-B, shard overlap of I and VI-B, its best schedules of VI-C (2D "
    "copies emulated), the heuristic's of VI-D. Those of its figures 12 to 14 are not in the text."
)


@dataclass(frozen=True)
class Row:
    """One GEMM, as it ran: N over the ranks, M perhaps smaller. ms: by variant, serial among them."""

    config: str
    gemm: Gemm
    ranks: int
    dtype: str
    machine: str
    ms: Mapping[str, float]
    gemm_ms: float
    communication_ms: float

    @property
    def ratio(self) -> float:
        return self.gemm_ms / self.communication_ms

    @property
    def ideal(self) -> float:
        return self.ms[SERIAL] / max(self.gemm_ms, self.communication_ms)

    def speedup(self, variant: str | None) -> float | None:
        """Over serial; None where it was not recorded."""
        return self.ms[SERIAL] / self.ms[variant] if variant and variant in self.ms else None

    def best(self, among: Sequence[str]) -> str | None:
        there = [name for name in among if name in self.ms]
        return min(there, key=lambda name: self.ms[name]) if there else None

    @property
    def pick(self) -> str:
        """The heuristic's, by the machine's file; of a machine that has none by the paper's."""
        problem = AllGatherMatmul.even(self.gemm.m, self.gemm.n, self.gemm.k, self.ranks, self.dtype)
        found = static_pick(problem, load_machine(file_of(self.machine.rpartition(" x ")[2]) or "mi300x"))
        assert found is not None
        return found


def simulated(hw: str, ranks: int, topology: str | None = None, gemms: Sequence[Gemm] | None = None) -> list[Record]:
    """Records of all variants of each GEMM, as the model of `ranks` such machines predicts them by the machine's file alone.
    `ValueError` for a machine or topology that is not known, or a number of ranks that does not divide a GEMM."""
    machine = load_machine(hw)
    model, found = model_for(machine, ranks, topology), list[Record]()
    wanted = {SERIAL, *(name for names in KINDS.values() for name in names)}
    common = head("all_gather_matmul", machine, ranks, topology)
    for gemm in gemms or (*TABLE_1, *SYNTHETIC):
        if gemm.m % (ranks * ranks):
            raise ValueError(
                f"ranks={ranks}: M={gemm.m} of {gemm.name} is not divided into as many shards of as many pieces"
            )
        mine = gemm.sharded(ranks)
        problem = AllGatherMatmul.even(mine.m, mine.n, mine.k, ranks)
        of_gemm = {
            "config": gemm.name, "m": mine.m, "n": mine.n, "k": mine.k, "gemm_ms": gemms_us(problem, model) / 1e3,
            "communication_ms": communication_us(problem, model) / 1e3,
        }  # fmt: skip
        for one in candidates(problem):
            if one.name not in wanted:
                continue
            try:
                ms = predict(one.build(), model, "queued", least_us(problem, model)) / 1e3
            except NotApplicableError:
                continue
            found.append({**common, **of_gemm, "variant": one.name, "p50_ms": ms})
    return found


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Of all_gather_matmul on FiCCO's GEMMs, in the order of first appearance; of each its last run. `ValueError` if there are
    none, or one lacks serial or the two halves of an ideal overlap."""
    mine = [r for r in records if r["op"] == "all_gather_matmul" and r["mode"] == "queued" and _gemm_of(r["config"])]
    if not mine:
        raise ValueError(
            "no records of FiCCO's GEMMs: weft bench all_gather_matmul --preset table-1 --mode queued --json FILE"
        )
    last = {r["config"]: r["run"] for r in mine}
    rows = []
    for config, run in last.items():
        of_run = [r for r in mine if (r["config"], r["run"]) == (config, run)]
        first, paper = of_run[0], _gemm_of(config)
        assert paper is not None
        ms = {r["variant"]: r["p50_ms"] for r in of_run}
        if SERIAL not in ms or first["gemm_ms"] is None or first["communication_ms"] is None:
            raise ValueError(f"{config}: no times of serial, GEMM and communication: measure it again")
        gemm = Gemm(paper.name, paper.parallelism, paper.model, first["m"], first["n"], first["k"])
        halves = first["gemm_ms"], first["communication_ms"]
        rows.append(Row(config, gemm, first["ranks"], first["dtype"], first["machine"], ms, *halves))
    return rows


def _gemm_of(config: str) -> Gemm | None:
    """Whose name begins a configuration's ("g1-m4")."""
    return next((gemm for gemm in (*TABLE_1, *SYNTHETIC) if gemm.name == config.partition("-")[0]), None)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Figures 13, 12(b) and 14 and the heuristic's accuracy; columns of what was not recorded are left out."""
    return [_over_ratio(rows), _by_schedule(rows), _choices(rows), _by_kind(rows)]


def _over_ratio(rows: Sequence[Row]) -> Table:
    kinds = [kind for kind in ("shard", "shard, to all at once", "AsyncTP") if _has(rows, KINDS[kind])]
    columns = (
        "GEMM",
        "M x N x K",
        "GEMM ms",
        "communication ms",
        "ratio",
        "serial ms",
        "ideal",
        *kinds,
        "FiCCO",
        "of ideal's gain",
    )
    cells = []
    for row in sorted(rows, key=lambda row: row.ratio):
        best = row.speedup(row.best(EIGHT))
        gained = None if best is None or row.ideal <= 1 else (1 - 1 / best) / (1 - 1 / row.ideal)
        cells.append((
            row.config, str(row.gemm), *map(milliseconds, (row.gemm_ms, row.communication_ms)), f"{row.ratio:.2f}",
            milliseconds(row.ms[SERIAL]), f"{row.ideal:.2f}", *(number(_of(row, KINDS[kind]), 2) for kind in kinds),
            number(best, 2), "" if gained is None else f"{gained:.0%}",
        ))  # fmt: skip
    said = ("most", *[""] * 5, f"{max(row.ideal for row in rows):.2f}")
    least = [min((of for row in rows if (of := _of(row, KINDS[kind]))), default=None) for kind in kinds]
    most = max((of for row in rows if (of := row.speedup(row.best(EIGHT)))), default=None)
    cells.append((*said, *(f"least {number(of, 2)}" for of in least), number(most, 2), ""))
    paper = [PAPER["shard"] if kind == "shard" else "" for kind in kinds]
    cells.append(("paper's", *[""] * 5, PAPER["ideal"], *paper, PAPER["ficco"], ""))
    return Table("Speedup over serial, by the ratio of GEMM to communication (figure 13)", columns, cells)


def _by_schedule(rows: Sequence[Row]) -> Table:
    names = {name: title for title, name in STUDIED.items()}
    columns = ("GEMM", *STUDIED, "best of eight", "which", "heuristic's", "loses")
    cells = []
    for row in rows:
        best = row.best(EIGHT)
        lost = _lost(row, row.pick, EIGHT)
        cells.append((
            row.config, *(number(row.speedup(name), 2) for name in STUDIED.values()), number(row.speedup(best), 2),
            _short(best), names.get(row.pick, row.pick), "" if lost is None else "-" if lost == 0 else f"{lost:.1%}",
        ))  # fmt: skip
    return Table("Speedup over serial of each schedule, and the heuristic's pick (figure 12b)", columns, cells)


def _choices(rows: Sequence[Row]) -> Table:
    """How good the heuristic's picks are, and weft's own choices where they were recorded."""
    four, none = tuple(STUDIED.values()), tuple[str, ...]()
    columns = (
        "GEMMs",
        "who chooses",
        "among",
        "the best",
        f"within {NEAR:.0%}",
        "wrong ones lose",
        "at most",
        "paper's",
    )
    cells = list[tuple[str, ...]]()
    for what, begin in (("table-1", "g"), ("synthetic", "s")):
        for who, of, among, names in (
            ("the heuristic", "", "the paper's four", four), ("the heuristic", "", "all eight", EIGHT),
            ("weft", WEFT, "all that ran", none), ("weft, autotuned", AUTOTUNE, "all that ran", none),
        ):  # fmt: skip
            lost = [
                part
                for row in _named(rows, begin)
                if (part := _lost(row, of or row.pick, names or tuple(row.ms))) is not None
            ]
            if lost:
                wrong = [part for part in lost if part > 0]
                cells.append((
                    what, who, among, f"{len(lost) - len(wrong)} of {len(lost)}", f"{share([part <= NEAR for part in lost]):.0%}",
                    f"{sum(wrong) / len(wrong):.1%}" if wrong else "", f"{max(lost):.1%}", PAPER[begin] if names == four else "",
                ))  # fmt: skip
    title = "How often the choice is the fastest, and which part of the best speedup is lost where it is not"
    return Table(title, columns, cells)


def _by_kind(rows: Sequence[Row]) -> Table:
    sets = {"table-1": "g", "synthetic": "s", "all": ""}
    cells = [("ideal", *(number(geomean([r.ideal for r in _named(rows, begin)]), 2) for begin in sets.values()))]
    picked: dict[str, Callable[[Row], float | None]] = {"FiCCO, the heuristic's": lambda row: row.speedup(row.pick)}
    kinds = {kind: lambda row, names=names: _of(row, names) for kind, names in KINDS.items()}
    for kind, speedup in (kinds | picked).items():
        means = [
            geomean([of for row in _named(rows, begin) if (of := speedup(row)) is not None]) for begin in sets.values()
        ]
        if any(means):
            cells.append((kind, *(number(mean, 2) for mean in means)))
    return Table(
        "Geometric mean of the speedup over serial, of each GEMM the fastest of a kind (figure 14)", ("", *sets), cells
    )


def _named(rows: Sequence[Row], begin: str) -> list[Row]:
    return [row for row in rows if row.gemm.name.startswith(begin)]


def _has(rows: Sequence[Row], names: Sequence[str]) -> bool:
    return any(name in row.ms for row in rows for name in names)


def _of(row: Row, names: Sequence[str]) -> float | None:
    return row.speedup(row.best(names))


def _lost(row: Row, chosen: str, among: Sequence[str]) -> float | None:
    """Which part of the best speedup `chosen` loses; None where either was not recorded."""
    best, pick = _of(row, among), row.speedup(chosen)
    return None if best is None or pick is None else max(0.0, 1 - pick / best)


def _short(name: str | None) -> str:
    """ "hetero-fused-2D" of a candidate's name."""
    if name is None:
        return ""
    given = dict(word.split("=") for word in name.partition("[")[2].removesuffix("]").split(","))
    return f"{given['start']}-{given['gemms']}-{name[6:8].upper()}"


def notes(records: Sequence[Record]) -> list[str]:
    """What the numbers rest on, in sentences."""
    said = where(records[-1])
    return [said if records[-1]["device"] == "simulated" else f"{said} {_smaller(records)}".strip()]


def conclusions(rows: Sequence[Row]) -> list[str]:
    """What the paper's choice of four schedules leaves out, and where its numbers are from, in sentences."""
    best = [name for row in rows if (name := row.best(EIGHT))]
    others, hetero = (sum(test) for test in (
        [name not in STUDIED.values() for name in best], ["start=hetero" in name for name in best],
    ))  # fmt: skip
    return [
        f"Of {len(best)} GEMMs {others} have their fastest schedule among the four that the paper leaves out, and {hetero} among "
        f"those with a hetero start.",
        PAPER_SAYS,
    ]


def _smaller(records: Sequence[Record]) -> str:
    """Where M was halved, and where that has put a GEMM into the heuristic's other half."""
    made = {r["config"]: r for r in records if "-m" in r["config"]}
    if not made:
        return ""
    turned = [name for name, r in made.items() if (gemm := _gemm_of(name)) and gemm.m > gemm.k and r["m"] <= r["k"]]
    but = f" Of {', '.join(turned)} it is not above K any more, as the paper's is." if turned else ""
    return f"M is a part of the paper's for {len(made)} GEMMs: of g1-m4 a quarter.{but}"


def markdown(records: Sequence[Record]) -> str:
    """A page's block: what ran where, and the tables."""
    rows = rows_of(records)
    return block(notes([r for r in records if _gemm_of(r["config"])]), tables(rows), conclusions(rows))


# --- pictures ---

_COLOURS = {"ideal": "#888888", "shard": "#b8432f", "AsyncTP": "#e1812c", "FiCCO": "#4063a3"}
_BARS = ("#4063a3", "#2f7d5b", "#8fb6d8", "#e1812c", "#bbbbbb")


def draw(directory: Path, rows: Sequence[Row], title: str) -> list[Path]:
    """Write figures 13, 12(b) and 14 as PNG files into `directory`, made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    plt, written = pyplot(), []

    def figures() -> Iterator[tuple[str, Any]]:
        for name, size in (("figure-13-ratio", (9, 4)), ("figure-12b-schedules", (12, 4)), ("figure-14-means", (9, 4))):
            drawn, axis = plt.subplots(figsize=size, layout="constrained")
            yield name, axis
            drawn.suptitle(title, fontsize=9, x=0.01, ha="left")
            written.append(directory / f"{name}.png")
            drawn.savefig(written[-1], dpi=120)
            plt.close(drawn)

    for (_, axis), paint in zip(figures(), (_draw_ratio, _draw_schedules, _draw_means), strict=False):
        paint(axis, rows)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylabel("speedup over serial", fontsize=9)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, ncol=6, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    return written


def _draw_ratio(axis: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda row: row.ratio)
    lines: dict[str, Callable[[Row], float | None]] = {
        "ideal": lambda row: row.ideal, "shard": lambda row: _of(row, KINDS["shard"]),
        "AsyncTP": lambda row: row.speedup(ASYNCTP), "FiCCO": lambda row: _of(row, EIGHT),
    }  # fmt: skip
    for name, speedup in lines.items():
        points = [(row.ratio, of) for row in ordered if (of := speedup(row)) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", markersize=4, linewidth=1, color=_COLOURS[name], label=name)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("time of the GEMM over that of the communication", fontsize=9)


def _draw_schedules(axis: Any, rows: Sequence[Row]) -> None:
    series = [*STUDIED.items(), ("best of the other four", None)]
    others = [name for name in EIGHT if name not in STUDIED.values()]
    for i, ((title, name), colour) in enumerate(zip(series, _BARS, strict=True)):
        heights = [(row.speedup(name) if name else _of(row, others)) or 0.0 for row in rows]
        places = [j + (i - 2) * 0.17 for j in range(len(rows))]
        axis.bar(places, heights, 0.16, color=colour, label=title)
        picked = [
            (place, height)
            for place, height, row in zip(places, heights, rows, strict=True)
            if name and row.pick == name
        ]
        label = "the heuristic's pick" if i == 0 else None
        axis.plot([p for p, _ in picked], [h + 0.03 for _, h in picked], "v", color="black", markersize=4, label=label)
    axis.set_xticks(range(len(rows)), [row.config for row in rows], fontsize=8)
    axis.margins(x=0.01)


def _draw_means(axis: Any, rows: Sequence[Row]) -> None:
    kinds, _, *_ = zip(*(table := _by_kind(rows)).cells, strict=True)
    for i, (what, colour) in enumerate(zip(table.columns[1:], _BARS, strict=False)):
        heights = [float(cells[i + 1] or 0) for cells in table.cells]
        axis.bar([j + (i - 1) * 0.27 for j in range(len(kinds))], heights, 0.25, color=colour, label=what)
    axis.set_xticks(range(len(kinds)), [kind.replace(" ", "\n", 1) for kind in kinds], fontsize=8)
