"""Measurement of the decomposition and contention losses of one GEMM and its all-gather.

    decomposition loss  time of the pieces of an operation, one after the other, divided by the time of the undivided operation
    contention loss     time of an operation while the other operation runs concurrently, divided by its time alone

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV-A.

Each repetition runs every variant. A variant has a lane (`weft.studies.losses_lanes`): a series of equal calls, one
after the other. For contention, a lane of GEMMs and a lane of all-gathers run concurrently. The numbers of calls are
chosen so that both lanes take equally long. Only the period in which both lanes run is evaluated. Timestamps of the
calls show how far each lane came in this period. The period's fraction of the whole time is recorded as `overlap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.bench.core.harness import Ranks, Timing, summarise
from weft.bench.core.measure import Step
from weft.bench.table_1 import GatheredGemm
from weft.studies.losses_lanes import TRANSPORTS, By, Call, CpuSide, CudaSide, Side, StudyLane, in_a_row, shard_bytes

PIECES = 8  # pieces of an all-gather, and of the concurrent GEMM
WHOLE = "whole"
CUTS = tuple((cut, pieces) for pieces in (8, 64) for cut in ("rows", "columns"))
_LEAST_CALLS = 3  # the fewest calls of each of two concurrent lanes
_MOST_CALLS = 20_000
_BALANCING = 2  # rounds of balancing two lanes
_LOOK_S = 2e-3  # the shortest reliable measurement
_LEAST_SHARE = 0.4
_ATTEMPTS = 5


def cut_name(cut: str, pieces: int) -> str:
    return f"{cut}-{pieces}"


def gather_name(by: By, pieces: int = PIECES) -> str:
    return f"gather-{by}-{pieces}"


def gemm_beside(by: By, pieces: int = PIECES) -> str:
    return f"{_BESIDE} beside {gather_name(by, pieces)}"


def gather_beside(by: By, pieces: int = PIECES) -> str:
    return f"{gather_name(by, pieces)} beside {_BESIDE}"


_BESIDE = cut_name("rows", PIECES)  # the GEMM that runs concurrently with an all-gather
PAIRS: tuple[tuple[By, int], ...] = (*((by, PIECES) for by in TRANSPORTS), ("dma", 1))
"""The all-gathers that run concurrently with `_BESIDE`: FiCCO's all-gathers in pieces, and whole shards by copy
engines, as in shard-based overlap (IV-D).
"""
# The baseline of each variant's loss. The undivided GEMM and the all-gathers in one piece have no baseline.
BASELINES = (
    {cut_name(*cut): WHOLE for cut in CUTS}
    | {gather_name(by): gather_name(by, 1) for by in TRANSPORTS}
    | {gemm_beside(*pair): _BESIDE for pair in PAIRS}
    | {gather_beside(*pair): gather_name(*pair) for pair in PAIRS}
)


@dataclass(frozen=True)
class Found:
    """The results of one GEMM, equal on all ranks.

    timings: for each variant, the time of the complete operation, in all its pieces.
    overlap: for variants with two concurrent lanes, the fraction of time in which both ran: the median over repetitions, on the
        rank with the smallest median.
    errors: the error of the GEMM in pieces, for each way to cut it (`check_cuts`).
    """

    timings: dict[str, Timing]
    overlap: dict[str, float]
    errors: dict[str, float]
    gathered_bytes: int


class MeasuringEffort(NamedTuple):
    """The duration of measurements.

    alone_s, beside_s: the least time in seconds for which a lane runs alone, and concurrently with another lane.
    repetitions: the number of recorded repetitions. They follow one repetition that is not recorded.
    """

    alone_s: float
    beside_s: float
    repetitions: int


def measure(gemm: GatheredGemm, dtype: torch.dtype, ranks: Ranks, effort: MeasuringEffort, step: Step) -> Found:
    """Check and time one GEMM and the all-gather of its A. Raise `RuntimeError` if a result is wrong. All ranks must
    make this call.

    step: called with a description of each piece of work and its fraction of all work.
    """
    step(f"{gemm.name}: checking pieces against the whole", 0)
    matrices = Matrices(gemm, dtype, ranks)
    errors = check_cuts(matrices)
    nbytes = shard_bytes(matrices.a.nbytes, ranks.world_size, PIECES)
    with (CudaSide if ranks.device.type == "cuda" else CpuSide)(ranks, nbytes) as side:
        alone = {WHOLE: StudyLane(matrices.whole, 1, "gemm")}
        alone |= {cut_name(cut, pieces): StudyLane(matrices.cut(cut, pieces), 1, "gemm") for cut, pieces in CUTS}
        for by in TRANSPORTS:
            for pieces in (1, PIECES):
                side.check(by, pieces)
                alone[gather_name(by, pieces)] = StudyLane(side.gather(by, pieces), 1, by)
        step(f"{gemm.name}: checking pieces against the whole", 1)
        pairs = make_lanes(alone, side, effort)
        variants: dict[str, tuple[StudyLane, ...]] = {**{name: (lane,) for name, lane in alone.items()}, **pairs}
        found = _repeat(variants, side, effort.repetitions, partial(step, f"{gemm.name}: timing"))
    values = {name: 1e3 * np.array(ranks.gather(mine)) for name, mine in found.items()}  # [rank, repetitions x values]
    timings = {name: summarise(values[name].T.tolist(), lane.count) for name, lane in alone.items()}
    overlap = {}
    for pair in PAIRS:
        both = gemm_beside(*pair)
        share = float(np.median(values[both][:, 2::3], axis=1).min()) / 1e3
        for i, name in enumerate((both, gather_beside(*pair))):
            timings[name] = summarise(values[both][:, i::3].T.tolist(), pairs[both][i].count)
            overlap[name] = share
    return Found(timings, overlap, errors, nbytes * ranks.world_size)


def make_lanes(
    alone: dict[str, StudyLane], side: Side, effort: MeasuringEffort
) -> dict[str, tuple[StudyLane, StudyLane]]:
    """Set the `count` of the lanes `alone` ({variant: lane}), and make the pairs of lanes for contention. Return
    {variant: (lane of the GEMM, lane of the all-gather)}. All ranks must make this call.
    """
    seconds = {name: _seconds(lane, side) for name, lane in alone.items()}
    for name, lane in alone.items():
        lane.count = min(math.ceil(effort.alone_s / seconds[name]), _MOST_CALLS)
    pairs: dict[str, tuple[StudyLane, StudyLane]] = {}
    for by, pieces in PAIRS:
        gather = gather_name(by, pieces)
        lanes = StudyLane(alone[_BESIDE].call, 1, "gemm"), StudyLane(alone[gather].call, 1, by)
        of_call = seconds[_BESIDE], seconds[gather]
        lasting = max(effort.beside_s, _LEAST_CALLS * max(of_call))
        _set_counts(lanes, [lasting / alone_s for alone_s in of_call])
        for _ in range(_BALANCING):
            balance(lanes, side.start(lanes), side)
        pairs[gemm_beside(by, pieces)] = lanes
    return pairs


def _repeat(
    variants: dict[str, tuple[StudyLane, ...]], side: Side, repetitions: int, advance: Callable[[float], object]
) -> dict[str, list[float]]:
    """Run all variants in each repetition. Return {variant: list of values}. A variant with one lane has one value per
    repetition, the seconds of a call. A variant with two lanes has three values per repetition, the values that
    `together` returns.
    """
    names, found = list(variants), {name: list[float]() for name in variants}
    for repetition in range(repetitions + 1):
        start = repetition % len(names)
        for name in names[start:] + names[:start]:
            lanes = variants[name]
            values = _play_together(lanes, side) if len(lanes) > 1 else _play_alone(lanes[0], side)
            found[name] += values if repetition else []
        advance(1 / (repetitions + 1))
    return found


def _play_together(lanes: tuple[StudyLane, ...], side: Side) -> list[float]:
    """Run two lanes concurrently, with more calls if they overlap too little, and return the result of `together`.
    Raise `RuntimeError` if no attempt has enough overlap on every rank.
    """
    for _ in range(_ATTEMPTS):
        marks = side.start(lanes)
        found = together(*marks)
        share = -side.ranks.most(-found[2])
        if share >= _LEAST_SHARE:
            return found
        balance(lanes, marks, side, longer=2)
    raise RuntimeError(
        f"GEMM and all-gather by {lanes[1].by} overlapped for only {share:.0%} of the time, in {_ATTEMPTS} "
        f"attempts, but {_LEAST_SHARE:.0%} is needed: stop other processes on this machine, and measure again"
    )


def together(gemm: Sequence[float], gather: Sequence[float]) -> list[float]:
    """Return [mean seconds of a GEMM, mean seconds of an all-gather, overlap] for two concurrent lanes.

    Both means are over the period in which both lanes ran. The overlap is the length of this period divided by the time
    from the first start to the last end. If the lanes never ran at the same time, both means are NaN and the overlap is
    0.

    gemm, gather: the timestamps in seconds of each lane's start and of the end of each call. Between two timestamps,
    progress is assumed to be linear.
    """
    first, last = max(gemm[0], gather[0]), min(gemm[-1], gather[-1])
    if not first < last:
        return [math.nan, math.nan, 0.0]
    calls = [float(np.diff(np.interp([first, last], marks, np.arange(len(marks))))[0]) for marks in (gemm, gather)]
    share = (last - first) / (max(gemm[-1], gather[-1]) - min(gemm[0], gather[0]))
    return [(last - first) / calls[0], (last - first) / calls[1], share]


def balance(lanes: tuple[StudyLane, ...], marks: Sequence[Sequence[float]], side: Side, longer: int = 1) -> None:
    """Change the numbers of calls in two lanes, so that both lanes take equally long: `longer` times the time of the slower
    lane. All ranks must make this call.

    marks: for each lane, the timestamps in seconds of its last run, as returned by `play`.
    longer: the factor by which the time of both lanes grows.
    """
    took = [side.ranks.most(lane[-1] - lane[0]) for lane in marks]
    _set_counts(lanes, [lane.count * longer * max(took) / s for lane, s in zip(lanes, took, strict=True)])


def _set_counts(lanes: Sequence[StudyLane], counts: Sequence[float]) -> None:
    fewer = min(1.0, _MOST_CALLS / max(counts))
    for lane, count in zip(lanes, counts, strict=True):
        lane.count = max(1, round(count * fewer))


def _seconds(lane: StudyLane, side: Side) -> float:
    """Return the seconds of one call of `lane` alone, on the slowest rank, after a first run that may load kernels."""
    for _ in range(2):
        found = max(1e-6, side.ranks.most(*_play_alone(lane, side)))
        lane.count = min(max(2, math.ceil(_LOOK_S / found)), 50)
    return found


def _play_alone(lane: StudyLane, side: Side) -> list[float]:
    """Run one lane alone. Return [mean seconds of a call]."""
    (marks,) = side.start([lane])
    return [(marks[-1] - marks[0]) / (len(marks) - 1)]


class Matrices:
    """Random A and B, an output matrix, and calls that multiply A and B by torch, undivided or in pieces."""

    def __init__(self, gemm: GatheredGemm, dtype: torch.dtype, ranks: Ranks) -> None:
        self.ranks = ranks
        of: dict[str, Any] = {"dtype": dtype, "device": ranks.device}
        self.a, self.b = torch.randn(gemm.m, gemm.k, **of), torch.randn(gemm.k, gemm.n, **of)
        self.out = torch.empty(gemm.m, gemm.n, **of)

    def whole(self) -> torch.Tensor:
        return torch.mm(self.a, self.b, out=self.out)

    def cut(self, cut: str, pieces: int) -> Call:
        """Return a call that computes the GEMM in pieces. A piece of rows computes its rows of the output. The products
        of pieces of columns are added up in the output.

        cut: "rows" or "columns": how A is divided.
        """
        if cut == "rows":
            parts = zip(self.a.tensor_split(pieces), self.out.tensor_split(pieces), strict=True)
            return in_a_row([partial(torch.mm, a, self.b, out=out) for a, out in parts])
        first, *rest = zip(self.a.tensor_split(pieces, dim=1), self.b.tensor_split(pieces), strict=True)
        return in_a_row([partial(torch.mm, *first, out=self.out), *(partial(self.out.addmm_, *ab) for ab in rest)])


def check_cuts(matrices: Matrices) -> dict[str, float]:
    """Compare the GEMM in pieces with the undivided GEMM. Return {cut: its error on the worst rank}. All ranks must
    make this call.

    An error is the root mean square of the difference, relative to the root mean square of the undivided result. Raise
    `RuntimeError` if an error exceeds the limit

        eps of the dtype * sqrt(number of pieces that are added) + eps of fp32 * sqrt(K)

    The second term allows another order of additions.
    """
    whole = matrices.whole().clone()
    eps, k = torch.finfo(whole.dtype).eps, matrices.a.shape[1]
    errors = {}
    for cut, pieces in CUTS:
        matrices.out.fill_(math.nan)
        matrices.cut(cut, pieces)()
        error = matrices.ranks.most(_distance(matrices.out, whole))
        limit = eps * math.sqrt(pieces if cut == "columns" else 1) + torch.finfo(torch.float32).eps * math.sqrt(k)
        if not error <= limit:
            raise RuntimeError(
                f"GEMM {whole.shape[0]} x {whole.shape[1]} x {k} in {pieces} pieces by {cut} differs from the undivided "
                f"GEMM: the relative root mean square error is {error:.3g}, the limit {limit:.3g}. Nothing was timed"
            )
        errors[cut_name(cut, pieces)] = error
    return errors


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the root mean square of `found` - `wanted`, divided by the root mean square of `wanted`."""
    squares = np.zeros(2)
    for ours, theirs in zip(found.split(1024), wanted.split(1024), strict=True):
        reference = theirs.double()
        squares += [float((ours.double() - reference).square().sum()), float(reference.square().sum())]
    return float(np.sqrt(squares[0] / squares[1]))
