"""Functions of `test_schedule_all_to_all_matmul` that run on the ranks."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from schedule_cpu_ranks import comm_of, poison
from support.all_to_all_matmul_reference import added_to, assert_rows, expected, inputs, random_splits

from weft.builders import AllToAllMatmul, Candidate, NotApplicableError, candidates, named
from weft.runtime.cpu.schedule import CpuSchedule


def every_candidate(group, p: AllToAllMatmul, seed: int, runs: int, names: Sequence[str] = ()) -> int:
    """Run each schedule, or the schedules `names`, on splits that differ from the expected splits. Return the number of
    schedules.
    """
    rank, count = group.rank(), 0
    for candidate in [named(p, name) for name in names] or candidates(p):
        with contextlib.suppress(NotApplicableError):
            schedule = candidate.build()
            count += 1
            with CpuSchedule(schedule, comm_of(group)) as executor:
                poison(executor)
                for run in range(runs):
                    run_once(executor, p, rank, seed + run, candidate)
    return count


def run_once(executor: CpuSchedule, p: AllToAllMatmul, rank: int, seed: int, candidate: Candidate) -> None:
    name = candidate.name
    splits = random_splits(p.world_size, p.experts, p.rows, seed)
    tokens, weights = inputs(p, seed)
    y, received = expected(rank, splits, tokens, weights)
    made, arrived = list[torch.Tensor](), list[torch.Tensor]()

    def make(rows: int) -> torch.Tensor:
        made.append(torch.full((rows, p.n), torch.nan, dtype=tokens[rank].dtype))
        return made[0]

    spare = 0 if p.exact else 3

    def make_x(rows: int) -> torch.Tensor:
        arrived.append(torch.full((rows, p.k), torch.nan, dtype=tokens[rank].dtype))
        return arrived[0]

    out = make if p.exact else make(len(y) + spare)
    counts = torch.full(received.shape, -1)
    mine = weights.split(p.experts)[rank].flatten(0, 1)
    time.sleep(random.random() * 0.002)
    tensors = {"tokens": tokens[rank], "splits": torch.tensor([splits[rank]]), "w": mine, "y": out, "received": counts}
    executor.run(tensors | ({"x": make_x if p.exact else make_x(len(y) + spare)} if p.return_x else {}))
    assert torch.equal(counts, received), (name, seed)
    assert made[0].shape[0] == len(y) + spare, (name, seed)
    assert made[0][len(y) :].isnan().all()
    if p.return_x:  # in the order of arrival: by source rank, then by expert
        mine_of = [part.split([sum(of[r * p.experts : (r + 1) * p.experts]) for r in range(p.world_size)])[rank]
                   for part, of in zip(tokens, splits, strict=True)]  # fmt: skip
        assert torch.equal(arrived[0][: len(y)], torch.cat(mine_of)), (name, seed)
        assert arrived[0][len(y) :].isnan().all()
    assert_rows(made[0][: len(y)], rank, splits, tokens, weights, f"{name}, seed {seed}", added_to(candidate, p))


def wrong_splits(group, p: AllToAllMatmul) -> None:
    """Check that a run fails with a clear error if the sum of the splits is larger than the number of tokens."""
    rank = group.rank()
    schedule = next(c for c in candidates(p, ("dispatch",))).build()
    with CpuSchedule(schedule, comm_of(group)) as executor:
        tokens, weights = inputs(replace(p), 1)
        splits = torch.zeros(1, p.world_size * p.experts, dtype=torch.int64)
        splits[0, -1] = p.rows[rank] + 5
        executor.run(
            {
                "tokens": tokens[rank],
                "splits": splits,
                "w": weights.split(p.experts)[rank].flatten(0, 1),
                "y": lambda rows: torch.empty(rows, p.n),
                "received": torch.zeros(p.world_size, p.experts, dtype=torch.int64),
            },
            deadline_s=5,
        )
