"""Clipped and rounded gradients, stochastic rounding of rows, and the end of accumulate(), on CPU processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import embedding_training as training
from support.embedding_modules import batch, made, state
from support.embedding_training import Steps, narrowed, of_tables, rounded_on_the_way
from support.on_ranks import own_group, told
from support.reference import Problem, assert_close, even, problem

import weft
from weft.embedding import EmbeddingOptimizer
from weft.launch import Pool


def test_a_limit_that_no_gradient_reaches_changes_no_bit(pool: Pool) -> None:
    steps = Steps(replace(problem(3, (8, 3, 16, 1), 21, rows=40), seed=7))
    optimizers = (weft.RowwiseAdagrad(lr=0.1, clip_norm=limit) for limit in (1e6, None))
    found, plain = (of_tables(steps.p, pool.run(training.trained, steps, one, ranks=3)) for one in optimizers)
    assert all(torch.equal(a, b) for one, two in zip(found, plain, strict=True) for a, b in zip(one, two, strict=True))


def test_rows_that_are_skipped_do_not_count_in_the_norm(pool: Pool) -> None:
    p = problem(2, (8, 3), 9, rows=40)
    skip = weft.SGD(lr=0.1, clip_norm=0.5, nonfinite="skip")
    found = of_tables(p, pool.run(_with_nan, p, skip, ranks=2))
    for (weight, *_), before in zip(found, p.weights, strict=True):
        assert weight.isfinite().all()
        assert not torch.equal(weight, before)


def _with_nan(group: dist.ProcessGroup, p: Problem, optimizer: EmbeddingOptimizer) -> list[list[torch.Tensor]]:
    class WithNan(Steps):
        def __iter__(self) -> Any:
            for step, upstream in super().__iter__():
                upstream[3] = torch.nan
                yield step, upstream

    return training.trained(group, WithNan(p, 1), optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_random_rounding_is_unbiased_and_repeats(pool: Pool, dtype: torch.dtype) -> None:
    """Rounding to nearest loses an update of a quarter of a unit in the last place. Stochastic rounding keeps it on
    average.
    """
    p = problem(1, (16, 32), 40, rows=4, dtype=dtype, longest=1)
    found = {}
    for world, seed in ((1, 5), (2, 5), (1, 6)):
        p = replace(p, rank_of_table=(0, world - 1), batch_sizes=even(40, world))
        found[world, seed] = of_tables(p, pool.run(_small_steps, p, seed, ranks=world))
    for one, other, reseeded in zip(found[1, 5], found[2, 5], found[1, 6], strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, reseeded)
    eps = torch.finfo(dtype).eps
    for weight, nearest in found[1, 5]:
        assert torch.equal(nearest, torch.ones_like(nearest))
        moved = (1 - weight[:4].double()) / eps
        # There are 16 steps of a quarter unit. Each changes the row by half a unit (the spacing below 1), or not at
        # all. So the sum is 4 with a standard deviation of 1.
        assert abs(float(moved.mean()) - 4) < 6 / moved.numel() ** 0.5
        assert 0.5 < float(moved.std()) < 1.5


def _small_steps(group: dist.ProcessGroup, p: Problem, seed: int) -> list[torch.Tensor]:
    """Return this rank's tables after 16 steps of a quarter of 1's unit in the last place, with stochastic rounding and
    with rounding to nearest.
    """
    rank, per_rounding = group.rank(), []
    for rounding in ("stochastic", "nearest"):
        weights = [torch.ones_like(weight) for weight in p.local_weights(rank)]
        rule = weft.SGD(lr=torch.finfo(p.sharding.dtype).eps / 4, rounding=rounding, seed=seed)  # type: ignore[arg-type]
        update = weft.embedding.FusedUpdate(rule, weights, device="cpu")
        ids = torch.arange(4).repeat(len(weights))
        sizes = [4] + [0] * (group.size() - 1)
        for _ in range(16):
            y = weft.embedding_all_to_all(
                weights, (ids, torch.arange(len(ids) + 1)), p.sharding, group=group, batch_sizes=sizes, update=update
            )
            y.backward(torch.ones_like(y))
        per_rounding.append(weights)
    return [torch.stack(pair) for pair in zip(*per_rounding, strict=True)]


def late_rate(group: dist.ProcessGroup, differs: bool) -> tuple[str, bool]:
    """Change the learning rate after the last backward of accumulate()."""
    group = own_group(group) if differs else group
    module = made(group, optimizer=weft.SGD(lr=0.1))
    before = state(module)
    features, upstream = batch(0, group.rank(), group.size())

    def step() -> None:
        with module.accumulate():
            module(features).values().backward(upstream)
            if group.rank() == 0 or not differs:
                module.fused_optimizer.param_groups[0]["lr"] = 0.2

    error = told(step)
    return error, all(torch.equal(before[name], now) for name, now in state(module).items())


def test_a_learning_rate_that_differs_at_the_end_of_accumulate_is_found(pool: Pool) -> None:
    for error, is_same in pool.run(late_rate, True, ranks=2, timeout_s=60):
        assert is_same
        assert "DisagreementError" in error
        assert "learning rate 0.2" in error
        assert "learning rate 0.1" in error
    assert [error for error, _ in pool.run(late_rate, False, ranks=2, timeout_s=60)] == ["nothing"] * 2


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"clip_value": 0.0}, "clip_value=0 would set every gradient to 0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0 must not be negative"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "pass only one of them"),
        ({"gradient_dtype": "fp8"}, "gradient_dtype='fp8' must be one of 'table', 'fp16', 'bf16'"),
        ({"rounding": "down"}, "rounding='down' must be one of 'nearest', 'stochastic'"),
        ({"seed": -1}, "seed=-1 must be from 0 to 2**63 - 1"),
    ],
)
def test_options_are_checked(numbers: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"must|pass|leave") as caught:
        weft.SGD(lr=0.1, **numbers)
    assert text in str(caught.value)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_rounded_once(pool: Pool, ranks: int, name: str, dtype: torch.dtype) -> None:
    p = problem(ranks, (8, 3, 16, 70), 13)
    assert pool.run(rounded_on_the_way, p, name, dtype, ranks=ranks) == [True] * ranks


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_vectors_are_rounded_once(pool: Pool, ranks: int, name: str, dtype: torch.dtype) -> None:
    p = problem(ranks, (8, 3, 16, 70), 13, weighted=True)
    for rank, found in enumerate(pool.run(narrowed, p, name, dtype, "auto", ranks=ranks)):
        assert_close(found, p, p.rows_of(rank), dtype=dtype)
