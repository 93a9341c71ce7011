"""GPUs of several ranks, modelled in this process: what the GPU executor issues for a schedule is played on ordinary memory, one
operation after another, in random orders that hosts, streams and events allow.

Schedules are compiled as for GPUs (`weft.runtime.cuda.compile`), and issued by the executor's own code. Native operations, calls of
the library and our kernels stand in queues then, and kernels play what they promise. A host is a thread, which runs as far as it is
let, and stands still where it waits for the device. A stream does its operations in order, copies row by row, writes of one signal
one by one; events hold as CUDA's do: for the last record that the host issued before. Every token is known by the run that put it,
so one that comes to another run, or is put onto one that lies there, is found at once.

Only real GPUs show what kernels and engines do by themselves, and how fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from weft.runtime.cuda import compile as stream_compiler
from weft.runtime.cuda import issue, sizes, tracked_matmul
from weft.runtime.cuda.calls import Operation, _collectives, collective_call, compute_call, reduce_call
from weft.runtime.cuda.context import Context, Run, Tensors, own_buffers, rank_schedule
from weft.runtime.cuda.kernel_call import Base
from weft.runtime.cuda.regions import Regions
from weft.runtime.cuda.tokens import AWAITED, TOKEN, tokens_of
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import Collective, Compute, Schedule, Tiles
from weft.schedule.expr import Held
from weft.schedule.kernels import TileKernel
from weft.schedule.steps import put_in
from weft.symm.memory import lent

WORDS = 1 << 50  # where a rank's words lie, as an address: this times 1 + its rank
CPU = torch.device("cpu")


# --- hosts ---


class Issued(NamedTuple):
    """An operation in a stream of a rank. bases: addresses, as they were when it was issued."""

    rank: int
    run: int
    name: str
    what: tuple
    bases: list[int]


class Host(threading.Thread):
    """Of one rank. It runs when it is let, until it has issued so much, or has to wait."""

    def __init__(self, rank: int, body: Callable[[Host], None], issued: Callable[[int, Issued], None]) -> None:
        super().__init__(daemon=True)
        self.rank, self.number, self.stream = rank, 0, 0
        self._body, self._issued = body, issued
        self._let, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._budget, self._moved, self._stopped = 0, False, False
        self._error: BaseException | None = None
        self.ended = False
        self._records: dict[int, tuple] = {}
        self._count = 0
        self.start()

    def run(self) -> None:
        _here.host = self
        self._let.acquire()
        try:
            self._body(self)
        except BaseException as error:
            self._error = None if self._stopped else error
        self.ended = self._moved = True
        self._back.release()

    def resume(self, budget: int) -> bool:
        """Whether it got on."""
        self._budget, self._moved = budget, False
        self._let.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return self._moved

    def stop(self) -> None:
        self._stopped = True
        if not self.ended:
            self.resume(0)

    def pause(self) -> None:
        self._back.release()
        self._let.acquire()
        if self._stopped:
            raise SystemExit

    def issue(self, stream: int, name: str, *what: Any, bases: list[int] | None = None) -> None:
        self._count += 1
        if name == "record":
            self._records[what[0]] = (self.rank, self._count)
        if name in ("record", "wait_event"):
            what = (self._records[what[0]],)
        self._issued(stream, Issued(self.rank, self.number, name, what, list(bases or ())))
        self._moved, self._budget = True, self._budget - 1
        if self._budget <= 0:
            self.pause()


_here = threading.local()


def host() -> Host:
    found: Host = _here.host
    return found


class Event:
    """In place of torch's."""

    def record(self) -> None:
        self.reached = False
        host().issue(host().stream, "call", self._reach)

    def _reach(self) -> None:
        self.reached = True

    def synchronize(self) -> None:
        while not self.reached:
            host().pause()


