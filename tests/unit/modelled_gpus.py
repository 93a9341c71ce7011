"""GPUs of several ranks, modelled in this process: replacements for all parts of CUDA that the GPU executor uses.

Schedules are compiled as for GPUs (`weft.runtime.cuda.compile`), and issued by the executor's own code. Native
operations, calls of NCCL and cuBLAS, and weft's kernels go into queues, one per stream. `played_gpus` executes the
queues; kernels are replaced by code with the same effect.

The CPU of each rank is a thread, which runs until it waits for its GPU. Events have CUDA's semantics: a wait refers to
the last record that the CPU issued before it. Only real GPUs can show the actual behaviour and speed of kernels and
copy engines.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from weft.runtime.cuda import compile as stream_compiler
from weft.runtime.cuda import copy_kernels, issue, sizes, tile_kernels, tracked_matmul
from weft.runtime.cuda.add_up import SumNorm
from weft.runtime.cuda.calls import Operation, _collectives, collective_call, compute_call
from weft.runtime.cuda.context import Context, LastRun, Tensors, own_buffers, rank_schedule
from weft.runtime.cuda.kernel_call import Base, Count
from weft.runtime.cuda.regions import Regions
from weft.schedule import Collective, Compute, Copy, Schedule, Tiles
from weft.schedule.expr import PrefixSums
from weft.schedule.kernels import TileKernel
from weft.schedule.steps import substitute, variables_of

WORDS = 1 << 50  # the words of rank r begin at address (1 + r) * WORDS
CPU = torch.device("cpu")


# --- CPUs ---


class Issued(NamedTuple):
    """An operation in a stream of a rank. bases: the base addresses at the time when it was issued."""

    rank: int
    run: int
    name: str
    what: tuple
    bases: list[int]


class Host(threading.Thread):
    """The CPU thread of one rank. When resumed, it runs until it has issued a given number of operations, or has to
    wait.
    """

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
        """Let the thread issue up to `budget` operations. Return True if it made progress."""
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
    """A replacement for torch's CUDA event."""

    def record(self) -> None:
        self.reached = False
        host().issue(host().stream, "call", self._reach)

    def _reach(self) -> None:
        self.reached = True

    def synchronize(self) -> None:
        while not self.reached:
            host().pause()


class Pinned:
    """CPU memory that the GPU writes."""

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
    if not hasattr(_here, "host"):  # during the warm-up that loads kernels
        yield
        return
    before, host().stream = host().stream, stream.cuda_stream
    yield
    host().stream = before


class Torch:
    """A replacement for `torch` in the modules of the executor that issue work."""

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


# --- issued operations ---


class Recorded:
    """A replacement for `_core.StreamProgram`."""

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
    """A replacement for `weft.runtime.cuda.move.CopyLaunch`."""

    def __init__(self, device: torch.device, **what: Any) -> None:
        self._what = {"targets": (), "parts": (), **what}

    def record(self, program: Recorded, stream: int, source: Base, target: Base, *rows: int | Count) -> bool:
        """Record a copy. rows: for a copy whose sizes are in device memory, the number of rows of source and target."""
        program.launch(stream, {**self._what, "source": source, "target": target, "rows": rows})
        return True


class RoundTrip:
    """A replacement for `weft.runtime.cuda.round_trip.RoundTripLaunch`, with its arguments."""

    def __init__(self, device: torch.device, **what: Any) -> None:
        self.what = SimpleNamespace(**what)

    def record(self, program: Recorded, stream: int, out: Base, out_rows: int | Count) -> bool:
        program.round_trip(stream, self, out, out_rows)
        return True


class AddUp:
    """A replacement for `weft.runtime.cuda.add_up.AddUp`."""

    def __init__(self, device: torch.device, *what: Any, norm: SumNorm | None, fixed: list[int]) -> None:
        self.dtype, self.size, self.out, self.parts = what
        self.norm = norm

    def record(self, program: Recorded, stream: int) -> bool:
        program.add_up(stream, self)
        return True


class Totals(sizes.Totals):
    def record(self, program: Any, stream: int) -> bool:
        program.totals(stream, self)
        return True


