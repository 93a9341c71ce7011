"""Permutations for collectives of columns: collectives concatenate rows, so one copy puts the columns in place."""

from __future__ import annotations

import torch


def side_by_side(below: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return [m, world_size * n], the matrices of all ranks side by side. below: [world_size * m, n], one below the
    other.
    """
    rows, n = below.shape
    m = rows // world_size
    return below.view(world_size, m, n).transpose(0, 1).reshape(m, world_size * n)


def below_each_other(beside: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return [world_size * m, n] from [m, world_size * n]: the inverse of `side_by_side`."""
    m, cols = beside.shape
    n = cols // world_size
    return beside.reshape(m, world_size, n).transpose(0, 1).reshape(world_size * m, n)
