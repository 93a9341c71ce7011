"""GEMM + reduce-scatter on modelled machines: the costs of stores in peers' memory and of tracked tiles, against times
measured on two H200s.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.sim_toys import gpu

from weft import plan
from weft.builders import MatmulReduceScatter, named
from weft.schedule import Compute, Copy, Draft, Region
from weft.sim import simulate
from weft.sim.costs import cost
from weft.sim.lower import lower
from weft.sim.lowered import Work
from weft.sim.tile_costs import Rates, cost_of_tiles
from weft.sim.uses import Cost, Links, Operand

# Milliseconds of queued bf16 calls by (M, N, K) on each of 2 ranks: of the fastest schedule, and of some others.
FASTEST = {
    (512, 8192, 4096): ("direct[chunks=1,by=dma,add=reduce]", 0.0656),
    (2048, 8192, 4096): ("direct[chunks=1,by=dma,add=reduce]", 0.1970),
    (4096, 8192, 4096): ("direct[chunks=2,by=dma,add=gemm]", 0.3828),
    (16384, 7168, 4096): ("direct[chunks=2,by=dma,add=gemm]", 1.2975),
}
OTHERS = {
    "direct[chunks=1,by=store,add=reduce]": (0.0775, 0.2321, 0.4250, 1.3512),
    "tracked[chunks=1,to=dma]": (0.0839, 0.2081, 0.4057, 1.4223),
    "tracked[chunks=1,to=store]": (0.0740, 0.2459, 0.4717, 1.5479),
    "scatter": (0.0738, 0.2503, 0.4826, 1.6660),
    "serial": (0.0810, 0.2720, 0.5137, 1.7504),
}


@pytest.mark.parametrize("sizes", FASTEST, ids=str)
def test_the_planner_takes_what_was_the_fastest(sizes: tuple[int, int, int]) -> None:
    name, ms = FASTEST[sizes]
    choice = plan.choose(MatmulReduceScatter(2, *sizes, "bf16"), gpu("h200", 2))
    assert choice.candidate.name == name
    assert choice.predicted_us == pytest.approx(1e3 * ms, rel=0.05)


@pytest.mark.parametrize("name", OTHERS)
def test_schedules_take_what_was_measured(name: str) -> None:
    """Two numbers were fitted to these times: `link.stored_late`, and the wait of tiles that store in peers' memory."""
    for sizes, ms in zip(FASTEST, OTHERS[name], strict=True):
        schedule = named(MatmulReduceScatter(2, *sizes, "bf16"), name).build()
        assert simulate(schedule, gpu("h200", 2), runs=2).per_run_us == pytest.approx(1e3 * ms, rel=0.21), sizes


def test_the_end_of_a_gemm_that_stores_in_a_peers_memory_is_not_hidden() -> None:
    model = replace(gpu("h200", 2), stored_late_bytes=1e6, stored_end_us=2.0)
    step = Compute("matmul", Region("y", 0, 0, 0, 0), (Region("a", 0, 0, 0, 0), Region("b", 0, 0, 0, 0)))

    def work_us(rows: int, at: int) -> float:
        a, b, out = (
            Operand(rows, 8192, "bf16", 0, True),
            Operand(8192, 1024, "bf16", 0, True),
            Operand(rows, 1024, "bf16", at, True),
        )
        return cost(model, 2, step, (a, b, out)).work_us

    rate = model.put_bytes_per_us[-1][1]
    assert work_us(4096, 1) == pytest.approx(work_us(4096, 0) + 1e6 / rate + 2)
    assert work_us(128, 1) == pytest.approx(work_us(128, 0) + 128 * 1024 * 2 / rate + 2)


@pytest.mark.parametrize("at", [0, 1])
def test_the_librarys_gemm_copies_what_it_adds_to_before(at: int) -> None:
    """cuBLAS's GEMM first copies the addend from its rank. The span gives the bytes that cross between ranks."""
    model = gpu("h200", 2)
    a, b, out = (
        Operand(4096, 8192, "bf16", 0, True),
        Operand(8192, 1024, "bf16", 0, True),
        Operand(4096, 1024, "bf16", 0, True),
    )
    c, (x, w, y, z) = out._replace(at=at), (Region(name, 0, 0, 0, 0) for name in "xwyz")
    found = cost(model, 2, Compute("addmm", y, (x, w, z)), (a, b, c, out))
    accumulated = cost(model, 2, Compute("matmul", y, (x, w), accumulate=True), (a, b, out))
    copied = cost(model, 2, Copy(z, y, "dma" if at else "kernel"), (c, out))
    assert found.work_us == pytest.approx(accumulated.work_us + copied.work_us)
    assert found.sent_bytes == at * out.bytes
    assert {use.place for use in found.uses} >= {use.place for use in copied.uses}


