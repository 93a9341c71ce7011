"""`ShardedEmbeddingBagCollection` with `dedup=True`, on CPU processes: distinct rows travel, and the samples' rank pools them.

The reference is the same tables in one process in float64. Then bits, refusals and errors.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.embedding_partition import assert_equal_bits, batch, check, equal_tables, full_weights, train
from support.on_ranks import told

import weft
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.errors import DisagreementError, RefusedError, WeftError
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

NAMES = ("users", "items", "pairs", "more")
ROWS = dict.fromkeys(NAMES, RowWise())


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_tables_learn_as_in_one_process(pool: Pool, world: int, pooling: str) -> None:
    optimizer = weft.Adam(lr=0.05, weight_decay=0.01) if world % 2 else weft.Adagrad(lr=0.1, clip_norm=1.0)
    check(pool, world, ROWS, optimizer, is_weighted=world == 2, dedup=True, pooling=pooling)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_for_an_optimizer_of_torch(pool: Pool, sparse: bool) -> None:
    check(pool, 3, ROWS, None, sparse=sparse, torchs=True, gradients="sum", dedup=True, pooling="sum")


def test_hashed_ids_and_halves_of_a_batch(pool: Pool) -> None:
    check(pool, 2, ROWS, weft.SGD(lr=0.1), hash=True, samples=12, dedup=True, pooling="sum")
    check(pool, 3, ROWS, weft.Adam(lr=0.1), samples=12, accumulates=True, steps=2, dedup=True, pooling="mean")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tables(pool: Pool, dtype: torch.dtype) -> None:
    """A rank rounds the sum of a row's gradients before it sends the sum, and the owner rounds the row once."""
    tolerance = 4 * torch.finfo(dtype).eps
    check(pool, 3, ROWS, weft.SGD(lr=0.1), dtype, 1, tolerance=tolerance, dedup=True, pooling="sum")


@settings(max_examples=8)
@given(data=st.data())
def test_any_placement_and_bags(pool: Pool, data: Any) -> None:
    world = data.draw(st.integers(1, 4))
    ranks = st.integers(0, world - 1)
    rows = st.builds(RowWise, st.lists(ranks, min_size=1, unique=True).map(tuple))
    placement = {name: data.draw(st.one_of(ranks, rows)) for name in NAMES}
    optimizer = data.draw(st.sampled_from([weft.SGD(lr=0.1), weft.PartialRowwiseAdam(lr=0.1, clip_value=0.3), None]))
    check(
        pool, world, placement, optimizer, steps=2, samples=data.draw(st.sampled_from([0, 1, 7, 16])),
        is_weighted=data.draw(st.booleans()), hash=data.draw(st.booleans()), dedup=True,
        pooling=data.draw(st.sampled_from(["sum", "mean"])), **({} if optimizer else {"torchs": True}),
    )  # fmt: skip


# --- bits ---


def test_forward_has_the_bits_of_whole_tables_and_backward_repeats(pool: Pool) -> None:
    """A rank pools a bag's rows in the order of the bag, as the owner of a whole table does."""
    options = {"optimizer": weft.RowwiseAdagrad(lr=0.1), "pooling": "mean", "dedup": True}
    outputs = []
    for world, placement, dedup in ((1, ROWS, True), (3, ROWS, True), (2, dict.fromkeys(NAMES, 0), False)):
        per_rank = pool.run(_first_output, placement, {**options, "dedup": dedup}, ranks=world)
        outputs.append(torch.cat(per_rank))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    call = ROWS, torch.float32, 2, 13, options
    assert_equal_bits(pool.run(train, *call, ranks=3) for _ in range(2))


