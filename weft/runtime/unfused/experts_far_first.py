"""Expert parallelism on CPU ranks of several hosts, in which rows for other hosts are sent first.

    dispatch   Tokens for other hosts are sent in pieces; a piece has the tokens for some experts. Meanwhile, tokens for this
               host are exchanged through shared memory and multiplied. Each piece is multiplied while the next piece is
               being sent
    combine    Rows for other hosts are multiplied first, and sent in pieces. Meanwhile, rows for this host are multiplied and
               exchanged through shared memory. Ranks multiply and send during the rendezvous

GEMMs are split by rows, so results may differ by rounding from the results of a single GEMM per expert.

Source: "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.2 (remote slices first).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch

from weft import _core
from weft.errors import DeadlineError, OutOfSharedMemoryError
from weft.runtime.links import network_of
from weft.runtime.meeting import meeting_of
from weft.runtime.per_communicator import of_communicator
from weft.runtime.rails import MOST_ROWS_BYTES, Cargo
from weft.runtime.two_ways import TwoWays
from weft.runtime.unfused.begun import NEAR_BYTES, Early, begun_number, read_numbers
from weft.runtime.unfused.cells import Cells, by_expert, by_rank, multiply, put, run, runs, take
from weft.runtime.unfused.far_first import PIECES, begin_piece, ranks_far, ranks_near
from weft.runtime.unfused.sizes import Sizes
from weft.runtime.unfused.turn import Pending, Turn
from weft.runtime.within_host import WithinHost
from weft.schedule.kernels import LibraryGroupedMatmul
from weft.symm import Communicator

_NEAR = "rows for ranks of this host"
_LONG_US = 8000.0  # if all rows go to other hosts. Far first needs more messages, which cost more in shorter calls


class FarFirst:
    """Dispatch and combine of experts' rows between CPU ranks of several hosts, with the rows for other hosts sent first. All
    ranks must construct this object.

    comm: a communicator of CPU ranks on several hosts.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.far, self.near = np.array(ranks_far(comm), np.int64), np.array(ranks_near(comm), np.int64)
        self._ways: dict[Hashable, TwoWays] = {}
        self._early: Early | None = None
        self._has_rails = meeting_of(comm).rails is not None
        self._never_early: dict[Hashable, int] = {}  # numbers of rows with too large messages, by kind of call
        self._rows: dict[Hashable, list[int]] = {}  # the largest numbers of rows of the last calls, by kind of call
        self._memory: WithinHost | None = WithinHost(comm)
        if len(self.near) > 1 or len(set(comm.hosts)) < comm.world_size:  # the same on all ranks
            try:
                self._memory.reserve(NEAR_BYTES)
            except OutOfSharedMemoryError:  # on every rank
                self._memory = None
        comm._holders.add(self)

    def close(self) -> None:
        """Release the memory. The communicator calls this method when it closes."""
        _known.pop(self.comm, None)

    def way(
        self, key: Hashable, rows: int, row_bytes: int, turn: Turn, begin_s: float, early: Early | None = None
    ) -> tuple[bool, Callable[[int], None]]:
        """Choose whether this call sends rows for other hosts first. Return two values: the choice, and a function that
        the caller must call when its call ends. The argument of the function is the largest number of rows of any rank.
        The function records the time of the call if this number of rows and `rows` share one choice. All ranks must
        make the same calls of this method.

        The recorded times of earlier calls decide (`weft.runtime.two_ways`). A call with `early` whose rows take
        long to send is not timed: it always sends the rows for other hosts first.

        key: the kind of call: dispatch or combine, with the shape and dtype of the weights. Each kind is measured
            separately.
        rows: the largest number of rows of any rank, or a guess, equal on all ranks. row_bytes: the size of a row in bytes.
        begin_s: the time at which the call began on this rank, as a time of `time.perf_counter()`.
        early: the exchanges with which this call may begin before its rendezvous has ended. None if the call begins
            after the rendezvous.
        """
        if self._memory is None:
            return self.untimed
        ways, is_faster = self._ways.setdefault(key, TwoWays(self.comm)), early is not None
        if (network := network_of(self.comm)) is not None:
            far_us = network.exchange_us(network.per_host * rows * row_bytes)  # if all rows go to other hosts
            ways.rule_out(rows, (far_us - PIECES * network.round_trip_us / 2) / 1e6)
            is_faster &= far_us >= _LONG_US

        def ended(found: int) -> None:
            if not is_faster and found.bit_length() == rows.bit_length():
                ways.took(rows, time.perf_counter() - begin_s, turn.wait_s)

        return ways.takes_other(rows, is_faster), ended

    untimed: ClassVar[tuple[bool, Callable[[int], None]]] = (False, lambda rows: None)
    """The result of `way` for a call that never sends rows for other hosts first."""

    def riding_bytes(self, key: Hashable, row_bytes: int, few_bytes: int) -> int:
        """Return a limit for the next call of this kind. If no rank has more bytes of rows than the limit, ranks send
        the rows with the messages of the rendezvous. Slightly larger calls send the rows for other hosts first, because
        this is faster or must be timed. The limit is equal on all ranks.

        key: the kind of call (see `way`). row_bytes: the size of a row in bytes.
        few_bytes: the least limit. Calls with at most this number of bytes never send the rows for other hosts first.
        """
        if self._memory is not None and (ways := self._ways.get(key)) is not None:
            first, last = (nbytes // row_bytes for nbytes in (few_bytes, MOST_ROWS_BYTES))
            for bits in range((first + 1).bit_length(), last.bit_length() + 1):
                least = 1 << bits >> 1
                if ways.takes_other(least):
                    return max(few_bytes, (least - 1) * row_bytes)
        return MOST_ROWS_BYTES

    def expected(self, key: Hashable, most: int) -> int:
        """Return the number of rows that the busiest rank is expected to send in the next call of this kind. It is the smaller
        number of the last two calls, or `most` before the first call. Equal on all ranks.

        The smaller number is better if calls with many and few rows alternate: too small a guess costs only a part of the
        overlap.
        """
        return min(self._rows.get(key, [most]))

    def found(self, key: Hashable, numbers: list[int]) -> tuple[int, bool]:
        """Return the results of `read_numbers`, and remember the number of rows for later calls of this kind."""
        rows, too_large = read_numbers(numbers)
        self._rows[key] = [*self._rows.get(key, ())[-1:], rows]
        return rows, too_large

    def dispatch(
        self,
        tokens: torch.Tensor,
        w: torch.Tensor,
        sizes: Sizes,
        max_rows: int | None,
        turn: Turn,
        name: str,
        return_x: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `experts.all_to_all_matmul`, with the same arguments and results, but send the tokens for other hosts first.

        name: the name of the exchange between hosts, for error texts.
        """
        sent, came = sizes.tables
        sent_at, came_at, y_at, total = by_rank(sent), by_rank(came), by_expert(came), int(came.sum())
        rows = total if max_rows is None else max_rows
        y = tokens.new_empty(max(rows, total), w.shape[2])
        arrived = tokens.new_empty(total, tokens.shape[1]) if return_x else None
        begun = []
        for part in _pieces(w.shape[0]):
            far = np.ix_(self.far, part)
            leaving = take(tokens, runs(sent_at[far], sent[far]))
            received = tokens.new_empty(int(came[far].sum()), tokens.shape[1])
            from_to = self.of_far(came, part), self.of_far(sent, part)
            begun.append((part, received, begin_piece(self.comm, turn, name, received, leaving, *from_to)))
        os.sched_yield()  # let ranks that share this core send too, before this rank computes
        near, every = self.near, np.arange(w.shape[0])
        here = tokens.new_empty(int(came[near].sum()), tokens.shape[1])
        outgoing = [tokens[at : at + n] for at, n in zip(sent_at[near, 0], sent[near].sum(1), strict=True)]
        self.exchange(outgoing, list(here.split(came[near].sum(1).tolist())), turn)
        turn.done("exchange tokens within this host", here)
        arriving: list[tuple[Cells, torch.Tensor, Pending | None]] = [(every, here, None), *begun]
        for part, x, work in arriving:
            if work is not None:
                work.wait()
                turn.done(name, x, x.nbytes)
            cells = np.ix_(near if work is None else self.far, part)
            counts, weights = came[cells], w[part[0] : part[-1] + 1]
            run(multiply(x, by_rank(counts), counts, weights, y, y_at[cells]))
            turn.done(LibraryGroupedMatmul.kind, y)
            if arrived is not None:
                put(arrived, x, runs(came_at[cells], came[cells]))
        return y[:rows], arrived

    def combine(
        self, h: torch.Tensor, w: torch.Tensor, sizes: Sizes, rows: int, turn: Turn, ended: Callable[[int], None], name: str,
        key: Hashable, most: int,
    ) -> Combine:  # fmt: skip
        """Return a call of `experts.matmul_all_to_all` that sends the rows for other hosts first. The arguments are the same.
        This rank has not begun the call yet.

        ended: a function that the call runs at its end. name: the name of the exchange between hosts, for error texts.
        key, most: the kind of the call, and the number of rows that the busiest rank is expected to send. If messages turn out
            to be too large for `early`, similar calls do not use it again.
        """
        return Combine(self, h, w, sizes, rows, turn, ended, name, key, most)

    def early(self, key: Hashable, most: int) -> Early | None:
        """Return the object by which a call may exchange rows before its rendezvous has ended. Return None if the
        object does not exist yet, or if a call of this kind with fewer rows had a message that was too large for the
        object. The choice is equal on all ranks.

        key, most: the kind of the call, and the number of rows that the busiest rank is expected to send.
        """
        is_unusable = self._early is None or self._early.is_stale or self._is_too_large(key, most)
        return None if is_unusable else self._early

    def make_early(self, key: Hashable, most: int) -> None:
        """Construct the object that `early` returns, unless messages are too large for it. All ranks must make this call.

        key, most: the kind of the call, and the number of rows that the busiest rank is expected to send.
        """
        if self._has_rails and not self._is_too_large(key, most) and self.early(key, most) is None:
            try:
                self._early = Early(self.comm, PIECES)
            except (OutOfSharedMemoryError, DeadlineError):  # on every rank
                self._early, self._has_rails = None, False

    def never_early(self, key: Hashable, most: int) -> None:
        """Make `early` return None from now on for calls with at least half of `most` rows, because messages were too large.

        key, most: the kind of the call, and the number of rows that the busiest rank was expected to send.
        """
        self._never_early[key] = min(self._never_early.get(key, most), most // 2)

    def _is_too_large(self, key: Hashable, most: int) -> bool:
        return key in self._never_early and most >= self._never_early[key]

    def of_far(self, table: Cells, part: Cells) -> list[int]:
        """Return, for each rank on another host, its number of rows for the experts in `part`, which are sent in one message.
        Return 0 for ranks of this host, to which no message is sent.

        table: the number of rows of each rank for each expert, [ranks, experts].
        """
        rows = np.zeros(len(table), dtype=np.int64)
        rows[self.far] = table[np.ix_(self.far, part)].sum(1)
        return rows.tolist()  # type: ignore[no-any-return]

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], turn: Turn) -> None:
        assert self._memory is not None
        if len(self.near) == 1:
            received[0].copy_(sent[0])
        else:
            self._memory.exchange(sent, received, deadline_s=turn.wait_s, what=_NEAR)


class Combine:
    """A call of `matmul_all_to_all` that this rank may begin before the rendezvous has ended: a
    `weft.runtime.unfused.begun.Begun`.

    Each message to a rank of another host begins with an unused row, so that no message is empty.
    """

    cargo: Cargo | None = None
    collective: _core.SharedCollective | None = None

    def __init__(
        self, far: FarFirst, h: torch.Tensor, w: torch.Tensor, sizes: Sizes, rows: int, turn: Turn,
        ended: Callable[[int], None], name: str, key: Hashable, most: int,
    ) -> None:  # fmt: skip
        self._far, self._h, self._w, self._rows, self._turn, self._ended = far, h, w, rows, turn, ended
        self._name, self._key, self._most, self._parts = name, key, most, _pieces(w.shape[0])
        self._sent, self._came = sizes.tables
        self._made: list[torch.Tensor] = []  # the messages
        self._near: torch.Tensor | None = None  # the rows for ranks of this host
        self._works: list[Pending] = []
        self._end_near: Callable[[Sequence[torch.Tensor]], None] | None = None
        self._early, self._is_too_large = far.early(key, most), False
        if self._early is not None:
            longest = max(1 + self._came[np.ix_(far.far, part)].sum(1).max() for part in self._parts)
            self._is_too_large = bool(longest * w.shape[2] * h.itemsize > self._early.capacity_bytes)
        self.number = begun_number(int(self._came.sum()), self._is_too_large)

    def alone(self) -> Iterator[None]:
        if self._early is None:
            return
        for exchange, part in enumerate(self._parts):
            yield from self._multiply(part)
            made, sizes = self._made[-1], self._messages(self._came, part)
            if self._is_too_large:  # all ranks exchange again
                made, sizes = made[: len(self._far.far)], [min(1, rows) for rows in sizes]
            self._works.append(self._early.begin(exchange, made, sizes, self._turn.wait_s, self._name))
            os.sched_yield()  # let ranks that share this core send too, before this rank computes more
        yield from self._multiply(None)
        if len(self._far.near) > 1:
            self._end_near = self._early.near.begin_exchange(self._to_near(), deadline_s=self._turn.wait_s, what=_NEAR)

    def end(self, numbers: list[int] | None) -> list[torch.Tensor]:
        """Return a list with one tensor, the result [rows, N].

        numbers: `Begun.number` of each rank. If a message was too large, all ranks repeat the exchange. None if the rendezvous
            exchanged no numbers.
        """
        far, n = self._far, self._w.shape[2]
        y = self._h.new_empty(self._rows, n)
        arriving: list[tuple[Pending, Sequence[torch.Tensor]]] = []
        for exchange, work in enumerate(self._works):
            assert self._early is not None
            arriving.append((work, self._early.received(exchange, y)))
        rows, too_large = (self._most, False) if numbers is None else far.found(self._key, numbers)
        if too_large:
            far.never_early(self._key, self._most)
            for work, _ in arriving:
                work.wait()
            arriving = []
        if not arriving:
            far.make_early(self._key, self._most)
            arriving = [self._exchange(exchange, y) for exchange in range(len(self._parts))]
        if self._near is None:
            run(self._multiply(None))
        near, sent_at = far.near, by_rank(self._sent)
        incoming = [y[at : at + rows] for at, rows in zip(sent_at[near, 0], self._sent[near].sum(1), strict=True)]
        if self._end_near is None:
            far.exchange(self._to_near(), incoming, self._turn)
        else:
            self._end_near(incoming)
        self._turn.done("exchange rows within this host", y)
        for part, (work, messages) in zip(self._parts, arriving, strict=True):
            work.wait()
            for rank, message in zip(far.far, messages, strict=True):
                counts = self._sent[rank, part]
                put(y, message[1 : 1 + counts.sum()], runs(sent_at[rank, part], counts))
            self._turn.done(self._name, y, int(self._sent[np.ix_(far.far, part)].sum()) * n * y.itemsize)
        self._ended(rows)
        return [y]

    def _to_near(self) -> list[torch.Tensor]:
        """Return the rows to send back to each rank of this host, a tensor for each rank."""
        assert self._near is not None
        return list(self._near.split(self._came[self._far.near].sum(1).tolist()))

    def _exchange(self, exchange: int, y: torch.Tensor) -> tuple[Pending, Sequence[torch.Tensor]]:
        """Begin to exchange piece number `exchange` of the products `y` with other hosts, after the rendezvous. Return the work
        handle, and the receive buffers of the ranks on other hosts.
        """
        far, part = self._far, self._parts[exchange]
        if exchange == len(self._made):
            run(self._multiply(part))
        came, leaving = self._messages(self._sent, part), self._messages(self._came, part)
        received = y.new_empty(sum(came), y.shape[1])
        work = begin_piece(far.comm, self._turn, self._name, received, self._made[exchange], came, leaving)
        return work, received.split([came[rank] for rank in far.far])

    def _messages(self, table: Cells, part: Cells) -> list[int]:
        """Return the number of rows of each rank's message for the experts `part`: 0 for ranks of this host. The unused first
        row of a message counts too.

        table: the number of rows to send to, or to receive from, each rank for each expert.
        """
        rows = self._far.of_far(table, part)
        for rank in self._far.far:
            rows[rank] += 1
        return rows

    def _multiply(self, part: Cells | None) -> Iterator[None]:
        """Multiply rows by the experts' weights, and yield after each expert. With `part`, multiply the rows of the experts
        `part` that go to other hosts, and append the messages to `_made`. With None, multiply the rows of all experts that go
        to ranks of this host.
        """
        far, n = self._far, self._w.shape[2]
        experts = np.arange(self._w.shape[0]) if part is None else part
        cells = np.ix_(far.near if part is None else far.far, experts)
        counts = self._came[cells]
        at, rows = by_rank(counts), int(counts.sum())
        if part is not None:
            at, rows = at + np.arange(1, 1 + len(far.far))[:, None], rows + len(far.far)
        made = self._h.new_empty(rows, n)
        if part is not None:
            for start in at[:, 0].tolist():
                made[start - 1] = 0
        h_at = by_expert(self._came)[cells]
        yield from multiply(self._h, h_at, counts, self._w[experts[0] : experts[-1] + 1], made, at)
        self._turn.done(LibraryGroupedMatmul.kind, made)
        if part is None:
            self._near = made
        else:
            self._made.append(made)


_known: dict[Communicator, FarFirst] = {}


def far_first_on(comm: Communicator) -> FarFirst:
    """Return the object that dispatches and combines with the rows for other hosts first (`FarFirst`), on `comm`. All ranks
    must make the first call together.
    """
    return of_communicator(_known, comm, FarFirst)


def far_first_made(comm: Communicator) -> FarFirst | None:
    """Return the `FarFirst` of `comm`. Return None if the ranks have not constructed it yet."""
    return _known.get(comm)


def _pieces(experts: int) -> list[Cells]:
    """Split the indices of `experts` local experts into up to `PIECES` pieces. Return the indices in each piece."""
    return [part for part in np.array_split(np.arange(experts), PIECES) if len(part)]
