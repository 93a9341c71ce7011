"""Topologies as TOML files, so that models show their links and sources.

    name = "two hosts of four GPUs"
    shape = "hosts"                # or "switch", "mesh", "ring", "torus": see weft/hw/topology/links.py

    [hosts.gpus]                   # numbers as in a machine file
    value = 4
    unit = "1"
    source = "datasheet"

Numbers that the file lacks are taken from the machine: `link.port_usable` for GPUs on a switch, `link.pair_usable` for GPUs that
are linked directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from weft.hw.machine import Machine, known_files, quantities_of, read_file
from weft.hw.topology.links import Topology, Wiring, hosts, mesh, ring, switch, torus

_PORTS, _PAIRS = ("link.port_usable", "link.port_latency"), ("link.pair_usable", "link.pair_latency")
_SHAPES: dict[str, tuple[Callable[..., Topology], tuple[str, ...]]] = {
    "switch": (switch, _PORTS),
    "mesh": (mesh, _PAIRS),
    "ring": (ring, _PAIRS),
    "torus": (torus, (*_PAIRS, "torus.columns")),
    "hosts": (hosts, (*_PORTS, "nic.usable", "nic.latency", "hosts.gpus")),
}
"""The builder and the numbers of each shape. Missing latencies are 0."""


def known_topologies() -> tuple[str, ...]:
    """Return the names that `load_topology` knows without a path."""
    return known_files("topology")


def load_topology(name: str | Path, machine: Machine) -> Wiring:
    """Return the topology `name` (see `known_topologies`), or the topology in the TOML file at that path, of these machines.

    Raises `ValueError` for a file that is not a topology, `KeyError` for a number that neither the file nor the machine has.
    """
    data = read_file("topology", name)
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
    both = replace(machine, quantities={**machine.quantities, **given})
    for key in keys:
        if key not in both.quantities and not key.endswith("latency"):
            raise KeyError(
                f"topology {name}: {machine.name} has no {key}: add it to the file of the machine or the topology, "
                "or use another machine or topology"
            )
    return Wiring(builder, tuple(_number(both, key) for key in keys))


def _number(machine: Machine, key: str) -> float:
    if key.endswith("usable"):
        return machine.per_us(key)
    if key.endswith("latency"):
        return machine.us(key) if key in machine.quantities else 0.0
    return machine.count(key)
