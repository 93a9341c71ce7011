"""weft's operators support first derivatives by backward only. All other derivatives are refused, however they are
requested, and never give a number that lacks a term.

Tests of each operator check first derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import told
from support.slow import in_turn, slow

import weft
from weft.launch import Pool

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gathered(group: dist.ProcessGroup, return_A: bool = False) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        A, (y,) = weft.all_gather_matmul(x, [w[0]], 0, group.group_name, return_A=return_A)
        return y if A is None else torch.cat((y, A), 1)

    return call


def scattered(group: dist.ProcessGroup) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.matmul_reduce_scatter(x, w[0], "avg", 0, group.group_name)

    return call


def summed(group: dist.ProcessGroup) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.matmul_all_reduce(x, w[0], group.group_name)

    return call


def joined(group: dist.ProcessGroup) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.matmul_all_gather(x, w[0], -1, group.group_name)

    return call


def dispatched(group: dist.ProcessGroup) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        splits = torch.tensor([len(x)] + [0] * (group.size() - 1))
        return weft.all_to_all_matmul(x, w, splits, group=group.group_name, max_rows=len(x) * group.size())

    return call


def combined(group: dist.ProcessGroup) -> Call:
    def call(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        world = group.size()
        even = torch.full((world, 1), len(h) // world)
        return weft.matmul_all_to_all(h, w, even, even.flatten(), group=group.group_name, rows=len(h))

    return call


CALLS: dict[str, Callable[[dist.ProcessGroup], Call]] = {
    "all_gather_matmul": gathered,
    "all_gather_matmul, A wanted": lambda group: gathered(group, return_A=True),
    "matmul_all_gather": joined,
    "matmul_all_reduce": summed,
    "matmul_reduce_scatter": scattered,
    "all_to_all_matmul": dispatched,
    "matmul_all_to_all": combined,
}
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # The gradient depends only on the other operand, and not on the incoming gradient.
    "linear": torch.sum,
    "quadratic": lambda y: (y**2).sum(),
}


def twice(group: dist.ProcessGroup, name: str, compiled: bool) -> dict[str, str]:
    """Return the errors of double backward, if the penalty has a term besides the gradients, so that torch does not
    detect the error itself.
    """
    call, found = CALLS[name](group), {}
    if compiled:  # a backend that runs the operators unchanged; other backends refuse double backward themselves
        call = torch.compile(call, backend="eager")
    for loss in LOSSES:
        for how in ("grad", "backward"):
            x, w = torch.randn(4, 8, requires_grad=True), torch.randn(1, 8, 3, requires_grad=True)
            y = torch.nan_to_num(call(x, w))  # rows of ranks without tokens are not written
            of_x, of_w = torch.autograd.grad(LOSSES[loss](y), [x, w], create_graph=True)
            penalty = (of_x**2).sum() + (of_w**2).sum() + (x**2).sum() + (w**2).sum()
            again = penalty.backward if how == "backward" else partial(torch.autograd.grad, penalty, [x, w])
            found[f"{loss}, by {how}"] = told(again)
    return found


@pytest.mark.parametrize(("name", "compiled"), in_turn(CALLS, [False, True]))
def test_a_second_derivative_is_refused(pool: Pool, name: str, compiled: bool) -> None:
    operator = name.split(",")[0]
    for found in pool.run(twice, name, compiled, ranks=2, timeout_s=60):
        assert len(found) == 4
        for how, text in found.items():
            assert text.startswith(f"NotImplementedError: {operator} does not support second derivatives"), how


def norm_twice(group: dist.ProcessGroup) -> str:
    norm = weft.nn.RMSNorm(8, group=group)
    x = torch.randn(2, 3, 8, requires_grad=True)
    grads = torch.autograd.grad((norm(x) ** 3).sum(), [x, norm.weight], create_graph=True)
    said = told(lambda: torch.autograd.grad(sum((grad**2).sum() for grad in grads), [x, norm.weight]))
    norm(x).sum().backward()
    return said


def test_a_second_derivative_of_what_ranks_have_whole_is_refused(pool: Pool) -> None:
    for said in pool.run(norm_twice, ranks=2, timeout_s=60):
        assert said.startswith("NotImplementedError: weft.nn.replicated does not support second derivatives")


def first_with_graph(group: dist.ProcessGroup, name: str) -> bool:
    """True if gradients do not change with create_graph=True, and a call after a refusal gives the same result as
    before.
    """
    call, found = CALLS[name](group), []
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(1, 8, 3, requires_grad=True)
    for create_graph in (False, True, False):
        y = torch.nan_to_num(call(x, w))
        found.append(torch.autograd.grad((y**2).sum(), [x, w], create_graph=create_graph))
        if create_graph:
            assert told(sum((grad**2).sum() for grad in found[-1]).backward).startswith("NotImplementedError")
    return all(torch.equal(a, b) for grads in found[1:] for a, b in zip(grads, found[0], strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_first_derivatives_with_a_graph_are_the_same(pool: Pool, name: str) -> None:
    assert pool.run(first_with_graph, name, ranks=2, timeout_s=60) == [True, True]


def tangent_of(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
    with torch.autograd.forward_ad.dual_level():
        y = call(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def otherwise(group: dist.ProcessGroup, name: str) -> tuple[list[str], list[str]]:
    """Return the errors in forward mode, and inside transforms of torch.func. The group must stay usable."""
    of_two, x, w = CALLS[name](group), torch.randn(4, 8), torch.randn(1, 8, 3)

    def call(x: torch.Tensor) -> torch.Tensor:
        return of_two(x, w)

    def compiled(function: Callable[..., object], *arguments: torch.Tensor) -> str:
        torch._dynamo.reset()
        return told(lambda: torch.compile(function, backend="aot_eager")(*arguments))

    def total(x: torch.Tensor) -> torch.Tensor:
        return call(x).sum()

    forward = [
        told(lambda: tangent_of(call, x)),
        told(lambda: torch.func.linearize(call, x)),
        compiled(lambda x: tangent_of(call, x), x),
        told(lambda: tangent_of(torch.compile(call, backend="eager"), x)),
    ]
    transformed = [
        told(lambda: torch.vmap(call)(x.expand(2, 4, 8))),
        told(lambda: torch.func.grad(total)(x)),
        told(lambda: torch.func.jvp(call, (x,), (x,))),
        told(lambda: torch.func.vjp(call, x)),
        compiled(torch.func.grad(total), x),
        compiled(lambda x: torch.func.jvp(call, (x,), (x,)), x),
        compiled(torch.vmap(call), x[None]),
    ]
    with torch.autograd.forward_ad.dual_level():
        call(x)
    return forward, transformed


@pytest.mark.parametrize("name", [slow("all_gather_matmul"), slow("matmul_all_reduce"), "all_to_all_matmul"])
def test_other_derivatives_are_refused(pool: Pool, name: str) -> None:
    for forward, transformed in pool.run(otherwise, name, ranks=2, timeout_s=100):
        for number, text in enumerate(forward):
            assert f"{name} does not support forward-mode derivatives" in text, number
        for number, text in enumerate(transformed):
            assert f"{name} was called inside a torch.func transform" in text, number


def first_inside(group: dist.ProcessGroup) -> list[str]:
    """Return the errors of a new group's first call. On rank 1 it is inside a transform that wraps every new tensor."""
    x, w = torch.randn(4, 8), torch.randn(1, 8, 3)
    own = [dist.new_group(list(range(group.size()))) for _ in range(2)]
    call, mlp = summed(own[0]), weft.nn.ParallelMLP(8, 16, group=own[1], sequence_dim=0)

    def backward_of(layer: Callable[[torch.Tensor], torch.Tensor]) -> str:
        transformed = torch.func.grad(lambda x: layer(x).sum())
        said = told(lambda: (transformed if group.rank() == 1 else layer)(x))
        layer(x)
        return said

    return [backward_of(lambda x: call(x, w)), backward_of(mlp)]


