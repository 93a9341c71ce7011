"""Device memory that other processes can map, by CUDA's driver API: calls that allocate, export (as a file descriptor),
map and fill the memory.

torch's symmetric memory does the same, but its rendezvous waits for peers without a deadline, and holds the GIL. A peer
that dies or stops would block every thread of the process. This module never waits. A communicator's sockets send the
descriptors (`weft.symm.cuda`), with deadlines and detection of dead peers.

The driver library comes with the GPU's driver, and is loaded at the first use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import lru_cache
from typing import Any

import torch

_PINNED, _POSIX_FD, _DEVICE, _READ_WRITE, _RECOMMENDED = 1, 1, 1, 3, 1  # values of CU_MEM_... constants
_OUT_OF_MEMORY = 2


class DriverError(RuntimeError):
    """An error code of CUDA's driver."""

    def __init__(self, function: str, code: int) -> None:
        name = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(name))
        super().__init__(f"{function}: {(name.value or b'?').decode()}")
        self.out_of_memory = code == _OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("security", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: Any) -> None:
    code = getattr(_library(), function)(*arguments)
    if code:
        raise DriverError(function, code)


def _properties(device: torch.device) -> _Properties:
    assert device.index is not None
    return _Properties(_PINNED, _POSIX_FD, _Location(_DEVICE, device.index), None, _Flags())


def rounded(nbytes: int, device: torch.device) -> int:
    """Return `nbytes`, rounded up to the granularity of allocations on `device`."""
    torch.cuda.init()
    with torch.cuda.device(device):
        granule = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(_properties(device)), _RECOMMENDED)
        return -(-max(1, nbytes) // granule.value) * granule.value


def make(nbytes: int, device: torch.device) -> tuple[Mapping, int]:
    """Allocate `nbytes` (a result of `rounded`) and map the memory into this process. Return the mapping and a file
    descriptor for peers.

    The caller closes the descriptor. Raises `DriverError`.
    """
    with torch.cuda.device(device):
        handle, descriptor = ctypes.c_ulonglong(), ctypes.c_int()
        _call(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(nbytes),
            ctypes.byref(_properties(device)),
            ctypes.c_ulonglong(0),
        )
        try:
            _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX_FD, ctypes.c_ulonglong(0))
            try:
                return _mapped(handle, nbytes, device), descriptor.value
            except DriverError:
                os.close(descriptor.value)
                raise
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps the memory allocated


def take(descriptor: int, nbytes: int, device: torch.device) -> Mapping:
    """Map a peer's memory of `nbytes` into this process. descriptor: from the peer's `make`; the caller closes it."""
    with torch.cuda.device(device):
        handle = ctypes.c_ulonglong()
        _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _POSIX_FD)
        try:
            return _mapped(handle, nbytes, device)
        finally:
            _call("cuMemRelease", handle)


def _mapped(handle: ctypes.c_ulonglong, nbytes: int, device: torch.device) -> Mapping:
    address, size, none = ctypes.c_ulonglong(), ctypes.c_size_t(nbytes), ctypes.c_ulonglong(0)
    _call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), none, none)
    try:
        _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, none)
        try:
            access = _Access(_Location(_DEVICE, device.index or 0), _READ_WRITE)
            _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        except DriverError:
            _call("cuMemUnmap", address, size)
            raise
    except DriverError:
        _call("cuMemAddressFree", address, size)
        raise
    return Mapping(address.value, nbytes, device)


class Mapping:
    """A mapping of device memory into this process. The memory is unmapped when this object is freed.

    The driver frees the memory when no process maps it any more.
    """

    def __init__(self, address: int, nbytes: int, device: torch.device) -> None:
        self.address, self.nbytes, self.device = address, nbytes, device

    def __del__(self) -> None:
        # Enqueued work may still use the mapping, so wait for the device. If waiting is impossible (during a capture,
        # on a broken device, or at interpreter exit), the memory stays mapped until the process ends.
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(self.device)
            with torch.cuda.device(self.device):
                address, size = ctypes.c_ulonglong(self.address), ctypes.c_size_t(self.nbytes)
                _call("cuMemUnmap", address, size)
                _call("cuMemAddressFree", address, size)


def fill(address: int, nbytes: int, byte: int, stream: torch.cuda.Stream) -> None:
    """Enqueue on `stream` a memset of `nbytes` bytes at `address` to `byte`.

    The first launch of a kernel loads code, and may block while kernels of other streams wait for a peer. A memset loads no
    code, so it does not block.
    """
    _call(
        "cuMemsetD8Async", ctypes.c_ulonglong(address), ctypes.c_ubyte(byte), ctypes.c_size_t(nbytes),
        ctypes.c_void_p(stream.cuda_stream),
    )  # fmt: skip
