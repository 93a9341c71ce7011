"""The fast path for calls of an embedding module on GPUs, without checks and lookups that were the same in earlier calls.

`weft.operator.replay` records calls of functions by all their arguments. The numbers of ids differ in every call of an embedding
module, so its calls are recorded without them. Native code then compares a call with the recorded call, counts it, and launches
its kernel (`weft.runtime.cuda.embedding_steady`). A call with gradients enters one function of autograd in between.

Everything else takes the slow path (`weft.operator.calls.made`): new features, other batch sizes, graph captures, torch.compile,
ranks without a free result buffer, and calls after an error.
"""

from __future__ import annotations

from typing import Any

import torch

from weft import _core
from weft.embedding import JaggedInput
from weft.embedding.check import CheckedInput
from weft.embedding.forward_call import ForwardCall
from weft.operator.calls import BACKWARDS, require_backward
from weft.operator.recipes import UnlikeError
from weft.operator.recorded import SURROUNDINGS, Recorded, Seen
from weft.operator.replay import is_unusual
from weft.runtime import embedding_backward
from weft.runtime.meeting import UNKNOWN

_NO_NAMES: dict[str, Any] = {}
_KEPT = 8  # recorded calls of a module


class SteadyCall(Recorded):
    """A recorded call of an embedding module.

    seen: the recorded call. jagged: its input. out: its result.
    """

    ignores_autocast = True  # no torch function runs in the call

    def __init__(self, seen: Seen, jagged: JaggedInput, out: torch.Tensor) -> None:
        super().__init__(seen)
        op, call, prepared = seen.op, seen.call, seen.prepared
        bags: tuple[JaggedInput, CheckedInput] = op.inputs(prepared.p, call)["bags"]
        across = prepared.across(seen.checked)
        self.fingerprint, self.what, self._anchor = across.fingerprint, across.what, call.anchor
        self._beside: ForwardCall | None = None
        if seen.apply is not None:
            self._beside = op.beside(call, prepared.group, [], None)
        elif call.optimizer:
            raise UnlikeError
        from weft.runtime.cuda.embedding_steady import steady_call  # needs Triton

        assert prepared.chosen is not None
        launch = steady_call(prepared.chosen.usual, call.weights, jagged, bags[1], out, seen.deadline_s)
        if launch is None:
            raise UnlikeError
        self._launch = launch.launch
        self.read = launch.read
        self._known = _core.KnownCall(self, SURROUNDINGS, None, None, [], ("given", 0), usual=False, captured=False)

    def again(self, features: Any, tables: dict[str, Any], gradients: bool) -> tuple[JaggedInput, torch.Tensor] | None:
        """Make a call. Return its input and its result, or None if the call must take the slow path.

        tables: the modules of the tables, by name. gradients: True if gradients are enabled.
        """
        jagged = self.read(features, tables, gradients)
        if jagged is None or is_unusual():
            return None
        out = self._known.repeat((jagged,), _NO_NAMES)
        return None if out is None else (jagged, out)

    def is_ready(self, capturing: bool) -> bool:
        return not capturing

    def run(self, p: tuple[Any, ...], k: dict[str, Any], capturing: bool) -> list[torch.Tensor]:
        jagged = p[0]
        if self._beside is None:
            return [self._launch(jagged)]
        return [_Steady.apply(self.prepared, self, self._deadline_s, jagged, *jagged[1:4], self._anchor)]


class _Steady(torch.autograd.Function):
    """A recorded call with gradients. Its backward is the same as for other calls (`weft.operator.calls.backward_of_call`)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, prepared: Any, steady: SteadyCall, deadline_s: float | None, jagged: JaggedInput, *tracked: Any
    ) -> torch.Tensor:
        known = steady._beside
        assert known is not None
        ctx.prepared, ctx.deadline_s, ctx.number, ctx.flops = prepared, deadline_s, UNKNOWN, None
        ctx.beside = beside = ForwardCall(
            known.plan, known.rank, known.checked, known.tables, known.factor, known.sparse, known.deterministic
        )
        out = steady._launch(jagged)
        embedding_backward.sort_ahead(beside, jagged)
        ctx.save_for_backward(*tracked[:3])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if ctx.beside.is_updated:
            require_backward(ctx)
        return BACKWARDS[ctx.prepared.op.name](ctx, *grads)


def steady_of(seen: Seen, jagged: JaggedInput, out: torch.Tensor) -> SteadyCall | None:
    """Return a call as a recorded call, or None if it cannot be repeated on the fast path. The arguments are as for
    `SteadyCall`.
    """
    try:
        return SteadyCall(seen, jagged, out)
    except UnlikeError:
        return None


class SteadyCalls:
    """The recorded calls of an embedding module, one for each kind of call.

    A kind is a pair: True if backward of the call updates tables, and the numbers of samples of all ranks (None: the global
    batch divided evenly).
    """

    def __init__(self) -> None:
        self._known: dict[Any, SteadyCall] = {}
        self._last: Any = None  # the last call on the slow path

    def again(
        self, features: Any, kind: tuple[bool, Any], tables: dict[str, Any], gradients: bool
    ) -> tuple[JaggedInput, torch.Tensor] | None:
        """Make a call on the fast path. Return its input and its result, or None if it must take the slow path.

        tables: the modules of the tables, by name. gradients: True if gradients are enabled.
        """
        if not self._known or isinstance(kind[1], list):
            return None
        known = self._known.get(kind)
        return None if known is None else known.again(features, tables, gradients)

    def learn(self, watched: list[Seen], jagged: JaggedInput, kind: tuple[bool, Any]) -> None:
        """Record a call that took the slow path, if the previous slow call had the same kind, features, number of bags and
        dtypes. So calls whose sizes always differ are not recorded.

        watched: the list that `weft.operator.replay.watching` has yielded. jagged: the input of the call.
        """
        if len(watched) != 1 or isinstance(kind[1], list):
            return
        last = kind, jagged.keys, jagged.offsets.numel(), jagged.values.dtype, jagged.offsets.dtype
        if last != self._last:
            self._last = last
            return
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known.pop(kind, None)
        steady = steady_of(watched[0], jagged, watched[0].results[0])
        if steady is not None:
            self._known[kind] = steady
