"""Topologies as TOML files. Every number has a unit and a source, as in machine files:

    name = "two hosts of four GPUs"
    shape = "hosts"                # or "switch", "mesh", "ring", "torus", "torus:8x8x8": see weft/hw/topology/shapes

    [hosts.gpus]                   # numbers as in a machine file
    value = 4
    unit = "1"
    source = "datasheet"

    [nic.usable]
    value = 48
    unit = "GB/s"
    source = "assumed"
    note = "a NIC of 400 Gbit/s"

A name with a size needs no file, and requires exactly this number of ranks. `torus:16x8` has rows of 16 GPUs and columns of 8,
`torus:8x8x8` has three dimensions, `hosts:4x8` has 4 hosts of 8 GPUs, and `ring:8`, `mesh:8` and `switch:8` have 8 GPUs. Such a
name may also be the `topology` of a machine file, or the `shape` of a topology file.

Missing numbers are taken from the machine: `link.port_usable` for GPUs on a switch, `link.pair_usable` for GPUs that
are linked directly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from weft.hw.machine import Machine, known_machines, load_machine, quantities_of, read_file
from weft.hw.quantity import Quantity
from weft.hw.topology import shapes as shapes  # it registers all topologies
from weft.hw.topology.infragraph import read_infragraph
from weft.hw.topology.links import Wiring
from weft.hw.topology.shape import SHAPES

_MEANING = {
    "link.port_usable": "the rate of all links of a GPU together, in one direction",
    "link.pair_usable": "the rate of the link between two neighbours, in one direction",
    "nic.usable": "the rate of a GPU's network card",
    "hosts.gpus": "the number of GPUs of each host",
    "torus.columns": "the number of GPUs of each row",
}


def shape_of(name: str | Path) -> tuple[str, tuple[int, ...]]:
    """Return (shape, sizes) of a topology's name: ("torus", (16, 8)) for `torus:16x8`, ("torus", ()) for `torus`.
    Return ("", ()) for any other name. Raise `ValueError` for wrong sizes.
    """
    shape, colon, _ = str(name).partition(":")
    if shape not in SHAPES:
        return "", ()
    return shape, SHAPES[shape].sizes_of(str(name)) if colon else ()


def ranks_of(name: str | Path) -> int | None:
    """Return the number of ranks that a topology requires, such as 128 for `torus:16x8`; None if any number is allowed.
    An InfraGraph file requires a rank for each of its components of type `xpu`.
    """
    if Path(name).suffix == ".json":
        return read_infragraph(name).ranks
    if Path(name).suffix == ".toml":
        name = str(read_file("topology", name, known_topologies()).get("shape"))
    _, sizes = shape_of(name)
    return math.prod(sizes) if sizes else None


def known_topologies() -> tuple[str, ...]:
    """Return the names of the topologies that come with weft."""
    return tuple(sorted(SHAPES))


def load_topology(name: str | Path, machine: Machine) -> Wiring:
    """Return a topology with the numbers of `machine`.

    name: one of `known_topologies`, a name with a size, the path of a TOML file, or the path of an InfraGraph (JSON,
        `weft.hw.topology.infragraph`). An InfraGraph contains all its numbers.

    Raise `ValueError` if the file is not a topology, and `KeyError` for a number that neither the file nor the machine
    has.
    """
    if Path(name).suffix == ".json":
        return read_infragraph(name)
    shape, sizes = shape_of(name)
    if shape:
        given = dict(SHAPES[shape].given)
    else:
        data = read_file("topology", name, known_topologies())
        data.pop("name")
        given_shape = data.pop("shape", None)
        shape, sizes = shape_of(given_shape) if isinstance(given_shape, str) else ("", ())
        if not shape:
            fault = "shape is missing" if given_shape is None else f"shape = {given_shape!r} is unknown"
            raise ValueError(
                f"{name}: {fault}; use one of {', '.join(known_topologies())}, or a name with a size, "
                "such as torus:8x8x8"
            )
        given = quantities_of(str(name), data)
    keys = SHAPES[shape].keys
    if unknown := set(given) - set(keys):
        raise ValueError(
            f"{name}: remove {', '.join(sorted(unknown))}: the numbers of shape {shape!r} are {', '.join(keys)}"
        )
    for key, size in zip(SHAPES[shape].sizes, sizes, strict=False):
        if key in keys:
            given[key] = Quantity(float(size), "1", "assumed", f"{name}: {SHAPES[shape].form}")
    both = replace(machine, quantities={**machine.quantities, **given})
    for key in keys:
        if key not in both.quantities and not key.endswith("latency"):
            about = ""
            if key in _MEANING:
                number = 'value = 50, unit = "GB/s"' if key.endswith("usable") else 'value = 8, unit = "1"'
                form = f'{{{number}, source = "assumed", note = "a guess"}}'
                about = f" ({_MEANING[key]}), such as {key} = {form}"
            raise KeyError(
                f"topology {name}: {machine.name} has no {key}: add it to the file of the machine or the topology{about}, "
                f"or use another topology{_machines_with(key)}"
            )
    numbers = tuple(_number(both, key) for key in keys)
    more = sizes[1:-1] if SHAPES[shape].more else ()
    return Wiring(SHAPES[shape].builder, (*numbers, *more), math.prod(sizes) if sizes else 0)


def _machines_with(key: str) -> str:
    """Return the end of an error text, with the machine files that have a number for `key`; "" if there are none."""
    found = [name for name in known_machines() if key in load_machine(name).quantities]
    return f", or a machine with this number ({', '.join(found)})" if found else ""


def _number(machine: Machine, key: str) -> float:
    if key.endswith("usable"):
        return machine.per_us(key)
    if key.endswith("latency"):
        return machine.us(key) if key in machine.quantities else 0.0
    return machine.count(key)
