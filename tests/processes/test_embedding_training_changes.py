"""Tables and states that change between forward and backward, on CPU processes: backward raises an error, and accesses
no memory beyond them.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.embedding_modules import batch, made, state
from support.on_ranks import error_of, told

import weft
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, ignore_tables


def _tables(module: ShardedEmbeddingBagCollection) -> list[torch.Tensor]:
    return list(module.parameters())


CHANGES: dict[str, tuple[Callable[[ShardedEmbeddingBagCollection], Any], str]] = {
    "another dtype": (lambda module: module.bfloat16(), "the weight is torch.bfloat16, but the table is torch.float32"),
    "fewer rows": (
        lambda module: [setattr(one, "data", one.data[:3].clone()) for one in _tables(module)],
        "the weight is [3, 8] but the table is [30, 8]",
    ),
    "no memory": (
        lambda module: [one.untyped_storage().resize_(0) for one in _tables(module)],
        "has no memory: its storage holds 0 of 960 bytes",
    ),
    "states of another dtype": (
        lambda module: [setattr(one, "data", one.data.double()) for one in module._update.tensors],  # type: ignore[union-attr]
        "state 'momentum1' is torch.float64 [30] with strides (1,): it must stay contiguous torch.float32 [30]",
    ),
}


def text_of(call: Callable[[], Any]) -> str:
    """Return the type and the text of a call's error."""
    return ": ".join(error_of(call))


def changed(group: dist.ProcessGroup, how: str, accumulated: bool) -> tuple[str, bool]:
    """Return the error of backward after a change on every rank, and True if nothing was updated."""
    module = made(group, optimizer=weft.RowwiseAdagrad(lr=1.0), placement=[0, 0, 0])
    if group.rank() == 0 and how == "another dtype":
        assert _tables(module)
    features, upstream = batch(0, group.rank(), group.size())
    before = [one.detach().clone() for one in _tables(module)]
    pooled = module(features).values()
    change, _ = CHANGES[how]

    def backward() -> None:
        if not accumulated:
            change(module)
            pooled.backward(upstream)
            return
        with module.accumulate():
            pooled.backward(upstream)
            change(module)

    error = told(backward)
    same = how == "no memory" or all(
        torch.equal(now.float(), then[: len(now)].to(now.dtype).float())
        for now, then in zip(_tables(module), before, strict=True)
    )
    return error, same


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_a_change_between_forward_and_backward_is_refused(pool: Pool, how: str, accumulated: bool) -> None:
    """Rank 1 has no tables. It receives the refusal, except at the end of accumulate(), where ranks do not communicate."""
    (error, same), (of_other, _) = pool.run(changed, how, accumulated, ranks=2, timeout_s=60)
    assert "backward of embedding_all_to_all: the tables have changed since forward: " in error
    assert CHANGES[how][1] in error
    assert same
    assert accumulated or CHANGES[how][1] in of_other


def in_default_dtype(group: dist.ProcessGroup, dtype: torch.dtype) -> list[torch.dtype]:
    torch.set_default_dtype(dtype)
    try:
        module = made(group, optimizer=weft.Adagrad(lr=0.1))
        features, upstream = batch(0)
        module(features).values().backward(upstream.to(module.sharding.dtype))
        return [one.dtype for one in module._update.tensors]  # type: ignore[union-attr]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_states_are_float32_with_any_default_dtype(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(in_default_dtype, dtype, ranks=1, timeout_s=60) == [[torch.float32] * 3]


def two_calls(group: dist.ProcessGroup, order: str) -> tuple[str, list[float]]:
    """Make two calls with per-sample weights, and their backwards. Return the second backward's error, and all
    gradients of the weights.
    """
    module = made(group, optimizer=weft.SGD(lr=0.5), is_weighted=True)
    outputs, given = [], []
    for seed in range(2):
        features, upstream = batch(seed)
        weights = features.weights().clone().requires_grad_()
        given.append(weights)
        features = weft.KeyedJaggedTensor(features.keys(), features.values(), weights, lengths=features.lengths())
        outputs.append((module(features).values(), upstream))
    (one, up), (two, other) = outputs
    if order == "summed":
        ((one * up).sum() + (two * other).sum()).backward()
        return "", [float(w.grad.abs().sum()) for w in given if w.grad is not None]
    one.backward(up)
    return text_of(lambda: two.backward(other)), []


def test_weights_per_sample_need_the_tables_of_forward(pool: Pool) -> None:
    for error, _ in pool.run(two_calls, "one by one", ranks=2, timeout_s=60):
        assert "for per_sample_weights: backward of another call has updated the tables since this forward" in error


