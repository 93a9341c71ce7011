"""Commits that documents and records name are in the history, so that a reader can check them out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
RECORDS = [path for path in sorted((ROOT / "benchmarks").rglob("*.json*")) if path.suffix in (".json", ".jsonl")]
_IN_TEXT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,12}\b")
_IN_RECORD = re.compile(r'"commit": ?"([0-9a-f]{7,40})(?:\+dirty)?"')


@pytest.fixture(scope="module")
def history() -> list[str]:
    """The hashes of all commits up to the checked-out commit."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != ROOT.resolve():
            pytest.skip("this tree is a copy without its git history")
        if git("rev-parse", "--is-shallow-repository").strip() == "true":
            pytest.skip("this is a shallow clone: run git fetch --unshallow")
        return sorted(git("rev-list", "HEAD").split())
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"there is no git history: {error}")


def missing(commits: set[str], history: list[str]) -> set[str]:
    known = {size: {one[:size] for one in history} for size in {len(commit) for commit in commits}}
    return {commit for commit in commits if commit not in known[len(commit)]}


def rebased() -> set[str]:
    """Return the commits of records that a rebase has replaced, according to the last table of benchmarks/README.md."""
    table = (ROOT / "benchmarks" / "README.md").read_text().partition("| commit of the records |")[2]
    return set(re.findall(r"^\| ([0-9a-f]{10}) \|", table, re.MULTILINE))


def test_commits_in_documents_exist(history: list[str]) -> None:
    named = {(page.relative_to(ROOT).as_posix(), one) for page in PAGES for one in _IN_TEXT.findall(page.read_text())}
    assert len(named) > 20
    lost = {
        one for one in missing({one for _, one in named}, history) if not any(old.startswith(one) for old in rebased())
    }
    assert not {(page, one) for page, one in named if one in lost}


def test_commits_of_records_exist(history: list[str]) -> None:
    named = {one for path in RECORDS for one in _IN_RECORD.findall(path.read_text())}
    assert len(named) > 20
    assert missing(named, history) == rebased()
