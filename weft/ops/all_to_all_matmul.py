"""weft.all_to_all_matmul: mixture of experts - tokens go to the ranks of their experts, whose GEMMs start as they arrive.

From one call down: this file checks the input and finds, or makes, what was prepared for calls of this shape (`_Prepared`);
`weft.ops.choosing` says which schedule; `weft.runtime.cuda` or `cpu` runs it. The serial schedule is called
as a user would write it (`weft.ops.exchanged`, where backward is too), so that taking it costs nothing; on CPU ranks agree on it
first (`weft.ops.in_turn`).

How many tokens go where changes from call to call, and so may the number of tokens: neither is part of a shape. Memory for
what comes in is made once, for `capacity` tokens a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft import plan
from weft.arguments import check_tensor
from weft.errors import TooManyRowsError
from weft.ops import choosing
from weft.ops.derivatives import once, refused
from weft.ops.exchanged import Sizes, exchange_counts, gradients, multiplied_by_library
from weft.ops.in_turn import turn_on
from weft.ops.prepared import Prepared, Table, check_options, contiguous, group_of, strided, warn_of_copy
from weft.ops.together import agree, together
from weft.runtime.agreement import refuse
from weft.runtime.opaque import opaque
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import AllToAllMatmul
from weft.timeline import Timeline
from weft.words import counted

_DTYPES = {TORCH_DTYPE[name]: name for name in ("fp32", "fp16", "bf16")}
_BACKWARD = "backward of all_to_all_matmul"
_SPLITS = (torch.int64, torch.int32)
_LEAST_CAPACITY = 64  # a first call may well have no tokens


def all_to_all_matmul(
    tokens: torch.Tensor,
    w_experts: torch.Tensor,
    splits: torch.Tensor,
    *,
    group: dist.ProcessGroup | str | None = None,
    max_rows: int | None = None,
    return_received: bool = False,
    capacity: int | None = None,
    schedule: str | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send every token to the rank of its expert, and multiply it there with the expert's weights. Equals, on W ranks,

        received = all_to_all_single(splits)                           # [W, E]
        x = all_to_all_single(tokens, received.sum(1), splits.view(W, E).sum(1))
        x = x in the order of experts                                  # and for one expert by source rank
        y = grouped_mm(x, w_experts, offs=received.sum(0).cumsum(0))

    but GEMMs on tokens that are there run while the others arrive, and nothing is sorted before or after them. Collective over
    `group`. Differentiable in tokens and w_experts, once: gradients are sums over rows, not means, and all ranks must want the same
    ones. Autocast does not apply.

    tokens: [T, K] in fp32, fp16 or bf16, sorted by expert of all ranks, as the argsort of a router's choices puts them: those
        for the E experts of rank 0, for those of rank 1, ... T may differ between ranks and calls. Copied if not contiguous.
    w_experts: [E, K, N], this rank's experts, same dtype; contiguous, or the transpose of a contiguous [E, N, K], which on CPU
        is copied at every call.
    splits: [W * E] int64 (int32 is converted), on the tokens' device: how many tokens are for each expert of all ranks.
        They add up to T. Their values are checked on CPU; on GPUs that would be a wait, so you must have them right.
    group: a process group, or its name; default: the world.
    max_rows: None: y has exactly the rows that came. The host waits for their number once, mostly while the GEMMs run. n: y
        has n rows, and those beyond the rows that came are not written. Unless the schedule is "serial", the host waits for
        nothing, and the call can be captured in a CUDA graph. May differ between ranks and calls.
    return_received: also return how many rows came.
    capacity: the most tokens that a rank has in any call (it may send all of them to one other), the same on all ranks;
        default: a little above the largest T at the first call of this shape.
    schedule: pin one by name ("serial", "dispatch[by=kernel,rest=together]", ...; `weft.plan.use` does it for a block);
        "autotune": the fastest by measurement, made at the first call of a shape and remembered (docs/planning.md).
    deadline_s: seconds, up to 1e6, that a wait for a peer may take, also in backward (default: WEFT_DEADLINE_S, 60). On GPUs the
        serial schedule and backward call NCCL, whose waits go by the process group's timeout. Nothing checks there that ranks
        call the same, once a shape is known.
    timeline: filled with what ran when (profiling: on GPUs it waits for the device; not under torch.compile).

    Returns y [rows, N] in tokens' dtype, on GPUs valid in stream order, in ordinary memory; with `return_received` (y, received
        [W, E] int64 on the device: rows from each rank for each local expert). The first call of a shape (K, N, E, dtype,
        capacity, whether max_rows is given) is collective set-up and takes milliseconds to seconds; make it before capturing a
        CUDA graph.
        Under torch.compile y without max_rows has a size that is known when it runs, for which
        `torch._dynamo.config.capture_dynamic_output_shape_ops = True` must be set.
    Memory: y, with room for an eighth more where it is made before its rows are known; and symmetric memory of (W - 1) x
        capacity x K elements for each of the last 64 shapes. On GPUs, shapes that a CUDA graph has captured stay and are
        not among the 64; large ones that are not called any more go sooner. The serial schedule takes twice the rows that
        come, K wide, instead.

    Calls on one group are made by one thread at a time.

    Raises `ValueError` for bad arguments, for splits that do not fit (on CPU, where they are read), and for T above the
        capacity (but with "serial", which has none). It is a `RefusedError` on every rank, and the group lives on; on GPUs
        this holds for the first call of a shape, and a later one ends the group. A `group` that is none is a `ValueError`
        on its rank alone. `DisagreementError` when ranks describe different calls: on CPU at every call, on GPUs at the
        first of a shape. `TooManyRowsError` on CPU, when the call is done, on a rank to which more than max_rows rows came;
        on GPUs rows beyond are left out, and `received` tells. `DeadlineError`, `PeerLostError`, `PoisonedGroupError`.
        `NotImplementedError` for a second derivative.

    Sources: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", II-A and IV-B2
    (all-to-all before the GEMMs of experts); "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
    Collectives", 7.1 and 7.2, where the all-to-all is behind the GEMM.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        deadline_s = _checked(tokens, w_experts, splits, max_rows, capacity, deadline_s, timeline)
        if timeline is not None:
            raise ValueError("timeline is for calls one by one: a compiled call cannot fill it")
        name = group if isinstance(group, str) else group_of(group).group_name
        options = name, max_rows, capacity, schedule or "", deadline_s or 0.0
        y, received = torch.ops.weft.all_to_all_matmul(tokens, w_experts, splits, *options)
        return (y, received) if return_received else y
    group = group_of(group)
    with together(_Prepared.operator, group, tokens, deadline_s):
        deadline_s = _checked(tokens, w_experts, splits, max_rows, capacity, deadline_s, timeline)
        found = _prepared_for(tokens, w_experts, splits, group, max_rows is None, capacity, schedule, deadline_s)
        prepared, differentiated = found
        if differentiated:
            y, received = _Function.apply(prepared, max_rows, deadline_s, timeline, splits, tokens, w_experts)
        else:
            y, received, _ = prepared(tokens, w_experts, splits, max_rows, deadline_s, timeline)
        return (y, received) if return_received else y


def _checked(
    tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, max_rows: int | None, capacity: int | None,
    deadline_s: float | None, timeline: Timeline | None,
) -> float | None:  # fmt: skip
    """The deadline; `ValueError` for what cannot be."""
    check_tensor("tokens", tokens)
    check_tensor("w_experts", w)
    check_tensor("splits", splits)
    for name, count in (("max_rows", max_rows), ("capacity", capacity)):
        if not (
            count is None or (isinstance(count, int | torch.SymInt) and not isinstance(count, bool) and count >= 0)
        ):
            raise ValueError(f"{name}={count!r} must be a whole number from 0 on: it is a number of rows")
    return check_options(deadline_s, timeline)


class _Prepared(Prepared):
    operator = "all_to_all_matmul"

    def __init__(self, p: AllToAllMatmul, group: dist.ProcessGroup, device: torch.device, pinned: str | None) -> None:
        super().__init__(p, group, device, pinned)
        # Which gradients ranks have agreed to want: of tokens, of w_experts.
        self.agreed: set[tuple[bool, bool]] = set()

    @opaque
    def __call__(
        self, tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, max_rows: int | None, deadline_s: float | None,
        timeline: Timeline | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Sizes]:  # fmt: skip
        """(y, received, how many rows went where)."""
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):
                return self(tokens, w, splits, max_rows, deadline_s, timeline)
        if refusal := _wrong_values(tokens, splits):
            raise ValueError(refusal)
        tokens, splits = contiguous(tokens, "tokens"), splits.to(torch.int64).contiguous()
        capturing = self.capturing()
        if self.known_serial(capturing):
            y, sizes = self._in_turn(tokens, w, splits, max_rows, deadline_s, timeline)
        else:
            y, sizes = self._scheduled(tokens, w, splits, max_rows, capturing, deadline_s, timeline)
        if max_rows is not None and self.device.type == "cpu":
            self._require_room(sizes, max_rows)
        return y, sizes.received, sizes

    def _scheduled(
        self, tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, max_rows: int | None, capturing: bool,
        deadline_s: float | None, timeline: Timeline | None,
    ) -> tuple[torch.Tensor, Sizes]:  # fmt: skip
        p, on_cpu = self.p, self.device.type == "cpu"
        assert self.domain is not None
        if tokens.shape[0] > p.most:
            # On GPUs hosts do not meet, and peers would wait for these tokens until their deadline.
            refuse(
                self.domain,
                f"tokens has {counted(tokens.shape[0], 'row')}, and memory was made for capacity={p.most}: pass the "
                "largest number of tokens that any call has as capacity, on every rank",
                deadline_s=deadline_s,
            )

        def make_y(rows: int) -> torch.Tensor:
            # Rows for which there is no room are still written here: peers do not wait for one that gives up.
            return tokens.new_empty(rows if max_rows is None else max(rows, max_rows), p.n)

        received = splits.new_empty(p.world_size, p.experts)
        y: Any = make_y if max_rows is None or on_cpu else make_y(max_rows)
        tensors = {"tokens": tokens, "splits": splits.view(1, -1), "w": self._weights(w), "received": received, "y": y}
        executor = self._executor(tensors, w, capturing, deadline_s)
        if executor is None:
            return self._in_turn(tokens, w, splits, max_rows, deadline_s, timeline)
        made = executor.run(tensors, deadline_s=deadline_s, timeline=timeline)
        return made.get("y", y), Sizes(splits, received)

    def _executor(
        self, tensors: dict[str, torch.Tensor], w: torch.Tensor, capturing: bool, deadline_s: float | None
    ) -> Any:
        """Chosen on tokens of the description's number, as many for each expert: the first call may have hardly any."""
        if self._chosen is not None or capturing or self.pinned not in (None, plan.AUTOTUNE):
            return self.executor(tensors, capturing, deadline_s)
        p, device = self.p, self.device
        assert self.domain is not None
        splits = torch.tensor([p.splits[self.domain.rank]], device=device)
        tokens = tensors["tokens"].new_zeros(p.rows[self.domain.rank], p.k)

        def make_y(rows: int) -> torch.Tensor:
            return tokens.new_empty(rows, p.n)

        arriving = sum(row[self.domain.rank * p.experts + e] for row in p.splits for e in range(p.experts))
        y: Any = make_y if p.exact or device.type == "cpu" else make_y(arriving)
        even = {
            **tensors,
            "tokens": tokens,
            "splits": splits,
            "y": y,
            "received": torch.empty_like(tensors["received"]),
        }
        rows = None if p.exact else arriving
        return self.executor(
            even, capturing, deadline_s, lambda: self._in_turn(tokens, w, splits.view(-1), rows, deadline_s, None)
        )

    def _in_turn(
        self, tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, max_rows: int | None, deadline_s: float | None,
        timeline: Timeline | None,
    ) -> tuple[torch.Tensor, Sizes]:  # fmt: skip
        """The library's collectives, then its GEMMs."""
        turn = self.turn(deadline_s, timeline)
        sizes = Sizes(splits, exchange_counts(splits, self.group, turn))
        y = multiplied_by_library(tokens, w, sizes, self.group, max_rows, turn)
        if turn is not None:
            turn.end()
        return y, sizes

    def _weights(self, w: torch.Tensor) -> torch.Tensor:
        """As executors take them: on CPU one matrix below the other, on GPUs of any strides that GEMMs take."""
        if self.device.type != "cpu":
            return strided(w, "w_experts")
        if not w.is_contiguous():
            warn_of_copy("w_experts", w, "and on CPU an expert's rows must follow each other; pass a contiguous one")
        return w.contiguous().flatten(0, 1)

    def _require_room(self, sizes: Sizes, max_rows: int) -> None:
        came = sum(sizes.host.came)
        if came > max_rows:
            raise TooManyRowsError(
                f"{counted(came, 'row')} came to rank {self.group.rank()}, from the ranks {sizes.host.came}, and "
                f"max_rows={max_rows}: pass at least {came}, or None for as many as come"
            )


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, prepared: _Prepared, max_rows: int | None, deadline_s: float | None, timeline: Timeline | None,
        splits: torch.Tensor, tokens: torch.Tensor, w: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        y, received, sizes = prepared(tokens, w, splits, max_rows, deadline_s, timeline)
        sizes.fetch()  # so that backward finds them on the host
        ctx.prepared, ctx.sizes, ctx.tokens_like = prepared, sizes, (tokens.shape, tokens.dtype)
        ctx.deadline_s = deadline_s
        # Of tokens the gradient of weights is made; of received, which the caller has too, so that changing it is noticed.
        ctx.save_for_backward(tokens if ctx.needs_input_grad[6] else None, w, received)
        ctx.mark_non_differentiable(received)
        return y, received

    @staticmethod
    @once(_Prepared.operator)
    def backward(ctx: Any, saved: Sequence[torch.Tensor], grad_y: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        tokens, w = saved[:2]
        wanted = ctx.needs_input_grad[5:]
        if tokens is None:
            shape, dtype = ctx.tokens_like
            tokens = grad_y.new_empty(shape, dtype=dtype)
        prepared = ctx.prepared
        with together(_BACKWARD, prepared.group, w, ctx.deadline_s):
            turn = prepared.turn(ctx.deadline_s)
            grads = gradients(tokens.contiguous(), w, ctx.sizes, prepared.group, grad_y, wanted, turn)
            return None, None, None, None, None, *grads


# --- what was prepared ---

_table: Table[_Prepared] = Table()


def prepared_calls(group: dist.ProcessGroup) -> list[_Prepared]:
    """Of each shape that was called on `group`, the oldest first."""
    return _table.known(group)


def _prepared_for(
    tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, group: dist.ProcessGroup, exact: bool, capacity: int | None,
    schedule: str | None, deadline_s: float | None,
) -> tuple[_Prepared, bool]:  # fmt: skip
    """And whether the call is differentiated. What is prepared does not depend on it, but all ranks must do it.

    What differs in the key differs in the text that ranks compare: a shape is new on all of them or on none."""
    pinned = plan.pinned(schedule)
    wanted = (False, False)
    if torch.is_grad_enabled():
        wanted = (tokens.requires_grad, w.requires_grad)
    likes = (w.shape, w.dtype, w.device, splits.shape, splits.dtype in _SPLITS, splits.device)
    key = (tokens.shape[1:], tokens.dtype, tokens.device, likes, exact, capacity, pinned)
    prepared = _table.find(group, key)
    if prepared is not None and wanted in prepared.agreed:
        return prepared, any(wanted)
    world, k = group.size(), tokens.shape[-1] if tokens.dim() else 0

    def describe(most: int) -> AllToAllMatmul:
        return AllToAllMatmul(world, w.shape[0], (most,) * world, w.shape[2], k, _DTYPES[tokens.dtype], most, exact)

    def check() -> tuple[str, int]:
        _check_shapes(tokens, w, splits, world)
        if refusal := _wrong_values(tokens, splits):
            raise ValueError(refusal)
        if capacity is not None and capacity < max(1, tokens.shape[0]):
            raise ValueError(
                f"capacity={capacity} must be at least 1, and at least the {counted(tokens.shape[0], 'row')} of tokens: "
                "pass the largest number of tokens that any rank has in any call"
            )
        p = describe(_LEAST_CAPACITY)
        if pinned is not None:
            choosing.check_name(pinned, p)
        text = (
            f"tokens [T, {k}] {tokens.dtype}, w_experts {list(w.shape)}, max_rows {'not ' * exact}given, capacity {capacity}, "
            f"{choosing.wanted_schedule(pinned, p)}, gradients wanted of (tokens, w_experts): {wanted}"
        )
        return text, tokens.shape[0]

    most = max(agree(_Prepared.operator, group, tokens.device, check, deadline_s))
    if prepared is None:
        p = describe(_rounded_up(most) if capacity is None else capacity)
        prepared = _table.keep(group, key, _Prepared(p, group, tokens.device, pinned))
    prepared.agreed.add(wanted)
    return prepared, any(wanted)


def _rounded_up(rows: int) -> int:
    """To a multiple of an eighth of the power of two below: the number of tokens may vary a little without a new shape."""
    rows = max(rows, _LEAST_CAPACITY)
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def _check_shapes(tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, world: int) -> None:
    """Raises `ValueError` for what cannot be."""
    shape = tuple(tokens.shape)
    if tokens.dtype not in _DTYPES:
        raise ValueError(f"tokens is {tokens.dtype}: use one of {', '.join(str(d) for d in _DTYPES)}")
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"tokens has shape {shape}: pass [T, K] with K of at least 1; a batch is flattened first")
    for name, t in (("w_experts", w), ("splits", splits)):
        if t.device != tokens.device:
            raise ValueError(f"{name} is on {t.device} and tokens on {tokens.device}: move it there")
    if w.dim() != 3 or w.shape[1] != shape[1] or 0 in w.shape:
        raise ValueError(
            f"w_experts has shape {tuple(w.shape)}: it must be [E, K={shape[1]}, N] to follow tokens {shape}, with E and N of at "
            f"least 1"
        )
    if w.dtype != tokens.dtype:
        raise ValueError(f"w_experts is {w.dtype} and tokens {tokens.dtype}: use one dtype")
    if splits.dtype not in _SPLITS:
        raise ValueError(f"splits is {splits.dtype}: use torch.int64")
    if splits.shape != (world * w.shape[0],):
        raise ValueError(
            f"splits has shape {tuple(splits.shape)}: it must be [{world * w.shape[0]}], a number for each of "
            f"{counted(w.shape[0], 'expert')} of {counted(world, 'rank')}"
        )


