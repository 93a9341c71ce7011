"""Handles of symmetric memory: tensors that every rank can address (`SymmetricBuffer`), and counters (`Signal`).

A handle belongs to the process group that the caller passes, and exists on each of its ranks. The caller makes and closes
it. All ranks must make a handle together, but each rank may close its handle at any time. `csrc/signal.hpp` explains how a
signal orders the writes before it.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist

from weft import _core
from weft.arguments import MOST_ROWS, checked_shape, checked_within
from weft.integers import integer
from weft.symm.communicator import Communicator, communicator
from weft.symm.memory import Region
from weft.words import kind


class _Handle:
    """The base class of both handles. `close`, or the end of a `with` block, frees the handle's memory."""

    _region: Region

    def close(self) -> None:
        self._region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SymmetricBuffer(_Handle):
    """A tensor of the same shape and dtype on every rank of `group`. Every rank can read and write all these tensors.

    The memory is initially zero. Reads and writes are plain loads and stores, so use a `Signal` or another
    synchronisation to order a read after a peer's write. `local` is this rank's tensor, and `peer(rank)` the tensor of
    another rank. After `close()` both raise an error, but tensors that you already have stay valid. The memory is freed
    when the last rank has dropped it.

    Raises on every rank: `DisagreementError` if ranks request different shapes or dtypes, `OutOfSharedMemoryError` if
    there is not enough memory, and the errors of `weft.symm.communicator.communicator`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
    ):
        self.shape = torch.Size(checked_shape("shape", shape))
        self.dtype = dtype
        if any(n < 0 for n in self.shape):
            raise ValueError(f"shape={tuple(shape)} must not have negative sizes")
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype={dtype!r} is {kind(dtype)}: pass a torch.dtype, such as torch.float32")
        self.comm: Communicator = communicator(group, device)
        self._region = self.comm.allocate(self.shape.numel() * dtype.itemsize, what=repr(self))

    @property
    def local(self) -> torch.Tensor:
        return self.peer(self.comm.rank)

    def peer(self, rank: int) -> torch.Tensor:
        return self._region.tensor(rank, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"SymmetricBuffer({tuple(self.shape)}, {self.dtype})"


class Signal(_Handle):
    """`count` 64-bit counters on every rank of `group`. Any rank can increase them. The owner can wait for them.

    Memory order: `set` and `add` release, `wait` and `read` acquire. After a wait for a value, a rank sees all writes
    to symmetric memory that preceded the `set` or `add` of this value. Counters start at 0 and should only grow: a rank
    cannot know if a peer still reads an older value. For example, use the number of the iteration as the value.
    """

    def __init__(self, count: int = 1, *, group: dist.ProcessGroup, device: torch.device | str = "cpu"):
        self.count = checked_within("count", count, 1, MOST_ROWS, "at least 1, and at most 2**40")
        self.comm: Communicator = communicator(group, device)
        if self.comm.device.type != "cpu":
            raise ValueError(
                f"device={device}: a Signal is for CPU processes, so pass device='cpu'. On GPUs, set signals in a schedule"
            )
        self._region = self.comm.allocate(self.count * _core.COUNTER_BYTES, what=f"Signal(count={self.count})")

    def set(self, value: int, *, peer: int, index: int = 0) -> None:
        """Set counter `index` of rank `peer` to `value`, and wake waiting threads."""
        self.comm.check()
        _core.signal_set(self._address(peer, index), _checked_value("value", value))

    def add(self, amount: int, *, peer: int, index: int = 0) -> None:
        """Add `amount` atomically to counter `index` of rank `peer`, and wake waiting threads."""
        self.comm.check()
        _core.signal_add(self._address(peer, index), _checked_value("amount", amount))

    def read(self, index: int = 0) -> int:
        """Return the current value of this rank's counter `index`."""
        return _core.signal_read(self._address(self.comm.rank, index))

    def wait(self, value: int, *, index: int = 0, peer: int | None = None, deadline_s: float | None = None) -> int:
        """Wait until this rank's counter `index` is at least `value`. Return its value.

        peer: the rank that will set the counter. If `peer` leaves the group, the wait ends immediately.
        deadline_s: the longest wait in seconds; `WEFT_DEADLINE_S` by default.

        Raises `DeadlineError` if the counter is not set in time, and `PeerLostError` or `PoisonedGroupError` if the
        group fails meanwhile. After any of these errors the group is unusable.
        """
        address = self._address(self.comm.rank, index)
        return self.comm.wait(
            address, _checked_value("value", value), name=f"signal {index}", peer=peer, deadline_s=deadline_s
        )

    def _address(self, rank: int, index: int) -> int:
        index = checked_within("index", index, 0, self.count - 1, f"between 0 and {self.count - 1}")
        return self._region.address(integer("rank", rank, "pass the number of a rank")) + index * _core.COUNTER_BYTES


def _checked_value(name: str, given: int) -> int:
    return checked_within(name, given, 0, 2**63 - 1, "from 0 to 2**63 - 1")
