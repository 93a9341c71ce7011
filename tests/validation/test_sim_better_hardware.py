"""Better hardware is never slower: improve each number of a machine file by any factor, for schedules of all kinds."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sim_toys import applicable, gpu

from weft.builders import AllGatherMatmul, AllToAllMatmul
from weft.hw import Machine, Quantity, load_machine
from weft.plan.predict import MODES, Mode, predict
from weft.schedule import Schedule
from weft.sim import Model, model_of

# Numbers without a unit for which less is better, as for all times. For all other numbers more is better.
_LESS = (".l2_copies", "_slowdown", ".tile_half", "tile_ramp", "compute.sustained")
# Numbers that are neither better nor worse. With more units at the same total rate each unit is slower, and a larger
# tile wastes more at the edges.
_FORM = (
    "compute.multiprocessors",
    "compute.tile_rows",
    "compute.tile_cols",
    "copy_engine.count",
    "heuristic.threshold",
)
# Parts of a measured GEMM time, from which the rate of a unit is derived. The rate stays constant in these tests.
_WITHIN = ("compute.launch", "compute.matmul_start", "compute.tile_half", "compute.tile_ramp", "compute.fp8_tile_ramp")
# With concurrent work, a step that begins earlier may overlap with another step, and slow it down.
_MEETS = 0.02
# A collective waits for the units of a GEMM that began first. On a faster machine another GEMM may begin first: this
# costs up to 22% for M=4000 with schedules `ficco_1d_collective` on an H200 with 1.15 to 1.35 times the units (the most
# in 63,000 random cases).
_COMES_FIRST = 0.25
# With more units, a copy by kernel may run beside a GEMM, and take units from it, instead of waiting for it. This costs
# up to 3.6% in 20,000 random cases.
_BESIDE = 0.05
_SHAPES = ((512, 1024, 1024), (2048, 4096, 2048), (4000, 1792, 4096))


def _keys(name: str) -> list[str]:
    machine = load_machine(name)
    return [key for key in machine if key not in _FORM and not key.endswith(("_units", ".units"))]


@lru_cache(maxsize=1)
def _schedules() -> dict[str, Schedule]:
    found: dict[str, Schedule] = {}
    for m, n, k in _SHAPES:
        found |= {
            f"{m} {name}": s
            for name, s in applicable(AllGatherMatmul.even(m, n, k, 4)).items()
            if "steps=4" not in name
        }
    moe = AllToAllMatmul.even(2048, 1024, 1024, 8, 4)
    return found | {f"experts {name}": s for name, s in applicable(moe).items()}  # type: ignore[arg-type]


def _better(machine: Machine, key: str, factor: float) -> Machine:
    one = machine[key]
    less = one.unit == "us" or any(part in key for part in _LESS)
    value = (
        max(1.0, one.value / factor)
        if key.endswith("_slowdown")
        else one.value / factor
        if less
        else one.value * factor
    )
    return replace(machine, quantities={**machine.quantities, key: Quantity(value, one.unit, one.source, one.note)})


def _model(name: str, key: str, factor: float) -> Model:
    better = model_of(_better(load_machine(name), key, factor), 4)
    if key in _WITHIN:
        better = replace(better, matmul_flops_per_us=gpu(name, 4).matmul_flops_per_us)
    return better


def _margin(which: str) -> float:
    return 1e-6 if which.endswith("serial") else _COMES_FIRST if "_collective" in which else _MEETS


@settings(max_examples=40)
@given(
    st.sampled_from(("h200", "mi300x")),
    st.sampled_from(("units", "memory", "links")),
    st.floats(1.0, 3.0),
    st.sampled_from(sorted(_schedules())),
    st.sampled_from(MODES),
)
def test_more_of_a_gpu_is_never_slower(name: str, of: str, factor: float, which: str, mode: Mode) -> None:
    schedule, model = _schedules()[which], gpu(name, 4)
    usual, better = (predict(schedule, one, mode) for one in (model, model.scaled(**{of: factor})))
    assert better <= usual * (1 + max(_margin(which), _BESIDE if "by=kernel" in which else 0.0))


@pytest.mark.parametrize("name", ["h200", "mi300x", "h100"])
def test_more_of_a_gpu_moves_what_it_should(name: str) -> None:
    """Doubling the units halves a large GEMM, doubling the memory bandwidth a thin GEMM, and doubling the links a large
    copy. The other times do not change.
    """
    model = gpu(name, 4)
    more = {of: model.scaled(**{of: 2.0}) for of in ("units", "memory", "links")}
    large, thin, copied = (16384, 16384, 8192, "bf16"), (8, 8192, 65536, "bf16"), 1 << 30
    for of, one in more.items():
        sped_up = {
            "units": model.matmul(*large).time_us / one.matmul(*large).time_us,
            "memory": model.matmul(*thin).time_us / one.matmul(*thin).time_us,
            "links": model.transfer_us("copy", copied) / one.transfer_us("copy", copied),
        }
        wanted = {what: 2.0 if what == of else 1.0 for what in sped_up}
        assert sped_up == pytest.approx(wanted, rel=0.08), of
    assert more["links"].wiring.of(4).links[0].bytes_per_us == 2 * model.wiring.of(4).links[0].bytes_per_us
    assert more["units"].tile_us(128, 256, 4096, "bf16") == pytest.approx(model.tile_us(128, 256, 4096, "bf16"))


def test_measured_times_of_a_larger_gpu_follow_its_formula() -> None:
    shape = (4096, 4096, 4096, "bf16")
    model = gpu("h200", 2)
    slower = model.with_measured({shape: 1.25 * model.matmul_us(*shape)})
    for one in (slower, slower.scaled(units=2.0)):
        assert one.matmul_us(*shape) == pytest.approx(1.25 * replace(one, measured_us={}).matmul_us(*shape))
    with pytest.raises(ValueError, match=r"units=0\.0, memory=1\.0, links=1\.0: each factor must be positive"):
        model.scaled(units=0.0)


CASES = st.sampled_from([(name, key) for name in ("h200", "mi300x") for key in _keys(name)])


@settings(max_examples=60)
@given(CASES, st.floats(1.0, 2.0) | st.floats(1.0, 1.02), st.sampled_from(sorted(_schedules())), st.sampled_from(MODES))
def test_better_hardware_is_never_slower(case: tuple[str, str], factor: float, which: str, mode: Mode) -> None:
    name, key = case
    schedule = _schedules()[which]
    usual, better = (predict(schedule, model, mode) for model in (gpu(name, 4), _model(name, key, factor)))
    assert better <= usual * (1 + _margin(which))
