"""Triton's kernels among the operations of a `_core.StreamProgram`, which launches them without Python.

Triton compiles a kernel, loads it and can launch it, for which the host needs longer than for all else in a small call.
A program launches it through the driver, if the kernel is what it seems: parameters as its signature says them, then pointers
to scratch memory that it does not need. The driver is asked for their sizes, so that another version of Triton, which may
pass something else, is noticed when a schedule is compiled; then Triton launches, as it does where the driver cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from weft import _core


class Base(NamedTuple):
    """The address of a base of the program, and bytes from there."""

    number: int
    offset: int


Argument: TypeAlias = "int | torch.Tensor | Base"
_BYTES = {"i32": 4, "i64": 8}
_MOST_SCRATCH = 2  # pointers that Triton adds
_UNUSUAL = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
"""What needs more than a plain launch."""


def loaded(device: torch.device, kernel: Any, arguments: list[Any], warps: int, constants: dict[str, Any]) -> Any:
    """Compiled and on the device: loading a kernel behind a stream that waits could hang the device."""
    with torch.cuda.device(device):
        compiled = kernel.warmup(*arguments, grid=(1,), num_warps=warps, **constants)
        compiled._init_handles()
    return compiled


def kernel_call(
    program: _core.StreamProgram, compiled: Any, programs: int, arguments: Sequence[Argument]
) -> _core.KernelCall | None:
    """`compiled` for `program`, called with `arguments` (without the constants); None if Triton has to launch it. Tensors must
    outlive the program."""
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
    call = _core.KernelCall(compiled.function, programs, 32 * metadata.num_warps, metadata.shared)
    for argument in arguments:
        if isinstance(argument, Base):
            call.base(argument.number, argument.offset)
        else:
            call.number(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
    for _ in scratch:
        call.number(0)
    return call
