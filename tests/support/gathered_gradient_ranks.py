"""Both gradients of matmul_all_gather as an operator of their own, on CPU processes and on GPUs: what runs on the ranks.

The public function takes the schedule that is chosen for them, so `taking` has it take another one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support import gathered_product_ranks as gathered
from support import gradcheck_ranks
from support.matmul_ranks import close, data, device, own_group, told
from support.scatter_ranks import NAMES, each_called, every, poisoned_outputs

import weft
from weft.builders import MatmulAllGatherGradients
from weft.operator import calls
from weft.ops import matmul_all_gather as public
from weft.ops.matmul_all_gather_gradients import OPERATOR


class Operands:
    """Operands of all ranks, the expected result of rank r, and its result if own gradients are reduced in fp32 and
    rounded once."""

    def __init__(self, world: int, m: int, n: int, k: int, columns: bool, dtype: torch.dtype, seed: int) -> None:
        shape = (m, world * n) if columns else (world * m, n)
        self.world, self.columns, self.dtype = world, columns, dtype
        self.xs = [data(r, (m, k), dtype, seed) for r in range(world)]
        self.gs = [data(r, shape, dtype, 30 + seed) for r in range(world)]
        self.ws = [data(r, (n, k), dtype, 50 + seed).t() for r in range(world)]

    def call(self, rank: int) -> Any:
        return OPERATOR.form(self.xs[rank], self.gs[rank], self.ws[rank], self.columns)

    def gradients(self, rank: int, added_in: torch.dtype, dtype: torch.dtype) -> list[torch.Tensor]:
        total = sum((g.to(added_in) for g in self.gs[1:]), self.gs[0].to(added_in))
        own = total.chunk(self.world, int(self.columns))[rank].to(dtype)
        return [own @ self.ws[rank].to(dtype).t(), self.xs[rank].to(dtype).t() @ own]

    def check(self, found: Sequence[torch.Tensor], rank: int) -> None:
        exact = self.gradients(rank, torch.float64, torch.float64)
        for one, of_float64, usual in zip(found, exact, self.gradients(rank, torch.float32, self.dtype), strict=True):
            assert one.shape == of_float64.shape
            assert one.dtype == self.dtype
            close(one, of_float64, usual)


def made(group: dist.ProcessGroup, call: Any, schedule: str | None) -> list[torch.Tensor]:
    with poisoned_outputs(OPERATOR):
        return calls.made(OPERATOR, group, call.x, lambda _: call, schedule=schedule)


@contextlib.contextmanager
def taking(schedule: str) -> Iterator[None]:
    """Backward takes it, and calls its operator."""
    native, called = public.within, []

    def within(op: Any, call: Any, group: dist.ProcessGroup, turn: Any) -> list[torch.Tensor]:
        called.append(op.name)
        with poisoned_outputs(op):
            return calls._called(op, call, group, schedule, turn.deadline_s, None)

    public.within = within
    try:
        yield
    finally:
        public.within = native
    assert set(called) == {OPERATOR.name}


def every_schedule(
    group: dist.ProcessGroup, m: int, n: int, k: int, columns: bool, dtype: torch.dtype, late_s: float
) -> list[str]:
    """Each one that overlaps called several times with fresh data, results poisoned; the last call is the first again, to the bit.
    The first rank comes late to the second call, the last one to the third."""
    rank, world = group.rank(), group.size()
    operands = [Operands(world, m, n, k, columns, dtype, seed) for seed in range(3)]
    found = every(MatmulAllGatherGradients(world, m, n, k, NAMES[dtype], columns))
    names = [candidate.name for candidate in found if candidate.name != "serial"]

    def call(given: Operands, name: str) -> Any:
        return calls.made(OPERATOR, group, given.xs[rank], lambda _: given.call(rank), schedule=name)

    def check(gradients: Any, number: int) -> None:
        operands[number].check(gradients, rank)

    for name, of_calls in each_called(group, OPERATOR, names, operands, call, check, late_s):
        assert all(torch.equal(a, b) for a, b in zip(of_calls[0], of_calls[-1], strict=True)), name
    return names


def chosen(group: dist.ProcessGroup) -> list[str]:
    """Return the schedules of calls that pin nothing, of a size for which overlap is predicted to be faster; and then, if the
    problem counts as tried on GPUs."""
    taken = []
    for tried in (False, True):
        own, given = own_group(group), Operands(group.size(), 4096, 8192, 4096, True, torch.bfloat16, 1)
        usual = MatmulAllGatherGradients.tried_on_gpus
        MatmulAllGatherGradients.tried_on_gpus = tried
        try:
            given.check(made(own, given.call(group.rank()), None), group.rank())
        finally:
            MatmulAllGatherGradients.tried_on_gpus = usual
        taken += [one.taken[0] for one in calls.prepared_calls(OPERATOR, own)]
    return taken


def backward(group: dist.ProcessGroup, schedule: str, *given: Any) -> None:
    with taking(schedule):
        gathered.backward(group, *given)


def gradcheck(group: dist.ProcessGroup, schedule: str) -> str:
    with taking(schedule):
        return gradcheck_ranks.checked(group, "matmul_all_gather", "serial", False)


def many_sizes(group: dist.ProcessGroup, columns: bool, schedule: str | None, dtype: torch.dtype) -> None:
    """Call many sizes with one weight, one after the other: on GPUs in one memory. Compare afterwards."""
    found = []
    for number, rows in enumerate((65, 192, 8, 65, 321, 16, 192)):
        given = Operands(group.size(), rows, 96, 128, columns, dtype, number)
        found.append((made(group, given.call(group.rank()), schedule), given))
    for gradients, given in found:
        given.check(gradients, group.rank())


def layouts(group: dist.ProcessGroup, schedule: str) -> list[str]:
    """The warnings of calls in which x, g and w lie in other ways; w's gradient lies as w does."""
    rank, found = group.rank(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(8):
            given = Operands(group.size(), 17, 8, 24, number % 2 == 1, torch.float32, number)
            x, g, w, columns = given.call(rank)
            if number & 2:
                x, g = x.t().contiguous().t(), g.t().contiguous().t()
            if number & 4:
                w = w.contiguous()
            if number == 7:  # as of a sum: one element, seen everywhere
                given.gs = [one[:1, :1].expand_as(one) for one in given.gs]
                g = given.gs[rank]
            gradients = made(group, OPERATOR.form(x, g, w, columns), schedule)
            assert gradients[1].stride() == w.stride()
            found.append((gradients, given))
    for gradients, given in found:
        given.check(gradients, rank)
    return [str(w.message) for w in caught]


def empty(group: dist.ProcessGroup, m: int, n: int, k: int) -> None:
    """Call the public function with empty operands, for each way of joining."""
    for dim in (0, -1):
        x, w = torch.ones(m, k, device=device()), torch.ones(k, n, device=device())
        x, w = x.requires_grad_(), w.requires_grad_()
        for _ in range(2):
            x.grad = w.grad = None
            weft.matmul_all_gather(x, w, dim, group).sum().backward()
            assert x.grad is not None
            assert w.grad is not None
            assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)
            assert bool((x.grad == group.size() * n).all())
            assert bool((w.grad == group.size() * m).all())


