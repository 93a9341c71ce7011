"""weft.all_gather_scaled_matmul: fp8 GEMMs with scales that start before all of their input is there.

The scaled sibling of `weft.all_gather_matmul`, made of the same parts: from one call down, what the caller means is brought into
one form (`_Call`), then found or made is what was prepared for calls of that form (`_Prepared`), then it runs. Scales of
rows travel with their rows: each schedule sends them beside the data, under the same signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft import plan
from weft.arguments import check_flag, check_tensor, check_tensors, checked_dimension, checked_rows, listed
from weft.ops import choosing
from weft.ops.flattened import UNEVEN, check_weights, flattened, restored, rows_of_one
from weft.ops.gathered import gathered_by_library
from weft.ops.prepared import Prepared, Table, check_options, contiguous, group_of, warn_of_copy
from weft.ops.together import agree, together
from weft.runtime.opaque import opaque
from weft.runtime.scaled_matmul import scaled_matmul
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import AllGatherMatmul, Scaled
from weft.schedule.problem import SCALED_MULTIPLE
from weft.timeline import Timeline
from weft.words import counted

_FP8 = TORCH_DTYPE["fp8"]
_OUT = {TORCH_DTYPE[name]: name for name in ("bf16", "fp16", "fp32", "fp8")}


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
    """All-gather the fp8 `A_shard` along `gather_dim` over `group` and multiply the result with each of the fp8 `Bs`, scaled.

    Arguments and results are those of `torch.ops.symm_mem.fused_all_gather_scaled_matmul`. Equals

        A = all_gather(A_shard, gather_dim); return A, [torch._scaled_mm(A, B, A_scale, B_scale, bias) for B, ...]

    and what `weft.all_gather_matmul` says of schedules, memory and first calls holds. Collective over `group`. Forward only: inputs
    that want gradients are refused.

    A_shard: [..., K] in float8_e4m3fn, at least 2-D, K a multiple of 16.
    Bs: [K, N_i] in float8_e4m3fn, N_i a multiple of 16, column-major (`weight.t()`); others are copied, with a warning.
    A_scale: fp32. A_shard's shape with a last dimension of 1: one scale for each row, gathered with the rows. One element:
        the scale of all of A; each rank takes its own, as in torch's op, and nothing checks that ranks have the same. The
        shape of all of A with a last dimension of 1: one scale for each row, the same tensor on every rank, which takes its
        own rows' scales.
    B_scales: fp32, one element each; with a scale for each row of A, [1, N_i] (or one element, for all columns).
    biases: for each B [N_i] or None, in the dtype of its result, which must be bf16 or fp16; for fp8 results in bf16. None:
        no bias.
    result_scales: None, or None for each B: scale B_scales instead.
    out_dtypes: for each B torch.bfloat16, float16 or float32; or float8_e4m3fn, or None for it, if A_scale and B_scales have one
        element each. Values too large for fp8 become its largest number. None: all bfloat16.
    use_fast_accum: for each B whether to accumulate fast and less exactly. None: no.
    return_A: also return the gathered A, as torch's op always does. Without it there are more schedules, and less to copy.
    gather_dim, group, schedule, rows, deadline_s, timeline: as of `weft.all_gather_matmul`.

    Returns (A or None, [y...]), shaped as by `weft.all_gather_matmul`, A in float8_e4m3fn and each y in its out_dtype. On CPU it
    computes in fp32, for tests.
    Memory: as for `weft.all_gather_matmul`; scales of rows lie in symmetric memory too.

    Raises what `weft.all_gather_matmul` raises.

    Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", for data that is not scaled.
    """
    options = Bs, A_scale, B_scales, gather_dim, group, biases, result_scales, out_dtypes, use_fast_accum
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        if timeline is not None:
            raise ValueError("timeline is for calls one by one: a compiled call cannot fill it")
        call, gather_dim, deadline_s = _call(A_shard, *options, return_A, rows, deadline_s, timeline)
        name = group if isinstance(group, str) else group.group_name
        results = torch.ops.weft.all_gather_scaled_matmul(*call, name, schedule or "", deadline_s or 0.0)
        results = restored(results, A_shard.shape, gather_dim, rows, group)
        return (results[0], list(results[1:])) if return_A else (None, list(results))
    group = group_of(group)
    with together(_Prepared.operator, group, A_shard, deadline_s):
        call, gather_dim, deadline_s = _call(A_shard, *options, return_A, rows, deadline_s, timeline)
        results = _prepared_for(call, group, schedule, deadline_s)(call, deadline_s, timeline)
        results = restored(results, A_shard.shape, gather_dim, rows, group)
        return (results[0], list(results[1:])) if return_A else (None, list(results))


class _Call(NamedTuple):
    """A call on matrices. scale: of x_shard, [1, 1] or, `by_row`, [rows, 1]. out: names of dtypes. rows: of all ranks' shards,
    if they differ."""

    x: torch.Tensor
    Bs: list[torch.Tensor]
    scale: torch.Tensor
    B_scales: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    out: list[str]
    fast: list[bool]
    by_row: bool
    return_x: bool
    rows: list[int] | None


def _call(
    A_shard: torch.Tensor, Bs: Sequence[torch.Tensor], A_scale: torch.Tensor, B_scales: Sequence[torch.Tensor], gather_dim: int,
    group: dist.ProcessGroup | str, biases: Sequence[torch.Tensor | None] | None,
    result_scales: Sequence[torch.Tensor | None] | None, out_dtypes: Sequence[torch.dtype | None] | None,
    use_fast_accum: Sequence[bool] | None, return_A: bool, rows: Sequence[int] | None, deadline_s: float | None,
    timeline: Timeline | None,
) -> tuple[_Call, int, float | None]:  # fmt: skip
    """What the caller means, and gather_dim and deadline_s; `ValueError` for what cannot be."""
    check_tensor("A_shard", A_shard)
    check_tensor("A_scale", A_scale)
    check_tensors("Bs", Bs := listed("Bs", Bs))
    check_tensors("B_scales", B_scales := listed("B_scales", B_scales))
    biases = [None] * len(Bs) if biases is None else listed("biases", biases)
    for i, bias in enumerate(biases):
        if bias is not None:
            check_tensor(f"biases[{i}]", bias)
    gather_dim, deadline_s = checked_dimension(A_shard, gather_dim), check_options(deadline_s, timeline)
    if rows is not None and not torch.compiler.is_compiling():  # a compiled call is checked when it runs
        rows = checked_rows(rows, A_shard, gather_dim, group_of(group))
    by_row, scale = _scale_of_rows(A_scale, B_scales, A_shard, gather_dim, rows, group)
    dtypes = [torch.bfloat16] * len(Bs) if out_dtypes is None else listed("out_dtypes", out_dtypes)
    out = [_OUT.get(dtype or _FP8, "") for dtype in dtypes]
    fast = [False] * len(Bs) if use_fast_accum is None else listed("use_fast_accum", use_fast_accum)
    _check_rest((A_shard, A_scale, *Bs, *B_scales, *biases), len(Bs), B_scales, biases, result_scales, dtypes, fast)
    sizes = None if rows is None else [size * rows_of_one(A_shard.shape, gather_dim) for size in rows]
    x = flattened(A_shard, gather_dim)
    call = _Call(x, list(Bs), scale, list(B_scales), list(biases), out, list(fast), by_row, return_A, sizes)
    return call, gather_dim, deadline_s


def _scale_of_rows(
    A_scale: torch.Tensor, B_scales: Sequence[torch.Tensor], A_shard: torch.Tensor, gather_dim: int, rows: Sequence[int] | None,
    group: dist.ProcessGroup | str,
) -> tuple[bool, torch.Tensor]:  # fmt: skip
    """(whether each row has a scale, the scales of the shard's rows [rows, 1], or the one [1, 1])"""
    own = (*A_shard.shape[:-1], 1)
    # One element may be the scale of everything, or of a rank's only row: the weights' scales are of the same kind.
    of_everything = A_scale.numel() == 1 and all(scale.numel() == 1 for scale in B_scales)
    if A_scale.shape == own and not of_everything:
        return True, flattened(A_scale, gather_dim).contiguous()
    if A_scale.numel() == 1:
        return False, A_scale.reshape(1, 1)
    group, extent = group_of(group), A_shard.shape[gather_dim]
    sizes = [extent] * group.size() if rows is None else list(rows)
    whole = list(own)
    whole[gather_dim] = sum(sizes)
    if list(A_scale.shape) == whole:
        mine = A_scale.narrow(gather_dim, sum(sizes[: group.rank()]), extent)
        return True, flattened(mine, gather_dim).contiguous()
    raise ValueError(
        f"A_scale has shape {tuple(A_scale.shape)}: pass one element, or, for each row a scale, {own} or {tuple(whole)}"
    )


def _check_rest(
    tensors: Sequence[torch.Tensor | None], count: int, B_scales: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None] | None, out_dtypes: Sequence[torch.dtype | None], fast: Sequence[bool],
) -> None:  # fmt: skip
    """Raise `ValueError` for what a `_Call` cannot have."""
    lists = {"B_scales": B_scales, "biases": biases, "result_scales": result_scales, "out_dtypes": out_dtypes}
    for name, given in (lists | {"use_fast_accum": fast}).items():
        if given is not None and len(given) != count:
            raise ValueError(f"{name} has {counted(len(given), 'entry', 'entries')}: pass one for each of {count} Bs")
    if any(scale is not None for scale in result_scales or ()):
        raise ValueError(
            "result_scales are not taken: pass None each, and scale B_scales, or multiply results that are not fp8"
        )
    for dtype in out_dtypes:
        if dtype is not None and dtype not in _OUT:
            raise ValueError(f"out_dtypes has {dtype}: use one of {', '.join(map(str, _OUT))}")
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "an input wants gradients, and there are none of fp8: call under torch.no_grad(), or pass detached tensors"
        )


