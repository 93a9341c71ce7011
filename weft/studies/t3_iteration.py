"""T3's whole iterations: training and the prompt phase of Transformers, from the times of their sub-layers (figures 4
and 19).

The paper scales an unpublished breakdown of MLPerf's BERT on one MI210. Here an iteration consists of the simulated
GEMMs and collectives:

    forward    IP, OP + collective, FC-1, FC-2 + collective
    backward   FC-2, FC-1 + collective, OP, IP + collective, and the gradients of the four weights

The four GEMMs with a collective are simulated. The other GEMMs of the same weights are assumed to take as long: FC-1 in
the forward pass takes as long as FC-1 in the backward pass. The other operations of a Transformer (without fused
attention) are estimated by a roofline. Each reads and writes memory at the bandwidth of table 1:

    attention        two GEMMs, and passes over the scores [tokens, sequence, heads / ranks]: scale, mask, softmax, dropout
    element-wise     dropout, residual and norm, twice, over [tokens, hidden], not sharded; bias and GeLU of the MLP
    update           weights, gradients and Adam's two states in fp32, in training

The backward pass moves twice the bytes of the forward pass. The paper attributes 40 to 45% of an iteration to attention (6.3),
without a breakdown. The roofline attributes less. `deviations` shows how far the speedups are from the paper's with each of the
two assumptions.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 2.4, 5.1.2, 6.3 and
6.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.bench.core.tables import Record, ResultTable, geomean, table
from weft.sim.memory_controller import HardwareGemm, TrackingGpu, all_gather, alone, reduce_scatter, t3_gpu
from weft.studies.t3 import LAYERS, NETWORKS, Network
from weft.studies.t3_sublayers import HardwareRow

REST = 0.425
RESTS = (0.2, 0.3, 0.4, REST, 0.45)
SEQUENCE, HEAD = 1024, 128
"""The number of tokens of a sequence (table 2), and the size of an attention head (assumed)."""
PASSES = {"scores": 10, "hidden": 14, "mlp": 4}
"""The assumed numbers of reads and writes in a forward pass. scores: written, scaled, masked, softmax, dropout, read. hidden:
dropout, residual and norm, twice. mlp: bias and GeLU."""
UPDATE_BYTES = 28
"""The bytes of Adam's update per parameter: four reads and three writes in fp32, assumed."""
_TITLES = {"t3": "T3", "t3-mca": "MCA"}
Phase = Literal["training", "prompt"]
PHASES: tuple[Phase, Phase] = ("training", "prompt")
FUTURE = (Network("1T", 25600, 2048, (64,), True), Network("10T", 65536, 2048, (64,), True))
"""The futuristic networks of 2.4. The paper does not give their sizes. With an assumed number of 128 and 194 layers, these hidden
sizes give the numbers of parameters."""
_NETWORKS = {network.name: network for network in (*NETWORKS, *FUTURE)}
PAPER: Mapping[tuple[str, bool], Mapping[str, tuple[int | None, int | None]]] = {
    ("training", False): {"t3": (7, 9), "t3-mca": (10, 12)}, ("prompt", False): {"t3": (9, 12), "t3-mca": (12, 15)},
    ("training", True): {"t3-mca": (None, 12)}, ("prompt", True): {"t3-mca": (None, 14)},
}  # fmt: skip
"""{(phase, True for the large networks): (geometric mean, maximum) in percent} (6.3, 6.4)."""


@dataclass(frozen=True)
class Iteration:
    """The times in us of the parts of one Transformer layer in an iteration. All layers are equal, so the whole network
    has the same ratios of times.

    gemms: all GEMMs.
    sliced: the GEMMs before a collective.
    collectives: all collectives.
    saved: the time that each configuration, such as "t3-mca", saves.
    rest: the time of each kind of operation that the roofline estimates.
    """

    name: str
    large: bool
    gemms: float
    sliced: float
    collectives: float
    saved: Mapping[str, float]
    rest: Mapping[str, float]

    def total(self, rest: float | None = None, times: float = 1.0) -> float:
        """Return the time of a layer in us, in an iteration without overlap.

        rest: the fraction of this time in which operations run that are not simulated. None to estimate them by the
        roofline, times the factor `times`.
        """
        simulated = self.gemms + self.collectives
        return simulated + times * sum(self.rest.values()) if rest is None else simulated / (1 - rest)

    def speedup(self, variant: str, rest: float | None = None, times: float = 1.0) -> float:
        total = self.total(rest, times)
        return total / (total - self.saved[variant])


