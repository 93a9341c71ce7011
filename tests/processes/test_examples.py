"""The examples run as their headers say, on CPU processes."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.image
import pytest

from weft.hw import load_machine
from weft.schedule.verify import verify
from weft.sim import model_of, simulate

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GEMMS = ("matmul h", "matmul y")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    found = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    return found.stdout


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dlrm_agrees_with_the_unsharded_model() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--device", "cpu", "--check", "--batch", "128", "--steps", "3"]
    printed = run(*launcher, EXAMPLES / "dlrm_inference.py", *arguments)
    for rank in range(2):
        assert f"rank {rank}: 4 batches agree with the unsharded model" in printed
    assert "samples/s on 2 ranks" in printed


# -- a chain of GEMMs as one schedule


def test_the_chain_runs_prints_itself_and_is_drawn(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "gemm_chain.py", "--rows", "64", "--width", "48", "--hidden", "96", "--trace", tmp_path)
    assert "lane GEMM 2 (compute)" in printed
    errors = re.findall(r"rank (\d): error (\S+) against float64; torch, one step after the other: (\S+)", printed)
    assert [rank for rank, _, _ in errors] == ["0", "1"]
    assert all(0 < float(ours) <= 2 * float(usual) < 1e-5 for _, ours, usual in errors)
    events = json.loads((tmp_path / "gemm_chain.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events if e["name"] == "matmul y"} == {0, 1}
    assert min(matplotlib.image.imread(tmp_path / "gemm_chain.png").shape[:2]) > 300


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_the_first_gemm_has_done_flows_on(world: int) -> None:
    schedule = load(EXAMPLES / "gemm_chain.py").chain(world, 512, 512, 1024, 4)
    verify(schedule)
    timeline = simulate(schedule, model_of(load_machine("h200"), world)).timeline
    for rank in range(world):
        starts = {name: [s.start_us for s in timeline if (s.rank, s.name) == (rank, name)] for name in GEMMS}
        assert [len(times) for times in starts.values()] == [4 * world] * 2
        assert starts["matmul y"][0] < starts["matmul h"][2]


def test_its_help_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    load(EXAMPLES / "gemm_chain.py").parser().print_help()
    text = capsys.readouterr().out
    for words in ("as one schedule", "python examples/gemm_chain.py --trace", "--chunks CHUNKS", "(default: 2)"):
        assert words in text
