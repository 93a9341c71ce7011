"""Reshape shards of any number of dimensions to matrices and back.

A shard [..., dim, ..., K] becomes the matrix [rows, K], with the gathered (or scattered) dimension outermost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft.arguments import checked_rows
from weft.symm.groups import group_of, size_of

UNEVEN = (
    "if ranks have shards of different sizes, such as in an uneven last batch, pass rows= with the sizes on all ranks; "
    "weights must have the same shape on all ranks: pad a vocabulary that is not divisible by the number of ranks"
)


def check_weights(A: torch.Tensor, Bs: Sequence[torch.Tensor], *, what: str = "A_shard", each: str = "Bs[{}]") -> None:
    """Raise `ValueError` unless each weight in `Bs` is a matrix [K, N] with A's last dimension, dtype and device.

    what, each: the argument names of A and of a weight, for error texts.
    """
    shape = A.shape
    if not Bs:
        raise ValueError("Bs is empty: pass at least one matrix [K, N]")
    for i, B in enumerate(Bs):
        name = each.format(i)
        if B.dim() != 2 or B.shape[0] != shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(B.shape)}: it must be [K={shape[-1]}, N] to match {what} [..., {shape[-1]}]"
            )
        if B.dtype != A.dtype or B.device != A.device:
            raise ValueError(
                f"{name} is {B.dtype} on {B.device} and {what} is {A.dtype} on {A.device}: use one dtype and device"
            )


def check_even(shape: Sequence[int], dim: int, world: int, *, name: str = "scatter_dim", what: str = "A") -> None:
    """Raise `ValueError` if dimension `dim` is not divisible by `world`. name, what: the argument names of `dim` and of
    the tensor.
    """
    if shape[dim] % world:
        below = shape[dim] - shape[dim] % world
        raise ValueError(
            f"{what} has shape {tuple(shape)}, whose size {shape[dim]} in dimension {name}={dim} must be divisible by "
            f"world_size={world}: pad it to {below + world}"
        )


def rows_of_one(shape: Sequence[int], gather_dim: int) -> int:
    """Return the number of matrix rows for each index of `gather_dim`, if a tensor of this shape is flattened to a matrix.
    This is the product of all sizes except the last size and the size of `gather_dim`.
    """
    rows = 1
    for d, extent in enumerate(shape[:-1]):
        rows *= 1 if d == gather_dim else extent
    return rows


def rows_of_ranks(
    rows: Sequence[int] | None, A_shard: torch.Tensor, gather_dim: int, group: dist.ProcessGroup | str | None
) -> list[int] | None:
    """Return the number of matrix rows on each rank; None if all ranks have the same number.

    rows: the size of `gather_dim` on each rank, or None. In an eager call this function checks it; in a traced call the
        operator does.
    """
    if rows is None:
        return None
    if not (torch.compiler.is_compiling() or is_in_torch_dispatch_mode()):
        rows = checked_rows(rows, A_shard, gather_dim, group_of(group))
    return None if rows is None else [size * rows_of_one(A_shard.shape, gather_dim) for size in rows]


def grad_of_weight(x: torch.Tensor, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x^T @ grad in the memory layout of `w`, so that autograd does not copy it."""
    if _by_columns(w):
        return (grad.t() @ x).t()
    return x.t() @ grad


def room_for_grad_of_weight(w: torch.Tensor) -> torch.Tensor:
    """Return uninitialised memory for the gradient of `w`, in the layout of `w`."""
    return w.new_empty(w.shape[1], w.shape[0]).t() if _by_columns(w) else w.new_empty(w.shape)


def _by_columns(w: torch.Tensor) -> bool:
    return w.stride(0) == 1 and w.stride(1) >= max(2, w.shape[0])


def outer_of(x: torch.Tensor, dim: int) -> list[int] | None:
    """Return the numbers that are lost if `x` is flattened to [rows, K]: dim, and the sizes of the other dimensions except the
    last. Return None for a matrix with dim=0. Ranks compare these numbers.
    """
    if dim == 0 and x.dim() == 2:
        return None
    return [dim, *(size for d, size in enumerate(x.shape[:-1]) if d != dim)]


def outer_text(name: str, outer: Sequence[int] | None) -> str:
    """Return the result of `outer_of` as text, such as "A [2, rows, 4, K]"; "" for None. name: the tensor's name."""
    if outer is None:
        return ""
    dim, *others = outer
    return f"{name} [{', '.join([*map(str, others[:dim]), 'rows', *map(str, others[dim:]), 'K'])}]"


def flattened(x: torch.Tensor, gather_dim: int) -> torch.Tensor:
    return x if gather_dim == 0 and x.dim() == 2 else x.movedim(gather_dim, 0).flatten(0, -2)


def restored(
    results: list[torch.Tensor],
    shape: Sequence[int],
    gather_dim: int,
    rows: Sequence[int] | None,
    group: dist.ProcessGroup | str | None,
) -> list[torch.Tensor]:
    """Reshape each result from a matrix [rows, N] to the dimensions that the shard had before it was flattened. The size of
    `gather_dim` is now the sum of its sizes on all ranks, and the last size is N.

    shape: the shape of a shard. rows: the size of `gather_dim` on each rank, if the sizes differ.
    """
    gather_dim %= len(shape)
    if gather_dim == 0 and len(shape) == 2:
        return results
    others = [size for d, size in enumerate(shape[:-1]) if d != gather_dim]
    one = rows_of_one(shape, gather_dim)
    extent = results[0].shape[0] // one if one else sum(rows or [shape[gather_dim] * size_of(group)])
    return [result.view(extent, *others, result.shape[1]).movedim(0, gather_dim) for result in results]
