"""A `ShardedEmbeddingBagCollection` of three tables, its batches and its state, for tests of training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support import embedding_partition as partition
from torch import nn

from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor
from weft.nn import ShardedEmbeddingBagCollection

TABLES = (
    EmbeddingBagConfig(30, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(20, 3, "items", ("i",), "mean"),
    EmbeddingBagConfig(30, 4, "pairs", ("i", "u")),
)

KEYS, BATCH, COLUMNS = ("u", "friend", "i"), 12, 8 + 8 + 3 + 4 + 4


def batch(seed: int, rank: int = 0, world: int = 1) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Return a rank's part of global batch number `seed`, and its part of the gradient of the pooled vectors."""
    return partition.batch(seed, BATCH, rank, world, columns=COLUMNS)


def made(group: dist.ProcessGroup, **options: Any) -> ShardedEmbeddingBagCollection:
    module = ShardedEmbeddingBagCollection(
        TABLES, group=group, placement=options.pop("placement", None), deadline_s=30.0, **options
    )
    full = partition.full_weights(TABLES)
    module.load_full_weights({name: weight.to(module.sharding.dtype) for name, weight in full.items()})
    return module


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
