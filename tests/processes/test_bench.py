"""The benchmark: it refuses wrong results, counts the same bytes as a calculation by hand, and reports the slowest
rank.

Cheapest first: statistics and names without processes, then two ranks.
"""

import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.bench import FIELDS, cpu_ranks, records_of

from weft.bench.core import console, harness
from weft.bench.core.ceilings import Ceilings, measure_ceilings
from weft.bench.core.harness import summarise, time_variants
from weft.bench.core.measure import check
from weft.bench.core.operator import Measured
from weft.bench.core.options import BenchOptions
from weft.bench.ops.embedding_all_to_all import OPERATOR, EmbeddingWorkload, Traffic
from weft.bench.ops.embedding_data import BASELINE, pooled_float64
from weft.bench.ops.embedding_presets import FULL, Bag, EmbeddingPreset, TableShape
from weft.bench.ops.embedding_variants import (
    SerialVariant,
    embedding_bags,
    limits_of,
    make_variant,
    parse,
    why_not,
)
from weft.embedding import EmbeddingBagConfig, EmbeddingSharding
from weft.embedding.options import EmbeddingOptions
from weft.embedding.tables import column_runs
from weft.launch import Pool
from weft.timeline import Timeline

CPU = torch.device("cpu")
BESIDES = ("batched", "put", "direct-natural", "pipelined-3", "embedding_bag-async")
TINY = EmbeddingPreset("tiny", "by hand", (TableShape(10, 4, Bag(3, 3)), TableShape(20, 4, Bag(3, 3))), False, 6)
RAGGED = EmbeddingPreset(
    "ragged", "odd sizes", tuple(TableShape(50 + i, 3 + 2 * i, Bag(0, 5)) for i in range(5)), False, 21
)


def test_a_repetition_is_as_slow_as_its_slowest_rank() -> None:
    timing = summarise([[1.0, 3.0], [5.0, 2.0], [4.0, 4.0]], calls=7)
    assert timing.p50_ms == 4.0
    assert timing.p20_ms == pytest.approx(3.4)
    assert timing.p80_ms == pytest.approx(4.6)
    assert timing.skew_ms == 2.0
    assert (timing.repetitions, timing.calls) == (3, 7)
    with pytest.raises(ValueError, match="time at least 1 repetition"):
        summarise([])


def test_names_of_variants() -> None:
    assert parse("direct") == EmbeddingOptions("direct", outputs=1)
    assert parse("put-natural-slice8") == EmbeddingOptions("put", "natural", 8, outputs=1)
    assert parse("put-slice0") is None
    assert parse("put-slice8-programs4-registers64") == EmbeddingOptions("put", slice_size=8, outputs=1)
    assert limits_of("put-slice8-programs4-registers64") == (4, 64)
    assert limits_of("direct-registers64") == (None, 64)
    assert limits_of("direct-natural") is limits_of("batched") is None
    assert why_not("put-natural", CPU) is why_not("pipelined-4", CPU) is why_not("embedding_bag-async", CPU) is None
    assert why_not("direct-programs4", CPU) == "only GPUs have an occupancy"
    assert why_not("fbgemm", CPU) == "it is a baseline only on GPUs"
    assert why_not("per-table", CPU) == "only GPUs launch kernels"
    with pytest.raises(
        ValueError,
        match="no variant 'fast': give embedding_bag, batched, fbgemm, embedding_bag-async, per-table, weft, pip",
    ):
        why_not("fast", CPU)


def test_column_runs_merge_neighbours_of_one_rank() -> None:
    tables = tuple(EmbeddingBagConfig(5, dim, f"t{i}", (f"f{i}",)) for i, dim in enumerate((4, 8, 2, 6)))
    assert column_runs(EmbeddingSharding(tables, (0, 0, 1, 0), 2)) == ((0, 0, 12), (1, 0, 2), (0, 12, 18))


def test_the_reference_is_embedding_bag_in_float64() -> None:
    weight, values = torch.randn(9, 5), torch.randint(0, 9, (40,))
    offsets = torch.tensor([0, 0, 7, 7, 30, 40])
    expected = torch.nn.functional.embedding_bag(values, weight.double(), offsets, mode="sum", include_last_offset=True)
    torch.testing.assert_close(pooled_float64(weight, values, offsets), expected, rtol=0, atol=1e-14)


