"""Expert parallelism without overlap: MoE dispatch with GEMMs, and GEMMs with MoE combine.

    counts    all_to_all_single of `splits` gives `received`, [ranks, local experts]. The CPU waits for these counts
    tokens    all_to_all_single with these sizes. Tokens arrive ordered by source rank, and then by expert
    order     index_select, which reorders the tokens by expert, and then by source rank
    y         grouped GEMM: y_e = x_e @ w_e for the rows x_e of each expert e

Combine, which sends rows back to the ranks of their tokens:

    y         grouped GEMM; index_select to the order of source ranks; all_to_all_single with the sizes swapped

CPU ranks on several hosts may send the rows for other hosts first (`weft.runtime.unfused.experts_far_first`). If the rows are
few, such ranks may send them with the messages of the rendezvous (`weft.runtime.unfused.experts_in_rails`). On one host, rows
travel with the rendezvous through shared memory (`weft.runtime.unfused.experts_on_one_host`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft import _core
from weft.runtime.collectives import all_to_all_single
from weft.runtime.meeting import meeting_of
from weft.runtime.rails import MOST_ROWS_BYTES, TABLE_BYTES, Cargo, gather
from weft.runtime.unfused.begun import Begun, begun_number
from weft.runtime.unfused.cells import run
from weft.runtime.unfused.experts_far_first import FarFirst, far_first_made, far_first_on
from weft.runtime.unfused.experts_in_rails import CombineInRails, dispatch_in_rails
from weft.runtime.unfused.experts_on_one_host import Combined, dispatch, has_room
from weft.runtime.unfused.far_first import ending_the_group
from weft.runtime.unfused.grouped_matmul import grouped_matmul, multiply
from weft.runtime.unfused.permutation import expert_order, in_expert_order, in_order_of_arrival, orders_of, reorder
from weft.runtime.unfused.sizes import Sizes
from weft.runtime.unfused.turn import STRAIGHT, Turn
from weft.schedule.kernels import LibraryGroupedMatmul, Permute

_SPLITS, _TOKENS = (
    "exchange splits -> received",
    "exchange tokens -> unordered",
)  # names of steps, as in the executors' timelines
_BACK = "exchange ordered -> y"
_FEW_BYTES = 1 << 20  # of a rank: they are sent in so little time that fewer messages gain more than overlap does


def exchange_counts(splits: torch.Tensor, group: dist.ProcessGroup, turn: Turn = STRAIGHT) -> torch.Tensor:
    """Exchange the numbers of tokens. Return the number of tokens from each rank for each expert of this rank, int64
    [ranks, local experts].

    splits: the number of this rank's tokens for each expert, [experts of all ranks].
    """
    world = group.size()
    if world == 1:
        return splits.view(1, -1).clone()
    if (rails := turn.rails_for(world * splits.nbytes)) is not None:  # instead of a rendezvous and an exchange
        tables = splits.new_empty(world, splits.numel())
        turn.ride(_SPLITS, gather(rails, splits.view(1, -1).contiguous(), tables, turn.wait_s, _SPLITS))
        received = tables.view(world, world, -1)[:, group.rank()].contiguous()
    else:
        received = torch.empty_like(splits).view(world, -1)
        turn.run(_SPLITS, all_to_all_single, received, splits.view(world, -1), group=group)
    return turn.done(_SPLITS, received, splits.nbytes // world * (world - 1))


def dispatched(
    tokens: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, group: dist.ProcessGroup, max_rows: int | None, turn: Turn,
    *, return_x: bool = False,
) -> tuple[torch.Tensor, Sizes, torch.Tensor | None]:  # fmt: skip
    """Exchange the numbers of tokens, and run `all_to_all_matmul`. Return the products, the sizes of the exchange, and with
    `return_x` the received tokens, else None.

    Ranks on several hosts choose an implementation by the largest number of tokens that any rank has in this call.

    splits: the number of this rank's tokens for each expert of all ranks.
    """
    comm = turn.comm_between_hosts
    if comm is None:
        if group.size() > 1 and has_room(turn, splits):
            return dispatch(tokens, w, splits, max_rows, turn, (_SPLITS, _TOKENS), return_x, group.rank())
        sizes = Sizes(splits, exchange_counts(splits, group, turn))
        y, x = all_to_all_matmul(tokens, w, sizes, group, max_rows, turn, return_x=return_x)
        return y, sizes, x
    begin_s, results = time.perf_counter(), None
    key, row_bytes = ("dispatch", w.shape, w.dtype), w.shape[1] * tokens.itemsize
    if turn.rails is None or splits.nbytes > TABLE_BYTES:
        nbytes, are_few = row_bytes * turn.largest(_SPLITS, len(tokens)), False
        received = exchange_counts(splits, group, turn.met)
    else:
        made = far_first_made(comm)
        most_bytes = MOST_ROWS_BYTES if made is None else made.riding_bytes(key, row_bytes, _FEW_BYTES)
        results, received, nbytes = dispatch_in_rails(tokens, w, splits, max_rows, turn, _TOKENS, return_x, most_bytes)
        are_few = _are_few(nbytes, splits)
    far, sizes = far_first_on(comm), Sizes(splits, received)
    is_far, ended = far.untimed if are_few else far.way(key, nbytes // row_bytes, row_bytes, turn, begin_s)
    if results is None:
        with ending_the_group(comm, _TOKENS):
            if is_far:
                results = far.dispatch(tokens, w, sizes, max_rows, turn, _TOKENS, return_x)
            else:
                results = all_to_all_matmul(tokens, w, sizes, group, max_rows, turn.met, return_x=return_x)
    ended(nbytes // row_bytes)
    return results[0], sizes, results[1]


def all_to_all_matmul(
    tokens: torch.Tensor, w: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, max_rows: int | None,
    turn: Turn = STRAIGHT, *, return_x: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Send tokens to the ranks of their experts, and multiply them there by the experts' weights. Return two values:

    - The products, [received rows, N], sorted by expert. With `max_rows`, [max_rows, N], without the rows that do not fit.
    - With `return_x`, the received tokens, [received rows, K], ordered by source rank, and then by expert; else None.

    w: the weights of this rank's experts, [experts, K, N].
    """
    came = tokens.shape[0] if group.size() == 1 else sum(sizes.host.came)
    rows = came if max_rows is None else max_rows
    x, arrived = _dispatched(tokens, sizes, group, rows, turn)
    if not return_x:
        del arrived  # free this copy of the tokens, which the GEMMs do not need
    y = grouped_matmul(x, w, sizes, cut=rows < came)
    return turn.done(LibraryGroupedMatmul.kind, y), arrived if return_x else None


