"""Max-min fair shares: examples computed by hand, and properties for any loads."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import reduce
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slow import slow

from weft._core import Fluid
from weft.hw.topology import torus
from weft.sim.lowered import PULSES
from weft.sim.max_min import LEAST, Load, speeds
from weft.sim.uses import Links


def _load(**share: float) -> Load:
    return Load(tuple((ord(name), amount) for name, amount in share.items()))


def test_alone_everything_runs_at_full_speed() -> None:
    assert speeds([_load(a=0.7, b=1.0)], {0: 1}) == {0: 1.0}


def test_equal_steps_get_equal_parts() -> None:
    assert speeds([_load(a=1.0)], {0: 4}) == {0: 0.25}


def test_who_is_held_up_elsewhere_leaves_the_rest_to_the_others() -> None:
    """Two steps share resource a. One of them also needs resource b, which three other steps want completely. b gives a
    quarter to each, and the other step on a gets the rest of a.
    """
    loads = [_load(a=1.0), _load(a=1.0, b=1.0), _load(b=1.0)]
    assert speeds(loads, {0: 1, 1: 1, 2: 3}) == {0: pytest.approx(0.75), 1: 0.25, 2: 0.25}


def test_speed_goes_no_higher_than_alone() -> None:
    loads = [_load(a=0.3), _load(a=0.9)]
    assert speeds(loads, {0: 1, 1: 1}) == {0: 1.0, 1: pytest.approx(0.7 / 0.9)}
    assert speeds(loads, {0: 3}) == {0: 1.0}


@pytest.mark.parametrize(
    ("link", "caps", "wanted"),
    [(100, (10, 100), (10, 90)), (90, (20, 100, 100), (20, 35, 35)), (90, (50, 60, 70), (30,) * 3)],
)
def test_what_is_capped_below_its_share_gets_its_cap_and_the_others_share_the_rest(
    link: float, caps: tuple[float, ...], wanted: tuple[float, ...]
) -> None:
    """Shares are equal in bytes, not in fractions of each step's rate alone."""
    found = speeds([_load(a=cap / link) for cap in caps], dict.fromkeys(range(len(caps)), 1))
    assert tuple(found[i] * cap for i, cap in enumerate(caps)) == pytest.approx(wanted)


Flow = tuple[tuple[int, ...], int]
"""A flow: the links that it crosses, and its rate when it runs alone."""


def _rates(links: list[int], flows: list[Flow]) -> list[float]:
    loads = [Load(tuple((link, cap / links[link]) for link in path)) for path, cap in flows]
    found = speeds(loads, dict.fromkeys(range(len(flows)), 1))
    return [found[i] * cap for i, (_, cap) in enumerate(flows)]


def _progressive_filling(links: list[int], flows: list[Flow]) -> list[Fraction]:
    """Return the rates by progressive filling: all rates rise equally, each until its cap or a full link stops it."""
    rates, left = [Fraction(0)] * len(flows), [Fraction(link) for link in links]
    growing = set(range(len(flows)))
    while growing:
        crossing = [sum(link in flows[i][0] for i in growing) for link in range(len(links))]
        room = [left[link] / count for link, count in enumerate(crossing) if count]
        step = min([flows[i][1] - rates[i] for i in growing] + room)
        for i in growing:
            rates[i] += step
        left = [have - count * step for have, count in zip(left, crossing, strict=True)]
        growing = {i for i in growing if rates[i] < flows[i][1] and all(left[link] for link in flows[i][0])}
    return rates


def test_links_of_different_bandwidth_are_shared_by_bytes() -> None:
    """The slow link stops the first flow at 30, so the third flow gets the rest of the last link."""
    flows: list[Flow] = [((0, 1, 2, 3), 100), ((0, 3), 20), ((3,), 100)]
    assert _rates([50, 100, 50, 90], flows) == pytest.approx([30, 20, 40])


def test_flows_over_unequal_links_get_what_progressive_filling_gives_them() -> None:
    draw = random.Random(28)
    for _ in range(2000):
        links = [draw.choice([30, 50, 90, 100, 200]) for _ in range(draw.randint(1, 8))]
        flows: list[Flow] = [
            (tuple(draw.sample(range(len(links)), draw.randint(1, len(links)))), draw.choice([10, 20, 50, 100, 200]))
            for _ in range(draw.randint(1, 12))
        ]
        wanted = [float(rate) for rate in _progressive_filling(links, flows)]
        assert _rates(links, flows) == pytest.approx(wanted, rel=1e-9), (links, flows)


