"""Steps that accumulate: copies, GEMMs into a peer's buffer, sums, and gloo's reductions, against float64.

They run on CPU processes, with all ranks adding to one place at once. Also their verification. Functions with a `group`
argument run on the ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.made_up import require_runnable_on_gpus
from support.slow import in_turn

from weft.builders import MatmulReduceScatter, named
from weft.errors import ScheduleError
from weft.launch import Pool
from weft.runtime.cpu.schedule import CpuSchedule
from weft.runtime.unfused import STRAIGHT
from weft.runtime.unfused.serial import Unfused
from weft.schedule import RANK, Buffer, Compute, Draft, Expr, Schedule, Set, lookup
from weft.schedule.kernels import TrackedMatmul
from weft.schedule.verify import verify
from weft.sim import NULL, simulate
from weft.symm import communicator
from weft.timeline import Timeline

M, K, N = 40, 48, 36
"""The rows of the result that a rank owns, the summed dimension on a rank, and the columns."""
TILE = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 0.06, "fp16": 0.01, "fp64": 1e-13}
ON_CPU = DTYPES | {"fp64": torch.float64}


def scattered(world: int, dtype: str, way: str) -> Schedule:
    """Return a schedule of y = this rank's rows of the sum of all ranks' x @ w.

    way: "copy" and "compute" add into each owner's buffer. With "reduce", peers copy their products there, and the
    owner adds them. With "remote", the peers' GEMMs add there. "collective" uses gloo. "tracked" and "tracked remote"
    use one GEMM whose tiles set signals. "pulled[...]" is the schedule of that name.
    """
    if way.startswith("pulled"):
        return named(MatmulReduceScatter(world, world * M, N, K, dtype), way).build()
    d = Draft(f"matmul, reduce-scatter by {way}", world)
    x, w = d.buffer("x", world * M, K, dtype, "input"), d.buffer("w", K, N, dtype, "input")
    y = d.buffer("y", M, N, dtype, "output")
    lane = d.lane("compute")
    part = d.buffer("part", world * M, N, dtype, "scratch")
    if way == "library":
        lane.matmul(part.part(), x.part(), w.part()).reduce_scatter(part.part(), y.part())
        return d.schedule()
    own = (RANK * M, M)
    if way.startswith("tracked"):
        return tracked(d, x, w, y, part, remote=way == "tracked remote")
    ready, done = d.signals("ready", world), d.signals("done", world)
    if way in ("reduce", "remote"):
        box = d.buffer("box", world * M, N, dtype, "symmetric")
        for distance in range(1, world):
            to = (RANK + distance) % world
            made = box.part(rows=own, at=to) if way == "remote" else part.part(rows=(to * M, M))
            lane.wait(ready, to, previous=True).matmul(made, x.part(rows=(to * M, M)), w.part())
            if way == "reduce":
                lane.copy(made, box.part(rows=own, at=to), by="kernel")
            lane.set(done, RANK, at=to)
        lane.matmul(part.part(rows=own), x.part(rows=own), w.part())
        for distance in range(1, world):
            lane.wait(done, (RANK + distance) % world)
        others = [box.part(rows=((RANK + distance) % world * M, M)) for distance in range(1, world)]
        lane.reduce(y.part(), part.part(rows=own), *others)
        for distance in range(1, world):
            lane.set(ready, RANK, at=(RANK + distance) % world)
        return d.schedule()
    sum_ = d.buffer("sum", M, N, dtype, "symmetric")
    lane.matmul(sum_.part(), x.part(rows=own), w.part())
    for distance in range(1, world):
        lane.set(ready, RANK, at=(RANK + distance) % world)
    for distance in range(1, world):
        to = (RANK + distance) % world
        adding = d.lane("adding", "copy") if way == "copy" else lane
        rows, there = (to * M, M), sum_.part(at=to)
        if way == "copy":
            arrived = d.signals(f"computed {distance}", 1)
            lane.matmul(part.part(rows=rows), x.part(rows=rows), w.part()).set(arrived)
            adding.wait(arrived).wait(ready, to).copy(part.part(rows=rows), there, by="kernel", accumulate=True)
        else:
            adding.wait(ready, to).matmul(there, x.part(rows=rows), w.part(), accumulate=True)
        adding.set(done, RANK, at=to)
    for distance in range(1, world):
        lane.wait(done, (RANK + distance) % world)
    lane.compute("relu", y.part(), sum_.part())
    return d.schedule()


def tracked(d: Draft, x: Buffer, w: Buffer, y: Buffer, part: Buffer, *, remote: bool) -> Schedule:
    """Append one GEMM in tiles, with the next rank's rows first and own rows last. Complete chunks are sent while it
    runs.

    remote: True to store tiles in their owners' memory, and set signals there.
    """
    world, t = d.world_size, Expr("t")
    down, across = -(-M // TILE), -(-N // TILE)
    per_rank = down * across
    box = d.buffer("box", world * M, N, y.dtype, "symmetric")
    computed, done, ready = d.signals("computed", world), d.signals("done", world), d.signals("ready", world)
    turn, i, j = t // per_rank, t % per_rank // across, t % across
    to = (RANK + 1 + turn) % world
    in_part = TILE * i, lookup([min(TILE, M - TILE * i) for i in range(down)], i)
    cols = TILE * j, lookup([min(TILE, N - TILE * j) for j in range(across)], j)
    rows = to * M + in_part[0], in_part[1]
    out = (
        box.part(rows=(RANK * M + in_part[0], in_part[1]), cols=cols, at=to)
        if remote
        else part.part(rows=rows, cols=cols)
    )
    matmul = Compute("matmul", out, (x.part(rows=rows), w.part(cols=cols)))
    there = Set("done", RANK, to) if remote else Set("computed", turn, RANK)
    lane, sending = d.lane("compute"), d.lane("sending", "copy")
    peers = [(RANK + distance) % world for distance in range(1, world)]
    if remote:
        for peer in peers:
            lane.wait(ready, peer, previous=True)
    lane.tiles(TrackedMatmul(TILE, TILE), "t", world * per_rank, matmul, there)
    for number, peer in enumerate(peers):
        if not remote:
            sending.wait(computed, number, count=per_rank).wait(ready, peer, previous=True)
            sending.copy(part.part(rows=(peer * M, M)), box.part(rows=(RANK * M, M), at=peer)).set(done, RANK, at=peer)
        lane.wait(done, peer, count=per_rank if remote else 1)
    mine = (box if remote else part).part(rows=(RANK * M, M))
    if remote:
        lane.wait(done, RANK, count=per_rank)
    lane.reduce(y.part(), mine, *(box.part(rows=(peer * M, M)) for peer in peers))
    for peer in peers:
        lane.set(ready, RANK, at=peer)
    return d.schedule()


def summed(group: dist.ProcessGroup, dtype: str, way: str, calls: int) -> None:
    rank, world = group.rank(), group.size()
    made = CpuSchedule(scattered(world, dtype, way), communicator(group, "cpu"))
    g = torch.Generator().manual_seed(7)
    timeline = Timeline()
    for _ in range(calls):
        xs = [torch.randn(world * M, K, generator=g).to(ON_CPU[dtype]) for _ in range(world)]
        ws = [torch.randn(K, N, generator=g).to(ON_CPU[dtype]) / K**0.5 for _ in range(world)]
        y = torch.full((M, N), float("nan"), dtype=ON_CPU[dtype])
        made.run({"x": xs[rank], "w": ws[rank], "y": y}, timeline=timeline)
        wanted = sum(x.double() @ w.double() for x, w in zip(xs, ws, strict=True))[rank * M : (rank + 1) * M]
        wanted = wanted.relu() if way in ("copy", "compute") else wanted
        assert float((y.double() - wanted).abs().max()) < TOLERANCE[dtype] * world
    made.close()


@pytest.mark.parametrize(
    ("way", "world"),
    in_turn(["copy", "compute", "reduce", "remote", "tracked", "tracked remote", "library"], [2, 4, 1]),
)
def test_partial_products_are_summed_where_they_belong(pool: Pool, world: int, way: str) -> None:
    schedule = scattered(world, "fp32", way)
    verify(schedule)
    assert simulate(schedule, NULL).end_us >= 0
    for dtype in ON_CPU:
        pool.run(summed, dtype, way, 20 if dtype == "fp32" else 5, ranks=world)


@pytest.mark.parametrize(
    ("way", "world"),
    in_turn(["pulled[chunks=1,by=gemm]", "pulled[chunks=3,by=gemm]", "pulled[chunks=2,by=tracked]"], [2, 3]),
)
def test_gemms_add_to_what_they_read_at_a_peers(pool: Pool, world: int, way: str) -> None:
    for dtype in ON_CPU:
        pool.run(summed, dtype, way, 10, ranks=world)


def added_alone(group: dist.ProcessGroup, dtype: str) -> None:
    d = Draft("added", 1)
    x, w = d.buffer("x", M, K, dtype, "input"), d.buffer("w", K, N, dtype, "input")
    c, y = d.buffer("c", M, N, dtype, "input"), d.buffer("y", M, N, dtype, "output")
    d.lane("compute").compute("addmm", y.part(), x.part(), w.part(), c.part())
    g = torch.Generator().manual_seed(7)
    x_, w_, c_ = (torch.randn(*size, generator=g).to(ON_CPU[dtype]) for size in ((M, K), (K, N), (M, N)))
    given, exact = {"x": x_, "w": w_ / K**0.5, "c": c_}, c_.double() + x_.double() @ (w_ / K**0.5).double()
    found = Unfused(d.schedule(), 0).run(given, STRAIGHT, group)["y"]
    assert float((found.double() - exact).abs().max()) < TOLERANCE[dtype]


def test_the_library_adds_to_a_third_operand(pool: Pool) -> None:
    for dtype in ON_CPU:
        pool.run(added_alone, dtype, ranks=1)


def contended(group: dist.ProcessGroup) -> None:
    """Let all ranks repeatedly add ones to the same elements of rank 0. No addition may be lost.

    A run takes milliseconds, and there are many runs: on a busy machine few ranks add at the same time, so a faulty
    implementation would pass most runs.
    """
    world, times, rows = group.size(), 100, 256
    d = Draft("adds", world)
    one, y = d.buffer("one", rows, 64, "fp32", "input"), d.buffer("y", rows, 64, "fp32", "output")
    total = d.buffer("total", rows, 64, "fp32", "symmetric")
    ready, done = d.signals("ready", 1), d.signals("done", 1)
    lane = d.lane("compute")
    lane.compute("add", total.part(), one.part(), one.part())
    for rank in range(world):
        lane.set(ready, at=rank)
    lane.wait(ready, count=world)
    for _ in range(times):
        lane.copy(one.part(), total.part(at=0), by="kernel", accumulate=True)
    for rank in range(world):
        lane.set(done, at=rank)
    lane.wait(done, count=world).compute("relu", y.part(), total.part())
    schedule = d.schedule()
    verify(schedule)
    made = CpuSchedule(schedule, communicator(group, "cpu"))
    for _ in range(60):  # a lost addend is rare while other programs occupy the cores
        y_ = torch.empty(rows, 64)
        made.run({"one": torch.ones(rows, 64), "y": y_})
        assert torch.equal(y_, torch.full((rows, 64), 2.0 + (times * world if group.rank() == 0 else 0)))
    made.close()


def test_nothing_that_is_added_at_once_is_lost(pool: Pool) -> None:
    pool.run(contended, ranks=4)


def everywhere(group: dist.ProcessGroup) -> None:
    d = Draft("all_reduce", group.size())
    x, y = d.buffer("x", 5, 3, "bf16", "input"), d.buffer("y", 5, 3, "bf16", "output")
    d.lane("compute").all_reduce(x.part(), y.part())
    verify(d.schedule())
    made = CpuSchedule(d.schedule(), communicator(group, "cpu"))
    mine, y_ = torch.full((5, 3), 1.0 + group.rank(), dtype=torch.bfloat16), torch.empty(5, 3, dtype=torch.bfloat16)
    made.run({"x": mine, "y": y_})
    assert torch.equal(y_, torch.full((5, 3), float(sum(range(1, group.size() + 1))), dtype=torch.bfloat16))
    assert torch.equal(mine, torch.full_like(mine, 1.0 + group.rank()))
    made.close()


def test_the_librarys_all_reduce(pool: Pool) -> None:
    pool.run(everywhere, ranks=3)


def uneven(group: dist.ProcessGroup) -> None:
    rank, rows = group.rank(), (3, 0, 4)
    d = Draft("uneven", 3)
    x = d.buffer("x", 7, 2, "fp32", "input")
    y = d.buffer("y", lookup(rows, RANK), 2, "fp32", "output")
    d.lane("compute").reduce_scatter(x.part(), y.part())
    verify(d.schedule())
    made = CpuSchedule(d.schedule(), communicator(group, "cpu"))
    mine, y_ = torch.arange(14.0).view(7, 2) * (rank + 1), torch.empty(rows[rank], 2)
    made.run({"x": mine, "y": y_})
    begin = sum(rows[:rank])
    assert torch.equal(y_, (torch.arange(14.0).view(7, 2) * 6)[begin : begin + rows[rank]])
    assert torch.equal(mine, torch.arange(14.0).view(7, 2) * (rank + 1))
    made.close()


def test_a_reduce_scatter_of_uneven_parts(pool: Pool) -> None:
    pool.run(uneven, ranks=3)


# --- verification ---


def adding(*, first: bool = True, read_between: bool = False) -> Schedule:
    """Return a schedule in which two lanes add to `total`, which the first lane has written."""
    d = Draft("adding", 1)
    x, y = d.buffer("x", 2, 2, "fp32", "input"), d.buffer("y", 2, 2, "fp32", "output")
    total = d.buffer("total", 2, 2, "fp32", "scratch")
    there, done = d.signals("there", 2), d.signals("done", 2)
    one, other, last = d.lane("compute"), d.lane("other"), d.lane("last")
    if first:
        one.compute("silu", total.part(), x.part())
    one.set(there, 0).set(there, 1).compute("silu", total.part(), x.part(), accumulate=True).set(done, 0)
    other.wait(there, 0).copy(x.part(), total.part(), accumulate=True).set(done, 1)
    if read_between:
        last.wait(there, 1).compute("relu", y.part(), total.part())
    else:
        last.wait(there, 1).wait(done, 0).wait(done, 1).compute("relu", y.part(), total.part())
    last.set(credit := d.signals("credit", 1))
    one.steps.insert(0, d.lane("spare").wait(credit, previous=True).steps.pop())
    return d.schedule()


def test_updates_may_come_in_any_order() -> None:
    verify(adding())


def test_a_read_among_updates_is_a_race() -> None:
    with pytest.raises(ScheduleError, match="race on total@0"):
        verify(adding(read_between=True))


def test_updates_of_nothing_are_found() -> None:
    """Each of two unordered updates might come first, so neither counts as the earlier write that the other needs."""
    with pytest.raises(
        ScheduleError,
        match=(
            r"it reads total@0\[0:\+2, 0:\+2\], which no step has written before "
            "in this run"
        ),
    ):
        verify(adding(first=False))


# --- unsupported on GPUs ---


def test_gpus_refuse_gemms_that_add_to_a_peers_buffer() -> None:
    with pytest.raises(
        ScheduleError, match=r"it adds to sum@1.*, a peer's memory, where only a copy by kernel may add"
    ):
        require_runnable_on_gpus(scattered(2, "bf16", "compute"), 0)


def test_gpus_refuse_copy_engines_that_add() -> None:
    d = Draft("engines", 1)
    x, total = d.buffer("x", 2, 2, "fp32", "input"), d.buffer("total", 2, 2, "fp32", "scratch")
    d.lane("compute").compute("silu", total.part(), x.part()).copy(x.part(), total.part(), accumulate=True)
    with pytest.raises(ScheduleError, match="copy engines cannot add: copy by kernel"):
        require_runnable_on_gpus(d.schedule(), 0)


@pytest.mark.parametrize("way", ["copy", "reduce", "remote", "tracked", "tracked remote", "library"])
def test_gpus_take_the_others(way: str) -> None:
    for rank in range(2):
        require_runnable_on_gpus(scattered(2, "bf16", way), rank)


def test_gpus_refuse_what_loses_a_peers_addition() -> None:
    """A peer's copy adds item by item, while this rank's GEMM reads, adds and writes back."""
    d = Draft("two ways", 2)
    x, total = d.buffer("x", 2, 2, "fp32", "input"), d.buffer("total", 2, 2, "fp32", "symmetric")
    d.lane("compute").compute("silu", total.part(), x.part(), accumulate=True)
    d.lane("adding").copy(x.part(), total.part(at=1 - RANK), by="kernel", accumulate=True)
    with pytest.raises(ScheduleError, match="lane compute of rank 0 and lane adding of rank 1 add to total of rank 0"):
        require_runnable_on_gpus(d.schedule(), 0)


def test_gpus_refuse_kernels_of_two_streams_that_add_to_one_buffer() -> None:
    d = Draft("two lanes", 1)
    x, total = d.buffer("x", 2, 2, "fp32", "input"), d.buffer("total", 2, 2, "fp32", "scratch")
    for name in ("one", "other"):
        d.lane(name).compute("silu", total.part(), x.part(), accumulate=True)
    with pytest.raises(ScheduleError, match="lane one of rank 0 and lane other of rank 0 add to total of rank 0"):
        require_runnable_on_gpus(d.schedule(), 0)
