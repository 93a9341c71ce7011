"""Run one injection from outside the ranks: start the ranks, send signals in time, and wait for the end.

A `Trial` is polled, so that several run concurrently in one thread. Every wait has a limit. If a rank exceeds it, the
ranks write their stacks, and then all ranks are killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from .draw import SIGNALS, Injection
from .traces import BETWEEN, CALLING, DONE, LEAVING, STARTING, Board, Trace

GRACE_S = 5.0  # allowed after the deadline
_START_S = {"cpu": 40.0, "cuda": 90.0}
_END_S = 15.0
_FIRST_S = {"cpu": 40.0, "cuda": 70.0}
_STACKS_S = 0.6
_PRELOADED = ("jobs", "campaign")


def start_server(device: str, more: Sequence[str] = ()) -> None:
    """Start the process from which ranks are forked. It has imported everything that they need, and has no threads. more:
    further modules to import.
    """
    package = __name__.rpartition(".")[0]
    names = ["torch", "torch.distributed", "torch.distributed.tensor", "weft._core", "weft.ops.all_gather_matmul"]
    names += ["triton"] if device == "cuda" else []
    names += more
    mp.get_context("forkserver").set_forkserver_preload([*names, *(f"{package}.{name}" for name in _PRELOADED)])
    forkserver.ensure_running()


@dataclass
class Seen:
    """The observations of a trial, for `verdict`. `events`, `codes` and `said` have one item per rank."""

    events: list[list[dict[str, Any]]] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    hung: dict[int, str] = field(default_factory=dict)  # {rank: where it hangs}
    stopped: list[tuple[float, float]] = field(default_factory=list)  # (begin, end) of each stop of the victim
    signalled_at: float | None = None
    fault_at: float | None = None
    names: list[str] = field(default_factory=list)  # names of weft that are left under /dev/shm
    said: list[str] = field(default_factory=list)
    took_s: float = 0.0


class Trial:
    def __init__(self, injection: Injection, folder: Path) -> None:
        self.injection, self.folder, self.seen = injection, folder, Seen()
        folder.mkdir(parents=True)
        self.board = Board(folder / "board")
        self._names = _shared_names()
        self._began = time.monotonic()
        self._signals: list[tuple[float, int]] | None = None
        self._stop_began = 0.0
        self._stacks_at = 0.0
        self._home_at: float | None = None
        self._processes = [self._start(rank) for rank in range(injection.world)]

    def _start(self, rank: int) -> Any:
        from .jobs import main

        context = mp.get_context("forkserver")
        process = context.Process(target=main, args=(self.injection, rank, str(self.folder)), name=f"chaos-{rank}")
        process.start()
        return process

    def poll(self) -> bool:
        """Send signals that are due, and check the ranks. Return whether the trial has ended."""
        now = time.monotonic()
        codes = [process.exitcode for process in self._processes]
        if self._stacks_at:
            if now >= self._stacks_at:
                self._end(codes)
                return True
            return False
        if all(code is not None for code in codes):
            self._end(codes)
            return True
        self._send_signals(now, codes)
        states = [self.board.of(rank) for rank in range(self.injection.world)]
        alive = [rank for rank, code in enumerate(codes) if code is None]
        if self._home_at is None and all(states[rank][0] == DONE for rank in alive):
            self._home_at = now
            self.board.send_home()
        self._watch(now, alive, states)
        return False

    # --- signals ---

    def _send_signals(self, now: float, codes: list[int | None]) -> None:
        injection, victim = self.injection, self.injection.victim
        gone_at = self.board.gone_at()
        if injection.kind not in SIGNALS or gone_at is None or codes[victim] is not None:
            return
        if self._signals is None:
            self._signals = _signals_of(injection, gone_at + injection.delay_s)
        while self._signals and now >= self._signals[0][0]:
            _, number = self._signals.pop(0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[victim].pid, number)
            self.seen.signalled_at = time.monotonic()
            if number == signal.SIGSTOP:
                self._stop_began = time.monotonic()
            if number == signal.SIGCONT:
                self.seen.stopped.append((self._stop_began, time.monotonic()))

    def _stopped_s(self, rank: int, since: float, now: float) -> float:
        """Return for how long `rank` was stopped between `since` and `now`."""
        if rank != self.injection.victim:
            return 0.0
        spans = list(self.seen.stopped)
        if self._signals and self._signals[0][1] == signal.SIGCONT:
            spans.append((self._stop_began, now))
        return sum(max(0.0, end - max(begin, since)) for begin, end in spans)

    def _happened_at(self) -> float | None:
        """Return the time at which the fault took place, or None if it has not."""
        return self.seen.signalled_at if self.injection.kind in SIGNALS else self.board.gone_at()

    # --- the end ---

    def _watch(self, now: float, alive: list[int], states: list[tuple[int, float]]) -> None:
        """Check whether a rank takes longer than allowed. If so, let the ranks write their stacks."""
        for rank in alive:
            state, since = states[rank]
            since = since or self._began
            longest_s = {
                STARTING: _START_S[self.injection.device],
                BETWEEN: sum(self.injection.pauses_s) + self.injection.deadline_s + _END_S,
                LEAVING: _END_S,
            }.get(state)
            if state == CALLING:
                since, longest_s = may_last(self.injection, since, self._happened_at(), first=True)
                longest_s += 1.0  # a result that is a little late is judged from the traces instead
            lasted_s = now - since - self._stopped_s(rank, since, now)
            if state == DONE and self._home_at is not None:
                lasted_s, longest_s = now - self._home_at, _END_S
            if longest_s is not None and lasted_s > longest_s:
                self.seen.hung[rank] = ("starting", "between calls", "in a call", "done", "leaving")[state]
        if self.seen.hung:
            self._stacks_at = now + _STACKS_S
            for rank in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._processes[rank].pid, signal.SIGCONT)
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)

    def _end(self, codes: list[int | None]) -> None:
        self.kill()
        seen, ranks = self.seen, range(self.injection.world)
        seen.codes, seen.fault_at = codes, self._happened_at()
        seen.events = [Trace.read(self.folder / f"rank-{rank}.jsonl") for rank in ranks]
        for rank in seen.hung:
            stack = self.folder / f"stack-{rank}"
            seen.hung[rank] += "\n" + (stack.read_text() if stack.exists() else "")
        for rank in ranks:
            said = self.folder / f"said-{rank}"
            seen.said.append(said.read_text(errors="replace")[-4000:] if said.exists() else "")
        seen.names = sorted(_shared_names() - self._names)
        seen.took_s = time.monotonic() - self._began

    def kill(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
        for process in self._processes:
            process.join(10)


def may_last(injection: Injection, begin: float, fault_at: float | None, *, first: bool) -> tuple[float, float]:
    """Return (start, allowed duration) of a call. The duration is the deadline plus 5 s.

    If the group does not have to survive the fault, the start is at least the time of the fault. Before a fault, a
    first call may take longer, because it may measure schedules on a busy machine.
    """
    longest_s = injection.deadline_s + GRACE_S
    if fault_at is not None and not injection.of_kind.lives:
        return max(begin, fault_at), longest_s
    return begin, max(longest_s, _FIRST_S[injection.device]) if first else longest_s


def _signals_of(injection: Injection, at: float) -> list[tuple[float, int]]:
    single = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
    if injection.kind in single:
        return [(at, single[injection.kind])]
    signals: list[tuple[float, int]] = []
    for number, pause_s in enumerate(injection.pauses_s):
        at += 0.0 if number == 0 else 0.01 + (injection.choice * (number + 1)) % 17 * 0.002
        signals += [(at, signal.SIGSTOP), (at + pause_s, signal.SIGCONT)]
        at += pause_s
    return signals


def _shared_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "weft" in name}
