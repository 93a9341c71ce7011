"""Symmetric memory on GPUs: regions that are cut from slabs of device memory, which every rank maps.

A slab is one allocation on each rank (`weft.symm.cuda_driver`). Every rank of the group maps the slab, over NVLink or PCIe
peer access. A slab exists as long as its communicator, or a tensor in the slab, exists. Regions are cut from slabs and may
be returned to them. All ranks call `allocate` together with the same size, and place the region at an offset that is free
on every rank. Waits for other ranks have the communicator's deadline.

In a group of one rank, a slab is ordinary memory. In a group on several hosts, GPUs map no memory of other ranks: a rank
may only allocate memory of its own (`allocate_own`).
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from typing import TypeAlias

import torch

from weft.errors import DisagreementError, OutOfSharedMemoryError
from weft.symm.cuda_driver import DriverError, Mapping, fill, make, rounded, take
from weft.symm.device import synchronize
from weft.symm.lasting import lasting
from weft.symm.memory import SharingRanks, lent

_ALIGNMENT = 512  # bytes, as cudaMalloc guarantees; enough for vector accesses and copy engines
_SLAB_BYTES = 8 << 20  # the smallest slab, which signals and small buffers share


class CudaRegion:
    """`nbytes` bytes of device memory on every rank of a group, initially zero. Addresses are valid on this rank's device."""

    def __init__(self, slab: _Slab, offset: int, nbytes: int) -> None:
        self._slab: _Slab | None = slab
        self._offset = offset
        self.nbytes = nbytes

    def _open(self) -> _Slab:
        if self._slab is None:
            raise ValueError("this symmetric memory is closed: allocate it again")
        return self._slab

    def address(self, rank: int) -> int:
        return self._open().addresses[rank] + self._offset

    def tensor(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        """Return a view [shape] of `rank`'s memory that begins at byte `offset_bytes` of the region. The view keeps the
        slab mapped.
        """
        elements = 1
        for extent in shape:
            elements *= extent
        nbytes = elements * dtype.itemsize
        if offset_bytes < 0 or offset_bytes + nbytes > self.nbytes:
            raise ValueError(
                f"{nbytes} bytes at offset {offset_bytes} do not fit into a region of {self.nbytes} bytes: allocate more"
            )
        begin = self._offset + offset_bytes
        return self._open().buffers[rank][begin : begin + nbytes].view(dtype).view(tuple(shape))

    def owner(self, rank: int) -> torch.Tensor:
        return self._open().buffers[rank]

    def give_back(self) -> None:
        """Close the region. After every rank has called this, later allocations may reuse the memory. Call it only if no
        kernel, captured graph or tensor on any rank will use the region again.
        """
        if self._slab is not None:
            self._slab.free = merged([*self._slab.free, (self._offset, self._offset + _rounded(self.nbytes))])
        self.close()

    def close(self) -> None:
        self._slab = None


class _Slab:
    """One allocation of `nbytes` on every rank, from which regions are cut. All ranks must construct this object.

    buffers: the memory of each rank, uint8 [nbytes].
    addresses: the addresses of these buffers on this device.
    free: the intervals (first byte, end) of the slab that belong to no region of this rank.
    """

    def __init__(self, comm: SharingRanks, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free: list[Interval] = [(0, nbytes)]
        self.zero_from = 0  # bytes from this offset on have never been used, and are zero
        if comm.world_size == 1 or not all(comm.mapped):
            self.buffers = _own(comm, nbytes)
        else:
            self.buffers = _shared(comm, nbytes)
        self.addresses = [buffer.data_ptr() for buffer in self.buffers]
        synchronize(comm.device)


def _own(comm: SharingRanks, nbytes: int) -> list[torch.Tensor]:
    """Allocate `nbytes` of ordinary memory on this rank, zeroed. Return it as uint8 [nbytes], with empty tensors in place of
    the memory of other ranks.
    """
    device = comm.device
    buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * comm.world_size
    buffers[comm.rank] = lasting(device, lambda: torch.zeros(nbytes, dtype=torch.uint8, device=device))
    return buffers


def _shared(comm: SharingRanks, nbytes: int) -> list[torch.Tensor]:
    """Allocate `nbytes` on every rank, zeroed, and map the memory of all ranks. Return the memory of each rank, by rank, as
    uint8 [nbytes]. All ranks raise if one rank fails.
    """
    device, what = comm.device, f"{nbytes} bytes of symmetric memory on GPUs"
    memory, descriptor, error = None, None, ""
    try:
        memory, descriptor = _made(nbytes, device)
        fill(memory.address, nbytes, 0, torch.cuda.current_stream(device))
        synchronize(device)
    except (DriverError, RuntimeError) as trouble:
        free, total = torch.cuda.mem_get_info(device)
        error = f"{trouble}; {free} of {total} bytes free on {device}"
    files: list[int | None] = []
    try:
        made = comm.all_gather_files(error, descriptor, what=what)
        files = [file for rank, (_, file) in enumerate(made) if rank != comm.rank]
        _agree(what, [text for text, _ in made])
        everybody: list[Mapping] = []
        try:
            for rank, (_, file) in enumerate(made):
                if file is None:
                    raise OSError(
                        errno.EMFILE,
                        f"the system dropped a file descriptor from rank {rank}, {os.strerror(errno.EMFILE)}: raise ulimit -n",
                    )
                assert memory is not None
                everybody.append(memory if rank == comm.rank else take(file, nbytes, device))
        except (DriverError, OSError) as trouble:
            error = f"mapping failed: {trouble}"
        _agree(what, comm.all_gather(error, what=f"{what}, mapped"))
    finally:
        for one in [descriptor, *files]:
            if one is not None:
                os.close(one)
    return [lent(one.address, [nbytes], torch.uint8, device, one) for one in everybody]


def _made(nbytes: int, device: torch.device) -> tuple[Mapping, int]:
    try:
        return make(nbytes, device)
    except DriverError as error:
        if not error.out_of_memory:
            raise
        torch.cuda.empty_cache()  # free torch's cached memory
        return make(nbytes, device)


def _agree(what: str, errors: list[str]) -> None:
    if bad := [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]:
        raise OutOfSharedMemoryError(
            f"{what}: {'; '.join(bad)}. Use smaller batches, or pass fewer result buffers per rank (`outputs`) to "
            "embedding_all_to_all or to the embedding module"
        )


_slabs: weakref.WeakKeyDictionary[SharingRanks, list[_Slab]] = weakref.WeakKeyDictionary()


def allocate(comm: SharingRanks, nbytes: int, what: str) -> CudaRegion:
    """Allocate a zeroed region of `nbytes` on every rank. All ranks must make this call with the same size.

    The CPU waits for the device if the region needs a new slab, or if its memory was used before.
    """
    slabs = _slabs.setdefault(comm, [])
    asked = comm.all_gather((nbytes, [slab.free for slab in slabs]), what=what)
    sizes = [size for size, _ in asked]
    if len(set(sizes)) > 1:
        raise DisagreementError(
            f"{what}: ranks requested different sizes ({sizes} bytes): request the same size on every rank"
        )
    wanted = _rounded(nbytes)
    # A small region does not use a large slab. Otherwise it could keep the slab allocated when all other regions of the
    # slab have been returned.
    small = wanted <= _SLAB_BYTES // 8
    kept = [small and slab.nbytes > 4 * _SLAB_BYTES for slab in slabs]
    place = smallest_place([[() if k else f for f, k in zip(free, kept, strict=True)] for _, free in asked], wanted)
    if place is None:
        # The region fits in no slab. So free all slabs that no rank uses, and then allocate a new slab.
        idle = [n for n, slab in enumerate(slabs) if all(free[n] == [(0, slab.nbytes)] for _, free in asked)]
        for number in reversed(idle):
            del slabs[number]
        size = max(wanted, _SLAB_BYTES)
        slab, offset = _Slab(comm, size if comm.world_size == 1 else rounded(size, comm.device)), 0
        slabs.append(slab)
    else:
        slab, offset = slabs[place[0]], place[1]
    slab.free = without(slab.free, (offset, offset + wanted))
    if offset < slab.zero_from:
        # The memory was used before. Wait until no rank has enqueued work that may access it, then clear it. Then wait until
        # all ranks have cleared theirs.
        synchronize(comm.device)
        comm.all_gather(None, what=f"{what}, again")
        slab.buffers[comm.rank][offset : offset + wanted].zero_()
        synchronize(comm.device)
        comm.all_gather(None, what=f"{what}, cleared")
    slab.zero_from = max(slab.zero_from, offset + wanted)
    return CudaRegion(slab, offset, nbytes)


def allocate_own(comm: SharingRanks, nbytes: int) -> CudaRegion:
    """Allocate a zeroed region of `nbytes` that only this rank can address, for a group on several hosts. Ranks need not make
    this call together.
    """
    wanted = _rounded(nbytes)
    slab = _Slab(comm, wanted)
    slab.free = []
    return CudaRegion(slab, 0, nbytes)


def _rounded(nbytes: int) -> int:
    return -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT


Interval: TypeAlias = tuple[int, int]
"""(first byte, end)"""


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the intervals in ascending order. Adjacent and overlapping intervals are merged."""
    result: list[Interval] = []
    for first, end in sorted(intervals):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return result


def without(intervals: Sequence[Interval], taken: Interval) -> list[Interval]:
    """Return the parts of `intervals` outside the interval `taken`."""
    first, end = taken
    cut = [piece for a, b in intervals for piece in ((a, min(b, first)), (max(a, end), b))]
    return [(a, b) for a, b in cut if a < b]


def smallest_place(free: Sequence[Sequence[Sequence[Interval]]], wanted: int) -> tuple[int, int] | None:
    """Return (slab, offset) of the smallest interval of at least `wanted` bytes that is free on every rank, or None.

    free: the free intervals, by rank and slab.
    """
    found = []
    for number, of_ranks in enumerate(zip(*free, strict=True)):
        common = [(a, b) for a, b in of_ranks[0]]
        for other in of_ranks[1:]:
            common = [(max(a, c), min(b, d)) for a, b in common for c, d in other]
        found += [(b - a, number, a) for a, b in common if b - a >= wanted]
    return min(found)[1:] if found else None


def slab_bytes(comm: SharingRanks) -> int:
    """Return the bytes of device memory in this rank's slabs."""
    return sum(slab.nbytes for slab in _slabs.get(comm, []))
