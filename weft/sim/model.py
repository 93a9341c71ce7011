"""The performance model of a machine: measured numbers, and formulas for the times of steps, in microseconds and bytes.

A matmul [m, k] @ [k, n] is cut into tiles, which the compute units compute in waves. The last wave may leave units idle. Smaller
tiles keep more units busy, but reuse operands less. k may be split over several units. cuBLAS or rocBLAS is assumed to choose
the fastest tile and split.

    time(tile, s) = start + ceil(tiles s / units) 2 rows cols (k / s + ramp) / (rate of a unit x efficiency(tile)) + reduction(s)
    efficiency(rows, cols) = 1 / (1 + tile_half (1 / rows + 1 / cols))

    start         time besides the launch in which the GEMM neither computes nor waits for memory (`Model.matmul_start_us`)
    s             number of parts into which k is split
    tiles         number of tiles of the result; all their parts together are `tiles s`
    ramp          time of a tile's prologue and epilogue, in units of k; for fp8 a number of its own (`Model.fp8_tile_ramp`)
    reduction(s)  time to add the s partial results of all tiles; 0 if s is 1
    tile_half     a measured constant: the larger it is, the slower are small tiles. cuBLAS's tiles may have a number of their own

A copy by copy engine takes latency + bytes / bandwidth. Concurrent steps share resources (`weft.sim.engine`). Copies
also slow down the kernels of the GPU whose memory they access, in proportion to the bytes, because copies use the GPU's
caches and memory. Copy kernels also hold compute units, and must wait while a cuBLAS GEMM keeps all units. These are
the contention losses of "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV-A. Power
is not modelled, as in that paper.

Source of the wave model: "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from weft.hw.topology import Wiring
from weft.schedule import ITEM_BYTES
from weft.sim.tile_shapes import all_ways, efficiency

MatmulShape = tuple[int, int, int, str]
_UNIT_LOADS = 2.0
"""The bandwidth of all units together from the cache, divided by the memory bandwidth, if `unit_loads_bytes_per_us` is
unknown.
"""
_NEAREST = 8
"""The number of nearest measured matmuls that correct the formula for another shape. On a grid, 8 is the number of
corners of a cell.
"""

Transfer: TypeAlias = Literal["copy", "put", "get", "all_gather", "all_to_all", "reduce_scatter"]
"""A copy by copy engine, a kernel's stores to a peer ("put") or loads from it ("get"), or an NCCL collective."""


class Matmul(NamedTuple):
    """The cost of a matmul alone on its GPU, without the launch."""

    time_us: float
    units_busy: float  # average fraction of the GPU's compute units
    hbm_bytes: float


_GROUPED_TILES = np.array([128, 128, 64, 64]), np.array([256, 128, 256, 128])
"""(rows, columns) of the tile shapes of grouped GEMMs."""
_FEW_ROUNDS, _GROUPED_SHARERS, _LEAST_K, _ADD_UP_K = 4, 8, 1024, 640
"""If a grouped GEMM has at most `_FEW_ROUNDS` rounds, up to `_GROUPED_SHARERS` units share each tile of its last round. Each unit
computes at least `_LEAST_K` of K. Reducing the units' results takes as long as computing `_ADD_UP_K` of K."""
_TWO_ROUNDS_K, _SECOND_PART_K = 12800, 1920
"""From a K of `_TWO_ROUNDS_K` on, tiles of a last round for 1/2 to 2/3 of the units are cut into three parts, which take two
rounds. A part takes as long as a third of the tile and `_SECOND_PART_K` of K."""


