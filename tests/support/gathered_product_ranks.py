"""matmul_all_gather in tests, on CPU processes and on GPUs: what runs on the ranks.

Data are made from seeds, so every rank knows every other's."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.matmul_ranks import close, data, device, own_group, told
from support.reduce_ranks import same_everywhere
from support.scatter_ranks import NAMES, each_called, every, late, poisoned_outputs

import weft
from weft.builders import MatmulAllGather
from weft.ops.matmul_all_gather import OPERATOR


class Operands:
    """Operands of all ranks, the expected result of every rank, and the result of torch's GEMM."""

    def __init__(self, world: int, shape: tuple[int, ...], n: int, dtype: torch.dtype, dim: int, seed: int) -> None:
        self.dim = dim
        self.xs = [data(r, shape, dtype, seed) for r in range(world)]
        self.ws = [data(r, (n, shape[-1]), dtype, 50 + seed).t() for r in range(world)]

    def exact(self) -> torch.Tensor:
        return torch.cat([x.double() @ w.double() for x, w in zip(self.xs, self.ws, strict=True)], self.dim)

    def usual(self) -> torch.Tensor:
        return torch.cat([x @ w for x, w in zip(self.xs, self.ws, strict=True)], self.dim)


def forward(
    group: dist.ProcessGroup, shape: tuple[int, ...], n: int, dtype: torch.dtype, dim: int, schedule: str | None, calls: int
) -> None:  # fmt: skip
    """Calls in a row, compared afterwards."""
    found = []
    for call in range(calls):
        x = Operands(group.size(), shape, n, dtype, dim, call)
        with poisoned_outputs(OPERATOR):
            y = weft.matmul_all_gather(x.xs[group.rank()], x.ws[group.rank()], dim, group, schedule=schedule)
        found.append((y, x))
    for y, x in found:
        exact = x.exact()
        assert y.shape == exact.shape
        assert y.dtype == dtype
        close(y, exact, x.usual())


def every_schedule(
    group: dist.ProcessGroup, m: int, n: int, k: int, dim: int, dtype: torch.dtype, late_s: float
) -> tuple[str, ...]:
    """Each candidate called several times with fresh data, results poisoned; the last call is the first again, to the bit, and all
    ranks have the same bits. The first rank comes late to the second call, the last one to the third."""
    rank, world = group.rank(), group.size()
    operands = [Operands(world, (m, k), n, dtype, dim, seed) for seed in range(3)]
    names = [candidate.name for candidate in every(MatmulAllGather(world, m, n, k, NAMES[dtype], dim == -1))]

    def call(x: Operands, name: str) -> torch.Tensor:
        return weft.matmul_all_gather(x.xs[rank], x.ws[rank], dim, group, schedule=name)

    def check(y: torch.Tensor, i: int) -> None:
        close(y, operands[i].exact(), operands[i].usual())

    for name, found in each_called(group, OPERATOR, names, operands, call, check, late_s):
        assert torch.equal(found[0], found[-1]), name
        assert same_everywhere(group, *found), name
    return tuple(names)


def backward(
    group: dist.ProcessGroup, shape: tuple[int, ...], n: int, dim: int, wanted: Sequence[bool], compiled: bool,
    schedule: str | None,
) -> None:  # fmt: skip
    """Gradients of a random weighing of all ranks' results, another on each, against autograd in float64."""
    rank, world = group.rank(), group.size()
    given = Operands(world, shape, n, torch.float32, dim, 1)
    weights = [data(r, tuple(given.exact().shape), torch.float32, 70) for r in range(world)]

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (weft.matmul_all_gather(x, w, dim, group.group_name) * weights[rank]).sum()

    x, w = (t.clone().requires_grad_(want) for t, want in zip((given.xs[rank], given.ws[rank]), wanted, strict=True))
    torch._dynamo.reset()
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    with weft.plan.use(schedule):
        run(x, w).backward()
    xs, ws = ([t.double().requires_grad_() for t in one] for one in (given.xs, given.ws))
    whole = torch.cat([a @ b for a, b in zip(xs, ws, strict=True)], dim)
    sum((whole * weight.double()).sum() for weight in weights).backward()  # type: ignore[union-attr]
    for mine, exact, want in zip((x, w), (xs[rank], ws[rank]), wanted, strict=True):
        assert (mine.grad is not None) == want
        if want:
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=2e-4, atol=2e-3)


def many_sizes(group: dist.ProcessGroup, dim: int, schedule: str | None, dtype: torch.dtype) -> None:
    """Call many sizes with one weight, one after the other: on GPUs in one memory."""
    found = []
    for call, rows in enumerate((65, 192, 8, 65, 321, 16, 192)):
        x = Operands(group.size(), (rows, 128), 96, dtype, dim, call)
        y = weft.matmul_all_gather(x.xs[group.rank()], x.ws[group.rank()], dim, group, schedule=schedule)
        found.append((y, x))
    for y, x in found:
        close(y, x.exact(), x.usual())


