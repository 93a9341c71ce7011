"""Test operators in CUDA graphs that torch makes from compiled programs (`mode="reduce-overhead"`) and modules.

Modules are captured by `make_graphed_callables`. A compiled program's first call runs in the graphs' memory pool, its
second call is captured, and later calls are replays. Each call has fresh input, and is compared with an eager call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import silu

import weft
import weft.nn
from weft.launch import Pool

pytestmark = ranks.MARKS
CALLS = 6
ROWS, K, N = 256, 512, 768  # ROWS: the rows of a rank
TOLERANCE = 3e-2  # relative to the largest element; results are bf16, and sums have another order


def program(name: str, group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the program `name`, a function of a tensor with K columns. A torch operation precedes and follows each
    operator.
    """
    device, world = ranks.device(), group.size()
    generator = torch.Generator(device).manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device, generator=generator) / 16).bfloat16()

    w, back, experts = weight(K, N), weight(N, K), weight(4 // world, K, N)
    splits = torch.full((4,), ROWS // 4, device=device)

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return weft.all_gather_matmul(x, [w], 0, group, return_A=False)[1][0]

    def block(x: torch.Tensor) -> torch.Tensor:
        """Use two operators. The backward of each is the forward of the other, with weights in another layout."""
        return x + weft.matmul_reduce_scatter(silu(gathered(silu(x))), back, "sum", 0, group)

    def to_experts(x: torch.Tensor) -> torch.Tensor:
        return weft.all_to_all_matmul(silu(x), experts, splits, group=group, max_rows=ROWS * world)[: ROWS // 2] * 2

    return {
        "all_gather_matmul": lambda x: silu(gathered(silu(x))),
        "matmul_reduce_scatter": lambda x: silu(weft.matmul_reduce_scatter(silu(x), w, "sum", 0, group)),
        "matmul_all_reduce": lambda x: silu(weft.matmul_all_reduce(silu(x), w, group=group)),
        "matmul_all_gather": lambda x: silu(weft.matmul_all_gather(silu(x), w, 0, group)),
        "all_to_all_matmul": to_experts,
        "block": block,
    }[name]


def compared(group: dist.ProcessGroup, name: str, backward: bool) -> tuple[float, int]:
    """Return (largest error of any call, relative to the largest element; number of graphs that torch skipped).

    The number is -1 if torch made no graph at all.
    """
    import torch._dynamo
    import torch._inductor.cudagraph_trees as trees

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run, device = program(name, group), ranks.device()
    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    generator = torch.Generator(device).manual_seed(group.rank())
    worst = 0.0
    for _ in range(CALLS):
        x = torch.randn(ROWS, K, device=device, generator=generator).bfloat16()
        torch.compiler.cudagraph_mark_step_begin()
        found, right = (_called(called, x, backward) for called in (compiled, run))
        worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True)))
        worst = worst if all(a.isfinite().all() for a in found) else float("inf")
    made = trees.get_manager(device.index, create_if_none_exists=False) is not None
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    torch._dynamo.reset()
    return worst, skipped if made else -1


def _called(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, backward: bool) -> list[torch.Tensor]:
    """Return copies of the result and of the gradient, because the next replay overwrites what a graph returns."""
    if not backward:
        with torch.no_grad():
            return [run(x).float()]
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(silu(y.detach()))
    assert x.grad is not None
    return [y.detach().float(), x.grad.float()]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "name",
    [
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "matmul_all_gather",
        "all_to_all_matmul",
        "block",
    ],
)
def test_replays_equal_eager_calls(pair: Pool, name: str, backward: bool) -> None:
    found: list[Any] = pair.run(compared, name, backward, timeout_s=120)
    for worst, skipped in found:
        assert worst <= TOLERANCE
        assert skipped >= 0, "torch has made no graph"
        # In the backward of all_to_all_matmul, the CPU reads how many rows arrived. A graph cannot contain that.
        if not (name == "all_to_all_matmul" and backward):
            assert skipped == 0


# --- layers and the gradients of their parameters ---


def layers(group: dist.ProcessGroup, how: str) -> float:
    """Return the largest error of any result or gradient of a layer, relative to the largest element."""
    import torch._dynamo

    torch._dynamo.reset()
    device = ranks.device()
    torch.manual_seed(5)
    eager = weft.nn.ParallelMLP(K, N * group.size(), group=group, device=device, dtype=torch.bfloat16)
    graphed: Any = copy.deepcopy(eager)
    generator = torch.Generator(device).manual_seed(group.rank())

    def fresh() -> torch.Tensor:
        return torch.randn(2, ROWS, K, device=device, generator=generator).bfloat16()

    if how == "compiled":
        graphed = torch.compile(graphed, fullgraph=True, mode="reduce-overhead")
    else:
        graphed = torch.cuda.make_graphed_callables(graphed, (fresh().requires_grad_(),))
    worst = 0.0
    for _ in range(CALLS):
        x, grad, found = fresh(), fresh(), []
        for module in (graphed, eager):
            if how == "compiled":
                torch.compiler.cudagraph_mark_step_begin()
            given = x.clone().requires_grad_()
            module.zero_grad()
            y = module(given)
            y.backward(grad)
            gradients = [one.grad for one in (given, *module.parameters())]
            assert all(one is not None for one in gradients)
            found.append([y.detach().float(), *(one.float() for one in gradients if one is not None)])
        for ours, right in zip(*found, strict=True):
            worst = max(worst, float((ours - right).abs().max() / right.abs().max()))
            worst = worst if bool(ours.isfinite().all()) else float("inf")
    torch._dynamo.reset()
    return worst


@pytest.mark.parametrize("how", ["compiled", "make_graphed_callables"])
def test_layers_in_graphs_learn_as_eager_ones(pair: Pool, how: str) -> None:
    for worst in pair.run(layers, how, timeout_s=120):
        assert worst <= TOLERANCE
