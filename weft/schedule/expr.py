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
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from weft.words import kind

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_SIGNS: dict[type[ast.operator], tuple[ast.operator, str, int]] = {
    ast.Add: (ast.Add(), "+", 1), ast.Sub: (ast.Sub(), "-", 1), ast.Mult: (ast.Mult(), "*", 2),
    ast.FloorDiv: (ast.FloorDiv(), "//", 2), ast.Mod: (ast.Mod(), "%", 2),
}  # fmt: skip
"""For each operator: its node, its symbol and its precedence."""


MOST_LETTERS, MOST_DEPTH, MOST_NUMBER, MOST_STRIDE = 1 << 16, 200, 1 << 60, 1 << 20
"""Limits of expressions that come as text. The depth of a sum is its number of terms."""


class Expr:
    """An expression over variables with + - * // %, lookups in tables of numbers, and sums over contents of buffers."""

    __slots__ = ("_compiled", "_node", "text")

    def __init__(self, source: str | ast.expr) -> None:
        try:
            node = _parsed(source) if isinstance(source, str) else source
            _check(node)
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
        return _evaluated_over(self._node, values, known)

    def period(self, name: str) -> int:
        """Return p if the value depends on variable `name` only through `name % p`; 0 if no p is known."""
        return _period_of(self, name)

    def parts_over(self, values: Mapping[str, Any], without: str, known: dict[int, Any]) -> None:
        """Evaluate the largest subexpressions that do not depend on the variable `without`. Add their values to
        `known`, whose keys are the ids of the subexpressions."""
        for part in _parts_without(self, without):
            if id(part) not in known:
                known[id(part)] = _evaluated_over(part, values)

    def totals(self) -> tuple[int, tuple[Total, ...]]:
        """Return (number, totals) of a sum of numbers and totals; raise `ValueError` for any other expression."""
        return _totals(self._node)

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
        raise TypeError(f"{self.text} has a value on each rank, and whether it is 0 is not known yet: {_PER_RANK}")

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


class PrefixSums:
    """The contents of a buffer, row by row, with cached prefix sums: sums from each element to the end."""

    def __init__(self, contents: Sequence[int]) -> None:
        self.contents = np.asarray(contents, np.int64)
        self._sums: dict[int, np.ndarray] = {}

    def __getitem__(self, part: slice) -> int:
        """Return the sum of the elements in this slice, so that `sum` of it is the number itself."""
        first, end, step = part.indices(len(self.contents))
        sums = self._to_the_end(step)
        return int(sums[first] - sums[first + len(range(first, end, step)) * step])

    def sums(self, first: Any, end: Any, step: int) -> np.ndarray:
        """Return the sums of many slices at once; bounds are counted from the front."""
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


Index: TypeAlias = int | Expr
Values: TypeAlias = Mapping[str, int | Sequence[int] | PrefixSums]
"""Values of variables by name: numbers, and for buffers their contents, row by row."""


class Total(NamedTuple):
    """The sum of elements first, first + step, ... before `end` of a buffer."""

    buffer: str
    first: int
    end: int
    step: int


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


