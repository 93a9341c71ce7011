"""Pools of ranks on GPUs. They are shared by tests, because starting a pool takes seconds.

Deadlines are short here, so that a test that hangs fails soon.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weft.launch import Pool


@pytest.fixture(scope="session", autouse=True)
def deadline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_DEADLINE_S", "10")
        yield


@pytest.fixture(scope="session")
def pair(deadline: None) -> Iterator[Pool]:
    """Return two ranks on two GPUs, or on one GPU if there is only one. A test that kills ranks makes its own pool."""
    if torch.cuda.device_count() > 1 and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("GPU 0 cannot reach GPU 1's memory: weft doctor says more")
    with Pool(2, backend="nccl") as workers:
        yield workers
