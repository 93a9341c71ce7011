"""Synthetic sparse inputs: how long the bags are and which rows they name, seeded by table so that any W sees the same.

Bags are `Fixed(n)` or `UniformBags(most)` (each length in 0..most equally likely, mean most / 2). Rows are
`UniformRows()` or `Zipf(exponent)`, whose r-th most popular row has probability proportional to the integral of
x^-exponent from r to r+1: the bounded Pareto law cut into integers, which inverts in closed form and has no rejection
loop. Popular rows are scattered over the table by a fixed permutation (times a number coprime with the rows), as hashed
ids are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Fixed:
    length: int

    @property
    def mean(self) -> float:
        return float(self.length)

    def draw(self, samples: int, generator: torch.Generator) -> torch.Tensor:
        return torch.full((samples,), self.length, dtype=torch.int64, device=generator.device)


@dataclass(frozen=True)
class UniformBags:
    most: int

    @property
    def mean(self) -> float:
        return self.most / 2

    def draw(self, samples: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, self.most + 1, (samples,), generator=generator, device=generator.device)


@dataclass(frozen=True)
class UniformRows:
    def draw(self, rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, rows, (count,), generator=generator, device=generator.device)


@dataclass(frozen=True)
class Zipf:
    exponent: float

    def draw(self, rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
        u = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
        if abs(self.exponent - 1) < 1e-9:
            rank = torch.exp(u * math.log(rows + 1))
        else:
            power = 1 - self.exponent
            rank = (u * ((rows + 1) ** power - 1) + 1) ** (1 / power)
        rank = (rank.long() - 1).clamp_(0, rows - 1)  # rounding may reach rows + 1
        return (rank * _coprime(rows)) % rows

    def probabilities(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(probability of one row, number of rows that have it), the tail in groups: exact to about 1e-3."""
        edges = np.unique(np.concatenate([np.arange(min(rows, 200)), np.geomspace(min(rows, 200), rows, 600).round()]))
        power = 1 - self.exponent
        mass = np.log(edges + 1) if abs(power) < 1e-9 else ((edges + 1) ** power - 1) / power
        width = np.diff(edges)
        return np.diff(mass / mass[-1]) / width, width

    def expected_distinct(self, rows: int, draws: float) -> float:
        """How many different rows `draws` independent draws are expected to name."""
        probability, count = self.probabilities(rows)
        return float((count * -np.expm1(-draws * probability)).sum())

    def expected_hot_share(self, rows: int, draws: float, reuse: float) -> float:
        """The share of draws that name a row drawn more than `reuse` times."""
        probability, count = self.probabilities(rows)
        return float((count * probability)[draws * probability > reuse].sum())


Bags = Fixed | UniformBags
Rows = UniformRows | Zipf


def jagged_input(
    bags: list[Bags],
    rows: list[int],
    distribution: Rows,
    samples: int,
    tables: list[int],
    seed: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (int64 [n]) and offsets (int64 [len(tables) * samples + 1]) of those tables' features, table by table.

    `tables` are the tables' numbers in the whole model: they seed the draws, so that a table's input does not depend on
    which rank owns it.
    """
    lengths, values = [], []
    for bag, table_rows, table in zip(bags, rows, tables, strict=True):
        generator = torch.Generator(device).manual_seed(1_000_003 * seed + table)
        length = bag.draw(samples, generator)
        lengths.append(length)
        values.append(distribution.draw(table_rows, int(length.sum()), generator))
    offsets = torch.zeros(len(tables) * samples + 1, dtype=torch.int64, device=device)
    if not tables:
        return torch.zeros(0, dtype=torch.int64, device=device), offsets
    torch.cumsum(torch.cat(lengths), 0, out=offsets[1:])
    return torch.cat(values), offsets


def _coprime(rows: int) -> int:
    factor = 2_654_435_761 % rows or 1
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor
