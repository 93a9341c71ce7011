"""`weft sim` as a user sees it: a table of all schedules, JSON, a trace, and refusals of one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli.app import app

runner = CliRunner()
EMBEDDINGS = ["sim", "embedding_all_to_all", "--shape", "2048,64,8", "--option", "tables=32", "--hw", "mi300x"]


def test_every_schedule_its_gain_the_bound_and_a_trace(tmp_path: Path) -> None:
    file, trace = tmp_path / "sim.json", tmp_path / "put.json"
    done = runner.invoke(
        app, [*EMBEDDINGS, "--topology", "torus:4x2", "--json", str(file), "--trace", "put", str(trace)]
    )
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    rows = {row["schedule"]: row for row in data["schedules"]}
    assert data["ranks"] == 8
    assert rows.keys() == {"serial", "direct", "put"}
    serial = rows["serial"]["us"]
    for row in rows.values():
        assert row["us"] >= data["bound_us"] > 0
        assert row["speedup"] == pytest.approx(serial / row["us"])
        assert row["over_bound"] == pytest.approx(row["us"] / data["bound_us"])
    assert rows["serial"]["exposed_us"] >= data["bound_links_us"]
    assert rows["put"]["exposed_us"] is None  # the kernel of this schedule sends while it computes
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X"]
    assert {one["args"]["device"] for one in events} == set(range(8))
    assert max(one["ts"] + one["dur"] for one in events) >= data["bound_us"]
    for words in ("schedules", "speedup", "x bound", "no schedule is faster", "a trace of put"):
        assert words in done.output


@pytest.mark.parametrize(
    ("shape", "topology", "algorithm"),
    [
        ("4096,4096,64", "torus:2x4", "reduce_scatter by rings along all dimensions, both directions"),
        ("4096,4096,64", "ring:8", "reduce_scatter by ring"),
    ],
)
def test_the_algorithm_of_a_predicted_collective_is_visible(
    shape: str, topology: str, algorithm: str, tmp_path: Path
) -> None:
    file = tmp_path / "sim.json"
    arguments = [
        "matmul_reduce_scatter",
        "--shape",
        shape,
        "--hw",
        "mi300x",
        "--topology",
        topology,
        "--json",
        str(file),
    ]
    for command in (["sim", *arguments, "--schedule", "serial"], ["plan", *arguments]):
        done = runner.invoke(app, command)
        assert done.exit_code == 0, done.output
        line = next(line for line in done.output.splitlines() if line.startswith("collectives"))
        assert line.split(maxsplit=1)[1].startswith(f"{algorithm} ("), line
        assert "serial" in line
    simulated, planned = (json.loads(line) for line in file.read_text().splitlines())
    for rows, name in ((simulated["schedules"], "schedule"), (planned["candidates"], "candidate")):
        assert next(row for row in rows if row[name] == "serial")["algorithms"] == [algorithm]


def test_only_the_asked_for_schedule_and_serial(tmp_path: Path) -> None:
    file = tmp_path / "sim.json"
    done = runner.invoke(app, [*EMBEDDINGS, "--topology", "ring:4", "--schedule", "direct", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert {row["schedule"] for row in json.loads(file.read_text())["schedules"]} == {"serial", "direct"}


def test_a_chakra_trace_is_a_file_for_each_rank_and_three_for_astra_sim(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    arguments = ["sim", "matmul_reduce_scatter", "--shape", "1024,512,512", "--hw", "mi300x", "--topology", "torus:2x2"]
    done = runner.invoke(app, [*arguments, "--schedule", "serial", "--chakra", "serial", str(folder)])
    assert done.exit_code == 0, done.output
    traces = {f"matmul_reduce_scatter.{rank}.et" for rank in range(4)}
    assert {path.name for path in folder.iterdir()} == {*traces, "comm_group.json", "network.yml", "system.json"}
    assert "a Chakra trace of serial" in done.output


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--topology", "torus:4y2"], "topology 'torus:4y2': write torus:COLUMNSxROWS, such as torus:16x8"),
        (["--topology", "torus:8"], "topology 'torus:8': write torus:COLUMNSxROWS"),
        (["--topology", "ring:4", "--ranks", "8"], "--ranks 8, but --topology ring:4 has 4"),
        (
            ["--topology", "torus:8x8x"],
            "topology 'torus:8x8x': write torus:COLUMNSxROWS, such as torus:16x8, or more sizes",
        ),
        (["--topology", "torus:1024x1024"], "ranks=1048576: at most 65536 can be simulated"),
        (["--topology", "torus:32x16"], "ranks have different tables"),
        (["--topology", "ring:4", "--schedule", "putt"], "no schedule 'putt' for embedding_all_to_all; the nearest"),
        (["--topology", "ring:4", "--schedule", "put", "--trace", "direkt", "x.json"], "no schedule 'direkt'"),
        (
            ["--topology", "ring:4", "--trace", "direkt", "x.json"],
            "no schedule 'direkt' for embedding_all_to_all; the nearest",
        ),
        (
            ["--topology", "ring:4", "--chakra", "serail", "x"],
            "no schedule 'serail' for embedding_all_to_all; the nearest",
        ),
        (["--topology", "ring:4", "--dtype", "int3"], "dtype='int3'"),
        (["--topology", "ring:4", "--hw", "nobodys"], "nobodys"),
    ],
)
def test_refusals_name_the_field_and_what_is_legal(given: list[str], told: str) -> None:
    done = runner.invoke(app, [*EMBEDDINGS, *given])
    assert isinstance(done.exception, ValueError), done.output
    assert told in str(done.exception)


def test_help_teaches_with_this_command() -> None:
    done = runner.invoke(app, ["sim", "embedding_all_to_all", "--help"])
    assert done.exit_code == 0
    assert "weft sim embedding_all_to_all --shape 16384,64,64" in " ".join(done.output.split())
    assert "weft plan embedding_all_to_all" not in " ".join(done.output.split())


def test_help_has_only_options_of_this_command() -> None:
    for command, has_it in (("plan", True), ("sim", False)):
        done = runner.invoke(app, [command, "all_gather_matmul", "--help"])
        assert ("--all" in done.output) == has_it, command


def test_a_kineto_trace_is_a_file_for_each_rank_with_its_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "kineto"
    arguments = ["sim", "matmul_all_reduce", "--shape", "4096,4096,4096", "--hw", "mi300x", "--ranks", "4"]
    name = "two_shot[chunks=2,by=dma,add=reduce]"
    done = runner.invoke(app, [*arguments, "--schedule", name, "--kineto", name, str(folder)])
    assert done.exit_code == 0, done.output
    assert f"a Kineto trace of {name} for each rank" in done.output
    assert {path.name for path in folder.iterdir()} == {f"rank-{rank}.json" for rank in range(4)}
    for rank in range(4):
        trace = json.loads((folder / f"rank-{rank}.json").read_text())
        assert trace["distributedInfo"] == {"backend": "nccl", "rank": rank, "world_size": 4}
        kinds = {one["cat"] for one in trace["traceEvents"]}
        assert kinds == {"kernel", "gpu_memcpy"}
        sent = sum(one["args"]["bytes"] for one in trace["traceEvents"] if one["cat"] == "gpu_memcpy")
        assert sent == pytest.approx(2 * 3 / 4 * 4096 * 4096 * 2)  # to three peers: products, then sums


@pytest.mark.parametrize(("option", "first"), [("--chakra", "matmul_all_reduce.2.et"), ("--kineto", "rank-2.json")])
def test_a_folder_with_traces_of_more_ranks_is_refused(option: str, first: str, tmp_path: Path) -> None:
    arguments = ["sim", "matmul_all_reduce", "--shape", "1024,512,512", "--hw", "mi300x", "--schedule", "serial"]
    for ranks in ("4", "4"):
        done = runner.invoke(app, [*arguments, "--ranks", ranks, option, "serial", str(tmp_path)])
        assert done.exit_code == 0, done.output
    done = runner.invoke(app, [*arguments, "--ranks", "2", option, "serial", str(tmp_path)])
    assert isinstance(done.exception, ValueError), done.output
    assert f"has files of another trace ({first} and 1 more): remove them" in str(done.exception)
