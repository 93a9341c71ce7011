"""File writes that leave no partial file behind if the process is killed, and files with one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Replace the file `path` by a file with `text`, in one step: write a new file and rename it. If `path` is a pipe,
    a link or a device, write to it directly.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with _named(path):
            path.write_text(text)
        return
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with _named(path):
            part.write_text(text)
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def require_no_others(folder: Path, pattern: str, names: Collection[str]) -> None:
    """Raise `ValueError` if `folder` has files that match `pattern` and whose names are not among `names`.

    Call this function before you write a trace with one file for each rank. Otherwise files of an older trace would
    remain in the folder, and readers would count them as further ranks.
    """
    others = sorted(path.name for path in folder.glob(pattern) if path.name not in names)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ValueError(
            f"{folder} has files of another trace ({others[0]}{more}): remove them, or give another folder"
        )


def append_json(path: Path, objects: Iterable[Any]) -> None:
    """Append each object to the file as a line of JSON, all in one write. If the file does not end with a newline,
    write one first.
    """
    lines = "".join(json.dumps(one, allow_nan=False) + "\n" for one in objects)
    with _named(path), path.open("ab") as file:
        file.write(("\n" * _cut_off(path) + lines).encode())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Context manager: add the file's name to an error of a write, such as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _cut_off(path: Path) -> bool:
    """True if the file is cut off: its last line does not end with a newline."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
