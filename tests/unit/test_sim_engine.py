"""The engine on schedules whose times can be computed by hand: copies, contention, signals, stragglers, deadlocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from support.sim_toys import SWITCH, TOY, applicable, gpu, puts

from weft.builders import AllGatherMatmul
from weft.errors import ScheduleError
from weft.hw.topology import Wiring, mesh
from weft.schedule import RANK, Buffer, Collective, Compute, Copy, Draft, Expr, Schedule, Set, Wait, lookup
from weft.schedule.kernels import TileKernel
from weft.sim import NULL, simulate

# -- copies


def test_one_copy_takes_latency_plus_bytes_over_bandwidth() -> None:
    assert simulate(puts(2, 1), TOY).end_us == pytest.approx(7 + 1000 / 100)


def test_two_copies_over_one_link_take_twice() -> None:
    assert simulate(puts(2, 1, 1), TOY).end_us == pytest.approx(7 + 2 * 1000 / 100)


def test_copies_over_different_links_do_not_disturb_each_other() -> None:
    assert simulate(puts(4, 1, 2, 3), TOY).end_us == pytest.approx(7 + 1000 / 100)


def test_behind_a_switch_a_rank_sends_no_more_than_its_port_does() -> None:
    assert simulate(puts(4, 1, 2, 3), SWITCH).end_us == pytest.approx(7 + 3 * 1000 / 100)


def test_behind_a_switch_a_rank_receives_no_more_than_its_port_does() -> None:
    """All other ranks send to rank 0."""
    d = Draft("towards one", 4)
    x, box = d.buffer("x", 10, 25, "fp32", "input"), d.buffer("box", 40, 25, "fp32", "symmetric")
    send = Copy(x.part(), box.part(rows=(RANK * 10, 10), at=0))
    d.lane("copy", "copy").repeat("i", lookup((0, 1, 1, 1), RANK), send)
    assert simulate(d.schedule(), SWITCH).end_us == pytest.approx(7 + 3 * 1000 / 100)
    assert simulate(d.schedule(), TOY).end_us == pytest.approx(7 + 1000 / 100)


def test_an_all_gather_writes_and_reads_all_that_it_gathers() -> None:
    """The links take 10 us. Memory is the bottleneck, with 2 x 2000 bytes that the rank receives and forwards."""
    d = Draft("gather", 2)
    x, y = d.buffer("x", 10, 25, "fp32", "input"), d.buffer("y", 20, 25, "fp32", "output")
    d.lane("compute").all_gather(x.part(), y.part())
    model = replace(TOY, collective_bytes_per_us=100.0, collective_latency_us=3.0)
    assert simulate(d.schedule(), model).end_us == pytest.approx(3 + 1000 / 100)
    assert simulate(d.schedule(), replace(model, hbm_bytes_per_us=200.0)).end_us == pytest.approx(3 + 4000 / 200)


def test_copies_share_the_engines_there_are() -> None:
    assert simulate(puts(4, 1, 2, 3), replace(TOY, copy_engines=1)).end_us == pytest.approx(7 + 3 * 1000 / 100)


def test_a_copying_kernel_is_as_fast_as_its_compute_units_allow() -> None:
    assert simulate(puts(2, 1, by="kernel"), TOY).end_us == pytest.approx(1000 / 50)
    assert simulate(puts(2, 1, by="kernel"), replace(TOY, kernel_copy_units=2)).end_us == pytest.approx(1000 / 100)


def test_rows_of_a_two_dimensional_copy_cost_extra_and_whole_rows_do_not() -> None:
    model = replace(TOY, copy_row_us=0.5)
    d = Draft("columns", 2)
    x = d.buffer("x", 10, 50, "fp32", "input")
    box = d.buffer("box", 10, 50, "fp32", "symmetric")
    half = (0, 25)
    d.lane("copy", "copy").copy(x.part(cols=half), box.part(cols=half, at=(RANK + 1) % 2))
    assert simulate(d.schedule(), model).end_us == pytest.approx(7 + 1000 / 100 + 10 * 0.5)
    assert simulate(puts(2, 1), model).end_us == pytest.approx(7 + 1000 / 100)


# -- contention


def test_a_slow_copy_takes_no_more_of_a_port_than_it_can_and_leaves_the_rest_to_a_fast_one() -> None:
    """The port has 100 bytes/us. Alone, one copy gets 100 and another copy, by kernel, gets 10. Together they get 90
    and 10.
    """
    model = replace(SWITCH, copy_latency_us=0.0, put_bytes_per_us=((1, 10.0),))
    d = Draft("two", 2)
    x, peer = d.buffer("x", 10, 25, "fp32", "input"), (RANK + 1) % 2
    for by in ("dma", "kernel"):
        box = d.buffer(f"box {by}", 10, 25, "fp32", "symmetric")
        d.lane(by, "copy").copy(x.part(), box.part(at=peer), by)  # type: ignore[arg-type]
    ends = {span.lane: span.end_us for span in simulate(d.schedule(), model).timeline if span.rank == 0}
    assert ends == {"dma": pytest.approx(1000 / 90), "kernel": pytest.approx(1000 / 10)}


def test_copying_kernels_beyond_the_device_wait_for_each_other() -> None:
    """Each copy holds two of four units. Six concurrent copies, none of which waits for a link, take three times as
    long as two.
    """
    model = replace(TOY, kernel_copy_units=2, wiring=Wiring(mesh, (1e6,)))
    two, six = (simulate(puts(7, *range(1, n + 1), by="kernel"), model).end_us for n in (2, 6))
    assert six == pytest.approx(3 * two)


def _matmul_and_copy(by: str = "dma", lanes: int = 1) -> Draft:
    """Return a schedule with a 128^3 fp16 GEMM on each of `lanes` lanes, and a put of 30720 bytes."""
    d = Draft("beside", 2)
    a, b = d.buffer("a", 128, 128, "fp16", "input"), d.buffer("b", 128, 128, "fp16", "input")
    for lane in range(lanes):
        d.lane(f"compute {lane}").matmul(d.buffer(f"y{lane}", 128, 128, "fp16", "output").part(), a.part(), b.part())
    x, box = d.buffer("x", 128, 120, "fp16", "input"), d.buffer("box", 128, 120, "fp16", "symmetric")
    d.lane("copy", "copy").copy(x.part(), box.part(at=(RANK + 1) % 2), by)  # type: ignore[arg-type]
    return d


# The GEMM alone has 2 x 128^3 operations in 200 us, and uses 0.8 of the memory bandwidth for its 98304 bytes. The copy
# alone takes 100 us. A rank's copy and its peer's copy together use 2 x 307.2 bytes/us of each memory.
MATMUL_US, COPY_US = 200.0, 100.0
SCARCE = replace(
    TOY, compute_units=1, launch_us=1e-9, hbm_bytes_per_us=98304 / MATMUL_US / 0.8, wiring=Wiring(mesh, (307.2,)),
    matmul_flops_per_us={"fp16": 2 * 128**3 / MATMUL_US}, copy_bytes_per_us=307.2, copy_latency_us=0.0,
)  # fmt: skip


def test_a_matmul_beside_a_copy_loses_what_the_memory_lacks() -> None:
    """The outgoing copy, the incoming copy and the GEMM need 0.5, 0.5 and 0.8 of the memory, and get a third each."""
    copied = COPY_US * 0.5 * 3
    matmul_us = copied + MATMUL_US - copied / (0.8 * 3)
    result = simulate(_matmul_and_copy().schedule(), SCARCE)
    assert {s.name.split()[0]: s.end_us for s in result.timeline if s.rank == 0} == {
        "copy": pytest.approx(copied, rel=1e-6),
        "matmul": pytest.approx(matmul_us, rel=1e-6),
    }


def test_with_memory_enough_neither_loses() -> None:
    plenty = replace(SCARCE, hbm_bytes_per_us=1e9)
    result = simulate(_matmul_and_copy().schedule(), plenty)
    assert sorted(s.end_us for s in result.timeline if s.rank == 0) == pytest.approx([COPY_US, MATMUL_US], rel=1e-6)


def test_two_matmuls_on_two_lanes_share_the_compute_units() -> None:
    plenty = replace(SCARCE, hbm_bytes_per_us=1e9)
    assert simulate(_matmul_and_copy(lanes=2).schedule(), plenty).end_us == pytest.approx(2 * MATMUL_US, rel=1e-6)


def test_matmuls_that_leave_units_idle_fill_each_others_gaps() -> None:
    """16 tiles on 12 units are two waves, the second of which is a third full. So 1.5 GEMMs fit into the time of one."""
    model = replace(SCARCE, hbm_bytes_per_us=1e12, compute_units=12, tile=(32, 32), launch_us=500.0)
    alone = simulate(_matmul_and_copy(lanes=1).schedule(), model).end_us - 500
    two = simulate(_matmul_and_copy(lanes=2).schedule(), model).end_us - 500
    assert two == pytest.approx(2 * alone * (16 / 24))


def _matmuls_and_copies(size: int, matmuls: int, rows: int, cols: int, copies: int) -> Schedule:
    """Return a schedule of cubic GEMMs, one after the other, with concurrent puts by kernel. Each put is a launch of
    its own.
    """
    d = Draft("beside", 2)
    a, b, y = (
        d.buffer(name, size, size, "fp16", role) for name, role in (("a", "input"), ("b", "input"), ("y", "output"))
    )
    compute, copy = d.lane("compute"), d.lane("copy", "copy")
    for _ in range(matmuls):
        compute.matmul(y.part(), a.part(), b.part())
    sources = [d.buffer(f"x{i}", rows, cols, "fp16", "input") for i in range(2)]
    box = d.buffer("box", rows, cols, "fp16", "symmetric")
    for i in range(copies):
        copy.copy(sources[i % 2].part(), box.part(at=(RANK + 1) % 2), "kernel")
    return d.schedule()


def test_a_copying_kernel_takes_its_compute_units_from_the_matmul() -> None:
    """The copy takes one of four units. The GEMM has three quarters of its speed until the copy has ended."""
    model = replace(SCARCE, hbm_bytes_per_us=1e12, compute_units=4, tile=(32, 32), put_bytes_per_us=((1, 307.2),))
    model = replace(model, matmul_flops_per_us={"fp16": 2 * 128**3 / MATMUL_US})
    done_beside = COPY_US * 3 / 4
    expected = COPY_US + MATMUL_US - done_beside
    assert simulate(_matmul_and_copy("kernel").schedule(), model).end_us == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("keeps", "second_begins_us"), [(1.0, 225.0), (0.0, 100.0)])
def test_a_copying_kernel_that_comes_later_waits_until_a_matmul_gives_its_units_back(
    keeps: float, second_begins_us: float
) -> None:
    """The first copy begins before the first GEMM, and has its unit. The second copy gets a unit when that GEMM has
    ended.
    """
    model = replace(SCARCE, hbm_bytes_per_us=1e12, compute_units=4, tile=(32, 32), put_bytes_per_us=((1, 307.2),))
    model = replace(model, matmul_flops_per_us={"fp16": 2 * 128**3 / MATMUL_US}, matmul_keeps=keeps)
    timeline = simulate(_matmuls_and_copies(128, 2, 128, 120, 2), model).timeline
    ends = [s.end_us for s in timeline if s.rank == 0 and s.name.startswith("copy")]
    assert ends == pytest.approx([COPY_US, second_begins_us + COPY_US], rel=1e-6)
    assert max(s.end_us for s in timeline) == pytest.approx(2 * MATMUL_US + 2 * COPY_US / 4, rel=1e-6)


@dataclass(frozen=True, slots=True)
class _Divided(TileKernel):
    kind: ClassVar[str] = "divided"
    divides_tiles: ClassVar[bool] = True


def _tiles_and_copy(rows: int) -> Schedule:
    """Return a schedule with a GEMM of 16 tiles, and a concurrent put of `rows` rows by kernel; without the put if rows is 0."""
    d, tile = Draft("tiles", 2), Expr("tile")
    a, b, y = (
        d.buffer(name, 512, 512, "fp16", role) for name, role in (("a", "input"), ("b", "input"), ("y", "output"))
    )
    gemm = Compute("matmul", y.part(rows=(tile * 32, 32)), (a.part(rows=(tile * 32, 32)), b.part()))
    d.lane("compute").tiles(_Divided(), "tile", 16, gemm)
    if rows:
        x, box = d.buffer("x", rows, 120, "fp16", "input"), d.buffer("box", rows, 120, "fp16", "symmetric")
        d.lane("copy", "copy").copy(x.part(), box.part(at=(RANK + 1) % 2), "kernel")
    return d.schedule()


@pytest.mark.parametrize(("units", "stalls"), [(16, True), (8, False)])
def test_the_last_programs_of_a_grouped_gemm_wait_for_units_or_for_its_first_programs(units: int, stalls: bool) -> None:
    """The GEMM has programs for 92 of 100 units. A copy that holds 16 units delays it by the copy's time, but at most by the
    GEMM's own time. A copy on the other 8 units does not delay it.
    """
    model = replace(TOY, compute_units=100, kernel_copy_units=units, put_bytes_per_us=((units, 100.0),))
    model = replace(model, matmul_flops_per_us={"fp16": 2 * 512**3 / MATMUL_US}, tile=(32, 32))

    def end_us(rows: int) -> float:
        spans = simulate(_tiles_and_copy(rows), model).timeline
        return max(s.end_us for s in spans if s.rank == 0 and s.name.startswith("divided"))

    alone_us, copy_us = end_us(0), 128 * 240 / 100
    assert copy_us < alone_us / 2
    assert end_us(128) == pytest.approx(alone_us + copy_us * stalls, rel=0.02)
    assert end_us(64 * 128) == pytest.approx((1 + stalls) * alone_us, rel=0.2)


def test_copying_kernels_beside_matmuls_are_as_slow_as_they_were_measured() -> None:
    """Measured on two H100s, with copies of 64 MiB by kernels of 64 programs: GEMMs were slower by 6% to 9%, and copies
    got 41 to 44.5 of 354 GB/s.
    """
    model, size, matmuls, count = gpu("h100", 2), 8192, 4, 64 << 20
    timeline = simulate(_matmuls_and_copies(size, matmuls, 8192, 4096, 20), model).timeline
    mine = [s for s in timeline if s.rank == 0]
    end_us = max(s.end_us for s in mine if s.name.startswith("matmul"))
    copies = sum(s.name.startswith("copy") and s.end_us <= end_us for s in mine)
    assert 1.06 <= end_us / (matmuls * model.matmul_us(size, size, size, "fp16")) <= 1.09
    assert 41e3 <= copies * count / end_us <= 44.5e3


def test_engines_disturb_a_matmul_without_being_slowed_down_themselves() -> None:
    """Each GPU's memory is read and written at 307.2 bytes/us each, which costs a tenth of its compute rate."""
    plenty = replace(SCARCE, hbm_bytes_per_us=1e12, copy_disturbance=0.1 / (2 * 307.2))
    ends = sorted(s.end_us for s in simulate(_matmul_and_copy().schedule(), plenty).timeline if s.rank == 0)
    assert ends == pytest.approx([COPY_US, MATMUL_US + 0.1 * COPY_US], rel=1e-6)


