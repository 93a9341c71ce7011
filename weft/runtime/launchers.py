"""The launchers of Triton kernels, for code that also runs without Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType


@functools.cache
def launchers(name: str) -> ModuleType | None:
    """Return the module `weft.runtime.cuda.NAME`; None without Triton, which a machine without GPUs may lack."""
    return None if importlib.util.find_spec("triton") is None else importlib.import_module(f"weft.runtime.cuda.{name}")
