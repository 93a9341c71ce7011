"""Imports point down, without cycles, and the check finds planted violations. At run time weft needs only torch and
numpy.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.slow import slow

ROOT = Path(__file__).parents[2]


# An editable install finds weft before the working directory does.
LINT = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
sys.path.insert(0, "")
from importlinter.cli import lint_imports_command
lint_imports_command(["--no-cache"])
"""


def _lint(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True, timeout=300)


def test_an_import_upwards_an_unknown_layer_and_a_cycle_are_found(tmp_path: Path) -> None:
    pytest.importorskip("importlinter", reason="import-linter is not installed: pip install -e '.[dev]'")
    shutil.copytree(ROOT / "weft", tmp_path / "weft", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    kept = _lint(tmp_path)
    assert kept.returncode == 0, kept.stdout
    with (tmp_path / "weft" / "embedding" / "hashing.py").open("a") as file:
        file.write("from weft import symm\n")
    (tmp_path / "weft" / "elsewhere.py").write_text("")
    (tmp_path / "weft" / "embedding" / "one.py").write_text("from weft.embedding.two import b\n")
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from weft.embedding.one import a\n"
    (tmp_path / "weft" / "embedding" / "two.py").write_text(typed)
    broken = _lint(tmp_path)
    assert broken.returncode != 0
    assert "weft.embedding.hashing -> weft.symm" in broken.stdout
    assert "weft.elsewhere" in broken.stdout
    assert "No cycles are allowed in weft.embedding" in broken.stdout


def test_no_package_is_imported_by_what_it_imports() -> None:
    """The linter finds cycles between the modules of a package, but does not check the package's `__init__`."""
    grimp = pytest.importorskip("grimp", reason="grimp is not installed: pip install -e '.[dev]'")
    graph = grimp.build_graph("weft", cache_dir=None)
    importers = [
        (p, m) for p in graph.modules if graph.find_children(p) for m in graph.find_modules_that_directly_import(p)
    ]
    assert len(importers) > 50
    assert [(p, m) for p, m in importers if graph.chain_exists(importer=p, imported=m)] == []


def _run(script: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


def test_import_weft_loads_neither_torch_nor_numpy() -> None:
    found = _run(
        "import sys, weft; dir(weft); weft.errors, weft.timeline\n"
        "print([name for name in ('torch', 'numpy', 'triton', 'weft._core') if name in sys.modules])\n"
        "weft.builders, weft.schedule, weft.hw, weft.sim, weft.plan, weft.trace\n"
        "print('torch' in sys.modules)\n"
    )
    assert found.stdout == "[]\nFalse\n", found.stderr


@pytest.mark.parametrize("missing", ["typer", slow("rich")])
def test_without_its_packages_the_command_says_what_to_install(missing: str) -> None:
    found = _run(
        f"import sys; sys.modules[{missing!r}] = None; from weft.cli import main; sys.argv = ['weft', 'doctor']; main()"
    )
    assert found.returncode == 1
    assert found.stderr == f"weft: the command needs {missing}: pip install 'weft[cli]'\n"


def test_without_matplotlib_a_picture_says_what_to_install() -> None:
    found = _run(
        "import sys; sys.modules['matplotlib'] = None; import weft; from pathlib import Path; line = weft.Timeline()\n"
        "line.add(0, 'compute', 'matmul', 0, 1); weft.trace.draw_overlap(Path('x.png'), {'': line}, '')"
    )
    assert found.stderr.endswith("ModuleNotFoundError: pictures need matplotlib: pip install 'weft[cli]'\n")


def test_the_library_needs_neither_triton_nor_what_the_command_line_needs() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, weft\n"
        "tables = [weft.EmbeddingBagConfig(4, 2, 't', ('f',))]\n"
        "print(weft.embedding_pool([torch.ones(4, 2)], (torch.tensor([1, 3]), torch.tensor([0, 2])), tables).tolist())\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('matplotlib', 'typer', 'rich')]\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "[[2.0, 2.0]]\n"
