"""NCCL's collectives on any topology: times from textbooks, arriving bytes, and lower bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sim_toys import TOY, puts

from weft.errors import SimulationError
from weft.hw.topology import Topology, Wiring, hosts, mesh, ring, switch, torus
from weft.schedule import Draft, Schedule
from weft.sim import Model, costs, simulate
from weft.sim.collectives import Op, algorithm, algorithms, least_us

MIB = 1 << 20
LINK, LATENCY = 75e3, 0.5  # T3's ring: 150 GB/s for both directions together, and a latency of 500 ns
IDLE = replace(TOY, name="links alone", hbm_bytes_per_us=1e12, copy_latency_us=0.0, copy_bytes_per_us=1e12)
"""A model in which only links take time."""


def _collective(op: str, world: int, count: int) -> Schedule:
    """Return a schedule of one collective. count: the bytes of all shards of an all-gather; for other collectives, the
    bytes of each rank's input.
    """
    d = Draft(op, world)
    cols = 64
    rows = count // cols // 4
    whole, shard = (rows, cols), (rows // world, cols)
    sizes = {
        "all_gather": (shard, whole),
        "reduce_scatter": (whole, shard),
        "all_to_all": (whole, (rows // world, cols * world)),
    }
    source, target = sizes.get(op, (whole, whole))
    x, y = d.buffer("x", *source, "fp32", "input"), d.buffer("y", *target, "fp32", "output")
    getattr(d.lane("compute"), op)(x.part(), y.part())
    return d.schedule()


def _us(op: str, world: int, count: int, wiring: Wiring, model: Model = IDLE) -> float:
    return simulate(_collective(op, world, count), replace(model, wiring=wiring)).end_us


@pytest.mark.parametrize("world", [8, 16, 32])
@pytest.mark.parametrize("mib", [6, 24, 96, 192])
@pytest.mark.parametrize("link", [LINK, 2 * LINK])
def test_on_a_ring_shards_go_around_it(world: int, mib: int, link: float) -> None:
    """The time is (W - 1) (latency + S / W / bandwidth), and twice as long for an all-reduce."""
    count, wiring = mib * MIB, Wiring(ring, (link, LATENCY))
    closed_form = (world - 1) * (LATENCY + count / world / link)
    assert _us("reduce_scatter", world, count, wiring) == pytest.approx(closed_form, rel=1e-6)
    assert _us("all_gather", world, count, wiring) == pytest.approx(closed_form, rel=1e-6)
    assert _us("all_reduce", world, count, wiring) == pytest.approx(2 * closed_form, rel=1e-6)


def test_on_a_switch_and_a_mesh_shards_go_to_all_at_once() -> None:
    for op in ("reduce_scatter", "all_gather", "all_to_all"):
        assert _us(op, 8, 8 * MIB, Wiring(switch, (100.0, 2.0))) == pytest.approx(4 + 7 * MIB / 100)
        assert _us(op, 8, 8 * MIB, Wiring(mesh, (100.0, 2.0))) == pytest.approx(2 + MIB / 100)


@pytest.mark.parametrize("dims", [(8, 8), (4, 4, 4), (2, 2), (3, 3, 3), (16, 16)])
def test_on_a_torus_with_equal_sides_all_links_are_busy_all_the_time(dims: tuple[int, ...]) -> None:
    """The bytes go in 2 d parts around the d dimensions. Without latency, the time is the bound that the links of a rank set."""
    world, n, d, rate = math.prod(dims), dims[0], len(dims), 100.0
    count = world * 64 * 1024
    links = d * min(2, n - 1)  # in a ring of two, both neighbours are the same rank
    for latency in (0.0, 0.5):
        wiring = Wiring(torus, (rate, latency, *dims[:-1]))
        closed_form = d * (n - 1) * latency + (1 - 1 / world) * count / (links * rate)
        for op, times in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
            assert _us(op, world, count, wiring) == pytest.approx(
                times * closed_form, rel=0.01 if not latency else 1e-6
            ), op
            if not latency:
                assert least_us(wiring.of(world), op, count) == pytest.approx(times * closed_form), op  # type: ignore[arg-type]


@pytest.mark.parametrize(("dims", "over"), [((16, 8), 1.063), ((8, 16), 1.063), ((16, 8, 4), 1.204), ((64, 2), 1.128)])
def test_on_a_torus_with_different_sides_the_longest_decides(dims: tuple[int, ...], over: float) -> None:
    """On a torus of 16 x 8, half of the bytes begin along rows and leave 1/16 for columns. The other half begins along columns
    and leaves 1/8 for rows. Rows take longer in both stages.
    """
    world = math.prod(dims)
    topology = torus(world, 100.0, 0.0, *dims[:-1])
    found = algorithm(topology, "all_gather", 1e9)
    assert found.name == "rings along all dimensions, both directions"
    if dims == (16, 8):
        assert found.us_per_byte == pytest.approx((15 / 16 / 4 + 15 / 16 / 8 / 4) / 100)
    assert found.us_per_byte / least_us(topology, "all_gather", 1.0) == pytest.approx(over, abs=1e-3)
    (before,) = (one for one in algorithms(topology, "all_gather") if one.name == "ring by dimension")
    assert before.us_per_byte > 2.5 * found.us_per_byte


def test_small_payloads_on_a_torus_use_the_fewest_rounds() -> None:
    wiring = Wiring(torus, (LINK, LATENCY, 8))
    for op in ("reduce_scatter", "all_gather", "all_reduce"):
        assert "both directions" not in algorithm(wiring.of(64), op, 64.0).name  # type: ignore[arg-type]
        assert "both directions" in algorithm(wiring.of(64), op, 96.0 * MIB).name  # type: ignore[arg-type]
        times = [algorithm(wiring.of(64), op, float(1 << i)).time_us(1 << i) for i in range(32)]  # type: ignore[arg-type]
        assert times == sorted(times), "more bytes never take less time"
    assert {one.name for one in algorithms(wiring.of(64), "all_to_all")} == {"direct"}


def test_a_ring_and_hosts_are_used_in_one_direction() -> None:
    """T3's closed form is a ring in one direction, also if a torus has a single line."""
    for topology in (
        ring(8, 100.0),
        torus(8, 100.0, 0.0, 8),
        torus(8, 100.0, 0.0, 1, 8),
        hosts(8, 100.0, 0.0, 20.0, 2.0, 4),
    ):
        for op in ("reduce_scatter", "all_gather", "all_reduce"):
            assert not [one for one in algorithms(topology, op) if "both" in one.name]  # type: ignore[arg-type]


