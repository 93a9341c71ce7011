"""Train DLRM: dense layers on every rank under DistributedDataParallel, embedding tables spread over the ranks by weft.

    python examples/dlrm.py                    # a synthetic click model on 2 CPU processes (or all GPUs), in a minute
    python examples/dlrm.py --reference        # the same model and batches in one process: nn.EmbeddingBag and torch.optim
    python examples/dlrm.py --placement rows   # cuts every table by rows; "plan" prints and uses the planner's choice
    python examples/dlrm.py --dense-only       # without sparse features, to show how much they improve the AUC
    torchrun --nproc-per-node 2 examples/dlrm.py --criteo train.txt

A bottom MLP turns 13 dense features into a vector, which joins the pooled embeddings of 26 sparse features. All pairs
interact by dot product, and a top MLP gives the logit of a click. (The model comes from "Deep Learning Recommendation
Model for Personalization and Recommendation Systems", with smaller sizes.) Backward updates the tables by Adagrad;
torch.optim.Adam updates the MLPs. Every rank trains on its part of each batch. The loss is measured on training
batches, and the area under the ROC curve (AUC) on held-out batches.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from click_data import DENSE, FEATURES, Batch, ClickModel, criteo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.launch import run_ranks

KEYS = [f"feature{i}" for i in range(FEATURES)]
SEED = 0


def mlp(*sizes: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in pairwise(sizes)]
    return nn.Sequential(*layers[:-1], layers[-1][0])


class Dlrm(nn.Module):
    """Maps dense features [B, 13] and sparse features to logits [B]. embeddings: a module that returns a KeyedTensor, or
    None."""

    pairs: torch.Tensor

    def __init__(self, embeddings: nn.Module | None, dim: int) -> None:
        super().__init__()
        self.bottom = mlp(DENSE, 64, dim)
        vectors = 1 + (FEATURES if embeddings is not None else 0)
        self.top = mlp(dim + vectors * (vectors - 1) // 2, 64, 1)
        self.embeddings, self.dim = embeddings, dim
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, offset=1))

    def forward(self, dense: torch.Tensor, sparse: weft.KeyedJaggedTensor) -> torch.Tensor:
        x = self.bottom(dense)
        if self.embeddings is None:
            return self.top(x).squeeze(1)
        pooled = self.embeddings(sparse).values().view(-1, FEATURES, self.dim)
        vectors = torch.cat([x.unsqueeze(1), pooled], dim=1)
        dots = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, dots], dim=1)).squeeze(1)


class UnshardedEmbeddings(nn.Module):
    """The reference: all tables in this process, each an `nn.EmbeddingBag`."""

    def __init__(self, tables: list[weft.EmbeddingBagConfig], hash: bool) -> None:
        super().__init__()
        self.tables, self.hash = tables, hash
        bags = [
            nn.EmbeddingBag(t.num_embeddings, t.embedding_dim, mode="sum", include_last_offset=True) for t in tables
        ]
        self.bags = nn.ModuleList(bags)

    def load_full_weights(self, full: dict[str, torch.Tensor]) -> None:
        for bag, table in zip(self.bags, self.tables, strict=True):
            bag.load_state_dict({"weight": full[table.name]})

    def forward(self, sparse: weft.KeyedJaggedTensor) -> weft.KeyedTensor:
        pooled = []
        for key, bag, table in zip(KEYS, self.bags, self.tables, strict=True):
            ids = sparse[key].values()
            pooled.append(
                bag(weft.embedding.hash_ids(ids, table.num_embeddings) if self.hash else ids, sparse[key].offsets())
            )
        return weft.KeyedTensor(KEYS, [t.embedding_dim for t in self.tables], torch.cat(pooled, dim=1))


def placement(options: argparse.Namespace, tables: list[weft.EmbeddingBagConfig], rule: Any) -> Any:
    """Return the `placement` argument of the module: a sharding for each table. None: whole tables, so that ranks have
    similar work.
    """
    if options.placement == "ranks":
        return None
    if options.placement == "rows":
        return dict.fromkeys((table.name for table in tables), weft.embedding.RowWise())
    world = dist.get_world_size()
    plan = weft.embedding.plan_tables(tables, world, samples=options.batch // world, optimizer=rule)
    if dist.get_rank() == 0:
        print(plan)
    return plan.placement


class Trainer:
    """A rank's model, its optimizers and their learning rates. `step` trains on a batch of this rank's samples."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        tables = [weft.EmbeddingBagConfig(options.rows, options.dim, f"table{i}", (key,)) for i, key in enumerate(KEYS)]
        hash, self.embeddings = options.criteo is not None, None
        torch.manual_seed(SEED)  # the same weights on every rank
        full = {table.name: torch.randn(options.rows, options.dim) / options.dim for table in tables}
        embeddings: Any = None
        if options.reference:
            embeddings = UnshardedEmbeddings(tables, hash)
        elif not options.dense_only:
            rule = weft.Adagrad(lr=options.lr, eps=1e-10)  # torch.optim.Adagrad's eps
            group = dist.group.WORLD
            assert group is not None
            embeddings = weft.nn.ShardedEmbeddingBagCollection(
                tables,
                group=group,
                device=device,
                optimizer=rule,
                hash=hash,
                placement=placement(options, tables, rule),
            )
        torch.manual_seed(SEED + 1)  # reset, because ranks have drawn different numbers for their own tables
        model = Dlrm(embeddings, options.dim).to(device)
        if embeddings is not None:
            embeddings.load_full_weights(full)
        dense = [*model.bottom.parameters(), *model.top.parameters()]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, lr=options.mlp_lr)]
        if options.reference:
            self.optimizers.append(torch.optim.Adagrad(embeddings.parameters(), lr=options.lr))
        elif embeddings is not None:
            self.optimizers.append(embeddings.fused_optimizer)
        self.schedulers = [
            torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.1, total_iters=options.steps) for one in self.optimizers
        ]
        self.model: nn.Module = model if options.reference else DistributedDataParallel(model)
        self.loss = nn.BCEWithLogitsLoss()

    def logits(self, batch: Batch) -> torch.Tensor:
        sparse = weft.KeyedJaggedTensor(KEYS, batch.ids, lengths=batch.lengths, stride=len(batch.clicks))
        return self.model(batch.dense.to(self.device), sparse.to(self.device))

    def step(self, batch: Batch) -> torch.Tensor:
        """Return the loss. Backward updates the tables; their optimizer's step and zero_grad do nothing."""
        loss = self.loss(self.logits(batch), batch.clicks.to(self.device))
        for one in self.optimizers:
            one.zero_grad()
        loss.backward()
        for one in self.optimizers:
            one.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return loss.detach()


