"""The entries that ranks publish about themselves in a process group's store, for the bootstrap (`weft.symm.bootstrap`)."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

import weft
from weft import env
from weft.errors import RefusedError
from weft.words import by_rank


@dataclass(frozen=True)
class Entry:
    """The entry of one rank.

    name: the name of the rank's attempt to set up the group, which is also the name of its listening socket.
    token: the secret that other ranks must know to connect to this rank.
    host: the host's name.
    """

    rank: int
    name: str
    token: str
    host: str
    kernel: str  # boot id and network namespace, within which abstract sockets work
    pid: int
    pids: str  # the machine and the namespace in which the pid is valid
    calls: int  # the number of calls that the rank has begun on this group
    versions: str
    checks_calls: bool  # WEFT_CHECK_CALLS
    faults: str  # error texts of environment variables with invalid values

    @staticmethod
    def of_this_process(rank: int, name: str, calls: int) -> Entry:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kernel = f"{boot} {os.readlink('/proc/self/ns/net')}"
        token, pids = secrets.token_hex(16), f"{boot} {os.readlink('/proc/self/ns/pid')}"
        versions = f"weft {weft.__version__}, torch {torch.__version__.partition('+')[0]}"
        faults = "; ".join(env.faults())
        checks_calls = not faults and env.check_calls()
        host, pid = socket.gethostname(), os.getpid()
        return Entry(rank, name, token, host, kernel, pid, pids, calls, versions, checks_calls, faults)

    @staticmethod
    def read(given: dict[str, Any]) -> Entry:
        """Return the entry in the dict `given`. If another version of weft has published it, ignore unknown fields, and use
        defaults for missing fields.
        """
        known: dict[str, Any] = {
            "token": "",
            "kernel": "",
            "pid": 0,
            "pids": "",
            "calls": 0,
            "versions": "an earlier weft",
            "checks_calls": False,
            "faults": "",
        }
        known |= {field.name: given[field.name] for field in fields(Entry) if field.name in given}
        return Entry(**known)


def require_one_version(entries: Sequence[Entry]) -> None:
    """Raise `RefusedError` if ranks have different versions of weft or torch, because these may compute different results or
    exchange other messages. All ranks pass the same entries, so all raise.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for entry in entries:
        ranks_of.setdefault((entry.versions, entry.host), []).append(entry.rank)
    if len({versions for versions, _ in ranks_of}) > 1:
        who = "; ".join(f"{versions} on ranks {ranks}, host {host}" for (versions, host), ranks in ranks_of.items())
        raise RefusedError(
            f"ranks of this group have different versions: {who}. Install the same versions on every host"
        )


def require_valid_settings(entries: Sequence[Entry]) -> None:
    """Raise `RefusedError` if an environment variable of weft is invalid on any rank, or if WEFT_CHECK_CALLS differs
    between ranks. All ranks pass the same entries, so all raise.
    """
    if faults := by_rank((entry.rank, entry.faults) for entry in entries if entry.faults):
        raise RefusedError(f"environment variables have invalid values: {faults}. Correct the variables, or unset them")
    with_1, with_0 = ([entry.rank for entry in entries if entry.checks_calls is on] for on in (True, False))
    if with_1 and with_0:
        raise RefusedError(
            f"WEFT_CHECK_CALLS is 1 on ranks {with_1} and 0 on ranks {with_0}: set the same value on all ranks, since it "
            "decides what ranks compare"
        )


def hosts_of(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the name of each rank's host. Hosts with equal names, such as containers of one machine, are numbered."""
    name_of = {entry.kernel: entry.host for entry in entries}
    for name in dict.fromkeys(name_of.values()):
        same = [kernel for kernel, host in name_of.items() if host == name]
        if len(same) > 1:
            name_of |= {kernel: f"{name} #{number}" for number, kernel in enumerate(same, 1)}
    return tuple(name_of[entry.kernel] for entry in entries)


def has_ended(pid: int) -> bool:
    """True if the process has ended, even if its parent has not reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # this process has no free descriptor to read the file
        return False
