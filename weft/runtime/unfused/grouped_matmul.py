"""The product of each expert's rows and weights, by cuBLAS's grouped GEMM or by one GEMM for each expert. Rows are sorted
by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weft import _core
from weft.runtime.unfused.permutation import ends_of
from weft.runtime.unfused.sizes import Sizes
from weft.schedule.kernels import LibraryGroupedMatmul

GROUPED_MM: Any = getattr(torch, "_grouped_mm", None) or torch.nn.functional.grouped_mm
"""torch's grouped GEMM. The first function is native, and the second calls it."""


def grouped_matmul(x: torch.Tensor, w: torch.Tensor, sizes: Sizes, *, cut: bool = False) -> torch.Tensor:
    """Return y [rows of x, N]: the rows of each expert in x, multiplied by this expert's matrix in w. Rows of y beyond the
    experts' rows are uninitialised.

    cut: True if x has fewer rows than all experts together. The rows of the last experts are then missing.
    """
    of_experts = [count for count in sizes.host.of_experts if count]
    one_each = LibraryGroupedMatmul.is_one_per_expert(
        len(of_experts), sum(of_experts), w.shape[1], w.shape[2], w.itemsize
    )
    if not one_each and _has_grouped_gemm(x, w):
        return GROUPED_MM(x, w, offs=ends_of(sizes).clamp(max=x.shape[0]) if cut else ends_of(sizes))
    y = x.new_empty(x.shape[0], w.shape[2])
    for _ in multiply(x, w, sizes.host.of_experts, y):
        pass
    return y


def multiply(x: torch.Tensor, w: torch.Tensor, of_experts: Sequence[int], y: torch.Tensor) -> Iterator[None]:
    """Multiply the rows of each expert in x by this expert's matrix in w, by one GEMM for each expert with rows. Write the
    products to y. Yield after each GEMM.

    of_experts: the number of rows of each expert. If x has fewer rows, the rows of the last experts are missing.
    """
    first = 0
    for part, count in zip(w.unbind(), of_experts, strict=True):
        rows = x[first : first + count]
        if len(rows):
            torch.mm(rows, part, out=y[first : first + count])
            yield
        first += count


def grad_of_weights(x: torch.Tensor, grad_y: torch.Tensor, w: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return the gradient of w, [experts, K, N], in the layout of w. x: the rows of the experts. grad_y: the gradients of their
    products. Both are sorted by expert.
    """
    if w.stride(1) == 1 and w.shape[1] > 1:
        return _grouped_outer(grad_y, x, sizes).transpose(1, 2)
    return _grouped_outer(x, grad_y, sizes)


def _grouped_outer(x: torch.Tensor, grad_y: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return x_e.T @ grad_y_e for each expert e, [experts, K, N], where x_e and grad_y_e are the expert's rows."""
    if _has_grouped_gemm(x, grad_y):
        result = GROUPED_MM(x.t(), grad_y, offs=ends_of(sizes))
        # For an expert without rows, Hopper's kernel writes zeros, but Blackwell's kernel writes nothing.
        for expert, count in enumerate(sizes.host.of_experts):
            if count == 0:
                result[expert].zero_()
        return result
    result = x.new_empty(sizes.received.shape[1], x.shape[1], grad_y.shape[1])
    for rows, grad, of_expert in zip(_parts(x, sizes), _parts(grad_y, sizes), result, strict=True):
        torch.mm(rows.t(), grad, out=of_expert)
    return result


def _parts(rows: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """Return a view of each expert's rows in `rows`. If `rows` is too short, the views of the last experts are shorter or
    empty.
    """
    parts, first = [], 0
    for count in sizes.host.of_experts:
        parts.append(rows[first : first + count])
        first += count
    return parts


def _has_grouped_gemm(x: torch.Tensor, w: torch.Tensor) -> bool:
    """True if torch's grouped GEMM supports these operands: one kernel for all experts, which reads their sizes on the
    device.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and x.numel() > 0 and _is_aligned(x) and _is_aligned(w)


def _is_aligned(t: torch.Tensor) -> bool:
    """True if rows or columns are contiguous and begin at multiples of 16 bytes."""
    return _core.is_aligned(t.shape, t.stride(), t.data_ptr(), t.element_size())
