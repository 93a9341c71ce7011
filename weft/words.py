"""Numbers of things in sentences."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """ "1 rank", "2 ranks". plural: where it is not the noun and an "s"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
