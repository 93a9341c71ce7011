"""Warnings that point at the line which called weft, however deep inside the call they are given.

A number of frames to go up is right for one way in only: a call may come by autograd, by a module or by a compiled program.
So the frames are looked at. On the way up torch's own are passed by too, since they lie between a module or an autograd
Function and the line that called it.
"""

from __future__ import annotations

import sys
import warnings

_OURS = ("weft", "torch")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    frame = sys._getframe(1)
    # Code that torch makes has no module; where nobody else called, as on a thread of torch's, the outermost frame stands.
    while frame.f_globals.get("__name__", "torch").partition(".")[0] in _OURS and frame.f_back is not None:
        frame = frame.f_back
    where = frame.f_globals
    registry = where.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, category, frame.f_code.co_filename, frame.f_lineno, where.get("__name__", "<unknown>"), registry
    )
