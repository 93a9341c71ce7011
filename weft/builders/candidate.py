"""A candidate: a builder with values for its parameters. The planner selects one of a problem's candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Candidate:
    """A builder with values for its parameters.

    builder: the builder's name.
    parameters: the parameters whose values differ from their defaults, as pairs (name, value).
    build: a function that returns the schedule.
    """

    builder: str
    parameters: tuple[tuple[str, Any], ...]
    build: Callable[[], Schedule]

    @property
    def pieces_grow(self) -> bool:
        """True if each shard is cut into W pieces for W ranks, which makes planning slow for many ranks."""
        return ("steps", 0) in self.parameters

    @property
    def name(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.builder}[{given}]" if given else self.builder
