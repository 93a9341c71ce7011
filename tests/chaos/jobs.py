"""The program of a rank: steps of calls whose results are checked at once.

Like a program that catches its errors, it continues with the next step after any error. It records the duration of
every call, and whether it gave a right result, a wrong result, or an error. `verdict` judges the records.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import weft
from weft import symm
from weft.errors import WeftError
from weft.symm.calls import calls_of
from weft.symm.entries import Entry

from . import bad
from .checkpoints import Checkpoints
from .draw import Injection
from .faults import Injected, Leave, Sabotage, injected
from .operators import OPERATORS
from .traces import BETWEEN, CALLING, DONE, LEAVING, Board, Trace
from .training import Training
from .work import Differentiable, Given, Results, Tolerance, Work

_SAVED = 1  # the step before which a checkpoint is saved, if the fault comes later
MOST_ERRORS = 4  # the number of failed steps after which a rank ends
_DOORS = (
    "call", "forward", "backward", *OPERATORS, "made", "__getattr__", "group_of", "__init__", "__enter__", "_begin", "calls_of",
    "begin", "_backward", "_gradients", "_pooled", "_called",
)  # fmt: skip
"""Functions that a call runs before weft counts it. Ctrl-C there is like Ctrl-C just before the call, so the program
makes the call again. If the program omitted the call, its next call would take the place of the omitted call, and no
rank could notice."""
_PACKAGE = str(Path(weft.__file__).parent) + os.sep


class Failed(Exception):
    """A call raised an error, which is recorded. The rest of the step is omitted."""


class Interrupts:
    """Raise Ctrl-C (or SystemExit for SIGTERM) only while a call of weft runs.

    Between calls, Ctrl-C could make the program omit a call, which weft cannot notice. There it is delayed until a call
    runs.
    """

    def __init__(self) -> None:
        self.inside = False
        self._pending = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if number != signal.SIGALRM:
            self._pending = number
        if not self.inside:
            signal.setitimer(signal.ITIMER_REAL, 0.0002)
        elif self._pending:
            self.inside, pending, self._pending = False, self._pending, 0
            raise KeyboardInterrupt if pending == signal.SIGINT else SystemExit(1)


class Job:
    def __init__(
        self, injection: Injection, rank: int, trace: Trace, board: Board, group: dist.ProcessGroup, checkpoint: Path
    ) -> None:
        self.injection, self.rank, self.trace, self.board = injection, rank, trace, board
        self.checkpoint, self.loads = checkpoint, None
        self.device = torch.device("cpu")
        if injection.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.sabotage, self.interrupts = Sabotage(injection, rank, trace, board), Interrupts()
        self.errors = 0
        self.work = self._work(group, injection.operator, injection.options, injection.seed * 1000003 + injection.index)
        self.second = None
        if injection.second is not None:
            others = injection.of_kind.family != "other option"  # 1: the second work has other data than the first
            self.second = self._work(group, *injection.second, injection.seed * 1000003 + injection.index + others)
        for work in (self.work, self.second):
            if isinstance(work, Checkpoints):
                work.folder = checkpoint
        if isinstance(self.work, Training):
            self.work.last = self.sabotage.last
            if injection.kind == "skipped gradient":
                value = float(("inf", "nan", "-inf")[injection.choice % 3])
                self.work.poison = injection.victim, injection.step, value

    def _work(self, group: dist.ProcessGroup, operator: str, options: Given, seed: int) -> Work:
        return OPERATORS[operator](group, self.device, seed, self.injection.size, self.injection.turn, options)

    def run(self) -> None:
        if not self._made(self.work, "before"):
            return
        if self.second is not None and self.injection.step >= 0:
            if not self._made(self.second, ""):
                return
            if self.injection.warm:
                for n in (-1, self.injection.turn) if self.injection.of_kind.told else (-1,):
                    with contextlib.suppress(Failed):
                        self._forward(n, "warm", self.second, self.second.inputs(n))
        for n in range(self.sabotage.last):
            if self.errors >= MOST_ERRORS:
                return
            try:
                self._step(n)
            except Failed:
                self.errors += 1
                self.work.failed()
            except Injected:  # the program handles this exception, and keeps what it has prefetched
                pass
            time.sleep(self.injection.pace_s)
        if self.sabotage.last < self.injection.steps:
            self.sabotage.runs_out()

    def _made(self, work: Work, place: str) -> bool:
        """Make modules together with the other ranks. Repeat this after an error, at most MOST_ERRORS times. Return
        whether it succeeded.
        """
        while self.errors < MOST_ERRORS:
            try:
                _, around = self.sabotage.act(-1, place, work, {})
                making = self.second if self.sabotage.swaps(-1) else work
                assert making is not None
                self._call(-1, "make", lambda making=making: making.make() or [], list, around)
                return True
            except Failed:
                self.errors += 1
        return False

    def _step(self, n: int) -> None:
        if self.sabotage.swaps(n):
            self._swapped(n)
            return
        self.work.begin(n)
        saves = isinstance(self.work, Training) and not isinstance(self.work, Checkpoints)
        if n == _SAVED and self.injection.step > _SAVED and saves:
            self.loads = self.work.save(str(self.checkpoint))
        given = self.work.inputs(n)
        given, around = self.sabotage.act(n, "before", self.work, given)
        prefetch = self.work.options.get("prefetch")
        if prefetch in ("now", "ahead") and self.work.ahead is None:
            apart, around = (
                (around, contextlib.nullcontext) if self.injection.choice % 2 else (contextlib.nullcontext, around)
            )
            self._prefetch(n, given, apart)
        results = self._forward(n, "forward", self.work, given, around)
        if self.work.backward:
            assert isinstance(self.work, Differentiable)
            if prefetch == "ahead" and n + 1 < self.sabotage.last:
                self._prefetch(n + 1, self.work.inputs(n + 1))
            grads, wanted = self.work.grads(n)
            _, around = self.sabotage.act(n, "between", self.work, given)
            grads = self.sabotage.of_backward(n, grads, self.work)
            backward = partial(self.work.gradients, n, given, results, grads)
            self._call(n, "backward", backward, lambda: wanted, around)
            self.work.succeeded()
            del backward
            for name, more, wanted_of_more in self.work.more(n):
                _, around = self.sabotage.act(n, name, self.work, given)
                self._call(n, name, more, wanted_of_more, around)
        elif self._calls_twice:
            assert self.second is not None
            others, around = self.sabotage.act(n, "between", self.second, self.second.inputs(n))
            self._forward(n, "second", self.second, others, around)
        del results
        self.sabotage.act(n, "after", self.work, {})

    @property
    def _calls_twice(self) -> bool:
        return self.second is not None and self.injection.of_kind.second == "always"

    def _swapped(self, n: int) -> None:
        """Make another call than the other ranks, or their two calls in another order."""
        assert self.second is not None
        self._forward(n, "second", self.second, self.second.inputs(n))
        if self._calls_twice:
            self._forward(n, "forward", self.work, self.work.inputs(n))

    def _forward(self, n: int, name: str, work: Work, given: Given, around: Any = contextlib.nullcontext) -> Results:
        return self._call(n, name, lambda: work.forward(given), lambda: work.expected(n), around, work.padded)

    def _prefetch(self, n: int, given: Given, around: Any = contextlib.nullcontext) -> None:
        work: Any = self.work
        self._call(n, "prefetch", lambda: work.prefetch(n, given) or [], list, around)

    # --- one call ---

    def _call(
        self,
        n: int,
        name: str,
        call: Callable[[], Results],
        wanted: Callable[[], Results],
        around: Any,
        padded: bool = False,
    ) -> Results:
        """Make a call, check its result, and record both."""
        begin, begun = time.monotonic(), self._begun()
        self.board.set(CALLING)
        try:
            with around():
                self.interrupts.inside = True
                results = call()
                self.interrupts.inside = False
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
        except Leave:
            raise
        except BaseException as error:
            self.interrupts.inside = False
            if isinstance(error, KeyboardInterrupt) and self._begun() == begun and _at_the_door(error):
                self.trace.write("at the door", n=n)
                return self._call(n, name, call, wanted, contextlib.nullcontext, padded)
            self._raised(n, name, begin, error)
        finally:
            self.board.set(BETWEEN)
        end = time.monotonic()
        found = compare(results, wanted(), padded, self.work.tolerance)
        note = "" if found != "wrong" else self._like(results, n, name, padded)
        self.trace.write("call", n=n, call=name, begin=begin, end=end, result=found, note=note)
        if found == "wrong" and name == "forward" and self.work.backward:
            raise Failed  # the result may have another shape than its gradient
        return results

    def _begun(self) -> int:
        """Return the number of calls that weft has counted on this rank."""
        return calls_of(dist.group.WORLD).begun  # type: ignore[arg-type]

    def _raised(self, n: int, name: str, begin: float, error: BaseException) -> None:
        """Record the error. Raise `Leave` if the program must end, otherwise `Failed`.

        The program ends after SystemExit, and after Ctrl-C outside weft's code.
        """
        kind = self.injection.kind
        mine = self.rank == self.injection.victim and injected(error, kind)
        named = isinstance(error, WeftError | ValueError) and not isinstance(error, UnicodeError)
        if name in ("save", "load"):  # torch's collectives
            named = named or isinstance(error, CheckpointException | RuntimeError)
        frames = traceback.extract_tb(error.__traceback__)
        inside = [
            f"{frame.filename[len(_PACKAGE) :]}:{frame.lineno}"
            for frame in frames
            if frame.filename.startswith(_PACKAGE)
        ]
        self.trace.write(
            "call", n=n, call=name, begin=begin, end=time.monotonic(), result="error",
            error=[type(error).__name__, str(error)[:600]], named=named, injected=mine, inside=inside,
            where="" if named or mine else "".join(traceback.format_exception(error))[-3000:],
        )  # fmt: skip
        if isinstance(error, SystemExit) or (isinstance(error, KeyboardInterrupt) and not inside):
            raise Leave from None
        raise Failed from None

    def _like(self, results: Results, n: int, name: str, padded: bool) -> str:
        """Return which step's results the wrong results resemble."""
        work = self.second if name in ("second", "warm") else self.work
        if work is None or name in ("make", "backward", "prefetch", "save", "load"):
            return "differs"
        shares = {}
        for m in range(n - 4, n + 5):
            with contextlib.suppress(Exception):
                wanted = work.expected(m)
                same = [
                    (x[: len(w)].float() == w.float()).float().mean().item()
                    for x, w in zip(results, wanted, strict=True)
                    if x.shape[1:] == w.shape[1:] and len(x) >= len(w)
                ]
                if same and max(same) > 0.2:
                    shares[m] = [round(share, 2) for share in same]
        return f"shares of elements as of steps: {shares}"

    # --- the end ---

    def leave(self) -> dict[str, Any]:
        """Drop everything, and return which descriptors, mappings and threads of weft are left in this process."""
        self.sabotage.reap()
        tolerance = self.work.tolerance
        self.loads = self.loads or getattr(self.work, "loads", None)
        self.work = self.second = bad._mesh = None  # type: ignore[assignment]
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.destroy_process_group()
        gc.collect()
        _start_afresh(self.device, self.loads, tolerance, self.trace)
        until = time.monotonic() + 1.0
        while (left := traces_left())["threads"] and time.monotonic() < until:
            time.sleep(0.02)  # threads that poll need time to notice that no group is left
        return left


