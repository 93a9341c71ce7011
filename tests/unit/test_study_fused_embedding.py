"""The study of fused embeddings: the model of two nodes against a loop, the iteration's graph by hand, and the records."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from weft.bench.core import records as files
from weft.studies import fused_embedding as study
from weft.studies.dlrm_iteration import Dlrm, Task, ends_us
from weft.studies.fused_embedding_model import (
    Order,
    Setting,
    bag_bytes,
    between_nodes,
    rate,
    with_message,
)
from weft.studies.numbers import load_numbers

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "sim-fused-embedding.jsonl"
NUMBERS = load_numbers()


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


def test_larger_slices_are_never_slower_and_more_occupancy_is_up_to_three_quarters() -> None:
    by_occupancy = [max(between_nodes(study.ONE, NUMBERS, occupancy=of).fused) for of in (0.25, 0.5, 0.75)]
    by_slice = [max(between_nodes(study.ONE, NUMBERS, slice_size=of).fused) for of in study.SLICES]
    assert by_occupancy == sorted(by_occupancy, reverse=True)
    assert all(later <= 1.001 * earlier for earlier, later in itertools.pairwise(by_slice))


def test_wavefronts_contend_beyond_three_quarters() -> None:
    calm = rate(NUMBERS, 0.75)
    assert calm == rate(NUMBERS.with_value("memory.contention", 0.0), 0.75)
    assert [calm / rate(NUMBERS, of) for of in (0.8125, 0.875, 1.0)] == pytest.approx([1.125, 1.25, 1.25])


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
    assert load_numbers() is NUMBERS
    assert all(one.note or one.source in ("paper", "datasheet") for one in NUMBERS.quantities.values())


def test_claims_follow_the_records() -> None:
    rows = study.rows_of(files.read([RECORDS]))
    verdicts = {claim.what: claim.reproduced for claim in study.claims(rows)}
    assert verdicts["some numbers of samples and tables give the paper's 10%"]
    low = {**rows["15"], "gains": [[gain / 3 for gain in line] for line in rows["15"]["gains"]]}
    changed = {claim.what: claim.reproduced for claim in study.claims({**rows, "15": low})}
    assert not changed["some numbers of samples and tables give the paper's 10%"]
