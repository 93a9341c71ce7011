"""Functions that torch.compile must not trace, and operators that it must not remove.

Dynamo also compiles functions that a compiled program calls eagerly: after a graph break, or after too many recompilations.
In weft's executors, Dynamo would treat addresses and native handles as constants.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.fx

P = ParamSpec("P")
T = TypeVar("T")
looks_at_frames: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)
"""A function that returns None if no compiled function runs on this thread. Disabling Dynamo takes longer than a
launch, so weft disables it only if needed.
"""


def frames_are_looked_at() -> bool:
    """True if Dynamo would now compile a function that this thread calls."""
    return "torch._dynamo" in sys.modules and looks_at_frames() is not None


def opaque(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function`, wrapped so that Dynamo traces neither the function nor any function that it calls.

    Without Dynamo on this thread, the wrapper costs almost nothing, and does not import Dynamo, which would take seconds.
    """

    untraced: Callable[P, T] | None = None
    why = (
        f"torch.compile cannot trace {function.__name__} of weft: call it outside the compiled function, or "
        "compile without fullgraph=True"
    )

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal untraced
        # Keep this order: if Dynamo traces this function unexpectedly, it knows `is_compiling`.
        if not torch.compiler.is_compiling() and not frames_are_looked_at():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=why)  # the error of fullgraph=True shows this text
        if untraced is None:
            untraced = torch.compiler.disable(function)
        return untraced(*args, **kwargs)

    return call


def never_left_out(name: str) -> None:
    """Mark an operator of weft as having side effects for torch.compile, because peers wait for its calls.

    Without the mark, torch.compile would remove a call with unused or empty results, on this rank only. Even with the
    mark, it may merge two calls with equal arguments. Ordered effects (of `torch.library`) would keep both calls, but they
    prevent the compilation of backward (pytorch's issue 172248) and the reuse of memory.
    """
    torch.fx.node.has_side_effect(getattr(torch.ops.weft, name).default)
