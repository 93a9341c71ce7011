"""The cache of compiled operators: its size is limited, and operators that are in use are never dropped."""

from __future__ import annotations

import pytest

from weft.operator.cache import KEPT, KEPT_BYTES, KEPT_LIGHT, PASSING, WHILE, Table
from weft.symm import compilations
from weft.symm.calls import GroupCalls, calls_of


class _Group:
    """A replacement for a process group, which supports weak references."""


class _Made:
    stale = came_back = runs_unfused = False
    family = None

    def __init__(self, nbytes: int = 0, captured: bool = False, light: bool = False) -> None:
        self.nbytes, self.captured, self.closed, self.called_at, self.light = nbytes, captured, False, 0, light

    def close(self) -> None:
        self.closed = True

    def capturing(self) -> bool:
        return False


def test_nothing_goes_while_a_graph_is_captured() -> None:
    """Releasing memory would end the capture."""
    table, group = Table(), _Group()
    known = [table.keep(group, key, _Made(KEPT_BYTES)) for key in range(KEPT)]  # type: ignore[arg-type]
    met = _Made()
    met.capturing = lambda: True  # type: ignore[method-assign]
    table.keep(group, "met in a capture", met)  # type: ignore[arg-type]
    assert not any(one.closed for one in known)  # type: ignore[attr-defined]
    assert table.find(group, "met in a capture") is met  # type: ignore[arg-type]
    table.keep(group, "later", _Made())  # type: ignore[arg-type]
    assert known[0].closed  # type: ignore[attr-defined]


def test_shapes_in_use_stay_however_large() -> None:
    table, group = Table(), _Group()
    large = [table.keep(group, key, _Made(KEPT_BYTES)) for key in range(6)]  # type: ignore[arg-type]
    for turn in range(3 * WHILE):
        assert table.find(group, turn % 6) is large[turn % 6]  # type: ignore[arg-type]
    table.keep(group, "new", _Made(KEPT_BYTES))  # type: ignore[arg-type]
    assert not any(one.closed for one in large)


def test_large_shapes_that_are_not_called_any_more_go_but_for_what_a_graph_holds() -> None:
    table, group = Table(), _Group()
    old, held = _Made(KEPT_BYTES), _Made(KEPT_BYTES, captured=True)
    last, used = _Made(KEPT_BYTES), _Made()
    for key, one in enumerate((old, held, last, used)):
        table.keep(group, key, one)  # type: ignore[arg-type]
    for _ in range(WHILE + 1):
        table.find(group, 3)  # type: ignore[arg-type]
    table.keep(group, "new", _Made())  # type: ignore[arg-type]
    assert [one.closed for one in (old, held, last, used)] == [True, False, False, False]
    assert table.find(group, 0) is None  # type: ignore[arg-type]


def test_of_many_shapes_those_go_that_were_called_longest_ago() -> None:
    table, group = Table(), _Group()
    made = [table.keep(group, key, _Made()) for key in range(KEPT)]  # type: ignore[arg-type]
    table.find(group, 0)  # type: ignore[arg-type]
    for key in (KEPT, KEPT + 1):
        table.keep(group, key, _Made())  # type: ignore[arg-type]
        table.find(group, key)  # type: ignore[arg-type]
    assert [key for key, one in enumerate(made) if one.closed] == [1, 2]


def test_shapes_without_memory_or_threads_of_their_own_stay_in_larger_numbers() -> None:
    table, group = Table(), _Group()
    own = [table.keep(group, f"own {i}", _Made()) for i in range(2)]  # type: ignore[arg-type]
    light = [table.keep(group, i, _Made(light=True)) for i in range(KEPT_LIGHT - 2)]  # type: ignore[arg-type]
    assert not any(one.closed for one in [*own, *light])  # type: ignore[attr-defined]
    for i in range(KEPT - 1):  # at most KEPT entries with memory of their own stay
        table.find(group, 0)  # type: ignore[arg-type]
        table.keep(group, f"more {i}", _Made())  # type: ignore[arg-type]
        table.find(group, f"more {i}")  # type: ignore[arg-type]
    assert [one.closed for one in own] == [True, True]  # type: ignore[attr-defined]
    assert not light[0].closed, "it was called meanwhile"  # type: ignore[attr-defined]
    assert len(table.known(group)) <= KEPT_LIGHT  # type: ignore[arg-type]


