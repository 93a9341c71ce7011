"""Lanes that cannot slow each other down are simulated apart: the numbers are the same, and the work grows with the ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_toys import gpu

from weft.schedule import AllGatherMatmul, AllToAllMatmul, Problem, Schedule, named
from weft.sim import engine, simulate
from weft.sim.fair import Load, speeds
from weft.sim.lower import lower
from weft.sim.scarce import parts_of, scarce_only

_DIFFERS = "ficco_1d_collective[start=hetero,gemms=fused,steps=0]"
"""Of it every rank computes what lies before and behind its own rows, which is something else on each."""


def _differing(world: int) -> Schedule:
    return named(AllGatherMatmul.even(128 * world, 256, 512, world), _DIFFERS).build()


@pytest.mark.parametrize("machine", ["h200", "mi300x"])
def test_ranks_that_differ_but_share_nothing_scarce_take_speeds_for_each_and_not_for_all_together(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many sets of steps at once as there are on one rank, times ranks; else every rank's steps meet every other's."""
    calls = 0

    def counted(*args: object) -> dict[int, float]:
        nonlocal calls
        calls += 1
        return speeds(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "speeds", counted)
    world = 12
    found = simulate(_differing(world), gpu(machine, world), runs=2)
    assert not found.program.symmetric
    assert calls <= 12 * world


def test_what_is_remembered_of_speeds_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, model = _differing(4), gpu("h200", 4)
    program = lower(schedule, model)
    whole = engine._Engine(program, [0.0] * 4, None, 2)
    wanted = whole.run().ends_us
    monkeypatch.setattr(engine, "_KNOWN_SPEEDS", 5)
    few = engine._Engine(program, [0.0] * 4, None, 2)
    assert few.run().ends_us == wanted
    assert 0 < sum(map(len, few.known_speeds.values())) <= 5 < sum(map(len, whole.known_speeds.values()))


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
    monkeypatch.setattr(engine, "scarce_only", lambda loads, lanes: loads)
    monkeypatch.setattr(engine, "parts_of", lambda loads, lanes: [0] * len(lanes))
    together = simulate(schedule, model, runs=3, late_us=late)
    for a, b in zip(apart.ends_us, together.ends_us, strict=True):
        assert a == pytest.approx(b, rel=1e-7)


_AMOUNTS = st.dictionaries(st.integers(0, 5), st.floats(0.01, 1.0), max_size=3)
_LOADS = st.lists(st.tuples(_AMOUNTS, _AMOUNTS, _AMOUNTS), min_size=1, max_size=5)


@settings(deadline=None)
@given(_LOADS)
def test_speeds_of_a_part_are_those_beside_all_others(some: list[tuple[dict[int, float], ...]]) -> None:
    """Of lanes that have one load each: with what is scarce only, and of each part alone."""
    loads = {i: Load(*(tuple(uses.items()) for uses in one)) for i, one in enumerate(some)}
    lanes = [{i} for i in loads]
    scarce = scarce_only(loads, lanes)
    parts = parts_of(scarce, lanes)
    whole = speeds(loads, dict.fromkeys(loads, 1))
    for part in set(parts):
        found = speeds(scarce, {i: 1 for i in loads if parts[i] == part})
        assert found == {i: pytest.approx(whole[i], rel=1e-9) for i in found}


def test_lanes_are_in_one_part_where_others_link_them() -> None:
    loads = {0: Load(((1, 1.0),)), 1: Load(((1, 1.0), (2, 1.0))), 2: Load((), ((2, 1.0),)), 3: Load(((4, 1.0),))}
    assert parts_of(loads, [{0}, {3}, {2}, {1}]) == [0, 1, 0, 0]
