"""Launching the Triton kernel of embedding_all_to_all: its tables on the device, its shape, its grid.

Knows no groups: the caller says where every rank's output, signals and flags are mapped. That is also how one process
can play all ranks in turn, under Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from weft import env
from weft.kernels import embedding_all_to_all as device_code
from weft.runtime.embedding_plan import EmbeddingPlan, Unit
from weft.sparse import JaggedInput
from weft.sparse.check import CheckedInput

_TRITON_TYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_MAX_BLOCK_D = 256
_MAX_ROWS = 16  # rows in flight per program; measured: 8, 16 and 32 differ by 1%, 32 costs registers
_TILE = 2048  # elements in flight per program at most
_UNIT_BYTES = 16384  # what a program grabs at once: enough to hide the grab, little enough to leave no tail
_MAX_UNIT_SLOTS = 32
_CACHED_BATCHES = 64


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the ranks' memory is mapped on this device: int64 [world] each, and what one output buffer takes."""

    outputs: torch.Tensor
    signals: torch.Tensor
    flags: torch.Tensor
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What the compiler made of one variant."""

    registers: int
    spills: int
    programs_per_sm: int
    grid: int


class EmbeddingKernel:
    """The kernel of one rank of one plan on one device."""

    def __init__(self, plan: EmbeddingPlan, rank: int, device: torch.device) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        sharding = plan.sharding
        self.world_size = sharding.world_size
        self._slots = sharding.local_slots(rank)
        local = {table: number for number, table in enumerate(sharding.local_tables(rank))}
        self._weight_of_slot = [local[slot.table] for slot in self._slots]
        self._item_bytes = sharding.dtype.itemsize
        dims = [slot.dim for slot in self._slots] or [1]
        self._block_d = min(_MAX_BLOCK_D, max(4, triton.next_power_of_2(max(dims))))
        self._rows = max(1, min(_MAX_ROWS, _TILE // self._block_d))
        # Every address that the kernel forms is a multiple of this many elements, up to 16 bytes.
        steps = [*dims, *(slot.column for slot in self._slots), sharding.total_dim, 16 // self._item_bytes]
        self._align = min(step & -step for step in steps if step)
        self._pieces_of_slot = [-(-slot.dim // self._block_d) for slot in self._slots]
        self._uniform = all(slot.dim == self._block_d for slot in self._slots)
        self._any_mean = any(sharding.tables[slot.table].pooling == "mean" for slot in self._slots)
        self._slices_before = sum(plan.slices_per_sample[:rank])
        self._slices_in_all = sum(plan.slices_per_sample)
        self._interpreted = env.triton_interpreted()
        self._on_nvidia = device.type == "cuda" and torch.version.hip is None and not self._interpreted
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        self.state = torch.zeros(device_code.STATE_WORDS, dtype=torch.int64, device=device)
        self.state[device_code.BAD_POSITION] = device_code.NO_POSITION
        self.record = torch.zeros(device_code.RECORD_WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._units: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._slot_tables: dict[Any, torch.Tensor] = {}
        self._batch_starts: dict[tuple[int, ...], torch.Tensor] = {}
        self._occupancy: dict[Any, Occupancy] = {}
        self._staging = torch.empty(0, dtype=sharding.dtype, device=device)

    # --- tables on the device, made once per set of tables, features or batch sizes ---

    def _device_table(self, rows: list[list[int]], fields: int) -> torch.Tensor:
        return torch.tensor(rows or [[0] * fields], dtype=torch.int64, device=self.device)

    def _slot_table(self, weights: list[torch.Tensor], key_of_slot: tuple[int, ...]) -> torch.Tensor:
        key = (tuple(weight.data_ptr() for weight in weights), key_of_slot)
        table = self._slot_tables.get(key)
        if table is not None:
            return table
        rows = []
        for slot, weight_number, key_block in zip(self._slots, self._weight_of_slot, key_of_slot, strict=True):
            weight = weights[weight_number]
            mean = int(self.plan.sharding.tables[slot.table].pooling == "mean")
            for begin in range(0, slot.dim, self._block_d):
                width = min(self._block_d, slot.dim - begin)
                address = weight.data_ptr() + begin * self._item_bytes
                rows.append(
                    [address, weight.shape[0], slot.dim, key_block, slot.column + begin, width, mean, int(begin == 0)]
                )
        if len(self._slot_tables) >= 4:
            self._slot_tables.clear()  # tables that move at every call would fill the memory
        self._slot_tables[key] = table = self._device_table(rows, device_code.SLOT_FIELDS)
        return table

    def _unit_table(self, slots_per_unit: int) -> tuple[torch.Tensor, int, int]:
        """(table, units per sample, widest unit in columns); 0 slots per unit stands for the slices of `put`."""
        cached = self._units.get(slots_per_unit)
        if cached is not None:
            return cached
        if slots_per_unit == 0:
            units = self.plan.slices(self.rank)
        else:
            n = len(self._slots)
            units = tuple(
                Unit(
                    i,
                    min(i + slots_per_unit, n),
                    self._slots[i].column,
                    sum(s.dim for s in self._slots[i : i + slots_per_unit]),
                )
                for i in range(0, n, slots_per_unit)
            )
        first_piece = [0]
        for pieces in self._pieces_of_slot:
            first_piece.append(first_piece[-1] + pieces)
        rows = [[first_piece[u.first], first_piece[u.end], u.column, u.width] for u in units]
        widest = max((u.width for u in units), default=1)
        self._units[slots_per_unit] = made = (self._device_table(rows, device_code.UNIT_FIELDS), len(rows), widest)
        return made

    def _starts(self, batch_sizes: tuple[int, ...]) -> torch.Tensor:
        starts = self._batch_starts.get(batch_sizes)
        if starts is None:
            if len(self._batch_starts) >= _CACHED_BATCHES:
                self._batch_starts.clear()
            sums = [0]
            for size in batch_sizes:
                sums.append(sums[-1] + size)
            self._batch_starts[batch_sizes] = starts = torch.tensor(sums, dtype=torch.int64, device=self.device)
        return starts

    def _slots_per_unit(self, n_values: int, batch: int) -> int:
        """How many pooled vectors a program grabs at once for `direct`: about _UNIT_BYTES of rows, but enough units for all."""
        n = max(1, len(self._slots))
        bags = max(1, batch * n)
        row_bytes = self._item_bytes * sum(slot.dim for slot in self._slots) / n
        bag_bytes = max(1.0, n_values / bags * row_bytes)
        most = min(_MAX_UNIT_SLOTS, n, max(1, bags // (4 * 32 * self._sms)))
        slots = 1
        while slots * 2 <= most and slots * 2 * bag_bytes <= _UNIT_BYTES:
            slots *= 2
        return slots

    # --- launching ---

    def launch(
        self,
        weights: list[torch.Tensor],
        jagged: JaggedInput,
        checked: CheckedInput,
        memory: Memory,
        out_slot: int,
        deadline_s: float,
        *,
        wait: bool = True,
        count: bool = False,
        launch_per_table: bool = False,
        timeline: torch.Tensor | None = None,
    ) -> None:
        """Enqueue one call on the current stream. With `timeline` int64 [units, 3] fills a line per unit (see `n_units`)."""
        slot_table = self._slot_table(weights, checked.key_of_slot)
        if not launch_per_table:
            self._launch_part(slot_table, jagged, checked, memory, out_slot, deadline_s, wait, count, timeline, None)
            return
        n = len(self._slots)
        for number in range(max(1, n)):
            part = (number, number == 0, number >= n - 1)
            self._launch_part(slot_table, jagged, checked, memory, out_slot, deadline_s, wait, count, None, part)

    def n_units(self, jagged: JaggedInput, checked: CheckedInput) -> int:
        """Units of work of a call with this input: the lines that its timeline has."""
        staged = self.plan.transport == "put"
        _, per_sample, _ = self._unit_table(
            0 if staged else self._slots_per_unit(jagged.values.numel(), checked.global_batch)
        )
        return per_sample * checked.global_batch

    def _launch_part(
        self, slot_table: torch.Tensor, jagged: JaggedInput, checked: CheckedInput, memory: Memory, out_slot: int,
        deadline_s: float, wait: bool, count: bool, timeline: torch.Tensor | None, part: tuple[int, bool, bool] | None,
    ) -> None:  # fmt: skip
        plan, batch = self.plan, checked.global_batch
        staged = plan.transport == "put"
        starts = self._starts(checked.batch_sizes)
        per_unit = 0 if staged else self._slots_per_unit(jagged.values.numel(), batch)
        if part is not None:
            per_unit = 1  # one slot per launch: the units of a sample are its slots, of which this launch takes one
        units, per_sample, widest = self._unit_table(per_unit)
        if part is not None:
            units, per_sample = units[part[0] :], min(1, per_sample)
        n_units = per_sample * batch
        first_sample = 0
        if plan.order == "remote_first" and batch:
            first_sample = sum(checked.batch_sizes[: (self.rank + 1) % self.world_size]) % batch
        stage_width = -(-widest // 8) * 8 if staged else 1
        weighted = jagged.weights is not None
        meta: dict[str, Any] = {
            "RANK": self.rank, "WORLD": self.world_size, "WORLD_P2": triton.next_power_of_2(self.world_size),
            "OUT_STRIDE": plan.sharding.total_dim, "ROWS": self._rows, "BLOCK_D": self._block_d, "UNIFORM": self._uniform,
            "ALIGN": self._align, "DTYPE": _TRITON_TYPE[plan.sharding.dtype], "ITEM_BYTES": self._item_bytes,
            "STAGED": staged, "STAGE_WIDTH": stage_width, "WEIGHTED": weighted, "ANY_MEAN": self._any_mean,
            "HASH": plan.hash, "CHECK": plan.bounds_check != "ignore" and not plan.hash,
            "ENTER": part is None or part[1], "EXIT": part is None or part[2], "WAIT": wait, "COUNT": count,
            "TIMELINE": timeline is not None, "PTX": self._on_nvidia, "num_warps": 1,
        }  # fmt: skip
        key = (
            jagged.values.dtype,
            jagged.offsets.dtype,
            weighted,
            wait,
            count,
            timeline is not None,
            meta["ENTER"],
            meta["EXIT"],
        )

        def arguments(staging: torch.Tensor) -> tuple[Any, ...]:
            return (
                slot_table, units, jagged.values, jagged.offsets, jagged.weights if weighted else self.state, starts,
                memory.outputs, memory.signals, memory.flags, staging, self.state, self.record,
                self.state if timeline is None else timeline,
                batch, n_units, jagged.values.numel(), first_sample, out_slot, memory.output_bytes,
                self._fingerprint(checked), int(deadline_s * 1e9), max(1, per_sample), self._slices_before, self._slices_in_all,
            )  # fmt: skip

        occupancy = self._occupancy.get(key)
        if occupancy is None:
            self._occupancy[key] = occupancy = self._compile(arguments(self._staging), meta)
        grid = max(1, min(occupancy.grid, n_units))
        if staged and self._staging.numel() < grid * stage_width:
            self._staging = torch.empty(occupancy.grid * stage_width, dtype=plan.sharding.dtype, device=self.device)
        device_code.embedding_all_to_all_kernel[(grid,)](*arguments(self._staging), **meta)

    def _fingerprint(self, checked: CheckedInput) -> int:
        """What a call must agree on beyond the plan, never a small number (Triton would give it another type)."""
        return (hash(checked.batch_sizes) & ((1 << 60) - 1)) | (1 << 61)

    def _compile(self, arguments: tuple[Any, ...], meta: dict[str, Any]) -> Occupancy:
        """Compile and load one variant before anything waits for it; how many programs are resident at once."""
        if self._interpreted:
            return Occupancy(0, 0, 1, self._sms)
        kernel = device_code.embedding_all_to_all_kernel.warmup(*arguments, grid=(1,), **meta)
        kernel._init_handles()
        registers, spills = int(kernel.n_regs), int(kernel.n_spills)
        if not self._on_nvidia:
            per_sm = 16  # no occupancy rules of other makers here: a safe number
        else:
            # One warp each: registers come in blocks of 256 per warp, an SM holds 65536 of them and at most 32 programs.
            per_sm = min(32, 65536 // (-(-registers * 32 // 256) * 256))
        return Occupancy(registers, spills, per_sm, per_sm * self._sms)

    @property
    def occupancy(self) -> list[Occupancy]:
        """One entry per compiled variant."""
        return list(self._occupancy.values())
