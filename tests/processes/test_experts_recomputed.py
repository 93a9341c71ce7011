"""Experts without `capacity` under activation checkpointing: the forward and its recomputation have equal bits, also if a larger
evaluation batch comes before or in between. A training batch beyond the first one's capacity is refused on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import own_group, told
from support.operators.cases import ROWS
from support.slow import slow
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import weft
from weft.launch import Pool
from weft.operator.calls import prepared_calls
from weft.ops.all_to_all_matmul import OPERATOR

HIDDEN, EXPERTS = 8, 4
Body = Callable[[torch.Tensor], torch.Tensor]


def layer(group: dist.ProcessGroup, schedule: str | None) -> tuple[Body, list[torch.Tensor]]:
    torch.manual_seed(0)
    schedules = None if schedule is None else (schedule, ROWS["matmul_all_to_all"].small.schedule)
    mlp = weft.nn.ExpertParallelMLP(HIDDEN, 16, EXPERTS, group=group, schedules=schedules or (None, None))

    def body(x: torch.Tensor) -> torch.Tensor:
        experts = torch.arange(2 * len(x)).view(-1, 2) % EXPERTS
        return mlp(x, experts, torch.full((len(x), 2), 0.5))

    return body, [*mlp.parameters()]


def operator(group: dist.ProcessGroup, schedule: str | None) -> tuple[Body, list[torch.Tensor]]:
    torch.manual_seed(0)
    w = torch.randn(EXPERTS // group.size(), HIDDEN, 3).requires_grad_()

    def body(x: torch.Tensor) -> torch.Tensor:
        splits = torch.full((EXPERTS,), len(x) // EXPERTS)
        return weft.all_to_all_matmul(x, w, splits, group=group, schedule=schedule, deadline_s=30.0)

    return body, [w]


KINDS = {"layer": layer, "operator": operator}


def recomputed(group: dist.ProcessGroup, kind: str, schedule: str | None, reentrant: bool, when: str) -> dict[str, Any]:
    own = own_group(group)
    body, weights = KINDS[kind](own, schedule)
    torch.manual_seed(group.rank())
    large, x = torch.randn(4096, HIDDEN), torch.randn(16, HIDDEN, requires_grad=True)
    seen: list[torch.Tensor] = []

    def watched(given: torch.Tensor) -> torch.Tensor:
        y = body(given)
        seen.append(y.detach().clone())
        return y

    def evaluated() -> str:
        with torch.no_grad():
            return told(lambda: body(large))

    found: dict[str, Any] = {"evaluation": ""}
    if when == "before":
        found["evaluation"] = evaluated()
    body(x).sum().backward()  # of the same shape, without checkpointing
    plain, x.grad = [x.grad, *[w.grad for w in weights]], None
    for w in weights:
        w.grad = None
    with set_checkpoint_early_stop(False):
        y = checkpoint(watched, x, use_reentrant=reentrant)
        if when == "between":
            found["evaluation"] = evaluated()
        y.sum().backward()
    found["bits"] = len(seen) == 2 and torch.equal(*seen)
    found["gradients"] = all(map(torch.equal, plain, [x.grad, *[w.grad for w in weights]]))
    more = torch.randn(256, HIDDEN, requires_grad=True)
    found["refused"] = told(lambda: checkpoint(watched, more, use_reentrant=reentrant).sum().backward())
    seen.clear()
    checkpoint(watched, x, use_reentrant=reentrant).sum().backward()
    # Backward of the layer's combine is a dispatch to 16 columns.
    found["compiled"] = sum(prepared.p.n != 16 for prepared in prepared_calls(OPERATOR, own))
    found["after"] = torch.isfinite(x.grad).all().item()
    return found


@pytest.mark.parametrize("when", [slow("before"), "between"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "other"])
@pytest.mark.parametrize("schedule", [None, "serial", "pinned"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputations_have_the_bits_of_forward(
    pool: Pool, kind: str, schedule: str | None, reentrant: bool, when: str
) -> None:
    name = ROWS["all_to_all_matmul"].small.schedule if schedule == "pinned" else schedule
    for found in pool.run(recomputed, kind, name, reentrant, when, ranks=2, timeout_s=60):
        assert found["bits"]
        assert found["gradients"]
        assert found["compiled"] == 1, "forward, recomputation and evaluation must share a schedule"
        assert found["after"]
        for error in (found["evaluation"], found["refused"]):
            assert error in ("", "nothing") or re.match(
                r"RefusedError: ranks 0, 1: .*: pass capacity, the largest", error
            )
