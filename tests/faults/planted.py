"""Plant faults in copies of the source tree, to test that the tests find them.

Each `*.patch` here is a plausible fault, and names the tests that must fail with it. A patch begins with a sentence
that says what is wrong, and a line `Found by: tests/...::test_...` for each test. A unified diff against the root of
the tree follows. A fault counts as found only if an assertion fails. A test that breaks in another way, such as by an
import error, might break with a correct change too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import weft._core

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".git", ".venv", "build", "dist", ".*_cache", ".hypothesis", "*.so")
ASSERTIONS = ("AssertionError", "Failed")  # Failed: raised by `pytest.fail`, and by `pytest.raises` without an error
ENDS = re.compile(r"^Found by: (\S.*)$", re.MULTILINE)

# Removes the import hooks of an editable install, which would find weft before PYTHONPATH does. Python imports it at
# its start, also in processes that tests start.
SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith(("_editable", "_weft_editable"))]
"""


@dataclass(frozen=True)
class Fault:
    patch: Path

    @property
    def name(self) -> str:
        return self.patch.stem

    @property
    def tests(self) -> list[str]:
        return ENDS.findall(self.patch.read_text())

    @property
    def changes(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(\S+)", self.patch.read_text(), re.MULTILINE)

    @property
    def sources(self) -> list[str]:
        return [path for path in self.changes if path.startswith("csrc/")]


def faults() -> list[Fault]:
    return [Fault(patch) for patch in sorted(Path(__file__).parent.glob("*.patch"))]


def copy_of_tree(tree: Path) -> Path:
    """Copy the source tree to `tree` with the built native module, so that Python finds weft in the copy."""
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
    native = Path(weft._core.__file__)
    shutil.copy(native, tree / "weft" / native.name)
    (tree / "sitecustomize.py").write_text(SITE)
    return tree


def linked_copy(whole: Path, tree: Path) -> Path:
    """Copy `whole` by hard links. This is safe, because git and Python replace files and do not change them in place."""
    shutil.copytree(whole, tree, copy_function=os.link)
    return tree


def plant(fault: Fault, tree: Path) -> None:
    """Apply the fault's patch to `tree`, and compile. Raise `ValueError` if the patch does not fit any more."""
    done = subprocess.run(["git", "apply", fault.patch], cwd=tree, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ValueError(f"{fault.patch.name} does not fit the tree any more, write it anew: {done.stderr}")
    compile_sources(fault, tree)


def compile_sources(fault: Fault, tree: Path) -> None:
    """Compile the native module of `tree` again if the fault is in csrc/."""
    if fault.sources:
        _compile(tree, fault.sources)


class Server:
    """A process of run.py, which runs tests in one copy of the tree after another."""

    def __enter__(self) -> Server:
        ours = ("PYTEST_", "PYTHONPATH")  # variables of the pytest that runs this test
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        command = [sys.executable, Path(__file__).with_name("run.py")]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()

    def run_tests(self, tree: Path, tests: list[str], timeout_s: float = 500) -> dict[str, str]:
        """Return, for each test of `tests` with its parameters, "passed" or the type of the error that ended it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(
            json.dumps({"tree": str(tree), "tests": tests, "timeout_s": timeout_s}), file=self.process.stdin, flush=True
        )
        assert self.process.stdout.readline(), "run.py has ended"
        said, printed = tree / "said.json", (tree / "said.txt").read_text()[-3000:]
        if not said.exists():
            raise RuntimeError(f"pytest did not end within {timeout_s} s:\n{printed}")
        ends: dict[str, str] = json.loads(said.read_text())
        for test in tests:
            if not any(_is_of(end, test) for end in ends):
                raise ValueError(f"there is no test {test}:\n{printed}")
        return ends


def ends_of(test: str, ends: dict[str, str]) -> list[str]:
    """Return how the test ended, for each of its parameters."""
    return [end for name, end in ends.items() if _is_of(name, test)]


def _is_of(name: str, test: str) -> bool:
    return name == test or name.startswith(f"{test}[")


def _compile(tree: Path, sources: list[str]) -> None:
    """Repeat the commands of the last `make build` for these sources, in `tree` instead of the root."""
    for folder in ROOT.glob("build/*/"):
        listed = subprocess.run(
            [sys.executable, "-m", "ninja", "-C", folder, "-t", "commands"], capture_output=True, text=True, timeout=60
        ).stdout.splitlines()
        if links := [line for line in listed if "-shared" in line and "_core" in line]:
            break
    else:
        raise FileNotFoundError(f"{ROOT}/build has no build of the native module: run `make build`")
    link = links[-1].removeprefix(": && ").removesuffix(" && :")
    for source in sources:
        (command,) = (line for line in listed if line.endswith(f"-c {ROOT / source}"))
        (old,) = re.findall(r" -o (\S+)", command)
        new = tree / "build" / Path(old).name
        new.parent.mkdir(exist_ok=True)
        _call(
            re.sub(r" -M[DTF]\b( (?!-)\S+)?", "", command)
            .replace(f"-o {old}", f"-o {new}")
            .replace(f"-c {ROOT / source}", f"-O1 -c {tree / source}"),  # -O1 is enough for tests
            folder,
        )
        link = link.replace(f" {old}", f" {new}")
    (library,) = re.findall(r" -o (\S+)", link)
    (tree / "weft" / library).unlink()  # a hard link, through which the linker would change the module of all copies
    _call(link.replace(f"-o {library}", f"-o {tree / 'weft' / library}"), folder)


def _call(command: str, folder: Path) -> None:
    done = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise ValueError(f"{command}\n{done.stderr}")
