"""Judge a trial by what its ranks recorded.

Every call of a rank that is still alive must give the right result of its step, or a named error, in time. Anything
else is a wrong outcome, a `Fault`. The kinds are:

- hang: a call lasts more than 5 s longer than its deadline, or a process does not end. A rank that was stopped has 5 s
  from its waking.
- mix: a call gives a wrong result, and no error.
- silent: a call gives a result although ranks passed different options or tables, or a group continues after calls from
  two threads.
- lost: a group that had to survive has failed, or a later call in it is not right.
- split: after an error, the last calls give right results on some ranks and errors on others.
- unnamed: an error is neither a `WeftError` nor a `ValueError`, and was not injected into the rank itself; or it is not
  the error that must come (`Kind.told`). While torch saves or loads a checkpoint, errors of torch are named, too.
- crash: a process ended by a signal that nobody sent. An abort of glibc without memory is no crash.
- leak: memory, descriptors, threads or names are left.
"""

from __future__ import annotations

import signal
from typing import Any

from .draw import Injection
from .trial import GRACE_S, Seen, may_last

Fault = tuple[str, str]  # (category, text)
COUNTED = ("hang", "mix", "silent", "lost", "split", "unnamed", "crash", "leak")
_WAKING_S = 5.0
_NO_MEMORY_OF_THREAD = {
    -signal.SIGABRT: "Fatal glibc error: failed to register TLS destructor: out of memory",
    127: "cannot allocate memory for thread-local data: ABORT",
}
"""glibc's message if a thread has no memory for thread-local data, by exit code."""


def judge(injection: Injection, seen: Seen) -> list[Fault]:
    """Return the wrong outcomes of a trial. The list is empty if all is well."""
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
    for event in _all(seen, "loaded"):
        if event["result"] != "right":
            faults.append(("mix", f"tables loaded from the checkpoint are {event['result']}"))
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
    """Return what the record says of the results: the numbers of right and NaN results, and of errors by name."""
    calls = [call for of_rank in calls_of(seen) for call in of_rank]
    errors: dict[str, int] = {}
    for call in calls:
        if call["result"] == "error":
            errors[call["error"][0]] = errors.get(call["error"][0], 0) + 1
    counts = {result: sum(call["result"] == result for call in calls) for result in ("right", "nan")}
    return {**counts, "errors": errors}


def was_done(injection: Injection, seen: Seen) -> bool:
    """Return whether the fault took place.

    It did not, for example, if the signal came after the end, or if the call makes too few allocations.
    """
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
    """Find calls on GPUs that gave NaN and were not followed by an error in time.

    GPU calls do not synchronise with the CPU. So a call whose peer has failed may return NaN before its rank is
    notified.
    """
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
            continue  # None: the rank hangs, and is counted already
        meant = {"kill": -9, "exit": 3}.get(injection.kind)
        if rank == injection.victim and code == meant:
            continue
        if rank in seen.hung or _ended_by_libc(injection, seen, rank):
            continue
        kind = "crash" if code < 0 else "unnamed"
        faults.append((kind, f"rank {rank} ended with exit code {code}: {seen.said[rank][-2500:]}"))
    return faults


def _ended_by_libc(injection: Injection, seen: Seen, rank: int) -> bool:
    """Return whether glibc ended the rank because it had no memory for a thread's first thread-local object.

    In the first collectives of a process, gloo's threads make such objects. Nothing in the process can prevent the
    abort. To its peers, the rank was killed.
    """
    mine = injection.kind == "no memory, RLIMIT_AS" and rank == injection.victim
    text = _NO_MEMORY_OF_THREAD.get(seen.codes[rank] or 0)
    return mine and text is not None and text in seen.said[rank]


def _lives(injection: Injection, seen: Seen) -> list[Fault]:
    """Find what must not happen in a group that has to survive.

    Only the call of the fault may raise an error, and then on every rank. All other results must be right.
    """
    faults: list[Fault] = []
    refused: dict[int, set[int]] = {}  # {step: ranks with an error}
    of_kind = injection.of_kind
    may_refuse = (
        of_kind.family in ("bad input", "checkpoint") or of_kind.told or injection.kind == "exception on all ranks"
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
    """Find ranks without the error `Kind.told` in the call that differs, and errors in equal calls before it."""
    faults: list[Fault] = []
    wanted = injection.of_kind.told
    for rank, calls in enumerate(calls_of(seen)):
        for call in calls:
            if call["call"] == "warm" and call["result"] == "error":
                said = ": ".join(call["error"])
                faults.append(("lost", f"{_named(injection, rank, call)}: {said}, of a call that all ranks make"))
        names = {"backward": ("backward",), "checkpoint": ("load",)}.get(
            injection.phase, ("make", "forward", "second", "prefetch")
        )
        at_step = [call for call in calls if call["n"] == injection.step and call["call"] in names]
        # A prefetch waits for no peer, so the call after it may be the first that raises.
        call = next((call for call in at_step if call["call"] != "prefetch" or call["result"] == "error"), None)
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
    """Find a second thread without its error, and ranks whose group continues."""
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
    """Find living ranks whose last calls ended differently. Ranks that had finished before are ignored."""
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
