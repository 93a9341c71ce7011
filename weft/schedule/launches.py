"""Launches: which consecutive steps of a lane become one kernel or one stream operation on GPUs.

All parts of weft use this definition: the GPU compiler issues launches, `verify` finds the launches that poll on
compute units, and the simulator charges launch overhead once per launch.

A launch that copies by kernel includes the signals between ranks around the copy. It has these groups of steps, in order (a
program is a thread block of the kernel):

    sets_before  sets before the waits, only if the rank has a single lane. With several lanes, a launch may be queued behind a
                 wait of another lane, which would delay these sets
    waits        waits before the copy. All programs of the kernel poll for them
    body         one copy, or several copies of two kinds: copies of the same source, between which there may be sets
                 (`_fixed`), or consecutive copies that read parts of the same buffer (`_joins`)
    sets         sets after a copy. The last program of the copy to finish performs them
    waits_after  waits after the sets. The last program polls for them. Without these waits, the CPU would issue the launch
                 earlier, so they delay the sets. They are included only if the delay cannot cause a deadlock

If a rank has a single lane, there are two further kinds of launches:

- a whole exchange of rows of dynamic sizes (`RoundTrip`).
- copies of the caller's tables of sizes into one buffer, with the `Read` step that reads this buffer (`_tables`).
Elsewhere, adjacent waits between ranks are one launch (a stream operation), and so are adjacent sets. Every other step is a
launch of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

from weft.schedule.expr import Index
from weft.schedule.kernels import TileKernel
from weft.schedule.regions import ITEM_BYTES, Buffer, Region
from weft.schedule.schedule import Schedule
from weft.schedule.steps import COPY_UNITS, DYNAMIC_COPY_UNITS, Agree, Copy, Lane, Read, Set, Step, Wait, depends, walk

_MOST_TABLES = 2
Key: TypeAlias = tuple[str, int]
"""A counter of a rank: (name of its signals, index)."""


class RoundTrip(NamedTuple):
    """Consecutive steps that one kernel runs: send rows to peers, notify them, wait for the rows of peers, and place these rows.

    The steps are in the order of the fields. All waits and sets are between ranks, and all copies are by kernel. `table` are
    copies of one table of fixed size to all ranks. `sends` (at least one), `own` and `places` (at least one) copy whole rows of
    dynamic sizes. The steps behind `sets` write no buffer of this rank that `sends` or `own` read, and `places` reads no buffer
    of this rank that earlier steps write.

    An exchange whose rows stay where peers put them ends with `waits_after`: `own`, `places` and `sets_after` are empty, and
    `agree` is None. Its `sends` may read one tensor of the caller.
    """

    waits: tuple[Step, ...]
    table: tuple[Copy, ...]
    sends: tuple[Copy, ...]
    sets: tuple[Step, ...]
    own: tuple[Copy, ...]
    waits_after: tuple[Step, ...]
    places: tuple[Copy, ...]
    agree: Agree | None
    sets_after: tuple[Step, ...]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """The copies of dynamic sizes, in order."""
        return self.sends + self.own + self.places

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in order."""
        return tuple(itertools.chain(*self[:-2], [self.agree] if self.agree else [], self.sets_after))


