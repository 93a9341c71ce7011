"""Sends in schedules, without ranks: what `verify` finds, messages, the simulated time, and the refusal on GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from weft.errors import ScheduleError
from weft.hw import load_machine
from weft.hw.topology import Wiring, hosts
from weft.schedule import RANK, Draft, Lane, Schedule, Send, Set, lookup, total
from weft.schedule.messages import Post, Receive, with_messages
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify
from weft.sim import model_of, simulate

WORLD = 3


def sent(change: Callable[[Draft], object] = lambda d: None, *, at: str = "sender", read_by: str = "owner") -> Schedule:
    """Return a schedule of y = the left neighbour's x, or x of the rank before it.

    at: the place of the signal: after the send on the "sender" lane, on an "other" lane that waits for the sender, or
        "before" the send. read_by: "owner" of the box, or its right "neighbour", which reads the box in place.
    """
    d, right, left = Draft("sent", WORLD), (RANK + 1) % WORLD, (RANK + WORLD - 1) % WORLD
    x, y = d.buffer("x", 2, 4, "fp32", "input"), d.buffer("y", 2, 4, "fp32", "output")
    box, there, mine = d.buffer("box", 2, 4, "fp32", "symmetric"), d.signals("there", 1), d.signals("mine", 1)
    free, told = d.signals("free", 1), d.signals("told", 1)
    sender, compute = d.lane("sender", "copy"), d.lane("compute")
    if at == "before":
        sender.set(there, at=right)
    if read_by != "owner":
        sender.wait(free, previous=True)
    sender.send(x.part(), box.part(at=right))
    if at == "sender":
        sender.set(there, at=right)
    if at == "other":
        sender.set(mine)
        d.lane("other", "copy").wait(mine).set(there, at=right)
    compute.wait(there)
    if read_by != "owner":
        compute.set(told, at=right).wait(told)
    if read_by == "neighbour":
        compute.copy(box.part(at=left), y.part(), "kernel").set(free, at=(RANK + 1) % WORLD)
    else:
        compute.copy(box.part(), y.part(), "kernel")
    change(d)
    return d.schedule()


def test_a_signal_behind_the_rows_orders_them() -> None:
    """The receiver's box needs no credit: a rank receives only in its own run, when its lanes have ended the last run."""
    verify(sent())
    verify(sent(at="sender", read_by="neighbour"))  # the sender has waited for the reader of the previous run


@pytest.mark.parametrize("at", ["other", "before"])
def test_a_signal_that_may_arrive_before_the_rows_is_a_race(at: str) -> None:
    with pytest.raises(ScheduleError, match=r"receive box\[0:\+2, 0:\+4\] from rank \d.*race on box@\d"):
        verify(sent(at=at))


def test_a_box_that_a_neighbour_still_reads_is_a_race() -> None:
    """Without the wait for the neighbour, the next run may receive into the box while the neighbour reads it."""
    waits = sent(read_by="neighbour")
    lanes = tuple(Lane(one.name, one.resource, one.steps[one.name == "sender" :]) for one in waits.lanes)
    with pytest.raises(ScheduleError, match=r"race on box@.*in different runs"):
        verify(Schedule("no credit", WORLD, waits.buffers, waits.signals, lanes))


def test_a_signal_by_way_of_a_third_rank_is_a_race() -> None:
    d, right, left = Draft("by way", WORLD), (RANK + 1) % WORLD, (RANK + WORLD - 1) % WORLD
    x, y = d.buffer("x", 2, 4, "fp32", "input"), d.buffer("y", 2, 4, "fp32", "output")
    box, hint, there = d.buffer("box", 2, 4, "fp32", "symmetric"), d.signals("hint", 1), d.signals("there", 1)
    d.lane("sender", "copy").send(x.part(), box.part(at=right)).set(hint, at=left)
    d.lane("compute").wait(hint).set(there, at=left).wait(there).copy(box.part(), y.part(), "kernel")
    with pytest.raises(ScheduleError, match="race on box@"):
        verify(d.schedule())


def test_rows_without_a_signal_are_a_race() -> None:
    d, right = Draft("unsignaled", 2), (RANK + 1) % 2
    x, y = d.buffer("x", 2, 4, "fp32", "input"), d.buffer("y", 2, 4, "fp32", "output")
    box = d.buffer("box", 2, 4, "fp32", "symmetric")
    d.lane("sender", "copy").send(x.part(), box.part(at=right))
    d.lane("compute").copy(box.part(), y.part(), "kernel")
    with pytest.raises(ScheduleError, match="race on box@"):
        verify(d.schedule())


def misplaced(d: Draft) -> None:
    x, y = d.buffer("a", 2, 4, "fp32", "symmetric"), d.buffer("b", 2, 4, "fp32", "symmetric")
    d.lane("bad").send(x.part(at=(RANK + 1) % WORLD), y.part(at=(RANK + 1) % WORLD))


def to_itself(d: Draft) -> None:
    x, y = d.buffer("a", 2, 4, "fp32", "input"), d.buffer("b", 2, 4, "fp32", "symmetric")
    d.lane("bad").send(x.part(), y.part())


