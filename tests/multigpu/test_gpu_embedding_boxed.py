"""Test embedding modules with `max_ids` and `batch_size` on GPUs: ids travel without the CPU.

Results must have the bits of a module without these options, whether batches are prefetched or not. Modules with and without these
options alternate, and ranks are late. Graphs with the exchange of ids are replayed with other numbers of ids.
"""

from __future__ import annotations

import math
import time
from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from support.graphs import capture
from support.on_ranks import told

import weft
from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

pytestmark = ranks.MARKS
NAMES = [f"f{i}" for i in range(5)]
SAMPLES, MOST = 40, 5 * 40 * 2 * 4
STEPS = 10


def module_on(group: dist.ProcessGroup, is_boxed: bool, **options: Any) -> ShardedEmbeddingBagCollection:
    torch.manual_seed(5)
    tables = [
        EmbeddingBagConfig(40, 8 * (1 + i % 3), f"t{i}", (name,), "mean" if i == 1 else "sum")
        for i, name in enumerate(NAMES)
    ]
    given: dict[str, Any] = {"optimizer": weft.RowwiseAdagrad(lr=0.1), "placement": [0, 1, 0, 1, 0], "deadline_s": 20.0}
    given |= {"max_ids": MOST, "batch_size": SAMPLES} if is_boxed else {}
    return ShardedEmbeddingBagCollection(tables, group=group, device=ranks.device(), **given | options)