class Pinned:
    """Memory of the host that the device writes."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def copy_(self, held: torch.Tensor, non_blocking: bool) -> None:
        def copy() -> None:
            self.values = held.flatten().tolist()

        host().issue(host().stream, "call", copy)

    def flatten(self) -> Pinned:
        return self

    def tolist(self) -> list[int]:
        return self.values


class Stream(NamedTuple):
    cuda_stream: int


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    if not hasattr(_here, "host"):  # while kernels are loaded
        yield
        return
    before, host().stream = host().stream, stream.cuda_stream
    yield
    host().stream = before


class Torch:
    """torch, as the executor's host code sees it."""

    cuda = SimpleNamespace(
        current_stream=lambda _: Stream(getattr(getattr(_here, "host", None), "stream", 0)),
        set_stream=lambda stream: setattr(host(), "stream", stream.cuda_stream),
        stream=_on,
        synchronize=lambda _: None,
        Event=Event,
    )
    _C = SimpleNamespace(_cuda_getCurrentRawStream=lambda _: host().stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *shape: Any, pin_memory: bool = False, **options: Any) -> Any:
        return Pinned() if pin_memory else torch.zeros(*shape, **options)


# --- what is issued ---


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

    def run(self, begin: int, end: int, bases: list[int], streams: list[int]) -> None:
        for name, stream, *what in self.operations[begin:end]:
            host().issue(streams[stream], name, *what, bases=bases)


class Move:
    """In place of `weft.runtime.cuda.move.Move`."""

    def __init__(self, device: torch.device, **what: Any) -> None:
        self._what = {"targets": (), **what}

    def record(self, program: Recorded, stream: int, source: Base, target: Base) -> bool:
        program.launch(stream, {**self._what, "source": source, "target": target})
        return True

    def launch(self, source: int, target: int, source_rows: int, target_rows: int) -> None:
        """Of sizes that the device knows."""
        what = {**self._what, "source": source, "target": target, "rows": (source_rows, target_rows)}
        host().issue(host().stream, "launch", what)


class Totals(sizes.Totals):
    def record(self, program: Any, stream: int) -> bool:
        program.totals(stream, self)
        return True


class Gemms:
    """In place of `weft.runtime.cuda.tile_kernels.Gemms`: what the step says."""

    def __init__(self, context: Context, regions: Regions, kernel: TileKernel, *_: Any) -> None:
        self._regions, self._held = regions, context.own[kernel.counts]  # type: ignore[attr-defined]
        self._counts = kernel.counts  # type: ignore[attr-defined]
        self._step = next(s for _, s in context.order if isinstance(s, Tiles) and s.kernel is kernel)

    def prepare(self, tensors: Tensors) -> None:
        pass

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        host().issue(host().stream, "call", partial(self._multiply, dict(tensors)))

    def _multiply(self, tensors: Tensors) -> None:
        held = {self._counts: Held(self._held.flatten().tolist())}
        for tile in range(put_in(self._step.extent, held)):
            for step in self._step.body:
                gemm = put_in(step, {**held, self._step.index: tile})
                assert isinstance(gemm, Compute)
                if not gemm.is_empty:
                    out, a, w = (self._regions.view(region)(tensors) for region in (gemm.out, *gemm.inputs))
                    out.copy_(a[: len(out)] @ w)  # rows beyond the result are left out


class TrackedTiles:
    """In place of `weft.runtime.cuda.tracked_matmul.TrackedMatmul`, with its table."""

    def __init__(self, device: torch.device, table: np.ndarray, counters: list, *, relative: bool, **_: int) -> None:
        self.table, self.counters, self.relative = table, counters, relative

    def prepare(self, a: torch.Tensor, w: torch.Tensor) -> None:
        pass

    def launch(self, a: torch.Tensor, w: torch.Tensor, y: int) -> None:
        host().issue(host().stream, "tracked", self, a, w, y)


class Together(NamedTuple):
    """In place of a call of the library that all ranks make: the n-th of a run."""

    nth: int
    op: str
    src: Callable[[Tensors], torch.Tensor]
    dst: Callable[[Tensors], torch.Tensor]

    def __call__(self, tensors: Tensors) -> None:
        host().issue(host().stream, "together", self, self.src(tensors), self.dst(tensors))


def _collective_call(step: Collective, regions: Regions, context: Context) -> Operation:
    collective_call(step, regions, context)  # which may refuse it
    nth = _collectives(context.schedule, context.rank).index(step)
    return Operation(Together(nth, step.op, regions.view(step.src), regions.view(step.dst)))


