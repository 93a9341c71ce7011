"""Topologies as TOML files. Every number has a unit and a source, as in machine files:

    name = "two hosts of four GPUs"
    shape = "hosts"                # or "switch", "mesh", "ring", "torus": see weft/hw/topology/links.py

    [hosts.gpus]                   # numbers as in a machine file
    value = 4
    unit = "1"
    source = "datasheet"

A name with a size needs no file, and requires exactly this number of ranks. `torus:16x8` has rows of 16 GPUs and columns of 8,
`hosts:4x8` has 4 hosts of 8 GPUs, and `ring:8`, `mesh:8` and `switch:8` have 8 GPUs.

Missing numbers are taken from the machine: `link.port_usable` for GPUs on a switch, `link.pair_usable` for GPUs that
are linked directly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from weft.hw.machine import Machine, known_files, quantities_of, read_file
from weft.hw.quantity import Quantity
from weft.hw.topology.infragraph import read_infragraph
from weft.hw.topology.links import Topology, Wiring, hosts, mesh, ring, switch, torus

_MEANING = {
    "link.port_usable": "the rate of all links of a GPU together, in one direction",
    "link.pair_usable": "the rate of the link between two neighbours, in one direction",
    "nic.usable": "the rate of a GPU's network card",
}
_PORTS, _PAIRS = ("link.port_usable", "link.port_latency"), ("link.pair_usable", "link.pair_latency")
_SHAPES: dict[str, tuple[Callable[..., Topology], tuple[str, ...]]] = {
    "switch": (switch, _PORTS),
    "mesh": (mesh, _PAIRS),
    "ring": (ring, _PAIRS),
    "torus": (torus, (*_PAIRS, "torus.columns")),
    "hosts": (hosts, (*_PORTS, "nic.usable", "nic.latency", "hosts.gpus")),
}
"""{shape: (function that builds the topology, keys of its numbers)}. Missing latencies are 0."""


_SIZED = {"torus": ("torus:COLUMNSxROWS", "torus.columns", 0), "hosts": ("hosts:HOSTSxGPUS", "hosts.gpus", 1)}
"""{shape: (form of a name with sizes, key of the number that a size gives, index of this size in the name)}"""


def size_of(name: str | Path) -> tuple[str, tuple[int, ...]] | None:
    """Return (shape, sizes) of a name such as `torus:16x8`; None for names without a size. Raise `ValueError` for a wrong size."""
    shape, colon, size = str(name).partition(":")
    if not colon or shape not in _SHAPES:
        return None
    form, *_ = _SIZED.get(shape, (f"{shape}:RANKS",))
    wanted = 2 if shape in _SIZED else 1
    numbers = tuple(map(int, size.split("x"))) if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", size) else ()
    if len(numbers) != wanted:
        example = {"torus": "torus:16x8", "hosts": "hosts:4x8"}.get(shape, f"{shape}:8")
        raise ValueError(f"topology {str(name)!r}: write {form}, such as {example}")
    return shape, numbers


def ranks_of(name: str | Path) -> int | None:
    """Return the number of ranks of a sized name, such as 128 for `torus:16x8`, or of an InfraGraph file; None for any
    other name.
    """
    if Path(name).suffix == ".json":
        return read_infragraph(name).ranks
    sized = size_of(name)
    return math.prod(sized[1]) if sized else None


def known_topologies() -> tuple[str, ...]:
    """Return the names of the topology files that come with weft."""
    return known_files("topology")


def load_topology(name: str | Path, machine: Machine) -> Wiring:
    """Return a topology with the numbers of `machine`.

    name: one of `known_topologies`, a name with a size, the path of a TOML file, or the path of an InfraGraph (JSON),
        which has all its numbers itself (`weft.hw.topology.infragraph`).

    Raise `ValueError` if the file is not a topology, and `KeyError` for a number that neither the file nor the machine
    has.
    """
    if Path(name).suffix == ".json":
        return read_infragraph(name)
    sized = size_of(name)
    data = read_file("topology", sized[0] if sized else name)
    data.pop("name")
    shape = data.pop("shape", None)
    if not isinstance(shape, str) or shape not in _SHAPES:
        raise ValueError(f"{name}: shape = {shape!r} is unknown; use one of {', '.join(_SHAPES)}")
    builder, keys = _SHAPES[shape]
    given = quantities_of(str(name), data)
    if unknown := set(given) - set(keys):
        raise ValueError(
            f"{name}: shape {shape!r} does not use {', '.join(sorted(unknown))}; its numbers are {', '.join(keys)}"
        )
    if sized and shape in _SIZED:
        form, key, place = _SIZED[shape]
        given[key] = Quantity(float(sized[1][place]), "1", "assumed", f"{name}: {form}")
    both = replace(machine, quantities={**machine.quantities, **given})
    for key in keys:
        if key not in both.quantities and not key.endswith("latency"):
            about = ""
            if key in _MEANING:
                form = '{value = 50, unit = "GB/s", source = "assumed", note = "a guess"}'
                about = f" ({_MEANING[key]}), such as {key} = {form}"
            raise KeyError(
                f"topology {name}: {machine.name} has no {key}: add it to the file of the machine or the topology{about}, "
                "or use another machine or topology"
            )
    return Wiring(builder, tuple(_number(both, key) for key in keys), math.prod(sized[1]) if sized else 0)


def _number(machine: Machine, key: str) -> float:
    if key.endswith("usable"):
        return machine.per_us(key)
    if key.endswith("latency"):
        return machine.us(key) if key in machine.quantities else 0.0
    return machine.count(key)
