"""Test weft.matmul_all_to_all on two GPUs: every schedule, alone and in the operator, CUDA graphs, and gradients.

Most functions are shared with the CPU tests.
"""

from __future__ import annotations

from collections.abc import Callable

import gpu_all_to_all_matmul_ranks as dispatch_ranks
import gpu_matmul_all_to_all_ranks as returning_ranks
import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from support import expert_module_ranks
from support import matmul_all_to_all_ranks as ranks
from support.all_to_all_matmul_ranks import tokens_gradient_alone
from support.graphs import capture
from support.on_ranks import BF16, told
from support.operators import suite
from support.operators.experts import Experts, MatmulAllToAllCall

import weft
from weft.builders import AllToAllMatmul, MatmulAllToAll
from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
DMA, KERNEL, STORE = (f"combine[chunks=1,by={by}]" for by in ("dma", "kernel", "store"))
BY_EXPERT, IN_ONE_LANE = (f"combine_by_expert[chunks={chunks},by=kernel]" for chunks in (2, 1))


def problem(
    rows: tuple[int, int], experts: int, n: int, k: int, dtype: str = "bf16", exact: bool = True
) -> MatmulAllToAll:
    return MatmulAllToAll(2, experts, rows, n, k, dtype, most=max(rows), exact=exact)


