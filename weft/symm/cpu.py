"""Symmetric memory between CPU processes: anonymous files (memfd) that are passed over the communicator's sockets.

The files have no names. A memfd exists as long as a process maps it, and its descriptors are closed as soon as all ranks
have mapped it. So the kernel frees the pages when the last rank has ended, for any reason. Pages are reserved in advance,
and the files are sealed against shrinking. So a lack of memory raises an error during allocation, instead of a bus error in
a kernel.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import Counter
from pathlib import Path

import torch

from weft import _core
from weft.errors import OutOfSharedMemoryError
from weft.symm.memory import SharingRanks, lent
from weft.words import counted

_CPU = torch.device("cpu")
_KEEP_FREE = 0.05  # fraction of the free memory that weft leaves free


class CpuRegion:
    """The symmetric memory of this host's ranks, mapped into this process. Implements `weft.symm.memory.Region`."""

    def __init__(self, nbytes: int, mappings: list[_core.Mapping | None]):
        self.nbytes = nbytes
        self._mappings = mappings

    def address(self, rank: int) -> int:
        return self._mapping(rank).address

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        mapping = self._mapping(rank)
        wanted = dtype.itemsize * torch.Size(shape).numel()
        if offset_bytes % dtype.itemsize or offset_bytes < 0:
            raise ValueError(f"offset_bytes={offset_bytes} must be a multiple of {dtype.itemsize}, the size of {dtype}")
        if offset_bytes + wanted > self.nbytes:
            raise ValueError(
                f"a {dtype} tensor of shape {tuple(shape)} at byte {offset_bytes} ends at byte {offset_bytes + wanted}, but the "
                f"memory has {self.nbytes} bytes: reserve more"
            )
        # The tensor refers to the mapping, not to this region, so closing the region leaves the tensor valid.
        flat = lent(mapping.address + offset_bytes, [wanted], torch.uint8, _CPU, mapping)
        return flat.view(dtype).view(shape)

    def owner(self, rank: int) -> _core.Mapping:
        return self._mapping(rank)

    def close(self) -> None:
        self._mappings = []

    give_back = close

    def _mapping(self, rank: int) -> _core.Mapping:
        if not self._mappings:
            raise ValueError("this symmetric memory is closed: allocate it again")
        if not 0 <= rank < len(self._mappings):
            raise ValueError(f"rank={rank} must be between 0 and {len(self._mappings) - 1}")
        if (mapping := self._mappings[rank]) is None:
            raise ValueError(
                f"rank {rank} is on another host, so its memory is not mapped: use only ranks of this host"
            )
        return mapping


def allocate(comm: SharingRanks, nbytes: int, what: str) -> CpuRegion:
    """Reserve this rank's memory, and map the memory of the peers on this host. Raises the errors of
    `Communicator.allocate`. After each of the three steps (check the free memory, reserve, map), ranks exchange their
    errors, so that all raise or all continue.
    """
    size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    # 1. Check that there is memory for all ranks before any rank reserves memory: otherwise the kernel's out-of-memory
    #    killer could end processes.
    rooms = comm.all_gather(_room(), what=what)
    free = min(room for room, _ in rooms)
    _agree(what, size, free, [trouble for _, trouble in rooms])
    ranks = max(Counter(comm.hosts).values())  # the largest number of ranks on a host
    total = size * ranks
    if total > (1 - _KEEP_FREE) * free:
        raise OutOfSharedMemoryError(
            f"{what}: needed {total / 2**20:.1f} MiB ({counted(ranks, 'rank')} x {size / 2**20:.1f} MiB), but "
            f"{free / 2**20:.1f} MiB are free, of which {_KEEP_FREE:.0%} must stay free: use smaller batches or "
            "fewer ranks"
        )
    # 2. Each rank reserves its own memory, and sends the file descriptor to its peers.
    descriptor, error = _reserve(size)
    files: list[int | None] = []
    try:
        made = comm.all_gather_files(error, descriptor, what=what)
        files = [file for rank, (_, file) in enumerate(made) if rank != comm.rank]
        _agree(what, size, free, [text for text, _ in made])
        # 3. Each rank maps the memory of all ranks on this host.
        mappings: list[_core.Mapping | None] = []
        try:
            for rank, (_, file) in enumerate(made):
                if not comm.mapped[rank]:
                    mappings.append(None)
                    continue
                if file is None:  # the kernel drops a received descriptor if this process has too many
                    raise OSError(
                        errno.EMFILE,
                        f"the system dropped a file descriptor from rank {rank}, {os.strerror(errno.EMFILE)}: raise ulimit -n",
                    )
                mappings.append(_core.Mapping(file, size))
        except OSError as trouble:
            error = f"mapping failed: {trouble}"
        _agree(what, size, free, comm.all_gather(error, what=what))
    finally:
        for file in [descriptor, *files]:
            if file is not None:
                os.close(file)
    return CpuRegion(nbytes, mappings)


def _room() -> tuple[int, str]:
    """Return the number of bytes of free memory and "". If it cannot be determined, return 0 and an error text."""
    try:
        return available_bytes(), ""
    except OSError as trouble:  # this process has no free descriptor to read the file
        return 0, f"reading the free memory failed: {trouble}"


def _reserve(size: int) -> tuple[int | None, str]:
    """Make a sealed memfd of `size` bytes, and reserve its pages. Return (descriptor, ""), or (None, error text)."""
    descriptor = None
    try:
        descriptor = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as trouble:
        if descriptor is not None:
            os.close(descriptor)
        hint = " (the limit on file sizes, `ulimit -f`, also applies here)" if trouble.errno == errno.EFBIG else ""
        return None, f"reserving failed: {trouble}{hint}"
    except BaseException:  # Ctrl-C, most likely while the kernel reserves pages
        if descriptor is not None:
            os.close(descriptor)
        raise
    return descriptor, ""


def _agree(what: str, size: int, free: int, errors: list[str]) -> None:
    bad = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    if bad:
        raise OutOfSharedMemoryError(
            f"{what}: {size / 2**20:.1f} MiB on each rank cannot be reserved ({free / 2**20:.1f} MiB are free): "
            f"{'; '.join(bad)}. Raise the limit, or use smaller batches"
        )


def available_bytes() -> int:
    """Return the number of bytes that this process can reserve now without swapping: the minimum of the host's available
    memory and the limits of its control groups (cgroup v2).
    """
    free = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if not line.startswith("0::"):
            continue
        path = Path("/sys/fs/cgroup" + line[3:])
        while path.is_relative_to("/sys/fs/cgroup"):
            try:
                limit = (path / "memory.max").read_text().strip()
                used = int((path / "memory.current").read_text())
            except OSError:  # the root group has no limit; in a container the path may not exist
                pass
            else:
                if limit != "max":
                    free = min(free, max(0, int(limit) - used))
            path = path.parent
    return free
