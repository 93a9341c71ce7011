"""The tables that the kernel of embedding_all_to_all reads on the device: features, units of work, and batch sizes. They are
made once per set of tables, features or batch sizes.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton

from weft.builders.embedding_all_to_all import Unit
from weft.embedding import JaggedInput
from weft.embedding.check import CheckedInput
from weft.embedding.plan import EmbeddingPlan
from weft.kernels.embedding_bags import SLOT_FIELDS, UNIT_FIELDS
from weft.runtime.capture import refuse_capture
from weft.symm.lasting import lasting

_MAX_BLOCK_D = 256
_UNIT_BYTES = 16384  # bytes per unit of work: large enough to hide the atomic, small enough to balance programs
_MAX_UNIT_SLOTS = 32
_CACHED_BATCHES = 32


class Tables(NamedTuple):
    """Device tensors that many launches read, and the addresses of the tensors, because asking a tensor for its address takes
    long.
    """

    tensors: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Tables:
        return cls(tensors, tuple(tensor.data_ptr() for tensor in tensors))


class Work(NamedTuple):
    """The units of work of a launch of the embedding kernel, as tensors on the device. Two calls share the tensors if their
    units have the same number of features, and if both divide the batch evenly or both have the same batch sizes.
    """

    tables: Tables
    """The units of work of each sample. If ranks have uneven batch sizes, also the first sample of each rank, and the
    number of all samples (int64).
    """
    per_sample: int
    """The number of units of work of each sample."""
    is_even: bool
    """True if ranks share the batch evenly. The kernel then computes the first sample of each rank."""


class KernelTables:
    """The tables of one rank of a plan, on one device.

    widest: the number of columns of the widest feature on any rank. Pass it if `plan` has only this rank's features. The
        number determines the block size of all ranks, so that results have the same bits for any placement of tables.
    """

    def __init__(self, plan: EmbeddingPlan, rank: int, device: torch.device, widest: int) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        sharding = plan.sharding
        self.world_size = sharding.world_size
        self._slots = sharding.local_slots(rank)
        local = {table: number for number, table in enumerate(sharding.local_tables(rank))}
        self._weight_of_slot = [local[slot.table] for slot in self._slots]
        self._staged = plan.options.transport == "put" and self.world_size > 1
        self._item_bytes = sharding.dtype.itemsize
        # The slots of all ranks determine the tiles: the order in which a bag is reduced must not depend on the owner
        # of the table or on the number of ranks.
        dims = [widest, *(slot.dim for slot in sharding.slots)]
        self._mean_bytes = sum(slot.dim for slot in self._slots) / max(1, len(self._slots)) * self._item_bytes
        self._block_d = min(_MAX_BLOCK_D, max(4, triton.next_power_of_2(max(dims))))
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        self._units: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._slot_tables: dict[Any, torch.Tensor] = {}
        self._batches: dict[tuple[int, ...], torch.Tensor] = {}
        self._room = torch.empty(0, 0, dtype=torch.int64)  # a row for each table of uneven batch sizes
        self._n_taken = 0  # rows of `_room` in use
        self._works: dict[tuple[tuple[int, ...] | None, int, int | None], Work] = {}
        self._of_graphs: list[Any] = []  # tables that captured launches read in every replay

    @property
    def captured(self) -> bool:
        """True if a CUDA graph that may be replayed launches this kernel."""
        return bool(self._of_graphs)

    def _device_table(self, rows: list[list[int]], fields: int) -> torch.Tensor:
        refuse_capture(self.device)
        rows = rows or [[0] * fields]
        return lasting(self.device, lambda: torch.tensor(rows, dtype=torch.int64, device=self.device))

    def _slot_table(self, weights: list[torch.Tensor], checked: CheckedInput) -> torch.Tensor:
        key_of_slot = checked.key_of_slot
        key = (checked.tables or tuple([(weight.data_ptr(), len(weight)) for weight in weights]), key_of_slot)
        table = self._slot_tables.get(key)
        if table is not None:
            return table
        rows = []
        for slot, weight_number, key_block in zip(self._slots, self._weight_of_slot, key_of_slot, strict=True):
            weight = weights[weight_number]
            mean = int(self.plan.sharding.tables[slot.table].pooling == "mean")
            for begin in range(0, slot.dim, self._block_d):
                width = min(self._block_d, slot.dim - begin)
                place = [weight.data_ptr() + begin * self._item_bytes, weight.shape[0], slot.dim]
                rows.append([*place, key_block, slot.column + begin, width, mean, int(begin == 0)])
        if len(self._slot_tables) >= 4:
            self._slot_tables.clear()  # otherwise tables that move at every call would fill the memory
        self._slot_tables[key] = table = self._device_table(rows, SLOT_FIELDS)
        return table

    def _unit_table(self, slots_per_unit: int) -> tuple[torch.Tensor, int, int]:
        """Return three values: the units of work into which a sample is divided, the number of units, and the number of columns
        of the widest unit. The units are int64 `[units, UNIT_FIELDS]` on the device.

        slots_per_unit: the number of features (slots) that a unit pools. With 0, the units are the slices of transport
            "put".
        """
        cached = self._units.get(slots_per_unit)
        if cached is not None:
            return cached
        if slots_per_unit == 0:
            units = self.plan.slices(self.rank)
        else:
            n, slots = len(self._slots), self._slots
            cuts = [(i, min(i + slots_per_unit, n)) for i in range(0, n, slots_per_unit)]
            units = tuple(Unit(i, end, slots[i].column, sum(s.dim for s in slots[i:end])) for i, end in cuts)
        first_piece = [0]
        for slot in self._slots:
            first_piece.append(first_piece[-1] - (-slot.dim // self._block_d))
        rows = [[first_piece[u.first], first_piece[u.end], u.column, u.width] for u in units]
        widest = max((u.width for u in units), default=1)
        self._units[slots_per_unit] = made = (self._device_table(rows, UNIT_FIELDS), len(rows), widest)
        return made

    def _starts(self, batch_sizes: tuple[int, ...]) -> torch.Tensor:
        """Return the first sample of each rank and the end of the last rank's samples, int64 `[world_size + 1]` on the device.
        The CPU does not wait.
        """
        table = self._batches.get(batch_sizes)
        if table is None:
            refuse_capture(self.device)
            on_host = torch.empty(self.world_size + 1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            on_host.numpy()[:] = list(accumulate(batch_sizes, initial=0))
            self._batches[batch_sizes] = table = self._taken().copy_(on_host, non_blocking=True)
        return table

    def _taken(self) -> torch.Tensor:
        """Return an int64 tensor `[world_size + 1]` that no launch uses. It is a part of a preallocated block.

        If no part is unused, drop the tensors that `_starts` has cached, and use the block again. If a CUDA graph reads the
        block, allocate another block instead.
        """
        if self._n_taken == len(self._room):
            if self._of_graphs or not self._n_taken:
                # Tables begin at multiples of 16 bytes, like separate allocations.
                shape = (_CACHED_BATCHES, self.world_size + 2 & ~1)
                self._room = lasting(self.device, lambda: torch.empty(shape, dtype=torch.int64, device=self.device))
            self._n_taken = 0
            self._batches.clear()
            self._works.clear()
        self._n_taken += 1
        return self._room[self._n_taken - 1, : self.world_size + 1]

    def _slots_per_unit(self, n_values: int, batch: int) -> int:
        """Return the number of features that a unit of work pools with transport "direct". A unit reads about _UNIT_BYTES of
        tables. It reads less if there would otherwise be too few units for all programs.

        n_values: the number of ids. batch: the number of samples.
        """
        n = max(1, len(self._slots))
        bags = max(1, batch * n)
        bag_bytes = n_values / bags * self._mean_bytes
        most = min(
            _MAX_UNIT_SLOTS, n, bags // (4 * 32 * self._sms), int(_UNIT_BYTES / bag_bytes) if bag_bytes > 1 else n
        )
        return 1 << (most.bit_length() - 1) if most else 1

    def _work(self, jagged: JaggedInput, checked: CheckedInput, slot: int | None) -> Work:
        """Return the units of work into which the kernel divides this input. slot: the index of the only feature to pool; None
        for all features.
        """
        size = 1
        if slot is None:
            size = 0 if self._staged else self._slots_per_unit(jagged.values.numel(), checked.global_batch)
        return self._work_of(checked, size, slot)

    def _work_of(self, checked: CheckedInput, size: int, slot: int | None) -> Work:
        """Return the units of work of a launch whose units pool `size` features each. slot: as for `_work`."""
        sizes = None if _is_even(checked.batch_sizes, checked.global_batch) else checked.batch_sizes
        key = sizes, size, slot
        work = self._works.get(key)
        if work is None:
            units, per_sample, _ = self._unit_table(size)
            if slot is not None:
                units, per_sample = units[slot:], min(1, per_sample)
            if len(self._works) >= _CACHED_BATCHES:
                self._works.clear()
            starts = units if sizes is None else self._starts(sizes)  # with even batch sizes the table is not read
            work = self._works[key] = Work(Tables.of(units, starts), per_sample, sizes is None)
        return work


def _is_even(batch_sizes: tuple[int, ...], batch: int) -> bool:
    """True if ranks share the batch evenly, with the remainder on the first ranks."""
    each, more = divmod(batch, len(batch_sizes))
    return batch_sizes == (each + 1,) * more + (each,) * (len(batch_sizes) - more)
