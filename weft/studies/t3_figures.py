"""Simulation of figures of the T3 paper on a model of its hardware, and the effect of each assumed number.

    figure 5    work-groups and stages of a GEMM that is split over ranks
    figure 6    compute units split between a GEMM and an all-reduce
    figure 10   memory accesses of each step of the ring
    figure 14   a reduce-scatter alone
    figure 17   memory traffic over time
    figure 20   twice the compute units

A function `simulate_...` returns the fields of a record, and a function `..._table` makes a table from such a record.
Numbers that the paper shows only in pictures are omitted. `weft.studies.t3_sublayers` has figures 15, 16 and 18, and
`weft.studies.t3_iteration` has figures 4 and 19.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 2.5, 3.2, 5.1, 6.1
and 7.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.bench.core.tables import Record, ResultTable, geomean, table
from weft.builders.output_map.map import OutputMap, direct_reduce_scatter, ring_reduce_scatter
from weft.sim.memory_controller import (
    HardwareGemm,
    OwnWrites,
    TrackingGpu,
    all_gather,
    alone,
    dram,
    fused,
    fused_on_all,
    other_reading,
    reduce_scatter,
    t3_gpu,
)
from weft.studies.pages import figure
from weft.studies.t3 import NETWORKS
from weft.studies.t3_sublayers import VARIANTS, rows_on, sublayers, summary

MEGABYTES = (6, 12, 24, 48, 96, 192)
SPLITS = ((80, 80), (72, 8), (64, 16))
PAPER_SPLITS = {(80, 80): (0.0, 0.0, 1.67), (72, 8): (0.41, None, 1.18), (64, 16): (0.07, 0.21, 1.49)}
"""Figure 6, from the text of 3.2.1: {(GEMM's units, all-reduce's units): (all-reduce slowdown, GEMM slowdown, speedup)}."""
MORE_UNITS = 2


def simulate_splits(gpu: TrackingGpu) -> Record:
    """Simulate GEMM and all-reduce on separate parts of the GPU's compute units (figure 6), each without the other.

    The GEMMs are OP (the attention's output projection) and FC-2 (the second MLP layer) of Mega-GPT-2 and T-NLG, on 8
    ranks.
    """
    cells: list[dict[str, Any]] = []
    for network, ranks, layer, gemm in sublayers(large=False):
        if ranks != 8 or layer not in ("OP", "FC-2"):
            continue
        for of_gemm, of_ring in SPLITS:
            units = 0 if of_ring == of_gemm else of_ring
            ring = reduce_scatter(gemm.out_bytes, ranks, gpu, units=units).us
            ring += all_gather(gemm.out_bytes, ranks, gpu, units=units).us
            gemm_us = alone(gemm, gpu.with_values({"gpu.units": of_gemm})).gemm_us
            cells.append(
                {"name": f"{network.name} {layer}", "split": [of_gemm, of_ring], "gemm_us": gemm_us, "ring_us": ring}
            )
    return {"figure": "6", "cells": cells}


def splits(record: Record) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Return {(compute units of the GEMM, of the all-reduce): (slowdown of the all-reduce, of the GEMM, speedup)}.

    The values are geometric means over GEMMs. A slowdown is relative to the time on all units. The speedup compares concurrent
    execution of GEMM and all-reduce with execution one after the other.
    """
    cells = record["cells"]

    def of(split: tuple[int, int]) -> list[Record]:
        return [cell for cell in cells if tuple(cell["split"]) == split]

    whole, found = of(SPLITS[0]), {}
    for split in SPLITS:
        pairs = list(zip(whole, of(split), strict=True))
        ring = (geomean([b["ring_us"] / a["ring_us"] for a, b in pairs]) or 0.0) - 1
        gemm = (geomean([b["gemm_us"] / a["gemm_us"] for a, b in pairs]) or 0.0) - 1
        speedup = geomean([(a["gemm_us"] + a["ring_us"]) / max(b["gemm_us"], b["ring_us"]) for a, b in pairs]) or 0.0
        found[split] = ring, gemm, speedup
    return found


def splits_table(record: Record) -> ResultTable:
    lines = [(split, *numbers) for split, numbers in splits(record).items()]

    def beside(ours: float, paper: float | None, form: str) -> str:
        return f"{ours:{form}}" + ("" if paper is None else f" ({paper:{form}})")

    columns: dict[str, Callable[[Any], str]] = {
        "units of GEMM - all-reduce": lambda line: "ideal" if line[0] == SPLITS[0] else "{}-{}".format(*line[0]),
        "all-reduce slower": lambda line: beside(line[1], PAPER_SPLITS[line[0]][0], ".0%"),
        "GEMM slower": lambda line: beside(line[2], PAPER_SPLITS[line[0]][1], ".0%"),
        "speedup": lambda line: beside(line[3], PAPER_SPLITS[line[0]][2], ".2f"),
    }
    return table(
        "Compute units split between a GEMM and an all-reduce: geometric means, with the paper's in brackets (figure 6)",
        lines,
        columns,
    )


def simulate_ring(gpu: TrackingGpu) -> Record:
    """Simulate a ring reduce-scatter alone on four GPUs, by a kernel and by near-memory adds, for several sizes (figure 14)."""
    found = [
        [size, reduce_scatter(size * 2**20, 4, gpu).us, reduce_scatter(size * 2**20, 4, gpu, near_memory=True).us]
        for size in MEGABYTES
    ]
    return {"figure": "14", "sizes": found, "link": gpu["link.bandwidth"], "latency": gpu["link.latency"]}


def ring_bound_us(record: Record, mebibytes: float) -> float:
    """Return a lower bound in us of a ring reduce-scatter of `mebibytes` MiB on four GPUs: the time of its bytes on the
    links.
    """
    us: float = 3 * (mebibytes * 2**20 / 4 / record["link"] + record["latency"]) * 1e6
    return us


def ring_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "MiB on each rank": lambda line: str(line[0]),
        "by a kernel, us": lambda line: f"{line[1]:.0f}",
        "with near-memory adds, us": lambda line: f"{line[2]:.0f}",
        "its links alone, us": lambda line: f"{ring_bound_us(record, line[0]):.0f}",
        "kernel over links": lambda line: f"{line[1] / ring_bound_us(record, line[0]):.3f}",
    }
    return table("A reduce-scatter alone, four GPUs (figure 14)", record["sizes"], columns)


