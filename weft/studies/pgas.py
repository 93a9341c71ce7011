"""PGAS embedding retrieval on V100s: simulated weak and strong scaling, upper bounds of the speedup, and the rate at
which the paper's baseline must have communicated.

The paper's baseline pools, calls an all-to-all and unpacks; here `serial`. The paper's PGAS kernel stores pooled
vectors in the peers' outputs while it pools; here `direct`. If the baseline communicated at the full rate of the V100's
links, the speedup of `direct` could not be as large as the paper's. So the paper's baseline must communicate more
slowly. The model is not fitted to the paper's speedup. Instead, the study computes from this speedup the rate of the
paper's baseline:

    implied rate = bytes / (speedup * direct - pooling - unpacking)

Source: "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning Recommendation
Systems", IV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from weft.bench.core.tables import Record, ResultTable, table
from weft.builders import EmbeddingAllToAll, named
from weft.hw import Machine, load_machine
from weft.sim.run_time import run_us
from weft.studies.claims import Claim, claims_table
from weft.studies.pages import block, figure, head, last_run, model_for, scaled, where_simulated

STUDY = "pgas"
BATCH, DIM, FLOAT = 16384, 64, 4
RANKS = (1, 2, 3, 4)
SENSITIVE = (
    "link.pair_usable",
    "memory.copy_bandwidth",
    "collective.all_gather",
    "collective.all_gather_latency",
    "compute.launch",
)


@dataclass(frozen=True)
class Scaling:
    """A scaling experiment of the paper.

    tables: a function from the number of ranks to the number of tables of all ranks.
    rows: the mean number of rows in a bag.
    speedups: the paper's speedups, by number of ranks.
    mean: the paper's mean speedup.
    where: the section of the paper.
    """

    name: str
    tables: Callable[[int], int]
    rows: int
    speedups: Mapping[int, float]
    mean: float
    where: str


SCALINGS = (
    Scaling("weak", lambda ranks: 64 * ranks, 64, {2: 2.10, 3: 1.95, 4: 1.87}, 1.97, "IV-A"),
    Scaling("strong", lambda ranks: 96, 16, {2: 2.95, 3: 2.55, 4: 2.44}, 2.63, "IV-B"),
)
"""The paper's weak and strong scaling. The number of rows in a bag is uniform up to 128 (weak) or 32 (strong), so 64 or
16 on average.

The speedups are PGAS over the paper's baseline.
"""


@dataclass(frozen=True)
class PgasRow:
    """The results of one scaling experiment on one number of GPUs.

    Times are in us.

    pooling, unpacking: lower bounds of the times of pooling and unpacking, at the memory's peak rate.
    exchange: a lower bound of the time of the all-to-all, at the links' peak rate.
    serial, direct: simulated times of the baseline and of the PGAS kernel.
    sent: the bytes that a rank sends to all peers.
    link_sent: the bytes on the rank's busiest link.
    """

    scaling: str
    ranks: int
    pooling: float
    exchange: float
    unpacking: float
    serial: float
    direct: float
    sent: float
    link_sent: float

    @property
    def speedup(self) -> float:
        return self.serial / self.direct

    @property
    def sending(self) -> float:
        """The time in us in which `direct` sends: its time minus the time to pool the rank's own samples, which come last."""
        return self.direct - self.pooling / self.ranks

    @property
    def bound(self) -> float:
        """The largest possible speedup: pooling + exchange + unpacking, divided by the longer of pooling and exchange."""
        return (self.pooling + self.exchange + self.unpacking) / max(self.pooling, self.exchange)


def row_of(scaling: Scaling, ranks: int, machine: Machine) -> PgasRow:
    model = model_for(machine, ranks, None)
    problem = EmbeddingAllToAll.sized(BATCH, DIM, scaling.rows, ranks, tables=scaling.tables(ranks))
    us = {name: run_us(named(problem, name).build(), model, "queued") for name in ("serial", "direct")}
    vectors = BATCH * scaling.tables(ranks) / ranks  # vectors that a rank pools
    pooled = vectors * DIM * FLOAT
    sent = pooled * (ranks - 1) / ranks
    of_link = pooled / ranks if ranks > 1 else 0.0
    hbm = model.hbm_bytes_per_us
    reads = vectors * (scaling.rows * (DIM * FLOAT + 8) + 8)  # bytes of rows, ids (8 bytes) and offsets (8 bytes)
    unpacked = 2 * pooled if ranks > 1 else 0.0
    return PgasRow(
        scaling.name, ranks, reads / hbm, of_link / machine.per_us("link.pair_usable"), unpacked / hbm, us["serial"],
        us["direct"], sent, of_link,
    )  # fmt: skip


