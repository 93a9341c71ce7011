"""T3's sub-layers: the GEMMs of Transformers before the reductions of tensor parallelism, in software on existing
hardware.

A sub-layer is a GEMM [tokens, k] @ [k, hidden] on each rank, its reduce-scatter, and the all-gather of the sum:

    OP    forward, the attention's output projection     k = hidden / ranks
    FC-2  forward, the MLP's second layer                k = 4 hidden / ranks
    FC-1  backward, the gradient of the MLP's input      k = 4 hidden / ranks
    IP    backward, the gradient of the attention's      k = 3 hidden / ranks
          input projection's input

By default all GEMMs are in bf16, and FC-1 and IP have the weight layout of the forward pass. The paper's GEMMs are in
FP16, with weights that are not transposed; measurements can also have this dtype and layout.

`simulated` predicts times from the model of a machine, for the schedule that weft's planner selects. `weft bench
matmul_reduce_scatter --preset t3` measures them, without the all-gather. Both kinds of records become the same tables:
the times of GEMM, reduce-scatter and all-gather, the speedup (figures 15, 16), and the memory traffic of a GPU (figure
18).

T3 has a hardware tracker that triggers copies, and memory that adds received values to its contents (near-memory
compute). In weft's software, GEMM tiles set signals, streams wait for the signals before they copy, and kernels add
received values. So kernels must read partial sums again, which T3's memory would add in place.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 5, 6.1, 6.2, 6.4 and
table 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from weft.bench.core.records import last_runs
from weft.bench.core.tables import Record, ResultTable, geomean, milliseconds, table, times
from weft.builders import MatmulReduceScatter, named
from weft.hw import file_of, load_machine
from weft.plan.choose import decide
from weft.schedule import Draft
from weft.sim import Model, simulate
from weft.sim.losses import gemms_us
from weft.sim.traffic import traffic
from weft.studies.claims import Claim
from weft.studies.pages import bars, block, figure, head, model_for, where
from weft.words import counted

OP = "matmul_reduce_scatter"
LAYERS = {"OP": 1, "FC-2": 4, "FC-1": 4, "IP": 3}
"""{layer: k * ranks / hidden}"""
BACKWARD = ("FC-1", "IP")


class Network(NamedTuple):
    """A Transformer of the paper's table 2.

    tokens: the number of tokens in a batch.
    ranks: the degrees of tensor parallelism.
    large: True for the networks of section 6.4.
    """

    name: str
    hidden: int
    tokens: int
    ranks: tuple[int, ...]
    large: bool = False


NETWORKS = (
    Network("Mega-GPT-2", 3072, 16 * 1024, (8, 16)), Network("T-NLG", 4256, 8 * 1024, (8, 16)),
    Network("GPT-3", 12288, 2 * 1024, (32,), True), Network("PALM", 18432, 2 * 1024, (32,), True),
    Network("MT-NLG", 20480, 2 * 1024, (32,), True),
)  # fmt: skip
"""The networks of table 2. 12K, 18K and 20K are interpreted as multiples of 1024."""

PAPER = (
    "The paper simulates its hardware. Its speedups over serial, as geometric mean and maximum, are 20% and 39% for T3, 30% and "
    "47% for T3-MCA, and 35% and 50% for an ideal overlap (section 6.1). On GPT-3, PALM and MT-NLG the speedups of T3-MCA are 29% "
    "and 35% (section 6.4). In the paper, memory traffic, including the all-gather, falls by 22% on average and by 36% at most "
    "(section 6.2)."
)
"""The numbers in the paper's text. Other numbers of figures 15 to 20 are only in pictures."""


_ABOVE = (
    "The ideal assumes NCCL's reduce-scatter. weft sends each part directly to its owner, which is faster. So weft can be "
    "faster than this ideal."
)


