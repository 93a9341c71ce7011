"""weft.all_gather_matmul: GEMMs that start before all of their input is there.

From one call down: this file checks the input and finds, or makes, what was prepared for calls of this shape (`_Prepared`);
the planner says which schedule (`weft.ops.choosing`); `weft.runtime.cuda` or `cpu` runs it. The serial
schedule is called as a user would write it, past all of these, so that taking it costs nothing; on CPU ranks agree on it first
(`weft.ops.in_turn`).
Backward is in `weft.ops.gathered`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft import plan
from weft.arguments import check_flag, check_tensor, check_tensors, checked_dimension, checked_rows, listed
from weft.ops import choosing
from weft.ops.derivatives import once, refused
from weft.ops.flattened import UNEVEN, check_weights, flattened, restored, rows_of_one
from weft.ops.gathered import gathered_by_library, gradients
from weft.ops.prepared import (
    SCATTERED,
    Prepared,
    Table,
    check_options,
    contiguous,
    group_of,
    is_scattered,
    warn_of_copy,
)
from weft.ops.together import agree, together
from weft.runtime.opaque import opaque
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import AllGatherMatmul
from weft.timeline import Timeline

_DTYPES = {TORCH_DTYPE[name]: name for name in ("fp32", "fp16", "bf16")}
_BACKWARD = "backward of all_gather_matmul"


def all_gather_matmul(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group: dist.ProcessGroup | str,
    *,
    return_A: bool = True,
    schedule: str | None = None,
    rows: Sequence[int] | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """All-gather `A_shard` along `gather_dim` over `group` and multiply the result with each of `Bs`.

    Signature and results are those of `torch.ops.symm_mem.fused_all_gather_matmul`. Equals

        A = all_gather(A_shard, gather_dim); return A, [A @ B for B in Bs]

    but GEMMs on rows that are there run while the others arrive. Shape and machine decide how. Where nothing beats the plain
    sequence of collective and GEMM, that is what runs. Collective over `group`. Differentiable in A_shard and Bs, once: gradients
    are sums over ranks, not means, and all ranks must want the same ones. Autocast does not apply: inputs are multiplied in the
    dtype that they have.

    A_shard: [..., K] in fp32, fp16 or bf16, at least 2-D, an ordinary tensor (of a DTensor pass its to_local()). Copied if
        `A_shard.movedim(gather_dim, 0)` is not contiguous.
    Bs: [K, N_i], same dtype, row- or column-major (`linear.weight.t()` is not copied).
    gather_dim: any dimension but the last.
    group: a process group, or its name.
    return_A: also return the gathered A (costs its memory, and a copy of what arrives).
    schedule: pin one by name, as `weft.plan.explain` lists them ("serial", "shard[chunks=1,send=in_turn,by=dma]", ...);
        "autotune": the fastest by measurement, made at the first call of a shape and remembered (docs/planning.md).
    rows: size of A_shard in `gather_dim` on every rank, if ranks differ; the same list on every rank.
    deadline_s: seconds, up to 1e6, that a wait for a peer may take, also in backward (default: WEFT_DEADLINE_S, 60). On GPUs the
        serial schedule and backward call NCCL, whose waits go by the process group's timeout. Nothing checks there that ranks
        call the same, once a shape is known.
    timeline: filled with what ran when (profiling: on GPUs it waits for the device; not under torch.compile).

    Returns (A or None, [A @ B for B in Bs]) in A_shard's dtype and in ordinary memory; on GPUs valid in stream order. A has
    A_shard's shape but for `gather_dim`, where it has the rows of all ranks; a product has N_i in place of K. The first call of a
    shape is collective set-up and takes milliseconds to seconds: make it before capturing a CUDA graph.
    Memory: the results; and symmetric memory of the size of A for each of the last 64 shapes. On GPUs, shapes that a CUDA graph has
        captured stay and are not among the 64; large ones that are not called any more go sooner.

    Raises `ValueError` for bad arguments. It is a `RefusedError` on every rank, and the group lives on; on GPUs this holds for the
    first call of a shape, and a later one ends the group. A `group` that is none is a `ValueError` on its rank alone.
    `DisagreementError` when ranks describe different calls: on CPU at every call, on GPUs at the first of a shape.
    `DeadlineError`, `PeerLostError`, `PoisonedGroupError`. `NotImplementedError` for a second derivative.

    Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap".
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        Bs, gather_dim, deadline_s = _checked(A_shard, Bs, gather_dim, deadline_s, timeline)
        if timeline is not None:
            raise ValueError("timeline is for calls one by one: a compiled call cannot fill it")
        x = flattened(A_shard, gather_dim)
        name = group if isinstance(group, str) else group.group_name
        sizes = None if rows is None else [size * rows_of_one(A_shard.shape, gather_dim) for size in rows]
        results = torch.ops.weft.all_gather_matmul(
            x, list(Bs), name, return_A, schedule or "", sizes, deadline_s or 0.0
        )
        results = restored(results, A_shard.shape, gather_dim, rows, group)
        return (results[0], list(results[1:])) if return_A else (None, list(results))
    group = group_of(group)
    with together(_Prepared.operator, group, A_shard, deadline_s):
        Bs, gather_dim, deadline_s = _checked(A_shard, Bs, gather_dim, deadline_s, timeline)
        sizes = None
        if rows is not None and (rows := checked_rows(rows, A_shard, gather_dim, group)) is not None:
            sizes = [size * rows_of_one(A_shard.shape, gather_dim) for size in rows]
        x = flattened(A_shard, gather_dim)
        prepared = _prepared_for(x, Bs, group, return_A, schedule, sizes, deadline_s)
        if prepared.differentiated:
            results = _Function.apply(prepared, deadline_s, timeline, x, *Bs)
        else:
            results = prepared(x, Bs, deadline_s, timeline)
        results = restored(results, A_shard.shape, gather_dim, rows, group)
        return (results[0], list(results[1:])) if return_A else (None, list(results))


