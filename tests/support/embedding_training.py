"""Training of embedding tables: the code that runs on the ranks, and the same training in one process with torch in any
dtype.

A rank uses a GPU if its group uses NCCL. The reference applies `torch.optim` if torch has the optimizer's rule, with
sparse gradients if only rows that a batch reads may change. It implements the other rules itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from support.on_ranks import assert_errors, error_of
from support.reference import Problem, _pooled, problem

import weft
from weft.embedding import EmbeddingOptimizer, FusedUpdate
from weft.launch import Pool

OPTIMIZERS: tuple[EmbeddingOptimizer, ...] = (
    weft.SGD(lr=0.1),
    weft.RowwiseAdagrad(lr=0.1),
    weft.Adagrad(lr=0.1),
    weft.Adam(lr=0.02),
    weft.PartialRowwiseAdam(lr=0.02),
    weft.SGD(lr=0.1, weight_decay=0.05),
    weft.RowwiseAdagrad(lr=0.1, weight_decay=0.05, eps=1e-3),
    weft.Adam(lr=0.02, beta1=0.5, beta2=0.7, eps=1e-3, weight_decay=0.05),
)
CLIPPED: tuple[EmbeddingOptimizer, ...] = (
    weft.SGD(lr=0.1, clip_value=0.3),
    weft.Adagrad(lr=0.1, clip_value=0.3, weight_decay=0.05),
    weft.SGD(lr=0.1, clip_norm=2.0),
    weft.Adam(lr=0.1, clip_norm=2.0),
    weft.RowwiseAdagrad(lr=0.1, clip_norm=1e6),
)


@dataclass(frozen=True)
class Steps:
    """`count` training steps. Each step has a batch of the problem `p`, with new ids and a new upstream gradient.

    is_hot: True to give almost all ids the same value.
    """

    p: Problem
    count: int = 3
    is_hot: bool = False

    def __iter__(self) -> Any:
        for number in range(self.count):
            step = replace(self.p, seed=self.p.seed + 100 * number)
            step = hot(step) if self.is_hot else step
            generator = torch.Generator().manual_seed(number)
            upstream = torch.randn(sum(self.p.batch_sizes), self.p.sharding.total_dim, generator=generator)
            yield step, upstream.to(self.p.sharding.dtype)


def device_of(group: dist.ProcessGroup) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]


def trained(
    group: dist.ProcessGroup, steps: Steps, optimizer: EmbeddingOptimizer, delay_s: float = 0.0, threads: int = 1,
    deterministic: bool = True, **options: Any,
) -> list[list[torch.Tensor]]:  # fmt: skip
    """Train. Return this rank's tables with their optimizer states."""
    p, rank, device = steps.p, group.rank(), device_of(group)
    weights = [weight.clone() for weight in on(device, p.local_weights(rank))]
    update = FusedUpdate(optimizer, weights, deterministic=deterministic, device=device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for step, upstream in steps:
        time.sleep(random.random() * delay_s)
        y = weft.embedding_all_to_all(
            weights, tuple(on(device, step.tupled(rank))), p.sharding, group=group, batch_sizes=p.batch_sizes, hash=p.hash,
            update=update, deadline_s=30.0, **options,
        )  # fmt: skip
        time.sleep(random.random() * delay_s)
        y.backward(upstream[p.rows_of(rank)].to(device))
    torch.set_num_threads(before)
    return [
        [weight.cpu(), *(s.cpu() for s in states.values())]
        for weight, states in zip(weights, update.states, strict=True)
    ]


def _call(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Make a small call whose backward updates tables. Return (this rank's tables, result)."""
    p, rank, device = problem(2, (8, 4), 6), group.rank(), device_of(group)
    weights = [weight.clone() for weight in on(device, p.local_weights(rank))]
    update = FusedUpdate(weft.SGD(lr=0.1), weights)
    features = tuple(on(device, p.tupled(rank)))
    return weights, weft.embedding_all_to_all(weights, features, p.sharding, group=group, update=update)


def goes_back_twice(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    found = []
    for retain in (True, False):
        weights, y = _call(group)
        y.sum().backward(retain_graph=retain)
        after = [weight.clone() for weight in weights]
        found.append(error_of(lambda y=y: y.sum().backward()))
        assert all(torch.equal(one, two) for one, two in zip(weights, after, strict=True))
    return found


def assert_backward_once(pool: Pool) -> None:
    """Assert that a second backward of a call is an error that names the call."""
    for errors in pool.run(goes_back_twice, ranks=2, timeout_s=60):
        kinds = "BackwardError", "RefusedError"  # on GPUs, and on CPU
        assert_errors(errors, kinds, "second backward of the same call of embedding_all_to_all", "Sum the losses")


def straggles(group: dist.ProcessGroup) -> list[torch.Tensor]:
    weights, y = _call(group)
    time.sleep(0.5 * group.rank())
    y.sum().backward()
    return [weight.cpu() for weight in weights]


def assert_straggler_awaited(pool: Pool) -> None:
    """Assert that updates contain the gradients of a rank that comes late."""
    p = problem(2, (8, 4), 6)
    found = of_tables(p, pool.run(straggles, ranks=2, timeout_s=60))
    ones = torch.ones(6, p.sharding.total_dim)
    for weight, before, grad in zip(found, p.weights, gradients_by_torch(p, ones, list(p.weights)), strict=True):
        torch.testing.assert_close(weight, before - 0.1 * grad)


def rounded_on_the_way(
    group: dist.ProcessGroup, p: Problem, name: str, dtype: torch.dtype, transport: Any = "auto"
) -> bool:
    """True if gradients that are sent in 16 bits give the same tables as gradients that are rounded to 16 bits before
    sending.
    """
    device, found = device_of(group), []
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(sum(p.batch_sizes), p.sharding.total_dim, generator=generator)[p.rows_of(group.rank())]
    for is_rounded in (False, True):
        weights = [weight.clone() for weight in on(device, p.local_weights(group.rank()))]
        optimizer = weft.RowwiseAdagrad(lr=0.1, gradient_dtype="table" if is_rounded else name)  # type: ignore[arg-type]
        update = FusedUpdate(optimizer, weights, device=device)
        for scale in (1.0, 1e-3):
            given = weights, tuple(on(device, p.tupled(group.rank()))), p.sharding
            y = weft.embedding_all_to_all(
                *given, group=group, batch_sizes=p.batch_sizes, update=update, transport=transport
            )
            grad = scale * upstream
            y.backward((grad.to(dtype).float() if is_rounded else grad).to(device))
        found.append([*weights, *update.tensors])
    return all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def narrowed(group: dist.ProcessGroup, p: Problem, name: str, dtype: torch.dtype, transport: str) -> torch.Tensor:
    """Return this rank's pooled vectors with `output_dtype=name`. Check that backward gives the same tables as with
    float32 vectors.
    """
    device, found, out = device_of(group), [], torch.empty(0)
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(sum(p.batch_sizes), p.sharding.total_dim, generator=generator)[p.rows_of(group.rank())]
    upstream = upstream.to(device, dtype)
    for output in ("table", name):
        weights = [weight.clone() for weight in on(device, p.local_weights(group.rank()))]
        update = FusedUpdate(weft.RowwiseAdagrad(lr=0.1), weights, device=device)
        values, offsets, *of_values = on(device, p.tupled(group.rank()))
        of_values = [one.clone().requires_grad_() for one in of_values]
        y = weft.embedding_all_to_all(
            weights, (values, offsets, *of_values), p.sharding, group=group, batch_sizes=p.batch_sizes, update=update,
            transport=transport, output_dtype=output,  # type: ignore[arg-type]
        )  # fmt: skip
        out = y.detach().cpu()
        y.backward(upstream.to(y.dtype))
        found.append([*weights, *update.tensors, *[one.grad for one in of_values]])
    assert out.dtype == dtype
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    return out


def gradients(
    group: dist.ProcessGroup, steps: Steps, sparse: bool = False, of_per_sample: bool = False, **options: Any
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return this rank's gradients of the first step: of its tables, and of per-sample weights."""
    p, rank, device = steps.p, group.rank(), device_of(group)
    weights = [weight.clone().requires_grad_() for weight in on(device, p.local_weights(rank))]
    step, upstream = next(iter(steps))
    values, offsets, *of_values = on(device, step.tupled(rank))
    if of_per_sample:
        of_values = [of_values[0].clone().requires_grad_()]
    y = weft.embedding_all_to_all(
        weights, (values, offsets, *of_values), p.sharding, group=group, batch_sizes=p.batch_sizes, hash=p.hash,
        sparse=sparse, requires_grad=True, deadline_s=30.0, **options,
    )  # fmt: skip
    y.backward(upstream[p.rows_of(rank)].to(device))
    found = [weight.grad for weight in weights]
    assert all(grad is not None and grad.is_sparse == sparse for grad in found)
    per_sample = of_values[0].grad if of_values else None
    return [grad.cpu() for grad in found if grad is not None], None if per_sample is None else per_sample.cpu()


def of_tables(p: Problem, per_rank: Sequence[Sequence[Any]]) -> list[Any]:
    """Return an entry for each table, in the order of all tables. per_rank: for each rank, the entries of its tables."""
    by_table = {
        table: one
        for rank, found in enumerate(per_rank)
        for table, one in zip(p.sharding.local_tables(rank), found, strict=True)
    }
    return [by_table[table] for table in range(len(p.tables))]


def gradients_by_torch(p: Problem, upstream: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the dense gradients of all tables, in the dtype of `weights`."""
    leaves = [weight.detach().clone().requires_grad_() for weight in weights]
    _pooled(p, leaves).backward(upstream.to(leaves[0].dtype))
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def rows_read(p: Problem) -> list[torch.Tensor]:
    """Return a flag for each row of each table: True if the batch reads it."""
    found = [torch.zeros(table.num_embeddings, dtype=torch.bool) for table in p.tables]
    for slot in p.sharding.slots:
        ids = p.bags[slot.feature].values.to(p.index_dtype)
        found[slot.table][weft.embedding.hash_ids(ids, len(found[slot.table])) if p.hash else ids.long()] = True
    return found


def trained_by_torch(steps: Steps, optimizer: EmbeddingOptimizer, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return all tables after the steps, computed in `dtype`."""
    weights = [weight.to(dtype, copy=True) for weight in steps.p.weights]
    rules = [Rule(optimizer, weight) for weight in weights]
    for step, upstream in steps:
        grads = clipped(optimizer, gradients_by_torch(step, upstream, weights))
        for rule, weight, grad, rows in zip(rules, weights, grads, rows_read(step), strict=True):
            rule.apply(weight, grad + optimizer.weight_decay * weight, rows)
    return weights


def clipped(optimizer: EmbeddingOptimizer, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of all tables, clipped as torch.nn.utils does it."""
    leaves = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad.clone()
    if optimizer.clip_value is not None:
        torch.nn.utils.clip_grad_value_(leaves, optimizer.clip_value)
    if optimizer.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(leaves, optimizer.clip_norm)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


class Rule:
    """An optimizer's rule for the rows of one table that a batch reads."""

    def __init__(self, optimizer: EmbeddingOptimizer, weight: torch.Tensor) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.first, self.second = torch.zeros_like(weight), torch.zeros_like(weight)
        self.parameter = torch.nn.Parameter(weight)
        lr, numbers = optimizer.lr, optimizer.numbers
        self.by_torch: torch.optim.Optimizer | None = None
        if isinstance(optimizer, weft.SGD):
            self.by_torch = torch.optim.SGD([self.parameter], lr)
        elif isinstance(optimizer, weft.Adagrad):
            self.by_torch = torch.optim.Adagrad([self.parameter], lr, eps=numbers["eps"])

    def apply(self, weight: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
        self.steps += 1
        if self.by_torch is not None:
            at = rows.nonzero().t()
            self.parameter.grad = torch.sparse_coo_tensor(
                at, grad[rows], grad.shape, is_coalesced=True, check_invariants=False
            )
            self.by_torch.step()
            weight.copy_(self.parameter.detach())
            return
        numbers, mean = self.optimizer.numbers, (grad * grad).mean(1, keepdim=True).expand_as(grad)
        if isinstance(self.optimizer, weft.RowwiseAdagrad):
            self.first[rows] += mean[rows]
            direction = grad / (self.first.sqrt() + numbers["eps"])
        else:
            beta1, beta2 = numbers["beta1"], numbers["beta2"]
            self.first[rows] = (beta1 * self.first + (1 - beta1) * grad)[rows]
            square = grad * grad if isinstance(self.optimizer, weft.Adam) else mean
            self.second[rows] = (beta2 * self.second + (1 - beta2) * square)[rows]
            unbiased = self.second / (1 - beta2**self.steps)
            direction = self.first / (1 - beta1**self.steps) / (unbiased.sqrt() + numbers["eps"])
        weight[rows] -= self.optimizer.lr * direction[rows]


def assert_as_exact_as_torch(found: torch.Tensor, in_fp32: torch.Tensor, exact: torch.Tensor) -> None:
    """Check the error against float64. It may be twice torch's error in float32, plus one rounding to the dtype of
    `found`.
    """
    error, torchs = float((found.double() - exact).norm()), float((in_fp32.double() - exact).norm())
    rounding = torch.finfo(found.dtype).eps / 2 * float(exact.norm())
    assert error <= 2 * torchs + rounding, f"off by {error:.3g} where torch in float32 is off by {torchs:.3g}"


def assert_updates(pool: Pool, world: int, optimizer: EmbeddingOptimizer) -> None:
    """Train tables of several widths on `world` ranks, and compare the tables with those of torch."""
    steps = Steps(replace(problem(world, (8, 3, 16, 1, 70), 21, rows=40), seed=7))
    found = of_tables(steps.p, pool.run(trained, steps, optimizer, ranks=world, timeout_s=120))
    exact, in_fp32 = (trained_by_torch(steps, optimizer, dtype) for dtype in (torch.float64, torch.float32))
    for (weight, *_), wanted, torchs in zip(found, exact, in_fp32, strict=True):
        assert_as_exact_as_torch(weight, torchs, wanted)


def assert_16_bit_updates(pool: Pool, dims: tuple[int, ...], dtype: torch.dtype) -> None:
    """Train tables of 16 bits. Sums and states are float32, and a row is rounded once per step."""
    steps, optimizer = Steps(problem(2, dims, 21, dtype=dtype), 1), weft.RowwiseAdagrad(lr=0.1)
    found = of_tables(steps.p, pool.run(trained, steps, optimizer, ranks=2, timeout_s=120))
    for (weight, state), wanted in zip(found, trained_by_torch(steps, optimizer, torch.float64), strict=True):
        assert (weight.dtype, state.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(weight.double(), wanted, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-5)


def assert_gradients_of_sample_weights(p: Problem, upstream: torch.Tensor, per_rank: Sequence[torch.Tensor]) -> None:
    """Compare the gradients of each rank's per-sample weights with sums in float64."""
    for rank, found in enumerate(per_rank):
        assert_gradients_of_ranks_weights(p, rank, upstream, found)


def assert_gradients_of_ranks_weights(p: Problem, rank: int, upstream: torch.Tensor, found: torch.Tensor) -> None:
    """Compare the gradients of the per-sample weights of one rank with sums in float64."""
    wanted = [torch.zeros(0, dtype=torch.float64)]
    for slot in p.sharding.local_slots(rank):
        bags, weight = p.bags[slot.feature], p.weights[slot.table].double()
        grad = upstream.double()[:, slot.column : slot.column + slot.dim]
        if p.tables[slot.table].pooling == "mean":
            grad = grad / bags.lengths.clamp(min=1)[:, None]
        wanted.append((weight[bags.values] * grad.repeat_interleave(bags.lengths, 0)).sum(1))
    torch.testing.assert_close(found.double(), torch.cat(wanted), rtol=1e-5, atol=1e-5)


def hot(p: Problem) -> Problem:
    """Give almost all ids of `p` the same value. Return `p`."""
    for bags in p.bags.values():
        bags.values[torch.arange(len(bags.values)) % 97 != 0] = 3
    return p
