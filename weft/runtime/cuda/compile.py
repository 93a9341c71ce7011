"""The compiler of a rank's steps. Its result is the list of operations that the CPU issues in every run
(`weft.runtime.cuda.issue`):

- Native operations, which C++ enqueues (`_core.StreamProgram`): copies, signals, events, and launches of kernels. Addresses
  and numbers of rows are arguments of each run, so these operations serve calls of any size.
- Calls of torch and NCCL (`weft.runtime.cuda.calls`).
- Steps of dynamic size (`weft.runtime.cuda.sizes`).

Each lane is a stream. A signal between lanes of one rank is an event. A lane need not wait for a signal of the previous run
from its own rank: a run begins after the previous run of its rank has ended.

A signal between ranks is a flag that one stream writes, and for which another stream waits. These operations are the same
in every run (`weft.runtime.cuda.flags`), so that a CUDA graph can capture them. A copy by kernel includes the signals
around it.

A compute lane does not write signals to peers itself, because a write takes microseconds, and its next kernel would wait
for it. A separate stream, the monitor, writes them. Each run also writes a mark to memory when it begins, for the thread
that watches deadlines (`weft.runtime.cuda.watch`). A run with collectives on several hosts writes another mark, which it
removes when it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any, TypeAlias

from weft import _core
from weft.errors import ScheduleError
from weft.runtime.cuda.add_up import Address, AddUp, SumNorm
from weft.runtime.cuda.agree import Agreeing
from weft.runtime.cuda.calls import collective_call, compute_call
from weft.runtime.cuda.context import Context, Tensors
from weft.runtime.cuda.flags import AWAITED, FLAG, Flag, Key, words_for
from weft.runtime.cuda.issue import StreamItems
from weft.runtime.cuda.kernel_call import Base
from weft.runtime.cuda.move import CopyLaunch, CopyShape, Part
from weft.runtime.cuda.regions import Regions
from weft.runtime.cuda.round_trip import RoundTripLaunch, RowRange
from weft.runtime.cuda.scratch import Scratch
from weft.runtime.cuda.sizes import DynamicCopy, HostRead, ReadAhead, Totals, is_dynamic
from weft.runtime.cuda.tile_kernels import TilesLane, permuted, tiles_call
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import Agree, Collective, Compute, Copy, Read, Reduce, Region, Set, Step, Tiles, Wait
from weft.schedule.kernels import Permute
from weft.schedule.launches import Launch, RoundTrip, crosses, launches_of_rank
from weft.schedule.spans import span_name
from weft.schedule.steps import of_kind, substitute

SignalPart: TypeAlias = tuple[bool, int, int, int]
"""A stream operation on one flag: (True to wait for a value and False to write it, number of the base address, offset
in bytes, value). `_core.StreamProgram` issues several of them as one operation.
"""
COLLECTS_AT = 16  # byte offset of the third number of `Context.begun_word`
_MANY = 1 << 31  # rows assumed for a caller's tensor whose number of rows is known only at run time


def compile_streams(context: Context, timed: bool, tensors: Tensors | None = None) -> StreamItems:
    """Compile the rank's steps. This loads kernels, so no stream may wait for a peer meanwhile.

    timed: True if each run must record time stamps of its steps.
    tensors: the tensors of a run. The result serves only runs whose tensors have the same strides. Where the schedule
        leaves a number of rows open, runs may differ in this number. With None, Python launches each tile kernel.
    """
    return Compiler(context, timed, tensors).compile()


class Compiler:
    """The compiler of one rank's schedule. `emit` adds the operations of each step to it.

    program: the native operations. items: the list of all operations.
    sizes: for each step of dynamic size (by its `id`), the device address of its sizes. A copy by kernel has three sizes:
        first source row, first target row, and number of rows. A `Permute` step has these three sizes for each of its copies.
    ahead: for each lane that reads dynamic sizes with by="meanwhile", the operation of this `Read` step.
    scratch: memory for partial sums of GEMMs, by lane. scratch_at: the index in `Regions.bases` of the address of the first lane's
        memory. The addresses for the other lanes follow. tensors: as for `compile_streams`.
    """

    def __init__(self, context: Context, timed: bool, tensors: Tensors | None = None) -> None:
        self.context, self.tensors = context, tensors
        self.regions = regions = Regions(context)
        self._place, self._words, self._begun = regions.place, regions.words, regions.begun
        self._events = 0
        self._event_of: dict[Key, int] = {}
        self.ahead: dict[int, ReadAhead] = {}
        self.sizes: dict[int, int] = {}
        self.scratch: defaultdict[int, Scratch] = defaultdict(Scratch)
        lanes = len(context.lanes)
        resources = {lane.name: lane.resource for lane in context.schedule.lanes}
        self._computes = [resources[name] == "compute" for name in context.lanes]
        self._flags = context.flags[context.rank]
        self._words_of = [words_for(flags) for flags in context.flags]
        self._awaited = {flag.key for flag in self._flags.values()}
        self._launches = launches_of_rank(
            context.schedule, context.rank, context.lanes, context.order, self._awaited, context.buffers
        )
        # By lane, without its copy kernels, which clear their own flags: the indices of the steps whose signals the lane's
        # stream writes, and the flags that the lane waits for. Compute lanes are omitted. They clear their flags right after
        # the wait, because the monitor writes their signals, possibly after the lane's next wait.
        self._carriers: dict[str, set[int | None]] = {name: set() for name in context.lanes}
        self._of_stream: dict[str, list[Flag]] = {name: [] for name in context.lanes}
        for launch in self._launches:
            if not (launch.copies or self._computes[launch.lane]):
                self._carriers[context.lanes[launch.lane]] |= set(range(launch.first, launch.last + 1))
                self._of_stream[context.lanes[launch.lane]] += self._flags_in(launch)
        self._has_aside = False
        self.scratch_at = len(regions.bases)
        regions.bases += [0] * lanes
        self.program = _core.StreamProgram(len(regions.bases), lanes + 1, 2 * lanes + len(context.order) + 4)
        self.items = StreamItems(context, self.program, regions, timed)
        self._monitor = lanes

    def compile(self) -> StreamItems:
        program, lanes = self.program, len(self.context.lanes)
        joints = [self._event() for _ in range(lanes)]
        last = {launch.lane: launch for launch in self._launches}
        waiting = [launch for launch in self._launches if self._flags_in(launch)]
        # Choose what writes the two words for the watching thread: the mark of a run, and the standing word. If only kernels
        # on one stream wait, the first and the last of these kernels write both. Otherwise the wait of a suitable lane
        # writes the mark (`_tells`). If there is no such lane, the monitor writes both.
        self._noting = (waiting[0], waiting[-1]) if waiting and lanes == 1 and all(w.copies for w in waiting) else None
        self._telling = next((launch for launch in waiting if self._tells(launch)), None)
        monitored = bool(waiting) and not self._noting and not self._telling
        collects = self.context.own_group is not None and any(step.meets for _, step in self.context.order)
        if collects:
            program.signal(0, [(False, self._begun, 0, 1), (False, self._begun, COLLECTS_AT, 1)])
        if lanes > 1 or monitored:
            self._fork([*range(1, lanes), *([self._monitor] if monitored else [])])
        if monitored:
            program.signal(self._monitor, [self._note(self.context.standing_word, 1), (False, self._begun, 0, 1)])
        for launch in self._launches:
            self._emit(launch)
            if launch.lane and launch is last[launch.lane]:
                program.record(launch.lane, joints[launch.lane])
        for lane in range(1, lanes):
            if lane in last:
                program.wait_event(0, joints[lane])
        if collects:
            program.signal(0, [(False, self._begun, COLLECTS_AT, 0)])
        if monitored:
            self._signal_aside(0, [self._note(self.context.standing_word, 0)])
        for lane, scratch in self.scratch.items():
            self.regions.bases[self.scratch_at + lane] = scratch.memory.data_ptr()
        self.items.flush()
        if self._has_aside:
            joint = self._event()
            self.items.joining = (program.record(self._monitor, joint), program.wait_event(0, joint) + 1)
        return self.items

    def _fork(self, others: list[int]) -> None:
        fork = self._event()
        self.program.record(0, fork)
        for stream in others:
            self.program.wait_event(stream, fork)

    def _event(self) -> int:
        self._events += 1
        return self._events - 1

    def _tells(self, launch: Launch) -> bool:
        """True if the stream operation with the waits of `launch` can also write a mark to memory. The mark shows the watching
        thread that a run has begun.

        Two conditions must hold:
        - The launch is the first of a copy lane, and waits only for flags of the previous run.
        - A later step of the lane clears one of these flags, and the lane has only copies between the launch and this step.
        """
        if self._computes[launch.lane] or launch.copies or launch.first:
            return False
        name = self.context.lanes[launch.lane]
        steps = [step for lane, step in self.context.order if lane == name]

        def soon(flag: Flag) -> bool:
            behind = steps[launch.last + 1 : flag.carrier] if flag.carrier in self._carriers[name] else []
            return flag.previous and all(step.copies_by for step in behind)

        # All waits of a stream operation precede its clears. A wait for this run would delay the clear.
        mine = self._flags_in(launch)
        return all(flag.previous for flag in mine) and any(soon(flag) for flag in mine)

    # --- emitting ---

    def _emit(self, launch: Launch) -> None:
        stamps, first = self.items.stamps, len(self.items.spans)
        if stamps is not None:
            self.items.stamp(launch.lane, 2 * first)
        copies = of_kind(launch.body, Copy)
        if launch.trip:
            self._launch_round_trip(launch, launch.trip)
        elif launch.read:
            self.read_sizes(launch.lane, launch.read, self._tables(copies))
        elif launch.copies:
            self._launch(launch, copies)
        else:
            emit(launch.steps[0], self, launch)
        if stamps is not None:
            rank = self.context.rank
            crossing = [c for c in copies if {c.src.at, c.dst.at} != {rank} and not is_dynamic(c)]
            sent = sum(int(c.dst.rows) * self.regions.row_bytes(c.dst) for c in crossing)
            text = "; ".join(span_name(s, rank) for s in launch.steps)
            self.items.spans.append((self.context.lanes[launch.lane], text, sent))
            self.items.stamp(launch.lane, 2 * first + 1)

    def crosses(self, step: Step) -> bool:
        """True if `step` is a signal between ranks."""
        return crosses(step, self.context.rank, self._awaited)

    def signal(self, lane: int, step: Set | Wait) -> None:
        """Add the stream operation for a signal between lanes of this rank: record an event for a `Set`, or let the stream wait
        for the event for a `Wait`.
        """
        key = (step.signal, int(step.index))
        if isinstance(step, Set):
            self._event_of[key] = self._event()
            self.program.record(lane, self._event_of[key])
        elif not step.previous:
            self.program.wait_event(lane, self._event_of[key])

    def signals(self, launch: Launch) -> None:
        """Add a stream operation for the waits or sets of `launch`, which are signals between ranks. The same stream operation
        also clears flags (`weft.runtime.cuda.flags` explains which).
        """
        name, parts = self.context.lanes[launch.lane], list[SignalPart]()
        mine = self._flags_in(launch)
        if launch is self._telling:
            parts.append((False, self._begun, 0, 1))
        if mine:
            taken = [flag for flag in mine if flag.carrier not in self._carriers[name]]
            parts += [(True, self._words + self.context.rank, 8 * flag.word, AWAITED) for flag in mine]
        else:
            places = range(launch.first, launch.last + 1)
            taken = [t for t in self._of_stream[name] if t.carrier in places]
        parts += [self._note(flag.word, 0) for flag in taken]
        parts += [
            (False, self._words + int(at), 8 * word, FLAG)
            for step in launch.sets
            for at, signal, index in step.sets()
            for word in self._words_of[int(at)].get((signal, int(index)), [])
        ]
        if not parts:
            return  # no rank waits for this signal
        if self._computes[launch.lane] and not mine:
            # A write to a peer takes microseconds, and kernels need not wait for it, so write on the monitor.
            self._signal_aside(launch.lane, parts)
        else:
            self.program.signal(launch.lane, parts)

    def _signal_aside(self, lane: int, parts: list[SignalPart]) -> None:
        event = self._event()
        self.program.record(lane, event)
        self.program.wait_event(self._monitor, event)
        self.program.signal(self._monitor, parts)
        self._has_aside = True

    def _note(self, word: int, number: int) -> SignalPart:
        """Return the part of a stream operation that writes `number` to one of this rank's signal words. word: the index of the
        signal word.
        """
        return (False, self._words + self.context.rank, 8 * word, number)

    def addresses_set(self, at: int, signal: str, index: int) -> list[int]:
        """Return the addresses of the flag words that a `Set` of `signal[index]` writes in the memory of rank `at`."""
        return [self.context.words.address(at) + 8 * word for word in self._words_of[at].get((signal, index), [])]

    def _flags_in(self, launch: Launch) -> list[Flag]:
        name = self.context.lanes[launch.lane]
        found = [self._flags.get((name, at)) for at in range(launch.first, launch.last + 1)]
        return [flag for flag in found if flag is not None]

    def _launch(self, launch: Launch, copies: list[Copy]) -> None:
        """Add the launch of one kernel that runs several steps: it sets signals and waits, then copies, then sets signals and
        waits again.
        """
        context = self.context
        signals: dict[str, Any] = {
            "sets_before": self._addresses_of(launch.sets_before), "sets": self._addresses_of(launch.sets),
            **self._waits_and_notes(launch), "early": context.buffers[copies[0].src.buffer].role == "input",
            "adds": context.buffers[copies[0].dst.buffer].dtype if copies[0].accumulate else "",
        }  # fmt: skip
        if is_dynamic(copies[0]):
            self._launch_dynamic(launch, copies, signals)
            return
        source, target = self._place(copies[0].src), self._place(copies[0].dst)
        width = self.regions.row_bytes(copies[0].src)
        shape = CopyShape(int(copies[0].src.rows), width, source[2], target[2])
        targets, parts = self._more(copies)
        if source[2] == target[2] == width:  # without gaps: use one long row, because each row needs separate blocks
            shape = CopyShape(1, *(shape.rows * width,) * 3)
        move = CopyLaunch(context.device, shape=shape, targets=targets, parts=parts, **signals)
        self.items.kept.append(move)
        if move.record(self.program, launch.lane, Base(*source[:2]), Base(*target[:2])):
            return

        def issue(bases: list[int], stream: int) -> None:
            move.launch(bases[source[0]] + source[1], bases[target[0]] + target[1], stream=stream)

        self.items.launch(launch.lane, issue)

    def _addresses_of(self, sets: Sequence[Step]) -> list[int]:
        """Return the addresses of all flag words that the steps `sets` write."""
        counters = [counter for step in sets for counter in step.sets()]
        return [a for at, signal, index in counters for a in self.addresses_set(int(at), signal, int(index))]

    def _waits_and_notes(self, launch: Launch) -> dict[str, Any]:
        """Return arguments of a kernel that runs `launch`: the addresses of the flags for which the kernel waits, and the numbers
        that it stores for the thread that watches deadlines.
        """
        context = self.context
        own = context.words.address(context.rank)
        mine = self._flags_in(launch)
        before, after = mine[: len(launch.waits)], mine[len(launch.waits) :]
        standing = own + 8 * context.standing_word
        begins, passes, ends = list[tuple[int, int]](), list[tuple[int, int]](), list[tuple[int, int]]()
        if self._noting:
            begins = [(standing, 1), (context.begun_word.data_ptr(), 1)] if launch is self._noting[0] else []
            passes = [(standing, 1 + before[-1].passed)] if before else []
            ends = [(standing, 0)] if launch is self._noting[1] else []
        return {
            "waits": [own + 8 * flag.word for flag in before], "waits_after": [own + 8 * flag.word for flag in after],
            "begins": begins, "passes": passes, "ends": ends,
        }  # fmt: skip

    def _launch_round_trip(self, launch: Launch, trip: RoundTrip) -> None:
        """Add the launch of one kernel that runs an exchange of rows."""
        context, regions, agree, buffers = self.context, self.regions, trip.agree, self.context.buffers

        def address(region: Region) -> int:
            base, offset, _ = self._place(_whole(region))
            return 0 if buffers[region.buffer].role == "output" else regions.bases[base] + offset

        def row_range(copy: Copy) -> RowRange:
            of_src, of_dst = (buffers[region.buffer].rows for region in (copy.src, copy.dst))
            return RowRange(address(copy.src), int(of_src), address(copy.dst), of_dst if isinstance(of_dst, int) else 0)

        sizes = [self.sizes[id(copy)] for copy in trip.copies]
        assert sizes == list(range(sizes[0], sizes[0] + 24 * len(sizes), 24)), (
            "sizes of an exchange must be consecutive"
        )
        places = {int(copy.dst.at): self._place(copy.dst) for copy in trip.table}
        assert sorted(places) == list(range(context.comm.world_size)), "an exchange must send its table to all ranks"
        call = RoundTripLaunch(
            context.device,
            sends=[row_range(copy) for copy in trip.sends],
            own=[row_range(copy) for copy in trip.own],
            places=[row_range(copy) for copy in trip.places],
            sizes=sizes[0],
            row_bytes=regions.row_bytes(trip.sends[0].src),
            table=regions.own_part(trip.table[0].src),
            targets=[regions.bases[base] + offset for _, (base, offset, _) in sorted(places.items())],
            expected=regions.own_part(agree.expected),
            sent=regions.own_part(agree.sent),
            differs_at=context.differs_at,
            row=int(agree.row),
            item_bytes=regions.item_bytes(agree.out),
            sets=self._addresses_of(trip.sets),
            sets_after=self._addresses_of(trip.sets_after),
            expected_rows=max(self._expected_rows(copies) for copies in (trip.sends, trip.own, trip.places)),
            **self._waits_and_notes(launch),
        )
        base, offset, _ = self._place(_whole(agree.out))
        self.items.kept.append(call)
        if call.record(self.program, launch.lane, Base(base, offset), regions.rows(agree.out.buffer)):
            return

        def issue(tensors: Tensors, bases: list[int]) -> None:
            call.launch(bases[base] + offset, tensors[agree.out.buffer].shape[0])

        self.items.dynamic(launch.lane, issue)

    def _expected_rows(self, copies: Sequence[Copy]) -> int:
        rank, contents = self.context.rank, self.context.schedule.contents
        known = {held.buffer: held.expected[rank] for held in contents}
        return sum(int(substitute(copy.src.rows, known)) for copy in copies)

    def read_sizes(self, lane: int, read: Read, tables: Sequence[tuple[Base, int]] = ()) -> None:
        """Add the launch of a kernel that computes the sizes of the lane's copies by kernel from the buffer of `read`. It adds
        nothing if the lane has no such copies, unless it must fill the buffer.

        tables: the caller's tables with which the launch fills the buffer; none if the buffer is already filled.
        """
        context, name, buffer = self.context, self.context.lanes[lane], read.region.buffer
        order = [step for lane_of, step in context.order if lane_of == name]
        copies = of_kind((step for step in order if step.copies_by == "kernel"), Copy)
        copies = [copy for copy in copies if is_dynamic(copy) and id(copy) not in self.sizes]
        sized = {id(copy): [copy] for copy in copies}
        for permute in order:
            if isinstance(permute.tile_kernel, Permute) and id(permute) not in self.sizes:
                sized[id(permute)] = permuted(permute)
        if not sized and not tables:
            return
        copies = [copy for some in sized.values() for copy in some]
        numbers = [n for copy in copies for n in (copy.src.row, copy.dst.row, copy.src.rows)]
        totals = Totals(context.own[buffer], numbers or [0], tables)
        first = 0
        for key, some in sized.items():
            self.sizes[key] = totals.address(3 * first)
            first += len(some)
        self.items.kept.append(totals)
        if not totals.record(self.program, lane):
            self.items.launch(lane, totals.launch)

    def _tables(self, copies: list[Copy]) -> list[tuple[Base, int]]:
        """Return (address, number of elements) of the caller's tables that `copies` read."""
        return [(Base(*self._place(c.src)[:2]), int(c.src.rows) * int(c.src.cols)) for c in copies]

    def _more(self, copies: list[Copy]) -> tuple[list[int], list[Part]]:
        """Return the arguments `targets` and `parts` of `CopyLaunch`. They describe all `copies` of a launch except the first.

        If all copies have the same source of fixed size, they are `targets`, and `parts` is empty. Otherwise they are
        `parts`, and `targets` is empty.
        """
        dynamic = is_dynamic(copies[0])
        regions = [(_whole(c.src), _whole(c.dst)) if dynamic else (c.src, c.dst) for c in copies]
        ((_, at, _), (dst, to, _)), *others = [(self._place(src), self._place(dst)) for src, dst in regions]
        targets = [self.regions.bases[base] + offset for _, (base, offset, _) in others]
        if not dynamic and all(copy.src == copies[0].src for copy in copies):
            return targets, []
        parts = []
        for copy, target, ((_, source, _), (base, offset, _)) in zip(copies[1:], targets, others, strict=True):
            place = (offset - to, True) if base == dst else (target, False)
            parts.append(Part(source - at, *place, self.sizes[id(copy)] if dynamic else 0))
        return [], parts

    def _launch_dynamic(self, launch: Launch, copies: list[Copy], signals: dict[str, Any]) -> None:
        copy = copies[0]
        (dst, to, to_pitch), (src, at, pitch) = self._place(_whole(copy.dst)), self._place(_whole(copy.src))
        of_src, of_dst = (self.context.buffers[region.buffer] for region in (copy.src, copy.dst))
        most = of_dst.rows if isinstance(of_dst.rows, int) else _MANY
        move = CopyLaunch(
            self.context.device,
            shape=CopyShape(most, self.regions.row_bytes(copy.src), pitch, to_pitch),
            sizes=self.sizes[id(copy)],
            parts=self._more(copies)[1],
            programs=launch.units,
            **signals,
        )

        self.items.kept.append(move)
        places = Base(src, at), Base(dst, to), self.regions.rows(of_src.name), self.regions.rows(of_dst.name)
        if move.record(self.program, launch.lane, *places):
            return

        def issue(tensors: Tensors, bases: list[int]) -> None:
            rows = [b.rows if isinstance(b.rows, int) else tensors[b.name].shape[0] for b in (of_src, of_dst)]
            move.launch(bases[src] + at, bases[dst] + to, *rows)

        self.items.dynamic(launch.lane, issue)