def _checked(
    A_shard: torch.Tensor, Bs: Sequence[torch.Tensor], gather_dim: int, deadline_s: float | None, timeline: Timeline | None
) -> tuple[Sequence[torch.Tensor], int, float | None]:  # fmt: skip
    """Bs, gather_dim and deadline_s, in one form of all that mean the same."""
    check_tensor("A_shard", A_shard)
    check_tensors("Bs", Bs := Bs if type(Bs) is list else listed("Bs", Bs))
    return Bs, checked_dimension(A_shard, gather_dim), check_options(deadline_s, timeline)


class _Prepared(Prepared):
    operator = "all_gather_matmul"

    def __init__(
        self, p: AllGatherMatmul, group: dist.ProcessGroup, device: torch.device, pinned: str | None, wanted: tuple[bool, bool]
    ) -> None:  # fmt: skip
        """wanted: whether gradients of x, and of any B, are."""
        super().__init__(p, group, device, pinned)
        self.differentiated = any(wanted)
        self._shapes = [(p.m, n) for n in p.n]
        self._gathered_shape = (p.m, p.k)
        # By the strides of the weights, which may differ from rank to rank: which of them have to be copied.
        self._copied: dict[tuple[tuple[int, ...], ...], list[int]] = {}

    @opaque
    def __call__(
        self, x: torch.Tensor, Bs: Sequence[torch.Tensor], deadline_s: float | None, timeline: Timeline | None
    ) -> list[torch.Tensor]:
        """[gathered x if wanted, x @ B ...] of 2-D tensors. Autocast, which would reach some schedules only, does not reach in."""
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):
                return self(x, Bs, deadline_s, timeline)
        x, layout = contiguous(x, "A_shard"), tuple([B.stride() for B in Bs])
        copied = self._copied.get(layout)
        if copied is None:
            copied = self._copied[layout] = [i for i, B in enumerate(Bs) if is_scattered(B)]
            for i in copied:
                warn_of_copy(f"Bs[{i}]", Bs[i], SCATTERED)
        capturing = self.capturing()
        if self.known_serial(capturing):
            return self._in_turn(x, Bs, deadline_s, timeline)
        results = [x.new_empty(shape) for shape in self._shapes]
        tensors = {"x_shard": x}
        for i, (B, y) in enumerate(zip(Bs, results, strict=True)):
            tensors[f"w{i}"] = B.contiguous() if i in copied else B
            tensors[f"y{i}"] = y
        if self.p.return_gathered:
            tensors["x"] = gathered = x.new_empty(self._gathered_shape)
            results = [gathered, *results]
        executor = self.executor(tensors, capturing, deadline_s, lambda: self._in_turn(x, Bs, deadline_s, None))
        if executor is None:
            return self._in_turn(x, Bs, deadline_s, timeline)
        self.run(executor, tensors, deadline_s, timeline, layout)
        return results

    def _in_turn(
        self, x: torch.Tensor, Bs: Sequence[torch.Tensor], deadline_s: float | None, timeline: Timeline | None
    ) -> list[torch.Tensor]:
        """The library's collective, then its GEMMs."""
        turn = None if self._turns is None and timeline is None else self.turn(deadline_s, timeline)
        if self.domain is not None:
            whole = gathered_by_library(x, self.p, self.group, turn)
        else:
            whole = x.clone() if self.p.return_gathered else x
        if timeline is None or turn is None:
            ys = [torch.mm(whole, B) for B in Bs]
        else:
            ys = [turn.done(f"matmul y{i}", torch.mm(whole, B)) for i, B in enumerate(Bs)]
            turn.end()
        return [whole, *ys] if self.p.return_gathered else ys


