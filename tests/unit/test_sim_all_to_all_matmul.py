"""Dispatch to experts on modelled machines: the times of grouped GEMMs and exchanges, against times measured on an
H200.
"""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from typing import Any

import pytest
from support.sim_toys import TOY, applicable, gpu

from weft.builders import AllToAllMatmul, named
from weft.plan.predict import predict
from weft.schedule import Compute, Draft, Region
from weft.sim import simulate
from weft.sim.costs import cost
from weft.sim.lower import lower
from weft.sim.lowered import Work
from weft.sim.tile_costs import cost_of_tiles
from weft.sim.uses import Operand

# Times of the kernel alone on an H200, in bf16, for rows of a balanced random router on 2 ranks (8 ranks in the last
# two lines): (rows, N, K, experts, sources that the launch multiplies, milliseconds).
MEASURED_ON_H200 = {
    "Mixtral up": (8192, 14336, 4096, 4, 1, 1.379), "Mixtral up, few": (256, 14336, 4096, 4, 1, 0.126),
    "Mixtral down": (8192, 4096, 14336, 4, 1, 1.224), "Mixtral gate and up, own": (8230, 28672, 4096, 4, 1, 2.96),
    "Mixtral gate and up": (16327, 28672, 4096, 4, 2, 6.03), "DeepSeek own": (16441, 4096, 7168, 128, 1, 2.24),
    "DeepSeek": (32893, 4096, 7168, 128, 2, 3.92), "DeepSeek, few": (512, 4096, 7168, 128, 1, 1.64),
    "DeepSeek own of 8": (4197, 4096, 7168, 32, 1, 0.555), "DeepSeek of 8": (33054, 4096, 7168, 32, 8, 3.70),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED_ON_H200)
