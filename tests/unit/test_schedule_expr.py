"""Expressions of the rank: their arithmetic is Python's, their text can be parsed again, and only arithmetic is
allowed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.schedule import RANK, Draft, Expr, Index, Norm, Set, Wait, lookup, total, value
from weft.schedule.expr import PrefixSums
from weft.schedule.verify import verify

numbers = st.integers(-20, 20)


def test_a_peer_in_the_ring() -> None:
    peer = (RANK + 1) % 4
    assert [value(peer, rank=rank) for rank in range(4)] == [1, 2, 3, 0]
    assert str(peer) == "(rank + 1) % 4"
    assert Expr("(rank + 1)%4") == peer
    assert hash(Expr("(rank + 1)%4")) == hash(peer)
    assert peer != Expr("rank + 1 % 4")


@given(
    data=st.recursive(
        st.one_of(numbers, st.sampled_from(("rank", "i"))),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/%"), inner),
        max_leaves=8,
    ),
    rank=st.integers(0, 7),
    i=numbers,
)
def test_arithmetic_and_its_text_agree_with_python(data: object, rank: int, i: int) -> None:
    def build(tree: object) -> tuple[Index, int]:
        """Return (an expression built by `Expr`, its value computed by Python)."""
        if isinstance(tree, int):
            return tree, tree
        if isinstance(tree, str):
            return Expr(tree), {"rank": rank, "i": i}[tree]
        left, operator, right = tree
        (a, x), (b, y) = build(left), build(right)
        # With a number on the left, Python computes the division.
        if operator in "/%" and (y == 0 or isinstance(a, int)):
            return a, x
        match operator:
            case "+":
                return a + b, x + y
            case "-":
                return a - b, x - y
            case "*":
                return a * b, x * y
            case "/":
                return a // b, x // y
            case _:
                return a % b, x % y

    made, number = build(data)
    assert value(made, rank=rank, i=i) == number
    if isinstance(made, Expr):
        assert Expr(str(made)) == made == pickle.loads(pickle.dumps(made))
        assert value(Expr(str(made)), rank=rank, i=i) == number


def test_neutral_operations_leave_no_trace() -> None:
    assert RANK + 0 == RANK - 0 == RANK * 1 == RANK // 1 == 0 + RANK == RANK
    assert RANK * 0 == RANK % 1 == 0


def test_a_table_of_numbers() -> None:
    rows = lookup((5, 3, 8), (RANK + 1) % 3)
    assert str(rows) == "(5, 3, 8)[(rank + 1) % 3]"
    assert [value(rows, rank=rank) for rank in range(3)] == [3, 8, 5]
    assert lookup((4, 4), RANK) == 4
    assert lookup((5, 3), 1) == 3
    with pytest.raises(ValueError, match=r"\(5, 3, 8\)\[rank\] has no value for \{'rank': 3\}"):
        value(lookup((5, 3, 8), RANK), rank=3)


@given(
    contents=st.lists(numbers, max_size=9),
    bounds=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1),
    step=st.integers(1, 4),
)
def test_sums_of_what_a_buffer_holds(contents: list[int], bounds: list[tuple[int, int]], step: int) -> None:
    """Evaluate sums one by one and for arrays, over plain numbers and over prefix sums."""
    part = total("held", Expr("first"), Expr("end"), step)
    assert isinstance(part, Expr)
    wanted = [sum(contents[first:end:step]) for first, end in bounds]
    for held in (contents, PrefixSums(contents)):
        assert [part.evaluate({"held": held, "first": first, "end": end}) for first, end in bounds] == wanted
        first, end = np.array(bounds).T
        assert part.evaluated_over({"held": held, "first": first, "end": end}).tolist() == wanted
    assert (
        part.partially_evaluated({"held": PrefixSums(contents), "first": bounds[0][0], "end": bounds[0][1]})
        == wanted[0]
    )


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "rank.real", "().__class__", "open('x')", "lambda: 1", "[rank for rank in (1,)]", "rank ** 9",
        "rank << 3", "1.5", "'text'", "rank == 1", "not rank", "rank if rank else 1", "rank[0]", "(1, 2)", "(1, 2)[0:1]",
        "(rank := 1)", "f'{rank}'", "1 +", "", "rank; rank", "x = 1", "\0", "-" * 100_000 + "1", "(" * 300 + "1" + ")" * 300,
    ],
)  # fmt: skip
def test_only_arithmetic(text: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"is not an expression of a schedule|is not a valid schedule expression|cannot be a variable",
    ):
        Expr(text)


def test_what_has_no_value_says_so() -> None:
    with pytest.raises(ValueError, match=r"rank \+ i needs a value for i; given: \{'rank': 1\}"):
        value(RANK + Expr("i"), rank=1)
    with pytest.raises(ValueError, match=r"4 // rank has no value for \{'rank': 0\}"):
        value(Expr("4 // rank"), rank=0)


def test_what_differs_between_ranks_is_no_comparison() -> None:
    """Python evaluates a comparison while the schedule is written, so a step would be on all ranks or on none."""
    with pytest.raises(
        TypeError, match=r"rank has no truth value while the schedule is being written\. .* lookup\(\(0, 1\), RANK\)"
    ):
        bool(RANK)
    with pytest.raises(TypeError, match=r"index is False, but must be an integer or an expression"):
        lookup((3, 4), RANK == 1)
    d = Draft("compared", 2)
    x, y, there = d.buffer("x", 1, 1, "fp32", "input"), d.buffer("y", 1, 1, "fp32", "output"), d.signals("there", 1)
    lane = d.lane("compute")
    for add, what in (
        (lambda: lane.repeat("only", RANK == 1, Set("there")), "extent of 'for' is False, but"),
        (lambda: lane.repeat("only", 2, Wait("there", count=RANK != 1)), "in 'for': count of 'wait' is True, but"),
        (lambda: lane.set(there, at=RANK == 1), "at of 'set' is False, but"),
        (lambda: lane.copy(x.part(rows=(RANK == 1, 1)), y.part()), "row of x in 'copy' is False, but"),
        (lambda: lane.reduce(y.part(), x.part(rows=(RANK == 1, 1))), "row of x in 'reduce' is False, but"),
        (
            lambda: lane.reduce(y.part(), y.part(), norm=Norm(y.part(), x.part(rows=(RANK == 1, 1)), 0.0)),
            "row of x in 'reduce' is False, but",
        ),
    ):
        with pytest.raises(TypeError, match=rf"lane compute.*{what} must be an integer.*lookup\(\(0, 1\), RANK\)"):
            add()
    assert not lane.steps
    lane.repeat("only", lookup((0, 1), RANK), Set("there"))
    assert [len(d.schedule().of_rank(rank)[0].steps) for rank in range(2)] == [0, 1]


def test_what_is_no_whole_number_is_no_index() -> None:
    with pytest.raises(TypeError, match="schedule two: world_size='2' is a str"):
        Draft("two", "2")  # type: ignore[arg-type]
    d = Draft("fractions", 2)
    x, y, there = d.buffer("x", 4, 1, "fp32", "input"), d.buffer("y", 4, 1, "fp32", "output"), d.signals("there", 1)
    lane = d.lane("compute")
    for add, what in (
        (lambda: lane.copy(x.part(rows=(0.5, 1)), y.part()), "row of x in 'copy' is 0.5: a float"),
        (lambda: lane.copy(x.part(rows=(0, 4 / 2)), y.part()), "rows of x in 'copy' is 2.0: a float"),
        (lambda: lane.set(there, at="1"), "at of 'set' is '1': a str"),
        (lambda: lane.repeat("i", 1.5, Set("there")), "extent of 'for' is 1.5: a float"),
    ):
        with pytest.raises(
            TypeError, match=f"lane compute.*{what} is neither an integer nor an expression of the rank"
        ):
            add()
    assert not lane.steps
    for rows in (3, (1, 2, 3)):
        with pytest.raises(TypeError, match=r"x\.part\(rows=.*, cols=None\): give each as \(first, count\)"):
            x.part(rows=rows)
    lane.copy(x.part(rows=(np.int64(0), 4)), y.part())
    verify(d.schedule())


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda: RANK + 1.5, "an operand of an expression is 1.5: a float is neither"),
        (lambda: 2.0 * RANK, "an operand of an expression is 2.0: a float is neither"),
        (lambda: RANK // 4.0, "an operand of an expression is 4.0: a float is neither"),
        (lambda: RANK + (RANK == 0), "an operand of an expression is False, but must be"),
        (lambda: 3 - (RANK != 0) * RANK, "an operand of an expression is True, but must be"),
        (lambda: RANK * 1.0, "an operand of an expression is 1.0"),
        (lambda: RANK % True, "an operand of an expression is True, but must be"),
        (lambda: RANK // 1.0, "an operand of an expression is 1.0"),
        (lambda: RANK - False, "an operand of an expression is False, but must be"),
        (lambda: lookup((4.9, 4.2), RANK), "an entry of the table is 4.9: a float is neither"),
        (lambda: lookup((4.5, 4.5), RANK), "an entry of the table is 4.5: a float is neither"),
        (lambda: lookup((True, False), RANK), "an entry of the table is True, but must be"),
    ],
)
def test_floats_and_comparisons_are_not_truncated(write: Callable[[], Any], message: str) -> None:
    assert str(RANK + 2) == "rank + 2"  # an equal integer, which a cache may hold
    assert str(RANK // 4) == "rank // 4"
    with pytest.raises(TypeError, match=message):
        write()
