"""An all-to-all of rows in two levels, whose data are sent with the messages by which CPU ranks on several hosts
synchronise (`weft.runtime.rails`). A rail consists of the ranks with the same index on their hosts.

    1   each rank writes its rows, and the number of rows for each rank, to memory that the ranks of its host share
    2   rank i of each host sends a message to rank i of every other host: the rows of all ranks of its host for this rank
    3   meanwhile, each rank copies from the shared memory the rows that the ranks of its host send to it

So a rank sends one message to each other host, and needs no separate rendezvous. gloo would send a message to each rank.

A rank need not know the number of rows that it receives, because receive buffers have space for the largest message: each rank
sends up to `most_bytes` bytes. If a rank has more, only the numbers of rows are sent, and the caller must exchange the rows
afterwards. The caller sees this from the number of bytes of each rank, which the rendezvous exchanges too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from weft import _core
from weft.runtime.rails import Rails, like

Counts: TypeAlias = np.ndarray[Any, Any]


class _Rows:
    """The base class of all-to-alls of rows (`weft.runtime.rails.Cargo`).

    like: a tensor with the dtype and the number of columns of the rows, [any, columns].
    counts: the number of rows for each rank and expert, int64 [W, experts], contiguous.
    write: a function that writes this rank's rows to its argument [n, columns], which is shared memory. It is not called if
        there are too many rows.
    by_expert: the order in which `write` writes rows. True: by expert, then by the rank that receives them. False: by the
        rank that receives them, then by expert. In messages, rows are always ordered by the sending rank, then by expert.
    most_bytes: the largest number of bytes that a rank may send, equal on all ranks and at most `Rails.rows_bytes`.
    received: the memory for the number of rows from each rank, [W, experts], or None.
    expected, out: these numbers, if the caller knows them, and the memory for the rows; otherwise None.
    """

    def __init__(
        self, rails: Rails, like: torch.Tensor, counts: torch.Tensor, write: Callable[[torch.Tensor], object], by_expert: bool,
        most_bytes: int, received: torch.Tensor | None = None, expected: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        levels, row_bytes, room = rails.levels, like.shape[1] * like.itemsize, max(0, most_bytes)
        self._like, self._write, self._held = like, write, (counts.contiguous(), received, expected, out)
        at = [0 if tensor is None else tensor.data_ptr() for tensor in self._held]
        self._rows = _core.RailRows(
            counts=at[0], received=at[1], expected=at[2], out=at[3], world_size=rails.comm.world_size,
            experts=counts.shape[1], per_host=levels.per_host, host=levels.host, index=levels.index, row_bytes=row_bytes,
            most_bytes=most_bytes, by_expert=by_expert,
        )  # fmt: skip
        self._rows_at, self._head_bytes = self._rows.rows_at, self._rows.head_bytes
        self.near_bytes, self.far_bytes = self._rows_at + room, self._head_bytes + levels.per_host * room
        self.rows = self._rows.rows
        """The number of this rank's rows."""
        self.nbytes = self.rows * row_bytes
        """The number of bytes of this rank's rows."""

    @property
    def of_experts(self) -> list[int]:
        """The number of this rank's rows for each expert index, summed over the ranks that receive them."""
        return self._rows.of_experts

    def load(self, memory: torch.Tensor) -> None:
        if count := self._rows.load(memory.data_ptr()):
            self._write(self._as_rows(memory[self._rows_at :], count))

    def pack(self, near: list[torch.Tensor], far: dict[int, torch.Tensor]) -> dict[int, int]:
        sizes = self._rows.pack([memory.data_ptr() for memory in near], [memory.data_ptr() for memory in far.values()])
        return dict(zip(far, sizes, strict=True))

    def go_on(self) -> None:
        self._rows.go_on()

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        self._rows.unpack([message.data_ptr() for message in received.values()])

    def _as_rows(self, data: torch.Tensor, count: int) -> torch.Tensor:
        return like(self._like, data, torch.Size((count, self._like.shape[1])))


class AllToAllInto(_Rows):
    """An all-to-all of rows, for a rank that already knows how many rows it receives from each rank.

    expected: the number of rows from each rank, int64 [W, experts], contiguous.
    out: the memory for all rows, [rows, columns], in the order of the ranks that send them.
    Other arguments: as for `_Rows`.
    """

    def __init__(
        self, rails: Rails, counts: torch.Tensor, write: Callable[[torch.Tensor], object], expected: torch.Tensor,
        out: torch.Tensor, by_expert: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(rails, out, counts, write, by_expert, rails.rows_bytes, None, expected, out)

    def end(self) -> int:
        """Copy the rows from other hosts to `out`, which is then complete. Return the number of bytes of these rows. Call it only
        if all ranks agree on the numbers of rows, and no rank has more than `Rails.rows_bytes`.
        """
        return self._rows.copy_far()


class AllToAll(_Rows):
    """An all-to-all of rows in which ranks do not know the numbers of rows that they receive.

    place: a function that returns the memory for the rows from ranks of this host. Its arguments are the number of these rows,
        and a table with the number of rows from each rank for each expert, [ranks of this host, experts].
    meanwhile: a function that is called while messages with rows are in transit. Its arguments are the rows from the ranks of
        this host, in the memory that `place` returned, and the table that `place` got.
    Other arguments: as for `_Rows`.
    """

    def __init__(
        self, rails: Rails, like: torch.Tensor, counts: torch.Tensor, write: Callable[[torch.Tensor], object],
        place: Callable[[int, Counts], torch.Tensor], meanwhile: Callable[[torch.Tensor, Counts], None], most_bytes: int,
    ) -> None:  # fmt: skip
        self.received = torch.empty(counts.shape, dtype=torch.int64, device="cpu")
        """The number of rows from each rank, [W, experts]."""
        super().__init__(rails, like, counts, write, False, most_bytes, self.received)
        self.counts: Counts = self.received.numpy()
        """The same numbers."""
        self._levels, self._place, self._meanwhile = rails.levels, place, meanwhile
        self._messages: dict[int, torch.Tensor] = {}

    def go_on(self) -> None:
        total, numbers = self._rows.go_on(), self._of_host(self._levels.host)
        if self._rows.has_rows:
            out = self._place(total, numbers)
            self._rows.copy_near(out.data_ptr())
            self._meanwhile(out, numbers)

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        super().unpack(received)
        self._messages = received

    def rows_from(self, host: int) -> torch.Tensor:
        """Return the rows that this rank has received from another host, ordered by the rank that sent them. They are valid
        until the next rendezvous. Call it only if no rank has more bytes than `most_bytes`.
        """
        return self._as_rows(self._messages[host][self._head_bytes :], int(self._of_host(host).sum()))

    def _of_host(self, host: int) -> Counts:
        """Return the part of `counts` for the ranks of host number `host`."""
        return self.counts[host * self._levels.per_host :][: self._levels.per_host]
