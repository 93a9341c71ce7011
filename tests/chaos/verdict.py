"""Judges a trial by the traces that its ranks left.

Each rank that lives has, for every call, the right result of that step or a named error, in time. What is counted:

- hang: a call that outlasts its deadline by more than 5 s (a rank that was stopped: 5 s after it wakes), or a process that does
  not end;
- mix: a wrong result without an error;
- silent: a result, right or wrong, of a call that ranks made with different options or tables, or a group that goes on after calls
  of two threads;
- lost: a group that had to live and failed, or in which a later call was not right;
- split: after an error the last calls were right on some ranks and errors on others;
- unnamed: an error that is no `WeftError` and no `ValueError`, but for what was done to a rank itself; or another one than must
  come (`Kind.told`);
- crash: a process that ended by a signal that nobody sent, but for glibc's abort where it has no memory; leak: memory,
  descriptors, threads or names left.
"""

from __future__ import annotations

import signal
from typing import Any

from .draw import Injection
from .trial import GRACE_S, Seen, may_last

Fault = tuple[str, str]  # its category, and its text
COUNTED = ("hang", "mix", "silent", "lost", "split", "unnamed", "crash", "leak")
_WAKING_S = 5.0
_NO_MEMORY_OF_THREAD = {
    -signal.SIGABRT: "Fatal glibc error: failed to register TLS destructor: out of memory",
    127: "cannot allocate memory for thread-local data: ABORT",
}
"""Messages of glibc, by exit code."""


def judge(injection: Injection, seen: Seen) -> list[Fault]:
    """Return the faults of a trial; empty if all is well."""
    faults: list[Fault] = [("hang", f"rank {rank} {where}") for rank, where in seen.hung.items()]
    if injection.kind == "fork, uses the group":
        for event in _all(seen, "child"):
            if event["code"]:
                faults.append(
                    ("unnamed" if event["code"] > 0 else "hang", f"a forked child ended with {event['code']}")
                )
    for rank, calls in enumerate(calls_of(seen)):
        for call in calls:
            faults += _of_call(injection, seen, rank, call)
        if injection.device == "cuda":
            faults += _untold(injection, rank, calls)
    faults += _exits(injection, seen)
    if not seen.hung:
        faults += _lives(injection, seen) if injection.of_kind.lives else _split(injection, seen)
        if injection.of_kind.told and was_done(injection, seen):
            faults += _of_threads(injection, seen) if injection.kind == "second thread" else _told(injection, seen)
        faults += _leaks(injection, seen)
    return faults


def calls_of(seen: Seen) -> list[list[dict[str, Any]]]:
    """Return the calls of each rank, in order."""
    return [[event for event in events if event["event"] == "call"] for events in seen.events]


def outcome(seen: Seen) -> dict[str, Any]:
    """Return for the record: the number of right calls, and the errors by name."""
    calls = [call for of_rank in calls_of(seen) for call in of_rank]
    errors: dict[str, int] = {}
    for call in calls:
        if call["result"] == "error":
            errors[call["error"][0]] = errors.get(call["error"][0], 0) + 1
    counts = {result: sum(call["result"] == result for call in calls) for result in ("right", "nan")}
    return {**counts, "errors": errors}


def was_done(injection: Injection, seen: Seen) -> bool:
    """True if the fault took place. A signal after the end does not count, nor does an allocation that the call does
    not make."""
    told = [event for event in _all(seen, "fault") if "nowhere" not in str(event.get("where", ""))]
    if injection.kind in ("kill", "short stop", "long stop", "interrupt", "terminate"):
        return seen.signalled_at is not None
    return bool(told) or injection.kind == "none"


def _all(seen: Seen, event: str) -> list[dict[str, Any]]:
    return [found for events in seen.events for found in events if found["event"] == event]


def _named(injection: Injection, rank: int, call: dict[str, Any]) -> str:
    return f"rank {rank}, step {call['n']}, {call['call']}"


def _of_call(injection: Injection, seen: Seen, rank: int, call: dict[str, Any]) -> list[Fault]:
    faults: list[Fault] = []
    where = _named(injection, rank, call)
    first = call["n"] in (-1, 0, injection.turn)
    since, longest_s = may_last(injection, call["begin"], seen.fault_at, first=first)
    lasted_s = call["end"] - since
    if rank == injection.victim:
        for begin, end in seen.stopped:
            if begin < call["end"] and end > call["begin"]:
                lasted_s = min(lasted_s, call["end"] - end)
                longest_s = max(_WAKING_S, longest_s if injection.of_kind.lives else 0.0)
    if injection.kind == "fork, uses the group":
        longest_s += 1.0
    if lasted_s > longest_s:
        faults.append(("hang", f"{where}: took {lasted_s:.1f} s where {longest_s:g} s are allowed"))
    if call["result"] == "wrong" or (call["result"] == "nan" and injection.device == "cpu"):
        faults.append(("mix", f"{where}: {call['result']}, {call['note']}"))
    if call["result"] == "error" and not call["named"] and not call["injected"]:
        faults.append(("unnamed", f"{where}: {': '.join(call['error'])}\n{call['where']}"))
    return faults


def _untold(injection: Injection, rank: int, calls: list[dict[str, Any]]) -> list[Fault]:
    """On GPUs, where hosts do not synchronise, a call whose peer has failed may return NaN. An error must follow in time."""
    for number, call in enumerate(calls):
        if call["result"] == "nan":
            errors = [later["end"] for later in calls[number + 1 :] if later["result"] == "error"]
            longest_s = injection.deadline_s + GRACE_S
            if not errors or errors[0] - call["begin"] > longest_s:
                return [("mix", f"{_named(injection, rank, call)}: NaN, and no error within {longest_s:g} s")]
    return []


