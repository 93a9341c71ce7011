"""matmul_reduce_scatter in tests, on CPU processes and on GPUs: what runs on the ranks.

Data are made from seeds, so every rank knows every other's."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.matmul_ranks import close, data, device, own_group, told

import weft
from weft.builders import Candidate, MatmulReduceScatter, NotApplicableError, Problem, candidates
from weft.operator.spec import Operator
from weft.ops.matmul_reduce_scatter import OPERATOR

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class Operands:
    """Operands of all ranks, the expected result of rank r, and the result of torch's GEMM and all-reduce, which ranks call
    together."""

    def __init__(
        self, world: int, shape: tuple[int, ...], dim: int, n: int, dtype: torch.dtype, op: str, seed: int
    ) -> None:
        self.world, self.dim, self.parts = world, dim, world if op == "avg" else 1
        self.As = [data(r, shape, dtype, seed) for r in range(world)]
        self.Bs = [data(r, (n, shape[-1]), dtype, 50 + seed).t() for r in range(world)]

    def exact(self, rank: int) -> torch.Tensor:
        total = torch.stack([A.double() @ B.double() for A, B in zip(self.As, self.Bs, strict=True)]).sum(0)
        return total.chunk(self.world, self.dim)[rank] / self.parts

    def usual(self, group: dist.ProcessGroup) -> torch.Tensor:
        total = self.As[group.rank()] @ self.Bs[group.rank()]
        dist.all_reduce(total, group=group)
        return total.chunk(self.world, self.dim)[group.rank()] / self.parts


@contextlib.contextmanager
def poisoned_outputs(operator: Operator[Any]) -> Iterator[None]:
    """New results hold NaN."""
    native = operator.outputs

    def outputs(call: Any, world: int) -> dict[str, Any]:
        return {name: t.fill_(torch.nan) for name, t in native(call, world).items()}

    operator.outputs = outputs  # type: ignore[method-assign]
    try:
        yield
    finally:
        operator.outputs = native  # type: ignore[method-assign]


def forward(
    group: dist.ProcessGroup, shape: tuple[int, ...], dim: int, n: int, dtype: torch.dtype, op: str, schedule: str | None,
    calls: int,
) -> None:  # fmt: skip
    """Calls in a row, compared afterwards."""
    found = []
    for call in range(calls):
        x = Operands(group.size(), shape, dim, n, dtype, op, call)
        with poisoned_outputs(OPERATOR):
            y = weft.matmul_reduce_scatter(x.As[group.rank()], x.Bs[group.rank()], op, dim, group, schedule=schedule)
        found.append((y, x))
    for y, x in found:
        exact = x.exact(group.rank())
        assert y.shape == exact.shape
        assert y.dtype == dtype
        close(y, exact, x.usual(group))


def late(seconds: float) -> None:
    """Delay this rank's next call, on the host or on its GPU."""
    if device().type == "cuda":
        torch.cuda._sleep(int(seconds * 1e9))  # about so many cycles a second
    else:
        time.sleep(seconds)


def every(p: Problem) -> list[Candidate]:
    """Those that can do it."""
    found = []
    for candidate in candidates(p):
        with contextlib.suppress(NotApplicableError):
            candidate.build()
            found.append(candidate)
    return found


def each_called(
    group: dist.ProcessGroup, operator: Operator[Any], names: Sequence[str], operands: Sequence[Any],
    call: Callable[[Any, str], torch.Tensor], check: Callable[[torch.Tensor, int], None], late_s: float,
) -> Iterator[tuple[str, list[torch.Tensor]]]:  # fmt: skip
    """Each schedule called with each operands in a row, and with the first again, results poisoned; all compared when they are
    made. The first rank comes late to the second call, the last one to the third."""
    for name in names:
        found = []
        for number in (*range(len(operands)), 0):
            if (number, group.rank()) in ((1, 0), (2, group.size() - 1)):
                late(late_s)
            with poisoned_outputs(operator):
                found.append(call(operands[number], name))
        for number in range(len(operands)):
            try:
                check(found[number], number)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
        yield name, found