def _evaluated_over(node: ast.expr, values: Mapping[str, int | np.ndarray], parts: dict[int, Any] | None = None) -> Any:
    match node:
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(operand=operand):
            return -_evaluated_over(operand, values, parts)
        case ast.BinOp(left=left, op=sign, right=right):
            if parts is not None and id(node) in parts:
                return parts[id(node)]
            made = _OPERATORS[type(sign)](_evaluated_over(left, values, parts), _evaluated_over(right, values, parts))
            if parts is not None:
                parts[id(node)] = made
            return made
        case ast.Subscript(value=ast.Tuple(elts=entries) as table, slice=index):
            numbers = _numbers_of(table)
            found: np.ndarray = (
                np.array([_evaluated_over(entry, values, parts) for entry in entries]) if numbers is None else numbers
            )
            return found[_evaluated_over(index, values, parts)]
        case ast.Call(args=[ast.Subscript(value=held, slice=ast.Slice(lower=lower, upper=upper, step=step))]):
            known: Any = values if isinstance(held, ast.Name) else {}
            contents = (
                [_evaluated_over(e, values, parts) for e in held.elts]
                if isinstance(held, ast.Tuple)
                else known[_name(held)]
            )
            stride = 1 if step is None else int(_evaluated_over(step, values, parts))
            summed = contents if isinstance(contents, PrefixSums) else PrefixSums(contents)
            first, end = (_evaluated_over(_bound(bound), values, parts) for bound in (lower, upper))
            return summed.sums(first, end, stride)
        case ast.Constant(value=value):
            return value
    raise AssertionError(f"_check lets no {ast.unparse(node)} in")


@lru_cache(maxsize=64)  # tables of thousands of numbers, which many expressions have in common
def _numbers_of(table: ast.Tuple) -> np.ndarray | None:
    """Return the entries of a table as an array; None if some are not numbers."""
    if not all(isinstance(entry, ast.Constant) for entry in table.elts):
        return None
    return np.array([cast(ast.Constant, entry).value for entry in table.elts])


def _sum(part: int | Sequence[int]) -> int:
    return part if isinstance(part, int) else sum(part)


_GLOBALS = {"__builtins__": {}, "sum": _sum}


def _name(node: ast.expr) -> str:
    assert isinstance(node, ast.Name)
    return node.id


def _bound(node: ast.expr | None) -> ast.expr:
    assert node is not None  # _check refuses slices without both bounds
    return node


def _totals(node: ast.expr) -> tuple[int, tuple[Total, ...]]:
    match node:
        case ast.Constant(value=int(number)):
            return number, ()
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            (a, some), (b, more) = _totals(left), _totals(right)
            return a + b, some + more
        case ast.Call(
            args=[ast.Subscript(value=ast.Name(id=name), slice=ast.Slice(lower=lower, upper=upper, step=step))]
        ):
            numbers = [1 if bound is None else _totals(bound) for bound in (lower, upper, step)]
            bounds = [bound if isinstance(bound, int) else bound[0] for bound in numbers]
            if all(isinstance(bound, int) or not bound[1] for bound in numbers):
                return 0, (Total(name, *bounds),)
    raise ValueError(f"{ast.unparse(node)} is no sum of numbers and totals")


@lru_cache(maxsize=1 << 12)  # the same for every rank
def _period_of(expression: Expr, name: str) -> int:
    return _period(expression._node, name) if name in expression.text else 1


def _period(node: ast.AST, name: str) -> int:
    match node:
        case ast.BinOp(left=ast.Name(id=found), op=ast.Mod(), right=ast.Constant(value=int(modulus))) if found == name:
            return abs(modulus)
        case ast.Name(id=found) if found == name:
            return 0
        case ast.Subscript(value=ast.Tuple() as table, slice=index) if _numbers_of(table) is not None:
            return _period(index, name)
    period = 1
    for part in ast.iter_child_nodes(node):
        period = math.lcm(period, _period(part, name))
        if not period:  # 0 stays 0 for any other terms
            break
    return period


@lru_cache(maxsize=1 << 12)  # keeps the parts alive, so that no other part gets their identity
def _parts_without(expression: Expr, name: str) -> tuple[ast.expr, ...]:
    parts: list[ast.expr] = []
    if _split(expression._node, name, parts):
        parts.append(expression._node)
    return tuple(parts)


