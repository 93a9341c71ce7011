"""`make setup` announces each step and shows pip's downloads. It leaves a file only if it succeeded."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/sh
case "$2" in
  import*) exec python3 "$@" ;;
  venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  pip) echo "pip: $*"; case "$*" in *"$BREAKS_ON"*) exit 1 ;; esac ;;
esac
"""


def setup(folder: Path, breaks_on: str = "nothing") -> subprocess.CompletedProcess[str]:
    """Run `make setup` with fake versions of python and pip, which change nothing. breaks_on: pip fails for arguments
    with this word.
    """
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "setup", f"PYTHON={python}", f"VENV={folder / 'venv'}", "PIP_ARGS=--extra here"]
    environment = {**os.environ, "BREAKS_ON": breaks_on, "MAKEFLAGS": "", "MAKELEVEL": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_it_says_what_it_does_before_it_does_it(tmp_path: Path) -> None:
    done = setup(tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, tools, third, everything, last = done.stdout.splitlines()
    assert first == f"== 1 of 3: making {tmp_path / 'venv'}"
    assert second.startswith("== 2 of 3: installing what builds the native module")
    assert third.startswith("== 3 of 3: installing torch")
    assert "csrc/" in third
    assert last == f"== weft is in {tmp_path / 'venv'}"
    compiled = (tmp_path / "venv" / "compiled.txt").read_text()
    for pip, wanted in ((tools, "cmake"), (everything, "-r"), (compiled, "-e .")):
        assert pip.startswith("pip: -m pip install")
        assert wanted in pip
        assert "--extra here" in pip
        assert " -q" not in pip  # pip prints its downloads
    assert "torch" in (tmp_path / "venv" / "needs.txt").read_text()
    assert "nothing to be done" in setup(tmp_path).stdout.lower()


@pytest.mark.parametrize("breaks_on", ["cmake", "-r ", "-e ."])
def test_what_fails_is_done_again(tmp_path: Path, breaks_on: str) -> None:
    failed = setup(tmp_path, breaks_on)
    assert failed.returncode != 0
    assert breaks_on in failed.stdout  # also if what it prints is kept in a file
    assert "weft is in" not in failed.stdout
    assert setup(tmp_path).stdout.splitlines()[-1].startswith("== weft is in")
