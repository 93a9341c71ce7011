"""The steps of one rank bound to the memory of CPU processes: each becomes a call whose arguments are known.

Steps whose sizes a lane reads from a buffer get their numbers when they run, from what the lane has read; tiles are taken one
after the other, unless there is an entry for their kernel (`run_tiles`).

Steps on the schedule's own buffers are bound once. One that touches a tensor of the caller's is bound anew when that tensor
lies elsewhere than at the run before. Such views know an address and own nothing: no tensor is kept from run to run, and
torch's autograd and inference mode have no say in what lanes do on threads of their own.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import Any, TypeAlias

import torch

from weft import _core
from weft.errors import ScheduleError
from weft.runtime.cpu.run import Run, Tensors
from weft.runtime.cpu.sizes import numbered
from weft.runtime.scaled_matmul import scaled_matmul
from weft.runtime.schedule_memory import TORCH_DTYPE, layout_of
from weft.schedule import (
    MATMULS,
    SCALED_MATMULS,
    Buffer,
    Collective,
    Compute,
    Copy,
    For,
    Index,
    Lane,
    Read,
    Reduce,
    Region,
    Schedule,
    Set,
    Step,
    Tiles,
    Wait,
    value,
)
from weft.schedule.expr import Held
from weft.schedule.fits import unread, wrong_collectives, wrong_declarations, wrong_step
from weft.schedule.kernels import TileKernel
from weft.schedule.order import sets_per_run
from weft.schedule.spans import span_name
from weft.schedule.steps import put_in, variables_of
from weft.schedule.text import describe
from weft.symm import Domain
from weft.symm.memory import lent
from weft.words import counted

_CPU = torch.device("cpu")
_ADDED = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_ELEMENTWISE: dict[str, Any] = {
    "add": torch.ops.aten.add.out,
    "silu": torch.ops.aten.silu.out,
    "gelu": torch.ops.aten.gelu.out,
    "relu": torch.ops.aten.relu.out,
}


class Checked:
    """A schedule in numbers as `rank` needs it. `ScheduleError` if a step of this rank does not fit its memory.

    lanes: of this rank, those that do something, the first for the caller's thread. setters: by counter of this rank, the
    ranks that set it in a run, one for each set. rows: by this rank's collectives in order, the rows of all ranks.
    """

    def __init__(self, schedule: Schedule, rank: int, world_size: int) -> None:
        if schedule.world_size != world_size:
            raise ScheduleError(
                f"schedule {schedule.name} is for {counted(schedule.world_size, 'rank')}, and here are {world_size}"
            )
        lanes, meetings = schedule.of_rank(rank, expected=False), _meetings(schedule)
        ranks = [lanes if r == rank else meetings.of_rank(r, expected=False) for r in range(world_size)]
        self.buffers = schedule.buffers_of_rank(rank, expected=False)
        self.setters = {(s.name, index): list[int]() for s in schedule.signals for index in range(s.count)}
        _require_fit(schedule, rank, ranks)
        for setter, its_lanes in enumerate(ranks):
            for lane in its_lanes:
                for step in lane.steps:
                    for (at, signal, index), times in step.sets().items():
                        if at == rank:
                            self.setters[signal, value(index)] += [setter] * times
        first = next((lane for lane in lanes if lane.resource == "compute"), Lane("compute", "compute"))
        self.lanes = [first, *(lane for lane in lanes if lane.steps and lane is not first)]
        collectives = [[s for lane in of_rank for s in lane.steps if isinstance(s, Collective)] for of_rank in ranks]
        self.rows = [
            tuple(value((step.dst if step.op == "reduce_scatter" else step.src).rows) for step in same)
            if same[0].op in ("all_gather", "reduce_scatter")
            else ()
            for same in zip(*collectives, strict=True)
        ]


def _meetings(schedule: Schedule) -> Schedule:
    """What others must know of a rank: its sets and collectives. To write out all steps of all ranks takes a while."""

    def kept(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        steps = tuple(replace(step, body=kept(step.body)) if isinstance(step, For | Tiles) else step for step in steps)
        return tuple(step for step in steps if isinstance(step, Set | Collective | For) or step.inner)

    return replace(schedule, lanes=tuple(replace(lane, steps=kept(lane.steps)) for lane in schedule.lanes))


def _require_fit(schedule: Schedule, rank: int, ranks: list[tuple[Lane, ...]]) -> None:
    buffers = [{b.name: b for b in schedule.buffers_of_rank(r)} for r in range(schedule.world_size)]
    expected = [_meetings(schedule).of_rank(r) for r in range(schedule.world_size)] if schedule.contents else ranks
    faults = [*wrong_declarations(schedule, buffers), *(fault for fault, _ in wrong_collectives(schedule, expected))]
    faults += unread(schedule, rank)
    if sum(any(isinstance(step, Collective) for step in lane.steps) for lane in ranks[rank]) > 1:
        faults.append("collectives are on several lanes, and their library takes them from one thread: put them on one")
    sets = sets_per_run(ranks)
    for lane in ranks[rank]:
        for step in lane.steps:
            fixed = not isinstance(step, Tiles) and not variables_of(step)
            wrong = list(wrong_step(schedule, buffers, rank, step)) if fixed else []
            if (wait := step.awaits) and value(wait.count) > (n := sets[rank, wait.signal, wait.index]):
                wrong.append(f"{wait.count} sets are waited for, and a run makes {n}")
            if not isinstance(step, Tiles | Read) and bind.dispatch(type(step)) is bind.dispatch(object):
                wrong.append(
                    f"the CPU executor runs no steps of kind {step.kind!r}: register a function with {__name__}.bind"
                )
            if isinstance(step, Collective) and step.op == "all_to_all":
                wrong.append("the CPU executor knows no all_to_all: exchange says how many rows go to each rank")
            own_kernel = isinstance(step, Tiles) and run_tiles.dispatch(type(step.kernel)) is not run_tiles.dispatch(
                object
            )
            for inner in () if own_kernel else step.inner or (step,):
                if isinstance(inner, Compute) and inner.op == "embedding_bag":
                    wrong.append("the CPU executor pools nothing: weft.embedding_all_to_all does")
                in_fp8 = isinstance(inner, Compute) and not wrong and buffers[rank][inner.out.buffer].dtype == "fp8"
                if isinstance(inner, Compute) and in_fp8 and not inner.op.startswith("scaled_matmul"):
                    wrong.append("there is no fp8 arithmetic on CPU but of scaled GEMMs: use bf16")
                if isinstance(inner, Set) and isinstance(step, Tiles) and variables_of(step.extent):
                    wrong.append(
                        "tiles whose number only a run knows set no signals: what waits would not know for how many"
                    )
            faults += [f"lane {lane.name}: {describe(step, rank)}: {fault}" for fault in wrong]
    if faults:
        raise ScheduleError(f"schedule {schedule.name} on rank {rank}: {faults[0]}")


@dataclass(slots=True, eq=False)
class Bound:
    """A step in numbers, and what does it. rows: of a collective, how many each rank has."""

    step: Step
    name: str
    sent_bytes: int
    rows: tuple[int, ...]
    call: Callable[[], object]


Lanes: TypeAlias = list[tuple[str, list[Bound]]]


class Program:
    """The lanes of this rank by name, ready to run. Making it is collective: it allocates."""

    def __init__(self, schedule: Schedule, checked: Checked, run: Run) -> None:
        self.run, self._rank, self._setters = run, run.domain.rank, checked.setters
        self._layout = layout_of(schedule)
        self._dtypes = {buffer.name: TORCH_DTYPE[buffer.dtype] for buffer in schedule.buffers}
        self._places: dict[tuple[str, int], _Place] = {}
        self._counters = self._allocate(schedule.name, run.domain, checked.buffers)
        self._shared = _updated_by_several(checked)
        given = {b.name: b for b in checked.buffers if b.role in ("input", "output")}
        users: dict[str, list[Bound]] = {name: [] for name in given}
        rows = iter(checked.rows)
        self.lanes: Lanes = []
        for lane in checked.lanes:
            steps = []
            known: dict[str, Held] = {}  # what the lane has read
            for step in lane.steps:
                rows_of_ranks = next(rows) if isinstance(step, Collective) else ()
                late = isinstance(step, Tiles | Read) or bool(variables_of(step))
                sent = 0 if late else self._sent_bytes(step)
                bound = Bound(step, span_name(step, self._rank), sent, rows_of_ranks, _not_bound)
                mine = given.keys() & {a.region.buffer for inner in step.inner or (step,) for a in inner.accesses()}
                for name in mine:
                    users[name].append(bound)
                if late:
                    bound.call = partial(self._run_late, bound, known)
                elif not mine:
                    bound.call = self._call(bound)
                steps.append(bound)
            self.lanes.append((lane.name, steps))
        self._given = [_Given(buffer, users[name]) for name, buffer in given.items()]
        self._made: dict[str, torch.Tensor] = {}  # in this run, outputs whose rows became known in it
        self._making = threading.Lock()

    def close(self) -> None:
        """Forget what steps do, which refers to this program as it does to them: memory is given up now, and not whenever
        garbage is collected."""
        for _, steps in self.lanes:
            for bound in steps:
                bound.call = _not_bound
        self.lanes.clear()
        self._given.clear()

    def bind(self, tensors: Tensors) -> str:
        """Point the steps to these tensors. If they will not do: why, and nothing is changed. Where something strikes in between
        (Ctrl-C, no memory), the next run points all steps anew that a new tensor of this one was for."""
        try:
            if len(tensors) != len(self._given) or any(given.name not in tensors for given in self._given):
                raise ValueError(f"tensors are {list(tensors)}: pass {[given.name for given in self._given]}")
            keys = [given.look(tensors[given.name]) for given in self._given]
        except (AttributeError, TypeError, ValueError) as error:
            return str(error)
        stale: dict[Bound, None] = {}
        self._made.clear()
        moved = [(one, key) for one, key in zip(self._given, keys, strict=True) if key is not None and key != one.key]
        for given, key in moved:
            self._places[given.name, self._rank] = given.place(key)
            stale.update(dict.fromkeys(given.steps))
        for bound in stale:
            if not isinstance(bound.step, Tiles | Read) and not variables_of(bound.step):
                bound.call = self._call(bound)
        for given, key in moved:
            given.key = key
        return ""

    def _run_late(self, bound: Bound, known: dict[str, Held]) -> None:
        """A step in the numbers of this run."""
        step = bound.step
        if isinstance(step, Read):
            known[step.region.buffer] = Held(self.view(step.region).flatten().tolist())
            self._make_outputs(known)
            return
        try:
            if isinstance(step, Tiles):
                run_tiles(put_in(step.kernel, known), step, self, known)
            else:
                self.run_numbered(step, known, bound.rows)
        except ValueError as error:
            raise ScheduleError(f"schedule {self.run.name}, rank {self._rank}: {error}") from error

    def run_numbered(self, step: Step, known: Mapping[str, Held], rows: tuple[int, ...] = ()) -> None:
        """What the step does in these numbers; of tiles, one after the other."""
        for inner in numbered(step, known, self._size_of):
            bind(inner, self, rows)()

    def _size_of(self, place: tuple[str, int]) -> tuple[int, int]:
        found = self._places[place]
        return found.rows, found.cols

    def _make_outputs(self, known: dict[str, Held]) -> None:
        """Outputs that the caller gave as a function from their number of rows, once that is known."""
        for given in self._given:
            make = self.run.tensors.get(given.name)
            if given.rows is None or not variables_of(given.rows) <= known.keys() or not callable(make):
                continue
            with self._making:
                if given.name not in self._made:
                    tensor = make(put_in(given.rows, known))
                    self._places[given.name, self._rank] = given.place(given.look(tensor))
                    self._made[given.name] = tensor

    def made(self) -> Tensors:
        """In the last run, outputs that were given as functions."""
        made, self._made = self._made, {}
        return made

    def _allocate(self, name: str, domain: Domain, buffers: tuple[Buffer, ...]) -> list[torch.Tensor]:
        """Places of the schedule's own buffers; returns the counters of every rank."""
        layout, ranks = self._layout, range(domain.world_size)
        memory = domain.allocate(layout.buffer_bytes, what=f"buffers of schedule {name}")
        counter_bytes = _core.COUNTER_BYTES * layout.n_counters
        counters = domain.allocate(counter_bytes, what=f"signals of schedule {name}")
        for buffer in (b for b in buffers if b.role in ("symmetric", "scratch")):
            items, dtype = value(buffer.rows) * buffer.cols, self._dtypes[buffer.name]
            if buffer.role == "symmetric":
                for rank in ranks:
                    flat = memory.tensor(rank, (items,), dtype, layout.buffers[buffer.name])
                    self._places[buffer.name, rank] = _Place(flat, buffer.cols, 1, value(buffer.rows), buffer.cols)
            elif buffer.role == "scratch":
                flat = torch.empty(items, dtype=dtype)
                self._places[buffer.name, self._rank] = _Place(flat, buffer.cols, 1, value(buffer.rows), buffer.cols)
        return [counters.tensor(rank, (counter_bytes,), torch.uint8) for rank in ranks]

    def _call(self, bound: Bound) -> Callable[[], object]:
        return bind(bound.step, self, bound.rows)

    def place(self, region: Region) -> _Place:
        return self._places[region.buffer, value(region.at)]

    def view(self, region: Region) -> torch.Tensor:
        return self.place(region).view(region)

    def counter(self, signal: str, index: Index, rank: int) -> int:
        number = self._layout.counters[signal] + value(index)
        return self._counters[rank].data_ptr() + _core.COUNTER_BYTES * number

    def setters(self, wait: Wait) -> list[int]:
        """The ranks that set the counter which `wait` waits for, one for each set."""
        return self._setters[wait.signal, value(wait.index)]

    def is_updated_elsewhere(self, region: Region) -> bool:
        """Whether others may add to it at the same time: peers, or other lanes of this rank."""
        return region.buffer in self._shared

    def _sent_bytes(self, step: Step) -> int:
        """What crosses between ranks for this step: leaves this rank, or is fetched from another."""
        regions = [access.region for access in step.accesses()]
        if step.meets:
            crossing = regions[:1] * (len(self._counters) - 1)
        elif isinstance(step, Copy):
            crossing = [] if {step.src.at, step.dst.at} == {self._rank} else [step.src]
        else:
            crossing = [region for region in regions if region.at != self._rank]
        return sum(math.prod(_size(region)) * self._dtypes[region.buffer].itemsize for region in crossing)


