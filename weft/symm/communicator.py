"""The communicator of a process group: memory that all its ranks can address, and waits with deadlines.

Each pair (group, type of device) has one `Communicator`, until it is closed, its process group is destroyed, or the process
exits. A communicator connects the ranks (`weft.symm.bootstrap`), watches for failures (`weft.symm.control`) and allocates
symmetric memory (`weft.symm.cpu`, `weft.symm.cuda`). Several communicators may be open at the same time, also for
groups that overlap.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weft import _core, env
from weft.arguments import checked_device
from weft.errors import DeadlineError, DisagreementError, RefusedError, WeftError
from weft.symm import bootstrap, cpu, failures
from weft.symm.at_exit import close_at_exit
from weft.symm.calls import calls_of
from weft.symm.control import CALLBACK_S, EXITING, Control, unusable
from weft.symm.groups import is_registered, store_of
from weft.symm.memory import Region

_set_up_s: ContextVar[float | None] = ContextVar("deadline of set-up waits", default=None)
LOOK_S = 0.1  # interval at which a native wait returns to Python, to check for Ctrl-C and goodbyes


@contextlib.contextmanager
def set_up_within(deadline_s: float | None) -> Iterator[None]:
    """Set the default deadline of set-up waits on this thread, as a context manager. With None, keep the default.

    `all_gather` and `allocate` make set-up waits. If ranks compile kernels or measure between two of these waits, fast ranks
    wait for the slowest rank. Then pass the default deadline of calls, `Communicator.deadline_s`, which is longer.
    """
    before = _set_up_s.get()
    _set_up_s.set(before if deadline_s is None else deadline_s)
    try:
        yield
    finally:
        _set_up_s.set(before)


def _setup_deadline_s(given: float | None, default: Callable[[], float]) -> float:
    """Return the deadline of a set-up wait: `given`, or the deadline of `set_up_within`, or the result of `default`."""
    return given or _set_up_s.get() or default()


def _nothing() -> None: ...


class Communicator:
    """The connections, memory and watchdog that a process group's ranks share on one type of device.

    Create it with `communicator()`. As a context manager it closes itself at the end.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, mesh: bootstrap.Mesh):
        self.rank = group.rank()
        self.world_size = group.size()
        self.device = device
        self.hosts = mesh.hosts
        """The name of each rank's host."""
        self.mapped = tuple(host == mesh.hosts[self.rank] for host in mesh.hosts)
        """For each rank, True if this process can address the rank's memory, because both are on the same host."""
        self.all_mapped = all(self.mapped)
        """True if all ranks are on one host. If not, calls run unfused, or with schedules that send between hosts only
        by messages and collectives.
        """
        self.deadline_s = env.deadline_s()
        """The default deadline of waits for peers, in seconds: `WEFT_DEADLINE_S`, read once."""
        self.setup_s = env.setup_deadline_s()
        """The default deadline of set-up waits, in seconds: `WEFT_SETUP_DEADLINE_S`, read once."""
        self.checks_calls = env.check_calls()
        """`WEFT_CHECK_CALLS`, read once, when ranks have compared it."""
        self._group = weakref.ref(group, lambda _: self._close("its process group was destroyed"))
        self._holders: weakref.WeakSet[Any] = (
            weakref.WeakSet()
        )  # objects with memory, which are closed with the communicator
        calls, told = calls_of(group), (self._remember_failure, self._tell_of_failure)
        calls.are_compared = calls.are_compared or self.checks_calls
        self._control = Control(self.rank, self.world_size, mesh.peers, calls, *told)
        self._looks: list[weakref.WeakMethod[Callable[[], None]]] = self._control.health.looks

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise ValueError(
                "the process group of this communicator was destroyed, which closed the communicator: make a new group"
            )
        return group

    def is_of(self, group: dist.ProcessGroup) -> bool:
        return self._group() is group

    @property
    def closed(self) -> bool:
        return bool(self._control.closed)

    @property
    def failed(self) -> bool:
        """True if the group has failed or this communicator is closed. Never raises."""
        return self._control.failed

    @property
    def failed_address(self) -> int:
        """The address of an int64 in this process's memory: 1 if the group has failed or this communicator is closed, else 0.
        Waits in C++ read it, so that they end.
        """
        return self._control.failed_address

    def __repr__(self) -> str:
        control = self._control
        state = (
            f"closed: {control.closed}"
            if control.closed
            else f"failed: {control.failure[1]}"
            if control.failure
            else "open"
        )
        return f"Communicator(rank={self.rank}, world_size={self.world_size}, device={self.device}, {state})"

    # -- failure

    def check(self) -> None:
        """Raise `ValueError` if the communicator is closed. Raise an error if the group has failed.

        If a peer has died, the first error is a `PeerLostError`. All other errors are a `PoisonedGroupError` that repeats the
        cause.
        """
        for look in tuple(self._looks):
            (look() or _nothing)()
        self._control.check()

    @property
    def health(self) -> _core.Health:
        """The native record of the group's state. Its `is_well()` is a fast alternative to `check`: True if `check` would not
        raise.
        """
        return self._control.health

    def before_check(self, look: Callable[[], None]) -> None:
        """Register `look`, which every later `check()` calls first. `look` is a method; this communicator keeps only a weak
        reference to its object.

        An object may learn of a failure before the watchdog does, for example from an error that a kernel reports. Its
        `look` then calls `poison`.
        """
        self._looks.append(weakref.WeakMethod(look, self._looks.remove))

    def poison(self, text: str) -> None:
        """Make the group fail on this rank and on every peer, with the cause `text`. Do nothing if it has already
        failed.
        """
        self._control.poison(f"rank {self.rank}: {text}")

    def end(self, text: str) -> None:
        """Make the group fail on this rank only, with the cause `text`. Peers are not notified, so call this method only for an
        error that every peer finds too.
        """
        self._control.end(text)

    def tell_refusal(self, text: str) -> None:
        """Notify peers that this rank refuses the call that it has begun (`weft.symm.calls`). Only GPU ranks call this method."""
        self._control.tell_refusal(f"rank {self.rank}: {text}")

    def await_answers(self) -> None:
        """Wait until every peer has answered this rank's last refusal. Raise the group's error if the group fails.

        On GPUs, the next call after a refusal begins with this wait. Otherwise that call could pair with the refused call
        of a peer.
        """
        self._control.await_answers(self.setup_deadline_s())

    def setup_deadline_s(self, given: float | None = None) -> float:
        """Return the deadline of a set-up wait: `given`, or the deadline of the enclosing `set_up_within`, or `setup_s`."""
        return _setup_deadline_s(given, lambda: self.setup_s)

    def tell_call(self, number: int, what: str) -> None:
        """Send this rank's call to all peers, which compare it with their call of the same number (`weft.symm.calls`).

        what: the description of the call.
        """
        self._control.tell_call(number, what)

    def on_failure(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register `callback()`, which the watchdog thread runs once if the group fails. If the group has already failed,
        run it now, on this thread. Return a function that removes the callback.
        """
        return self._control.on_failure(callback)

    def _remember_failure(self, error: WeftError) -> None:
        group = self._group()
        if group is not None:
            failures.remember(group, error)

    def _tell_of_failure(self) -> None:
        group = self._group()
        if group is not None:
            failures.tell(group, self.rank)

    # -- waiting

    def wait(
        self, address: int, wanted: int, *, name: str, peer: int | None = None, deadline_s: float | None = None,
        until: float | None = None,
    ) -> int:  # fmt: skip
        """Wait until the counter at `address` is at least `wanted` (acquire order). Return its value.

        name: the name of the signal, for error texts.
        peer: the rank that sets the counter; None for any rank.
        deadline_s: the longest wait in seconds; `WEFT_DEADLINE_S` by default.
        until: the end of the wait, as a time of `time.monotonic()`, if the caller has already waited. Default: `deadline_s`
            from now.

        Raises `DeadlineError` if the counter is not set in time, and poisons the group. Raises `PeerLostError` if `peer`
        has left or died, and `PoisonedGroupError` if the group fails for another reason.
        """
        control = self._control
        control.check()
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s if until is None else until
        while True:
            # Check who has left before reading the counter: a peer that has said goodbye has finished all its writes.
            # If this process was stopped until after the deadline, the counter may have been set meanwhile.
            left, remaining = self._who_left(peer), until - time.monotonic()
            patience_s = 0.0 if left else max(0.0, min(remaining, LOOK_S))
            outcome, found = _core.signal_wait(address, wanted, patience_s, control.failed_address)
            if outcome == 0:
                return found
            whom = "" if peer is None else f" from {control.name(peer)}"
            values = f"{name}{whom}: wanted {wanted}, found {found}"
            if left and outcome != 2:
                control.lose_who_left(left)
            if left or outcome == 2:
                raise control.error(f"; rank {self.rank} was waiting for {values}")
            if remaining <= 0:
                text = f"rank {self.rank} waited {deadline_s:g} s for {values}"
                control.poison(text)
                raise DeadlineError(text)

    def _who_left(self, peer: int | None) -> list[int]:
        """Return the ranks that have left the group, if no remaining rank can set the signal for which this rank waits.
        Otherwise return [].

        peer: the rank that sets the signal; None if any rank may set it.
        """
        gone = self._control.gone
        if peer is not None:
            return [peer] if peer in gone else []
        return list(gone) if self.world_size > 1 and len(gone) == self.world_size - 1 else []

    # -- rounds between hosts

    def begin_round(self) -> None:
        """Begin the next round, a rendezvous between hosts (`weft.symm.rounds`). All ranks must make this call."""
        self._control.rounds.begin()

    def absent_in_round(self) -> list[int]:
        """Return the peers that are not known to have begun this rank's round.

        The first call in a round asks all peers, whose answers arrive later. So call it repeatedly during a wait. Raise
        `PeerLostError` if one of these peers has left.
        """
        control = self._control
        absent = control.rounds.absent
        if (left := [rank for rank in absent if rank in control.gone]) and not control.failed:
            control.lose_who_left(left)
        control.check()
        control.rounds.tell_all()
        return absent

    def secret_of(self, rank: int) -> str:
        """Return a secret that only this rank and `rank`, a rank on another host, know."""
        return self._control.secret_of(rank)

    def name(self, rank: int) -> str:
        """Return the name of a rank for error texts, with its pid, and with its host if the group is on several hosts."""
        return self._control.name(rank)

    # -- set-up collectives

    def all_gather(self, obj: Any, *, what: str = "all_gather", deadline_s: float | None = None) -> list[Any]:
        """Return every rank's `obj`, a small picklable object, by rank. The call takes about 0.1 ms per rank, so use it only
        for set-up.

        All ranks must make the same calls in the same order. `what` names the call: if names differ, ranks raise
        `DisagreementError`. The default deadline is the deadline of the enclosing `set_up_within`, otherwise
        `WEFT_SETUP_DEADLINE_S`. Raises the errors of `wait`.
        """
        return [value for value, _ in self.all_gather_files(obj, None, what=what, deadline_s=deadline_s)]

    def all_gather_files(
        self, obj: Any, file: int | None, *, what: str, deadline_s: float | None = None
    ) -> list[tuple[Any, int | None]]:
        """Run an `all_gather` in which each rank may also send a file descriptor. Return (object, descriptor) of each rank,
        by rank. The caller must close the descriptors of peers.
        """
        deadline_s = self.setup_deadline_s(deadline_s)
        return self._control.all_gather(obj, file, what, deadline_s)

    def meet(self, payload: bytes, *, name: str, deadline_s: float | None = None) -> list[bytes]:
        """Return every rank's `payload` of at most 64,000 bytes, by rank: an all-gather for groups on several hosts.

        The payloads travel over the watchdogs' connections, in about one round trip between hosts. `name` is for error
        texts. The default deadline is `WEFT_DEADLINE_S`. Raises the errors of `wait`.
        """
        return self._control.meet(payload, name, self.deadline_s if deadline_s is None else deadline_s)

    def allocate(self, nbytes: int, *, what: str = "", deadline_s: float | None = None) -> Region:
        """Allocate `nbytes` of zeroed symmetric memory on every rank. All ranks must make this call with the same size.

        On CPU, a rank of a group on several hosts maps the memory of the ranks on its own host. On GPUs such a group raises
        `RefusedError`. Raises `OutOfSharedMemoryError` on every rank if any rank cannot reserve the memory; then nothing
        stays reserved, and the group stays usable. Raises `DisagreementError` if `nbytes` or `what` differs between ranks,
        and the errors of `all_gather`. An error that only this rank raises makes the group fail.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes} must not be negative")
        if not self.all_mapped and self.device.type != "cpu":
            far = [rank for rank, mapped in enumerate(self.mapped) if not mapped]
            raise RefusedError(
                f"{what or 'symmetric memory'}: memory of ranks {far} on other hosts cannot be mapped on rank {self.rank}: make "
                "a group of the ranks of one host"
            )
        what = f"allocating {nbytes} bytes{' for ' if what else ''}{what}"
        region: Region
        try:
            with set_up_within(deadline_s):
                if self.device.type == "cpu":
                    region = cpu.allocate(self, nbytes, what)
                else:
                    from weft.symm import cuda

                    region = cuda.allocate(self, nbytes, what)
        except WeftError:
            raise
        except BaseException as error:
            self.poison(f"{what}: {error!r}")
            raise
        self._holders.add(region)
        return region

    # -- the end

    def close(self) -> None:
        """Leave the group and notify peers. The group fails only if a peer still waits for this rank. Repeated calls have
        no effect.

        Memory that peers have mapped, and tensors that this process still has, stay valid.
        """
        self._close("close() was called")

    def _close(self, why: str, until: float | None = None) -> None:
        if self._control.close(why, until):
            with _cache_lock:
                if self in _cache:
                    _cache.remove(self)
            for holder in list(self._holders):
                holder.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_cache: list[Communicator] = []
