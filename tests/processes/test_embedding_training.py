"""Training with `ShardedEmbeddingBagCollection` on CPU processes.

First comparisons with the same tables in one process in float64. Then bits, per-sample weights, uses with DDP, FSDP and
torch.compile, and refusals. `test_embedding_fused_optimizer.py` and `test_embedding_accumulate.py` have the optimizer's
interface and updates by several backwards.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import embedding_partition as partition
from support.embedding_modules import BATCH, COLUMNS, KEYS, TABLES, batch, made, state
from support.on_ranks import assert_error, assert_errors, error_of, told
from support.slow import in_turn, slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.embedding import DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection


def of_all(pool: Pool, *call: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Run a call on the ranks. Return the tables of all ranks."""
    return dict(itertools.chain.from_iterable(tables.items() for tables in pool.run(*call, **options)))


def train(group: dist.ProcessGroup, steps: int = 3, torchs: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Train. Return this rank's tables. torchs: True to use torch.optim.SGD."""
    module = made(group, **options)
    optimizer = (
        torch.optim.SGD(list(module.parameters()) or [torch.empty(0, requires_grad=True)], 0.1) if torchs else None
    )
    for seed in range(steps):
        features, upstream = batch(seed, group.rank(), group.size())
        if module.input == "global_batch":
            features, _ = batch(seed)
        module(features).values().backward(upstream)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer is not None or all(parameter.grad is None for parameter in module.parameters())
    return state(module)


def by_torch(steps: int, weighted: bool, scale: float) -> dict[str, torch.Tensor]:
    """Train in one process in float64, with embedding_bag and torch.optim.SGD on all samples."""
    leaves = {name: weight.double().requires_grad_() for name, weight in partition.full_weights(TABLES).items()}
    optimizer = torch.optim.SGD(leaves.values(), 0.1)
    for seed in range(steps):
        features, upstream = batch(seed)
        pooled = []
        for table in TABLES:
            for key in table.feature_names:
                bags, lengths = features[key], features[key].lengths()
                rows = leaves[table.name][bags.values()]
                rows = rows * bags.weights_or_none().double()[:, None] if weighted else rows  # type: ignore[union-attr]
                bag = torch.repeat_interleave(torch.arange(BATCH), lengths)
                out = torch.zeros(BATCH, table.embedding_dim, dtype=torch.float64).index_add(0, bag, rows)
                pooled.append(out / lengths.clamp(min=1)[:, None] if table.pooling == "mean" else out)
        (torch.cat(pooled, 1) * upstream * scale).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"embedding_bags.{name}.weight": leaf.detach() for name, leaf in leaves.items()}


@pytest.mark.parametrize(
    ("options", "world"),
    in_turn([{"optimizer": weft.SGD(lr=0.1)}, {"torchs": True}, {"torchs": True, "sparse": True}], [3, 1, 2]),
    ids=str,
)
def test_a_module_learns_as_tables_in_one_process(pool: Pool, options: dict[str, Any], world: int) -> None:
    for given in ({}, {"is_weighted": True, "gradients": "sum"}, {"input": "global_batch"}):
        found = of_all(pool, _train, given | options, ranks=world)
        wanted = by_torch(3, "is_weighted" in given, 1.0 if "gradients" in given else 1 / world)
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-5)