# -- signals


def _chain(world: int) -> Draft:
    """Return a schedule in which every rank puts to its right neighbour, and squares the data from its left neighbour."""
    d = Draft("chain", world)
    x, box = d.buffer("x", 10, 25, "fp32", "input"), d.buffer("box", 10, 25, "fp32", "symmetric")
    y = d.buffer("y", 10, 25, "fp32", "output")
    arrived, credit = d.signals("arrived", 1), d.signals("credit", 1)
    right, left = (RANK + 1) % world, (RANK + world - 1) % world
    d.lane("copy", "copy").wait(credit, previous=True).copy(x.part(), box.part(at=right)).set(arrived, at=right)
    d.lane("compute").wait(arrived).compute("relu", y.part(), box.part()).set(credit, at=left)
    return d


SIGNALS = replace(TOY, signal_remote_us=2.0, launch_us=3.0)


def test_a_wait_ends_when_the_signal_has_come() -> None:
    result = simulate(_chain(4).schedule(), SIGNALS)
    (wait,) = (s for s in result.timeline if s.rank == 2 and s.name == "wait arrived[0]")
    assert (wait.start_us, wait.end_us) == (0, pytest.approx(7 + 10 + 2))
    assert result.end_us == pytest.approx(7 + 10 + 2 + 3, abs=0.01)


