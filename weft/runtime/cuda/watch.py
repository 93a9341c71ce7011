"""Deadlines for streams. A stream that waits for a value has no deadline, so a thread checks that runs make progress.

When a run of a schedule begins on the device, it sets a mark in pinned memory. The thread reads and clears the mark without
calling CUDA. If no new mark appears before the deadline, the thread copies the flags from the device, to find out if the
last run is blocked in a wait. If it is, the thread names the wait and poisons the group, which releases the streams.
Otherwise the thread copies nothing more until the next run begins.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from typing import Protocol

_LOOK_S = 0.05
_log = logging.getLogger("weft")


class Watched(Protocol):
    deadline_s: float

    def has_begun(self) -> bool:
        """True if a run has begun on the device since the last call of this method. The watching thread calls it often, so it
        must not call CUDA.
        """

    def standing_still(self, seconds: float) -> None:
        """Check if the last run is blocked. The watching thread calls this method once if no new run has begun for `seconds`, a
        time above the deadline.
        """


class OwnDeadlines:
    """The base class of executors whose kernels measure their own deadlines. The watching thread only calls `look`."""

    deadline_s = math.inf

    def look(self) -> None:
        """Make the group fail if the device has recorded a failure. This method must not call CUDA."""
        raise NotImplementedError

    def has_begun(self) -> bool:
        self.look()
        return False

    def standing_still(self, seconds: float) -> None:
        raise AssertionError("this executor measures its own deadline, so the watching thread must not")


class Watch:
    """A thread that watches all executors of a process, and ends when there are no executors left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The time at which the last run was seen to begin, and True if this run has been checked.
        self._seen: weakref.WeakKeyDictionary[Watched, tuple[float, bool]] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    def add(self, one: Watched) -> None:
        with self._lock:
            self._seen[one] = (time.monotonic(), True)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="weft-stream-watch", daemon=True)
                self._thread.start()

    def remove(self, one: Watched) -> None:
        with self._lock:
            self._seen.pop(one, None)

    def _watch(self) -> None:
        while True:
            with self._lock:
                if not self._seen:
                    self._thread = None
                    return
            self._look()
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock:
            seen = list(self._seen.items())
        for one, (since, settled) in seen:
            if one.has_begun():
                self._note(one, now, False)
            elif not settled and now - since > one.deadline_s:
                self._note(one, since, True)
                try:
                    one.standing_still(now - since)
                except Exception:
                    _log.exception("an error in the search for the signals that a stream waits for")

    def _note(self, one: Watched, since: float, settled: bool) -> None:
        with self._lock:
            if one in self._seen:  # `one` may have been removed meanwhile
                self._seen[one] = (since, settled)


watch = Watch()
