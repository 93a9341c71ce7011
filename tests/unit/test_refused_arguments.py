"""Arguments that are refused before anything starts, with their values and the fix."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.builders import AllToAllMatmul, NotApplicableError
from weft.builders.all_to_all_matmul import dispatch_sorted
from weft.builders.problem import described
from weft.launch import Pool


def test_nccl_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="backend='nccl' needs GPUs, but torch sees none: pass backend='gloo'"):
        Pool(2, backend="nccl")


@pytest.mark.parametrize(
    ("batches", "features_of", "text"),
    [
        ([], [torch.nn.Linear(1, 1)], "features_of is a list: pass a dict"),
        ([], {torch.nn.Linear(1, 1): 3}, "a value of features_of is an int: pass a dict"),
        (5, {}, "batches is .*: pass a DataLoader"),
        ([], {torch.nn.Linear(1, 1): len}, "does not prefetch"),
    ],
)
def test_a_prefetched_loop(batches: object, features_of: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        weft.nn.prefetched(batches, features_of)  # type: ignore[arg-type]


def test_schedules_of_experts() -> None:
    with pytest.raises(
        NotApplicableError, match="the number of pieces of experts of a rank is 0: it must be at least 1"
    ):
        dispatch_sorted(AllToAllMatmul.even(8, 8, 8, 2, 2), chunks=0)
    with pytest.raises(
        NotApplicableError, match="more than 192 tokens on average, so GEMM tiles with tokens of several ranks"
    ):
        dispatch_sorted(AllToAllMatmul.even(4096, 8, 8, 2, 2), chunks=1)
    with pytest.raises(ValueError, match="experts=100000000 is too large: plan for at most 65536 experts"):
        described("all_to_all_matmul", m=8, n=8, k=8, ranks=2, experts=100_000_000)
