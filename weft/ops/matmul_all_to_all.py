"""`weft.matmul_all_to_all`: MoE combine. Rows are sent back to the ranks of their tokens as the experts' GEMMs finish
them.

Use it after `weft.all_to_all_matmul`, which returns the number of rows for each rank. `weft.runtime.unfused.experts`
has the unfused implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.arguments import check_tensor, checked_count
from weft.builders import MatmulAllToAll
from weft.operator.calls import made, overlapped
from weft.operator.dtypes import name_of_dtype
from weft.operator.layout import contiguous, strided
from weft.operator.registration import registered
from weft.operator.replay import replayed
from weft.operator.spec import Across, NativeSteps, Operator
from weft.ops.all_to_all_matmul import OPERATOR as DISPATCH
from weft.ops.all_to_all_matmul import check_capacity, check_experts, expert_weights, origin_of, rounded_up
from weft.runtime.unfused import experts
from weft.runtime.unfused.begun import Begun
from weft.runtime.unfused.grouped_matmul import grad_of_weights, grouped_matmul
from weft.runtime.unfused.native_experts import combine_steps
from weft.runtime.unfused.permutation import in_expert_order
from weft.runtime.unfused.sizes import Sizes, sizes_of, total_of
from weft.runtime.unfused.turn import Turn
from weft.timeline import Timeline
from weft.words import counted

_INTEGERS = (torch.int64, torch.int32)


def matmul_all_to_all(
    h: torch.Tensor,
    w_experts: torch.Tensor,
    received: torch.Tensor,
    splits: torch.Tensor,
    *,
    group: dist.ProcessGroup | str | None = None,
    rows: int | None = None,
    capacity: int | None = None,
    schedule: str | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> torch.Tensor:
    """Multiply every row by its expert's weights, and send it back to the rank of its token: MoE combine.

    Use it after `all_to_all_matmul`. On W ranks with E experts each, the call is equivalent to

        y = grouped_mm(h, w_experts, offs=received.sum(0).cumsum(0))
        y = y sorted by source rank, then by expert
        return all_to_all_single(y, splits.view(W, E).sum(1), received.sum(1))

    but sends finished rows while it multiplies other rows, and never sorts rows. The planner chooses a schedule for the
    shape and the machine. If no overlapping schedule is faster, the GEMMs run first, and then the all-to-all of NCCL
    (on CPU weft or gloo). All ranks of `group` must make the call. Autocast has no effect.

    For one GEMM followed by an all-to-all of equal parts, use one expert per rank: pass `w[None]`, and `received` [W,
    1] and `splits` [W] filled with `len(h) // W`.

    h: [R, K] in fp32, fp16 or bf16 (on CPU also fp64, for `gradcheck`), sorted by local expert and then by source rank,
        as `all_to_all_matmul` returns it. R may exceed the number of received rows, for example with `max_rows`. The
        extra rows are ignored, and their gradients are zero. Copied if not contiguous.
    w_experts: [E, K, N] in the same dtype, the weights of this rank's experts. Contiguous, or the transpose of a
        contiguous [E, N, K]. Overlapping schedules on CPU copy a transpose at every call.
    received: [W, E] int64 (int32 is converted) on h's device: the number of rows from each rank for each local expert,
        as `all_to_all_matmul(..., return_received=True)` returns it.
    splits: [W * E] int64 (int32 is converted) on h's device: the number of this rank's tokens for each expert of all
        ranks, as passed to `all_to_all_matmul`. The values of received and splits are checked on CPU only. On GPUs a
        check would wait for the device, and wrong values give wrong results.
    group: a process group, or its name (default: the default group of torch.distributed).
    rows: the number of this rank's tokens, which is the sum of splits, or None. With a number, the CPU never waits, and
        a CUDA graph can capture the call unless the schedule is "serial". With None, weft reuses the number if an
        earlier call of `all_to_all_matmul` has read it for the same tensor `splits`. Otherwise the CPU waits to read
        the number from the GPU. Pass rows on all ranks or on none. The schedule "serial" needs the values of `received`
        and `splits` on the CPU. weft already has them there if a call of `all_to_all_matmul` without max_rows returned
        `received` for the same tensor `splits`, outside of `torch.inference_mode`. Otherwise the CPU waits for them,
        even if rows is a number. On GPUs do not let collectives or custom kernels overwrite the tensors `received` and
        `splits`, because torch does not notice this: pass new tensors.
    capacity: the largest number of tokens of any rank in any call, equal on all ranks. Default: slightly more than the
        largest number at the first call of this shape.
    schedule: the name of a schedule for forward, such as "serial" or "combine[chunks=1,by=store]". "autotune" times
        schedules at the first call of a shape, and caches the fastest (docs/planning.md).
    deadline_s: the longest wait for a peer, in seconds, at most 1e6 (default: WEFT_DEADLINE_S, 60). On CPU it applies
        in backward too; on GPUs backward uses the default. On GPUs the serial schedule and parts of backward call NCCL,
        which uses the timeout of the process group.
    timeline: records the times of all steps, for profiling. On GPUs the call then synchronises with the device. Not
        supported under torch.compile.

    Returns y [rows, N] in h's dtype, in ordinary memory, in the order of this rank's tokens as passed to
    `all_to_all_matmul`: sorted by global expert. On GPUs it is valid in stream order. Every row is computed in fp32 and
    rounded once, so equal calls give equal bits. There is one exception: CPU ranks on several hosts use two methods in
    the first calls of each size, and then the faster one (docs/hosts.md). The methods split GEMMs in different ways, so
    equal calls may differ by rounding. Without rows, y has a dynamic size under torch.compile. torch 2.13 traces it with
    fullgraph=True. With fullgraph=False the call breaks the graph, unless
    `torch._dynamo.config.capture_dynamic_output_shape_ops` is True.

    The first call of a shape, and its first backward, set up memory and kernels on all ranks, which takes milliseconds
    to seconds. A shape consists of K, N, E, dtype, capacity, and whether `rows` is given. Make the call and its
    backward before you capture a CUDA graph.

    Memory: y, and symmetric memory of (W - 1) x capacity x N elements for each shape that weft keeps (as in
        `weft.all_to_all_matmul`). Schedules with by=kernel need as much ordinary memory too. If each rank has one
        expert, combine_by_expert[chunks=1,by=kernel] needs (2W - 1) x capacity x N elements of symmetric memory instead. The
        serial schedule needs 2 x N elements for each received row. Backward needs memory for the rows of y's gradient that this
        rank receives; twice as much if a rank has several experts. Overlapped backward also needs as much symmetric memory as
        overlapped forward.

    Differentiable once in h and w_experts. All ranks must enable gradients for the same inputs. Gradients are sums over
    rows, not means. Backward sends the gradient of y to the experts once. The transfer overlaps with GEMMs if
    `all_to_all_matmul` overlaps for this shape.

    Only one thread at a time may make calls on a group.

    Raises:

    - `RefusedError` (a `ValueError`) on every rank if any rank passes bad arguments, wrong values in received or splits
      (checked on CPU only), or more tokens than capacity. (The schedule "serial" without gradients accepts more tokens,
      except in the first call of a shape.) The group stays usable. On GPUs, an error after the first call of a shape
      makes the group unusable.
    - `ValueError` on this rank only, for an invalid group.
    - `DisagreementError` if ranks describe different calls: on CPU at every call, on GPUs at the first call of a shape.
    - `DeadlineError`, `PeerLostError` or `PoisonedGroupError` if a rank is late, is lost, or has failed.
    - `NotImplementedError` for second derivatives.

    Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 7.1 and 7.2 (an
        all-to-all after the GEMM that produces its data; experts).
    """

    given = h, w_experts, received, splits, group, rows, capacity, schedule, deadline_s, timeline
    if isinstance(h, torch.Tensor) and h.device.type == "cpu":  # replays check each call, and read splits again
        return _combined(*given, tokens=None)
    if rows is not None:
        return _combined(*given, tokens=rows)
    tokens = None if torch.compiler.is_compiling() or not isinstance(splits, torch.Tensor) else total_of(splits)
    if tokens is None and not torch.compiler.is_compiling() and _can_sum(splits):
        tokens = int(splits.sum())
    return (_combine if tokens is None else _combined)(*given, tokens=tokens)


def _can_sum(splits: torch.Tensor) -> bool:
    """True if the CPU can read the sum of `splits` without waiting: `splits` is an ordinary int64 tensor in CPU memory, not a
    subclass.
    """
    is_plain = type(splits) is torch.Tensor and splits.is_cpu and splits.dtype == torch.int64
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(splits)


def _combine(
    h: torch.Tensor, w_experts: torch.Tensor, received: torch.Tensor, splits: torch.Tensor,
    group: dist.ProcessGroup | str | None, rows: int | None, capacity: int | None, schedule: str | None,
    deadline_s: float | None, timeline: Timeline | None, tokens: int | None,
) -> torch.Tensor:  # fmt: skip
    """Run `matmul_all_to_all`.

    tokens: this rank's number of tokens, if it is known without reading splits.
    """
    group = dist.group.WORLD if group is None else group

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        for name, tensor in (("h", h), ("w_experts", w_experts), ("received", received), ("splits", splits)):
            check_tensor(name, tensor)
        counts = checked_count("rows", rows), checked_count("capacity", capacity)
        return _Call(h, w_experts, received, splits, *counts, tokens)

    (y,) = made(OPERATOR, group, h, form, schedule=schedule, deadline_s=deadline_s, timeline=timeline)
    return y


_combined = replayed(_combine, of_size="tokens")
"""`_combine` with a fast path for repeated calls (`weft.operator.replay`). On GPUs, use it only if the number of tokens is
known: otherwise equal arguments do not imply equal calls.
"""


class _Call(NamedTuple):
    """The arguments of a call. tokens: this rank's number of tokens; None while it is unknown."""

    h: torch.Tensor
    w: torch.Tensor
    received: torch.Tensor
    splits: torch.Tensor
    rows: int | None
    capacity: int | None
    tokens: int | None = None


