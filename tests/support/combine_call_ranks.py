"""Calls of matmul_all_to_all in tests, on CPU processes and on GPUs: what runs on the ranks to see what is refused, warned of, run
and known on the host. Results and gradients: `combine_ranks`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.combine_ranks import Case
from support.expert_ranks import dual_takes, traffic
from support.matmul_ranks import device, own_group, told

import weft
from weft.runtime.unfused.sizes import sizes_of


def call(
    group: dist.ProcessGroup, *, rows: int = 4, k: int = 8, n: int = 3, experts: int = 2, tell: bool = False, **options: Any
) -> torch.Tensor:  # fmt: skip
    """`rows` tokens of each rank, all ones, that the first expert of all has, by weights of ones."""
    world, first = group.size(), group.rank() == 0
    splits = torch.zeros(world * experts, dtype=torch.int64, device=device())
    splits[0] = rows
    received = torch.zeros(world, experts, dtype=torch.int64, device=device())
    received[:, 0] = rows * first
    h, w = torch.ones(rows * world * first, k, device=device()), torch.ones(experts, k, n, device=device())
    return weft.matmul_all_to_all(h, w, received, splits, group=group, rows=rows if tell else None, **options)


def errors(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of bad arguments at a first call, raised on every rank before anything is sent."""
    world = group.size()
    h, w = torch.randn(4 * world, 8, device=device()), torch.randn(2, 8, 3, device=device())
    received = torch.tensor([[3, 1]] * world, device=device())
    splits = torch.tensor([3, 1] * world, device=device())

    def with_(**changed: Any) -> Callable[[], Any]:
        given: dict[str, Any] = {"h": h, "w_experts": w, "received": received, "splits": splits, "group": group}
        return lambda: weft.matmul_all_to_all(**{**given, **changed})

    calls: dict[str, Any] = {
        "one dimension": with_(h=h[0]),
        "no tensor": with_(h=[1.0]),
        "no table": with_(received=None),
        "strange dtype": with_(h=h * 1j, w_experts=w * 1j),
        "other K": with_(w_experts=w[:, :5]),
        "one expert, no dimension": with_(w_experts=w[0]),
        "other dtype": with_(w_experts=w.half()),
        "splits of floats": with_(splits=splits.float()),
        "splits of a rank": with_(splits=splits[:2]),
        "splits elsewhere": with_(splits=splits.to("meta")),
        "received of floats": with_(received=received.float()),
        "received of one": with_(received=received[0]),
        "received elsewhere": with_(received=received.to("meta")),
        "rows": with_(rows=-1),
        "capacity": with_(capacity=3),
        "schedule": with_(schedule="combin"),
        "cannot": with_(rows=4 * world, schedule="combine[chunks=1,by=dma]"),
        "deadline": with_(deadline_s=-1),
        "timeline": with_(timeline=3),
    }
    found = {name: told(call) for name, call in calls.items()}
    assert call(group).sum() == 4 * 8 * 3
    return found


def wrong_values(group: dist.ProcessGroup, schedule: str) -> dict[str, str]:
    """Tables that rank 1 gets wrong, in a first call and later: every rank hears of it, and the group lives on."""
    found, world, bad = {}, group.size(), group.rank() == 1
    h, w = torch.ones(2 * world, 8), torch.ones(2, 8, 3)
    received, splits = torch.tensor([[2, 0]] * world), torch.tensor([2, 0] * world)
    for when in ("first", "later"):
        for name, (row, column, number, at, given) in {
            "too many": (0, 1, 1, 0, 2), "negative": (0, 1, -1, 0, 2), "given": (0, 1, 0, 0, -2), "own": (1, 0, 1, 0, 2),
        }.items():  # fmt: skip
            wrong_received, wrong_splits = received.clone(), splits.clone()
            if bad:
                wrong_received[row, column], wrong_splits[at] = number, given
            found[f"{name}, {when}"] = told(
                lambda received=wrong_received, splits=wrong_splits: weft.matmul_all_to_all(
                    h, w, received, splits, group=group, schedule=schedule
                )
            )
        found[f"rows, {when}"] = told(
            lambda: weft.matmul_all_to_all(h, w, received, splits, group=group, schedule=schedule, rows=2 * world + bad)
        )
        call(group, schedule=schedule)
    call(group, rows=64, schedule=schedule)
    found["capacity"] = told(lambda: call(group, rows=65, schedule=schedule))
    assert call(group, rows=65, schedule=schedule, capacity=65).sum() == 65 * 8 * 3
    return found


