"""Two interfaces: `Region`, symmetric memory on any type of device, and `SharingRanks`, the part of a communicator that
allocators use.

`weft.symm.cpu` and `weft.symm.cuda` allocate symmetric memory for a communicator. They use these interfaces because they
must not import the communicator, which is a layer above.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from weft import _core

_DTYPES = {torch.uint8: (1, 8), torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16)}
_DEVICES = {"cpu": 1, "cuda": 2}


def lent(address: int, shape: list[int], dtype: torch.dtype, device: torch.device, owner: object) -> torch.Tensor:
    """Return a tensor over the memory at `address`, without a copy. The tensor and all its views keep a reference to
    `owner`, which keeps the memory allocated.
    """
    capsule = _core.lease(address, shape, *_DTYPES[dtype], *_code_of(device), owner)
    tensor: torch.Tensor = from_dlpack(capsule)
    return tensor


@functools.cache
def _code_of(device: torch.device) -> tuple[int, int]:
    return _DEVICES[device.type], device.index or 0


class Region(Protocol):
    """`nbytes` bytes of memory on every rank of a group, initially zero. A rank can address the memory of all ranks on
    its host.

    The methods raise `ValueError` for a rank whose memory is not mapped here (`Communicator.mapped`).
    """

    nbytes: int

    def address(self, rank: int) -> int:
        """Return the address of `rank`'s memory in this process. Raise `ValueError` if the region is closed."""

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        """Return a view of `rank`'s memory, of the given shape, that begins at byte `offset_bytes` of the region. The
        view stays valid after `close`.
        """

    def owner(self, rank: int) -> Any:
        """Return an object that keeps `rank`'s memory mapped in this process while it is referenced."""

    def close(self) -> None:
        """Release this rank's mappings. A mapping ends when its last view is freed. Mappings of other ranks are not
        affected.
        """

    def give_back(self) -> None:
        """Close the region, so that later regions may use its memory. Call it only if no view and no kernel on any rank
        will use the region again.
        """


class SharingRanks(Protocol):
    """The interface of a `Communicator` that allocators of memory use: the ranks that share memory, and this rank's
    number.
    """

    rank: int
    world_size: int
    device: torch.device
    hosts: tuple[str, ...]
    mapped: tuple[bool, ...]

    def all_gather(self, obj: Any, *, what: str) -> list[Any]: ...

    def all_gather_files(self, obj: Any, file: int | None, *, what: str) -> list[tuple[Any, int | None]]: ...
