"""Launches of kernels that copy rows between ranks, with the signals around them.

One launch runs several steps of a lane: it sets signals and waits, copies, then sets signals and waits again
(`weft.schedule.launches`). Sizes known only at run time are computed on the device: `read_sizes` adds the kernel that computes
them, and copies read them from its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.runtime.cuda.context import Context, Tensors
from weft.runtime.cuda.issue import StreamItems
from weft.runtime.cuda.kernel_call import Base
from weft.runtime.cuda.move import CopyLaunch, CopyShape, Part
from weft.runtime.cuda.regions import Regions
from weft.runtime.cuda.round_trip import Compared, RoundTripLaunch, RowRange
from weft.runtime.cuda.sizes import Totals, is_dynamic
from weft.runtime.cuda.stream_signals import StreamSignals
from weft.runtime.cuda.tile_kernels import permuted
from weft.schedule import Copy, Read, Region
from weft.schedule.kernels import Permute
from weft.schedule.launches import Launch, RoundTrip
from weft.schedule.steps import of_kind, substitute, variables_of

_MANY = 1 << 31  # rows assumed for a caller's tensor whose number of rows is known only at run time


class CopyKernels:
    """The copy kernels of one rank's schedule. Methods add launches to `items`.

    sizes: for each step of dynamic size (by its `id`), the device address of its sizes. A copy by kernel has three sizes:
        first source row, first target row, and number of rows. A `Permute` step has these three sizes for each of its copies.
    """

    def __init__(self, context: Context, regions: Regions, items: StreamItems, signals: StreamSignals) -> None:
        self._context, self._regions, self._items, self._signals = context, regions, items, signals
        self._program = items.program
        self.sizes: dict[int, int] = {}

    def launch(self, launch: Launch, copies: list[Copy]) -> None:
        """Add the launch of one kernel that runs several steps: it sets signals and waits, then copies, then sets signals and
        waits again.
        """
        context, regions, signals = self._context, self._regions, self._signals
        around: dict[str, Any] = {
            "sets_before": signals.addresses_of(launch.sets_before), "sets": signals.addresses_of(launch.sets),
            **signals.kernel_arguments(launch), "early": context.buffers[copies[0].src.buffer].role == "input",
            "adds": context.buffers[copies[0].dst.buffer].dtype if copies[0].accumulate else "",
        }  # fmt: skip
        if is_dynamic(copies[0]):
            self._launch_dynamic(launch, copies, around)
            return
        source, target = regions.place(copies[0].src), regions.place(copies[0].dst)
        width = regions.row_bytes(copies[0].src)
        shape = CopyShape(int(copies[0].src.rows), width, source[2], target[2])
        targets, parts = self._more(copies)
        if source[2] == target[2] == width:  # without gaps: use one long row, because each row needs separate blocks
            shape = CopyShape(1, *(shape.rows * width,) * 3)
        move = CopyLaunch(context.device, shape=shape, targets=targets, parts=parts, **around)
        self._items.kept.append(move)
        if move.record(self._program, launch.lane, Base(*source[:2]), Base(*target[:2])):
            return

        def issue(bases: list[int], stream: int) -> None:
            move.launch(bases[source[0]] + source[1], bases[target[0]] + target[1], stream=stream)

        self._items.launch(launch.lane, issue)

    def launch_round_trip(self, launch: Launch, trip: RoundTrip) -> None:
        """Add the launch of one kernel that runs an exchange of rows."""
        context, regions, buffers = self._context, self._regions, self._context.buffers
        callers = (copy.src for copy in trip.sends if buffers[copy.src.buffer].role == "input")
        caller = trip.agree.out if trip.agree else next(callers)

        def place(region: Region) -> tuple[int, int]:
            """Return the address and the number of rows of a region's buffer; zeros for the caller's tensor."""
            base, offset, _ = regions.origin(region)
            rows = buffers[region.buffer].rows
            return (0, 0) if region.buffer == caller.buffer else (regions.bases[base] + offset, int(rows))

        def row_range(copy: Copy) -> RowRange:
            return RowRange(*place(copy.src), *place(copy.dst))

        sizes = [self.sizes[id(copy)] for copy in trip.copies]
        assert sizes == list(range(sizes[0], sizes[0] + 24 * len(sizes), 24)), (
            "sizes of an exchange must be consecutive"
        )
        places = {int(copy.dst.at): regions.place(copy.dst) for copy in trip.table}
        assert sorted(places) == list(range(context.comm.world_size)), "an exchange must send its table to all ranks"
        tables = None
        if (agree := trip.agree) is not None:
            tables = Compared(regions.own_part(agree.expected), regions.own_part(agree.sent), int(agree.row))
        call = RoundTripLaunch(
            context.device,
            sends=[row_range(copy) for copy in trip.sends],
            own=[row_range(copy) for copy in trip.own],
            places=[row_range(copy) for copy in trip.places],
            sizes=sizes[0],
            row_bytes=regions.row_bytes(trip.sends[0].src),
            table=regions.own_part(trip.table[0].src),
            targets=[regions.bases[base] + offset for _, (base, offset, _) in sorted(places.items())],
            compared=tables,
            lost=None if tables else context.own[trip.table[0].dst.buffer],
            differs_at=context.differs_at,
            item_bytes=regions.item_bytes(trip.sends[0].src),
            sets=self._signals.addresses_of(trip.sets),
            sets_after=self._signals.addresses_of(trip.sets_after),
            expected_rows=max(self._expected_rows(copies) for copies in (trip.sends, trip.own, trip.places)),
            **self._signals.kernel_arguments(launch),
        )
        base, offset, _ = regions.origin(caller)
        self._items.kept.append(call)
        if call.record(self._program, launch.lane, Base(base, offset), regions.rows(caller.buffer)):
            return

        def issue(tensors: Tensors, bases: list[int]) -> None:
            call.launch(bases[base] + offset, tensors[caller.buffer].shape[0])

        self._items.dynamic(launch.lane, issue)

    def _expected_rows(self, copies: Sequence[Copy]) -> int:
        rank, contents = self._context.rank, self._context.schedule.contents
        known = {held.buffer: held.expected[rank] for held in contents}
        return sum(int(substitute(copy.src.rows, known)) for copy in copies)

    def read_sizes(self, lane: int, read: Read, tables: Sequence[tuple[Base, int]] = ()) -> None:
        """Add the launch of a kernel that computes the sizes of the lane's copies by kernel from the buffer of `read`. It adds
        nothing if the lane has no such copies, unless it must fill the buffer.

        tables: the caller's tables with which the launch fills the buffer; none if the buffer is already filled.
        """
        context, name, buffer = self._context, self._context.lanes[lane], read.region.buffer
        order = [step for lane_of, step in context.order if lane_of == name]
        order = [step for step in order if variables_of(step) == {buffer} and id(step) not in self.sizes]
        copies = of_kind((step for step in order if step.copies_by == "kernel"), Copy)
        sized = {id(copy): [copy] for copy in copies}
        sized |= {id(step): permuted(step) for step in order if isinstance(step.tile_kernel, Permute)}
        if not sized and not tables:
            return
        copies = [copy for some in sized.values() for copy in some]
        numbers = [n for copy in copies for n in (copy.src.row, copy.dst.row, copy.src.rows)]
        totals = Totals(context.own[buffer], numbers or [0], tables)
        first = 0
        for key, some in sized.items():
            self.sizes[key] = totals.address(3 * first)
            first += len(some)
        self._items.kept.append(totals)
        if not totals.record(self._program, lane):
            self._items.launch(lane, totals.launch)

    def tables(self, copies: list[Copy]) -> list[tuple[Base, int]]:
        """Return (address, number of elements) of the caller's tables that `copies` read."""
        return [(Base(*self._regions.place(c.src)[:2]), int(c.src.rows) * int(c.src.cols)) for c in copies]

    def _more(self, copies: list[Copy]) -> tuple[list[int], list[Part]]:
        """Return the arguments `targets` and `parts` of `CopyLaunch`. They describe all `copies` of a launch except the first.

        If all copies have the same source of fixed size, they are `targets`, and `parts` is empty. Otherwise they are
        `parts`, and `targets` is empty.
        """
        dynamic = is_dynamic(copies[0])
        place_of = self._regions.origin if dynamic else self._regions.place
        ((_, at, _), (dst, to, _)), *others = [(place_of(copy.src), place_of(copy.dst)) for copy in copies]
        targets = [self._regions.bases[base] + offset for _, (base, offset, _) in others]
        if not dynamic and all(copy.src == copies[0].src for copy in copies):
            return targets, []
        parts = []
        for copy, target, ((_, source, _), (base, offset, _)) in zip(copies[1:], targets, others, strict=True):
            place = (offset - to, True) if base == dst else (target, False)
            parts.append(Part(source - at, *place, self.sizes[id(copy)] if dynamic else 0))
        return [], parts

    def _launch_dynamic(self, launch: Launch, copies: list[Copy], around: dict[str, Any]) -> None:
        copy, regions = copies[0], self._regions
        (dst, to, to_pitch), (src, at, pitch) = regions.origin(copy.dst), regions.origin(copy.src)
        of_src, of_dst = (self._context.buffers[region.buffer] for region in (copy.src, copy.dst))
        most = of_dst.rows if isinstance(of_dst.rows, int) else _MANY
        move = CopyLaunch(
            self._context.device,
            shape=CopyShape(most, regions.row_bytes(copy.src), pitch, to_pitch),
            sizes=self.sizes[id(copy)],
            parts=self._more(copies)[1],
            programs=launch.units,
            **around,
        )
        self._items.kept.append(move)
        places = Base(src, at), Base(dst, to), regions.rows(of_src.name), regions.rows(of_dst.name)
        if move.record(self._program, launch.lane, *places):
            return

        def issue(tensors: Tensors, bases: list[int]) -> None:
            rows = [b.rows if isinstance(b.rows, int) else tensors[b.name].shape[0] for b in (of_src, of_dst)]
            move.launch(bases[src] + at, bases[dst] + to, *rows)

        self._items.dynamic(launch.lane, issue)
