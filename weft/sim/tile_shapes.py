"""The shapes of the tiles into which a matmul may be cut, and their efficiency (`weft.sim.model` has the formula)."""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np

_SPLITS = (1, 2, 4, 8)
_SMALLEST_TILE = 32


@lru_cache(maxsize=64)
def all_ways(tile: tuple[int, int], half: float, step: int = 0) -> np.ndarray:
    """Return the ways to compute a matmul, an array `[4, count]`: the tile's rows, the tile's columns, the number of parts
    into which k is split, and the tile's efficiency.

    tile: the largest tile. half: `Model.tile_half`. step: `Model.tile_step`.
    """
    ways = itertools.product(_tiles(*tile, step), _SPLITS)
    return np.array([(r, c, split, efficiency(tile, half, r, c)) for (r, c), split in ways]).T


def efficiency(tile: tuple[int, int], half: float, rows: int, cols: int) -> float:
    """Return the efficiency of a tile of `rows` x `cols`, relative to the largest tile `tile`."""
    return (1 + half * (1 / tile[0] + 1 / tile[1])) / (1 + half * (1 / rows + 1 / cols))


def _tiles(rows: int, cols: int, step: int) -> list[tuple[int, int]]:
    """Return the shapes (rows, columns) of the tiles among which a library is assumed to choose.

    The height is `rows`, or `rows` halved one or more times. The width is `cols`, `cols` halved one or more times, or three
    quarters of `cols`. With `step`, it may also be any multiple of `step`. Each shape is also transposed.
    """
    heights, widths = _halves(rows), {*_halves(cols), max(cols * 3 // 4, _SMALLEST_TILE)}
    if step:
        widths |= {width for width in range(step, cols + 1, step) if width >= _SMALLEST_TILE}
    return sorted({tile for h, w in itertools.product(heights, widths) for tile in ((h, w), (w, h))}, reverse=True)


def _halves(extent: int) -> list[int]:
    return [extent, *_halves(extent // 2)] if extent >= 2 * _SMALLEST_TILE else [extent]