def simulate_traffic(gpu: TrackingGpu, bins: int = 120) -> Record:
    """Simulate the memory traffic over time of a sub-layer: with the GEMM alone, with T3, and with T3-MCA (figure 17).

    The sub-layer is T-NLG's second MLP layer (FC-2) on 8 ranks, with 4K tokens.

    bins: the number of time intervals in which bytes are counted.
    """
    gemm = HardwareGemm(4096, 4256, 4 * 4256 // 8)
    output = ring_reduce_scatter(gemm.tiles(gpu), 8)
    bin_us = 1.6 * gemm.flop / (gpu.peak * gpu["gpu.efficiency"]) * 1e6 / bins
    runs = {
        "GEMM alone": alone(gemm, gpu, bin_us=bin_us),
        "T3": fused(gemm, output, 8, gpu, "round_robin", bin_us=bin_us),
        "T3-MCA": fused(gemm, output, 8, gpu, "mca", bin_us=bin_us),
    }
    return {
        "figure": "17", "bin_us": bin_us,
        "runs": {
            name: {"gemm_us": run.gemm_us, "us": run.us, "bins": [[round(b) for b in one] for one in run.bins]}
            for name, run in runs.items()
        },
    }  # fmt: skip


def draw_traffic(directory: Path, record: Record) -> Path:
    path, bin_us = directory / "figure-17-traffic.png", record["bin_us"]
    colours = dict(
        zip(
            ("GEMM reads", "GEMM writes", "RS reads", "RS updates"),
            ("#24476b", "#7da7d9", "#a34040", "#e0a0a0"),
            strict=True,
        )
    )
    title = "Memory's traffic in T-NLG's FC-2 on 8 ranks, 4K tokens (figure 17); the line is the end of the GEMM"
    with figure(path, title, (12, 7), panels=len(record["runs"])) as axes:
        for axis, (name, run) in zip(axes, record["runs"].items(), strict=True):
            times = [bin_us * i for i in range(len(run["bins"]))]
            below = [0.0] * len(times)
            for i, (kind, colour) in enumerate(colours.items()):
                part = [one[i] / bin_us / 1e3 for one in run["bins"]]
                axis.bar(times, part, bin_us, bottom=below, color=colour, label=kind, align="edge")
                below = [a + b for a, b in zip(below, part, strict=True)]
            axis.axvline(run["gemm_us"], color="black", linewidth=1)
            axis.set_ylabel(f"{name}\nGB/s", fontsize=9)
            axis.set_xlim(0, 1.02 * max(bin_us * len(one["bins"]) for one in record["runs"].values()))
        axes[-1].set_xlabel("us", fontsize=9)
    return path


def simulate_more_units(gpu: TrackingGpu) -> Record:
    """Simulate T3 on a GPU with twice the compute units ("GPU-2X-CU", figure 20), and on the same GPU with faster
    memory or faster links.

    The sub-layers are OP (the attention's output projection) and FC-2 (the second MLP layer) of all networks.
    """
    units = {str(times): _with_units(gpu, times) for times in (1, MORE_UNITS)}
    other = other_reading()
    readings = {
        "as it is": units,
        "and twice the memory's rate": {
            **units, str(MORE_UNITS): _with_units(gpu.scaled("memory.effective", MORE_UNITS), MORE_UNITS),
        },
        "links of 150 GB/s in each direction": {str(times): _with_units(other, times) for times in (1, MORE_UNITS)},
    }  # fmt: skip
    lines = [[name, gain_with_more_units({"units": of})] for name, of in readings.items()]
    return {"figure": "20", "units": units, "readings": lines}


def _with_units(gpu: TrackingGpu, times: int) -> list[list[Any]]:
    which = [one for large in (False, True) for one in sublayers(large) if one[2] in ("OP", "FC-2")]
    rows = rows_on(gpu.with_values({"gpu.units": times * gpu.count("gpu.units")}), which)
    return [[row.name, row.speedup("ideal"), row.speedup("t3-mca")] for row in rows]


def more_units_readings_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "with twice the units": lambda line: line[0],
        "FC-2 layers that gain more, T3-MCA": lambda line: "{} of {}".format(*line[1]["FC-2"]),
        "FC-2 layers that gain more, ideal": lambda line: "{} of {}".format(*line[1]["ideal"]),
        "OP layers that gain more, T3-MCA": lambda line: "{} of {}".format(*line[1]["OP"]),
    }
    return table(
        "Which sub-layers gain more with twice the compute units, also with faster memory or links (figure 20)",
        record["readings"],
        columns,
    )


