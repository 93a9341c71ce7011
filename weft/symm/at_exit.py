"""The end of the process: close what must be closed, and let other threads leave native code first."""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

_COME_OUT_S = 1.0  # longest time that the exit of the process waits for threads to leave native code
_LET_GO_S = 0.1  # time after that for the threads' clean-up
_WATCHING = "weft-watchdog", "weft-stream-watch", "weft-spoil"  # prefixes of thread names
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_hook_of = 0  # pid


def close_at_exit(close: Callable[[], None]) -> None:
    """Register `close`, a function that ends all native waits, to be called at interpreter exit. Later calls of
    `close_at_exit` have no effect.
    """
    # Use multiprocessing's exit hook, because its child processes end without running the functions of `atexit`.
    global _hook_of
    if _hook_of != os.getpid():
        _hook_of = os.getpid()
        multiprocessing.util.Finalize(None, partial(_leave, close), exitpriority=100)


def _leave(close: Callable[[], None]) -> None:
    """Call `close`. Then give daemon threads time to leave native code (`_COME_OUT_S`) and to free their tensors
    (`_LET_GO_S`). A thread that does this after the interpreter has ended would abort the process.
    """
    came_out = threads_inside()
    close()
    until = time.monotonic() + _COME_OUT_S
    while (inside := threads_inside()) and time.monotonic() < until:
        came_out |= inside
        time.sleep(0.001)  # lets these threads acquire the GIL
    until = time.monotonic() + _LET_GO_S
    while came_out & sys._current_frames().keys() and time.monotonic() < until:
        time.sleep(0.001)


def threads_inside() -> set[int]:
    """Return the ids of other threads that run weft's code, or native code called by weft. Threads that only watch for
    failures (`_WATCHING`) are omitted: they call nothing that could abort the process at exit.
    """
    watching = {thread.ident for thread in threading.enumerate() if thread.name.startswith(_WATCHING)}
    return {
        thread
        for thread, frame in sys._current_frames().items()
        if thread != threading.get_ident() and thread not in watching and _is_inside(frame)
    }


def _is_inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return True
        frame = frame.f_back
    return False