def simulated(*, progress: Callable[[str, float], None] = lambda what, share: None) -> list[Record]:
    """Return a record for each scaling experiment and number of GPUs, and a record of the sensitivity analysis."""
    machine = load_machine("v100")
    steps = len(SCALINGS) * len(RANKS) + 2 * len(SENSITIVE) + 2
    found = []
    common = head("embedding_all_to_all", machine, max(RANKS), None) | {"study": STUDY, "dtype": "fp32"}
    for scaling in SCALINGS:
        for ranks in RANKS:
            progress(f"simulating {scaling.name} scaling on {ranks} V100", 1 / steps)
            row = row_of(scaling, ranks, machine)
            config = f"{scaling.name}, {ranks}"
            found.append(
                {
                    **common,
                    "ranks": ranks,
                    "config": config,
                    "variant": "direct",
                    "figure": "scaling",
                    "row": asdict(row),
                }
            )
    lines: list[list[Any]] = []
    for key, factor in (("as it is", 1.0), ("link.pair_usable", 2.0), *((k, f) for k in SENSITIVE for f in (0.8, 1.2))):
        progress(f"simulating {key} x {factor:g}", 1 / steps)
        changed = machine if key == "as it is" else scaled(machine, key, factor)
        lines.append(
            [key, factor, [row_of(scaling, ranks, changed).speedup for scaling in SCALINGS for ranks in RANKS[1:]]]
        )
    return [*found, {**common, "config": "sensitivity", "variant": "direct", "figure": "sensitivity", "lines": lines}]


# --- records to rows, claims, tables ---


@dataclass(frozen=True)
class PgasRows:
    """The results of a run.

    rows: the results by (scaling experiment, number of GPUs).
    """

    rows: Mapping[tuple[str, int], PgasRow]
    sensitivity: Sequence[Any]


def _last_run(records: Sequence[Record]) -> list[Record]:
    return last_run(records, STUDY, "PGAS embedding retrieval", "pgas")


def rows_of(records: Sequence[Record]) -> PgasRows:
    """Return the results of the last run; raise `ValueError` if there are no records."""
    last = _last_run(records)
    rows = [PgasRow(**record["row"]) for record in last if record["figure"] == "scaling"]
    (lines,) = (record["lines"] for record in last if record["figure"] == "sensitivity")
    return PgasRows({(row.scaling, row.ranks): row for row in rows}, lines)


def implied_gbps(row: PgasRow, speedup: float) -> float:
    """Return the rate in GB/s per rank at which the paper's baseline must have communicated, if its other times are as
    simulated.

    speedup: the paper's speedup.
    """
    return 1e-3 * row.sent / (speedup * row.direct - row.pooling - row.unpacking)


def claims(found: PgasRows) -> list[Claim]:
    return [claim for scaling in SCALINGS for claim in _claims(scaling, found)]


def _claims(scaling: Scaling, found: PgasRows) -> Iterator[Claim]:
    name, where = scaling.name, scaling.where
    rows = {ranks: found.rows[name, ranks] for ranks in RANKS}
    for ranks, paper in scaling.speedups.items():
        yield Claim(f"{name} scaling, {ranks} GPUs: speedup", where, paper, rows[ranks].speedup, "x")
    yield Claim(f"{name} scaling, mean speedup", where, scaling.mean, fmean(rows[r].speedup for r in RANKS[1:]), "x")
    one, two = rows[1], rows[2]
    if name == "weak":
        yield Claim("weak scaling factor of the baseline, 2 GPUs", "IV-A1, figure 5", 0.46, one.serial / two.serial)
        worst = max(row.direct / one.direct for row in rows.values())
        said = f"at most {worst:.2f} times the time of one GPU"
        yield Claim("weak scaling of PGAS is close to ideal", "IV-A1, figure 5", "yes", said, held=worst <= 1.1)
        gains = [rows[ranks].exchange for ranks in RANKS[1:]]
        said = " > ".join(f"{us / 1e3:.1f}" for us in gains) + " ms at the links' rate"
        held = gains == sorted(gains, reverse=True)
        yield Claim("communication takes less time with more GPUs", "IV-A2, figure 6", "yes", said, held=held)
        shorter = two.exchange < two.pooling
        said = f"{two.exchange / 1e3:.1f} of {two.pooling / 1e3:.1f} ms"
        yield Claim(
            "communication takes less time than computation, 2 GPUs", "IV-A2, figure 6", "yes", said, held=shorter
        )
    else:
        yield Claim(
            "strong scaling of the baseline, 2 GPUs: its time over one GPU's",
            "IV-B1",
            1.8,
            two.serial / one.serial,
            "x",
        )
        yield Claim("strong scaling of PGAS, 2 GPUs: speedup over one GPU", "IV-B1", 1.6, one.direct / two.direct, "x")
        later = [rows[3].pooling / two.pooling, rows[4].pooling / rows[3].pooling]
        said = f"{later[0]:.2f} times with 3 instead of 2, {later[1]:.2f} times with 4 instead of 3"
        held = min(later) > 0.9
        yield Claim(
            "the time of computation does not fall beyond 2 GPUs, because latency limits it",
            "IV-B2, figure 9",
            "yes",
            said,
            held=held,
        )
    ranks, figure_of = (2, "figure 7") if name == "weak" else (4, "figure 10")
    part = rows[ranks].sending / rows[ranks].direct
    said = f"over the first {part:.0%}"
    what = f"bytes leave a GPU during the whole kernel, {name}, {ranks} GPUs"
    yield Claim(what, f"{where}2, {figure_of}", "yes", said, held=part > 0.95)
    above = two.direct / two.pooling
    said = f"{above:.2f} times the pooling"
    yield Claim(
        f"PGAS takes only slightly longer than its computation, {name}, 2 GPUs", where, "yes", said, held=above <= 1.1
    )