def _wrong_values(tokens: torch.Tensor, splits: torch.Tensor) -> str:
    """Why these splits will not do for these tokens, if the host can tell without a wait."""
    if splits.device.type != "cpu":
        return ""
    numbers = splits.tolist()  # whose sum does not wrap around
    least, total = min(numbers), sum(numbers)
    if least < 0:
        return f"splits has {least} at {numbers.index(least)}: numbers of tokens must not be negative"
    if total != tokens.shape[0]:
        return f"splits add up to {total} and tokens has {counted(tokens.shape[0], 'row')}: pass how many are for each expert"
    return ""


# --- for torch.compile: opaque ops ---

_library = torch.library.Library("weft", "FRAGMENT")
_INPUTS = "Tensor tokens, Tensor w_experts, Tensor splits"
_library.define(
    f"all_to_all_matmul({_INPUTS}, str group, SymInt? max_rows, int? capacity, str schedule, float deadline_s) -> (Tensor, Tensor)"
)
_library.define(
    f"all_to_all_matmul_backward(Tensor grad_y, {_INPUTS}, Tensor received, str group, float deadline_s, bool[] wanted) -> Tensor[]"
)


@opaque
def _run(
    tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, group: str, max_rows: int | None, capacity: int | None,
    schedule: str, deadline_s: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    exact, joined = max_rows is None, group_of(group)
    with together(_Prepared.operator, joined, tokens, deadline_s):
        prepared, _ = _prepared_for(tokens, w, splits, joined, exact, capacity, schedule or None, deadline_s or None)
        y, received, _ = prepared(tokens, w, splits, max_rows, deadline_s or None, None)
        return y, received


def _fake(
    tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, group: str, max_rows: int | None, capacity: int | None,
    schedule: str, deadline_s: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    rows = torch.library.get_ctx().new_dynamic_size() if max_rows is None else max_rows
    received = splits.new_empty(splits.shape[0] // w.shape[0], w.shape[0], dtype=torch.int64)
    return tokens.new_empty(rows, w.shape[2]), received


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tokens, w, splits, ctx.group, *_, ctx.deadline_s = inputs
    ctx.save_for_backward(tokens, w, splits, output[1])


def _backward(ctx: Any, grad_y: torch.Tensor, _: Any) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:2])
    options = ctx.group, ctx.deadline_s, wanted
    made = iter(torch.ops.weft.all_to_all_matmul_backward(grad_y, *ctx.saved_tensors, *options))
    return (*(next(made) if want else None for want in wanted), None, None, None, None, None, None)


@opaque
def _run_backward(
    grad_y: torch.Tensor, tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, received: torch.Tensor, group_name: str,
    deadline_s: float, wanted: list[bool],
) -> list[torch.Tensor]:  # fmt: skip
    """Those that are wanted, of tokens and of w_experts."""
    group = group_of(group_name)
    with together(_BACKWARD, group, tokens, deadline_s):
        sizes = Sizes(splits.to(torch.int64), received)
        turn = turn_on(group, tokens.device, _BACKWARD, deadline_s or None)
        found = gradients(tokens.contiguous(), w, sizes, group, grad_y, wanted, turn)
        return [grad for grad in found if grad is not None]


def _fake_backward(
    grad_y: torch.Tensor, tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, received: torch.Tensor, group: str,
    deadline_s: float, wanted: list[bool],
) -> list[torch.Tensor]:  # fmt: skip
    return [t.new_empty(t.shape) for t, want in zip((tokens, w), wanted, strict=True) if want]


for _key in ("CPU", "CUDA"):
    _library.impl("all_to_all_matmul", _run, _key)
    _library.impl("all_to_all_matmul_backward", _run_backward, _key)
torch.library.register_fake("weft::all_to_all_matmul", _fake, lib=_library)
torch.library.register_fake("weft::all_to_all_matmul_backward", _fake_backward, lib=_library)
torch.library.register_autograd("weft::all_to_all_matmul", _backward, setup_context=_set_up, lib=_library)
torch.library.register_autograd("weft::all_to_all_matmul_backward", refused(_Prepared.operator), lib=_library)
