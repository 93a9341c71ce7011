"""Functions for calls that send data for other hosts first, for CPU ranks on several hosts.

    pieces   the data for other hosts, in up to `PIECES` parts, each exchanged by all ranks. gloo's threads send them while
             the rank computes
    near     the data for this host

Ranks synchronise once, before the first piece. Afterwards all of them run the same exchanges in the same order. If a
rank fails during the exchanges, the group fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from weft.errors import WeftError
from weft.runtime.collectives import all_to_all_single
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
    """Make the group fail if the enclosed code raises on this rank, because peers wait for this rank's exchanges."""
    try:
        yield
    except WeftError:  # the wait that raised has already ended the group
        raise
    except BaseException as error:
        comm.poison(f"{name}: {error!r}")
        raise


def begin_piece(
    comm: Communicator, turn: Turn, name: str, received: torch.Tensor, sent: torch.Tensor, came: list[int], leaving: list[int]
) -> Pending:  # fmt: skip
    """Begin the exchange of a piece. came, leaving: the number of rows from and to each rank. All ranks must have
    reached the exchange.
    """
    arguments = received, sent, came, leaving
    work = all_to_all_single(*arguments, group=comm.group, async_op=True)
    assert turn.deadline_s is not None
    return Pending([work], comm, comm.group, name, turn.deadline_s, arguments)