@dataclass(frozen=True)
class SublayerRow:
    """The results of one sub-layer.

    problem: the sizes of the sub-layer.
    chosen: the schedule that weft selected; `weft_ms` is its time.
    gather_ms: the time of the all-gather in ms; 0 if not recorded.
    moved: the computed memory traffic of serial and of `chosen`, a pair of dicts {kind of access: bytes}; None for machines
        without a file.
    pinned: the times of pinned schedules in ms, by schedule.
    row_major: True if the weight is not transposed, as in the backward pass.
    """

    network: Network
    layer: str
    problem: MatmulReduceScatter
    chosen: str
    serial_ms: float
    weft_ms: float
    gemm_ms: float
    scatter_ms: float
    gather_ms: float
    moved: tuple[Mapping[str, float], Mapping[str, float]] | None
    asynctp_ms: float | None = None
    pinned: Mapping[str, float] = field(default_factory=dict)
    row_major: bool = False

    @property
    def name(self) -> str:
        return f"{self.network.name} {self.layer}, {self.problem.world_size} ranks"

    def fastest(self, *begins: str) -> tuple[float, str] | None:
        """Return (milliseconds, name) of the fastest pinned schedule whose name begins with one of `begins`; None if
        there is none.
        """
        return min(((ms, name) for name, ms in self.pinned.items() if name.startswith(begins)), default=None)

    @property
    def ideal(self) -> float:
        """The speedup over serial of a sub-layer whose GEMM and reduce-scatter overlap perfectly."""
        together = max(self.gemm_ms, self.scatter_ms) + self.gather_ms
        return (self.serial_ms + self.gather_ms) / together

    @property
    def speedup(self) -> float:
        return (self.serial_ms + self.gather_ms) / (self.weft_ms + self.gather_ms)

    @property
    def less_moved(self) -> float | None:
        """The fraction of serial's memory traffic that the selected schedule saves, without the all-gather; None if unknown."""
        return 1 - sum(self.moved[1].values()) / sum(self.moved[0].values()) if self.moved else None


