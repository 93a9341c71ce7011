"""Modules that are called with and without `prefetch`, on CPU processes and on GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor
from weft.nn import ShardedEmbeddingBagCollection

TABLES = (
    EmbeddingBagConfig(50, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(20, 4, "items", ("i",), "mean"),
    EmbeddingBagConfig(9, 16, "pairs", ("i", "u")),
)
KEYS = ("u", "friend", "i")


def batch(seed: int, rank: int, device: torch.device, samples: int = 7) -> KeyedJaggedTensor:
    """Return a rank's samples. A bag has up to 4 weighted ids."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    lengths = torch.randint(0, 5, (len(KEYS) * (samples + rank),), generator=generator)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator)
    return KeyedJaggedTensor(
        list(KEYS), ids.to(device), weights.to(device).requires_grad_(), lengths=lengths.to(device)
    )


def module_on(group: dist.ProcessGroup, device: torch.device, **options: Any) -> Any:
    torch.manual_seed(3)
    optimizer = weft.RowwiseAdagrad(lr=0.1)
    options = {"is_weighted": True, "placement": [i % group.size() for i in range(len(TABLES))]} | options
    return ShardedEmbeddingBagCollection(TABLES, group=group, device=device, optimizer=optimizer, **options)


def learned(
    group: dist.ProcessGroup, device: torch.device, ahead: bool, steps: int = 4, **options: Any
) -> list[torch.Tensor]:
    """Train for some steps. Return the pooled vectors and the gradients of weights of each step, and the tables at the
    end.

    ahead: True to prefetch all batches except the first and the third.
    """
    module, found = module_on(group, device, max_ids=1000, **options), list[torch.Tensor]()
    batches = [batch(step, group.rank(), device) for step in range(steps)]
    for number, one in enumerate(batches):
        pooled = module(one).values()
        if ahead and number + 1 < steps and number != 1:
            module.prefetch(batches[number + 1])
        pooled.square().sum().backward()
        found.append(pooled.detach().cpu())
        if one.weights().grad is not None:
            found.append(one.weights().grad.cpu())
        del pooled
    return found + [weight.detach().cpu() for weight in module.state_dict().values()]
