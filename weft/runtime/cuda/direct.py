"""Launches of Triton kernels by their handles, for calls whose CPU time matters.

`kernel[grid](...)` inspects every argument in Python. `launch` only looks up the compiled kernel, by dtypes, alignments and
constants. A `_core.StreamProgram` then launches the kernel with the addresses, the numbers and the grid of the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from triton.runtime.jit import JITFunction

from weft import _core, env
from weft.runtime.cuda.kernel_call import Base, Grid, direct_program, kernel_call, loaded

_IS_INTERPRETED = env.triton_interpreted()  # the interpreter has no handles


class _Programs(threading.local):
    """This thread's cache of prepared launches, each a `_core.StreamProgram`. Each thread has a cache, because a program
    may run on only one thread at a time, and autograd launches from threads of its own.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], _core.StreamProgram | None] = {}
        self.of_several: dict[tuple[Any, ...], _core.StreamProgram | None] = {}


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
    """Compile the kernel for these arguments. Return a `_core.StreamProgram` that launches it, or None if only Triton can
    launch it.
    """
    return direct_program(_compiled(kernel, warps, constants, arguments, device), len(arguments))


def _compiled(
    kernel: JITFunction[Any], warps: int, constants: dict[str, Any], arguments: Sequence[Any], device: torch.device
) -> Any:
    """Compile and load the kernel for arguments of these types and alignments."""
    for parameter, given in zip(kernel.params, arguments, strict=False):
        if isinstance(given, int) and not parameter.do_not_specialize:
            raise TypeError(f"{kernel.__name__} specializes {parameter.name}: add it to do_not_specialize")
    return loaded(device, lambda: kernel.warmup(*arguments, grid=(1,), num_warps=warps, **constants))


class Kernel(NamedTuple):
    """A Triton kernel that `launch_all` launches, with its number of warps and its constants."""

    kernel: Any
    warps: int
    constants: dict[str, Any]


Call: TypeAlias = tuple[tuple[int, int], Sequence[Any]]
"""The grid and the arguments of a launch."""


def alignments(addresses: Sequence[int]) -> tuple[bool, ...]:
    """Return, for each address, True if it is a multiple of 16. Triton compiles a separate kernel for each such tuple."""
    return tuple([address % 16 == 0 for address in addresses])


def launch_all(
    key: tuple[Hashable, ...] | None,
    kernels: Callable[[], Sequence[Kernel]],
    calls: Callable[[bool], Sequence[Call]],
    after: torch.cuda.Stream | None = None,
) -> None:
    """Enqueue Triton kernels on the current stream, one after the other, in one native call.

    `launch` inspects each argument in every call. This function inspects arguments only for a new `key`, which saves CPU
    time.

    key: a value that determines the compiled kernels: dtypes, constants, and `alignments` of all addresses. With a key, all
        numbers must be below 2^31. With None, the kernels are launched by `launch`.
    kernels: a function that returns the kernels, called for a new key.
    calls: a function that returns the grid and the arguments of each launch. It is called with True to return tensors among the
        arguments, and with False to return their addresses instead.
    after: a stream; the kernels run after the work that is now enqueued on it.
    """
    if key is not None and not _IS_INTERPRETED:
        device = torch._C._cuda_getDevice()
        known, programs = (device, after is None, *key), _programs.of_several
        program = programs.get(known)
        if program is None and known not in programs:
            launches = list(zip(kernels(), calls(True), strict=True))
            program = programs[known] = _program_of_all(launches, torch.device("cuda", device), after is not None)
        if program is not None:
            here, bases = torch._C._cuda_getCurrentRawStream(device), list[int]()
            for grid, arguments in calls(False):
                bases += grid
                bases += arguments
            program.run(0, len(program), bases, (here,) if after is None else (here, after.cuda_stream))
            return
    if after is not None:
        torch.cuda.current_stream(after.device).wait_stream(after)
    for (kernel, warps, constants), (grid, arguments) in zip(kernels(), calls(True), strict=True):
        launch(kernel, grid, arguments, warps=warps, **constants)


def _program_of_all(
    launches: Sequence[tuple[Kernel, Call]], device: torch.device, waits: bool
) -> _core.StreamProgram | None:
    """Compile the kernels. Return a program that launches all of them, or None if only Triton can launch one of them. The
    program's input is, for each launch, the two sizes of the grid, and the arguments.

    waits: True if the program must begin with a wait for another stream.
    """
    compiled = [_compiled(*kernel, arguments, device) for kernel, (_, arguments) in launches]
    sizes = [2 + len(arguments) for _, (_, arguments) in launches]
    program, first = _core.StreamProgram(sum(sizes), 1 + waits, int(waits)), 0
    if waits:
        program.record(1, 0)
        program.wait_event(0, 0)
    for one, size in zip(compiled, sizes, strict=True):
        given = [Base(base, 0) for base in range(first + 2, first + size)]
        call = kernel_call(program, one, Grid(first, first + 1), given)
        if call is None:
            return None
        program.launch(0, [(1, call)])
        first += size
    return program