def test_runs_wait_for_the_run_before() -> None:
    """A rank's second run begins when its lanes have ended the first. Its copy then waits until the receiver has read
    the first data.
    """
    first, third = (simulate(_chain(3).schedule(), SIGNALS, runs=n) for n in (1, 3))
    assert third.end_us == pytest.approx(3 * first.end_us + 2 * 2)  # the latency of the signal `credit` between runs
    assert third.per_run_us == pytest.approx(first.end_us + 2)
    assert [len(ends) for ends in third.ends_us] == [3, 3, 3]
    (waits,) = {
        s.end_us - s.start_us for s in third.timeline if "previous" in s.name and s.rank == 0 and s.start_us == 0
    }
    assert waits == 0


def test_a_straggler_delays_exactly_what_depends_on_it() -> None:
    """The right neighbour waits for the whole delay. The late rank itself waits only until its copy is sent, because
    its input arrived earlier.
    """
    on_time = simulate(_chain(4).schedule(), SIGNALS).end_us
    late = simulate(_chain(4).schedule(), SIGNALS, late_us=(0, 0, 50, 0)).ends_us
    assert [ends[0] for ends in late] == pytest.approx([on_time, on_time, 50 + 7 + 10, on_time + 50])


def test_a_collective_begins_when_the_last_rank_has_come() -> None:
    problem = AllGatherMatmul.even(512, 256, 256, 4)
    schedule = applicable(problem)["serial"]
    model = gpu("h200", 4)
    end = simulate(schedule, model).end_us
    late = simulate(schedule, model, late_us=(0, 30, 0, 10))
    assert late.end_us == pytest.approx(end + 30)
    starts = {s.rank: s.start_us for s in late.timeline if s.name.startswith("all_gather")}
    assert starts == dict.fromkeys(range(4), pytest.approx(30)), "until then nobody gathers: those in time wait"


