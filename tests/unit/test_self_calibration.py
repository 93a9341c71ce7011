"""Self-calibration: the source of a model, which measured numbers are used, and their description."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from nobodys_gpus import BASE, NAME, SIZES, SLOW, SLOW_US, TIMES, TODAY, Measured, machine, made, nothing_known

from weft import plan
from weft.cli import doctor
from weft.operator import this_machine
from weft.plan import calibrated, machine_and_model
from weft.plan.calibration import Calibration
from weft.plan.machine import versions
from weft.plan.self_calibration import find, measure, save, sizes_for
from weft.sim import Model


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from nothing_known(tmp_path, monkeypatch)


# -- which numbers are used


def test_numbers_near_the_derived_ones_are_in_the_model() -> None:
    found = made()
    model, used, dropped = found.apply(BASE)
    assert len(used) == 8
    assert dropped == ()
    for name in ("copy_bytes_per_us", *TIMES):
        assert getattr(model, name) == getattr(found, name), name
    kernel = replace(model, kernel_copy_units=64)
    assert kernel.kernel_copy_bytes_per_us(True) == pytest.approx(found.put_bytes_per_us)
    assert kernel.kernel_copy_bytes_per_us(False) == pytest.approx(found.get_bytes_per_us)
    assert model.kernel_copy_bytes_per_us(True) == pytest.approx(1.1 * BASE.kernel_copy_bytes_per_us(True))
    for *shape, us in found.gemms:
        assert model.matmul_us(*shape) == pytest.approx(us)


@pytest.mark.parametrize("factor", [0.4, 2.1, 1e-5, 1e5])
def test_numbers_over_two_times_away_stay_derived_with_a_sentence(factor: float) -> None:
    model, used, dropped = made(factor).apply(BASE)
    assert model == BASE
    assert used == ()
    assert len(dropped) == 8
    assert dropped[0] == (
        f"copies by engine stays at the derived {BASE.copy_bytes_per_us / 1e3:.3g} GB/s: "
        f"the measured {factor * BASE.copy_bytes_per_us / 1e3:.3g} GB/s differs by more than 2x"
    )


@pytest.mark.parametrize("factor", [0.51, 1.99])
def test_numbers_up_to_two_times_away_count(factor: float) -> None:
    assert made(factor).apply(BASE).dropped == ()


def test_each_number_is_judged_alone() -> None:
    model, used, dropped = made(host_step_us=10 * BASE.host_step_us, signal_local_us=0.0, put_bytes_per_us=None).apply(
        BASE
    )
    assert len(used) == 5
    assert (model.host_step_us, model.signal_local_us) == (BASE.host_step_us, BASE.signal_local_us)
    assert model.put_bytes_per_us == BASE.put_bytes_per_us
    assert model.copy_bytes_per_us == 1.1 * BASE.copy_bytes_per_us
    assert [text.partition(" stays")[0] for text in dropped] == [
        "stores by kernel",
        "a signal between streams",
        "the launch of a step",
    ]
    assert "there was no time to measure it" in dropped[0]


def test_links_that_are_faster_than_derived_let_copies_be_fast() -> None:
    model = made(1.9).apply(BASE).model
    assert model.wiring.numbers[0] == model.copy_bytes_per_us == 1.9 * BASE.copy_bytes_per_us


# -- measuring


def test_all_is_measured_with_time_enough() -> None:
    assert measure(Measured(), SIZES) == made()  # type: ignore[arg-type]


@pytest.mark.parametrize(("took_s", "answers"), [(0.3, 7), (1.0, 2), (5.0, 1)])
def test_it_stops_at_the_budget_and_keeps_what_it_has(took_s: float, answers: int) -> None:
    measured = Measured(took_s)
    found = measure(measured, SIZES)  # type: ignore[arg-type]
    assert len(measured.asked) == answers
    assert len(found.apply(BASE).used) == answers
    assert found.copy_bytes_per_us == made().copy_bytes_per_us
    assert found.host_step_us is None
    assert [row[:4] for row in found.gemms] == list(SIZES.gemms)


@pytest.mark.parametrize("factor", [1e-3, 0.05, 1.0, 30.0])
def test_sizes_are_short_on_slow_machines_too(factor: float) -> None:
    def slower(curve: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        return tuple((units, rate * factor) for units, rate in curve)

    flops = {dtype: rate * factor for dtype, rate in BASE.matmul_flops_per_us.items()}
    model: Model = replace(
        BASE, copy_bytes_per_us=BASE.copy_bytes_per_us * factor, put_bytes_per_us=slower(BASE.put_bytes_per_us),
        get_bytes_per_us=slower(BASE.get_bytes_per_us), matmul_flops_per_us=flops,
    )  # fmt: skip
    sizes = sizes_for(model)
    assert 1 << 20 <= sizes.copy_bytes <= 64 << 20
    large, small = sizes.gemms
    assert large[0] == 4 * small[0]
    if factor > 0.01:
        assert sizes.copy_bytes <= 3000 * model.copy_bytes_per_us
        assert model.matmul_us(*large) <= 2000


# -- saved numbers, and the source of a model


def test_the_best_source_counts() -> None:
    derived = calibrated(machine(), 2)
    assert derived == (BASE, "not calibrated with 2 ranks, so derived numbers are used", False, "derived")
    save(made())
    model, note, refused, source = calibrated(machine(), 2)
    assert (model, refused, source) == (made().apply(BASE).model, False, "self-calibration")
    assert f"self-calibrated on {TODAY} (0 days ago): copies by engine, stores by kernel" in note
    assert calibrated(machine(), 4).source == "derived"
    assert calibrated(replace(machine(), about=""), 2).source == "machine file"
    Calibration(NAME, 2, "2020-01-01", versions(), (), 3.5, 1.5).save()
    model, note, refused, source = calibrated(machine(), 2)
    assert (model.host_step_us, refused, source) == (1.5, False, "calibration")
    assert note == f"calibrated on 2020-01-01 ({(TODAY - datetime(2020, 1, 1).date()).days} days ago)"


def test_a_calibration_that_is_not_used_is_said() -> None:
    save(made())
    path = Calibration(NAME, 8, "2020-01-01", versions(), (), 3.5, 1.5).save()
    found = calibrated(machine(), 2)
    assert found.refused
    assert found.source == "self-calibration"
    assert found.note.startswith(
        "not calibrated with 2 ranks (only for 8: run `weft plan calibrate --ranks 2`), self-cal"
    )
    path.rename(path.with_name(path.name.replace("-8.", "-2.")))
    found = calibrated(machine(), 2)
    assert found.refused
    assert found.source == "self-calibration"
    assert f"is for {NAME} with 8 ranks, not for {NAME} with 2 ranks: run `weft plan calibrate` again" in found.note


def test_a_refused_calibration_is_warned_of_at_a_call(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(this_machine, "device_name", lambda device: NAME)
    path = Calibration(NAME, 2, "2020-01-01", versions(), (), 3.5, 1.5).save()
    path.write_text("{")
    with pytest.warns(UserWarning, match="weft plans without a calibration: not calibrated: .*cannot be read"):
        assert this_machine.calibrated_model(torch.device("cuda"), 2) == BASE
    this_machine.model_by_name.cache_clear()
    this_machine.calibrated_model(torch.device("cuda"), 2)
    assert len(recwarn) == 0  # already printed


def test_it_is_old_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    save(made(date=(TODAY - timedelta(days=3)).isoformat()))
    assert "(3 days ago)" in calibrated(machine(), 2).note


def test_a_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    save(made())
    monkeypatch.setenv("WEFT_SELF_CALIBRATION", "0")
    assert calibrated(machine(), 2).model == BASE
    assert "derived numbers are used (WEFT_SELF_CALIBRATION=0)" in calibrated(machine(), 2).note


def test_plans_of_this_machine_say_what_was_measured_and_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine_and_model.__globals__, "machine_here", machine)
    save(made(host_step_us=SLOW_US))
    _, model, notes = machine_and_model(None, 2)
    assert model.copy_bytes_per_us == 1.1 * BASE.copy_bytes_per_us
    assert "no machine file has" in notes[0]
    assert "self-calibrated on" in notes[1]
    assert SLOW in notes[1]


def _changed(**changes: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _without(field: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        del content[field]
        path.write_text(json.dumps(content))

    return change


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda path: path.write_text("{"), "cannot be read"),
    "deep": (lambda path: path.write_text("[" * 100_000), "nested 100000 deep"),
    "a list": (lambda path: path.write_text("[]"), "contains a list"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "it is a pipe"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "it is a folder"),
    "a number is missing": (_without("put_bytes_per_us"), "lacks 'put_bytes_per_us'"),
    "text": (_changed(copy_bytes_per_us="4"), "copy_bytes_per_us has a wrong type or size for a self-calibration"),
    "negative": (_changed(host_step_us=-1.0), "host_step_us has a wrong type or size for a self-calibration"),
    "huge": (_changed(get_bytes_per_us=1e300), "get_bytes_per_us has a wrong type or size for a self-calibration"),
    "GEMMs": (_changed(gemms=[[1, 2, 3, "bf16"]]), "gemms has a wrong type or size for a self-calibration"),
    "another machine's": (_changed(machine="NVIDIA H200"), "is for NVIDIA H200 with 2 ranks, not for"),
    "other ranks'": (_changed(world_size=8), "with 8 ranks, not for"),
    "other versions": (_changed(versions={**versions(), "weft": "0.0.0"}), "was made with weft 0.0.0, now"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_or_foreign_file_leaves_derived_numbers_and_a_note(how: str, tmp_path: Path) -> None:
    save(made())
    (path,) = tmp_path.iterdir()
    breaks, message = BROKEN[how]
    breaks(path)
    with pytest.raises(ValueError, match=message):
        find(NAME, 2)
    model, note, _, source = calibrated(machine(), 2)
    assert (model, source) == (BASE, "derived")
    assert message in note


# -- the doctor


class _Torch:
    """The attributes of torch that the doctor reads."""

    def __init__(self, *names: str) -> None:
        self.cuda, self.names = self, names

    def is_available(self) -> bool:
        return bool(self.names)

    def device_count(self) -> int:
        return len(self.names)

    def get_device_name(self, index: int) -> str:
        return self.names[index]


def _planning(monkeypatch: pytest.MonkeyPatch, *names: str) -> doctor.Finding:
    monkeypatch.setattr(doctor, "_import", lambda name: _Torch(*names))
    return doctor._planning()


def test_the_doctor_says_which_source_is_used_how_old_and_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _planning(monkeypatch, NAME, NAME)
    assert (found.state, found.fix) == ("missing", "weft plan calibrate")
    assert found.found.startswith(
        "2 ranks: derived; not calibrated with 2 ranks, so derived numbers are used\nno machine file has"
    )
    save(made(date=(TODAY - timedelta(days=4)).isoformat(), host_step_us=SLOW_US))
    found = _planning(monkeypatch, NAME, NAME)
    assert found.state == "ok"
    assert "2 ranks: self-calibration; not calibrated with 2 ranks, self-calibrated on" in found.found
    assert "(4 days ago)" in found.found
    assert SLOW in found.found
    found = _planning(monkeypatch, NAME, NAME, NAME, NAME)
    assert found.state == "missing"
    assert "2 ranks: self-calibration;" in found.found
    assert "4 ranks: derived;" in found.found
    Calibration(NAME, 2, TODAY.isoformat(), versions(), (), 3.5, 1.5).save()
    assert "2 ranks: calibration; calibrated on" in _planning(monkeypatch, NAME, NAME).found
    assert "2 ranks: machine file; " in _planning(monkeypatch, "NVIDIA H200", "NVIDIA H200").found


def test_the_doctor_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _planning(monkeypatch).found.startswith("no GPU")
    assert "no numbers for AMD Radeon" in _planning(monkeypatch, "AMD Radeon").found
    assert f"GPUs differ (NVIDIA H200, {NAME})" in _planning(monkeypatch, "NVIDIA H200", NAME).found
    path = Calibration("NVIDIA H200", 2, "2020-01-01", versions(), (), 3.5, 1.5).save()
    path.write_text("{")
    found = _planning(monkeypatch, "NVIDIA H200", "NVIDIA H200")
    assert (found.state, found.fix) == ("missing", "weft plan calibrate")
    assert "not calibrated: " in found.found


def test_names_in_the_doctors_report_are_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    doctor.print_report(doctor.Report((doctor.Finding("planning", "ok", "numbers[red] are [/]"),), ()))
    assert "numbers[red] are [/]" in capsys.readouterr().out
    assert plan.calibrated is calibrated
