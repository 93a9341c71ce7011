"""Native code calls a sort of pairs by its address, with the arguments that `ATen/cuda/cub.h` declares."""

from __future__ import annotations

import ctypes
from typing import Any

from weft import _core

PARAMETERS = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_bool, ctypes.c_int64, ctypes.c_int64]


def test_the_librarys_sort_gets_all_arguments() -> None:
    given: list[Any] = []
    sort = ctypes.CFUNCTYPE(None, *PARAMETERS)(lambda *arguments: given.extend(arguments))
    address = ctypes.cast(sort, ctypes.c_void_p).value
    assert address is not None
    _core.sort_pairs(address, 16, 32, 48, 64, count=2**33, bits=27)
    assert given == [16, 32, 48, 64, 2**33, False, 0, 27]
