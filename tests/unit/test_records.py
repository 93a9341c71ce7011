"""Records contain the commit, the variables and the harness that made them, and the documents agree with the records."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from weft import env
from weft.bench import provenance
from weft.bench.core import records
from weft.bench.core.harness import HARNESS
from weft.bench.never_slower.judge import is_mine
from weft.bench.provenance import COMMIT, SOURCE, Provenance, source_hash, write_note

ROOT = Path(__file__).parents[2]
RESULTS = {path.stem: records.read([path]) for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))}
DOCUMENTS = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
BLOCKS = {
    found["name"]: found["body"]
    for text in DOCUMENTS.values()
    for found in re.finditer(r"<!-- results:(?P<name>[\w.-]+) -->\n(?P<body>.*?)<!-- /results -->", text, re.DOTALL)
}
STUDIES = {
    found["name"]: found["body"]
    for text in DOCUMENTS.values()
    for found in re.finditer(r"<!-- study:\w+ (?P<name>[\w.-]+) -->\n(?P<body>.*?)<!-- /study -->", text, re.DOTALL)
}
SIMULATED = {name: rows for name, rows in RESULTS.items() if rows[0]["device"] == "simulated"}
MEASURED = {name: rows for name, rows in RESULTS.items() if name not in SIMULATED}
DRAWN = {name for name, rows in MEASURED.items() if is_mine(rows[0])}
"""Records of `weft bench never-slower`, which have tables of their own."""


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_records_say_so(name: str) -> None:
    """The page must also give the number of assumed machine numbers."""
    last = RESULTS[name][-1]
    assert {(r["commit"], r["source"], *r["assumed"]) for r in RESULTS[name]} == {
        (last["commit"], last["source"], *last["assumed"])
    }
    assert COMMIT.fullmatch(last["commit"])
    assert SOURCE.fullmatch(last["source"])
    said = " ".join(STUDIES[name].split())
    assert f"commit {last['commit']}, {last['date'][:10]}. Nothing was measured" in said
    verb = "is" if last["assumed"][0] == 1 else "are"
    assert "{} of the {} numbers in the machine's file {} assumed".format(*last["assumed"], verb) in said


@pytest.mark.parametrize("name", MEASURED)
def test_every_record_says_what_it_is(name: str) -> None:
    for record in RESULTS[name]:
        assert COMMIT.fullmatch(record["commit"]), record.where
        assert 1 <= record["harness"] <= HARNESS, record.where
        # Earlier harnesses did not record these, so they are null; known values are in another field.
        if record["harness"] < 4:
            assert record["source"] is None, record.where
            assert record["variables"] is None, record.where
            assert record["device"] == "cpu" or record["variables_by_hand"], record.where
        else:
            assert SOURCE.fullmatch(record["source"]), record.where
            assert isinstance(record["variables"], dict), record.where
            assert "variables_by_hand" not in record, record.where


SHOWN = sorted(name for name in MEASURED.keys() - DRAWN if name in BLOCKS)


def test_the_document_shows_all_records_of_gpus_by_this_harness() -> None:
    hidden = MEASURED.keys() - DRAWN - set(SHOWN) - STUDIES.keys()
    assert all(
        record["harness"] < HARNESS and record["device"] == "cuda" for name in hidden for record in RESULTS[name]
    )


@pytest.mark.parametrize("name", SHOWN)
def test_the_document_says_what_its_records_say(name: str) -> None:
    rows, text = RESULTS[name], BLOCKS[name]
    for record in rows:
        assert f"commit {record['commit']} (" in text
        assert f"harness {record['harness']}" in text
    assert ("hash of sources not recorded" in text) == any(r["source"] is None for r in rows)
    tables = {(r["dtype"], r["mode"]) for r in rows if r["variant"] == "asynctp"}
    assert len(re.findall(r"^asynctp.*\bNVLink multicast\b", text, re.MULTILINE)) == len(tables)
    assert all(r["p50_ms"] >= 1 for r in rows if r["device"] == "cpu"), "shorter ones are noise on CPU"


def test_the_command_of_every_record_is_known() -> None:
    told = (ROOT / "benchmarks" / "README.md").read_text()
    missing = [
        path.name for path in sorted((ROOT / "benchmarks" / "results").iterdir()) if f"`{path.name}`" not in told
    ]
    assert not missing, "add a line with its command to benchmarks/README.md"


def test_every_harness_is_explained() -> None:
    explained = re.findall(r"^\| (\d+) \|", (ROOT / "benchmarks" / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number in explained] == list(range(1, HARNESS + 1))


def test_the_hash_is_of_sources_and_their_places() -> None:
    files = [("weft/a.py", b"x = 1\n"), ("csrc/b.cpp", b"int b;\n")]
    assert SOURCE.fullmatch(source_hash(files))
    assert (
        source_hash(files)
        == source_hash(files[::-1])
        == source_hash([*files, ("weft/c.so", b"\0"), ("weft/py.typed", b"")])
    )
    others = [
        files[:1],
        [("weft/a.py", b"x = 2\n"), files[1]],
        [("weft/d.py", b"x = 1\n"), files[1]],
        [("weft/a.py", b"x = 1\nint b;\n"), ("csrc/b.cpp", b"")],
    ]
    assert len({source_hash(found) for found in [files, *others]}) == 5


def _git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
    found = subprocess.run(["git", "-C", str(root), *who, *arguments], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a repository with one commit of one source file."""
    root = tmp_path / "checkout"
    for folder in ("weft", "csrc", "benchmarks"):
        (root / folder).mkdir(parents=True)
    (root / "weft" / "a.py").write_text("x = 1\n")
    (root / "csrc" / "b.cpp").write_text("int b;\n")
    (root / "benchmarks" / "results.txt").write_text("")
    _git(root, "init", "-q")
    _git(root, "add", ".")
    _git(root, "commit", "-qm", "first")
    return root


