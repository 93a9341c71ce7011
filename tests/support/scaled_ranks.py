"""all_gather_scaled_matmul in tests, on CPU processes and on GPUs: what runs on the ranks.

Data are made from seeds, so every rank knows every other's. Results are compared with float64 of the operands times their
scales: their error may be twice that of the library's own GEMM on the gathered input.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from support.matmul_ranks import close, data, device, told

import weft
from weft.builders import AllGatherMatmul, NotApplicableError, Scaled, candidates

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
NAMES = {BF16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8"}


def scales(rank: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return data(rank, shape, torch.float32, seed).abs() + 0.25


@dataclass(frozen=True)
class Case:
    """shape: of a shard. by "row of all": every rank passes the scales of all rows. rows: of each rank in gather_dim."""

    shape: tuple[int, ...] = (7, 32)
    gather_dim: int = 0
    widths: tuple[int, ...] = (16,)
    rows: tuple[int, ...] | None = None
    by: Literal["tensor", "row", "row of all"] = "tensor"
    out: torch.dtype = BF16
    biased: bool = False
    fast: bool = False
    return_A: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def problem(self, world: int) -> AllGatherMatmul:
        """Return the problem of the case as matrices."""
        n, k = len(self.widths), self.shape[-1]
        rows = self.rows or (self.shape[0],) * world
        by: Literal["tensor", "row"] = "tensor" if self.by == "tensor" else "row"
        scaled = Scaled(by, (NAMES[self.out],) * n, (self.biased,) * n, (self.fast,) * n)
        return AllGatherMatmul(world, rows, self.widths, k, "fp8", self.return_A, scaled)


class Data:
    """The arguments of a case on rank `rank`, and the operands of all ranks."""

    def __init__(self, case: Case, world: int, rank: int, seed: int) -> None:
        self.case, self.world, self.rank = case, world, rank
        shape, dim = case.shape, case.gather_dim
        sizes = case.rows[:world] if case.rows else (shape[dim],) * world
        shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
        self.shards = [data(r, shapes[r], torch.float32, seed).to(FP8) for r in range(world)]
        self.whole = torch.cat([shard.float() for shard in self.shards], dim).to(FP8)
        self.Bs = [
            data(rank, (n, shape[-1]), torch.float32, 50 + seed + i).to(FP8).t() for i, n in enumerate(case.widths)
        ]
        if case.by == "tensor":  # another one on every rank, which it takes for all rows
            self.A_scale = self.scale_of_whole = scales(rank, (), 60 + seed)
            self.B_scales = [scales(rank, (1,), 70 + seed + i) for i in range(len(case.widths))]
        else:
            own = [scales(r, (*shapes[r][:-1], 1), 60 + seed) for r in range(world)]
            self.scale_of_whole = torch.cat(own, dim)
            self.A_scale = own[rank] if case.by == "row" else self.scale_of_whole
            self.B_scales = [scales(rank, (1, n), 70 + seed + i) for i, n in enumerate(case.widths)]
        self.biases = [
            data(rank, (n,), BF16 if case.out == FP8 else case.out, 80 + seed + i) if case.biased else None
            for i, n in enumerate(case.widths)
        ]

    def call(self, group: dist.ProcessGroup, **options: Any) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        case, n = self.case, len(self.Bs)
        rows = None if case.rows is None else case.rows[: self.world]
        return weft.all_gather_scaled_matmul(
            self.shards[self.rank], self.Bs, self.A_scale, self.B_scales, case.gather_dim, group,
            self.biases, [None] * n, [case.out] * n, [case.fast] * n,
            return_A=case.return_A, rows=rows, **{**case.options, **options},
        )  # fmt: skip

    def exact(self, i: int) -> torch.Tensor:
        bias = self.biases[i]
        found = (self.whole.double() * self.scale_of_whole.double()) @ (self.Bs[i].double() * self.B_scales[i].double())
        return found if bias is None else found + bias.double()

    def usual(self, i: int) -> torch.Tensor:
        """Return the result of torch's scaled GEMM on gathered rows; on CPU in fp32, which is then rounded once."""
        bias, B, B_scale = self.biases[i], self.Bs[i], self.B_scales[i]
        if self.whole.device.type == "cpu":
            found = (self.whole.float() * self.scale_of_whole) @ (B.float() * B_scale)
            return (found if bias is None else found + bias).to(self.case.out)
        scale = self.scale_of_whole.flatten(0, -2) if self.scale_of_whole.dim() else self.scale_of_whole
        y = torch._scaled_mm(
            self.whole.flatten(0, -2), B, scale, B_scale, bias, out_dtype=self.case.out, use_fast_accum=self.case.fast
        )
        return y.view(*self.whole.shape[:-1], -1)

    def check(self, A: torch.Tensor | None, ys: list[torch.Tensor]) -> None:
        assert (A is not None) == self.case.return_A
        if A is not None:
            assert A.dtype == FP8
            assert torch.equal(A.float(), self.whole.float())
        assert len(ys) == len(self.Bs)
        for i, (y, B) in enumerate(zip(ys, self.Bs, strict=True)):
            assert y.shape == (*self.whole.shape[:-1], B.shape[1])
            assert y.dtype == self.case.out
            if y.numel():
                close(y, self.exact(i), self.usual(i))


