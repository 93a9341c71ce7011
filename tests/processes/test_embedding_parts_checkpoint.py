"""Checkpoints of tables in parts: a checkpoint of one sharding can be loaded into another, bit for bit, including
optimizer states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.embedding_partition import TABLES, batch, named_parts, placements, whole
from support.slow import slow
from torch import nn

import weft
from weft.embedding import ColumnWise, DataParallel, RowWise
from weft.embedding.partition import partition_tables
from weft.launch import Pool


def made(group: dist.ProcessGroup, placement: Any, optimizer: Any) -> nn.Module:
    tables = TABLES[torch.float32]
    ebc = weft.nn.ShardedEmbeddingBagCollection(
        tables, group=group, placement=placement, optimizer=optimizer, deadline_s=30.0
    )
    return nn.ModuleDict({"ebc": ebc, "over": nn.Linear(2, 1)})


def state_of(model: nn.Module) -> dict[str, Any]:
    return {"model": weft.nn.ModelState(model), "tables": weft.nn.FusedOptimizers(model)}


def contents(model: Any) -> list[Any]:
    """Return this rank's parts, the parts of each state, the learning rate, and the number of updates."""
    ebc = model["ebc"]
    if not hasattr(ebc, "parts"):
        own = partition_tables(TABLES[torch.float32], 1, placement=[0] * 4).parts
        numbers = ebc.sharding.local_tables(ebc.rank)
        parts = [(own[n], bag.weight) for n, bag in zip(numbers, ebc.embedding_bags.values(), strict=True)]
    else:
        parts = ebc.parts()
    found = [named_parts(parts, TABLES[torch.float32])]
    for state in ebc._update.optimizer.states:
        states = [one[state] for one in ebc._update.states]
        found.append(
            named_parts([(part, one) for (part, _), one in zip(parts, states, strict=True)], TABLES[torch.float32])
        )
    group = ebc.fused_optimizer.param_groups[0]
    return [found, group["lr"], int(ebc._update.step)]


def saves(group: dist.ProcessGroup, folder: str, placement: Any, optimizer: Any) -> list[Any]:
    model = made(group, placement, optimizer)
    for seed in range(2):
        features, upstream = batch(seed, 12, group.rank(), group.size())
        model["ebc"](features).values().backward(upstream)
    model["ebc"].fused_optimizer.param_groups[0]["lr"] = 0.25
    dcp.save(state_of(model), checkpoint_id=folder, process_group=group)
    return contents(model)


def loads(group: dist.ProcessGroup, folder: str, placement: Any, optimizer: Any) -> list[Any]:
    model = made(group, placement, optimizer)
    dcp.load(state_of(model), checkpoint_id=folder, process_group=group, planner=weft.nn.LoadPlanner())
    return contents(model)


def held(group: dist.ProcessGroup, placement: Any) -> tuple[int, int, int]:
    model: Any = made(group, placement, weft.Adam(lr=0.1))
    ebc = model["ebc"]
    features, upstream = batch(0, 12, group.rank(), group.size())
    with ebc.accumulate():
        pooled = ebc(features).values()
        waiting = ebc.memory().in_flight
        assert waiting >= features.values().nbytes // group.size()
        pooled.backward(upstream)
        del pooled, features
        assert ebc.memory().in_flight > 0  # gradients that wait for the update
    memory = ebc.memory()
    assert "total" in str(memory)
    return sum(memory.tables.values()), sum(memory.states.values()), memory.in_flight


def test_memory_is_that_of_the_parts(pool: Pool) -> None:
    whole_tables = sum(table.nbytes for table in TABLES[torch.float32])
    for name, copies in (("rows", 1), ("columns", 1), ("replicated", 2)):
        found = pool.run(held, placements(2)[name], ranks=2)
        assert sum(tables for tables, _, _ in found) == copies * whole_tables
        assert all((states, waiting) == (2 * tables, 0) for tables, states, waiting in found)


