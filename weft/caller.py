"""Who called weft: the line that warnings point at and that checks of calls name, however deep inside the call they are made.

A number of frames to go up is right for one way in only: a call may come by autograd, by a module or by a compiled program.
So the frames are looked at. On the way up torch's own are passed by too, since they lie between a module or an autograd
Function and the line that called it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_NOT_CALLERS = ("weft", "torch")


def _frame() -> FrameType:
    frame = sys._getframe(2)
    # Code that torch makes has no module; where nobody else called, as on a thread of torch's, the outermost frame stands.
    while frame.f_globals.get("__name__", "torch").partition(".")[0] in _NOT_CALLERS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def caller() -> str:
    """ "train.py:12": file and line."""
    frame = _frame()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_said: set[str] = set()


def warn_once(message: str) -> None:
    """`warn`, of the same message once in a process."""
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
