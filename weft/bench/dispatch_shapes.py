"""Mixture-of-experts layers from `benchmarks/shapes/all_to_all_matmul.toml`, or as typed, and whom a router sends where.

The router draws `top_k` different experts for each token, in proportion to their popularity: the largest of log popularity
plus Gumbel noise. Popularity follows Zipf's law, rank ** -skew, the first expert the most popular; skew 0: all alike.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft.bench.matmul_shapes import known_groups, named_groups

_TYPED = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)-e([1-9]\d*)-top([1-9]\d*)(?:-zipf(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class MoeShape:
    """`tokens` on each rank, `top_k` of all ranks' `experts` for each, [k, n] in each expert."""

    tokens: int
    n: int
    k: int
    experts: int
    top_k: int
    skew: float = 0.0
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"{self.name}: a token goes to at most experts={self.experts}, not to top_k={self.top_k}")

    @property
    def name(self) -> str:
        zipf = f"-zipf{self.skew:g}" if self.skew else ""
        return f"{self.tokens}x{self.n}x{self.k}-e{self.experts}-top{self.top_k}{zipf}"

    @property
    def rows(self) -> int:
        """What a rank sends, to others and to itself: each token once for each of its experts."""
        return self.tokens * self.top_k

    def splits(self, world_size: int, which: int) -> torch.Tensor:
        """int64 [world_size, experts]: how many rows each rank has for each expert; the same on every rank and device."""
        popularity = torch.arange(1, self.experts + 1).double() ** -self.skew
        drawn = []
        for rank in range(world_size):
            generator = torch.Generator().manual_seed(1000 * which + rank)
            noise = -torch.empty(self.tokens, self.experts).exponential_(generator=generator).log()
            chosen = (popularity.log() + noise).topk(self.top_k, dim=1).indices
            drawn.append(torch.bincount(chosen.flatten(), minlength=self.experts))
        return torch.stack(drawn)


def find_shapes(file: Path, preset: str | None, device: str) -> tuple[MoeShape, ...]:
    """Those of all groups that suit the device, or of the groups and shapes that `preset` names, with commas between.

    Raises ValueError for a name that is neither.
    """
    groups = _groups(file)
    found: dict[str, MoeShape] = {}
    for name in named_groups(tuple(groups), preset, device):
        shapes = groups.get(name) or _typed(name)
        if not shapes:
            raise ValueError(
                f"no preset {name!r}: give one of {known_groups(tuple(groups), file)}, or a shape TOKENSxNxK-eEXPERTS-topK, "
                f"with -zipfS for skew, such as 4096x28672x4096-e8-top2-zipf0.5"
            )
        for shape in shapes:
            same = found.get(shape.name, shape)
            found[shape.name] = replace(shape, sources=tuple(dict.fromkeys((*same.sources, *shape.sources))))
    return tuple(found.values())


def _typed(name: str) -> list[MoeShape]:
    found = _TYPED.fullmatch(name)
    if found is None:
        return []
    tokens, n, k, experts, top_k = (int(size) for size in found.groups()[:5])
    return [MoeShape(tokens, n, k, experts, top_k, float(found[6] or 0))]


def _groups(file: Path) -> dict[str, list[MoeShape]]:
    if not file.exists():
        return {}
    return {
        name: [
            MoeShape(tokens, layer["n"], layer["k"], group["experts"], group["top_k"], skew, (f"{name} {of_layer}",))
            for of_layer, layer in group["layers"].items()
            for tokens in group["tokens"]
            for skew in group["skews"]
        ]
        for name, group in tomllib.loads(file.read_text()).items()
    }
