"""weft.nn's tensor-parallel layers on two GPUs: functions are those of the CPU tests."""

from __future__ import annotations

import gpu_ranks
import pytest
import tensor_parallel_ranks as ranks
import torch

from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
KINDS = ("column", "row", "mlp", "attention")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients(pair: Pool, kind: str, bias: bool, dtype: torch.dtype) -> None:
    pair.run(ranks.agrees, kind, bias, 0 if bias else 1, dtype, False, 3, timeout_s=100)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_one_graph(pair: Pool, kind: str) -> None:
    pair.run(ranks.agrees, kind, True, 1, torch.float32, True, 2, timeout_s=200)


def test_a_block_is_the_same_compiled_and_recomputed(pair: Pool) -> None:
    usual, *_ = pair.run(ranks.block_gradients, False, False, timeout_s=100)
    for compiled, recompute in ((True, False), (False, True)):
        for found in pair.run(ranks.block_gradients, compiled, recompute, timeout_s=200):
            for name, values in found.items():
                close = torch.allclose(torch.tensor(values), torch.tensor(usual[name]), rtol=1e-4, atol=1e-5)
                assert close, (name, compiled, recompute)


def test_autocast_is_as_for_linear(pair: Pool) -> None:
    for found in pair.run(ranks.autocast, timeout_s=60):
        assert found == [f"{kind} torch.bfloat16 torch.float32" for kind in KINDS]