def test_on_hosts_one_dimension_follows_the_other() -> None:
    """NICs carry the sums of each host."""
    count = 64 * MIB
    on_hosts = Wiring(hosts, (100.0, 0.0, 20.0, 2.0, 4))
    for op in ("reduce_scatter", "all_gather"):
        assert _us(op, 16, count, on_hosts) == pytest.approx(3 * count / 4 / 100 + 2 * 2 + 3 * count / 16 / 20)


def test_few_bytes_take_few_rounds() -> None:
    """A ring needs 31 rounds. Recursive halving needs 5, over up to 16 links each way."""
    wiring = Wiring(ring, (LINK, LATENCY))
    assert algorithm(wiring.of(32), "all_gather", 32.0).name == "direct"
    assert algorithm(wiring.of(32), "all_gather", 96.0 * MIB).name == "ring"
    assert algorithm(Wiring(switch, (LINK, LATENCY)).of(32), "all_reduce", 1e3).name == "direct"
    assert _us("all_reduce", 32, 32 * 256, wiring) < 2 * 31 * LATENCY / 1.5


def test_a_torus_all_to_all_takes_its_bound() -> None:
    """The bound is a cut: half of the ranks send to the other half, over the links between two halves of the rows."""
    world, wiring = 128, Wiring(torus, (100.0, 0.0, 16))
    part = 1000 * 64 * 4
    # In each of 8 rows, two links lead from one half of the columns to the other.
    bound = (world / 2) ** 2 / (8 * 2) * part / 100
    assert _us("all_to_all", world, world * part, wiring) <= 1.05 * bound
    assert _us("all_to_all", world, world * part, wiring) >= bound * (1 - 1e-9)
    targets = tuple(range(1, 16))
    on_ring = simulate(puts(16, *targets), replace(IDLE, wiring=Wiring(ring, (100.0,)), copy_engines=64)).end_us
    assert on_ring == pytest.approx(8 * 8 / 2 * 1000 / 100)


OPS: tuple[Op, ...] = get_args(Op)
RANKS, RATE, US = st.integers(2, 12), st.floats(10, 1000), st.floats(0, 5)
TOPOLOGIES = st.one_of(
    st.builds(switch, RANKS, RATE, US),
    st.builds(mesh, RANKS, RATE, US),
    st.builds(ring, RANKS, RATE, US),
    st.builds(lambda r, c, rate, us: torus(r * c, rate, us, c), st.integers(1, 4), st.integers(2, 5), RATE, US),
    st.builds(
        lambda a, b, c, rate: torus(a * b * c, rate, 0.5, a, b), *[st.integers(1, 3)] * 2, st.integers(2, 3), RATE
    ),
    st.builds(lambda n, g, rate: hosts(n * g, rate, 0.5, rate / 8, 2.0, g), st.integers(1, 4), st.integers(2, 4), RATE),
)


