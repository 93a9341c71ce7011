"""The version of the code that made a record: the commit, and a hash of the source files on disk.

The commit is read from git. In a copy of the tree without `.git`, it is read from the file `benchmarks/.commit`. Write
this file before you copy the tree, for example to a GPU machine:

    python -m weft.bench.provenance    # in the checkout

The hash tells whether the files are unchanged since the commit. If not, the commit is recorded as "8f7985d0c1+dirty".
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import weft
from weft import reading

ROOT = Path(weft.__file__).parents[1]
NOTE = Path("benchmarks", ".commit")
FOLDERS = ("weft", "csrc")
SUFFIXES = (".py", ".pyi", ".toml", ".cpp", ".hpp")

COMMIT = re.compile(r"[0-9a-f]{7,40}(\+dirty)?|unknown")
"""The format of the commit in a record."""
SOURCE = re.compile(r"[0-9a-f]{16}")
"""The format of the hash."""


@dataclass(frozen=True)
class Provenance:
    commit: str
    source: str


def provenance(root: Path = ROOT) -> Provenance:
    """Return commit and hash of the code in `root`. The commit is "unknown" without git and without `benchmarks/.commit`."""
    source = source_hash(_lying(root))
    # Prefer `benchmarks/.commit` if it is for exactly these sources, even if git has an older commit checked out.
    note = _from_note(root)
    known = note if note is not None and note.source == source else _from_git(root) or note
    if known is None:
        return Provenance("unknown", source)
    return Provenance(known.commit if known.source == source else f"{known.commit}+dirty", source)


def write_note(root: Path = ROOT) -> Path:
    """Write the commit and the hash of its sources into `benchmarks/.commit`, and return the path of this file.

    Raise `ValueError` outside a git checkout.
    """
    known = _from_git(root)
    if known is None:
        raise ValueError(
            f"{root} is not a git checkout with a commit: write the note in a checkout, then copy the tree"
        )
    (root / NOTE).write_text(json.dumps(asdict(known)) + "\n")
    return root / NOTE


def source_hash(files: Iterable[tuple[str, bytes]]) -> str:
    """Return a hash of 16 hex digits over the source files among `files`. files: the files, as pairs (path, content), in any
    order.
    """
    found = hashlib.sha256()
    for path, content in sorted(files):
        if PurePosixPath(path).suffix in SUFFIXES:
            found.update(f"{path} {len(content)}\n".encode())
            found.update(content)
    return found.hexdigest()[:16]


def _lying(root: Path) -> Iterator[tuple[str, bytes]]:
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.suffix in SUFFIXES and path.is_file():
                yield path.relative_to(root).as_posix(), path.read_bytes()


def _from_git(root: Path) -> Provenance | None:
    """Return the checked-out commit and the hash of its sources; None if `root` is not the top folder of a checkout."""
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").decode().strip()).resolve() != root.resolve():
            return None
        commit = _git(root, "rev-parse", "--short=10", "HEAD").decode().strip()
        packed = _git(root, "archive", "--format=tar", "HEAD", *FOLDERS)
    except (OSError, subprocess.SubprocessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        files = [(member.name, tar.extractfile(member)) for member in tar if member.isfile()]
        return Provenance(commit, source_hash((name, file.read()) for name, file in files if file is not None))


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=30, check=True).stdout


def _from_note(root: Path) -> Provenance | None:
    try:
        found = reading.read_json(root / NOTE)
        return Provenance(str(found["commit"]), str(found["source"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{root / NOTE} cannot be read ({error!r}): run python -m weft.bench.provenance again"
        ) from error


def main() -> None:
    try:
        path = write_note()
    except ValueError as error:
        sys.exit(str(error))
    print(f"{path}: {path.read_text().strip()}; this tree: {provenance()}")


if __name__ == "__main__":
    main()
