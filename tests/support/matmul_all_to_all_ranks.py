"""matmul_all_to_all on CPU processes and on GPUs: its gradients, a dispatch followed by a combine, and a single expert.
These functions run on the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from support.all_to_all_matmul_ranks import dual_takes
from support.on_ranks import F32, close, device, own_group
from support.operators import suite
from support.operators.experts import Experts, MatmulAllToAllCall, Traffic, traffic

import weft
from weft.runtime.unfused.sizes import sizes_of


def gradients_by_dual(group: dist.ProcessGroup, dual: str) -> list[torch.Tensor]:
    """Compare gradients with float64, for every kind of traffic and every set of wanted gradients. Return the gradients
    of weights.

    all_to_all_matmul, with schedule `dual`, computes the gradient of h. Equal calls must give equal bits, whichever
    gradients are wanted, and rows must be sent only once. Gradients of weights do not depend on the order of GEMMs in
    `dual`.
    """
    own, found = own_group(group), list[torch.Tensor]()
    kinds: list[Traffic] = ["uneven", "all to one", "one has nothing", "nothing", "uneven"]
    for seed, kind in enumerate(kinds):
        case = Experts(3, traffic=kind, exact=seed % 2 == 0, k=12, schedule="serial")
        call = MatmulAllToAllCall(case, group, seed)
        weights, right = suite.right_gradients(call)
        grads = list[list[torch.Tensor | None]]()
        for wanted in ((True, True), (True, False), (False, True), (True, True)):
            inputs = [t.clone().requires_grad_(want) for t, want in zip(call.mine, wanted, strict=True)]
            with call.poisoned(), dual_takes(dual) as sent:
                (y,) = call(own, *inputs)
                sent.clear()
                (y * weights[0]).sum().backward()
            assert len(sent) == (call.world > 1 and (dual == "serial" or not wanted[0])), (sent, wanted, seed)
            grads.append([t.grad for t in inputs])
        for of_call in grads:
            for grad, exact, first in zip(of_call, right, grads[0], strict=True):
                if grad is not None:
                    torch.testing.assert_close(grad.double(), exact, rtol=2e-4, atol=2e-4)
                    assert torch.equal(grad, first)
        found.append(grads[0][1].cpu())
    return found


def compiled_by_dual(group: dist.ProcessGroup, dual: str, wanted: Sequence[bool]) -> None:
    with dual_takes(dual):
        case = Experts(2, k=12, schedule="serial")
        suite.gradients(own_group(group), "matmul_all_to_all", case, wanted, True, None, range(2))


def weighing(rank: int, rows: int, n: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed + rank), dtype=torch.float64)


def round_trip(group: dist.ProcessGroup, schedules: tuple[str | None, str | None]) -> None:
    """Compare a layer of experts with float64, forward and backward: dispatch, two GEMMs for each expert, combine."""
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


def dense(group: dist.ProcessGroup, schedule: str | None, dtype: torch.dtype = F32) -> None:
    """Compare a call with one expert per rank and even splits with a GEMM followed by all_to_all_single."""
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


def sizes_are_known(group: dist.ProcessGroup, schedule: str | None, with_gradients: bool) -> dict[str, bool]:
    """Return {tables that the combine gets: True if weft then finds the CPU's copy of the dispatch's sizes}.

    The tables are those of the dispatch, or copied, other or changed tables.
    """
    rank, world = group.rank(), group.size()
    splits = torch.tensor(traffic("uneven", world, 2, 4)[rank], device=device())
    x, w = (
        torch.ones(int(splits.sum()), 8, device=device()),
        torch.ones(2, 8, 3, device=device(), requires_grad=with_gradients),
    )

    def dispatched() -> torch.Tensor:
        return weft.all_to_all_matmul(x, w, splits, group=group, return_received=True, capacity=60, schedule=schedule)[
            1
        ]

    def known(received: torch.Tensor, given: torch.Tensor = splits) -> bool:
        found = sizes_of(given, received)
        assert found.host.came == received.sum(1).tolist()
        assert found.host.sent == given.view(world, -1).sum(1).tolist()
        return sizes_of(given, received).is_fetched

    for _ in range(3):  # later calls take the fast path
        received = dispatched()
    found = {
        "the same": known(received),
        "a copy": known(received.clone()),
        "other splits": known(received, splits + 1),
    }
    received += 1
    found["changed"] = known(received)
    received = dispatched()
    splits *= 2
    found["splits changed"] = known(received)
    return found