class Launch(NamedTuple):
    """Consecutive steps of a lane that are one kernel or one stream operation.

    The top of this file defines the groups of steps, `sets_before` to `waits_after`.

    lane: the index of the lane among the rank's lanes.
    first: the position of the launch's first step in the lane.
    steps: all steps of the launch, in order.
    units: the number of compute units that the launch holds while its kernel polls for signals; 0 for other launches.
    continues: True if the tiles of this launch run in the persistent kernel of the previous launch.
    trip: the exchange of rows, if the launch runs one; None for other launches. With an exchange, `body` has the copies and the
        comparison, and `sets` has the sets. The steps `waits_after` are waits in the middle of the exchange: copies follow them.
    """

    lane: int
    first: int
    steps: tuple[Step, ...]
    sets_before: tuple[Step, ...] = ()
    waits: tuple[Step, ...] = ()
    body: tuple[Step, ...] = ()
    sets: tuple[Step, ...] = ()
    waits_after: tuple[Step, ...] = ()
    units: int = 0
    continues: bool = False
    trip: RoundTrip | None = None

    @property
    def copies(self) -> bool:
        """True if the launch is a copy by kernel."""
        return bool(self.body) and self.body[0].copies_by == "kernel"

    @property
    def read(self) -> Read | None:
        """The step that reads dynamic sizes, if the launch fills the buffer of this step."""
        last = self.body[-1] if len(self.body) > 1 else None
        return last if isinstance(last, Read) else None

    @property
    def first_wait(self) -> int:
        """The position in the lane of the first wait before the launch's body. If there is no such wait, the position of the
        body.
        """
        return self.first + len(self.sets_before)

    @property
    def begin(self) -> int:
        """The position in the lane of the launch's body."""
        return self.first_wait + len(self.waits)

    @property
    def first_wait_after(self) -> int:
        return self.first + len(self.steps) - len(self.waits_after)

    @property
    def last(self) -> int:
        """The position in the lane of the launch's last step."""
        return self.first + len(self.steps) - 1

    @property
    def anchor(self) -> int:
        """The position in the lane of the launch's last step that is not a set.

        The CPU issues the launch when the order of issue reaches this step.
        """
        return max(
            (self.first + i for i, step in enumerate(self.steps) if not isinstance(step, Set)), default=self.first
        )

    def carried(self) -> Iterator[bool]:
        """Yield a bool for each step: True if the kernel of an earlier step also runs this step.

        In an exchange of rows (`trip`), the value is False for the first copy after the second waits, and for the comparison.
        All programs must arrive before these steps, so they begin as late as in launches of their own.
        """
        end = self.last + 1 if self.trip else self.first_wait_after
        late = (*self.trip.places[:1], self.trip.agree) if self.trip else ()
        for place, step in enumerate(self.steps, self.first):
            yield (
                self.continues
                if place == self.begin
                else bool(self.body) and self.begin < place < end and not any(step is one for one in late)
            )


