"""Checks of gradients by finite differences (`torch.autograd.gradcheck`). These functions run on the ranks.

gradcheck changes one number at a time, and asks for the gradient of one number of the result. So each operator becomes
a function of the tensors of all ranks, which every rank evaluates with the same arguments. Each rank takes its own part
of the arguments (`_Own`), makes the call, and gathers the results of all ranks (`_Joined`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.gradcheck import GradcheckError, gradcheck

import weft
from weft.builders import NotApplicableError, candidates
from weft.operator.calls import operator_named, prepared_calls

Shape = tuple[int, ...]
Tensors = list[torch.Tensor]


def _from_all(x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensors:
    """Gather the tensor `x` of each rank, flattened. sizes: the number of elements of each rank."""
    mine = x.new_zeros(max(sizes))
    mine[: x.numel()] = x.detach().flatten()
    found = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(found, mine, group=group)
    return [one[:size] for one, size in zip(found, sizes, strict=True)]


class _Own(torch.autograd.Function):
    """An autograd function. Its input is the concatenation of all ranks' tensors, its output this rank's tensor.

    sizes: the number of elements of each rank's tensor. shape: the shape of this rank's tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, numbers: torch.Tensor, sizes: Sequence[int], shape: Shape, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return numbers.split(sizes)[group.rank()].view(shape).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return torch.cat(_from_all(grad, ctx.sizes, ctx.group)), None, None, None


class _Joined(torch.autograd.Function):
    """An autograd function. Its input is this rank's result, its output the concatenation of all ranks' results.

    sizes: the number of elements of each rank's result.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.shape, ctx.sizes, ctx.rank = y.shape, sizes, group.rank()
        return torch.cat(_from_all(y, sizes, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad.split(ctx.sizes)[ctx.rank].view(ctx.shape), None, None


class _Shared(torch.autograd.Function):
    """An autograd function for a tensor that is equal on all ranks: its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        sizes = [grad.numel()] * ctx.group.size()
        return torch.stack(_from_all(grad, sizes, ctx.group)).sum(0).view(grad.shape), None


@dataclass(frozen=True)
class Case:
    """A call for gradcheck.

    own: for each tensor that differs between ranks, its shape on each rank.
    shared: the shapes of the tensors that are equal on all ranks.
    call: makes this rank's call on its tensors, and returns the differentiable results.
    """

    own: Sequence[Sequence[Shape]]
    call: Callable[[Tensors, dict[str, Any]], Tensors]
    shared: Sequence[Shape] = ()


def case(name: str, group: dist.ProcessGroup, by: int = 1) -> Case:
    """Return a small case of an operator, with `by` times as many rows. Splits are uneven, and an expert has no tokens."""
    rank, world = group.rank(), group.size()

    def alike(*shapes: Shape) -> list[list[Shape]]:
        return [[shape] * world for shape in shapes]

    if name == "all_gather_matmul":

        def gathered(t: Tensors, options: dict[str, Any]) -> Tensors:
            A, ys = weft.all_gather_matmul(t[0], t[1:], 0, group, **options)
            return [A, *ys]

        return Case(alike((3 * by, 4), (4, 2), (4, 1)), gathered)
    if name == "all_gather_matmul_gradients":  # like backward, this call does not return the gathered x

        def multiplied(t: Tensors, options: dict[str, Any]) -> Tensors:
            return weft.all_gather_matmul(t[0], t[1:], 0, group, return_A=False, **options)[1]

        return Case(alike((3 * by, 4), (4, 2), (4, 1)), multiplied)
    if name == "matmul_reduce_scatter":
        return Case(alike((4 * by, 3), (3, 2)), lambda t, o: [weft.matmul_reduce_scatter(*t, "sum", 0, group, **o)])
    if name == "matmul_all_reduce":

        def reduced(t: Tensors, options: dict[str, Any]) -> Tensors:
            x, w, norm, bias, residual = t
            return [*weft.matmul_all_reduce(x, w, group, bias=bias, residual=residual, norm=norm, **options)]

        return Case(alike((4 * by, 3), (3, 2), (2,)), reduced, [(2,), (4 * by, 2)])
    if name == "matmul_all_gather":
        return Case(
            alike((3 * by, 4), (4, 2)), lambda t, o: [weft.matmul_all_gather(*t, gather_dim=1, group=group, **o)]
        )
    splits = by * torch.tensor([[2, 0, 1, 1], [1, 0, 0, 2]])  # the splits of each rank
    received = splits.view(world, world, -1)[:, rank].contiguous()
    weights = alike((2, 3, 2))
    if name == "all_to_all_matmul":
        tokens = [(count, 3) for count in splits.sum(1).tolist()]
        return Case(
            [tokens, *weights], lambda t, o: [weft.all_to_all_matmul(*t, splits[rank].contiguous(), group=group, **o)]
        )
    if name == "matmul_all_to_all":
        rows = [(count, 3) for count in splits.view(world, world, -1).sum((0, 2)).tolist()]
        return Case(
            [rows, *weights], lambda t, o: [weft.matmul_all_to_all(*t, received, splits[rank].contiguous(), group=group, **o)]
        )  # fmt: skip
    raise ValueError(f"{name} has no case here: add one, for gradcheck")


