"""scaled_matmul_reduce_scatter in tests, on CPU processes and on GPUs: what runs on the ranks.

Data are made from seeds, so every rank knows every other's. Results are compared with float64 of the operands times their
scales: their error may be twice that of the library's own GEMM and all-reduce."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from support.matmul_ranks import close, data, device, own_group, told
from support.scaled_ranks import BF16, FP8, NAMES, scales
from support.scatter_ranks import each_called, every, late, poisoned_outputs

import weft
from weft.builders import ScaledMatmulReduceScatter
from weft.ops.scaled_matmul_reduce_scatter import OPERATOR


@dataclass(frozen=True)
class Case:
    """shape: of A, in the product's dimensions. flat: A is passed as [rows, K]."""

    shape: tuple[int, ...] = (24, 32)
    dim: int = 0
    n: int = 16
    by: Literal["tensor", "row"] = "tensor"
    out: torch.dtype = BF16
    biased: bool = False
    fast: bool = False
    op: str = "sum"
    flat: bool = False
    schedule: str | None = None

    def problem(self, world: int) -> ScaledMatmulReduceScatter:
        """Return the problem of the case as matrices."""
        m, k = self.shape
        return ScaledMatmulReduceScatter(world, m, self.n, k, NAMES[self.out], self.by, self.biased, self.fast)


