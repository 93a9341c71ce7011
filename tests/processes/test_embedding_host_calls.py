"""The number of Python calls that a training step of embeddings makes on the CPU of a GPU rank. A known step must make
no call per table.

The code for GPUs runs on CPU tensors, with kernels that do nothing. Only its calls are counted, not its results.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.runtime import embedding_backward

SAMPLES = 4


class Launches:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: None


def zero(*arguments: Any) -> int:
    return 0


class Program:
    """A program of launches that does nothing."""

    def __len__(self) -> int:
        return 1

    def run(self, *arguments: Any) -> None: ...


@contextlib.contextmanager
def code_of_gpus() -> Iterator[None]:
    """Run backward with the code for GPUs, without kernels."""
    from weft.runtime.cuda import direct
    from weft.runtime.cuda import embedding_backward as gpu
    from weft.runtime.cuda import embedding_runs as runs

    replaced: list[tuple[Any, str, Any]] = [
        (embedding_backward, "device_code", lambda device: gpu),
        (embedding_backward, "sort_ahead", gpu.sort_ahead),
        (direct, "_programs", direct._Programs()),
        (direct, "_program_of_all", lambda *launches: Program()),
    ]
    for module in (gpu.device_code, runs.device_code):
        replaced += [(module, name, Launches()) for name in vars(module) if name.endswith("_kernel")]
    with contextlib.ExitStack() as stack:
        for one in replaced:
            stack.enter_context(mock.patch.object(*one))
        for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):  # torch without CUDA lacks them
            stack.enter_context(mock.patch.object(torch._C, name, zero, create=True))
        yield


def calls_of_step(group: dist.ProcessGroup, tables: int) -> int:
    """Return the number of Python calls of a step with known shapes."""
    names = [f"f{number}" for number in range(tables)]
    configs = [EmbeddingBagConfig(10, 8, f"t{number}", (name,)) for number, name in enumerate(names)]
    module = ShardedEmbeddingBagCollection(
        configs, group=group, optimizer=weft.RowwiseAdagrad(lr=0.1),
        input="global_batch",
    )  # fmt: skip
    count = SAMPLES * tables
    features = KeyedJaggedTensor(names, torch.arange(count) % 10, lengths=torch.ones(count, dtype=torch.int64))
    grad = torch.ones(SAMPLES, 8 * tables)

    def step() -> None:
        module(features).values().backward(grad)

    calls = 0

    def count_calls(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with code_of_gpus():
        for _ in range(4):
            step()
        sys.setprofile(count_calls)
        step()
        sys.setprofile(None)
    return calls


def test_no_calls_for_each_table(pool: Pool) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed here: the code for GPUs needs it")
    few, many = (pool.run(calls_of_step, tables, ranks=1) for tables in (4, 104))
    assert max(many) < min(few) + 20, "the numbers vary by how long ranks wait"
    assert max(many) < 700
