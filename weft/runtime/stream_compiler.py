"""From the steps of a rank to what the host issues: native operations, library calls and small kernels, in one order.

Two forms of one schedule. `on_device=False`: signals between ranks are writes and waits of streams, with the epoch that the
host passes. `on_device=True`: they are small kernels that read the epoch on the device, for CUDA graphs; the last one of
a run advances it. Copies by kernel carry the waits before them and the signals after them in both forms.

Signals within a rank are events, since each lane is a stream. A wait for such a signal of the previous run is no wait: a
run begins when the one before has ended on its rank.

A `_Item` is (kind, what, where): native operations [what, where); a call of the library on the stream of lane `where`; a
launch there; or what knows its sizes only then (`weft.runtime.stream_late`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from weft import _core
from weft.errors import ScheduleError
from weft.runtime.collectives import all_gather_single, sendable
from weft.runtime.kernel_call import Base, Epoch
from weft.runtime.move import Move, Shape, Stamps
from weft.runtime.scaled_matmul import scaled_matmul
from weft.runtime.stream_late import Gemms, HostRead, LateCopy, ReadAhead, Totals, is_late, segments_of
from weft.schedule import (
    ITEM_BYTES,
    SCALED_MATMULS,
    Collective,
    Compute,
    Copy,
    Read,
    Region,
    Schedule,
    Set,
    Step,
    Tiles,
    Wait,
)
from weft.schedule.text import describe
from weft.timeline import Timeline

if TYPE_CHECKING:
    from weft.runtime.schedule_cuda import CudaSchedule

Tensors: TypeAlias = dict[str, torch.Tensor]
Key: TypeAlias = tuple[str, int]
_NATIVE, _CALL, _LAUNCH, _LATE = range(4)
LATE_PROGRAMS = 16
"""Of a copy by kernel beside GEMMs that fill the GPU: enough for four fifths of a link's rate, and few to wait for."""
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "relu": lambda x, out: torch.clamp_min(x, 0, out=out),
    "silu": torch.ops.aten.silu.out,
    "gelu": torch.ops.aten.gelu.out,
}


def crossing_signals(schedule: Schedule, rank: int) -> dict[Key, int]:
    """The counters of `rank` that another rank sets, and which. `ScheduleError` if a stream could not wait for one."""
    sets = Counter[tuple[int, str, int]]()
    crossing: dict[Key, int] = {}
    for setter in range(schedule.world_size):
        for lane in schedule.of_rank(setter, expected=False):
            for step in lane.steps:
                if isinstance(step, Set):
                    sets[int(step.at), step.signal, int(step.index)] += 1
                    if step.at == rank and setter != rank:
                        crossing[step.signal, int(step.index)] = setter
    for (at, signal, index), count in sets.items():
        if count > 1:
            raise ScheduleError(
                f"schedule {schedule.name}: signal {signal}[{index}] of rank {at} is set {count} times in a run, and a stream "
                f"sets a word by writing it: give every setter an index of its own"
            )
    return crossing


class _Item(NamedTuple):
    kind: int
    what: Any
    where: int


class StreamItems:
    """What `issue` does, once for every run. Made by `compile_streams`."""

    def __init__(self, owner: CudaSchedule, on_device: bool) -> None:
        self.owner, self.on_device = owner, on_device
        self.items: list[_Item] = []
        self.calls: list[tuple[int, Callable[[Tensors], None]]] = []  # of the library, for warming up
        self.prepares: list[Callable[[Tensors], None]] = []  # which load kernels
        self.names = [b.name for b in owner.given]
        self.streams = [0, *(s.cuda_stream for s in owner.side), owner.monitor.cuda_stream]
        self.spans: list[tuple[str, str, int]] = []
        self.stamps: Stamps | None = None
        self.program: Any = None
        self.kept: list[Any] = []  # whose memory the program's operations use
        self.bases: list[int] = []
        self.epoch = 0  # as launches of the run are told it
        self.leaves_main = False  # whether calls go to other streams than the caller's

    def issue(self, tensors: Tensors, epoch: int) -> None:
        owner, bases, streams, program = self.owner, self.bases, self.streams, self.program
        for i, name in enumerate(self.names):
            tensor = tensors[name]
            bases[i] = 0 if callable(tensor) else tensor.data_ptr()  # 0: made when its size is known
        streams[0] = torch._C._cuda_getCurrentRawStream(owner.device.index)
        main: Any = torch.cuda.current_stream(owner.device) if self.leaves_main else None
        self.epoch = given = 1 if self.on_device else epoch  # after the device's word, or after zero
        for kind, what, where in self.items:
            if kind == _NATIVE:
                program.run(what, where, bases, streams, epoch)
                continue
            if kind == _LAUNCH:
                what(bases, given, streams[where])
                continue
            if where:
                torch.cuda.set_stream(owner.side[where - 1])
            if kind == _CALL:
                what(tensors)
            else:
                what(tensors, bases)
            if where:
                torch.cuda.set_stream(main)

    def warm_up(self, tensors: Tensors) -> None:
        """Load what will be launched, and every library call once, on its stream, on whatever the memory holds."""
        main = torch.cuda.current_stream(self.owner.device)
        for prepare in self.prepares:
            prepare(tensors)
        for where, call in self.calls:
            with torch.cuda.stream(self.owner.side[where - 1] if where else main):
                call(tensors)
            torch.cuda.synchronize(self.owner.device)

    def read(self, timeline: Timeline, rank: int) -> None:
        """Append what the stamps of the last run say. The device must have finished it."""
        assert self.stamps is not None
        times = self.stamps.times.tolist()
        for i, (lane, name, sent) in enumerate(self.spans):
            timeline.add(rank, lane, name, times[2 * i] / 1e3, max(times[2 * i : 2 * i + 2]) / 1e3, sent)


