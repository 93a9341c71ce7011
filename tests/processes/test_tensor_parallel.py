"""weft.nn's tensor-parallel layers on CPU processes: results and gradients against stock layers in float64, torch.compile,
activation checkpointing, autocast, copies, checkpoints, bad input."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tensor_parallel_ranks as ranks
from support import tensor_parallel_state_ranks as state_ranks
from support.slow import mostly, pairs, slow

from weft.launch import Pool

KINDS = ("column", "row", "mlp", "attention")

SOME = [("mlp", 1, True), ("attention", 2, True), *((kind, 4, kind in ("mlp", "row")) for kind in KINDS)]


@pytest.mark.parametrize(
    ("kind", "world", "bias"),
    [one if one in SOME else slow(*one) for one in itertools.product(KINDS, (1, 2, 4), (False, True))],
)
def test_results_and_gradients(pool: Pool, world: int, kind: str, bias: bool) -> None:
    sequence_dim = 0 if bias else 1  # both, with two sequences in a batch
    pool.run(ranks.agrees, kind, bias, sequence_dim, torch.float32, False, 3, ranks=world, timeout_s=100)


@pytest.mark.parametrize(
    ("world", "kind"), pairs([1, 2, 4], KINDS, (1, "attention"), (2, "mlp"), (4, "column"), (4, "row"))
)
def test_without_sequence_parallelism(pool: Pool, world: int, kind: str) -> None:
    dtypes = (torch.float32, torch.bfloat16) if world == 2 else (torch.float32,)
    for dtype in dtypes:
        pool.run(ranks.agrees, kind, world != 1, None, dtype, False, 2, ranks=world, timeout_s=100)


@pytest.mark.parametrize(
    ("world", "sequence_dim", "compiled", "own_norms"),
    [
        slow(2, None, False, False),
        (4, None, False, False),
        slow(2, None, True, False),
        (2, None, False, True),
        slow(2, 1, False, False),
    ],
)
def test_a_residual_and_a_norm_that_follow(
    pool: Pool, world: int, sequence_dim: int | None, compiled: bool, own_norms: bool
) -> None:
    """A norm is fused into the all-reduce only if it is torch's own class."""
    for had in pool.run(ranks.following, sequence_dim, compiled, own_norms, ranks=world, timeout_s=200):
        calls = 0 if sequence_dim is not None else 4
        assert had == [not own_norms] * calls


def test_a_norm_that_is_watched_is_called(pool: Pool) -> None:
    for heard in pool.run(ranks.watched_norms, ranks=2, timeout_s=60):
        assert heard == dict.fromkeys(heard, 1)


@pytest.mark.parametrize("kind", mostly(KINDS, "mlp", "attention"))
def test_bf16(pool: Pool, kind: str) -> None:
    pool.run(ranks.agrees, kind, True, 1, torch.bfloat16, False, 2, ranks=2, timeout_s=100)


@pytest.mark.parametrize(("kind", "sequence_dim"), pairs(KINDS, [1, None], ("attention", 1)))
def test_compiled_in_one_graph(pool: Pool, kind: str, sequence_dim: int | None) -> None:
    pool.run(ranks.agrees, kind, True, sequence_dim, torch.float32, True, 2, ranks=2, timeout_s=200)


BLOCKS = [(2, True, False), (2, False, False), (4, False, True), (2, False, True, True), (2, False, True)]


@pytest.mark.parametrize("ways", [BLOCKS[1:4], slow(BLOCKS)], ids=["some", "all"])
def test_a_block_is_the_same_on_any_number_of_ranks(pool: Pool, ways: list[tuple[Any, ...]]) -> None:
    """The block has norms, and is eager or compiled, with or without recomputation. Gradients of replicated parameters
    are equal on all ranks.
    """
    (one,) = pool.run(ranks.block_gradients, False, False, ranks=1, timeout_s=100)
    for world, *how in ways:
        for found in pool.run(ranks.block_gradients, *how, ranks=world, timeout_s=200):
            assert found.keys() == one.keys()
            for name, values in found.items():
                close = torch.allclose(torch.tensor(values), torch.tensor(one[name]), rtol=1e-4, atol=1e-5)
                assert close, (name, world, how)


def test_checkpoints_have_all_ranks_parts(pool: Pool, tmp_path: Path) -> None:
    names, again, *_ = pool.run(state_ranks.saved_and_loaded, str(tmp_path), ranks=4, timeout_s=100)
    assert names == again
    assert {"mlp.up_proj.weight [40, 24]", "mlp.up_proj.bias [40]", "mlp.down_proj.weight [24, 40]"} < set(names)
    assert {"mlp.down_proj.bias [24]", "norm.weight [24]", "experts.down_proj [4, 8, 12]"} < set(names)


