"""embedding_all_to_all on CPU processes, for one rank.

A call has four phases: a rendezvous with the peers (`weft.runtime.meeting`), pooling with stores into the peers' memory,
notification of the peers, and a wait for the peers. After the rendezvous, every rank has a free output buffer, and no rank
refuses the call. Plans (`EmbeddingPlan`) and batch sizes are then known to be equal on all ranks.

Memory order. With the transport `direct`, the native kernel ends with a fence after its stores. Then this rank stores the
number of the call, the epoch, into its counter at every peer with release order. The peer reads this counter with acquire
order. With the transport `put`, every slice (some vectors of one sample) has its own flag (csrc/embedding_all_to_all.hpp).
A buffer is written again only after its owner has offered it in the rendezvous of a later call.
"""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np
import torch

from weft import _core
from weft.caller import warn
from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.check import CheckedInput, bad_index_message, check_contents
from weft.embedding.plan import EmbeddingPlan
from weft.errors import DeadlineError, WeftError
from weft.runtime.meeting import Topic, meeting_of, refuse, shown
from weft.runtime.outputs import LendingExecutor, OutputPool
from weft.runtime.rails import Cargo
from weft.symm import Communicator
from weft.timeline import Timeline
from weft.words import counted

_EXTRA = struct.Struct("<qq")  # `number` of `meet`, hash of the batch sizes
_DTYPE_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_TRANSPORT_CODE = {"direct": 0, "put": 1}
_LOOK_S = 1.0  # interval at which a wait for flags checks the group
_LANES = {0: ("pool", "pool"), 1: ("to peers", "pool and store to a peer")}


def slot_table(
    sharding: EmbeddingSharding, rank: int, weights: list[torch.Tensor], key_of_slot: tuple[int, ...]
) -> np.ndarray:
    """Return a table that describes the features of this rank's tables to native code, int64 [features, 6]: the argument
    `slots` of `_core.embedding_all_to_all`.

    weights: the weights of this rank's tables. key_of_slot: the index of each of these features in the jagged input.
    """
    weight_of_table = dict(zip(sharding.local_tables(rank), weights, strict=True))
    table = np.zeros((len(key_of_slot), 6), dtype=np.int64)
    for row, slot, key in zip(table, sharding.local_slots(rank), key_of_slot, strict=True):
        weight = weight_of_table[slot.table]
        mean = sharding.tables[slot.table].pooling == "mean"
        row[:] = (weight.data_ptr(), weight.shape[0], slot.dim, key, slot.column, mean)
    return table


def run_native(
    plan: EmbeddingPlan,
    rank: int,
    table: np.ndarray,
    jagged: JaggedInput,
    batch_sizes: tuple[int, ...],
    outputs: list[int],
    flags: list[int],
    epoch: int,
    timeline: np.ndarray | None = None,
) -> tuple[int, ...]:
    """Call `_core.embedding_all_to_all` with as many threads as torch uses. Return eight numbers:

    - the number of bad indices
    - the feature, sample, position in the bag, and value of the first bad index
    - the numbers of slices sent, flags set, and events in the timeline

    table: the result of `slot_table`. outputs: the address of each rank's output buffer. epoch: the number of the call.
    flags: for each rank r, the address of the flags that this rank sets in the memory of rank r. Empty except with the
        transport `put`.
    timeline: an array for events; None for no timeline.
    """
    starts = np.zeros(len(batch_sizes) + 1, dtype=np.int64)
    np.cumsum(batch_sizes, out=starts[1:])
    return _core.embedding_all_to_all(
        slots=table,
        values=jagged.values.data_ptr(),
        values_bits=8 * jagged.values.element_size(),
        n_values=jagged.values.numel(),
        offsets=jagged.offsets.data_ptr(),
        offsets_bits=8 * jagged.offsets.element_size(),
        per_sample_weights=0 if jagged.weights is None else jagged.weights.data_ptr(),
        batch_starts=starts,
        rank=rank,
        outputs=np.asarray(outputs, dtype=np.int64),
        output_stride=plan.sharding.total_dim,
        dtype=_DTYPE_CODE[plan.sharding.dtype],
        transport=_TRANSPORT_CODE[plan.options.transport],
        remote_first=plan.options.order == "remote_first",
        slice_size=plan.slice_size,
        hash=plan.options.hash,
        bounds=int(plan.options.checks_ids),  # "fatal" checks all indices before the call begins
        n_threads=torch.get_num_threads(),
        flags=np.asarray(flags, dtype=np.int64),
        epoch=epoch,
        timeline=timeline,
    )


