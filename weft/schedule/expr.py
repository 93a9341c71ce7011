"""Integers that a schedule leaves open: the rank, the index of a loop, the contents of a buffer.

A schedule is written once for all ranks. A number that depends on the rank is an `Expr`, made by ordinary arithmetic from
variables. It becomes a number when the rank is substituted:

    peer = (RANK + 1) % 4
    value(peer, rank=3) == 0;  str(peer) == "(rank + 1) % 4";  Expr("(rank + 1) % 4") == peer

Its text is also its form in JSON. `lookup((5, 3, 8), RANK)` is a number that follows no formula, such as the rows of uneven
shards. `total("counts", 0, RANK)` is the sum of the first elements of this rank's buffer `counts` at the time of the run: it
writes sizes that only the device knows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, TypeAlias, cast

import numpy as np

from weft.schedule import expr_nodes as nodes
from weft.schedule.expr_nodes import PrefixSums, Total
from weft.words import kind

_SIGNS: dict[type[ast.operator], tuple[ast.operator, str, int]] = {
    ast.Add: (ast.Add(), "+", 1), ast.Sub: (ast.Sub(), "-", 1), ast.Mult: (ast.Mult(), "*", 2),
    ast.FloorDiv: (ast.FloorDiv(), "//", 2), ast.Mod: (ast.Mod(), "%", 2),
}  # fmt: skip
"""For each operator: its node, its symbol and its precedence."""


class Expr:
    """An expression over variables with + - * // %, lookups in tables of numbers, and sums over contents of buffers."""

    __slots__ = ("_compiled", "_node", "text")

    def __init__(self, source: str | ast.expr) -> None:
        try:
            node = nodes.parsed(source) if isinstance(source, str) else source
            nodes.check(node)
            self.text = ast.unparse(node)
        except (
            SyntaxError,
            RecursionError,
            MemoryError,
        ) as error:  # MemoryError: the parser's error for too deep nesting
            raise ValueError(f"{str(source)[:80]!r} is not an expression of a schedule: {error}") from error
        self._node = node
        self._compiled: tuple[CodeType, frozenset[str]] | None = None

    def _code(self) -> tuple[CodeType, frozenset[str]]:
        # Compiled on demand: large schedules have many expressions that are never evaluated one by one.
        if self._compiled is None:
            self._compiled = _compiled(self.text)
        return self._compiled

    def variables(self) -> frozenset[str]:
        """Return the names that need a value; for a summed buffer, the buffer's name."""
        return _names_in(self.text)

    def evaluate(self, values: Values) -> int:
        code, variables = self._code()
        if not variables <= values.keys():
            missing = ", ".join(sorted(variables - values.keys()))
            raise ValueError(f"{self.text} needs a value for {missing}; given: {values}")
        try:
            return int(eval(code, _GLOBALS, values))
        except (ZeroDivisionError, IndexError, TypeError) as error:  # TypeError: sum(rank[0:1])
            raise ValueError(f"{self.text} has no value for {values}: {error}") from error

    def evaluated_over(self, values: Mapping[str, Any], known: dict[int, Any] | None = None) -> int | np.ndarray:
        """Evaluate for many values at once: arrays in, an array out.

        known: results of parts at these values, by the ids of the parts; the results of this call's parts are added. Expressions
        that share parts, such as sums over the same ranks, are then evaluated once. They must outlive `known`.
        """
        return nodes.evaluated_over(self._node, values, known)

    def period(self, name: str) -> int:
        """Return p if the value depends on variable `name` only through `name % p`; 0 if no p is known."""
        return _period_of(self, name)

    def parts_over(self, values: Mapping[str, Any], without: str, known: dict[int, Any]) -> None:
        """Evaluate the largest subexpressions that do not depend on the variable `without`. Add their values to
        `known`, whose keys are the ids of the subexpressions."""
        for part in _parts_without(self, without):
            if id(part) not in known:
                known[id(part)] = nodes.evaluated_over(part, values)

    def totals(self) -> tuple[int, tuple[Total, ...]]:
        """Return (number, totals) of a sum of numbers and totals; raise `ValueError` for any other expression."""
        return nodes.totals_of(self._node)

    def partially_evaluated(self, values: Values) -> Index:
        """Substitute some of the variables; return a plain number if none is left."""
        given = tuple((name, values[name]) for name in self.variables() if name in values)
        may_be_kept = all(isinstance(one, int | tuple) for _, one in given)
        return _substitute_once(self, given) if may_be_kept else _substitute(self, given)

    def __int__(self) -> int:
        return self.evaluate({})

    def __add__(self, other: Index) -> Index:
        return self if other == 0 else _join(self, ast.Add(), other)

    def __radd__(self, other: int) -> Index:
        return self if other == 0 else _join(other, ast.Add(), self)

    def __sub__(self, other: Index) -> Index:
        return self if other == 0 else _join(self, ast.Sub(), other)

    def __rsub__(self, other: int) -> Index:
        return _join(other, ast.Sub(), self)

    def __mul__(self, other: Index) -> Index:
        return self if other == 1 else 0 if other == 0 else _join(self, ast.Mult(), other)

    def __rmul__(self, other: int) -> Index:
        return self * other

    def __floordiv__(self, other: Index) -> Index:
        return self if other == 1 else _join(self, ast.FloorDiv(), other)

    def __mod__(self, other: Index) -> Index:
        return 0 if other == 1 else _join(self, ast.Mod(), other)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self.text} differs between ranks, so it has no truth value here; do not use it in if, and, or, not: {_PER_RANK}"
        )

    def __eq__(self, other: object) -> bool:
        # False for a number. It cannot raise, since comparing steps and regions compares expressions with numbers. So
        # `if RANK == 1:` is never taken; `require_index` refuses the bool of such a comparison.
        return isinstance(other, Expr) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Expr({self.text!r})"

    def __reduce__(self) -> tuple[type[Expr], tuple[str]]:
        return Expr, (self.text,)  # code objects cannot be pickled, and schedules travel to other processes


