"""Fused embedding + all-to-all: the paper's evaluation on a model of its machines, with records, tables and pictures.

`weft.studies.fused_embedding_model` models one operator on two nodes, and on four GPUs of one node (figures 10 to 14).
`weft.studies.dlrm_iteration` models a training iteration on 128 nodes (figure 15). `fused_embedding.toml` has the numbers
of the machines.

Source: "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.4 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from weft.bench.core.tables import Record, ResultTable, table
from weft.studies.claims import Claim, claims_table
from weft.studies.dlrm_iteration import Dlrm, ends_us
from weft.studies.fused_embedding_model import (
    SLICE,
    Order,
    Setting,
    Times,
    between_nodes,
    in_a_node,
    slice_us,
    with_message,
)
from weft.studies.numbers import Numbers, load_numbers, numbers_table
from weft.studies.pages import block, figure, head_of, last_run, where_simulated

STUDY = "fused_embedding"
BETWEEN = tuple(Setting(b, t) for b, t in ((256, 256), (512, 128), (1024, 64), (1024, 256), (4096, 64)))
"""The configurations of figure 10, as in weft's presets fused-inter. The paper shows its own only in a picture."""
WITHIN = tuple(Setting(b, t, 4) for b in (512, 1024, 2048, 4096) for t in (64, 256))
ONE = Setting(1024, 256)
"""The configuration of figures 11 and 12."""
CLAIMS_PAGE = "../reproduction.md#gpu-initiated-fine-grained-overlap-of-collective-communication-with-computation"
"""The address of the list of claims, from the study's page."""
OCCUPANCIES = (0.25, 0.5, 0.75, 0.875)
SLICES = (2, 4, 8, 16, 32, 64, 128)
ORDERS: tuple[Order, Order] = ("natural", "remote_first")
POOLINGS = (5.5, 10, 20, 35, 70)
SAMPLES, TABLES = tuple(2**i for i in range(6, 13)), tuple(2**i for i in range(7))
REAL, REAL_SMALL = (512, 7), (64, 7)
"""(samples, tables) per node, on 128 nodes. The 856 tables are from Meta's public traces of 2021
(facebookresearch/dlrm_datasets). All nodes together have 65,536 or 8,192 samples.
"""


def simulated(*, progress: Callable[[str, float], None] = lambda what, share: None) -> list[Record]:
    """Return the records of the study: one for each figure, and four further records.

    The further records are: the results for other numbers of rows per bag, the tasks of one iteration, the sensitivity
    analysis, and the results under other interpretations of the paper.
    """
    numbers = load_numbers()
    common = {
        **head_of("embedding_all_to_all", numbers.name, numbers.assumed), "study": STUDY, "dtype": "fp32",
        "ranks": numbers.count("scale.nodes"), "topology": "torus", "baseline": "serial",
    }  # fmt: skip
    makers: tuple[Callable[[Numbers], Record], ...] = (
        _between, _occupancies, _slices, _skew, _within, _poolings, _surface, _parts, _sensitivity, _readings,
    )  # fmt: skip
    found = []
    for make in makers:
        record = make(numbers)
        progress(f"fused embedding: {record['figure']}", 1 / len(makers))
        found.append({**common, "config": record["figure"], "variant": "fused", **record})
    return found


def _line(name: str, times: Times) -> list[Any]:
    return [name, times.pooling, times.exchange, times.shuffle, *times.fused, times.saved]


def _between(numbers: Numbers) -> Record:
    return {"figure": "10", "lines": [_line(one.name, between_nodes(one, numbers)) for one in BETWEEN]}


def _occupancies(numbers: Numbers) -> Record:
    us = [max(between_nodes(ONE, numbers, occupancy=of).fused) for of in OCCUPANCIES]
    return {"figure": "11", "lines": [[of, time] for of, time in zip(OCCUPANCIES, us, strict=True)]}


def _slices(numbers: Numbers) -> Record:
    return {"figure": "12", "lines": [[of, max(between_nodes(ONE, numbers, slice_size=of).fused)] for of in SLICES]}


def _skew(numbers: Numbers) -> Record:
    lines = []
    for setting in BETWEEN:
        runs = [between_nodes(setting, numbers, order=order) for order in ORDERS]
        lines.append([setting.name, *(us for run in runs for us in run.fused), *(run.skew for run in runs)])
    return {"figure": "13", "lines": lines}


def _within(numbers: Numbers) -> Record:
    return {"figure": "14", "lines": [_line(one.name, in_a_node(one, numbers)) for one in WITHIN]}


