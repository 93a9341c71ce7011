"""Checks that a schedule matches the group's ranks, this rank's memory, and the CPU executor.

All steps of a rank are checked before anything is allocated. The error names the step that cannot run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.errors import ScheduleError
from weft.runtime.cpu.steps import bind, has_own_kernel, inherited_kernel, is_bound, run_tiles
from weft.schedule import Collective, Compute, Lane, Read, Schedule, Send, Tiles, value
from weft.schedule.messages import Post, Receive, has_sends, with_messages, wrong_sends
from weft.schedule.steps import of_kind, variables_of
from weft.schedule.text import describe
from weft.schedule.verify.issue_order import sets_per_run, too_few_sets
from weft.schedule.verify.well_formed import declared, unread, wrong_collectives, wrong_declarations, wrong_step
from weft.words import counted


class Checked:
    """The checked steps of `schedule` on one rank. Numbers replace the expressions that depend on the rank. The constructor
    raises `ScheduleError` for a step that the executor cannot run, or that does not match its buffers.

    known: True to skip the checks, because a schedule that differs only in sizes has passed them.
    hosts: the host of each rank; empty for one host.

    Attributes:

    - lanes: this rank's lanes that have steps. The first lane runs on the caller's thread. The last lanes receive messages.
    - receiving: the number of lanes that receive messages.
    - setters: for each counter of this rank, the ranks that increase it in a run. A rank that increases it twice occurs
      twice.
    - senders: for each counter that arriving messages increase, the ranks that send these messages.
    - channels: the channels over which any rank sends messages, each as (sending rank, index of the sending lane, receiving
      rank).
    - rows: for each collective of this rank, in order: the number of rows that each rank contributes.
    - shared: the names of buffers to which peers or several lanes add (`accumulate=True`).
    """

    def __init__(
        self, schedule: Schedule, rank: int, world_size: int, known: bool = False, hosts: Sequence[str] = ()
    ) -> None:
        if schedule.world_size != world_size:
            raise ScheduleError(
                f"schedule {schedule.name} is for {counted(schedule.world_size, 'rank')}, but the group has "
                f"{world_size}: build it for {world_size}"
            )
        sends = has_sends(schedule) or len(set(hosts)) > 1
        lanes, meetings = schedule.of_rank(rank, expected=False), schedule if sends else _meetings(schedule)
        ranks = [lanes if r == rank else meetings.of_rank(r, expected=False) for r in range(world_size)]
        self.buffers = schedule.buffers_of_rank(rank, expected=False)
        self.setters = {(s.name, index): list[int]() for s in schedule.signals for index in range(s.count)}
        if not known:
            _require_fit(schedule, rank, ranks)
        posted = _with_messages(ranks, hosts) if sends else ranks
        self.channels = {post.channel for of_rank in posted for lane in of_rank for post in of_kind(lane.steps, Post)}
        self.receiving, lanes = len(posted[rank]) - len(lanes), posted[rank]
        self.senders: dict[tuple[str, int], tuple[int, ...]] = {}
        for runner, its_lanes in enumerate(posted):
            for step in (step for lane in its_lanes for step in lane.steps if not isinstance(step, Post)):
                for (at, signal, index), times in step.sets().items():
                    if at != rank:
                        continue
                    counter, setter = (signal, value(index)), runner
                    if isinstance(step, Receive):
                        setter = step.source
                        self.senders[counter] = (*self.senders.get(counter, ()), setter)
                    self.setters[counter] += [setter] * times
        first = next((lane for lane in lanes if lane.resource == "compute"), Lane("compute", "compute"))
        self.lanes = [first, *(lane for lane in lanes if lane.steps and lane is not first)]
        self.shared = self._updated_by_several()
        collectives = [[s for lane in of_rank for s in of_kind(lane.steps, Collective)] for of_rank in ranks]
        self.rows = [
            tuple(value((step.dst if step.op == "reduce_scatter" else step.src).rows) for step in same)
            if same[0].op in ("all_gather", "reduce_scatter")
            else ()
            for same in zip(*collectives, strict=True)
        ]

    def _updated_by_several(self) -> set[str]:
        lanes = [
            {
                a.region.buffer
                for step in lane.steps
                for inner in step.inner or (step,)
                for a in inner.accesses()
                if a.updates
            }
            for lane in self.lanes
        ]
        count = Counter(name for names in lanes for name in names)
        return {b.name for b in self.buffers if count[b.name] > 1 or (count[b.name] and b.role == "symmetric")}


def _meetings(schedule: Schedule) -> Schedule:
    """Return a copy of `schedule` with only its collectives and the steps that set signals. A rank needs only these
    steps of its peers.
    """

    return schedule.map_steps(lambda step: step if step.meets else step.only_sets())


def _with_messages(ranks: Sequence[Sequence[Lane]], hosts: Sequence[str]) -> list[tuple[Lane, ...]]:
    """Replace the `Send` steps of all ranks, and the signals to other hosts, by steps that send and receive messages. Return
    the new lanes, by rank.

    hosts: the host of each rank; empty for one host.
    """
    waits = [
        (rank, wait)
        for rank, of_rank in enumerate(ranks)
        for lane in of_rank
        for step in lane.steps
        if (wait := step.awaits) and not wait.previous
    ]
    awaited = {(rank, wait.signal, value(wait.index)) for rank, wait in waits}
    return with_messages(ranks, lambda a, b: bool(hosts) and hosts[a] != hosts[b], awaited)


def _require_fit(schedule: Schedule, rank: int, ranks: list[tuple[Lane, ...]]) -> None:
    buffers = [{b.name: b for b in schedule.buffers_of_rank(r)} for r in range(schedule.world_size)]
    expected = [_meetings(schedule).of_rank(r) for r in range(schedule.world_size)] if schedule.contents else ranks
    faults = [*wrong_declarations(schedule, buffers), *(fault for fault, _ in wrong_collectives(schedule, expected))]
    faults += [*unread(schedule, rank), *wrong_sends(schedule)]
    if sum(any(step.meets for step in lane.steps) for lane in ranks[rank]) > 1:
        faults.append(
            "several lanes call collectives, but gloo must be called from one thread: put all collectives on one lane"
        )
    sets, where = sets_per_run(ranks), declared(schedule, buffers)[rank]
    open_ = bool(schedule.contents)  # otherwise `of_rank` has evaluated all numbers
    for lane in ranks[rank]:
        for step in lane.steps:
            fixed = not step.tile_kernel and not (open_ and variables_of(step))
            wrong = list(wrong_step(where, step)) if fixed else []
            if (wait := step.awaits) and value(wait.count) > (n := sets[rank, wait.signal, wait.index]):
                wrong.append(too_few_sets(value(wait.count), n))
            if not (step.tile_kernel or isinstance(step, Read | Send) or is_bound(step)):
                wrong.append(
                    f"the CPU executor runs no steps of kind {step.kind!r}: register a function with {bind.__module__}.bind"
                )
            if (kernel := step.tile_kernel) and (base := inherited_kernel(step)):
                wrong.append(
                    f"only the base class {base} of kernel {kernel.name} has an implementation on CPUs: register a function for "
                    f"{type(kernel).__name__} with {run_tiles.__module__}.run_tiles"
                )
            if isinstance(step, Collective) and step.op == "all_to_all":
                wrong.append(
                    "the CPU executor does not run all_to_all: use exchange, which states how many rows go to each rank"
                )
            for inner in () if has_own_kernel(step) else step.inner or (step,):
                if isinstance(inner, Compute):
                    wrong += _wrong_operation(inner, "" if wrong else buffers[rank][inner.out.buffer].dtype)
                if inner.is_signal and isinstance(step, Tiles) and variables_of(step.extent):
                    wrong.append(
                        "tiles whose number is known only at run time cannot set signals, because a wait would "
                        "not know how many sets to expect: set the signal once, in a step after the tiles"
                    )
            faults += [f"lane {lane.name}: {describe(step, rank)}: {fault}" for fault in wrong]
    if faults:
        raise ScheduleError(f"schedule {schedule.name} on rank {rank}: {faults[0]}")


def _wrong_operation(step: Compute, dtype: str) -> list[str]:
    """Return error texts for an operation that CPUs do not support. dtype: the dtype of its output."""
    if step.op == "embedding_bag":
        return ["the CPU executor does not pool: call weft.embedding_all_to_all"]
    if dtype == "fp8" and not step.op.startswith("scaled_matmul"):
        return ["CPUs support fp8 only in scaled GEMMs: use bf16"]
    return []
