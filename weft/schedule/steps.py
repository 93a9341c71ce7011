"""What a schedule is made of: buffers, regions of them, signals, and steps.

Numbers may be expressions of the rank, and sizes and places also of what a buffer holds (`weft.schedule.expr`). Buffers are
two-dimensional, rows x columns; a chunk is a region of one. Regions are of this rank's buffer unless they say `at` which
rank's: then the buffer must be symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from weft.schedule.expr import RANK, Expr, Index, Total, Values

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int64": 8, "int32": 4}
Role: TypeAlias = Literal["input", "output", "symmetric", "scratch"]
Resource: TypeAlias = Literal["compute", "copy"]
CopyBy: TypeAlias = Literal["dma", "kernel"]
ReadBy: TypeAlias = Literal["device", "meanwhile", "host"]
COPY_UNITS = 64
"""Compute units that a copy by kernel takes at most."""


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
class Contents:
    """What `buffer` is expected to hold on each rank when it is read, row by row: what is not known before a run is simulated,
    verified and shown with these numbers."""

    buffer: str
    expected: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Signals:
    """`count` counters on every rank. They only grow: each Set adds one, so that run n starts where run n - 1 ended."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Copy:
    """dst = src. A put if `dst` is a peer's, a get if `src` is, a gather or scatter if both are this rank's.

    by "dma": a copy engine. by "kernel": loads and stores of the compute units, at most COPY_UNITS of them.
    """

    src: Region
    dst: Region
    by: CopyBy = "dma"

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
    rank r, as many as its `dst` has, to rank r, where the ranks' parts lie side by side. exchange: of the rows of `src` the
    first sent[0] to rank 0, the next sent[1] to rank 1 ...; below each other in `dst` received[0] rows of rank 0, ...
    """

    op: Literal["all_gather", "all_to_all", "exchange"]
    src: Region
    dst: Region
    sent: tuple[Index, ...] = ()
    received: tuple[Index, ...] = ()

    def __str__(self) -> str:
        parts = f", {_listed(self.sent)} rows to the ranks and {_listed(self.received)} from them" if self.sent else ""
        return f"{self.op} {self.src} -> {self.dst}{parts}"


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
class Read:
    """Take the numbers in `region`, all of a buffer: steps after it on this lane may have sizes and places that depend on them
    (`weft.schedule.expr.total`), with the values of now, whatever is in the buffer later.

    by "device": kernels know them. by "host": the host does too, for which it waits; copy engines take sizes from the host
    only, and an output whose size depends on them is made then. by "meanwhile": kernels know them at once, and the host learns
    them while the lane goes on; an output whose size depends on them is made with room for more, and cut.
    """

    region: Region
    by: ReadBy = "device"

    def __str__(self) -> str:
        return f"read    {self.region} by {self.by}"


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


Step: TypeAlias = Copy | Compute | Collective | Set | Wait | Read | For | Tiles


@dataclass(frozen=True, slots=True)
class Lane:
    """Steps in order on one resource: "compute" (a stream for kernels) or "copy" (a stream for copy engines)."""

    name: str
    resource: Resource
    steps: tuple[Step, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Op:
    """What an executor and a cost model must know of an operation: how many inputs, of which the last ones may be left out,
    and its arithmetic per output element."""

    inputs: int
    flops_per_element: float = 0.0
    optional: int = 0

    def takes(self, inputs: int) -> bool:
        return self.inputs - self.optional <= inputs <= self.inputs


# matmul: [m, k] x [k, n] -> [m, n] and 2k per element.
# scaled_matmul: the same of fp8 operands, then their fp32 scales, [1, 1] each, or [m, 1] and [1, n]: (a * scale) @ (b * scale),
# and, if there is one, + bias [1, n], of the output's dtype. scaled_matmul_fast: with the library's fast accumulation.
# embedding_bag: [m, bags] of ids x [rows, n] -> [m, n]: sums of `rows` rows, on the average, of tables whose columns lie side
# by side; the ids of a row's bags say which ones. The others work element by element.
OPS = {
    "matmul": Op(2),
    "add": Op(2, 1.0),
    "silu": Op(1, 5.0),
    "gelu": Op(1, 10.0),
    "relu": Op(1, 1.0),
    "embedding_bag": Op(2),
    "scaled_matmul": Op(5, optional=1),
    "scaled_matmul_fast": Op(5, optional=1),
}
SCALED_MATMULS = ("scaled_matmul", "scaled_matmul_fast")
MATMULS = ("matmul", *SCALED_MATMULS)


def put_in(step: Any, values: Values, *, partly: bool = False) -> Any:
    """A step, region or index in numbers: its variables have these values. With `partly`, others are left."""
    if isinstance(step, Expr):
        return step.partly(values) if partly else step.evaluate(values)
    if isinstance(step, Tiles):
        body = put_in(step.body, values, partly=True)  # tiles have a variable of their own
        return replace(step, extent=put_in(step.extent, values, partly=partly), body=body)
    if isinstance(step, tuple):
        return tuple(put_in(item, values, partly=partly) for item in step)
    if isinstance(step, Region | Copy | Compute | Collective | Set | Wait | Read):
        return replace(step, **{f.name: put_in(getattr(step, f.name), values, partly=partly) for f in fields(step)})
    return step


def unrolled(steps: tuple[Step, ...], values: Values, *, partly: bool = False) -> tuple[Step, ...]:
    """`steps` in numbers, loops written out, tiles not. With `partly`, other variables are left."""
    result: list[Step] = []
    for step in steps:
        if isinstance(step, For):
            for turn in range(put_in(step.extent, values)):
                result.extend(unrolled(step.body, {**values, step.index: turn}, partly=partly))
        else:
            result.append(put_in(step, values, partly=partly))
    return tuple(result)


def variables_of(item: Any) -> set[str]:
    """The names in all expressions of a step, region or index but its own tile's."""
    if isinstance(item, Expr):
        return item.variables()
    if isinstance(item, tuple):
        return set[str]().union(*map(variables_of, item))
    if isinstance(item, Region | Copy | Compute | Collective | Set | Wait | Read | Tiles | For):
        own = {item.index} if isinstance(item, Tiles | For) else set()
        return set[str]().union(*(variables_of(getattr(item, f.name)) for f in fields(item))) - own
    return set()


def totals_of(item: Any) -> list[Total]:
    """The sums over what buffers hold in a step of a rank."""
    if isinstance(item, Expr):
        return list(item.totals()[1])
    if isinstance(item, tuple):
        return [total for part in item for total in totals_of(part)]
    if isinstance(item, Region | Copy | Compute | Collective):
        return [total for f in fields(item) for total in totals_of(getattr(item, f.name))]
    return []


def _listed(numbers: tuple[Index, ...]) -> str:
    return f"({', '.join(map(str, numbers))})"


def at_text(at: Index) -> str:
    """At which rank, in texts; nothing for a step's own rank."""
    return "" if at == RANK else f"@({at})" if isinstance(at, Expr) else f"@{at}"
