"""Unfused calls of CPU ranks that native code replays: calls of a known size, and of sizes that never came before.

1. Results of new data with 2 to 4 ranks, one of which is late in each call.
2. Native code makes these calls: it enters none of the Python functions that replay other calls. Also collectives of several
   rounds, with the bits that the slow path gives.
3. Ranks that disagree, refuse a call, do not arrive, die, or are closed or interrupted during a wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.compile_at_once import at_once
from support.on_ranks import assert_errors, error_of, own_group
from support.slow import mostly
from test_replay import long_ways

import weft
from weft import symm
from weft.builders import MatmulAllGatherGradients, named
from weft.errors import DisagreementError, RefusedError
from weft.launch import Pool
from weft.operator import replay
from weft.operator.cache import PASSING
from weft.runtime.meeting import DATA_BYTES, meeting_of
from weft.runtime.unfused.serial import Unfused
from weft.runtime.unfused.turn import Turn, turn_on
from weft.symm import Exchange
from weft.symm.communicator import LOOK_S

K, N = 8, 6
HOW = ["known size", "new size"]


@contextlib.contextmanager
def native_only() -> Iterator[None]:
    """Raise an error if a call takes the slow path, or if Python replays it."""
    kinds = (replay.Replay, replay.AnyRows, replay.Passing)
    before = [kind.in_python for kind in kinds]

    def in_python(*_: Any) -> Any:
        raise AssertionError("Python replays the call")

    for kind in kinds:
        kind.in_python = in_python  # type: ignore[method-assign, assignment]
    try:
        with long_ways() as ways:
            yield
    finally:
        for kind, function in zip(kinds, before, strict=True):
            kind.in_python = function  # type: ignore[method-assign]
    assert not ways, "calls take the slow path"


def calls(group: dist.ProcessGroup, schedule: str | None) -> dict[str, Callable[..., torch.Tensor]]:
    """Return, by operator, a call with x [rows, K] and w [K, N]."""
    one: dict[str, Any] = {"schedule": schedule, "deadline_s": 20.0}
    return {
        "all_gather_matmul": lambda x, w: weft.all_gather_matmul(x, [w], 0, group, return_A=False, **one)[1][0],
        "matmul_reduce_scatter": lambda x, w: weft.matmul_reduce_scatter(x, w, "sum", 0, group, **one),
        "an average": lambda x, w: weft.matmul_reduce_scatter(x, w, "avg", 0, group, **one),
        "matmul_all_reduce": lambda x, w: weft.matmul_all_reduce(x, w, group, **one),
        "matmul_all_gather": lambda x, w: weft.matmul_all_gather(x, w, 0, group, **one),
    }


def expected(operator: str, xs: list[torch.Tensor], w: torch.Tensor, rank: int) -> torch.Tensor:
    products = torch.stack([x.double() @ w.double() for x in xs])
    if operator in ("all_gather_matmul", "matmul_all_gather"):
        return products.flatten(0, 1)
    total = products.sum(0)
    if operator == "matmul_all_reduce":
        return total
    part = total.chunk(len(xs))[rank]
    return part / len(xs) if operator == "an average" else part


def warmed_up(group: dist.ProcessGroup, operator: str, how: str) -> tuple[Callable[..., torch.Tensor], list[int]]:
    """Return a call of `operator` that is replayed, and the sizes with which to make further calls."""
    world = group.size()
    call = calls(group, "serial" if how == "known size" else None)[operator]
    if how == "known size":
        for _ in range(2):
            call(torch.randn(2 * world, K), torch.randn(K, N))
        return call, [2 * world] * 8
    for number in range(1, PASSING + 3):
        call(torch.randn(number * world, K), torch.randn(K, N))
    return call, [number * world for number in range(PASSING + 3, PASSING + 11)]


def replays(group: dist.ProcessGroup, operator: str, how: str) -> None:
    rank, world = group.rank(), group.size()
    call, sizes = warmed_up(own_group(group), operator, how)
    for number, rows in enumerate(sizes):
        generator = torch.Generator().manual_seed(rows + number)
        xs = [torch.randn(rows, K, generator=generator) for _ in range(world)]
        w = torch.randn(K, N, generator=generator)
        mine = xs[rank].clone()
        if rank == number % world:
            time.sleep((0.0, 0.002, 0.15)[number % 3])  # 0.15 s is longer than a wait in native code
        with native_only():
            found = call(mine, w)
        torch.testing.assert_close(found.double(), expected(operator, xs, w, rank), rtol=1e-4, atol=1e-4)
        assert torch.equal(mine, xs[rank]), "the call changes its input"


@pytest.mark.parametrize("ranks", mostly([2, 3, 4], 3))
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("operator", list(calls(None, None)))  # type: ignore[arg-type]
def test_results_of_replayed_calls(pool: Pool, operator: str, how: str, ranks: int) -> None:
    pool.run(replays, operator, how, ranks=ranks, timeout_s=120)


def in_rounds(group: dist.ProcessGroup, operator: str, dtype: torch.dtype) -> None:
    """Repeat a call whose collective takes several rounds. One rank is late, by more or less than a wait in native code."""
    own, rank, world, n = own_group(group), group.rank(), group.size(), 256
    call = calls(own, "serial")[operator]
    rows = world * (3 * DATA_BYTES // (world * dtype.itemsize * K) + 1)
    if operator != "all_gather_matmul":
        rows = world * (3 * DATA_BYTES // (world * dtype.itemsize * n) + 1)
    w, xs = (
        w_of(1, n).to(dtype),
        [torch.randn(rows, K, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)],
    )
    first = call(xs[rank].clone(), w)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(first.double(), expected(operator, xs, w, rank), rtol=tolerance, atol=tolerance)
    call(xs[rank], w)
    for number in range(4):
        if rank == number % world:
            time.sleep((0.0, 0.002, 0.15)[number % 3])
        with native_only():
            found = call(xs[rank].clone(), w)
        assert torch.equal(found, first)


@pytest.mark.parametrize("dtype", mostly([torch.float32, torch.bfloat16], torch.float32))
@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_calls_of_several_rounds(pool: Pool, operator: str, dtype: torch.dtype) -> None:
    pool.run(in_rounds, operator, dtype, ranks=3, timeout_s=120)


def dies_between_rounds(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """Kill rank 1 after the rendezvous of a collective of two rounds, for which its peers wait in native code."""
    own = own_group(group)
    call, x, w = calls(own, "serial")["matmul_all_reduce"], torch.randn(2 * DATA_BYTES // (4 * 256), K), w_of(1, 256)
    for _ in range(3):
        call(x, w)
    if group.rank() == 1:
        Exchange.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
        weft.matmul_all_reduce(x, w, own, schedule="serial", deadline_s=20.0, timeline=weft.Timeline())
    return [error_of(lambda: call(x, w)), error_of(lambda: call(x, w))]


def test_a_rank_that_dies_between_rounds_is_named(mortals: Pool) -> None:
    results = mortals.run(dies_between_rounds, return_exceptions=True, timeout_s=60)
    assert_errors((results[0][0], results[2][0]), "PeerLostError", "rank 1")
    assert_errors((results[0][1], results[2][1]), "PoisonedGroupError")


def closes_between_rounds(group: dist.ProcessGroup, is_native: bool) -> tuple[str, str]:
    """Close the communicator of rank 0 on another thread, while rank 0 waits in native code for the second of three rounds."""
    own = own_group(group)
    call, x, w = calls(own, "serial")["matmul_all_reduce"], torch.randn(3 * DATA_BYTES // (4 * 256), K), w_of(1, 256)
    in_python = partial(weft.matmul_all_reduce, x, w, own, schedule="serial", timeline=weft.Timeline())
    look_s = LOOK_S if group.rank() == 1 else 30.0  # rank 0 stays in native code until the close
    with mock.patch("weft.symm.exchange.LOOK_S", look_s), mock.patch("weft.operator.recorded.LOOK_S", look_s):
        for _ in range(3):
            call(x, w)
        comm, finish = symm.communicator(own, "cpu"), Exchange.finish
        exchange = meeting_of(comm).exchange
        assert exchange is not None
        assert exchange.native is not None
        native, second = exchange.native, exchange.native.epoch + 2

        def close() -> None:
            while native.epoch < second:
                time.sleep(0.001)
            exchange.close()  # as in `comm.close`, which however ends the wait in native code first
            comm.close()

        def late(*given: Any, **named: Any) -> None:
            dist.barrier(group)
            finish(*given, **named)

        if group.rank() == 1:
            with mock.patch.object(Exchange, "finish", late):
                return error_of(in_python)
        closing = threading.Thread(target=close)
        closing.start()
        found = error_of(partial(call, x, w) if is_native else in_python)
        closing.join()
        dist.barrier(group)
        return found


@pytest.mark.parametrize("is_native", [True, False])
def test_close_between_rounds(pool: Pool, is_native: bool) -> None:
    (kind, text), (of_peer, about) = pool.run(closes_between_rounds, is_native, ranks=2, timeout_s=60)
    assert (kind, "close() was called" in text) == ("ValueError", True), text
    assert (of_peer, "rank 0" in about) == ("PeerLostError", True), about


class _BetweenHosts(Turn):
    """A turn that takes the steps of ranks on several hosts without rails, which reduce in place."""

    shares_memory = False  # type: ignore[assignment]


def reduces_an_argument(group: dist.ProcessGroup, between_hosts: bool) -> None:
    """Run a serial schedule that reduces a tensor of the caller, the gradient of a result."""
    rank, world, m = group.rank(), group.size(), 4
    steps = Unfused(named(MatmulAllGatherGradients(world, m, N, K, "fp32", False), "serial").build(), rank)
    assert next(step.op for step in steps.schedule.of_rank(rank)[0].steps) == "reduce_scatter"  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(m * world, N, generator=generator) for _ in range(world)]
    xt, wt, mine = torch.randn(K, m), torch.randn(N, K, generator=generator), grads[rank].clone()
    turn = turn_on(group, torch.device("cpu"), "a test", 20.0)
    if between_hosts:
        turn.__class__ = _BetweenHosts
    found = steps.run({"g": mine, "xt": xt, "wt": wt}, turn, group)
    assert torch.equal(mine, grads[rank]), "the call changes its argument"
    wanted = torch.stack(grads).double().sum(0).chunk(world)[rank] @ wt.double()
    torch.testing.assert_close(found["grad_x"].double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("between_hosts", [False, True])
def test_a_reduction_keeps_its_argument(pool: Pool, between_hosts: bool) -> None:
    pool.run(reduces_an_argument, between_hosts, ranks=2, timeout_s=60)


def differs(group: dist.ProcessGroup, how: str) -> str:
    own = own_group(group)
    call, sizes = warmed_up(own, "matmul_reduce_scatter", how)
    other = calls(own, "serial")["matmul_all_reduce"]
    x, w = torch.randn(sizes[0], K), torch.randn(K, N)
    kind, text = error_of(lambda: (other if group.rank() == 1 else call)(x, w))
    assert kind == "DisagreementError"
    assert error_of(lambda: call(x, w))[0] == "PoisonedGroupError"
    return text


@pytest.mark.parametrize("how", HOW)
def test_ranks_that_disagree_name_their_calls(pool: Pool, how: str) -> None:
    for text in pool.run(differs, how, ranks=3, timeout_s=60):
        assert "rank 1: " in text
        assert "matmul_reduce_scatter" in text
        assert "matmul_all_reduce" in text


@at_once
def refuses(group: dist.ProcessGroup, how: str) -> None:
    """Let rank 1 refuse calls in which its peers are already waiting. All ranks must count alike afterwards."""
    own, world = own_group(group), group.size()
    call, sizes = warmed_up(own, "matmul_reduce_scatter", how)
    w = torch.randn(K, N)
    for _ in range(2):
        bad = torch.randn(K + 1, N) if group.rank() == 1 else w
        with pytest.raises(RefusedError, match=r"rank 1: .*9"):
            call(torch.randn(sizes[0], K), bad)
    for rows in [sizes[0], sizes[0], sizes[1], sizes[0]]:
        xs = [torch.randn(rows, K, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
        try:
            found = call(xs[group.rank()], w_of(rows))
        except DisagreementError as error:
            raise AssertionError("ranks count differently") from error
        wanted = expected("matmul_reduce_scatter", xs, w_of(rows), group.rank())
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def w_of(rows: int, columns: int = N) -> torch.Tensor:
    return torch.randn(K, columns, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("how", HOW)
def test_a_refusal_leaves_the_group_usable(pool: Pool, how: str) -> None:
    pool.run(refuses, how, ranks=2, timeout_s=60)


def without_rank_1(group: dist.ProcessGroup, how: str) -> list[tuple[str, str]]:
    """Kill rank 1 while the others wait for it in native code. Return the errors of two calls."""
    call, sizes = warmed_up(own_group(group), "matmul_all_reduce", how)
    x, w = torch.randn(sizes[0], K), torch.randn(K, N)
    if group.rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return [error_of(lambda: call(x, w)), error_of(lambda: call(x, w))]


def _serial(how: str) -> str | None:
    return "serial" if how == "known size" else None


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_dies_is_named(mortals: Pool, how: str) -> None:
    results = mortals.run(without_rank_1, how, return_exceptions=True, timeout_s=60)
    assert_errors((results[0][0], results[2][0]), "PeerLostError", "rank 1")
    assert_errors((results[0][1], results[2][1]), "PoisonedGroupError")


def interrupted(group: dist.ProcessGroup, how: str) -> list[tuple[str, str]]:
    """Interrupt rank 0 with Ctrl-C while it waits for rank 1 in native code."""
    call, sizes = warmed_up(own_group(group), "matmul_all_reduce", how)
    x, w = torch.randn(sizes[0], K), torch.randn(K, N)
    if group.rank() == 1:
        time.sleep(1.0)
        return [error_of(lambda: call(x, w))]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call(x, w)
    return [error_of(lambda: call(x, w))]


@pytest.mark.parametrize("how", HOW)
def test_ctrl_c_during_a_wait_ends_the_group(how: str) -> None:
    with Pool(2) as pool:
        for ((kind, text),) in pool.run(interrupted, how, timeout_s=60):
            assert kind == "PoisonedGroupError"
            assert "rank 0: " in text


def late(group: dist.ProcessGroup, how: str) -> tuple[str, str]:
    """Make no call on rank 1. Return the error of the others, whose calls have a deadline of 3 s. Set-up has it too."""
    own = own_group(group)
    x, w, world = torch.randn(1, K), torch.randn(K, N), group.size()

    def call(rows: int) -> torch.Tensor:
        return weft.matmul_all_reduce(x.expand(rows, K).contiguous(), w, own, schedule=_serial(how), deadline_s=3.0)

    for rows in range(1, PASSING + 3) if how == "new size" else (world, world):
        dist.barrier(group)
        call(rows)
    if group.rank() == 1:
        time.sleep(5.0)
        return error_of(lambda: call(1))
    began = time.monotonic()
    with native_only():
        found = error_of(lambda: call(100 if how == "new size" else world))
    assert time.monotonic() - began > 2.9
    return found


@pytest.mark.parametrize("how", HOW)
def test_a_missing_rank_ends_the_wait_at_the_deadline(how: str) -> None:
    with Pool(3) as pool:
        first, second, third = pool.run(late, how, timeout_s=60)
    assert second[0] == "PoisonedGroupError"
    kinds = {kind for kind, _ in (first, third)}
    assert "DeadlineError" in kinds
    assert kinds <= {"DeadlineError", "PoisonedGroupError"}  # the first rank poisons the group for the other
    for _, text in (first, third):
        assert "waited 3 s for " in text
        assert "from rank 1" in text
        assert "matmul_all_reduce" in text
