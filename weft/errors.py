"""Named errors: what went wrong between ranks, with the values, so that a hang or a bad input has a name.

Bad arguments are plain `ValueError` / `TypeError`, bad files an `UnreadableError`; what involves other ranks is a `WeftError`.
"""

from __future__ import annotations


class UnreadableError(ValueError):
    """A file or message that is no regular file, is beyond a limit, or is not in its format. The message says which and why."""


class WeftError(RuntimeError):
    """Base of every error that weft raises about ranks, memory or signals."""


class DeadlineError(WeftError):
    """A wait outlasted its deadline. The message says rank, signal, and what was wanted and found, or who has not set it."""


class PeerLostError(WeftError):
    """A rank of the group died or closed its end while others still needed it.

    rank: which, as the group counts; None where it is not one alone, or not known.
    """

    def __init__(self, text: str = "", rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class RefusedError(WeftError, ValueError):
    """A rank refused a call because of bad input; raised on every rank of the group, nothing was written."""


class PoisonedGroupError(WeftError):
    """An earlier failure left this group unusable. The message repeats it; make a new group to go on."""


class DisagreementError(WeftError, ValueError):
    """Ranks called the same collective with different descriptions (tables, dtype, sizes ...)."""


class TooManyRowsError(WeftError, ValueError):
    """More rows came to this rank than the caller left room for. The message says how many; the group stays usable."""


class OutOfSharedMemoryError(WeftError, MemoryError):
    """Symmetric memory could not be reserved. The message says how much was wanted and what is free."""


class ScheduleError(WeftError, ValueError):
    """A schedule that would hang, race, or compute on what is not there. The message names ranks, lanes and steps."""
