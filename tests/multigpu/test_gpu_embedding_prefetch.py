"""`ShardedEmbeddingBagCollection.prefetch` on GPUs: the same bits with delays, from memory that is freed at once."""

from __future__ import annotations

import gpu_ranks as ranks
import torch
import torch.distributed as dist
from support.embedding_prefetch import batch, learned, module_on

from weft.launch import Pool

pytestmark = ranks.MARKS


def both(group: dist.ProcessGroup) -> bool:
    plain, ahead = (learned(group, ranks.device(), is_ahead) for is_ahead in (False, True))
    return all(torch.equal(one, two) for one, two in zip(plain, ahead, strict=True))


def test_prefetched_batches_give_the_same(pair: Pool) -> None:
    assert pair.run(both, timeout_s=120) == [True, True]


def many(group: dist.ProcessGroup) -> bool:
    """Batches that exist from their prefetch to their call only, behind slow work of each device."""
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
