"""Errors inside layers on CPU on one rank: every rank is notified, and no call pairs with another call.

Cheapest first: bad arguments (refused before the first collective, and the group stays usable); errors between two
collectives (likewise); errors after the last collective (the group ends). After each refusal the same layer is called
again, and must give its earlier result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import assert_error, error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.launch import Pool
from weft.parallel import ColwiseParallel, RowwiseParallel
from weft.parallel.functions import AllGatherLinear, LinearReduceScatter

BAD_RANK, WORLD = 1, 2
HIDDEN, HEADS, HEAD_DIM, BATCH, LENGTH = 16, 4, 4, 2, 4
ROTARY = weft.nn.rotary_embedding(LENGTH, HEAD_DIM)
Told = dict[str, tuple[str, str, bool]]


def data(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def told(group: dist.ProcessGroup, right: Callable[[], Any], cases: dict[str, Callable[[], Any]]) -> Told:
    """Let rank 1 make the call of each case, and the others the right call. Then all make the right call."""
    found = {}
    with torch.no_grad():
        first = right()
        for name, case in cases.items():
            kind, text = error_of(case if group.rank() == BAD_RANK else right)
            found[name] = kind, text, torch.equal(right(), first)
    return found


def assert_refused(ranks: list[Told], expected: dict[str, str]) -> None:
    for found in ranks:
        assert found.keys() == expected.keys()
        for name, words in expected.items():
            kind, text, same = found[name]
            assert kind == "RefusedError", (name, kind, text)
            assert text.startswith(f"rank {BAD_RANK}: "), (name, text)
            assert words in text, (name, text)
            assert same, name


# --- arguments ---


def attention_arguments(group: dist.ProcessGroup, sequence_dim: int | None) -> Told:
    torch.manual_seed(0)
    options: dict[str, Any] = {"group": group, "sequence_dim": sequence_dim}
    layer = weft.nn.ParallelAttention(HIDDEN, HEADS, **options)
    x = data(BATCH, LENGTH, HIDDEN)
    if sequence_dim is not None:
        x = x.chunk(WORLD, 1)[group.rank()].movedim(1, sequence_dim)
    heads = HEADS // WORLD
    fewer = tuple(t[:1] for t in ROTARY)  # like a rank with one position; this table would be broadcast
    of_meta = torch.polar(torch.ones(LENGTH, HEAD_DIM // 2), torch.zeros(LENGTH, HEAD_DIM // 2))
    assert torch.equal(layer(x, tuple(t.expand(BATCH, -1, -1) for t in ROTARY)), layer(x, ROTARY))
    assert torch.equal(layer(x, [t[None] for t in ROTARY]), layer(x, ROTARY))
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for mask in (
        causal.expand(1, 1, -1, -1),
        causal.expand(BATCH, heads, -1, -1),
        torch.zeros(LENGTH, LENGTH).masked_fill(~causal, -torch.inf),
    ):
        torch.testing.assert_close(layer(x, ROTARY, mask), layer(x, ROTARY))
    return told(
        group,
        lambda: layer(x, ROTARY, torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
        {
            "own positions": lambda: layer(x, fewer),
            "more positions": lambda: layer(x, weft.nn.rotary_embedding(LENGTH + 1, HEAD_DIM)),
            "another batch": lambda: layer(x, tuple(t.expand(BATCH + 1, -1, -1) for t in ROTARY)),
            "heads too": lambda: layer(x, tuple(t[None, None] for t in ROTARY)),
            "half of a head": lambda: layer(x, tuple(t[:, : HEAD_DIM // 2] for t in ROTARY)),
            "complex": lambda: layer(x, of_meta),
            "two complex": lambda: layer(x, (of_meta, of_meta)),
            "one tensor": lambda: layer(x, ROTARY[0]),
            "three": lambda: layer(x, (*ROTARY, ROTARY[0])),
            "integers": lambda: layer(x, tuple(t.long() for t in ROTARY)),
            "elsewhere": lambda: layer(x, tuple(t.to("meta") for t in ROTARY)),
            "mask of a part": lambda: layer(x, ROTARY, causal[:, :3]),
            "mask of all heads": lambda: layer(x, ROTARY, torch.ones(BATCH, HEADS, LENGTH, LENGTH)),
            "mask of one dimension": lambda: layer(x, ROTARY, causal[0]),
            "mask of integers": lambda: layer(x, ROTARY, causal.long()),
            "mask in fp16": lambda: layer(x, ROTARY, causal.half()),
            "mask elsewhere": lambda: layer(x, ROTARY, causal.to("meta")),
            "no mask": lambda: layer(x, ROTARY, [[True]]),
            "residual of one row": lambda: layer(x, ROTARY, residual=x[:1, :1]),
            "residual of integers": lambda: layer(x, ROTARY, residual=x.long()),
            "no residual": lambda: layer(x, ROTARY, residual=1.0),
            "narrow norm": lambda: layer(x, ROTARY, norm=nn.RMSNorm(HIDDEN // 2)),
            "norm without a weight": lambda: layer(x, ROTARY, norm=nn.RMSNorm(2, elementwise_affine=False)),
            "norm on meta": lambda: layer(x, ROTARY, norm=nn.RMSNorm(HIDDEN, device="meta")),
            "no norm": lambda: layer(x, ROTARY, norm=1.0),
            "x on meta": lambda: layer(x.to("meta"), ROTARY),
            "layer on meta": lambda: weft.nn.ParallelAttention(HIDDEN, HEADS, device="meta", **options)(x, ROTARY),
            "all on meta": lambda: weft.nn.ParallelAttention(HIDDEN, HEADS, device="meta", **options)(x.to("meta")),
        },
    )  # fmt: skip


@pytest.mark.parametrize("sequence_dim", [0, 1, None])
def test_arguments_of_attention(pool: Pool, sequence_dim: int | None) -> None:
    takes = "[S, head_dim] = (4, 4) or [B, S, head_dim] = (2, 4, 4): pass (cos, sin) of all positions"
    mask = "broadcasts to [B, heads/W, S, S] = (2, 2, 4, 4)"
    assert_refused(
        pool.run(attention_arguments, sequence_dim, ranks=WORLD),
        {
            "own positions": f"cos of rotary has shape (1, 4), but the whole sequence needs {takes}",
            "more positions": "cos of rotary has shape (5, 4)",
            "another batch": "cos of rotary has shape (3, 4, 4)",
            "heads too": "cos of rotary has shape (1, 1, 4, 4)",
            "half of a head": "cos of rotary has shape (4, 2)",
            "complex": "ParallelAttention: rotary is complex, as Meta's freqs_cis: pass (cos, sin) of all positions, as "
            "weft.nn.rotary_embedding(4, 4) makes them",
            "two complex": "rotary is complex",
            "one tensor": "rotary is a Tensor: pass (cos, sin)",
            "three": "rotary is ['a Tensor', 'a Tensor', 'a Tensor']: pass (cos, sin)",
            "integers": "cos of rotary is torch.int64 on cpu: pass a floating-point tensor on cpu, where x is",
            "elsewhere": "cos of rotary is torch.float32 on meta: pass a floating-point tensor on cpu",
            "mask of a part": f"mask has shape (4, 3): pass a mask for the whole sequence and this rank's heads, which {mask}",
            "mask of all heads": "mask has shape (2, 4, 4, 4)",
            "mask of one dimension": "mask has shape (4,)",
            "mask of integers": "mask is torch.int64 on cpu: pass torch.bool or torch.float32, on the device of x, cpu",
            "mask in fp16": "mask is torch.float16 on cpu",
            "mask elsewhere": "mask is torch.bool on meta",
            "no mask": "mask is a list: pass a torch.Tensor",
            "residual of one row": "residual has shape (1, 1, 16): pass the result's shape, ",
            "residual of integers": "residual is torch.int64 on cpu: pass a floating-point tensor on cpu, where x is",
            "no residual": "residual is a float: pass a torch.Tensor",
            "narrow norm": "norm has shape (8,): pass a norm of the hidden dimension, (16,)",
            "norm without a weight": "norm has shape (2,)",
            "norm on meta": "the weight of norm is on meta and x on cpu: use one device",
            "no norm": "norm is a float: pass a module, such as nn.RMSNorm(16)",
            "x on meta": "ParallelAttention: x is on meta: pass a tensor on a GPU or on the CPU",
            "layer on meta": "ParallelAttention: the weight is on meta, but x is on cpu: give the layer memory by to_empty(",
            "all on meta": "ParallelAttention: the weight is on meta, but x is on meta: give the layer memory by to_empty(",
        },
    )


def other_layers(group: dist.ProcessGroup) -> dict[str, Told]:
    x, meta = data(BATCH, LENGTH, HIDDEN), {"device": "meta"}
    index, weights = torch.arange(BATCH * LENGTH).view(-1, 1) % 4, torch.ones(BATCH * LENGTH, 1)
    options = {"group": group}
    found, layers = {}, {
        "column": lambda **where: weft.nn.ColumnParallelLinear(HIDDEN, HIDDEN, **options, **where),
        "column of whole": lambda **where: weft.nn.ColumnParallelLinear(
            HIDDEN, HIDDEN, sequence_dim=None, **options, **where
        ),
        "row": lambda **where: weft.nn.RowParallelLinear(HIDDEN * WORLD, HIDDEN, **options, **where),
        "mlp": lambda **where: weft.nn.ParallelMLP(HIDDEN, 2 * HIDDEN, **options, **where),
        "mlp of whole": lambda **where: weft.nn.ParallelMLP(HIDDEN, 2 * HIDDEN, sequence_dim=None, **options, **where),
    }  # fmt: skip
    follows = weft.nn.ParallelMLP(
        HIDDEN, HIDDEN, **options
    )  # a layer without collectives notifies its peers in the next call
    for name, layer in layers.items():
        here, there = layer(), layer(**meta)
        found[name] = told(
            group,
            lambda here=here: (here(x), follows(x))[0],
            {"x": lambda here=here: here(x.to("meta")), "weight": lambda there=there: there(x)},
        )
    norm = weft.nn.RMSNorm(HIDDEN, **options)
    found["norm"] = told(
        group,
        lambda: (norm(x), follows(x))[0],
        {"x": lambda: norm(x.to("meta")), "weight": lambda: weft.nn.RMSNorm(HIDDEN, **options, **meta)(x)},
    )
    experts, nowhere = (weft.nn.ExpertParallelMLP(HIDDEN, HIDDEN, 4, **options, **where) for where in ({}, meta))
    found["experts"] = told(
        group,
        lambda: experts(x, index, weights),
        {
            "x": lambda: experts(x.to("meta"), index, weights),
            "weight": lambda: nowhere(x, index, weights),
            "index": lambda: experts(x, index.to("meta"), weights),
            "weights": lambda: experts(x, index, weights.to("meta")),
            "counts": lambda: experts(x, index, weights.long()),
        },
    )
    return found


def test_other_layers_on_meta(pool: Pool) -> None:
    ranks = pool.run(other_layers, ranks=WORLD)
    expected = {
        "x": "x is on meta: pass a tensor on a GPU or on the CPU",
        "weight": "the weight is on meta, but x is on cpu: give",
    }
    of_experts = {
        "index": "ExpertParallelMLP: top_k_index is on meta and x on cpu: use one device",
        "weights": "ExpertParallelMLP: top_k_weights is on meta and x on cpu: use one device",
        "counts": "ExpertParallelMLP: top_k_weights is torch.int64: use a floating dtype, such as torch.float32",
    }
    for name in ranks[0]:
        assert_refused([found[name] for found in ranks], expected | (of_experts if name == "experts" else {}))


def styles_and_functions(group: dist.ProcessGroup) -> dict[str, Told]:
    mesh, x, name = init_device_mesh("cpu", (WORLD,)), data(LENGTH, HIDDEN), group.group_name
    w, bias = torch.ones(HIDDEN, HIDDEN), torch.ones(HIDDEN)
    row, column, nowhere = (
        parallelize_module(nn.Linear(HIDDEN, HIDDEN, device=device), mesh, style)
        for style, device in (
            (RowwiseParallel(output_layouts=Shard(0)), "cpu"),
            (ColwiseParallel(input_layouts=Shard(0)), "cpu"),
            (ColwiseParallel(input_layouts=Shard(0)), "meta"),
        )
    )
    part = x.chunk(WORLD, 1)[group.rank()]
    gathers = lambda bias: AllGatherLinear.apply(x, w, bias, group, name)  # noqa: E731
    scatters = lambda bias: LinearReduceScatter.apply(x, w, bias, group, name)  # noqa: E731
    return {
        "style": told(group, lambda: (column(x), row(part))[0], {"weight": lambda: nowhere(x)}),
        "gathers": told(group, lambda: gathers(bias), {"bias": lambda: gathers(bias[:3])}),
        "scatters": told(group, lambda: scatters(bias), {"bias": lambda: scatters(bias[:1])}),
    }


def test_styles_and_functions(pool: Pool) -> None:
    expected = {
        "style": {
            "weight": "ColwiseLinear: the weight is on meta, but x is on cpu: give the layer memory by to_empty("
        },
        "gathers": {"bias": "AllGatherLinear: bias has shape (3,) on cpu: pass shape (16,) on cpu, the device of x"},
        "scatters": {"bias": "LinearReduceScatter: bias has shape (1,) on cpu: pass shape (16,) on cpu"},
    }
    ranks = pool.run(styles_and_functions, ranks=WORLD)
    for name, words in expected.items():
        assert_refused([found[name] for found in ranks], words)


# --- errors between two collectives ---


class Fails:
    """An activation that raises on one rank, or on all ranks."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return x.relu()