def _poolings(numbers: Numbers) -> Record:
    return {"figure": "poolings", "lines": [[of, headline(numbers.with_value("model.pooling", of))] for of in POOLINGS]}


def _surface(numbers: Numbers) -> Record:
    gains = [[Dlrm(samples, tables, numbers).gain for samples in SAMPLES] for tables in TABLES]
    real = [Dlrm(*point, numbers).gain for point in (REAL_SMALL, REAL)]
    return {"figure": "15", "samples": SAMPLES, "tables": TABLES, "gains": gains, "real": real}


def _parts(numbers: Numbers) -> Record:
    dlrm = Dlrm(*REAL, numbers)
    ends = {name: ends_us(dlrm.tasks(fused)) for name, fused in (("baseline", False), ("fused", True))}
    return {
        "figure": "iteration", "tasks": [[task.name, task.on, task.us] for task in dlrm.tasks(False)], "ends": ends,
        "exposed_us": dlrm.exposed_us,
    }  # fmt: skip


def _sensitivity(numbers: Numbers) -> Record:
    lines: list[list[Any]] = [["as it is", None, headline(numbers)]]
    for key in (*numbers.of_source("assumed", "derived"), "memory.contention"):
        for factor in (0.5, 2) if key == "scale.columns" else (0.8, 1.2):  # the number of columns must divide the nodes
            lines.append([key, factor, headline(numbers.scaled(key, factor))])
    # Another interpretation of table 2: a node's 200 Gb/s are shared by its four links.
    lines.append(["scale.bandwidth", 0.25, headline(numbers.scaled("scale.bandwidth", 0.25))])
    return {"figure": "sensitivity", "lines": lines}


def _readings(numbers: Numbers) -> Record:
    """Return a record of the model's results under other interpretations of the paper. Each line has one changed
    number, and the NIC's time per message fitted to figure 12 again.
    """
    readings = [
        ("as it is", numbers),
        (
            "memory.contention = 0: at an occupancy of 87.5% as fast as at 75%",
            numbers.with_value("memory.contention", 0.0),
        ),
    ]
    for key in ("memory.contention", "memory.share", "nic.bandwidth"):
        readings += [(_named(key, factor), numbers.scaled(key, factor)) for factor in (0.8, 1.2)]
    readings += [(f"{rows:g} rows of a bag", numbers.with_value("model.pooling", rows)) for rows in POOLINGS[:-1]]
    lines = []
    for name, changed in readings:
        again = with_message(ONE, changed)
        lines.append([name, again.us("nic.message"), *slice_us(again), headline(again)])
    return {"figure": "readings", "lines": lines}


PAPER: Mapping[str, tuple[str, str, float, float | None]] = {
    "between": ("two nodes: time saved, mean", "4.2, figure 10", 31, None),
    "between_most": ("two nodes: time saved, maximum", "4.2, figure 10", 58, None),
    "occupancy": ("time saved by an occupancy of 75% instead of 25%", "4.2, figure 11", 46, None),
    "contention": ("time added by 87.5% instead of 75% (used to derive the contention)", "4.2, figure 11", 25, None),
    "slices": (
        "slices of 64 instead of 4: time saved (used to derive the NIC's time for a message)",
        "4.2, figure 12",
        55,
        None,
    ),
    "beyond": ("slices of 128 instead of 64: time saved", "4.2, figure 12", 0, None),
    "skew": ("skew of nodes, oblivious order, mean", "4.2, figure 13", 7, None),
    "skew_first": ("skew of nodes, remote first, mean", "4.2, figure 13", 1, None),
    "within": ("zero-copy on four GPUs of a node: time saved, mean", "4.3, figure 14", 25, None),
    "within_most": ("zero-copy on four GPUs of a node: time saved, maximum", "4.3, figure 14", 35, None),
    "scale": ("training pass on 128 nodes: time saved (ours: 856 tables, 65,536 samples)", "4.4, figure 15", 10, None),
}
"""{key of `headline`: (claim, section, percent, tolerance in points)}. The paper says that the time in figure 12 "saturates beyond
64" vectors in a slice, so larger slices save 0%."""


