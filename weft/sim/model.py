"""The performance model of a machine: its numbers and the formulas over them, in microseconds and bytes.

A matmul [m, k] x [k, n] is cut into tiles, which the compute units take in waves. The last wave may be partly empty. Small
tiles fill the units better and reuse operands worse. A long k may be split. The vendor's BLAS is assumed to choose the
fastest tile and split.

    time(tile, s) = ceil(tiles s / units) 2 rows cols (k / s + ramp) / (rate of a unit x efficiency(tile)) + reduction(s)
    efficiency(rows, cols) = 1 / (1 + tile_half (1 / rows + 1 / cols))

A copy by an engine takes latency + bytes / bandwidth. Concurrent steps share resources (`weft.sim.engine`). Each byte that a
copy reads or writes in a GPU's memory also slows that GPU's kernels a little: through caches, memory, and the compute units
that a copying kernel holds. Such a kernel waits for units that a library GEMM keeps until it ends. These are the contention
losses of "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV-A, which leaves power out.

Source of the wave model: "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from weft.hw.topology import Wiring
from weft.schedule import ITEM_BYTES

MatmulShape = tuple[int, int, int, str]
_SPLITS = (1, 2, 4, 8)
_SMALLEST_TILE = 32
_UNIT_LOADS = 2.0
"""Rate at which all units together load from the cache, divided by the memory's rate, if `unit_loads_bytes_per_us` is
unknown."""
_NEAREST = 8
"""Number of measured matmuls that correct the formula for another shape: on a grid, the corners of a cell."""

Transfer: TypeAlias = Literal["copy", "put", "get", "all_gather", "all_to_all"]
"""A copy by an engine, stores to a peer or loads from it by a kernel, or an NCCL collective, by the bytes that a rank receives."""


class Matmul(NamedTuple):
    """A matmul alone on its GPU, without its launch."""

    time_us: float
    units_busy: float  # average share of the GPU's compute units
    hbm_bytes: float


_GROUPED_TILES = np.array([128, 128, 64, 64]), np.array([256, 128, 256, 128])
"""Rows and columns of the tiles of grouped GEMMs."""
_FEW_ROUNDS, _GROUPED_SHARERS, _LEAST_K, _ADD_UP_K = 4, 8, 1024, 640
"""Tiles of the last of at most so many rounds are shared by at most so many units, each with at least this extent of K. Adding up
their parts takes as long as the last number of K."""


@dataclass(frozen=True)
class Model:
    """A machine for the simulator. Rates are bytes or operations per microsecond; `inf` and 0 are legal."""

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

    wiring: Wiring  # the topology: which links a flow from one GPU to another occupies
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
    signal_kernel_us: float  # the same to a peer, by a copying kernel at its end
    host_step_us: float  # host time of a step that is not queued ahead

    unit_bytes_per_us: float | None = None
    """Memory bandwidth of one unit that computes tiles; None: an equal part of the GPU's."""
    memory_bytes: float = math.inf
    """Capacity of a GPU's memory."""
    measured_us: Mapping[MatmulShape, float] = field(default_factory=dict)
    """Times of matmuls (m, n, k, dtype) alone, with launch. The formula is corrected by its errors at the nearest shapes."""
    sustained: float = 1.0
    """Time of a long matmul at the clock of sustained work, divided by its time in a short measurement."""
    measured_transfers_us: Mapping[Transfer, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """Curves of (bytes, us) by rising bytes, alone, with latency or launch. They replace latency + bytes / rate."""
    matmul_memory: float = 1.0
    """Share of the memory's rate that a library GEMM reaches."""
    matmul_keeps: float = 0.0
    """The fraction of a library GEMM's compute units that later kernels cannot use until the GEMM ends."""
    tile_signal_us: float = 0.0
    """Time that each signal of a tile adds to its kernel."""
    unit_loads_bytes_per_us: float | None = None
    """Rate at which all units together load operands of matmuls from the cache; None: `_UNIT_LOADS` of the memory's rate."""
    tile_part_us: float | None = None
    """Time that each unit adds to a tile that several units split. None: tiles are not split."""
    stored_late_bytes: float = 0.0
    """Bytes of a GEMM's result in a peer's memory whose stores overlap no computation."""
    loaded_start_us: float = 0.0
    """Additional time of a kernel that reads a peer's memory, beyond bytes / rate."""
    stored_end_us: float = 0.0
    """Time from the last store of a GEMM into a peer's memory to the GEMM's end."""
    library_grouped: tuple[float, float] = (1.0, 1.0)
    """Shares of the matmul rate and of the memory's rate that torch's grouped matmul reaches."""
    host_read_us: float = 20.0
    """Time from the end of a kernel to the start of a step that the host launches after it has read the kernel's result."""
    host_call_us: float = 0.0
    """Host time to issue a library GEMM."""
    host_late_us: float = 0.0
    """Host time to issue a step with a dynamic size."""
    host_dynamic_us: float = 0.0
    """Host time of a run with dynamic sizes, in addition to `host_late_us` for each such step."""
    grouped_efficiency: float = 1.0
    """Rate of the compute units in a grouped GEMM, divided by their rate in one large matmul."""
    all_to_all_bytes_per_us: float | None = None  # received by a rank; None: as much as in an all-gather
    all_reduce: float = 1.0
    """Time of an all-reduce, divided by the time of an all-gather that sends the same number of bytes."""
    small_collective_bytes_per_us: float | None = None
    """Rate of NCCL's (or RCCL's) algorithm for small collectives; None without such an algorithm. The other algorithm takes
    `large_collective_us` longer to start. The faster one is used."""
    large_collective_us: float = 0.0
    lanes_run_us: float = 0.0
    """Additional time of a run with several lanes, which begin after the caller's stream and which it then waits for."""
    graph_run_us: float = 0.0
    """Additional time of a run with several lanes in a captured graph, which ends when all lanes have ended."""
    graph_signal_us: float = 0.0
    """Additional time in a graph of a lane with engine copies that waits for a kernel of another lane."""
    graph_remote_us: float = 0.0
    """Additional time in a graph of a wait for a peer's kernels."""
    graph_collective_us: float = 0.0
    """Additional time in a graph of a library collective at the start of a lane. Behind a kernel it is `graph_run_us`."""
    _known: dict[MatmulShape, Matmul] = field(default_factory=dict, init=False, repr=False, compare=False)
    costs: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A cache of costs of steps, for `weft.sim.lower`: the schedules of one problem share most of them."""

    def __hash__(self) -> int:
        return hash((self.name, self.world_size))  # dicts of measured numbers are not hashable

    def matmul(self, m: int, n: int, k: int, dtype: str) -> Matmul:
        shape = (m, n, k, dtype)
        if shape not in self._known:
            found = self._formula(m, n, k, dtype)
            us = found.time_us * self._correction(shape)
            self._known[shape] = Matmul(us, found.units_busy, min(found.hbm_bytes, us * self.hbm_bytes_per_us))
        return self._known[shape]

    def segment(self, m: int, n: int, k: int, dtype: str) -> Matmul:
        """Return the cost of one expert's segment of about `m` rows, in one kernel for the segments of many experts.

        Only the run knows the exact rows, so the last tile is half empty on average. Memory traffic is the output only:
        segments share what they read (`weft.sim.costs.cost_of_tiles`).
        """
        rows, cols, _, efficiency = self._ways[:, self._ways[2] == 1]
        tiles = np.maximum(1.0, m / rows + 0.5) * np.ceil(n / cols)
        rate = self._rate(dtype) * efficiency * self.grouped_efficiency / self.compute_units
        tile_us = 2 * rows * cols * (k + self.tile_ramp) / rate
        best = int((tiles * tile_us).argmin())
        us = float(self._grouped_rounds(tiles[best], k) * tile_us[best])
        busy_us = float(tiles[best] * tile_us[best]) / self.compute_units
        return Matmul(us, busy_us / us if us else 1.0, m * n * ITEM_BYTES[dtype])

    def rounds_us(self, segments: Sequence[tuple[int, int]], n: int, k: int, dtype: str) -> float:
        """Return the least time of one kernel for all segments: rounds of tiles, of which each unit has one at a time.

        segments: (rows, times). Tiles are as in `weft.kernels.grouped_matmul`.
        """
        rows, cols = _GROUPED_TILES
        efficiency = np.array([self._tile_efficiency(r, c) for r, c in zip(rows, cols, strict=True)])
        rate = self._rate(dtype) * efficiency * self.grouped_efficiency / self.compute_units
        tiles = sum(times * np.maximum(1.0, m / rows + 0.5) for m, times in segments) * np.ceil(n / cols)
        return float((self._grouped_rounds(tiles, k) * 2 * rows * cols * (k + self.tile_ramp) / rate).min())

    def _grouped_rounds(self, tiles: Any, k: int) -> Any:
        """Return the time of this many tiles of a grouped GEMM, divided by the time of one tile.

        Units that the last of few rounds leaves idle share its tiles (`weft.kernels.grouped_matmul`).
        """
        whole, last = np.divmod(tiles / self.compute_units, 1.0)
        last = np.where((last < 0.05) & (whole > 0), 0.0, last)  # the number of rows is an estimate
        most = max(1, min(_GROUPED_SHARERS, k // _LEAST_K))
        sharers = np.where(whole < _FEW_ROUNDS, np.clip(np.floor(1.0 / np.maximum(last, 1e-9)), 1, most), 1)
        return whole + (last > 0) * (1.0 / sharers + (sharers > 1) * _ADD_UP_K / max(1, k))

    def tile_us(self, rows: int, cols: int, k: int, dtype: str) -> float:
        """Return the time of one tile on one unit, in a kernel that cuts a matmul into such tiles.

        A unit loads operands no faster than its part of `unit_loads_bytes_per_us`. It computes nothing while it stores the
        result.
        """
        load_us = (rows + cols) * k * ITEM_BYTES[dtype] / (self._unit_loads / self.compute_units)
        unit = self._rate(dtype) * self._tile_efficiency(rows, cols) / self.compute_units
        of_unit = (self.unit_bytes_per_us or self.hbm_bytes_per_us / self.compute_units) / ITEM_BYTES[dtype]
        computing_us = 2 * rows * cols * (k + self.tile_ramp) / unit
        return max(computing_us, load_us) + rows * cols / of_unit

    def matmul_us(self, m: int, n: int, k: int, dtype: str) -> float:
        """Return the time of a matmul alone on the GPU, with its launch."""
        return self.launch_us + self.matmul(m, n, k, dtype).time_us

    def with_measured(self, measured_us: Mapping[MatmulShape, float]) -> Model:
        return replace(self, measured_us=dict(measured_us))

    def scaled(self, *, units: float = 1.0, memory: float = 1.0, links: float = 1.0) -> Model:
        """Return the model of a larger GPU: one with `units` times as many compute units, each as fast as before, with `memory`
        times the memory bandwidth, or with `links` times the bandwidth between GPUs.

        All that depends on these numbers changes with them, as if it had been measured on the larger GPU. In a machine file
        measured rates are those of the whole GPU, so a changed number of units there does not make it faster.
        """
        if min(units, memory, links) <= 0:
            raise ValueError(f"units={units}, memory={memory}, links={links}: each factor must be positive")
        count = max(1, round(self.compute_units * units))
        more = count / self.compute_units

        def faster(curve: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
            return tuple((programs, rate * links) for programs, rate in curve)

        def sooner(how: Transfer, curve: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
            start_us = min(curve[0][1], self._start_us(how))
            return tuple((size, start_us + (us - start_us) / links) for size, us in curve)

        larger = replace(
            self,
            compute_units=count,
            matmul_flops_per_us={dtype: rate * more for dtype, rate in self.matmul_flops_per_us.items()},
            vector_flops_per_us=self.vector_flops_per_us * more,
            unit_loads_bytes_per_us=more * self._unit_loads * (1.0 if self.unit_loads_bytes_per_us else memory),
            unit_bytes_per_us=memory * (self.unit_bytes_per_us or self.hbm_bytes_per_us / self.compute_units),
            hbm_bytes_per_us=self.hbm_bytes_per_us * memory,
            wiring=self.wiring.scaled(links) if self.wiring.numbers else self.wiring,
            copy_bytes_per_us=self.copy_bytes_per_us * links,
            put_bytes_per_us=faster(self.put_bytes_per_us),
            get_bytes_per_us=faster(self.get_bytes_per_us),
            collective_bytes_per_us=self.collective_bytes_per_us * links,
            all_to_all_bytes_per_us=self.all_to_all_bytes_per_us and self.all_to_all_bytes_per_us * links,
            small_collective_bytes_per_us=self.small_collective_bytes_per_us
            and self.small_collective_bytes_per_us * links,
            measured_transfers_us={how: sooner(how, curve) for how, curve in self.measured_transfers_us.items()},
            measured_us={},
        )
        measured = {
            shape: us * larger.matmul_us(*shape) / replace(self, measured_us={}).matmul_us(*shape)
            for shape, us in self.measured_us.items()
        }
        return larger.with_measured(measured) if measured else larger

    def kernel_copy_bytes_per_us(self, put: bool) -> float:
        """Return the rate of a copying kernel to (`put`) or from a peer, interpolated between known numbers of units."""
        curve = self.put_bytes_per_us if put else self.get_bytes_per_us
        units, below = self.kernel_copy_units, (0, 0.0)
        for above in curve:
            if units <= above[0]:
                part = (units - below[0]) / (above[0] - below[0])
                return above[1] if math.isinf(above[1]) else below[1] + part * (above[1] - below[1])
            below = above
        return below[1]

    def transfer_us(self, how: Transfer, count: float) -> float:
        """Return the time of `count` bytes alone, after the latency or launch. Measured curves are interpolated in logarithms."""
        curve = self.measured_transfers_us.get(how)
        if curve and count > 0:
            return max(0.0, interpolated(curve, count) - self._start_us(how))
        rate = {
            "copy": self.copy_bytes_per_us,
            "put": self.kernel_copy_bytes_per_us(True),
            "get": self.kernel_copy_bytes_per_us(False),
            "all_gather": self.collective_bytes_per_us,
            "all_to_all": self.all_to_all_bytes_per_us or self.collective_bytes_per_us,
        }[how]
        us = count / rate
        if how in ("all_gather", "all_to_all") and self.small_collective_bytes_per_us is not None:
            us = min(count / self.small_collective_bytes_per_us, us + self.large_collective_us)
        return us

    @property
    def _unit_loads(self) -> float:
        return self.unit_loads_bytes_per_us or _UNIT_LOADS * self.hbm_bytes_per_us

    def _start_us(self, how: Transfer) -> float:
        """Return the time until the first byte moves."""
        if how in ("put", "get"):
            return self.launch_us
        return self.copy_latency_us if how == "copy" else self.collective_latency_us

    def _formula(self, m: int, n: int, k: int, dtype: str) -> Matmul:
        us, busy, traffic = (float(found[0]) for found in self._formulas(np.array([[m, n, k]]), dtype))
        return Matmul(us, busy, traffic)

    def _formulas(self, shapes: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (time, units busy, memory traffic), each [count], for shapes [count, 3], with the best tile and split of each."""
        m, n, k = (shapes.astype(float)[:, i, None] for i in range(3))
        rows, cols, split, efficiency = self._ways
        tiles = np.ceil(m / rows) * np.ceil(n / cols) * split
        waves = np.ceil(tiles / self.compute_units)
        rate = self._rate(dtype) * efficiency / self.compute_units
        tile_us = 2 * rows * cols * (np.ceil(k / split) + self.tile_ramp) / rate
        us = waves * tile_us
        # A split of k writes partial sums in fp32 and reads them again.
        us += np.where(split > 1, self.launch_us + 2 * split * m * n * 4 / self.hbm_bytes_per_us, 0.0)
        computing_us = us.min(1)
        # A split may be fastest by little and keep many more units busy. So the units are those of the fastest way without a
        # split; of equally fast ways, the one with the fewest units. That choice depends on no rate of the machine, so a better
        # machine never takes more of its units. Idle units are free for other kernels.
        whole = np.where(split == 1, us, np.inf)
        needed_us = np.where(whole == whole.min(1)[:, None], tiles * tile_us / self.compute_units, np.inf).min(1)
        needed_us = np.minimum(needed_us, computing_us)
        traffic = self._matmul_traffic(m, n, k, ITEM_BYTES[dtype])[:, 0]
        alone_us = np.maximum(computing_us, traffic / (self.matmul_memory * self.hbm_bytes_per_us))
        return alone_us, np.divide(needed_us, alone_us, out=np.zeros_like(needed_us), where=alone_us > 0), traffic

    def _rate(self, dtype: str) -> float:
        if dtype not in self.matmul_flops_per_us:
            known = ", ".join(self.matmul_flops_per_us)
            raise KeyError(
                f"{self.name}: no matmul rate for {dtype}, only for {known}: add compute.{dtype}_matmul_8192"
            )
        return self.matmul_flops_per_us[dtype]

    @property
    def _ways(self) -> np.ndarray:
        """All tiles and splits: [4, ways] of rows, cols, parts of k and efficiency."""
        return _all_ways(self.tile, self.tile_half)

    def _tile_efficiency(self, rows: int, cols: int) -> float:
        """Return the efficiency of a tile relative to the largest tile."""
        return _efficiency(self.tile, self.tile_half, rows, cols)

    def _matmul_traffic(self, m: np.ndarray, n: np.ndarray, k: np.ndarray, item_bytes: int) -> np.ndarray:
        """Return the bytes to and from memory. Concurrent tiles form an almost square block that shares its operands."""
        once = (m + n) * k * item_bytes
        area = self.compute_units * self.tile[0] * self.tile[1]
        rows = np.minimum(m, math.sqrt(area))
        cols = np.minimum(n, area / rows)
        again = (m * np.ceil(n / cols) + n * np.ceil(m / rows)) * k * item_bytes
        return np.where(once <= self.l2_bytes, once, again) + m * n * item_bytes

    @cached_property
    def _errors(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Errors of the formula at measured matmuls, by dtype: sizes in octaves [count, 3], log(measured / predicted) [count]."""
        found = {}
        for dtype in {shape[3] for shape in self.measured_us}:
            shapes = np.array([shape[:3] for shape in self.measured_us if shape[3] == dtype])
            measured = np.array([us for shape, us in self.measured_us.items() if shape[3] == dtype])
            us = self._formulas(shapes, dtype)[0]
            found[dtype] = np.log2(shapes), np.log(np.maximum(measured - self.launch_us, 0.01 * us) / us)
        return found

    def _correction(self, shape: MatmulShape) -> float:
        """Return the factor by which measured times exceed predicted times: the geometric mean over the nearest
        measured shapes, weighted by 1 / distance^4.

        Distances are in octaves. The power exceeds the three dimensions, so that many far shapes do not outweigh a few near ones.
        """
        *sizes, dtype = shape
        if dtype not in self._errors or min(sizes) < 1:
            return 1.0
        octaves, logs = self._errors[dtype]
        squares = ((octaves - np.log2(np.array(sizes, float))) ** 2).sum(1)
        nearest = int(squares.argmin())
        if squares[nearest] < 1e-9:
            return math.exp(logs[nearest])
        farthest = np.partition(squares, min(_NEAREST, len(squares)) - 1)[:_NEAREST].max()
        kept = squares <= farthest + 1e-9  # with all shapes at the last distance: they have no order
        weights = squares[kept] ** -2
        return math.exp(weights @ logs[kept] / weights.sum())


def interpolated(curve: Sequence[tuple[float, float]], count: float) -> float:
    """Return the time of `count` bytes from points (bytes, us) by rising bytes.

    Log-log linear between points, the first time below the first point, and the last point's rate above the last.
    """
    sizes, times = np.array(curve, float).T
    if count > sizes[-1]:
        return float(times[-1] * count / sizes[-1])
    return math.exp(np.interp(math.log(count), np.log(sizes), np.log(times)))


@lru_cache(maxsize=64)
def _all_ways(tile: tuple[int, int], half: float) -> np.ndarray:
    ways = itertools.product(_tiles(*tile), _SPLITS)
    return np.array([(r, c, split, _efficiency(tile, half, r, c)) for (r, c), split in ways]).T


def _efficiency(tile: tuple[int, int], half: float, rows: int, cols: int) -> float:
    return (1 + half * (1 / tile[0] + 1 / tile[1])) / (1 + half * (1 / rows + 1 / cols))


def _tiles(rows: int, cols: int) -> list[tuple[int, int]]:
    """Return tiles as in cuBLAS: halvings of the largest tile, three quarters of its width, and their transposes."""
    heights, widths = _halves(rows), {*_halves(cols), max(cols * 3 // 4, _SMALLEST_TILE)}
    return sorted({tile for h, w in itertools.product(heights, widths) for tile in ((h, w), (w, h))}, reverse=True)


def _halves(extent: int) -> list[int]:
    return [extent, *_halves(extent // 2)] if extent >= 2 * _SMALLEST_TILE else [extent]
