"""weft.embedding_pool: one kernel pools all tables of one device into one ordinary tensor.

It is the local half of `embedding_all_to_all`, for tables that are not sharded. It is also the strong baseline of its benchmarks:
pool with it, then call NCCL's all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, as_jagged
from weft.embedding.check import check_contents, check_jagged
from weft.embedding.options import BoundsCheck, EmbeddingOptions
from weft.embedding.plan import EmbeddingPlan
from weft.runtime.embedding_unfused import pool_alone


def embedding_pool(
    weights: Sequence[torch.Tensor],
    features: Any,
    tables: Sequence[EmbeddingBagConfig],
    *,
    bounds_check: BoundsCheck = "warning",
    hash: bool = False,
) -> torch.Tensor:
    """Look up every feature of `tables` in `weights` and pool it: `[batch, sum(D)]` in table order. Forward only.

    weights: one `[num_embeddings, embedding_dim]` per table, contiguous, fp32, fp16 or bf16 (accumulated in fp32), on one device.
    features: a KeyedJaggedTensor (ours or TorchRec's), or `(values, offsets[, per_sample_weights])` with one block per feature in
        table order; dtypes and pooling as in `embedding_all_to_all`.
    tables: `weft.EmbeddingBagConfig` or TorchRec's, all of one dtype.
    bounds_check, hash: as in `embedding_all_to_all`; "fatal" is a `ValueError` here.

    Returns the pooled vectors in the tables' dtype, in ordinary memory; on GPUs valid in stream order.

    Memory: the result.

    Raises `ValueError` for bad arguments, and `TypeError` for features of another type.
    """
    if torch.is_grad_enabled() and any(getattr(weight, "requires_grad", False) for weight in weights):
        raise ValueError(
            "embedding_pool has no backward yet, and a weight requires a gradient: call it under torch.no_grad(), or "
            "weight.requires_grad_(False)"
        )
    jagged = as_jagged(features)
    plan = _plan(tuple(EmbeddingBagConfig.of(table) for table in tables), bounds_check, hash)
    checked = check_jagged(jagged, plan.sharding, 0, None, weights)
    check_contents(jagged, plan.sharding, 0, checked, plan.options)
    shape = (checked.global_batch, plan.sharding.total_dim)
    out = torch.empty(shape, dtype=plan.sharding.dtype, device=jagged.values.device)
    warn = pool_alone(plan, list(weights), jagged, checked, out)
    if warn is not None:
        warn()
    return out


@lru_cache(maxsize=64)
def _plan(tables: tuple[EmbeddingBagConfig, ...], bounds_check: BoundsCheck, hash: bool) -> EmbeddingPlan:
    sharding = EmbeddingSharding(tables, (0,) * len(tables), 1)
    return EmbeddingPlan(sharding, EmbeddingOptions("direct", bounds_check=bounds_check, hash=hash))
