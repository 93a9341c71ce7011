"""T3's memory controller: bytes are counted exactly, it is never faster than its parts, and invalid input is refused.

Cheapest first: bad input; bytes; bounds and monotonicity; arbitration; the tracker. GEMMs are small, on a GPU of 8
units. Docstrings begin with sections of the T3 paper.
"""

import itertools
import random

import pytest

from weft.builders.output_map.map import OutputMap, direct_reduce_scatter, ring_reduce_scatter
from weft.sim.memory_controller import (
    HardwareGemm,
    all_gather,
    alone,
    fused,
    fused_on_all,
    other_reading,
    reduce_scatter,
    t3_gpu,
)
from weft.studies.t3_figures import without_stagger

WORLD = 4
SMALL = t3_gpu().with_values({"gpu.units": 8, "link.bandwidth": 7.5, "memory.effective": 0.046, "memory.llc": 1.6})
"""A tenth of the paper's GPU, with the same ratios, which is faster to simulate."""
GEMM = HardwareGemm(2048, 1024, 512)


def ring(gemm=GEMM, gpu=SMALL, world=WORLD):
    return ring_reduce_scatter(gemm.tiles(gpu), world)


def test_bad_input_is_refused_with_the_values_and_the_fix():
    with pytest.raises(ValueError, match=r"tokens=0.*nothing to multiply"):
        HardwareGemm(0, 1024, 64)
    with pytest.raises(ValueError, match=r"'fifo'.*round_robin, compute_first, mca"):
        fused(GEMM, ring(), WORLD, SMALL, "fifo")
    with pytest.raises(ValueError, match="has 128 rows in 4 chunks, but the GEMM has 64 tiles"):
        fused(GEMM, ring_reduce_scatter(128, WORLD), WORLD, SMALL, "mca")
    with pytest.raises(ValueError, match="to=2 is this rank itself"):
        fused(GEMM, ring_reduce_scatter(GEMM.tiles(SMALL), WORLD, rank=3), WORLD, SMALL, "mca")
    with pytest.raises(ValueError, match="64 tiles in 12 chunks"):
        fused(GEMM, OutputMap(64, 12), WORLD, SMALL, "mca")
    with pytest.raises(ValueError, match="0 bytes on 4 ranks"):
        reduce_scatter(0, WORLD, SMALL)
    with pytest.raises(ValueError, match=r"tracker.ways = 4 cannot hold a work-group's 8 wavefronts"):
        SMALL.with_values({"tracker.ways": 4})
    for wrong in ({"memory.stores": 50}, {"memory.stores_low": 56}, {"memory.stores_high": 20}):
        with pytest.raises(ValueError, match="Use stores_low < stores_high <= stores"):
            SMALL.with_values(wrong)
    with pytest.raises(ValueError, match=r"link.bandwidth = 0"):
        SMALL.with_values({"link.bandwidth": 0})
    with pytest.raises(KeyError, match=r"T3's GPU.* has no number gpu.unit"):
        SMALL.with_values({"gpu.unit": 8})


@pytest.mark.parametrize("world", [2, 3, 8])
def test_every_byte_of_the_ring_is_counted_once(world):
    """6.2: the fused GEMM stores its first chunk at the peer. Every later chunk is updated twice and read once, except
    the last chunk, which is not read.
    """
    gemm = HardwareGemm(128 * 24, 1024, 128)
    out, chunk = gemm.out_bytes, gemm.out_bytes / world
    run = fused(gemm, ring(gemm, world=world), world, SMALL, "mca", bin_us=5)
    assert run.link == pytest.approx(out - chunk)
    assert run.gemm_write == pytest.approx(out - chunk)
    assert run.ring_write == pytest.approx(out - chunk)
    assert run.ring_read == pytest.approx(out - 2 * chunk)
    assert sum(map(sum, run.bins)) == pytest.approx(run.memory_bytes)
    kernel, memory = reduce_scatter(out, world, SMALL), reduce_scatter(out, world, SMALL, near_memory=True)
    assert kernel.ring_read == pytest.approx((2 * world - 1) * chunk)
    assert kernel.ring_write == pytest.approx(world * chunk)
    assert memory.ring_read == memory.ring_write == pytest.approx((world - 1) * chunk)
    gather = all_gather(out, world, SMALL)
    assert (gather.ring_read, gather.ring_write) == pytest.approx(((world - 1) * chunk, (world - 1) * chunk))


