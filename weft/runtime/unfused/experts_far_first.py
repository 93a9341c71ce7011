"""Expert parallelism on CPU ranks of several hosts, in which rows for other hosts are sent first.

    dispatch   Tokens for other hosts are sent in pieces by expert. Meanwhile, tokens for this host are exchanged through
               shared memory and multiplied. Each piece is multiplied while the next piece is being sent
    combine    Rows for other hosts are multiplied first, and sent in pieces by expert. Meanwhile, rows for this host are
               multiplied and exchanged through shared memory

A cell consists of the rows that one rank dispatches to one expert. Rows are sent ordered by rank, then by expert. They are
multiplied ordered by expert, then by rank. GEMMs are split by rows, so results may differ from those of whole GEMMs by
rounding.

Source: "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.2 (remote slices first).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from weft.errors import OutOfSharedMemoryError
from weft.runtime.links import network_of
from weft.runtime.per_communicator import of_communicator
from weft.runtime.two_ways import TwoWays
from weft.runtime.unfused.far_first import PIECES, begin_piece, ending_the_group, ranks_far, ranks_near
from weft.runtime.unfused.sizes import Sizes
from weft.runtime.unfused.turn import Pending, Turn
from weft.runtime.within_host import WithinHost
from weft.schedule.kernels import LibraryGroupedMatmul
from weft.symm import Communicator

_ROOM_BYTES = 16 << 20  # on each rank, for rows of its host
_NEAR = "rows for ranks of this host"

Cells: TypeAlias = np.ndarray[Any, Any]
T = TypeVar("T")


class FarFirst:
    """Expert-parallel calls on `comm`, whose ranks are on several hosts. All ranks must construct it."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._far, self._near = np.array(ranks_far(comm), np.int64), np.array(ranks_near(comm), np.int64)
        self._ways: dict[Hashable, TwoWays] = {}
        self._memory: WithinHost | None = WithinHost(comm)
        if len(self._near) > 1 or len(set(comm.hosts)) < comm.world_size:  # the same on all ranks
            try:
                self._memory.reserve(_ROOM_BYTES)
            except OutOfSharedMemoryError:  # on every rank
                self._memory = None
        comm._holders.add(self)

    def close(self) -> None:
        """Release the memory when the communicator closes."""
        _known.pop(self._comm, None)

    def faster(
        self, key: Hashable, size: int, row_bytes: int, turn: Turn, name: str, plain: Callable[[], T],
        far_first: Callable[[], T],
    ) -> T:  # fmt: skip
        """Run the faster of `plain` and `far_first`, two implementations of a call, chosen by measurement. All ranks must
        have reached the call.

        key: calls with equal keys share one choice for each size. size: at least the number of rows of any rank, the same
        on all ranks. row_bytes: the bytes of a row that is exchanged.
        """
        if self._memory is None:
            with ending_the_group(self._comm, name):
                return plain()
        ways = self._ways.setdefault(key, TwoWays(self._comm))
        if (network := network_of(self._comm)) is not None:
            far_us = network.exchange_us(network.per_host * size * row_bytes)  # if all rows go to other hosts
            ways.rule_out(size, (far_us - PIECES * network.round_trip_us / 2) / 1e6)
        begin = time.perf_counter()
        with ending_the_group(self._comm, name):
            result = (far_first if ways.takes_other(size) else plain)()
        assert turn.deadline_s is not None
        ways.took(size, time.perf_counter() - begin, turn.deadline_s)
        return result

    def dispatch(
        self, tokens: torch.Tensor, w: torch.Tensor, sizes: Sizes, rows: int, turn: Turn, name: str, return_x: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return y `[rows, N]`, and with return_x also the tokens in the order of arrival. Arguments are as for
        `experts.all_to_all_matmul`.
        """
        sent, came = sizes.tables
        sent_at, came_at, y_at, total = _by_rank(sent), _by_rank(came), _by_expert(came), int(came.sum())
        y = tokens.new_empty(max(rows, total), w.shape[2])
        arrived = tokens.new_empty(total, tokens.shape[1]) if return_x else None
        begun = []
        for part in _pieces(w.shape[0]):
            far = np.ix_(self._far, part)
            leaving = _take(tokens, sent_at[far], sent[far])
            received = tokens.new_empty(int(came[far].sum()), tokens.shape[1])
            counts = self._of_far(came, part), self._of_far(sent, part)
            begun.append((part, received, begin_piece(self._comm, turn, name, received, leaving, *counts)))
        near, every = self._near, np.arange(w.shape[0])
        here = tokens.new_empty(int(came[near].sum()), tokens.shape[1])
        outgoing = [tokens[at : at + n] for at, n in zip(sent_at[near, 0], sent[near].sum(1), strict=True)]
        self._exchange(outgoing, list(here.split(came[near].sum(1).tolist())), turn)
        turn.done("exchange tokens within this host", here)
        arriving: list[tuple[Cells, torch.Tensor, Pending | None]] = [(every, here, None), *begun]
        for part, x, work in arriving:
            if work is not None:
                work.wait()
                turn.done(name, x, x.nbytes)
            cells = np.ix_(near if work is None else self._far, part)
            _multiply(x, _by_rank(came[cells]), came[cells], w[part[0] : part[-1] + 1], y, y_at[cells])
            turn.done(LibraryGroupedMatmul.kind, y)
            if arrived is not None:
                _put(arrived, x, came_at[cells], came[cells])
        return y[:rows], arrived

    def combine(
        self, h: torch.Tensor, w: torch.Tensor, sizes: Sizes, rows: int, turn: Turn, name: str
    ) -> torch.Tensor:  # fmt: skip
        """Return y `[rows, N]`. Arguments are as for `experts.matmul_all_to_all`."""
        sent, came = sizes.tables
        sent_at, h_at, n = _by_rank(sent), _by_expert(came), w.shape[2]
        y = h.new_empty(rows, n)
        begun = []
        for part in (*_pieces(w.shape[0]), None):
            of = np.arange(w.shape[0]) if part is None else part
            cells = np.ix_(self._near if part is None else self._far, of)
            made = h.new_empty(int(came[cells].sum()), n)
            _multiply(h, h_at[cells], came[cells], w[of[0] : of[-1] + 1], made, _by_rank(came[cells]))
            turn.done(LibraryGroupedMatmul.kind, made)
            if part is not None:
                received = h.new_empty(int(sent[cells].sum()), n)
                counts = self._of_far(sent, part), self._of_far(came, part)
                begun.append((cells, received, begin_piece(self._comm, turn, name, received, made, *counts)))
        near = self._near
        incoming = [y[at : at + count] for at, count in zip(sent_at[near, 0], sent[near].sum(1), strict=True)]
        self._exchange(list(made.split(came[near].sum(1).tolist())), incoming, turn)
        turn.done("exchange rows within this host", y)
        for cells, received, work in begun:
            work.wait()
            _put(y, received, sent_at[cells], sent[cells])
            turn.done(name, received, received.nbytes)
        return y

    def _of_far(self, table: Cells, part: Cells) -> list[int]:
        """Return, for each rank, its number of rows in `table` for the experts in `part`; 0 for ranks of this host."""
        rows = np.zeros(len(table), dtype=np.int64)
        rows[self._far] = table[np.ix_(self._far, part)].sum(1)
        return rows.tolist()  # type: ignore[no-any-return]

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], turn: Turn) -> None:
        assert self._memory is not None
        assert turn.deadline_s is not None
        if len(self._near) == 1:
            received[0].copy_(sent[0])
        else:
            self._memory.exchange(sent, received, deadline_s=turn.deadline_s, what=_NEAR)


_known: dict[Communicator, FarFirst] = {}


def far_first_on(comm: Communicator) -> FarFirst:
    """Return the `FarFirst` of `comm`. All ranks must make the first call together."""
    return of_communicator(_known, comm, FarFirst)


def _pieces(experts: int) -> list[Cells]:
    """Return the local experts of each piece. The rows of one expert are never split."""
    return [part for part in np.array_split(np.arange(experts), PIECES) if len(part)]


def _by_rank(table: Cells) -> Cells:
    """Return the first row of each cell if rows are ordered by rank. table: the number of rows of each cell, `[ranks,
    experts]`.
    """
    flat = table.ravel()
    return (flat.cumsum() - flat).reshape(table.shape)  # type: ignore[no-any-return]


def _by_expert(table: Cells) -> Cells:
    """Return the first row of each cell if rows are ordered by expert. table: as for `_by_rank`."""
    return _by_rank(table.T).T


def _runs(starts: Cells, counts: Cells) -> slice | torch.Tensor:
    """Return the indices of the rows of cells, one cell after the other: a slice if the cells are adjacent. starts,
    counts: the first row and the number of rows of each cell.
    """
    has = counts > 0
    starts, counts = starts[has], counts[has]
    if not len(starts):
        return slice(0, 0)
    if (starts[1:] == (starts + counts)[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + counts[-1]))
    begins = counts.cumsum() - counts
    return torch.from_numpy(np.repeat(starts - begins, counts) + np.arange(counts.sum()))


def _take(rows: torch.Tensor, starts: Cells, counts: Cells) -> torch.Tensor:
    """Return the rows of the cells `starts`, `counts` (see `_runs`), one cell after the other: a view if adjacent."""
    found = _runs(starts.ravel(), counts.ravel())
    return rows[found] if isinstance(found, slice) else rows.index_select(0, found)


def _put(out: torch.Tensor, rows: torch.Tensor, starts: Cells, counts: Cells) -> None:
    """Copy `rows`, which are ordered by cell, into `out`. starts: the first row of each cell in `out`."""
    found = _runs(starts.ravel(), counts.ravel())
    if isinstance(found, slice):
        out[found].copy_(rows)
    else:
        out.index_copy_(0, found, rows)


def _multiply(
    x: torch.Tensor, x_at: Cells, counts: Cells, w: torch.Tensor, out: torch.Tensor, out_at: Cells
) -> None:  # fmt: skip
    """Multiply the rows of each expert by its weights.

    A cell is the rows that one rank dispatches to one expert. counts: the number of rows of each cell, [ranks,
    experts]. x_at, out_at: the first row of each cell in x and in `out`.
    """
    for expert, weights in enumerate(w):
        of = counts[:, expert]
        if not of.any():
            continue
        rows, place = _take(x, x_at[:, expert], of), _runs(out_at[:, expert], of)
        if isinstance(place, slice):
            torch.mm(rows, weights, out=out[place])
        else:
            out.index_copy_(0, place, torch.mm(rows, weights))