@pytest.mark.parametrize("recompute", [slow(False), True], ids=["", "recomputed"])
def test_a_block_under_fsdp(pool: Pool, recompute: bool) -> None:
    assert max(pool.run(state_ranks.sharded_by_fsdp, recompute, ranks=4, timeout_s=100)) < 1e-4


def test_layers_on_meta_are_drawn_when_fsdp_has_divided_them(pool: Pool) -> None:
    pool.run(state_ranks.drawn_under_fsdp, ranks=4, timeout_s=60)


def test_a_rank_that_does_not_come_to_a_norms_backward_is_missed(pool: Pool) -> None:
    found, _ = pool.run(ranks.norm_alone, ranks=2, timeout_s=60)
    assert found.startswith("DeadlineError: ")
    assert "the gradient of a replicated parameter" in found


def test_autocast_is_as_for_linear(pool: Pool) -> None:
    for found in pool.run(ranks.autocast, ranks=2, timeout_s=60):
        assert found == [f"{kind} torch.bfloat16 torch.float32" for kind in KINDS]


def test_handling_and_bad_input(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(ranks.handled, ranks=2, timeout_s=60)):
        assert found.pop("extra") == (
            f"ColumnParallelLinear(in_features=8, out_features=8, bias=True, rank={rank} of 2, sequence_dim=1)"
        )
        expected = {
            "columns": "ValueError: out_features=9 must be positive and divisible by world_size=2: pass 10",
            "rows": "ValueError: in_features=9 must be positive and divisible by world_size=2",
            "width": "ValueError: intermediate=9 must be positive and divisible by world_size=2",
            "heads": "ValueError: heads=3 must be positive and divisible by world_size=2",
            "kv heads": "ValueError: heads=12 must be divisible by kv_heads=8",
            "few kv heads": "ValueError: kv_heads=1 must be positive and divisible by world_size=2",
            "head size": "ValueError: hidden=17 must be divisible by heads=8: change one of them, or pass head_dim",
            "sequence": "ValueError: sequence_dim=2 is not supported: pass 1 for [B, S, H], 0 for [S, B, H], or",
            "no linear": "ValueError: linear is a Identity: pass a torch.nn.Linear",
            "odd": "ValueError: head_dim=5 must be even",
            "no group": "ValueError: group='nobody' is not the name of a process group",
            "mesh": "ValueError: group=DeviceMesh(",
            "x": "RefusedError: ranks 0, 1: ParallelMLP: x has shape (2, 5, 5), but sequence_dim=1 needs [B, S/W, 8]: "
            "pass such a tensor",
            "length": "RefusedError: ranks 0, 1: RowParallelLinear: x has shape (2, 5, 4), whose size 5 in dimension "
            "sequence_dim=1 must be divisible by world_size=2",
            "two dimensions": "RefusedError: ranks 0, 1: ParallelMLP: x has shape (5, 8), but sequence_dim=1 needs [B, S/W, 8]: "
            "pass such a tensor, or make the layer with sequence_dim=0 for [S/W, 8]",
            "dtype here": "RefusedError: rank 0: ParallelMLP: x is torch.float16 on cpu, but the weight is "
            "torch.float32 on cpu: use one dtype and device",
            "two dimensions here": "RefusedError: rank 0: ParallelAttention: x has shape (5, 8), but sequence_dim=1 needs "
            "[B, S/W, 8]: pass such a tensor",
            "two dimensions of a sequence": "RefusedError: ranks 0, 1: ParallelAttention: x has shape (5, 8), but sequence_dim=0 "
            "needs [S/W, B, 8]: pass such a tensor",
            "norm": "RefusedError: ranks 0, 1: RowParallelLinear: norm is a weft.nn.RMSNorm, whose gradient is summed over ranks, "
            "but with sequence_dim=None x is replicated: pass torch's",
            "inference": "RefusedError: ranks 0, 1: a row-parallel layer needs gradients, but an input was",
            "whole": "RefusedError: ranks 0, 1: RowParallelLinear: x has shape (2, 5, 8), but sequence_dim=None needs [..., S, 4]",
            "no tensor": "RefusedError: ranks 0, 1: RowParallelLinear: x is a list: pass a torch.Tensor",
        }
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert found[name].startswith(text), (name, found[name])
        assert found["mesh"].endswith("is a DeviceMesh: pass the group of one dimension, its get_group(dim)")
