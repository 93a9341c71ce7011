"""The launcher of the Triton kernel of embedding_all_to_all. It compiles the kernel's variants, and computes the grid. A
program (Triton's thread block) computes one unit of work at a time.

The caller passes the addresses of every rank's output, signals and flags. So the launcher needs no process group, and tests
can run all ranks in one process under Triton's interpreter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft import _core, env
from weft.embedding import JaggedInput
from weft.embedding.check import CheckedInput
from weft.embedding.plan import EmbeddingPlan
from weft.kernels import embedding_all_to_all as device_code
from weft.runtime.capture import refuse_capture
from weft.runtime.cuda.embedding_tables import KernelTables, Tables
from weft.runtime.cuda.kernel_call import direct_program, loaded
from weft.symm.lasting import lasting

_TRITON_TYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_MAX_ROWS = 16  # rows that a program loads at the same time
_TILE = 1024  # elements that a program loads at the same time; on H200, 2048 is slower: more registers, fewer programs
# The limit of registers per thread. True: with staged slices, or with rows loaded ahead. Other limits from 64 to 168 are slower on
# H200.
_REGISTERS = {False: 168, True: 128}
# The largest tile whose rows are loaded ahead. Larger tiles and masks of columns need too many registers.
_AHEAD_BYTES = 2048
_BY_SLOT_IDS = 2  # mean ids of a bag from which the kernel pools feature by feature; with one id, H100 is slower
# With `direct`, starting and ending a program costs time. So small calls use fewer programs: one per this many bags or
# bytes, but at least this many per SM. Measured on H100.
_PROGRAM_BAGS = 24
_PROGRAM_BYTES = 96 << 10
_PROGRAMS_PER_SM = 8
_MOST_RESIDENT = 32  # the most programs that an SM runs at the same time
_INT32_POSITIONS = (1 << 31) - 64  # with more values or offsets, positions have 64 bits


class RankAddresses(NamedTuple):
    """The addresses, on this device, of each rank's memory, and the size of one output buffer in bytes."""

    ranks: Tables
    """Three tensors of addresses, int64 [world] each: the outputs, the signals and the flags of every rank."""
    output_bytes: int


class VariantKey(NamedTuple):
    """The parameters, besides the plan, for which the kernel is compiled.

    values, offsets: the dtypes of the ids and of the offsets. wide: True if positions in these tensors need 64 bits.
    enter, leave: True for the first and for the last launch of a call (the constants ENTER and EXIT).
    """

    values: torch.dtype
    offsets: torch.dtype
    wide: bool
    weighted: bool
    wait: bool
    counted: bool
    timeline: bool
    enter: bool
    leave: bool
    registers: int | None = None
    """The limit of registers per thread; None: the launcher's own."""
    single: bool = False
    """True if the kernel pools all features of a unit of work at the same time, because bags have one id each."""


class Occupancy(NamedTuple):
    """Limits that determine the number of concurrent programs, for experiments.

    programs: the largest number of programs on each multiprocessor of the GPU. None: the launcher's choice.
    registers: the largest number of registers per thread. With fewer registers per thread, more programs fit on a
        multiprocessor, but registers may be spilled. None: the launcher's choice.
    """

    programs: int | None = None
    registers: int | None = None


class Footprint(NamedTuple):
    """The resources of a compiled kernel, whose programs have one warp.

    registers, spilled: registers and spilled registers per thread.
    programs: the number of programs that run at the same time on one of the `multiprocessors` of the GPU.
    """

    registers: int
    spilled: int
    programs: int
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class _Variant:
    """A variant of the embedding kernel, compiled. resident: the number of programs that the GPU can run at the same time."""

    compiled: Any  # None under the interpreter
    constants: tuple[Any, ...]
    resident: int
    tables: Tables
    """The kernel's arguments `staging`, `state` and `record`, with their addresses."""
    program: _core.StreamProgram | None
    """A prepared launch to which each call passes its grid and arguments, or None if Triton must launch."""


