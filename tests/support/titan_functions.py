"""torchtitan's `dist_gemm` functions of weft.parallel, on CPU processes and on GPUs. These functions run on the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.on_ranks import data, device, told


def functions(group: dist.ProcessGroup, k: int, frozen: bool) -> list[int]:
    """Compare results and gradients of torchtitan's `dist_gemm` functions with one process in float64. Return the sizes
    of the saved tensors.
    """
    from weft.parallel.functions import AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter

    rank, world, n = group.rank(), group.size(), 6
    at = (group, group.group_name)
    saved: list[int] = []

    def kept(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.numel())
        return t

    def run(ours: bool) -> list[torch.Tensor]:
        def leaf(seed: int, *shape: int) -> torch.Tensor:
            of_rank = [data(r, shape, torch.float32, seed) for r in range(world)]
            return of_rank[rank].requires_grad_(not frozen or seed == 1) if ours else torch.stack(of_rank).double()

        x, w, bias = leaf(1, 5, k), leaf(2, n, k), leaf(3, n)
        wa, wb = leaf(4, n, k), leaf(5, n, k)
        z, v, same = leaf(1, 5 * world, k), leaf(6, n, k), data(0, (n,), torch.float32, 7)
        if ours:
            same.requires_grad_(not frozen)
            with torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
                ys = [AllGatherLinear.apply(x, w, bias, *at), *AllGatherLinearMulti.apply(x, wa, wb, *at)]
                ys.append(LinearReduceScatter.apply(z, v, same, *at))
            sum((y * data(rank, tuple(y.shape), torch.float32, 8 + i)).sum() for i, y in enumerate(ys)).backward()
            leaves = [x, w, bias, wa, wb, z, v, same]
            return [*ys, *(t.grad if t.grad is not None else torch.zeros(()) for t in leaves)]
        leaves = [x, w, bias, wa, wb, z, v, same.double()]
        x, w, bias, wa, wb, z, v, same = (t.requires_grad_(not frozen or i in (0, 5)) for i, t in enumerate(leaves))
        whole = x.flatten(0, 1)
        of_ranks = [[whole @ w[r].t() + bias[r], whole @ wa[r].t(), whole @ wb[r].t()] for r in range(world)]
        total = sum(z[r] @ v[r].t() for r in range(world)) + same
        loss = torch.zeros((), dtype=torch.float64, device=device())
        for r in range(world):
            of_ranks[r].append(total.chunk(world)[r])
            for i, y in enumerate(of_ranks[r]):
                loss = loss + (y * data(r, tuple(y.shape), torch.float32, 8 + i).double()).sum()
        loss.backward()
        mine = [t.grad[rank] if t.grad is not None else torch.zeros(()) for t in (x, w, bias, wa, wb, z, v)]
        return [*of_ranks[rank], *mine, same.grad if same.grad is not None else torch.zeros(())]

    for found, exact in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found.double(), exact.double(), rtol=1e-4, atol=1e-4)
    return saved


def functions_compiled(group: dist.ProcessGroup) -> float:
    """Compile a program of torchtitan's functions in one graph. Return the largest difference of results and gradients
    from eager mode.
    """
    from weft.parallel.functions import AllGatherLinear, LinearReduceScatter

    name, found = group.group_name, []

    def run(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = AllGatherLinear.apply(x, w, None, group, name)
        return LinearReduceScatter.apply(torch.relu(y), v, None, group, name)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    for called in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        leaves = [data(group.rank(), (n, k), torch.float32, n).requires_grad_() for n, k in ((4, 8), (6, 8), (8, 6))]
        y = called(*leaves)
        y.square().sum().backward()
        found.append([y.detach(), *(t.grad for t in leaves)])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))  # type: ignore[operator]


def of_inference(group: dist.ProcessGroup) -> list[str]:
    """Return each function's error for an x that was made in inference mode on rank 1 only. The group must stay usable."""
    from weft.parallel.functions import AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter

    at, found = (group, group.group_name), []
    w, v = (data(group.rank(), (8, 8), torch.float32, seed).requires_grad_() for seed in (1, 2))
    calls = (
        lambda x: AllGatherLinear.apply(x, w, None, *at),
        lambda x: AllGatherLinearMulti.apply(x, w, v, *at)[0],
        lambda x: LinearReduceScatter.apply(x, w, None, *at),
    )
    for call in calls:
        with torch.inference_mode(group.rank() == 1):
            x = torch.ones(4, 8, device=device())
        found.append(told(lambda call=call, x=x: call(x)))
        with torch.no_grad():  # nothing is saved for backward, so the call is allowed
            assert torch.equal(call(x), call(x.clone()))
        call(x.clone()).sum().backward()
    return found


def of_wrong_operands(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the error of each call with a wrong operand on rank 1 only, and of a right call afterwards."""
    from weft.parallel.functions import AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter

    at, first = (group, group.group_name), group.rank() == 0
    x, w, b = (torch.ones(*shape, device=device()) for shape in ((4, 8), (6, 8), (6,)))
    calls = {
        "AllGatherLinear: bias is a str": lambda: AllGatherLinear.apply(x, w, b if first else "none", *at),
        "AllGatherLinear: x has shape (2, 2, 8)": lambda: AllGatherLinear.apply(
            x if first else x.view(2, 2, 8), w, b, *at
        ),
        "AllGatherLinearMulti: w is a NoneType": lambda: AllGatherLinearMulti.apply(x, w, w if first else None, *at),
        "LinearReduceScatter: bias is a list": lambda: LinearReduceScatter.apply(x, w, b if first else [1.0], *at),
    }
    found = {said: told(call) for said, call in calls.items()}
    return found | {"": told(lambda: AllGatherLinear.apply(x, w, b, *at))}
