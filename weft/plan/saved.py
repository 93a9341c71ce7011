"""Load dataclasses of measured numbers from JSON files, with a check of each field."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from weft.errors import UnreadableError
from weft.plan import store
from weft.plan.machine import versions
from weft.words import counted

Check = Callable[[Any], bool]
"""A function that returns True if a JSON value is valid for a field."""
_MOST_WHOLE = 1 << 50


S = TypeVar("S")


def load(
    kind: Callable[..., S], what: str, machine: str, world_size: int, checks: Mapping[str, Check], fix: str
) -> S | None:
    """Return the object of class `kind` that was saved for this machine and number of ranks; None if there is no file.

    what: the kind of file, such as "calibration", for the file's name and error texts.
    checks: {name of a field: function that returns True if a value is valid for the field}.
    fix: the advice at the end of error texts.

    Raise `UnreadableError` if the file is broken or belongs to another machine, and `ValueError` if other versions are
    installed now.
    """
    path = store.path_of(what, machine, world_size)
    content = store.read(path)
    if content is None:
        return None
    for name, check in checks.items():
        if name not in content:
            raise UnreadableError(f"{path} lacks {name!r}: {fix}")
        if not check(content[name]):
            raise UnreadableError(f"{path}: {name} has a wrong type or size for a {what}: {fix}")
    if (content["machine"], content["world_size"]) != (machine, world_size):
        theirs = f"{content['machine']} with {counted(content['world_size'], 'rank')}"
        raise UnreadableError(f"{path} is for {theirs}, not for {machine} with {counted(world_size, 'rank')}: {fix}")
    if changed := store.differences(content["versions"], versions()):
        raise ValueError(
            f"the {what} of {machine} for {counted(world_size, 'rank')} ({path}) was made with {changed}: {fix}"
        )
    return kind(**{name: _frozen(content[name]) for name in checks})


def is_text(found: Any) -> bool:
    return isinstance(found, str)


def is_whole(found: Any) -> bool:
    return type(found) is int and 1 <= found <= _MOST_WHOLE


def is_time_or_0(found: Any) -> bool:
    return store.is_positive(found) or (type(found) in (int, float) and found == 0)


def are_versions(found: Any) -> bool:
    return isinstance(found, dict) and all(map(is_text, found.values()))


def one_of(names: Collection[str]) -> Check:
    return lambda found: isinstance(found, str) and found in names


def none_or(check: Check) -> Check:
    return lambda found: found is None or check(found)


def rows_of(*cells: Check) -> Check:
    """Return a check for a list of rows, in which element i of each row must pass `cells[i]`."""

    def check(found: Any) -> bool:
        return isinstance(found, list) and all(
            isinstance(row, list)
            and len(row) == len(cells)
            and all(is_it(cell) for is_it, cell in zip(cells, row, strict=True))
            for row in found
        )

    return check


def _frozen(content: Any) -> Any:
    return tuple(map(_frozen, content)) if isinstance(content, list) else content
