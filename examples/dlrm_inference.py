"""DLRM inference: dense layers on every rank, embedding tables spread over the ranks by weft.

    torchrun --nproc-per-node 2 examples/dlrm_inference.py --device cpu --check

Each rank scores its own samples: a bottom MLP turns 13 dense features into a vector, which joins the pooled embeddings
of 26 sparse features. All pairs interact by dot product, and a top MLP gives a logit. (The model comes from "Deep
Learning Recommendation Model for Personalization and Recommendation Systems", with smaller sizes.) `--check` compares
the logits with a model whose tables are not sharded.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

import weft

DENSE, FEATURES, DIM, ROWS, MOST_IDS = 13, 26, 64, 20_000, 20


def mlp(*sizes: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in pairwise(sizes)]
    return nn.Sequential(*layers[:-1], layers[-1][0])


class Dlrm(nn.Module):
    """Maps dense features [B, 13] and sparse features to logits [B]. embeddings: a module that returns a KeyedTensor."""

    pairs: torch.Tensor

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.bottom = mlp(DENSE, 256, DIM)
        self.embeddings = embeddings
        self.top = mlp(DIM + FEATURES * (FEATURES + 1) // 2, 256, 1)
        self.register_buffer("pairs", torch.triu_indices(FEATURES + 1, FEATURES + 1, offset=1))

    def forward(self, dense: torch.Tensor, sparse: weft.KeyedJaggedTensor) -> torch.Tensor:
        x = self.bottom(dense)
        pooled = self.embeddings(sparse).values().view(-1, FEATURES, DIM)
        vectors = torch.cat([x.unsqueeze(1), pooled], dim=1)
        dots = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, dots], dim=1)).squeeze(1)


class UnshardedEmbeddings(nn.Module):
    """The reference of `--check`: all tables on this rank, each pooled by `nn.functional.embedding_bag`."""

    def __init__(self, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.full = full

    def forward(self, sparse: weft.KeyedJaggedTensor) -> weft.KeyedTensor:
        pooled = [
            nn.functional.embedding_bag(
                sparse[key].values(), table, sparse[key].offsets(), mode="sum", include_last_offset=True
            )
            for key, table in zip(sparse.keys(), self.full.values(), strict=True)
        ]
        return weft.KeyedTensor(sparse.keys(), [DIM] * FEATURES, torch.cat(pooled, dim=1))


def batch(size: int, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, weft.KeyedJaggedTensor]:
    lengths = torch.randint(0, MOST_IDS + 1, (FEATURES * size,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    sparse = weft.KeyedJaggedTensor.from_lengths_sync([f"feature{i}" for i in range(FEATURES)], ids, lengths)
    return torch.rand(size, DENSE, generator=generator).to(device), sparse.to(device)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="DLRM inference with sharded embeddings")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU per rank")
    parser.add_argument("--batch", type=int, default=1024, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=20, help="number of batches to score")
    parser.add_argument("--check", action="store_true", help="compare with the unsharded model")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"start one process per rank: torchrun --nproc-per-node 2 {' '.join(sys.argv)}")
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on every rank
    tables = [weft.EmbeddingBagConfig(ROWS, DIM, f"table{i}", (f"feature{i}",)) for i in range(FEATURES)]
    full = {table.name: torch.randn(ROWS, DIM) / MOST_IDS for table in tables}
    embeddings = weft.nn.ShardedEmbeddingBagCollection(tables, group=dist.group.WORLD, device=device)
    embeddings.load_full_weights(full)
    torch.manual_seed(1)  # reset, because ranks have drawn different numbers for their own tables
    model = Dlrm(embeddings).to(device).eval()

    generator = torch.Generator().manual_seed(rank)  # different samples on every rank
    batches = [batch(arguments.batch, device, generator) for _ in range(4)]
    logits = [model(*one) for one in batches]
    if arguments.check:
        model.embeddings = UnshardedEmbeddings({name: table.to(device) for name, table in full.items()})
        for one, ours in zip(batches, logits, strict=True):
            torch.testing.assert_close(ours, model(*one), rtol=1e-4, atol=1e-4)
        model.embeddings = embeddings
        print(f"rank {rank}: {len(batches)} batches agree with the unsharded model", flush=True)
    dist.barrier()
    begin = time.perf_counter()
    for step in range(arguments.steps):
        model(*batches[step % len(batches)])
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        seconds = time.perf_counter() - begin
        print(
            f"{world_size * arguments.batch * arguments.steps / seconds:,.0f} samples/s on {world_size} ranks",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
