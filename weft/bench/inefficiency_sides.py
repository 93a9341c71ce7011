"""Two things at once on one rank, computing and moving, with the times at which each came forward.

A `Lane` is a call made over and over. `Side.play` runs one lane or two side by side and says when each of their calls ended,
on one clock. `Side.gather` makes the call that moves: an all-gather of one shard a rank into every other rank's memory,

    dma      by copy engines, piece after piece to each peer
    kernel   the same copies by what also computes
    library  by the library's all-gather, piece after piece, with the copy of the own shard that it makes

What a device calls these is in `CpuSide` and `CudaSide`. Ranks are not synchronised during a gather by copies, and nobody
reads what it moves: lanes measure resources, not a protocol. `Side.check` is where the bytes are looked at.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from weft import _core
from weft.bench.harness import Ranks
from weft.runtime.collectives import all_gather_single
from weft.symm import SymmetricBuffer
from weft.words import counted

By = Literal["dma", "kernel", "library"]
TRANSPORTS: tuple[By, ...] = ("dma", "kernel", "library")
Call = Callable[[], object]

_PIECE_MULTIPLE = 512  # bytes: pieces begin where copy engines and 16-byte accesses are at their best
_SLEEP_CYCLES_PER_S = 2.0e9  # at least the clock of any present GPU
_LONGEST_SLEEP_S = 0.05


@dataclass(eq=False)
class Lane:
    """`call`, `count` times in a row. `by`: what it keeps busy. `enqueue_s`: host time of the last play, where a call
    returns before it is done."""

    call: Call
    count: int
    by: Literal["gemm"] | By
    enqueue_s: float = 0.0


def shard_bytes(gathered_bytes: int, world_size: int, pieces: int) -> int:
    """Bytes of a rank's shard, rounded up so that its pieces are alike and well aligned."""
    multiple = pieces * _PIECE_MULTIPLE
    return -(-gathered_bytes // (world_size * multiple)) * multiple


class Side(ABC):
    """Making one is collective. Every rank has a shard of `nbytes`, symmetric memory for all of them, and ordinary memory
    for all of them, where the library leaves what it gathers. A context manager."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        self.ranks, self.nbytes = ranks, nbytes
        world, device = ranks.world_size, ranks.device
        self._box = SymmetricBuffer((world * nbytes,), torch.uint8, group=ranks.group, device=device)
        self._gathered = torch.empty(world * nbytes, dtype=torch.uint8, device=device)
        self._shard = self._bytes_of(ranks.rank)

    def close(self) -> None:
        """Give the memory between ranks up."""
        self._box.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def gather(self, by: By, pieces: int) -> Call:
        """All-gather of the shards in so many pieces, all of the same size."""
        size, rank, world = self.nbytes // pieces, self.ranks.rank, self.ranks.world_size
        moves: list[Call] = []
        for i, source in enumerate(self._shard.split(size)):
            if by == "library":
                moves.append(self._library(self._gathered[i * world * size :][: world * size], source))
            else:
                for peer in (p % world for p in range(rank + 1, rank + world)):
                    place = self._box.peer(peer)[rank * self.nbytes + i * size :][:size]
                    moves.append(self._put(by, place, source))
        return _in_a_row(moves)

    def check(self, by: By, pieces: int) -> None:
        """Gather once and compare every byte; RuntimeError if one is wrong. Collective."""
        world = self.ranks.world_size
        found = self._gathered if by == "library" else self._box.local
        found.zero_()
        self._meet()
        self.play([Lane(self.gather(by, pieces), 1, by)])
        self._meet()
        if by == "library":  # which leaves one piece of all ranks after the other
            found = found.view(pieces, world, self.nbytes // pieces).transpose(0, 1).reshape(-1)
        for rank, shard in enumerate(found.split(self.nbytes)):
            own = by != "library" and rank == self.ranks.rank  # which nobody copies
            if not own and not torch.equal(shard, self._bytes_of(rank)):
                raise RuntimeError(
                    f"all-gather by {by} in {counted(pieces, 'piece')}: rank {self.ranks.rank} got wrong bytes for rank "
                    f"{rank}'s shard of {self.nbytes} bytes; nothing was timed"
                )
        self._meet()  # before the next check clears what a peer has not read yet

    def _bytes_of(self, rank: int) -> torch.Tensor:
        """What `rank` gathers: 32-bit words that no other place of any rank has."""
        words = torch.arange(self.nbytes // 4, dtype=torch.int32, device=self.ranks.device)
        return words.mul_(self.ranks.world_size).add_(rank).view(torch.uint8)

    def _meet(self) -> None:
        self.ranks.synchronize()
        dist.barrier(self.ranks.control)

    def _library(self, gathered: torch.Tensor, piece: torch.Tensor) -> Call:
        return lambda: all_gather_single(gathered, piece, group=self.ranks.group)

    @abstractmethod
    def _put(self, by: By, place: torch.Tensor, source: torch.Tensor) -> Call:
        """One copy into a peer's memory, by `dma` or `kernel`."""

    @abstractmethod
    def play(self, lanes: Sequence[Lane]) -> list[list[float]]:
        """Start the lanes together. For each, in seconds of one clock: when it began, and when each of its calls ended."""


class CpuSide(Side):
    """A process. There is no copy engine: its part is played by a thread of its own beside those that compute, which the
    system puts on an idle core if there is one. A copy by `kernel` takes the computing threads themselves: in turns with
    the GEMM, so that each has come as far as the other, relative to what it has to do."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        super().__init__(ranks, nbytes)
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._thread.shutdown()
        super().close()

    def _put(self, by: By, place: torch.Tensor, source: torch.Tensor) -> Call:
        if by == "kernel":
            return lambda: place.copy_(source)
        to, at, size = place.data_ptr(), source.data_ptr(), source.numel()
        return lambda: _core.copy_2d(to, size, at, size, size, 1)

    def play(self, lanes: Sequence[Lane]) -> list[list[float]]:
        marks: list[list[float]] = [[] for _ in lanes]
        beside = [i for i, lane in enumerate(lanes) if lane.by in ("dma", "library")]
        here = [i for i in range(len(lanes)) if i not in beside]
        start = threading.Barrier(2)
        running = self._thread.submit(_run, lanes, beside, marks, start)
        _run(lanes, here, marks, start)
        running.result()
        return marks


def _run(lanes: Sequence[Lane], mine: Sequence[int], marks: list[list[float]], start: threading.Barrier) -> None:
    start.wait()
    for i in mine:
        marks[i].append(time.perf_counter())
    for j in in_turns([lanes[i].count for i in mine]):
        lanes[mine[j]].call()
        marks[mine[j]].append(time.perf_counter())


class CudaSide(Side):
    """A GPU. GEMMs go on the current stream, what moves on another one of high priority. Copies by `dma` are those of the
    CUDA runtime, which it gives to a copy engine; by `kernel` those of `weft.kernels.move`."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        super().__init__(ranks, nbytes)
        self._stream = torch.cuda.Stream(ranks.device, priority=-1)

    def _put(self, by: By, place: torch.Tensor, source: torch.Tensor) -> Call:
        if by == "dma":
            return lambda: place.copy_(source, non_blocking=True)
        from weft.runtime.cuda.move import Move, Shape

        size, at, to = source.numel(), source.data_ptr(), place.data_ptr()
        move = Move(place.device, shape=Shape(1, size, size, size))
        return lambda: move.launch(at, to)

    def play(self, lanes: Sequence[Lane]) -> list[list[float]]:
        """Behind a sleep of the device as long as enqueueing the lanes took the last time, up to 50 ms."""
        main = torch.cuda.current_stream(self.ranks.device)
        streams = [main if lane.by == "gemm" else self._stream for lane in lanes]
        marks = [[_event() for _ in range(lane.count + 1)] for lane in lanes]
        before, done = _event(), [0] * len(lanes)
        sleep_s = min(1.3 * sum(lane.enqueue_s for lane in lanes), _LONGEST_SLEEP_S)
        torch.cuda._sleep(int(sleep_s * _SLEEP_CYCLES_PER_S))
        before.record(main)
        self._stream.wait_event(before)
        for lane, events, stream in zip(lanes, marks, streams, strict=True):
            lane.enqueue_s = 0.0
            events[0].record(stream)
        for i in in_turns([lane.count for lane in lanes]):
            began = time.perf_counter()
            with torch.cuda.stream(streams[i]):
                lanes[i].call()
            done[i] += 1
            marks[i][done[i]].record(streams[i])
            lanes[i].enqueue_s += time.perf_counter() - began
        self.ranks.synchronize()
        return [[before.elapsed_time(event) / 1e3 for event in events] for events in marks]


def make_side(ranks: Ranks, nbytes: int) -> Side:
    """Of this rank's device. Collective."""
    return CudaSide(ranks, nbytes) if ranks.device.type == "cuda" else CpuSide(ranks, nbytes)


def in_turns(counts: Sequence[int]) -> Iterator[int]:
    """Each lane's number as often as its count, whichever has come least far next."""
    done = [0] * len(counts)
    for _ in range(sum(counts)):
        i = min(range(len(counts)), key=lambda j: done[j] / counts[j])
        done[i] += 1
        yield i


def _in_a_row(moves: list[Call]) -> Call:
    def call() -> None:
        for move in moves:
            move()

    return call


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
