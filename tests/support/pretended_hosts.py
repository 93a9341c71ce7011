"""Hosts that are pretended: ranks of one machine that claim to be on different ones, and so reach each other by TCP on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch.distributed as dist
from support.on_ranks import own_group

from weft.symm.entries import Entry

HOSTS = ("alpha", "beta")


def host_of(rank: int, world_size: int) -> str:
    """Return the host of a rank: the first half is on the first one."""
    return HOSTS[2 * rank >= world_size]


@contextlib.contextmanager
def claimed(host: str, **changes: str) -> Iterator[None]:
    """This process claims to be on `host`."""
    native = Entry.of_this_process
    changes = {"host": host, "kernel": f"the kernel of {host}", **changes}
    Entry.of_this_process = staticmethod(lambda *given: replace(native(*given), **changes))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Entry.of_this_process = staticmethod(native)  # type: ignore[method-assign]


@contextlib.contextmanager
def on_two_hosts(group: dist.ProcessGroup, **changes: str) -> Iterator[dist.ProcessGroup]:
    """A group of the same ranks, the second half of which is on another host. It sets itself up inside."""
    with claimed(host_of(group.rank(), group.size()), **changes):
        own = own_group(group)
        yield own
        dist.destroy_process_group(own)
