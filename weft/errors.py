"""The errors of weft. Their texts name the values, ranks and files that are involved.

Bad arguments raise `ValueError` or `TypeError`, and bad files `UnreadableError`. Errors that involve other ranks are
subclasses of `WeftError`.
"""

from __future__ import annotations


class UnreadableError(ValueError):
    """A file or message is not a regular file, exceeds a limit, or has a wrong format. The text names the file and the
    reason.
    """


class WeftError(RuntimeError):
    """The base class of errors about ranks, memory, signals and schedules."""


class DeadlineError(WeftError):
    """A wait exceeded its deadline. The text gives the waiting rank, the signal with its expected and found values, and
    the ranks that are missing.
    """


class PeerLostError(WeftError):
    """A rank of the group died or closed its connection during a call.

    rank: the number of the lost rank in the group. None if several ranks are lost, or if the rank is not known.
    """

    def __init__(self, text: str = "", rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class RefusedError(WeftError, ValueError):
    """A rank refused a call because of bad input. Every rank of the group raises this error before anything is written."""


class BackwardError(WeftError, ValueError):
    """A backward of embeddings cannot run, because an earlier backward of the same call has updated the tables. If per-sample
    weights need gradients, a backward of another call counts too. In a group of several CPU ranks, every rank raises
    `RefusedError` instead.
    """


class PoisonedGroupError(WeftError):
    """An earlier failure has made this group unusable. The text repeats the failure. To continue, make a new group."""


class DisagreementError(WeftError, ValueError):
    """Ranks made different calls: different operators, or different arguments, such as tables, dtypes or sizes."""


class TooManyRowsError(WeftError, ValueError):
    """This rank received more rows than the caller allowed. The text gives the number. The group stays usable."""


class OutOfSharedMemoryError(WeftError, MemoryError):
    """Symmetric memory could not be allocated. The text gives the requested and the free size."""


class ScheduleError(WeftError, ValueError):
    """A schedule is not well-formed, would hang or race, or cannot run here. The text names ranks, lanes and steps."""


class SimulationError(WeftError):
    """A simulation contradicts its model: a collective ended before its links could transfer its bytes."""
