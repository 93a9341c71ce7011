"""matmul_all_reduce in tests, on CPU processes and on GPUs: what runs on the ranks.

Data are made from seeds, so every rank knows every other's."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.matmul_ranks import close, data, device, own_group, told
from support.scatter_ranks import NAMES, each_called, every, late, poisoned_outputs
from torch.nn.functional import rms_norm

import weft
from weft.builders import MatmulAllReduce
from weft.ops.matmul_all_reduce import OPERATOR


class Operands:
    """Operands of all ranks, the expected result of every rank, and the result of torch's GEMM and all-reduce."""

    def __init__(self, world: int, shape: tuple[int, ...], n: int, dtype: torch.dtype, op: str, seed: int) -> None:
        self.parts = world if op == "avg" else 1
        self.xs = [data(r, shape, dtype, seed) for r in range(world)]
        self.ws = [data(r, (n, shape[-1]), dtype, 50 + seed).t() for r in range(world)]

    def exact(self) -> torch.Tensor:
        return torch.stack([x.double() @ w.double() for x, w in zip(self.xs, self.ws, strict=True)]).sum(0) / self.parts

    def usual(self, group: dist.ProcessGroup) -> torch.Tensor:
        total = self.xs[group.rank()] @ self.ws[group.rank()]
        dist.all_reduce(total, group=group)
        return total / self.parts


def same_everywhere(group: dist.ProcessGroup, *ys: torch.Tensor) -> bool:
    """True if all ranks have the same bits."""
    flat = torch.cat([y.contiguous().view(-1).view(torch.uint8) for y in ys])
    others = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(others, flat, group=group)
    return all(torch.equal(flat, other) for other in others)


def forward(
    group: dist.ProcessGroup, shape: tuple[int, ...], n: int, dtype: torch.dtype, op: str, schedule: str | None, calls: int
) -> None:  # fmt: skip
    """Calls in a row, compared afterwards."""
    found = []
    for call in range(calls):
        x = Operands(group.size(), shape, n, dtype, op, call)
        with poisoned_outputs(OPERATOR):
            y = weft.matmul_all_reduce(x.xs[group.rank()], x.ws[group.rank()], group, op=op, schedule=schedule)
        found.append((y, x))
    for y, x in found:
        exact = x.exact()
        assert y.shape == exact.shape
        assert y.dtype == dtype
        close(y, exact, x.usual(group))


def every_schedule(
    group: dist.ProcessGroup, m: int, n: int, k: int, dtype: torch.dtype, late_s: float
) -> tuple[str, ...]:
    """Each candidate called several times with fresh data, results poisoned; the last call is the first again, to the bit, and all
    ranks have the same bits. The first rank comes late to the second call, the last one to the third."""
    rank, world = group.rank(), group.size()
    operands = [Operands(world, (m, k), n, dtype, "sum", seed) for seed in range(3)]
    usuals = [x.usual(group) for x in operands]
    names = [candidate.name for candidate in every(MatmulAllReduce(world, m, n, k, NAMES[dtype]))]

    def call(x: Operands, name: str) -> torch.Tensor:
        return weft.matmul_all_reduce(x.xs[rank], x.ws[rank], group, schedule=name)

    def check(y: torch.Tensor, i: int) -> None:
        close(y, operands[i].exact(), usuals[i])

    for name, found in each_called(group, OPERATOR, names, operands, call, check, late_s):
        if name != "serial":
            assert torch.equal(found[0], found[-1]), name
            assert same_everywhere(group, *found), name
    return tuple(names)


def backward(
    group: dist.ProcessGroup, shape: tuple[int, ...], n: int, op: str, wanted: Sequence[bool], compiled: bool,
    schedule: str | None,
) -> None:  # fmt: skip
    """Gradients of a random weighing of all ranks' results, another on each, against autograd in float64."""
    rank, world = group.rank(), group.size()
    given = Operands(world, shape, n, torch.float32, op, 1)
    weights = [data(r, tuple(given.exact().shape), torch.float32, 70) for r in range(world)]

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (weft.matmul_all_reduce(x, w, group.group_name, op=op) * weights[rank]).sum()

    x, w = (t.clone().requires_grad_(want) for t, want in zip((given.xs[rank], given.ws[rank]), wanted, strict=True))
    torch._dynamo.reset()
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    with weft.plan.use(schedule):  # which names none of the gather's
        run(x, w).backward()
    xs, ws = ([t.double().requires_grad_() for t in one] for one in (given.xs, given.ws))
    total = torch.stack([a @ b for a, b in zip(xs, ws, strict=True)]).sum(0) / given.parts
    sum((total * weight.double()).sum() for weight in weights).backward()  # type: ignore[union-attr]
    for mine, exact, want in zip((x, w), (xs[rank], ws[rank]), wanted, strict=True):
        assert (mine.grad is not None) == want
        if want:
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=2e-4, atol=2e-3)


