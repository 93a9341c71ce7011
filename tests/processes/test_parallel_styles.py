"""weft.parallel's styles on CPU processes.

A Llama with these styles learns like a Llama with torch's styles, also with FSDP2 and activation checkpointing. A block
compiles. For every layout, results, gradients and parameters of a layer equal torch's.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from support import style_ranks as ranks
from support import styled_layers as layers
from support import titan_functions, titan_ranks
from support.slow import in_turn, slow

from weft.launch import Pool


def equal(found: list[float], torchs: list[float]) -> bool:
    return len(found) == len(torchs) and all(abs(a / b - 1) <= 1e-5 for a, b in zip(found, torchs, strict=True))


def learns_alike(pool: Pool, world: int, how: tuple[Any, ...], wanted: dict[str, int]) -> None:
    """Train some steps in fp32 by torch's styles and by weft's. Losses must be equal, and DTensors must have equal
    layouts.

    wanted: weft's calls in the last step. how: the arguments of `train`.
    """
    torchs = pool.run(ranks.train, "torch", *how, ranks=world, timeout_s=100)
    ours = pool.run(ranks.train, "weft", *how, ranks=world, timeout_s=100)
    for (losses, layouts, calls), (torchs_losses, torchs_layouts, torchs_calls) in zip(ours, torchs, strict=True):
        assert equal(losses, torchs_losses), (losses, torchs_losses)
        assert len(losses) < 20 or losses[-1] < losses[0] - 0.05
        assert layouts == torchs_layouts
        assert calls == wanted
        assert torchs_calls == {}


@pytest.mark.parametrize(
    ("world", "optimizer", "bias", "recompute", "data_parallel", "steps"),
    [
        slow(2, "SGD", False, False, 1, 20),
        (2, "AdamW", True, True, 1, 3),
        slow(4, "SGD", False, True, 2, 5),
    ],
)
def test_a_change_of_imports_changes_no_loss(
    pool: Pool, world: int, optimizer: str, bias: bool, recompute: bool, data_parallel: int, steps: int
) -> None:
    # There are two layers with two gathers and two scatters each, which run twice with recomputation, and a gather for
    # the output.
    times = 2 if recompute else 1
    calls = {"all_gather_matmul": 4 * times + 1, "matmul_reduce_scatter": 4 * times}
    learns_alike(pool, world, (optimizer, bias, recompute, data_parallel, steps), calls)


@pytest.mark.parametrize(
    ("world", "optimizer", "bias", "recompute", "data_parallel", "steps"),
    [slow(2, "AdamW", True, False, 1, 5), slow(4, "SGD", False, True, 2, 5)],
)
def test_nor_does_it_without_sequence_parallelism(
    pool: Pool, world: int, optimizer: str, bias: bool, recompute: bool, data_parallel: int, steps: int
) -> None:
    times = 2 if recompute else 1
    calls = {"columns": 10 * times, "row": 4 * times, "gathered_columns": 1}
    learns_alike(pool, world, (optimizer, bias, recompute, data_parallel, steps, False), calls)


@pytest.mark.parametrize(
    ("sequence", "wanted"),
    [slow(True, {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}), slow(False, {"columns": 5, "row": 2})],
    ids=["sequence parallel", ""],
)
def test_a_block_compiles_in_one_graph(pool: Pool, sequence: bool, wanted: dict[str, int]) -> None:
    for apart, calls in pool.run(ranks.block_compiled, "weft", True, sequence, ranks=2, timeout_s=100):
        assert apart < 1e-5
        assert calls == wanted


@pytest.mark.parametrize(
    ("name", "world"), [*in_turn(layers.LINEARS, [2, 1]), *(slow(name, 4) for name in layers.LINEARS)]
)
def test_layers(pool: Pool, name: str, world: int) -> None:
    calls = pool.run(layers.linears, name, torch.float32, 8, False, ranks=world, timeout_s=60)
    assert calls == [layers.LINEARS[name][-1]] * world


COLUMNS, ROWS = "columns of a sequence", "rows to a sequence"


@pytest.mark.parametrize(
    ("name", "dtype", "features", "own"),
    [
        (COLUMNS, torch.float64, 8, False),
        (ROWS, torch.float64, 8, False),
        (COLUMNS, torch.float32, 7, False),
        (COLUMNS, torch.float32, 8, True),
        (ROWS, torch.float32, 8, True),
    ],
)
def test_what_is_left_to_torch(pool: Pool, name: str, dtype: torch.dtype, features: int, own: bool) -> None:
    """weft leaves other dtypes, features that do not divide evenly, and linears of other classes to torch."""
    assert pool.run(layers.linears, name, dtype, features, own, ranks=2, timeout_s=60) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
@pytest.mark.parametrize("name", ["columns", COLUMNS, "rows", ROWS])
def test_an_input_of_another_dtype_on_one_rank_is_refused_by_all(pool: Pool, name: str, dtype: torch.dtype) -> None:
    """torch's code would raise on this rank alone, or wait for peers in an all-gather."""
    for kind, text in pool.run(layers.of_other_dtypes, name, dtype, ranks=2, timeout_s=60):
        assert kind == "RefusedError"
        assert text.startswith("rank 0: ")
        assert f"x is {dtype} on cpu, but the weight is torch.float32 on cpu: use one dtype" in text


