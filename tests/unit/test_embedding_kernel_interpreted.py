"""The Triton kernel of embedding_all_to_all under Triton's interpreter, without a GPU. One process runs all ranks one
after the other.

Peers are buffers of this process, so all signals that a rank waits for are set before it runs. These are every rank's
"ready", and in cases with `wait` also "done" and the flags. See `tests/support/interpreted.py`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
import torch
from support.interpreted import play_all, wrong_in
from support.reference import Problem, assert_close, problem, tables_of

from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, JaggedInput
from weft.embedding.check import CheckedInput, check_jagged
from weft.embedding.options import EmbeddingOptions, Order
from weft.embedding.plan import EmbeddingPlan


@dataclass(frozen=True)
class Case:
    p: Problem
    options: dict[str, Any] = field(default_factory=dict)  # options of the plan
    wait: bool = False
    launch_per_table: bool = False
    calls: int = 1
    bad: dict[int, int] = field(default_factory=dict)  # {position in rank 0's values: bad id}
    timed: bool = False
    single: bool = False  # as if all bags had one id


SHARED = (
    EmbeddingBagConfig(50, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(9, 16, "pairs", ("i", "u"), "mean"),
)
PUT = {"transport": "put", "slice_size": 2}
CASES: dict[str, Case] = {
    "one rank": Case(problem(1, (8, 4), 5), {"order": "natural"}),
    "one rank puts": Case(problem(1, (8, 4), 5), PUT),
    **{f"two ranks, {order}": Case(problem(2, (8, 8, 8), 6), {"order": order}) for order in get_args(Order)},
    **{f"two ranks put, {order}": Case(problem(2, (8, 8, 8), 6), PUT | {"order": order}) for order in get_args(Order)},
    "three ranks, any width, mean, weighted": Case(problem(3, (8, 3, 16, 1, 70), 7, weighted=True)),
    "three ranks put, any width, mean, weighted": Case(problem(3, (8, 3, 16, 1, 70, 5), 7, weighted=True), PUT),
    "put of many slices": Case(problem(2, (4,) * 6, 31, longest=1), PUT | {"slice_size": 1}, calls=2),
    "put with long slices": Case(Problem(tables_of((8, 12, 300, 1)), (0, 0, 0, 1), (2, 3)), {"transport": "put"}),
    "long bags": Case(problem(2, (64, 256), 4, longest=90)),
    "wider than a block": Case(problem(2, (300, 513), 4)),
    "wider than a block, put": Case(problem(2, (300, 513), 4, dtype=torch.float16), PUT),
    "fp16": Case(problem(3, (8, 12, 16), 7, dtype=torch.float16)),
    "bf16 put": Case(problem(3, (8, 12, 16), 7, dtype=torch.bfloat16), PUT),
    "fp16 outputs": Case(problem(3, (8, 3, 16, 1, 70), 7, weighted=True), {"output_dtype": "fp16"}),
    "fp16 outputs, put, timed": Case(problem(3, (8, 12, 300), 7), PUT | {"output_dtype": "fp16"}, timed=True),
    "fp16 outputs of bf16": Case(problem(2, (8, 12), 7, dtype=torch.bfloat16), {"output_dtype": "fp16"}),
    "int32 ids": Case(problem(2, (8, 4), 5, index_dtype=torch.int32)),
    "int32 offsets": Case(problem(2, (8, 4), 5, offset_dtype=torch.int32)),
    "hashed": Case(problem(2, (8, 4), 5, hash=True), {"hash": True}),
    "hashed int32": Case(problem(2, (8, 4), 5, hash=True, index_dtype=torch.int32), {"hash": True}),
    "features on tables and tables on features": Case(Problem(SHARED, (1, 0), (2, 3), weighted=True), PUT),
    "a launch per table": Case(problem(2, (8, 3, 16, 1, 5), 6), launch_per_table=True),
    "a launch per table, wider than a block": Case(problem(2, (8, 300, 16, 5), 6), launch_per_table=True),
    "uneven batches": Case(Problem(tables_of((8, 3, 16)), (2, 0, 1), (4, 0, 3))),
    "uneven batches, put": Case(Problem(tables_of((8, 3, 16)), (2, 0, 1), (4, 0, 3)), PUT),
    "a rank without tables": Case(Problem(tables_of((8, 3)), (2, 2), (2, 1, 3))),
    "a rank without tables, put": Case(Problem(tables_of((8, 3)), (2, 2), (2, 1, 3)), PUT),
    "an empty batch": Case(problem(2, (8, 4), 0)),
    "an empty batch, put": Case(problem(2, (8, 4), 0), PUT),
    "empty bags": Case(problem(2, (8, 4), 5, longest=0)),
    "several calls": Case(problem(3, (8, 3, 16), 7), calls=2),
    "several calls, put": Case(problem(3, (8, 3, 16), 7), PUT, calls=2),
    "waits that are over": Case(problem(3, (8, 3, 16), 7), wait=True, calls=2),
    "waits that are over, put": Case(problem(3, (8, 3, 16), 7), PUT, wait=True, calls=2),
    "waits that are over, a launch per table": Case(problem(2, (8, 3, 16), 5), wait=True, launch_per_table=True, calls=2),
    "bad ids": Case(problem(2, (8, 4), 5, weighted=True), bad={1: -1, 3: 30, 4: 2**40}),
    "bad ids, wider than a block, put": Case(problem(2, (300, 4), 5, weighted=True), PUT, bad={0: 31, 5: -(2**40)}),
    "trusted ids": Case(problem(2, (8, 4), 5), {"bounds_check": "none"}),
    "single ids": Case(problem(2, (8, 8, 8), 6, longest=1), single=True, calls=2),
    "single ids and others, any width, mean, weighted": Case(problem(3, (8, 3, 16, 1, 70), 7, weighted=True), single=True),
    "single ids, more tables than rows at once": Case(problem(2, (64,) * 40, 3, longest=1, dtype=torch.float16), single=True),
    "single ids and long bags": Case(problem(1, (64, 256), 4, longest=90), single=True),
    "single ids, hashed int32": Case(
        problem(2, (8, 4), 5, longest=1, hash=True, index_dtype=torch.int32), {"hash": True}, single=True
    ),
    "single ids, bad ids": Case(problem(2, (8, 4), 5, weighted=True), bad={1: -1, 3: 30, 4: 2**40}, single=True),
    "timed": Case(problem(3, (8, 3, 16, 4), 7), timed=True),
    "timed, put": Case(problem(3, (8, 3, 16, 4), 7, dtype=torch.float16), PUT, timed=True),
}  # fmt: skip


class Ranks:
    """All ranks of a case in this process: their kernels, and the memory that they map."""

    def __init__(self, case: Case) -> None:
        from weft.kernels import embedding_all_to_all as device_code
        from weft.runtime.cuda.embedding_kernel import EmbeddingKernel, RankAddresses, Tables

        self.device_code, self.case, self.p = device_code, case, case.p
        self.world = case.p.sharding.world_size
        self.plan = EmbeddingPlan(case.p.sharding, EmbeddingOptions(**case.options))
        self.kernels = [EmbeddingKernel(self.plan, rank, torch.device("cpu")) for rank in range(self.world)]
        if case.single:
            for kernel in self.kernels:
                kernel._pools_single_ids = lambda jagged: True  # type: ignore[method-assign]
        self.inputs = [self.input(rank) for rank in range(self.world)]
        self.slot_elements = max(1, max(case.p.batch_sizes) * case.p.sharding.total_dim) + 3
        self.outputs = torch.full((self.world, 2, self.slot_elements), torch.nan, dtype=self.plan.output_dtype)
        self.signals = torch.zeros(self.world, 3 * self.world, dtype=torch.int64)
        n_flags = max(1, max(case.p.batch_sizes) * sum(self.plan.slices_per_sample))
        self.flags = torch.zeros(self.world, n_flags, dtype=torch.int64)
        self.memory = RankAddresses(
            Tables.of(
                *(
                    torch.tensor([t[r].data_ptr() for r in range(self.world)])
                    for t in (self.outputs, self.signals, self.flags)
                )
            ),
            self.slot_elements * self.plan.output_dtype.itemsize,
        )

    def input(self, rank: int) -> tuple[JaggedInput, CheckedInput]:
        values, offsets, *weights = self.p.tupled(rank)
        if rank == 0:
            for at, value in self.case.bad.items():
                values[at] = value
        jagged = JaggedInput(None, values, offsets, weights[0] if weights else None)
        weights_of_rank = self.p.local_weights(rank)
        return jagged, check_jagged(jagged, self.p.sharding, rank, self.p.batch_sizes, weights_of_rank)

    def slot(self, rank: int, epoch: int) -> int:
        """Return the output buffer that `rank` offers in a call. It differs between ranks."""
        return (rank + epoch) % 2

    def announce(self, epoch: int) -> None:
        """Set the signals of ranks that have not run yet: "ready", and in cases with `wait` also "done" and the flags."""
        for reader in range(self.world):
            for rank in range(self.world):
                fingerprint = self.kernels[rank]._fingerprint(self.inputs[rank][1])
                ready = (epoch << self.device_code.SLOT_BITS) + self.slot(rank, epoch)
                self.signals[reader, 2 * rank : 2 * rank + 2] = torch.tensor([fingerprint, ready])
                if self.case.wait:
                    self.signals[reader, 2 * self.world + rank] = epoch
        if self.case.wait:
            self.flags.fill_(epoch)

    def run(self, rank: int, epoch: int, timeline: torch.Tensor | None = None) -> None:
        jagged, checked = self.inputs[rank]
        self.kernels[rank].launch(
            self.p.local_weights(rank), jagged, checked, self.memory, self.slot(rank, epoch), 60.0, wait=self.case.wait,
            count=True, launch_per_table=self.case.launch_per_table, timeline=timeline,
        )  # fmt: skip

    def output(self, rank: int, epoch: int) -> torch.Tensor:
        """Return the output, [batch_sizes[rank], total_dim]. Check that the rest of the buffer is unchanged."""
        flat = self.outputs[rank, self.slot(rank, epoch)]
        used = self.p.batch_sizes[rank] * self.p.sharding.total_dim
        assert flat[used:].isnan().all(), f"rank {rank}: written beyond the output"
        return flat[:used].view(-1, self.p.sharding.total_dim)

    def words(self, rank: int, *names: str) -> list[int]:
        """Return words of a rank's state, or of its record for names that begin with R_."""
        from weft.kernels import signals

        kernel, words = self.kernels[rank], vars(signals) | vars(self.device_code)
        return [int((kernel.record if name.startswith("R_") else kernel.state)[words[name]]) for name in names]