def headline(numbers: Numbers) -> dict[str, float]:
    """Return the model's results for the claims in `PAPER`, in percent, by key of the claim."""
    between = [between_nodes(one, numbers).saved for one in BETWEEN]
    within = [in_a_node(one, numbers).saved for one in WITHIN]
    us = {of: max(between_nodes(ONE, numbers, occupancy=of).fused) for of in OCCUPANCIES}
    slices = {of: max(between_nodes(ONE, numbers, slice_size=of).fused) for of in SLICES}
    natural, first = (fmean(between_nodes(one, numbers, order=order).skew for one in BETWEEN) for order in ORDERS)
    fractions = {
        "between": fmean(between), "between_most": max(between), "occupancy": 1 - us[0.75] / us[0.25],
        "contention": us[0.875] / us[0.75] - 1, "slices": 1 - slices[64] / slices[4], "beyond": 1 - slices[128] / slices[64],
        "skew": natural, "skew_first": first, "within": fmean(within), "within_most": max(within),
        "scale": Dlrm(*REAL, numbers).gain,
    }  # fmt: skip
    return {name: 100 * value for name, value in fractions.items()}


# --- records to rows, claims, tables ---


def rows_of(records: Sequence[Record]) -> dict[str, Record]:
    """Return {figure: record} of the last run; raise `ValueError` if there are no records."""
    return {record["figure"]: record for record in _last_run(records)}


def _last_run(records: Sequence[Record]) -> list[Record]:
    return last_run(records, STUDY, "fused embedding", "fused-embedding")


def claims(rows: Mapping[str, Record]) -> list[Claim]:
    """Return the paper's claims with the model's numbers."""
    ours = rows["sensitivity"]["lines"][0][2]
    found = [Claim(what, where, paper, ours[key], "%", limit) for key, (what, where, paper, limit) in PAPER.items()]
    small, *_, large = sorted(rows["10"]["lines"], key=lambda line: int(line[0].partition("|")[0]))
    full = [line[6] - (line[2] + line[3]) / sum(line[1:4]) for line in (small, large)]
    said = f"{100 * full[0]:+.0f} points with batch|tables = {small[0]}, {100 * full[1]:+.0f} points with {large[0]}"
    what = "at small batches, fusion saves more than perfect overlap would, because one kernel replaces a kernel for each table"
    found.append(Claim(what, "4.2, figure 10", "yes", said, held=full[0] > 0 and full[0] > full[1]))
    of = rows["15"]
    flat = [gain for line in of["gains"] for gain in line]
    real = " and ".join(f"{gain:.1%}" for gain in of["real"])
    said = f"{100 * min(flat):.0f} to {100 * max(flat):.0f}%; at least 10% with {_where(of, 0.10)} (samples x tables of a node); "
    said += f"856 tables: {real} with {REAL_SMALL[0]} and {REAL[0]} samples"
    held = min(flat) <= 0.10 <= max(flat)
    found.append(
        Claim("some numbers of samples and tables give the paper's 10%", "4.4, figure 15", "10%", said, held=held)
    )
    parts = rows["iteration"]
    saved = max(parts["ends"]["baseline"].values()) - max(parts["ends"]["fused"].values())
    pooled = next(us for name, _, us in parts["tasks"] if name == "embedding")
    said = f"saved {saved / 1e3:.1f} ms of {pooled / 1e3:.1f} ms pooling, {parts['exposed_us'] / 1e3:.1f} ms exposed"
    held = 0.9 * pooled <= saved <= min(pooled, parts["exposed_us"]) + 1e-6
    found.append(Claim("most of the embedding is hidden behind the all-to-all", "4.4", "yes", said, held=held))
    return found


def _where(surface: Record, gain: float) -> str:
    """Return the smallest DLRMs for which fusion saves at least the fraction `gain` of an iteration, as text "samples x
    tables". For each number of samples, the text has the smallest number of tables per node.
    """
    found = []
    for i, samples in enumerate(surface["samples"]):
        enough = [tables for tables, line in zip(surface["tables"], surface["gains"], strict=True) if line[i] >= gain]
        if enough:
            found.append(f"{samples} x {min(enough)}")
    return ", ".join(found)


def tables(rows: Mapping[str, Record]) -> list[ResultTable]:
    numbers = load_numbers()
    return [
        claims_table("The paper's numbers and ours", claims(rows)),
        _times_table(rows["10"], f"Two nodes, slices of {SLICE} vectors, times in us (figure 10)"),
        _pairs_table(
            rows["11"], "occupancy", lambda of: f"{of:.1%}", "Occupancy of the fused kernel, batch 1024, 256 tables (figure 11)"
        ),
        _pairs_table(rows["12"], "vectors of a slice", str, "Size of slices, batch 1024, 256 tables (figure 12)"),
        _skew_table(rows["13"]),
        _times_table(rows["14"], "Zero-copy on four GPUs of a node, a kernel for each table, times in us (figure 14)"),
        _headlines_table(rows["poolings"]["lines"], "rows of a bag", "The paper's results with other numbers of rows of a bag"),
        _surface_table(rows["15"]),
        _iteration_table(rows["iteration"]),
        _headlines_table(
            [[_named(key, factor), ours] for key, factor, ours in rows["sensitivity"]["lines"]], "number",
            "The paper's results with one assumed or derived number changed. Last change: a node's four links share 200 Gb/s",
        ),
        _readings_table(rows["readings"]),
        numbers_table("The numbers of the machines: from the paper (tables 1 and 2), or assumed", numbers),
    ]  # fmt: skip


