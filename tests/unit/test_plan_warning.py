"""The planner's only warning: its text, its times, and the cases without a warning."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any

import pytest

from weft import plan
from weft.builders import (
    AllGatherMatmul,
    Problem,
    candidates,
    described,
)
from weft.hw import load_machine
from weft.plan.choose import decide
from weft.sim import model_of

module = importlib.import_module("weft.plan.choose")  # `weft.plan.choose` is a function, so import the module by name
H200 = model_of(load_machine("h200"), 2)
LARGE = AllGatherMatmul.even(8192, 4096, 8192, 2)
TINY = AllGatherMatmul.even(2, 8, 8, 2)
NO_COLLECTIVE = replace(H200, collective_latency_us=0.0, collective_bytes_per_us=float("inf"))


@pytest.fixture(autouse=True)
def _no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_choices", {})
    monkeypatch.setenv("WEFT_QUIET", "1")


def test_it_is_said_once_that_nothing_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_QUIET", "0")
    monkeypatch.setattr(module, "_warned", False)
    model = NO_COLLECTIVE
    assert plan.choose(LARGE, H200).candidate.name != "serial"  # no warning, because the choice overlaps
    alone = AllGatherMatmul.even(64, 8, 8, 1)
    assert plan.choose(alone, model_of(load_machine("h200"), 1)).candidate.name == "serial"  # nor could this
    plan.choose(TINY, model, pinned="serial")  # nor should this
    with pytest.warns(
        plan.NoOverlapWarning,
        match=r"\[2, 8\] gathered from 2 ranks @ \[8, 8\] on each, bf16, queued: .* us .*WEFT_QUIET=1",
    ):
        assert plan.choose(TINY, model).candidate.name == "serial"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan.choose(AllGatherMatmul.even(4, 8, 8, 2), model).candidate.name == "serial"


def test_the_warning_says_what_its_times_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text says if the planned size represents similar sizes. If a graph can capture no schedule, nothing runs. A
    choice by measured times does not compare predicted candidates.
    """
    monkeypatch.setenv("WEFT_QUIET", "0")

    def said(problem: Problem, **options: Any) -> list[str]:
        monkeypatch.setattr(module, "_warned", False)
        monkeypatch.setattr(module, "_choices", {})
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert plan.choose(problem, H200, **options).candidate.name == "serial"
        return [str(one.message) for one in found]

    assert said(TINY)[0].startswith("weft runs all_gather_matmul without overlap for [2, 8] gathered from 2 ranks")
    assert said(TINY, near=True)[0].startswith(
        "weft runs all_gather_matmul without overlap for sizes near [2, 8] gathered"
    )
    (alone,) = said(LARGE, measured={"serial": 100.0})
    assert "queued: serial is taken, 100.0 us measured: no other candidate was measured; weft.plan" in alone
    assert "predicted" not in alone
    exact = described("all_to_all_matmul", m=64, n=64, k=64, ranks=2, dtype="bf16", experts=2)
    assert decide(exact, H200, mode="graph").schedule.reads_on_host
    assert said(exact, measured={"serial": 1.0})
    assert said(exact, mode="graph", measured={"serial": 1.0}) == []


def test_it_is_said_why_nothing_else_was_compared() -> None:
    few = frozenset({"serial", *(one.name for one in candidates(LARGE) if one.builder.startswith("ficco_2d"))})
    choice = decide(LARGE, H200, mode="queued", among=few)
    assert choice.reason.endswith("predicted: all others have a larger rounding error")
    assert any(row.us is not None for row in choice.rows if row.rough)


def test_quiet_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan.choose(TINY, NO_COLLECTIVE).candidate.name == "serial"
