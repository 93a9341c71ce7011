"""FiCCO for MoE dispatch + GEMM: tokens are sent in pieces to all ranks at the same time; each step multiplies one
piece from every rank.

    to +i    (one lane for each peer) in step s, send piece s of the tokens for the experts of rank + i
    compute  with hetero, first multiply all of this rank's own tokens; then in step s, multiply piece s from every rank

Tokens are sorted by expert, so the tokens from one rank for adjacent experts are contiguous. GEMMs read tokens where
they arrived and store rows in the result, so no step gathers or scatters. Three choices make eight schedules:

    1D | 2D           pieces are some of a rank's experts, or columns of all tokens (then steps accumulate:
                      y += x[:, piece] @ w[piece])
    uniform | hetero  each step includes a piece of this rank's own tokens; or all own tokens are multiplied before the first
                      step, while pieces are travelling
    fused | unfused   each step has one launch for the tokens of all source ranks, or one launch per source rank

uniform + fused + 1D is the same schedule as `dispatch_by_expert` with send=at_once. The tokens of one expert are not
cut, so a 1D schedule has at most as many steps as a rank has experts. If possible, columns are cut at multiples of 16
bytes, as the GPU's tensor memory accelerator requires. Each step of a 2D schedule rounds y to its dtype, so with 16-bit
dtypes more steps reduce accuracy.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV-B2 (expert parallelism), V-A and
figure 11.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from weft.builders.all_to_all_matmul import Columns, Sending, dispatch_by_expert
from weft.builders.operands import split
from weft.builders.problems.all_to_all_matmul import AllToAllMatmul
from weft.builders.registry import builder, require_peers
from weft.schedule.schedule import Schedule
from weft.schedule.steps import ITEM_BYTES, CopyBy

Start = Literal["uniform", "hetero"]
Gemms = Literal["fused", "unfused"]
Piece: TypeAlias = tuple[int, int, Columns]
"""(first local expert, number of local experts, (first, count) of the tokens' columns)"""
_STARTS, _GEMMS, _BY = ("uniform", "hetero"), ("fused", "unfused"), ("dma", "kernel")
_ALIGNED_BYTES = 16


@builder(AllToAllMatmul, start=_STARTS, gemms=_GEMMS, steps=(0,), by=_BY)
def ficco_1d(p: AllToAllMatmul, *, start: Start, gemms: Gemms, steps: int, by: CopyBy) -> Schedule:
    """Cut tokens by expert.

    steps: the number of pieces into which a rank's experts are divided; 0 stands for the number of ranks. The planner
        tries only 0. To use another number, pin a schedule with this number.
    start: "uniform" or "hetero", as at the top of this file.
    gemms: "fused" or "unfused", as at the top of this file.
    by: copy with copy engines ("dma") or kernels ("kernel").
    """
    require_peers(p)
    pieces = split(p.experts, steps or p.world_size, what="experts of a rank")
    if (start, gemms) == ("uniform", "fused"):
        return dispatch_by_expert(p, by=by, chunks=len(pieces), send="at_once" if p.world_size > 2 else "in_turn")
    return _ficco(p, "1D", start, gemms, by, [(*piece, (0, p.k)) for piece in pieces])


@builder(AllToAllMatmul, start=_STARTS, gemms=_GEMMS, steps=(0,), by=_BY)
def ficco_2d(p: AllToAllMatmul, *, start: Start, gemms: Gemms, steps: int, by: CopyBy) -> Schedule:
    """Cut tokens by columns.

    steps: the number of pieces; 0 stands for the number of ranks.
    start, gemms, by: as for `ficco_1d`.
    """
    require_peers(p)
    steps, unit = steps or p.world_size, _ALIGNED_BYTES // ITEM_BYTES[p.dtype]
    unit = unit if p.k % unit == 0 and p.k >= steps * unit else 1
    pieces = split(p.k // unit, steps, what="columns of tokens")
    return _ficco(p, "2D", start, gemms, by, [(0, p.experts, (unit * a, unit * n)) for a, n in pieces])


def _ficco(p: AllToAllMatmul, cuts: str, start: Start, gemms: Gemms, by: CopyBy, pieces: list[Piece]) -> Schedule:
    uniform, fused, others = start == "uniform", gemms == "fused", list(range(1, p.world_size))
    one = not uniform and len(others) == 1  # with a single peer, fused and unfused are the same
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
