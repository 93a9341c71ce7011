"""What a schedule is compiled for on GPUs, and what its runs work with: the steps of a rank, its memory, its streams.

A `Context` is made once and does not change; what does, from run to run, is in its `Run`. Whoever compiles or issues steps is given
the context and nothing else, so that no part of the executor needs the executor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from weft.errors import DeadlineError, ScheduleError
from weft.runtime.cuda.tokens import Place, Token, tokens_of
from weft.runtime.schedule_memory import TORCH_DTYPE, Layout, layout_of
from weft.schedule import Buffer, Schedule, Step
from weft.schedule.order import issue_order
from weft.symm import Domain, Region

Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RankSchedule:
    """A schedule as one rank has it. given: buffers that the caller gives. order: of issue, steps with their lanes. tokens: of all
    ranks. lanes: the first is the caller's stream."""

    schedule: Schedule
    rank: int
    buffers: dict[str, Buffer]
    given: list[Buffer]
    order: list[tuple[str, Step]]
    layout: Layout
    tokens: tuple[dict[Place, Token], ...]
    lanes: list[str]

    @property
    def standing_word(self) -> int:
        """The number of the word behind those for tokens. Not 0 while a run stands at waits: 1 + how many it has passed, as far as
        that is known. Used where no lane begins with waits for the previous run alone, whose tokens are missing while a run goes
        on."""
        return max(len(tokens) for tokens in self.tokens)


def rank_schedule(schedule: Schedule, rank: int) -> RankSchedule:
    """`ScheduleError` if streams cannot run it."""
    buffers = {buffer.name: buffer for buffer in schedule.buffers_of_rank(rank, expected=False)}
    given = [b for b in buffers.values() if b.role in ("input", "output")]
    order, layout, tokens = issue_order(schedule)[rank], layout_of(schedule), tokens_of(schedule)
    first = next((lane.name for lane in schedule.lanes if lane.resource == "compute"), None)
    if first is None:
        raise ScheduleError(f"schedule {schedule.name} has no compute lane, which is the caller's stream")
    lanes = [first, *(lane.name for lane in schedule.lanes if lane.name != first)]
    return RankSchedule(schedule, rank, buffers, given, order, layout, tokens, lanes)


@dataclass(slots=True)
class Run:
    """What the run that was issued last has changed. known: what buffers hold, as far as the host has read it. made: outputs that
    were given as functions. caller: its stream, if the host reads sizes. failure: what was found wrong since."""

    known: dict[str, tuple[int, ...]] = field(default_factory=dict)
    made: Tensors = field(default_factory=dict)
    caller: torch.cuda.Stream | None = None
    failure: DeadlineError | None = None


@dataclass(frozen=True)
class Context(RankSchedule):
    """With memory and streams. region: of symmetric buffers. words: for tokens, and the standing word. own: the schedule's own
    buffers on this rank. side: streams of all lanes but the first. begun_word: pinned; not 0 if a run has begun."""

    domain: Domain
    device: torch.device
    region: Region
    words: Region
    own: Tensors
    side: list[torch.cuda.Stream]
    monitor: torch.cuda.Stream
    begun_word: torch.Tensor
    run: Run = field(default_factory=Run)

    def check(self) -> None:
        """Raise what was found wrong since the last run. Does not wait."""
        run = self.run
        if run.failure is not None:
            failure, run.failure = run.failure, None
            raise failure
        self.domain.check()

    def require_inside(self, buffer: str, first: int, count: int, tensors: Tensors) -> None:
        """End the group if a copy of this run goes beyond its buffer: a part of the run is enqueued, and peers wait for it."""
        rows = self.buffers[buffer].rows
        rows = rows if isinstance(rows, int) else tensors[buffer].shape[0]
        if not 0 <= first <= first + count <= rows:
            text = (
                f"rank {self.rank}: rows {first}:+{count} are outside {buffer} of {rows} rows, by the sizes of this run"
            )
            self.domain.poison(text)
            raise ScheduleError(text)


def allocated(schedule: Schedule, domain: Domain) -> Context:
    """The context of `schedule` on this rank of `domain`. Collective."""
    mine, device = rank_schedule(schedule, domain.rank), domain.device
    region = domain.allocate(mine.layout.buffer_bytes, what=f"buffers of schedule {schedule.name}")
    words = domain.allocate(8 * (mine.standing_word + 1), what=f"signals of schedule {schedule.name}")
    own = _own_buffers(mine, region, device)
    with torch.cuda.device(device):
        side = [torch.cuda.Stream(device, priority=-1) for _ in mine.lanes[1:]]
        monitor = torch.cuda.Stream(device)
    begun_word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    return Context(**vars(mine), domain=domain, device=device, region=region, words=words, own=own, side=side,
                   monitor=monitor, begun_word=begun_word)  # fmt: skip


def _own_buffers(mine: RankSchedule, region: Region, device: torch.device) -> Tensors:
    own = {}
    for b in mine.buffers.values():
        if b.role == "symmetric":
            assert isinstance(b.rows, int)
            own[b.name] = region.tensor(mine.rank, (b.rows, b.cols), TORCH_DTYPE[b.dtype], mine.layout.buffers[b.name])
        elif b.role == "scratch":
            assert isinstance(b.rows, int)
            own[b.name] = torch.empty(b.rows, b.cols, dtype=TORCH_DTYPE[b.dtype], device=device)
    return own
