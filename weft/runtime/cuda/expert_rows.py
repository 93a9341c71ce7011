"""Launchers of the kernels of an MoE layer (`weft.kernels.expert_rows`). All tensors are contiguous, on the current device."""

from __future__ import annotations

import torch

from weft.kernels import expert_rows as device_code
from weft.runtime.cuda.direct import launch

_BLOCK_BYTES, _WARPS = 4096, 4


def gathered(tokens: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:
    """Return a matrix whose row i is `tokens[order[i] // copies]`."""
    width = tokens.shape[1]
    out = tokens.new_empty(len(order), width)
    block, align = _block_of(width, tokens.itemsize)
    if out.numel():
        grid = len(order), -(-width // block)
        arguments = tokens, order, out, width, copies
        launch(device_code.gather_kernel, grid, arguments, warps=_WARPS, BLOCK=block, ALIGN=align)
    return out


def gate(h: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, where gate and up are the left and the right half of h."""
    rows, width = len(h), h.shape[1] // 2
    out = h.new_empty(rows, width)
    block, align = _block_of(width, h.itemsize)
    if out.numel():
        launch(
            device_code.gate_kernel, (rows, -(-width // block)), (h, out, width), warps=_WARPS, BLOCK=block, ALIGN=align
        )
    return out


def gate_grad(h: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of h in `gate`. grad: the gradient of its result."""
    (rows, width), out = grad.shape, torch.empty_like(h)
    block, align = _block_of(width, h.itemsize)
    if out.numel():
        grid = rows, -(-width // block)
        launch(device_code.gate_grad_kernel, grid, (h, grad, out, width), warps=_WARPS, BLOCK=block, ALIGN=align)
    return out


def summed(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None, copies: int) -> torch.Tensor:
    """Return the sum of each token's rows, weighted by `weights`. Row k of token t is `rows[place[t * copies + k]]`."""
    tokens, width = place.numel() // copies, rows.shape[1]
    out = rows.new_empty(tokens, width)
    block, align = _block_of(width, rows.itemsize)
    if out.numel():
        arguments = rows, place, place if weights is None else weights, out, width
        launch(
            device_code.sum_kernel, (tokens, -(-width // block)), arguments, warps=_WARPS, COPIES=copies,
            WEIGHTED=weights is not None, BLOCK=block, ALIGN=align,
        )  # fmt: skip
    return out


def summed_grads(
    grad: torch.Tensor, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `rows` and `weights` in `summed`. grad: the gradient of its result."""
    of_rows, of_weights, width = torch.empty_like(rows), torch.empty_like(weights), rows.shape[1]
    block, align = _block_of(width, rows.itemsize)
    if of_rows.numel():
        arguments = grad, rows, place, weights, of_rows, of_weights, width, weights.shape[1]
        launch(device_code.spread_kernel, (place.numel(), 1), arguments, warps=_WARPS, BLOCK=block, ALIGN=align)
    return of_rows, of_weights


def _block_of(width: int, item_bytes: int) -> tuple[int, int]:
    """Return (columns that a program handles at the same time, a number of columns that divides `width`, for the
    alignment of rows).
    """
    at_once = 16 // item_bytes
    block = _BLOCK_BYTES // item_bytes
    while block > 2 * at_once * 32 and block >= 2 * width:
        block //= 2
    return block, at_once if width % at_once == 0 else 1