class EmbeddingKernel(KernelTables):
    """The compiled kernel and the tables of one rank of a plan, on one device.

    widest: as for `KernelTables`.
    """

    def __init__(self, plan: EmbeddingPlan, rank: int, device: torch.device, widest: int = 1) -> None:
        super().__init__(plan, rank, device, widest)
        self._rows = max(1, min(_MAX_ROWS, _TILE // self._block_d))
        self._interpreted = env.triton_interpreted()
        self._on_nvidia = device.type == "cuda" and torch.version.hip is None and not self._interpreted
        # Tables of different sizes have bags of different lengths. Feature by feature, the kernel would pool long bags, which
        # memory limits, and short bags, which links limit, one after the other.
        sizes = {
            (plan.sharding.tables[i].num_embeddings, plan.sharding.tables[i].embedding_dim)
            for i in plan.sharding.local_tables(rank)
        }
        self._pools_by_slot = not self._staged and len(sizes) == 1
        is_small = self._rows * self._block_d * self._item_bytes <= _AHEAD_BYTES
        self._is_uniform = all(slot.dim == self._block_d for slot in plan.sharding.slots)
        self._loads_ahead = not self._staged and is_small and self._is_uniform
        self._one_piece = all(slot.dim <= self._block_d for slot in self._slots)
        self._slices_before = sum(plan.slices_per_sample[:rank])
        self._slices_in_all = sum(plan.slices_per_sample)
        state = [
            device_code.NO_POSITION if i == device_code.BAD_POSITION else 0 for i in range(device_code.STATE_WORDS)
        ]
        self.state = lasting(device, lambda: torch.tensor(state, dtype=torch.int64, device=device))
        self.record = torch.zeros(device_code.RECORD_WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._variants: dict[VariantKey, _Variant] = {}

    def _programs(self, resident: int, units: int, n_values: int, batch: int) -> int:
        """Return the number of programs with which to launch the embedding kernel.

        resident: the number of programs that the GPU can run at the same time. units: the number of units of work.
            n_values: the number of ids. batch: the number of samples.
        """
        if self._staged:
            return max(1, min(resident, units))
        work = max(batch * len(self._slots) / _PROGRAM_BAGS, n_values * self._mean_bytes / _PROGRAM_BYTES)
        wanted = min(units, max(_PROGRAMS_PER_SM * self._sms, work))
        per_sm = max(1, math.ceil(wanted / self._sms))
        return min(resident, self._sms * (1 << (per_sm - 1).bit_length() if per_sm <= 8 else -(-per_sm // 4) * 4))

    # --- launching ---

    def launch(
        self,
        weights: list[torch.Tensor],
        jagged: JaggedInput,
        checked: CheckedInput,
        memory: RankAddresses,
        out_slot: int,
        deadline_s: float,
        *,
        wait: bool = True,
        count: bool = False,
        launch_per_table: bool = False,
        timeline: torch.Tensor | None = None,
        captured: bool = False,
        occupancy: Occupancy | None = None,
    ) -> None:
        """Enqueue one call on the current stream.

        memory: the addresses of all ranks' memory. out_slot: the index of the output buffer that this rank uses for this
            call.
        deadline_s: the longest wait for a peer, in seconds.
        wait: False if no peer takes part in the call, so that the kernel must not wait.
        count: True to count the copies and flags that the kernel writes, in words of `state`.
        launch_per_table: True to launch the kernel once for each feature, instead of once for all.
        timeline: memory into which the kernel writes times, int64 zeros `[timeline_lines(...), TIMELINE_FIELDS]`. None for no
            timeline.
        captured: True if a CUDA graph captures the call. The tables that replays read are then never freed.
        occupancy: a limit on programs and registers; None: the launcher's choice.
        """
        if launch_per_table and self._staged:
            raise ValueError(
                "launch_per_table=True needs transport='direct', because a slice of 'put' may contain several tables"
            )
        slot_table = self._slot_table(weights, checked)
        last = len(self._slots) - 1
        call = slot_table, jagged, checked, memory, out_slot, deadline_s, wait, count, timeline, captured, occupancy
        if not launch_per_table or last <= 0:
            self._launch_part(*call, None, True, True)
            return
        for number in range(last + 1):
            self._launch_part(*call, number, number == 0, number == last)

    def n_units(self, jagged: JaggedInput, checked: CheckedInput) -> int:
        """Return the number of units of work of a call with this input."""
        return self._work(jagged, checked, None).per_sample * checked.global_batch

    def timeline_lines(self, jagged: JaggedInput, checked: CheckedInput) -> int:
        """Return the number of rows of a call's timeline: one for each unit of work, then one for each program that the GPU
        can run at the same time.
        """
        return self.n_units(jagged, checked) + _MOST_RESIDENT * self._sms

    @property
    def footprints(self) -> dict[VariantKey, Footprint]:
        """The registers and other resources of each variant of the kernel that has been compiled so far."""
        return {
            key: Footprint(
                int(variant.compiled.n_regs), int(variant.compiled.n_spills), variant.resident // self._sms, self._sms
            )
            for key, variant in self._variants.items()
            if variant.compiled is not None
        }

    def _launch_part(
        self, slot_table: torch.Tensor, jagged: JaggedInput, checked: CheckedInput, memory: RankAddresses, out_slot: int,
        deadline_s: float, wait: bool, count: bool, timeline: torch.Tensor | None, captured: bool, occupancy: Occupancy | None,
        slot: int | None, enter: bool, leave: bool,
    ) -> None:  # fmt: skip
        batch, n_values = checked.global_batch, jagged.values.numel()
        work = self._work(jagged, checked, slot)
        units = work.per_sample * batch
        weighted, timed = jagged.weights is not None, timeline is not None
        wide = max(n_values, jagged.offsets.numel()) >= _INT32_POSITIONS
        registers = None if occupancy is None else occupancy.registers
        single = not timed and self._pools_single_ids(jagged)
        key = (
            jagged.values.dtype,
            jagged.offsets.dtype,
            wide,
            weighted,
            wait,
            count,
            timed,
            enter,
            leave,
            registers,
            single,
        )
        variant = self._variants.get(key) or self._compile(VariantKey(*key))  # type: ignore[call-overload]
        given = slot_table, jagged.values, jagged.offsets, jagged.weights, timeline
        numbers = (
            batch, units, n_values, out_slot, memory.output_bytes, self._fingerprint(checked),
            int(deadline_s * 1e9), max(1, work.per_sample), self._slices_before, self._slices_in_all,
            first_sample(checked.batch_sizes, self.rank, self.plan.options.order), int(work.is_even),
            int(self._pools_by_slot and n_values >= _BY_SLOT_IDS * (jagged.offsets.numel() - 1)),
        )  # fmt: skip
        grid = self._programs(variant.resident, units, n_values, batch)
        if occupancy is not None and occupancy.programs is not None:
            grid = max(1, min(variant.resident, occupancy.programs * self._sms, units))
        kept = work.tables, memory.ranks, variant.tables
        if variant.compiled is None:
            here = [self.state if tensor is None else tensor for tensor in given]
            tensors = [tensor for tables in kept for tensor in tables.tensors]
            device_code.embedding_all_to_all_kernel[grid, 1, 1](*here, *tensors, *numbers, *variant.constants)
            return
        if captured:
            self._of_graphs.append((slot_table, memory, work, variant))
        # Pass addresses: for a tensor, Triton makes a dozen driver calls, which take longer than the launch.
        arguments = (
            *[0 if tensor is None else tensor.data_ptr() for tensor in given],
            *work.tables.addresses, *memory.ranks.addresses, *variant.tables.addresses, *numbers,
        )  # fmt: skip
        device = self.device.index
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                variant.compiled[grid, 1, 1](*arguments, *variant.constants)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        if variant.program is not None:
            variant.program.run(0, 1, (grid, 1, *arguments), (stream,))
        else:
            variant.compiled[grid, 1, 1](*arguments, *variant.constants, stream=stream)

    def _pools_single_ids(self, jagged: JaggedInput) -> bool:
        """True if the kernel pools all features of a unit of work at the same time, because the bags of this input
        probably have one id each.
        """
        return self._one_piece and not self._staged and jagged.values.numel() == jagged.offsets.numel() - 1

    def _fingerprint(self, checked: CheckedInput) -> int:
        """Return a hash of the batch sizes, which the kernels of all ranks compare in each call."""
        return hash(checked.batch_sizes) & ((1 << 62) - 1)

    def constants(self, key: VariantKey) -> dict[str, Any]:
        """Return the compile-time arguments (`tl.constexpr`) of the embedding kernel for a variant, in order."""
        sharding = self.plan.sharding
        dims = [slot.dim for slot in sharding.slots]
        # Every address that the kernel forms is a multiple of this many elements, up to 16 bytes.
        steps = [*dims, *(slot.column for slot in sharding.slots), sharding.total_dim, 16 // self._item_bytes]
        # Lanes exchange row numbers. 32 bits are enough, except for tables of more than 2^31 rows.
        most_rows = max((table.num_embeddings for table in sharding.tables), default=1)
        stage_width = -(-self._unit_table(0)[2] // 8) * 8 if self._staged else 1
        return {
            "RANK": self.rank,
            "WORLD": self.world_size,
            "WORLD_P2": triton.next_power_of_2(self.world_size),
            "OUT_STRIDE": sharding.total_dim,
            "ROWS": self._rows,
            "BLOCK_D": self._block_d,
            "UNIFORM": self._is_uniform,
            "ALIGN": min(step & -step for step in steps if step),
            "DTYPE": _TRITON_TYPE[sharding.dtype],
            "ITEM_BYTES": self._item_bytes,
            "OUT_DTYPE": _TRITON_TYPE[self.plan.output_dtype],
            "OUT_BYTES": self.plan.output_dtype.itemsize,
            "ROW": tl.int32 if most_rows < 1 << 31 else tl.int64,
            "POSITION": tl.int64 if key.wide else tl.int32,
            "STAGED": self._staged,
            "STAGE_WIDTH": stage_width,
            "WEIGHTED": key.weighted,
            "ANY_MEAN": any(sharding.tables[slot.table].pooling == "mean" for slot in self._slots),
            "HASH": self.plan.options.hash,
            "CHECK": self.plan.options.checks_ids,
            "ENTER": key.enter,
            "EXIT": key.leave,
            "WAIT": key.wait,
            "COUNT": key.counted,
            "TIMELINE": key.timeline,
            "PTX": self._on_nvidia,
            "AHEAD": self._loads_ahead,
            "SINGLE": key.single,
        }

    def _compile(self, key: VariantKey) -> _Variant:
        """Compile and load a variant of the embedding kernel. Loading it later, while a kernel waits for a peer, would
        deadlock.
        """
        refuse_capture(self.device)
        constants = self.constants(key)
        compiled, program, resident = None, None, self._sms
        if not self._interpreted:
            compiled = loaded(self.device, lambda: self.compile(key, constants))
            program = direct_program(compiled, len(compiled.src.fn.arg_names) - len(constants))
            # Each program has one warp. Registers are allocated in blocks of 256 per warp. An SM has 65536 registers
            # and at most 32 programs. For other vendors' GPUs 16 programs are safe.
            most = 65536 // (-(-int(compiled.n_regs) * 32 // 256) * 256)
            per_sm = min(_MOST_RESIDENT, most) if self._on_nvidia else 16
            resident = per_sm * self._sms
        staged, dtype = resident * constants["STAGE_WIDTH"], self.plan.output_dtype
        staging = lasting(self.device, lambda: torch.empty(staged, dtype=dtype, device=self.device))
        self._variants[key] = variant = _Variant(
            compiled, tuple(constants.values()), resident, Tables.of(staging, self.state, self.record), program
        )  # fmt: skip
        return variant

    def compile(self, key: VariantKey, constants: dict[str, Any]) -> Any:
        """Compile a variant of the embedding kernel for Triton's current device, without loading it."""
        kernel = device_code.embedding_all_to_all_kernel
        types = {
            "values": key.values,
            "offsets": key.offsets,
            "per_sample_weights": torch.float32 if key.weighted else torch.int64,
            "staging": self.plan.output_dtype,
        }
        pointers = [types.get(name, torch.int64) for name in kernel.arg_names[: device_code.POINTERS]]
        numbers = [1] * (len(kernel.arg_names) - len(pointers) - len(constants))
        # By default ptxas saves registers and splits the loads of a block of rows. With a limit, it uses up to this
        # many registers.
        limit = {"maxnreg": key.registers or _REGISTERS[self._staged or self._loads_ahead]} if self._on_nvidia else {}
        return kernel.warmup(*pointers, *numbers, grid=(1,), num_warps=1, **limit, **constants)


def first_sample(batch_sizes: tuple[int, ...], rank: int, order: str) -> int:
    """Return the index, in the global batch, of the sample that `rank` pools first. The rank pools all samples in cyclic
    order from there.

    order: "natural" to begin with sample 0; "remote_first" to begin with the first sample of the next rank, so that this
        rank's own samples are last.
    """
    return 0 if order == "natural" else sum(batch_sizes[: rank + 1]) % max(1, sum(batch_sizes))