def launches(
    steps: Sequence[Step],
    crossing: Sequence[bool],
    buffers: Mapping[str, Buffer],
    *,
    lane: int = 0,
    alone: bool = False,
    held: Collection[str] = (),
    dynamic_units: int = COPY_UNITS,
    may_answer: Callable[[int, int], bool] = lambda first, end: True,
    tiles_go_on: bool = False,
    round_trips: bool = False,
) -> list[Launch]:
    """Return the launches of a lane, in order.

    steps: the lane's steps, with loops unrolled.
    crossing: for each step, True if it is a signal between ranks.
    lane: the number of the lane.
    alone: True if the rank has no other lane.
    held: the names of the buffers whose contents are known only at run time.
    dynamic_units: the number of compute units that a copy by kernel holds if its size is dynamic (depends on a buffer
        in `held`).
    may_answer: a function of (first, end). It returns True if the sets in steps[first:end] may be delayed until the
        last of these steps is issued. If so, the launch includes the waits after these sets.
    tiles_go_on: True to assume that a tile kernel also sets the signals after its step, and computes the tiles of the
        next step if `TileKernel.continues`. Only the simulator passes True: on GPUs each step has its own kernel, and
        the stream sets the signals.
    round_trips: True for the two kinds of launches that need a rank with a single lane (see the top of this file).
    """
    found: list[Launch] = []
    kernel: TileKernel | None = None  # the tile kernel of the previous launch, if it has tiles

    def behind(at: int, kind: type[Step], local: bool = False) -> int:
        """Skip signals of type `kind` (`Set` or `Wait`) from position `at` on, and return the next position.

        Signals within the rank are skipped only if `local` is True.
        """
        while at < len(steps) and (local or crossing[at]) and isinstance(steps[at], kind):
            at += 1
        return at

    def copy(at: int, waits: int, body: int) -> Launch:
        """Return the launch of the copy `steps[body]`.

        at: the position in `steps` of the launch's first step.
        waits: the position in `steps` of the launch's first wait, or `body` if no wait precedes the copy.
        """
        like = _fixed(steps[body], buffers, held)
        parts_end = body + 1
        while parts_end < len(steps) and _joins(steps[body], steps[parts_end], buffers, held):
            parts_end += 1
        sets = behind(parts_end, Set)
        same = all(_fixed(step, buffers, held) == like for step in steps[body:parts_end])
        while like and same and sets < len(steps) and _fixed(steps[sets], buffers, held) == like:
            sets = behind(sets + 1, Set)
        end = behind(sets, Wait) if like else sets
        end = end if may_answer(body, end) else sets
        parts = steps[body:sets]
        dynamic = held and depends(steps[body], held)
        return Launch(
            lane,
            at,
            tuple(steps[at:end]),
            sets_before=tuple(steps[at:waits]),
            waits=tuple(steps[waits:body]),
            body=tuple(step for step in parts if step.copies_by == "kernel"),
            sets=tuple(step for step in parts if step.copies_by != "kernel"),
            waits_after=tuple(steps[sets:end]),
            units=dynamic_units if dynamic else COPY_UNITS,
        )

    at = 0
    while at < len(steps):
        step = steps[at]
        if round_trips and (trip := _round_trip(steps, crossing, at, buffers, held)):
            these, compared = trip.steps, [trip.agree] if trip.agree else []
            found.append(
                Launch(
                    lane, at, these, waits=trip.waits, body=(*trip.table, *trip.copies, *compared),
                    sets=trip.sets + trip.sets_after, waits_after=trip.waits_after, units=COPY_UNITS, trip=trip,
                )
            )  # fmt: skip
            at, kernel = at + len(these), None
            continue
        if round_trips and (these := _tables(steps, at, buffers)):
            found.append(Launch(lane, at, these, body=these, units=COPY_UNITS))
            at, kernel = at + len(these), None
            continue
        waits = behind(at, Set) if alone else at
        body = behind(waits, Wait)
        if body < len(steps) and steps[body].copies_by == "kernel":
            one, kernel = copy(at, waits, body), None
        elif step.is_signal:
            these = tuple(steps[at : max(behind(at, Set), behind(at, Wait), at + 1)])
            one = Launch(lane, at, these, waits=these) if step.awaits else Launch(lane, at, these, sets=these)
        else:
            tiles = step.tile_kernel if tiles_go_on else None
            sets = tuple(steps[at + 1 : behind(at + 1, Set, local=True)]) if tiles else ()
            continues, kernel = tiles is not None and tiles.continues(kernel), tiles
            one = Launch(
                lane, at, (step, *sets), body=(step,), sets=sets, units=COPY_UNITS * step.meets, continues=continues
            )
        found.append(one)
        at += len(one.steps)
    return found


def _round_trip(
    steps: Sequence[Step], crossing: Sequence[bool], at: int, buffers: Mapping[str, Buffer], held: Collection[str]
) -> RoundTrip | None:
    """Return the exchange of rows that begins at steps[at]; None if there is none."""
    place = at

    def take(suits: Callable[[int], bool]) -> tuple[Step, ...]:
        nonlocal place
        begin = place
        while place < len(steps) and suits(place):
            place += 1
        return tuple(steps[begin:place])

    def are(kind: type[Step]) -> Callable[[int], bool]:
        return lambda i: crossing[i] and isinstance(steps[i], kind)

    def copies(dynamic: bool) -> tuple[Copy, ...]:
        found = take(lambda i: steps[i].copies_by == "kernel" and bool(held and depends(steps[i], held)) == dynamic)
        return cast("tuple[Copy, ...]", found)

    waits, table, sends, sets = take(are(Wait)), copies(False), copies(True), take(are(Set))
    own, waits_after, places = copies(True), take(are(Wait)), copies(True)
    compared = take(lambda i: isinstance(steps[i], Agree))[:1] if places else ()
    if not (sends and sets and waits_after and bool(places) == bool(compared)) or (own and not places):
        return None
    agree = cast(Agree, compared[0]) if compared else None
    trip = RoundTrip(waits, table, sends, sets, own, waits_after, places, agree, take(are(Set)) if agree else ())
    every, later = trip.copies, own + places
    written = {(c.dst.buffer, c.dst.at) for c in (*table, *sends, *own)}
    targets = {c.dst.buffer for c in every if buffers[c.dst.buffer].role == "output"}
    given = {c.src.buffer for c in every if buffers[c.src.buffer].role == "input"}
    sources = ("symmetric", "scratch", "input")
    suits = (
        len({c.src for c in table}) == 1
        and not any(c.accumulate for c in (*table, *every))
        and all(r.cols == buffers[r.buffer].cols == every[0].src.cols for c in every for r in (c.src, c.dst))
        and len({buffers[r.buffer].dtype for c in every for r in (c.src, c.dst)}) == 1
        and all(buffers[c.src.buffer].role in ("symmetric", "scratch") for c in table)
        and all(buffers[c.src.buffer].role in sources for c in every)
        and len(given) == (not agree)
        and not any((c.src.buffer, c.src.at) in written for c in later)
        and not {(c.dst.buffer, c.dst.at) for c in later} & {(c.src.buffer, c.src.at) for c in every}
        and targets == ({agree.out.buffer} if agree else set())
    )
    return trip if suits else None


