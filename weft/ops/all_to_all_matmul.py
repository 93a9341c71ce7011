"""`weft.all_to_all_matmul`: MoE dispatch. Tokens are sent to the ranks of their experts, whose GEMMs start as tokens
arrive.

The number of tokens and their destinations may change in each call without a new set-up. Memory for arriving tokens is
allocated once, for `capacity` tokens per rank. `weft.runtime.unfused.experts` has the unfused implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.arguments import check_flag, check_tensor, checked_count
from weft.builders import AllToAllMatmul
from weft.errors import TooManyRowsError
from weft.hw.host import total_memory_bytes
from weft.operator.calls import made, overlapped, within
from weft.operator.dtypes import name_of_dtype
from weft.operator.layout import contiguous, strided, warn_of_copy
from weft.operator.registration import registered
from weft.operator.replay import replayed
from weft.operator.spec import Across, NativeSteps, Operator
from weft.ops.all_to_all_matmul_gradients import all_rows, dual_of, gradients_of_experts, send_again
from weft.runtime.unfused import experts
from weft.runtime.unfused.grouped_matmul import grad_of_weights
from weft.runtime.unfused.native_experts import dispatch_steps
from weft.runtime.unfused.sizes import Sizes, remember, remember_total, sizes_of
from weft.runtime.unfused.turn import Turn
from weft.timeline import Timeline
from weft.words import counted

_LEAST_CAPACITY = 64  # in tokens, since the first call may have no tokens


@replayed
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
    """Send every token to the rank of its expert, and multiply it there by the expert's weights: MoE dispatch.

    On W ranks with E experts each, the call is equivalent to

        received = all_to_all_single(splits)                           # [W, E]
        x = all_to_all_single(tokens, received.sum(1), splits.view(W, E).sum(1))
        x = x sorted by expert, then by source rank
        y = grouped_mm(x, w_experts, offs=received.sum(0).cumsum(0))

    but multiplies tokens that have arrived while it transfers other tokens, and never sorts tokens. All ranks of
    `group` must make the call. Autocast has no effect.

    tokens: [T, K] in fp32, fp16 or bf16 (on CPU also fp64, for `gradcheck`). Sort them by global expert, for example
        with an argsort of the router's choices: tokens for the E experts of rank 0, then of rank 1, and so on. T may
        differ between ranks and between calls. Copied if not contiguous.
    w_experts: [E, K, N] in the same dtype, the weights of this rank's experts. Contiguous, or the transpose of a
        contiguous [E, N, K]. Overlapping schedules on CPU copy a transpose at every call.
    splits: [W * E] int64 (int32 is converted) on the tokens' device: the number of tokens for each expert of all ranks.
        They must sum to T. The values are checked on CPU only. On GPUs a check would wait for the device, and wrong
        values give wrong results.
    group: a process group, or its name (default: the default group of torch.distributed).
    max_rows: an upper bound on the number of rows that this rank receives, or None. With None, y has exactly the
        received rows. The CPU then waits once for the GPU to read their number. Most schedules launch the GEMMs before
        this wait. With a number, y has that many rows, and rows beyond the received ones are not written. The CPU then
        never waits, and a CUDA graph can capture the call unless the schedule is "serial". The number may differ
        between ranks and between calls.
    return_received: True to return `received` too.
    capacity: the largest number of tokens T of any rank in any call, equal on all ranks. It determines the memory for
        arriving tokens. This memory is enough even if every rank sends all its tokens to one peer. Default: slightly
        more than the largest T at the first call of this shape.
    schedule: the name of a schedule, such as "serial" or "dispatch[by=kernel,rest=together]". "autotune" times
        schedules at the first call of a shape, and caches the fastest (docs/planning.md). "heuristic" uses the schedule
        that FiCCO's static heuristic picks (the first paper in "Sources"). If this schedule cannot run, weft warns with
        the reason and uses its default choice.
    deadline_s: the longest wait for a peer, in seconds, at most 1e6 (default: WEFT_DEADLINE_S, 60). On CPU it applies
        in backward too; on GPUs backward uses the default. On GPUs the serial schedule and parts of backward call NCCL,
        which uses the timeout of the process group.
    timeline: records the times of all steps, for profiling. On GPUs the call then synchronises with the device. Not
        supported under torch.compile.

    Returns y [rows, N] in the tokens' dtype, in ordinary memory. On GPUs it is valid in stream order. With
    `return_received`, returns (y, received), where received [W, E] int64 is the number of rows from each rank for each
    local expert, on the tokens' device. Without max_rows, y has a dynamic size under torch.compile. torch 2.13 traces it
    with fullgraph=True. With fullgraph=False the call breaks the graph, unless
    `torch._dynamo.config.capture_dynamic_output_shape_ops` is True.

    The first call of a shape (K, N, E, dtype, capacity, max_rows given or not) sets up memory and kernels on all ranks,
    which takes milliseconds to seconds. Make it before you capture a CUDA graph.

    Memory: y, and symmetric memory of (W - 1) x capacity x K elements. On GPUs without max_rows, y may be allocated
        before its number of rows is known. Its memory is then about an eighth larger than expected from earlier calls.
        CPU ranks keep the memory of the largest shape. GPU ranks keep the memory of each of the last 64 shapes, and of
        shapes that a CUDA graph has captured. Memory of large shapes that are no longer called is freed sooner.
        Schedules for few rows also need up to 128 KiB per multiprocessor, for partial sums. The serial schedule needs 2
        x K elements for each received row, in place of symmetric memory.

    Differentiable once in tokens and w_experts. All ranks must enable gradients for the same inputs. Gradients are sums
    over rows, not means.

    Only one thread at a time may make calls on a group.

    Raises:

    - `RefusedError` (a `ValueError`) on every rank if any rank passes bad arguments, wrong values in splits (checked on
      CPU only), or more tokens than capacity. (The schedule "serial" without gradients accepts more tokens, except in
      the first call of a shape.) The group stays usable. On GPUs, an error after the first call of a shape makes the
      group unusable.
    - `ValueError` on this rank only, for an invalid group.
    - `TooManyRowsError` on CPU, after the call, on a rank that received more than max_rows rows. On GPUs such rows are
      dropped, and only `received` shows the loss.
    - `DisagreementError` if ranks describe different calls: on CPU at every call, on GPUs at the first call of a shape.
    - `DeadlineError`, `PeerLostError` or `PoisonedGroupError` if a rank is late, is lost, or has failed.
    - `NotImplementedError` for second derivatives.

    Sources: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap" (FiCCO), II-A and IV-B2
        (an all-to-all before the GEMMs of experts). "T3: Transparent Tracking & Triggering for Fine-grained Overlap of
        Compute & Collectives", 7.1 and 7.2, where the all-to-all follows the GEMM.
    """

    group = dist.group.WORLD if group is None else group

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        for name, tensor in (("tokens", tokens), ("w_experts", w_experts), ("splits", splits)):
            check_tensor(name, tensor)
        check_flag("return_received", return_received)
        counts = checked_count("max_rows", max_rows), checked_count("capacity", capacity)
        return _Call(tokens, w_experts, splits, *counts, False)

    y, received = made(OPERATOR, group, tokens, form, schedule=schedule, deadline_s=deadline_s, timeline=timeline)
    return (y, received) if return_received else y


class _Call(NamedTuple):
    """The arguments of a call.

    max_rows: an upper bound on the received rows, or None.
    return_x: True to return the received tokens too, in calls without gradients. In the backward of `matmul_all_to_all`,
        max_rows is the exact number of received rows.
    """

    tokens: torch.Tensor
    w: torch.Tensor
    splits: torch.Tensor
    max_rows: int | None
    capacity: int | None
    return_x: bool


class _AllToAllMatmul(Operator[_Call]):
    name, form = "all_to_all_matmul", _Call
    across_ranks: ClassVar[Mapping[str, Across]] = {
        "tokens": "own", "w_experts": "layout", "splits": "own", "group": "own", "max_rows": "given", "return_received": "own",
        "capacity": "alike", "schedule": "alike", "deadline_s": "own", "timeline": "own",
    }  # fmt: skip
    caller_names: ClassVar[Mapping[str, str]] = {"w": "w_experts"}
    gradients_of: ClassVar[Mapping[str, str]] = {"tokens": "tokens", "w": "w_experts"}
    backward_tags = (torch.Tag.cudagraph_unsafe,)  # backward needs the number of received rows on the CPU

    def note(self, call: _Call) -> None:
        if call.splits.is_cuda:
            remember_total(call.splits, call.tokens.shape[0])

    def note_read(
        self, call: _Call, results: Sequence[torch.Tensor], read: Mapping[str, Sequence[int]], rank: int
    ) -> None:
        """Remember how many rows this rank sends to and receives from each rank, if the CPU has read these numbers in this
        call. Then the combine and backward need not read them from the device again.

        read: {buffer: its contents} for the buffers that the CPU has read. The buffer `counts` has the splits of all ranks.
        """
        if (counts := read.get("counts")) is not None:
            remember(Sizes.of_read(call.splits, results[1], counts, rank))

    def checked(self, call: _Call, group: dist.ProcessGroup) -> _Call:
        splits = call.splits.to(torch.int64) if call.splits.dtype == torch.int32 else call.splits
        return call if splits is call.splits and splits.is_contiguous() else call._replace(splits=splits.contiguous())

    # --- the call and its problem ---

    def size(self, call: _Call) -> int:
        return call.tokens.shape[0] if call.tokens.dim() else 0  # weft has not checked the shape yet

    def key(self, call: _Call) -> Hashable:
        tokens, w, splits, max_rows, capacity, return_x = call
        likes = (w.shape, w.dtype, w.device, splits.shape, splits.dtype, splits.device)
        return tokens.shape[1:], tokens.dtype, tokens.device, likes, max_rows is None, capacity, return_x

    def said(self, call: _Call, world: int) -> str:
        tokens, w, splits, max_rows, capacity, return_x = call
        _check_shapes(tokens, w, splits, world)
        _check_values(tokens, splits)
        check_capacity(capacity, tokens.shape[0], "rows of tokens", tokens, world * tokens.shape[1])
        _check_max_rows(call)
        return (
            f"tokens [T, {tokens.shape[-1]}] {tokens.dtype}, w_experts {list(w.shape)}, max_rows "
            f"{'not ' * (max_rows is None)}given, capacity {capacity}{', tokens returned' * return_x}"
        )

    def problem(self, call: _Call, world: int, most: int) -> AllToAllMatmul:
        """Return the problem (the sizes for which buffers are allocated and a schedule is chosen), with `capacity` tokens on
        each rank. If the call has no capacity, `most` is used instead, rounded up.

        most: the largest number of tokens of any rank.
        """
        tokens, w = call.tokens, call.w
        most = rounded_up(most) if call.capacity is None else call.capacity
        exact = call.max_rows is None
        sizes = world, w.shape[0], (most,) * world, w.shape[2], tokens.shape[-1]
        return AllToAllMatmul(*sizes, name_of_dtype("tokens", tokens), most, exact, return_x=call.return_x)

    # --- memory ---

    def inputs(self, p: AllToAllMatmul, call: _Call) -> dict[str, Any]:
        _check_values(call.tokens, call.splits)
        _check_max_rows(call)
        tokens = contiguous(call.tokens, "tokens", self.name)
        return {"tokens": tokens, "splits": call.splits.view(1, -1), "w": expert_weights(call.w, self.name)}

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        tokens, w, splits, max_rows, _, return_x = call

        def that_arrive(columns: int) -> torch.Tensor | Callable[[int], torch.Tensor]:
            def make(rows: int) -> torch.Tensor:
                # Rows beyond max_rows need memory too: peers write them before this rank can raise.
                return tokens.new_empty(rows if max_rows is None else max(rows, max_rows), columns)

            return make if max_rows is None or tokens.device.type == "cpu" else make(max_rows)

        results = {"y": that_arrive(w.shape[2]), "received": splits.new_empty(world, w.shape[0])}
        return results | ({"x": that_arrive(tokens.shape[1])} if return_x else {})

    def fake(self, call: _Call, world: int) -> list[torch.Tensor]:
        rows = torch.library.get_ctx().new_dynamic_size() if call.max_rows is None else call.max_rows
        received = call.splits.new_empty(world, call.w.shape[0], dtype=torch.int64)
        x = [call.tokens.new_empty(rows, call.tokens.shape[1])] if call.return_x else []
        return [call.tokens.new_empty(rows, call.w.shape[2]), received, *x]

    def does_not_fit(self, p: AllToAllMatmul, call: _Call) -> str:
        if call.tokens.shape[0] <= p.most:
            return ""
        return (
            f"tokens has {counted(call.tokens.shape[0], 'row')}, but calls of this shape were set up for "
            f"capacity={p.most}{origin_of(call.capacity)}: pass capacity, the largest number of tokens of any rank in any call, on "
            "every rank"
        )

    def to_choose_with(self, p: AllToAllMatmul, rank: int, call: _Call) -> _Call:
        """Return a made-up call with which to measure schedules. It has the problem's number of tokens, and each expert
        gets the same number. The call that triggers the measurement may have too few tokens to be typical.
        """
        splits = torch.tensor(p.splits[rank], device=call.splits.device)
        arriving = sum(row[rank * p.experts + e] for row in p.splits for e in range(p.experts))
        tokens = call.tokens.new_zeros(p.rows[rank], p.k)
        return call._replace(tokens=tokens, splits=splits, max_rows=None if p.exact else arriving)

    def finished(self, call: _Call, results: Sequence[torch.Tensor], rank: int) -> None:
        if call.max_rows is None:
            return
        came = results[1].sum(1).tolist()
        if sum(came) > call.max_rows:
            raise TooManyRowsError(
                f"{counted(sum(came), 'row')} arrived on rank {rank} (from each rank: {came}), but "
                f"max_rows={call.max_rows}: pass at least {sum(came)}, or None for no limit"
            )

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return results[0].shape[0], [call.w]

    # --- gradients ---

    def saved(self, call: _Call, results: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Save the tokens for the gradient of the weights, and `received`. Autograd raises an error in backward if the
        caller has changed `received`.
        """
        return [call.tokens if wanted[1] else None, call.w, call.splits, results[1]]

    def beside(self, call: _Call, group: dist.ProcessGroup, saved: Sequence[torch.Tensor | None], inputs: Any) -> Sizes:
        """Start copying `received` and `splits` to the CPU, for backward."""
        _, _, splits, received = saved
        assert splits is not None
        assert received is not None
        sizes = sizes_of(splits.to(torch.int64), received)
        sizes.fetch()
        remember(sizes)
        return sizes

    def gradients(
        self, p: AllToAllMatmul, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor],
        wanted: Sequence[bool], turn: Turn, beside: Sizes,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Return the gradients of tokens and weights.

        If `matmul_all_to_all` overlaps for this shape, or if only the gradient of tokens is wanted, `matmul_all_to_all`
        computes this gradient, with transposed weights. For the gradient of weights, tokens are sent again before this
        GEMM. On GPUs NCCL does not run during the GEMM, because the GEMM's thread blocks would wait for NCCL's
        multiprocessors. Otherwise NCCL and cuBLAS compute both gradients: tokens are sent again during one GEMM, and
        gradients during the other.

        saved: the result of the method `saved`. The first entry may also be an exchange of tokens that has begun: the
            result of `experts.begin_in_expert_order`.

        Forward does not save the received tokens: each call would have to copy them, because the next call overwrites
        them. Also, calls with and without gradients could then have different schedules, and results that differ by
        rounding. Activation checkpointing runs forward in both ways, and needs equal results.
        """
        (tokens, w, *_), grad = saved, all_rows(grads[0], sum(beside.host.came))
        if p.world_size > 1 and not wanted[1]:
            return [within(*dual_of(p, grad, w, beside), group, turn)[0], None, None]
        has_dual = p.world_size > 1 and wanted[0] and w.is_cuda
        overlap = overlapped(*dual_of(p, grad, w, beside), group, turn) if has_dual else None
        if overlap is None:
            if tokens is None:
                tokens = w.new_empty(sum(beside.host.sent), p.k)
            return [*gradients_of_experts(tokens, w, beside, group, grad, wanted, turn), None]
        grad_w = grad_of_weights(send_again(tokens, beside, group, turn)(), grad, w, beside)
        return [overlap()[0], grad_w, None]

    # --- without overlap ---

    def unfused(self, p: AllToAllMatmul, call: _Call, group: dist.ProcessGroup, turn: Turn) -> list[torch.Tensor]:
        tokens = contiguous(call.tokens, "tokens", self.name)
        w = call.w if tokens.device.type == "cpu" else strided(call.w, "w_experts", self.name)
        y, sizes, x = experts.dispatched(tokens, w, call.splits, group, call.max_rows, turn, return_x=call.return_x)
        remember(sizes)
        return [y, sizes.received, *([] if x is None else [x])]

    def steps_on_gpu(self, call: _Call, world: int) -> NativeSteps | None:
        tokens, w, splits, max_rows, _, return_x = call
        if max_rows is not None or return_x or not tokens.is_contiguous():
            return None
        steps = dispatch_steps(w.shape[0], world) if strided(w, "w_experts", self.name) is w else None
        return None if steps is None else NativeSteps(steps, (tokens, w, splits))


def expert_weights(w: torch.Tensor, of: str) -> torch.Tensor:
    """Return w in a layout that executors and unfused calls accept: on CPU contiguous or transposed, on GPUs with any strides
    that GEMMs support. A schedule on CPU copies a transpose when it begins (`CpuSchedule.run`).

    of: the operator, for the warning about a copy.
    """
    if w.device.type != "cpu":
        return strided(w, "w_experts", of)
    if w.is_contiguous() or w.mT.is_contiguous():
        return w
    warn_of_copy("w_experts", w, of, "an expert's matrix must be contiguous or transposed, so pass a contiguous tensor")
    return w.contiguous()


def origin_of(capacity: int | None) -> str:
    """Return words that tell a user who passed no `capacity` where it comes from."""
    return ", which the first call has determined" if capacity is None else ""


def check_capacity(capacity: int | None, tokens: int, what: str, like: torch.Tensor, columns: int) -> None:
    """Raise `ValueError` if `capacity` is less than 1, or less than `tokens`, this rank's number of tokens in a call. Raise it
    also if the host of a CPU rank has too little memory.

    what: a phrase for these tokens in the error text. columns: for each token of capacity, the number of elements with the dtype
        of `like` that a rank keeps: one row of each rank.
    """
    fix = "the largest number of tokens that any rank has in any call"
    if capacity is not None and capacity < max(1, tokens):
        least = f"the number of {what}, {tokens}" if tokens else "1"
        raise ValueError(f"capacity={capacity} must be at least {least}: pass {fix}")
    _check_memory("capacity", capacity, columns, like, "on each rank", fix)


def _check_max_rows(call: _Call) -> None:
    """Raise `ValueError` if the host of a CPU rank has too little memory for the results. Without this check the group would fail,
    because the rank allocates them after its peers have begun the call.
    """
    columns, fix = (
        call.w.shape[2] + call.return_x * call.tokens.shape[1],
        "the largest number of rows that this rank can receive",
    )
    _check_memory("max_rows", call.max_rows, columns, call.tokens, "on this rank", fix)


def _check_memory(name: str, rows: int | None, columns: int, like: torch.Tensor, use: str, fix: str) -> None:
    """Raise `ValueError` if `like` is on the CPU, and `rows` x `columns` elements of its dtype exceed this host's memory."""
    if rows is None or like.device.type != "cpu":
        return
    nbytes = rows * columns * like.element_size()
    if nbytes > total_memory_bytes():
        raise ValueError(
            f"{name}={rows} needs {nbytes / 2**30:.1f} GiB {use}, but this host has {total_memory_bytes() / 2**30:.1f} GiB of "
            f"memory: pass {fix}"
        )


