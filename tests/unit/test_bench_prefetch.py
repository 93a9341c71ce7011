"""The benchmark variant `prefetch` of all_gather_matmul, with streams that run everything at once."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.bench.ops import all_gather_matmul
from weft.bench.ops.all_gather_matmul import GatherVariants


class Stream:
    """A stream whose work is complete when it is enqueued."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> object:
        return object()


@pytest.mark.parametrize("row", [1, 2, 3, 7])
def test_each_call_multiplies_its_own_input_set(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repetition of a benchmark makes `row` calls with consecutive input sets, beginning at any set."""
    cuda: Any = SimpleNamespace(Stream=Stream, current_stream=Stream, stream=lambda _: contextlib.nullcontext())
    monkeypatch.setattr(all_gather_matmul.torch, "cuda", cuda)
    monkeypatch.setattr(all_gather_matmul, "all_gather_by_torch", lambda out, x, group: out.copy_(x))
    sets = 5
    work: Any = SimpleNamespace(
        ranks=SimpleNamespace(device=None, group=None), gathered=torch.empty(1), input_sets=sets,
        x_shards=[torch.tensor([float(which)]) for which in range(sets)], gemm=lambda x: x.clone(),
    )  # fmt: skip
    call = GatherVariants.prefetched(work)
    for begin in (0, 1, 4, 2, 3, 1, 0, 2, 4, 3):
        for number in range(begin, begin + row):
            assert float(call(number % sets)) == number % sets
