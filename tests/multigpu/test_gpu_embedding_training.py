"""Test training of embedding tables on GPUs, with the problems and references of
`tests/processes/test_embedding_backward.py`.

Gradients and updates are compared with float64. Bits must be the same with one and with two ranks, and with late ranks.
Other tests use a large batch with hot rows, graphs, modules and wrong input. A GPU adds in another order than a CPU, so
their bits differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from support import embedding_training as training
from support.embedding_training import OPTIMIZERS, Steps, assert_as_exact_as_torch, gradients_by_torch, of_tables
from support.graphs import capture
from support.reference import Problem, assert_close, even, problem, tables_of

import weft
from weft.embedding import EmbeddingBagConfig, EmbeddingOptimizer, FusedUpdate, KeyedJaggedTensor
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

pytestmark = ranks.MARKS
SHARED = (
    EmbeddingBagConfig(50, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(20, 3, "items", ("i",), "mean"),
    EmbeddingBagConfig(9, 16, "pairs", ("i", "u"), "mean"),
)
PROBLEMS: dict[str, Problem] = {
    "any width": problem(2, (8, 3, 16, 1, 70, 300), 57, longest=40),
    "one width, weighted": problem(2, (64,) * 6, 301, longest=30, rows=500, weighted=True),
    "hashed int32": problem(2, (8, 3), 13, hash=True, index_dtype=torch.int32, offset_dtype=torch.int32),
    "wide": problem(2, (1028, 2052, 4), 5),
    "features that share tables": Problem(SHARED, (1, 0, 1), (6, 5)),
    "uneven": Problem(tables_of((8, 3, 16)), (1, 0, 1), (41, 0)),
    "a rank without tables": Problem(tables_of((8, 3)), (1, 1), (5, 4)),
    "empty bags": problem(2, (8, 4), 6, longest=0),
    "an empty batch": problem(2, (8, 4), 0),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_of_tables(pair: Pool, name: str) -> None:
    steps = Steps(PROBLEMS[name])
    step, upstream = next(iter(steps))
    exact = gradients_by_torch(step, upstream, [weight.double() for weight in step.weights])
    in_fp32 = gradients_by_torch(step, upstream, [weight.float() for weight in step.weights])
    for sparse in (False, True):
        per_rank = pair.run(training.gradients, steps, sparse, ranks=2, timeout_s=120)
        found = of_tables(step, [grads for grads, _ in per_rank])
        for grad, wanted, torchs in zip(found, exact, in_fp32, strict=True):
            assert_as_exact_as_torch(grad.to_dense(), torchs, wanted)


def test_gradients_of_per_sample_weights(pair: Pool) -> None:
    p = Problem(SHARED, (1, 0, 1), (6, 5), weighted=True)
    upstream = next(iter(Steps(p)))[1]
    per_rank = pair.run(training.gradients, Steps(p), False, True, ranks=2, timeout_s=120)
    training.assert_gradients_of_sample_weights(p, upstream, [found for _, found in per_rank])


CLIPPED = (weft.SGD(lr=0.1, clip_value=0.3), weft.Adam(lr=0.1, clip_norm=2.0))


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *CLIPPED], ids=str)
def test_updates(pair: Pool, optimizer: EmbeddingOptimizer) -> None:
    training.assert_updates(pair, 2, optimizer)


@pytest.mark.parametrize("name", [*PROBLEMS, "hot rows"])
def test_updates_by_atomics(pair: Pool, name: str) -> None:
    p = PROBLEMS.get(name) or problem(2, (8, 33, 64), 200, longest=150)
    steps, optimizer = Steps(p, 2, is_hot=name == "hot rows"), weft.SGD(lr=0.1)
    found = of_tables(p, pair.run(training.trained, steps, optimizer, 0.0, 1, False, ranks=2, timeout_s=120))
    exact = training.trained_by_torch(steps, optimizer, torch.float64)
    in_fp32 = training.trained_by_torch(steps, optimizer, torch.float32)
    for (weight,), wanted, torchs in zip(found, exact, in_fp32, strict=True):
        # Atomics add to the row once for each id. torch sums the row's gradients first, so it rounds the row less
        # often.
        error, other = (float((one.double() - wanted).norm()) for one in (weight, torchs))
        assert error <= 4 * other + 8 * torch.finfo(torch.float32).eps * float(wanted.norm())


@pytest.mark.parametrize("optimizer", [weft.RowwiseAdagrad(lr=0.1), weft.SGD(lr=0.1, weight_decay=0.1)], ids=str)
def test_updates_that_need_sums_have_the_same_bits_either_way(pair: Pool, optimizer: EmbeddingOptimizer) -> None:
    steps, found = Steps(problem(2, (8, 3, 16), 21, rows=40), is_hot=True), []
    for deterministic in (True, False):
        per_rank = pair.run(training.trained, steps, optimizer, 0.0, 1, deterministic, ranks=2, timeout_s=120)
        found.append([tensor for of_table in of_tables(steps.p, per_rank) for tensor in of_table])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("transport", ["direct", "put", "serial"])
@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_vectors_that_travel_in_16_bits(pair: Pool, name: str, dtype: torch.dtype, transport: str) -> None:
    for p in (problem(2, (8, 3, 16, 70, 300), 13, weighted=True), problem(2, (64,) * 4, 301, longest=30)):
        per_rank = pair.run(training.narrowed, p, name, dtype, transport, timeout_s=120)
        for rank, found in enumerate(per_rank):
            assert_close(found, p, p.rows_of(rank), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_updates_of_16_bit_tables(pair: Pool, dtype: torch.dtype) -> None:
    training.assert_16_bit_updates(pair, (8, 16), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_random_rounding_repeats(pair: Pool, dtype: torch.dtype) -> None:
    """Bits depend on the seed, but not on the number of ranks. An element differs by at most one unit in the last place
    from the exact result.
    """
    p, found = problem(1, (8, 16), 24, dtype=dtype), {}
    for world, seed in ((1, 3), (2, 3), (1, 4)):
        steps = Steps(replace(p, rank_of_table=(0, world - 1), batch_sizes=even(24, world)), 1)
        rule = weft.SGD(lr=0.01, rounding="stochastic", seed=seed)
        found[world, seed] = of_tables(steps.p, pair.run(training.trained, steps, rule, ranks=world, timeout_s=120))
    exact = training.trained_by_torch(Steps(p, 1), weft.SGD(lr=0.01), torch.float64)
    for (one,), (other,), (reseeded,), wanted in zip(found[1, 3], found[2, 3], found[1, 4], exact, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, reseeded)
        torch.testing.assert_close(one.double(), wanted, rtol=torch.finfo(dtype).eps * 1.01, atol=1e-5)


@pytest.mark.parametrize("dims", [(8, 3, 16, 1, 70), (64, 128)])
def test_bits_do_not_depend_on_ranks_placement_or_delays(pair: Pool, dims: tuple[int, ...]) -> None:
    p, first = problem(1, dims, 24, longest=90), None
    for world, placement in [(1, 0), (2, 0), (2, 1), *[(2, 0)] * 3]:
        owners = tuple((i + placement) % world for i in range(len(dims)))
        steps = Steps(replace(p, rank_of_table=owners, batch_sizes=even(24, world)), 2, is_hot=True)
        per_rank = pair.run(training.trained, steps, weft.RowwiseAdagrad(lr=0.1), 0.01, ranks=world, timeout_s=120)
        found = [tensor for tensors in of_tables(steps.p, per_rank) for tensor in tensors]
        first = found if first is None else first
        assert all(torch.equal(one, two) for one, two in zip(first, found, strict=True)), (world, placement)


def large(group: dist.ProcessGroup, ids: str, deterministic: bool) -> float:
    """Return the largest relative error of updated rows against float64, for 2 million ids."""
    device, rows, dim, batch, length = ranks.device(), 100_000, 64, 16384, 64
    generator = torch.Generator().manual_seed(group.rank())
    tables = [EmbeddingBagConfig(rows, dim, f"t{i}", (f"f{i}",)) for i in range(2)]
    sharding = weft.place_tables(tables, 2, placement=[0, 1])
    values = torch.randint(0, rows, (batch * length,), generator=generator)
    if ids == "hot":
        values[torch.rand(len(values), generator=generator) < 0.5] = 7
    values, offsets = values.to(device), (torch.arange(batch + 1) * length).to(device)
    weight = torch.randn(rows, dim, generator=generator).to(device)
    before, update = weight.clone(), FusedUpdate(weft.SGD(lr=1.0), [weight], deterministic=deterministic)
    y = weft.embedding_all_to_all([weight], (values, offsets), sharding, group=group, update=update)
    upstream = torch.randn(batch, 2 * dim, generator=torch.Generator().manual_seed(9)).to(device)
    half = batch // 2
    y.backward(upstream[group.rank() * half : (group.rank() + 1) * half])
    mine = upstream[:, group.rank() * dim : (group.rank() + 1) * dim].double()
    wanted = torch.zeros(rows, dim, dtype=torch.float64, device=device)
    wanted.index_add_(0, values, mine.repeat_interleave(length, 0))
    error = (before.double() - weight.double() - wanted).abs()
    return float((error / (1 + wanted.abs())).max())


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("ids", ["uniform", "hot"])
def test_a_large_batch(pair: Pool, ids: str, deterministic: bool) -> None:
    # Atomics add the half million gradients of the hot row one by one, with a rounding each. The error grows with the
    # square root of their number.
    limit = 1e-2 if ids == "hot" and not deterministic else 1e-3
    for error in pair.run(large, ids, deterministic, timeout_s=120):
        assert error < limit


def sorted_ahead(group: dist.ProcessGroup) -> bool:
    """Return whether steps that sort ids during forward give the same bits as steps that sort them in backward.

    Each step has new ids. Their memory is freed or overwritten directly after forward. Some forward calls have no
    backward.
    """
    from weft.runtime.cuda import embedding_backward as backward

    rank, device, rows, dim, batch = group.rank(), ranks.device(), 5000, 64, 4096
    tables = [EmbeddingBagConfig(rows, dim, f"t{i}", (f"f{i}",)) for i in range(4)]
    sharding, real = weft.place_tables(tables, 2, placement=[0, 1, 0, 1]), backward.sort_ahead
    both: list[Any] = []
    for is_ahead in (True, False):
        backward.sort_ahead = real if is_ahead else (lambda of, jagged: None)
        weights = [torch.ones(rows, dim, device=device) for _ in range(2)]
        update = FusedUpdate(weft.RowwiseAdagrad(lr=0.1), weights)
        ids = torch.empty(2 * batch * 20, dtype=torch.int64, device=device)
        try:
            for step in range(12):
                generator = torch.Generator(device).manual_seed(100 * step + rank)
                drawn = torch.randint(0, rows, ids.shape, generator=generator, device=device)
                drawn[::3] = 7
                values = ids.copy_(drawn) if step % 2 else drawn
                offsets = torch.arange(2 * batch + 1, device=device) * 20
                y = weft.embedding_all_to_all(weights, (values, offsets), sharding, group=group, update=update)
                del drawn, values, offsets
                if step % 4 == 3:
                    del y  # while the sort of its ids may still run
                    continue
                if step % 3 == 0:
                    torch.cuda._sleep(20_000_000)
                y.backward(torch.randn(y.shape, generator=generator, device=device))
                del y
        finally:
            backward.sort_ahead = real
        both.append([*weights, *update.tensors])
    return all(torch.equal(one, two) for one, two in zip(*both, strict=True))


def test_ids_that_are_sorted_ahead(pair: Pool) -> None:
    assert pair.run(sorted_ahead, timeout_s=120) == [True, True]


def replayed(group: dist.ProcessGroup, optimizer: EmbeddingOptimizer) -> bool:
    """Return whether replays of a captured forward and backward give the bits of ordinary calls, with another learning
    rate each time.
    """
    p, rank, device = problem(2, (8, 16), 24), group.rank(), ranks.device()
    features = tuple(ranks.here(p.tupled(rank)))
    upstream = torch.randn(24, p.sharding.total_dim, generator=torch.Generator().manual_seed(2))[p.rows_of(rank)].to(
        device
    )
    both = []
    for captured in (False, True):
        weights = [weight.clone() for weight in ranks.here(p.local_weights(rank))]
        update = FusedUpdate(optimizer, weights)

        def step(weights: list[torch.Tensor] = weights, update: FusedUpdate = update) -> None:
            y = weft.embedding_all_to_all(
                weights, features, p.sharding, group=group, batch_sizes=p.batch_sizes, update=update
            )
            y.backward(upstream)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        side.synchronize()
        if captured:
            graph, _ = capture(step, side)
        for number in range(3):
            update.lr = 0.1 / (number + 1)
            graph.replay() if captured else step()
        torch.cuda.synchronize()
        both.append([*weights, *update.tensors])
    return all(torch.equal(one, two) for one, two in zip(*both, strict=True))


@pytest.mark.parametrize(
    "optimizer", [weft.RowwiseAdagrad(lr=0.1), weft.Adam(lr=0.1), weft.SGD(lr=0.1, clip_norm=0.5)], ids=str
)
def test_a_training_step_in_a_graph_reads_the_learning_rate(pair: Pool, optimizer: EmbeddingOptimizer) -> None:
    assert pair.run(replayed, optimizer, timeout_s=120) == [True, True]


def module_steps(group: dist.ProcessGroup, device: str) -> list[torch.Tensor]:
    tables = [EmbeddingBagConfig(50, 8, f"t{i}", (f"f{i}",), "mean" if i % 2 else "sum") for i in range(4)]
    torch.manual_seed(3)
    optimizer = weft.RowwiseAdagrad(lr=0.1)
    full = {t.name: torch.randn(50, 8, generator=torch.Generator().manual_seed(i)) for i, t in enumerate(tables)}
    module = ShardedEmbeddingBagCollection(
        tables, group=group, placement=[0, 1, 0, 1], optimizer=optimizer, is_weighted=True, device=device
    )
    module.load_full_weights(full)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(module.fused_optimizer, 0.5)
    for seed in range(3):
        generator = torch.Generator().manual_seed(10 * seed + group.rank())
        lengths = torch.randint(0, 5, (4 * 9,), generator=generator)
        ids = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
        numbers = torch.rand(len(ids), generator=generator).to(device).requires_grad_()
        given = KeyedJaggedTensor([f"f{i}" for i in range(4)], ids.to(device), numbers, lengths=lengths.to(device))
        y = module(given).values()
        (y * torch.rand(y.shape, generator=generator).to(device)).sum().backward()
        assert numbers.grad is not None
        scheduler.step()
    return [*(w.detach().cpu() for w in module.state_dict().values()), numbers.grad.cpu()]


def test_a_module_learns_as_on_cpus(pair: Pool) -> None:
    on_gpus = pair.run(module_steps, "cuda", timeout_s=120)
    with Pool(2) as cpus:
        on_cpus = cpus.run(module_steps, "cpu", timeout_s=120)
    for one, other in zip(on_gpus, on_cpus, strict=True):
        for here, there in zip(one, other, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


def test_a_second_backward_is_an_error_that_names_it(pair: Pool) -> None:
    training.assert_backward_once(pair)


def test_a_straggler_is_waited_for(pair: Pool) -> None:
    training.assert_straggler_awaited(pair)
