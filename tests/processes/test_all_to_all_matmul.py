"""Tests of weft.all_to_all_matmul only, on CPU processes: FiCCO's heuristic by columns, dropped rows, one gradient of
two, wrong splits, too many rows. `test_operators.py` and `test_operators_of_experts.py` have the other tests.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.all_to_all_matmul_ranks import tokens_gradient_alone
from support.on_ranks import applicable, device, own_group, poisoned_memory, told, waits_end_after
from support.operators.experts import AllToAllMatmulCall, Experts
from support.slow import in_turn

import weft
from weft import symm
from weft.launch import Pool
from weft.operator.calls import prepared_calls
from weft.ops.all_to_all_matmul import OPERATOR
from weft.ops.all_to_all_matmul_gradients import all_rows, gradients_of_experts
from weft.runtime.unfused.experts import all_to_all_matmul, exchange_counts
from weft.runtime.unfused.sizes import Sizes


def by_columns(group: dist.ProcessGroup, exact: bool) -> str:
    """Return the schedules of calls that use FiCCO's heuristic. There are fewer tokens than columns."""
    for seed in range(4):
        call = AllToAllMatmulCall(Experts(exact=exact, k=384, schedule="heuristic"), group, seed)
        with poisoned_memory(), warnings.catch_warnings():
            warnings.simplefilter("error")
            ys = call(group)
        call.check(group, ys)
    return [call for call in prepared_calls(OPERATOR, group) if call.pinned == "heuristic"][-1].taken[0]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "room to spare"])
def test_the_heuristic_takes_columns_where_tokens_are_few_and_long(pool: Pool, exact: bool) -> None:
    by = "dma" if exact else "kernel"
    found = pool.run(by_columns, exact, ranks=3, timeout_s=60)
    assert set(found) == {f"ficco_2d[start=uniform,gemms=fused,steps=0,by={by}]"}


def of_other_sizes(group: dist.ProcessGroup) -> dict[str, str]:
    """Call every schedule with many tokens, with few, and with many again. Return the errors."""
    found = {}
    for name in [one.name for one in applicable(AllToAllMatmulCall(Experts(), group, 0).problem())]:

        def run(name: str = name) -> None:
            for seed, count in enumerate((8, 1, 12)):
                tables = ((count, 2, 0, 1),) * group.size()
                call = AllToAllMatmulCall(Experts(schedule=name), group, seed, tables)
                with call.poisoned():
                    call.check(group, call(group))

        found[name] = told(run)
    return found


def test_every_schedule_serves_calls_of_other_sizes(pool: Pool) -> None:
    for found in pool.run(of_other_sizes, ranks=2, timeout_s=60):
        assert set(found.values()) == {"nothing"}, found


