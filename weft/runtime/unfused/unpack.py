"""Copies that rearrange data for collectives along columns. torch's collectives concatenate or split rows only."""

from __future__ import annotations

import torch


def side_by_side(below: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the matrices of all ranks side by side, [m, world_size * n].

    below: the same matrices one below the other, [world_size * m, n].
    """
    rows, n = below.shape
    m = rows // world_size
    return below.view(world_size, m, n).transpose(0, 1).reshape(m, world_size * n)


def below_each_other(beside: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the inverse of `side_by_side`: matrices one below the other, [world_size * m, n].

    beside: the matrices side by side, [m, world_size * n].
    """
    m, cols = beside.shape
    n = cols // world_size
    return beside.reshape(m, world_size, n).transpose(0, 1).reshape(world_size * m, n)
