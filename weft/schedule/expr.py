"""Integer expressions over the rank, loop indices, and contents of buffers.

A schedule is written once for all ranks. A number that depends on the rank is an `Expr`, made by ordinary arithmetic with
variables such as `RANK`, and evaluated for each rank:

    peer = (RANK + 1) % 4
    value(peer, rank=3) == 0;  str(peer) == "(rank + 1) % 4";  Expr("(rank + 1) % 4") == peer

JSON files contain the text of an expression. Use `lookup((5, 3, 8), RANK)` for numbers without a formula, such as the
rows of uneven shards. For sizes that are known only at run time, use for example `total("counts", 0, RANK)`: the sum of
the first `RANK` elements of this rank's buffer `counts`.
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
"""The AST node, symbol and precedence of each operator."""


class Expr:
    """An integer expression: + - * // % over variables, lookups in tables of numbers, and sums over contents of buffers."""

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
        ) as error:  # the parser raises MemoryError if the nesting is too deep
            raise ValueError(f"{str(source)[:80]!r} is not a valid schedule expression: {error}") from error
        self._node = node
        self._compiled: tuple[CodeType, frozenset[str]] | None = None

    def _code(self) -> tuple[CodeType, frozenset[str]]:
        # Compile on first use: only evaluation for a single rank needs compiled code, and many expressions of a large
        # schedule are evaluated for all ranks together.
        if self._compiled is None:
            self._compiled = _compiled(self.text)
        return self._compiled

    def variables(self) -> frozenset[str]:
        """Return the names of all variables. For a sum over a buffer, the variable is the buffer's name."""
        return _names_in(self.text)

    def evaluate(self, values: Values) -> int:
        code, variables = self._code()
        if not variables <= values.keys():
            missing = ", ".join(sorted(variables - values.keys()))
            raise ValueError(f"{self.text} needs a value for {missing}; given: {values}")
        try:
            return int(eval(code, _GLOBALS, values))
        except (ZeroDivisionError, IndexError, TypeError) as error:  # such as TypeError for sum(rank[0:1])
            raise ValueError(f"{self.text} has no value for {values}: {error}") from error

    def evaluated_over(self, values: Mapping[str, Any], known: dict[int, Any] | None = None) -> int | np.ndarray:
        """Evaluate the expression elementwise for arrays of values, such as all ranks. Return an array, or an
        int if all values are ints.

        known: a cache of the values of subexpressions, keyed by the `id` of the AST node. Pass the same dict to several
            calls with the same `values`, so that shared subexpressions are evaluated once. Keep the expressions alive
            as long as `known`, because Python reuses ids.
        """
        return nodes.evaluated_over(self._node, values, known)

    def period(self, name: str) -> int:
        """Return a period p of the expression in the variable `name`: adding p to the variable does not change the expression's
        value. Return 0 if no period is known.
        """
        return _period_of(self, name)

    def parts_over(self, values: Mapping[str, Any], without: str, known: dict[int, Any]) -> None:
        """Evaluate the largest subexpressions without the variable `without`, and add them to `known`, the cache of
        `evaluated_over`.

        Later calls of `evaluated_over` with other values of `without` then reuse them.
        """
        for part in _parts_without(self, without):
            if id(part) not in known:
                known[id(part)] = nodes.evaluated_over(part, values)

    def totals(self) -> tuple[int, tuple[Total, ...]]:
        """Split this expression, a sum of numbers and `total(...)` terms. Return (the sum of the numbers, the `total` terms).

        Raise `ValueError` for any other expression.
        """
        return nodes.totals_of(self._node)

    def partially_evaluated(self, values: Values) -> Index:
        """Substitute the variables that have a value in `values`. Return an int if no variable is left, otherwise an
        expression.
        """
        given = tuple((name, values[name]) for name in self.variables() if name in values)
        may_be_kept = all(isinstance(one, int | tuple) for _, one in given)
        return _substitute_once(self, given) if may_be_kept else _substitute(self, given)

    def __int__(self) -> int:
        return self.evaluate({})

    def __add__(self, other: Index) -> Index:
        return self if _is(other, 0) else _join(self, ast.Add(), other)

    def __radd__(self, other: int) -> Index:
        return self if _is(other, 0) else _join(other, ast.Add(), self)

    def __sub__(self, other: Index) -> Index:
        return self if _is(other, 0) else _join(self, ast.Sub(), other)

    def __rsub__(self, other: int) -> Index:
        return _join(other, ast.Sub(), self)

    def __mul__(self, other: Index) -> Index:
        return self if _is(other, 1) else 0 if _is(other, 0) else _join(self, ast.Mult(), other)

    def __rmul__(self, other: int) -> Index:
        return self * other

    def __floordiv__(self, other: Index) -> Index:
        return self if _is(other, 1) else _join(self, ast.FloorDiv(), other)

    def __mod__(self, other: Index) -> Index:
        return 0 if _is(other, 1) else _join(self, ast.Mod(), other)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self.text} has no truth value while the schedule is being written. "
            f"Do not use it in if, and, or, not: {_PER_RANK}"
        )

    def __eq__(self, other: object) -> bool:
        # Comparing an expression with a number must not raise, because comparing steps compares their fields. So `RANK
        # == 1` is False, and the body of `if RANK == 1:` never runs. `require_index` refuses a bool that comes from
        # such a comparison.
        return isinstance(other, Expr) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Expr({self.text!r})"

    def __reduce__(self) -> tuple[type[Expr], tuple[str]]:
        return Expr, (self.text,)  # code objects cannot be pickled, but schedules are sent to other processes


