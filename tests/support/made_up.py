"""A user's own schedule: a builder that nothing in weft refers to.

Tests register it temporarily (`registered`), and run, simulate, verify, trace and plan with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest

from weft.builders import PROBLEMS, AllGatherMatmul, NotApplicableError, builder, unregister
from weft.builders.operands import all_gather_matmul_operands, offsets, peer
from weft.schedule import RANK, Index, Schedule, Wait, lookup
from weft.schedule.kernels import TileKernel


@dataclass(frozen=True, slots=True)
class Kernel(TileKernel):
    """A kernel that no executor implements."""

    kind: ClassVar[str] = "made_up"
    name: str = "made_up"


def registered_by_a_test(operator: str) -> bool:
    """Return whether a test module defines the problem of `operator`. Importing such a module registers it for all tests."""
    return operator in PROBLEMS and not PROBLEMS[operator].__module__.startswith("weft.")


def ring(p: AllGatherMatmul, *, by: Literal["dma", "kernel"]) -> Schedule:
    """Return an all-gather in a ring. Each rank copies shards from its left neighbour only, in W - 1 hops with a signal
    each.

        lane pull     copy this rank's shard into its box. At each hop, wait until the left rank has the next shard, copy
                      it, and signal to the right rank
        lane compute  compute the rows of y from this rank's shard, then from each shard that has arrived

    Only its owner writes a box. The rank on the right reads it, and signals when it has finished (`credit`).
    """
    world = p.world_size
    if world == 1:
        raise NotApplicableError("there is only one rank, so there is nothing to gather")
    d, x, ws, ys, gathered = all_gather_matmul_operands("ring", p)
    box = d.buffer("box", p.m, p.k, p.dtype, "symmetric")
    there, here, credit = d.signals("there", world - 1), d.signals("here", world - 1), d.signals("credit", 1)
    left, right = peer(world, -1), peer(world, 1)

    def rows_of(rank: Index) -> tuple[Index, Index]:
        return lookup(offsets(p.rows), rank), lookup(p.rows, rank)

    compute, pull = d.lane("compute"), d.lane("pull", "copy")
    pull.wait(credit, previous=True).copy(x.part(), box.part(rows=rows_of(RANK)), by).set(there, 0, at=right)
    for w, y in zip(ws, ys, strict=True):
        compute.matmul(y.part(rows=rows_of(RANK)), x.part(), w.part())
    for hop in range(1, world):
        rows = rows_of(peer(world, -hop))
        pull.wait(there, hop - 1).copy(box.part(rows=rows, at=left), box.part(rows=rows), by)
        if hop < world - 1:
            pull.set(there, hop, at=right)
        pull.set(here, hop - 1)
        compute.wait(here, hop - 1)
        for w, y in zip(ws, ys, strict=True):
            compute.matmul(y.part(rows=rows), box.part(rows=rows), w.part())
    pull.set(credit, at=left)
    if gathered:
        compute.copy(box.part(), gathered.part(), "kernel")
    return d.schedule()


def hasty(p: AllGatherMatmul) -> Schedule:
    """Return `ring` with a race: a rank overwrites its box without waiting for its neighbour's reads of the previous run."""
    made = ring(p, by="dma")
    lanes = [
        replace(lane, steps=tuple(s for s in lane.steps if not (isinstance(s, Wait) and s.previous)))
        for lane in made.lanes
    ]
    return replace(made, name="hasty", lanes=tuple(lanes))


@contextmanager
def registered(function: Any = ring, **parameters: Any) -> Iterator[None]:
    """Register the builder while the context is open.

    A user registers it permanently, by `@builder(AllGatherMatmul, by=("dma", "kernel"))` above the function.
    """
    builder(AllGatherMatmul, **(parameters or ({"by": ("dma", "kernel")} if function is ring else {})))(function)
    try:
        yield
    finally:
        unregister(AllGatherMatmul, function.__name__)


def require_runnable_on_gpus(schedule: Schedule, rank: int) -> None:
    """Run the GPU executor's checks of a schedule, without a GPU."""
    pytest.importorskip("triton", reason="Triton is not installed here, and the GPU executor needs it")
    from weft.runtime.cuda import flags, runnable

    runnable.require_runnable_on_gpus(schedule, rank)
    flags.flags_of(schedule)
