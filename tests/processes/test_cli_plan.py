"""`weft plan` as a user sees it: help texts with examples, tables, JSON, and refusals of one sentence."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from support.slow import mostly
from typer.testing import CliRunner

from weft.bench.core import console
from weft.bench.core.operators import LAYERS, names
from weft.builders import MatmulAllReduce, builder, unregister
from weft.builders import matmul_all_reduce as all_reduce
from weft.builders.problem import PROBLEMS
from weft.cli.app import app
from weft.cli.operators import shape_of
from weft.cli.plan import print_explanation
from weft.plan import explanation

plan = importlib.import_module("weft.cli.plan")  # in its package, this name refers to the command
runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
COMMAND = ["plan", "all_gather_matmul"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))


def test_help_teaches_by_examples() -> None:
    assert "all_gather_matmul" in runner.invoke(app, ["plan", "--help"]).output
    text = runner.invoke(app, [*COMMAND, "--help"]).output
    for words in (
        "--shape 16384,8192,4096",
        "--hw mi300x --ranks 8 --all",
        "--mode single",
        "columns of one rank's weight",
    ):
        assert words in text


def test_help_speaks_of_options_that_there_are() -> None:
    text = {op: runner.invoke(app, ["plan", op, "--help"]).output for op in ("matmul_all_reduce", "all_gather_matmul")}
    assert "RMSNorm" in text["matmul_all_reduce"]
    assert "With `eps`" not in text["matmul_all_reduce"]
    assert "With eps" not in text["matmul_all_reduce"]
    assert "g1 to g16" in " ".join(text["all_gather_matmul"].split())
    assert "g16" not in text["matmul_all_reduce"]


@pytest.mark.parametrize("command", ["plan", "sim"])
def test_each_operators_help_has_examples_of_this_operator(command: str) -> None:
    for op in sorted({*names()} - {*LAYERS}):
        text = " ".join(runner.invoke(app, [command, op, "--help"]).output.split())
        assert f"weft {command} {op} --shape" in text
        assert ("fp8" in text.split("Options")[0]) == ("scaled" in op), f"{op}: only scaled operators speak of fp8"


def test_a_shape_on_a_machine_nobody_has_here(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = [*COMMAND, "--shape", "131072,2048,16384", "--hw", "mi300x", "--ranks", "8", "--json", str(file)]
    done = subprocess.run([sys.executable, "-m", "weft.cli", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert data["machine"] == "AMD Instinct MI300X"
    for words in (
        data["choice"],
        data["heuristic"],
        "serial",
        "GEMM DIL",
        "exposed us",
        "slower candidates are not shown",
    ):
        assert words in done.stdout


def test_ficcos_gemms_are_shapes_of_all_gather_matmul() -> None:
    assert shape_of("g2", 8) == shape_of("131072,2048,16384", 8)
    told = runner.invoke(app, ["plan", "matmul_reduce_scatter", "--shape", "g2"])  # whose N is not shared
    assert "--shape 'g2' must be three positive integers" in str(told.exception)


def test_embeddings(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = [
        "plan",
        "embedding_all_to_all",
        "--shape",
        "4096,64,20",
        "--option",
        "tables=26",
        "--hw",
        "h200",
        "--ranks",
        "4",
    ]
    done = runner.invoke(app, [*arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    assert {one["candidate"] for one in data["candidates"]} == {"serial", "direct", "put"}
    assert all(one["predicted_us"] > 0 and one["losses"] is None for one in data["candidates"])
    for words in (
        "4096 samples, 26 features with 1664 columns and 20 rows a bag, fp32, 4 ranks",
        data["choice"],
        "taken",
    ):
        assert words in done.output
    assert "DIL" not in done.output
    assert "--option tables=128" in runner.invoke(app, ["plan", "embedding_all_to_all", "--help"]).output


@dataclass(frozen=True, slots=True)
class SumOnOne(MatmulAllReduce):
    """y = the sum of all ranks' x @ w, on one rank."""

    name: ClassVar[str] = "sum_on_one"
    dst: int = 0

    @classmethod
    def sized(
        cls, m: int, n: int, k: int, ranks: int, dtype: str, *, dst: Annotated[int, "The rank that gets it."] = 1
    ) -> SumOnOne:
        """M rows of K columns on each rank."""
        return cls(ranks, m, n, k, dtype, dst=dst)


del PROBLEMS["sum_on_one"]  # no other test uses this operator


def test_a_new_problem_is_a_command_with_its_own_words_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROBLEMS, "sum_on_one", SumOnOne)
    builder(SumOnOne)(all_reduce.serial)
    try:
        assert "y = the sum of all ranks' x @ w, on one rank." in runner.invoke(app, ["plan", "--help"]).output
        text = runner.invoke(app, ["plan", "sum_on_one", "--help"]).output
        for words in ("M rows of K columns on each rank.", "--option", "dst: The rank that gets it. [default: 1]"):
            assert words in text
        for given, dst in (([], 1), (["--option", "dst=0"], 0)):
            file = tmp_path / "plan.json"
            done = runner.invoke(
                app, ["plan", "sum_on_one", "--shape", "64,64,64", "--hw", "h200", "--json", str(file), *given]
            )
            assert done.exit_code == 0, done.output
            assert json.loads(file.read_text().splitlines()[-1])["problem"]["dst"] == dst, "lines are appended"
    finally:
        unregister(SumOnOne, "serial")


