"""`ShardedEmbeddingBagCollection.prefetch` on CPU processes: results do not change. An error is raised on every rank,
and the module stays usable.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.embedding_prefetch import TABLES, batch, learned, module_on
from support.on_ranks import error_of, own_group, told
from support.slow import in_turn
from torch import nn

import weft
from weft.embedding import ColumnWise, DataParallel, KeyedJaggedTensor, RowWise
from weft.launch import Pool

CPU, WIDTH = torch.device("cpu"), sum(len(t.feature_names) * t.embedding_dim for t in TABLES)
WHOLE: dict[str, Any] = {}
MIXED: dict[str, Any] = {"placement": [RowWise(), DataParallel(), ColumnWise((0, 0))]}
COPIED: dict[str, Any] = {"placement": [DataParallel()] * 3}


def both(group: dist.ProcessGroup, options: dict[str, Any]) -> bool:
    plain, ahead = (learned(group, CPU, is_ahead, **options) for is_ahead in (False, True))
    return len(plain) == len(ahead) and all(torch.equal(one, two) for one, two in zip(plain, ahead, strict=True))


@pytest.mark.parametrize("options", [WHOLE, MIXED, COPIED], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_prefetched_batches_give_the_same(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    assert pool.run(both, options, ranks=ranks) == [True] * ranks


# --- a loop over `weft.nn.prefetched` ---


class Broken(Exception):
    """An error of the training loop's own code."""


