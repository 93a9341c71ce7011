"""Failures of process groups, and callbacks for them. A failed group stays failed after its communicators are closed."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch.distributed as dist

from weft.errors import WeftError
from weft.symm.groups import require_member

Callback: TypeAlias = Callable[[WeftError], object]

_failures: weakref.WeakKeyDictionary[dist.ProcessGroup, WeftError] = weakref.WeakKeyDictionary()
_callbacks: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Callback]] = weakref.WeakKeyDictionary()
_log = logging.getLogger("weft")


def on_failure(group: dist.ProcessGroup, callback: Callback) -> Callable[[], None]:
    """Register `callback(error)`, which weft calls once when `group` fails. Return a function that removes the
    callback.

    A group fails if a rank dies, is late, leaves while others need it, or raises an error in a call. Use the callback
    to continue with the remaining ranks. `error` is a `PeerLostError`, whose `rank` is the lost rank, or a
    `PoisonedGroupError`. Every living rank is notified, whether it computes, waits or sleeps.

    The callback runs on weft's watchdog thread, right after all waits of the group have ended. If the group has already
    failed, the callback runs immediately on this thread. Keep the callback short, and call no collective in it: record
    the error, set an event, or end the process. If the group is closed or the process exits while a callback runs, weft
    waits at most 2 seconds for the callback. Exceptions of the callback are logged. Destroying a group, or exiting its
    process, is not a failure.

    Each rank registers its own callbacks. weft watches a group from the first weft call on the group. A group without
    calls does not fail.

    Raises `ValueError` if this rank cannot make calls on `group`.
    """
    require_member(group)
    mine: dict[object, Callback] = _callbacks.setdefault(group, {})
    key = object()
    mine[key] = callback
    if group in _failures and mine.pop(key, None) is not None:  # otherwise the watchdog has taken it
        callback(_failures[group])

    def take_back() -> None:
        mine.pop(key, None)

    return take_back


def of(group: dist.ProcessGroup) -> WeftError | None:
    """Return the failure of this group, or None."""
    return _failures.get(group)


def remember(group: dist.ProcessGroup, error: WeftError) -> None:
    """Record the failure of a group, unless it already has one."""
    _failures.setdefault(group, error)


def tell(group: dist.ProcessGroup, rank: int) -> None:
    """Run the callbacks that this rank has registered for `group`, each once, with the group's recorded failure.

    rank: this rank, for log messages.
    """
    waiting = _callbacks.get(group, {})
    for key in list(waiting):
        callback = waiting.pop(key, None)
        if callback is not None:
            with logged(rank):
                callback(_failures[group])


@contextlib.contextmanager
def logged(rank: int) -> Iterator[None]:
    """Log an exception that a callback raises in the body of this context manager, so that other callbacks still run."""
    try:
        yield
    except BaseException:
        _log.exception("rank %d: a callback that was registered with weft.on_failure raised an error", rank)
