"""The rendezvous of CPU ranks on several hosts, which may carry the data of a small collective.

Ranks have to compare their calls before gloo moves data, because gloo ends the process if a message is larger than
expected. A separate rendezvous before the collective would take as long as several steps of a small collective. So the data
are sent with the messages of the rendezvous:

    1   each rank publishes its payload (the description of its call, or its refusal), and data for the ranks of its
        host, in shared memory
    2   rank i of each host sends the payloads of its host, and its data, to rank i of every other host
    3   if all payloads agree, the ranks use the data

After step 1 a rank knows the payloads of its own host, and after step 2 the payloads of all ranks. If the payloads of a
host do not agree, its ranks send no data in step 2. Receive buffers have space for the largest message of any call. So
a message of a different call does no harm; its data are dropped.

A **rail** consists of the ranks with the same index on their hosts, one on each host (`weft.runtime.rail`). Each byte
of a collective is sent to every other host only once. Sums are computed in fp32 (fp64 for fp64), first within each host,
then across hosts. Both sums are rounded to the dtype of the matrix.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from weft.errors import OutOfSharedMemoryError, WeftError
from weft.runtime.rail import rail_on, ranks_per_host
from weft.runtime.within_host import NO_WORK, WithinHost
from weft.schedule import ITEM_BYTES, Collective, Schedule, value
from weft.schedule.steps import of_kind, variables_of
from weft.symm import Communicator

_SMALL_BYTES = 64 << 10  # smaller matrices are sent whole, which takes less time than one more step within the hosts
MOST_BYTES = 4 << 20  # collectives of larger matrices take so long that a separate rendezvous costs them little
MOST_ROWS_BYTES = 4 << 20  # the most that a rank sends in an all-to-all. With more bytes, separate messages cost little
MOST_VECTORS_BYTES = 256 << 10  # the most that a rank of embeddings sends with a rendezvous: beyond it, gloo was faster
_ROOM_BYTES = 8 << 20  # the receive buffer for the rows from other hosts
TABLE_BYTES = 64 << 10  # the receive buffer for the numbers of rows in an all-to-all
_LENGTH = struct.Struct("<Q")
_HEAD = _LENGTH  # the offset of the data in a message
_ALIGNMENT = 64


class Cargo(Protocol):
    """The base class of small collectives whose data are sent together with the messages of a rendezvous. The methods are
    called in this order: `load`, `pack`, `go_on`, `unpack`. All tensors are uint8.
    """

    near_bytes: int
    """The largest number of bytes that a rank shares with the ranks of its host. Equal on all ranks of a host."""
    far_bytes: int
    """The largest number of bytes that a rank sends to one other host: to the rank with the same index there. Equal on
    all ranks.
    """

    def load(self, memory: torch.Tensor) -> None:
        """Write to `memory`, this rank's shared memory, the data that the other ranks of this host need."""

    def pack(self, near: list[torch.Tensor], far: dict[int, torch.Tensor]) -> dict[int, int] | None:
        """Write the messages to other hosts. Return their sizes in bytes, by host; None if each message has `far_bytes`, the
        size that this collective reserves for a message.

        near: the shared memory of each rank of this host, which `load` has written.
        far: far[h] is the memory for the message to this rail's rank on host h.
        """

    def go_on(self) -> None:
        """Do work that does not need the messages from other hosts, while these messages are in transit."""

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        """Compute the result. received: received[h] is the message from this rail's rank on host h."""


