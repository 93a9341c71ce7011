"""Costs: the GEMM formula by hand, its correction by measured points, traffic, copies, and models from machine files."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.sim_toys import TOY, gpu
from support.slow import mostly

from weft import plan
from weft.builders import AllToAllMatmul
from weft.errors import ScheduleError
from weft.hw import Machine, known_machines, load_machine
from weft.schedule import Copy, Draft, Schedule
from weft.sim import NULL, model_of, simulate
from weft.sim.costs import cost
from weft.sim.losses import gemms_us
from weft.sim.uses import Operand

# One tile size (32 is the smallest), and four units with one operation per microsecond each. Splitting k is too
# expensive to be used.
TILES = replace(
    TOY, tile=(32, 32), compute_units=4, matmul_flops_per_us={"fp16": 4.0}, hbm_bytes_per_us=math.inf, launch_us=1e9
)


@pytest.mark.parametrize(("tiles", "waves"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tiles_go_over_the_units_in_waves(tiles: int, waves: int) -> None:
    found = TILES.matmul(32 * tiles, 32, 10, "fp16")
    assert found.time_us == pytest.approx(waves * 2 * 32 * 32 * 10)
    assert found.units_busy == pytest.approx(tiles / (4 * waves))


def test_a_tile_that_is_partly_outside_costs_a_whole_one() -> None:
    assert TILES.matmul(33, 20, 10, "fp16").time_us == TILES.matmul(64, 32, 10, "fp16").time_us


def test_a_short_k_pays_for_the_ends_of_its_tiles() -> None:
    ramp = replace(TILES, tile_ramp=30.0)
    assert ramp.matmul(32, 32, 10, "fp16").time_us == pytest.approx(4 * TILES.matmul(32, 32, 10, "fp16").time_us)


def test_an_fp8_matmul_has_its_own_time_for_the_ends_of_tiles() -> None:
    model = replace(TILES, matmul_flops_per_us={"bf16": 4.0, "fp8": 8.0}, tile_ramp=10.0)
    own = replace(model, fp8_tile_ramp=50.0)
    for dtype, us in (("bf16", 2 * 32 * 32 * 20 / 1), ("fp8", 2 * 32 * 32 * 60 / 2)):
        assert own.matmul(32, 32, 10, dtype).time_us == pytest.approx(us)
    assert model.matmul(32, 32, 10, "fp8").time_us == pytest.approx(2 * 32 * 32 * 20 / 2)


def test_smaller_tiles_are_less_efficient_but_fill_more_units() -> None:
    model = replace(TILES, tile=(64, 64), tile_half=32.0)  # 64 x 64 is 1.5 times as efficient as 32 x 32
    assert model.matmul(64, 64, 10, "fp16").time_us == pytest.approx(1.5 * 2 * 32 * 32 * 10)  # four small ones at once
    assert model.matmul(128, 128, 10, "fp16").time_us == pytest.approx(2 * 64 * 64 * 10)  # four large ones at once


def test_tiles_of_three_quarters_fill_a_wave_that_halves_overfill() -> None:
    """There are 96 tiles of 128 x 192. With tiles of 128 x 256 there are 72, and with tiles of 128 x 128 two waves."""
    model = replace(gpu("h200", 2), tile_step=0)
    found = model.matmul(768, 3072, 4096, "bf16")
    assert found.units_busy * found.time_us == pytest.approx(96 / 132 * (found.time_us - model.matmul_start_us))


def test_tiles_of_more_widths_fill_a_wave_that_other_tiles_overfill() -> None:
    """Four tiles of 64 x 80 are a wave of four units. Without this width, four tiles of 64 x 96 are the fastest."""
    model = replace(TILES, tile=(64, 128), tile_half=32.0)
    times = [replace(model, tile_step=step).matmul(64, 320, 10, "fp16").time_us for step in (16, 0)]
    slower = [(1 + 32 * (1 / 64 + 1 / width)) / (1 + 32 * (1 / 64 + 1 / 128)) for width in (80, 96)]
    assert times == pytest.approx([2 * 64 * 80 * 10 * slower[0], 2 * 64 * 96 * 10 * slower[1]])


def test_small_tiles_of_cublas_have_their_own_efficiency() -> None:
    """The segments of a grouped GEMM, which weft's kernels multiply, keep the number for other tiles."""
    model = gpu("h200", 2)
    other = replace(model, library_tile_half=2 * (model.library_tile_half or 0.0))
    assert other.matmul(64, 2048, 4096, "bf16").time_us > model.matmul(64, 2048, 4096, "bf16").time_us
    assert other.segment(64, 2048, 4096, "bf16") == model.segment(64, 2048, 4096, "bf16")