def roofline_us(hidden: int, tokens: int, ranks: int, phase: Phase, gpu: TrackingGpu) -> dict[str, float]:
    """Return {kind of operation: time in us} for the operations of a layer that are not simulated: attention,
    element-wise operations, and in training the update of weights.
    """
    scores = tokens * SEQUENCE * hidden / HEAD / ranks
    flop = 4 * tokens * SEQUENCE * hidden / ranks
    attention = 2 * PASSES["scores"] * scores / gpu["memory.bandwidth"] + flop / (gpu.peak * gpu["gpu.efficiency"])
    others = 2 * tokens * hidden * (PASSES["hidden"] + PASSES["mlp"] * 4 / ranks) / gpu["memory.bandwidth"]
    times, update = (
        (3, UPDATE_BYTES * 12 * hidden**2 / ranks / gpu["memory.bandwidth"]) if phase == "training" else (1, 0.0)
    )
    return {"attention": 1e6 * times * attention, "element-wise": 1e6 * times * others, "update": 1e6 * update}


def iterations(rows: Sequence[HardwareRow], phase: Phase) -> Iterator[Iteration]:
    """Yield an `Iteration` for each network and number of ranks in `rows`."""
    for name, ranks in dict.fromkeys((row.network, row.ranks) for row in rows):
        of = {row.layer: row for row in rows if (row.network, row.ranks) == (name, ranks)}
        reduced = [of["OP"], of["FC-2"]] + [of["FC-1"], of["IP"]] * (phase == "training")
        once = sum(row.gemm for row in of.values())
        saved = {v: sum(row.us("sequential") - row.us(v) for row in reduced) for v in ("t3", "t3-mca", "ideal")}
        yield Iteration(
            f"{name}, {ranks} ranks", of["OP"].large, once * (3 if phase == "training" else 1),
            sum(row.gemm for row in reduced), sum(row.scatter + row.gather for row in reduced), saved,
            roofline_us(_NETWORKS[name].hidden, _NETWORKS[name].tokens, ranks, phase, t3_gpu()),
        )  # fmt: skip


def simulate_future(gpu: TrackingGpu) -> Record:
    """Simulate the GEMMs and collectives of two imagined networks, with one and with ten trillion parameters (section 2.4)."""
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
    """Return (name, [iteration of training, iteration of the prompt phase]) for each network and number of ranks. The networks
    of the record `future`, with trillions of parameters, come last.
    """
    lines: list[tuple[str, list[Iteration]]] = []
    of_phase = [list(iterations(rows, phase)) for phase in PHASES]
    lines += [(pair[0].name, list(pair)) for pair in zip(*of_phase, strict=True)]
    for name, ranks, gemms, scatter, gather in future["networks"]:
        once, pairs = sum(gemms.values()), []
        for phase in PHASES:
            layers = ["OP", "FC-2"] + ["FC-1", "IP"] * (phase == "training")
            sliced, collectives = sum(gemms[layer] for layer in layers), len(layers) * (scatter + gather)
            network = _NETWORKS[name]
            rest = roofline_us(network.hidden, network.tokens, ranks, phase, t3_gpu())
            pairs.append(Iteration(name, True, once * (3 if phase == "training" else 1), sliced, collectives, {}, rest))
        lines.append((f"{name}, {ranks} ranks", pairs))
    return lines


def shares_table(rows: Sequence[HardwareRow], future: Record) -> ResultTable:
    """Return a table of the collectives' fraction of an iteration (figure 4).

    The last columns show the collectives' fraction of the time of sub-layers, now and with GEMMs that are twice as fast.
    """
    lines = phases_of(rows, future)
    columns: dict[str, Callable[[Any], str]] = {"network": lambda line: line[0]}
    for i, phase in enumerate(PHASES):
        columns[f"{phase}: collectives"] = lambda line, i=i: f"{line[1][i].collectives / line[1][i].total():.0%}"  # type: ignore[misc]
        columns[f"{phase}: GEMMs before them"] = lambda line, i=i: f"{line[1][i].sliced / line[1][i].total():.0%}"  # type: ignore[misc]
    columns["collectives in sub-layers"] = lambda line: f"{_share(line[1][1], line[1][1].sliced):.0%}"
    columns["the same with GEMMs twice as fast"] = lambda line: f"{share_with_faster_gemms(line[1][1]):.0%}"
    last = []
    for what, some, paper in (
        ("maximum of Mega-GPT-2 and T-NLG", [pair for _, pair in lines if not pair[0].large], ("34%", "43%")),
        ("maximum of the large and the futuristic", [pair for _, pair in lines if pair[0].large], ("46%", "44%")),
    ):
        shares = {
            f"{phase}: collectives": f"{max(pair[i].collectives / pair[i].total() for pair in some):.0%} ({of})"
            for i, (phase, of) in enumerate(zip(PHASES, paper, strict=True))
        }
        twice = f"{max(share_with_faster_gemms(pair[1]) for pair in some):.0%} (75%)"
        last.append({"network": what, **shares, "the same with GEMMs twice as fast": twice})
    title = (
        "Share of an iteration spent in collectives, with the paper's in brackets (figure 4). "
        "Last two columns: share of the time of the prompt phase's sub-layers"
    )
    return table(title, lines, columns, last)


