"""Decomposition and contention losses of a GEMM and an all-gather: the FiCCO paper's characterisation, on this machine.

docs/characterisation.md explains the study. The records of a GEMM become a `LossRow`. From the rows come tables,
pictures (figures 7 to 10), and a verdict on the paper's observations:

- An observation about a trend over GEMMs holds if Spearman's rank correlation has the claimed sign and is significant.
  Significant means that at most 5% of random permutations have a correlation at least as strong.
- An observation about every GEMM holds if at most one GEMM in ten contradicts it by more than 2%, the noise of
  repetitions.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from weft.bench.core.records import last_runs
from weft.bench.core.tables import Record, ResultTable, geomean, milliseconds, number, table
from weft.bench.table_1 import GatheredGemm, find_gemms
from weft.studies.losses_lanes import TRANSPORTS
from weft.studies.losses_measure import (
    BASELINES,
    CUTS,
    PIECES,
    WHOLE,
    cut_name,
    gather_beside,
    gather_name,
    gemm_beside,
)
from weft.studies.pages import bars, figure
from weft.words import counted

# The paper's geometric means for FiCCO: decomposed all-gather (IV-C2), GEMM concurrent with the all-gather (IV-D1), all-gather
# concurrent with the GEMM (IV-D2). The text names no transport; tables show the means with DMA, which FiCCO uses.
PAPER_MEANS = {gather_name("dma"): 1.10, gemm_beside("dma"): 1.11, gather_beside("dma"): 1.12}
PAPER_MEANS |= {gemm_beside("dma", 1): 1.07, gather_beside("dma", 1): 1.03}  # shard-based overlap: IV-D1, IV-D2

_LEAST_GEMMS = 5  # five random values are monotonic with a chance of 1 in 120
_CHANCE, _EXCEPTIONS, _ALIKE, _SHUFFLES = 0.05, 0.1, 1.02, 20_000
_VARIES = 0.06  # IV-A: the largest variation of an operation's time, on a GPU and between GPUs


@dataclass(frozen=True)
class LossRow:
    """All measurements of one GEMM and its all-gather. Some variants may be missing.

    ms: the median time in ms, by variant.
    overlap: the fraction of time in which both operations ran, by variant, for variants with two concurrent operations.
    varies: the spread of the undivided GEMM's time, as two fractions of its median: (80th minus 20th percentile over
        repetitions, slowest minus fastest rank).
    """

    gemm: GatheredGemm
    scaled: str
    gathered_bytes: int
    ms: dict[str, float]
    overlap: dict[str, float]
    varies: tuple[float, float] | None = None

    def loss(self, variant: str) -> float | None:
        """Return the time of `variant` divided by the time of its baseline (`BASELINES`): the undivided operation, or
        the operation alone. 1 is no loss. Return None if a time is missing.
        """
        mine, base = self.ms.get(variant), self.ms.get(BASELINES[variant])
        return None if mine is None or base is None else mine / base


def rows_of(records: Sequence[Record]) -> list[LossRow]:
    """Return a row for each GEMM, from its last run."""
    rows = []
    for mine in last_runs(records, itemgetter("config")).values():
        first = mine[0]
        sizes = {field: first[field] for field in ("m", "n", "k", "item_bytes")}
        gemm = replace(find_gemms([first["config"]])[0], **sizes)
        overlap = {r["variant"]: r["overlap"] for r in mine if r["overlap"] is not None}
        ms = {r["variant"]: r["p50_ms"] for r in mine}
        spread = {r["variant"]: (r["p80_ms"] - r["p20_ms"], r["skew_ms"]) for r in mine}.get(WHOLE)
        varies = None if spread is None else (spread[0] / ms[WHOLE], spread[1] / ms[WHOLE])
        rows.append(LossRow(gemm, first["scaled"], first["gathered_bytes"], ms, overlap, varies))
    return rows


def tables(rows: Sequence[LossRow]) -> list[ResultTable]:
    """Return tables of the losses of GEMMs in pieces, of all-gathers in pieces, and of a GEMM and an all-gather that
    run concurrently.

    The last rows are geometric means, measured and in the paper. Columns that were not recorded are omitted.
    """

    def ms(variant: str) -> Callable[[LossRow], str]:
        return lambda row: milliseconds(row.ms.get(variant))

    def overlap(variant: str) -> Callable[[LossRow], str]:
        return lambda row: f"{row.overlap[variant]:.0%}" if variant in row.overlap else ""

    whole = {
        "M x N x K": lambda r: str(r.gemm),
        "paper's size,\nscaled by": lambda r: r.scaled,
        "ops /\nbyte": lambda r: f"{r.gemm.op_to_byte:.0f}",
        "traffic\nMB": lambda r: f"{r.gemm.traffic / 1e6:.0f}",
        "whole\nms": ms(WHOLE),
    }
    moved: _Columns = {"A, MB": lambda r: f"{r.gathered_bytes / 1e6:.1f}"}
    moved |= {f"{by}\nms": ms(gather_name(by, 1)) for by in TRANSPORTS}
    cuts = {variant.replace("-", "\n"): variant for variant in (cut_name(*cut) for cut in CUTS)}
    gathers = {f"{by}\nin {PIECES}": gather_name(by) for by in TRANSPORTS}
    beside = {f"GEMM,\n{by}": gemm_beside(by) for by in TRANSPORTS}
    beside |= {f"gather,\n{by}": gather_beside(by) for by in TRANSPORTS}
    beside |= {"GEMM,\nwhole shards": gemm_beside("dma", 1), "gather,\nwhole shards": gather_beside("dma", 1)}
    overlaps = {f"overlap,\n{by}": overlap(gemm_beside(by)) for by in TRANSPORTS}
    said = (
        f"Contention loss of a GEMM in {PIECES} pieces by rows, and of an all-gather in {PIECES} pieces: time while both run / "
        "time alone (figure 9)"
    )
    if any(
        row.loss(variant) is not None for row in rows for variant in (gemm_beside("dma", 1), gather_beside("dma", 1))
    ):
        said += '. "whole shards": the all-gather by dma is not cut'
    made = [
        _table(
            "Decomposition loss of GEMMs in 8 and 64 pieces: time of the pieces / time of the whole (figure 7)",
            rows,
            whole,
            cuts,
            {},
        ),
        _table(
            f"Decomposition loss of all-gathers in {PIECES} pieces: time of the pieces / time of the whole all-gather (figure 8)",
            rows,
            moved,
            gathers,
            {},
        ),
        _table(said, rows, {}, beside, overlaps),
    ]
    return [one for one in made if len(one.cells) > len(rows)]


_Columns = dict[str, Callable[[LossRow], str]]


def _table(title: str, rows: Sequence[LossRow], first: _Columns, losses: dict[str, str], last: _Columns) -> ResultTable:
    """Return a table with a line for each GEMM, and then the mean losses here and in the paper.

    losses: the columns with losses, as {title of a column: variant whose loss it shows}. `first` and `last` are the columns
        before and after these.
    """

    def loss(variant: str) -> Callable[[LossRow], str]:
        return lambda row: number(row.loss(variant), 2)

    columns = {"GEMM": lambda r: r.gemm.name, **first, **{header: loss(v) for header, v in losses.items()}, **last}
    here = {v: geomean([of for row in rows if (of := row.loss(v)) is not None]) for v in losses.values()}
    means = []
    for label, mean in (("mean", here), ("paper's", PAPER_MEANS)):
        line = {header: number(mean.get(v), 2) for header, v in losses.items() if here[v] is not None}
        means += [{"GEMM": label, **line}] * any(line.values())
    return table(title, rows, columns, means)


class Claim(NamedTuple):
    """An observation of the paper, and whether it holds here.

    where: the paper's section.
    held: True if it holds; None if there are too few GEMMs for a verdict.
    numbers: the result here, as text.
    """

    where: str
    text: str
    held: bool | None
    numbers: str

    @property
    def cells(self) -> tuple[str, ...]:
        return self.text, self.where, {True: "held", False: "not held", None: "cannot tell"}[self.held], self.numbers


def claims(rows: Sequence[LossRow]) -> list[Claim]:
    """Return the paper's observations, in the paper's order. Observations without records are omitted."""
    found = [_within("in repeated runs on one rank", rows, 0), _within("on different ranks", rows, 1)]
    for cut in ("rows", "columns"):
        few, many = cut_name(cut, 8), cut_name(cut, 64)
        found.append(
            _of_each("IV-C1", f"a GEMM in 64 pieces by {cut} loses more than in 8", [(r, few, many) for r in rows])
        )
    for pieces in (8, 64):
        both = cut_name("rows", pieces), cut_name("columns", pieces)
        pairs = [(r, *(both[::-1] if r.gemm.m < r.gemm.k else both)) for r in rows]
        found.append(
            _of_each(
                "IV-C1", f"in {pieces} pieces, cuts by rows lose more if M < K, and cuts by columns otherwise", pairs
            )
        )
    for cut, pieces in CUTS:
        name, of_pieces = cut_name(cut, pieces), [row.gemm.piece(**{cut: pieces}).op_to_byte for row in rows]
        found.append(
            _trend(
                "IV-C1",
                f"a GEMM in {pieces} pieces by {cut}: its loss falls with the pieces' op-to-byte ratio",
                rows,
                of_pieces,
                name,
                -1,
            )
        )
    for by in TRANSPORTS:
        text, sizes = (
            f"an all-gather in {PIECES} pieces by {by}: its loss falls with size",
            [r.gathered_bytes for r in rows],
        )
        found.append(_trend("IV-C2", text, rows, sizes, gather_name(by), -1))
    for by in TRANSPORTS[:0:-1]:
        pairs = [(r, gemm_beside("dma"), gemm_beside(by)) for r in rows]
        found.append(
            _of_each(_section("IV-D1", by), f"a GEMM loses less during an all-gather by dma than by {by}", pairs)
        )
    for where, text, variant in (
        ("IV-D1", "a GEMM's loss during an all-gather by {} grows with the GEMM's traffic", gemm_beside),
        ("IV-D2", "the loss of an all-gather by {} during a GEMM grows with the GEMM's traffic", gather_beside),
    ):
        traffic = [row.gemm.traffic for row in rows]
        found += [_trend(_section(where, by), text.format(by), rows, traffic, variant(by), 1) for by in TRANSPORTS]
    return [claim for claim in found if claim is not None]


def _section(where: str, by: str) -> str:
    """Return the section `where` of an observation. For copies by kernel (`by`), return "not in the paper"."""
    return "not in the paper" if by == "kernel" else where


def _within(where: str, rows: Sequence[LossRow], number: int) -> Claim | None:
    known = [(row.varies[number], row.gemm.name) for row in rows if row.varies is not None]
    if not known:
        return None
    beyond = [name for share, name in known if share > _VARIES]
    numbers = f"at most {max(known)[0]:.1%} ({max(known)[1]})"
    numbers += f"; more than {_VARIES:.0%} for {len(beyond)} of {len(known)}" if beyond else ""
    text = f"a whole GEMM's times {where} differ by at most {_VARIES:.0%}"
    return Claim("IV-A", text, len(beyond) <= _EXCEPTIONS * len(known), numbers)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Return Spearman's rank correlation, with mean ranks for ties; NaN if `x` or `y` is constant."""
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(_ranks_of(x), _ranks_of(y))[0, 1])