def test_a_matmul_that_reads_weights_mostly_reaches_less_than_copies_do() -> None:
    model = gpu("h200", 2)
    found = model.matmul(64, 28672, 8192, "bf16")
    read_us = found.hbm_bytes / (model.matmul_memory * model.hbm_bytes_per_us)
    assert found.time_us == pytest.approx(model.matmul_start_us + read_us)


def test_a_long_k_is_split_where_there_are_too_few_tiles() -> None:
    model = replace(TILES, launch_us=5.0)
    assert model.matmul(32, 32, 4000, "fp16").time_us == pytest.approx(5 + 2 * 32 * 32 * 1000)


def test_a_matmul_that_memory_cannot_feed_takes_as_long_as_its_bytes() -> None:
    model = replace(TILES, hbm_bytes_per_us=0.001)
    found = model.matmul(32, 32, 32, "fp16")
    assert found.hbm_bytes == 2 * 3 * 32 * 32
    assert found.time_us == pytest.approx(found.hbm_bytes / 0.001)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_a_few_more_rows_do_not_double_a_matmul_that_reads_its_weights(dtype: str) -> None:
    """The last block of columns may be narrow, and then reads few weights."""
    model = gpu("h100", 2)
    times = [model.matmul_us(m, 34304, 14464, dtype) for m in range(64, 257)]
    assert all(after <= 1.02 * before for before, after in pairwise(times))


def test_operands_are_read_again_for_each_block_that_the_cache_does_not_hold() -> None:
    """Four concurrent tiles cover 64 x 64 of the output. An output of 128 x 128 has four such blocks, each of which
    reads (64 + 64) x k elements.
    """
    small = replace(TILES, l2_bytes=0.0)
    assert small.matmul(128, 128, 10, "fp16").hbm_bytes == pytest.approx(2 * (4 * 128 * 10 + 128 * 128))
    assert TILES.matmul(128, 128, 10, "fp16").hbm_bytes == pytest.approx(2 * (256 * 10 + 128 * 128))


def test_measured_points_are_met_and_correct_their_neighbours() -> None:
    model = gpu("h200", 2)
    slow, fast = (4096, 4096, 4096, "bf16"), (512, 512, 512, "bf16")
    plain = {shape: model.matmul_us(*shape) for shape in (slow, fast)}
    corrected = model.with_measured({slow: 1.3 * plain[slow], fast: 0.8 * plain[fast]})
    assert corrected.matmul_us(*slow) == pytest.approx(1.3 * plain[slow])
    assert corrected.matmul_us(*fast) == pytest.approx(0.8 * plain[fast])
    without_launch = [(corrected.matmul_us(*s) - model.launch_us) / (plain[s] - model.launch_us) for s in (slow, fast)]
    between, other = (1448, 1448, 1448), (4096, 4096, 4096, "fp16")
    ratio = corrected.matmul(*between, "bf16").time_us / model.matmul(*between, "bf16").time_us
    assert ratio == pytest.approx(math.sqrt(math.prod(without_launch)), rel=0.01)  # equally far from both
    assert corrected.matmul_us(*other) == model.matmul_us(*other)


def test_a_dtype_without_a_rate_is_named() -> None:
    with pytest.raises(KeyError, match=r"add compute\.int8_matmul_8192"):
        gpu("h200", 2).matmul(64, 64, 64, "int8")


# -- machine files


