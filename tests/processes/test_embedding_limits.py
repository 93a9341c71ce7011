"""`max_ids` and `batch_size` of embedding modules: limits that no call can have, and batches at the edge of a limit.

A limit or a batch is refused by every rank before anything is written, or results and updates equal float64.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import told

import weft
from weft.embedding import ColumnWise, DataParallel, KeyedJaggedTensor, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

ROWS, COLUMNS = 20, 4
TABLES = [weft.EmbeddingBagConfig(ROWS, COLUMNS, "t", ["f"]), weft.EmbeddingBagConfig(ROWS, COLUMNS, "u", ["g"])]
Pooled, Unpooled = ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
MODULES: dict[str, Any] = {
    "whole": functools.partial(Pooled, TABLES, placement=[0, 1]),
    "on one rank": functools.partial(Pooled, TABLES, placement=[1, 1]),
    "rows": functools.partial(Pooled, TABLES, placement=[RowWise(), 0]),
    "columns": functools.partial(Pooled, TABLES, placement=[ColumnWise((0, 1)), 1]),
    "data parallel": functools.partial(Pooled, TABLES, placement=[DataParallel(), 0]),
    "dedup": functools.partial(Pooled, TABLES, placement=[RowWise(), 1], dedup=True),
    "unpooled": functools.partial(Unpooled, TABLES, placement=[RowWise(), 0]),
    "unpooled, dedup": functools.partial(Unpooled, TABLES, placement=[RowWise(), 0], dedup=True),
}

# --- limits ---

BAD = {
    "max_ids": [0, -1, True, 1.5, "5"],
    "batch_size": [0, -1, True, 1.5, "5", 2**31, 2**70],
}  # fmt: skip


def made_with(group: dist.ProcessGroup, name: str, option: str) -> list[str]:
    """Return the errors if rank 1 passes a bad limit, then if both ranks do."""
    found, more = [], {"max_ids": 100} if option == "batch_size" else {}
    for value in BAD[option]:
        for alone in (True, False):
            bad = more | {option: value} if group.rank() == 1 or not alone else more
            found.append(told(lambda: MODULES[name](group=group, **bad)))  # noqa: B023
    return found


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in MODULES for option in BAD if option == "max_ids" or "unpooled" not in name],
)
def test_limits_that_no_call_can_have_are_refused_on_every_rank(pool: Pool, name: str, option: str) -> None:
    for found in pool.run(made_with, name, option, ranks=2, timeout_s=60):
        for text in found:
            assert text.startswith("RefusedError: arguments refused by rank"), text
            assert option in text


def large_with_batch_size(group: dist.ProcessGroup) -> str:
    return told(lambda: MODULES["whole"](group=group, max_ids=2**31, batch_size=3))


def test_more_ids_than_memory_can_hold_are_refused_with_a_batch_size(pool: Pool) -> None:
    for text in pool.run(large_with_batch_size, ranks=2):
        assert "max_ids=2147483648 must be less than 2**31 with batch_size" in text


# --- batches ---

SIZES = [(3, 3), (0, 3), (3, 0), (0, 0), (1, 7), (3, 3)]
"""The number of samples of each rank in each step."""


def batch(step: int, rank: int, longest: int = 3) -> tuple[KeyedJaggedTensor, list[list[list[int]]]]:
    """Return the features of a rank's samples, and their ids by feature and sample."""
    made = torch.Generator().manual_seed(10 * step + rank)
    samples = SIZES[step][rank]
    lengths = torch.randint(longest + 1, (2 * samples,), generator=made)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=made)
    bags = [bag.tolist() for bag in ids.split(lengths.tolist())]
    return KeyedJaggedTensor(["f", "g"], ids, lengths=lengths, stride=samples), [bags[:samples], bags[samples:]]


def steps(group: dist.ProcessGroup, name: str, max_ids: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train with SGD. Return the results of each step with the expected results, computed in float64 by this rank alone."""
    pooled = "unpooled" not in name
    module = MODULES[name](group=group, max_ids=max_ids, optimizer=weft.SGD(lr=0.5), gradients="sum")
    weights = {t.name: torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7)) for t in TABLES}
    module.load_full_weights({name: weight.clone() for name, weight in weights.items()})
    exact = {name: weight.double() for name, weight in weights.items()}
    found = []
    for step in range(len(SIZES)):
        features, bags = batch(step, group.rank())
        y = module(features)
        expected = []
        for table, of_feature in zip(TABLES, bags, strict=True):
            rows = [exact[table.name][bag] for bag in of_feature]
            expected.append([one.sum(0) for one in rows] if pooled else rows)
        own = [
            torch.stack(one) if one and pooled else torch.cat(one) if one else torch.empty(0, COLUMNS)
            for one in expected
        ]
        given = y.values() if pooled else torch.cat([y["f"].values(), y["g"].values()])
        found.append((given.detach(), torch.cat(own, 1 if pooled else 0)))
        given.sum().backward()
        for rank in range(group.size()):  # the gradient of each id is 1 in each column
            for table, of_feature in zip(TABLES, batch(step, rank)[1], strict=True):
                for bag in of_feature:
                    exact[table.name].index_add_(
                        0, torch.tensor(bag, dtype=torch.int64), torch.full((len(bag), COLUMNS), -0.5).double()
                    )
    return found


@pytest.mark.parametrize("name", MODULES)
def test_empty_and_uneven_batches_are_right(pool: Pool, name: str) -> None:
    for found in pool.run(steps, name, 1000, ranks=2, timeout_s=60):
        for given, expected in found:
            torch.testing.assert_close(given.double(), expected.double(), rtol=1e-6, atol=1e-6)


def at_the_limit(group: dist.ProcessGroup, name: str) -> list[str]:
    """Call with exactly as many ids as allowed, with one more, and again. All ids go to rank 1's tables."""
    module, found = MODULES[name](group=group, max_ids=8), []
    for more in (0, 1, 0):
        ids = torch.arange(4 + more * group.rank()) + ROWS // 2
        lengths = torch.zeros(4, dtype=torch.int64)
        lengths[0] = len(ids)
        at = 0 if name != "dedup" else 2
        lengths = lengths.roll(at)
        features = KeyedJaggedTensor(["f", "g"], ids, lengths=lengths, stride=2)
        found.append(told(lambda: module(features)))  # noqa: B023
    return found


@pytest.mark.parametrize("name", ["on one rank", "rows", "dedup", "unpooled"])
def test_a_limit_may_be_reached_but_not_exceeded(pool: Pool, name: str) -> None:
    for exact, beyond, after in pool.run(at_the_limit, name, ranks=2):
        assert exact == after == "nothing"
        assert beyond.startswith("RefusedError: rank 1 would receive 9 ids, more than max_ids=8")


def with_batch_size(group: dist.ProcessGroup) -> list[str]:
    module = MODULES["whole"](group=group, max_ids=1000, batch_size=3)
    return [told(lambda step=step: module(batch(step, group.rank())[0])) for step in range(len(SIZES))]


def test_other_numbers_of_samples_than_batch_size_are_refused(pool: Pool) -> None:
    wrong = {1: "rank 0: the batch has 0 samples", 2: "rank 1: the batch has 0 samples", 3: "ranks 0, 1: the batch has 0",
             4: "the batch has 1 sample"}  # fmt: skip
    for found in pool.run(with_batch_size, ranks=2):
        for step, text in enumerate(found):
            assert (wrong[step] in text and text.startswith("RefusedError")) if step in wrong else text == "nothing"
