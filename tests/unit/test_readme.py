"""The README holds what it says: every Python block runs as printed, on two processes; links, targets and commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from weft.cli.app import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def _run_on_two_ranks(script: str, folder: Path) -> str:
    (folder / "example.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = subprocess.run([*launcher, "example.py"], cwd=folder, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_first_snippet_runs_as_printed(tmp_path: Path) -> None:
    snippet = BLOCKS[0]
    assert README.index(snippet) < README.index("\n## "), "it comes before everything else"
    printed = _run_on_two_ranks(snippet, tmp_path)  # by two processes, whose line ends may mix
    assert sorted(re.findall(r"rank (\d): \[128, 512\], feature3: \[128, 64\]", printed)) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(BLOCKS)))
def test_every_other_block_runs_too(number: int, tmp_path: Path) -> None:
    _run_on_two_ranks(BLOCKS[number], tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == {"rank0.json", "rank1.json"}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_links_and_commands_exist(document: str) -> None:
    path = ROOT / document
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith("https://") or (path.parent / target).exists(), f"{document} links to {target}"
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document} says make {target}"
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in set(re.findall(r"`weft ([a-z]+)", text)):
        assert command in commands, f"{document} says weft {command}"