_cache_lock = threading.RLock()
_setup_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()


def communicator(
    group: dist.ProcessGroup, device: torch.device | str, *, deadline_s: float | None = None
) -> Communicator:
    """Return the communicator of `group` on this type of device. Make it if none is open.

    All ranks of the group must make this call together, which takes milliseconds. `deadline_s` (default
    `WEFT_SETUP_DEADLINE_S`, 20 seconds) limits the wait for other ranks. The communicator exists until `close()`, until the
    process group is destroyed, or until the interpreter exits. It then notifies the peers, which do not treat this as a
    failure.

    Raises:

    - `ValueError` if `group` is None, was destroyed, was made before this process was forked, or does not contain this
      rank.
    - `RefusedError` if ranks have different versions of weft or torch, or different values of WEFT_CHECK_CALLS. Also if
      any rank has an invalid value in an environment variable of weft.
    - `PoisonedGroupError` if the group has failed before.
    - `DeadlineError` if a rank does not arrive in time, or cannot be reached.
    - `PeerLostError` if a rank has failed or died after it arrived, or if a communicator of another group has already
      found that the rank has ended. Also if the process that served the group's store has died.
    - `WeftError` if this rank has no free file descriptor or thread.
    """
    device = checked_device(device)
    if device.index is None and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    store = store_of(group)
    if (known := _known(group, device)) is not None:
        return known
    with _cache_lock:
        lock = _setup_locks.setdefault(group, threading.Lock())
    with lock:
        if (known := _known(group, device)) is not None:  # another thread has made it meanwhile
            return known
        if (failure := failures.of(group)) is not None:
            raise unusable(str(failure))
        if deadline_s is None and env.faults():  # ranks refuse the set-up when they meet
            deadline_s = env.SETUP_S
        deadline_s = _setup_deadline_s(deadline_s, env.setup_deadline_s)
        prefix = dist.PrefixStore(f"weft/{device.type}", store)
        try:
            counts = calls_of(group)
            calls = counts.begun - counts.met
            mesh = bootstrap.connect(prefix, group.rank(), group.size(), deadline_s, partial(_ended, group), calls)
        except DisagreementError as error:  # all ranks have found the same error
            failures.remember(group, error)
            failures.tell(group, group.rank())
            raise
        made = Communicator(group, device, mesh)
        if misused := calls_of(group).misused:  # misuse before the communicator existed
            made.poison(misused)
        with _cache_lock:
            _cache.append(made)
        close_at_exit(close_all)
        return made


