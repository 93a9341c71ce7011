"""The interface of executors. An executor prepares a schedule for one rank of a group, runs it many times, and is closed
once.

    weft.runtime.null   visits the steps in a valid order, but executes none
    weft.runtime.cpu    runs each lane on a thread, in memory that processes share
    weft.runtime.cuda   runs each lane on a stream, with copy engines

All ranks must construct an executor together. They compare schedules, raise an error if the schedule cannot run on a rank,
and allocate memory. If an executor does not implement a step kind, it refuses the schedule, and names the step.

`weft.runtime.unfused` is not an executor: it runs the steps of the serial schedule as torch calls, and keeps no memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

from weft import _core
from weft.schedule import Schedule
from weft.symm import Communicator
from weft.timeline import Timeline


class Executor(ABC):
    """The interface of executors. The methods implemented here suit executors that keep no GPU memory."""

    schedule: Schedule
    comm: Communicator

    @abstractmethod
    def run(
        self,
        tensors: dict[str, Any],
        *,
        deadline_s: float | None = None,
        timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> dict[str, Any]:
        """Run the schedule once. All ranks must make this call. Return the outputs with a dynamic number of rows, by name.

        tensors: every input and output buffer by name. For an output with a dynamic number of rows, pass a function that
            gets the number of rows, and returns a tensor.
        deadline_s: the longest wait for another rank, in seconds. timeline: receives a span for every step of this rank.
        like_before: True if only the addresses of the tensors differ from an earlier run. Then skip checks of the tensors.

        Raises `ValueError` for a tensor with a wrong shape or dtype, before anything is written.
        """

    def known_run(
        self, inputs: dict[str, Any], outputs: dict[str, Any], results: Sequence[str], deadline_s: float | None
    ) -> _core.KnownRun | None:
        """Return an object with which native code makes further runs that differ from an earlier run only in the addresses of
        tensors. Return None if Python must make them.

        inputs, outputs: tensors like those of each run, by name. Native code gets the inputs in this order, and allocates the
            outputs. results: the names of the outputs to return. deadline_s: as for `run`.
        """
        return None

    def warm_up(self, tensors: dict[str, Any]) -> None:
        """Load the kernels that a run with tensors of these shapes and dtypes would launch, but launch none. Call it before
        a graph captures a run. Ranks do not communicate.
        """
        return

    @property
    def read(self) -> Mapping[str, Sequence[int]]:
        """The buffers with dynamic sizes that the CPU has read in the last run: {buffer: its contents, flattened}."""
        return {}

    def check(self) -> None:
        """Raise the error of an earlier run, if a device or a peer has reported one. Do not wait for the device."""
        self.comm.check()

    @abstractmethod
    def close(self) -> None:
        """Release all memory. Each rank may close on its own, but not during a run. Repeated calls have no effect."""

    @property
    def was_captured(self) -> bool:
        """True if a captured graph that uses the executor's memory may be replayed."""
        return False

    @property
    def stale(self) -> bool:
        """True if the memory that executors of the group share has grown since this executor was made. A new executor should
        then replace this one.
        """
        return False

    @property
    def gone(self) -> bool:
        """True if the executor cannot run any more."""
        return False

    @property
    def shared(self) -> bool:
        """True if this executor uses memory and threads that other executors use too. A cache may then keep the executor at
        little cost.
        """
        return False

    @property
    def lent(self) -> int:
        """The number of results that callers still use and that are in the executor's memory."""
        return 0

    @property
    def nbytes(self) -> int:
        """The executor's symmetric GPU memory in bytes."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
