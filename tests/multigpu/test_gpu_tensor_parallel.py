"""Test weft.nn's tensor-parallel layers and weft.parallel's styles on two GPUs. The functions are shared with the CPU
tests.
"""

from __future__ import annotations

import importlib.util

import gpu_ranks
import pytest
import torch
from support import style_ranks as styles
from support import styled_layers as layers
from support import tensor_parallel_ranks as ranks
from support import titan_functions, titan_ranks

from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
KINDS = ("column", "row", "mlp", "attention")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients(pair: Pool, kind: str, bias: bool, dtype: torch.dtype) -> None:
    pair.run(ranks.agrees, kind, bias, 0 if bias else 1, dtype, False, 3, timeout_s=100)


@pytest.mark.parametrize("kind", KINDS)
def test_without_sequence_parallelism(pair: Pool, kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pair.run(ranks.agrees, kind, True, None, dtype, False, 3, timeout_s=100)


@pytest.mark.parametrize(
    ("sequence_dim", "compiled", "own_norms"),
    [(None, False, False), (None, True, False), (None, False, True), (1, False, False)],
)
def test_a_residual_and_a_norm_that_follow(
    pair: Pool, sequence_dim: int | None, compiled: bool, own_norms: bool
) -> None:
    for had in pair.run(ranks.following, sequence_dim, compiled, own_norms, timeout_s=200):
        assert had == [not own_norms] * (0 if sequence_dim is not None else 4)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_one_graph(pair: Pool, kind: str) -> None:
    pair.run(ranks.agrees, kind, True, 1, torch.float32, True, 2, timeout_s=200)
    pair.run(ranks.agrees, kind, True, None, torch.float32, True, 1, timeout_s=200)


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


# -- weft.parallel's styles


@pytest.mark.parametrize(("optimizer", "bias", "recompute"), [("SGD", False, False), ("AdamW", True, True)])
def test_a_change_of_imports_changes_no_loss(pair: Pool, optimizer: str, bias: bool, recompute: bool) -> None:
    torchs = pair.run(styles.train, "torch", optimizer, bias, recompute, 1, 20, timeout_s=200)
    ours = pair.run(styles.train, "weft", optimizer, bias, recompute, 1, 20, timeout_s=200)
    for (losses, layouts, calls), (torchs_losses, torchs_layouts, _) in zip(ours, torchs, strict=True):
        assert all(abs(a / b - 1) <= 1e-5 for a, b in zip(losses, torchs_losses, strict=True)), (losses, torchs_losses)
        assert layouts == torchs_layouts
        times = 2 if recompute else 1
        assert calls == {"all_gather_matmul": 4 * times + 1, "matmul_reduce_scatter": 4 * times}


def test_nor_does_it_without_sequence_parallelism(pair: Pool) -> None:
    torchs = pair.run(styles.train, "torch", "AdamW", True, False, 1, 20, False, timeout_s=200)
    ours = pair.run(styles.train, "weft", "AdamW", True, False, 1, 20, False, timeout_s=200)
    for (losses, layouts, calls), (torchs_losses, torchs_layouts, _) in zip(ours, torchs, strict=True):
        assert all(abs(a / b - 1) <= 1e-5 for a, b in zip(losses, torchs_losses, strict=True)), (losses, torchs_losses)
        assert layouts == torchs_layouts
        assert calls == {"columns": 10, "row": 4, "gathered_columns": 1}


def test_with_fsdp() -> None:
    with Pool(4, backend="nccl") as four:
        torchs = four.run(styles.train, "torch", "AdamW", True, True, 2, 20, timeout_s=200)
        ours = four.run(styles.train, "weft", "AdamW", True, True, 2, 20, timeout_s=200)
    for (losses, layouts, _), (torchs_losses, torchs_layouts, _) in zip(ours, torchs, strict=True):
        assert all(abs(a / b - 1) <= 1e-5 for a, b in zip(losses, torchs_losses, strict=True)), (losses, torchs_losses)
        assert layouts == torchs_layouts


def test_a_block_compiles_in_one_graph(pair: Pool) -> None:
    for apart, calls in pair.run(styles.block_compiled, "weft", True, timeout_s=200):
        assert apart < 1e-4
        assert calls == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
    for apart, calls in pair.run(styles.block_compiled, "weft", True, False, timeout_s=200):
        assert apart < 1e-4
        assert calls == {"columns": 5, "row": 2}


@pytest.mark.parametrize("name", layers.LINEARS)
def test_layers(pair: Pool, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        calls = pair.run(layers.linears, name, dtype, 8, False, timeout_s=60)
        assert calls == [layers.LINEARS[name][-1]] * 2


@pytest.mark.parametrize("name", layers.INPUTS)
def test_inputs_are_gathered_once(pair: Pool, name: str) -> None:
    assert pair.run(layers.inputs, name, timeout_s=60) == [layers.INPUTS[name][-1]] * 2


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install transformers"
)
def test_a_hugging_face_llama(pair: Pool) -> None:
    torchs = pair.run(styles.hugging_face, "torch", 20, timeout_s=200)
    ours = pair.run(styles.hugging_face, "weft", 20, timeout_s=200)
    for (losses, calls), (torchs_losses, _) in zip(ours, torchs, strict=True):
        assert all(abs(a / b - 1) <= 1e-5 for a, b in zip(losses, torchs_losses, strict=True)), (losses, torchs_losses)
        assert calls == {"all_gather_matmul": 5, "matmul_reduce_scatter": 4}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "weights frozen"])
def test_torchtitans_functions(pair: Pool, frozen: bool) -> None:
    assert [saved[0] for saved in pair.run(titan_functions.functions, 8, frozen, timeout_s=60)] == [5 * 2 * 4] * 2


def test_torchtitans_functions_compile(pair: Pool) -> None:
    assert max(pair.run(titan_functions.functions_compiled, timeout_s=100)) < 1e-4


def test_recomputing_in_parts(pair: Pool) -> None:
    for apart, gathers, scatters in pair.run(styles.recomputed_in_parts, timeout_s=60):
        assert apart < 1e-4
        assert (gathers, scatters) == (2, 2)


@pytest.mark.skipif(bool(titan_ranks.missing()), reason=titan_ranks.missing())
@pytest.mark.parametrize("checkpointing", ["none", "full", "op"])
def test_torchtitans_debug_llama(pair: Pool, checkpointing: str) -> None:
    torchs = pair.run(titan_ranks.train, "torch", checkpointing, 1, 20, timeout_s=200)
    ours = pair.run(titan_ranks.train, "weft", checkpointing, 1, 20, timeout_s=200)
    for (losses, calls), (torchs_losses, _) in zip(ours, torchs, strict=True):
        assert all(abs(a / b - 1) <= 1e-5 for a, b in zip(losses, torchs_losses, strict=True)), (losses, torchs_losses)
        assert calls == {"all_gather_matmul": 5, "matmul_reduce_scatter": 4}
