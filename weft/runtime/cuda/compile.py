"""The compiler of a rank's steps. Its result is the list of operations that the CPU issues in every run
(`weft.runtime.cuda.issue`):

- Native operations, which C++ enqueues (`_core.StreamProgram`): copies, signals, events, and launches of kernels. Addresses
  and numbers of rows are arguments of each run, so these operations serve calls of any size.
- Calls of torch and NCCL (`weft.runtime.cuda.calls`).
- Steps of dynamic size (`weft.runtime.cuda.sizes`).

Each lane is a stream. `weft.runtime.cuda.stream_signals` describes the signals between streams and between ranks. A run with
collectives on several hosts also writes a mark to memory, which it removes when it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import singledispatch

from weft import _core
from weft.errors import ScheduleError
from weft.runtime.cuda.add_up import Address, AddUp, SumNorm
from weft.runtime.cuda.agree import Agreeing
from weft.runtime.cuda.calls import collective_call, compute_call
from weft.runtime.cuda.context import Context, Tensors
from weft.runtime.cuda.copy_kernels import CopyKernels
from weft.runtime.cuda.issue import StreamItems
from weft.runtime.cuda.kernel_call import Base
from weft.runtime.cuda.regions import Regions
from weft.runtime.cuda.scratch import Scratch
from weft.runtime.cuda.sizes import DynamicCopy, HostRead, ReadAhead, is_dynamic
from weft.runtime.cuda.stream_signals import StreamSignals
from weft.runtime.cuda.tile_kernels import TilesLane, tiles_call
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import Agree, Collective, Compute, Copy, Read, Reduce, Region, Set, Step, Tiles, Wait
from weft.schedule.launches import Launch, launches_of_rank
from weft.schedule.spans import span_name
from weft.schedule.steps import of_kind

COLLECTS_AT = 16  # byte offset of the third number of `Context.begun_word`


def compile_streams(context: Context, timed: bool, tensors: Tensors | None = None) -> StreamItems:
    """Compile the rank's steps. This loads kernels, so no stream may wait for a peer meanwhile.

    timed: True if each run must record time stamps of its steps.
    tensors: the tensors of a run. The result serves only runs whose tensors have the same strides. Where the schedule
        leaves a number of rows open, runs may differ in this number. With None, Python launches each tile kernel.
    """
    return Compiler(context, timed, tensors).compile()


class Compiler:
    """The compiler of one rank's schedule. `emit` adds the operations of each step to it.

    program: the native operations. items: the list of all operations. signals: the operations for signals. kernels: the launches of
        copy kernels.
    ahead: for each lane that reads dynamic sizes with by="meanwhile", the operation of this `Read` step.
    scratch: memory for partial sums of GEMMs, by lane.
    scratch_at: the index in `Regions.bases` of the address of the first lane's memory. The addresses for the other lanes
        follow.
    tensors: as for `compile_streams`.
    """

    def __init__(self, context: Context, timed: bool, tensors: Tensors | None = None) -> None:
        self.context, self.tensors = context, tensors
        self.regions = regions = Regions(context)
        self.ahead: dict[int, ReadAhead] = {}
        self.scratch: defaultdict[int, Scratch] = defaultdict(Scratch)
        lanes = len(context.lanes)
        awaited = {flag.key for flag in context.flags[context.rank].values()}
        self._launches = launches_of_rank(
            context.schedule, context.rank, context.lanes, context.order, awaited, context.buffers
        )
        self.scratch_at = len(regions.bases)
        regions.bases += [0] * lanes
        self.program = _core.StreamProgram(len(regions.bases), lanes + 1, 2 * lanes + len(context.order) + 4)
        self.items = StreamItems(context, self.program, regions, timed)
        self.signals = StreamSignals(context, regions, self.program, self._launches)
        self.kernels = CopyKernels(context, regions, self.items, self.signals)

    def compile(self) -> StreamItems:
        program, signals, lanes = self.program, self.signals, len(self.context.lanes)
        joints = [signals.event() for _ in range(lanes)]
        last = {launch.lane: launch for launch in self._launches}
        collects = self.context.own_group is not None and any(step.meets for _, step in self.context.order)
        begun = self.regions.begun
        if collects:
            program.signal(0, [(False, begun, 0, 1), (False, begun, COLLECTS_AT, 1)])
        if lanes > 1 or signals.monitored:
            signals.fork([*range(1, lanes), *([signals.monitor] if signals.monitored else [])])
        if signals.monitored:
            signals.begin()
        for launch in self._launches:
            self._emit(launch)
            if launch.lane and launch is last[launch.lane]:
                program.record(launch.lane, joints[launch.lane])
        for lane in range(1, lanes):
            if lane in last:
                program.wait_event(0, joints[lane])
        if collects:
            program.signal(0, [(False, begun, COLLECTS_AT, 0)])
        if signals.monitored:
            signals.end()
        for lane, scratch in self.scratch.items():
            self.regions.bases[self.scratch_at + lane] = scratch.memory.data_ptr()
        self.items.flush()
        if signals.has_aside:
            joint = signals.event()
            self.items.joining = (program.record(signals.monitor, joint), program.wait_event(0, joint) + 1)
        return self.items

    def _emit(self, launch: Launch) -> None:
        stamps, first = self.items.stamps, len(self.items.spans)
        if stamps is not None:
            self.items.stamp(launch.lane, 2 * first)
        copies = of_kind(launch.body, Copy)
        if launch.trip:
            self.kernels.launch_round_trip(launch, launch.trip)
        elif launch.read:
            self.kernels.read_sizes(launch.lane, launch.read, self.kernels.tables(copies))
        elif launch.copies:
            self.kernels.launch(launch, copies)
        else:
            emit(launch.steps[0], self, launch)
        if stamps is not None:
            rank = self.context.rank
            crossing = [c for c in copies if {c.src.at, c.dst.at} != {rank} and not is_dynamic(c)]
            sent = sum(int(c.dst.rows) * self.regions.row_bytes(c.dst) for c in crossing)
            text = "; ".join(span_name(s, rank) for s in launch.steps)
            self.items.spans.append((self.context.lanes[launch.lane], text, sent))
            self.items.stamp(launch.lane, 2 * first + 1)


@singledispatch
def emit(step: Step, compiler: Compiler, launch: Launch) -> None:
    """Add the operations of `step`, the first step of `launch`, to `compiler`.

    To run a new kind of step on GPUs, register a function with `emit.register`. `CopyKernels.launch` adds copies by kernel,
    with the signals around them.

    Before the first run, `StreamItems.warm_up` makes each call of torch or NCCL once, to load its kernel. If a call writes
    to a peer's memory, define `Operation.aside`: a call that loads the kernel without this write.
    """
    raise AssertionError(f"a check should have refused {step}")


@emit.register
def _copy(step: Copy, compiler: Compiler, launch: Launch) -> None:
    regions, lane = compiler.regions, launch.lane
    if is_dynamic(step):
        copy = DynamicCopy(compiler.context, step, regions.origin(step.src), regions.origin(step.dst))
        compiler.items.dynamic(lane, copy)
        return
    (dst, to, to_pitch), (src, at, pitch) = regions.place(step.dst), regions.place(step.src)
    width = regions.row_bytes(step.src)
    compiler.program.copy(lane, dst, to, to_pitch, src, at, pitch, width, int(step.src.rows))


@emit.register
def _compute(step: Compute, compiler: Compiler, launch: Launch) -> None:
    compiler.items.call(launch.lane, compute_call(step, compiler.regions))


@emit.register
def _reduce(step: Reduce, compiler: Compiler, launch: Launch) -> None:
    """Add the launch of a reduction."""
    regions, context = compiler.regions, compiler.context

    def place(region: Region) -> Address:
        base, offset, pitch = regions.place(region)
        return Address(base, offset, 0 if region.rows == 1 and step.out.rows != 1 else pitch)

    parts = [place(part) for part in ((step.out, *step.parts) if step.accumulate else step.parts)]
    size, dtype = (int(step.out.rows), int(step.out.cols)), TORCH_DTYPE[context.buffers[step.out.buffer].dtype]
    norm = None if step.norm is None else SumNorm(place(step.norm.out), place(step.norm.weight), step.norm.eps)
    add_up = AddUp(context.device, dtype, size, place(step.out), parts, fixed=regions.bases, norm=norm)
    compiler.items.kept.append(add_up)
    if not add_up.record(compiler.program, launch.lane):
        compiler.items.launch(launch.lane, add_up.launch)


@emit.register
def _collective(step: Collective, compiler: Compiler, launch: Launch) -> None:
    compiler.items.call(launch.lane, collective_call(step, compiler.regions, compiler.context))


@emit.register
def _agree(step: Agree, compiler: Compiler, launch: Launch) -> None:
    regions, buffer = compiler.regions, compiler.context.buffers[step.out.buffer]
    expected, sent = (regions.own_part(region) for region in (step.expected, step.sent))
    call = Agreeing(
        expected, sent, compiler.context.differs_at, int(step.row), buffer.cols, regions.item_bytes(step.out)
    )
    base, offset, _ = regions.origin(step.out)
    compiler.items.kept.append(call)
    if call.record(compiler.program, launch.lane, Base(base, offset), regions.rows(buffer.name)):
        return

    def issue(tensors: Tensors, bases: list[int]) -> None:
        call.launch(bases[base] + offset, tensors[buffer.name].shape[0])

    compiler.items.dynamic(launch.lane, issue)


@emit.register(Set)
@emit.register(Wait)
def _signal(step: Set | Wait, compiler: Compiler, launch: Launch) -> None:
    if compiler.signals.crosses(step):
        compiler.signals.between_ranks(launch)
    else:
        compiler.signals.between_lanes(launch.lane, step)


@emit.register
def _read(step: Read, compiler: Compiler, launch: Launch) -> None:
    """Add the operations of a `Read` step, which reads dynamic sizes. If the lane has copies by kernel, a kernel computes their
    first rows and numbers of rows on the device. Except with by="device", the CPU reads the sizes too.
    """
    context, lane, buffer = compiler.context, launch.lane, step.region.buffer
    if buffer not in context.own:
        raise ScheduleError(
            f"{step}: streams read sizes only from scratch or symmetric buffers: copy {buffer} to one first"
        )
    if step.by in ("host", "known"):
        compiler.items.dynamic(lane, HostRead(context, buffer, compiler.regions.rows_at))
    if step.by == "meanwhile":
        compiler.ahead[lane] = ReadAhead(context, buffer, compiler.regions.rows_at)
        compiler.items.dynamic(lane, compiler.ahead[lane].begin)
    compiler.kernels.read_sizes(lane, step)


@emit.register
def _tiles(step: Tiles, compiler: Compiler, launch: Launch) -> None:
    context, lane = compiler.context, launch.lane
    about = TilesLane(
        context, compiler.regions, context.lanes[lane], compiler.scratch[lane], compiler.scratch_at + lane, compiler.kernels.sizes,
        compiler.signals.addresses_set,
    )  # fmt: skip
    items, call = compiler.items, tiles_call(step.kernel, step, about)
    issue: Callable[[Tensors, list[int]], None] = call
    if compiler.tensors is not None and call.record(compiler.program, lane, compiler.tensors):
        items.kept.append(call)
        issue = items.recorded_last()
    else:
        items.prepares.append(call.prepare)
        items.dynamic(lane, call)
    if (ahead := compiler.ahead.get(lane)) and call.writes_outputs:
        ahead.gemms.append(issue)
        if about.is_last(step):
            compiler.items.dynamic(lane, ahead.settle)