def _tables(steps: Sequence[Step], at: int, buffers: Mapping[str, Buffer]) -> tuple[Step, ...]:
    """Return the copies by kernel that begin at steps[at] and the `Read` step behind them; () unless these copies fill the whole
    buffer that the step reads. There are one or two copies, each of a whole input of the caller.
    """
    end, filled = at, cast(Index, 0)
    while end < len(steps) and end - at <= _MOST_TABLES and steps[end].copies_by == "kernel":
        copy = cast(Copy, steps[end])
        source, target = buffers[copy.src.buffer], buffers[copy.dst.buffer]
        whole = (copy.src.row, copy.src.col, copy.src.rows, copy.src.cols) == (0, 0, source.rows, source.cols)
        if not whole or source.role != "input" or target.role != "scratch" or copy.accumulate:
            return ()
        if (copy.dst.row, copy.dst.col, copy.dst.cols) != (filled, 0, target.cols):
            return ()
        end, filled = end + 1, filled + source.rows
    read = steps[end] if end < len(steps) else None
    if not isinstance(read, Read) or read.by != "device" or not 1 <= end - at <= _MOST_TABLES:
        return ()
    suits = all(cast(Copy, copy).dst.buffer == read.region.buffer for copy in steps[at:end])
    return tuple(steps[at : end + 1]) if suits and filled == buffers[read.region.buffer].rows else ()


def _joins(first: Step, step: Step, buffers: Mapping[str, Buffer], held: Collection[str]) -> bool:
    """Return True if one kernel may run both `first`, a copy by kernel, and `step`.

    Both copies must read the same columns of one buffer. They must write buffers with equal row pitches: symmetric or scratch
    buffers, or one output of the caller. They must not accumulate, and must not write the buffer that they read. Their
    sizes must be fixed and equal, or both sizes must depend on buffers in `held`, whose contents are known only at run
    time. In the second case, the buffers that the copies write must have equal numbers of rows.
    """
    if step.copies_by != "kernel":
        return False
    copy, other = cast(Copy, first), cast(Copy, step)
    if (
        copy.accumulate
        or other.accumulate
        or any((c.dst.buffer, c.dst.at) == (c.src.buffer, c.src.at) for c in (copy, other))
    ):
        return False
    dynamic = bool(held) and depends(copy, held)
    if dynamic != (bool(held) and depends(other, held)) or not (dynamic or copy.src.rows == other.src.rows):
        return False
    targets = [buffers[one.dst.buffer] for one in (copy, other)]
    fixed = all(buffer.role in ("symmetric", "scratch") for buffer in targets)
    columns = {(c.src.buffer, c.src.at, c.src.col, c.src.cols) for c in (copy, other)}
    return (
        len(columns) == 1
        and (fixed or (copy.dst.buffer, copy.dst.at) == (other.dst.buffer, other.dst.at))
        and len({buffer.cols * ITEM_BYTES[buffer.dtype] for buffer in targets}) == 1
        and (not dynamic or targets[0].rows == targets[1].rows)
    )  # fmt: skip


def _fixed(step: Step, buffers: Mapping[str, Buffer], held: Collection[str]) -> tuple[Region, bool, int] | None:
    """Return (source, accumulate, row pitch of the destination in bytes) of a copy by kernel.

    Two copies for which this function returns equal tuples may share a launch, which copies one source to several places.
    Return None for other steps, for dynamic sizes, and for a destination that is the caller's tensor.

    held: the buffers whose contents are known only at run time.
    """
    if step.copies_by != "kernel" or (held and depends(step, held)):
        return None
    copy = cast(Copy, step)
    buffer = buffers[copy.dst.buffer]
    pitch = buffer.cols * ITEM_BYTES[buffer.dtype]
    return (copy.src, copy.accumulate, pitch) if buffer.role in ("symmetric", "scratch") else None


