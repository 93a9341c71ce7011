"""Ranks train tables, save them with `torch.distributed.checkpoint`, and load them, on CPU processes and on GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.on_ranks import device
from torch import nn

import weft
from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor

KEYS, BATCH = ("u", "friend", "i"), 12
ADAM, ADAGRAD = weft.Adam(lr=0.1), weft.RowwiseAdagrad(lr=0.1)
MOMENTUM = "tables.state.sparse.ebc.embedding_bags.users.weight.users.momentum1"


def tables(dtype: torch.dtype = torch.float32, rows: int = 30) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(rows, 8, "users", ("u", "friend"), dtype=dtype),
        EmbeddingBagConfig(20, 3, "items", ("i",), "mean", dtype=dtype),
        EmbeddingBagConfig(25, 4, "pairs", ("i",), dtype=dtype),
    ]


class Model(nn.Module):
    def __init__(self, group: dist.ProcessGroup, configs: list[EmbeddingBagConfig], **options: Any) -> None:
        super().__init__()
        ebc = weft.nn.ShardedEmbeddingBagCollection(configs, group=group, gradients="sum", deadline_s=30.0, **options)
        self.sparse = nn.ModuleDict({"ebc": ebc})
        self.over = nn.Linear(3, 1, device=device())

    @property
    def ebc(self) -> weft.nn.ShardedEmbeddingBagCollection:
        return self.sparse["ebc"]  # type: ignore[return-value]


def step(model: Model, seed: int, group: dist.ProcessGroup) -> None:
    """Train on this rank's part of the global batch `seed`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (3, BATCH), generator=generator)
    ids = [torch.randint(0, 20, (int(of_key.sum()),), generator=generator) for of_key in lengths]
    upstream = torch.randn(BATCH, model.ebc.sharding.total_dim, generator=generator)
    mine = slice(group.rank() * BATCH // group.size(), (group.rank() + 1) * BATCH // group.size())
    parts = []
    for of_key, values in zip(lengths, ids, strict=True):
        ends = nn.functional.pad(of_key.cumsum(0), (1, 0))
        parts.append(values[int(ends[mine.start]) : int(ends[mine.stop])])
    features = KeyedJaggedTensor(KEYS, torch.cat(parts), lengths=lengths[:, mine].flatten())
    pooled = model.ebc(features.to(device())).values()
    pooled.backward(upstream[mine].to(pooled))


def state_of(model: Model) -> dict[str, Any]:
    return {"model": model, "tables": weft.nn.FusedOptimizers(model)}


def values(model: Model) -> dict[str, torch.Tensor]:
    """Return this rank's tables and states, on the CPU."""
    found = {name: value.detach().cpu().clone() for name, value in model.state_dict().items() if "ebc" in name}
    for states in weft.nn.FusedOptimizers(model).state_dict()["state"].values():
        found |= {name: value.cpu().clone() for name, value in states.items()}
    return found


def saves(group: dist.ProcessGroup, folder: str, optimizer: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Train and save, then train further. Return the tables and states at the end."""
    model = Model(group, tables(dtype), optimizer=optimizer)
    for seed in range(2):
        step(model, seed, group)
    model.ebc.fused_optimizer.param_groups[0]["lr"] = 0.03
    dcp.save(state_of(model), checkpoint_id=folder, process_group=group)
    step(model, 7, group)
    return values(model)


def loads(
    group: dist.ProcessGroup, folder: str, optimizer: Any, dtype: torch.dtype, placement: list[int]
) -> tuple[dict[str, torch.Tensor], float]:
    model = Model(group, tables(dtype), optimizer=optimizer, placement=placement)
    dcp.load(state_of(model), checkpoint_id=folder, process_group=group, planner=weft.nn.LoadPlanner())
    step(model, 7, group)
    return values(model), model.ebc.fused_optimizer.param_groups[0]["lr"]


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for part in parts for name, value in part.items()}
