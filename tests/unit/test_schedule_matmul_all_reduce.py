"""Schedules of GEMM + all-reduce: signals, the order of sums, and the norm of a sum. `test_schedule_gemms.py` runs them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from schedule_interpreter import edited
from support.sim_toys import applicable, gpu

from weft import plan
from weft.builders import MatmulAllReduce, NotApplicableError, named
from weft.errors import ScheduleError
from weft.schedule import RANK, Copy, Draft, Norm, Reduce, Schedule, Tiles, Wait
from weft.schedule.printing import describe
from weft.schedule.spans import span_name
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify
from weft.sim.costs import cost
from weft.sim.uses import Operand


@pytest.mark.parametrize(
    "name", ["two_shot[chunks=2,by=dma,add=reduce]", "chunked[chunks=2,by=dma]", "tracked[chunks=1,to=store]"]
)
def test_who_does_not_wait_for_the_others_sums_overruns_them(name: str) -> None:
    """Without the wait, a rank overwrites sums that a peer still reads, because only these sums tell it that its
    earlier data were reduced.
    """
    p = MatmulAllReduce(3, 18, 2, 3, "fp32")
    early = edited(named(p, name).build(), lambda s: None if isinstance(s, Wait) and s.signal == "ready" else s)
    with pytest.raises(ScheduleError, match=r"race on (box|sums)"):
        verify(early)


def test_nobody_writes_into_a_peer_that_has_not_said_it_is_through_with_the_run_before() -> None:
    """A run with other sizes has its buffers at other places in the same memory."""
    for schedule in applicable(MatmulAllReduce(3, 18, 2, 3, "fp32")).values():
        ranks = [schedule.of_rank(rank) for rank in range(3)]
        setter = {key: r for r, lanes in enumerate(ranks) for lane in lanes for s in lane.steps for key in s.sets()}
        for rank, lanes in enumerate(ranks):
            for lane in lanes:
                heard = set[int]()
                for step in lane.steps:
                    if isinstance(step, Wait) and step.signal == "credit":
                        heard.add(setter[rank, step.signal, step.index])
                    inner = step.tile(0) if isinstance(step, Tiles) else (step,)
                    written = {a.region.at for s in inner for a in s.accesses() if a.writes} - {rank}
                    assert written <= heard, (schedule.name, lane.name, str(step))


@pytest.mark.parametrize("by", ["dma", "kernel", "load"])
def test_all_ranks_add_up_in_the_order_of_ranks(by: str) -> None:
    """In one_shot each rank reduces for itself, so the order must be the same on all ranks."""
    schedule = named(MatmulAllReduce(4, 6, 2, 3, "bf16"), f"one_shot[by={by}]").build()
    for rank in range(4):
        (step,) = (s for lane in schedule.of_rank(rank) for s in lane.steps if isinstance(s, Reduce))
        places = [(part.at, part.row) for part in step.parts]
        assert places == [(r, 0) if by == "load" else (rank, 6 * r) for r in range(4)]


@pytest.mark.parametrize("name", ["two_shot[chunks=2,by=dma,add=gemm]", "chunked[chunks=2,by=dma]"])
def test_copies_from_peers_do_not_queue_behind_copies_of_own_sums(name: str) -> None:
    """A GPU may run a copy within its own memory only after a GEMM."""
    for lane in named(MatmulAllReduce(3, 24, 8, 3, "bf16"), name).build().of_rank(1):
        sources = {step.src.at == 1 for step in lane.steps if isinstance(step, Copy) and step.dst.buffer == "y"}
        assert sources == {"from peers": {False}, "own rows": {True}}.get(lane.name, set())


@pytest.mark.parametrize("name", ["two_shot[chunks=2,by=dma,add=reduce]", "chunked[chunks=2,by=dma]"])
def test_each_byte_of_a_sum_is_copied_once(name: str) -> None:
    """Each sum is copied directly from its owner's memory to the result of each rank."""
    schedule = named(MatmulAllReduce(4, 32, 8, 3, "bf16"), name).build()
    copied = np.zeros((32, 8), int)
    for lane in schedule.of_rank(1):
        for step in lane.steps:
            if isinstance(step, Copy) and step.dst.buffer == "y":
                owner = step.dst.row % 16 // 4 if name.startswith("chunked") else step.dst.row // 8
                assert (step.src.buffer, step.src.at) == ("sums", owner)
                copied[step.dst.row : step.dst.row + step.dst.rows] += 1
    assert (copied == 1).all()


