"""The time that a group spends on compiling sizes that recur.

A call of a size that is not compiled runs unfused, at the cost of serial calls. Compiling a size takes milliseconds, and pays
only after many calls of this size. How often a size will recur is unknown. So a size that recurs is compiled only if the last
compilation took at most `MOST_SHARE` of the time since then. Then compilations take at most this share of a program's time, and
the sizes that recur most often are usually compiled first.

All ranks must make the same decision, but their clocks differ. So ranks exchange `calls_to_wait`, and all use the largest
number.
"""

from __future__ import annotations

import math
import time

from weft import _core

MOST_SHARE = 0.02
LEAST_CALLS = 16
"""After a compilation, at least this many calls of the group precede the next exchange of `calls_to_wait`."""


class Compilations:
    """The time of a group's last compilation.

    counts: the record of the group's calls. Its attribute `compile_from` is the number of the first call that may compile a
        size that recurs.
    """

    def __init__(self, counts: _core.CallCounts) -> None:
        self._counts = counts
        self._took_s = self._ended_s = 0.0
        self._ended_at = 0

    def ended(self, began_s: float) -> None:
        """Record that the current call has compiled a size. began_s: the time when it began (`time.monotonic`)."""
        self._ended_s, self._ended_at = time.monotonic(), self._counts.begun
        self._took_s = self._ended_s - began_s
        self.wait(LEAST_CALLS)

    def wait(self, calls: int) -> None:
        """Forbid the next `calls` calls of the group to compile a recurring size."""
        self._counts.compile_from = self._counts.begun + 1 + calls

    def calls_to_wait(self) -> int:
        """Return 0 if this rank may compile now. Otherwise estimate how many calls must come first."""
        since_s, wanted_s = time.monotonic() - self._ended_s, self._took_s / MOST_SHARE
        calls = max(1, self._counts.begun - self._ended_at)
        return 0 if since_s >= wanted_s else math.ceil(calls * (wanted_s - since_s) / max(since_s, 1e-6))
