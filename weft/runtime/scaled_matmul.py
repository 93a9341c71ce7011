"""One fp8 GEMM with scales, as the library has it: out = (a * scale_a) @ (b * scale_b) + bias.

On GPUs that is `torch._scaled_mm`: sums of products of fp8 numbers, in fp32, which are scaled, added to the bias and rounded once.
Whatever else this CPU's torch makes of it, here it computes the same by an fp32 matmul; for tests and development, since it
makes fp32 copies of both operands.
"""

from __future__ import annotations

import torch

_ALIGNMENT = 16
"""Bytes: cuBLAS takes scales of rows from such an address on, and no other."""


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast: bool,
    out: torch.Tensor,
) -> None:
    """a: [m, k], b: [k, n] column-major, fp8 e4m3. scale_a, scale_b: fp32, [1, 1] and [1, 1], or [m, 1] and [1, n]. bias: [1, n]
    of the dtype of out: [m, n], bf16, fp16 or fp32; or out in fp8, where what is too large becomes its largest number, and bias in
    bf16. fast: accumulate as fast as the GPU can, with fewer bits."""
    if not out.numel():
        return
    if a.device.type == "cuda":
        added = None if bias is None else bias[0]
        if scale_a.data_ptr() % _ALIGNMENT:  # of rows from somewhere in the middle on
            scale_a = scale_a.clone()
        torch._scaled_mm(a, b, scale_a, scale_b, added, out_dtype=out.dtype, use_fast_accum=fast, out=out)
        return
    y = (a.float() @ b.float()).mul_(scale_a).mul_(scale_b)
    y = y if bias is None else y.add_(bias)
    if out.itemsize == 1:  # a conversion alone would make NaN of it
        largest = torch.finfo(out.dtype).max
        y.clamp_(-largest, largest)
    out.copy_(y)