class _MatmulAllToAll(Operator[_Call]):
    """The operator of MoE combine. Its gradients are

        grad h_e = G_e @ w_e^T      grad w_e = h_e^T @ G_e

    where G is grad y, sent to the ranks that multiplied the rows, and sorted by expert.
    """

    name, form, is_combine = "matmul_all_to_all", _Call, True
    across_ranks: ClassVar[Mapping[str, Across]] = {
        "h": "own", "w_experts": "layout", "received": "own", "splits": "own", "group": "own", "rows": "given",
        "capacity": "alike", "schedule": "alike", "deadline_s": "own", "timeline": "own",
    }  # fmt: skip
    caller_names: ClassVar[Mapping[str, str]] = {"w": "w_experts"}
    of_size = "tokens"
    gradients_of: ClassVar[Mapping[str, str]] = {"h": "h", "w": "w_experts"}
    backward_tags = (torch.Tag.cudagraph_unsafe,)  # backward needs the number of received rows on the CPU

    def checked(self, call: _Call, group: dist.ProcessGroup) -> _Call:
        h, _, received, splits, rows, _, total = call
        if rows is None and total is None and h.is_cuda:  # a call under torch.compile
            total = total_of(splits)
        if h.device.type == "cpu":
            _check(call, group.size(), group.rank())
        if (
            received.dtype == torch.int32
            or splits.dtype == torch.int32
            or not (received.is_contiguous() and splits.is_contiguous())
        ):
            received, splits = (
                (t.to(torch.int64) if t.dtype == torch.int32 else t).contiguous() for t in (received, splits)
            )
            call = call._replace(received=received, splits=splits)
        if rows is not None or total is not None:
            return call._replace(tokens=total if rows is None else rows)
        if splits.dtype != torch.int64 or splits.device != h.device:
            return call  # a later check refuses the call
        if h.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "matmul_all_to_all without rows reads the number of tokens on the CPU, which a CUDA graph cannot "
                "capture: pass rows"
            )
        sizes = sizes_of(splits, received) if h.is_cuda else None
        tokens = sum(sizes.host.sent) if sizes is not None and sizes.is_fetched else int(splits.sum())
        return call._replace(tokens=tokens)

    # --- the call and its problem ---

    def size(self, call: _Call) -> int:
        return call.tokens or 0

    def key(self, call: _Call) -> Hashable:
        h, w, received, splits, rows, capacity, _ = call
        likes = tuple((t.shape, t.dtype, t.device) for t in (w, received, splits))
        return h.shape[1:], h.dtype, h.device, likes, rows is None, capacity

    def said(self, call: _Call, world: int) -> str:
        h, w, _, _, rows, capacity, tokens = call
        _check_shapes(call, world)
        check_capacity(capacity, tokens or 0, "tokens of splits", h, world * w.shape[2])
        return (
            f"h [R, {h.shape[-1]}] {h.dtype}, w_experts {list(w.shape)}, rows {'not ' * (rows is None)}given, "
            f"capacity {capacity}"
        )

    def problem(self, call: _Call, world: int, most: int) -> MatmulAllToAll:
        """Return the problem (the sizes for which buffers are allocated and a schedule is chosen), with `capacity` tokens on
        each rank. If the call has no capacity, `most` is used instead, rounded up.

        most: the largest number of tokens of any rank.
        """
        h, w = call.h, call.w
        most = rounded_up(most) if call.capacity is None else call.capacity
        exact = call.rows is None
        return MatmulAllToAll(
            world, w.shape[0], (most,) * world, w.shape[2], h.shape[-1], name_of_dtype("h", h), most, exact
        )

    def pairs(self, call: _Call, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        return call.received, call.splits.view(world, -1)

    # --- memory ---

    def inputs(self, p: MatmulAllToAll, call: _Call) -> dict[str, Any]:
        return {
            "h": contiguous(call.h, "h", self.name), "received": call.received, "splits": call.splits.view(call.received.shape),
            "w": expert_weights(call.w, self.name),
        }  # fmt: skip

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        return {"y": call.h.new_empty(call.tokens or 0, call.w.shape[2])}

    def fake(self, call: _Call, world: int) -> list[torch.Tensor]:
        rows = torch.library.get_ctx().new_dynamic_size() if call.rows is None else call.rows
        return [call.h.new_empty(rows, call.w.shape[2])]

    def does_not_fit(self, p: MatmulAllToAll, call: _Call) -> str:
        if (call.tokens or 0) <= p.most:
            return ""
        return (
            f"this rank has {counted(call.tokens or 0, 'token')}, but calls of this shape were set up for "
            f"capacity={p.most}{origin_of(call.capacity)}: pass capacity, the largest number of tokens of any rank in any call, on "
            "every rank"
        )

    def to_choose_with(self, p: MatmulAllToAll, rank: int, call: _Call) -> _Call:
        """Return a made-up call with which to measure schedules. It has the problem's number of tokens, and each expert
        gets the same number. The call that triggers the measurement may have too few tokens to be typical.
        """
        first = rank * p.experts
        received = torch.tensor([row[first : first + p.experts] for row in p.splits], device=call.received.device)
        splits = torch.tensor(p.splits[rank], device=call.splits.device)
        h = call.h.new_zeros(sum(sum(row[first : first + p.experts]) for row in p.splits), p.k)
        return call._replace(h=h, received=received, splits=splits, tokens=p.rows[rank])

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return call.h.shape[0], [call.w]

    # --- gradients ---

    def saved(self, call: _Call, results: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Save h for the gradient of the weights. If only the gradient of h is wanted, save the number of rows of h
        instead.
        """
        h = call.h if wanted[1] else call.h.new_empty(call.h.shape[0], 0)
        return [h, call.w, call.received, call.splits]

    def beside(self, call: _Call, group: dist.ProcessGroup, saved: Sequence[torch.Tensor | None], inputs: Any) -> Sizes:
        """Start copying `received` and `splits` to the CPU, for backward."""
        _, _, received, splits = saved
        assert received is not None
        assert splits is not None
        sizes = sizes_of(splits.to(torch.int64), received.to(torch.int64))
        sizes.fetch()
        return sizes

    def gradients(
        self, p: MatmulAllToAll, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor],
        wanted: Sequence[bool], turn: Turn, beside: Sizes,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Return the gradients of h and the weights.

        If `all_to_all_matmul` overlaps for this shape, it computes grad h from grad y and the transposed weights, and
        returns the received rows of grad y for the gradients of weights. Otherwise NCCL exchanges grad y once for both
        gradients.
        """
        (h, w, *_), grad, came = saved, grads[0].contiguous(), sum(beside.host.came)
        grad_h = grad_w = None
        dual = self._dual(p, group, grad, w, beside, turn, wanted[1]) if wanted[0] and p.world_size > 1 else None
        if dual is None:
            rows = experts.begin_in_expert_order(grad, beside, group, turn, "exchange gradients of y")()
            if wanted[0]:
                grad_h = grouped_matmul(rows, _transposed(w), beside)
        else:
            grad_h, _, *arrived = dual()
            rows = in_expert_order(arrived[0], beside) if arrived else grad
        if wanted[1]:
            grad_w = grad_of_weights(h[:came], rows, w, beside)
        if grad_h is not None and came < h.shape[0]:
            grad_h = torch.cat((grad_h, grad_h.new_zeros(h.shape[0] - came, p.k)))
        return [grad_h, grad_w, None, None]

    def _dual(
        self, p: MatmulAllToAll, group: dist.ProcessGroup, grad: torch.Tensor, w: torch.Tensor, sizes: Sizes, turn: Turn,
        return_x: bool,
    ) -> Callable[[], list[torch.Tensor]] | None:  # fmt: skip
        """Return a function that computes grad h by `all_to_all_matmul`. Return None if `all_to_all_matmul` would run the
        serial schedule for this shape.

        return_x: True if the function also returns the received rows of grad y.
        """
        call = DISPATCH.form(grad, _transposed(w), sizes.splits, sum(sizes.host.came), p.most, return_x)
        return overlapped(DISPATCH, call, group, turn)

    # --- without overlap ---

    def unfused(self, p: MatmulAllToAll, call: _Call, group: dist.ProcessGroup, turn: Turn) -> list[torch.Tensor]:
        h = contiguous(call.h, "h", self.name)
        w = call.w if h.device.type == "cpu" else strided(call.w, "w_experts", self.name)
        sizes = sizes_of(call.splits, call.received)
        return [experts.matmul_all_to_all(h, w, sizes, group, call.tokens or 0, turn, most=p.most)]

    def steps_on_gpu(self, call: _Call, world: int) -> NativeSteps | None:
        if not call.h.is_contiguous() or strided(call.w, "w_experts", self.name) is not call.w:
            return None
        steps = combine_steps(call.w.shape[0], world)
        return None if steps is None else NativeSteps(steps, call[:4], [self.of_size])

    def begun(self, p: MatmulAllToAll, call: _Call, group: dist.ProcessGroup, turn: Turn) -> Begun | None:
        h, sizes = contiguous(call.h, "h", self.name), Sizes(call.splits, call.received)
        return experts.begin_matmul_all_to_all(h, call.w, sizes, group, call.tokens or 0, turn, p.most)


def _transposed(w: torch.Tensor) -> torch.Tensor:
    """Return w transposed, in the layout that overlapped and unfused backward use, so that both give equal bits."""
    return w.transpose(1, 2) if w.is_cuda else w.transpose(1, 2).contiguous()


def _check_shapes(call: _Call, world: int) -> None:
    """Raise `ValueError` for wrong shapes, dtypes or devices."""
    h, w, received, splits, *_ = call
    fix = "[R, K] with K of at least 1, as all_to_all_matmul returns it"
    check_experts("h", h, fix, w, received=received, splits=splits)
    experts = w.shape[0]
    for name, t, wanted in (("received", received, (world, experts)), ("splits", splits, (world * experts,))):
        if t.dtype not in _INTEGERS:
            raise ValueError(f"{name} is {t.dtype}: use torch.int64")
        if tuple(t.shape) != wanted:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}: pass {list(wanted)}, for {counted(experts, 'expert')} of each "
                f"of {counted(world, 'rank')}, as all_to_all_matmul {'returns' if name == 'received' else 'takes'} "
                "it"
            )