@lru_cache(maxsize=1 << 13)  # as of `_joined`
def _compiled(text: str) -> tuple[CodeType, frozenset[str]]:
    return compile(text, "<expr>", "eval"), _names_in(text)


_NAME = re.compile(r"\b[^\W\d]\w*")


@lru_cache(maxsize=1 << 13)  # as of `_joined`
def _names_in(text: str) -> frozenset[str]:
    # Not from the compiled code: a sum over hundreds of ranks takes milliseconds to compile, and is mostly evaluated from its node.
    return frozenset(_NAME.findall(text)) - {"sum"}


def _substitute(expression: Expr, given: tuple[tuple[str, Any], ...]) -> Index:
    if not given:
        return expression if expression.variables() else int(expression)
    node = _partially_evaluated(expression._node, dict(given))
    if isinstance(node, ast.Constant):
        return int(cast(int, node.value))
    rest = Expr(node)
    return rest if rest.variables() else int(rest)


_substitute_once = lru_cache(maxsize=1 << 13)(_substitute)  # as of `_joined`


Index: TypeAlias = int | Expr
Values: TypeAlias = Mapping[str, int | Sequence[int] | PrefixSums]
"""Values of variables by name: numbers, and for buffers their contents, row by row."""


_PER_RANK = "write a value that differs between ranks as lookup((0, 1), RANK), or as arithmetic with RANK"


INDEX_TYPES = frozenset({int, Expr})
"""Types that need no further check to be an index."""


def require_index(index: Index, what: str) -> None:
    """Raise `TypeError` for anything but an integer or an expression, and for bools.

    Python evaluates `RANK == 1` to False when the schedule is written, for all ranks."""
    if isinstance(index, bool):
        raise TypeError(
            f"{what}={index}: Python compares expressions when the schedule is written, not on each rank: {_PER_RANK}"
        )
    if not isinstance(index, Expr) and not hasattr(index, "__index__"):
        raise TypeError(
            f"{what}={index!r}: {kind(index)} is neither a whole number nor an expression of the rank; divide with //"
        )


def value(index: Index, **variables: int) -> int:
    """Return the number that `index` has for these values of its variables."""
    return index.evaluate(variables) if isinstance(index, Expr) else index


def total(buffer: str, first: Index, end: Index, step: int = 1) -> Index:
    """Return the sum of elements first, first + step, ... before `end` of this rank's `buffer`, counted row by row."""
    return 0 if isinstance(first, int) and isinstance(end, int) and first >= end else _total(buffer, first, end, step)


@lru_cache(maxsize=1 << 13)  # as of `_joined`
def _total(buffer: str, first: Index, end: Index, step: int) -> Expr:
    part = ast.Slice(_node_of(first), _node_of(end), None if step == 1 else ast.Constant(step))
    held = ast.Subscript(ast.Name(buffer, ast.Load()), part, ast.Load())
    return Expr(ast.Call(ast.Name("sum", ast.Load()), [held], []))


def lookup(table: Sequence[int], index: Index) -> Index:
    """Return `table[index]`; a plain number if all entries are equal."""
    require_index(index, "index")
    if len(set(table)) == 1:
        return table[0]
    if isinstance(index, int):
        return table[index]
    return _looked_up(tuple(table), index)


