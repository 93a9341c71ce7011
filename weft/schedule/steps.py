"""What a schedule is made of: buffers, regions of them, signals, and steps.

Numbers may be expressions of the rank (`weft.schedule.expr`). Buffers are two-dimensional, rows x columns; a chunk is a
region of one. Regions are of this rank's buffer unless they say `at` which rank's: then the buffer must be symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from weft.schedule.expr import RANK, Expr, Index

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int64": 8, "int32": 4}
Role: TypeAlias = Literal["input", "output", "symmetric", "scratch"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """rows x cols of one dtype on every rank.

    input, output: the caller's tensors, new ones at every run; only their own rank sees them. symmetric: kept by the
    executor, of one size on all ranks, visible to all. scratch: kept by the executor, private to its rank.
    """

    name: str
    rows: Index
    cols: int
    dtype: str
    role: Role

    def part(
        self, *, rows: tuple[Index, Index] | None = None, cols: tuple[Index, Index] | None = None, at: Index = RANK
    ) -> Region:
        """The region (first, count) in rows and columns, of rank `at`; all of them where nothing is said."""
        row, n_rows = rows or (0, self.rows)
        col, n_cols = cols or (0, self.cols)
        return Region(self.name, row, n_rows, col, n_cols, at)


@dataclass(frozen=True, slots=True)
class Region:
    buffer: str
    row: Index
    rows: Index
    col: Index
    cols: Index
    at: Index = RANK

    def __str__(self) -> str:
        return f"{self.buffer}{at_text(self.at)}[{self.row}:+{self.rows}, {self.col}:+{self.cols}]"


@dataclass(frozen=True, slots=True)
class Signals:
    """`count` counters on every rank. They only grow: each Set adds one, so that run n starts where run n - 1 ended."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Copy:
    """dst = src. A put if `dst` is a peer's, a get if `src` is, a gather or scatter if both are this rank's.

    by "dma": a copy engine. by "kernel": loads and stores of the compute units.
    """

    src: Region
    dst: Region
    by: Literal["dma", "kernel"] = "dma"

    def __str__(self) -> str:
        return f"copy    {self.src} -> {self.dst} by {self.by}"


@dataclass(frozen=True, slots=True)
class Compute:
    """out = op(*inputs), or out += with `accumulate`. Ops: see `weft.schedule.steps.OPS`."""

    op: str
    out: Region
    inputs: tuple[Region, ...]
    accumulate: bool = False

    def __str__(self) -> str:
        sign = "+=" if self.accumulate else "="
        return f"{self.op:<7} {self.out} {sign} {', '.join(str(r) for r in self.inputs)}"


