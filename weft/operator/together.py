"""The context manager around an operator call: it counts the call, allows one thread at a time, and notifies peers of
errors.

If a rank fails alone and does not notify its peers, its next call pairs with their current call. All ranks then get
wrong results without an error. So every error that leaves a call is handled:

- Errors of weft: nothing to do, because every rank raises them or the group has already failed. Only a second backward
  (`BackwardError`) may concern one rank. CPU ranks handle it as bad input. GPU ranks do not notify peers of it.
- Ctrl-C, and any error after this rank has told its peers that it takes part in the call: the group fails.
- The exception by which torch's activation checkpointing stops a recomputation: the call counts as made, because every
  rank raises this exception.
- `TooManyRowsError`: the call counts as made, because all ranks have made it.
- Any other error on CPU: this rank refuses the call (`weft.runtime.meeting`). Its peers raise `RefusedError`, and the
  group stays usable.
- Bad input on GPUs, where ranks do not synchronise before calls: this rank notifies its peers over sockets
  (`weft.symm.calls`). A peer that has not made the call, or refuses it too, raises as well, and the group stays usable.
  If a peer has already made the call, the group fails. The next call of this rank waits for its peers' answers.
- Any other error on GPUs, such as out of memory: the group fails immediately.

If two threads of a rank call operators on one group at the same time, the group fails, because peers could not tell
which call comes first.

At the first call of a shape, GPU ranks synchronise too, and compare how many calls each has made. Later calls are
compared by a hash of all calls, in the background. With `WEFT_CHECK_CALLS=1` ranks compare every call, including its
source line (`weft.symm.calls`).
"""

from __future__ import annotations

import contextlib
import threading
from types import FunctionType, MethodType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils.checkpoint import _StopRecomputationError

from weft import symm
from weft.arguments import checked_deadline
from weft.builders import NotApplicableError
from weft.caller import caller
from weft.errors import BackwardError, PoisonedGroupError, RefusedError, TooManyRowsError, WeftError
from weft.operator.agreement import Check, agreement_on
from weft.runtime.meeting import published_on
from weft.symm.calls import GroupCalls, calls_of
from weft.symm.groups import backend_device, group_of

_TOLD = "_weft_told"  # an attribute of errors of which peers have been notified


class together:
    """The context manager around a whole call of `operator`, or around its backward. All ranks must make the call.

    like: a tensor on the call's device, or a function that returns the device.
    """

    __slots__ = ("_calls", "_deadline_s", "_group", "_like", "_operator", "_published")
    _calls: GroupCalls | None

    def __init__(self, operator: str, group: dist.ProcessGroup, like: Any, deadline_s: Any) -> None:
        self._operator, self._group, self._like, self._deadline_s = operator, group, like, deadline_s

    def __enter__(self) -> None:
        self._published, self._calls = 0, None
        try:
            self._begin()
        except BaseException as error:
            if self._calls is None:  # this rank is not in the group, or another thread is in a call
                interrupted(self._operator, self._group, error)
                raise
            if isinstance(error, ValueError):  # a peer has refused the call
                self._calls.running.release()
            else:
                self.__exit__(type(error), error, None)
            raise

    def _begin(self) -> None:
        calls = calls_of(self._group, symm.require_member)
        if not calls.running.acquire(blocking=False):
            self._refuse_second_thread(calls)
        self._calls = calls
        if calls.unanswered and (comm := symm.open_communicator(self._group, "cuda")) is not None:
            comm.await_answers()
        if refused := calls.begin():
            raise RefusedError(refused)
        self._published = published_on(self._group)
        if calls.are_compared and (comm := symm.open_communicator(self._group, "cuda")) is not None:
            comm.tell_call(calls.begun, f"{self._operator}, called at {caller()}")

    def _refuse_second_thread(self, calls: GroupCalls) -> NoReturn:
        text = (
            f"thread {threading.current_thread().name!r} called {self._operator} during a call of another thread on the same "
            "group: only one thread at a time may use a group. Give each thread its own group"
        )
        calls.misused = text  # read when the other thread has set up its communicator
        for kind in ("cpu", "cuda"):
            if (comm := symm.open_communicator(self._group, kind)) is not None:
                comm.poison(text)
                comm.check()
        raise PoisonedGroupError(f"{text}. This group has failed: make a new process group")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._calls is not None
        try:
            self._tell(error)
        finally:
            self._calls.running.release()

    def _tell(self, error: BaseException | None) -> None:
        assert self._calls is not None
        group = self._group
        if error is None or isinstance(error, _StopRecomputationError | TooManyRowsError):
            if (refused := self._calls.end()) and (comm := symm.open_communicator(group, "cuda")) is not None:
                comm.poison(refused)
                comm.check()
            return
        self._calls.undo()
        if _needs_no_notice(error, self._like, group) or group.size() == 1 or getattr(error, _TOLD, False):
            return
        with contextlib.suppress(AttributeError, TypeError):
            # the error would otherwise be reported twice if a module's call encloses the operator's call
            setattr(error, _TOLD, True)
        with temporarily_clear_interpreter_stack():  # torch.func.grad would wrap tensors that set-up creates
            self._notify(error)

    def _notify(self, error: BaseException) -> None:
        """Make the peers raise an error too: they refuse the call, or the group fails."""
        group = self._group
        device, deadline_s = _device_of(self._like, group), _usable(self._deadline_s)
        is_input, has_published = isinstance(error, ValueError | TypeError), published_on(group) != self._published
        text = str(error) if is_input else f"{self._operator}: {error!r}"
        if has_published and isinstance(error, NotApplicableError):  # every rank raises this error
            return
        refused = agreement_on(device).refuse(error, text, group, device, deadline_s, has_published)
        if not refused and (comm := symm.open_communicator(group, device.type)) is not None:
            comm.poison(text)


