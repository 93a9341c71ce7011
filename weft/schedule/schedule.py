"""The schedule: the steps of every rank, in order, on lanes. A lane is a queue on one resource of the rank.

A schedule does not depend on an executor. GPUs and CPU processes run it (`weft.runtime`), the simulator predicts its
time (`weft.sim`), `weft.schedule.verify` checks it, and `weft.schedule.text` stores it as JSON. A schedule is written
once for all ranks: a number that differs between ranks is an expression of the rank.

The steps of a lane run in order. Only signals order steps of different lanes or ranks. A run of a rank starts all its
lanes at the same time, and ends when all lanes have ended. In this example, each rank puts its x into the peer's `box`.
A wait with `previous` waits for the sets of the previous run, so a rank overwrites the peer's `box` only after the peer
has read it.

    d = Draft("push", world_size=2)
    x = d.buffer("x", 4, 8, "fp32", "input")
    box = d.buffer("box", 4, 8, "fp32", "symmetric")
    y = d.buffer("y", 4, 8, "fp32", "output")
    arrived = d.signals("arrived", 1); credit = d.signals("credit", 1)
    peer = (RANK + 1) % 2
    d.lane("copy", "copy").wait(credit, previous=True).copy(x.part(), box.part(at=peer)).set(arrived, at=peer)
    d.lane("compute").wait(arrived).compute("silu", y.part(), box.part()).set(credit, at=peer)
    schedule = d.schedule()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, get_args

from weft.errors import ScheduleError
from weft.integers import integer
from weft.schedule.expr import INDEX_TYPES, RANK, Index, Values, require_index
from weft.schedule.kernels import TileKernel
from weft.schedule.printing import buffer_lines, step_lines, wrapped
from weft.schedule.regions import undeclared
from weft.schedule.steps import (
    ITEM_BYTES,
    OPS,
    Buffer,
    Collective,
    Compute,
    Contents,
    Copy,
    CopyBy,
    For,
    Lane,
    Norm,
    Read,
    ReadBy,
    Reduce,
    Region,
    Resource,
    Role,
    Send,
    Set,
    Signals,
    Step,
    Tiles,
    Wait,
    map_steps,
    of_kind,
    substitute,
    unrolled,
    walk,
)
from weft.schedule.steps.base import getter
from weft.words import counted, kind


@dataclass(frozen=True)
class Schedule:
    """The schedule of all ranks, built with a `Draft` or read from JSON by `weft.schedule.text`.

    contents: for each buffer that determines sizes at run time, its expected contents."""

    name: str
    world_size: int
    buffers: tuple[Buffer, ...]
    signals: tuple[Signals, ...]
    lanes: tuple[Lane, ...]
    contents: tuple[Contents, ...] = ()

    def buffer(self, name: str) -> Buffer:
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise ScheduleError(undeclared(name))

    def values(self, rank: int) -> Values:
        """Return {variable: value} for expressions on `rank`: the number "rank", and the expected contents of buffers."""
        return {"rank": rank, **{held.buffer: held.expected[rank] for held in self.contents}}

    @property
    def reads_on_host(self) -> bool:
        """True if the CPU needs sizes that are on the device. The schedule then cannot be captured in a CUDA graph,
        because the sizes may differ in each replay.
        """
        return not self._reads <= {"device"}

    @property
    def waits_for_sizes(self) -> bool:
        """True if the CPU waits for sizes from the device in every run: before later steps, or at the end of the run."""
        return not self._reads <= {"device", "known"}

    @property
    def stops_host(self) -> bool:
        """True if the CPU must wait for sizes from the device before it issues later steps (`Read` with by="host")."""
        return "host" in self._reads

    @cached_property
    def _reads(self) -> set[str]:
        return {step.by for step in of_kind(self.walk(), Read)}

    @cached_property
    def has_tiles(self) -> bool:
        return any(step.tile_kernel for step in self.walk())

    def walk(self) -> Iterator[Step]:
        """Yield each step of each lane once: a loop, then the steps inside it. A `Tiles` step is yielded without its body."""
        return walk(step for lane in self.lanes for step in lane.steps)

    def map_steps(self, change: Callable[[Step], Step | None]) -> Schedule:
        """Return a copy of the schedule with each step replaced by `change(step)`, or removed if the result is None.

        `change` is called for the steps inside loops, not for the loops themselves. A `Tiles` step is passed as a whole.
        """
        return replace(self, lanes=tuple(replace(one, steps=map_steps(one.steps, change)) for one in self.lanes))

    def of_rank(self, rank: int, *, expected: bool = True) -> tuple[Lane, ...]:
        """Return the lanes of one rank with expressions evaluated, loops unrolled, and steps on empty regions removed.

        A `Tiles` step keeps its body, in which the tile's index is the only variable.

        expected: True to compute dynamic sizes from the expected contents of buffers; False, as for executors, to keep
            them as expressions.
        """
        expected = expected or not self.contents
        known = _known_lanes(self)
        if (rank, expected) not in known:
            known[rank, expected] = self._written_out(rank, expected)
        return known[rank, expected]

    def _written_out(self, rank: int, expected: bool) -> tuple[Lane, ...]:
        values = self.values(rank) if expected else {"rank": rank}
        lanes = ((lane, unrolled(lane.steps, values, partially_evaluated=not expected)) for lane in self.lanes)
        return tuple(Lane(lane.name, lane.resource, tuple(s for s in steps if not s.is_empty)) for lane, steps in lanes)

    def buffers_of_rank(self, rank: int, *, expected: bool = True) -> tuple[Buffer, ...]:
        """Return the buffers of one rank with their sizes evaluated.

        expected: True to compute dynamic sizes from the expected contents of buffers; False to keep them as expressions.
        """
        expected = expected or not self.contents
        values = self.values(rank) if expected else {"rank": rank}
        return tuple(
            Buffer(b.name, substitute(b.rows, values, partially_evaluated=not expected), b.cols, b.dtype, b.role)
            for b in self.buffers
        )

    def table(self, rank: int | None = None) -> str:
        """Return the schedule as text of at most 132 columns, for all ranks or for one.

        The text for all ranks shows numbers as expressions of the rank; the text for one rank shows their values.

        Raise `ValueError` if the rank does not exist.
        """
        if rank is not None and not 0 <= rank < self.world_size:
            raise ValueError(f"schedule {self.name}: rank {rank} does not exist: use 0 to {self.world_size - 1}")
        whose = counted(self.world_size, "rank") if rank is None else f"rank {rank} of {self.world_size}"
        shown = self.buffers if rank is None else self.buffers_of_rank(rank)
        buffers = {b.name: b for b in shown}
        lines = [f"schedule {self.name}, {whose}", ""]
        lines += [*buffer_lines(shown, [self.values(r) for r in range(self.world_size)]), ""]
        if self.signals:
            signals = ", ".join(f"{s.name}[{s.count}]" for s in self.signals)
            lines += [wrapped("signals  ", f"{signals}   (counters on every rank)"), ""]
        lines.append(
            "notation: buffer@rank[first row:+rows, first column:+columns]; without @rank, this rank's; without [], "
            "the whole buffer"
        )
        for lane in self.lanes if rank is None else self.of_rank(rank):
            lines += ["", f"lane {lane.name} ({lane.resource})"]
            for number, step in enumerate(lane.steps, start=1):
                lines += step_lines(f"{number:4}  ", step, rank, buffers)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


_last: tuple[weakref.ref[Schedule] | None, dict[tuple[int, bool], tuple[Lane, ...]]] = (None, {})


def _known_lanes(schedule: Schedule) -> dict[tuple[int, bool], tuple[Lane, ...]]:
    """Return the cache of `of_rank` for this schedule object, keyed by the arguments of `of_rank`.

    Only the cache of the latest schedule is kept.
    """
    global _last
    of, known = _last
    if of is None or of() is not schedule:
        of, known = _last = (weakref.ref(schedule, _forget), {})
    return known


def _forget(of: weakref.ref[Schedule]) -> None:
    global _last
    if _last[0] is of:
        _last = (None, {})


_ROLES, _RESOURCES, _COPY_BY, _READ_BY = map(get_args, (Role, Resource, CopyBy, ReadBy))


def _require_known(of: str, name: str, what: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise ValueError(f"{of} {name}: {what}={word!r} is not known; use one of {', '.join(words)}")


class Draft:
    """Build a `Schedule`: declare buffers and signals, then append steps to lanes. See the example at the top of this file."""

    def __init__(self, name: str, world_size: int) -> None:
        try:
            self.world_size = integer(f"schedule {name}: world_size", world_size, "give the number of ranks")
        except ValueError as error:
            raise TypeError(str(error)) from None
        self.name = name
        self._buffers: dict[str, Buffer] = {}
        self._signals: dict[str, Signals] = {}
        self._lanes: dict[str, LaneDraft] = {}
        self._contents: dict[str, Contents] = {}

    def buffer(self, name: str, rows: Index, cols: int, dtype: str, role: Role) -> Buffer:
        """Declare a buffer of rows x cols elements on every rank, and return it.

        Raise `TypeError` or `ValueError` if an argument is not legal: `name` must be a non-empty str, `rows` an integer or an
        expression, and `cols` an integer.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"schedule {self.name}: buffer name {name!r} must be a non-empty str, such as 'x'")
        require_index(rows, f"buffer {name}: rows")
        if isinstance(cols, bool) or not hasattr(cols, "__index__"):
            raise TypeError(f"buffer {name}: cols={cols!r} must be an integer, the same on all ranks")
        if name in self._buffers:
            raise ValueError(f"schedule {self.name}: two buffers are named {name!r}: give each its own name")
        if dtype not in ITEM_BYTES:
            raise ValueError(f"buffer {name}: dtype {dtype!r} is not known; use one of {', '.join(ITEM_BYTES)}")
        _require_known("buffer", name, "role", role, _ROLES)
        if role == "symmetric" and not isinstance(rows, int):
            raise ValueError(
                f"buffer {name}: symmetric memory has one size on all ranks, but rows={rows} depends on the rank: give the "
                "largest number of rows"
            )
        self._buffers[name] = made = Buffer(name, rows, cols, dtype, role)
        return made

    def holds(self, buffer: Buffer, expected: Sequence[Sequence[int]]) -> None:
        """Declare that sizes in this schedule depend on the contents of `buffer` at run time.

        expected: for each rank, the contents that simulation and verification assume, row by row.
        """
        size = buffer.rows * buffer.cols
        distinct = {id(of_rank): of_rank for of_rank in expected}  # usually all ranks have the same contents
        if any(int(n) != n or n < 0 for of_rank in distinct.values() for n in of_rank):
            raise ValueError(f"buffer {buffer.name}: expected={expected}, but sizes must be integers of at least 0")
        if len(expected) != self.world_size or any(len(of_rank) != size for of_rank in expected):
            raise ValueError(
                f"buffer {buffer.name}: the argument `expected` has {[len(of_rank) for of_rank in expected]} numbers per rank: "
                f"pass {size} numbers for each of {counted(self.world_size, 'rank')}"
            )
        held = {key: tuple(map(int, of_rank)) for key, of_rank in distinct.items()}
        self._contents[buffer.name] = Contents(buffer.name, tuple(held[id(of_rank)] for of_rank in expected))

    def signals(self, name: str, count: int) -> Signals:
        if name in self._signals:
            raise ValueError(f"schedule {self.name}: two arrays of signals are named {name!r}: give each its own name")
        number = integer(f"schedule {self.name}: count of signals {name}", count, "give the number of signals")
        if number < 0:
            raise ValueError(f"schedule {self.name}: count={number} of signals {name} must be at least 0")
        self._signals[name] = made = Signals(name, number)
        return made

    def lane(self, name: str, resource: Resource | None = None) -> LaneDraft:
        """Return the lane `name`. The first call with a name creates the lane.

        resource: "compute" (the default of a new lane) or "copy". Raise `ValueError` if the lane has another resource.

        The CPU issues steps of copy lanes before steps of compute lanes, and otherwise in the order in which lanes were
        created (`weft.schedule.verify.issue_order`).
        """
        _require_known("lane", name, "resource", resource or "compute", _RESOURCES)
        lane = self._lanes.setdefault(name, LaneDraft(name, resource or "compute"))
        if resource not in (None, lane.resource):
            raise ValueError(
                f"lane {name}: resource={resource!r}, but the lane was created with {lane.resource!r}: give the other lane "
                "another name"
            )
        return lane

    def schedule(self) -> Schedule:
        lanes = tuple(Lane(lane.name, lane.resource, tuple(lane.steps)) for lane in self._lanes.values() if lane.steps)
        return Schedule(
            self.name,
            self.world_size,
            tuple(self._buffers.values()),
            tuple(self._signals.values()),
            lanes,
            tuple(self._contents.values()),
        )


