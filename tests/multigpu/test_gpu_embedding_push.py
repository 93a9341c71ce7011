"""Test gradients of embeddings on GPUs when a kernel stores them in the memory of the tables' owners.

The bits must equal the bits with NCCL's all-to-all, which transport="serial" uses.
"""

from __future__ import annotations

import os
import time
from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from support import embedding_training as training
from support.on_ranks import error_of
from support.reference import Problem, problem, tables_of

import weft
from weft.embedding import FusedUpdate
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

pytestmark = ranks.MARKS
PROBLEMS: dict[str, Problem] = {
    "any width": problem(2, (8, 3, 16, 1, 70, 300), 57, longest=40),
    "larger than the one before": problem(2, (64,) * 6, 1301, longest=10),
    "bf16": problem(2, (64,) * 6, 301, longest=10, dtype=torch.bfloat16),
    "wide": problem(2, (1028, 2052, 4), 5),
    "uneven": Problem(tables_of((8, 3, 16)), (1, 0, 1), (41, 0)),
    "a rank without tables": Problem(tables_of((8, 3)), (1, 1), (5, 4)),
    "an empty batch": problem(2, (8, 4), 0),
}


def learned(group: dist.ProcessGroup, transport: Any, delays: bool) -> list[list[torch.Tensor]]:
    """Return the tables and optimizer states of all problems after three steps each. All problems share one inbox,
    unless transport="serial".
    """
    rank, device, found = group.rank(), ranks.device(), []
    for number, p in enumerate(PROBLEMS.values()):
        weights = [weight.clone() for weight in ranks.here(p.local_weights(rank))]
        update = FusedUpdate(weft.RowwiseAdagrad(lr=0.1), weights, device=device)
        features = tuple(ranks.here(p.tupled(rank)))
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * number + step)
            upstream = torch.randn(sum(p.batch_sizes), p.sharding.total_dim, generator=generator)
            if delays and (step + rank) % 2:
                time.sleep(0.01)
                torch.cuda._sleep(20_000_000)
            y = weft.embedding_all_to_all(
                weights,
                features,
                p.sharding,
                group=group,
                batch_sizes=p.batch_sizes,
                update=update,
                transport=transport,
            )
            y.backward(upstream[p.rows_of(rank)].to(device, p.sharding.dtype))
            del y
        found.append([one.cpu() for one in (*weights, *update.tensors)])
    return found


def test_bits_are_those_of_the_all_to_all(pair: Pool) -> None:
    wanted = pair.run(learned, "serial", False, timeout_s=120)
    for delays in (False, True):
        for mine, others in zip(pair.run(learned, "direct", delays, timeout_s=120), wanted, strict=True):
            for name, one, other in zip(PROBLEMS, mine, others, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), (name, delays)


@pytest.mark.parametrize("transport", ["direct", "serial"])
@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_gradients_are_rounded_once(pair: Pool, transport: str, name: str, dtype: torch.dtype) -> None:
    p = problem(2, (8, 3, 16, 70), 13)
    assert pair.run(training.rounded_on_the_way, p, name, dtype, transport, timeout_s=120) == [True, True]


def two_backwards(group: dist.ProcessGroup, transport: Any) -> list[torch.Tensor]:
    """Run two forward calls, then their two backward calls, with and without accumulation. Return the tables and their
    gradients.
    """
    p, rank, device = problem(2, (8, 16, 4), 12, weighted=True), group.rank(), ranks.device()
    found: list[torch.Tensor] = []
    for optimizer in (weft.Adagrad(lr=0.1), None):
        module: Any = ShardedEmbeddingBagCollection(
            p.tables, group=group, placement=[0, 1, 0], optimizer=optimizer, is_weighted=True, device=device,
            input="global_batch", transport=transport,
        )  # fmt: skip
        module.load_full_weights({table.name: weight for table, weight in zip(p.tables, p.weights, strict=True)})
        features = p.keyed(rank).to(device)
        one, two = (module(features, batch_sizes=p.batch_sizes).values() for _ in range(2))
        two.sum().backward()
        (2 * one).sum().backward()
        with module.accumulate():
            one, two = (module(features, batch_sizes=p.batch_sizes).values() for _ in range(2))
            (one.square().sum() + two.sum()).backward()
        found += [weight.detach().cpu() for weight in module.parameters()]
        found += [weight.grad.cpu() for weight in module.parameters() if weight.grad is not None]
    return found


def test_several_calls_in_flight(pair: Pool) -> None:
    both = [pair.run(two_backwards, transport, timeout_s=120) for transport in ("serial", "direct")]
    for one, other in zip(*both, strict=True):
        assert len(one) == len(other) > 0
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def goes_back_alone(group: dist.ProcessGroup, of_call: float | None) -> tuple[str, str, bool]:
    """Run backward on rank 0 only. Return the kind and text of the next call's error, and whether this rank's tables
    are unchanged.

    of_call: the call's own deadline. With None, backward reads the deadline of the environment.
    """
    p, rank = problem(2, (8, 4), 6), group.rank()
    weights = ranks.here(p.local_weights(rank))
    update = FusedUpdate(weft.SGD(lr=0.1), weights)
    given = weights, tuple(ranks.here(p.tupled(rank))), p.sharding
    for _ in range(2):  # the first calls make connections, on both ranks
        weft.embedding_all_to_all(*given, group=group, update=update).sum().backward()
    torch.cuda.synchronize()
    before = [weight.clone() for weight in weights]
    y = weft.embedding_all_to_all(*given, group=group, update=update, deadline_s=of_call)
    if of_call is None:
        os.environ["WEFT_DEADLINE_S"] = "2"
    if rank == 0:
        y.sum().backward()
    torch.cuda.synchronize()
    time.sleep(4)
    same = all(torch.equal(one, two) for one, two in zip(before, weights, strict=True))
    return *error_of(lambda: weft.embedding_all_to_all(*given, group=group, update=update)), same


@pytest.mark.slow
@pytest.mark.parametrize("of_call", [None, 2.0])
def test_a_rank_that_does_not_go_back(pair: Pool, of_call: float | None) -> None:
    with Pool(2, backend="nccl") as alone:
        (kind, text, same), (other_kind, _, _) = alone.run(goes_back_alone, of_call, timeout_s=60)
    assert same, "nothing is updated without all gradients"
    assert kind in ("DeadlineError", "PoisonedGroupError")
    assert "gradients" in text
    assert other_kind in ("PeerLostError", "PoisonedGroupError")
