"""What one GEMM loses by being cut up, what its all-gather loses, and what the two lose beside each other.

    decomposition loss  time of the pieces, one after the other and alone, over the time of the whole
    contention loss     time of the same pieces while the other side is busy, over their time alone

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV-A.

All arms take turns in each repetition, with lanes (`weft.bench.inefficiency_sides`) of a fixed number of calls. Beside each
other, GEMM and all-gather are both repeated, as often as makes both lanes equally long. Only the time in which both are
under way counts: what each did in it is read off its marks. How much of the whole that was is kept as `overlap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from weft.bench.harness import Ranks, Timing, summarise
from weft.bench.inefficiency_gemms import Gemm
from weft.bench.inefficiency_sides import TRANSPORTS, By, Call, Lane, Side, make_side, shard_bytes
from weft.bench.measure import Step

PIECES = 8  # of an all-gather, and of the GEMM that runs beside it
WHOLE = "whole"
CUTS = tuple((cut, pieces) for pieces in (8, 64) for cut in ("rows", "columns"))
_LEAST_CALLS = 3  # of each lane of two
_MOST_CALLS = 20_000
_BALANCING = 2  # rounds of making two lanes equally long
_LOOK_S = 2e-3  # how long a lane runs until it is believed
_LEAST_SHARE = 0.4
_ATTEMPTS = 5


def cut_name(cut: str, pieces: int) -> str:
    return f"{cut}-{pieces}"


def gather_name(by: By, pieces: int = PIECES) -> str:
    return f"gather-{by}-{pieces}"


def gemm_beside(by: By) -> str:
    return f"{_BESIDE} beside {gather_name(by)}"


def gather_beside(by: By) -> str:
    return f"{gather_name(by)} beside {_BESIDE}"


_BESIDE = cut_name("rows", PIECES)  # the GEMM that runs beside an all-gather
# What a variant's loss is relative to. The others, the whole GEMM and the all-gathers in one piece, have none.
BASELINES = (
    {cut_name(*cut): WHOLE for cut in CUTS}
    | {gather_name(by): gather_name(by, 1) for by in TRANSPORTS}
    | {gemm_beside(by): _BESIDE for by in TRANSPORTS}
    | {gather_beside(by): gather_name(by) for by in TRANSPORTS}
)


@dataclass(frozen=True)
class Found:
    """Of one GEMM, the same on every rank, by variant. `timings`: a call is all its pieces. `overlap`: of what ran beside
    something, the least over ranks of the median share. `errors`: of each cut, as `check_cuts` has them."""

    timings: dict[str, Timing]
    overlap: dict[str, float]
    errors: dict[str, float]
    gathered_bytes: int


@dataclass(frozen=True)
class Effort:
    """How long a lane lasts at least, alone and beside another. One more repetition comes first and does not count."""

    alone_s: float
    beside_s: float
    repetitions: int


def measure(gemm: Gemm, dtype: torch.dtype, ranks: Ranks, effort: Effort, step: Step) -> Found:
    """Check and time one GEMM and the all-gather of its A. Collective. RuntimeError if a result is wrong.

    `step` is told of two shares of 1.
    """
    step(f"{gemm.name}: checking pieces against the whole", 0)
    matrices = Matrices(gemm, dtype, ranks)
    errors = check_cuts(matrices)
    nbytes = shard_bytes(matrices.a.nbytes, ranks.world_size, PIECES)
    with make_side(ranks, nbytes) as side:
        alone = {WHOLE: Lane(matrices.whole, 1, "gemm")}
        alone |= {cut_name(cut, pieces): Lane(matrices.cut(cut, pieces), 1, "gemm") for cut, pieces in CUTS}
        for by in TRANSPORTS:
            for pieces in (1, PIECES):
                side.check(by, pieces)
                alone[gather_name(by, pieces)] = Lane(side.gather(by, pieces), 1, by)
        step(f"{gemm.name}: checking pieces against the whole", 1)
        pairs = make_lanes(alone, side, effort)
        arms: dict[str, tuple[Lane, ...]] = {**{name: (lane,) for name, lane in alone.items()}, **pairs}
        found = _repeat(arms, side, effort.repetitions, partial(step, f"{gemm.name}: timing"))
    values = {name: 1e3 * np.array(ranks.gather(mine)) for name, mine in found.items()}  # [rank, repetitions x values]
    timings = {name: summarise(values[name].T.tolist(), lane.count) for name, lane in alone.items()}
    overlap = {}
    for by in TRANSPORTS:
        share = float(np.median(values[by][:, 2::3], axis=1).min()) / 1e3
        for i, name in enumerate((gemm_beside(by), gather_beside(by))):
            timings[name] = summarise(values[by][:, i::3].T.tolist(), pairs[by][i].count)
            overlap[name] = share
    return Found(timings, overlap, errors, nbytes * ranks.world_size)


def make_lanes(alone: dict[str, Lane], side: Side, effort: Effort) -> dict[str, tuple[Lane, Lane]]:
    """Give lanes that run alone their counts, and make those that run beside each other, by transport. Collective."""
    seconds = {name: _seconds(lane, side) for name, lane in alone.items()}
    for name, lane in alone.items():
        lane.count = min(math.ceil(effort.alone_s / seconds[name]), _MOST_CALLS)
    pairs = {}
    for by in TRANSPORTS:
        pair = (Lane(alone[_BESIDE].call, 1, "gemm"), Lane(alone[gather_name(by)].call, 1, by))
        pairs[by] = balanced(pair, (seconds[_BESIDE], seconds[gather_name(by)]), effort.beside_s, side)
    return {str(by): pair for by, pair in pairs.items()}


def _repeat(
    arms: dict[str, tuple[Lane, ...]], side: Side, repetitions: int, advance: Callable[[float], object]
) -> dict[str, list[float]]:
    """For each arm and repetition the seconds of a call, or for two lanes what `together` says; starting with another
    arm each time."""
    names, found = list(arms), {name: list[float]() for name in arms}
    for repetition in range(repetitions + 1):
        start = repetition % len(names)
        for name in names[start:] + names[:start]:
            if len(arms[name]) == 1:
                side.ranks.start_together()
                values = [_per_call(side.play(arms[name])[0])]
            else:
                values = _play_together(arms[name], side)
            found[name] += values if repetition else []
        advance(1 / (repetitions + 1))
    return found


def _play_together(lanes: tuple[Lane, ...], side: Side) -> list[float]:
    """What `together` says of a play in which enough of the time counts on every rank; RuntimeError if none does."""
    for _ in range(_ATTEMPTS):
        side.ranks.start_together()
        marks = side.play(lanes)
        found = together(*marks)
        share = -side.ranks.most(-found[2])
        if share >= _LEAST_SHARE:
            return found
        balance(lanes, marks, side, longer=2)
    raise RuntimeError(
        f"GEMM and all-gather by {lanes[1].by} ran beside each other for only {share:.0%} of the time, in {_ATTEMPTS} "
        f"attempts: is something else keeping this machine busy?"
    )


def together(gemm: Sequence[float], gather: Sequence[float]) -> list[float]:
    """Seconds of a call of each of two lanes while both were under way, and the share of the time in which they were.

    A lane is when it began and when each call ended; between two marks it is taken to get on evenly.
    """
    first, last = max(gemm[0], gather[0]), min(gemm[-1], gather[-1])
    if not first < last:
        return [math.nan, math.nan, 0.0]
    calls = [float(np.diff(np.interp([first, last], marks, np.arange(len(marks))))[0]) for marks in (gemm, gather)]
    share = (last - first) / (max(gemm[-1], gather[-1]) - min(gemm[0], gather[0]))
    return [(last - first) / calls[0], (last - first) / calls[1], share]


def balanced(lanes: tuple[Lane, Lane], seconds: tuple[float, float], least_s: float, side: Side) -> tuple[Lane, Lane]:
    """The lanes with counts that make them about as long as each other side by side; the same on all ranks.

    seconds: of a call of each alone. least_s: how long they last at least.
    """
    lasting = max(least_s, _LEAST_CALLS * max(seconds))
    _set_counts(lanes, [lasting / alone for alone in seconds])
    for _ in range(_BALANCING):
        side.ranks.start_together()
        balance(lanes, side.play(lanes), side)
    return lanes


def balance(lanes: tuple[Lane, ...], marks: Sequence[Sequence[float]], side: Side, longer: int = 1) -> None:
    """Give the lane that ended first, by `marks`, more calls, and then both so many times more. Collective."""
    took = [side.ranks.most(lane[-1] - lane[0]) for lane in marks]
    _set_counts(lanes, [lane.count * longer * max(took) / s for lane, s in zip(lanes, took, strict=True)])


def _set_counts(lanes: Sequence[Lane], counts: Sequence[float]) -> None:
    fewer = min(1.0, _MOST_CALLS / max(counts))
    for lane, count in zip(lanes, counts, strict=True):
        lane.count = max(1, round(count * fewer))


def _seconds(lane: Lane, side: Side) -> float:
    """Of one call of `lane` alone, on the slowest rank: of the second of two plays, after one call that may have had to load
    a kernel or found memory cold."""
    for _ in range(2):
        side.ranks.start_together()
        found = max(1e-6, side.ranks.most(_per_call(side.play([lane])[0])))
        lane.count = min(max(2, math.ceil(_LOOK_S / found)), 50)
    return found


def _per_call(marks: Sequence[float]) -> float:
    return (marks[-1] - marks[0]) / (len(marks) - 1)


class Matrices:
    """A and B of random numbers, and the calls that multiply them: the library's, into one result."""

    def __init__(self, gemm: Gemm, dtype: torch.dtype, ranks: Ranks) -> None:
        device = ranks.device
        self.ranks = ranks
        self.a = torch.randn(gemm.m, gemm.k, dtype=dtype, device=device)
        self.b = torch.randn(gemm.k, gemm.n, dtype=dtype, device=device)
        self.out = torch.empty(gemm.m, gemm.n, dtype=dtype, device=device)

    def whole(self) -> torch.Tensor:
        return torch.mm(self.a, self.b, out=self.out)

    def cut(self, cut: str, pieces: int) -> Call:
        """The whole in so many pieces of A: `rows`, each a GEMM of its own, or `columns`, which add up in the result."""
        if cut == "rows":
            parts = list(zip(self.a.tensor_split(pieces), self.out.tensor_split(pieces), strict=True))

            def rows() -> None:
                for a, out in parts:
                    torch.mm(a, self.b, out=out)

            return rows
        blocks = list(zip(self.a.tensor_split(pieces, dim=1), self.b.tensor_split(pieces), strict=True))

        def columns() -> None:
            torch.mm(*blocks[0], out=self.out)
            for a, b in blocks[1:]:
                self.out.addmm_(a, b)

        return columns


def check_cuts(matrices: Matrices) -> dict[str, float]:
    """The error of every cut against the whole, largest over ranks. Collective. RuntimeError if one is too large.

    Errors are root mean squares, relative to that of the whole's elements. Allowed is eps x sqrt(pieces that add up), for
    each addition rounds the sum anew, plus eps of fp32 x sqrt(K), for libraries add in fp32 in orders of their own. A piece
    left out would cost at least 1 / sqrt(64) = 0.125.
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
                f"GEMM {whole.shape[0]} x {whole.shape[1]} x {k} in {pieces} pieces by {cut} differs from the whole by "
                f"{error:.3g} of its elements' root mean square; at most {limit:.3g} is allowed: nothing was timed"
            )
        errors[cut_name(cut, pieces)] = error
    return errors


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference over that of `wanted`, in blocks of rows to save memory."""
    squares = np.zeros(2)
    for ours, theirs in zip(found.split(1024), wanted.split(1024), strict=True):
        reference = theirs.double()
        squares += [float((ours.double() - reference).square().sum()), float(reference.square().sum())]
    return float(np.sqrt(squares[0] / squares[1]))
