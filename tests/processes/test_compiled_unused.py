"""A compiled call runs on every rank, even if a rank ignores its results.

torch.compile must not remove a call whose results are unused or empty, because peers would wait for it until their
deadline.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.slow import mostly

import weft
import weft.ops
from weft.launch import Pool


def drawn(*shape: int, rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * seed + rank)).requires_grad_()


def empty_on_one(group: dist.ProcessGroup) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    """Let rank 0 send rows to rank 1 and receive none."""
    rank = group.rank()
    splits, received = torch.tensor([[0, 0], [2, 3]])[rank], torch.tensor([[[0], [2]], [[0], [3]]])[rank]

    def call(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = 0 if rank == 0 else 5
        return torch.relu(weft.matmul_all_to_all(h, w, received, splits, rows=rows, group=group))

    def by_torch(of_all: list[list[torch.Tensor]]) -> torch.Tensor:
        return torch.relu(torch.cat([h @ w[0] for h, w in of_all])[: 0 if rank == 0 else None])

    return call, by_torch, [drawn(int(received.sum()), 8, rank=rank), drawn(1, 8, 4, rank=rank, seed=1)]


def unused_on_one(group: dist.ProcessGroup) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    rank = group.rank()

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = weft.matmul_all_reduce(x.detach(), w.detach(), group)
        return y + x.sum() if rank else x + 1

    def by_torch(of_all: list[list[torch.Tensor]]) -> torch.Tensor:
        x, _ = of_all[rank]
        return sum(x.detach() @ w.detach() for x, w in of_all) + x.sum() if rank else x + 1

    return call, by_torch, [drawn(4, 8, rank=rank), drawn(8, 4, rank=rank, seed=1)]


def gradients_unused_on_one(
    group: dist.ProcessGroup,
) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    """Use an operation whose gradient is known without the gradient of its result, so that gradients are unused on one
    rank.
    """
    rank = group.rank()

    def call(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x, w = (2 * p, 2 * v) if rank else (torch.sign(p), torch.sign(v))
        return torch.relu(weft.matmul_all_reduce(x, w, group))

    def by_torch(of_all: list[list[torch.Tensor]]) -> torch.Tensor:
        (p, v), (q, u) = of_all
        return torch.relu(torch.sign(p) @ torch.sign(v) + 4 * q @ u)

    return call, by_torch, [drawn(4, 8, rank=rank), drawn(8, 4, rank=rank, seed=1)]


CASES = {one.__name__: one for one in (empty_on_one, unused_on_one, gradients_unused_on_one)}


def run(group: dist.ProcessGroup, case: str, backend: str, cache: str | None) -> None:
    call, by_torch, tensors = CASES[case](group)
    if cache is not None:
        from torch._inductor import config  # imported here, because this takes a second

        config.force_disable_caches = True
        config.compile_threads = 1  # more threads would be processes, each of which imports torch
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    with pytest.MonkeyPatch.context() as patched:
        if cache is not None:
            patched.setenv("TORCHINDUCTOR_CACHE_DIR", f"{cache}/{group.rank()}")
            # Ranks compile different programs, so one rank may have to wait long for another.
            patched.setenv("WEFT_DEADLINE_S", "120")
            patched.setenv("WEFT_SETUP_DEADLINE_S", "120")
        y = compiled(*tensors)
        y.sum().backward()
        with torch.no_grad():  # another graph
            torch.testing.assert_close(compiled(*tensors), y.detach())

    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, [t.detach() for t in tensors], group=group)
    of_all = [[t.double().requires_grad_() for t in of] for of in everyone]
    wanted = by_torch(of_all)
    torch.testing.assert_close(y.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    # Each rank adds its part of the loss. A rank's own result alone does not contain the parts of peers.
    parts: list[Any] = [None] * group.size()
    grads = torch.autograd.grad(wanted.sum(), [t for of in of_all for t in of], allow_unused=True)
    dist.all_gather_object(parts, [None if g is None else g.clone() for g in grads], group=group)
    mine = slice(group.rank() * len(tensors), (group.rank() + 1) * len(tensors))
    for t, of in zip(tensors, zip(*(part[mine] for part in parts), strict=True), strict=True):
        grad = sum((g for g in of if g is not None), start=torch.zeros(t.shape, dtype=torch.float64))
        got = torch.zeros(t.shape) if t.grad is None else t.grad
        torch.testing.assert_close(got.double(), grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", mostly(CASES, "empty_on_one", "gradients_unused_on_one"))
def test_no_call_is_left_out(case: str, pool: Pool) -> None:
    pool.run(run, case, "aot_eager", None, ranks=2, timeout_s=120)


@pytest.mark.slow
def test_inductor_leaves_no_call_out(tmp_path: Any) -> None:
    """Use separate ranks with an empty cache in their own folders. Inductor's headers are compiled once for all cases."""
    with Pool(2) as ranks:
        for case in ("unused_on_one", "gradients_unused_on_one"):  # a compiler may remove unused computations
            ranks.run(run, case, "inductor", str(tmp_path), ranks=2, timeout_s=300)


def test_no_operator_is_dead_code() -> None:
    """This covers operators that the cases above do not call: those of embeddings, and all backward operators."""
    for module in pkgutil.iter_modules(weft.ops.__path__):
        importlib.import_module(f"weft.ops.{module.name}")
    importlib.import_module("weft.operator.layers")
    names = [schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("weft::")]
    assert {"weft::embedding_all_to_all", "weft::matmul_all_reduce_backward"} <= set(names)
    for name in set(names) - {"weft::multiplied"}:  # no peer waits for these operators
        graph = torch.fx.Graph()
        graph.call_function(getattr(torch.ops.weft, name.removeprefix("weft::")).default)
        graph.output(())
        graph.eliminate_dead_code()
        assert len(graph.nodes) == 2, name
