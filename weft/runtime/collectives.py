"""Wrappers of torch's collectives, with the same names for all torch versions. On CPU a wait for a collective has a deadline.

Synchronous collectives call methods of the process group directly. This skips the checks and the log of
`torch.distributed`, which in small calls on GPUs take as long as NCCL's launch.

gloo cannot cancel a collective, and its timeout is half an hour by default. So at the call's deadline, or when the group fails,
`finish` raises an error while the collective still runs. From then on, weft keeps the tensors and the process group until the
process ends. gloo's threads may still write to the tensors, and the destructor of the group would wait for these threads.
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from weft.errors import DeadlineError, WeftError
from weft.symm import Communicator
from weft.words import and_list

# From torch 2.13 on, these names replace `all_gather_into_tensor` and `reduce_scatter_tensor`, which are deprecated.
all_gather_by_torch: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_by_torch: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
COALESCING = c10d._world.pg_coalesce_state
"""The groups whose collectives torch is coalescing."""
gather_now, scatter_now, exchange_now = (
    getattr(dist.ProcessGroup, new, None) or getattr(dist.ProcessGroup, old)
    for new, old in (
        ("all_gather_single", "_allgather_base"),
        ("reduce_scatter_single", "_reduce_scatter_base"),
        ("all_to_all_single", "alltoall_base"),
    )
)
reduce_now = dist.ProcessGroup.allreduce


def _at_once(options: Any) -> Any:
    options.asyncOp = False
    return options


GATHER, SCATTER, REDUCE, EXCHANGE = (
    _at_once(options())
    for options in (c10d.AllgatherOptions, c10d.ReduceScatterOptions, c10d.AllreduceOptions, c10d.AllToAllOptions)
)  # reductions are sums by default
EXCHANGE_ASYNC = c10d.AllToAllOptions()
EXCHANGE_ASYNC.asyncOp = True


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
    return _finished(reduce_now(group, [x], REDUCE))


def all_to_all_single(
    out: torch.Tensor,
    x: torch.Tensor,
    received: list[int] | None = None,
    sent: list[int] | None = None,
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Any:
    """Call torch's all_to_all_single: send rows of `x` to each rank, and receive into `out`.

    received, sent: the numbers of rows from and to each rank; None for equal parts.
    """
    if async_op and (not x.is_cuda or group in COALESCING):
        return dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)
    if async_op:
        return exchange_now(group, out, x, received or [], sent or [], EXCHANGE_ASYNC)
    return _finished(exchange_now(group, out, x, received or [], sent or [], EXCHANGE))


def exchange_both_ways(
    ways: Sequence[dist.ProcessGroup], near: range, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int]
) -> list[dist.Work]:  # fmt: skip
    """Begin an `all_to_all_single` that exchanges no rows with the ranks in `near`, for example the ranks of this host. Return
    the `dist.Work` objects to wait for, one for each group of `ways`.

    near: the consecutive ranks to leave out.
    ways: two gloo groups of the same ranks. The first sends rows to ranks with higher numbers than the ranks in `near`,
        the second to ranks with lower numbers. In a single group, gloo may run the two directions one after the other.
    received, sent: the numbers of rows from and to each rank. The entries of ranks in `near` are ignored.
    """
    size, (start, stop) = len(sent), (near.start, near.stop)
    later, earlier = [0] * stop + sent[stop:], sent[:start] + [0] * (size - start)
    of_earlier, of_later = received[:start] + [0] * (size - start), [0] * stop + received[stop:]
    forth = ways[0], out[: sum(of_earlier)], x[len(x) - sum(later) :], of_earlier, later
    back = ways[1], out[len(out) - sum(of_later) :], x[: sum(earlier)], of_later, earlier
    return [exchange_now(*one) for one in (forth, back)]


def _finished(work: dist.Work | None) -> None:
    """Make the caller's stream wait for `work`, a collective. If `work` is None, the backend has already made the stream wait."""
    if work is not None:
        work.wait()


_LOOK_S = 0.1  # interval at which a wait for a collective checks the group


def sendable(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or for fp8 a uint8 view of it: gloo and older NCCL versions cannot send fp8."""
    return x.view(torch.uint8) if x.itemsize == 1 and x.dtype.is_floating_point else x


def completed(work: dist.Work, seconds: float) -> bool:
    """Wait at most `seconds` for `work`, a collective of gloo. Return True if the work has ended. Raise `RuntimeError` if it
    has failed.
    """
    try:
        work.wait(datetime.timedelta(seconds=max(0.001, seconds)))
        return True
    except RuntimeError:  # the work failed, or this wait timed out
        if not work.is_completed():
            return False
        if work.is_success():  # completed after this wait timed out, if the process was stopped
            return True
        raise


def finish(
    work: dist.Work, comm: Communicator, what: str, deadline_s: float, *held: object,
    absent: Callable[[], list[int]] | None = None,
) -> None:  # fmt: skip
    """Wait for `work`, a collective that this rank has begun on CPU.

    what: the collective's name, for error texts.
    held: objects that gloo's threads may use, such as the collective's tensors. After an error they are never freed.
    absent: for error texts, a function that returns the ranks that have not begun the collective.

    Raise `DeadlineError` after `deadline_s` seconds, or the group's error if the group fails meanwhile. After an error the
    group is unusable.
    """
    group = comm.group
    try:
        finish_by(partial(completed, work), comm, what, deadline_s, absent, " in torch.distributed")
    except BaseException:
        leave(group, work, held)
        raise


def finish_by(
    ended: Callable[[float], bool], comm: Communicator, what: str, deadline_s: float,
    absent: Callable[[], list[int]] | None = None, where: str = "",
) -> None:  # fmt: skip
    """Wait until an exchange that this rank has begun on CPU has ended. Raise the errors of `finish`.

    ended: a function that waits for at most the given number of seconds, and returns True if the exchange has ended. It raises
        `RuntimeError` if the exchange has failed.
    what: the name of the exchange, for error texts.
    absent: for error texts, a function that returns the ranks that have not begun the exchange.
    where: the library that runs the exchange, for error texts.
    """
    until = time.monotonic() + deadline_s
    try:
        while True:
            try:
                if ended(min(_LOOK_S, until - time.monotonic())):
                    return
            except RuntimeError as error:
                time.sleep(_LOOK_S)  # a connection may report a lost peer before weft's watchdog does
                comm.check()
                if absent is not None:
                    absent()
                raise WeftError(f"rank {comm.rank}: {what} failed{where}: {error}") from error
            comm.check()
            missing = [] if absent is None else absent()
            if time.monotonic() >= until:
                if absent is not None:
                    time.sleep(_LOOK_S)  # for answers of peers, or an error of a peer that knows more
                    missing = absent()
                whom = f" from {and_list([comm.name(rank) for rank in missing])}" if missing else ""
                raise DeadlineError(
                    f"rank {comm.rank} waited {deadline_s:g} s for {what}{whom}: expected all {comm.world_size} ranks, "
                    "but some are missing. Check that all ranks made the same call"
                )
    except BaseException as error:
        # This poisons the group, unless it has already failed.
        comm.poison(str(error) if isinstance(error, WeftError) else f"{what}: {error!r}")
        raise


def leave(*held: object) -> None:
    """Never free these objects, not even at interpreter exit, because gloo's threads may still use them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
