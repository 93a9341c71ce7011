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

import numpy as np
import torch

from weft.bench.harness import Ranks, Timing, summarise
from weft.bench.inefficiency_gemms import Fitted, Gemm
from weft.bench.inefficiency_sides import TRANSPORTS, By, Call, Lane, Side, shard_bytes

PIECES = 8  # of an all-gather, and of the GEMM that runs beside it
CUTS = tuple((cut, pieces) for pieces in (8, 64) for cut in ("rows", "columns"))
WHOLE = "whole"
_LEAST_CALLS = 3  # of each lane of two: one may begin and one end outside the time that counts
_MOST_CALLS = 5000
_BALANCING = 2  # rounds of making the two lanes equally long


def cut_name(cut: str, pieces: int) -> str:
    return f"{cut}-{pieces}"


def gather_name(by: By, pieces: int) -> str:
    return f"gather-{by}-{pieces}"


@dataclass(frozen=True)
class Beside:
    """A GEMM and an all-gather beside each other: `share` is the least, over ranks, of the time in which both were under
    way over the time in which one was."""

    gemm: Timing
    gather: Timing
    share: float


@dataclass(frozen=True)
class Measured:
    """Of one GEMM, the same on every rank: times of each arm alone by name, and beside each transport; `errors` of each
    cut against the whole, relative to the root mean square of its elements."""

    fitted: Fitted
    item_bytes: int
    gathered_bytes: int
    alone: dict[str, Timing]
    beside: dict[By, Beside]
    errors: dict[str, float]

    @property
    def gemm(self) -> Gemm:
        return self.fitted.run

    @property
    def op_to_byte(self) -> float:
        return self.gemm.op_to_byte(self.item_bytes)

    @property
    def traffic(self) -> int:
        return self.gemm.traffic(self.item_bytes)

    def piece_op_to_byte(self, cut: str, pieces: int) -> float:
        return self.gemm.piece(**{cut: pieces}).op_to_byte(self.item_bytes)

    def gemm_decomposition(self, cut: str, pieces: int) -> float:
        return self.alone[cut_name(cut, pieces)].p50_ms / self.alone[WHOLE].p50_ms

    def gather_decomposition(self, by: By) -> float:
        return self.alone[gather_name(by, PIECES)].p50_ms / self.alone[gather_name(by, 1)].p50_ms

    def gemm_contention(self, by: By) -> float:
        return self.beside[by].gemm.p50_ms / self.alone[cut_name("rows", PIECES)].p50_ms

    def gather_contention(self, by: By) -> float:
        return self.beside[by].gather.p50_ms / self.alone[gather_name(by, PIECES)].p50_ms


@dataclass(frozen=True)
class Effort:
    """`lane_s`: how long a lane that runs alone lasts at least. One more repetition comes first and does not count."""

    lane_s: float
    repetitions: int


def measure(fitted: Fitted, side: Side, effort: Effort, advance: Callable[[float], None]) -> Measured:
    """Check and time one GEMM and the all-gather of its A. Collective. RuntimeError if a result is wrong."""
    matrices = Matrices(fitted.run, side)
    errors = check_cuts(matrices)
    nbytes = shard_bytes(matrices.a.nbytes, side.ranks.world_size, PIECES)
    gathers = {(by, pieces): side.gather(by, nbytes, pieces) for by in TRANSPORTS for pieces in (1, PIECES)}
    for by, pieces in gathers:
        side.check(by, nbytes, pieces)
    alone = {WHOLE: Lane(matrices.whole, 1, "gemm")}
    alone |= {cut_name(cut, pieces): Lane(matrices.cut(cut, pieces), 1, "gemm") for cut, pieces in CUTS}
    alone |= {gather_name(by, pieces): Lane(call, 1, by) for (by, pieces), call in gathers.items()}
    seconds = {name: _seconds(lane, side) for name, lane in alone.items()}
    for name, lane in alone.items():
        lane.count = min(math.ceil(effort.lane_s / seconds[name]), _MOST_CALLS)
    pairs: dict[str, tuple[Lane, Lane]] = {}
    for by in TRANSPORTS:
        gemm, gather = cut_name("rows", PIECES), gather_name(by, PIECES)
        pair = (Lane(alone[gemm].call, 1, "gemm"), Lane(alone[gather].call, 1, by))
        pairs[by] = balanced(pair, (seconds[gemm], seconds[gather]), side)
    arms: dict[str, tuple[Lane, ...]] = {name: (lane,) for name, lane in alone.items()}
    found = _repeat(arms | pairs, side, effort.repetitions, advance)
    rows = {name: 1e3 * np.array(side.ranks.gather(values)) for name, values in found.items()}
    times = {name: summarise(rows[name].T.tolist(), lane.count) for name, lane in alone.items()}
    beside = {by: _beside(pairs[by], rows[by]) for by in TRANSPORTS}
    return Measured(fitted, side.dtype.itemsize, nbytes * side.ranks.world_size, times, beside, errors)


