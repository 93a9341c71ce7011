"""Training data for a recommendation model: a synthetic click model with a fixed seed, and a reader of Criteo's files.


The synthetic model draws ids as DLRM's generator does, uniformly or by Zipf's law, with 0 to `most_ids` ids in a bag. Every id of
every feature has a hidden effect. The logit of a sample is

    bias + weak effects of dense features + effects of the ids of each bag + products of the bags' effects of some features


and a click has the probability sigmoid(logit). The ids determine a click more than the dense features do. A batch depends only on
the seed and its number, so any number of ranks can train on the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch

DENSE, FEATURES = 13, 26  # the numbers of dense and of sparse features in Criteo's files
SEED = 27


@dataclass(frozen=True)
class Batch:
    """A batch of B samples. dense: [B, 13]. ids [n] and lengths [26 * B], feature by feature. clicks: [B] fp32, 0 or 1."""

    dense: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor
    clicks: torch.Tensor

    def part(self, begin: int, end: int) -> Batch:
        """Return samples [begin, end)."""
        size = len(self.clicks)
        lengths = self.lengths.view(FEATURES, size)
        ends = self.lengths.cumsum(0).view(FEATURES, size)
        ids = [
            self.ids[int(ends[f, begin] - lengths[f, begin]) : int(ends[f, end - 1])] if end > begin else self.ids[:0]
            for f in range(FEATURES)
        ]
        return Batch(self.dense[begin:end], torch.cat(ids), lengths[:, begin:end].flatten(), self.clicks[begin:end])


@dataclass(frozen=True)
class ClickModel:
    """The synthetic model. zipf: the exponent of the ids' distribution; 0 is uniform. rows: the number of different ids
    of each feature.
    """

    rows: int = 1000
    zipf: float = 1.05
    most_ids: int = 3

    @cached_property
    def effects(self) -> np.ndarray:
        """The hidden effect of each id, [26, rows]."""
        return np.random.default_rng([SEED, 0]).standard_normal((FEATURES, self.rows)).astype(np.float32)

    @cached_property
    def of_dense(self) -> np.ndarray:
        return np.random.default_rng([SEED, 1]).standard_normal(DENSE).astype(np.float32) / DENSE**0.5

    @cached_property
    def _cumulative(self) -> np.ndarray:
        weights = np.arange(1, self.rows + 1, dtype=np.float64) ** -self.zipf
        return np.cumsum(weights) / weights.sum()

    def batch(self, number: int, size: int, *, held_out: bool = False) -> Batch:
        """Return batch `number` of the training data, or of the held-out data."""
        rng = np.random.default_rng([SEED, 3 if held_out else 2, number])
        dense = rng.standard_normal((size, DENSE), dtype=np.float32)
        lengths = rng.integers(0, self.most_ids + 1, (FEATURES, size))
        count = int(lengths.sum())
        ids = np.minimum(np.searchsorted(self._cumulative, rng.random(count)), self.rows - 1)
        bags = np.repeat(np.arange(FEATURES * size), lengths.ravel())
        of_bag = np.bincount(bags, weights=self.effects[bags // size, ids], minlength=FEATURES * size).reshape(
            FEATURES, size
        )
        logit = -0.5 + 0.35 * (dense @ self.of_dense) + 0.32 * of_bag.sum(0) + 0.2 * (of_bag[:6] * of_bag[6:12]).sum(0)
        clicks = rng.random(size) < 1 / (1 + np.exp(-logit))
        return Batch(
            torch.from_numpy(dense),
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(lengths.ravel().astype(np.int64)),
            torch.from_numpy(clicks.astype(np.float32)),
        )


def criteo(path: Path, size: int) -> Iterator[Batch]:
    """Yield batches of a Criteo file. Each line has a click, 13 numbers and 26 hexadecimal ids, separated by tabs.

    Fields may be empty. Dense features are log(1 + x), or 0 if missing or negative. A missing id is an empty bag. Ids are 32-bit
    hashes: pool them with hash=True. Raise `ValueError` for a line with another number of fields.
    """
    with path.open() as lines:
        number = 0
        while some := list(islice(lines, size)):
            fields = [line.rstrip("\n").split("\t") for line in some]
            for line in fields:
                number += 1
                if len(line) != 1 + DENSE + FEATURES:
                    raise ValueError(
                        f"{path}, line {number} has {len(line)} fields: a Criteo file has {1 + DENSE + FEATURES}, separated by tabs"
                    )
            numbers = [[float(x) if x else 0.0 for x in line[1 : 1 + DENSE]] for line in fields]
            by_feature = list(zip(*(line[1 + DENSE :] for line in fields), strict=True))
            yield Batch(
                torch.tensor(numbers).clamp(min=0).log1p(),
                torch.tensor([int(one, 16) for feature in by_feature for one in feature if one], dtype=torch.int64),
                torch.tensor([int(bool(one)) for feature in by_feature for one in feature], dtype=torch.int64),
                torch.tensor([float(line[0]) for line in fields]),
            )
