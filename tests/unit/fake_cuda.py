"""A fake CUDA driver for `_core.StreamProgram`, compiled by the tests. It records every call and executes it at once,
on ordinary memory, so that tests can check the effects.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from weft import _core

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
SOURCE = Path(__file__).with_name("fake_cuda.c")


def compiled(folder: Path, *flags: str) -> Driver:
    """Compile the driver. flags: compiler flags that remove functions which some real drivers lack."""
    assert COMPILER is not None
    path = folder / "libfakecuda.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", *flags, "-o", path, SOURCE], check=True)
    return Driver(str(path))


class _Call(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("stream", ctypes.c_uint64), ("numbers", ctypes.c_uint64 * 8))


@dataclass
class Driver:
    path: str

    def __post_init__(self):
        self.library = ctypes.CDLL(self.path)

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    def program(self, n_bases: int, n_streams: int, n_events: int) -> _core.StreamProgram:
        program = _core.StreamProgram(n_bases, n_streams, n_events, self.path)
        self["n_calls"] = 0
        return program

    def kernel(self, number: int, programs: int = 1, threads: int = 32, shared_bytes: int = 0) -> _core.KernelCall:
        return _core.KernelCall(self.handle(number), programs, threads, shared_bytes)

    def handle(self, number: int) -> int:
        """Return the handle of a kernel of the fake driver."""
        return ctypes.addressof((ctypes.c_size_t * 36).in_dll(self.library, "kernels")) + 72 * number

    def last_map(self) -> list[int]:
        """Return the words of the tensor map that was encoded last."""
        return (ctypes.POINTER(ctypes.c_uint64).in_dll(self.library, "last_map"))[:13]

    def calls(self) -> list[tuple]:
        """Return the calls since the last query, each as (name, stream handle, the call's numbers padded with 0)."""
        noted = (_Call * 256).in_dll(self.library, "calls")[: self["n_calls"]]
        self["n_calls"] = 0
        return [(call.name.decode(), call.stream, *call.numbers) for call in noted]


def call(name: str, stream: int, *numbers: int) -> tuple:
    return (name, stream, *numbers, *[0] * (8 - len(numbers)))