def every_schedule(
    group: dist.ProcessGroup, m: int, n: int, k: int, dtype: torch.dtype, late_s: float
) -> tuple[str, ...]:
    """Each candidate called several times with fresh data, results poisoned; the last call is the first again, to the bit. The
    first rank comes late to the second call, the last one to the third."""
    rank, world = group.rank(), group.size()
    operands = [Operands(world, (m, k), 0, n, dtype, "sum", seed) for seed in range(3)]
    usuals = [x.usual(group) for x in operands]
    names = [candidate.name for candidate in every(MatmulReduceScatter(world, m, n, k, NAMES[dtype]))]

    def call(x: Operands, name: str) -> torch.Tensor:
        return weft.matmul_reduce_scatter(x.As[rank], x.Bs[rank], "sum", 0, group, schedule=name)

    def check(y: torch.Tensor, i: int) -> None:
        close(y, operands[i].exact(rank), usuals[i])

    for name, found in each_called(group, OPERATOR, names, operands, call, check, late_s):
        assert torch.equal(found[0], found[-1]) or name == "serial", name
    return tuple(names)


def backward(
    group: dist.ProcessGroup, shape: tuple[int, ...], dim: int, n: int, op: str, wanted: Sequence[bool], compiled: bool,
    schedule: str | None,
) -> None:  # fmt: skip
    """Gradients of a random weighing of all results, against autograd of the unfused computation in float64."""
    rank, world = group.rank(), group.size()
    x = Operands(world, shape, dim, n, torch.float32, op, 1)
    weights = [data(r, tuple(x.exact(r).shape), torch.float32, 70) for r in range(world)]

    def loss(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        y = weft.matmul_reduce_scatter(A, B, op, dim, group.group_name)
        return (y * weights[rank]).sum()

    A, B = (t.clone().requires_grad_(want) for t, want in zip((x.As[rank], x.Bs[rank]), wanted, strict=True))
    torch._dynamo.reset()
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    with weft.plan.use(schedule):  # which names none of the gather's
        run(A, B).backward()
    As, Bs = ([t.double().requires_grad_() for t in one] for one in (x.As, x.Bs))
    total = torch.stack([a @ b for a, b in zip(As, Bs, strict=True)]).sum(0) / x.parts
    (total * torch.cat(weights, dim).double()).sum().backward()
    for given, exact, want in zip((A, B), (As[rank], Bs[rank]), wanted, strict=True):
        assert (given.grad is not None) == want
        if want:
            assert given.grad is not None
            torch.testing.assert_close(given.grad.double(), exact.grad, rtol=2e-4, atol=2e-3)


def many_sizes(group: dist.ProcessGroup, schedule: str | None, dtype: torch.dtype) -> None:
    """Call many sizes with one weight, one after the other: on GPUs in one memory."""
    found = []
    for call, rows in enumerate((64, 192, 8, 64, 320, 16, 192)):
        x = Operands(group.size(), (rows * group.size(), 128), 0, 96, dtype, "sum", call)
        y = weft.matmul_reduce_scatter(x.As[group.rank()], x.Bs[group.rank()], "sum", 0, group, schedule=schedule)
        found.append((y, x))
    for y, x in found:
        close(y, x.exact(group.rank()), x.usual(group))


def layouts(group: dist.ProcessGroup, schedule: str) -> list[str]:
    """The warnings of calls whose operands lie otherwise on the first rank; compared afterwards."""
    found = []
    rank, first = group.rank(), group.rank() == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(4):
            x = Operands(group.size(), (16 * group.size(), 24), 0, 8, torch.float32, "sum", call)
            A, B = x.As[rank], x.Bs[rank]
            if first:
                A = A.t().contiguous().t() if call % 2 else A
                B = B.contiguous() if call < 2 else B.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
            else:  # the first loads other kernels meanwhile
                late(0.01)
            found.append((weft.matmul_reduce_scatter(A, B, "sum", 0, group, schedule=schedule), x))
    for y, x in found:
        close(y, x.exact(rank), x.usual(group))
    return [str(w.message) for w in caught]


def memory_of_other_values(group: dist.ProcessGroup, schedule: str) -> tuple[str, str]:
    """Return the errors for operands whose memory was freed, between calls with views whose memory holds their negatives."""
    rank, world = group.rank(), group.size()
    x = Operands(world, (4 * world, 6), 0, 1, torch.float32, "sum", 1)
    A, B = x.As[rank], x.Bs[rank]
    negated = torch.complex(torch.zeros_like(B), -B).conj().imag
    assert negated.is_neg()
    assert torch.equal(negated, B)
    freed = [A.clone(), B.clone()]
    for one in freed:
        one.untyped_storage().resize_(0)

    def call(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        with poisoned_outputs(OPERATOR):
            return weft.matmul_reduce_scatter(A, B, "sum", 0, group, schedule=schedule)

    def check(A: torch.Tensor, B: torch.Tensor) -> None:
        close(call(A, B), x.exact(rank), x.usual(group))

    check(A, negated)
    check(torch._neg_view(-A), B)
    found = told(lambda: call(freed[0], B)), told(lambda: call(A, freed[1]))
    check(A, B)
    return found


def bad_operands(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank for impossible operands on all ranks, and on the first alone; a good call follows."""
    first = group.rank() == 0
    A, B = data(group.rank(), (4 * group.size(), 8), torch.float32, 1), data(group.rank(), (8, 3), torch.float32, 2)
    whole, of_8 = torch.int64, torch.float8_e4m3fn
    calls: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "integers": (A.to(whole), B.to(whole)), "fp8": (A.to(of_8), B.to(of_8)), "complex": (A * 1j, B * 1j),
        "other K": (A, B[:5]), "other dtype": (A, B.half()), "three dimensions": (A, B[None]),
    }  # fmt: skip
    found = {}
    for name, (a, b) in calls.items():
        for who, given in (("all", (a, b)), ("one", (a, b) if first else (A, B))):
            found[f"{name}, {who}"] = told(lambda given=given: weft.matmul_reduce_scatter(*given, "sum", 0, group))
    y = weft.matmul_reduce_scatter(A, B, "sum", 0, group)
    assert y.shape == (4, 3)
    return found


def one_rank_differs(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank if the first does something else: each time in a group of its own, which ends."""
    first = group.rank() == 0
    A, B = torch.randn(8, 6, device=device()), torch.randn(6, 3, device=device())
    calls: dict[str, Any] = {
        "rows": lambda g: weft.matmul_reduce_scatter(A[:4] if first else A, B, "sum", 0, g),
        "schedule": lambda g: weft.matmul_reduce_scatter(A, B, "sum", 0, g, schedule="serial" if first else "scatter"),
        "gradients": lambda g: weft.matmul_reduce_scatter(A, B.clone().requires_grad_(first), "sum", 0, g),
    }
    return {name: told(lambda call=call: call(own_group(group))) for name, call in calls.items()}


def backward_alone(group: dist.ProcessGroup) -> str:
    """The others do not come to backward."""
    A = torch.randn(4, 8, requires_grad=True)
    y = weft.matmul_reduce_scatter(A, torch.randn(8, 3), "sum", 0, group, deadline_s=1)
    if group.rank() == 0:
        return told(y.sum().backward)
    time.sleep(3)
    return ""


def spans(group: dist.ProcessGroup, schedule: str) -> set[str]:
    x, timeline = Operands(group.size(), (16, 8), 0, 4, torch.float32, "avg", 1), weft.Timeline()
    weft.matmul_reduce_scatter(
        x.As[group.rank()], x.Bs[group.rank()], "avg", 0, group, schedule=schedule, timeline=timeline
    )
    assert all(span.duration_us >= 0 for span in timeline)
    return {span.name.split()[0] for span in timeline if span.rank == group.rank()}


def checked_as_op(group: dist.ProcessGroup) -> None:
    A, B = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    weft.matmul_reduce_scatter(A, B, "sum", 0, group)
    torch.library.opcheck(torch.ops.weft.matmul_reduce_scatter.default, (A, B, False, None, group.group_name, "", 0.0))


def captured(group: dist.ProcessGroup, m: int, n: int, k: int, schedule: str | None, replays: int) -> str:
    """A CUDA graph with two calls in it, replayed with fresh data; how a first call inside a capture fails."""
    rank, world, dtype = group.rank(), group.size(), torch.bfloat16
    first = Operands(world, (m, k), 0, n, dtype, "sum", 1)
    A, B = first.As[rank], first.Bs[rank]

    def call(x: torch.Tensor, op: str) -> torch.Tensor:
        return weft.matmul_reduce_scatter(x, B, op, 0, group, schedule=schedule)

    stream, refused = torch.cuda.Stream(), ""
    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                call(A, "sum")
        except ValueError as error:
            refused = str(error)
        call(A, "sum")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y, z = call(A, "sum"), call(A * 2, "avg")
    for replay in range(replays):
        x = Operands(world, (m, k), 0, n, dtype, "sum", 10 + replay)
        x.Bs = first.Bs
        A.copy_(x.As[rank])
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        close(y, x.exact(rank), x.usual(group))
        close(z, 2 * x.exact(rank) / world, 2 * x.usual(group) / world)
    return refused