class _Prepared(Prepared):
    operator = "all_gather_scaled_matmul"
    p: AllGatherMatmul

    @opaque
    def __call__(self, call: _Call, deadline_s: float | None, timeline: Timeline | None) -> list[torch.Tensor]:
        """[gathered x if wanted, y...]. Autocast, which would reach what a CPU computes, does not reach in."""
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):
                return self(call, deadline_s, timeline)
        tensors = {"x_shard": contiguous(call.x, "A_shard"), "x_scale": call.scale}
        results, layout = [], tuple([B.stride() for B in call.Bs])
        for i, (B, scale, bias, out) in enumerate(zip(call.Bs, call.B_scales, call.biases, call.out, strict=True)):
            tensors[f"w{i}"] = _column_major(B, f"Bs[{i}]")
            tensors[f"w_scale{i}"] = (scale.expand(1, B.shape[1]) if call.by_row else scale.reshape(1, 1)).contiguous()
            if bias is not None:
                tensors[f"bias{i}"] = bias.view(1, -1)
            tensors[f"y{i}"] = y = torch.empty(self.p.m, B.shape[1], dtype=TORCH_DTYPE[out], device=self.device)
            results.append(y)
        capturing = self.capturing()
        if self.known_serial(capturing):
            return self._in_turn(tensors, results, deadline_s, timeline)
        if call.return_x:
            tensors["x"] = torch.empty(self.p.m, self.p.k, dtype=_FP8, device=self.device)
        executor = self.executor(
            tensors, capturing, deadline_s, lambda: self._in_turn(tensors, results, deadline_s, None)
        )
        if executor is None:
            return self._in_turn(tensors, results, deadline_s, timeline)
        self.run(executor, tensors, deadline_s, timeline, layout)
        return [tensors["x"], *results] if call.return_x else results

    def _in_turn(
        self, tensors: dict[str, torch.Tensor], results: list[torch.Tensor], deadline_s: float | None, timeline: Timeline | None
    ) -> list[torch.Tensor]:  # fmt: skip
        """The library's collective, then its GEMMs."""
        turn = self.turn(deadline_s, timeline)
        scaled, x, scale = self.p.scaled, tensors["x_shard"], tensors["x_scale"]
        assert scaled is not None
        if self.domain is not None:
            x = gathered_by_library(x, self.p, self.group, turn)
            if scaled.by == "row":
                scale = gathered_by_library(scale, self.p, self.group, turn, "all_gather x_scale -> gathered_scale")
        elif self.p.return_gathered:
            x = x.clone()
        for i, y in enumerate(results):
            w, w_scale, bias = tensors[f"w{i}"], tensors[f"w_scale{i}"], tensors.get(f"bias{i}")
            scaled_matmul(x, w, scale, w_scale, bias, fast=scaled.fast[i], out=y)
            if turn is not None:
                turn.done(f"scaled_matmul{'_fast' * scaled.fast[i]} y{i}", y)
        if turn is not None:
            turn.end()
        return [x, *results] if self.p.return_gathered else results


