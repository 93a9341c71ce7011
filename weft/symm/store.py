"""Queries of a process group's store, with a deadline.

A process, the launcher or rank 0, serves the store. If this process is stopped (not ended), torch waits for its answer
forever: it ignores the store's timeout, and Ctrl-C cannot interrupt the wait. So a separate thread makes the queries.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch.distributed as dist

from weft.errors import DeadlineError

_GRACE_S = 0.5  # time limit of queries after the deadline, or after an unanswered query


class PatientStore:
    """The store of a process group, queried by `rank`.

    until: the deadline of all queries, as a time of `time.monotonic()`. Methods raise `DeadlineError` if the store has
        not answered by then, and the store's own errors.
    """

    def __init__(self, store: dist.Store, rank: int, until: float) -> None:
        self._store, self._rank, self._until = store, rank, until
        self._asked: queue.SimpleQueue[tuple[str, tuple[Any, ...], queue.SimpleQueue] | None] = queue.SimpleQueue()
        self._is_stuck = False  # True if a query was abandoned, at the deadline or by Ctrl-C
        # The first query starts the thread, inside the caller's `finally`. If the constructor started it, Ctrl-C in the
        # constructor would leave a thread that nothing ends.
        self._thread: threading.Thread | None = None
        self._is_started = False

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def close(self) -> None:
        """End the thread that makes the queries, when the store has answered the last query."""
        self._asked.put(None)

    def _start(self) -> None:
        """Start the thread that makes the queries. If the process cannot start another thread, the caller's thread makes the
        queries, so that this rank can still publish its error.
        """
        self._is_started = True
        self._thread = threading.Thread(target=self._answer, name=f"weft-store-{self._rank}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def _ask(self, method: str, *given: Any) -> Any:
        if not self._is_started:
            self._start()
        if self._thread is None:
            return getattr(self._store, method)(*given)
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        left = 0.0 if self._is_stuck else self._until - time.monotonic()
        self._asked.put((method, given, answer))
        self._is_stuck = True
        try:
            succeeded, value = answer.get(timeout=max(_GRACE_S, left))
        except queue.Empty:
            raise DeadlineError(
                f"rank {self._rank} waited for the store of this process group to answer, and could not set up symmetric "
                "memory. The process that serves the store, rank 0 or the launcher, is stopped or gets no CPU time: let it run"
            ) from None
        self._is_stuck = False
        if not succeeded:
            raise value
        return value

    def _answer(self) -> None:
        while (question := self._asked.get()) is not None:
            method, given, answer = question
            try:
                answer.put((True, getattr(self._store, method)(*given)))
            except Exception as error:
                answer.put((False, error))
