"""The command line as a user sees it: help texts with examples, refusals with a fix, `weft doctor`, and real runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.slow import slow
from typer.testing import CliRunner

import weft
from weft.bench.demo import LEGEND
from weft.cli import doctor
from weft.cli.app import app, main

WEFT = [sys.executable, "-m", "weft.cli"]
runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})


def _weft(
    *arguments: str, launcher: tuple[str, ...] = (sys.executable, "-m", "weft.cli")
) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=300, env=environment)


def test_version_and_help_need_no_torch() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == f"weft {weft.__version__}"
    script = "import sys; from weft.cli.app import app; app(['--help'], standalone_mode=False); assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    for command in ("bench", "demo", "doctor"):
        assert command in found.stdout


@pytest.mark.parametrize(
    "launcher", ["from weft.cli.app import app; app(['bench', '--help'])", "from weft.bench.__main__ import *; main()"]
)
def test_help_of_bench_needs_no_torch(launcher: str) -> None:
    script = f"import sys; sys.argv = ['', '--help']; sys.modules['torch'] = None; {launcher}"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "embedding_all_to_all" in found.stdout


def test_help_of_bench_teaches_by_examples() -> None:
    text = runner.invoke(app, ["bench", "--help"]).output
    assert "weft bench embedding_all_to_all --preset dcnv2" in text
    assert "torchrun --nproc-per-node 2" in text
    assert "put-natural-slice8" in runner.invoke(app, ["bench", "embedding_all_to_all", "--help"]).output


def test_ranks_and_torchrun_exclude_each_other(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["weft", "bench", "embedding_all_to_all", "--device", "cpu", "--ranks", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "torchrun, which sets the number of ranks" in capsys.readouterr().err


def test_doctor_says_what_weft_will_use() -> None:
    found = runner.invoke(app, ["doctor"])
    assert found.exit_code == 0, found.output
    assert "CPU processes: the native" in found.output
    for what in ("compiler", "shared memory", "GPUs", "peer access", "NCCL", "NVSHMEM", "Triton"):
        assert what in found.output


def test_doctor_knows_which_nccl_can_send_from_kernels() -> None:
    assert doctor.device_api((2, 27, 9)) == "without a device API, which 2.28 has"
    assert "but not to other hosts" in doctor.device_api((2, 28, 3))
    assert "and to other hosts (GIN)" in doctor.device_api((2, 28, 7))
    assert "and to other hosts (GIN)" in doctor.device_api((2, 29))


def test_doctor_reads_the_variables_of_weft(monkeypatch) -> None:
    def found() -> doctor.Finding:
        return next(f for f in doctor.examine().findings if f.what == "environment")

    for name in [name for name in os.environ if name.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    assert (found().state, found().found) == ("ok", "no variable of weft is set")
    monkeypatch.setenv("WEFT_QUIET", "1")
    assert (found().state, found().found) == ("ok", "WEFT_QUIET=1")
    monkeypatch.setenv("WEFT_DEADLIN_S", "3")
    assert (found().state, found().found) == ("missing", "weft does not read WEFT_DEADLIN_S")
    assert "WEFT_DEADLINE_S" in found().fix
    monkeypatch.setenv("WEFT_DEADLINE_S", "soon")
    assert found().state == "broken"
    assert "WEFT_DEADLINE_S='soon' must be a positive number" in found().found
    assert not doctor.examine().works
    monkeypatch.setenv("WEFT_QUIET", "yep")
    assert [text.partition(" must be")[0] for text in found().found.splitlines()] == [
        "WEFT_DEADLINE_S='soon'", "WEFT_QUIET='yep'"
    ]  # fmt: skip
    assert found().fix.startswith("correct the variables, or unset them")


def test_doctor_survives_a_machine_where_nothing_works(monkeypatch) -> None:
    def broken(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    def no_memory(*arguments: object) -> None:
        raise OSError("no memfd here")

    monkeypatch.setattr(doctor, "_import", broken)
    monkeypatch.setattr(os, "memfd_create", no_memory)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    report = doctor.examine()
    assert not report.works
    assert report.state("torch") == report.state("native module") == report.state("shared memory") == "broken"
    assert report.state("compiler") == report.state("Triton") == "missing"
    assert all(f.fix for f in report.findings if f.state == "broken")
    found = runner.invoke(app, ["doctor"])
    assert found.exit_code == 1
    assert "Nothing works here yet" in found.output
    assert "no memfd here" in found.output


def test_doctor_without_the_native_module_leaves_no_path(monkeypatch) -> None:
    real = doctor._import

    def without_core(name: str):
        if name == "weft._core":
            raise ImportError("no module named weft._core")
        return real(name)

    monkeypatch.setattr(doctor, "_import", without_core)
    report = doctor.examine()
    assert not report.works
    assert "pip install" in next(f.fix for f in report.findings if f.what == "native module")


@pytest.mark.slow
def test_bench_on_two_ranks_and_under_torchrun_prints_a_table_and_appends_records(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    small = ["bench", "embedding_all_to_all", "--device", "cpu", "--preset", "criteo-kaggle", "--scale", "1/1024"]
    small += ["--quick", "--json", str(path)]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    own = _weft(*small, "--ranks", "2", "--mode", "queued", "--variants", "put")
    assert own.returncode == 0, own.stderr
    assert len(path.read_text().splitlines()) == 2
    found = _weft("-m", "weft.cli", *small, "--mode", "single", "--variants", "direct", launcher=torchrun)
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["variant"], r["ranks"], r["mode"]) for r in rows] == [
        ("embedding_bag", 2, "queued"), ("put", 2, "queued"), ("embedding_bag", 2, "single"), ("direct", 2, "single"),
    ]  # fmt: skip
    assert rows[0]["run"] == rows[1]["run"] != rows[2]["run"]
    assert {r["config"] for r in rows} == {"criteo-kaggle"}
    assert rows[0]["scale"] == 1 / 1024
    for text in ("scaled by 1/1024", "roofline", "vs"):
        assert text in own.stdout


@pytest.mark.parametrize("launcher", [slow("weft.cli"), slow("weft.bench")])
def test_a_benchmark_that_nobody_reads_keeps_its_records_and_ends_quietly(tmp_path: Path, launcher: str) -> None:
    file = tmp_path / "kept.jsonl"
    given = [
        "all_gather_matmul",
        "--quick",
        "--device",
        "cpu",
        "--preset",
        "64x64x64",
        "--mode",
        "single",
        "--json",
        str(file),
    ]
    arguments = [sys.executable, "-m", launcher, *(["bench"] if launcher == "weft.cli" else []), *given]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        said = program.stderr.read()
        assert program.wait(timeout=300) == 1, said
    assert "timing, single" in said
    assert "Traceback" not in said
    assert "Broken pipe" not in said
    assert {json.loads(line)["variant"] for line in file.read_text().splitlines()} == {"serial", "weft"}


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_stream_that_is_closed_at_the_start_stops_no_command(closed: str, tmp_path: Path) -> None:
    """A cron job or a daemon may start commands without these streams. The progress goes to stderr."""
    record = tmp_path / "plan.json"
    command = f'"{sys.executable}" -m weft.cli plan all_gather_matmul --shape 64,64,64 --hw h200 --json "{record}"'
    found = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, timeout=300)
    said = [
        line for line in found.stderr.splitlines() if not line.startswith("weft plan: ")
    ]  # progress if the machine is busy
    assert (found.returncode, said) == (0, [])
    assert record.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("where", ["stdout", "json"])
def test_a_full_disk_is_a_sentence(where: str) -> None:
    arguments = [
        "plan",
        "all_gather_matmul",
        "--shape",
        "64,64,64",
        *(["--json", "/dev/full"] if where == "json" else []),
    ]
    with Path("/dev/full" if where == "stdout" else os.devnull).open("w") as out:
        found = subprocess.run(
            [sys.executable, "-m", "weft.cli", *arguments], stdout=out, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert found.returncode == 2
    named = ": '/dev/full'" if where == "json" else ""
    assert found.stderr.strip() == f"weft: [Errno 28] No space left on device{named}"


def test_demo_draws_into_no_file(tmp_path: Path) -> None:
    file = tmp_path / "demo"
    file.touch()
    found = _weft("demo", "--out", str(file))
    assert found.returncode == 2
    assert "Invalid value for '--out'" in found.stderr


@pytest.mark.slow
def test_demo_leaves_a_picture_and_a_trace(tmp_path: Path) -> None:
    found = _weft("demo", "--out", str(tmp_path / "demo"), "--scale", "1/1024")
    assert found.returncode == 0, found.stderr
    assert "scaled by 1/1024" in found.stdout
    assert LEGEND in " ".join(found.stdout.split())
    assert "every variant matches the unfused float64 reference" in found.stdout
    assert re.search(r"By default a call is \d+\.\d\dx as fast as", found.stdout)
    assert "https://ui.perfetto.dev" in found.stdout
    assert (tmp_path / "demo" / "overlap.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((tmp_path / "demo" / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert len(names) == 4
    assert {name[:6] for name in names} == {"rank 0", "rank 1"}
