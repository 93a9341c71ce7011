"""`weft.all_gather_scaled_matmul`: scaled fp8 GEMMs that start before all of their input has arrived.

This is the fp8 variant of `weft.all_gather_matmul`. Schedules send row-wise scales together with the rows, and one
signal announces both.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.arguments import check_flag, check_tensor, check_tensors, checked_dimension, checked_rows, listed
from weft.builders import AllGatherMatmul, Scaled
from weft.operator.calls import made
from weft.operator.flattened import (
    UNEVEN,
    check_weights,
    flattened,
    outer_of,
    outer_text,
    restored,
    rows_of_ranks,
)
from weft.operator.layout import contiguous
from weft.operator.registration import registered
from weft.operator.replay import replayed
from weft.operator.scaled import FP8, check_beside, check_on, column_major, refuse_gradients, scale_of
from weft.operator.spec import Across, Operator
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.symm.groups import rank_of, size_of
from weft.timeline import Timeline
from weft.words import counted, joined

_OUT = {TORCH_DTYPE[name]: name for name in ("bf16", "fp16", "fp32", "fp8")}


@replayed
def all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group: dist.ProcessGroup | str,
    biases: Sequence[torch.Tensor | None] | None = None,
    result_scales: Sequence[torch.Tensor | None] | None = None,
    out_dtypes: Sequence[torch.dtype | None] | None = None,
    use_fast_accum: Sequence[bool] | None = None,
    *,
    return_A: bool = True,
    schedule: str | None = None,
    rows: Sequence[int] | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """All-gather the fp8 `A_shard` along `gather_dim` over `group`, and multiply the result by each of the fp8 `Bs`,
    with scales.

    Same arguments and results as `torch.ops.symm_mem.fused_all_gather_scaled_matmul`. Equivalent to

        A = all_gather(A_shard, gather_dim); return A, [torch._scaled_mm(A, B, A_scale, B_scale, bias) for B, ...]

    Schedules, memory and first calls are as for `weft.all_gather_matmul`. All ranks of `group` must make the call.
    Inputs that require gradients are refused.

    A_shard: [..., K] in float8_e4m3fn, at least 2-D, K a multiple of 16.
    Bs: [K, N_i] in float8_e4m3fn, N_i a multiple of 16, column-major (`weight.t()`). Other layouts are copied, with a
        warning.
    A_scale: fp32. As in torch's op, the shape determines the meaning. The first case that applies is used:
        - A_shard's shape with a last dimension of 1: a scale for each row of this shard. Scales are gathered with the
          rows.
        - A's shape with a last dimension of 1: a scale for each row of A, equal on every rank. A rank reads the scales
          of its own rows.
        - A one-element tensor with A_shard's number of dimensions, such as [1, 1], if some rank has only one row: this
          scale for each row of this shard. (For the rank with one row the first case applies, so all ranks treat scales
          as row-wise.)
        - Any other single element, such as a scalar: one scale for all of A. Pass the same value on every rank; weft
          does not check it.
    B_scales: for each B, its fp32 scale: one element or, with row-wise A_scale, [1, N_i]: a scale for each column.
    biases: for each B, [N_i] or None. A bf16 or fp16 result needs a bias of its own dtype, an fp8 result needs a bf16
        bias, and an fp32 result cannot have a bias. None: no biases.
    result_scales: must be None, or a list of None: scales of results are not supported. Multiply B_scales by them
        instead.
    out_dtypes: the dtype of each result: torch.bfloat16, float16, float32, or float8_e4m3fn if A_scale is not row-wise.
        An entry None means float8_e4m3fn. fp8 results saturate at the largest fp8 number. If the whole argument is
        None, all results are bfloat16.
    use_fast_accum: for each B, True for faster, less exact accumulation. None: False for all.
    return_A: True to return the gathered A too, as torch's op always does. False allows more schedules and saves a
        copy.
    gather_dim, group, schedule, rows, deadline_s, timeline: as for `weft.all_gather_matmul`.

    Returns (A or None, [y...]), with shapes as in `weft.all_gather_matmul`. A is float8_e4m3fn, and each y has its
    out_dtype. On CPU the call computes in fp32 and is meant for tests.

    Memory: as for `weft.all_gather_matmul`. Row-wise scales are in symmetric memory too.

    Raises the errors of `weft.all_gather_matmul`.

    Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", which covers GEMMs
        without scales.
    """

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        options = Bs, A_scale, B_scales, gather_dim, biases, result_scales, out_dtypes, use_fast_accum
        return _call(A_shard, *options, return_A, rows, group)

    results = made(OPERATOR, group, A_shard, form, schedule=schedule, deadline_s=deadline_s, timeline=timeline)
    results = restored(results, A_shard.shape, gather_dim, rows, group)
    return (results[-1], results[:-1]) if return_A else (None, results)


class _Call(NamedTuple):
    """The arguments of a call, with tensors as matrices.

    scale: the scale of x, [1, 1], or [rows, 1] if `by_row`.
    out: weft's names of the results' dtypes.
    rows: the number of rows of each rank, if they differ.
    outer: the part of A_shard's shape that is lost in the reshape to a matrix: gather_dim, and the sizes of all other
        dimensions except the last. Ranks compare `outer`. None if A_shard is a matrix (`outer_of`).
    """

    x: torch.Tensor
    Bs: list[torch.Tensor]
    scale: torch.Tensor
    B_scales: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    out: list[str]
    fast: list[bool]
    by_row: bool
    return_x: bool
    rows: Sequence[int] | None
    outer: list[int] | None = None


def _call(
    A_shard: torch.Tensor, Bs: Sequence[torch.Tensor], A_scale: torch.Tensor, B_scales: Sequence[torch.Tensor], gather_dim: int,
    biases: Sequence[torch.Tensor | None] | None, result_scales: Sequence[torch.Tensor | None] | None,
    out_dtypes: Sequence[torch.dtype | None] | None, use_fast_accum: Sequence[bool] | None, return_A: bool,
    rows: Sequence[int] | None, group: dist.ProcessGroup | str | None,
) -> _Call:  # fmt: skip
    """Return the caller's arguments as a `_Call`. Raise `ValueError` for invalid arguments."""
    check_tensor("A_shard", A_shard)
    check_tensor("A_scale", A_scale)
    check_tensors("Bs", Bs := listed("Bs", Bs))
    check_tensors("B_scales", B_scales := listed("B_scales", B_scales))
    biases = [None] * len(Bs) if biases is None else listed("biases", biases)
    for i, bias in enumerate(biases):
        if bias is not None:
            check_tensor(f"biases[{i}]", bias)
    dim = checked_dimension(A_shard, gather_dim)
    sizes = rows_of_ranks(rows, A_shard, dim, group)
    by_row, scale = _scale_of_rows(A_scale, A_shard, dim, rows, group)
    dtypes = [torch.bfloat16] * len(Bs) if out_dtypes is None else listed("out_dtypes", out_dtypes)
    fast = [False] * len(Bs) if use_fast_accum is None else listed("use_fast_accum", use_fast_accum)
    of_results = [None] * len(Bs) if result_scales is None else listed("result_scales", result_scales)
    _check_rest((A_shard, A_scale, *Bs, *B_scales, *biases), len(Bs), B_scales, biases, of_results, dtypes, fast)
    check_flag("return_A", return_A)
    out = [_OUT[FP8 if dtype is None else dtype] for dtype in dtypes]
    scales = [scale_of(B, scale, by_row) for B, scale in zip(Bs, B_scales, strict=True)]
    x, outer = flattened(A_shard, dim), outer_of(A_shard, dim)
    return _Call(x, list(Bs), scale, scales, list(biases), out, list(fast), by_row, return_A, sizes, outer)


