"""Where the buffers and counters lie that the steps of a rank touch: its own and its peers', in memory that CPU processes share,
and the caller's tensors.

Buffers of the schedule have their place once and for all. A tensor of the caller's has one until the next run that brings another.
Such a view knows an address and owns nothing: no tensor is kept from run to run, and torch's autograd and inference mode have no
say in what lanes do on threads of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft import _core
from weft.runtime.cpu.run import Run
from weft.runtime.schedule_memory import TORCH_DTYPE, layout_of
from weft.schedule import Buffer, Index, Region, Schedule, Wait, value
from weft.symm.memory import lent

_CPU = torch.device("cpu")


def size(region: Region) -> tuple[int, int]:
    return value(region.rows), value(region.cols)


@dataclass(slots=True, frozen=True)
class Place:
    """A buffer of one rank as this process addresses it: all of it in one dimension, and strides in elements."""

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
    """A matrix of the caller's, owned by nobody."""
    items = (rows - 1) * row_stride + (cols - 1) * col_stride + 1 if rows and cols else 0
    flat = lent(address, [items * dtype.itemsize], torch.uint8, _CPU, ())
    return Place(flat.view(dtype), row_stride, col_stride, rows, cols)


class Places:
    """Of `schedule` on this rank. Making it is collective: it allocates the schedule's own buffers and its counters.

    setters: by counter of this rank, the ranks that set it in a run, one for each set. shared: buffers to which several may add at
    the same time. known: by buffer and rank.
    """

    def __init__(
        self, schedule: Schedule, run: Run, buffers: tuple[Buffer, ...], setters: dict[tuple[str, int], list[int]], shared: set[str]
    ) -> None:  # fmt: skip
        self.run, self.rank, self._setters, self._shared = run, run.domain.rank, setters, shared
        self.known: dict[tuple[str, int], Place] = {}
        self._layout = layout = layout_of(schedule)
        domain, ranks = run.domain, range(run.domain.world_size)
        memory = domain.allocate(layout.buffer_bytes, what=f"buffers of schedule {schedule.name}")
        counter_bytes = _core.COUNTER_BYTES * layout.n_counters
        counters = domain.allocate(counter_bytes, what=f"signals of schedule {schedule.name}")
        for buffer in (b for b in buffers if b.role in ("symmetric", "scratch")):
            items, dtype = value(buffer.rows) * buffer.cols, TORCH_DTYPE[buffer.dtype]
            if buffer.role == "symmetric":
                for rank in ranks:
                    flat = memory.tensor(rank, (items,), dtype, layout.buffers[buffer.name])
                    self.known[buffer.name, rank] = Place(flat, buffer.cols, 1, value(buffer.rows), buffer.cols)
            else:
                flat = torch.empty(items, dtype=dtype)
                self.known[buffer.name, self.rank] = Place(flat, buffer.cols, 1, value(buffer.rows), buffer.cols)
        self._counters = [counters.tensor(rank, (counter_bytes,), torch.uint8) for rank in ranks]

    def put(self, buffer: str, place: Place) -> None:
        """Where this rank's is from now on."""
        self.known[buffer, self.rank] = place

    def place(self, region: Region) -> Place:
        return self.known[region.buffer, value(region.at)]

    def view(self, region: Region) -> torch.Tensor:
        return self.place(region).view(region)

    def size_of(self, buffer_of_rank: tuple[str, int]) -> tuple[int, int]:
        found = self.known[buffer_of_rank]
        return found.rows, found.cols

    def counter(self, signal: str, index: Index, rank: int) -> int:
        """Its address."""
        number = self._layout.counters[signal] + value(index)
        return self._counters[rank].data_ptr() + _core.COUNTER_BYTES * number

    def setters(self, wait: Wait) -> list[int]:
        """The ranks that set the counter which `wait` waits for, one for each set."""
        return self._setters[wait.signal, value(wait.index)]

    def is_updated_elsewhere(self, region: Region) -> bool:
        """Whether others may add to it at the same time: peers, or other lanes of this rank."""
        return region.buffer in self._shared