def forward(group: dist.ProcessGroup, case: Case, calls: int) -> None:
    for seed in range(calls):
        made = Data(case, group.size(), group.rank(), seed)
        made.check(*made.call(group))


def applicable(p: AllGatherMatmul) -> list[str]:
    found = []
    for candidate in candidates(p):
        with contextlib.suppress(NotApplicableError):
            candidate.build()
            found.append(candidate.name)
    return found


def every_schedule(group: dist.ProcessGroup, case: Case) -> list[str]:
    """Each twice, with other data: what it should have waited for is then there from before, and wrong."""
    names = applicable(case.problem(group.size()))
    for name in names:
        for seed in range(2):
            made = Data(case, group.size(), group.rank(), seed)
            made.check(*made.call(group, schedule=name))
    return names


def compiled(group: dist.ProcessGroup, case: Case) -> None:
    made = Data(case, group.size(), group.rank(), 3)
    n, name = len(made.Bs), group.group_name

    def call(x: torch.Tensor, Bs: list[torch.Tensor], scale: torch.Tensor, B_scales: list[torch.Tensor]) -> Any:
        rows = None if case.rows is None else case.rows[: made.world]
        return weft.all_gather_scaled_matmul(
            x, Bs, scale, B_scales, case.gather_dim, name, made.biases, None, [case.out] * n, rows=rows
        )

    fast = torch.compile(call, fullgraph=True, backend="aot_eager")
    made.check(*fast(made.shards[made.rank], made.Bs, made.A_scale, made.B_scales))


def as_scaled_mm(group: dist.ProcessGroup, case: Case, is_compiled: bool) -> list[torch.dtype]:
    """`out_dtypes=[None]` against torch's own GEMM without an out_dtype, of the whole."""
    made = Data(case, group.size(), group.rank(), 5)
    one, name, dim = (
        torch.full((1,), 20.0, device=device()),
        group.group_name,
        case.gather_dim,
    )  # most results are too large

    def call(x: torch.Tensor, Bs: list[torch.Tensor]) -> Any:
        n = len(Bs)
        return weft.all_gather_scaled_matmul(
            x, Bs, one, [one] * n, dim, name, [None] * n, [None] * n, [None] * n, [False] * n
        )

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if is_compiled else call
    A, ys = call(made.shards[made.rank], made.Bs)
    gathered = made.whole.movedim(dim, 0)
    wanted = [torch._scaled_mm(gathered.flatten(0, -2), B, one, one) for B in made.Bs]
    for y, flat in zip(ys, wanted, strict=True):
        expected = flat.unflatten(0, gathered.shape[:-1]).movedim(0, dim)
        assert y.stride() == expected.stride()
        assert torch.equal(y.float(), expected.float())
        assert (y.float().abs() == torch.finfo(FP8).max).any()
    return [y.dtype for y in (A, *ys)]


