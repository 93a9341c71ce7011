"""Which steps of a schedule the kernel of grouped GEMMs takes, and with which sources and experts."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from slow import slow
from test_stream_tokens import Recorded, owner_of

from weft.errors import ScheduleError
from weft.runtime import stream_compiler
from weft.runtime.stream_late import segments_of
from weft.schedule import AllToAllMatmul, Compute, NotApplicableError, Schedule, Tiles, candidates

EVERYTHING = ("dispatch", "dispatch_by_expert")


def schedules(world: int, experts: int, *, exact: bool = True) -> list[tuple[str, Schedule]]:
    found = []
    p = AllToAllMatmul(world, experts, (12,) * world, 16, 8, "bf16", most=20, exact=exact)
    for candidate in candidates(p, EVERYTHING):
        with contextlib.suppress(NotApplicableError):
            found.append((candidate.name, candidate.build()))
    return found


def tiles_of(schedule: Schedule, rank: int) -> list[Tiles]:
    return [s for lane in schedule.of_rank(rank, expected=False) for s in lane.steps if isinstance(s, Tiles)]


@pytest.mark.parametrize(("world", "experts"), [(2, 1), (2, 8), (3, 2), slow(4, 3), slow(8, 4)])
def test_every_source_and_expert_is_in_one_launch(world: int, experts: int) -> None:
    for name, schedule in schedules(world, experts):
        for rank in (0, world - 1):
            done: list[tuple[int, int]] = []
            for step in tiles_of(schedule, rank):
                s = segments_of(step, schedule, rank)
                assert (s.tokens, s.inbox, s.slot_rows, s.experts) == ("tokens", "inbox", 20, experts), name
                turns = range(s.first_source, s.first_source + s.n_sources)
                done += [(t % world, e) for t in turns for e in range(s.first_expert, s.first_expert + s.n_experts)]
            assert sorted(done) == [(t, e) for t in range(world) for e in range(experts)], name


def test_other_tiles_are_refused() -> None:
    _, schedule = schedules(2, 2)[0]
    step = tiles_of(schedule, 0)[0]
    gemm = step.body[0]
    assert isinstance(gemm, Compute)
    elsewhere = replace(step, body=(replace(gemm, out=replace(gemm.out, row=gemm.out.row + 1)),))
    adding = replace(step, body=(replace(gemm, accumulate=True),))
    for wrong in (elsewhere, adding):
        with pytest.raises(ScheduleError, match="streams cannot run tiles of grouped_matmul as they are"):
            segments_of(wrong, schedule, 0)


def test_only_copies_by_kernel_leave_the_host_out() -> None:
    assert all(schedule.reads_on_host for _, schedule in schedules(2, 4))
    bounded = schedules(2, 4, exact=False)
    assert bounded
    assert not any(schedule.reads_on_host for _, schedule in bounded)
    assert all("by=kernel" in name for name, _ in bounded)


class Numbers:
    """In place of `Totals`: as many sizes as it is asked for, at addresses of its own."""

    made: list[Numbers]

    def __init__(self, held: object, indices: list[object]) -> None:
        self.first = 1000 * (1 + len(self.made))
        self.end = self.first + len(indices)
        self.made.append(self)

    def record(self, program: object, stream: int) -> bool:
        self.stream = stream
        return True

    def address(self, number: int) -> int:
        return self.first + number


@pytest.mark.parametrize("exact", [True, False])
def test_each_lane_finds_the_sizes_of_its_own_copies(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """And copies on several lanes have no more programs together than those on one."""
    copies: list[dict[str, Any]] = []

    def move(device: object, **what: Any) -> SimpleNamespace:
        copies.append(what)
        return SimpleNamespace(record=lambda *_: True)

    monkeypatch.setattr(Numbers, "made", [], raising=False)
    monkeypatch.setattr(stream_compiler, "_core", SimpleNamespace(StreamProgram=Recorded))
    for name, instead in (("Move", move), ("Totals", Numbers)):
        monkeypatch.setattr(stream_compiler, name, instead)
    for name in ("ReadAhead", "Gemms"):
        monkeypatch.setattr(stream_compiler, name, lambda *_: SimpleNamespace(begin=0, settle=0, gemms=[], prepare=0))
    for name, schedule in schedules(4, 4, exact=exact):
        if "by=kernel" not in name:
            continue
        copies.clear()
        Numbers.made.clear()
        stream_compiler.compile_streams(owner_of(schedule, 1), False)  # type: ignore[arg-type]
        late = [copy for copy in copies if "sizes" in copy]
        lanes = [lane for lane in schedule.lanes if lane.resource == "copy"]
        assert len(lanes) == (3 if "send=at_once" in name else 1), name
        assert sorted(numbers.stream for numbers in Numbers.made) == [1 + i for i in range(len(lanes))], name
        assert sorted(copy["sizes"] for copy in late) == [at for n in Numbers.made for at in range(n.first, n.end, 3)]
        assert len(lanes) * late[0]["programs"] <= stream_compiler.LATE_PROGRAMS, name
