"""Choices for similar sizes: they do not depend on the order of calls, and need few simulations. Also the state that
executors of similar sizes share.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from support.sim_toys import gpu
from support.slow import in_turn

from weft import plan
from weft.builders import AllGatherMatmul, AllToAllMatmul, NotApplicableError, candidates
from weft.plan import nearby
from weft.runtime.cuda.context import rank_schedule

MODES: tuple[plan.Mode, plan.Mode] = ("queued", "graph")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby, "_families", {})


def problem(m: int, n: int = 4096) -> AllGatherMatmul:
    return AllGatherMatmul.even(m, n, 8192, 2)


def test_sizes_of_a_half_octave_take_one_schedule_whichever_comes_first() -> None:
    model = gpu("h200", 2)
    sizes = [3970, 4096, 4260]
    first = [plan.names_near(problem(m), model, MODES) for m in sizes]
    nearby._families.clear()
    last = [plan.names_near(problem(m), model, MODES) for m in reversed(sizes)]
    assert {*first, *last} == {first[0]}
    middle = problem(4096)
    assert first[0] == tuple(plan.choose(middle, model, mode=mode).candidate.name for mode in MODES)


def test_the_choice_for_the_middle_is_not_taken_if_serial_is_faster_at_the_first_size() -> None:
    plain, odd, middle = gpu("h200", 2), problem(4260), problem(4096)

    def us(m: int, slower: float = 1.0) -> dict[tuple[int, int, int, str], float]:
        return {(m, 4096, 8192, "bf16"): slower * plain.matmul_us(m, 4096, 8192, "bf16")}

    usual = us(4096) | us(2048) | us(1024) | us(512)
    # Pieces of this size take longer.
    model = plain.with_measured(usual | us(4260) | us(2130, 1.5) | us(1065, 2) | us(532, 3))
    of_middle, at_odd = plan.choose(middle, model, mode="queued"), plan.choose(odd, model, mode="queued")
    serial = at_odd.row("serial").us
    assert serial is not None
    assert (at_odd.row(of_middle.candidate.name).us or serial) >= serial
    for name in plan.names_near(odd, model, MODES):
        us_taken = at_odd.row(name).us
        assert us_taken is not None
        assert us_taken <= serial


def test_a_new_size_is_a_look_and_a_new_half_octave_a_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = gpu("h200", 2), []
    native = nearby.choose

    def spy(p: AllGatherMatmul, *rest: object, among: frozenset[str] | None = None, **options: object) -> plan.Choice:
        asked.append((p.m, among and len(among)))
        return native(p, *rest, among=among, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(nearby, "choose", spy)
    plan.names_near(problem(4096), model, MODES)
    assert {m for m, _ in asked} == {4096}
    assert all(among is None for _, among in asked)
    asked.clear()
    for m in (4098, 4000, 4200, 3900):
        plan.names_near(problem(m), model, MODES)
    assert not asked
    plan.names_near(problem(8192), model, MODES)
    assert {m for m, _ in asked} == {8192}
    every = len(candidates(problem(8192)))
    assert all(among is not None and among < every / 4 for _, among in asked)
    asked.clear()
    plan.names_near(problem(8192, n=512), model, MODES)  # other weights belong to another family
    assert all(among is None for _, among in asked)


def test_where_it_does_not_go_a_size_is_planned_by_itself() -> None:
    """If the family's choice does not support a size, the size is planned among the same candidates. Choices for other
    sizes do not change.
    """
    model = gpu("h200", 2)
    around = plan.names_near(problem(4096), model, MODES)
    (family,), odd = nearby._families.values(), problem(4094)
    found = plan.names_near(odd, model, MODES, itself=True)
    assert found[0] == plan.choose(odd, model, mode="queued", among=family.contenders).candidate.name
    for name in found:
        assert plan.choose(odd, model, mode="queued", pinned=name).candidate.name == name
    assert plan.names_near(problem(4098), model, MODES) == around


def test_families() -> None:
    even, uneven = problem(4096), replace(problem(4096), rows=(2000, 2096))
    assert even.family[0] == problem(128).family[0] != problem(128, n=8).family[0]
    assert even.resized(100.4) == problem(200)
    assert uneven.family == (uneven, 0.0)
    experts = AllToAllMatmul.even(64, 32, 16, 2, 2)
    assert experts.family == (experts, 0.0)
    assert experts.resized(5.0) is experts


@pytest.mark.parametrize(("gathered", "world"), in_turn([False, True], [2, 3, 4]))
def test_order_and_flags_of_one_size_are_those_of_another(world: int, gathered: bool) -> None:
    """An executor reuses the order and the flags of another size. They must equal what it would compute itself."""
    sizes, kept = [(240, 36), (48, 36), (12, 36)], 0
    problems = [replace(AllGatherMatmul.even(m, n, 64, world, "fp32"), return_gathered=gathered) for m, n in sizes]
    for made in zip(*map(candidates, problems), strict=True):
        try:
            schedules = [candidate.build() for candidate in made]
        except NotApplicableError:
            continue
        for (a, b), rank in itertools.product(itertools.pairwise(schedules), (0, world - 1)):
            try:
                like = rank_schedule(a, rank)
            except ValueError:  # streams cannot run this schedule for any size
                continue
            taken, found = rank_schedule(b, rank, like), rank_schedule(b, rank)
            assert taken == found, (made[0].name, rank)
            kept += taken.flags is like.flags
    assert kept


def test_a_choice_between_two_equal_ones_is_not_planned() -> None:
    known = {0: "serial", 4: "serial", 9: "direct", 20: "direct"}
    found = {here: nearby.between(known, here) for here in range(-1, 22)}
    assert [here for here, name in found.items() if name == "serial"] == [0, 1, 2, 3, 4]
    assert [here for here, name in found.items() if name == "direct"] == list(range(9, 21))
    assert nearby.between({}, 3) is None
