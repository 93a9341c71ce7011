"""Refusals of the command line: one sentence on stderr and an exit status, before work starts, and never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
from support.made_up import registered_by_a_test
from typer.testing import CliRunner

from weft.bench.__main__ import main as bench_main
from weft.bench.core.arguments import one_line
from weft.bench.core.operators import names
from weft.cli import main as start
from weft.cli.app import app, main
from weft.errors import PeerLostError
from weft.studies import ficco, t3, t3_hardware

SMALL_GEMM = ["bench", "all_gather_matmul", "--device", "cpu", "--shape", "8,8,8", "--quick"]
SMALL = ["--device", "cpu", "--shape", "8,8,8", "--quick"]
GEMM = ["plan", "all_gather_matmul", "--shape"]
EXPERTS = ["plan", "all_to_all_matmul", "--shape", "8192,14336,4096", "--hw", "h200"]
BENCH = ["bench", "all_gather_matmul", "--device", "cpu", "--preset", "8x8x8", "--quick"]
EMBEDDINGS = ["bench", "embedding_all_to_all", "--device", "cpu"]


def _refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused, with status 2 and nothing on stdout. Return its message."""
    monkeypatch.setattr(sys, "argv", ["weft", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    found = capsys.readouterr()
    assert not found.out
    assert "Traceback" not in found.err
    return found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "weft: no command 'bogus': give one of bench, demo, doctor, plan, sim, reproduce"),
        (["plan", "bogus"], "weft: no operator 'bogus': give one of all_gather_matmul, "),
        (["bench", "bogus"], "weft: no operator 'bogus': give one of all_gather_matmul, "),
        (["bench", "bogus"], ", never-slower\n"),
        (["bench", "never_slower"], "weft: no operator 'never_slower' (did you mean never-slower?): give one of "),
        (["bench", "neverslower", "--shapes", "3"], "weft: no operator 'neverslower' (did you mean never-slower?): "),
        (["bench"], "weft: the operator is missing: give one of all_gather_matmul, "),
        (["plan", "all_gather_matmull"], "no operator 'all_gather_matmull' (did you mean all_gather_matmul?): give one of "),
        (["--versions"], "weft: option --versions cannot come before the command: write the command first, one of bench, demo, "),
        (["reproduce", "t3", "--topology", "ring"], "--topology needs --hw"),
        (["doctor", "--links", "links.toml"], "--links needs --group: run weft doctor --group --links links.toml"),
        (["reproduce", "bogus"], "weft: no paper 'bogus': give one of ficco, t3"),
        (["plan", "--hw", "h200"], "weft: option --hw cannot come before the operator: write the operator first, one of all_"),
        (["plan", "tensor_parallel", "--shape", "8,8,8"], "plan each of them"),
        ([*GEMM, "8,8,8", "--hw", "h20"], "for an NVIDIA GPU without one, weft derives the numbers from properties"),
        ([*GEMM, "8,8,8", "--hw", "h20"], "copy weft/hw/a100.toml, change its datasheet numbers"),
        ([*GEMM, "8,8"], "--shape '8,8' must be three positive integers M,N,K"),
        (["bench", "all_gather_matmul", "--shape", "8,8"], "--shape '8,8' must be three positive integers M,N,K"),
        (["bench", "all_gather_matmul", "--shape", "-1,2,3"], "--shape '-1,2,3' must be three positive integers M,N,K"),
        ([*GEMM, "8,8,8-e8"], "leave out '-e8'"),
        ([*GEMM, "8,8,8", "--option", "a"], "option 'a' has no value: write it as a=VALUE"),
        ([*GEMM, "8,8,8", "--option", "a=1"], "a=1: all_gather_matmul has no such option; it has no options of its own"),
        (["plan", "matmul_all_reduce", "--shape", "8,8,8", "--option", "norm=true", "--option", "norm=false"],
            "option norm is given 2 times, as True and False: give it once"),
        (["bench", "matmul_all_gather", "--shape", "8,8,8", "--device", "cpu", "--option", "gather_dim=0", "--option",
            "gather_dim=-1"], "option gather_dim is given 2 times, as 0 and -1: give it once"),
        (["bench", "bogus", "--help"], "weft: no operator 'bogus': give one of all_gather_matmul, "),
        ([*GEMM, "8,8,8", "--option", "norm=true"], "has no such option (matmul_all_reduce has it)"),
        (["bench", "all_to_all_matmul", "--shape", "8,8,8"], "'8x8x8' is not a known shape: write TOKENSxNxK-eEXPERTS-topK"),
        (["plan", "matmul_all_gather", "--shape", "8,8,8", "--option", "gather_dim=x"], "gather_dim=x: give an integer"),
        (["plan", "all_gather_scaled_matmul", "--shape", "8,8,8", "--dtype", "bf16"], "all_gather_scaled_matmul needs dtype fp8"),
        (["bench", "all_gather_scaled_matmul", "--dtype", "bf16", *SMALL], "all_gather_scaled_matmul needs dtype fp8"),
        ([*EXPERTS], "needs the number of experts of all ranks together, a multiple of 2 (--option experts=NUMBER)"),
        ([*EXPERTS, "--option", "experts=9"], "experts=9 must be a positive multiple of ranks=2"),
        ([*EXPERTS, "--option", "experts=8", "--shape", "0,14336,4096"], "M=0, N=14336, K=4096: each must be at least 1"),
        ([*EXPERTS, "--option", "experts=8", "--mode", "graph"], "bounded=true (in Python bounded=True), and call it with"),
        ([*BENCH, "--json", "."], "--json . is a folder: give a file"),
        ([*BENCH, "--json", "/nowhere/results.jsonl"], "--json /nowhere/results.jsonl: the folder /nowhere does not exist"),
        ([*BENCH, "--pictures", __file__], "is a file: give a folder"),
        ([*BENCH, "--seconds", "inf"], "seconds=inf must be above 0 and at most 3600"),
        ([*GEMM, "-512,8,8"], "--shape '-512,8,8' must be three positive integers"),
        ([*GEMM, "512,1e3,8"], "--shape '512,1e3,8' must be three positive integers"),
        ([*GEMM, "512,8,0"], "M=512, N=8, K=0: each must be at least 1"),
        ([*GEMM, "512,8,8", "--ranks", "1024"], "ranks=1024: at most 256 can be simulated"),
        ([*GEMM, "512,8,8", "--json", "."], "'--json': file '.' is a directory"),
        ([*GEMM, "511,8,8"], "m=511 must be divisible by world_size=2: use 510 or 512"),
        ([*GEMM, "1,1,1"], "m=1 must be divisible by world_size=2: use 2"),
        ([*GEMM, "512,8,8", "--hw", "h900"], "no machine 'h900': give one of a100, b200, h100, h200"),
        ([*GEMM, "512,8,8", "--hw", "nowhere.toml"], "nowhere.toml"),
        ([*GEMM, "512,8,8", "--topology", "rings"], "no topology 'rings': give one of hosts, mesh, ring, switch, torus"),
        ([*GEMM, "512,8,8", "--hw", "h200", "--topology", "ring"], "NVIDIA H200 has no link.pair_usable: add it to the file"),
        ([*GEMM, "512,8,8", "--dtype", "bf8", "--hw", "h200"], "dtype='bf8': NVIDIA H200 has matmul rates only for fp32, fp16"),
        ([*EMBEDDINGS, "--preset", "dlrm"], "no preset 'dlrm': give one of pgas-weak"),
        ([*EMBEDDINGS, "--variants", "direct,fast"], "no variant 'fast'"),
        ([*EMBEDDINGS, "--scale", "lots"], "scale 'lots' is not a number: write it as 1/32 or 0.03"),
        ([*EMBEDDINGS, "--scale", "2"], "scale=2.0 must be at least 1/65536 and at most 1"),
        ([*EMBEDDINGS, "--scale", "1e-9"], "scale=1e-09 must be at least 1/65536 and at most 1"),
        ([*EMBEDDINGS, "--scale", "1e999999999"], "scale=inf must be at least 1/65536 and at most 1"),
        ([*EMBEDDINGS, "--scale", "1" + "0" * 400 + "/3"], "is not a number: write it as 1/32 or 0.03"),
        ([*EMBEDDINGS, "--preset", ""], "preset='' names no preset: pass a name, or omit it for all presets"),
        (["bench", "all_gather_matmul", "--device", "cpu", "--preset", ","], "preset=',' names no preset"),
        ([*SMALL_GEMM, "--variants", ","], "--variants ',' names no variant: pass a name, or omit it for the default variants"),
        ([*SMALL_GEMM, "--device", ""], "device='' must be 'cpu' or 'cuda'"),
        ([*SMALL_GEMM, "--dtype", ""], "dtype='' must be one of fp32"),
        ([*EMBEDDINGS, "--ranks", "0"], "ranks=0 must be at least 1"),
    ],
)  # fmt: skip
def test_an_argument_that_cannot_be_is_a_sentence(arguments: list[str], message: str, monkeypatch, capsys) -> None:
    assert message in _refused(arguments, monkeypatch, capsys)