def following(
    group: dist.ProcessGroup, shape: tuple[int, ...], n: int, dtype: torch.dtype, with_bias: bool, with_residual: bool
) -> None:  # fmt: skip
    """A bias and a residual, added by every schedule; fresh ones in each of two calls."""
    rank, world = group.rank(), group.size()
    p = MatmulAllReduce(world, shape[0] * shape[1], n, shape[2], NAMES[dtype], with_bias, with_residual)
    given = []
    for call in range(2):
        x = Operands(world, shape, n, dtype, "sum", call)
        bias = data(7, (n,), dtype, 80 + call) if with_bias else None
        residual = data(7, (*shape[:-1], n), dtype, 90 + call) if with_residual else None
        exact, usual = x.exact(), x.usual(group)
        for one in (bias, residual):
            exact, usual = (exact, usual) if one is None else (exact + one.double(), usual + one)
        given.append((x.xs[rank], x.ws[rank], bias, residual, exact, usual))
    for name in [candidate.name for candidate in every(p)]:
        for a, w, bias, residual, exact, usual in given:
            with poisoned_outputs(OPERATOR):
                y = weft.matmul_all_reduce(a, w, group, bias=bias, residual=residual, schedule=name)
            try:
                close(y, exact, usual)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            assert same_everywhere(group, y), name


