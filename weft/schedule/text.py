"""A schedule to read (`table`) and to keep (`to_json`, `from_json`).

    {"weft_schedule": 1, "name": ..., "world_size": ..., "buffers": [...], "signals": [...], "lanes": [...]}

Every value of `weft.schedule.steps` is an object with its fields by name; a step has the field "step" besides, which says
what it is, and a tile kernel the field "kernel"; an expression is its text. What is unknown is refused, so that a file never
means less than it says.
"""

from __future__ import annotations

import json
import textwrap
import typing
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from weft.schedule.expr import RANK, Expr, Index
from weft.schedule.kernels import KERNELS, TileKernel
from weft.schedule.limits import check_number, check_sizes
from weft.schedule.schedule import Schedule
from weft.schedule.steps import (
    ITEM_BYTES,
    KINDS,
    OPS,
    Buffer,
    Compute,
    For,
    Region,
    Set,
    Step,
    Tiles,
    at_text,
    put_in,
)
from weft.words import counted

VERSION = 1
WIDTH = 132
_TOGETHER = "\N{NO-BREAK SPACE}"  # where a line should not be broken; none gets into a text
_TAGGED: dict[type, tuple[str, dict[str, Any]]] = {Step: ("step", KINDS), TileKernel: ("kernel", KERNELS)}
_KNOWN: dict[tuple[type, str], Collection[str]] = {(Compute, "op"): OPS, (Buffer, "dtype"): ITEM_BYTES}


def table(schedule: Schedule, rank: int | None = None) -> str:
    """The schedule as text of at most 132 columns: of all ranks, with expressions of the rank, or of one in numbers."""
    whose = counted(schedule.world_size, "rank") if rank is None else f"rank {rank} of {schedule.world_size}"
    lines = [f"schedule {schedule.name}, {whose}", "", *_buffers(schedule, rank), ""]
    if schedule.signals:
        signals = ", ".join(f"{s.name}[{s.count}]" for s in schedule.signals)
        lines += [_wrapped("signals  ", f"{signals}   (counters on every rank)"), ""]
    lines.append(
        "buffer@rank[first row:+rows, first column:+columns]; of the own rank if none is named; all of it without []"
    )
    buffers = {b.name: b for b in (schedule.buffers if rank is None else schedule.buffers_of_rank(rank))}
    for lane in schedule.lanes if rank is None else schedule.of_rank(rank):
        lines += ["", f"lane {lane.name} ({lane.resource})"]
        for number, step in enumerate(lane.steps, start=1):
            lines += _step_lines(f"{number:4}  ", step, rank, buffers)
    return "\n".join(lines)


def describe(item: Step | Region, rank: int | None = None) -> str:
    """A step or region on one line; if it is one of `rank` in numbers, what is that rank's own goes without its number."""
    return " ".join(str(_shown(item, rank, {})).split())


def to_json(schedule: Schedule) -> str:
    return json.dumps({"weft_schedule": VERSION, **_plain(schedule)}, indent=1)


