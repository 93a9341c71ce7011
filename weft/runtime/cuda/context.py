"""The context of a compiled schedule on GPUs: the steps of one rank, its memory and its streams.

A `Context` is made once and does not change, except for `LastRun`, the state of the last run. The compiler and its
operations use only the context, not the executor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from weft.errors import DeadlineError, DisagreementError, ScheduleError
from weft.runtime.cuda.flags import Flag, StepPlace, flags_of
from weft.runtime.schedule_memory import TORCH_DTYPE, Layout, Tensors, layout_of
from weft.schedule import Buffer, Schedule, Step, value
from weft.schedule.verify.issue_order import issue_order
from weft.symm import Communicator, Region
from weft.symm.lasting import lasting


@dataclass(frozen=True)
class RankSchedule:
    """The steps of a schedule on one rank. Numbers replace the expressions that depend on the rank.

    given: the buffers that the caller passes: inputs and outputs. layout: the offsets of the symmetric buffers.
    order: this rank's steps as (lane, step), in the order in which the CPU issues them.
    flags: for each rank, the flags (signals from other ranks) for which its lanes wait.
    lanes: the names of lanes. The first lane is the caller's stream.
    """

    schedule: Schedule
    rank: int
    buffers: dict[str, Buffer]
    given: list[Buffer]
    order: list[tuple[str, Step]]
    layout: Layout
    flags: tuple[dict[StepPlace, Flag], ...]
    lanes: list[str]

    @property
    def standing_word(self) -> int:
        """The index of the standing word, which follows the flags. It shows the watching thread how far a run has come.

        Between a run's first and last wait, the word is 1 + the number of waits known to have ended. Otherwise it is 0. In some
        schedules (`Compiler._tells`) it is always 0. There, the watching thread sees from the flags that a run is in progress:
        each run clears the previous run's flags at its beginning.
        """
        return max(len(flags) for flags in self.flags)


def rank_schedule(schedule: Schedule, rank: int, like: RankSchedule | None = None) -> RankSchedule:
    """Return the `RankSchedule` of `schedule` on `rank`. Raise `ScheduleError` if streams cannot run the schedule.

    like: an earlier result of this function. If the two schedules differ only in sizes, reuse its order and flags.
    """
    buffers = {buffer.name: buffer for buffer in schedule.buffers_of_rank(rank, expected=False)}
    given = [b for b in buffers.values() if b.role in ("input", "output")]
    layout, order = layout_of(schedule), None if like is None else _same_order(schedule, rank, like.order)
    flags = like.flags if like is not None and order is not None else flags_of(schedule)
    order = order or issue_order(schedule)[rank]
    first = next((lane.name for lane in schedule.lanes if lane.resource == "compute"), None)
    if first is None:
        raise ScheduleError(
            f'schedule {schedule.name} has no lane with resource "compute", so no lane can run on the caller\'s stream: add a '
            'lane with resource "compute"'
        )
    lanes = [first, *(lane.name for lane in schedule.lanes if lane.name != first)]
    return RankSchedule(schedule, rank, buffers, given, order, layout, flags, lanes)


def _same_order(schedule: Schedule, rank: int, order: list[tuple[str, Step]]) -> list[tuple[str, Step]] | None:
    """Return the steps of `schedule` on this rank as (lane, step), in the order in which the CPU issues the steps of another,
    similar schedule. Return None if corresponding steps are of different kinds, or set or await different signals.

    order: the steps of the other schedule as (lane, step), in the order of issue.
    """
    left = {lane.name: lane.steps for lane in schedule.of_rank(rank, expected=False)}
    if sum(map(len, left.values())) != len(order):
        return None
    found, at = list[tuple[str, Step]](), dict.fromkeys(left, 0)
    for lane, other in order:
        if at.get(lane, 0) >= len(left.get(lane, ())):
            return None
        step = left[lane][at[lane]]
        if type(step) is not type(other) or (step.is_signal and step != other):
            return None
        found.append((lane, step))
        at[lane] += 1
    return found


@dataclass(slots=True)
class LastRun:
    """The state of the last run that the CPU has issued.

    known: the dynamic sizes that the CPU has read, by the name of their buffer.
    made: the allocated outputs with a dynamic number of rows, by name.
    caller: the stream on which these outputs are allocated; None if the CPU reads no sizes.
    failure: an error that the watching thread has found. The next call raises it.
    """

    known: dict[str, tuple[int, ...]] = field(default_factory=dict)
    made: Tensors = field(default_factory=dict)
    caller: torch.cuda.Stream | None = None
    failure: DeadlineError | DisagreementError | None = None


@dataclass(frozen=True)
class Context(RankSchedule):
    """A rank's schedule with memory and streams.

    region: the symmetric buffers.
    words: the flags, followed by the standing word (`RankSchedule.standing_word`).
    own: this rank's buffers, as tensors, that weft allocates: all except the caller's inputs and outputs.
    side: the streams of all lanes except the first. monitor: a stream for signals (`weft.runtime.cuda.compile`).
    begun_word: three numbers in pinned memory, which the device writes and the watching thread reads. The device sets the
        first to 1 when a run begins, and the thread resets it to 0. The second is 0, or 1 + a rank that sent a different
        number of rows than expected. The third is 1 during a run with collectives in `own_group`.
    own_group: the group in which collectives run, if the ranks are on several hosts; None for the user's group.
    """

    comm: Communicator
    device: torch.device
    region: Region
    words: Region
    own: Tensors
    side: list[torch.cuda.Stream]
    monitor: torch.cuda.Stream
    begun_word: torch.Tensor
    run: LastRun
    own_group: dist.ProcessGroup | None

    @property
    def differs_at(self) -> int:
        """The address of the second number of `begun_word`, which a kernel sets if a peer sent a different number of rows than
        expected.
        """
        return self.begun_word.data_ptr() + self.begun_word.itemsize

    def check(self) -> None:
        """Raise the error that the watching thread or the device has found since the last run, or the group's error, if any. Do
        not wait for the device.
        """
        run = self.run
        if run.failure is not None:
            failure, run.failure = run.failure, None
            raise failure
        self.comm.check()

    def require_inside(self, buffer: str, first: int, count: int, tensors: Tensors) -> None:
        """Raise `ScheduleError`, and make the group fail, unless rows first .. first + count - 1 are inside `buffer`. Peers
        wait for this run, so the group cannot continue.
        """
        rows = self.buffers[buffer].rows
        rows = rows if isinstance(rows, int) else tensors[buffer].shape[0]
        if not 0 <= first <= first + count <= rows:
            text = f"rank {self.rank}: with the sizes of this run, rows {first}:+{count} are outside {buffer} of {rows} rows"
            self.comm.poison(text)
            raise ScheduleError(text)


def own_buffers(mine: RankSchedule, region: Region, device: torch.device) -> Tensors:
    own = {}
    for b in mine.buffers.values():
        if b.role == "symmetric":
            shape = value(b.rows), b.cols
            own[b.name] = region.tensor(mine.rank, shape, TORCH_DTYPE[b.dtype], mine.layout.buffers[b.name])
        elif b.role == "scratch":
            scratch = functools.partial(torch.empty, value(b.rows), b.cols, dtype=TORCH_DTYPE[b.dtype], device=device)
            own[b.name] = lasting(device, scratch)
    return own
