"""Bad arguments of layers and of modules with embedding tables: in the constructor, and in a call.

Constructors of layers do not communicate, so they raise on this rank only. Modules with tables are constructed by all
ranks together, so every rank raises. A bad argument of a call raises on every rank. Afterwards a good call must work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from operators_called import TABLES, Features
from support.on_ranks import told
from torch import nn

import weft
from weft import nn as layers
from weft.launch import Pool

HIDDEN = 8
Make = Callable[..., nn.Module]
LAYERS: dict[str, Make] = {
    "ColumnParallelLinear": partial(layers.ColumnParallelLinear, HIDDEN, HIDDEN),
    "RowParallelLinear": partial(layers.RowParallelLinear, 2 * HIDDEN, HIDDEN),
    "ParallelMLP": partial(layers.ParallelMLP, HIDDEN, 16),
    "ParallelAttention": partial(layers.ParallelAttention, HIDDEN, 4),
    "RMSNorm": partial(layers.RMSNorm, HIDDEN),
    "ExpertParallelMLP": partial(layers.ExpertParallelMLP, HIDDEN, 16, 4),
}
NO_FLAG = "is a str: pass True or False"
NO_FUNCTION = "pass a function of one tensor, such as torch.nn.functional.silu, or a module, such as torch.nn.SiLU()"
NO_DEVICE = "pass a torch.device, such as 'cuda' or 'cpu'"
# (layer, argument of the constructor, value, words of the error)
CONSTRUCTORS: list[tuple[str, str, Any, str]] = [
    *((name, "device", "gpu", "device='gpu' is not a device (Expected one of cpu, cuda, ") for name in LAYERS),
    ("RMSNorm", "device", [0], f"device=[0] is a list: {NO_DEVICE}"),
    ("ParallelMLP", "device", 2**70, "device=1180591620717411303424 is not a device ("),
    ("ColumnParallelLinear", "device", "hpu", "device='hpu' cannot be used here ("),
    ("ColumnParallelLinear", "bias", "no", f"bias='no' {NO_FLAG}"),
    ("ParallelMLP", "bias", np.ones(2), "bias=array([1., 1.]) is a ndarray: pass True or False"),
    ("ParallelMLP", "activation", None, f"activation=None is a NoneType: {NO_FUNCTION}"),
    (
        "ParallelMLP",
        "activation",
        nn.SiLU,
        f"activation=<class 'torch.nn.modules.activation.SiLU'> is a type: {NO_FUNCTION}",
    ),
    ("ParallelAttention", "causal", "no", f"causal='no' {NO_FLAG}"),
    ("ExpertParallelMLP", "gated", "no", f"gated='no' {NO_FLAG}"),
    ("ExpertParallelMLP", "activation", "silu", f"activation='silu' is a str: {NO_FUNCTION}"),
    *(
        ("ExpertParallelMLP", "schedules", value, f"schedules={value!r}: pass a pair, the names of the schedules")
        for value in (None, "serial", ("serial",), ("serial", 3))
    ),
    ("RMSNorm", "elementwise_affine", "no", f"elementwise_affine='no' {NO_FLAG}"),
    *(("RMSNorm", "eps", value, f"eps={value} must be a finite number of at least 0") for value in (-1, math.nan)),
    ("RMSNorm", "dtype", torch.int8, "dtype=torch.int8 is not supported"),
]
SHAPES: list[tuple[Any, str]] = [
    (None, "normalized_shape=None is a NoneType: pass an integer"),
    (-1, "normalized_shape=-1 must be positive"),
    (2**70, "normalized_shape is a number of 71 bits"),
    ([8.0], "normalized_shape[0]=8.0 is a float: pass an integer"),
    ([], "normalized_shape=[] has no dimension"),
]


def constructed(group: dist.ProcessGroup) -> list[str]:
    """Return the error of each bad argument of a constructor."""
    found = [told(partial(LAYERS[name], group=group, **{argument: bad})) for name, argument, bad, _ in CONSTRUCTORS]
    return found + [told(partial(layers.RMSNorm, shape, group=group)) for shape, _ in SHAPES]


def test_constructors_refuse_bad_arguments_by_name() -> None:
    with Pool(1) as alone:
        (found,) = alone.run(constructed, timeout_s=60)
    for text, (*what, words) in zip(found, [*CONSTRUCTORS, *SHAPES], strict=True):
        assert text.startswith(f"ValueError: {words}"), (what, text)


CALLS: dict[str, list[tuple[str, Any, str]]] = {
    "ColumnParallelLinear": [
        ("x", torch.ones(2, 4, HIDDEN).to_sparse(), "x has layout torch.sparse_coo: pass a dense tensor"),
        ("x", nn.UninitializedParameter(), "x is a UninitializedParameter, which has no shape yet"),
    ],
    "RowParallelLinear": [
        ("residual", torch.ones(2, 2, HIDDEN).to_mkldnn(), "residual has layout torch._mkldnn: pass a dense tensor"),
        (
            "residual",
            torch.ones(2, 2, HIDDEN).to(torch.float8_e4m3fn),
            "residual is torch.float8_e4m3fn on cpu: pass a floating",
        ),
        ("norm", nn.RMSNorm, "norm is a type: pass a module, such as nn.RMSNorm(8)"),
    ],
    "ParallelAttention": [("rotary", [], "rotary is []: pass (cos, sin) of all positions")],
    "RMSNorm": [
        ("x", None, "x is a NoneType: pass a torch.Tensor"),
        ("x", torch.ones(2, 4, 3), "x is torch.float32 (2, 4, 3): pass a floating-point tensor [..., 8]"),
        ("x", torch.ones(2, 4, HIDDEN).int(), "x is torch.int32 (2, 4, 8): pass a floating-point tensor [..., 8]"),
    ],
    "ExpertParallelMLP": [
        ("top_k_weights", torch.ones(4, 1).to_mkldnn(), "top_k_weights has layout torch._mkldnn: pass a dense tensor"),
        ("top_k_weights", "inference", "an input was created in torch.inference_mode()"),
    ],
}


def called(group: dist.ProcessGroup, name: str) -> list[str]:
    """Return this rank's error for each bad argument that rank 1 passes in a call, up to the first that is not refused. Good
    calls must work in between.
    """
    torch.manual_seed(0)
    layer, x = LAYERS[name](group=group), torch.ones(2, 4, HIDDEN)
    good: dict[str, Any] = {"x": x}
    if name == "ExpertParallelMLP":
        good = {"x": x[0], "top_k_index": torch.arange(4)[:, None], "top_k_weights": torch.ones(4, 1)}
    # A norm has no collective: the peers' next call raises.
    after = LAYERS["ColumnParallelLinear"](group=group) if name == "RMSNorm" else None
    wanted, found = layer(**good), []
    for argument, bad, _ in CALLS[name]:
        if isinstance(bad, str):
            with torch.inference_mode():
                bad = torch.ones(4, 1)
        given = good | ({argument: bad} if group.rank() == 1 else {})
        text = told(lambda given=given: layer(**given))
        if after is not None and group.rank() != 1:
            text = told(lambda: after(x))
        found.append(text)
        if not text.startswith("RefusedError: "):
            break  # the group may have failed
        assert torch.equal(layer(**good), wanted)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_layers_refuse_bad_arguments_of_a_call_on_every_rank(pool: Pool, name: str) -> None:
    for found in pool.run(called, name, ranks=2, timeout_s=60):
        for text, (_, _, words) in zip(found, CALLS[name], strict=True):
            assert text.startswith("RefusedError: rank 1: "), text
            assert words in text


def other_states(group: dist.ProcessGroup) -> list[str]:
    """Load state dicts of other models, and return the errors."""
    linear, experts = LAYERS["RowParallelLinear"](group=group), LAYERS["ExpertParallelMLP"](group=group)

    def parts(layer: nn.Module, **whole: torch.Tensor) -> str:
        return told(lambda: layers.local_state_dict(layer, whole))

    one_by_one = {
        f"{i}.{name}.weight": torch.ones((HIDDEN, 16) if name == "down_proj" else (16, HIDDEN))
        for i in range(5)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    return [
        parts(linear, weight=torch.ones(HIDDEN, 1)),
        parts(linear, bias=torch.ones(3)),
        parts(experts, gate_up_proj=torch.ones(8, 32, HIDDEN), down_proj=torch.ones(8, HIDDEN, 16)),
        parts(experts, gate_up_proj=torch.ones(4, 32, HIDDEN)),
        parts(experts, **one_by_one),
    ]


def test_state_dicts_of_other_models_are_refused(pool: Pool) -> None:
    """Without the check, each rank would take its part of the first experts of a larger model."""
    for found in pool.run(other_states, ranks=2, timeout_s=60):
        assert found[0].startswith(
            "ValueError: weight has shape (8, 1), but the whole layer has (8, 16): pass the state"
        )
        assert found[1].startswith("ValueError: bias has shape (3,), but the whole layer has (8,): pass the state dict")
        assert found[2].startswith(
            "ValueError: gate_up_proj has shape (8, 32, 8): pass the weights of all num_experts=4"
        )
        assert found[3].startswith("ValueError: down_proj is missing: pass the weights of all num_experts=4 experts")
        assert found[4].startswith(
            "ValueError: the state dict has expert 4, but the module has num_experts=4: pass the"
        )


def replicated_on_a_destroyed_group(group: dist.ProcessGroup) -> str:
    own = dist.new_group([0, 1])
    dist.barrier(group)  # gloo connects the pairs of `own` until both ranks have returned from new_group
    dist.destroy_process_group(own)
    return told(lambda: layers.replicated(nn.Parameter(torch.ones(3)), own))


def test_replicated_parameters_need_a_group_that_exists(pool: Pool) -> None:
    """The forward of `replicated` does not communicate, so without a check the error would come in backward."""
    for text in pool.run(replicated_on_a_destroyed_group, ranks=2, timeout_s=60):
        assert "was destroyed: make a new one" in text


def returns_a_number(group: dist.ProcessGroup) -> list[str]:
    """Let the activation return a number. Return the errors of this call and of a good call after it."""
    layer, x = layers.ParallelMLP(HIDDEN, 16, group=group, activation=len), torch.ones(2, 4, HIDDEN)
    found = [told(partial(layer, x))]
    layer.activation = F.silu
    return [*found, told(partial(layer, x))]


def test_activations_must_return_a_tensor(pool: Pool) -> None:
    for text, after in pool.run(returns_a_number, ranks=2, timeout_s=60):
        said = "ranks 0, 1: ParallelMLP: activation returns an int: pass a function that returns a tensor"
        assert text.startswith(f"RefusedError: {said}")
        assert after == "nothing"


# --- modules with tables ---


class Unprintable:
    """A value whose text cannot be made, as if an error message of weft itself failed."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


