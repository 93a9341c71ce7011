"""Arithmetic: operations on whole regions, and the sum of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from weft.schedule.expr import Index
from weft.schedule.regions import SUMMED, Access, Declared, Norm, Region, box_of, overlap, read, written
from weft.schedule.steps.base import Step, differing


@dataclass(frozen=True, slots=True)
class Op:
    """What an executor and a cost model must know of an operation: how many inputs, of which the last ones may be left out,
    and its arithmetic per output element."""

    inputs: int
    flops_per_element: float = 0.0
    optional: int = 0

    def takes(self, inputs: int) -> bool:
        return self.inputs - self.optional <= inputs <= self.inputs


# matmul: [m, k] x [k, n] -> [m, n] and 2k per element. addmm: of a, b and then c [m, n], which is not the output, c + a @ b, summed
# before the one rounding.
# scaled_matmul: the same of fp8 operands, then their fp32 scales, [1, 1] each, or [m, 1] and [1, n]: (a * scale) @ (b * scale),
# and, if there is one, + bias [1, n], of the output's dtype. scaled_matmul_fast: with the library's fast accumulation.
# embedding_bag: [m, bags] of ids x [rows, n] -> [m, n]: sums of `rows` rows, on the average, of tables whose columns lie side
# by side; the ids of a row's bags say which ones. The others work element by element.
OPS = {
    "matmul": Op(2),
    "addmm": Op(3),
    "add": Op(2, 1.0),
    "silu": Op(1, 5.0),
    "gelu": Op(1, 10.0),
    "relu": Op(1, 1.0),
    "embedding_bag": Op(2),
    "scaled_matmul": Op(5, optional=1),
    "scaled_matmul_fast": Op(5, optional=1),
}
SCALED_MATMULS = ("scaled_matmul", "scaled_matmul_fast")
PLAIN_MATMULS = ("matmul", "addmm")
MATMULS = (*PLAIN_MATMULS, *SCALED_MATMULS)


@dataclass(frozen=True, slots=True)
class Compute(Step):
    """out = op(*inputs), or out += with `accumulate`. Ops: see `OPS`."""

    kind: ClassVar[str] = "compute"
    op: str
    out: Region
    inputs: tuple[Region, ...]
    accumulate: bool = False

    def accesses(self) -> tuple[Access, ...]:
        return *map(read, self.inputs), written(self.out, self.accumulate)

    @property
    def needs_unit(self) -> bool:
        return True

    @property
    def in_place(self) -> bool:
        return self.op not in MATMULS

    def faults(self, where: Declared) -> Iterator[str]:
        dtypes = [where.dtype(region) for region in (*self.inputs, self.out)]
        shapes = [(region.rows, region.cols) for region in (*self.inputs, self.out)]
        if self.op not in SCALED_MATMULS:
            yield from differing(dtypes[1:] if self.op == "embedding_bag" else dtypes)
        if self.op not in OPS or not OPS[self.op].takes(len(self.inputs)):
            yield f"{self.op} of {len(self.inputs)} inputs is not known; known are {', '.join(OPS)}"
        elif self.op in SCALED_MATMULS:
            yield from self._wrong_scaling(shapes, dtypes)
        elif self.op in PLAIN_MATMULS:
            (m, k), (k2, n), *added, out = shapes
            if k != k2 or out != (m, n):
                yield f"[{m}, {k}] x [{k2}, {n}] does not fit into {list(out)}"
            if added and added != [out]:
                yield f"{list(added[0])} is added to a product of {list(out)}: give {list(out)}"
            if added and self.accumulate:
                yield "an addmm adds to its third input, and does not accumulate: take matmul with accumulate=True"
        elif self.op == "embedding_bag":
            (m, _), (_, n), out = shapes
            if out != (m, n):
                yield f"the bags of {m} rows and {n} columns of tables do not fit into {list(out)}"
        elif len(set(shapes)) > 1:
            yield f"shapes differ: {shapes}"

    def _wrong_scaling(self, shapes: list[tuple[Index, Index]], dtypes: list[str]) -> Iterator[str]:
        (m, k), (k2, n), *scales, out = shapes
        bias, scales = scales[2:], scales[:2]
        if k != k2 or out != (m, n):
            yield f"[{m}, {k}] x [{k2}, {n}] does not fit into {list(out)}"
        if scales not in ([(1, 1), (1, 1)], [(m, 1), (1, n)]):
            yield f"scales of [{m}, {k}] x [{k2}, {n}] are {scales}: give [1, 1] and [1, 1], or [{m}, 1] and [1, {n}]"
        if bias not in ([], [(1, n)]):
            yield f"a bias of {list(bias[0])} does not fit to {list(out)}: give [1, {n}]"
        wanted = ["fp8", "fp8", "fp32", "fp32", *["bf16" if dtypes[-1] == "fp8" else dtypes[-1]] * len(bias)]
        if dtypes[:-1] != wanted or dtypes[-1] not in ("bf16", "fp16", "fp32", "fp8"):
            yield (
                f"dtypes are {', '.join(dtypes)}: fp8 operands with fp32 scales, and a bias as the output, in bf16, fp16 or "
                "fp32, or an output in fp8 and a bias in bf16"
            )
        if self.accumulate:
            yield "a scaled matmul does not accumulate"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"{self.op} {self.out.buffer}{at(self.out.at)}"

    def __str__(self) -> str:
        sign = "+=" if self.accumulate else "="
        return f"{self.op:<7} {self.out} {sign} {', '.join(str(r) for r in self.inputs)}"


@dataclass(frozen=True, slots=True)
class Reduce(Step):
    """out = the sum of `parts`, added up in fp32 (fp64 in itself) in their order and rounded once; or out += with `accumulate`.
    Behind the first, a part of one row is added to each of out's. norm: of out, as it was rounded. A step whose only part is its
    own out adds nothing up and writes its norm alone."""

    kind: ClassVar[str] = "reduce"
    out: Region
    parts: tuple[Region, ...]
    accumulate: bool = False
    norm: Norm | None = None

    @property
    def norms_only(self) -> bool:
        """Whether there is nothing to add up."""
        return self.norm is not None and self.parts == (self.out,) and not self.accumulate

    def accesses(self) -> tuple[Access, ...]:
        reads, writes = [*map(read, self.parts)], [] if self.norms_only else [written(self.out, self.accumulate)]
        if self.norm is not None:
            reads, writes = [*reads, read(self.norm.weight)], [written(self.norm.out), *writes]
        return *reads, *writes

    @property
    def needs_unit(self) -> bool:
        return True

    @property
    def in_place(self) -> bool:
        return True

    def faults(self, where: Declared) -> Iterator[str]:
        yield from differing([where.dtype(access.region) for access in self.accesses()])
        if not self.parts:
            yield "there is nothing to add up: name one part at least"
        else:
            of_rows = {(part.rows, part.cols) for part in self.parts[1:]} - {(1, self.out.cols)}
            if len(shapes := of_rows | {(one.rows, one.cols) for one in (self.parts[0], self.out)}) > 1:
                yield f"shapes differ: {sorted(map(str, shapes))}"
        if where.dtype(self.out) not in SUMMED:
            yield f"{where.dtype(self.out)} is not added up: {', '.join(SUMMED)} are"
        if self.norm is not None:
            yield from self._wrong_norm(self.norm)

    def _wrong_norm(self, norm: Norm) -> Iterator[str]:
        normed, shape = (norm.out.rows, norm.out.cols), (self.out.rows, self.out.cols)
        weight = (norm.weight.rows, norm.weight.cols)
        if normed != shape:
            yield f"the norm's out is {list(normed)}: give {list(shape)}, as the sum"
        if weight != (1, self.out.cols):
            yield f"the norm's weight is {list(weight)}: give [1, {self.out.cols}]"
        if (norm.out.buffer, norm.out.at) == (self.out.buffer, self.out.at) and overlap(
            box_of(norm.out), box_of(self.out)
        ):
            yield "a sum and its norm are written in one place: give each its own"
        if self.accumulate:
            yield "a sum that is added to what is there is not normed, since others may add to that too: norm it when all have"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        total = f"{self.out.buffer}{at(self.out.at)}"
        if self.norm is None:
            return f"reduce {total}"
        normed = f"{self.norm.out.buffer}{at(self.norm.out.at)}"
        return f"norm {total} -> {normed}" if self.norms_only else f"reduce {total}, norm {normed}"

    def __str__(self) -> str:
        total = f"{self.out} {'+=' if self.accumulate else '='} {' + '.join(map(str, self.parts))}"
        if self.norm is None:
            return f"reduce  {total}"
        normed = self.norm.text_of(self.out)
        return f"reduce  {normed}" if self.norms_only else f"reduce  {total}; {normed}"
