"""Flags, by which streams of several ranks wait for each other.

A flag is never set while it is still set. The watchdog derives from flags which signals a run waits for. Loading
kernels does not change memory that peers read. `test_modelled_gpus.py` runs streams with flags.
"""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: it compiles the kernels that programs launch")

from modelled_gpus import SymmetricMemory, compiled, model
from support.sim_toys import applicable
from support.slow import mostly

from weft.builders import (
    AllGatherMatmul,
    AllToAllMatmul,
    MatmulAllToAll,
    MatmulReduceScatter,
    NotApplicableError,
    candidates,
    named,
)
from weft.errors import ScheduleError
from weft.runtime.cuda.flags import FLAG, flags_of, missing
from weft.runtime.schedule_memory import TORCH_DTYPE, layout_of
from weft.schedule import RANK, Collective, Draft
from weft.schedule.launches import Launch, crosses, launches, launches_of_rank
from weft.schedule.verify.issue_order import issue_order

PROBLEMS = {
    "2 ranks": AllGatherMatmul.even(64, 32, 32, 2),
    "3 ranks, uneven": AllGatherMatmul(3, (8, 24, 16), (32,), 32, "bf16"),
    "4 ranks, the gathered input wanted": AllGatherMatmul(4, (16, 16, 16, 16), (32,), 32, "bf16", True),
    "a rank without rows": AllGatherMatmul(2, (0, 64), (32,), 32, "bf16"),
    "scattered to 2 ranks": MatmulReduceScatter(2, 1024, 300, 32, "bf16"),
    "scattered to 4 ranks": MatmulReduceScatter(4, 1200, 40, 32, "fp32"),
}


