"""Replacements for tests/unit/test_native_calls.py: a group, its compiled operators, torch's collectives, and a
recorded call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from weft import _core
from weft.runtime.layouts import READER
from weft.runtime.scaled_matmul import scaled_matmul
from weft.symm.calls import GroupCalls

WORLD = 2
STEPS = [
    ("all_gather", "x", ("x_shard",), torch.float32),
    ("matmul", "y", ("x", "w"), torch.float32),
    ("reduce_scatter", "part", ("y",), torch.float32),
    ("all_reduce", "part", ("part",), torch.float32),
]
BUFFERS = ["x_shard", "w", "x", "y", "part"]


class Group:
    """A replacement for a process group. All its ranks have equal tensors."""


class Work:
    waited = 0

    def wait(self) -> None:
        Work.waited += 1


class Torch:
    """The collectives of `Group`. at: a function that is called with the name of each step before the step runs."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.at: Callable[[str], object] = lambda name: None

    def _note(self, name: str) -> None:
        self.ran.append(name)
        self.at(name)

    def gather(self, group: Group, out: torch.Tensor, x: torch.Tensor, options: str) -> None:
        self._note("gather")
        out.copy_(torch.cat([x] * WORLD))

    def scatter(self, group: Group, out: torch.Tensor, x: torch.Tensor, options: str) -> Work:
        self._note("scatter")
        out.copy_(x[: len(out)] * WORLD)
        return Work()

    def reduce(self, group: Group, xs: list[torch.Tensor], options: str) -> None:
        self._note("reduce")
        xs[0].mul_(WORLD)

    def exchange(
        self, group: Group, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int], options: str
    ) -> Work:  # fmt: skip
        """Each rank sends its rows for rank 0 first, so this rank receives the same first rows from every rank."""
        self._note("exchange")
        out.copy_(torch.cat([x[:rows] for rows in received]))
        return Work()

    def mm(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self._note("mm")
        return torch.mm(a, b, out=out)

    def calls(self) -> _core.TorchCalls:
        assert READER is not None
        return _core.TorchCalls(
            reader=READER, mm=self.mm, scaled_mm=torch._scaled_mm, scaled_elsewhere=scaled_matmul, byte=torch.uint8,
            gather=self.gather, gather_options="g", scatter=self.scatter, scatter_options="s", reduce=self.reduce,
            reduce_options="r", exchange=self.exchange, exchange_options="e", async_options="a",
        )  # fmt: skip


class Here:
    calls = 0

    def called(self, prepared: Prepared) -> None:
        prepared.came_back, self.calls = True, self.calls + 1
        prepared.called_at = self.calls


class Sizes(_core.FamilySizes):
    """The sizes of a family. recur: sizes that run unfused although they recur."""

    recur: frozenset[int] = frozenset()

    def takes(self, rows: int) -> bool:
        return rows in self.recur


class Prepared:
    chosen: object = "serial"
    called_at, came_back = 0, False


class Recorded:
    """The Python part of a call."""

    kind, chosen, what, fingerprint, any_rows, differentiated, notes = "cuda", "serial", "op", 7, False, False, False
    ignores_autocast = False

    @property
    def passes(self) -> bool:
        return self.any_rows

    def __init__(self, group: Group, **changes: Any) -> None:
        self.group_ref, self.prepared, self.here = weakref.ref(group), Prepared(), Here()
        self.counts, self.health, self.ready = GroupCalls(), _core.Health(60.0), True
        self.digest = self.counts.made
        self.sizes, self.number, self.multiple = Sizes(0, 1 << 16), 101, 1
        self.told: list[Any] = []
        vars(self).update(changes)

    def failed(self, error: BaseException, group: Group, published: int | None) -> None:
        self.told.append(("failed", id(error)))  # the error itself would refer to this object
        raise error

    def refused(self, text: str) -> None:
        self.told.append(("refused", text))

    def is_ready(self, capturing: bool) -> bool:
        return self.ready

    def run(self, p: tuple[Any, ...], k: dict[str, Any], capturing: bool) -> list[Any]:
        self.told.append(("run", capturing))
        return [p[0] + 1]

    def in_python(self, p: tuple[Any, ...], k: dict[str, Any], group: Group) -> str:
        return "on CPU"

    def note(self, p: tuple[Any, ...], k: dict[str, Any]) -> None:
        self.told.append("noted")


class Played:
    """A recorded call of (x_shard, [w]), with the state that it reads."""

    def __init__(self, *, overlapped: bool = False, **changes: Any) -> None:
        assert READER is not None
        self.group, self.torch, self.capturing, self.autocast, self.looks = Group(), Torch(), False, False, False
        self.groups: dict[Any, Any] = {self.group: None}
        self.coalescing: dict[Any, Any] = {}
        self.of = Recorded(self.group, **changes)
        me = weakref.proxy(self)  # Python cannot collect a cycle through native objects
        around = _core.Surroundings(
            groups=self.groups, coalescing=self.coalescing, is_any_autocast_enabled=lambda: me.autocast,
            is_autocast_enabled=lambda kind: me.autocast,
            is_capturing=lambda: me.capturing, looks_at_frames=lambda: me.looks,
        )  # fmt: skip
        inputs = ("list", [("given", 0), ("given", 1, 0)])
        steps = _core.PlainSteps(self.torch.calls(), BUFFERS, STEPS, WORLD)
        result = ("given", 0)
        self.forward = {"_current_level": -1}
        self.calls: dict[bytes, Any] = {}
        self.families: dict[bytes, Any] = {}
        self._known = _core.KnownCalls(
            READER, self.calls, self.families, (Group,), (), torch.is_grad_enabled, self.forward, None
        )
        self.w = torch.randn(3, 4)
        missed = self()
        kept, key = (self.families, missed.family) if self.of.any_rows else (self.calls, missed.key)
        usual = not overlapped
        kept[key] = _core.KnownCall(
            self.of, around, inputs, steps, ["part"], result, usual=usual, captured=usual and not self.of.any_rows
        )  # fmt: skip

    def __call__(self, rows: int = 2) -> Any:
        self.x = torch.randn(rows, 3)
        return self._known(self.x, [self.w], group=self.group)

    def is_slow(self, rows: int = 2) -> bool:
        before = self.counts()
        found = self(rows)
        if isinstance(found, _core.UnknownCall):
            assert self.counts() == before, "the slow path counts"
            assert self.is_free()
        return isinstance(found, _core.UnknownCall)

    def counts(self) -> tuple[int, ...]:
        counts = self.of.counts
        return counts.begun, counts.ended, counts.made.last, counts.made.digest

    def is_free(self) -> bool:
        """True if no thread is in a call."""
        got: list[bool] = []

        def look() -> None:
            got.append(self.of.counts.running.acquire(blocking=False))
            if got[0]:
                self.of.counts.running.release()

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return got == [True]

    def expected(self) -> torch.Tensor:
        return (torch.cat([self.x] * WORLD) @ self.w)[: len(self.x)] * WORLD * WORLD
