"""The study of fused embeddings: the model of two nodes against a loop, the iteration's graph by hand, the records, the
command and the page.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.bench.core import records as files
from weft.bench.report import rewrite
from weft.cli.app import app
from weft.hw.topology import torus
from weft.sim.collectives import algorithms
from weft.studies import fused_embedding as study
from weft.studies.dlrm_iteration import Dlrm, Task, ends_us, exchange_us, reduce_us
from weft.studies.fused_embedding_model import (
    Order,
    Setting,
    bag_bytes,
    between_nodes,
    in_a_node,
    rate,
    slice_us,
    with_message,
)
from weft.studies.numbers import load_numbers

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "sim-fused-embedding.jsonl"
NUMBERS = study.our_numbers()


@pytest.mark.parametrize("order", ["natural", "remote_first"])
@pytest.mark.parametrize("size", [2, 32])
def test_two_nodes_do_what_a_loop_over_slices_does(order: Order, size: int) -> None:
    setting = Setting(256, 64)
    slice_us = size * bag_bytes(NUMBERS) / rate(NUMBERS, NUMBERS["gpu.occupancy"])
    wire_us = size * 256 * 4 / 20e9 * 1e6 + NUMBERS.us("nic.message")
    arrived = []
    pooled_us = 0.0
    for node in (0, 1):
        count = 256 * 64 // size
        own_first = order == "natural" and node == 0
        remote = [i >= count // 2 if own_first else i < count // 2 for i in range(count)]
        pooled_us, left_us = 0.0, 0.0
        for is_remote in remote:
            pooled_us += slice_us
            if is_remote:
                left_us = max(left_us, pooled_us) + wire_us
        arrived.append(left_us + NUMBERS.us("nic.latency"))
    ends = [NUMBERS.us("gpu.launch") + max(pooled_us, arrived[1 - node]) for node in (0, 1)]
    assert between_nodes(setting, NUMBERS, slice_size=size, order=order).fused == pytest.approx(ends)


@pytest.mark.parametrize("rows", [5.5, 70])
def test_no_kernel_is_faster_than_its_memory_or_its_links(rows: float) -> None:
    numbers = NUMBERS.with_value("model.pooling", rows)
    peak = 1e-6 * numbers["memory.bandwidth"]
    for setting in study.BETWEEN:
        least = max(setting.vectors * bag_bytes(numbers) / peak, setting.vectors / 2 * 1024 / 20e9 * 1e6)
        for size in study.SLICES:
            assert min(between_nodes(setting, numbers, slice_size=size).fused) > least
    for setting in study.WITHIN:
        least = max(setting.vectors * bag_bytes(numbers) / peak, setting.vectors / 4 * 1024 / 80e9 * 1e6)
        assert in_a_node(setting, numbers).fused[0] > least


def test_larger_slices_are_never_slower_and_more_occupancy_is_up_to_three_quarters() -> None:
    by_occupancy = [max(between_nodes(study.ONE, NUMBERS, occupancy=of).fused) for of in (0.25, 0.5, 0.75)]
    by_slice = [max(between_nodes(study.ONE, NUMBERS, slice_size=of).fused) for of in study.SLICES]
    assert by_occupancy == sorted(by_occupancy, reverse=True)
    assert all(later <= 1.001 * earlier for earlier, later in itertools.pairwise(by_slice))


def test_wavefronts_contend_beyond_three_quarters() -> None:
    calm = rate(NUMBERS, 0.75)
    assert calm == rate(NUMBERS.with_value("memory.contention", 0.0), 0.75)
    assert [calm / rate(NUMBERS, of) for of in (0.8125, 0.875, 1.0)] == pytest.approx([1.125, 1.25, 1.25])


@pytest.mark.parametrize("share", [0.5, 0.7, 0.81])
def test_skew_is_half_of_what_the_nic_takes_longer_than_pooling(share: float) -> None:
    numbers = NUMBERS.with_value("memory.share", share)
    pooling_us, nic_us = slice_us(numbers)
    setting = Setting(65536, 64)  # with so many slices, latency and launch are negligible
    natural, first = (between_nodes(setting, numbers, order=order).skew for order in study.ORDERS)
    assert natural == pytest.approx(max(0.0, (nic_us / pooling_us - 1) / 2), abs=1e-4)
    assert first == 0


def test_the_time_of_a_message_is_what_figure_12_gives() -> None:
    assert with_message(study.ONE, NUMBERS)["nic.message"] == pytest.approx(NUMBERS["nic.message"], rel=0.01)


def test_tasks_wait_for_resources_for_each_other_and_stay_beside() -> None:
    first = [Task("a", "gpu", 3), Task("b", "network", 2, ("a",)), Task("c", "gpu", 4), Task("d", "gpu", 1, ("b",))]
    assert ends_us(first) == {"a": 3, "b": 5, "c": 7, "d": 8}
    assert ends_us([Task("a", "gpu", 3), Task("b", "network", 2, beside="a"), Task("c", "gpu", 1, ("b",))]) == {
        "a": 3, "b": 3, "c": 4,
    }  # fmt: skip
    assert ends_us([Task("a", "gpu", 3), Task("b", "network", 5, beside="a")])["b"] == 5
    with pytest.raises(ValueError, match="these tasks wait for each other, or for a task that does not exist: a, b"):
        ends_us([Task("a", "gpu", 1, ("b",)), Task("b", "gpu", 1, ("a",))])


@pytest.mark.parametrize("samples", [64, 4096])
@pytest.mark.parametrize("tables", [1, 64])
def test_no_gain_is_above_what_is_exposed(samples: int, tables: int) -> None:
    dlrm = Dlrm(samples, tables, NUMBERS)
    saved = dlrm.iteration_us(False) - dlrm.iteration_us(True)
    assert 0 <= saved <= min(dlrm.exposed_us, dlrm.embedding_us) + 1e-6
    # All ranks send equally many bytes. A node's links need this time for the node's own bytes, each over half of a
    # line.
    links_us = dlrm.exchange_bytes * 127 / 128 / (4 * 25e9) * 1e6
    assert dlrm.exchange_us > links_us


@pytest.mark.parametrize(("nodes", "columns"), [(128, 16), (128, 8), (24, 4), (9, 3)])
def test_collectives_on_the_torus_take_what_the_simulator_finds_by_all_routes(nodes: int, columns: int) -> None:
    numbers = NUMBERS.with_value("scale.nodes", nodes).with_value("scale.columns", columns)
    topology = torus(nodes, 25e3, 0.7, columns)
    (direct,) = algorithms(topology, "all_to_all")
    assert exchange_us(1e8, numbers) == pytest.approx(direct.time_us(1e8))
    (rings,) = (one for one in algorithms(topology, "all_reduce") if one.name == "ring by dimension")
    assert reduce_us(1e8, numbers) == pytest.approx(rings.time_us(1e8))


def test_a_training_pass_on_16384_nodes_gains_less_than_on_128() -> None:
    """The exchange takes longer on a larger torus, while the pooling of a node's tables only grows with the samples."""
    large = NUMBERS.with_value("scale.nodes", 16384).with_value("scale.columns", 128)
    few, many = Dlrm(512, 7, NUMBERS), Dlrm(512, 7, large)
    assert many.exchange_us / few.exchange_us > 128  # as many times the bytes, over longer routes
    assert many.embedding_us == pytest.approx(128 * few.embedding_us, rel=0.01)
    assert 0 < many.gain < few.gain
    with pytest.raises(ValueError, match=r"128 nodes cannot be divided into rows of 12: set scale\.columns"):
        Dlrm(512, 7, NUMBERS.with_value("scale.columns", 12)).iteration_us(True)


