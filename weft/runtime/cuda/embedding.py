"""The GPU executor of embedding_all_to_all: one rank's part of every call, enqueued on the current stream.

The CPU waits for the device only with bounds_check="fatal", with `timeline`, and when memory grows. Results are valid in
stream order. The device records errors (a missed deadline, ranks that disagree, bad indices) in pinned memory, and the next
call or `check()` raises them. When the group fails, for example because a peer died, the watchdog uses the copy engine to
overwrite this rank's signals with POISON. Kernels that wait for the signals then return.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch

from weft import env
from weft.caller import warn
from weft.embedding import JaggedInput
from weft.embedding.check import CheckedInput, bad_index_message, first_bad_index
from weft.embedding.plan import EmbeddingPlan
from weft.errors import DeadlineError, DisagreementError, WeftError
from weft.kernels import embedding_all_to_all as device_code
from weft.runtime.capture import is_captured, refuse_capture
from weft.runtime.cuda.embedding_kernel import EmbeddingKernel, Occupancy, RankAddresses, Tables
from weft.runtime.cuda.kernel_failures import KernelFailures
from weft.runtime.meeting import refuse
from weft.runtime.outputs import LendingExecutor, OutputPool
from weft.symm import Communicator, Region, set_up_within
from weft.symm.lasting import lasting
from weft.timeline import Timeline
from weft.words import counted

_WAIT_NAMES = {device_code.WAIT_READY: "ready", device_code.WAIT_DONE: "done", device_code.WAIT_FLAG: "slice flag"}


class EmbeddingAllToAllCuda(LendingExecutor):
    """The executor of embedding_all_to_all for one plan (tables, placement and options), on a communicator of GPUs. All ranks
    must construct this object.
    """

    def __init__(self, plan: EmbeddingPlan, comm: Communicator) -> None:
        self.plan, self.comm, self.schedule = plan, comm, plan.schedule
        self.kernel = EmbeddingKernel(plan, comm.rank, comm.device)
        self.outputs = OutputPool(comm, plan.options.outputs)
        world = comm.world_size
        self._signals = comm.allocate(8 * 3 * world)
        self._flags = comm.allocate(8)
        self._flag_count = 1
        self._flags_of_graphs: list[
            tuple[Region, int]
        ] = []  # (flags that replays of captured graphs set, their number)
        self._captured = False
        self._memory: RankAddresses | None = None
        self._last_input: tuple[JaggedInput, CheckedInput] | None = None
        self._row_bytes = plan.sharding.total_dim * plan.output_dtype.itemsize
        self._flags_per_sample = sum(plan.slices_per_sample) if plan.options.transport == "put" else 0
        self._usual_deadline_s = env.deadline_s()
        # Allocate everything that the watchdog needs now: it may not load a module while a kernel waits.
        self._poison = torch.full((1024,), device_code.POISON, dtype=torch.int64, pin_memory=True)
        self._poison_stream = torch.cuda.Stream(comm.device, priority=-1)
        self._take_back = comm.on_failure(self._release_waiters)
        self._failures = KernelFailures(comm, self.kernel.record, self._failure_of)

    def run(
        self,
        tensors: dict[str, Any],
        *,
        deadline_s: float | None = None,
        timeline: Timeline | None = None,
        like_before: bool = False,
        count: bool = False,
        launch_per_table: bool = False,
        occupancy: Occupancy | None = None,
        lines: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Enqueue one call. Return the output `[batch_sizes[rank], total_dim]` as "out", valid in stream order.

        tensors: "tables", a list of this rank's tables, and "bags", a pair (`JaggedInput`, `CheckedInput`).
        deadline_s: the longest wait for another rank, in seconds; by default `WEFT_DEADLINE_S` when this executor was made.
        like_before: ignored; other executors use it.
        count, launch_per_table, occupancy: see `EmbeddingKernel.launch`.
        timeline: receives the times of each unit of work. The call then waits for the device. None for no timeline.
        lines: the result of `timeline_lines`. The kernel writes the timeline into it, and the CPU does not wait.
        """
        weights, (jagged, checked) = tensors["tables"], tensors["bags"]
        self.check()
        if self.plan.options.refuses_bad_ids:
            bad = first_bad_index(jagged, self.plan.sharding, self.comm.rank, checked)  # waits for the device
            if bad is not None:
                refuse(self.comm, bad, deadline_s=deadline_s)
        plan, comm = self.plan, self.comm
        largest = max(checked.batch_sizes, default=0)
        patience_s = deadline_s or self._usual_deadline_s  # a peer may still compile a kernel first
        captured = torch.cuda.is_current_stream_capturing()
        grown = self.outputs.reserve(largest * self._row_bytes, self._quiesce, patience_s)
        if largest * self._flags_per_sample > self._flag_count:
            refuse_capture(self.comm.device)
            flag_count = max(largest * self._flags_per_sample, 2 * self._flag_count)
            with set_up_within(patience_s):
                self._quiesce()
                fewer, self._flags = self._flags, comm.allocate(8 * flag_count)
            if self._captured:
                self._flags_of_graphs.append((fewer, self._flag_count))
            else:
                fewer.give_back()
            self._flag_count = flag_count
            grown = True
        if grown or self._memory is None:
            self._memory = self._map()
        self._captured = self._captured or captured
        slot = self.outputs.acquire()
        if timeline is not None:
            lines = self.timeline_lines(tensors)
        try:
            self.kernel.launch(
                weights, jagged, checked, self._memory, slot, patience_s,
                count=count, launch_per_table=launch_per_table, timeline=lines, captured=captured, occupancy=occupancy,
            )  # fmt: skip
        except BaseException:
            self.outputs.give_back(slot)
            raise
        self._last_input = (jagged, checked)
        shape = (checked.batch_sizes[comm.rank], plan.sharding.total_dim)
        output = self.outputs.lend(slot, shape, plan.output_dtype, captured)
        if timeline is not None:
            assert lines is not None
            self._read_timeline(timeline, lines, self.kernel.n_units(jagged, checked))
        return {"out": output}

    def timeline_lines(self, tensors: dict[str, Any]) -> torch.Tensor:
        """Return zeroed int64 memory for the timeline of a call: a row for each unit of work, then a row for each program's
        wait for its peers.
        """
        shape = self.kernel.timeline_lines(*tensors["bags"]), device_code.TIMELINE_FIELDS
        return torch.zeros(shape, dtype=torch.int64, device=self.comm.device)

    def check(self) -> None:
        """Raise the error of an earlier call or of the group, if any, and warn of bad indices in earlier calls. Do not wait for
        the device.
        """
        _warn_of_bad_input(self.kernel, self._failures.record, self._last_input, self.comm.rank)
        self._failures.check()

    def _failure_of(self, status: int, epoch: int, peer: int, wanted: int, found: int) -> WeftError:
        if status == device_code.DISAGREE:
            return DisagreementError(
                f"rank {self.comm.rank}: rank {peer} called embedding_all_to_all with other batch_sizes in launch {epoch} of this "
                "configuration's kernel: pass the same global batch and batch_sizes on every rank"
            )
        text = (
            f"rank {self.comm.rank}: the wait for signal {_WAIT_NAMES[status]!r} of rank {peer} in embedding_all_to_all missed its "
            f"deadline: wanted {wanted}, found {found}, in launch {epoch} of this configuration's kernel (replays of CUDA graphs "
            "count). Check that all ranks made the same call"
        )
        if status == device_code.WAIT_FLAG:
            text = text.replace(f" of rank {peer} ", f" number {peer} ")
        return DeadlineError(text)

    def close(self) -> None:
        """Free the memory, after the devices of all ranks are done. Captured graphs must not be replayed afterwards.
        Repeated calls have no effect.
        """
        if self.closed:
            return
        self.closed = True
        self._failures.close()
        self._take_back()
        self.outputs.close()
        self._signals.give_back()
        for flags, _ in [(self._flags, 0), *self._flags_of_graphs]:
            flags.give_back()
        self._memory = None

    def _map(self) -> RankAddresses:
        world, device = self.comm.world_size, self.comm.device

        def on_device(addresses: list[int]) -> torch.Tensor:
            return lasting(device, lambda: torch.tensor(addresses, dtype=torch.int64, device=device))

        refuse_capture(self.comm.device)
        regions = self._signals, self._flags
        at = [self.outputs.base_addresses(), *([region.address(rank) for rank in range(world)] for region in regions)]
        return RankAddresses(Tables.of(*map(on_device, at)), self.outputs.slot_bytes)

    def _quiesce(self) -> None:
        """Wait until every rank has finished its enqueued work, so that memory can be replaced. All ranks must make this call."""
        refuse_capture(self.comm.device)
        torch.cuda.synchronize(self.comm.device)
        self.comm.all_gather(None)

    def _release_waiters(self) -> None:
        """End every wait of this rank's kernels, because the group has failed. The watchdog thread calls this method."""
        with torch.cuda.device(self.comm.device), torch.cuda.stream(self._poison_stream):
            words = [(self._signals, 3 * self.comm.world_size), (self._flags, self._flag_count)]
            for region, count in (*words, *self._flags_of_graphs):
                view = region.tensor(self.comm.rank, (count,), torch.int64)
                for begin in range(0, count, self._poison.numel()):
                    part = view[begin : begin + self._poison.numel()]
                    part.copy_(self._poison[: part.numel()], non_blocking=True)

    def _read_timeline(self, timeline: Timeline, lines: torch.Tensor, n_units: int) -> None:
        rank, staged = self.comm.rank, self.plan.options.transport == "put"
        torch.cuda.synchronize(self.comm.device)
        for start_ns, end_ns, sent, program, put_ns in lines[:n_units].tolist():
            if not end_ns:
                continue
            lane, name = ("remote", "pool and store to peer") if sent else ("local", "pool")
            timeline.add(rank, lane, name, start_ns / 1e3, end_ns / 1e3, sent, program)
            if sent and staged:
                timeline.add(rank, "put", "copy slice to peer", put_ns / 1e3, end_ns / 1e3, 0, program)
        if not len(timeline):
            raise WeftError(
                f"rank {rank} had no samples or tables in this call, so there is no timeline: pass timeline=None"
            )
        for start_ns, end_ns, _, program, _ in lines[n_units:].tolist():
            if end_ns:
                timeline.add(rank, "wait", "wait for peers", start_ns / 1e3, end_ns / 1e3, 0, program)


