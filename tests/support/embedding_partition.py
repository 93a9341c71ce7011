"""Training of tables that are divided into parts: the code that runs on the ranks, and the same training in one process
with torch in any dtype.

A rank uses a GPU if its group uses NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from support.embedding_training import Rule, clipped, device_of

import weft
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise, hash_ids
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

KEYS = ("u", "friend", "i")


def tables_of(dtype: torch.dtype = torch.float32) -> tuple[EmbeddingBagConfig, ...]:
    return (
        EmbeddingBagConfig(30, 8, "users", ("u", "friend"), dtype=dtype),
        EmbeddingBagConfig(21, 12, "items", ("i",), "mean", dtype),
        EmbeddingBagConfig(30, 5, "pairs", ("i", "u"), "mean", dtype),
        EmbeddingBagConfig(50, 8, "more", ("i",), "sum", dtype),
    )


def equal_tables(dtype: torch.dtype, pooling: Any) -> tuple[EmbeddingBagConfig, ...]:
    """Return tables with equal columns and pooling, as `dedup=True` needs them."""
    return tuple(replace(table, embedding_dim=8, pooling=pooling) for table in tables_of(dtype))


COLUMNS = 8 + 8 + 12 + 5 + 5 + 8
TABLES = {dtype: tables_of(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def placements(world: int) -> dict[str, dict[str, Any]]:
    last, ranks = world - 1, tuple(range(world))
    return {
        "columns": {
            "users": ColumnWise(ranks), "items": ColumnWise((last, 0, 0)), "pairs": 0, "more": ColumnWise((0, last), (3, 5)),
        },
        "rows": {"users": RowWise(), "items": RowWise((last,)), "pairs": RowWise(ranks[::-1]), "more": RowWise()},
        "replicated": dict.fromkeys(("users", "items", "pairs", "more"), DataParallel()),
        "mixed": {"users": RowWise(), "items": ColumnWise(ranks), "pairs": DataParallel(), "more": last},
        "mixed too": {"users": DataParallel(), "items": DataParallel(), "pairs": RowWise(), "more": 0},
    }  # fmt: skip


def full_weights(tables: tuple[EmbeddingBagConfig, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {t.name: torch.randn(t.num_embeddings, t.embedding_dim, generator=generator).to(t.dtype) for t in tables}


def batch(
    seed: int, samples: int, rank: int = 0, world: int = 1, hash: bool = False, longest: int = 4, columns: int = COLUMNS
) -> Any:
    """Return a rank's part of global batch number `seed`: its features and its upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (3, samples), generator=generator)
    upstream = torch.randn(samples, columns, generator=generator)
    mine = slice(rank * samples // world, (rank + 1) * samples // world)
    ids, weights = [], []
    for of_key in lengths:
        high = 2**40 if hash else 20
        values = torch.randint(0, high, (int(of_key.sum()),), generator=generator)
        numbers = torch.rand(len(values), generator=generator)
        ends = of_key.cumsum(0).tolist()
        begin = ends[mine.start - 1] if mine.start else 0
        at = slice(begin, ends[mine.stop - 1] if mine.stop else 0)
        ids.append(values[at])
        weights.append(numbers[at])
    own = lengths[:, mine].contiguous().flatten()  # flatten alone returns a single column as a strided view
    features = KeyedJaggedTensor(KEYS, torch.cat(ids), torch.cat(weights), lengths=own, stride=mine.stop - mine.start)
    return features, upstream[mine]


def assert_equal_bits(runs: Iterable[list[Any]]) -> None:
    """Assert that runs have trained tables to equal bits. runs: for each run, each rank's results of `train`."""
    first, *others = [whole([parts for parts, _ in run]) for run in runs]
    for other in others:
        assert all(torch.equal(other[name], weight) for name, weight in first.items())


def whole(per_rank: list[Any]) -> dict[str, torch.Tensor]:
    """Return the whole tables, assembled from the parts of all ranks. per_rank: the `named_parts` of each rank."""
    found = {}
    for parts in per_rank:
        for part, name, shape, weight in parts:
            full = found.setdefault(name, torch.full(shape, torch.nan, dtype=weight.dtype))
            block = full[part.row : part.row + part.rows, part.column : part.column + part.columns]
            assert block.isnan().all() or torch.equal(block, weight), f"{name}: copies differ"
            block.copy_(weight)
    assert not any(one.isnan().any() for one in found.values())
    return found


def named_parts(parts: list[Any], tables: Any) -> list[Any]:
    """Return the parts, each with the name and the shape of its table."""
    found = []
    for part, weight in parts:
        t = tables[part.table]
        found.append((part, t.name, (t.num_embeddings, t.embedding_dim), weight.detach().cpu().clone()))
    return found


def train(
    group: dist.ProcessGroup, placement: Mapping[str, Any], dtype: torch.dtype, steps: int, samples: int, options: dict[str, Any],
    accumulates: bool = False,
) -> list[Any]:  # fmt: skip
    """Train. Return this rank's parts, and its output of the last step. The option `pooling` selects `equal_tables`."""
    options, device = dict(options), device_of(group)
    pooling = options.pop("pooling", None)
    tables = TABLES[dtype] if pooling is None else equal_tables(dtype, pooling)
    columns = sum(table.embedding_dim * len(table.feature_names) for table in tables)
    by_torch = options.pop("torchs", False)
    module = ShardedEmbeddingBagCollection(tables, group=group, placement=dict(placement), deadline_s=30.0, **options)
    module.load_full_weights(full_weights(tables))
    optimizer = torch.optim.SGD(list(module.parameters()) or [torch.empty(0, requires_grad=True)], 0.1)
    y = torch.empty(0)
    for seed in range(steps):
        of_rank = group.rank(), group.size(), options.get("hash", False)
        halves = [batch(seed, samples, *of_rank, columns=columns)]
        if accumulates:
            halves = [batch(2 * seed + n, samples // 2, *of_rank, columns=columns) for n in (0, 1)]

        def forward_and_backward(halves: list[Any] = halves) -> torch.Tensor:
            for features, upstream in halves:
                y = module(features.to(device)).values()
                y.backward(upstream.to(device, dtype))
            return y.detach().cpu()

        if accumulates:
            with module.accumulate():
                y = forward_and_backward()
        else:
            y = forward_and_backward()
        if by_torch:
            optimizer.step()
            optimizer.zero_grad()
    named = named_parts(module.parts(), tables)
    return [named, y]


def by_torch(
    dtype: torch.dtype, steps: int, samples: int, optimizer: Any, scale: float, in_dtype: torch.dtype, is_weighted: bool,
    hash: bool, accumulates: bool = False, pooling: Any = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # fmt: skip
    """Train in one process, computing in `in_dtype`. Return the tables, and the output of the last step.

    dtype: the dtype of the tables in `train`, which determines the initial values.
    """
    tables = TABLES[dtype] if pooling is None else equal_tables(dtype, pooling)
    columns = sum(table.embedding_dim * len(table.feature_names) for table in tables)
    weights = {name: weight.to(in_dtype) for name, weight in full_weights(tables).items()}
    rules = {name: Rule(optimizer, weight) for name, weight in weights.items()}
    out = torch.empty(0)
    for seed in range(steps):
        halves = [batch(seed, samples, hash=hash, columns=columns)]
        if accumulates:
            halves = [batch(2 * seed + n, samples // 2, hash=hash, columns=columns) for n in (0, 1)]
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        read = {t.name: torch.zeros(t.num_embeddings, dtype=torch.bool) for t in tables}
        for features, upstream in halves:
            pooled = []
            for t in tables:
                for key in t.feature_names:
                    bags, lengths = features[key], features[key].lengths()
                    ids = hash_ids(bags.values(), t.num_embeddings) if hash else bags.values()
                    read[t.name][ids] = True
                    rows = leaves[t.name][ids]
                    rows = rows * bags.weights_or_none().to(in_dtype)[:, None] if is_weighted else rows
                    bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
                    zeros = torch.zeros(len(lengths), t.embedding_dim, dtype=in_dtype)
                    one = zeros.index_add(0, bag, rows)
                    pooled.append(one / lengths.clamp(min=1)[:, None] if t.pooling == "mean" else one)
            out = torch.cat(pooled, 1)
            (out * upstream.to(dtype).to(in_dtype) * scale).sum().backward()
        grads = clipped(optimizer, [leaf.grad for leaf in leaves.values() if leaf.grad is not None])
        for (name, weight), grad in zip(weights.items(), grads, strict=True):
            rules[name].apply(weight, grad + optimizer.weight_decay * weight, read[name])
    return weights, out.detach()


def check(
    pool: Pool, world: int, placement: Mapping[str, Any], optimizer: Any, dtype: torch.dtype = torch.float32, steps: int = 3,
    samples: int = 13, accumulates: bool = False, tolerance: float = 1e-5, **options: Any,
) -> list[Any]:  # fmt: skip
    given = {"optimizer": optimizer, **options}
    per_rank = pool.run(train, placement, dtype, steps, samples, given, accumulates, ranks=world, timeout_s=120)
    found = whole([parts for parts, _ in per_rank])
    scale = 1.0 if options.get("gradients") == "sum" else 1 / world
    rule = optimizer or weft.SGD(lr=0.1)
    wanted, out = by_torch(
        dtype, steps, samples, rule, scale, torch.float64, options.get("is_weighted", False), options.get("hash", False),
        accumulates, options.get("pooling"),
    )  # fmt: skip
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat([y for _, y in per_rank]).double(), out, rtol=tolerance, atol=tolerance)
    return per_rank
