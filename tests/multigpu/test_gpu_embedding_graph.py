"""Test replays of CUDA graphs that contain embedding_all_to_all.

A launch can be replayed because the call number is in device memory, and the kernel advances it. Before each replay,
fresh ids are copied in, and the output is filled with NaN. Ordinary calls of the same executor, and a late rank, come
between replays. So a stale flag, or a flag that a replay does not set, leads to wrong numbers or to a missed deadline.
"""

from __future__ import annotations

import math
import time
from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import TRANSPORTS
from support.graphs import capture
from support.reference import problem

import weft
from weft.launch import Pool

pytestmark = ranks.MARKS
REPLAYS = 40
LENGTH = 6  # ids in every bag; constant, because a graph keeps the sizes of its capture
FIXED = problem(2, (64, 64, 32, 8, 300), 301, rows=5000)


def ids_of(seed: int, rank: int) -> torch.Tensor:
    """Return fresh ids of this rank's slots, for all samples of the global batch."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    slots = len(FIXED.sharding.local_slots(rank))
    return torch.randint(0, 5000, (slots * sum(FIXED.batch_sizes) * LENGTH,), generator=generator)


def expected(seed: int, rank: int, weights: list[torch.Tensor]) -> torch.Tensor:
    """Return this rank's result in float64, [this rank's samples, all columns]. weights: the weights of all tables."""
    batch, sharding = sum(FIXED.batch_sizes), FIXED.sharding
    first = sum(FIXED.batch_sizes[:rank])
    mine = slice(first, first + FIXED.batch_sizes[rank])
    columns: dict[int, torch.Tensor] = {}
    for owner in range(2):
        ids = ids_of(seed, owner).view(-1, batch, LENGTH)
        for slot, of_slot in zip(sharding.local_slots(owner), ids, strict=True):
            rows = weights[slot.table].double()[of_slot[mine]]
            columns[slot.column] = rows.mean(1) if sharding.tables[slot.table].pooling == "mean" else rows.sum(1)
    return torch.cat([columns[column] for column in sorted(columns)], dim=1)


def replayed(group: dist.ProcessGroup, options: dict[str, Any]) -> float:
    """Return the largest error of any replay or ordinary call, relative to the largest element."""
    rank, device = group.rank(), ranks.device()
    weights, everybodys = ranks.here(FIXED.local_weights(rank)), list(FIXED.weights)
    ids = ids_of(0, rank).to(device)
    bags = ids.numel() // LENGTH
    features = (ids, torch.arange(bags + 1, device=device) * LENGTH)

    def call() -> torch.Tensor:
        return weft.embedding_all_to_all(
            weights, features, FIXED.sharding, group=group, batch_sizes=FIXED.batch_sizes, outputs=4, **options
        )

    def check(output: torch.Tensor, seed: int) -> float:
        right = expected(seed, rank, everybodys)
        error = (output.cpu().double() - right).abs().max() / right.abs().max()
        return math.inf if error.isnan() else float(error)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    graph, output = capture(call, stream, "thread_local")
    worst = 0.0
    for seed in range(1, REPLAYS + 1):
        ids.copy_(ids_of(seed, rank))
        output.fill_(math.nan)  # precedes the peer's stores, which wait for a signal of the replay
        if seed % 8 == 3 + rank:
            time.sleep(0.02)
        graph.replay()
        found = output.clone()
        torch.cuda.synchronize()
        worst = max(worst, check(found, seed))
        if seed % 5 == 0:
            worst = max(worst, check(call(), seed))
    return worst


def after_growth(group: dist.ProcessGroup, options: dict[str, Any]) -> float:
    """Return the largest relative error of replays that come after calls that need more memory.

    These calls also have other batch sizes. Memory that they free is overwritten before the replays.
    """
    rank, device = group.rank(), ranks.device()
    weights, everybodys = ranks.here(FIXED.local_weights(rank)), list(FIXED.weights)
    ids = ids_of(0, rank).to(device)

    def call(times: int = 1) -> torch.Tensor:
        offsets = torch.arange(times * ids.numel() // LENGTH + 1, device=device) * LENGTH
        sizes = [times * size for size in FIXED.batch_sizes]
        features = (ids.repeat(times), offsets) if times > 1 else (ids, first)
        return weft.embedding_all_to_all(weights, features, FIXED.sharding, group=group, batch_sizes=sizes, **options)

    first = torch.arange(ids.numel() // LENGTH + 1, device=device) * LENGTH
    call()
    graph, output = capture(call, mode="thread_local")
    held = [call(times) for times in range(2, 12)]
    spoilt = [torch.full((n,), -1, dtype=torch.int64, device=device) for n in (2, 8, 64, 512) for _ in range(100)]
    worst = 0.0
    for seed in range(1, 6):
        ids.copy_(ids_of(seed, rank))
        output.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        right = expected(seed, rank, everybodys)
        error = (output.cpu().double() - right).abs().max() / right.abs().max()
        worst = max(worst, math.inf if error.isnan() else float(error))
    assert all(one.isfinite().all() for one in held)
    assert all((one == -1).all() for one in spoilt)
    return worst


def in_a_row(group: dist.ProcessGroup, options: dict[str, Any]) -> float:
    """Return the largest relative error of replays in a row. Results are compared afterwards, so that ranks can run
    ahead of each other.
    """
    rank, device = group.rank(), ranks.device()
    weights, everybodys = ranks.here(FIXED.local_weights(rank)), list(FIXED.weights)
    fresh = [ids_of(seed, rank).to(device) for seed in range(REPLAYS)]
    ids = fresh[0].clone()
    offsets = torch.arange(ids.numel() // LENGTH + 1, device=device) * LENGTH
    stream = torch.cuda.Stream(device)

    def call() -> torch.Tensor:
        return weft.embedding_all_to_all(
            weights, (ids, offsets), FIXED.sharding, group=group, batch_sizes=FIXED.batch_sizes, **options
        )

    with torch.cuda.stream(stream):
        call()
    found = []
    graph, kept = capture(lambda: call().clone(), stream, "thread_local")
    for mine in fresh:
        ids.copy_(mine)
        kept.fill_(math.nan)
        graph.replay()
        found.append(kept.clone())
    torch.cuda.synchronize()
    errors = []
    for seed, output in enumerate(found):
        right = expected(seed, rank, everybodys)
        errors.append((output.cpu().double() - right).abs().max() / right.abs().max())
    worst = torch.stack(errors).max()
    return math.inf if worst.isnan() else float(worst)


@pytest.mark.parametrize("order", ranks.ORDERS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_captured_call_is_right_in_every_replay(pair: Pool, transport: str, order: str) -> None:
    # A result is a sum of LENGTH rows in fp32, so it is rounded once for each row.
    for worst in pair.run(replayed, {"transport": transport, "order": order}, timeout_s=60):
        assert worst <= LENGTH * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replays_in_a_row_are_right(pair: Pool, transport: str) -> None:
    for worst in pair.run(in_a_row, {"transport": transport}, timeout_s=60):
        assert worst <= LENGTH * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replays_are_right_after_larger_calls(pair: Pool, transport: str) -> None:
    for worst in pair.run(after_growth, {"transport": transport}, timeout_s=60):
        assert worst <= LENGTH * torch.finfo(torch.float32).eps
