"""Collectives in two levels, for CPU ranks on several hosts: within each host, and between hosts by rails.

A **rail** is the ranks with one index, each on its own host. On H hosts of L ranks, for a shard of n bytes on each rank:

    all_gather      each rail gathers its shards, then each host gathers what its rails have. The shards of a rank's own host are
                    gathered while the rail works. A host sends L n bytes to each other host.
    reduce_scatter  each host sums the parts that its rails need, in an all-to-all within the host. Then each rail exchanges and
                    adds its H sums. A host sends L n bytes to each other host.
    all_reduce      a reduce-scatter within the host, an all-reduce in the rail, a gather within the host. A host sends
                    2 (H - 1) / H of the matrix.

So each byte crosses a link between hosts once per host. A ring of all ranks sends (W - 1) n bytes out of each host for an
all-gather, and 2 (W - 1) n for the all-reduce by which gloo's reduce-scatter works (W = H L).

Sums are fp32 (fp64 for fp64), and are rounded to the dtype of the matrix once per level.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005; Cho et al.,
"BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy", 2019, section 3.
"""

from __future__ import annotations

import datetime
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from weft.errors import DeadlineError
from weft.runtime.collectives import exchange_now, finish, gather_now, reduce_now
from weft.symm import Communicator
from weft.symm.communicator import setup_deadline_s
from weft.symm.groups import store_of

_LONG = datetime.timedelta(minutes=30)  # gloo's own limit, as for torch's groups: `finish` has the call's deadline
_LOOK_S, _GRACE_S = 0.05, 0.5
_known: weakref.WeakKeyDictionary[Communicator, TwoLevels | None] = weakref.WeakKeyDictionary()


def two_levels_of(comm: Communicator) -> TwoLevels | None:
    """Return the two levels of a communicator; None if its ranks do not form rails. Collective at the first call.

    Raise `DeadlineError` on every rank if ranks cannot connect within the deadline of set-up.
    """
    if comm not in _known:
        per_host = ranks_per_host(comm.hosts)
        _known[comm] = TwoLevels(comm, per_host, setup_deadline_s(None)) if per_host else None
    return _known[comm]


def ranks_per_host(hosts: Sequence[str]) -> int:
    """Return the number of ranks on each host; 0 unless there are several hosts, each with the same number of at least two
    consecutive ranks. hosts: of all ranks."""
    count = len(set(hosts))
    per_host = len(hosts) // count
    starts = list(hosts[::per_host])
    regular = [host for host in starts for _ in range(per_host)] == list(hosts) and len(starts) == count
    return per_host if regular and count > 1 and per_host > 1 else 0


class TwoLevels:
    """gloo's groups of a rank's host and rail. They are weft's own: the caller's groups have no part in them."""

    def __init__(self, comm: Communicator, per_host: int, deadline_s: float) -> None:
        self.per_host, self.n_hosts = per_host, comm.world_size // per_host
        self.host, self.index = divmod(comm.rank, per_host)
        name = comm.all_gather(secrets.token_hex(8), what="the name of two levels")[0]
        error = _until(deadline_s, comm, lambda: self._connect(f"weft/levels/{name}", store_of(comm.group), deadline_s))
        if errors := [text for text in comm.all_gather(error, what="connections of two levels") if text]:
            raise DeadlineError(errors[0])

    def _connect(self, name: str, store: dist.Store, deadline_s: float) -> None:
        own, limit = dist.PrefixStore(name, store), datetime.timedelta(seconds=deadline_s)
        self.within = _gloo(own, f"host {self.host}", self.index, self.per_host, limit)
        self.rail = _gloo(own, f"rail {self.index}", self.host, self.n_hosts, limit)

    def all_gather(self, src: torch.Tensor, whole: torch.Tensor, wait: Wait) -> None:
        """Gather src [n, columns] of all ranks into whole [W n, columns]. Both are contiguous."""
        parts = whole.view(self.n_hosts, -1, *whole.shape[1:])
        mine = src.new_empty(self.n_hosts, *src.shape)
        rail = gather_now(self.rail, mine.flatten(0, 1), src)
        wait(gather_now(self.within, parts[self.host], src), src, whole, rail, mine)
        wait(rail, src, mine)
        works = [gather_now(self.within, parts[host], mine[host]) for host in range(self.n_hosts) if host != self.host]
        for work in works:
            wait(work, works, mine, whole)

    def reduce_scatter(self, source: torch.Tensor, wait: Wait) -> torch.Tensor:
        """Return this rank's rows of the sum of all ranks' source [W n, columns], [n, columns]."""
        parts = source.view(self.n_hosts, self.per_host, -1, source.shape[1])
        sums = self._sum(self.within, parts.transpose(0, 1).contiguous(), wait)
        return self._sum(self.rail, sums, wait)

    def all_reduce(self, whole: torch.Tensor, wait: Wait) -> None:
        """Sum all ranks' `whole`, contiguous, in place. All ranks get the same bits."""
        flat, size = whole.view(-1), -(-whole.numel() // self.per_host)
        padded = flat
        if flat.numel() != size * self.per_host:
            padded = flat.new_zeros(size * self.per_host)
            padded[: flat.numel()] = flat
        mine = self._sum(self.within, padded.view(self.per_host, size), wait)
        wait(reduce_now(self.rail, [mine]), mine)
        wait(gather_now(self.within, padded, mine), padded, mine)
        if padded is not flat:
            flat.copy_(padded[: flat.numel()])

    @staticmethod
    def _sum(group: dist.ProcessGroup, parts: torch.Tensor, wait: Wait) -> torch.Tensor:
        """Return the sum of parts[r] of all ranks of `group`, where r is this rank's number there."""
        came = torch.empty_like(parts)
        wait(exchange_now(group, came, parts, [], []), came, parts)
        return came.sum(0, dtype=None if parts.dtype == torch.float64 else torch.float32).to(parts.dtype)


Wait = Callable[..., None]
"""(work, tensors that it uses): return when the work has ended."""


def waits(comm: Communicator, what: str, deadline_s: float, *held: object) -> Wait:
    """Return the function by which a collective in two levels waits. what: its name. held: what its threads use."""
    return lambda work, *tensors: finish(work, comm, what, deadline_s, *tensors, *held)


def _until(deadline_s: float, comm: Communicator, connect: Callable[[], None]) -> str:
    """Call `connect` on a thread. Return "", or its error. The process that keeps the store may be stopped, and torch waits for
    it without a limit."""
    errors = [f"no answer within {deadline_s:g} s"]

    def run() -> None:
        try:
            connect()
            errors.clear()
        except RuntimeError as error:
            errors[0] = str(error)

    thread = threading.Thread(target=run, name=f"weft-levels-{comm.rank}", daemon=True)
    thread.start()
    until = time.monotonic() + deadline_s + _GRACE_S
    while thread.is_alive() and time.monotonic() < until:
        thread.join(_LOOK_S)
        comm.check()
    hosts = f"its host {comm.hosts[comm.rank]} and its rail"
    return f"rank {comm.rank} could not connect to the ranks of {hosts}: {errors[0]}" if errors else ""


def _gloo(store: dist.Store, name: str, rank: int, size: int, limit: datetime.timedelta) -> dist.ProcessGroup:
    """Return a group without torch's registration, which would be collective over all ranks of the job."""
    own = dist.PrefixStore(name, store)
    backend = dist.ProcessGroupGloo(own, rank, size, limit)
    backend._set_default_timeout(_LONG)
    group = dist.ProcessGroup(own, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
