"""Invalid lengths and offsets of a KeyedJaggedTensor are refused on every rank.

This is tested for the operator and for modules: with a local batch, a global batch, keys that no table uses, row-wise and
data-parallel tables, and lookups without pooling. Then the next call works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import error_of

import weft
from weft import EmbeddingBagConfig, KeyedJaggedTensor
from weft.embedding import DataParallel, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

TABLES = (EmbeddingBagConfig(10, 4, "users", ("u",)), EmbeddingBagConfig(20, 4, "items", ("i",)))
BATCH = 4
PLACEMENT = [0, 1]
PLACEMENTS: dict[str, Any] = {"row_wise": [RowWise(), DataParallel()], "rows": [RowWise(), 1]}
WAYS = ["operator", "local_batch", "global_batch", "unused key", *PLACEMENTS]
LOCAL = ("local_batch", *PLACEMENTS)
LENGTHS = [2, 0, 3, 1]


class Foreign:
    """A container of another library, whose constructor checks nothing."""

    def __init__(self, keys: list[str], values: torch.Tensor, lengths: Any) -> None:
        self._keys, self._values, self._lengths = keys, values, lengths

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def lengths(self) -> Any:
        return self._lengths

    def offsets(self) -> torch.Tensor:
        return torch.nn.functional.pad(self._lengths.flatten().cumsum(0), (1, 0))

    def lengths_or_none(self) -> Any:
        return self._lengths

    def offsets_or_none(self) -> None:
        return None

    def weights_or_none(self) -> None:
        return None

    def stride(self) -> int:
        return BATCH


def features(way: str) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Return keys, values and lengths. Every key has the same bags."""
    keys = ["u", "i", "nobody's"] if way == "unused key" else ["u", "i"]
    return keys, torch.arange(6).repeat(len(keys)), torch.tensor(LENGTHS * len(keys))


def with_lengths(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str], Any]:
    def spoil(way: str) -> KeyedJaggedTensor:
        keys, values, lengths = features(way)
        return KeyedJaggedTensor(keys, values, lengths=change(lengths))

    return spoil


def with_offsets(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str], Any]:
    def spoil(way: str) -> KeyedJaggedTensor:
        keys, values, lengths = features(way)
        return KeyedJaggedTensor(keys, values, offsets=change(torch.nn.functional.pad(lengths.cumsum(0), (1, 0))))

    return spoil


def foreign(change: Callable[[torch.Tensor], Any]) -> Callable[[str], Any]:
    def spoil(way: str) -> Foreign:
        keys, values, lengths = features(way)
        return Foreign(keys, values, change(lengths))

    return spoil


