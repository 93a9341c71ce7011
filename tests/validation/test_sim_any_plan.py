"""Properties that hold for every plan: drawn problems of all operators, with uneven and empty parts, on drawn topologies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.sim_toys import applicable

from weft.builders import (
    AllGatherMatmul,
    AllToAllMatmul,
    EmbeddingAllToAll,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllToAll,
    MatmulReduceScatter,
    Problem,
)
from weft.hw import load_machine
from weft.hw.topology import load_topology
from weft.plan.predict import MODES, Mode, least_us, predict
from weft.schedule import Schedule, Set, Step, Tiles, Wait
from weft.schedule.verify.happens_before import HappensBefore
from weft.sim import Model, model_of, simulate
from weft.sim.bounds import bound
from weft.timeline import Span

TOPOLOGIES = {
    2: ("switch", "mesh", "ring"), 3: ("switch", "mesh", "ring"),
    4: ("switch", "mesh", "ring", "torus:2x2", "hosts:2x2"),
}  # fmt: skip
"""Topologies by number of ranks. In all but the last, a rotation of the ranks maps links to links."""


@cache
def machine(topology: str, ranks: int) -> Model:
    name = "h200" if topology.startswith(("switch", "hosts")) else "mi300x"
    found = load_machine(name)
    whole = topology if ":" in topology else f"{topology}:{ranks}"
    return replace(model_of(found, ranks), wiring=load_topology(whole, found))


ROWS = st.sampled_from([0, 1, 3, 16, 200, 1024])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Return a problem with some work. Ranks may have different sizes, and some may have none."""
    world = draw(st.sampled_from(sorted(TOPOLOGIES)))
    n, k = draw(st.sampled_from([16, 520, 2048])), draw(st.sampled_from([16, 520, 2048]))
    op = draw(st.sampled_from(["gather", "scatter", "reduce", "back", "dispatch", "combine", "embedding"]))
    each = draw(st.lists(ROWS, min_size=world, max_size=world).filter(any))
    if op == "gather":
        return AllGatherMatmul(world, tuple(each), (n,), k, "bf16")
    if op == "embedding":
        tables = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world).filter(any))
        return EmbeddingAllToAll(world, tuple(each), slots_of(tables))
    if op in ("dispatch", "combine"):
        experts = draw(st.integers(1, 2))
        counts = st.lists(st.sampled_from([0, 0, 1, 40, 300]), min_size=world * experts, max_size=world * experts)
        splits = draw(st.lists(counts.map(tuple), min_size=world, max_size=world).filter(lambda s: any(map(any, s))))
        rows = tuple(map(sum, splits))
        kind: Any = AllToAllMatmul if op == "dispatch" else MatmulAllToAll
        return kind(world, experts, rows, n, k, "bf16", most=max(rows), exact=draw(st.booleans()), splits=tuple(splits))
    m = max(each) * (1 if op == "back" else world)
    return {"scatter": MatmulReduceScatter, "reduce": MatmulAllReduce, "back": MatmulAllGather}[op](
        world, m, n, k, "bf16"
    )


