"""The watching thread's checks of a run that makes no progress, without a GPU and without waiting."""

from __future__ import annotations

import pytest

from weft.runtime.cuda import watch as stream_watch
from weft.runtime.cuda.watch import OwnDeadlines, Watch


class Runs:
    """A fake executor: marks of runs, and the times of calls of `standing_still`."""

    deadline_s = 10.0

    def __init__(self) -> None:
        self.begun = False
        self.asked: list[float] = []

    def has_begun(self) -> bool:
        begun, self.begun = self.begun, False
        return begun

    def standing_still(self, seconds: float) -> None:
        self.asked.append(seconds)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch):
    """Return a watch, and a function that lets it check at a given time."""
    watch, now = Watch(), [0.0]
    monkeypatch.setattr(stream_watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stream_watch.threading.Thread, "start", lambda thread: None)

    def look(at: float) -> None:
        now[0] = at
        watch._look()

    return watch, look


def test_a_run_is_looked_into_once_when_none_has_begun_for_the_deadline(looks) -> None:
    (watch, look), runs = looks, Runs()
    watch.add(runs)
    look(100.0)
    assert not runs.asked, "nothing has run yet"
    runs.begun = True
    look(101.0)
    look(110.0)
    runs.begun = True
    look(111.0)
    look(120.0)
    assert not runs.asked, "another one has begun"
    look(122.0)
    look(140.0)
    assert runs.asked == [11.0]
    runs.begun = True
    look(141.0)
    look(152.0)
    assert len(runs.asked) == 2


def test_what_was_removed_while_it_was_looked_at_stays_away(looks) -> None:
    (watch, look), runs = looks, Runs()
    watch.add(runs)
    mark = runs.has_begun

    def removed_meanwhile() -> bool:
        watch.remove(runs)
        return mark()

    runs.has_begun, runs.begun = removed_meanwhile, True  # type: ignore[method-assign]
    look(1.0)
    look(20.0)
    assert not runs.asked
    assert runs not in watch._seen


def test_an_executor_with_deadlines_of_its_own_is_only_looked_at(looks) -> None:
    watch, look = looks
    times = list[str]()

    class Recorded(OwnDeadlines):
        def look(self) -> None:
            times.append("looked")

    exchange = Recorded()
    watch.add(exchange)
    look(1.0)
    look(1e9)
    assert times == ["looked", "looked"]