def _whole(region: Region) -> Region:
    """Return a region with no rows that begins at row 0 and has the columns of `region`. It stands for a region with dynamic
    rows, because its address is known when the schedule is compiled.
    """
    return replace(region, row=0, rows=0)


@singledispatch
def emit(step: Step, compiler: Compiler, launch: Launch) -> None:
    """Add the operations of `step`, the first step of `launch`, to `compiler`.

    To run a new kind of step on GPUs, register a function with `emit.register`. `Compiler._launch` adds copies by kernel,
    with the signals around them.

    Before the first run, `StreamItems.warm_up` makes each call of torch or NCCL once, to load its kernel. If a call writes
    to a peer's memory, define `Operation.aside`: a call that loads the kernel without this write.
    """
    raise AssertionError(f"a check should have refused {step}")


@emit.register
def _copy(step: Copy, compiler: Compiler, launch: Launch) -> None:
    place, lane = compiler.regions.place, launch.lane
    if is_dynamic(step):
        compiler.items.dynamic(
            lane, DynamicCopy(compiler.context, step, place(_whole(step.src)), place(_whole(step.dst)))
        )
        return
    (dst, to, to_pitch), (src, at, pitch) = place(step.dst), place(step.src)
    width = compiler.regions.row_bytes(step.src)
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
    base, offset, _ = regions.place(_whole(step.out))
    compiler.items.kept.append(call)
    if call.record(compiler.program, launch.lane, Base(base, offset), regions.rows(buffer.name)):
        return

    def issue(tensors: Tensors, bases: list[int]) -> None:
        call.launch(bases[base] + offset, tensors[buffer.name].shape[0])

    compiler.items.dynamic(launch.lane, issue)


@emit.register(Set)
@emit.register(Wait)
def _signal(step: Set | Wait, compiler: Compiler, launch: Launch) -> None:
    if compiler.crosses(step):
        compiler.signals(launch)
    else:
        compiler.signal(launch.lane, step)


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
    compiler.read_sizes(lane, step)


@emit.register
def _tiles(step: Tiles, compiler: Compiler, launch: Launch) -> None:
    context, lane = compiler.context, launch.lane
    about = TilesLane(
        context, compiler.regions, context.lanes[lane], compiler.scratch[lane], compiler.scratch_at + lane, compiler.sizes,
        compiler.addresses_set,
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