def by_chance(x: ArrayLike, y: ArrayLike, sign: int) -> float:
    """Return the p-value of a rank correlation between `x` and `y` whose claimed sign is 1 or -1.

    The p-value is the fraction of random permutations of `y` that correlate with `x` at least as strongly as `y` does,
    with the claimed sign.
    """
    a, b = _ranks_of(x), _ranks_of(y)
    shuffled = np.random.default_rng(0).permuted(np.tile(b, (_SHUFFLES, 1)), axis=1)
    as_clear = sign * (shuffled @ a) >= sign * (b @ a) - 1e-9
    return (1 + int(as_clear.sum())) / (1 + _SHUFFLES)


def _ranks_of(values: ArrayLike) -> np.ndarray:
    """Return ranks, 1 for the smallest; equal values share the mean of their ranks."""
    _, which, count = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[which]


def _trend(
    where: str, text: str, rows: Sequence[LossRow], along: Sequence[float], variant: str, sign: int
) -> Claim | None:
    pairs = [(x, loss) for x, row in zip(along, rows, strict=True) if (loss := row.loss(variant)) is not None]
    if not pairs:
        return None
    if len(pairs) < _LEAST_GEMMS:
        return Claim(where, text, None, f"only {counted(len(pairs), 'GEMM')}; at least {_LEAST_GEMMS} are needed")
    x, y = zip(*pairs, strict=True)
    rho = spearman(x, y)
    if np.isnan(rho):
        return Claim(where, text, None, "all GEMMs have the same value")
    chance = by_chance(x, y, sign)
    return Claim(where, text, sign * rho > 0 and chance <= _CHANCE, f"rho {rho:+.2f}, p {chance:.1%}")


