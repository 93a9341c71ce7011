"""Text of numbers and tables, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

Record = dict[str, Any]
"""A JSON object: the measurement of a (configuration, variant, mode). See `weft.bench.core.records`."""


class ResultTable(NamedTuple):
    title: str
    columns: tuple[str, ...]
    cells: list[tuple[str, ...]]


def table(
    title: str, rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]], last: Sequence[Mapping[str, str]] = ()
) -> ResultTable:
    """Return a table with a line for each of `rows`, followed by the lines `last`. A line of `last` is {column: text}.

    columns: the columns, as {title: function that returns the cell for a row}. Columns that are empty for all rows are omitted.
    """
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    shown = [name for name in columns if any(cells[name])]
    lines = [*zip(*(cells[name] for name in shown), strict=True)]
    return ResultTable(title, tuple(shown), [*lines, *(tuple(line.get(name, "") for name in shown) for line in last)])


def by_config(rows: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Group records. Return {configuration: {variant: record}}, in the order of first appearance."""
    found: dict[str, dict[str, Record]] = {}
    for r in rows:
        found.setdefault(r["config"], {})[r["variant"]] = r
    return found


def cell(field: str, digits: int, unit: float = 1) -> Callable[[Record], str]:
    """Return a function that formats a record's `field`, divided by `unit`, with `digits` decimals; empty if missing or None."""

    def said(record: Record) -> str:
        value = record.get(field)
        return "" if value is None else f"{value / unit:.{digits}f}"

    return said


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with the first column left-aligned, the others right-aligned. The character | in cells is
    escaped.
    """
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|---" + "|---:" * (len(header) - 1) + "|", *lines[1:]])


def milliseconds(value: float | None) -> str:
    """Return the value with three significant digits; empty for None."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def geomean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None for no values."""
    return geometric_mean(values) if values else None


def times(factor: float | None, clear: bool = True) -> str:
    """Return a speedup (`factor`) as text, such as "1.25x"; empty for None.

    clear: False to write it in parentheses, for example because it is within the noise.
    """
    if factor is None:
        return ""
    return f"{factor:.2f}x" if clear else f"({factor:.2f}x)"


def number(value: float | None, digits: int) -> str:
    """Return the value with `digits` decimals; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def share(those: Sequence[bool]) -> float | None:
    """Return the fraction of True among the booleans `those`; None if there are none."""
    return sum(those) / len(those) if those else None