def test_a_shape_on_gpus_that_are_linked_in_another_way(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = [
        "--shape",
        "4096,512,512",
        "--hw",
        "mi300x",
        "--ranks",
        "8",
        "--topology",
        "torus",
        "--json",
        str(file),
    ]
    found = runner.invoke(app, [*COMMAND, *arguments])
    assert found.exit_code == 0, found.output
    assert "topology torus instead of mesh" in found.output
    assert "topology torus instead of mesh" in json.loads(file.read_text())["notes"]


def test_without_a_terminal_lines_say_what_takes_so_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the fake clock, a second passes at each reading."""
    clock = itertools.count()
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    with console.progress(4.0, True, "weft plan: ", every_s=2.0) as step:
        for what in ("building a[b=c]", "building d", "simulating a[b=c]", "simulating d", *map(str, range(16))):
            step(what, 0.2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "weft plan: building d (5% done, 2 s)",
        "weft plan: 7 (55% done, 12 s)",
    ]


def test_long_work_says_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(step=30)
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    with console.progress(10.0, True, "weft reproduce: ", every_s=2.0) as step:
        for what in ("first", "second", "third", "last"):
            step(what, 2.5)
    assert capsys.readouterr().err.splitlines() == [
        "weft reproduce: first (0% done, 30 s)",
        "weft reproduce: second (25% done, 60 s, about 3 min left)",
        "weft reproduce: third (50% done, 90 s, about 2 min left)",
        "weft reproduce: last (75% done, 120 s)",
    ]


def test_a_plan_says_how_far_it_is_on_stderr_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        *COMMAND,
        "--shape",
        "512,4096,8192",
        "--hw",
        "h200",
        "--dtype",
        "fp16",
    ]  # a problem that no other test plans
    monkeypatch.setattr(plan, "SAYS_EVERY_S", 1e-9)
    said, quiet = runner.invoke(app, arguments), runner.invoke(app, arguments)
    assert re.search(r"weft plan: building 1 of \d+: serial \(0% done, 0 s\)", said.stderr)
    assert re.search(r"weft plan: simulating \d+ of \d+: shard\[.*\] \(\d\d% done, \d+ s\)", said.stderr)
    assert said.stdout == quiet.stdout
    assert "weft plan: " not in said.stdout
    monkeypatch.setattr(plan, "SAYS_EVERY_S", 1000.0)
    assert runner.invoke(app, arguments).stderr == ""


def test_all_shows_all(tmp_path: Path) -> None:
    arguments = [*COMMAND, "--shape", "512,4096,8192", "--hw", "h200"]
    few, everything = (runner.invoke(app, [*arguments, *more]).output for more in ([], ["--all"]))
    assert everything.count("by=kernel]") > few.count("by=kernel]")
    assert "not shown" not in everything
    single = runner.invoke(app, [*arguments, "--mode", "single"]).output
    assert "bf16, single" in single


@pytest.mark.parametrize("width", mostly([80, 100, 120, 140, 200], 80, 140))
def test_a_narrow_terminal_leaves_columns_out_and_cuts_no_number(width: int, monkeypatch, capsys) -> None:
    found = explanation(
        "all_gather_matmul", M=131072, N=2048, K=16384, ranks=8, hw="mi300x", dtype="bf16", mode="queued"
    )
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_explanation(found, 10)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= width
    words = shown.split()
    for row in found.cells(10):
        assert row[1] in words  # predicted us
        assert all(piece in shown for piece in row[0].split(","))
        assert set(row[-1].split()) <= set(words)
    assert ("columns that do not fit: measured us" in shown) == (width < 140)
    assert ("comm CIL, exposed us. To see all columns" in " ".join(words)) == (width == 80)


EXPERTS = ["plan", "all_to_all_matmul", "--shape", "8192,14336,4096", "--hw", "h200"]
EIGHT = ["--option", "experts=8"]


def test_experts_have_a_table_too(tmp_path: Path) -> None:
    text = runner.invoke(app, [*EXPERTS, *EIGHT]).output
    assert "8192 tokens [4096] from each of 2 ranks @ [4, 4096, 14336]" in text
    assert "heuristic" in text
    for words in ("GEMM DIL", "exposed us", "dispatch[by=kernel,rest=each]", "rounds at every step", "serial", "taken"):
        assert words in text
    file = tmp_path / "graph.json"
    runner.invoke(app, [*EXPERTS, *EIGHT, "--option", "bounded=true", "--mode", "graph", "--json", str(file)])
    data = json.loads(file.read_text())
    assert data["choice"].startswith("dispatch")
    assert "serial" in data["reason"]
    assert "cannot be captured, because the CPU reads sizes" in data["reason"]
    assert data["heuristic"] == "ficco_1d[start=uniform,gemms=fused,steps=0,by=kernel]"
    assert all(row["losses"]["ideal_us"] > 0 for row in data["candidates"] if row["predicted_us"])


def test_a_shape_may_be_written_as_the_benchmark_has_it() -> None:
    comma, times = (
        runner.invoke(app, [*COMMAND, "--shape", shape, "--hw", "h200"]).output
        for shape in ("512, 4096, 8192", "512x4096x8192")
    )
    assert "[512, 8192] gathered from 2 ranks @ [8192, 4096]" in comma
    assert comma == times


@pytest.mark.slow
def test_calibration_says_what_it_needs() -> None:
    command, no_gpus = [sys.executable, "-m", "weft.cli", "plan", "calibrate"], {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | no_gpus, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "calibration needs 2 GPUs, but torch sees 0" in done.stderr + done.stdout
