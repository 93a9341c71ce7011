"""One rank represents all ranks if they all do the same work: the numbers must equal those of a simulation of all
ranks. Otherwise all ranks are simulated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sim_toys import SWITCH, TOY, applicable, gpu
from support.slow import slow

from weft.builders import AllGatherMatmul, AllToAllMatmul, EmbeddingAllToAll, MatmulReduceScatter
from weft.errors import ScheduleError
from weft.hw.topology import Topology, Wiring, hosts, mesh, ring, torus
from weft.schedule import RANK, Copy, Draft, Expr, Schedule, Set, Tiles, Wait, lookup
from weft.schedule.verify.issue_order import issue_order
from weft.sim import Model, Simulated, simulate
from weft.sim.engine import _Engine
from weft.sim.issue import issue_times
from weft.sim.lower import lower
from weft.sim.vectorised import Numbers, at_rank

Mode = Literal["queued", "graph", "single"]
SAME = 1e-7
"""The relative tolerance: the engine neglects 1e-7 us of work, and runs take tens of microseconds or more."""


@lru_cache(maxsize=1)
def _schedules(world: int) -> dict[str, Schedule]:
    """Return the schedules of every operator, with equal shards."""
    moe = AllToAllMatmul.even(24 * world, 96, 64, 4, world)
    slots = tuple(((64 * rank, 32), (64 * rank + 32, 32)) for rank in range(world))
    problems = {
        "gather": AllGatherMatmul.even(16 * world, 96, 16 * world, world),
        "gather, two weights": AllGatherMatmul(world, (16,) * world, (96, 32), 64, "bf16", return_gathered=True),
        "scatter": MatmulReduceScatter(world, 300 * world, 96, 64, "bf16"),
        "experts": moe,
        "experts, bounded": replace(moe, exact=False),
        "embedding": EmbeddingAllToAll(world, (8,) * world, slots),
    }
    return {f"{op}: {name}": s for op, p in problems.items() for name, s in applicable(p).items()}  # type: ignore[arg-type]


def _every_rank(schedule: Schedule, model: Model, mode: Mode) -> Simulated:
    program = lower(schedule, model, alike=False, captured=mode == "graph")
    assert not program.symmetric
    issued = issue_times(program, model) if mode == "single" else None
    return _Engine(program, [0.0] * schedule.world_size, issued, 2).run()


def _numbers(result: Simulated) -> list[float]:
    by_rank = (*result.ends_us, result.compute_us, result.communication_us)
    return [us for of_ranks in by_rank for us in of_ranks]


@pytest.mark.parametrize("mode", ["queued", "graph", "single"])
@pytest.mark.parametrize(("machine", "world"), [("h200", 2), slow("mi300x", 3), slow("h200", 5)])
def test_one_rank_gives_the_numbers_of_all(machine: str, world: int, mode: Mode) -> None:
    """Try all schedules in queued mode. Modes differ only at the start and the end of a run, so each other mode tries a
    third of them.
    """
    model, alike = gpu(machine, world), 0
    every = 1 if mode == "queued" else 3
    for name, schedule in list(_schedules(world).items())[mode == "single" :: every]:
        one = simulate(schedule, model, runs=2, mode=mode)
        alike += one.program.symmetric
        # Ranks that send in the order of their numbers, or compute the rows before and after their own, do different
        # work.
        differ = "order=natural" in name or "collective[start=hetero,gemms=fused" in name
        assert one.program.symmetric != differ, name
        if one.program.symmetric:
            assert _numbers(one) == pytest.approx(_numbers(_every_rank(schedule, model, mode)), rel=SAME), name
    assert alike > 20 / every


SLOW_LINK = replace(mesh(4, 100.0).links[0], bytes_per_us=50.0)


def _one_slow_link(ranks: int) -> Topology:
    return replace(mesh(ranks, 100.0), links=(SLOW_LINK, *mesh(ranks, 100.0).links[1:]))


@pytest.mark.parametrize(("mode", "step"), [("queued", 3), slow("queued", 1), slow("single", 1)])
@pytest.mark.parametrize(
    ("wiring", "simulated"),
    [
        (Wiring(ring, (40e3, 0.5)), 1),
        slow(Wiring(torus, (40e3, 0.5, 2)), 2),
        slow(Wiring(hosts, (300e3, 0.5, 50e3, 2.5, 2)), 2),
        slow(Wiring(_one_slow_link), 4),
    ],
)
def test_no_more_ranks_are_taken_to_be_alike_than_the_topology_has(
    wiring: Wiring, simulated: int, mode: Mode, step: int
) -> None:
    model, alike = replace(gpu("h200", 4), wiring=wiring), 0
    for name, schedule in list(_schedules(4).items())[::step]:
        one = simulate(schedule, model, runs=2, mode=mode)
        assert len(one.program.ranks) in (simulated, 4), name
        alike += len(one.program.ranks) == simulated
        if one.program.symmetric:
            every = _every_rank(schedule, model, mode)
            assert _numbers(one) == pytest.approx(_numbers(every), rel=SAME), name
            assert _spans(one) == _spans(every), name
    assert alike > 20 // step


def _spans(result: Simulated) -> list[tuple]:
    return sorted((s.rank, s.lane, s.name, round(s.start_us, 3), round(s.end_us, 3), s.bytes) for s in result.timeline)


def test_a_slow_link_is_told_from_the_others() -> None:
    """Rank 0 puts to rank 1 over the slow link, and all other ranks do the same over their links."""
    ends = simulate(_rings(), replace(TOY, wiring=Wiring(_one_slow_link))).communication_us
    assert ends == pytest.approx((27, 17, 17, 17))


ZERO = (0,) * 4


def _rings(
    rows: tuple[int, ...] = (10,) * 4,
    set_at: tuple[tuple[int, ...], ...] = (ZERO,),
    wait_at: tuple[tuple[int, ...], ...] = (ZERO,),
) -> Schedule:
    """Return a schedule in which rank r puts rows[r] + 5 i rows on lane i to rank r + i + 1, and sets signal
    set_at[i][r].

    Then the rank waits for its own signals wait_at[..][r] one after the other, and copies.
    """
    d = Draft("rings", 4)
    x, box = (d.buffer(name, max(rows) + 15, 25, "fp32", role) for name, role in (("x", "input"), ("box", "symmetric")))  # type: ignore[arg-type]
    came, kept = d.signals("came", 4), d.buffer("kept", max(rows) + 15, 25, "fp32", "scratch")
    for i, places in enumerate(set_at):
        here, peer = (0, lookup(rows, RANK) + 5 * i), (RANK + i + 1) % 4
        lane = d.lane(f"lane {i}", "copy").copy(x.part(rows=here), box.part(rows=here, at=peer))
        lane.set(came, lookup(places, RANK), at=peer)
    for places in wait_at:
        d.lane("waits", "copy").wait(came, lookup(places, RANK)).copy(x.part(), kept.part())
    return d.schedule()


@pytest.mark.parametrize(
    ("schedule", "alike"),
    [
        (_rings(), True),
        # Rank r - 1 sets the signal for which rank r waits. The index of the signal differs between ranks.
        (_rings(set_at=((1, 2, 3, 0),), wait_at=((0, 1, 2, 3),)), True),
        (_rings(set_at=((1, 2, 1, 0),), wait_at=((0, 1, 2, 1),)), True),
        (_rings(rows=(10, 10, 30, 10)), False),
        # Rank 0 uses two counters and the other ranks one, or vice versa.
        (_rings(set_at=(ZERO, (0, 0, 1, 0)), wait_at=(ZERO,)), False),
        (_rings(set_at=(ZERO, (1, 1, 0, 1)), wait_at=(ZERO,)), False),
        # Rank 0 waits for data from a rank at distance two, the other ranks for data from a neighbour.
        (_rings(set_at=(ZERO, (1,) * 4), wait_at=((1, 0, 0, 0),)), False),
    ],
)
def test_counters_may_have_other_numbers_and_shards_no_other_sizes(schedule: Schedule, alike: bool) -> None:
    one, every = simulate(schedule, TOY, runs=2), _every_rank(schedule, TOY, "queued")
    assert one.program.symmetric == alike
    assert _numbers(one) == pytest.approx(_numbers(every), rel=SAME)


def test_one_slow_rank_is_told_from_the_others() -> None:
    more = simulate(_rings(rows=(10, 10, 30, 10)), TOY)
    assert more.communication_us[2] > 2 * more.communication_us[0]
    schedule = _rings()
    late = simulate(schedule, TOY, late_us=[0.0, 50.0, 0.0, 0.0])
    assert not late.program.symmetric
    assert len(set(late.ends_us)) > 1
    assert simulate(schedule, TOY, late_us=[50.0] * 4).program.symmetric


TABLES = st.lists(
    st.sampled_from([ZERO, (1,) * 4, (0, 0, 1, 0), (1, 1, 0, 1), (0, 1, 0, 1), (1, 2, 3, 0)]), min_size=1, max_size=3
)


@settings(max_examples=50)
@given(TABLES, TABLES, st.sampled_from([(10,) * 4, (10, 20, 10, 20)]), st.sampled_from([TOY, SWITCH]))
def test_whatever_counters_are_used(set_at: list, wait_at: list, rows: tuple, model: Model) -> None:
    """A simulation of one rank must end, or hang, like a simulation of all ranks."""
    schedule = _rings(rows, tuple(set_at), tuple(wait_at))
    found: list[list[float] | None] = []
    for run in (lambda: simulate(schedule, model, runs=2), lambda: _every_rank(schedule, model, "queued")):
        try:
            found.append(_numbers(run()))
        except ScheduleError:
            found.append(None)
    assert found[0] == (found[1] if found[1] is None else pytest.approx(found[1], rel=SAME))


def test_loops_whose_turns_differ_are_written_out_for_each_rank() -> None:
    d = Draft("loops", 3)
    x, box = d.buffer("x", 9, 25, "fp32", "input"), d.buffer("box", 9, 25, "fp32", "symmetric")
    one = Copy(x.part(rows=(Expr("i"), 1)), box.part(rows=(Expr("i"), Expr("i % 2")), at=(RANK + 1) % 3))
    d.lane("copies", "copy").repeat("i", lookup((1, 4, 2), RANK), one)
    program = lower(d.schedule(), TOY)
    assert not program.symmetric
    assert [len(lane.tasks) for lane in program.lanes] == [1, 4, 2]


@pytest.mark.parametrize("even", [slow(True), False])
def test_numbers_are_those_of_each_rank(even: bool) -> None:
    """Compare numbers that are evaluated for all ranks at once with `Schedule.of_rank`, which evaluates one rank."""
    splits = tuple(tuple((rank + 2 * e) % 5 for e in range(8)) for rank in range(4))
    moe = AllToAllMatmul(4, 2, tuple(map(sum, splits)), 96, 64, "bf16", most=16, splits=splits)
    slots = (((0, 32),), ((32, 32), (64, 32)), (), ((96, 64),))
    uneven = (
        AllGatherMatmul(4, (5, 0, 20, 7), (96,), 64, "bf16"),
        moe,
        EmbeddingAllToAll(4, (4, 3, 1, 6), slots, ((2.0,), (1.0, 4.0), (), (3.0,))),
    )
    made = {f"{p.name} {name}": s for p in uneven for name, s in applicable(p).items()}  # type: ignore[arg-type]
    for name, schedule in (_schedules(4) if even else made).items():
        numbers = Numbers(schedule)
        items = [numbers.items(lane) for lane in schedule.lanes]
        for rank in range(4):
            for lane, of_lane in zip(schedule.of_rank(rank), items, strict=True):
                there = [item for item in of_lane if at_rank(item.present, rank)]
                assert len(there) == len(lane.steps), name
                for item, step in zip(there, lane.steps, strict=True):
                    found = tuple(at_rank(n, rank) for n in item.numbers)
                    place, distance, awaited = (
                        n if n is None else at_rank(n, rank) for n in (item.place, item.distance, item.awaited)
                    )
                    if isinstance(step, Set):
                        assert (distance, place) == ((step.at - rank) % 4, step.index), name
                    elif isinstance(step, Wait):
                        assert (place, awaited) == (step.index, step.count), name
                    elif isinstance(step, Tiles):
                        assert Counter(dict(_in_tiles(step, rank))) == _parts(item.tiled[rank]), name
                    else:
                        wanted = [n for r in step.regions for n in (r.rows, r.cols, (r.at - rank) % 4)]
                        assert found[: len(wanted)] == tuple(wanted), name


def _in_tiles(step: Tiles, rank: int) -> Counter:
    counts: Counter = Counter()
    for number in range(step.extent):  # type: ignore[arg-type]
        for place, inner in enumerate(step.tile(number)):
            if isinstance(inner, Set):
                counts["set", inner.signal, (inner.at - rank) % 4, inner.index] += 1  # type: ignore[operator]
            else:
                counts[place, tuple(n for r in inner.regions for n in (r.rows, r.cols, (r.at - rank) % 4))] += 1  # type: ignore[operator]
    return counts


def _parts(tiled: object) -> Counter:
    counts: Counter = Counter()
    for place, numbers, times in tiled.parts:  # type: ignore[attr-defined]
        counts[place, numbers] += times
    for one in tiled.sets:  # type: ignore[attr-defined]
        counts["set", one.signal, one.distance, one.place] += one.times
    return counts


@pytest.mark.parametrize("world", [2, slow(3), slow(5)])
def test_steps_are_issued_in_the_order_of_all_ranks(world: int) -> None:
    model, compared = gpu("h200", world), 0
    for name, schedule in _schedules(world).items():
        program = lower(schedule, model)
        if not program.symmetric:
            continue
        numbers = {lane.name: i for i, lane in enumerate(schedule.lanes)}
        wanted: dict[tuple[int, int], list[float]] = {}
        for i, (lane, _) in enumerate(issue_order(schedule)[0]):
            wanted.setdefault((0, numbers[lane]), []).append((i + 1) * model.host_step_us)
        assert issue_times(program, model) == wanted, name
        compared += 1
    assert compared > 20
