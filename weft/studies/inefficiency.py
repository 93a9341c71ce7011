"""What a GEMM and an all-gather lose by being cut up, and what they lose beside each other: the FiCCO paper's characterisation
on the machine at hand.

For each GEMM of its table I, made smaller where need be: the library's GEMM against its pieces, an all-gather of its A
against its pieces, and both at once, the all-gather by copy engines, by a copying kernel and by the library
(`weft.studies.inefficiency_measure`). In the end the paper's observations are held against the numbers.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from weft.bench.core import records
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Step
from weft.bench.core.operator import Operator, Record
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.records import common_fields
from weft.bench.core.tables import geomean, markdown_table, milliseconds
from weft.hw import available_memory_bytes
from weft.studies.inefficiency_measure import (
    BASELINES,
    CUTS,
    PIECES,
    TRANSPORTS,
    WHOLE,
    Effort,
    Fitted,
    Found,
    Gemm,
    cut_name,
    find_gemms,
    fit,
    gather_beside,
    gather_name,
    gemm_beside,
    measure,
)
from weft.trace.pyplot import pyplot
from weft.words import counted

# The paper's geometric means for FiCCO: IV-C2 (an all-gather cut up; the text does not say by which transport, and FiCCO's is
# DMA), IV-D1 (GEMM beside it), IV-D2 (it beside a GEMM).
PAPER_MEANS = {gather_name("dma"): 1.10, gemm_beside("dma"): 1.11, gather_beside("dma"): 1.12}


@dataclass(frozen=True)
class Row:
    """All that was measured of one GEMM. `ms`, `overlap`: by variant; records may lack some."""

    gemm: Gemm
    scaled: str
    item_bytes: int
    gathered_bytes: int
    ms: dict[str, float]
    overlap: dict[str, float]

    @property
    def name(self) -> str:
        return self.gemm.name

    @cached_property
    def traffic(self) -> int:
        return self.gemm.traffic(self.item_bytes)

    @cached_property
    def op_to_byte(self) -> float:
        return self.gemm.op_to_byte(self.item_bytes)

    def piece_op_to_byte(self, cut: str, pieces: int) -> float:
        return self.gemm.piece(**{cut: pieces}).op_to_byte(self.item_bytes)

    def has(self, variant: str) -> bool:
        """Whether its loss is known."""
        return variant in self.ms and BASELINES[variant] in self.ms

    def loss(self, variant: str) -> float:
        """Its time over that of what it is compared with; 1 is no loss."""
        return self.ms[variant] / self.ms[BASELINES[variant]]


def rows_of(records: Sequence[Record]) -> list[Row]:
    """A row per GEMM, in the order of first appearance; of the last run that has it."""
    by_gemm: dict[str, list[Record]] = {}
    for record in records:
        mine = by_gemm.setdefault(record["config"], [])
        if mine and mine[0]["run"] != record["run"]:
            mine.clear()
        mine.append(record)
    rows = []
    for name, mine in by_gemm.items():
        first = mine[0]
        gemm = replace(find_gemms([name])[0], m=first["m"], n=first["n"], k=first["k"])
        overlap = {r["variant"]: r["overlap"] for r in mine if r["overlap"] is not None}
        ms = {r["variant"]: r["p50_ms"] for r in mine}
        rows.append(Row(gemm, first["scaled"], first["item_bytes"], first["gathered_bytes"], ms, overlap))
    return rows


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    cells: list[tuple[str, ...]]


def tables(rows: Sequence[Row]) -> list[Table]:
    """GEMMs cut up, all-gathers cut up, both beside each other; the last rows are geometric means, here and in the paper. Columns
    of what was not recorded are left out."""
    cuts = [cut_name(*cut) for cut in CUTS]
    gathers = [gather_name(by) for by in TRANSPORTS]
    beside = [gemm_beside(by) for by in TRANSPORTS] + [gather_beside(by) for by in TRANSPORTS]
    shape = [(r.name, str(r.gemm), r.scaled, f"{r.op_to_byte:.0f}", f"{r.traffic / 1e6:.0f}") for r in rows]
    gemms = [(*s, milliseconds(r.ms[WHOLE]), *_losses(r, cuts)) for s, r in zip(shape, rows, strict=True)]
    moved = [
        (
            r.name,
            f"{r.gathered_bytes / 1e6:.1f}",
            *(milliseconds(r.ms.get(gather_name(by, 1))) for by in TRANSPORTS),
            *_losses(r, gathers),
        )
        for r in rows
    ]
    together = [
        (r.name, *_losses(r, beside), *(_percent(r.overlap.get(gemm_beside(by))) for by in TRANSPORTS)) for r in rows
    ]
    made = [
        Table(
            "GEMM cut into 8 and 64, over the whole (figure 7)",
            ("GEMM", "M x N x K", "paper's over", "ops /\nbyte", "traffic\nMB", "whole\nms", *(_two_lines(c) for c in cuts)),
            gemms + _means(rows, cuts, before=5),
        ),
        Table(
            f"All-gather in {PIECES} pieces, over one piece (figure 8)",
            ("GEMM", "A, MB", *(f"{by}\nms" for by in TRANSPORTS), *(f"{by}\nin {PIECES}" for by in TRANSPORTS)),
            moved + _means(rows, gathers, before=4),
        ),
        Table(
            f"Beside each other, over alone: GEMM in {PIECES} by rows, all-gather in {PIECES} (figure 9)",
            (
                "GEMM",
                *(f"GEMM,\n{by}" for by in TRANSPORTS),
                *(f"gather,\n{by}" for by in TRANSPORTS),
                *(f"overlap,\n{by}" for by in TRANSPORTS),
            ),
            together + _means(rows, beside, before=0, after=len(TRANSPORTS)),
        ),
    ]  # fmt: skip
    kept = [_without_empty(table, rows) for table in made]
    return [table for table in kept if any(line[0] == "mean" for line in table.cells)]


def _without_empty(table: Table, rows: Sequence[Row]) -> Table:
    """Without columns in which no GEMM has anything, and without means where no loss is left."""
    filled = [i for i in range(len(table.columns)) if any(cells[i] for cells in table.cells[: len(rows)])]
    cells = [tuple(line[i] for i in filled) for line in table.cells]
    return Table(table.title, tuple(table.columns[i] for i in filled), [line for line in cells if any(line[1:])])


def show_tables(rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Print them, and `notes` below the last one."""
    *first, last = tables(rows)
    for table in first:
        print_table(table.title, table.columns, table.cells)
    print_table(last.title, last.columns, last.cells, notes)