def test_tiles_that_read_what_they_add_to_at_a_peers_wait_for_it() -> None:
    """The kernel cannot end before the link has delivered the addend."""
    model = gpu("h200", 2)
    a, b = Operand(128, 4096, "bf16", 0, True), Operand(4096, 256, "bf16", 0, False)
    out = Operand(128, 256, "bf16", 0, False)
    x, w, y, z = (Region(name, 0, 0, 0, 0) for name in "xwyz")

    def done(k: int, *at: int) -> Cost:
        factors = (a._replace(cols=k), b._replace(rows=k))
        step = Compute("addmm" if at else "matmul", y, (x, w, *[z] * len(at)))
        operands = (*factors, *(out._replace(at=one) for one in at), out)
        return cost_of_tiles(model, 2, [(step, operands, 1320)], 0, Rates(whole=True))

    alone, here, there = done(4096), done(4096, 0), done(4096, 1)
    assert alone.work_us == here.work_us < there.work_us
    assert (alone.sent_bytes, there.sent_bytes) == (0, 1320 * out.bytes)
    assert done(16, 1).work_us >= 1320 * out.bytes / Links(model.wiring.of(2), 0).bytes_per_us(1, 0)


def test_a_tile_is_one_units_work() -> None:
    """A unit computes a tile at its share of the rate, or loads operands at its share of the cache's rate. Then it
    stores the tile.
    """
    model = replace(gpu("h200", 2), tile_ramp=0.0, tile_half=0.0)
    assert model.unit_loads_bytes_per_us is not None
    per_unit, of_unit, loads = (
        rate / model.compute_units
        for rate in (model.matmul_flops_per_us["bf16"], model.hbm_bytes_per_us, model.unit_loads_bytes_per_us)
    )
    computing_us, stored_us = 2 * 128 * 256 * 4096 / per_unit, 128 * 256 * 2 / of_unit
    # A machine whose cache is not a bottleneck.
    quick = replace(model, unit_loads_bytes_per_us=2 * model.unit_loads_bytes_per_us)
    assert quick.tile_us(128, 256, 4096, "bf16") == pytest.approx(computing_us + stored_us)
    loading_us = (16 + 256) * 4096 * 2 / loads
    assert model.tile_us(16, 256, 4096, "bf16") == pytest.approx(loading_us + stored_us / 8)
    unknown = replace(model, unit_loads_bytes_per_us=None)  # then twice the memory's rate
    assert unknown.tile_us(16, 256, 4096, "bf16") == pytest.approx((16 + 256) * 4096 / of_unit + stored_us / 8)


def test_tiles_that_run_together_are_there_together() -> None:
    """With two chunks of 64 tiles on 132 units, no chunk can be sent before the end of the kernel. With half of the
    units, the first chunk can.
    """
    p = MatmulReduceScatter(2, 512, 8192, 4096, "bf16")
    schedule = named(p, "tracked[chunks=1,to=dma]").build()
    for units, shares in ((132, (1.0, 1.0)), (64, (0.5, 1.0))):
        tasks = [
            task for lane in lower(schedule, replace(gpu("h200", 2), compute_units=units)).lanes for task in lane.tasks
        ]
        (kernel,) = (task for task in tasks if isinstance(task, Work) and task.raises)
        assert sorted(raising.last for raising in kernel.raises) == list(shares)


@pytest.mark.parametrize(("behind", "longer_us"), [(False, 10.0), (True, 3.0)])
def test_in_a_graph_a_collective_takes_longer_by_where_it_stands(behind: bool, longer_us: float) -> None:
    """The collective is the first step of a lane, or follows a kernel."""
    model = replace(gpu("h200", 2), graph_collective_us=10.0, graph_run_us=3.0)
    d = Draft("scattered", 2)
    x, w, whole = (d.buffer(name, 256, 256, "bf16", "scratch") for name in ("x", "w", "whole"))
    lane = d.lane("compute")
    if behind:
        lane.matmul(whole.part(), x.part(), w.part())
    lane.reduce_scatter(whole.part(), d.buffer("part", 128, 256, "bf16", "scratch").part())
    schedule = d.schedule()
    graph, queued = (simulate(schedule, model, mode=mode).end_us for mode in ("graph", "queued"))
    assert graph - queued == pytest.approx(longer_us)
