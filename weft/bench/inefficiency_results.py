"""Records as tables: on the terminal, and in Markdown.

A record is a (GEMM, variant): its time, what it is compared with, its loss. A `Row` is all records of one GEMM, and everything
else, tables, claims and pictures, is made from rows: they can be made again from a file of records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.bench.console import print_table
from weft.bench.inefficiency_gemms import Gemm, find_gemms
from weft.bench.inefficiency_measure import (
    BASELINES,
    CUTS,
    PIECES,
    WHOLE,
    cut_name,
    gather_beside,
    gather_name,
    gemm_beside,
)
from weft.bench.inefficiency_sides import TRANSPORTS
from weft.bench.operator import Record
from weft.bench.tables import geomean, markdown_table, milliseconds

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