def left_out(group: dist.ProcessGroup) -> None:
    """Make an unfused call in which more rows arrive than max_rows, which is no error on GPUs. The first rows and their
    gradients must be right.
    """
    call = AllToAllMatmulCall(Experts(k=8), group, 2)
    exact = [[t.double().requires_grad_() for t in of_rank] for of_rank in call.inputs]
    ys = [y for (y,) in call.reference(exact)]
    room = [len(y) * 2 // 3 for y in ys]
    torch.stack([y[:rows].sum() for y, rows in zip(ys, room, strict=True)]).sum().backward()
    (tokens, w), splits, rank = call.mine, call.splits_here, call.rank
    sizes = Sizes(splits, exchange_counts(splits, group))
    y, _ = all_to_all_matmul(tokens, w, sizes, group, room[rank])
    torch.testing.assert_close(y.double(), ys[rank][: room[rank]], rtol=1e-4, atol=1e-4)
    grad_y = all_rows(torch.ones_like(y), sum(sizes.host.came))
    found = gradients_of_experts(tokens, w, sizes, group, grad_y, (True, True))
    for grad, t in zip(found, exact[rank], strict=True):
        torch.testing.assert_close(grad.double(), t.grad, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("world", [1, 3])
def test_rows_left_out_have_no_gradients(pool: Pool, world: int) -> None:
    pool.run(left_out, ranks=world, timeout_s=60)


def one_gradient(group: dist.ProcessGroup) -> None:
    """Compute only the gradient of the tokens, or only that of the weights. It must be the same as in a call that wants
    both gradients.
    """
    symm.communicator(group, device()).close()
    call, grads = AllToAllMatmulCall(Experts(k=8), group, 3), []
    for wanted in ((True, True), (True, False), (False, True)):
        inputs = [t.clone().requires_grad_(want) for t, want in zip(call.mine, wanted, strict=True)]
        y, _ = call(group, *inputs)
        (y**2).sum().backward()
        grads.append([t.grad for t in inputs])
    with torch.no_grad():
        assert torch.equal(call(group, *inputs)[0], y)
    assert sum(not one.stale for one in prepared_calls(OPERATOR, group)) == 1
    assert grads[1][1] is grads[2][0] is None
    torch.testing.assert_close(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[2][1])


def test_of_two_gradients_one(pool: Pool) -> None:
    pool.run(one_gradient, ranks=2, timeout_s=60)


@pytest.mark.parametrize(("max_rows", "world"), in_turn([False, True], [3, 1]))
def test_the_gradient_of_tokens_alone_is_a_combine(pool: Pool, world: int, max_rows: bool) -> None:
    with Pool(world) as alone:
        assert set(alone.run(tokens_gradient_alone, max_rows, timeout_s=60)) == {int(world > 1)}


def compiled_in_pieces(group: dist.ProcessGroup) -> list[str]:
    """Return Dynamo's warnings if a call breaks the graph, because its number of rows is unknown. Each call has another
    shape.
    """
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch._dynamo").addHandler(handler)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: torch.relu(weft.all_to_all_matmul(*inputs)), backend="aot_eager")
    try:
        for n in range(1, 13):
            call = AllToAllMatmulCall(Experts(k=8, n=n), group, n)
            with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
                found = compiled(*call.mine, call.splits_here)
            torch.testing.assert_close(found, call.exact()[0].relu().float(), rtol=1e-4, atol=1e-4)
    finally:
        logging.getLogger("torch._dynamo").removeHandler(handler)
    return warned


@pytest.mark.slow
def test_compiled_in_pieces_warns_of_nothing(pool: Pool) -> None:
    assert pool.run(compiled_in_pieces, ranks=2, timeout_s=120) == [[], []]


def call(
    group: dist.ProcessGroup, *, rows: int = 4, k: int = 8, n: int = 3, experts: int = 2, **options: Any
) -> torch.Tensor:
    """Send `rows` tokens of ones, all to the first expert of all ranks. The weights are ones."""
    splits = torch.zeros(group.size() * experts, dtype=torch.int64, device=device())
    splits[0] = rows
    x, w = torch.ones(rows, k, device=device()), torch.ones(experts, k, n, device=device())
    return weft.all_to_all_matmul(x, w, splits, group=group, **options)


def wrong_values(group: dist.ProcessGroup, schedule: str) -> dict[str, str]:
    """Pass wrong splits on rank 1, in a first call and later. Every rank gets the error, and the group stays usable."""
    found, bad = {}, group.rank() == 1
    x, w = torch.ones(4, 8), torch.ones(2, 8, 3)
    right = [4] + [0] * (2 * group.size() - 1)
    for when in ("first", "later"):
        for name, wrong in {"sum": [5, *right[1:]], "few": [3, *right[1:]], "negative": [5, -1, *right[2:]]}.items():
            splits = torch.tensor(wrong if bad else right)
            found[f"{name}, {when}"] = told(
                lambda splits=splits: weft.all_to_all_matmul(x, w, splits, group=group, schedule=schedule)
            )
        call(group, schedule=schedule)
    call(group, rows=64, schedule=schedule)
    found["capacity"] = told(lambda: call(group, rows=65 if bad else 4, schedule=schedule))
    y = call(group, rows=65 if bad else 4, schedule=schedule, capacity=65)
    assert y.sum() == (65 + 4 * (group.size() - 1)) * 8 * 3 * (group.rank() == 0)
    return found


@pytest.mark.parametrize("schedule", ["serial", "dispatch[by=dma,rest=each]"])
def test_splits_that_one_rank_gets_wrong_are_named_on_every_rank(pool: Pool, schedule: str) -> None:
    for found in pool.run(wrong_values, schedule, ranks=3, timeout_s=60):
        for when in ("first", "later"):
            for name, total in (("sum", 5), ("few", 3)):
                assert found[f"{name}, {when}"].startswith(
                    f"RefusedError: rank 1: splits add up to {total} but tokens has 4 rows: pass the number"
                )
            assert found[f"negative, {when}"].startswith("RefusedError: rank 1: splits[1]=-1: pass the number")
        if schedule == "serial":  # the CPU reads the sizes, and allocates memory for the arriving rows
            assert found["capacity"] == "nothing"
        else:
            assert found["capacity"].startswith(
                "RefusedError: rank 1: tokens has 65 rows, but calls of this shape were set up for capacity=64, which the first "
                "call has determined: pass capacity,"
            )


def too_many_rows(group: dist.ProcessGroup, schedule: str) -> tuple[str, float]:
    """Let all ranks send 4 rows to rank 0, which has space for one row less. Return its error, and the result of a
    later call.
    """
    world = group.size()
    text = told(lambda: call(group, max_rows=4 * world - 1, schedule=schedule))
    return text, float(call(group, max_rows=4 * world, schedule=schedule)[: 4 * world * (group.rank() == 0)].sum())


@pytest.mark.parametrize("schedule", ["serial", "dispatch[by=kernel,rest=each]"])
def test_more_rows_than_there_is_room_for(pool: Pool, schedule: str) -> None:
    (error, total), *others = pool.run(too_many_rows, schedule, ranks=2, timeout_s=60)
    assert error.startswith(
        "TooManyRowsError: 8 rows arrived on rank 0 (from each rank: [4, 4]), but max_rows=7: pass at least 8"
    )
    assert total == 8 * 8 * 3
    assert others == [("nothing", 0.0)]


def too_many_at_first(group: dist.ProcessGroup) -> tuple[str, str]:
    """Let rank 0 receive too many rows in the first call of a shape. Return the errors of this call and of the next."""
    own, world = own_group(group), group.size()
    with waits_end_after(20):
        return told(lambda: call(own, max_rows=4 * world - 1)), told(lambda: call(own, max_rows=4 * world))


def test_a_first_call_that_brings_too_many_rows_counts_as_made(pool: Pool) -> None:
    (first, *others), later = zip(*pool.run(too_many_at_first, ranks=2, timeout_s=60), strict=True)
    assert first.startswith("TooManyRowsError")
    assert set(others) == set(later) == {"nothing"}


def odd_uses(group: dist.ProcessGroup) -> tuple[str, str]:
    """Return the errors if `received` changes before backward, and of a compiled call with a timeline."""
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(2, 8, 3, requires_grad=True)
    splits, timeline = torch.tensor([4] + [0] * (2 * group.size() - 1)), weft.Timeline()
    y, received = weft.all_to_all_matmul(x, w, splits, group=group, return_received=True)
    received += 1
    changed = told(lambda: y.sum().backward())
    compiled = torch.compile(
        lambda x: weft.all_to_all_matmul(x, w, splits, timeline=timeline), backend="eager", fullgraph=True
    )
    return changed, told(lambda: compiled(x))


def test_odd_uses_say_why_not() -> None:
    with Pool(2) as alone:
        for changed, timeline in alone.run(odd_uses, timeout_s=100):
            assert "modified by an inplace operation" in changed
            assert "is not supported in a compiled call" in timeline
