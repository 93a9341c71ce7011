"""Output maps: weft's maps and random maps give schedules that verify, survive JSON, run on GPUs and compute the
collective in random legal orders.

The paper's example has the paper's steps. An impossible map is refused with its chunk and a fix. Inputs are small whole
numbers, whose sums are exact in any order, so results are compared for equality.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import check_order, same
from schedule_interpreter import Tensors, edited, interpret
from support import output_maps
from support.made_up import require_runnable_on_gpus
from support.sim_toys import gpu
from support.slow import mostly, slow

import weft
from weft.builders import MatmulInto, MatmulReduceScatter, NotApplicableError, OutputMap, named, schedule_of
from weft.builders.output_map import map as maps
from weft.schedule import RANK, Draft, Schedule, Wait
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify
from weft.sim import NULL, simulate

ROWS, N, K = 5, 3, 2
SCATTER = MatmulReduceScatter(4, 20, N, K, "fp32")


def check(collective: str, schedule: Schedule, seed: int = 0, runs: int = 3) -> None:
    world = schedule.world_size
    verify(schedule)
    assert from_json(to_json(schedule)) == schedule
    check_order(schedule)
    assert simulate(schedule, NULL).end_us >= 0
    for rank in range(world):
        require_runnable_on_gpus(schedule, rank)
    inputs = inputs_of(schedule, runs, seed)
    assert same(interpret(schedule, inputs, seed), expected(collective, inputs))


def inputs_of(schedule: Schedule, runs: int, seed: int) -> list[list[Tensors]]:
    rng = np.random.default_rng(seed)
    shapes = {b.name: (b.rows, b.cols) for b in schedule.buffers_of_rank(0) if b.role == "input"}
    ranks = range(schedule.world_size)
    return [
        [{name: rng.integers(-4, 5, shape).astype(np.float64) for name, shape in shapes.items()} for _ in ranks]
        for _ in range(runs)
    ]


def expected(collective: str, inputs: list[list[Tensors]]) -> list[list[Tensors]]:
    found = []
    for ranks in inputs:
        products = [t["x"] @ t["w"] for t in ranks]
        world = len(products)
        if collective == "reduce_scatter":
            results = np.split(np.asarray(sum(products)), world)
        elif collective == "all_gather":
            results = [np.concatenate(products)] * world
        else:
            results = [np.concatenate([np.split(one, world)[rank] for one in products]) for rank in range(world)]
        found.append([{"y": one} for one in results])
    return found


@pytest.mark.parametrize("world", mostly([1, 2, 3, 4, 8], 1, 2, 3))
def test_every_map_of_wefts(world: int) -> None:
    found = output_maps.library(world, ROWS)
    assert len(found) == (33 if world == 1 else 40)
    for name, one in found.items():
        check(one.collective, one.schedule(N, K, "fp32"), len(name), runs=2 if world == 8 else 3)


@pytest.mark.parametrize("world", [4, slow(8)])
def test_larger_maps_verify(world: int) -> None:
    for one in output_maps.library(world, 150).values():
        verify(one.schedule(20, 4, "bf16"))


def test_the_papers_example() -> None:
    """Figures 11 and 12: GPU 0 of four stores its first chunk in GPU 3's memory. It sends the next two chunks there
    after two updates, and keeps the last chunk.
    """
    ring = OutputMap(rows=20, chunks=4).remote_map(0, to=3, op="update")
    ring = ring.dma_map(1, to=3, op="update", after=2).dma_map(2, to=3, op="update", after=2).local(3)
    assert maps.ring_reduce_scatter(20, 4, rank=0) == ring
    of_each = [maps.ring_reduce_scatter(20, 4, rank=rank) for rank in range(4)]
    assert schedule_of(of_each, SCATTER) == maps.ring_reduce_scatter(20, 4).schedule(SCATTER)
    assert weft.OutputMap is OutputMap


def test_a_function_that_asks_for_its_rank() -> None:
    """Ranks 0 and 1, and ranks 2 and 3, first add their products. One rank of each pair then sends the sum to the
    owner.
    """

    def in_pairs(rank: int) -> OutputMap:
        made = OutputMap(20, 4, order=(0, 1, 2, 3))
        for owner in range(4):
            other = rank ^ 1
            if rank == owner:
                made = made.local(owner)
            elif other == owner:  # a pair's two products meet in the owner
                made = made.remote_map(owner, to=owner, op="update")
            elif rank % 2 == owner % 2:
                made = made.dma_map(owner, to=owner, op="update", after=2)
            else:
                made = made.remote_map(owner, to=other, op="update")
        return made

    check("reduce_scatter", schedule_of([in_pairs(rank) for rank in range(4)], SCATTER, add="reduce"))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    world=st.integers(1, 5),
    collective=st.sampled_from(["reduce_scatter", "all_gather"]),
    gemm=st.booleans(),
)
def test_random_trees(seed: int, world: int, collective: str, gemm: bool) -> None:
    """Maps also work with add="gemm", unless GEMMs would wait for each other. In this case the error gives the fix."""
    one = output_maps.random_map(random.Random(seed), collective, world, ROWS)
    gemm = gemm and "gemm" not in one.options
    if gemm:
        one.options["add"] = "gemm"
    try:
        schedule = one.schedule(N, K, "fp32")
    except ValueError as error:
        schedule, told = None, str(error)
    if schedule is None:
        assert gemm
        assert "with add='gemm', GEMMs wait for arriving chunks in order: use add='reduce'" in told
        return
    check(collective, schedule, seed, runs=2)


@pytest.mark.parametrize("world", [3, 4, 8])
def test_the_ring_is_a_map_to_the_right(world: int) -> None:
    p = MatmulReduceScatter(world, world * 8, N, K, "fp32")
    found, ring = output_maps.to_the_right(p), named(p, "ring[chunks=2,by=dma]").build()
    assert found.buffers == ring.buffers
    assert [lane.steps for lane in found.lanes] == [lane.steps for lane in ring.lanes]


@pytest.mark.parametrize(
    "name", ["ring, 1, store, gemm", "direct, 2, store, reduce", "ring gather, 1, dma", "all-to-all, 1, store"]
)
def test_who_fills_a_slot_again_too_early_is_noticed(name: str) -> None:
    one = output_maps.library(3, ROWS)[name]
    schedule = one.schedule(N, K, "fp32")
    hasty = edited(schedule, lambda step: None if isinstance(step, Wait) and step.previous else step)
    inputs = inputs_of(schedule, 3, seed=0)
    assert not all(same(interpret(hasty, inputs, seed), expected(one.collective, inputs)) for seed in range(20))


# --- refused maps ---


def scatter(*, world: int = 4, ranks: dict[int, Callable[[OutputMap], OutputMap]] | None = None) -> Schedule:
    """Return the schedule of a ring's maps. ranks: {rank: a function that changes the map of this rank}."""
    changed = ranks or {}
    of_each = [changed.get(r, lambda made: made)(maps.ring_reduce_scatter(20, world, rank=r)) for r in range(world)]
    return schedule_of(of_each, MatmulReduceScatter(world, 20, N, K, "fp32"))


