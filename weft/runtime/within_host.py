"""Exchanges of bytes between the ranks of a host, through shared memory, in rounds. In a round each rank writes its own memory,
publishes it, reads the memory of its peers, and then allows them to write again.

Memory order. A rank sets its counter to 2 k - 1 when it has published round k, and to 2 k when it has read its peers'
bytes. Counters are set with release order, and read with acquire order. A rank reads in round k when every counter is at
least 2 k - 1. A rank writes for round k + 1 when every counter is at least 2 k. So no rank overwrites bytes that a peer
still reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from weft import _core
from weft.symm import Communicator

_START = 64  # offset of the bytes: the counter has its own cache line
_BYTE = torch.empty(0, dtype=torch.uint8, device="cpu")
NO_WORK: Iterator[None] = iter(())
"""An empty iterator, for a wait in which a rank has no other work to do."""


class WithinHost:
    """The shared memory of the ranks of this host, and the counters that order its rounds. Only one thread at a time may
    use it.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.nbytes, self._epoch = comm, 0, 0
        self.ranks = [rank for rank in range(comm.world_size) if comm.mapped[rank]]
        self._mine = self.ranks.index(comm.rank)
        self.flat: list[torch.Tensor] = []
        """The shared memory of each rank of this host, as uint8 tensors."""
        self.views: list[memoryview] = []
        """The same memory as memoryviews."""
        self._counters: list[int] = []

    def reserve(self, nbytes: int) -> None:
        """Make the shared memory of each rank at least `nbytes` bytes large. All ranks must make this call between two rounds,
        with the same size.
        """
        if nbytes <= self.nbytes:
            return
        region = self.comm.allocate(_START + nbytes, what="collectives within a host")
        self.flat = [region.tensor(rank, (nbytes,), torch.uint8, _START) for rank in self.ranks]
        self.views = [memory.numpy().data for memory in self.flat]
        self._counters = [region.address(rank) for rank in self.ranks]
        self.nbytes, self._epoch = nbytes, 0

    def close(self) -> None:
        """Drop the views of the memory."""
        self.flat, self.views, self._counters = [], [], []

    def own(self, like: torch.Tensor, *shape: int, deadline_s: float, what: str) -> torch.Tensor:
        """Wait until no peer reads this rank's memory any more. Return this memory, which the caller may then write, as a
        tensor [shape] with the dtype of `like`.

        what: the collective's name, for error texts.
        """
        self.await_readers(deadline_s, what)
        return self.of(self._mine, like, *shape)

    def await_readers(self, deadline_s: float, what: str) -> None:
        """Wait until no peer reads this rank's memory any more, so that this rank may write to it."""
        self._await(deadline_s, what)

    def of(self, index: int, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return the shared memory of another rank on this host, as a tensor [shape] with the dtype of `like`. index: the
        rank's index on this host.
        """
        nbytes = torch.Size(shape).numel() * like.itemsize
        return self.flat[index][:nbytes].view(like.dtype).view(shape)

    def publish(self, *, deadline_s: float, what: str, meanwhile: Iterator[None] = NO_WORK) -> None:
        """Publish this rank's memory for its peers to read. Wait until all ranks of this host have published theirs.

        meanwhile: work to do during the wait, as an iterator that does a short step for each item. Some steps may remain on
            return.
        """
        self._advance()
        while self._is_missing() and next(meanwhile, self) is None:
            pass
        self._await(deadline_s, what)

    def release(self) -> None:
        """Notify the peers on this host that this rank has read their memory, so that they may write to it again."""
        self._advance()

    def exchange(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], *, deadline_s: float, what: str
    ) -> None:  # fmt: skip
        """Run an all-to-all within this host: send sent[i] to the i-th rank of the host, and receive its tensor for this
        rank into received[i].

        Tensors are contiguous. Tensors larger than the reserved memory are copied in several rounds.
        """
        self.begin_exchange(sent, deadline_s=deadline_s, what=what)(received)

    def begin_exchange(
        self, sent: Sequence[torch.Tensor], *, deadline_s: float, what: str
    ) -> Callable[[Sequence[torch.Tensor]], None]:
        """Publish the first round of `exchange`, without a wait for peers. Return a function that takes `received` and
        completes the exchange.
        """
        mine, count = self._mine, len(self.ranks)
        outgoing = [_bytes_of(part)[: 0 if index == mine else None] for index, part in enumerate(sent)]
        bounds = [0, *itertools.accumulate(len(part) for part in outgoing)]
        head = 8 * len(bounds)
        room = self.nbytes - head

        def write(first: int) -> None:
            own = self.own(_BYTE, self.nbytes, deadline_s=deadline_s, what=what)
            own[:head].view(torch.int64).copy_(torch.tensor(bounds, device="cpu"))
            for part, start in zip(outgoing, bounds, strict=False):
                _copy_overlap(own[head:], first, part, start)
            self._advance()

        def end(received: Sequence[torch.Tensor]) -> None:
            received[mine].copy_(sent[mine])
            first, rounds, theirs = 0, 1, [bounds] * count
            while first < rounds * room:
                if first:
                    write(first)
                self._await(deadline_s, what)
                all_bytes = [self.of(index, _BYTE, self.nbytes) for index in range(count)]
                if not first:
                    theirs = [of_rank[:head].view(torch.int64).tolist() for of_rank in all_bytes]
                    rounds = max(1, *(-(-of_rank[-1] // room) for of_rank in theirs))
                for index, (of_rank, whole) in enumerate(zip(all_bytes, received, strict=True)):
                    if index != mine:
                        start, stop = theirs[index][mine : mine + 2]
                        assert stop - start == whole.nbytes, (stop - start, whole.nbytes)
                        _copy_overlap(_bytes_of(whole), start, of_rank[head:], first)
                self.release()
                first += room

        write(0)
        return end

    def _advance(self) -> None:
        self._epoch += 1
        _core.signal_set(self._counters[self._mine], self._epoch)

    def _is_missing(self) -> bool:
        """True if another rank of this host has not begun the round (exchange) of this rank, by its counter."""
        return any(_core.signal_read(counter) < self._epoch for counter in self._counters)

    def _await(self, deadline_s: float, what: str) -> None:
        for rank, counter in zip(self.ranks, self._counters, strict=True):
            if _core.signal_read(counter) < self._epoch:
                self.comm.wait(counter, self._epoch, name=what, peer=rank, deadline_s=deadline_s)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _copy_overlap(dst: torch.Tensor, dst_at: int, src: torch.Tensor, src_at: int) -> None:
    """Copy from `src` to `dst` the bytes that both contain. Both are parts of one long sequence of bytes. `src` begins at
    offset `src_at` of the sequence, and `dst` at offset `dst_at`.
    """
    start, end = max(dst_at, src_at), min(dst_at + len(dst), src_at + len(src))
    if start < end:
        dst[start - dst_at : end - dst_at].copy_(src[start - src_at : end - src_at])
