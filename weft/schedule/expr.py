"""Whole numbers that a schedule leaves open: the rank, the turn of a loop.

A schedule is written once for all ranks. Where a number depends on who runs it, it is an `Expr`, made by ordinary
arithmetic from variables, and becomes a number when a rank is put in:

    peer = (RANK + 1) % 4
    value(peer, rank=3) == 0;  str(peer) == "(rank + 1) % 4";  Expr("(rank + 1) % 4") == peer

Its text is also its form in JSON. `lookup((5, 3, 8), RANK)` is a number that follows no formula, such as the rows of
uneven shards.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TypeAlias

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)


class Expr:
    """An expression over variables with + - * // % and lookups in tables of numbers."""

    __slots__ = ("_code", "_node", "text")

    def __init__(self, source: str | ast.expr) -> None:
        try:
            node = ast.parse(source, mode="eval").body if isinstance(source, str) else source
            _check(node)
        except (SyntaxError, RecursionError, MemoryError) as error:  # MemoryError: the parser's word for too deep
            raise ValueError(f"{str(source)[:80]!r} is no expression of a schedule: {error}") from error
        self._node = node
        self.text = ast.unparse(node)
        self._code = compile(self.text, "<expr>", "eval")

    def variables(self) -> set[str]:
        return set(self._code.co_names)

    def evaluate(self, values: dict[str, int]) -> int:
        missing = self.variables() - values.keys()
        if missing:
            raise ValueError(f"{self.text} needs a value for {', '.join(sorted(missing))}; given: {values}")
        try:
            return int(eval(self._code, {"__builtins__": {}}, values))
        except (ZeroDivisionError, IndexError) as error:
            raise ValueError(f"{self.text} has no value for {values}: {error}") from error

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Expr({self.text!r})"

    def __reduce__(self) -> tuple[type[Expr], tuple[str]]:
        return Expr, (self.text,)  # code objects cannot be pickled, and schedules travel to other processes


Index: TypeAlias = int | Expr


def value(index: Index, **variables: int) -> int:
    """The number that `index` is for these values of its variables."""
    return index.evaluate(variables) if isinstance(index, Expr) else index


def lookup(table: Sequence[int], index: Index) -> Index:
    """`table[index]`; a plain number if all entries are the same."""
    if len(set(table)) == 1:
        return table[0]
    if isinstance(index, int):
        return table[index]
    entries: list[ast.expr] = [ast.Constant(int(entry)) for entry in table]
    return Expr(ast.Subscript(ast.Tuple(entries, ast.Load()), index._node, ast.Load()))


def _join(left: Index, operator: ast.operator, right: Index) -> Expr:
    return Expr(ast.BinOp(_node_of(left), operator, _node_of(right)))


def _node_of(index: Index) -> ast.expr:
    return index._node if isinstance(index, Expr) else ast.Constant(int(index))


def _check(node: ast.expr) -> None:
    """Only arithmetic: an expression that came in a file is evaluated, so it may not be anything else."""
    match node:
        case ast.Constant(value=int()) | ast.Name():
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand)
        case ast.BinOp(left=left, op=operator, right=right) if isinstance(operator, _OPERATORS):
            _check(left)
            _check(right)
        case ast.Subscript(value=ast.Tuple(elts=entries), slice=index):
            for entry in entries:
                _check(entry)
            _check(index)
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r} is no expression of a schedule: use + - * // %, variables, numbers and tables"
            )


RANK = Expr("rank")
