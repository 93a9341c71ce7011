"""A wheel is self-contained: it can be built, and works with only torch and numpy installed.

`pip wheel` builds this tree in a copy of its build folder, and compiles only files that have changed since the last
build. The wheel is installed into a new environment, which has only torch, numpy and their dependencies from this
environment. Nothing is downloaded.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

EXAMPLE = """
import importlib.util
import torch, torch.distributed as dist
import weft, weft._core
from weft.launch import run_ranks

def on_a_rank(rank, world):
    torch.manual_seed(0)
    xs, w = torch.randn(world, 8, 16), torch.randn(16, 4)
    _, (y,) = weft.all_gather_matmul(xs[rank], [w], 0, dist.group.WORLD, return_A=False)
    return torch.allclose(y, xs.flatten(0, 1) @ w, atol=1e-5)

if __name__ == "__main__":
    assert not [name for name in ("typer", "rich", "matplotlib", "pytest", "nanobind") if importlib.util.find_spec(name)]
    print(run_ranks(2, on_a_rank), weft.__file__)
"""


def pip(*arguments: str | Path, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("pip", "scikit_build_core", "nanobind"):
        pytest.importorskip(tool, reason=f"{tool} is not installed, so no wheel can be built here: make setup")
    folder = tmp_path_factory.mktemp("wheel")
    for cache in ROOT.glob("build/*/CMakeCache.txt"):  # without a build folder, everything is compiled
        shutil.copytree(cache.parent, folder / "build")
        # CMake refuses a cache of another folder.
        moved = cache.read_text().replace(str(cache.parent), str(folder / "build"))
        (folder / "build" / cache.name).write_text(moved)
        break
    options = ("--no-index", "--no-deps", "--no-build-isolation", "-C", f"build-dir={folder / 'build'}")
    pip("wheel", ROOT, *options, "-w", folder / "dist", cwd=folder)
    (built,) = (folder / "dist").iterdir()
    return built


def _needed(*names: str) -> Iterator[importlib.metadata.Distribution]:
    """Return these distributions and all their dependencies, without extras."""
    wanted, seen = list(names), set()
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        yield found
        requirements = [Requirement(text) for text in found.requires or ()]
        wanted += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheel, torch and numpy."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in _needed("torch", "numpy"):
        files = distribution.files or ()
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))  # type: ignore[arg-type]
    # Without --no-deps, pip fails if the wheel requires more than the installed packages.
    pip("--python", folder / "bin" / "python", "install", "--no-index", wheel, cwd=folder)
    return folder / "bin" / "python"


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(
            archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA")))
        )


@pytest.mark.slow
def test_the_wheel_has_what_it_needs_and_says_so(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"weft/py.typed", "weft/_core.pyi", "weft/hw/h200.toml"} <= names
    assert any(re.fullmatch(r"weft/_core\..*so", name) for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]
    about = _metadata(wheel)
    required = [r for r in map(Requirement, about.get_all("Requires-Dist") or ()) if r.marker is None]
    assert {r.name for r in required} == {"torch", "numpy"}
    assert "cli" in (about.get_all("Provides-Extra") or ())
    assert "Typing :: Typed" in (about.get_all("Classifier") or ())
    assert {text.split(", ")[0] for text in about.get_all("Project-URL") or ()} >= {"Repository", "Changelog"}


@pytest.mark.slow
def test_it_runs_with_torch_and_numpy_alone(python: Path, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLE)
    # -E: a PYTHONPATH would precede the wheel
    done = subprocess.run([python, "-E", "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results, _, where = done.stdout.strip().rpartition(" ")
    assert results == "[True, True]"
    assert Path(where).is_relative_to(python.parents[1]), "the wheel's, not this tree's"


@pytest.mark.slow
def test_its_command_says_in_one_line_what_to_install(python: Path, tmp_path: Path) -> None:
    done = subprocess.run([python.parent / "weft", "doctor"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "weft: the command needs typer: pip install 'weft[cli]'\n"