# --- what was prepared ---

_table: Table[_Prepared] = Table()


def prepared_calls(group: dist.ProcessGroup) -> list[_Prepared]:
    """Of each shape that was called on `group`, the oldest first."""
    return _table.known(group)


def _prepared_for(call: _Call, group: dist.ProcessGroup, schedule: str | None, deadline_s: float | None) -> _Prepared:
    """What differs in the key differs in the text that ranks compare: a shape is new on all of them or on none."""
    pinned, x = plan.pinned(schedule), call.x
    sizes = None if call.rows is None else checked_rows(call.rows, x, 0, group)
    scales = [
        (scale.numel() == 1 or _fits(scale, B, call), scale.dtype, scale.device)
        for B, scale in zip(call.Bs, call.B_scales, strict=True)
    ]
    biases = [None if b is None else (b.shape, b.dtype, b.device, b.is_contiguous()) for b in call.biases]
    how = (tuple(call.out), tuple(call.fast), call.by_row, call.return_x, sizes, call.scale.dtype, call.scale.device)
    weights = tuple([(B.shape, B.dtype, B.device) for B in call.Bs])
    key = (x.shape, x.dtype, x.device, weights, tuple(scales), tuple(biases), how, pinned)
    prepared = _table.find(group, key)
    if prepared is not None:
        return prepared

    def check() -> tuple[str, int]:
        p = _problem(call, sizes, group)
        if pinned is not None:
            choosing.check_name(pinned, p)
        return f"{p}, {choosing.wanted_schedule(pinned, p)}", 0

    agree(_Prepared.operator, group, x.device, check, deadline_s, UNEVEN)
    p = _problem(call, sizes, group)
    return _table.keep(group, key, _Prepared(p, group, x.device, pinned))


