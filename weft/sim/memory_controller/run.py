"""Simulations of the memory controller: a GEMM alone, a GEMM fused with a ring, and the ring's collectives alone.

An output map defines the destination of each tile of the GEMM, with a row for each tile in the order of computation.
GPU schedules are built from the same maps, such as `ring_reduce_scatter(gemm.tiles(gpu), world)`.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from weft import _core
from weft.builders.output_map.map import OutputMap
from weft.builders.output_map.routes import Routes, routes_of
from weft.sim.memory_controller.machine import TrackingGpu

Arbitration: TypeAlias = Literal["round_robin", "compute_first", "mca"]
OwnWrites: TypeAlias = Literal["after_reads", "alternating", "watermarks", "in_order"]
"""The controller's policy for the GEMM's stores while the GEMM also reads. watermarks: a write queue as in Accel-Sim."""

_CACHED, _ADDED, _REMOTE, _STORED = range(4)
BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True)
class HardwareGemm:
    """The GEMM x [tokens, k] @ w [k, features] in fp16, computed tile by tile."""

    tokens: int
    features: int
    k: int

    def __post_init__(self) -> None:
        if min(self.tokens, self.features, self.k) < 1:
            raise ValueError(
                f"tokens={self.tokens}, features={self.features}, k={self.k}: nothing to multiply; each must be at least 1"
            )

    @property
    def flop(self) -> float:
        return 2.0 * self.tokens * self.features * self.k

    @property
    def out_bytes(self) -> int:
        return BYTES_PER_ELEMENT * self.tokens * self.features

    def grid(self, gpu: TrackingGpu) -> tuple[int, int]:
        """Return (number of rows of tiles, number of columns of tiles)."""
        return -(-self.tokens // gpu.count("gemm.tile_tokens")), -(-self.features // gpu.count("gemm.tile_features"))

    def tiles(self, gpu: TrackingGpu) -> int:
        rows, columns = self.grid(gpu)
        return rows * columns

    def order(self, gpu: TrackingGpu) -> list[tuple[int, int]]:
        """Return (row, column) of each tile in the order of computation: block by block of `gemm.raster_columns`
        columns. With `gemm.raster_turns`, every second block is computed from the last row to the first.
        """
        (rows, columns), wide = self.grid(gpu), gpu.count("gemm.raster_columns")
        found = []
        for block, first in enumerate(range(0, columns, wide)):
            back = block % 2 and gpu["gemm.raster_turns"]
            along = range(rows - 1, -1, -1) if back else range(rows)
            found += [(row, column) for row in along for column in range(first, min(columns, first + wide))]
        return found


@dataclass(frozen=True, slots=True)
class ControllerRun:
    """The result of a simulation. Times are in us. Bytes count reads and writes of the GPU's memory.

    us: the time of the last access, at which the simulation ends.
    gemm_us: the time at which the last work-group ended; 0 without a GEMM.
    busy: the fraction of time in which memory was busy.
    tracker_most: the maximum number of tracker entries in use.
    tracker_stall_us: the time in which a work-group waited for an entry.
    threshold: the queue length above which MCA (the paper's arbitration) held the ring back; 0 if it never did.
    intensity: the fraction of the first stage in which memory served the GEMM; MCA derives its threshold from this
        fraction. In the first stage the compute units run their first work-groups, and the ring sends nothing.
    waiting_most: the maximum number of the ring's bytes that waited for the controller.
    bins: the traffic over time: for each time bin, (GEMM reads, GEMM writes, ring reads, ring writes) in bytes. Empty unless
        bin_us was given.
    """

    us: float
    gemm_us: float
    gemm_read: float
    gemm_write: float
    ring_read: float
    ring_write: float
    link: float
    busy: float
    tracker_most: int
    tracker_stall_us: float
    threshold: int
    intensity: float
    waiting_most: float
    bins: list[list[float]] = field(default_factory=list, repr=False)

    @property
    def memory_bytes(self) -> float:
        return self.gemm_read + self.gemm_write + self.ring_read + self.ring_write


def alone(gemm: HardwareGemm, gpu: TrackingGpu, *, bypass: bool = False, bin_us: float = 0.0) -> ControllerRun:
    """Simulate a GEMM without communication.

    bypass: True if the GEMM's output bypasses the last-level cache.
    bin_us: the length of the time bins in the result's `bins`; 0 for no bins.
    """
    setup = _with_gemm(gemm, gpu, "round_robin", "watermarks", bin_us)
    setup.chunk = [0] * gemm.tiles(gpu)
    setup.output, setup.copied, setup.expected = [_STORED if bypass else _CACHED], [0], [0]
    setup.lands = setup.peer = setup.link = [0]
    return _run(setup)


def fused(
    gemm: HardwareGemm, output: OutputMap, world: int, gpu: TrackingGpu, arbitration: Arbitration, *,
    own_writes: OwnWrites = "watermarks", bin_us: float = 0.0, coarse: float = 1.0,
) -> ControllerRun:  # fmt: skip
    """Simulate a GEMM fused with a reduce-scatter, on one of `world` identical GPUs.

    A tile that the map sends with `remote_map` goes over the link. All other tiles are stored in the GPU's own memory,
    which adds them to the partial sums that it has. If a tile has a `dma_map`, the tracker counts the updates of each
    piece (`weft.sim.memory_controller`), and the last update starts the copy. The peer sends the same bytes as this GPU
    at the same time, and they arrive after the link's latency. If the map has several targets, there is a link to each
    target, and the links share `link.bandwidth`.

    output: the reduce-scatter's map, which defines the destination of each tile (`weft.builders.output_map`).
    arbitration: the order of the GEMM's and the ring's accesses: alternating ("round_robin"), the GEMM's first
        ("compute_first"), or the paper's policy ("mca").
    own_writes: the order of the GEMM's own stores and reads, one of `OwnWrites`. "watermarks" is a write queue as in
        Accel-Sim.
    bin_us: the length of the time bins in the result's `bins`; 0 for no bins.
    coarse: the factor by which queue entries are larger than on the GPU. Above 1, the simulation is faster and less
        exact.

    Raise `ValueError` if the arbitration is unknown, if the map's rows differ from the number of tiles, or if ranks
    differ by more than their position in the ring.
    """
    routes = _routes(gemm, [output], world, gpu, arbitration, own_writes)
    if not routes.alike:
        raise ValueError(
            f"the tiles of the {world} ranks differ by more than a shift along the ring, so one GPU cannot represent all: use "
            "fused_on_all"
        )
    setup = _with_gemm(gemm, gpu, arbitration, own_writes, bin_us, coarse)
    return _run(_mapped(setup, routes, 0, one_for_all=True))


def fused_on_all(
    gemm: HardwareGemm, outputs: Sequence[OutputMap], gpu: TrackingGpu, arbitration: Arbitration
) -> list[ControllerRun]:
    """Simulate a GEMM fused with a reduce-scatter on all ranks, and return the result of each rank.

    outputs: the output map of each rank. They may differ.
    """
    routes = _routes(gemm, outputs, len(outputs), gpu, arbitration, "watermarks")
    setups = [
        _mapped(_with_gemm(gemm, gpu, arbitration, "watermarks", 0.0), routes, rank, one_for_all=False)
        for rank in range(len(outputs))
    ]
    return _run_all(setups)


def _routes(
    gemm: HardwareGemm, outputs: Sequence[OutputMap], world: int, gpu: TrackingGpu, arbitration: str, own_writes: str
) -> Routes:
    if arbitration not in get_args(Arbitration) or own_writes not in get_args(OwnWrites):
        raise ValueError(
            f"arbitration={arbitration!r}, own_writes={own_writes!r}: use one of {', '.join(get_args(Arbitration))}, and one of "
            f"{', '.join(get_args(OwnWrites))}"
        )
    tiles, chunks = gemm.tiles(gpu), outputs[0].chunks
    for output in outputs:
        if (output.rows, output.chunks) != (tiles, chunks):
            raise ValueError(
                f"the map has {output.rows} rows in {output.chunks} chunks, but the GEMM has {tiles} tiles: use "
                f"OutputMap(rows={tiles}, chunks={chunks})"
            )
    if tiles % chunks:
        raise ValueError(
            f"{tiles} tiles in {chunks} chunks: every chunk must have the same number of tiles; use another tile size"
        )
    return routes_of("reduce_scatter", world, chunks, tuple((output.order, output.entries) for output in outputs))


def _mapped(setup: _core.ControllerSetup, routes: Routes, rank: int, *, one_for_all: bool) -> _core.ControllerSetup:
    """Write the destinations of a rank's tiles into `setup`, and return `setup`.

    routes: the destinations of all ranks' tiles.
    one_for_all: True if only this rank is simulated. Then each of its sends is also counted as a receive, from an identical
        peer.
    """
    tiles = len(setup.a)
    setup.chunk = [tile * routes.chunks // tiles for tile in range(tiles)]
    output, copied, expected, lands, peer, link = [], [], [], [], [], []
    places = routes.order[0 if routes.alike else rank]
    if routes.alike:  # rank 0 represents all
        places = tuple((place + rank * routes.per_rank) % routes.chunks for place in places)
    targets = list(dict.fromkeys(send.to for place in places for send in routes.sends(rank, place)))
    for place in places:
        (send,) = routes.sends(rank, place) or (None,)
        remote = send is not None and send.how == "remote_map"
        output.append(_REMOTE if remote else _ADDED)
        copied.append(int(send is not None and not remote))
        expected.append(0 if remote else 1 + len(routes.arriving(rank, place)))
        at, seen = routes.representative(send.to if send else rank, place)
        lands.append(routes.number[at][seen] if send else 0)
        peer.append(send.to if send and not one_for_all else 0)
        link.append(targets.index(send.to) if send else 0)
    setup.output, setup.copied, setup.expected = output, copied, expected
    setup.lands, setup.peer, setup.link = lands, peer, link
    setup.link_ns *= len(targets)
    if not any(copied):
        setup.sets = 0
    return setup


def reduce_scatter(
    total: float, world: int, gpu: TrackingGpu, *, near_memory: bool = False, units: int = 0
) -> ControllerRun:
    """Simulate a ring reduce-scatter of `total` bytes on each rank, without a GEMM.

    In each step of the ring, a kernel reads the rank's own chunk and the arrived chunk, and sends the sum to the next
    rank. In the last step, the kernel writes the sum to memory instead.

    near_memory: True if memory adds in place of the kernel, and copies send each piece when it has been added.
    units: the compute units of the kernel; 0 for no limit.
    """
    return _ring(total, world, gpu, copies=1 if near_memory else 2, update=near_memory, units=units)


def all_gather(total: float, world: int, gpu: TrackingGpu, *, units: int = 0) -> ControllerRun:
    """Simulate a ring all-gather in which a kernel sends the chunks. Its result has `total` bytes.

    units: the compute units of the kernel; 0 for no limit.
    """
    return _ring(total, world, gpu, copies=1, update=False, units=units)


def _ring(total: float, world: int, gpu: TrackingGpu, *, copies: int, update: bool, units: int) -> ControllerRun:
    if world < 2 or total <= 0:
        raise ValueError(f"{total:g} bytes on {world} ranks: nothing to send; use at least 1 byte and 2 ranks")
    setup = _memory(gpu, 0.0)
    setup.arbitration, setup.own_writes, setup.made, setup.copies = 0, 0, True, copies
    setup.arrival = 2 if update else 1
    pieces = max(1, math.ceil(total / world / (32 * 1024)))
    setup.chunk = [chunk for chunk in range(world) for _ in range(pieces)]
    setup.bytes = [total / world / pieces] * len(setup.chunk)
    setup.output = [_ADDED] * world
    setup.copied = [1] * (world - 1) + [0]
    setup.expected = [1] + [2] * (world - 1)
    setup.lands = [min(chunk + 1, world - 1) for chunk in range(world)]
    setup.peer = setup.link = [0] * world
    if units:
        setup.link_ns = max(setup.link_ns, (1 + copies) * 1e9 / (units * gpu["kernel.unit"]))
    return _run(setup)


def _memory(gpu: TrackingGpu, bin_us: float, coarse: float = 1.0) -> _core.ControllerSetup:
    def entries(key: str) -> int:
        return max(1, round(gpu[key] / coarse))

    setup = _core.ControllerSetup()
    setup.burst = gpu["memory.entry"] * gpu["memory.channels"] * coarse
    setup.read_ns = setup.store_ns = setup.burst / gpu["memory.effective"] * 1e9
    setup.update_ns = gpu["memory.update"] * setup.store_ns
    setup.latency_ns, setup.llc = gpu["memory.latency"] * 1e9, gpu["memory.llc"]
    setup.queue, setup.stores = entries("memory.queue"), entries("memory.stores")
    setup.high, setup.low = entries("memory.stores_high"), entries("memory.stores_low")
    setup.thresholds = [0, *(entries(f"mca.threshold_{name}") for name in ("high", "middle", "low"))]
    setup.intensities = [gpu[f"mca.busy_{name}"] for name in ("none", "high", "middle")]
    setup.starved_ns = gpu["mca.starved"] * 1e9
    setup.link_ns, setup.link_latency_ns = 1e9 / gpu["link.bandwidth"], gpu["link.latency"] * 1e9
    setup.link_queue, setup.dma_window = gpu["link.queue"], gpu["copies.window"]
    setup.bin_ns = bin_us * 1e3
    return setup


def _with_gemm(
    gemm: HardwareGemm,
    gpu: TrackingGpu,
    arbitration: Arbitration,
    own_writes: OwnWrites,
    bin_us: float,
    coarse: float = 1.0,
) -> _core.ControllerSetup:
    setup = _memory(gpu, bin_us, coarse)
    setup.arbitration = get_args(Arbitration).index(arbitration)
    setup.own_writes = get_args(OwnWrites).index(own_writes)
    tokens, features = gpu.count("gemm.tile_tokens"), gpu.count("gemm.tile_features")
    setup.units, setup.slots, setup.ahead = gpu.count("gpu.units"), gpu.count("gemm.per_unit"), gpu.count("gemm.ahead")
    setup.slabs = math.ceil(gemm.k / gpu["gemm.slab"])
    depth = gemm.k / setup.slabs
    of_unit = gpu.peak / setup.units * gpu["gpu.efficiency"]
    setup.slab_ns = 2 * tokens * features * depth / of_unit * 1e9
    rows, columns = gemm.grid(gpu)
    setup.a_slab = BYTES_PER_ELEMENT * gemm.tokens / rows * depth
    setup.b_slab = BYTES_PER_ELEMENT * gemm.features / columns * depth
    order = gemm.order(gpu)
    setup.a, setup.b = [row for row, _ in order], [column for _, column in order]
    # All tiles get equal parts of the output, so that chunks are equal. A partial tile takes as long as a full tile.
    setup.bytes = [gemm.out_bytes / (rows * columns)] * (rows * columns)
    setup.sets, setup.ways = gpu.count("tracker.sets"), gpu.count("tracker.ways")
    setup.wavefronts, setup.block = gpu.count("tracker.wavefronts"), gpu.count("copies.block")
    return setup


def _run(setup: _core.ControllerSetup) -> ControllerRun:
    (run,) = _run_all([setup])
    return run


def _run_all(setups: Sequence[_core.ControllerSetup]) -> list[ControllerRun]:
    runs = []
    for setup, (found, bins) in zip(setups, _core.run_controllers(setups), strict=True):
        groups, left = int(found["groups"]), int(found["pieces_left"])
        if groups < len(setup.chunk) or left:
            raise RuntimeError(
                f"deadlock: {groups} of {len(setup.chunk)} work-groups ended, and {left} pieces of the output are incomplete, "
                "because they wait for updates that never come. Correct the output map, or the tracker's size in the GPU's file"
            )
        us = max(found["end_ns"], found["gemm_ns"]) / 1e3
        runs.append(ControllerRun(
            us=us, gemm_us=found["gemm_ns"] / 1e3, gemm_read=found["gemm_read"], gemm_write=found["gemm_write"],
            ring_read=found["ring_read"], ring_write=found["ring_write"], link=found["link"], busy=found["busy_ns"] / 1e3 / us,
            tracker_most=int(found["tracker_most"]), tracker_stall_us=found["tracker_stall_ns"] / 1e3,
            threshold=int(found["threshold"]), intensity=found["intensity"], waiting_most=found["waiting_most"] * setup.burst,
            bins=bins,
        ))  # fmt: skip
    return runs