def _warn_of_bad_input(
    kernel: EmbeddingKernel, record: Any, last_input: tuple[JaggedInput, CheckedInput] | None, rank: int
) -> None:
    """Warn of bad indices that kernels have counted in `record`, and reset the counts.

    last_input: the last call's input, in which to find the first bad index. rank: the rank to name in the warning.
    """
    bad, bad_offsets = record[device_code.R_BAD_INDICES], record[device_code.R_BAD_OFFSETS]
    if not (bad or bad_offsets):
        return
    at = record[device_code.R_BAD_POSITION]
    record[device_code.R_BAD_INDICES] = 0
    record[device_code.R_BAD_OFFSETS] = 0
    if bad_offsets:
        warn(
            f"rank {rank}: {counted(bad_offsets, 'bag')} had offsets that descend or leave the values; they were clamped. "
            f"Check the offsets on the CPU, or pass bounds_check='fatal'"
        )
    if bad and kernel.plan.options.reports_bad_ids:
        where = f"the first at position {at} of values"
        if last_input is not None and at < last_input[0].values.numel():
            jagged, checked = last_input
            bag = int(torch.searchsorted(jagged.offsets, at, right=True)) - 1
            block, sample = divmod(bag, max(1, checked.global_batch))
            if block in checked.key_of_slot:
                place, value = at - int(jagged.offsets[bag]), int(jagged.values[at])
                where = "the first: " + bad_index_message(
                    kernel.plan.sharding, kernel.rank, checked.key_of_slot.index(block), sample, place, value
                )
        warn(f"rank {rank}: {counted(bad, 'index', 'indices')} out of range, read as zero rows; {where}")


