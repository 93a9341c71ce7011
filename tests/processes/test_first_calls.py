"""The first call of a shape must not affect later calls.

A first call may pass one tensor twice, or run in inference mode, for example if a model is validated before it is
trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from weft.launch import Pool

Call = Callable[..., torch.Tensor]
CALLS: dict[str, Callable[[dist.ProcessGroup, torch.Tensor, torch.Tensor, str | None], torch.Tensor]] = {
    "all_gather_matmul": lambda g, x, w, s: weft.all_gather_matmul(x, [w], 0, g, return_A=False, schedule=s)[1][0],
    "matmul_reduce_scatter": lambda g, x, w, s: weft.matmul_reduce_scatter(x, w, "sum", 0, g, schedule=s),
    "matmul_all_gather": lambda g, x, w, s: weft.matmul_all_gather(x, w, 0, g, schedule=s),
    "matmul_all_reduce": lambda g, x, w, s: weft.matmul_all_reduce(x, w, g, schedule=s),
    "residual": lambda g, x, w, s: weft.matmul_all_reduce(x, torch.eye(len(w)), g, residual=w, schedule=s),
    "norm": lambda g, x, w, s: weft.matmul_all_reduce(x, w, g, norm=torch.ones(len(w)), schedule=s)[0],
}
PINNED = {
    "all_gather_matmul": "shard[chunks=1,send=in_turn,by=dma]",
    "matmul_reduce_scatter": "direct[chunks=1,by=dma,add=reduce]",
    "matmul_all_gather": "direct[chunks=1,by=dma]",
}
ALL_REDUCE = ("one_shot[by=load]", "two_shot[chunks=1,by=dma,add=gemm]", "chunked[chunks=2,by=dma]")
SCHEDULES = [
    (name, schedule) for name in CALLS for schedule in (None, *((PINNED[name],) if name in PINNED else ALL_REDUCE))
]


def data(seed: int) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))


def exact(name: str, x: torch.Tensor, w: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Compute the expected result. All ranks have the same operands."""
    if name in ("all_gather_matmul", "matmul_all_gather"):
        return torch.cat([x @ w] * world)
    if name == "matmul_reduce_scatter":
        return (world * (x @ w)).chunk(world)[rank]
    if name == "residual":
        return world * x + w
    total = world * (x @ w)
    return torch.nn.functional.rms_norm(total, (6,), None, 1e-6) if name == "norm" else total


def aliased_first(group: dist.ProcessGroup, name: str) -> None:
    rank, world, q = group.rank(), group.size(), data(0)
    for _ in range(2):
        CALLS[name](group, q, q, None)
    for seed in range(1, 4):
        x, w = data(seed), data(10 + seed)
        torch.testing.assert_close(CALLS[name](group, x, w, None), exact(name, x, w, rank, world))


@pytest.mark.parametrize("name", CALLS)
def test_with_one_tensor_in_two_places(pool: Pool, name: str) -> None:
    pool.run(aliased_first, name, ranks=2, timeout_s=60)


def two_weights(group: dist.ProcessGroup) -> None:
    q = data(0)
    for _ in range(2):
        weft.all_gather_matmul(q, [q, q], 0, group)
    x, w, v = data(1), data(2), data(3)
    _, ys = weft.all_gather_matmul(x, [w, v], 0, group)
    torch.testing.assert_close(ys, [torch.cat([x @ one] * group.size()) for one in (w, v)])


def test_with_one_weight_twice(pool: Pool) -> None:
    pool.run(two_weights, ranks=2, timeout_s=60)


def inferred_first(group: dist.ProcessGroup, name: str, schedule: str | None) -> None:
    rank, world = group.rank(), group.size()

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = CALLS[name](group, x, w, schedule)
        torch.testing.assert_close(y.detach().clone(), exact(name, x.detach(), w.detach(), rank, world))
        return y

    for seed in range(2):
        with torch.inference_mode():
            call(data(seed), data(10 + seed))
    for seed in range(2, 4):
        call(data(seed), data(10 + seed))
        x, w = data(seed).requires_grad_(), data(10 + seed).requires_grad_()
        call(x, w).sum().backward()
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())
    with torch.inference_mode():
        call(data(5), data(15))


@pytest.mark.parametrize(("name", "schedule"), SCHEDULES)
def test_in_inference_mode(pool: Pool, name: str, schedule: str | None) -> None:
    pool.run(inferred_first, name, schedule, ranks=2, timeout_s=60)


def one_column(group: dist.ProcessGroup, shape: tuple[int, int], cut: tuple[Any, Any], schedule: str | None) -> None:
    k, _ = shape
    w = torch.randn(13, 13, generator=torch.Generator().manual_seed(7))[cut]
    assert w.shape == shape
    w = w.detach().requires_grad_()
    x = torch.randn(4, k, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = weft.matmul_all_reduce(x, w, group, schedule=schedule)
    torch.testing.assert_close(y, group.size() * (x @ w))
    y.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    world = group.size()  # each rank has its own part of the loss
    torch.testing.assert_close(x.grad, world * torch.ones_like(y) @ w.t())
    torch.testing.assert_close(w.grad, world * x.t() @ torch.ones_like(y))


@pytest.mark.parametrize("schedule", ["serial", "one_shot[by=load]", "two_shot[chunks=1,by=dma,add=gemm]"])
@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((5, 1), (slice(1, 11, 2), slice(1, 2))),
        ((1, 5), (slice(1, 2), slice(1, 11, 2))),
        ((1, 1), (slice(3, 4), slice(2, 3))),
    ],
    ids=["a column", "a row", "a number"],
)
def test_weights_of_one_row_or_column_may_lie_anywhere(
    pool: Pool, shape: tuple[int, int], cut: tuple[Any, Any], schedule: str | None
) -> None:
    pool.run(one_column, shape, cut, schedule, ranks=2, timeout_s=60)