def rounded_up(rows: int) -> int:
    """Round up `rows`, so that calls with slightly more tokens share the compiled shape.

    Let p be the largest power of two that is at most `rows`. The result is a multiple of p / 8, and at least 64.
    """
    rows = max(rows, _LEAST_CAPACITY)
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def check_experts(name: str, rows: torch.Tensor, fix: str, w: torch.Tensor, **tables: torch.Tensor) -> None:
    """Raise `ValueError` unless `rows` is [n, K] with the K of the experts' weights `w`, and all tensors are on the
    device of `rows`.

    name: the argument name of `rows`. fix: the shape to pass, for the error text.
    """
    shape = tuple(rows.shape)
    name_of_dtype(name, rows)
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"{name} has shape {shape}: pass {fix}")
    for other, t in {"w_experts": w, **tables}.items():
        if t.device != rows.device:
            raise ValueError(f"{other} is on {t.device}, but {name} is on {rows.device}: move {other} to {rows.device}")
    if w.dim() != 3 or w.shape[1] != shape[1] or 0 in w.shape:
        raise ValueError(
            f"w_experts has shape {tuple(w.shape)}: pass [E, K={shape[1]}, N] to match {name} {shape}, with E and N of "
            "at least 1"
        )
    if w.dtype != rows.dtype:
        raise ValueError(f"w_experts is {w.dtype} and {name} {rows.dtype}: use one dtype")