NO_TABLES = "pass a list of table configs, such as weft.EmbeddingBagConfig"
MODULES: list[tuple[str, Any, str]] = [
    ("tables", TABLES[0], f"tables is an EmbeddingBagConfig: {NO_TABLES}"),
    ("tables", None, f"tables is a NoneType: {NO_TABLES}"),
    ("device", 0.5, f"device=0.5 is a float: {NO_DEVICE}"),
    ("placement", np.array(0), "placement=array(0) is a ndarray: "),
    ("placement", {0, 1}, "placement={0, 1} is a set: "),
    ("rows_read", np.array(1), "rows_read=array(1) is a ndarray: give a list with one entry per table"),
    ("rows_read", [1, "2"], "table 'items': rows_read='2' must be a number of rows, 0 or more"),
    ("gradients", np.array(["sum", "mean"]), "must be 'mean' or 'sum'"),
    ("bounds_check", np.array(["none", "fatal"]), "must be one of 'fatal', 'warning', 'ignore', 'none'"),
    ("gradients", Unprintable(), "no text"),
    ("dedup", "yes", "dedup='yes' must be True or False"),
    ("dedup", 0, "dedup=0 must be True or False"),
    ("dedup", np.ones(2), "dedup=array([1., 1.]) must be True or False"),
]


