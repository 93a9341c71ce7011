"""The record of a run of GPU tests contains pytest's results and the commit of the code."""

import json
import subprocess
import sys
from pathlib import Path

from weft.bench.gpu_tests import main
from weft.bench.provenance import COMMIT, SOURCE

TESTS = """
import pytest
@pytest.mark.parametrize("n", range(3))
def test_right(n): ...
def test_wrong(): assert False
@pytest.fixture
def broken(): raise OSError("no GPU")
def test_error(broken): ...
@pytest.mark.skipif(True, reason="torch sees 0 GPUs, 2 are needed")
def test_skipped(): ...
"""


def test_a_run_is_counted_by_outcome(tmp_path: Path) -> None:
    (tmp_path / "test_made_up.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    subprocess.run([*command, f"--junitxml={tmp_path}/junit.xml", str(tmp_path)], capture_output=True, timeout=300)
    out = tmp_path / "gpu-tests.json"
    main([str(out), *[str(tmp_path / "junit.xml")] * 2, "--device", "cpu"])
    main([str(out), str(tmp_path / "junit.xml"), str(tmp_path / "broke_off.xml"), "--device", "cpu"])
    first, second = json.loads(out.read_text())
    assert (first["finished"], first["missing"]) == (True, [])
    assert (first["passed"], first["failed"], first["skipped"]) == (6, 4, 2)
    assert sorted({name.rpartition("::")[2] for name in first["failures"]}) == ["test_error", "test_wrong"]
    assert first["skips"] == {"torch sees 0 GPUs, 2 are needed": 2}
    assert first["seconds"] > 0
    assert (second["finished"], second["missing"], second["passed"]) == (False, ["broke_off"], 3)
    for one in (first, second):
        assert COMMIT.fullmatch(one["commit"])
        assert SOURCE.fullmatch(one["source"])
