"""Errors of one rank in backward: it has changed a saved tensor in place, or fails in a part of backward in which ranks do
not communicate. Also a graph that every rank has freed.

Every rank must learn of the error in its own backward or in its next call, and the group stays usable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from operators_called import Features
from support.on_ranks import own_group, told, waits_end_after
from test_second_derivatives import CALLS

import weft
from weft.embedding import DataParallel
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.ops.tensor_parallel import gathered_columns
from weft.parallel.functions import AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A differentiable call. node: the name of its autograd node. saved: the place of the changed tensor in `saved_tensors`."""

    made: Callable[[dist.ProcessGroup], Call]
    node: str
    saved: int = 0


def operator(name: str, compiled: bool) -> Callable[[dist.ProcessGroup], Call]:
    def made(group: dist.ProcessGroup) -> Call:
        call: Any = CALLS[name](group)
        if compiled:
            call = torch.compile(call, backend="eager")
        x, w = (torch.ones(shape, requires_grad=True) for shape in ((4, 8), (1, 8, 3)))
        # All tokens go to rank 0, and the rows of rank 1 are not written.
        written = slice(0) if name == "all_to_all_matmul" and group.rank() else slice(None)
        return lambda: call(x, w)[written]

    return made


def function(kind: type[torch.autograd.Function], weights: int, *more: None) -> Callable[[dist.ProcessGroup], Call]:
    def made(group: dist.ProcessGroup) -> Call:
        x, w = torch.ones(4, 8, requires_grad=True), [torch.ones(4, 8) for _ in range(weights)]

        def call() -> torch.Tensor:
            y = kind.apply(x, *w, *more, group, group.group_name)  # type: ignore[no-untyped-call]
            return y if weights == 1 else y[0] + y[1]  # type: ignore[no-any-return]

        return call

    return made


def mlp(group: dist.ProcessGroup) -> Call:
    torch.manual_seed(0)
    layer, x = weft.nn.ParallelMLP(8, 12, sequence_dim=None, group=group), torch.ones(2, 4, 8, requires_grad=True)
    return lambda: layer(x)


def columns(group: dist.ProcessGroup) -> Call:
    weight, x = torch.ones(16, 8, requires_grad=True), torch.ones(2, 4, 8, requires_grad=True)
    return lambda: gathered_columns(x, weight, group.group_name)


def pooled(placement: Any, **options: Any) -> Callable[[dist.ProcessGroup], Call]:
    def made(group: dist.ProcessGroup) -> Call:
        tables = [weft.EmbeddingBagConfig(10, 4, "users", ("u",)), weft.EmbeddingBagConfig(20, 4, "items", ("i",))]
        module = ShardedEmbeddingBagCollection(
            tables, group=group, placement=[placement] * 2, is_weighted=True, **options
        )
        weights = torch.ones(6, requires_grad=True)
        return lambda: module(Features(torch.arange(6), torch.tensor([1, 2, 0, 3]), weights)).values()

    return made


CASES = {
    **{name: Case(operator(name, False), "_Function") for name in CALLS},
    **{
        f"{name}, compiled": Case(operator(name, True), f"GeneratedBackwardFor_weft_{name}")
        for name in CALLS
        if "," not in name
    },
    "AllGatherLinear": Case(function(AllGatherLinear, 1, None), "AllGatherLinear"),
    "AllGatherLinearMulti": Case(function(AllGatherLinearMulti, 2), "AllGatherLinearMulti"),
    "LinearReduceScatter": Case(function(LinearReduceScatter, 1, None), "LinearReduceScatter"),
    "columns": Case(mlp, "_Columns", 1),
    "row": Case(mlp, "_Row", 1),
    "gathered columns": Case(columns, "_GatheredColumns", 1),
    "pooling": Case(pooled(1), "_Function"),
    "weights of ids": Case(pooled(1), "_Arrived"),
    "data parallel": Case(pooled(DataParallel()), "_Pooled"),
    "distinct rows": Case(pooled(1, dedup=True), "_Pooled"),
}


