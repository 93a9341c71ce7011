"""Schedules that send to ranks whose memory is not mapped, on ranks that pretend to be on several hosts.

1. Results in many runs, with a rank late, also on one host. 2. Signals without rows, and signals of the previous run. 3. What
is refused, with the fix. 4. Ranks that hang, raise or die: every rank names the missing rank. Functions with a `group`
argument run on the ranks.
"""

from __future__ import annotations

import re
import time

import pytest
import torch
from pool import assert_deadline, assert_over, failure_of, misbehave
from schedule_cpu_ranks import intercept
from support.on_ranks import assert_error, error_of, own_group, told
from support.pretended_hosts import claimed, on_two_hosts

import weft
from weft import symm
from weft.launch import Pool, RankDiedError
from weft.runtime.cpu.schedule import CpuSchedule
from weft.schedule import RANK, Draft, Schedule, Set, lookup
from weft.schedule.verify import verify

ROWS, COLS = 7, 8
LONG_S = 30.0


def shifted(world: int, *, by: int = 1, cols: tuple[int, int] = (0, COLS)) -> Schedule:
    """Return a schedule of y = relu(x of the rank `by` places before), in two chunks of rows.

    cols: the columns (first, count) that are sent.
    """
    d, to = Draft("shifted", world), (RANK + by) % world
    x, y = d.buffer("x", ROWS, COLS, "fp32", "input"), d.buffer("y", ROWS, cols[1], "fp32", "output")
    box, arrived = d.buffer("box", ROWS, COLS, "fp32", "symmetric"), d.signals("arrived", 2)
    sender, compute = d.lane("to peer", "copy"), d.lane("compute")
    for c, rows in enumerate([(0, 4), (4, 3)]):
        sender.send(x.part(rows=rows, cols=cols), box.part(rows=rows, cols=cols, at=to)).set(arrived, c, at=to)
        compute.wait(arrived, c).compute("relu", y.part(rows=rows), box.part(rows=rows, cols=cols))
    return d.schedule()


def runs(group, schedule, cols, by, n_hosts):
    """Run the schedule 40 times, each time with new data, and sometimes with a rank late. Return the last timeline."""
    rank, world = group.rank(), group.size()
    with claimed(f"host {rank * n_hosts // world}"):
        own = own_group(group)
        for number in range(40):
            xs = torch.randn(world, ROWS, COLS, generator=torch.Generator().manual_seed(number))
            y, timeline = torch.full((ROWS, cols[1]), torch.nan), weft.Timeline()
            if number % 5 == 4 and number // 5 % world == rank:
                time.sleep(0.02)
            weft.run_schedule(schedule, {"x": xs[rank], "y": y}, own, timeline=timeline)
            assert torch.equal(y, xs[rank - by, :, cols[0] : cols[0] + cols[1]].relu()), (number, rank)
    return [(span.lane, span.name, span.bytes) for span in timeline.spans]


@pytest.mark.parametrize(
    ("ranks", "n_hosts", "by", "cols"),
    [(4, 2, 1, (0, COLS)), (6, 2, 3, (2, 5)), (3, 3, 1, (0, COLS)), (2, 1, 1, (0, COLS))],
    ids=["two hosts", "columns", "three hosts", "one host"],
)
def test_rows_arrive_in_each_run(pool: Pool, ranks: int, n_hosts: int, by: int, cols: tuple[int, int]) -> None:
    schedule = shifted(ranks, by=by, cols=cols)
    verify(schedule)
    for rank, spans in enumerate(pool.run(runs, schedule, cols, by, n_hosts, ranks=ranks, timeout_s=60)):
        to, source, row_bytes = (rank + by) % ranks, (rank - by) % ranks, cols[1] * 4
        assert [span for span in spans if "send" in span[1]] == [
            ("to peer", f"send x -> box@{to}", rows * row_bytes) for rows in (4, 3)
        ]
        assert spans.count((f"to peer of rank {source}", "receive box", 0)) == 2


def ping_pong(rounds: int) -> Schedule:
    """Return a schedule in which two ranks set signals of each other in turn, and then exchange x."""
    d, other = Draft("ping pong", 2), (RANK + 1) % 2
    x, y = d.buffer("x", 1, 1, "fp32", "input"), d.buffer("y", 1, 1, "fp32", "output")
    box, arrived = d.buffer("box", 1, 1, "fp32", "symmetric"), d.signals("arrived", 1)
    ping, free = d.signals("ping", 1), d.signals("free", 1)
    lane = d.lane("compute").wait(free, previous=True)
    for number in range(rounds):
        starts = lookup((1, 0), RANK)
        lane.repeat("first", starts, Set(ping, 0, other)).wait(ping, count=number + 1)
        lane.repeat("second", 1 - starts, Set(ping, 0, other))
    lane.send(x.part(), box.part(at=other)).set(arrived, at=other).wait(arrived).copy(box.part(), y.part(), "kernel")
    return lane.set(free, at=other) and d.schedule()


def exchanges(group, schedule):
    rank, lanes = group.rank(), []
    with on_two_hosts(group) as own:
        for number in range(20):
            y, timeline = torch.full((1, 1), torch.nan), weft.Timeline()
            given = {"x": torch.tensor([[10.0 * number + rank]]), "y": y}
            weft.run_schedule(schedule, given, own, timeline=timeline)
            assert y.item() == 10 * number + 1 - rank
            lanes.append([span.name for span in timeline.spans if span.lane == f"compute of rank {1 - rank}"])
    return lanes


