"""Launches of Triton kernels by their handles, for calls whose CPU time matters.

`kernel[grid](...)` inspects every argument in Python. `launch` finds the compiled kernel by dtypes, alignments and
constants. It launches the kernel through a `_core.StreamProgram`, to which each call passes the addresses, the numbers
and the grid.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from weft import _core
from weft.runtime.cuda.kernel_call import direct_program, loaded


class _Programs(threading.local):
    """The programs of this thread. The autograd engine's threads launch too, and a program runs in one thread at a time."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], _core.StreamProgram | None] = {}


_programs = _Programs()


def launch(
    kernel: Any, grid: tuple[int, int], arguments: Sequence[torch.Tensor | int], *, warps: int = 4, **constants: Any
) -> None:
    """Enqueue a Triton kernel on the current stream.

    arguments: tensors and non-negative numbers, in the order of the kernel's parameters, without its constants. The
        kernel must not specialize numbers (`do_not_specialize`). The first launch with new dtypes, alignments or
        constants compiles the kernel.
    """
    places: list[int] = []
    key: list[Any] = [id(kernel), warps, *constants.items()]
    aligned = 0
    for given in arguments:
        if isinstance(given, int):
            places.append(given)
            key.append(given >> 31 > 0)  # Triton passes small numbers as 32 bits
        else:
            places.append(address := given.data_ptr())
            key.append(given.dtype)
            aligned = aligned << 1 | (address % 16 == 0)  # a compiled kernel may rely on the alignment
    if isinstance(kernel, JITFunction):  # the interpreter has no handles
        device = torch._C._cuda_getDevice()
        known, programs = (device, aligned, *key), _programs.known
        if known not in programs:
            programs[known] = _program(kernel, torch.device("cuda", device), arguments, warps, constants)
        if program := programs[known]:
            program.run(0, 1, (*grid, *places), (torch._C._cuda_getCurrentRawStream(device),))
            return
    kernel[*grid, 1](*arguments, num_warps=warps, **constants)


def _program(
    kernel: JITFunction[Any],
    device: torch.device,
    arguments: Sequence[torch.Tensor | int],
    warps: int,
    constants: dict[str, Any],
) -> _core.StreamProgram | None:
    """Compile the kernel, and return its `direct_program`."""
    for parameter, given in zip(kernel.params, arguments, strict=False):
        if isinstance(given, int) and not parameter.do_not_specialize:
            raise TypeError(f"{kernel.__name__} specializes {parameter.name}: add it to do_not_specialize")
    compiled = loaded(device, lambda: kernel.warmup(*arguments, grid=(1,), num_warps=warps, **constants))
    return direct_program(compiled, len(arguments))