def backward_following(group: dist.ProcessGroup, rows: int, wanted: Sequence[bool], compiled: bool) -> None:
    """Gradients of a random weighing, another on each rank; those of what follows are of the rank's own result."""
    rank, world, n = group.rank(), group.size(), 5
    given = Operands(world, (rows, 8), n, torch.float32, "sum", 4)
    weights = [data(r, (rows, n), torch.float32, 72) for r in range(world)]
    plain = (given.xs[rank], given.ws[rank], data(7, (n,), torch.float32, 81), data(7, (rows, n), torch.float32, 91))
    tensors = [t.clone().requires_grad_(want) for t, want in zip(plain, wanted, strict=True)]

    def loss(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = weft.matmul_all_reduce(x, w, group.group_name, bias=bias, residual=residual)
        return (y * weights[rank]).sum()

    torch._dynamo.reset()
    (torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss)(*tensors).backward()
    whole, mine = torch.stack(weights).double().sum(0), weights[rank].double()
    exact = whole @ plain[1].double().t(), plain[0].double().t() @ whole, mine.sum(0), mine
    for found, expected, want in zip(tensors, exact, wanted, strict=True):
        assert (found.grad is not None) == want
        if want:
            assert found.grad is not None
            torch.testing.assert_close(found.grad.double(), expected, rtol=2e-4, atol=2e-3)


def normed(
    group: dist.ProcessGroup, shape: tuple[int, ...], n: int, dtype: torch.dtype, with_residual: bool, eps: float
) -> tuple[str, ...]:  # fmt: skip
    """The sum and its norm by every schedule, in calls in a row with fresh data, compared afterwards, and of the first again to the
    bit. Each rank has a weight of its own; with a residual all have one, and get the same bits."""
    rank, world = group.rank(), group.size()
    p = MatmulAllReduce(world, shape[0] * shape[1], n, shape[2], NAMES[dtype], False, with_residual, eps)
    names = [candidate.name for candidate in every(p)]
    given = []
    for call in range(3):
        x = Operands(world, shape, n, dtype, "sum", call)
        residual = data(7, (*shape[:-1], n), dtype, 90 + call) if with_residual else None
        weight = data(7 if with_residual else rank, (n,), dtype, 100 + call)
        exact, usual = x.exact(), x.usual(group)
        if residual is not None:
            exact, usual = exact + residual.double(), usual + residual
        torchs = [rms_norm(one, (n,), weight.to(one.dtype), eps) for one in (exact, usual)]
        given.append((x.xs[rank], x.ws[rank], residual, weight, exact, usual, torchs))
    for name in names:
        found = []
        for call in (0, 1, 2, 0):
            a, w, residual, weight, *_ = given[call]
            with poisoned_outputs(OPERATOR):
                results = weft.matmul_all_reduce(a, w, group, residual=residual, norm=weight, eps=eps, schedule=name)
            found.append((*results, call))
        for y, total, call in found:
            *_, weight, exact, usual, torchs = given[call]
            assert y.shape == total.shape == exact.shape
            assert y.dtype == total.dtype == dtype
            # What is normed is the sum as it was rounded: in 16 bits the norm of the exact one is further off.
            of_total = [rms_norm(one, (n,), weight.to(one.dtype), eps) for one in (total.double(), total)]
            try:
                close(total, exact, usual)
                close(y, *of_total)
                close(y, *torchs)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            assert same_everywhere(group, total, *[y] * with_residual) or name == "serial", name
        assert all(torch.equal(a, b) for a, b in zip(found[0][:2], found[-1][:2], strict=True)) or name == "serial", (
            name
        )
    return tuple(names)


def normed_alike(group: dist.ProcessGroup) -> None:
    """In shapes with little in them, compiled, and by tensors that lie otherwise."""
    rank, world = group.rank(), group.size()
    compiled = torch.compile(weft.matmul_all_reduce, fullgraph=True, backend="aot_eager")
    for shape, n in (((6, 8), 5), ((0, 8), 5), ((6, 0), 5), ((6, 8), 0), ((2, 3, 8), 1)):
        torch._dynamo.reset()
        x = Operands(world, shape, n, torch.float32, "sum", 3)
        bias, weight = data(7, (n,), torch.float32, 81), data(7, (n,), torch.float32, 100)
        usual = x.usual(group) + bias
        for call in (weft.matmul_all_reduce, compiled):
            for eps in (1e-6, 0.5):
                norm = weight.repeat_interleave(2)[::2]
                y, total = call(x.xs[rank], x.ws[rank], group.group_name, bias=bias, norm=norm, eps=eps)
                torch.testing.assert_close(total, usual)
                torch.testing.assert_close(y, rms_norm(usual, (n,), weight, eps))


def normed_spans(group: dist.ProcessGroup, schedule: str) -> set[str]:
    x, timeline, rank = Operands(group.size(), (16, 8), 4, torch.float32, "sum", 1), weft.Timeline(), group.rank()
    weft.matmul_all_reduce(
        x.xs[rank], x.ws[rank], group, bias=torch.ones(4), norm=torch.ones(4), schedule=schedule, timeline=timeline
    )
    return {span.name for span in timeline if span.rank == rank}


def backward_normed(group: dist.ProcessGroup, rows: int, wanted: Sequence[bool], of: str, compiled: bool) -> None:
    """Gradients of a random weighing, another on each rank, of both results or of one, against autograd in float64."""
    rank, world, n, eps = group.rank(), group.size(), 5, 0.1
    given = Operands(world, (rows, 8), n, torch.float32, "sum", 4)
    weights = [[data(r, (rows, n), torch.float32, 72 + i) for i in range(2)] for r in range(world)]
    following = data(7, (n,), torch.float32, 81), data(7, (rows, n), torch.float32, 91)
    norms = [data(r, (n,), torch.float32, 101) for r in range(world)]
    plain = (given.xs[rank], given.ws[rank], *following, norms[rank])
    tensors = [t.clone().requires_grad_(want) for t, want in zip(plain, wanted, strict=True)]

    def loss(results: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(  # type: ignore[return-value]
            (y * weight).sum() for y, weight, which in zip(results, weights, "yt", strict=True) if which in of
        )

    def run(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        results = weft.matmul_all_reduce(x, w, group.group_name, bias=bias, residual=residual, norm=norm, eps=eps)
        return loss(results, weights[rank])

    torch._dynamo.reset()
    (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(*tensors).backward()
    xs, ws = ([t.double().requires_grad_() for t in one] for one in (given.xs, given.ws))
    own = [
        [t.double().requires_grad_() for t in (*following, norm)] for norm in norms
    ]  # each rank adds and norms by itself
    total = torch.stack([a @ b for a, b in zip(xs, ws, strict=True)]).sum(0)
    losses = []
    for (bias, residual, norm), weighing in zip(own, weights, strict=True):
        y = total + bias + residual
        losses.append(loss((rms_norm(y, (n,), norm, eps), y), [one.double() for one in weighing]))
    torch.stack(losses).sum().backward()
    for found, exact, want in zip(tensors, (xs[rank], ws[rank], *own[rank]), wanted, strict=True):
        assert (found.grad is not None) == want
        if want:
            expected = (
                torch.zeros_like(exact) if exact.grad is None else exact.grad
            )  # that of a norm that nobody asks for
            assert found.grad is not None
            torch.testing.assert_close(found.grad.double(), expected, rtol=2e-4, atol=2e-3)


def bad_following(group: dist.ProcessGroup) -> dict[str, str]:
    x, w = data(group.rank(), (5, 8), torch.float32, 1), data(group.rank(), (8, 3), torch.float32, 2)
    bias, residual = torch.ones(3), torch.ones(5, 3)
    calls: dict[str, dict[str, Any]] = {
        "bias of two dimensions": {"bias": bias[None]}, "bias of other length": {"bias": torch.ones(4)},
        "bias of another dtype": {"bias": bias.half()}, "residual of fewer rows": {"residual": residual[1:]},
        "residual of fewer columns": {"residual": residual[:, 1:]}, "mean": {"bias": bias, "op": "avg"},
        "no tensor": {"residual": [residual]}, "a norm of two dimensions": {"norm": bias[None]},
        "a norm of other length": {"norm": torch.ones(2)}, "a norm of another dtype": {"norm": bias.double()},
        "a norm elsewhere": {"norm": torch.ones(3, device="meta")}, "the mean's norm": {"norm": bias, "op": "avg"},
        "no number": {"norm": bias, "eps": "0"}, "a negative number": {"norm": bias, "eps": -1e-9},
        "a number for nothing": {"eps": 0.5},
    }  # fmt: skip
    found = {}
    for name, bad in calls.items():
        found[name] = told(lambda bad=bad: weft.matmul_all_reduce(x, w, group, **bad))
    op = torch.ops.weft.matmul_all_reduce
    found["no number, below"] = told(
        lambda: op(x, w, None, None, bias[None], None, False, None, group.group_name, "", 0.0)
    )
    assert weft.matmul_all_reduce(x, w, group, bias=bias, residual=residual).shape == (5, 3)
    return found


def as_torch_has_it(group: dist.ProcessGroup) -> None:
    """The gradients of torch's own all-reduce that can be differentiated."""
    from torch.distributed.nn.functional import all_reduce

    given, found = Operands(group.size(), (6, 8), 5, torch.float32, "sum", 3), []
    weight = data(group.rank(), (6, 5), torch.float32, 71)
    for call in (
        lambda x, w: weft.matmul_all_reduce(x, w, group),
        lambda x, w: all_reduce(x @ w, group=group),
    ):
        x, w = (t[group.rank()].clone().requires_grad_() for t in (given.xs, given.ws))
        (call(x, w) * weight).sum().backward()
        found.append((x.grad, w.grad))
    for mine, usual in zip(*found, strict=True):
        torch.testing.assert_close(mine, usual)


def many_sizes(group: dist.ProcessGroup, schedule: str | None, dtype: torch.dtype) -> None:
    """Call many sizes with one weight, one after the other: on GPUs in one memory."""
    found = []
    for call, rows in enumerate((65, 192, 8, 65, 321, 16, 192)):
        x = Operands(group.size(), (rows, 128), 96, dtype, "sum", call)
        y = weft.matmul_all_reduce(x.xs[group.rank()], x.ws[group.rank()], group, schedule=schedule)
        found.append((y, x))
    for y, x in found:
        close(y, x.exact(), x.usual(group))


def layouts(group: dist.ProcessGroup, schedule: str) -> list[str]:
    """The warnings of calls whose operands lie otherwise on the first rank; compared afterwards."""
    found = []
    rank, first = group.rank(), group.rank() == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(4):
            given = Operands(group.size(), (17, 24), 8, torch.float32, "sum", call)
            x, w = given.xs[rank], given.ws[rank]
            if first:
                x = x.t().contiguous().t() if call % 2 else x
                w = w.contiguous() if call < 2 else w.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
            else:  # the first loads other kernels meanwhile
                late(0.01)
            found.append((weft.matmul_all_reduce(x, w, group, schedule=schedule), given))
    for y, given in found:
        close(y, given.exact(), given.usual(group))
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
            found[f"{name}, {who}"] = told(lambda given=given: weft.matmul_all_reduce(*given, group))
    assert weft.matmul_all_reduce(x, w, group).shape == (5, 3)
    return found


def pinned_for_nothing(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank for schedules that cannot do a shape; the advised argument works."""
    name, found = "two_shot[chunks=2,by=dma,add=gemm]", {}
    for what, (m, k, n) in {"no rows": (0, 8, 3), "no K": (4, 0, 3), "no N": (4, 8, 0), "few rows": (2, 8, 3)}.items():
        x, w = torch.ones(m, k), torch.ones(k, n)
        found[what] = told(lambda x=x, w=w: weft.matmul_all_reduce(x, w, group, schedule=name))
        with weft.plan.use(name):
            assert told(lambda x=x, w=w: weft.matmul_all_reduce(x, w, group)) == found[what]
            assert weft.matmul_all_reduce(x, w, group, schedule="serial").shape == (m, n)
        assert weft.matmul_all_reduce(x, w, group).shape == (m, n)
    return found


def one_rank_differs(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank if the first does something else: each time in a group of its own, which ends."""
    first = group.rank() == 0
    x, w = torch.randn(8, 6, device=device()), torch.randn(6, 3, device=device())
    calls: dict[str, Any] = {
        "rows": lambda g: weft.matmul_all_reduce(x[:4] if first else x, w, g),
        "schedule": lambda g: weft.matmul_all_reduce(x, w, g, schedule="serial" if first else "one_shot[by=load]"),
        "gradients": lambda g: weft.matmul_all_reduce(x, w.clone().requires_grad_(first), g),
        "norm": lambda g: weft.matmul_all_reduce(x, w, g, norm=w[0] if first else None),
        "eps": lambda g: weft.matmul_all_reduce(x, w, g, norm=w[0], eps=0.5 if first else 1e-6),
        "eps by little": lambda g: weft.matmul_all_reduce(x, w, g, norm=w[0], eps=1.0000001e-6 if first else 1e-6),
    }
    return {name: told(lambda call=call: call(own_group(group))) for name, call in calls.items()}


def librarys_sum(group: dist.ProcessGroup) -> None:
    """It leaves what it adds up, which may be a gradient of torch's."""
    from weft.runtime.unfused import STRAIGHT, all_reduce

    x = torch.ones(3, 4)
    y = all_reduce(x, [3] * group.size(), group.rank(), group, STRAIGHT, "all_reduce")
    assert torch.equal(x, torch.ones(3, 4))
    assert torch.equal(y, group.size() * x)


def overflow(group: dist.ProcessGroup, schedule: str | None) -> tuple[float, float]:
    """Return the largest sum and mean of fp16 products that fit, while the sum of two overflows, and their mean would if it were
    formed from the sum."""
    x, w = torch.full((4, 1), 200.0, dtype=torch.float16), torch.full((1, 4), 200.0, dtype=torch.float16)
    found = [weft.matmul_all_reduce(x, w, group, op=op, schedule=schedule) for op in ("sum", "avg")]
    return found[0].max().item(), found[1].max().item()


def backward_alone(group: dist.ProcessGroup) -> str:
    """The others do not come to backward."""
    x = torch.randn(5, 8, requires_grad=True)
    y = weft.matmul_all_reduce(x, torch.randn(8, 3), group, deadline_s=1)
    if group.rank() == 0:
        return told(y.sum().backward)
    time.sleep(3)
    return ""


def spans(group: dist.ProcessGroup, schedule: str) -> set[str]:
    x, timeline = Operands(group.size(), (16, 8), 4, torch.float32, "avg", 1), weft.Timeline()
    weft.matmul_all_reduce(
        x.xs[group.rank()], x.ws[group.rank()], group, op="avg", schedule=schedule, timeline=timeline
    )
    assert all(span.duration_us >= 0 for span in timeline)
    return {span.name.split()[0] for span in timeline if span.rank == group.rank()}


def checked_as_op(group: dist.ProcessGroup) -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    weft.matmul_all_reduce(x, w, group)
    op, options = torch.ops.weft.matmul_all_reduce.default, (False, None, group.group_name, "", 0.0)
    torch.library.opcheck(op, (x, w, None, None, None, None, *options))
    following = torch.randn(1, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    torch.library.opcheck(op, (x, w, *following, None, None, *options))
    torch.library.opcheck(op, (x, w, *following, torch.randn(1, 3, requires_grad=True), 1e-6, *options))


def captured(group: dist.ProcessGroup, m: int, n: int, k: int, schedule: str | None, replays: int) -> str:
    """A CUDA graph with two calls in it, replayed with fresh data; how a first call inside a capture fails."""
    rank, world, dtype = group.rank(), group.size(), torch.bfloat16
    first = Operands(world, (m, k), n, dtype, "sum", 1)
    x, w = first.xs[rank], first.ws[rank]

    def call(x: torch.Tensor, op: str) -> torch.Tensor:
        return weft.matmul_all_reduce(x, w, group, op=op, schedule=schedule)

    stream, refused = torch.cuda.Stream(), ""
    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                call(x, "sum")
        except ValueError as error:
            refused = str(error)
        call(x, "sum")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y, z = call(x, "sum"), call(x * 2, "avg")
    for replay in range(replays):
        given = Operands(world, (m, k), n, dtype, "sum", 10 + replay)
        given.ws = first.ws
        x.copy_(given.xs[rank])
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        close(y, given.exact(), given.usual(group))
        close(z, 2 * given.exact() / world, 2 * given.usual(group) / world)
    return refused
