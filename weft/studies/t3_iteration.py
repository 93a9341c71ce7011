"""T3's whole iterations: training and the prompt phase of Transformers, from the times of their sub-layers (figures 4 and 19).

The paper scales the breakdown of MLPerf's BERT on one MI210, which it does not give. Here an iteration is made from the
simulated GEMMs and collectives:

    forward    IP, OP + collective, FC-1, FC-2 + collective
    backward   FC-2, FC-1 + collective, OP, IP + collective, and the gradients of the four weights

A GEMM without a collective takes the time of the one with the same sizes that has it. All else (attention, element-wise
operations, updates) is `rest` of the sequential iteration: the paper names 40 to 45% for the attention (6.3). So a speedup of
sub-layers is all that is simulated, and `rest` is assumed.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 2.4, 5.1.2, 6.3 and 6.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.bench.core.tables import Record, ResultTable, geomean, table
from weft.sim.memory_controller import HardwareGemm, TrackingGpu, all_gather, alone, reduce_scatter
from weft.studies.t3 import LAYERS, Network
from weft.studies.t3_sublayers import HardwareRow

REST = 0.425
RESTS = (0.3, 0.4, REST, 0.45)
Phase = Literal["training", "prompt"]
PHASES: tuple[Phase, Phase] = ("training", "prompt")
FUTURE = (Network("1T", 25600, 2048, (64,), True), Network("10T", 65536, 2048, (64,), True))
"""The futuristic networks of 2.4, whose sizes the paper does not give: hidden sizes for 128 and 194 layers, both assumed."""
PAPER: Mapping[tuple[str, bool], Mapping[str, tuple[int | None, int | None]]] = {
    ("training", False): {"t3": (7, 9), "t3-mca": (10, 12)}, ("prompt", False): {"t3": (9, 12), "t3-mca": (12, 15)},
    ("training", True): {"t3-mca": (None, 12)}, ("prompt", True): {"t3-mca": (None, 14)},
}  # fmt: skip
"""(geometric mean, most) in percent, by phase and whether the networks are the large ones (6.3, 6.4)."""


@dataclass(frozen=True)
class Iteration:
    """The parts of a layer in us, without what is assumed about the rest. saved: the saved time by configuration."""

    name: str
    large: bool
    gemms: float
    sliced: float
    collectives: float
    saved: Mapping[str, float]

    def total(self, rest: float = REST) -> float:
        return (self.gemms + self.collectives) / (1 - rest)

    def speedup(self, variant: str, rest: float = REST) -> float:
        return self.total(rest) / (self.total(rest) - self.saved[variant])


def iterations(rows: Sequence[HardwareRow], phase: Phase) -> Iterator[Iteration]:
    """Yield the iteration of each network and number of ranks."""
    for name, ranks in dict.fromkeys((row.network, row.ranks) for row in rows):
        of = {row.layer: row for row in rows if (row.network, row.ranks) == (name, ranks)}
        reduced = [of["OP"], of["FC-2"]] + [of["FC-1"], of["IP"]] * (phase == "training")
        once = sum(row.gemm for row in of.values())
        saved = {v: sum(row.us("sequential") - row.us(v) for row in reduced) for v in ("t3", "t3-mca", "ideal")}
        yield Iteration(
            f"{name}, {ranks} ranks", of["OP"].large, once * (3 if phase == "training" else 1),
            sum(row.gemm for row in reduced), sum(row.scatter + row.gather for row in reduced), saved,
        )  # fmt: skip


def simulate_future(gpu: TrackingGpu) -> Record:
    """Return times of GEMMs and collectives of the networks of one and ten trillion parameters."""
    found = []
    for network in FUTURE:
        ranks, out = network.ranks[0], 2.0 * network.tokens * network.hidden
        gemms = {
            layer: alone(HardwareGemm(network.tokens, network.hidden, factor * network.hidden // ranks), gpu).gemm_us
            for layer, factor in LAYERS.items()
        }
        found.append([network.name, ranks, gemms, reduce_scatter(out, ranks, gpu).us, all_gather(out, ranks, gpu).us])
    return {"figure": "4", "networks": found}


def phases_of(rows: Sequence[HardwareRow], future: Record) -> list[tuple[str, list[Iteration]]]:
    """Return (name, iterations in the order of PHASES) of each network, the futuristic ones last."""
    lines: list[tuple[str, list[Iteration]]] = []
    of_phase = [list(iterations(rows, phase)) for phase in PHASES]
    lines += [(pair[0].name, list(pair)) for pair in zip(*of_phase, strict=True)]
    for name, ranks, gemms, scatter, gather in future["networks"]:
        once, pairs = sum(gemms.values()), []
        for phase in PHASES:
            layers = ["OP", "FC-2"] + ["FC-1", "IP"] * (phase == "training")
            sliced, collectives = sum(gemms[layer] for layer in layers), len(layers) * (scatter + gather)
            pairs.append(Iteration(name, True, once * (3 if phase == "training" else 1), sliced, collectives, {}))
        lines.append((f"{name}, {ranks} ranks", pairs))
    return lines


def shares_table(rows: Sequence[HardwareRow], future: Record) -> ResultTable:
    """Figure 4: what collectives take of an iteration, and with GEMMs twice as fast."""
    lines = phases_of(rows, future)
    columns: dict[str, Callable[[Any], str]] = {"network": lambda line: line[0]}
    for i, phase in enumerate(PHASES):
        columns[f"{phase}: collectives"] = lambda line, i=i: f"{line[1][i].collectives / line[1][i].total():.0%}"  # type: ignore[misc]
        columns[f"{phase}: GEMMs before them"] = lambda line, i=i: f"{line[1][i].sliced / line[1][i].total():.0%}"  # type: ignore[misc]
    columns["of the sub-layers"] = lambda line: f"{_share(line[1][1], line[1][1].sliced):.0%}"
    columns["with GEMMs twice as fast"] = lambda line: f"{share_with_faster_gemms(line[1][1]):.0%}"
    last = []
    for what, some, paper in (
        ("most of Mega-GPT-2 and T-NLG", [pair for _, pair in lines if not pair[0].large], ("34%", "43%")),
        ("most of the large and the futuristic", [pair for _, pair in lines if pair[0].large], ("46%", "44%")),
    ):
        shares = {
            f"{phase}: collectives": f"{max(pair[i].collectives / pair[i].total() for pair in some):.0%} ({of})"
            for i, (phase, of) in enumerate(zip(PHASES, paper, strict=True))
        }
        twice = f"{max(share_with_faster_gemms(pair[1]) for pair in some):.0%} (75%)"
        last.append({"network": what, **shares, "with GEMMs twice as fast": twice})
    title = "Share of an iteration that collectives take, and the paper's in brackets (figure 4); of the prompt's sub-layers alone"
    return table(title, lines, columns, last)


def share_with_faster_gemms(one: Iteration) -> float:
    """Return the share of collectives in sub-layers whose GEMMs are twice as fast."""
    return _share(one, one.sliced / 2)


def _share(one: Iteration, gemms: float) -> float:
    return one.collectives / (one.collectives + gemms)


def iterations_table(rows: Sequence[HardwareRow], title: str) -> ResultTable:
    """Figure 19: speedups of iterations, and the paper's."""
    cells: list[tuple[str, ...]] = []
    for phase in PHASES:
        found = list(iterations(rows, phase))
        large = found[0].large
        for one in found:
            cells.append(
                (f"{phase}: {one.name}", *(f"{100 * (one.speedup(v) - 1):.1f}%" for v in ("t3", "t3-mca", "ideal")))
            )
        for i, what in enumerate(("geometric mean", "most")):
            line = [f"{phase}: {what}"]
            for variant in ("t3", "t3-mca", "ideal"):
                paper = PAPER[phase, large].get(variant, (None, None))[i]
                speedups = [one.speedup(variant) for one in found]
                ours = f"{100 * ((max(speedups) if i else geomean(speedups) or 1.0) - 1):.1f}%"
                line.append(ours + ("" if paper is None else f" ({paper}%)"))
            cells.append(tuple(line))
    return ResultTable(title, ("iteration", "T3", "T3-MCA", "ideal"), cells)


