"""Machines as TOML files. Every number has a value, a unit and a source:

    [memory.copy_bandwidth]
    value = 4.2
    unit = "TB/s"
    source = "measured"        # or one of the others in `weft.hw.quantity.SOURCES`
    note = "device-to-device copy, bytes read and written"

A file begins with `name = "..."` and `topology = "switch"`; the topology describes the links of the GPUs
(`weft.hw.topology`). With the line `derived_from = "h200"`, missing numbers are derived from another machine's numbers
(`weft.hw.derived`), so datasheet numbers are enough. `load_machine("h200")["memory.copy_bandwidth"].si` is 4.2e12.

The simulator's models use these numbers. Benchmarks do not: they measure peak rates in the same run (`weft.bench.core.ceilings`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from weft import reading
from weft.errors import UnreadableError
from weft.hw.derived import derived
from weft.hw.keys import implausible, limits_of, unknown
from weft.hw.quantity import BANDWIDTHS, BYTES, RATES, SOURCES, TIMES, UNITS, Quantity
from weft.words import kind


@dataclass(frozen=True)
class Machine:
    """The numbers of a GPU and of its links, by key, such as "lanes.run", with units and sources."""

    name: str
    quantities: Mapping[str, Quantity]
    topology: str = ""
    """The name or path of the topology, for `weft.hw.topology.load_topology`."""
    about: str = ""
    """A sentence on the source of the numbers, if they do not come from a file."""

    def __getitem__(self, key: str) -> Quantity:
        if key not in self.quantities:
            raise KeyError(f"{self.name} has no {key!r}; it has {', '.join(self.quantities)}")
        return self.quantities[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.quantities)

    def number(self, key: str, units: tuple[str, ...] = ("1",)) -> float:
        """Return the number `key` in SI units.

        Raise `KeyError` if it is missing, and `ValueError` if its unit is not in `units`. The errors say what to change
        in the machine file.
        """
        if key not in self.quantities:
            raise KeyError(
                f"{self.name}: add {key} to its machine file: the simulator needs it (see weft/sim/machines.py)"
            )
        if self[key].unit not in units:
            raise ValueError(f"{self.name}: {key} is in {self[key].unit}: give it in {' or '.join(units)}")
        return self[key].si

    def per_us(self, key: str) -> float:
        """Return a rate per microsecond: FLOP/us if `key` begins with "compute.", otherwise bytes/us."""
        return self.number(key, RATES if key.startswith("compute.") else BANDWIDTHS) * 1e-6

    def us(self, key: str) -> float:
        return self.number(key, TIMES) * 1e6

    def bytes(self, key: str) -> float:
        return self.number(key, BYTES)

    def count(self, key: str) -> int:
        if self.number(key) % 1:
            raise ValueError(f"{self.name}: {key} = {self[key]} must be an integer")
        return int(self.number(key))

    def __str__(self) -> str:
        width = max(len(key) for key in self.quantities)
        return "\n".join([self.name] + [f"  {key:<{width}}  {value}" for key, value in self.quantities.items()])


def known_machines() -> tuple[str, ...]:
    """Return the names of the machine files that come with weft."""
    folder = resources.files("weft.hw")
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def file_of(machine: str) -> str | None:
    """Return the name of the machine file for a machine: "h200" for "NVIDIA H200". None if no file has this machine."""
    return next((known for known in known_machines() if load_machine(known).name == machine), None)


def load_machine(name: str | Path) -> Machine:
    """Return the machine `name` (see `known_machines`), or the machine in the TOML file at that path.

    A machine that comes with weft is read once per process. A file at a path is read at each call.

    Raise `ValueError` if a number has an unknown key, has no valid unit or source, has an implausible value
    (`weft.hw.keys`), or has the source "assumed" but no note. Also raise `ValueError` if numbers for a derivation are
    missing.
    Raise `UnreadableError` if the file is not TOML, or exceeds the limits of `weft.reading`.
    """
    if not isinstance(name, str | Path):
        raise ValueError(
            f"name={name!r} is {kind(name)}: pass one of {', '.join(known_machines())}, or the path of a TOML file"
        )
    return _read(name) if Path(name).suffix == ".toml" else _known(str(name))


@cache
def _known(name: str) -> Machine:
    """Return a machine that comes with weft, from a cache, because reading all files takes 10 ms."""
    return _read(name)


def _read(name: str | Path) -> Machine:
    data = read_file("machine", name, known_machines())
    title, topology, base = data.pop("name"), data.pop("topology", ""), data.pop("derived_from", None)
    lacks = data.pop("lacks", [])
    if not isinstance(lacks, list) or not all(isinstance(dtype, str) for dtype in lacks):
        raise ValueError(f'{name}: lacks = {lacks!r} must be a list of dtypes without GEMMs, such as lacks = ["fp8"]')
    if not isinstance(topology, str):
        raise ValueError(f'{name}: topology = {topology!r} must be a name or a path, such as topology = "switch"')
    if topology.endswith(".toml"):
        topology = str(Path(name).parent / topology)
    quantities = quantities_of(str(name), data)
    if base is not None:
        if base not in known_machines():
            raise ValueError(f"{name}: derived_from = {base!r} must be one of {', '.join(known_machines())}")
        quantities = derived(str(name), quantities, base, load_machine(base).quantities, lacks)
    if not quantities:
        raise ValueError(f'{name}: the machine has no numbers: add numbers, or derived_from = "h200"')
    return Machine(title, quantities, topology)


_WITHOUT_FILE = (
    ". Calls need no machine file: for an NVIDIA GPU without one, weft derives the numbers from properties that the driver "
    "reports. To plan for such a GPU on another machine, copy weft/hw/a100.toml, change its datasheet numbers, and pass the "
    "path of the copy"
)


def read_file(what: str, name: str | Path, known: Collection[str]) -> dict[str, Any]:
    """Read a machine or topology file: a TOML file at a path, or a machine file that comes with weft.

    what: the kind of file: "machine" or "topology".
    known: the names that are legal in place of a path.

    Raise `ValueError` with the known names, or with the error in the file.
    """
    path = Path(name)
    either = f"give one of {', '.join(known)}, or"
    if path.suffix == ".toml":
        try:
            data = reading.read_toml(path)
        except OSError as error:
            why = f"the {what} file {name} cannot be read ({error.strerror})"
            raise UnreadableError(f"{why}: {either} the path of a TOML file") from error
    elif what == "machine" and str(name) in known:
        text = resources.files("weft.hw").joinpath(f"{name}.toml").read_text()
        data = reading.parse_toml(text, str(name))
    else:
        raise ValueError(
            f"no {what} {str(name)!r}: {either} a path ending in .toml{_WITHOUT_FILE if what == 'machine' else ''}"
        )
    if not isinstance(data.get("name"), str):
        raise ValueError(f'{name}: a {what} file needs a string as its name: add name = "..." before the first table')
    return data


def quantities_of(file: str, data: Mapping[str, Any]) -> dict[str, Quantity]:
    """Return {dotted key: number} of a file. Raise `ValueError` with all unknown keys and implausible values."""
    found = dict(_leaves(file, "", data))
    wrong = [unknown(key) for key in found if limits_of(key) is None] + list(implausible(found))
    if wrong:
        raise ValueError("\n  ".join([f"{file}: {wrong[0]}", *wrong[1:]]))
    return found


def _leaves(file: str, prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Quantity]]:
    for key, node in tree.items():
        path = f"{prefix}{key}"
        if not isinstance(node, Mapping):
            raise ValueError(
                f"{file}: {path} = {node!r} needs value, unit and source: write "
                f'{path} = {{value = ..., unit = "...", source = "..."}}'
            )
        if "value" in node:
            yield path, _quantity(file, path, node)
        else:
            yield from _leaves(file, f"{path}.", node)


def _quantity(file: str, path: str, node: Mapping[str, Any]) -> Quantity:
    unknown = set(node) - {"value", "unit", "source", "note"}
    if unknown:
        raise ValueError(
            f"{file}: {path} has {', '.join(sorted(unknown))}, but a number has only value, unit, source and note: remove the rest"
        )
    unit, source, note, value = node.get("unit"), node.get("source"), node.get("note", ""), node["value"]
    if not isinstance(unit, str) or unit not in UNITS:
        raise ValueError(f"{file}: {path} has unit {unit!r}; use one of {', '.join(UNITS)}")
    if source not in SOURCES:
        raise ValueError(f"{file}: {path} has source {source!r}; use one of {', '.join(SOURCES)}")
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"{file}: {path} has value {value!r}, which must be a positive number")
    if not isinstance(note, str):
        raise ValueError(f"{file}: {path} has note {note!r}, which must be a string")
    if source == "assumed" and not note:
        raise ValueError(f"{file}: {path} is assumed: add a note with the reason for this value")
    return Quantity(float(value), unit, source, note)
