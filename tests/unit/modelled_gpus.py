"""GPUs of several ranks, modelled in this process: what the GPU executor issues for a schedule is played on ordinary memory, one
operation after another, in random orders that streams and events allow.

Schedules are compiled as for GPUs (`weft.runtime.cuda.compile`), but native operations are recorded in a list, and our kernels
play what they promise. A stream does its operations in order, copies row by row, writes of one signal one by one; events hold as
CUDA's do: for the last record that the host issued before. Every token is known by the run that put it, so one that comes to
another run, or is put onto one that lies there, is found at once.

Only real GPUs show what kernels and engines do by themselves, and how fast.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from weft.runtime.cuda import compile as stream_compiler
from weft.runtime.cuda import tracked_matmul
from weft.runtime.cuda.calls import Operation, _collectives
from weft.runtime.cuda.context import Context, Run, Tensors, own_buffers, rank_schedule
from weft.runtime.cuda.issue import _CALL, _LATE, _NATIVE, StreamItems
from weft.runtime.cuda.kernel_call import Base
from weft.runtime.cuda.regions import Regions
from weft.runtime.cuda.tile_kernels import Tracked
from weft.runtime.cuda.tokens import AWAITED, TOKEN, tokens_of
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import Collective, Schedule
from weft.symm.memory import lent

WORDS = 1 << 50  # where a rank's words lie, as an address: this times 1 + its rank
CPU = torch.device("cpu")


class Recorded:
    """In place of `_core.StreamProgram`."""

    def __init__(self, *_: int) -> None:
        self.operations: list[tuple] = []

    def __len__(self) -> int:
        return len(self.operations)

    def __getattr__(self, name: str) -> Any:
        def record(stream: int, *what: Any) -> int:
            self.operations.append((name, stream, *what))
            return len(self.operations) - 1

        return record


class Move:
    """In place of `weft.runtime.cuda.move.Move`."""

    def __init__(self, device: torch.device, **what: Any) -> None:
        self._what = what

    def record(self, program: Recorded, stream: int, source: Base, target: Base) -> bool:
        program.launch(stream, {**self._what, "source": source, "target": target})
        return True


class TrackedTiles:
    """In place of `weft.runtime.cuda.tracked_matmul.TrackedMatmul`, with its table."""

    def __init__(self, device: torch.device, table: np.ndarray, counters: list, *, relative: bool, **_: int) -> None:
        self.table, self.counters, self.relative = table, counters, relative

    def prepare(self, a: torch.Tensor, w: torch.Tensor) -> None:
        pass

    def steps(self, a: torch.Tensor, w: torch.Tensor, y: int, put: Callable[[int], None]) -> Iterator[bool]:
        left = [come for come, _ in self.counters]
        for row, rows, col, cols, place, pitch, *of_tile in self.table.tolist():
            tile = a[row : row + rows] @ w[:, col : col + cols]
            for i, line in enumerate(tile.contiguous()):
                ctypes.memmove(place + (y if self.relative else 0) + i * pitch, line.data_ptr(), line.nbytes)
            yield True
            for counter in of_tile:
                left[counter] -= 1
                for word in () if left[counter] else self.counters[counter][1]:
                    put(word)
                    yield True


class Together(NamedTuple):
    """In place of a call of the library that all ranks make: the n-th of a run."""

    nth: int
    step: Collective
    src: Any
    dst: Any


def _collective_call(step: Collective, regions: Regions, context: Context) -> Operation:
    nth = _collectives(context.schedule, context.rank).index(step)
    together: Any = Together(nth, step, regions.view(step.src), regions.view(step.dst))
    return Operation(together)


def collect(op: str, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """What the library does to the targets of all ranks."""
    if op == "all_gather":
        whole = torch.cat([x.view(torch.uint8) if x.itemsize == 1 else x for x in sources])
        for target in targets:
            (target.view(torch.uint8) if target.itemsize == 1 else target).copy_(whole)
        return
    total, first = torch.stack([x.double() for x in sources]).sum(0), 0
    for target in targets:
        target.copy_(total if op == "all_reduce" else total[first : first + len(target)])
        first += len(target)


class Words:
    """Their addresses are no memory's: what lies in them is `Played.words`."""

    def address(self, rank: int) -> int:
        return WORDS * (1 + rank)


class Region:
    """Symmetric memory of all ranks, at first full of NaN; `address` as one of `weft.symm`."""

    def __init__(self, world: int, nbytes: int, fill: int = 0xFF) -> None:
        self.blocks = [torch.full((max(nbytes, 1),), fill, dtype=torch.uint8) for _ in range(world)]

    def address(self, rank: int) -> int:
        return self.blocks[rank].data_ptr()

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.blocks[rank][offset : offset + nbytes].view(dtype).view(shape)