# --- backward ---


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        prepared: _Prepared,
        deadline_s: float | None,
        timeline: Timeline | None,
        x: torch.Tensor,
        *Bs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        results = prepared(x, Bs, deadline_s, timeline)
        ctx.prepared, ctx.deadline_s = prepared, deadline_s
        # Where the caller holds the gathered x anyway it need not be gathered again.
        ctx.save_for_backward(results[0] if prepared.p.return_gathered else x, *Bs)
        return tuple(results)

    @staticmethod
    @once(_Prepared.operator)
    def backward(ctx: Any, tensors: Sequence[torch.Tensor], *grads: torch.Tensor) -> tuple[Any, ...]:
        saved, *Bs = tensors
        prepared, wanted = ctx.prepared, ctx.needs_input_grad[3:]
        with together(_BACKWARD, prepared.group, saved, ctx.deadline_s):
            turn = prepared.turn(ctx.deadline_s)
            return (None, None, None, *gradients(prepared.p, prepared.group, saved, Bs, list(grads), wanted, turn))


# --- what was prepared ---

_table: Table[_Prepared] = Table()


def prepared_calls(group: dist.ProcessGroup) -> list[_Prepared]:
    """Of each shape that was called on `group`, the oldest first."""
    return _table.known(group)


def _prepared_for(
    x: torch.Tensor, Bs: Sequence[torch.Tensor], group: dist.ProcessGroup, return_A: bool, schedule: str | None,
    rows: Sequence[int] | None, deadline_s: float | None,
) -> _Prepared:  # fmt: skip
    """What differs in the key differs in the text that ranks compare: a shape is new on all of them or on none."""
    pinned = plan.pinned(schedule)
    wanted = (False, False)
    if torch.is_grad_enabled():
        wanted = (x.requires_grad, any(B.requires_grad for B in Bs))
    sizes = None if rows is None else checked_rows(rows, x, 0, group)
    key = (
        x.shape,
        x.dtype,
        x.device,
        tuple([(B.shape, B.dtype, B.device) for B in Bs]),
        return_A,
        pinned,
        sizes,
        wanted,
    )
    prepared = _table.find(group, key)
    return prepared or _prepare(x, Bs, group, return_A, pinned, sizes, wanted, deadline_s, key)


def _prepare(
    x: torch.Tensor, Bs: Sequence[torch.Tensor], group: dist.ProcessGroup, return_A: bool, pinned: str | None,
    sizes: tuple[int, ...] | None, wanted: tuple[bool, bool], deadline_s: float | None, key: Hashable,
) -> _Prepared:  # fmt: skip
    def check() -> tuple[str, int]:
        p = _problem(x, Bs, group, return_A, sizes)
        if pinned is not None:
            choosing.check_name(pinned, p)
        how = f"{choosing.wanted_schedule(pinned, p)}, gradients wanted of (A_shard, any of Bs): {wanted}"
        return f"{p}, {how}", 0

    agree(_Prepared.operator, group, x.device, check, deadline_s, UNEVEN)
    p = _problem(x, Bs, group, return_A, sizes)
    return _table.keep(group, key, _Prepared(p, group, x.device, pinned, wanted))


