"""Test the division of the embedding update on a GPU: all bits must equal those of torch's square root and division."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here: it compiles the GPU kernels")

from triton import language as tl  # noqa: E402

from weft.kernels.embedding_arithmetic import over_root  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
COLUMNS = 64


@triton.jit
def divide_kernel(g, s, out, eps, GROUP: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    at = row[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    tl.store(out + at, over_root(tl.load(g + at), tl.load(s + row), eps, at >= 0, GROUP, BLOCK_D, True))


def gradients(kind: str) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(11)
    options: dict[str, Any] = {"generator": generator, "device": "cuda"}
    if kind == "any bits":  # also infinite and NaN
        bits = torch.randint(-(2**31), 2**31, (1 << 16, COLUMNS), dtype=torch.int64, **options)
        return bits.to(torch.int32).view(torch.float32)
    g = torch.randn(1 << 16, COLUMNS, **options)
    if kind == "any size":  # rows from 2^-150 to 2^100
        return g * torch.exp2(torch.randint(-150, 100, (len(g), 1), **options).double()).to(torch.float32)
    if kind == "zeros":
        g[torch.rand(g.shape, **options) < 0.02] = 0.0
        g[torch.rand(g.shape, **options) < 0.02] = -0.0
    return g


@pytest.mark.parametrize("kind", ["usual", "any size", "any bits", "zeros"])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_division_has_torchs_bits(kind: str, eps: float) -> None:
    g = gradients(kind)
    s = g.square().mean(1) + torch.rand(len(g), device="cuda", generator=torch.Generator("cuda").manual_seed(2)) * (
        kind == "usual"
    )
    out, group = torch.empty_like(g), 8
    divide_kernel[(len(g) // group,)](g, s, out, eps, GROUP=group, BLOCK_D=COLUMNS, num_warps=1)
    wanted = g / (s.sqrt() + eps)[:, None]
    is_number = ~wanted.isnan()
    assert torch.equal(out.isnan(), ~is_number)
    assert torch.equal(out[is_number].view(torch.int32), wanted[is_number].view(torch.int32))