def rest_table(rows: Sequence[HardwareRow]) -> ResultTable:
    """Return the speedups by T3-MCA if other fractions of the time are not simulated."""
    cells = []
    for rest in RESTS:
        line = [f"{rest:.1%}"]
        for phase in PHASES:
            speedups = [one.speedup("t3-mca", rest) for one in iterations(rows, phase)]
            line.append(f"{100 * ((geomean(speedups) or 1.0) - 1):.1f}%, at most {100 * (max(speedups) - 1):.1f}%")
        cells.append(tuple(line))
    title = "T3-MCA's speedup of iterations by the share of the rest"
    return ResultTable(title, ("rest of the iteration", "training", "prompt"), cells)


def largest_deviation(rows: Mapping[bool, Sequence[HardwareRow]]) -> str:
    """Return a sentence on the largest deviation from the paper, and on the share of the rest with which it is least."""

    def off(rest: float) -> float:
        found = []
        for (phase, large), paper in PAPER.items():
            of = list(iterations(rows[large], phase))  # type: ignore[arg-type]
            for variant, (mean, most) in paper.items():
                speedups = [100 * (one.speedup(variant, rest) - 1) for one in of]
                found.append(abs(max(speedups) - most) if most is not None else 0.0)
                ours = 100 * ((geomean([1 + s / 100 for s in speedups]) or 1.0) - 1)
                found.append(abs(ours - mean) if mean is not None else 0.0)
        return max(found)

    best = min(RESTS, key=off)
    return (
        f"at most {off(REST):.1f} points off the paper's speedups with {REST:.1%} of the iteration outside of what is simulated; "
        f"with {best:.0%} at most {off(best):.1f}."
    )
