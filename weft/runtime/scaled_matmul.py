"""An fp8 GEMM with scales: out = (a * scale_a) @ (b * scale_b) + bias.

On GPUs this is `torch._scaled_mm`: products of fp8 numbers are summed in fp32, scaled, added to the bias, and rounded once.
On CPU, for tests and development, an fp32 matmul computes the same, with fp32 copies of both operands.
"""

from __future__ import annotations

import torch

from weft import _core


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
    """Compute out = (a * scale_a) @ (b * scale_b) + bias.

    a: the left operand, [m, k] fp8 e4m3. b: the right operand, [k, n] fp8 e4m3, column-major.
    scale_a, scale_b: the scales in fp32. Both have shape [1, 1], one number for each matrix. Or their shapes are [m, 1]
        and [1, n], one number for each row of a and each column of b.
    bias: a number for each column of the result, [1, n] in the dtype of out (bf16 if out is fp8), or None.
    fast: True to accumulate as fast as the GPU can, with fewer bits.
    out: the memory for the result, [m, n] in bf16, fp16, fp32 or fp8. Values too large for fp8 become its largest number.
    """
    if not out.numel():
        return
    if a.device.type == "cuda":
        _core.scaled_mm(torch._scaled_mm, a, b, scale_a, scale_b, bias, out.dtype, fast, out)
        return
    y = (a.float() @ b.float()).mul_(scale_a).mul_(scale_b)
    y = y if bias is None else y.add_(bias)
    if out.itemsize == 1:  # without the clamp, the conversion would turn large values into NaN
        largest = torch.finfo(out.dtype).max
        y.clamp_(-largest, largest)
    out.copy_(y)