class _LocalPool:
    """The cached kernel of `pool_on_gpu`, for a world size of 1.

    words: memory that the kernel gets as the signals and flags of peers, because there are no peers. last_input: the last
        call's input, for warnings of bad indices. called_at: the number of the last call of `pool_on_gpu` that used it.
    """

    def __init__(self, plan: EmbeddingPlan, device: torch.device, widest: int) -> None:
        self.kernel = EmbeddingKernel(plan, 0, device, widest)
        self.record = memoryview(cast(Any, self.kernel.record.numpy()))
        self.words = lasting(
            device, lambda: torch.zeros(4, dtype=torch.int64, device=device)
        )  # stand in for signals and flags
        self.last_input: tuple[JaggedInput, CheckedInput] | None = None
        self.called_at = 0


KEPT = 64  # kernels of `pool_on_gpu`; those that captured graphs launch do not count
_local_pools: dict[tuple[EmbeddingPlan, torch.device, int], _LocalPool] = {}
_calls = itertools.count(1)


def _make_room(device: torch.device, rank: int) -> None:
    """Drop the less recently used half of the kernels of `pool_on_gpu` if there are `KEPT`. Kernels that captured graphs
    launch stay. rank: the rank to name in warnings of bad input in their last calls.
    """
    free = [key for key, pool in _local_pools.items() if not pool.kernel.captured]
    if len(free) < KEPT or is_captured(device):
        return
    free.sort(key=lambda key: _local_pools[key].called_at)
    if device.type == "cuda":
        for index in {key[1].index for key in free}:  # enqueued kernels still write into the memory that is freed
            torch.cuda.synchronize(index)
    for key in free[: KEPT // 2]:
        pool = _local_pools.pop(key)
        _warn_of_bad_input(pool.kernel, pool.record, pool.last_input, rank)


def pool_on_gpu(
    plan: EmbeddingPlan, weights: list[torch.Tensor], jagged: JaggedInput, checked: CheckedInput, out: torch.Tensor,
    rank: int = 0, widest: int = 1,
) -> None:  # fmt: skip
    """Pool one rank's input into an ordinary tensor `out` `[batch, total_dim]`, without other ranks.

    Warn of bad input in earlier calls, naming `rank`. widest: the number of columns of the widest feature on any rank, which
        determines the block size.
    """
    key = (plan, out.device, widest)
    pool = _local_pools.get(key)
    if pool is None:
        _make_room(out.device, rank)
        pool = _local_pools[key] = _LocalPool(plan, out.device, widest)
    pool.called_at = next(_calls)
    _warn_of_bad_input(pool.kernel, pool.record, pool.last_input, rank)
    # The CPU runs ahead of the stream, so a fill kernel writes the address of `out` in stream order. A graph captures
    # the kernel too.
    address = torch.full((1,), out.data_ptr(), dtype=torch.int64, device=out.device)
    memory = RankAddresses(Tables.of(address, pool.words[:1], pool.words[1:2]), 0)
    pool.kernel.launch(weights, jagged, checked, memory, 0, 60.0, wait=False, captured=is_captured(out.device))
    pool.last_input = (jagged, checked)