def without(made: OutputMap, chunk: int) -> OutputMap:
    return replace(made, entries=tuple(e for e in made.entries if e.chunk != chunk))


def gathered(change: Callable[[OutputMap], OutputMap]) -> Schedule:
    return change(maps.ring_all_gather(20, 4)).schedule(MatmulInto("all_gather", 4, N, K, "fp32"))


def exchanged(change: Callable[[OutputMap], OutputMap]) -> Schedule:
    return change(maps.all_to_all(20, 4)).schedule(MatmulInto("all_to_all", 4, N, K, "fp32"))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "unwritten": (
        lambda: scatter(ranks={0: lambda m: without(m, 1)}),
        "chunk 1 of rank 0, rows of rank 2: it has no destination: add remote_map(1, to=..., op=...) or dma_map(1, to=...",
    ),
    "unwritten where it belongs": (
        lambda: scatter(ranks={2: lambda m: without(m, 3)}),
        "chunk 3 of rank 2, its own rows: it belongs to this rank, but the map does not keep it here: add local(3)",
    ),
    "written twice": (
        lambda: scatter(ranks={0: lambda m: m.remote_map(1, to=2, op="update")}),
        "chunk 1 of rank 0, rows of rank 2: it is written twice, by dma_map(1, to=3, op='update', after=2) and "
        "remote_map(1, to=2, op='update'): remove one of them",
    ),
    "to itself": (
        lambda: scatter(ranks={1: lambda m: without(m, 0).remote_map(0, to=1, op="update")}),
        "chunk 0 of rank 1, rows of rank 2: to=1 is this rank itself: use local(0)",
    ),
    "outside": (
        lambda: scatter(ranks={1: lambda m: without(m, 0).remote_map(0, to=4, op="update")}),
        "chunk 0 of rank 1, rows of rank 2: to=4 is not a rank of this group: use 0 to 3",
    ),
    "outside, as an expression": (
        lambda: schedule_of(
            [without(maps.ring_reduce_scatter(20, 4), 0).remote_map(0, to=RANK + 1, op="update")] * 4, SCATTER
        ),
        "chunk 0 of rank 3, rows of rank 0: to=4 is not a rank of this group: use 0 to 3",
    ),
    "waits for more than come": (
        lambda: scatter(ranks={0: lambda m: without(m, 2).dma_map(2, to=3, op="update", after=3)}),
        "chunk 2 of rank 0, rows of rank 3: after=3, but the chunk gets 2 updates, from this rank's GEMM and from rank 1. "
        "It would never be sent: use after=2, or change which ranks send it here",
    ),
    "sent too early": (
        lambda: scatter(ranks={0: lambda m: without(m, 2).dma_map(2, to=3, op="update", after=1)}),
        "chunk 2 of rank 0, rows of rank 3: after=1, but the chunk gets 2 updates, from this rank's GEMM and from rank 1. It would "
        "be sent before all updates have arrived: use after=2",
    ),
    # Rank 3 sends a chunk of rank 1's rows directly to rank 1, but the ring of the other ranks passes it through rank
    # 2.
    "ranks disagree": (
        lambda: scatter(ranks={3: lambda m: without(m, 1).dma_map(1, to=1, op="update", after=2)}),
        "chunk 2 of rank 2, rows of rank 1: after=2, but the chunk gets 1 update, from this rank's GEMM. It would never be sent",
    ),
    "updates of what is not here": (
        lambda: scatter(
            ranks={
                1: lambda m: without(m, 2).dma_map(2, to=0, op="update", after=1),
                2: lambda m: without(m, 1).dma_map(1, to=3, op="update", after=2),
            }
        ),
        "chunk 0 of rank 3, rows of rank 0: rank 2 sends updates of this chunk here, but remote_map leaves no chunk",
    ),
    "round and round": (
        lambda: scatter(world=4, ranks={
            0: lambda m: without(m, 0).dma_map(0, to=3, op="update", after=2),
            2: lambda m: without(m, 2).dma_map(2, to=0, op="update", after=2),
        }),
        "chunk 0 of rank 0, rows of rank 1: chunks wait for each other, so none of them is ever sent: this chunk "
        "waits for chunk 2 of rank 2, which waits for chunk 1 of rank 3, which waits for chunk 0 of rank 0. Fix: send "
        "one of these chunks to another rank",
    ),
    "a store among updates": (
        lambda: scatter(ranks={0: lambda m: without(m, 0).remote_map(0, to=3)}),
        "chunk 0 of rank 0, rows of rank 1: op='store' would overwrite the product of rank 3, which must be "
        "summed: use op='update'",
    ),
    "a sum in the wrong place": (
        lambda: scatter(ranks={0: lambda m: without(m, 0).local(0)}),
        "chunk 0 of rank 0, rows of rank 1: local(0) would keep the chunk here, but it belongs to rank 1: use "
        "remote_map(0, to=...) or dma_map(0, to=..., after=...)",
    ),
    "a result sent away": (
        lambda: scatter(ranks={0: lambda m: without(m, 3).dma_map(3, to=3, op="update", after=2)}),
        "chunk 3 of rank 0, its own rows: to=3, but the chunk belongs to this rank: use local(3)",
    ),
    "another number of chunks": (
        lambda: scatter(ranks={1: lambda m: maps.ring_reduce_scatter(20, 4, per_rank=2, rank=1)}),
        "rank 1 maps 20 rows in 8 chunks, but rank 0 maps 20 rows in 4 chunks: use the same numbers on every rank",
    ),
    "chunks of no rank": (
        lambda: OutputMap(20, 6).schedule(SCATTER),
        "chunks=6 must be a multiple of world_size=4, so that all ranks have the same number of chunks: use 4 or "
        "8",
    ),
    "other rows": (
        lambda: maps.ring_reduce_scatter(16, 4).schedule(SCATTER),
        "the map has 16 rows, but the problem's output has 20: use OutputMap(rows=20, ...)",
    ),
    "uneven rows": (
        lambda: maps.all_to_all(21, 4).schedule(MatmulInto("all_to_all", 4, N, K, "fp32")),
        "rows=21 must be divisible by world_size=4: pad to 24",
    ),
    "an order with a chunk twice": (
        lambda: replace(maps.ring_reduce_scatter(20, 4), order=(0, 1, 1, 3)).schedule(SCATTER),
        "chunk 1 of rank 0: order=[0, 1, 1, 3] contains 1, but must contain each of the 4 places from 0 to 3 "
        "exactly once",
    ),
    "an order of fewer": (lambda: OutputMap(20, 4, order=(0, 1)), "order has 2 entries but chunks=4: give each "
                                                                  "chunk exactly one entry"),
    "a map too few": (
        lambda: schedule_of([maps.ring_reduce_scatter(20, 4)] * 3, SCATTER),
        "3 maps were given for world_size=4: give one map for each rank",
    ),
    "no such chunk": (lambda: OutputMap(20, 4).local(4), "chunk 4 does not exist in a map of 4 chunks: use 0 to 3"),
    "no such op": (
        lambda: OutputMap(20, 4).remote_map(1, to=0, op="add"),  # type: ignore[arg-type]
        "chunk 1: op='add' is not known: use 'store' or 'update'",
    ),
    "no rank": (
        lambda: OutputMap(20, 4).remote_map(1, to="left", op="update"),  # type: ignore[arg-type]
        "chunk 1: to='left' is a str: use the number of a rank, or an expression such as (RANK + 1) % 4",
    ),
    "after nothing": (lambda: OutputMap(20, 4).dma_map(1, to=0, after=0), "chunk 1: after=0 must be at least 1"),
    "no chunks": (lambda: OutputMap(20, 0), "rows=20, chunks=0: give at least 0 rows and 1 chunk"),
    "no such collective": (
        lambda: MatmulInto("broadcast", 4, N, K, "fp32"),  # type: ignore[arg-type]
        "collective='broadcast' is not known: use one of reduce_scatter, all_gather, all_to_all",
    ),
    "no ranks": (lambda: MatmulInto("all_gather", 0, N, K, "fp32"), "world_size=0, n=3, k=2: give at least 1 rank, and sizes"),
    "no engine": (
        lambda: maps.ring_reduce_scatter(20, 4).schedule(SCATTER, engines=0),
        "engines=0: pass the number of chunks to send concurrently, an integer of at least 1",
    ),
    "no such way to add": (
        lambda: maps.ring_reduce_scatter(20, 4).schedule(SCATTER, add="atomics"),  # type: ignore[arg-type]
        "add='atomics' is unknown: use one of gemm, reduce",
    ),
    "a tracked GEMM that adds": (
        lambda: maps.ring_reduce_scatter(20, 4).schedule(SCATTER, gemm="tracked", add="gemm"),
        "add='gemm' with gemm='tracked': a tracked GEMM computes all chunks in one kernel, so it cannot add to "
        "arriving chunks. Use add='reduce'",
    ),
    "a tracked GEMM that stores twice": (
        lambda: maps.direct_all_gather(20, 4, by="store").schedule(MatmulInto("all_gather", 4, N, K, "fp32"), gemm="tracked"),
        "chunk 3 of rank 0: remote_map cannot be used here, because a tracked GEMM stores each chunk only once, "
        "in this rank's memory. Use dma_map(3, to=(rank + 1) % 4, after=1)",
    ),
    "a gather's chunk that is not kept": (
        lambda: gathered(lambda m: without(m, 3).dma_map(3, to=(RANK + 3) % 4)),
        "chunk 3 of rank 0, its own rows: it belongs to this rank, but the map does not keep it here: add local(3)",
    ),
    "a gather's chunk that never comes": (
        lambda: gathered(lambda m: without(m, 1)),
        "chunk 2 of rank 0, rows of rank 3: no rank sends it here: send it from one rank, by remote_map or "
        "dma_map with to=0",
    ),
    "a gather's chunk that comes twice": (
        lambda: gathered(lambda m: m.dma_map(3, to=(RANK + 2) % 4)),
        "chunk 1 of rank 0, rows of rank 2: it is written twice, by rank 2 and rank 1: send it from one of them "
        "only",
    ),
    "a gather's chunk back to its rank": (
        lambda: gathered(lambda m: m.dma_map(2, to=(RANK + 3) % 4)),
        "chunk 2 of rank 0, rows of rank 3: to=3 would write the chunk twice, because that rank computes it too: "
        "remove this call",
    ),
    "a gather's chunk stored by who does not compute it": (
        lambda: gathered(lambda m: without(m, 0).remote_map(0, to=(RANK + 3) % 4)),
        "chunk 0 of rank 0, rows of rank 1: remote_map, but no GEMM of this rank computes the chunk: use dma_map(0, to=3, op=",
    ),
    "a gather that updates": (
        lambda: gathered(lambda m: without(m, 0).dma_map(0, to=(RANK + 3) % 4, op="update")),
        "chunk 0 of rank 0, rows of rank 1: op='update' would add to memory of rank 3 that was not written: use "
        "op='store'",
    ),
    "a gather's chunk that is local elsewhere": (
        lambda: gathered(lambda m: without(m, 0).local(0)),
        "chunk 0 of rank 0, rows of rank 1: local(0) is for chunks of this rank, but rank 1 computes this chunk: "
        "use dma_map(0, to=..., after=1), or",
    ),
    "an exchange to another": (
        lambda: exchanged(lambda m: without(m, 0).remote_map(0, to=(RANK + 2) % 4)),
        "chunk 0 of rank 0, rows of rank 1: to=2, but in an all-to-all the chunk belongs to rank 1: use to=1",
    ),
    "an exchange that waits for others": (
        lambda: exchanged(lambda m: without(m, 0).dma_map(0, to=(RANK + 1) % 4, after=2)),
        "chunk 0 of rank 0, rows of rank 1: after=2, but the chunk gets 1 update, from this rank's GEMM. It would never be sent",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        call()


def test_nothing_to_multiply_and_rows_that_cannot_be_cut() -> None:
    with pytest.raises(NotApplicableError, match="nothing to multiply"):
        maps.ring_reduce_scatter(0, 4).schedule(MatmulReduceScatter(4, 0, N, K, "fp32"))
    with pytest.raises(NotApplicableError, match=r"\(1\) cannot be cut into 2 pieces"):
        maps.ring_reduce_scatter(4, 4, per_rank=2).schedule(MatmulReduceScatter(4, 4, N, K, "fp32"))
    with pytest.raises(NotApplicableError, match=r"row tiles of a rank's result \(1\) cannot be cut into 2 pieces"):
        maps.ring_reduce_scatter(64, 4, per_rank=2).schedule(MatmulReduceScatter(4, 64, N, K, "fp32"), gemm="tracked")
    with pytest.raises(NotApplicableError, match="there is only one rank, so there is nothing to send"):
        maps.ring_reduce_scatter(64, 1).schedule(MatmulReduceScatter(1, 64, N, K, "fp32"), gemm="tracked")


# --- simulated ---


def serial(collective: str, world: int, m: int, n: int, k: int) -> Schedule:
    if collective == "reduce_scatter":
        return named(MatmulReduceScatter(world, m, n, k, "bf16"), "serial").build()
    d, rows = Draft("serial", world), m // world if collective == "all_gather" else m
    x, w = d.buffer("x", rows, k, "bf16", "input"), d.buffer("w", k, n, "bf16", "input")
    y, made = d.buffer("y", m, n, "bf16", "output"), d.buffer("made", rows, n, "bf16", "scratch")
    lane, each = d.lane("compute").matmul(made.part(), x.part(), w.part()), [m // world] * world
    if collective == "all_gather":
        lane.all_gather(made.part(), y.part())
    else:
        lane.exchange(made.part(), y.part(), each, each)
    return d.schedule()


@pytest.mark.parametrize("world", mostly(range(2, 9), 2, 4))
def test_they_are_simulated_and_faster_than_serial_where_there_is_much_to_do(world: int) -> None:
    """On a switch all maps are faster than serial. On a mesh, where one link has a seventh of the bandwidth, only maps
    that send to all peers at once are faster.
    """
    m, n, k = 4096 * world, 8192, 1024
    switch, mesh = gpu("h200", world), gpu("mi300x", world)
    times = {
        one: simulate(serial(one, world, m, n, k), switch).end_us
        for one in ("reduce_scatter", "all_gather", "all_to_all")
    }
    for name, one in output_maps.library(world, m // world).items():
        found = simulate(one.schedule(n, k, "bf16"), switch).end_us
        if ", 2, dma" in name:
            assert found < times[one.collective], name
    direct = maps.direct_reduce_scatter(m, world, per_rank=2, by="dma", sliced=True)
    p = MatmulReduceScatter(world, m, n, k, "bf16")
    at_once = simulate(direct.schedule(p, add="reduce", engines=world - 1), mesh).end_us
    ring = simulate(maps.ring_reduce_scatter(m, world, per_rank=2, first="dma").schedule(p), mesh).end_us
    assert at_once < min(ring, simulate(serial("reduce_scatter", world, m, n, k), mesh).end_us)
