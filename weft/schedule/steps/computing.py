"""Steps that compute: GEMMs, elementwise operations and pooling (`Compute`), and sums of regions (`Reduce`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from weft.schedule.expr import Index
from weft.schedule.regions import SUMMED, Access, Declared, Norm, Region, box_of, overlap, read, written
from weft.schedule.steps.base import Step, differing


@dataclass(frozen=True, slots=True)
class Op:
    """The signature and cost of an operation.

    inputs: the maximum number of inputs.
    optional: the number of inputs, counted from the last, that may be omitted.
    flops_per_element: FLOPs per output element, for operations other than GEMMs.
    """

    inputs: int
    flops_per_element: float = 0.0
    optional: int = 0

    def takes(self, inputs: int) -> bool:
        return self.inputs - self.optional <= inputs <= self.inputs

    @property
    def numbers(self) -> str:
        """The valid numbers of inputs, for error texts, such as "4 or 5"."""
        return " or ".join(map(str, range(self.inputs - self.optional, self.inputs + 1)))


# matmul: a [m, k] @ b [k, n] -> [m, n], 2k flops per element.
# addmm: a, b, c [m, n] -> a @ b + c, rounded once. c must not be the output.
# scaled_matmul: fp8 a and b, then fp32 scale_a and scale_b, then an optional bias [1, n] in the output's dtype ->
#     (a * scale_a) @ (b * scale_b) + bias. The scales are [1, 1] and [1, 1] (tensor-wise), or [m, 1] and [1, n]
#     (row-wise).
# scaled_matmul_fast: the same, with cuBLAS's fast accumulation.
# embedding_bag: ids [m, bags], tables [rows, n] -> [m, n]. The tables are concatenated along columns. A bag sums `rows` rows
#     on average, selected by its ids.
# The other operations are elementwise.
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
    """out = op(*inputs), or out += op(*inputs) with `accumulate`. The comment above `OPS` defines the operations."""

    kind: ClassVar[str] = "compute"
    op: str
    out: Region
    inputs: tuple[Region, ...]
    accumulate: bool = False

    def accesses(self) -> tuple[Access, ...]:
        return *map(read, self.inputs), written(self.out, self.accumulate)

    def on(self, regions: Sequence[Region]) -> Compute:
        """Return a copy of the step with the operands `regions`: the inputs, then the output."""
        *inputs, out = regions
        return Compute(self.op, out, tuple(inputs), self.accumulate)

    @property
    def needs_unit(self) -> bool:
        return True

    @property
    def multiplies(self) -> bool:
        return self.op in MATMULS

    @property
    def in_place(self) -> bool:
        return not self.multiplies

    def faults(self, where: Declared) -> Iterator[str]:
        dtypes = [where.dtype(region) for region in (*self.inputs, self.out)]
        shapes = [(region.rows, region.cols) for region in (*self.inputs, self.out)]
        if self.op not in SCALED_MATMULS:
            yield from differing(dtypes[1:] if self.op == "embedding_bag" else dtypes)
        if self.op not in OPS:
            yield f"op {self.op!r} is not known; use one of {', '.join(OPS)}"
        elif not OPS[self.op].takes(len(self.inputs)):
            yield f"{self.op} has {len(self.inputs)} inputs: pass {OPS[self.op].numbers}"
        elif self.op in SCALED_MATMULS:
            yield from self._wrong_scaling(shapes, dtypes)
        elif self.op in PLAIN_MATMULS:
            (m, k), (k2, n), *added, out = shapes
            if k != k2 or out != (m, n):
                yield f"[{m}, {k}] @ [{k2}, {n}] -> {list(out)} must have shapes [m, k] @ [k, n] -> [m, n]"
            if added and added != [out]:
                yield f"the third input of addmm has shape {list(added[0])}: it must have the shape of out, {list(out)}"
            if added and self.accumulate:
                yield ("addmm already adds its third input, so it cannot accumulate: use matmul with accumulate=True")
        elif self.op == "embedding_bag":
            (m, _), (_, n), out = shapes
            if out != (m, n):
                yield f"out has shape {list(out)}: for {m} rows of bags and {n} columns of tables it must be [{m}, {n}]"
        elif len(set(shapes)) > 1:
            yield f"shapes differ: {shapes}; they must be equal"

    def _wrong_scaling(self, shapes: list[tuple[Index, Index]], dtypes: list[str]) -> Iterator[str]:
        (m, k), (k2, n), *scales, out = shapes
        bias, scales = scales[2:], scales[:2]
        if k != k2 or out != (m, n):
            yield f"[{m}, {k}] @ [{k2}, {n}] -> {list(out)} must have shapes [m, k] @ [k, n] -> [m, n]"
        if scales not in ([(1, 1), (1, 1)], [(m, 1), (1, n)]):
            yield f"scales of [{m}, {k}] @ [{k2}, {n}] have shapes {scales}: give [1, 1] and [1, 1], or [{m}, 1] and [1, {n}]"
        if bias not in ([], [(1, n)]):
            yield f"the bias of an output of shape {list(out)} has shape {list(bias[0])}: give [1, {n}]"
        wanted = ["fp8", "fp8", "fp32", "fp32", *["bf16" if dtypes[-1] == "fp8" else dtypes[-1]] * len(bias)]
        if dtypes[:-1] != wanted or dtypes[-1] not in ("bf16", "fp16", "fp32", "fp8"):
            yield (
                f"the dtypes are {', '.join(dtypes)}: use fp8 for the operands, fp32 for the scales, and bf16, fp16 or fp32 for "
                "the output and the bias. If the output is fp8, use bf16 for the bias"
            )
        if self.accumulate:
            yield "a scaled matmul does not accumulate: omit accumulate=True, and add its output in another step"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"{self.op} {self.out.buffer}{at(self.out.at)}"

    def __str__(self) -> str:
        sign = "+=" if self.accumulate else "="
        return f"{self.op:<7} {self.out} {sign} {', '.join(str(r) for r in self.inputs)}"


@dataclass(frozen=True, slots=True)
class Reduce(Step):
    """out = sum(parts), or out += sum(parts) with `accumulate`. Parts are added in order, in fp32 (fp64 for fp64), and
    the sum is rounded once.

    A part with one row, except the first part, is broadcast over the rows of out.

    norm: an RMSNorm of the rounded `out`, which the step also writes; None for no norm. With parts=(out,) and a norm, the
        step reads `out`, and writes only the norm.
    """

    kind: ClassVar[str] = "reduce"
    out: Region
    parts: tuple[Region, ...]
    accumulate: bool = False
    norm: Norm | None = None

    @property
    def norms_only(self) -> bool:
        """True if the step writes only a norm: `norm` is set, `out` is the only summand, and `accumulate` is False."""
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
            yield "there is nothing to reduce: pass at least one region"
        else:
            of_rows = {(part.rows, part.cols) for part in self.parts[1:]} - {(1, self.out.cols)}
            if len(shapes := of_rows | {(one.rows, one.cols) for one in (self.parts[0], self.out)}) > 1:
                yield f"shapes differ: {sorted(map(str, shapes))}; they must be equal"
        if where.dtype(self.out) not in SUMMED:
            yield f"{where.dtype(self.out)} cannot be reduced: use one of {', '.join(SUMMED)}"
        if self.norm is not None:
            yield from self._wrong_norm(self.norm)

    def _wrong_norm(self, norm: Norm) -> Iterator[str]:
        normed, shape = (norm.out.rows, norm.out.cols), (self.out.rows, self.out.cols)
        weight = (norm.weight.rows, norm.weight.cols)
        if normed != shape:
            yield f"the norm's out has shape {list(normed)}: it must be {list(shape)}, the shape of the sum"
        if weight != (1, self.out.cols):
            yield f"the norm's weight has shape {list(weight)}: it must be [1, {self.out.cols}]"
        if (norm.out.buffer, norm.out.at) == (self.out.buffer, self.out.at) and overlap(
            box_of(norm.out), box_of(self.out)
        ):
            yield "out and the norm's out overlap: use different regions"
        if self.accumulate:
            yield (
                "an accumulating reduce cannot have a norm, because other steps may add to its out later: compute the norm "
                "in a step after the last of them"
            )

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
