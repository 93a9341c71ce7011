"""Files that are there whole or as they were before, also where a process is ended while it writes."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write beside `path`, then take its place. What is no plain file, such as a pipe or a link, is written where it is."""
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
