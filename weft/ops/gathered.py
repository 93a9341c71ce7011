"""The library's way: a gathered input, and the gradients behind it.

With y_i = x @ w_i, x gathered from the ranks' shards:

    grad x_shard = reduce-scatter over ranks of sum_i grad y_i @ w_i^T      grad w_i = x^T @ grad y_i

x is gathered again while the first GEMMs run, and the reduce-scatter runs while the second ones do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.ops.in_turn import Turn, begun
from weft.runtime.collectives import all_gather_single, sendable
from weft.schedule import AllGatherMatmul

_AGAIN = "all_gather x_shard again"


def gathered_by_library(
    x: torch.Tensor, p: AllGatherMatmul, group: dist.ProcessGroup, turn: Turn | None = None, name: str = ""
) -> torch.Tensor:
    """[sum(rows), columns of x] on every rank, by torch.distributed. x: [rows[rank], columns]. turn: what it goes through, if not
    straight there, and under which name."""
    gathered = x.new_empty(p.m, x.shape[1])
    whole, x = sendable(gathered), sendable(x)
    even = p.rows.count(p.rows[0]) == len(p.rows)
    if turn is None and even:
        all_gather_single(whole, x, group=group)
        return gathered
    turn, name = turn or Turn(None, None), name or f"all_gather x_shard -> {'x' if p.return_gathered else 'gathered'}"
    if even:
        turn.run(name, all_gather_single, whole, x, group=group)
    elif x.device.type == "cuda":
        turn.run(name, dist.all_gather, list(whole.split(p.rows)), x, group=group)
    else:  # gloo gathers equal parts only
        padded = x.new_zeros(max(p.rows), x.shape[1])
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in p.rows]
        turn.run(name, dist.all_gather, parts, padded, group=group)
        torch.cat([part[:n] for part, n in zip(parts, p.rows, strict=True)], out=whole)
    return turn.done(name, gathered, (p.world_size - 1) * x.nbytes)


def gradients(
    p: AllGatherMatmul,
    group: dist.ProcessGroup,
    saved: torch.Tensor,
    Bs: list[torch.Tensor],
    grads: list[torch.Tensor],
    wanted: Sequence[bool],
    turn: Turn | None = None,
) -> list[torch.Tensor | None]:
    """Of x_shard and of each B. `saved` is the gathered x if the caller wanted it, else the shard. turn: as above."""
    if torch.is_autocast_enabled(saved.device.type):
        with torch.autocast(saved.device.type, enabled=False):
            return gradients(p, group, saved, Bs, grads, wanted, turn)
    grad_gathered = grads.pop(0) if p.return_gathered else None
    regather = any(wanted[1:]) and not p.return_gathered and p.world_size > 1
    whole, gathering = saved, None
    if regather:
        if len(set(p.rows)) == 1:
            whole = saved.new_empty(p.m, p.k)
            gathering = begun(turn, _AGAIN, all_gather_single, whole, saved.contiguous(), group=group)
        else:
            whole = gathered_by_library(saved.contiguous(), p, group, turn, _AGAIN)
    grad_x = scattering = None
    if wanted[0]:
        partial = grads[0] @ Bs[0].t() if grad_gathered is None else torch.addmm(grad_gathered, grads[0], Bs[0].t())
        for grad, B in zip(grads[1:], Bs[1:], strict=True):
            partial.addmm_(grad, B.t())
        grad_x, scattering = _reduce_scattered(partial, p, group, turn)
    if gathering is not None:
        gathering.wait()
    grad_Bs = [whole.t() @ grad if want else None for grad, want in zip(grads, wanted[1:], strict=True)]
    if scattering is not None:
        scattering.wait()
    return [grad_x, *grad_Bs]


def _reduce_scattered(
    partial: torch.Tensor, p: AllGatherMatmul, group: dist.ProcessGroup, turn: Turn | None
) -> tuple[torch.Tensor, Any]:
    """(this rank's rows of the sum over ranks, what to wait for before reading them)."""
    rank = group.rank()
    if p.world_size == 1:
        return partial, None
    if len(set(p.rows)) == 1 and partial.device.type == "cuda":
        mine = partial.new_empty(p.rows[rank], p.k)
        return mine, dist.reduce_scatter_tensor(mine, partial, group=group, async_op=True)
    work = begun(turn, "reduce-scatter of x_shard's gradient", dist.all_reduce, partial, group=group)
    return partial.split(p.rows)[rank], work
