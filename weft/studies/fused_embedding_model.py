"""A model of a fused embedding kernel and its baseline, on two nodes and on four GPUs of one node.

Source: "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.2 to 4.3.

A GPU pools bags at the memory bandwidth, or at the rate that its wavefronts' outstanding loads allow (Little's law):

    rate(occupancy) = min(share * bandwidth, occupancy * units * waves * bytes in flight / latency) / contention(occupancy)

`share` is the attainable fraction of the bandwidth, `units` the number of compute units, and `waves` the number of
wavefronts that a unit can hold. `contention` is above 1 for occupancies above 75%, at which the times of figure 11
grow.

Slices are pooled one after the other. A slice for another node then waits for the NIC, which sends one slice at a time,
in the time

    bytes of the slice / bandwidth + time per message

The order of slices makes the nodes' times differ. Let p be the time to pool a slice, and n the time to send a slice. Each
of two nodes pools R slices for itself and R for the other node. In natural order ("oblivious" in the paper) both nodes
pool the R slices for node 0 first. So node 0 sends only in the second half of its pooling, and its last slice arrives at
node 1 late. Skew is the slower node's time divided by the faster node's, minus 1. Up to constant times:

    p < n < 2 p    node 0 ends at 2 R p; node 1 ends at R p + R n, when its last slice arrives; so skew is (n / p - 1) / 2
    2 p < n        node 0 ends at R n, when its last slice arrives; node 1 ends at R p + R n; so skew is p / n

If n and p are nearly equal, small changes of either change the skew much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.studies.numbers import Numbers

FLOAT = 4
SLICE = 32
Order = Literal["remote_first", "natural"]
_CALM, _CROWDED = 0.75, 0.875
"""Figure 11's occupancies with the least time and with the most wavefronts."""
_SLICES_SAVE = 0.55
"""Section 4.2, figure 12: the fraction of time that slices of 64 vectors save, relative to slices of 4."""


@dataclass(frozen=True)
class Setting:
    """A configuration of figures 10 to 14.

    batch: the global batch size.
    tables: the number of tables on each GPU.
    """

    batch: int
    tables: int
    ranks: int = 2

    @property
    def name(self) -> str:
        return f"{self.batch}|{self.tables}"

    @property
    def vectors(self) -> int:
        """The number of vectors that a GPU pools: its tables times the samples of the global batch."""
        return self.batch * self.tables


@dataclass(frozen=True)
class Times:
    """The times in us of an operator.

    pooling, exchange, shuffle: the baseline's kernels, its all-to-all, and its rearrangement of received vectors.
    fused: the time of the fused kernel on each node.
    """

    pooling: float
    exchange: float
    shuffle: float
    fused: tuple[float, ...]

    @property
    def baseline(self) -> float:
        return self.pooling + self.exchange + self.shuffle

    @property
    def saved(self) -> float:
        """The fraction of the baseline's time that the fused kernel saves, on the slowest node."""
        return 1 - max(self.fused) / self.baseline

    @property
    def skew(self) -> float:
        return max(self.fused) / min(self.fused) - 1


def rate(numbers: Numbers, occupancy: float) -> float:
    """Return the rate in bytes/us at which a GPU reads rows while it pools.

    occupancy: the fraction of possible wavefronts that are active.
    """
    waves = occupancy * numbers["gpu.units"] * numbers["gpu.waves"]
    in_flight = waves * numbers["gpu.loads"] / numbers["memory.latency"]
    crowded = min(1.0, max(0.0, (occupancy - _CALM) / (_CROWDED - _CALM)))
    alone = min(numbers["memory.bandwidth"] * numbers["memory.share"], in_flight)
    return 1e-6 * alone / (1 + numbers["memory.contention"] * crowded)


def bag_bytes(numbers: Numbers) -> float:
    return numbers["model.pooling"] * numbers["model.dim"] * FLOAT


