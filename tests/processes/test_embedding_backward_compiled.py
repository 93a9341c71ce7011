"""Backward of embedding_all_to_all on CPU processes, compiled and in a dispatch mode of torch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import error_of
from support.reference import problem
from support.slow import slow
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft.embedding import FusedUpdate
from weft.launch import Pool


def counted_on_one_rank(group: dist.ProcessGroup) -> bool:
    """True if steps have the same bits while only the first rank counts FLOPs, and after that. Counting changes the code
    path in torch.
    """
    p, rank, found = problem(2, (8, 4, 16), 12), group.rank(), []
    for counts in (False, rank == 0, False):
        weights = [weight.clone() for weight in p.local_weights(rank)]
        update = FusedUpdate(weft.Adam(lr=0.1), weights)
        with FlopCounterMode(display=False) if counts else contextlib.nullcontext():
            for _ in range(2):
                y = weft.embedding_all_to_all(weights, p.tupled(rank), p.sharding, group=group, update=update)
                y.square().sum().backward()
        found.append(weights)
    return all(torch.equal(one, two) for others in found[1:] for one, two in zip(found[0], others, strict=True))


def test_a_rank_may_count_its_flops(pool: Pool) -> None:
    assert pool.run(counted_on_one_rank, ranks=2) == [True, True]


def compiled(group: dist.ProcessGroup, backend: str) -> list[bool]:
    """True if the dense gradients of two compiled calls have the bits of an eager call's gradients."""
    p, rank = problem(2, (8, 4, 16), 12), group.rank()
    weights = [weight.clone().requires_grad_() for weight in p.local_weights(rank)]

    def call(weights: list[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        features = values, offsets
        return 2 * weft.embedding_all_to_all(
            weights, features, p.sharding, group=group, batch_sizes=list(p.batch_sizes)
        )

    program, found = torch.compile(call, backend=backend, fullgraph=True), []
    for function in (call, program, program):
        function(weights, *p.tupled(rank)).square().sum().backward()
        found.append([weight.grad for weight in weights])
        for weight in weights:
            weight.grad = None
    return [all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True)) for other in found[1:]]


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_a_compiled_call_has_dense_gradients(backend: str) -> None:
    with Pool(2) as own:  # Dynamo stays loaded
        assert own.run(compiled, backend, timeout_s=200) == [[True, True]] * 2


def compiled_update(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    p, found = problem(1, (8, 4), 6), []
    weights = [weight.clone() for weight in p.weights]
    for options in ({"update": FusedUpdate(weft.SGD(lr=0.1), weights)}, {"sparse": True}):

        def call(values: torch.Tensor, offsets: torch.Tensor, options: dict[str, Any] = options) -> torch.Tensor:
            return weft.embedding_all_to_all(weights, (values, offsets), p.sharding, group=group, **options)

        found.append(error_of(lambda call=call: torch.compile(call, backend="aot_eager", fullgraph=True)(*p.tupled(0))))
    return found


@pytest.mark.slow
def test_a_compiled_program_refuses_what_it_does_not_know() -> None:
    with Pool(1) as own:
        ((update, sparse),) = own.run(compiled_update, timeout_s=100)
    assert "torch.compiler.disable" in update[1]
    assert "only dense gradients" in sparse[1]