def _updated_by_several(checked: Checked) -> set[str]:
    """Buffers that peers may add to, and that several lanes do."""
    lanes = [
        {
            a.region.buffer
            for step in lane.steps
            for inner in step.inner or (step,)
            for a in inner.accesses()
            if a.updates
        }
        for lane in checked.lanes
    ]
    count = Counter(name for names in lanes for name in names)
    return {b.name for b in checked.buffers if count[b.name] > 1 or (count[b.name] and b.role == "symmetric")}


@singledispatch
def bind(step: Step, program: Program, rows: tuple[int, ...]) -> Callable[[], object]:
    """What does a step in numbers, on the memory of `program`. A kind of step is run here if it is registered (`bind.register`).

    rows: of a collective, how many each rank has.
    """
    raise AssertionError(f"{step} was not refused")


@singledispatch
def run_tiles(kernel: TileKernel, step: Tiles, program: Program, known: Mapping[str, Held]) -> None:
    """Does the tiles of a step, on the memory of `program`. A kernel that does them in another way than one after the other is
    registered (`run_tiles.register`), and then nothing is asked of the tiles.

    known: what the lane has read, by buffer; `kernel` has its numbers from there.
    """
    program.run_numbered(step, known)


@bind.register
def _copy(step: Copy, program: Program, rows: tuple[int, ...]) -> Callable[[], object]:
    source, target = program.place(step.src), program.place(step.dst)
    n_rows, cols = _size(step.src)
    begin, to = source.address(step.src), target.address(step.dst)
    if step.accumulate:
        dtype = _ADDED[source.flat.dtype]
        return partial(_core.add_2d, to, target.pitch, begin, source.pitch, cols, n_rows, dtype)
    return partial(_core.copy_2d, to, target.pitch, begin, source.pitch, cols * source.flat.itemsize, n_rows)