def _beside(pair: tuple[Lane, Lane], values: np.ndarray) -> Beside:
    """values: [rank, repetitions x 3], thousandfold what `together` gives."""
    gemm, gather, share = (values[:, i::3] for i in range(3))
    timings = [summarise(ms.T.tolist(), lane.count) for ms, lane in zip((gemm, gather), pair, strict=True)]
    return Beside(timings[0], timings[1], float(np.median(share, axis=1).min()) / 1e3)


def _repeat(
    arms: dict[str, tuple[Lane, ...]], side: Side, repetitions: int, advance: Callable[[float], None]
) -> dict[str, list[float]]:
    """For each arm and repetition the seconds of a call, or for two lanes what `together` says; starting with another
    arm each time."""
    names, found = list(arms), {name: list[float]() for name in arms}
    for repetition in range(repetitions + 1):
        start = repetition % len(names)
        for name in names[start:] + names[:start]:
            side.ranks.start_together()
            marks = side.play(arms[name])
            if repetition:
                found[name] += [_per_call(marks[0])] if len(marks) == 1 else together(*marks)
        advance(1 / (repetitions + 1))
    return found


def together(gemm: Sequence[float], gather: Sequence[float]) -> list[float]:
    """Seconds of a call of each of two lanes while both were under way, and the share of the time in which they were.

    A lane is when it began and when each call ended; between two marks it is taken to get on evenly.
    """
    first, last = max(gemm[0], gather[0]), min(gemm[-1], gather[-1])
    if not first < last:
        raise RuntimeError(
            "two lanes that were started together did not run at the same time: is the machine overloaded?"
        )
    calls = [float(np.diff(np.interp([first, last], marks, np.arange(len(marks))))[0]) for marks in (gemm, gather)]
    share = (last - first) / (max(gemm[-1], gather[-1]) - min(gemm[0], gather[0]))
    return [(last - first) / calls[0], (last - first) / calls[1], share]


def balanced(lanes: tuple[Lane, Lane], seconds: tuple[float, float], side: Side) -> tuple[Lane, Lane]:
    """The lanes with counts that make them about as long as each other side by side; the same on all ranks.

    seconds: of a call of each alone.
    """
    for lane, alone in zip(lanes, seconds, strict=True):
        lane.count = min(math.ceil(_LEAST_CALLS * max(seconds) / alone), _MOST_CALLS)
    for _ in range(_BALANCING):
        side.ranks.start_together()
        took = [side.ranks.most(marks[-1] - marks[0]) for marks in side.play(lanes)]
        shorter = took.index(min(took))
        lanes[shorter].count = min(round(lanes[shorter].count * max(took) / min(took)), _MOST_CALLS)
    return lanes


def _seconds(lane: Lane, side: Side) -> float:
    """Of one call of `lane` alone, on the slowest rank. The first of two may have to load a kernel, or find memory cold."""
    found = []
    for _ in range(2):
        side.ranks.start_together()
        found.append(side.ranks.most(_per_call(side.play([lane])[0])))
    return max(1e-6, min(found))


def _per_call(marks: Sequence[float]) -> float:
    return (marks[-1] - marks[0]) / (len(marks) - 1)


class Matrices:
    """A and B of random numbers, and the calls that multiply them: the library's, into one result."""

    def __init__(self, gemm: Gemm, side: Side) -> None:
        device, dtype = side.ranks.device, side.dtype
        self.ranks: Ranks = side.ranks
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