def checked_as_op(group: dist.ProcessGroup) -> None:
    made = Data(Case(by="row", biased=True), group.size(), group.rank(), 1)
    made.call(group)
    arguments = (
        made.shards[0], made.Bs, made.A_scale, made.B_scales, made.biases, ["bf16"], [False], True, True, None, None,
        group.group_name, "", 0.0,
    )  # fmt: skip
    # Not test_schema, which wants arithmetic that torch has not for fp8.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.weft.all_gather_scaled_matmul.default, arguments, test_utils=tests)


def errors(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of bad arguments, each raised on every rank before anything is sent; then the group still works."""
    made = Data(Case(), group.size(), group.rank(), 1)
    x, (B,), scale, B_scales = made.shards[made.rank], made.Bs, made.A_scale, made.B_scales
    rows, n = scales(0, (7, 1), 1), B.shape[1]

    def call(*change: Any, **options: Any) -> Any:
        given = [x, [B], scale, B_scales, 0, group, None, None, None, None]
        for at, value in zip(change[::2], change[1::2], strict=True):
            given[at] = value
        return lambda: weft.all_gather_scaled_matmul(*given, **options)

    calls = {
        "dtype": call(0, x.bfloat16(), 1, [B.bfloat16()]),
        "K": call(0, x[:, :24], 1, [B[:24]]),
        "N": call(1, [B[:, :8]]),
        "no matrix": call(1, [], 3, []),
        "one tensor": call(3, B_scales[0]),
        "lengths": call(3, B_scales * 2),
        "shape of A_scale": call(2, scales(0, (5, 1), 1)),
        "dtype of A_scale": call(2, scale.half()),
        "a number": call(2, 0.5),
        "shape of B_scales": call(2, rows, 3, [scales(0, (n, 1), 1)]),
        "rows of B only": call(3, [scales(0, (1, n), 1)]),
        "bias": call(6, [torch.zeros(n, device=device())]),
        "shape of bias": call(6, [torch.zeros(n - 1, dtype=BF16, device=device())]),
        "bias of fp32": call(6, [torch.zeros(n, device=device())], 8, [torch.float32]),
        "result scale": call(7, [scale]),
        "out": call(8, [torch.float64]),
        "fp8 by row": call(2, rows, 8, [None]),
        "bias of fp8": call(6, [torch.zeros(n, device=device())], 8, [None]),
        "gradient": call(2, scale.clone().requires_grad_()),
        "2D": call(schedule="ficco_2d[start=uniform,gemms=fused,steps=2,by=dma]", return_A=False),
        "deadline": call(deadline_s=0),
        "timeline": call(timeline=3),
    }
    found = {name: told(one) for name, one in calls.items()}
    made.check(*made.call(group))
    return found


def one_rank_differs(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank if rank 0 does something else: each time in a group of its own, which ends. A refusal ends
    none."""
    first = group.rank() == 0
    made = Data(Case(), group.size(), group.rank(), 1)
    x, Bs, scale, B_scales = made.shards[made.rank], made.Bs, made.A_scale, made.B_scales
    by_row = Data(Case(by="row"), group.size(), group.rank(), 1)
    k = 24 if first else 32

    def call(own: dist.ProcessGroup, **options: Any) -> Any:
        return weft.all_gather_scaled_matmul(x, Bs, scale, B_scales, 0, own, **options)

    calls = {
        "scales": lambda own: (made if first else by_row).call(own, schedule="serial"),
        "out": lambda own: call(own, out_dtypes=[torch.half if first else BF16]),
        "fast": lambda own: call(own, use_fast_accum=[first]),
    }
    everybody = list(range(group.size()))
    found = {name: told(lambda one=one: one(dist.new_group(everybody))) for name, one in calls.items()}
    found["refuses"] = told(
        lambda: weft.all_gather_scaled_matmul(x[:, :k], [B[:k] for B in Bs], scale, B_scales, 0, group)
    )
    made.check(*made.call(group))
    return found


def copies(group: dist.ProcessGroup) -> list[str]:
    """The warnings of calls with a weight whose rows are in one piece, made twice."""
    made = Data(Case(), group.size(), group.rank(), 2)
    made.Bs = [B.contiguous() for B in made.Bs]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [made.call(group) for _ in range(2)]
    made.Bs = [B.t().contiguous().t() for B in made.Bs]
    for A, ys in results:
        made.check(A, ys)
    return [str(w.message) for w in caught]


def scales_of_one_row(group: dist.ProcessGroup, rows: list[int] | None, by: str, of_B: tuple[int, ...]) -> None:
    """Scales of one element beside a B_scale of one. by: "row", of which each has another; "row of all", the same tensor on every
    rank; "shard", each rank's own for its rows, as [1, 1]."""
    rank, sizes = group.rank(), rows or [1, 1]
    made = Data(Case(shape=(4, 32), rows=tuple(sizes)), group.size(), rank, 4)
    scale = torch.arange(1.0, 1 + sum(sizes))[:, None]
    if by == "shard":
        scale = torch.full_like(scale, 3.0)
    own = scale.split(sizes)[rank]
    given = {"row": own, "row of all": scale, "shard": torch.full((1, 1), 3.0)}[by]
    for _ in range(2):
        _, (y,) = weft.all_gather_scaled_matmul(
            made.shards[rank], made.Bs, given, [torch.full(of_B, 2.0)], 0, group, None, None, [torch.float32], rows=rows
        )
        exact = scale * (made.whole.float() @ made.Bs[0].float()) * 2
        torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-5)