WRITERS = {
    "plan": [*GEMM, "8,8,8"], "bench": ["bench", "inefficiency", "--device", "cpu"], "ficco": ["reproduce", "ficco"],
    "t3": ["reproduce", "t3"], "t3 in software": ["reproduce", "t3", "--hw", "h200"],
}  # fmt: skip


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("path", ["nowhere/results", "/proc/results"])
def test_files_are_tried_before_work_starts(command: str, path: str, monkeypatch, capsys) -> None:
    for study in (ficco, t3, t3_hardware):
        monkeypatch.setattr(study, "simulated", lambda *given, **more: pytest.fail("it has started"))
    assert f"--json {path}" in _refused([*WRITERS[command], "--json", path], monkeypatch, capsys)


@pytest.mark.parametrize("command", ["bench", "ficco", "t3"])
@pytest.mark.parametrize("folder", [f"{__file__}/figures", "/proc/figures"])
def test_folders_of_pictures_are_tried_before_work_starts(command: str, folder: str, monkeypatch, capsys) -> None:
    for study in (ficco, t3, t3_hardware):
        monkeypatch.setattr(study, "simulated", lambda *given, **more: pytest.fail("it has started"))
    assert f"--pictures {folder} cannot be written" in _refused(
        [*WRITERS[command], "--pictures", folder], monkeypatch, capsys
    )


