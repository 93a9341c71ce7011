"""The fp8 GEMM with scales on CPU, and the fp8 GEMMs that a first call on GPUs times."""

from __future__ import annotations

import pytest
import torch

from weft.builders import AllGatherMatmul, Scaled, ScaledMatmulReduceScatter
from weft.operator.gpu_gemms import GemmTimer
from weft.runtime.scaled_matmul import scaled_matmul

FP8 = torch.float8_e4m3fn


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("by_row", [False, True], ids=["tensor", "row"])
@pytest.mark.parametrize("m", [0, 1, 5])
def test_it_is_scaled_and_rounded_once(m: int, by_row: bool, out: torch.dtype) -> None:
    a, b, bias = random(m, 32, dtype=FP8), random(48, 32, dtype=FP8).t(), random(1, 48, dtype=out)
    scale_a, scale_b = (random(m, 1), random(1, 48)) if by_row else (random(1, 1), random(1, 1).neg())
    y = torch.full((m, 48), torch.nan, dtype=out)
    scaled_matmul(a, b, scale_a, scale_b, bias, fast=False, out=y)
    exact = (a.double() * scale_a) @ (b.double() * scale_b) + bias
    assert torch.allclose(y.double(), exact, rtol=torch.finfo(out).eps / 2, atol=2e-5)


def test_parts_of_scaled_gemms_are_timed_with_their_scales() -> None:
    p = AllGatherMatmul(
        2, (8, 8), (16, 32), 32, "fp8", False, Scaled("row", ("bf16", "bf16"), (False, True), (True, False))
    )
    tensors = {"x_shard": random(8, 32, dtype=FP8), "x_scale": random(8, 1)}
    for i, n in enumerate(p.n):
        tensors[f"w{i}"], tensors[f"w_scale{i}"] = random(n, 32, dtype=FP8).t(), random(1, n)
        tensors[f"y{i}"] = torch.full((p.m, n), torch.nan, dtype=torch.bfloat16)
    tensors["bias1"] = random(1, 32, dtype=torch.bfloat16)
    timer = GemmTimer(p, tensors)
    assert set(timer.weights) == {"w0", "w1"}
    assert timer.x.shape == (16 * 32,)
    assert 0.8 < timer.x.float().std() < 1.2
    a, b, y = timer.x[: 8 * 32].view(8, 32), tensors["w1"][:, :16], tensors["y1"][:8, :16]
    timer._gemm("w1", a, b, y)()
    exact = a.double() @ (b.double() * tensors["w_scale1"][:, :16]) + tensors["bias1"][:, :16]
    assert torch.allclose(y.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("by", ["tensor", "row"])
def test_parts_of_one_scaled_gemm_are_timed_with_its_scales(by: str) -> None:
    """Parts are timed in memory of their own, because the result may have fewer rows."""
    p = ScaledMatmulReduceScatter(2, 16, 48, 32, "bf16", by, True, True)  # type: ignore[arg-type]
    by_row = by == "row"
    tensors = {
        "x": random(16, 32, dtype=FP8), "w": random(48, 32, dtype=FP8).t(), "x_scale": random(16 if by_row else 1, 1),
        "w_scale": random(1, 48 if by_row else 1), "bias": random(1, 48, dtype=torch.bfloat16),
        "y": torch.ones(8, 48, dtype=torch.bfloat16),
    }  # fmt: skip
    timer = GemmTimer(p, tensors)
    assert set(timer.weights) == {"w"}
    a, y = timer.x[: 16 * 32].view(16, 32), timer.results["w"][:16, :48]
    timer._gemm("w", a, tensors["w"], y)()
    scale = 1.0 if by_row else tensors["x_scale"].double()
    exact = a.double() * scale @ (tensors["w"].double() * tensors["w_scale"]) + tensors["bias"]
    assert torch.allclose(y.double(), exact, rtol=2**-8, atol=1e-4)
    assert torch.equal(tensors["y"], torch.ones(8, 48, dtype=torch.bfloat16))
