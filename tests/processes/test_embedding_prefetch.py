"""`ShardedEmbeddingBagCollection.prefetch` on CPU processes: the same results, and errors on every rank that leave it usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.embedding_prefetch import TABLES, batch, learned, module_on
from support.on_ranks import error_of

from weft.embedding import RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

CPU = torch.device("cpu")


def both(group: dist.ProcessGroup) -> bool:
    plain, ahead = (learned(group, CPU, is_ahead) for is_ahead in (False, True))
    return len(plain) == len(ahead) and all(torch.equal(one, two) for one, two in zip(plain, ahead, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_prefetched_batches_give_the_same(pool: Pool, ranks: int) -> None:
    assert pool.run(both, ranks=ranks) == [True] * ranks


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
    whole = module_on(group, CPU, input="global_batch")
    found["global"] = error_of(lambda: whole.prefetch(one))
    parts = ShardedEmbeddingBagCollection(TABLES, group=group, device=CPU, placement=[RowWise(), 0, 0])
    found["parts"] = error_of(lambda: parts.prefetch(one))
    return found


def test_errors_on_every_rank(pool: Pool) -> None:
    for found in pool.run(errors, ranks=2):
        assert found["still there"]
        assert found["after"]
        for name, kind, text in (
            ("second", "RefusedError", "prefetch of a second batch"),
            ("another", "RefusedError", "pass the same object to prefetch"),
            ("bad", "RefusedError", "rank 1: "),
            ("bound", "RefusedError", "max_ids=1"),
            ("global", "RefusedError", "exchange no ids"),
            ("parts", "RefusedError", "row-wise or data-parallel tables"),
        ):
            assert found[name][0] == kind, (name, found[name])
            assert text in found[name][1], (name, found[name])
