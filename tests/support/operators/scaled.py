"""Calls of fp8 GEMMs with scales and a collective: all_gather_scaled_matmul and scaled_matmul_reduce_scatter.

The reference is float64: the product of the operands, each times its scales. The error may be twice that of torch's
scaled GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from support.on_ranks import BF16, F32, FP8, NAMES, data, device
from support.operators.call import Tensors
from support.operators.gemms import AllGatherMatmulCall, Gathered, Gemm, Reduced

import weft
from weft.builders import AllGatherMatmul, Problem, Scaled, ScaledMatmulReduceScatter
from weft.ops import all_gather_scaled_matmul, scaled_matmul_reduce_scatter


@dataclass(frozen=True)
class ScaledGathered(Gathered):
    """The parameters of a call of all_gather_scaled_matmul. by: the kind of scales. "row of all": every rank passes the
    scales of the rows of all ranks.
    """

    shape: tuple[int, ...] = (7, 32)
    n: int = 16
    dtype: torch.dtype = FP8
    return_A: bool = True
    by: Literal["tensor", "row", "row of all"] = "tensor"
    out: torch.dtype = BF16
    biased: bool = False
    fast: bool = False


@dataclass(frozen=True)
class ScaledGemm(Gemm):
    """The parameters of a call of scaled_matmul_reduce_scatter. flat: True to pass A as a matrix [rows, K]."""

    shape: tuple[int, ...] = (24, 32)
    n: int = 16
    dtype: torch.dtype = FP8
    by: Literal["tensor", "row"] = "tensor"
    out: torch.dtype = BF16
    biased: bool = False
    fast: bool = False
    flat: bool = False


def scales(rank: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return data(rank, shape, F32, seed).abs() + 0.25


def multiplied(
    A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor, bias: torch.Tensor | None,
    out: torch.dtype, fast: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the product by torch's scaled GEMM on GPUs; on CPU by an fp32 GEMM, rounded once."""
    if A.device.type == "cpu":
        y = (A.float() * A_scale) @ (B.float() * B_scale)
        return (y if bias is None else y + bias).to(out)
    scale = A_scale.flatten(0, -2) if A_scale.dim() else A_scale
    y = torch._scaled_mm(A.flatten(0, -2), B, scale, B_scale, bias, out_dtype=out, use_fast_accum=fast)
    return y.view(*A.shape[:-1], y.shape[-1])