def between_nodes(
    setting: Setting,
    numbers: Numbers,
    *,
    slice_size: int = SLICE,
    order: Order = "remote_first",
    occupancy: float = 0.0,
) -> Times:
    """Return the times of the operator on two nodes with one GPU each.

    slice_size: the number of vectors in a slice.
    occupancy: the occupancy of the fused kernel; 0 for the paper's value.
    """
    sent = setting.vectors * numbers["model.dim"] * FLOAT / 2
    exchange_us = numbers.us("nic.collective") + 1e6 * sent / numbers["nic.bandwidth"]
    pooled = rate(numbers, occupancy or numbers["gpu.occupancy"])
    slice_us = slice_size * bag_bytes(numbers) / pooled
    remote = setting.vectors // 2 // slice_size
    local_first = [order == "natural", False]  # node 1 has node 0's samples first in both orders (figure 7)
    ends = []
    for late in local_first:
        ready = (np.arange(remote) + 1 + (remote if late else 0)) * slice_us
        ends.append(_sent_us(ready, slice_size, numbers))
    all_pooled_us = 2 * remote * slice_us
    fused = tuple(numbers.us("gpu.launch") + max(all_pooled_us, arrived) for arrived in reversed(ends))
    return Times(_unfused_pooling_us(setting, numbers), exchange_us, _shuffle_us(setting, numbers), fused)


def _sent_us(ready_us: np.ndarray, slice_size: int, numbers: Numbers) -> float:
    """Return the time in us at which a node's last slice arrives at the other node.

    ready_us: when each slice is pooled, in the order in which the NIC sends slices.
    """
    bytes_us = 1e6 * slice_size * numbers["model.dim"] * FLOAT / numbers["nic.bandwidth"]
    each_us = bytes_us + numbers.us("nic.message")
    places = np.arange(len(ready_us))
    left_us = np.maximum.accumulate(ready_us - places * each_us)[-1] + len(ready_us) * each_us
    return float(left_us) + numbers.us("nic.latency")


def slice_us(numbers: Numbers) -> tuple[float, float]:
    """Return (time to pool a slice, time to send it through the NIC) in us."""
    pooling_us = SLICE * bag_bytes(numbers) / rate(numbers, numbers["gpu.occupancy"])
    return pooling_us, 1e6 * SLICE * numbers["model.dim"] * FLOAT / numbers["nic.bandwidth"] + numbers.us("nic.message")


def with_message(setting: Setting, numbers: Numbers) -> Numbers:
    """Return `numbers` with a fitted time per message of the NIC (nic.message). With it the model reproduces figure 12:
    the time that slices of 64 vectors save relative to slices of 4.

    setting: the figure's configuration.
    """

    def saving(us: float) -> float:
        given = numbers.with_value("nic.message", us)
        small, large = (max(between_nodes(setting, given, slice_size=size).fused) for size in (4, 64))
        return 1 - large / small

    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if saving(middle) < _SLICES_SAVE else (low, middle)
    return numbers.with_value("nic.message", low)


def in_a_node(setting: Setting, numbers: Numbers) -> Times:
    """Return the times of the operator on the GPUs of one node. The fused operator launches a kernel for each table.
    The kernel stores vectors directly into the memory of the GPU that needs them, so there is neither NIC nor shuffle.
    """
    peers = setting.ranks - 1
    over_link = setting.vectors * numbers["model.dim"] * FLOAT / setting.ranks
    exchange_us = numbers.us("nic.collective") + 1e6 * over_link / numbers["xgmi.bandwidth"]
    read_us, launches_us = _tables_us(setting, numbers)
    stored = setting.vectors * numbers["model.dim"] * FLOAT * (1 - peers / setting.ranks)
    fused_us = launches_us + max(read_us + _memory_us(stored, numbers), 1e6 * over_link / numbers["xgmi.bandwidth"])
    return Times(_unfused_pooling_us(setting, numbers), exchange_us, _shuffle_us(setting, numbers), (fused_us,))


def _tables_us(setting: Setting, numbers: Numbers) -> tuple[float, float]:
    """Return (time in which kernels read and pool the rows of all tables, time of their launches) in us."""
    waves = setting.batch * numbers["model.dim"] / 64  # a wavefront for 64 columns of a bag
    filled = min(1.0, waves / (numbers["gpu.units"] * numbers["gpu.waves"]))
    return setting.vectors * bag_bytes(numbers) / rate(numbers, filled), setting.tables * numbers.us("gpu.launch")


def _unfused_pooling_us(setting: Setting, numbers: Numbers) -> float:
    return sum(_tables_us(setting, numbers)) + _memory_us(setting.vectors * numbers["model.dim"] * FLOAT, numbers)


def _shuffle_us(setting: Setting, numbers: Numbers) -> float:
    """Return the time in us in which the baseline copies the received vectors into the layout of the output."""
    return numbers.us("gpu.launch") + _memory_us(2 * setting.vectors * numbers["model.dim"] * FLOAT, numbers)


def _memory_us(count: float, numbers: Numbers) -> float:
    return 1e6 * count / (numbers["memory.bandwidth"] * numbers["memory.share"])