def matmul_all_to_all(
    h: torch.Tensor, w: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, rows: int, turn: Turn = STRAIGHT, *,
    most: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Multiply the rows of this rank's experts, and send each row back to the rank of its token. Return y [rows, N], the
    results for this rank's tokens.

    h: the rows of this rank's experts, sorted by expert. Further rows of h are ignored.
    most: the largest number of rows of a rank in typical calls, by which ranks on several hosts choose between two
        implementations. `most` is used only if the ranks have synchronised in this call. Otherwise they exchange their
        numbers of rows, and use the largest.
    """
    if group.size() == 1:
        return turn.done(LibraryGroupedMatmul.kind, grouped_matmul(h[:rows], w, sizes))
    if (comm := turn.comm_between_hosts) is None:
        if has_room(turn, sizes.splits):
            return Combined(h, w, sizes, rows, turn, _BACK, group.rank()).run()
        made = grouped_matmul(h[: sum(sizes.host.came)], w, sizes)
        made = _by_source(turn.done(LibraryGroupedMatmul.kind, made), w, sizes, turn)
        return _send_back(made, sizes, group, rows, turn)
    size = most if turn.has_met else turn.largest(_BACK, sum(sizes.host.came))
    call = _Call(h, w, sizes, group, rows, turn.met)
    with ending_the_group(comm, _BACK):
        return _begun(far_first_on(comm), call, size).end(None)[0]


def begin_matmul_all_to_all(
    h: torch.Tensor, w: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, rows: int, turn: Turn, most: int
) -> Begun | None:  # fmt: skip
    """Return a call of `matmul_all_to_all`, with the same arguments, that this rank may begin before the rendezvous of CPU
    ranks has ended. Return None before the first call on several hosts.

    Before the rendezvous, ranks do not know each other's numbers of rows. So they choose an implementation by the numbers of
    earlier calls.
    """
    if group.size() == 1:
        return None
    if (comm := turn.comm_between_hosts) is None:
        return Combined(h, w, sizes, rows, turn, _BACK, group.rank()) if has_room(turn, sizes.splits) else None
    if (far := far_first_made(comm)) is None:
        return None
    call = _Call(h, w, sizes, group, rows, turn)
    return _begun(far, call, far.expected(call.key, most))


class _Call(NamedTuple):
    """The arguments of a call of `matmul_all_to_all` between hosts."""

    h: torch.Tensor
    w: torch.Tensor
    sizes: Sizes
    group: dist.ProcessGroup
    rows: int
    turn: Turn

    @property
    def key(self) -> Hashable:
        return "combine", self.w.shape, self.w.dtype

    @property
    def row_bytes(self) -> int:
        return self.w.shape[2] * self.h.itemsize


def _begun(far: FarFirst, call: _Call, most: int) -> Begun:
    """Return a call of `matmul_all_to_all` between hosts that this rank has not begun yet.

    most: the number of rows that the busiest rank is expected to send, equal on all ranks.
    """
    key, turn, rails = call.key, call.turn, meeting_of(far.comm).rails
    nbytes, riding = most * call.row_bytes, None
    if rails is not None and nbytes <= MOST_ROWS_BYTES and call.sizes.splits.nbytes <= TABLE_BYTES:
        riding = CombineInRails(rails, call.h, call.w, call.sizes, call.rows, turn, _BACK)
        if _are_few(nbytes, call.sizes.splits):
            return _Combined(far, call, most, far.untimed[1], riding)
    # Calls whose results can travel with the rendezvous are always timed.
    early = far.early(key, most) if riding is None else None
    is_far, ended = far.way(key, most, call.row_bytes, turn, time.perf_counter(), early)
    if is_far:
        return far.combine(call.h, call.w, call.sizes, call.rows, turn, ended, _BACK, key, most)
    return _Combined(far, call, most, ended, riding)


def _are_few(nbytes: int, splits: torch.Tensor) -> bool:
    """True if the rows of a call are so few that ranks send them with the messages of the rendezvous, without a measurement
    of other implementations. Equal on all ranks.

    nbytes: the bytes of the rows of the rank with the most rows.
    """
    return nbytes <= _FEW_BYTES and splits.nbytes <= TABLE_BYTES


class _Combined:
    """A call of `matmul_all_to_all` that multiplies all rows, and then exchanges the results.

    most: the number of rows that the busiest rank was expected to send.
    riding: an implementation of the same call that sends the results with the messages of the rendezvous, if they are small
        enough. None: the results are always exchanged after the rendezvous.
    """

    def __init__(
        self, far: FarFirst, call: _Call, most: int, ended: Callable[[int], None], riding: CombineInRails | None
    ) -> None:
        self._far, self._call, self._most, self._ended, self._riding = far, call, most, ended, riding
        self._made: torch.Tensor | None = None
        self.cargo: Cargo | None = None if riding is None else riding.cargo
        self.collective: _core.SharedCollective | None = None
        self.number = begun_number(sum(call.sizes.host.came) if riding is None else riding.sends)

    def alone(self) -> Iterator[None]:
        if self._riding is not None:
            return
        yield from self._multiply()

    def _multiply(self) -> Iterator[None]:
        h, w, sizes, _, _, turn = self._call
        came = sum(sizes.host.came)
        made = h.new_empty(came, w.shape[2])
        yield from multiply(h[:came], w, sizes.host.of_experts, made)
        self._made = _by_source(turn.done(LibraryGroupedMatmul.kind, made), w, sizes, turn)

    def end(self, numbers: list[int] | None) -> list[torch.Tensor]:
        call, most, y = self._call, self._most, None
        if numbers is not None:
            most, _ = self._far.found(call.key, numbers)
            if self._riding is not None:
                y = self._riding.end(most * call.row_bytes)
                if (
                    y is None and most.bit_length() != self._most.bit_length()
                ):  # choose again, by the true number of rows
                    with ending_the_group(self._far.comm, _BACK):
                        return _begun(self._far, call._replace(turn=call.turn.met), most).end(None)
        if y is None:
            if self._made is None:
                run(self._multiply())
            assert self._made is not None
            y = _send_back(self._made, call.sizes, call.group, call.rows, call.turn)
        self._ended(most)
        return [y]


def _by_source(made: torch.Tensor, w: torch.Tensor, sizes: Sizes, turn: Turn) -> torch.Tensor:
    """Reorder the rows `made`: from the order of experts to the order of the ranks that sent the tokens. Return the reordered
    rows.
    """
    if w.shape[0] == 1:
        return made
    return turn.done(Permute.kind, in_order_of_arrival(made, sizes))


def _send_back(
    made: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, rows: int, turn: Turn
) -> torch.Tensor:  # fmt: skip
    """Send the rows `made`, sorted by the ranks that sent the tokens, back to these ranks. Return y [rows, N], the results for
    this rank's tokens.
    """
    y, (sent, came, _) = made.new_empty(rows, made.shape[1]), sizes.host
    turn.run(_BACK, all_to_all_single, y, made, sent, came, group=group)
    return turn.done(_BACK, y, (len(made) - came[group.rank()]) * made.shape[1] * y.itemsize)


def begin_in_expert_order(
    rows: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, turn: Turn, name: str
) -> Callable[[], torch.Tensor]:
    """Begin to send `rows`, in the order of this rank's tokens, to the ranks of their experts. Return a function that waits
    for the rows from all ranks, and returns them sorted by expert.
    """
    if group.size() == 1:
        return lambda: rows
    arrived = rows.new_empty(sum(sizes.host.came), rows.shape[1])
    arriving = send(rows, arrived, sizes.host.sent, sizes.host.came, group, turn, name)
    if sizes.received.shape[1] > 1 and rows.is_cuda:
        orders_of(sizes)  # computed on the device during the exchange

    def end() -> torch.Tensor:
        arriving.wait()
        return in_expert_order(arrived, sizes)

    return end


def send(
    rows: torch.Tensor, out: torch.Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup, turn: Turn, name: str
) -> Any:  # fmt: skip
    """Begin an all-to-all of `rows` into `out`. Return the work handle to wait for before reading `out`.

    sent, came: the numbers of rows to and from each rank.
    """
    return turn.begin(name, all_to_all_single, out, rows, came, sent, group=group)


def _dispatched(
    tokens: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, rows: int, turn: Turn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send tokens to the ranks of their experts. Return x [rows, K], and the received tokens in the order of arrival.

    x begins with the received tokens, sorted by expert. If they are more than `rows`, the last tokens are missing.
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
    exchange = send(tokens, arrived[:came], sizes.host.sent, sizes.host.came, group, turn, _TOKENS)
    order, in_order = None, experts == 1
    if not in_order and (tokens.is_cuda or rows < came):
        # computed on the device during the exchange
        order = (orders_of(sizes).by_expert if tokens.is_cuda else expert_order(sizes.received, came))[:rows]
    exchange.wait()
    kept = sizes.host.sent[group.rank()]
    turn.done(_TOKENS, arrived, (tokens.shape[0] - kept) * k * tokens.itemsize)
    if in_order:
        return arrived[:rows], arrived[:came]
    x = tokens.new_empty(rows, k)
    if order is None:
        reorder(arrived, sizes.received, x, to_ranks=False)
    else:
        torch.index_select(arrived, 0, order, out=x[: len(order)])
    return turn.done(Permute.kind, x), arrived