def test_a_gemm_reads_its_operands_once_if_they_fit_and_at_most_once_for_each_tile():
    operands = 2 * GEMM.k * (GEMM.tokens + GEMM.features)
    roomy = SMALL.with_values({"memory.llc": 64})
    assert alone(GEMM, roomy).gemm_read == pytest.approx(operands)
    for gpu in (roomy, SMALL, SMALL.with_values({"memory.llc": 0.1})):
        run = alone(GEMM, gpu)
        assert operands * (1 - 1e-9) <= run.gemm_read <= 2 * GEMM.k * (128 + 256) * GEMM.tiles(gpu)
        assert run.gemm_write == pytest.approx(GEMM.out_bytes)
    # Writes that bypass the cache leave more of it to the operands.
    assert alone(GEMM, SMALL, bypass=True).gemm_read <= alone(GEMM, SMALL).gemm_read


@pytest.mark.parametrize("arbitration", ["round_robin", "compute_first", "mca"])
def test_nothing_is_faster_than_its_slowest_part(arbitration):
    run = fused(GEMM, ring(), WORLD, SMALL, arbitration)
    assert run.us >= run.link / SMALL["link.bandwidth"] * 1e6
    assert run.us >= GEMM.flop / (SMALL.peak * SMALL["gpu.efficiency"]) * 1e6
    busy_us = (run.memory_bytes + (run.gemm_write + run.ring_write)) / SMALL["memory.effective"] * 1e6
    assert run.us >= busy_us * (1 - 1e-9)
    assert run.busy == pytest.approx(busy_us / run.us)


RATES, UNITS = ("link.bandwidth", "memory.effective", "memory.llc"), ("gpu.units", "gpu.clock")


@pytest.mark.parametrize(
    ("key", "arbitration"),
    [
        *((key, arbitration) for key in RATES for arbitration in ("round_robin", "compute_first", "mca")),
        *((key, "round_robin") for key in UNITS),
    ],
)
def test_more_of_anything_is_no_slower(key, arbitration):
    """A tolerance of 2% is needed, because with other rates other work-groups share the cache. Faster units make a GEMM
    more memory-intensive, and if the GEMM has priority, the ring waits longer.
    """
    times = [fused(GEMM, ring(), WORLD, SMALL.scaled(key, factor), arbitration).us for factor in (0.5, 1.0, 1.5, 2.0)]
    assert all(later <= 1.02 * earlier for earlier, later in itertools.pairwise(times))
    assert times[-1] < times[0] or key == "memory.llc"


def test_a_ring_alone_takes_its_closed_form():
    """The time consists of the steps of the link, its latency, and the last step of the kernel. Memory that adds has no
    last step.
    """
    gpu = t3_gpu()
    for world, faster in ((8, 0.07), (16, 0.03)):
        for megabytes in (6, 24, 96):
            total, steps = megabytes * 2**20, world - 1
            step_us = (total / world / gpu["link.bandwidth"] + gpu["link.latency"]) * 1e6
            kernel, memory = (reduce_scatter(total, world, gpu, near_memory=near).us for near in (False, True))
            last_us = 3 * total / world / gpu["memory.effective"] * 1e6
            assert kernel == pytest.approx(steps * step_us + last_us, rel=0.05)
            assert kernel >= steps * step_us + last_us * 0.9
            assert steps * (step_us - gpu["link.latency"] * 1e6) < memory < 1.02 * steps * step_us
        assert kernel / memory - 1 == pytest.approx(faster, abs=0.015)


def test_a_sum_travels_step_by_step() -> None:
    """4.2.1: the tracker counts the peer's updates too, so a piece is sent only when it contains the sum so far."""
    latency_us = 10_000
    slow = SMALL.with_values({"link.latency": 1e3 * latency_us})
    for world in (2, 4, 8):
        run = fused(GEMM, ring(world=world), world, slow, "round_robin")
        assert (world - 1) * latency_us < run.us < world * latency_us