@lru_cache(maxsize=1 << 13)  # as of `_joined`
def _looked_up(table: tuple[int, ...], index: Expr) -> Expr:
    return Expr(ast.Subscript(_tuple(table), index._node, ast.Load()))


def _tuple(numbers: Sequence[int]) -> ast.Tuple:
    return ast.Tuple([ast.Constant(int(number)) for number in numbers], ast.Load())


def _join(left: Index, sign: ast.operator, right: Index) -> Expr:
    return _joined(left, type(sign), right)  # type: ignore[arg-type]  # mypy takes the class's `__hash__` for its instances'


@lru_cache(maxsize=1 << 14)  # candidates for dozens of ranks have the same few expressions a hundred thousand times
def _joined(left: Index, sign: type[ast.operator], right: Index) -> Expr:
    made = Expr.__new__(Expr)  # its parts were checked when they were made: a long sum grows term by term
    node, symbol, binds = _SIGNS[sign]
    made._node, made._compiled = ast.BinOp(_node_of(left), node, _node_of(right)), None
    made.text = f"{_operand(left, binds)} {symbol} {_operand(right, binds + 1)}"
    return made


def _operand(index: Index, binds: int) -> str:
    """Return the text beside an operator, as `ast.unparse` writes it: in parentheses if the operand's own operator binds less."""
    sign = index._node.op if isinstance(index, Expr) and isinstance(index._node, ast.BinOp) else None
    return f"({index})" if sign is not None and _SIGNS[type(sign)][2] < binds else str(index)


def _node_of(index: Index) -> ast.expr:
    return index._node if isinstance(index, Expr) else _constant(int(index))


@lru_cache(maxsize=1 << 13)  # nodes are immutable: expressions share them
def _constant(number: int) -> ast.Constant:
    return ast.Constant(number)


def _sum(part: int | Sequence[int]) -> int:
    return part if isinstance(part, int) else sum(part)


_GLOBALS = {"__builtins__": {}, "sum": _sum}


@lru_cache(maxsize=1 << 12)  # the same for every rank
def _period_of(expression: Expr, name: str) -> int:
    return nodes.period_of(expression._node, name) if name in expression.text else 1


@lru_cache(maxsize=1 << 12)  # keeps the parts alive, so that no other part gets their identity
def _parts_without(expression: Expr, name: str) -> tuple[ast.expr, ...]:
    parts: list[ast.expr] = []
    if nodes.split_without(expression._node, name, parts):
        parts.append(expression._node)
    return tuple(parts)


def _partially_evaluated(node: ast.expr, values: Values) -> ast.expr:
    """Substitute numbers for names, and fold the parts that have no name left."""
    match node:
        case ast.Name(id=name) if name in values:
            found = values[name]
            return (
                ast.Constant(found)
                if isinstance(found, int)
                else _tuple(found.contents.tolist() if isinstance(found, PrefixSums) else found)
            )
        case ast.BinOp(left=left, op=sign, right=right):
            a, b = _partially_evaluated(left, values), _partially_evaluated(right, values)
            whole: ast.expr = ast.BinOp(a, sign, b)
            known = isinstance(a, ast.Constant) and isinstance(b, ast.Constant)
        case ast.Subscript(value=ast.Tuple(elts=entries) as table, slice=index):
            at = _partially_evaluated(index, values)
            whole = ast.Subscript(table, at, ast.Load())
            known = isinstance(at, ast.Constant) and all(isinstance(entry, ast.Constant) for entry in entries)
        case ast.Call(
            func=function, args=[ast.Subscript(value=held, slice=ast.Slice(lower=lower, upper=upper, step=step))]
        ):
            held, a, b = (
                _partially_evaluated(part, values)
                for part in (held, nodes.known_bound(lower), nodes.known_bound(upper))
            )
            whole = ast.Call(function, [ast.Subscript(held, ast.Slice(a, b, step), ast.Load())], [])
            known = isinstance(held, ast.Tuple) and isinstance(a, ast.Constant) and isinstance(b, ast.Constant)
        case _:
            return node
    return ast.Constant(_folded(whole)) if known else whole


def _folded(node: ast.expr) -> int:
    """Evaluate an expression of numbers. Most are a sum or a product of two numbers, which need no compiler."""
    match node:
        case ast.BinOp(left=ast.Constant(value=int(left)), op=sign, right=ast.Constant(value=int(right))) if right:
            return int(nodes.OPERATORS[type(sign)](left, right))
    return int(Expr(node))


RANK = Expr("rank")