@bind.register
def _compute(step: Compute, program: Program, rows: tuple[int, ...]) -> Callable[[], object]:
    inputs = [program.view(region) for region in step.inputs]
    if step.accumulate and program.is_updated_elsewhere(step.out):
        made = torch.empty(_size(step.out), dtype=program.view(step.out).dtype)
        return partial(_add_at_once, program.place(step.out), step.out, made, _arithmetic(step.op, made, inputs, False))
    return _arithmetic(step.op, program.view(step.out), inputs, step.accumulate)


@bind.register
def _reduce(step: Reduce, program: Program, rows: tuple[int, ...]) -> Callable[[], object]:
    parts = [program.view(region) for region in step.parts]
    out = program.view(step.out)
    if not step.accumulate:
        return partial(_sum, out, parts)
    made = torch.empty(_size(step.out), dtype=out.dtype)
    return partial(_add_at_once, program.place(step.out), step.out, made, partial(_sum, made, parts))


@bind.register
def _collective(step: Collective, program: Program, rows: tuple[int, ...]) -> Callable[[], object]:
    src, dst = program.view(step.src), program.view(step.dst)
    if step.op == "exchange":
        return partial(program.run.exchange, [value(n) for n in step.sent], [value(n) for n in step.received], src, dst)
    if step.op == "all_reduce":
        return partial(program.run.all_reduce, src, dst)
    if step.op == "reduce_scatter":
        return partial(program.run.reduce_scatter, rows, src, dst)
    return partial(program.run.all_gather, rows, src, dst)