@settings(max_examples=60)
@given(TOPOLOGIES, st.sampled_from(OPS))
def test_no_algorithm_beats_what_links_allow(topology: Topology, op: Op) -> None:
    """The bytes over all links of a rank, and over each link, bound every algorithm."""
    world = topology.ranks
    needed = (world - 1) / world * (2 if op == "all_reduce" else 1)
    for one in algorithms(topology, op):
        assert one.us_per_byte >= least_us(topology, op, 1.0) * (1 - 1e-9), one.name
        if one.name != "tree":
            assert one.sent == pytest.approx(needed) or topology.dims, one.name
            assert one.sent >= needed * (1 - 1e-9), one.name
        busy: dict[tuple[str, int], float] = {}
        for rank in range(world):
            for kind, at, us in one.links[rank % len(one.links)]:
                place = kind, (rank + at) % world
                busy[place] = busy.get(place, 0.0) + us
        assert max(busy.values()) <= one.us_per_byte * (1 + 1e-9), one.name


@settings(max_examples=60)
@given(TOPOLOGIES, st.sampled_from(OPS), st.data())
def test_no_algorithm_beats_what_a_slow_link_allows(topology: Topology, op: Op, data: st.DataObject) -> None:
    """One link, in both directions, is up to 100 times slower than all others."""
    one, factor = data.draw(st.sampled_from(topology.links)), data.draw(st.floats(1, 100))
    ends = {one.source, one.target}
    links = tuple(
        replace(link, bytes_per_us=link.bytes_per_us / factor) if {link.source, link.target} == ends else link
        for link in topology.links
    )
    slower = replace(topology, links=links)
    assert least_us(slower, op, 1.0) >= least_us(topology, op, 1.0) * (1 - 1e-9)
    for found in algorithms(slower, op):
        assert found.us_per_byte >= least_us(slower, op, 1.0) * (1 - 1e-9), found.name


def test_bounds_of_collectives_count_the_links_that_routes_use() -> None:
    """Hosts of one GPU use no switch. In hosts of five, a host's NICs carry one partial sum for each shard of other hosts."""
    alone, fives = hosts(15, 400.0, 0.0, 48.0, 0.0, 1), hosts(15, 400.0, 0.0, 48.0, 0.0, 5)
    for op in ("all_gather", "reduce_scatter"):
        assert least_us(alone, op, 1.0) == pytest.approx(14 / 15 / 48)
        assert least_us(fives, op, 1.0) == pytest.approx(10 / 15 / (5 * 48))
    assert least_us(fives, "all_reduce", 1.0) == pytest.approx(2 * 10 / 15 / (5 * 48))


def test_a_rank_with_a_slow_port_need_not_send_as_much_as_others() -> None:
    """In an all-reduce, it may send its input once and receive the result once. Others then reduce."""
    even = switch(4, 100.0)
    slow_links = tuple(
        replace(link, bytes_per_us=1.0) if 3 in (link.source, link.target) else link for link in even.links
    )
    slow_port = replace(even, links=slow_links)
    assert least_us(slow_port, "all_reduce", 1.0) == pytest.approx(1.0)
    assert least_us(slow_port, "all_gather", 1.0) == pytest.approx(3 / 4)


@settings(max_examples=30)
@given(TOPOLOGIES, st.sampled_from(OPS), st.integers(1, 1 << 20))
def test_a_simulated_collective_takes_what_its_algorithm_does(topology: Topology, op: Op, size: int) -> None:
    count = topology.ranks * 256 * (1 + size // 256)
    schedule = _collective(op, topology.ranks, count)
    found = simulate(schedule, replace(IDLE, wiring=Wiring(lambda ranks: topology)))
    assert found.end_us == pytest.approx(algorithm(topology, op, count).time_us(count), rel=1e-6)


def test_a_collective_below_its_bound_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = costs.algorithm

    def too_fast(*args: object) -> object:
        found = right(*args)  # type: ignore[arg-type]
        return replace(found, us_per_byte=found.us_per_byte / 2, links=((),) * len(found.links))

    monkeypatch.setattr(costs, "algorithm", too_fast)
    with pytest.raises(
        SimulationError, match=r"all_gather x.* ends at 36700\.160 us, but its links carry its bytes until 73400\.320"
    ):
        _us("all_gather", 8, 8 * MIB, Wiring(switch, (100.0,)))