def test_a_file_that_is_no_record_is_a_sentence(tmp_path: Path, monkeypatch, capsys) -> None:
    broken = tmp_path / "records.jsonl"
    for text, said in (
        ("{", "line 1 cannot be read"),
        ("[]", "line 1: found a list, but a record is a JSON object"),
        ('{"op": "t4"}', "unknown op 't4'"),
    ):
        broken.write_text(text)
        assert said in _refused(["reproduce", "t3", "--records", str(broken)], monkeypatch, capsys)
    broken.write_text("")
    said = f"{broken}: no records of T3's sub-layers: run weft bench"
    assert said in _refused(["reproduce", "t3", "--records", str(broken)], monkeypatch, capsys)
    broken.write_text("name = [")
    assert "a.toml cannot be read" in _refused(
        [*GEMM, "8,8,8", "--hw", str(broken.rename(tmp_path / "a.toml"))], monkeypatch, capsys
    )


@pytest.mark.parametrize("wrong", [
    {"m": "many"}, {"network": "GPT-9"}, {"p50_ms": "1"}, {"chosen": None}, {"chosen": "bogus"}, {"ranks": 0},
    {"machine": 7}, {"date": None}, {"k": [1]},
])  # fmt: skip
def test_a_record_with_a_value_that_cannot_be_is_a_sentence(tmp_path: Path, wrong: dict, monkeypatch, capsys) -> None:
    root = Path(__file__).parents[2] / "benchmarks" / "results" / "sim-t3.jsonl"
    good = [json.loads(line) for line in root.read_text().splitlines()[:2]]
    assert [record["variant"] for record in good] == ["serial", "weft"]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record | wrong) + "\n" for record in good))
    assert _refused(["reproduce", "t3", "--records", str(file)], monkeypatch, capsys).count("\n") == 1


def test_a_value_that_is_no_text_is_a_sentence(tmp_path: Path, monkeypatch, capsys) -> None:
    root = Path(__file__).parents[2] / "benchmarks" / "results" / "sim-ficco.jsonl"
    file = tmp_path / "records.jsonl"
    records = [json.loads(line) for line in root.read_text().splitlines()]
    file.write_text(
        "".join(json.dumps(one | ({"closed_form": 1} if "closed_form" in one else {})) + "\n" for one in records)
    )
    said = _refused(["reproduce", "ficco", "--records", str(file)], monkeypatch, capsys)
    assert "a record has a value of a wrong type or size (sequence item" in said
    assert said.count("\n") == 1


