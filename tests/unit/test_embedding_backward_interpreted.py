"""The GPU part of embedding_all_to_all's backward under Triton's interpreter, without a GPU. One process runs all ranks
one after the other.

The exchange of gradients is not tested: each rank gets its columns of the whole gradient. See
`tests/support/interpreted.py`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from support import embedding_training as training
from support.embedding_training import assert_as_exact_as_torch, gradients_by_torch
from support.interpreted import play_all, wrong_in
from support.reference import Problem, problem, tables_of

import weft
from weft.embedding import EmbeddingBagConfig, EmbeddingOptimizer, FusedUpdate, JaggedInput
from weft.embedding.check import check_jagged
from weft.embedding.forward_call import ForwardCall, Tables
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import EmbeddingPlan

SHARED = (
    EmbeddingBagConfig(50, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(20, 3, "items", ("i",), "mean"),
    EmbeddingBagConfig(9, 16, "pairs", ("i", "u"), "mean"),
)


@dataclass(frozen=True)
class Case:
    """A case. optimizer: None to compute gradients of tables, dense and sparse, and of per-sample weights.

    bad: the number of rank 0's ids that are out of range. small: True to use 64-bit numbers, and small constants, with
    which short runs count as long.
    """

    p: Problem
    optimizer: EmbeddingOptimizer | None = None
    is_hot: bool = False
    bad: int = 0
    keyed: bool = False
    small: bool = False


FEW = problem(2, (8, 3), 7)
CASES: dict[str, Case] = {
    "any width": Case(problem(2, (8, 3, 1, 70), 6)),
    "few rows, widths apart": Case(problem(2, (8, 300), 12, rows=2, longest=60)),
    "weighted": Case(problem(3, (8, 3, 33), 7, weighted=True)),
    "features that share tables": Case(Problem(SHARED, (1, 0, 1), (4, 3), weighted=True)),
    "keys in another order": Case(Problem(SHARED, (1, 0, 1), (4, 3), weighted=True), keyed=True),
    "hashed int32": Case(problem(2, (8, 3), 7, hash=True, index_dtype=torch.int32, offset_dtype=torch.int32)),
    "hot rows": Case(problem(1, (8, 33), 10, longest=150), is_hot=True),
    "very long runs, 64 bits": Case(
        Problem(SHARED, (1, 0, 1), (4, 3), longest=30, weighted=True), is_hot=True, small=True
    ),
    "very long runs, 64 bits, updated": Case(
        problem(2, (8, 16), 9, longest=40), weft.RowwiseAdagrad(lr=0.1), is_hot=True, small=True
    ),
    "bf16": Case(problem(2, (8, 12), 7, dtype=torch.bfloat16)),
    "wide": Case(problem(1, (1028, 4), 4)),
    "a rank without tables": Case(Problem(tables_of((8, 3)), (1, 1), (2, 3))),
    "an empty batch": Case(problem(2, (8, 4), 0)),
    "empty bags": Case(problem(2, (8, 4), 5, longest=0)),
    "bad ids": Case(FEW, bad=3),
    **{f"update by {one}": Case(FEW, one) for one in training.OPTIMIZERS},
    "hot rows updated": Case(problem(1, (8, 33), 10, longest=150), weft.RowwiseAdagrad(lr=0.1), is_hot=True),
    "fp16 updated": Case(problem(2, (8, 12), 7, dtype=torch.float16), weft.Adam(lr=0.1)),
    "lr 0": Case(FEW, weft.Adagrad(lr=0.0)),
    "skipped": Case(FEW, weft.RowwiseAdagrad(lr=0.1, nonfinite="skip")),
    "clipped": Case(FEW, weft.SGD(lr=0.1, clip_value=0.5)),
    "clipped by norm": Case(FEW, weft.Adagrad(lr=0.1, clip_norm=2.0)),
    "fp16 at random": Case(
        problem(1, (8, 12), 7, dtype=torch.float16), weft.SGD(lr=1e-4, rounding="stochastic", seed=3)
    ),
    "bf16 at random": Case(problem(1, (8, 12), 7, dtype=torch.bfloat16), weft.SGD(lr=1e-3, rounding="stochastic")),
}


OTHERS = ("rows of several tables", "data-parallel tables", "added by atomics")
SLOW = (
    "any width",
    "very long runs, 64 bits, updated",
    "weighted",
    "hot rows",
    "hashed int32",
    "a rank without tables",
    "hot rows updated",
)


def test_backward() -> None:
    """Run all cases in one test, because starting a process takes longer than most cases."""
    assert wrong_in(__file__, [name for name in (*CASES, *OTHERS) if name not in SLOW]) == {}


@pytest.mark.slow
def test_more_of_it() -> None:
    assert wrong_in(__file__, SLOW) == {}


def play(case: Case) -> None:
    from weft.runtime.cuda import embedding_backward as device
    from weft.runtime.cuda import embedding_runs as runs

    if case.small:
        constants = (device, "SEGMENT", 4), (runs, "SEGMENT", 4), (device, "_ROWS", 64), (runs, "MOST_32", 0)
        with contextlib.ExitStack() as patched:
            for module, name, value in constants:
                patched.enter_context(mock.patch.object(module, name, value))
            play(replace(case, small=False))
        return
    p = training.hot(case.p) if case.is_hot else case.p
    batch = sum(p.batch_sizes)
    upstream = torch.randn(batch, p.sharding.total_dim, generator=torch.Generator().manual_seed(5)).to(p.sharding.dtype)
    plan = EmbeddingPlan(p.sharding, EmbeddingOptions(hash=p.hash))
    dense: list[Any] = []
    sparse: list[Any] = []
    updated: list[list[torch.Tensor]] = []
    for rank in range(len(p.batch_sizes)):
        weights = [weight.clone() for weight in p.local_weights(rank)]
        jagged = _input_of(case, p, rank)
        checked = check_jagged(jagged, p.sharding, rank, p.batch_sizes, weights)
        columns = [upstream[:, slot.column : slot.column + slot.dim] for slot in p.sharding.local_slots(rank)]
        received = torch.cat(columns, 1).contiguous() if columns else upstream[:, :0]
        if case.optimizer is not None:
            for _ in range(2):
                _update(device, case.optimizer, weights, plan, rank, checked, jagged, received, updated)
            continue
        for found, is_sparse in ((dense, False), (sparse, True)):
            of = ForwardCall(plan, rank, checked, None, 1.0, is_sparse)
            found.append(device.gradients_of_tables(of, device.sorted_rows(of, jagged), received))
            if received.dtype != torch.float32:
                _check_other_dtypes(device, of, jagged, received)
        if p.weighted and not case.keyed:
            of_weights = device.gradients_of_weights(of, jagged, weights, received)
            training.assert_gradients_of_ranks_weights(p, rank, upstream, of_weights)
    if case.optimizer is not None:
        _check_updates(case, p, upstream, updated)
        return
    exact = gradients_by_torch(p, upstream, [weight.double() for weight in p.weights])
    in_fp32 = gradients_by_torch(p, upstream, [weight.float() for weight in p.weights])
    both = training.of_tables(p, dense), training.of_tables(p, sparse)
    if len(p.batch_sizes) > 1 and not case.bad:
        _check_bits_of_one_rank(p, both[0], upstream, device)
    for one, other, wanted, torchs, rows in zip(*both, exact, in_fp32, training.rows_read(p), strict=True):
        assert torch.equal(one, other.to_dense())
        if not case.bad:
            assert_as_exact_as_torch(one, torchs, wanted)
            assert torch.equal(other.indices()[0], rows.nonzero()[:, 0])


def _check_bits_of_one_rank(p: Problem, found: list[torch.Tensor], upstream: torch.Tensor, device: Any) -> None:
    """Check that gradients have the same bits for any placement of tables and any number of ranks."""
    bags = p.bags
    p = replace(p, rank_of_table=(0,) * len(p.tables), batch_sizes=(sum(p.batch_sizes),))
    p.__dict__["bags"] = bags  # with some rows that occur very often
    plan, jagged = EmbeddingPlan(p.sharding, EmbeddingOptions(hash=p.hash)), _input_of(Case(p), p, 0)
    of = ForwardCall(plan, 0, check_jagged(jagged, p.sharding, 0, p.batch_sizes, p.weights), None, 1.0, False)
    alone = device.gradients_of_tables(of, device.sorted_rows(of, jagged), upstream)
    assert all(torch.equal(one, two) for one, two in zip(found, alone, strict=True))


def _input_of(case: Case, p: Problem, rank: int) -> JaggedInput:
    if case.keyed:
        keyed = p.keyed(rank, sorted({slot.feature for slot in p.sharding.local_slots(rank)}, reverse=True))
        return JaggedInput(
            tuple(keyed.keys()), keyed.values(), keyed.offsets(), keyed.weights_or_none(), keyed.stride()
        )
    values, offsets, *weights = (tensor.clone() for tensor in p.tupled(rank))
    if case.bad and rank == 0:
        values[: case.bad] = torch.tensor([-1, 10**6, 2**40])[: case.bad]
    return JaggedInput(None, values, offsets, weights[0] if weights else None)


def _update(
    device: Any, optimizer: EmbeddingOptimizer, weights: list[torch.Tensor], plan: EmbeddingPlan, rank: int, checked: Any,
    jagged: JaggedInput, received: torch.Tensor, updated: list[list[torch.Tensor]],
) -> None:  # fmt: skip
    """Update fresh tables and states. The second update of a rank, with sorting ahead, must give the same bits as the
    first.
    """
    fresh = [weight.clone() for weight in weights]
    update = FusedUpdate(optimizer, fresh)
    states = [list(of_table.values()) for of_table in update.states]
    tables = Tables(optimizer, fresh, states, update.learning_rate, update.step)
    of = ForwardCall(plan, rank, checked, tables, 1.0, False)
    if optimizer.nonfinite == "skip" and received.numel():
        received = received.clone()
        received[0] = float("nan")  # bad gradients at both ends; the first bags are empty
        received[-1] = float("inf")
    update.step.add_(1)
    if len(updated) > rank:
        device.sort_ahead(of, jagged)
        assert of.sorted_ahead is not None
    rows, scale = device.sorted_rows(of, jagged), None
    assert of.sorted_ahead is None
    if optimizer.clip_norm is not None:
        scale = optimizer.clip_norm / device.sum_of_squares(of, tables, rows, received).sqrt()
    skipped = device.update(of, tables, rows, received, scale)
    if optimizer.rounding == "stochastic":
        _check_random_bits(of, tables, jagged, received, weights)
    if optimizer.nonfinite == "skip" and received.numel():
        assert int(skipped) > 0
        assert all(weight.isfinite().all() for weight in fresh)
        assert all(state.isfinite().all() for of_table in states for state in of_table)
    if len(updated) <= rank:
        updated.append(fresh)
    assert all(torch.equal(one, two) for one, two in zip(updated[rank], fresh, strict=True))


def _check_random_bits(
    of: ForwardCall, tables: Tables, jagged: JaggedInput, received: torch.Tensor, before: list[torch.Tensor]
) -> None:
    """Check that CPU processes use the same random bits for stochastic rounding. Their sums may differ in the last bit,
    so up to two elements may differ.
    """
    from weft.runtime.cpu import embedding_backward as cpu

    weights = [weight.clone() for weight in before]
    on_cpu = tables._replace(weights=weights)
    cpu.update(of, on_cpu, cpu.sorted_rows(of, jagged), received)
    pairs = list(zip(tables.weights, weights, strict=True))
    nearest = [weight.clone() for weight in before]
    plain = replace(tables.optimizer, rounding="nearest")
    cpu.update(of, tables._replace(optimizer=plain, weights=nearest), cpu.sorted_rows(of, jagged), received)
    assert sum(int((one != two).sum()) for one, two in pairs) <= 2
    assert sum(int((one != two).sum()) for one, two in zip(weights, nearest, strict=True)) > 5


def _check_updates(case: Case, p: Problem, upstream: torch.Tensor, updated: list[list[torch.Tensor]]) -> None:
    optimizer = case.optimizer
    assert optimizer is not None
    if optimizer.nonfinite == "skip" or optimizer.rounding == "stochastic":
        return
    found = training.of_tables(p, updated)
    if optimizer.lr == 0:
        assert all(torch.equal(one, two) for one, two in zip(found, p.weights, strict=True))
        return
    by_dtype = []
    for dtype in (torch.float64, torch.float32):
        weights = [weight.to(dtype) for weight in p.weights]
        grads = gradients_by_torch(p, upstream, weights)
        for rank in range(len(p.batch_sizes)):  # ranks do not communicate in this test, so each clips by its own norm
            own = p.sharding.local_tables(rank)
            for table, grad in zip(own, training.clipped(optimizer, [grads[table] for table in own]), strict=True):
                grads[table] = grad
        for weight, grad, rows in zip(weights, grads, training.rows_read(p), strict=True):
            training.Rule(optimizer, weight).apply(weight, grad + optimizer.weight_decay * weight, rows)
        by_dtype.append(weights)
    for one, exact, in_fp32 in zip(found, *by_dtype, strict=True):
        assert_as_exact_as_torch(one, in_fp32, exact)


def play_rows() -> None:
    """Update unpooled tables, several in one call, and compare with CPU processes."""
    from weft.runtime import embedding_rows as rows

    generator = torch.Generator().manual_seed(3)
    counts = {"a": (30, 4), "b": (25, 9), "c": (3, 4), "d": (0, 5)}
    given = []
    for number, (name, (count, dim)) in enumerate(counts.items()):
        table = EmbeddingBagConfig(11, dim, name, ("f",), dtype=torch.bfloat16)
        ids = torch.randint(-1, 12, (count,), generator=generator)
        given.append(rows.RowGradients(table, number, ids, torch.randn(count, dim, generator=generator)))
    rules = weft.Adam(lr=0.5), weft.SGD(lr=0.5, clip_norm=1.0), weft.SGD(lr=0.01, rounding="stochastic")
    for optimizer in rules:
        found = []
        for device in _devices(rows):
            weights = [torch.ones(one.table.num_embeddings, one.grads.shape[1], dtype=torch.bfloat16) for one in given]
            update = FusedUpdate(optimizer, weights)
            update.step.add_(1)
            states = [list(of_table.values()) for of_table in update.states]
            tables = Tables(optimizer, weights, states, update.learning_rate, update.step)
            with device:
                rows.update_rows(given, tables, 0.5, None, None) if optimizer.clip_norm is None else _clipped(
                    rows, given, tables
                )
            found.append([weight.float() for weight in weights] + [one for of_table in states for one in of_table])
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other, rtol=2**-7, atol=1e-5)
    sums = []
    for device in _devices(rows):
        with device:
            sums.append(rows.sums_of_equal(torch.tensor([2, 0, 2, 1, 2]), 3, torch.arange(10.0).view(5, 2)))
    assert torch.equal(sums[0], sums[1])
    assert sums[0].tolist() == [[2, 3], [6, 7], [12, 15]]


def _clipped(rows: Any, given: list[Any], tables: Tables) -> None:
    class Alone:
        def size(self) -> int:
            return 1

    rows.update_rows(given, tables, 0.5, Alone(), None)


def play_atomics() -> None:
    """Check SGD without a sort against float64. Bad ids, a learning rate of 0 and missing gradients must add nothing."""
    from weft.runtime.cuda import embedding_backward as device

    shared = Problem(SHARED, (0, 0, 0), (7,), longest=40, weighted=True)
    for p in (training.hot(shared), problem(1, (16, 16), 9, hash=True), problem(1, (8, 4), 5, longest=0)):
        plan, jagged = EmbeddingPlan(p.sharding, EmbeddingOptions(hash=p.hash)), _input_of(Case(p), p, 0)
        checked = check_jagged(jagged, p.sharding, 0, p.batch_sizes, p.weights)
        upstream = torch.randn(sum(p.batch_sizes), p.sharding.total_dim, generator=torch.Generator().manual_seed(5))
        grads = gradients_by_torch(p, upstream, [weight.double() for weight in p.weights])
        for rate, ok in ((0.5, None), (0.0, None), (0.5, 0), (0.5, 1)):
            weights = [weight.clone() for weight in p.weights]
            update = FusedUpdate(weft.SGD(lr=rate), weights, factor=0.25, deterministic=False)
            tables = Tables(update.optimizer, weights, [[] for _ in weights], update.learning_rate, update.step)
            of = ForwardCall(plan, 0, checked, tables, 0.25, False, deterministic=False)
            assert of.adds_each
            device.add_each(of, tables, jagged, upstream, None if ok is None else torch.tensor([ok]))
            for found, before, grad in zip(weights, p.weights, grads, strict=True):
                if rate == 0 or ok == 0:
                    assert torch.equal(found, before)
                else:
                    torch.testing.assert_close(
                        found.double(), before.double() - rate * 0.25 * grad, rtol=1e-5, atol=1e-5
                    )
    p = problem(1, (8, 3), 7)
    for bad, expected in ((0, False), (len(p.bags[p.sharding.slots[0].feature].values), True)):
        jagged = _input_of(Case(p), p, 0)
        jagged.values[:bad] = torch.tensor([-1, 10**6, 2**40]).repeat(bad)[:bad]
        plan, weights = EmbeddingPlan(p.sharding, EmbeddingOptions()), [weight.clone() for weight in p.weights]
        update = FusedUpdate(weft.SGD(lr=0.5), weights, deterministic=False)
        tables = Tables(update.optimizer, weights, [[] for _ in weights], update.learning_rate, update.step)
        checked = check_jagged(jagged, p.sharding, 0, p.batch_sizes, weights)
        of = ForwardCall(plan, 0, checked, tables, 1.0, False, deterministic=False)
        device.add_each(of, tables, jagged, torch.ones(7, p.sharding.total_dim))
        assert torch.equal(weights[0], p.weights[0]) == expected


def play_replicated() -> None:
    """Check the local gradients of data-parallel tables, and the flags of rows that were read, which sparse gradients need."""
    from weft.runtime import embedding_replicated as replicated

    shared, hashed = Problem(SHARED, (0, 0, 0), (7,)), problem(1, (8, 3), 7, hash=True)
    for p, bad in (
        (problem(1, (8, 3, 16), 7), 0), (problem(1, (8, 8, 4), 7), 0), (shared, 0), (shared, 2), (hashed, 0),
    ):  # fmt: skip
        jagged = _input_of(Case(p, bad=bad), p, 0)
        checked = check_jagged(jagged, p.sharding, 0, p.batch_sizes, p.weights)
        plan = EmbeddingPlan(p.sharding, EmbeddingOptions(hash=p.hash))
        upstream = torch.randn(7, p.sharding.total_dim, generator=torch.Generator().manual_seed(5))
        rows = torch.cat(training.rows_read(p)).float()
        exact = gradients_by_torch(p, upstream, [weight.double() for weight in p.weights])
        for sparse in (False, True):
            of = ForwardCall(plan, 0, checked, None, 0.5, sparse)
            found = []
            for device in _devices(replicated):
                with device:
                    found.append(replicated.local_gradients(of, jagged, upstream, 5))
            torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
            grads, flags = replicated.of_tables(found[0], p.sharding)
            count = len(rows) if sparse else 0
            assert len(found[0]) % 5 == 0
            assert len(flags) - count < 5
            assert not flags[count:].any()
            if bad:  # torch would refuse the ids
                continue
            for grad, wanted in zip(grads, exact, strict=True):
                torch.testing.assert_close(grad.double(), 0.5 * wanted, rtol=1e-5, atol=1e-6)
            assert torch.equal(flags[:count], rows[:count])


def _devices(module: Any) -> list[Any]:
    """Return two contexts, in which `module` computes like a GPU and like a CPU process."""
    from weft.runtime.cpu import embedding_backward as cpu
    from weft.runtime.cuda import embedding_backward as cuda

    return [mock.patch.object(module, "device_code", lambda _, one=one: one) for one in (cuda, cpu)]


def _check_other_dtypes(device: Any, of: ForwardCall, jagged: JaggedInput, received: torch.Tensor) -> None:
    """Check that 16-bit gradients give float32 gradients of tables, and update 16-bit tables in float32, as on CPU
    processes.
    """
    from weft.runtime.cpu import embedding_backward as cpu

    wide = [one.gradients_of_tables(of, one.sorted_rows(of, jagged), received, torch.float32) for one in (device, cpu)]
    for mine, other in zip(*wide, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    if of.sparse:
        return
    updated = []
    for one in (device, cpu):
        shapes = [of.plan.sharding.tables[index] for index in of.plan.sharding.local_tables(of.rank)]
        weights = [torch.ones(t.num_embeddings, t.embedding_dim, dtype=t.dtype) for t in shapes]
        update = FusedUpdate(weft.RowwiseAdagrad(lr=0.5), weights)
        states = [list(of_table.values()) for of_table in update.states]
        tables = Tables(update.optimizer, weights, states, update.learning_rate, update.step)
        own = replace(of, tables=tables)
        update.step.add_(1)
        one.update(own, tables, one.sorted_rows(own, jagged), received.float())
        squares = one.sum_of_squares(own, tables, one.sorted_rows(own, jagged), received.float())
        updated.append(([weight.float() for weight in weights], squares))
    for mine, other in zip(updated[0][0], updated[1][0], strict=True):
        torch.testing.assert_close(mine, other, rtol=torch.finfo(of.plan.sharding.dtype).eps, atol=0)
    torch.testing.assert_close(updated[0][1], updated[1][1], rtol=1e-5, atol=1e-9)


if __name__ == "__main__":
    others = dict(zip(OTHERS, (play_rows, play_replicated, play_atomics), strict=True))
    play_all({name: lambda case=case: play(case) for name, case in CASES.items()} | others)  # type: ignore[misc]
