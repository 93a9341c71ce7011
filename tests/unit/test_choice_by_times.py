"""The choice between measured schedules compares times of one measurement, for usual calls and for captured calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from weft.operator import measure, select

FIRST = {"serial": 1000.0, "reads": 800.0, "pushes": 900.0}  # another program slows all calls
AGAIN = {"serial": 500.0, "reads": 400.0, "pushes": 300.0}


def chosen(first: dict[str, float]) -> tuple[tuple[str, str], list[list[str]]]:
    """Return the schedules for usual and for captured calls, and the lists of schedules that were timed again. Only "reads" reads
    sizes on the CPU, so it cannot be captured.
    """
    again: list[list[str]] = []

    def measured(p: Any, schedules: dict[str, Any], *_: Any, anew: bool = False) -> dict[str, float]:
        again.extend([sorted(schedules)] if anew else [])
        return {name: (AGAIN if anew else first)[name] for name in schedules}

    p: Any = SimpleNamespace(worth_running=lambda candidate: True)
    comm: Any = SimpleNamespace(device=torch.device("cuda"), rank=1, check=lambda: None)
    candidates = [SimpleNamespace(name=name) for name in first]
    built = {name: SimpleNamespace(reads_on_host=name == "reads") for name in first}
    with (
        mock.patch.object(select, "candidates", return_value=candidates),
        mock.patch.object(select, "_built", lambda p, candidate, comm: built[candidate.name]),
        mock.patch.object(measure, "measured", measured),
    ):
        return select._fastest(p, comm, {}, None, None), again


def test_times_of_captured_calls_are_of_one_measurement() -> None:
    assert chosen(FIRST) == (("reads", "pushes"), [["reads", "serial"], ["pushes", "serial"]])


def test_one_schedule_for_both_kinds_of_calls_is_timed_again_once() -> None:
    assert chosen({**FIRST, "pushes": 700.0}) == (("pushes", "pushes"), [["pushes", "serial"]])


def test_serial_is_not_timed_again() -> None:
    assert chosen({"serial": 100.0, "reads": 99.0, "pushes": 99.0}) == (("serial", "serial"), [])
