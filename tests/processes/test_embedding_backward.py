"""Backward of embedding_all_to_all on CPU processes, against torch's embedding_bag and optimizers in float64.

Cheapest first: gradients and updates; bits for any number of ranks, threads and delays; rows that occur very often,
empty batches, 16-bit tables; infinities, NaN and extreme numbers. Then refused calls, and ranks that are late, differ
or die in backward.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import assert_deadline, wait_for_failure
from support import embedding_training as training
from support.embedding_training import (
    CLIPPED,
    OPTIMIZERS,
    Steps,
    assert_as_exact_as_torch,
    gradients_by_torch,
    of_tables,
)
from support.on_ranks import assert_error, assert_errors, error_of
from support.reference import Problem, even, problem, tables_of
from support.slow import in_turn
from test_embedding_all_to_all import problems

import weft
from weft import symm
from weft.embedding import EmbeddingBagConfig, EmbeddingOptimizer, FusedUpdate
from weft.launch import Pool
from weft.runtime import embedding_backward
from weft.runtime.cpu.embedding_push import PushedGradients, pushed_on

SHARED = (
    EmbeddingBagConfig(50, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(20, 3, "items", ("i",), "mean"),
    EmbeddingBagConfig(9, 16, "pairs", ("i", "u"), "mean"),
)
PROBLEMS: dict[str, Any] = {
    "any width": lambda world: problem(world, (8, 3, 16, 1, 70), 21, longest=9),
    "weighted": lambda world: problem(world, (8, 3, 33), 13, weighted=True),
    "hashed int32": lambda world: problem(
        world, (8, 3), 13, hash=True, index_dtype=torch.int32, offset_dtype=torch.int32
    ),
    "wide": lambda world: problem(world, (1028, 2052, 4), 5),
    "features that share tables": lambda world: Problem(SHARED, tuple(i % world for i in (1, 0, 1)), even(11, world)),
    "uneven": lambda world: Problem(tables_of((8, 3, 16)), tuple(i % world for i in (2, 0, 2)), (7, 0, 4)[:world]),
    "a rank without tables": lambda world: Problem(tables_of((8, 3)), (world - 1,) * 2, even(9, world)),
    "one id a bag": lambda world: problem(world, (8, 4), 40, longest=1),
    "empty bags": lambda world: problem(world, (8, 4), 6, longest=0),
    "an empty batch": lambda world: problem(world, (8, 4), 0),
}


def assert_gradients(p: Problem, found: list[torch.Tensor], upstream: torch.Tensor) -> None:
    exact = gradients_by_torch(p, upstream, [weight.double() for weight in p.weights])
    in_fp32 = gradients_by_torch(p, upstream, [weight.float() for weight in p.weights])
    for grad, wanted, torchs in zip(found, exact, in_fp32, strict=True):
        assert_as_exact_as_torch(grad.to_dense(), torchs, wanted)


# --- gradients and updates ---


@pytest.mark.parametrize(("name", "world"), in_turn(PROBLEMS, [1, 2, 3]))
def test_gradients_of_tables(pool: Pool, name: str, world: int) -> None:
    steps = Steps(PROBLEMS[name](world))
    upstream = next(iter(steps))[1]
    for sparse in (False, True):
        found = of_tables(steps.p, [grads for grads, _ in pool.run(training.gradients, steps, sparse, ranks=world)])
        assert_gradients(steps.p, found, upstream)
        for grad, rows in zip(found, training.rows_read(steps.p), strict=True):
            assert grad.dtype == torch.float32
            if sparse:
                assert torch.equal(grad._indices()[0], rows.nonzero()[:, 0])  # each row occurs once, in ascending order


@settings(max_examples=10)
@given(p=problems(), sparse=st.booleans())
def test_gradients_of_any_problem(pool: Pool, p: Problem, sparse: bool) -> None:
    """Problems have any tables, owners, bags, dtypes, weights, and hashed ids.

    A sum of n products needs at most 2 n + 2 roundings to fp32, each relative to the sum of magnitudes, and one
    rounding to the tables' dtype.
    """
    step, upstream = next(iter(Steps(p)))
    found = of_tables(
        p, [grads for grads, _ in pool.run(training.gradients, Steps(p), sparse, ranks=len(p.batch_sizes))]
    )
    weights = [weight.double() for weight in p.weights]
    exact = gradients_by_torch(step, upstream, weights)
    count = sum(len(bags.values) for bags in step.bags.values())
    for bags in step.bags.values():
        bags.weights.abs_()
    magnitudes = gradients_by_torch(step, upstream.abs(), weights)
    limits = torch.finfo(p.sharding.dtype)
    for grad, wanted, magnitude in zip(found, exact, magnitudes, strict=True):
        bound = (2 * count + 2) * 2.0**-24 * magnitude + limits.eps / 2 * wanted.abs() + limits.smallest_normal
        assert ((grad.to_dense().double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("transport", ["put", "serial"])
def test_gradients_do_not_depend_on_the_transport(pool: Pool, transport: str) -> None:
    steps = Steps(problem(2, (8, 3, 16), 13))
    per_rank = [pool.run(_gradients_by, steps, one, ranks=2) for one in ("direct", transport)]
    for usual, other in zip(*per_rank, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(usual, other, strict=True))


def _gradients_by(group: dist.ProcessGroup, steps: Steps, transport: str) -> list[torch.Tensor]:
    return training.gradients(group, steps, transport=transport)[0]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_gradients_of_per_sample_weights(pool: Pool, pooling: str, world: int) -> None:
    tables = tuple(replace(table, pooling=pooling) for table in SHARED)
    p = Problem(tables, tuple(i % world for i in (1, 0, 1)), even(11, world), weighted=True)
    upstream = next(iter(Steps(p)))[1]
    per_rank = pool.run(training.gradients, Steps(p), False, True, ranks=world)
    assert_gradients(p, of_tables(p, [grads for grads, _ in per_rank]), upstream)
    training.assert_gradients_of_sample_weights(p, upstream, [found for _, found in per_rank])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # the default of torch.optim.Adagrad
@pytest.mark.parametrize(("optimizer", "world"), in_turn([*OPTIMIZERS, *CLIPPED], [3, 1, 2]), ids=str)
def test_updates(pool: Pool, optimizer: EmbeddingOptimizer, world: int) -> None:
    training.assert_updates(pool, world, optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_updates_of_16_bit_tables(pool: Pool, dtype: torch.dtype) -> None:
    training.assert_16_bit_updates(pool, (8, 3, 16), dtype)


def test_only_rows_that_a_batch_reads_change(pool: Pool) -> None:
    """This also holds with weight decay."""
    steps = Steps(problem(2, (8, 3), 5, rows=200), 1)
    found = of_tables(steps.p, pool.run(training.trained, steps, weft.Adam(lr=0.1, weight_decay=0.3), ranks=2))
    for (weight, *states), before, rows in zip(found, steps.p.weights, training.rows_read(steps.p), strict=True):
        assert 0 < int(rows.sum()) < 200
        assert torch.equal(weight[~rows], before[~rows])
        assert all(torch.equal(state[~rows], torch.zeros_like(state[~rows])) for state in states)
        assert (weight[rows] != before[rows]).any(1).all()


# --- bits ---


def bits(p: Problem, per_rank: list[Any]) -> list[torch.Tensor]:
    return [tensor for tensors in of_tables(p, per_rank) for tensor in tensors]


@pytest.mark.parametrize("dims", [(8, 3, 16, 1, 70), (64, 128)])
def test_bits_do_not_depend_on_ranks_placement_threads_or_delays(pool: Pool, dims: tuple[int, ...]) -> None:
    p = problem(1, dims, 24, longest=90)
    first = None
    for world, placement, threads in [(1, 0, 1), (1, 0, 3), (2, 0, 1), (3, 0, 2), (3, 1, 1), *[(2, 0, 1)] * 4]:
        ranks = tuple((i + placement) % world for i in range(len(dims)))
        steps = Steps(replace(p, rank_of_table=ranks, batch_sizes=even(24, world)), 2, is_hot=True)
        per_rank = pool.run(training.trained, steps, weft.RowwiseAdagrad(lr=0.1), 0.01, threads, ranks=world)
        found = bits(steps.p, per_rank)
        first = found if first is None else first
        assert all(torch.equal(one, two) for one, two in zip(first, found, strict=True)), (world, placement, threads)


def _with_slow_copies(group: dist.ProcessGroup, steps: Steps) -> list[list[torch.Tensor]]:
    """Train. Copies of gradients to their owners take a random time, and inboxes hold NaN before each exchange."""
    push = PushedGradients._push

    def slow(self: PushedGradients, *given: Any) -> None:
        time.sleep(random.random() * 0.03)
        push(self, *given)

    def poisoned(meet: Any) -> Any:
        def met(*given: Any) -> None:
            inbox = pushed_on(weft.symm.communicator(group, torch.device("cpu")))._inbox
            if inbox is not None:  # peers write here only after the rendezvous
                inbox.tensor(group.rank(), (inbox.nbytes // 4,), torch.float32).fill_(math.nan)
            meet(*given)

        return met

    with (
        mock.patch.object(PushedGradients, "_push", slow),
        mock.patch.object(embedding_backward, "_meet", poisoned(embedding_backward._meet)),
    ):
        return training.trained(group, steps, weft.RowwiseAdagrad(lr=0.1), 0.01)


@pytest.mark.parametrize("world", [2, 4])
def test_an_update_waits_for_the_gradients_of_all_ranks(pool: Pool, world: int) -> None:
    steps = Steps(problem(world, (8, 3, 16, 70), 21), 5)
    usual = bits(steps.p, pool.run(training.trained, steps, weft.RowwiseAdagrad(lr=0.1), ranks=world))
    found = bits(steps.p, pool.run(_with_slow_copies, steps, ranks=world))
    assert all(torch.equal(one, two) for one, two in zip(usual, found, strict=True))


def test_bits_repeat_on_cpu_without_the_promise_too(pool: Pool) -> None:
    steps, found = Steps(problem(2, (8, 3), 21, rows=40), is_hot=True), []
    for deterministic in (True, False):
        per_rank = pool.run(training.trained, steps, weft.SGD(lr=0.1), 0.0, 1, deterministic, ranks=2)
        found.append([weight for (weight,) in of_tables(steps.p, per_rank)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_learning_rate_of_zero_leaves_bits(pool: Pool) -> None:
    """The signs of zeros must not change either. Optimizer states do change."""
    p = problem(2, (8, 3), 9)
    for weight in p.weights:
        weight[::2] = -0.0
    for weight, state in pool.run(_without_learning, Steps(p), ranks=2):
        assert weight
        assert state


def _without_learning(group: dist.ProcessGroup, steps: Steps) -> tuple[bool, bool]:
    for weight in steps.p.weights:
        weight[::2] = -0.0
    found = training.trained(group, steps, weft.RowwiseAdagrad(lr=0.0))
    local = steps.p.local_weights(group.rank())
    same = [torch.equal(w.view(torch.int32), old.view(torch.int32)) for (w, _), old in zip(found, local, strict=True)]
    return all(same), all(bool(state.any()) for _, state in found)


def test_hot_rows(pool: Pool) -> None:
    """Gradients of rows that occur thousands of times are summed in segments."""
    steps = Steps(problem(2, (8, 3, 33), 60, longest=200), is_hot=True)
    step, upstream = next(iter(steps))
    found = of_tables(steps.p, [grads for grads, _ in pool.run(training.gradients, steps, ranks=2)])
    assert all(int((grad != 0).any(1).sum()) > 1 for grad in found)
    assert_gradients(step, found, upstream)


def test_adam_and_adagrad_are_torchs_where_a_batch_reads_all_rows(pool: Pool) -> None:
    """The optimizers use weight decay and a non-default eps."""
    steps = Steps(problem(2, (8, 3), 40, rows=3, longest=9))
    rules = {
        weft.Adam(lr=0.1, beta1=0.5, beta2=0.8, eps=1e-2, weight_decay=0.1): torch.optim.Adam,
        weft.Adagrad(lr=0.1, eps=1e-2, weight_decay=0.1): torch.optim.Adagrad,
    }
    for ours, theirs in rules.items():
        leaves = [weight.double().requires_grad_() for weight in steps.p.weights]
        numbers = dict(ours.numbers)
        betas = {"betas": (numbers.pop("beta1"), numbers.pop("beta2"))} if "beta1" in numbers else {}
        optimizer = theirs(leaves, lr=ours.lr, **numbers, **betas)
        for step, upstream in steps:
            assert all(rows.all() for rows in training.rows_read(step))
            for leaf, grad in zip(leaves, gradients_by_torch(step, upstream, leaves), strict=True):
                leaf.grad = grad
            optimizer.step()
        found = of_tables(steps.p, pool.run(training.trained, steps, ours, ranks=2))
        for (weight, *_), wanted in zip(found, leaves, strict=True):
            torch.testing.assert_close(weight.double(), wanted.detach(), rtol=1e-5, atol=1e-5)


# --- extreme numbers ---


def with_bad_numbers(group: dist.ProcessGroup, nonfinite: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Update two rows. One row gets a gradient with an infinity. One id is out of range."""
    weight = torch.ones(4, 2)
    tables = weft.place_tables([EmbeddingBagConfig(4, 2, "t", ("f",))], 1)
    update = FusedUpdate(weft.RowwiseAdagrad(lr=0.5, nonfinite=nonfinite), [weight])
    features = torch.tensor([1, 2, 1, 7]), torch.tensor([0, 1, 2, 4])
    y = weft.embedding_all_to_all([weight], features, tables, group=group, update=update)
    y.backward(torch.tensor([[1.0, 1.0], [float("inf"), 1.0], [1.0, 1.0]]))
    return weight, update.states[0]["momentum1"]


