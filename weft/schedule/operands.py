"""What all schedules of an operator have in common: the caller's tensors, and how a shard is cut into chunks."""

from __future__ import annotations

import itertools

from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.problem import AllGatherMatmul, NotApplicableError
from weft.schedule.schedule import Draft
from weft.schedule.steps import Buffer


def all_gather_matmul_operands(
    name: str, p: AllGatherMatmul
) -> tuple[Draft, Buffer, list[Buffer], list[Buffer], Buffer | None]:
    """(draft, x_shard, weights, outputs, the gathered x if the caller wants it)."""
    d = Draft(name, p.world_size)
    x = d.buffer("x_shard", lookup(p.rows, RANK), p.k, p.dtype, "input")
    ws = [d.buffer(f"w{i}", p.k, n, p.dtype, "input") for i, n in enumerate(p.n)]
    ys = [d.buffer(f"y{i}", p.m, n, p.dtype, "output") for i, n in enumerate(p.n)]
    gathered = d.buffer("x", p.m, p.k, p.dtype, "output") if p.return_gathered else None
    return d, x, ws, ys, gathered


def cut(extent: int, pieces: int, *, what: str) -> list[tuple[int, int]]:
    """(first, count) of `pieces` nearly equal pieces; the larger ones first."""
    if not 1 <= pieces <= max(1, extent):
        raise NotApplicableError(f"{what}: {extent} cannot be cut into {pieces} pieces")
    small, more = divmod(extent, pieces)
    ends = [i * small + min(i, more) for i in range(pieces + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where each rank's rows begin in the whole."""
    return tuple(sum(sizes[:i]) for i in range(len(sizes)))


def peer(world_size: int, distance: int) -> Index:
    """The rank `distance` places further in the ring, or back if it is negative."""
    return (RANK + distance % world_size) % world_size
