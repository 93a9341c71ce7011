"""The measured studies of embeddings: numbers from handmade timelines and profiles, then tiny runs on CPU processes.

Cheapest first. On GPUs the studies run by `weft bench fused_embedding` and `weft bench pgas`.
"""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from weft.bench.core.harness import Ranks
from weft.bench.core.operator import Measured
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.bench.ops.embedding_data import EmbeddingData
from weft.bench.ops.embedding_variants import why_not
from weft.launch import Pool
from weft.studies import fused_embedding_measure as fused
from weft.studies import fused_embedding_measured as measured
from weft.studies import pgas_measure as pgas
from weft.studies.embedding_measure import find_parts, kernels_of, lines_of, occupancy_of

# Two programs: (start, end, bytes, program, put). Program 0 puts one slice and pools a local one. Program 1 does so in the
# other order. The last lines are their waits, and a line that no program wrote.
LINES = np.array(
    [
        [1000, 3000, 4000, 0, 2500], [3000, 5000, 0, 0, 0], [1000, 2000, 0, 1, 0], [2000, 6000, 6000, 1, 5500],
        [5000, 9000, 0, 0, 7], [6000, 7000, 0, 1, 3], [0, 0, 0, 0, 0],
    ]
)  # fmt: skip


def test_a_timeline_has_programs_puts_and_waits() -> None:
    lines = lines_of(LINES, 4)
    assert lines.start.tolist() == [0, 2, 0, 1]
    assert lines.put.tolist() == [1.5, 0, 0, 4.5]
    assert lines.waits.tolist() == [[4, 8, 0, 7], [5, 6, 1, 3]]
    assert lines.end_us == 8
    us, mb = lines.bytes_by()
    assert us[-1] == 8
    assert mb[0] == 0
    assert mb[-1] == pytest.approx(0.01)
    assert mb[us.index(2.08)] == pytest.approx(0.004)


def test_waits_and_puts_are_summed_up() -> None:
    lines = lines_of(LINES, 4)
    assert fused.waits_of(lines) == {"wait_us": [1, 2.5, 4], "kernel_us": 8, "wait_share": 2.5 / 8, "n_programs": 2}
    assert fused.puts_of(lines) == {"puts": 2, "last_put_us": 4.5, "puts_first": 0.5}
    first, second = fused.spans_of(lines)[:2]
    assert first == [[[0, 2, 1.5], [2, 4, 0]], [4, 8]]
    assert second == [[[0, 1, 0], [1, 5, 4.5]], [5, 6]]


@pytest.mark.parametrize(
    ("registers", "threads", "occupancy"), [(32, 256, 1.0), (168, 32, 12 / 64), (128, 32, 16 / 64), (64, 32, 0.5), (72, 256, 0.375)]
)  # fmt: skip
def test_occupancy_by_registers(registers: int, threads: int, occupancy: float) -> None:
    assert occupancy_of(registers, threads) == occupancy


def test_kernels_of_a_profile() -> None:
    of = {"registers per thread": 40, "shared memory": 0, "block": [32, 8, 1], "grid": [9, 2, 1]}
    events = [
        {"cat": "kernel", "name": "bag", "args": of}, {"cat": "kernel", "name": "bag", "args": of}, {"name": "other"},
    ]  # fmt: skip
    (kernel,) = kernels_of(events)
    assert (kernel["launches"], kernel["threads"], kernel["grid"], kernel["occupancy"]) == (2, 256, 18, 0.75)


def test_parts_by_figure_and_by_name() -> None:
    assert find_parts(fused.PARTS, ()) == list(fused.PARTS)
    assert [part.config for part in find_parts(pgas.PARTS, ("weak",))] == ["1", "2"]
    assert [part.name for part in find_parts(fused.PARTS, ("grid/1024|256", "slices"))] == [
        "grid/1024|256",
        "slices/1024|256",
    ]
    with pytest.raises(ValueError, match="no preset 'figure-9': give one of grid, grid-short, occupancy"):
        find_parts(fused.PARTS, ("figure-9",))
    for study in (fused, pgas):
        assert len({part.name for part in study.PARTS}) == len(study.PARTS)