def _of_each(where: str, text: str, pairs: Sequence[tuple[LossRow, str, str]]) -> Claim | None:
    """Return the claim that one variant loses less than another. pairs: the comparisons, as (GEMM, variant that should lose
    less, other variant).
    """
    losses = [(row.gemm.name, row.loss(less), row.loss(more)) for row, less, more in pairs]
    known = [(name, less > _ALIKE * more) for name, less, more in losses if less is not None and more is not None]
    if not known:
        return None
    holding, exceptions = ([name for name, exception in known if exception is which] for which in (False, True))
    numbers = f"{len(holding)} of {len(known)}"
    if exceptions and holding:
        numbers += f"; not for {', '.join(exceptions)}" if len(exceptions) < len(holding) else f": {', '.join(holding)}"
    return Claim(where, text, len(exceptions) <= _EXCEPTIONS * len(known), numbers)


_COLOURS = ("#4063a3", "#e1812c", "#2f7d5b")


_FIGURES: tuple[tuple[str, str, str, Sequence[Any], dict[str, Callable[[Any], str]]], ...] = (
    ("figure-7-gemm-decomposition", "gemm.op_to_byte", "GEMM and its op-to-byte ratio; * M < K", ("rows", "columns"),
     {f"GEMM in {pieces} pieces / whole GEMM": partial(cut_name, pieces=pieces) for pieces in (8, 64)}),
    ("figure-8-gather-decomposition", "gathered_bytes", "GEMM and the size of its A, MB", TRANSPORTS,
     {f"all-gather in {PIECES} pieces / one piece": gather_name}),
    ("figure-9-contention", "gemm.traffic", "GEMM and its memory traffic, MB", TRANSPORTS,
     {f"GEMM in {PIECES} pieces, during an all-gather / alone": gemm_beside,
      "all-gather, during that GEMM / alone": gather_beside}),
)  # fmt: skip
"""(name, order of GEMMs, label of this order, groups, {panel's title: function from a group to its variant})."""


