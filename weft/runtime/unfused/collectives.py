"""Collectives of a matrix. A `Turn` runs them: with a deadline and, on CPU, a rendezvous before each collective.

All functions have these arguments:

x: this rank's matrix [rows, columns], contiguous. rows: the number of rows of each rank. name: the collective's name in
    error texts and timelines.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.runtime import rails as riding
from weft.runtime.collectives import all_gather_single, all_reduce_single, reduce_scatter_single, sendable
from weft.runtime.rails import Rails
from weft.runtime.unfused.turn import Turn


def all_gather(
    x: torch.Tensor, rows: list[int], rank: int, group: dist.ProcessGroup, turn: Turn, name: str
) -> torch.Tensor:
    """Return the concatenated rows of all ranks, [sum(rows), columns]."""
    gathered, even = x.new_empty(sum(rows), x.shape[1]), rows.count(rows[0]) == len(rows)
    whole, part = sendable(gathered), sendable(x)
    if even and (rails := turn.rails_for(whole.nbytes)) is not None:
        turn.ride(name, riding.gather(rails, part.contiguous(), whole, turn.wait_s, name))
    elif even:
        turn.run(name, all_gather_single, whole, part, group=group)
    elif x.device.type == "cuda":
        turn.run(name, dist.all_gather, list(whole.split(rows)), part, group=group)
    else:  # gloo supports equal parts only
        padded = part.new_zeros(max(rows), x.shape[1])
        padded[: x.shape[0]] = part
        parts = padded.new_empty(len(rows), *padded.shape)
        turn.run(name, all_gather_single, parts.flatten(0, 1), padded, group=group)
        torch.cat([one[:n] for one, n in zip(parts, rows, strict=True)], out=whole)
    return turn.done(name, gathered, (len(rows) - 1) * x.nbytes)


def reduce_scatter(
    x: torch.Tensor, rows: list[int], rank: int, group: dist.ProcessGroup, turn: Turn, name: str
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks, [rows[rank], columns]."""
    return _reduce_scatter(x, rows, rank, group, turn, name, torch.clone)


def reduce_scatter_(
    x: torch.Tensor, rows: list[int], rank: int, group: dist.ProcessGroup, turn: Turn, name: str
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks, [rows[rank], columns]. The call may overwrite `x`."""
    return _reduce_scatter(x, rows, rank, group, turn, name, torch.Tensor.contiguous)


def _reduce_scatter(
    x: torch.Tensor, rows: list[int], rank: int, group: dist.ProcessGroup, turn: Turn, name: str,
    overwritable: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    even = rows.count(rows[0]) == len(rows)
    if even and (rails := _rails_to_reduce(x, turn)) is not None:
        mine = x.new_empty(rows[rank], x.shape[1])
        turn.ride(name, riding.ReduceScatter(rails, x.contiguous(), mine))
    elif even and (x.device.type == "cuda" or turn.shares_memory):
        mine = x.new_empty(rows[rank], x.shape[1])
        turn.run(name, reduce_scatter_single, mine, x, group=group)
    else:  # some backends have no reduce-scatter on CPU, or for unequal parts
        total = overwritable(x)
        turn.run(name, all_reduce_single, total, group=group)
        mine = total.split(rows)[rank].clone()
    return turn.done(name, mine, x.nbytes - mine.nbytes)


def all_reduce(
    x: torch.Tensor, rows: list[int], rank: int, group: dist.ProcessGroup, turn: Turn, name: str
) -> torch.Tensor:
    """Return the sum of `x` over all ranks."""
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), rows, rank, group, turn, name)


def all_reduce_(
    x: torch.Tensor, rows: list[int], rank: int, group: dist.ProcessGroup, turn: Turn, name: str
) -> torch.Tensor:
    """Replace `x` by its sum over all ranks, and return it. `x` must be contiguous."""
    if (rails := _rails_to_reduce(x, turn)) is not None:
        whole = x.contiguous()
        turn.ride(name, riding.all_reduce(rails, whole, turn.wait_s, name))
        if whole is not x:
            x.copy_(whole)
    else:
        turn.run(name, all_reduce_single, x, group=group)
    return turn.done(name, x, 2 * (x.nbytes - x.nbytes // len(rows)))


def _rails_to_reduce(x: torch.Tensor, turn: Turn) -> Rails | None:
    """Return the rendezvous of CPU ranks on several hosts if it can carry the data of a reduction of `x`
    (`weft.runtime.rails`), else None. The choice is equal on all ranks.
    """
    return turn.rails_for(x.nbytes) if x.dtype.is_floating_point else None
