"""The failures that kernels report: a wait missed its deadline, or ranks disagree.

A kernel that fails writes a record to pinned memory, and ends. The next call, or the watching thread, reads the record and
makes the group fail. A record that is written after the group has failed is dropped: the failure has ended the kernel's wait.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from weft.errors import WeftError
from weft.kernels.signals import R_EPOCH, R_FOUND, R_STATUS
from weft.runtime.cuda.watch import OwnDeadlines, watch
from weft.symm import Communicator


class KernelFailures(OwnDeadlines):
    """The failures of the kernels of one exchange or executor.

    record: the pinned memory to which the kernels write (`weft.kernels.signals`).
    error: a method that returns the error of a record. Its arguments are the words status, epoch, peer, wanted and found. Only
        a weak reference to its object is kept, so that the watching thread does not keep the object alive.
    """

    def __init__(
        self, comm: Communicator, record: torch.Tensor, error: Callable[[int, int, int, int, int], WeftError]
    ) -> None:
        self.record = memoryview(cast(Any, record.numpy()))  # reading a number from it takes nanoseconds
        self._comm, self._error = comm, weakref.WeakMethod(error)
        self._failure: WeftError | None = None
        self._noting = threading.Lock()
        comm._holders.add(self)
        watch.add(self)
        comm.before_check(self.look)  # because the watching thread may be late

    def check(self) -> None:
        """Raise the error of an earlier call or of the group, if any. Do not wait for the device."""
        self.look()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._comm.check()

    def look(self) -> None:
        """Make the group fail if a kernel has recorded a failure."""
        if not self.record[R_STATUS]:
            return
        with self._noting:
            status, error = self.record[R_STATUS], self._error()
            self.record[R_STATUS] = 0
            if not status or error is None or self._comm.failed:
                return
            self._failure = error(status, *self.record[R_EPOCH : R_FOUND + 1])
            self._comm.poison(str(self._failure))

    def close(self) -> None:
        """Stop the checks by the watching thread."""
        watch.remove(self)