class Agreeing:
    """A replacement for `weft.runtime.cuda.agree.Agreeing`, with its arguments."""

    def __init__(self, expected: torch.Tensor, sent: torch.Tensor, _: int, row: int, width: int, itemsize: int) -> None:
        self.expected, self.row_bytes = expected, width * itemsize
        self.sent = sent.unflatten(0, (len(expected), -1))[:, row]

    def record(self, program: Recorded, stream: int, out: Base, out_rows: int | Count) -> bool:
        program.agree(stream, self, out, out_rows)
        return True


class GroupedMatmulCall(tile_kernels.TilesCall):
    """A replacement for `weft.runtime.cuda.tile_kernels.GroupedMatmulCall`, which runs the step's tiles."""

    def __init__(self, context: Context, regions: Regions, kernel: TileKernel, *_: Any) -> None:
        self._regions, self._held = regions, context.own[kernel.counts]  # type: ignore[attr-defined]
        self._counts = kernel.counts  # type: ignore[attr-defined]
        self._step = next(s for _, s in context.order if isinstance(s, Tiles) and s.kernel is kernel)

    def prepare(self, tensors: Tensors) -> None:
        pass

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        host().issue(host().stream, "call", partial(self._multiply, dict(tensors)))

    def _multiply(self, tensors: Tensors) -> None:
        held = {self._counts: PrefixSums(self._held.flatten().tolist())}
        for tile in range(substitute(self._step.extent, held)):
            for step in self._step.body:
                gemm = substitute(step, {**held, self._step.index: tile})
                assert isinstance(gemm, Compute)
                if not gemm.is_empty:
                    out, a, w = (self._regions.view(region)(tensors) for region in (gemm.out, *gemm.inputs))
                    made = a[: len(out)] @ w  # rows beyond the result are dropped
                    out.copy_(out + made if gemm.accumulate else made)


class PermuteCall(tile_kernels.TilesCall):
    """A replacement for `weft.runtime.cuda.tile_kernels.PermuteCall`, which runs the copies in a random order."""

    writes_outputs = False

    def __init__(self, context: Context, regions: Regions, copies: Sequence[Copy], _: int) -> None:
        self._regions, self._own = regions, context.own
        self._copies = random.Random(len(copies)).sample(copies, len(copies))

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        host().issue(host().stream, "call", partial(self._copy, dict(tensors)))

    def _copy(self, tensors: Tensors) -> None:
        names = {name for copy in self._copies for name in variables_of(copy)}
        held = {name: PrefixSums(self._own[name].flatten().tolist()) for name in names}
        for copy in self._copies:
            source, target = (self._regions.view(substitute(region, held))(tensors) for region in (copy.src, copy.dst))
            target.copy_(source)


class TrackedTiles:
    """A replacement for `weft.runtime.cuda.tracked_matmul.TrackedMatmulLauncher`, with the same table."""

    def __init__(
        self, device: torch.device, table: np.ndarray, counters: list, *, relative: bool, adds: bool, **_: int
    ) -> None:
        self.counters, self.relative = counters, relative
        self.table, self.added = np.split(table, [table.shape[1] - 2 * adds], axis=1)

    def prepare(self, a: torch.Tensor, w: torch.Tensor) -> None:
        pass

    def launch(self, a: torch.Tensor, w: torch.Tensor, y: int) -> None:
        host().issue(host().stream, "tracked", self, a, w, y)


class Together(NamedTuple):
    """An NCCL call that all ranks make. nth: its index among the collectives of a run."""

    nth: int
    op: str
    src: Callable[[Tensors], torch.Tensor]
    dst: Callable[[Tensors], torch.Tensor]

    def __call__(self, tensors: Tensors) -> None:
        host().issue(host().stream, "together", self, self.src(tensors), self.dst(tensors))


def _collective_call(step: Collective, regions: Regions, context: Context) -> Operation:
    collective_call(step, regions, context)  # raises if the real executor would refuse the step
    nth = _collectives(context.schedule, context.rank).index(step)
    return Operation(Together(nth, step.op, regions.view(step.src), regions.view(step.dst)))


