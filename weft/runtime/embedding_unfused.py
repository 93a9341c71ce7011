"""embedding_all_to_all without overlap, on CPU and GPUs: one pooling kernel, all_to_all_single, a column permutation.

This is the schedule `serial` of `weft.builders.embedding_all_to_all`, as a user would write it:

    pooled    [global batch, columns of this rank's tables]
    received  [local batch, columns of rank 0's tables], then of rank 1's ...      all_to_all_single
    result    [local batch, all columns], in the order of tables

CPU ranks on several hosts have two alternatives. With `FarFirst`, they pool for other hosts first, and send these vectors
while they pool for their own host. With `weft.runtime.rails`, they pool everything first, and send the vectors in the
messages of the rendezvous, which is faster for few vectors.

Results are ordinary tensors, because no symmetric memory is used. CPU ranks synchronise before pooling, as with other
transports. On one host they synchronise again before the exchange (`weft.runtime.unfused.turn`). Both waits have the call's
deadline. On GPUs, NCCL's timeout and errors apply to the exchange.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from weft.embedding.check import CheckedInput, check_contents
from weft.embedding.jagged import JaggedInput
from weft.embedding.plan import EmbeddingPlan
from weft.embedding.tables import column_runs
from weft.runtime.collectives import all_to_all_single
from weft.runtime.cpu import embedding as cpu
from weft.runtime.cpu.embedding_far_first import FarFirst
from weft.runtime.executor import Executor
from weft.runtime.meeting import refuse
from weft.runtime.rails import MOST_VECTORS_BYTES
from weft.runtime.rails_all_to_all import AllToAllInto
from weft.runtime.two_ways import TwoWays
from weft.runtime.unfused.far_first import ending_the_group
from weft.runtime.unfused.turn import Marks, Turn, Turns
from weft.symm import Communicator
from weft.timeline import Timeline
from weft.words import counted

_NAME = "all_to_all of pooled vectors"


class EmbeddingAllToAllUnfused(Executor):
    """The executor of embedding_all_to_all for a plan with transport "serial", on a communicator. The executor keeps no memory."""

    def __init__(self, plan: EmbeddingPlan, comm: Communicator) -> None:
        self.plan, self.comm, self.schedule = plan, comm, plan.schedule
        sharding, rank = plan.sharding, comm.rank
        self._columns = sharding.columns_of_ranks
        self._runs = column_runs(sharding)
        self._alone, self._widest = plan.alone(rank), max(slot.dim for slot in sharding.slots)
        self._topic, self._turns = cpu.topic_of(comm, plan), None
        if comm.device.type == "cpu":
            self._turns = Turns(f"embedding_all_to_all of {counted(len(sharding.tables), 'table')}", comm)
        self._far_first, self._chosen = None, TwoWays(comm)
        if self._turns is not None and not comm.all_mapped:
            self._far_first = FarFirst(plan, self._alone, comm)
            if self._turns.rails is not None:
                self._turns.rails.reserve_rows(MOST_VECTORS_BYTES)

    def run(
        self,
        tensors: dict[str, Any],
        *,
        deadline_s: float | None = None,
        timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> dict[str, Any]:
        """Run one call. Return the output [batch_sizes[rank], total_dim] as "out". On GPUs the output is complete in
        stream order.

        tensors: "tables", a list of this rank's tables, and "bags", a pair (`JaggedInput`, `CheckedInput`).
        """
        weights, (jagged, checked) = tensors["tables"], tensors["bags"]
        comm, rank = self.comm, self.comm.rank
        deadline_s = deadline_s or comm.deadline_s
        comm.check()
        try:
            check_contents(jagged, self.plan.sharding, rank, checked, self.plan.options)
        except ValueError as error:
            refuse(comm, str(error), deadline_s=deadline_s)
        begin = time.perf_counter()
        far_first, rides, is_far, size = self._far_first, self._rides(checked.global_batch), False, (0, 0)
        if self._turns is not None and not rides:
            ids = cpu.meet(comm, self._topic, jagged.values.numel(), checked.batch_sizes, deadline_s=deadline_s)
            size = checked.global_batch, max(ids)
            if far_first is not None:
                self._chosen.rule_out(size, far_first.most_gain_s(checked.batch_sizes))
                is_far = self._chosen.takes_other(size)
        turn = Turn(self._turns, deadline_s, None if timeline is None else Marks(timeline, rank, comm.device))
        if far_first is not None and is_far:
            output, warn = far_first.run(weights, jagged, checked, turn)
        elif rides:
            output, warn = self._in_rails(weights, jagged, checked, turn)
        else:
            # Between hosts a second rendezvous takes a round trip, so only the first one protects the exchange.
            between = far_first is not None
            with ending_the_group(comm, _NAME) if between else contextlib.nullcontext():
                output, warn = self._in_turn(weights, jagged, checked, turn.met if between else turn)
        turn.end()
        if far_first is not None and not rides:
            self._chosen.took(size, time.perf_counter() - begin, deadline_s)
        if warn is not None:
            warn()
        return {"out": output}

    def _in_turn(
        self, weights: list[torch.Tensor], jagged: JaggedInput, checked: CheckedInput, turn: Turn
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """Pool all samples, then exchange the vectors. Return the output, and a function that warns of bad indices (None if no
        index is bad).
        """
        pooled, warn = self._pooled(weights, jagged, checked, turn)
        return self._exchanged(pooled, checked.batch_sizes, turn), warn

    def _pooled(
        self, weights: list[torch.Tensor], jagged: JaggedInput, checked: CheckedInput, turn: Turn
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        rank = self.comm.rank
        pooled = jagged.values.new_empty((checked.global_batch, self._columns[rank]), dtype=self.plan.output_dtype)
        alone = self._alone
        warn = pool_alone(alone, weights, jagged, checked, pooled, rank, self._widest) if alone else None
        return turn.done("pool", pooled), warn

    def _in_rails(
        self, weights: list[torch.Tensor], jagged: JaggedInput, checked: CheckedInput, turn: Turn
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """Pool all samples, then send the vectors with the messages by which CPU ranks of several hosts synchronise. Return the
        same values as `_in_turn`.
        """
        rails, sizes = turn.rails, checked.batch_sizes
        assert rails is not None
        pooled, warn = self._pooled(weights, jagged, checked, turn)
        arriving, leaving = self._numbers(sizes)
        received, vectors = pooled.new_empty(sum(arriving), 1), pooled.view(-1, 1)
        sent, came = (torch.tensor(numbers, device="cpu").view(-1, 1) for numbers in (leaving, arriving))
        exchange = AllToAllInto(rails, sent, lambda memory: memory.copy_(vectors), came, received)
        cpu.meet(self.comm, self._topic, 0, sizes, deadline_s=turn.deadline_s, cargo=exchange)
        exchange.end()
        return self._unpacked(received.view(-1).split(arriving), sizes, turn), warn

    def _rides(self, global_batch: int) -> bool:
        """True if the vectors are few enough to be sent with the messages by which ranks synchronise. The result is equal on all
        ranks if their batch sizes are equal.
        """
        rails = None if self._turns is None else self._turns.rails
        most = global_batch * max(self._columns) * self.plan.output_dtype.itemsize
        return rails is not None and most <= min(MOST_VECTORS_BYTES, rails.rows_bytes)

    def _numbers(self, batch_sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Return two lists: the number of elements received from each rank, and the number sent to each rank."""
        rank = self.comm.rank
        return [batch_sizes[rank] * columns for columns in self._columns], [
            size * self._columns[rank] for size in batch_sizes
        ]

    def _exchanged(self, pooled: torch.Tensor, batch_sizes: tuple[int, ...], turn: Turn) -> torch.Tensor:
        if self.comm.world_size == 1:
            return pooled
        arriving, leaving = self._numbers(batch_sizes)
        received = pooled.new_empty(sum(arriving))
        exchange = received, pooled.view(-1), arriving, leaving
        turn.run(_NAME, all_to_all_single, *exchange, group=self.comm.group)
        return self._unpacked(received.split(arriving), batch_sizes, turn)

    def _unpacked(self, parts: Sequence[torch.Tensor], batch_sizes: tuple[int, ...], turn: Turn) -> torch.Tensor:
        """Copy the received vectors into the columns of the output, and return the output. parts: the elements that arrived
        from each rank.
        """
        rank, columns = self.comm.rank, self._columns
        own = batch_sizes[rank]
        sent = (sum(batch_sizes) - own) * columns[rank] * parts[rank].itemsize
        of_ranks = [
            part.view(own, count) for part, count in zip(turn.done("all_to_all", parts, sent), columns, strict=True)
        ]
        return turn.done("unpack", torch.cat([of_ranks[r][:, first:end] for r, first, end in self._runs], dim=1))

    @property
    def shared(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: this executor has no memory."""


def pool_alone(
    plan: EmbeddingPlan, weights: list[torch.Tensor], jagged: JaggedInput, checked: CheckedInput, out: torch.Tensor,
    rank: int = 0, widest: int = 1,
) -> Callable[[], None] | None:  # fmt: skip
    """Pool this rank's tables for the samples of all ranks. Write the vectors to `out`, [global batch, columns], in
    `plan.output_dtype`.

    Return a function that warns of bad indices, or None if there are none. On GPUs always return None: each call warns of
    bad indices in earlier calls.

    plan: a plan of these tables for one rank (`EmbeddingPlan.alone`). rank: the rank to name in warnings.
    widest: the number of columns of the widest feature on any rank. It determines the GPU kernel's block size, so that sums
        have the same bits for any placement of tables.
    """
    checked = checked._replace(batch_sizes=(checked.global_batch,))
    if out.device.type == "cuda":
        from weft.runtime.cuda.embedding import pool_on_gpu  # needs Triton, which a CPU machine may lack

        pool_on_gpu(plan, weights, jagged, checked, out, rank, widest)
        return None
    table = cpu.slot_table(plan.sharding, 0, weights, checked.key_of_slot)
    narrows = out.dtype != plan.sharding.dtype
    pooled = torch.empty_like(out, dtype=plan.sharding.dtype) if narrows else out
    counts = cpu.run_native(plan, 0, table, jagged, checked.batch_sizes, [pooled.data_ptr()], [], 0)
    if narrows:
        out.copy_(pooled)
    return partial(cpu.warn_of_bad_indices, plan, 0, counts)