def without_states(group: dist.ProcessGroup) -> dict[str, Any]:
    copied = DataParallel(fused=False)
    model: Any = made(group, {"users": copied, "items": RowWise(), "pairs": 0, "more": copied}, weft.Adam(lr=0.1))
    ebc = model["ebc"]
    bags = {name: bag.weight for name, bag in ebc.embedding_bags.items()}
    state = weft.nn.FusedOptimizers(model).state_dict()["state"]
    found: dict[str, Any] = {
        "parameters": {name for name, weight in bags.items() if weight.requires_grad},
        "bytes": {name for name, size in ebc.memory().states.items() if size == 0},
        "states": {name.split(".")[2] for name in state},
        "optimizer": len(ebc.fused_optimizer.param_groups[0]["params"]) + 2 - len(bags),
    }
    ebc.requires_grad_(False)
    found["frozen"] = [weight.requires_grad for weight in bags.values()]
    features, upstream = batch(0, 12, group.rank(), group.size())
    ebc.requires_grad_(True)(features).values().backward(upstream)
    found["gradients"] = {name for name, weight in bags.items() if weight.grad is not None}
    return found


def test_replicated_tables_without_the_optimizer_have_no_states(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(without_states, ranks=2)):
        assert found["parameters"] == found["bytes"] == found["gradients"] == {"users", "more"}
        assert found["states"] == ({"items", "pairs"} if rank == 0 else {"items"})
        assert found["optimizer"] == 0
        assert not any(found["frozen"])


def load_error(group: dist.ProcessGroup, folder: str, placement: Any, optimizer: Any) -> str:
    model = made(group, placement, optimizer)
    try:
        dcp.load(state_of(model), checkpoint_id=folder, process_group=group, planner=weft.nn.LoadPlanner())
    except BaseException as error:
        return str(error)
    return "nothing"


pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead")


@pytest.mark.parametrize("name", ["rows", "columns", "replicated", slow("whole"), slow("mixed")])
def test_another_sharding_goes_on(pool: Pool, tmp_path: Path, name: str) -> None:
    optimizer = weft.Adam(lr=0.1)
    of = {**placements(2), "whole": [0, 1, 0, 1]}[name]
    saved = pool.run(saves, str(tmp_path), of, optimizer, ranks=2, timeout_s=60)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert "model.ebc.embedding_bags.users.weight" in stored
    assert "tables.state.ebc.embedding_bags.users.weight.users.momentum1" in stored
    assert not [one for one in stored if "[" in one]
    wanted = [whole([of_rank[0][kind] for of_rank in saved]) for kind in range(3)]
    for world, other in (
        (2, [1, 0, 1, 0]),
        (3, placements(3)["mixed"]),
        (3, placements(3)["rows"]),
        (2, placements(2)["columns"]),
    ):
        found = pool.run(loads, str(tmp_path), other, optimizer, ranks=world, timeout_s=60)
        for kind in range(3):
            values = whole([of_rank[0][kind] for of_rank in found])
            assert all(torch.equal(values[table], value) for table, value in wanted[kind].items()), (other, kind)
        assert {(lr, step) for _, lr, step in found} == {(0.25, 2)}


def test_a_rowwise_state_of_columns_fits_the_same_number_of_parts(pool: Pool, tmp_path: Path) -> None:
    optimizer = weft.RowwiseAdagrad(lr=0.1)
    of = {"users": ColumnWise((0, 1)), "items": RowWise(), "pairs": 0, "more": 1}
    pool.run(saves, str(tmp_path), of, optimizer, ranks=2, timeout_s=60)
    assert (
        pool.run(load_error, str(tmp_path), {**of, "users": ColumnWise((1, 1)), "items": 1}, optimizer, ranks=2)
        == ["nothing"] * 2
    )
    for error in pool.run(load_error, str(tmp_path), {**of, "users": 0}, optimizer, ranks=2):
        assert "users.momentum1 has shape [60] in the checkpoint and [30] here" in error