class LaneDraft:
    """A lane under construction: every method appends a step and returns the lane."""

    def __init__(self, name: str, resource: Resource) -> None:
        self.name, self.resource = name, resource
        self.steps: list[Step] = []

    def copy(self, src: Region, dst: Region, by: CopyBy = "dma", accumulate: bool = False) -> LaneDraft:
        _require_known("lane", self.name, "by", by, _COPY_BY)
        return self.then(Copy(src, dst, by, accumulate))

    def send(self, src: Region, dst: Region) -> LaneDraft:
        """Append a send of `src` to `dst`, a region of another rank on this or another host (`Send`)."""
        return self.then(Send(src, dst))

    def compute(self, op: str, out: Region, *inputs: Region, accumulate: bool = False) -> LaneDraft:
        if op not in OPS:
            raise ValueError(f"lane {self.name}: op {op!r} is not known; use one of {', '.join(OPS)}")
        if not OPS[op].takes(len(inputs)):
            raise ValueError(f"lane {self.name}: {op} has {len(inputs)} inputs: pass {OPS[op].numbers}")
        return self.then(Compute(op, out, inputs, accumulate))

    def matmul(self, out: Region, a: Region, b: Region, accumulate: bool = False) -> LaneDraft:
        return self.compute("matmul", out, a, b, accumulate=accumulate)

    def all_gather(self, src: Region, dst: Region) -> LaneDraft:
        return self.then(Collective("all_gather", src, dst))

    def all_to_all(self, src: Region, dst: Region) -> LaneDraft:
        return self.then(Collective("all_to_all", src, dst))

    def exchange(
        self, src: Region, dst: Region, sent: Sequence[Index], received: Sequence[Index], known: bool = False
    ) -> LaneDraft:
        return self.then(Collective("exchange", src, dst, tuple(sent), tuple(received), known))

    def reduce_scatter(self, src: Region, dst: Region) -> LaneDraft:
        return self.then(Collective("reduce_scatter", src, dst))

    def all_reduce(self, src: Region, dst: Region) -> LaneDraft:
        return self.then(Collective("all_reduce", src, dst))

    def reduce(
        self, out: Region, *parts: Region, accumulate: bool = False, norm: Norm | None = None
    ) -> LaneDraft:  # fmt: skip
        return self.then(Reduce(out, parts, accumulate, norm))

    def tiles(self, kernel: TileKernel, index: str, extent: Index, *body: Step) -> LaneDraft:
        self._require_extent("tiles", extent)
        return self.then(Tiles(kernel, index, extent, body))

    def read(self, buffer: Buffer, by: ReadBy = "device") -> LaneDraft:
        _require_known("lane", self.name, "by", by, _READ_BY)
        self._require(Buffer, buffer, "read takes a whole buffer: pass a buffer that Draft.buffer returned")
        return self.then(Read(buffer.part(), by))

    def set(self, signals: Signals, index: Index = 0, at: Index = RANK) -> LaneDraft:
        self._require(Signals, signals, "pass signals that Draft.signals returned")
        return self.then(Set(signals.name, index, at))

    def wait(self, signals: Signals, index: Index = 0, count: Index = 1, previous: bool = False) -> LaneDraft:
        self._require(Signals, signals, "pass signals that Draft.signals returned")
        return self.then(Wait(signals.name, index, count, previous))

    def repeat(self, index: str, extent: Index, *steps: Step) -> LaneDraft:
        """Append a loop over `steps` with `index` = 0 .. extent - 1.

        To run steps on some ranks only, use an extent that is 0 on the other ranks, such as lookup((0, 1), RANK)."""
        self._require_extent("repeat", extent)
        return self.then(For(index, extent, steps))

    def _require_extent(self, method: str, extent: Index) -> None:
        if isinstance(extent, int) and extent < 0:
            raise ValueError(f"lane {self.name}: {method} has extent={extent}: use at least 0 (0 runs no step)")

    def _require(self, wanted: type, given: Any, fix: str) -> None:
        if not isinstance(given, wanted):
            raise TypeError(f"lane {self.name}: {kind(given)} is not a {wanted.__name__}: {fix}")

    def then(self, step: Step) -> LaneDraft:
        """Append a step of any kind."""
        _require_step(step, "lane", self.name)
        self.steps.append(step)
        return self