def more_units_table(record: Record) -> ResultTable:
    once, twice = (record["units"][str(times)] for times in (1, MORE_UNITS))
    columns: dict[str, Callable[[Any], str]] = {
        "sub-layer": lambda pair: pair[0][0],
        "ideal": lambda pair: f"{pair[0][1]:.2f}x",
        "ideal, 160 units": lambda pair: f"{pair[1][1]:.2f}x",
        "T3-MCA": lambda pair: f"{pair[0][2]:.2f}x",
        "T3-MCA, 160 units": lambda pair: f"{pair[1][2]:.2f}x",
        "gains": lambda pair: "more" if pair[1][2] > pair[0][2] else "less",
    }
    return table(
        "Speedups with twice the compute units (figure 20, GPU-2X-CU)", list(zip(once, twice, strict=True)), columns
    )


def gain_with_more_units(record: Record) -> dict[str, tuple[int, int]]:
    """Return {name: (how many sub-layers have a larger speedup with twice the compute units, number of sub-layers)}.

    The names are "OP" and "FC-2", for the speedup of T3-MCA on these sub-layers, and "ideal", for the ideal speedup on
    FC-2.
    """
    pairs = list(zip(*(record["units"][str(times)] for times in (1, MORE_UNITS)), strict=True))
    found = {}
    for key, layer, column in (("OP", " OP,", 2), ("FC-2", " FC-2,", 2), ("ideal", " FC-2,", 1)):
        of = [pair for pair in pairs if layer in pair[0][0]]
        found[key] = sum(twice[column] > once[column] for once, twice in of), len(of)
    return found