def test_arbitration_and_adding_memory_move_results_as_the_paper_says():
    """6.1.2, 6.1.3: T-NLG's FC-2 on 16 ranks. Without MCA the ring delays the GEMM; faster updates delay it less."""
    gpu, gemm = t3_gpu(), HardwareGemm(8192, 4256, 1064)
    output = ring_reduce_scatter(gemm.tiles(gpu), 16)
    t3, mca = (fused(gemm, output, 16, gpu, arbitration) for arbitration in ("round_robin", "mca"))
    isolated = alone(gemm, gpu)
    assert t3.gemm_us > 1.15 * isolated.gemm_us
    assert mca.gemm_us < 1.05 * isolated.gemm_us
    assert mca.us < 0.95 * t3.us
    quick = gpu.with_values({"memory.update": 1})
    assert fused(gemm, output, 16, quick, "round_robin").us < t3.us
    # T3 saves the same for any arbitration.
    assert (t3.ring_read, t3.ring_write) == (mca.ring_read, mca.ring_write)


@pytest.mark.parametrize("arbitration", ["round_robin", "compute_first", "mca"])
def test_results_converge_as_entries_become_smaller(arbitration):
    gpu, gemm = t3_gpu(), HardwareGemm(8192, 4256, 1064)
    output = ring_reduce_scatter(gemm.tiles(gpu), 16)
    times = [fused(gemm, output, 16, gpu, arbitration, coarse=coarse).us for coarse in (0.5, 1, 2)]
    assert max(times) < 1.02 * min(times)


@pytest.mark.parametrize("arbitration", ["round_robin", "mca"])
def test_one_gpu_stands_for_all(arbitration: str) -> None:
    """5.1.1: a simulation of all ranks with their peers gives exactly the bytes and the times of a simulation of one
    rank.
    """
    one = fused(GEMM, ring(), WORLD, SMALL, arbitration)
    maps = [ring_reduce_scatter(GEMM.tiles(SMALL), WORLD, rank=rank) for rank in range(WORLD)]
    for run in fused_on_all(GEMM, maps, SMALL, arbitration):
        assert (run.us, run.gemm_us, run.memory_bytes) == pytest.approx((one.us, one.gemm_us, one.memory_bytes))


def test_without_stagger_the_last_chunk_follows_the_gemm() -> None:
    """4.4: if all ranks compute the same chunk at once, its sum is complete only after a round of the ring."""
    tiles = GEMM.tiles(SMALL)
    staggered = fused(GEMM, ring(), WORLD, SMALL, "mca")
    runs = fused_on_all(GEMM, [without_stagger(tiles, WORLD, rank) for rank in range(WORLD)], SMALL, "mca")
    slowest = max(run.us for run in runs)
    assert slowest > 1.1 * staggered.us
    assert sum(run.link for run in runs) == pytest.approx((WORLD - 1) * GEMM.out_bytes)


def test_own_stores_and_reads_decide_between_t3_and_mca() -> None:
    """T3's losses are GEMM reads that wait behind the GEMM's own stores, which the ring delays. If reads have priority,
    the losses are small.
    """
    gpu, gemm = t3_gpu(), HardwareGemm(8192, 4256, 2128)
    output = ring_reduce_scatter(gemm.tiles(gpu), 8)
    times = {
        (own, arbitration): fused(gemm, output, 8, gpu, arbitration, own_writes=own).us
        for own in ("watermarks", "in_order", "alternating", "after_reads")
        for arbitration in ("round_robin", "mca")
    }
    for own in ("watermarks", "in_order", "alternating"):
        assert times[own, "round_robin"] > 1.1 * times[own, "mca"]
    assert times["after_reads", "round_robin"] < 0.95 * times["watermarks", "round_robin"]


