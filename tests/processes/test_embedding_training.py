"""Training with `ShardedEmbeddingBagCollection` on CPU processes.

First comparisons with the same tables in one process in float64. Then the optimizer's interface, uses with DDP,
torch.compile, schedulers, checkpoints and copies, and refusals.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import embedding_partition as partition
from support.on_ranks import error_of, told
from support.slow import in_turn, slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.embedding import DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

TABLES = (
    EmbeddingBagConfig(30, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(20, 3, "items", ("i",), "mean"),
    EmbeddingBagConfig(30, 4, "pairs", ("i", "u")),
)
KEYS, BATCH, COLUMNS = ("u", "friend", "i"), 12, 8 + 8 + 3 + 4 + 4


def batch(seed: int, rank: int = 0, world: int = 1) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Return a rank's part of global batch number `seed`, and its part of the gradient of the pooled vectors."""
    return partition.batch(seed, BATCH, rank, world, columns=COLUMNS)


def made(group: dist.ProcessGroup, **options: Any) -> ShardedEmbeddingBagCollection:
    module = ShardedEmbeddingBagCollection(
        TABLES, group=group, placement=options.pop("placement", None), deadline_s=30.0, **options
    )
    full = partition.full_weights(TABLES)
    module.load_full_weights({name: weight.to(module.sharding.dtype) for name, weight in full.items()})
    return module


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


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


# --- the optimizer's interface ---


def schedules(group: dist.ProcessGroup) -> list[Any]:
    module, other = (made(group, optimizer=weft.RowwiseAdagrad(lr=0.1)) for _ in range(2))
    optimizer = module.fused_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for seed in range(3):
        features, upstream = batch(seed, group.rank(), group.size())
        for one in (module, other):
            one(features).values().backward(upstream)
        rates.append(module._update.lr)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for group_of_parameters in other.fused_optimizer.param_groups:
            group_of_parameters["lr"] *= 0.5
    same = all(torch.equal(one, two) for one, two in zip(state(module).values(), state(other).values(), strict=True))
    errors = [
        error_of(lambda: optimizer.param_groups[0].update(eps=1.0)),
        error_of(lambda: optimizer.param_groups[0].__setitem__("lr", math.nan)),
        error_of(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})),
    ]
    return [rates, same, optimizer.step(lambda: 3.0), errors]


def test_schedulers_write_the_learning_rate_of_the_next_update(pool: Pool) -> None:
    for rates, same, loss, errors in pool.run(schedules, ranks=2):
        assert rates == pytest.approx([0.1, 0.05, 0.025])
        assert same
        assert loss == 3.0
        assert [kind for kind, _ in errors] == ["ValueError"] * 3
        assert "only lr can change" in errors[0][1]


