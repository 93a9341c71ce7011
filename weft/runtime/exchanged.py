"""Expert parallelism unfused: tokens sent to the ranks of their experts and multiplied there, or multiplied and sent back; and
gradients.

    counts    all_to_all_single of splits: received [ranks, local experts]; the host waits for them
    tokens    all_to_all_single with these sizes: they arrive by source rank, and from one source by expert
    order     index_select: by expert, and for one expert by source rank
    y         grouped GEMM: y_e = x_e @ w_e for the rows x_e of each expert e

Backward:

    grad w_e = x_e^T @ grad y_e            grad x_e = grad y_e @ w_e^T, put back into the order of arrival and sent back

Combine, which sends rows back to their tokens' ranks:

    y         grouped GEMM; put in the order of source ranks; all_to_all_single with the sizes exchanged

x is exchanged again while grad x is computed, and grad x is sent back while grad w is computed. Gradients of tokens belong to one
rank each. Gradients of weights belong to the rank that has the weights: they are sums over the rows of all ranks, not means.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from weft.runtime.collectives import all_to_all_single
from weft.runtime.in_turn import Turn, begun
from weft.schedule.kernels import LibraryGroupedMatmul, Permute

_SPLITS, _TOKENS = "exchange splits -> received", "exchange tokens -> unordered"  # names as in executors
_BACK = "exchange ordered -> y"
_ALIGNMENT = 16  # bytes: alignment of addresses and strides for torch's grouped GEMM


class OnHost(NamedTuple):
    """Numbers of rows: to each rank, from each rank, for each local expert."""

    sent: list[int]
    came: list[int]
    of_experts: list[int]


class Sizes:
    """The numbers of rows: splits [ranks * experts] and received [ranks, experts] on the device, and what the host needs
    of them."""

    def __init__(self, splits: torch.Tensor, received: torch.Tensor, numbers: _Numbers | None = None) -> None:
        self.splits, self.received = splits, received
        self.numbers = numbers or _Numbers()

    def fetch(self) -> None:
        """Enqueue the copy of the numbers to the host, behind the work enqueued so far. Further calls do nothing."""
        if self.numbers.copy is not None:
            return
        both, copied = torch.cat((self.splits, self.received.flatten())), None
        if both.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "the host reads sizes here, which a captured CUDA graph cannot: pass max_rows (all_to_all_matmul) or rows "
                    "(matmul_all_to_all), use another schedule than 'serial', and capture without gradients"
                )
            copied = torch.cuda.Event()
        self.numbers.copy = both.to("cpu", non_blocking=True)
        if copied is not None:
            copied.record()
            self.numbers.copied = copied

    @cached_property
    def host(self) -> OnHost:
        """The numbers on the host. Waits for `fetch`."""
        self.fetch()
        if self.numbers.copied is not None:
            self.numbers.copied.synchronize()
        assert self.numbers.copy is not None
        world, experts = self.received.shape
        both = self.numbers.copy.view(2, world, experts).numpy()
        return OnHost(both[0].sum(1).tolist(), both[1].sum(1).tolist(), both[1].sum(0).tolist())


@dataclass(slots=True)
class _Numbers:
    """Both tables on the host, once they have arrived there."""

    copy: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By the `received` that a dispatch returned: (its version, the splits and their version, the numbers)."""


def remember(sizes: Sizes) -> None:
    """Let the combine after a dispatch find what the host has learned of its tables."""
    splits, received = sizes.splits, sizes.received
    if not (splits.is_inference() or received.is_inference()):
        _known[received] = received._version, weakref.ref(splits), splits._version, sizes.numbers