def test_what_fails_while_it_runs_is_a_line_and_status_1(capsys) -> None:
    for error, status in (
        (PeerLostError("rank 1 is lost"), 1),
        (TimeoutError("ranks [1] were still running"), 1),
        (ValueError("wrong"), 2),
        (OSError(5, "Input/output error"), 2),
        (KeyboardInterrupt(), 130),
    ):
        with pytest.raises(SystemExit) as stopped, one_line("weft"):
            raise error
        assert stopped.value.code == status
        assert capsys.readouterr().err == f"weft: {str(error) or 'interrupted'}\n"
    with pytest.raises(ZeroDivisionError), one_line("weft"):  # an internal error of weft keeps its traceback
        1 / 0  # noqa: B018


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ("2", "RANK=2 must be less than WORLD_SIZE=2: start the ranks with torchrun"),
        ("x", "RANK='x' must be an integer"),
    ],
)
@pytest.mark.parametrize("command", [BENCH, ["doctor", "--group"]], ids=lambda one: one[0])
def test_a_rank_beyond_the_world_is_refused(command: list[str], rank: str, message: str, monkeypatch, capsys) -> None:
    """torch would wait for the other ranks."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert message in _refused(command, monkeypatch, capsys)


def test_the_file_of_links_is_tried_before_ranks_meet(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *given: pytest.fail("it has started"))
    said = _refused(["doctor", "--group", "--links", "/nowhere/links.toml"], monkeypatch, capsys)
    assert "--links /nowhere/links.toml: the folder /nowhere does not exist" in said


def test_ctrl_c_during_the_first_import_is_no_traceback(monkeypatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    module = types.ModuleType("weft.bench.core.arguments")
    module.__getattr__ = interrupted  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "weft.bench.core.arguments", module)
    with pytest.raises(SystemExit) as stopped:
        start()
    assert stopped.value.code == 130


def test_the_command_without_the_extra_refuses_alike(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["weft.bench", "all_gather_matmul", "--shape", "8"])
    with pytest.raises(SystemExit) as stopped:
        bench_main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("weft bench: --shape '8' must be three positive integers")


def test_every_command_has_the_same_operators_and_spellings() -> None:
    """Help must show names and options in the same spelling."""
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    shown = {of: " ".join(runner.invoke(app, [*of.split(), "--help"]).output.split()) for of in (
        "plan", "bench", "bench matmul_all_gather", "plan all_gather_matmul", "plan matmul_all_gather", "reproduce ficco",
        "reproduce t3",
    )}  # fmt: skip
    for name in names():
        assert name in shown["plan"]
        assert name in shown["bench"] or registered_by_a_test(name)
    assert {"tensor_parallel", "all_gather_scaled_matmul", "all_gather_matmul_gradients"} < set(names())
    for command in ("plan all_gather_matmul", "reproduce ficco", "reproduce t3"):
        assert "--hw" in shown[command]
    for command in ("plan matmul_all_gather", "bench matmul_all_gather"):
        assert "--shape" in shown[command]
        assert "M,N,K" in shown[command]
        assert "--option" in shown[command]
    for command in ("plan all_gather_matmul", "bench matmul_all_gather", "reproduce ficco", "reproduce t3"):
        assert "one line of JSON" in shown[command]
        assert "existing lines stay" in shown[command]


def test_fp8_has_a_plan_under_its_operators_name() -> None:
    found = CliRunner().invoke(app, ["plan", "all_gather_scaled_matmul", "--shape", "64x64x64", "--hw", "h200"])
    assert found.exit_code == 0, found.output
    assert "fp8" in found.output


def test_reproduce_appends_says_so_and_shows_how_far_it_is(tmp_path: Path, monkeypatch, capsys) -> None:
    file, simulated = tmp_path / "t3.jsonl", t3.simulated
    few = [network._replace(ranks=(8,)) for network in t3.NETWORKS[:1]]
    monkeypatch.setattr(t3, "simulated", lambda *given, progress: simulated(*given, few, progress=progress))
    monkeypatch.setattr("weft.cli.reproduce.SAYS_EVERY_S", 1e-9)
    for times in (1, 2):
        monkeypatch.setattr(sys, "argv", ["weft", "reproduce", "t3", "--hw", "h200", "--json", str(file)])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 0
        assert len([json.loads(line) for line in file.read_text().splitlines()]) == 8 * times
        found = capsys.readouterr()
        assert f"appended 8 JSON objects to {file}" in found.out
        assert "weft reproduce: simulating Mega-GPT-2 OP, 8 ranks (0% done" in found.err


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["", "making inputs"])
def test_ctrl_c_ends_a_benchmark_without_a_traceback(seen: str) -> None:
    """Ctrl-C reaches all processes of the terminal, while they start or while they measure."""
    arguments = [
        sys.executable,
        "-m",
        "weft.cli",
        "bench",
        "all_gather_matmul",
        "--device",
        "cpu",
        "--shape",
        "64,64,64",
    ]
    with subprocess.Popen(
        [*arguments, "--seconds", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A background job ignores this signal by default.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as program:
        assert program.stderr is not None
        if seen:
            assert seen in program.stderr.readline()
        else:  # the process is still importing modules
            while Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text() == "" and program.poll() is None:
                pass
        os.killpg(program.pid, signal.SIGINT)
        said = program.stderr.read()
        assert program.wait(timeout=300) == 130, said
    assert "Traceback" not in said