def test_signals_are_sent_without_rows_too(pool: Pool) -> None:
    """A signal that is only awaited in the next run is not sent. It must not change the counts of other signals."""
    schedule = ping_pong(3)
    verify(schedule)
    wanted = ["receive ping"] * 3 + ["receive box", "receive arrived"]
    assert pool.run(exchanges, schedule, ranks=2) == [[wanted] * 20] * 2


def far(how: str) -> Schedule:
    """Return a schedule on two ranks with a step that needs memory of the other rank, or that no rank can do."""
    d, other = Draft(how, 2), (RANK + 1) % 2
    x, y = d.buffer("x", 2, 2, "fp32", "input"), d.buffer("y", 2, 2, "fp32", "output")
    box, come, done = d.buffer("box", 2, 2, "fp32", "symmetric"), d.signals("come", 1), d.signals("done", 1)
    lane, theirs = d.lane("compute").wait(done, previous=True), box.part(at=other)
    if how == "copy":
        lane.copy(x.part(), theirs, "kernel").set(come, at=other).wait(come).copy(box.part(), y.part(), "kernel")
    elif how == "store":
        lane.compute("relu", theirs, x.part()).set(come, at=other).wait(come).copy(box.part(), y.part(), "kernel")
    elif how == "load":
        lane.copy(x.part(), box.part(), "kernel").set(come, at=other).wait(come).compute("relu", y.part(), theirs)
    else:
        lane.copy(x.part(), box.part(), "kernel").set(come, at=other).wait(come)
        lane.send(theirs, y.part())
    return lane.set(done, at=other) and d.schedule()


REFUSED = {
    "copy": "copy x[0:+2, 0:+2] -> box@1[0:+2, 0:+2] by kernel: memory of rank 1, on host beta, is not mapped on rank 0: "
    "write lane.send(src, dst) instead of the copy",
    "store": "relu box@1[0:+2, 0:+2] = x[0:+2, 0:+2]: memory of rank 1, on host beta, is not mapped on rank 0: compute into "
    "memory of this host, then write lane.send(src, dst)",
    "load": "relu y[0:+2, 0:+2] = box@1[0:+2, 0:+2]: memory of rank 1, on host beta, is not mapped on rank 0: let rank 1 "
    "send it, with lane.send(src, dst)",
    "pull": "send box@1[0:+2, 0:+2] -> y[0:+2, 0:+2] | it reads memory of rank 1, but a rank can only send its own: let rank 1 "
    "send",
}


def refused(group):
    found = {}
    with on_two_hosts(group) as own:
        for how in REFUSED:
            given = {"x": torch.ones(2, 2), "y": torch.empty(2, 2)}
            found[how] = told(lambda how=how, given=given: weft.run_schedule(far(how), given, own))
        y = torch.empty(ROWS, COLS)
        weft.run_schedule(shifted(2), {"x": torch.ones(ROWS, COLS), "y": y}, own)  # the group is still usable
        assert torch.equal(y, torch.ones(ROWS, COLS))
    return found


def test_what_needs_mapped_memory_is_refused_with_the_fix(pool: Pool) -> None:
    for found in pool.run(refused, ranks=2):
        for how, text in REFUSED.items():
            assert found[how].startswith("ScheduleError: ")
            assert text in found[how]


BAD_RANK = 2
STEPS = ["send x -> box@3", "relu y"]


def stuck(group, step, doing):
    """Run once. In the second run, let a rank of the other host raise, hang or die at a step."""
    rank = group.rank()
    with claimed(f"node{rank // 2}"):
        own = own_group(group)
        comm = symm.communicator(own, "cpu")
    executor = CpuSchedule(shifted(4), comm)
    tensors = {"x": torch.ones(ROWS, COLS), "y": torch.empty(ROWS, COLS)}
    executor.run(tensors)

    if rank == BAD_RANK:
        intercept(executor, step, before=lambda: misbehave(doing, comm))
    started = time.monotonic()
    error = failure_of(lambda: executor.run(tensors, deadline_s=2.0 if doing == "hang" else LONG_S))
    took_s = time.monotonic() - started
    again = error_of(lambda: executor.run(tensors))
    executor.close()
    return error, took_s, again


def test_a_rank_that_does_not_send_is_named(pool: Pool) -> None:
    answers = pool.run(stuck, STEPS[0], "hang", ranks=4)
    assert all(took_s < LONG_S / 2 for _, took_s, _ in answers)
    text = r"rank 3 waited 2 s for box\[0:\+4, 0:\+8\] of schedule shifted from rank 2 \(pid \d+ on host node1\)"
    errors = [error for rank, (error, _, _) in enumerate(answers) if rank != BAD_RANK and error[0]]
    assert_deadline(errors, text)
    assert answers[3][0][0]
    assert_over([again for _, _, again in answers])


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_raises(pool: Pool, step: str) -> None:
    answers = pool.run(stuck, step, "raise", ranks=4)
    assert answers[BAD_RANK][0] == ("ArithmeticError", "on purpose")
    for error, took_s, again in answers:
        assert took_s < LONG_S / 2
        if error[0] not in ("", "ArithmeticError"):  # a rank that has all its data may not be told
            assert_error(error, "PoisonedGroupError", match=r"rank 2: schedule shifted, lane .*on purpose")
        assert_over([again])


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_dies(step: str) -> None:
    with Pool(4) as pool:
        answers = pool.run(stuck, step, "die", return_exceptions=True, timeout_s=60)
    assert isinstance(answers[BAD_RANK], RankDiedError)
    for rank in (0, 1, 3):
        error, took_s, (kind, text) = answers[rank]
        assert took_s < LONG_S / 2
        assert error[0] in ("", "PeerLostError", "PoisonedGroupError")
        assert kind in ("PeerLostError", "PoisonedGroupError")
        assert re.search(r"rank 2 \(pid \d+ on host node1\) died", text), text
