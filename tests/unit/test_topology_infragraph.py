"""Topologies from and to InfraGraph. Tests of reading need PyPI's `infragraph`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.cli.app import app
from weft.errors import UnreadableError
from weft.hw.topology import (
    Link,
    Topology,
    hosts,
    infragraph_of,
    mesh,
    ranks_of,
    read_infragraph,
    ring,
    switch,
    torus,
)
from weft.hw.topology.infragraph import _per_host, _torus
from weft.plan import comparison
from weft.sim.collectives import algorithms, least_us

SHAPES = {
    "switch": switch(4, 1e5, 0.5),
    "mesh": mesh(4, 5e4, 1.0),
    "ring": ring(5, 1e3),
    "torus": torus(8, 5e4, 0.5, 4),
    "cube": torus(24, 5e4, 0.5, 4, 3),
    "hosts": hosts(8, 4e5, 0.5, 5e4, 2.0, 4),
}


def _installed() -> None:
    pytest.importorskip("infragraph", reason="infragraph is not installed (pip install infragraph)")


def _read(tmp_path: Path, value: Any) -> Topology:
    _installed()
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(value))
    found = read_infragraph(file)
    assert ranks_of(file) == found.ranks
    return found.of(found.ranks)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_is_read_back(shape: str, tmp_path: Path) -> None:
    given = SHAPES[shape]
    found = _read(tmp_path, infragraph_of(given, shape))
    assert found.ranks == given.ranks
    for source in range(given.ranks):
        for target in range(given.ranks):
            one, other = given.paths(source, target), found.paths(source, target)
            assert len(one.routes[0]) == len(other.routes[0])
            assert (other.latency_us, other.bytes_per_us) == pytest.approx((one.latency_us, one.bytes_per_us))


def test_ranks_on_one_switch_are_alike(tmp_path: Path) -> None:
    assert _read(tmp_path, infragraph_of(SHAPES["switch"], "switch")).period == 1


@pytest.mark.parametrize(("shape", "has_hosts"), [("torus", False), ("cube", False), ("hosts", True)])
def test_collectives_of_a_grid_take_as_long_as_before_it_was_written(
    shape: str, has_hosts: bool, tmp_path: Path
) -> None:
    """InfraGraph does not say that ranks form hosts or a torus. Collectives use one dimension of both after the other."""
    given, file = SHAPES[shape], tmp_path / "cluster.json"
    found = _read(tmp_path, infragraph_of(given, shape))
    assert found.dims == given.dims
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        assert least_us(found, op, 1e6) == pytest.approx(least_us(given, op, 1e6))
        for one, other in zip(algorithms(given, op), algorithms(found, op), strict=True):
            if shape == "hosts" or "dimension" in one.name:  # other routes on a torus do not go along rows first
                assert other.time_us(1e6) == pytest.approx(one.time_us(1e6)), one.name
    names = {
        row.name
        for row in comparison(
            "matmul_reduce_scatter", M=3072, N=256, K=512, ranks=given.ranks, hw="h200", dtype="bf16", topology=file
        ).rows
    }
    assert any(name.startswith("two_levels") for name in names) == has_hosts


def test_links_that_differ_from_a_grid_give_no_dimensions(tmp_path: Path) -> None:
    for shape in ("switch", "mesh", "ring"):
        assert _read(tmp_path, infragraph_of(SHAPES[shape], shape)).dims == ()
    grid = infragraph_of(SHAPES["torus"], "torus")
    del grid["edges"][0]
    assert _read(tmp_path, grid).dims == ()
    uneven = infragraph_of(hosts(6, 4e5, 0.5, 5e4, 2.0, 4), "hosts")
    assert _read(tmp_path, uneven).dims == ()


def test_grids_are_found_in_links() -> None:
    """Without the package `infragraph`."""
    of_hosts, of_torus = SHAPES["hosts"].links, SHAPES["torus"].links
    assert (_per_host(8, of_hosts), _torus(8, of_hosts)) == (4, ())
    assert (_per_host(8, of_torus), _torus(8, of_torus)) == (0, (4, 2))
    for dims in ((5, 3), (3, 2, 4), (4, 4, 4), (2, 3, 2, 3)):
        assert _torus(math.prod(dims), torus(math.prod(dims), 1.0, 0.0, *dims[:-1]).links) == dims
    assert (_per_host(4, SHAPES["mesh"].links), _torus(4, SHAPES["mesh"].links)) == (0, ())
    slow_first = [
        link for link in of_hosts if link.at or link.kind.startswith("NIC")
    ]  # rank 0 reaches no GPU of its host
    assert _per_host(8, slow_first) == 0


def test_servers_are_hosts(tmp_path: Path) -> None:
    assert _read(tmp_path, _server(3, bandwidth=_gigabytes(25))).dims == (4, 2)


def _server(switches: int, **physical: Any) -> dict[str, Any]:
    """Return two servers with four GPUs and `switches` switches each. Each server has a NIC behind its first switch."""
    names = {"xpu": 4, "switch": switches, "nic": 1}
    components = [{"name": of, "count": count, "choice": of, of: {}} for of, count in names.items()]
    edges = [("xpu", "switch", "inside"), ("nic", "switch[0]", "inside")]
    fast = {"bandwidth": {"choice": "gigabits_per_second", "gigabits_per_second": 400}}
    return {
        "name": "two servers",
        "devices": [
            {
                "name": "server", "components": components,
                "links": [{"name": "inside", "physical": fast}],
                "edges": [
                    {"ep1": {"component": a}, "ep2": {"component": b}, "scheme": "many2many", "link": link} for a, b, link in edges
                ],
            }
        ],
        "instances": [{"name": "host", "device": "server", "count": 2}],
        "links": [{"name": "between", "physical": physical}],
        "edges": [
            {
                "ep1": {"instance": "host[0]", "component": "nic"}, "ep2": {"instance": "host[1]", "component": "nic"},
                "scheme": "one2one", "link": "between",
            }
        ],
    }  # fmt: skip


def _gigabytes(rate: float) -> dict[str, Any]:
    return {"choice": "gigabytes_per_second", "gigabytes_per_second": rate}


def test_a_flow_spreads_over_equal_switches_and_crosses_hosts_by_nics(tmp_path: Path) -> None:
    latency = {"choice": "ns", "ns": 700}
    found = _read(tmp_path, _server(3, bandwidth=_gigabytes(25), latency=latency))
    inside, across = found.paths(0, 3), found.paths(0, 4)
    assert (found.ranks, len(inside.routes), inside.bytes_per_us) == (8, 3, pytest.approx(50e3))
    assert len(across.routes) == 1
    assert len(across.routes[0]) == 5
    assert (across.bytes_per_us, across.latency_us) == (pytest.approx(25e3), pytest.approx(0.7))


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cluster.json"
    with pytest.raises(UnreadableError, match="cannot be read"):
        read_infragraph(file)
    file.write_text("{")
    with pytest.raises(UnreadableError):
        read_infragraph(file)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "infragraph.infragraph_service", None)
        file.write_text("{}")
        with pytest.raises(ValueError, match="need the package infragraph: pip install infragraph"):
            read_infragraph(file)
    _installed()
    with pytest.raises(UnreadableError, match="is not a valid InfraGraph infrastructure"):
        _read(tmp_path, {"name": 3})
    with pytest.raises(ValueError, match=r"these links have none: between\. Give physical.bandwidth"):
        _read(tmp_path, _server(1))
    transfers = {"choice": "gigatransfers_per_second", "gigatransfers_per_second": 32}
    with pytest.raises(ValueError, match="'between' has a bandwidth in GT/s: give gigabits_per_second"):
        _read(tmp_path, _server(1, bandwidth=transfers))


def test_links_that_infragraph_cannot_express_are_refused() -> None:
    there = Link("to", 0, 0, 1, 1e3)
    for links in ((there,), (there, Link("to", 1, 1, 0, 2e3))):
        with pytest.raises(ValueError, match=r"cannot represent the links between nodes . and .: give"):
            infragraph_of(Topology(2, links), "one way")
    with pytest.raises(ValueError, match="no links to write"):
        infragraph_of(Topology(2, ()), "none")


def test_the_command_writes_a_topology_and_simulates_it_alike(tmp_path: Path) -> None:
    file, records = tmp_path / "ring.json", tmp_path / "sim.json"
    given = ["sim", "matmul_reduce_scatter", "--shape", "1024,512,512", "--hw", "mi300x", "--schedule", "serial"]
    given += ["--json", str(records)]
    done = CliRunner().invoke(app, [*given, "--topology", "ring:4", "--infragraph", str(file)])
    assert done.exit_code == 0, done.output
    assert "the topology as an InfraGraph" in done.output
    _installed()
    done = CliRunner().invoke(app, [*given, "--topology", str(file)])
    assert done.exit_code == 0, done.output
    first, second = (json.loads(line) for line in records.read_text().splitlines())
    assert second["ranks"] == 4
    assert second["bound_us"] == pytest.approx(first["bound_us"])
    assert [row["us"] for row in second["schedules"]] == pytest.approx([row["us"] for row in first["schedules"]])
