"""What a command is to write, tried before anything else is done."""

from __future__ import annotations

from pathlib import Path


def check_writable(option: str, path: Path) -> None:
    """`ValueError` for a file that cannot be written. Makes no folder, and leaves no file where there was none."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder, and a file is wanted")
    found = path.exists()
    if found and not path.is_file():
        return  # a pipe or a terminal: to open it may be to wait
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be written: {error.strerror}") from error
    if not found:
        path.unlink(missing_ok=True)  # under torchrun other ranks try too