def test_a_transform_around_the_first_call_of_a_group_is_refused(pool: Pool) -> None:
    for operator, layer in pool.run(first_inside, ranks=2, timeout_s=60):
        assert operator.startswith("RefusedError: rank 1: matmul_all_reduce was called inside a torch.func transform")
        assert layer.startswith("RefusedError: rank 1: all_gather_matmul was called inside a torch.func transform")


def layers_otherwise(group: dist.ProcessGroup) -> dict[str, list[str]]:
    mlp, x = weft.nn.ParallelMLP(8, 16, group=group, sequence_dim=None), torch.randn(4, 8)
    experts, index, weights = weft.nn.ExpertParallelMLP(8, 6, 2, group=group), torch.tensor([[0]] * 4), torch.ones(4, 1)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "a column-parallel layer": mlp, "weft.nn.replicated": lambda x: weft.nn.replicated(x, group),
        "ExpertParallelMLP": lambda x: experts(x, index, weights),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        found[name] = [told(lambda call=call: torch.func.grad(lambda x: call(x).sum())(x))]
        found[name].append(told(lambda call=call: tangent_of(call, x)))
        call(x)
    return found


def test_other_derivatives_of_layers_are_refused(pool: Pool) -> None:
    for found in pool.run(layers_otherwise, ranks=2, timeout_s=60):
        for name, (transformed, forward) in found.items():
            assert transformed.startswith(f"RefusedError: ranks 0, 1: {name} was called inside a torch.func transform")
            assert forward.startswith(f"RefusedError: ranks 0, 1: {name} does not support forward-mode derivatives")