def _split(node: ast.expr, name: str, parts: list[ast.expr]) -> bool:
    """True if `node` does not depend on `name`; otherwise add its largest parts that do not, except constants, to `parts`."""
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
            inner = [index, *([] if _numbers_of(table) is not None else entries)]
        case ast.Call(args=[ast.Subscript(value=held, slice=ast.Slice(lower=lower, upper=upper, step=step))]):
            inner = [_bound(lower), _bound(upper), *([] if step is None else [step])]
            inner += held.elts if isinstance(held, ast.Tuple) else []
        case _:
            raise AssertionError(f"_check lets no {ast.unparse(node)} in")
    found_parts: list[ast.expr] = []
    free = [(one, _split(one, name, found_parts)) for one in inner]
    if all(is_free for _, is_free in free):
        return True
    parts += found_parts
    parts += [one for one, is_free in free if is_free and not isinstance(one, ast.Constant)]
    return False


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
            held, a, b = (_partially_evaluated(part, values) for part in (held, _bound(lower), _bound(upper)))
            whole = ast.Call(function, [ast.Subscript(held, ast.Slice(a, b, step), ast.Load())], [])
            known = isinstance(held, ast.Tuple) and isinstance(a, ast.Constant) and isinstance(b, ast.Constant)
        case _:
            return node
    return ast.Constant(_folded(whole)) if known else whole


def _folded(node: ast.expr) -> int:
    """Evaluate an expression of numbers. Most are a sum or a product of two numbers, which need no compiler."""
    match node:
        case ast.BinOp(left=ast.Constant(value=int(left)), op=sign, right=ast.Constant(value=int(right))) if right:
            return int(_OPERATORS[type(sign)](left, right))
    return int(Expr(node))


def _parsed(text: str) -> ast.expr:
    """Parse an expression that may come from a file; raise `SyntaxError` also beyond the limits on its length, depth and
    numbers."""
    if len(text) > MOST_LETTERS:
        raise SyntaxError(f"it has {len(text)} characters, but at most {MOST_LETTERS} are allowed")
    node = ast.parse(text, mode="eval").body
    left: list[tuple[ast.AST, int]] = [(node, 1)]
    while left:
        part, depth = left.pop()
        if depth > MOST_DEPTH:
            raise SyntaxError(
                f"it is nested too deep: at most {MOST_DEPTH} levels are allowed (a sum has a level for each term)"
            )
        if isinstance(part, ast.Constant) and isinstance(part.value, int) and part.value > MOST_NUMBER:
            raise SyntaxError(
                f"it has a number of {part.value.bit_length()} bits, and at most {MOST_NUMBER} is allowed"
            )
        left += [(inner, depth + 1) for inner in ast.iter_child_nodes(part)]
    return node


def _check(node: ast.expr) -> None:
    """Allow arithmetic only: an expression from a file is evaluated."""
    match node:
        case ast.Constant(value=bool()) | ast.Name(id="sum"):
            raise ValueError(
                f"{ast.unparse(node)!r} is neither a number nor a variable of a schedule: write sums as sum(buffer[first:end])"
            )
        case ast.Constant(value=int()) | ast.Name():
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            _check(left)
            _check(right)
        case ast.Subscript(value=ast.Tuple(elts=entries), slice=index):
            for entry in entries:
                _check(entry)
            _check(index)
        case ast.Call(
            func=ast.Name(id="sum"), keywords=[],
            args=[ast.Subscript(value=ast.Name() | ast.Tuple() as held, slice=ast.Slice() as part)],
        ) if part.lower is not None and part.upper is not None:  # fmt: skip
            for inner in held.elts if isinstance(held, ast.Tuple) else []:
                _check(inner)
            _check(part.lower)
            _check(part.upper)
            if part.step is not None and not (
                isinstance(part.step, ast.Constant)
                and isinstance(part.step.value, int)
                and 1 <= part.step.value <= MOST_STRIDE
            ):
                raise ValueError(f"{ast.unparse(node)!r}: the step of a sum is a number between 1 and {MOST_STRIDE}")
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r} is not an expression of a schedule: use + - * // %, variables, numbers, tables, and "
                f"sum(buffer[first:end])"
            )


RANK = Expr("rank")
