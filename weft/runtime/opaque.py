"""What torch.compile may not look into, and what it may not leave out.

Where a function of a compiled program runs as it is (after a graph break, or with too many recompilations), Dynamo still
compiles the functions that it calls. Executors deal in addresses and native handles, which it would take for constants.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._library.effects import EffectType

P = ParamSpec("P")
T = TypeVar("T")


def opaque(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which Dynamo calls and does not trace, nor what it calls. Free as long as nobody has loaded Dynamo, which
    takes seconds and is not done here."""

    untraced: Callable[P, T] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal untraced
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if untraced is None:
            untraced = torch.compiler.disable(function)
        return untraced(*args, **kwargs)

    return call


def never_left_out(name: str) -> None:
    """Tell torch.compile that peers wait for calls of this operator of weft's. Without that a call is dropped whose results are
    unused or empty, and of two equal ones one is, on this rank alone. Calls of all such operators, also in backward, keep their
    order. `torch.fx.node.has_side_effect`, which torch uses for some of its own collectives, would still merge equal ones."""
    torch.library._register_effectful_op(f"weft::{name}", EffectType.ORDERED)
