"""The steps of one rank as functions.

To *bind* a step is to make a function that runs it on buffers at given addresses. Steps are bound once, and again when an
address has changed: after memory has grown, or if a caller's tensor has moved. Tile kernels and steps with dynamic sizes
are bound in each run, when their sizes are known.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

import torch

from weft.errors import ScheduleError
from weft.runtime.cpu.checked import Checked
from weft.runtime.cpu.memory import Mapped
from weft.runtime.cpu.messages import Arrival
from weft.runtime.cpu.places import Place, Places, at_address, size
from weft.runtime.cpu.run import Run, Tensors
from weft.runtime.cpu.sizes import parts_of, require_sizes
from weft.runtime.cpu.steps import bind, run_numbered, run_tiles
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import Buffer, Collective, Compute, Read, Schedule, Step, Tiles, value
from weft.schedule.expr import PrefixSums
from weft.schedule.messages import Post, Receive
from weft.schedule.spans import span_name
from weft.schedule.steps import substitute, variables_of


@dataclass(slots=True, eq=False)
class Bound:
    """A step of a schedule, and `call`, the function that runs it on buffers at known addresses.

    name: the step's name in timelines. sent_bytes: the number of bytes that the step moves between ranks.
    rows: for a collective, the number of rows that each rank contributes.
    dynamic: True if `call` must be made again in each run, because the step's sizes or tiles are known only then.
    """

    step: Step
    name: str
    sent_bytes: int
    rows: tuple[int, ...]
    dynamic: bool
    call: Callable[[], object]


BoundLanes: TypeAlias = list[tuple[str, list[Bound]]]


class Program:
    """The lanes of this rank, with a function that runs each step. Call `map` and `bind` before a run.

    checked: the checked steps of `schedule` on this rank. run: the state that the lanes share during a run.
    """

    def __init__(self, schedule: Schedule, checked: Checked, run: Run) -> None:
        self.run, self._rank, self._schedule = run, run.comm.rank, schedule
        self.places = Places(schedule, run, checked.buffers, checked.setters, checked.shared, checked.senders)
        self.sets = self.places.sets()
        self._version = 0  # version of the memory to which steps are bound
        self._dtypes = {buffer.name: TORCH_DTYPE[buffer.dtype] for buffer in schedule.buffers}
        given = {b.name: b for b in checked.buffers if b.role in ("input", "output")}
        users: dict[str, list[Bound]] = {name: [] for name in given}
        rows = iter(checked.rows)
        self.lanes: BoundLanes = []
        self._known: list[dict[str, PrefixSums]] = []  # what each lane has read in this run, by buffer
        open_ = bool(schedule.contents)  # otherwise `of_rank` has evaluated all sizes
        for lane in checked.lanes:
            steps = []
            known: dict[str, PrefixSums] = {}
            self._known.append(known)
            for step in lane.steps:
                rows_of_ranks = next(rows) if isinstance(step, Collective) else ()
                dynamic = isinstance(step, Tiles | Read) or (open_ and bool(variables_of(step)))
                sent = 0 if dynamic else self._sent_bytes(step)
                bound = Bound(step, span_name(step, self._rank), sent, rows_of_ranks, dynamic, _not_bound)
                mine = given.keys() & {a.region.buffer for inner in step.inner or (step,) for a in inner.accesses()}
                for name in mine:
                    users[name].append(bound)
                if dynamic:
                    self.places.parts[id(step)] = parts_of(step)
                    bound.call = partial(self._run_dynamic, bound, known)
                steps.append(bound)
            self.lanes.append((lane.name, steps))
        self.receives = [bound for _, steps in self.lanes[len(self.lanes) - checked.receiving :] for bound in steps]
        """The steps that receive messages."""
        self._given = [_CallerTensor(buffer, users[name]) for name, buffer in given.items()]
        self.read: dict[str, list[int]] = {}  # the buffers with dynamic sizes that the last run has read
        self._made: dict[str, torch.Tensor] = {}  # outputs with dynamic rows that the current run has made
        self._making = threading.Lock()

    def close(self) -> None:
        """Drop the functions that run the steps, and with them all references to memory."""
        for _, steps in self.lanes:
            for bound in steps:
                bound.call = _not_bound
        self.lanes.clear()
        self.receives.clear()
        self._given.clear()

    def map(self, mapped: Mapped) -> None:
        """Make the functions of the steps that use only the schedule's own buffers, with addresses in the memory `mapped`. Do
        nothing if the functions already use this memory.
        """
        if self._version == mapped.version:
            return
        self.places.map(mapped)
        mine = {bound for given in self._given for bound in given.steps}
        for given in self._given:
            given.key = None
        for _, steps in self.lanes:
            for bound in steps:
                if not bound.dynamic and bound not in mine:
                    bound.call = self._call(bound)
        self._version = mapped.version

    def unbind(self) -> None:
        """Drop all tensors that are views of the shared memory. The next `map` makes them again."""
        self._version = 0
        self.places.known.clear()
        for _, steps in self.lanes:
            for bound in steps:
                if not bound.dynamic:
                    bound.call = _not_bound

    def bind(self, tensors: Tensors) -> str:
        """Make the functions of the steps that use a caller's tensor, with the address of this tensor. Return "". If a tensor
        does not match its buffer, change nothing, and return an error text.

        If an exception (Ctrl-C, out of memory) interrupts this method, the next run makes all these functions again.
        """
        try:
            if len(tensors) != len(self._given) or any(given.name not in tensors for given in self._given):
                raise ValueError(f"tensors are {list(tensors)}: pass {[given.name for given in self._given]}")
            keys = [given.look(tensors[given.name]) for given in self._given]
        except (AttributeError, TypeError, ValueError) as error:
            return str(error)
        stale: dict[Bound, None] = {}
        self._made.clear()
        for known in self._known:
            known.clear()
        moved = [(one, key) for one, key in zip(self._given, keys, strict=True) if key is not None and key != one.key]
        for given, key in moved:
            self.places.put(given.name, given.place(key))
            stale.update(dict.fromkeys(given.steps))
        for bound in stale:
            if not bound.dynamic:
                bound.call = self._call(bound)
        for given, key in moved:
            given.key = key
        return ""

    def _run_dynamic(self, bound: Bound, known: dict[str, PrefixSums]) -> None:
        """Run a step whose sizes or tiles are known only in this run (`Bound.dynamic`).

        known: the dynamic sizes that the step's lane has read so far, by the name of their buffer. A `Read` step adds
            the contents of its buffer.
        """
        step = bound.step
        if isinstance(step, Read):
            read = self.places.view(step.region).flatten().tolist()
            require_sizes(self._schedule, self._rank, step.region.buffer, read)
            known[step.region.buffer], self.read[step.region.buffer] = PrefixSums(read), read
            self._match_rows(known)
            return
        try:
            if isinstance(step, Tiles):
                run_tiles(substitute(step.kernel, known), step, self.places, known)
            else:
                run_numbered(step, self.places, known, bound.rows)
        except ValueError as error:
            raise ScheduleError(f"schedule {self.run.name}, rank {self._rank}: {error}") from error

    def _match_rows(self, known: dict[str, PrefixSums]) -> None:
        """Check the inputs and allocate the outputs that have a dynamic number of rows, which is now known.

        known: the dynamic sizes that the lane has read so far, by the name of their buffer.

        Outputs are allocated by the functions that the caller passed. Raise `ScheduleError` if an input has too few rows.
        More rows, such as padding, are allowed.
        """
        for given in self._given:
            if given.rows is None or not variables_of(given.rows) <= known.keys():
                continue
            tensor, rows = self.run.tensors.get(given.name), substitute(given.rows, known)
            if given.role == "input" and tensor is not None and len(tensor) < rows:
                raise ScheduleError(
                    f"schedule {self.run.name}: {given.name} of rank {self._rank} has {len(tensor)} rows, but "
                    f"{given.rows} is {rows} in this run: pass at least {rows} rows, or correct the sizes"
                )
            if not callable(tensor):
                continue
            with self._making:
                if given.name not in self._made:
                    made = tensor(rows)
                    self.places.put(given.name, given.place(given.look(made)))
                    self._made[given.name] = made

    def expect(self) -> None:
        """Begin to receive all messages of this run. Call it when all ranks have begun the run."""
        for bound in self.receives:
            cast(Arrival, bound.call).begin()

    def abandon(self) -> None:
        """Stop waiting for messages after an error."""
        for bound in self.receives:
            cast(Arrival, bound.call).abandon()

    def made(self) -> Tensors:
        """Return the outputs that the last run has allocated because their number of rows was dynamic, by name."""
        made, self._made = self._made, {}
        return made

    def _call(self, bound: Bound) -> Callable[[], object]:
        return bind(bound.step, self.places, bound.rows)

    def _sent_bytes(self, step: Step) -> int:
        """Return the bytes that this step moves between ranks: sent by this rank, or fetched from a peer."""
        regions = step.regions
        if isinstance(step, Post | Receive):
            crossing = regions if isinstance(step, Post) else ()
        elif step.meets:
            crossing = regions[:1] * (self.run.comm.world_size - 1)
        else:
            crossing = tuple(region for region in regions if region.at != self._rank)[: 1 if step.copies_by else None]
        return sum(math.prod(size(region)) * self._dtypes[region.buffer].itemsize for region in crossing)


class _CallerTensor:
    """The record of a buffer for which the caller passes a tensor. It has the required shape and dtype, the tensor's address in
    the last run, and the steps that use the buffer.
    """

    def __init__(self, buffer: Buffer, steps: list[Bound]) -> None:
        self.name, self.role, self.dtype, self.steps = buffer.name, buffer.role, TORCH_DTYPE[buffer.dtype], steps
        self.rows = None if isinstance(buffer.rows, int) else buffer.rows  # dynamic rows
        self.shape = (-1 if self.rows is not None else value(buffer.rows), buffer.cols)
        users = [s for b in steps for s in b.step.inner or (b.step,) if s.accesses()]
        read_only = buffer.role == "input"
        self.transposable = all(
            isinstance(s, Compute) and (s.multiplies if read_only else s.op == "matmul" and not s.accumulate)
            for s in users
        )
        self.key: tuple[int, int, int, int] | None = None  # key of the tensor to which all steps are bound

    def look(self, tensor: torch.Tensor) -> tuple[int, int, int, int] | None:
        """Check the caller's `tensor` for this buffer. Return its address, row stride, column stride and number of rows. Return
        None if the caller has passed a function, which allocates the tensor during the run. Raise `ValueError` if the tensor
        does not match the buffer.
        """
        if self.rows is not None and callable(tensor):
            return None
        wanted = self.shape if self.rows is None else (tensor.shape[0], self.shape[1])
        if tensor.shape != wanted or tensor.dtype != self.dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"{self.name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}: pass {wanted} {self.dtype} on cpu"
            )
        address = tensor.data_ptr()
        if not address and tensor.numel():
            raise ValueError(f"{self.name} has no memory: its storage was freed; pass it while it has values")
        if tensor.is_neg():
            raise ValueError(
                f"{self.name} is a view whose memory holds the negated values: pass {self.name}.resolve_neg()"
            )
        (rows, cols), (row_stride, col_stride) = wanted, tensor.stride()
        # The stride of a dimension of size one is arbitrary.
        row_major = (col_stride == 1 or cols <= 1) and (row_stride >= cols or rows <= 1)
        by_columns = self.transposable and (row_stride == 1 or rows <= 1) and (col_stride >= rows or cols <= 1)
        if row_major:
            col_stride, row_stride = 1, max(1, cols) if rows <= 1 else row_stride
        elif by_columns:
            row_stride, col_stride = 1, max(1, rows) if cols <= 1 else col_stride
        else:
            like = "rows or columns" if self.transposable else "rows"
            raise ValueError(
                f"{self.name} has strides {tensor.stride()}: its {like} must each be contiguous and must not "
                f"overlap; pass {self.name}.contiguous()"
            )
        return address, row_stride, col_stride, rows

    def place(self, key: tuple[int, int, int, int] | None) -> Place:
        assert key is not None
        self.key, (address, row_stride, col_stride, rows) = None, key
        return at_address(address, self.dtype, rows, self.shape[1], row_stride, col_stride)


def _not_bound() -> None:
    raise AssertionError("call bind before you run a step")
