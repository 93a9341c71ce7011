"""torch's collectives under the names that this torch has for them, and how a rank waits for one on CPU.

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

from weft.errors import DeadlineError, WeftError
from weft.symm import Domain

# From torch 2.13 on `all_gather_into_tensor` and `reduce_scatter_tensor` are deprecated in favour of these names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

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
