"""What steps cost on a machine: plain numbers and the formulas over them, in microseconds and bytes.

A matmul [m, k] x [k, n] is cut into tiles, which the compute units take in waves; the last wave may be partly empty. Small
tiles fill the units better and reuse their operands worse, and a long k may be split; the library is taken to find the best.

    time(tile, s) = ceil(tiles s / units) 2 rows cols (k / s + ramp) / (rate of a unit x efficiency(tile)) + reduction(s)
    efficiency(rows, cols) = 1 / (1 + tile_half (1 / rows + 1 / cols))

A copy by an engine takes latency + bytes / bandwidth. What runs at once shares what it uses (`weft.sim.engine`), and each
byte that a copy reads or writes in a GPU's memory also slows that GPU's kernels a little, through its caches, its power and
the compute units that a copying kernel holds: "Design Space Exploration of DMA based Finer-Grain Compute Communication
Overlap", IV-A, calls the two contention losses.

Source of the wave model: "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from weft.schedule import ITEM_BYTES

MatmulShape = tuple[int, int, int, str]
_SPLITS = (1, 2, 4, 8)
_SMALLEST_TILE = 32
_NEAREST = 4


class Matmul(NamedTuple):
    """A matmul alone on its GPU, without its launch."""

    time_us: float
    units_busy: float  # share of the GPU's compute units, on the average
    hbm_bytes: float


@dataclass(frozen=True)
class Model:
    """A machine as the simulator sees it. Rates are bytes or operations per microsecond; `inf` and 0 are legal."""

    name: str
    world_size: int  # ranks of the schedules that it can run; 0: any number

    compute_units: int
    matmul_flops_per_us: Mapping[str, float]  # by dtype: all units on whole tiles of the largest size, k without end
    tile: tuple[int, int]  # the largest, rows x cols
    tile_half: float
    tile_ramp: float  # steps along k that the prologue and epilogue of a tile are worth
    vector_flops_per_us: float
    launch_us: float  # between kernels of one lane
    hbm_bytes_per_us: float  # read and written
    l2_bytes: float

    port_bytes_per_us: float  # what a GPU can send, and what it can receive, to and from all others together
    pair_bytes_per_us: float  # from one GPU to one other, per direction
    copy_latency_us: float
    copy_bytes_per_us: float
    copy_engines: int
    copy_row_us: float  # of each row of a two-dimensional copy
    kernel_copy_units: int  # compute units that one copying kernel to or from a peer holds
    put_bytes_per_us: tuple[tuple[int, float], ...]  # (units, rate) of a kernel that stores to a peer, by rising units
    get_bytes_per_us: tuple[tuple[int, float], ...]  # the same of one that loads
    collective_latency_us: float
    collective_bytes_per_us: float  # received by a rank
    collective_units: int
    copy_disturbance: float  # share of a GPU's compute lost, per byte/us that engines read or write there
    kernel_copy_disturbance: float  # the same for copying kernels, beside the units that they hold

    signal_local_us: float  # from a set to the wait that it ends
    signal_remote_us: float
    host_step_us: float  # host time of a step that is not queued ahead

    measured_us: Mapping[MatmulShape, float] = field(default_factory=dict)
    """Times of matmuls (m, n, k, dtype) alone, with launch. The formula is corrected by what it got wrong at the nearest."""
    _known: dict[MatmulShape, Matmul] = field(default_factory=dict, init=False, repr=False, compare=False)

    def matmul(self, m: int, n: int, k: int, dtype: str) -> Matmul:
        shape = (m, n, k, dtype)
        if shape not in self._known:
            found = self._formula(m, n, k, dtype)
            us = found.time_us * self._correction(shape)
            self._known[shape] = Matmul(us, found.units_busy, min(found.hbm_bytes, us * self.hbm_bytes_per_us))
        return self._known[shape]

    def matmul_us(self, m: int, n: int, k: int, dtype: str) -> float:
        """Alone on the GPU, with its launch."""
        return self.launch_us + self.matmul(m, n, k, dtype).time_us

    def with_measured(self, measured_us: Mapping[MatmulShape, float]) -> Model:
        return replace(self, measured_us=dict(measured_us))

    def kernel_copy_bytes_per_us(self, put: bool) -> float:
        """Of a copying kernel to (`put`) or from a peer, by interpolation between the numbers of units that are known."""
        curve = self.put_bytes_per_us if put else self.get_bytes_per_us
        units, below = self.kernel_copy_units, (0, 0.0)
        for above in curve:
            if units <= above[0]:
                part = (units - below[0]) / (above[0] - below[0])
                return above[1] if math.isinf(above[1]) else below[1] + part * (above[1] - below[1])
            below = above
        return below[1]

    def _formula(self, m: int, n: int, k: int, dtype: str) -> Matmul:
        """By the best tile and split."""
        if dtype not in self.matmul_flops_per_us:
            known = ", ".join(self.matmul_flops_per_us)
            raise KeyError(
                f"{self.name}: no matmul rate for {dtype}, only for {known}: add compute.{dtype}_matmul_8192"
            )
        best = (math.inf, 1.0)
        for (rows, cols), split in itertools.product(_tiles(*self.tile), _SPLITS):
            tiles = math.ceil(m / rows) * math.ceil(n / cols) * split
            waves = math.ceil(tiles / self.compute_units)
            rate = self.matmul_flops_per_us[dtype] * self._tile_efficiency(rows, cols) / self.compute_units
            us = waves * 2 * rows * cols * (math.ceil(k / split) + self.tile_ramp) / rate
            if split > 1:  # partial sums, in fp32, are written and read again
                us += self.launch_us + 2 * split * m * n * 4 / self.hbm_bytes_per_us
            best = min(best, (us, tiles / (waves * self.compute_units)))
        computing_us, busy = best
        traffic = self._matmul_traffic(m, n, k, ITEM_BYTES[dtype])
        us = max(computing_us, traffic / self.hbm_bytes_per_us)
        return Matmul(us, busy * computing_us / us if us > 0 else 0.0, traffic)

    def _tile_efficiency(self, rows: int, cols: int) -> float:
        """Compared with the largest tile."""

        def loss(r: int, c: int) -> float:
            return 1 + self.tile_half * (1 / r + 1 / c)

        return loss(*self.tile) / loss(rows, cols)

    def _matmul_traffic(self, m: int, n: int, k: int, item_bytes: int) -> float:
        """Bytes to and from memory: what runs at once is a block of tiles about square, which shares its operands."""
        once = (m + n) * k * item_bytes
        area = self.compute_units * self.tile[0] * self.tile[1]
        rows = min(m, math.sqrt(area))
        cols = min(n, area / rows)
        blocks = math.ceil(m / rows) * math.ceil(n / cols)
        operands = once if once <= self.l2_bytes else max(once, blocks * (rows + cols) * k * item_bytes)
        return operands + m * n * item_bytes

    def _correction(self, shape: MatmulShape) -> float:
        """Measured over predicted time: the mean of the nearest measured shapes, weighted by 1 / distance^2 in octaves."""
        near: list[tuple[float, float]] = []
        for (m, n, k, dtype), measured in self.measured_us.items():
            if dtype == shape[3]:
                distance = sum(math.log2(a / b) ** 2 for a, b in zip((m, n, k), shape[:3], strict=True) if b > 0)
                us = self._formula(m, n, k, dtype).time_us
                near.append((distance, max(measured - self.launch_us, 0.01 * us) / us))
        near = sorted(near)[:_NEAREST]
        if not near:
            return 1.0
        if near[0][0] < 1e-9:
            return near[0][1]
        weights = [1 / distance for distance, _ in near]
        logs = sum(w * math.log(ratio) for w, (_, ratio) in zip(weights, near, strict=True))
        return math.exp(logs / sum(weights))


def _tiles(rows: int, cols: int) -> list[tuple[int, int]]:
    """The sizes of tiles that a library has: those that halving the largest gives, and the same on their side."""
    heights, widths = _halves(rows), _halves(cols)
    return sorted({tile for h, w in itertools.product(heights, widths) for tile in ((h, w), (w, h))}, reverse=True)


def _halves(extent: int) -> list[int]:
    return [extent, *_halves(extent // 2)] if extent >= 2 * _SMALLEST_TILE else [extent]