def test_loops_are_written_out() -> None:
    d = Draft("loop", 2)
    x, box = d.buffer("x", 10, 25, "fp32", "input"), d.buffer("box", 10, 25, "fp32", "symmetric")
    arrived = d.signals("arrived", 5)
    part = x.part(rows=(Expr("i") * 2, 2)), box.part(rows=(Expr("i") * 2, 2), at=(RANK + 1) % 2)
    d.lane("copy", "copy").repeat("i", 5, Copy(*part), Set("arrived", Expr("i"), (RANK + 1) % 2))
    d.lane("compute").repeat("i", RANK + 4, Wait("arrived", Expr("i")))
    result = simulate(d.schedule(), TOY)
    assert [s.name for s in result.timeline if s.rank == 0 and s.lane == "compute"] == [
        f"wait arrived[{i}]" for i in range(4)
    ]
    assert [s.name for s in result.timeline if s.rank == 1 and s.lane == "compute"] == [
        f"wait arrived[{i}]" for i in range(5)
    ]
    assert result.end_us == pytest.approx(5 * (7 + 200 / 100))
    assert arrived.count == 5


# -- refused schedules


def test_a_deadlock_names_lanes_and_waits() -> None:
    d = Draft("knot", 2)
    ready = d.signals("ready", 2)
    d.lane("left").wait(ready, 0).set(ready, 1)
    d.lane("right").wait(ready, 1, count=2).set(ready, 0)
    with pytest.raises(ScheduleError) as caught:
        simulate(d.schedule(), TOY)
    assert "lane 'left' in run 1: wait ready[0] has 0 of 1 sets" in str(caught.value)
    assert "lane 'right' in run 1: wait ready[1] has 0 of 2 sets" in str(caught.value)


