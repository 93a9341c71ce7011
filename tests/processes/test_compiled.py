"""Operators under torch.compile: their first use, gradients, and calls whose results nobody uses."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import own_group
from support.slow import mostly, slow

import weft
import weft.ops
from weft.launch import Pool

PROGRAM = """
    import sys
    import torch, torch.distributed as dist
    import weft

    rank, directory = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", store=dist.FileStore(directory + "/store", 2), rank=rank, world_size=2)
    group, splits = dist.group.WORLD, torch.tensor([2, 2])

    def sequence(x, w):
        _, (y,) = weft.all_gather_matmul(x, [w], 0, group, return_A=False)
        return weft.matmul_reduce_scatter(y.relu(), w.t(), "sum", 0, group)

    def whole(x, w):
        y = weft.matmul_all_gather(x, w[:, :4].contiguous(), -1, group)
        return weft.matmul_all_reduce(y.relu(), w.t(), group)

    def experts(x, w):
        y = weft.all_to_all_matmul(x, w[None], splits, max_rows=8)
        return weft.matmul_all_to_all(y[:4].relu(), w.t()[None], torch.tensor([[2], [2]]), splits, rows=4)

    def fp8(x, w):
        f8, one = torch.float8_e4m3fn, torch.ones(())
        a, b = torch.ones(4, 16).to(f8), torch.ones(16, 16).to(f8).t()
        _, (y,) = weft.all_gather_scaled_matmul(a, [b], one, [one], 0, group, return_A=False)
        z = weft.scaled_matmul_reduce_scatter(y.to(f8), b, one, one, "sum", 0, None, group)
        return z.sum() + (x @ w).sum()

    x, w = (torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)), torch.randn(8, 8))
    for call, on_one_rank in [
        (sequence, []), (whole, ["matmul_all_reduce"]), (experts, ["matmul_all_to_all"]), (fp8, []),
    ]:
        for name in on_one_rank:
            assert f"weft.ops.{name}" not in sys.modules, name
            if rank == 0:
                getattr(weft, name)
        grads = []
        for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
            leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            y = function(*leaves)
            grads.append([y, *torch.autograd.grad(y.sum(), leaves)])
        torch.testing.assert_close(*grads)
    print("compiled")
"""


@pytest.mark.slow
def test_operators_compile_when_they_are_first_used(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "WEFT_DEADLINE_S": "100", "WEFT_QUIET": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [text.splitlines()[-1:] for text in said] == [["compiled"]] * 2, "\n".join(said)


K, N = 16, 32


def some_gradients(group: dist.ProcessGroup, operator: str) -> list[tuple[list[bool], list[bool]]]:
    """Return, for several sets of inputs that want a gradient: the gradients that the compiled backward was asked for,
    and the gradients that the inputs have.
    """
    spec = importlib.import_module(f"weft.ops.{operator}").OPERATOR
    native, asked, found = spec.gradients, list[list[bool]](), []

    def spy(*arguments: Any) -> Any:
        asked.append(list(arguments[4])[:2])
        return native(*arguments)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if operator == "all_gather_matmul":
            return weft.all_gather_matmul(x, [w[0]], 0, group.group_name, return_A=False)[1][0].sum()
        splits = torch.tensor([4] + [0] * (group.size() - 1))
        return weft.all_to_all_matmul(x, w, splits, max_rows=4 * group.size()).sum()  # of the world

    spec.gradients = spy
    try:
        for wanting in ([True, False], [False, True], [True, True]):
            x, w = torch.ones(4, K), torch.ones(1, K, N)
            for tensor, wants in zip((x, w), wanting, strict=True):
                tensor.requires_grad_(wants)
            torch._dynamo.reset()
            torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w).backward()
            found.append((asked.pop(), [tensor.grad is not None for tensor in (x, w)]))
            for tensor in (x, w):
                assert tensor.grad is None or tensor.grad.abs().sum() > 0 or group.rank()
    finally:
        del spec.gradients
    assert not asked
    return found


@pytest.mark.parametrize("operator", [slow("all_gather_matmul"), "all_to_all_matmul"])
def test_compiled_backward_makes_the_gradients_that_are_wanted(pool: Pool, operator: str) -> None:
    for found in pool.run(some_gradients, operator, ranks=2):
        assert found == [(wanted, wanted) for wanted in ([True, False], [False, True], [True, True])]


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
    if cache is not None:
        group = own_group(group)  # it reads the deadlines below at its first call
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
