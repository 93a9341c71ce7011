"""Tests of weft.all_gather_matmul only, on CPU processes: backward by other operators, cached shapes, timed GEMMs and
schedules, FiCCO's heuristic. Also a weight that is gathered like FSDP's, and groups that fail or end.
`test_operators.py` has the other tests.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import wait_for_failure
from support.all_gather_matmul_ranks import by_heuristic
from support.on_ranks import F32, data, descriptors, device, own_group, told
from support.operators.gemms import AllGatherMatmulCall, Gathered
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft import env, symm
from weft.hw import load_machine
from weft.launch import Pool
from weft.operator import cache, measure, select, this_machine
from weft.operator.calls import OPERATORS, prepared_calls
from weft.plan import gemms, store
from weft.sim import model_of
from weft.symm.calls import calls_of


def backward_by_other_operators(
    group: dist.ProcessGroup, rows: list[int], widths: list[int], return_A: bool, wanted: str
) -> tuple[set[str], bool]:
    """Return (operators that backward calls, True if the gradients of equal calls have equal bits).

    wanted: "x" for x's gradient only, or "all".
    """
    own = own_group(group)
    x = data(group.rank(), (rows[group.rank()], 16), torch.float32, 1).requires_grad_()
    Bs = [data(group.rank(), (16, n), torch.float32, 2).requires_grad_(wanted == "all") for n in widths]
    found = []
    for _ in range(4):
        _, ys = weft.all_gather_matmul(x, Bs, 0, own, return_A=return_A, rows=rows)
        loss = sum((y * data(0, tuple(y.shape), torch.float32, 3)).sum() for y in ys)
        assert isinstance(loss, torch.Tensor)
        found.append(torch.autograd.grad(loss, [x, *Bs] if wanted == "all" else [x]))
    equal = all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))
    return {name for name in OPERATORS if prepared_calls(OPERATORS[name], own)} - {"all_gather_matmul"}, equal


@pytest.mark.parametrize(
    ("rows", "widths", "return_A", "wanted", "called"),
    [
        ([10, 10], [8], False, "x", {"matmul_reduce_scatter"}),
        ([10] * 4, [8, 3], False, "x", {"matmul_reduce_scatter"}),
        ([10] * 4, [8, 3], False, "all", {"all_gather_matmul_gradients"}),
        ([10, 10], [8], True, "all", set()),
        ([10, 4], [8], False, "all", set()),
    ],
    ids=["x", "x, two weights", "all", "A wanted", "uneven"],
)
def test_backward_calls_other_operators_and_its_bits_are_equal(
    pool: Pool, rows: list[int], widths: list[int], return_A: bool, wanted: str, called: set[str]
) -> None:
    arguments = rows, widths, return_A, wanted
    assert pool.run(backward_by_other_operators, *arguments, ranks=len(rows), timeout_s=60) == [(called, True)] * len(
        rows
    )


def many_sizes(group: dist.ProcessGroup, count: int, most: int, kept: int) -> int:
    """Call many sizes, of which `kept` stay compiled. Return the number of threads afterwards."""
    cache.KEPT = kept
    sizes, made = torch.Generator().manual_seed(5), []
    for seed in range(count):
        m = int(torch.randint(1, most, (1,), generator=sizes))
        case = Gathered((m, 16), 8 + 8 * (seed % 2), schedule="shard[chunks=1,send=in_turn,by=dma]")
        call = AllGatherMatmulCall(case, group, seed)
        made.append((call, call(group)))
    for call, ys in made:
        call.check(group, ys)
    return threading.active_count()


def test_of_many_shapes_the_last_ones_are_kept() -> None:
    """Each shape needs memory and a thread for its copies, and a server may meet any number of lengths."""
    with Pool(2) as alone:
        few, many = (max(alone.run(many_sizes, n, 200, 4, timeout_s=60)) for n in (8, 60))
    assert many <= few


def remembers_times(group: dist.ProcessGroup) -> list[str]:
    """Return the schedules that are timed at the first call of a shape. They must not be timed again for the same
    description in another process, or after the communicator has closed. Only a schedule that would replace serial is
    compared with serial anew.
    """
    symm.communicator(group, "cpu").close()  # for which sizes near this one may have been timed
    x, B = data(group.rank(), (6, 16), torch.float32, 1), data(0, (16, 10), torch.float32, 2)
    _, (first,) = weft.all_gather_matmul(x, [B], 0, group)
    symm.communicator(group, "cpu").close()
    with mock.patch.object(measure, "_time_us", side_effect=measure._time_us) as timer:
        _, (again,) = weft.all_gather_matmul(x, [B], 0, group)
    symm.communicator(group, "cpu").close()
    assert timer.call_count in (0, 2 * select._ROUNDS_TO_CONFIRM)
    assert torch.equal(first, again)
    kept = [store.read(path) or {} for path in env.cache_dir().glob("autotune-*.json")]
    (found,) = (content for content in kept if "'rows': (6, 6), 'n': (10,), 'k': 16" in content["key"]["problem"])
    assert found["key"]["mode"] == "single"
    return sorted(found["times_us"])


def test_schedules_are_timed_once_where_there_is_no_model(pool: Pool) -> None:
    for timed in pool.run(remembers_times, ranks=2, timeout_s=60):
        assert {name.split("[")[0] for name in timed} == {"serial", "gather", "shard"}


def measures_gemms(group: dist.ProcessGroup) -> dict[str, Any]:
    """Choose as on a GPU with a model. GEMMs take invented times, which are twice as long on rank 1."""
    rank = group.rank()
    timed: list[tuple[int, int, int, str]] = []
    # Launches and copies cost almost nothing, so that it is worth cutting small GEMMs.
    model = replace(model_of(load_machine("h200"), group.size()), launch_us=0.01, copy_latency_us=0.01, sustained=1.0)

    def timer(p: Any, tensors: dict[str, torch.Tensor]) -> Any:
        def time_us(shape: tuple[int, int, int, str], warm: int, calls: int) -> float:
            assert tensors["y0"].shape == (p.m, p.n[0])
            timed.append(shape)
            return (1 + rank) * 1e-3 * shape[0]

        return time_us

    def call(m: int, **options: Any) -> list[tuple[int, int, int, str]]:
        before = len(timed)
        one = AllGatherMatmulCall(Gathered((m, 16), 10), group, 1)
        one.check(group, one(group, **options))
        return timed[before:]

    original = this_machine.calibrated_model
    this_machine.calibrated_model = lambda device, world_size: model  # type: ignore[assignment]
    measure.TIMERS["cpu"] = timer
    try:
        found = {"pinned": call(48, schedule="serial"), "first": call(48), "again": call(48), "half": call(24)}
        informed = this_machine.machine_model(device(), group.size())
        assert informed is not None
        known = gemms.measured_here(this_machine.device_name(device()))
        return {**found, "known": dict(known), "model": informed.measured_us}
    finally:
        this_machine.calibrated_model = original
        del measure.TIMERS["cpu"]
        gemms._times.clear()
        symm.communicator(group, "cpu").close()  # this also drops the choice


def test_the_first_call_of_a_shape_measures_its_gemms(pool: Pool) -> None:
    """GEMMs that were measured for one shape are not measured again for another shape. All ranks use the slowest rank's
    times.
    """
    told = pool.run(measures_gemms, ranks=2, timeout_s=60)
    for found in told:
        assert found["pinned"] == found["again"] == []
        assert found["first"][0] == (96, 10, 16, "fp32")
        assert (48, 10, 16, "fp32") in found["first"]
        assert not set(found["first"]) & set(found["half"])
        assert set(found["known"]) == {*found["first"], *found["half"]}
        assert all(us == 2e-3 * shape[0] for shape, us in found["known"].items())
        assert found["model"] == found["known"]


@pytest.mark.parametrize("world", [2, 4])
def test_the_heuristics_schedule_runs_or_a_warning_says_why_not(pool: Pool, world: int) -> None:
    for found, warned in pool.run(by_heuristic, ranks=world, timeout_s=100):
        rows = "ficco_1d[start=uniform,gemms=fused,steps=0,by=dma]"
        columns = "ficco_2d[start=uniform,gemms=fused,steps=0,by=dma]"
        assert found[:2] == [(rows, rows), (columns, columns)]
        assert all(name.startswith(("serial", "gather", "shard")) for names in found[2:] for name in names)
        wanted, uneven = warned  # measured once each, although the shape is called twice
        assert (
            f"FiCCO's heuristic is not followed, because it picks {columns}, which does not support this problem: "
            in wanted
        )
        assert "of the gathered input" in wanted
        assert f"{tuple(range(3, 3 + world))} rows cannot be cut into equal chunks" in uneven


def serial_after_a_failure(group: dist.ProcessGroup) -> list[str]:
    """Return the errors of unfused calls of a known shape, after the group has failed in another call."""
    x, ws = torch.randn(4, 8), {n: torch.randn(8, n) for n in (3, 5)}

    def call(n: int, schedule: str, **options: Any) -> str:
        try:
            weft.all_gather_matmul(x, [ws[n]], 0, group, schedule=schedule, **options)
        except weft.errors.WeftError as error:
            return type(error).__name__
        return "done"

    found = [call(3, "serial"), call(5, "gather[by=kernel]")]
    if group.rank() == 0:
        found.append(call(5, "gather[by=kernel]", deadline_s=0.5))
    else:
        wait_for_failure(symm.communicator(group, "cpu"))
    return [*found, call(3, "serial")]


def test_the_librarys_calls_are_refused_too_when_the_group_has_failed() -> None:
    with Pool(2) as alone:
        first, second = alone.run(serial_after_a_failure, timeout_s=60)
    assert first == ["done", "done", "DeadlineError", "PoisonedGroupError"]
    assert second == ["done", "done", "PoisonedGroupError"]


def odd_uses(group: dist.ProcessGroup) -> dict[str, str]:
    """Check unusual calls: they work, or their errors give the reason."""
    x, B = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    found = {}
    for schedule in ("serial", "gather[by=kernel]"):
        with torch.autocast("cpu", torch.bfloat16):
            _, (y,) = weft.all_gather_matmul(x, [B], 0, group, schedule=schedule)
            y.sum().backward()
        found[f"autocast {schedule}"] = str(y.dtype)
    (grad,) = torch.autograd.grad((weft.all_gather_matmul(x, [B], 0, group)[1][0] ** 2).sum(), [x], create_graph=True)
    found["twice"] = told(lambda: torch.autograd.grad((grad**2).sum(), [x]))
    compiled = torch.compile(lambda a, b: weft.all_gather_matmul(a, [b], 1, group)[1][0], backend="eager")
    found["compiled"] = told(lambda: compiled(torch.randn(4, 4), torch.randn(4, 4)))
    expanded = torch.randn(1, 3).expand(8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, (y,) = weft.all_gather_matmul(x, [expanded], 0, group)
    rank = group.rank()
    torch.testing.assert_close(y[4 * rank : 4 * rank + 4], x @ expanded)
    found["no extent"] = str(list(weft.all_gather_matmul(torch.randn(4, 0, 8), [B.detach()], 0, group)[1][0].shape))
    return found


def test_odd_uses_work_or_say_why_not(pool: Pool) -> None:
    for found in pool.run(odd_uses, ranks=2, timeout_s=100):
        assert found["autocast serial"] == found["autocast gather[by=kernel]"] == "torch.float32"
        assert found["twice"].startswith("NotImplementedError: all_gather_matmul does not support second derivatives")
        assert "gather_dim=1 is not allowed for" in found["compiled"]
        assert found["no extent"] == "[8, 0, 3]"


def groups_come_and_go(group: dist.ProcessGroup, rounds: int) -> set[tuple[str, str]]:
    """Make, use and destroy a group in each round. Return the descriptors that rounds after the second leave open."""
    opened = set()
    for number in range(rounds):
        own = dist.new_group(list(range(group.size())))
        weft.all_gather_matmul(torch.randn(4, 8), [torch.randn(8, 3)], 0, own)
        dist.destroy_process_group(own)
        del own
        gc.collect()
        if number < 2:
            opened = descriptors()
    return descriptors() - opened


def test_groups_leave_nothing_open(pool: Pool) -> None:
    assert pool.run(groups_come_and_go, 5, ranks=2, timeout_s=60) == [set()] * 2


def partly_frozen(group: dist.ProcessGroup) -> None:
    """Check calls in which ranks want gradients of different weights."""
    rank, world = group.rank(), group.size()
    for seed in range(3):
        xs = [data(r, (6, 16), torch.float32, seed) for r in range(world)]
        Bs = [[data(r, (16, 5), torch.float32, 10 * seed + i) for i in (1, 2)] for r in range(world)]
        x, own = xs[rank].clone().requires_grad_(), [B.clone() for B in Bs[rank]]
        own[0].requires_grad_()
        own[1].requires_grad_(rank == 0)
        _, ys = weft.all_gather_matmul(x, own, 0, group, return_A=False)
        sum(y.sum() for y in ys).backward()
        exact = sum(torch.ones(6, 5, dtype=torch.float64) @ B.double().t() for of in Bs for B in of)
        torch.testing.assert_close(x.grad.double(), exact, rtol=1e-5, atol=1e-5)
        of_weight = torch.cat(xs).double().t() @ torch.ones(6 * world, 5, dtype=torch.float64)
        torch.testing.assert_close(own[0].grad.double(), of_weight, rtol=1e-5, atol=1e-5)
        assert (own[1].grad is None) == (rank != 0)


def test_ranks_may_freeze_other_weights(pool: Pool) -> None:
    pool.run(partly_frozen, ranks=2)


def weight_gathered(group: dist.ProcessGroup) -> None:
    """Check a linear layer whose weight is divided over data-parallel ranks, as FSDP does: docs/gemms.md."""
    rank, world = group.rank(), group.size()
    whole = data(0, (6 * world, 12), F32, 1)
    xs = [data(r, (5, 12), F32, 2).double().requires_grad_() for r in range(world)]
    weighing = [data(r, (5, 6 * world), F32, 3) for r in range(world)]
    exact = whole.double().requires_grad_()
    sum(((x @ exact.t()) * by).sum() for x, by in zip(xs, weighing, strict=True)).backward()  # type: ignore[union-attr]
    x = xs[rank].detach().float().requires_grad_()
    shard = whole.chunk(world)[rank].clone().requires_grad_()
    _, (y,) = weft.all_gather_matmul(shard, [x.t()], 0, group, return_A=False)
    (y.t() * weighing[rank]).sum().backward()
    found = [(y.t(), xs[rank] @ exact.t()), (x.grad, xs[rank].grad), (shard.grad, exact.grad.chunk(world)[rank])]  # type: ignore[union-attr]
    for ours, right in found:
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_weight_is_gathered_as_fsdp_would(pool: Pool, world: int) -> None:
    pool.run(weight_gathered, ranks=world, timeout_s=60)


def counted_alike(group: dist.ProcessGroup) -> int:
    """Use a torch dispatch mode around backward on one rank only."""
    x = torch.ones(6, 16, requires_grad=True)
    for number in range(3):
        w = torch.ones(16, 5, requires_grad=True)
        y = weft.all_gather_matmul(x, [w], 0, group, return_A=False)[1][0]
        z = weft.matmul_reduce_scatter(y, torch.ones(5, 16, requires_grad=True), "sum", 0, group)
        with FlopCounterMode(display=False) if group.rank() == 0 and number else contextlib.nullcontext():
            z.sum().backward()
    return calls_of(group).begun


def test_calls_within_backward_are_counted_alike(pool: Pool) -> None:
    """If ranks counted differently, they would seem to be out of step at the next new shape on GPUs."""
    assert len(set(pool.run(counted_alike, ranks=2))) == 1
