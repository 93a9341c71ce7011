"""Gradients of operators: differences give the same, and gradients have the layouts of their tensors."""

from __future__ import annotations

import importlib
import pkgutil
import warnings

import pytest
import torch
import torch.distributed as dist
from support import gradcheck_ranks as ranks
from support.slow import mostly, pairs, slow

import weft
import weft.ops
from weft.launch import Pool
from weft.operator import layout
from weft.operator.calls import OPERATORS

SCHEDULES = {
    "all_gather_matmul": ["shard[chunks=1,send=in_turn,by=dma]"],
    "matmul_reduce_scatter": ["direct[chunks=1,by=dma,add=gemm]", "direct[chunks=1,by=kernel,add=reduce]"],
    "matmul_all_reduce": ["one_shot[by=load]", "two_shot[chunks=1,by=dma,add=reduce]"],
    "matmul_all_gather": ["direct[chunks=1,by=kernel]"],
    "all_to_all_matmul": ["dispatch[by=dma,rest=each]"],
    "matmul_all_to_all": ["combine[chunks=1,by=store]"],
}


def test_every_operator_with_gradients_is_here() -> None:
    for file in pkgutil.iter_modules(weft.ops.__path__):
        importlib.import_module(f"weft.ops.{file.name}")
    ours = {name: op for name, op in OPERATORS.items() if type(op).__module__.startswith("weft.ops.")}
    differentiable = {name for name, op in ours.items() if op.gradients_of}
    # Tables are never fp64: tests/processes/test_embedding_backward.py compares their gradients with torch's.
    assert differentiable == {*SCHEDULES, "embedding_all_to_all"}


# The suite of all operators compares their gradients with float64 too.
CHECKED = pairs(SCHEDULES, ["serial"], *((one, "serial") for one in ("matmul_all_reduce", "matmul_all_to_all")))
OTHERS = [slow(operator, one) for operator in SCHEDULES for one in SCHEDULES[operator]]


@pytest.mark.parametrize(("name", "schedule"), [*CHECKED, *OTHERS, slow("all_gather_matmul_gradients", "serial")])
def test_gradients_are_what_differences_say(pool: Pool, name: str, schedule: str) -> None:
    assert pool.run(ranks.checked, name, schedule, False, ranks=2, timeout_s=120) == ["", ""]


@pytest.mark.parametrize("name", mostly(SCHEDULES, "matmul_reduce_scatter", "matmul_all_to_all"))
def test_gradients_that_are_twice_as_large_are_noticed(pool: Pool, name: str) -> None:
    for told in pool.run(ranks.checked, name, "serial", True, ranks=2, timeout_s=120):
        assert "Jacobian mismatch" in told


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_adds_up_in_float64(pool: Pool, name: str) -> None:
    for count, wrong in pool.run(ranks.every_schedule, name, ranks=2, timeout_s=120):
        assert wrong == []
        assert count >= 5


WITH_WEIGHTS = {
    "all_gather_matmul": lambda x, w, g: weft.all_gather_matmul(x, [w], 0, g, return_A=False)[1][0],
    "matmul_reduce_scatter": lambda x, w, g: weft.matmul_reduce_scatter(x, w, "sum", 0, g),
    "matmul_all_reduce": lambda x, w, g: weft.matmul_all_reduce(x, w, g),
    "matmul_all_gather": lambda x, w, g: weft.matmul_all_gather(x, w, 0, g),
}


def gradients(group: dist.ProcessGroup, operator: str, compiled: bool) -> None:
    rank, world, name, call = group.rank(), group.size(), group.group_name, WITH_WEIGHTS[operator]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 12, generator=generator, requires_grad=True)
    for transposed in (True, False):
        shape = (16, 12) if transposed else (12, 16)
        weight = torch.randn(shape, generator=generator, requires_grad=True)
        seen: list[tuple[int, ...]] = []

        def run(x: torch.Tensor, weight: torch.Tensor, transposed: bool = transposed) -> torch.Tensor:
            return call(x, weight.t() if transposed else weight, name)

        function = torch.compile(run, fullgraph=True) if compiled else run
        y = function(x, weight)
        weight.register_hook(lambda grad, seen=seen: seen.append(grad.stride()))
        grad = torch.randn(y.shape, generator=generator)
        y.backward(grad)
        assert seen == [weight.stride()]
        # The reference is torch in float64. Each rank's part of the loss is defined by the gradients of its results.
        everyone: list[tuple[torch.Tensor, ...]] = [()] * world
        dist.all_gather_object(everyone, (x.detach(), weight.detach(), grad))
        whole = [[t.double().requires_grad_() for t in of[:2]] for of in everyone]
        ws = [w.t() if transposed else w for _, w in whole]
        if operator == "all_gather_matmul":
            gathered = torch.cat([one for one, _ in whole])
            ys = [gathered @ w for w in ws]
        else:
            products = [one @ w for (one, _), w in zip(whole, ws, strict=True)]
            total = torch.stack(products).sum(0)
            ys = {
                "matmul_reduce_scatter": list(total.chunk(world)),
                "matmul_all_reduce": [total] * world,
                "matmul_all_gather": [torch.cat(products)] * world,
            }[operator]
        sum((y * of[2].double()).sum() for y, of in zip(ys, everyone, strict=True)).backward()
        for got, wanted in zip((x.grad, weight.grad), (t.grad for t in whole[rank]), strict=True):
            assert got is not None
            assert wanted is not None
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)
        x.grad = None


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("operator", WITH_WEIGHTS)
def test_a_weights_gradient_lies_as_the_weight(operator: str, compiled: bool, pool: Pool) -> None:
    pool.run(gradients, operator, compiled, ranks=2)


def summed(group: dist.ProcessGroup, operator: str) -> None:
    x, w = torch.ones(8, 12, requires_grad=True), torch.ones(12, 16, requires_grad=True)
    layout._warned.clear()
    y = WITH_WEIGHTS[operator](x, w, group.group_name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.unique().numel() == 1


@pytest.mark.parametrize("operator", WITH_WEIGHTS)
def test_nobody_is_warned_of_a_gradient_that_autograd_made(operator: str, pool: Pool) -> None:
    """The gradient of `sum()` is one expanded element. It has to be copied, and the caller cannot avoid this."""
    pool.run(summed, operator, ranks=2)