def from_json(text: str) -> Schedule:
    """What `to_json` wrote. `ValueError` if it is anything else, or has numbers beyond `weft.schedule.limits`; whether the
    schedule is right is for `verify` to say."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("no schedule that can be read: brackets are nested too deeply") from error
    version = found.pop("weft_schedule", None) if isinstance(found, dict) else None
    if version != VERSION:
        raise ValueError(f"no schedule that can be read: weft_schedule is {version!r}, and {VERSION} is known")
    schedule: Schedule = _read(Schedule, found, "schedule")
    check_sizes(schedule)
    return schedule


def _buffers(schedule: Schedule, rank: int | None) -> list[str]:
    rows = [("buffers", "rows", "columns", "dtype", "role", "size")]
    for buffer in schedule.buffers if rank is None else schedule.buffers_of_rank(rank):
        row_bytes = buffer.cols * ITEM_BYTES[buffer.dtype]
        of_ranks = sorted(put_in(buffer.rows, schedule.values(r)) for r in range(schedule.world_size))
        ends = sorted({of_ranks[0], of_ranks[-1]})
        formula = str(buffer.rows)
        n_rows = formula if len(formula) <= 24 else " to ".join(map(str, ends))
        size = " to ".join(_bytes(n * row_bytes) for n in ends)
        rows.append((buffer.name, n_rows, str(buffer.cols), buffer.dtype, buffer.role, size))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, "<>><<>", widths, strict=True)) for row in rows]


def _bytes(count: int) -> str:
    unit = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{count / 2 ** (10 * unit):.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _step_lines(head: str, step: Step, rank: int | None, buffers: dict[str, Buffer]) -> list[str]:
    if not isinstance(step, For | Tiles):
        return [_wrapped(head, str(_shown(step, rank, buffers)))]
    what = f"tiles of {step.kernel.name}," if isinstance(step, Tiles) else "for"
    lines = [_wrapped(head, f"{what} {step.index} in 0 .. {step.extent} - 1")]
    for inner in step.body:
        lines += _step_lines(" " * len(head) + "  ", inner, rank, buffers)
    return lines


def _wrapped(head: str, text: str) -> str:
    indent = " " * (len(head) + 8)
    filled = textwrap.fill(
        text, WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return filled.replace(_TOGETHER, " ")


def _shown(item: Any, rank: int | None, buffers: dict[str, Buffer]) -> Any:
    """A step with its regions as text. `rank` itself, in a step in numbers, is "this rank" again."""
    if isinstance(item, tuple):
        return tuple(_shown(part, rank, buffers) for part in item)
    if isinstance(item, Region):
        return _region(item, RANK if item.at == rank else item.at, buffers.get(item.buffer))
    if isinstance(item, Set):
        return replace(item, at=RANK if item.at == rank else item.at)
    if isinstance(item, Step):
        return item.with_fields(lambda part: _shown(part, rank, buffers))
    return item


def _region(region: Region, at: Index, buffer: Buffer | None) -> str:
    """As a region prints itself; a whole extent of its buffer is ":", and the whole buffer goes without brackets."""
    whole = (0, buffer.rows, 0, buffer.cols) if buffer else (None,) * 4
    rows = ":" if (region.row, region.rows) == whole[:2] else f"{region.row}:+{region.rows}"
    cols = ":" if (region.col, region.cols) == whole[2:] else f"{region.col}:+{region.cols}"
    inside = "" if rows == cols == ":" else f"[{rows}, {cols}]"
    text = f"{region.buffer}{at_text(at)}{inside}"
    return text if len(text) > WIDTH - 30 else text.replace(" ", _TOGETHER)


def _plain(item: Any) -> Any:
    """What json can write."""
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
    """A value of type `kind` from what json read; `where` is its place in the file, for messages."""
    if kind in _TAGGED:
        _expect(dict, found, where)
        word, known = _TAGGED[kind]
        return _read(known[_one_of(known, found.pop(word, None), where)], found, where)
    if kind == Index:
        kind = Expr if isinstance(found, str) else int
    if kind is Expr:
        return Expr(found)
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
    known = {f.name: f for f in fields(kind)}
    for name in found:
        _one_of(known, name, f"{where}, a field of {kind.__name__}")
    missing = [name for name, f in known.items() if name not in found and f.default is MISSING]
    if missing:
        raise ValueError(f"{where}: {kind.__name__} lacks {', '.join(missing)}; found {', '.join(found) or 'nothing'}")
    hints = typing.get_type_hints(kind)
    for name in found:
        if (kind, name) in _KNOWN:
            _one_of(_KNOWN[kind, name], found[name], f"{where}.{name}")
    return kind(**{name: _read(hints[name], part, f"{where}.{name}") for name, part in found.items()})


def _one_of(known: Collection[str], found: Any, where: str) -> str:
    if not isinstance(found, str) or found not in known:
        raise ValueError(f"{where}: {found!r} is not known; known are {', '.join(known)}")
    return found


def _expect(kind: type, found: Any, where: str) -> Any:
    if type(found) is not kind:
        raise ValueError(f"{where}: {found!r} is no {kind.__name__}")
    return found
