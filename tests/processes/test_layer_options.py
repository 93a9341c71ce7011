"""Layers to which ranks pass different options: no rank gets a result.

First every option of every layer, for new shapes and for shapes that all ranks have called with both options. Then
actions that a single rank may take, such as calling a norm or compiling a layer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.expert_rows_in_torch import fused
from support.on_ranks import error_of
from support.slow import slow
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.launch import Pool
from weft.parallel import ColwiseParallel, RowwiseParallel
from weft.parallel.functions import AllGatherLinear, LinearReduceScatter

HIDDEN, HEADS, LENGTH, WORLD = 16, 4, 4, 2
X = torch.linspace(-1, 1, 2 * LENGTH * HIDDEN).view(2, LENGTH, HIDDEN)
Call = Callable[[dist.ProcessGroup, bool], Any]
"""A function that calls a layer on `group`. Its second argument is True for the other option."""


def x_of(sequence_dim: int | None) -> torch.Tensor:
    if sequence_dim is None:
        return X
    return X.chunk(WORLD, 1)[dist.get_rank()].movedim(1, sequence_dim)


def attention(sequence_dim: int | None, other: dict[str, Any] | None = None, **given: Any) -> Call:
    """Return calls of an attention layer. other: arguments of the layer with the other option. given: arguments of the
    call.
    """

    def call(group: dist.ProcessGroup, differs: bool) -> Any:
        options = (other or {}) if differs else {}
        options = {"heads": HEADS, "sequence_dim": sequence_dim, **options}
        layer = weft.nn.ParallelAttention(HIDDEN, group=group, **options)
        return layer(x_of(sequence_dim), **(given if differs else {}))

    return call


def mlp(
    sequence_dim: int | None, one: dict[str, Any], other: dict[str, Any], given: dict[str, Any] | None = None
) -> Call:
    def call(group: dist.ProcessGroup, differs: bool) -> Any:
        layer = weft.nn.ParallelMLP(HIDDEN, 32, group=group, sequence_dim=sequence_dim, **(other if differs else one))
        return layer(x_of(sequence_dim), **(given or {} if differs else {}))

    return call


def followed(sequence_dim: int | None, norm: Callable[[bool], nn.Module | None], residual: bool) -> Call:
    def call(group: dist.ProcessGroup, differs: bool) -> Any:
        layer = weft.nn.RowParallelLinear(2 * HIDDEN, HIDDEN, group=group, sequence_dim=sequence_dim)
        x, added = (X if sequence_dim is None else X.movedim(1, sequence_dim)), x_of(sequence_dim)
        return layer(x, residual=added if residual and differs else None, norm=norm(differs))

    return call


def biased(kind: type[nn.Module], sequence_dim: int | None) -> Call:
    """Return a call with backward. Column-parallel layers with a replicated x have no collective in forward that could
    compare options.
    """

    def call(group: dist.ProcessGroup, differs: bool) -> Any:
        layer = kind(HIDDEN, HIDDEN, not differs, group=group, sequence_dim=sequence_dim)
        column = kind is weft.nn.ColumnParallelLinear
        x = x_of(sequence_dim).clone() if column else X.tensor_split(WORLD, 2)[dist.get_rank()].contiguous()
        y = layer(x.requires_grad_())
        return torch.autograd.grad(y.sum(), x) if column and sequence_dim is None else y

    return call


def normed(group: dist.ProcessGroup, differs: bool) -> Any:
    norm = weft.nn.RMSNorm(HIDDEN, eps=1e-3 if differs else 1e-5, group=group)
    return weft.nn.ColumnParallelLinear(HIDDEN, HIDDEN, group=group)(norm(x_of(1)))


def experts(**other: Any) -> Call:
    def call(group: dist.ProcessGroup, differs: bool) -> Any:
        layer = weft.nn.ExpertParallelMLP(HIDDEN, 8, 4, group=group, capacity=64, **(other if differs else {}))
        index = torch.arange(8).view(-1, 1) % 4
        return layer(X, index, torch.ones(8, 1))

    return call


def trained(of_fused: bool) -> Call:
    """Return a call of experts for which a rank may need no gradient of x."""

    def call(group: dist.ProcessGroup, differs: bool) -> Any:
        layer = weft.nn.ExpertParallelMLP(HIDDEN, 8, 4, group=group, capacity=64)
        with fused() if of_fused else contextlib.nullcontext():
            return layer(X.clone().requires_grad_(not differs), torch.arange(8).view(-1, 1) % 4, torch.ones(8, 1))

    return call


def styled(style: Callable[[], Any]) -> Call:
    def call(group: dist.ProcessGroup, differs: bool) -> Any:
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
        parallelize_module(model, DeviceMesh.from_group(group, "cpu"), {"0": style()})
        model[0].bias = None if differs else model[0].bias
        rowwise = isinstance(style(), RowwiseParallel)
        return model(X.tensor_split(WORLD, 2)[dist.get_rank()].contiguous() if rowwise else x_of(1).contiguous())

    return call


def function(kind: Any) -> Call:
    def call(group: dist.ProcessGroup, differs: bool) -> Any:
        x, w = torch.ones(4, HIDDEN), torch.ones(HIDDEN, HIDDEN)
        return kind.apply(x, w, None if differs else torch.ones(HIDDEN), group, group.group_name)

    return call


def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


def eps(differs: bool) -> nn.Module:
    return nn.RMSNorm(HIDDEN, eps=1e-3 if differs else 1e-5)


def given(differs: bool) -> nn.Module | None:
    return eps(True) if differs else None


def kinds(differs: bool) -> nn.Module:
    return nn.LayerNorm(HIDDEN, bias=False) if differs else nn.RMSNorm(HIDDEN, 1e-5)


TANH = functools.partial(F.gelu, approximate="tanh")
ROTARY, MASK = weft.nn.rotary_embedding(LENGTH, HIDDEN // HEADS), torch.ones(LENGTH, LENGTH, dtype=torch.bool)
BOTH: dict[str, Callable[[int | None], Call]] = {
    "rotary": lambda dim: attention(dim, rotary=ROTARY),
    "mask": lambda dim: attention(dim, mask=MASK),
    "causal": lambda dim: attention(dim, {"causal": False}),
    "heads of the same widths": lambda dim: attention(dim, {"heads": 2, "head_dim": 8}),
    "fewer heads of keys": lambda dim: attention(dim, {"kv_heads": 2}),
    "bias of attention": lambda dim: attention(dim, {"bias": True}),
    "norm of attention": lambda dim: attention(dim, norm=eps(False)),
    "activation": lambda dim: mlp(dim, {}, {"activation": F.gelu}),
    "a function of one's own": lambda dim: mlp(dim, {}, {"activation": cube}),
    "options of a function": lambda dim: mlp(dim, {"activation": F.gelu}, {"activation": TANH}),
    "options of a module": lambda dim: mlp(dim, {"activation": nn.GELU()}, {"activation": nn.GELU("tanh")}),
    "bias of an MLP": lambda dim: mlp(dim, {}, {"bias": True}),
    "norm of an MLP": lambda dim: mlp(dim, {}, {}, {"norm": eps(False)}),
    "norm": lambda dim: followed(dim, given, False),
    "eps": lambda dim: followed(dim, eps, False),
    "another norm": lambda dim: followed(dim, kinds, False),
    "residual": lambda dim: followed(dim, lambda differs: None, True),
    "bias of columns": lambda dim: biased(weft.nn.ColumnParallelLinear, dim),
    "bias of rows": lambda dim: biased(weft.nn.RowParallelLinear, dim),
}  # fmt: skip
CASES: dict[str, Call] = {
    **{f"{name}, sequence_dim={dim}": case(dim) for name, case in BOTH.items() for dim in (1, None)},
    "sequence_dim": attention(1, {"sequence_dim": 0}),
    "no sequence_dim": attention(1, {"sequence_dim": None}),
    "eps of a norm before": normed,
    "activation of experts": experts(activation=F.gelu),
    "gated": experts(gated=False),
    "gradients of experts": trained(False),
    "gradients of fused experts": trained(True),
    "bias of AllGatherLinear": function(AllGatherLinear),
    "bias of LinearReduceScatter": function(LinearReduceScatter),
}


STYLED: dict[str, Call] = {
    "bias of ColwiseParallel": styled(lambda: ColwiseParallel(input_layouts=Shard(1))),
    "bias of RowwiseParallel": styled(lambda: RowwiseParallel(output_layouts=Shard(1))),
    "bias of a reduced RowwiseParallel": styled(RowwiseParallel),
}


def called_differently(group: dist.ProcessGroup, cases: list[str], known: bool) -> dict[str, tuple[str, str]]:
    """Pass another option on rank 1."""
    found = {}
    for name in cases:
        own = dist.new_group([0, 1])
        if known:
            for differs in (False, True, False):
                CASES[name](own, differs)
        found[name] = error_of(lambda name=name, own=own: CASES[name](own, group.rank() == 1))
        dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize("known", [slow(False), True], ids=["new", "known"])
def test_ranks_that_give_a_layer_other_options_get_no_result(pool: Pool, known: bool) -> None:
    for found in pool.run(called_differently, list(CASES), known, ranks=2, timeout_s=120):
        kinds = {name: error for name, error in found.items() if error[0] != "DisagreementError"}
        assert not kinds
    assert "rotary=None" in found["rotary, sequence_dim=1"][1]
    assert "rotary=given" in found["rotary, sequence_dim=1"][1]
    assert "eps=0.001" in found["eps of a norm before"][1]
    for name in ("gradients of experts", "gradients of fused experts"):
        assert "gradients=x and gate_up_proj and down_proj" in found[name][1]
        assert "gradients=gate_up_proj and down_proj" in found[name][1]


def styled_differently(group: dist.ProcessGroup) -> dict[str, tuple[str, str]]:
    found = {}
    for name, call in STYLED.items():
        for known in (False, True):
            own = dist.new_group(
                [0, 1]
            )  # not destroyed, because DTensor reuses the group of the first mesh for equal meshes
            for differs in (False, True, False) if known else ():
                call(own, differs)
            found[f"{name}, {known=}"] = error_of(lambda call=call, own=own: call(own, group.rank() == 1))
    return found


def test_ranks_that_divide_other_linears_get_no_result() -> None:
    with Pool(2) as own:
        for found in own.run(styled_differently, timeout_s=120):
            assert {kind for kind, _ in found.values()} == {"DisagreementError"}, found


def called_the_same(group: dist.ProcessGroup) -> None:
    """Make layers and functions on each rank separately, as separate processes do. All options are equal."""
    for call in CASES.values():
        for differs in (False, True):
            call(group, differs)
    for activation in (lambda x: x, nn.Sequential(nn.SiLU()), functools.partial(cube)):
        weft.nn.ParallelMLP(HIDDEN, 32, group=group, activation=activation)(x_of(1))


def test_the_same_options_make_the_same_calls(pool: Pool) -> None:
    pool.run(called_the_same, ranks=2, timeout_s=60)


def on_its_own(group: dist.ProcessGroup) -> None:
    """Call a norm, whose forward is not collective, on rank 1 only. Then make calls with all ranks."""
    torch.manual_seed(0)
    norm, other = (weft.nn.RMSNorm(HIDDEN, eps=eps, group=group) for eps in (1e-5, 1e-3))
    layer = weft.nn.ParallelMLP(HIDDEN, 32, group=group)
    for _ in range(2):
        if group.rank():
            other(x_of(1))
        layer(x_of(1), norm=norm)
        layer(norm(x_of(1)))


def test_one_rank_may_call_a_norm_on_its_own(pool: Pool) -> None:
    pool.run(on_its_own, ranks=2, timeout_s=30)


def compiled_by_one(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    layer = weft.nn.ParallelMLP(HIDDEN, 32, group=group)
    with torch.no_grad():
        wanted = layer(x_of(1))
        call = torch.compile(layer, backend="eager", fullgraph=True) if group.rank() else layer
        assert torch.equal(call(x_of(1)), wanted)


def test_one_rank_may_compile_a_layer(pool: Pool) -> None:
    pool.run(compiled_by_one, ranks=2, timeout_s=60)


def refused_and_called_again(group: dist.ProcessGroup) -> None:
    """Check that options of a refused layer are not compared in the next call."""
    norm, other = (weft.nn.RMSNorm(HIDDEN, eps=eps, group=group) for eps in (1e-5, 1e-3))
    layer = weft.nn.ParallelMLP(HIDDEN, 32, group=group)
    x = (other if group.rank() else norm)(x_of(1))
    kind, _ = error_of(lambda: layer(x.long() if group.rank() else x))
    assert kind == "RefusedError"
    layer(norm(x_of(1)))


def test_a_refusal_takes_along_what_was_noted(pool: Pool) -> None:
    pool.run(refused_and_called_again, ranks=2, timeout_s=30)
