"""Calibration of an invented machine: the resulting model must equal that machine. Calibrations are saved, and refused
when they are out of date.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.hw import load_machine
from weft.plan import calibrated, calibration, machine, saved
from weft.plan.calibration import Calibration, calibrate, find, fit_line, gemm_points
from weft.sim import Model, model_of
from weft.sim.machines import disturbance
from weft.sim.model import interpolated

BASE = model_of(load_machine("h200"), 2)
# Another tile size, slower copies with another latency, and a collective with three times the latency.
TRUTH = replace(
    BASE, tile=(256, 128), tile_half=80.0, tile_ramp=200.0, launch_us=4.0, copy_latency_us=11.0, copy_bytes_per_us=2e5,
    copy_row_us=0.004, collective_latency_us=70.0, collective_bytes_per_us=1.5e5, signal_local_us=0.7, signal_remote_us=3.1,
    host_step_us=1.5, kernel_copy_units=24, copy_disturbance=disturbance(1.2, 0.0, 2e5),
)  # fmt: skip


class Measured:
    """Measurements of the model `TRUTH`. Each measurement takes a pretended second."""

    machine, world_size, copy_units = "NVIDIA H200", 2, 24

    def __init__(self, truth: Model = TRUTH) -> None:
        self.truth, self.asked = truth, []

    def __getattribute__(self, name: str) -> Any:
        if name.endswith("_us"):
            object.__getattribute__(self, "asked").append(name)
        return object.__getattribute__(self, name)

    def elapsed_s(self) -> float:
        return len(self.asked)

    def gemm_us(self, m: int, n: int, k: int, dtype: str) -> float:
        return self.truth.matmul_us(m, n, k, dtype)

    def launch_us(self) -> float:
        return self.truth.launch_us

    def host_step_us(self) -> float:
        return self.truth.host_step_us

    def copy_us(self, count: int) -> float:
        return self.truth.copy_latency_us + count / self.truth.copy_bytes_per_us

    def copy_rows_us(self, rows: int, row_bytes: int) -> float:
        return interpolated([(c, self.copy_us(c)) for c in calibration._COPIES], rows * row_bytes) + rows * 0.004

    def kernel_copy_us(self, count: int, put: bool) -> float:
        return self.truth.launch_us + 2.0 + count / (1.8e5 if put else 1.1e5)

    def all_gather_us(self, count: int) -> float:
        return self.truth.collective_latency_us + count / self.truth.collective_bytes_per_us

    def signal_us(self, remote: bool) -> float:
        return self.truth.signal_remote_us if remote else self.truth.signal_local_us

    def gemm_beside_copy_us(self, m: int, n: int, k: int, dtype: str, by: str) -> tuple[float, float]:
        return (1.2 if by == "dma" else 1.5) * self.truth.matmul_us(m, n, k, dtype), 2e5


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrate(Measured(), BASE, budget_s=800)


def test_the_calibrated_model_is_the_machine(found: Calibration) -> None:
    model = found.apply(BASE)
    for name in ("launch_us", "host_step_us", "signal_local_us", "signal_remote_us", "kernel_copy_units"):
        assert getattr(model, name) == getattr(TRUTH, name), name
    for name in (
        "copy_latency_us",
        "copy_bytes_per_us",
        "collective_latency_us",
        "collective_bytes_per_us",
        "copy_row_us",
    ):
        assert getattr(model, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3), name
    assert model.copy_disturbance == pytest.approx(TRUTH.copy_disturbance)
    assert model.kernel_copy_disturbance == pytest.approx(disturbance(1.5, 24 / 132, 2e5))
    for size in (1 << 16, 1 << 20, 1 << 28):  # measured sizes are reproduced
        assert model.transfer_us("copy", size) == pytest.approx(size / 2e5, rel=1e-3)
        assert model.transfer_us("put", size) == pytest.approx(2.0 + size / 1.8e5)
        assert model.transfer_us("get", size) == pytest.approx(2.0 + size / 1.1e5)
        assert model.transfer_us("all_gather", size) == pytest.approx(size / 1.5e5, rel=1e-3)


def test_measured_matmuls_are_met_and_those_between_come_close(found: Calibration) -> None:
    model = found.apply(BASE)
    assert model.matmul_us(4096, 4096, 4096, "bf16") == pytest.approx(TRUTH.matmul_us(4096, 4096, 4096, "bf16"))
    rng = random.Random(3)
    shapes = [tuple(round(2 ** rng.uniform(8, 14)) for _ in range(3)) for _ in range(100)]

    def errors(of: Model) -> np.ndarray:
        return np.array([abs(of.matmul_us(*shape, "bf16") / TRUTH.matmul_us(*shape, "bf16") - 1) for shape in shapes])

    assert np.mean(errors(model) < 0.1) > 0.85 > np.mean(errors(replace(BASE, launch_us=4.0)) < 0.1)
    assert np.median(errors(model)) < 0.05


def test_between_measured_points_logarithms_are_straight() -> None:
    curve = [(1024.0, 10.0), (4096.0, 20.0), (16384.0, 80.0)]
    assert interpolated(curve, 4096) == pytest.approx(20.0)
    assert interpolated(curve, 2048) == pytest.approx(math.sqrt(200.0))
    assert interpolated(curve, 100) == pytest.approx(10.0)  # small sizes take only the latency
    assert interpolated(curve, 163840) == pytest.approx(800.0)  # large sizes follow the rate
    shape, twice = (1024, 1024, 1024, "bf16"), (1024, 1024, 4096, "bf16")
    known = {shape: 1.1 * BASE.matmul_us(*shape), twice: 1.5 * BASE.matmul_us(*twice)}
    model, between = replace(BASE, launch_us=0.0).with_measured(known), (1024, 1024, 2048)
    plain = replace(BASE, launch_us=0.0)
    ratios = [known[s] / plain.matmul_us(*s) for s in known]
    found = model.matmul_us(*between, "bf16") / plain.matmul_us(*between, "bf16")
    assert found == pytest.approx(math.sqrt(math.prod(ratios)))


def test_points_as_far_away_as_each_other_all_count() -> None:
    """In the middle of a cell all corners have the same distance, so all have the same weight."""
    plain = replace(BASE, launch_us=0.0)
    corners = [(m, n, k, "bf16") for m in (1024, 2048) for n in (1024, 2048) for k in (1024, 2048)]
    factors = [1.0, 1.0, 1.0, 1.0, 1.3, 1.3, 1.3, 1.3]
    far = [(16 * m, 16 * n, k, dtype) for m, n, k, dtype in corners]
    times = {s: f * plain.matmul_us(*s) for s, f in zip(corners, factors, strict=True)}
    model = plain.with_measured(times | {s: 2 * plain.matmul_us(*s) for s in far})
    middle = (1448, 1448, 1448, "bf16")
    assert model.matmul_us(*middle) / plain.matmul_us(*middle) == pytest.approx(math.sqrt(1.3), rel=0.01)


def test_the_budget_ends_it_after_the_coarse_grid() -> None:
    short, long = Measured(), Measured()
    few, more = calibrate(short, BASE, budget_s=1), calibrate(long, BASE, budget_s=300)
    coarse = set(gemm_points(BASE, ("bf16",), 0))
    assert coarse <= {gemm[:4] for gemm in few.gemms}
    assert len(coarse) <= len(few.gemms) <= len(coarse) + 1  # one more is measured beside copies
    assert len(few.gemms) < len(more.gemms)
    assert 300 <= long.elapsed_s() <= 302
    # Ranks must make the same measurements.
    assert short.asked[: len(short.asked) - 3] == long.asked[: len(short.asked) - 3]


def test_points_fit_the_machine_and_nest() -> None:
    levels = [set(gemm_points(BASE, ("bf16", "fp16"), level)) for level in range(3)]
    assert levels[0] < levels[1] < levels[2]
    assert (6144, 6144, 6144, "fp16") in levels[2] - levels[1]
    slow = replace(BASE, matmul_flops_per_us={"fp32": 1e5})  # a CPU
    assert 20 < len(gemm_points(slow, ("fp32",), 0)) < len(gemm_points(BASE, ("bf16",), 0))
    assert max(slow.matmul_us(*point) for point in gemm_points(slow, ("fp32",), 1)) <= 20_000


def test_one_rank_measures_no_communication() -> None:
    class Alone(Measured):
        world_size = 1

    alone = Alone()
    found = calibrate(alone, model_of(load_machine("h200"), 1), budget_s=1)
    assert set(alone.asked) == {"launch_us", "host_step_us", "gemm_us"}
    assert found.apply(model_of(load_machine("h200"), 1)).launch_us == 4.0


def test_it_is_kept_and_found_again(found: Calibration) -> None:
    assert find("NVIDIA H200", 2) is None
    h200 = load_machine("h200")
    by_file = (BASE, "not calibrated with 2 ranks, so the machine file's numbers are used", False, "machine file")
    assert calibrated(h200, 2) == by_file
    path = found.save()
    assert path.name == "calibration-nvidia-h200-2.json"
    assert json.loads(path.read_text())["versions"] == machine.versions()
    assert find("NVIDIA H200", 2) == found
    assert calibrated(h200, 2) == (
        found.apply(BASE),
        f"calibrated on {found.date} (0 days ago)",
        False,
        "calibration",
    )
    assert find("NVIDIA H200", 8) is None
    with pytest.raises(ValueError, match="the calibration is for 2 ranks, but the simulator's model has 8: calibrate"):
        found.apply(model_of(h200, 8))


def test_other_versions_are_refused_with_what_to_run(found: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    found.save()
    monkeypatch.setattr(saved, "versions", lambda: {**machine.versions(), "torch": "3.0"})
    torch = machine.versions()["torch"]
    with pytest.raises(ValueError, match=rf"torch {torch.replace('+', '.')}, now 3.0: run `weft plan calibrate` again"):
        find("NVIDIA H200", 2)
    model, note, refused, _ = calibrated(load_machine("h200"), 2)
    assert model == BASE
    assert refused
    assert note.startswith("not calibrated: the calibration of NVIDIA H200 for 2 ranks")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "contains a list"),
        ("{}", "lacks 'machine'"),
        ("[" * 100_000, "nested 100000 deep"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(text: str, message: str, found: Calibration) -> None:
    path = found.save()
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"calibration-nvidia-h200-2\.json.*{message}"):
        find("NVIDIA H200", 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("versions", []), ("versions", {"torch": 1}), ("launch_us", "3"), ("launch_us", -1.0), ("launch_us", 1e300),
        ("gemms", 7), ("gemms", [[1, 2, 3, "bf16"]]), ("gemms", [[1, 2, 3, ["bf16"], 1.0]]), ("gemms", [[0, 2, 3, "bf16", 1.0]]),
        ("copies", [[1, 0.0]]), ("copies", [[2**60, 1.0]]), ("beside", [["mail", 1.0, 1.0]]), ("copy_units", 1.5),
    ],
)  # fmt: skip
def test_a_calibration_with_a_wrong_value_is_ignored_with_a_note(field: str, value: object, found: Calibration) -> None:
    path = found.save()
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    model, note, refused, _ = calibrated(load_machine("h200"), 2)
    assert (model, refused) == (BASE, True)
    assert f"{field} has a wrong type or size for a calibration: run `weft plan calibrate` again" in note


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "copies, but lacks all_gathers: run `weft plan"),
        ([[65536, 10.5], [131072, 1e-6]], "do not grow with the number of bytes"),
    ],
)
def test_a_calibration_that_makes_no_model_is_ignored_with_a_note(
    points: Any, message: str, found: Calibration
) -> None:
    path = found.save()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"all_gathers": points}))
    model, note, refused, _ = calibrated(load_machine("h200"), 2)
    assert (model, refused) == (BASE, True)
    assert note.startswith("not calibrated: ")
    assert message in note


def test_fitted_lines_have_no_negative_latency_and_must_rise() -> None:
    assert fit_line([(10, 12.0), (1000, 210.0)], "copies") == (pytest.approx(10.0), pytest.approx(5.0))
    latency, rate = fit_line([(10, 1.0), (1000, 110.0)], "copies")
    assert (latency, rate) == (0.0, pytest.approx(9.1, rel=0.01))
    with pytest.raises(ValueError, match="times of copies do not grow"):
        fit_line([(1, 10.0), (1000, 5.0)], "copies")


def test_this_machine_is_named_by_its_driver_or_its_cpu(tmp_path: Path) -> None:
    assert machine.machine_name(tmp_path).endswith(("core", "cores"))
    assert machine.machine_here(tmp_path) is None
    card = tmp_path / "gpus" / "0000:19:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 42\n")
    assert machine.machine_name(tmp_path) == "NVIDIA H200"
    assert machine.machine_here(tmp_path) == load_machine("h200")


def test_without_the_drivers_files_its_library_names_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path)
    monkeypatch.setattr(machine, "first_name", lambda: "NVIDIA H200")
    assert machine.machine_name(tmp_path) == "NVIDIA H200"
    assert machine.machine_here(tmp_path) == load_machine("h200")
    monkeypatch.setattr(machine, "first_name", lambda: "")
    assert machine.machine_here(tmp_path) is None