def draw(directory: Path, rows: Sequence[LossRow], title: str) -> list[Path]:
    """Write four PNG files into `directory`, created if needed, for figures 7 to 10. title: a description of the run.

    The pictures show decomposition losses of GEMMs, decomposition losses of all-gathers, contention losses, and the fraction of
    each in the total loss.
    """
    if not rows:
        raise ValueError("nothing to draw: the records have no GEMM. Run weft bench inefficiency --json FILE")
    written = [directory / f"{name}.png" for name, *_ in _FIGURES]
    for path, (_, along, below, groups, panels) in zip(written, _FIGURES, strict=True):
        ordered = sorted(rows, key=attrgetter(along))
        labels = [f"{row.gemm.name}\n{_said(row, along)}" for row in ordered]
        with figure(path, title, (11, 1 + 2.9 * len(panels)), len(panels)) as axes:
            for axis, (what, variant) in zip(axes, panels.items(), strict=True):
                _bars(axis, labels, {group: [row.loss(variant(group)) or 0.0 for row in ordered] for group in groups})
                axis.set_title(what, fontsize=10, loc="left", fontweight="bold")
            axes[-1].set_xlabel(below)
    written.append(directory / "figure-10-shares.png")
    with figure(written[-1], title, (11, 9.7), 3) as axes:
        _shares(axes, rows)
    return written


