"""Calls that CPU ranks of several hosts begin before they have synchronised, and the exchanges of such calls.

Between hosts, a rendezvous takes as long as several steps of a small collective. A call that computes first can compute
during the rendezvous, and send what it has computed. The result is returned only if all ranks made the same call.

gloo ends the process if a message is larger than expected, so an exchange before the rendezvous must not receive one:

- `Early` has gloo groups of its own. So a message never meets an exchange of another kind.
- Ranks receive up to `capacity_bytes` from each rank, and no rank sends more. A rank with more data sends a row, and
  says so in the rendezvous. Then all ranks exchange again.
- If a rank refuses the call, messages to it stay unread. So after a refused call, ranks make a new `Early`. For the same
  reason, `Early` has its own memory for exchanges within a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from weft.runtime.collectives import exchange_both_ways
from weft.runtime.meeting import meeting_of
from weft.runtime.two_levels import gloo_of_its_own
from weft.runtime.unfused.turn import Pending
from weft.runtime.within_host import WithinHost
from weft.symm import Communicator

_MOST_BYTES = 4 << 20  # from a rank. For larger messages, a rendezvous takes little of the time
_ROOM_BYTES = 32 << 20  # from all ranks
NEAR_BYTES = 16 << 20  # on each rank, for rows of its host


class Begun(Protocol):
    """A call that this rank has begun."""

    number: int
    """A number for the other ranks, which the rendezvous exchanges."""

    def alone(self) -> Iterator[None]:
        """Run the steps that need no other rank. Yield between them."""

    def end(self, numbers: list[int] | None) -> list[torch.Tensor]:
        """Run the other steps, when all ranks are known to make this call. Return the results.

        numbers: the number of each rank; None if ranks had synchronised before they began the call. Then `alone` has not
            run. It may not have run in other cases.
        """


class Early:
    """Exchanges of bytes with ranks of other hosts, for ranks that form rails. All ranks must construct it, when they have
    synchronised.
    """

    def __init__(self, comm: Communicator, exchanges: int) -> None:
        self._comm, self._far = comm, [not mapped for mapped in comm.mapped]
        near = [rank for rank, mapped in enumerate(comm.mapped) if mapped]
        self._near = range(near[0], near[-1] + 1)
        self._ways = [gloo_of_its_own(comm, "ranks of other hosts", comm.rank, comm.world_size) for _ in range(2)]
        self._refused = meeting_of(comm).refused
        self.capacity_bytes = min(_MOST_BYTES, _ROOM_BYTES // (exchanges * sum(self._far)))
        self.near = WithinHost(comm)
        self.near.reserve(NEAR_BYTES)
        self._received = [
            torch.empty(sum(self._far) * self.capacity_bytes, dtype=torch.uint8) for _ in range(exchanges)
        ]

    @property
    def is_stale(self) -> bool:
        """True if a call has been refused, so that messages may be unread. The same on all ranks."""
        return meeting_of(self._comm).refused != self._refused

    def begin(self, exchange: int, sent: torch.Tensor, sizes: list[int], deadline_s: float, name: str) -> Pending:
        """Begin to send the rows `sent`. sizes: the number of rows for each rank: at least one for a rank of another host."""
        room = [self.capacity_bytes * far for far in self._far]
        row_bytes = sent.shape[1] * sent.itemsize
        arguments = self._received[exchange], sent.view(torch.uint8).view(-1), room, [row_bytes * n for n in sizes]
        works = exchange_both_ways(self._ways, self._near, *arguments)
        return Pending(works, self._comm, self._ways, name, deadline_s, arguments)

    def received(self, exchange: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes from each rank of another host, as rows like those of `like`."""
        row_bytes = like.shape[1] * like.itemsize
        rows = self.capacity_bytes // row_bytes
        parts = self._received[exchange].split(self.capacity_bytes)
        return [part[: rows * row_bytes].view(like.dtype).view(rows, like.shape[1]) for part in parts]