@bind.register
def _set(step: Set, program: Program, rows: tuple[int, ...]) -> Callable[[], object]:
    return partial(_core.signal_add, program.counter(step.signal, step.index, value(step.at)), 1)


@bind.register
def _wait(step: Wait, program: Program, rows: tuple[int, ...]) -> Callable[[], object]:
    setters = program.setters(step)
    ranks = tuple(dict.fromkeys(setters))
    return partial(
        program.run.wait,
        program.counter(step.signal, step.index, program.run.domain.rank),
        len(setters),
        value(step.count) - (2 if step.previous else 1) * len(setters),
        f"{step.signal}[{step.index}] of {program.run.name}",
        ranks[0] if len(ranks) == 1 else None,
    )


@dataclass(slots=True, frozen=True)
class _Place:
    """A buffer of one rank as this process addresses it: all of it in one dimension, and strides in elements."""

    flat: torch.Tensor
    row_stride: int
    col_stride: int
    rows: int
    cols: int

    def view(self, region: Region) -> torch.Tensor:
        return self.flat.as_strided(_size(region), (self.row_stride, self.col_stride), self._first(region))

    def address(self, region: Region) -> int:
        return self.flat.data_ptr() + self._first(region) * self.flat.itemsize

    @property
    def pitch(self) -> int:
        return self.row_stride * self.flat.itemsize

    def _first(self, region: Region) -> int:
        return value(region.row) * self.row_stride + value(region.col) * self.col_stride


