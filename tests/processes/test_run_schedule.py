"""weft.run_schedule, the public function that runs a user's own schedule.

First results and their memory; equal schedules, which share an executor; dynamic sizes. Then bad input, which every
rank refuses before anything is written. Last, calls that differ between ranks, and faulty schedules.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import own_group, resized, told

import weft
from weft.launch import Pool
from weft.operator import cache
from weft.operator import run_schedule as module
from weft.schedule import RANK, Draft, Schedule, total
from weft.symm.calls import calls_of
from weft.timeline import Timeline

ROWS, K, N = 6, 4, 3


def shifted(world: int, *, chunks: int = 2, rows: int = ROWS, waits: bool = True) -> Schedule:
    """Return a schedule of y = the left neighbour's x @ w, in chunks. waits: False to omit the wait for readers of the
    previous run.
    """
    d = Draft("shifted", world)
    x, w = d.buffer("x", rows, K, "fp32", "input"), d.buffer("w", K, N, "fp32", "input")
    y, box = d.buffer("y", rows, N, "fp32", "output"), d.buffer("box", rows, K, "fp32", "symmetric")
    arrived, credit = d.signals("arrived", chunks), d.signals("credit", 1)
    send, compute, right = d.lane("to the right", "copy"), d.lane("compute"), (RANK + 1) % world
    if waits:
        send.wait(credit, previous=True)
    for c in range(chunks):
        part = (c * (rows // chunks), rows // chunks)
        send.copy(x.part(rows=part), box.part(rows=part, at=right)).set(arrived, c, at=right)
        compute.wait(arrived, c).matmul(y.part(rows=part), box.part(rows=part), w.part())
    compute.set(credit, at=(RANK + world - 1) % world)
    return d.schedule()


def tensors_of(rank: int, seed: int = 0) -> dict[str, Any]:
    """Return this rank's x, w, and a poisoned y."""
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(8, ROWS, K, generator=generator)[rank], torch.randn(K, N, generator=generator)
    return {"x": x, "w": w, "y": torch.full((ROWS, N), torch.nan)}


def exact(rank: int, world: int, seed: int = 0) -> torch.Tensor:
    left = tensors_of((rank - 1) % world, seed)
    return left["x"].double() @ left["w"].double()


