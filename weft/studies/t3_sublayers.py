"""T3 on the paper's hardware: its evaluation, simulated by `weft.sim.memory_controller`.

A sub-layer is a GEMM, its ring reduce-scatter, and the all-gather of the sum. There are five configurations (5.3):

    sequential   GEMM, reduce-scatter by a kernel, all-gather, one after the other
    t3           the GEMM fused with the reduce-scatter, then the all-gather; round-robin arbitration
    t3-mca       the same, but the memory controller prioritises the GEMM by the paper's rules
    ideal        the longer of GEMM and reduce-scatter, each alone, then the all-gather
    ideal+nmc    the same, with a reduce-scatter whose sums are computed in memory (near-memory compute, NMC)

This module has the speedups of sub-layers (figures 15 and 16) and their memory traffic (figure 18). `weft.studies.t3_figures` has
the other figures, and `weft.studies.t3_iteration` has whole iterations.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 5, 6 and 7.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from weft.bench.core.tables import Record, ResultTable, geomean, milliseconds, table
from weft.builders.output_map.map import ring_reduce_scatter
from weft.sim.memory_controller import (
    HardwareGemm,
    OwnWrites,
    TrackingGpu,
    all_gather,
    alone,
    fused,
    other_reading,
    reduce_scatter,
    t3_gpu,
)
from weft.studies.claims import Claim
from weft.studies.pages import bars, figure
from weft.studies.t3 import LAYERS, NETWORKS, Network

Progress = Callable[[str, float], None]
VARIANTS = ("sequential", "t3", "t3-mca", "ideal", "ideal+nmc")
READINGS: Mapping[str, Callable[[], TrackingGpu]] = {"75": t3_gpu, "150": other_reading}
"""{GB/s of a link in one direction: GPU}, for both interpretations of the paper's "150 GB/s bi-directional"."""


@dataclass(frozen=True)
class HardwareRow:
    """The results of a sub-layer, in us and bytes.

    gemm, scatter, gather: the times of GEMM, reduce-scatter and all-gather, each alone.
    scatter_nmc: the time of the reduce-scatter alone, with near-memory compute.
    t3, mca: the times of the fused GEMM and reduce-scatter, with T3 and with T3-MCA.
    gemm_t3, gemm_mca: the time until the fused GEMM ends, with T3 and with T3-MCA.
    threshold: the queue length below which T3-MCA issues the ring's memory accesses.
    moved: the memory traffic in bytes, by configuration ("sequential" or "t3-mca") and then by kind of access.
    """

    network: str
    layer: str
    ranks: int
    large: bool
    gemm: float
    scatter: float
    scatter_nmc: float
    gather: float
    t3: float
    mca: float
    gemm_t3: float
    gemm_mca: float
    threshold: int
    moved: Mapping[str, Mapping[str, float]]

    @property
    def name(self) -> str:
        return f"{self.network} {self.layer}, {self.ranks} ranks"

    def us(self, variant: str) -> float:
        together = {
            "sequential": self.gemm + self.scatter, "t3": self.t3, "t3-mca": self.mca,
            "ideal": max(self.gemm, self.scatter), "ideal+nmc": max(self.gemm, self.scatter_nmc),
        }  # fmt: skip
        return together[variant] + self.gather

    def speedup(self, variant: str) -> float:
        return self.us("sequential") / self.us(variant)

    def less(self, *kinds: str) -> float:
        """Return the bytes that the sequential configuration moves by accesses of these kinds, divided by the bytes of
        T3-MCA.
        """
        return sum(self.moved["sequential"][k] for k in kinds) / sum(self.moved["t3-mca"][k] for k in kinds)

    @property
    def saved(self) -> float:
        """The fraction of the sequential configuration's memory accesses that T3-MCA saves."""
        return 1 - sum(self.moved["t3-mca"].values()) / sum(self.moved["sequential"].values())


