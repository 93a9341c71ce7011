"""Chakra traces: other programs can read the protobuf, the graphs run to their end, and bytes and times are those of
the schedule.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace

import pytest
from support.sim_toys import applicable, bytes_leaving, gpu

from weft.builders import AllGatherMatmul, AllToAllMatmul, EmbeddingAllToAll, MatmulReduceScatter, Problem
from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.hw.topology import load_topology
from weft.schedule import RANK, Schedule
from weft.sim import Model
from weft.sim.chakra import Trace, _network, chakra_trace

COMP, SEND, RECV, COLL = 4, 5, 6, 7
RANKS = 4


def _model(topology: str = "mesh:4") -> Model:
    return replace(gpu("mi300x", RANKS), world_size=0, wiring=load_topology(topology, load_machine("mi300x")))


def _varint(data: io.BytesIO) -> int:
    found = shift = 0
    while True:
        byte = data.read(1)[0]
        found |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return found


def _fields(data: bytes) -> list[tuple[int, int | bytes]]:
    stream, found = io.BytesIO(data), []
    while stream.tell() < len(data):
        key = _varint(stream)
        assert key & 7 in (0, 2)
        found.append((key >> 3, _varint(stream) if key & 7 == 0 else stream.read(_varint(stream))))
    return found


def _messages(data: bytes) -> list[bytes]:
    stream, found = io.BytesIO(data), []
    while stream.tell() < len(data):
        found.append(stream.read(_varint(stream)))
    return found


def _numbers(data: bytes) -> list[int]:
    stream, found = io.BytesIO(data), []
    while stream.tell() < len(data):
        found.append(_varint(stream))
    return found


def _attributes(fields: list[tuple[int, int | bytes]], number: int) -> dict[str, int | str]:
    found = {}
    for one in (dict(_fields(value)) for key, value in fields if key == number):  # type: ignore[arg-type]
        (value,) = (one[key] for key in (9, 27, 29) if key in one)
        found[one[1].decode()] = value.decode() if isinstance(value, bytes) else value
    return found


def _read(trace: Trace) -> list[list[dict]]:
    """Return the nodes of each rank: id, name, type, dependencies, us, attributes."""
    found = []
    for rank in range(RANKS):
        about, *nodes = _messages(trace.files[f"weft.{rank}.et"])
        assert dict(_fields(about))[1] == b"0.0.4"
        of_rank = []
        for node in nodes:
            fields = _fields(node)
            of = dict(fields)
            of_rank.append(
                {"id": of[1], "type": of[3], "after": _numbers(of.get(5, b"")), "us": of[7], **_attributes(fields, 10)}
            )
        found.append(of_rank)
    return found


def _play(ranks: list[list[dict]]) -> None:
    """Run all graphs as ASTRA-sim does: a node runs after its dependencies, a receive after its send, and a collective
    on all ranks together.
    """
    done: list[set[int]] = [set() for _ in ranks]
    sent: set[tuple] = set()
    while any(len(d) < len(of) for d, of in zip(done, ranks, strict=True)):
        before = sum(map(len, done))
        free = [
            [n for n in of if n["id"] not in d and d.issuperset(n["after"])] for d, of in zip(done, ranks, strict=True)
        ]
        for rank, of in enumerate(free):
            for node in of:
                key = tuple(node.get(k) for k in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                if node["type"] == SEND:
                    sent.add(key)
                if node["type"] != COLL and (node["type"] != RECV or key in sent):
                    done[rank].add(node["id"])
        first = [next((n for n in of if n["type"] == COLL), None) for of in free]
        if all(first):
            assert len({(n["comm_type"], n["comm_size"]) for n in first if n}) == 1
            for d, n in zip(done, first, strict=True):
                d.add(n["id"])  # type: ignore[index]
        assert sum(map(len, done)) > before, "the graphs wait for each other"


def _accesses_peers(schedule: Schedule) -> bool:
    """True if a step other than a copy or a collective has a region in a peer's memory."""
    kernels = (step for step in schedule.walk() if not step.meets and not step.copies_by)
    steps = (inner for step in kernels for inner in (step, *step.inner))
    return any(region.at != RANK for step in steps for region in step.regions)


