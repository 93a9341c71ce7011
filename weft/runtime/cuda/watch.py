"""Deadlines for streams: a stream that waits for a value has none of its own, so a thread looks whether runs get on.

Every run of a schedule leaves a mark in a word of pinned host memory when it begins on the device, and the thread wipes it
away when it has seen it. Looking at that word calls nothing of CUDA. When there has been no new mark for the deadline, it is
read from the device whether the last run stands at a wait: if it does, the wait is named, and the group is poisoned, which
releases its streams; if not, there was simply nothing to do, and nothing is read again until the next run begins.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

_LOOK_S = 0.05
_log = logging.getLogger("weft")


class Watched(Protocol):
    deadline_s: float

    def has_begun(self) -> bool:
        """Whether a run has begun on the device since this was asked last. Calls nothing of CUDA."""

    def standing_still(self, seconds: float) -> None:
        """Called once when no run has begun for the deadline."""


class Watch:
    """One thread for all executors of a process. It ends when there is nothing left to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # When a run was seen to begin, and whether that has been looked into.
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
                    _log.exception("looking for what a stream waits for failed")

    def _note(self, one: Watched, since: float, settled: bool) -> None:
        with self._lock:
            if one in self._seen:  # it may have been removed meanwhile
                self._seen[one] = (since, settled)


watch = Watch()
