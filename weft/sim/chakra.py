"""Schedules as Chakra execution traces, with the network and system files of ASTRA-sim.

A trace is a folder:

    NAME.RANK.et      a rank's graph of nodes: computations with their time; collectives, sends and receives with their bytes
    comm_group.json   the group of all ranks, to which every collective refers
    network.yml       the topology, for ASTRA-sim's analytical network
    system.json       the collectives' algorithm for each dimension of the topology

A copy to or from a peer is a send on one rank and a receive on the other. A signal between ranks is a message of 8
bytes. A signal that directly follows a copy to the same rank needs no message, because the end of the copy stands for
the signal. Waits are dependencies. Times in traces are whole microseconds, so all times, including the network's, are
multiplied by `Trace.scale`. ASTRA-sim's cycles divided by the scale are nanoseconds.

Kernels that access peers' memory while they compute cannot be exported, because Chakra has no node for them.

This module writes protobuf's wire format itself, so it needs no dependency. The schema is `et_def.proto` of
mlcommons/chakra, version 0.0.4. The size of a collective is the size of each rank's input, as in ASTRA-sim.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ScheduleError
from weft.files import require_no_others
from weft.hw.topology import Wiring, hosts, mesh, ring, switch, torus
from weft.hw.topology.shapes.torus import dims_of
from weft.schedule import ITEM_BYTES, Collective, Copy, Schedule, Send
from weft.schedule.steps import substitute
from weft.sim.lower import lower
from weft.sim.lowered import Await, LaneProgram, Raise, Work
from weft.sim.model import Model
from weft.sim.vectorised import values_of_ranks

_VERSION = "0.0.4"
_COMP, _SEND, _RECV, _COLL = 4, 5, 6, 7  # node types
_COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "exchange": 6, "reduce_scatter": 7}
_GROUP = "1"  # the group of all ranks; ASTRA-sim interprets "0" as no group
_SIGNAL_BYTES = 8
_STEPS = 100  # times are scaled until the shortest is at least this many microseconds, but at most by `_MOST_SCALE`
_MOST_SCALE = 1000


@dataclass
class _Node:
    id: int
    name: str
    type: int
    us: float = 0.0
    attributes: tuple[tuple[str, int | bool | str], ...] = ()
    after: set[int] = field(default_factory=set)  # ids of nodes of the same rank


@dataclass
class _Event:
    """An increment of a signal's counter by `rank`. It happens when the graph node `node` of `rank` ends.

    arrived: if the counter is on a peer: the peer's nodes that receive the copies which `rank` sent before the increment.
    """

    rank: int
    node: _Node
    arrived: list[_Node]
    copied_last: bool  # True if no step of the lane is between the last copy and the set


@dataclass(frozen=True)
class Trace:
    """The contents of a trace's files, by file name.

    scale: the factor by which all times are multiplied.
    """

    files: dict[str, bytes]
    scale: int

    def write(self, folder: Path) -> None:
        """Write all files into `folder`; create it if needed. Raise `ValueError` if the folder contains traces of other
        ranks.
        """
        require_no_others(folder, "*.et", self.files)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def chakra_trace(schedule: Schedule, model: Model, name: str = "weft") -> Trace:
    """Return the trace of one run of `schedule`. Computations have the times that they take alone on `model`.

    Raise `ScheduleError` if a kernel accesses peers' memory, and `ValueError` if ASTRA-sim does not support the topology.
    """
    nodes = _Export(schedule, model).nodes()
    times = [node.us for of_rank in nodes for node in of_rank if node.us > 0]
    scale = next((s for s in (1, 10, 100) if min(times, default=_STEPS) * s >= _STEPS), _MOST_SCALE)
    files = {f"{name}.{rank}.et": _file(of_rank, scale) for rank, of_rank in enumerate(nodes)}
    files["comm_group.json"] = json.dumps({_GROUP: list(range(schedule.world_size))}).encode()
    network, dimensions = _network(model.wiring, schedule.world_size, scale)
    files["network.yml"], files["system.json"] = network.encode(), _system(dimensions, model, scale).encode()
    return Trace(files, scale)


class _Export:
    def __init__(self, schedule: Schedule, model: Model) -> None:
        self._schedule, self._program = schedule, lower(schedule, model, alike=False)
        self._values = values_of_ranks(schedule)
        self._nodes: list[list[_Node]] = [[] for _ in range(schedule.world_size)]
        self._events: dict[int, list[_Event]] = defaultdict(list)  # by counter
        self._waits: list[tuple[int, _Node, list[Await], tuple[int, _Node] | None]] = []
        self._tags: dict[tuple[int, int], int] = defaultdict(int)
        self._owners = {
            task.counter: lane.rank for lane in self._program.lanes for task in lane.tasks if isinstance(task, Await)
        }

    def nodes(self) -> list[list[_Node]]:
        for lane in self._program.lanes:
            self._lane(lane)
        for rank, node, waits, sender in self._waits:
            for wait in waits:
                for event in self._events[wait.counter]:
                    node.after.update(self._arrivals(event, rank))
                    if sender is not None and sender[0] == event.rank:  # for a get, the peer's send waits for the data
                        sender[1].after.add(event.node.id)
        sizes = [[dict(node.attributes)["comm_size"] for node in of if node.type == _COLL] for of in self._nodes]
        if different := [rank for rank, of_rank in enumerate(sizes) if of_rank != sizes[0]]:
            raise ScheduleError(
                f"{self._schedule.name}: ranks exchange different numbers of bytes (rank 0: {sizes[0]}, rank {different[0]}: "
                f"{sizes[different[0]]}), but a collective of ASTRA-sim has the same size on all ranks: use even sizes"
            )
        return self._nodes

    def _lane(self, lane: LaneProgram) -> None:
        rank = lane.rank
        before: _Node | None = None
        waits: list[Await] = []
        copied: dict[int, list[_Node]] = defaultdict(list)  # receives since the last signal, by rank
        for number, task in enumerate(lane.tasks):
            if isinstance(task, Await):
                waits += [task] if not task.previous else []
                continue
            if isinstance(task, Work):
                node, peer = self._work(lane, number, task, copied)
            elif waits or before is None:
                node, peer = self._add(rank, self._program.name_of(lane, number), _COMP), None
            else:
                self._raise(task.counter, rank, before, copied)
                continue
            if before is not None:
                node.after.add(before.id)
            self._waits.append((rank, node, waits, peer))
            before, waits = node, []
            if isinstance(task, Raise):
                self._raise(task.counter, rank, node, copied)
            else:
                for one in task.raises:
                    self._raise(one.counter, rank, node, copied)
        if waits:
            node = self._add(rank, f"{lane.name} ends", _COMP)
            node.after.update([before.id] if before else [])
            self._waits.append((rank, node, waits, None))

    def _work(
        self, lane: LaneProgram, number: int, task: Work, copied: dict[int, list[_Node]]
    ) -> tuple[_Node, tuple[int, _Node] | None]:
        """Add the nodes of a step to the trace. Return two values: the node on the lane's rank, and for a copy from a peer the
        pair (rank of the peer, its send node), otherwise None.

        number: the index of the step's `task` in the lane.
        copied: {peer: the peer's receive nodes for copies that this lane has sent since its last signal to the peer}. If the
            step copies to a peer, this method adds the copy's receive node.
        """
        rank, origin, name = lane.rank, lane.origins[number], self._program.name_of(lane, number)
        values = {**dict(origin.turn), **self._values[rank]}
        step = origin.step
        if isinstance(step, Collective):
            source = step.src
            size = substitute(source.rows, values) * substitute(source.cols, values)
            size *= ITEM_BYTES[self._schedule.buffer(source.buffer).dtype]
            about = (("comm_type", _COLLECTIVES[step.op]), ("comm_size", size), ("pg_name", _GROUP))
            return self._add(rank, name, _COLL, attributes=about), None
        if not task.sent_bytes:
            return self._add(rank, name, _COMP, task.latency_us + task.work_us), None
        if not isinstance(step, Copy | Send):
            raise ScheduleError(
                f"{self._schedule.name}: {name} accesses peers' memory while it computes, which Chakra traces cannot "
                "represent: export serial, or a schedule with separate copy steps"
            )
        world = self._schedule.world_size
        source_rank, target_rank = (substitute(region.at, values) % world for region in (step.src, step.dst))
        sent, received = self._message(source_rank, target_rank, name, task.sent_bytes)
        if source_rank == rank:
            copied[target_rank].append(received)
            return sent, None
        return received, (source_rank, sent)

    def _raise(self, counter: int, rank: int, node: _Node, copied: dict[int, list[_Node]]) -> None:
        owner = self._owners.get(counter)
        if owner is None:
            return  # no lane waits for it
        arrived = copied.pop(owner, []) if owner != rank else []
        self._events[counter].append(_Event(rank, node, arrived, bool(arrived) and node.type == _SEND))

    def _arrivals(self, event: _Event, rank: int) -> Iterable[int]:
        """Return the ids of the nodes of `rank` on which a wait for the signal's increment `event` depends. If the increment
        needs a message of its own, add the message to the trace.
        """
        if event.rank == rank:
            return [event.node.id]
        if not event.copied_last:
            sent, received = self._message(event.rank, rank, f"signal to {rank}", _SIGNAL_BYTES)
            sent.after.add(event.node.id)
            event.arrived.append(received)
            event.copied_last = True
        return [node.id for node in event.arrived]

    def _message(self, source: int, target: int, name: str, size: int) -> tuple[_Node, _Node]:
        tag = self._tags[source, target]
        self._tags[source, target] += 1
        about = (("comm_src", source), ("comm_dst", target), ("comm_tag", tag), ("comm_size", size))
        return self._add(source, name, _SEND, attributes=about), self._add(target, name, _RECV, attributes=about)

    def _add(self, rank: int, name: str, kind: int, us: float = 0.0, attributes: tuple = ()) -> _Node:
        node = _Node(len(self._nodes[rank]), name, kind, us, (("is_cpu_op", False), *attributes))
        self._nodes[rank].append(node)
        return node


# -- files of ASTRA-sim


def _network(wiring: Wiring, ranks: int, scale: int) -> tuple[str, list[str]]:
    """Return two values: the contents of network.yml, and for each dimension of the topology its kind in ASTRA-sim, such as
    "Ring".
    """
    numbers = wiring.numbers
    dimensions: list[tuple[Any, ...]]
    if wiring.builder is switch:
        dimensions = [("Switch", ranks, *numbers)]
    elif wiring.builder is mesh:
        dimensions = [("FullyConnected", ranks, *numbers)]
    elif wiring.builder is torus:
        dimensions = [("Ring", size, *numbers[:2]) for size in dims_of(ranks, *numbers[2:]) if size > 1]
    elif wiring.builder is hosts:
        gpus = int(numbers[4])
        dimensions = [("Switch", min(gpus, ranks), *numbers[:2]), ("Switch", -(-ranks // gpus), *numbers[2:4])]
        dimensions = [one for one in dimensions if one[1] > 1]
    elif wiring.builder is ring:
        dimensions = [("Ring", ranks, *numbers)]
    else:
        name = getattr(wiring.builder, "__name__", "infragraph")
        raise ValueError(
            f"ASTRA-sim does not support the topology {name!r}: pass --topology switch, mesh, ring, torus or hosts"
        )
    kinds, counts, rates, latencies = zip(*((*one, 0.0)[:4] for one in dimensions), strict=True)
    lines = {
        "topology": ", ".join(kinds),
        "npus_count": ", ".join(map(str, counts)),
        "bandwidth": ", ".join(f"{rate / 1e3 / scale:g}" for rate in rates),  # GB/s
        "latency": ", ".join(f"{us * 1e3 * scale:g}" for us in latencies),  # ns
    }
    return "".join(f"{key}: [ {values} ]\n" for key, values in lines.items()), list(kinds)


def _system(dimensions: list[str], model: Model, scale: int) -> str:
    by_kind = {"Ring": "ring", "FullyConnected": "direct", "Switch": "halvingDoubling"}
    algorithms = [by_kind[kind] for kind in dimensions]
    return json.dumps(
        {
            "scheduling-policy": "FIFO", "endpoint-delay": 1, "active-chunks-per-dimension": 1,
            "preferred-dataset-splits": 1, "all-reduce-implementation": algorithms,
            "all-gather-implementation": algorithms, "reduce-scatter-implementation": algorithms,
            "all-to-all-implementation": ["direct"] * len(dimensions), "collective-optimization": "localBWAware",
            "local-mem-bw": model.hbm_bytes_per_us / 1e3 / scale, "boost-mode": 0, "roofline-enabled": 0,
        },
        indent=1,
    )  # fmt: skip


# -- protobuf


def _file(nodes: list[_Node], scale: int) -> bytes:
    about = _text(1, _VERSION) + _bytes(2, _attribute("time_scale", scale))
    return b"".join(_varint(len(one)) + one for one in (about, *(_node(node, scale) for node in nodes)))


def _node(node: _Node, scale: int) -> bytes:
    after = b"".join(_varint(one) for one in sorted(node.after))
    parts = [_number(1, node.id), _text(2, node.name), _number(3, node.type), _bytes(5, after) if after else b""]
    parts += [_number(7, round(node.us * scale)), *(_bytes(10, _attribute(*one)) for one in node.attributes)]
    return b"".join(parts)


def _attribute(name: str, value: int | bool | str) -> bytes:
    if isinstance(value, bool):
        return _text(1, name) + _number(27, int(value))
    return _text(1, name) + (_text(29, value) if isinstance(value, str) else _number(9, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