def play(case: Case) -> None:
    """Make all calls of a case, and check the conditions after each."""
    ranks = Ranks(case)
    wanted = without_bad(case)
    dtype = ranks.plan.output_dtype
    to_nearest = dtype != torch.bfloat16  # the interpreter truncates where GPUs round
    for epoch in range(1, case.calls + 1):
        ranks.outputs.fill_(torch.nan)
        ranks.announce(epoch)
        for rank in range(ranks.world):
            lines = ranks.kernels[rank].timeline_lines(*ranks.inputs[rank])
            timeline = torch.full((lines, ranks.device_code.TIMELINE_FIELDS), -1) if case.timed else None
            ranks.run(rank, epoch, timeline)
            assert ranks.words(rank, "EPOCH", "GRABBED", "ARRIVED", "FAILED") == [epoch, 0, 0, 0]
            assert ranks.words(rank, "R_STATUS") == [0]
            if timeline is not None:
                check_timeline(ranks, rank, timeline)
        for rank in range(ranks.world):
            assert_close(ranks.output(rank, epoch), wanted, wanted.rows_of(rank), to_nearest=to_nearest, dtype=dtype)
            assert ranks.outputs[rank, 1 - ranks.slot(rank, epoch)].isnan().all(), "the other buffer was written"
            check_signals(ranks, rank, epoch)
        check_counts(ranks, epoch)
    check_bad(ranks)


