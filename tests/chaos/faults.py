"""Inject faults into a rank from within, at a certain place of its program. Signals come from outside (`trial`).

`Sabotage` is called before, between and after the calls of every step. It returns how the next call is to be made,
raises, or never returns. It records what the fault did, or that it could not happen.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft import symm
from weft.errors import WeftError
from weft.symm.calls import calls_of

from . import bad
from .draw import SIGNALS, Injection
from .operators import OPERATORS
from .traces import Board, Trace
from .work import Given, Results, Work

INJECTED = "injected on purpose"
_CHILD_S = 10  # a forked child that takes longer counts as hanging


class Injected(Exception):
    """An exception raised between two calls by the program that calls weft."""


class Leave(Exception):
    """Raised to end the program of this rank normally."""


Around = Callable[[], contextlib.AbstractContextManager[None]]


class Sabotage:
    def __init__(self, injection: Injection, rank: int, trace: Trace, board: Board) -> None:
        self.injection, self.rank, self.trace, self.board = injection, rank, trace, board
        self.mine = rank == injection.victim
        self.children: list[int] = []
        self.done = False

    def at(self, n: int, place: str) -> bool:
        here = (n, place) == (self.injection.step, self.injection.place) and not self.done
        return here and (self.mine or self.injection.kind == "exception on all ranks")

    def told(self, **what: Any) -> None:
        self.done = True
        self.board.go()
        self.trace.write("fault", **what)

    def act(self, n: int, place: str, work: Work, given: Given) -> tuple[Given, Around]:
        """Run the fault if this is its place. Return the arguments of the next call, and a context for the call.

        This is called on every rank at every place.
        """
        if not self.at(n, place):
            return given, contextlib.nullcontext
        injection, kind = self.injection, self.injection.kind
        if kind in SIGNALS:
            self.told()
        elif kind == "exit":
            self.told()
            os._exit(3)
        elif kind == "leave":
            self.told()
            raise Leave
        elif kind in ("short straggler", "long straggler", "never call"):
            self.told(slept_s=injection.pauses_s[0])
            time.sleep(injection.pauses_s[0])
            if kind == "never call":
                raise Leave
        elif kind == "fewer backwards":
            self.told()
            work.skips = 1  # type: ignore[attr-defined]
        elif kind == "skipped gradient":  # every rank expects the gradient that this rank will have
            self.told()
        elif kind in ("other learning rate", "other step", "frozen"):
            self.told()
            {"other step": work.spoil_step, "frozen": work.freeze}.get(kind, work.spoil)()  # type: ignore[attr-defined]
        elif kind == "damaged checkpoint":
            self.told(form=work.damage(injection.choice))  # type: ignore[attr-defined]
        elif kind == "flipped bit":
            self.told(form=work.flip(injection.choice))  # type: ignore[attr-defined]
        elif kind == "other checkpoint":
            self.told()
            work.stale = True  # type: ignore[attr-defined]
        elif kind in ("exception between calls", "exception after calls"):
            then = (
                ("goes on", "leaves", "stays away")[injection.choice % 3] if injection.device == "cuda" else "goes on"
            )
            self.told(then=then)
            if then == "goes on":
                raise Injected
            if then == "stays away":
                time.sleep(injection.deadline_s + 2.0)
            raise Leave
        elif kind in _ALLOCATION:
            first = n in (0, injection.turn)
            return given, lambda: _no_memory(self, injection.choice, first, _ALLOCATION[kind])
        elif kind == "no memory, RLIMIT_AS":
            return given, lambda: _limited(
                self, resource.RLIMIT_AS, _address_space() + (0, 1 << 16, 1 << 20)[injection.choice % 3]
            )
        elif kind == "no descriptors":
            return given, lambda: _limited(self, resource.RLIMIT_NOFILE, _descriptors() + injection.choice % 3)
        elif kind == "no threads":
            return given, lambda: _no_threads(self, injection.choice % 3)
        elif kind.startswith("fork"):
            return given, lambda: self._forks(work, given)
        elif kind == "second thread":
            return given, lambda: self._second_thread(work, given)
        elif place == "before" and n >= 0 and kind in (*bad.FORMED, "other tables", "exception on all ranks"):
            return self._formed(work, given), contextlib.nullcontext
        return given, contextlib.nullcontext

    def of_backward(self, n: int, grads: Results, work: Work) -> Results:
        """Return the gradients of this rank's results in step n. If this is the fault, the last element that reaches a row is
        infinite or NaN.
        """
        if self.injection.kind != "infinite gradient" or not self.at(n, "between"):
            return grads
        changed = [grad.clone() for grad in grads]
        reaching = [mask.flatten().nonzero() for mask in work.reaching(n)]  # type: ignore[attr-defined]
        some = [(grad, at[-1]) for grad, at in zip(changed, reaching, strict=True) if len(at)]
        if not some:
            self.told(where="nowhere: no gradients")
            return grads
        grad, last = some[self.injection.choice % len(some)]
        grad.view(-1)[last] = float(("inf", "nan", "-inf")[self.injection.choice % 3])
        self.told()
        return changed

    @property
    def last(self) -> int:
        """The number of steps for which this rank has batches."""
        injection = self.injection
        return injection.step if self.mine and injection.kind == "fewer batches" else injection.steps

    def runs_out(self) -> None:
        """End the program because there are no more batches, in half of the cases after some work without calls."""
        self.told()
        if self.injection.choice % 2:
            time.sleep(self.injection.pauses_s[0])
        raise Leave

    def swaps(self, n: int) -> bool:
        """Return whether, in step n, this rank makes a call that its peers do not make, or makes two calls in another
        order.
        """
        injection = self.injection
        swaps = injection.second is not None and injection.kind.startswith("other ")
        swapped = self.mine and n == injection.step and swaps and not self.done
        if swapped:
            self.told()
        return swapped

    def _formed(self, work: Work, given: Given) -> Given:
        injection = self.injection
        all_ranks = injection.kind == "exception on all ranks"
        kind = bad.FORMED[injection.choice % len(bad.FORMED)] if all_ranks else injection.kind
        options = injection.options
        forms = bad.forms(kind, OPERATORS[injection.operator], options)
        name, form = forms[injection.choice % len(forms)]
        try:
            changed = form(given)
        except Exception as error:  # torch does not support this kind of tensor in this dtype
            self.told(form=name, where=f"nowhere: {error}")
            return given
        self.told(form=name)
        return changed

    # --- threads ---

    @contextlib.contextmanager
    def _second_thread(self, work: Work, given: Given) -> Iterator[None]:
        """Make the call in a second thread too, while this thread's call runs."""
        calls = calls_of(work.group)
        native, held = calls.running, _Held(calls.running)

        def call() -> None:
            if not held.inside.wait(_INSIDE_S):
                self.told(where="nowhere: the call did not begin")
                return
            time.sleep(self.injection.delay_s)
            self.told()
            try:
                work.forward(given)
            except Exception as error:
                self.trace.write("thread", error=[type(error).__name__, str(error)[:600]])
            else:
                self.trace.write("thread", error=None)
            finally:
                held.tried.set()

        thread = threading.Thread(target=call, name="chaos-thread", daemon=True)
        calls.running = held  # type: ignore[assignment]
        thread.start()
        try:
            yield
        finally:
            calls.running = native
            thread.join()

    # --- forks ---

    @contextlib.contextmanager
    def _forks(self, work: Work, given: Given) -> Iterator[None]:
        """Fork a child, either from this thread before the call, or from another thread during the call."""
        child = {"fork, idle": _idle, "fork, uses the group": _uses, "fork, drops the group": _drops}[
            self.injection.kind
        ]
        self.told()

        def fork() -> None:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(_CHILD_S)
                os._exit(child(self, work, given))
            self.children.append(pid)

        if self.injection.choice % 2:
            fork()
            yield
            return

        def later() -> None:
            time.sleep(self.injection.delay_s)
            fork()

        thread = threading.Thread(target=later, name="chaos-fork", daemon=True)
        thread.start()
        yield
        thread.join()

    def reap(self) -> None:
        """Wait for all children, and record their exit codes."""
        for pid in self.children:
            _, status = os.waitpid(pid, 0)
            self.trace.write("child", code=os.waitstatus_to_exitcode(status))


