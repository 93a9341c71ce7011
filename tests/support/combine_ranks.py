"""matmul_all_to_all in tests, on CPU processes and on GPUs: what runs on the ranks to see results and gradients.

Data are made from seeds, so every rank knows every other's."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.combine import expected, inputs, received_of, segments
from support.dispatch import Splits
from support.expert_ranks import Traffic, dual_takes, poisoned_memory, traffic
from support.matmul_ranks import close, device, own_group

import weft
from weft.builders import MatmulAllToAll, NotApplicableError, candidates
from weft.runtime.unfused import grouped_matmul

_NAME = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def every(p: MatmulAllToAll) -> list[str]:
    """The names of all schedules for `p`."""
    names = []
    for candidate in candidates(p):
        try:
            candidate.build()
        except NotApplicableError:
            continue
        names.append(candidate.name)
    return names


class Case:
    """h and weights of all ranks; this rank's arguments and its expected result, in float64."""

    def __init__(
        self, rank: int, splits: Splits, k: int, n: int, dtype: torch.dtype, seed: int, spare: int = 0
    ) -> None:
        """spare: rows of h beyond those that came, which are NaN."""
        self.splits = splits
        self.hs, self.weights = inputs(splits, k, n, _NAME[dtype], seed)
        experts = self.weights.shape[0] // len(splits)
        self.h = torch.cat((self.hs[rank], torch.full((spare, k), torch.nan, dtype=dtype))).to(device())
        self.w = self.weights.split(experts)[rank].to(device())
        self.received, self.given = received_of(rank, splits).to(device()), torch.tensor(splits[rank], device=device())
        self.exact = expected(rank, splits, [h.double() for h in self.hs], self.weights.double())
        self.usual = expected(rank, splits, self.hs, self.weights)

    def check(self, y: torch.Tensor) -> None:
        assert y.dtype == self.w.dtype
        assert y.shape == self.exact.shape
        close(y.cpu(), self.exact, self.usual)


def forward(
    group: dist.ProcessGroup, experts: int, dtype: torch.dtype, kind: Traffic, exact: bool, schedule: str | None,
    transposed: bool, calls: int, sizes: tuple[int, int] = (16, 8),
) -> None:  # fmt: skip
    """Calls back to back, with other splits and numbers of tokens at each; compared only afterwards, and to the bit with each
    other."""
    rank, world, (k, n) = group.rank(), group.size(), sizes
    found: list[tuple[Case, torch.Tensor, torch.Tensor]] = []
    for seed in range(calls):
        case = Case(rank, traffic(kind, world, experts, seed), k, n, dtype, seed, spare=0 if exact else seed % 3)
        w = case.w.mT.contiguous().mT if transposed else case.w
        if random.random() < 0.2:
            time.sleep(random.random() * 0.005)
        y = []
        for _ in range(2):
            with poisoned_memory(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y.append(weft.matmul_all_to_all(
                    case.h, w, case.received, case.given, group=group, rows=None if exact else len(case.exact), capacity=60,
                    schedule=schedule,
                ))  # fmt: skip
        found.append((case, y[0], y[1]))
    for case, y, again in found:
        case.check(y)
        assert torch.equal(y, again)


def weighing(rank: int, rows: int, n: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed + rank), dtype=torch.float64)


def backward(
    group: dist.ProcessGroup, experts: int, exact: bool, schedule: str | None, compiled: bool,
    wanted: Sequence[bool] = (True, True),
) -> None:  # fmt: skip
    """Gradients of a random weighing of y, against autograd through all ranks' rows in float64."""
    rank, world, k, n = group.rank(), group.size(), 12, 8
    options: dict[str, Any] = {"group": group.group_name, "schedule": schedule, "capacity": 60}

    def loss(h: torch.Tensor, w: torch.Tensor, received: torch.Tensor, splits: torch.Tensor, by: torch.Tensor) -> Any:
        y = weft.matmul_all_to_all(h, w, received, splits, rows=None if exact else len(by), **options)
        return (y * by).sum()

    if compiled:
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for seed in range(2 if compiled else 4):
        splits = traffic("uneven", world, experts, seed)
        case = Case(rank, splits, k, n, torch.float32, seed, spare=0 if exact else 3)
        hs = [h.double().requires_grad_() for h in case.hs]
        weights = case.weights.double().requires_grad_()
        ys = [expected(r, splits, hs, weights) for r in range(world)]
        torch.stack([(y * weighing(r, len(y), n, seed)).sum() for r, y in enumerate(ys)]).sum().backward()
        h, w = (t.clone().requires_grad_(want) for t, want in zip((case.h, case.w), wanted, strict=True))
        mine = weighing(rank, len(ys[rank]), n, seed).float().to(device())
        with poisoned_memory():
            loss(h, w, case.received, case.given, mine).backward()
        if wanted[0]:
            came = len(hs[rank])
            torch.testing.assert_close(h.grad[:came].cpu().double(), hs[rank].grad, rtol=2e-4, atol=2e-4)
            assert not h.grad[came:].any()
        if wanted[1]:
            wanted_w = weights.grad.split(experts)[rank]
            torch.testing.assert_close(w.grad.cpu().double(), wanted_w, rtol=2e-4, atol=2e-4)