def close(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare a product over K = 4 in fp32, which has only a few roundings."""
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def runs(group: dist.ProcessGroup) -> tuple[int, set[str], list[str]]:
    """Make calls with equal schedules. Return (number of executors, lanes on the timeline, returned outputs)."""
    own, rank, world = own_group(group), group.rank(), group.size()
    timeline = Timeline()
    for seed in range(4):  # each time a new schedule object, equal to the first
        given = tensors_of(rank, seed)
        # Only a GEMM uses this tensor, so it may be transposed.
        given["w"] = given["w"].t().contiguous().t() if seed == 2 else given["w"]
        name = own.group_name if seed == 3 else own
        with torch.inference_mode(seed == 1), torch.autocast("cpu", enabled=seed == 2):
            found = weft.run_schedule(shifted(world), given, name, deadline_s=30, timeline=timeline)
        assert found["y"] is given["y"]
        close(found["y"], exact(rank, world, seed))
    return len(module._table.known(own)), {span.lane for span in timeline if span.rank == rank}, list(found)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_runs_on_processes_and_equal_schedules_share_an_executor(pool: Pool, ranks: int) -> None:
    for made, lanes, outputs in pool.run(runs, ranks=ranks):
        assert (made, lanes, outputs) == (1, {"to the right", "compute"}, ["y"])


def other_schedules(group: dist.ProcessGroup) -> list[int]:
    """Run several schedules in turn, which share memory. Check that the cache is limited."""
    own, rank, world, kept = own_group(group), group.rank(), group.size(), cache.KEPT_LIGHT
    cache.KEPT_LIGHT = 2
    try:
        for call in range(8):
            chunks = (1, 2, 3, 6)[call % 4]
            given = tensors_of(rank, call)
            weft.run_schedule(shifted(world, chunks=chunks), given, own)
            close(given["y"], exact(rank, world, call))
    finally:
        cache.KEPT_LIGHT = kept
    return [len(module._table.known(own)), calls_of(own).begun]


def test_schedules_that_were_not_run_for_long_are_dropped(pool: Pool) -> None:
    for known, calls in pool.run(other_schedules, ranks=2):
        assert known <= 2
        assert calls == 8


def ragged(most: int) -> Schedule:
    """Return a schedule of y = the other rank's x, whose number of rows is dynamic."""
    d, other = Draft("ragged", 2), (RANK + 1) % 2
    x = d.buffer("x", total("counts", 0, 1), K, "fp32", "input")
    n = d.buffer("n", 1, 1, "int64", "input")
    y = d.buffer("y", total("counts", 1, 2), K, "fp32", "output")
    counts, box = d.buffer("counts", 2, 1, "int64", "symmetric"), d.buffer("box", most, K, "fp32", "symmetric")
    d.holds(counts, [[3, 5], [5, 3]])
    told_, arrived, credit = d.signals("told", 1), d.signals("arrived", 1), d.signals("credit", 1)
    lane = d.lane("compute").wait(credit, previous=True)
    lane.copy(n.part(), counts.part(rows=(1, 1), at=other), "kernel").set(told_, at=other)
    lane.copy(n.part(), counts.part(rows=(0, 1)), "kernel").wait(told_).read(counts, by="host")
    lane.copy(x.part(), box.part(rows=(0, total("counts", 0, 1)), at=other)).set(arrived, at=other)
    lane.wait(arrived).copy(box.part(rows=(0, total("counts", 1, 2))), y.part(), "kernel").set(credit, at=other)
    return d.schedule()


def of_dynamic_sizes(group: dist.ProcessGroup) -> None:
    own, rank = own_group(group), group.rank()
    for rows in ([3, 5], [0, 8], [2, 2]):
        xs = [torch.full((count, K), float(count)) for count in rows]
        padded = torch.cat([xs[rank], torch.full((2, K), math.nan)])
        given = {"x": padded, "n": torch.tensor([[rows[rank]]]), "y": lambda count: torch.empty(count, K)}
        assert torch.equal(weft.run_schedule(ragged(8), given, own)["y"], xs[1 - rank])


def test_an_output_whose_rows_only_the_run_knows_is_made_in_it(pool: Pool) -> None:
    pool.run(of_dynamic_sizes, ranks=2)


def _changed(**changed: Any) -> dict[str, Any]:
    given = tensors_of(1) | changed
    return {name: t for name, t in given.items() if t is not None}


class Raising(dict[str, Any]):
    """A mapping that raises when it is read."""

    def __init__(self) -> None:
        super().__init__(tensors_of(1))

    def values(self) -> Any:
        raise ValueError("this mapping has no values")

    keys = __iter__ = __getitem__ = values


BAD: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda: _changed(w=None, y=None),
        "tensors lacks w, y: pass a tensor for each input and output of schedule shifted: x, w, y",
    ),
    "unknown": (
        lambda: _changed(z=torch.ones(1, 1)),
        "tensors has z, but the inputs and outputs of schedule shifted are x, w, y",
    ),
    "symmetric": (
        lambda: _changed(box=torch.ones(ROWS, K)),
        "tensors has box, but the inputs and outputs of schedule shifted are x, w, y; weft allocates box",
    ),
    "no dict": (lambda: [torch.ones(2)], "tensors is a list: pass a dict with a tensor for each of x, w, y"),
    "rows": (
        lambda: _changed(x=torch.ones(ROWS - 1, K)),
        "x is (5, 4) torch.float32 on cpu: pass (6, 4) torch.float32 on cpu",
    ),
    "dimensions": (
        lambda: _changed(w=torch.ones(1, K, N)),
        "w is (1, 4, 3) torch.float32 on cpu: pass (4, 3) torch.float32 on cpu",
    ),
    "dtype": (
        lambda: _changed(y=torch.ones(ROWS, N, dtype=torch.float64)),
        "y is (6, 3) torch.float64 on cpu: pass (6, 3) torch.float32 on cpu",
    ),
    "device": (
        lambda: _changed(w=torch.ones(K, N, device="meta")),
        "w is (4, 3) torch.float32 on meta: pass (4, 3) torch.float32 on cpu",
    ),
    "meta alone": (
        lambda: {name: t.to("meta") for name, t in tensors_of(1).items()},
        "tensors are on meta: pass at least one tensor on a GPU or on the CPU",
    ),
    "function": (
        lambda: _changed(y=lambda rows: torch.empty(rows, N)),
        "tensors['y'] is a function: pass a torch.Tensor",
    ),
    "numpy": (
        lambda: _changed(x=torch.ones(ROWS, K).numpy()),
        "tensors['x'] is a ndarray: pass torch.from_numpy(tensors['x'])",
    ),
    "layout": (
        lambda: _changed(x=torch.ones(K, ROWS).t()),
        "x has strides (1, 6): its rows must each be contiguous and must not overlap; pass x.contiguous()",
    ),
    "one memory": (
        lambda: (lambda one: _changed(x=one.view(-1)[: ROWS * K].view(ROWS, K), y=one[:, :N]))(torch.ones(ROWS, 8)),
        "overlap in memory, and the run writes y: pass a separate output, torch.empty_like(y)",
    ),
    "overlap in part": (
        lambda: (lambda one: _changed(x=one[:24].view(ROWS, K), y=one[23:41].view(ROWS, N)))(torch.ones(41)),
        "x and y overlap in memory, and the run writes y: pass a separate output, torch.empty_like(y)",
    ),
    "overlap in a column": (
        lambda: (lambda one: _changed(x=one[:, :K], y=one[:, K - 1 : K - 1 + N]))(torch.ones(ROWS, 8)),
        "x and y overlap in memory, and the run writes y: pass a separate output, torch.empty_like(y)",
    ),
    "freed": (
        lambda: _changed(y=resized(torch.ones(ROWS, N))),
        "tensors['y'] has no memory: its storage holds 0 of 72 bytes",
    ),
    "mapping": (lambda: Raising(), "this mapping has no values"),
    "gradient": (
        lambda: _changed(w=torch.ones(K, N, requires_grad=True)),
        "w requires a gradient, but schedules have no backward: call under torch.no_grad(), or pass w.detach()",
    ),
    "gradient of an output": (
        lambda: _changed(y=torch.ones(ROWS, N, requires_grad=True)),
        "y requires a gradient, but schedules have no backward: call under torch.no_grad(), or pass y.detach()",
    ),
    "deadline": (None, "deadline_s=-1 must be positive and at most"),
    "timeline": (None, "timeline=3 is not a Timeline: pass weft.Timeline(), or None"),
    "schedule": (None, "schedule is a str: pass a weft.schedule.Schedule, which Draft.schedule() returns"),
    "ranks": (None, "schedule shifted is for 4 ranks, but the group has 2: build it for 2, or pass a group of 4"),
}
OPTIONS: dict[str, dict[str, Any]] = {"deadline": {"deadline_s": -1}, "timeline": {"timeline": 3}}
SCHEDULES: dict[str, Any] = {"schedule": "shifted", "ranks": shifted(4)}


