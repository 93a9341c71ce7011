"""Tests of both gradients of weft.matmul_all_gather as one schedule, on CPU processes: every schedule on poisoned
memory with late ranks, backward by the operator, layouts, empty sizes.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from schedule_cpu_ranks import comm_of, poison
from support import matmul_all_gather_gradients_ranks as ranks
from support.on_ranks import BF16, F16, F32, applicable, late, told
from support.operators import suite
from support.operators.gemms import Gemm, MatmulAllGatherGradientsCall
from support.slow import in_turn, slow

from weft.launch import Pool
from weft.runtime.cpu.schedule import CpuSchedule

DIRECT, COLUMNS = "direct[chunks=2]", "direct[chunks=4,last=columns]"
NAME = "matmul_all_gather_gradients"
each_dim = pytest.mark.parametrize("dim", [0, -1])


def on_poisoned_memory(
    group: dist.ProcessGroup, m: int, n: int, k: int, columns: bool, dtype: torch.dtype
) -> list[str]:
    """Run each overlapped schedule repeatedly with new data, with poisoned memory and results. Compare after all runs.

    The first rank is late for the second run, and the last rank for the third. The last run repeats the first, and must
    give the same bits.
    """
    rank, world, names = group.rank(), group.size(), []
    case = Gemm((m, k), n, dtype, -1 if columns else 0)
    made = [MatmulAllGatherGradientsCall(case, group, seed) for seed in range(4)]
    for candidate in applicable(made[0].problem()):
        if candidate.name == "serial":
            continue
        executor = CpuSchedule(candidate.build(), comm_of(group))
        poison(executor)
        found = []
        for number in (0, 1, 2, 3, 0):
            if (number, rank) in ((1, 0), (2, world - 1)):
                late(0.01)
            x, w, g = made[number].mine
            call = made[number].spec.form(x, g, w, columns)
            results = {name: t.fill_(torch.nan) for name, t in made[number].spec.outputs(call, world).items()}
            executor.run({**made[number].spec.inputs(None, call), **results})
            found.append(list(results.values()))
        for call, gradients in zip(made, found, strict=False):
            call.check(group, gradients)
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True)), candidate.name
        executor.close()
        names.append(candidate.name)
    return names


SOME = [(2, F32, False), (3, F16, True)]
MORE = (2, BF16, True), (3, F32, False), (4, F32, True), (8, BF16, False)


@pytest.mark.parametrize(("world", "dtype", "columns"), [*SOME, *(slow(*one) for one in MORE)], ids=str)
def test_every_schedule_on_poisoned_memory(pool: Pool, world: int, dtype: torch.dtype, columns: bool) -> None:
    (names, *_) = pool.run(on_poisoned_memory, 75, 38, 40, columns, dtype, ranks=world, timeout_s=100)
    assert len(names) == 8


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 5, 3), (9, 1, 4), (8, 600, 16)], ids=str)
def test_small_sizes(pool: Pool, sizes: tuple[int, int, int]) -> None:
    for columns in (False, True):
        names = pool.run(on_poisoned_memory, *sizes, columns, F32, ranks=3, timeout_s=60)[0]
        assert names[0] == "direct[chunks=1]"


@each_dim
@pytest.mark.parametrize("world", [2, 3])
def test_every_schedule_by_the_operator(pool: Pool, world: int, dim: int) -> None:
    case = Gemm((33, 24), 20, dim=dim)
    assert len(pool.run(suite.every_schedule, NAME, case, 0.01, ranks=world, timeout_s=100)[0]) == 9


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