class _Given:
    """An input or output buffer: what the caller's tensor must be like, and where it was at the last run."""

    def __init__(self, buffer: Buffer, steps: list[Bound]) -> None:
        self.name, self.dtype, self.steps = buffer.name, TORCH_DTYPE[buffer.dtype], steps
        self.rows = None if isinstance(buffer.rows, int) else buffer.rows  # what becomes known in a run
        self.shape = (-1 if self.rows is not None else value(buffer.rows), buffer.cols)
        users = [s for b in steps for s in b.step.inner or (b.step,) if s.accesses()]
        for_matmuls = all(isinstance(s, Compute) and s.op in MATMULS for s in users)
        self.transposable = buffer.role == "input" and for_matmuls
        self.key: tuple[int, int, int, int] | None = None  # of the tensor that all steps point to

    def look(self, tensor: torch.Tensor) -> tuple[int, int, int, int] | None:
        """Its address, strides and rows; `ValueError` if it will not do. None: it will be made in the run."""
        if self.rows is not None and callable(tensor):
            return None
        wanted = self.shape if self.rows is None else (tensor.shape[0], self.shape[1])
        if tensor.shape != wanted or tensor.dtype != self.dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"{self.name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}: pass {wanted} {self.dtype} on cpu"
            )
        (rows, cols), (row_stride, col_stride) = wanted, tensor.stride()
        # The stride of a dimension of size one means nothing.
        col_stride = 1 if cols <= 1 else col_stride
        row_stride = max(1, cols) if rows <= 1 else row_stride
        row_major = col_stride == 1 and row_stride >= cols
        if not row_major and not (self.transposable and row_stride == 1 and col_stride >= rows):
            like = "rows or columns" if self.transposable else "rows"
            raise ValueError(
                f"{self.name} has strides {tensor.stride()}: its {like} must be in one piece each and not overlap; pass "
                f"{self.name}.contiguous()"
            )
        return tensor.data_ptr(), row_stride, col_stride, rows

    def place(self, key: tuple[int, int, int, int] | None) -> _Place:
        assert key is not None
        self.key, (address, row_stride, col_stride, rows), cols = None, key, self.shape[1]
        items = (rows - 1) * row_stride + (cols - 1) * col_stride + 1 if rows and cols else 0
        flat = lent(address, [items * self.dtype.itemsize], torch.uint8, _CPU, ())  # owned by nobody
        return _Place(flat.view(self.dtype), row_stride, col_stride, rows, cols)


