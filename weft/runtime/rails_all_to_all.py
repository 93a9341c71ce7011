"""An all-to-all of rows in two levels, whose data travel with the rendezvous of CPU ranks on several hosts
(`weft.runtime.rails`). A rail consists of the ranks with the same index on their hosts.

    1   each rank writes its rows, and their numbers, to shared memory
    2   rank i of each host sends to rank i of every other host the rows of all ranks of its host for that rank
    3   meanwhile, each rank reads the rows from ranks of its host in shared memory

So a rank sends one message to each other host, and needs no separate rendezvous. gloo would send a message to each rank.

A rank need not know the number of rows that it receives, because receive buffers have space for the largest message: each rank
sends up to `Rails.rows_bytes` bytes. If a rank has more, only the numbers of rows travel, and the caller must exchange the rows
afterwards. The caller sees this from the number of bytes of each rank, which the rendezvous exchanges too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from weft.runtime.rails import Rails, aligned, like

Counts: TypeAlias = np.ndarray[Any, Any]


class AllToAll:
    """An all-to-all of rows whose data travel with the rendezvous of ranks (a `weft.runtime.rails.Cargo`).

    like: a tensor with the dtype and the number of columns of the rows, [any, columns].
    counts: the number of rows for each rank and expert, int64 [W, experts].
    write: a function that writes this rank's rows, ordered by the rank that receives them, to its argument [n, columns], which
        is shared memory. It is not called if the rows are too many.
    meanwhile: a function that is called while messages with rows are in transit. Its arguments are the rows from each rank of
        this host, and their numbers [ranks of this host, experts]. The rows are valid during this call.
    """

    def __init__(
        self, rails: Rails, like: torch.Tensor, counts: Counts, write: Callable[[torch.Tensor], object],
        meanwhile: Callable[[list[torch.Tensor], Counts], None],
    ) -> None:  # fmt: skip
        self._levels, self._like, self._counts = rails.levels, like, counts
        self._write, self._meanwhile = write, meanwhile
        self._most, self._row_bytes = rails.rows_bytes, like.shape[1] * like.itemsize
        per_host = rails.levels.per_host
        self._rows_at, self._head_bytes = aligned(counts.nbytes), aligned(per_host * counts[0].nbytes)
        self.near_bytes, self.far_bytes = self._rows_at + self._most, self._head_bytes + per_host * self._most
        self.nbytes = int(counts.sum()) * self._row_bytes
        """The number of bytes of this rank's rows."""
        self.counts = np.empty_like(counts)
        """The number of rows from each rank, [W, experts]."""
        self._received: dict[int, torch.Tensor] = {}

    def load(self, memory: torch.Tensor) -> None:
        _numbers(memory, self._counts.shape)[:] = self._counts
        if self.nbytes <= self._most:
            self._write(self._as_rows(memory[self._rows_at :], self.nbytes // self._row_bytes))

    def pack(self, near: list[torch.Tensor], far: dict[int, torch.Tensor]) -> dict[int, int]:
        self._tables = [_numbers(memory, self._counts.shape) for memory in near]
        of_ranks = [table.sum(1).tolist() for table in self._tables]  # the number of rows for each rank
        self._has_rows = all(sum(rows) * self._row_bytes <= self._most for rows in of_ranks)
        self._near = [
            self._as_rows(memory[self._rows_at :], sum(rows)).split(rows) if self._has_rows else ()
            for memory, rows in zip(near, of_ranks, strict=True)
        ]
        sizes = {}
        for host, message in far.items():
            target, parts = self._rank_on(host), self._rows_for(host)
            _numbers(message, (len(near), self._counts.shape[1]))[:] = [table[target] for table in self._tables]
            rows = sum(map(len, parts))
            if rows:
                torch.cat(parts, out=self._as_rows(message[self._head_bytes :], rows))
            sizes[host] = self._head_bytes + rows * self._row_bytes
        return sizes

    def go_on(self) -> None:
        host = self._levels.host
        numbers = self._of_host(host)
        numbers[:] = [table[self._rank_on(host)] for table in self._tables]
        if self._has_rows:
            self._meanwhile(self._rows_for(host), numbers)

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        self._received = received
        for host, message in received.items():
            numbers = self._of_host(host)
            numbers[:] = _numbers(message, numbers.shape)

    def rows_from(self, host: int) -> torch.Tensor:
        """Return the rows that this rank has received from another host, ordered by the rank that sent them. They are valid
        until the next rendezvous. Call it only if no rank has more bytes than `Rails.rows_bytes`.
        """
        return self._as_rows(self._received[host][self._head_bytes :], int(self._of_host(host).sum()))

    def _rank_on(self, host: int) -> int:
        """Return the rank on a host that has the same index there as this rank has on its own host."""
        return host * self._levels.per_host + self._levels.index

    def _of_host(self, host: int) -> Counts:
        """Return the part of `counts` for the ranks of host number `host`."""
        return self.counts[host * self._levels.per_host :][: self._levels.per_host]

    def _rows_for(self, host: int) -> list[torch.Tensor]:
        """Return, for each rank of this host, its rows for one rank on `host`: the rank with the same index as this rank. The
        rows are in shared memory.
        """
        return [parts[self._rank_on(host)] for parts in self._near] if self._has_rows else []

    def _as_rows(self, data: torch.Tensor, count: int) -> torch.Tensor:
        return like(self._like, data, torch.Size((count, self._like.shape[1])))


def _numbers(memory: torch.Tensor, shape: Sequence[int]) -> Counts:
    """Read the int64 numbers at the beginning of `memory`. Return them as an array of this shape."""
    return memory.numpy()[: 8 * shape[0] * shape[1]].view(np.int64).reshape(shape)  # type: ignore[no-any-return]
