"""Steps and declarations that are not well formed: `verify` names rank, lane, step and the fix, or the `Draft` refuses them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from schedule_checks import faults
from schedule_push import BOX, X, Y, push, with_steps

from weft.schedule import (
    RANK,
    Buffer,
    Collective,
    Copy,
    Draft,
    Expr,
    Region,
    Set,
    Step,
    Wait,
    total,
)
from weft.schedule.kernels import Unpack
from weft.schedule.verify import verify


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Copy(BOX, X), "x[0:+4, 0:+8] is written, but x is an input"),
        (Copy(X, replace(BOX, row=1)), "box[1:+4, 0:+8] is outside its buffer of 4 x 8"),
        (Copy(X, replace(BOX, col=RANK - 1)), "box[0:+4, -1:+8] is outside its buffer of 4 x 8"),
        (Copy(X, replace(BOX, rows=-4)), "is outside its buffer of 4 x 8"),
        (Copy(X, replace(BOX, at=RANK + 1)), "rank 2 does not exist"),
        (Copy(X, replace(BOX, at=-1)), "rank -1 does not exist"),
        (
            Copy(X, replace(Y, at=1 - RANK)),
            "y@1[0:+4, 0:+8] belongs to a peer, so y must be symmetric, but it is output",
        ),
        (Copy(X, replace(Y, buffer="z")), "buffer 'z' does not exist"),
        (Copy(X, replace(BOX, rows=3)), "src has shape [4, 8], but dst has [3, 8]"),
        (Copy(BOX, BOX), "box[0:+4, 0:+8] is written while the same step reads box[0:+4, 0:+8]"),
        (Set("arrived", 1), "index 1 is out of range: arrived has 1 signals"),
        (Set("arrived", 0, RANK + 1), "rank 2 does not exist"),
        (Set("departed"), "signal 'departed' does not exist"),
        (Wait("arrived", -1), "index -1 is out of range: arrived has 1 signals"),
        (Wait("arrived", 0, 0), "count=0 must be at least 1"),
    ],
)
def test_a_step_that_does_not_fit(step: Step, message: str) -> None:
    text = faults(with_steps(step))
    assert re.search(r"rank \d, lane more, step 1: (copy|set|wait) .* \| ", text)
    assert message in text


@pytest.mark.parametrize(
    ("op", "out", "inputs", "message"),
    [
        ("matmul", "out", ("a", "a"), "[4, 8] @ [4, 8] -> [4, 2] must have shapes [m, k] @ [k, n]"),
        ("matmul", "a", ("a", "b"), "[4, 8] @ [8, 2] -> [4, 8] must have shapes [m, k] @ [k, n]"),
        ("matmul", "half", ("a", "b"), "dtypes differ: fp32, fp32, fp16"),
        ("add", "out", ("out", "a"), "shapes differ: [(4, 2), (4, 8), (4, 2)]"),
        (
            "matmul",
            "square",
            ("square", "square"),
            "square[0:+4, 0:+4] is written while the same step reads square[0:+4, 0:+4]",
        ),
        ("addmm", "out", ("a", "a", "out"), "[4, 8] @ [4, 8] -> [4, 2] must have shapes [m, k] @ [k, n]"),
        (
            "addmm",
            "out",
            ("a", "b", "square"),
            "the third input of addmm has shape [4, 4]: it must have the shape of out, [4, 2]",
        ),
        ("addmm", "out", ("a", "b", "half"), "dtypes differ: fp32, fp32, fp16, fp32"),
        ("addmm", "out", ("a", "b", "out"), "out[0:+4, 0:+2] is written while the same step reads out[0:+4, 0:+2]"),
    ],
)
def test_operands_that_do_not_fit(op: str, out: str, inputs: tuple[str, ...], message: str) -> None:
    d = Draft("one", 1)
    sizes = {
        "a": (4, 8, "fp32"),
        "b": (8, 2, "fp32"),
        "out": (4, 2, "fp32"),
        "half": (4, 2, "fp16"),
        "square": (4, 4, "fp32"),
    }
    buffers = {name: d.buffer(name, *size, "scratch") for name, size in sizes.items()}
    d.lane("compute").compute(op, buffers[out].part(), *(buffers[name].part() for name in inputs))
    assert message in faults(d.schedule())


def test_what_adds_to_its_third_input_does_not_accumulate() -> None:
    d = Draft("one", 1)
    x, y = d.buffer("x", 4, 4, "fp32", "input"), d.buffer("y", 4, 4, "fp32", "output")
    lane = d.lane("compute").compute("addmm", y.part(), x.part(), x.part(), x.part())
    verify(d.schedule())
    lane.compute("addmm", y.part(), x.part(), x.part(), x.part(), accumulate=True)
    assert "addmm already adds its third input, so it cannot accumulate" in faults(d.schedule())


def test_elementwise_operations_may_be_in_place() -> None:
    d = Draft("one", 1)
    x, y = d.buffer("x", 4, 4, "fp32", "input"), d.buffer("y", 4, 4, "fp32", "output")
    d.lane("compute").copy(x.part(), y.part()).compute("silu", y.part(), y.part()).compute(
        "add", y.part(), y.part(), x.part()
    )
    verify(d.schedule())


def test_collectives_that_do_not_fit() -> None:
    d = Draft("gather", 2)
    x, y = d.buffer("x", RANK + 1, 4, "fp32", "input"), d.buffer("y", 4, 4, "fp32", "output")
    d.lane("compute").all_gather(x.part(), y.part())
    assert "the ranks contribute [1, 2] rows of 4 columns, but the shapes of dst are [(4, 4), (4, 4)]" in faults(
        d.schedule()
    )
    d = Draft("gather", 2)
    x, y = d.buffer("x", 2, 4, "fp32", "input"), d.buffer("y", 4, 4, "fp32", "output")
    d.lane("compute").all_gather(x.part(), y.part())
    verify(d.schedule())
    d.lane("compute").repeat("i", RANK, *d.schedule().lanes[0].steps)
    assert "only ranks [1] of 2 call this collective" in faults(d.schedule())
    step = Collective("all_gather", Region("box", 0, 2, 0, 8), replace(BOX, at=1 - RANK))
    assert "src and dst of a collective must be buffers of the rank that calls it" in faults(with_steps(step))


def test_declarations() -> None:
    schedule = push()
    bad = Buffer("box", 4 - 5 * RANK, 8, "fp32", "symmetric")
    text = faults(replace(schedule, buffers=(*schedule.buffers, bad), lanes=schedule.lanes * 2))
    assert "2 buffers are named 'box'" in text
    assert "2 lanes are named 'out'" in text
    assert "symmetric memory must have the same size on all ranks, but rows=4 - rank * 5" in faults(
        replace(schedule, buffers=(bad,))
    )
    assert "has shapes [(4, 8), (-1, 8)] on the ranks: sizes must not be negative" in faults(
        replace(schedule, buffers=(bad,))
    )
    huge = Buffer("huge", 2**31, 2**30, "fp32", "scratch")
    assert (
        "buffer huge has shapes [(2147483648, 1073741824), (2147483648, 1073741824)] on the ranks: a buffer must"
        in (faults(replace(schedule, buffers=(*schedule.buffers, huge))))
    )
    assert "world_size=0 must be at least 1" in faults(replace(schedule, world_size=0))
    with pytest.raises(TypeError, match="NoneType, not Schedule: does the builder return its schedule"):
        verify(None)  # type: ignore[arg-type]
    assert "i needs a value for i" in faults(with_steps(Set("arrived", Expr("i"))))


def test_contents_of_a_buffer_that_is_not_declared() -> None:
    d = Draft("d", 2)
    counts = Draft("o", 2).buffer("counts", 2, 1, "int64", "symmetric")
    x, y = d.buffer("x", total("counts", 0, 1), 4, "fp32", "input"), d.buffer("y", 8, 4, "fp32", "output")
    d.holds(counts, [[3, 5], [5, 3]])
    missing = "buffer 'counts' does not exist: declare it with Draft.buffer"
    assert missing in faults(d.schedule())
    d.lane("c").copy(x.part(), y.part(rows=(0, total("counts", 0, 1))), "kernel")
    assert missing in faults(d.schedule())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (("x", "2", 2), "buffer x: rows is '2': a str is neither an integer nor an expression of the rank"),
        (("x", 1.5, 2), "buffer x: rows is 1.5: a float is neither an integer"),
        (("x", True, 2), "buffer x: rows is True, but must be an integer or an expression, not a bool"),
        (("x", 2, RANK), "buffer x: cols=Expr('rank') must be an integer, the same on all ranks"),
        (("x", 2, 2.0), "buffer x: cols=2.0 must be an integer"),
        (("", 2, 2), "schedule d: buffer name '' must be a non-empty str"),
        ((5, 2, 2), "schedule d: buffer name 5 must be a non-empty str"),
    ],
)
def test_buffers_that_are_no_matrices_are_refused_as_they_are_declared(declared: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        Draft("d", 2).buffer(*declared, "fp32", "input")


def test_rows_may_be_an_expression() -> None:
    assert str(Draft("d", 2).buffer("x", total("counts", 0, 1), 4, "fp32", "input").rows) == str(total("counts", 0, 1))


def test_a_negative_extent_is_refused_as_it_is_written() -> None:
    lane = Draft("d", 2).lane("a")
    with pytest.raises(ValueError, match="lane a: repeat has extent=-1: use at least 0"):
        lane.repeat("i", -1, Copy(X, Y))
    with pytest.raises(ValueError, match="lane a: tiles has extent=-2"):
        lane.tiles(Unpack(), "t", -2, Copy(X, Y))
    assert not lane.steps


def test_words_that_are_none_are_refused_as_they_are_written() -> None:
    d = Draft("misspelt", 2)
    with pytest.raises(
        ValueError, match="buffer x: role='scratsh' is not known; use one of input, output, symmetric, scratch"
    ):
        d.buffer("x", 4, 4, "fp32", "scratsh")
    x = d.buffer("x", 4, 4, "fp32", "scratch")
    with pytest.raises(ValueError, match="lane a: resource='gpu' is not known; use one of compute, copy"):
        d.lane("a", "gpu")
    with pytest.raises(ValueError, match="lane a: by='kernl' is not known; use one of dma, kernel"):
        d.lane("a").copy(x.part(), x.part(), "kernl")
    with pytest.raises(ValueError, match="lane a: by='me' is not known; use one of device, meanwhile, host, known"):
        d.lane("a").read(x, "me")


def test_a_lane_has_one_resource() -> None:
    d = Draft("twice", 2)
    send = d.lane("send", "copy")
    assert d.lane("send") is send
    assert d.lane("send", "copy") is send
    with pytest.raises(ValueError, match="lane send: resource='compute', but the lane was created with 'copy'"):
        d.lane("send", "compute")
    assert d.lane("new").resource == "compute"


@pytest.mark.parametrize(
    ("count", "message"), [(1.5, "count of signals s=1.5 is a float"), (-1, "count=-1 of signals s must be")]
)
def test_a_number_of_signals_is_an_integer(count: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Draft("counted", 2).signals("s", count)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_table_of_a_rank_that_does_not_exist(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} does not exist: use 0 to 1"):
        push().table(rank)