@lru_cache(maxsize=1 << 13)  # cached for the reason given at `_joined`
def _compiled(text: str) -> tuple[CodeType, frozenset[str]]:
    return compile(text, "<expr>", "eval"), _names_in(text)


_NAME = re.compile(r"\b[^\W\d]\w*")


@lru_cache(maxsize=1 << 13)  # cached for the reason given at `_joined`
def _names_in(text: str) -> frozenset[str]:
    # Search the text: reading the names from compiled code would take milliseconds for a sum over hundreds of ranks.
    return frozenset(_NAME.findall(text)) - {"sum"}


def _substitute(expression: Expr, given: tuple[tuple[str, Any], ...]) -> Index:
    if not given:
        return expression if expression.variables() else int(expression)
    node = _partially_evaluated(expression._node, dict(given))
    if isinstance(node, ast.Constant):
        return int(cast(int, node.value))
    rest = Expr(node)
    return rest if rest.variables() else int(rest)


_substitute_once = lru_cache(maxsize=1 << 13)(_substitute)  # cached for the reason given at `_joined`


Index: TypeAlias = int | Expr
Values: TypeAlias = Mapping[str, int | Sequence[int] | PrefixSums]
"""The value of each variable, by name: a number, or the contents of a buffer, row by row."""


_PER_RANK = "for a value that differs between ranks, write lookup((0, 1), RANK) or arithmetic with RANK"


INDEX_TYPES = frozenset({int, Expr})
"""Types that are always valid as an `Index`."""


def require_index(index: Index, what: str) -> None:
    """Raise `TypeError` unless `index` is an integer or an `Expr`.

    what: the name of the number in the error text.

    A bool is also refused: it usually comes from `RANK == 1`, which Python evaluates to False before any rank is known.
    """
    if isinstance(index, bool):
        raise TypeError(
            f"{what} is {index}, but must be an integer or an expression, not a bool. Python evaluates a comparison such as "
            f"RANK == 1 once, while the schedule is being written, not on each rank: {_PER_RANK}"
        )
    if not isinstance(index, Expr) and not hasattr(index, "__index__"):
        raise TypeError(
            f"{what} is {index!r}: {kind(index)} is neither an integer nor an expression of the rank; divide with //"
        )


def value(index: Index, **variables: int) -> int:
    """Return `index` as an int. If it is an expression, pass the values of its variables as `variables`."""
    return index.evaluate(variables) if isinstance(index, Expr) else index


def total(buffer: str, first: Index, end: Index, step: int = 1) -> Index:
    """Return the expression sum(buffer[first:end:step]), which is evaluated at run time.

    buffer: the name of a buffer. Its contents on this rank are flattened row by row.
    """
    return 0 if isinstance(first, int) and isinstance(end, int) and first >= end else _total(buffer, first, end, step)


