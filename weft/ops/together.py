"""One call of an operator, as its ranks make it together: it is counted, and an error that one rank meets alone is told.

Without this a rank whose call has failed would go on, and its next call would pair with the one that its peers are still in:
wrong results on every rank, and no error. What becomes of an error that leaves a call:

- A named one of weft's: all ranks raise it alike, or it has ended the group already.
- Ctrl-C at any time, and whatever comes once this rank has said to its peers that it takes part: it ends the group, with its cause.
- Any other, on CPU: this rank refuses the call (`weft.runtime.meeting`). The others raise `RefusedError`, and the group lives on.
- Any other, on GPUs, where hosts do not meet: bad input is told over the sockets. If all ranks refuse, all raise, and the group
  lives on; a rank alone misses the others there, which ends the group. What is not about input (no memory) ends it at once.

At the first call of a shape hosts meet on GPUs too, and then compare how many calls each has made. `WEFT_CHECK_CALLS=1` has every
call compared, off the critical path (`weft.symm.calls`).
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from weft import env, symm
from weft.caller import caller
from weft.errors import DeadlineError, DisagreementError, RefusedError, WeftError
from weft.runtime.meeting import Topic, calls_on, meeting_of
from weft.schedule import NotApplicableError

_NUMBER = struct.Struct("<qq")


class _Count:
    """Of the calls of a group by this rank, whichever operator."""

    def __init__(self) -> None:
        self.calls = 0
        self.compared = env.check_calls()


_counts: dict[int, _Count] = {}  # by identity of the group while it lives: every call looks here


def _count_of(group: dist.ProcessGroup) -> _Count:
    count = _counts.get(id(group))
    if count is None:
        symm.require_member(group)
        count = _counts[id(group)] = _Count()
        weakref.finalize(group, _counts.pop, id(group), None).atexit = False
    return count


class together:
    """Around all of a call of `operator` on this rank, or of its backward. like: a tensor, or a function that gives a
    device: where the call takes place."""

    __slots__ = ("_deadline_s", "_group", "_like", "_operator", "_said")

    def __init__(self, operator: str, group: dist.ProcessGroup, like: Any, deadline_s: Any) -> None:
        self._operator, self._group, self._like, self._deadline_s = operator, group, like, deadline_s

    def __enter__(self) -> None:
        count = _count_of(self._group)
        count.calls += 1
        self._said = calls_on(self._group)
        if count.compared and (domain := symm.open_domain(self._group, "cuda")) is not None:
            domain.tell_call(count.calls, f"{self._operator}, called at {caller()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, WeftError) or self._group.size() == 1:
            return
        device, deadline_s = _device_of(self._like, self._group), _usable(self._deadline_s)
        is_input, said = isinstance(error, ValueError | TypeError), calls_on(self._group) != self._said
        text = str(error) if is_input else f"{self._operator}: {error!r}"
        if said and isinstance(error, NotApplicableError):  # to what ranks have agreed on: all raise it
            return
        if device.type == "cpu" and isinstance(error, Exception) and not said:
            refusals = meeting_of(symm.domain(self._group, device, deadline_s=deadline_s)).refuse(
                text, deadline_s=deadline_s
            )
            if is_input:
                raise RefusedError(refusals) from error
        elif device.type == "cuda" and is_input:
            _compare_new(self._operator, self._group, device, "", 0, str(error), deadline_s)
        elif (domain := symm.open_domain(self._group, device.type)) is not None:
            domain.poison(text)


def agree(
    operator: str,
    group: dist.ProcessGroup,
    device: torch.device,
    check: Callable[[], tuple[str, int]],
    deadline_s: float | None,
    hint: str = "",
) -> list[int]:
    """At the first call of a shape: the ranks' numbers. `check` gives a text that must be the same on all ranks, and this rank's
    number, or raises `ValueError`. `RefusedError` on every rank if one does, `DisagreementError` if texts differ. Collective.
    hint: what may help where they differ."""
    if group.size() == 1:
        return [check()[1]]
    if device.type == "cpu":
        text, number = check()  # an error leaves the call, and is published
        domain = symm.domain(group, device, deadline_s=deadline_s)
        extra = _NUMBER.pack(number, 0)
        topic = Topic(f"{operator} of a shape that is new here: {text}", hint=hint)
        extras = meeting_of(domain).meet(topic, deadline_s=_set_up(deadline_s), extra=extra)
        return [_NUMBER.unpack(extra)[0] for extra in extras]
    if device.type != "cuda":
        return [check()[1]]
    text, number, refusal = "", 0, ""
    try:
        text, number = check()
    except Exception as error:
        refusal = str(error)
    return _compare_new(operator, group, device, text, number, refusal, deadline_s)


def _compare_new(
    operator: str, group: dist.ProcessGroup, device: torch.device, text: str, number: int, refusal: str, deadline_s: float | None
) -> list[int]:  # fmt: skip
    """On GPUs: what all ranks have to say of this call, over the sockets."""
    domain = symm.domain(group, device, deadline_s=deadline_s)
    mine = refusal, _count_of(group).calls, text, number
    try:
        calls = domain.all_gather(mine, what=f"{operator} of a new shape", deadline_s=_set_up(deadline_s))
    except DeadlineError as error:
        here = f"This rank had refused the call: {refusal}" if refusal else f"New on this rank: {text}"
        raise DeadlineError(f"{error}. {here}") from error
    if refusals := [f"rank {rank}: {refused}" for rank, (refused, *_) in enumerate(calls) if refused]:
        raise RefusedError("; ".join(refusals))
    for rank, (_, count, theirs, _) in enumerate(calls):
        if (count, theirs) != (calls[0][1], calls[0][2]):
            difference = (
                f"ranks call {operator} differently. Rank 0, call {calls[0][1]} on this group: {calls[0][2]}; rank {rank}, call "
                f"{count}: {theirs}"
            )
            domain.end(difference)
            raise DisagreementError(f"{difference}. The ranks are out of step: this group has ended, make a new one")
    return [number for *_, number in calls]


def _set_up(deadline_s: float | None) -> float | None:
    """Nobody compiles anything before ranks have agreed."""
    return env.setup_deadline_s() if deadline_s is None else deadline_s


def _device_of(like: Any, group: dist.ProcessGroup) -> torch.device:
    """Where a call takes place; arguments that do not tell are refused, where the other ranks hear it."""
    if callable(like) and not isinstance(like, torch.Tensor):
        return like()
    if isinstance(like, torch.Tensor) and like.device.type in ("cpu", "cuda"):
        return like.device
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _usable(deadline_s: Any) -> float | None:
    return deadline_s if isinstance(deadline_s, int | float) and 0 < deadline_s < 1e6 else None
