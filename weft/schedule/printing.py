"""The text of steps, regions and buffers, as `Schedule.table` prints them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.schedule.expr import RANK, Index, Values
from weft.schedule.steps import ITEM_BYTES, Buffer, For, Norm, Region, Set, Step, Tiles, at_text, substitute

WIDTH = 132
_TOGETHER = "\N{NO-BREAK SPACE}"  # a space at which lines are not broken; `wrapped` replaces it after wrapping


def describe(item: Step | Region, rank: int | None = None) -> str:
    """Return a step or region as one line of text. rank: the rank whose regions are printed without "@rank"."""
    return " ".join(str(_shown(item, rank, {})).split())


def buffer_lines(buffers: Sequence[Buffer], values: Sequence[Values]) -> list[str]:
    """Return the lines of a table of buffers. values: for each rank, the values of its variables (`Schedule.values`)."""
    rows = [("buffers", "rows", "columns", "dtype", "role", "size")]
    for buffer in buffers:
        row_bytes = buffer.cols * ITEM_BYTES[buffer.dtype]
        of_ranks = sorted(substitute(buffer.rows, of_rank) for of_rank in values)
        ends = sorted({*of_ranks[:1], *of_ranks[-1:]})  # a faulty schedule may have 0 ranks
        formula = str(buffer.rows)
        n_rows = formula if len(formula) <= 24 else " to ".join(map(str, ends))
        size = " to ".join(_bytes(n * row_bytes) for n in ends)
        rows.append((buffer.name, n_rows, str(buffer.cols), buffer.dtype, buffer.role, size))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, "<>><<>", widths, strict=True)) for row in rows]


def _bytes(count: int) -> str:
    unit = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{count / 2 ** (10 * unit):.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def step_lines(head: str, step: Step, rank: int | None, buffers: dict[str, Buffer]) -> list[str]:
    if not isinstance(step, For | Tiles):
        return [wrapped(head, str(_shown(step, rank, buffers)))]
    what = f"tiles of {step.kernel.name}," if isinstance(step, Tiles) else "for"
    lines = [wrapped(head, f"{what} {step.index} in 0 .. {step.extent} - 1")]
    for inner in step.body:
        lines += step_lines(" " * len(head) + "  ", inner, rank, buffers)
    return lines


def wrapped(head: str, text: str) -> str:
    indent = " " * (len(head) + 8)
    filled = textwrap.fill(
        text, WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return filled.replace(_TOGETHER, " ")


def _shown(item: Any, rank: int | None, buffers: dict[str, Buffer]) -> Any:
    """Return `item` with its regions replaced by text. Regions of `rank` are printed without "@rank"."""
    if isinstance(item, tuple):
        return tuple(_shown(part, rank, buffers) for part in item)
    if isinstance(item, Region):
        return _region(item, RANK if item.at == rank else item.at, buffers.get(item.buffer))
    if isinstance(item, Norm):
        return replace(item, out=_shown(item.out, rank, buffers), weight=_shown(item.weight, rank, buffers))
    if isinstance(item, Set):
        return replace(item, at=RANK if item.at == rank else item.at)
    if isinstance(item, Step):
        return item.with_fields(lambda part: _shown(part, rank, buffers))
    return item


def _region(region: Region, at: Index, buffer: Buffer | None) -> str:
    """Return the text of a region. All rows or all columns are ":", and a whole buffer has no brackets."""
    whole = (0, buffer.rows, 0, buffer.cols) if buffer else (None,) * 4
    rows = ":" if (region.row, region.rows) == whole[:2] else f"{region.row}:+{region.rows}"
    cols = ":" if (region.col, region.cols) == whole[2:] else f"{region.col}:+{region.cols}"
    inside = "" if rows == cols == ":" else f"[{rows}, {cols}]"
    text = f"{region.buffer}{at_text(at)}{inside}"
    return text if len(text) > WIDTH - 30 else text.replace(" ", _TOGETHER)
