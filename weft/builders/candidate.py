"""A candidate: a named way to run an operator. Builders make candidates; problems and the planner select among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Candidate:
    """A builder with its parameters; parameters with default values are omitted."""

    builder: str
    parameters: tuple[tuple[str, Any], ...]
    build: Callable[[], Schedule]

    @property
    def pieces_grow(self) -> bool:
        """True if it cuts each shard into as many pieces as there are ranks: a rank sends W (W - 1) of them."""
        return ("steps", 0) in self.parameters

    @property
    def name(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.builder}[{given}]" if given else self.builder
