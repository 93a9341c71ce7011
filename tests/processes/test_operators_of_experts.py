"""Tests of both MoE operators on CPU processes: torch's grouped GEMM, more tokens than before, one graph for several
numbers of tokens, autocast and inference. `test_operators.py` has the other tests.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from support.all_to_all_matmul_ranks import dual_takes
from support.on_ranks import own_group, told
from support.operators import suite
from support.operators.cases import ROWS
from support.operators.experts import Experts
from support.slow import slow

import weft
from weft.launch import Pool
from weft.ops.all_to_all_matmul import expert_weights
from weft.runtime.unfused import grouped_matmul

DUALS = {"all_to_all_matmul": "matmul_all_to_all", "matmul_all_to_all": "all_to_all_matmul"}


def torchs_grouped_gemm(group: dist.ProcessGroup, operator: str) -> None:
    """Make unfused calls with torch's grouped GEMM, which weft normally uses only on GPUs. On CPU it is slow."""
    original = grouped_matmul._has_grouped_gemm
    grouped_matmul._has_grouped_gemm = lambda x, w: (
        x.numel() > 0 and grouped_matmul._is_aligned(x) and grouped_matmul._is_aligned(w)
    )
    try:
        for exact in (True, False):
            case = Experts(3, exact=exact, transposed=exact, schedule="serial")
            suite.results(group, operator, case, 4)
            suite.gradients(group, operator, case, (True, True), False, None, range(4))
    finally:
        grouped_matmul._has_grouped_gemm = original


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("operator", DUALS)
def test_unfused_calls_as_on_gpus(pool: Pool, operator: str, world: int) -> None:
    pool.run(torchs_grouped_gemm, operator, ranks=world, timeout_s=60)


def test_weights_that_are_transposed_are_not_copied_on_cpu() -> None:
    """Only a schedule copies them, when it begins. An unfused call multiplies by views."""
    w = torch.empty(2, 3, 4).mT
    assert expert_weights(w, "all_to_all_matmul") is w