def modules_made(group: dist.ProcessGroup, unpooled: bool) -> list[str]:
    """Let rank 1 pass each bad argument to a constructor. Return this rank's errors. A good module must work afterwards."""
    kind = layers.ShardedEmbeddingCollection if unpooled else layers.ShardedEmbeddingBagCollection
    tables = [weft.EmbeddingBagConfig(10, 4, "users", ("u",)), weft.EmbeddingBagConfig(20, 4, "items", ("i",))]
    found = []
    for name, bad, _ in MODULES:
        given = {"tables": tables} | ({name: bad} if group.rank() == 1 else {})
        found.append(told(partial(kind, group=group, **given)))
    kind(tables, group=group)(Features(torch.arange(6), torch.tensor([1, 2, 0, 3]), None))
    return found


@pytest.mark.parametrize("unpooled", [False, True])
def test_modules_refuse_bad_arguments_on_every_rank(pool: Pool, unpooled: bool) -> None:
    for found in pool.run(modules_made, unpooled, ranks=2, timeout_s=60):
        for text, (*what, words) in zip(found, MODULES, strict=True):
            assert text.startswith("RefusedError: arguments refused by rank 1: "), (what, text)
            assert words in text, (what, text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4.0, 8), "length=4.0 is a float: pass the number of positions, an integer"),
        ((-1, 8), "length=-1 must be at least 0"),
        ((4, "8"), "head_dim='8' is a str: pass the size of a head, an integer"),
        ((4, 8, math.nan), "base=nan must be a finite number above 0"),
        ((4, 8, "1e4"), "base='1e4' must be a finite number above 0"),
    ],
)
def test_rotary_embeddings_refuse_bad_sizes(arguments: tuple[Any, ...], words: str) -> None:
    assert told(partial(layers.rotary_embedding, *arguments)).startswith(f"ValueError: {words}")
