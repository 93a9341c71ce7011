"""FiCCO before experts: tokens go to all ranks at once, in pieces, and each step multiplies the pieces from all ranks.

    to +i    in step s: piece s of the tokens for the experts of rank + i
    compute  hetero: this rank's own tokens, whole, first; then in step s the tokens of piece s

Tokens are sorted by expert, so a source's tokens for some of a rank's experts lie together. Only the run knows their number: a
sum over `counts` (`weft.builders.all_to_all_matmul`). GEMMs read tokens where they arrived, and store rows into the result: no step
gathers or scatters. So uniform, fused and 1D is `dispatch_by_expert` over all links at once. Three choices make eight
schedules:

    1D | 2D           pieces are some of a rank's experts, or columns of all tokens (then steps accumulate:
                      y += x[:, piece] @ w[piece])
    uniform | hetero a step holds this rank's own tokens of its piece too; or this rank's own tokens are multiplied whole, before
                      any piece arrives
    fused | unfused   one launch a step for the tokens of all sources, or one for each source

Pieces are nearly equal. Rows of one expert are not cut, so in 1D there cannot be more steps than a rank has experts. If possible,
columns are cut at multiples of 16 bytes, which tensor maps need. Each step of a 2D schedule reads y, and rounds it to its dtype:
with 16 bits, more steps cost accuracy.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV-B2 (expert parallelism), V-A and
figure 11.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from weft.builders.all_to_all_matmul import Columns, Sending, dispatch_by_expert
from weft.builders.operands import split
from weft.builders.problems.all_to_all_matmul import AllToAllMatmul
from weft.builders.registry import NotApplicableError, builder
from weft.schedule.schedule import Schedule
from weft.schedule.steps import ITEM_BYTES, CopyBy

Start = Literal["uniform", "hetero"]
Gemms = Literal["fused", "unfused"]
Piece: TypeAlias = tuple[int, int, Columns]
"""(first expert, number of experts of a rank, columns of their tokens)."""
_STARTS, _GEMMS, _BY = ("uniform", "hetero"), ("fused", "unfused"), ("dma", "kernel")
_ALIGNED_BYTES = 16


@builder(AllToAllMatmul, start=_STARTS, gemms=_GEMMS, steps=(0,), by=_BY)
def ficco_1d(p: AllToAllMatmul, *, start: Start, gemms: Gemms, steps: int, by: CopyBy) -> Schedule:
    """Cut tokens by expert. steps: pieces of a rank's experts; 0: the number of ranks, which the planner tries. Other
    numbers can be pinned."""
    _require_peers(p)
    pieces = split(p.experts, steps or p.world_size, what="experts of a rank")
    if (start, gemms) == ("uniform", "fused"):
        return dispatch_by_expert(p, by=by, chunks=len(pieces), send="at_once" if p.world_size > 2 else "in_turn")
    return _ficco(p, "1D", start, gemms, by, [(*piece, (0, p.k)) for piece in pieces])


@builder(AllToAllMatmul, start=_STARTS, gemms=_GEMMS, steps=(0,), by=_BY)
def ficco_2d(p: AllToAllMatmul, *, start: Start, gemms: Gemms, steps: int, by: CopyBy) -> Schedule:
    """Cut tokens by columns. steps: pieces; 0: the number of ranks. By dma a piece is one two-dimensional copy to each rank."""
    _require_peers(p)
    steps, unit = steps or p.world_size, _ALIGNED_BYTES // ITEM_BYTES[p.dtype]
    unit = unit if p.k % unit == 0 and p.k >= steps * unit else 1
    pieces = split(p.k // unit, steps, what="columns of tokens")
    return _ficco(p, "2D", start, gemms, by, [(0, p.experts, (unit * a, unit * n)) for a, n in pieces])


def _require_peers(p: AllToAllMatmul) -> None:
    if p.world_size == 1:
        raise NotApplicableError("there is only one rank, so there is no peer to send to")


def _ficco(p: AllToAllMatmul, cuts: str, start: Start, gemms: Gemms, by: CopyBy, pieces: list[Piece]) -> Schedule:
    uniform, fused, others = start == "uniform", gemms == "fused", list(range(1, p.world_size))
    one = not uniform and len(others) == 1  # one peer's tokens are one launch either way
    send: Literal["in_turn", "at_once"] = "at_once" if len(others) > 1 else "in_turn"
    d = Sending(f"{start}-{'fused' if one else gemms}-{cuts}", p, by, send, len(pieces))
    for s, piece in enumerate(pieces):
        d.send(*piece, s)
    if not uniform:
        d.multiply([0], 0, p.experts)
    for s, piece in enumerate(pieces):
        adds = cuts == "2D" and s > 0
        if uniform and not fused:
            d.multiply([0], *piece, adds)
        for distance in others:
            d.wait_for(distance, s)
            if not fused:
                d.multiply([distance], *piece, adds)
        if fused:
            d.multiply([0, *others] if uniform else others, *piece, adds)
    return d.done()
