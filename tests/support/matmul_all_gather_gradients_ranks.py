"""The operator that computes both gradients of matmul_all_gather, on CPU processes and on GPUs. These functions run on
the ranks.

The public function selects the schedule of backward, so tests replace its choice by `taking`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support import gradcheck_ranks
from support.on_ranks import BF16, data, device, own_group, poisoned_outputs
from support.operators import suite
from support.operators.gemms import Gemm, MatmulAllGatherGradientsCall

import weft
from weft.builders import MatmulAllGatherGradients
from weft.operator import calls, layout
from weft.ops import matmul_all_gather as public
from weft.ops.matmul_all_gather_gradients import OPERATOR


@contextlib.contextmanager
def taking(schedule: str) -> Iterator[None]:
    """Let backward call the operator that computes both gradients, with this schedule."""
    native, called = public.within, []

    def within(op: Any, call: Any, group: dist.ProcessGroup, turn: Any) -> list[torch.Tensor]:
        called.append(op.name)
        with poisoned_outputs(op):
            return calls._called(op, call, group, schedule, None if turn is None else turn.deadline_s, None)

    public.within = within
    try:
        yield
    finally:
        public.within = native
    assert set(called) == {OPERATOR.name}


def chosen(group: dist.ProcessGroup) -> list[str]:
    """Return the schedules of two calls without a pinned schedule. Overlap is predicted to be faster for their size.

    For the first call `tried_on_gpus` of the problem is False, for the second call True.
    """
    taken, usual = [], MatmulAllGatherGradients.tried_on_gpus
    for tried in (False, True):
        own, call = own_group(group), MatmulAllGatherGradientsCall(Gemm((4096, 4096), 8192, BF16, -1), group, 1)
        MatmulAllGatherGradients.tried_on_gpus = tried
        try:
            call.check(group, call(own))
        finally:
            MatmulAllGatherGradients.tried_on_gpus = usual
        taken += [one.taken[0] for one in calls.prepared_calls(OPERATOR, own)]
    return taken


def backward(group: dist.ProcessGroup, schedule: str, case: Gemm, compiled: bool) -> None:
    with taking(schedule):
        suite.gradients(group, "matmul_all_gather", case, (True, True), compiled, None)


def gradcheck(group: dist.ProcessGroup, schedule: str) -> str:
    with taking(schedule):
        return gradcheck_ranks.checked(group, "matmul_all_gather", "serial", False)


def layouts(group: dist.ProcessGroup, schedule: str) -> list[str]:
    """Call with x, g and w in several layouts. Check that w's gradient has w's layout. Return the warnings."""
    layout._warned.clear()
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(8):
            case = Gemm((17, 24), 8, dim=-1 if seed % 2 else 0, schedule=schedule)
            call = MatmulAllGatherGradientsCall(case, group, seed)
            if seed == 7:  # one expanded element, like the gradient of `sum()`
                call.inputs = [[x, w, g[:1, :1].expand_as(g)] for x, w, g in call.inputs]
            x, w, g = call.mine
            if seed & 2:
                x, g = suite.by_columns(x), g if seed == 7 else suite.by_columns(g)
            w = w.contiguous() if seed & 4 else w
            with call.poisoned():
                gradients = call(group, x, w, g)
            assert gradients[1].stride() == w.stride()
            found.append((call, gradients))
    for call, gradients in found:
        call.check(group, gradients)
    return [str(w.message) for w in caught]


def empty(group: dist.ProcessGroup, m: int, n: int, k: int) -> None:
    """Call the public function with empty operands, with rows and with columns concatenated."""
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
    """Return (operators that backward calls, True if the gradients of equal calls have equal bits)."""
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
