"""T3's sub-layers: the GEMMs of Transformers behind which tensor parallelism adds up, in software on what there is.

A sub-layer is a GEMM [tokens, k] @ [k, hidden] on each rank, its reduce-scatter, and the all-gather of the sum:

    OP    forward, the attention's output projection     k = hidden / ranks
    FC-2  forward, the MLP's second layer                k = 4 hidden / ranks
    FC-1  backward, the gradient of the MLP's input      k = 4 hidden / ranks
    IP    backward, the gradient of the attention's      k = 3 hidden / ranks

`simulated` makes the records of a machine's model: the schedule that weft's planner takes, for the paper's models and numbers of
ranks. `weft bench matmul_reduce_scatter --preset t3` makes those of a machine that is there, without the all-gather. From either
come the same tables:

    figures 15, 16   what GEMM, reduce-scatter and all-gather take, and the speedup of a sub-layer; ideal: the GEMM and the
                     reduce-scatter beside each other, nothing lost
    figure 18        bytes through a GPU's memory, counted (`weft.sim.traffic`)

T3 is hardware: a tracker that triggers copies, memory that adds. Here tiles set signals, streams wait for them, and kernels add, so
the partial sums that T3's memory adds up are read again.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 5, 6.1, 6.2, 6.4 and table 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weft import plan
from weft.bench.core.tables import Record, geomean, milliseconds, number
from weft.hw import file_of, load_machine
from weft.schedule import Draft, MatmulReduceScatter, named
from weft.sim import Model, simulate
from weft.sim.losses import gemms_us
from weft.sim.traffic import traffic
from weft.studies.pages import Table, block, head, model_for, where
from weft.trace.pyplot import pyplot
from weft.words import counted

OP = "matmul_reduce_scatter"
LAYERS = {"OP": 1, "FC-2": 4, "FC-1": 4, "IP": 3}
"""k, in hidden sizes over the number of ranks."""


class Network(NamedTuple):
    """One of table 2. tokens: of all sequences of a batch."""

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
"""12K, 18K and 20K are taken as multiples of 1024."""

PAPER = (
    "The paper's, simulated hardware: T3 is 20% faster than serial in the geometric mean and 39% at most, T3-MCA 30% and 47%, an "
    "ideal overlap 35% and 50% (6.1); on the large networks T3-MCA 29% and 35% (6.4). Through memory goes 22% less in the mean, "
    "36% at most, the all-gather counted in (6.2)."
)
"""What its text says; figures 15 to 20 are pictures, whose numbers are not in it."""


@dataclass(frozen=True)
class Row:
    """One sub-layer, as it ran. gather_ms: 0 where it was not recorded. moved: bytes through memory, by kind, of serial and of what
    was taken; empty on a machine that there is no file of."""

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

    @property
    def name(self) -> str:
        return f"{self.network.name} {self.layer}, {self.problem.world_size} ranks"

    @property
    def ideal(self) -> float:
        """The speedup of a sub-layer."""
        together = max(self.gemm_ms, self.scatter_ms) + self.gather_ms
        return (self.serial_ms + self.gather_ms) / together

    @property
    def speedup(self) -> float:
        return (self.serial_ms + self.gather_ms) / (self.weft_ms + self.gather_ms)

    @property
    def less_moved(self) -> float | None:
        """Part of serial's bytes, the all-gather's left out: it is as in serial."""
        return 1 - sum(self.moved[1].values()) / sum(self.moved[0].values()) if self.moved else None


def problems(network: Network, ranks: int) -> Iterator[tuple[str, MatmulReduceScatter]]:
    for layer, factor in LAYERS.items():
        yield (
            layer,
            MatmulReduceScatter(ranks, network.tokens, network.hidden, factor * network.hidden // ranks, "bf16"),
        )


def simulated(
    hw: str,
    topology: str | None = None,
    networks: Sequence[Network] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Record]:
    """Records of serial and of the planner's choice for each sub-layer. `ValueError` for an unknown machine or topology."""
    machine, found = load_machine(hw), list[Record]()
    for network in networks or NETWORKS:
        for ranks in network.ranks:
            model, common = model_for(machine, ranks, topology), head(OP, machine, ranks, topology)
            for layer, p in problems(network, ranks):
                choice = plan.choose(p, model)
                serial = choice.row("serial")
                of_layer = {
                    "config": f"{p.m}x{p.n}x{p.k}", "m": p.m, "n": p.n, "k": p.k, "gemm_ms": gemms_us(p, model) / 1e3,
                    "collective_ms": _alone_ms(p, model, "reduce_scatter"), "gather_ms": _alone_ms(p, model, "all_gather"),
                    "layer": layer, "network": network.name,
                }  # fmt: skip
                for variant, us, taken in (
                    ("serial", serial.us, "serial"),
                    ("weft", choice.predicted_us, choice.candidate.name),
                ):
                    assert us is not None
                    found.append({**common, **of_layer, "variant": variant, "p50_ms": us / 1e3, "chosen": taken})
    return found


