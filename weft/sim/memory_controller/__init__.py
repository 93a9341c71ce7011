"""A simulator of T3's hardware: a GPU whose memory controller tracks updates, triggers copies, adds, and arbitrates.

The fluid engine of `weft.sim` has no queues, but T3's arbitration depends on queues. So this simulator models the
queues:

    work-groups     run on each compute unit: they read slabs of operands (double-buffered), compute, and write their tile
    LLC             caches slabs and tiles, with LRU replacement. T3's output bypasses it
    controller      arbitrates the GEMM's reads and stores, and the ring's reads and updates, into a channel's queue
    memory          serves this queue in order. A near-memory update takes twice as long as a store
    tracker         counts the updates of each piece, by the GEMM and by peers. A piece is the part of a tile that one wavefront
                    computes. The last update of a piece starts its copy to the peer
    link            sends pieces one after another. The peer is identical, and sends the same at the same time

Accesses are spread evenly over the memory channels, so one queue represents all channels.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 4 and 5. `t3.toml` has the
source of every number.
"""

from weft.sim.memory_controller.machine import TrackingGpu, other_reading, t3_gpu
from weft.sim.memory_controller.run import (
    Arbitration,
    ControllerRun,
    HardwareGemm,
    OwnWrites,
    all_gather,
    alone,
    fused,
    fused_on_all,
    reduce_scatter,
)

__all__ = [
    "Arbitration", "ControllerRun", "HardwareGemm", "OwnWrites", "TrackingGpu", "all_gather", "alone", "fused", "fused_on_all",
    "other_reading",
    "reduce_scatter", "t3_gpu",
]  # fmt: skip
