"""Helpers of all studies: fields of simulated records, pictures, generated parts of reports, and sentences on where
numbers come from.
"""

from __future__ import annotations

import datetime
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import weft
from weft.bench.core.tables import Record, ResultTable, markdown_table
from weft.bench.provenance import provenance
from weft.hw import Machine
from weft.hw.machine import Quantity
from weft.hw.topology import load_topology
from weft.sim import Model, model_of
from weft.trace.pyplot import pyplot


@contextmanager
def figure(path: Path, title: str, size: tuple[float, float], panels: int = 1) -> Iterator[Any]:
    """Context manager: yield a list of axes, one for each of `panels` stacked panels, and then write the picture to the
    PNG file `path`. Create its folder if needed.

    size: (width, height) in inches. The labels of logarithmic axes get the suffix "logarithmic axis".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    plt = pyplot()
    drawn, axes = plt.subplots(panels, 1, figsize=size, layout="constrained", squeeze=False)
    yield axes[:, 0]
    for axis in axes[:, 0]:
        for of in (axis.xaxis, axis.yaxis):
            if of.get_scale() == "log":
                of.set_label_text(f"{of.get_label_text()}, logarithmic axis")
        axis.legend(fontsize=8, ncol=6, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.1)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    drawn.suptitle(title, fontsize=9, x=0.01, ha="left")
    drawn.savefig(path, dpi=130)
    plt.close(drawn)


def bars(
    axis: Any, labels: Sequence[str], groups: Mapping[str, Sequence[float]], colours: Sequence[str], base: float = 0.0
) -> list[Any]:
    """Draw grouped bars, and a line at 1. Return the bars of each group.

    groups: {name in the legend: heights of the bars}, with one height for each label.
    base: the height at which bars begin.
    """
    width, drawn = 0.8 / len(groups), []
    for i, ((name, heights), colour) in enumerate(zip(groups.items(), colours, strict=False)):
        places = np.arange(len(labels)) + (i - (len(groups) - 1) / 2) * width
        drawn.append(axis.bar(places, np.array(heights) - base, 0.95 * width, bottom=base, color=colour, label=name))
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(labels)), labels, fontsize=8)
    axis.margins(x=0.01)
    return drawn


def head(op: str, machine: Machine, ranks: int, topology: str | None) -> Record:
    """Return the fields that all records of one simulated run of operator `op` have."""
    quantities = list[Quantity](machine[key] for key in machine)
    return {
        **head_of(op, machine.name, [sum(one.source == "assumed" for one in quantities), len(quantities)]),
        "dtype": "bf16", "ranks": ranks, "topology": topology or machine.topology, "baseline": "serial",
    }  # fmt: skip


def head_of(op: str, machine: str, assumed: Sequence[int]) -> Record:
    """Return the fields that all records of simulated runs have, with or without a machine file.

    machine: a description of the machine.
    assumed: a list of two counts: how many of the model's numbers are assumed, and how many numbers it has.
    """
    code = provenance()
    return {
        "op": op, "mode": "queued", "device": "simulated", "machine": machine, "run": uuid.uuid4().hex[:12],
        "commit": code.commit, "assumed": list(assumed), "source": code.source,
        "versions": {"weft": weft.__version__, "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip


def scaled(machine: Machine, key: str, factor: float) -> Machine:
    """Return the machine with number `key` multiplied by `factor`. Counts of 4 or more are rounded to integers."""
    one = machine[key]
    value = one.value * factor
    whole = one.unit == "1" and one.value >= 4 and one.value == int(one.value)
    changed = replace(one, value=float(round(value)) if whole else value)
    return replace(machine, quantities={**machine.quantities, key: changed})


def model_for(machine: Machine, ranks: int, topology: str | None) -> Model:
    """Return the simulator's model of `ranks` GPUs of a machine.

    topology: the name of a topology to use instead of the machine's own.

    Raise `ValueError` for an unknown topology, an unsupported number of ranks, or a number that the machine file lacks.
    """
    try:
        model = model_of(machine, ranks)
        if topology is not None:
            model = replace(model, wiring=load_topology(topology, machine))
    except KeyError as error:
        raise ValueError(error.args[0]) from error
    model.wiring.of(ranks)
    return model


def last_run(records: Sequence[Record], study: str, what: str, command: str) -> list[Record]:
    """Return the records of the last run of `study`. Raise `ValueError` if there are none.

    what, command: the study's subject and its name in `weft reproduce`, for the error text.
    """
    mine = [record for record in records if record.get("study") == study]
    if not mine:
        raise ValueError(f"no records of {what}: run weft reproduce {command} --json FILE")
    return [record for record in mine if record["run"] == mine[-1]["run"]]


def where(last: Record, ranks: str = "") -> str:
    """Return sentences for the report on how its numbers were obtained.

    last: a record of the run.
    ranks: the numbers of ranks as text, if records differ in them.
    """
    at, of = f"commit {last['commit']}, {last['date'][:10]}", ranks or str(last["ranks"])
    if last["device"] != "simulated":
        return f"Measured on {last['machine']}, {of} ranks, {last['dtype']}, queued; {at}."
    return where_simulated(last, f"{of} x {last['machine']}, linked as a {last['topology']}, {last['dtype']}, queued")


def where_simulated(last: Record, of: str, more: str = "") -> str:
    """Return sentences for the report on how its numbers were simulated.

    of: a text that names the machines and the dtype.
    more: text to append about assumed numbers.
    """
    assumed, known = last["assumed"]
    return (
        f"Simulated: {of}; commit {last['commit']}, {last['date'][:10]}. Nothing was measured for this. {assumed} of the {known} "
        f"numbers in the machine's file {'is' if assumed == 1 else 'are'} assumed{more}."
    )


def block(first: Sequence[str], tables: Sequence[ResultTable], last: Sequence[str] = ()) -> str:
    """Return the generated part of a report, as Markdown: the paragraphs `first`, the tables with their titles, and the
    paragraphs `last`.
    """
    parts = [*first]
    for table in tables:
        parts += [f"**{table.title}**", markdown_table(table.columns, table.cells)]
    return "\n\n".join([*parts, *last]) + "\n"