def setters(ranks: Sequence[Sequence[Lane]]) -> list[dict[Key, int]]:
    """Return a dict for each rank, from each counter of this rank to the rank that sets the counter. Only counters that another
    rank or a tile kernel sets are included.
    """
    found: list[dict[Key, int]] = [{} for _ in ranks]
    for setter, lanes in enumerate(ranks):
        for step in (step for lane in lanes for step in lane.steps):
            for at, signal, index in step.sets():
                if at != setter or step.inner:
                    found[int(at)][signal, int(index)] = setter
    return found


def crosses(step: Step, rank: int, awaited: Collection[Key]) -> bool:
    """Return True if `step` of `rank` is a signal between ranks: a set at another rank, or a wait for a counter in
    `awaited`.

    awaited: the counters of `rank` that another rank or a tile kernel sets, from `setters`.
    """
    if wait := step.awaits:
        return (wait.signal, wait.index) in awaited
    return step.is_signal and any(at != rank for at, _, _ in step.sets())


def units_of_dynamic_copies(schedule: Schedule, resource: str) -> int:
    """Return the number of compute units that a copy by kernel may hold if its size is dynamic (known only at run time).

    resource: the resource of the copy's lane. All copy lanes together get `DYNAMIC_COPY_UNITS`, because they run
        concurrently with GEMMs. A copy on a compute lane gets `COPY_UNITS`.
    """
    if resource == "compute":
        return COPY_UNITS
    held = {contents.buffer for contents in schedule.contents}
    lanes = sum(
        any(step.copies_by == "kernel" and depends(step, held) for step in walk(lane.steps))
        for lane in schedule.lanes
        if held and lane.resource == "copy"
    )
    return max(1, DYNAMIC_COPY_UNITS // max(1, lanes))


def launches_of_rank(
    schedule: Schedule,
    rank: int,
    lanes: Sequence[str],
    order: Sequence[tuple[str, Step]],
    awaited: Collection[Key],
    buffers: Mapping[str, Buffer],
) -> list[Launch]:
    """Return the launches of all lanes of a rank, in the order of issue.

    lanes: the names of the rank's lanes. The index of a name is the lane's number in the launches.
    order: the rank's steps as (lane, step), in the order of issue (`weft.schedule.verify.issue_order`).
    awaited: the counters of this rank that another rank or a tile kernel sets: this rank's entry of `setters`.

    The CPU issues a launch when `order` reaches the launch's last wait. So if a launch has sets, and then waits, it sets
    the signals later than in `order`. If another lane waits for a peer in the meantime, this wait could block the sets
    on a shared hardware queue. In this case the waits after the sets become a launch of their own.
    """
    steps: dict[str, list[Step]] = {name: [] for name in lanes}
    places: dict[str, list[int]] = {name: [] for name in lanes}  # the positions of each lane's steps in `order`
    for place, (name, step) in enumerate(order):
        steps[name].append(step)
        places[name].append(place)
    crossing = [crosses(step, rank, awaited) for _, step in order]
    resources = {lane.name: lane.resource for lane in schedule.lanes}
    anchors: dict[int, Launch] = {}
    for number, name in enumerate(lanes):

        def may_answer(first: int, end: int, name: str = name) -> bool:
            late = next((at for at in range(first, end) if isinstance(steps[name][at], Set)), end - 1)
            between = range(places[name][late], places[name][end - 1])
            return not any(order[at][0] != name and order[at][1].awaits and crossing[at] for at in between)

        of_lane = launches(
            steps[name],
            [crossing[place] for place in places[name]],
            buffers,
            lane=number,
            alone=len(lanes) == 1,
            round_trips=len(lanes) == 1,
            held={contents.buffer for contents in schedule.contents},
            dynamic_units=units_of_dynamic_copies(schedule, resources[name]),
            may_answer=may_answer,
        )
        anchors |= {places[name][one.anchor]: one for one in of_lane}
    return [anchors[place] for place in sorted(anchors)]