_INSIDE_S = 20.0


class _Held:
    """A wrapper of the lock of a group's calls. The first thread holds the lock until the second thread has tried to
    take it.

    So the second call begins before the end of the first call, even on a busy machine.
    """

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self.inside, self.tried = threading.Event(), threading.Event()
        self._lock, self._first, self._depth = lock, threading.current_thread(), 0

    def acquire(self, blocking: bool = True) -> bool:
        got: bool = self._lock.acquire(blocking=blocking)  # type: ignore[attr-defined]
        if threading.current_thread() is self._first:
            self._depth += got
            self.inside.set()
        else:
            self.tried.set()
        return got

    def release(self) -> None:
        if threading.current_thread() is self._first:
            self._depth -= 1
            if self._depth == 0:
                self.tried.wait(_INSIDE_S)
        self._lock.release()  # type: ignore[attr-defined]


_ALLOCATION = {
    "no memory, MemoryError": lambda: MemoryError(INJECTED),
    "no memory, RuntimeError": lambda: RuntimeError(
        f"[enforce fail at alloc_cpu.cpp:1] can't allocate memory: {INJECTED}"
    ),
}
RIGHT, UNNAMED, SUCCEEDED = 0, 1, 2  # exit statuses of a child


def _idle(sabotage: Sabotage, work: Work, given: Given) -> int:
    time.sleep(0.05)
    return RIGHT


