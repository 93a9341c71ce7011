"""Tests of weft.matmul_all_to_all only, on CPU processes: gradients by all_to_all_matmul, a dispatch followed by a
combine, a single expert, and tables that are wrong or known from the dispatch. `test_operators.py` and
`test_operators_of_experts.py` have the other tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import matmul_all_to_all_ranks as ranks
from support.matmul_all_to_all_reference import inputs, received_of, segments
from support.on_ranks import applicable, close, device, own_group, told
from support.operators.cases import STORE
from support.operators.experts import Experts, MatmulAllToAllCall
from support.operators.suite import right_gradients
from support.slow import slow

import weft
from weft import symm
from weft.builders import MatmulAllToAll
from weft.launch import Pool
from weft.runtime.cpu.schedule import CpuSchedule


def own_segments(group: dist.ProcessGroup) -> None:
    """Check with torch.distributed only that the expected result agrees with the docstring of the operator."""
    call = MatmulAllToAllCall(Experts(3, k=8, n=4), group, 5)
    rank, world, (h, w) = call.rank, call.world, call.mine
    parts = segments(rank, call.splits, h)
    sent = [torch.cat([parts[source, rank * 3 + e] @ w[e] for e in range(3)]).contiguous() for source in range(world)]
    came = torch.empty(sum(call.splits[rank]), 4)
    by_rank = call.splits_here.view(world, 3).sum(1).tolist()
    dist.all_to_all_single(came, torch.cat(sent), by_rank, [len(rows) for rows in sent], group=group)
    (exact,), (usual,) = call.expected(group)
    close(came, exact, usual)


def test_what_is_expected_is_what_the_library_makes(pool: Pool) -> None:
    pool.run(own_segments, ranks=3, timeout_s=60)


@pytest.mark.parametrize("schedule", [None, "serial", STORE], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_gemm_before_an_all_to_all(pool: Pool, world: int, schedule: str | None) -> None:
    pool.run(ranks.dense, schedule, ranks=world, timeout_s=60)


@pytest.mark.parametrize("world", [1, slow(2), 3, slow(4)])
def test_rows_travel_once_backward_and_the_order_of_sums_is_one(pool: Pool, world: int) -> None:
    duals = ["serial", "dispatch[by=kernel,rest=each]", "dispatch_by_expert[by=kernel,chunks=2]"]
    by_dual = [
        pool.run(ranks.gradients_by_dual, dual, ranks=world, timeout_s=60) for dual in duals[: 3 if world > 1 else 1]
    ]
    for of_rank in zip(*by_dual, strict=True):
        for grads in zip(*of_rank, strict=True):
            assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
def test_compiled_gradients_by_the_dual(pool: Pool, wanted: tuple[bool, bool]) -> None:
    dual = "dispatch[by=kernel,rest=each]"
    pool.run(ranks.compiled_by_dual, dual, wanted, ranks=2, timeout_s=120)


def gradients_weigh_steps(group: dist.ProcessGroup) -> None:
    """Check gradients in fp32 by large steps, because small steps would be lost in rounding. The product is linear in h
    and in w, so the gradient predicts the change for a step of any size.
    """
    call = MatmulAllToAllCall(Experts(k=4, n=3), group, 7)
    h, w = (t.clone().requires_grad_() for t in call.mine)
    by = right_gradients(call)[0][0]
    (call(group, h, w)[0] * by).sum().backward()
    for changed, other in ((h, w), (w, h)):
        step = torch.randn_like(changed)
        with torch.no_grad():
            (moved,) = call(group, *((step, other) if changed is h else (other, step)))
        both = torch.stack(((moved * by).sum(), (step * changed.grad).sum()))
        dist.all_reduce(both, group=group)
        torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-3)


def test_gradients_weigh_small_steps(pool: Pool) -> None:
    pool.run(gradients_weigh_steps, ranks=3, timeout_s=60)


@pytest.mark.parametrize(
    "schedules",
    [(None, None), ("serial", "serial"), ("dispatch[by=dma,rest=each]", STORE)],
    ids=["chosen", "serial", "pinned"],
)
def test_there_and_back(pool: Pool, schedules: tuple[str | None, str | None]) -> None:
    pool.run(ranks.round_trip, schedules, ranks=2, timeout_s=60)


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("schedule", ["serial", "dispatch[by=kernel,rest=each]", None])
def test_what_the_dispatch_has_brought_to_the_host_is_known(
    pool: Pool, schedule: str | None, with_gradients: bool
) -> None:
    for known in pool.run(ranks.sizes_are_known, schedule, with_gradients, ranks=2, timeout_s=60):
        assert known == {
            "the same": True, "a copy": False, "other splits": False, "changed": False, "splits changed": False
        }  # fmt: skip


def other_tables(group: dist.ProcessGroup) -> None:
    """Run every schedule on two ranks. Let rank 1 attribute a row of rank 0 to another expert. All totals stay equal."""
    p = MatmulAllToAll(2, 2, (12, 12), 7, 5, "fp32", most=12)
    rank, splits = group.rank(), ((3, 3, 3, 3),) * 2
    h, weights = inputs(splits, p.k, p.n, p.dtype, 0)
    received, own = received_of(rank, splits), torch.tensor(splits[rank]).view(2, 2)
    for candidate in applicable(p):
        if candidate.name == "serial":
            continue
        with CpuSchedule(candidate.build(), symm.communicator(group, "cpu")) as executor:
            for moved in (0, 1, 0):
                y, told = torch.zeros(12, p.n), received.clone()
                told[0] += moved * rank * torch.tensor([1, -1])
                w = weights.split(2)[rank].flatten(0, 1)
                executor.run({"h": h[rank], "received": told, "splits": own, "w": w, "y": y})
                spoilt = y.isnan()
                assert not spoilt[:6].any(), candidate.name
                assert spoilt[6:].all() if moved and rank == 0 else not spoilt[6:].any(), candidate.name


def test_rows_of_a_rank_whose_table_differs_are_spoilt(pool: Pool) -> None:
    pool.run(other_tables, ranks=2)


def call(
    group: dist.ProcessGroup, *, rows: int = 4, k: int = 8, n: int = 3, experts: int = 2, tell: bool = False, **options: Any
) -> torch.Tensor:  # fmt: skip
    """Combine `rows` tokens of each rank, all for the first expert of all ranks. Operands are ones."""
    world, first = group.size(), group.rank() == 0
    splits = torch.zeros(world * experts, dtype=torch.int64, device=device())
    splits[0] = rows
    received = torch.zeros(world, experts, dtype=torch.int64, device=device())
    received[:, 0] = rows * first
    h, w = torch.ones(rows * world * first, k, device=device()), torch.ones(experts, k, n, device=device())
    return weft.matmul_all_to_all(h, w, received, splits, group=group, rows=rows if tell else None, **options)


def wrong_values(group: dist.ProcessGroup, schedule: str) -> dict[str, str]:
    """Pass wrong tables on rank 1, in a first call and later. Every rank gets the error, and the group stays usable."""
    found, world, bad = {}, group.size(), group.rank() == 1
    h, w = torch.ones(2 * world, 8), torch.ones(2, 8, 3)
    received, splits = torch.tensor([[2, 0]] * world), torch.tensor([2, 0] * world)
    for when in ("first", "later"):
        for name, (row, column, number, at, given) in {
            "too many": (0, 1, 1, 0, 2), "negative": (0, 1, -1, 0, 2), "given": (0, 1, 0, 0, -2), "own": (1, 0, 1, 0, 2),
        }.items():  # fmt: skip
            wrong_received, wrong_splits = received.clone(), splits.clone()
            if bad:
                wrong_received[row, column], wrong_splits[at] = number, given
            found[f"{name}, {when}"] = told(
                lambda received=wrong_received, splits=wrong_splits: weft.matmul_all_to_all(
                    h, w, received, splits, group=group, schedule=schedule
                )
            )
        found[f"rows, {when}"] = told(
            lambda: weft.matmul_all_to_all(h, w, received, splits, group=group, schedule=schedule, rows=2 * world + bad)
        )
        call(group, schedule=schedule)
    call(group, rows=64, schedule=schedule)
    found["capacity"] = told(lambda: call(group, rows=65, schedule=schedule))
    assert call(group, rows=65, schedule=schedule, capacity=65).sum() == 65 * 8 * 3
    return found


@pytest.mark.parametrize("schedule", ["serial", STORE])
def test_tables_that_one_rank_gets_wrong_are_named_on_every_rank(pool: Pool, schedule: str) -> None:
    for found in pool.run(wrong_values, schedule, ranks=3, timeout_s=60):
        for when in ("first", "later"):
            for name, text in {
                "too many": "rank 1: received adds up to 7 but h has 6 rows: pass the counts from all_to_all_matmul",
                "negative": "rank 1: received[0, 1]=-1: pass numbers of tokens, 0 or more",
                "given": "rank 1: splits[0]=-2: pass numbers of tokens, 0 or more",
                "own": "rank 1: received says that rank 1 keeps [1, 0] rows of its own, but splits says [2, 0]",
                "rows": "rank 1: rows=7, but splits add up to 6: pass this rank's number of tokens",
            }.items():
                assert found[f"{name}, {when}"].startswith(f"RefusedError: {text}"), (name, found[f"{name}, {when}"])
        if schedule == "serial":  # the CPU reads the sizes, and allocates memory for the arriving rows
            assert found["capacity"] == "nothing"
        else:
            assert found["capacity"].startswith(
                "RefusedError: ranks 0, 1, 2: this rank has 65 tokens, but calls of this shape were set up for capacity=64"
            )


def refused_first(group: dist.ProcessGroup, schedule: str | None, tell: bool) -> tuple[str, str]:
    """Let rank 1 send fewer rows than rank 0 expects in the first call of a shape. Return the error, and the error of a larger
    call.
    """
    own, world = own_group(group), group.size()
    splits, received = torch.tensor([2, 0] * world), torch.tensor([[2, 0]] * world)
    if group.rank() == 1:
        received[0, 0] = 1
    h, w = torch.ones(int(received.sum()), 8), torch.ones(2, 8, 3)
    rows = 2 * world if tell else None
    error = told(lambda: weft.matmul_all_to_all(h, w, received, splits, group=own, schedule=schedule, rows=rows))

    def larger() -> None:
        assert call(own, rows=300, schedule=schedule, tell=tell).sum() == 300 * 8 * 3

    return error, told(larger)


@pytest.mark.parametrize("tell", [False, True])
@pytest.mark.parametrize("schedule", [None, "serial", STORE])
def test_the_size_of_a_refused_first_call_does_not_limit_later_calls(
    pool: Pool, schedule: str | None, tell: bool
) -> None:
    for error, larger in pool.run(refused_first, schedule, tell, ranks=2, timeout_s=60):
        assert error.startswith("RefusedError")
        assert "rank 1 sends 1 row (1, 0 by expert) to rank 0, which expects 2 rows" in error
        assert larger == "nothing"


def overwritten(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Dispatch, and overwrite the sizes by collectives, which do not change the tensors' version counters. Return the rank
    that each row of a combine comes from, and the rank that it should come from. The totals of all ranks stay equal.
    """
    rank, w = group.rank(), torch.ones(1, 4, 1)
    splits = torch.tensor([[3, 3], [2, 4]][rank])
    _, received = weft.all_to_all_matmul(torch.ones(6, 4), w, splits, group=group, return_received=True, capacity=16)
    now = torch.tensor([[4, 2], [1, 5]])
    dist.scatter(splits, list(now) if rank == 0 else None, src=0, group=group)
    dist.all_to_all_single(received.view(-1), splits, group=group)
    h = torch.full((int(received.sum()), 4), rank / 4)
    y = weft.matmul_all_to_all(h, w, received, splits, group=group, capacity=16, schedule="serial")
    return y.flatten().int().tolist(), torch.arange(2).repeat_interleave(now[rank]).tolist()


