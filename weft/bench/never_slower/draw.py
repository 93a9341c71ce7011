"""Random shapes. A shape depends only on the seed, the operator, the shape's index and the machine's limits. So the
parts of a run (`--part`) draw the same shapes.

    M        the number of rows. 30% are 1 to 256, as in decoding; the others are 128 to 65536, log-uniform, half of them multiples
             of 128. If all ranks need the same number of rows, M is rounded up to a multiple of the number of ranks
    N, K     512 to 53248, log-uniform; 80% are multiples of 128, the others of 64
    experts  the tokens of a rank are drawn like M, but at most 16384. Each rank has 1 to 32 experts. Each token goes to 1 to 8
             experts, drawn by Zipf's law with exponent 0 (even), 0.5 or 1
    tables   1 to 64 tables with 1,000 to 10,000,000 rows and 16 to 512 columns; bags of up to 64 rows; batches of 64 to 65536

These are the sizes on GPUs. On CPU all sizes are smaller, so that a call takes a few milliseconds. A shape that exceeds
`Bounds` is drawn again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from weft.bench.ops.embedding_presets import Bag, EmbeddingPreset, TableShape, Zipf
from weft.bench.ops.gemms import GemmShape
from weft.bench.ops.moe_shape import MoeShape
from weft.hw import machine_of

Drawn: TypeAlias = GemmShape | EmbeddingPreset

EMBEDDING = "embedding_all_to_all"
EXPERTS = ("all_to_all_matmul", "matmul_all_to_all")
_EVEN = ("all_gather_matmul", "all_gather_scaled_matmul", "matmul_reduce_scatter", "scaled_matmul_reduce_scatter")
"""The operators that need equal numbers of rows on all ranks."""

_MOST_US = 5000.0
_MEMORY_SHARE = 0.25
_UNKNOWN = (500e6, 2e6)  # (FLOP per us, bytes per us) of an unknown GPU
_DECODE_SHARE = 0.3
_ATTEMPTS = 100_000
_ITEM_BYTES, _TABLE_BYTES = {"cuda": 2, "cpu": 4}, 4
_CHECKING = 2.4
"""The float64 check may use this multiple of `Bounds.bytes`. On GPUs, `Bounds.bytes` is 25% of the memory, so the check may
use 60%."""


@dataclass(frozen=True)
class Ranges:
    """The ranges from which random sizes are drawn, for a type of device.

    m, tokens, experts: the largest number of rows of a GEMM, of tokens of a rank, and of experts of a rank.
    decode: the largest number of rows in a step of decoding.
    nk, rows, dim, batch: the smallest and the largest value of N and K, of a table's rows, of its columns, and of the batch.
    sizes: the largest (M, number of tokens, batch) in mode `changing`, where each call has another size.
    """

    m: int
    decode: int
    nk: tuple[int, int]
    tokens: int
    experts: int
    rows: tuple[int, int]
    dim: tuple[int, int]
    batch: tuple[int, int]
    sizes: tuple[int, int, int]


RANGES = {
    "cuda": Ranges(
        65536, 256, (512, 53248), 16384, 32, (1000, 10_000_000), (16, 512), (64, 65536), (16384, 4096, 8192)
    ),
    "cpu": Ranges(1024, 64, (64, 1024), 256, 8, (1000, 50_000), (16, 128), (16, 512), (512, 128, 256)),
}


@dataclass(frozen=True)
class Bounds:
    """Upper bounds on what a random shape may need on each rank. flops: the FLOPs of its GEMMs. read_bytes: the bytes of table
    rows that a call reads. bytes: the bytes of inputs and float64 results in memory.
    """

    device: str
    ranks: int
    flops: float
    read_bytes: float
    bytes: float


def bounds_here(device: str, ranks: int) -> Bounds:
    """Return the limits for this machine. On GPUs, GEMMs and reads of rows take at most 5 ms at the GPU's peak rates, and
    a shape uses at most a quarter of the memory. On CPU the limits are constants.
    """
    if device == "cpu":
        return Bounds(device, ranks, 1e8, 8e6, 64e6)
    machine = machine_of(torch.cuda.get_device_name())
    flops, read = _UNKNOWN
    if machine is not None:
        flops, read = machine.per_us("compute.bf16_dense"), machine.per_us("memory.bandwidth")
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return Bounds(device, ranks, _MOST_US * flops, _MOST_US * read, _MEMORY_SHARE * memory)


def draw(op: str, index: int, seed: str, bounds: Bounds) -> Drawn:
    """Return the random shape number `index` of operator `op`.

    seed: the random seed of the benchmark, as hexadecimal digits.
    bounds: the limits on the shape's FLOPs and bytes.
    """
    return _first_fitting(random.Random(f"{seed}/{op}/{index}"), op, bounds, _kind(op))


def draw_changing(op: str, seed: str, bounds: Bounds, count: int) -> tuple[Drawn, tuple[int, ...]]:
    """Return the shape for mode `changing`, and `count` random sizes for its calls. Each size is at most the shape's
    own size.

    A size is M for GEMMs, the number of a rank's tokens for experts, and the number of all ranks' samples for embeddings.
    Sizes are distinct, so there may be fewer than `count`.
    """
    rng, kind, sizes = random.Random(f"{seed}/{op}/changing"), _kind(op), RANGES[bounds.device].sizes
    most = sizes[(_gemm, _experts, _tables).index(kind)]
    unit = _unit(op, bounds)

    def largest(rng: random.Random, op: str, bounds: Bounds) -> Drawn:
        drawn = kind(rng, op, bounds)
        if isinstance(drawn, EmbeddingPreset):
            return replace(drawn, name=f"{drawn.name.partition('-b')[0]}-b{most}", global_batch=most)
        return replace(drawn, m=most - most % unit)

    shape, least = _first_fitting(rng, op, bounds, largest), bounds.ranks if op == EMBEDDING else 1
    possible = range(least, most // unit + 1)
    return shape, tuple(unit * size for size in rng.sample(possible, min(count, len(possible))))


def _kind(op: str) -> Callable[[random.Random, str, Bounds], Drawn]:
    return _tables if op == EMBEDDING else _experts if op in EXPERTS else _gemm


def _unit(op: str, bounds: Bounds) -> int:
    return bounds.ranks if op in _EVEN else 1


def _first_fitting(
    rng: random.Random, op: str, bounds: Bounds, drawn: Callable[[random.Random, str, Bounds], Drawn]
) -> Drawn:
    for _ in range(_ATTEMPTS):
        one = drawn(rng, op, bounds)
        if fits(one, bounds):
            return one
    raise ValueError(f"no shape of {op} fits {bounds}: free memory, or omit the operator from --ops")


def fits(drawn: Drawn, bounds: Bounds) -> bool:
    """True if the shape needs at most the FLOPs and bytes that `bounds` allow."""
    if isinstance(drawn, EmbeddingPreset):
        table_bytes = _TABLE_BYTES * _of_busiest([table.rows * table.dim for table in drawn.tables], bounds.ranks)
        row_bytes = _TABLE_BYTES * _of_busiest([table.bags.mean * table.dim for table in drawn.tables], bounds.ranks)
        result_bytes = 8 * sum(table.dim for table in drawn.tables) * drawn.global_batch
        return table_bytes + result_bytes <= bounds.bytes and row_bytes * drawn.global_batch <= bounds.read_bytes
    item_bytes, rows = _ITEM_BYTES[bounds.device], drawn.rows if isinstance(drawn, MoeShape) else drawn.m
    return (
        2.0 * rows * drawn.n * drawn.k <= bounds.flops
        and drawn.bytes(bounds.ranks, item_bytes) <= bounds.bytes
        and (
            isinstance(drawn, MoeShape) or _checking_bytes(drawn, bounds.ranks, item_bytes) <= _CHECKING * bounds.bytes
        )
    )


def _checking_bytes(shape: GemmShape, ranks: int, item_bytes: int) -> float:
    """Return the bytes of memory that a rank needs to compare results with float64. They hold `2 + ranks` copies of the
    operands in the shape's dtype, the operands in fp32 and in fp64, and two fp64 products for each rank.
    """
    operands = (shape.m + shape.n) * shape.k
    return operands * ((2 + ranks) * item_bytes + 4 + 8) + 2 * 8 * ranks * shape.m * shape.n


def _of_busiest(costs: Sequence[float], ranks: int) -> float:
    """Return a lower bound of the cost of the busiest rank, if tables are distributed over ranks and each table stays whole.
    costs: the cost of each table.
    """
    return max(max(costs), sum(costs) / ranks)


def _gemm(rng: random.Random, op: str, bounds: Bounds) -> GemmShape:
    ranges, unit = RANGES[bounds.device], _unit(op, bounds)
    m = _rows(rng, ranges.m, ranges.decode)
    even = min(-(-m // unit) * unit, ranges.m - ranges.m % unit)
    return GemmShape(even, _extent(rng, ranges.nk), _extent(rng, ranges.nk))


def _experts(rng: random.Random, op: str, bounds: Bounds) -> MoeShape:
    ranges = RANGES[bounds.device]
    experts = bounds.ranks * 2 ** rng.randint(0, ranges.experts.bit_length() - 1)
    top_k = rng.randint(1, min(8, experts))
    m, n, k = _rows(rng, ranges.tokens, ranges.decode), _extent(rng, ranges.nk), _extent(rng, ranges.nk)
    return MoeShape(m, n, k, experts=experts, top_k=top_k, skew=rng.choice((0.0, 0.5, 1.0)))


def _tables(rng: random.Random, op: str, bounds: Bounds) -> EmbeddingPreset:
    ranges = RANGES[bounds.device]
    count, dim = round(_log(rng, (1, 64))), 8 * max(1, round(_log(rng, ranges.dim) / 8))
    most, law = round(_log(rng, (1, 64))), rng.choice((0.0, 0.8, 1.2))
    fixed = rng.random() < 0.5
    tables = tuple(
        TableShape(round(_log(rng, ranges.rows)), dim, Bag(most if fixed else 0, most)) for _ in range(count)
    )
    batch = round(_log(rng, ranges.batch))
    name = f"{count}x{sum(table.rows for table in tables)}-d{dim}-{'l' if fixed else 'to'}{most}-zipf{law:g}-b{batch}"
    return EmbeddingPreset(name, "drawn", tables, False, max(batch, bounds.ranks), Zipf(law))


def _rows(rng: random.Random, most: int, decode: int) -> int:
    if rng.random() < _DECODE_SHARE:
        return rng.randint(1, decode)
    rows = round(_log(rng, (decode // 2, most)))
    return rows - rows % 128 if rows >= 128 and rng.random() < 0.5 else rows


def _extent(rng: random.Random, within: tuple[int, int]) -> int:
    unit = 128 if rng.random() < 0.8 else 64
    return max(within[0], min(within[1], round(_log(rng, within) / unit) * unit))


def _log(rng: random.Random, within: tuple[int, int]) -> float:
    return math.exp(rng.uniform(math.log(within[0]), math.log(within[1])))
