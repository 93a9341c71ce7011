"""torch's fused operators of fp8 GEMMs, called with weft's arguments, on GPUs. These functions run on the ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from support.on_ranks import FP8
from support.operators.scaled import (
    AllGatherScaledMatmulCall,
    ScaledGathered,
    ScaledGemm,
    ScaledMatmulReduceScatterCall,
)


def _enabled(group: dist.ProcessGroup) -> Any:
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    return torch.ops.symm_mem


def _nearly_the_bits(y: torch.Tensor, other: torch.Tensor) -> None:
    """Check that at most 2% of the elements differ. A GEMM of another number of rows may round differently."""
    different = (y.float() != other.float()).float().mean().item()
    assert different < 0.02, f"{different:.1%} of the elements differ"


def all_gather_scaled_matmul(group: dist.ProcessGroup, case: ScaledGathered) -> None:
    op, call = _enabled(group).fused_all_gather_scaled_matmul, AllGatherScaledMatmulCall(case, group, 7)
    of = call.arguments(call.mine, group)
    n, out = len(of["Bs"]), None if case.out == FP8 else case.out
    A, expected = op(
        of["A_shard"], of["Bs"], of["A_scale"], of["B_scales"], case.dim, group.group_name, of["biases"], [None] * n,
        [out] * n, of["use_fast_accum"],
    )  # fmt: skip
    _, *found = call(group)
    call.check(group, [A, *found])
    call.check(group, [A, *expected])
    for y, other in zip(found, expected, strict=True):
        assert y.stride() == other.stride()
        _nearly_the_bits(y, other)


def scaled_matmul_reduce_scatter(group: dist.ProcessGroup, case: ScaledGemm) -> None:
    op, call = _enabled(group).fused_scaled_matmul_reduce_scatter, ScaledMatmulReduceScatterCall(case, group, 7)
    A, B, A_scale, B_scale, *bias = call.mine
    theirs = op(
        A, B, A_scale, B_scale, case.op, case.dim, case.dim, group.group_name, [*case.shape[:-1], case.n],
        bias[0] if bias else None, None, case.out, case.fast,
    )  # fmt: skip
    (mine,) = call(group)
    call.check(group, [theirs])
    call.check(group, [mine])
    if case.out != torch.float32:
        _nearly_the_bits(mine, theirs)
