"""Autotuning: which candidates run, which times count, and where times are cached."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support import made_up

from weft.builders import AllGatherMatmul, AllToAllMatmul, Candidate, candidates
from weft.hw import load_machine
from weft.plan import autotune, choose, known_times, promising
from weft.plan import machine as here
from weft.schedule import Schedule
from weft.sim import model_of

PROBLEM = AllGatherMatmul.even(4096, 4096, 8192, 2)
CHOICE = choose(PROBLEM, model_of(load_machine("h200"), 2))
CANDIDATES = promising(CHOICE, 3)


class Rank:
    """A rank that records the candidates that it runs, which take 100 us, 101 us, ... Other ranks report the times
    `other`.
    """

    def __init__(self, *other: float) -> None:
        self.runs: list[str] = []
        self.other = list(other)

    def run(self, candidate: Candidate) -> float:
        self.runs.append(candidate.name)
        return 99.0 + len(self.runs)

    def agree(self, mine: list[float]) -> list[float]:
        return [max(value, *self.other) for value in mine] if self.other else mine

    def tune(self, **options: object) -> dict[str, float]:
        return autotune(PROBLEM, CANDIDATES, self.run, self.agree, **{"machine": "toy", **options})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all times, as in a new process."""
    monkeypatch.setitem(autotune.__globals__, "_known", {})


def test_the_promising_are_the_fastest_and_those_without_overlap() -> None:
    names = [candidate.name for candidate in CANDIDATES]
    usable = [row.candidate.name for row in CHOICE.rows if row.predicted_us is not None and not row.rough]
    assert names[:3] == usable[:3]
    assert set(names[3:]) == {"serial", "gather[by=dma]", "gather[by=kernel]"}
    assert [candidate.name for candidate in promising(CHOICE, 1000)] == usable


def test_of_graphs_those_are_promising_that_can_be_captured() -> None:
    problem = replace(AllToAllMatmul.even(4096, 4096, 8192, 4, 2), exact=False)
    choice = choose(problem, model_of(load_machine("h200"), 2), mode="graph")
    assert any(row.reads_on_host and row.predicted_us is not None for row in choice.rows)
    found = [choice.row(candidate.name) for candidate in promising(choice)]
    assert {row.candidate.name for row in found if row.reads_on_host} == {"serial"}
    assert len(found) > 1


def test_candidates_take_turns_and_the_median_of_the_slowest_rank_counts() -> None:
    rank = Rank(103.0)  # the other rank is slower in the first round only
    times = rank.tune(rounds=3)
    names = [candidate.name for candidate in CANDIDATES]
    assert rank.runs == 3 * names
    expected = [sorted(max(103.0, 100.0 + i + len(names) * turn) for turn in range(3))[1] for i in range(len(names))]
    assert list(times.values()) == expected
    assert choose(PROBLEM, model_of(load_machine("h200"), 2), measured=times).measured_us is not None


def test_times_are_kept_in_memory_and_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, new = Rank(), Rank(), Rank()
    times = first.tune()
    assert again.tune() == times
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["key"]["versions"] == here.versions()
    forget(monkeypatch)
    assert new.tune() == times
    assert again.runs == new.runs == []


def test_other_machines_modes_problems_and_versions_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    Rank().tune()
    for options in ({"machine": "other"}, {"mode": "single"}):
        rank = Rank()
        rank.tune(**options)
        assert rank.runs, options
    rank = Rank()
    autotune(AllGatherMatmul.even(64, 64, 64, 2), CANDIDATES, rank.run, rank.agree, machine="toy")
    assert rank.runs
    monkeypatch.setitem(autotune.__globals__, "versions", lambda: {"torch": "3.0"})
    rank = Rank()
    rank.tune()
    assert rank.runs


def test_a_rank_that_knows_measures_with_one_that_does_not() -> None:
    Rank().tune()
    rank = Rank(1.0)  # the other rank reports that a time is missing
    rank.tune()
    assert rank.runs