def _problem(
    x: torch.Tensor, Bs: Sequence[torch.Tensor], group: dist.ProcessGroup, return_A: bool, sizes: tuple[int, ...] | None
) -> AllGatherMatmul:
    """The call as a description; raises `ValueError` for what it cannot be."""
    if x.dtype not in _DTYPES:
        fp8 = "; for fp8 there is weft.all_gather_scaled_matmul" if x.dtype == TORCH_DTYPE["fp8"] else ""
        raise ValueError(f"A_shard is {x.dtype}: use one of {', '.join(str(d) for d in _DTYPES)}{fp8}")
    check_weights(x, Bs)
    check_flag("return_A", return_A)
    rows = sizes or (x.shape[0],) * group.size()
    return AllGatherMatmul(group.size(), rows, tuple(B.shape[1] for B in Bs), x.shape[1], _DTYPES[x.dtype], return_A)


# --- for torch.compile: opaque ops; the results begin with the gathered x if it is wanted ---

_library = torch.library.Library("weft", "FRAGMENT")
_CALL = "Tensor[] Bs, str group, bool return_x, str schedule, int[]? rows"
_library.define(f"all_gather_matmul(Tensor x_shard, {_CALL}, float deadline_s) -> Tensor[]")
_library.define(
    f"all_gather_matmul_backward(Tensor saved, Tensor[] grads, Tensor x_shard, {_CALL}, float deadline_s, bool[] wanted)"
    " -> Tensor[]"
)


def _named(
    x: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    group: str,
    return_x: bool,
    schedule: str,
    rows: Sequence[int] | None,
    deadline_s: float,
) -> _Prepared:
    return _prepared_for(x, Bs, group_of(group), return_x, schedule or None, rows, deadline_s or None)


@opaque
def _run(
    x: torch.Tensor,
    Bs: list[torch.Tensor],
    group: str,
    return_x: bool,
    schedule: str,
    rows: list[int] | None,
    deadline_s: float,
) -> list[torch.Tensor]:
    with together(_Prepared.operator, group_of(group), x, deadline_s):
        return _named(x, Bs, group, return_x, schedule, rows, deadline_s)(x, Bs, deadline_s or None, None)


def _fake(
    x: torch.Tensor,
    Bs: list[torch.Tensor],
    group: str,
    return_x: bool,
    schedule: str,
    rows: list[int] | None,
    deadline_s: float,
) -> list[torch.Tensor]:
    m = sum(rows) if rows else x.shape[0] * group_of(group).size()
    return [x.new_empty(m, width) for width in [*([x.shape[1]] if return_x else []), *(B.shape[1] for B in Bs)]]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, Bs, *ctx.call = inputs
    ctx.save_for_backward(output[0] if ctx.call[1] else x, x, *Bs)


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    saved, x, *Bs = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1]]
    made = torch.ops.weft.all_gather_matmul_backward(saved, list(grads), x, Bs, *ctx.call, wanted)
    left = iter(made)
    grad_x, *grad_Bs = [next(left) if want else None for want in wanted]
    return grad_x, grad_Bs, None, None, None, None, None


@opaque
def _run_backward(
    saved: torch.Tensor, grads: list[torch.Tensor], x: torch.Tensor, Bs: list[torch.Tensor], group: str, return_x: bool,
    schedule: str, rows: list[int] | None, deadline_s: float, wanted: list[bool],
) -> list[torch.Tensor]:  # fmt: skip
    """Those that are wanted, of x and of each B."""
    with together(_BACKWARD, group_of(group), x, deadline_s):
        prepared = _named(x, Bs, group, return_x, schedule, rows, deadline_s)
        turn = prepared.turn(deadline_s or None)
        found = gradients(prepared.p, prepared.group, saved, Bs, list(grads), wanted, turn)
        return [grad.contiguous() for grad in found if grad is not None]


def _fake_backward(
    saved: torch.Tensor, grads: list[torch.Tensor], x: torch.Tensor, Bs: list[torch.Tensor], group: str, return_x: bool,
    schedule: str, rows: list[int] | None, deadline_s: float, wanted: list[bool],
) -> list[torch.Tensor]:  # fmt: skip
    return [t.new_empty(t.shape) for t, want in zip((x, *Bs), wanted, strict=True) if want]


for _key in ("CPU", "CUDA"):
    _library.impl("all_gather_matmul", _run, _key)
    _library.impl("all_gather_matmul_backward", _run_backward, _key)
torch.library.register_fake("weft::all_gather_matmul", _fake, lib=_library)
torch.library.register_fake("weft::all_gather_matmul_backward", _fake_backward, lib=_library)
torch.library.register_autograd("weft::all_gather_matmul", _backward, setup_context=_set_up, lib=_library)
torch.library.register_autograd("weft::all_gather_matmul_backward", refused(_Prepared.operator), lib=_library)
