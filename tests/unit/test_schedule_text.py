"""Tables of schedules, and their JSON: JSON is complete, gives an equal schedule, and is refused if anything in it is
unknown.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.sim_toys import applicable

from weft.builders import AllGatherMatmul, candidates
from weft.errors import UnreadableError
from weft.schedule import RANK, Copy, Draft, Expr, Region, Schedule, Set, lookup, text
from weft.schedule.text import fingerprint, from_json, to_json


def every_kind_of_step() -> Schedule:
    """Return a schedule with a step of every kind. It would not pass `verify`."""
    d = Draft("everything", 3)
    x = d.buffer("x", lookup((4, 2, 3), RANK), 8, "fp16", "input")
    box = d.buffer("box", 9, 8, "fp16", "symmetric")
    rows = d.buffer("rows", 9, 8, "fp16", "scratch")
    y = d.buffer("y", 9, 8, "fp16", "output")
    arrived = d.signals("arrived", 6)
    to, turn = (RANK + 1) % 3, Expr("i")
    d.lane("in", "copy").wait(arrived, count=2, previous=True).copy(
        x.part(), box.part(rows=(0, x.rows), at=to), "kernel"
    )
    d.lane("in").repeat(
        "i", 3, Copy(Region("x", turn, 1, 0, 8), Region("box", turn * 2, 1, 0, 8, to)), Set("arrived", turn, to)
    )
    d.lane("compute").all_gather(x.part(), rows.part()).compute("silu", y.part(), rows.part(), accumulate=True)
    d.lane("compute").matmul(y.part(cols=(2, 4)), rows.part(rows=(1, 2)), box.part())
    return d.schedule()


def test_a_fingerprint_tells_schedules_apart() -> None:
    problems = AllGatherMatmul.even(6, 3, 4, 2), AllGatherMatmul(2, (5, 0), (3, 2), 4, "fp16")
    schedules = [every_kind_of_step(), *(schedule for p in problems for schedule in applicable(p).values())]
    schedules += [replace(schedules[0], lanes=schedules[0].lanes[::-1])]
    texts = {to_json(schedule): fingerprint(schedule) for schedule in schedules}
    assert len(set(texts.values())) == len(texts) > 20
    assert {text: fingerprint(from_json(text)) for text in texts} == texts
    moved = replace(schedules[0], buffers=(replace(schedules[0].buffers[0], rows=lookup((4, 2, 4), RANK)),))
    as_text = replace(moved, buffers=(replace(moved.buffers[0], rows=str(moved.buffers[0].rows)),))  # type: ignore[arg-type]
    assert len({*texts.values(), fingerprint(moved), fingerprint(as_text)}) == len(texts) + 2


def test_a_table_for_all_ranks_and_for_one() -> None:
    schedule = every_kind_of_step()
    assert str(schedule) == schedule.table()
    assert schedule.table() == TABLE
    assert schedule.table(rank=1) == TABLE_OF_RANK_1


TABLE = """\
schedule everything, 3 ranks

buffers             rows  columns  dtype  role               size
x        (4, 2, 3)[rank]        8  fp16   input      32 B to 64 B
box                    9        8  fp16   symmetric         144 B
rows                   9        8  fp16   scratch           144 B
y                      9        8  fp16   output            144 B

signals  arrived[6]   (counters on every rank)

notation: buffer@rank[first row:+rows, first column:+columns]; without @rank, this rank's; without [], the whole buffer

lane in (copy)
   1  wait    arrived[0] x2 of the previous run
   2  copy    x -> box@((rank + 1) % 3)[0:+(4, 2, 3)[rank], :] by kernel
   3  for i in 0 .. 3 - 1
        copy    x[i:+1, :] -> box@((rank + 1) % 3)[i * 2:+1, :] by dma
        set     arrived@((rank + 1) % 3)[i]

lane compute (compute)
   1  all_gather x -> rows
   2  silu    y += rows
   3  matmul  y[:, 2:+4] = rows[1:+2, :], box"""

TABLE_OF_RANK_1 = """\
schedule everything, rank 1 of 3

buffers  rows  columns  dtype  role        size
x           2        8  fp16   input       32 B
box         9        8  fp16   symmetric  144 B
rows        9        8  fp16   scratch    144 B
y           9        8  fp16   output     144 B

signals  arrived[6]   (counters on every rank)

notation: buffer@rank[first row:+rows, first column:+columns]; without @rank, this rank's; without [], the whole buffer

lane in (copy)
   1  wait    arrived[0] x2 of the previous run
   2  copy    x -> box@2[0:+2, :] by kernel
   3  copy    x[0:+1, :] -> box@2[0:+1, :] by dma
   4  set     arrived@2[0]
   5  copy    x[1:+1, :] -> box@2[2:+1, :] by dma
   6  set     arrived@2[1]
   7  copy    x[2:+1, :] -> box@2[4:+1, :] by dma
   8  set     arrived@2[2]

