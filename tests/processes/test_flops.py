"""FlopCounterMode counts as many FLOPs on a rank as for the same GEMMs in torch. This holds for forward and backward, a
backward whose forward ran outside of the mode, and a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.slow import mostly
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft.launch import Pool

Call = Callable[..., torch.Tensor]
WORLD, M, K, N, EXPERTS = 2, 12, 16, 8, 2


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def gathered(group: dist.ProcessGroup) -> tuple[Call, Call, list[tuple[int, ...]]]:
    def call(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        _, ys = weft.all_gather_matmul(x, [w, v], 0, group.group_name, return_A=False)
        return torch.cat(ys, 1)

    def by_torch(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        whole = x.repeat(group.size(), 1)
        return torch.cat([whole @ w, whole @ v], 1)

    return call, by_torch, [(M, K), (K, N), (K, 3)]


def scattered(group: dist.ProcessGroup) -> tuple[Call, Call, list[tuple[int, ...]]]:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.matmul_reduce_scatter(x, w, "avg", 1, group.group_name)

    return call, torch.matmul, [(2, M, K), (K, N)]


def scattered_columns(group: dist.ProcessGroup) -> tuple[Call, Call, list[tuple[int, ...]]]:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.matmul_reduce_scatter(x, w, "sum", -1, group.group_name)

    return call, torch.matmul, [(2, M, K), (K, N)]


def summed(group: dist.ProcessGroup) -> tuple[Call, Call, list[tuple[int, ...]]]:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.matmul_all_reduce(x, w, group.group_name, bias=w.detach()[0])

    return call, torch.matmul, [(M, K), (K, N)]


def joined(group: dist.ProcessGroup) -> tuple[Call, Call, list[tuple[int, ...]]]:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.matmul_all_gather(x, w, -1, group.group_name)

    return call, torch.matmul, [(M, K), (K, N)]


def experts(group: dist.ProcessGroup) -> tuple[Call, Call, list[tuple[int, ...]]]:
    """Send tokens to their experts, multiply them there, and send them back."""
    splits = torch.tensor([3, 2, 4, 3])  # of either rank
    came = splits.view(WORLD, EXPERTS)[group.rank()] * WORLD

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h, received = weft.all_to_all_matmul(x, w, splits, group=group.group_name, return_received=True)
        return weft.matmul_all_to_all(h, w.transpose(1, 2), received, splits, group=group.group_name, rows=M)

    def by_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = x.repeat(WORLD, 1)[: int(came.sum())]
        return torch.cat([one @ w[e] @ w[e].t() for e, one in enumerate(rows.split(came.tolist()))])

    return call, by_torch, [(M, K), (EXPERTS, K, N)]


def layers(group: dist.ProcessGroup) -> tuple[Call, Call, list[tuple[int, ...]]]:
    """Run layers, between which activations are replicated, or divided."""
    whole = weft.nn.ParallelMLP(K, N * WORLD, group=group, sequence_dim=None)
    parts = weft.nn.ParallelMLP(K, N * WORLD, group=group, sequence_dim=0)

    def call(x: torch.Tensor) -> torch.Tensor:
        return parts(whole(x))

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        for mlp, times in ((whole, 1), (parts, WORLD)):
            gate, up, down = (layer.weight for layer in mlp.children())
            x = x.repeat(times, 1)
            x = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return x

    return call, by_torch, [(M, K)]


CASES = {one.__name__: one for one in (gathered, scattered, scattered_columns, summed, joined, experts, layers)}


def of_graph(call: Call, tensors: list[torch.Tensor]) -> int:
    """Return the FLOPs of the graph that torch.compile makes. They are counted in a backend, because torch compiles
    nothing inside a FLOP counter.
    """
    found = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Call:
        def run(*inputs: torch.Tensor) -> torch.Tensor:
            found.append(counted(lambda: graph(*inputs)))
            return graph(*inputs)

        return run

    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=backend)(*tensors)
    return found[0]


def counts(group: dist.ProcessGroup, case: str) -> dict[str, tuple[int, int]]:
    """Return {wanted gradients: (FLOPs of weft, FLOPs of torch)}."""
    call, by_torch, shapes = CASES[case](group)
    found = {}
    for name, wanted in [("none", False), ("x", True), ("weights", True), ("all", True)]:

        def tensors(name: str = name) -> list[torch.Tensor]:
            return [
                torch.randn(shape).requires_grad_(name == "all" or (name != "none" and (name == "x") == (i == 0)))
                for i, shape in enumerate(shapes)
            ]

        def both(call: Call, wanted: bool = wanted) -> None:
            y = call(*tensors())
            if wanted:
                y.sum().backward()

        def alone(call: Call) -> int:
            y = call(*tensors())
            return counted(y.sum().backward)

        exact = counted(lambda: both(by_torch))
        found[name] = counted(lambda: both(call)), exact
        if wanted:
            found[f"{name}, backward alone"] = alone(call), alone(by_torch)
    found["graph"] = of_graph(call, tensors()), counted(lambda: by_torch(*tensors()))
    return found


@pytest.mark.parametrize("case", mostly(CASES, "gathered", "experts"))
def test_counts_are_those_of_torch(pool: Pool, case: str) -> None:
    for found in pool.run(counts, case, ranks=WORLD, timeout_s=100):
        for how, (ours, theirs) in found.items():
            assert ours == theirs > 0, how