def _check(call: _Call, world: int, rank: int) -> None:
    """Raise `ValueError` for wrong arguments. The values of `received` and `splits` are checked on CPU only: on a GPU,
    the CPU would wait for them.
    """
    _check_shapes(call, world)
    h, w, received, splits, rows, *_ = call
    of_ranks, leaving = received.tolist(), splits.tolist()  # Python integers, which cannot overflow
    arriving = [count for row in of_ranks for count in row]
    for name, numbers in (("received", arriving), ("splits", leaving)):
        if (least := min(numbers)) < 0:
            at = numbers.index(least)
            place = at if name == "splits" else "{}, {}".format(*divmod(at, received.shape[1]))
            raise ValueError(f"{name}[{place}]={least}: pass numbers of tokens, 0 or more")
    came, tokens = sum(arriving), sum(leaving)
    if came > h.shape[0]:
        raise ValueError(
            f"received adds up to {came} but h has {counted(h.shape[0], 'row')}: pass the counts from "
            "all_to_all_matmul(..., return_received=True)"
        )
    experts = w.shape[0]
    kept, mine = of_ranks[rank], leaving[rank * experts : (rank + 1) * experts]
    if kept != mine:
        raise ValueError(
            f"received says that rank {rank} keeps {kept} rows of its own, but splits says {mine}: pass received "
            "and splits of the same all_to_all_matmul call"
        )
    if rows is not None and rows != tokens:
        raise ValueError(f"rows={rows}, but splits add up to {tokens}: pass this rank's number of tokens")


OPERATOR = registered(_MatmulAllToAll())