def node_of(y: torch.Tensor, name: str) -> Any:
    """Return the first node of the graph of `y` whose name begins with `name`."""
    nodes = [y.grad_fn]
    for node in nodes:
        if node is not None and type(node).__name__.startswith(name):
            return node
        nodes += [following for following, _ in node.next_functions] if node is not None else []
    raise AssertionError(f"no {name} among {nodes}")


def changed(group: dist.ProcessGroup, name: str) -> tuple[str, str, bool]:
    """Return the errors of backward if rank 1 has changed a saved tensor, and if every rank has freed the graph. Also return
    True if a later call gives the first call's result.
    """
    case = CASES[name]
    call = case.made(own_group(group))
    y = call()
    first = y.detach().clone()
    if group.rank() == 1:
        torch.autograd.graph.increment_version(node_of(y, case.node).saved_tensors[case.saved])
    with waits_end_after(20):
        of_one = told(y.sum().backward)
    if not of_one.startswith("RefusedError"):
        return of_one, "", False
    again = call().sum()
    again.backward()
    return of_one, told(again.backward), torch.equal(call(), first)


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_that_one_rank_has_changed_is_refused_on_every_rank(pool: Pool, name: str) -> None:
    for of_one, of_all, is_right in pool.run(changed, name, ranks=2, timeout_s=60):
        assert of_one.startswith("RefusedError: rank 1: "), of_one
        assert "has been modified by an inplace operation" in of_one
        assert "backward through the graph a second time" in of_all
        assert is_right


@dataclass(frozen=True)
class Broken:
    """A local part of a backward that raises an error. place: its name. calls: the number of calls before the error."""

    made: Callable[[dist.ProcessGroup], Call]
    place: str
    calls: int = 0


BROKEN = {
    "row": Broken(mlp, "weft.ops.tensor_parallel._of_parameters"),
    "columns": Broken(mlp, "weft.ops.tensor_parallel._of_parameters", 1),
    "gathered columns": Broken(columns, "weft.ops.tensor_parallel._of_parameters"),
    "distinct rows": Broken(pooled(1, dedup=True), "weft.nn.deduplicated_embedding.device_code"),
}


def broken(group: dist.ProcessGroup, name: str, error: Exception) -> tuple[str, str, bool]:
    """Raise `error` in a local part of backward on rank 1. Return the error of the step, the error of a further backward, and
    True if a later call gives the first call's result.
    """
    case = BROKEN[name]
    call = case.made(own_group(group))
    y = call()
    first = y.detach().clone()

    def step() -> None:
        y.sum().backward()
        call()

    results = [mock.DEFAULT] * case.calls + [error]
    place, attribute = case.place.rsplit(".", 1)
    right = getattr(sys.modules[place], attribute)
    breaking = mock.patch(case.place, wraps=right, side_effect=results) if group.rank() == 1 else nullcontext()
    with breaking, waits_end_after(20):
        found = told(step)
    if not found.startswith(("RefusedError", "MemoryError")):
        return found, "", False
    return found, told(call().sum().backward), torch.equal(call(), first)


@pytest.mark.parametrize("error", [RuntimeError("told of it"), MemoryError("told of it")], ids=["other", "memory"])
@pytest.mark.parametrize("name", BROKEN)
def test_an_error_in_a_local_part_of_backward_reaches_every_rank(pool: Pool, name: str, error: Exception) -> None:
    for rank, (found, later, is_right) in enumerate(pool.run(broken, name, error, ranks=3, timeout_s=60)):
        kind = "MemoryError" if rank == 1 and isinstance(error, MemoryError) else "RefusedError: rank 1: backward of "
        assert found.startswith(kind), found
        assert type(error).__name__ in found
        assert later == "nothing"
        assert is_right
