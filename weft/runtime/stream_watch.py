"""Deadlines for streams: a stream that waits for a value has none of its own, so a thread looks whether runs get on.

Every run of a schedule leaves its epoch in a word of pinned host memory when it starts on the device. Looking at that word
calls nothing of CUDA. When it has stood still for the deadline, the words that the run waits for are read from the device:
if one is missing, the run is stuck, the wait is named, and the group is poisoned, which releases its streams; if none is,
there was simply nothing to do, and nothing is read again until the next run starts.
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

    def started(self) -> int:
        """The last epoch that has started on the device. Calls nothing of CUDA."""

    def standing_still(self, epoch: int, seconds: float) -> None:
        """Called once for an epoch that has been the last to start for the deadline."""


class Watch:
    """One thread for all executors of a process. It ends when there is nothing left to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # What was seen last, since when, and whether that has been looked into.
        self._seen: weakref.WeakKeyDictionary[Watched, tuple[int, float, bool]] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    def add(self, one: Watched) -> None:
        with self._lock:
            self._seen[one] = (0, time.monotonic(), True)
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
        for one, (epoch, since, settled) in list(self._seen.items()):
            started = one.started()
            if started != epoch:
                self._seen[one] = (started, now, False)
            elif not settled and now - since > one.deadline_s:
                self._seen[one] = (epoch, since, True)
                try:
                    one.standing_still(epoch, now - since)
                except Exception:
                    _log.exception("looking for what a stream waits for failed")


watch = Watch()