@pytest.mark.parametrize(
    ("name", "m", "why"),
    [
        ("tracked[chunks=1,to=dma]", 15, "m=15 must be divisible by world_size=2"),
        ("tracked[chunks=2,to=store]", 14, "chunks=2, but with to=store"),
        ("two_shot[chunks=4,by=dma,add=gemm]", 6, "rows of a rank's part (3) cannot be cut into 4 pieces"),
        (
            "one_shot[by=dma]",
            1 << 21,
            "one_shot would need memory for 2 whole products, more than 256 MiB: use two_shot",
        ),
    ],
)
def test_what_a_builder_does_not_do_is_said(name: str, m: int, why: str) -> None:
    with pytest.raises(NotApplicableError, match=re.escape(why)):
        named(MatmulAllReduce(2, m, 64, 4, "bf16"), name).build()


def test_it_is_planned_by_the_model_and_explained() -> None:
    """Large products are reduced in parts. Products with few rows are reduced by every rank."""
    text = plan.explain("matmul_all_reduce", M=8192, N=8192, K=4096, ranks=2, hw="h200")
    assert "less than serial's" in text
    assert "errs more" not in text
    large = plan.choose(MatmulAllReduce(4, 16384, 8192, 2048, "bf16"), gpu("h200", 4))
    assert large.candidate.builder in ("two_shot", "chunked")
    assert large.predicted_us < 0.85 * large.row("serial").predicted_us  # type: ignore[operator]
    small = plan.choose(MatmulAllReduce(2, 256, 8192, 4096, "bf16"), gpu("h200", 2), mode="graph")
    assert small.candidate.builder == "one_shot"


@pytest.mark.parametrize(
    ("parts", "fits"),
    [
        ((4, 4), True), ((4, 1), True), ((4, 1, 4, 1), True), ((1, 4), False), ((1, 1), False), ((4, 2), False),
    ],
)  # fmt: skip
def test_a_part_of_one_row_is_added_to_each(parts: tuple[int, ...], fits: bool) -> None:
    d = Draft("sums", 1)
    regions = [d.buffer(f"part{i}", rows, 3, "fp32", "input").part() for i, rows in enumerate(parts)]
    d.lane("compute").reduce(d.buffer("y", 4, 3, "fp32", "output").part(), *regions)
    if fits:
        verify(d.schedule())
    else:
        with pytest.raises(ScheduleError, match="shapes differ"):
            verify(d.schedule())


# --- the norm of a sum ---


def summed(change: str, weight: tuple[int, int] = (1, 3), out: tuple[int, int] = (4, 3), **options: Any) -> Schedule:
    """Return a schedule with one reduce step, which is valid except for `change`."""
    d = Draft("normed", 2)
    a, b = (d.buffer(name, 4, 3, "fp32", "input").part() for name in ("a", "b"))
    w = d.buffer("w", *weight, "bf16" if change == "dtype" else "fp32", "input").part()
    normed, y = d.buffer("normed", *out, "fp32", "output"), d.buffer("y", 8, 3, "fp32", "output")
    total = y.part(rows=(0, 4))
    place = y.part(rows=(2, 4)) if change == "place" else a if change == "input" else normed.part()
    norm = Norm(place, w, options.pop("eps", 1e-6))
    d.lane("compute").reduce(y.part(rows=(4, 4)), a)
    d.lane("compute").reduce(total, a, b, norm=norm, **options)
    return d.schedule()


@pytest.mark.parametrize(
    ("change", "options", "fault"),
    [
        ("", {}, ""),
        ("dtype", {}, "dtypes differ: fp32, fp32, bf16, fp32, fp32"),
        ("weight", {"weight": (4, 3)}, "the norm's weight has shape [4, 3]: it must be [1, 3]"),
        ("weight", {"weight": (1, 2)}, "the norm's weight has shape [1, 2]: it must be [1, 3]"),
        ("out", {"out": (2, 3)}, "the norm's out has shape [2, 3]: it must be [4, 3], the shape of the sum"),
        ("place", {}, "out and the norm's out overlap"),
        ("input", {}, "is written, but a is an input"),
        ("updates", {"accumulate": True}, "an accumulating reduce cannot have a norm"),
    ],
)  # fmt: skip
def test_a_norm_must_fit_its_sum(change: str, options: dict[str, Any], fault: str) -> None:
    schedule = summed(change, **options)
    if not fault:
        verify(schedule)
        return
    with pytest.raises(ScheduleError, match=re.escape(fault)):
        verify(schedule)


@pytest.mark.parametrize("eps", [0, np.float32(1e-6), np.float64(0.5), np.int64(1)])
def test_numbers_of_any_kind_are_an_eps(eps: Any) -> None:
    schedule = summed("eps", eps=eps)
    verify(schedule)
    assert from_json(to_json(schedule)) == schedule
    assert f"eps {float(eps):g}" in str(schedule)