def test_a_resource_that_stands_for_several_counts_each_of_its_parts() -> None:
    """A step uses 0.6 of its own rank's link and 1.0 of the next rank's link. So both amounts occur on every link."""
    assert speeds([Load(((0, 0.6), (0, 1.0)))], {0: 1}) == {0: pytest.approx(1 / 1.6)}
    both = speeds([Load(((0, 0.6), (0, 1.0))), Load(((0, 0.5),))], {0: 1, 1: 1})
    assert both == {0: pytest.approx(1 / 2.6), 1: pytest.approx(1 / 1.3)}


def test_a_resource_gives_equal_amounts_to_those_that_it_stops_however_much_others_give_them() -> None:
    """A port of 300 is shared by three copies over links of 100 each, and by one copy that could use the whole port.
    Each gets 75.
    """
    loads = [Load(((i, 1.0), (9, 1 / 3))) for i in range(3)] + [Load(((9, 1.0),))]
    assert speeds(loads, dict.fromkeys(range(4), 1)) == pytest.approx({0: 0.75, 1: 0.75, 2: 0.75, 3: 0.25})


def test_each_of_two_steps_may_be_stopped_by_the_resource_of_which_it_takes_more() -> None:
    loads = [_load(a=1.0, b=0.1), _load(a=0.1, b=1.0)]
    assert speeds(loads, {0: 1, 1: 1}) == pytest.approx({0: 1 / 1.1, 1: 1 / 1.1})


@pytest.mark.parametrize("holders", [1, 8, 9, 31])
def test_holders_share_at_most_the_device(holders: int) -> None:
    """Each kernel holds an eighth of the units. If more than eight run at once, they wait for each other."""
    found = speeds([Load(share=((2, 0.01),), hold=((1, 0.125),))], {0: holders})
    assert found[0] == pytest.approx(min(1.0, 8 / holders))


def test_holders_of_a_few_units_are_not_held_up_by_one_of_many() -> None:
    loads = [Load(share=((2, 0.01),), hold=((1, 0.125),)), Load(share=((3, 0.01),), hold=((1, 1.0),))]
    assert speeds(loads, {0: 1, 1: 1}) == pytest.approx({0: 1.0, 1: 0.875})


def test_held_units_are_gone_however_slowly_their_holder_works() -> None:
    loads = [Load(share=((1, 1.0),)), Load(share=((2, 1.0),), hold=((1, 0.25),))]
    assert speeds(loads, {0: 1, 1: 1}) == {0: 0.75, 1: 1.0}
    assert speeds(loads, {0: 1, 1: 2}) == {0: 0.5, 1: 0.5}
    assert speeds(loads, {0: 1, 1: 9})[0] == LEAST


def test_a_disturbance_grows_with_the_speed_of_who_disturbs() -> None:
    loads = [Load(share=((1, 1.0),)), Load(share=((2, 1.0),), disturb=((1, 0.2),))]
    assert speeds(loads, {0: 1, 1: 1}) == {0: 0.8, 1: 1.0}
    assert speeds(loads, {0: 1, 1: 4}) == {0: 0.8, 1: 0.25}


def test_steps_that_want_more_than_there_is_by_rounding_only_are_at_full_speed() -> None:
    amounts = (0.05, 0.55, 0.3, 0.1)
    assert reduce(add, amounts) > 1 == reduce(add, sorted(amounts))  # `sum` rounds less from Python 3.12 on
    assert speeds([_load(a=amount) for amount in amounts], dict.fromkeys(range(4), 1)) == pytest.approx(
        dict.fromkeys(range(4), 1.0)
    )


def test_holders_of_all_kinds_take_their_units_together() -> None:
    holders = [Load(share=((2, 1.0),), hold=((1, 0.25),)), Load(share=((3, 1.0),), hold=((1, 0.5),))]
    assert speeds([Load(share=((1, 1.0),)), *holders], {0: 1, 1: 1, 2: 1})[0] == 0.25


def test_a_disturbance_takes_from_what_holders_have_left() -> None:
    """Half of the units are held and a fifth is lost, so three tenths remain for the other steps."""
    loads = [
        Load(share=((1, 1.0),)),
        Load(share=((2, 1.0),), hold=((1, 0.5),)),
        Load(share=((3, 1.0),), disturb=((1, 0.2),)),
    ]
    assert speeds(loads, {0: 1, 1: 1, 2: 1}) == {0: pytest.approx(0.3), 1: 1.0, 2: 1.0}
    assert speeds(loads, {0: 2, 1: 1, 2: 1})[0] == pytest.approx(0.15)


def test_a_transfer_with_split_routes_gets_the_rate_of_transfers_on_one_route() -> None:
    """Half of the first transfer takes the other direction, which is free. Both transfers get 2/3 of a link's rate."""
    loads = [Load(((1, 0.5), (2, 0.5)), whole=((1, 1.0), (2, 1.0))), Load(((1, 1.0),))]
    assert speeds(loads, {0: 1, 1: 1}) == {0: pytest.approx(2 / 3), 1: pytest.approx(2 / 3)}