def slots_of(tables: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the places of pooled vectors of 64 columns. tables: the number of tables of each rank."""
    return tuple(tuple((64 * i, 64) for i in range(sum(tables[:r]), sum(tables[: r + 1]))) for r in range(len(tables)))


@st.composite
def plans(draw: st.DrawFn) -> tuple[Problem, Model, str]:
    """Return (problem, model, name of a schedule that supports the problem)."""
    problem = draw(problems())
    model = machine(draw(st.sampled_from(TOPOLOGIES[problem.world_size])), problem.world_size)
    return problem, model, draw(st.sampled_from(sorted(schedules(problem))))


@cache
def schedules(problem: Problem) -> dict[str, Schedule]:
    return applicable(problem)


@settings(max_examples=120)
@given(plans(), st.sampled_from(MODES))
def test_no_plan_is_faster_than_its_bound(plan: tuple[Problem, Model, str], mode: Mode) -> None:
    problem, model, name = plan
    us = predict(schedules(problem)[name], model, mode, least_us(problem, model))
    assert math.isfinite(us)
    assert us > 0
    assert us >= bound(problem, model).us * (1 - 1e-9)


def grown(problem: Problem, factor: int) -> Problem:
    """Return the problem with `factor` times as many rows on each rank, and for each expert."""
    p: Any = problem
    if isinstance(p, (AllToAllMatmul, MatmulAllToAll)):
        splits = tuple(tuple(factor * count for count in of_rank) for of_rank in p.splits)
        return replace(p, rows=tuple(map(sum, splits)), splits=splits, most=factor * p.most)
    if isinstance(p, AllGatherMatmul):
        return replace(p, rows=tuple(factor * count for count in p.rows))
    if isinstance(p, EmbeddingAllToAll):
        return replace(p, batch_sizes=tuple(factor * count for count in p.batch_sizes))
    return replace(p, m=factor * p.m)


def margin(name: str) -> float:
    """Return by how much a plan may become faster if something is worse, relative to its time.

    Concurrent work may meet at another moment, and a collective may have to wait for a GEMM.
    """
    return 1e-6 if name == "serial" else 0.25 if "collective" in name else 0.05


@settings(max_examples=60)
@given(plans(), st.integers(2, 5), st.sampled_from(MODES))
def test_more_rows_take_no_less_time(plan: tuple[Problem, Model, str], factor: int, mode: Mode) -> None:
    problem, model, name = plan
    more = grown(problem, factor)
    assume(name in schedules(more))
    few, many = (predict(schedules(p)[name], model, mode, least_us(p, model)) for p in (problem, more))
    assert many >= few * (1 - margin(name))


def changed_links(model: Model, latency_us: float, factor: float) -> Model:
    """Return the model with links that have `factor` of their bandwidth, and an additional latency."""
    wiring = model.wiring.scaled(factor)
    numbers = [number + latency_us if place in (1, 3) else number for place, number in enumerate(wiring.numbers)]
    return replace(model, wiring=replace(wiring, numbers=tuple(numbers)))


@settings(max_examples=60)
@given(plans(), st.floats(0, 30), st.floats(0.1, 1), st.sampled_from(MODES))
def test_slower_links_take_no_less_time(
    plan: tuple[Problem, Model, str], latency_us: float, factor: float, mode: Mode
) -> None:
    problem, model, name = plan
    usual, worse = (
        predict(schedules(problem)[name], one, mode) for one in (model, changed_links(model, latency_us, factor))
    )
    assert worse >= usual * (1 - margin(name))


def rotated(problem: Problem, turn: int) -> Problem:
    """Return the problem in which each rank has the part of the rank `turn` places before it."""
    p: Any = problem

    def turned(parts: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(parts[(place - turn) % len(parts)] for place in range(len(parts)))

    if isinstance(p, (AllToAllMatmul, MatmulAllToAll)):
        of_ranks = [[of[i : i + p.experts] for i in range(0, len(of), p.experts)] for of in p.splits]
        splits = turned([sum(turned(of), ()) for of in of_ranks])
        return replace(p, rows=turned(p.rows), splits=splits)
    if isinstance(p, AllGatherMatmul):
        return replace(p, rows=turned(p.rows))
    if isinstance(p, EmbeddingAllToAll):
        slots = slots_of(turned([len(slots) for slots in p.slots]))
        return replace(p, batch_sizes=turned(p.batch_sizes), slots=slots)
    return p


@settings(max_examples=60)
@given(plans(), st.integers(1, 3), st.sampled_from(MODES))
def test_rotated_ranks_take_equal_times(plan: tuple[Problem, Model, str], turn: int, mode: Mode) -> None:
    """The links look alike from all ranks. Schedules with order=natural do not: ranks send in the order of their numbers."""
    problem, model, name = plan
    assume(model.wiring.of(problem.world_size).period == 1)
    assume("order=natural" not in name)
    other = rotated(problem, turn)
    assume(name in schedules(other))
    one, two = (predict(schedules(p)[name], model, mode) for p in (problem, other))
    assert abs(one - two) <= 1e-3 * one


@settings(max_examples=40)
@given(plans(), st.sampled_from(MODES))
def test_steps_run_in_an_order_that_the_schedule_allows(plan: tuple[Problem, Model, str], mode: Mode) -> None:
    """If a step happens before another one in every execution, it ends before the other one begins. A wait begins when its lane
    reaches it, so for a wait its end counts. Steps without a span are left out: sets, and tiles of which a rank has none.
    """
    problem, model, name = plan
    schedule = schedules(problem)[name]
    assume(not schedule.contents)  # otherwise steps with sizes of 0 have no span
    ranks = [schedule.of_rank(rank) for rank in range(schedule.world_size)]
    spans: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in simulate(schedule, model, mode=mode).timeline:
        spans[span.rank, span.lane].append(span)
    span_of: dict[tuple[int, int, int], Span] = {}
    for rank, lanes in enumerate(ranks):
        for number, lane in enumerate(lanes):
            timed = [i for i, step in enumerate(lane.steps) if not isinstance(step, Set) and not is_empty(step)]
            found = sorted(spans[rank, lane.name], key=lambda span: (span.start_us, span.end_us))
            assert len(found) == len(timed), lane.name
            span_of |= {(rank, number, i): span for i, span in zip(timed, found, strict=True)}
    relation = HappensBefore(ranks, 1)
    places = [(event.rank, event.lane, event.step) for event in relation.events]
    timed_events = np.array([i for i, place in enumerate(places) if place in span_of])
    ends = np.array([span_of[places[i]].end_us for i in timed_events])
    for second in timed_events:
        span = span_of[places[second]]
        latest_us = ends[relation.each_before(timed_events, second)].max(initial=0.0)
        is_wait = isinstance(relation.step(relation.events[second]), Wait)
        assert latest_us <= (span.end_us if is_wait else span.start_us) + 1e-6, span


def is_empty(step: Step) -> bool:
    return isinstance(step, Tiles) and step.is_empty
