"""Tests of weft.matmul_all_reduce only, on CPU processes: norms of tiny shapes, gradients of one of two results, sums
that overflow, shapes that a pinned schedule does not support. `test_operators.py` has the other tests.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.matmul_all_reduce_ranks import normed_alike
from support.on_ranks import data, told
from support.operators import suite
from support.operators.gemms import Following, Gemm, MatmulAllReduceCall
from torch.distributed.nn.functional import all_reduce

import weft
from weft.launch import Pool
from weft.runtime.unfused import STRAIGHT, collectives


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("weighed", "wanted"),
    [
        ("norm", (True, False, False, True, True)),
        ("sum", (False, True, True, False, True)),
        ("norm", (False, False, False, False, True)),
    ],
)
def test_gradients_of_one_of_two_results(pool: Pool, weighed: str, wanted: tuple[bool, ...], compiled: bool) -> None:
    case = Following((6, 8), 5, bias=True, residual=True, eps=0.1)
    given = case, wanted, compiled, None, (4,), [("norm", "sum").index(weighed)]
    pool.run(suite.gradients, "matmul_all_reduce", *given, ranks=2, timeout_s=120)


def without_eps(group: dist.ProcessGroup) -> str:
    """Return the error of the operator in torch.ops."""
    x, w, norm = torch.ones(5, 8), torch.ones(8, 3), torch.ones(1, 3)
    call = torch.ops.weft.matmul_all_reduce
    return told(lambda: call(x, w, None, None, norm, None, False, None, group.group_name, "", 0.0))


def test_a_norm_without_eps_is_refused_below_the_public_function_too(pool: Pool) -> None:
    for error in pool.run(without_eps, ranks=2):
        assert "eps=None with norm given" in error


def pinned_for_nothing(group: dist.ProcessGroup) -> dict[str, str]:
    """Return this rank's errors for schedules that do not support a shape. Check that the advised argument works."""
    name, found = "two_shot[chunks=2,by=dma,add=gemm]", {}
    for what, (m, k, n) in {"no rows": (0, 8, 3), "no K": (4, 0, 3), "no N": (4, 8, 0), "few rows": (2, 8, 3)}.items():
        x, w = torch.ones(m, k), torch.ones(k, n)
        found[what] = told(lambda x=x, w=w: weft.matmul_all_reduce(x, w, group, schedule=name))
        with weft.plan.use(name):
            assert told(lambda x=x, w=w: weft.matmul_all_reduce(x, w, group)) == found[what]
            assert weft.matmul_all_reduce(x, w, group, schedule="serial").shape == (m, n)
        assert weft.matmul_all_reduce(x, w, group).shape == (m, n)
    return found


def test_a_pinned_schedule_that_cannot_do_a_shape_is_named_with_what_to_pass(pool: Pool) -> None:
    for found in pool.run(pinned_for_nothing, ranks=2, timeout_s=60):
        for what, shape, why in (
            (
                "no rows",
                "[0, 8] @ [8, 3]",
                "a size is 0, so there is nothing to multiply",
            ),
            (
                "no K",
                "[4, 0] @ [0, 3]",
                "a size is 0, so there is nothing to multiply",
            ),
            (
                "no N",
                "[4, 8] @ [8, 0]",
                "a size is 0, so there is nothing to multiply",
            ),
            (
                "few rows",
                "[2, 8] @ [8, 3]",
                "rows of a rank's part (1) cannot be cut into 2 pieces: a piece would be empty",
            ),
        ):
            assert found[what] == (
                "RefusedError: ranks 0, 1: schedule 'two_shot[chunks=2,by=dma,add=gemm]' does not support "
                f"matmul_all_reduce of {shape} on each of 2 ranks, reduced, the whole sum to each rank, fp32: {why}. Pass "
                'schedule="serial", or do not pin a schedule'
            )


@pytest.mark.slow
def test_norms_of_little_compiled_and_of_scattered_weights(pool: Pool) -> None:
    pool.run(normed_alike, ranks=2, timeout_s=120)


def as_torch_has_it(group: dist.ProcessGroup) -> None:
    """Compare gradients with those of torch's differentiable all-reduce."""
    given, found = MatmulAllReduceCall(Gemm((6, 8), 5), group, 3), []
    weight = data(group.rank(), (6, 5), torch.float32, 71)
    for call in (
        lambda x, w: weft.matmul_all_reduce(x, w, group),
        lambda x, w: all_reduce(x @ w, group=group),
    ):
        x, w = (t.clone().requires_grad_() for t in given.mine)
        (call(x, w) * weight).sum().backward()
        found.append((x.grad, w.grad))
    for mine, usual in zip(*found, strict=True):
        torch.testing.assert_close(mine, usual)


def test_gradients_are_those_of_torchs_all_reduce(pool: Pool) -> None:
    pool.run(as_torch_has_it, ranks=3, timeout_s=60)


def overflow(group: dist.ProcessGroup, schedule: str | None) -> tuple[float, float]:
    """Return the largest sum and mean of fp16 products. Each product fits into fp16, but the sum of two overflows. A
    mean computed from that sum would overflow too.
    """
    x, w = torch.full((4, 1), 200.0, dtype=torch.float16), torch.full((1, 4), 200.0, dtype=torch.float16)
    found = [weft.matmul_all_reduce(x, w, group, reduce_op=op, schedule=schedule) for op in ("sum", "avg")]
    return found[0].max().item(), found[1].max().item()


@pytest.mark.parametrize("schedule", ["serial", "one_shot[by=load]", "two_shot[chunks=1,by=dma,add=gemm]"])
def test_sums_beyond_fp16_are_infinite_and_means_of_them_too(pool: Pool, schedule: str) -> None:
    for found in pool.run(overflow, schedule, ranks=2, timeout_s=60):
        assert found == (torch.inf, torch.inf)


def librarys_sum(group: dist.ProcessGroup) -> None:
    """Check that the tensor to be summed, which may be torch's gradient, is not changed."""
    x = torch.ones(3, 4)
    y = collectives.all_reduce(x, [3] * group.size(), group.rank(), group, STRAIGHT, "all_reduce")
    assert torch.equal(x, torch.ones(3, 4))
    assert torch.equal(y, group.size() * x)


def test_the_librarys_sum_leaves_what_it_adds_up(pool: Pool) -> None:
    pool.run(librarys_sum, ranks=2, timeout_s=60)
