"""Schedules as JSON (`to_json`, `from_json`).

    {"weft_schedule": 1, "name": ..., "world_size": ..., "buffers": [...], "signals": [...], "lanes": [...]}

Buffers, signals, lanes and steps are objects with the fields of their dataclasses. A step also has a field "step" with its kind,
and a tile kernel has a field "kernel" with its kind. An expression is a string. `from_json` refuses unknown fields and values, so
that no part of a file is ignored.
"""

from __future__ import annotations

import hashlib
import json
import typing
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any

from weft.errors import UnreadableError
from weft.reading import parse_json
from weft.schedule.expr import Expr, Index
from weft.schedule.kernels import KERNELS, TileKernel
from weft.schedule.limits import MOST_STEPS, check_number, check_sizes
from weft.schedule.printing import describe
from weft.schedule.schedule import Schedule
from weft.schedule.steps import ITEM_BYTES, KINDS, OPS, Buffer, Compute, Step
from weft.schedule.steps.base import values_of

__all__ = ["describe", "from_json", "to_json"]

VERSION = 1
_TAGGED: dict[type, tuple[str, dict[str, Any]]] = {Step: ("step", KINDS), TileKernel: ("kernel", KERNELS)}
_KNOWN: dict[tuple[type, str], Collection[str]] = {(Compute, "op"): OPS, (Buffer, "dtype"): ITEM_BYTES}


def to_json(schedule: Schedule) -> str:
    return json.dumps({"weft_schedule": VERSION, **_plain(schedule)}, indent=1)


def fingerprint(schedule: Schedule) -> str:
    """Return a hash of the schedule. Ranks compare the hashes to check that their schedules are equal."""
    # `to_json` is slower: its `indent` makes json use Python code in place of C.
    return hashlib.sha256(json.dumps(schedule, default=_values).encode()).hexdigest()


def _values(item: Any) -> Any:
    """Return a list for an object that json cannot write: its kind, then the value of each field."""
    if isinstance(item, Expr):
        return {"": item.text}
    return {getattr(item, "kind", type(item).__name__): values_of(item)}


def from_json(text: str) -> Schedule:
    """Return the schedule that `to_json` wrote as `text`.

    Raise `UnreadableError` if `text` exceeds the limits of `weft.reading`. Raise `ValueError` if `text` is not a
    schedule, or exceeds `weft.schedule.limits`. To find hangs and races, call `weft.schedule.verify`.
    """
    if (steps := text.count('"step"')) > MOST_STEPS:  # checked before parsing, because parsing many steps is slow
        raise UnreadableError(f"schedule has {steps} steps, and at most {MOST_STEPS} are allowed: use loops")
    found = parse_json(text, "schedule")
    version = found.pop("weft_schedule", None) if isinstance(found, dict) else None
    if version != VERSION:
        raise UnreadableError(
            f"the schedule cannot be read: its format version weft_schedule is {version!r}, but must be {VERSION}"
        )
    schedule: Schedule = _read(Schedule, found, "schedule")
    check_sizes(schedule)
    return schedule


def _plain(item: Any) -> Any:
    """Return `item` as lists, dicts, strings and numbers, which json can write."""
    if type(item) in (int, str):  # the most frequent types
        return item
    if isinstance(item, Expr):
        return item.text
    if isinstance(item, tuple):
        return [_plain(part) for part in item]
    if is_dataclass(item):
        tag: dict[str, Any] = {"step": item.kind} if isinstance(item, Step) else {}
        tag |= {"kernel": item.kind} if isinstance(item, TileKernel) else {}
        return tag | {f.name: _plain(getattr(item, f.name)) for f in fields(item)}
    return item


def _read(kind: Any, found: Any, where: str) -> Any:
    """Convert the parsed JSON value `found` to the type `kind`.

    where: the place of the value in the file, for error texts.
    """
    if kind in _TAGGED:
        _expect(dict, found, where)
        word, known = _TAGGED[kind]
        return _read(known[_one_of(known, found.pop(word, None), where)], found, where)
    if kind == Index:
        kind = Expr if isinstance(found, str) else int
    if kind is Expr:
        return _expression(found)
    if type(None) in typing.get_args(kind):
        (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
        return None if found is None else _read(kind, found, where)
    if typing.get_origin(kind) is typing.Literal:
        return _one_of(typing.get_args(kind), found, where)
    if typing.get_origin(kind) is tuple:
        _expect(list, found, where)
        return tuple(_read(typing.get_args(kind)[0], part, f"{where}[{i}]") for i, part in enumerate(found))
    if is_dataclass(kind):
        return _read_fields(typing.cast(type, kind), found, where)
    _expect(kind, found, where)
    return check_number(found, where) if kind is int else found


def _read_fields(kind: type, found: Any, where: str) -> Any:
    _expect(dict, found, where)
    hints, needed = _fields_of(kind)
    for name in found:
        _one_of(hints, name, f"{where}, a field of {kind.__name__}")
    missing = [name for name in needed if name not in found]
    if missing:
        raise ValueError(
            f"{where}: {kind.__name__} has the fields {', '.join(found) or '(none)'}: it must also have {', '.join(missing)}"
        )
    for name in found:
        if (kind, name) in _KNOWN:
            _one_of(_KNOWN[kind, name], found[name], f"{where}.{name}")
    return kind(**{name: _read(hints[name], part, f"{where}.{name}") for name, part in found.items()})


@lru_cache(maxsize=64)  # more than the number of dataclasses
def _fields_of(kind: type) -> tuple[dict[str, Any], list[str]]:
    """Return ({field: type}, names of the fields that have no default)."""
    hints = typing.get_type_hints(kind)
    known = fields(kind)
    return {f.name: hints[f.name] for f in known}, [f.name for f in known if f.default is MISSING]


@lru_cache(maxsize=1 << 13)  # a schedule repeats a few expressions many times
def _expression(text: str) -> Expr:
    return Expr(text)


def _one_of(known: Collection[str], found: Any, where: str) -> str:
    if not isinstance(found, str) or found not in known:
        raise ValueError(f"{where}: {found!r} is not known; use one of {', '.join(known)}")
    return found


def _expect(kind: type, found: Any, where: str) -> Any:
    if kind is float and type(found) is int:  # a float field may contain an int, such as 0
        return float(found)
    if type(found) is not kind:
        raise ValueError(f"{where}: {found!r} is not of type {kind.__name__}")
    return found
