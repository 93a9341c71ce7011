"""Pretended hosts: ranks of one machine claim to be on different hosts, and so connect by TCP on loopback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch.distributed as dist
from support.on_ranks import own_group

from weft.runtime.two_ways import Size, TwoWays
from weft.symm.entries import Entry

HOSTS = ("alpha", "beta")


def host_of(rank: int, world_size: int) -> str:
    """Return the host of a rank. The first half of the ranks is on the first host."""
    return HOSTS[2 * rank >= world_size]


@contextlib.contextmanager
def claimed(host: str, **changes: str) -> Iterator[None]:
    """Let this process claim to be on `host`."""
    native = Entry.of_this_process
    changes = {"host": host, "kernel": f"the kernel of {host}", **changes}
    Entry.of_this_process = staticmethod(lambda *given: replace(native(*given), **changes))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Entry.of_this_process = staticmethod(native)  # type: ignore[method-assign]


@contextlib.contextmanager
def on_two_hosts(
    group: dist.ProcessGroup, measures_links: bool = False, **changes: str
) -> Iterator[dist.ProcessGroup]:  # fmt: skip
    """Yield a group of the same ranks. The second half of the ranks claims to be on another host. Make the first call of
    the group inside the context.

    measures_links: True to let the group measure its links. weft then predicts that the small calls of tests cannot gain
    from overlap.
    """
    setting = {"WEFT_SELF_CALIBRATION": str(int(measures_links))}
    with claimed(host_of(group.rank(), group.size()), **changes), mock.patch.dict(os.environ, setting):
        own = own_group(group)
        yield own
        dist.destroy_process_group(own)


@contextlib.contextmanager
def slow_on_rank_0(group: dist.ProcessGroup, other: bool) -> Iterator[None]:
    """Let rank 0 record twice the time for one of two implementations: for the second if `other`, else for the first."""
    took = TwoWays.took

    def noted(self: TwoWays, size: Size, seconds: float, deadline_s: float) -> None:
        is_slow = group.rank() == 0 and self.takes_other(size) == other
        took(self, size, 0.5 if is_slow else 0.25, deadline_s)

    with mock.patch.object(TwoWays, "took", noted):
        yield