def simulate_direct(gpu: TrackingGpu) -> Record:
    """Simulate T-NLG's sub-layers on a full mesh, where GEMMs store each chunk directly at its owner instead of along a
    ring (section 7.1). All links of the mesh together have the bandwidth of the ring's links.
    """
    lines = []
    for network, ranks, layer, gemm in sublayers(large=False):
        if network.name != "T-NLG" or layer == "FC-1":
            continue
        tiles = gemm.tiles(gpu)
        ring = ring_reduce_scatter(tiles, ranks)
        direct = direct_reduce_scatter(tiles, ranks, per_rank=tiles // ranks, sliced=True)
        runs = [fused(gemm, output, ranks, gpu, how) for output in (ring, direct) for how in ("round_robin", "mca")]
        accesses = [(run.memory_bytes - run.gemm_read) / gemm.out_bytes for run in (runs[1], runs[3])]
        lines.append([f"{layer}, {ranks} ranks", *(run.us for run in runs), *accesses])
    return {"figure": "7.1", "lines": lines}


def direct_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "sub-layer of T-NLG": lambda line: line[0],
        "ring: T3 us": lambda line: f"{line[1]:.0f}",
        "ring: T3-MCA us": lambda line: f"{line[2]:.0f}",
        "direct: T3 us": lambda line: f"{line[3]:.0f}",
        "direct: T3-MCA us": lambda line: f"{line[4]:.0f}",
        "ring: accesses except GEMM reads": lambda line: f"{line[5]:.2f} outputs",
        "direct: accesses except GEMM reads": lambda line: f"{line[6]:.2f} outputs",
    }
    title = "A direct reduce-scatter on a full mesh (section 7.1): GEMM and reduce-scatter, without the all-gather"
    return table(title, record["lines"], columns)


def without_stagger(tiles: int, world: int, rank: int) -> OutputMap:
    """Return a ring output map with which all ranks compute chunks in the same order. In T3's own order each rank
    begins with a different chunk (section 4.4).

    tiles: the number of output tiles.
    """
    ring = ring_reduce_scatter(tiles, world, rank=rank)
    entries = tuple(replace(entry, chunk=(rank + 1 + entry.chunk) % world) for entry in ring.entries)
    return OutputMap(tiles, world, order=tuple(range(world)), entries=entries)


def simulate_stagger(gpu: TrackingGpu) -> Record:
    """Simulate T-NLG's sub-layers with T3-MCA, with staggered chunks and with the same order on all ranks (section 4.4)."""
    lines = []
    for network, ranks, layer, gemm in sublayers(large=False):
        if network.name != "T-NLG" or layer == "FC-1":
            continue
        tiles = gemm.tiles(gpu)
        us = fused(gemm, ring_reduce_scatter(tiles, ranks), ranks, gpu, "mca").us
        runs = fused_on_all(gemm, [without_stagger(tiles, ranks, rank) for rank in range(ranks)], gpu, "mca")
        lines.append([f"{layer}, {ranks} ranks", us, max(run.us for run in runs)])
    return {"figure": "4.4", "lines": lines}


def stagger_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "sub-layer of T-NLG": lambda line: line[0],
        "staggered us": lambda line: f"{line[1]:.0f}",
        "all ranks in one order us": lambda line: f"{line[2]:.0f}",
        "slower": lambda line: f"{line[2] / line[1] - 1:.0%}",
    }
    return table(
        "Chunks in staggered order (section 4.4): the slowest rank's time of GEMM and reduce-scatter by T3-MCA",
        record["lines"],
        columns,
    )


