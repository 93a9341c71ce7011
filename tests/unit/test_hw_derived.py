"""Machines without a file: numbers derived from a datasheet or from the driver, and the errors of predictions with
them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from weft.builders import AllGatherMatmul, named
from weft.hw import Machine, here, known_machines, load_machine, machine_of, nvml
from weft.hw.derived import GIVEN, derived
from weft.hw.here import _OF_BASE, _from_driver
from weft.plan import explain
from weft.plan.predict import least_us, predict
from weft.sim import model_of
from weft.sim.memory import too_large

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "h100-all_gather_matmul.jsonl"
DATASHEET = (*GIVEN, "compute.fp32_vector", "memory.capacity", "memory.l2")


def values(machine: Machine) -> dict[str, float]:
    return {key: machine[key].si for key in machine}


WITHOUT_FP8 = ("a100", "v100")


def test_the_base_by_its_own_numbers_is_the_base() -> None:
    h200 = load_machine("h200")
    given = {key: h200[key] for key in DATASHEET}
    assert {key: q.si for key, q in derived("x", given, "h200", h200.quantities).items()} == values(h200)
    assert values(_from_driver("NVIDIA H200 in disguise", _OF_BASE)) == values(h200)


@pytest.mark.parametrize("name", [name for name in known_machines() if name != "mi300x"])
def test_rates_follow_what_is_given_and_times_stay(name: str) -> None:
    machine, h200 = load_machine(name), load_machine("h200")
    lacking = {key for key in h200.quantities if "fp8" in key and name in WITHOUT_FP8}
    assert machine.quantities.keys() >= h200.quantities.keys() - lacking
    for key, quantity in machine.quantities.items():
        if quantity.source == "derived" and quantity.unit in ("us", "ns", "s", "1"):
            assert quantity == dataclasses.replace(h200[key], source="derived", note=quantity.note), key
    link = machine["link.bandwidth"].si / h200["link.bandwidth"].si
    if machine["link.stores_8_programs"].source == "derived":
        assert machine["link.stores_8_programs"].si == pytest.approx(h200["link.stores_8_programs"].si * link, rel=1e-3)


@pytest.mark.parametrize("missing", GIVEN)
def test_a_file_that_lacks_what_others_follow_is_refused(missing: str) -> None:
    h200 = load_machine("h200")
    given = {key: h200[key] for key in DATASHEET if key != missing}
    with pytest.raises(
        ValueError, match=f"my card: add {missing}: the other numbers are derived from these numbers and from h200's"
    ):
        derived("my card", given, "h200", h200.quantities)


@pytest.mark.parametrize("base", ["h900", "mine.toml", 3])
def test_a_base_that_is_not_known_is_refused(base: object, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'name = "Mine"\ntopology = "switch"\nderived_from = {json.dumps(base)}\n')
    with pytest.raises(ValueError, match=r"derived_from = .* must be one of a100, b200, h100, h200"):
        load_machine(file)


def test_a_gpu_that_nobody_knows_has_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = nvml.DriverFacts("NVIDIA RTX 5090", 170, 170 * 2.4e9 * 1024, 32 << 30, 1.79e12, 16 * 3.94e9, 0)
    monkeypatch.setattr(here, "facts_of", lambda name: facts)
    machine_of.cache_clear()
    try:
        machine = machine_of("NVIDIA RTX 5090")
    finally:
        machine_of.cache_clear()
    assert machine is not None
    assert "no machine file has 'NVIDIA RTX 5090'" in machine.about
    assert machine.count("compute.multiprocessors") == 170
    assert machine["compute.bf16_dense"].si == pytest.approx(989e12 * 170 * 2.4 * 1024 / (132 * 1.98 * 4096), rel=1e-3)
    assert machine["link.port_usable"].si < 64e9
    model = model_of(machine, 2)
    p = AllGatherMatmul.even(4096, 4096, 4096, 2)
    assert predict(named(p, "serial").build(), model, "queued", least_us(p, model)) > 0


@pytest.mark.parametrize(
    "facts",
    [
        None,
        dataclasses.replace(_OF_BASE, memory_bytes_per_s=0.0, link_bytes_per_s=0.0),
        dataclasses.replace(_OF_BASE, multiprocessors=0, flops_per_s=1e30),
    ],
    ids=["no driver", "zeros", "absurd"],
)
def test_what_the_driver_does_not_say_is_the_bases_and_said(facts: nvml.DriverFacts | None) -> None:
    machine, wanted = _from_driver("NVIDIA Unknown", facts), values(load_machine("h200"))
    if facts is None:
        del wanted["memory.capacity"]
    assert values(machine) == wanted
    assert "the driver has no usable" in machine.about
    assert ("no usable memory.capacity, so no schedule is refused for its memory" in machine.about) == (facts is None)


def test_a_capacity_does_not_follow_from_other_numbers(tmp_path: Path) -> None:
    """A card with half the units of an H200 may have any memory. Without its capacity, no schedule is too large for it."""
    h200, file = load_machine("h200"), tmp_path / "half.toml"
    given = {key: h200[key] for key in GIVEN}
    given["compute.multiprocessors"] = dataclasses.replace(h200["compute.multiprocessors"], value=66)
    numbers = "".join(
        f'["{key}"]\nvalue = {q.value}\nunit = "{q.unit}"\nsource = "datasheet"\n'.replace('"', "", 2)
        for key, q in given.items()
    )
    file.write_text(f'name = "Half"\ntopology = "switch"\nderived_from = "h200"\n{numbers}')
    machine = load_machine(file)
    assert machine["memory.l2"].value == pytest.approx(h200["memory.l2"].value / 2, rel=1e-3)
    assert "memory.capacity" not in machine.quantities
    assert model_of(machine, 2).memory_bytes == math.inf
    large = named(AllGatherMatmul.even(1 << 18, 1 << 18, 1 << 16, 2), "serial").build()  # 180 GB
    assert too_large(large, model_of(h200, 2))
    assert not too_large(large, model_of(machine, 2))


def test_others_have_none() -> None:
    assert machine_of("AMD Radeon") is None
    assert machine_of("Xeon, 2 cores") is None
    known = machine_of("AMD Instinct MI300X")
    assert known is not None
    assert known.about == ""


def test_nobody_asks_a_driver_that_is_not_there() -> None:
    nvml.facts_of.cache_clear()
    try:
        found = nvml.facts_of("NVIDIA Nothing")
    finally:
        nvml.facts_of.cache_clear()
    assert found is None


@pytest.mark.parametrize(
    ("mode", "short", "most"), [("queued", False, 0.05), ("queued", True, 0.13), ("single", False, 0.15)]
)
def test_datasheet_numbers_predict_recorded_calls(mode: str, short: bool, most: float) -> None:
    """Predict eight shapes in four schedules on two H100s from the datasheet alone. short: True for calls below 100 us."""
    h200, h100 = load_machine("h200"), load_machine("h100")
    blind = Machine("blind", derived("x", {key: h100[key] for key in DATASHEET}, "h200", h200.quantities), "switch")
    rows = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    rows = [r for r in rows if r["mode"] == mode and r["variant"] != "asynctp"]
    rows = [r for r in rows if mode == "single" or (r["p50_ms"] < 0.1) == short]
    assert len(rows) >= 8
    model, errors = model_of(blind, 2), []
    for r in rows:
        p = AllGatherMatmul.even(r["m"], r["n"], r["k"], 2)
        us = predict(named(p, r["variant"]).build(), model, r["mode"], least_us(p, model))
        errors.append(abs(us / (1e3 * r["p50_ms"]) - 1))
    assert sum(errors) / len(errors) < most


@pytest.mark.parametrize("name", WITHOUT_FP8)
def test_a_machine_without_fp8_has_no_rate_for_it(name: str) -> None:
    assert not [key for key in load_machine(name).quantities if "fp8" in key]
    with pytest.raises(ValueError, match="has matmul rates only for"):
        explain("all_gather_matmul", M=1024, N=512, K=256, ranks=2, hw=name, dtype="fp8")
    assert "compute.fp8_matmul_8192" in load_machine("h100").quantities


def test_a_list_of_missing_dtypes_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('name = "own"\nderived_from = "h200"\nlacks = "fp8"\n')
    with pytest.raises(ValueError, match="lacks = 'fp8' must be a list of dtypes"):
        load_machine(path)
