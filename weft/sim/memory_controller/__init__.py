"""A model of T3's hardware: a GPU whose memory controller tracks updates, triggers copies, adds, and arbitrates.

The fluid engine of `weft.sim` has speeds and no queues, and T3's arbitration is about queues. Here bytes move through them:

    work-groups     on each unit: read slabs of their operands (ahead by double buffering), compute, and write their tile
    LLC             slabs and tiles, the least recently used first out; T3's output goes past it
    controller      the GEMM's reads and stores, and the ring's reads and updates, arbitrated into a channel's queue
    memory          serves that queue in order; a near-memory update takes twice the time of a store
    tracker         counts the updates of each wavefront's piece, whoever makes them; the last starts its copy
    link            sends pieces one after another; the peer, which is alike, sends the same at the same time

Accesses are spread evenly over the channels, so one queue stands for all.

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
