"""Schedules on CPU processes, cheapest first: results of every candidate, repeated calls, layouts of tensors, overlap,
refusals, ranks that disagree, and no leftovers. `test_schedule_cpu_failure.py` tests ranks that fail.

Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import gc
import itertools
import random
import re
import threading
import time
from collections.abc import Iterator

import pytest
import schedule_cpu_ranks as ranks
import torch
from pool import traces
from schedule_cpu_ranks import assert_right, build, comm_of, tensors_of
from support.on_ranks import error_of
from support.slow import slow

from weft.builders import AllGatherMatmul
from weft.launch import Pool
from weft.runtime.cpu.schedule import CpuSchedule
from weft.schedule import RANK, Draft, Schedule
from weft.sim import NULL, simulate
from weft.timeline import Span, Timeline

BAD_RANK = 1
THREE = AllGatherMatmul(3, (4, 4, 4), (5,), 8, "fp32")


def problems(world: int) -> Iterator[AllGatherMatmul]:
    """Return small random problems: two weights, uneven shards with the gathered input, bf16, and even shards with the
    gathered input.
    """
    choose = random.Random(world)
    rows, k = choose.randint(max(4, world), 11), choose.randint(max(4, world), 24)
    uneven = tuple(choose.randint(0, 9) for _ in range(world - 1))
    yield AllGatherMatmul(world, (rows,) * world, (choose.randint(1, 9), choose.randint(4, 9)), k, "fp32")
    yield AllGatherMatmul(world, (*uneven, 3), (choose.randint(3, 9),), k, "bf16", return_gathered=True)
    if world < 8:
        yield AllGatherMatmul(world, (rows,) * world, (choose.randint(4, 9),), k, "bf16")
        yield AllGatherMatmul(world, (rows,) * world, (choose.randint(4, 9),), k, "fp32", return_gathered=True)


@pytest.mark.parametrize("world", [1, 2, slow(3), slow(8)])
def test_every_candidate_is_right(pool: Pool, world: int) -> None:
    for p in problems(world):
        counts = pool.run(ranks.all_candidates, p, 100 * world, 3, ranks=world)
        assert set(counts) == {counts[0]}
        assert counts[0] >= (1 if world == 1 else 3)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_another_shape_at_every_call(pool: Pool, world: int) -> None:
    pool.run(ranks.shape_after_shape, 1000 * world, 15, ranks=world)


def test_schedules_take_turns_while_a_rank_is_late(pool: Pool) -> None:
    pool.run(ranks.alternate, THREE, BAD_RANK, ranks=3)


@pytest.mark.parametrize(("world", "chunks"), [(1, 2), (2, 4), (3, 1)])
def test_a_chain_of_gemms_as_one_schedule(pool: Pool, world: int, chunks: int) -> None:
    pool.run(ranks.run_chain, chunks, ranks=world)


# --- layouts ---


def other_layouts(group, p):
    """Pass tensors in other layouts: gaps between rows, transposed weights, weights in a larger tensor, results by
    columns. Also tensors that torch would not write to, or that want gradients.
    """
    rank = group.rank()
    for builder in ("serial", "shard", "ficco_2d"):
        with CpuSchedule(build(p, builder), comm_of(group)) as executor:
            for seed in range(4):
                plain = tensors_of(p, rank, seed)
                wide = {name: torch.full((t.shape[0], t.shape[1] + 3), torch.nan) for name, t in plain.items()}
                layout = {name: t[:, 2 : 2 + plain[name].shape[1]] for name, t in wide.items()}
                for name in ("x_shard", "w0"):
                    layout[name].copy_(plain[name])
                if seed % 2:
                    layout["w0"] = plain["w0"].t().contiguous().t()
                layout["x_shard"].requires_grad_()
                with torch.inference_mode(seed > 1):
                    layout["y0"] = layout["y0"].clone() if seed > 1 else layout["y0"]
                if seed == 1:
                    by_columns = torch.full((p.n[0], p.m + 3), torch.nan)
                    given = {**layout, "y0": by_columns[:, 2 : 2 + p.m].t()}
                    if builder == "ficco_2d":  # the GEMMs of this schedule accumulate into it
                        assert (
                            "its rows must each be contiguous" in error_of(lambda given=given: executor.run(given))[1]
                        )
                    else:
                        layout, wide["y0"] = given, by_columns
                executor.run(layout)
                assert_right(p, layout, seed, f"{builder}, layout {seed}", roundings=p.world_size)
                margins = wide["y0"][:, [0, 1, -1]]
                assert margins.isnan().all(), f"{builder}: it wrote outside of y0"


def test_tensors_may_lie_as_they_like(pool: Pool) -> None:
    pool.run(other_layouts, THREE, ranks=3)


def no_hidden_copies(group, p):
    """Return the bytes that torch allocates in a run with a transposed weight and gaps between rows."""
    tensors = tensors_of(p, group.rank(), 0)
    tensors["w0"] = tensors["w0"].t().contiguous().t()
    tensors["y0"] = torch.full((p.m, p.n[0] + 5), torch.nan)[:, : p.n[0]]
    with CpuSchedule(build(p, "shard"), comm_of(group)) as executor:
        executor.run(tensors)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            executor.run(tensors)
    assert_right(p, tensors, 0, "transposed")
    return {e.key: e.cpu_memory_usage for e in profile.key_averages() if e.cpu_memory_usage > 0}


def test_no_operand_is_copied(pool: Pool) -> None:
    for allocated in pool.run(no_hidden_copies, AllGatherMatmul.even(64, 48, 32, 2, "fp32"), ranks=2):
        assert allocated == {}


# --- timelines ---


def timelines(group, p, runs):
    """Return this rank's timeline of every run."""
    with CpuSchedule(build(p, "shard", chunks=2, send="in_turn"), comm_of(group)) as executor:
        found = []
        for run in range(runs):
            found.append(Timeline())
            executor.run(tensors_of(p, group.rank(), run), timeline=found[-1])
        return found