def networks_table() -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "network": lambda n: n.name,
        "hidden": lambda n: str(n.hidden),
        "tokens": lambda n: str(n.tokens),
        "ranks": lambda n: ", ".join(map(str, n.ranks)),
    }
    return table("Networks (table 2)", NETWORKS, columns)


def stages_table(gpu: TrackingGpu) -> ResultTable:
    """Return a table of a GEMM whose k is split over ranks (figure 5). More ranks do not change the numbers of
    work-groups and stages, but reduce the work of each.
    """
    whole, lines = HardwareGemm(8192, 4256, 4 * 4256), []
    for ranks in (1, 8, 16):
        gemm = HardwareGemm(whole.tokens, whole.features, whole.k // ranks)
        tiles = gemm.tiles(gpu)
        stages = -(-tiles // (gpu.count("gpu.units") * gpu.count("gemm.per_unit")))
        lines.append((ranks, gemm.k, tiles, stages, gemm.flop / tiles / 1e6))
    columns: dict[str, Callable[[Any], str]] = {
        "ranks": lambda line: str(line[0]),
        "k": lambda line: str(line[1]),
        "work-groups": lambda line: str(line[2]),
        "stages": lambda line: str(line[3]),
        "MFLOP of a work-group": lambda line: f"{line[4]:.0f}",
    }
    return table("Work-groups of T-NLG's FC-2 if its k is divided by the number of ranks (figure 5)", lines, columns)


def step_table() -> ResultTable:
    """Return a table of the memory accesses in each step of the ring reduce-scatter, sequential and with T3 (figure
    10). The unit is a chunk.
    """
    lines = [
        ("first", "1 read", "none: the GEMM stores at the peer"),
        ("steady", "2 reads, 1 write", "1 read, 1 update"),
        ("last", "2 reads, 1 write", "1 update"),
        ("in all, N ranks", "2N - 1 reads, N writes", "N - 2 reads, N - 1 updates"),
        ("GEMM's stores", "N", "N - 1"),
    ]
    columns: dict[str, Callable[[Any], str]] = {
        "step": lambda line: line[0], "sequential": lambda line: line[1], "T3": lambda line: line[2],
    }  # fmt: skip
    return table("Accesses to a GPU's memory, in chunks of the output (figure 10)", lines, columns)


def simulate_sensitivity(gpu: TrackingGpu, step: Callable[[str], None] = lambda what: None) -> Record:
    """Simulate T-NLG's eight sub-layers with each assumed or derived number changed by -20% and by +20%. Each line of
    the record has a change, and the mean speedups.
    """
    which = [one for one in sublayers(large=False) if one[0].name == "T-NLG"]
    lines = [["none", None, *_means(gpu, which)]]
    for key, quantity in gpu.quantities.items():
        if quantity.source not in ("assumed", "derived") or key in ("gemm.raster_turns", "kernel.unit"):
            continue
        step(f"{key} at 80% and 120%")
        for factor in (0.8, 1.2):
            with suppress(ValueError):  # fewer ways than wavefronts, or chunks with unequal numbers of tiles
                changed = gpu.scaled(key, factor)
                if changed[key] != gpu[key]:
                    lines.append([key, changed[key] / gpu[key], *_means(changed, which)])
    return {"figure": "sensitivity", "lines": lines}


def _means(gpu: TrackingGpu, which: Sequence[Any]) -> list[float]:
    means = summary(rows_on(gpu, which))
    return [means[variant][0] for variant in VARIANTS[1:]]


def sensitivity_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "number": lambda line: line[0] if line[1] is not None else "as it is",
        "multiplied by": lambda line: "" if line[1] is None else f"{line[1]:.2f}",
        "T3": lambda line: f"{line[2]:.3f}x",
        "T3-MCA": lambda line: f"{line[3]:.3f}x",
        "ideal": lambda line: f"{line[4]:.3f}x",
    }
    return table(
        "Geometric means of speedups on T-NLG with one assumed or derived number changed", record["lines"], columns
    )


ASSUMPTIONS: Mapping[str, tuple[Mapping[str, float], OwnWrites]] = {
    "as it is": ({}, "watermarks"),
    "own stores in order with own reads": ({}, "in_order"),
    "own stores take turns with own reads": ({}, "alternating"),
    "own stores after all own reads": ({}, "after_reads"),
    "two work-groups on a unit": ({"gemm.per_unit": 2}, "watermarks"),
    "tiles of 128 x 128": ({"gemm.tile_features": 128}, "watermarks"),
    "tiles of 128 x 128, two columns at a time": ({"gemm.tile_features": 128, "gemm.raster_columns": 2}, "watermarks"),
    "tiles two columns at a time": ({"gemm.raster_columns": 2}, "watermarks"),
    "tiles of 256 tokens, 128 features": ({"gemm.tile_tokens": 256, "gemm.tile_features": 128}, "watermarks"),
    "operands two slabs ahead": ({"gemm.ahead": 3}, "watermarks"),
    "copies of whole tiles": ({"copies.block": 8}, "watermarks"),
    "every column of tiles from its top": ({"gemm.raster_turns": 0}, "watermarks"),
    "copies read at most 256 KiB ahead": ({"copies.window": 262144e-9}, "watermarks"),
    "updates at 1.25 times a store, as the DRAM's timings give": ({"memory.update": 1.25}, "watermarks"),
    "updates as quick as stores": ({"memory.update": 1}, "watermarks"),
    "a tracker without limits": ({"tracker.sets": 0}, "watermarks"),
}


def simulate_assumptions(step: Callable[[str], None] = lambda what: None) -> Record:
    """Simulate the sixteen sub-layers of Mega-GPT-2 and T-NLG under other assumptions about hardware and GEMM
    (`ASSUMPTIONS`). Each line of the record has an assumption, and the mean results.
    """
    which, lines = list(sublayers(large=False)), []
    for name, (values, own_writes) in ASSUMPTIONS.items():
        step(name)
        rows = rows_on(t3_gpu().with_values(values), which, own_writes)
        means = summary(rows)
        reads = [geomean([row.less("GEMM reads") for row in rows if row.ranks == ranks]) for ranks in (8, 16)]
        lines.append(
            [
                name,
                *(means[variant][0] for variant in VARIANTS[1:4]),
                *reads,
                sum(row.saved for row in rows) / len(rows),
            ]
        )
    return {"figure": "assumptions", "lines": lines}


def assumptions_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "assumption": lambda line: line[0],
        "T3": lambda line: f"{line[1]:.3f}x",
        "T3-MCA": lambda line: f"{line[2]:.3f}x",
        "ideal": lambda line: f"{line[3]:.3f}x",
        "fewer reads of the GEMM, 8 ranks": lambda line: f"{line[4]:.2f}x",
        "fewer reads of the GEMM, 16 ranks": lambda line: f"{line[5]:.2f}x",
        "accesses saved": lambda line: f"{line[6]:.0%}",
    }
    return table("Geometric means under other assumptions", record["lines"], columns)


def simulate_dram(gpu: TrackingGpu) -> Record:
    """Return a record of the memory bandwidths that DRAM timings give for the access patterns of GEMM and ring."""
    rates = [[name, dram.rate(accesses, gpu.count("memory.channels"))] for name, accesses in dram.patterns().items()]
    return {"figure": "dram", "rates": rates, "update": dram.update_ratio(), "effective": gpu["memory.effective"]}


def dram_table(record: Record) -> ResultTable:
    columns: dict[str, Callable[[Any], str]] = {
        "accesses": lambda line: line[0],
        "TB/s": lambda line: f"{line[1] / 1e12:.2f}",
        "relative to the derived rate": lambda line: f"{line[1] / record['effective']:.2f}",
    }
    title = (
        f"Memory bandwidth from DRAM timings (the rate derived from the paper is {record['effective'] / 1e12:g} TB/s). "
        f"Updates of a tile take {record['update']:.2f} times as long as its stores"
    )
    return table(title, record["rates"], columns)
