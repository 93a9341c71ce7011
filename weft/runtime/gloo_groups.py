"""gloo groups that weft makes for its own messages, each of some or all ranks of a communicator.

torch does not register these groups, because registration (`dist.new_group`) would involve all ranks of the job.
"""

from __future__ import annotations

import datetime
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.errors import DeadlineError
from weft.symm import Communicator
from weft.symm.groups import store_of

_LONG = datetime.timedelta(minutes=30)  # timeout of gloo, as for torch's groups; waits use the call's deadline
_LOOK_S, _GRACE_S = 0.05, 0.5


class Membership(NamedTuple):
    """This rank's place in a new group. rank: this rank's number in the group. size: the number of ranks in the group.

    part: the name of the group, equal on all of its ranks. If one call makes several groups, their names differ.
    """

    rank: int
    size: int
    part: str


def gloo_of_its_own(comm: Communicator, whom: str) -> dist.ProcessGroup:
    """Return a new gloo group of all ranks of `comm`. All ranks must make this call. whom: a description of the ranks, for
    error texts.
    """
    return gloo_groups(comm, whom, [Membership(comm.rank, comm.world_size, "")])[0]


def gloo_groups(comm: Communicator, whom: str, memberships: Sequence[Membership]) -> list[dist.ProcessGroup]:
    """Make gloo groups from ranks of `comm`. Return the new groups that contain this rank. All ranks of `comm` must make
    this call.

    memberships: this rank's number in each new group that contains this rank. All ranks must list the groups in the same
        order.
    whom: a description of the groups' ranks, for error texts.

    Raise `DeadlineError` on every rank if ranks cannot connect within the deadline of set-up.
    """
    until_s = comm.setup_deadline_s()
    name = comm.all_gather(secrets.token_hex(8), what="the name of a group of weft")[0]
    made = []

    def connect() -> None:
        for rank, size, part in memberships:
            store = dist.PrefixStore(f"weft/{name}/{part}", store_of(comm.group))
            group = dist.ProcessGroup(store, rank, size)
            gloo = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=until_s))
            gloo._set_default_timeout(_LONG)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            made.append(group)

    error = _until(until_s, comm, whom, connect)
    if errors := [text for text in comm.all_gather(error, what="connections of a group of weft") if text]:
        raise DeadlineError(errors[0])
    return made


def _until(deadline_s: float, comm: Communicator, whom: str, connect: Callable[[], None]) -> str:
    """Call `connect` on a thread, and wait for at most `deadline_s` seconds. Return "", or an error text.

    The thread is needed because torch waits forever if the process that serves the store is stopped.
    """
    errors = [f"no answer within {deadline_s:g} s"]

    def run() -> None:
        try:
            connect()
            errors.clear()
        except RuntimeError as error:
            errors[0] = str(error)

    thread = threading.Thread(target=run, name=f"weft-gloo-{comm.rank}", daemon=True)
    thread.start()
    until = time.monotonic() + deadline_s + _GRACE_S
    while thread.is_alive() and time.monotonic() < until:
        thread.join(_LOOK_S)
        comm.check()
    return (
        f"rank {comm.rank} could not connect to {whom}: {errors[0]}: check that the interface that gloo uses "
        "(GLOO_SOCKET_IFNAME) reaches the other hosts"
        if errors
        else ""
    )