def called_by_backward(group: dist.ProcessGroup, dim: int, wanted: Sequence[bool]) -> tuple[set[str], bool]:
    """(which operators backward calls, whether the gradients of equal calls have equal bits). The first call chooses."""
    own = own_group(group)
    given = data(group.rank(), (24, 16), torch.float32, 1), data(group.rank(), (16, 12), torch.float32, 2)
    tensors = [t.requires_grad_(want) for t, want in zip(given, wanted, strict=True)]
    found = []
    for _ in range(4):
        y = weft.matmul_all_gather(*tensors, dim, own, schedule="serial")
        loss = (y * data(group.rank(), tuple(y.shape), torch.float32, 3)).sum()
        found.append(torch.autograd.grad(loss, [t for t in tensors if t.requires_grad]))
    equal = all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))
    of_group = {name for name, op in calls.OPERATORS.items() if calls.prepared_calls(op, own)}
    return of_group - {"matmul_all_gather"}, equal


def one_rank_differs(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of every rank if the first does something else: each time in a group of its own, which ends."""
    rank, world, first = group.rank(), group.size(), group.rank() == 0

    def call(g: dist.ProcessGroup, rows: int, columns: bool, schedule: str) -> list[torch.Tensor]:
        return made(g, Operands(world, rows, 6, 3, columns, torch.float32, 1).call(rank), schedule)

    different = {
        "rows": lambda g: call(g, 4 if first else 8, False, "direct[chunks=2]"),
        "dimension": lambda g: call(g, 8, first, "direct[chunks=2]"),
        "schedule": lambda g: call(g, 8, False, "serial" if first else "direct[chunks=2]"),
    }
    return {name: told(lambda one=one: one(own_group(group))) for name, one in different.items()}


def bad_gradient(group: dist.ProcessGroup) -> str:
    """Return the error for a gradient of products with another number of rows."""
    call = Operands(group.size(), 8, 6, 3, False, torch.float32, 1).call(group.rank())
    return told(lambda: made(group, call._replace(g=call.g[1:]), "direct[chunks=2]"))