def shapes(d: Draft) -> None:
    x, y = d.buffer("a", 2, 4, "fp32", "input"), d.buffer("b", 3, 4, "bf16", "symmetric")
    d.lane("bad").send(x.part(), y.part(at=(RANK + 1) % WORLD))


def private(d: Draft) -> None:
    x, y = d.buffer("a", 2, 4, "fp32", "input"), d.buffer("b", 2, 4, "fp32", "scratch")
    d.lane("bad").send(x.part(), y.part(at=(RANK + 1) % WORLD))


def dynamic(d: Draft) -> None:
    x, y = d.buffer("a", 2, 4, "fp32", "input"), d.buffer("b", 2, 4, "fp32", "symmetric")
    n = d.buffer("n", 1, 1, "int64", "input")
    d.holds(n, [[1]] * WORLD)
    rows = (0, total("n", 0, 1))
    d.lane("bad").read(n).send(x.part(rows=rows), y.part(rows=rows, at=(RANK + 1) % WORLD))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (misplaced, "it reads memory of rank 1, but a rank can only send its own: let rank 1 send"),
        (to_itself, "it sends to its own rank: use copy"),
        (shapes, "dtypes differ: fp32, bf16"),
        (shapes, r"src has shape [2, 4], but dst has [3, 4]"),
        (private, "belongs to a peer, so b must be symmetric, but it is scratch"),
        (dynamic, "its size depends on n, which the receiver does not know: send a fixed number of rows"),
    ],
)
def test_a_wrong_send_is_named(change: Callable[[Draft], None], text: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(text)):
        verify(sent(change))


def test_a_signal_next_to_rows_needs_no_message_of_its_own() -> None:
    d = Draft("messages", 2)
    x, box = d.buffer("x", 1, 1, "fp32", "input"), d.buffer("box", 1, 1, "fp32", "symmetric")
    there, free, other = d.signals("there", 2), d.signals("free", 1), (RANK + 1) % 2
    lane = d.lane("sender").set(there, 0, at=other).send(x.part(), box.part(at=other)).set(there, 1, at=other)
    lane.wait(there, 1).set(free, at=other)
    ranks = [d.schedule().of_rank(rank) for rank in range(2)]
    near = with_messages(ranks)[0]
    assert [type(step) for step in near[0].steps] == [Set, Post, Post, type(ranks[0][0].steps[3]), Post]
    mapped, _ = with_messages(
        ranks, lambda a, b: True, {(1, "there", 1), (0, "there", 1), (0, "there", 0), (1, "there", 0)}
    )
    posts = [step for step in mapped[0].steps if isinstance(step, Post)]
    assert [(type(post.step), post.joined, post.number) for post in posts] == [
        (Set, False, 0),
        (Send, False, 1),
        (Set, True, 2),
    ]
    receives = [step for step in mapped[1].steps if isinstance(step, Receive)]
    assert [(type(one.step), one.joined, one.source) for one in receives] == [
        (Set, False, 1),
        (Send, False, 1),
        (Set, True, 1),
    ]


def test_a_schedule_with_sends_is_printed_and_stored() -> None:
    schedule = sent()
    assert "send    x -> box@((rank + 1) % 3)" in schedule.table()
    assert from_json(to_json(schedule)) == schedule


def pushed(peers: Sequence[int]) -> Schedule:
    """Return a schedule in which rank r sends 32 MiB to rank peers[r]."""
    d, to = Draft("pushed", len(peers)), lookup(peers, RANK)
    x, y = d.buffer("x", 4096, 4096, "bf16", "input"), d.buffer("y", 4096, 4096, "bf16", "output")
    box, there = d.buffer("box", 4096, 4096, "bf16", "symmetric"), d.signals("there", 1)
    d.lane("sender", "copy").send(x.part(), box.part(at=to)).set(there, at=to)
    d.lane("compute").wait(there).copy(box.part(), y.part(), "kernel")
    return d.schedule()


def test_a_send_takes_as_long_as_its_links() -> None:
    """Between hosts, 32 MiB take the NIC's time: at 40 GB/s 839 us, and at 400 GB/s a tenth. Within a host, they take the
    switch's time.
    """

    def us(peers: list[int], nic: float) -> float:
        model = model_of(load_machine("h100"), world_size=16)
        wiring = Wiring(hosts, (450e3, 0.5, nic * 1e3, 2.0, 8))
        return simulate(pushed(peers), replace(model, wiring=wiring)).end_us

    far, near = [(rank + 8) % 16 for rank in range(16)], [rank ^ 1 for rank in range(16)]
    assert us(far, 40) - us(far, 400) == pytest.approx(0.9 * 4096 * 4096 * 2 / 40e3, rel=0.02)
    assert us(near, 40) == us(near, 400) < us(far, 40)


def test_gpus_refuse_a_send() -> None:
    from weft.runtime.cuda.runnable import require_runnable_on_gpus

    with pytest.raises(
        ScheduleError,
        match=r"lane sender: send x.* -> box@1.*: the GPU executor runs no steps of kind 'send': it runs .*copy",
    ):
        require_runnable_on_gpus(sent(), 0)
