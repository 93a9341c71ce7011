"""Words in sentences: numbers of things, what kind of thing something is, where the caller is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = str(Path(__file__).parent) + os.sep


def counted(count: int, noun: str, plural: str = "") -> str:
    """ "1 rank", "2 ranks". plural: where it is not the noun and an "s"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def kind(thing: object) -> str:
    """ "a list", "an int": of what type it is."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def caller() -> str:
    """ "train.py:12": the file and line outside weft from which it was called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
