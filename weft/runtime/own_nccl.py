"""The NCCL communicator on which GPUs of several hosts run the collectives of schedules.

weft makes this communicator itself, so that weft can abort the communicator if the group fails. Otherwise a stream
would wait for a lost rank until NCCL's timeout. weft never aborts the communicator of the user's group, on which
`weft.runtime.unfused` runs.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

import torch.distributed as dist

from weft.runtime.per_communicator import of_communicator
from weft.symm import Communicator
from weft.symm.groups import store_of

_CLOSE_S = 5.0  # longest wait for collectives that still run when the communicator is closed


def uses_nccl(comm: Communicator) -> bool:
    """True if the user's group sends data of GPUs by NCCL."""
    return dist.is_nccl_available() and isinstance(comm.group._get_backend(comm.device), dist.ProcessGroupNCCL)


def own_nccl(comm: Communicator) -> dist.ProcessGroup:
    """Return a process group of the ranks of `comm` that has its own NCCL communicator. If the user's group does not use NCCL,
    return the user's group. All ranks must make the first call together.
    """
    return of_communicator(_known, comm, _OwnNccl).group if uses_nccl(comm) else comm.group


class _OwnNccl:
    """A NCCL communicator of the ranks of `comm`. It is aborted if `comm` fails, and closed with `comm`."""

    def __init__(self, comm: Communicator) -> None:
        self.group, self._nccl = _connect(comm)
        self._aborted = self._closed = False
        self._take_back = comm.on_failure(self._abort)
        comm._holders.add(self)

    def _abort(self) -> None:
        self._aborted = True
        self._nccl.abort()

    def close(self) -> None:
        """Free the communicator when its collectives have ended. Wait for at most `_CLOSE_S`."""
        if self._closed:
            return
        self._closed = True
        self._take_back()
        if self._aborted:
            return
        ending = threading.Thread(target=self._nccl.shutdown, name="weft-nccl-close", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)


def _connect(comm: Communicator) -> tuple[dist.ProcessGroup, Any]:
    """Return a new group of the ranks of `comm`, and its backend. The group connects at its first collective, and has the
    timeout of the user's group.

    torch does not register the group, because registration (`dist.new_group`) may involve all ranks of the job.
    """
    name = comm.all_gather(secrets.token_hex(8), what="the name of a group of weft")[0]
    store = dist.PrefixStore(f"weft/{name}", store_of(comm.group))
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = comm.group._get_backend(comm.device).options._timeout
    options.group_name = f"weft-{name}"
    options.global_ranks_in_group = dist.get_process_group_ranks(comm.group)
    nccl = dist.ProcessGroupNCCL(store, comm.rank, comm.world_size, options)
    group = dist.ProcessGroup(store, comm.rank, comm.world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(comm.device, dist.ProcessGroup.BackendType.NCCL, nccl)
    return group, nccl


_known: dict[Communicator, _OwnNccl] = {}