def test_a_candidate_without_a_time_is_measured_with_the_others() -> None:
    rank = Rank()
    autotune(PROBLEM, CANDIDATES[:2], rank.run, rank.agree, machine="toy", rounds=1)
    rank.tune(rounds=1)
    assert rank.runs == [c.name for c in CANDIDATES[:2]] + [c.name for c in CANDIDATES]


def test_what_was_measured_before_is_remembered_beside_what_is_measured_now() -> None:
    before = Rank().tune(rounds=1)
    rank = Rank()
    new = next(candidate for candidate in candidates(PROBLEM) if candidate.name not in before)
    autotune(PROBLEM, [new], rank.run, rank.agree, machine="toy", rounds=1)
    assert rank.runs == [new.name]
    assert known_times(PROBLEM, "toy", "queued") == before | {new.name: 100.0}


def test_times_hold_for_the_schedules_of_builders_from_outside() -> None:
    def ring(p: AllGatherMatmul, *, by: str) -> Schedule:  # as when a user changes a builder
        return made_up.ring(p, by="dma")

    def tuned() -> int:
        rank = Rank()
        autotune(PROBLEM, candidates(PROBLEM, ("serial", "ring")), rank.run, rank.agree, machine="toy", rounds=1)
        return len(rank.runs)

    with made_up.registered():
        assert (tuned(), tuned()) == (3, 0)
        times = known_times(PROBLEM, "toy", "queued")
        assert times is not None
        assert set(times) == {"serial", "ring[by=dma]", "ring[by=kernel]"}
    with made_up.registered(ring, by=("dma", "kernel")):
        assert (tuned(), tuned()) == (3, 0)
    assert known_times(PROBLEM, "toy", "queued") is None
    with made_up.registered():
        assert tuned() == 0


def test_times_of_queued_calls_serve_graphs_where_none_were_timed() -> None:
    times = Rank().tune()
    assert known_times(PROBLEM, "toy", "graph") == times
    assert known_times(PROBLEM, "toy", "single") is None
    graphs = Rank().tune(mode="graph", rounds=1)
    assert known_times(PROBLEM, "toy", "graph") == graphs != times


def test_times_without_serial_choose_nothing() -> None:
    rank = Rank()
    autotune(PROBLEM, candidates(PROBLEM, ("gather",)), rank.run, rank.agree, machine="toy")
    assert known_times(PROBLEM, "toy", "queued") is None


@pytest.mark.parametrize(
    "times",
    [None, [1.0], {"serial": "fast"}, {"serial": float("nan")}, {"serial": -1.0}, {"serial": None}, {"serial": 10**400},
     {"serial": True}, {"serial": 1e308}],
)  # fmt: skip
def test_a_broken_file_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: object) -> None:
    Rank().tune()
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    file.write_text("{" if times is None else json.dumps(kept | {"times_us": times}))
    forget(monkeypatch)
    rank = Rank()
    with pytest.warns(UserWarning, match=rf"cached times are ignored: .*{file.name}.*delete it") as warned:
        rank.tune()
    assert len(warned) == 1
    assert rank.runs
    assert json.loads(file.read_text())["times_us"].keys() == {candidate.name for candidate in CANDIDATES}


def test_a_pipe_in_place_of_a_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rank().tune()
    (file,) = tmp_path.iterdir()
    file.unlink()
    os.mkfifo(file)
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="it is a pipe, not a regular file"):
        times = Rank().tune()
    assert json.loads(file.read_text())["times_us"] == times


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds=0, 6 candidates"):
        Rank().tune(rounds=0)


def test_times_that_cannot_be_kept_are_told_once_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("weft.caller._said", set())
    with pytest.warns(UserWarning, match="measured times cannot be saved in .*set WEFT_CACHE_DIR"):
        assert Rank().tune()["serial"] > 0
    forget(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Rank().tune()["serial"] > 0
