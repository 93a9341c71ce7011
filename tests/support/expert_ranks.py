"""all_to_all_matmul in tests, on CPU processes and on GPUs: what runs on the ranks.

Data are made from seeds, so every rank knows every other's."""

from __future__ import annotations

import contextlib
import logging
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from support.dispatch import Splits, expected, inputs, random_splits
from support.matmul_ranks import close, device, own_group, told

import weft
from weft.builders import AllToAllMatmul
from weft.operator import select
from weft.runtime.unfused import experts

Traffic = Literal["uneven", "all to one", "one has nothing", "nothing"]
_NAME = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def traffic(kind: Traffic, world: int, experts: int, seed: int) -> Splits:
    """Return how many tokens every rank sends to each expert: other numbers at every call."""
    numbers = random.Random(seed)
    rows = [0 if kind == "nothing" else numbers.randrange(60) for _ in range(world)]
    if kind == "one has nothing":
        rows[seed % world] = 0
    if kind == "all to one":
        return tuple(tuple(count * (e == seed % (world * experts)) for e in range(world * experts)) for count in rows)
    return random_splits(world, experts, rows, seed)


def data(
    splits: Splits, experts: int, k: int, n: int, dtype: torch.dtype, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every rank's tokens, and the weights of all experts."""
    rows = tuple(map(sum, splits))
    p = AllToAllMatmul(len(splits), experts, rows, n, k, _NAME[dtype], max(rows), splits=splits)
    tokens, weights = inputs(p, seed)
    return [t.to(device()) for t in tokens], weights.to(device())


def usual(rank: int, splits: Splits, tokens: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """Return the result as torch computes it in the tokens' dtype."""
    experts = weights.shape[0] // len(splits)
    parts = [part.split(list(of_rank)) for part, of_rank in zip(tokens, splits, strict=True)]
    mine = range(rank * experts, (rank + 1) * experts)
    return torch.cat([of_rank[expert] @ weights[expert] for expert in mine for of_rank in parts])


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN."""
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import torch's compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def forward(
    group: dist.ProcessGroup, experts: int, dtype: torch.dtype, kind: Traffic, exact: bool, schedule: str | None,
    transposed: bool, calls: int,
) -> None:  # fmt: skip
    """Calls back to back, with other splits, numbers of tokens and max_rows at each; compared only afterwards."""
    rank, world, k, n = group.rank(), group.size(), 16, 8
    found = []
    for seed in range(calls):
        splits = traffic(kind, world, experts, seed)
        tokens, weights = data(splits, experts, k, n, dtype, seed)
        w = weights.split(experts)[rank]
        w = w.mT.contiguous().mT if transposed else w
        y, received = expected(rank, splits, [t.cpu() for t in tokens], weights.cpu())
        room = None if exact else len(y) + seed % 3
        if random.random() < 0.2:
            time.sleep(random.random() * 0.005)
        with poisoned_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = weft.all_to_all_matmul(
                tokens[rank], w, torch.tensor(splits[rank], device=device()), group=group, max_rows=room,
                return_received=True, capacity=60, schedule=schedule,
            )  # fmt: skip
        found.append((*results, room, y, received, usual(rank, splits, tokens, weights)))
    for y, received, room, exact_y, exact_received, usual_y in found:
        assert torch.equal(received.cpu(), exact_received)
        assert received.dtype == torch.int64
        assert y.dtype == dtype
        assert y.shape == (len(exact_y) if room is None else room, n)
        assert y[len(exact_y) :].isnan().all()
        close(y[: len(exact_y)], exact_y.to(device()), usual_y)


def backward(group: dist.ProcessGroup, experts: int, exact: bool, schedule: str | None, compiled: bool) -> None:
    """Gradients of a random weighing of y, against autograd through all ranks' tokens in float64."""
    rank, world, k, n = group.rank(), group.size(), 12, 8
    options: dict[str, Any] = {"group": group.group_name, "schedule": schedule, "capacity": 60}

    def loss(x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, weighing: torch.Tensor) -> torch.Tensor:
        y = weft.all_to_all_matmul(x, w, splits, max_rows=None if exact else len(weighing) + 3, **options)
        return (y[: len(weighing)] * weighing).sum()

    if compiled:
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for seed in range(2 if compiled else 4):
        splits = traffic("uneven", world, experts, seed)
        tokens, weights = data(splits, experts, k, n, torch.float32, seed)
        exact_tokens = [t.double().cpu().requires_grad_() for t in tokens]
        exact_w = weights.double().cpu().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for r in range(world):
            y, _ = expected(r, splits, exact_tokens, exact_w)
            weighing = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + r), dtype=torch.float64)
            total = total + (y * weighing).sum()
            if r == rank:
                mine = weighing.float().to(device())
        total.backward()
        x = tokens[rank].clone().requires_grad_()
        w = weights.split(experts)[rank].clone().requires_grad_()
        with poisoned_memory():
            loss(x, w, torch.tensor(splits[rank], device=device()), mine).backward()
        assert x.grad is not None
        assert w.grad is not None
        assert exact_w.grad is not None
        torch.testing.assert_close(x.grad.cpu().double(), exact_tokens[rank].grad, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(w.grad.cpu().double(), exact_w.grad.split(experts)[rank], rtol=2e-4, atol=2e-4)


def torchs_grouped_gemm(group: dist.ProcessGroup) -> None:
    """The library's way with one GEMM for all experts, which is for GPUs; torch has one on CPU too, a slow one."""
    from weft.runtime.unfused import grouped_matmul

    original = grouped_matmul._has_grouped_gemm
    is_aligned = grouped_matmul._is_aligned
    grouped_matmul._has_grouped_gemm = lambda x, w: x.numel() > 0 and is_aligned(x) and is_aligned(w)
    try:
        for exact in (True, False):
            forward(group, 3, torch.float32, "uneven", exact, "serial", exact, 4)
            backward(group, 2, exact, "serial", False)
        left_out(group)
    finally:
        grouped_matmul._has_grouped_gemm = original


def left_out(group: dist.ProcessGroup) -> None:
    """The library's way where more rows come than there is room for, which on GPUs is no error: the first ones are right, and
    their gradients."""
    from weft.ops.all_to_all_matmul import gradients_of_experts
    from weft.runtime.unfused.experts import all_to_all_matmul, exchange_counts
    from weft.runtime.unfused.sizes import Sizes

    rank, world, experts = group.rank(), group.size(), 2
    splits = traffic("uneven", world, experts, 2)
    tokens, weights = data(splits, experts, 8, 8, torch.float32, 2)
    exact_tokens, exact_w = [t.double().cpu().requires_grad_() for t in tokens], weights.double().cpu().requires_grad_()
    ys = [expected(r, splits, exact_tokens, exact_w)[0] for r in range(world)]
    room = [len(y) * 2 // 3 for y in ys]
    torch.stack([y[:rows].sum() for y, rows in zip(ys, room, strict=True)]).sum().backward()
    w, mine = weights.split(experts)[rank], torch.tensor(splits[rank], device=device())
    sizes = Sizes(mine, exchange_counts(mine, group))
    y, _ = all_to_all_matmul(tokens[rank], w, sizes, group, room[rank])
    torch.testing.assert_close(y.cpu().double(), ys[rank][: room[rank]], rtol=1e-4, atol=1e-4)
    grad_x, grad_w = gradients_of_experts(tokens[rank], w, sizes, group, torch.ones_like(y), (True, True))
    torch.testing.assert_close(grad_x.cpu().double(), exact_tokens[rank].grad, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(grad_w.cpu().double(), exact_w.grad.split(experts)[rank], rtol=2e-4, atol=2e-4)


def by_columns(group: dist.ProcessGroup, exact: bool) -> str:
    """The schedule of calls that go by FiCCO's heuristic, with fewer tokens than these have columns."""
    from weft.operator.calls import prepared_calls
    from weft.ops.all_to_all_matmul import OPERATOR

    rank, experts, k = group.rank(), 2, 384
    for seed in range(4):
        splits = traffic("uneven", group.size(), experts, seed)
        tokens, weights = data(splits, experts, k, 8, torch.float32, seed)
        y, _ = expected(rank, splits, [t.cpu() for t in tokens], weights.cpu())
        with poisoned_memory(), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = weft.all_to_all_matmul(
                tokens[rank], weights.split(experts)[rank], torch.tensor(splits[rank], device=device()), group=group,
                max_rows=None if exact else len(y), capacity=60, schedule="heuristic",
            )  # fmt: skip
        close(found, y.to(device()), usual(rank, splits, tokens, weights))
    return [call for call in prepared_calls(OPERATOR, group) if call.pinned == "heuristic"][-1].taken[0]


def one_gradient(group: dist.ProcessGroup) -> None:
    """Only tokens', only weights': the same as when both are wanted, and with the same memory, as without any."""
    from weft import symm
    from weft.operator.calls import prepared_calls
    from weft.ops.all_to_all_matmul import OPERATOR

    symm.domain(group, device()).close()
    rank, world, experts = group.rank(), group.size(), 2
    splits = traffic("uneven", world, experts, 3)
    tokens, weights = data(splits, experts, 8, 8, torch.float32, 3)
    grads = []
    for wants_x, wants_w in ((True, True), (True, False), (False, True)):
        x = tokens[rank].clone().requires_grad_(wants_x)
        w = weights.split(experts)[rank].clone().requires_grad_(wants_w)
        y = weft.all_to_all_matmul(x, w, torch.tensor(splits[rank], device=device()), group=group, capacity=60)
        (y**2).sum().backward()
        grads.append((x.grad, w.grad))
    with torch.no_grad():
        again = weft.all_to_all_matmul(x, w, torch.tensor(splits[rank], device=device()), group=group, capacity=60)
    assert torch.equal(again, y)
    assert sum(not one.stale for one in prepared_calls(OPERATOR, group)) == 1
    assert grads[1][1] is grads[2][0] is None
    torch.testing.assert_close(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[2][1])


def compiled_forward(group: dist.ProcessGroup) -> None:
    """Without gradients, y of a size that only the run knows: one graph for several numbers of tokens."""
    rank, world, experts = group.rank(), group.size(), 2
    torch._dynamo.config.capture_dynamic_output_shape_ops = True

    def act(x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        y = weft.all_to_all_matmul(x * 2, w, splits, capacity=60)  # of the world
        return torch.relu(y)

    compiled = torch.compile(act, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed in range(4):
        splits = traffic("uneven", world, experts, seed)
        tokens, weights = data(splits, experts, 8, 8, torch.float32, seed)
        y, _ = expected(rank, splits, tokens, weights)
        found = compiled(tokens[rank], weights.split(experts)[rank], torch.tensor(splits[rank]))
        torch.testing.assert_close(found, (2 * y).relu().float(), rtol=1e-4, atol=1e-4)


def compiled_in_pieces(group: dist.ProcessGroup) -> list[str]:
    """Return Dynamo's warnings where it breaks the graph at a call whose number of rows it cannot know. Each call has another
    shape."""
    rank, world, experts = group.rank(), group.size(), 2
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch._dynamo").addHandler(handler)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: torch.relu(weft.all_to_all_matmul(*inputs)), backend="aot_eager")
    try:
        for n in range(1, 13):
            splits = traffic("uneven", world, experts, n)
            tokens, weights = data(splits, experts, 8, n, torch.float32, n)
            y, _ = expected(rank, splits, tokens, weights)
            with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
                found = compiled(tokens[rank], weights.split(experts)[rank], torch.tensor(splits[rank]))
            torch.testing.assert_close(found, y.relu().float(), rtol=1e-4, atol=1e-4)
    finally:
        logging.getLogger("torch._dynamo").removeHandler(handler)
    return told


def checked_as_op(group: dist.ProcessGroup) -> None:
    x, w = torch.randn(7, 8, requires_grad=True), torch.randn(2, 8, 3, requires_grad=True)
    for max_rows in (7, None):
        arguments = (x, w, torch.tensor([5, 2]), max_rows, None, False, group.group_name, "", 0.0)
        torch.library.opcheck(torch.ops.weft.all_to_all_matmul.default, arguments)


def call(
    group: dist.ProcessGroup, *, rows: int = 4, k: int = 8, n: int = 3, experts: int = 2, **options: Any
) -> torch.Tensor:
    """`rows` tokens of ones, all for the first expert of all, by weights of ones."""
    splits = torch.zeros(group.size() * experts, dtype=torch.int64, device=device())
    splits[0] = rows
    x, w = torch.ones(rows, k, device=device()), torch.ones(experts, k, n, device=device())
    return weft.all_to_all_matmul(x, w, splits, group=group, **options)


def errors(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of bad arguments at a first call, raised on every rank before anything is sent."""
    x, w = torch.randn(4, 8, device=device()), torch.randn(2, 8, 3, device=device())
    splits = torch.tensor([4] + [0] * (2 * group.size() - 1), device=device())
    dispatch = weft.all_to_all_matmul
    calls: dict[str, Any] = {
        "one dimension": lambda: dispatch(x[0], w, splits, group=group),
        "three dimensions": lambda: dispatch(x[None], w, splits, group=group),
        "no tensor": lambda: dispatch([1.0], w, splits, group=group),
        "strange dtype": lambda: dispatch(x * 1j, w * 1j, splits, group=group),
        "other K": lambda: dispatch(x, w[:, :5], splits, group=group),
        "one expert, no dimension": lambda: dispatch(x, w[0], splits, group=group),
        "list of experts": lambda: dispatch(x, list(w), splits, group=group),
        "other dtype": lambda: dispatch(x, w.half(), splits, group=group),
        "splits of floats": lambda: dispatch(x, w, splits.float(), group=group),
        "splits of a rank": lambda: dispatch(x, w, splits[:2], group=group),
        "splits elsewhere": lambda: dispatch(x, w, splits.to("meta"), group=group),
        "max_rows": lambda: dispatch(x, w, splits, group=group, max_rows=-1),
        "max_rows of 64 bits": lambda: dispatch(x, w, splits, group=group, max_rows=1 << 63),
        "capacity of 64 bits": lambda: dispatch(x, w, splits, group=group, capacity=1 << 63),
        "capacity of many bits": lambda: dispatch(x, w, splits, group=group, capacity=10**5000),
        "capacity": lambda: dispatch(x, w, splits, group=group, capacity=3),
        "schedule": lambda: dispatch(x, w, splits, group=group, schedule="dispach"),
        "cannot": lambda: dispatch(x, w, splits, group=group, max_rows=9, schedule="dispatch[by=dma,rest=each]"),
        "deadline": lambda: dispatch(x, w, splits, group=group, deadline_s=-1),
        "timeline": lambda: dispatch(x, w, splits, group=group, timeline=3),
    }
    found = {name: told(call) for name, call in calls.items()}
    torch.testing.assert_close(call(group).sum().item(), 4.0 * 8 * 3 * group.size() * (group.rank() == 0))
    return found


def wrong_values(group: dist.ProcessGroup, schedule: str) -> dict[str, str]:
    """Splits that rank 1 gets wrong, in a first call and later: every rank hears of it, and the group lives on."""
    found, bad = {}, group.rank() == 1
    x, w = torch.ones(4, 8), torch.ones(2, 8, 3)
    right = [4] + [0] * (2 * group.size() - 1)
    for when in ("first", "later"):
        for name, wrong in {"sum": [5, *right[1:]], "few": [3, *right[1:]], "negative": [5, -1, *right[2:]]}.items():
            splits = torch.tensor(wrong if bad else right)
            found[f"{name}, {when}"] = told(
                lambda splits=splits: weft.all_to_all_matmul(x, w, splits, group=group, schedule=schedule)
            )
        call(group, schedule=schedule)
    call(group, rows=64, schedule=schedule)
    found["capacity"] = told(lambda: call(group, rows=65 if bad else 4, schedule=schedule))
    y = call(group, rows=65 if bad else 4, schedule=schedule, capacity=65)
    assert y.sum() == (65 + 4 * (group.size() - 1)) * 8 * 3 * (group.rank() == 0)
    return found


@contextlib.contextmanager
def dual_takes(name: str, dual: str = "all_to_all_matmul") -> Iterator[list[str]]:
    """Calls of it that backward makes take this schedule, where a shape is new; which rows the library exchanges meanwhile."""
    choose, send, sent = select.choose, experts.send, list[str]()

    def chosen(p: Any, domain: Any, tensors: Any, pinned: str | None, **options: Any) -> Any:
        return choose(p, domain, tensors, name if p.name == dual else pinned, **options)

    def sending(*arguments: Any) -> Any:
        sent.append(arguments[-1])
        return send(*arguments)

    select.choose, experts.send = chosen, sending
    try:
        yield sent
    finally:
        select.choose, experts.send = choose, send


def more_tokens(group: dist.ProcessGroup, schedule: str, dual: str, known: bool) -> tuple[str, str]:
    """Calls without capacity and the gradients of tokens, at first with 4 of them a rank, then with as many as that leaves room for
    on the last one, then with one more (what is told of it), and again with few. known: whether backward has been called before."""
    own, rank, world, experts = own_group(group), group.rank(), group.size(), 2

    def both(of_last: int, backward: bool = True) -> None:
        splits = tuple((n - n // 2, n // 2, *[0] * (2 * world - 2)) for n in [4] * (world - 1) + [of_last])
        tokens, weights = data(splits, experts, 8, 3, torch.float32, of_last)
        x, w = tokens[rank].requires_grad_(), weights.split(experts)[rank]
        y = weft.all_to_all_matmul(x, w, torch.tensor(splits[rank]), group=own, schedule=schedule)
        close(y, expected(rank, splits, tokens, weights)[0], usual(rank, splits, tokens, weights))
        if backward:
            y.sum().backward()
            wanted = weights.double().sum(2).repeat_interleave(torch.tensor(splits[rank]), 0)
            torch.testing.assert_close(x.grad.double(), wanted, rtol=1e-5, atol=1e-5)

    with dual_takes(dual, "matmul_all_to_all"):
        both(4, known)
        both(64)
        return told(lambda: both(65)), told(lambda: both(4))


def too_many_rows(group: dist.ProcessGroup, schedule: str) -> tuple[str, float]:
    """All send 4 rows to rank 0, which has no room for 1; what it is told, and a call after it."""
    world = group.size()
    text = told(lambda: call(group, max_rows=4 * world - 1, schedule=schedule))
    return text, float(call(group, max_rows=4 * world, schedule=schedule)[: 4 * world * (group.rank() == 0)].sum())


def one_rank_differs(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank if rank 0 does something else: each time in a group of its own, which ends. A refusal ends
    none."""
    first = group.rank() == 0
    calls: dict[str, Any] = {
        "K": lambda own: call(own, k=8 if first else 9),
        "N": lambda own: call(own, n=3 if first else 4),
        "max_rows": lambda own: call(own, max_rows=20 if first else None),
        "capacity": lambda own: call(own, capacity=20 if first else 21),
        "schedule": lambda own: call(own, schedule="serial" if first else "dispatch[by=kernel,rest=each]"),
        "experts": lambda own: call(own, experts=2 if first else 3),
        "gradients": lambda own: weft.all_to_all_matmul(
            torch.ones(1, 8, requires_grad=first),
            torch.ones(1, 8, 3),
            torch.tensor([1] + [0] * (group.size() - 1)),
            group=own,
        ),
    }
    everybody = list(range(group.size()))
    found = {name: told(lambda one=one: one(dist.new_group(everybody))) for name, one in calls.items()}
    found["refuses"] = told(lambda: call(group, capacity=3, rows=4 if first else 2))
    call(group)
    return found


NEVER = "dispatch[by=dma,rest=each]"  # serial has tests of its own


def never_comes(group: dist.ProcessGroup) -> str:
    """Rank 0 calls twice and the others once."""
    call(group, schedule=NEVER)
    if group.rank() == 0:
        return told(lambda: call(group, schedule=NEVER, deadline_s=1))
    time.sleep(3)
    return ""


def pinned_by_a_block(group: dist.ProcessGroup) -> dict[str, set[str]]:
    """Return the steps that ran, by schedule: their names in the timeline."""
    found = {}
    for name in ("serial", "dispatch[by=dma,rest=each]", "dispatch[by=kernel,rest=together]"):
        timeline = weft.Timeline()
        with weft.plan.use(name):
            call(group, timeline=timeline)
        found[name] = {span.name for span in timeline.spans}
    found["nobody says"] = set()
    for _ in range(2):
        timeline = weft.Timeline()
        call(group, timeline=timeline)
        found["nobody says"] |= {span.name for span in timeline.spans}
    return found


def serial_steps(group: dist.ProcessGroup) -> list[str]:
    """A timeline of the library's calls on rank 0 alone."""
    timeline = weft.Timeline() if group.rank() == 0 else None
    for _ in range(2):
        call(group, schedule="serial", timeline=timeline)
    return [span.name for span in timeline or ()]


def copies(group: dist.ProcessGroup) -> list[str]:
    """The warnings of calls whose layouts cost a copy, made twice each; splits of int32, a view of a larger tensor."""
    world, rank = group.size(), group.rank()
    x, w = torch.randn(8, 6).t(), torch.randn(2, 5, 8).mT
    splits = torch.tensor([[3, 3] + [0] * (2 * world - 2)] * 2, dtype=torch.int32).t()[:, 0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            y = weft.all_to_all_matmul(x, w, splits, group=group)
    if rank == 0:
        torch.testing.assert_close(y[:3], x[:3] @ w[0])
    return [str(w.message) for w in caught]


def odd_uses(group: dist.ProcessGroup) -> dict[str, str]:
    """Uses that work, or say why not."""
    found = {}
    for schedule in ("serial", "dispatch[by=dma,rest=each]"):
        x, w = torch.ones(4, 8, requires_grad=True), torch.ones(2, 8, 3, requires_grad=True)
        splits = torch.tensor([4] + [0] * (2 * group.size() - 1))
        with torch.autocast("cpu", torch.bfloat16):
            y = weft.all_to_all_matmul(x, w, splits, group=group, schedule=schedule)
            y.sum().backward()
        found[f"autocast {schedule}"] = f"{y.dtype} {x.grad.dtype}"  # type: ignore[union-attr]
    y = weft.all_to_all_matmul(x, w, splits, group=group)
    (grad,) = torch.autograd.grad((y**2).sum(), [x], create_graph=True)
    found["twice"] = told(lambda: torch.autograd.grad((grad**2).sum(), [x]))
    y, received = weft.all_to_all_matmul(x, w, splits, group=group, return_received=True)
    received += 1
    found["received changed"] = told(lambda: y.sum().backward())
    with torch.inference_mode():
        found["inference"] = str(tuple(weft.all_to_all_matmul(x, w, splits).shape))  # of the world
    timeline = weft.Timeline()
    compiled = torch.compile(
        lambda x: weft.all_to_all_matmul(x, w, splits, timeline=timeline), backend="eager", fullgraph=True
    )
    found["compiled timeline"] = told(lambda: compiled(x))
    return found


def tokens_gradient_alone(group: dist.ProcessGroup, max_rows: bool) -> int:
    """Compare with float64 the tokens' gradient, which the combine computes, with y longer than what came. Return the number of
    its shapes."""
    from weft.operator.calls import operator_named, prepared_calls

    rank, world, experts = group.rank(), group.size(), 2
    for seed in range(3):
        splits = traffic("uneven", world, experts, seed)
        tokens, weights = data(splits, experts, 8, 6, torch.float32, seed)
        exact = [t.double().cpu().requires_grad_() for t in tokens]
        ys = [expected(r, splits, exact, weights.double().cpu())[0] for r in range(world)]
        torch.stack([(y**2).sum() for y in ys]).sum().backward()
        x, w = tokens[rank].clone().requires_grad_(), weights.split(experts)[rank]
        room = len(ys[rank]) + 3 if max_rows else None
        with poisoned_memory():
            y = weft.all_to_all_matmul(
                x, w, torch.tensor(splits[rank], device=device()), group=group, capacity=60, max_rows=room
            )
            (y[: len(ys[rank])] ** 2).sum().backward()
        torch.testing.assert_close(x.grad.cpu().double(), exact[rank].grad, rtol=2e-4, atol=2e-4)
    return len([one for one in prepared_calls(operator_named("matmul_all_to_all"), group) if not one.stale])