def _named(key: str, factor: float | None) -> str:
    return key if factor is None else f"{key} x {factor:g}"


def _times_table(record: Record, title: str) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "batch \\| tables": lambda line: line[0].replace("|", " | "),
        "pooling": lambda line: f"{line[1]:.0f}",
        "all-to-all": lambda line: f"{line[2]:.0f}",
        "shuffle": lambda line: f"{line[3]:.0f}",
        "fused": lambda line: f"{max(line[4:-1]):.0f}",
        "saved": lambda line: f"{line[-1]:.0%}",
    }
    mean = {"batch \\| tables": "mean", "saved": f"{fmean(line[-1] for line in record['lines']):.0%}"}
    made = table(title, record["lines"], columns, [mean])
    return made._replace(columns=("batch | tables", *made.columns[1:]))


def _pairs_table(record: Record, what: str, form: Callable[[Any], str], title: str) -> ResultTable:
    most = max(us for _, us in record["lines"])
    columns: dict[str, Callable[[Any], str]] = {
        what: lambda line: form(line[0]),
        "us": lambda line: f"{line[1]:.0f}",
        "share of the longest time": lambda line: f"{line[1] / most:.0%}",
    }
    return table(title, record["lines"], columns)


def _skew_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "batch, tables": lambda line: line[0],
        "oblivious: node 0 us": lambda line: f"{line[1]:.0f}",
        "oblivious: node 1 us": lambda line: f"{line[2]:.0f}",
        "oblivious: skew": lambda line: f"{line[5]:.1%}",
        "remote first: node 0 us": lambda line: f"{line[3]:.0f}",
        "remote first: node 1 us": lambda line: f"{line[4]:.0f}",
        "remote first: skew": lambda line: f"{line[6]:.1%}",
    }
    return table("Skew of two nodes by the order of slices (figure 13)", record["lines"], columns)


def _headlines_table(lines: Sequence[Any], what: str, title: str) -> ResultTable:
    shown = {
        "two nodes: saved, mean": "between", "two nodes: saved, most": "between_most", "75% occupancy: saved": "occupancy",
        "slices of 64: saved": "slices", "skew, oblivious": "skew", "skew, remote first": "skew_first",
        "four GPUs: saved, mean": "within", "four GPUs: saved, most": "within_most", "128 nodes: saved": "scale",
    }  # fmt: skip
    columns: dict[str, Callable[[Any], str]] = {what: lambda line: str(line[0])}
    for name, key in shown.items():
        columns[name] = lambda line, key=key: f"{line[1][key]:.0f}%"  # type: ignore[misc]
    papers = {name: f"{PAPER[key][2]:.0f}%" for name, key in shown.items()}
    return table(title, lines, columns, [{what: "paper's", **papers}])


def _readings_table(record: Record) -> ResultTable:
    shown = {
        "skew, oblivious": "skew",
        "skew, remote first": "skew_first",
        "two nodes: saved, mean": "between",
        "two nodes: saved, most": "between_most",
        "75% occupancy: saved": "occupancy",
    }
    columns: dict[str, Callable[[Any], str]] = {
        "change": lambda line: line[0],
        "nic.message us": lambda line: f"{line[1]:.2f}",
        "p: pooling a slice, us": lambda line: f"{line[2]:.2f}",
        "n: a slice in the NIC, us": lambda line: f"{line[3]:.2f}",
    }
    for name, key in shown.items():
        columns[name] = lambda line, key=key: f"{line[4][key]:.0f}%"  # type: ignore[misc]
    papers = {name: f"{PAPER[key][2]:.0f}%" for name, key in shown.items()}
    title = "Influences on skew (figure 13). Each change derives nic.message from figure 12 again"
    return table(title, record["lines"], columns, [{"change": "paper's", **papers}])