def frozen(group: dist.ProcessGroup) -> list[bool]:
    """Return, for each step, True if it changed the tables: as constructed, frozen, and trainable again."""
    module, found = made(group, optimizer=weft.SGD(lr=0.5)), []
    for seed, change in enumerate((None, False, True)):
        if change is not None:
            assert module.requires_grad_(change) is module
        before = state(module)
        features, upstream = batch(seed, group.rank(), group.size())
        pooled = module(features).values()
        if pooled.requires_grad:
            pooled.backward(upstream)
        found.append(any(not torch.equal(before[name], now) for name, now in state(module).items()))
    return found


def test_tables_can_be_frozen(pool: Pool) -> None:
    assert pool.run(frozen, ranks=2, timeout_s=60) == [[True, False, True]] * 2


def written(module: Any, value: Any) -> None:
    """Write a learning rate."""
    module.fused_optimizer.param_groups[0]["lr"] = value


def copies(group: dist.ProcessGroup) -> dict[str, Any]:
    module = made(group, optimizer=weft.Adam(lr=0.1))
    module.fused_optimizer.param_groups[0]["lr"] = 0.01
    copied = copy.deepcopy(module)
    saved = module.state_dict()
    module.load_state_dict(saved, assign=True)
    model = torch.nn.Sequential(module)
    good = module.fused_optimizer.state_dict()

    def without(name: str) -> dict[str, Any]:
        groups = [{key: value for key, value in group.items() if key != name} for group in good["param_groups"]]
        return {**good, "param_groups": groups}

    bad = {
        "empty": {}, "no step": without("step"), "no lr": without("lr"),
        "lr": {**good, "param_groups": [{**good["param_groups"][0], "lr": float("nan")}]},
        "more": {**good, "state": {0: {**good["state"][0], "other": torch.zeros(1)}}},
    }  # fmt: skip
    sgd = made(group, optimizer=weft.SGD(lr=0.1)).fused_optimizer
    return {
        "lr of a copy": copied.fused_optimizer.param_groups[0]["lr"],
        "marked": len(ignore_tables(model)),
        "copy": text_of(lambda: copy.deepcopy(module.fused_optimizer)),
        "pickle": text_of(lambda: pickle.dumps(module.fused_optimizer)),
        "lr written": [text_of(lambda value=value: written(module, value)) for value in ("x", "0.1", None, 1e39, -1.0)],
        "Adam's": text_of(lambda: sgd.load_state_dict(good)),
        **{
            name: text_of(lambda given=given: module.fused_optimizer.load_state_dict(given))
            for name, given in bad.items()
        },
    }


def test_copies_and_states_of_an_optimizer(pool: Pool) -> None:
    (found,) = pool.run(copies, ranks=1, timeout_s=60)
    assert found["lr of a copy"] == pytest.approx(0.01)
    assert found["marked"] == 3
    for how in ("copy", "pickle"):
        assert "a fused optimizer cannot be copied or pickled" in found[how]
    assert "no param_groups and no state" in found["empty"]
    assert "the state dict has no step" in found["no step"]
    assert "the state dict has no lr" in found["no lr"]
    assert "lr=nan must be a finite number" in found["lr"]
    for value, text in zip(("'x'", "'0.1'", "None", "1e+39", "-1.0"), found["lr written"], strict=True):
        assert f"ValueError: lr={value} must be a finite number of at least 0 and at most 3.4e+38" in text
    assert "the state dict has other, but this optimizer has" in found["more"]
    assert "ValueError" in found["Adam's"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((weft.SGD(lr=0.1), torch.ones(2, 3)), "weights is a tensor: pass a list"),
        ((weft.SGD(lr=0.1), [torch.ones(2, 3)], float("nan")), "factor=nan must be a finite number"),
    ],
)
def test_updates_of_nothing_sensible_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    optimizer, weights, *factor = arguments
    with pytest.raises((TypeError, ValueError), match=text):
        weft.embedding.FusedUpdate(optimizer, weights, **({"factor": factor[0]} if factor else {}))


def flags(group: dist.ProcessGroup) -> list[bool]:
    """Return requires_grad of the parameters after a model with the module was frozen, loaded, converted and copied."""
    model = torch.nn.Sequential(made(group)).requires_grad_(False)
    model.load_state_dict(model.state_dict(), assign=True)
    return [
        parameter.requires_grad for one in (model, copy.deepcopy(model).bfloat16()) for parameter in one.parameters()
    ]


def test_loading_and_converting_leave_requires_grad_alone(pool: Pool) -> None:
    assert pool.run(flags, ranks=1, timeout_s=60) == [[False] * 6]