def _said(row: LossRow, along: str) -> str:
    if along == "gemm.op_to_byte":
        return f"{row.gemm.op_to_byte:.0f}{' *' if row.gemm.m < row.gemm.k else ''}"
    return f"{attrgetter(along)(row) / 1e6:.3g}"


def shares(decomposition: float, contention: float) -> tuple[float, float]:
    """Return the fractions of decomposition and contention in the total loss, for figure 10.

    decomposition, contention: the time with the loss divided by the time without it. A quotient below 1 counts as no
    loss. Without any loss, both fractions are 0.
    """
    lost = max(0.0, decomposition - 1), max(0.0, contention - 1)
    total = sum(lost) or 1.0
    return lost[0] / total, lost[1] / total


def _shares(axes: Any, rows: Sequence[LossRow]) -> None:
    """Draw which fractions of the total loss are decomposition and contention (`shares`). The panels are: GEMMs in 8 and in 64
    pieces of rows, and all-gathers by copy engines ("dma"). For 64 pieces only the decomposition loss was measured; the
    contention loss is for 8 pieces.
    """
    of_gemm, of_gather = gemm_beside("dma"), gather_beside("dma")
    panels = {
        "GEMM in 8 by rows, dma": (cut_name("rows", 8), of_gemm),
        "GEMM in 64 by rows, contention loss of 8": (cut_name("rows", 64), of_gemm),
        f"all-gather in {PIECES}, dma": (gather_name("dma"), of_gather),
    }
    for axis, (what, (cut, beside)) in zip(axes, panels.items(), strict=True):
        ordered = sorted(rows, key=lambda r: r.gemm.traffic * (r.gemm.op_to_byte if beside == of_gemm else 1))
        parts = 100 * np.array([shares(r.loss(cut) or 1.0, r.loss(beside) or 1.0) for r in ordered])
        names, of = [r.gemm.name for r in ordered], {"width": 0.7}
        axis.bar(names, parts[:, 0], color=_COLOURS[0], label="decomposition loss", **of)
        axis.bar(names, parts[:, 1], bottom=parts[:, 0], color=_COLOURS[1], label="contention loss", **of)
        axis.set_ylabel("fraction of the total loss, %", fontsize=9)
        axis.set_ylim(0, 100)
        axis.set_title(what, fontsize=10, loc="left", fontweight="bold")
    axes[1].set_xlabel("GEMMs by op-to-byte ratio times traffic, ascending", fontsize=9)
    axes[2].set_xlabel("GEMMs by traffic, ascending", fontsize=9)


def _bars(axis: Any, labels: Sequence[str], losses: Mapping[str, Sequence[float]]) -> None:
    """Draw losses as grouped bars that begin at 1 (no loss). losses: the losses for all labels, by the name in the legend."""
    if max(map(max, losses.values())) > 4:
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
    for drawn, heights in zip(bars(axis, labels, losses, _COLOURS, base=1), losses.values(), strict=True):
        if len(labels) < 20 * len(losses):  # few enough bars for readable numbers
            axis.bar_label(drawn, [f"{height:.2f}" for height in heights], fontsize=6, rotation=90, padding=2)
    axis.set_ylabel("loss (1: none)", fontsize=9)
    axis.margins(x=0.01, y=0.18)
