"""Atomic file writes, and files with one JSON object per line.

A file is complete even if the process is killed during the write.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a new file and rename it to `path`. If `path` is not a regular file, such as a pipe or a link,
    write to it directly.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text)
        return
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        part.write_text(text)
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def require_no_others(folder: Path, pattern: str, names: Collection[str]) -> None:
    """Raise `ValueError` if `folder` has files that match `pattern` and are not in `names`.

    Call this function before you write a trace with a file for each rank. Programs that read the folder would take
    files of an old trace for ranks of the new trace.
    """
    others = sorted(path.name for path in folder.glob(pattern) if path.name not in names)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ValueError(
            f"{folder} has files of another trace ({others[0]}{more}): remove them, or give another folder"
        )


def append_json(path: Path, objects: Iterable[Any]) -> None:
    """Append one line of JSON per object, in one write. If the last line of the file lacks its newline, add it first."""
    lines = "".join(json.dumps(one, allow_nan=False) + "\n" for one in objects)
    with path.open("ab") as file:
        file.write(("\n" * _cut_off(path) + lines).encode())


def _cut_off(path: Path) -> bool:
    """True if the last line lacks its newline."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
