"""Bad placements, bad input and ranks that differ: modules with sharded or data-parallel tables raise on every rank."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.embedding_partition import (
    KEYS,
    TABLES,
    batch,
    placements,
)
from support.on_ranks import error_of, told

import weft
from weft import symm
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection


def refused(group: dist.ProcessGroup, placement: Any, options: dict[str, Any]) -> tuple[str, str]:
    return error_of(
        lambda: ShardedEmbeddingBagCollection(
            TABLES[torch.float32], group=group, placement=placement, deadline_s=30.0, **options
        )
    )


@pytest.mark.parametrize(
    ("placement", "options", "text"),
    [
        ([0, 0, 0, RowWise((0, 5))], {}, "table 'more': RowWise(ranks=(0, 5)) names rank 5: ranks are 0 to 1"),
        ([0, 0, 0, RowWise((1, 1))], {}, "names rank 1 twice"),
        ([0, 0, 0, ColumnWise((0, 1), (3, 4))], {}, "parts of [3, 4] columns on 2 ranks: give each rank"),
        ([0, 0, 0, ColumnWise(())], {}, "has no ranks"),
        ([0, 0, "a", RowWise()], {}, "pass a rank, TableWise, ColumnWise, RowWise or DataParallel"),
        ({"users": RowWise()}, {}, "placement lacks table 'items'"),
        ([0, 0, 0, RowWise()], {"input": "global_batch"}, "pass input='local_batch'"),
        ([0, 0, 0, DataParallel()], {"optimizer": weft.SGD(lr=0.1, clip_norm=1.0)}, "use clip_value, another sharding, or"),
        ([0, 0, 0, DataParallel()], {"input": "batch"}, "input='batch' must be 'local_batch' or 'global_batch'"),
        ([0, 0, 0, RowWise()], {"max_ids": 0}, "max_ids=0 must be at least 1"),
        ([0, 0, 0, RowWise()], {"max_ids": 5.0}, "max_ids=5.0 is a float: pass an integer, at least 1, or None for no limit"),
        ([0, 0, 0, 0], {"batch_size": True, "max_ids": 5}, "batch_size=True is a bool: pass an integer, at least 1"),
        ([0, 0, 0, 0], {"max_ids": 5, "input": "global_batch"}, "max_ids=5 works only with input='local_batch'"),
        ([0, 0, 0, 0], {"batch_size": 4}, "batch_size=4 works only with max_ids"),
        ([0, 0, 0, 0], {"batch_size": 0, "max_ids": 5}, "batch_size=0 must be at least 1"),
        ([0, 0, 0, RowWise()], {"batch_size": 4, "max_ids": 5}, "batch_size supports only whole tables"),
        ([0, 0, 0, RowWise()], {"output_dtype": "bf16"}, "do not pass it, or place each table on one rank"),
        ([0, 0, 0, DataParallel()], {"outputs": 0}, "outputs=0 must be between 1 and 255"),
    ],
)  # fmt: skip
def test_placements_that_cannot_be(pool: Pool, placement: Any, options: dict[str, Any], text: str) -> None:
    for kind, said in pool.run(refused, placement, options, ranks=2):
        assert kind == "RefusedError"
        assert text in said


def too_large(group: dist.ProcessGroup) -> str:
    tables = [EmbeddingBagConfig(2**50, 8, "huge", ("f",)), EmbeddingBagConfig(10, 8, "small", ("g",))]
    error = told(lambda: ShardedEmbeddingBagCollection(tables, group=group, placement=[0, 1], deadline_s=30.0))
    ShardedEmbeddingBagCollection(tables[1:], group=group, deadline_s=30.0)  # the group stays usable
    return error


def test_a_table_too_large_for_its_rank_is_named(pool: Pool) -> None:
    on_owner, elsewhere = pool.run(too_large, ranks=2)
    assert on_owner.startswith(
        "MemoryError: table 'huge' has 32768.0 TiB, which do not fit on cpu: shard it by rows or columns"
    )
    assert elsewhere.startswith("RefusedError: tables could not be filled: rank 0: table 'huge' has 32768.0 TiB")


def bad_input(
    group: dist.ProcessGroup, how: str, name: str, nonfinite: Any, max_ids: int | None
) -> tuple[str, str, bool]:
    module = ShardedEmbeddingBagCollection(
        TABLES[torch.float32], group=group, placement=placements(2)[name], optimizer=weft.SGD(lr=0.1, nonfinite=nonfinite),
        deadline_s=30.0, bounds_check="fatal", max_ids=max_ids,
    )  # fmt: skip
    before = copy.deepcopy(module.state_dict())
    features, upstream = batch(0, 8, group.rank(), 2)
    values, lengths = features.values().clone(), features.lengths().clone()
    if group.rank() == 1 and how == "id":
        values[:] = 33
    if group.rank() == 1 and how == "length":
        lengths[2] = -1
    keys = ("u", "friend", "other") if group.rank() == 1 and how == "key" else KEYS
    given = KeyedJaggedTensor(keys, values, lengths=lengths)
    kind, text = error_of(lambda: module(given).values().backward(upstream))  # forward may have no communication
    module(features).values().backward(upstream)  # the group stays usable
    symm.communicator(group, "cpu").close()
    assert told(lambda: symm.communicator(group, "cpu", deadline_s=30.0).all_gather(None)) == "nothing"
    same = any(torch.equal(before[name], now) for name, now in module.state_dict().items())
    return kind, text, not same


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("id", "position 0: index 33 is not in [0, 30)"),
        ("length", "length -1 is negative|offsets must ascend"),
        ("key", "needs feature 'i', which the input lacks"),
    ],
)
@pytest.mark.parametrize(
    ("name", "nonfinite", "max_ids"),
    [
        ("mixed", "propagate", None),
        ("mixed", "propagate", 1000),
        ("replicated", "propagate", None),
        ("replicated", "raise", None),
    ],
)
def test_bad_input_is_refused_on_every_rank(
    pool: Pool, how: str, text: str, name: str, nonfinite: str, max_ids: int | None
) -> None:
    for _, said, trains in pool.run(bad_input, how, name, nonfinite, max_ids, ranks=2, timeout_s=60):
        assert any(one in said for one in text.split("|")), said
        assert trains


def option_of_one_rank(group: dist.ProcessGroup, name: str, who: int, options: dict[str, Any]) -> str:
    """Construct a module with `options` on rank `who` alone. Return the error."""
    given = options if group.rank() == who else {}
    return told(
        lambda: ShardedEmbeddingBagCollection(
            TABLES[torch.float32], group=group, placement=placements(2)[name], deadline_s=30.0, **given
        )
    )


@pytest.mark.parametrize("options", [{"slice_size": 3}, {"bounds_check": "fatal"}, {"outputs": 3}], ids=str)
def test_an_option_that_one_rank_leaves_out_is_compared(pool: Pool, options: dict[str, Any]) -> None:
    for name, who in itertools.product(("mixed", "replicated"), (0, 1)):
        for error in pool.run(option_of_one_rank, name, who, options, ranks=2):
            assert error.startswith("DisagreementError: ranks 0 and 1 construct different modules")
            assert all(f"{name}=" in error for name in options)


def hashed_on_one_rank(group: dist.ProcessGroup) -> str:
    group = dist.new_group(list(range(group.size())))
    given: dict[str, Any] = {"group": group, "placement": placements(2)["rows"], "deadline_s": 30.0}
    modules = [ShardedEmbeddingBagCollection(TABLES[torch.float32], hash=hash, **given) for hash in (False, True)]
    return told(lambda: modules[group.rank()](batch(0, 8, group.rank(), 2)[0]))


def test_ranks_cannot_hash_ids_of_row_wise_tables_alone(pool: Pool) -> None:
    for error in pool.run(hashed_on_one_rank, ranks=2, timeout_s=60):
        assert error.startswith("DisagreementError")


def skewed(group: dist.ProcessGroup, placement: Any, max_ids: int) -> str:
    tables = [EmbeddingBagConfig(20, 4, "t", ("f",)), EmbeddingBagConfig(20, 4, "other", ("g",))]
    module = ShardedEmbeddingBagCollection(tables, group=group, placement=placement, max_ids=max_ids, deadline_s=30.0)
    ids = torch.cat([torch.full((30,), 13), torch.zeros(3, dtype=torch.int64)])
    features = KeyedJaggedTensor(["f", "g"], ids, lengths=torch.tensor([10] * 3 + [1] * 3))
    error = told(lambda: module(features))
    few = KeyedJaggedTensor(["f", "g"], torch.arange(2), lengths=torch.tensor([1, 1]))
    assert module(few).values().shape == (1, 8)  # the group stays usable
    return error


def test_a_rank_that_would_receive_too_many_ids_is_named(pool: Pool) -> None:
    for placement, totals in (([RowWise(), 0], [6, 60]), ([1, 0], [6, 60])):
        for error in pool.run(skewed, placement, 40, ranks=2):
            assert error.startswith(
                f"RefusedError: rank 1 would receive 60 ids, more than max_ids=40 (ranks would receive {totals})"
            )
        assert pool.run(skewed, placement, 60, ranks=2) == ["nothing"] * 2


def other_rates(group: dist.ProcessGroup) -> tuple[str, str]:
    group = dist.new_group(list(range(group.size())))
    module = ShardedEmbeddingBagCollection(
        TABLES[torch.float32],
        group=group,
        placement=placements(2)["replicated"],
        optimizer=weft.SGD(lr=0.1),
        deadline_s=30.0,
    )
    features, upstream = batch(0, 8, group.rank(), 2)
    if group.rank() == 1:
        module.fused_optimizer.param_groups[0]["lr"] = 0.2
    y = module(features).values()
    return error_of(lambda: y.backward(upstream))


def other_rates_at_the_end(group: dist.ProcessGroup, name: str) -> tuple[str, bool]:
    group = dist.new_group(list(range(group.size())))
    tables, optimizer = TABLES[torch.float32], weft.SGD(lr=0.1)
    module = ShardedEmbeddingBagCollection(
        tables, group=group, placement=placements(2)[name], optimizer=optimizer, deadline_s=30.0
    )
    before = copy.deepcopy(module.state_dict())
    features, upstream = batch(0, 8, group.rank(), 2)

    def step() -> None:
        with module.accumulate():
            module(features).values().backward(upstream)
            if group.rank() == 1:
                module.fused_optimizer.param_groups[0]["lr"] = 0.2

    error = told(step)
    return error, all(torch.equal(before[name], now) for name, now in module.state_dict().items())


@pytest.mark.parametrize("name", ["mixed", "replicated", "rows"])
def test_a_learning_rate_that_differs_at_the_end_of_accumulate_is_found(pool: Pool, name: str) -> None:
    for error, same in pool.run(other_rates_at_the_end, name, ranks=2, timeout_s=60):
        assert error.startswith("DisagreementError")
        assert "learning rate 0.2" in error
        assert same


def skips_a_backward(group: dist.ProcessGroup, rows: bool) -> tuple[str, bool]:
    """Rank 1 omits the backward of its first batch. Return the error of the next backward, and whether no rank has updated
    the tables.
    """
    group = dist.new_group(list(range(group.size())))
    made: Any = ShardedEmbeddingCollection if rows else ShardedEmbeddingBagCollection
    tables = [EmbeddingBagConfig(20, 4, name, (name,)) for name in ("t", "u")]
    module = made(tables, group=group, placement=[DataParallel()] * 2, optimizer=weft.SGD(lr=0.1), deadline_s=30.0)
    before = copy.deepcopy(module.state_dict())
    features = KeyedJaggedTensor(["t", "u"], torch.arange(6), lengths=torch.tensor([1, 2, 0, 3]))

    def loss() -> torch.Tensor:
        found = module(features)
        return sum(one.values().sum() for one in found.values()) if rows else found.values().sum()

    losses = [loss(), loss()] if group.rank() == 1 else [loss()]
    error = told(losses[-1].backward)
    return error, all(torch.equal(before[name], now) for name, now in module.state_dict().items())


@pytest.mark.parametrize("rows", [False, True], ids=["pooled", "rows"])
def test_a_rank_that_omits_a_backward_of_data_parallel_tables_is_found(pool: Pool, rows: bool) -> None:
    for error, same in pool.run(skips_a_backward, rows, ranks=2, timeout_s=60):
        assert error.startswith("DisagreementError")
        assert "backward of call 1 of this module with gradients" in error
        assert "backward of call 2 of this module with gradients" in error
        assert same


def accumulates_alone(group: dist.ProcessGroup, name: str, rows: bool) -> tuple[str, bool]:
    """Call backward in `accumulate()` on rank 1 alone. Return the error, and whether this rank has updated no table."""
    group = dist.new_group(list(range(group.size())))
    made: Any = ShardedEmbeddingCollection if rows else ShardedEmbeddingBagCollection
    tables, shardings = [EmbeddingBagConfig(20, 4, "t", ("t",))], {"replicated": DataParallel(), "rows": RowWise()}
    module = made(tables, group=group, placement=[shardings[name]], optimizer=weft.SGD(lr=0.1), deadline_s=5.0)
    before = copy.deepcopy(module.state_dict())
    out = module(KeyedJaggedTensor(["t"], torch.arange(6), lengths=torch.tensor([1, 5])))
    loss = out["t"].values().sum() if rows else out.values().sum()

    def backward() -> None:
        with module.accumulate() if group.rank() == 1 else contextlib.nullcontext():
            loss.backward()

    error = told(backward)
    return error, all(torch.equal(before[name], now) for name, now in module.state_dict().items())


@pytest.mark.parametrize(
    ("name", "rows"), [("replicated", False), ("replicated", True), ("rows", True), ("rows", False)]
)
def test_a_rank_that_accumulates_alone_is_found(pool: Pool, name: str, rows: bool) -> None:
    for error, same in pool.run(accumulates_alone, name, rows, ranks=2, timeout_s=60):
        assert error.startswith("DisagreementError")
        assert "accumulate" in error
        assert same


def test_learning_rates_of_data_parallel_tables_are_compared(pool: Pool) -> None:
    for kind, text in pool.run(other_rates, ranks=2, timeout_s=60):
        assert kind == "DisagreementError", text
        assert "learning rate 0.2" in text
