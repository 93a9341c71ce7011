"""Launches: the steps of a lane that GPUs run as one operation. Only this file defines which steps these are.

The GPU compiler issues launches. `verify` needs to know which launches poll on compute units, and the simulator which steps
cost no launch.

A copy by kernel polls and sets flags itself, so it is one launch with the signals between ranks around it:

    sets_before  sets before its waits, if the rank has one lane: else a set must not wait for waits that other lanes may block
    waits        waits before the copy: all its programs poll
    body         the copy, and further copies of the same source, each with the sets after it. All of them write to fixed places
                 in the schedule's own memory, at the same row pitch, and all or none accumulate
    sets         sets after the copies: the last program sets them
    waits_after  waits after the sets: the last program polls. Only if the sets may be issued as late as these waits

Other steps are a launch each. Neighbouring waits between ranks are one operation of their stream, and so are neighbouring sets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

from weft.schedule.kernels import TileKernel
from weft.schedule.regions import ITEM_BYTES, Buffer, Region
from weft.schedule.schedule import Schedule
from weft.schedule.steps import COPY_UNITS, DYNAMIC_COPY_UNITS, Copy, Lane, Set, Step, Wait, depends, walk

Key: TypeAlias = tuple[str, int]
"""A counter of a rank: the signals' name, and the index."""


class Launch(NamedTuple):
    """Neighbouring steps of a lane that are one kernel, or one operation of a stream. See the top of this file.

    lane: the lane's number. first: the place of the first step in the lane. steps: all steps, in order. units: compute units that
    its programs hold while they poll; 0 if it never polls. continues: True if the persistent kernel of the launch
    before also computes this launch's tiles.
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

    @property
    def copies(self) -> bool:
        """True if the launch is a kernel that copies."""
        return bool(self.body) and self.body[0].copies_by == "kernel"

    @property
    def first_wait(self) -> int:
        """The place of the first wait, or of the body."""
        return self.first + len(self.sets_before)

    @property
    def begin(self) -> int:
        """The place of the body."""
        return self.first_wait + len(self.waits)

    @property
    def first_wait_after(self) -> int:
        return self.first + len(self.steps) - len(self.waits_after)

    @property
    def last(self) -> int:
        """The place of the last step."""
        return self.first + len(self.steps) - 1

    @property
    def anchor(self) -> int:
        """The place at which the launch is issued: its last step that is not a set. All steps that it waits for are issued then."""
        return max(
            (self.first + i for i, step in enumerate(self.steps) if not isinstance(step, Set)), default=self.first
        )

    def carried(self) -> Iterator[bool]:
        """Yield for each step True if a kernel that already runs performs it."""
        for place in range(self.first, self.last + 1):
            yield (
                self.continues
                if place == self.begin
                else bool(self.body) and self.begin < place < self.first_wait_after
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
) -> list[Launch]:
    """Return the launches of a lane in order, its loops unrolled.

    crossing: for each step, True if it is a signal between ranks. lane: the lane's number. alone: the rank has no other lane.
    held: buffers whose contents are known only at run time; a copy whose size depends on them holds `dynamic_units`.
    may_answer: True if the sets among the steps [first, end) may be issued as late as the last of these steps.
    tiles_go_on: a kernel of tiles also sets the signals after them, and does later tiles if `TileKernel.continues`. The simulator
    assumes so. The GPU compiler launches a kernel for each step, and its streams set the signals.
    """
    found: list[Launch] = []
    kernel: TileKernel | None = None  # the persistent kernel that runs

    def behind(at: int, kind: type[Step], local: bool = False) -> int:
        """Return the end of the signals of this kind from `at` on."""
        while at < len(steps) and (local or crossing[at]) and isinstance(steps[at], kind):
            at += 1
        return at

    def copy(at: int, waits: int, body: int) -> Launch:
        """Return the launch of the copy at `body`, whose waits begin at `waits`."""
        like = _fixed(steps[body], buffers, held)
        sets = behind(body + 1, Set)
        while like and sets < len(steps) and _fixed(steps[sets], buffers, held) == like:
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


def _fixed(step: Step, buffers: Mapping[str, Buffer], held: Collection[str]) -> tuple[Region, bool, int] | None:
    """Return (source, accumulates, row pitch of the target) of a copy by kernel between fixed places; None for other steps."""
    if step.copies_by != "kernel" or (held and depends(step, held)):
        return None
    copy = cast(Copy, step)
    buffer = buffers[copy.dst.buffer]
    pitch = buffer.cols * ITEM_BYTES[buffer.dtype]
    return (copy.src, copy.accumulate, pitch) if buffer.role in ("symmetric", "scratch") else None


def setters(ranks: Sequence[Sequence[Lane]]) -> list[dict[Key, int]]:
    """Return for each rank its counters that another rank or a kernel's tiles set, with the rank that sets them."""
    found: list[dict[Key, int]] = [{} for _ in ranks]
    for setter, lanes in enumerate(ranks):
        for step in (step for lane in lanes for step in lane.steps):
            for at, signal, index in step.sets():
                if at != setter or step.inner:
                    found[int(at)][signal, int(index)] = setter
    return found


def crosses(step: Step, rank: int, awaited: Collection[Key]) -> bool:
    """True if a step of `rank` is a signal between ranks. awaited: see `setters`."""
    if wait := step.awaits:
        return (wait.signal, wait.index) in awaited
    return step.is_signal and any(at != rank for at, _, _ in step.sets())


def units_of_dynamic_copies(schedule: Schedule, resource: str) -> int:
    """Return the most units of a copy by kernel of dynamic size on a lane of this resource.

    On copy lanes it runs concurrently with GEMMs: all these lanes share `DYNAMIC_COPY_UNITS`. On a compute lane no GEMM runs at the
    same time.
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

    lanes: names, by number. order: (lane, step) in the order of issue (`weft.schedule.verify.issue_order`). awaited: see `setters`.
    Sets may be issued late, together with waits after them, unless another lane's wait for a peer is issued in between. In one
    hardware queue the sets would be queued after that wait, and the peer would wait for the sets.
    """
    steps: dict[str, list[Step]] = {name: [] for name in lanes}
    places: dict[str, list[int]] = {name: [] for name in lanes}  # of each lane's steps, in the order
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
            held={contents.buffer for contents in schedule.contents},
            dynamic_units=units_of_dynamic_copies(schedule, resources[name]),
            may_answer=may_answer,
        )
        anchors |= {places[name][one.anchor]: one for one in of_lane}
    return [anchors[place] for place in sorted(anchors)]
