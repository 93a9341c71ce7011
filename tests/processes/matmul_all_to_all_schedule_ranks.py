"""Functions of `test_schedule_matmul_all_to_all` that run on the ranks."""

from __future__ import annotations

import contextlib
import random
import time

import torch
from schedule_cpu_ranks import applicable, comm_of
from support.all_to_all_matmul_reference import random_splits
from support.matmul_all_to_all_reference import assert_rows, inputs, received_of

from weft.builders import MatmulAllToAll, NotApplicableError, candidates
from weft.runtime.cpu.schedule import CpuSchedule


def every_candidate(group, p: MatmulAllToAll, seed: int, runs: int) -> int:
    """Run each schedule on splits that differ from the expected splits. Return the number of schedules."""
    rank, count = group.rank(), 0
    for candidate in candidates(p):
        with contextlib.suppress(NotApplicableError):
            schedule = candidate.build()
            count += 1
            with CpuSchedule(schedule, comm_of(group)) as executor:
                bits = [run_once(executor, p, rank, seed + run, candidate.name) for run in [*range(runs), 0]]
                assert torch.equal(bits[0], bits[-1]), candidate.name
    return count


def other_tables(group, p: MatmulAllToAll) -> None:
    """Let rank 1 attribute a row of rank 0 to another expert. All totals stay equal."""
    rank, splits = group.rank(), ((3, 3, 3, 3),) * 2
    h, weights = inputs(splits, p.k, p.n, p.dtype, 0)
    received, own = received_of(rank, splits), torch.tensor(splits[rank]).view(2, 2)
    for candidate, schedule in applicable(p):
        if candidate.name == "serial":
            continue
        with CpuSchedule(schedule, comm_of(group)) as executor:
            for moved in (0, 1, 0):
                y, told = torch.zeros(12, p.n), received.clone()
                told[0] += moved * rank * torch.tensor([1, -1])
                w = weights.split(2)[rank].flatten(0, 1)
                executor.run({"h": h[rank], "received": told, "splits": own, "w": w, "y": y})
                spoilt = y.isnan()
                assert not spoilt[:6].any(), candidate.name
                assert spoilt[6:].all() if moved and rank == 0 else not spoilt[6:].any(), candidate.name


def run_once(executor: CpuSchedule, p: MatmulAllToAll, rank: int, seed: int, name: str) -> torch.Tensor:
    splits = random_splits(p.world_size, p.experts, p.rows, seed)
    h, weights = inputs(splits, p.k, p.n, p.dtype, seed)
    spare = 0 if p.exact else 3  # unused rows of h
    given = torch.full((len(h[rank]) + spare, p.k), torch.nan, dtype=h[rank].dtype)
    given[: len(h[rank])] = h[rank]
    y = torch.full((p.rows[rank], p.n), torch.nan, dtype=h[rank].dtype)
    time.sleep(random.random() * 0.002)
    executor.run(
        {
            "h": given,
            "received": received_of(rank, splits),
            "splits": torch.tensor(splits[rank]).view(p.world_size, p.experts),
            "w": weights.split(p.experts)[rank].flatten(0, 1),
            "y": y,
        }
    )
    assert_rows(y, rank, splits, h, weights, f"{name}, seed {seed}")
    return y