def test_sizes_that_collectives_overwrite_are_read_again(pool: Pool) -> None:
    for senders, right in pool.run(overwritten, ranks=2):
        assert senders == right


def gradients_of_trip(group: dist.ProcessGroup, trains: bool, overwrites: bool) -> list[torch.Tensor]:
    """Dispatch and combine with 2 experts on each rank. Return the gradients of tokens and, if `trains`, of weights.

    overwrites: True to change `received` before backward, in a way that its version counter does not show.
    """
    generator = torch.Generator().manual_seed(group.rank())
    counts = torch.tensor([[[3, 1], [2, 0]], [[1, 4], [5, 2]]])  # [source, target, expert]
    splits, w = counts[group.rank()].flatten(), torch.randn(2, 4, 4, generator=generator).requires_grad_(trains)
    x = torch.randn(int(splits.sum()), 4, generator=generator).requires_grad_()
    h, received = weft.all_to_all_matmul(
        x, w, splits, group=group, return_received=True, capacity=16, schedule="serial"
    )
    y = weft.matmul_all_to_all(h, w, received, splits, group=group, capacity=16, schedule="serial")
    if overwrites:
        received.numpy()[:] = received.flip(1).numpy()
    y.backward(torch.randn(y.shape, generator=generator))
    return [tensor.grad for tensor in (x, w) if tensor.grad is not None]


@pytest.mark.parametrize("trains", [True, False], ids=["all gradients", "only those of tokens"])
def test_sizes_that_are_overwritten_before_backward_do_not_change_gradients(pool: Pool, trains: bool) -> None:
    usual, overwritten = (pool.run(gradients_of_trip, trains, one, ranks=2) for one in (False, True))
    for one, other in zip(usual, overwritten, strict=True):
        assert len(one) == len(other) == 1 + trains
        assert all(map(torch.equal, one, other))
