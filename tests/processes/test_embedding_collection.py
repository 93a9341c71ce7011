"""`ShardedEmbeddingCollection` on CPU processes: rows and updates against torch in float64, bits, bounds, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.embedding_collection import KEYS, batch, check, columns, placements, tables_of, train
from support.embedding_partition import assert_equal_bits, full_weights, named_parts, whole
from support.on_ranks import assert_errors, error_of, told
from support.slow import in_turn
from torch import nn

import weft
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingCollection

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # the default of torch.optim.Adagrad


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize(("name", "world"), in_turn(placements(1), [1, 2, 3, 4], each=2))
def test_rows_and_updates(pool: Pool, name: str, world: int, dedup: bool) -> None:
    optimizer = weft.Adam(lr=0.05, weight_decay=0.01) if world % 2 else weft.RowwiseAdagrad(lr=0.1)
    check(pool, world, placements(world)[name], optimizer, dedup=dedup)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"dedup": True, "gradients": "sum"}], ids=str)
def test_gradients_for_an_optimizer_of_torch(pool: Pool, options: dict[str, Any]) -> None:
    for name in ("mixed", "mixed too"):
        check(pool, 3, placements(3)[name], None, torchs=True, **options)


def test_replicated_tables_of_an_optimizer_of_torch(pool: Pool) -> None:
    """The optimizer in backward updates the tables that are not replicated, by the same rule."""
    mixed = {"users": DataParallel(fused=False), "items": RowWise(), "pairs": DataParallel(fused=False)}
    check(pool, 3, mixed, weft.SGD(lr=0.1), torchs=True)


@pytest.mark.parametrize(
    ("options", "ranks"),
    in_turn(
        [{}, {"dedup": True}, {"hash": True}, {"dedup": True, "accumulates": True}],
        [(1, 2), (2, 2), (3, 2), (2, 3)],
        each=2,
    ),
    ids=str,
)
def test_tables_cut_by_columns(pool: Pool, ranks: tuple[int, int], options: dict[str, Any]) -> None:
    world, parts = ranks
    optimizer = weft.Adam(lr=0.05, weight_decay=0.01) if world % 2 else weft.Adagrad(lr=0.1, clip_norm=1.0)
    check(pool, world, columns(world, parts), optimizer, **options)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_tables_cut_by_columns(pool: Pool, sparse: bool) -> None:
    check(pool, 3, columns(3, 3), None, torchs=True, sparse=sparse)


@settings(max_examples=10)
@given(data=st.data())
def test_any_shardings(pool: Pool, data: Any) -> None:
    world = data.draw(st.integers(1, 4))
    ranks = st.integers(0, world - 1)
    rows = st.builds(lambda ranks: RowWise(tuple(ranks)), st.lists(ranks, min_size=1, unique=True))
    kinds = st.one_of(ranks, rows, st.just(DataParallel()))
    placement = {name: data.draw(kinds) for name in ("users", "items", "pairs")}
    optimizers = [weft.SGD(lr=0.1), weft.Adagrad(lr=0.1, clip_value=0.3)]
    if DataParallel() not in placement.values():
        optimizers.append(weft.SGD(lr=0.1, clip_norm=1.0))
    options = {name: data.draw(st.booleans()) for name in ("dedup", "hash")}
    check(
        pool, world, placement, data.draw(st.sampled_from(optimizers)), accumulates=data.draw(st.booleans()), **options
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dedup", [False, True])
def test_16_bit_tables(pool: Pool, dtype: torch.dtype, dedup: bool) -> None:
    for name in ("rows", "mixed too"):
        check(
            pool, 2, placements(2)[name], weft.SGD(lr=0.1), dtype, 1, tolerance=3 * torch.finfo(dtype).eps, dedup=dedup
        )


@pytest.mark.parametrize("dedup", [False, True])
def test_equal_inputs_give_equal_bits(pool: Pool, dedup: bool) -> None:
    options = {"optimizer": weft.RowwiseAdagrad(lr=0.1), "dedup": dedup}
    runs = [pool.run(train, placements(3)["mixed too"], torch.float32, 2, options, ranks=3) for _ in range(3)]
    assert_equal_bits(runs)


def one_feature(group: dist.ProcessGroup, placement: Any) -> list[Any]:
    """Train one table with repeated ids, on a global batch of 12 samples."""
    module = ShardedEmbeddingCollection(
        [EmbeddingBagConfig(9, 4, "t", ("f",))],
        group=group,
        placement=placement,
        optimizer=weft.Adagrad(lr=0.1),
        gradients="sum",
    )
    generator = torch.Generator().manual_seed(1)
    module.load_full_weights({"t": torch.randn(9, 4, generator=generator)})
    values, upstream = torch.randint(0, 9, (120,), generator=generator), torch.randn(120, 4, generator=generator)
    mine = slice(group.rank() * 120 // group.size(), (group.rank() + 1) * 120 // group.size())
    features = KeyedJaggedTensor(["f"], values[mine], lengths=torch.full((12 // group.size(),), 10))
    module(features)["f"].values().backward(upstream[mine])
    return [(part, "t", (9, 4), weight.detach().clone()) for part, weight in module.parts()]


def test_bits_of_tables_with_one_feature_do_not_depend_on_ranks(pool: Pool) -> None:
    first = whole(pool.run(one_feature, [0], ranks=1))["t"]
    for world, placement in ((2, [1]), (2, [RowWise()]), (3, [RowWise((2, 0))])):
        assert torch.equal(whole(pool.run(one_feature, placement, ranks=world))["t"], first)


def initial(group: dist.ProcessGroup, placement: Any) -> list[Any]:
    torch.manual_seed(4 + group.rank())
    module = ShardedEmbeddingCollection(tables_of(), group=group, placement=placement)
    before = copy.deepcopy(module.state_dict())
    module.reset_parameters()
    assert all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    tables = tables_of()
    return [
        (part, tables[part.table].name, (tables[part.table].num_embeddings, 6), weight.detach())
        for part, weight in module.parts()
    ]


def test_initial_values_do_not_depend_on_the_plan(pool: Pool) -> None:
    first = whole(pool.run(initial, None, ranks=1))
    for placement in (placements(3)["rows"], placements(3)["mixed"], placements(3)["mixed too"], columns(3, 2)):
        found = whole(pool.run(initial, placement, ranks=3))
        assert all(torch.equal(found[table], weight) for table, weight in first.items())


def handled(group: dist.ProcessGroup) -> dict[str, Any]:
    tables = tables_of()
    module = ShardedEmbeddingCollection(
        tables, group=group, placement=placements(2)["rows"], optimizer=weft.Adam(lr=0.1)
    )
    module.load_full_weights(full_weights(tables))
    features, upstream = batch(0, group.rank(), 2, False)

    def step(module: ShardedEmbeddingCollection) -> None:
        torch.autograd.backward([one.values() for one in module(features).values()], upstream)

    step(module)
    copied = copy.deepcopy(module)
    saved = copy.deepcopy(module.fused_optimizer.state_dict())
    for one in (module, copied):
        step(one)
    pairs = zip(module.state_dict().values(), copied.state_dict().values(), strict=True)
    same = all(torch.equal(one, two) for one, two in pairs)
    module.fused_optimizer.load_state_dict(saved)
    found = {"copy": same, "names": list(module.state_dict()), "step": int(module.fused_optimizer._update.step)}
    before = copy.deepcopy(module.state_dict())
    found["frozen"] = [one.values().requires_grad for one in module.requires_grad_(False)(features).values()]
    with torch.no_grad():
        module.requires_grad_(True)(features)
    values = module(features)["friend"].values()
    found["unchanged"] = all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    found["ignored"] = len(weft.nn.ignore_tables(nn.Sequential(module)))
    values.sum().backward(retain_graph=True)
    found["twice"] = told(lambda: values.sum().backward())
    weighted = KeyedJaggedTensor(
        KEYS, features.values(), torch.rand(len(features.values())), lengths=features.lengths()
    )
    found["weights"] = torch.equal(module(weighted)["friend"].weights_or_none(), weighted["friend"].weights_or_none())
    return found


def test_a_module_is_handled_as_others_are(pool: Pool) -> None:
    for found in pool.run(handled, ranks=2, timeout_s=60):
        assert found["copy"]
        assert found["unchanged"]
        assert found["weights"]
        assert found["step"] == 1
        assert not any(found["frozen"])
        assert len(found["names"]) == found["ignored"] == 3
        assert "second backward of the same call" in found["twice"]
    assert found["names"] == [f"embeddings.{name}.weight" for name in ("users[15:30]", "items[11:21]", "pairs[25:50]")]


def memory(group: dist.ProcessGroup, placement: Any) -> list[Any]:
    table = EmbeddingBagConfig(20, 4, "t", ("f",))
    module = ShardedEmbeddingCollection([table], group=group, placement=placement, optimizer=weft.Adam(lr=0.1))
    first = module.memory()
    features = KeyedJaggedTensor(["f"], torch.arange(20), lengths=torch.tensor([15, 5]))
    rows = module(features)["f"].values()
    waiting = module.memory()
    with module.accumulate():
        rows.sum().backward()
        kept = module.memory()
    del rows, features
    return [first, waiting, kept, module.memory()]


@pytest.mark.parametrize("placement", [[RowWise()], [DataParallel()]])
def test_memory_is_counted(pool: Pool, placement: Any) -> None:
    is_copied, ids = isinstance(placement[0], DataParallel), 20
    for first, waiting, kept, after in pool.run(memory, placement, ranks=2, timeout_s=60):
        weight = 4 * 4 * (20 if is_copied else 10)
        assert list(first.tables.values()) == [weight]
        assert list(first.states.values()) == [2 * weight]
        assert first.total == 3 * weight
        assert first.buffers == first.in_flight == first.workspace == first.gradients == 0
        assert waiting.in_flight >= 8 * ids
        # 20 ids are sent and received, with 4 columns each. Sorting takes 20 bytes per id.
        assert waiting.workspace == (0 if is_copied else 4 * 4 * 2 * ids + 20 * ids)
        assert kept.in_flight >= waiting.in_flight + (weight if is_copied else 4 * 4 * ids)
        assert after.in_flight == 0
        assert "[" in str(first) or is_copied


def skewed(group: dist.ProcessGroup, max_ids: int, dedup: bool) -> str:
    table = EmbeddingBagConfig(20, 4, "t", ("f",))
    module = ShardedEmbeddingCollection([table], group=group, placement=[RowWise()], max_ids=max_ids, dedup=dedup)
    features = KeyedJaggedTensor(["f"], torch.full((30,), 13), lengths=torch.full((3,), 10))
    found = told(lambda: module(features))
    other = KeyedJaggedTensor(["f"], torch.arange(20), lengths=torch.tensor([20]))
    assert len(module(other)["f"].values()) == 20  # the group stays usable
    return found


def test_a_rank_that_would_receive_too_many_ids_is_named(pool: Pool) -> None:
    for error in pool.run(skewed, 40, False, ranks=2):
        assert error.startswith(
            "RefusedError: rank 1 would receive 60 ids, more than max_ids=40 (ranks would receive [0, 60])"
        )
    assert pool.run(skewed, 40, True, ranks=2) == ["nothing"] * 2
    assert pool.run(skewed, 60, False, ranks=2) == ["nothing"] * 2


def refused(group: dist.ProcessGroup, options: dict[str, Any]) -> tuple[str, str]:
    tables = options.get("tables", tables_of())
    options = {name: value for name, value in options.items() if name != "tables"}
    return error_of(lambda: ShardedEmbeddingCollection(tables, group=group, deadline_s=30.0, **options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"placement": [0, 0, ColumnWise((0, 1))]}, "parts have 3 and 6 columns, but all parts of"),
        ({"placement": dict.fromkeys(("users", "items", "pairs"), ColumnWise((0, 1), (2, 4)))}, "parts have 2 and 4 columns"),
        ({"placement": [0, 0, DataParallel()], "optimizer": weft.SGD(lr=0.1, clip_norm=1.0)}, "use clip_value, another sharding"),
        ({"placement": [DataParallel(), 0, DataParallel(fused=False)]}, "pass the same value of fused"),
        ({"tables": [EmbeddingBagConfig(3, 4, "a", ("f",)), EmbeddingBagConfig(3, 5, "b", ("f",))]}, "table 'b' has 5 columns"),
        ({"max_ids": 0}, "max_ids=0 must be at least 1"),
        ({"dedup": 1}, "dedup=1 must be True or False"),
        ({"optimizer": weft.SGD(lr=0.1), "sparse": True}, "pass sparse=False, or optimizer=None"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(pool: Pool, options: dict[str, Any], text: str) -> None:
    assert_errors(pool.run(refused, options, ranks=2), "RefusedError", text)


def bad(group: dist.ProcessGroup, how: str, placement: str) -> tuple[str, bool]:
    nonfinite: Any = "propagate" if how == "key" else "raise"
    optimizer = weft.SGD(lr=0.1, nonfinite=nonfinite)
    bounds: Any = "fatal" if how == "id" else "ignore"
    module = ShardedEmbeddingCollection(
        tables_of(),
        group=group,
        placement=placements(2)[placement],
        optimizer=optimizer,
        bounds_check=bounds,
        deadline_s=30.0,
    )
    features, upstream = batch(0, group.rank(), 2, False)
    before = copy.deepcopy(module.state_dict())

    def step(values: torch.Tensor, scale: float = 1.0, keys: Any = KEYS) -> dict[str, Any]:
        found = module(KeyedJaggedTensor(keys, values, lengths=features.lengths()))
        torch.autograd.backward([one.values() for one in found.values()], [one * scale for one in upstream])
        return found  # type: ignore[no-any-return]

    is_bad, values = group.rank() == 1, features.values()
    if how == "zero rows":
        with torch.no_grad():
            found = module(KeyedJaggedTensor(KEYS, values + 1000, lengths=features.lengths()))
        return "", all(not one.values().any() for one in found.values())
    if how == "id":
        error = told(lambda: step(values - 100 * is_bad))
    elif how == "gradient":
        error = told(lambda: step(values, torch.inf if is_bad else 1.0))
    else:
        error = told(lambda: step(values, keys=("u", "friend", "other") if is_bad else KEYS))
    same = all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    step(values)
    return error, same and not all(torch.equal(before[name], now) for name, now in module.state_dict().items())


@pytest.mark.parametrize("placement", ["rows", "replicated", "mixed too"])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("id", "feature 'u', position 0: id -"),
        ("gradient", "rank 1: gradients are infinite or NaN"),
        ("key", "needs feature 'i', which the input lacks"),
        ("zero rows", ""),
    ],
)
def test_bad_input_is_refused_on_every_rank(pool: Pool, how: str, text: str, placement: str) -> None:
    for error, right in pool.run(bad, how, placement, ranks=2, timeout_s=60):
        assert text in error
        assert right


def not_the_same(group: dist.ProcessGroup, placement: str, first: dict[str, Any], other: dict[str, Any]) -> str:
    """Make two collections on all ranks. Rank 1 calls the second one where rank 0 calls the first."""
    group = dist.new_group(list(range(group.size())))
    modules = []
    for changes in (first, other):
        options = {"tables": tables_of(), "optimizer": weft.SGD(lr=0.1), **changes}
        modules.append(
            ShardedEmbeddingCollection(group=group, placement=placements(2)[placement], deadline_s=30.0, **options)
        )
    features, _ = batch(0, group.rank(), 2, False)
    return told(lambda: modules[group.rank()](features))


@pytest.mark.parametrize(
    ("placement", "other", "text"),
    [
        ("rows", {"tables": tables_of(torch.bfloat16)}, "tables is"),
        ("mixed", {"dedup": True}, "dedup is 'False' on rank 0 and 'True' on rank 1"),
        ("whole", {"optimizer": weft.Adam(lr=0.1)}, "optimizer is "),
    ],
    ids=["tables", "dedup", "optimizer"],
)
def test_ranks_cannot_call_different_collections(pool: Pool, placement: str, other: dict[str, Any], text: str) -> None:
    for error in pool.run(not_the_same, placement, {}, other, ranks=2, timeout_s=60):
        assert error.startswith("DisagreementError")
        assert text in error


def half_of_one_rank(group: dist.ProcessGroup) -> str:
    group = dist.new_group(list(range(group.size())))
    module = ShardedEmbeddingCollection(tables_of(), group=group, placement=placements(2)["whole"], deadline_s=30.0)
    features, _ = batch(0, group.rank(), 2, False)
    module(features)
    return told(lambda: (module.half() if group.rank() else module)(features))


def test_a_rank_that_converts_its_tables_alone_is_found(pool: Pool) -> None:
    for error in pool.run(half_of_one_rank, ranks=2, timeout_s=60):
        assert "exchanged is 'torch.float32, (6,) each' on rank 0 and 'torch.float16, (6,) each' on rank 1" in error


def saved_or_loaded(group: dist.ProcessGroup, folder: str, placement: Any, loads: bool) -> list[Any]:
    """Train and save, or load. Return this rank's parts, and the parts of each state."""
    tables = tables_of()
    ec = ShardedEmbeddingCollection(tables, group=group, placement=placement, optimizer=weft.Adam(lr=0.1))
    model = nn.ModuleDict({"ec": ec})
    state = {"model": weft.nn.ModelState(model), "tables": weft.nn.FusedOptimizers(model)}
    if loads:
        dcp.load(state, checkpoint_id=folder, process_group=group, planner=weft.nn.LoadPlanner())
    else:
        features, upstream = batch(0, group.rank(), group.size(), False)
        torch.autograd.backward([one.values() for one in ec(features).values()], upstream)
        dcp.save(state, checkpoint_id=folder, process_group=group)
    parts = [part for part, _ in ec.parts()]
    update: Any = ec._update
    of_states = [[states[name] for states in update.states] for name in update.optimizer.states]
    values = [[weight for _, weight in ec.parts()], *of_states]
    return [named_parts(list(zip(parts, one, strict=True)), tables) for one in values]


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
def test_a_checkpoint_of_another_cut_loads(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(saved_or_loaded, str(tmp_path), columns(2, 3), False, ranks=2)
    wanted = [whole([of_rank[kind] for of_rank in saved]) for kind in range(3)]
    for world, placement in (
        (3, placements(3)["rows"]),
        (1, None),
        (2, columns(2, 2)),
        (2, placements(2)["mixed too"]),
    ):
        found = pool.run(saved_or_loaded, str(tmp_path), placement, True, ranks=world)
        for kind in range(3):
            values = whole([of_rank[kind] for of_rank in found])
            assert all(torch.equal(values[table], value) for table, value in wanted[kind].items()), (world, kind)