def test_the_commit_is_known_with_git_and_a_change_of_sources_is_told(checkout: Path) -> None:
    commit = _git(checkout, "rev-parse", "--short=10", "HEAD")
    clean = provenance.provenance(checkout)
    assert clean.commit == commit
    (checkout / "benchmarks" / "results.txt").write_text("a record of this run")
    assert provenance.provenance(checkout) == clean, "what is measured changes no source"
    (checkout / "weft" / "new.py").write_text("")
    dirty = provenance.provenance(checkout)
    assert dirty.commit == f"{commit}+dirty"
    assert dirty.source != clean.source


def test_a_copy_without_git_knows_its_commit_by_the_note(checkout: Path, tmp_path: Path) -> None:
    clean = provenance.provenance(checkout)
    (checkout / "weft" / "a.py").write_text("x = 2\n")
    assert write_note(checkout).name == ".commit"
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    assert provenance.provenance(copy).commit == f"{clean.commit}+dirty", "changed before it was copied"
    (copy / "weft" / "a.py").write_text("x = 1\n")
    assert provenance.provenance(copy) == clean
    with pytest.raises(ValueError, match="is not a git checkout with a commit"):
        write_note(copy)
    (copy / provenance.NOTE).write_text("8f7985d")
    with pytest.raises(ValueError, match=r"\.commit cannot be read"):
        provenance.provenance(copy)
    (copy / provenance.NOTE).unlink()
    assert provenance.provenance(copy) == Provenance("unknown", clean.source)


def test_a_checkout_around_an_installed_copy_is_another_ones(checkout: Path) -> None:
    inside = checkout / "site-packages"
    shutil.copytree(checkout / "weft", inside / "weft")
    assert provenance.provenance(inside).commit == "unknown"


def test_variables_of_peers_are_recorded_and_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/somebody/topology.xml")
    monkeypatch.setenv("HOME_OF_SOMEBODY", "no business of a record")
    found = env.peer_variables()
    assert found["NCCL_NVLS_ENABLE"] == "0"
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert found["NCCL_TOPO_FILE"] == "(a path)"
    assert "HOME_OF_SOMEBODY" not in found
    assert list(found) == sorted(found)


def test_what_is_recorded_now() -> None:
    found = json.loads(json.dumps(records.environment("cpu")))
    assert COMMIT.fullmatch(found["commit"])
    assert SOURCE.fullmatch(found["source"])
    assert found["harness"] == HARNESS
    assert isinstance(found["variables"], dict)