@given(
    st.tuples(st.integers(1, 8192), st.integers(1, 8192), st.integers(1, 16384)),
    st.floats(1.0, 1.1),
    st.sampled_from(["memory", "matmuls"]),
)
@example((576, 7680, 8192), 1.03, "memory")  # a split becomes the fastest way that keeps a tenth more units busy
def test_a_faster_machine_needs_no_more_of_its_units_for_a_matmul(
    shape: tuple[int, int, int], factor: float, what: str
) -> None:
    """It must not need more time alone either. A GEMM that gains a little time but takes many more units would slow
    down schedules.
    """
    usual = gpu("h200", 2)
    memory, matmuls = usual.hbm_bytes_per_us * factor, usual.matmul_flops_per_us["bf16"] * factor
    better = (
        replace(usual, hbm_bytes_per_us=memory)
        if what == "memory"
        else replace(usual, matmul_flops_per_us={"bf16": matmuls})
    )
    before, after = (model.matmul(*shape, "bf16") for model in (usual, better))
    assert after.time_us <= before.time_us * (1 + 1e-9)
    assert after.time_us * after.units_busy <= before.time_us * before.units_busy * (1 + 1e-9)


def test_the_large_matmul_is_as_fast_as_the_machine_file_says() -> None:
    machine, model = load_machine("h200"), gpu("h200", 2)
    for dtype in model.matmul_flops_per_us:
        rate = 2 * 8192**3 / model.matmul_us(8192, 8192, 8192, dtype) * 1e6
        assert rate == pytest.approx(machine[f"compute.{dtype}_matmul_8192"].si, rel=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8", "fp32"])
def test_the_best_size_is_as_fast_as_the_machine_file_says_and_no_other_is_faster(dtype: str) -> None:
    """On MI300X, 4096 x 4864 x 32896 has one tile for each unit. 8192^3 has 1024 tiles, and its last wave fills only a
    third of the units. With tiles of half the size, the last wave wastes less, but each wave is less efficient.
    """
    machine, model = load_machine("mi300x"), gpu("mi300x", 8)
    best = machine[f"compute.{dtype}_matmul_best"].si * 1e-6
    of = {
        (m, n, k): 2 * m * n * k / model.matmul_us(m, n, k, dtype)
        for m, n, k in ((4096, 4864, 32896), (8192, 8192, 8192), (4096, 4096, 4096), (16384, 16384, 131072))
    }
    assert of[4096, 4864, 32896] == pytest.approx(best, rel=0.01)
    assert all(rate <= best for rate in of.values())
    assert best * 1024 / (4 * 304) < of[8192, 8192, 8192] < 0.95 * best


@pytest.mark.parametrize("megabytes", [1, 16, 256, 1000])
def test_the_copy_engine_of_the_h200_follows_its_measured_curve(megabytes: int) -> None:
    key = f"link.copy_engine_{megabytes}MB" if megabytes < 1000 else "link.copy_engine_1GB"
    model, count = gpu("h200", 2), megabytes * 1e6
    predicted = model.copy_latency_us + count / min(model.copy_bytes_per_us, *model.wiring.numbers[:1])
    assert predicted == pytest.approx(count / load_machine("h200")[key].si * 1e6, rel=0.03)


def test_a_gemm_begins_late() -> None:
    late = replace(TOY, matmul_start_us=3.0)
    assert late.matmul(64, 64, 64, "bf16").time_us == pytest.approx(TOY.matmul(64, 64, 64, "bf16").time_us + 3)
    experts, model = AllToAllMatmul.even(512, 1024, 1024, 4, 2), model_of(load_machine("h100"), 2)
    early = replace(model, matmul_start_us=0.0)
    assert gemms_us(experts, model) == pytest.approx(gemms_us(experts, early) + model.matmul_start_us)


def test_a_collective_goes_the_way_that_is_the_quicker_one_for_its_size() -> None:
    model = replace(
        TOY,
        collective_bytes_per_us=100.0,
        small_collective_bytes_per_us=20.0,
        large_collective_us=40.0,
        collective_latency_us=5.0,
    )
    assert model.transfer_us("all_gather", 200) == pytest.approx(200 / 20)
    assert model.transfer_us("all_gather", 1000) == pytest.approx(1000 / 20) == pytest.approx(40 + 1000 / 100)
    assert model.transfer_us("all_to_all", 5000) == pytest.approx(40 + 5000 / 100)
    assert model.transfer_us("copy", 5000) == pytest.approx(5000 / TOY.copy_bytes_per_us)
    assert model.transfer_us("reduce_scatter", 5000) == model.transfer_us("all_gather", 5000)
    other = replace(model, own_collectives={"reduce_scatter": (50.0, 10.0), "all_to_all": (100.0, 7.0)})
    assert other.transfer_us("reduce_scatter", 5000) == pytest.approx(10 + 5000 / 50)
    assert other.transfer_us("all_gather", 5000) == model.transfer_us("all_gather", 5000)
    assert other.transfer_us("all_to_all", 5000) == pytest.approx(7 + 5000 / 100)
    measured = replace(other, measured_transfers_us={"all_gather": ((100.0, 9.0), (10_000.0, 300.0))})
    assert (
        measured.transfer_us("reduce_scatter", 10_000)
        == measured.transfer_us("all_gather", 10_000)
        == pytest.approx(295)
    )


def test_engines_copy_from_a_peer_more_slowly_than_to_it() -> None:
    whole, engine = Operand(1024, 1024, "bf16", 0, True), replace(TOY, copy_gets=0.5)
    buffer = Draft("copies", 2).buffer("x", 1024, 1024, "bf16", "input")
    copy = Copy(buffer.part(), buffer.part(), "dma")
    put, get = (cost(engine, 2, copy, ends) for ends in ((whole, whole._replace(at=1)), (whole._replace(at=1), whole)))
    assert get.work_us == pytest.approx(2 * put.work_us)


def test_copying_kernels_follow_the_curve_of_their_units() -> None:
    h200 = load_machine("h200")
    at = {n: model_of(h200, 2, kernel_copy_units=n) for n in (4, 8, 12, 16, 132, 200)}
    assert at[8].kernel_copy_bytes_per_us(put=True) == 221e3
    assert at[8].kernel_copy_bytes_per_us(put=False) == 105e3
    assert at[4].kernel_copy_bytes_per_us(put=True) == pytest.approx(221e3 / 2)
    assert at[12].kernel_copy_bytes_per_us(put=True) == pytest.approx((221e3 + 299e3) / 2)
    assert at[200].kernel_copy_bytes_per_us(put=True) == 354e3


def test_what_a_machine_file_lacks_is_named() -> None:
    h200 = load_machine("h200")
    for key in ("compute.launch", "memory.l2", "copy_engine.latency", "signal.remote", "contention.kernel_copy_units"):
        with pytest.raises(KeyError, match=f"add {key} to its machine file"):
            model_of(_without(h200, key), 2)
    with pytest.raises(
        KeyError, match=r"topology switch: NVIDIA H200 has no link\.port_usable: add it to the file of the machine"
    ):
        model_of(_without(h200, "link.port_usable"), 2)
    with pytest.raises(KeyError, match=r'add topology = "switch" to its machine file.*one of .*mesh, ring, switch'):
        model_of(replace(h200, topology=""), 2)
    with pytest.raises(KeyError, match=r"link\.loads_8_programs"):
        model_of(_without(h200, *(key for key in h200 if key.startswith("link.loads"))), 2)
    with pytest.raises(KeyError, match=r"compute\.bf16_matmul_8192"):
        model_of(_without(h200, *(key for key in h200 if key.endswith("matmul_8192"))), 2)
    with pytest.raises(ValueError, match="world_size=0"):
        model_of(h200, 0)


def test_all_that_a_machine_file_lacks_is_named_at_once_with_the_way_to_derive_it() -> None:
    mi300x = load_machine("mi300x")
    gaps = ("memory.l2", "signal.remote", *(key for key in mi300x if key.startswith(("link.stores", "compute.bf16_m"))))
    every_rate = [key for key in mi300x if "_matmul_" in key]
    with pytest.raises(
        KeyError,
        match=r"AMD Instinct MI300X: add memory\.l2, signal\.remote, link\.stores_8_programs \(or of another number\), "
        r"compute\.bf16_matmul_8192 \(or of another dtype\) to its machine file.*derived_from = .* needs only compute\.multip",
    ):
        model_of(_without(mi300x, *gaps, *every_rate), 2)


def test_what_does_not_fit_in_memory_is_refused() -> None:
    """Two buffers of 40 GB each fill a GPU of 80 GB."""

    def schedule(rows: int) -> Schedule:
        d = Draft("large", 2)
        x, y = (d.buffer(name, rows, 1 << 20, "bf16", role) for name, role in (("x", "input"), ("y", "output")))  # type: ignore[arg-type]
        d.lane("compute").copy(x.part(), y.part(), "kernel")
        return d.schedule()

    h100 = gpu("h100", 2)
    assert simulate(schedule(19_000), h100).end_us > 0
    with pytest.raises(
        ScheduleError, match=r"schedule large: it needs 503\.3 GB on a rank, but NVIDIA H100 .* has 80 GB: use"
    ):
        simulate(schedule(120_000), h100)
    with pytest.raises(ValueError, match=r"schedule serial: it needs .* GB on a rank, but NVIDIA H100 .* has 80 GB"):
        plan.explain("all_gather_matmul", M=1 << 22, N=8192, K=8192, ranks=2, hw="h100")


@pytest.mark.parametrize("name", mostly(known_machines(), "h200", "mi300x"))
def test_every_number_of_a_model_comes_from_its_machine_file(name: str) -> None:
    """Changing a number that the simulator reads must change the model. Changing any other number must not."""
    others = ("memory.bandwidth", "link.bandwidth", "compute.bf16_dense", "link.copy_engine",
              "heuristic.")  # fmt: skip
    machine = load_machine(name)
    if machine.topology == "mesh":  # derived numbers of a switch, which a mesh does not read
        others += ("link.port_",)
    model = model_of(machine, 4)
    read = {key for key in machine if model_of(_changed(machine, key), 4) != model}
    assert read == {key for key in machine if not key.startswith(others)}


def test_the_null_model_costs_nothing() -> None:
    assert NULL.matmul_us(8192, 8192, 8192, "bf16") == 0
    assert NULL.kernel_copy_bytes_per_us(put=True) == math.inf


def _without(machine: Machine, *keys: str) -> Machine:
    return replace(machine, quantities={key: q for key, q in machine.quantities.items() if key not in keys})


def _changed(machine: Machine, key: str) -> Machine:
    q = machine[key]
    return replace(machine, quantities={**machine.quantities, key: replace(q, value=2 * q.value)})


def test_a_number_in_a_unit_of_another_kind_is_refused() -> None:
    machine = load_machine("h200")
    for key, unit, wanted in (
        ("graph.run", "GB/s", "ns or us or ms or s"),
        ("memory.copy_bandwidth", "us", "B/s or GB/s"),
        ("memory.copy_bandwidth", "TFLOP/s", "B/s or GB/s or TB/s"),
        ("compute.bf16_matmul_8192", "GB/s", "FLOP/s or TFLOP/s"),
        ("link.stores_8_programs", "us", "B/s or GB/s"),
        ("memory.l2", "us", "B or KiB"),
        ("compute.sustained", "us", "1"),
        ("copy_engine.count", "GHz", "1"),
    ):
        quantities = {**machine.quantities, key: replace(machine[key], unit=unit)}
        with pytest.raises(ValueError, match=f"{key} is in {unit}: give it in {wanted}"):
            model_of(replace(machine, quantities=quantities), 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compute.multiprocessors", 0.4),
        ("compute.tile_rows", 1e-6),
        ("copy_engine.count", 2.5),
        ("kernel_copy.units", 0.25),
    ],
)
def test_a_part_of_a_thing_is_refused(key: str, value: float) -> None:
    machine = load_machine("h200")
    wrong = replace(machine, quantities={**machine.quantities, key: replace(machine[key], value=value)})
    with pytest.raises(ValueError, match=f"NVIDIA H200: {key} = {value:g} .* must be an integer"):
        model_of(wrong, 2)


@pytest.mark.parametrize("key", ["link.stores_8_programs", "contention.kernel_copy_units"])
def test_copying_kernels_that_write_nothing_are_refused(key: str) -> None:
    machine = load_machine("mi300x")
    wrong = replace(machine, quantities={**machine.quantities, key: replace(machine[key], value=0)})
    with pytest.raises(
        ValueError,
        match=r"AMD Instinct MI300X: the rate at which copy kernels write is 0 bytes/us, not above 0. Set contention",
    ):
        model_of(wrong, 4)