def first(*begin: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change of the lengths of the first bags."""
    return lambda lengths: torch.cat((torch.tensor(begin), lengths[len(begin) :]))


# (change of rank 1's features, words of the error).
SPOILED: dict[str, tuple[Callable[[str], Any], list[str]]] = {
    "bool lengths": (with_lengths(torch.Tensor.bool), ["lengths is torch.bool", "pass torch.int32 or torch.int64"]),
    "fractional lengths": (with_lengths(lambda n: n + 0.5), ["lengths is torch.float32", "pass torch.int32 or torch.int64"]),
    "short lengths": (with_lengths(torch.Tensor.short), ["lengths is torch.int16", "pass torch.int32 or torch.int64"]),
    "lengths of fewer values": (with_lengths(first(1, 0)), ["lengths sum to", "the bags must hold all values"]),
    "lengths of more values": (with_lengths(first(3, 0)), ["lengths sum to", "the bags must hold all values"]),
    # Their sum equals the number of ids modulo 2**64, and each is 0 modulo 2**32.
    "lengths that wrap around": (with_lengths(first(2**62, 2**62, 2**62, 2**62 + 6)), [""]),
    "fewer lengths than bags": (foreign(lambda n: n[:-2]), ["lengths for", "keys x 4 samples", "pass one length per bag"]),
    "lengths of another library, bool": (foreign(torch.Tensor.bool), ["lengths is torch.bool"]),
    "lengths in an array": (foreign(torch.Tensor.numpy), ["lengths is a ndarray", "torch.from_numpy(lengths)"]),
    "sparse lengths": (foreign(torch.Tensor.to_sparse), ["lengths has layout torch.sparse_coo", "to_dense()"]),
    "float offsets": (with_offsets(torch.Tensor.float), ["is torch.float32", "pass torch.int32 or torch.int64"]),
    "offsets beyond the values": (with_offsets(lambda n: n + 100), ["values"]),
    "offsets that end early": (with_offsets(lambda n: n.clamp(max=int(n[-1]) - 1)), ["the bags must hold all values", "values[0:"]),
    "offsets that begin late": (with_offsets(lambda n: n.clamp(min=1)), ["the bags must hold all values", "offsets - 1"]),
    "descending offsets": (with_offsets(lambda n: torch.cat([n[:1], n[1:-1].flip(0), n[-1:]])), ["offsets must ascend"]),
}  # fmt: skip


def caller_of(group: dist.ProcessGroup, way: str) -> Callable[[Any], torch.Tensor]:
    weights = [torch.full((t.num_embeddings, t.embedding_dim), 1.0 + i) for i, t in enumerate(TABLES)]
    if way == "operator":
        sharding = weft.place_tables(TABLES, 2, placement=PLACEMENT)
        mine = [weights[i] for i in sharding.local_tables(group.rank())]
        return lambda given: weft.embedding_all_to_all(mine, given, sharding, group=group)
    full = {t.name: w for t, w in zip(TABLES, weights, strict=True)}
    if way == "rows":
        unpooled = ShardedEmbeddingCollection(TABLES, group=group, placement=PLACEMENTS[way])
        unpooled.load_full_weights(full)
        return lambda given: torch.cat([summed(unpooled(given)[key]) for key in ("u", "i")], dim=1)
    kind: Any = "local_batch" if way in LOCAL else "global_batch"
    module = ShardedEmbeddingBagCollection(TABLES, group=group, placement=PLACEMENTS.get(way, PLACEMENT), input=kind)
    module.load_full_weights(full)
    return lambda given: module(given).values()


def summed(bags: Any) -> torch.Tensor:
    return torch.stack([rows.sum(0) for rows in bags.to_dense()])


def refused(group: dist.ProcessGroup, way: str) -> dict[str, tuple[str, str]]:
    """Return this rank's error for each input that rank 1 passes. Good calls must work in between."""
    call, found = caller_of(group, way), {}
    good = with_lengths(lambda lengths: lengths)(way)
    # A rank's own samples are all samples of a local batch, or half of a global batch.
    mine = LENGTHS if way in LOCAL else LENGTHS[2 * group.rank() :][:2]
    wanted = torch.tensor([[1.0 * n] * 4 + [2.0 * n] * 4 for n in mine])
    for name, (spoil, _) in SPOILED.items():
        assert torch.equal(call(good), wanted)
        found[name] = error_of(partial(call, spoil(way) if group.rank() == 1 else good))
    assert torch.equal(call(good), wanted)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_what_describes_no_bags_is_refused_on_every_rank(pool: Pool, way: str) -> None:
    for found in pool.run(refused, way, ranks=2, timeout_s=60):
        assert found.keys() == SPOILED.keys()
        for name, (kind, text) in found.items():
            assert kind == "RefusedError", (name, text)
            for word in ["rank 1: ", *SPOILED[name][1]]:
                assert word in text, name


def test_a_local_batch_of_no_values_has_no_lengths(pool: Pool) -> None:
    pool.run(empty, ranks=2, timeout_s=60)


def empty(group: dist.ProcessGroup) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    for way in WAYS:
        bags = torch.zeros(len(features(way)[0]) * BATCH, dtype=torch.int64)
        output = caller_of(group, way)(KeyedJaggedTensor(features(way)[0], nothing, lengths=bags))
        assert not output.any()