def _require_step(step: Any, *where: str) -> None:
    """Raise `TypeError` unless `step` is a Step whose operands are regions and whose numbers are int or Expr.

    where: words that say where the step is, for the error text. They are joined only if there is an error.
    """
    if not isinstance(step, Step):
        hint = ": add steps with a lane's methods; inside repeat, write Copy(...), Set(...), Wait(...)"
        raise TypeError(f"{' '.join(where)}: {kind(step)} is not a step{hint if isinstance(step, LaneDraft) else ''}")
    for name, wanted in _operand_fields(type(step)):  # type: ignore[arg-type]  # as in `_joined` of expr.py
        if wrong := _wrong_operand(getattr(step, name), wanted):
            raise TypeError(f"{' '.join(where)}: {name} of {step.kind!r} {wrong}")
    indices = _indices(type(step))  # type: ignore[arg-type]
    if indices and not INDEX_TYPES.issuperset(map(type, indices(step))):
        for name in _index_fields(type(step)):  # type: ignore[arg-type]
            require_index(getattr(step, name), f"{' '.join(where)}: {name} of {step.kind!r}")
    for region in (access.region for access in step.accesses()):
        if not INDEX_TYPES.issuperset(map(type, _INDICES_OF_REGION(region))):
            for name in _index_fields(Region):
                require_index(getattr(region, name), f"{' '.join(where)}: {name} of {region.buffer} in {step.kind!r}")
    for inner in step.inner:
        _require_step(inner, f"{' '.join(where)}, in {step.kind!r}")


