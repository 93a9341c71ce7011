"""JSON files of measured numbers in `weft.env.cache_dir()`. Files are replaced atomically, so readers never see a
partial file.
"""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from weft import env, reading
from weft.caller import warn_once
from weft.errors import UnreadableError
from weft.files import write_whole
from weft.words import kind

FIX = "delete it, and measure again"
TIMES = "microseconds must be between 1e-6 and 1e12"


def path_of(what: str, *names: object) -> Path:
    """Return the path of a file of measured numbers, such as cache_dir/calibration-nvidia-h200-2.json.

    what: the kind of numbers, such as "calibration".
    names: the rest of the file name.
    """
    return env.cache_dir() / f"{_stem(what, *names)}.json"


def _stem(*names: object) -> str:
    return "-".join(re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-") for name in names)


def ranks_of(what: str, machine: str) -> list[int]:
    """Return the numbers of ranks for which a file exists. what: the kind of numbers, such as "calibration"."""
    name = re.compile(rf"{_stem(what, machine)}-([1-9]\d{{0,5}})\.json")
    try:
        with os.scandir(env.cache_dir()) as files:
            return sorted(int(found[1]) for file in files if (found := name.fullmatch(file.name)))
    except OSError:
        return []


def any_of(what: str) -> bool:
    """True if a file of the kind `what` exists, for any machine."""
    try:
        folder = os.fspath(env.cache_dir())
        return what in _kinds_in(folder, os.stat(folder).st_mtime_ns)
    except OSError:
        return False


@lru_cache(maxsize=4)
def _kinds_in(folder: str, changed_ns: int) -> frozenset[str]:
    """Return the kinds of the files in `folder`: the first word of each name, such as "calibration".

    changed_ns: the folder's modification time. The results of this function are cached by its arguments, so a folder with
        new files is read again.
    """
    with os.scandir(folder) as files:
        return frozenset(file.name.partition("-")[0] for file in files)


def keep(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`. If that fails, warn once."""
    try:
        write(path, content)
    except OSError as error:
        warn_once(
            f"measured times cannot be saved in {path.parent} ({error.strerror or error}), so each process measures "
            "again: set WEFT_CACHE_DIR to a writable folder"
        )


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        path.unlink(missing_ok=True)  # if it is a named pipe, writing would block until there is a reader
    write_whole(path, json.dumps(content, indent=1) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """Return the content of the file; None if there is no file. Raise `UnreadableError` if it is not a JSON object."""
    try:
        content = reading.read_json(path, fix=FIX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(content, dict):
        raise UnreadableError(f"{path} contains {kind(content)}, not a JSON object; {FIX}")
    return content


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def is_positive(found: object) -> bool:
    """True if `found` is a number from 1e-6 to 1e12: a plausible value of a measured time or rate."""
    return type(found) in (int, float) and 1e-6 <= cast(float, found) <= 1e12


def differences(then: dict[str, str], now: dict[str, str]) -> str:
    """Return a text of the versions that differ, such as "torch 2.11.0, now 2.13.0"; "" if none differ."""
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return ", ".join(f"{name} {then.get(name, 'missing')}, now {now.get(name, 'missing')}" for name in names)
