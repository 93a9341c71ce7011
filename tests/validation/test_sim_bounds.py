"""No simulated schedule is faster than the bound, and the bound equals values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.sim_toys import gpu
from support.slow import slow

from weft.builders import AllToAllMatmul, EmbeddingAllToAll, MatmulAllReduce, MatmulReduceScatter, Problem
from weft.hw import load_machine
from weft.hw.topology import load_topology
from weft.plan import comparison
from weft.plan.choose import decide
from weft.plan.predict import AT_LEAST, predict
from weft.sim.bounds import bound
from weft.sim.losses import gemms_us

TORUS = load_topology("torus:4x2", load_machine("mi300x"))


TOPOLOGIES = ["switch:8", "mesh:8", "ring:8", "torus:4x2", "hosts:2x4"]


@pytest.mark.parametrize(
    ("op", "topology"),
    [
        *((op, topology) for op in ("matmul_reduce_scatter", "embedding_all_to_all") for topology in TOPOLOGIES),
        ("matmul_all_reduce", "hosts:2x4"),
    ],
)
def test_no_schedule_is_faster_than_the_bound(op: str, topology: str) -> None:
    options = {"tables": 16} if op.startswith("embedding") else {}
    hw = "h200" if topology.startswith(("switch", "hosts")) else "mi300x"
    found = comparison(op, M=4096, N=256, K=512, ranks=8, hw=hw, dtype="bf16", topology=topology, **options)
    assert len([row for row in found.rows if row.us is not None]) >= 3
    for row in found.rows:
        assert row.us is None or row.us >= found.bound.us > 0, row.name
    two_levels = [row for row in found.rows if row.name.startswith("two_levels") and row.us is not None]
    assert len(two_levels) == (3 if topology == "hosts:2x4" and op.startswith("matmul") else 0)


@pytest.mark.parametrize(("topology", "most"), [("hosts:2x4", 2.0), ("hosts:8x1", 1.05)])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_no_schedule_is_faster_than_nics_allow(op: str, topology: str, most: float) -> None:
    """NICs take most of the time, except that of two hosts' all-gather. With one GPU in each host, the fastest schedule nearly
    reaches the bound.
    """
    n, k = (2048, 8192) if op == "all_gather_matmul" else (8192, 256)
    found = comparison(op, M=16384, N=n, K=k, ranks=8, hw="h200", dtype="bf16", topology=topology)
    times = {row.name: row.us for row in found.rows if row.us is not None}
    assert found.bound.us <= min(times.values()) <= most * found.bound.us


@pytest.mark.parametrize("rows", [None, 1e6])
@pytest.mark.parametrize("shape", [(16384, 64, 64), (65536, 256, 8), (512, 16, 1)])
def test_no_pooling_is_faster_than_its_memory_or_its_units(shape: tuple[int, int, int], rows: float | None) -> None:
    """Pooling takes most of the time here. `direct` writes no pooled vectors of its peers into its own memory."""
    m, n, k = shape
    found = comparison("embedding_all_to_all", M=m, N=n, K=k, ranks=2, hw="h100", dtype="fp32", tables=128, rows=rows)
    for row in found.rows:
        assert row.us is None or row.us >= found.bound.us > 0, row.name
    if rows is None:
        read = 64 * m * k * n * 4  # the rows of a rank's 64 tables
        assert found.bound.compute_us > read / load_machine("h100").per_us("memory.copy_bandwidth")


def test_links_of_a_reduce_scatter_by_hand() -> None:
    problem, model = MatmulReduceScatter(8, 4096, 256, 512, "bf16"), gpu("h200", 8)
    port = model.wiring.of(8).links[0].bytes_per_us
    found = bound(problem, model)
    assert found.links_us == pytest.approx(4096 * 256 * 2 * 7 / 8 / port)
    assert found.compute_us == gemms_us(problem, model, launches=False)


def test_links_of_an_all_to_all_on_a_torus_by_hand() -> None:
    """In a row of four ranks, a link carries the data of one rank for its neighbour, and half of the data of two ranks
    for ranks at distance two. It carries both for each of the two rows, so 4 parts.
    """
    slots = tuple(((64 * rank, 64),) for rank in range(8))
    problem: Problem = EmbeddingAllToAll(8, (512,) * 8, slots)
    model = replace(gpu("mi300x", 8), wiring=TORUS)
    part_us = 512 * 64 * 4 / TORUS.of(8).links[0].bytes_per_us
    assert bound(problem, model).links_us == pytest.approx(4 * part_us)


def test_a_topology_with_a_size_has_no_other() -> None:
    assert TORUS.of(8).dims == (4, 2)
    with pytest.raises(ValueError, match="the topology has 8 ranks, not 6"):
        TORUS.of(6)


@pytest.mark.parametrize(
    "problem",
    [
        AllToAllMatmul.even(2048, 1024, 1024, 2, 12),
        slow(MatmulAllReduce(12, 4096, 1024, 1024, "bf16")),
    ],
)
def test_no_candidate_that_the_planner_leaves_out_is_faster_than_its_choice(problem: Problem) -> None:
    """With more than 8 ranks, bounds include links and the CPU time of reading sizes."""
    model = gpu("h200", 12)
    choice = decide(problem, model, mode="queued")
    left_out = [row.candidate for row in choice.rows if row.why_not.startswith(AT_LEAST)]
    assert left_out
    for candidate in left_out[::3]:
        assert predict(candidate.build(), model, "queued") > choice.predicted_us, candidate.name
