"""`ShardedEmbeddingBagCollection` with column-wise, row-wise and data-parallel tables, on CPU processes.

The reference is the same tables in one process in float64. Then bits, initial values, uses with other modules, and
gradients that are not finite. `test_embedding_partition_refused.py` has the refusals.
"""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.embedding_partition import (
    KEYS,
    TABLES,
    assert_equal_bits,
    batch,
    check,
    full_weights,
    named_parts,
    placements,
    tables_of,
    train,
    whole,
)
from support.on_ranks import told
from support.slow import in_turn, mostly
from torch import nn

import weft
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.embedding.partition import TablePart
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, embedding_table, partitioned_embedding

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # the default of torch.optim.Adagrad


@pytest.mark.parametrize(("name", "world"), in_turn(placements(1), [1, 3, 2, 4], each=2))
def test_tables_learn_as_in_one_process(pool: Pool, name: str, world: int) -> None:
    optimizer = weft.Adam(lr=0.05, weight_decay=0.01) if world % 2 else weft.Adagrad(lr=0.1)
    check(pool, world, placements(world)[name], optimizer, is_weighted=world == 2)


@pytest.mark.parametrize("name", mostly(placements(1), "rows", "columns", "mixed"))
def test_gradients_for_an_optimizer_of_torch(pool: Pool, name: str) -> None:
    for sparse in (False, True):
        check(pool, 3, placements(3)[name], None, sparse=sparse, torchs=True, gradients="sum")


def test_replicated_tables_of_an_optimizer_of_torch(pool: Pool) -> None:
    """The optimizer in backward updates the tables that are not replicated, by the same rule."""
    copied = DataParallel(fused=False)
    for world, others in ((3, RowWise()), (1, 0), (2, copied)):
        placement = {"users": copied, "items": others, "pairs": copied, "more": others}
        check(pool, world, placement, weft.SGD(lr=0.1), torchs=True)


@pytest.mark.parametrize("name", ["rows", "mixed"])
def test_hashed_ids_and_halves_of_a_batch(pool: Pool, name: str) -> None:
    check(pool, 2, placements(2)[name], weft.SGD(lr=0.1), hash=True, samples=12)
    check(pool, 3, placements(3)[name], weft.Adam(lr=0.1), samples=12, accumulates=True, steps=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rows", "replicated", "mixed"])
def test_16_bit_tables(pool: Pool, name: str, dtype: torch.dtype) -> None:
    """Partial vectors of a row-wise table are rounded before they are sent, and a row is rounded once per update."""
    check(pool, 3, placements(3)[name], weft.SGD(lr=0.1), dtype, 1, tolerance=4 * torch.finfo(dtype).eps)


SHARDINGS = st.sampled_from(["columns", "rows", "replicated", "rank"])


@settings(max_examples=12)
@given(data=st.data())
def test_any_shardings_and_bags(pool: Pool, data: Any) -> None:
    world = data.draw(st.integers(1, 4))
    ranks = st.integers(0, world - 1)
    placement: dict[str, Any] = {}
    for table in TABLES[torch.float32]:
        match data.draw(SHARDINGS):
            case "columns":
                placement[table.name] = ColumnWise(tuple(data.draw(st.lists(ranks, min_size=1, max_size=4))))
            case "rows":
                placement[table.name] = RowWise(tuple(data.draw(st.lists(ranks, min_size=1, unique=True))))
            case "replicated":
                placement[table.name] = DataParallel()
            case _:
                placement[table.name] = data.draw(ranks)
    if all(isinstance(rank, int) for rank in placement.values()):  # a module of whole tables has no parts to compare
        placement[table.name] = DataParallel()
    optimizer = data.draw(st.sampled_from([weft.SGD(lr=0.1), weft.Adagrad(lr=0.1, clip_value=0.3), None]))
    samples = data.draw(st.sampled_from([0, 1, 7, 16]))
    check(
        pool, world, placement, optimizer, steps=2, samples=samples, is_weighted=data.draw(st.booleans()),
        hash=data.draw(st.booleans()), **({} if optimizer else {"torchs": True}),
    )  # fmt: skip


# --- bits ---


@pytest.mark.parametrize("name", ["rows", "mixed"])
def test_equal_inputs_give_equal_bits(pool: Pool, name: str) -> None:
    options = {"optimizer": weft.RowwiseAdagrad(lr=0.1)}
    call = placements(3)[name], torch.float32, 2, 13, options
    assert_equal_bits(pool.run(_delayed, delay_s, *call, ranks=3) for delay_s in (0, 0.02, 0.02))


def _delayed(group: dist.ProcessGroup, delay_s: float, *call: Any) -> list[Any]:
    """Train with random delays of ranks before collectives."""
    before = partitioned_embedding.together
    rng = random.Random(group.rank())

    def late(*arguments: Any) -> Any:
        time.sleep(rng.random() * delay_s)
        return before(*arguments)

    partitioned_embedding.together = late  # type: ignore[assignment]
    try:
        return train(group, *call)
    finally:
        partitioned_embedding.together = before


def test_parts_of_columns_have_the_bits_of_whole_tables(pool: Pool) -> None:
    """Columns do not interact. Rows of a row-wise table are summed in the order of samples."""
    found = []
    whole_tables = {"users": 0, "items": RowWise((0,)), "pairs": 0, "more": 0}
    for world, placement in ((1, whole_tables), (2, placements(2)["columns"]), (3, placements(3)["columns"])):
        options = {"optimizer": weft.Adam(lr=0.1), "gradients": "sum"}
        per_rank = pool.run(train, placement, torch.float32, 2, 12, options, ranks=world)
        found.append(whole([parts for parts, _ in per_rank]))
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in ("users", "pairs", "more"))


