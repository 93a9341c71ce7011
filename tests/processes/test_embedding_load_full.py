"""`load_full_weights` keeps the copies of data-parallel tables equal: ranks load together, or none does."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import own_group, told, waits_end_after

import weft
from weft.embedding import DataParallel, EmbeddingBagConfig, RowWise
from weft.launch import Pool

CLASSES = ["ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"]
TABLES = [EmbeddingBagConfig(6, 4, "copied", ["f"]), EmbeddingBagConfig(6, 4, "divided", ["g"])]


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.num_embeddings, t.embedding_dim, generator=generator) for t in TABLES}


def made(group: dist.ProcessGroup, name: str, deadline_s: float = 20.0) -> Any:
    placement = {"copied": DataParallel(), "divided": RowWise()}
    return getattr(weft.nn, name)(TABLES, group=group, placement=placement, deadline_s=deadline_s)


def loaded(module: Any, weights: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Load `weights`. Return the error, and the state of the tables afterwards."""
    before = copy.deepcopy(module.state_dict())
    error = told(lambda: module.load_full_weights(weights))
    if all(torch.equal(before[name], now) for name, now in module.state_dict().items()):
        return error, "as before"
    full = weights_of(1)
    for part, weight in module.parts():
        rows = slice(part.row, part.row + part.rows)
        assert torch.equal(weight, full[TABLES[part.table].name][rows, part.column : part.column + part.columns])
    return error, "loaded"


def loads(group: dist.ProcessGroup, name: str) -> list[tuple[str, str]]:
    module, other = made(group, name), group.rank() == 1
    found = [loaded(module, weights_of(2) if other else weights_of(1))]
    found.append(loaded(module, {"copied": weights_of(1)["copied"]} if other else weights_of(1)))
    found.append(loaded(module, {**weights_of(1), "divided": weights_of(1)["divided"].clone()}))
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_ranks_load_equal_values_or_none(pool: Pool, name: str) -> None:
    for differ, refused, right in pool.run(loads, name, ranks=2, timeout_s=60):
        assert differ == (
            "DisagreementError: ranks 0 and 1 load different values into data-parallel table 'copied': pass the same "
            "weights on all ranks",
            "as before",
        )
        assert refused[0].startswith(
            "RefusedError: weights could not be loaded: rank 1: weights has copied, but not table 'divided' of rank 1"
        )
        assert refused[1] == "as before"
        assert right == ("nothing", "loaded")


def loads_alone(group: dist.ProcessGroup, name: str) -> tuple[str, str]:
    module = made(own_group(group), name)
    if group.rank() == 1:
        time.sleep(2.5)
        return "nothing", "as before"
    with waits_end_after(1.0):
        return loaded(module, weights_of(1))


@pytest.mark.parametrize("name", CLASSES)
def test_a_rank_that_loads_alone_raises(pool: Pool, name: str) -> None:
    (error, state), _ = pool.run(loads_alone, name, ranks=2, timeout_s=60)
    assert error.startswith("DeadlineError: ")
    assert "loading weights of data-parallel tables" in error
    assert "rank 1" in error
    assert state == "as before"