def refused(group: dist.ProcessGroup, name: str) -> list[str]:
    """Pass bad input on rank 1, in a first call and in a later call. Return this rank's errors, and whether y was
    written.
    """
    own, rank, world, found = own_group(group), group.rank(), group.size(), []
    for _ in range(2):
        given = tensors_of(rank)
        bad, _text = BAD[name]
        schedule, options = shifted(world), {}
        if rank == 1:
            given = given if bad is None else bad()
            schedule, options = SCHEDULES.get(name, schedule), OPTIONS.get(name, {})
        found.append(told(lambda: weft.run_schedule(schedule, given, own, **options)))  # noqa: B023
        if rank == 0:
            assert given["y"].isnan().all(), "written"
        given = tensors_of(rank)
        close(weft.run_schedule(shifted(world), given, own)["y"], exact(rank, world))
    return found


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_on_every_rank_and_the_group_lives_on(pool: Pool, name: str) -> None:
    text = BAD[name][1]
    for first, later in pool.run(refused, name, ranks=2):
        for error in (first, later):
            assert error.startswith("RefusedError: rank 1: "), error
            assert text in error


def beside(group: dist.ProcessGroup) -> None:
    """Check that inputs may share memory, and that columns of one matrix may be an input and an output."""
    own, rank, world = own_group(group), group.rank(), group.size()
    one, given = torch.full((ROWS + 1, K + N + K), torch.nan), tensors_of(rank)
    x, y, w = one[:ROWS, :K].copy_(given["x"]), one[:ROWS, K : K + N], one[:K, -N:].copy_(given["w"])
    weft.run_schedule(shifted(world), {"x": x, "w": w, "y": y}, own)
    close(y, exact(rank, world))
    assert one[ROWS:].isnan().all()
    assert one[K:, K + N :].isnan().all()
    assert torch.equal(x, given["x"])
    both = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1))  # the same on all ranks
    y = torch.full((ROWS, N), torch.nan)
    weft.run_schedule(shifted(world), {"x": both, "w": both[:K, :N], "y": y}, own)
    close(y, both.double() @ both[:K, :N].double())


def test_memory_that_is_apart_may_lie_in_one_tensor(pool: Pool) -> None:
    pool.run(beside, ranks=2)