CASES = {
    "bf16": (problem((512, 512), 4, 256, 192), False),
    "bf16, weights transposed": (problem((512, 384), 4, 256, 192), True),
    "bf16, told": (problem((300, 512), 4, 256, 192, exact=False), True),
    "bf16, large": (problem((2048, 2048), 4, 512, 512), False),
    "fp32, odd sizes": (problem((37, 61), 3, 19, 43, "fp32"), False),
    "fp16, odd sizes, told": (problem((137, 61), 3, 33, 40, "fp16", exact=False), True),
    "a rank without tokens": (problem((0, 64), 2, 64, 64), False),
    "one expert": (problem((256, 256), 1, 128, 64), False),
    "one expert, told": (problem((300, 512), 1, 256, 192, exact=False), True),
    "one expert, fp32, odd sizes": (problem((37, 61), 1, 19, 43, "fp32"), False),
    "one expert, a rank without tokens": (problem((0, 64), 1, 64, 64, "fp16"), False),
    "many experts": (problem((1000, 1024), 128, 64, 128), False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_right(pair: Pool, name: str) -> None:
    p, transposed = CASES[name]
    counts = pair.run(returning_ranks.every_candidate, p, transposed, timeout_s=120)
    assert min(counts) >= (3 if p.exact and p.experts > 1 else 2)


@pytest.mark.parametrize(
    ("name", "experts"), [(KERNEL, 4), (STORE, 4), (BY_EXPERT, 4), (IN_ONE_LANE, 4), (IN_ONE_LANE, 1)]
)
def test_a_graph_is_replayed_with_other_sizes(pair: Pool, name: str, experts: int) -> None:
    pair.run(returning_ranks.replays, problem((256, 256), experts, 128, 192, exact=False), name, 100, timeout_s=60)


@pytest.mark.parametrize(
    "p",
    [
        problem((700, 300), 1, 1088, 64, exact=False),
        problem((90, 130), 6, 72, 40, "fp16"),
        problem((5, 1), 2, 7, 33, "fp32"),
    ],
    ids=["one expert", "six", "few rows"],
)
def test_many_exchanges_in_one_launch(pair: Pool, p: MatmulAllToAll) -> None:
    pair.run(returning_ranks.many_calls, p, IN_ONE_LANE, 400, timeout_s=60)


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("name", [STORE, IN_ONE_LANE])
def test_ranks_whose_tables_contradict_each_other(pair: Pool, name: str, experts: int) -> None:
    with Pool(2, backend="nccl") as alone:
        answers = alone.run(returning_ranks.contradicts, problem((64, 64), experts, 96, 64), name, timeout_s=60)
    (lost, kept, error), (_, _, other) = answers
    assert lost
    assert kept
    assert error.startswith("DisagreementError: rank 0")
    assert "rank 1 sent another number of rows" in error
    assert other.startswith(("DisagreementError", "PoisonedGroupError"))


@pytest.mark.parametrize("experts", [1, 3])
def test_a_rank_that_never_returns_rows(pair: Pool, experts: int) -> None:
    with Pool(2, backend="nccl") as alone:
        answers = alone.run(returning_ranks.never_calls, problem((64, 64), experts, 96, 64), IN_ONE_LANE, timeout_s=60)
    (error, lost), (other, _) = answers
    assert error.startswith("DeadlineError"), error
    assert "for signal there[0] of rank 1 on lane 'compute'" in error
    assert lost
    assert other.startswith("PoisonedGroupError"), other


@pytest.mark.parametrize("name", [DMA, KERNEL, STORE])
def test_what_ran_can_be_seen(pair: Pool, name: str) -> None:
    for names in pair.run(returning_ranks.timeline, problem((256, 256), 4, 128, 192), name, timeout_s=60):
        assert sum("returning_matmul" in name for name in names) == 2
        assert sum("-> y" in name for name in names) == 1


@pytest.mark.parametrize("schedule", [None, "serial", STORE], ids=str)
def test_a_gemm_before_an_all_to_all(pair: Pool, schedule: str | None) -> None:
    pair.run(ranks.dense, schedule, BF16, timeout_s=60)


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize(
    "schedule", ["serial", "dispatch[by=kernel,rest=each]", "dispatch_by_expert[by=dma,chunks=1]", None]
)
def test_sizes_that_the_cpu_reads_in_the_dispatch_are_known(
    pair: Pool, schedule: str | None, with_gradients: bool
) -> None:
    for known in pair.run(ranks.sizes_are_known, schedule, with_gradients, timeout_s=60):
        assert known.pop("the same")
        assert not any(known.values())


@pytest.mark.parametrize("experts", [1, 2, 5])
def test_unfused_calls_after_a_dispatch_are_native(pair: Pool, experts: int) -> None:
    pair.run(returning_ranks.native, experts, timeout_s=60)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["both", "h", "weights"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "told"])
def test_gradients(pair: Pool, exact: bool, wanted: tuple[bool, bool]) -> None:
    case = Experts(exact=exact, k=12, schedule=STORE)
    pair.run(suite.gradients, "matmul_all_to_all", case, wanted, False, None, range(4), timeout_s=120)


def test_rows_travel_once_backward_and_the_order_of_sums_is_one(pair: Pool) -> None:
    duals = ["serial", "dispatch[by=kernel,rest=each]", "dispatch_by_expert[by=kernel,chunks=1]"]
    by_dual = [pair.run(ranks.gradients_by_dual, dual, timeout_s=120) for dual in duals]
    for of_rank in zip(*by_dual, strict=True):
        for grads in zip(*of_rank, strict=True):
            assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_compiled_gradients_by_the_dual(pair: Pool) -> None:
    pair.run(ranks.compiled_by_dual, "dispatch[by=kernel,rest=each]", (True, True), timeout_s=200)


DISPATCHES = {
    "bf16": AllToAllMatmul(2, 4, (512, 384), 192, 256, "bf16", most=512, return_x=True),
    "bf16, told": AllToAllMatmul(2, 4, (300, 512), 192, 256, "bf16", most=512, exact=False, return_x=True),
    "fp32, odd sizes": AllToAllMatmul(2, 3, (37, 61), 19, 43, "fp32", most=61, return_x=True),
    "fp16, a rank without tokens, told": AllToAllMatmul(
        2, 2, (0, 64), 64, 64, "fp16", most=64, exact=False, return_x=True
    ),
}


@pytest.mark.parametrize("name", DISPATCHES)
def test_a_dispatch_that_returns_the_tokens_too(pair: Pool, name: str) -> None:
    """Run every schedule. In two of the runs more rows arrive than there is room for, so results are allocated again."""
    p = DISPATCHES[name]
    assert min(pair.run(dispatch_ranks.every_candidate, p, True, True, timeout_s=120)) >= (2 if p.exact else 1)


def test_compiled_gradients(pair: Pool) -> None:
    case = Experts(exact=False, k=12)
    pair.run(suite.gradients, "matmul_all_to_all", case, (True, True), True, None, range(2), timeout_s=200)


@pytest.mark.parametrize("schedules", [(None, None), ("dispatch[by=kernel,rest=each]", STORE)], ids=str)
def test_there_and_back(pair: Pool, schedules: tuple[str | None, str | None]) -> None:
    pair.run(ranks.round_trip, schedules, timeout_s=120)


@pytest.mark.parametrize("max_rows", [False, True], ids=["exact", "room to spare"])
def test_the_gradient_of_tokens_alone_is_a_combine(pair: Pool, max_rows: bool) -> None:
    pair.run(tokens_gradient_alone, max_rows, timeout_s=60)


def captured(group: dist.ProcessGroup, schedule: str) -> str:
    """Capture the operator, and replay it with other rows and tables. Return the error of a capture that does not pass
    `rows`.
    """
    world = group.size()

    def case(seed: int) -> MatmulAllToAllCall:
        splits = returning_ranks.random_splits(world, 2, (64,) * world, seed)
        return MatmulAllToAllCall(Experts(2, BF16, k=64, n=32), group, seed, splits)

    cases, held = [case(seed) for seed in range(6)], case(9)
    h = torch.full((64 * world, 64), torch.nan, dtype=BF16, device="cuda")

    def fill(one: MatmulAllToAllCall) -> None:
        h.fill_(torch.nan)
        h[: len(one.mine[0])] = one.mine[0]
        for to, given in (
            (held.mine[1], one.mine[1]),
            (held.received, one.received),
            (held.splits_here, one.splits_here),
        ):
            to.copy_(given)

    def call(rows: int | None = 64) -> torch.Tensor:
        tables = held.received, held.splits_here
        return weft.matmul_all_to_all(h, held.mine[1], *tables, group=group, rows=rows, capacity=64, schedule=schedule)

    with torch.no_grad():
        fill(cases[0])
        cases[0].check(group, [call()])
        graph, y = capture(call)
        for one in cases:
            fill(one)
            y.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            one.check(group, [y])
        return told(lambda: _captured_without_rows(call))


def _captured_without_rows(call: Callable[..., torch.Tensor]) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(None)


@pytest.mark.parametrize("schedule", [KERNEL, STORE, BY_EXPERT])
def test_a_call_in_a_graph(pair: Pool, schedule: str) -> None:
    for error in pair.run(captured, schedule, timeout_s=60):
        assert "pass rows" in error


@pytest.mark.parametrize("bounded", [False, True], ids=["as many as come", "max_rows"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two GEMMs"])
def test_the_module(pair: Pool, gated: bool, bounded: bool) -> None:
    pair.run(expert_module_ranks.agrees, 4, gated, bounded, False, timeout_s=120)


@pytest.mark.parametrize(
    "frozen", [("gate_up_proj", "down_proj"), ("x", "by", "down_proj"), ("x", "gate_up_proj"), ("by",)]
)
def test_the_module_with_frozen_parts(pair: Pool, frozen: tuple[str, ...]) -> None:
    pair.run(expert_module_ranks.freezes, False, frozen, timeout_s=60)


def test_the_module_learns(pair: Pool) -> None:
    for ours, dense in pair.run(expert_module_ranks.trains, 10, timeout_s=60):
        assert ours == pytest.approx(dense, rel=1e-4)


def test_the_module_in_a_graph(pair: Pool) -> None:
    pair.run(expert_module_ranks.captured, timeout_s=60)
