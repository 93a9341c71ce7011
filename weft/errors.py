"""Named errors: faults between ranks, with the values, so that a hang or a bad input has a name.

Bad arguments are plain `ValueError` / `TypeError`, and bad files an `UnreadableError`. Faults that involve other ranks are
a `WeftError`.
"""

from __future__ import annotations


class UnreadableError(ValueError):
    """A file or message is not a regular file, exceeds a limit, or is not in its format. The message names it and the
    reason."""


class WeftError(RuntimeError):
    """Base of every error that weft raises about ranks, memory or signals."""


class DeadlineError(WeftError):
    """A wait outlasted its deadline. The message names the rank, the signal, and the wanted and found values or the missing
    setter."""


class PeerLostError(WeftError):
    """A rank of the group died or closed its end while others still needed it.

    rank: the lost rank's number in the group; None if several ranks are lost, or if it is unknown.
    """

    def __init__(self, text: str = "", rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class RefusedError(WeftError, ValueError):
    """A rank refused a call because of bad input; raised on every rank of the group, nothing was written."""


class PoisonedGroupError(WeftError):
    """An earlier failure left this group unusable. The message repeats the failure; make a new group to continue."""


class DisagreementError(WeftError, ValueError):
    """Ranks called the same collective with different descriptions (tables, dtype, sizes ...)."""


class TooManyRowsError(WeftError, ValueError):
    """More rows arrived at this rank than the caller left room for. The message has their number; the group stays usable."""


class OutOfSharedMemoryError(WeftError, MemoryError):
    """Symmetric memory could not be reserved. The message has the wanted and the free size."""


class ScheduleError(WeftError, ValueError):
    """A schedule would hang, race, or read missing data. The message names ranks, lanes and steps."""


class SimulationError(WeftError):
    """A simulation contradicts its model: a collective ended before its links could have carried its bytes."""
