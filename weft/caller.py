"""The line of user code that called weft, for warnings and for comparisons of calls.

User code, autograd, a module or a compiled program may make the call, so a fixed stack level does not work. This module
walks up the stack, and skips frames of weft and torch.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_NOT_CALLERS = ("weft", "torch")


def _frame() -> FrameType:
    frame = sys._getframe(2)
    # Code that torch generates has no module name. If there is no other caller, as on one of torch's threads, use the
    # outermost frame.
    while frame.f_globals.get("__name__", "torch").partition(".")[0] in _NOT_CALLERS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def caller() -> str:
    """Return the file and line of the caller, such as "train.py:12"."""
    frame = _frame()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_said: set[str] = set()


def warn_once(message: str) -> None:
    """Warn with this message once per process."""
    if message not in _said:
        _said.add(message)
        warn(message)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn as `warnings.warn` does, at the line that called weft."""
    frame = _frame()
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<unknown>"), registry
    )
