"""What became of process groups: why one cannot be used any more, and who wants to be told.

By group and not by domain: one that has failed on a type of device has failed, and stays so when its domains are closed.
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
    """Have `callback(error)` called when `group` fails: a rank died, was late, left too early, or met an error in a call.

    For launchers that go on with the ranks that are left. `error` says what happened: a `PeerLostError`, whose `rank` is the one
    that is lost, or a `PoisonedGroupError`. Every rank that lives is told, whether it computes, waits or sleeps.

    Once at most, on weft's thread that watches the group, right after what waits for a peer has been released; at once, on this
    thread, if the group has failed already. Be short there, and call no collective: note the error, set an event, end the
    process. A callback that still runs when the group is closed or the process exits is waited for, for 2 seconds at most. What
    the callback raises is logged. A group that ends in order (it is destroyed, the process exits) has not failed.

    Not collective. weft watches a group from the first call of weft on it; a group that no call was made on does not fail.

    Returns a function that takes the registration back. Raises `ValueError` if this rank cannot make calls on `group`.
    """
    require_member(group)
    mine: dict[object, Callback] = _callbacks.setdefault(group, {})
    key = object()
    mine[key] = callback
    if group in _failures and mine.pop(key, None) is not None:  # else the watchdog has taken it
        callback(_failures[group])

    def take_back() -> None:
        mine.pop(key, None)

    return take_back


def of(group: dist.ProcessGroup) -> WeftError | None:
    """The failure of this group, if it has failed."""
    return _failures.get(group)


def remember(group: dist.ProcessGroup, error: WeftError) -> None:
    """The first one counts."""
    _failures.setdefault(group, error)


def tell(group: dist.ProcessGroup, rank: int) -> None:
    """Call what waits for the failure that is remembered. Each is taken before it is called, so that it is called once."""
    waiting = _callbacks.get(group, {})
    for key in list(waiting):
        callback = waiting.pop(key, None)
        if callback is not None:
            with logged(rank):
                callback(_failures[group])


@contextlib.contextmanager
def logged(rank: int) -> Iterator[None]:
    """Around what is told of a failure: its own may not keep others from hearing."""
    try:
        yield
    except BaseException:
        _log.exception("rank %d: a callback for the group's failure failed itself", rank)
