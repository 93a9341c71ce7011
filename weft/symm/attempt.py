"""One rank's attempt to set up a group. The rank publishes an entry about its process and host in the group's store, reads
the entries of the other ranks, and waits for missing entries. `weft.symm.bootstrap` describes the protocol.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from weft.errors import DeadlineError, PeerLostError, RefusedError
from weft.reading import parse_json
from weft.symm import hosts
from weft.symm.entries import Entry, has_ended
from weft.symm.store import PatientStore

PREFIX = "weft-"
_heard: set[tuple[int, str]] = set()
"""Errors of other ranks that this rank has already raised. An error is identified by (this rank, name of the attempt
that failed first).
"""


class Attempt:
    """One rank's attempt to set up a group: its entry, the entries that it has read, and its deadline."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, deadline_s: float, ended: Callable[[int], str], calls: int
    ) -> None:
        self.rank, self.world_size, self.deadline_s = rank, world_size, deadline_s
        self.ended, self.calls = ended, calls
        self.until = time.monotonic() + deadline_s
        self.store = PatientStore(store, rank, self.until)
        self.name = PREFIX + secrets.token_hex(16)
        self.mine: Entry  # this rank's entry, once it is published
        self.entries: dict[int, Entry] = {}
        self.gave_up: dict[int, str] = {}  # reasons of ranks that gave up in earlier attempts
        self.has_looked_again = False  # True after the additional check that follows the deadline
        self.cause = ""  # the name of the attempt whose error has ended this attempt
        self.hosts: tuple[str, ...] = ()
        self.control: hosts.ControlPort | None = None  # only in a group on several hosts
        self.trouble: dict[int, str] = {}  # error text of each rank on another host that cannot be reached

    def say(self, text: str) -> bool:
        """Publish `text` as this rank's entry. Return False if the process that served the store has ended."""
        try:
            # Overwrite the entry instead of deleting it: a peer that has just found the entry would wait for it to
            # appear again.
            self.store.set(str(self.rank), text)
        except RuntimeError:
            return False
        return True

    def last_words(self, error: BaseException) -> dict[str, Any]:
        """Return the entry that replaces this rank's entry when the rank gives up because of `error`. The entry is a dict:

        - gave_up: the text of the error.
        - met: the names of all attempts whose entries this rank had read. The ranks of these attempts raise the error too.
        - cause: the name of the attempt that failed first, which identifies the error. Each other rank, even one that arrives
          later, raises the error once and then ignores it. After a missed deadline or a lost peer, `cause` is empty, and only the
          ranks in `met` raise.
        - refused: True for a `RefusedError`. Every rank finds such an error itself, because all ranks compare the same entries.
          All ranks then use the name of rank 0's attempt as `cause`, so that each rank raises the error only once.
        """
        found = isinstance(error, DeadlineError | PeerLostError | RefusedError)
        cause = self.cause if found else self.name
        _heard.add((self.rank, cause))  # other ranks will repeat this error
        met = [entry.name for entry in self.entries.values()]
        refused = isinstance(error, RefusedError)
        return {"gave_up": str(error) or repr(error), "met": met, "cause": cause, "refused": refused}

    def look_up(self, rank: int) -> None:
        """Read the entry of `rank`, if there is one. If the entry says that `rank` gave up, raise the error in the
        entry. Ignore an error that this rank has already raised, and an error that concerns only other ranks
        (`last_words`).
        """
        if not self.store.check([str(rank)]) or not (text := self.store.get(str(rank))):
            return
        entry = parse_json(text, f"the entry of rank {rank} in the store")
        if "gave_up" not in entry:
            self.entries[rank] = Entry.read(entry)
            return
        cause, self.gave_up[rank] = entry["cause"], entry["gave_up"]
        if (cause and (self.rank, cause) not in _heard) or self.name in entry["met"]:
            _heard.add((self.rank, cause))
            self.cause = cause
            if entry["refused"]:  # this rank would find the same error in the entries
                raise RefusedError(entry["gave_up"])
            trouble = f"; {self.trouble[rank]}" if rank in self.trouble else ""
            raise PeerLostError(f"rank {rank} gave up while this group was being set up: {entry['gave_up']}{trouble}")

    def port_of(self, entry: Entry) -> hosts.Port | None:
        """Return the control port in `entry`, which a rank has published; None if it has no port."""
        key = port_key(entry)
        if not self.store.check([key]) or not (text := self.store.get(key)):
            return None
        addresses, number = parse_json(text, f"the port of rank {entry.rank} in the store")
        return hosts.Port(tuple(addresses), number)

    def is_far(self, rank: int) -> bool:
        return self.entries[rank].kernel != self.mine.kernel

    def still_wait_for(self, missing: list[int]) -> None:
        """Raise an error if no time is left, or if one of the `missing` ranks will never arrive."""
        for rank in missing:
            self.raise_if_ended(rank)
        if self.has_looked_again:
            raise self.too_late(missing)
        # This process may have been stopped while the ranks arrived. So check once more after the deadline.
        self.has_looked_again = time.monotonic() >= self.until

    def raise_if_ended(self, rank: int) -> None:
        entry, text = self.entries.get(rank), self.ended(rank)
        if entry is not None and entry.pids == self.mine.pids and has_ended(entry.pid):
            text = f"rank {rank} (pid {entry.pid}) died"
        if text:
            raise PeerLostError(f"{text} while rank {self.rank} waited for it to set up symmetric memory", rank)

    def too_late(self, missing: list[int]) -> DeadlineError:
        before = "".join(f"; rank {r} gave up before: {self.gave_up[r]}" for r in missing if r in self.gave_up)
        before += "".join(f"; {self.trouble[r]}" for r in missing if r in self.trouble)
        if self.control is not None and (far := [r for r in missing if r > self.rank and self.is_far(r)]):
            where = ", ".join(f"rank {r} on host {self.hosts[r]}" for r in far)
            before += f"; to arrive, {where} must reach rank {self.rank} at {self.control.port}"
        return DeadlineError(
            f"rank {self.rank} waited {self.deadline_s:g} s for ranks {missing} to set up symmetric memory: wanted "
            f"{self.world_size} ranks, found {self.world_size - len(missing)}{before}. Every rank of the group must "
            "make the call within that time, which deadline_s or WEFT_SETUP_DEADLINE_S sets"
        )


def port_key(entry: Entry) -> str:
    return f"{entry.rank} {entry.name}"
