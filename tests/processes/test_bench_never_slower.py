"""`weft bench never-slower` on two ranks: rows of real runs, rows that a file already has, and errors at a shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import CallingRecorder
from support.bench import cpu_ranks

from weft import symm
from weft.bench.core import measure as core
from weft.bench.core import records
from weft.bench.core.operators import operator
from weft.bench.core.options import BenchOptions
from weft.bench.never_slower import measure, run
from weft.bench.never_slower.judge import Verdict, is_timed
from weft.bench.never_slower.options import Options, forward_operators
from weft.bench.never_slower.run import run_rank
from weft.bench.provenance import COMMIT, SOURCE
from weft.errors import DeadlineError, WeftError
from weft.launch import Pool

OPS = ("matmul_all_reduce", "matmul_all_to_all")


def _options(json: Path | None = None, **given: Any) -> Options:
    return Options(**({"ops": OPS, "modes": ("queued", "single", "changing"), "device": "cpu", "ranks": 2, "seed": "abc",
                       "shapes": 1, "sizes": 4, "json": json} | given))  # fmt: skip


def _run(group: dist.ProcessGroup, options: Options) -> list[dict]:
    threads = torch.get_num_threads()
    try:
        return run_rank(group.rank(), group.size(), options)
    finally:
        torch.set_num_threads(threads)


def _measured(rows: list[dict]) -> list[tuple[str, str]]:
    return [(row["op"], row["mode"]) for row in rows if not row["again"]]


@pytest.mark.slow
def test_rows_and_what_a_file_already_has(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "never.jsonl"
    rows, others = pool.run(_run, _options(path, modes=("queued",)), ranks=2)
    assert others == []
    assert _measured(rows) == [(op, "queued") for op in OPS]
    assert records.read([path]) == rows
    for row in rows[:2]:
        assert COMMIT.fullmatch(row["commit"])
        assert SOURCE.fullmatch(row["source"])
        assert len(row["serial_ms"]) == len(row["weft_ms"]) == 5
        assert row["ideal_ms"] == max(row["computation_ms"], row["collective_ms"]) > 0
        assert row["chosen"]

    # The second row now comes from other code, so it is measured again. The first row is not.
    other = json.dumps(rows[1] | {"source": "0" * 16})
    path.write_text(json.dumps(rows[0]) + "\n" + other + "\n")
    found = pool.run(_run, _options(path, modes=("queued", "changing")), ranks=2)[0]
    added = records.read([path])[2:]
    assert _measured(added) == [(OPS[1], "queued"), (OPS[0], "changing"), (OPS[1], "changing")]
    assert found == [rows[0], *added]
    sizes = [row["changing"]["sizes"] + row["changing"]["warm"] for row in added if "changing" in row]
    assert sizes == [4, 4]


def test_a_name_that_no_shape_has(pool: Pool) -> None:
    with pytest.raises(ValueError, match="--only 1x2x3 is not among the first 1 shape of seed abc of any operator"):
        pool.run(_run, _options(only=("1x2x3",)), ranks=2)


def _failing(group: dist.ProcessGroup, options: Options, how: str) -> list[dict] | str:
    original = measure.measured

    def measured(item: Any, modes: Any, again: bool, ranks: Any, options: Options) -> list[dict]:
        if item.op == OPS[0] and how == "alike":
            raise ValueError("no such shape\nas said")
        if item.op == OPS[0] and how == "alone" and group.rank() == 1:
            raise MemoryError("full")
        if item.op == OPS[0] and how == "dead":
            symm.communicator(group, "cpu").poison("by hand")
            raise DeadlineError("waited")
        return original(item, modes, again, ranks, options)

    run.measured = measured  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_DEADLINE_S", "1")
        try:
            return _run(group, options)
        except WeftError as error:
            return str(error)
        finally:
            run.measured = original


def test_an_error_that_all_ranks_meet_is_a_row(pool: Pool) -> None:
    rows = pool.run(_failing, _options(modes=("queued",)), "alike", ranks=2)[0]
    assert [(row["op"], row.get("error")) for row in rows if not row["again"]] == [
        (OPS[0], "ValueError: no such shape"), (OPS[1], None),
    ]  # fmt: skip
    assert Verdict(rows).failures[-1] == "1 row ended with an error"


def test_an_error_of_one_rank_or_a_dead_group_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "never.jsonl"
    with Pool(2) as pool:
        for how, said in (("alone", "rank 1: MemoryError: full"), ("dead", "by hand")):
            for ended in pool.run(
                _failing, _options(path, modes=("queued",), seed={"alone": "a", "dead": "d"}[how]), how, ranks=2
            ):
                assert isinstance(ended, str)
                assert said in ended
                assert "run the same command with --json FILE again; it continues after this shape" in ended
    first, second = (row["error"] for row in records.read([path]))
    assert "rank 1: MemoryError: full" in first
    assert second == "DeadlineError: waited"


def _captured(group: dist.ProcessGroup) -> dict[str, dict]:
    """Return rows of mode graph, which users cannot request on CPU."""
    ranks, found = cpu_ranks(group), {}
    with mock.patch.object(core, "Recorder", CallingRecorder):
        for name in ("matmul_all_reduce", "all_to_all_matmul", "matmul_all_to_all"):
            op, shape = operator(name), "24x16x32-e4-top2" if "to_all" in name else "24x16x32"
            options = BenchOptions(name, shape, 2, quick=True)
            (preset,) = op.presets(options)
            found |= {name: measure._timed(op.workload(preset, ranks, options), ("graph",), _options())["graph"]}
    return found


def test_captured_calls_are_compared_with_what_can_be_captured_by_hand(pool: Pool) -> None:
    rows = pool.run(_captured, ranks=2)[0]
    assert {name: (row["variant"], row["baseline"]) for name, row in rows.items()} == {
        "matmul_all_reduce": ("weft", "serial"),
        "all_to_all_matmul": ("weft-bounded", "padded"),
        "matmul_all_to_all": ("weft-bounded", "padded"),
    }
    assert all(len(row["weft_ms"]) == 5 and row["ideal_ms"] > 0 and row["chosen"] for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("op", forward_operators())
def test_every_operator(pool: Pool, op: str) -> None:
    rows = pool.run(_run, _options(ops=(op,)), ranks=2)[0]
    first = [row for row in rows if not row["again"]]
    assert [row["mode"] for row in first] == ["queued", "single", "changing"]
    assert not Verdict(rows).errors
    assert all(is_timed(row) or "changing" in row for row in first)
