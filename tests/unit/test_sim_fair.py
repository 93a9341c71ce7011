"""Max-min fair shares: examples by hand, and what must hold for any loads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.sim.fair import LEAST, Load, speeds


def _load(**share: float) -> Load:
    return Load(tuple((ord(name), amount) for name, amount in share.items()))


def test_alone_everything_runs_at_full_speed() -> None:
    assert speeds({0: _load(a=0.7, b=1.0)}, {0: 1}) == {0: 1.0}


def test_equal_steps_get_equal_parts() -> None:
    assert speeds({0: _load(a=1.0)}, {0: 4}) == {0: 0.25}


def test_who_is_held_up_elsewhere_leaves_the_rest_to_the_others() -> None:
    """Two steps fill a, one of them also needs b, where three more want all: b gives a quarter each, a the rest."""
    loads = {0: _load(a=1.0), 1: _load(a=1.0, b=1.0), 2: _load(b=1.0)}
    assert speeds(loads, {0: 1, 1: 1, 2: 3}) == {0: pytest.approx(0.75), 1: 0.25, 2: 0.25}


def test_speed_goes_no_higher_than_alone() -> None:
    loads = {0: _load(a=0.3), 1: _load(a=0.9)}
    assert speeds(loads, {0: 1, 1: 1}) == {0: pytest.approx(1 / 1.2), 1: pytest.approx(1 / 1.2)}
    assert speeds(loads, {0: 3}) == {0: 1.0}


def test_held_units_are_gone_however_slowly_their_holder_works() -> None:
    loads = {0: Load(share=((1, 1.0),)), 1: Load(share=((2, 1.0),), hold=((1, 0.25),))}
    assert speeds(loads, {0: 1, 1: 1}) == {0: 0.75, 1: 1.0}
    assert speeds(loads, {0: 1, 1: 2}) == {0: 0.5, 1: 0.5}
    assert speeds(loads, {0: 1, 1: 9})[0] == LEAST


def test_a_disturbance_grows_with_the_speed_of_who_disturbs() -> None:
    loads = {0: Load(share=((1, 1.0),)), 1: Load(share=((2, 1.0),), disturb=((1, 0.2),))}
    assert speeds(loads, {0: 1, 1: 1}) == {0: 0.8, 1: 1.0}
    assert speeds(loads, {0: 1, 1: 4}) == {0: 0.8, 1: 0.25}


def test_holders_of_all_kinds_take_their_units_together() -> None:
    holders = {1: Load(share=((2, 1.0),), hold=((1, 0.25),)), 2: Load(share=((3, 1.0),), hold=((1, 0.5),))}
    assert speeds({0: Load(share=((1, 1.0),)), **holders}, {0: 1, 1: 1, 2: 1})[0] == 0.25


def test_a_disturbance_takes_from_what_holders_have_left() -> None:
    """Of the units a half is held and a fifth is lost: who shares them has three tenths."""
    loads = {
        0: Load(share=((1, 1.0),)),
        1: Load(share=((2, 1.0),), hold=((1, 0.5),)),
        2: Load(share=((3, 1.0),), disturb=((1, 0.2),)),
    }
    assert speeds(loads, {0: 1, 1: 1, 2: 1}) == {0: pytest.approx(0.3), 1: 1.0, 2: 1.0}
    assert speeds(loads, {0: 2, 1: 1, 2: 1})[0] == pytest.approx(0.15)


SHARES = st.dictionaries(st.integers(0, 4), st.floats(0.01, 1.0), min_size=1, max_size=4)


@given(st.lists(st.tuples(SHARES, st.integers(1, 4)), min_size=1, max_size=6))
def test_shares_are_max_min_fair(steps: list[tuple[dict[int, float], int]]) -> None:
    """No resource is used beyond 1, and every step below full speed meets a full one on which nobody is faster."""
    loads = {i: Load(tuple(share.items())) for i, (share, _) in enumerate(steps)}
    counts = {i: n for i, (_, n) in enumerate(steps)}
    found = speeds(loads, counts)
    used = {
        r: sum(counts[i] * dict(loads[i].share).get(r, 0.0) * found[i] for i in loads) for r in range(5)
    }  # fmt: skip
    assert all(total <= 1 + 1e-9 for total in used.values())
    for i, speed in found.items():
        assert 0 < speed <= 1
        if speed < 1 - 1e-9:
            full = [r for r, _ in loads[i].share if used[r] >= 1 - 1e-9]
            assert any(all(found[j] <= speed + 1e-9 for j in loads if r in dict(loads[j].share)) for r in full)