def captured(group: dist.ProcessGroup, case: Case, replays: int) -> None:
    """A CUDA graph with a call in it, replayed with fresh data and between calls; bit for bit as calls are, if both take the
    same schedule."""
    world, rank = group.size(), group.rank()
    made = Data(case, world, rank, 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        made.call(group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _, (y,) = made.call(group)
    for replay in range(replays):
        other = Data(case, world, rank, 10 + replay % 5)
        made.shards[rank].view(torch.uint8).copy_(other.shards[rank].view(torch.uint8))
        made.Bs[0].t().view(torch.uint8).copy_(other.Bs[0].t().view(torch.uint8))
        made.A_scale.copy_(other.A_scale)
        made.B_scales[0].copy_(other.B_scales[0])
        y.fill_(float("nan"))
        if replay % 4 == rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        torch.cuda.synchronize()
        other.check(None, [y])
        called = other.call(group)[1][0]
        assert case.options.get("schedule") is None or torch.equal(y, called)


def as_torch(group: dist.ProcessGroup, case: Case) -> None:
    """The same call to torch's fused op, bit by bit but for how GEMMs of parts of the rows may round."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    made = Data(case, group.size(), group.rank(), 7)
    n = len(made.Bs)
    A, ys = made.call(group)
    theirs, expected = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        made.shards[made.rank], made.Bs, made.A_scale, made.B_scales, case.gather_dim, group.group_name, made.biases,
        [None] * n, [None if case.out == FP8 else case.out] * n, [case.fast] * n,
    )  # fmt: skip
    made.check(A, ys)
    made.check(theirs, expected)
    for y, other in zip(ys, expected, strict=True):
        assert y.stride() == other.stride()
        different = (y.float() != other.float()).float().mean().item()
        assert different < 0.02, f"{different:.1%} of the elements differ"
