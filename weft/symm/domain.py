"""What the ranks of one process group share: memory that all can address, and the news that one of them has failed.

A `Domain` is made once per (group, device type) and cached until it is closed. It keeps a socket to every peer
(`weft.symm.mesh`). A daemon thread, the watchdog, reads them, so that news arrives while the rank computes or waits:

- *goodbye*: the peer closed its domain in order. No failure, until somebody waits for something only it could do.
- *poison*: a peer met an error (a missed deadline, say) after which ranks no longer agree on where they are.
- *lost*: a peer saw another one die. Everyone sees that by itself too; telling makes all name the same cause.
- end of file without goodbye: the peer is dead (kill -9, crash). The kernel reports it at once.

A failure is final for the group: the watchdog sets the *failed word* (a private int64 that native waits look at), runs
the `on_failure` callbacks, and every later use raises. Nothing in shared memory is written to signal it, so a rank that
dies half-way through a write can leave nothing behind that others would misread.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing.util
import os
import pickle
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from weft import _core, env
from weft.errors import DeadlineError, DisagreementError, PeerLostError, PoisonedGroupError, WeftError
from weft.symm import mesh

_DATA, _GOODBYE, _POISON, _LOST = b"D", b"G", b"P", b"L"
_LOOK_S = 0.1  # how long a native wait may last before Python looks around (Ctrl-C, goodbyes)
_log = logging.getLogger("weft")


class Region(Protocol):
    """`nbytes` of memory on every rank of a domain, all of it addressable from every rank. Fresh memory is zero."""

    nbytes: int

    def address(self, rank: int) -> int:
        """Where this process sees `rank`'s memory."""

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        """A view of `rank`'s memory; it stays valid after `close`, for as long as it is held."""

    def close(self) -> None:
        """Give the memory up. It is unmapped when the last view goes; other ranks keep what they have mapped."""