@pytest.mark.filterwarnings("ignore:.*out of range")
def test_nonfinite_gradients_and_ids_out_of_range(pool: Pool) -> None:
    for nonfinite in ("skip", "propagate"):
        ((weight, state),) = pool.run(with_bad_numbers, nonfinite, ranks=1)
        assert torch.equal(weight[[0, 3]], torch.ones(2, 2))
        torch.testing.assert_close(weight[1], torch.full((2,), 0.5))
        assert float(state[1]) == 4.0
        if nonfinite == "skip":
            assert torch.equal(weight[2], torch.ones(2))
            assert float(state[2]) == 0
        else:
            assert weight[2].isnan().any()


# --- autograd ---


def test_a_second_backward_of_an_update_is_an_error_that_names_it(pool: Pool) -> None:
    training.assert_backward_once(pool)


def accumulates(group: dist.ProcessGroup) -> bool:
    p, rank = problem(2, (8, 4), 6), group.rank()
    weights = [weight.clone().requires_grad_() for weight in p.local_weights(rank)]
    y = weft.embedding_all_to_all(weights, p.tupled(rank), p.sharding, group=group)
    y.sum().backward(retain_graph=True)
    once = [weight.grad.clone() for weight in weights if weight.grad is not None]
    y.sum().backward()
    return len(once) == len(weights) and all(torch.equal(w.grad, 2 * g) for w, g in zip(weights, once, strict=True))