def test_a_set_too_few_is_found_in_the_run_that_lacks_it() -> None:
    d = Draft("twice", 2)
    ready = d.signals("ready", 1)
    d.lane("waits").wait(ready, count=2)
    d.lane("sets").set(ready)
    with pytest.raises(ScheduleError, match=r"rank 0 lane 'waits' in run 1: wait ready\[0\] has 1 of 2 sets"):
        simulate(d.schedule(), NULL)


def test_a_signal_within_a_rank_ends_a_launch() -> None:
    """Two copies by kernel with the same source are one launch, unless a signal to another stream of the rank is
    between them.
    """

    def end_us(tell: bool) -> float:
        d = Draft("two copies", 2)
        x, other = d.buffer("x", 10, 25, "fp32", "input"), (RANK + 1) % 2
        boxes = [d.buffer(f"box{i}", 10, 25, "fp32", "symmetric") for i in range(2)]
        came, told = d.signals("came", 2), d.signals("told", 1)
        lane = d.lane("copies", "copy")
        for i, box in enumerate(boxes):
            lane.copy(x.part(), box.part(at=other), "kernel").set(came, i, at=other)
            if tell and not i:
                lane.set(told)
        hears = d.lane("compute").wait(came, 0).wait(came, 1)
        if tell:
            hears.wait(told)
        return simulate(d.schedule(), replace(TOY, launch_us=5.0)).end_us

    assert end_us(tell=False) == pytest.approx(5 + 2 * 1000 / 50)
    assert end_us(tell=True) == pytest.approx(2 * (5 + 1000 / 50))


