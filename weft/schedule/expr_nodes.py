"""Parse, check and evaluate the ASTs of expressions, and find their periods (an expression with period p has the same
value for t and t + p).

`weft.schedule.expr` builds these ASTs. `check` lists the kinds of nodes that they may contain: arithmetic, tables and
sums.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


MOST_LETTERS, MOST_DEPTH, MOST_NUMBER, MOST_STRIDE = 1 << 16, 200, 1 << 60, 1 << 20
"""Limits of expressions that are parsed from text. The depth of a sum is its number of terms."""


class PrefixSums:
    """Prefix sums of a buffer's contents (flattened row by row), with which the sum of any slice takes constant time."""

    def __init__(self, contents: Sequence[int]) -> None:
        self.contents = np.asarray(contents, np.int64)
        self._sums: dict[int, np.ndarray] = {}

    def __getitem__(self, part: slice) -> int:
        """Return the sum of the elements in the slice `part`. A compiled expression with `sum(buffer[first:end])` calls
        this method, so the expression reads no elements.
        """
        first, end, step = part.indices(len(self.contents))
        sums = self._to_the_end(step)
        return int(sums[first] - sums[first + len(range(first, end, step)) * step])

    def sums(self, first: Any, end: Any, step: int) -> np.ndarray:
        """Return an array with the sum of each slice [first[i]:end[i]:step]. first, end: arrays or numbers, at least 0."""
        sums, first = self._to_the_end(step), np.asarray(first)
        last = first + np.maximum(0, -((first - end) // step)) * step
        found: np.ndarray = sums.take(first, mode="clip") - sums.take(last, mode="clip")
        return found

    def _to_the_end(self, step: int) -> np.ndarray:
        if step not in self._sums:
            whole = np.zeros((len(self.contents) // step + 2) * step, np.int64)
            whole[: len(self.contents)] = self.contents
            self._sums[step] = whole.reshape(-1, step)[::-1].cumsum(0)[::-1].ravel()
        return self._sums[step]


class Total(NamedTuple):
    """The term sum(buffer[first:end:step]) of an expression."""

    buffer: str
    first: int
    end: int
    step: int


def evaluated_over(node: ast.expr, values: Mapping[str, int | np.ndarray], parts: dict[int, Any] | None = None) -> Any:
    """Evaluate an AST elementwise for arrays of values. parts: the cache `known` of `Expr.evaluated_over`."""
    match node:
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(operand=operand):
            return -evaluated_over(operand, values, parts)
        case ast.BinOp(left=left, op=sign, right=right):
            if parts is not None and id(node) in parts:
                return parts[id(node)]
            made = OPERATORS[type(sign)](evaluated_over(left, values, parts), evaluated_over(right, values, parts))
            if parts is not None:
                parts[id(node)] = made
            return made
        case ast.Subscript(value=ast.Tuple(elts=entries) as table, slice=index):
            numbers = numbers_of(table)
            found: np.ndarray = (
                np.array([evaluated_over(entry, values, parts) for entry in entries]) if numbers is None else numbers
            )
            return found[evaluated_over(index, values, parts)]
        case ast.Call(args=[ast.Subscript(value=held, slice=ast.Slice(lower=lower, upper=upper, step=step))]):
            known: Any = values if isinstance(held, ast.Name) else {}
            contents = (
                [evaluated_over(e, values, parts) for e in held.elts]
                if isinstance(held, ast.Tuple)
                else known[_name(held)]
            )
            stride = 1 if step is None else int(evaluated_over(step, values, parts))
            summed = contents if isinstance(contents, PrefixSums) else PrefixSums(contents)
            first, end = (evaluated_over(known_bound(bound), values, parts) for bound in (lower, upper))
            return summed.sums(first, end, stride)
        case ast.Constant(value=value):
            return value
    raise AssertionError(f"`check` should have refused {ast.unparse(node)}")


@lru_cache(maxsize=64)  # many expressions share a table, which may have thousands of numbers
def numbers_of(table: ast.Tuple) -> np.ndarray | None:
    """Return the entries of a lookup table as an array; None if an entry is an expression."""
    if not all(isinstance(entry, ast.Constant) for entry in table.elts):
        return None
    return np.array([cast(ast.Constant, entry).value for entry in table.elts])


def _name(node: ast.expr) -> str:
    assert isinstance(node, ast.Name)
    return node.id


def known_bound(node: ast.expr | None) -> ast.expr:
    """Return `node`, the bound of a slice, with a type that excludes None. `check` has refused slices without bounds."""
    assert node is not None  # check refuses slices without both bounds
    return node


def totals_of(node: ast.expr) -> tuple[int, tuple[Total, ...]]:
    """Split `node`, a sum of numbers and of sums over buffers. Return (the sum of the numbers, the sums over buffers). Raise
    `ValueError` for other ASTs.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number, ()
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            (a, some), (b, more) = totals_of(left), totals_of(right)
            return a + b, some + more
        case ast.Call(
            args=[ast.Subscript(value=ast.Name(id=name), slice=ast.Slice(lower=lower, upper=upper, step=step))]
        ):
            numbers = [1 if bound is None else totals_of(bound) for bound in (lower, upper, step)]
            bounds = [bound if isinstance(bound, int) else bound[0] for bound in numbers]
            if all(isinstance(bound, int) or not bound[1] for bound in numbers):
                return 0, (Total(name, *bounds),)
    raise ValueError(
        f"{ast.unparse(node)} has a term that is neither a number nor total(...): write a sum of numbers and total(...)"
    )


def period_of(node: ast.AST, name: str) -> int:
    """Return a period p of `node` in the variable `name`: adding p to the variable does not change the value of `node`. Return
    0 if no period is known.
    """
    match node:
        case ast.BinOp(left=ast.Name(id=found), op=ast.Mod(), right=ast.Constant(value=int(modulus))) if found == name:
            return abs(modulus)
        case ast.Name(id=found) if found == name:
            return 0
        case ast.Subscript(value=ast.Tuple() as table, slice=index) if numbers_of(table) is not None:
            return period_of(index, name)
    period = 1
    for part in ast.iter_child_nodes(node):
        period = math.lcm(period, period_of(part, name))
        if not period:  # the period is unknown, whatever the other terms are
            break
    return period


def split_without(node: ast.expr, name: str, parts: list[ast.expr]) -> bool:
    """Return True if `node` does not depend on the variable `name`.

    Otherwise append to `parts` the largest subexpressions that do not depend on `name`, except constants, and return
    False.
    """
    match node:
        case ast.Name(id=found):
            return found != name
        case ast.Constant():
            return True
        case ast.BinOp(left=left, right=right):
            inner = [left, right]
        case ast.UnaryOp(operand=operand):
            inner = [operand]
        case ast.Subscript(value=ast.Tuple(elts=entries) as table, slice=index):
            inner = [index, *([] if numbers_of(table) is not None else entries)]
        case ast.Call(args=[ast.Subscript(value=held, slice=ast.Slice(lower=lower, upper=upper, step=step))]):
            inner = [known_bound(lower), known_bound(upper), *([] if step is None else [step])]
            inner += held.elts if isinstance(held, ast.Tuple) else []
        case _:
            raise AssertionError(f"`check` should have refused {ast.unparse(node)}")
    found_parts: list[ast.expr] = []
    free = [(one, split_without(one, name, found_parts)) for one in inner]
    if all(is_free for _, is_free in free):
        return True
    parts += found_parts
    parts += [one for one, is_free in free if is_free and not isinstance(one, ast.Constant)]
    return False


def parsed(text: str) -> ast.expr:
    """Parse an expression. Raise `SyntaxError` if it is invalid, or exceeds the limits on length, depth and numbers."""
    if len(text) > MOST_LETTERS:
        raise SyntaxError(f"the expression has {len(text)} characters, but at most {MOST_LETTERS} are allowed")
    node = ast.parse(text, mode="eval").body
    left: list[tuple[ast.AST, int]] = [(node, 1)]
    while left:
        part, depth = left.pop()
        if depth > MOST_DEPTH:
            raise SyntaxError(
                f"the expression is nested too deeply: at most {MOST_DEPTH} levels are allowed (each term of a sum is a level)"
            )
        if isinstance(part, ast.Constant) and isinstance(part.value, int) and part.value > MOST_NUMBER:
            raise SyntaxError(
                f"the expression has a number of {part.value.bit_length()} bits, but numbers may be at most 2**60"
            )
        left += [(inner, depth + 1) for inner in ast.iter_child_nodes(part)]
    return node


def check(node: ast.expr) -> None:
    """Raise `ValueError` if the AST contains anything but arithmetic, tables and sums.

    Expressions are passed to `eval`, so without this check an expression from a file could run any code.
    """
    match node:
        case ast.Constant(value=bool()):
            raise ValueError(f"{ast.unparse(node)!r} is a bool: write an integer or a variable of the schedule")
        case ast.Name(id="sum"):
            raise ValueError(
                f"{ast.unparse(node)!r} cannot be a variable of a schedule: write sums as sum(buffer[first:end])"
            )
        case ast.Constant(value=int()) | ast.Name():
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            check(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            check(left)
            check(right)
        case ast.Subscript(value=ast.Tuple(elts=entries), slice=index):
            for entry in entries:
                check(entry)
            check(index)
        case ast.Call(
            func=ast.Name(id="sum"), keywords=[],
            args=[ast.Subscript(value=ast.Name() | ast.Tuple() as held, slice=ast.Slice() as part)],
        ) if part.lower is not None and part.upper is not None:  # fmt: skip
            for inner in held.elts if isinstance(held, ast.Tuple) else []:
                check(inner)
            check(part.lower)
            check(part.upper)
            if part.step is not None and not (
                isinstance(part.step, ast.Constant)
                and isinstance(part.step.value, int)
                and 1 <= part.step.value <= MOST_STRIDE
            ):
                raise ValueError(
                    f"{ast.unparse(node)!r}: the stride in sum(buffer[first:end:stride]) must be an integer between 1 and "
                    f"{MOST_STRIDE}"
                )
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r} is not an expression of a schedule: use + - * // %, variables, integers, tables "
                f"such as (5, 3)[rank], and sum(buffer[first:end])"
            )
