"""Marks for the parameters of tests: `make test` runs some of them, and `make test-slow` runs all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return `values` for `parametrize`. All values except `fast` are marked as slow."""
    values = list(values)
    if missing := [one for one in fast if one not in values]:
        raise ValueError(f"{missing} are not among {values}: name some that are")
    return [value if value in fast else slow(value) for value in values]


def pairs(first: Iterable[Any], second: Iterable[Any], *fast: tuple[Any, Any]) -> list[Any]:
    """Return all pairs of `first` and `second` for `parametrize`. All pairs except `fast` are marked as slow.

    If two parameters matter independently, a few fast pairs are enough to try each value of both.
    """
    second = list(second)
    values = [(one, other) for one in first for other in second]
    if missing := [pair for pair in fast if pair not in values]:
        raise ValueError(f"{missing} are not among {values}: name some that are")
    return [pair if pair in fast else slow(*pair) for pair in values]


def in_turn(first: Iterable[Any], second: Iterable[Any], each: int = 1) -> list[Any]:
    """Return all pairs of `first` and `second` for `parametrize`. `make test` runs `each` pairs for every value of
    `first`, and `second` takes turns. All other pairs are marked as slow.
    """
    first, second = list(first), list(second)
    taking_turns = [(one, second[(i + j) % len(second)]) for i, one in enumerate(first) for j in range(each)]
    return pairs(first, second, *taking_turns)


def slow(*values: Any) -> Any:
    """Return a set of parameters that is marked as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
