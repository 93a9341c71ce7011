"""Test every operator on two GPUs that claim to be on different hosts. Forward and backward run unfused, by NCCL.

The ranks' control connections are TCP on loopback, and no memory is mapped. Only NCCL knows that there is one machine.
"""

from __future__ import annotations

import warnings

import gpu_ranks
import pytest
import torch
from gpu_cases import ROWS
from support.operators import suite
from support.pretended_hosts import on_two_hosts

import weft
from weft import symm
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

pytestmark = gpu_ranks.MARKS


def every_way(group, operator):
    with on_two_hosts(group) as own:
        suite.both_ways(own, operator, ROWS[operator], 3)
        comm = symm.communicator(own, gpu_ranks.device())
        return comm.hosts, comm.mapped


@pytest.mark.parametrize("operator", [pytest.param(name, marks=ROWS[name].marks) for name in ROWS])
def test_every_operator_runs_forward_and_backward(pair: Pool, operator: str) -> None:
    found = pair.run(every_way, operator, timeout_s=180)
    assert found == [(("alpha", "beta"), (True, False)), (("alpha", "beta"), (False, True))]


def trains(group):
    """Train an embedding module for three steps. Return its losses, and weft's warnings about hosts."""
    device = gpu_ranks.device()
    tables = [weft.EmbeddingBagConfig(50, 8, f"t{i}", [f"f{i}"]) for i in range(3)]
    with on_two_hosts(group) as own, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(5)
        module = ShardedEmbeddingBagCollection(tables, group=own, device=device, optimizer=weft.SGD(lr=0.1))
        generator = torch.Generator().manual_seed(group.rank())
        losses = []
        for _ in range(3):
            lengths = torch.randint(0, 4, (3 * 6,), generator=generator)
            ids = torch.randint(50, (int(lengths.sum()),), generator=generator)
            features = weft.KeyedJaggedTensor(["f0", "f1", "f2"], ids.to(device), lengths=lengths.to(device))
            loss = module(features).values().square().sum()
            loss.backward()
            losses.append(loss.item())
        return losses, [str(one.message) for one in caught if "hosts" in str(one.message)]


def test_embeddings_train_without_warnings(pair: Pool) -> None:
    for losses, said in pair.run(trains, timeout_s=120):
        assert all(loss > 0 for loss in losses)
        assert said == []
