"""Tests of both gradients of weft.matmul_all_gather as one schedule, on CPU processes: every schedule on poisoned
memory with late ranks, backward by the operator, layouts, empty sizes.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support import matmul_all_gather_gradients_ranks as ranks
from support.on_ranks import BF16, F16, told
from support.operators import suite
from support.operators.gemms import Gemm, MatmulAllGatherGradientsCall
from support.slow import in_turn, slow

from weft.launch import Pool

DIRECT, COLUMNS = "direct[chunks=2]", "direct[chunks=4,last=columns]"
NAME = "matmul_all_gather_gradients"
each_dim = pytest.mark.parametrize("dim", [0, -1])


SIZES = (75, 40), 38
EVERY = [(2, Gemm(*SIZES, F16, -1)), (3, Gemm(*SIZES)), slow(2, Gemm(*SIZES, BF16)), slow(3, Gemm(*SIZES, dim=-1)),
         slow(4, Gemm(*SIZES, dim=-1)), slow(8, Gemm(*SIZES))]  # fmt: skip


@pytest.mark.parametrize(("world", "case"), EVERY, ids=str)
def test_every_schedule(pool: Pool, world: int, case: Gemm) -> None:
    assert len(pool.run(suite.every_schedule, NAME, case, 0.01, ranks=world, timeout_s=100)[0]) == 9


@each_dim
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 5, 3), (9, 1, 4), (8, 600, 16)])
def test_every_schedule_of_small_sizes(pool: Pool, m: int, n: int, k: int, dim: int) -> None:
    names = pool.run(suite.every_schedule, NAME, Gemm((m, k), n, dim=dim), 0.0, ranks=3, timeout_s=60)[0]
    assert names[:2] == ["serial", "direct[chunks=1]"]


@each_dim
@pytest.mark.parametrize(("wanted", "called"), [((True, True), {NAME}), ((True, False), set()), ((False, True), set())])
def test_backward_takes_it_where_both_are_wanted(
    pool: Pool, dim: int, wanted: tuple[bool, bool], called: set[str]
) -> None:
    for world in (2, 3):
        assert pool.run(ranks.called_by_backward, dim, wanted, ranks=world, timeout_s=60) == [(called, True)] * world


def test_backward_of_one_rank_goes_the_plain_way(pool: Pool) -> None:
    assert pool.run(ranks.called_by_backward, 0, (True, True), ranks=1) == [(set(), True)]


SHAPES = ((12, 16), 0), ((12, 16), -1), ((2, 5, 16), 1), ((2, 5, 16), 2)


@pytest.mark.parametrize(
    ("shape", "dim", "compiled"),
    [*((*one, False) for one in SHAPES), (*SHAPES[0], True), *(slow(*one, True) for one in SHAPES[1:])],
)
def test_gradients(pool: Pool, shape: tuple[int, ...], dim: int, compiled: bool) -> None:
    for schedule in (DIRECT, COLUMNS):
        pool.run(ranks.backward, schedule, Gemm(shape, 5, dim=dim), compiled, ranks=3, timeout_s=120)


@pytest.mark.parametrize("schedule", [DIRECT, "direct[chunks=2,last=columns]"])
def test_gradients_are_what_differences_say(pool: Pool, schedule: str) -> None:
    assert pool.run(ranks.gradcheck, schedule, ranks=2, timeout_s=120) == ["", ""]


@pytest.mark.parametrize("schedule", [None, DIRECT, COLUMNS])
@each_dim
def test_many_sizes_in_a_row(pool: Pool, dim: int, schedule: str | None) -> None:
    pool.run(suite.many_sizes, NAME, Gemm(dim=dim, schedule=schedule), ranks=2, timeout_s=60)


@pytest.mark.parametrize("schedule", ["serial", DIRECT, COLUMNS])
def test_operands_may_lie_otherwise_and_the_gradient_of_a_weight_lies_as_it(pool: Pool, schedule: str) -> None:
    """weft must not warn of the layout of a gradient that autograd has made."""
    assert pool.run(ranks.layouts, schedule, ranks=3, timeout_s=60) == [[]] * 3


@pytest.mark.parametrize(("sizes", "world"), in_turn([(0, 4, 3), (5, 0, 3), (5, 4, 0), (0, 0, 0)], [3, 2, 1]), ids=str)
def test_sizes_of_nothing(pool: Pool, world: int, sizes: tuple[int, int, int]) -> None:
    pool.run(ranks.empty, *sizes, ranks=world, timeout_s=60)


def test_one_rank_that_differs_is_named_on_every_rank() -> None:
    with Pool(3) as alone:
        alone.run(suite.one_rank_differs, NAME, Gemm((9, 6), 3, schedule=DIRECT), timeout_s=60)


def bad_gradient(group: dist.ProcessGroup) -> str:
    """Return the error for a gradient of the result with a wrong number of rows."""
    call = MatmulAllGatherGradientsCall(Gemm((8, 3), 6, schedule=DIRECT), group, 1)
    x, w, g = call.mine
    return told(lambda: call(group, x, w, g[1:]))


def test_a_gradient_of_other_products_is_refused(pool: Pool) -> None:
    for error in pool.run(bad_gradient, ranks=2):
        assert "the gradient has shape (15, 6) and dtype torch.float32, but" in error
