"""Which parameters of a test are tried by `make test`, and which only by `make test-slow`: repetitions at greater length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly(values: Iterable[Any], *fast: Any) -> list[Any]:
    """`values`, for `parametrize`: all but those in `fast` are marked as slow."""
    values = list(values)
    if missing := [one for one in fast if one not in values]:
        raise ValueError(f"{missing} are not among {values}: name some that are")
    return [value if value in fast else slow(value) for value in values]


def slow(*values: Any) -> Any:
    """One set of parameters that is."""
    return pytest.param(*values, marks=pytest.mark.slow)
