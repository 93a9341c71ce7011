"""An all-to-all of rows in two levels, whose data are sent with the messages by which CPU ranks on several hosts
synchronise (`weft.runtime.rails`). A rail consists of the ranks with the same index on their hosts.

    1 each rank writes its rows, and the number of rows for each rank, to memory that the ranks of its host share 2 rank
    i of each host sends a message to rank i of every other host: the rows of all ranks of its host for this rank 3
    meanwhile, each rank copies from the shared memory the rows that the ranks of its host send to it

So a rank sends one message to each other host, and needs no separate rendezvous. gloo would send a message to each rank.

A rank need not know the number of rows that it receives, because receive buffers have space for the largest message: each rank
sends up to `most_bytes` bytes. If a rank has more, only the numbers of rows are sent, and the caller must exchange the rows
afterwards. The caller sees this from the number of bytes of each rank, which the rendezvous exchanges too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from weft import _core
from weft.runtime.rails import Rails, aligned, like

Counts: TypeAlias = np.ndarray[Any, Any]


class AllToAll:
    """An all-to-all of rows whose data are sent with the messages by which ranks synchronise (`weft.runtime.rails.Cargo`).

    like: a tensor with the dtype and the number of columns of the rows, [any, columns].
    counts: the number of rows for each rank and expert, int64 [W, experts].
    write: a function that writes this rank's rows to its argument [n, columns], which is shared memory. It is not called if
        there are too many rows.
    by_expert: the order in which `write` writes rows. True: by expert, then by the rank that receives them. False: by the
        rank that receives them, then by expert. In messages, rows are always ordered by the sending rank, then by expert.
    place: a function that returns the memory for the rows from ranks of this host, or None to leave them in shared
        memory. Its arguments are the number of these rows, and a table with the number of rows from each rank for each
        expert, [ranks of this host, experts].
    meanwhile: a function that is called while messages with rows are in transit. Its arguments are the rows from the ranks of
        this host, in the memory that `place` returned, and the table that `place` got.
    most_bytes: the largest number of bytes that a rank may send, equal on all ranks and at most `Rails.rows_bytes` (the
        default).
    """

    def __init__(
        self, rails: Rails, like: torch.Tensor, counts: Counts, write: Callable[[torch.Tensor], object],
        place: Callable[[int, Counts], torch.Tensor | None],
        meanwhile: Callable[[torch.Tensor, Counts], None] = lambda rows, counts: None, by_expert: bool = False,
        most_bytes: int | None = None,
    ) -> None:  # fmt: skip
        levels = self._levels = rails.levels
        self._like, self._counts, self._write, self._place, self._meanwhile = like, counts, write, place, meanwhile
        self._most = rails.rows_bytes if most_bytes is None else most_bytes
        self._row_bytes, room = like.shape[1] * like.itemsize, max(0, self._most)
        per_host, (world, experts) = levels.per_host, counts.shape
        self._rows_at, self._head_bytes = aligned(counts.nbytes), aligned(8 * per_host * experts)
        self.near_bytes, self.far_bytes = self._rows_at + room, self._head_bytes + per_host * room
        self.nbytes = int(counts.sum()) * self._row_bytes
        """The number of bytes of this rank's rows."""
        self._table = torch.empty(counts.shape, dtype=torch.int64, device="cpu")
        self.counts: Counts = self._table.numpy()
        """The number of rows from each rank, [W, experts]."""
        self._received: dict[int, torch.Tensor] = {}
        self._rows = _core.RailRows(
            world_size=world, experts=experts, per_host=per_host, host=levels.host, index=levels.index,
            row_bytes=self._row_bytes, rows_at=self._rows_at, head_bytes=self._head_bytes, most_bytes=self._most,
            by_expert=by_expert,
        )  # fmt: skip

    def load(self, memory: torch.Tensor) -> None:
        _numbers(memory, self._counts.shape)[:] = self._counts
        if self.nbytes <= self._most:
            self._write(self._as_rows(memory[self._rows_at :], self.nbytes // self._row_bytes))

    def pack(self, near: list[torch.Tensor], far: dict[int, torch.Tensor]) -> dict[int, int]:
        sizes = self._rows.pack([memory.data_ptr() for memory in near], [memory.data_ptr() for memory in far.values()])
        return dict(zip(far, sizes, strict=True))

    def go_on(self) -> None:
        numbers = self._of_host(self._levels.host)
        total = self._rows.near_counts(self._table.data_ptr() + self._levels.host * numbers.nbytes)
        if self._rows.has_rows and (out := self._place(total, numbers)) is not None:
            assert out.nbytes == total * self._row_bytes
            self._rows.copy_near(out.data_ptr())
            self._meanwhile(out, numbers)

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        self._received = received
        for host, message in received.items():
            numbers = self._of_host(host)
            numbers[:] = _numbers(message, numbers.shape)

    def rows_from(self, host: int) -> torch.Tensor:
        """Return the rows that this rank has received from another host, ordered by the rank that sent them. They are valid
        until the next rendezvous. Call it only if no rank has more bytes than `most_bytes`.
        """
        return self._as_rows(self._received[host][self._head_bytes :], int(self._of_host(host).sum()))

    def copy_from(self, host: int, out: torch.Tensor) -> None:
        """Copy the rows of `rows_from` to `out`, a contiguous tensor of this size."""
        counts = self._table.data_ptr() + host * self._levels.per_host * self._counts[0].nbytes
        self._rows.copy_far(self._received[host].data_ptr(), counts, out.data_ptr())

    def _of_host(self, host: int) -> Counts:
        """Return the part of `counts` for the ranks of host number `host`."""
        return self.counts[host * self._levels.per_host :][: self._levels.per_host]

    def _as_rows(self, data: torch.Tensor, count: int) -> torch.Tensor:
        return like(self._like, data, torch.Size((count, self._like.shape[1])))


def _numbers(memory: torch.Tensor, shape: Sequence[int]) -> Counts:
    """Read the int64 numbers at the beginning of `memory`. Return them as an array of this shape."""
    return memory.numpy()[: 8 * shape[0] * shape[1]].view(np.int64).reshape(shape)  # type: ignore[no-any-return]
