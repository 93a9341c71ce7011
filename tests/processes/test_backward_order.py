"""CPU ranks compare whose backward they run. Without this comparison, calls of equal shapes would exchange wrong gradients.

`test_embedding_backward.py` has the same test for pooled embeddings with optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operators_called import OPERATORS, leaves
from support.on_ranks import told
from support.slow import in_turn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft.launch import Pool

TRAINED = [name for name in OPERATORS if "scaled" not in name]


def differentiable(group: dist.ProcessGroup, operator: str) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """Return a function that calls the operator, and the tensors that need gradients."""
    call = OPERATORS[operator](group)
    tensors = [place.given(call.arguments) for place in call.tensors.values()]
    tensors = [t.requires_grad_() for t in tensors if t.is_floating_point()]
    return lambda: leaves(call())[-1 if operator == "all_gather_matmul" else 0], tensors


def backward(y: torch.Tensor) -> None:
    y.nan_to_num().sum().backward()


def swapped(group: dist.ProcessGroup, operator: str, recomputes: bool) -> list[str]:
    """Make two calls. Run their backwards in another order on rank 1. Return the errors."""
    own = dist.new_group([0, 1])
    call, tensors = differentiable(own, operator)

    def made() -> torch.Tensor:
        return checkpoint(lambda *_: call(), *tensors, use_reentrant=False) if recomputes else call()

    ys = [made(), made()]
    return [told(lambda y=y: backward(y)) for y in (ys if group.rank() == 0 else ys[::-1])]


@pytest.mark.parametrize(("operator", "recomputes"), in_turn(TRAINED, [False, True]))
def test_ranks_with_another_order_of_backwards_raise(pool: Pool, operator: str, recomputes: bool) -> None:
    for first, second in pool.run(swapped, operator, recomputes, ranks=2, timeout_s=60):
        assert first.startswith("DisagreementError: ranks run "), first
        assert "backward of the call at rendezvous " in first
        assert second.startswith("PoisonedGroupError: ")


def swapped_layers(group: dist.ProcessGroup, kind: str) -> list[str]:
    own, world = dist.new_group([0, 1]), group.size()
    assert isinstance(own, dist.ProcessGroup)
    layers: dict[str, Callable[[], Any]] = {
        "column": lambda: weft.nn.ColumnParallelLinear(8, 4 * world, group=own),
        "row": lambda: weft.nn.RowParallelLinear(8 * world, 4, group=own),
        "mlp": lambda: weft.nn.ParallelMLP(8, 4 * world, group=own),
    }
    layer, x = layers[kind](), torch.ones(2, 4, 8, requires_grad=True)
    ys = [layer(x), layer(x)]
    return [told(lambda y=y: backward(y)) for y in (ys if group.rank() == 0 else ys[::-1])]


@pytest.mark.parametrize("kind", ["column", "row", "mlp"])
def test_so_do_layers(pool: Pool, kind: str) -> None:
    for first, second in pool.run(swapped_layers, kind, ranks=2, timeout_s=60):
        assert first.startswith("DisagreementError: ranks run "), first
        assert second.startswith("PoisonedGroupError: ")


def lookup() -> Callable[[], Any]:
    own = dist.new_group([0, 1])
    assert isinstance(own, dist.ProcessGroup)
    tables = [weft.EmbeddingBagConfig(8, 4, "t", ["f"])]
    module = weft.nn.ShardedEmbeddingCollection(tables, group=own, optimizer=weft.SGD(lr=0.1))
    features = weft.KeyedJaggedTensor(["f"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    return lambda: module(features)["f"].values()


def swapped_lookups(group: dist.ProcessGroup) -> list[str]:
    look_up = lookup()
    ys = [look_up() for _ in range(2)]
    return [told(lambda y=y: backward(y)) for y in (ys if group.rank() == 0 else ys[::-1])]


def test_so_do_lookups_of_rows(pool: Pool) -> None:
    for first, second in pool.run(swapped_lookups, ranks=2, timeout_s=60):
        assert first.startswith(
            "DisagreementError: ranks run backward of ShardedEmbeddingCollection of 1 table for "
        ), first
        assert second.startswith("PoisonedGroupError: ")


def mixed(group: dist.ProcessGroup, how: str) -> list[str]:
    """Make calls, and run their backwards. Rank 0 runs the forward or (how: "mode") the backward in a dispatch mode of
    torch.
    """
    own = dist.new_group([0, 1])
    call, _ = differentiable(own, "all_gather_matmul")
    found = []
    for _ in range(2):
        y = call()
        if how == "mode" and group.rank() == 0:
            with FlopCounterMode(display=False):
                found.append(told(lambda y=y: backward(y)))
        elif how == "forward in a mode" and group.rank() == 0:
            with FlopCounterMode(display=False):
                y = call()
            found.append(told(lambda y=y: backward(y)))
        else:
            y = call() if how == "forward in a mode" else y
            found.append(told(lambda y=y: backward(y)))
    return found


@pytest.mark.parametrize("how", ["mode", "forward in a mode"])
def test_a_mode_on_one_rank_is_no_other_call(pool: Pool, how: str) -> None:
    assert pool.run(mixed, how, ranks=2, timeout_s=60) == [["nothing"] * 2] * 2


def after_an_error(group: dist.ProcessGroup) -> list[str]:
    """Refuse a call of a module on one rank, then train. Return the errors."""
    own = dist.new_group([0, 1])
    assert isinstance(own, dist.ProcessGroup)
    module = weft.nn.ShardedEmbeddingBagCollection(
        [weft.EmbeddingBagConfig(8, 4, "t", ["f"])], group=own, input="global_batch", optimizer=weft.SGD(lr=0.1)
    )
    features = weft.KeyedJaggedTensor(["f"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    found = [told(lambda: module(None if group.rank() == 0 else features))]
    ys = [module(features).values() for _ in range(2)]
    return found + [told(lambda y=y: backward(y)) for y in ys]


def test_an_error_does_not_shift_the_numbers(pool: Pool) -> None:
    for refused, *trained in pool.run(after_an_error, ranks=2, timeout_s=60):
        assert refused.startswith(("RefusedError: ", "TypeError: ")), refused
        assert trained == ["nothing", "nothing"]


def after_inference(group: dist.ProcessGroup) -> str:
    """Call a module without gradients on one rank only, then train. Return the error."""
    look_up = lookup()
    with torch.set_grad_enabled(group.rank() == 0):
        look_up()
    return told(lambda: backward(look_up()))


def test_inference_on_one_rank_does_not_shift_the_numbers(pool: Pool) -> None:
    assert pool.run(after_inference, ranks=2, timeout_s=60) == ["nothing", "nothing"]