def sizes_of(splits: torch.Tensor, received: torch.Tensor) -> Sizes:
    """Return the sizes of these tables, with the host's numbers of the dispatch that returned `received`.

    Without these numbers if either table has changed since, and in a captured call, which would keep the numbers forever.
    """
    version, of_splits, splits_version, numbers = _known.get(received, (0, lambda: None, 0, None))
    if (
        of_splits() is not splits
        or (received._version, splits._version) != (version, splits_version)
        or (received.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        numbers = None
    return Sizes(splits, received, numbers)


_totals: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By the splits that a dispatch got: (their version, how many tokens they sum to)."""


def remember_total(splits: torch.Tensor, tokens: int) -> None:
    """Let the combine after a dispatch of `tokens` tokens find their number without reading it from the device."""
    if not splits.is_inference():
        _totals[splits] = splits._version, tokens


def total_of(splits: torch.Tensor) -> int | None:
    """Return how many tokens these splits sum to, if a dispatch has told and they have not changed since; else None."""
    version, tokens = _totals.get(splits, (None, 0))
    return tokens if version is not None and version == splits._version else None


def exchange_counts(splits: torch.Tensor, group: dist.ProcessGroup, turn: Turn | None = None) -> torch.Tensor:
    """Return received [ranks, local experts] from splits [experts of all ranks], int64. turn: runs the collective; None: straight
    to torch."""
    world = group.size()
    if world == 1:
        return splits.view(1, -1).clone()
    received = torch.empty_like(splits).view(world, -1)
    if turn is None:
        all_to_all_single(received, splits.view(world, -1), group=group)
        return received
    turn.run(_SPLITS, all_to_all_single, received, splits.view(world, -1), group=group)
    return turn.done(_SPLITS, received, splits.nbytes // world * (world - 1))


def multiplied_by_library(
    tokens: torch.Tensor, w: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, max_rows: int | None,
    turn: Turn | None = None, *, return_x: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return y [rows that came, N], or [max_rows, N] with as many of these rows as fit, and with return_x the received tokens.

    The received tokens [rows that came, K] are in the order of arrival: by source rank, and from one source by expert.
    """
    came = tokens.shape[0] if group.size() == 1 else sum(sizes.host.came)
    rows = came if max_rows is None else max_rows
    x, arrived = _dispatched(tokens, sizes, group, rows, turn)
    if not return_x:
        del arrived  # a whole copy of the tokens, which nobody needs while they are multiplied
    y = grouped_matmul(x, w, sizes, cut=rows < came)
    return (y if turn is None else turn.done(LibraryGroupedMatmul.kind, y)), arrived if return_x else None


def returned_by_library(
    h: torch.Tensor, w: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, rows: int, turn: Turn | None = None
) -> torch.Tensor:
    """Return y [rows, N]: this rank's tokens, each multiplied on its expert's rank. h may have more rows than came."""
    if group.size() == 1:
        y = grouped_matmul(h[:rows], w, sizes)
        return y if turn is None else turn.done(LibraryGroupedMatmul.kind, y)
    came = sum(sizes.host.came)
    made = grouped_matmul(h[:came], w, sizes)
    if turn is not None:
        turn.done(LibraryGroupedMatmul.kind, made)
    if w.shape[0] > 1:
        made = torch.empty_like(made).index_copy_(0, _expert_order(sizes.received, came), made)
        if turn is not None:
            turn.done(Permute.kind, made)
    y = h.new_empty(rows, w.shape[2])
    _send(made, y, sizes.host.came, sizes.host.sent, group, turn, _BACK).wait()
    if turn is not None:
        turn.done(_BACK, y, (came - sizes.host.came[group.rank()]) * w.shape[2] * y.itemsize)
    return y


def begin_in_expert_order(
    rows: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, turn: Turn | None, name: str
) -> Callable[[], torch.Tensor]:
    """Send `rows`, which are in the tokens' order, to their experts' ranks. Return a function that waits and returns the rows by
    expert."""
    if group.size() == 1:
        return lambda: rows
    came, experts = sum(sizes.host.came), sizes.received.shape[1]
    arrived = rows.new_empty(came, rows.shape[1])
    arriving = _send(rows, arrived, sizes.host.sent, sizes.host.came, group, turn, name)
    order = None if experts == 1 else _expert_order(sizes.received, came)  # computed on the device during the exchange

    def end() -> torch.Tensor:
        arriving.wait()
        return arrived if order is None else arrived.index_select(0, order)

    return end


def in_expert_order(arrived: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return received rows by expert, and for one expert by source rank. arrived: the rows in the order of arrival."""
    if 1 in sizes.received.shape:
        return arrived
    return arrived.index_select(0, _expert_order(sizes.received, arrived.shape[0]))


def gradients(
    tokens: torch.Tensor,
    w: torch.Tensor,
    sizes: Sizes,
    group: dist.ProcessGroup,
    grad_y: torch.Tensor,
    wanted: Sequence[bool],
    turn: Turn | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of tokens and of w, each only if wanted. All ranks must want the same."""
    world, came = group.size(), sum(sizes.host.came)
    missing = came - grad_y.shape[0]  # rows that did not fit in y
    grad_y = grad_y[:came].contiguous() if missing <= 0 else torch.cat((grad_y, grad_y.new_zeros(missing, w.shape[2])))
    grad_tokens: torch.Tensor | None = None
    returning: Any = None
    arriving = begin_in_expert_order(tokens, sizes, group, turn, "exchange tokens again") if wanted[1] else None
    if wanted[0]:
        grad_x = grouped_matmul(grad_y, w.transpose(1, 2), sizes)
        if world > 1 and w.shape[0] > 1:
            grad_x = torch.empty_like(grad_x).index_copy_(0, _expert_order(sizes.received, came), grad_x)
        grad_tokens = grad_x
        if world > 1:
            grad_tokens = torch.empty_like(tokens)
            returning = _send(
                grad_x, grad_tokens, sizes.host.came, sizes.host.sent, group, turn, "exchange gradients of tokens"
            )
    grad_w = None
    if arriving is not None:
        grad_w = grad_of_weights(arriving(), grad_y, w, sizes)
    if returning is not None:
        returning.wait()
    return grad_tokens, grad_w


def _send(
    rows: torch.Tensor, out: torch.Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup, turn: Turn | None, name: str
) -> Any:  # fmt: skip
    """Begin the exchange. Return what to wait for before reading `out`."""
    return begun(turn, name, all_to_all_single, out, rows, came, sent, group=group)


def _dispatched(
    tokens: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, rows: int, turn: Turn | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange tokens. Return (x [rows, K], the received rows in the order of arrival).

    x begins with the rows for the local experts in the experts' order, as many as fit.
    """
    k = tokens.shape[1]
    if group.size() == 1:
        if rows <= tokens.shape[0]:
            return tokens[:rows], tokens
        padded = tokens.new_empty(rows, k)
        padded[: tokens.shape[0]] = tokens
        return padded, tokens
    came, experts = sum(sizes.host.came), sizes.received.shape[1]
    arrived = tokens.new_empty(came if experts > 1 else max(rows, came), k)
    exchange = _send(tokens, arrived[:came], sizes.host.sent, sizes.host.came, group, turn, _TOKENS)
    order = None
    if experts > 1:
        order = _expert_order(sizes.received, came)[:rows]  # computed on the device during the exchange
    exchange.wait()
    if turn is not None:
        kept = sizes.host.sent[group.rank()]
        turn.done(_TOKENS, arrived, (tokens.shape[0] - kept) * k * tokens.itemsize)
    if order is None:
        return arrived[:rows], arrived[:came]
    x = tokens.new_empty(rows, k)
    torch.index_select(arrived, 0, order, out=x[: len(order)])
    return (x if turn is None else turn.done(Permute.kind, x)), arrived


def _expert_order(received: torch.Tensor, came: int) -> torch.Tensor:
    """Return, for each row in the order of experts, its place in the order of arrival: [came]."""
    world, experts = received.shape
    by_source, by_expert = received.flatten(), received.t().flatten()
    begins_in_arrival = (by_source.cumsum(0) - by_source).view(world, experts).t().flatten()
    begins_in_order = by_expert.cumsum(0) - by_expert
    shift = torch.repeat_interleave(begins_in_arrival - begins_in_order, by_expert, output_size=came)
    return shift.add_(torch.arange(came, device=received.device))


def grouped_matmul(x: torch.Tensor, w: torch.Tensor, sizes: Sizes, *, cut: bool = False) -> torch.Tensor:
    """Return y [rows of x, N] = each expert's rows of x @ its w. Rows beyond are not written. cut: x lacks some of the rows."""
    if _has_grouped_gemm(x, w):
        return torch.nn.functional.grouped_mm(x, w, offs=_ends(sizes, x.shape[0] if cut else None))
    y = x.new_empty(x.shape[0], w.shape[2])
    for part, rows, result in zip(w, _parts(x, sizes), _parts(y, sizes), strict=True):
        if len(rows):
            torch.mm(rows, part, out=result)
    return y


def grad_of_weights(x: torch.Tensor, grad_y: torch.Tensor, w: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return the gradient of w, [experts, K, N], laid out as w, from rows in the order of experts."""
    if w.stride(1) == 1 and w.shape[1] > 1:
        return _grouped_outer(grad_y, x, sizes).transpose(1, 2)
    return _grouped_outer(x, grad_y, sizes)


def _grouped_outer(x: torch.Tensor, grad_y: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return [experts, K, N]: each expert's rows of x, transposed, @ its rows of grad_y."""
    if _has_grouped_gemm(x, grad_y):
        result = torch.nn.functional.grouped_mm(x.t(), grad_y, offs=_ends(sizes))
        # Hopper's kernel writes zeros for an expert without rows, Blackwell's what was in memory.
        for expert, count in enumerate(sizes.host.of_experts):
            if count == 0:
                result[expert].zero_()
        return result
    result = x.new_empty(sizes.received.shape[1], x.shape[1], grad_y.shape[1])
    for rows, grad, of_expert in zip(_parts(x, sizes), _parts(grad_y, sizes), result, strict=True):
        torch.mm(rows.t(), grad, out=of_expert)
    return result


def _parts(rows: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """Return the rows of each expert, as far as `rows` has them."""
    parts, first = [], 0
    for count in sizes.host.of_experts:
        parts.append(rows[first : first + count])
        first += count
    return parts


def _ends(sizes: Sizes, most: int | None = None) -> torch.Tensor:
    ends = sizes.received.sum(0).cumsum(0, dtype=torch.int32)
    return ends if most is None else ends.clamp_(max=most)


def _has_grouped_gemm(x: torch.Tensor, w: torch.Tensor) -> bool:
    """True if torch has one kernel for all experts, which reads their sizes on the device."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.numel() > 0 and _is_aligned(x) and _is_aligned(w)


def _is_aligned(t: torch.Tensor) -> bool:
    """True if rows or columns are contiguous and begin at multiples of 16 bytes."""
    (rows, cols), (row, col) = t.shape[-2:], t.stride()[-2:]
    if not ((col == 1 and row >= cols) or (row == 1 and col >= rows)):
        return False
    begins = [t.data_ptr(), *(stride * t.element_size() for stride in (*t.stride()[:-2], col if row == 1 else row))]
    return all(begin % _ALIGNMENT == 0 for begin in begins)
