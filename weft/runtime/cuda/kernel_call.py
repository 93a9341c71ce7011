"""Triton kernels as operations of a `_core.StreamProgram`, which launches them without Python.

Triton's own launch takes more CPU time than the rest of a small call. So a program launches the kernel through the driver.
The program passes the parameters of the kernel's signature, followed by pointers to scratch memory, which must be of size
0. Some Triton versions may compile kernels with other parameters, so `kernel_call` compares the sizes of the parameters with the
driver's. If they differ, or if the driver cannot tell, Triton launches the kernel.
"""

from __future__ import annotations

import itertools
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


class Count(NamedTuple):
    """A number that each run passes in its list of base addresses, such as a number of rows. number: its index in the list."""

    number: int


class RowTiles(NamedTuple):
    """The grid of a kernel that computes tiles of rows: (number of row tiles + more) * times, from 1 to `most`.

    rows: the number of rows. tile: the number of rows of a tile.
    """

    most: int
    rows: int | Count
    tile: int
    more: int
    times: int

    def blocks(self) -> int:
        """Return the number of blocks if `rows` is a fixed number; otherwise the largest possible number."""
        if isinstance(self.rows, Count):
            return self.most
        return max(1, min(self.most, (-(-self.rows // self.tile) + self.more) * self.times))


class Mapped(NamedTuple):
    """An argument that is a tensor map (a descriptor for the GPU's tensor memory accelerator).

    descriptor: Triton's description of the tensor map, without the address. address: the address of the tensor.
    rows: the tensor's number of rows. If each run passes it and `is_sized`, it replaces the size of the outermost dimension of
        `descriptor`.
    instead: the tensor map to use in a run without rows, as an index among the call's tensor maps. A tensor map cannot
        be empty.
    """

    descriptor: Any
    address: int | Base
    rows: int | Count
    is_sized: bool
    instead: int


Argument: TypeAlias = "int | torch.Tensor | Base | Count | Mapped"
_BYTES = {"i32": 4, "i64": 8}
_MAP_BYTES = 128  # the size of a tensor map
_DATA_TYPES = {8: 10, 9: 8, 10: 9}  # Triton's numbers of data types that differ from the driver's
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
    program: _core.StreamProgram,
    compiled: Any,
    programs: int | Grid | RowTiles,
    arguments: Sequence[Argument],
    only_if: Sequence[Count] = (),
) -> _core.KernelCall | None:
    """Return a launch of the kernel `compiled` for `program`, or None if only Triton can launch the kernel.

    programs: the size of the grid.
    arguments: the kernel's arguments, without constants. The caller must keep tensors among them alive as long as the
        program.
    only_if: numbers that are known when a run begins. A run in which one of them is 0 does not launch the kernel.
    """
    metadata, types = compiled.metadata, [t for t in compiled.src.signature.values() if t != "constexpr"]
    if len(types) != len(arguments):
        return None
    declared = list(itertools.chain(*map(_parameter_bytes, types, arguments)))
    described = list(getattr(metadata, "tensordesc_meta", None) or ())
    sizes = program.parameters_of(compiled.function)
    scratch = sizes[len(declared) :]
    if (
        torch.version.hip is not None
        or sizes[: len(declared)] != declared
        or None in described
        or len(described) != sum(isinstance(argument, Mapped) for argument in arguments)
        or len(scratch) > _MOST_SCRATCH
        or any(size != 8 for size in scratch)
        or any(getattr(metadata, name, 0) for name in _UNUSUAL)
        or getattr(metadata, "num_ctas", 1) != 1
    ):
        return None
    count = programs.blocks() if isinstance(programs, RowTiles) else 1 if isinstance(programs, Grid) else programs
    call = _core.KernelCall(compiled.function, count, 32 * metadata.num_warps, metadata.shared)
    if isinstance(programs, Grid):
        call.grid(programs.x, programs.y)
    elif isinstance(programs, RowTiles) and isinstance(programs.rows, Count):
        call.row_tiles(programs.rows.number, programs.tile, programs.more, programs.times)
    for number in only_if:
        call.only_if(number.number)
    for argument in arguments:
        if isinstance(argument, Mapped):
            _add_map(call, argument, described.pop(0))
        elif isinstance(argument, Base):
            call.base(argument.number, argument.offset)
        elif isinstance(argument, Count):
            call.count(argument.number)
        else:
            call.number(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
    for _ in scratch:
        call.number(0)
    return call


def _parameter_bytes(kind: str, argument: Argument) -> list[int | None]:
    """Return the sizes of the kernel's parameters for an argument of the type `kind` in Triton's signature."""
    if isinstance(argument, Mapped):
        rank = len(argument.descriptor.shape)
        return [_MAP_BYTES, *[4] * rank, *[8] * rank] if kind.startswith("tensordesc") else [None]
    return [8 if kind.startswith("*") else _BYTES.get(kind)]


def _add_map(call: _core.KernelCall, argument: Mapped, described: dict[str, Any]) -> None:
    """Add a tensor map to the parameters of `call`, followed by its sizes and its strides in elements, as Triton's launcher
    does (`make_tensordesc_arg`).

    described: the kernel's metadata for this tensor map.
    """
    descriptor, address = argument.descriptor, argument.address
    base, offset = address if isinstance(address, Base) else (-1, address)
    shape, strides, item = descriptor.shape, descriptor.strides, described["elem_size"]
    rows = argument.rows.number if isinstance(argument.rows, Count) else -1
    is_sized = argument.is_sized and rows >= 0
    call.map(
        base=base, offset=offset, data_type=_DATA_TYPES.get(described["elem_type"], described["elem_type"]),
        swizzle=described["swizzle"], item_bytes=item, sizes=list(reversed(shape)),
        strides=[item * stride for stride in reversed(strides[:-1])], box=list(reversed(described["block_size"])),
        rows=rows, instead=argument.instead, is_sized=is_sized,
    )  # fmt: skip
    if is_sized:
        call.count(rows)
    else:
        call.number(shape[0])
    for number in (*shape[1:], *strides):
        call.number(number)


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