class AllGatherScaledMatmulCall(AllGatherMatmulCall):
    """A call of all_gather_scaled_matmul. inputs: A_shard, the scale of this rank's A, and for each weight B, its scale,
    and its bias if there is one.
    """

    spec, public = all_gather_scaled_matmul.OPERATOR, staticmethod(weft.all_gather_scaled_matmul)
    places = (0, 2)
    case: ScaledGathered

    def drawn(self, rank: int) -> Tensors:
        case, seed = self.case, self.seed
        A, *Bs = super().drawn(rank)
        by_row = case.by != "tensor"  # tensor-wise: each rank applies its own scale to all rows
        inputs = [A, scales(rank, (*A.shape[:-1], 1) if by_row else (), 60 + seed)]
        for i, (n, B) in enumerate(zip(case.widths, Bs, strict=True)):
            inputs += [B, scales(rank, (1, n) if by_row else (1,), 70 + seed + i)]
            if case.biased:
                inputs.append(data(rank, (n,), BF16 if case.out == FP8 else case.out, 80 + seed + i))
        return inputs

    def weights(self, inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Return (B, its scale, its bias) of each weight."""
        each = 3 if self.case.biased else 2
        given = [inputs[i : i + each] for i in range(2, len(inputs), each)]
        return [(one[0], one[1], one[2] if self.case.biased else None) for one in given]

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        case, (A, scale, *_) = self.case, inputs
        Bs, B_scales, biases = zip(*self.weights(inputs), strict=True)
        if case.by == "row of all":
            scale = torch.cat([one for _, one, *_ in self.inputs], case.dim)
        dtypes = {"out_dtypes": [case.out] * len(Bs), "use_fast_accum": [case.fast] * len(Bs)}
        scaled = {"A_scale": scale, "B_scales": list(B_scales), "biases": list(biases), **dtypes}
        return {**super().arguments([A, *Bs], group), **scaled}

    def whole(self, inputs: Sequence[Tensors], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of all ranks, and their scales as `rank` passes them."""
        shards = [A for A, *_ in inputs]
        rows = torch.cat([A.float() for A in shards], self.case.dim).to(shards[0].dtype)
        own = [scale for _, scale, *_ in inputs]
        return rows, own[rank] if self.case.by == "tensor" else torch.cat(own, self.case.dim)

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        results = []
        for rank, of_rank in enumerate(inputs):
            A, scale = self.whole(inputs, rank)
            ys = [(A * scale) @ (B * B_scale) + (0 if b is None else b) for B, B_scale, b in self.weights(of_rank)]
            results.append([A] * self.copied + ys)
        return results

    def usual(self, group: dist.ProcessGroup) -> Tensors:
        A, scale = self.whole(self.inputs, self.rank)
        out, fast = self.case.out, self.case.fast
        ys = [multiplied(A, B, scale, B_scale, bias, out, fast) for B, B_scale, bias in self.weights(self.mine)]
        return [A] * self.copied + ys

    def problem(self) -> Problem:
        case, n = self.case, len(self.case.widths)
        by: Literal["tensor", "row"] = "tensor" if case.by == "tensor" else "row"
        scaled = Scaled(by, (NAMES[case.out],) * n, (case.biased,) * n, (case.fast,) * n)
        rows = case.rows_of(self.world)
        return AllGatherMatmul(self.world, rows, case.widths, case.shape[-1], "fp8", case.return_A, scaled)

    def impossible(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return invalid arguments for A_shard [7, 32] and B [32, 16] on each of two ranks."""
        x, scale, B, B_scale = self.mine
        rows, zeros, n = scales(0, (7, 1), 1), torch.zeros(16, device=device()), 16
        fp8 = {"A_shard": x[:, :24], "Bs": [B[:24]]}
        return {
            "dtype": ({"A_shard": x.bfloat16(), "Bs": [B.bfloat16()]}, "A_shard is torch.bfloat16: use torch.float8_e4m3fn"),
            "K": (fp8, "K=24 must be a positive multiple of 16 for fp8 GEMMs: use 16 or 32"),
            "N": ({"Bs": [B[:, :8]]}, "N of Bs[0]=8 must be a positive multiple of 16 for fp8 GEMMs: use 16"),
            "no matrix": ({key: [] for key in ("Bs", "B_scales", "biases", "out_dtypes", "use_fast_accum")}, "Bs is empty"),
            "one tensor": ({"B_scales": B_scale}, "B_scales is one tensor of shape (1,): pass a list"),
            "lengths": ({"B_scales": [B_scale] * 2}, "B_scales has 2 entries: pass one for each of 1 Bs"),
            "shape of A_scale": (
                {"A_scale": scales(0, (5, 1), 1)},
                "A_scale has shape (5, 1): pass one element, or one scale per row with shape (7, 1) for this rank's rows",
            ),
            "dtype of A_scale": ({"A_scale": scale.half()}, "A_scale is torch.float16 on cpu: use torch.float32"),
            "a number": ({"A_scale": 0.5}, "A_scale is a float: pass a torch.Tensor"),
            "shape of B_scales": (
                {"A_scale": rows, "B_scales": [scales(0, (n, 1), 1)]},
                "B_scales[0] has shape (16, 1): pass one element, or one scale for each column: shape [1, 16]",
            ),
            "rows of B only": (
                {"B_scales": [scales(0, (1, n), 1)]},
                "B_scales[0] has shape (1, 16): pass one element, or use row-wise scales",
            ),
            "bias": ({"biases": [zeros]}, "biases[0] is torch.float32 on cpu: use torch.bfloat16"),
            "shape of bias": (
                {"biases": [zeros[1:].bfloat16()]}, "biases[0] has shape (15,), strides (1,): pass a contiguous [16]"
            ),
            "bias of fp32": ({"biases": [zeros], "out_dtypes": [F32]}, "is not supported by fp8 GEMMs: use torch.bfloat16"),
            "result scale": (
                {"result_scales": [scale]}, "result_scales are not supported: pass None for each result, and multiply B_scales"
            ),
            "out": ({"out_dtypes": [torch.float64]}, "out_dtypes has torch.float64: use one of torch.bfloat16"),
            "fp8 by row": (
                {"A_scale": rows, "out_dtypes": [None]},
                "out_dtypes[0] is torch.float8_e4m3fn (or None), but fp8 GEMMs with a scale per row",
            ),
            "bias of fp8": (
                {"biases": [zeros], "out_dtypes": [None]}, "biases[0] is torch.float32 on cpu: use torch.bfloat16"
            ),
            "gradient": (
                {"A_scale": scale.clone().requires_grad_()}, "an input requires gradients, but fp8 GEMMs have no gradients"
            ),
            "2D": (
                {"schedule": "ficco_2d[start=uniform,gemms=fused,steps=2,by=dma]", "return_A": False},
                "does not support scaled (fp8) GEMMs",
            ),
            "deadline": ({"deadline_s": 0}, "deadline_s=0 must be positive"),
            "timeline": ({"timeline": 3}, "timeline=3 is not a Timeline: pass weft.Timeline()"),
        }  # fmt: skip

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        by_row = {"A_scale": scales(0, (7, 1), 1), "B_scales": [scales(0, (1, 16), 1)]}
        return {
            "scales": ({}, by_row, ("scaled by row",)),
            "out": ({"out_dtypes": [torch.half]}, {}, ("out_dtypes=[torch.float16]",)),
        }

    def operations(self, group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
        Bs, B_scales, biases = (list(one) for one in zip(*self.weights(self.mine), strict=True))
        A, scale = self.mine[:2]
        return [(A, Bs, scale, B_scales, biases, ["bf16"], [False], True, True, None, None, group.group_name, "", 0.0)]


class ScaledMatmulReduceScatterCall(Reduced):
    """A call of scaled_matmul_reduce_scatter. inputs: A, B, their scales, and the bias if there is one."""

    spec, public = scaled_matmul_reduce_scatter.OPERATOR, staticmethod(weft.scaled_matmul_reduce_scatter)
    operands = ("A", "B")
    case: ScaledGemm

    def drawn(self, rank: int) -> Tensors:
        case, seed, by_row = self.case, self.seed, self.case.by == "row"
        A_scale = scales(rank, (*case.shape[:-1], 1) if by_row else (), 60 + seed)
        B_scale = scales(rank, (1, case.n) if by_row else (1,), 70 + seed)
        bias = [data(rank, (case.n,), case.out, 80 + seed)] if case.biased else []
        return [*super().drawn(rank), A_scale, B_scale, *bias]

    def arguments(self, inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | str) -> dict[str, Any]:
        case, (A, B, scale, B_scale, *bias) = self.case, inputs
        dim, shape = case.dim, None
        if case.flat:
            dim, shape = 0, [*A.shape[:-1], case.n]
            A, scale = A.flatten(0, -2), scale.flatten(0, -2) if case.by == "row" else scale
        return {
            "A": A, "B": B, "A_scale": scale, "B_scale": B_scale, "reduce_op": case.op, "orig_scatter_dim": case.dim,
            "scatter_dim_after_maybe_reshape": dim, "group": group, "output_shape": shape,
            "bias": bias[0] if bias else None, "out_dtype": case.out, "use_fast_accum": case.fast,
        }  # fmt: skip

    def reference(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        products = [(A * A_scale) @ (B * B_scale) + sum(bias) for A, B, A_scale, B_scale, *bias in inputs]
        return self.shared(torch.stack(products).sum(0))

    def usual(self, group: dist.ProcessGroup) -> Tensors:
        A, B, A_scale, B_scale, *bias = self.mine
        total = multiplied(A, B, A_scale, B_scale, bias[0] if bias else None, self.case.out, self.case.fast)
        dist.all_reduce(total, group=group)
        return self.shared(total)[self.rank]

    def shared(self, total: torch.Tensor) -> list[Tensors]:
        return [[part / self.parts] for part in total.chunk(self.world, self.case.dim)]

    def problem(self) -> Problem:
        case, (m, k) = self.case, self.case.shape
        return ScaledMatmulReduceScatter(self.world, m, case.n, k, NAMES[case.out], case.by, case.biased, case.fast)

    @classmethod
    def sized(cls, case: ScaledGemm, rows: int, world: int) -> ScaledGemm:
        return replace(case, shape=(rows * world, 128))

    def impossible(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return invalid arguments for A [24, 32] and B [32, 16] on each of two ranks."""
        A, B, scale = self.mine[:3]
        (m, _), n, of_rows = A.shape, B.shape[1], scales(self.rank, (A.shape[0], 1), 2)
        zeros, halves = torch.zeros(n, device=device()), A.view(m // 2, 2, -1)
        other = ": use torch.float8_e4m3fn"
        integers = {"A": A.float().to(torch.int64), "B": B.float().to(torch.int64)}
        changes: dict[str, tuple[dict[str, Any], str]] = {
            "integers": (integers, f"A is torch.int64{other}, or weft.matmul_reduce_scatter for fp32, fp16 and bf16"),
            "bf16": ({"A": A.bfloat16(), "B": B.bfloat16()}, f"A is torch.bfloat16{other}"),
            "other fp8": ({"A": A.to(torch.float8_e5m2)}, f"A is torch.float8_e5m2{other}"),
            "K": ({"A": A[:, :24], "B": B[:24]}, "K=24 must be a positive multiple of 16 for fp8 GEMMs: use 16 or 32"),
            "N": ({"B": B[:, :8]}, "N=8 must be a positive multiple of 16 for fp8 GEMMs: use 16"),
            "other K": ({"B": B[:16]}, "B has shape (16, 16): it must be [K=32, N] to match A [..., 32]"),
            "no matrix": ({"B": B[0, 0]}, "B has shape (): it must be [K=32, N]"),
            "no rows": ({"A": A[0]}, "A has shape (32,): pass at least two dimensions"),
            "odd rows": (
                {"A": A[:-1]},
                "whose size 23 in dimension orig_scatter_dim=0 must be divisible by world_size=2: pad it to 24",
            ),
            "a number": ({"A_scale": 0.5}, "A_scale is a float: pass a torch.Tensor"),
            "shape of A_scale": (
                {"A_scale": of_rows[:5]}, "A_scale has shape (5, 1): pass one element, or one scale per row with shape (24, 1)"
            ),
            "dtype of A_scale": ({"A_scale": scale.half()}, "A_scale is torch.float16 on cpu: use torch.float32"),
            "shape of B_scale": (
                {"A_scale": of_rows, "B_scale": scales(0, (n, 1), 1)},
                "B_scale has shape (16, 1): pass one element, or one scale for each column: shape [1, 16]",
            ),
            "columns of B only": (
                {"B_scale": scales(0, (1, n), 1)},
                "B_scale has shape (1, 16): pass one element, or use row-wise scales",
            ),
            "bias": ({"bias": zeros}, "bias is torch.float32 on cpu: use torch.bfloat16"),
            "shape of bias": (
                {"bias": zeros[1:].bfloat16()}, "bias has shape (15,), strides (1,): pass a contiguous [16]"
            ),
            "bias of fp32": (
                {"bias": zeros, "out_dtype": F32},
                "bias with out_dtype=torch.float32 is not supported by fp8 GEMMs: use torch.bfloat16",
            ),
            "result scale": (
                {"result_scale": scale}, "result_scale is not supported: pass None, and apply the scale to B_scale or to the result"
            ),
            "no out": (
                {"out_dtype": None},
                "out_dtype=None: use one of torch.bfloat16, torch.float16, torch.float32, in which the ranks' products can be",
            ),
            "out": ({"out_dtype": FP8}, "out_dtype=torch.float8_e4m3fn: use one of torch.bfloat16"),
            "gradient": (
                {"A_scale": scale.clone().requires_grad_()}, "an input requires gradients, but fp8 GEMMs have no gradients"
            ),
            "reduce_op": ({"reduce_op": "max"}, 'reduce_op=\'max\': use "sum" or "avg"'),
            "fast": ({"use_fast_accum": 1}, "use_fast_accum=1 is an int: pass True or False"),
            "last": ({"orig_scatter_dim": 1}, "orig_scatter_dim=1 is not allowed for A (24, 32)"),
            "other dimension": (
                {"A": halves, "scatter_dim_after_maybe_reshape": 1},
                "scatter_dim_after_maybe_reshape=1 must be 0, because orig_scatter_dim=0 is dimension 0 of A (12, 2, 32)",
            ),
            "no such dimension": (
                {"scatter_dim_after_maybe_reshape": 2},
                "scatter_dim_after_maybe_reshape=2 is not",
            ),
            "columns of shape": (
                {"output_shape": [m, n + 1]},
                "output_shape=(24, 17) does not match A (24, 32) @ B (32, 16): pass (24, 16), or flatten A to (24, 32)",
            ),
            "rows of shape": (
                {"output_shape": [m, 2, n]}, "output_shape=(24, 2, 16) does not match A (24, 32) @ B (32, 16)"
            ),
            "a word for a size": ({"output_shape": [m, "16"]}, "output_shape[1]='16' is a str: pass an integer"),
            "another shape": (
                {"A": halves, "output_shape": [2, m // 2, n]},
                "output_shape=(2, 12, 16) does not match A (12, 2, 32) @ B (32, 16): pass (12, 2, 16), or flatten A to",
            ),
            "add": ({"schedule": "direct[chunks=2,by=dma,add=gemm]"}, "with scales cannot accumulate: use add=reduce"),
            "tracked": ({"schedule": "tracked[chunks=1,to=dma]"}, "does not support fp8: use direct[...] or scatter"),
            "deadline": ({"deadline_s": 0}, "deadline_s=0 must be positive"),
        }  # fmt: skip
        return changes

    def different(self) -> dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]]:
        by_row = {"A_scale": scales(0, (24, 1), 1), "B_scale": scales(0, (1, 16), 1)}
        return {
            "scales": (by_row, {}, ("scaled by row",)),
            "out": ({"out_dtype": torch.half}, {}, ("reduced in fp16",)),
            "bias": ({"bias": torch.zeros(16, dtype=BF16, device=device())}, {}, ("with a bias",)),
        }

    def operations(self, group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
        options = "bf16", False, True, False, None, group.group_name, "", 0.0
        return [(*self.mine, *options)]
