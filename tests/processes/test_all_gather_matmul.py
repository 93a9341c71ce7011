"""weft.all_gather_matmul on CPU processes: results, gradients, torch.compile, layouts, bad input, a rank that does not come."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from support import matmul_ranks as ranks
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft.launch import Pool
from weft.symm.calls import calls_of

F32, BF16 = torch.float32, torch.bfloat16
# shape of a shard, dimension, widths, rows of each rank, dtype, whether A is wanted, schedule
FORWARD = {
    "a matrix": ((5, 16), 0, [7], None, F32, True, None),
    "three matrices in bf16": ((8, 32), 0, [16, 8, 8], None, BF16, False, None),
    "pinned": ((6, 16), 0, [5], None, F32, False, "shard[chunks=2,send=in_turn,by=dma]"),
    "pinned, A wanted": ((6, 16), 0, [5, 4], None, F32, True, "shard[chunks=2,send=in_turn,by=dma]"),
    "serial": ((6, 16), 0, [5], None, F32, True, "serial"),
    "serial, uneven": ((4, 16), 0, [5], [4, 0, 9, 2], F32, True, "serial"),
    "uneven": ((4, 16), 0, [5], [4, 0, 9, 2], F32, True, "gather[by=kernel]"),
    "a batch of sequences": ((3, 4, 16), 1, [6], None, F32, True, None),
    "a batch, uneven": ((2, 3, 16), 1, [6], [3, 1, 2, 5], F32, True, None),
    "no rows": ((0, 16), 0, [6], None, F32, True, None),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("world", [1, 2, 4])  # the one that changes last: each change makes a new group
def test_results(pool: Pool, world: int, name: str) -> None:
    shape, gather_dim, widths, rows, dtype, return_A, schedule = FORWARD[name]
    if rows is not None:
        rows = rows[:world]
    if world == 1:
        schedule = None
    pool.run(ranks.forward, shape, gather_dim, widths, rows, dtype, return_A, schedule, 3, ranks=world, timeout_s=60)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("return_A", [False, True], ids=["", "A wanted"])
@pytest.mark.parametrize("rows", [[5, 5], [4, 0, 9]], ids=["even", "uneven"])
def test_gradients(pool: Pool, rows: list[int], return_A: bool, compiled: bool) -> None:
    pool.run(ranks.backward, rows, [6, 3], return_A, compiled, F32, ranks=len(rows), timeout_s=120)


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
    assert pool.run(ranks.backward_by_other_operators, *arguments, ranks=len(rows), timeout_s=60) == [
        (called, True)
    ] * len(rows)


@pytest.mark.parametrize("world", [2, 3])
def test_many_sizes_in_a_row(pool: Pool, world: int) -> None:
    pool.run(ranks.many_sizes, 12, ranks=world, timeout_s=60)


def test_of_many_shapes_the_last_ones_are_kept() -> None:
    """Each shape holds a thread for its copies and memory; a service sees any number of lengths."""
    with Pool(2) as alone:
        few, many = (max(alone.run(ranks.many_sizes, n, 200, 4, timeout_s=60)) for n in (8, 60))
    assert many <= few


def test_schedules_are_timed_once_where_there_is_no_model(pool: Pool) -> None:
    for timed in pool.run(ranks.remembers_times, ranks=2, timeout_s=60):
        assert {name.split("[")[0] for name in timed} == {"serial", "gather", "shard"}


def test_the_first_call_of_a_shape_measures_its_gemms(pool: Pool) -> None:
    """GEMMs that were measured for one shape are not measured again for another; all ranks use the slowest times."""
    told = pool.run(ranks.measures_gemms, ranks=2, timeout_s=60)
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
    for found, warned in pool.run(ranks.by_heuristic, ranks=world, timeout_s=100):
        rows = "ficco_1d[start=uniform,gemms=fused,steps=0,by=dma]"
        columns = "ficco_2d[start=uniform,gemms=fused,steps=0,by=dma]"
        assert found[:2] == [(rows, rows), (columns, columns)]
        assert all(name.startswith(("serial", "gather", "shard")) for names in found[2:] for name in names)
        wanted, uneven = warned  # once each, though called twice
        assert f"FiCCO's heuristic is not followed, it picks {columns}, which cannot do this: " in wanted
        assert "of the gathered input" in wanted
        assert f"{tuple(range(3, 3 + world))} rows have no common chunks" in uneven


def test_bad_arguments_name_the_values_and_the_fix(pool: Pool) -> None:
    expected = {
        "one dimension": "at least two dimensions",
        "last dimension": "gather_dim=1 must name a dimension of A_shard (4, 8) before the last",
        "no matrix": "Bs is empty",
        "other K": "Bs[0] has shape (5, 3): it must be [K=8, N]",
        "other dtype": "Bs[0] is torch.float64",
        "strange dtype": "A_shard is torch.int32: use one of",
        "rows": "rows=(5, 5)",
        "schedule": "no schedule 'shrad'",
        "no name": "schedule=['serial'] is a list: pass the name of a schedule",
        "cannot": "are sent whole",
        "deadline": "deadline_s=-1 must be positive",
        "timeline": "timeline=3 is no timeline: pass weft.Timeline()",
    }
    for told in pool.run(ranks.errors, ranks=2, timeout_s=60):
        assert told.keys() == expected.keys()
        for name, text in expected.items():
            assert text in told[name], name


@pytest.mark.parametrize("schedule", [None, "serial", "gather[by=kernel]"])
def test_weights_may_lie_otherwise_on_each_rank_and_in_each_call(pool: Pool, schedule: str | None) -> None:
    pool.run(ranks.layouts, schedule, ranks=3, timeout_s=60)


def test_layouts_that_cost_a_copy_are_warned_about_once(pool: Pool) -> None:
    for told in pool.run(ranks.copies, ranks=2, timeout_s=60):
        assert sum("A_shard is copied at every call" in text for text in told) == 1
        assert sum("neither its rows nor its columns are in one piece" in text for text in told) == 1


def test_a_rank_that_does_not_come(pool: Pool) -> None:
    with Pool(2) as alone:
        told, _ = alone.run(ranks.never_comes, timeout_s=60)
    assert told.startswith("DeadlineError")
    assert "rank 0 waited 1 s" in told


def test_the_librarys_calls_are_refused_too_when_the_group_has_failed() -> None:
    with Pool(2) as alone:
        first, second = alone.run(ranks.serial_after_a_failure, timeout_s=60)
    assert first == ["done", "done", "DeadlineError", "PoisonedGroupError"]
    assert second == ["done", "done", "PoisonedGroupError"]


def test_timeline_of_the_librarys_calls(pool: Pool) -> None:
    steps = ["all_gather x_shard -> x: 384", "matmul y0: 0", "matmul y1: 0"]
    assert pool.run(ranks.serial_steps, ranks=2, timeout_s=60) == [steps * 2, []]


def test_opcheck(pool: Pool) -> None:
    pool.run(ranks.checked_as_op, ranks=1, timeout_s=120)


def test_one_rank_that_differs_is_named_on_every_rank(pool: Pool) -> None:
    with Pool(2) as alone:
        found = alone.run(ranks.one_rank_differs, timeout_s=60)
    for told in found:
        assert told["refuses"].startswith("RefusedError: rank 0: Bs[0] has shape (5, 3)")
        assert (
            "rank 1: all_gather_matmul of a shape that is new here: [10, 8] gathered from 2 ranks (6, 4 rows)"
            in told["rows"]
        )
        for name in ("dtype", "rows", "schedule", "gradients", "columns"):
            assert told[name].startswith("DisagreementError: ranks make different calls"), name
        assert "@ [8, 6] on each" in told["columns"]
        assert "pad those of a vocabulary" in told["columns"]
        assert "@ [8, 3] on each, fp16" in told["dtype"]
        assert "schedule serial" in told["schedule"]
        assert "pass rows=" not in told["schedule"]  # which would not help


def test_odd_uses_work_or_say_why_not(pool: Pool) -> None:
    for told in pool.run(ranks.odd_uses, ranks=2, timeout_s=100):
        assert told["autocast serial"] == told["autocast gather[by=kernel]"] == "torch.float32"
        assert told["twice"].startswith("NotImplementedError: all_gather_matmul can be differentiated once")
        assert "gather_dim=1 must name a dimension" in told["compiled"]
        assert "deadline_s=nan must be positive" in told["deadline"]
        assert "pass a list of tensors, [B]" in told["one tensor"]
        assert told["no extent"] == "[8, 0, 3]"


def test_groups_leave_nothing_open(pool: Pool) -> None:
    for counts in pool.run(ranks.groups_come_and_go, 5, ranks=2, timeout_s=60):
        assert counts[-1] <= counts[1]


def partly_frozen(group: dist.ProcessGroup) -> None:
    """Ranks want gradients of weights, and not of the same ones."""
    rank, world = group.rank(), group.size()
    for seed in range(3):
        xs = [ranks.data(r, (6, 16), torch.float32, seed) for r in range(world)]
        Bs = [[ranks.data(r, (16, 5), torch.float32, 10 * seed + i) for i in (1, 2)] for r in range(world)]
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
    """A linear layer whose weight is divided over ranks that have data of their own, as FSDP divides it: docs/gemms.md."""
    rank, world = group.rank(), group.size()
    whole = ranks.data(0, (6 * world, 12), F32, 1)
    xs = [ranks.data(r, (5, 12), F32, 2).double().requires_grad_() for r in range(world)]
    weighing = [ranks.data(r, (5, 6 * world), F32, 3) for r in range(world)]
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
    """A mode of torch's around backward on one rank only."""
    x = torch.ones(6, 16, requires_grad=True)
    for number in range(3):
        w = torch.ones(16, 5, requires_grad=True)
        y = weft.all_gather_matmul(x, [w], 0, group, return_A=False)[1][0]
        z = weft.matmul_reduce_scatter(y, torch.ones(5, 16, requires_grad=True), "sum", 0, group)
        with FlopCounterMode(display=False) if group.rank() == 0 and number else contextlib.nullcontext():
            z.sum().backward()
    return calls_of(group).begun


def test_calls_within_backward_are_counted_alike(pool: Pool) -> None:
    """Or ranks would seem to be out of step at the next new shape on GPUs."""
    assert len(set(pool.run(counted_alike, ranks=2))) == 1