def share_with_faster_gemms(one: Iteration) -> float:
    """Return the collectives' fraction of the time of sub-layers if GEMMs were twice as fast."""
    return _share(one, one.sliced / 2)


def _share(one: Iteration, gemms: float) -> float:
    return one.collectives / (one.collectives + gemms)


def iterations_table(rows: Sequence[HardwareRow], title: str) -> ResultTable:
    """Return a table of the speedups of iterations with T3 (figure 19); the paper's are in brackets."""
    cells: list[tuple[str, ...]] = []
    for phase in PHASES:
        found = list(iterations(rows, phase))
        large = found[0].large
        for one in found:
            cells.append(
                (f"{phase}: {one.name}", *(f"{100 * (one.speedup(v) - 1):.1f}%" for v in ("t3", "t3-mca", "ideal")))
            )
        for i, what in enumerate(("geometric mean", "maximum")):
            line = [f"{phase}: {what}"]
            for variant in ("t3", "t3-mca", "ideal"):
                paper = PAPER[phase, large].get(variant, (None, None))[i]
                speedups = [one.speedup(variant) for one in found]
                ours = f"{100 * ((max(speedups) if i else geomean(speedups) or 1.0) - 1):.1f}%"
                line.append(ours + ("" if paper is None else f" ({paper}%)"))
            cells.append(tuple(line))
    return ResultTable(title, ("iteration", "T3", "T3-MCA", "ideal"), cells)


def deviations(
    rows: Mapping[bool, Sequence[HardwareRow]], rest: float | None = None, times: float = 1.0
) -> dict[str, float]:
    """Return {name of a result: how far the model's speedup of iterations is from the paper's, in points}.

    rest, times: the assumption about operations that are not simulated, as for `Iteration.total`.
    rows: {False: sub-layers of Mega-GPT-2 and T-NLG, True: sub-layers of the large networks}.
    """
    found = {}
    for (phase, large), paper in PAPER.items():
        of = list(iterations(rows[large], phase))  # type: ignore[arg-type]
        for variant, numbers in paper.items():
            speedups = [one.speedup(variant, rest, times) for one in of]
            ours = geomean(speedups) or 1.0, max(speedups)
            for what, paper_s, mine in zip(("mean", "maximum"), numbers, ours, strict=True):
                if paper_s is not None:
                    name = f"{phase}{', large' * large}: {_TITLES[variant]}, {what}"
                    found[name] = 100 * (mine - 1) - paper_s
    return found


def rest_table(small: Sequence[HardwareRow], large: Sequence[HardwareRow]) -> ResultTable:
    """Return a table of `deviations` for several assumptions about operations that are not simulated."""
    rows = {False: small, True: large}
    lines = [("as by the roofline", deviations(rows))]
    lines += [(f"{times:g} times the roofline", deviations(rows, times=times)) for times in (0.8, 1.2)]
    lines += [(f"{rest:.1%} of the iteration", deviations(rows, rest)) for rest in RESTS]
    columns: dict[str, Callable[[Any], str]] = {"attention and all else": lambda line: line[0]}
    for name in lines[0][1]:
        columns[name] = lambda line, name=name: f"{line[1][name]:+.1f}"  # type: ignore[misc]
    columns["largest"] = lambda line: f"{max(map(abs, line[1].values())):.1f}"
    title = (
        "Deviations of iteration speedups from the paper, in points, by assumption about attention and other operations "
        "(section 6.3: 40 to 45%)"
    )
    return table(title, lines, columns)


def roofline_table(small: Sequence[HardwareRow], large: Sequence[HardwareRow]) -> ResultTable:
    """Return a table of each part's fraction of an iteration: GEMMs, collectives, and each kind of estimated operation."""
    lines = [(phase, one) for phase in PHASES for rows in (small, large) for one in iterations(rows, phase)]
    columns: dict[str, Callable[[Any], str]] = {"iteration": lambda line: f"{line[0]}: {line[1].name}"}
    columns["GEMMs"] = lambda line: f"{line[1].gemms / line[1].total():.0%}"
    columns["collectives"] = lambda line: f"{line[1].collectives / line[1].total():.0%}"
    for part in lines[0][1].rest:
        columns[part] = lambda line, part=part: f"{line[1].rest[part] / line[1].total():.0%}"  # type: ignore[misc]
    return table(
        "Shares of an iteration without overlap; the last three columns are roofline estimates", lines, columns
    )


def largest_deviation(rows: Mapping[bool, Sequence[HardwareRow]]) -> str:
    """Return sentences on the largest deviation from the paper's speedups of iterations. The sentences compare two assumptions
    about the operations that are not simulated: the roofline's time, and a fixed fraction of the iteration.
    """
    off, fixed = (max(map(abs, deviations(rows, rest).values())) for rest in (None, REST))
    return (
        f"Iteration speedups deviate from the paper by at most {off:.1f} points with the roofline. With a fixed {REST:.1%} for "
        f"attention and the rest, the maximum is {fixed:.1f}."
    )
