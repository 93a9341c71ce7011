"""A single builder of under 60 lines adds a schedule. It is verified, serialised, printed, simulated, traced, run and
planned like weft's own schedules.

`tests/processes/test_made_up_schedule_ranks.py` runs it on processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from schedule_cases import GATHER, of_gather
from schedule_checks import check_candidate
from schedule_interpreter import edited
from support import made_up

import weft.schedule
from weft import plan
from weft.builders import (
    AllGatherMatmul,
    AllToAllMatmul,
    NotApplicableError,
    Problem,
    builder,
    builders_of,
    candidates,
    named,
    problem,
    unregister,
)
from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.plan.predict import AT_LEAST
from weft.runtime.cuda.flags import flags_of
from weft.runtime.null import NullSchedule
from weft.schedule import RANK, Compute, Copy, Draft, Expr, Norm, Reduce, Schedule, Set, Wait, lookup
from weft.schedule.verify import verify
from weft.sim import Model, model_of, simulate
from weft.timeline import Timeline
from weft.trace import bytes_sent, draw_overlap, write_trace

LARGE = AllGatherMatmul.even(8192, 4096, 8192, 4)
NAMES = ("ring[by=dma]", "ring[by=kernel]")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WEFT_QUIET", "1")
    with made_up.registered():
        yield
    assert "ring" not in dict(builders_of(AllGatherMatmul))


def ring(problem: AllGatherMatmul) -> Schedule:
    return candidates(problem, ("ring",))[0].build()


def test_every_combination_of_its_parameters_is_a_candidate() -> None:
    assert tuple(candidate.name for candidate in candidates(LARGE, ("ring",))) == NAMES


@pytest.mark.parametrize("problem", [p for p in GATHER if p.world_size > 1], ids=str)
def test_it_verifies_keeps_its_value_in_json_and_computes_the_product(problem: AllGatherMatmul) -> None:
    check_candidate(problem, "ring", ring(problem), of_gather, runs=3, seeds=3)


def test_it_cannot_be_done_alone_and_says_so() -> None:
    with pytest.raises(NotApplicableError, match="nothing to gather"):
        ring(AllGatherMatmul.even(8, 8, 8, 1))


def test_what_is_wrong_with_it_is_found() -> None:
    hasty = edited(ring(LARGE), lambda step: None if isinstance(step, Wait) and step.previous else step)
    with pytest.raises(ScheduleError, match=r"race on box@\d.* in different runs, and no signal orders them"):
        verify(hasty)


def test_streams_can_signal_as_it_does_and_refuse_a_counter_that_is_set_twice() -> None:
    assert {flag.key: flag.setter for flag in flags_of(ring(LARGE))[1].values()} == {
        ("credit", 0): 2,
        **{("there", hop): 0 for hop in range(3)},
    }
    one_counter = edited(ring(LARGE), lambda step: replace(step, index=0) if isinstance(step, Set) else step)
    with pytest.raises(ScheduleError, match=r"there\[0\] of rank \d is set 3 times in a run.*an index of its own"):
        flags_of(one_counter)


def test_it_prints() -> None:
    lines = ring(LARGE).table().splitlines()
    assert lines[0] == "schedule ring, 4 ranks"
    assert "lane pull (copy)" in lines
    assert sum(" matmul " in line for line in lines) == 4
    assert max(map(len, lines)) <= 132


def test_it_simulates_and_its_timeline_becomes_a_trace_and_a_picture(tmp_path: Path) -> None:
    import matplotlib.image  # not imported at the top, because ranks and workers import this file too

    model = h200()
    found = simulate(ring(LARGE), model)
    assert found.end_us >= model.matmul(LARGE.m, LARGE.n[0], LARGE.k, "bf16").time_us
    assert found.timeline.ranks() == [0, 1, 2, 3]
    write_trace(tmp_path / "ring.json", {"ring": found.timeline})
    events = [e for e in json.loads((tmp_path / "ring.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(found.timeline)
    of_rank_0 = {e["name"] for e in events if e["pid"] == 0}
    assert {"matmul y0", "wait there[2]", "Memcpy PtoP (copy box@3 -> box)"} <= of_rank_0
    for rank in range(4):  # fetched bytes count as sent
        assert bytes_sent(found.timeline, rank)[1][-1] == pytest.approx(3 * LARGE.largest_shard_bytes)
    draw_overlap(tmp_path / "ring.png", {"ring": found.timeline}, "4 ranks")
    assert min(matplotlib.image.imread(tmp_path / "ring.png").shape[:2]) > 300


def test_the_executor_that_does_nothing_runs_it() -> None:
    schedule, timeline = ring(LARGE), Timeline()
    for rank in range(4):
        given = [b for b in schedule.buffers_of_rank(rank) if b.role in ("input", "output")]
        executor = NullSchedule(schedule, SimpleNamespace(rank=rank, world_size=4))
        executor.run({b.name: np.empty((int(b.rows), b.cols), np.int8) for b in given}, timeline=timeline)
    for rank in range(4):
        for lane in schedule.of_rank(rank):
            done = [span.name.split()[0] for span in timeline if (span.rank, span.lane) == (rank, lane.name)]
            steps = [str(step).split()[0] for step in lane.steps if not isinstance(step, Set)]
            assert done == steps


# -- the planner


def h200() -> Model:
    return model_of(load_machine("h200"), 4)


def loading(gbps: float) -> Model:
    """Return a model of H200s that store and copy to peers at 30 GB/s, and load from peers at `gbps`."""
    slow = 30e3  # bytes/us
    return replace(
        h200(), copy_bytes_per_us=slow, put_bytes_per_us=((1, slow),), get_bytes_per_us=((1, 1e3 * gbps),),
        collective_bytes_per_us=slow,
    )  # fmt: skip


def test_steps_that_do_not_fit_are_told_and_not_priced() -> None:
    def ring(p: AllGatherMatmul) -> Schedule:  # a wrong builder: it fetches only half of the columns that it multiplies
        return edited(
            made_up.ring(p, by="dma"),
            lambda step: replace(step, src=replace(step.src, cols=p.k // 2)) if isinstance(step, Copy) else step,
        )

    unregister(AllGatherMatmul, "ring")
    builder(AllGatherMatmul)(ring)
    row = plan.choose(LARGE, h200()).row("ring")
    assert row.us is None
    assert row.why_not.startswith("schedule ring has ")


def test_it_is_chosen_where_loading_is_fastest() -> None:
    choice = plan.choose(LARGE, loading(350))
    assert choice.candidate.name == "ring[by=kernel]"
    assert choice.schedule == made_up.ring(LARGE, by="kernel")
    assert {row.candidate.builder for row in choice.rows} == {one.builder for one in candidates(LARGE)}
    # The reason is not that it is the simplest of several equally fast schedules.
    assert "is the fastest:" in choice.reason


@pytest.mark.parametrize(
    "model", [loading(50), h200(), model_of(load_machine("mi300x"), 4)], ids=["slow loads", "h200", "mi300x"]
)
def test_it_is_weighed_and_not_chosen_elsewhere(model: Model) -> None:
    choice = plan.choose(LARGE, model)
    assert choice.candidate.builder != "ring"
    for name in NAMES:
        row = choice.row(name)
        assert row.us is not None or row.why_not.startswith(AT_LEAST)
        assert row.why_not


def test_measured_times_and_pins_choose_it_too() -> None:
    assert plan.choose(LARGE, h200(), measured={"serial": 900.0, NAMES[0]: 700.0}).candidate.name == NAMES[0]
    with plan.use(NAMES[1]):
        assert plan.choose(LARGE, h200()).candidate.name == NAMES[1]


def test_one_for_another_operator_is_weighed_by_the_planner_too() -> None:
    @builder(AllToAllMatmul)
    def own_rows_only(p: AllToAllMatmul) -> Schedule:
        """Build a wrong schedule, which ignores rows of other ranks and is therefore the fastest."""
        d = Draft("own_rows_only", p.world_size)
        rows = p.rows[0] // p.world_size
        tokens = d.buffer("tokens", rows, p.k, p.dtype, "input")
        w = d.buffer("w", p.experts * p.k, p.n, p.dtype, "input")
        y = d.buffer("y", rows, p.n, p.dtype, "output")
        each, first = rows // p.experts, Expr("t")
        matmul = Compute(
            "matmul",
            y.part(rows=(first * each, each)),
            (tokens.part(rows=(first * each, each)), w.part(rows=(first * p.k, p.k))),
        )
        d.lane("compute").tiles(made_up.Kernel(), "t", p.experts, matmul)
        return d.schedule()

    try:
        for exact in (True, False):
            p = replace(AllToAllMatmul.even(256, 14336, 4096, 4, 4), exact=exact)
            for mode in plan.MODES:
                choice = plan.choose(p, h200(), mode=mode)
                assert choice.candidate.name == "own_rows_only"
                assert choice.row("own_rows_only").losses is not None
    finally:
        unregister(AllToAllMatmul, "own_rows_only")


def test_a_builder_of_another_module_is_not_replaced() -> None:
    def serial(p: AllGatherMatmul) -> Schedule:
        raise AssertionError("it was refused, and is never called")

    with pytest.raises(
        ValueError,
        match=r"already has a builder named 'serial', from weft\.builders\.all_gather_matmul: give yours",
    ):
        builder(AllGatherMatmul)(serial)


def test_a_builder_that_fails_is_named() -> None:
    @builder(AllGatherMatmul)
    def broken(p: AllGatherMatmul) -> Schedule:
        raise KeyError("boom")

    try:
        with pytest.raises(ScheduleError, match=r"test_made_up_schedule\.broken.*KeyError: 'boom'"):
            next(c for c in candidates(AllGatherMatmul.even(8, 8, 8, 2)) if c.builder == "broken").build()
    finally:
        unregister(AllGatherMatmul, "broken")


def test_messages_of_drafts_say_what_to_write() -> None:
    d = Draft("messages", 2)
    there = d.signals("there", 1)
    assert Set(there, 0, 1) == Set("there", 0, 1)  # type: ignore[arg-type]
    assert Wait(there) == Wait("there")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError,
        match=(
            r"lane a, in 'for': a LaneDraft is not a step: .* inside repeat, write "
            "Copy"
        ),
    ):
        d.lane("a").repeat("i", 2, d.lane("b").wait(there))  # type: ignore[arg-type]
    d.lane("a").set(there).wait(there, count=lookup((0, 1), RANK))
    with pytest.raises(
        ScheduleError, match=r"count=0 must be at least 1. To wait on some ranks only, put the wait into a loop"
    ):
        verify(d.schedule())


def test_what_is_no_region_is_refused_where_it_is_written() -> None:
    d = Draft("regions", 1)
    x, w = d.buffer("x", 4, 3, "fp32", "input"), d.buffer("w", 1, 3, "fp32", "input")
    y, z = (d.buffer(name, 4, 3, "fp32", "output") for name in "yz")
    lane: Any = d.lane("a")
    a_norm = "norm of 'reduce' is a tuple: write Norm(out, weight, eps)"
    for add, fault in (
        (lambda: lane.reduce(y.part(), x), "parts of 'reduce' takes regions, but x is a buffer: write x.part()"),
        (lambda: lane.reduce(y, x.part()), "out of 'reduce' takes regions, but y is a buffer: write y.part()"),
        (lambda: lane.reduce(y.part(), x.part(), norm=(z.part(), w.part(), 0.0)), a_norm),
        (
            lambda: lane.reduce(y.part(), x.part(), norm=Norm(z, w.part(), 0.0)),
            "norm of 'reduce' takes .* write z.part()",
        ),
        (
            lambda: lane.reduce(y.part(), x.part(), norm=Norm(z.part(), w, 0.0)),
            "norm of 'reduce' takes .* write w.part()",
        ),
        (lambda: lane.then(Reduce(y.part(), x.part())), "parts of 'reduce' is a Region: write a tuple of regions"),
        (lambda: lane.copy(x.part(), "y"), "dst of 'copy' takes regions, but got a str: write x.part()"),
        (lambda: lane.compute("silu", y.part(), x), "inputs of 'compute' takes .* write x.part()"),
        (lambda: lane.all_reduce(x, y.part()), "src of 'collective' takes .* write x.part()"),
        (lambda: lane.repeat("i", 2, Copy(x, y.part())), "in 'for': src of 'copy' takes .* write x.part()"),
        (lambda: lane.read(x.part()), "a Region is not a Buffer: read takes a whole buffer"),
        (lambda: lane.set(x), "a Buffer is not a Signals: pass signals that Draft.signals returned"),
        (lambda: lane.wait(None), "a NoneType is not a Signals: pass signals that Draft.signals returned"),
    ):
        with pytest.raises(TypeError, match=f"lane a.*{fault}".replace("(", r"\(").replace(")", r"\)")):
            add()
    assert not lane.steps


def test_a_problem_without_builders_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "PROBLEMS", {})

    @dataclass(frozen=True, slots=True)
    class Bare(Problem):
        name: ClassVar[str] = "bare"
        m: int

    p = Bare(2, 4)
    with pytest.raises(ValueError, match="no schedule 'serial' for bare: no builder is registered for Bare"):
        named(p, "serial")

    def own(p: Bare) -> Schedule:
        return Draft("own", p.world_size).schedule()

    builder(Bare)(own)
    with pytest.raises(
        ValueError, match="no schedule 'serial' for bare, but every problem needs one: register a builder named"
    ):
        named(p, "serial")

    def own(p: Bare) -> Schedule:  # type: ignore[no-redef]
        raise NotApplicableError("never")

    builder(Bare)(own)
    with pytest.raises(ValueError, match="no schedule 'else' for bare: none of its builders supports m=4, 2 ranks"):
        named(p, "else")


@pytest.mark.parametrize("name", ["MatmulReduceScatter", "Problem", "builder", "output_map"])
def test_a_name_that_moved_to_builders_says_where(name: str) -> None:
    with pytest.raises(ImportError, match=rf"weft\.schedule\.{name} moved: use weft\.builders"):
        exec(f"from weft.schedule import {name}")
    with pytest.raises(
        (AttributeError, ImportError), match=rf"weft\.schedule\.{name} moved: use weft\.builders"
    ) as found:
        getattr(weft.schedule, name)
    assert found.type is AttributeError  # with an ImportError, `hasattr` would raise
    assert not hasattr(weft.schedule, name)
    with pytest.raises(AttributeError, match=r"module 'weft.schedule' has no attribute 'Nowhere'; it has .*Draft"):
        weft.schedule.Nowhere  # noqa: B018
