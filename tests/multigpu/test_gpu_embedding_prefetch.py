"""Test `ShardedEmbeddingBagCollection.prefetch` on GPUs. Bits must not change, although ranks are late and batches are
freed at once.
"""

from __future__ import annotations

from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from support.embedding_prefetch import batch, learned, module_on
from support.on_ranks import error_of

import weft
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingCollection

pytestmark = ranks.MARKS


def both(group: dist.ProcessGroup, options: dict[str, Any]) -> bool:
    plain, ahead = (learned(group, ranks.device(), is_ahead, **options) for is_ahead in (False, True))
    return all(torch.equal(one, two) for one, two in zip(plain, ahead, strict=True))


@pytest.mark.parametrize("options", [{}, {"placement": [RowWise(), DataParallel(), ColumnWise((0, 1))]}], ids=str)
def test_prefetched_batches_give_the_same(pair: Pool, options: dict[str, Any]) -> None:
    assert pair.run(both, options, timeout_s=120) == [True, True]


def cancelled(group: dist.ProcessGroup) -> bool:
    """Prefetch and cancel a batch before each step. The next batch gets its memory while the GPU is still busy with
    slow work.
    """
    device, rank, found = ranks.device(), group.rank(), []
    for ahead in (False, True):
        module, pooled = module_on(group, device), []
        for step in range(8):
            if ahead:
                other = batch(50 + step, rank, device, 300)
                torch.cuda._sleep(10_000_000 * (1 + rank))
                module.prefetch(other)
                del other
                module.cancel_prefetch()
            y = module(batch(step, rank, device, 300)).values()
            y.sum().backward()
            pooled.append(y.detach().clone())
            del y
        found.append([*pooled, *module.state_dict().values()])
    return all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_cancelled_batches(pair: Pool) -> None:
    assert pair.run(cancelled, timeout_s=120) == [True, True]


def loop(group: dist.ProcessGroup) -> bool:
    """Compare `weft.nn.prefetched` with a plain loop. Both leave the loop before its end."""
    found = []
    for ahead in (False, True):
        module, pooled = module_on(group, ranks.device()), []
        given = [batch(step, group.rank(), ranks.device(), 300) for step in range(8)]
        for steps in (given[:5], given[5:]):
            for number, one in enumerate(weft.nn.prefetched(steps, {module: lambda one: one}) if ahead else steps):
                y = module(one).values()
                y.sum().backward()
                pooled.append(y.detach().clone())
                if number == 3:
                    break
        found.append([*pooled, *module.state_dict().values()])
    return all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_prefetched_loop(pair: Pool) -> None:
    assert pair.run(loop, timeout_s=120) == [True, True]


def many(group: dist.ProcessGroup) -> bool:
    """Free each batch directly after its call, while the GPU is still busy with slow work."""
    device, rank, found = ranks.device(), group.rank(), []
    for ahead in (False, True):
        module, pooled = module_on(group, device), []
        following = batch(0, rank, device, 300)
        for step in range(12):
            one = following
            if (step + rank) % 3 == 0:
                torch.cuda._sleep(20_000_000)
            y = module(one).values()
            following = batch(step + 1, rank, device, 300)
            if ahead:
                module.prefetch(following)
            del one
            torch.cuda._sleep(10_000_000)
            y.sum().backward()
            pooled.append(y.detach().clone())
            del y
        if ahead:
            module(following)
        found.append([*pooled, *module.state_dict().values()])
    return all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_many_batches(pair: Pool) -> None:
    assert pair.run(many, timeout_s=120) == [True, True]


def runs_out(group: dist.ProcessGroup, how: str) -> tuple[str, str]:
    """Train with a batch less on rank 1. Return the kind and text of the error, if any."""
    device, rank = ranks.device(), group.rank()
    given = [batch(step, rank, device) for step in range(4 - rank)]
    if how == "without pooling":
        tables = [EmbeddingBagConfig(50, 8, "users", ("u", "friend"))]
        module: Any = ShardedEmbeddingCollection(
            tables, group=group, device=device, placement=[RowWise()], optimizer=weft.SGD(lr=0.1), deadline_s=5.0
        )
        given = [KeyedJaggedTensor(["u", "friend"], *ids_of(one)) for one in given]
    else:
        options = {"placement": [RowWise(), 0, ColumnWise((0, 1))]} if how == "cut tables" else {}
        module = module_on(group, device, deadline_s=5.0, **options)

    def train() -> None:
        for one in weft.nn.prefetched(given, {module: lambda one: one}) if how == "prefetched" else given:
            y = module(one)
            (y["u"] if how == "without pooling" else y).values().sum().backward()

    return error_of(train) if rank == 0 else (str(train()), "")


def ids_of(features: KeyedJaggedTensor) -> tuple[torch.Tensor, None, torch.Tensor]:
    two = [features[key] for key in ("u", "friend")]
    return torch.cat([one.values() for one in two]), None, torch.cat([one.lengths() for one in two])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in turn", "prefetched", "cut tables", "without pooling"])
def test_ranks_that_run_out_of_batches_raise(how: str) -> None:
    with Pool(2, backend="nccl") as alone:
        (kind, text), _ = alone.run(runs_out, how, timeout_s=60)
    assert kind == "DeadlineError"
    assert "waited for the numbers of ids of rank 1" in text