def _alone_ms(p: MatmulReduceScatter, model: Model, op: Literal["reduce_scatter", "all_gather"]) -> float:
    """The library's collective on the sum, in a row of others."""
    d = Draft(op, p.world_size)
    whole, part = d.buffer("whole", p.m, p.n, p.dtype, "scratch"), d.buffer("part", p.rows, p.n, p.dtype, "scratch")
    lane = d.lane("compute")
    if op == "reduce_scatter":
        lane.reduce_scatter(whole.part(), part.part())
    else:
        lane.all_gather(part.part(), whole.part())
    return simulate(d.schedule(), model, runs=2).per_run_us / 1e3


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Of the sub-layers, in the order of first appearance; of each its last run. `ValueError` if there are none."""
    mine = [r for r in records if r["op"] == OP and r["mode"] == "queued" and _names(r)]
    if not mine:
        raise ValueError(f"no records of T3's sub-layers: weft bench {OP} --preset t3 --mode queued --json FILE")
    last = {(r["config"], r["ranks"], r.get("layer"), r.get("network")): r["run"] for r in mine}
    rows = []
    for (config, ranks, layer, of), run in last.items():
        same = [
            r for r in mine
            if (r["config"], r["ranks"], r.get("layer"), r.get("network"), r["run"]) == (config, ranks, layer, of, run)
        ]  # fmt: skip
        by = {r["variant"]: r for r in same}
        if not {"serial", "weft"} <= by.keys():
            raise ValueError(f"{config}: serial and weft were not both recorded: measure it again")
        one = by["weft"]
        p = MatmulReduceScatter(ranks, one["m"], one["n"], one["k"], one["dtype"])
        network, title = _names(one)[0]
        times = (
            by["serial"]["p50_ms"],
            one["p50_ms"],
            one["gemm_ms"],
            one["collective_ms"],
            one.get("gather_ms") or 0.0,
        )
        atp = by["asynctp"]["p50_ms"] if "asynctp" in by else None
        rows.append(Row(network, title, p, one["chosen"], *times, _moved(p, one["chosen"], one["machine"]), atp))
    return rows


def _names(record: Record) -> list[tuple[Network, str]]:
    """Which network's layer it is: as it says, or by its sizes; one name for layers of equal sizes."""
    if "layer" in record:
        return [(next(n for n in NETWORKS if n.name == record["network"]), record["layer"])]
    sizes, found = (record["m"], record["n"], record["k"]), []
    for network in NETWORKS:
        same = [layer for layer, p in problems(network, record["ranks"]) if (p.m, p.n, p.k) == sizes]
        found += [(network, ", ".join(same))] * bool(same)
    return found


def _moved(p: MatmulReduceScatter, chosen: str, machine: str) -> tuple[dict[str, float], dict[str, float]] | None:
    file = file_of(machine.rpartition(" x ")[2])
    if file is None:
        return None
    model = model_for(load_machine(file), p.world_size, None)
    serial, mine = (traffic(named(p, name).build(), model) for name in ("serial", chosen))
    return serial, mine


def tables(rows: Sequence[Row]) -> list[Table]:
    return [_speedups(rows), *([_moves(rows)] if all(row.moved for row in rows) else [])]


