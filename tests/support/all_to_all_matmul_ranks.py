"""Gradients of all_to_all_matmul, computed by matmul_all_to_all, on CPU processes and on GPUs. These functions run on
the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.operators.experts import AllToAllMatmulCall, Experts

from weft.operator import select
from weft.operator.calls import operator_named, prepared_calls
from weft.runtime.unfused import experts


@contextlib.contextmanager
def dual_takes(name: str, dual: str = "all_to_all_matmul") -> Iterator[list[str]]:
    """While the context is open, let backward call the operator `dual` with schedule `name`, for shapes that are not
    yet compiled. Yield a list, to which each exchange of an unfused call adds its name.
    """
    choose, send, sent = select.choose, experts.send, list[str]()
    dispatch = experts.dispatch

    def chosen(p: Any, comm: Any, tensors: Any, pinned: str | None, **options: Any) -> Any:
        return choose(p, comm, tensors, name if p.name == dual else pinned, **options)

    def sending(*arguments: Any) -> Any:
        sent.append(arguments[-1])
        return send(*arguments)

    def dispatching(*arguments: Any) -> Any:
        sent.append("dispatch")
        return dispatch(*arguments)

    select.choose, experts.send, experts.dispatch = chosen, sending, dispatching
    try:
        yield sent
    finally:
        select.choose, experts.send, experts.dispatch = choose, send, dispatch


def tokens_gradient_alone(group: dist.ProcessGroup, max_rows: bool) -> int:
    """Compare the gradient of the tokens with float64, if only the tokens need a gradient. matmul_all_to_all computes
    it.

    With `max_rows`, y has more rows than have arrived. Return the number of compiled shapes of matmul_all_to_all.
    """
    for seed in range(3):
        call = AllToAllMatmulCall(Experts(exact=not max_rows, k=8, n=6), group, seed)
        exact = [[t.double().requires_grad_() for t in of_rank] for of_rank in call.inputs]
        torch.stack([(y**2).sum() for (y,) in call.reference(exact)]).sum().backward()
        tokens, w = call.mine
        tokens = tokens.clone().requires_grad_()
        with call.poisoned():
            (y,) = call.kept(call(group, tokens, w))
            (y**2).sum().backward()
        torch.testing.assert_close(tokens.grad.double(), exact[call.rank][0].grad, rtol=2e-4, atol=2e-4)
    return len([one for one in prepared_calls(operator_named("matmul_all_to_all"), group) if not one.stale])