class Rails:
    """The rendezvous of CPU ranks on several hosts, on `comm`. Each rank publishes a payload of up to `payload_bytes` bytes.
    All ranks must construct this object, and make the same calls from one thread at a time.
    """

    def __init__(self, comm: Communicator, payload_bytes: int) -> None:
        self.comm, self.levels = comm, rail_on(comm)
        self.near = WithinHost(comm)
        self._slot = aligned(_LENGTH.size + payload_bytes)
        self._head_bytes = _ALIGNMENT + self.levels.per_host * self._slot
        self._others = [host for host in range(self.levels.n_hosts) if host != self.levels.host]
        self.most_bytes = self._capacity = 0
        self.rows_bytes = 0
        """The number of bytes that each rank may send in an all-to-all. Equal on all ranks."""
        self.reserve(_SMALL_BYTES)
        self.reserve_rows(_SMALL_BYTES // 2)

    def reserve(self, nbytes: int) -> None:
        """Reserve memory for collectives (`Cargo`) of matrices of up to `nbytes` bytes. All ranks must make this call."""
        if nbytes > self.most_bytes:
            room = max(nbytes // self.levels.per_host, min(nbytes, _SMALL_BYTES))
            self._reserve(nbytes, room)
            self._more = [torch.ones(len(self._others) * room, dtype=torch.uint8, device="cpu") for _ in range(2)]
            self.most_bytes = nbytes

    def reserve_rows(self, nbytes: int) -> None:
        """Reserve memory for all-to-alls (`weft.runtime.rails_all_to_all`) in which each rank sends up to `nbytes`. Do nothing if
        that is too much. All ranks must make this call after a rendezvous.
        """
        nbytes = 1 << (nbytes - 1).bit_length()
        far_ranks = self.comm.world_size - self.levels.per_host
        if self.rows_bytes < nbytes <= min(MOST_ROWS_BYTES, _ROOM_BYTES // far_ranks):
            with contextlib.suppress(OutOfSharedMemoryError):  # raised on every rank
                self._reserve(TABLE_BYTES + nbytes, TABLE_BYTES + self.levels.per_host * nbytes)
                self.rows_bytes = nbytes

    def _reserve(self, near_bytes: int, far_bytes: int) -> None:
        """Reserve memory for collectives (`Cargo`) that write up to `near_bytes` to this rank's shared memory, and send up to
        `far_bytes` to each other host.
        """
        self.near.reserve(self._slot + near_bytes + _ALIGNMENT)
        self._near_data = [memory[self._slot :] for memory in self.near.flat]
        capacity = self._head_bytes + aligned(far_bytes) + _ALIGNMENT
        if capacity > self._capacity:
            self._capacity, total = capacity, len(self._others) * capacity
            self._sent, self._received = (torch.ones(total, dtype=torch.uint8, device="cpu") for _ in range(2))
            self._sent_view, self._received_view = self._sent.numpy().data, self._received.numpy().data

    def close(self) -> None:
        """Drop the views of shared memory. `Meeting.close` calls this method when the communicator closes."""
        self.near.close()
        self._near_data = []

    def exchange(
        self, payload: bytes, agree: Callable[[list[bytes]], bool], cargo: Cargo | None, *, deadline_s: float, name: str,
        meanwhile: Iterator[None] = NO_WORK,
    ) -> tuple[list[bytes], dict[int, torch.Tensor]]:  # fmt: skip
        """Run one rendezvous. Return every rank's payload, by rank, and the data for `cargo.unpack`, by host.

        agree: a function that gets the payloads of some ranks, and returns True if these ranks make the same call.
        meanwhile: work that needs no other rank, as an iterator that does a short step for each item. All steps are done on
            return.
        """
        try:
            return self._exchange(payload, agree, cargo, deadline_s, name, meanwhile)
        except WeftError:  # every rank raises this error, or the group has already failed
            raise
        except BaseException as error:  # for example Ctrl-C: peers wait for this rank
            self.comm.poison(f"{name}: {error!r}")
            raise

    def _exchange(
        self, payload: bytes, agree: Callable[[list[bytes]], bool], cargo: Cargo | None, deadline_s: float, name: str,
        meanwhile: Iterator[None],
    ) -> tuple[list[bytes], dict[int, torch.Tensor]]:  # fmt: skip
        comm, near, levels = self.comm, self.near, self.levels
        comm.begin_round()
        near.await_readers(deadline_s, name)
        mine = levels.index
        near.views[mine][: _LENGTH.size + len(payload)] = _joined([payload])
        if cargo is not None:
            cargo.load(self._near_data[mine])
        near.publish(deadline_s=deadline_s, what=name, meanwhile=meanwhile)
        payloads = [_split(view, 0, 1)[0] for view in near.views]
        agreed = cargo if cargo is not None and agree(payloads) else None
        starts, sizes = self._messages(payloads, agreed)
        levels.link.begin(self._sent, starts, sizes, self._received)
        if agreed is not None:
            agreed.go_on()
        near.release()
        for _ in meanwhile:
            pass
        levels.link.finish(name, deadline_s, comm.absent_in_round)
        found, arrived = list(payloads), {}
        for number, host in enumerate(self._others):
            at = number * self._capacity
            of_host = _split(self._received_view, at + _ALIGNMENT, levels.per_host)
            found[host * levels.per_host : host * levels.per_host] = of_host
            arrived[host] = self._received[at + _HEAD.unpack_from(self._received_view, at)[0] : at + self._capacity]
        return found, arrived

    def _messages(self, payloads: list[bytes], cargo: Cargo | None) -> tuple[Sequence[int], list[int]]:
        """Write the messages to this rail's ranks on other hosts: the payloads of this host's ranks, and the data of
        `cargo`. Return the offsets of the messages in `_sent`, and their sizes in bytes, in the order of hosts.

        cargo: None to send no data.
        """
        head, others = _joined(payloads), self._others
        start = _ALIGNMENT + aligned(len(head))
        room = start + (0 if cargo is None else aligned(cargo.far_bytes))
        starts, sizes = range(0, room * len(others), room), [room] * len(others)
        for at in starts:
            _HEAD.pack_into(self._sent_view, at, start)
            self._sent_view[at + _ALIGNMENT : at + _ALIGNMENT + len(head)] = head
        if cargo is not None:
            far = {host: self._sent[at + start : at + room] for at, host in zip(starts, others, strict=True)}
            used_bytes = cargo.pack(self._near_data, far)
            if used_bytes is not None:
                sizes = [start + used_bytes[host] for host in others]
        return starts, sizes

    def more(self, nbytes: int) -> list[torch.Tensor]:
        """Return memory for a second message of `nbytes` to every other host: a list of one tensor for each host, in the
        order of hosts. `begin_more` sends these messages.
        """
        return list(self._more[0][: len(self._others) * nbytes].split(nbytes))

    def begin_more(self, nbytes: int, deadline_s: float, name: str) -> Callable[[], list[torch.Tensor]]:
        """Begin to exchange a second message of `nbytes` with every other host, after `exchange`. Return a function that
        waits for the messages from other hosts and returns them, in the order of hosts.

        The caller has written the messages to `more(nbytes)`. The payloads of all ranks must have agreed in `exchange`.
        """
        link, others = self.levels.link, len(self._others)
        sent, received = (memory[: others * nbytes] for memory in self._more)
        link.begin(sent, range(0, others * nbytes, nbytes), [nbytes] * others, received)

        def end() -> list[torch.Tensor]:
            link.finish(name, deadline_s, self.comm.absent_in_round)
            return list(received.split(nbytes))

        return end


class _Still:
    """The base class of collectives (`Cargo`) that do nothing while their messages are in transit."""

    def go_on(self) -> None: ...


class _Gather(_Still):
    """An all-gather. First, ranks with the same index on different hosts exchange their rows. Then the ranks of a host read
    each other's results from shared memory.
    """

    near_bytes = 0

    def __init__(self, rails: Rails, src: torch.Tensor, whole: torch.Tensor, deadline_s: float, name: str) -> None:
        self._rails, self._src, self._whole, self.far_bytes = rails, src, whole, src.nbytes
        self._deadline_s, self._name = deadline_s, name

    def load(self, memory: torch.Tensor) -> None: ...

    def pack(self, near: list[torch.Tensor], far: dict[int, torch.Tensor]) -> None:
        for memory in far.values():
            like(self._src, memory, self._src.shape).copy_(self._src)

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        near, levels, src = self._rails.near, self._rails.levels, self._src
        shape = levels.n_hosts, *src.shape
        mine = near.own(src, *shape, deadline_s=self._deadline_s, what=self._name)
        for host, part in enumerate(mine):
            part.copy_(src if host == levels.host else like(src, received[host], src.shape))
        near.publish(deadline_s=self._deadline_s, what=self._name)
        parts = self._whole.view(levels.n_hosts, levels.per_host, *src.shape)
        for index in range(levels.per_host):
            parts[:, index].copy_(near.of(index, src, *shape))
        near.release()


class _GatherSmall(_Still):
    """An all-gather of few bytes. A message has the rows of a whole host, so ranks of a host need not share results."""

    def __init__(self, rails: Rails, src: torch.Tensor, whole: torch.Tensor) -> None:
        self._rails, self._src, self.near_bytes = rails, src, src.nbytes
        self._parts = whole.view(rails.levels.n_hosts, rails.levels.per_host, *src.shape)
        self.far_bytes = rails.levels.per_host * src.nbytes

    def load(self, memory: torch.Tensor) -> None:
        like(self._src, memory, self._src.shape).copy_(self._src)

    def pack(self, near: list[torch.Tensor], far: dict[int, torch.Tensor]) -> None:
        mine = self._parts[self._rails.levels.host]
        for part, memory in zip(mine, near, strict=True):
            part.copy_(like(part, memory, part.shape))
        for memory in far.values():
            like(mine, memory, mine.shape).copy_(mine)

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        for host, data in received.items():
            self._parts[host].copy_(like(self._src, data, self._parts[host].shape))


class _Sum(_Still):
    """The base class of reductions, which sum a matrix over all ranks. Each rail (the ranks with the same index on their hosts)
    computes a part of the sum.

    parts: this rank's matrix, split into one part for each rail, in the order of ranks on a host.
    """

    _mine: torch.Tensor
    """This rank's part of the matrix, summed over the ranks of this host."""

    def __init__(self, rails: Rails, parts: Sequence[torch.Tensor]) -> None:
        self.rails, self._parts = rails, parts
        self._starts = list(itertools.accumulate((part.numel() for part in parts), initial=0))
        self.near_bytes = self._starts[-1] * parts[0].itemsize

    def load(self, memory: torch.Tensor) -> None:
        for index, part in enumerate(self._parts):
            if index != self.rails.levels.index:
                self._of(memory, index).copy_(part)

    def _of(self, memory: torch.Tensor, index: int) -> torch.Tensor:
        part = self._parts[index]
        begin, end = (part.itemsize * at for at in self._starts[index : index + 2])
        return like(part, memory[begin:end], part.shape)

    def _of_near(self, near: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows that this rank sums, from the matrix of each rank of this host, in the order of ranks."""
        index = self.rails.levels.index
        return [self._parts[index] if at == index else self._of(memory, index) for at, memory in enumerate(near)]

    def _sum_of_hosts(self, received: dict[int, torch.Tensor], out: torch.Tensor) -> None:
        """Write the sum over all hosts to `out`. The attribute `_mine` is the sum over this host, and `received` has the sums
        over other hosts.
        """
        host = self.rails.levels.host
        parts = {host: self._mine, **{at: like(out, data, out.shape) for at, data in received.items()}}
        _add([parts[at] for at in sorted(parts)], out)


class ReduceScatter(_Sum):
    """A reduce-scatter over W ranks of `source` [W n, columns], which writes this rank's rows of the sum to `out` [n, columns]."""

    def __init__(self, rails: Rails, source: torch.Tensor, out: torch.Tensor) -> None:
        levels = rails.levels
        shaped = source.view(levels.n_hosts, levels.per_host, *out.shape)
        super().__init__(rails, list(shaped.transpose(0, 1)))
        self._out, self.far_bytes = out, out.nbytes

    def pack(self, near: list[torch.Tensor], far: dict[int, torch.Tensor]) -> None:
        parts, host = self._of_near(near), self.rails.levels.host
        self._mine = torch.empty_like(self._out)
        for at in range(self.rails.levels.n_hosts):
            out = self._mine if at == host else like(self._out, far[at], self._out.shape)
            _add([part[at] for part in parts], out)

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        self._sum_of_hosts(received, self._out)


class _AllReduce(_Sum):
    """An all-reduce. Each rail (the ranks with the same index on their hosts) sums one part of the matrix over all hosts.
    Then the ranks of a host read each other's parts. A part is sent in two halves: ranks sum the second half while the
    first half is in transit.
    """

    def __init__(self, rails: Rails, whole: torch.Tensor, deadline_s: float, name: str) -> None:
        self._deadline_s, self._name = deadline_s, name
        super().__init__(rails, whole.view(-1).tensor_split(rails.levels.per_host))
        part = self._parts[rails.levels.index]
        self._half = (part.numel() + 1) // 2
        self.far_bytes, self._rest_bytes = (n * part.itemsize for n in (self._half, part.numel() - self._half))

    def pack(self, near: list[torch.Tensor], far: dict[int, torch.Tensor]) -> None:
        self._of_ranks = self._of_near(near)
        self._mine = self._add_near(list(far.values()), slice(0, self._half))

    def go_on(self) -> None:
        self._rest = self._add_near(self.rails.more(self._rest_bytes), slice(self._half, None))

    def _add_near(self, far: list[torch.Tensor], of: slice) -> torch.Tensor:
        """Sum a slice (`of`) of this rank's part of the matrix over the ranks of this host. Write the sum into `far`,
        the message to each other host. Return the sum as a view of the first message.
        """
        parts = [part[of] for part in self._of_ranks]
        first, *others = [like(parts[0], memory, parts[0].shape) for memory in far]
        _add(parts, first)
        for other in others:
            other.copy_(first)
        return first

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        near, rails = self.rails.near, self.rails
        end = rails.begin_more(self._rest_bytes, self._deadline_s, self._name)
        part = self._parts[rails.levels.index]
        own = near.own(part, *part.shape, deadline_s=self._deadline_s, what=self._name)
        self._sum_of_hosts(received, own[: self._half])
        self._mine = self._rest
        self._sum_of_hosts(dict(zip(received, end(), strict=True)), own[self._half :])
        near.publish(deadline_s=self._deadline_s, what=self._name)
        for index, part in enumerate(self._parts):
            part.copy_(near.of(index, part, *part.shape))
        near.release()


class _AllReduceSmall(_Sum):
    """An all-reduce of few bytes: each rank gets every host's sum of the whole matrix, and adds these sums."""

    def __init__(self, rails: Rails, whole: torch.Tensor) -> None:
        super().__init__(rails, [whole])
        self.far_bytes = whole.nbytes

    def load(self, memory: torch.Tensor) -> None:
        self._of(memory, 0).copy_(self._parts[0])

    def pack(self, near: list[torch.Tensor], far: dict[int, torch.Tensor]) -> None:
        whole = self._parts[0]
        self._mine, *others = [like(whole, memory, whole.shape) for memory in far.values()]
        _add([self._of(memory, 0) for memory in near], self._mine)
        for other in others:
            other.copy_(self._mine)

    def unpack(self, received: dict[int, torch.Tensor]) -> None:
        self._sum_of_hosts(received, self._parts[0])


def gather(rails: Rails, src: torch.Tensor, whole: torch.Tensor, deadline_s: float, name: str) -> Cargo:
    """Return an all-gather whose data are sent with the messages of a rendezvous. It gathers src [n, columns] of W ranks
    into whole [W n, columns]. Both are contiguous.
    """
    return (
        _GatherSmall(rails, src, whole)
        if whole.nbytes <= _SMALL_BYTES
        else _Gather(rails, src, whole, deadline_s, name)
    )


def all_reduce(rails: Rails, whole: torch.Tensor, deadline_s: float, name: str) -> Cargo:
    """Return an all-reduce whose data are sent with the messages of a rendezvous. It replaces `whole`, a contiguous tensor,
    by its sum over ranks. All ranks get the same bits.
    """
    return _AllReduceSmall(rails, whole) if whole.nbytes <= _SMALL_BYTES else _AllReduce(rails, whole, deadline_s, name)


def largest_collective_bytes(schedule: Schedule) -> int:
    """Return the size, in bytes, of the largest matrix that a collective of the schedule gathers or reduces. Collectives
    with dynamic sizes are ignored.
    """
    item = {buffer.name: ITEM_BYTES[buffer.dtype] for buffer in schedule.buffers}
    steps = [step for lane in schedule.of_rank(0) for step in of_kind(lane.steps, Collective) if not variables_of(step)]
    wholes = [step.dst if step.op == "all_gather" else step.src for step in steps]
    return max((value(one.rows) * value(one.cols) * item[one.buffer] for one in wholes), default=0)


def rails_for(comm: Communicator, payload_bytes: int) -> Rails | None:
    """Return the `Rails` of `comm`; None if the ranks form no rails.

    Ranks form rails if there are several hosts, and each has the same number of consecutive ranks, at least two. All
    ranks must make this call.

    payload_bytes: the size of the largest payload.
    """
    return Rails(comm, payload_bytes) if not comm.all_mapped and ranks_per_host(comm.hosts) else None


def aligned(nbytes: int) -> int:
    """Round up a number of bytes to a multiple of the alignment of messages."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _joined(payloads: Sequence[bytes]) -> bytes:
    return b"".join([_LENGTH.pack(len(payload)) + payload for payload in payloads])


def _split(data: memoryview, at: int, count: int) -> list[bytes]:
    """Return `count` payloads in `data` from offset `at` on, where each payload is preceded by its length."""
    found = []
    for _ in range(count):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(data, at)[0]
        found.append(bytes(data[begin:at]))
    return found


def _add(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of `parts`, at least two tensors, to `out`. Compute it in fp32 (fp64 for fp64), and round it once."""
    wide = out if out.dtype in (torch.float32, torch.float64) else out.new_empty(out.shape, dtype=torch.float32)
    if wide is out:
        torch.add(parts[0], parts[1], out=out)
    else:
        wide.copy_(parts[0]).add_(parts[1])
    for part in parts[2:]:
        wide += part
    if wide is not out:
        out.copy_(wide)


def like(tensor: torch.Tensor, data: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a view of the first bytes of `data` as a tensor of shape `shape`, with the dtype of `tensor`."""
    return data[: shape.numel() * tensor.itemsize].view(tensor.dtype).view(shape)