def _problem(call: _Call, rows: tuple[int, ...] | None, group: dist.ProcessGroup) -> AllGatherMatmul:
    """The call as a description; raises `ValueError` for what it cannot be."""
    x = call.x
    if x.dtype != _FP8:
        raise ValueError(f"A_shard is {x.dtype}: use {_FP8}, and weft.all_gather_matmul for other dtypes")
    check_weights(x, call.Bs)
    check_flag("return_A", call.return_x)
    for i, fast in enumerate(call.fast):
        check_flag(f"use_fast_accum[{i}]", fast)
    for name, scale in (("A_scale", call.scale), *((f"B_scales[{i}]", s) for i, s in enumerate(call.B_scales))):
        _check_on(x.device, name, scale, torch.float32)
    for i, (B, scale, bias, out) in enumerate(zip(call.Bs, call.B_scales, call.biases, call.out, strict=True)):
        n = B.shape[1]
        if not _fits(scale, B, call):
            wanted = (
                f"[1, {n}]"
                if call.by_row
                else f"one element, or A_scale with a scale for each row and this as [1, {n}]"
            )
            raise ValueError(f"B_scales[{i}] has shape {tuple(scale.shape)}: pass {wanted}")
        if out == "fp8" and call.by_row:
            raise ValueError(
                f"out_dtypes[{i}] is {_FP8} (or None): with scales of rows fp8 GEMMs have no fp8 results; use torch.bfloat16"
            )
        if bias is not None:
            if out == "fp32":
                raise ValueError(
                    f"biases[{i}] and a result in fp32: fp8 GEMMs add none there; use bf16, or add it after"
                )
            _check_on(x.device, f"biases[{i}]", bias, TORCH_DTYPE[Scaled.bias_dtype(out)])
            if bias.shape != (n,) or not bias.is_contiguous():
                raise ValueError(
                    f"biases[{i}] has shape {tuple(bias.shape)}, strides {bias.stride()}: pass a contiguous [{n}]"
                )
    scaled = Scaled(
        "row" if call.by_row else "tensor", tuple(call.out), tuple(b is not None for b in call.biases), tuple(call.fast)
    )
    n_of = tuple(B.shape[1] for B in call.Bs)
    return AllGatherMatmul(
        group.size(), rows or (x.shape[0],) * group.size(), n_of, x.shape[1], "fp8", call.return_x, scaled
    )


