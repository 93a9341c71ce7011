"""Lanes that cannot slow each other down are simulated separately: the numbers are the same, and the work grows only
linearly with the number of ranks.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sim_toys import gpu

from weft.builders import AllGatherMatmul, AllToAllMatmul, Problem, named
from weft.schedule import Schedule
from weft.sim import engine, lowered, simulate
from weft.sim import lower as lowering
from weft.sim.lower import lower
from weft.sim.max_min import Load, speeds
from weft.sim.result import Simulated
from weft.sim.scarce import parts_of, scarce_only

_DIFFERS = "ficco_1d_collective[start=hetero,gemms=fused,steps=0]"
"""Every rank computes the rows before and after its own rows, so ranks compute different sizes."""


def _differing(world: int) -> Schedule:
    return named(AllGatherMatmul.even(128 * world, 256, 512, world), _DIFFERS).build()


def _run(machine: str, world: int) -> tuple[engine._Engine, Simulated]:
    one = engine._Engine(lower(_differing(world), gpu(machine, world)), [0.0] * world, None, 2)
    return one, one.run()


@pytest.mark.parametrize("machine", ["h200", "mi300x"])
def test_ranks_that_differ_but_share_nothing_scarce_take_speeds_for_each_and_not_for_all_together(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine remembers speeds for each set of steps that run at once. Each rank has its own sets.

    If the sets combined the steps of all ranks, there would be many more of them.
    """
    world = 12
    apart, found = _run(machine, world)
    assert not found.program.symmetric
    monkeypatch.setattr(lowered, "parts_of", lambda loads, lanes: [0] * len(lanes))
    together, _ = _run(machine, world)
    assert apart.fluid.known <= 20 * world
    assert together.fluid.known > 1.5 * apart.fluid.known


def test_what_is_remembered_of_speeds_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, wanted = _run("h200", 4)
    monkeypatch.setattr(engine, "_KNOWN_SPEEDS", 5)
    few, found = _run("h200", 4)
    assert found.ends_us == wanted.ends_us
    assert 0 < few.fluid.known <= 5 < whole.fluid.known


@pytest.mark.parametrize("machine", ["h200", "mi300x"])
@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (AllGatherMatmul.even(96, 96, 64, 3), _DIFFERS),
        (AllGatherMatmul(3, (16, 40, 8), (96,), 64, "bf16", return_gathered=False), "gather[by=dma]"),
        (
            AllGatherMatmul(3, (16, 40, 8), (96,), 64, "bf16", return_gathered=False),
            "shard[chunks=1,send=in_turn,by=kernel]",
        ),
        (AllToAllMatmul.even(72, 96, 64, 6, 3), "serial"),
    ],
)
def test_parts_have_the_numbers_of_the_whole(
    problem: Problem, name: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, model = named(problem, name).build(), gpu(machine, 3)
    late = (0.0, 1.0, 2.5)  # so that every rank is simulated
    apart = simulate(schedule, model, runs=3, late_us=late)
    monkeypatch.setattr(lowering, "_lowered", lowering._LastLowered(schedules=1, tasks=1))
    monkeypatch.setattr(lowered, "scarce_only", lambda loads, lanes: loads)
    monkeypatch.setattr(lowered, "parts_of", lambda loads, lanes: [0] * len(lanes))
    together = simulate(schedule, model, runs=3, late_us=late)
    for a, b in zip(apart.ends_us, together.ends_us, strict=True):
        assert a == pytest.approx(b, rel=1e-7)


_AMOUNTS = st.dictionaries(st.integers(0, 5), st.floats(0.01, 1.0), max_size=3)
_LOADS = st.lists(st.tuples(_AMOUNTS, _AMOUNTS, _AMOUNTS), min_size=1, max_size=5)


@given(_LOADS)
def test_speeds_of_a_part_are_those_beside_all_others(some: list[tuple[dict[int, float], ...]]) -> None:
    """Each lane has one load. Compare speeds with all resources and with scarce resources only, for each part alone."""
    loads = [Load(*(tuple(uses.items()) for uses in one)) for one in some]
    lanes = [{i} for i in range(len(loads))]
    scarce = scarce_only(loads, lanes)
    parts = parts_of(scarce, lanes)
    whole = speeds(loads, dict.fromkeys(range(len(loads)), 1))
    for part in set(parts):
        found = speeds(scarce, {i: 1 for i in range(len(loads)) if parts[i] == part})
        assert found == {i: pytest.approx(whole[i], rel=1e-9) for i in found}


def test_lanes_are_in_one_part_where_others_link_them() -> None:
    loads = [Load(((1, 1.0),)), Load(((1, 1.0), (2, 1.0))), Load((), ((2, 1.0),)), Load(((4, 1.0),))]
    assert parts_of(loads, [{0}, {3}, {2}, {1}]) == [0, 1, 0, 0]