def test_gradients_accumulate_without_an_update(pool: Pool) -> None:
    assert pool.run(accumulates, ranks=2) == [True, True]


def updates_between(group: dist.ProcessGroup) -> bool:
    """Make two forwards, then both backwards. The result equals two steps, because gradients do not depend on pooled
    vectors.
    """
    p, rank = problem(2, (8, 4), 6), group.rank()
    both = []
    for together in (True, False):
        weights = [weight.clone() for weight in p.local_weights(rank)]
        update = FusedUpdate(weft.SGD(lr=0.1), weights)
        call = (weights, p.tupled(rank), p.sharding)
        if together:
            first = weft.embedding_all_to_all(*call, group=group, update=update, outputs=4)
            second = weft.embedding_all_to_all(*call, group=group, update=update, outputs=4)
            first.sum().backward()
            second.sum().backward()
        else:
            for _ in range(2):
                weft.embedding_all_to_all(*call, group=group, update=update, outputs=4).sum().backward()
        both.append(weights)
    return all(torch.equal(one, two) for one, two in zip(*both, strict=True))


def test_calls_may_be_made_before_earlier_ones_go_back(pool: Pool) -> None:
    assert pool.run(updates_between, ranks=2) == [True, True]


def without_gradients(group: dist.ProcessGroup) -> tuple[str, str]:
    p, rank = problem(2, (8, 4), 6), group.rank()
    weights = [weight.clone() for weight in p.local_weights(rank)]
    with torch.no_grad():
        y = weft.embedding_all_to_all(
            weights, p.tupled(rank), p.sharding, group=group, update=FusedUpdate(weft.SGD(lr=0.1), weights)
        )
    return error_of(lambda: y.sum().backward())