def context_of(schedule: Schedule, rank: int, region: Region) -> Context:
    """Without streams and a group."""
    mine, streams = rank_schedule(schedule, rank), [SimpleNamespace(cuda_stream=0)] * len(schedule.lanes)
    own = own_buffers(mine, region, CPU)  # type: ignore[arg-type]
    for name, buffer in own.items():
        if mine.buffers[name].role == "scratch":
            poison(buffer)
    instead: dict[str, Any] = {
        "domain": SimpleNamespace(world_size=schedule.world_size, group=None),
        "region": region, "words": Words(), "side": streams[1:], "monitor": streams[0], "run": Run(),
    }  # fmt: skip
    return Context(**vars(mine), device=CPU, own=own, begun_word=torch.zeros(1), **instead)


def poison(t: torch.Tensor) -> torch.Tensor:
    """All bytes 0xFF: NaN, and -1."""
    if t.numel():
        ctypes.memset(t.data_ptr(), 0xFF, t.nbytes)
    return t


def compiled(schedule: Schedule, rank: int, region: Region) -> tuple[Context, StreamItems]:
    context = context_of(schedule, rank, region)
    return context, stream_compiler.compile_streams(context, False)


def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on compile for modelled GPUs."""
    monkeypatch.setattr(stream_compiler, "_core", SimpleNamespace(StreamProgram=Recorded))
    monkeypatch.setattr(stream_compiler, "Move", Move)
    monkeypatch.setattr(stream_compiler, "collective_call", _collective_call)
    monkeypatch.setattr(tracked_matmul, "TrackedMatmul", TrackedTiles)


class Issued(NamedTuple):
    """An operation in a stream of a rank. bases, tensors: of its run."""

    rank: int
    run: int
    name: str
    what: list
    bases: list[int]
    tensors: Tensors


class Played:
    """All ranks' streams, with what the host issues in so many runs. tensors_of: what a rank gives in a run, from 1.

    results: by rank and run. words: by rank and number, the run in which a word's token was put, or None."""

    def __init__(self, schedule: Schedule, runs: int, tensors_of: Callable[[int, int], Tensors]) -> None:
        tokens, world = tokens_of(schedule), schedule.world_size
        self.words: list[dict[int, int | None]] = [
            {t.word: 0 if t.previous else None for t in mine.values()} for mine in tokens
        ]
        self.results: dict[tuple[int, int], Tensors] = {}
        self.previous = [{t.word: t.previous for t in mine.values()} for mine in tokens]
        self.streams: dict[tuple[int, int], deque[Issued]] = {}
        self._reached: set[tuple] = set()
        self._met: dict[tuple[int, int], dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._region = Region(world, rank_schedule(schedule, 0).layout.buffer_bytes)
        self._contexts = []
        for rank in range(world):
            context, items = compiled(schedule, rank, self._region)
            self._contexts.append(context)
            self._first_words = len(items.bases) - 1 - world
            last: dict[int, tuple] = {}
            for run in range(1, runs + 1):
                given = tensors_of(rank, run)
                tensors = {name: poison(t.clone()) for name, t in given.items()}
                bases = list(items.bases)
                bases[: len(items.names)] = [tensors[name].data_ptr() for name in items.names]
                begin, end = ("given", 0, given), ("taken", 0, [b.name for b in context.given if b.role == "output"])
                for number, (name, stream, *what) in enumerate([begin, *_flat(items), end]):
                    if name == "record":
                        last[what[0]] = (rank, run, number)
                    if name in ("record", "wait_event"):
                        what = [last[what[0]]]
                    issued = Issued(rank, run, name, what, bases, tensors)
                    self.streams.setdefault((rank, stream), deque()).append(issued)

    # --- tokens ---

    def _put_at(self, run: int, address: int) -> None:
        owner, offset = divmod(address, WORDS)
        self._put(owner - 1, offset // 8, run)

    def _put(self, rank: int, word: int, run: int) -> None:
        if word in self.words[rank]:
            assert self.words[rank][word] is None, f"run {run} puts a token where one lies, word {word} of rank {rank}"
            self.words[rank][word] = run

    def _take(self, rank: int, word: int) -> None:
        if word in self.words[rank]:
            self.words[rank][word] = None

    def _has_come(self, rank: int, word: int, run: int) -> bool:
        found = self.words[rank][word]
        if found is not None:
            assert found == run - self.previous[rank][word], f"run {run} finds the token of run {found}, rank {rank}"
        return found is not None

    # --- operations, each in small steps: False while it cannot go on ---

    def _steps(self, one: Issued) -> Iterator[bool]:
        if one.name == "record":
            self._reached.add(one.what[0])
        elif one.name == "wait_event":
            while one.what[0] not in self._reached:
                yield False
        else:
            yield from getattr(self, f"_{one.name}")(one, *one.what)
        yield True

    def _signal(self, one: Issued, parts: list[tuple[bool, int, int, int]]) -> Iterator[bool]:
        for waits, base, offset, number in parts:
            at, word = base - self._first_words, offset // 8
            if waits:
                assert (at, number) == (one.rank, AWAITED)
                while not self._has_come(one.rank, word, one.run):
                    yield False
            elif number == TOKEN and at != one.rank and at < len(self.words):  # else for the watchdog
                self._put(at, word, one.run)
            elif number == 0:
                self._take(one.rank, word)
            yield True

    def _copy(
        self, one: Issued, dst: int, to: int, to_pitch: int, src: int, at: int, pitch: int, width: int, rows: int
    ) -> Iterator[bool]:
        for row in range(rows):
            ctypes.memmove(one.bases[dst] + to + row * to_pitch, one.bases[src] + at + row * pitch, width)
            if row % 4 == 0:
                yield True

    def _launch(self, one: Issued, what: dict[str, Any]) -> Iterator[bool]:
        for word in what["opens"]:
            self._put_at(one.run, word)
            yield True
        read = self._read(one, what) if what["early"] else None
        yield from self._wait(one, what["waits"])
        read = self._read(one, what) if read is None else read
        yield True
        (base, offset), shape = what["target"], what["shape"]
        for begin in (one.bases[base] + offset, *what["targets"]):
            for row, line in enumerate(read):
                target = begin + row * shape.target_pitch
                if what["adds"]:
                    line = line.view(TORCH_DTYPE[what["adds"]])
                    lent(target, [len(line)], line.dtype, CPU, ()).add_(line)
                else:
                    ctypes.memmove(target, line.data_ptr(), shape.width)
                if row % 4 == 0:
                    yield True
        yield from self._take_all(one, what["waits"])
        for word in what["sets"]:
            self._put_at(one.run, word)
            yield True
        yield from self._wait(one, what["answers"])
        yield from self._take_all(one, what["answers"])

    def _read(self, one: Issued, what: dict[str, Any]) -> torch.Tensor:
        (base, offset), shape = what["source"], what["shape"]
        read = torch.empty(shape.rows, shape.width, dtype=torch.uint8)
        for row, line in enumerate(read):
            ctypes.memmove(line.data_ptr(), one.bases[base] + offset + row * shape.source_pitch, shape.width)
        return read

    def _wait(self, one: Issued, addresses: list[int]) -> Iterator[bool]:
        for address in addresses:
            while not self._has_come(one.rank, address % WORDS // 8, one.run):
                yield False

    def _take_all(self, one: Issued, addresses: list[int]) -> Iterator[bool]:
        for address in addresses:
            self._take(one.rank, address % WORDS // 8)
            yield True

    def _call(self, one: Issued, call: Any) -> Iterator[bool]:
        if not isinstance(call, Together):
            call(one.tensors)
            return
        met = self._met.setdefault((one.run, call.nth), {})
        met[one.rank] = call.src(one.tensors), call.dst(one.tensors)
        if len(met) == len(self.words):
            collect(call.step.op, *([met[rank][side] for rank in sorted(met)] for side in (0, 1)))
        while len(met) < len(self.words):
            yield False

    def _given(self, one: Issued, given: Tensors) -> Iterator[bool]:
        """What a run needs is written by the caller's stream, right before it."""
        for name, t in given.items():
            one.tensors[name].copy_(t)
            yield True

    def _taken(self, one: Issued, outputs: list[str]) -> Iterator[bool]:
        """Behind a run the caller's stream reads results, and then uses all memory for something else."""
        self.results[one.rank, one.run] = {name: one.tensors[name].clone() for name in outputs}
        yield True
        for t in one.tensors.values():
            poison(t)

    def _tracked(self, one: Issued, call: Tracked) -> Iterator[bool]:
        y = 0 if call._base is None else one.bases[call._base]
        tiles: Any = call._matmul
        yield from tiles.steps(call._a_view(one.tensors), call._w_view(one.tensors), y, partial(self._put_at, one.run))

    def play(self, seed: int) -> None:
        """To the end. `AssertionError` if all streams stand still."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # GEMMs are tiny: threads would wait for each other
        try:
            self._play(random.Random(seed))
        finally:
            torch.set_num_threads(threads)

    def _play(self, chance: random.Random) -> None:
        running: dict[tuple[int, int], Iterator[bool]] = {}
        speed = {key: chance.choice([1, 1, 10]) for key in self.streams}
        while any(self.streams.values()) or running:
            keys = sorted(key for key in self.streams if self.streams[key] or key in running)
            chance.shuffle(keys)
            moved = False
            for key in sorted(keys, key=lambda k: chance.random() / speed[k]):
                if key not in running:
                    running[key] = self._steps(self.streams[key].popleft())
                went = next(running[key], None)
                if went is None:
                    del running[key]
                moved = moved or went is not False
                if went is not False and chance.random() < 0.7:
                    break
            assert moved, "all streams stand still"


def _flat(items: StreamItems) -> Iterator[tuple]:
    """(name, stream, ...) of what the host issues in a run."""
    program: Any = items.program
    for kind, what, where in items.items:
        if kind == _NATIVE:
            yield from program.operations[what:where]
        elif kind == _CALL:
            yield "call", where, what
        else:
            assert kind == _LATE
            assert isinstance(what, Tracked), "sizes that only a run knows are not modelled"
            yield "tracked", where, what