def test_a_collective_that_one_rank_leaves_out_is_found() -> None:
    d = Draft("alone", 2)
    x, y = d.buffer("x", 4, 4, "fp32", "input"), d.buffer("y", 8, 4, "fp32", "output")
    d.lane("compute").repeat("i", RANK, Collective("all_gather", x.part(), y.part()))
    with pytest.raises(ScheduleError, match=r"only ranks \[1\] of 2 call this collective"):
        simulate(d.schedule(), TOY)
    with pytest.raises(ScheduleError, match="rank 1 lane 'compute' in run 1: all_gather x -> y, which not all ranks"):
        simulate(d.schedule(), TOY, trusted=True)


@pytest.mark.parametrize("world", [2, 16])
def test_steps_that_do_not_fit_are_refused_before_they_are_simulated(world: int) -> None:
    """The invalid steps are an all-to-all that receives less than is sent, a copy of more rows than exist, and a copy
    into private memory of a peer.
    """

    def draft(rows: int, role: str = "symmetric") -> tuple[Draft, Buffer, Buffer]:
        d = Draft("odd", world)
        return d, d.buffer("x", 64 * world, 32, "fp32", "input"), d.buffer("y", rows, 32 * world, "fp32", role)  # type: ignore[arg-type]

    d, x, y = draft(2)
    d.lane("compute").all_to_all(x.part(), y.part())
    with pytest.raises(
        ScheduleError,
        match=rf"schedule odd has 1 fault:\n.*the ranks contribute \[{64 * world}, .*the shapes of dst are \[\(2",
    ):
        simulate(d.schedule(), TOY)
    d, x, y = draft(2)
    d.lane("copies", "copy").copy(x.part(), y.part(cols=(0, 32), at=(RANK + 1) % world))
    with pytest.raises(ScheduleError, match=r"rank 0, lane copies, step 1: "):
        simulate(d.schedule(), TOY)
    d, x, y = draft(64 * world, "scratch")
    d.lane("copies", "copy").copy(x.part(), y.part(cols=(0, 32), at=(RANK + 1) % world))
    with pytest.raises(
        ScheduleError,
        match=(
            r"belongs to a peer, so y must be symmetric, but it is scratch \(\d+ more of this "
            r"kind\)"
        ),
    ):
        simulate(d.schedule(), TOY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runs": 0}, "runs=0"),
        ({"late_us": (1.0,)}, "must have 2 times"),
        ({"late_us": (0, -1)}, "of at least 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(puts(2, 1), TOY, **arguments)


def test_a_model_of_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="for 2 ranks, but the model has 4"):
        simulate(puts(2, 1), gpu("h200", 4))


# -- the host, and late ranks


def test_the_host_needs_its_time_in_every_run_and_from_its_beginning() -> None:
    model = replace(TOY, host_step_us=5.0)
    one = simulate(puts(2, 1), model, mode="single").end_us
    assert one == pytest.approx(5 + 7 + 1000 / 100)
    assert simulate(puts(2, 1), model, mode="single", runs=3).ends_us[0] == pytest.approx([one, 2 * one, 3 * one])
    late = simulate(puts(2, 1), model, mode="single", late_us=(40, 0))
    assert [ends[0] for ends in late.ends_us] == pytest.approx([40 + one, one])


def test_a_rank_is_late_in_each_of_its_runs() -> None:
    ends = simulate(puts(2, 1), TOY, runs=3, late_us=(40, 0)).ends_us
    assert ends[0] == pytest.approx([57, 114, 171])
    assert ends[1] == pytest.approx([17, 34, 51])