def _queued(make: Callable[..., Operation]) -> Callable[..., Operation]:
    def made(step: Any, regions: Regions) -> Operation:
        operation = make(step, regions)

        def call(tensors: Tensors) -> None:
            if hasattr(_here, "host"):
                host().issue(host().stream, "call", partial(operation.call, dict(tensors)))
            else:  # while kernels are loaded
                operation.call(tensors)

        return operation._replace(call=call)

    return made


# --- memory ---


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


class SymmetricMemory:
    """Of all ranks, at first full of NaN; as a region of `weft.symm`."""

    def __init__(self, world: int, nbytes: int, fill: int = 0xFF) -> None:
        self.blocks = [torch.full((max(nbytes, 1),), fill, dtype=torch.uint8) for _ in range(world)]

    def address(self, rank: int) -> int:
        return self.blocks[rank].data_ptr()

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.blocks[rank][offset : offset + nbytes].view(dtype).view(shape)


def context_of(schedule: Schedule, rank: int, region: SymmetricMemory) -> Context:
    """Without streams and a group."""
    mine, streams = rank_schedule(schedule, rank), [Stream(lane) for lane in range(len(schedule.lanes) + 1)]
    own = own_buffers(mine, region, CPU)  # type: ignore[arg-type]
    for name, buffer in own.items():
        if mine.buffers[name].role == "scratch":
            poison(buffer)
    instead: dict[str, Any] = {
        "domain": SimpleNamespace(world_size=schedule.world_size, group=None, check=lambda: None),
        "region": region,
        "words": Words(),
        "side": streams[1:-1],
        "monitor": streams[-1],
        "run": Run(),
    }
    return Context(**vars(mine), device=CPU, own=own, begun_word=torch.zeros(1), **instead)


def poison(t: torch.Tensor) -> torch.Tensor:
    """All bytes 0xFF: NaN, and -1."""
    if t.numel():
        ctypes.memset(t.data_ptr(), 0xFF, t.nbytes)
    return t


def compiled(schedule: Schedule, rank: int, region: SymmetricMemory) -> tuple[Context, issue.StreamItems]:
    context = context_of(schedule, rank, region)
    return context, stream_compiler.compile_streams(context, False)


