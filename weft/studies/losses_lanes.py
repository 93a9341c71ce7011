"""The lanes of `weft.studies.losses_measure`: series of GEMMs and of all-gathers that run alone or concurrently.

A lane (`StudyLane`) is a series of equal calls. A `Side` is one rank's part of the all-gathers: it makes the calls of
all-gathers, checks the bytes that they move, and runs lanes with a timestamp after each call.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from weft import _core
from weft.bench.core.harness import Ranks
from weft.runtime.collectives import all_gather_by_torch
from weft.symm import SymmetricBuffer
from weft.words import counted

By = Literal["dma", "kernel", "library"]
TRANSPORTS: tuple[By, ...] = ("dma", "kernel", "library")
Call = Callable[[], object]

_PIECE_MULTIPLE = 512  # bytes: the best alignment of pieces for copy engines and 16-byte accesses
_SLEEP_CYCLES_PER_S = 2.0e9  # at least the clock of any current GPU
_LONGEST_SLEEP_S = 0.05


@dataclass(eq=False)
class StudyLane:
    """A lane: `count` calls of `call`, one after the other. Two lanes may run concurrently.

    by: the kind of work: "gemm", or the transport of an all-gather.
    enqueue_s: how long it took the CPU to enqueue the lane's last run on a GPU.
    """

    call: Call
    count: int
    by: Literal["gemm"] | By
    enqueue_s: float = 0.0


def shard_bytes(gathered_bytes: int, world_size: int, pieces: int) -> int:
    """Return the bytes of a rank's shard in an all-gather of `gathered_bytes`, rounded up so that its `pieces` are
    equal and aligned.
    """
    multiple = pieces * _PIECE_MULTIPLE
    return -(-gathered_bytes // (world_size * multiple)) * multiple


class Side(AbstractContextManager["Side"], ABC):
    """One rank's part of the all-gathers: it owns their memory, and runs lanes.

    nbytes: the size of the rank's shard.

    Use it as a context manager, which frees the symmetric memory. All ranks must construct this object.
    """

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        self.ranks, self.nbytes = ranks, nbytes
        world, device = ranks.world_size, ranks.device
        self._box = SymmetricBuffer((world * nbytes,), torch.uint8, group=ranks.group, device=device)
        self._gathered = torch.empty(world * nbytes, dtype=torch.uint8, device=device)
        self._shard = self._bytes_of(ranks.rank)

    def __exit__(self, *_: object) -> None:
        """Free the symmetric memory."""
        self._box.close()

    def gather(self, by: By, pieces: int) -> Call:
        """Return a call that gathers the shards of all ranks. Each shard is sent in `pieces` equal pieces, one after
        the other.

        by: the transport, such as "dma", "kernel" or "library".
        """
        size, rank, world = self.nbytes // pieces, self.ranks.rank, self.ranks.world_size
        moves: list[Call] = []
        for i, source in enumerate(self._shard.split(size)):
            if by == "library":
                whole = self._gathered[i * world * size :][: world * size]
                moves.append(partial(all_gather_by_torch, whole, source, group=self.ranks.group))
                continue
            for peer in (p % world for p in range(rank + 1, rank + world)):
                moves.append(self._put(by, self._box.peer(peer)[rank * self.nbytes + i * size :][:size], source))
        return in_a_row(moves)

    def check(self, by: By, pieces: int) -> None:
        """Run an all-gather once, and raise `RuntimeError` if a byte is wrong. All ranks must make this call."""
        world = self.ranks.world_size
        found = self._gathered if by == "library" else self._box.local
        found.zero_()
        self.ranks.meet()
        self.play([StudyLane(self.gather(by, pieces), 1, by)])
        self.ranks.meet()
        if by == "library":  # NCCL or gloo stores piece by piece, each of all ranks
            found = found.view(pieces, world, self.nbytes // pieces).transpose(0, 1).reshape(-1)
        for rank, shard in enumerate(found.split(self.nbytes)):
            own = by != "library" and rank == self.ranks.rank  # a rank's own shard is not copied
            if not own and not torch.equal(shard, self._bytes_of(rank)):
                raise RuntimeError(
                    f"all-gather by {by} in {counted(pieces, 'piece')}: rank {self.ranks.rank} received wrong bytes "
                    f"of rank {rank}'s shard of {self.nbytes} bytes; nothing was timed"
                )
        self.ranks.meet()  # otherwise the next check would clear memory that a peer still reads

    def _bytes_of(self, rank: int) -> torch.Tensor:
        """Return the contents of `rank`'s shard: 32-bit words, each unique over all ranks."""
        words = torch.arange(self.nbytes // 4, dtype=torch.int32, device=self.ranks.device)
        return words.mul_(self.ranks.world_size).add_(rank).view(torch.uint8)

    def start(self, lanes: Sequence[StudyLane]) -> list[list[float]]:
        """Run `play` on all ranks, starting together, and return its result. All ranks must make this call."""
        self.ranks.start_together()
        return self.play(lanes)

    @abstractmethod
    def _put(self, by: By, place: torch.Tensor, source: torch.Tensor) -> Call:
        """Return a call that copies `source` to `place` in a peer's memory. by: "dma" or "kernel"."""

    @abstractmethod
    def play(self, lanes: Sequence[StudyLane]) -> list[list[float]]:
        """Run the lanes concurrently. Return, for each lane, the timestamps in seconds of its start and of the end of
        each call.

        All lanes use the same clock.
        """


class CpuSide(Side):
    """The `Side` of a CPU process.

    A copy by "dma" runs in an additional thread. A copy by "kernel" runs in the threads of the GEMM, alternately with
    it, so that both progress equally.
    """

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        super().__init__(ranks, nbytes)
        self._thread = ThreadPoolExecutor(1)

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        super().__exit__()

    def _put(self, by: By, place: torch.Tensor, source: torch.Tensor) -> Call:
        if by == "kernel":
            return partial(place.copy_, source)
        size = source.numel()
        return partial(_core.copy_2d, place.data_ptr(), size, source.data_ptr(), size, size, 1)

    def play(self, lanes: Sequence[StudyLane]) -> list[list[float]]:
        marks: list[list[float]] = [[] for _ in lanes]
        start = threading.Barrier(2)

        def run(mine: list[int]) -> None:
            turns = [mine[j] for j in in_turns([lanes[i].count for i in mine])]
            start.wait()
            for i in mine:
                marks[i].append(time.perf_counter())
            for i in turns:
                lanes[i].call()
                marks[i].append(time.perf_counter())

        beside = [i for i, lane in enumerate(lanes) if lane.by in ("dma", "library")]
        running = self._thread.submit(run, beside)
        run([i for i in range(len(lanes)) if i not in beside])
        running.result()
        return marks


class CudaSide(Side):
    """The `Side` of a GPU. GEMMs run on the current stream, copies on another stream of high priority. Copies by "dma"
    use a copy engine, and copies by "kernel" use `weft.kernels.move`.
    """

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        super().__init__(ranks, nbytes)
        self._stream = torch.cuda.Stream(ranks.device, priority=-1)

    def _put(self, by: By, place: torch.Tensor, source: torch.Tensor) -> Call:
        if by == "dma":
            return partial(place.copy_, source, non_blocking=True)
        from weft.runtime.cuda.move import CopyLaunch, CopyShape

        size = source.numel()
        move = CopyLaunch(place.device, shape=CopyShape(1, size, size, size))
        return partial(move.launch, source.data_ptr(), place.data_ptr())

    def play(self, lanes: Sequence[StudyLane]) -> list[list[float]]:
        """Enqueue the lanes behind a sleep kernel, so that they start together and never wait for the CPU.

        The sleep lasts as long as enqueueing the same lanes took last time, up to 50 ms.
        """
        main = torch.cuda.current_stream(self.ranks.device)
        streams = [main if lane.by == "gemm" else self._stream for lane in lanes]
        event = partial(torch.cuda.Event, enable_timing=True)
        marks = [[event() for _ in range(lane.count + 1)] for lane in lanes]
        before, ends = event(), [iter(events[1:]) for events in marks]
        turns = in_turns([lane.count for lane in lanes])
        sleep_s = min(1.3 * sum(lane.enqueue_s for lane in lanes), _LONGEST_SLEEP_S)
        torch.cuda._sleep(int(sleep_s * _SLEEP_CYCLES_PER_S))
        before.record(main)
        self._stream.wait_event(before)
        for lane, events, stream in zip(lanes, marks, streams, strict=True):
            lane.enqueue_s = 0.0
            events[0].record(stream)
        for i in turns:
            began = time.perf_counter()
            with torch.cuda.stream(streams[i]):
                lanes[i].call()
            next(ends[i]).record(streams[i])
            lanes[i].enqueue_s += time.perf_counter() - began
        self.ranks.synchronize()
        return [[before.elapsed_time(event) / 1e3 for event in events] for events in marks]


def in_turns(counts: Sequence[int]) -> list[int]:
    """Return an order in which one thread runs the calls of several lanes, so that all progress equally.

    counts: the number of calls of each lane. The result is a list with the lane's index for each call.
    """
    return [i for _, i in sorted((done / count, i) for i, count in enumerate(counts) for done in range(count))]


def in_a_row(moves: list[Call]) -> Call:
    """Return a call that makes the calls `moves`, one after the other."""

    def call() -> None:
        for move in moves:
            move()

    return call