def test_a_direct_reduce_scatter_has_no_accesses_of_its_own_but_the_arriving_updates() -> None:
    """7.1: the GEMM stores each tile in its owner's memory, over a link to each peer. If tiles are small enough, all
    links are busy at once.
    """
    tiles, chunk = GEMM.tiles(SMALL), GEMM.out_bytes / WORLD
    whole, fine = (
        fused(GEMM, direct_reduce_scatter(tiles, WORLD, per_rank=n, sliced=True), WORLD, SMALL, "mca")
        for n in (1, tiles // WORLD)
    )
    for run in (whole, fine):
        assert run.ring_read == run.tracker_most == 0
        assert run.gemm_write == pytest.approx(chunk)
        assert run.ring_write == run.link == pytest.approx((WORLD - 1) * chunk)
    assert fine.us < 0.6 * whole.us
    assert fine.us >= run.link / SMALL["link.bandwidth"] * 1e6


def test_copies_may_take_several_wavefronts_pieces_at_once() -> None:
    """4.2.2: the same bytes are sent, but a piece waits for the other pieces of its copy."""
    runs = [fused(GEMM, ring(), WORLD, SMALL.with_values({"copies.block": n}), "mca") for n in (1, 3, 8)]
    for run in runs:
        assert (run.ring_read, run.link) == pytest.approx((runs[0].ring_read, runs[0].link))
        assert run.us == pytest.approx(runs[0].us, rel=0.05)


@pytest.mark.parametrize("per_rank", [2, 4])
def test_finer_chunks_of_the_ring_move_the_same(per_rank: int) -> None:
    whole, fine = (
        fused(GEMM, ring_reduce_scatter(GEMM.tiles(SMALL), WORLD, per_rank=n), WORLD, SMALL, "mca")
        for n in (1, per_rank)
    )
    for kind in ("gemm_write", "ring_read", "ring_write", "link"):
        assert getattr(fine, kind) == pytest.approx(getattr(whole, kind))


def test_a_small_tracker_stalls_work_groups_and_a_large_one_does_not():
    """A work-group begins only if its set in the tracker has space. So a small tracker costs time, but never changes
    the result.
    """
    runs = {
        sets: fused(GEMM, ring(), WORLD, SMALL.with_values({"tracker.sets": sets}), "round_robin")
        for sets in (1, 4, 16, 256, 0)
    }
    assert all(run.ring_write == runs[0].ring_write for run in runs.values())
    assert (runs[1].tracker_most, runs[4].tracker_most) == (8, 32)
    assert runs[1].tracker_stall_us > runs[4].tracker_stall_us > 0
    assert runs[1].us > runs[4].us > runs[256].us
    assert runs[256].tracker_stall_us == runs[0].tracker_stall_us == 0
    assert runs[256].us == runs[0].us


def test_every_number_has_a_source_and_the_other_reading_doubles_the_links():
    gpu, other = t3_gpu(), other_reading()
    assert all(quantity.note for quantity in gpu.quantities.values() if quantity.source in ("assumed", "derived"))
    assert other["link.bandwidth"] == 2 * gpu["link.bandwidth"]
    assert reduce_scatter(1e8, 8, other).us < 0.55 * reduce_scatter(1e8, 8, gpu).us


@pytest.mark.parametrize("seed", range(4))
def test_drawn_gpus_and_maps_end_with_every_byte_sent_once(seed: int) -> None:
    """With trackers, queues and windows of any size, no simulation deadlocks."""
    rng = random.Random(seed)
    for _ in range(12):
        waves, world, per_rank = rng.choice([1, 2, 8]), rng.choice([2, 3, 4]), rng.choice([1, 2])
        gpu = t3_gpu().with_values({
            "gpu.units": rng.randint(1, 40), "gemm.per_unit": rng.randint(1, 3), "gemm.ahead": rng.randint(1, 4),
            "gemm.raster_columns": rng.randint(1, 3), "tracker.sets": rng.choice([0, 1, 5, 256]), "tracker.wavefronts": waves,
            "tracker.ways": waves * rng.randint(1, 3), "copies.block": rng.choice([1, 3, 9]),
            "copies.window": rng.choice([1, 1e-5]), "memory.llc": rng.choice([0.05, 16]), "memory.queue": rng.choice([1, 64]),
            "memory.effective": rng.choice([0.05, 2]), "link.bandwidth": rng.choice([5, 1000]),
            "mca.starved": rng.choice([0.01, 1000]),
        })  # fmt: skip
        gemm = HardwareGemm(
            128 * world * per_rank - rng.randint(0, 100), 256 * rng.randint(1, 6), rng.choice([16, 300])
        )
        tiles, arbitration = gemm.tiles(gpu), rng.choice(["round_robin", "compute_first", "mca"])
        output = rng.choice([
            ring_reduce_scatter(tiles, world, per_rank=per_rank, first=rng.choice(["store", "dma"])),
            ring_reduce_scatter(tiles, world, per_rank=per_rank, to="right"),
            direct_reduce_scatter(tiles, world, per_rank=per_rank, by=rng.choice(["store", "dma"]), sliced=True),
        ])  # fmt: skip
        own = rng.choice(["after_reads", "alternating", "watermarks", "in_order"])
        run = fused(gemm, output, world, gpu, arbitration, own_writes=own)
        sent = gemm.out_bytes * (world - 1) / world
        assert (run.link, run.ring_write) == pytest.approx((sent, sent))
        assert run.us >= sent / gpu["link.bandwidth"] * 1e6 * (1 - 1e-9)
        assert run.us >= run.gemm_us
