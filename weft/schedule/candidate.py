"""One way to do an operator, by name: what builders make of a description, and what descriptions and the planner judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do a described operator: a builder with its parameters, those left out that have their defaults."""

    builder: str
    parameters: tuple[tuple[str, Any], ...]
    build: Callable[[], Schedule]

    @property
    def name(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.builder}[{given}]" if given else self.builder
