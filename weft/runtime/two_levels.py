"""Collectives in two levels, for CPU ranks on several hosts: within each host, and between hosts along rails.

A **rail** consists of the ranks with the same index on their hosts, one on each host. On H hosts of L ranks, with a shard
of n bytes on each rank:

    all_gather      Each rail gathers its shards in shared memory, where each rank reads the results of all rails of its host. A
                    host sends L n bytes to every other host.
    reduce_scatter  Each host sums, in shared memory, the parts that its rails need. Then each rail exchanges and adds its H sums. A
                    host sends L n bytes to every other host.
    all_reduce      A reduce-scatter within the host, an all-reduce in each rail, and a gather within the host. A host sends
                    2 (H - 1) / H times the bytes of the matrix.

So each byte is sent to each host only once. In a ring all-gather of all W = H L ranks, each host would send (W - 1) n bytes.
gloo implements reduce-scatter by an all-reduce, which sends twice as many bytes as a reduce-scatter.

Sums are computed in fp32 (fp64 for fp64), and rounded to the dtype of the matrix after each level.
`weft.runtime.within_host` defines the order of accesses to shared memory. weft makes its own gloo groups for rails.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005; Cho et al.,
    "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy", 2019, section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.errors import OutOfSharedMemoryError
from weft.runtime.collectives import exchange_both_ways, finish, gather_now, reduce_now
from weft.runtime.gloo_groups import gloo_of_its_own
from weft.runtime.per_communicator import of_communicator
from weft.runtime.within_host import WithinHost
from weft.schedule import ITEM_BYTES, Collective, Lane, Schedule, value
from weft.schedule.steps import of_kind, variables_of
from weft.symm import Communicator
from weft.symm.communicator import setup_deadline_s

_known: dict[Communicator, TwoLevels] = {}


def two_levels_for(
    schedule: Schedule, lanes: Iterable[Lane], rows: Iterable[tuple[int, ...]], comm: Communicator
) -> TwoLevels | None:
    """Return the two-level collectives of `comm`, with shared memory for the collectives of `lanes`. All ranks must make
    this call.

    Return None in these cases: ranks form no rails (`ranks_per_host`), ranks have different numbers of rows, sizes are dynamic,
    or a host has too little memory.

    rows: for each collective, the number of rows of each rank's shard.

    Raise `DeadlineError` on every rank if ranks cannot connect within the deadline of set-up.
    """
    if comm.all_mapped or not (per_host := ranks_per_host(comm.hosts)):
        return None
    dtypes = {buffer.name: buffer.dtype for buffer in schedule.buffers}
    steps = [step for lane in lanes for step in of_kind(lane.steps, Collective)]
    if any(variables_of(step) for step in steps):  # dynamic sizes are not known here
        return None
    nbytes = max((_shared_bytes(one, n, dtypes, per_host) for one, n in zip(steps, rows, strict=True)), default=0)
    if not nbytes:
        return None
    levels = levels_on(comm)
    try:
        levels.near.reserve(nbytes)
    except OutOfSharedMemoryError:  # raised on every rank
        return None
    return levels


def levels_on(comm: Communicator) -> TwoLevels:
    """Return the two-level collectives of `comm`, whose ranks must form rails (`ranks_per_host`). All ranks must make the
    first call together.
    """
    per_host = ranks_per_host(comm.hosts)
    return of_communicator(_known, comm, lambda made: TwoLevels(made, per_host, setup_deadline_s(None)))


def largest_collective_bytes(schedule: Schedule) -> int:
    """Return the size, in bytes, of the largest matrix that a collective of the schedule gathers or reduces. Collectives
    with dynamic sizes are ignored.
    """
    item = {buffer.name: ITEM_BYTES[buffer.dtype] for buffer in schedule.buffers}
    steps = [step for lane in schedule.of_rank(0) for step in of_kind(lane.steps, Collective) if not variables_of(step)]
    wholes = [step.dst if step.op == "all_gather" else step.src for step in steps]
    return max((value(one.rows) * value(one.cols) * item[one.buffer] for one in wholes), default=0)


def _shared_bytes(step: Collective, rows: tuple[int, ...], dtypes: dict[str, str], per_host: int) -> int:
    """Return the bytes of shared memory that the step needs on each rank; 0 if it cannot run in two levels."""
    if step.op not in ("all_gather", "reduce_scatter", "all_reduce") or len(set(rows)) > 1:
        return 0
    whole = step.src if step.op != "all_gather" else step.dst
    elements = value(whole.rows) * value(whole.cols)
    if step.op == "all_gather":
        elements //= per_host
    return (elements + per_host) * ITEM_BYTES[dtypes[whole.buffer]] if elements else 0


def ranks_per_host(hosts: Sequence[str]) -> int:
    """Return the number of ranks on each host if the ranks form rails, else 0.

    Ranks form rails if there are several hosts, and each has the same number of consecutive ranks, at least two.

    hosts: the host of each rank.
    """
    count = len(set(hosts))
    per_host = len(hosts) // count
    starts = list(hosts[::per_host])
    regular = [host for host in starts for _ in range(per_host)] == list(hosts) and len(starts) == count
    return per_host if regular and count > 1 and per_host > 1 else 0


@dataclass(frozen=True, slots=True)
class Call:
    """A collective's name, its deadline in seconds, and objects to keep alive because gloo's threads may use them."""

    what: str
    deadline_s: float
    held: tuple[object, ...] = ()


class TwoLevels:
    """Collectives in two levels on one communicator: within hosts by shared memory, and between hosts by gloo groups of
    rails. A rail consists of the ranks with the same index on their hosts.

    per_host: the result of `ranks_per_host`. deadline_s: the longest wait for connections along the rail, in seconds.
    """

    def __init__(self, comm: Communicator, per_host: int, deadline_s: float) -> None:
        self.comm, self.per_host, self.n_hosts = comm, per_host, comm.world_size // per_host
        self.host, self.index = divmod(comm.rank, per_host)
        self.near = WithinHost(comm)
        self._kept: dict[str, torch.Tensor] = {}
        whom = "its rail, the ranks with its index on other hosts"
        self.rail, back = (
            gloo_of_its_own(comm, whom, self.host, self.n_hosts, f"{self.index}", deadline_s) for _ in range(2)
        )
        self._ways = self.rail, back
        comm._holders.add(self)

    def close(self) -> None:
        """Drop the rail and the memory. The communicator calls this method when it closes."""
        _known.pop(self.comm, None)

    def all_gather(self, src: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """Gather src [n, columns] of all W ranks into whole [W n, columns]. Both are contiguous."""
        shape = (self.n_hosts, *src.shape)
        mine = self.near.own(src, *shape, deadline_s=call.deadline_s, what=call.what)
        if self.n_hosts == 2:  # gloo's all-gather would gather into new memory first, and copy
            other, rows = mine[1 - self.host], [0, 0]
            rows[1 - self.host] = len(src)
            works = self.exchange(other, src, rows, rows)
            mine[self.host].copy_(src)
            self._finish(works, call, src, mine)
        else:
            self._finish([gather_now(self.rail, mine.flatten(0, 1), src)], call, src, mine)
        self.near.publish(deadline_s=call.deadline_s, what=call.what)
        parts = whole.view(self.n_hosts, self.per_host, *src.shape)
        for index in range(self.per_host):
            parts[:, index].copy_(self.near.of(index, src, *shape))
        self.near.release()

    def reduce_scatter(self, source: torch.Tensor, call: Call) -> torch.Tensor:
        """Sum `source`, [W n, columns], over all W ranks. Return this rank's rows of the sum, [n, columns]."""
        parts = source.view(self.n_hosts, self.per_host, -1, source.shape[1]).transpose(0, 1)
        sums = self._sum_of_host(list(parts), call)
        came = self._scratch("came", sums.shape, sums.dtype)
        rows = [sums.shape[1]] * self.n_hosts
        self._finish(self.exchange(came.flatten(0, 1), sums.flatten(0, 1), rows, rows), call, came, sums)
        return _sum([sums[host] if host == self.host else part for host, part in enumerate(came)], None)

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, came: list[int], leaving: list[int]
    ) -> list[dist.Work]:  # fmt: skip
        """Begin an all-to-all of rows along the rail, without this host's own rows. Return the `dist.Work` objects to wait
        for.

        came, leaving: for each host, the number of rows received from its rank of this rail, and sent to it.
        """
        return exchange_both_ways(self._ways, range(self.host, self.host + 1), received, sent, came, leaving)

    def all_reduce(self, whole: torch.Tensor, call: Call) -> None:
        """Replace `whole`, which is contiguous, by its sum over all ranks. All ranks get the same bits."""
        flat = whole.view(-1)
        parts = flat.tensor_split(self.per_host)
        mine = self._sum_of_host(parts, call)
        if mine.numel():
            self._finish([reduce_now(self.rail, [mine])], call, mine)
        own = self.near.own(flat, *mine.shape, deadline_s=call.deadline_s, what=call.what)
        own.copy_(mine)
        self.near.publish(deadline_s=call.deadline_s, what=call.what)
        for index, part in enumerate(parts):
            part.copy_(self.near.of(index, flat, *part.shape))
        self.near.release()

    def _sum_of_host(self, parts: Sequence[torch.Tensor], call: Call) -> torch.Tensor:
        """Run a reduce-scatter within this host. Return the sum of parts[i] over the ranks of this host, where i is
        this rank's index on the host. The parts may differ in size.
        """
        starts = list(itertools.accumulate((part.numel() for part in parts), initial=0))
        own = self.near.own(parts[0], starts[-1], deadline_s=call.deadline_s, what=call.what)
        for index, part in enumerate(parts):
            if index != self.index:
                own[starts[index] : starts[index + 1]].view(part.shape).copy_(part)
        self.near.publish(deadline_s=call.deadline_s, what=call.what)
        mine, (start, end) = parts[self.index], starts[self.index : self.index + 2]
        theirs = (self.near.of(i, mine, starts[-1])[start:end].view(mine.shape) for i in range(self.per_host))
        wide = self._scratch("sum", mine.shape, torch.promote_types(mine.dtype, torch.float32))
        total = _sum([mine if index == self.index else part for index, part in enumerate(theirs)], wide)
        self.near.release()
        return total

    def _scratch(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor whose memory the next call with this `name` reuses. New memory in each call would
        cause page faults.
        """
        nbytes = shape.numel() * dtype.itemsize
        kept = self._kept.get(name)
        if kept is None or len(kept) < nbytes:
            kept = self._kept[name] = torch.empty(nbytes, dtype=torch.uint8)
        return kept[:nbytes].view(dtype).view(shape)

    def _finish(self, works: list[dist.Work], call: Call, *tensors: torch.Tensor) -> None:
        for work in works:
            finish(work, self.comm, call.what, call.deadline_s, tensors, self._ways, call.held, works)


def _sum(parts: Sequence[torch.Tensor], wide: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of `parts` in their dtype, computed in fp32 (fp64 for fp64).

    wide: a tensor for the sum before it is rounded; None to allocate it.
    """
    total = (
        parts[0].new_empty(parts[0].shape, dtype=torch.promote_types(parts[0].dtype, torch.float32))
        if wide is None
        else wide
    )
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