def first_values(group: dist.ProcessGroup, placement: Any, block: int) -> list[Any]:
    before, embedding_table.BLOCK_ELEMENTS = embedding_table.BLOCK_ELEMENTS, block
    try:
        torch.manual_seed(5 if group.rank() == 0 else 6)
        tables = [*tables_of()[:3], EmbeddingBagConfig(50, 8, "more", ("i",), init_fn=nn.init.normal_)]
        module = ShardedEmbeddingBagCollection(tables, group=group, placement=placement)
        after = float(torch.rand(()))
    finally:
        embedding_table.BLOCK_ELEMENTS = before
    state = module.state_dict()
    if not hasattr(module, "parts"):
        own = module.sharding.local_tables(group.rank())
        of_tables = [TablePart(n, 0, 0, tables[n].num_embeddings, 0, tables[n].embedding_dim) for n in own]
        parts = named_parts(list(zip(of_tables, module.parameters(), strict=True)), tables)
    else:
        parts = named_parts(module.parts(), tables)
    assert len(state) == len(parts)
    module.reset_parameters()
    return [parts, after]


@pytest.mark.parametrize("block", [1 << 26, 60])
def test_initial_values_do_not_depend_on_the_plan(pool: Pool, block: int) -> None:
    """The next random number of the first rank must not depend on the plan either."""
    found, drawn = [], set()
    for world, placement in (
        (1, None),
        (2, placements(2)["rows"]),
        (3, placements(3)["columns"]),
        (3, placements(3)["mixed"]),
    ):
        per_rank = pool.run(first_values, placement, block, ranks=world)
        found.append(whole([parts for parts, _ in per_rank]))
        drawn.add(per_rank[0][1])
    assert len(drawn) == 1
    for other in found[1:]:
        assert all(torch.equal(other[name], weight) for name, weight in found[0].items())
    rows = found[0]["users"]
    assert len(rows.unique(dim=0)) == len(rows)


# --- uses with other modules ---