class _Counting(_Made):
    looks = 0

    @property
    def light(self) -> bool:
        _Counting.looks += 1
        return True

    @light.setter
    def light(self, value: bool) -> None: ...


def test_a_new_shape_is_no_reason_to_look_at_all_others() -> None:
    table, group = Table(), _Group()
    for key in range(2 * KEPT_LIGHT):
        table.keep(group, key, _Counting())  # type: ignore[arg-type]
    assert KEPT_LIGHT // 2 < len(table.known(group)) <= KEPT_LIGHT  # type: ignore[arg-type]
    assert _Counting.looks < 100 * KEPT_LIGHT, "2 * KEPT_LIGHT shapes, each of which would be looked at again and again"


def test_shapes_that_graphs_hold_leave_room_for_others() -> None:
    """Captured entries do not count towards the limit. Otherwise each new shape would evict the shape before it."""
    table, group = Table(), _Group()
    for key in range(2 * KEPT):
        table.keep(group, key, _Made(captured=True))  # type: ignore[arg-type]
    others = [table.keep(group, -1 - key, _Made()) for key in range(KEPT)]  # type: ignore[arg-type]
    assert not any(one.closed for one in [*others, *table.known(group)])  # type: ignore[arg-type]


def test_what_is_dropped_of_a_group_depends_on_its_own_calls_alone() -> None:
    """All ranks of a group must drop the same entries, although each rank may also call other groups."""
    kept = []
    for others in (0, 3 * WHILE):
        table, group, other = Table(), _Group(), _Group()
        table.keep(other, 0, _Made())  # type: ignore[arg-type]
        for key in range(3):
            table.keep(group, key, _Made(KEPT_BYTES))  # type: ignore[arg-type]
            table.find(group, key)  # type: ignore[arg-type]
        for _ in range(others):
            table.find(other, 0)  # type: ignore[arg-type]
        table.keep(group, "new", _Made())  # type: ignore[arg-type]
        kept.append(len(table.known(group)))  # type: ignore[arg-type]
    assert kept == [4, 4]


def _call(table: Table, group: _Group, rows: int, *, unfused: bool | None = None) -> bool:  # type: ignore[type-arg]
    """Look up a size as a call does. Return True if the size is compiled now, or was compiled before.

    unfused: True if the choice for this size is to run unfused; None if all sizes that recur are to be compiled.
    """
    if table.find(group, rows) is not None:  # type: ignore[arg-type]
        return True
    here = table.of_group(group)  # type: ignore[arg-type]
    if here.passes("family", rows) is not None:
        return False
    made = _Made(light=True)
    here.prepared("family", rows, table.keep(group, rows, made), unfused is not None)  # type: ignore[arg-type]
    made.runs_unfused = bool(unfused)  # the first call chooses
    return True


def test_sizes_that_all_recur_are_compiled_at_their_first_call() -> None:
    """Each size recurs, as when batch sizes are warmed up and captured one after the other."""
    table, group = Table(), _Group()
    assert all(_call(table, group, rows) for rows in range(10 * PASSING) for _ in range(2))


def test_sizes_that_recur_now_and_then_do_not_make_new_sizes_compile() -> None:
    table, group = Table(), _Group()
    for rows in range(PASSING):
        assert _call(table, group, rows)
    for rows in range(PASSING, 10 * PASSING):
        assert not _call(table, group, rows)
        if rows % 4 == 0:
            assert _call(table, group, rows), "a size that recurs is compiled"
    for rows in range(PASSING):
        assert _call(table, group, rows)
    assert all(_call(table, group, 1000 + n) for n in range(PASSING)), "all compiled sizes have recurred"
    assert not _call(table, group, 2000)