def composite(
    group: dist.ProcessGroup, kind: str, activation: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    x, options = data(BATCH, LENGTH, HIDDEN), {"group": group}
    if kind == "experts":
        experts = weft.nn.ExpertParallelMLP(HIDDEN, HIDDEN, 4, activation=activation, **options)
        index = torch.arange(BATCH * LENGTH).view(-1, 1) % 4
        return lambda: experts(x, index, torch.ones(BATCH * LENGTH, 1))
    if kind == "attention":
        attention = weft.nn.ParallelAttention(HIDDEN, HEADS, **options)
        attend = attention.attend
        attention.attend = lambda *given: activation(attend(*given))  # type: ignore[method-assign]
        return lambda: attention(x)
    mlp = weft.nn.ParallelMLP(
        HIDDEN, 2 * HIDDEN, activation=activation, sequence_dim=1 if kind == "mlp" else None, **options
    )
    return lambda: mlp(x)


def fails_between(group: dist.ProcessGroup, kind: str, trained: bool) -> list[tuple[str, str, bool]]:
    activation, found = Fails(), []
    call = composite(group, kind, activation)
    with torch.set_grad_enabled(trained):
        first = call()
        for error, everywhere in (
            (ArithmeticError("on purpose"), False), (MemoryError("on purpose"), False), (ValueError("on purpose"), True),
        ):  # fmt: skip
            activation.error = error if everywhere or group.rank() == BAD_RANK else None
            told = error_of(call)
            activation.error = None
            found.append((*told, torch.equal(call(), first)))
    return found


@pytest.mark.parametrize(
    ("kind", "trained"), [("mlp", True), ("mlp", False), ("whole mlp", True), ("attention", True), ("experts", True)]
)
def test_an_error_between_collectives_is_a_refusal(pool: Pool, kind: str, trained: bool) -> None:
    name = {"attention": "ParallelAttention", "experts": "ExpertParallelMLP"}.get(kind, "ParallelMLP")
    for rank, (one, memory, alike) in enumerate(pool.run(fails_between, kind, trained, ranks=WORLD)):
        assert one == ("RefusedError", f"rank 1: {name}: ArithmeticError('on purpose')", True)
        here = rank == BAD_RANK  # a rank without memory may catch its own error, and try again with less
        text = "on purpose" if here else f"rank 1: {name}: MemoryError('on purpose')"
        assert memory == ("MemoryError" if here else "RefusedError", text, True)
        assert alike == ("RefusedError", "ranks 0, 1: on purpose", True)


class Changes:
    """An activation whose result on one rank is broadcast against its factor, or has another dtype."""

    def __init__(self, here: bool, dtype: bool) -> None:
        self.here, self.dtype = here, dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.here:
            return x.relu()
        return x.double() if self.dtype else x[:1]


def changed(group: dist.ProcessGroup, kind: str, dtype: bool) -> tuple[str, str]:
    return error_of(composite(group, kind, Changes(group.rank() == BAD_RANK, dtype)))


@pytest.mark.parametrize("dtype", [False, True], ids=["shape", "dtype"])
@pytest.mark.parametrize("kind", ["mlp", "experts"])
def test_an_activation_that_changes_shape_or_dtype_is_refused(pool: Pool, kind: str, dtype: bool) -> None:
    name = "ExpertParallelMLP" if kind == "experts" else "ParallelMLP"
    makes = "torch.float32 to torch.float64: pass a function that keeps the dtype" if dtype else "the shape ("
    for refused, text in pool.run(changed, kind, dtype, ranks=WORLD):
        assert refused == "RefusedError", text
        assert text.startswith(f"rank 1: {name}: activation changes {makes}"), text
        assert dtype or text.endswith("pass a function that keeps the shape, such as torch.nn.functional.silu")


def bad_constructors(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of constructors with bad sizes, dtypes or dimensions."""
    column = partial(weft.nn.ColumnParallelLinear, group=group)
    row = partial(weft.nn.RowParallelLinear, group=group)
    mlp = partial(weft.nn.ParallelMLP, group=group)
    attention = partial(weft.nn.ParallelAttention, group=group)
    experts = partial(weft.nn.ExpertParallelMLP, group=group)
    calls: dict[str, Callable[[], Any]] = {
        "in_features=-4 must be positive: pass the size of the whole layer": lambda: column(-4, 4),
        "in_features=0 must be positive: ": lambda: column(0, 4),
        "in_features='4' is a str: pass an integer": lambda: column("4", 4),
        "out_features=True is a bool: pass an integer": lambda: row(4, True),
        "out_features=-4 must be positive and divisible by world_size=2: pass 2": lambda: column(4, -4),
        "hidden=0 must be positive: ": lambda: mlp(0, 4),
        "hidden=4.0 is a float: ": lambda: attention(4.0, 2),
        "heads=2.0 is a float: ": lambda: attention(4, 2.0),
        "head_dim=-1 must be positive: ": lambda: attention(4, 2, head_dim=-1),
        "intermediate=-8 must be positive: ": lambda: experts(4, -8, 2),
        "hidden=None is a NoneType: ": lambda: experts(None, 8, 2),
        "num_experts='2' is a str: ": lambda: experts(4, 8, "2"),
        "dtype=torch.int8 is not supported: pass torch.float32, ": lambda: column(4, 4, dtype=torch.int8),
        "dtype=torch.complex64 is not supported: ": lambda: attention(4, 2, dtype=torch.complex64),
        "dtype=torch.float8_e4m3fn is not supported: ": lambda: experts(4, 8, 2, dtype=torch.float8_e4m3fn),
        "dtype='float32' is a str: ": lambda: row(4, 4, dtype="float32"),
        "sequence_dim=1.0 is a float: pass the number of a dimension": lambda: column(4, 4, sequence_dim=1.0),
        "sequence_dim=True is a bool: ": lambda: attention(4, 2, sequence_dim=True),
        "sequence_dim='1' is a str: ": lambda: mlp(4, 4, sequence_dim="1"),
        "sequence_dim=99 is not allowed: pass a dimension from 0 to 62, or from -64 to -2, or None": lambda: row(
            4, 4, sequence_dim=99
        ),
        "sequence_dim=-1 is not allowed: ": lambda: mlp(4, 4, sequence_dim=-1),
    }
    return {wanted: error_of(call)[1] for wanted, call in calls.items()}


def test_bad_sizes_dtypes_and_dimensions_are_refused_by_constructors(pool: Pool) -> None:
    for found in pool.run(bad_constructors, ranks=2):
        for wanted, text in found.items():
            assert text.startswith(wanted), text


def on_a_destroyed_group(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """Return the errors of layers that are constructed with a destroyed group, and the group's name."""
    own = dist.new_group(list(range(group.size())))
    assert isinstance(own, dist.ProcessGroup)
    name = own.group_name
    dist.barrier(group)  # gloo connects the pairs of `own` until all ranks have returned from new_group
    dist.destroy_process_group(own)
    layers: list[Callable[[], Any]] = [
        lambda: weft.nn.ColumnParallelLinear(4, 4, group=own), lambda: weft.nn.RowParallelLinear(4, 4, group=own),
        lambda: weft.nn.ParallelMLP(4, 4, group=own), lambda: weft.nn.ParallelAttention(4, 2, group=own),
        lambda: weft.nn.ExpertParallelMLP(4, 8, 2, group=own), lambda: weft.nn.RMSNorm(4, group=own),
        lambda: weft.nn.ShardedEmbeddingBagCollection([weft.EmbeddingBagConfig(4, 4, "t", ["f"])], group=own),
        lambda: weft.nn.ShardedEmbeddingCollection([weft.EmbeddingBagConfig(4, 4, "t", ["f"])], group=own),
    ]  # fmt: skip
    return [(error_of(layer)[1], name) for layer in layers]


def test_a_destroyed_group_is_refused_by_constructors(pool: Pool) -> None:
    for found in pool.run(on_a_destroyed_group, ranks=2):
        for text, name in found:
            assert text == f"the process group {name!r} was destroyed: make a new one"


def of_another_dtype(group: dist.ProcessGroup) -> list[tuple[str, str, str]]:
    """Return (layer, error, its text) for inputs in fp16 with weights in fp32."""
    x, found = data(BATCH, LENGTH // WORLD, HIDDEN).half(), []
    index, weights = torch.zeros(BATCH * LENGTH // WORLD, 1, dtype=torch.long), torch.ones(BATCH * LENGTH // WORLD, 1)
    experts = weft.nn.ExpertParallelMLP(HIDDEN, HIDDEN, 4, group=group)
    calls: list[tuple[nn.Module, tuple[torch.Tensor, ...]]] = [(experts, (x, index, weights))]
    for dim in (1, None):
        calls.append((weft.nn.ColumnParallelLinear(HIDDEN, HIDDEN, group=group, sequence_dim=dim), (x,)))
        wide = x.repeat(1, WORLD, 1)
        calls.append((weft.nn.RowParallelLinear(WORLD * HIDDEN, HIDDEN, group=group, sequence_dim=dim), (wide,)))
    for layer, given in calls:
        found.append((type(layer).__name__, *error_of(lambda layer=layer, given=given: layer(*given))))
    return found


def test_an_input_of_another_dtype_is_refused_by_the_layers_name(pool: Pool) -> None:
    for found in pool.run(of_another_dtype, ranks=WORLD):
        for name, refused, text in found:
            assert refused == "RefusedError", text
            assert f"{name}: x is torch.float16 on cpu, but the weight is torch.float32 on cpu: use one dtype" in text


def ends(group: dist.ProcessGroup, what: str) -> list[tuple[str, str]]:
    """Raise an error after the last collective, or get Ctrl-C between two collectives. Then make the same call
    correctly.
    """
    own, activation, found = dist.new_group(list(range(WORLD))), Fails(), []
    options: dict[str, Any] = {"group": own}
    call, error = (
        composite(own, "mlp", activation),
        KeyboardInterrupt() if what == "Ctrl-C" else ArithmeticError("on purpose"),
    )
    if what == "norm":
        mlp, norm = weft.nn.ParallelMLP(HIDDEN, 2 * HIDDEN, **options), nn.RMSNorm(HIDDEN)
        norm.register_forward_pre_hook(lambda module, given: (activation(given[0]),))
        call = lambda: mlp(data(BATCH, LENGTH, HIDDEN), norm=norm)[0]  # noqa: E731
    elif what == "sum":
        experts = weft.nn.ExpertParallelMLP(HIDDEN, HIDDEN, 4, **options)
        index, weights = torch.zeros(BATCH * LENGTH, 1, dtype=torch.int64), torch.ones(BATCH * LENGTH, 1)

        class Weights(torch.Tensor):
            def to(self, *given: Any) -> Any:
                return activation(torch.ones(BATCH * LENGTH, 1))

        call = lambda: experts(data(BATCH, LENGTH, HIDDEN), index, weights.as_subclass(Weights))  # noqa: E731
    call()
    for step in range(2):
        activation.error = error if step == 0 and group.rank() == BAD_RANK else None
        try:
            call()
            found.append(("", ""))
        except BaseException as raised:
            found.append((type(raised).__name__, str(raised)))
        if what != "Ctrl-C":  # a peer may have finished the call or not
            dist.barrier(group)
    return found


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("Ctrl-C", "KeyboardInterrupt", "rank 1: ParallelMLP: KeyboardInterrupt()"),
        ("norm", "ArithmeticError", "rank 1: RowParallelLinear: ArithmeticError('on purpose')"),
        ("sum", "ArithmeticError", "rank 1: ExpertParallelMLP: ArithmeticError('on purpose')"),
    ],
)
def test_ctrl_c_and_errors_behind_the_last_collective_end_the_group(
    pool: Pool, what: str, kind: str, text: str
) -> None:
    for rank, (first, second) in enumerate(pool.run(ends, what, ranks=WORLD)):
        if rank == BAD_RANK:
            assert first[0] == kind
        else:
            assert first[0] in ("PoisonedGroupError", "" if what != "Ctrl-C" else "PoisonedGroupError")
        assert_error(second, "PoisonedGroupError", text)


# --- no peers ---


def fake(group: dist.ProcessGroup) -> str:
    """Try shapes with fake tensors on one rank only. Wrong shapes must not be reported to peers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mlp = weft.nn.ParallelMLP(HIDDEN, 2 * HIDDEN, group=group)
    if group.rank() != BAD_RANK:
        return ""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return " ".join(error_of(lambda: mlp(torch.ones(2, 3, 5))))


def test_a_fake_call_is_told_to_nobody(pool: Pool) -> None:
    assert pool.run(fake, ranks=WORLD, timeout_s=30)[BAD_RANK].startswith(
        "ValueError ParallelMLP: x has shape (2, 3, 5)"
    )
