"""Reads of table rows that a cache supplies: the formula against a simulated cache, and its effect on predictions."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch

from weft.bench.ops.embedding_presets import Zipf
from weft.builders import EmbeddingAllToAll, named
from weft.builders.row_reuse import CACHES, found_in_cache, share_found
from weft.hw import load_machine
from weft.plan.predict import predict
from weft.schedule.text import from_json, to_json
from weft.sim import model_of

KIB = 1024


def _of_a_cache(tables: list[tuple[int, float, int, int]], passing: int, cache: int, samples: int) -> float:
    """Return the share of row bytes that an LRU cache supplies in `samples` samples, after equally many samples to warm
    up.
    """
    draws = [
        Zipf(exponent)
        .draw(rows, 2 * samples * bag, torch.Generator().manual_seed(number))
        .view(2 * samples, bag)
        .tolist()
        for number, (rows, exponent, bag, _) in enumerate(tables)
    ]
    held: OrderedDict[tuple[int, int], int] = OrderedDict()
    occupied, found, read = 0, 0, 0
    for sample in range(2 * samples):
        rows = [((table, row), tables[table][3]) for table, of in enumerate(draws) for row in of[sample]]
        for key, size in [*rows, ((-1, sample), passing)]:
            hit = key in held
            if sample >= samples and key[0] >= 0:
                found, read = found + hit * size, read + size
            if hit:
                held.move_to_end(key)
                continue
            held[key], occupied = size, occupied + size
            while occupied > cache:
                occupied -= held.popitem(last=False)[1]
    return found / read


@pytest.mark.parametrize("seed", range(4))
def test_the_formula_gives_the_hits_of_a_cache(seed: int) -> None:
    """The cache evicts the least recently used row. Ids are drawn as benchmarks draw them."""
    rng = random.Random(seed)
    tables = [
        (rng.randint(500, 20_000), rng.choice((0.0, 0.8, 1.2)), rng.randint(1, 9), rng.choice((64, 256, 1024)))
        for _ in range(rng.randint(1, 3))
    ]
    passing, cache = rng.choice((0, 4096)), rng.choice((512, 1024)) * KIB
    found = share_found(found_in_cache(tables, passing), cache)
    assert found == pytest.approx(_of_a_cache(tables, passing, cache, 4000), abs=0.025)


def test_a_large_cache_holds_all_and_none_holds_nothing() -> None:
    shares = found_in_cache([(1000.0, 0.0, 2.0, 256)], 0.0)
    assert share_found(shares, 2000 * 256) == pytest.approx(1.0, abs=1e-3)
    assert shares[-1] == pytest.approx(1.0)
    assert (*shares,) == (*sorted(shares),)
    assert share_found(shares, 0.0) == share_found((), CACHES[-1]) == 0.0
    assert found_in_cache([], 8.0) == found_in_cache([(10.0, 0.0, 0.0, 4)], 8.0) == (0.0,) * len(CACHES)


def _us(tables: int, rows: float | None, zipf: float | None, machine: str = "h100", **more: float) -> float:
    problem = EmbeddingAllToAll.sized(16384, 128, 64, 2, "fp32", tables=tables, rows=rows, zipf=zipf)
    model = replace(model_of(load_machine(machine), 2), **more)  # type: ignore[arg-type]
    return predict(named(problem, "direct").build(), model, "queued")


def test_rows_that_recur_make_pooling_faster_but_no_faster_than_the_cache() -> None:
    unknown, large = _us(8, None, None), _us(8, 1e9, 0.0)
    assert large == pytest.approx(unknown, rel=1e-3)
    few = [_us(8, 1e6, exponent) for exponent in (0.0, 0.8, 1.0, 1.2)]
    assert [*few] == sorted(few, reverse=True)
    assert few[0] < large
    assert few[-1] < 0.8 * large
    read = 4 * 16384 * 64 * 128 * 4  # each rank pools four tables for all samples
    rate = model_of(load_machine("h100"), 2).grouped_loads_bytes_per_us
    assert rate is not None
    assert _us(8, 100, 1.2) > read / rate


def test_parts_of_the_cache_that_keep_copies_hold_less() -> None:
    whole, halves = (_us(8, 2e4, 0.8, l2_copies=copies) for copies in (1.0, 2.0))
    assert whole < halves


def test_the_slowest_rank_reads_as_much_as_it_misses() -> None:
    """Rank 0 reads a small table that the cache holds, and rank 1 a large table, so rank 1 determines the time."""
    slots = (((0, 128),), ((128, 128),))
    sizes = {"small": 1e3, "large": 1e8}

    def us(*names: str) -> float:
        ids = tuple(((sizes[name], 0.0),) for name in names)
        problem = EmbeddingAllToAll(2, (8192,) * 2, slots, ((64.0,),) * 2, "fp32", ids)
        return predict(named(problem, "direct").build(), model_of(load_machine("h100"), 2), "queued")

    assert us("small", "small") < us("small", "large") == pytest.approx(us("large", "large"), rel=1e-3)


def test_schedules_keep_the_shares_in_json() -> None:
    problem = EmbeddingAllToAll.sized(64, 16, 4, 2, "fp32", tables=4, rows=1000, zipf=1.2)
    for name in ("serial", "direct", "put"):
        schedule = named(problem, name).build()
        assert from_json(to_json(schedule)) == schedule
        assert problem.found_in_cache == next(
            step.kernel.found
            for lane in schedule.lanes
            for step in lane.steps
            if step.tile_kernel and hasattr(step.kernel, "found")  # type: ignore[attr-defined]
        )


def test_a_law_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zipf=1\.2 needs the number of rows of each table \(--option rows=NUMBER\)"):
        EmbeddingAllToAll.sized(64, 16, 4, 2, "fp32", tables=4, zipf=1.2)
