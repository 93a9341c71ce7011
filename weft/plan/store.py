"""Measured numbers on disk: JSON files under `weft.env.cache_dir()`, each written whole, so that a reader never sees half."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from weft import env
from weft.caller import warn
from weft.files import write_whole

_warned = False


def path_of(kind: str, *names: object) -> Path:
    """The file of what `names` name, such as cache_dir/calibration-nvidia-h200-2.json."""
    words = [re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-") for name in (kind, *names)]
    return env.cache_dir() / f"{'-'.join(words)}.json"


def any_of(kind: str) -> bool:
    """Whether there is a file of this kind."""
    try:
        with os.scandir(env.cache_dir()) as files:
            return any(file.name.startswith(f"{kind}-") for file in files)
    except OSError:
        return False


def keep(path: Path, content: dict[str, Any]) -> None:
    """`write`, where that is possible; a warning, once, where it is not."""
    global _warned
    try:
        write(path, content)
    except OSError as error:
        if not _warned:
            warn(
                f"measured times cannot be kept in {path.parent} ({error}), and are measured anew in each process: set "
                f"WEFT_CACHE_DIR to a folder that can be written"
            )
        _warned = True


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """What was written; None without a file that can be read. `ValueError` if it is none of ours."""
    try:
        content = json.loads(path.read_text())
    except OSError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it, and measure again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}: delete it, and measure again")
    return content


def differences(then: dict[str, str], now: dict[str, str]) -> str:
    """Which versions are not the same, as "torch 2.11.0, now 2.13.0"; empty if none."""
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return ", ".join(f"{name} {then.get(name, 'missing')}, now {now.get(name, 'missing')}" for name in names)