def test_the_variants_of_all_parts_exist() -> None:
    """Some parts run only on GPUs, so no run here would find a wrong name."""
    limits = [f"{transport}-{limit}" for transport in ("put", "direct") for limit in ("programs4", "registers96")]
    names = {*fused.TIMED, *limits, *(name for part in (*fused.PARTS, *pgas.PARTS) for name in part.variants)}
    for name in names:
        why_not(name, torch.device("cpu"))  # raises for an unknown name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 1}, "ranks=1: an all-to-all needs at least 2"),
        ({"dtype": "fp16"}, "dtype='fp16': the papers' tables are fp32"),
        ({"preset": "x"}, "no preset 'x'"),
        ({"variants": ("put",)}, "compares all variants"),
        ({"scale": 0.5}, "cannot be scaled: it has the sizes of the paper"),
    ],
)
def test_options_are_checked(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchOptions(**{"op": "fused_embedding", "modes": ("queued",), **wrong})


def _run(group: dist.ProcessGroup, op: str, preset: str, folder: Path) -> list[dict]:
    options = BenchOptions(op, preset=preset, modes=("queued",), quick=True, json=folder / "study.jsonl")
    return run_rank(group.rank(), group.size(), options)


def _run_kernels(group: dist.ProcessGroup) -> list[dict]:
    """Record kernels as on GPUs, with a profile that knows one kernel."""
    ranks = Ranks(group, group, torch.device("cpu"))
    part = replace(find_parts(fused.PARTS, ("kernels",))[0], variants=("embedding_bag", "batched"))
    work = EmbeddingData(part.preset(True).config(2), ranks, input_sets=2)
    kernel = {"name": "bag", "registers": 40, "threads": 32, "occupancy": 0.5}
    with patch.object(fused, "launched_kernels", lambda call: [kernel | {"launches": len(call())}]):
        found, more, notes = fused._kernels(part, work, 3, lambda *_: None)
    assert notes == []
    options = BenchOptions("fused_embedding", modes=("queued",))
    study = fused.OPERATOR
    rows = study.records(part, found, ranks, options, [], "embedding_bag", more)
    study.show(Measured(rows, notes=notes), options)
    return rows


def test_kernels_have_records_without_times(pool: Pool) -> None:
    rows = pool.run(_run_kernels, ranks=2)[0]
    assert [row["variant"] for row in rows] == ["embedding_bag", "batched"]
    for row in rows:
        assert row["p50_ms"] is None
        assert row["speedup"] is None
        assert [kernel["registers"] for kernel in row["kernels"]] == [40]
    rows = [json.loads(json.dumps(row)) | {"run": "1"} for row in rows]
    assert any("Kernels of a call" in table.title for table in measured.tables(measured.rows_of(rows)))


RUNS = {
    "fused_embedding": ("grid/1024|256,slices,timeline", {
        "grid/1024|256": {
            "embedding_bag", "batched", "pipelined-4", "direct", "direct-natural", "put", "put-natural", "pooling", "exchange",
        },
        "slices/1024|256": {"embedding_bag", "direct", *(f"put-slice{size}" for size in fused.SLICES), "pooling", "exchange"},
    }),
    "pgas": ("weak,dlrm/strong", {
        "weak/1": {"embedding_bag", "embedding_bag-async", "batched", "direct", "computation", "batched computation"},
        "weak/2": {
            "embedding_bag", "embedding_bag-async", "batched", "pipelined-4", "direct", "put",
            "computation", "batched computation", "phase", "one float", "exchange",
        },
        "dlrm/strong": set(pgas.PIPELINES),
    }),
}  # fmt: skip


@pytest.mark.parametrize("op", RUNS)
def test_a_tiny_run_on_cpu(pool: Pool, op: str, tmp_path: Path) -> None:
    preset, wanted = RUNS[op]
    rows, nothing = pool.run(_run, op, preset, tmp_path, ranks=2)
    assert nothing == []
    assert rows == [json.loads(line) for line in (tmp_path / "study.jsonl").read_text().splitlines()]
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(f"{row['figure']}/{row['config']}", set()).add(row["variant"])
        assert len(row["rank_ms"]) == row["ranks"]
        assert row["tiny"]
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["error"] is None or row["error"] < 1e-5
    assert found == wanted
