"""Calls of CPU ranks on several hosts that begin before the rendezvous has ended.

Between hosts, a rendezvous takes as long as several steps of a small collective. A call that computes before it
communicates can compute, and begin to send its results, during the rendezvous. The user gets the results only if the
rendezvous shows that all ranks made the same call.

gloo ends the process if a message is larger than expected. Before the rendezvous has ended, the following rules prevent
such messages:

- These exchanges (`Early`) use their own gloo groups, so they never receive messages of other collectives.
- A rank receives up to `capacity_bytes` from each rank. If a message would be larger, its sender sends one row instead, and
  reports this in the rendezvous by `Begun.number`. All ranks then repeat the exchange after the rendezvous.
- If a rank refuses a call, messages to this rank stay unread. So after a refused call, ranks construct a new `Early`. For the
  same reason, `Early` has its own memory for exchanges within a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from weft import _core
from weft.runtime.collectives import exchange_both_ways
from weft.runtime.gloo_groups import gloo_of_its_own
from weft.runtime.meeting import meeting_of
from weft.runtime.rails import Cargo
from weft.runtime.unfused.turn import Pending
from weft.runtime.within_host import WithinHost
from weft.symm import Communicator

_MOST_BYTES = 4 << 20  # largest message from a rank. For larger messages, the rendezvous takes a small part of the time
_ROOM_BYTES = 32 << 20  # for messages from all ranks
NEAR_BYTES = 16 << 20  # on each rank, for rows that are exchanged within its host


class Begun(Protocol):
    """A call of CPU ranks that this rank begins before the rendezvous (in which ranks compare their calls) has ended."""

    number: int
    """A number about this rank's part of the call, which the rendezvous sends to all ranks. `begun_number` makes it."""
    cargo: Cargo | None
    """A small collective whose data are sent with the messages of the rendezvous (`weft.runtime.rails`). None if there is
    no such collective.
    """
    collective: _core.SharedCollective | None
    """On one host: a collective whose data travel with the rendezvous (`weft.runtime.shared_collectives`). Otherwise None."""

    def alone(self) -> Iterator[None]:
        """Run the steps of the call that do not wait for other ranks: compute, and begin to send. Yield between steps."""

    def end(self, numbers: list[int] | None) -> list[torch.Tensor]:
        """Run the remaining steps of the call, and return its results. Call this method only after the rendezvous has shown
        that all ranks make the same call. If `alone` has not run, run its steps too.

        numbers: the value of `Begun.number` on each rank, from the rendezvous; None if the ranks had already synchronised
            before the call.
        """


def begun_number(rows: int, too_large: bool = False) -> int:
    """Return one number (`Begun.number`) that contains both arguments.

    rows: the number of rows that this rank sends. too_large: True if a message of this rank was too large to be sent.
    """
    return 2 * rows + too_large


def read_numbers(numbers: list[int]) -> tuple[int, bool]:
    """Return the largest number of rows that a rank sends, and True if a message of any rank was too large.

    numbers: `Begun.number` of each rank.
    """
    return max(numbers) // 2, any(number % 2 for number in numbers)


class Early:
    """Exchanges of bytes with ranks of other hosts that may begin before a rendezvous has ended. All ranks must
    construct this object together, after a rendezvous. Each host must have the same number of consecutive ranks, at
    least two (`weft.runtime.rail.ranks_per_host`).

    exchanges: the number of exchanges in a call. Each has its own receive buffer.
    """

    def __init__(self, comm: Communicator, exchanges: int) -> None:
        self._comm, self._far = comm, [not mapped for mapped in comm.mapped]
        near = [rank for rank, mapped in enumerate(comm.mapped) if mapped]
        self._near = range(near[0], near[-1] + 1)
        self._ways = [gloo_of_its_own(comm, "ranks of other hosts") for _ in range(2)]
        self._refused = meeting_of(comm).refused
        # A multiple of 8 bytes, so that rows of every dtype are aligned.
        self.capacity_bytes = min(_MOST_BYTES, _ROOM_BYTES // (exchanges * sum(self._far))) // 8 * 8
        self.near = WithinHost(comm)
        self.near.reserve(NEAR_BYTES)
        self._received = [
            torch.empty(sum(self._far) * self.capacity_bytes, dtype=torch.uint8, device="cpu") for _ in range(exchanges)
        ]

    @property
    def is_stale(self) -> bool:
        """True if a rank has refused a call since this object was constructed. Receive buffers may then contain messages of the
        refused call. Equal on all ranks.
        """
        return meeting_of(self._comm).refused != self._refused

    def begin(self, exchange: int, sent: torch.Tensor, sizes: list[int], deadline_s: float, name: str) -> Pending:
        """Begin exchange number `exchange` of a call: send the rows `sent` to ranks of other hosts. Return a handle to wait
            for.

        sizes: the number of rows for each rank: 0 for ranks of this host, and at least 1 for others.
        """
        room = [self.capacity_bytes * far for far in self._far]
        row_bytes = sent.shape[1] * sent.itemsize
        arguments = self._received[exchange], sent.view(torch.uint8).view(-1), room, [row_bytes * n for n in sizes]
        works = exchange_both_ways(self._ways, self._near, *arguments)
        return Pending(works, self._comm, self._ways, name, deadline_s, arguments)

    def received(self, exchange: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the buffers that exchange number `exchange` receives into, one for each rank on another host, as rows with the
        width and dtype of `like`. The buffers may be longer than the messages.
        """
        row_bytes = like.shape[1] * like.itemsize
        rows = self.capacity_bytes // row_bytes
        parts = self._received[exchange].split(self.capacity_bytes)
        return [part[: rows * row_bytes].view(like.dtype).view(rows, like.shape[1]) for part in parts]