def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on compile and issue for modelled GPUs."""
    for module in (stream_compiler, sizes):
        monkeypatch.setattr(module, "_core", SimpleNamespace(StreamProgram=Recorded))
    for module in (issue, sizes):
        monkeypatch.setattr(module, "torch", Torch())
    monkeypatch.setattr(sizes, "_compiled_totals", lambda device: None)
    monkeypatch.setattr(tracked_matmul, "TrackedMatmul", TrackedTiles)
    instead = {
        "Move": Move, "Totals": Totals, "Gemms": Gemms, "collective_call": _collective_call,
        "compute_call": _queued(compute_call), "reduce_call": _queued(reduce_call),
    }  # fmt: skip
    for name, one in instead.items():
        monkeypatch.setattr(stream_compiler, name, one)


# --- playing ---


class Played:
    """All ranks' hosts and streams, in so many runs. tensors_of: what a rank gives in a run, from 1.

    results: by rank and run. words: by rank and number, the run in which a word's token was put, or None."""

    def __init__(self, schedule: Schedule, runs: int, tensors_of: Callable[[int, int], dict[str, Any]]) -> None:
        tokens, world = tokens_of(schedule), schedule.world_size
        self.words: list[dict[int, int | None]] = [
            {t.word: 0 if t.previous else None for t in mine.values()} for mine in tokens
        ]
        self.results: dict[tuple[int, int], Tensors] = {}
        self.previous = [{t.word: t.previous for t in mine.values()} for mine in tokens]
        self._streams: dict[tuple[int, int], deque[Issued]] = {}
        self._reached: set[tuple] = set()
        self._met: dict[tuple[int, int], dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._memory = SymmetricMemory(world, rank_schedule(schedule, 0).layout.buffer_bytes)
        self._hosts = []
        for rank in range(world):
            context, items = compiled(schedule, rank, self._memory)
            body = partial(self._issue_runs, context, items, runs, partial(tensors_of, rank))
            self._hosts.append(Host(rank, body, partial(self._queue, rank)))

    def _queue(self, rank: int, stream: int, issued: Issued) -> None:
        self._streams.setdefault((rank, stream), deque()).append(issued)

    @staticmethod
    def _issue_runs(
        context: Context, items: issue.StreamItems, runs: int, tensors_of: Callable[[int], dict[str, Any]], host: Host
    ) -> None:
        """What the host does: as `CudaSchedule.run`, between the caller's own use of what it gives."""
        run = context.run
        for host.number in range(1, runs + 1):
            given = tensors_of(host.number)
            tensors = {name: t if callable(t) else poison(t.clone()) for name, t in given.items()}
            host.issue(0, "given", [(tensors[name], t) for name, t in given.items() if not callable(t)])
            run.caller = Stream(0)  # type: ignore[assignment]
            run.known.clear()
            run.made = {}
            items.issue(tensors, False)
            outputs = [b.name for b in context.given if b.role == "output"]
            results = {name: run.made.get(name, tensors[name]) for name in outputs}
            host.issue(0, "taken", results, list(tensors.values()))

    # --- tokens ---

    def _put(self, run: int, address: int) -> None:
        rank, word = address // WORDS - 1, address % WORDS // 8
        if word in self.words[rank]:
            assert self.words[rank][word] is None, f"run {run} puts a token where one lies, word {word} of rank {rank}"
            self.words[rank][word] = run

    def _take(self, address: int) -> None:
        rank, word = address // WORDS - 1, address % WORDS // 8
        if word in self.words[rank]:
            self.words[rank][word] = None

    def _come(self, one: Issued, addresses: list[int]) -> Iterator[bool]:
        """Goes on when a token lies in each of these words, and with it."""
        for address in addresses:
            rank, word = address // WORDS - 1, address % WORDS // 8
            assert rank == one.rank
            while (found := self.words[rank][word]) is None:
                yield False
            wanted = one.run - self.previous[rank][word]
            assert found == wanted, f"run {one.run} finds the token of run {found}, rank {rank}"

    # --- operations, each in small steps: False while it cannot go on ---

    def _record(self, one: Issued, event: tuple) -> Iterator[bool]:
        self._reached.add(event)
        yield True

    def _wait_event(self, one: Issued, event: tuple) -> Iterator[bool]:
        while event not in self._reached:
            yield False

    def _given(self, one: Issued, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[bool]:
        """What a run needs is written by the caller's stream, right before it."""
        for target, t in pairs:
            target.copy_(t)
            yield True

    def _taken(self, one: Issued, results: Tensors, everything: list[torch.Tensor]) -> Iterator[bool]:
        """Behind a run the caller's stream reads results, and then uses all memory for something else."""
        self.results[one.rank, one.run] = {name: t.clone() for name, t in results.items()}
        yield True
        for t in everything:
            poison(t)

    def _signal(self, one: Issued, parts: list[tuple[bool, int, int, int]]) -> Iterator[bool]:
        for waits, base, offset, number in parts:
            address = one.bases[base] + offset
            if waits:
                assert number == AWAITED
                yield from self._come(one, [address])
            elif number == TOKEN and address >= WORDS and address // WORDS - 1 != one.rank:  # else for the watchdog
                self._put(one.run, address)
            elif number == 0:
                self._take(address)
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
            self._put(one.run, word)
            yield True
        source, target = (
            at if isinstance(at, int) else one.bases[at[0]] + at[1] for at in (what["source"], what["target"])
        )
        shape = what["shape"]
        rows, width, pitch, to_pitch = shape.rows, shape.width, shape.source_pitch, shape.target_pitch
        if what.get("sizes"):
            first, to, rows = (ctypes.c_int64 * 3).from_address(what["sizes"])
            assert 0 <= first <= first + rows <= what["rows"][0], (
                f"rows {first}:+{rows} are outside of {what['rows'][0]}"
            )
            assert 0 <= to <= to + rows <= what["rows"][1], f"rows {to}:+{rows} are outside of {what['rows'][1]}"
            source, target = source + first * pitch, target + to * to_pitch
        read = _lines(source, rows, width, pitch) if what["early"] else None
        yield from self._come(one, what["waits"])
        read = _lines(source, rows, width, pitch) if read is None else read
        yield True
        for begin in (target, *what["targets"]):
            for row, line in enumerate(read):
                if what["adds"]:
                    line = line.view(TORCH_DTYPE[what["adds"]])
                    lent(begin + row * to_pitch, [len(line)], line.dtype, CPU, ()).add_(line)
                else:
                    ctypes.memmove(begin + row * to_pitch, line.data_ptr(), width)
                if row % 4 == 0:
                    yield True
        for word in what["waits"]:
            self._take(word)
            yield True
        for word in what["sets"]:
            self._put(one.run, word)
            yield True
        yield from self._come(one, what["answers"])
        for word in what["answers"]:
            self._take(word)
            yield True

    def _totals(self, one: Issued, totals: Totals) -> Iterator[bool]:
        held, *_ = totals._arguments
        flat = held.flatten()
        for i, (constant, terms) in enumerate(zip(totals._constants.tolist(), totals._terms.tolist(), strict=True)):
            parts = (flat[first : first + count * step : step][:count] for first, count, step in terms)
            totals.numbers[i] = constant + sum(int(part.sum()) for part in parts)
        yield True

    def _call(self, one: Issued, call: Callable[[], None]) -> Iterator[bool]:
        call()
        yield True

    def _together(self, one: Issued, call: Together, src: torch.Tensor, dst: torch.Tensor) -> Iterator[bool]:
        met = self._met.setdefault((one.run, call.nth), {})
        met[one.rank] = src, dst
        if len(met) == len(self.words):
            collect(call.op, *([met[rank][side] for rank in sorted(met)] for side in (0, 1)))
        while len(met) < len(self.words):
            yield False

    def _tracked(self, one: Issued, tiles: TrackedTiles, a: torch.Tensor, w: torch.Tensor, y: int) -> Iterator[bool]:
        left = [come for come, _ in tiles.counters]
        for row, rows, col, cols, place, pitch, *of_tile in tiles.table.tolist():
            tile = (a[row : row + rows] @ w[:, col : col + cols]).contiguous()
            for i, line in enumerate(tile):
                ctypes.memmove(place + (y if tiles.relative else 0) + i * pitch, line.data_ptr(), line.nbytes)
            yield True
            for counter in of_tile:
                left[counter] -= 1
                for word in () if left[counter] else tiles.counters[counter][1]:
                    self._put(one.run, word)
                    yield True

    def play(self, seed: int) -> None:
        """To the end. `AssertionError` if all stand still."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # GEMMs are tiny: threads would wait for each other
        try:
            self._play(random.Random(seed))
        finally:
            torch.set_num_threads(threads)
            for one in self._hosts:
                one.stop()

    def _play(self, chance: random.Random) -> None:
        running: dict[tuple[int, int], Iterator[bool]] = {}
        speed: dict[tuple[int, int], int] = {}

        def advance(key: tuple[int, int]) -> bool:
            rank, stream = key
            if stream < 0:
                return self._hosts[rank].resume(chance.choice((1, 3, 10, 1000)))
            if key not in running:
                one = self._streams[key].popleft()
                running[key] = getattr(self, f"_{one.name}")(one, *one.what)
            went = next(running[key], None)
            if went is None:
                del running[key]
            return went is not False

        while True:
            keys = [key for key, queue in self._streams.items() if queue or key in running]
            keys = sorted(keys) + [(one.rank, -1) for one in self._hosts if not one.ended]
            if not keys:
                return
            moved = False
            for key in keys:
                speed.setdefault(key, chance.choice([1, 1, 10]))
            for key in sorted(keys, key=lambda k: chance.random() / speed[k]):
                went = advance(key)
                moved = moved or went
                if went and chance.random() < 0.7:
                    break
            assert moved, "all streams and hosts stand still"


def _lines(source: int, rows: int, width: int, pitch: int) -> torch.Tensor:
    """[rows, width] bytes."""
    read = torch.empty(rows, width, dtype=torch.uint8)
    for row, line in enumerate(read):
        ctypes.memmove(line.data_ptr(), source + row * pitch, width)
    return read