def test_a_size_between_sizes_that_run_unfused_is_never_compiled() -> None:
    table, group = Table(), _Group()
    for rows in range(0, 10 * PASSING, 10):
        assert _call(table, group, rows, unfused=True)
    for _ in range(3):
        for rows in range(10 * PASSING - 10):
            assert _call(table, group, rows, unfused=True) == (rows % 10 == 0)
    fresh = _Group()
    for rows in range(0, 10 * PASSING, 10):
        _call(table, fresh, rows, unfused=True)
    for rows in (-5, 10 * PASSING):  # these sizes may have another choice
        assert [_call(table, fresh, rows, unfused=True) for _ in range(3)] == [False, True, True]


def test_native_code_knows_the_sizes_that_run_unfused() -> None:
    """Then a call of a size that recurs enters no Python function."""
    table, group = Table(), _Group()
    counts = calls_of(group)  # type: ignore[arg-type]
    for rows in range(0, 10 * PASSING, 10):
        _call(table, group, rows, unfused=True)
    known = table.of_group(group).family("family")  # type: ignore[arg-type]
    known.once = 0
    assert not known.waits(55, counts)
    assert known.takes(55)
    assert [rows for rows in range(-9, 200, 3) if known.waits(rows, counts)] == list(range(0, 10 * PASSING - 9, 3))
    assert _call(table, group, 300, unfused=False)
    assert not known.waits(55, counts), "the choice for the newest size may be between them"
    assert known.takes(55)
    assert known.waits(55, counts)
    table.of_group(group).tuned()  # type: ignore[arg-type]
    assert not known.waits(55, counts)


def test_a_size_is_compiled_if_a_similar_size_overlaps() -> None:
    table, group = Table(), _Group()
    for rows in range(0, 10 * PASSING, 10):
        assert _call(table, group, rows, unfused=rows != 50)
    for rows in (3, 51, 77):
        assert not _call(table, group, rows, unfused=True)
        assert _call(table, group, rows, unfused=True)


def test_sizes_that_recur_are_compiled_once_a_call_has_asked_for_measured_times() -> None:
    table, group = Table(), _Group()
    for rows in range(0, 10 * PASSING, 10):
        assert _call(table, group, rows, unfused=True)
    assert not any(_call(table, group, 3, unfused=True) for _ in range(3))
    table.of_group(group).tuned()  # type: ignore[arg-type]
    assert _call(table, group, 3, unfused=True)
    assert not _call(table, group, 4, unfused=True)
    assert _call(table, group, 4, unfused=True)


def test_sizes_that_recur_wait_for_the_call_that_may_compile() -> None:
    table, group = Table(), _Group()
    counts = calls_of(group)  # type: ignore[arg-type]
    for rows in range(PASSING):
        assert _call(table, group, rows)
    counts.compile_from = 3
    for counts.begun in (0, 1, 2):
        assert not _call(table, group, 100)
    counts.begun = 3
    assert not table.of_group(group).recurs("family", 101)  # type: ignore[arg-type]
    assert table.of_group(group).recurs("family", 100)  # type: ignore[arg-type]
    assert _call(table, group, 100)
    assert not _call(table, group, 101)


def test_compilations_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a compilation of 10 ms, the next waits until 500 ms have passed, or about as many calls as take so long."""
    counts, now = GroupCalls(), [100.0]
    monkeypatch.setattr(compilations.time, "monotonic", lambda: now[0])
    known = counts.compilations
    assert known.calls_to_wait() == 0, "nothing has been compiled"
    counts.begun, now[0] = 7, 100.01
    known.ended(100.0)
    assert counts.compile_from == 7 + 1 + compilations.LEAST_CALLS
    counts.begun, now[0] = 17, 100.06
    assert 89 <= known.calls_to_wait() <= 91, "450 ms are left, and 10 calls took 50 ms"
    known.wait(90)
    assert counts.compile_from == 108
    counts.begun, now[0] = 108, 100.52
    assert known.calls_to_wait() == 0