PROBLEMS: tuple[Problem, ...] = (
    AllGatherMatmul.even(1024, 512, 512, RANKS),
    MatmulReduceScatter(RANKS, 1024, 512, 512, "bf16"),
    AllToAllMatmul.even(512, 256, 256, 8, RANKS),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_graphs_of_every_schedule_run_to_their_end_with_its_bytes(problem: Problem) -> None:
    model, tried = _model(), 0
    for name, schedule in applicable(problem).items():  # type: ignore[arg-type]
        if _accesses_peers(schedule):
            with pytest.raises(ScheduleError, match="accesses peers' memory while it computes"):
                chakra_trace(schedule, model)
            continue
        trace = chakra_trace(schedule, model)
        tried += 1
        ranks = _read(trace)
        assert all(node["is_cpu_op"] == 0 and isinstance(node["us"], int) for of in ranks for node in of), name
        keys = ("comm_src", "comm_dst", "comm_tag", "comm_size")
        messages = [
            Counter(tuple(n[k] for k in keys) for of in ranks for n in of if n["type"] == kind) for kind in (SEND, RECV)
        ]
        assert messages[0] == messages[1], name
        assert set(messages[0].values()) <= {1}, name
        _play(ranks)
        copied = sum(n["comm_size"] for n in ranks[0] if n["type"] == SEND and n["comm_size"] > 8)
        if not any(n["type"] == COLL for n in ranks[0]) and "by=kernel" in name:
            assert copied == bytes_leaving(schedule, 0), name
    assert tried > 5


def test_a_serial_schedule_in_detail() -> None:
    problem = PROBLEMS[1]
    trace = chakra_trace(applicable(problem)["serial"], _model())  # type: ignore[arg-type]
    for of in _read(trace):
        gemm, collective = of
        assert (gemm["type"], collective["type"], collective["after"]) == (COMP, COLL, [0])
        assert (collective["comm_type"], collective["comm_size"], collective["pg_name"]) == (7, 1024 * 512 * 2, "1")
        assert gemm["us"] >= 100 or trace.scale == 1000
    assert json.loads(trace.files["comm_group.json"]) == {"1": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("topology", "kinds", "counts"),
    [
        ("mesh:4", "FullyConnected", "4"),
        ("ring:4", "Ring", "4"),
        ("torus:2x2", "Ring, Ring", "2, 2"),
        ("torus:2x1x2", "Ring, Ring", "2, 2"),
    ],
)
def test_the_network_is_scaled_with_the_times(topology: str, kinds: str, counts: str) -> None:
    model = _model(topology)
    trace = chakra_trace(applicable(PROBLEMS[0])["serial"], model)  # type: ignore[arg-type]
    lines = dict(line.split(": [ ") for line in trace.files["network.yml"].decode().splitlines())
    rate = model.wiring.numbers[0] / 1e3 / trace.scale
    assert lines["topology"] == f"{kinds} ]"
    assert lines["npus_count"] == f"{counts} ]"
    assert float(lines["bandwidth"].split(",")[0].rstrip(" ]")) == pytest.approx(rate, rel=1e-4)
    assert json.loads(trace.files["system.json"])["roofline-enabled"] == 0


def test_a_torus_of_three_dimensions_has_three_rings() -> None:
    network, kinds = _network(load_topology("torus:4x3x2", load_machine("mi300x")), 24, 1)
    assert kinds == ["Ring"] * 3
    assert "npus_count: [ 4, 3, 2 ]" in network


def test_what_chakra_cannot_have_is_refused() -> None:
    problem = EmbeddingAllToAll.sized(256, 32, 4, RANKS, tables=8)
    with pytest.raises(ScheduleError, match="accesses peers' memory while it computes"):
        chakra_trace(applicable(problem)["put"], _model())  # type: ignore[arg-type]
    splits = ((4, 0, 0, 0), (0, 4, 0, 0), (1, 1, 1, 1), (0, 0, 0, 2))
    uneven = AllToAllMatmul(4, 1, tuple(map(sum, splits)), 64, 64, "bf16", most=16, splits=splits)
    with pytest.raises(ScheduleError, match="different numbers of bytes"):
        chakra_trace(applicable(uneven)["serial"], _model())  # type: ignore[arg-type]


def test_chakras_own_reader() -> None:
    """Read the traces with PyPI's `mlc-chakra`, if it is installed."""
    et_def = pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="mlc-chakra is not installed")
    trace = chakra_trace(applicable(PROBLEMS[0])["gather[by=dma]"], _model())  # type: ignore[arg-type]
    _, *nodes = _messages(trace.files["weft.1.et"])
    read = [et_def.Node.FromString(node) for node in nodes]
    assert [(n.id, n.type, list(n.data_deps), n.duration_micros) for n in read] == [
        (n["id"], n["type"], n["after"], n["us"]) for n in _read(trace)[1]
    ]
