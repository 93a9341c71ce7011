"""Triton kernels as operations of a `_core.StreamProgram`, which launches them without Python.

Triton's own launch takes more CPU time than the rest of a small call. So a program launches the kernel through the driver.
The program passes the parameters of the kernel's signature, followed by pointers to scratch memory, which must be of size
0. Some Triton versions may compile kernels with other parameters, so `kernel_call` compares the sizes of the parameters with the
driver's. If they differ, or if the driver cannot tell, Triton launches the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from weft import _core


class Base(NamedTuple):
    """An address in a `_core.StreamProgram`: the index of a base address, which each run passes, and an offset in bytes."""

    number: int
    offset: int


class Grid(NamedTuple):
    """The grid of a kernel launch, if its two sizes may differ in each run. A run passes the sizes in its list of base
    addresses: x and y are their indices in this list.
    """

    x: int
    y: int


Argument: TypeAlias = "int | torch.Tensor | Base"
_BYTES = {"i32": 4, "i64": 8}
_MOST_SCRATCH = 2  # most pointers that Triton adds to a kernel's parameters
_UNUSUAL = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
"""The kernel metadata for which a plain launch is not enough."""


def loaded(device: torch.device, compile_kernel: Callable[[], Any]) -> Any:
    """Compile and load a kernel. Loading it later, while a stream waits for a peer, could hang the device."""
    with torch.cuda.device(device):
        compiled = compile_kernel()
        compiled._init_handles()
    return compiled


def loaded_kernel(
    device: torch.device, kernel: Any, arguments: list[Any], warps: int, constants: dict[str, Any]
) -> Any:
    """Compile and load a kernel for these arguments."""
    return loaded(device, lambda: kernel.warmup(*arguments, grid=(1,), num_warps=warps, **constants))


def record_one_of(
    program: _core.StreamProgram, stream: int, calls: Sequence[tuple[int, _core.KernelCall | None]]
) -> bool:
    """Record a launch of one of several compiled variants into `program`. In each run, the first variant whose alignment
    matches the addresses is launched. Return False if only Triton can launch one of the variants.

    calls: (alignment in bytes, call) of each variant. A call is None if only Triton can launch it.
    """
    known = [(step, call) for step, call in calls if call is not None]
    if len(known) == len(calls):
        program.launch(stream, known)
    return len(known) == len(calls)


def kernel_call(
    program: _core.StreamProgram, compiled: Any, programs: int | Grid, arguments: Sequence[Argument]
) -> _core.KernelCall | None:
    """Return a launch of the kernel `compiled` for `program`, or None if only Triton can launch the kernel.

    programs: the size of the grid. arguments: the kernel's arguments, without constants. The caller must keep tensors among
        them alive as long as the program.
    """
    metadata, types = compiled.metadata, [t for t in compiled.src.signature.values() if t != "constexpr"]
    declared = [8 if t.startswith("*") else _BYTES.get(t) for t in types]
    sizes = program.parameters_of(compiled.function)
    scratch = sizes[len(declared) :]
    if (
        torch.version.hip is not None
        or len(declared) != len(arguments)
        or sizes[: len(declared)] != declared
        or len(scratch) > _MOST_SCRATCH
        or any(size != 8 for size in scratch)
        or any(getattr(metadata, name, 0) for name in _UNUSUAL)
        or getattr(metadata, "num_ctas", 1) != 1
    ):
        return None
    count = 1 if isinstance(programs, Grid) else programs
    call = _core.KernelCall(compiled.function, count, 32 * metadata.num_warps, metadata.shared)
    if isinstance(programs, Grid):
        call.grid(programs.x, programs.y)
    for argument in arguments:
        if isinstance(argument, Base):
            call.base(argument.number, argument.offset)
        else:
            call.number(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
    for _ in scratch:
        call.number(0)
    return call


def direct_program(compiled: Any, arguments: int) -> _core.StreamProgram | None:
    """Return a program that launches the kernel `compiled`, in a third of the CPU time of Triton's launch; None if only
    Triton can launch it.

    The program's input is the two sizes of the grid, then `arguments` addresses or numbers.
    """
    program = _core.StreamProgram(2 + arguments, 1, 0)
    call = kernel_call(program, compiled, Grid(0, 1), [Base(2 + i, 0) for i in range(arguments)])
    if call is None:
        return None
    program.launch(0, [(1, call)])
    return program