def _scale_of_rows(
    A_scale: torch.Tensor, A_shard: torch.Tensor, gather_dim: int, rows: Sequence[int] | None,
    group: dist.ProcessGroup | str | None,
) -> tuple[bool, torch.Tensor]:  # fmt: skip
    """Return (True if each row has a scale, the scale as a matrix: [rows of the shard, 1] or [1, 1]).

    Only the shape of `A_scale` decides, as in torch's op.
    """
    extent, shape = A_shard.shape[gather_dim], list(A_scale.shape)
    sizes = [extent] * size_of(group) if rows is None else list(rows)

    def of_rows(number: int) -> list[int]:
        return [*A_shard.shape[:gather_dim], number, *A_shard.shape[gather_dim + 1 : -1], 1]

    if shape == of_rows(extent):
        return True, flattened(A_scale, gather_dim).contiguous()
    if shape == of_rows(sum(sizes)):
        mine = A_scale.narrow(gather_dim, sum(sizes[: rank_of(group)]), extent)
        return True, flattened(mine, gather_dim).contiguous()
    if A_scale.numel() == 1:
        if shape != of_rows(1) or 1 not in sizes:
            return False, A_scale.reshape(1, 1)
        # A rank with one row treats a scale of this shape as row-wise. So this rank must treat it as row-wise too.
        return True, A_scale.reshape(1, 1).expand(flattened(A_shard, gather_dim).shape[0], 1).contiguous()
    raise ValueError(
        f"A_scale has shape {tuple(shape)}: pass one element, or one scale per row with shape {tuple(of_rows(extent))} for "
        f"this rank's rows, or {tuple(of_rows(sum(sizes)))} for the rows of all ranks"
    )