def saved_by_autograd(group: dist.ProcessGroup) -> list[str]:
    """Return the errors of backward through a product that has saved y, after a run and after a refused run."""
    own, rank, world, found = own_group(group), group.rank(), group.size(), []
    for bad in (False, True):
        given, factor = tensors_of(rank), torch.ones(ROWS, N, requires_grad=True)
        product, version = given["y"] * factor, given["y"]._version
        if bad and rank == 1:
            given["x"] = given["x"].double()
        said = told(lambda: weft.run_schedule(shifted(world), given, own))  # noqa: B023
        assert said.startswith("RefusedError") == bad
        assert (given["y"]._version > version) == (not bad)
        found.append(told(product.sum().backward))
    return found


def test_autograd_finds_outputs_that_were_written_after_it_had_saved_them(pool: Pool) -> None:
    for written, refused in pool.run(saved_by_autograd, ranks=2):
        assert "has been modified by an inplace operation" in written
        assert refused == "nothing"


def made_wrongly(group: dist.ProcessGroup, name: str | int) -> str:
    """Return this rank's error. name: the mistake of rank 1's function for y (a key of `MADE`), or a wrong number of
    rows that rank 0 announces.
    """
    own, rank, rows = own_group(group), group.rank(), [3, 5]
    x = torch.full((rows[rank], K), float(rank))
    given = {"x": x, "n": torch.tensor([[rows[rank]]]), "y": lambda count: torch.empty(count, K)}
    if rank == 1 and name in MADE:
        given["y"] = lambda count: MADE[name][0](count, x)
    if rank == 0 and isinstance(name, int):
        given["n"] = torch.tensor([[name]])
    if rank == 0 and name == "no room":
        given |= {"x": torch.ones(9, K), "n": torch.tensor([[9]])}
    return told(lambda: weft.run_schedule(ragged(8), given, own, deadline_s=20))


