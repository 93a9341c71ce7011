"""Compiled calls of known shapes compute the wanted gradients, and no others."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.slow import slow

import weft
from weft.launch import Pool

K, N = 16, 32


def some_gradients(group: dist.ProcessGroup, operator: str) -> list[tuple[list[bool], list[bool]]]:
    """Return, for several sets of inputs that want a gradient: the gradients that the compiled backward was asked for,
    and the gradients that the inputs have.
    """
    spec = importlib.import_module(f"weft.ops.{operator}").OPERATOR
    native, asked, found = spec.gradients, list[list[bool]](), []

    def spy(*arguments: Any) -> Any:
        asked.append(list(arguments[4])[:2])
        return native(*arguments)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if operator == "all_gather_matmul":
            return weft.all_gather_matmul(x, [w[0]], 0, group.group_name, return_A=False)[1][0].sum()
        splits = torch.tensor([4] + [0] * (group.size() - 1))
        return weft.all_to_all_matmul(x, w, splits, max_rows=4 * group.size()).sum()  # of the world

    spec.gradients = spy
    try:
        for wanting in ([True, False], [False, True], [True, True]):
            x, w = torch.ones(4, K), torch.ones(1, K, N)
            for tensor, wants in zip((x, w), wanting, strict=True):
                tensor.requires_grad_(wants)
            torch._dynamo.reset()
            torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w).backward()
            found.append((asked.pop(), [tensor.grad is not None for tensor in (x, w)]))
            for tensor in (x, w):
                assert tensor.grad is None or tensor.grad.abs().sum() > 0 or group.rank()
    finally:
        del spec.gradients
    assert not asked
    return found


@pytest.mark.parametrize("operator", [slow("all_gather_matmul"), "all_to_all_matmul"])
def test_compiled_backward_makes_the_gradients_that_are_wanted(pool: Pool, operator: str) -> None:
    for found in pool.run(some_gradients, operator, ranks=2):
        assert found == [(wanted, wanted) for wanted in ([True, False], [False, True], [True, True])]
