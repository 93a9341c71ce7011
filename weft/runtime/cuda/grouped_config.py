"""The tile sizes of `weft.kernels.grouped_matmul`, and their choice for a launch. The choice needs no GPU, and does not import
Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Config:
    """The tile sizes and other compile-time parameters of the grouped GEMM kernel.

    parts: the number of pieces in which a tile is stored, 1 or 2. Two pieces leave more shared memory for pipeline stages.
    swap: True to compute the transposed product, with weights as the first operand. Then `block_m` may be less than 64.
    """

    block_m: int
    block_n: int
    block_k: int
    group: int
    warps: int
    stages: int
    parts: int = 1
    per_sm: int = 1  # resident programs per multiprocessor
    splits: int = 1  # the largest number of programs that share a tile of the last round
    rounds: int = 1  # the largest number of rounds that the parts of shared tiles take
    swap: bool = False

    @property
    def tile(self) -> int:
        """The number of elements of a tile of the result."""
        return self.block_m * self.block_n


MAX_SPLITS = 8
"""Largest number of programs that share a tile. The last program reads all partial sums."""
LEAST_STEPS = 16
"""Smallest number of K steps of a program that shares a tile. Adding the partial sums takes as long as about ten steps.
"""
TWO_ROUNDS_K = 12800
"""The smallest K for which three parts of a tile, in two rounds, are faster than the tile. A part takes a third of the
time of the tile, plus the time of 30 steps of the loop over K."""
FEW_ROUNDS = 4
"""Largest number of rounds of tiles for which sharing the last round is faster."""
LEAST_OCCUPIED = 0.75
"""The least number of multiprocessors that narrow tiles must occupy to be chosen, divided by the number that wide tiles occupy."""
FEW_ROWS = 192
"""Up to this number of rows in a segment, tiles of 64 rows are faster than larger tiles, and MERGED tiles are faster
still.
"""
VERY_FEW_ROWS = 12
"""Up to this average number of rows of an expert, tiles of 16 rows are faster than larger tiles.
"""
LARGE = Config(128, 256, 64, 8, 8, 3)
# Configurations for 16-bit types that a benchmark compares, sorted from many rows per segment to few.
CONFIGS = (
    LARGE,
    Config(128, 256, 64, 16, 8, 4, parts=2),
    Config(256, 128, 64, 8, 8, 3),
    Config(128, 128, 64, 8, 4, 3, parts=2, per_sm=2),
    Config(64, 256, 64, 16, 4, 4),
    Config(64, 128, 64, 16, 4, 4, per_sm=2),
    Config(128, 128, 64, 8, 4, 6, parts=2),
    Config(16, 128, 64, 16, 4, 5, per_sm=2, swap=True),
)
_SHORT_K, _MEDIUM, _SMALL, _NARROW, _FEW, _LOW = CONFIGS[1], *CONFIGS[3:8]
# Without tensor maps, addresses and masks need registers, so tiles are smaller.
PLAIN = Config(64, 64, 32, 8, 8, 3, per_sm=2)


def choose_config(
    itemsize: int,
    rows_per_segment: float,
    n: int,
    k: int,
    segments: int = 0,
    multiprocessors: int = 0,
    *,
    merged: bool = False,
) -> Config:
    """Return the fastest configuration for a launch, by the following rules. A segment is a (source, expert) pair; with
    `merged`, it is an expert.

    - Tiles of 128 rows fill the tensor cores, but a segment's last tile is half empty on average. So for segments of less
      than about two tiles, use tiles of 64 rows.
    - With `merged` there are fewer segments, and fewer partly empty tiles, so use tiles of 128 rows for segments of more than
      64 rows. Store these tiles in two pieces: if the kernel sends products back to their sources (`BACK`), the addresses of a
      whole tile would not fit in the registers.
    - If at most half of the multiprocessors would have a tile, use narrow tiles, which occupy more multiprocessors. With `merged`
      and more than 64 rows, this took 0.77 times as long on an H100 (geometric mean of 23 shapes; the worst 1.01). But if several
      multiprocessors share a tile, wide tiles may occupy more: 196 rows x 4864 x 48000 with one expert took 268 us, not 378.
    - If an expert's rows do not fill a tile, loading weights dominates the time, and narrow tiles load them faster. On an
      H100, 164 rows x 45824 x 4608 with 16 experts took 2.31 ms instead of 2.86.
    - If an expert has few rows, reading the weights determines the time. Tiles of 16 rows leave shared memory for more
      weights in flight. On an H100, 14 tokens x 12032 x 26624 with 8 experts took 833 us instead of 861, and torch.bmm
      840.
    - If K is short, stores take a large part of the time. So store a tile in two pieces, which leaves shared memory for one
      more stage of operands.

    itemsize: the number of bytes of an element.
    rows_per_segment: the average number of rows of a segment.
    segments: the number of segments of the launch; 0 if unknown.
    merged: True if tiles have rows of all sources.
    """
    if itemsize == 4 or (n | k) * itemsize % 16:
        return PLAIN
    if merged and rows_per_segment <= VERY_FEW_ROWS:
        best = _LOW
    elif n <= 128:
        best = _MEDIUM if rows_per_segment > 192 else _NARROW
    elif rows_per_segment <= (_SMALL.block_m if merged else FEW_ROWS):
        tiles = _tiles(_SMALL, rows_per_segment, n, segments)
        few, many = 2 * tiles <= multiprocessors, tiles > FEW_ROUNDS * multiprocessors
        best = _NARROW if segments and (few or (many and rows_per_segment <= _SMALL.block_m)) else _SMALL
    elif merged and segments and _suits_few(rows_per_segment, n, k, segments, multiprocessors):
        best = _FEW
    else:
        best = LARGE if k >= 768 and not merged else _SHORT_K
    best = replace(best, parts=2) if merged and best.parts < 2 and not best.swap else best
    rounds = _tiles(best, rows_per_segment, n, segments) / max(1, best.per_sm * multiprocessors)
    splits = min(MAX_SPLITS, -(-k // best.block_k) // LEAST_STEPS)
    # the number of rows is an estimate, so a last round that is expected to be a little fuller or emptier may be cut too
    cut = best is not _FEW and not best.swap and k >= TWO_ROUNDS_K and splits > 2 and 0.35 <= rounds % 1 <= 0.8
    return replace(best, splits=splits, rounds=1 + cut) if 0 < rounds <= FEW_ROUNDS and splits > 1 else best


def _suits_few(rows_per_segment: float, n: int, k: int, segments: int, multiprocessors: int) -> bool:
    """Return True if tiles of `LARGE` occupy at most half of the multiprocessors, and tiles of `_FEW` occupy enough of them.
    Multiprocessors can share a tile.
    """
    narrow, wide = (_tiles(config, rows_per_segment, n, segments) for config in (_FEW, LARGE))
    if 2 * wide > multiprocessors:
        return False
    most = max(1, min(MAX_SPLITS, -(-k // LARGE.block_k) // LEAST_STEPS))
    occupied, by_wide = (tiles * min(most, max(1, multiprocessors // max(1, tiles))) for tiles in (narrow, wide))
    return occupied >= LEAST_OCCUPIED * by_wide


def _tiles(config: Config, rows_per_segment: float, n: int, segments: int) -> int:
    """Return the expected number of tiles of a launch of the grouped GEMM."""
    return int(segments * -(-rows_per_segment // config.block_m) * -(-n // config.block_n))
