"""Choices between hosts: predicted times of collectives, and schedules and far-first calls that are ruled out by the
measured links.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.builders import Problem, named
from weft.builders.problems.all_gather_matmul import AllGatherMatmul
from weft.builders.problems.matmul_all_reduce import MatmulAllReduce
from weft.builders.problems.matmul_reduce_scatter import MatmulReduceScatter
from weft.errors import UnreadableError
from weft.operator.between_hosts import worth_timing
from weft.plan import links
from weft.runtime.links import _Probe
from weft.runtime.two_ways import TwoWays
from weft.sim.between_hosts import HostNetwork, LinkFound, Measured

# 100 MB/s for one stream, 50 MB/s in an all-to-all, 1 ms round trips; copies of 1000 MB/s, or 500 MB/s with page faults.
NETWORK = HostNetwork(("a", "a", "b", "b"), 100.0, 1000.0, 50.0, 1000.0, 500.0)
MB = 1_000_000


@pytest.mark.parametrize(
    ("op", "two_levels", "far", "rate", "rounds", "copied"),
    [
        ("all_gather", False, 3, 100, 3, 5),
        ("all_reduce", False, 6, 100, 6, 0),
        ("reduce_scatter", False, 6, 100, 6, 5),
        ("all_to_all", False, 4, 50, 1, 1),
        ("all_gather", True, 2, 100, 1, 6),
        ("reduce_scatter", True, 2, 100, 1, 10),
        ("all_reduce", True, 4, 100, 2, 12),
    ],
)
def test_predicted_times_of_four_megabytes(
    op: str, two_levels: bool, far: int, rate: int, rounds: int, copied: int
) -> None:
    wanted_us = far * MB / rate + rounds * 500 + copied * MB / 1000
    assert NETWORK.collective_us(op, 4 * MB, two_levels) == pytest.approx(wanted_us)


def test_large_buffers_of_gloo_fault_pages_in_every_call() -> None:
    size = 40 * MB
    wanted_us = 1.5 * size / 100 + 6 * 500 + size / 500 + size / 4 / 1000
    assert NETWORK.collective_us("reduce_scatter", size) == pytest.approx(wanted_us)
    wanted_us = 0.75 * size / 100 + 3 * 500 + size / 4 / 500 + size / 1000
    assert NETWORK.collective_us("all_gather", size) == pytest.approx(wanted_us)


def test_nccl_reduces_while_it_scatters() -> None:
    by_nccl = replace(NETWORK, copy_bytes_per_us=math.inf, fresh_bytes_per_us=math.inf, library="nccl")
    for op, times in {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}.items():
        assert by_nccl.collective_us(op, 4 * MB) == pytest.approx(times * (3 * MB / 100 + 3 * 500)), op


@pytest.mark.parametrize(("hosts", "crossings", "far"), [("aab", 1, 2), ("abab", 2, 4), ("aabbcc", 1, 8), ("ab", 1, 1)])
def test_bytes_of_the_busiest_host(hosts: str, crossings: int, far: int) -> None:
    network, size = replace(NETWORK, hosts=tuple(hosts), round_trip_us=0.0, copy_bytes_per_us=math.inf), len(hosts) * MB
    assert network.collective_us("all_gather", size) == pytest.approx(crossings * (len(hosts) - 1) * MB / 100)
    assert network.collective_us("all_to_all", size) == pytest.approx(far * MB / 50)


def problems(rows: int) -> list[Problem]:
    return [
        MatmulReduceScatter(4, rows, 1024, 16, "fp32"),
        AllGatherMatmul(4, (rows // 4,) * 4, (16,), 1024, "fp32"),
        MatmulAllReduce(4, rows, 1024, 16, "fp32"),
    ]


def timed(p: Problem, network: HostNetwork, rails: int = 0) -> list[bool]:
    serial = named(p, "serial").build()
    return [worth_timing(named(p, name).build(), serial, network) for name in p.between_hosts(rails)]


def test_schedules_that_cannot_gain_enough_are_not_timed() -> None:
    fast = HostNetwork(NETWORK.hosts, 3000.0, 40.0, 5000.0, 4000.0, 1000.0)
    for p in problems(16):  # serial takes less than 300 us
        assert timed(p, fast) == timed(p, fast, 2) == [False] * 3, p
    for p in problems(4096):
        assert timed(p, NETWORK) == [False, True, True], p  # one chunk is the collective of serial
        assert timed(p, NETWORK, 2) == [True] * 3, p  # two levels send less


def test_gpus_time_schedules_of_several_chunks() -> None:
    """On GPUs, serial's collectives do not travel with a rendezvous."""
    by_nccl = HostNetwork(NETWORK.hosts, 100.0, 50.0, 100.0, math.inf, math.inf, "nccl")
    for p in problems(256):
        assert timed(p, by_nccl) == [False, True, True], p
        assert timed(p, replace(by_nccl, bytes_per_us=25_000.0)) == [False] * 3, p  # serial takes less than 300 us


def test_a_single_chunk_gains_nothing_if_serial_rides_with_the_rendezvous() -> None:
    for p in problems(256):  # up to 1 MB
        assert timed(p, NETWORK)[0] is False, p


# -- two implementations of a call


class Alone:
    """A communicator of one rank, with the attributes that `TwoWays` uses."""

    def meet(self, payload: bytes, **_: Any) -> list[bytes]:
        return [payload]


