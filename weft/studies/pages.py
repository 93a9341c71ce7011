"""What the studies of the papers have in common: the head of a simulated record, tables, a page's block, and what it rests on."""

from __future__ import annotations

import datetime
import platform
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import weft
from weft.bench.core.tables import Record, markdown_table
from weft.bench.provenance import provenance
from weft.hw import Machine
from weft.hw.machine import Quantity
from weft.hw.topology import load_topology
from weft.sim import Model, model_of


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    cells: list[tuple[str, ...]]


def head(op: str, machine: Machine, ranks: int, topology: str | None) -> Record:
    """The fields that all records of one simulated run have."""
    code, quantities = provenance(), list[Quantity](machine[key] for key in machine)
    return {
        "op": op, "mode": "queued", "device": "simulated", "dtype": "bf16", "ranks": ranks, "machine": machine.name,
        "topology": topology or machine.topology, "baseline": "serial", "run": uuid.uuid4().hex[:12], "commit": code.commit,
        "assumed": [sum(one.source == "assumed" for one in quantities), len(quantities)], "source": code.source,
        "versions": {"weft": weft.__version__, "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip


def model_for(machine: Machine, ranks: int, topology: str | None) -> Model:
    """`ValueError` for a topology that is not known, or not made for so many ranks."""
    model = model_of(machine, ranks)
    if topology is not None:
        model = replace(model, wiring=load_topology(topology, machine))
    model.wiring.of(ranks)
    return model


def where(last: Record, ranks: str = "") -> str:
    """What the numbers rest on, in sentences. ranks: how many, where records differ in it."""
    at, of = f"commit {last['commit']}, {last['date'][:10]}", ranks or str(last["ranks"])
    if last["device"] != "simulated":
        return f"Measured on {last['machine']}, {of} ranks, {last['dtype']}, queued; {at}."
    assumed, known = last["assumed"]
    return (
        f"Simulated: {of} x {last['machine']}, linked as a {last['topology']}, {last['dtype']}, queued; {at}. Nothing was measured "
        f"for this. Of the {known} numbers in the machine's file {assumed} are assumed."
    )


def block(first: Sequence[str], tables: Sequence[Table], last: Sequence[str] = ()) -> str:
    """A page's, between its markers."""
    parts = [*first]
    for table in tables:
        parts += [f"**{table.title}**", markdown_table(table.columns, table.cells)]
    return "\n\n".join([*parts, *last]) + "\n"