@lru_cache(maxsize=1 << 13)  # cached for the reason given at `_joined`
def _total(buffer: str, first: Index, end: Index, step: int) -> Expr:
    part = ast.Slice(_node_of(first), _node_of(end), None if step == 1 else ast.Constant(step))
    held = ast.Subscript(ast.Name(buffer, ast.Load()), part, ast.Load())
    return Expr(ast.Call(ast.Name("sum", ast.Load()), [held], []))


def lookup(table: Sequence[int], index: Index) -> Index:
    """Return the expression `table[index]`. The result is an int if `index` is an int, or if all entries are equal."""
    require_index(index, "index")
    if not INDEX_TYPES.issuperset(map(type, table)):
        for entry in table:
            require_index(entry, "an entry of the table")
    if len(set(table)) == 1:
        return table[0]
    if isinstance(index, int):
        return table[index]
    return _looked_up(tuple(table), index)


@lru_cache(maxsize=1 << 13)  # cached for the reason given at `_joined`
def _looked_up(table: tuple[int, ...], index: Expr) -> Expr:
    return Expr(ast.Subscript(_tuple(table), index._node, ast.Load()))


def _tuple(numbers: Sequence[int]) -> ast.Tuple:
    return ast.Tuple([ast.Constant(int(number)) for number in numbers], ast.Load())


def _is(index: Index, number: int) -> bool:
    """Return True if `index` is this integer. Equal bools and floats are no operands: `_join` refuses them."""
    return index == number and hasattr(index, "__index__") and not isinstance(index, bool)


def _join(left: Index, sign: ast.operator, right: Index) -> Expr:
    return _joined(left, type(sign), right)  # type: ignore[arg-type]  # mypy takes the class's `__hash__` for its instances'


# The candidates for dozens of ranks repeat a few expressions a hundred thousand times. `typed`, because 1.0 == 1 == True.
@lru_cache(maxsize=1 << 14, typed=True)
def _joined(left: Index, sign: type[ast.operator], right: Index) -> Expr:
    made = Expr.__new__(Expr)  # skip `check`: both parts passed it, and a sum of n terms would be checked n times
    node, symbol, binds = _SIGNS[sign]
    made._node, made._compiled = ast.BinOp(_node_of(left), node, _node_of(right)), None
    made.text = f"{_operand(left, binds)} {symbol} {_operand(right, binds + 1)}"
    return made


def _operand(index: Index, binds: int) -> str:
    """Return the text of an operand, in parentheses if needed, exactly as `ast.unparse` writes it.

    binds: the precedence of the operator to which the operand belongs.
    """
    sign = index._node.op if isinstance(index, Expr) and isinstance(index._node, ast.BinOp) else None
    return f"({index})" if sign is not None and _SIGNS[type(sign)][2] < binds else str(index)


def _node_of(index: Index) -> ast.expr:
    if isinstance(index, Expr):
        return index._node
    require_index(index, "an operand of an expression")
    return _constant(int(index))


@lru_cache(maxsize=1 << 13)  # expressions can share nodes, because nothing changes a node
def _constant(number: int) -> ast.Constant:
    return ast.Constant(number)


def _sum(part: int | Sequence[int]) -> int:
    return part if isinstance(part, int) else sum(part)


_GLOBALS = {"__builtins__": {}, "sum": _sum}


@lru_cache(maxsize=1 << 12)  # the same expressions are evaluated for all ranks
def _period_of(expression: Expr, name: str) -> int:
    return nodes.period_of(expression._node, name) if name in expression.text else 1


@lru_cache(maxsize=1 << 12)  # the cache also keeps the parts alive, so that Python does not reuse their ids
def _parts_without(expression: Expr, name: str) -> tuple[ast.expr, ...]:
    parts: list[ast.expr] = []
    if nodes.split_without(expression._node, name, parts):
        parts.append(expression._node)
    return tuple(parts)


def _partially_evaluated(node: ast.expr, values: Values) -> ast.expr:
    """Return the AST with variables replaced by their values, and subexpressions without variables evaluated."""
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
    """Return the value of an expression without variables."""
    match node:
        case ast.BinOp(left=ast.Constant(value=int(left)), op=sign, right=ast.Constant(value=int(right))) if right:
            return int(nodes.OPERATORS[type(sign)](left, right))
    return int(Expr(node))


RANK = Expr("rank")
