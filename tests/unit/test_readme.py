"""The README and the pages are true: every Python block runs as printed, on two processes. Links, targets and commands
exist, and the first screen has the required contents.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest
import typer
from support.scripts import DOCS, load

from weft.cli.app import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("**/*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = PYTHON.findall(README)


def _run_on_two_ranks(script: str, folder: Path) -> str:
    (folder / "example.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = subprocess.run([*launcher, "example.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout + "".join(line for line in found.stderr.splitlines(True) if "Warning" in line)


@pytest.mark.slow
def test_the_first_snippet_runs_as_printed(tmp_path: Path) -> None:
    snippet = BLOCKS[0]
    assert README.index(snippet) < README.index("\n## What works where"), "it comes before everything else"
    printed = _run_on_two_ranks(snippet, tmp_path)  # lines of the two processes may be mixed
    assert sorted(re.findall(r"rank (\d): y \[256, 256\], x.grad \[128, 512\]", printed)) == ["0", "1"]


def test_the_line_that_changes_is_the_one_that_runs() -> None:
    """The new call of the diff is the snippet's call. The old call differs only in the name and the group."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    old, new = (line[2:] for line in diff.splitlines())
    assert new.replace(", group,", ", dist.group.WORLD,") in BLOCKS[0]
    assert old.replace("torch.ops.symm_mem.fused_", "weft.").replace("group.group_name", "group") == new


def test_the_first_screen_says_what_for_whom_how_fast_and_where_weft_loses() -> None:
    screen = README[: README.index("\n## ")]
    (first,) = re.findall(r"^\*\*(.*?)\*\*$", screen, re.MULTILINE)
    assert len(first.split()) <= 20
    assert "one NVIDIA node" in first
    head, *rows = re.findall(r"^\|(?!---)(.*)\|$", screen, re.MULTILINE)
    assert "2 x NVIDIA H100" in head
    assert len(rows) == 5
    assert all(re.search(r"<!-- gain:h100-\S+ queued .*?-->\d+\.\d\dx<!-- /gain -->", row) for row in rows)
    box = " ".join(line.removeprefix(">") for line in screen.splitlines() if line.startswith(">"))
    loses = box[box.index("**Where weft loses.**") : box.index("**Random shapes.**")]
    factors = re.findall(r" - <!-- gain:[^>]*-->(\d+\.\d\d)x<!--", loses)
    assert len(factors) == 3
    assert all(float(factor) < 1 for factor in factors), "weft loses there no more: take it out"
    assert "float64" in box
    assert len(README.splitlines()) <= 250


def test_the_picture_has_the_numbers_of_the_first_screen() -> None:
    speedups = load(DOCS / "speedups.py")
    assert [mark.name for mark in speedups.rows()][:5] == re.findall(r"^\|.*gain:(\S+)", README, re.MULTILINE)[:5]
    drawn = PIL.Image.open(speedups.PICTURE).info["Description"]  # type: ignore[no-untyped-call]
    assert drawn == speedups.description(), "docs/speedups.png is out of date: python docs/speedups.py"
    assert "docs/speedups.png" in README


def test_the_versions_are_those_of_records() -> None:
    found: dict[str, set[str]] = {"torch": set(), "python": set(), "cuda": set(), "triton": set()}
    for path in (ROOT / "benchmarks" / "results").glob("h[12]00-*.jsonl"):
        for line in path.read_text().splitlines():
            versions = json.loads(line)["versions"]
            for name in found.keys() & versions.keys():
                found[name].add(".".join(versions[name].split(".")[:2]))
    (row,) = re.findall(r"^\| NVIDIA GPUs \|(.*)\|", README, re.MULTILINE)
    assert [{cell.strip()} for cell in row.split("|")][:4] == list(found.values())


def test_no_page_promises_more_than_records_show() -> None:
    for page in ("README.md", *PAGES):
        text = " ".join((ROOT / page).read_text().split())
        assert not re.search(r"\b(never|not|no) slower\b(?! and keeps the host)", text), page


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(BLOCKS)))
def test_every_other_block_runs_too(number: int, tmp_path: Path) -> None:
    _run_on_two_ranks(BLOCKS[number], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/embeddings.md", "docs/gemms.md", "docs/experts.md"])
def test_the_pages_of_operators_run_and_leave_traces(page: str, tmp_path: Path) -> None:
    snippets = PYTHON.findall((ROOT / page).read_text())
    (traced,) = (snippet for snippet in snippets if "write_trace" in snippet)
    _run_on_two_ranks(traced, tmp_path)  # a NoOverlapWarning depends on the machine's load
    assert {path.name for path in tmp_path.glob("*.json")} == {"rank0.json", "rank1.json"}
    for snippet in snippets:
        if snippet is not traced:
            _run_on_two_ranks(snippet, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tensor_parallel.md", "training_embeddings.md"])
def test_a_page_on_training_runs(page: str, tmp_path: Path) -> None:
    for snippet in PYTHON.findall((ROOT / "docs" / page).read_text()):
        _run_on_two_ranks(snippet, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_opens_with_its_problem_and_is_linked(page: str) -> None:
    title, opening, *_ = (p for p in (ROOT / page).read_text().split("\n\n") if not p.startswith("<!--"))
    assert title.strip().startswith("# ")
    is_prose = opening.strip()[0] not in "#|-`>" and opening.count(". ") + opening.count("? ") >= 1
    assert is_prose, "a paragraph first: the problem that the page solves, and how"
    assert not opening.startswith("For who")
    assert f"]({page})" in README


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", *PAGES])
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
