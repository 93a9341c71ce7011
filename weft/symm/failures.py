"""Failures of process groups, and callbacks for them.

Failures belong to groups and not to communicators: a group that has failed on a type of device stays failed when its
communicators are closed.
"""

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
    """Register `callback(error)`, which weft calls when `group` fails: a rank died, was late, left too early, or raised
    an error in a call.

    Use it to continue with the remaining ranks. `error` is a `PeerLostError`, whose `rank` is the lost rank, or a
    `PoisonedGroupError`. Every living rank is notified, whether it computes, waits or sleeps.

    The callback runs at most once, on weft's thread that watches the group, right after waits for peers have been released. If
    the group has failed already, it runs at once, on this thread. Keep it short, and call no collective in it: note the error,
    set an event, end the process. If the group is closed or the process exits while a callback runs, weft waits for it, at most 2
    seconds. Exceptions of the callback are logged. A group that is destroyed, or whose process exits, has not failed.

    Not collective. weft watches a group from weft's first call on it; a group without calls does not fail.

    Returns a function that removes the callback. Raises `ValueError` if this rank cannot make calls on `group`.
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
    """Return the failure of this group; None if it has not failed."""
    return _failures.get(group)


def remember(group: dist.ProcessGroup, error: WeftError) -> None:
    """Record the failure of a group. Only the first is kept."""
    _failures.setdefault(group, error)


def tell(group: dist.ProcessGroup, rank: int) -> None:
    """Call the callbacks with the recorded failure. Each is removed before its call, so that it is called once."""
    waiting = _callbacks.get(group, {})
    for key in list(waiting):
        callback = waiting.pop(key, None)
        if callback is not None:
            with logged(rank):
                callback(_failures[group])


@contextlib.contextmanager
def logged(rank: int) -> Iterator[None]:
    """Log an exception of a callback, so that other callbacks still run."""
    try:
        yield
    except BaseException:
        _log.exception("rank %d: a callback for the group's failure itself failed", rank)