def _first_output(group: dist.ProcessGroup, placement: Any, options: dict[str, Any]) -> torch.Tensor:
    tables, options = equal_tables(torch.float32, options["pooling"]), dict(options)
    options.pop("pooling")
    module = ShardedEmbeddingBagCollection(tables, group=group, placement=placement, **options)
    local = {name: full_weights(tables)[name] for name in NAMES}
    module.load_full_weights(local)
    features, _ = batch(0, 12, group.rank(), group.size(), columns=48)
    with torch.no_grad():
        return module(features).values().clone()


def test_gradients_of_per_sample_weights(pool: Pool) -> None:
    pool.run(_per_sample, ranks=2)


def _per_sample(group: dist.ProcessGroup) -> None:
    table = EmbeddingBagConfig(40, 8, "t", ["f"])
    module = ShardedEmbeddingBagCollection(
        [table], group=group, placement=[RowWise()], optimizer=weft.SGD(lr=0.1), is_weighted=True, dedup=True
    )
    values = torch.tensor([3, 30, 3, 7]) + group.rank()
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    whole_table = torch.arange(320.0).view(40, 8)
    module.load_full_weights({"t": whole_table})
    features = KeyedJaggedTensor(["f"], values, weights, lengths=torch.tensor([1, 0, 3]))
    upstream = torch.arange(24.0).view(3, 8)
    module(features).values().backward(upstream)
    bags = torch.tensor([0, 2, 2, 2])
    torch.testing.assert_close(weights.grad, (whole_table[values] * upstream[bags]).sum(1))


# --- the module, refusals and errors ---


def test_a_module_is_handled_as_others_are(pool: Pool) -> None:
    pool.run(_handled, ranks=2)


def _handled(group: dist.ProcessGroup) -> None:
    tables = equal_tables(torch.float32, "sum")
    torch.manual_seed(5)
    make = {"group": group, "placement": ROWS, "optimizer": weft.RowwiseAdagrad(lr=0.1)}
    module = ShardedEmbeddingBagCollection(tables, dedup=True, **make)
    torch.manual_seed(5)
    other = ShardedEmbeddingBagCollection(tables, **make)
    assert isinstance(module, ShardedEmbeddingBagCollection)
    assert module.state_dict().keys() == other.state_dict().keys()
    for name, weight in other.state_dict().items():
        assert torch.equal(module.state_dict()[name], weight)
    assert [config.name for config in module.embedding_bag_configs()] == list(NAMES)
    module.load_state_dict(other.state_dict())
    features, upstream = batch(0, 8, group.rank(), group.size(), columns=48)
    pooled = module(features)
    assert pooled.keys() == other(features).keys()
    torch.testing.assert_close(pooled.values(), other(features).values())
    copied = copy.deepcopy(module)
    pooled.values().backward(upstream)
    before = {name: weight.clone() for name, weight in copied.state_dict().items()}
    assert not all(torch.equal(module.state_dict()[name], weight) for name, weight in before.items())
    twice = module(features).values()
    twice.backward(upstream, retain_graph=True)
    with pytest.raises(WeftError, match="second backward"):
        twice.backward(upstream)
    memory = module.memory()
    assert memory.buffers == 0
    assert sum(memory.tables.values()) == sum(weight.nbytes for weight in module.state_dict().values())
    module.half()
    assert module(features).values().dtype == torch.float16
    module.close()
    with pytest.raises(ValueError, match="does not support dedup=True"):
        module.prefetch(features)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"input": "global_batch"}, "does not work with dedup=True"),
        ({"placement": [ColumnWise((0, 1))]}, "which dedup=True does not support"),
        ({"placement": [DataParallel()]}, "which dedup=True does not support"),
        ({"transport": "serial"}, "transport='serial' has no effect"),
        ({"output_dtype": "fp16"}, "output_dtype='fp16' has no effect"),
        ({"dedup": "yes"}, "must be True or False"),
        ({"deterministic": 3}, "deterministic=3"),
    ],
    ids=str,
)
def test_options_that_cannot_be(pool: Pool, options: dict[str, Any], text: str) -> None:
    pool.run(_refuses, options, text, ranks=2)


