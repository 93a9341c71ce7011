"""The caller of weft: the line in user code that warnings and checks of calls name.

A fixed stack level is right for one entry point only: a call may be made by autograd, a module or a compiled program. So
this module inspects the frames. It skips torch's frames too, because they are between a module or an autograd Function and
its caller.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_NOT_CALLERS = ("weft", "torch")


def _frame() -> FrameType:
    frame = sys._getframe(2)
    # Code that torch generates has no module. Without another caller, as on a thread of torch's, use the outermost frame.
    while frame.f_globals.get("__name__", "torch").partition(".")[0] in _NOT_CALLERS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def caller() -> str:
    """ "train.py:12": file and line."""
    frame = _frame()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_said: set[str] = set()


def warn_once(message: str) -> None:
    """Call `warn`, but only once per message and process."""
    if message not in _said:
        _said.add(message)
        warn(message)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn`, of the line that called weft."""
    frame = _frame()
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<unknown>"), registry
    )
