"""Code that weft's commands share: parsing of shapes and files, checks before work starts, and exit status.

This module imports neither torch nor the packages of `weft[cli]`, except to count GPUs.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from weft.errors import WeftError
from weft.words import counted

T = TypeVar("T")
_SIZES = re.compile(r"(\d+)[,x](\d+)[,x](\d+)(-\S+)?")
_INTERRUPTED = 130  # the status that shells report after Ctrl-C


def sizes(text: str, also: str = "") -> tuple[int, int, int, str]:
    """Parse "M,N,K" or "MxNxK", with an optional suffix that starts with "-". Return (M, N, K, suffix).

    Raise `ValueError` for any other text. also: text to append to this error, such as the other values that the command
    accepts.
    """
    found = _SIZES.fullmatch(text.replace(" ", ""))
    if found is None:
        raise ValueError(
            f"--shape {text!r} must be three positive integers M,N,K, such as 16384,8192,4096 or 16384x8192x4096{also}"
        )
    m, n, k, suffix = found.groups()
    return int(m), int(n), int(k), suffix or ""


def check_file(option: str, path: Path) -> None:
    """Raise `ValueError` unless the file can be written. Create neither a file nor a folder.

    option: the command-line option that names the file, for the error text.
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.absolute().parent} does not exist: create it")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give a file")
    found = path.exists()
    if found and not path.is_file():
        return  # not a regular file: opening a pipe may block
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written ({error.strerror}): give another file") from error
    if not found:
        path.unlink(missing_ok=True)  # another rank may have removed it


def check_folder(option: str, path: Path) -> None:
    """Raise `ValueError` unless files can be written into the folder. A folder that can be created passes, but is not
    created.

    option: the command-line option that names the folder, for the error text.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} {path} is a file: give a folder")
    nearest = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    try:
        Path(tempfile.mkdtemp(dir=nearest)).rmdir()
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written ({nearest}: {error.strerror}): give another folder"
        ) from error


def check_pictures(path: Path) -> None:
    """Raise `ValueError` if matplotlib is not installed, or if files cannot be written into the folder."""
    check_folder("--pictures", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--pictures needs matplotlib: pip install 'weft[cli]'")


def number_of_ranks(given: int | None, device: str) -> int:
    """Return the number of ranks: as many as torchrun has started, else `given`, else one per GPU, or 2 on CPU.

    Raise `ValueError` for `device` "cuda" without a GPU, for more ranks than GPUs, or if `given` is set under torchrun.
    """
    import torch

    from weft import env

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and gpus == 0:
        raise ValueError("--device cuda, but torch sees no GPU: run `weft doctor` to see why, or use --device cpu")
    if env.under_torchrun():
        if given is not None:
            raise ValueError(f"ranks={given} conflicts with torchrun, which sets the number of ranks: do not pass it")
        env.rank()  # a wrong rank would wait for the others
        return env.world_size()
    if given is None:
        return gpus if device == "cuda" else 2
    if device == "cuda" and given > gpus:
        raise ValueError(
            f"--ranks {given}, but torch sees {counted(gpus, 'GPU')}: ranks that share a GPU give meaningless times. Use at "
            f"most {gpus}, or --device cpu"
        )
    return given


def given_once(options: Sequence[tuple[str, T]]) -> dict[str, T]:
    """Return the options as a dict. Raise `ValueError` for a name that occurs twice."""
    found = dict(options)
    for name in found:
        if (values := [value for one, value in options if one == name])[1:]:
            raise ValueError(
                f"option {name} is given {len(values)} times, as {values[0]} and {values[1]}: give it once"
            )
    return found


def appended(path: Path, count: int) -> str:
    """Return the message that `--json` appended `count` lines to `path`."""
    return f"appended {counted(count, 'JSON object')} to {path}"


def one_of(what: str, name: str, names: Sequence[str]) -> ValueError:
    """Return a ValueError that lists the known `names`, and suggests the nearest.

    what: the kind of `name`, such as "operator". name: the unknown name; empty if none was given.
    """
    found = f"no {what} {name!r}" if name else f"the {what} is missing"
    nearest = "".join(f" (did you mean {one}?)" for one in difflib.get_close_matches(name, names, 1))
    return ValueError(f"{found}{nearest}: give one of {', '.join(names)}")


@contextlib.contextmanager
def one_line(program: str) -> Iterator[None]:
    """Context manager: if the enclosed code fails, end the process with one line on stderr instead of a traceback.

    program: the name at the start of the line. Exit status: 2 for an invalid argument, path or file; 1 if weft failed
    at run time, or if the reader of stdout has closed the pipe; 130 after Ctrl-C. Other exceptions are bugs in weft and
    keep their traceback.
    """
    try:
        yield
    except BrokenPipeError:
        from weft.bench.core.console import (
            end_quietly,
        )  # imported late, because rich is slow to import and --help should be fast

        end_quietly()
    except KeyboardInterrupt:
        _end(program, "interrupted", _INTERRUPTED)
    except (WeftError, TimeoutError) as error:
        _end(program, error, 1)
    except (ValueError, OSError) as error:
        _end(program, error, 2)


def _end(program: str, why: object, status: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:  # a full disk: the rest cannot be flushed at exit either
        sys.stdout = None  # type: ignore[assignment]
    print(f"{program}: {str(why).strip() or type(why).__name__}", file=sys.stderr, flush=True)
    sys.exit(status)