@pytest.mark.parametrize(
    ("first", "other", "wanted"),
    [
        ((1.0, 1.1, 1.2, 1.3), (9.0, 0.85, 1.1, 1.1), True),
        ((1.0, 1.1, 1.2, 1.3), (0.5, 0.5, 1.3, 1.3), True),
        ((1.0, 1.1, 1.2, 1.3), (0.5, 1.3, 1.3, 1.3), False),  # the median is slower
        ((1.0, 1.1, 1.2, 1.3), (0.8, 0.9, 1.7, 1.8), True),  # a busy machine slowed the other calls
        ((1.0, 1.1, 1.2, 1.3), (0.91, 1.01, 1.1, 1.2), False),  # gains less than 10%
        ((1.0, 1.1, 1.2, 1.3), (0.96, 0.97, 0.98, 0.99), True),  # only the fastest call gains less than 10%
        ((1.0, 1.1, 1.2, 1.3), (1.01, 1.01, 1.02, 1.02), False),  # the fastest call is slower
        ((1e-4,) * 4, (1e-5,) * 4, False),  # gains less than 100 us
    ],
)
def test_the_second_way_is_taken_if_it_was_clearly_faster(
    first: tuple[float, ...], other: tuple[float, ...], wanted: bool
) -> None:
    ways, taken = TwoWays(Alone()), []  # type: ignore[arg-type]
    ways.rule_out(100, 1.0)
    for part in (first[:2], other[:2], first[2:], other[2:]):
        for seconds in (0.01, *part):  # the first call of a block does not count
            taken.append(ways.takes_other(100))
            ways.took(100, seconds, 1.0)
    assert taken == ([False] * 3 + [True] * 3) * 2
    assert ways.takes_other(100) == wanted
    ways.rule_out(100, 0.0)  # too late, because this size was measured already
    assert ways.takes_other(100) == wanted


def test_the_second_way_is_never_tried_if_it_can_gain_too_little() -> None:
    ways = TwoWays(Alone())  # type: ignore[arg-type]
    for _ in range(10):
        ways.rule_out(100, 60e-6)
        assert not ways.takes_other(100)
        ways.took(100, 1.0, 1.0)


# -- saved numbers


FOUND = Measured(("a", "a", "b"), (LinkFound(("a", "b"), 100.0, 400.0),), 50.0, 1000.0, None)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


def test_saved_links_are_found_by_the_same_ranks_of_the_same_hosts() -> None:
    links.save(FOUND)
    assert links.find(FOUND.hosts, "gloo") == FOUND
    assert links.find(("a", "b"), "gloo") is None
    assert links.find(("a", "b", "a"), "gloo") is None
    assert links.find(FOUND.hosts, "nccl") is None
    links.save(by_nccl := replace(FOUND, library="nccl", exchange_bytes_per_us=70.0))
    assert links.find(FOUND.hosts, "nccl") == by_nccl
    assert links.find(FOUND.hosts, "gloo") == FOUND


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"versions": {"weft": "0.0.0"}}, ValueError, "was made with .*weft 0.0.0, now .* measures again"),
        ({"links": [["a", "b", -1.0, 400.0]]}, UnreadableError, "links has a wrong type or size for"),
        ({"copy_bytes_per_us": "fast"}, UnreadableError, "copy_bytes_per_us has a wrong type"),
    ],
)
def test_unusable_files_are_refused(change: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    links.save(FOUND)
    (file,) = tmp_path.glob("links-*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=text):
        links.find(FOUND.hosts, "gloo")


def test_implausible_numbers_are_dropped_with_a_sentence() -> None:
    bad = LinkFound(("a", "c"), 1e9, 0.0)
    kept, said = replace(
        FOUND, links=(*FOUND.links, bad), exchange_bytes_per_us=0.0, copy_bytes_per_us=math.nan
    ).checked()
    assert kept == replace(FOUND, exchange_bytes_per_us=None, copy_bytes_per_us=None)
    assert said == (
        "the link a - c is ignored: a rate of 1e+09 MB/s is outside 0.01 to 1e+06; a round trip of 0 us is outside 1 to 1e+07",
        "the rate of one stream is used for an all-to-all: a rate of 0 MB/s is outside 0.01 to 1e+06",
        "copies in memory are assumed to take no time: a copy rate of nan MB/s is outside 1 to 1e+06",
    )
    assert kept.network() == HostNetwork(FOUND.hosts, 100.0, 400.0, 100.0, math.inf, math.inf)
    assert replace(FOUND, links=()).network() is None


class Slept(_Probe):
    """A probe whose transfers take a computed time."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.elapsed_s, self._latency_s, self._bytes_per_s = 0.0, latency_s, bytes_per_s

    def send_s(self, nbytes: int) -> list[float]:
        took = self._latency_s + nbytes / self._bytes_per_s
        self.elapsed_s += took
        return [took]


@pytest.mark.parametrize("latency_s", [0.0001, 0.015])
def test_transfers_grow_until_their_bytes_take_as_long_as_half_of_the_latency(latency_s: float) -> None:
    probe = Slept(latency_s, 1e8)
    *_, (nbytes, _) = probe.largest_in(0.2, probe.send_s, latency_s)
    assert nbytes / 1e8 >= latency_s / 2
    assert probe.elapsed_s <= 0.2