def markdown(rows: Sequence[Row]) -> str:
    """The same tables as Markdown."""
    parts = []
    for table in tables(rows):
        header = [column.replace("\n", " ") for column in table.columns]
        parts.append(f"{table.title}\n\n{markdown_table(header, table.cells)}")
    return "\n\n".join(parts)


def _two_lines(name: str) -> str:
    return name.replace("-", "\n")


def _losses(row: Row, variants: Sequence[str]) -> list[str]:
    return [f"{row.loss(variant):.2f}" if row.has(variant) else "" for variant in variants]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _means(rows: Sequence[Row], variants: Sequence[str], before: int, after: int = 0) -> list[tuple[str, ...]]:
    """Rows of geometric means: of what was measured here, and the paper's where it gives one."""
    means = [geomean([row.loss(variant) for row in rows if row.has(variant)]) for variant in variants]
    here = ["" if mean is None else f"{mean:.2f}" for mean in means]
    found = [("mean", *[""] * before, *here, *[""] * after)]
    if any(variant in PAPER_MEANS for variant in variants):
        theirs = [f"{PAPER_MEANS[v]:.2f}" if v in PAPER_MEANS else "" for v in variants]
        found.append(("paper's", *[""] * before, *theirs, *[""] * after))
    return found


LEAST_GEMMS = 5  # for a trend: of five in order 1 in 120 is by chance
_CHANCE = 0.05
_EXCEPTIONS = 0.1
_ALIKE = 1.02
_SHUFFLES = 20_000