def _train(group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    return train(group, **options)


def test_bits_do_not_depend_on_ranks_or_placement(pool: Pool) -> None:
    first = None
    for world, placement in ((1, None), (2, [0, 1, 0]), (2, [1, 1, 0]), (3, [2, 0, 1]), (3, [2, 2, 2])):
        options = {"optimizer": weft.Adam(lr=0.1), "gradients": "sum", "placement": placement}
        found = of_all(pool, _train, options, ranks=world)
        first = first or found
        assert all(torch.equal(found[name], weight) for name, weight in first.items()), (world, placement)


def train_on_few(group: dist.ProcessGroup, samples: int, expands: bool) -> dict[str, torch.Tensor]:
    """Train a step in which rank 0 has `samples` samples. expands: True for a gradient with strides of 0, as that of a sum."""
    module = made(group, optimizer=weft.SGD(lr=0.1))
    features, _ = batch(3, group.rank(), group.size())
    if group.rank() == 0:
        lengths = features.lengths().view(len(KEYS), -1)[:, :samples].contiguous().flatten()
        ids = torch.arange(int(lengths.sum())) % 20
        features = KeyedJaggedTensor(KEYS, ids, torch.ones(len(ids)), lengths=lengths, stride=samples)
    pooled = module(features).values()
    upstream = torch.ones(()).expand_as(pooled)
    said = told(lambda: pooled.backward(upstream if expands else torch.ones_like(pooled)))
    assert said == "nothing", said
    return state(module)


@pytest.mark.parametrize("samples", [0, 1])
def test_a_rank_with_few_samples_may_pass_an_expanded_gradient(pool: Pool, samples: int) -> None:
    found, wanted = (of_all(pool, train_on_few, samples, expands, ranks=2) for expands in (True, False))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def first_values(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    torch.manual_seed(5 + group.rank())
    return state(ShardedEmbeddingBagCollection(TABLES, group=group, deadline_s=30.0))


def test_first_values_do_not_depend_on_the_number_of_ranks(pool: Pool) -> None:
    first = None
    for world in (1, 2, 3):
        found = of_all(pool, first_values, ranks=world)
        first = first or found
        assert first.keys() == found.keys()
        assert all(torch.equal(found[name], weight) for name, weight in first.items())


def per_sample(group: dist.ProcessGroup) -> tuple[torch.Tensor, list[int]]:
    """Return the gradient of this rank's per-sample weights, and the lengths of its features."""
    module = made(group, is_weighted=True, optimizer=weft.SGD(lr=0.0))
    features, upstream = batch(0, group.rank(), group.size())
    weights = features.weights().clone().requires_grad_()
    features = KeyedJaggedTensor(KEYS, features.values(), weights, lengths=features.lengths())
    module(features).values().backward(upstream)
    assert weights.grad is not None
    return weights.grad, features.length_per_key()


def test_gradients_of_per_sample_weights_return_to_their_samples(pool: Pool) -> None:
    ((whole, lengths),) = pool.run(per_sample, ranks=1)
    assert whole.abs().min() > 0
    for world in (2, 3):
        parts = [grad.split(of_keys) for grad, of_keys in pool.run(per_sample, ranks=world)]
        joined = torch.cat([torch.cat([part[key] for part in parts]) for key in range(3)])
        assert torch.equal(joined, whole), lengths


def raises(group: dist.ProcessGroup) -> list[Any]:
    module = made(group, optimizer=weft.Adagrad(lr=0.1, nonfinite="raise"), placement=[0, 1, 0])
    before, (features, upstream) = state(module), batch(0, group.rank(), group.size())
    bad = upstream.clone()
    if group.rank() == 0:
        bad[1, 17] = math.inf  # a column of "items"
    error = error_of(lambda: module(features).values().backward(bad))
    same = all(torch.equal(one, two) for one, two in zip(before.values(), state(module).values(), strict=True))
    module(features).values().backward(upstream)  # the group stays usable
    changed = all(not torch.equal(one, two) for one, two in zip(before.values(), state(module).values(), strict=True))
    return [error, same, changed]


def test_nonfinite_gradients_can_raise_on_every_rank(pool: Pool) -> None:
    for error, same, changed in pool.run(raises, ranks=2):
        assert_error(error, "RefusedError", "rank 1: gradients are infinite or NaN: table 'items', feature 'i'")
        assert same
        assert changed


# --- uses with other modules ---


class Model(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before, self.after, self.embeddings = nn.Linear(4, COLUMNS), nn.Linear(COLUMNS, 1), embeddings

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.after(torch.tanh(self.before(dense)) * self.embeddings(sparse).values()).squeeze(1)


def in_ddp(group: dist.ProcessGroup, how: str) -> dict[str, torch.Tensor]:
    rank, world = group.rank(), group.size()
    model = Model(made(group, optimizer=weft.Adagrad(lr=0.1)))
    if how in ("marked ddp", "fsdp"):
        ignored = weft.nn.ignore_tables(model)
        assert len(ignored) == len(model.embeddings.sharding.local_tables(rank))
    wrapped: nn.Module = model
    if how in ("ddp", "marked ddp", "compiled"):
        wrapped = DistributedDataParallel(model, process_group=group)
    elif how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for part in (model.before, model.after):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    if how == "compiled":
        wrapped = torch.compile(wrapped, backend="aot_eager")
    optimizer = torch.optim.SGD([*model.before.parameters(), *model.after.parameters()], 0.1)
    for seed in range(3):
        features, _ = batch(seed, rank, world)
        dense = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(seed))
        wrapped(dense[rank * BATCH // world : (rank + 1) * BATCH // world], features).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = model.state_dict().items()
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for name, one in values}


def tables_in_ddp(group: dist.ProcessGroup, which: str) -> dict[str, Any]:
    """Wrap a model in DDP without any preparation. Return what DDP and one step did to the tables."""
    tables = [EmbeddingBagConfig(8 * (n + 1), 4, f"t{n}", (f"f{n}",)) for n in range(3)]
    placements: dict[str, list[Any]] = {"whole": [1, 1, 1], "equal shapes": [RowWise()] * 3}
    placement: Any = placements.get(which, [RowWise(), 0, DataParallel()])
    kind: Any = ShardedEmbeddingCollection if which == "rows" else ShardedEmbeddingBagCollection
    of = kind(tables, group=group, placement=placement, optimizer=None if which == "no optimizer" else weft.SGD(lr=0.5))
    own = {name: weight.detach().clone() for name, weight in of.named_parameters()}
    model = nn.ModuleDict({"tables": of, "over": nn.Linear(12, 1)})
    model.forward = lambda given: model["over"](joined(model["tables"](given)))  # type: ignore[method-assign, assignment]
    found: dict[str, Any] = {"alone": told(lambda: DistributedDataParallel(nn.Sequential(of), process_group=group))}
    wrapped = DistributedDataParallel(model, process_group=group)
    found["kept"] = all(torch.equal(own[name], weight) for name, weight in of.named_parameters())
    features = KeyedJaggedTensor(
        ["f0", "f1", "f2"], torch.tensor([0, 7, 0, 15, 0, 23]), lengths=torch.ones(6, dtype=torch.int64)
    )
    wrapped(features).sum().backward()
    grad = model["over"].weight.grad
    assert isinstance(grad, torch.Tensor)
    found["averaged"] = grad.clone()
    weights = dict(of.named_parameters())
    trained = (weights[name].grad is not None or not torch.equal(own[name], weights[name]) for name in own)
    return found | {"trained": all(trained), "tables": len(own)}


def joined(out: Any) -> torch.Tensor:
    return torch.cat([one.values() for one in out.values()], dim=1) if isinstance(out, dict) else out.values()


@pytest.mark.parametrize("which", ["whole", "parts", "equal shapes", "rows", "no optimizer"])
def test_ddp_ignores_tables_by_itself(pool: Pool, which: str) -> None:
    found = pool.run(tables_in_ddp, which, ranks=2, timeout_s=60)
    assert [one["tables"] for one in found] == {"whole": [0, 3], "equal shapes": [3, 3]}.get(which, [3, 2])
    for one in found:
        assert one["kept"]
        assert one["trained"]
        assert torch.equal(one["averaged"], found[0]["averaged"])
        assert "require" in one["alone"] or "nothing to do" in one["alone"]


@pytest.mark.parametrize("how", ["ddp", slow("marked ddp"), slow("fsdp"), slow("compiled")])
def test_a_model_in_ddp_or_fsdp_learns_as_on_one_rank(how: str) -> None:
    with Pool(2) as own:  # Dynamo stays loaded
        (wanted,) = own.run(in_ddp, "alone", ranks=1, timeout_s=120)
        found = of_all(own, in_ddp, how, ranks=2, timeout_s=120)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def frozen(group: dist.ProcessGroup) -> list[Any]:
    features, upstream = batch(0, group.rank(), group.size())
    fused = made(group, optimizer=weft.SGD(lr=0.1))
    before = state(fused)
    with torch.no_grad():
        y = fused(features).values()
    errors = [error_of(lambda: y.backward(upstream))]
    learning = made(group)
    learning.requires_grad_(False)
    without = learning(features).values().requires_grad
    learning.requires_grad_(True)
    learning(features).values().backward(upstream)
    grads = [parameter.grad is not None for parameter in learning.parameters()]
    same = all(torch.equal(one, two) for one, two in zip(before.values(), state(fused).values(), strict=True))
    return [same, errors, without, grads]


def test_calls_without_gradients_update_nothing(pool: Pool) -> None:
    for same, errors, without, grads in pool.run(frozen, ranks=3):
        assert same
        assert not without
        assert all(grads)
        assert [kind for kind, _ in errors] == ["RuntimeError"]


# --- refusals ---


def refused(group: dist.ProcessGroup, mine: dict[str, Any], others: dict[str, Any]) -> tuple[str, str]:
    options = mine if group.rank() == 0 else others
    return error_of(lambda: ShardedEmbeddingBagCollection(TABLES, group=group, deadline_s=30.0, **options))


@pytest.mark.parametrize(
    ("mine", "others", "kind", "text"),
    [
        ({"optimizer": weft.SGD(lr=0.1)}, {"optimizer": weft.SGD(lr=0.2)}, "DisagreementError", "SGD(lr=0.1"),
        ({"optimizer": weft.SGD(lr=0.1)}, {"optimizer": weft.Adam(lr=0.1)}, "DisagreementError", "Adam(lr=0.1"),
        ({"sparse": True}, {}, "DisagreementError", "sparse=True"),
        ({"gradients": "sum"}, {}, "DisagreementError", "gradients='sum'"),
        ({"deterministic": False}, {}, "DisagreementError", "deterministic=False"),
        ({"deterministic": 1}, {}, "RefusedError", "deterministic=1 must be True or False"),
        ({"optimizer": 0.1}, {}, "RefusedError", "optimizer is a float: pass an optimizer of weft"),
        ({"gradients": "all"}, {}, "RefusedError", "gradients='all' must be 'mean' or 'sum'"),
        ({"optimizer": weft.SGD(lr=0.1), "sparse": True}, {}, "RefusedError", "pass sparse=False, or optimizer=None"),
    ],
)
def test_options_that_are_wrong_or_differ(
    pool: Pool, mine: dict[str, Any], others: dict[str, Any], kind: str, text: str
) -> None:
    assert_errors(pool.run(refused, mine, others, ranks=2), kind, text)
