"""torch's collectives under the names that this torch has for them, and how a rank waits for one on CPU.

Those that are not asynchronous are called on the process group itself, as `torch.distributed`'s functions do after checks of their
own: on GPUs, where ranks make small calls one by one, these and torch's log of collectives take as long as NCCL's launch.

gloo waits as long as its process group's timeout says, half an hour, and a collective that was begun cannot be called off. So
`finish` looks at the clock and at the group while it waits, and what it gives up it leaves to itself for the rest of the
process: gloo's threads may still write there, and to destroy the group, at exit if not before, would be to wait for them.
"""

from __future__ import annotations

import ctypes
import datetime
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from weft.errors import DeadlineError, WeftError
from weft.symm import Domain

# From torch 2.13 on `all_gather_into_tensor` and `reduce_scatter_tensor` are deprecated in favour of these names.
all_gather_by_torch: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_by_torch: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
COALESCING = c10d._world.pg_coalesce_state
"""Groups whose collectives torch collects to make them at once."""
gather_now, scatter_now, _exchange_now = (
    getattr(dist.ProcessGroup, new, None) or getattr(dist.ProcessGroup, old)
    for new, old in (
        ("all_gather_single", "_allgather_base"),
        ("reduce_scatter_single", "_reduce_scatter_base"),
        ("all_to_all_single", "alltoall_base"),
    )
)


def _at_once(options: Any) -> Any:
    options.asyncOp = False
    return options


GATHER, SCATTER, REDUCE, _EXCHANGE = (
    _at_once(options())
    for options in (c10d.AllgatherOptions, c10d.ReduceScatterOptions, c10d.AllreduceOptions, c10d.AllToAllOptions)
)  # of sums, where something is reduced


def all_gather_single(out: torch.Tensor, x: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False) -> Any:
    if async_op or group in COALESCING:
        return all_gather_by_torch(out, x, group=group, async_op=async_op)
    return _finished(gather_now(group, out, x, GATHER))


def reduce_scatter_single(
    out: torch.Tensor, x: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    if async_op or group in COALESCING:
        return reduce_scatter_by_torch(out, x, group=group, async_op=async_op)
    return _finished(scatter_now(group, out, x, SCATTER))


def all_reduce_single(x: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False) -> Any:
    if async_op or group in COALESCING:
        return dist.all_reduce(x, group=group, async_op=async_op)
    return _finished(group.allreduce([x], REDUCE))


def all_to_all_single(
    out: torch.Tensor,
    x: torch.Tensor,
    received: list[int] | None = None,
    sent: list[int] | None = None,
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Any:
    """received, sent: rows from and to each rank; None: equal parts."""
    if async_op:
        return dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)
    return _finished(_exchange_now(group, out, x, received or [], sent or [], _EXCHANGE))


def _finished(work: dist.Work | None) -> None:
    """Order the caller's stream behind `work`, for backends that have not done so."""
    if work is not None:
        work.wait()


_LOOK_S = 0.1  # how long a wait for the library lasts before it looks at the state of the group


def sendable(x: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that every library moves: gloo and older NCCLs know no fp8."""
    return x.view(torch.uint8) if x.itemsize == 1 and x.dtype.is_floating_point else x


def finish(work: dist.Work, domain: Domain, what: str, deadline_s: float, *held: object) -> None:
    """Wait for a collective on CPU, `what`, that all ranks have come to. held: what it reads and writes.

    `DeadlineError` after `deadline_s`, and if the group fails meanwhile what befell it; it cannot be used any more then.
    """
    until, group = time.monotonic() + deadline_s, domain.group
    try:
        while True:
            try:
                work.wait(datetime.timedelta(seconds=max(0.001, min(_LOOK_S, until - time.monotonic()))))
                return
            except RuntimeError as error:  # of the work, or because this wait is over
                if work.is_completed():
                    if work.is_success():  # since the wait was over: this process may have been stopped in between
                        return
                    time.sleep(_LOOK_S)  # the library may notice before our watchdog that a peer is gone
                    domain.check()
                    raise WeftError(f"rank {domain.rank}: {what} failed in the library: {error}") from error
            domain.check()
            if time.monotonic() >= until:
                raise DeadlineError(
                    f"rank {domain.rank} waited {deadline_s:g} s for {what}: wanted all {domain.world_size} ranks, found some "
                    "missing"
                )
    except BaseException as error:
        # Without effect if the group has failed before.
        domain.poison(str(error) if isinstance(error, WeftError) else f"{what}: {error!r}")
        leave(group, work, held)
        raise


def leave(*held: object) -> None:
    """Keep these to the end of the process and beyond the interpreter's: the library's threads may use them for ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
