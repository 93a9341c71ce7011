"""The only reader of JSON and TOML files. Files may come from other users, so the reader enforces limits.

    files      regular files only: a pipe or a device is refused immediately, without waiting for it
    size       bytes, nesting and number of values are checked before parsing
    numbers    must be finite, and integers within 64 bits

Bad files raise `UnreadableError`. Missing files raise `FileNotFoundError` or `NotADirectoryError`. The caller checks
the meaning of values.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tomllib
from itertools import accumulate
from pathlib import Path
from typing import Any

from weft.errors import UnreadableError

MOST_JSON_BYTES = 64 << 20
MOST_TOML_BYTES = 256 << 10  # parsing time can be quadratic; weft's longest file has 12 KB
MOST_DEPTH = 64
MOST_VALUES = 1 << 21

# Each pattern matches at every quote, closed or not, and is possessive (no backtracking), so a scan takes linear time.
_JSON_TEXT = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)
_TOML_TEXT = re.compile(
    r'#[^\n]*+|"""(?:[^"\\]++|\\.?|"(?!""))*+(?:""")?|' + r"'''(?:[^']++|'(?!''))*+(?:''')?|"
    r'"(?:[^"\\\n]++|\\.?)*+"?|' + r"'[^'\n]*+'?",
    re.DOTALL,
)
_NO_BRACKETS, _NO_MARKS, _DOTS = re.compile(r"[^\[\]{}]++"), re.compile(r"[^\[\]{}.,=\n]++"), re.compile(r"\.++")
_DEEPER = {"[": 1, "{": 1, "]": -1, "}": -1}
_MOST = {int: 2**63 - 1, float: sys.float_info.max}
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def read_json(path: Path, *, fix: str = "") -> Any:
    """Return the value in a JSON file. fix: advice for the user if the file is unreadable, for the error text."""
    return parse_json(read_bytes(path, MOST_JSON_BYTES, fix=fix), str(path), fix=fix)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file."""
    return parse_toml(read_bytes(path, MOST_TOML_BYTES), str(path))


def read_bytes(path: Path, most_bytes: int, *, fix: str = "") -> bytes:
    """Return the content of a regular file with at most `most_bytes` bytes. fix: advice for the user, for the error
    text.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise _unreadable(str(path), f"it is {_KINDS[stat.S_IFMT(mode)]}, not a regular file", fix)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(most_bytes + 1)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise _unreadable(str(path), error.strerror or repr(error), fix) from error
    if len(content) > most_bytes:
        raise _unreadable(str(path), f"it has more than {most_bytes} bytes", fix)
    return content


def parse_json(content: str | bytes, where: str, *, fix: str = "") -> Any:
    """Return the value of a JSON text.

    where: the name of the text's file or sender. fix: advice for the user. Both are for the error text.
    """
    text = _text(content, MOST_JSON_BYTES, where, fix)
    if (count := text.count(",") + text.count("[") + text.count("{")) > MOST_VALUES:  # strings count too
        raise _unreadable(where, f"it has {count} values, and at most {MOST_VALUES} are allowed", fix)
    _check_depth(_depth(_JSON_TEXT.sub("", text)), where, fix)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, str(error), fix) from error
    _check_values(found, where, fix)
    return found


def parse_toml(content: str | bytes, where: str) -> dict[str, Any]:
    """Return the table of a TOML text.

    where: the name of the text's file or sender, for the error text.
    """
    text = _text(content, MOST_TOML_BYTES, where, "")
    rest = _NO_MARKS.sub("", _TOML_TEXT.sub("", text))
    dots = max(map(len, _DOTS.findall(rest)), default=0)  # a dotted key nests as deep as it has parts
    _check_depth(_depth(rest) + dots, where, "")
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, f"it is not valid TOML: {error}", "") from error
    _check_values(found, where, "")
    return found


def _text(content: str | bytes, most_bytes: int, where: str, fix: str) -> str:
    if len(content) > most_bytes:
        raise _unreadable(where, f"it has more than {most_bytes} bytes", fix)
    try:
        return content if isinstance(content, str) else content.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(where, f"it is not valid UTF-8: {error}", fix) from error


def _depth(rest: str) -> int:
    """Return the depth of nested brackets in a JSON or TOML text from which the string literals have been removed."""
    return max(accumulate(map(_DEEPER.__getitem__, _NO_BRACKETS.sub("", rest))), default=0)


def _check_depth(depth: int, where: str, fix: str) -> None:
    if depth > MOST_DEPTH:
        raise _unreadable(where, f"it is nested {depth} deep, and at most {MOST_DEPTH} are allowed", fix)


def _check_values(found: Any, where: str, fix: str) -> None:
    """Raise `UnreadableError` for numbers beyond the limits, and for TOML keys with too many dotted parts."""
    left: list[tuple[Any, tuple[str | int, ...]]] = [([found], ())]
    while left:
        item, path = left.pop()
        _check_depth(len(path), where, fix)
        for key, part in item.items() if isinstance(item, dict) else enumerate(item):
            kind = type(part)
            if kind is dict or kind is list:
                left.append((part, (*path, key)))
            elif kind in _MOST and not -_MOST[kind] <= part <= _MOST[kind]:
                place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in (*path, key)[1:])
                number = f"an integer of {part.bit_length()} bits" if kind is int else str(part)
                raise _unreadable(
                    where,
                    f"{place.lstrip('.') or 'it'} is {number}: numbers must be finite, and integers within 64 bits",
                    fix,
                )


def _unreadable(where: str, why: str, fix: str) -> UnreadableError:
    return UnreadableError(f"{where} cannot be read: {why}{fix and f'; {fix}'}")