def test_backward_of_a_call_without_gradients_is_torchs_error(pool: Pool) -> None:
    assert_errors(pool.run(without_gradients, ranks=2), "RuntimeError", "does not require grad")


# --- ranks that differ, are late, or die ---


def differs(group: dist.ProcessGroup, what: str) -> tuple[str, str]:
    own = dist.new_group([0, 1])
    p, other = problem(2, (8, 4), 6), own.rank() == 1
    weights = [weight.clone() for weight in p.local_weights(own.rank())]
    update: FusedUpdate | None = FusedUpdate(weft.SGD(lr=0.1), weights)
    assert update is not None

    def call(**options: Any) -> torch.Tensor:
        given = {"update": update} | options
        return weft.embedding_all_to_all(weights, p.tupled(own.rank()), p.sharding, group=own, deadline_s=30.0, **given)

    def make() -> None:
        if what == "optimizer" and other:
            call(update=FusedUpdate(weft.RowwiseAdagrad(lr=0.1), weights)).sum().backward()
            return
        call().sum().backward()
        if what == "learning rate" and other:
            update.lr = 0.2
        if what == "factor":
            given = [{"update": FusedUpdate(weft.SGD(lr=0.1), weights, factor=factor)} for factor in (1.0, 0.5)]
            call(**given[0]).sum().backward()
            call(**given[1]).sum().backward()
            call(**given[other]).sum().backward()
        one, two = call(outputs=4), call(outputs=4)
        (two if what == "order" and other else one).sum().backward()

    found = error_of(make)
    dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("optimizer", "SGD.*RowwiseAdagrad"),
        ("learning rate", r"learning rate 0\.1.*learning rate 0\.2"),
        ("factor", r"factor 1\.0.*factor 0\.5"),
        ("order", r"backward of the call at rendezvous (\d+); rank 1: backward of the call at rendezvous (?!\1\b)\d+"),
    ],
)
def test_ranks_that_would_update_differently_get_an_error(pool: Pool, what: str, text: str) -> None:
    for kind, said in pool.run(differs, what, ranks=2):
        assert kind == "DisagreementError", said
        assert re.search(text, said, re.DOTALL), said