lane compute (compute)
   1  all_gather x -> rows
   2  silu    y += rows
   3  matmul  y[:, 2:+4] = rows[1:+2, :], box"""


@pytest.mark.parametrize("rows", [(1, 20, 300, 4000), tuple(range(3000, 3032))])
def test_uneven_schedules_fit_a_terminal(rows: tuple[int, ...]) -> None:
    problem = AllGatherMatmul(len(rows), rows, (70_000, 5), 12_345, "bf16", return_gathered=True)
    lines = candidates(problem, ("shard",))[0].build().table().splitlines()
    assert max(map(len, lines)) <= 132
    assert lines[3].split()[1:3] == (["3000", "to"] if len(rows) == 32 else ["(1,", "20,"])


def test_json_is_complete() -> None:
    schedule = every_kind_of_step()
    text = to_json(schedule)
    assert from_json(text) == schedule
    assert to_json(from_json(text)) == text
    kinds = {step["step"] for lane in json.loads(text)["lanes"] for step in lane["steps"]}
    assert kinds == {"wait", "copy", "for", "collective", "compute"}


def test_a_schedule_for_no_rank_prints() -> None:
    assert "x" in str(replace(every_kind_of_step(), world_size=0))


def test_what_goes_without_saying_may_be_left_out() -> None:
    schedule = every_kind_of_step()
    document = json.loads(to_json(schedule))
    del document["lanes"][1]["steps"][2]["accumulate"], document["lanes"][0]["steps"][1]["src"]["at"]
    assert from_json(json.dumps(document)) == schedule


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("weft_schedule", 2, "weft_schedule is 2, but must be 1"),
        ("weft_schedule", None, "weft_schedule is None, but must be 1"),
        ("colour", 1, "schedule, a field of Schedule: 'colour' is not known; use one of name, world_size, buffers"),
        ("world_size", "3", "schedule.world_size: '3' is not of type int"),
        ("world_size", True, "schedule.world_size: True is not of type int"),
        ("lanes", {}, "schedule.lanes: {} is not of type list"),
        ("buffers.0.dtype", "fp13", r"schedule.buffers\[0\].dtype: 'fp13' is not known; use one of fp32, fp16"),
        (
            "buffers.0.role",
            "inout",
            r"buffers\[0\].role: 'inout' is not known; use one of input, output, symmetric, scratch",
        ),
        ("buffers.0.rows", "os.system('x')", r"\"os.system\('x'\)\" is not an expression"),
        ("buffers.0.rows", 1.5, r"schedule.buffers\[0\].rows: 1.5 is not of type int"),
        ("signals.0", "arrived", r"schedule.signals\[0\]: 'arrived' is not of type dict"),
        ("lanes.0.resource", "wire", r"lanes\[0\].resource: 'wire' is not known; use one of compute, copy"),
        (
            "lanes.0.steps.0.step",
            "sleep",
            r"lanes\[0\].steps\[0\]: 'sleep' is not known; use one of .*copy",
        ),
        ("lanes.0.steps.0.previous", 1, r"lanes\[0\].steps\[0\].previous: 1 is not of type bool"),
        (
            "lanes.0.steps.0.epoch",
            1,
            r"lanes\[0\].steps\[0\], a field of Wait: 'epoch' is not known; use one of signal, index",
        ),
        ("lanes.0.steps.1.by", "mail", r"lanes\[0\].steps\[1\].by: 'mail' is not known; use one of dma, kernel"),
        ("lanes.0.steps.2.body.0.step", None, r"steps\[2\].body\[0\]: None is not known"),
        (
            "lanes.1.steps.0.op",
            "all_swap",
            r"lanes\[1\].steps\[0\].op: 'all_swap' is not known; use one of all_gather, all_to_all",
        ),
        (
            "lanes.1.steps.1.op",
            "exp",
            r"lanes\[1\].steps\[1\].op: 'exp' is not known; use one of matmul, addmm, add, silu",
        ),
    ],
)
def test_what_is_unknown_is_refused(path: str, new: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(edited_json(path, new))


def edited_json(path: str, new: Any) -> str:
    """Return the JSON of `every_kind_of_step` with one value replaced."""
    document = json.loads(to_json(every_kind_of_step()))
    *above, last = path.split(".")
    place = document
    for part in above:
        place = place[int(part)] if part.isdigit() else place[part]
    place[int(last) if last.isdigit() else last] = new
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("buffers.1.rows", -1, r"schedule.buffers\[1\].rows is -1: it must be between 0 and 1099511627776"),
        (
            "buffers.1.cols",
            2**40 + 1,
            r"schedule.buffers\[1\].cols is 1099511627777: it must be between 0 and 1099511627776",
        ),
        ("buffers.0.rows", "rank - 2", r"schedule.buffers\[0\].rows at rank 0 is -2: it must"),
        ("buffers.0.rows", "rank * 1099511627776", r"schedule.buffers\[0\].rows at rank 2 is 2199023255552: it must"),
        ("world_size", 2**20, "schedule.world_size is 1048576: it must be between 0 and 4096"),
        (
            "contents",
            [{"buffer": "x", "expected": [[1]]}],
            r"schedule.contents\[0\].expected has entries for 1 ranks, but the schedule has 3 ranks: give one entry for each",
        ),
        ("signals.0.count", 10**30, r"signals\[0\].count is an integer of 100 bits: numbers must be finite"),
        ("signals.0.count", float("inf"), r"signals\[0\].count is inf: numbers must be finite"),
        ("lanes.0.steps.2.extent", -3, r"lanes\[0\].steps\[2\].extent is -3: it must"),
        ("lanes.0.steps.2.extent", "3 - 2 * rank", r"lanes\[0\].steps\[2\].extent is -1: it must"),
        ("lanes.0.steps.2.extent", 50_001, r"lanes\[0\].steps\[2\] has 100005 steps or more .* at most 100000"),
        ("buffers.0.rows", "sum", "'sum' cannot be a variable of a schedule"),
        ("buffers.0.rows", "True", "'True' is a bool: write an integer"),
        ("buffers.0.rows", "1 + " * 200 + "1", "nested too deeply: at most 200 levels"),
        ("buffers.0.rows", "1" * 1000, "a number of 3319 bits"),
        ("buffers.0.rows", f"({'1, ' * 30_000})[0]", "the expression has 90005 characters, but at most 65536"),
        ("buffers.0.rows", "sum(x[0:1:1099511627776])", "must be an integer between 1 and 1048576"),
        ("buffers.0.rows", "sum(x[0:1:0])", "must be an integer between 1 and"),
    ],
)
def test_numbers_beyond_the_limits_are_refused(path: str, new: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(edited_json(path, new))


@pytest.mark.parametrize("extent", [2000, "1999 - i"])
def test_loops_in_loops_are_counted_through(extent: int | str) -> None:
    """The extent gives 2000 x 2000 x 2 steps, or half as many."""
    document = json.loads(to_json(every_kind_of_step()))
    loop = document["lanes"][0]["steps"][2]
    document["lanes"][0]["steps"][2] = {"step": "for", "index": "i", "extent": 2000,
                                        "body": [{**loop, "index": "j", "extent": extent}]}  # fmt: skip
    with pytest.raises(ValueError, match="at most 100000"):
        from_json(json.dumps(document))
    document["lanes"][0]["steps"][2]["extent"] = 20
    assert from_json(json.dumps(document)).lanes[0].steps


@pytest.mark.parametrize("extent", ["i - i", 0])
def test_turns_without_a_step_are_counted_too(extent: int | str) -> None:
    """Otherwise a loop of 2^40 empty iterations would be accepted and then unrolled."""
    loop = {"step": "for", "index": "j", "extent": extent, "body": []}
    with pytest.raises(ValueError, match="at most 100000"):
        from_json(edited_json("lanes.0.steps.2", {"step": "for", "index": "i", "extent": 2**40, "body": [loop]}))


def test_steps_of_many_ranks_that_differ_are_counted_together() -> None:
    document = json.loads(edited_json("lanes.0.steps.2.extent", "900 + rank % 2")) | {"world_size": 4096}
    with pytest.raises(
        ValueError, match=r"differ between ranks, and ranks 0 to 2[0-9][0-9] together have more than 524288"
    ):
        from_json(json.dumps(document))


def test_brackets_without_end_are_refused() -> None:
    with pytest.raises(UnreadableError, match="nested 100000 deep, and at most 64"):
        from_json("[" * 100_000)


def test_loops_in_loops_without_end_are_refused() -> None:
    document = json.loads(to_json(every_kind_of_step()))
    steps = document["lanes"][0]["steps"]
    for i in range(200):
        steps[2] = {"step": "for", "index": f"i{i}", "extent": 1, "body": [steps[2]]}
    with pytest.raises(UnreadableError, match=r"nested 40. deep, and at most 64"):
        from_json(json.dumps(document))


def test_a_million_steps_are_refused_before_they_are_made() -> None:
    step = json.dumps(json.loads(to_json(every_kind_of_step()))["lanes"][0]["steps"][0])
    with pytest.raises(UnreadableError, match=r"schedule has 100000[0-9] steps, and at most 100000"):
        from_json(edited_json("lanes.0.steps.0", "here").replace('"here"', ", ".join([step] * 1_000_000)))


def test_what_is_missing_is_named() -> None:
    document = json.loads(to_json(every_kind_of_step()))
    del document["lanes"][0]["steps"][1]["src"]["rows"]
    with pytest.raises(
        ValueError, match=r"steps\[1\].src: Region has the fields buffer, .*, at: it must also have rows"
    ):
        from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "3", '"x"', "null", "{}"])
def test_what_is_no_schedule_at_all_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"the schedule cannot be read|Expecting value"):
        from_json(text)


def test_a_whole_number_is_a_float_where_a_field_is_one() -> None:
    assert type(text._expect(float, 3, "eps")) is float
    for wrong in (True, "3"):
        with pytest.raises(ValueError, match=f"eps: {wrong!r} is not of type float"):
            text._expect(float, wrong, "eps")