def without_bad(case: Case) -> Problem:
    """Return the same problem with weight 0 in place of bad ids, because a bad id counts as a row of zeros."""
    wanted = Problem(**{name: getattr(case.p, name) for name in Problem.__dataclass_fields__})
    first = wanted.sharding.local_slots(0)[0].feature if case.bad else ""
    for at in case.bad:
        wanted.bags[first].weights[at] = 0
    return wanted


def check_signals(ranks: Ranks, rank: int, epoch: int) -> None:
    """Check that every peer got "ready" with the right buffer from this rank, and with `direct` "done"."""
    for reader in range(ranks.world):
        if reader != rank:
            word = int(ranks.signals[reader, 2 * rank + 1])
            assert word == (epoch << ranks.device_code.SLOT_BITS) + ranks.slot(rank, epoch)
            if ranks.plan.options.transport == "direct":
                assert int(ranks.signals[reader, 2 * ranks.world + rank]) == epoch


def check_counts(ranks: Ranks, epoch: int) -> None:
    """Check the copies and flags. `put` makes a copy and sets a flag for each slice of a remote sample; `direct` makes
    none.
    """
    per_sample, sizes = ranks.plan.slices_per_sample, ranks.p.batch_sizes
    put = ranks.plan.options.transport == "put"
    for rank in range(ranks.world):
        sent = (sum(sizes) - sizes[rank]) * per_sample[rank] if put else 0
        assert ranks.words(rank, "COPIES", "FLAGS") == [epoch * sent, epoch * sent], f"rank {rank}"
        if put and not ranks.case.wait:
            blocks = ranks.flags[rank, : sizes[rank] * sum(per_sample)].split([sizes[rank] * n for n in per_sample])
            for source, block in enumerate(blocks):
                assert (block == (0 if source == rank else epoch)).all(), (
                    f"flags of rank {source} at rank {rank}: {block}"
                )