@pytest.mark.parametrize("eps", [-1.0, float("inf"), float("nan"), 10**400, True, RANK, "a", None])
def test_what_is_no_number_from_zero_on_is_no_eps(eps: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"eps={eps!r} must be a finite number of at least 0")):
        summed("eps", eps=eps)


def test_what_is_normed_must_be_there_and_not_change() -> None:
    """Norms of fetched sums wait for the sums, chunk by chunk."""
    p = MatmulAllReduce(2, 8, 3, 4, "fp32", eps=1e-6)
    for name in ("two_shot[chunks=2,by=dma,add=reduce]", "chunked[chunks=2,by=dma]", "tracked[chunks=1,to=dma]"):
        schedule = named(p, name).build()
        early = edited(schedule, lambda s: None if isinstance(s, Wait) and s.signal == "complete" else s)
        with pytest.raises(ScheduleError, match="race on y"):
            verify(early)


def test_a_norm_is_written_read_and_named() -> None:
    schedule = summed("")
    step = schedule.of_rank(0)[0].steps[1]
    assert from_json(to_json(schedule)) == schedule
    assert "reduce  y[0:+4, :] = a + b; normed = rms_norm(y[0:+4, :]) * w, eps 1e-06" in schedule.table(0)
    assert span_name(step, 0) == "reduce y, norm normed"
    alone = replace(step, parts=(step.out,))  # type: ignore[type-var]
    assert span_name(alone, 0) == "norm y -> normed"
    assert describe(alone, 0) == "reduce normed[0:+4, 0:+3] = rms_norm(y[0:+4, 0:+3]) * w[0:+1, 0:+3], eps 1e-06"
    assert [(a.region.buffer, a.writes) for a in alone.accesses()] == [("y", False), ("w", False), ("normed", True)]
    document = json.loads(to_json(schedule))
    plain, one = document["lanes"][0]["steps"]
    assert plain["norm"] is None
    assert one["norm"]["eps"] == 1e-6
    for wrong, fault in (
        ({"eps": "1"}, "eps: '1' is not of type float"),
        ({"mean": 0}, "'mean' is not known"),
        ("rms", "'rms' is not of type dict"),
    ):
        one["norm"] = {**document["lanes"][0]["steps"][1]["norm"], **wrong} if isinstance(wrong, dict) else wrong
        with pytest.raises(ValueError, match=re.escape(fault)):
            from_json(json.dumps(document))
        one["norm"] = json.loads(to_json(schedule))["lanes"][0]["steps"][1]["norm"]


def test_a_norm_costs_the_bytes_that_it_adds() -> None:
    """In the reducing kernel, a norm adds one write. After a fetch it adds a read and a write. A separate kernel also
    adds a launch.
    """
    model, m, n = gpu("h200", 2), 4096, 8192
    matrix, row = Operand(m, n, "bf16", 0, True), Operand(1, n, "bf16", 0, True)
    d = Draft("costs", 2)
    y, normed, other = (d.buffer(name, m, n, "bf16", "output").part() for name in ("y", "normed", "other"))
    norm = Norm(normed, d.buffer("w", 1, n, "bf16", "input").part(), 1e-6)
    plain, both, alone = Reduce(y, (y, other)), Reduce(y, (y, other), False, norm), Reduce(y, (y,), False, norm)
    us = [
        cost(model, 2, step, tuple(row if a.region.rows == 1 else matrix for a in step.accesses())).work_us
        for step in (plain, both, alone)
    ]
    of_row = row.bytes / model.hbm_bytes_per_us
    of_matrix = matrix.bytes / model.hbm_bytes_per_us
    assert us == pytest.approx([3 * of_matrix, 4 * of_matrix + of_row, 2 * of_matrix + of_row])


@pytest.mark.parametrize("world", [2, 4])
def test_each_row_is_normed_once(world: int) -> None:
    """Every rank computes the norm of each row once. A kernel that has the whole row does both the sum and the norm."""
    p = MatmulAllReduce(world, 32 * world, 8, 3, "bf16", residual=True, eps=1e-6)
    for name, schedule in applicable(p).items():
        steps = [s for lane in schedule.of_rank(1) for s in lane.steps if isinstance(s, Reduce) and s.norm]
        rows = np.zeros(p.m, int)
        for step in steps:
            rows[step.norm.out.row : step.norm.out.row + step.norm.out.rows] += 1
        assert (rows == 1).all(), name
        assert len(steps) == 1 or ("chunks=" in name and "chunks=1" not in name), name
        assert all(s.norms_only for s in steps) == (not name.startswith("one_shot")), name