def compile_streams(owner: CudaSchedule, on_device: bool, timed: bool) -> StreamItems:
    """Nothing may wait on the device meanwhile: kernels are loaded here."""
    return _Compiler(owner, on_device, timed).compile()


class _Group(NamedTuple):
    """Neighbouring steps of a lane that become one launch, or a single step."""

    lane: int
    steps: tuple[Step, ...]
    anchor: int  # the step of the lane at whose place in the order the group is issued


class _Compiler:
    def __init__(self, owner: CudaSchedule, on_device: bool, timed: bool) -> None:
        self.owner, self.on_device = owner, on_device
        self.world = owner.domain.world_size
        self.result = StreamItems(owner, on_device)
        self._events = 0
        self._native_from = 0
        self._event_of: dict[Key, int] = {}
        self._told = False  # whether something tells the watchdog that a run has started
        self._ahead: dict[int, ReadAhead] = {}  # by lane
        self._sizes: dict[int, int] = {}  # of late copies by kernel, by identity: where the device finds its numbers
        given, own = len(owner.given), [name for name, b in owner.buffers.items() if b.role == "scratch"]
        self._base = {b.name: i for i, b in enumerate(owner.given)} | {name: given + i for i, name in enumerate(own)}
        self._regions = given + len(own)
        self._words = self._regions + self.world
        fixed = [owner.own[name].data_ptr() for name in own]
        fixed += [owner.region.address(r) for r in range(self.world)] + [
            owner.words.address(r) for r in range(self.world)
        ]
        self.result.bases = [0] * given + fixed + [owner.started_word.data_ptr()]
        self._started = len(self.result.bases) - 1
        lanes = len(owner.lanes)
        sets = sum(isinstance(step, Set) for _, step in owner.order)
        resources = {lane.name: lane.resource for lane in owner.schedule.lanes}
        self._computes = [resources[name] == "compute" for name in owner.lanes]
        self.program = self.result.program = _core.StreamProgram(
            len(self.result.bases), lanes + 1, 2 * lanes + sets + 4
        )
        self._monitor = lanes
        if timed:
            self.result.stamps = Stamps(owner.device, 2 * len(owner.order) + 2)

    def compile(self) -> StreamItems:
        owner, program = self.owner, self.program
        lanes = len(owner.lanes)
        fork, joints = self._event(), [self._event() for _ in range(lanes)]
        groups = self._groups()
        last = {group.lane: group for group in groups}
        # That the run has started is told by its first launch, if nothing can hold that back; else off the path of the run,
        # since writing to host memory takes microseconds.
        self._told = not self.on_device and not any(g.lane == 0 and _moves(g) for g in groups[:1])
        awaiting = [*range(1, lanes), *([self._monitor] if self._told else [])]
        if awaiting:
            program.record(0, fork)
        for lane in awaiting:
            program.wait_event(lane, fork)
        if self._told:
            program.write(self._monitor, self._started, 0, 0)
        # Where the epoch is the device's, the run's last launch advances it, when nobody needs the old one any more.
        ending = last[0] if self.on_device and isinstance(last[0].steps[0], Set) and self._uses_epoch(last[0]) else None
        for group in groups:
            if group is not ending:
                self._emit(group)
            if group.lane and group is last[group.lane]:
                program.record(group.lane, joints[group.lane])
        for lane in range(1, lanes):
            if lane in last:
                program.wait_event(0, joints[lane])
        if self.on_device:
            sets = [] if ending is None else [self._word(step) for step in ending.steps]
            self._move(0, Move(owner.epoch_word, sets=sets, started=self._tell_started(), advance=True), None, None)
        self._flush()
        self.result.leaves_main = any(item.kind in (_CALL, _LATE) and item.where for item in self.result.items)
        return self.result

    def _tell_started(self) -> int:
        """Where the first launch of a run says that it has started, if that is not told otherwise; 0 for the others."""
        told, self._told = self._told, True
        return 0 if told else self.result.bases[self._started]

    # --- grouping ---

    def _groups(self) -> list[_Group]:
        """The steps of all lanes in the order of issue, neighbours that are one launch put together."""
        owner = self.owner
        number = {name: i for i, name in enumerate(owner.lanes)}
        of_lane: dict[int, list[Step]] = {i: [] for i in number.values()}
        for name, step in owner.order:
            of_lane[number[name]].append(step)
        groups_of_lane = {lane: self._grouped(lane, steps) for lane, steps in of_lane.items()}
        ordered, at = [], Counter[int]()
        anchors = {(lane, g.anchor): g for lane, groups in groups_of_lane.items() for g in groups}
        for name, _ in owner.order:
            lane = number[name]
            group = anchors.get((lane, at[lane]))
            at[lane] += 1
            if group is not None:
                ordered.append(group)
        return ordered

    def _grouped(self, lane: int, steps: list[Step]) -> list[_Group]:
        groups: list[_Group] = []
        i = 0
        while i < len(steps):
            j = self._while(steps, i, Wait)
            first = steps[j] if j < len(steps) else None
            if isinstance(first, Copy) and first.by == "kernel":
                end = self._end_of_move(steps, j, first)
                # Issued where its last copy or answer stands: what it waits for has then been issued before it.
                anchor = max(k for k in range(i, end) if not isinstance(steps[k], Set))
                groups.append(_Group(lane, tuple(steps[i:end]), anchor))
            elif j > i:
                end = j
                groups += (
                    [_Group(lane, tuple(steps[i:j]), j - 1)] if self.on_device else self._singles(lane, steps, i, j)
                )
            else:
                end = self._while(steps, i, Set) if self.on_device else i
                end = max(end, i + 1)
                groups.append(_Group(lane, tuple(steps[i:end]), i))
            i = end
        return groups

    def _end_of_move(self, steps: list[Step], at: int, first: Copy) -> int:
        """The end of what one launch does from the copy `first` at `at` on: its signals; where nothing but fixed places is
        written, also further copies of the same region with theirs; and then waits."""
        end = self._while(steps, at + 1, Set)
        if not self._is_fixed(first.dst) or is_late(first):
            return end
        while end < len(steps):
            more = steps[end]
            if not (
                isinstance(more, Copy)
                and more.by == "kernel"
                and not is_late(more)
                and more.src == first.src
                and self._is_fixed(more.dst)
            ):
                break
            if self._place(more.dst)[2] != self._place(first.dst)[2]:
                break  # other distances between rows
            end = self._while(steps, end + 1, Set)
        return self._while(steps, end, Wait)

    def _while(self, steps: list[Step], at: int, kind: type) -> int:
        """The first step from `at` on that is no signal between ranks of this kind."""
        while at < len(steps) and isinstance(steps[at], kind) and self._crosses(steps[at]):
            at += 1
        return at

    def _is_fixed(self, region: Region) -> bool:
        """Whether it lies in memory of the schedule's own, at the same address in every run."""
        return region.buffer in self.owner.own

    @staticmethod
    def _singles(lane: int, steps: list[Step], first: int, end: int) -> list[_Group]:
        return [_Group(lane, (steps[k],), k) for k in range(first, end)]

    def _crosses(self, step: Step) -> bool:
        """Whether a signal goes between ranks."""
        if isinstance(step, Set):
            return step.at != self.owner.rank
        assert isinstance(step, Wait)
        return (step.signal, int(step.index)) in self.owner.crossing

    def _uses_epoch(self, group: _Group) -> bool:
        return any(isinstance(step, Set | Wait) and self._crosses(step) for step in group.steps)

    # --- emitting ---

    def _emit(self, group: _Group) -> None:
        stamps, first = self.result.stamps, len(self.result.spans)
        if stamps is not None:
            self._stamp(group.lane, 2 * first)
        copies = [step for step in group.steps if isinstance(step, Copy)]
        step = group.steps[0]
        if _moves(group) or (self.on_device and self._uses_epoch(group)):
            self._launch(group, copies)
        elif isinstance(step, Copy):
            self._copy(group.lane, step)
        elif isinstance(step, Set | Wait):
            self._signal(group.lane, step)
        elif isinstance(step, Compute):
            self._call(group.lane, self._compute(step))
        elif isinstance(step, Collective):
            self._call(group.lane, self._collective(step))
        elif isinstance(step, Read):
            self._read(group.lane, step)
        elif isinstance(step, Tiles):
            self._tiles(group.lane, step)
        else:
            raise ScheduleError(f"streams know no step {step}")
        if stamps is not None:
            rank = self.owner.rank
            crossing = [c for c in copies if {c.src.at, c.dst.at} != {rank} and not is_late(c)]
            sent = sum(_bytes(c.dst, self.owner.buffers) for c in crossing)
            text = "; ".join(describe(s, rank) for s in group.steps)
            self.result.spans.append((self.owner.lanes[group.lane], text, sent))
            self._stamp(group.lane, 2 * first + 1)

    def _copy(self, lane: int, step: Copy) -> None:
        if is_late(step):
            (dst, _, to_pitch), (src, _, pitch) = self._place(_whole(step.dst)), self._place(_whole(step.src))
            self._late(lane, LateCopy(self.owner, step, (src, pitch), (dst, to_pitch)))
            return
        (dst, to, to_pitch), (src, at, pitch) = self._place(step.dst), self._place(step.src)
        width = int(step.src.cols) * self._item_bytes(step.src)
        self.program.copy(lane, dst, to, to_pitch, src, at, pitch, width, int(step.src.rows))

    def _signal(self, lane: int, step: Set | Wait) -> None:
        key = (step.signal, int(step.index))
        offset = 8 * (self.owner.layout.counters[step.signal] + int(step.index))
        if isinstance(step, Set) and self._crosses(step):
            if self._computes[lane]:
                # Writing to a peer takes microseconds, which kernels need not wait for: another stream does it.
                event = self._event()
                self.program.record(lane, event)
                self.program.wait_event(self._monitor, event)
                lane = self._monitor
            self.program.write(lane, self._words + int(step.at), offset, 0)
        elif isinstance(step, Wait) and self._crosses(step):
            self.program.wait(lane, self._words + self.owner.rank, offset, -1 if step.previous else 0)
        elif isinstance(step, Set):
            self._event_of[key] = self._event()
            self.program.record(lane, self._event_of[key])
        elif not step.previous:
            self.program.wait_event(lane, self._event_of[key])

    def _launch(self, group: _Group, copies: list[Copy]) -> None:
        """One kernel for a group: its waits, its copies, its signals, and the waits after these."""
        begun = next((i for i, step in enumerate(group.steps) if isinstance(step, Copy)), len(group.steps))
        waits = [(self._word(s), -1 if s.previous else 0) for s in group.steps[:begun] if isinstance(s, Wait)]
        answers = [(self._word(s), -1 if s.previous else 0) for s in group.steps[begun:] if isinstance(s, Wait)]
        sets = [self._word(s) for s in group.steps if isinstance(s, Set)]
        word = self.owner.epoch_word if self.on_device else self.owner.zero_word
        if not copies:
            self._move(group.lane, Move(word, waits=waits, sets=sets, started=self._tell_started()), None, None)
            return
        if is_late(copies[0]):
            self._launch_late(group.lane, copies[0], waits, sets, word)
            return
        source, target = self._place(copies[0].src), self._place(copies[0].dst)
        width = int(copies[0].src.cols) * self._item_bytes(copies[0].src)
        shape = Shape(int(copies[0].src.rows), width, source[2], target[2])
        if source[2] == target[2] == width:  # one long row: a kernel takes each row in blocks of its own
            shape = Shape(1, *(shape.rows * width,) * 3)
        places = [self._place(copy.dst) for copy in copies[1:]]
        targets = [self.result.bases[base] + offset for base, offset, _ in places]
        started = self._tell_started()
        move = Move(word, shape=shape, targets=targets, waits=waits, sets=sets, answers=answers, started=started)
        self._move(group.lane, move, source, target)

    def _move(
        self, lane: int, move: Move, source: tuple[int, int, int] | None, target: tuple[int, int, int] | None
    ) -> None:
        """source, target: as `_place` says them."""
        self.result.kept.append(move)
        epoch = 1 if self.on_device else Epoch(0)  # after the device's word, or after zero
        places = [0 if place is None else Base(place[0], place[1]) for place in (source, target)]
        if move.record(self.program, lane, epoch, *places):
            return

        def launch(bases: list[int], epoch: int, stream: int) -> None:
            at = [0 if place is None else bases[place[0]] + place[1] for place in (source, target)]
            move.launch(epoch, *at, stream=stream)

        self._flush()
        self.result.items.append(_Item(_LAUNCH, launch, lane))

    def _launch_late(
        self, lane: int, copy: Copy, waits: list[tuple[int, int]], sets: list[int], word: torch.Tensor
    ) -> None:
        (dst, to, to_pitch), (src, at, pitch) = self._place(_whole(copy.dst)), self._place(_whole(copy.src))
        most, width = self.owner.buffers[copy.dst.buffer].rows, int(copy.src.cols) * self._item_bytes(copy.src)
        assert isinstance(most, int)
        move = Move(
            word, shape=Shape(most, width, pitch, to_pitch), waits=waits, sets=sets, started=self._tell_started(),
            sizes=self._sizes[id(copy)], programs=LATE_PROGRAMS,
        )  # fmt: skip
        name = copy.src.buffer

        def launch(tensors: Tensors, bases: list[int]) -> None:
            move.launch(self.result.epoch, bases[src] + at, bases[dst] + to, tensors[name].shape[0])

        self._late(lane, launch)

    def _read(self, lane: int, step: Read) -> None:
        """By the device: the numbers of the lane's copies by kernel. Those of the host come with it."""
        buffer = step.region.buffer
        if buffer not in self.owner.own:
            raise ScheduleError(
                f"{step}: streams read sizes from memory of the schedule's own: copy {buffer} there first"
            )
        if step.by == "host":
            self._late(lane, HostRead(self.owner, buffer))
        if step.by == "meanwhile":
            self._ahead[lane] = ReadAhead(self.owner, buffer)
            self._late(lane, self._ahead[lane].begin)
        name = self.owner.lanes[lane]
        copies = [s for lane_of, s in self.owner.order if lane_of == name and isinstance(s, Copy) and s.by == "kernel"]
        copies = [copy for copy in copies if is_late(copy) and id(copy) not in self._sizes]
        if not copies:
            return
        totals = Totals(
            self.owner.own[buffer], [n for copy in copies for n in (copy.src.row, copy.dst.row, copy.src.rows)]
        )
        self._sizes |= {id(copy): totals.address(3 * i) for i, copy in enumerate(copies)}
        self.result.kept.append(totals)
        if not totals.record(self.program, lane):
            self._flush()
            self.result.items.append(_Item(_LAUNCH, lambda bases, epoch, stream: totals.launch(stream), lane))

    def _tiles(self, lane: int, step: Tiles) -> None:
        owner = self.owner
        segments = segments_of(step, owner.schedule, owner.rank)
        expected = next(held.expected[owner.rank] for held in owner.schedule.contents if held.buffer == segments.counts)
        # What is sent by kernel finds room beside all but the last GEMMs.
        name = owner.lanes[lane]
        sending = any(isinstance(s, Copy) and s.by == "kernel" and is_late(s) for at, s in owner.order if at != name)
        last = [s for at, s in owner.order if at == name and isinstance(s, Tiles)][-1]
        spare = LATE_PROGRAMS // 2 if sending and step is not last else 0
        call = Gemms(owner, segments, sum(expected) / max(1, len(expected)), spare)
        self.result.prepares.append(call.prepare)
        self._late(lane, call)
        if ahead := self._ahead.get(lane):
            ahead.gemms.append(call)
            if step is last:
                self._late(lane, ahead.settle)

    def _late(self, lane: int, what: Callable[[Tensors, list[int]], None]) -> None:
        self._flush()
        self.result.items.append(_Item(_LATE, what, lane))

    def _stamp(self, lane: int, index: int) -> None:
        stamps = self.result.stamps
        assert stamps is not None
        self._flush()
        self.result.items.append(_Item(_LAUNCH, lambda bases, epoch, stream: stamps.launch(index, stream), lane))

    def _call(self, lane: int, call: Callable[[Tensors], None]) -> None:
        self._flush()
        self.result.items.append(_Item(_CALL, call, lane))
        self.result.calls.append((lane, call))

    def _flush(self) -> None:
        """Native operations recorded since the last item are issued here."""
        if len(self.program) > self._native_from:
            self.result.items.append(_Item(_NATIVE, self._native_from, len(self.program)))
            self._native_from = len(self.program)

    # --- what regions and steps are on this rank ---

    def _event(self) -> int:
        self._events += 1
        return self._events - 1

    def _word(self, step: Step) -> int:
        assert isinstance(step, Set | Wait)
        at = int(step.at) if isinstance(step, Set) else self.owner.rank
        return self.owner.words.address(at) + 8 * (self.owner.layout.counters[step.signal] + int(step.index))

    def _item_bytes(self, region: Region) -> int:
        return ITEM_BYTES[self.owner.buffers[region.buffer].dtype]

    def _place(self, region: Region) -> tuple[int, int, int]:
        """(number of its base address, bytes from there, bytes from row to row)."""
        buffer, item = self.owner.buffers[region.buffer], self._item_bytes(region)
        offset = (int(region.row) * buffer.cols + int(region.col)) * item
        if buffer.role == "symmetric":
            return self._regions + int(region.at), self.owner.layout.buffers[buffer.name] + offset, buffer.cols * item
        return self._base[buffer.name], offset, buffer.cols * item

    def _view(self, region: Region) -> Callable[[Tensors], torch.Tensor]:
        buffer = self.owner.buffers[region.buffer]
        row, rows, col, cols = int(region.row), int(region.rows), int(region.col), int(region.cols)
        if buffer.name in self.owner.own:
            fixed = self.owner.own[buffer.name][row : row + rows, col : col + cols]
            return lambda tensors: fixed
        name = buffer.name
        if (rows, cols) == (buffer.rows, buffer.cols):
            return lambda tensors: tensors[name]
        if cols == buffer.cols:
            return lambda tensors: tensors[name].narrow(0, row, rows)
        return lambda tensors: tensors[name][row : row + rows, col : col + cols]

    def _compute(self, step: Compute) -> Callable[[Tensors], None]:
        out, inputs = self._view(step.out), [self._view(region) for region in step.inputs]
        if step.op == "matmul":
            a, b = inputs
            if step.accumulate:
                return lambda t: void(out(t).addmm_(a(t), b(t)))
            return lambda t: void(torch.mm(a(t), b(t), out=out(t)))
        if step.op in SCALED_MATMULS and not step.accumulate:
            fast = step.op == "scaled_matmul_fast"
            return lambda t: scaled_matmul(*(x(t) for x in inputs), fast=fast, out=out(t))
        if step.op not in _ELEMENTWISE or step.accumulate:
            raise ScheduleError(f"streams cannot run {step}; they know matmul and {', '.join(_ELEMENTWISE)}")
        op = _ELEMENTWISE[step.op]
        return lambda t: void(op(*(x(t) for x in inputs), out=out(t)))

    def _collective(self, step: Collective) -> Callable[[Tensors], None]:
        if step.op != "all_gather":
            raise ScheduleError(f"streams cannot run {step}; they know all_gather")
        src, dst, group = self._view(step.src), self._view(step.dst), self.owner.domain.group
        schedule = self.owner.schedule
        nth = self._collectives(schedule, self.owner.rank).index(step)
        sizes = [int(self._collectives(schedule, r)[nth].src.rows) for r in range(self.world)]
        if len(set(sizes)) == 1:
            return lambda t: void(all_gather_single(sendable(dst(t)), sendable(src(t)), group=group))
        return lambda t: void(dist.all_gather(list(sendable(dst(t)).split(sizes)), sendable(src(t)), group=group))

    @staticmethod
    def _collectives(schedule: Schedule, rank: int) -> list[Collective]:
        """In the order of lanes: the same places on all ranks."""
        return [s for lane in schedule.of_rank(rank) for s in lane.steps if isinstance(s, Collective)]


def _moves(group: _Group) -> bool:
    """Whether it is a launch that copies."""
    return any(isinstance(step, Copy) and step.by == "kernel" for step in group.steps)


def _whole(region: Region) -> Region:
    """Where its rows would begin if it were all of its buffer."""
    return replace(region, row=0, rows=0)


def void(_: Any) -> None:
    """The result of a call that is made for what it writes."""


def _bytes(region: Region, buffers: dict[str, Any]) -> int:
    return int(region.rows) * int(region.cols) * ITEM_BYTES[buffers[region.buffer].dtype]
