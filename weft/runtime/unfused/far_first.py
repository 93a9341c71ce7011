"""Functions for calls of CPU ranks on several hosts that send the data for other hosts first.

A call sends these data in up to `PIECES` pieces. All ranks exchange each piece. gloo's threads send the pieces while the
rank computes with the data of its own host.

Ranks synchronise once, before the first piece. Afterwards all of them run the same exchanges in the same order. If a rank
fails during the exchanges, the group fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from weft.errors import DeadlineError, WeftError
from weft.runtime.collectives import all_to_all_single, exchange_both_ways
from weft.runtime.gloo_groups import gloo_of_its_own
from weft.runtime.per_communicator import of_communicator
from weft.runtime.rail import ranks_per_host
from weft.runtime.unfused.turn import Pending, Turn
from weft.symm import Communicator

PIECES = 2


def ranks_far(comm: Communicator) -> list[int]:
    """Return the ranks on other hosts."""
    return [rank for rank in range(comm.world_size) if not comm.mapped[rank]]


def ranks_near(comm: Communicator) -> list[int]:
    """Return the ranks on this host, this rank included."""
    return [rank for rank in range(comm.world_size) if comm.mapped[rank]]


@contextlib.contextmanager
def ending_the_group(comm: Communicator, name: str) -> Iterator[None]:
    """Make the group fail if the body of this context manager raises, because peers wait for this rank's exchanges.

    name: the name of the exchanges, for error texts.
    """
    try:
        yield
    except WeftError:  # the wait that raised has already made the group fail
        raise
    except BaseException as error:
        comm.poison(f"{name}: {error!r}")
        raise


def begin_piece(
    comm: Communicator, turn: Turn, name: str, received: torch.Tensor, sent: torch.Tensor, came: list[int], leaving: list[int],
    is_far: bool = True,
) -> Pending:  # fmt: skip
    """Begin an all-to-all of rows, one piece of a call's data. Return a handle to wait for. Call this function only after a
    rendezvous has shown that all ranks make the same call.

    received, sent: the tensors to receive into and to send, [rows, columns], with the rows of each rank in rank order. came,
        leaving: the number of rows from and to each rank. is_far: True if no rank exchanges rows within its host.
    """
    arguments = received, sent, came, leaving
    if is_far and (ways := of_communicator(_ways, comm, _Ways)).groups:
        return Pending(exchange_both_ways(ways.groups, ways.near, *arguments), comm, ways, name, turn.wait_s, arguments)
    work = all_to_all_single(*arguments, group=comm.group, async_op=True)
    return Pending([work], comm, comm.group, name, turn.wait_s, arguments)


def begin_far_first(
    comm: Communicator, turn: Turn, name: str, received: torch.Tensor, sent: torch.Tensor, came: list[int], leaving: list[int],
    is_whole: bool,
) -> list[Pending]:  # fmt: skip
    """Begin an all-to-all of rows, with the rows for other hosts first. Return handles to wait for.

    is_whole: True to exchange all rows in one piece instead. Equal on all ranks. Other arguments: as for `begin_piece`.
    """
    if is_whole or not (ways := of_communicator(_ways, comm, _Ways)).groups:
        return [begin_piece(comm, turn, name, received, sent, came, leaving, False)]
    works, near = [begin_piece(comm, turn, name, received, sent, came, leaving)], ways.near

    def here(rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Return the rows from, or for, the ranks of this host. Then return `counts` with zeros for the other ranks."""
        before, count = sum(counts[: near.start]), sum(counts[near.start : near.stop])
        return rows[before : before + count], [n if rank in near else 0 for rank, n in enumerate(counts)]

    (received, came), (sent, leaving) = here(received, came), here(sent, leaving)
    works.append(begin_piece(comm, turn, name, received, sent, came, leaving, False))
    return works


class _Ways:
    """Two gloo groups of all ranks: the first for messages to ranks with higher numbers, the second for messages to ranks
    with lower numbers. All ranks must construct this object.

    `groups` is empty if the ranks cannot connect. It is also empty if hosts do not have equal numbers of consecutive
    ranks, at least two each (`ranks_per_host`).
    """

    def __init__(self, comm: Communicator) -> None:
        near = ranks_near(comm)
        self.near, self.groups, self._comm = range(near[0], near[-1] + 1), list[dist.ProcessGroup](), comm
        if ranks_per_host(comm.hosts):
            with contextlib.suppress(DeadlineError):  # on every rank
                self.groups = [gloo_of_its_own(comm, "all ranks") for _ in range(2)]
        comm._holders.add(self)

    def close(self) -> None:
        """Drop both gloo groups. The communicator calls this method when it closes."""
        _ways.pop(self._comm, None)


_ways: dict[Communicator, _Ways] = {}