@dataclass(frozen=True, slots=True)
class Collective:
    """The library's collective over all ranks. All ranks call it in one order.

    all_gather: every rank's `src` to every rank's `dst`, one below the other. all_to_all: of every rank's `src` the rows of
    rank r, as many as its `dst` has, to rank r, where the ranks' parts lie side by side.
    """

    op: Literal["all_gather", "all_to_all"]
    src: Region
    dst: Region

    def __str__(self) -> str:
        return f"{self.op} {self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class Set:
    """Add one to a counter of rank `at`. Release: what this lane did before is visible to whoever waits for it."""

    signal: str
    index: Index = 0
    at: Index = RANK

    def __str__(self) -> str:
        return f"set     {self.signal}{at_text(self.at)}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until this rank's counter has been set `count` times in this run. Acquire.

    With `previous`: `count` times in the run before (at the first run there was none, and nothing is waited for). That is
    how a producer learns that a buffer which it wants to fill again has been read.
    """

    signal: str
    index: Index = 0
    count: Index = 1
    previous: bool = False

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" x{self.count}"
        return f"wait    {self.signal}[{self.index}]{times}{' of the previous run' if self.previous else ''}"


@dataclass(frozen=True, slots=True)
class For:
    """`body` for `index` = 0 .. extent - 1, one after the other. Steps of the body may use Expr(index)."""

    index: str
    extent: Index
    body: tuple[Step, ...]

    def __str__(self) -> str:
        return f"for {self.index} in 0..{self.extent}: " + "; ".join(" ".join(str(s).split()) for s in self.body)


@dataclass(frozen=True, slots=True)
class Tiles:
    """A persistent kernel: `body` for `index` = 0 .. extent - 1, taken in that order, many at a time.

    The steps of one tile follow each other; tiles are not ordered. All begin after what comes before on the lane, and the
    lane goes on when all have ended. Bodies copy, compute and set; they do not wait, since nothing says how many tiles run
    at once, and one that waits may keep the one that it waits for from starting.
    """

    kernel: str
    index: str
    extent: Index
    body: tuple[Step, ...]

    def __post_init__(self) -> None:
        for step in self.body:
            if not isinstance(step, Copy | Compute | Set):
                raise ValueError(f"kernel {self.kernel}: tiles copy, compute and set, and {str(step)!r} is none of it")

    def tile(self, number: int) -> tuple[Step, ...]:
        """Of tiles in numbers, the body of one."""
        body: tuple[Step, ...] = put_in(self.body, {self.index: number})
        return body

    def __str__(self) -> str:
        return f"tiles of {self.kernel}, {self.index} in 0..{self.extent}: " + "; ".join(
            " ".join(str(s).split()) for s in self.body
        )


Step: TypeAlias = Copy | Compute | Collective | Set | Wait | For | Tiles


@dataclass(frozen=True, slots=True)
class Lane:
    """Steps in order on one resource: "compute" (a stream for kernels) or "copy" (a stream for copy engines)."""

    name: str
    resource: Literal["compute", "copy"]
    steps: tuple[Step, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Op:
    """What an executor and a cost model must know of an operation: how many inputs, its arithmetic per output element."""

    inputs: int
    flops_per_element: float = 0.0


# matmul: [m, k] x [k, n] -> [m, n] and 2k per element.
# embedding_bag: [m, bags] of ids x [rows, n] -> [m, n]: sums of `rows` rows, on the average, of tables whose columns lie side
# by side; the ids of a row's bags say which ones. The others work element by element.
OPS = {
    "matmul": Op(2),
    "add": Op(2, 1.0),
    "silu": Op(1, 5.0),
    "gelu": Op(1, 10.0),
    "relu": Op(1, 1.0),
    "embedding_bag": Op(2),
}


def put_in(step: Any, values: dict[str, int]) -> Any:
    """A step, region or index in numbers: its variables have these values."""
    if isinstance(step, Expr):
        return step.evaluate(values)
    if isinstance(step, Tiles):
        return replace(step, extent=put_in(step.extent, values), body=_partly(step.body, values))
    if isinstance(step, tuple):
        return tuple(put_in(item, values) for item in step)
    if isinstance(step, Region | Copy | Compute | Collective | Set | Wait):
        return replace(step, **{f.name: put_in(getattr(step, f.name), values) for f in fields(step)})
    return step


def _partly(item: Any, values: dict[str, int]) -> Any:
    """`put_in` for what has variables of its own: they are left."""
    if isinstance(item, Expr):
        return item.partly(values)
    if isinstance(item, tuple):
        return tuple(_partly(part, values) for part in item)
    if isinstance(item, Region | Copy | Compute | Set):
        return replace(item, **{f.name: _partly(getattr(item, f.name), values) for f in fields(item)})
    return item


def unrolled(steps: tuple[Step, ...], values: dict[str, int]) -> tuple[Step, ...]:
    """`steps` in numbers, loops written out, tiles not."""
    result: list[Step] = []
    for step in steps:
        if isinstance(step, For):
            for turn in range(put_in(step.extent, values)):
                result.extend(unrolled(step.body, {**values, step.index: turn}))
        else:
            result.append(put_in(step, values))
    return tuple(result)


def at_text(at: Index) -> str:
    """At which rank, in texts; nothing for a step's own rank."""
    return "" if at == RANK else f"@({at})" if isinstance(at, Expr) else f"@{at}"