def _refuses(group: dist.ProcessGroup, options: dict[str, Any], text: str) -> None:
    given = {"placement": [RowWise()], "dedup": True, **options}
    with pytest.raises(RefusedError, match=text):
        ShardedEmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", ["f"])], group=group, **given)


def test_tables_that_differ_and_ranks_that_differ(pool: Pool) -> None:
    pool.run(_differ, ranks=2)


def _differ(group: dist.ProcessGroup) -> None:
    one, two = EmbeddingBagConfig(10, 4, "t", ["f"]), EmbeddingBagConfig(10, 4, "s", ["g"], "mean")
    with pytest.raises(RefusedError, match="must have the same pooling"):
        ShardedEmbeddingBagCollection([one, two], group=group, placement=[RowWise()] * 2, dedup=True)
    with pytest.raises(DisagreementError, match="dedup=True and False"):
        ShardedEmbeddingBagCollection([one], group=group, placement=[RowWise()], dedup=group.rank() == 0)


def test_bad_input_is_refused_on_every_rank(pool: Pool) -> None:
    pool.run(_bad_input, ranks=2)


def _bad_input(group: dist.ProcessGroup) -> None:
    table = EmbeddingBagConfig(40, 8, "t", ["f"])
    make = {"group": group, "placement": [RowWise()], "dedup": True}
    module = ShardedEmbeddingBagCollection([table], is_weighted=True, bounds_check="fatal", max_ids=5, **make)
    lengths = torch.tensor([2, 1])

    def features(values: list[int], weights: torch.Tensor | None) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["f"], torch.tensor(values), weights, lengths=lengths)

    is_bad = group.rank() == 1
    with pytest.raises(RefusedError, match="id 99 is not in"):
        module(features([1, 99 if is_bad else 2, 3], torch.ones(3)))
    with pytest.raises(RefusedError, match="have no weights"):
        module(features([1, 2, 3], None if is_bad else torch.ones(3)))
    with pytest.raises(RefusedError, match="batch_sizes"):
        module(features([1, 2, 3], torch.ones(3)), batch_sizes=(2, 2))
    many = KeyedJaggedTensor(["f"], torch.arange(6), torch.ones(6), lengths=torch.tensor([6]))
    with pytest.raises(RefusedError, match="max_ids"):
        module(many)
    assert module(features([1, 2, 2], torch.ones(3))).values().shape == (2, 8)
    lenient = ShardedEmbeddingBagCollection([table], **make)
    with pytest.warns(UserWarning, match="out of range"):
        found = lenient(features([1, 99, 3], None)).values()
    weight = lenient(features([1, 1, 3], None)).values()[0] / 2
    torch.testing.assert_close(found[0], weight)


def _empty_bag(group: dist.ProcessGroup) -> tuple[str, bool]:
    table, optimizer = EmbeddingBagConfig(40, 8, "t", ["f"]), weft.SGD(lr=0.1, nonfinite="raise")
    module = ShardedEmbeddingBagCollection([table], group=group, placement=[RowWise()], dedup=True, optimizer=optimizer)
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 13, 26]), lengths=torch.tensor([2, 0, 1]))
    before, upstream = copy.deepcopy(module.state_dict()), torch.ones(3, 8)
    bad = upstream.clone()
    bad[1, 3] = torch.nan if group.rank() == 1 else 1.0
    error = told(lambda: module(features).values().backward(bad))
    same = all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    module(features).values().backward(upstream)  # the group stays usable
    return error, same and not all(torch.equal(before[name], now) for name, now in module.state_dict().items())


def test_a_gradient_of_an_empty_bag_that_is_nan_is_refused_on_every_rank(pool: Pool) -> None:
    for error, is_right in pool.run(_empty_bag, ranks=2):
        assert error.startswith("RefusedError"), error
        assert "rank 1: gradients are infinite or NaN" in error
        assert is_right