def _size(region: Region) -> tuple[int, int]:
    return value(region.rows), value(region.cols)


def _not_bound() -> None:
    raise AssertionError("bind comes first")


def _arithmetic(op: str, out: torch.Tensor, inputs: list[torch.Tensor], accumulate: bool) -> Callable[[], object]:
    if op in SCALED_MATMULS:
        return partial(scaled_matmul, *inputs, fast=op == "scaled_matmul_fast", out=out)
    if op == "matmul":
        return partial(torch.addmm, out, *inputs, out=out) if accumulate else partial(torch.mm, *inputs, out=out)
    if not accumulate:
        return partial(_ELEMENTWISE[op], *inputs, out=out)
    return partial(_add_to, out, partial(_ELEMENTWISE[op], *inputs, out=torch.empty_like(out)))


def _sum(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    total = parts[0] if out.dtype == torch.float64 else parts[0].float()
    for part in parts[1:]:
        total = total + part
    out.copy_(total)


def _add_at_once(place: _Place, region: Region, made: torch.Tensor, call: Callable[[], object]) -> None:
    """Add what `call` makes, each element in one piece: peers and other lanes may add to the same ones."""
    call()
    rows, cols = _size(region)
    dtype = _ADDED[made.dtype]
    _core.add_2d(place.address(region), place.pitch, made.data_ptr(), cols * made.itemsize, cols, rows, dtype)


def _add_to(out: torch.Tensor, call: Callable[[], torch.Tensor]) -> None:
    out.add_(call())
