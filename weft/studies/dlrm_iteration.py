"""A model of a training iteration of a DLRM on many nodes, with and without fused embedding + all-to-all. An iteration
is a graph of tasks on two resources, the GPU and the network:

    forward    GPU: embedding, bottom MLP, interaction, top MLP. Network: all-to-all of pooled vectors, before the interaction
    backward   GPU: top MLP, interaction, bottom MLP, update of the embedding. Network: all-to-all of gradients, between the
               interaction and the update; all-reduce of the MLPs' gradients, after the bottom MLP

All ranks run the same tasks. A resource runs one task at a time, in the order in which tasks become ready.

In the baseline, the forward all-to-all starts when the embedding has ended. In the fused kernel the all-to-all starts
with the embedding, and cannot end before it. The baseline already hides a part of the all-to-all behind the bottom MLP.
So fusion saves at most the exposed rest.

Sources: "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 4.4 and table 2. The order
of tasks is from DLRM's training loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.studies.fused_embedding_model import FLOAT
from weft.studies.numbers import Numbers


@dataclass(frozen=True)
class Task:
    """A task of the iteration. It takes `us` microseconds on the resource `on` ("gpu" or "network"), and waits for the
    tasks named in `after`.

    beside: the name of a task that produces this task's input piece by piece, such as the embedding for a fused
    all-to-all; "" if there is none. This task may start when `beside` starts, and cannot end before it.
    """

    name: str
    on: str
    us: float
    after: tuple[str, ...] = ()
    beside: str = ""


def ends_us(tasks: Sequence[Task]) -> dict[str, float]:
    """Return {task: its end in us}. Raise `ValueError` if tasks wait for each other in a cycle, or for an unknown task."""
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    free = dict.fromkeys((task.on for task in tasks), 0.0)
    left = list(tasks)
    while left:
        ready = [
            (max([starts[t.beside] if t.beside else 0.0, *(ends[name] for name in t.after)]), i)
            for i, t in enumerate(left)
            if all(name in ends for name in t.after) and (not t.beside or t.beside in ends)
        ]
        if not ready:
            raise ValueError(
                f"these tasks wait for each other, or for a task that does not exist: {', '.join(t.name for t in left)}"
            )
        # Select the task with the earliest possible start. Ties: the task that is ready first, then the first in the
        # list.
        start, _, i = min((max(at, free[left[i].on]), at, i) for at, i in ready)
        task = left.pop(i)
        starts[task.name] = start
        ends[task.name] = max(start + task.us, ends.get(task.beside, 0.0))
        free[task.on] = ends[task.name]
    return ends


@dataclass(frozen=True)
class Dlrm:
    """A DLRM as in the paper's table 2, trained on a torus of nodes.

    samples: the batch size of each node.
    tables: the number of embedding tables of each node.
    numbers: all other sizes of the model, and the rates of the machine.
    """

    samples: int
    tables: int
    numbers: Numbers

    @property
    def embedding_us(self) -> float:
        """The time in us in which a node pools the bags of its tables for the samples of all nodes."""
        n = self.numbers
        bags = self.samples * n["scale.nodes"] * self.tables
        rate = n["memory.bandwidth"] * n["memory.share"]
        return n.us("gpu.launch") + 1e6 * bags * n["model.pooling"] * n["scale.dim"] * FLOAT / rate

    @property
    def exchange_bytes(self) -> float:
        """The bytes of pooled vectors that a node sends to all nodes, itself included."""
        n = self.numbers
        return self.samples * n["scale.nodes"] * self.tables * n["scale.dim"] * FLOAT

    @property
    def exchange_us(self) -> float:
        return self.numbers.us("nic.collective") + exchange_us(self.exchange_bytes, self.numbers)

    def mlp_us(self, layers: float, times: float = 1.0) -> float:
        n = self.numbers
        flop = 2 * self.samples * n["scale.width"] ** 2
        return layers * max(n.us("gpu.launch"), 1e6 * flop / (n["gpu.fp32"] * n["gpu.fp32_share"])) * times

    def reduce_us(self, layers: float) -> float:
        """Return the time in us of the all-reduce of the gradients of `layers` MLP layers."""
        n = self.numbers
        count = layers * n["scale.width"] ** 2 * FLOAT
        return n.us("nic.collective") + reduce_us(count, n)

    def tasks(self, fused: bool) -> list[Task]:
        n = self.numbers
        bottom = n["scale.bottom"]
        top = n["scale.layers"] - bottom
        vectors = self.samples * n["scale.nodes"] * self.tables + self.samples
        interaction_us = n.us("gpu.launch") + 2e6 * vectors * n["scale.dim"] * FLOAT / (
            n["memory.bandwidth"] * n["memory.share"]
        )
        exchange = Task("all-to-all", "network", self.exchange_us, ("embedding",))
        if fused:
            exchange = Task("all-to-all", "network", self.exchange_us, beside="embedding")
        return [
            Task("embedding", "gpu", self.embedding_us),
            exchange,
            Task("bottom", "gpu", self.mlp_us(bottom)),
            Task("interaction", "gpu", interaction_us, ("all-to-all", "bottom")),
            Task("top", "gpu", self.mlp_us(top), ("interaction",)),
            Task("top back", "gpu", self.mlp_us(top, 2), ("top",)),
            Task("interaction back", "gpu", interaction_us, ("top back",)),
            Task("all-to-all back", "network", self.exchange_us, ("interaction back",)),
            Task("bottom back", "gpu", self.mlp_us(bottom, 2), ("interaction back",)),
            Task("reduce", "network", self.reduce_us(n["scale.layers"]), ("bottom back",)),
            Task("update", "gpu", n["scale.update"] * self.embedding_us, ("all-to-all back",)),
        ]

    def iteration_us(self, fused: bool) -> float:
        return max(ends_us(self.tasks(fused)).values())

    @property
    def gain(self) -> float:
        """The fraction of the iteration that the fused operator saves."""
        return 1 - self.iteration_us(True) / self.iteration_us(False)

    @property
    def exposed_us(self) -> float:
        """The time in us of the baseline's forward all-to-all in which no computation runs."""
        return max(0.0, self.exchange_us - self.mlp_us(self.numbers["scale.bottom"]))