def _fits(B_scale: torch.Tensor, B: torch.Tensor, call: _Call) -> bool:
    return B_scale.numel() == 1 or (call.by_row and B_scale.shape == (1, *B.shape[-1:]))


def _check_on(device: torch.device, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.device != device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: use {dtype} on {device}")


def _column_major(B: torch.Tensor, name: str) -> torch.Tensor:
    row, col = B.stride()
    if row == 1 and col >= B.shape[0] and col % SCALED_MULTIPLE == 0:
        return B
    warn_of_copy(name, B, "and fp8 GEMMs want columns in one piece; pass weight.t() of a contiguous weight")
    return B.t().contiguous().t()


# --- for torch.compile: an opaque op; the results begin with the gathered x if it is wanted ---

_library = torch.library.Library("weft", "FRAGMENT")
_library.define(
    "all_gather_scaled_matmul(Tensor x_shard, Tensor[] Bs, Tensor x_scale, Tensor[] B_scales, Tensor?[] biases, str[] out, "
    "bool[] fast, bool by_row, bool return_x, int[]? rows, str group, str schedule, float deadline_s) -> Tensor[]",
    tags=[torch.Tag.needs_fixed_stride_order],
)


@opaque
def _run(*arguments: Any) -> list[torch.Tensor]:
    *given, group, schedule, deadline_s = arguments
    call, group = _Call(*given), group_of(group)
    with together(_Prepared.operator, group, call.x, deadline_s):
        return _prepared_for(call, group, schedule or None, deadline_s or None)(call, deadline_s or None, None)


def _fake(*arguments: Any) -> list[torch.Tensor]:
    *given, group, _, _ = arguments
    call = _Call(*given)
    m = sum(call.rows) if call.rows else call.x.shape[0] * group_of(group).size()
    ys = [call.x.new_empty(m, B.shape[1], dtype=TORCH_DTYPE[out]) for B, out in zip(call.Bs, call.out, strict=True)]
    return [call.x.new_empty(m, call.x.shape[1]), *ys] if call.return_x else ys


for _device in ("CPU", "CUDA"):
    _library.impl("all_gather_scaled_matmul", _run, _device)
torch.library.register_fake("weft::all_gather_scaled_matmul", _fake, lib=_library)