def pauses(group: dist.ProcessGroup, optimizer: Any) -> list[list[bool]]:
    """Return, for each of four steps, of which the third has a learning rate of 0, whether each table has kept its bits."""
    module = made(group, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(module.fused_optimizer, lambda step: 0.0 if step == 2 else 1.0)
    kept = []
    for seed in range(4):
        before = state(module)
        features, upstream = batch(seed, group.rank(), group.size())
        module(features).values().backward(upstream)
        after = state(module)
        kept.append([torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before])
        module.fused_optimizer.step()
        scheduler.step()
    return kept


@pytest.mark.parametrize("optimizer", [weft.SGD(lr=0.1), weft.RowwiseAdagrad(lr=0.1), weft.Adam(lr=0.1)], ids=str)
def test_a_step_with_a_learning_rate_of_zero_keeps_the_bits_of_rows(pool: Pool, optimizer: Any) -> None:
    for kept in pool.run(pauses, optimizer, ranks=2):
        assert kept[0]  # each rank has a table
        assert all(kept[2])
        assert not any(itertools.chain(kept[0], kept[1], kept[3]))


def continues(group: dist.ProcessGroup, optimizer: Any) -> list[Any]:
    """Return (True if a loaded module trains like the saved module, the names of the saved states, errors)."""
    module, fresh = (made(group, optimizer=optimizer) for _ in range(2))

    def step(of: nn.Module, seed: int) -> None:
        features, upstream = batch(seed, group.rank(), group.size())
        of(features).values().backward(upstream)

    for seed in range(2):
        step(module, seed)
    module.fused_optimizer.param_groups[0]["lr"] = 0.03
    saved = copy.deepcopy(module.fused_optimizer.state_dict())
    fresh.load_state_dict(state(module))
    fresh.fused_optimizer.load_state_dict(saved)
    copied = copy.deepcopy(module)
    for one in (module, fresh, copied):
        step(one, 7)
    after = [list(state(one).values()) for one in (module, fresh, copied)]
    same = [all(torch.equal(one, two) for one, two in zip(after[0], other, strict=True)) for other in after[1:]]
    broken = copy.deepcopy(saved)
    for states in broken["state"].values():
        states.clear()
    error = error_of(lambda: fresh.fused_optimizer.load_state_dict(broken))
    names = [list(states) for states in saved["state"].values()]
    return [same, fresh.fused_optimizer.param_groups[0]["lr"], names, error]


@pytest.mark.parametrize("optimizer", [weft.Adam(lr=0.1), weft.RowwiseAdagrad(lr=0.1)], ids=str)
def test_states_are_saved_and_loaded(pool: Pool, optimizer: Any) -> None:
    for same, lr, names, (kind, text) in pool.run(continues, optimizer, ranks=2):
        assert same == [True, True]
        assert lr == 0.03
        assert all(one[0].endswith(".momentum1") for one in names)
        assert kind == "ValueError"
        assert "momentum1" in text


def moves(group: dist.ProcessGroup) -> list[Any]:
    """Move a module from meta to the CPU, and convert it to bf16. The states follow, in float32."""
    module = ShardedEmbeddingBagCollection(
        TABLES, group=group, device="meta", optimizer=weft.Adagrad(lr=0.1), deadline_s=30.0
    ).to_empty(device="cpu")
    module.reset_parameters()
    module.bfloat16()
    before = state(module)
    features, upstream = batch(0, group.rank(), group.size())
    module(features).values().backward(upstream.bfloat16())
    tensors = module._update.tensors
    changed = [not torch.equal(one, two) for one, two in zip(before.values(), state(module).values(), strict=True)]
    return [{t.dtype for t in tensors}, {t.device.type for t in tensors}, changed, module._update.lr]


def test_states_move_with_their_tables(pool: Pool) -> None:
    for dtypes, devices, changed, lr in pool.run(moves, ranks=2):
        assert dtypes == {torch.float32}
        assert devices == {"cpu"}
        assert changed
        assert all(changed)
        assert lr == pytest.approx(0.1)


# --- several backward calls in a step ---


def accumulates(group: dist.ProcessGroup, halves: bool) -> dict[str, torch.Tensor]:
    module, rank, world = (
        made(group, optimizer=weft.Adam(lr=0.1), is_weighted=True, outputs=4),
        group.rank(),
        group.size(),
    )
    for seed in range(2):
        features, upstream = batch(seed, rank, world)
        if not halves:
            (module(features).values() * upstream).sum().backward()
            continue
        middle, lengths = len(upstream) // 2, features.lengths().view(3, -1)
        with module.accumulate():
            for part in (slice(0, middle), slice(middle, None)):
                ids, numbers = [], []
                for key, of_key in zip(KEYS, lengths, strict=True):
                    ends = torch.nn.functional.pad(of_key.cumsum(0), (1, 0))[part.start :]
                    at = slice(int(ends[0]), int(ends[middle] if part.stop else ends[-1]))
                    ids.append(features[key].values()[at])
                    numbers.append(features[key].weights_or_none()[at])  # type: ignore[index]
                some = KeyedJaggedTensor(KEYS, torch.cat(ids), torch.cat(numbers), lengths=lengths[:, part].flatten())
                y = module(some).values()
                # two losses from one call
                (y * upstream[part] / 4).sum().backward(retain_graph=True)
                (y * upstream[part] * 3 / 4).sum().backward()
    return state(module)


@pytest.mark.parametrize("world", [1, 3])
def test_two_half_batches_and_several_losses_make_one_step(pool: Pool, world: int) -> None:
    whole, halves = (pool.run(accumulates, how, ranks=world) for how in (False, True))
    for one, other in zip(whole, halves, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def accumulates_wrongly(group: dist.ProcessGroup) -> list[Any]:
    own = dist.new_group([0, 1])
    module = made(own, optimizer=weft.SGD(lr=0.1))
    before, (features, upstream) = state(module), batch(0, own.rank(), own.size())

    def nested() -> None:
        with module.accumulate(), module.accumulate():
            pass

    def fails() -> None:
        with module.accumulate():
            module(features).values().backward(upstream)
            raise KeyError("a rank's own error")

    errors = [error_of(nested), error_of(fails)]
    same = all(torch.equal(one, two) for one, two in zip(before.values(), state(module).values(), strict=True))

    def alone() -> None:
        with module.accumulate() if own.rank() else contextlib.nullcontext():
            module(features).values().backward(upstream)

    errors.append(error_of(alone))
    dist.destroy_process_group(own)
    return [errors, same]


def test_ranks_accumulate_together(pool: Pool) -> None:
    for errors, same in pool.run(accumulates_wrongly, ranks=2):
        assert [kind for kind, _ in errors] == ["ValueError", "KeyError", "DisagreementError"]
        assert "accumulated" in errors[2][1]
        assert same


def leaves_accumulate(group: dist.ProcessGroup) -> tuple[str, str]:
    """Leave the context by an exception on rank 1, which then makes another call."""
    own = dist.new_group([0, 1])
    module = made(own, optimizer=weft.SGD(lr=0.1))
    features, upstream = batch(0, own.rank(), own.size())

    def steps() -> None:
        with contextlib.suppress(KeyError), module.accumulate():
            module(features).values().backward(upstream)
            if own.rank() == 1:
                raise KeyError("a rank's own error")
        module(features)

    found = error_of(steps)
    dist.destroy_process_group(own)
    return found


def test_a_rank_that_leaves_accumulate_is_told_of_the_block(pool: Pool) -> None:
    for kind, text in pool.run(leaves_accumulate, ranks=2):
        assert kind == "DisagreementError", text
        assert "a rank may have left an accumulate() block by an exception" in text
        assert "prefetched" not in text


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
    for (kind, text), same, changed in pool.run(raises, ranks=2):
        assert kind == "RefusedError"
        assert "rank 1: gradients are infinite or NaN: table 'items', feature 'i'" in text
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
    for found, said in pool.run(refused, mine, others, ranks=2):
        assert found == kind, said
        assert text in said