@dataclass(frozen=True)
class Model:
    """The numbers of a machine. Rates are bytes or operations per microsecond. A rate may be `inf`, and a time may be
    0, for work that takes no time.
    """

    name: str
    world_size: int  # the number of ranks of schedules for this model; 0: any

    compute_units: int
    matmul_flops_per_us: Mapping[str, float]  # by dtype: rate of all units with largest tiles, for long k
    tile: tuple[int, int]  # (rows, columns) of the largest tile
    tile_half: float
    tile_ramp: float  # the time of a tile's prologue and epilogue, in units of k
    vector_flops_per_us: float
    launch_us: float  # the gap between two kernels of a lane
    hbm_bytes_per_us: float  # memory bandwidth, reads plus writes
    l2_bytes: float

    wiring: Wiring  # the topology, which defines the links that a flow from one GPU to another uses
    copy_latency_us: float
    copy_bytes_per_us: float
    copy_engines: int
    copy_row_us: float  # additional time per row of a two-dimensional copy
    kernel_copy_units: int  # compute units that one copy kernel to or from a peer holds
    put_bytes_per_us: tuple[tuple[int, float], ...]  # (units, rate) of a kernel that stores to a peer, sorted by units
    get_bytes_per_us: tuple[tuple[int, float], ...]  # the same for a kernel that loads from a peer
    collective_latency_us: float
    collective_bytes_per_us: float  # bytes that a rank receives
    collective_units: int
    copy_disturbance: float  # the fraction of a GPU's compute that is lost per byte/us that engines read or write there
    kernel_copy_disturbance: float  # the same for copy kernels, in addition to the units that they hold
    signal_local_us: float  # the time from a set to the end of the wait, within a rank
    signal_remote_us: float
    signal_kernel_us: float  # the same for a set on a peer by a copy kernel
    host_step_us: float  # CPU time to issue a step, if the CPU is not ahead of the device

    tile_step: int = 0
    """cuBLAS's tiles may have any width that is a multiple of this number; 0: only fractions of the largest width."""
    library_tile_half: float | None = None  # `tile_half` of cuBLAS's tiles; None: `tile_half`
    fp8_tile_ramp: float | None = None
    """The time of the prologue and epilogue of a tile of an fp8 GEMM, in units of k; None: `tile_ramp`.

    cuBLAS's kernels for bf16 store a tile while they compute the next tile. Those for fp8 multiply twice as fast, but stop
    to scale, convert and store each tile.
    """
    matmul_start_us: float = 0.0  # of cuBLAS GEMMs and grouped GEMMs: see `start` above
    unit_bytes_per_us: float | None = None
    """The memory bandwidth of one compute unit that computes tiles; None: the GPU's bandwidth / the number of units."""
    copy_gets: float = 1.0  # the rate of copies from a peer by copy engine, divided by the rate of copies to a peer
    memory_bytes: float = math.inf  # the capacity of a GPU's memory
    measured_us: Mapping[MatmulShape, float] = field(default_factory=dict)
    """Measured times of matmuls (m, n, k, dtype) alone, with launch. They correct the formula for nearby shapes."""
    sustained: float = 1.0
    """The time of a long matmul in sustained work, at a lower clock, divided by its time in a short measurement."""
    measured_transfers_us: Mapping[Transfer, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """Measured curves of (bytes, us), sorted by bytes, with latency or launch. They replace latency + bytes / rate."""
    matmul_memory: float = 1.0
    """The fraction of the memory bandwidth that a cuBLAS GEMM reaches."""
    matmul_keeps: float = 0.0
    """The fraction of a cuBLAS GEMM's compute units that later kernels cannot use until the GEMM ends."""
    first_bag_us: float = 0.0
    """The time from the start of a pooling kernel to its first rows: it reads tables, offsets and ids, one after the other."""
    l2_copies: float = 1.0
    """The number of parts of the L2 that each keep a copy of data that all compute units read."""
    tile_signal_us: float = 0.0
    """The additional time of a kernel for each signal that its tiles set."""
    grouped_loads_bytes_per_us: float | None = None
    """The rate at which all units together load operands of a grouped GEMM from the cache; None: no limit."""
    unit_loads_bytes_per_us: float | None = None
    """The rate at which all units together load matmul operands from the cache; None: `_UNIT_LOADS` * memory bandwidth."""
    tile_part_us: float | None = None
    """If several units share a tile: the additional time per unit. None: units do not share tiles."""
    stored_late_bytes: float = 0.0
    """The bytes of a GEMM's stores to a peer that no computation hides."""
    loaded_start_us: float = 0.0
    """The additional time of a kernel that reads a peer's memory, besides bytes / rate."""
    stored_end_us: float = 0.0
    """The time from a GEMM's last store into a peer's memory to the GEMM's end."""
    library_grouped: tuple[float, float] = (1.0, 1.0)
    """The fractions of the matmul rate and of the memory bandwidth that torch's grouped matmul reaches."""
    host_read_us: float = 20.0
    """The time from the end of a kernel to the start of the next step, if the CPU reads the kernel's result in between.
    """
    host_call_us: float = 0.0  # the CPU time to issue a cuBLAS GEMM
    host_late_us: float = 0.0  # the CPU time to issue a step with a dynamic size
    host_dynamic_us: float = 0.0
    """The additional CPU time of a run with dynamic sizes, besides `host_late_us` per step."""
    grouped_efficiency: float = 1.0
    """The compute rate of a grouped GEMM, divided by the rate of one large matmul."""
    own_collectives: Mapping[Transfer, tuple[float, float]] = field(default_factory=dict)
    """The collectives whose `collective_bytes_per_us` and `large_collective_us` differ from an all-gather's: both numbers."""
    all_reduce: float = 1.0
    """The time of an all-reduce, divided by the time of an all-gather that sends the same number of bytes."""
    small_collective_bytes_per_us: float | None = None
    """The rate of NCCL's (or RCCL's) second algorithm, for small collectives; None if there is only one algorithm. The
    algorithm for large collectives takes `large_collective_us` longer to start. The faster algorithm is used.
    """
    large_collective_us: float = 0.0
    lanes_run_us: float = 0.0
    """The additional time of a run with several lanes, to synchronise them with the caller's stream at both ends."""
    graph_run_us: float = 0.0
    """In a CUDA graph, the additional time of a run with several lanes."""
    graph_signal_us: float = 0.0
    """In a CUDA graph, the additional time of a wait for a kernel of another lane, on a lane with copies by copy engine."""
    graph_remote_us: float = 0.0
    """In a CUDA graph, the additional time of a wait for a peer's kernel."""
    graph_collective_us: float = 0.0
    """In a CUDA graph, the additional time of a collective at the start of a lane. After a kernel, `graph_run_us`
    applies instead.
    """
    _known: dict[MatmulShape, Matmul] = field(default_factory=dict, init=False, repr=False, compare=False)
    costs: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A cache of the costs of steps, for `weft.sim.lower`. The schedules of one problem share most steps."""

    def __hash__(self) -> int:
        return hash((self.name, self.world_size))  # the dicts of measured numbers are not hashable

    def matmul(self, m: int, n: int, k: int, dtype: str) -> Matmul:
        """Return the cost of [m, k] @ [k, n] alone on the GPU, without the launch."""
        shape = (m, n, k, dtype)
        if shape not in self._known:
            found = self._formula(m, n, k, dtype)
            us = found.time_us * self._correction(shape)
            self._known[shape] = Matmul(us, found.units_busy, min(found.hbm_bytes, us * self.hbm_bytes_per_us))
        return self._known[shape]

    def segment(self, m: int, n: int, k: int, dtype: str) -> Matmul:
        """Return the cost of one expert's segment of about `m` rows in a grouped GEMM.

        The exact number of rows is known only at run time, so the last tile is assumed to be half empty. The memory
        traffic includes only the output, because reads are counted once for all segments
        (`weft.sim.tile_costs.cost_of_tiles`).
        """
        ways = all_ways(self.tile, self.tile_half)
        rows, cols, _, shares = ways[:, ways[2] == 1]
        tiles = np.maximum(1.0, m / rows + 0.5) * np.ceil(n / cols)
        rate = self._rate(dtype) * shares * self.grouped_efficiency / self.compute_units
        tile_us = 2 * rows * cols * (k + self._ramp(dtype)) / rate
        best = int((tiles * tile_us).argmin())
        us = float(self._grouped_rounds(tiles[best], k) * tile_us[best])
        busy_us = float(tiles[best] * tile_us[best]) / self.compute_units
        return Matmul(us, busy_us / us if us else 1.0, m * n * ITEM_BYTES[dtype])

    def rounds_us(self, segments: Sequence[tuple[int, int]], n: int, k: int, dtype: str) -> float:
        """Return a lower bound on the time in us of a grouped GEMM, in which every compute unit computes one tile in
        each round.

        A tile takes as long as its multiplications, or as the loads of its operands from the cache, whichever is
        longer. The shapes of tiles are as in `weft.kernels.grouped_matmul`.

        segments: the sizes of the experts' segments of rows, as pairs (number of rows, number of segments with this many rows).
        """
        rows, cols = _GROUPED_TILES
        shares = np.array([self._tile_efficiency(r, c) for r, c in zip(rows, cols, strict=True)])
        rate = self._rate(dtype) * shares * self.grouped_efficiency / self.compute_units
        tiles = sum(times * np.maximum(1.0, m / rows + 0.5) for m, times in segments) * np.ceil(n / cols)
        tile_us = 2 * rows * cols * (k + self._ramp(dtype)) / rate
        if self.grouped_loads_bytes_per_us:
            loads_us = (rows + cols) * k * ITEM_BYTES[dtype] / (self.grouped_loads_bytes_per_us / self.compute_units)
            tile_us = np.maximum(tile_us, loads_us)
        return float((self._grouped_rounds(tiles, k) * tile_us).min())

    def _grouped_rounds(self, tiles: Any, k: int) -> Any:
        """Return the time of `tiles` tiles of a grouped GEMM, in units of the time of one tile.

        If there are few rounds, several units share each tile of the last round (`weft.kernels.grouped_matmul`).
        """
        whole, last = np.divmod(tiles / self.compute_units, 1.0)
        # ignore a nearly empty round, because the number of rows is an estimate
        last = np.where((last < 0.05) & (whole > 0), 0.0, last)
        most = max(1, min(_GROUPED_SHARERS, k // _LEAST_K))
        sharers = np.where(whole < _FEW_ROUNDS, np.clip(np.floor(1.0 / np.maximum(last, 1e-9)), 1, most), 1)
        of_last = 1.0 / sharers + (sharers > 1) * _ADD_UP_K / max(1, k)
        if k >= _TWO_ROUNDS_K and most > 2:
            of_last = np.where(
                (sharers == 1) & (whole < _FEW_ROUNDS) & (3 * last <= 2), 2 * (1 / 3 + _SECOND_PART_K / k), of_last
            )
        return whole + (last > 0) * of_last

    def tile_us(self, rows: int, cols: int, k: int, dtype: str) -> float:
        """Return the time in us of one tile on one compute unit, in a kernel that cuts a matmul into such tiles.

        A unit loads operands at most at its share of `unit_loads_bytes_per_us`, and does not compute while it stores
        the result.
        """
        load_us = (rows + cols) * k * ITEM_BYTES[dtype] / (self._unit_loads / self.compute_units)
        unit = self._rate(dtype) * self._tile_efficiency(rows, cols) / self.compute_units
        of_unit = (self.unit_bytes_per_us or self.hbm_bytes_per_us / self.compute_units) / ITEM_BYTES[dtype]
        computing_us = 2 * rows * cols * (k + self._ramp(dtype)) / unit
        return max(computing_us, load_us) + rows * cols / of_unit

    def matmul_us(self, m: int, n: int, k: int, dtype: str) -> float:
        """Return the time in us of a matmul alone on the GPU, with its launch."""
        return self.launch_us + self.matmul(m, n, k, dtype).time_us

    def with_measured(self, measured_us: Mapping[MatmulShape, float]) -> Model:
        """Return this model with these measured GEMM times, as {(m, n, k, dtype): us}, in place of earlier ones."""
        return replace(self, measured_us=dict(measured_us))

    def scaled(self, *, units: float = 1.0, memory: float = 1.0, links: float = 1.0) -> Model:
        """Return the model of a hypothetical GPU. All dependent rates are scaled too, as if they had been measured on
        this GPU.

        Args:
            units: factor of the number of compute units, each as fast as before.
            memory: factor of the memory bandwidth.
            links: factor of the bandwidth between GPUs.
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
            grouped_loads_bytes_per_us=self.grouped_loads_bytes_per_us and more * self.grouped_loads_bytes_per_us,
            unit_loads_bytes_per_us=more * self._unit_loads * (1.0 if self.unit_loads_bytes_per_us else memory),
            unit_bytes_per_us=memory * (self.unit_bytes_per_us or self.hbm_bytes_per_us / self.compute_units),
            hbm_bytes_per_us=self.hbm_bytes_per_us * memory,
            wiring=self.wiring.scaled(links) if self.wiring.numbers else self.wiring,
            copy_bytes_per_us=self.copy_bytes_per_us * links,
            put_bytes_per_us=faster(self.put_bytes_per_us),
            get_bytes_per_us=faster(self.get_bytes_per_us),
            collective_bytes_per_us=self.collective_bytes_per_us * links,
            own_collectives={how: (rate * links, late_us) for how, (rate, late_us) in self.own_collectives.items()},
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
        """Return the rate of a copy kernel, interpolated for its number of units.

        put: True for a copy to a peer, False for a copy from a peer.
        """
        curve = self.put_bytes_per_us if put else self.get_bytes_per_us
        units, below = self.kernel_copy_units, (0, 0.0)
        for above in curve:
            if units <= above[0]:
                part = (units - below[0]) / (above[0] - below[0])
                return above[1] if math.isinf(above[1]) else below[1] + part * (above[1] - below[1])
            below = above
        return below[1]

    def transfer_us(self, how: Transfer, count: float) -> float:
        """Return the time in us of a transfer of `count` bytes, without latency or launch.

        count: for collectives, the bytes that a rank receives. Measured curves are interpolated linearly in logarithms. A
            calibration measures no reduce-scatter, so an all-gather's curve then replaces it.
        """
        if how == "reduce_scatter" and "all_gather" in self.measured_transfers_us:
            how = "all_gather"
        curve = self.measured_transfers_us.get(how)
        if curve and count > 0:
            return max(0.0, interpolated(curve, count) - self._start_us(how))
        if how == "copy":
            return count / self.copy_bytes_per_us
        if how in ("put", "get"):
            return count / self.kernel_copy_bytes_per_us(how == "put")
        of_all_gather = self.collective_bytes_per_us, self.large_collective_us
        rate, late_us = self.own_collectives.get(how, of_all_gather)
        us = count / rate
        if self.small_collective_bytes_per_us is not None:
            us = min(count / self.small_collective_bytes_per_us, us + late_us)
        return us

    @property
    def _unit_loads(self) -> float:
        return self.unit_loads_bytes_per_us or _UNIT_LOADS * self.hbm_bytes_per_us

    def _start_us(self, how: Transfer) -> float:
        """Return the time in us until the first byte of a transfer moves: the latency of a copy engine, or the launch
        of a kernel.
        """
        if how in ("put", "get"):
            return self.launch_us
        return self.copy_latency_us if how == "copy" else self.collective_latency_us

    def _formula(self, m: int, n: int, k: int, dtype: str) -> Matmul:
        us, busy, traffic = (float(found[0]) for found in self._formulas(np.array([[m, n, k]]), dtype))
        return Matmul(us, busy, traffic)

    def _formulas(self, shapes: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (time in us, fraction of busy units, memory traffic in bytes) of matmuls, each with its best tile and
        split, as arrays `[count]`. The numbers are computed by formulas, without corrections from measurements.

        shapes: m, n and k of each matmul, `[count, 3]`.
        """
        m, n, k = (shapes.astype(float)[:, i, None] for i in range(3))
        rows, cols, split, shares = self._ways
        tiles = np.ceil(m / rows) * np.ceil(n / cols) * split
        waves = np.ceil(tiles / self.compute_units)
        rate = self._rate(dtype) * shares / self.compute_units
        tile_us = 2 * rows * cols * (np.ceil(k / split) + self._ramp(dtype)) / rate
        us = waves * tile_us
        # A split of k writes partial sums in fp32 and reads them again.
        us += np.where(split > 1, self.launch_us + 2 * split * m * n * 4 / self.hbm_bytes_per_us, 0.0)
        computing_us = us.min(1)
        # A split may be only slightly faster but keep many more units busy. So the number of busy units is computed for
        # the fastest tile without a split, and among equally fast tiles for the one with the fewest units. This number
        # does not depend on the rates of the machine, so a faster machine never has fewer idle units for other kernels.
        whole = np.where(split == 1, us, np.inf)
        needed_us = np.where(whole == whole.min(1)[:, None], tiles * tile_us / self.compute_units, np.inf).min(1)
        needed_us = np.minimum(needed_us, computing_us)
        traffic = self._matmul_traffic(m, n, k, ITEM_BYTES[dtype])[:, 0]
        alone_us = self.matmul_start_us + np.maximum(
            computing_us, traffic / (self.matmul_memory * self.hbm_bytes_per_us)
        )
        return alone_us, np.divide(needed_us, alone_us, out=np.zeros_like(needed_us), where=alone_us > 0), traffic

    def _ramp(self, dtype: str) -> float:
        return self.tile_ramp if dtype != "fp8" or self.fp8_tile_ramp is None else self.fp8_tile_ramp

    def _rate(self, dtype: str) -> float:
        if dtype not in self.matmul_flops_per_us:
            known = ", ".join(self.matmul_flops_per_us)
            raise KeyError(
                f"{self.name}: the machine file has no matmul rate for {dtype}, only for {known}: add compute.{dtype}_matmul_8192"
            )
        return self.matmul_flops_per_us[dtype]

    @property
    def _ways(self) -> np.ndarray:
        """The ways in which cuBLAS computes a matmul (`weft.sim.tile_shapes.all_ways`)."""
        return all_ways(self.tile, self.library_tile_half or self.tile_half, self.tile_step)

    def _tile_efficiency(self, rows: int, cols: int) -> float:
        """Return the efficiency of a tile relative to the largest tile."""
        return efficiency(self.tile, self.tile_half, rows, cols)

    def _matmul_traffic(self, m: np.ndarray, n: np.ndarray, k: np.ndarray, item_bytes: int) -> np.ndarray:
        """Return the bytes that matmuls read and write. Tiles that run concurrently form a nearly square block, and
        share the reads of operands.
        """
        once = (m + n) * k * item_bytes
        area = self.compute_units * self.tile[0] * self.tile[1]
        rows = np.minimum(m, math.sqrt(area))
        cols = np.minimum(n, area / rows)
        again = (m * np.ceil(n / cols) + n * np.ceil(m / rows)) * k * item_bytes
        return np.where(once <= self.l2_bytes, once, again) + m * n * item_bytes

    @cached_property
    def _errors(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The errors of the formula at measured shapes: {dtype: (shapes, errors)}. shapes: log2 of m, n and k, `[count,
        3]`. errors: log(measured / predicted), `[count]`.
        """
        found = {}
        for dtype in {shape[3] for shape in self.measured_us}:
            shapes = np.array([shape[:3] for shape in self.measured_us if shape[3] == dtype])
            measured = np.array([us for shape, us in self.measured_us.items() if shape[3] == dtype])
            us = self._formulas(shapes, dtype)[0]
            found[dtype] = np.log2(shapes), np.log(np.maximum(measured - self.launch_us, 0.01 * us) / us)
        return found

    def _correction(self, shape: MatmulShape) -> float:
        """Return measured / predicted time near `shape`: the geometric mean over the nearest measured shapes.

        Weights are 1 / distance^4. Distances are between the logarithms (base 2) of the sizes of shapes. The exponent exceeds
        the number of dimensions (3), so that many distant shapes do not outweigh a few near ones.
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
        kept = squares <= farthest + 1e-9  # keep all shapes that are as far away as the last
        weights = squares[kept] ** -2
        return math.exp(weights @ logs[kept] / weights.sum())


def interpolated(curve: Sequence[tuple[float, float]], count: float) -> float:
    """Return the time in us of `count` bytes, interpolated on a curve of points (bytes, us) that is sorted by bytes.

    Between points, log(us) is linear in log(bytes). Below the first point the time is constant. Above the last point
    the time is proportional to `count`.
    """
    sizes, times = np.array(curve, float).T
    if count > sizes[-1]:
        return float(times[-1] * count / sizes[-1])
    return math.exp(np.interp(math.log(count), np.log(sizes), np.log(times)))