class Operands:
    """Operands of all ranks, the expected result of rank r, and the result of torch's GEMM and all-reduce, which ranks call
    together."""

    def __init__(self, case: Case, world: int, seed: int) -> None:
        self.case, self.world, shape, n = case, world, case.shape, case.n
        by_row, ranks = case.by == "row", range(world)
        self.As = [data(r, shape, torch.float32, seed).to(FP8) for r in ranks]
        self.Bs = [data(r, (n, shape[-1]), torch.float32, 50 + seed).to(FP8).t() for r in ranks]
        self.A_scales = [scales(r, (*shape[:-1], 1) if by_row else (), 60 + seed) for r in ranks]
        self.B_scales = [scales(r, (1, n) if by_row else (1,), 70 + seed) for r in ranks]
        self.biases = [data(r, (n,), case.out, 80 + seed) if case.biased else None for r in ranks]

    def call(self, group: dist.ProcessGroup, **options: Any) -> torch.Tensor:
        case, rank = self.case, group.rank()
        A, scale, dim, shape = self.As[rank], self.A_scales[rank], case.dim, None
        if case.flat:
            dim, shape = 0, [*A.shape[:-1], case.n]
            A, scale = A.flatten(0, -2), scale.flatten(0, -2) if case.by == "row" else scale
        options = {"schedule": case.schedule} | options
        return weft.scaled_matmul_reduce_scatter(
            A, self.Bs[rank], scale, self.B_scales[rank], case.op, case.dim, dim, group, shape,
            self.biases[rank], None, case.out, case.fast, **options,
        )  # fmt: skip

    def exact(self, rank: int) -> torch.Tensor:
        total = torch.stack([self._product(r, torch.float64) for r in range(self.world)]).sum(0)
        return self._part(total, rank)

    def usual(self, group: dist.ProcessGroup) -> torch.Tensor:
        """On CPU the GEMM is one in fp32, which is then rounded."""
        rank, case = group.rank(), self.case
        if device().type == "cpu":
            total = self._product(rank, torch.float32).to(case.out)
        else:
            scale = self.A_scales[rank].flatten(0, -2) if case.by == "row" else self.A_scales[rank]
            given = self.As[rank].flatten(0, -2), self.Bs[rank], scale, self.B_scales[rank], self.biases[rank]
            total = torch._scaled_mm(*given, out_dtype=case.out, use_fast_accum=case.fast)
            total = total.view(*case.shape[:-1], case.n)
        dist.all_reduce(total, group=group)
        return self._part(total, rank)

    def check(self, group: dist.ProcessGroup, y: torch.Tensor) -> None:
        exact = self.exact(group.rank())
        assert y.shape == exact.shape
        assert y.dtype == self.case.out
        if exact.numel():
            close(y, exact, self.usual(group))

    def _product(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        A, B = self.As[rank].to(dtype) * self.A_scales[rank], self.Bs[rank].to(dtype) * self.B_scales[rank]
        bias = self.biases[rank]
        return A @ B if bias is None else A @ B + bias

    def _part(self, total: torch.Tensor, rank: int) -> torch.Tensor:
        return total.chunk(self.world, self.case.dim)[rank] / (self.world if self.case.op == "avg" else 1)


def forward(group: dist.ProcessGroup, case: Case, calls: int) -> None:
    """Calls in a row, compared afterwards."""
    found = []
    for seed in range(calls):
        x = Operands(case, group.size(), seed)
        with poisoned_outputs(OPERATOR):
            found.append((x.call(group), x))
    for y, x in found:
        x.check(group, y)


def every_schedule(group: dist.ProcessGroup, case: Case, late_s: float) -> tuple[str, ...]:
    """Each candidate called several times with fresh data, results poisoned; the last call is the first again, to the bit. The
    first rank comes late to the second call, the last one to the third."""
    operands = [Operands(case, group.size(), seed) for seed in range(3)]
    exacts, usuals = [x.exact(group.rank()) for x in operands], [x.usual(group) for x in operands]
    names = [candidate.name for candidate in every(case.problem(group.size()))]

    def check(y: torch.Tensor, i: int) -> None:
        close(y, exacts[i], usuals[i])

    def call(x: Operands, name: str) -> torch.Tensor:
        return x.call(group, schedule=name)

    for name, found in each_called(group, OPERATOR, names, operands, call, check, late_s):
        assert torch.equal(found[0], found[-1]) or name == "serial", name
    return tuple(names)


def many_sizes(group: dist.ProcessGroup, case: Case) -> None:
    """Call many sizes with one weight, one after the other: on GPUs in one memory."""
    found = []
    for seed, rows in enumerate((64, 192, 9, 64, 320, 16, 192)):
        x = Operands(replace(case, shape=(rows * group.size(), 128)), group.size(), seed)
        found.append((x.call(group), x))
    for y, x in found:
        x.check(group, y)


def compiled(group: dist.ProcessGroup, case: Case) -> None:
    x, name = Operands(case, group.size(), 3), group.group_name
    rank, flat = group.rank(), [*case.shape[:-1], case.n] if case.flat else None

    def call(A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor) -> torch.Tensor:
        rows = A_scale.flatten(0, -2) if case.flat and case.by == "row" else A_scale
        return weft.scaled_matmul_reduce_scatter(
            A.flatten(0, -2) if case.flat else A, B, rows, B_scale, case.op, case.dim, None, name, flat,
            bias=x.biases[rank], out_dtype=case.out,
        )  # fmt: skip

    fast = torch.compile(call, fullgraph=True, backend="aot_eager")
    x.check(group, fast(x.As[rank], x.Bs[rank], x.A_scales[rank], x.B_scales[rank]))


def checked_as_op(group: dist.ProcessGroup) -> None:
    x = Operands(Case(by="row", biased=True), group.size(), 1)
    x.call(group)
    arguments = (
        x.As[0], x.Bs[0], x.A_scales[0], x.B_scales[0], x.biases[0], "bf16", False, True, False, None, group.group_name, "", 0.0,
    )  # fmt: skip
    # Not test_schema, which wants arithmetic that torch has not for fp8.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.weft.scaled_matmul_reduce_scatter.default, arguments, test_utils=tests)


def errors(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank for impossible arguments on all ranks, and on the first alone; a good call follows."""
    first, x, rank = group.rank() == 0, Operands(Case(), group.size(), 1), group.rank()
    A, B, scale, B_scale = x.As[rank], x.Bs[rank], x.A_scales[rank], x.B_scales[rank]
    (m, _), n, of_rows = A.shape, B.shape[1], scales(rank, (A.shape[0], 1), 2)
    zeros = torch.zeros(n, device=device())
    good = {
        "A": A, "B": B, "A_scale": scale, "B_scale": B_scale, "reduce_op": "sum", "orig_scatter_dim": 0,
        "scatter_dim_after_maybe_reshape": 0, "group": group,
    }  # fmt: skip
    changes: dict[str, dict[str, Any]] = {
        "integers": {"A": A.float().to(torch.int64), "B": B.float().to(torch.int64)},
        "bf16": {"A": A.bfloat16(), "B": B.bfloat16()},
        "other fp8": {"A": A.to(torch.float8_e5m2)},
        "K": {"A": A[:, :24], "B": B[:24]},
        "N": {"B": B[:, :8]},
        "other K": {"B": B[:16]},
        "no matrix": {"B": B[0, 0]},
        "no rows": {"A": A[0]},
        "odd rows": {"A": A[:-1]},
        "a number": {"A_scale": 0.5},
        "shape of A_scale": {"A_scale": of_rows[:5]},
        "dtype of A_scale": {"A_scale": scale.half()},
        "shape of B_scale": {"A_scale": of_rows, "B_scale": scales(0, (n, 1), 1)},
        "columns of B only": {"B_scale": scales(0, (1, n), 1)},
        "bias": {"bias": zeros},
        "shape of bias": {"bias": zeros[1:].bfloat16()},
        "bias of fp32": {"bias": zeros, "out_dtype": torch.float32},
        "result scale": {"result_scale": scale},
        "no out": {"out_dtype": None},
        "out": {"out_dtype": FP8},
        "gradient": {"A_scale": scale.clone().requires_grad_()},
        "reduce_op": {"reduce_op": "max"},
        "fast": {"use_fast_accum": 1},
        "last": {"orig_scatter_dim": 1},
        "other dimension": {"A": A.view(m // 2, 2, -1), "scatter_dim_after_maybe_reshape": 1},
        "no such dimension": {"scatter_dim_after_maybe_reshape": 2},
        "columns of shape": {"output_shape": [m, n + 1]},
        "rows of shape": {"output_shape": [m, 2, n]},
        "a word for a size": {"output_shape": [m, "16"]},
        "another shape": {"A": A.view(m // 2, 2, -1), "output_shape": [2, m // 2, n]},
        "add": {"schedule": "direct[chunks=2,by=dma,add=gemm]"},
        "tracked": {"schedule": "tracked[chunks=1,to=dma]"},
        "deadline": {"deadline_s": 0},
    }
    found = {}
    for name, change in changes.items():
        for who in ("all", "one"):
            given = good | change if first or who == "all" else good
            found[f"{name}, {who}"] = told(lambda given=given: weft.scaled_matmul_reduce_scatter(**given))
    x.check(group, x.call(group))
    return found


def one_rank_differs(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank if the first does something else: each time in a group of its own, which ends."""
    first, world = group.rank() == 0, group.size()
    changed = {
        "scales": Case(by="row"),
        "out": Case(out=torch.half),
        "bias": Case(biased=True),
        "fast": Case(fast=True),
    }

    def call(case: Case) -> Callable[[], torch.Tensor]:
        return lambda: Operands(case if first else Case(), world, 1).call(own_group(group))

    return {name: told(call(case)) for name, case in changed.items()}


def copies(group: dist.ProcessGroup, case: Case) -> list[str]:
    """The warnings of calls on the first rank with operands that lie otherwise, made twice."""
    x, rank = Operands(case, group.size(), 2), group.rank()
    native = x.As[rank], x.Bs[rank]
    if rank == 0:
        x.As[0] = x.As[0].view(torch.uint8).t().contiguous().t().view(FP8)
        x.Bs[0] = x.Bs[0].view(torch.uint8).contiguous().view(FP8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [x.call(group) for _ in range(2)]
    x.As[rank], x.Bs[rank] = native
    for y in found:
        x.check(group, y)
    return [str(w.message) for w in caught]


def spans(group: dist.ProcessGroup, schedule: str) -> set[str]:
    timeline = weft.Timeline()
    Operands(Case(), group.size(), 1).call(group, schedule=schedule, timeline=timeline)
    assert all(span.duration_us >= 0 for span in timeline)
    return {span.name.split()[0] for span in timeline if span.rank == group.rank()}


def captured(group: dist.ProcessGroup, case: Case, replays: int) -> None:
    """A CUDA graph with a call in it, replayed with fresh data behind stragglers, and between calls; bit for bit as calls are."""
    world, rank = group.size(), group.rank()
    x = Operands(case, world, 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x.call(group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = x.call(group)
    for replay in range(replays):
        other = Operands(case, world, 10 + replay % 5)
        x.As[rank].view(torch.uint8).copy_(other.As[rank].view(torch.uint8))
        x.Bs[rank].t().view(torch.uint8).copy_(other.Bs[rank].t().view(torch.uint8))
        x.A_scales[rank].copy_(other.A_scales[rank])
        x.B_scales[rank].copy_(other.B_scales[rank])
        y.fill_(torch.nan)
        if replay % 4 == rank:
            late(0.002)
        graph.replay()
        torch.cuda.synchronize()
        other.check(group, y)
        assert torch.equal(y, other.call(group)) or case.schedule in (None, "serial")


def as_torch(group: dist.ProcessGroup, case: Case) -> None:
    """torch's fused op, called with the same arguments but for the group's name: the same bits, but for how GEMMs of other parts of
    the rows may round."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    x, rank = Operands(case, group.size(), 7), group.rank()
    theirs = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        x.As[rank], x.Bs[rank], x.A_scales[rank], x.B_scales[rank], case.op, case.dim, case.dim, group.group_name,
        [*case.shape[:-1], case.n], x.biases[rank], None, case.out, case.fast,
    )  # fmt: skip
    mine = x.call(group)
    x.check(group, theirs)
    x.check(group, mine)
    different = (mine.float() != theirs.float()).float().mean().item()
    assert different < 0.02 or case.out == torch.float32, f"{different:.1%} of the elements differ"
