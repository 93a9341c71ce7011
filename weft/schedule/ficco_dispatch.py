"""FiCCO before experts: tokens go to all ranks at once, in pieces, and each step multiplies what has come from all of them.

    to +i    in step s the tokens for every expert of piece s on rank + i
    compute  hetero: the own tokens, whole, first; then in step s those of piece s

A piece is some of a rank's experts: as many pieces as steps, each of nearly as many experts. Tokens are sorted by expert, so what
a source has for a piece lies together, and how much that is, only the run knows: sums over `counts`
(`weft.schedule.dispatch`). GEMMs read tokens where they arrived, and store rows where they belong: there is nothing to gather or
to scatter, which is why uniform and fused is `dispatch_by_expert` over all links at once. Three choices of FiCCO remain:

    uniform | hetero  a step holds the own tokens of its piece too, or these are multiplied whole while nothing has come
    fused | unfused   one launch a step for the tokens of all sources, or one for each
    2D                columns of tokens, whose products add up: our kernel for experts' GEMMs adds to nothing, so it is refused

The tokens of one expert are not cut. So there may be no more steps than a rank has experts.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV-B2 (expert parallelism), V-A.
"""

from __future__ import annotations

from typing import Literal

from weft.schedule.builders import NotApplicableError, builder
from weft.schedule.dispatch import Sending, Transport, dispatch_by_expert
from weft.schedule.operands import cut
from weft.schedule.problems.all_to_all_matmul import AllToAllMatmul
from weft.schedule.schedule import Schedule

Start = Literal["uniform", "hetero"]
Gemms = Literal["fused", "unfused"]
_STARTS, _GEMMS, _BY = ("uniform", "hetero"), ("fused", "unfused"), ("dma", "kernel")


@builder(AllToAllMatmul, start=_STARTS, gemms=_GEMMS, steps=(0,), by=_BY)
def ficco_1d(p: AllToAllMatmul, *, start: Start, gemms: Gemms, steps: int, by: Transport) -> Schedule:
    """steps: pieces of a rank's experts; 0: as many as there are ranks, which is what planners try. Others can be pinned."""
    world, uniform, fused = p.world_size, start == "uniform", gemms == "fused"
    if world == 1:
        raise NotApplicableError("one rank has nobody to send to")
    pieces = cut(p.experts, steps or world, what="experts of a rank")
    send: Literal["in_turn", "at_once"] = "at_once" if world > 2 else "in_turn"
    if uniform and fused:
        return dispatch_by_expert(p, by=by, chunks=len(pieces), send=send)
    others = list(range(1, world))
    one = not uniform and len(others) == 1  # whose tokens are a launch either way
    d = Sending(f"{start}-{'fused' if one else gemms}-1D", p, by, send, len(pieces))
    for s, piece in enumerate(pieces):
        d.send(*piece, s)
    if not uniform:
        d.multiply([0], 0, p.experts)
    for s, piece in enumerate(pieces):
        if uniform:
            d.multiply([0], *piece)
        for distance in others:
            d.wait_for(distance, s)
            if not fused:
                d.multiply([distance], *piece)
        if fused:
            d.multiply(others, *piece)
    return d.done()


@builder(AllToAllMatmul, start=_STARTS, gemms=_GEMMS)
def ficco_2d(p: AllToAllMatmul, *, start: Start, gemms: Gemms) -> Schedule:
    raise NotApplicableError(
        "by columns, products of experts would add up, and the kernel for their GEMMs adds to nothing: take ficco_1d"
    )