def _check_shapes(tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, world: int) -> None:
    """Raise `ValueError` for wrong shapes, dtypes or devices."""
    check_experts("tokens", tokens, "[T, K] with K of at least 1; flatten a batch first", w, splits=splits)
    if splits.dtype != torch.int64:
        raise ValueError(f"splits is {splits.dtype}: use torch.int64")
    if splits.shape != (world * w.shape[0],):
        raise ValueError(
            f"splits has shape {tuple(splits.shape)}: pass [{world * w.shape[0]}], one number for each of "
            f"{counted(w.shape[0], 'expert')} of {counted(world, 'rank')}"
        )


def _check_values(tokens: torch.Tensor, splits: torch.Tensor) -> None:
    """Raise `ValueError` for splits that do not match the tokens. Skip the check if splits is on a GPU, where reading
    would wait.
    """
    if splits.device.type != "cpu":
        return
    numbers = splits.tolist()  # Python integers, whose sum cannot overflow
    least, total = min(numbers), sum(numbers)
    if least < 0:
        raise ValueError(
            f"splits[{numbers.index(least)}]={least}: pass the number of tokens for each expert, 0 or more"
        )
    if total != tokens.shape[0]:
        raise ValueError(
            f"splits add up to {total} but tokens has {counted(tokens.shape[0], 'row')}: pass the number of tokens "
            "for each expert"
        )


OPERATOR = registered(_AllToAllMatmul())