def test_grouped_matmuls_take_what_was_measured(name: str) -> None:
    """The number `compute.grouped_matmul` was fitted to these times."""
    rows, n, k, experts, sources, ms = MEASURED_ON_H200[name]
    d = Draft("grouped", 1)
    x, w = d.buffer("x", rows, k, "bf16", "input"), d.buffer("w", experts * k, n, "bf16", "input")
    segment = Compute("matmul", d.buffer("y", rows, n, "bf16", "output").part(), (x.part(), w.part(rows=(0, k))))
    shapes = ((rows // (experts * sources), k), (k, n), (rows // (experts * sources), n))
    operands = tuple(Operand(*shape, "bf16", 0, True) for shape in shapes)
    once = 2 * (rows * k + experts * k * n)
    found = cost_of_tiles(gpu("h200", 2), 2, [(segment, operands, experts * sources)], once)
    assert found.latency_us + found.work_us == pytest.approx(1e3 * ms, rel=0.15)


def test_grouped_matmuls_wait_for_their_last_stores_in_a_peers_memory() -> None:
    """The last bytes are late, as with a cuBLAS GEMM. If the GEMM is short, the stores take longest."""
    model = replace(gpu("h200", 2), stored_late_bytes=1e6, stored_end_us=2.0)
    region = Region("y", 0, 0, 0, 0)
    step = Compute("matmul", region, (region, region))

    def work_us(rows: int, k: int, at: int) -> float:
        shapes = ((rows, k, 0), (k, 4096, 0), (rows, 4096, at))
        operands = tuple(Operand(m, n, "bf16", at, True) for m, n, at in shapes)
        return cost_of_tiles(model, 2, [(step, operands, 4)], 0).work_us

    rate = model.put_bytes_per_us[-1][1]
    assert work_us(1024, 8192, 1) == pytest.approx(work_us(1024, 8192, 0) + 1e6 / rate + 2)
    assert work_us(1024, 64, 1) == pytest.approx(4 * 1024 * 4096 * 2 / rate)


def test_a_kernel_reads_weights_from_memory_once_whatever_the_number_of_sources() -> None:
    """Each of 3 ranks has 2 tokens for each of 48 experts, so nearly all time is for reading weights. Tiles of each source
    load them from the cache, which delays reads from memory if there are two sources.
    """
    p = AllToAllMatmul.even(3 * 16 * 2, 4096, 7168, 16, 3)
    model = gpu("h200", 3)
    once_us = 16 * 7168 * 4096 * 2 / model.hbm_bytes_per_us
    grouped = {}
    for name, schedule in applicable(p).items():
        tasks = (task for lane in lower(schedule, model).lanes for task in lane.tasks if isinstance(task, Work))
        grouped[name] = [task.work_us for task in tasks if task.what == "matmul"]
    assert grouped["serial"] == pytest.approx([once_us / model.library_grouped[1]], rel=0.03)
    own_us, of_two_us = grouped["dispatch[by=kernel,rest=together]"]
    assert own_us == pytest.approx(once_us, rel=0.07)
    assert 1.1 * once_us < of_two_us < 1.4 * once_us
    assert grouped["dispatch[by=kernel,rest=each]"] == pytest.approx([once_us] * 3, rel=0.07)
    assert grouped["dispatch_sorted[chunks=1]"] == pytest.approx([once_us], rel=0.07)
    # 4 experts x 3 ranks give 384 tiles of 64 x 128. The third round leaves units idle, but takes as long as the
    # others. Each tile loads its weights from the cache again, which delays reads from memory.
    chunks = grouped["dispatch_by_expert[by=kernel,chunks=4]"]
    assert len(chunks) == 4
    assert all(once_us / 4 < us < 1.9 * once_us / 4 for us in chunks)


def test_segments_without_rows_cost_nothing() -> None:
    p = AllToAllMatmul(1, 4, (256,), 64, 64, "bf16", 256, splits=((0, 256, 0, 0),))
    (lane,) = lower(applicable(p)["serial"], TOY).lanes
    one = 64 * 64 * 2 + 2 * 256 * 64 * 2
    (us,) = (t.work_us for t in lane.tasks if isinstance(t, Work) and t.what == "matmul")
    assert us == pytest.approx(one / TOY.hbm_bytes_per_us)


def test_an_exchange_takes_what_leaves_and_comes_and_not_what_stays() -> None:
    d = Draft("exchange", 4)
    x, box = (d.buffer(name, 40, 25, "fp32", "scratch") for name in ("x", "box"))
    d.lane("compute").exchange(x.part(), box.part(), [10] * 4, [10] * 4)
    even = simulate(d.schedule(), replace(TOY, collective_bytes_per_us=50.0, host_read_us=0.0))
    assert even.program.symmetric
    assert even.end_us == pytest.approx(30 * 100 / 50)
    step = d.schedule().lanes[0].steps[0]
    kept = tuple(Operand(rows, 25, "fp32", at, True) for at, rows in enumerate((28, 4, 4, 4)))
    whole = Operand(40, 25, "fp32", 0, True)
    assert cost(TOY, 4, step, (whole, whole, *kept)).sent_bytes == 12 * 100  # type: ignore[arg-type]
    model = replace(TOY, collective_bytes_per_us=50.0, collective_latency_us=3.0, host_read_us=20.0)
    more = Operand(100, 25, "fp32", 0, True)
    for source, target in ((whole, more), (more, whole)):  # 12 rows are sent and 72 arrive, or vice versa
        found = cost(model, 4, step, (source, target, *kept))  # type: ignore[arg-type]
        assert found.work_us == pytest.approx(72 * 100 / 50)
        assert found.latency_us == 3 + 20, "the host has just read the sizes"
        assert cost(model, 4, replace(step, known=True), (source, target, *kept)).latency_us == 3  # type: ignore[arg-type, type-var]
    assert cost(model, 4, step, (whole, whole)).latency_us == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("by", "us"), [("device", 2.0), ("meanwhile", 2.0), ("host", 22.0), ("known", 0.0)])
def test_numbers_that_the_cpu_knows_are_not_read(by: Any, us: float) -> None:
    model, table = replace(TOY, launch_us=2.0, host_read_us=20.0), Operand(2, 4, "int64", 0, True)
    d = Draft("read", 2)
    counts = d.buffer("counts", 2, 4, "int64", "scratch")
    d.holds(counts, [[1] * 8] * 2)
    (step,) = d.lane("compute").read(counts, by).steps
    assert cost(model, 2, step, (table,)).latency_us == pytest.approx(us)


def _uneven(rows: int, experts: int, world: int) -> AllToAllMatmul:
    draw = random.Random(0)
    to = [[draw.randrange(world * experts) for _ in range(rows)] for _ in range(world)]
    splits = tuple(tuple(of_rank.count(e) for e in range(world * experts)) for of_rank in to)
    return AllToAllMatmul(world, experts, (rows,) * world, 512, 256, "bf16", rows, splits=splits)


@pytest.mark.parametrize(("p", "alike"), [(AllToAllMatmul.even(64, 512, 256, 4, 4), True), (_uneven(64, 4, 4), False)])
def test_rank_0_stands_for_all_where_splits_are_even(p: AllToAllMatmul, alike: bool) -> None:
    for name, schedule in applicable(p).items():
        assert lower(schedule, gpu("h200", 4)).symmetric == alike, name
        if alike:
            every = lower(schedule, gpu("h200", 4), alike=False)
            assert every.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_whose_sizes_only_the_run_knows_share_a_few_units(ranks: int) -> None:
    """Together, all lanes hold 16 of 132 units, so that concurrent GEMMs get the others."""
    p = AllToAllMatmul.even(1024 * ranks, 1024, 1024, 4, ranks)
    schedules = applicable(replace(p, exact=False))
    for name in ("dispatch_by_expert[by=kernel,chunks=2]", "dispatch[by=kernel,rest=each]"):
        program = lower(schedules[name], gpu("h200", ranks))
        copying = {lane.number for lane in program.lanes if schedules[name].lanes[lane.number].resource == "copy"}
        held = {}
        for lane in program.lanes:
            if lane.rank == 0 and lane.number in copying:
                held[lane.number] = {task.holds for task in lane.tasks if isinstance(task, Work) and task.holds}
        assert held
        assert all(len(of_lane) == 1 for of_lane in held.values())
        assert sum(of_lane.pop() for of_lane in held.values()) == pytest.approx(16 / 132, rel=0.1)


def test_an_exchange_in_one_launch_takes_longer_than_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of the launch arrive twice and poll for flags. A schedule with several launches takes no longer."""
    p, module = replace(AllToAllMatmul.even(64, 256, 128, 2, 2), exact=False), importlib.import_module("weft.sim.lower")
    names = "dispatch_by_expert[by=kernel,chunks=1]", "dispatch_by_expert[by=kernel,chunks=2]"

    def us() -> list[float]:
        return [predict(named(p, name).build(), gpu("h100", 2), "graph") for name in names]

    usual = us()
    monkeypatch.setattr(module, "_EXCHANGE_US", module._EXCHANGE_US + 5.0)
    assert [more - less for more, less in zip(us(), usual, strict=True)] == pytest.approx([5.0, 0.0])
