"""Training of unpooled embeddings: the code that runs on the ranks, and the same training in one process with torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.embedding_partition import full_weights, named_parts, whole
from support.embedding_training import Rule, clipped, device_of

import weft
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise, hash_ids
from weft.launch import Pool
from weft.nn import ShardedEmbeddingCollection

DIM, KEYS = 6, ("u", "friend", "i")


def tables_of(dtype: torch.dtype = torch.float32) -> tuple[EmbeddingBagConfig, ...]:
    return (
        EmbeddingBagConfig(30, DIM, "users", ("u", "friend"), dtype=dtype),
        EmbeddingBagConfig(21, DIM, "items", ("i",), dtype=dtype),
        EmbeddingBagConfig(50, DIM, "pairs", ("i", "u"), dtype=dtype),
    )


SLOTS = (("u", 0), ("friend", 0), ("i", 1), ("i", 2), ("u", 2))
OUT = ("u@users", "friend", "i@items", "i@pairs", "u@pairs")


def placements(world: int) -> dict[str, Any]:
    return {
        "whole": None,
        "rows": dict.fromkeys(("users", "items", "pairs"), RowWise()),
        "mixed": {"users": RowWise(tuple(range(world))[::-1]), "items": world - 1, "pairs": 0},
        "one rank": [0, 0, 0],
        "replicated": [DataParallel()] * 3,
        "mixed too": {"users": DataParallel(), "items": RowWise(), "pairs": DataParallel()},
    }


def columns(world: int, parts: int) -> dict[str, ColumnWise]:
    """Divide all tables into `parts` blocks of columns. The first parts of different tables are on different ranks."""
    names = ("users", "items", "pairs")
    return {name: ColumnWise(tuple((n + k) % world for k in range(parts))) for n, name in enumerate(names)}


def batch(
    seed: int, rank: int, world: int, hash: bool, longest: int = 5
) -> tuple[KeyedJaggedTensor, list[torch.Tensor]]:
    """Return a rank's samples, 4 + rank of them, and the gradient of each output."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    samples = 4 + rank
    lengths = torch.randint(0, longest + 1, (3, samples), generator=generator)
    counts = dict(zip(KEYS, lengths.sum(1).tolist(), strict=True))
    high = 2**40 if hash else 12  # many equal ids
    values = torch.randint(0, high, (int(lengths.sum()),), generator=generator)
    upstream = [torch.randn(counts[key], DIM, generator=generator) for key, _ in SLOTS]
    return KeyedJaggedTensor(KEYS, values, lengths=lengths.flatten()), upstream


def train(
    group: dist.ProcessGroup, placement: Any, dtype: torch.dtype, steps: int, options: dict[str, Any], accumulates: bool = False
) -> list[Any]:  # fmt: skip
    """Train. Return this rank's parts, and its outputs of the first step."""
    tables, options, device = tables_of(dtype), dict(options), device_of(group)
    by_torch = options.pop("torchs", False)
    module = ShardedEmbeddingCollection(tables, group=group, placement=placement, deadline_s=30.0, **options)
    module.load_full_weights(full_weights(tables))
    optimizer = torch.optim.SGD(list(module.parameters()) or [torch.empty(0, requires_grad=True)], 0.1)
    first: list[torch.Tensor] = []

    def step(seed: int) -> None:
        features, upstream = batch(seed, group.rank(), group.size(), options.get("hash", False))
        found = module(features.to(device))
        assert tuple(found) == OUT
        for one, (key, _) in zip(found.values(), SLOTS, strict=True):
            assert torch.equal(one.lengths().cpu(), features[key].lengths())
        values = [one.values() for one in found.values()]
        if seed == 0:
            first.extend(one.detach().cpu() for one in values)
        torch.autograd.backward(values, [one.to(device, dtype) for one in upstream])

    if accumulates:
        for seed in range(0, steps, 2):
            with module.accumulate():
                step(seed)
                step(seed + 1)
    else:
        for seed in range(steps):
            step(seed)
            if by_torch:
                optimizer.step()
                optimizer.zero_grad()
    return [named_parts(module.parts(), tables), first]


def by_torch(
    world: int, steps: int, optimizer: Any, scale: float, hash: bool, dtype: torch.dtype, accumulates: bool
) -> tuple[dict[str, torch.Tensor], list[list[torch.Tensor]]]:
    """Train in one process in float64. Return the tables, and each rank's outputs of the first step."""
    tables = tables_of(dtype)
    weights = {name: weight.double() for name, weight in full_weights(tables).items()}
    rules = {name: Rule(optimizer, weight) for name, weight in weights.items()}
    out: list[list[torch.Tensor]] = []
    for first in range(0, steps, 2 if accumulates else 1):
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        read = {t.name: torch.zeros(t.num_embeddings, dtype=torch.bool) for t in tables}
        total = torch.zeros((), dtype=torch.float64)
        for seed in range(first, first + (2 if accumulates else 1)):
            for rank in range(world):
                features, upstream = batch(seed, rank, world, hash)
                found = []
                for (key, number), grad in zip(SLOTS, upstream, strict=True):
                    table, ids = tables[number], features[key].values()
                    ids = hash_ids(ids, table.num_embeddings) if hash else ids
                    read[table.name][ids] = True
                    rows = leaves[table.name][ids]
                    found.append(rows.detach())
                    total = total + (rows * grad.to(dtype).double() * scale).sum()
                if seed == 0:
                    out.append(found)
        total.backward()
        grads = clipped(optimizer, [leaf.grad for leaf in leaves.values() if leaf.grad is not None])
        for (name, weight), grad in zip(weights.items(), grads, strict=True):
            rules[name].apply(weight, grad + optimizer.weight_decay * weight, read[name])
    return weights, out


def check(
    pool: Pool, world: int, placement: Any, optimizer: Any, dtype: torch.dtype = torch.float32, steps: int = 2,
    accumulates: bool = False, tolerance: float = 1e-5, **options: Any,
) -> None:  # fmt: skip
    given = {"optimizer": optimizer, **options}
    per_rank = pool.run(train, placement, dtype, steps, given, accumulates, ranks=world, timeout_s=120)
    scale = 1.0 if options.get("gradients") == "sum" else 1 / world
    rule = optimizer or weft.SGD(lr=0.1)
    wanted, out = by_torch(world, steps, rule, scale, options.get("hash", False), dtype, accumulates)
    found = whole([parts for parts, _ in per_rank])
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=tolerance, atol=tolerance)
    for (_, rows), of_rank in zip(per_rank, out, strict=True):
        assert all(torch.equal(one.double(), two) for one, two in zip(rows, of_rank, strict=True))  # rows are copies