def _surface_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {"tables of a node": lambda line: str(line[0])}
    for i, samples in enumerate(record["samples"]):
        columns[f"{samples} samples"] = lambda line, i=i: f"{line[1][i]:.1%}"  # type: ignore[misc]
    title = "Time saved in a training pass on 128 nodes, by samples and tables of a node (figure 15; the paper's mean is 10%)"
    return table(title, list(zip(record["tables"], record["gains"], strict=True)), columns)


def _iteration_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "task": lambda task: task[0],
        "on": lambda task: task[1],
        "us": lambda task: f"{task[2]:.0f}",
        "ends, baseline": lambda task: f"{record['ends']['baseline'][task[0]]:.0f}",
        "ends, fused": lambda task: f"{record['ends']['fused'][task[0]]:.0f}",
    }
    return table(
        f"An iteration with {REAL[0]} samples and {REAL[1]} tables on each of 128 nodes, us", record["tasks"], columns
    )


def conclusions(rows: Mapping[str, Record]) -> list[str]:
    """Return sentences for the report: how many claims are reproduced, and which assumption the mean results depend on."""
    found = claims(rows)
    met = [claim.what for claim in found if claim.reproduced]
    said = f"{len(met)} of {len(found)} of the paper's claims are reproduced ([list]({CLAIMS_PAGE}))."
    return [f"{said} {_poolings_say(rows['poolings'])}"]


def _poolings_say(record: Record) -> str:
    keys = ("between", "within")
    off = {rows: max(abs(ours[key] - PAPER[key][2]) for key in keys) for rows, ours in record["lines"]}
    best = min(off, key=lambda rows: off[rows])
    return (
        f"The means of figures 10 and 14 depend on the rows of a bag. With {best:g} rows both means are within {off[best]:.0f} "
        f"points of the paper's. With the {POOLINGS[-1]:g} rows of the paper's table 2 they are up to "
        f"{off[POOLINGS[-1]]:.0f} points off."
    )


def notes(records: Sequence[Record]) -> list[str]:
    last = _last_run(records)[-1]
    gpu = last["machine"]
    of = f"{gpu}, two nodes with a GPU each, a node with four GPUs, and {last['ranks']} nodes with a GPU each, {last['dtype']}"
    return [where_simulated(last, of)]


def markdown(records: Sequence[Record]) -> str:
    """Return the generated part of the report, as Markdown."""
    rows = rows_of(records)
    return block(notes(records), tables(rows)[1:], conclusions(rows))  # docs/reproduction.md has the claims


def draw(directory: Path, rows: Mapping[str, Record], title: str) -> list[Path]:
    """Write four PNG files into `directory`, created if needed. title: a description of the run.

    The pictures show times over occupancy (figure 11), times over the size of slices (figure 12), and the skew between nodes
    (figure 13). The fourth shows the fraction of an iteration that fusion saves, by samples and tables (figure 15).
    """
    paths = [directory / "figure-12-slices.png", directory / "figure-15-surface.png"]
    with figure(paths[0], f"{title} (figures 11, 12, 13)", (9, 9), 3) as (occupancy, slices, skew):
        for axis, name, form in ((occupancy, "11", "occupancy"), (slices, "12", "vectors of a slice")):
            axis.plot(*zip(*rows[name]["lines"], strict=True), "o-", color="#4063a3", label="fused kernel, 1024|256")
            axis.set_xlabel(form, fontsize=9)
            axis.set_ylabel("us", fontsize=9)
            axis.set_ylim(bottom=0)
        slices.set_xscale("log", base=2)
        slices.xaxis.set_major_formatter("{x:g}")
        lines = rows["13"]["lines"]
        for shift, column, name, colour in ((-0.2, 5, "oblivious", "#b8432f"), (0.2, 6, "remote first", "#2f7d5b")):
            at = [i + shift for i in range(len(lines))]
            skew.bar(at, [100 * line[column] for line in lines], 0.36, color=colour, label=name)
        skew.set_xticks(range(len(lines)), [line[0] for line in lines], fontsize=8)
        skew.set_ylabel("skew of nodes, %", fontsize=9)
    with figure(paths[1], f"{title} (figure 15)", (9, 4.5)) as (axis,):
        of = rows["15"]
        for tables_of, line in zip(of["tables"], of["gains"], strict=True):
            axis.plot(of["samples"], [100 * gain for gain in line], "o-", markersize=3, label=f"{tables_of} tables")
        axis.axhline(10, color="black", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("samples of a node", fontsize=9)
        axis.set_ylabel("shorter training pass, %; dotted: the paper's mean", fontsize=9)
    return paths