def _exits(injection: Injection, seen: Seen) -> list[Fault]:
    faults: list[Fault] = []
    for rank, code in enumerate(seen.codes):
        if code is None or code == 0:
            continue  # hanging ranks are counted already
        meant = {"kill": -9, "exit": 3}.get(injection.kind)
        if rank == injection.victim and code == meant:
            continue
        if rank in seen.hung or _ended_by_libc(injection, seen, rank):
            continue
        kind = "crash" if code < 0 else "unnamed"
        faults.append((kind, f"rank {rank} ended with exit code {code}: {seen.said[rank][-2500:]}"))
    return faults


def _ended_by_libc(injection: Injection, seen: Seen, rank: int) -> bool:
    """Without memory for a thread's first thread-local object glibc aborts, and gloo's threads make such objects in the
    first collectives of a process. Nothing in the process can prevent that: to its peers the rank was killed."""
    mine = injection.kind == "no memory, RLIMIT_AS" and rank == injection.victim
    text = _NO_MEMORY_OF_THREAD.get(seen.codes[rank] or 0)
    return mine and text is not None and text in seen.said[rank]


def _lives(injection: Injection, seen: Seen) -> list[Fault]:
    """Every rank must refuse the call, at most in the step of the fault. All other results must be right."""
    faults: list[Fault] = []
    refused: dict[int, set[int]] = {}  # by step: which ranks
    may_refuse = (
        injection.of_kind.family == "bad input" or injection.kind == "exception on all ranks" or injection.of_kind.told
    )
    for rank, calls in enumerate(calls_of(seen)):
        for call in calls:
            if call["result"] == "nan":
                faults.append(("lost", f"{_named(injection, rank, call)}: NaN"))
            if call["result"] == "error":
                refused.setdefault(call["n"], set()).add(rank)
                if not may_refuse or call["n"] != injection.step:
                    faults.append(("lost", f"{_named(injection, rank, call)}: {': '.join(call['error'])}"))
        if not calls or calls[-1]["n"] < injection.steps - 1:
            faults.append(("lost", f"rank {rank} did not come to the end"))
    for step, ranks in refused.items():
        if 0 < len(ranks) < injection.world:
            faults.append(("lost", f"step {step}: an error on ranks {sorted(ranks)} alone"))
    return faults


def _told(injection: Injection, seen: Seen) -> list[Fault]:
    """Hold every rank to the error of the call in which they differ, and to no error of equal calls before."""
    faults: list[Fault] = []
    wanted = injection.of_kind.told
    for rank, calls in enumerate(calls_of(seen)):
        for call in calls:
            if call["call"] == "warm" and call["result"] == "error":
                said = ": ".join(call["error"])
                faults.append(("lost", f"{_named(injection, rank, call)}: {said}, of a call that all ranks make"))
        call = next((call for call in calls if call["n"] == injection.step and call["call"] != "warm"), None)
        if call is None:
            faults.append(("lost", f"rank {rank} did not come to step {injection.step}"))
        elif call["result"] != "error":
            text = f"a result, {call['result']}, where ranks differ and {wanted} must come"
            faults.append(("silent", f"{_named(injection, rank, call)}: {text}"))
        elif call["error"][0] != wanted:
            text = f"{': '.join(call['error'])}, where {wanted} must come"
            faults.append(("unnamed", f"{_named(injection, rank, call)}: {text}"))
    return faults


def _of_threads(injection: Injection, seen: Seen) -> list[Fault]:
    """Hold the second thread to its error, and every rank to a group that ends."""
    faults: list[Fault] = []
    for event in _all(seen, "thread"):
        if event["error"] is None:
            faults.append(("silent", "the second thread has a result"))
        elif event["error"][0] != injection.of_kind.told:
            faults.append(("unnamed", f"the second thread: {': '.join(event['error'])}"))
    for rank, calls in enumerate(calls_of(seen)):
        if calls and calls[-1]["result"] != "error":
            faults.append(("silent", f"{_named(injection, rank, calls[-1])}: a result, after calls of two threads"))
    return faults


def _split(injection: Injection, seen: Seen) -> list[Fault]:
    """Return a fault if the last calls of living ranks did not end alike. Ranks that had finished before are left
    out."""
    last = {rank: calls[-1] for rank, calls in enumerate(calls_of(seen)) if calls}
    gone = injection.kind in ("kill", "exit", "leave", "terminate", "never call")
    if gone or _ended_by_libc(injection, seen, injection.victim):
        last.pop(injection.victim, None)
    leaving = {rank for rank, events in enumerate(seen.events) if any(event["event"] == "leaves" for event in events)}
    last = {rank: call for rank, call in last.items() if rank not in leaving}
    failed = {rank: call for rank, call in last.items() if call["result"] == "error"}
    right = {rank: call for rank, call in last.items() if call["result"] == "right" and call["n"] < injection.steps - 1}
    if not failed or not right:
        return []
    texts = [f"{_named(injection, rank, call)}: {call['error'][0]}" for rank, call in failed.items()]
    return [("split", f"{'; '.join(texts)}; but right at last: {[_named(injection, *item) for item in right.items()]}")]


def _leaks(injection: Injection, seen: Seen) -> list[Fault]:
    faults: list[Fault] = [("leak", f"/dev/shm has {name}") for name in seen.names]
    for rank, events in enumerate(seen.events):
        for event in events:
            if event["event"] == "left":
                faults += [
                    ("leak", f"rank {rank} has {event[what][:3]}")
                    for what in ("descriptors", "mappings", "threads")
                    if event[what]
                ]
    return faults