def overlap(timeline: Timeline) -> bool:
    """True if a copy and a matmul ran at the same time."""
    copies, matmuls = spans_of(timeline, "copy"), spans_of(timeline, "matmul")
    return any(c.start_us < m.end_us and m.start_us < c.end_us for c in copies for m in matmuls)


def spans_of(timeline: Timeline, prefix: str) -> list[Span]:
    return [span for span in timeline if span.name.startswith(prefix)]


def test_timelines_show_overlap_and_the_order_of_signals(pool: Pool) -> None:
    p = AllGatherMatmul.even(512, 256, 512, 2, "fp32")
    of_rank = pool.run(timelines, p, 40, ranks=2)
    # On a busy machine, not every run overlaps.
    assert any(overlap(timeline) for timelines in of_rank for timeline in timelines)
    simulated = simulate(build(p, "shard", chunks=2, send="in_turn"), NULL).timeline
    for run in range(40):
        for rank, timeline in enumerate(timelines[run] for timelines in of_rank):
            assert timeline.ranks() == [rank]
            assert {"compute", "to peers"} == set(timeline.lanes(rank))
            for lane in timeline.lanes(rank):
                spans = [span for span in timeline if span.lane == lane]
                assert all(before.end_us <= after.start_us for before, after in itertools.pairwise(spans))
                names = [span.name for span in spans if not span.name.startswith("set ")]
                assert names == [span.name for span in simulated if (span.rank, span.lane) == (rank, lane)]
            assert sum(span.bytes for span in timeline) == p.largest_shard_bytes
            assert all(span.bytes == p.largest_shard_bytes // 2 for span in spans_of(timeline, "copy x_shard -> box@"))
            for index in (2 * (1 - rank), 2 * (1 - rank) + 1):
                (wait,) = spans_of(timeline, f"wait arrived[{index}]")
                (raised,) = spans_of(of_rank[1 - rank][run], f"set arrived@{rank}[{index}]")
                assert raised.start_us == raised.end_us <= wait.end_us


def clocked(group, p, slow_s):
    """Return a timeline in which rank 1's matmul takes `slow_s` longer on a fake clock."""
    tensors = tensors_of(p, group.rank(), 0)
    with CpuSchedule(build(p, "shard"), comm_of(group)) as executor:
        executor.run(tensors)  # this run binds the steps
        if group.rank() == 1:
            ranks.intercept(executor, "matmul y0", before=lambda: time.sleep(slow_s))
        timeline, before = Timeline(), time.monotonic_ns() / 1e3
        executor.run(tensors, timeline=timeline)
        return before, timeline, time.monotonic_ns() / 1e3


def test_timelines_are_microseconds_of_the_clock_that_all_share(pool: Pool) -> None:
    of_rank = pool.run(clocked, AllGatherMatmul.even(8, 5, 8, 2, "fp32"), 0.05, ranks=2)
    for before, timeline, after in of_rank:
        assert all(before <= span.start_us <= span.end_us <= after for span in timeline)
        assert len(timeline) > 4
    first, *_ = spans_of(of_rank[1][1], "matmul y0")
    assert first.end_us - first.start_us >= 50_000


# --- refusals and disagreement ---


def wrong_tensors(p: AllGatherMatmul, rank: int) -> list[tuple[object, list[str]]]:
    """Return tensors of `rank` that must be refused, and words of the error."""
    right = tensors_of(p, rank, 0)
    rows, k = right["x_shard"].shape
    return [
        ({name: t for name, t in right.items() if name != "w0"}, ["['x_shard', 'y0']", "pass ['x_shard', 'w0', 'y0']"]),
        (right | {"w1": right["w0"]}, ["'w1'", "pass ['x_shard', 'w0', 'y0']"]),
        (right | {"x_shard": torch.zeros(rows + 1, k)}, ["x_shard", f"({rows + 1}, {k})", f"pass ({rows}, {k})"]),
        (right | {"x_shard": torch.zeros(rows, k, 1)}, ["x_shard", f"({rows}, {k}, 1)"]),
        (right | {"w0": right["w0"].double()}, ["w0", "torch.float64", "torch.float32"]),
        (right | {"y0": torch.zeros(p.m, p.n[0], device="meta")}, ["y0", "meta", "on cpu"]),
        (right | {"y0": torch.zeros(p.m, 2 * p.n[0])[:, ::2]}, ["y0", "strides (10, 2)", "y0.contiguous()"]),
        (right | {"y0": torch.zeros(p.n[0]).expand(p.m, -1)}, ["y0", "strides (0, 1)"]),
        (right | {"w0": torch.zeros(p.k, 2 * p.n[0])[:, ::2]}, ["w0", "strides (10, 2)", "rows or columns"]),
        (right | {"x_shard": [1.0]}, ["list"]),
        (None, ["NoneType"]),
    ]


def refuse_then_run(group, p, builder, bad_ranks):
    """Pass each wrong tensor on these ranks, and right tensors in between. Return the errors."""
    rank, errors = group.rank(), []
    with CpuSchedule(build(p, builder), comm_of(group)) as executor:
        for tensors, parts in wrong_tensors(p, rank):
            kind, text = error_of(lambda t=tensors: executor.run(t if rank in bad_ranks else tensors_of(p, rank, 0)))
            assert kind == "RefusedError"
            for bad in bad_ranks:
                assert re.search(rf"\branks? (\d+, )*{bad}(, \d+)*: ", text), (bad, text)
            for part in parts:
                assert part in text, (part, text)
            right = tensors_of(p, rank, len(errors))
            executor.run(right)
            assert_right(p, right, len(errors), f"after {text}")
            errors.append(text)
    return errors


@pytest.mark.parametrize("builder", ["serial", "shard"])
@pytest.mark.parametrize("bad_ranks", [(BAD_RANK,), (0, 2)])
def test_a_wrong_tensor_is_refused_everywhere_and_does_no_harm(pool: Pool, builder: str, bad_ranks: tuple[int]) -> None:
    texts = pool.run(refuse_then_run, THREE, builder, bad_ranks, ranks=3)
    assert texts[0] == texts[1] == texts[2]


def refused_before_anything(group, p):
    """Return the contents of the refusing rank's output and of its peers' memory afterwards."""
    rank = group.rank()
    with CpuSchedule(build(p, "shard"), comm_of(group)) as executor:
        ranks.poison(executor)
        tensors = tensors_of(p, rank, 0)
        wrong = tensors | {"w0": torch.zeros(1, 1)} if rank == BAD_RANK else tensors
        assert error_of(lambda: executor.run(wrong))[0] == "RefusedError"
        box = executor._program.places.known["box", rank].flat.view(p.m, p.k)
        theirs = box[BAD_RANK * p.rows[0] :][: p.rows[0]]
        return tensors["y0"].isnan().all().item(), theirs.isnan().all().item()


def test_who_refuses_writes_nothing(pool: Pool) -> None:
    answers = pool.run(refused_before_anything, THREE, ranks=3)
    assert answers[BAD_RANK][0]
    assert all(untouched for _, untouched in answers)


def struck_while_binding(group, p, builder):
    """Let one rank run out of memory at each step that is bound to new tensors. It then calls again with the same
    tensors. Return the number of errors.
    """
    rank, struck = group.rank(), 0
    held = [tensors_of(p, rank, 0)]  # a step that is wrongly bound to earlier tensors must not access freed memory
    with CpuSchedule(build(p, builder), comm_of(group)) as executor:
        call = executor._program._call
        executor.run(held[0])
        for nth in range(8):
            tensors, left = tensors_of(p, rank, nth), iter(range(nth))

            def failing(bound, left=left):
                if next(left, None) is None:
                    raise MemoryError
                return call(bound)

            if rank == BAD_RANK:
                executor._program._call = failing
                try:
                    executor._program.bind(tensors)
                except MemoryError:
                    struck += 1
                executor._program._call = call
            executor.run(tensors)
            assert_right(p, tensors, nth, f"struck at step {nth}")
            held.append(tensors)  # so that each tensor has another address
    return struck


@pytest.mark.parametrize("builder", ["gather", "shard"])
def test_a_call_that_memory_ran_out_for_does_no_harm_to_the_next(pool: Pool, builder: str) -> None:
    assert pool.run(struck_while_binding, THREE, builder, ranks=3)[BAD_RANK] >= 2


def different_schedules(group, p):
    """Let ranks make different schedules. Then let them run different schedules, which rank 1 has made in another
    order.
    """
    comm, rank = comm_of(group), group.rank()
    other = AllGatherMatmul.even(p.m, p.n[0] + 1, p.k, p.world_size, p.dtype)
    errors = [
        error_of(lambda: CpuSchedule(build(p, "serial" if rank == BAD_RANK else "shard"), comm)),
        error_of(lambda: CpuSchedule(build(other if rank == BAD_RANK else p, "shard"), comm)),
    ]
    with CpuSchedule(build(p, "shard"), comm) as shard, CpuSchedule(build(p, "serial"), comm) as serial:
        tensors = tensors_of(p, rank, 0)
        ranks.run_once(shard, tensors, BAD_RANK)
        assert_right(p, tensors, 0, "after a disagreement")
        errors.append(error_of(lambda: (serial if rank == BAD_RANK else shard).run(tensors, deadline_s=20)))
        errors.append(error_of(lambda: shard.run(tensors)))
    return errors


def test_ranks_with_different_schedules_are_told(pool: Pool) -> None:
    answers = pool.run(in_a_group_of_its_own, different_schedules, THREE, ranks=3)
    for names, shapes, _, again in answers:
        assert names[0] == shapes[0] == "DisagreementError"
        assert "serial" in names[1]
        assert "shard" in names[1]
        assert shapes[1].count("shard") == 2
        assert again[0] == "PoisonedGroupError"
    kinds = {called[0] for _, _, called, _ in answers}
    assert "DisagreementError" in kinds
    assert kinds <= {"DisagreementError", "PoisonedGroupError"}
    for _, _, (_, text), _ in answers:
        assert "'shard'" in text
        assert "'serial'" in text


def in_a_group_of_its_own(group, function, *args):
    """Call `function` on a group that it may make fail."""
    return function(torch.distributed.new_group(list(range(group.size()))), *args)


def relu_rows(world: int, rows: int, dtype: str = "fp32") -> Schedule:
    """Return a schedule in which rank r computes relu of `rows` of x's four rows, beginning with row r."""
    d = Draft("rows", world)
    x, y = d.buffer("x", 4, 3, dtype, "input"), d.buffer("y", 4, 3, dtype, "output")
    d.lane("compute").compute("relu", y.part(rows=(RANK, rows)), x.part(rows=(RANK, rows)))
    return d.schedule()


def bad_schedules(group):
    comm, world = comm_of(group), group.size()
    waits = Draft("waits", world)
    waits.lane("compute").wait(waits.signals("never", 1))
    gathers = Draft("gathers", world)
    x, y = gathers.buffer("x", 1, 3, "fp32", "input"), gathers.buffer("y", world, 3, "fp32", "output")
    gathers.lane("compute").all_gather(x.part(), y.part())
    gathers.lane("copy", "copy").all_gather(x.part(), y.part())
    schedules = [relu_rows(world, 3), relu_rows(world + 1, 1), relu_rows(world, 1, "fp8")]
    errors = [error_of(lambda s=s: CpuSchedule(s, comm)) for s in [*schedules, waits.schedule(), gathers.schedule()]]
    comm.all_gather("the group is as good as before")
    return errors


def test_schedules_that_cannot_be_run_are_refused_on_every_rank(pool: Pool) -> None:
    parts = [
        "rank 2: lane compute: relu y[2:+3, 0:+3]",
        "is for 4 ranks",
        "fp8 only in scaled GEMMs",
        "no step of a run sets the signal",
        "several lanes",
    ]
    for errors in pool.run(bad_schedules, ranks=3):
        for (kind, text), part in zip(errors, parts, strict=True):
            assert kind == "ScheduleError"
            assert part in text, text


# --- leftovers ---


def leave_nothing(group, p):
    """Return the numbers of new threads and mappings during and after each way to end."""

    def lanes() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("weft rank")}

    lanes_before, before = lanes(), traces()
    own = torch.distributed.new_group(list(range(group.size())))
    rank, comm = group.rank(), comm_of(own)

    def here() -> tuple[int, int]:
        gc.collect()
        return len(lanes() - lanes_before), len(traces(before)["memfd mappings"])

    counts = [here()]
    for end in ("close", "drop", "communicator"):
        executor = CpuSchedule(build(p, "shard", send="at_once"), comm)
        tensors = tensors_of(p, rank, 0)
        executor.run(tensors)
        counts.append(here())
        comm.all_gather(None, what="all have counted")
        if end == "close":
            executor.close()
            executor.close()
        if end == "communicator":
            comm.close()
        if end != "drop":
            assert "closed" in error_of(lambda e=executor, t=tensors: e.run(t))[1]
        del executor
        counts.append(here())
    return counts


def test_nothing_is_left(pool: Pool) -> None:
    for counts in pool.run(leave_nothing, THREE, ranks=3):
        # They stay until the communicator closes. There are threads for two lanes besides the caller's. For each of
        # three ranks there is a mapping of buffers with signals, and a mapping for the rendezvous.
        assert counts == [(0, 0), *[(2, 6)] * 5, (0, 0)]
