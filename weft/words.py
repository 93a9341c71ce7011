"""Wording of messages: counts with nouns, lists, and names of types."""

from __future__ import annotations

import math
from collections.abc import Iterable

_DUST_US = 1e-6
"""The time in microseconds below which a time counts as 0: sums of times have rounding errors."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, such as "1 rank" or "2 ranks". plural: the noun's plural, if it is irregular."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def joined(*parts: str) -> str:
    """Return the non-empty parts, separated by commas."""
    return ", ".join(part for part in parts if part)


def by_rank(said: Iterable[tuple[int, str]]) -> str:
    """Combine the texts of several ranks in one text, such as "ranks 0, 2: this; rank 1: that". Ranks with equal texts are
    listed together.

    said: pairs (rank, text).
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in said:
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()
    )


def kind(thing: object) -> str:
    """Return the type of `thing` with its article, such as "a list" or "an int"."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def or_list(names: Iterable[str]) -> str:
    """Return the names as one text, such as "one, another or a third"."""
    *before, last = names
    return f"{', '.join(before)} or {last}" if before else last


def and_list(names: Iterable[str]) -> str:
    """Return the names as one text, such as "one, another and a third"."""
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last


def decimal_us(us: float) -> str:
    """Return microseconds as a decimal number, or "none" if the time is 0.

    A positive time is never shown as 0: it has one decimal, or two significant digits if it is very short.
    """
    if abs(us) < _DUST_US:
        return "none"
    digits = 1 if abs(us) >= 0.1 else 1 - math.floor(math.log10(abs(us)))
    return f"{us:.{digits}f}"


def in_us(us: float) -> str:
    """Return a time with its unit, for sentences: "12.3 us", "0.0021 us", "no time"."""
    return "no time" if abs(us) < _DUST_US else f"{decimal_us(us)} us"