def sublayers(large: bool) -> Iterator[tuple[Network, int, str, HardwareGemm]]:
    for network in NETWORKS:
        for ranks in network.ranks if network.large == large else ():
            for layer, factor in LAYERS.items():
                yield (
                    network,
                    ranks,
                    layer,
                    HardwareGemm(network.tokens, network.hidden, factor * network.hidden // ranks),
                )


def row_of(
    network: Network, layer: str, ranks: int, gemm: HardwareGemm, gpu: TrackingGpu, own_writes: OwnWrites = "watermarks"
) -> HardwareRow:
    """Simulate a sub-layer in all configurations, and return its row."""
    output = ring_reduce_scatter(gemm.tiles(gpu), ranks)
    single = alone(gemm, gpu)
    t3 = fused(gemm, output, ranks, gpu, "round_robin", own_writes=own_writes)
    mca = fused(gemm, output, ranks, gpu, "mca", own_writes=own_writes)
    scatter, nmc = (reduce_scatter(gemm.out_bytes, ranks, gpu, near_memory=near) for near in (False, True))
    gather = all_gather(gemm.out_bytes, ranks, gpu)
    moved = {
        name: {
            "GEMM reads": of.gemm_read, "GEMM writes": of.gemm_write, "RS reads": rs.ring_read, "RS writes": rs.ring_write,
            "AG reads": gather.ring_read, "AG writes": gather.ring_write,
        }
        for name, of, rs in (("sequential", single, scatter), ("t3-mca", mca, mca))
    }  # fmt: skip
    return HardwareRow(
        network.name, layer, ranks, network.large, single.gemm_us, scatter.us, nmc.us, gather.us, t3.us, mca.us, t3.gemm_us,
        mca.gemm_us, mca.threshold, moved,
    )  # fmt: skip


def rows_on(
    gpu: TrackingGpu, which: Sequence[tuple[Network, int, str, HardwareGemm]], own_writes: OwnWrites = "watermarks",
    step: Callable[[str], None] = lambda what: None,
) -> list[HardwareRow]:  # fmt: skip
    """Simulate sub-layers on `gpu`, and return a row for each. Layers with equal sizes (FC-1 and FC-2) are simulated
    once.

    own_writes: the assumed order of a GEMM's stores and loads.
    """
    found: dict[tuple[HardwareGemm, int], HardwareRow] = {}
    with ThreadPoolExecutor(2) as pool:  # simulations release the GIL
        todo = {(gemm, ranks): (network, layer, ranks, gemm) for network, ranks, layer, gemm in which}
        results = {key: pool.submit(row_of, *call, gpu, own_writes) for key, call in todo.items()}
        for key, result in results.items():
            step(f"{todo[key][0].name} {todo[key][1]}, {key[1]} ranks")
            found[key] = result.result()
    return [replace(found[gemm, ranks], layer=layer) for _, ranks, layer, gemm in which]


def fields_of(row: HardwareRow) -> Record:
    """Return the record fields of a row, including the time of each configuration."""
    return {
        "config": row.name, "network": row.network, "layer": row.layer, "ranks": row.ranks, "variant": "t3-mca",
        "p50_ms": row.us("t3-mca") / 1e3, "row": asdict(row),
        "speedups": {v: row.speedup(v) for v in VARIANTS[1:]},
    }  # fmt: skip


def row_from(record: Record) -> HardwareRow:
    return HardwareRow(**record["row"])


# --- the paper's claims ---


def summary(rows: Sequence[HardwareRow]) -> dict[str, tuple[float, float]]:
    """Return {configuration: (geometric mean, maximum) of the speedups over sequential}."""
    found = {}
    for variant in VARIANTS[1:]:
        speedups = [row.speedup(variant) for row in rows]
        found[variant] = (geomean(speedups) or 0.0, max(speedups))
    return found


def claims(small: Sequence[HardwareRow], large: Sequence[HardwareRow]) -> list[Claim]:
    """Return the paper's numbers on the speedups (6.1; 6.4 for large networks) and the memory traffic (6.2) of
    sub-layers, with the model's numbers.
    """

    def percent(factor: float) -> float:
        return 100 * (factor - 1)

    means, of_large = summary(small), summary(large)

    def of(ranks: int, *kinds: str) -> float:
        return geomean([row.less(*kinds) for row in small if row.ranks == ranks]) or 0.0

    both, writes = (8, 16), ("GEMM writes", "RS writes")
    nmc = {r: geomean([row.scatter / row.scatter_nmc for row in small if row.ranks == r]) or 0.0 for r in both}
    best = max(row.speedup("ideal") for row in small)
    over = max(row.us("t3") / row.us("t3-mca") for row in small)
    target = next(row for row in small if (row.network, row.layer, row.ranks) == ("T-NLG", "FC-1", 16))
    worst = next(row for row in small if (row.network, row.layer, row.ranks) == ("Mega-GPT-2", "OP", 16))
    least = min(row.speedup("ideal") for row in small)
    beyond = max(row.speedup("ideal+nmc") / row.speedup("ideal") for row in small)
    derived_from = "(used to derive memory.effective)"
    return [
        Claim("ideal, geometric mean", "6.1.1", 35, percent(means["ideal"][0]), "%", 5),
        Claim("ideal, maximum", "6.1.1", 50, percent(means["ideal"][1]), "%", 8),
        Claim("ideal: FC-1 of T-NLG on 16 ranks, gap to the best sub-layer",
              "6.1.1", 0, percent(best / target.speedup("ideal")), "%", 2),
        Claim("ideal: OP of Mega-GPT-2 on 16 ranks", "6.1.1", 15, percent(worst.speedup("ideal")), "%", None),
        Claim("ideal: OP of Mega-GPT-2 on 16 ranks, gap to the worst sub-layer",
              "6.1.1", 0, percent(worst.speedup("ideal") / least), "%", 0),
        Claim(f"reduce-scatter faster if memory adds, 8 ranks {derived_from}", "6.1.1", 7, percent(nmc[8]), "%", None),
        Claim(f"reduce-scatter faster if memory adds, 16 ranks {derived_from}", "6.1.1", 3, percent(nmc[16]), "%", None),
        Claim("speedup of ideal+nmc over ideal, maximum", "6.1.1", 4, percent(beyond), "%", None),
        Claim("T3, geometric mean", "6.1.2", 20, percent(means["t3"][0]), "%", 5),
        Claim("T3, maximum", "6.1.2", 39, percent(means["t3"][1]), "%", 8),
        Claim("T3-MCA, geometric mean", "6.1.3", 30, percent(means["t3-mca"][0]), "%", 5),
        Claim("T3-MCA, maximum", "6.1.3", 47, percent(means["t3-mca"][1]), "%", 8),
        Claim("speedup of T3-MCA over T3, geometric mean",
              "6.1.3", 13, percent(means["t3-mca"][0] / means["t3"][0]), "%", None),
        Claim("speedup of T3-MCA over T3, maximum", "6.1.3", 29, percent(over), "%", None),
        Claim("difference between the means of ideal and T3-MCA",
              "6.1.3", 5, percent(means["ideal"][0] - means["t3-mca"][0] + 1), "%", None),
        Claim("fewer reads of the reduce-scatter, 8 ranks", "6.2", 2.5, of(8, "RS reads"), "x", 0.005),
        Claim("fewer reads of the reduce-scatter, 16 ranks", "6.2", 2.2, of(16, "RS reads"), "x", 0.01),
        Claim("fewer writes of GEMM and reduce-scatter, 8 ranks (sequential / T3 - 1)",
              "6.2", 14, percent(of(8, *writes)), "%", 2),
        Claim("fewer writes of GEMM and reduce-scatter, 16 ranks", "6.2", 7, percent(of(16, *writes)), "%", 2),
        Claim("fewer reads of the GEMM, 8 ranks", "6.2", 1.2, of(8, "GEMM reads"), "x", 0.2),
        Claim("fewer reads of the GEMM, 16 ranks", "6.2", 2.0, of(16, "GEMM reads"), "x", 0.2),
        Claim("memory accesses saved, mean", "6.2", 22, 100 * fmean(row.saved for row in small), "%", 5),
        Claim("memory accesses saved, maximum", "6.2", 36, 100 * max(row.saved for row in small), "%", None),
        Claim("T3-MCA on the large networks, geometric mean", "6.4", 29, percent(of_large["t3-mca"][0]), "%", 5),
        Claim("T3-MCA on the large networks, maximum", "6.4", 35, percent(of_large["t3-mca"][1]), "%", None),
    ]  # fmt: skip


def in_order(rows: Sequence[HardwareRow]) -> bool:
    """True if the geometric mean speedups are in the paper's order: T3 < T3-MCA < ideal."""
    means = summary(rows)
    return all(means[a][0] < means[b][0] for a, b in pairwise(("t3", "t3-mca", "ideal")))


# --- tables and pictures ---


def speedups_table(rows: Sequence[HardwareRow], title: str) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "sub-layer": lambda row: row.name,
        "GEMM us": lambda row: f"{row.gemm:.0f}",
        "RS us": lambda row: f"{row.scatter:.0f}",
        "RS+NMC us": lambda row: f"{row.scatter_nmc:.0f}",
        "AG us": lambda row: f"{row.gather:.0f}",
        "GEMM, RS, AG shares": lambda row: " / ".join(
            f"{100 * part / row.us('sequential'):.0f}%" for part in (row.gemm, row.scatter, row.gather)
        ),
        "ideal": lambda row: f"{row.speedup('ideal'):.2f}x",
        "ideal+NMC": lambda row: f"{row.speedup('ideal+nmc'):.2f}x",
        "T3": lambda row: f"{row.speedup('t3'):.2f}x",
        "T3-MCA": lambda row: f"{row.speedup('t3-mca'):.2f}x",
        "GEMM slowdown, T3": lambda row: f"{row.gemm_t3 / row.gemm:.2f}x",
        "GEMM slowdown, T3-MCA": lambda row: f"{row.gemm_mca / row.gemm:.2f}x",
        "threshold": lambda row: str(row.threshold or "none"),
    }
    titles = {"ideal": "ideal", "ideal+nmc": "ideal+NMC", "t3": "T3", "t3-mca": "T3-MCA"}
    means = summary(rows)
    last = [
        {"sub-layer": what} | {titles[variant]: f"{of[i]:.2f}x" for variant, of in means.items()}
        for i, what in enumerate(("geometric mean", "maximum"))
    ]
    return table(title, rows, columns, last)