def checked(group: dist.ProcessGroup, name: str, schedule: str | None, doubled: bool) -> str:
    """Return the error text of gradcheck, "" if there is none. doubled: multiply gradients by 2, so that gradcheck must
    fail.
    """
    one, generator = case(name, group), torch.Generator().manual_seed(3)
    options = {"schedule": schedule}

    def random(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64).requires_grad_()

    sizes = [[torch.Size(shape).numel() for shape in of_ranks] for of_ranks in one.own]
    inputs = [random(sum(of_ranks)) for of_ranks in sizes]
    results: list[Any] = [None] * group.size()  # for each rank, the numbers of elements of its results
    given = [torch.zeros(shapes[group.rank()], dtype=torch.float64) for shapes in one.own]
    given += [torch.zeros(shape, dtype=torch.float64) for shape in one.shared]
    dist.all_gather_object(results, [y.numel() for y in one.call(given, options)], group=group)
    shared = [random(torch.Size(shape).numel()) for shape in one.shared]

    def function(*numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = [
            _Own.apply(x, of_ranks, shapes[group.rank()], group)
            for x, of_ranks, shapes in zip(numbers, sizes, one.own, strict=False)
        ]
        alike = [_Shared.apply(x, group).view(shape) for x, shape in zip(numbers[len(own) :], one.shared, strict=True)]
        return tuple(
            _Joined.apply(y, of_ranks, group)
            for y, *of_ranks in zip(one.call([*own, *alike], options), *results, strict=True)
        )

    op = operator_named(name)
    with contextlib.ExitStack() as stack:
        if doubled:
            gradients = op.gradients
            op.gradients = lambda *given: [None if g is None else 2 * g for g in gradients(*given)]  # type: ignore[method-assign]
            stack.callback(lambda: delattr(op, "gradients"))
        try:
            gradcheck(function, (*inputs, *shared))
        except GradcheckError as error:
            return str(error)
    return ""


def every_schedule(group: dist.ProcessGroup, name: str) -> tuple[int, list[str]]:
    """Compare every schedule with serial in float64. Return the number of schedules, and the schedules that differ."""
    own = dist.new_group(list(range(group.size())))
    one, generator, rank = case(name, own, by=8), torch.Generator().manual_seed(4), group.rank()

    def random(shape: Shape) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = [[random(shape) for shape in of_ranks][rank] for of_ranks in one.own] + [random(s) for s in one.shared]
    wanted, count, wrong = one.call(tensors, {"schedule": "serial"}), 0, list[str]()
    (prepared,) = prepared_calls(operator_named(name), own)
    assert prepared.p.dtype == "fp64"
    for candidate in candidates(prepared.p):
        try:
            candidate.build()
        except NotApplicableError:
            continue
        found, count = one.call(tensors, {"schedule": candidate.name}), count + 1
        if not all(torch.allclose(y, w, rtol=1e-12, atol=1e-12) for y, w in zip(found, wanted, strict=True)):
            wrong.append(candidate.name)
    return count, wrong