def _start_afresh(
    device: torch.device, loads: Callable[[], tuple[Results, Results]] | None, tolerance: Tolerance, trace: Trace
) -> None:
    """Make a new group in this process and destroy it, like a program that continues without the failed ranks.

    loads: a function that loads a checkpoint of the failed ranks, and returns (what it has loaded, the right values).
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if loads is not None:
        trace.write("loaded", result=compare(*loads(), padded=False, tolerance=tolerance))
    symm.communicator(dist.group.WORLD, device).close()
    dist.destroy_process_group()
    gc.collect()


def _at_the_door(error: BaseException) -> bool:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
    return bool(frames) and all(frame.name in _DOORS for frame in frames)


def compare(results: Results, wanted: Results, padded: bool, tolerance: Tolerance = 0.0) -> str:
    if len(results) != len(wanted):
        return "wrong"
    nan = False
    for x, w in zip(results, wanted, strict=True):
        if x is None:
            return "wrong"
        x = x.detach().cpu().float()
        nan = nan or bool(x[: len(w)].isnan().any() if padded else x.isnan().any())
        if padded and len(x) > len(w):
            x = x[: len(w)]
        if x.shape != w.shape or not _equal(x, w.float(), tolerance):
            if nan:
                continue
            return "wrong"
    return "nan" if nan else "right"


def _equal(x: torch.Tensor, w: torch.Tensor, tolerance: Tolerance) -> bool:
    if not tolerance:
        return torch.equal(x, w)
    return torch.allclose(x, w, *(tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance)))


def traces_left() -> dict[str, Any]:
    """Return the descriptors and mappings of symmetric memory, and the threads of weft, that are left."""
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": [name for name in descriptors if "memfd:weft" in name],
        "mappings": [line for line in maps if "/memfd:weft" in line],
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("weft")],
    }


def main(injection: Injection, rank: int, directory: str) -> None:
    """Run the body of a rank's process."""
    folder = Path(directory)
    _settle_in(folder, rank, injection)
    trace, board = Trace(folder / f"rank-{rank}.jsonl"), Board(folder / "board", rank)
    if injection.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.zeros(1, device="cuda")
    if injection.hosts > 1:
        # Four ranks form rails: ranks 0 and 1 are on the first host. Other ranks take turns, so rank 2 is on the first host again.
        _claim_host(rank * injection.hosts // injection.world if injection.world == 4 else rank % injection.hosts)
    store = dist.FileStore(str(folder / "store"), injection.world)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=injection.world, timeout=limit)
    store.set(f"up-{rank}", "")  # torch's own set-up fails without a named error if a rank leaves during it
    store.wait([f"up-{other}" for other in range(injection.world)], limit)
    if injection.kind in ("DTensor", "exception on all ranks"):
        bad.mesh()
    trace.write("up", pid=os.getpid())
    job = Job(injection, rank, trace, board, dist.group.WORLD, folder / "checkpoint")
    try:
        job.run()
    except Leave:
        trace.write("leaves")
        return  # the other ranks are still working
    trace.write("done")
    board.set(DONE)
    board.wait_until_sent_home()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    board.set(LEAVING)
    trace.write("left", **job.leave())


def _claim_host(number: int) -> None:
    """Pretend that this process is on a host with its own kernel. Ranks on other hosts are reached by TCP on loopback."""
    native = Entry.of_this_process
    claims = {"host": f"host-{number}", "kernel": f"kernel {number}"}
    Entry.of_this_process = staticmethod(lambda *given: replace(native(*given), **claims))  # type: ignore[method-assign]


def _settle_in(folder: Path, rank: int, injection: Injection) -> None:
    """Prepare this process: it dies with its parent, and writes its stacks on SIGUSR1."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setpgid(0, 0)
    said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"stack-{rank}", "w"), all_threads=True)  # noqa: SIM115
    os.environ |= {
        "WEFT_QUIET": "1", "GLOO_SOCKET_IFNAME": "lo", "WEFT_DEADLINE_S": f"{injection.deadline_s:g}",
        "WEFT_CACHE_DIR": str(folder / "cache" if injection.choice % 2 else folder.parent / "cache"),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }  # fmt: skip
    if injection.device == "cuda" and injection.choice % 2:
        os.environ["WEFT_CHECK_CALLS"] = "1"  # compares the ranks' arguments in each call
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # imported objects are in memory shared by all ranks, which a garbage collection would copy
