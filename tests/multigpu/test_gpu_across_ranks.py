"""Test calls of an operator on GPUs whose arguments differ between ranks.

On GPUs, the ranks' processes exchange messages only at the first call of a shape. Digests of later calls are compared
afterwards. With WEFT_CHECK_CALLS=1, each call also compares tables and values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from support import across_ranks
from support.on_ranks import assert_error, assert_errors, error_of

import weft
from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
K, N = 256, 128


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def average(group: dist.ProcessGroup, differs: bool) -> Any:
    op = "avg" if differs else "sum"
    return weft.matmul_all_reduce(bf16(64, K), bf16(K, N), group, reduce_op=op, schedule="one_shot[by=kernel]")


def scattered_average(group: dist.ProcessGroup, differs: bool) -> Any:
    op = "avg" if differs else "sum"
    return weft.matmul_reduce_scatter(
        bf16(64, K), bf16(K, N), op, 0, group, schedule="direct[chunks=1,by=dma,add=gemm]"
    )


def rows(group: dist.ProcessGroup, differs: bool) -> Any:
    x = bf16(96 if differs else 64, K)
    return weft.all_gather_matmul(x, [bf16(K, N)], 0, group, schedule="gather[by=kernel]")


def dimension(group: dist.ProcessGroup, differs: bool) -> Any:
    return weft.all_gather_matmul(bf16(8, 8, K), [bf16(K, N)], int(differs), group, schedule="gather[by=kernel]")


def columns(group: dist.ProcessGroup, differs: bool) -> Any:
    return weft.matmul_all_gather(bf16(64, K), bf16(K, N), int(differs), group, schedule="direct[chunks=1,by=dma]")


def capacity(group: dist.ProcessGroup, differs: bool) -> Any:
    splits, w = torch.tensor([32, 32], device="cuda"), bf16(1, K, N)
    options = {"capacity": 128 if differs else 64, "schedule": "dispatch[by=kernel,rest=each]"}
    return weft.all_to_all_matmul(bf16(64, K), w, splits, group=group, max_rows=128, **options)


WIDE, LONG = 1024, 2048
"""Sizes of layers for which overlapped schedules are chosen. With NCCL, a rank would hang if its peer raised instead of
making the same NCCL call."""
CALLS = [average, scattered_average, rows, dimension, columns, capacity]


def attention(group: dist.ProcessGroup, differs: bool) -> Any:
    layer = weft.nn.ParallelAttention(WIDE, 4, group=group, device="cuda", dtype=torch.bfloat16)
    return layer(
        bf16(2, LONG, WIDE), rotary=weft.nn.rotary_embedding(2 * LONG, WIDE // 4, device="cuda") if differs else None
    )


def causal(group: dist.ProcessGroup, differs: bool) -> Any:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "sequence_dim": None}
    layer = weft.nn.ParallelAttention(WIDE, 4, group=group, causal=differs, **options)
    with weft.plan.use("one_shot[by=kernel]"):  # the planner may choose serial for the all-reduce of this size
        return layer(bf16(2, LONG, WIDE))


def activation(group: dist.ProcessGroup, differs: bool) -> Any:
    function = torch.nn.functional.gelu if differs else torch.nn.functional.silu
    layer = weft.nn.ParallelMLP(WIDE, 4 * WIDE, group=group, activation=function, device="cuda", dtype=torch.bfloat16)
    return layer(bf16(2, LONG, WIDE))


def residual(group: dist.ProcessGroup, differs: bool) -> Any:
    layer = weft.nn.RowParallelLinear(2 * WIDE, WIDE, group=group, device="cuda", dtype=torch.bfloat16)
    return layer(bf16(2, 2 * LONG, WIDE), residual=bf16(2, LONG, WIDE) if differs else None)


def norm_before(group: dist.ProcessGroup, differs: bool) -> Any:
    norm = weft.nn.RMSNorm(WIDE, eps=1e-3 if differs else 1e-5, group=group, device="cuda", dtype=torch.bfloat16)
    return weft.nn.ColumnParallelLinear(WIDE, WIDE, group=group, device="cuda", dtype=torch.bfloat16)(
        norm(bf16(2, LONG, WIDE))
    )


LAYERS = [attention, causal, activation, residual, norm_before]


def differ(group: dist.ProcessGroup, call: Callable[..., Any]) -> tuple[str, str]:
    """Make both calls on both ranks, so that both are known. Then let each rank repeat a different call, and return its
    error.
    """
    own = dist.new_group([0, 1])
    for differs in (False, True, False, True):
        call(own, differs)
    torch.cuda.synchronize()

    def again() -> None:
        until = time.monotonic() + 8
        while time.monotonic() < until:
            call(own, group.rank() == 1)
            torch.cuda.synchronize()

    found = error_of(again)
    torch.cuda.synchronize()
    dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_known_shapes_are_compared_afterwards(pair: Pool, call: Callable[..., Any]) -> None:
    assert_errors(pair.run(differ, call, timeout_s=60), "PoisonedGroupError", "ranks have made different calls")


@pytest.mark.parametrize("call", LAYERS)
def test_options_of_layers_are_compared_afterwards(pair: Pool, call: Callable[..., Any]) -> None:
    assert_errors(
        pair.run(differ, call, timeout_s=60), "PoisonedGroupError", "ranks have called layers with different options"
    )


def differ_at_first(group: dist.ProcessGroup, call: Callable[..., Any]) -> tuple[str, str]:
    own = dist.new_group([0, 1])
    found = error_of(lambda: call(own, group.rank() == 1))
    dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize("call", LAYERS)
def test_options_of_layers_are_compared_at_the_first_call_of_a_shape(pair: Pool, call: Callable[..., Any]) -> None:
    assert_errors(
        pair.run(differ_at_first, call, timeout_s=60), "DisagreementError", "ranks call layers with different options"
    )


def agree(group: dist.ProcessGroup, calls: list[Callable[..., Any]]) -> None:
    """Make the same calls on all ranks, one of which is slow. No rank may raise an error."""
    own = dist.new_group([0, 1])
    until, number = time.monotonic() + 1.5, torch.zeros(1, device="cuda")
    while not int(number):
        for call in calls:
            for differs in (False, True):
                call(own, differs)
        if group.rank():
            time.sleep(0.05)
        number.fill_(time.monotonic() > until)
        dist.broadcast(number, group_src=0, group=own)
    time.sleep(0.6)
    average(own, False)
    torch.cuda.synchronize()
    dist.destroy_process_group(own)


def test_calls_that_are_the_same_pass(pair: Pool) -> None:
    pair.run(agree, [*CALLS, *LAYERS], timeout_s=120)


def compared(group: dist.ProcessGroup, function: Callable[..., Any], *arguments: Any) -> Any:
    os.environ["WEFT_CHECK_CALLS"] = "1"
    try:
        return function(group, *arguments)
    finally:
        del os.environ["WEFT_CHECK_CALLS"]


@pytest.mark.parametrize("by", [1, -2, 0])
@pytest.mark.parametrize("schedule", ["serial", "combine[chunks=1,by=store]"])
def test_tables_that_do_not_fit_a_peers_are_refused_on_demand(pair: Pool, schedule: str, by: int) -> None:
    function = across_ranks.rows_that_nobody_expects
    for error, after in pair.run(compared, function, "cuda", schedule, by, True, timeout_s=60):
        assert_error(error, "RefusedError", across_ranks.said_of_tables(by))
        assert after, "the group must go on"


def spoilt(group: dist.ProcessGroup, schedule: str, by: int) -> tuple[list[bool], tuple[str, str]]:
    """Call with wrong tables on rank 0. Return, for each row of the result, whether it is NaN, and the error of the
    next call.
    """
    own = dist.new_group([0, 1])
    splits, received = torch.tensor([2, 2, 2, 2], device="cuda"), torch.full((2, 2), 2, device="cuda")
    w, rows = torch.ones(2, 16, 12, device="cuda"), None if "dma" in schedule else 8

    def call(received: torch.Tensor) -> torch.Tensor:
        h = torch.ones(int(received.sum()), 16, device="cuda")
        return weft.matmul_all_to_all(h, w, received, splits, group=own, rows=rows, capacity=16, schedule=schedule)

    for _ in range(3):
        assert (call(received) == 16).all()
    wrong = received.clone()
    if group.rank() == 0:
        wrong[1] += torch.tensor([by, 0] if by else [1, -1], device="cuda")
    y = call(wrong)
    torch.cuda.synchronize()
    assert ((y == 16) | y.isnan()).all()
    time.sleep(1.0)
    found = error_of(lambda: call(received))
    dist.destroy_process_group(own)
    return y.isnan().all(1).tolist(), found


@pytest.mark.parametrize("by", [1, -2, 0])
@pytest.mark.parametrize("how", ["chunks=1,by=store", "chunks=2,by=kernel", "chunks=1,by=dma"])
def test_rows_of_a_rank_whose_table_differs_are_spoilt(pair: Pool, how: str, by: int) -> None:
    of_ranks = pair.run(spoilt, f"combine[{how}]", by, timeout_s=120)
    assert [rows for rows, _ in of_ranks] == [[False] * 8, [True] * 4 + [False] * 4]
    (kind, text), (own_kind, own_text) = (found for _, found in of_ranks)
    assert (kind, own_kind) == ("PoisonedGroupError", "DisagreementError")
    for said in (text, own_text):
        assert "rank 0 sent another number of rows than rank 1 expected" in said


def has_other_values(group: dist.ProcessGroup, name: str) -> tuple[str, str]:
    own = dist.new_group([0, 1])
    x, w = bf16(64, K), bf16(K, N)
    given = {
        "bias": torch.ones(N, device="cuda", dtype=x.dtype),
        "residual": torch.ones(64, N, device="cuda", dtype=x.dtype),
    }
    weft.matmul_all_reduce(x, w, own, **given)
    given[name] = given[name] + group.rank()
    found = error_of(lambda: weft.matmul_all_reduce(x, w, own, **given))
    given[name] = given[name] - group.rank()
    weft.matmul_all_reduce(x, w, own, **given)
    torch.cuda.synchronize()
    dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_values_that_must_be_equal_are_compared_on_demand(pair: Pool, name: str) -> None:
    assert_errors(
        pair.run(compared, has_other_values, name, timeout_s=60),
        "RefusedError",
        f"{name} must have the same values on all ranks",
    )


def test_two_threads_in_calls_of_one_group_are_refused(pair: Pool) -> None:
    for found in pair.run(across_ranks.called_by_two_threads, "cuda", False, timeout_s=60):
        assert_errors(found, "PoisonedGroupError", "during a call of another thread on the same group")