def warn_of_bad_indices(plan: EmbeddingPlan, rank: int, counts: tuple[int, ...]) -> None:
    bad, slot, sample, position, value = counts[:5]
    if bad and plan.options.reports_bad_ids:
        first = bad_index_message(plan.sharding, rank, slot, sample, position, value)
        warn(f"{counted(bad, 'index', 'indices')} out of range, read as zero rows; the first: {first}")


def topic_of(comm: Communicator, plan: EmbeddingPlan) -> Topic:
    """Return a description of calls with this plan. Ranks compare their descriptions in the rendezvous."""
    return Topic("embedding_all_to_all", plan.said, difference=shown(comm, plan.said))


def meet(
    comm: Communicator, topic: Topic, number: int, batch_sizes: tuple[int, ...], *, deadline_s: float | None,
    cargo: Cargo | None = None,
) -> list[int]:  # fmt: skip
    """Wait in the rendezvous for all ranks. Return each rank's `number`, by rank. Raise on every rank if a rank refuses the call,
    or if ranks make different calls.

    number: a number that may differ between ranks: the index of this rank's output buffer for this call, or its number of ids.
    cargo: a small collective whose data are sent with the messages of the rendezvous, between ranks on several hosts; None if
        there is no such collective.
    """
    meeting = meeting_of(comm)
    extras = meeting.meet(topic, deadline_s=deadline_s, extra=_EXTRA.pack(number, hash(batch_sizes)), cargo=cargo)
    said = [_EXTRA.unpack(extra) for extra in extras]
    for rank, (_, theirs) in enumerate(said):
        if theirs != said[0][1]:
            meeting.disagree(
                f"ranks 0 and {rank} called embedding_all_to_all with different batch_sizes (here, on rank {comm.rank}, "
                f"{batch_sizes}): pass the same global batch and batch_sizes on every rank"
            )
    return [theirs for theirs, _ in said]