class Domain:
    """The ranks of a process group as seen from this one. Made by `domain()`; a context manager that closes itself."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, peers: list[mesh.Peer]):
        self.rank = group.rank()
        self.world_size = group.size()
        self.device = device
        self._group = weakref.ref(group, lambda _: self.close())  # destroying the group closes its domains
        self._pid = os.getpid()
        self._peers = {peer.rank: peer for peer in peers}
        self._inbox: dict[int, deque[tuple[bytes, list[int]]]] = {peer.rank: deque() for peer in peers}
        self._gone: set[int] = set()  # said goodbye
        self._word = ctypes.c_int64(0)
        self._failure: tuple[type[WeftError], str] | None = None
        self._reported = False
        self._closed = ""  # why, once it is
        self._done = False  # goodbyes are sent, the watchdog may end
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._regions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._changed = threading.Condition()  # reentrant; guards everything above
        self._collective = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watchdog = threading.Thread(target=self._watch, name=f"weft-watchdog-{self.rank}", daemon=True)
        self._watchdog.start()

    # -- who we are

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise ValueError("the process group of this domain was destroyed, and the domain with it")
        return group

    @property
    def closed(self) -> bool:
        return bool(self._closed)

    @property
    def failed_address(self) -> int:
        """Address of a private int64: 0 while all is well, 1 once the group has failed or this domain is closed."""
        return ctypes.addressof(self._word)

    def __repr__(self) -> str:
        state = (
            f"closed: {self._closed}" if self._closed else f"failed: {self._failure[1]}" if self._failure else "open"
        )
        return f"Domain(rank={self.rank}, world_size={self.world_size}, device={self.device}, {state})"

    # -- failure

    def check(self) -> None:
        """Raise if the domain is closed (`ValueError`) or the group has failed.

        The first report of a dead peer is a `PeerLostError`; from then on, and for every other failure, it is a
        `PoisonedGroupError` that repeats the cause.
        """
        if self._word.value:
            raise self._error()

    def poison(self, text: str) -> None:
        """Declare this group unusable, here and on every peer, because of `text`. The first declaration counts."""
        self._poison(f"rank {self.rank}: {text}")

    def on_failure(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have the watchdog thread run `callback()` once if the group fails; at once, here, if it already has.

        Returns a function that takes the registration back.
        """
        key = object()
        with self._changed:
            failed = self._failure is not None
            if not failed:
                self._callbacks[key] = callback
        if failed:
            callback()

        def take_back() -> None:
            self._callbacks.pop(key, None)

        return take_back

    def _poison(self, text: str) -> None:
        self._fail(PoisonedGroupError, text, _POISON + text.encode()[: mesh.MAX_PACKET - 1])

    def _lose(self, rank: int, text: str) -> None:
        self._fail(PeerLostError, text, _LOST + json.dumps([rank, text]).encode())

    def _fail(self, kind: type[WeftError], text: str, news: bytes = b"") -> None:
        with self._changed:
            if self._failure is not None or self._closed:
                return
            self._failure = (kind, text)
            group = self._group()
            if group is not None:
                _poisoned[group] = text
            self._word.value = 1
            self._changed.notify_all()
        for rank in self._peers if news else ():
            self._send(rank, news)
        self._rouse()

    def _error(self, context: str = "") -> Exception:
        with self._changed:
            if self._failure is None:
                return ValueError(f"this domain (rank {self.rank} of {self.world_size}) is closed: {self._closed}")
            kind, text = self._failure
            first, self._reported = not self._reported, True
        if first and kind is not PoisonedGroupError:
            return kind(text + context)
        return PoisonedGroupError(
            f"this process group is unusable since an earlier failure ({text}): make a new one{context}"
        )

    # -- waiting

    def wait(
        self, address: int, wanted: int, *, name: str, peer: int | None = None, deadline_s: float | None = None
    ) -> int:
        """Wait until the counter at `address` is at least `wanted` (acquire order) and return its value.

        `peer` is the rank expected to raise it (None: anybody). Raises `DeadlineError` with rank, signal, wanted and
        found after `deadline_s` seconds (default `WEFT_DEADLINE_S`), which also poisons the group; `PeerLostError` if
        that peer has left or died; `PoisonedGroupError` if the group failed otherwise.
        """
        self.check()
        deadline_s = env.deadline_s() if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        whom = "" if peer is None else f" from {self._name(peer)}"
        while True:
            # Asked before the counter is read: who has said goodbye has by then written all it ever will.
            left = self._has_left(peer)
            remaining = 0.0 if left else max(0.0, until - time.monotonic())
            outcome, found = _core.signal_wait(address, wanted, min(remaining, _LOOK_S), self.failed_address)
            if outcome == 0:
                return found
            context = f"; rank {self.rank} was waiting for {name}{whom}: wanted {wanted}, found {found}"
            if outcome == 2:
                raise self._error(context)
            if left:
                self._lose(
                    peer if peer is not None else min(self._gone), f"{left} closed its end of the group in order"
                )
                raise self._error(context)
            if time.monotonic() >= until:
                text = f"rank {self.rank} waited {deadline_s:g} s for {name}{whom}: wanted {wanted}, found {found}"
                self._poison(text)
                raise DeadlineError(text)

    def _has_left(self, peer: int | None) -> str:
        """Who is to blame if nobody is left who could raise the signal that we wait for, else ''."""
        if peer is not None:
            return self._name(peer) if peer in self._gone else ""
        return "every other rank" if self._peers and len(self._gone) == len(self._peers) else ""

    def _name(self, rank: int) -> str:
        peer = self._peers.get(rank)
        return f"rank {rank}" if peer is None else f"rank {rank} (pid {peer.pid})"

    # -- set-up collectives

    def all_gather(self, obj: Any, *, what: str = "all_gather", deadline_s: float | None = None) -> list[Any]:
        """Every rank's `obj` (picklable, at most 64 KiB pickled), by rank. For set-up: it takes tens of microseconds.

        All ranks must make the same calls in the same order; `what` says which this is, and ranks that meet with
        different ones raise `DisagreementError`.
        """
        return [value for value, _ in self.all_gather_files(obj, None, what=what, deadline_s=deadline_s)]

    def all_gather_files(
        self, obj: Any, file: int | None, *, what: str, deadline_s: float | None = None
    ) -> list[tuple[Any, int | None]]:
        """`all_gather` in which each rank may hand over a file descriptor too; the receiver closes what peers sent."""
        self.check()
        packet = _DATA + pickle.dumps((what, obj))
        if len(packet) > mesh.MAX_PACKET:
            raise ValueError(
                f"{what}: {len(packet)} bytes are more than the {mesh.MAX_PACKET} that ranks exchange at set-up"
            )
        deadline_s = env.deadline_s() if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        taken: list[tuple[Any, int | None]] = [(obj, file)] * self.world_size
        received: list[int] = []
        names = [what] * self.world_size
        try:
            with self._collective:
                for rank in self._peers:
                    self._send(rank, packet, file, until)
                for rank in self._peers:
                    data, files = self._take(rank, what, until, deadline_s)
                    received += files
                    names[rank], value = pickle.loads(data)
                    taken[rank] = (value, files[0] if files else None)
            if len(set(names)) > 1:
                calls = ", ".join(f"rank {r}: {name}" for r, name in enumerate(names))
                raise DisagreementError(f"ranks made different calls where all must make the same one: {calls}")
        except BaseException:
            for descriptor in received:
                os.close(descriptor)
            raise
        return taken

    def _take(self, rank: int, what: str, until: float, deadline_s: float) -> tuple[bytes, list[int]]:
        context = f"; rank {self.rank} was waiting for its part in {what}"
        with self._changed:
            while True:
                left = rank in self._gone
                if self._inbox[rank]:
                    return self._inbox[rank].popleft()
                if self._word.value:
                    raise self._error(context)
                if left:
                    self._lose(rank, f"{self._name(rank)} closed its end of the group in order")
                    raise self._error(context)
                remaining = until - time.monotonic()
                if remaining <= 0:
                    text = f"rank {self.rank} waited {deadline_s:g} s for {self._name(rank)} in {what}: wanted 1 message, found 0"
                    self._poison(text)
                    raise DeadlineError(text)
                self._changed.wait(remaining)

    # -- memory

    def allocate(self, nbytes: int, *, what: str = "") -> Region:
        """`nbytes` of zeroed symmetric memory on every rank. Collective: every rank asks for the same.

        Raises `OutOfSharedMemoryError` on every rank if any cannot reserve it (nothing stays reserved then, and the
        group stays usable), `DisagreementError` if sizes (or `what`, the description) differ.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes} must not be negative")
        what = f"allocate({what or f'{nbytes} bytes'})"
        region: Region
        if self.device.type == "cpu":
            from weft.symm import cpu

            region = cpu.allocate(self, nbytes, what)
        else:
            from weft.symm import cuda

            region = cuda.allocate(self, nbytes, what)
        self._regions.add(region)
        return region

    # -- the end

    def close(self) -> None:
        """Leave in order: peers learn of it, which is no failure unless one still waits for this rank. Idempotent.

        Memory that peers have mapped, and tensors that this process still holds, stay valid.
        """
        self._close("close() was called, or its process group was destroyed")

    def _close(self, why: str) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = why
            self._word.value = 1
            self._changed.notify_all()
            self._callbacks.clear()
        with _cache_lock:
            if self in _cache:
                _cache.remove(self)
        for rank in self._peers:
            self._send(rank, _GOODBYE)
        self._done = True
        self._rouse()
        if threading.current_thread() is not self._watchdog:
            self._watchdog.join()
        for region in list(self._regions):
            region.close()

    def __enter__(self) -> Domain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forked(self) -> None:
        """In a forked child: the sockets are closed (`mesh`), the locks may be held by threads that do not exist here."""
        self._changed, self._collective = threading.Condition(), threading.Lock()
        self._closed = "it belongs to the process that this one was forked from"
        self._failure = None
        self._word.value = 1
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # -- the watchdog

    def _rouse(self) -> None:
        with self._changed:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        ranks = {peer.socket.fileno(): peer.rank for peer in self._peers.values()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while not self._done:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                elif not self._read(ranks[descriptor]):
                    poll.unregister(descriptor)
            if self._failure is not None:
                self._run_callbacks()
        with self._changed:  # so that no other thread is about to use a descriptor that is being closed
            for peer in self._peers.values():
                peer.socket.close()
            for inbox in self._inbox.values():
                for _, files in inbox:
                    for file in files:
                        os.close(file)
                inbox.clear()
            os.close(self._wake)
            self._wake = -1

    def _run_callbacks(self) -> None:
        with self._changed:
            callbacks = list(self._callbacks.values())
            self._callbacks.clear()
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _log.exception("rank %d: a callback for the group's failure failed itself", self.rank)

    def _read(self, rank: int) -> bool:
        """Take in what `rank` has sent; False at the end of its stream."""
        sock = self._peers[rank].socket
        while True:
            try:
                flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                data, files, _, _ = socket.recv_fds(sock, mesh.MAX_PACKET, 1, flags)
            except BlockingIOError:
                return True
            except ConnectionResetError:  # it left without reading all of ours; its own last words come next
                continue
            if not data:
                if rank not in self._gone:
                    self._lose(rank, f"{self._name(rank)} died: its connection ended without a goodbye")
                return False
            kind, body = data[:1], data[1:]
            if kind == _DATA:
                with self._changed:
                    self._inbox[rank].append((body, files))
                    self._changed.notify_all()
            elif kind == _GOODBYE:
                with self._changed:
                    self._gone.add(rank)
                    self._changed.notify_all()
            elif kind == _POISON:
                self._fail(PoisonedGroupError, body.decode(errors="replace"))  # it has told everybody
            elif kind == _LOST:
                whom, text = json.loads(body)
                self._lose(whom, text)

    def _send(self, rank: int, packet: bytes, file: int | None = None, until: float = 0.0) -> None:
        """Send without blocking, or until `until` when the peer's buffer is full. A dead peer is the watchdog's news."""
        sock = self._peers[rank].socket
        files = [] if file is None else [file]
        while True:
            try:
                with self._changed:
                    socket.send_fds(sock, [packet], files, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    return
                time.sleep(0.001)
            except OSError:
                return


_cache: list[Domain] = []
_cache_lock = threading.RLock()
_setup_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
_poisoned: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_exit_hook_of: int = 0  # pid


def domain(group: dist.ProcessGroup, device: torch.device | str, *, deadline_s: float | None = None) -> Domain:
    """The domain of `group` on this type of device: the open one if there is one, else a new one.

    Making it is collective over the ranks of the group and takes milliseconds; `deadline_s` (default
    `WEFT_DEADLINE_S`) bounds the wait for the others. It stays until `close()`, until the process group is destroyed,
    or until the interpreter exits; each of these is an orderly goodbye.

    Raises `ValueError` if `group` is None, was destroyed, or does not contain this rank, or if its ranks are on
    different hosts; `PoisonedGroupError` if the group has failed before; `DeadlineError` if a rank does not come.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    store = _store_of(group)
    with _cache_lock:
        lock = _setup_locks.setdefault(group, threading.Lock())
    with lock:
        for known in list(_cache):
            if known._group() is group and known.device.type == device.type:
                if known.device != device:
                    raise ValueError(
                        f"this group already has a domain on {known.device}: close it before using {device}"
                    )
                known.check()
                return known
        if group in _poisoned:
            raise PoisonedGroupError(
                f"this process group is unusable since an earlier failure ({_poisoned[group]}): make a new one"
            )
        deadline_s = env.deadline_s() if deadline_s is None else deadline_s
        prefix = dist.PrefixStore(f"weft/{device.type}", store)
        peers = mesh.connect(prefix, group.rank(), group.size(), deadline_s)
        made = Domain(group, device, peers)
        with _cache_lock:
            _cache.append(made)
        _close_at_exit()
        return made