def tables(found: PgasRows) -> list[ResultTable]:
    made = [claims_table("The paper's numbers and ours", claims(found))]
    for scaling in SCALINGS:
        rows = [found.rows[scaling.name, ranks] for ranks in RANKS]
        made += [_parts_table(scaling, rows), _factors_table(scaling, rows)]
    return [*made, _sensitivity_table(found), _machine_table()]


def _parts_table(scaling: Scaling, rows: Sequence[PgasRow]) -> ResultTable:
    def paper(row: PgasRow) -> float | None:
        return scaling.speedups.get(row.ranks)

    columns: dict[str, Callable[[PgasRow], str]] = {
        "GPUs": lambda row: str(row.ranks),
        "pooling ms": lambda row: f"{row.pooling / 1e3:.2f}",
        "exchange ms": lambda row: f"{row.exchange / 1e3:.2f}",
        "unpacking ms": lambda row: f"{row.unpacking / 1e3:.2f}",
        "serial ms": lambda row: f"{row.serial / 1e3:.2f}",
        "direct ms": lambda row: f"{row.direct / 1e3:.2f}",
        "bound of the speedup": lambda row: f"{row.bound:.2f}x" if row.ranks > 1 else "",
        "speedup": lambda row: f"{row.speedup:.2f}x" if row.ranks > 1 else "",
        "paper's speedup": lambda row: f"{of:.2f}x" if (of := paper(row)) else "",
        "MB sent": lambda row: f"{row.sent / 1e6:.0f}" if row.ranks > 1 else "",
        "GB/s that the paper's baseline reaches": lambda row: (
            f"{implied_gbps(row, of):.1f}" if (of := paper(row)) else ""
        ),
        "GB/s of the links": lambda row: f"{1e-3 * row.sent / row.exchange:.0f}" if row.exchange else "",
    }
    what = "64 tables on each GPU" if scaling.name == "weak" else "96 tables in all"
    title = (
        f"{scaling.name.capitalize()} scaling: {what}, {scaling.rows} rows a bag; pooling, exchange and unpacking are "
        "lower bounds of their times"
    )
    return table(title, rows, columns)


def _factors_table(scaling: Scaling, rows: Sequence[PgasRow]) -> ResultTable:
    one, weak = rows[0], scaling.name == "weak"
    columns: dict[str, Callable[[PgasRow], str]] = {
        "GPUs": lambda row: str(row.ranks),
        "direct": lambda row: f"{one.direct / row.direct:.2f}",
        "serial": lambda row: f"{one.serial / row.serial:.2f}",
        "ideal": lambda row: "1" if weak else str(row.ranks),
    }
    figure_of = "figure 5" if weak else "figure 8"
    return table(
        f"{scaling.name.capitalize()} scaling factors: time on one GPU / time on this number of GPUs ({figure_of})",
        rows,
        columns,
    )


def _sensitivity_table(found: PgasRows) -> ResultTable:
    names = [f"{scaling.name}, {ranks}" for scaling in SCALINGS for ranks in RANKS[1:]]
    columns: dict[str, Callable[[Any], str]] = {
        "number": lambda line: line[0] if line[1] == 1 else f"{line[0]} x {line[1]:g}",
        **{name: lambda line, i=i: f"{line[2][i]:.2f}x" for i, name in enumerate(names)},  # type: ignore[misc]
    }
    papers = [f"{speedup:.2f}x" for scaling in SCALINGS for speedup in scaling.speedups.values()]
    last = {"number": "paper's", **dict(zip(names, papers, strict=True))}
    return table(
        "Speedups with one assumed or derived number changed, by scaling and number of GPUs",
        found.sensitivity,
        columns,
        [last],
    )