@lru_cache(maxsize=256)
def _operand_fields(of: Any) -> tuple[tuple[str, str], ...]:
    """Return (name, type as text) of each field of step class `of` whose type is a region, a tuple of regions or a norm."""
    return tuple((field.name, str(field.type)) for field in fields(of) if str(field.type) in _OPERANDS)


_OPERANDS = ("Region", "tuple[Region, ...]", "Norm | None")


def _wrong_operand(given: Any, wanted: str) -> str:
    """Return the fault of an operand, and the fix; "" if the operand is valid. wanted: the field's type, as text."""
    if wanted == "Norm | None":
        if given is None:
            return ""
        if type(given) is not Norm:
            return f"is {kind(given)}: write Norm(out, weight, eps)"
        given = given.out, given.weight
    elif wanted == "Region":
        given = (given,)
    elif type(given) is not tuple:
        return f"is {kind(given)}: write a tuple of regions, (x.part(),)"
    for one in given:
        if type(one) is Buffer:
            return f"takes regions, but {one.name} is a buffer: write {one.name}.part()"
        if type(one) is not Region:
            return f"takes regions, but got {kind(one)}: write x.part(), where x is a buffer"
    return ""


@lru_cache(maxsize=256)
def _index_fields(of: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(of) if field.type in ("Index", Index))


@lru_cache(maxsize=256)
def _indices(of: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    names = _index_fields(of)
    return getter(names) if names else None


_INDICES_OF_REGION = getter(_index_fields(Region))