def test_numbers_are_read_with_units_and_wrong_ones_are_named() -> None:
    assert NUMBERS["nic.bandwidth"] == 20e9
    assert NUMBERS.scaled("nic.bandwidth", 0.5)["nic.bandwidth"] == 10e9
    assert NUMBERS.assumed == [sum(q.source == "assumed" for q in NUMBERS.quantities.values()), len(NUMBERS.quantities)]
    with pytest.raises(KeyError, match=r"AMD Instinct MI210 has no number nic.speed: use one of gpu.units"):
        NUMBERS["nic.speed"]
    assert load_numbers("fused_embedding.toml") is NUMBERS
    assert all(one.note or one.source in ("paper", "datasheet") for one in NUMBERS.quantities.values())


def test_the_records_are_the_models() -> None:
    rows = study.rows_of(files.read([RECORDS]))
    now = study.rows_of(study.simulated())
    for name in ("10", "13", "15", "sensitivity", "readings"):
        for field in {"lines", "gains"} & now[name].keys():
            assert _flat(rows[name][field]) == pytest.approx(_flat(now[name][field]))
    with pytest.raises(ValueError, match="no records of fused embedding: run weft reproduce fused-embedding"):
        study.rows_of([])


def _flat(of: object) -> list[float]:
    if isinstance(of, dict):
        return _flat(list(of.values()))
    if isinstance(of, (list, tuple)):
        return [number for one in of for number in _flat(one)]
    return [float(of)] if isinstance(of, (int, float)) else []


def test_claims_follow_the_records() -> None:
    rows = study.rows_of(files.read([RECORDS]))
    verdicts = {claim.what: claim.reproduced for claim in study.claims(rows)}
    assert verdicts["some numbers of samples and tables give the paper's 10%"]
    low = {**rows["15"], "gains": [[gain / 3 for gain in line] for line in rows["15"]["gains"]]}
    changed = {claim.what: claim.reproduced for claim in study.claims({**rows, "15": low})}
    assert not changed["some numbers of samples and tables give the paper's 10%"]


def test_the_command_shows_and_draws_its_records_and_the_page_is_theirs(tmp_path: Path) -> None:
    shown = CliRunner().invoke(
        app, ["reproduce", "fused-embedding", "--records", str(RECORDS), "--pictures", str(tmp_path)]
    )
    assert shown.exit_code == 0, shown.output
    assert "claims are reproduced" in shown.output
    page = ROOT / "docs" / "studies" / "fused-embedding.md"
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in page.with_suffix("").iterdir()}
    assert rewrite(page.read_text(), {RECORDS.stem: files.read([RECORDS])}) == page.read_text()
