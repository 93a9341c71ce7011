"""Topologies: routes of every shape, flows that share links, times from textbooks, and invalid files."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sim_toys import TOY, puts
from support.slow import slow

from weft import plan
from weft.cli.operators import arguments
from weft.hw import Quantity, load_machine
from weft.hw.topology import (
    Link,
    Topology,
    Wiring,
    hosts,
    known_topologies,
    load_topology,
    mesh,
    ranks_of,
    ring,
    switch,
    torus,
    unlimited,
)
from weft.hw.topology.shape import PAIRS, SHAPES, shape
from weft.schedule import RANK, Draft, Schedule, lookup
from weft.sim import model_of, simulate
from weft.sim.uses import Links

RANKS = st.integers(1, 13)
TOPOLOGIES = st.one_of(
    st.builds(switch, RANKS, st.just(100.0)),
    st.builds(mesh, RANKS, st.just(100.0)),
    st.builds(ring, RANKS, st.just(100.0)),
    st.builds(lambda rows, columns: torus(rows * columns, 100.0, 0.5, columns), st.integers(1, 4), st.integers(1, 4)),
    st.lists(st.integers(1, 4), min_size=3, max_size=4).map(
        lambda dims: torus(math.prod(dims), 100.0, 0.5, *dims[:-1])
    ),
    st.builds(lambda ranks, gpus: hosts(ranks, 100.0, 0.0, 10.0, 2.0, gpus), RANKS, st.integers(1, 5)),
)


def _distances(topology: Topology, source: int) -> dict[int, int]:
    """Return the number of links from `source` to each node, by breadth-first search."""
    found = {source: 0}
    while more := [link for link in topology.links if link.source in found and link.target not in found]:
        for link in more:
            found.setdefault(link.target, found[link.source] + 1)
    return found


@given(TOPOLOGIES)
def test_every_route_leads_from_source_to_target_over_the_fewest_links(topology: Topology) -> None:
    for source in range(topology.ranks):
        distances = _distances(topology, source)
        for target in range(topology.ranks):
            for route in topology.routes(source, target):
                assert [link.target for link in route] == [
                    *(link.source for link in route[1:]),
                    *[target] * bool(route),
                ]
                assert not route or route[0].source == source
                assert len(route) <= distances[target], "rounds may find a longer way first"
                assert len(route) >= (source != target)
                assert set(route) <= set(topology.links)
    assert len({link.name for link in topology.links}) == len(topology.links)


@given(TOPOLOGIES, st.lists(st.tuples(RANKS, RANKS, st.integers(1, 1000)), max_size=20))
def test_what_goes_into_a_node_comes_out_of_it(topology: Topology, flows: list[tuple[int, int, int]]) -> None:
    """Links carry the bytes of each flow and no others. At every node the arriving bytes leave, except at the ends of a
    flow.
    """
    ranks = topology.ranks
    carried, left = dict.fromkeys(topology.links, 0.0), [0.0] * (2 * ranks + 2)
    by_place = {(link.kind, link.at): link for link in topology.links}
    for a, b, count in flows:
        rank, target = a % ranks, b % ranks
        left[rank] += count
        left[target] -= count
        for use in Links(topology, rank).uses(0, target - rank, count, us=7.0):
            kind, at = use.place
            link = by_place[kind, (rank + at) % ranks]
            carried[link] += use.amount * link.bytes_per_us * 7.0
    for node, count in enumerate(left):
        out = sum(n for link, n in carried.items() if link.source == node)
        into = sum(n for link, n in carried.items() if link.target == node)
        assert out - into == pytest.approx(count, abs=1e-6)


def test_routes_by_name() -> None:
    def names(topology: Topology, source: int, target: int) -> list[str]:
        (route,) = topology.routes(source, target)
        return [link.name for link in route]

    assert names(switch(4, 1.0), 1, 3) == ["1 out", "3 in"]
    assert names(mesh(4, 1.0), 3, 1) == ["3 to +2"]
    assert names(ring(5, 1.0), 4, 1) == ["4 row +1", "0 row +1"]
    assert names(ring(5, 1.0), 1, 4) == ["1 row -1", "0 row -1"]
    assert names(torus(20, 1.0, 0.0, 5), 1, 8) == ["1 row +1", "2 row +1", "3 column +1"]
    assert names(torus(60, 1.0, 0.0, 3, 4), 0, 47) == [
        "0 row -1",
        "2 column -1",
        "11 dimension 3 -1",
        "59 dimension 3 -1",
    ]
    two = hosts(6, 1.0, 0.0, 0.1, 2.0, 3)
    assert names(two, 0, 2) == ["0 out", "2 in"]
    assert names(two, 0, 5) == ["0 NIC out", "5 NIC in"]
    assert names(unlimited(3), 0, 2) == []


def test_half_way_around_a_ring_both_ways_are_taken() -> None:
    both = ring(4, 1.0).routes(3, 1)
    assert [[link.name for link in route] for route in both] == [["3 row +1", "0 row +1"], ["3 row -1", "2 row -1"]]
    assert len(torus(16, 1.0, 0.0, 4).routes(0, 10)) == 4
    assert len(torus(16, 1.0, 0.0, 4).routes(0, 2)) == 2
    assert len(torus(64, 1.0, 0.0, 4, 4).routes(0, 42)) == 8
    assert len(ring(2, 1.0).routes(0, 1)) == 1
    assert Links(ring(4, 1.0), 3).bytes_per_us(0, 2) == 1.0, "no faster than one link"


@pytest.mark.parametrize(
    "topology",
    [ring(8, 100.0), slow(torus(128, 100.0, 0.0, 16)), torus(24, 100.0, 0.0, 4), torus(24, 100.0, 0.0, 2, 3)],
)
def test_an_all_to_all_loads_all_links_of_a_kind_alike(topology: Topology) -> None:
    carried = dict.fromkeys(topology.links, 0.0)
    for source in range(topology.ranks):
        for target in range(topology.ranks):
            for route in (routes := topology.routes(source, target)):
                for link in route:
                    carried[link] += 1 / len(routes)
    for kind in {link.kind.split()[0] for link in topology.links}:
        assert len({round(n, 9) for link, n in carried.items() if link.kind.startswith(kind)}) == 1, kind


def test_links_lead_where_they_do_and_nowhere_else() -> None:
    one_way = Topology(2, (Link("wire", 0, 0, 1, 5.0),))
    assert [[link.name for link in route] for route in one_way.routes(0, 1)] == [["0 wire"]]
    with pytest.raises(ValueError, match="no links lead from rank 1 to rank 0"):
        one_way.routes(1, 0)


@pytest.mark.parametrize(
    ("topology", "period"),
    [
        (switch(6, 1.0), 1),
        (mesh(6, 1.0), 1),
        (ring(6, 1.0), 1),
        (torus(12, 1.0, 0.0, 4), 4),
        (torus(30, 1.0, 0.0, 2, 3), 6),
        (hosts(6, 1.0, 0.0, 0.1, 2.0, 3), 3),
        (hosts(7, 1.0, 0.0, 0.1, 2.0, 3), 7),
        (replace(mesh(4, 1.0), links=(*mesh(4, 1.0).links[:-1], replace(mesh(4, 1.0).links[-1], latency_us=1.0))), 4),
    ],
)
def test_which_ranks_see_the_same(topology: Topology, period: int) -> None:
    assert topology.period == period


# -- in the simulator: links of 100 bytes/us, copies of 1000 bytes with a latency of 7 us


def _on(wiring: Wiring) -> object:
    return replace(TOY, wiring=wiring)


def _ring_all_gather(world: int) -> Schedule:
    """Return a schedule in which each rank forwards the last received chunk to the next rank. Each rank has 1000 bytes."""
    d = Draft("ring", world)
    x, box = d.buffer("x", 10, 25, "fp32", "input"), d.buffer("box", 10 * world, 25, "fp32", "symmetric")
    came, right = d.signals("came", world), (RANK + 1) % world
    lane = d.lane("copies", "copy").copy(x.part(), box.part(rows=(RANK * 10, 10), at=right)).set(came, 0, at=right)
    for step in range(1, world - 1):
        rows = ((RANK + world - step) % world * 10, 10)
        lane.wait(came, step - 1).copy(box.part(rows=rows), box.part(rows=rows, at=right)).set(came, step, at=right)
    d.lane("compute").wait(came, world - 2)
    return d.schedule()


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_ring_all_gather_on_a_ring_takes_the_textbook_time(world: int) -> None:
    """The time is (p - 1) (latency + bytes / bandwidth), because no transfer waits for a link. The signal is sent
    together with the bytes.
    """
    found = simulate(_ring_all_gather(world), _on(Wiring(ring, (100.0, 0.25))))  # type: ignore[arg-type]
    assert found.end_us == pytest.approx((world - 1) * (7 + 1000 / 100 + 0.25))
    assert found.program.ranks == (0,)


def test_all_to_all_at_once_takes_what_the_fullest_link_of_a_ring_takes() -> None:
    """In a ring of 5 ranks, each link carries three flows: one to the next rank, and two between ranks at distance two."""
    found = simulate(puts(5, 1, 2, 3, 4), _on(Wiring(ring, (100.0,))))  # type: ignore[arg-type]
    assert found.end_us == pytest.approx(7 + 3 * 1000 / 100)


@pytest.mark.parametrize(
    ("wiring", "alone_us", "both_us"),
    [
        (Wiring(mesh, (100.0,)), 10, 10),
        (Wiring(switch, (100.0,)), 10, 20),
        (Wiring(ring, (100.0,)), 10, 20),  # the route from 0 to 2 goes through 1
        (Wiring(hosts, (100.0, 0.0, 20.0, 0.0, 2)), 10, 50),
    ],
)
def test_two_flows_share_a_link_that_both_go_over(wiring: Wiring, alone_us: float, both_us: float) -> None:
    """Rank 0 sends to ranks 1 and 2. On the hosts topology, the second transfer uses the NIC and does not disturb the
    first.
    """

    def ends(*targets: int) -> dict[str, float]:
        d = Draft("from rank 0", 5)
        x = d.buffer("x", 10, 25, "fp32", "input")
        for to in targets:
            box = d.buffer(f"box{to}", 10, 25, "fp32", "symmetric")
            rows = (0, lookup((10, 0, 0, 0, 0), RANK))
            d.lane(f"to {to}", "copy").copy(x.part(rows=rows), box.part(rows=rows, at=to))
        found = simulate(d.schedule(), replace(TOY, wiring=wiring, copy_latency_us=0.0))
        return {span.lane: span.end_us for span in found.timeline}

    assert ends(1) == {"to 1": pytest.approx(alone_us)}
    both = ends(1, 2)
    assert both["to 2"] == pytest.approx(both_us)
    assert both["to 1"] == pytest.approx(alone_us if wiring.builder in (mesh, hosts) else both_us)


def test_a_flow_on_a_mesh_disturbs_no_other_pair() -> None:
    """Each of 4 ranks sends to all others."""
    wiring = _on(Wiring(mesh, (100.0,)))
    assert simulate(puts(4, 1, 2, 3), wiring).end_us == simulate(puts(4, 2), wiring).end_us  # type: ignore[arg-type]


def test_latencies_of_a_route_add_up_and_count_once_for_a_copy_and_its_signal() -> None:
    d = Draft("to the other host", 4)
    x, box = d.buffer("x", 10, 25, "fp32", "input"), d.buffer("box", 10, 25, "fp32", "symmetric")
    came, peer = d.signals("came", 1), (RANK + 2) % 4
    d.lane("copies", "copy").copy(x.part(), box.part(at=peer)).set(came, at=peer)
    d.lane("compute").wait(came)
    model = replace(TOY, wiring=Wiring(hosts, (100.0, 0.5, 20.0, 2.0, 2)), signal_remote_us=1.0)
    found = simulate(d.schedule(), model)
    assert found.end_us == pytest.approx(7 + 1000 / 20 + 1 + 2 * 2)
    assert found.program.ranks == (0, 1), "a rank of each place in a host"
    near = replace(model, wiring=Wiring(hosts, (100.0, 0.5, 20.0, 2.0, 4)))
    assert simulate(d.schedule(), near).end_us == pytest.approx(7 + 1000 / 100 + 1 + 2 * 0.5)


def test_a_fetched_operand_takes_the_way_of_the_request_and_of_the_bytes() -> None:
    d = Draft("from the other host", 4)
    x, y = d.buffer("x", 10, 25, "fp32", "symmetric"), d.buffer("y", 10, 25, "fp32", "output")
    d.lane("copies", "copy").copy(x.part(at=(RANK + 2) % 4), y.part())
    model = replace(TOY, wiring=Wiring(hosts, (100.0, 0.5, 20.0, 2.0, 2)))
    assert simulate(d.schedule(), model).end_us == pytest.approx(7 + 2 * (2 + 2) + 1000 / 20)


# -- files

RATE = '{value = 100, unit = "GB/s", source = "paper"}'


def _file(folder: Path, text: str) -> Path:
    path = folder / "wires.toml"
    path.write_text(text)
    return path


def test_every_shipped_topology_loads_for_a_machine_that_has_its_numbers() -> None:
    h200 = load_machine("h200")
    machine = replace(h200, quantities={**h200.quantities, "link.pair_usable": h200["link.bandwidth"]})
    for name in known_topologies():
        topology = load_topology(name, machine).of(16)
        assert topology.routes(0, 15)
        assert load_topology(name, machine) == load_topology(name, machine)


def test_numbers_of_the_file_come_before_the_machines(tmp_path: Path) -> None:
    mi300x = load_machine("mi300x")
    path = _file(tmp_path, f'name = "ring"\nshape = "ring"\n[link]\npair_usable = {RATE}\n')
    assert load_topology(path, mi300x) == Wiring(ring, (100e3, 0.0))
    assert load_topology("ring", mi300x) == Wiring(ring, (48e3, 0.0))


def test_a_torus_may_have_any_number_of_dimensions(tmp_path: Path) -> None:
    """A name with sizes is a topology of `--topology`, of a topology file, and of a machine file."""
    mi300x = load_machine("mi300x")
    found = load_topology("torus:4x3x2", mi300x)
    assert found == Wiring(torus, (48e3, 0.0, 4, 3), 24)
    assert found.of(24).dims == (4, 3, 2)
    assert found.scaled(0.5).numbers == (24e3, 0.0, 4, 3)
    assert load_topology("torus:2x2x2x2", mi300x).of(16).dims == (2, 2, 2, 2)
    assert len(found.of(24).links) == 24 * 5, "a ring of two ranks has one link in each direction"
    path = _file(tmp_path, f'name = "cube"\nshape = "torus:4x3x2"\n[link]\npair_usable = {RATE}\n')
    assert load_topology(path, mi300x) == Wiring(torus, (100e3, 0.0, 4, 3), 24)
    assert ranks_of(path) == 24
    shipped = (Path(plan.__file__).parents[1] / "hw" / "mi300x.toml").read_text()
    text, mine = (
        re.sub('^topology = "mesh"$', 'topology = "torus:4x3x2"', shipped, flags=re.MULTILINE),
        tmp_path / "mine.toml",
    )
    mine.write_text(text)
    assert model_of(load_machine(mine), 24).wiring == found
    sized = arguments("all_gather_matmul", "48,64,64", None, str(mine), None, None)
    assert sized["ranks"] == 24
    with pytest.raises(ValueError, match=r"--ranks 8, but the topology of .*mine.toml, torus:4x3x2 has 24 ranks: omit"):
        arguments("all_gather_matmul", "48,64,64", 8, str(mine), None, None)
    assert arguments("all_gather_matmul", "48,64,64", 8, str(mine), "ring", None)["ranks"] == 8
    with pytest.raises(
        ValueError, match="write torus:COLUMNSxROWS, such as torus:16x8, or more sizes, such as torus:8x8x8"
    ):
        load_topology("torus:8", mi300x)
    with pytest.raises(ValueError, match="a torus with blocks of 4x3 ranks cannot have 20 ranks: use a multiple of 12"):
        torus(20, 1.0, 0.0, 4, 3)
    with pytest.raises(ValueError, match="topology 'ring:8x8': write ring:RANKS"):
        load_topology("ring:8x8", mi300x)
    with pytest.raises(ValueError, match="such as ring:8; sizes are from 1 to 999999"):
        load_topology("ring:1000000", mi300x)


def test_a_topology_is_one_function(tmp_path: Path) -> None:
    numbers = (*PAIRS, "clique.gpus")

    @shape(numbers, ("cliques", "clique.gpus"), {"clique.gpus": Quantity(2, "1", "assumed")})
    def clique(ranks: int, bytes_per_us: float, latency_us: float, gpus: int) -> Topology:
        pairs = ((r, r - r % gpus + (r + d) % gpus) for r in range(ranks) for d in range(1, gpus))
        return Topology(ranks, tuple(Link("to", r, r, other, bytes_per_us, latency_us) for r, other in pairs))

    machine = load_machine("mi300x")
    try:
        assert "clique" in known_topologies()
        assert load_topology("clique", machine) == Wiring(clique, (48e3, 0.0, 2))
        assert load_topology("clique:3x4", machine) == Wiring(clique, (48e3, 0.0, 4), 12)
        assert load_topology("clique:3x4", machine).scaled(0.5).numbers == (24e3, 0.0, 4)
        path = _file(
            tmp_path, 'name = "c"\nshape = "clique"\nclique.gpus = {value = 8, unit = "1", source = "paper"}\n'
        )
        assert load_topology(path, machine) == Wiring(clique, (48e3, 0.0, 8))
        with pytest.raises(ValueError, match="topology 'clique:3': write clique:CLIQUESxGPUS, such as clique:16x8"):
            load_topology("clique:3", machine)
    finally:
        del SHAPES["clique"]


def test_a_machine_file_may_name_a_topology_file_beside_it(tmp_path: Path) -> None:
    _file(tmp_path, f'name = "ring"\nshape = "ring"\n[link]\npair_usable = {RATE}\n')
    shipped = Path(plan.__file__).parents[1] / "hw" / "h200.toml"
    text = re.sub('^topology = "switch"$', 'topology = "wires.toml"', shipped.read_text(), flags=re.MULTILINE)
    (tmp_path / "mine.toml").write_text(text)
    assert model_of(load_machine(tmp_path / "mine.toml"), 4).wiring == Wiring(ring, (100e3, 0.0))


def test_a_machine_files_topology_is_a_name(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(f'name = "odd"\n[topology]\nport = {RATE}\n')
    with pytest.raises(
        ValueError, match=r'odd\.toml: topology = .* must be a name or a path, such as topology = "switch"'
    ):
        load_machine(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('shape = "ring"', r'wires\.toml: a topology file needs a string as its name: add name = "\.\.\."'),
        ('name = "x"', r"wires\.toml: shape is missing; use one of hosts, mesh, ring, switch, torus"),
        ('name = "x"\nshape = "star"', r"wires\.toml: shape = 'star' is unknown; use one of hosts, mesh"),
        (f'name = "x"\nshape = "ring"\n[link]\npair_usble = {RATE}',
         r"wires\.toml: link\.pair_usble is not a known key: do you mean link\.pair_usable\?"),
        (f'name = "x"\nshape = "ring"\n[link]\nport_usable = {RATE}',
         r"wires\.toml: remove link\.port_usable: the numbers of shape 'ring' are link\.pair_usable, link\.pair_latency"),
        ('name = "x"\nshape = "ring"\n[link]\npair_usable = {value = 1, unit = "us", source = "paper"}',
         r"link\.pair_usable is in us: give it in B/s or GB/s"),
        ('name = "x"\nshape = "ring"\n[link]\npair_usable = {value = 1, unit = "GB/s"}',
         r"wires\.toml: link\.pair_usable has source None; use one of measured"),
        ('name = "x"\nshape = "torus"\n[torus]\ncolumns = {value = 2.5, unit = "1", source = "paper"}',
         r"torus\.columns = 2\.5 \(paper\) must be an integer"),
        ('name = "x"\nshape = "ring"\nlatency = 3', r"wires\.toml: latency = 3 needs value, unit and source"),
        ("name = ", r"wires\.toml cannot be read: it is not valid TOML"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_told_by_file_key_and_fix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_topology(_file(tmp_path, text), load_machine("mi300x"))


def test_what_is_missing_is_told_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"no topology 'rings': give one of hosts, mesh, ring, switch, torus, or a path"
    ):
        load_topology("rings", load_machine("h200"))
    with pytest.raises(ValueError, match=r"the topology file nowhere\.toml cannot be read \(No such file"):
        load_topology("nowhere.toml", load_machine("h200"))
    with pytest.raises(
        KeyError,
        match=r"topology ring: NVIDIA H200 has no link\.pair_usable: add it to the file of the machine or the topology",
    ):
        load_topology("ring", load_machine("h200"))
    with pytest.raises(ValueError, match="rows of 4 ranks cannot have 6 ranks: use a multiple of 4"):
        load_topology("torus", load_machine("mi300x")).of(6)


# -- plans


def _times(topology: str | None) -> dict[str, float | None]:
    found = plan.explanation(
        "all_gather_matmul",
        M=65536,
        N=2048,
        K=8192,
        ranks=8,
        hw="mi300x",
        topology=topology,
        dtype="bf16",
        mode="queued",
    )
    return {row.candidate.name: row.predicted_us for row in found.choice.rows}


def test_plans_are_made_for_other_topologies_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    usual, ring_us = _times(None), _times("ring")
    assert usual == _times("mesh"), "which a MI300X has anyway"
    # 8192 rows of 8192 items of each rank travel around the ring.
    shard, gathered = 8192 * 8192 * 2, load_machine("mi300x")["collective.all_gather"].si * 1e-6
    wanted = 7 * shard / 48e3 - 7 * shard / gathered
    assert (ring_us["serial"] or 0) - (usual["serial"] or 0) == pytest.approx(wanted, rel=1e-3)
    text = plan.explain("all_gather_matmul", M=4096, N=512, K=512, ranks=8, hw="mi300x", topology="torus")
    assert "topology torus instead of mesh" in text
    with pytest.raises(ValueError, match="rows of 4 ranks cannot have 6"):
        plan.explain("all_gather_matmul", M=600, N=512, K=512, ranks=6, hw="mi300x", topology="torus")
    with pytest.raises(ValueError, match=r"has no link\.pair_usable"):
        plan.explain("all_gather_matmul", M=600, N=512, K=512, ranks=6, hw="h200", topology="ring")
