"""Test the input distribution on GPUs. Each rank must get exactly the ids, offsets and weights of its features, or an
error.
"""

from __future__ import annotations

from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist

from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, KeyedJaggedTensor
from weft.launch import Pool
from weft.nn.input_dist import InputDist

pytestmark = ranks.MARKS

KEYS = ["a", "unused", "b", "c", "d"]
TABLES = tuple(
    EmbeddingBagConfig(10, 4, f"of {features}", features) for features in (("a", "b"), ("c",), ("b",), ("d", "a"))
)
PLACEMENTS = [(0, 1, 1, 0), (1, 0, 0, 1), (0, 0, 0, 0)]


def features(
    seed: int, batch: int, longest: int, dtype: torch.dtype, offsets: bool, wrong: str = ""
) -> KeyedJaggedTensor:
    """Return a rank's samples. wrong: the side on which values are in no bag, or "sum" for lengths with another sum."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest + 1, (len(KEYS) * batch,), generator=generator).to(dtype)
    more, before = 3 * (wrong in ("before", "after")), 3 * (wrong == "before")
    values = torch.randint(1 << 30, (int(lengths.sum()) + more,), generator=generator).to(dtype)
    weights = torch.rand(len(values), generator=generator)
    ends = torch.cat([torch.tensor([before]), before + lengths.cumsum(0)])
    if wrong == "sum":
        lengths[1] += 1
    given = {"offsets": ends} if offsets else {"lengths": lengths}
    return KeyedJaggedTensor(KEYS, values, weights, **given, stride=batch)


def distribute(group: dist.ProcessGroup, placement: tuple[int, ...], weighted: bool, calls: list[Any]) -> list[Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    distribution = InputDist(EmbeddingSharding(TABLES, placement, group.size()), group, device, is_weighted=weighted)
    found: list[Any] = []
    for call in calls:
        try:
            jagged, sizes = distribution(features(*call[group.rank()]).to(device))
            tensors = [None if t is None else t.cpu() for t in (jagged.values, jagged.offsets, jagged.weights)]
            found.append((jagged.keys, *tensors, jagged.stride, sizes))
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_features_arrive_exactly(pair: Pool, placement: tuple[int, ...], weighted: bool) -> None:
    batches = [(4, 4), (1, 7), (0, 5), (0, 0), (300, 513)]
    calls = [
        [(10 * number + rank, batch, longest, dtype, offsets) for rank, batch in enumerate(of_ranks)]
        for number, of_ranks in enumerate(batches)
        for longest in (0, 5)
        for dtype, offsets in ((torch.int64, False), (torch.int32, True))
    ]
    for rank, results in enumerate(pair.run(distribute, placement, weighted, calls, timeout_s=120)):
        slots = EmbeddingSharding(TABLES, placement, 2).local_slots(rank)
        own = tuple(dict.fromkeys(slot.feature for slot in slots))
        for call, (keys, values, offsets, weights, stride, sizes) in zip(calls, results, strict=True):
            given = [features(*of_rank) for of_rank in call]
            parts = [part[key] for key in own for part in given]
            assert (keys, stride, sizes) == (own, sum(sizes), tuple(part.stride() for part in given))
            none = given[0].values()[:0]
            assert torch.equal(values, torch.cat([none, *(part.values() for part in parts)]))
            lengths = torch.cat([none, *(part.lengths() for part in parts)]).long()
            assert torch.equal(offsets, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
            assert (weights is None) != weighted
            if weighted:
                assert torch.equal(weights, torch.cat([torch.empty(0), *(part.weights_or_none() for part in parts)]))


WRONG = {"sum": "lengths sum to", "before": "offsets go from 3 to", "after": "the bags must hold all values"}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_input_is_refused_by_every_rank(pair: Pool, wrong: str) -> None:
    calls = [
        [(rank, 4, 5, torch.int64, wrong != "sum", wrong if rank == 1 and is_wrong else "") for rank in range(2)]
        for is_wrong in (True, False, True)
    ]
    for bad, good, again in pair.run(distribute, PLACEMENTS[0], True, calls, timeout_s=120):
        assert isinstance(good, tuple)
        for text in (bad, again):
            assert "input refused by rank 1" in text
            assert WRONG[wrong] in text