def area_under_curve(scores: torch.Tensor, clicks: torch.Tensor) -> float:
    """Return the probability that a random click scores above a random sample without a click."""
    places = torch.empty(len(scores), dtype=torch.float64)
    places[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = int(clicks.sum())
    pairs = positive * (len(scores) - positive)
    return (float(places[clicks > 0].sum()) - positive * (positive + 1) / 2) / max(pairs, 1)


def batches_of(options: argparse.Namespace, held_out: bool) -> Iterator[Batch]:
    """Yield the global batches. For a Criteo file, the first batches are the held-out data."""
    if options.criteo is not None:
        read = criteo(options.criteo, options.batch)
        return (
            islice(read, options.held_out)
            if held_out
            else islice(read, options.held_out, options.held_out + options.steps)
        )
    clicks = ClickModel(options.rows, options.zipf)
    count = options.held_out if held_out else options.steps
    return (clicks.batch(i, options.batch, held_out=held_out) for i in range(count))


def train(rank: int, world: int, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Train, and return the held-out AUC and the losses."""
    device = (
        torch.device(options.device, rank % torch.cuda.device_count())
        if options.device == "cuda"
        else torch.device("cpu")
    )
    trainer, bar = Trainer(options, device), Bar(options.steps, rank == 0)

    def mine(batch: Batch) -> Batch:
        size = len(batch.clicks)
        return batch.part(rank * size // world, (rank + 1) * size // world)

    parts = [mine(batch) for batch in batches_of(options, held_out=True)]

    def evaluate() -> float:
        with torch.no_grad():
            scores = torch.cat([trainer.logits(part).float().cpu() for part in parts])
        both: list[Any] = [None] * world
        pair = scores, torch.cat([part.clicks for part in parts])
        if world > 1:
            dist.all_gather_object(both, pair)
        else:
            both = [pair]
        return area_under_curve(torch.cat([one for one, _ in both]), torch.cat([one for _, one in both]))

    auc, losses, recent = 0.0, [], torch.zeros((), device=device)
    for number, batch in enumerate(batches_of(options, held_out=False), start=1):
        recent += trainer.step(mine(batch))
        if number % options.every == 0 or number == options.steps:
            losses.append(float(recent) / ((number - 1) % options.every + 1))
            recent.zero_()
            auc = evaluate()
            bar.show(number, number * options.batch, losses[-1], auc)
    bar.close()
    return auc, losses


class Bar:
    """A progress bar on a terminal, and lines elsewhere."""

    def __init__(self, steps: int, shown: bool) -> None:
        self.steps, self.shown, self.begin = steps, shown, time.monotonic()

    def show(self, step: int, samples: int, loss: float, auc: float) -> None:
        if not self.shown:
            return
        done, seconds = 30 * step // self.steps, time.monotonic() - self.begin
        so_far = f"loss {loss:.4f}  AUC {auc:.4f}  {samples / seconds:,.0f} samples/s"
        line = f"[{'#' * done}{'.' * (30 - done)}] {step}/{self.steps}  {so_far}"
        print(f"\r{line}", end="", flush=True) if sys.stdout.isatty() else print(line, flush=True)

    def close(self) -> None:
        if self.shown and sys.stdout.isatty():
            print()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train DLRM with sharded embeddings")
    parser.add_argument(
        "--ranks", type=int, help="number of processes to start without torchrun (default: 2, or one for each GPU)"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda: one GPU per rank (default: cuda if there is a GPU)",
    )
    parser.add_argument("--batch", type=int, default=1024, help="samples in a step, of all ranks together")
    parser.add_argument("--steps", type=int, default=400, help="number of training steps")
    parser.add_argument("--held-out", type=int, default=16, help="number of held-out batches, for the AUC")
    parser.add_argument("--every", type=int, default=100, help="number of steps after which the AUC is computed again")
    parser.add_argument("--rows", type=int, default=1000, help="rows of each table")
    parser.add_argument("--dim", type=int, default=16, help="columns of each table")
    parser.add_argument(
        "--zipf", type=float, default=1.05, help="exponent of the Zipf distribution of synthetic ids; 0 means uniform"
    )
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of the tables")
    parser.add_argument("--mlp-lr", type=float, default=0.002, help="learning rate of the MLPs")
    parser.add_argument(
        "--placement", choices=["ranks", "rows", "plan"], default="ranks",
        help="ranks: each table on one rank (default). rows: each table cut by rows. plan: chosen by weft.embedding.plan_tables",
    )  # fmt: skip
    parser.add_argument(
        "--criteo", type=Path, help="train on this Criteo file, with hashed ids, and not on synthetic data"
    )
    parser.add_argument(
        "--reference", action="store_true", help="train in one process with nn.EmbeddingBag and torch.optim"
    )
    parser.add_argument("--dense-only", action="store_true", help="train without the sparse features")
    given = parser.parse_args()
    for name in ("batch", "steps", "held_out", "every", "rows", "dim"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)} must be at least 1")
    if given.ranks is not None and given.ranks < 1:
        parser.error(f"--ranks {given.ranks} must be at least 1")
    for name in ("lr", "mlp_lr", "zipf"):
        if not 0 <= getattr(given, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)} must be a finite number of at least 0")
    return given


def main() -> None:
    options = parsed()
    backend = "nccl" if options.device == "cuda" else "gloo"
    begin = time.monotonic()
    if options.reference:
        torch.set_num_threads(1)  # as on each rank of the sharded run
        auc, _ = train(0, 1, options)
    elif "LOCAL_RANK" in os.environ:
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
        auc, _ = train(dist.get_rank(), dist.get_world_size(), options)
        is_first = dist.get_rank() == 0
        dist.destroy_process_group()
        if not is_first:
            return
    else:
        ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
        auc, _ = run_ranks(ranks, train, options, backend=backend)[0]
    print(f"held-out AUC {auc:.4f} after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