def _store_of(group: Any) -> dist.Store:
    """The group's key-value store; raises if this rank cannot use the group."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised: call dist.init_process_group first")
    if group is None:
        raise ValueError(
            "group=None: pass dist.group.WORLD or your own group. (dist.new_group with use_local_synchronization=True "
            "returns None on ranks that are not in the new group: only its members may make this call)"
        )
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in this group: only its members may make this call")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group={group!r} must be a torch.distributed.ProcessGroup")
    try:
        return _get_process_group_store(group)
    except KeyError:
        raise ValueError("this process group was destroyed: make a new one") from None


def close_all() -> None:
    """Close every domain of this process, as happens at interpreter exit."""
    for open_domain in list(_cache):
        open_domain._close("the process is exiting")


def _close_at_exit() -> None:
    # Through multiprocessing, because its child processes end without running `atexit`'s functions.
    global _exit_hook_of
    if _exit_hook_of != os.getpid():
        _exit_hook_of = os.getpid()
        multiprocessing.util.Finalize(None, close_all, exitpriority=100)


def _after_fork() -> None:
    global _cache_lock
    _cache_lock = threading.RLock()
    for open_domain in _cache:
        open_domain._forked()
    _cache.clear()
    _setup_locks.clear()


os.register_at_fork(after_in_child=_after_fork)
