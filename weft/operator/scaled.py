"""Operands of fp8 GEMMs with scales: their dtype, the normal form of scales, and checks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weft.builders import Scaled
from weft.builders.problems.all_gather_matmul import SCALED_MULTIPLE
from weft.operator.layout import warn_of_copy
from weft.runtime.schedule_memory import TORCH_DTYPE

FP8 = TORCH_DTYPE["fp8"]


def refuse_gradients(tensors: Iterable[torch.Tensor | None]) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "an input requires gradients, but fp8 GEMMs have no gradients: call under torch.no_grad(), or pass detached tensors"
        )


def scale_of(B: torch.Tensor, scale: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return the scale of B as a matrix. A scale with one element may have any shape, so this function gives it a standard
    shape: [1, columns of B] if `by_row`, otherwise [1, 1]. A scale with several elements is returned unchanged.

    by_row: True if the call has a scale for each row of A and each column of B.
    """
    if scale.numel() != 1:
        return scale
    columns = B.shape[-1] if B.dim() else 1  # B has not been checked yet
    return scale.reshape(1, 1).expand(1, columns) if by_row else scale.reshape(1, 1)


def check_on(device: torch.device, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.device != device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: use {dtype} on {device}")


def check_beside(
    B: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: str, by_row: bool, names: tuple[str, str]
) -> None:
    """Raise `ValueError` if the shape of the scale, or the shape or dtype of the bias, does not match B and the result.

    out: weft's name of the result's dtype. names: the argument names of scale and bias, for error texts.
    """
    (of_scale, of_bias), n = names, B.shape[1]
    if scale.numel() != 1 and not (by_row and scale.shape == (1, n)):
        wanted = (
            f"one element, or one scale for each column: shape [1, {n}]"
            if by_row
            else f"one element, or use row-wise scales for both: A_scale [M, 1] and this scale [1, {n}]"
        )
        raise ValueError(f"{of_scale} has shape {tuple(scale.shape)}: pass {wanted}")
    if bias is None:
        return
    if out == "fp32":
        raise ValueError(
            f"{of_bias} with out_dtype=torch.float32 is not supported by fp8 GEMMs: use torch.bfloat16, or add "
            "the bias to the result"
        )
    check_on(B.device, of_bias, bias, TORCH_DTYPE[Scaled.bias_dtype(out)])
    if bias.shape != (n,) or not bias.is_contiguous():
        raise ValueError(f"{of_bias} has shape {tuple(bias.shape)}, strides {bias.stride()}: pass a contiguous [{n}]")


def column_major(B: torch.Tensor, name: str, of: str) -> torch.Tensor:
    row, col = B.stride()
    if row == 1 and col >= B.shape[0] and col % SCALED_MULTIPLE == 0:
        return B
    warn_of_copy(name, B, of, "fp8 GEMMs need contiguous columns, so pass weight.t() of a contiguous weight")
    return B.t().contiguous().t()