@pytest.mark.parametrize("split", [False, True])
def test_flows_on_a_torus_followed_from_change_to_change_have_the_speeds_of_a_new_start(split: bool) -> None:
    """There are about 500 flows. split: True for even numbers of columns and rows, where transfers to half-way ranks
    have several routes.
    """
    wiring = torus(64 if split else 63, 100.0, 0.0, 8 if split else 9)
    flows = [(rank, to) for rank in range(8) for to in range(wiring.ranks) if to != rank]
    places: dict[tuple[str, int], int] = {}
    loads = []
    for rank, to in flows:
        uses = [(places.setdefault((u.place[0], (rank + u.place[1]) % 8), len(places)), u)
                for u in Links(wiring, rank).uses(0, to - rank, 100.0, 1.0)]  # fmt: skip
        loads.append(Load(tuple((n, u.amount) for n, u in uses), whole=tuple((n, u.whole) for n, u in uses if u.whole)))
    found = speeds(loads, dict.fromkeys(range(len(loads)), 1))
    fluid = Fluid(loads, [0] * len(loads), PULSES, 1 << 16)
    for number in range(len(loads)):
        fluid.begin(0.0, number, number, 1.0, 0)
    assert fluid.next_us() == pytest.approx(1 / max(found.values()), rel=1e-9)
    assert {lane for lane, done in fluid.to(fluid.next_us()) if done} == {
        number for number, speed in found.items() if speed > max(found.values()) * (1 - 1e-9)
    }


SHARES = st.dictionaries(st.integers(0, 4), st.floats(0.01, 1.0), min_size=1, max_size=4)


def _used(loads: list[Load], counts: dict[int, int], found: dict[int, float]) -> list[float]:
    return [sum(counts[i] * dict(loads[i].share).get(r, 0.0) * found[i] for i in counts) for r in range(5)]


@given(st.lists(st.tuples(SHARES, st.integers(1, 4)), min_size=1, max_size=6))
def test_nothing_is_used_beyond_what_there_is_and_nobody_is_slow_for_nothing(
    steps: list[tuple[dict[int, float], int]],
) -> None:
    """Every step below full speed uses a resource that is fully used, and no other step gets more of this resource."""
    loads = [Load(tuple(share.items())) for share, _ in steps]
    counts = {i: n for i, (_, n) in enumerate(steps)}
    found = speeds(loads, counts)
    used = _used(loads, counts, found)
    assert all(total <= 1 + 1e-9 for total in used)
    for i, (share, _) in enumerate(steps):
        assert 0 < found[i] <= 1
        full = [r for r in share if used[r] >= 1 - 1e-9]
        assert found[i] > 1 - 1e-9 or any(
            all(steps[j][0].get(r, 0.0) * found[j] <= share[r] * found[i] + 1e-9 for j in counts) for r in full
        )


@pytest.mark.parametrize(("units", "disturbing"), [slow(0.0, 0), slow(0.005, 0), (0.05, 0), (0.005, 30)])
def test_many_flows_have_the_same_speeds_when_they_are_followed_from_change_to_change(
    units: float, disturbing: int
) -> None:
    """300 flows over 24 links begin together. Whenever a flow ends, the updated speeds must equal a new solution.

    units: the fraction of one of 6 GPUs' units that each flow holds; at 0.05 all flows together hold more than exist.
    disturbing: the number of flows that slow down a GPU.
    """
    rng = random.Random(5)
    loads = [
        Load(
            tuple((link, rng.choice((1.0, 0.5, 0.2))) for link in rng.sample(range(24), rng.choice((1, 2, 3)))),
            ((24 + number % 6, units),) if units else (),
            ((24 + number % 6, 0.02),) if number < disturbing else (),
        )
        for number in range(294)
    ] + [Load(((24 + gpu, 1.0),)) for gpu in range(6)]
    left = {flow: rng.uniform(1, 100) for flow in range(300)}
    fluid, now = Fluid(loads, [0] * 300, PULSES, 1 << 16), 0.0
    for flow, work_us in left.items():
        assert not fluid.begin(0.0, flow, flow, work_us, 0)
    while left:
        found = speeds(loads, dict.fromkeys(left, 1))
        ends = {flow: rest / found[flow] for flow, rest in left.items()}
        now += min(ends.values())
        assert (then := fluid.next_us()) == pytest.approx(now, rel=1e-9)
        done = {flow for flow, end in ends.items() if end <= min(ends.values()) + 1e-6}
        assert {flow for flow, is_done in fluid.to(then) if is_done} == done
        left = {flow: rest - min(ends.values()) * found[flow] for flow, rest in left.items() if flow not in done}
    assert fluid.known == 0  # speeds of so many concurrent steps are not cached