def _machine_table() -> ResultTable:
    machine = load_machine("v100")
    columns: dict[str, Callable[[Any], str]] = {
        "number": lambda key: key,
        "value": lambda key: f"{machine[key].value:g} {machine[key].unit}",
        "source": lambda key: machine[key].source,
        "note": lambda key: machine[key].note,
    }
    given = [key for key in machine if machine[key].source != "derived" or key in SENSITIVE]
    return table("The V100's numbers; all others are derived from the H200's", given, columns)


def conclusions(found: PgasRows) -> list[str]:
    """Return sentences for the report: how many claims are reproduced, and the rate that the paper's speedups imply for
    its baseline.
    """
    made = claims(found)
    two = found.rows["weak", 2]
    rate = implied_gbps(two, SCALINGS[0].speedups[2])
    met = sum(bool(claim.reproduced) for claim in made)
    return [
        f"{met} of {len(made)} of the paper's claims are reproduced. In weak scaling on two GPUs, the paper's baseline sends "
        f"{two.sent / 1e6:.0f} MB from each GPU at {rate:.1f} GB/s, if its kernel is as fast as the model's. A link has "
        f"{1e-3 * two.sent / two.exchange:.0f} GB/s. At the links' rate no overlap gains more than {two.bound:.2f}x there."
    ]


def notes(records: Sequence[Record]) -> list[str]:
    last = _last_run(records)[-1]
    of = f"1 to {max(RANKS)} x {last['machine']}, linked as a {last['topology']}, {last['dtype']}, queued"
    return [where_simulated(last, of, ", and most are derived from an H200's")]


def markdown(records: Sequence[Record]) -> str:
    """Return the generated part of the report, as Markdown."""
    found = rows_of(records)
    return block(notes(records), tables(found)[1:], conclusions(found))  # docs/reproduction.md has the claims


def draw(directory: Path, found: PgasRows, title: str) -> list[Path]:
    """Write the pictures into `directory`, created if needed. title: a description of the run.

    The pictures show speedups (figures 5 and 8), the times of the parts (6 and 9), and bytes sent over time (7 and 10), for
    weak and for strong scaling.
    """
    paths = [directory / "figure-5-scaling.png", directory / "figure-7-volume.png"]
    with figure(paths[0], f"{title} (figures 5, 6, 8, 9)", (9, 8), 2) as axes:
        for axis, scaling in zip(axes, SCALINGS, strict=True):
            rows = [found.rows[scaling.name, ranks] for ranks in RANKS]
            below = [0.0] * len(rows)
            for part, colour in (("pooling", "#24476b"), ("exchange", "#7da7d9"), ("unpacking", "#e0a030")):
                heights = [getattr(row, part) / 1e3 for row in rows]
                axis.bar(
                    [row.ranks - 0.15 for row in rows],
                    heights,
                    0.28,
                    bottom=below,
                    color=colour,
                    label=f"{part}, bound",
                )
                below = [a + b for a, b in zip(below, heights, strict=True)]
            axis.bar(
                [row.ranks + 0.15 for row in rows],
                [row.direct / 1e3 for row in rows],
                0.28,
                color="#2f7d5b",
                label="direct",
            )
            axis.set_xticks(RANKS)
            axis.set_ylabel(f"{scaling.name} scaling, ms", fontsize=9)
        axes[-1].set_xlabel("GPUs", fontsize=9)
    with figure(paths[1], f"{title} (figures 7, 10)", (9, 6), 2) as axes:
        for axis, (name, ranks) in zip(axes, (("weak", 2), ("strong", 4)), strict=True):
            row = found.rows[name, ranks]
            remote = row.sending
            axis.plot(
                [0, remote / 1e3, row.direct / 1e3],
                [0, row.sent / 1e6, row.sent / 1e6],
                color="#2f7d5b",
                label="direct, remote first",
            )
            starts = row.serial - row.unpacking - row.exchange
            volume = [0, 0, row.sent / 1e6, row.sent / 1e6]
            axis.plot(
                [of / 1e3 for of in (0, starts, row.serial - row.unpacking, row.serial)],
                volume,
                "--",
                color="#b8432f",
                label="serial",
            )
            axis.set_ylabel(f"{name}, {ranks} GPUs: MB sent", fontsize=9)
        axes[-1].set_xlabel("ms", fontsize=9)
    return paths