def batch(step: int, rank: int, is_weighted: bool = False, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    generator, device = torch.Generator().manual_seed(100 * step + rank), ranks.device()
    lengths = torch.randint(0, 5, (len(NAMES) * SAMPLES,), generator=generator)
    ids = torch.randint(0, 40, (int(lengths.sum()),), generator=generator).to(dtype)
    weights = torch.rand(len(ids), generator=generator).to(device) if is_weighted else None
    return KeyedJaggedTensor(NAMES, ids.to(device), weights, lengths=lengths.to(device))


def trained(group: dist.ProcessGroup, is_boxed: bool, ahead: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    dtype = options.pop("dtype", torch.int64)
    module, other = module_on(group, is_boxed, **options), module_on(group, False)
    given = [batch(step, group.rank(), options.get("is_weighted", False), dtype) for step in range(STEPS + 1)]
    found = list[torch.Tensor]()
    for step in range(STEPS):
        pooled = module(given[step]).values()
        if (step + group.rank()) % 4 == 0:
            torch.cuda._sleep(20_000_000)
        if ahead:
            module.prefetch(given[step + 1])
        if step % 3 == 2:  # another exchange of numbers between two exchanges of the module
            other(batch(50 + step, group.rank())).values().sum().backward()
        pooled.square().sum().backward()
        found.append(pooled.detach().clone())
        del pooled
    module.cancel_prefetch()
    found += [weight.detach().clone() for weight in module.state_dict().values()]
    return [one.cpu() for one in found]


def both(group: dist.ProcessGroup, ahead: bool, options: dict[str, Any]) -> bool:
    plain, boxed = trained(group, False, False, {**options}), trained(group, True, ahead, {**options})
    return all(torch.equal(one, two) for one, two in zip(plain, boxed, strict=True))


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize(
    "options", [{}, {"is_weighted": True}, {"dtype": torch.int32}, {"placement": [0, 0, 0, 0, 0]}], ids=str
)
def test_ids_in_boxes_give_the_same(pair: Pool, ahead: bool, options: dict[str, Any]) -> None:
    assert pair.run(both, ahead, options, timeout_s=120) == [True, True]


def unsynchronised(group: dist.ProcessGroup) -> bool:
    """Train with prefetched batches. Raise an error if torch makes the CPU wait for the device."""
    module = module_on(group, True)
    given = [batch(step, group.rank()) for step in range(STEPS + 1)]
    module.prefetch(given[0])
    try:
        for step in range(STEPS):
            torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
            pooled = module(given[step]).values()
            module.prefetch(given[step + 1])
            pooled.backward(torch.ones_like(pooled))
            del pooled
    finally:
        torch.cuda.set_sync_debug_mode("default")
    module.cancel_prefetch()
    return True


def test_steady_prefetch_does_not_wait_for_the_device(pair: Pool) -> None:
    assert pair.run(unsynchronised, timeout_s=60) == [True, True]


def replayed(group: dist.ProcessGroup, is_trained: bool) -> list[bool]:
    """Replay a graph of a call with other ids, in buffers with room for more ids than a batch has."""
    rank, device = group.rank(), ranks.device()
    module, plain = module_on(group, True), module_on(group, False)
    room = len(NAMES) * SAMPLES * 4
    ids = torch.zeros(room, dtype=torch.int64, device=device)
    lengths = torch.zeros(len(NAMES) * SAMPLES, dtype=torch.int64, device=device)
    features = KeyedJaggedTensor(NAMES, ids, lengths=lengths)

    def fill(step: int) -> KeyedJaggedTensor:
        one = batch(step, rank)
        ids.fill_(-1)
        ids[: one.values().numel()] = one.values()
        lengths.copy_(one.lengths())
        return one

    def call(of: ShardedEmbeddingBagCollection, one: KeyedJaggedTensor) -> torch.Tensor:
        with torch.set_grad_enabled(is_trained):
            pooled = of(one).values()
            if is_trained:
                pooled.backward(torch.ones_like(pooled))
            return pooled.detach()

    equal = []
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(3):
            one = fill(step)
            equal.append(torch.equal(call(module, features), call(plain, one)))
    graph, output = capture(lambda: call(module, features), stream, "thread_local")
    for step in range(3, 12):
        one = fill(step)
        output.fill_(math.nan)
        if step % 4 == rank:
            time.sleep(0.02)
        graph.replay()
        found = output.clone()
        equal.append(torch.equal(found, call(plain, one)))
    return equal


@pytest.mark.parametrize("is_trained", [False, True], ids=["forward", "training"])
def test_captured_calls(pair: Pool, is_trained: bool) -> None:
    for equal in pair.run(replayed, is_trained, timeout_s=60):
        assert equal == [True] * len(equal)


def wrong(group: dist.ProcessGroup, how: str) -> list[str]:
    """Pass a bad batch on rank 1 after two good batches. Return the errors of all calls as texts."""
    module, device = (
        module_on(group, True, **({"max_ids": 700} if how == "many" else {})).requires_grad_(False),
        ranks.device(),
    )
    errors, bags = [], len(NAMES) * SAMPLES
    for step in range(5):
        one = batch(step, group.rank())
        if step >= 2 and group.rank() == 1 and how == "length":
            one.lengths()[3] = -1
        if step >= 2 and how == "many":
            lengths, ids = (
                torch.full((bags,), 4, device=device),
                torch.zeros(4 * bags, dtype=torch.int64, device=device),
            )
            one = KeyedJaggedTensor(NAMES, ids, lengths=lengths)
        if step >= 2 and how == "samples" and group.rank() == 1:
            lengths = torch.zeros(len(NAMES) * 3, dtype=torch.int64, device=device)
            one = KeyedJaggedTensor(NAMES, one.values()[:0], lengths=lengths)
        errors.append(told(lambda one=one: module(one)))
        torch.cuda.synchronize()
    return errors


BAD = {"length": "negative", "many": "more than max_ids", "samples": "batch_size=40"}


@pytest.mark.parametrize("how", BAD)
def test_bad_batches_are_reported(how: str) -> None:
    with Pool(2, backend="nccl") as alone:
        found = alone.run(wrong, how, timeout_s=60)
    for errors in found:
        assert not any("Error" in text for text in errors[:2]), errors
        assert any(text.startswith(("RefusedError", "PoisonedGroupError")) for text in errors[2:]), errors
    assert any(BAD[how] in text for errors in found for text in errors), found


def edges(group: dist.ProcessGroup, alone: bool) -> list[bool]:
    """Call with no ids, with exactly `max_ids` ids, and with no ids again, on one rank or on all. Compare with a module without
    boxes.
    """
    most = 3 * SAMPLES * 4 * group.size()  # if all bags have 4 ids, the rank with 3 tables receives as many
    plain, boxed = module_on(group, False), module_on(group, True, max_ids=most)
    equal = []
    for length in (1, 0, 4, 0, 4, 1):
        own = 1 if alone and group.rank() == 0 else length
        lengths = torch.full((len(NAMES) * SAMPLES,), own, device=ranks.device())
        ids = torch.arange(own * len(lengths), device=ranks.device()) % 40
        one = KeyedJaggedTensor(NAMES, ids, lengths=lengths)
        of_plain, of_boxed = plain(one).values(), boxed(one).values()
        of_plain.sum().backward()
        of_boxed.sum().backward()
        equal.append(torch.equal(of_plain, of_boxed))
    states = zip(plain.state_dict().values(), boxed.state_dict().values(), strict=True)
    return [*equal, *(torch.equal(a, b) for a, b in states)]


@pytest.mark.parametrize("alone", [False, True])
def test_no_ids_and_as_many_as_allowed(pair: Pool, alone: bool) -> None:
    for equal in pair.run(edges, alone, timeout_s=60):
        assert all(equal), equal
