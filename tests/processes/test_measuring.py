"""Schedules that are selected by measurement: warnings, autotuning, caching, self-calibration, and a user's own builders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import choosing_ranks as choosing
from support import measuring_ranks as ranks
from support import self_calibration_ranks as calibrating
from support.slow import mostly, slow

from weft.launch import Pool


def test_it_is_said_once_and_with_times_that_nothing_overlaps(pool: Pool) -> None:
    of_first, *of_others = pool.run(ranks.warnings_of, ranks=3, timeout_s=60)
    (text,) = of_first
    assert re.search(
        r"all_gather_matmul without overlap for \[39, 24\] gathered from 3 ranks @ \[24, 20\] on each, fp32: "
        r"serial takes \d+ us, and the fastest other schedule, \S+, takes \d+ us \(measured\)\. "
        r"A schedule replaces serial only if it is faster by 15% and by 1e\+09 us\. This warning appears once",
        text,
    )
    assert of_others == [[], []]  # ranks agree on times, so one rank's cache is enough to check


def test_the_warning_compares_times_of_one_measurement(pool: Pool) -> None:
    (text,), others = pool.run(ranks.warnings_after_a_slow_moment, ranks=2, timeout_s=60)
    assert re.search(r"serial takes 10000 us, and the fastest other schedule, \S+, takes 10000 us", text)
    assert others == []


def test_on_demand_goes_without_a_model(pool: Pool) -> None:
    for timed in pool.run(ranks.on_demand_everywhere, ranks=2, timeout_s=100):
        assert {name.split("[")[0] for name in timed} == {"serial", "gather", "shard"}


@pytest.mark.parametrize("breaks", mostly([["deep", "pipe", "nobody"], list(ranks.BREAKS)], ["deep", "pipe", "nobody"]))
def test_a_cache_that_is_broken_on_one_rank_changes_no_choice_and_is_said_once(
    pool: Pool, tmp_path: Path, breaks: list[str]
) -> None:
    whole, broken = pool.run(ranks.broken_caches, str(tmp_path), breaks, ranks=2, timeout_s=100)
    for what in breaks:
        (taken, said, note), (taken_there, said_there, note_there) = whole[what], broken[what]
        assert taken == taken_there, what
        assert said == [], what
        assert "calibrated on today" in note
        assert note_there.startswith("not calibrated"), what
        reason = "names a user without a home" if what == "nobody" else "cached times are ignored: "
        assert sum(reason in text for text in said_there) == 1, (what, said_there)
        assert len(said_there) == 1 + (what == "folder"), (what, said_there)  # nothing replaces this file


@pytest.mark.parametrize("use", [False, True], ids=["pinned", "block"])
def test_on_demand_the_promising_are_timed_once_and_decide(pool: Pool, use: bool) -> None:
    found = pool.run(ranks.on_demand_with_a_model, use, ranks=2, timeout_s=100)
    assert found[0] == found[1]
    assert {"serial", "gather[by=dma]"} < set(found[0]["timed"])
    assert found[0]["timed"] == found[0]["promising"]
    assert found[0]["first"] == 3 * len(found[0]["timed"])
    assert found[0]["later"] == 0
    assert set(found[0]["taken"]) == {found[0]["explained"]}
    assert found[0]["measured"]


def test_remembered_times_decide_calls_as_they_do_for_explain(pool: Pool) -> None:
    found = pool.run(ranks.remembered_times_decide, ranks=2, timeout_s=60)
    ((before, after, said),) = set(found)
    assert before != after == said


def test_a_made_up_builder_is_among_those_measured(pool: Pool) -> None:
    for timed, verified in pool.run(ranks.made_up_is_measured, ranks=2, timeout_s=60):
        assert {"serial", "ring[by=dma]", "ring[by=kernel]"} < set(timed)
        assert verified == 2  # each once in all calls together


def test_a_builder_from_outside_that_races_is_named_on_every_rank(pool: Pool) -> None:
    for found in pool.run(ranks.hasty_is_refused, ranks=2, timeout_s=60):
        for how, text in found.items():
            assert text.startswith("ScheduleError: builder hasty, for all_gather_matmul of [42, 24]"), (how, text)
            assert "race on box" in text


@pytest.mark.parametrize("exact", [True, slow(False)], ids=["exact", "bounded"])
def test_without_a_model_schedules_are_run_and_all_ranks_take_one(pool: Pool, exact: bool) -> None:
    found = pool.run(choosing.chooses_for_experts, exact, False, ranks=3, timeout_s=100)
    assert len(set(found)) == 1
    ((_, captured),) = set(found)
    assert bool(captured) == (not exact)  # if y has exactly the arriving rows, the CPU reads their number


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "bounded"])
def test_with_a_model_the_plan_is_taken(pool: Pool, exact: bool) -> None:
    found = pool.run(choosing.chooses_for_experts, exact, True, ranks=2, timeout_s=100)
    assert len(set(found)) == 1
    ((_, captured),) = set(found)
    assert captured.startswith("dispatch") == (not exact)


def test_ranks_measure_once_and_plan_by_the_first_ranks_numbers(pool: Pool) -> None:
    first, *others = pool.run(calibrating.at_first_calls, ranks=3, timeout_s=100)
    assert first["measured"] == [1, 1]
    known = first["known"]
    derived = calibrating.Measured(known["machine"], 0, 3).base
    assert known["copy_bytes_per_us"] == derived.copy_bytes_per_us
    assert known["host_step_us"] == derived.host_step_us
    for other in others:
        assert other == {**first, "rank": other["rank"]}


def test_overlap_that_a_slow_moment_made_look_fast_is_not_chosen(pool: Pool) -> None:
    assert pool.run(ranks.slow_moment, False, ranks=2, timeout_s=60) == ["serial"] * 2
    one, other = pool.run(ranks.slow_moment, True, ranks=2, timeout_s=60)
    assert one == other != "serial"
