"""Result buffers that peers write: a few output buffers in symmetric memory, which are lent to the user as tensors.

A lent tensor stays valid as long as the user keeps it or any view of it. After that, peers may write the buffer again, but
only after this rank has begun its next call. On GPUs they also wait for all work that was enqueued earlier on the stream
of this call. So peers never overwrite data that earlier work still reads. (If another stream reads the tensor, make the
stream of the next call wait for that stream before you drop the tensor.)

With `count` buffers, a user may keep `count - 1` results while the next result is computed. Further results are copied out
of the last free buffer; `copied` counts these copies. With `count=1` results are never copied, and it is an error to keep a
result across the next call.

A call that a CUDA graph has captured writes the same buffer in every replay, even if earlier results are still in use. So the
buffer belongs to the graph permanently. If a captured call gets the last free buffer, every replay copies its result out of the
buffer, and the buffer then becomes free again. Later calls that get this buffer copy their results out of it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft import _core
from weft.errors import WeftError
from weft.runtime.executor import Executor
from weft.symm import Communicator, set_up_within
from weft.symm.memory import lent

_GRANULE = 1 << 16


class OutputPool:
    """A pool of `count` output buffers on each rank, which peers write and which are lent to the user as tensors. `reserve`
    allocates the buffers.
    """

    def __init__(self, comm: Communicator, count: int) -> None:
        if not 1 <= count <= 255:
            raise ValueError(
                f"outputs={count} must be between 1 and 255: it is the number of result buffers of each rank"
            )
        self._comm = comm
        self.count = count
        self.copied = 0
        self.slot_bytes = 0
        self._region: Any = None
        self._free: list[int] = []
        self._captured = False
        self._dropped: list[int] = []  # buffers of graphs whose results are no longer in use
        self._shared: set[int] = set()  # the buffer that replays write, and from which results are copied
        self._of_graphs: list[Any] = []  # memory from before the pool grew, which replays still write

    def reserve(self, slot_bytes: int, quiesce: Callable[[], None], deadline_s: float | None = None) -> bool:
        """Make each buffer at least `slot_bytes` large. Return True if the pool grew. All ranks must make this call with the
        same size.

        quiesce: a function that waits until earlier calls have ended on all ranks. It runs before the pool grows.
        deadline_s: the longest wait for a peer while the pool grows.
        """
        if slot_bytes <= self.slot_bytes and self._region is not None:
            return False
        wanted = max(slot_bytes, self.slot_bytes * 5 // 4, _GRANULE)
        wanted = -(-wanted // _GRANULE) * _GRANULE
        # Results that the user keeps also keep the old memory mapped. Peers no longer write to the old memory. If there is
        # not enough memory, this raises, and the pool is unchanged.
        with set_up_within(deadline_s):
            quiesce()
            region = self._comm.allocate(wanted * self.count)
        if self._captured:
            self._of_graphs.append(self._region)
        self._region, self.slot_bytes, self._captured = region, wanted, False
        self._free, self._dropped, self._shared = list(range(self.count)), [], set()
        return True

    @property
    def lent(self) -> int:
        """The number of results that callers still use and that are in these buffers."""
        return 0 if self._region is None else self.count - len(self._free) - len(self._dropped)

    def close(self) -> None:
        """Release the memory. Call this method only if no rank has lent results. `reserve` allocates memory again."""
        for region in (self._region, *self._of_graphs):
            if region is not None:
                region.give_back()
        self._region, self.slot_bytes, self._captured = None, 0, False
        self._free, self._dropped, self._shared, self._of_graphs = [], [], set(), []

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.count

    def base_addresses(self) -> list[int]:
        """Return the address, in this process, of the first output buffer of each rank."""
        return [self._region.address(rank) for rank in range(self._comm.world_size)]

    def acquire(self) -> int:
        """Return the index of a free buffer for the next result. Raise `WeftError` if there is none."""
        if not self._free:
            raise WeftError(
                f"no result buffer is free (outputs={self.count}): delete the last result and every view of it "
                f"before the next call, or pass outputs={self.count + 1}"
            )
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def lend(self, slot: int, shape: tuple[int, ...], dtype: torch.dtype, captured: bool = False) -> torch.Tensor:
        """Return a tensor of this shape over the memory of buffer number `slot`, which contains the result of a call. The tensor
        is for the user.

        The buffer becomes free when the user has dropped the tensor and all its views, unless a graph has `captured` the
        call. If this was the last free buffer, return a copy instead, unless `count` is 1.
        """
        region, rank, free = self._region, self._comm.rank, self._free
        is_last = not free
        if captured:
            self._captured = True
            if is_last:
                self._shared.add(slot)
            else:
                free = self._dropped
        # The lease refers to the memory, not to the region, because the communicator may close the region. The lease also
        # refers to the current list of free buffers: after the pool has grown, the list of the old buffers is unused.
        lease = _core.SlotLease(region.owner(rank), free, slot)
        address = region.address(rank) + slot * self.slot_bytes
        tensor = lent(address, list(shape), dtype, self._comm.device, lease)
        del lease
        if slot in self._shared or (is_last and self.count > 1):
            self.copied += 1
            tensor = tensor.clone()
        return tensor


class LendingExecutor(Executor):
    """An executor whose results stay in the buffers `outputs` until the user drops them. The method `close` sets the attribute
    `closed`.
    """

    outputs: OutputPool
    closed = False

    @property
    def was_captured(self) -> bool:
        """True: users may keep results, and graphs may be replayed. So the memory stays allocated until all ranks close the
        executor.
        """
        return True

    @property
    def stale(self) -> bool:
        return self.closed

    @property
    def gone(self) -> bool:
        return self.closed

    @property
    def shared(self) -> bool:
        """True: calls with any batch sizes use the same memory, so a cache may keep this executor at little cost."""
        return True

    @property
    def lent(self) -> int:
        return self.outputs.lent