def _check_rest(
    tensors: Sequence[torch.Tensor | None], count: int, B_scales: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None], out_dtypes: Sequence[torch.dtype | None], fast: Sequence[bool],
) -> None:  # fmt: skip
    """Raise `ValueError` for lists of the wrong length, `result_scales`, unsupported `out_dtypes`, flags that are no booleans,
    and inputs that require gradients.
    """
    lists = {"B_scales": B_scales, "biases": biases, "result_scales": result_scales, "out_dtypes": out_dtypes}
    for name, given in (lists | {"use_fast_accum": fast}).items():
        if len(given) != count:
            raise ValueError(f"{name} has {counted(len(given), 'entry', 'entries')}: pass one for each of {count} Bs")
    for i, flag in enumerate(fast):
        check_flag(f"use_fast_accum[{i}]", flag)
    if any(scale is not None for scale in result_scales):
        raise ValueError(
            "result_scales are not supported: pass None for each result, and multiply B_scales by the scales. You can "
            "also multiply results that are not fp8 after the call"
        )
    for dtype in out_dtypes:
        if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in _OUT):
            raise ValueError(f"out_dtypes has {dtype}: use one of {', '.join(map(str, _OUT))}")
    refuse_gradients(tensors)


class _AllGatherScaledMatmul(Operator[_Call]):
    name, form, hint = "all_gather_scaled_matmul", _Call, UNEVEN
    compared = ("outer",)
    across_ranks: ClassVar[Mapping[str, Across]] = {
        "A_shard": "layout", "Bs": "layout", "A_scale": "layout", "B_scales": "layout", "gather_dim": "alike", "group": "own",
        "biases": "layout", "result_scales": "own", "out_dtypes": "alike", "use_fast_accum": "alike", "return_A": "alike",
        "schedule": "alike", "rows": "alike", "deadline_s": "own", "timeline": "own",
    }  # fmt: skip
    caller_names: ClassVar[Mapping[str, str]] = {"x": "A_shard", "scale": "A_scale"}
    arguments: ClassVar[Mapping[str, str]] = {"x_shard": "A_shard", "x": "A", "x_scale": "A_scale"}
    tags = (torch.Tag.needs_fixed_stride_order,)

    def checked(self, call: _Call, group: dist.ProcessGroup) -> _Call:
        return call if call.rows is None else call._replace(rows=checked_rows(call.rows, call.x, 0, group))

    def key(self, call: _Call) -> Hashable:
        return super().key(call), tuple([bias is None or bias.is_contiguous() for bias in call.biases])

    def problem(self, call: _Call, world: int, most: int) -> AllGatherMatmul:
        x = call.x
        if x.dtype != FP8:
            raise ValueError(f"A_shard is {x.dtype}: use {FP8}, or weft.all_gather_matmul for other dtypes")
        check_weights(x, call.Bs)
        check_on(x.device, "A_scale", call.scale, torch.float32)
        for i, (B, scale, bias, out) in enumerate(zip(call.Bs, call.B_scales, call.biases, call.out, strict=True)):
            check_on(x.device, f"B_scales[{i}]", scale, torch.float32)
            if out == "fp8" and call.by_row:
                raise ValueError(
                    f"out_dtypes[{i}] is {FP8} (or None), but fp8 GEMMs with a scale per row cannot return fp8: use "
                    "torch.bfloat16, or pass A_scale as a scalar"
                )
            check_beside(B, scale, bias, out, call.by_row, (f"B_scales[{i}]", f"biases[{i}]"))
        scaled = Scaled(
            "row" if call.by_row else "tensor",
            tuple(call.out),
            tuple(b is not None for b in call.biases),
            tuple(call.fast),
        )
        n_of = tuple(B.shape[1] for B in call.Bs)
        return AllGatherMatmul(
            world, tuple(call.rows or (x.shape[0],) * world), n_of, x.shape[1], "fp8", call.return_x, scaled
        )

    def given(self, call: _Call) -> str:
        biased = [f"biases[{i}]" for i, bias in enumerate(call.biases) if bias is not None]
        return joined(
            "return_A=False" * (call.return_x is False),
            f"out_dtypes=[{', '.join(str(TORCH_DTYPE[out]) for out in call.out)}]" * (set(call.out) != {"bf16"}),
            f"use_fast_accum={call.fast}" * any(fast is True for fast in call.fast),
            "with " * bool(biased) + ", ".join(biased),
            outer_text("A_shard", call.outer),
        )

    def inputs(self, p: AllGatherMatmul, call: _Call) -> dict[str, Any]:
        tensors = {"x_shard": contiguous(call.x, "A_shard", self.name), "x_scale": call.scale}
        for i, (B, scale, bias) in enumerate(zip(call.Bs, call.B_scales, call.biases, strict=True)):
            tensors[f"w{i}"] = column_major(B, f"Bs[{i}]", self.name)
            tensors[f"w_scale{i}"] = scale.contiguous()
            if bias is not None:
                tensors[f"bias{i}"] = bias.view(1, -1)
        return tensors

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        x, m = call.x, sum(call.rows) if call.rows else call.x.shape[0] * world
        tensors = {
            f"y{i}": x.new_empty(m, B.shape[1], dtype=TORCH_DTYPE[out])
            for i, (B, out) in enumerate(zip(call.Bs, call.out, strict=True))
        }
        if call.return_x:
            tensors["x"] = x.new_empty(m, x.shape[1])
        return tensors

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return results[0].shape[0], call.Bs


OPERATOR = registered(_AllGatherScaledMatmul())