def problems(network: Network, ranks: int) -> Iterator[tuple[str, MatmulReduceScatter]]:
    tokens, hidden = network.tokens, network.hidden
    for layer, factor in LAYERS.items():
        yield layer, MatmulReduceScatter(ranks, tokens, hidden, factor * hidden // ranks, "bf16")


def simulated(
    hw: str,
    topology: str | None = None,
    networks: Sequence[Network] | None = None,
    *,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> list[Record]:
    """Return two records for each sub-layer: the predicted time of serial, and of the schedule that the planner
    selects.

    progress: called with the name of the next sub-layer, and the fraction of the work done since the last call. Raises
    `ValueError` for an unknown machine or topology.
    """
    machine, found = load_machine(hw), list[Record]()
    chosen = networks or NETWORKS
    share = 1 / (len(LAYERS) * sum(len(network.ranks) for network in chosen))
    for network in chosen:
        for ranks in network.ranks:
            model, common = model_for(machine, ranks, topology), head(OP, machine, ranks, topology)
            for layer, p in problems(network, ranks):
                progress(f"simulating {network.name} {layer}, {ranks} ranks", share if found else 0.0)
                choice = decide(p, model, mode="queued")  # this models another machine: no warnings, no pinned schedule
                of_layer = {
                    "config": f"{p.m}x{p.n}x{p.k}", "m": p.m, "n": p.n, "k": p.k, "gemm_ms": gemms_us(p, model) / 1e3,
                    "collective_ms": _alone_ms(p, model, "reduce_scatter"), "gather_ms": _alone_ms(p, model, "all_gather"),
                    "layer": layer, "network": network.name,
                }  # fmt: skip
                taken_us = {
                    ("serial", "serial"): choice.row("serial").us,
                    ("weft", choice.candidate.name): choice.predicted_us,
                }
                for (variant, taken), us in taken_us.items():
                    assert us is not None
                    found.append({**common, **of_layer, "variant": variant, "p50_ms": us / 1e3, "chosen": taken})
    return found


def _alone_ms(p: MatmulReduceScatter, model: Model, op: Literal["reduce_scatter", "all_gather"]) -> float:
    """Return the predicted time in ms of NCCL's collective `op` on the GEMM's output [m, n], per call in a series of calls."""
    d = Draft(op, p.world_size)
    whole, part = d.buffer("whole", p.m, p.n, p.dtype, "scratch"), d.buffer("part", p.rows, p.n, p.dtype, "scratch")
    lane = d.lane("compute")
    if op == "reduce_scatter":
        lane.reduce_scatter(whole.part(), part.part())
    else:
        lane.all_gather(part.part(), whole.part())
    return simulate(d.schedule(), model, runs=2).per_run_us / 1e3


def rows_of(records: Sequence[Record]) -> list[SublayerRow]:
    """Return a row for each sub-layer, from its last run. Raise `ValueError` if there are none."""
    mine = [r for r in records if r["op"] == OP and r["mode"] == "queued" and _names(r)]
    if not mine:
        raise ValueError(f"no records of T3's sub-layers: run weft bench {OP} --preset t3 --mode queued --json FILE")
    rows = []
    for same in last_runs(
        mine, lambda r: (r["config"], r["dtype"], r["ranks"], r.get("layer"), r.get("network"))
    ).values():
        by = {r["variant"]: r for r in same}
        if missing := sorted({"serial", "weft"} - by.keys()):
            raise ValueError(
                f"{same[0]['config']} lacks the time of {' and of '.join(missing)}: run weft bench {OP} --preset t3 "
                "--variants weft --mode queued --json FILE"
            )
        one = by["weft"]
        p = MatmulReduceScatter(one["ranks"], one["m"], one["n"], one["k"], one["dtype"])
        rows.append(SublayerRow(
            *_names(one)[0], p, one["chosen"], by["serial"]["p50_ms"], one["p50_ms"], one["gemm_ms"], one["collective_ms"],
            one.get("gather_ms") or 0.0, _moved(p, one["chosen"], one["machine"]),
            by["asynctp"]["p50_ms"] if "asynctp" in by else None,
            {name: r["p50_ms"] for name, r in by.items() if name not in ("serial", "weft", "asynctp")}, _row_major(one),
        ))  # fmt: skip
    return rows


def _names(record: Record) -> list[tuple[Network, str]]:
    """Return the (network, layer) pairs that a record names. If it names none, return all pairs with the sizes of the record.

    Layers of equal sizes are one pair, such as (network, "FC-1, FC-2").
    """
    if "layer" in record:
        return [(next(n for n in NETWORKS if n.name == record["network"]), record["layer"])]
    sizes, found = (record["m"], record["n"], record["k"]), []
    for network in NETWORKS:
        same = [layer for layer, p in problems(network, record["ranks"]) if (p.m, p.n, p.k) == sizes]
        same = [layer for layer in same if layer in BACKWARD or not _row_major(record)]
        found += [(network, ", ".join(same))] * bool(same)
    return found


def _row_major(record: Record) -> bool:
    return record["config"].endswith("-rowmajor")


@cache  # a report and its documents show the same records
def _moved(p: MatmulReduceScatter, chosen: str, machine: str) -> tuple[dict[str, float], dict[str, float]] | None:
    file = file_of(machine.rpartition(" x ")[2])
    if file is None:
        return None
    model = model_for(load_machine(file), p.world_size, None)
    serial, mine = (traffic(named(p, name).build(), model) for name in ("serial", chosen))
    return serial, mine


def tables(rows: Sequence[SublayerRow]) -> list[ResultTable]:
    """Return a table of speedups for each combination of dtype and weight layout, and for the first combination a table
    of computed memory traffic.
    """
    kinds = list(dict.fromkeys((row.problem.dtype, row.row_major) for row in rows))
    parts = [[row for row in rows if (row.problem.dtype, row.row_major) == kind] for kind in kinds]
    titles = [
        ", ".join([dtype, *(["weights not transposed, as in backward"] if row_major else [])])
        for dtype, row_major in kinds
    ]
    speeds = [_speedups(part, f": {title}" * (len(kinds) > 1)) for part, title in zip(parts, titles, strict=True)]
    return [*speeds, *([_moves(parts[0])] if all(row.moved for row in parts[0]) else [])]


def _speedups(rows: Sequence[SublayerRow], which: str = "") -> ResultTable:
    def pinned(part: int, *begins: str) -> Callable[[SublayerRow], str]:
        def cell(row: SublayerRow) -> str:
            found = row.fastest(*begins)
            return "" if found is None else milliseconds(found[0]) if part == 0 else found[1]

        return cell

    columns: dict[str, Callable[[SublayerRow], str]] = {
        "sub-layer": lambda row: row.name,
        "M x N x K": lambda row: f"{row.problem.m} x {row.problem.n} x {row.problem.k}",
        "GEMM ms": lambda row: milliseconds(row.gemm_ms),
        "reduce-scatter ms": lambda row: milliseconds(row.scatter_ms),
        "all-gather ms": lambda row: milliseconds(row.gather_ms or None),
        "serial ms": lambda row: milliseconds(row.serial_ms),
        "asynctp ms": lambda row: milliseconds(row.asynctp_ms),
        "weft ms": lambda row: milliseconds(row.weft_ms),
        "schedule": lambda row: row.chosen,
        **{
            title: pinned(part, *begins)
            for title, part, begins in (
                ("tracked ms", 0, ("tracked",)), ("fastest tracked", 1, ("tracked",)), ("mapped ms", 0, ("direct",)),
                ("fastest output map with a GEMM per chunk", 1, ("direct",)),
            )
        },
        "ideal": lambda row: f"{row.ideal:.2f}x",
        "speedup": lambda row: f"{row.speedup:.2f}x",
    }  # fmt: skip
    last = []
    for title, large in (("Mega-GPT-2 and T-NLG", False), ("GPT-3, PALM and MT-NLG", True)):
        some = [row for row in rows if row.network.large == large]
        for what, of in (("geometric mean", geomean), ("maximum", max)):
            if some:
                ideal, speedup = (times(of([getattr(row, name) for row in some])) for name in ("ideal", "speedup"))
                last.append({"sub-layer": f"{title}: {what}", "ideal": ideal, "speedup": speedup})
    title = f"Speedup over serial of a sub-layer{which} (figures 15 and 16: Mega-GPT-2 and T-NLG)"
    return table(title, rows, columns, last)


_KINDS = {
    "matmul": "GEMM", "peer": "collective, copies to peers", "engine": "local copies (copy engine)", "compute": "sums",
}  # fmt: skip


def _moves(rows: Sequence[SublayerRow]) -> ResultTable:
    columns, cells = ["sub-layer"], [[row.name for row in rows]]
    for which, title in enumerate(("serial", "weft")):
        moved = [row.moved[which] for row in rows if row.moved]
        kinds = [kind for kind in _KINDS if any(kind in of for of in moved)]
        columns += [f"{title}: all", *(f"{title}: {_KINDS[kind]}" for kind in kinds)]
        cells.append([f"{sum(of.values()) / 1e6:.0f}" for of in moved])
        cells += [[f"{of.get(kind, 0.0) / 1e6:.0f}" for of in moved] for kind in kinds]
    cells.append([f"{row.less_moved:.0%}" for row in rows])
    title = "MB through a GPU's memory for GEMM and reduce-scatter, computed (figure 18: Mega-GPT-2 and T-NLG)"
    return ResultTable(title, (*columns, "saved by weft"), [*zip(*cells, strict=True)])


def notes(records: Sequence[Record]) -> list[str]:
    """Return sentences for the report on how its numbers were obtained."""
    mine = [r for r in records if r["op"] == OP and r["mode"] == "queued" and _names(r)]
    ranks = sorted({r["ranks"] for r in mine})
    last = mine[-1] | {"dtype": " or ".join(dict.fromkeys(r["dtype"] for r in mine))}
    said = where(last, " or ".join([", ".join(map(str, ranks[:-1])), str(ranks[-1])]) if len(ranks) > 1 else "")
    if mine[-1]["device"] != "simulated":
        said += (
            " Times, speedups and ideals in these tables leave out the all-gather after the reduce-scatter. The paper's speedups "
            "include its time."
        )
    return [said]


def conclusions(rows: Sequence[SublayerRow]) -> list[str]:
    """Return sentences for the report: which schedules weft selected, how many sub-layers are faster than the ideal,
    and what the paper reports.
    """
    taken = [row.chosen.split("[")[0] for row in rows]
    count = ", ".join(f"{name} for {taken.count(name)}" for name in dict.fromkeys(taken))
    said = [f"weft's choices for {counted(len(rows), 'sub-layer')}: {count}."]
    if above := sum(row.speedup > row.ideal for row in rows):
        said.append(f"{above} of the sub-layers are faster than the ideal. {_ABOVE}")
    said += _pinned(rows)
    return [*said, PAPER, *_moves_say(rows)]


def _moves_say(rows: Sequence[SublayerRow]) -> list[str]:
    """Return one sentence, as a list, on how much weft's schedules change memory traffic; empty if the traffic is unknown."""
    first = (rows[0].problem.dtype, rows[0].row_major)
    saved = [row.less_moved for row in rows if (row.problem.dtype, row.row_major) == first]
    more = [-share for share in saved if share is not None]
    if len(more) < len(saved):
        return []

    mean, least, most = (f"{round(share, 2) + 0.0:+.0%}" for share in (sum(more) / len(more), min(more), max(more)))
    return [
        f"In software, weft's choices change the bytes through memory by {mean} on average relative to serial, and by {least} to "
        f"{most} (the last table)."
    ]


def _pinned(rows: Sequence[SublayerRow]) -> list[str]:
    """Return sentences on two kinds of pinned schedules: GEMMs whose tiles signal copies ("tracked"), and GEMMs in
    chunks that are stored directly at their owners ("direct").
    """
    found, first = [], (rows[0].problem.dtype, rows[0].row_major)
    mine = [row for row in rows if (row.problem.dtype, row.row_major) == first]
    for title, begin in (("Tracked GEMMs", "tracked"), ("Output maps with a GEMM for each chunk", "direct")):
        gains = [(row.serial_ms / best[0], row.weft_ms / best[0]) for row in mine if (best := row.fastest(begin))]
        if gains:
            serial, weft = (geomean(of) for of in zip(*gains, strict=True))
            speeds = f"{times(serial)} the speed of serial, and {times(weft)} the speed of weft's choice"
            found.append(f"{title} have {speeds} (means of the first table).")
    return found


def claims(rows: Sequence[SublayerRow]) -> list[Claim]:
    """Return the paper's claims on the speedups of Mega-GPT-2 and T-NLG (6.1), with the results of software on two
    GPUs. Claims without records are left out.
    """
    mine = [row for row in rows if not row.network.large and row.problem.dtype == "bf16" and not row.row_major]
    tracked = [row.serial_ms / best[0] for row in mine if (best := row.fastest("tracked"))]
    gains: tuple[tuple[str, str, float, Sequence[float]], ...] = (
        ("tracked GEMMs in software", "6.1.2", 20, tracked),
        ("weft's choice", "6.1.2", 20, [row.speedup for row in mine]),
        ("the ideal", "6.1.1", 35, [row.ideal for row in mine]),
    )
    return [
        Claim(f"speedup of {what} on 2 GPUs, geometric mean", where, paper, 100 * (mean - 1), "%")
        for what, where, paper, of in gains
        if (mean := geomean(of)) is not None
    ]


def markdown(records: Sequence[Record]) -> str:
    """Return the generated part of the report, as Markdown."""
    rows = rows_of(records)
    return block(notes(records), tables(rows), [" ".join(conclusions(rows))])


def draw(directory: Path, rows: Sequence[SublayerRow], title: str) -> list[Path]:
    """Write a picture of the sub-layers' speedups (figure 16) as a PNG file into `directory`, created if needed."""
    path = directory / "figure-16-speedups.png"
    ideal = "ideal: the longer of GEMM and NCCL's reduce-scatter, then the all-gather"
    heights = {ideal: [row.ideal for row in rows], "weft": [row.speedup for row in rows]}
    if any(row.speedup > row.ideal for row in rows):
        title += f"\n{_ABOVE}"
    with figure(path, title, (12, 4)) as (axis,):
        names = [row.name for row in rows]
        bars(axis, names, heights, ("#bbbbbb", "#4063a3"))
        axis.set_xticks(range(len(names)), names, fontsize=7, rotation=45, ha="right")
        axis.set_ylabel("speedup over serial", fontsize=9)
    return [path]