def layouts(group: dist.ProcessGroup, schedule: str) -> list[str]:
    """The warnings of calls whose operands lie otherwise on the first rank; compared afterwards."""
    found = []
    rank, first = group.rank(), group.rank() == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(4):
            given = Operands(group.size(), (17, 24), 8, torch.float32, -1, call)
            x, w = given.xs[rank], given.ws[rank]
            if first:
                x = x.t().contiguous().t() if call % 2 else x
                w = w.contiguous() if call < 2 else w.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
            else:  # the first loads other kernels meanwhile
                late(0.01)
            found.append((weft.matmul_all_gather(x, w, -1, group, schedule=schedule), given))
    for y, given in found:
        close(y, given.exact(), given.usual())
    return [str(w.message) for w in caught]


def bad_operands(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank for impossible operands on all ranks, and on the first alone; a good call follows."""
    first = group.rank() == 0
    x, w = data(group.rank(), (5, 8), torch.float32, 1), data(group.rank(), (8, 3), torch.float32, 2)
    whole, of_8 = torch.int64, torch.float8_e4m3fn
    calls: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "integers": (x.to(whole), w.to(whole)), "fp8": (x.to(of_8), w.to(of_8)), "complex": (x * 1j, w * 1j),
        "other K": (x, w[:5]), "other dtype": (x, w.half()), "three dimensions": (x, w[None]),
    }  # fmt: skip
    found = {}
    for name, bad in calls.items():
        for who, given in (("all", bad), ("one", bad if first else (x, w))):
            found[f"{name}, {who}"] = told(lambda given=given: weft.matmul_all_gather(*given, 0, group))
    assert weft.matmul_all_gather(x, w, -1, group).shape == (5, 3 * group.size())
    return found


def one_rank_differs(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank if the first does something else: each time in a group of its own, which ends."""
    first = group.rank() == 0
    x, w = torch.randn(8, 6, device=device()), torch.randn(6, 3, device=device())
    calls: dict[str, Any] = {
        "rows": lambda g: weft.matmul_all_gather(x[:4] if first else x, w, 0, g),
        "dimension": lambda g: weft.matmul_all_gather(x, w, -1 if first else 0, g),
        "schedule": lambda g: weft.matmul_all_gather(
            x, w, 0, g, schedule="serial" if first else "direct[chunks=1,by=dma]"
        ),
        "gradients": lambda g: weft.matmul_all_gather(x, w.clone().requires_grad_(first), 0, g),
    }
    return {name: told(lambda call=call: call(own_group(group))) for name, call in calls.items()}


def backward_alone(group: dist.ProcessGroup) -> str:
    """The others do not come to backward."""
    x = torch.randn(5, 8, requires_grad=True)
    y = weft.matmul_all_gather(x, torch.randn(8, 3), 0, group, deadline_s=1)
    if group.rank() == 0:
        return told(y.sum().backward)
    time.sleep(3)
    return ""


def spans(group: dist.ProcessGroup, dim: int, schedule: str) -> set[str]:
    x, timeline = Operands(group.size(), (16, 8), 4, torch.float32, dim, 1), weft.Timeline()
    weft.matmul_all_gather(x.xs[group.rank()], x.ws[group.rank()], dim, group, schedule=schedule, timeline=timeline)
    assert all(span.duration_us >= 0 for span in timeline)
    return {span.name.split()[0] for span in timeline if span.rank == group.rank()}


def checked_as_op(group: dist.ProcessGroup) -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    weft.matmul_all_gather(x, w, 0, group)
    for columns in (False, True):
        torch.library.opcheck(
            torch.ops.weft.matmul_all_gather.default, (x, w, columns, None, group.group_name, "", 0.0)
        )


def captured(group: dist.ProcessGroup, m: int, n: int, k: int, dim: int, schedule: str | None, replays: int) -> str:
    """A CUDA graph with two calls in it, replayed with fresh data; how a first call inside a capture fails."""
    rank, world, dtype = group.rank(), group.size(), torch.bfloat16
    first = Operands(world, (m, k), n, dtype, dim, 1)
    x, w = first.xs[rank], first.ws[rank]

    def call(x: torch.Tensor) -> torch.Tensor:
        return weft.matmul_all_gather(x, w, dim, group, schedule=schedule)

    stream, refused = torch.cuda.Stream(), ""
    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                call(x)
        except ValueError as error:
            refused = str(error)
        call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y, z = call(x), call(x * 2)
    for replay in range(replays):
        given = Operands(world, (m, k), n, dtype, dim, 10 + replay)
        given.ws = first.ws
        x.copy_(given.xs[rank])
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        close(y, given.exact(), given.usual())
        close(z, 2 * given.exact(), 2 * given.usual())
    return refused
