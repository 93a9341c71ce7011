"""Addresses of the buffers and counters that a rank's steps use, in the shared memory of all ranks and in the caller's tensors.

A schedule's own buffers keep their addresses until memory grows (`weft.runtime.cpu.memory`). A caller's tensor may have a new
address in each run. Steps do not use the caller's tensor itself, but views that are made from its address. So no step keeps the
tensor alive between runs, and autograd and inference mode do not affect the threads of lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft import _core
from weft.runtime.cpu.memory import Mapped
from weft.runtime.cpu.run import Run
from weft.runtime.cpu.sizes import Parts
from weft.runtime.schedule_memory import ALIGNMENT, TORCH_DTYPE, layout_of
from weft.schedule import Buffer, Index, Region, Schedule, Wait, value
from weft.symm.memory import lent

_CPU = torch.device("cpu")


def size(region: Region) -> tuple[int, int]:
    return value(region.rows), value(region.cols)


@dataclass(slots=True, frozen=True)
class Place:
    """The memory of a schedule's buffer on one rank, as a tensor of shape [rows, cols].

    flat: the same memory as a tensor of one dimension. row_stride, col_stride: the strides of the matrix, in elements.
    """

    flat: torch.Tensor
    row_stride: int
    col_stride: int
    rows: int
    cols: int

    def view(self, region: Region) -> torch.Tensor:
        return self.flat.as_strided(size(region), (self.row_stride, self.col_stride), self._first(region))

    def address(self, region: Region) -> int:
        return self.flat.data_ptr() + self._first(region) * self.flat.itemsize

    @property
    def pitch(self) -> int:
        return self.row_stride * self.flat.itemsize

    def _first(self, region: Region) -> int:
        return value(region.row) * self.row_stride + value(region.col) * self.col_stride


def at_address(address: int, dtype: torch.dtype, rows: int, cols: int, row_stride: int, col_stride: int) -> Place:
    """Return the matrix at `address` as a `Place`, which does not own the memory."""
    items = (rows - 1) * row_stride + (cols - 1) * col_stride + 1 if rows and cols else 0
    flat = lent(address, [items * dtype.itemsize], torch.uint8, _CPU, ())
    return Place(flat.view(dtype), row_stride, col_stride, rows, cols)


class Places:
    """The addresses of the buffers and counters that this rank's steps of `schedule` use.

    setters: for each counter of this rank, the ranks that increase it in a run. A rank that increases it twice occurs
        twice.
    shared: the names of buffers to which several ranks or lanes may add at the same time.
    senders: for each counter that arriving messages increase, the ranks that send these messages.

    Attributes. known: the `Place` of each buffer, by (buffer, rank). scratch_bytes: the bytes of private memory that the
    schedule needs.
    """

    def __init__(
        self,
        schedule: Schedule,
        run: Run,
        buffers: tuple[Buffer, ...],
        setters: dict[tuple[str, int], list[int]],
        shared: set[str],
        senders: dict[tuple[str, int], tuple[int, ...]],
    ) -> None:
        self._senders = senders
        self.run, self.rank, self._setters, self._shared = run, run.comm.rank, setters, shared
        self.known: dict[tuple[str, int], Place] = {}
        self.parts: dict[int, Parts] = {}
        """The regions of the schedule's steps with dynamic sizes (`parts_of`), by the id of the step."""
        self.layout = layout_of(schedule)
        self.scratch_bytes = 0
        self._own: list[tuple[Buffer, int]] = []  # (buffer, offset)
        for buffer in buffers:
            if buffer.role == "symmetric":
                self._own.append((buffer, self.layout.buffers[buffer.name]))
            elif buffer.role == "scratch":
                self._own.append((buffer, self.scratch_bytes))
                nbytes = value(buffer.rows) * buffer.cols * TORCH_DTYPE[buffer.dtype].itemsize
                self.scratch_bytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._counters: tuple[int, ...] = ()  # address of each rank's first counter

    def map(self, mapped: Mapped) -> None:
        """Assign addresses in `mapped`, the group's shared memory, to the counters and to all buffers that the caller does not
        pass.
        """
        self._counters = mapped.addresses
        for buffer, offset in self._own:
            begins = {rank: address + mapped.buffers_at for rank, address in enumerate(mapped.addresses) if address}
            if buffer.role == "scratch":
                begins = {self.rank: mapped.scratch.data_ptr()}
            rows, cols, dtype = value(buffer.rows), buffer.cols, TORCH_DTYPE[buffer.dtype]
            for rank, begin in begins.items():
                self.known[buffer.name, rank] = at_address(begin + offset, dtype, rows, cols, cols, 1)

    def put(self, buffer: str, place: Place) -> None:
        """Record the memory of the caller's tensor for this rank's buffer `buffer`."""
        self.known[buffer, self.rank] = place

    def place(self, region: Region) -> Place:
        return self.known[region.buffer, value(region.at)]

    def view(self, region: Region) -> torch.Tensor:
        return self.place(region).view(region)

    def size_of(self, buffer_of_rank: tuple[str, int]) -> tuple[int, int]:
        found = self.known[buffer_of_rank]
        return found.rows, found.cols

    def counter(self, signal: str, index: Index, rank: int) -> int:
        """Return the address of a counter in the memory of `rank`. A counter is (signal, index)."""
        return self._counters[rank] + _core.COUNTER_BYTES * self.number(signal, index)

    def number(self, signal: str, index: Index) -> int:
        """Return the position of the counter (signal, index) among all counters of a rank."""
        return self.layout.counters[signal] + value(index)

    def sets(self) -> list[tuple[int, int]]:
        """Return (index, amount) for each counter of this rank that a run increases. The amount is the number by which a run
        increases the counter.
        """
        return [(self.number(*counter), len(ranks)) for counter, ranks in self._setters.items() if ranks]

    def setters(self, wait: Wait) -> list[int]:
        """Return the ranks that increase, in a run, the counter for which the step `wait` waits. A rank that increases it twice
        occurs twice.
        """
        return self._setters[wait.signal, value(wait.index)]

    def senders(self, wait: Wait) -> tuple[int, ...]:
        """Return the ranks that send messages for the counter of the step `wait`. Such a message increases the counter when it
        arrives.
        """
        return self._senders.get((wait.signal, value(wait.index)), ())

    def is_updated_elsewhere(self, region: Region) -> bool:
        """True if peers or other lanes of this rank may add to the buffer of `region` at the same time."""
        return region.buffer in self._shared