class EmbeddingAllToAllCpu(LendingExecutor):
    """The executor of embedding_all_to_all for one plan (tables, placement and options), on a communicator of CPU processes."""

    def __init__(self, plan: EmbeddingPlan, comm: Communicator) -> None:
        self.plan, self.comm, self.schedule = plan, comm, plan.schedule
        self.outputs = OutputPool(comm, plan.options.outputs)
        self.copies = 0  # number of slices sent in all calls
        self.flags_raised = 0
        self._epoch = 0
        self._topic = topic_of(comm, plan)
        self._done = comm.allocate(_core.COUNTER_BYTES * comm.world_size)
        self._flags = comm.allocate(8)
        self._flag_count = 1
        self._tables: dict[Any, np.ndarray] = {}

    def run(
        self,
        tensors: dict[str, Any],
        *,
        deadline_s: float | None = None,
        timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> dict[str, Any]:
        """Run one call. Return the complete output [batch_sizes[rank], total_dim] as "out".

        tensors: "tables", a list of this rank's tables, and "bags", a pair (`JaggedInput`, `CheckedInput`).
        """
        weights, (jagged, checked) = tensors["tables"], tensors["bags"]
        plan, comm, rank = self.plan, self.comm, self.comm.rank
        deadline_s = deadline_s or comm.deadline_s
        sharding = plan.sharding
        comm.check()
        try:
            check_contents(jagged, sharding, rank, checked, plan.options)
            slot = self.outputs.acquire() if self.outputs.slot_bytes else 0
        except Exception as error:
            refuse(comm, str(error), deadline_s=deadline_s)
        try:
            slots = meet(comm, self._topic, slot, checked.batch_sizes, deadline_s=deadline_s)
            largest = max(checked.batch_sizes, default=0)
            slot_bytes = largest * sharding.total_dim * sharding.dtype.itemsize
            if self.outputs.reserve(slot_bytes, lambda: None, deadline_s):
                # All ranks grow their memory in the same call. No new buffer is lent yet.
                slot = self.outputs.acquire()
                slots = [slot] * comm.world_size
            bases = self.outputs.base_addresses()
            outputs = [base + s * self.outputs.slot_bytes for base, s in zip(bases, slots, strict=True)]
            flags = self._flag_blocks(checked.batch_sizes, deadline_s) if plan.options.transport == "put" else []
            self._epoch += 1
            events = self._room_for_events(checked) if timeline is not None else None
            table = self._table(weights, checked)
            counts = run_native(plan, rank, table, jagged, checked.batch_sizes, outputs, flags, self._epoch, events)
            self.copies += counts[5]
            self.flags_raised += counts[6]
            waiting_since = time.monotonic_ns()
            self._wait_for_peers(checked.batch_sizes, deadline_s)
            if timeline is not None and events is not None:
                self._fill(timeline, events[: counts[7]], waiting_since)
        except BaseException as error:
            self.outputs.give_back(slot)
            if not isinstance(error, WeftError):  # all ranks raise a WeftError, but peers do not know of other errors
                comm.poison(f"embedding_all_to_all failed in the middle of a call: {error!r}")
            raise
        shape = (checked.batch_sizes[rank], sharding.total_dim)
        output = self.outputs.lend(slot, shape, sharding.dtype)
        warn_of_bad_indices(self.plan, rank, counts)
        return {"out": output}

    def close(self) -> None:
        """Release the memory. All ranks must close the executor at the same point in their sequence of calls. Repeated calls
        have no effect.
        """
        if self.closed:
            return
        self.closed = True
        self.outputs.close()
        self._done.give_back()
        self._flags.give_back()

    def _table(self, weights: list[torch.Tensor], checked: CheckedInput) -> np.ndarray:
        key_of_slot = checked.key_of_slot
        key = (checked.tables or tuple([(weight.data_ptr(), len(weight)) for weight in weights]), key_of_slot)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= 4:
                self._tables.clear()
            self._tables[key] = table = slot_table(self.plan.sharding, self.comm.rank, weights, key_of_slot)
        return table

    def _flag_blocks(self, batch_sizes: tuple[int, ...], deadline_s: float) -> list[int]:
        """Return, for each rank r, the address of the flags that this rank sets in the memory of rank r. Allocate more flags if
        needed.

        A rank has a flag for every slice that it receives, grouped by sender: `batch_sizes[r] * slices_per_sample[s]` flags
        on rank r for sender s.
        """
        per_sample = self.plan.slices_per_sample
        wanted = max(batch_sizes, default=0) * sum(per_sample)
        if wanted > self._flag_count:
            count = max(wanted, 2 * self._flag_count)
            self._flags = self.comm.allocate(8 * count, deadline_s=deadline_s)
            self._flag_count = count  # set last: if the allocation fails, the group continues with the old flags
        before = sum(per_sample[: self.comm.rank])
        return [self._flags.address(rank) + 8 * size * before for rank, size in enumerate(batch_sizes)]

    def _wait_for_peers(self, batch_sizes: tuple[int, ...], deadline_s: float) -> None:
        comm = self.comm
        if self.plan.options.transport == "direct":
            for peer in range(comm.world_size):
                if peer != comm.rank:
                    _core.signal_set(self._done.address(peer) + _core.COUNTER_BYTES * comm.rank, self._epoch)
            for peer in range(comm.world_size):
                if peer != comm.rank:
                    address = self._done.address(comm.rank) + _core.COUNTER_BYTES * peer
                    comm.wait(address, self._epoch, name="embedding_all_to_all done", peer=peer, deadline_s=deadline_s)
            return
        count = batch_sizes[comm.rank] * sum(self.plan.slices_per_sample)
        flags, until = self._flags.address(comm.rank), time.monotonic() + deadline_s
        while True:
            # Read the clock before the flags: if the process was stopped past its deadline, the flags may have been set
            # meanwhile.
            remaining = until - time.monotonic()
            patience_s = max(0.0, min(_LOOK_S, remaining))
            status, index, found = _core.wait_flags(flags, count, self._epoch, patience_s, comm.failed_address)
            if status == 0:
                return
            comm.check()
            if remaining <= 0:
                source = self._source(index, batch_sizes)
                text = (
                    f"rank {comm.rank} waited {deadline_s:g} s for embedding_all_to_all slice flag {index} from rank {source}: "
                    f"wanted {self._epoch}, found {found}. Check that rank {source} still runs"
                )
                comm.poison(text)
                raise DeadlineError(text)

    def _source(self, flag: int, batch_sizes: tuple[int, ...]) -> int:
        """Return the rank that sets flag number `flag` in this rank's memory. A rank sets the flag of a slice after it has sent
        the slice. `_flag_blocks` defines the order of flags.
        """
        ends = batch_sizes[self.comm.rank] * np.cumsum(self.plan.slices_per_sample)
        return int(np.searchsorted(ends, flag, side="right"))

    def _room_for_events(self, checked: CheckedInput) -> np.ndarray:
        slices = max(1, self.plan.slices_per_sample[self.comm.rank])
        return np.zeros((4 * checked.global_batch * slices + 1024, 5), dtype=np.int64)

    def _fill(self, timeline: Timeline, events: np.ndarray, waiting_since: int) -> None:
        rank = self.comm.rank
        for kind, thread, start, end, sent in events.tolist():
            lane, name = _LANES[kind]
            timeline.add(rank, lane if thread == 0 else f"{lane} ({thread})", name, start / 1e3, end / 1e3, sent)
        timeline.add(rank, "wait", "wait for peers", waiting_since / 1e3, time.monotonic_ns() / 1e3)