def more_tokens(group: dist.ProcessGroup, operator: str, schedule: str, dual: str, known: bool) -> tuple[str, str]:
    """Call without capacity, with gradients of the rows, and a growing number of tokens.

    First each rank has 4 tokens. Then the last rank has as many as fit, then one more (return its error), then few
    again. known: True if backward has been called before.
    """
    own, world = own_group(group), group.size()

    def both(of_last: int, backward: bool = True) -> None:
        splits = tuple((n - n // 2, n // 2, *[0] * (2 * world - 2)) for n in [4] * (world - 1) + [of_last])
        call = suite.CALLS[operator](Experts(k=8, n=3, schedule=schedule), group, of_last, splits)
        x, w = call.mine[0].clone().requires_grad_(), call.mine[1]
        ys = call(own, x, w, capacity=None)
        call.check(group, ys)
        if backward:
            weights, (right, _) = suite.right_gradients(call)
            (call.kept(ys)[0] * weights[0]).sum().backward()
            torch.testing.assert_close(x.grad.double(), right, rtol=1e-4, atol=1e-4)

    with dual_takes(dual, DUALS[operator]):
        both(4, known)
        both(64)
        return told(lambda: both(65)), told(lambda: both(4))


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
@pytest.mark.parametrize("dual", ["serial", "pinned"])
@pytest.mark.parametrize("schedule", ["serial", "pinned"])
@pytest.mark.parametrize("operator", DUALS)
def test_backward_of_what_forward_takes(pool: Pool, operator: str, schedule: str, dual: str, known: bool) -> None:
    """One rank passes as many tokens as fit, and then one more, which is refused before anything is done."""
    names = [
        of if of == "serial" else ROWS[name].small.schedule
        for of, name in ((schedule, operator), (dual, DUALS[operator]))
    ]
    what = {"all_to_all_matmul": "tokens has 65 rows", "matmul_all_to_all": "this rank has 65 tokens"}[operator]
    for refusal, again in pool.run(more_tokens, operator, *names, known, ranks=2, timeout_s=60):
        assert refusal.startswith(
            f"RefusedError: rank 1: {what}, but calls of this shape were set up for capacity=64, which the first call has "
            "determined: pass capacity, "
        )
        assert again == "nothing"


def compiled(group: dist.ProcessGroup, operator: str, exact: bool, full: bool) -> None:
    """Compile without gradients. One graph must serve several numbers of tokens.

    full: True for fullgraph=True, which needs no configuration. Without it, torch must be told to trace dynamic sizes.
    """
    kind = suite.CALLS[operator]

    def act(x: torch.Tensor, w: torch.Tensor, tables: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        rows = {} if exact else {"rows": len(like)}
        return torch.relu(kind.public(x * 2, w, *tables, capacity=60, **rows))  # of the world

    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=not full):
        run = torch.compile(act, fullgraph=full, backend="aot_eager", dynamic=True)
        for seed in range(4):
            call = kind(Experts(k=8), group, seed)
            (y,) = call.exact()
            arguments = call.arguments(call.mine, group)
            tables = [arguments[name] for name in ("received", "splits") if name in arguments]
            found = run(*call.mine, tables, y)
            torch.testing.assert_close(found, (2 * y).relu().float(), rtol=1e-4, atol=1e-4)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    ("operator", "exact", "full"),
    [
        ("all_to_all_matmul", True, True),
        ("all_to_all_matmul", True, False),
        ("matmul_all_to_all", True, True),
        slow("matmul_all_to_all", True, False),
        ("matmul_all_to_all", False, True),
    ],
)
def test_compiled(pool: Pool, operator: str, exact: bool, full: bool) -> None:
    pool.run(compiled, operator, exact, full, ranks=2, timeout_s=120)


def odd_uses(group: dist.ProcessGroup, operator: str, schedules: list[str]) -> None:
    """Call under autocast, which must not change dtypes, and in inference mode."""
    call = suite.CALLS[operator](Experts(k=8, n=3), group, 1)
    for schedule in schedules:
        inputs = [t.clone().requires_grad_() for t in call.mine]
        with torch.autocast("cpu", torch.bfloat16):
            (y,) = call.kept(call(group, *inputs, schedule=schedule))
            y.sum().backward()
        assert {t.dtype for t in (y, *(one.grad for one in inputs))} == {torch.float32}
    with torch.inference_mode():
        call.check(group, call(group))


@pytest.mark.parametrize("operator", DUALS)
def test_autocast_and_inference(operator: str) -> None:
    with Pool(2) as alone:
        alone.run(odd_uses, operator, ["serial", ROWS[operator].small.schedule], timeout_s=100)


def tables_of_32_bits(group: dist.ProcessGroup, operator: str) -> None:
    """Pass int32 tables, and tables that are views of larger tensors. Pass a timeline to later calls, which no longer
    choose a schedule.
    """
    call = suite.CALLS[operator](Experts(k=8, n=3), group, 1)
    arguments = call.arguments(call.mine, group)
    tables = {name: arguments[name] for name in ("received", "splits") if name in arguments}
    narrow = {name: torch.stack([table.int()] * 2, dim=-1)[..., 1] for name, table in tables.items()}
    for given in (tables, narrow):
        for timeline in (None, None, weft.Timeline()):
            call.check(group, call.results(call.public(**arguments | given, timeline=timeline)))
            assert timeline is None or len(timeline)


@pytest.mark.parametrize("operator", DUALS)
def test_tables_of_32_bits_and_timelines_of_later_calls(pool: Pool, operator: str) -> None:
    pool.run(tables_of_32_bits, operator, ranks=2, timeout_s=60)


def sizes_beyond_memory(group: dist.ProcessGroup) -> list[str]:
    """Pass sizes that need more memory than any host has, in the first call of a shape and in a later call. Return the errors.
    All calls use one group.
    """
    own, world, found = own_group(group), group.size(), []
    tokens, w, splits = torch.ones(2 * world, 8), torch.ones(2, 8, 4), torch.ones(2 * world, dtype=torch.int64)
    y, received = weft.all_to_all_matmul(tokens, w, splits, group=own, return_received=True)

    def dispatch(**given: int) -> torch.Tensor:
        return weft.all_to_all_matmul(tokens, w, splits, group=own, **given)

    def combine(**given: int) -> torch.Tensor:
        return weft.matmul_all_to_all(y, torch.ones(2, 4, 8), received, splits, group=own, **given)

    for good in (16, 17):
        bounded = {"max_rows": 2**40 if group.rank() else good}
        found += [told(lambda bounded=bounded: dispatch(**bounded)), told(lambda good=good: dispatch(max_rows=good))]
    for call in (dispatch, combine):
        for _ in range(2):
            found += [told(lambda call=call: call(capacity=2**40)), told(call)]

    def check() -> None:
        assert (dispatch() == 8).all()
        assert (combine() == 32).all()

    return [*found, "", told(check)]


def test_sizes_that_need_more_memory_than_the_host_has_are_refused(pool: Pool) -> None:
    fix = "GiB of memory: pass the largest number of "
    rows = rf"RefusedError: rank 1: max_rows=1099511627776 needs 16384.0 GiB on this rank, but this host has \S+ {fix}rows "
    for found in pool.run(sizes_beyond_memory, ranks=2, timeout_s=60):
        assert found[1::2] == ["nothing"] * 7
        assert all(re.match(rows, error) for error in found[:4:2]), found
        capacity = r"RefusedError: ranks 0, 1: capacity=1099511627776 needs 65536.0 GiB on each rank, but .* "
        assert all(re.match(capacity + f"{fix}tokens ", error) for error in found[4:-2:2]), found