def _uses(sabotage: Sabotage, work: Work, given: Given) -> int:
    """Make the call in a forked child, where it must raise a named error at once. Return the child's exit status."""
    try:
        work.forward(given)
    except (WeftError, ValueError) as error:
        sabotage.trace.write("child says", error=[type(error).__name__, str(error)[:300]])
        return RIGHT
    except BaseException as error:
        sabotage.trace.write("child says", error=[type(error).__name__, str(error)[:300]])
        return UNNAMED
    return SUCCEEDED


def _drops(sabotage: Sabotage, work: Work, given: Given) -> int:
    group, device = work.group, work.device
    work.__dict__.clear()
    given.clear()
    gc.collect()
    with contextlib.suppress(WeftError, ValueError):
        symm.communicator(group, device, deadline_s=0.5).close()
    gc.collect()
    return RIGHT


# --- no memory, descriptors and threads ---

_OF_TORCH = (
    "empty", "empty_like", "zeros", "full", "full_like", "tensor", "cat", "mm", "arange", "stack", "from_dlpack", "from_numpy",
)  # fmt: skip
_OF_TENSOR = (
    "new_empty", "new_zeros", "contiguous", "clone", "to", "view", "reshape", "flatten", "detach", "cumsum", "sum", "t", "movedim",
    "diff", "tolist", "narrow",
)  # fmt: skip


@contextlib.contextmanager
def _no_memory(sabotage: Sabotage, choice: int, first: bool, error: Callable[[], Exception]) -> Iterator[None]:
    """Let one call of a torch function fail, as if there were no memory for its result.

    choice: selects which call of these functions fails. first: True in the first call of a shape, which uses more of
    them than later calls.
    """
    left = choice % (16 if first else 4)
    told = False

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*args: Any, **options: Any) -> Any:
            nonlocal left, told
            left -= 1
            if left < 0 and not told:
                told = True
                sabotage.told(where=getattr(function, "__name__", "?"))
                raise error()
            return function(*args, **options)

        return fails

    before = {name: vars(torch)[name] for name in _OF_TORCH}
    own = {name: vars(torch.Tensor)[name] for name in _OF_TENSOR if name in vars(torch.Tensor)}
    for name, native in before.items():
        setattr(torch, name, wrapped(native))
    for name in _OF_TENSOR:
        setattr(torch.Tensor, name, wrapped(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, native in before.items():
            setattr(torch, name, native)
        for name in _OF_TENSOR:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)
        if not told:
            sabotage.told(where="nowhere: the call has not so many")


@contextlib.contextmanager
def _limited(sabotage: Sabotage, what: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    sabotage.told(limit=soft)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _descriptors() -> int:
    """Return the number that the next file descriptor would get. With this number as the limit, no file can be opened."""
    free = os.dup(0)
    os.close(free)
    return free


@contextlib.contextmanager
def _no_threads(sabotage: Sabotage, left: int) -> Iterator[None]:
    native = threading.Thread.start
    told = False

    def start(thread: threading.Thread) -> None:
        nonlocal left, told
        left -= 1
        if left < 0 and not told:
            told = True
            sabotage.told(where=thread.name)
            raise RuntimeError(f"can't start new thread: {INJECTED}")
        native(thread)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = native  # type: ignore[method-assign]
        if not told:
            sabotage.told(where="nowhere: the call starts not so many threads")


_OF_MEMORY = ("alloc", "memory", "can't start new thread")


def injected(error: BaseException, kind: str) -> bool:
    """Return whether the error is the injected fault itself, and not weft's reaction to it."""
    if kind == "interrupt":
        return isinstance(error, KeyboardInterrupt)
    if kind == "terminate":
        return isinstance(error, SystemExit)
    seen: BaseException | None = error
    while seen is not None:
        if INJECTED in str(seen):
            return True
        if kind == "no descriptors" and "Too many open files" in str(seen):
            return True
        if kind == "no memory, RLIMIT_AS" and (
            isinstance(seen, MemoryError) or any(word in str(seen) for word in _OF_MEMORY)
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