def more_tokens(group: dist.ProcessGroup, schedule: str, dual: str, known: bool) -> tuple[str, str]:
    """Calls without capacity and their gradients, at first with 4 tokens a rank, then with as many as that leaves room for on the
    last one, then with one more (what is told of it), and again with few. known: whether backward has been called before."""
    own, rank, world = own_group(group), group.rank(), group.size()

    def both(of_last: int, backward: bool = True) -> None:
        splits = tuple((n - n // 2, n // 2, *[0] * (2 * world - 2)) for n in [4] * (world - 1) + [of_last])
        case = Case(rank, splits, 8, 3, torch.float32, of_last)
        h = case.h.requires_grad_()
        y = weft.matmul_all_to_all(h, case.w, case.received, case.given, group=own, schedule=schedule)
        case.check(y)
        if backward:
            y.sum().backward()
            wanted = case.w.double().sum(2).repeat_interleave(case.received.sum(0), 0)
            torch.testing.assert_close(h.grad.double(), wanted, rtol=1e-5, atol=1e-5)

    with dual_takes(dual):
        both(4, known)
        both(64)
        return told(lambda: both(65)), told(lambda: both(4))


def one_rank_differs(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank if rank 0 does something else: each time in a group of its own, which ends."""
    first, world = group.rank() == 0, group.size()
    none = torch.zeros(world, 1, dtype=torch.int64)
    calls: dict[str, Any] = {
        "K": lambda own: call(own, k=8 if first else 9),
        "N": lambda own: call(own, n=3 if first else 4),
        "rows": lambda own: call(own, tell=first),
        "capacity": lambda own: call(own, capacity=20 if first else 21),
        "schedule": lambda own: call(own, schedule="serial" if first else "combine[chunks=1,by=store]"),
        "experts": lambda own: call(own, experts=2 if first else 3),
        "gradients": lambda own: weft.matmul_all_to_all(
            torch.ones(0, 8, requires_grad=first), torch.ones(1, 8, 3), none, none.flatten(), group=own
        ),
    }
    everybody = list(range(world))
    found = {name: told(lambda one=one: one(dist.new_group(everybody))) for name, one in calls.items()}
    found["refuses"] = told(lambda: call(group, capacity=3 if first else 4))
    call(group)
    return found


NEVER = "combine[chunks=1,by=dma]"


def never_comes(group: dist.ProcessGroup, schedule: str) -> str:
    """Rank 0 calls twice and the others once."""
    call(group, schedule=schedule)
    if group.rank() == 0:
        return told(lambda: call(group, schedule=schedule, deadline_s=1))
    time.sleep(3)
    return ""


def never_comes_backward(group: dist.ProcessGroup) -> str:
    """Rank 0 goes backward, and the others do not."""
    rank, world = group.rank(), group.size()
    case = Case(rank, traffic("uneven", world, 2, 3), 8, 8, torch.float32, 3)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    y = weft.matmul_all_to_all(h, w, case.received, case.given, group=group, capacity=60, deadline_s=1)
    if rank == 0:
        return told(lambda: y.sum().backward())
    time.sleep(3)
    return ""


def serial_steps(group: dist.ProcessGroup) -> list[str]:
    """A timeline of the library's calls on rank 0 alone."""
    timeline = weft.Timeline() if group.rank() == 0 else None
    for _ in range(2):
        call(group, schedule="serial", timeline=timeline)
    return [span.name for span in timeline or ()]


def what_ran(group: dist.ProcessGroup, schedule: str) -> set[str]:
    timeline = weft.Timeline()
    with weft.plan.use(schedule):
        call(group, timeline=timeline)
    return {span.name for span in timeline.spans}


def copies(group: dist.ProcessGroup) -> list[str]:
    """The warnings of calls whose layouts cost a copy, made twice each; tables of int32 that are views of larger ones."""
    world, rank = group.size(), group.rank()
    splits = tuple(tuple(1 + (r + e) % 3 for e in range(2 * world)) for r in range(world))
    case = Case(rank, splits, 6, 5, torch.float32, 1)
    h, w = case.h.t().contiguous().t(), case.w.mT.contiguous().mT
    received = torch.stack([case.received.int()] * 2, dim=-1)[..., 1]
    given = torch.stack([case.given.int()] * 2, dim=-1)[:, 0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            case.check(weft.matmul_all_to_all(h, w, received, given, group=group))
    return [str(w.message) for w in caught]


def odd_uses(group: dist.ProcessGroup) -> dict[str, str]:
    """Uses that work, or say why not."""
    found, rank, world = {}, group.rank(), group.size()
    case = Case(rank, traffic("uneven", world, 2, 1), 8, 3, torch.float32, 1)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    given = case.received, case.given

    for schedule in ("serial", "combine[chunks=2,by=dma]"):
        with torch.autocast("cpu", torch.bfloat16):
            y = weft.matmul_all_to_all(h, w, *given, group=group, schedule=schedule)
            y.sum().backward()
        found[f"autocast {schedule}"] = f"{y.dtype} {h.grad.dtype}"
    y = weft.matmul_all_to_all(h, w, *given, group=group)
    (grad,) = torch.autograd.grad((y**2).sum(), [h], create_graph=True)
    found["twice"] = told(lambda: torch.autograd.grad((grad**2).sum(), [h]))
    with torch.inference_mode():
        found["inference"] = str(weft.matmul_all_to_all(h, w, *given).shape == y.shape)  # of the world
    return found


def sizes_are_known(group: dist.ProcessGroup, schedule: str | None) -> dict[str, bool]:
    """Return whether the combine finds on the host the numbers of its dispatch: with the same tables, and with others."""
    rank, world = group.rank(), group.size()
    splits = torch.tensor(traffic("uneven", world, 2, 4)[rank], device=device())
    x, w = torch.ones(int(splits.sum()), 8, device=device()), torch.ones(2, 8, 3, device=device(), requires_grad=True)

    def dispatched() -> torch.Tensor:
        return weft.all_to_all_matmul(x, w, splits, group=group, return_received=True, capacity=60, schedule=schedule)[
            1
        ]

    def known(received: torch.Tensor, given: torch.Tensor = splits) -> bool:
        found = sizes_of(given, received)
        assert found.host.came == received.sum(1).tolist()
        assert found.host.sent == given.view(world, -1).sum(1).tolist()
        return sizes_of(given, received).numbers.copy is not None

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
