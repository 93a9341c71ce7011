"""Cache hit rates of a pooling kernel's reads of table rows, if the distribution of ids is known.

A cache is assumed to hold exactly the rows that were read in the last T samples. Suppose that a bag reads n rows, and that each
read is of row r with probability p. Then row r is in the cache with probability 1 - exp(-n p T). This probability times the
row's bytes is the space that the row takes in the cache on average. Ids, offsets and pooled vectors also take space, but are
used only once. T is chosen so that all of this fills the cache.

    found(T)    = sum over rows of p (1 - exp(-n p T)), weighted by the bytes that bags read from each table
    occupied(T) = sum over rows of bytes (1 - exp(-n p T)) + T x (other bytes of a sample)

Ids follow Zipf's law, as in `weft.bench.ops.embedding_presets.Zipf`. Exponent 0 is uniform. Row r of R rows has
probability ((r + 2)^q - (r + 1)^q) / ((R + 1)^q - 1) with q = 1 - exponent.

Source: Che, Tung and Wang, "Hierarchical Web Caching Systems: Modeling, Design and Experimental Results" (IEEE JSAC
    2002).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

CACHES = tuple(2.0**power for power in range(18, 31))
"""The cache sizes in bytes, from 256 KiB to 1 GiB, for which `found_in_cache` predicts the share of row reads that hit
the cache.
"""

Table: TypeAlias = "tuple[float, float, float, int]"
"""(rows of the table, exponent of Zipf's law for its ids, rows that a bag reads, bytes of a row)."""

_ALONE, _GROWTH, _STEPS_OF_TIME = 16, 1.25, 2.0


def found_in_cache(tables: Sequence[Table], passing_bytes: float) -> tuple[float, ...]:
    """Return, for each cache size in `CACHES`, the share of the bytes of row reads that hit the cache.

    tables: the tables of a rank. A sample has one bag for each.
    passing_bytes: the bytes of ids, offsets and pooled vectors per sample.
    """
    counts = Counter(table for table in tables if table[2] > 0)
    read = sum(count * bag * row_bytes for (_, _, bag, row_bytes), count in counts.items())
    if not read:
        return (0.0,) * len(CACHES)
    groups = [
        (count * bag * mass * row_bytes, count * many * row_bytes, bag * mass / many)
        for (rows, exponent, bag, row_bytes), count in counts.items()
        for mass, many in _alike(rows, exponent)
    ]
    points = [(0.0, 0.0)]
    samples = 1e-3
    while points[-1][0] < CACHES[-1] and samples < 1e15:
        held = [-math.expm1(-per_sample * samples) for _, _, per_sample in groups]
        found = sum(share * of for share, (of, _, _) in zip(held, groups, strict=True)) / read
        occupied = sum(share * of for share, (_, of, _) in zip(held, groups, strict=True)) + samples * passing_bytes
        points.append((occupied, min(1.0, found)))
        samples *= _STEPS_OF_TIME
    return tuple(round(_at(points, size), 4) for size in CACHES)


def share_found(shares: Sequence[float], cache_bytes: float) -> float:
    """Return the share of row reads that hit a cache of `cache_bytes`, interpolated between the sizes in `CACHES`.

    shares: the result of `found_in_cache`. (): ids are unknown, so the share is 0.
    """
    return _at([(0.0, 0.0), *zip(CACHES, shares, strict=True)], cache_bytes) if shares else 0.0


def _at(points: Sequence[tuple[float, float]], size: float) -> float:
    """Interpolate linearly between `points` (size, value), which are sorted by size. Return the value at `size`. Beyond
    the last point, return the last value.
    """
    for (below, low), (above, high) in itertools.pairwise(points):
        if size <= above:
            return low + (high - low) * (size - below) / (above - below)
    return points[-1][1]


def _alike(rows: float, exponent: float) -> Iterator[tuple[float, float]]:
    """Divide the rows into groups of rows that are read about equally often. Yield (probability that a read is of a row
    of the group, number of rows) for each group.
    """
    q = 1 - exponent or 1e-8
    first, whole = 0.0, (rows + 1) ** q - 1
    while first < rows:
        end = rows if not exponent else min(rows, first + 1 if first < _ALONE else math.ceil(first * _GROWTH))
        yield ((end + 1) ** q - (first + 1) ** q) / whole, end - first
        first = end