@pytest.mark.parametrize("name", layers.INPUTS)
def test_inputs_are_gathered_once(pool: Pool, name: str) -> None:
    assert pool.run(layers.inputs, name, ranks=2, timeout_s=60) == [layers.INPUTS[name][-1]] * 2


@pytest.mark.parametrize("name", layers.UNLIKE)
def test_what_one_layer_gathered_may_not_do_for_another(pool: Pool, name: str) -> None:
    pool.run(layers.unlike, name, ranks=2, timeout_s=60)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install transformers"
)
def test_a_hugging_face_llama(pool: Pool) -> None:
    torchs = pool.run(ranks.hugging_face, "torch", 20, ranks=2, timeout_s=100)
    ours = pool.run(ranks.hugging_face, "weft", 20, ranks=2, timeout_s=100)
    for (losses, calls), (torchs_losses, _) in zip(ours, torchs, strict=True):
        assert equal(losses, torchs_losses), (losses, torchs_losses)
        assert losses[-1] < losses[0] - 0.05
        assert calls == {"all_gather_matmul": 5, "matmul_reduce_scatter": 4}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "weights frozen"])
@pytest.mark.parametrize(("world", "k"), [(1, 8), (2, 8), slow(4, 8), (3, 8)])
def test_torchtitans_functions(pool: Pool, world: int, k: int, frozen: bool) -> None:
    """Each rank saves only its own part of x, for any number of ranks. Columns are not divisible by three here."""
    for rank, saved in enumerate(pool.run(titan_functions.functions, k, frozen, ranks=world, timeout_s=60)):
        assert saved[0] == 5 * world * (k // world + (rank < k % world))


def test_torchtitans_functions_refuse_what_autograd_would_not_keep(pool: Pool) -> None:
    for found in pool.run(titan_functions.of_inference, ranks=2, timeout_s=60):
        for name, text in zip(("AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter"), found, strict=True):
            assert text.startswith(
                f"RefusedError: rank 1: {name} needs gradients, but an input was created in torch.inference_mode()"
            )


def test_torchtitans_functions_refuse_wrong_operands_on_all_ranks(pool: Pool) -> None:
    """An error that only one rank raised would pair its next call with the peers' current call."""
    for found in pool.run(titan_functions.of_wrong_operands, ranks=2, timeout_s=60):
        assert found.pop("") == "nothing"  # the group is still usable
        for said, error in found.items():
            assert error.startswith(f"RefusedError: rank 1: {said}: pass "), error


@pytest.mark.slow
def test_torchtitans_functions_compile(pool: Pool) -> None:
    assert max(pool.run(titan_functions.functions_compiled, ranks=2, timeout_s=100)) < 1e-4


def test_recomputing_in_parts(pool: Pool) -> None:
    for apart, gathers, scatters in pool.run(ranks.recomputed_in_parts, ranks=2, timeout_s=60):
        assert apart < 1e-5
        assert (gathers, scatters) == (2, 2)


@pytest.mark.skipif(bool(titan_ranks.missing()), reason=titan_ranks.missing())
@pytest.mark.parametrize(("world", "checkpointing", "data_parallel"), [(2, "op", 1), (4, "full", 2)])
def test_torchtitans_debug_llama(pool: Pool, world: int, checkpointing: str, data_parallel: int) -> None:
    """torchtitan's own code divides the model, recomputes activations and applies FSDP."""
    torchs = pool.run(titan_ranks.train, "torch", checkpointing, data_parallel, 20, ranks=world, timeout_s=100)
    ours = pool.run(titan_ranks.train, "weft", checkpointing, data_parallel, 20, ranks=world, timeout_s=100)
    for (losses, calls), (torchs_losses, torchs_calls) in zip(ours, torchs, strict=True):
        assert equal(losses, torchs_losses), (losses, torchs_losses)
        assert calls == {"all_gather_matmul": 5, "matmul_reduce_scatter": 4}
        assert torchs_calls == {}