def gradients_by_dual(group: dist.ProcessGroup, dual: str) -> list[torch.Tensor]:
    """Gradients of whatever is wanted, for every kind of traffic, against float64: the same bits each time, whatever else is
    wanted, of rows that travel once. Returns those of weights, in which the dual's order of GEMMs has no part."""
    rank, world, k, n, experts = group.rank(), group.size(), 12, 8, 3
    own, found = own_group(group), list[torch.Tensor]()
    options: dict[str, Any] = {"group": own, "capacity": 60, "schedule": "serial"}
    kinds: list[Traffic] = ["uneven", "all to one", "one has nothing", "nothing", "uneven"]
    for seed, kind in enumerate(kinds):
        splits, exact, grads = traffic(kind, world, experts, seed), seed % 2 == 0, list[list[torch.Tensor | None]]()
        case = Case(rank, splits, k, n, torch.float32, seed, spare=0 if exact else 3)
        hs = [h.double().requires_grad_() for h in case.hs]
        weights = case.weights.double().requires_grad_()
        ys = [expected(r, splits, hs, weights) for r in range(world)]
        torch.stack([(y * weighing(r, len(y), n, seed)).sum() for r, y in enumerate(ys)]).sum().backward()
        by = weighing(rank, len(ys[rank]), n, seed).float().to(device())
        for wanted in ((True, True), (True, False), (False, True), (True, True)):
            h, w = (t.clone().requires_grad_(want) for t, want in zip((case.h, case.w), wanted, strict=True))
            tables = case.received, case.given
            with poisoned_memory(), dual_takes(dual) as sent:
                y = weft.matmul_all_to_all(h, w, *tables, rows=None if exact else len(by), **options)
                sent.clear()
                (y * by).sum().backward()
            assert len(sent) == (world > 1 and (dual == "serial" or not wanted[0])), (sent, wanted, seed)
            grads.append([h.grad, w.grad])
        came = len(hs[rank])
        for grad_h, grad_w in grads:
            if grad_h is not None:
                torch.testing.assert_close(grad_h[:came].cpu().double(), hs[rank].grad, rtol=2e-4, atol=2e-4)
                assert not grad_h[came:].any()
                assert torch.equal(grad_h, grads[0][0])
            if grad_w is not None:
                exact_w = weights.grad.split(experts)[rank]
                torch.testing.assert_close(grad_w.cpu().double(), exact_w, rtol=2e-4, atol=2e-4)
                assert torch.equal(grad_w, grads[0][1])
        found.append(grads[0][1].cpu())
    return found


def compiled_by_dual(group: dist.ProcessGroup, dual: str, wanted: Sequence[bool]) -> None:
    with dual_takes(dual):
        backward(own_group(group), 2, True, "serial", True, wanted)


def gradients_weigh_steps(group: dist.ProcessGroup) -> None:
    """In fp32 small steps round away, but the product is linear in h and in w: the gradient weighs what a step of any size adds."""
    rank, world = group.rank(), group.size()
    splits = traffic("uneven", world, 2, 7)
    case = Case(rank, splits, 4, 3, torch.float32, 7)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()

    def y_of(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.matmul_all_to_all(h, w, case.received, case.given, group=group, capacity=60)

    by = weighing(rank, len(case.exact), 3, 7).float().to(device())
    (y_of(h, w) * by).sum().backward()
    for changed, other in ((h, w), (w, h)):
        step = torch.randn_like(changed)
        with torch.no_grad():
            moved = y_of(*((step, other) if changed is h else (other, step)))
        both = torch.stack(((moved * by).sum(), (step * changed.grad).sum()))
        dist.all_reduce(both, group=group)
        torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-3)


def round_trip(group: dist.ProcessGroup, schedules: tuple[str | None, str | None]) -> None:
    """Dispatch, experts of two GEMMs, combine, forward and backward, as one function of the tokens, against float64."""
    rank, world, experts, k, width = group.rank(), group.size(), 2, 8, 6
    for seed in range(3):
        splits = traffic("uneven", world, experts, seed)
        generator = torch.Generator().manual_seed(seed)
        tokens = [torch.randn(sum(of_rank), k, generator=generator) for of_rank in splits]
        up, down = (torch.randn(world * experts, *shape, generator=generator) for shape in ((k, width), (width, k)))
        exact = [
            [t.double().requires_grad_() for t in tokens],
            up.double().requires_grad_(),
            down.double().requires_grad_(),
        ]
        ys = [
            torch.cat(
                [(part @ exact[1][e]).relu() @ exact[2][e] for e, part in enumerate(exact[0][r].split(list(splits[r])))]
            )
            for r in range(world)
        ]
        torch.stack([(y * weighing(r, len(y), k, seed)).sum() for r, y in enumerate(ys)]).sum().backward()
        mine = [tokens[rank], *(w.split(experts)[rank] for w in (up, down))]
        x, w1, w2 = (t.clone().to(device()).requires_grad_() for t in mine)
        given = torch.tensor(splits[rank], device=device())
        h, received = weft.all_to_all_matmul(
            x, w1, given, group=group, return_received=True, capacity=60, schedule=schedules[0]
        )
        y = weft.matmul_all_to_all(
            h.relu(), w2, received, given, group=group, rows=len(x), capacity=60, schedule=schedules[1]
        )
        (y * weighing(rank, len(y), k, seed).float().to(device())).sum().backward()
        torch.testing.assert_close(y.detach().cpu().double(), ys[rank].detach(), rtol=1e-4, atol=1e-4)
        wanted = [exact[0][rank].grad, *(w.grad.split(experts)[rank] for w in exact[1:])]
        for found, grad in zip((x.grad, w1.grad, w2.grad), wanted, strict=True):
            torch.testing.assert_close(found.cpu().double(), grad, rtol=5e-4, atol=5e-4)


