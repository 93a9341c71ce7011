"""The shape of a mixture-of-experts layer in benchmarks of experts, and the random routing of its tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from weft.bench.ops.gemms import GemmShape, Problems
from weft.builders.problem import PROBLEMS

BOUNDED = "-bounded"
"""The suffix of variants whose calls have `max_rows` or `rows`."""
_TYPED = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)-e([1-9]\d*)-top([1-9]\d*)(?:-zipf(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class MoeShape(GemmShape):
    """A mixture-of-experts layer. `experts` is the number of experts over all ranks, and each expert's weight is [k,
    n]. Each rank has m tokens, and each token is routed to `top_k` experts.

    skew: the exponent of Zipf's law, by which experts are drawn; 0 is uniform.
    """

    experts: int = 1
    top_k: int = 1
    skew: float = 0.0

    written = "TOKENSxNxK-eEXPERTS-topK, with -zipfS for skew, such as 4096x28672x4096-e8-top2-zipf0.5"
    example = "512x1024x256-e8-top2"

    @classmethod
    def named(cls, name: str, groups: Mapping[str, Any]) -> list[Self]:
        if typed := _TYPED.fullmatch(name):
            m, n, k, experts, top_k = (int(size) for size in typed.groups()[:5])
            return [cls(m, n, k, experts=experts, top_k=top_k, skew=float(typed[6] or 0))]
        group = groups.get(name, {"layers": {}})
        return [
            cls(m, layer["n"], layer["k"], (f"{name} {of}",), experts=group["experts"], top_k=group["top_k"], skew=skew)
            for of, layer in group["layers"].items()
            for m in group["tokens"]
            for skew in group["skews"]
        ]

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"{self.name}: top_k={self.top_k} must be at most experts={self.experts}")

    @property
    def name(self) -> str:
        zipf = f"-zipf{self.skew:g}" if self.skew else ""
        return f"{self.m}x{self.n}x{self.k}-e{self.experts}-top{self.top_k}{zipf}"

    @property
    def rows(self) -> int:
        """The number of rows that a rank sends to all ranks, including itself: m * top_k."""
        return self.m * self.top_k

    def problems(self, op: str, ranks: int, dtype: str) -> Problems:
        """Return two pairs (problem, suffix of the names of its variants): for calls without max_rows the suffix is "",
        for calls with max_rows "-bounded".
        """
        described: Any = PROBLEMS[op]
        p = described.even(self.rows, self.n, self.k, self.experts // ranks, ranks, dtype)
        return (p, ""), (replace(p, exact=False), BOUNDED)

    def bytes(self, ranks: int, item_bytes: int) -> float:
        return (2 * self.rows + self.experts // ranks * self.n) * self.k * item_bytes + 8 * self.rows * self.n

    def splits(self, world_size: int, which: int) -> torch.Tensor:
        """Return the number of rows that each rank sends to each expert in input set `which`: int64 [world_size,
        experts].
        """
        chosen = [self.chosen(rank, which) for rank in range(world_size)]
        return torch.stack([torch.bincount(of.flatten(), minlength=self.experts) for of in chosen])

    def chosen(self, rank: int, which: int) -> torch.Tensor:
        """Return the experts of each token of `rank` in input set `which`: int64 [m, top_k], on the CPU.

        Every rank and device draws the same numbers.
        """
        popularity = torch.arange(1, self.experts + 1).double() ** -self.skew
        generator = torch.Generator().manual_seed(1000 * which + rank)
        noise = -torch.empty(self.m, self.experts).exponential_(generator=generator).log()
        return (popularity.log() + noise).topk(self.top_k, dim=1).indices