WANTED = "pass (3, 4) torch.float32 on cpu"
MADE: dict[str, tuple[Any, str]] = {
    "fewer": (lambda count, x: torch.empty(count - 1, K), f"y is (2, 4) torch.float32 on cpu: {WANTED}"),
    "more": (lambda count, x: torch.empty(count + 1, K), f"y is (4, 4) torch.float32 on cpu: {WANTED}"),
    "columns": (lambda count, x: torch.empty(count, K + 1), f"y is (3, 5) torch.float32 on cpu: {WANTED}"),
    "dtype": (lambda count, x: torch.empty(count, K).half(), f"y is (3, 4) torch.float16 on cpu: {WANTED}"),
    "meta": (lambda count, x: torch.empty(count, K, device="meta"), f"y is (3, 4) torch.float32 on meta: {WANTED}"),
    "nothing": (lambda count, x: None, "its result is a NoneType: pass a torch.Tensor"),
    "the input": (lambda count, x: x[:count], "y and x overlap in memory, and the run writes y"),
    "gradient": (lambda count, x: torch.empty(count, K, requires_grad=True), "y requires a gradient"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_function_that_makes_a_wrong_output_is_named_on_every_rank(pool: Pool, name: str) -> None:
    other, own = pool.run(made_wrongly, name, ranks=2, timeout_s=60)
    assert own.startswith(f"ValueError: the function that allocates y was called with 3 rows: {MADE[name][1]}"), own
    assert other.startswith("PoisonedGroupError: "), other
    assert f"the function that allocates y was called with 3 rows: {MADE[name][1]}" in other


@pytest.mark.parametrize("rows", [-3, 2**62])
def test_an_impossible_number_of_rows_names_the_rank_that_wrote_it(pool: Pool, rows: int) -> None:
    for error in pool.run(made_wrongly, rows, ranks=2, timeout_s=60):
        wanted = rf"counts\[\d, 0\] of rank [01] is {rows}, written by rank 0: sizes must be at least 0, and together at most"
        assert re.search(wanted, error), error


def test_rows_for_which_a_buffer_has_no_room_are_refused(pool: Pool) -> None:
    own, _ = pool.run(made_wrongly, "no room", ranks=2, timeout_s=60)
    assert own == (
        "ScheduleError: schedule ragged, rank 0: with the sizes of this run, box@1[0:+9, 0:+4] is outside buffer box of 8 x 4: "
        "correct the sizes, or declare a larger buffer"
    )


def test_an_input_of_fewer_rows_than_the_run_needs_is_refused(pool: Pool) -> None:
    own, other = pool.run(made_wrongly, 4, ranks=2, timeout_s=60)
    wanted = "x of rank 0 has 3 rows, but sum(counts[0:1]) is 4 in this run: pass at least 4 rows, or correct the sizes"
    assert own == f"ScheduleError: schedule ragged: {wanted}"
    assert other.startswith("PoisonedGroupError: ")
    assert wanted in other


def compiled(group: dist.ProcessGroup) -> tuple[str, str]:
    """Return the errors in compiled functions with one graph, and with several graphs."""
    schedule, given = shifted(1), tensors_of(0)

    def call(x: torch.Tensor) -> torch.Tensor:
        return weft.run_schedule(schedule, given, group)["y"] + x

    whole, parts = (torch.compile(call, fullgraph=fullgraph, backend="aot_eager") for fullgraph in (True, False))
    zero = torch.zeros(())
    return told(lambda: whole(zero)), told(lambda: close(parts(zero), exact(0, 1)))


def test_a_compiled_function_breaks_its_graph(pool: Pool) -> None:
    ((whole, parts),) = pool.run(compiled, ranks=1, timeout_s=100)
    assert whole.startswith("Unsupported: ")
    assert "torch.compile cannot trace run_schedule of weft: call it outside the compiled function" in whole
    assert parts == "nothing"


def refused_alone(group: dist.ProcessGroup) -> list[str]:
    given = tensors_of(0)
    del given["w"]
    return [
        told(lambda: weft.run_schedule(shifted(1), given, own_group(group))),
        told(lambda: weft.run_schedule(shifted(1), tensors_of(0), None)),  # type: ignore[arg-type]
        told(lambda: weft.run_schedule(Draft("nothing", 1).schedule(), {}, own_group(group))),
    ]


def test_one_rank_gets_a_value_error(pool: Pool) -> None:
    ((missing, nowhere, empty),) = pool.run(refused_alone, ranks=1)
    assert (
        missing == "ValueError: tensors lacks w: pass a tensor for each input and output of schedule shifted: x, w, y"
    )
    assert empty.startswith("ValueError: schedule nothing has neither inputs nor outputs: ")
    assert nowhere.startswith("ValueError: group=None: pass dist.group.WORLD or your own group")


def different(group: dist.ProcessGroup) -> str:
    return told(
        lambda: weft.run_schedule(shifted(2, chunks=1 + group.rank()), tensors_of(group.rank()), own_group(group))
    )


def test_different_schedules_are_named(pool: Pool) -> None:
    for error in pool.run(different, ranks=2):
        assert error.startswith("DisagreementError: ")
        assert re.search(
            r"rank 0: schedule shifted, fingerprint (\w{16}); rank 1: schedule shifted, fingerprint (?!\1)", error
        )


def faulty(group: dist.ProcessGroup) -> tuple[str, str]:
    """Pass a schedule with a race, and a schedule with a step that CPU processes do not support. The group must stay
    usable.
    """
    own, rank = own_group(group), group.rank()
    d = Draft("unknown here", 2)
    x, y = d.buffer("x", 4, 2, "fp32", "input"), d.buffer("y", 4, 2, "fp32", "output")
    d.lane("compute").all_to_all(x.part(), y.part())
    given = {"x": torch.ones(4, 2), "y": torch.ones(4, 2)}
    found = (
        told(lambda: weft.run_schedule(shifted(2, waits=False), tensors_of(rank), own)),
        told(lambda: weft.run_schedule(d.schedule(), given, own)),
    )
    close(weft.run_schedule(shifted(2), tensors_of(rank), own)["y"], exact(rank, 2))
    return found


def test_faulty_schedules_and_unknown_steps_are_refused_by_name(pool: Pool) -> None:
    for race, unknown in pool.run(faulty, ranks=2):
        assert race.startswith("ScheduleError: schedule shifted has ")
        assert "race on box" in race
        assert unknown.startswith("ScheduleError: schedule unknown here")
        assert "all_to_all" in unknown


def late(group: dist.ProcessGroup) -> tuple[str, str]:
    """Let rank 1 skip the second call."""
    own, rank = own_group(group), group.rank()
    weft.run_schedule(shifted(2), tensors_of(rank), own)
    if rank == 1:
        return "", ""
    given = tensors_of(rank)
    first = told(lambda: weft.run_schedule(shifted(2), given, own, deadline_s=0.3))
    assert given["y"].isnan().all()
    return first, told(lambda: weft.run_schedule(shifted(2), given, own))


def test_a_rank_that_does_not_come_is_missed_at_the_deadline(pool: Pool) -> None:
    (first, again), _ = pool.run(late, ranks=2)
    assert first.startswith("DeadlineError: rank 0 waited 0.3 s")
    assert again.startswith("PoisonedGroupError: ")