def exchange_us(count: float, numbers: Numbers) -> float:
    """Return the time in us of an all-to-all on the torus, in which each node sends `count` bytes to all nodes
    together.

    The link with the most bytes determines the time. Every node sends equal amounts to all nodes, first along its row
    and then along its column. Rows and columns are rings, in which messages take the shorter direction. A ring of n
    nodes has 2n directed links, which share the traffic of its n nodes equally. A node's traffic is the sum of bytes x
    hops over its messages. So a link carries half of one node's traffic.
    """
    columns, rows = _sizes(numbers)
    fullest = max(_hops(columns) * rows, _hops(rows) * columns) / 2
    latency_us = (columns // 2 + rows // 2) * numbers.us("scale.latency")
    return latency_us + 1e6 * count / (columns * rows) * fullest / numbers["scale.bandwidth"]


def reduce_us(count: float, numbers: Numbers) -> float:
    """Return the time in us of an all-reduce of `count` bytes on the torus: ring reduce-scatters along rows, then along
    columns, and all-gathers in the reverse order.
    """
    us, left = 0.0, count
    for size in _sizes(numbers):
        left /= size
        us += 2 * (size - 1) * (numbers.us("scale.latency") + 1e6 * left / numbers["scale.bandwidth"])
    return us


def _sizes(numbers: Numbers) -> tuple[int, int]:
    nodes, columns = numbers.count("scale.nodes"), numbers.count("scale.columns")
    if columns < 1 or nodes % columns:
        raise ValueError(
            f"{nodes} nodes cannot be divided into rows of {columns}: set scale.columns to a divisor of {nodes}"
        )
    return columns, nodes // columns


def _hops(size: int) -> int:
    """Return the sum of the distances in hops from one node of a ring to all other nodes, each in the shorter direction."""
    return sum(min(distance, size - distance) for distance in range(size))
