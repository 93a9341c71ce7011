"""Steps that call a collective of NCCL or gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, cast

from weft.schedule.expr import Index
from weft.schedule.regions import SUMMED, Access, Declared, Region, read, written
from weft.schedule.steps.base import Step, differing

CollectiveOp: TypeAlias = Literal["all_gather", "all_to_all", "exchange", "reduce_scatter", "all_reduce"]
_REDUCING = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Collective(Step):
    """A collective of torch.distributed over all ranks. All ranks must call their collectives in the same order.

        all_gather      `dst` is the concatenation of all ranks' `src` along rows
        all_to_all      `src` is split along rows, one block for each rank; the block for a rank has as many rows as that rank's
                        `dst`. `dst` is the concatenation of the received blocks along columns
        exchange        `src` has sent[0] rows for rank 0, then sent[1] rows for rank 1, and so on. `dst` has received[0] rows
                        from rank 0, then received[1] rows from rank 1, and so on
        reduce_scatter  the sum of all ranks' `src` is split along rows: its first rows are the `dst` of rank 0, the next rows
                        the `dst` of rank 1, and so on
        all_reduce      `dst` is the sum of all ranks' `src`

    known: for an exchange, True if the CPU knows the sizes from an earlier call (`Read` with by="known").

    CPU ranks run these collectives by gloo, and GPU ranks by NCCL.
    """

    kind: ClassVar[str] = "collective"
    op: CollectiveOp
    src: Region
    dst: Region
    sent: tuple[Index, ...] = ()
    received: tuple[Index, ...] = ()
    known: bool = False

    def accesses(self) -> tuple[Access, ...]:
        return read(self.src), written(self.dst)

    @property
    def meets(self) -> bool:
        return True

    @property
    def sizes(self) -> tuple[Index, ...]:
        return self.sent

    @property
    def needs_unit(self) -> bool:
        return True

    @property
    def in_place(self) -> bool:
        return self.op == "all_reduce"

    @property
    def is_empty(self) -> bool:
        return False  # all ranks call it, even ranks without rows

    def faults(self, where: Declared) -> Iterator[str]:
        yield from differing([where.dtype(self.src), where.dtype(self.dst)])
        if (self.src.at, self.dst.at) != (where.rank, where.rank):
            yield "src and dst of a collective must be buffers of the rank that calls it: omit `at`"
        if self.op in _REDUCING and where.dtype(self.src) not in SUMMED:
            yield f"{where.dtype(self.src)} cannot be reduced: use one of {', '.join(SUMMED)}"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"{self.op} {self.src.buffer}{at(self.src.at)} -> {self.dst.buffer}{at(self.dst.at)}"

    def __str__(self) -> str:
        def listed(numbers: tuple[Index, ...]) -> str:
            return f"({', '.join(map(str, numbers))})"

        parts = f", {listed(self.sent)} rows to the ranks and {listed(self.received)} from them" if self.sent else ""
        return f"{self.op} {self.src} -> {self.dst}{parts}"


def disagreement(steps: Sequence[Collective]) -> str:
    """Describe the first contradiction between the ranks' calls of one collective; return "" if the calls match.

    steps: the call of each rank, with numbers in place of expressions.
    """
    rows = [cast(int, step.src.rows) for step in steps]
    into = [(cast(int, step.dst.rows), cast(int, step.dst.cols)) for step in steps]
    if len({step.op for step in steps}) > 1:
        return (
            f"the ranks call different collectives, {', '.join(step.op for step in steps)}: call the same on all ranks"
        )
    return _CHECKS[steps[0].op](steps, rows, into)


_Shapes: TypeAlias = list[tuple[int, int]]


def _all_gather(steps: Sequence[Collective], rows: list[int], into: _Shapes) -> str:
    if any(shape != (sum(rows), step.src.cols) for step, shape in zip(steps, into, strict=True)):
        return (
            f"the ranks contribute {rows} rows of {steps[0].src.cols} columns, but the shapes of dst are {into}: make every dst "
            f"[{sum(rows)}, {steps[0].src.cols}]"
        )
    return ""


def _all_to_all(steps: Sequence[Collective], rows: list[int], into: _Shapes) -> str:
    cols = [cast(int, step.src.cols) for step in steps]
    if {sum(n for n, _ in into)} != set(rows) or {n for _, n in into} != {sum(cols)}:
        return (
            f"the ranks contribute {rows} rows of {cols} columns, but the shapes of dst are {into}: the rows of all dst must sum "
            f"to the rows of each src, and every dst must have {sum(cols)} columns"
        )
    return ""


def _exchange(steps: Sequence[Collective], rows: list[int], into: _Shapes) -> str:
    cols = [cast(int, step.src.cols) for step in steps] + [n for _, n in into]
    sent = [tuple(map(int, step.sent)) for step in steps]
    received = [tuple(map(int, step.received)) for step in steps]
    if len(set(cols)) > 1 or [sum(r) for r in received] != [n for n, _ in into] or [sum(s) for s in sent] != rows:
        return (
            f"the ranks send {sent} of their {rows} rows, and receive {received}, but the shapes of dst are {into}: `sent` must "
            "sum to the rows of src, and `received` to the rows of dst"
        )
    if sent != list(zip(*received, strict=True)):
        return f"the ranks send {sent} rows, but receive {received}: rank a's sent[b] must equal rank b's received[a]"
    return ""


def _reduce_scatter(steps: Sequence[Collective], rows: list[int], into: _Shapes) -> str:
    cols = {step.src.cols for step in steps} | {n for _, n in into}
    if {sum(n for n, _ in into)} != set(rows) or len(cols) > 1:
        return (
            f"the shapes of src are {[(r, s.src.cols) for r, s in zip(rows, steps, strict=True)]}, and of dst {into}: all must "
            "have equal columns, and the rows of all dst must sum to the rows of each src"
        )
    return ""


def _all_reduce(steps: Sequence[Collective], rows: list[int], into: _Shapes) -> str:
    shapes = [(r, cast(int, s.src.cols)) for r, s in zip(rows, steps, strict=True)]
    return (
        "" if len({*shapes, *into}) == 1 else (f"shapes of src are {shapes} and of dst {into}, but all must be equal")
    )


_CHECKS: dict[str, Callable[[Sequence[Collective], list[int], _Shapes], str]] = {
    "all_gather": _all_gather, "all_to_all": _all_to_all, "exchange": _exchange, "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}  # fmt: skip