class Model(nn.Module):
    """A model with two collections and a dense part."""

    def __init__(self, group: dist.ProcessGroup, options: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.second = (module_on(group, CPU, **options) for _ in range(2))
        torch.manual_seed(5)
        self.over = nn.Linear(2 * WIDTH, 1)

    def forward(self, one: Any) -> torch.Tensor:
        pooled = torch.cat([self.first(one[0]).values(), self.second(one[1]).values()], dim=1)
        return nn.functional.softplus(self.over(pooled)).mean()


def losses(group: dist.ProcessGroup, options: dict[str, Any], how: str, ahead: bool) -> list[Any]:
    """Return the loss of each step, and the tables. how: the event in the middle of the training, on all ranks. ahead:
    True to prefetch.
    """
    model, found = Model(group, options), list[Any]()
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
    features_of = {model.first: lambda one: one[0], model.second: lambda one: one[1]}

    def load(steps: range) -> Iterator[Any]:
        for step in steps:
            if how == "a loader that fails" and step == 3:
                raise Broken
            yield batch(step, group.rank(), CPU), batch(step + 50, group.rank(), CPU), step

    def loop(steps: range) -> None:
        given = load(steps)
        for one in weft.nn.prefetched(given, features_of) if ahead else given:
            if how == "a skipped batch" and one[2] == 2:
                continue
            loss = model(one)
            if how == "an error" and one[2] == 2 and steps.start == 0:
                raise Broken
            try:
                loss.backward()
                if how == "a caught error" and one[2] == 2:
                    raise Broken
            except Broken:
                pass
            else:
                optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
            if how == "another batch" and one[2] == 1:
                for module in features_of:
                    module.cancel_prefetch()
                with torch.no_grad():
                    found.append(float(model((batch(90, group.rank(), CPU), batch(91, group.rank(), CPU)))))

    try:
        loop(range(5))
    except Broken:
        loop(range(3, 5) if how == "an error" else range(4, 6))
    assert not any(module._prefetched or module._forward_hooks for module in features_of)
    return found + [weight.detach() for weight in model.state_dict().values()]


def equal_losses(group: dist.ProcessGroup, options: dict[str, Any], how: str) -> bool:
    plain, ahead = (losses(group, options, how, is_ahead) for is_ahead in (False, True))
    assert len(plain) >= 8
    return all(torch.equal(torch.as_tensor(one), torch.as_tensor(two)) for one, two in zip(plain, ahead, strict=True))


HOWS = ["nothing", "an error", "a caught error", "a loader that fails", "a skipped batch", "another batch"]


@pytest.mark.parametrize(("how", "options"), in_turn(HOWS, [MIXED, WHOLE, COPIED]))
def test_a_prefetched_loop_learns_the_same(pool: Pool, how: str, options: dict[str, Any]) -> None:
    assert pool.run(equal_losses, options, how, ranks=2) == [True] * 2


def runs_out(group: dist.ProcessGroup, options: dict[str, Any]) -> tuple[str, str]:
    rank, own = group.rank(), dist.new_group(list(range(group.size())))  # which fails
    assert isinstance(own, dist.ProcessGroup)
    model = Model(own, options)
    given = [(batch(step, rank, CPU), batch(step + 50, rank, CPU)) for step in range(3 - rank)]

    def loop() -> None:
        features_of = {model.first: lambda one: one[0], model.second: lambda one: one[1]}
        for one in weft.nn.prefetched(given, features_of):
            model(one).backward()

    return error_of(loop)


@pytest.mark.parametrize("options", [WHOLE, MIXED], ids=str)
def test_ranks_that_run_out_of_batches_raise(pool: Pool, options: dict[str, Any]) -> None:
    for kind, text in pool.run(runs_out, options | {"deadline_s": 5.0}, ranks=2):
        assert kind == "DisagreementError", (kind, text)
        assert "a rank may have run out of batches: give weft.nn.prefetched the same number of batches" in text


def test_modules_without_prefetch_are_refused() -> None:
    with pytest.raises(TypeError, match="pass a ShardedEmbeddingBagCollection"):
        weft.nn.prefetched([], {nn.Linear(1, 1): lambda one: one})


def errors(group: dist.ProcessGroup) -> dict[str, Any]:
    rank, module = group.rank(), module_on(group, CPU)
    one, two = (batch(seed, rank, CPU) for seed in range(2))
    module.prefetch(one)
    found: dict[str, Any] = {
        "second": error_of(lambda: module.prefetch(two)),
        "another": error_of(lambda: module(two)),
    }
    wanted = module_on(group, CPU)(one).values()
    found["still there"] = torch.equal(module(one).values(), wanted)
    bad = batch(2, rank, CPU)
    if rank == 1:
        bad.lengths()[0] = -1
    module.prefetch(bad)
    found["bad"] = error_of(lambda: module(bad))
    module.prefetch(two)
    found["after"] = torch.equal(module(two).values(), module_on(group, CPU)(two).values())
    bounded = module_on(group, CPU, max_ids=1)
    bounded.prefetch(one)
    found["bound"] = error_of(lambda: bounded(one))
    roomy = module_on(group, CPU, max_ids=1000)
    roomy.prefetch(one)
    found["another on one rank"] = error_of(lambda: roomy(two if rank == 1 else one))
    roomy.cancel_prefetch()
    whole = module_on(group, CPU, input="global_batch")
    found["global"] = error_of(lambda: whole.prefetch(one))
    for name, options in (("mixed", MIXED), ("bounded", MIXED | {"max_ids": 1000})):
        parts = module_on(group, CPU, bounds_check="fatal", **options)
        parts.prefetch(bad)
        found[name] = error_of(lambda parts=parts: parts(bad))
        dropped = batch(3, rank, CPU)
        kept = [weakref.ref(of) for of in (dropped, dropped.values(), dropped.lengths())]
        parts.prefetch(dropped)
        del dropped
        found["held"] = all(of() is not None for of in kept)
        parts.cancel_prefetch()
        found["freed"] = found.get("freed", True) and not any(of() is not None for of in kept)
        parts.prefetch(two)
        found["after"] = found["after"] and torch.equal(
            parts(two).values(), module_on(group, CPU, **options)(two).values()
        )
    return found


def sizes_of_one_rank(group: dist.ProcessGroup) -> tuple[str, str]:
    """Pass batch sizes on rank 1 alone, with a prefetched batch. Return the error of the call, and of the next call."""
    rank, module = group.rank(), module_on(own_group(group), CPU)
    features = batch(0, rank, CPU)
    module.prefetch(features)
    error = told(lambda: module(features, batch_sizes=[1, 1] if rank == 1 else None))
    module.cancel_prefetch()
    return error, told(lambda: module(features))


def test_batch_sizes_of_one_rank_are_refused_for_a_prefetched_batch(pool: Pool) -> None:
    for error, after in pool.run(sizes_of_one_rank, ranks=2):
        assert error.startswith("RefusedError")
        assert "rank 1: batch_sizes=[1, 1] works only with input='global_batch'" in error
        assert after == "nothing"


def test_errors_on_every_rank(pool: Pool) -> None:
    for found in pool.run(errors, ranks=2):
        assert found["still there"]
        assert found["after"]
        assert found["held"]
        assert found["freed"]
        for name, kind, text in (
            ("second", "RefusedError", "prefetch: another batch is already prefetched"),
            ("another", "RefusedError", "pass the same object to prefetch"),
            ("another on one rank", "RefusedError", "rank 1: the module is called with a batch other than"),
            ("bad", "RefusedError", "rank 1: "),
            ("bound", "RefusedError", "max_ids=1"),
            ("global", "RefusedError", "exchange no ids"),
            ("mixed", "RefusedError", "rank 1: "),
            ("bounded", "RefusedError", "rank 1: "),
        ):
            assert found[name][0] == kind, (name, found[name])
            assert text in found[name][1], (name, found[name])


@pytest.mark.parametrize(
    ("batches", "features_of", "text"),
    [
        ([], [nn.Linear(1, 1)], "features_of is a list: pass a dict"),
        ([], {nn.Linear(1, 1): 3}, "a value of features_of is an int: pass a dict"),
        (5, {}, "batches is .*: pass a DataLoader"),
        ([], {nn.Linear(1, 1): len}, "does not prefetch"),
    ],
)
def test_a_loop_of_other_objects_is_refused(batches: Any, features_of: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        weft.nn.prefetched(batches, features_of)


def unused_ids(group: dist.ProcessGroup) -> list[Any]:
    """Compare a module with `batch_size`, whose batches end with unused ids, with a module without. Return also the errors of a
    batch of another size, of weights that require gradients, and of lengths beyond the values.
    """
    plain, fixed, found = module_on(group, CPU), module_on(group, CPU, max_ids=1000, batch_size=9), list[Any]()
    for step in range(3):
        one = batch(step, group.rank(), CPU, 9 - group.rank())
        ids, weights = one.values(), one.weights().detach()
        wide = KeyedJaggedTensor(
            one.keys(), torch.cat([ids, ids.new_full((4,), -1)]), torch.cat([weights, weights.new_full((4,), math.nan)]),
            lengths=one.lengths(),
        )  # fmt: skip
        narrow = KeyedJaggedTensor(one.keys(), ids, weights, lengths=one.lengths())
        found.append(torch.equal(fixed(wide).values(), plain(narrow).values()))
    return [
        *found,
        told(lambda: fixed(batch(1, group.rank(), CPU, 5))),
        told(lambda: fixed(batch(1, group.rank(), CPU, 9 - group.rank()))),
        told(lambda: fixed(KeyedJaggedTensor(one.keys(), ids[:-1], weights[:-1], lengths=one.lengths()))),
    ]


def test_batches_of_a_known_size(pool: Pool) -> None:
    for *equal, size, gradients, beyond in pool.run(unused_ids, ranks=2, timeout_s=60):
        assert equal == [True] * 3
        assert "RefusedError" in size
        assert "the module was made with batch_size=9" in size
        assert "per-sample weights require gradients" in gradients
        assert "lengths sum to" in beyond
