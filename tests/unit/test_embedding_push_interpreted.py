"""The kernels that send embeddings' gradients to the owners of tables, under Triton's interpreter. One process runs all
ranks.

One kernel stores into peers' memory; the other builds blocks for an all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support.interpreted import play_all, wrong_in
from support.reference import Problem, problem, tables_of

from weft.kernels.signals import R_FOUND, R_STATUS, RECORD_WORDS

PATTERN = -7.0


@dataclass(frozen=True)
class Case:
    """A case. wait: True if the kernels wait for signals, which are set before they run. poisoned: a rank whose signals
    contain POISON.
    """

    p: Problem
    calls: int = 1
    wait: bool = False
    poisoned: int | None = None
    dtype: torch.dtype = torch.float32
    """The dtype of the inboxes, unless the gradients have 16 bits."""


CASES: dict[str, Case] = {
    "any width": Case(problem(2, (8, 3, 16, 1, 70), 9)),
    "three ranks, several calls": Case(problem(3, (8, 4, 16, 4), 7), calls=3),
    "wider than a piece, bf16": Case(problem(2, (1028, 2052, 4), 3, dtype=torch.bfloat16)),
    "rounded": Case(problem(2, (8, 4, 24), 9), dtype=torch.float16),
    "many samples": Case(problem(2, (64,) * 4, 301)),
    "uneven": Case(Problem(tables_of((8, 3, 16)), (2, 0, 1), (4, 0, 3))),
    "a rank without tables": Case(Problem(tables_of((8, 3)), (1, 1), (2, 3))),
    "an empty batch": Case(problem(2, (8, 4), 0)),
    "waits that are over": Case(problem(3, (8, 4, 16, 4), 7), calls=2, wait=True),
    "a wait that the watchdog ends": Case(problem(2, (8, 4), 6), wait=True, poisoned=1),
}


def test_push() -> None:
    """Run all cases in one test, because starting a process takes longer than most cases."""
    assert wrong_in(__file__, CASES) == {}


class Ranks:
    def __init__(self, case: Case) -> None:
        from weft.kernels import embedding_push as device_code
        from weft.runtime.cuda import embedding_push as push

        self.push, self.case = push, case
        self.sharding, self.sizes = case.p.sharding, case.p.batch_sizes
        self.world, self.columns = self.sharding.world_size, self.sharding.columns_of_ranks
        elements = max(1, sum(self.sizes) * max(self.columns)) + 3
        self.dtype = min(self.sharding.dtype, case.dtype, key=lambda one: one.itemsize)
        self.inbox = torch.full((self.world, elements), PATTERN, dtype=self.dtype)
        self.signals = torch.zeros(self.world, 2 * self.world, dtype=torch.int64)
        self.states = [torch.zeros(device_code.STATE_WORDS, dtype=torch.int64) for _ in range(self.world)]
        self.records = [torch.zeros(RECORD_WORDS, dtype=torch.int64) for _ in range(self.world)]
        self.inboxes_at, self.signals_at = (
            torch.tensor([one[rank].data_ptr() for rank in range(self.world)]) for one in (self.inbox, self.signals)
        )

    def run(self, rank: int, grad: torch.Tensor) -> None:
        memory: tuple[Any, ...] = self.inboxes_at, self.signals_at, self.states[rank], self.records[rank]
        self.push.launch_push(grad, self.sharding, rank, self.sizes, *memory, 60.0, self.dtype, wait=self.case.wait)

    def received(self, rank: int) -> torch.Tensor:
        """Return the inbox, [global batch, columns]. Check that the memory after it is unchanged."""
        used = sum(self.sizes) * self.columns[rank]
        assert (self.inbox[rank, used:] == PATTERN).all(), f"rank {rank}: written beyond the gradients"
        return self.inbox[rank, :used].view(sum(self.sizes), self.columns[rank])


def play(case: Case) -> None:
    from weft.runtime.cpu.embedding_backward import by_owner as on_cpu
    from weft.runtime.cuda.embedding_backward import by_owner

    ranks = Ranks(case)
    for epoch in range(1, case.calls + 1):
        ranks.inbox.fill_(PATTERN)
        whole = torch.randn(sum(ranks.sizes), ranks.sharding.total_dim).to(ranks.sharding.dtype)
        if case.wait:  # signals of ranks that have not run yet
            ranks.signals[:, ranks.world :] = epoch
        if case.poisoned is not None:
            ranks.signals[case.poisoned] = 1 << 62
        for rank in range(ranks.world):
            ranks.run(rank, whole[case.p.rows_of(rank)].contiguous())
            failed = rank == case.poisoned
            assert ranks.states[rank].tolist()[:5] == [epoch, 0, 0, 0, 0 if failed else 1]
            assert (int(ranks.records[rank][R_STATUS]) != 0) == failed
            if failed:
                assert int(ranks.records[rank][R_FOUND]) >= 0
        if case.poisoned is not None:
            return
        for rank in range(ranks.world):
            sent = by_owner(whole[case.p.rows_of(rank)], ranks.sharding, ranks.dtype)
            assert torch.equal(sent, on_cpu(whole[case.p.rows_of(rank)], ranks.sharding, ranks.dtype))
            columns = [whole[:, slot.column : slot.column + slot.dim] for slot in ranks.sharding.local_slots(rank)]
            wanted = torch.cat(columns, 1) if columns else whole[:, :0]
            assert torch.equal(ranks.received(rank), wanted.to(ranks.dtype))
            arrived = ranks.signals[rank, ranks.world :]
            assert arrived.tolist() == [epoch] * ranks.world
        for rank in range(ranks.world):
            ranks.push.launch_free(ranks.signals_at, ranks.states[rank], rank, ranks.world)
        for rank in range(ranks.world):
            assert ranks.signals[rank, : ranks.world].tolist() == [epoch] * ranks.world


if __name__ == "__main__":
    play_all({name: lambda case=case: play(case) for name, case in CASES.items()})  # type: ignore[misc]
