"""`weft doctor --group`: the printed hosts and connections, and how to start it. `tests/processes/test_two_hosts.py`
runs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.doctor_group import GroupReport, Seat, _path, _write_links, print_group, run
from weft.hw import load_machine
from weft.hw.topology import load_topology
from weft.runtime.links import rounds_of
from weft.sim.between_hosts import LinkFound, Measured

CPU = Seat("alpha", 1, "", 2, "cpu")
GPUS = [
    Seat(host, pid, "H100", 8, f"cuda:{i}", (1 - i,)) for pid, (host, i) in enumerate([("a", 0), ("a", 1), ("b", 0)])
]


def test_without_a_launcher_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert run() == 2
    assert "torchrun --nnodes 2 " in capsys.readouterr().out


def test_paths_of_gpus() -> None:
    assert _path(GPUS[0], GPUS[1]) == "peer access"
    assert _path(GPUS[0], GPUS[2]) == "NCCL"
    assert _path(GPUS[0], GPUS[0]) == "the same GPU"
    assert _path(GPUS[0], Seat("a", 9, "H100", 8, "cuda:3")) == "no peer access"
    assert _path(GPUS[0], CPU) == "none: only one of the ranks has a GPU"


def test_ranks_of_a_host_stand_together(capsys: pytest.CaptureFixture[str]) -> None:
    paths = {(low, high): _path(GPUS[low], GPUS[high]) for high in range(3) for low in range(high)}
    print_group(GroupReport(tuple(GPUS), paths, 210.0))
    text = capsys.readouterr().out
    assert text.startswith(
        "3 ranks on 2 hosts\n\na:\n  rank 0  pid 0  cuda:0, H100\n  rank 1  pid 1  cuda:1, H100\nb:\n  rank 2"
    )
    assert "\npeer access: pairs 0-1\n\nNCCL: pairs 0-2, 1-2\n\nA rendezvous of all ranks takes 210 us" in text


def test_cpu_ranks_without_rails_are_told_how_to_get_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_group(GroupReport((CPU, Seat("beta", 1, "", 2, "cpu")), {(0, 1): "gloo"}, 210.0))
    assert "\nThe ranks form no rails" in capsys.readouterr().out


def test_a_topology_has_the_slowest_measured_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    links = (LinkFound(("a", "b"), 12_000.0, 40.0), LinkFound(("a", "c"), 9_000.0, 60.0))
    measured = Measured(("a", "a", "b", "c"), links, 11_000.0, 4_000.0, 900.0)
    report = GroupReport((*GPUS, Seat("c", 3, "H100", 8, "cuda:0")), {}, 210.0, measured=measured)
    print_group(report)
    assert (
        "\n  a - b  12000 MB/s, round trip 40 us\n  a - c  9000 MB/s, round trip 60 us\n"
        "  all ranks at the same time: 11000 MB/s leave a host in an all-to-all, and each rank copies 4000 MB/s in memory\n"
    ) in capsys.readouterr().out
    path = tmp_path / "links.toml"
    assert _write_links(path, report) == f"The topology is in {path}: weft plan OP --topology {path}"
    topology = load_topology(path, load_machine("h100")).of(4)
    (between,) = topology.routes(0, 2)
    assert min(link.bytes_per_us for link in between) == pytest.approx(9_000.0)
    assert sum(link.latency_us for link in between) == pytest.approx(30.0)


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_each_pair_of_hosts_is_measured_once_and_no_host_twice_in_a_round(count: int) -> None:
    hosts = [f"h{i}" for i in range(count)]
    rounds = rounds_of(hosts)
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
    every = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(every) == len(set(every)) == count * (count - 1) // 2


def test_without_measured_links_it_says_that_it_writes_no_topology(tmp_path: Path) -> None:
    text = _write_links(tmp_path / "links.toml", GroupReport((CPU, CPU), {}, 210.0))
    assert text.endswith("nothing is written, because no links between hosts were measured")
    assert not list(tmp_path.iterdir())
