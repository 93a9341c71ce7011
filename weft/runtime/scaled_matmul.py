"""One fp8 GEMM with scales: out = (a * scale_a) @ (b * scale_b) + bias.

On GPUs it is `torch._scaled_mm`: sums of products of fp8 numbers, in fp32, which are scaled, added to the bias and rounded once.
On CPU it computes the same by an fp32 matmul, independent of torch's `_scaled_mm` for CPU. This is for tests and development,
since it makes fp32 copies of both operands.
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

    a: [m, k], b: [k, n] column-major, fp8 e4m3. scale_a, scale_b: fp32, [1, 1] and [1, 1], or [m, 1] and [1, n]. out: [m, n],
    bf16, fp16 or fp32, with bias [1, n] of the same dtype; or fp8, with bias in bf16. Values too large for fp8 become its largest
    number. fast: accumulate as fast as the GPU can, with fewer bits.
    """
    if not out.numel():
        return
    if a.device.type == "cuda":
        _core.scaled_mm(torch._scaled_mm, a, b, scale_a, scale_b, bias, out.dtype, fast, out)
        return
    y = (a.float() @ b.float()).mul_(scale_a).mul_(scale_b)
    y = y if bias is None else y.add_(bias)
    if out.itemsize == 1:  # a conversion alone would turn large values into NaN
        largest = torch.finfo(out.dtype).max
        y.clamp_(-largest, largest)
    out.copy_(y)
