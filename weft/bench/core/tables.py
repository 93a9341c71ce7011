"""Numbers and tables as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
"""One JSON object: what was measured of a (configuration, variant, mode), with what is needed to believe and repeat it."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column left, the others right; a bar inside a cell stays a bar."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|---" + "|---:" * (len(header) - 1) + "|", *lines[1:]])


def milliseconds(value: float | None) -> str:
    """Three digits; nothing for None."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def geomean(values: Sequence[float]) -> float | None:
    """None for no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def times(factor: float | None, clear: bool = True) -> str:
    """ "1.25x", in parentheses if not `clear`; nothing for None."""
    if factor is None:
        return ""
    return f"{factor:.2f}x" if clear else f"({factor:.2f}x)"


def number(value: float | None, digits: int) -> str:
    """Nothing for None."""
    return "" if value is None else f"{value:.{digits}f}"


def share(those: Sequence[bool]) -> float | None:
    """Of those that are true; None for no values."""
    return sum(those) / len(those) if those else None