def failed(
    error: BaseException, operator: str, group: dist.ProcessGroup, device: torch.device, deadline_s: float | None,
    published: int | None,
) -> None:  # fmt: skip
    """Notify peers of an error in a call that native code has replayed. May raise `RefusedError` in place of `error`.

    published: on CPU, the number of calls that this rank had announced to its peers before this call (`published_on`);
        None on GPUs.
    """
    call = together(operator, group, lambda: device, deadline_s)
    call._calls, call._published = calls_of(group), published_on(group) if published is None else published
    call._tell(error)


def interrupted(operator: str, group: dist.ProcessGroup | str | None, error: BaseException) -> None:
    """Make the group fail after Ctrl-C or another `BaseException` that is not an `Exception`, unless peers have been notified
    of `error`.

    The exception may arrive before this rank has counted the call. If the program then continues, its next call would
    pair with the peers' current call.
    """
    if isinstance(error, Exception) or getattr(error, _TOLD, False):
        return
    with contextlib.suppress(ValueError):  # there is no such group
        group = group_of(group)
        if group.size() > 1:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(error, _TOLD, True)
            text = f"{operator}: {error!r}"
            calls_of(group).misused = text  # for the next call, if there is no communicator yet
            for kind in ("cpu", "cuda"):
                if (comm := symm.open_communicator(group, kind)) is not None:
                    comm.poison(text)


def tell(error: BaseException, what: str, group: dist.ProcessGroup, like: Any, *, last: bool = False) -> None:
    """Notify peers of `error`, which a layer raised on this rank between two calls of operators.

    This rank then does not make the layer's next call, and refuses it instead. So the peers' next call raises
    `RefusedError` with the text of `error`. On CPU the group stays usable. On GPUs the group fails if a peer has
    already made its next call.

    what: the layer, for error texts.
    like: a tensor on the layer's device, or a function that returns the device.
    last: True if the layer makes no further call. Then the group fails, because the peers' next call belongs to another
        layer.
    """
    known = isinstance(error, _StopRecomputationError) or _needs_no_notice(error, like, group)
    if known or group.size() == 1 or getattr(error, _TOLD, False):
        return
    if last:
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, _TOLD, True)
        if (comm := symm.open_communicator(group, _device_of(like, group).type)) is not None:
            comm.poison(f"{what}: {error!r}")
        return
    call = together(what, group, like, None)
    call.__enter__()
    call.__exit__(type(error), error, error.__traceback__)


def agree(
    operator: str,
    group: dist.ProcessGroup,
    device: torch.device,
    check: Check,
    deadline_s: float | None,
    hint: str = "",
) -> list[tuple[int, int]]:
    """Compare the first call of a shape across ranks. Return, for each rank, the numbers that its `check` returned. All
    ranks must make this call.

    Raise `RefusedError` on every rank if a rank's check raises `ValueError`. Raise `DisagreementError` if the
    descriptions of the calls differ.

    check: a function that checks this rank's call, and returns (short description, full description, numbers).
    hint: advice for the error text if only sizes differ.
    """
    if group.size() == 1:
        return [check()[2]]
    return agreement_on(device).at_first_call(operator, group, device, check, deadline_s, hint)


def _device_of(like: Any, group: dist.ProcessGroup) -> torch.device:
    """Return the device of the call. If the arguments have no usable device, return the device of the group's backend.

    like: a tensor on the call's device, or a function that returns the device.
    """
    if isinstance(like, torch.Tensor):
        if like.device.type in ("cpu", "cuda"):
            return like.device
    elif isinstance(like, FunctionType | MethodType):  # no class or module, which users may pass in place of a tensor
        with contextlib.suppress(Exception):
            found = like()
            if isinstance(found, torch.device):
                return found
    return backend_device(group)


def _needs_no_notice(error: BaseException, like: Any, group: dist.ProcessGroup) -> bool:
    """True if this rank does not notify peers of `error`, because it is an error of weft (see the top of this file)."""
    if not isinstance(error, WeftError):
        return False
    return not isinstance(error, BackwardError) or not agreement_on(_device_of(like, group)).meets


def _usable(deadline_s: Any) -> float | None:
    """Return the deadline in seconds; None for an invalid deadline."""
    with contextlib.suppress(ValueError):
        return checked_deadline(deadline_s)
    return None