def _known(group: dist.ProcessGroup, device: torch.device) -> Communicator | None:
    """Return the group's open communicator on this type of device, or None. Raise `ValueError` if it is on another device
    of this type.
    """
    for known in list(_cache):
        if known._group() is group and (known.device == device or known.device.type == device.type):
            known.check()
            if known.device != device:
                raise ValueError(
                    f"this group has a communicator on {known.device}, so it cannot have one on "
                    f"{device}: close the first, or use another group"
                )
            return known
        if not is_registered(known._group()):  # the group was destroyed, although references to it remain
            known._close("its process group was destroyed")
    return None


def open_communicator(group: dist.ProcessGroup, device_type: str) -> Communicator | None:
    """Return the group's open communicator on this type of device, or None."""
    return next((one for one in list(_cache) if one.is_of(group) and one.device.type == device_type), None)


def _ended(group: dist.ProcessGroup, rank: int) -> str:
    """Return the reason why a rank of `group` has ended, if a communicator of another group knows it; otherwise ""."""
    wanted = dist.get_global_rank(group, rank)
    for known in list(_cache):
        other = known._group()
        if other is None or not is_registered(other):
            continue
        for peer, text in list(known._control.ended.items()):
            if dist.get_global_rank(other, peer) == wanted:
                return text if other is group else f"{text} (rank {peer} of another group, rank {rank} of this one)"
    return ""


def close_all() -> None:
    """Close every communicator of this process, as at interpreter exit."""
    until = time.monotonic() + CALLBACK_S
    for open_communicator in list(_cache):
        open_communicator._close(EXITING, until)


def _after_fork_in_child() -> None:
    global _cache_lock
    _cache_lock = threading.RLock()
    for open_communicator in _cache:
        open_communicator._control.forked()
    _cache.clear()
    _setup_locks.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