@pytest.mark.parametrize("name", mostly(PROBLEMS, "2 ranks", "scattered to 2 ranks"))
def test_kernels_are_loaded_without_a_change_of_what_peers_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Kernels for a new layout are loaded while peers may still be in the previous run, or may have sent data for the
    next run.
    """
    model(monkeypatch)
    for what in ("current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, what, lambda *_: contextlib.nullcontext())
    loaded = set()
    for candidate in candidates(PROBLEMS[name]):
        try:
            schedule = candidate.build()
        except NotApplicableError:
            continue
        if any(isinstance(step, Collective) for lane in schedule.lanes for step in lane.steps):
            continue  # there is no library here
        region = SymmetricMemory(schedule.world_size, layout_of(schedule).buffer_bytes, fill=7)
        context, items = compiled(schedule, 1, region)
        items.warm_up({b.name: torch.ones(int(b.rows), b.cols, dtype=TORCH_DTYPE[b.dtype]) for b in context.given})
        assert all((block == 7).all() for block in region.blocks), candidate.name
        loaded |= {candidate.builder} if items.calls else set()
    assert len(loaded) >= 2


def test_flags_of_experts_can_be_cleared_in_time() -> None:
    for problem, builders in (
        (AllToAllMatmul, ("dispatch", "dispatch_by_expert")),
        (partial(AllToAllMatmul, return_x=True), ("dispatch", "dispatch_by_expert")),
        (MatmulAllToAll, ("combine", "combine_by_expert")),
    ):
        schedules = applicable(problem(3, 8, (24,) * 3, 64, 64, "bf16", 24))
        for schedule in (one for name, one in schedules.items() if name.partition("[")[0] in builders):
            assert any(flags_of(schedule))


def test_a_signal_that_may_come_twice_before_its_wait_ends_is_refused() -> None:
    d = Draft("careless", 2)
    x, y = d.buffer("x", 8, 8, "fp32", "input"), d.buffer("y", 8, 8, "fp32", "output")
    told = d.signals("told", 2)
    compute = d.lane("compute").copy(x.part(), y.part(), "kernel").set(told, RANK, at=(RANK + 1) % 2)
    d.lane("late", "copy").wait(told, (RANK + 1) % 2)
    compute.copy(x.part(), y.part(), "kernel")
    with pytest.raises(
        ScheduleError, match=r"may set told\[\d\] of rank \d again before lane 'late' there has ended its previous wait"
    ):
        flags_of(d.schedule())


@pytest.mark.parametrize(
    ("previous", "heard", "safe"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_an_answer_protects_a_flag_only_if_it_is_heard_in_time(previous: bool, heard: bool, safe: bool) -> None:
    """Each rank notifies its peer at the beginning of every run, and the peer answers when its wait has ended.

    A rank that waits for the answer in another lane has it only at the end of its run. The rank then sets the flag
    again in the next run, which is safe if the peer's wait is for the same run. It is not safe if the peer's wait is
    for the previous run.
    """
    d, peer = Draft("answered", 2), (RANK + 1) % 2
    x, y = d.buffer("x", 8, 8, "fp32", "input"), d.buffer("y", 8, 8, "fp32", "output")
    told, answered = d.signals("told", 2), d.signals("answered", 2)
    d.lane("compute").copy(x.part(), y.part(), "kernel").set(told, RANK, at=peer)
    d.lane("answers", "copy").wait(told, peer, previous=previous).set(answered, RANK, at=peer)
    if heard:
        d.lane("hears", "copy").wait(answered, peer)
    if safe:
        assert all(flags_of(d.schedule()))
    else:
        with pytest.raises(ScheduleError, match=r"may set told\[\d\] of rank \d again before lane 'answers' there"):
            flags_of(d.schedule())


@pytest.mark.parametrize(
    ("name", "standing", "come", "wanted"),
    [
        # The rank is idle, and peers have read the rows of the previous run.
        ("shard[chunks=1,send=in_turn,by=dma]", 0, {"credit"}, None),
        ("shard[chunks=1,send=in_turn,by=dma]", 0, set(), "arrived"),  # room was there and is taken, or never was
        ("shard[chunks=1,send=in_turn,by=dma]", 0, {"arrived"}, "credit"),
        ("gather[by=kernel]", 0, set(), None),
        ("gather[by=kernel]", 1, set(), "credit"),
        ("gather[by=kernel]", 2, set(), "arrived"),
        ("gather[by=kernel]", 1, {"credit"}, "arrived"),
    ],
)
def test_what_a_run_waits_for_is_told_from_its_words(
    name: str, standing: int, come: set[str], wanted: str | None
) -> None:
    schedule = named(PROBLEMS["2 ranks"], name).build()
    flags = flags_of(schedule)[0]
    words = [0] * len(flags)
    for flag in flags.values():
        words[flag.word] = FLAG if flag.key[0] in come else 0
    assert [flag.key[0] for _, flag in missing(flags, words, standing)] == ([wanted] if wanted else [])


def test_all_ranks_are_named_whose_signal_may_be_missing() -> None:
    """One of three ranks did not arrive. The flag of the other rank has arrived and is cleared, so the flags of both
    look the same.
    """
    schedule = next(c for c in candidates(PROBLEMS["3 ranks, uneven"]) if c.name.startswith("shard[chunks=1")).build()
    flags = flags_of(schedule)[2]
    found = missing(flags, [0] * len(flags), 0)
    assert {flag.key for _, flag in found} == {("arrived", 0), ("arrived", 1)}
    assert {flag.setter for _, flag in found} == {0, 1}


def test_sets_are_not_put_off_behind_waits_of_other_lanes() -> None:
    """If the streams share a hardware queue, delayed sets would never arrive: each rank's copy lane waits for a set of
    the other rank's launch.
    """
    d = Draft("two lanes", 2)
    x, y, box = (
        d.buffer("x", 8, 8, "fp32", "input"), d.buffer("y", 8, 8, "fp32", "output"), d.buffer("box", 8, 8, "fp32", "symmetric"),
    )  # fmt: skip
    first, tail, peer = d.signals("first", 2), d.signals("tail", 2), (RANK + 1) % 2
    d.lane("compute").copy(x.part(), y.part(), "kernel").wait(first, peer).set(tail, RANK, at=peer)
    d.lane("side", "copy").copy(x.part(), box.part(), "kernel").set(first, RANK, at=peer).wait(tail, peer)
    schedule = d.schedule()
    buffers = {buffer.name: buffer for buffer in schedule.buffers}
    order, awaited = issue_order(schedule)[0], {flag.key for flag in flags_of(schedule)[0].values()}
    _, side = schedule.of_rank(0)

    def launched(found: list[Launch]) -> int:
        """Return the number of steps of the launch on the side lane."""
        return next(len(one.steps) for one in found if one.lane == 1 and one.copies)

    found = launches_of_rank(schedule, 0, ["compute", "side"], order, awaited, buffers)
    assert launched(found) == 2, "the copy and its set"
    found = launches(side.steps, [crosses(step, 0, awaited) for step in side.steps], buffers, lane=1)
    assert launched(found) == 3, "with the wait, until whose place in the order the set is put off"