def _queued(make: Callable[..., Operation]) -> Callable[..., Operation]:
    def made(step: Any, regions: Regions) -> Operation:
        operation = make(step, regions)

        def call(tensors: Tensors) -> None:
            if hasattr(_here, "host"):
                host().issue(host().stream, "call", partial(operation.call, dict(tensors)))
            else:  # during the warm-up that loads kernels
                operation.call(tensors)

        return operation._replace(call=call)

    return made


# --- memory ---


def collect(op: str, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Run a collective: compute the targets of all ranks from their sources."""
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
    """The signal words. They have addresses but no memory: `Played.words` has their contents."""

    def address(self, rank: int) -> int:
        return WORDS * (1 + rank)


class SymmetricMemory:
    """Symmetric memory of all ranks, initially full of NaN. It implements the interface of `weft.symm`'s regions."""

    def __init__(self, world: int, nbytes: int, fill: int = 0xFF) -> None:
        self.blocks = [torch.full((max(nbytes, 1),), fill, dtype=torch.uint8) for _ in range(world)]

    def address(self, rank: int) -> int:
        return self.blocks[rank].data_ptr()

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.blocks[rank][offset : offset + nbytes].view(dtype).view(shape)


def context_of(schedule: Schedule, rank: int, region: SymmetricMemory) -> Context:
    """Return a context without real streams and without a group."""
    mine, streams = rank_schedule(schedule, rank), [Stream(lane) for lane in range(len(schedule.lanes) + 1)]
    own = own_buffers(mine, region, CPU)  # type: ignore[arg-type]
    for name, buffer in own.items():
        if mine.buffers[name].role == "scratch":
            poison(buffer)
    instead: dict[str, Any] = {
        "comm": SimpleNamespace(world_size=schedule.world_size, group=None, check=lambda: None),
        "region": region,
        "words": Words(),
        "side": streams[1:-1],
        "monitor": streams[-1],
        "run": LastRun(),
        "own_group": None,
    }
    return Context(**vars(mine), device=CPU, own=own, begun_word=torch.zeros(3), **instead)


def poison(t: torch.Tensor) -> torch.Tensor:
    """Set all bytes of `t` to 0xFF, which is NaN, or -1 as an integer. Return `t`."""
    if t.numel():
        ctypes.memset(t.data_ptr(), 0xFF, t.nbytes)
    return t


def compiled(schedule: Schedule, rank: int, region: SymmetricMemory) -> tuple[Context, issue.StreamItems]:
    context = context_of(schedule, rank, region)
    return context, stream_compiler.compile_streams(context, False)


def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executor compile and issue for modelled GPUs, until the test ends."""
    for module in (stream_compiler, sizes):
        monkeypatch.setattr(module, "_core", SimpleNamespace(StreamProgram=Recorded))
    for module in (issue, sizes):
        monkeypatch.setattr(module, "torch", Torch())
    monkeypatch.setattr(sizes, "_compiled_totals", lambda device, tables: None)
    monkeypatch.setattr(tracked_matmul, "TrackedMatmulLauncher", TrackedTiles)
    monkeypatch.setattr(tile_kernels, "GroupedMatmulCall", GroupedMatmulCall)
    monkeypatch.setattr(
        tile_kernels, "OnlyExpertCall", lambda context, kernel, _: GroupedMatmulCall(context, Regions(context), kernel)
    )
    monkeypatch.setattr(tile_kernels, "PermuteCall", PermuteCall)
    monkeypatch.setattr(copy_kernels, "CopyLaunch", Move)
    monkeypatch.setattr(copy_kernels, "Totals", Totals)
    monkeypatch.setattr(copy_kernels, "RoundTripLaunch", RoundTrip)
    monkeypatch.setattr(stream_compiler, "collective_call", _collective_call)
    monkeypatch.setattr(stream_compiler, "compute_call", _queued(compute_call))
    monkeypatch.setattr(stream_compiler, "AddUp", AddUp)
    monkeypatch.setattr(stream_compiler, "Agreeing", Agreeing)