def handled(group: dist.ProcessGroup) -> dict[str, Any]:
    tables = TABLES[torch.float32]
    module = ShardedEmbeddingBagCollection(
        tables, group=group, placement=placements(2)["mixed"], optimizer=weft.Adagrad(lr=0.1), deadline_s=30.0
    )
    features, upstream = batch(0, 8, group.rank(), 2)
    names = list(module.state_dict())
    assert isinstance(module, ShardedEmbeddingBagCollection)
    assert [t.name for t in module.embedding_bag_configs()] == [t.name for t in tables]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(module.fused_optimizer, 0.5)
    module(features).values().backward(upstream)
    module.fused_optimizer.step()
    scheduler.step()
    copied = copy.deepcopy(module)
    saved = copy.deepcopy(module.fused_optimizer.state_dict())
    for one in (module, copied):
        one(features).values().backward(upstream)
    same = all(
        torch.equal(one, two)
        for one, two in zip(module.state_dict().values(), copied.state_dict().values(), strict=True)
    )
    lr, step = (
        module.fused_optimizer.param_groups[0]["lr"],
        module.fused_optimizer.state_dict()["param_groups"][0]["step"],
    )
    module.fused_optimizer.load_state_dict(saved)
    restored = module.fused_optimizer.state_dict()["param_groups"][0]["step"]
    before = copy.deepcopy(module.state_dict())
    module.requires_grad_(False)
    frozen = module(features).values().requires_grad
    with torch.no_grad():
        module.requires_grad_(True)(features)
    unchanged = all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    half = module.bfloat16()(features)
    dtype, keys = half.values().dtype, half.keys()
    del half
    module.close()
    return {
        "names": names, "copy": same, "lr": lr, "step": step, "restored": restored, "frozen": frozen, "unchanged": unchanged,
        "dtype": dtype, "keys": keys, "ignored": len(weft.nn.ignore_tables(nn.Sequential(module))),
    }  # fmt: skip


def test_a_module_is_handled_as_others_are(pool: Pool) -> None:
    names: list[str] = []
    for found in pool.run(handled, ranks=2, timeout_s=60):
        names += found["names"]
        assert found["copy"]
        assert (found["lr"], found["step"], found["restored"]) == (pytest.approx(0.05), 2, 1)
        assert not found["frozen"]
        assert found["unchanged"]
        assert found["dtype"] == torch.bfloat16
        assert found["keys"] == ["u@users", "friend", "i@items", "i@pairs", "u@pairs", "i@more"]
        assert found["ignored"] == len(found["names"])
    assert sorted(names) == sorted(
        f"embedding_bags.{name}.weight"
        for name in ("users[0:15]", "users[15:30]", "items[:, 0:6]", "items[:, 6:12]", "pairs", "pairs", "more")
    )


def per_sample(group: dist.ProcessGroup, placement: Any) -> torch.Tensor:
    module = ShardedEmbeddingBagCollection(
        TABLES[torch.float32],
        group=group,
        placement=placement,
        is_weighted=True,
        optimizer=weft.SGD(lr=0.1),
        gradients="sum",
    )
    module.load_full_weights(full_weights(TABLES[torch.float32]))
    features, upstream = batch(3, 9, group.rank(), group.size())
    weights = features.weights().clone().requires_grad_()
    features = KeyedJaggedTensor(KEYS, features.values(), weights, lengths=features.lengths())
    module(features).values().backward(upstream)
    assert weights.grad is not None
    return weights.grad


def test_gradients_of_per_sample_weights(pool: Pool) -> None:
    for world in (1, 3):
        wanted = pool.run(per_sample, [0, 0, 0, 0], ranks=world)
        for name in placements(1):
            found = pool.run(per_sample, placements(world)[name], ranks=world)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def nonfinite(group: dist.ProcessGroup, placement: Any, how: str, bad: float) -> tuple[str, list[bool]]:
    optimizer = weft.RowwiseAdagrad(lr=0.1, nonfinite=how)  # type: ignore[arg-type]
    tables = TABLES[torch.float32]
    module = ShardedEmbeddingBagCollection(
        tables, group=group, placement=placement, optimizer=optimizer, deadline_s=30.0
    )
    features, upstream = batch(0, 8, group.rank(), 2)
    before = copy.deepcopy(module.state_dict())
    if group.rank() == 1:
        upstream[:, -8:] = bad
    error = told(lambda: module(features).values().backward(upstream))
    now = module.state_dict()
    return error, [torch.equal(before[name], now[name]) for name in now] + [
        bool(v.isfinite().all()) for v in now.values()
    ]


@pytest.mark.parametrize("name", ["mixed", "replicated"])
def test_gradients_that_are_not_finite(pool: Pool, name: str) -> None:
    for error, same in pool.run(nonfinite, placements(2)[name], "raise", torch.inf, ranks=2, timeout_s=60):
        assert "RefusedError" in error
        assert "table 'more'" in error or (name == "mixed" and "sharded tables" in error)
        assert all(same), "something was updated"
    for error, same in pool.run(nonfinite, placements(2)[name], "skip", torch.nan, ranks=2, timeout_s=60):
        assert error == "nothing"
        half = len(same) // 2
        assert not all(same[:half])
        assert all(same[half:])