def dense(group: dist.ProcessGroup, schedule: str | None, dtype: torch.dtype = torch.float32) -> None:
    """One expert, even splits: a GEMM before all_to_all_single."""
    world, rank, rows, k, n = group.size(), group.rank(), 6, 8, 4
    xs = [torch.randn(world * rows, k, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    ws = [torch.randn(k, n, generator=torch.Generator().manual_seed(50 + r)).to(dtype) for r in range(world)]
    even = torch.full((world, 1), rows, device=device())
    y = weft.matmul_all_to_all(
        xs[rank].to(device()), ws[rank][None].to(device()), even, even.flatten(), group=group, rows=world * rows, schedule=schedule
    )  # fmt: skip
    made = xs[rank] @ ws[rank]
    usual = torch.empty_like(made, device=device())
    dist.all_to_all_single(usual, made.to(device()), group=group)
    mine = slice(rank * rows, (rank + 1) * rows)
    exact = torch.cat([x[mine].double() @ w.double() for x, w in zip(xs, ws, strict=True)])
    close(y.cpu(), exact, usual.cpu())


def torchs_grouped_gemm(group: dist.ProcessGroup) -> None:
    """The library's way with one GEMM for all experts, which is for GPUs; torch has one on CPU too, a slow one."""
    original = grouped_matmul._has_grouped_gemm
    is_aligned = grouped_matmul._is_aligned
    grouped_matmul._has_grouped_gemm = lambda x, w: x.numel() > 0 and is_aligned(x) and is_aligned(w)
    try:
        for exact in (True, False):
            forward(group, 3, torch.float32, "uneven", exact, "serial", exact, 4)
            backward(group, 2, exact, "serial", False)
    finally:
        grouped_matmul._has_grouped_gemm = original


def compiled_forward(group: dist.ProcessGroup, exact: bool) -> None:
    """Without gradients, one graph for several numbers of tokens."""
    rank, world, experts = group.rank(), group.size(), 2
    torch._dynamo.config.capture_dynamic_output_shape_ops = True

    def act(h: torch.Tensor, w: torch.Tensor, received: torch.Tensor, splits: torch.Tensor, like: torch.Tensor) -> Any:
        rows = None if exact else len(like)
        return torch.relu(weft.matmul_all_to_all(h * 2, w, received, splits, rows=rows, capacity=60))  # of the world

    compiled = torch.compile(act, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed in range(4):
        case = Case(rank, traffic("uneven", world, experts, seed), 8, 8, torch.float32, seed)
        found = compiled(case.h, case.w, case.received, case.given, case.exact)
        torch.testing.assert_close(found, (2 * case.exact).relu().float(), rtol=1e-4, atol=1e-4)


def checked_as_op(group: dist.ProcessGroup) -> None:
    h, w = torch.randn(7, 8, requires_grad=True), torch.randn(2, 8, 3, requires_grad=True)
    for rows in (7, None):
        splits = torch.tensor([5, 2])
        arguments = (h, w, splits[None], splits, rows, None, None, group.group_name, "", 0.0)
        torch.library.opcheck(torch.ops.weft.matmul_all_to_all.default, arguments)


def own_segments(group: dist.ProcessGroup) -> None:
    """The helper that says what must come out agrees with the words of the docstring, by the library's calls alone."""
    rank, world = group.rank(), group.size()
    splits = traffic("uneven", world, 3, 5)
    case = Case(rank, splits, 8, 4, torch.float32, 5)
    parts = segments(rank, splits, case.hs[rank])
    sent = [
        torch.cat([parts[source, rank * 3 + e] @ case.w[e].cpu() for e in range(3)]).contiguous()
        for source in range(world)
    ]
    came = torch.empty(sum(splits[rank]), 4)
    by_rank = case.given.view(world, 3).sum(1).tolist()
    dist.all_to_all_single(came, torch.cat(sent), by_rank, [len(rows) for rows in sent], group=group)
    close(came, case.exact, case.usual)
