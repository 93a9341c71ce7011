"""The numbers of a study's model, each with its unit and source, read from a TOML file in this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from weft.bench.core.tables import ResultTable, table
from weft.hw.quantity import SOURCES, UNITS, Quantities, Quantity
from weft.reading import parse_toml


@dataclass(frozen=True)
class Numbers(Quantities):
    """The numbers of a model by key, in SI units: bytes, seconds, bytes/s or FLOP/s. A key is "group.name", as in the
    TOML file.

        numbers = load_numbers()
        numbers["nic.bandwidth"]               20e9
        numbers.scaled("nic.bandwidth", 0.8)   a copy in which this number is multiplied by 0.8
    """

    def with_value(self, key: str, value: float) -> Numbers:
        """Return a copy in which `key` has another value. The value is in the unit that the file has for this key."""
        self[key]
        return replace(self, quantities={**self.quantities, key: replace(self.quantities[key], value=value)})

    def us(self, key: str) -> float:
        return 1e6 * self[key]

    def scaled(self, key: str, factor: float) -> Numbers:
        self[key]
        return self.with_value(key, self.quantities[key].value * factor)

    def of_source(self, *sources: str) -> Iterator[str]:
        return (key for key, quantity in self.quantities.items() if quantity.source in sources)

    @property
    def assumed(self) -> list[int]:
        """Return a list of two counts: how many numbers are assumed, and how many numbers there are."""
        return [len(list(self.of_source("assumed"))), len(self.quantities)]


@cache
def load_numbers() -> Numbers:
    """Read the numbers of `fused_embedding.toml`. Raise `ValueError` for an unknown unit or source, or a negative value."""
    file = "fused_embedding.toml"
    data = parse_toml(files(__package__).joinpath(file).read_text(), file)
    name = data.pop("name")
    found = {f"{group}.{key}": Quantity(**fields) for group, entries in data.items() for key, fields in entries.items()}
    for key, one in found.items():
        if one.unit not in UNITS or one.source not in SOURCES or one.si < 0:
            raise ValueError(
                f"{file}: {key} = {one}: unit must be one of {', '.join(UNITS)}, source one of {', '.join(SOURCES)}, and value at "
                "least 0"
            )
    return Numbers(name, found)


def numbers_table(title: str, numbers: Quantities) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "number": lambda item: item[0],
        "value": lambda item: f"{item[1].value:g}" + (f" {item[1].unit}" if item[1].unit != "1" else ""),
        "source": lambda item: item[1].source,
        "note": lambda item: item[1].note,
    }
    return table(title, list(numbers.quantities.items()), columns)