def check_timeline(ranks: Ranks, rank: int, timeline: torch.Tensor) -> None:
    """Check that the timeline has a line for every unit with its program, a line for every program's wait, and all bytes
    that are sent. Times are 0, because the interpreter has no clock.
    """
    units = ranks.kernels[rank].n_units(*ranks.inputs[rank])
    waits = timeline[units:][timeline[units:, 0] >= 0]
    assert waits[:, 3].tolist() == list(range(len(waits)))
    assert set(timeline[:units, 3].tolist()) <= set(range(len(waits)))
    assert len(waits)
    assert (timeline[units + len(waits) :] == -1).all()
    assert (waits[:, :3] == 0).all()
    timeline = timeline[:units]
    width = sum(slot.dim for slot in ranks.p.sharding.local_slots(rank))
    remote = sum(ranks.p.batch_sizes) - ranks.p.batch_sizes[rank]
    assert (timeline[:, :2] == 0).all()
    assert (timeline[:, 2] >= 0).all()
    assert int(timeline[:, 2].sum()) == remote * width * ranks.plan.output_dtype.itemsize


def check_bad(ranks: Ranks) -> None:
    bad = ranks.case.bad
    for rank in range(ranks.world):
        count, position, offsets = ranks.words(rank, "R_BAD_INDICES", "R_BAD_POSITION", "R_BAD_OFFSETS")
        assert offsets == 0
        assert count == (len(bad) if rank == 0 else 0)
        if count:
            assert position == min(bad)


def play_a_disagreement() -> None:
    """Let a peer call with other batch sizes. This rank must record the disagreement and store nothing."""
    ranks = Ranks(Case(problem(2, (8, 4), 6), wait=True))
    ranks.announce(1)
    ranks.signals[0, 2] += 1
    ranks.run(0, 1)
    assert ranks.words(0, "R_STATUS", "R_EPOCH", "R_PEER") == [ranks.device_code.DISAGREE, 1, 1]
    assert ranks.outputs.isnan().all()


def play_poison() -> None:
    """Set POISON in place of a peer's "ready", "done" or flag. It must end the wait and be recorded."""
    for where in ("ready", "done", "flag"):
        ranks = Ranks(Case(problem(2, (8, 4), 6), PUT if where == "flag" else {}, wait=True))
        ranks.announce(1)
        poison = ranks.device_code.POISON
        if where == "flag":
            ranks.flags[0].fill_(poison)
        else:
            ranks.signals[0, 3 if where == "ready" else 5] = poison
        ranks.run(0, 1)
        assert ranks.words(0, "R_STATUS") == [getattr(ranks.device_code, f"WAIT_{where.upper()}")], where
        assert ranks.outputs.isnan().all() == (where == "ready"), where


def play_garbage_offsets() -> None:
    """Pass offsets that descend or leave the values. They must be clamped and counted, and nothing outside may be read."""
    ranks = Ranks(Case(problem(1, (8, 4), 5)))
    offsets = ranks.inputs[0][0].offsets
    offsets[2], offsets[5], offsets[-1] = -(2**40), 2**40, 2**62
    ranks.announce(1)
    ranks.run(0, 1)
    assert ranks.words(0, "R_BAD_OFFSETS")[0] > 0
    assert not ranks.output(0, 1).isnan().any()


