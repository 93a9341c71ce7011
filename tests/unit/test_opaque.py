"""Functions that torch.compile must not trace, and what they cost without compilation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo

from weft.runtime.opaque import opaque


def test_it_is_not_looked_into() -> None:
    looked: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        looked.append(torch.compiler.is_compiling())
        return x + x

    def calls_of(function: Callable[[torch.Tensor], torch.Tensor]) -> list[bool]:
        def caller(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            torch._dynamo.graph_break()  # the code after the call is compiled separately
            return function(y) * 3

        looked.clear()
        torch._dynamo.reset()
        for _ in range(3):
            assert torch.equal(torch.compile(caller, backend="eager")(torch.ones(2)), torch.full((2,), 12.0))
        return looked.copy()

    assert calls_of(opaque(function)) == [False] * 3
    assert True in calls_of(function)


def test_dynamo_has_nothing_to_do_with_it_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.compiler, "disable", lambda _: pytest.fail("keeping Dynamo out takes longer than a launch")
    )
    assert opaque(lambda: 3)() == 3
