"""Symmetric memory on GPUs: slabs of torch symmetric memory, carved.

A slab is one `torch.distributed._symmetric_memory` allocation, mapped by every rank of the group over NVLink or PCIe
peer access. Regions are cut from it front to back and never given back: an allocation returned to torch's pool and
handed out again has been seen to alias another one, and regions are few (they grow geometrically), so a slab lives as
long as its domain and the tensors over it. All ranks cut alike: `allocate` is collective and takes the same size
everywhere.

A group of one rank needs no peer: its slab is ordinary memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weft.errors import DisagreementError, OutOfSharedMemoryError, WeftError

if TYPE_CHECKING:
    from weft.symm.domain import Domain

_ALIGNMENT = 512  # what a cudaMalloc guarantees at least; keeps vector accesses and copy engines happy
_SLAB_BYTES = 8 << 20  # the smallest slab: signals and small buffers share one


class CudaRegion:
    """`nbytes` on every rank of the domain's group, zero at first; `address(rank)` is valid on this rank's device."""

    def __init__(self, slab: _Slab, offset: int, nbytes: int) -> None:
        self._slab: _Slab | None = slab
        self._offset = offset
        self.nbytes = nbytes

    def _open(self) -> _Slab:
        if self._slab is None:
            raise WeftError("this symmetric region is closed")
        return self._slab

    def address(self, rank: int) -> int:
        return self._open().addresses[rank] + self._offset

    def tensor(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        """A view [shape] of `rank`'s memory that starts `offset_bytes` into the region and keeps the slab mapped."""
        elements = 1
        for extent in shape:
            elements *= extent
        nbytes = elements * dtype.itemsize
        if offset_bytes < 0 or offset_bytes + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset_bytes} do not fit into a region of {self.nbytes} bytes")
        begin = self._offset + offset_bytes
        return self._open().buffers[rank][begin : begin + nbytes].view(dtype).view(tuple(shape))

    def close(self) -> None:
        self._slab = None


class _Slab:
    """One allocation: `buffers[rank]` is rank's memory as uint8 [nbytes], `addresses[rank]` where this device sees it."""

    def __init__(self, domain: Domain, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used = 0
        if domain.world_size == 1:
            self.buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=domain.device)]
        else:
            import torch.distributed._symmetric_memory as symm_mem

            with torch.cuda.device(domain.device):
                try:
                    mine = symm_mem.empty(nbytes, dtype=torch.uint8, device=domain.device)
                except torch.OutOfMemoryError as error:
                    free, total = torch.cuda.mem_get_info(domain.device)
                    raise OutOfSharedMemoryError(
                        f"rank {domain.rank}: {nbytes} bytes of symmetric memory wanted on {domain.device}, {free} of {total} "
                        f"free: make the batch smaller, or lower `outputs`"
                    ) from error
                mine.zero_()
                torch.cuda.synchronize(domain.device)
                handle = symm_mem.rendezvous(mine, group=domain.group.group_name)
                self._handle = handle
                self.buffers = [
                    mine if rank == domain.rank else handle.get_buffer(rank, (nbytes,), torch.uint8)
                    for rank in range(domain.world_size)
                ]
        self.addresses = [buffer.data_ptr() for buffer in self.buffers]
        torch.cuda.synchronize(domain.device)


_slabs: weakref.WeakKeyDictionary[Domain, list[_Slab]] = weakref.WeakKeyDictionary()


def allocate(domain: Domain, nbytes: int, what: str) -> CudaRegion:
    """Collective: the same `nbytes` on every rank. Synchronises the device when a new slab is needed."""
    sizes = domain.all_gather(nbytes, what=what)
    if len(set(sizes)) > 1:
        raise DisagreementError(f"{what}: ranks asked for different sizes, {sizes} bytes: ask for the same everywhere")
    wanted = -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT
    slabs = _slabs.setdefault(domain, [])
    slab = next((s for s in slabs if s.nbytes - s.used >= wanted), None)
    if slab is None:
        slab = _Slab(domain, max(wanted, _SLAB_BYTES))
        slabs.append(slab)
    offset, slab.used = slab.used, slab.used + wanted
    return CudaRegion(slab, offset, nbytes)


def slab_bytes(domain: Domain) -> int:
    """Bytes of device memory that the slabs of this rank hold."""
    return sum(slab.nbytes for slab in _slabs.get(domain, []))