@dataclass(frozen=True)
class Claim:
    """`held` is None where there are too few GEMMs to tell."""

    where: str
    text: str
    held: bool | None
    numbers: str

    @property
    def verdict(self) -> str:
        return {True: "held", False: "not held", None: "cannot tell"}[self.held]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The paper's observations, in its order; those of which nothing is recorded are left out."""
    found: list[Claim | None] = []
    for cut in ("rows", "columns"):
        few, many = cut_name(cut, 8), cut_name(cut, 64)
        found.append(_of_each("IV-C1", f"64 pieces by {cut} lose more than 8", [(r, few, many) for r in rows]))
    for pieces in (8, 64):
        both = cut_name("rows", pieces), cut_name("columns", pieces)
        pairs = [(r, *(both[::-1] if r.gemm.m < r.gemm.k else both)) for r in rows]
        found.append(_of_each("IV-C1", f"in {pieces}, rows lose more where M < K, columns else", pairs))
    for cut, pieces in CUTS:
        name = cut_name(cut, pieces)
        text = f"{name}: loss falls with the pieces' op-to-byte"
        found.append(_trend("IV-C1", text, rows, partial(Row.piece_op_to_byte, cut=cut, pieces=pieces), name, -1))
    for by in TRANSPORTS:
        name = gather_name(by)
        found.append(_trend("IV-C2", f"{name}: loss falls with size", rows, lambda r: r.gathered_bytes, name, -1))
    for by in ("library", "kernel"):
        pairs = [(r, gemm_beside("dma"), gemm_beside(by)) for r in rows]
        found.append(_of_each("IV-D1", f"a GEMM loses less beside dma than {by}", pairs))
    for by in TRANSPORTS:
        text = f"a GEMM's loss beside {by} grows with its traffic"
        found.append(_trend("IV-D1", text, rows, lambda r: r.traffic, gemm_beside(by), 1))
    for by in TRANSPORTS:
        text = f"{by}'s loss beside a GEMM grows with the GEMM's traffic"
        found.append(_trend("IV-D2", text, rows, lambda r: r.traffic, gather_beside(by), 1))
    return [claim for claim in found if claim is not None]


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Rank correlation, ties sharing their mean rank; NaN if one side does not vary. ValueError for unequal lengths."""
    a, b = ranks_of(x), ranks_of(y)
    if len(a) != len(b):
        raise ValueError(f"{counted(len(a), 'value')} cannot be correlated with {len(b)}: give as many")
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else float("nan")


def by_chance(x: ArrayLike, y: ArrayLike, sign: int) -> float:
    """How often `y`, put in any order, goes with `x` at least as clearly in the direction of `sign` (1 or -1)."""
    a, b = ranks_of(x), ranks_of(y)
    shuffled = np.random.default_rng(0).permuted(np.tile(b, (_SHUFFLES, 1)), axis=1)
    as_clear = sign * (shuffled @ a) >= sign * (b @ a) - 1e-9
    return (1 + int(as_clear.sum())) / (1 + _SHUFFLES)


def ranks_of(values: ArrayLike) -> np.ndarray:
    """1 for the least; the same for the same values: the mean of the places that they share."""
    _, which, count = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[which]


def _trend(
    where: str, text: str, rows: Sequence[Row], along: Callable[[Row], float], variant: str, sign: int
) -> Claim | None:
    rows = [row for row in rows if row.has(variant)]
    if not rows:
        return None
    x, y = [along(row) for row in rows], [row.loss(variant) for row in rows]
    if len(rows) < LEAST_GEMMS:
        return Claim(where, text, None, f"of {counted(len(rows), 'GEMM')}; it takes {LEAST_GEMMS}")
    rho = spearman(x, y)
    if np.isnan(rho):
        return Claim(where, text, None, "all GEMMs are alike in it")
    chance = by_chance(x, y, sign)
    return Claim(where, text, sign * rho > 0 and chance <= _CHANCE, f"rho {rho:+.2f}, by chance {chance:.1%}")


def _of_each(where: str, text: str, pairs: Sequence[tuple[Row, str, str]]) -> Claim | None:
    """Of (GEMM, variant, variant): that the first loses less than the second."""
    pairs = [(row, less, more) for row, less, more in pairs if row.has(less) and row.has(more)]
    if not pairs:
        return None
    exceptions = [row.name for row, less, more in pairs if row.loss(less) > _ALIKE * row.loss(more)]
    holding = [row.name for row, _, _ in pairs if row.name not in exceptions]
    numbers = f"{len(holding)} of {len(pairs)}"
    if exceptions and holding:
        numbers += f"; not {', '.join(exceptions)}" if len(exceptions) < len(holding) else f": {', '.join(holding)}"
    return Claim(where, text, len(exceptions) <= _EXCEPTIONS * len(pairs), numbers)


_COLOURS = {"dma": "#2f7d5b", "kernel": "#e1812c", "library": "#b8432f", "rows": "#4063a3", "columns": "#e1812c"}
_LOSSES = {"decomposition": "#4063a3", "contention": "#e1812c"}


def draw(directory: Path, rows: Sequence[Row], title: str) -> list[Path]:
    """Write the four pictures as PNG files into `directory`, made if need be. `title`: what ran where."""
    if not rows:
        raise ValueError("nothing to draw: no GEMM was measured")
    plt = pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, panels, drawing in (
        ("figure-7-gemm-decomposition", 2, _gemms_cut),
        ("figure-8-gather-decomposition", 1, _gathers_cut),
        ("figure-9-contention", 2, _contention),
        ("figure-10-shares", 3, _shares),
    ):
        figure, axes = plt.subplots(panels, 1, figsize=(11, 1 + 2.9 * panels), layout="constrained", squeeze=False)
        drawing(axes[:, 0], rows)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        written.append(directory / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
        plt.close(figure)
    return written


def shares(decomposition: float, contention: float) -> tuple[float, float]:
    """Which part of what is lost each of two losses is; a gain counts as no loss, and without loss both are 0."""
    lost = max(0.0, decomposition - 1), max(0.0, contention - 1)
    total = sum(lost)
    return (lost[0] / total, lost[1] / total) if total else (0.0, 0.0)


def _gemms_cut(axes: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda r: r.op_to_byte)
    for axis, pieces in zip(axes, (8, 64), strict=True):
        bars = {cut: [r.loss(cut_name(cut, pieces)) for r in ordered] for cut in ("rows", "columns")}
        labels = [f"{r.name}\n{r.op_to_byte:.0f}{' *' if r.gemm.m < r.gemm.k else ''}" for r in ordered]
        _bars(axis, f"GEMM in {pieces} pieces over the whole", labels, bars)
    axes[-1].set_xlabel("GEMM and its op-to-byte; * M < K")


def _gathers_cut(axes: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda r: r.gathered_bytes)
    bars = {by: [r.loss(gather_name(by)) for r in ordered] for by in TRANSPORTS}
    labels = [f"{r.name}\n{r.gathered_bytes / 1e6:.3g}" for r in ordered]
    _bars(axes[0], f"all-gather in {PIECES} pieces over one piece", labels, bars)
    axes[0].set_xlabel("GEMM and the size of its A, MB")


def _contention(axes: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda r: r.traffic)
    labels = [f"{r.name}\n{r.traffic / 1e6:.3g}" for r in ordered]
    for axis, what, variant in zip(
        axes, (f"GEMM in {PIECES} beside an all-gather", "all-gather beside that GEMM"), (gemm_beside, gather_beside), strict=True
    ):  # fmt: skip
        bars = {by: [r.loss(variant(by)) for r in ordered] for by in TRANSPORTS}
        _bars(axis, f"{what}, over alone", labels, bars)
    axes[-1].set_xlabel("GEMM and its memory traffic, MB")


def _shares(axes: Any, rows: Sequence[Row]) -> None:
    """Of the schedule that copies by engines and cuts by rows; the contention of 64 pieces is taken from 8."""
    panels: tuple[tuple[str, Callable[[Row], tuple[float, float]], Callable[[Row], float]], ...] = (
        (
            "GEMM in 8 by rows, dma",
            lambda r: (r.loss(cut_name("rows", 8)), r.loss(gemm_beside("dma"))),
            lambda r: r.op_to_byte * r.traffic,
        ),
        (
            "GEMM in 64 by rows, contention as in 8",
            lambda r: (r.loss(cut_name("rows", 64)), r.loss(gemm_beside("dma"))),
            lambda r: r.op_to_byte * r.traffic,
        ),
        (
            f"all-gather in {PIECES}, dma",
            lambda r: (r.loss(gather_name("dma")), r.loss(gather_beside("dma"))),
            lambda r: r.traffic,
        ),
    )
    for axis, (what, losses, along) in zip(axes, panels, strict=True):
        ordered = sorted(rows, key=along)
        parts = np.array([shares(*losses(r)) for r in ordered])
        base = np.zeros(len(ordered))
        for (loss, colour), part in zip(_LOSSES.items(), parts.T, strict=True):
            axis.bar([r.name for r in ordered], 100 * part, bottom=base, color=colour, label=f"{loss} loss", width=0.7)
            base += 100 * part
        axis.set_ylabel("share of what is lost, %", fontsize=9)
        axis.set_ylim(0, 100)
        _finish(axis, what, columns=2)
    axes[1].set_xlabel("GEMMs by op-to-byte times traffic, the least first", fontsize=9)
    axes[2].set_xlabel("GEMMs by traffic, the least first", fontsize=9)


def _bars(axis: Any, what: str, labels: Sequence[str], bars: Mapping[Any, Sequence[float]]) -> None:
    """A group of bars for each label, on a logarithmic axis where losses differ much."""
    width, highest = 0.8 / len(bars), max(max(heights) for heights in bars.values())
    fits = width * len(labels) < 16  # numbers between bars can be read
    if highest > 4:
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
    for i, (name, heights) in enumerate(bars.items()):
        places = np.arange(len(labels)) + (i - (len(bars) - 1) / 2) * width
        drawn = axis.bar(places, np.array(heights) - 1, width, bottom=1, color=_COLOURS[name], label=name)
        if fits:
            texts = [f"{height:.2f}" for height in heights]
            axis.bar_label(drawn, texts, fontsize=6, rotation=90, padding=2)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylabel("loss (1: none)", fontsize=9)
    axis.margins(x=0.01, y=0.18)
    _finish(axis, what, columns=len(bars))


def _finish(axis: Any, what: str, columns: int) -> None:
    axis.set_title(what, fontsize=10, loc="left", fontweight="bold")
    axis.legend(fontsize=8, ncol=columns, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.1)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def title_of(record: Mapping[str, Any]) -> str:
    """What ran where, from any record of a run."""
    return f"{counted(record['ranks'], 'rank')}, {record['dtype']}, {record['machine']}; {record['date'][:10]}, {record['commit']}"


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit("usage: python -m weft.studies.inefficiency RESULTS.jsonl DIRECTORY")
    found = [r for r in records.read([Path(arguments[0])]) if r["op"] == "inefficiency"]
    if not found:
        raise SystemExit(
            f"{arguments[0]} has no records of inefficiency: weft bench inefficiency --json {arguments[0]}"
        )
    for path in draw(Path(arguments[1]), rows_of(found), title_of(found[-1])):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])


_SCALE = {"cuda": Fraction(1), "cpu": Fraction(1, 32)}
_MOST_OPS = {"cuda": 1.25e13, "cpu": 1.1e9}  # of a GEMM: 17 ms at 750 TFLOP/s, 18 ms at 60 GFLOP/s
_MEMORY_SHARE = 0.5  # of what is free
_REPETITIONS = 5  # as in the paper
_TRANSPORTS_ARE = {
    "cuda": ("dma: copy engines; kernel: a copying kernel; library: NCCL",),
    "cpu": (
        "dma: a copying thread, for there is no engine; kernel: copies by the threads that compute, in turns with the GEMM; "
        "library: gloo",
    ),
}
_OBSERVATION = ("observation", "section", "", "numbers")


class _Inefficiency(Operator[Gemm]):
    name = "inefficiency"
    pictures = True

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("queued",)

    def default_dtype(self, device: str) -> str:
        return "bf16" if device == "cuda" else "fp32"

    def check_options(self, options: BenchOptions) -> None:
        if options.ranks < 2:
            raise ValueError(f"ranks={options.ranks}: an all-gather takes at least 2")
        if options.scale is not None and not 0 < options.scale <= 1:
            raise ValueError(f"scale={options.scale} must be above 0 and at most 1: it shrinks M, N and K")
        if options.variants:
            raise ValueError(
                f"variants={options.variants}: inefficiency measures all of them, to compare them; give none"
            )
        if options.seconds is not None:
            raise ValueError(
                f"seconds={options.seconds}: inefficiency repeats each of its lanes {_REPETITIONS} times; give none, or --quick"
            )
        self.presets(options)

    def presets(self, options: BenchOptions) -> Sequence[Gemm]:
        return find_gemms([name.strip() for name in (options.preset or "").split(",") if name.strip()])

    def measure(
        self, preset: Gemm, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> MeasuredGemm:
        fitted = fitting(preset, ranks, options)
        found = measure(fitted.run, DTYPES[options.dtype], ranks, _effort(options), step)
        return MeasuredGemm(fitted, found, ranks.world_size, ceilings, alone=len(self.presets(options)) == 1)

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        show(written, options)

    def table(self, rows: Sequence[Record]) -> str:
        measured = rows_of(rows)
        return f"{markdown(measured)}\n\n{markdown_table(_OBSERVATION, _observations(measured))}"


OPERATOR = _Inefficiency()


def fitting(gemm: Gemm, ranks: Ranks, options: BenchOptions) -> Fitted:
    """`gemm` as it is run here; the same on all ranks. Collective."""
    if ranks.device.type == "cuda":
        free = -ranks.most(-torch.cuda.mem_get_info(ranks.device)[0])
    else:
        free = -ranks.most(-available_memory_bytes()) / ranks.world_size
    scale = _SCALE[ranks.device.type] if options.scale is None else Fraction(options.scale).limit_denominator(1 << 16)
    return fit(
        gemm,
        scale=scale,
        most_ops=_MOST_OPS[ranks.device.type] / (8 if options.quick else 1),
        most_bytes=_MEMORY_SHARE * free,
        item_bytes=DTYPES[options.dtype].itemsize,
    )


@dataclass(frozen=True)
class MeasuredGemm:
    """One GEMM's results, as the benchmark hands them on. `alone`: it is the only one of the run, which has no summary."""

    fitted: Fitted
    found: Found
    world_size: int
    ceilings: list[Ceilings]
    alone: bool

    @property
    def wrong(self) -> Sequence[str]:
        return ()  # a wrong result ends the run

    def records(self, options: BenchOptions, run: str) -> list[Record]:
        gemm, found, item = self.fitted.run, self.found, DTYPES[options.dtype].itemsize
        memory, link = (min(getattr(c, name) for c in self.ceilings) for name in ("memory", "link"))
        gather_ms = 1e3 * found.gathered_bytes / self.world_size * (self.world_size - 1) / link
        described = {
            "mode": "queued",
            "m": gemm.m,
            "n": gemm.n,
            "k": gemm.k,
            "paper": {k: v for k, v in asdict(self.fitted.paper).items() if k != "name"},
            "scaled": str(self.fitted),
            "item_bytes": item,
            "op_to_byte": gemm.op_to_byte(item),
            "traffic_bytes": gemm.traffic(item),
            "gathered_bytes": found.gathered_bytes,
        }
        records = []
        for name, timing in found.timings.items():
            base = BASELINES.get(name, name)
            loss = timing.p50_ms / found.timings[base].p50_ms
            roofline_ms = gather_ms if name.startswith("gather") else 1e3 * gemm.traffic(item) / memory
            common = common_fields(options, gemm.name, self.world_size, base, roofline_ms, self.ceilings, run)
            measured = {k: v for k, v in asdict(timing).items() if k != "host_us"}
            judged = {"speedup": 1 / loss, "loss": loss, "roofline_ratio": timing.p50_ms / roofline_ms}
            beside = {"overlap": found.overlap.get(name), "error": found.errors.get(name)}
            records.append({**common, **described, "variant": name, **measured, **judged, **beside})
        return records

    def show(self, options: BenchOptions) -> None:
        if self.alone:
            show(self.records(options, ""), options)


def show(records: Sequence[Record], options: BenchOptions) -> None:
    """Print tables and what they say of the paper's observations, and draw the pictures that were asked for."""
    rows = rows_of(records)
    show_tables(rows, _TRANSPORTS_ARE[options.device])
    print_table("The paper's observations, here", _OBSERVATION, _observations(rows))
    if options.pictures is not None:
        for path in draw(options.pictures, rows, title_of(records[-1])):
            print(f"drawn: {path}")


def _observations(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [(claim.text, claim.where, claim.verdict, claim.numbers) for claim in claims(rows)]


def _effort(options: BenchOptions) -> Effort:
    alone_s, beside_s = (0.004, 0.02) if options.device == "cuda" else (0.01, 0.06)
    return Effort(alone_s / 4, beside_s / 4, 2) if options.quick else Effort(alone_s, beside_s, _REPETITIONS)