def memory_table(rows: Sequence[HardwareRow]) -> ResultTable:
    kinds = tuple(rows[0].moved["sequential"])
    columns: dict[str, Callable[[Any], str]] = {"sub-layer": lambda row: row.name}
    for kind in kinds:
        columns[kind] = lambda row, kind=kind: " > ".join(  # type: ignore[misc]
            milliseconds(row.moved[which][kind] / 1e6) for which in ("sequential", "t3-mca")
        )
    columns["saved"] = lambda row: f"{row.saved:.0%}"
    return table("Accesses to memory in MB, as: sequential execution > T3-MCA (figure 18)", rows, columns)


def draw_speedups(directory: Path, rows: Sequence[HardwareRow], title: str, name: str) -> Path:
    path = directory / name
    shown = {"ideal": "ideal", "ideal+nmc": "ideal+NMC", "t3": "T3", "t3-mca": "T3-MCA"}
    heights = {text: [row.speedup(variant) for row in rows] for variant, text in shown.items()}
    with figure(path, title, (12, 4)) as (axis,):
        names = [row.name for row in rows]
        bars(axis, names, heights, ("#bbbbbb", "#888888", "#e0a030", "#4063a3"), base=1.0)
        axis.set_xticks(range(len(names)), names, fontsize=7, rotation=45, ha="right")
        axis.set_ylabel("speedup over sequential", fontsize=9)
    return path


def draw_memory(directory: Path, rows: Sequence[HardwareRow], title: str) -> Path:
    path = directory / "figure-18-memory.png"
    colours = ("#24476b", "#7da7d9", "#a34040", "#e0a0a0", "#4f7f4f", "#a8cfa8")
    with figure(path, title, (12, 4)) as (axis,):
        for which, shift in (("sequential", -0.2), ("t3-mca", 0.2)):
            below = [0.0] * len(rows)
            for kind, colour in zip(rows[0].moved[which], colours, strict=True):
                part = [row.moved[which][kind] / sum(row.moved["sequential"].values()) for row in rows]
                at = [i + shift for i in range(len(rows))]
                axis.bar(at, part, 0.36, bottom=below, color=colour, label=kind if shift < 0 else None)
                below = [a + b for a, b in zip(below, part, strict=True)]
        axis.set_xticks(range(len(rows)), [row.name for row in rows], fontsize=7, rotation=45, ha="right")
        axis.set_ylabel("accesses, sequential = 1; right: T3-MCA", fontsize=9)
    return path