def _speedups(rows: Sequence[Row]) -> Table:
    gathers, peers = any(row.gather_ms for row in rows), any(row.asynctp_ms for row in rows)
    columns = ("sub-layer", "M x N x K", "GEMM ms", "reduce-scatter ms", *["all-gather ms"] * gathers, "serial ms",
               *["asynctp ms"] * peers, "weft ms", "schedule", "ideal", "speedup")  # fmt: skip
    cells = [
        (
            row.name, f"{row.problem.m} x {row.problem.n} x {row.problem.k}", milliseconds(row.gemm_ms),
            milliseconds(row.scatter_ms), *[milliseconds(row.gather_ms)] * gathers,
            *map(milliseconds, (row.serial_ms, *[row.asynctp_ms or 0.0] * peers, row.weft_ms)), row.chosen,
            f"{row.ideal:.2f}x", f"{row.speedup:.2f}x",
        )
        for row in rows
    ]  # fmt: skip
    blank = [""] * (len(columns) - 3)
    for title, large in (("Mega-GPT-2 and T-NLG", False), ("the large ones", True)):
        some = [row for row in rows if row.network.large == large]
        for what, of in (("geometric mean", geomean), ("most", max)):
            if some:
                ideal, speedup = of([row.ideal for row in some]), of([row.speedup for row in some])
                cells.append((f"{title}: {what}", *blank, f"{number(ideal, 2)}x", f"{number(speedup, 2)}x"))
    return Table("Speedup over serial of a sub-layer (figures 15 and 16)", columns, cells)


_KINDS = {"matmul": "GEMM", "peer": "collective, copies", "engine": "copies here", "compute": "sums"}


def _moves(rows: Sequence[Row]) -> Table:
    columns, cells = ["sub-layer"], [[row.name] for row in rows]
    for number_of, title in enumerate(("serial", "weft")):
        moved = [row.moved[number_of] for row in rows if row.moved]
        columns.append(f"{title} MB")
        for line, of in zip(cells, moved, strict=True):
            line.append(f"{sum(of.values()) / 1e6:.0f}")
        for kind in (kind for kind in _KINDS if any(kind in of for of in moved)):
            columns.append(f"of it {_KINDS[kind]}")
            for line, of in zip(cells, moved, strict=True):
                line.append(f"{of.get(kind, 0.0) / 1e6:.0f}")
    lines = [(*line, f"{row.less_moved:.0%}") for line, row in zip(cells, rows, strict=True)]
    return Table("Bytes through a GPU's memory for GEMM and reduce-scatter (figure 18)", (*columns, "less"), lines)


def notes(records: Sequence[Record]) -> list[str]:
    """What the numbers rest on, in sentences."""
    mine = [r for r in records if r["op"] == OP and _names(r)]
    ranks = sorted({r["ranks"] for r in mine})
    said = where(mine[-1], " or ".join([", ".join(map(str, ranks[:-1])), str(ranks[-1])]) if len(ranks) > 1 else "")
    if mine[-1]["device"] != "simulated":
        said += " A sub-layer is here without its all-gather, which the paper's speedups count and do not overlap."
    return [said]


def conclusions(rows: Sequence[Row]) -> list[str]:
    """In sentences: which schedules win, and where the ideal is no bound."""
    taken = [row.chosen.split("[")[0] for row in rows]
    count = ", ".join(f"{taken.count(name)} take {name}" for name in dict.fromkeys(taken))
    said = [f"Of {counted(len(rows), 'sub-layer')} {count}."]
    if above := sum(row.speedup > row.ideal for row in rows):
        said.append(
            f"{above} are faster than the ideal, which has the library's reduce-scatter: the schedules send every part straight to "
            "its owner."
        )
    return [*said, PAPER]


def markdown(records: Sequence[Record]) -> str:
    """A page's block."""
    rows = rows_of(records)
    return block(notes(records), tables(rows), [" ".join(conclusions(rows))])


def draw(directory: Path, rows: Sequence[Row], title: str) -> list[Path]:
    """Write figure 16 as a PNG file into `directory`, made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    plt, path = pyplot(), directory / "figure-16-speedups.png"
    drawn, axis = plt.subplots(figsize=(12, 4), layout="constrained")
    series: list[tuple[str, str, Callable[[Row], Any]]] = [
        ("ideal", "#bbbbbb", lambda row: row.ideal), ("weft", "#4063a3", lambda row: row.speedup)
    ]  # fmt: skip
    for i, (label, colour, of) in enumerate(series):
        axis.bar(
            [j + (i - 0.5) * 0.4 for j in range(len(rows))], [of(row) for row in rows], 0.38, color=colour, label=label
        )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(rows)), [row.name for row in rows], fontsize=7, rotation=45, ha="right")
    axis.set_ylabel("speedup over serial", fontsize=9)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncol=2, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    drawn.suptitle(title, fontsize=9, x=0.01, ha="left")
    drawn.savefig(path, dpi=120)
    plt.close(drawn)
    return [path]
