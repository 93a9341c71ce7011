"""`weft.embedding_pool`: pool all tables of one device in one kernel, into an ordinary tensor.

Use it for tables that are not sharded. It is the local half of `embedding_all_to_all`: benchmarks compare that operator
with `embedding_pool` followed by NCCL's all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from weft.arguments import listed
from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, as_jagged
from weft.embedding.check import check_contents, check_jagged
from weft.embedding.options import BoundsCheck, EmbeddingOptions
from weft.embedding.plan import EmbeddingPlan
from weft.embedding.tables import listed_tables
from weft.runtime.embedding_unfused import pool_alone


def embedding_pool(
    weights: Sequence[torch.Tensor],
    features: Any,
    tables: Sequence[EmbeddingBagConfig],
    *,
    bounds_check: BoundsCheck = "warning",
    hash: bool = False,
) -> torch.Tensor:
    """Look up every feature of `tables` in `weights`, and pool each bag into one vector. Not differentiable.

    weights: one `[num_embeddings, embedding_dim]` tensor per table, contiguous, in fp32, fp16 or bf16, on one device.
        Sums are in fp32.
    features: a KeyedJaggedTensor (weft's or TorchRec's), or `(values, offsets[, per_sample_weights])` with one block
        per feature in table order. Dtypes and pooling are as in `embedding_all_to_all`.
    tables: a list of `weft.EmbeddingBagConfig` or of TorchRec's configurations, all with one dtype.
    bounds_check, hash: as in `embedding_all_to_all`, except that "fatal" raises `ValueError`.

    Returns `[batch, sum(D)]` in the tables' dtype, with columns in table order. On GPUs it is valid in stream order.

    Memory: the result.

    Raises `ValueError` for bad arguments, and `TypeError` for features of another type.
    """
    weights = listed("weights", weights)
    if torch.is_grad_enabled() and any(getattr(weight, "requires_grad", False) for weight in weights):
        raise ValueError(
            "embedding_pool has no backward yet, but a weight requires a gradient: call it under torch.no_grad(), or call "
            "weight.requires_grad_(False)"
        )
    jagged = as_jagged(features)
    options = EmbeddingOptions.of("direct", "remote_first", None, bounds_check, hash)
    plan = _plan(tuple(EmbeddingBagConfig.of(table) for table in listed_tables(tables)), options)
    checked = check_jagged(jagged, plan.sharding, 0, None, weights)
    check_contents(jagged, plan.sharding, 0, checked, plan.options)
    shape = (checked.global_batch, plan.sharding.total_dim)
    out = torch.empty(shape, dtype=plan.sharding.dtype, device=jagged.values.device)
    warn = pool_alone(plan, list(weights), jagged, checked, out)
    if warn is not None:
        warn()
    return out


@lru_cache(maxsize=64)
def _plan(tables: tuple[EmbeddingBagConfig, ...], options: EmbeddingOptions) -> EmbeddingPlan:
    return EmbeddingPlan(EmbeddingSharding(tables, (0,) * len(tables), 1), options)