def play_pooling_alone() -> None:
    """Let ranks pool only their own tables. Results must have the same bits as one kernel for all tables. The next call
    must warn of bad ids.
    """
    from weft.runtime.cuda.embedding import pool_on_gpu

    p = problem(2, (8, 3, 300, 5), 6, weighted=True)

    def pooled(
        plan: EmbeddingPlan, weights: list[torch.Tensor], given: tuple[torch.Tensor, ...], **how: int
    ) -> torch.Tensor:
        jagged = JaggedInput(None, *given)
        checked = check_jagged(jagged, plan.sharding, 0, (6,), weights)
        out = torch.full((6, plan.sharding.total_dim), torch.nan)
        pool_on_gpu(plan, weights, jagged, checked, out, **how)
        return out

    together = EmbeddingPlan(EmbeddingSharding(p.tables, (0,) * 4, 1), EmbeddingOptions("direct"))
    whole = pooled(together, p.weights, p.whole())
    assert_close(whole, p)
    plan = EmbeddingPlan(p.sharding, EmbeddingOptions("serial"))
    for rank in range(2):
        alone = plan.alone(rank)
        assert alone is not None
        slots = [s for slot in p.sharding.local_slots(rank) for s in range(slot.column, slot.column + slot.dim)]
        values, *rest = p.tupled(rank)
        for bad in (0, 0, 1, 0):
            spoiled = values.clone()
            spoiled[:bad] = -1
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = pooled(alone, p.local_weights(rank), (spoiled, *rest), rank=rank, widest=300)
            assert bad or torch.equal(found, whole[:, slots])
        assert [str(one.message)[: len("rank 1: 1 index")] for one in said] == [f"rank {rank}: 1 index"]


def play_many_tables_alone() -> None:
    """Pool more sets of tables than kernels are kept. The oldest kernels must be dropped, except one that a graph launches.
    Bad ids of the last call of a dropped kernel must be reported, and a dropped kernel must work again.
    """
    from weft.runtime.cuda import embedding

    p = problem(2, (8, 3), 6, weighted=True)
    embedding.KEPT = 4

    def pooled(number: int, bad: int = 0) -> torch.Tensor:
        tables = tuple(replace(table, name=f"{number}.{table.name}") for table in p.tables)
        plan = EmbeddingPlan(EmbeddingSharding(tables, (0, 0), 1), EmbeddingOptions("direct"))
        values, *rest = p.whole()
        values = values.clone()
        values[:bad] = -1
        jagged = JaggedInput(None, values, *rest)
        out = torch.full((6, plan.sharding.total_dim), torch.nan)
        checked = check_jagged(jagged, plan.sharding, 0, (6,), p.weights)
        embedding.pool_on_gpu(plan, p.weights, jagged, checked, out, rank=1)
        return out

    wanted, pools = pooled(0), embedding._local_pools
    next(iter(pools.values())).kernel._of_graphs.append(None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(1, 12):
            pooled(number, bad=number == 1)
            assert len(pools) <= 1 + embedding.KEPT
    kept = [key[0].sharding.tables[0].name.partition(".")[0] for key in pools]
    assert kept == ["0", "9", "10", "11"], kept
    assert [str(one.message)[: len("rank 1: 1 index")] for one in said] == ["rank 1: 1 index"]
    assert torch.equal(pooled(1), wanted)


OTHERS = {
    "many tables alone": play_many_tables_alone,
    "pooling alone": play_pooling_alone,
    "a disagreement": play_a_disagreement,
    "poison": play_poison,
    "garbage offsets": play_garbage_offsets,
}


SLOW = (
    "put of many slices", "waits that are over", "several calls", "timed", "a launch per table, wider than a block",
    "three ranks, any width, mean, weighted", "one rank", "one rank puts", "two ranks, natural", "two ranks put, natural",
    "uneven batches", "a rank without tables", "an empty batch", "int32 offsets", "hashed int32", "fp16",
)  # fmt: skip


def test_interpreted() -> None:
    assert wrong_in(__file__, [name for name in [*CASES, *OTHERS] if name not in SLOW]) == {}


@pytest.mark.slow
def test_more_of_it_interpreted() -> None:
    assert wrong_in(__file__, SLOW) == {}


if __name__ == "__main__":
    play_all({name: lambda case=case: play(case) for name, case in CASES.items()} | OTHERS)