def test_a_roofline_is_the_larger_of_memory_and_wire() -> None:
    traffic = Traffic(rows=288, distinct_rows=100, ids=144, offsets=56, outputs=96, wire=48)
    assert traffic.memory == 584
    assert traffic.roofline_ms(Ceilings(memory=584e3, link=48e3)) == pytest.approx(1.0)
    assert traffic.roofline_ms(Ceilings(memory=584e3, link=24e3)) == pytest.approx(2.0)
    assert traffic.roofline_ms(Ceilings(memory=584e3, link=math.inf)) == pytest.approx(1.0)


@pytest.mark.parametrize("rich", [True, False])
def test_a_table_shows_every_cell_with_and_without_rich(rich: bool, monkeypatch, capsys) -> None:
    if not rich:
        monkeypatch.setattr(console, "Console", None)
    console.print_table(
        "what", ("variant", "over\nroofline"), [("put", "1.25"), ("direct", "1.06")], ["scaled by 1/64"]
    )
    shown = capsys.readouterr().out
    for text in ("what", "variant", "put", "1.25", "direct", "1.06", "scaled by 1/64"):
        assert text in shown


def test_a_narrow_terminal_loses_optional_columns_only(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    rows = [("put", "1.250", "0.123456789", "0.987654321")]
    console.print_table("", ("variant", "ms", "first", "second"), rows, optional=("first", "second"))
    shown = capsys.readouterr().out
    assert "1.250" in shown
    assert "0.123456789" in shown
    assert "0.987654321" not in shown


def test_a_table_that_goes_to_no_terminal_is_as_wide_as_it_must_be(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = [f"column {i} of a table" for i in range(20)]
    rows = [["a name that is not short", *(f"{row + i / 1000:.6f}" for i in range(1, 20))] for row in range(3)]
    console.print_table("", columns, rows, optional=(columns[7],))
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in (*columns, *(cell for row in rows for cell in row)))
    assert "…" not in shown


def test_a_table_has_no_empty_columns_and_only_times_of_what_ran_beside(capsys) -> None:
    timed = {
        "mode": "queued",
        "p20_ms": 1.9,
        "p50_ms": 2.0,
        "p80_ms": 2.1,
        "skew_ms": 0.5,
        "repetitions": 9,
        "host_us": None,
    }
    judged = {"roofline_ratio": 1.25, "first_call_ms": 7.5, "error": 3e-7, "pool_ms": None, "extra_bytes": 2_000_000}
    faster = {"variant": "direct", "p20_ms": 0.9, "p50_ms": 1.0, "p80_ms": 1.1}
    rows, beside = [timed | judged | {"variant": BASELINE}, timed | judged | faster], [timed | {"variant": "alone"}]
    OPERATOR.show(
        Measured(rows, beside, "of what", ["a note"], ["a wrong one"]), BenchOptions(OPERATOR.name, modes=("queued",))
    )
    shown = capsys.readouterr().out
    lines = {
        cells[0].strip(): [cell.strip() for cell in cells]
        for line in shown.splitlines()
        if (cells := line.split("│")[1:-1])
    }
    times = ["2.0000", "1.9000 - 2.1000", "0.5000"]
    assert lines[BASELINE] == [BASELINE, "queued", *times, "1.00x", "1.25", "2.0", "7.5", "3.0e-07"]
    assert lines["direct"][5] == "2.00x"
    assert lines["alone"] == ["alone", "queued", *times, "", "", "", "", ""]
    assert "host" not in shown
    assert "batched" not in shown, "nobody ran it"
    assert "a note" in shown
    assert "a wrong one" in shown


def test_several_configurations_have_means_below(capsys) -> None:
    timed = {
        "mode": "queued",
        "p20_ms": 2.0,
        "p80_ms": 2.0,
        "repetitions": 9,
        "scale": 1.0,
        "rows_scale": 1.0,
        "roofline_ratio": 1.25,
    }
    rows = [
        timed | {"config": config, "variant": name, "p50_ms": ms}
        for config, fused in (("one", 1.0), ("two", 0.25)) for name, ms in ((BASELINE, 2.0), ("put", fused))
    ]  # fmt: skip
    OPERATOR.show_summary(rows, BenchOptions(OPERATOR.name, modes=("single", "queued")))
    shown = capsys.readouterr().out
    assert "single" not in shown
    (mean,) = (line.split("│")[1:-1] for line in shown.splitlines() if "geometric mean" in line)
    assert [cell.strip() for cell in mean] == ["geometric mean", "", "", "4.00x", ""]


def test_progress_says_each_step_once_where_nobody_watches(capsys) -> None:
    with console.progress(2, shown=True, prefix="1/3 ") as step:
        step("building", 0.5)
        step("timing", 0.2)
        step("timing", 0.3)
    with console.progress(2, shown=False) as step:
        step("silent", 1)
    assert capsys.readouterr().err == "1/3 building\n1/3 timing\n"


def _traffic(group: dist.ProcessGroup) -> Traffic:
    return EmbeddingWorkload(TINY.config(group.size(), FULL), cpu_ranks(group), input_sets=2).traffic()


def test_bytes_of_a_tiny_configuration_by_hand(pool: Pool) -> None:
    # Each rank owns one table: 6 samples x 3 indices, with rows of 16 bytes. Half of the 6 pooled vectors are sent.
    for rank, traffic in enumerate(pool.run(_traffic, ranks=2)):
        assert traffic.rows == 6 * 3 * 16
        assert traffic.ids == 6 * 3 * 8
        assert traffic.offsets == 7 * 8
        assert traffic.outputs == 6 * 16
        assert traffic.wire == 3 * 16
        assert 16 <= traffic.distinct_rows <= (10, 18)[rank] * 16


class _Broken(SerialVariant):
    """A correct variant, except for the changes that `spoil` makes to its output."""

    def __init__(self, work: EmbeddingWorkload, spoil) -> None:
        super().__init__(work, embedding_bags)
        self.spoil = spoil

    def __call__(self, which: int) -> torch.Tensor:
        output = super().__call__(which)
        return self.spoil(output) if self.work.ranks.rank == 1 else output


def _one_element(output: torch.Tensor) -> torch.Tensor:
    output[-1, -1] += 1e-3
    return output


def _unwritten_row(output: torch.Tensor) -> torch.Tensor:
    output[0] = math.nan
    return output


def _short(output: torch.Tensor) -> torch.Tensor:
    return output[1:]


def _checks(group: dist.ProcessGroup) -> dict[str, float | str]:
    work = EmbeddingWorkload(RAGGED.config(group.size(), FULL), cpu_ranks(group), input_sets=2)
    found: dict[str, float | str] = dict(
        check({n: make_variant(n, work) for n in (BASELINE, "batched", "direct", "put")}, work).errors
    )
    for spoil in (_one_element, _unwritten_row, _short):
        broken = {spoil.__name__: _Broken(work, spoil)}
        found |= check({BASELINE: make_variant(BASELINE, work)} | broken, work).wrong
    try:
        check({BASELINE: _Broken(work, _short)}, work)
    except RuntimeError as error:
        found["baseline"] = str(error)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_wrong_results_are_refused_on_every_rank(pool: Pool, ranks: int) -> None:
    for found in pool.run(_checks, ranks=ranks):
        assert all(found[name] < 1e-6 for name in (BASELINE, "batched", "direct", "put"))
        for name in ("_one_element", "_unwritten_row", "_short"):
            assert f"ragged: {name} differs from the float64 reference" in found[name]
        assert "embedding_bag differs" in found["baseline"], "nothing to compare with: an error at once"


LOOK_MS, CALL_MS = 0.25, 20.0


def _sleepy(group: dist.ProcessGroup) -> dict:
    """Time with a fake clock, for which a reading takes `LOOK_MS`, and a call on rank 1 takes `CALL_MS`. So the load of
    this machine does not matter.
    """
    ranks = cpu_ranks(group)
    called: list[int] = []
    now_ms = [0.0]

    def look() -> float:
        now_ms[0] += LOOK_MS
        return 1e-3 * now_ms[0]

    def slow_on_rank_1(which: int) -> None:
        called.append(which)
        now_ms[0] += CALL_MS if ranks.rank == 1 else 0.0

    shares: list[float] = []
    real, harness.time = harness.time, SimpleNamespace(perf_counter=look)
    try:
        timings = time_variants(
            {"sleepy": slow_on_rank_1, "quick": lambda which: None},
            ranks,
            "single",
            input_sets=2,
            seconds=0.1,
            repetitions=(4, 6),
            advance=shares.append,
        )
    finally:
        harness.time = real
    return {
        "timings": timings,
        "called": called,
        "shares": sum(shares),
        "most": ranks.most([1.0, math.nan][ranks.rank]),
    }


def test_every_rank_reports_the_slowest_rank(pool: Pool) -> None:
    first, second = pool.run(_sleepy, ranks=2)
    assert first["timings"] == second["timings"]
    sleepy, quick = first["timings"]["sleepy"], first["timings"]["quick"]
    assert (sleepy.p20_ms, sleepy.p50_ms, sleepy.p80_ms) == pytest.approx((CALL_MS + LOOK_MS,) * 3)
    assert (sleepy.skew_ms, quick.p50_ms, quick.skew_ms) == pytest.approx((CALL_MS, LOOK_MS, 0.0), abs=1e-9)
    assert sleepy.repetitions == quick.repetitions == 5, "as many as fill the seconds"
    assert set(first["called"]) == {0, 1}
    assert first["called"] == second["called"]
    assert first["shares"] == pytest.approx(1)
    assert first["most"] == math.inf


def _measured(group: dist.ProcessGroup) -> list[dict]:
    options = BenchOptions(OPERATOR.name, variants=BESIDES, modes=("queued",), quick=True, scale=1.0)
    return records_of(group, options, RAGGED)


def test_records_have_every_field_and_agree_with_each_other(pool: Pool) -> None:
    rows = pool.run(_measured, ranks=2)[0]
    assert [r["variant"] for r in rows] == [BASELINE, *BESIDES]
    base = rows[0]
    for row in rows:
        assert set(row) >= FIELDS
        assert row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["speedup"] == pytest.approx(base["p50_ms"] / row["p50_ms"])
        assert row["speedup_over"]["embedding_bag"] == row["speedup"]
        assert row["roofline_ratio"] == pytest.approx(row["p50_ms"] / row["roofline_ms"])
        assert len(row["ceilings"]) == row["ranks"] == 2
        assert (row["pool_ms"] is not None) == (row["variant"] in (BASELINE, "batched", "embedding_bag-async"))
    # Two result buffers [11, 35] in fp32. Serial variants count the send and the receive buffer instead.
    assert rows[2]["extra_bytes"] == 11 * 35 * 4
    assert rows[1]["extra_bytes"] >= 2 * 11 * 35 * 4


def _traced(group: dist.ProcessGroup) -> dict[str, Timeline]:
    work = EmbeddingWorkload(RAGGED.config(group.size(), FULL), cpu_ranks(group), input_sets=1)
    timelines = {name: Timeline() for name in (BASELINE, "put", "direct")}
    for name, timeline in timelines.items():
        variant, before = make_variant(name, work), time.monotonic_ns() / 1e3
        variant.traced(0, timeline)
        after = time.monotonic_ns() / 1e3
        assert all(before <= span.start_us <= span.end_us <= after for span in timeline), name
        assert sum(span.end_us - span.start_us for span in timeline if span.lane != "wait") > 0
    return timelines


def test_traces_count_the_bytes_that_leave(pool: Pool) -> None:
    everybody = pool.run(_traced, ranks=2)
    config = RAGGED.config(2, FULL)
    for rank, timelines in enumerate(everybody):
        columns = sum(slot.dim for slot in config.sharding.local_slots(rank))
        leaves = config.batch_sizes[1 - rank] * columns * 4
        for timeline in timelines.values():
            assert sum(span.bytes for span in timeline) == leaves
            assert timeline.ranks() == [rank]


def _copies(group: dist.ProcessGroup) -> list[Ceilings]:
    return measure_ceilings(cpu_ranks(group), 1 << 20)


def test_ceilings_are_the_same_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(_copies, ranks=2)
    assert first == second
    assert len(first) == 2
    assert all(0 < c.link < 1e13 and 0 < c.memory < 1e13 for c in first)
    (alone,) = pool.run(_copies, ranks=1)
    assert alone[0].link == math.inf
    assert alone[0].as_fields()["link_gbps"] is None


def _half(group: dist.ProcessGroup, dtype: torch.dtype) -> float:
    work = EmbeddingWorkload(RAGGED.config(group.size(), FULL, dtype), cpu_ranks(group), input_sets=1)
    return max(
        check({name: make_variant(name, work) for name in (BASELINE, "batched", "direct")}, work).errors.values()
    )


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_tables(pool: Pool, dtype: torch.dtype, limit: float) -> None:
    assert 0 < max(pool.run(_half, dtype, ranks=2)) < limit