def skips(group: dist.ProcessGroup, what: str) -> tuple[str, str]:
    """Let rank 1 skip its backward until rank 0 has given up, or be killed in it."""
    p, rank = problem(2, (8, 4), 6), group.rank()
    weights = [weight.clone() for weight in p.local_weights(rank)]
    update = FusedUpdate(weft.SGD(lr=0.1), weights)
    y = weft.embedding_all_to_all(weights, p.tupled(rank), p.sharding, group=group, update=update, deadline_s=5.0)
    before = [weight.clone() for weight in weights]
    if rank == 1 and what == "is killed":
        y.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    if rank == 1 and what == "skips":
        wait_for_failure(symm.communicator(group, "cpu"))
        return error_of(lambda: weft.embedding_all_to_all(weights, p.tupled(rank), p.sharding, group=group))
    found = error_of(lambda: y.sum().backward())
    assert all(torch.equal(one, two) for one, two in zip(weights, before, strict=True))
    return found


def test_a_rank_that_leaves_out_backward_is_named() -> None:
    with Pool(2) as own:
        errors = own.run(skips, "skips", ranks=2, timeout_s=60)
    assert_deadline(errors, "backward of embedding_all_to_all")


def test_a_rank_that_dies_in_backward_is_named() -> None:
    with Pool(2) as own:
        found = own.run(skips, "is killed", ranks=2, timeout_s=60, return_exceptions=True)
    assert_error(found[0], ("PeerLostError", "PoisonedGroupError"), "rank 1")


def test_a_straggler_is_waited_for(pool: Pool) -> None:
    training.assert_straggler_awaited(pool)
