"""`weft.scaled_matmul_reduce_scatter`: a scaled fp8 GEMM that sends finished rows to their owners while it computes
other rows.

This is the fp8 variant of `weft.matmul_reduce_scatter`. Products are sent and reduced in the result's dtype, because
fp8 cannot hold sums. Scales are not sent: each GEMM of some rows of A uses the scales of these rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist

from weft.arguments import check_flag, check_reduction, check_tensor, checked_dimension, checked_shape
from weft.builders import ScaledMatmulReduceScatter
from weft.operator.calls import made
from weft.operator.flattened import check_even, check_weights, flattened, outer_of, outer_text, restored
from weft.operator.layout import contiguous, normal
from weft.operator.registration import registered
from weft.operator.replay import replayed
from weft.operator.scaled import FP8, check_beside, check_on, column_major, refuse_gradients, scale_of
from weft.operator.spec import Across, Operator
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.symm.groups import size_of
from weft.timeline import Timeline
from weft.words import joined

_OUT = {TORCH_DTYPE[name]: name for name in ("bf16", "fp16", "fp32")}


@replayed
def scaled_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int | None,
    group: dist.ProcessGroup | str,
    output_shape: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    *,
    schedule: str | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> torch.Tensor:
    """Multiply the fp8 `A` by the fp8 `B` with scales, reduce the products of all ranks, and return this rank's part.

    Same arguments and result as `torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter`. Equivalent to

        y = torch._scaled_mm(A.flatten(0, -2), B, A_scale, B_scale, bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
        return reduce_scatter(y.view(output_shape), reduce_op, orig_scatter_dim)

    Schedules, memory and first calls are as for `weft.matmul_reduce_scatter`. All ranks of `group` must make the call.
    Inputs that require gradients are refused.

    A: [..., K] in float8_e4m3fn, at least 2-D, K a multiple of 16. Copied if `A.movedim(orig_scatter_dim, 0)` is not
        contiguous. For fp32, fp16 and bf16 use `weft.matmul_reduce_scatter`.
    B: [K, N] in float8_e4m3fn, N a multiple of 16, column-major (`weight.t()`). Other layouts are copied, with a
        warning.
    A_scale: fp32. One element scales all of A. A tensor of A's shape with a last dimension of 1 scales each row of A.
    B_scale: fp32, one element. With row-wise A_scale it may also be [1, N], a scale for each column.
    reduce_op: "sum", or "avg" (the sum divided by the number of ranks). Must be equal on all ranks.
    orig_scatter_dim: any dimension of output_shape except the last. Its size must be divisible by the number of ranks.
    scatter_dim_after_maybe_reshape: the dimension of A that contains orig_scatter_dim: orig_scatter_dim itself, or 0 if
        A is flattened to [rows, K] and output_shape has more dimensions. None: weft determines it.
    group: a process group, or its name.
    output_shape: the shape [..., N] of the whole product, if A is flattened. None: A's shape with N in place of K.
    bias: [N] in out_dtype, which must then be bfloat16 or float16. Each rank adds its bias to its product, so the sum
        contains the biases of all ranks. Pass a bias on all ranks or on none.
    result_scale: must be None. Scale B_scale or the result instead.
    out_dtype: torch.bfloat16, float16 or float32, the dtype in which products are sent and reduced. None is refused: in
        torch's op it means fp8, which cannot hold sums. With row-wise scales, some GPUs support bfloat16 only.
    use_fast_accum: True for faster, less exact accumulation.
    schedule, deadline_s, timeline: as for `weft.matmul_reduce_scatter`. Scaled GEMMs cannot add to an existing result.
        So the schedule "ring", schedules with add=gemm and schedules with tracked GEMMs (by=tracked) are not available.

    Returns this rank's part of the sum in out_dtype. Its shape is output_shape with the size of orig_scatter_dim
    divided by the number of ranks. In memory, orig_scatter_dim is the outermost dimension. Overlapped schedules round
    products to out_dtype, reduce them in fp32, and round the sum once. "avg" divides the rounded sum. On CPU the call
    computes in fp32 and is meant for tests. On GPUs it runs cuBLAS and then NCCL, unless a schedule is pinned or
    "autotune" is requested.

    Memory: as for `weft.matmul_reduce_scatter`, with products in out_dtype.

    Raises the errors of `weft.matmul_reduce_scatter`.

    Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", which covers
        unscaled data.
    """

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        for name, tensor in (("A", A), ("B", B), ("A_scale", A_scale), ("B_scale", B_scale)):
            check_tensor(name, tensor)
        if bias is not None:
            check_tensor("bias", bias)
        check_reduction("reduce_op", reduce_op)
        check_flag("use_fast_accum", use_fast_accum)  # torch's dispatcher would convert a number
        if result_scale is not None:
            raise ValueError(
                "result_scale is not supported: pass None, and apply the scale to B_scale or to the result"
            )
        if not isinstance(out_dtype, torch.dtype) or out_dtype not in _OUT:
            raise ValueError(
                f"out_dtype={out_dtype}: use one of {', '.join(map(str, _OUT))}, in which the ranks' products can be reduced"
            )
        refuse_gradients((A, B, A_scale, B_scale, bias))
        x, dim = _scattered(A, B, orig_scatter_dim, scatter_dim_after_maybe_reshape, output_shape)
        check_even(x.shape, dim, size_of(group), name="orig_scatter_dim")
        by_row = _has_scale_of_rows(A, A_scale, B_scale)
        scale = flattened(A_scale.reshape(*x.shape[:-1], 1), dim).contiguous() if by_row else A_scale.reshape(1, 1)
        of_columns = scale_of(B, B_scale, by_row)
        options = _OUT[out_dtype], use_fast_accum, by_row, reduce_op == "avg", outer_of(x, dim)
        return _Call(flattened(x, dim), B, scale, of_columns, bias, *options)

    (y,) = made(OPERATOR, group, A, form, schedule=schedule, deadline_s=deadline_s, timeline=timeline)
    world = size_of(group)
    if reduce_op == "avg":
        y = y.div_(world)
    shape = A.shape if output_shape is None else (*output_shape[:-1], A.shape[-1])
    (y,) = restored([y], shape, orig_scatter_dim, [shape[orig_scatter_dim] // world], group)
    return y


def _scattered(
    A: torch.Tensor, B: torch.Tensor, orig_scatter_dim: int, after: int | None, output_shape: Sequence[int] | None
) -> tuple[torch.Tensor, int]:
    """Return (A, reshaped to `output_shape` with K in place of N; the dimension to scatter). Raise `ValueError` if the
    dimensions do not match.
    """
    of_A = checked_dimension(A, 0 if after is None else after, names=("A", "scatter_dim_after_maybe_reshape"))
    x = A if output_shape is None else A.reshape(_leading(A, B, output_shape) + A.shape[-1:])
    dim = checked_dimension(x, orig_scatter_dim, names=("A", "orig_scatter_dim"))
    expected = dim if x.dim() == A.dim() else 0
    if after is not None and of_A != expected:
        raise ValueError(
            f"scatter_dim_after_maybe_reshape={after} must be {expected}, because orig_scatter_dim={orig_scatter_dim} is "
            f"dimension {expected} of A {tuple(A.shape)}: pass {expected}, or None"
        )
    return x, dim


def _leading(A: torch.Tensor, B: torch.Tensor, output_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the product's dimensions except the last. Raise `ValueError` if output_shape does not match A
    and B.
    """
    shape, rows = checked_shape("output_shape", output_shape), math.prod(A.shape[:-1])
    alike = shape[:-1] == A.shape[:-1] or (A.dim() == 2 and len(shape) > 2 and math.prod(shape[:-1]) == rows)
    if not alike or shape[-1:] != B.shape[-1:] or min(shape) < 0:
        raise ValueError(
            f"output_shape={shape} does not match A {tuple(A.shape)} @ B {tuple(B.shape)}: pass "
            f"{(*A.shape[:-1], *B.shape[-1:])}, or flatten A to {(rows, A.shape[-1])} and pass an "
            f"output_shape with {rows} rows in total"
        )
    return shape[:-1]


def _has_scale_of_rows(A: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor) -> bool:
    own = (*A.shape[:-1], 1)
    if A_scale.shape == own and (A_scale.numel() != 1 or B_scale.numel() != 1):
        return True
    if A_scale.numel() == 1:
        return False
    raise ValueError(
        f"A_scale has shape {tuple(A_scale.shape)}: pass one element, or one scale per row with shape {own}"
    )


class _Call(NamedTuple):
    """The arguments of a call, with tensors as matrices.

    scale: the scale of x, [1, 1], or [rows, 1] if `by_row`.
    out: weft's name of the result's dtype.
    average: True if the public function divides the sum by the number of ranks.
    outer: the part of the product's shape that is lost in the reshape to a matrix: the scattered dimension, and the
        sizes of all other dimensions except the last. Ranks compare `outer`. None if the product is a matrix
        (`outer_of`).
    """

    x: torch.Tensor
    B: torch.Tensor
    scale: torch.Tensor
    B_scale: torch.Tensor
    bias: torch.Tensor | None
    out: str
    fast: bool
    by_row: bool
    average: bool = False
    outer: list[int] | None = None


class _ScaledMatmulReduceScatter(Operator[_Call]):
    name, form = "scaled_matmul_reduce_scatter", _Call
    compared = ("average", "outer")
    across_ranks: ClassVar[Mapping[str, Across]] = {
        "A": "layout", "B": "layout", "A_scale": "layout", "B_scale": "layout", "reduce_op": "alike", "orig_scatter_dim": "alike",
        "scatter_dim_after_maybe_reshape": "own", "group": "own", "output_shape": "alike", "bias": "layout",
        "result_scale": "own", "out_dtype": "alike", "use_fast_accum": "alike", "schedule": "alike", "deadline_s": "own",
        "timeline": "own",
    }  # fmt: skip
    caller_names: ClassVar[Mapping[str, str]] = {"x": "A", "scale": "A_scale"}
    tags = (torch.Tag.needs_fixed_stride_order,)

    def key(self, call: _Call) -> Hashable:
        return super().key(call), call.bias is None or call.bias.is_contiguous()

    def problem(self, call: _Call, world: int, most: int) -> ScaledMatmulReduceScatter:
        x, B = call.x, call.B
        if x.dtype != FP8:
            raise ValueError(f"A is {x.dtype}: use {FP8}, or weft.matmul_reduce_scatter for fp32, fp16 and bf16")
        check_weights(x, [B], what="A", each="B")
        check_even(x.shape, 0, world)
        check_on(x.device, "A_scale", call.scale, torch.float32)
        check_on(x.device, "B_scale", call.B_scale, torch.float32)
        check_beside(B, call.B_scale, call.bias, call.out, call.by_row, ("B_scale", "bias"))
        by: Literal["tensor", "row"] = "row" if call.by_row else "tensor"
        (m, k), n, biased = x.shape, B.shape[1], call.bias is not None
        return ScaledMatmulReduceScatter(world, m, n, k, call.out, by, biased, call.fast)

    def multiple_of_rows(self, world: int) -> int:
        return world

    def given(self, call: _Call) -> str:
        return joined(
            'reduce_op="avg"' * call.average,
            f"out_dtype={TORCH_DTYPE[call.out]}" * (call.out != "bf16"),
            "use_fast_accum=True" * (call.fast is True),
            "with a bias" * (call.bias is not None),
            outer_text("A", call.outer),
        )

    def inputs(self, p: ScaledMatmulReduceScatter, call: _Call) -> dict[str, Any]:
        tensors = {"x": contiguous(call.x, "A", self.name), "x_scale": call.scale}
        tensors |= {"w": column_major(call.B, "B", self.name), "w_scale": call.B_scale.contiguous()}
        return tensors if call.bias is None else tensors | {"bias": call.bias.view(1, -1)}

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        return {"y": call.x.new_empty(call.x.shape[0] // world, call.B.shape[1], dtype=TORCH_DTYPE[call.out])}

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return call.x.shape[0], [call.B]

    def drawn(self, p: ScaledMatmulReduceScatter, rank: int, generator: torch.Generator) -> _Call:
        """Return a call with random tensors. Its scales make results about 1 in size, because fp8 cannot represent small
        numbers.
        """
        random, by_row = partial(normal, generator), p.by == "row"
        scale, B_scale = (random("fp32", n if by_row else 1).abs_().add_(0.5) for n in (p.m, p.n))
        bias = random(p.dtype, p.n) if p.biased else None
        x, B = random("fp8", p.m, p.k), random("fp8", p.n, p.k).t()
        return _Call(x, B, scale[:, None], B_scale.mul_(p.k**-0.5)[None], bias, p.dtype, p.fast, by_row)

    def expected(self, p: ScaledMatmulReduceScatter, rank: int, calls: Sequence[_Call]) -> list[torch.Tensor]:
        mine = slice(rank * p.rows, (rank + 1) * p.rows)
        total = torch.zeros(p.rows, p.n, dtype=torch.float64, device=calls[0].x.device)
        for call in calls:
            x = call.x[mine].double() * (call.scale[mine] if call.by_row else call.scale).double()
            total += x @ (call.B.double() * call.B_scale.double())
            total += 0.0 if call.bias is None else call.bias.double()
        return [total]


OPERATOR = registered(_ScaledMatmulReduceScatter())
