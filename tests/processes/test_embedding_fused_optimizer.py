"""The optimizer that updates tables in backward, as schedulers, checkpoints and conversions of the module see it."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.embedding_modules import TABLES, batch, made, state
from support.on_ranks import error_of
from torch import nn

import weft
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection


def schedules(group: dist.ProcessGroup) -> list[Any]:
    module, other = (made(group, optimizer=weft.RowwiseAdagrad(lr=0.1)) for _ in range(2))
    optimizer = module.fused_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for seed in range(3):
        features, upstream = batch(seed, group.rank(), group.size())
        for one in (module, other):
            one(features).values().backward(upstream)
        rates.append(module._update.lr)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for group_of_parameters in other.fused_optimizer.param_groups:
            group_of_parameters["lr"] *= 0.5
    same = all(torch.equal(one, two) for one, two in zip(state(module).values(), state(other).values(), strict=True))
    errors = [
        error_of(lambda: optimizer.param_groups[0].update(eps=1.0)),
        error_of(lambda: optimizer.param_groups[0].__setitem__("lr", math.nan)),
        error_of(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})),
    ]
    return [rates, same, optimizer.step(lambda: 3.0), errors]


def test_schedulers_write_the_learning_rate_of_the_next_update(pool: Pool) -> None:
    for rates, same, loss, errors in pool.run(schedules, ranks=2):
        assert rates == pytest.approx([0.1, 0.05, 0.025])
        assert same
        assert loss == 3.0
        assert [kind for kind, _ in errors] == ["ValueError"] * 3
        assert "only lr can change" in errors[0][1]


def pauses(group: dist.ProcessGroup, optimizer: Any) -> list[list[bool]]:
    """Return, for each of four steps, of which the third has a learning rate of 0, whether each table has kept its bits."""
    module = made(group, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(module.fused_optimizer, lambda step: 0.0 if step == 2 else 1.0)
    kept = []
    for seed in range(4):
        before = state(module)
        features, upstream = batch(seed, group.rank(), group.size())
        module(features).values().backward(upstream)
        after = state(module)
        kept.append([torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before])
        module.fused_optimizer.step()
        scheduler.step()
    return kept


@pytest.mark.parametrize("optimizer", [weft.SGD(lr=0.1), weft.RowwiseAdagrad(lr=0.1), weft.Adam(lr=0.1)], ids=str)
def test_a_step_with_a_learning_rate_of_zero_keeps_the_bits_of_rows(pool: Pool, optimizer: Any) -> None:
    for kept in pool.run(pauses, optimizer, ranks=2):
        assert kept[0]  # each rank has a table
        assert all(kept[2])
        assert not any(itertools.chain(kept[0], kept[1], kept[3]))


def continues(group: dist.ProcessGroup, optimizer: Any) -> list[Any]:
    """Return (True if a loaded module trains like the saved module, the names of the saved states, errors)."""
    module, fresh = (made(group, optimizer=optimizer) for _ in range(2))

    def step(of: nn.Module, seed: int) -> None:
        features, upstream = batch(seed, group.rank(), group.size())
        of(features).values().backward(upstream)

    for seed in range(2):
        step(module, seed)
    module.fused_optimizer.param_groups[0]["lr"] = 0.03
    saved = copy.deepcopy(module.fused_optimizer.state_dict())
    fresh.load_state_dict(state(module))
    fresh.fused_optimizer.load_state_dict(saved)
    copied = copy.deepcopy(module)
    for one in (module, fresh, copied):
        step(one, 7)
    after = [list(state(one).values()) for one in (module, fresh, copied)]
    same = [all(torch.equal(one, two) for one, two in zip(after[0], other, strict=True)) for other in after[1:]]
    broken = copy.deepcopy(saved)
    for states in broken["state"].values():
        states.clear()
    error = error_of(lambda: fresh.fused_optimizer.load_state_dict(broken))
    names = [list(states) for states in saved["state"].values()]
    return [same, fresh.fused_optimizer.param_groups[0]["lr"], names, error]


@pytest.mark.parametrize("optimizer", [weft.Adam(lr=0.1), weft.RowwiseAdagrad(lr=0.1)], ids=str)
def test_states_are_saved_and_loaded(pool: Pool, optimizer: Any) -> None:
    for same, lr, names, (kind, text) in pool.run(continues, optimizer, ranks=2):
        assert same == [True, True]
        assert lr == 0.03
        assert all(one[0].endswith(".momentum1") for one in names)
        assert kind == "ValueError"
        assert "momentum1" in text


def moves(group: dist.ProcessGroup) -> list[Any]:
    """Move a module from meta to the CPU, and convert it to bf16. The states follow, in float32."""
    module = ShardedEmbeddingBagCollection(
        TABLES, group=group, device="meta", optimizer=weft.Adagrad(lr=0.1), deadline_s=30.0
    ).to_empty(device="cpu")
    module.reset_parameters()
    module.bfloat16()
    before = state(module)
    features, upstream = batch(0, group.rank(), group.size())
    module(features).values().backward(upstream.bfloat16())
    tensors = module._update.tensors
    changed = [not torch.equal(one, two) for one, two in zip(before.values(), state(module).values(), strict=True)]
    return [{t.dtype for t in tensors}, {t.device.type for t in tensors}, changed, module._update.lr]


def test_states_move_with_their_tables(pool: Pool) -> None:
    for dtypes, devices, changed, lr in pool.run(moves, ranks=2):
        assert dtypes == {torch.float32}
        assert devices == {"cpu"}
        assert changed
        assert all(changed)
        assert lr == pytest.approx(0.1)
