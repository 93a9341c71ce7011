"""Memory layouts that GEMMs and collectives support, and copies of tensors with other layouts."""

from __future__ import annotations

import torch

from weft.caller import warn
from weft.runtime.schedule_memory import TORCH_DTYPE

SCATTERED = "neither its rows nor its columns are contiguous, so pass a contiguous tensor"
_warned: set[tuple[str, str]] = set()


def warn_of_copy(name: str, x: torch.Tensor, of: str, reason: str) -> None:
    """Warn once, for each operator `of` and argument `name`, that calls copy the argument `x`.

    reason: the layout that makes the copy necessary.
    """
    if (of, name) not in _warned:
        _warned.add((of, name))
        warn(f"{of}: {name} is copied in every call, because it has the strides {x.stride()}: {reason}")


def contiguous(x: torch.Tensor, name: str, of: str) -> torch.Tensor:
    if not x.numel():  # torch reports an empty tensor as contiguous, whatever its strides
        return x.new_empty(x.shape)
    if x.is_contiguous():
        return x
    warn_of_copy(name, x, of, "pass a contiguous tensor")
    return x.contiguous()


def strided(w: torch.Tensor, name: str, of: str) -> torch.Tensor:
    """Return `w` itself if GEMMs support its layout, otherwise a contiguous copy. Warn once if `w` is copied.

    name, of: the names of the argument and of the operator, for the warning.
    """
    if w.is_contiguous():
        return w
    (rows, cols), (row, col) = w.shape[-2:], w.stride()[-2:]
    if (col == 1 and row >= cols) or (row == 1 and col >= rows) or not is_scattered(w):
        return w
    warn_of_copy(name, w, of, SCATTERED)
    return w.contiguous()


def is_scattered(matrix: torch.Tensor) -> bool:
    """True if cuBLAS would copy the matrix, or stack of matrices, because neither its rows nor its columns are
    contiguous.
    """
    (k, n), (row, col) = matrix.shape[-2:], matrix.stride()[-2:]
    by_rows = (col == 1 or n <= 1) and (row >= n or k <= 1)
    by_columns = (row == 1 or k <= 1) and (col >= k or n <= 1)
    return matrix.numel() > 0 and not (by_rows or by_columns)


def normal(generator: torch.Generator, dtype: str, *shape: int) -> torch.Tensor:
    """Return normally distributed random numbers on the generator's device, drawn in fp32 and converted to `dtype`."""
    return torch.randn(shape, generator=generator, device=generator.device).to(TORCH_DTYPE[dtype])