def several(group: dist.ProcessGroup, name: str) -> str:
    """Return the error for several gradients in one backward. A single gradient must work, and the group must stay
    usable.
    """
    call = CALLS[name](group)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(1, 8, 3, requires_grad=True)
    y = torch.nan_to_num(call(x, w))
    two = torch.randn(2, *y.shape)
    said = told(lambda: torch.autograd.grad(y, [x, w], two, retain_graph=True, is_grads_batched=True))
    for one in two:
        torch.autograd.grad(y, [x, w], one, retain_graph=True)
    return said


@pytest.mark.parametrize("name", CALLS)
def test_several_gradients_at_once_are_refused(pool: Pool, name: str) -> None:
    operator = name.split(",")[0]
    for ranks in (1, 2):
        for said in pool.run(several, name, ranks=ranks, timeout_s=60):
            assert f"backward of {operator} was called for several gradients at the same time" in said
            assert "compute one gradient after the other" in said


def made_for_inference(group: dist.ProcessGroup, name: str) -> list[str]:
    """Return the errors for a tensor that autograd cannot save, in calls of a new and of a known shape."""
    call, said = CALLS[name](group), []
    with torch.inference_mode():
        kept_by_none = torch.randn(4, 8)
    w = torch.randn(1, 8, 3, requires_grad=True)
    for _ in range(2):
        said.append(told(lambda: call(kept_by_none if group.rank() == 0 else kept_by_none.clone(), w)))
        torch.nan_to_num(call(kept_by_none.clone(), w)).sum().backward()
    with torch.no_grad():
        call(kept_by_none, w)
    return said


@pytest.mark.parametrize("name", CALLS)
def test_what_autograd_does_not_keep_is_refused_before_the_call(pool: Pool, name: str) -> None:
    operator = name.split(",")[0]
    for both in pool.run(made_for_inference, name, ranks=2, timeout_s=60):
        for said in both:
            assert said.startswith(
                f"RefusedError: rank 0: {operator} needs gradients, but an input was created in torch.inference_mode()"
            )
