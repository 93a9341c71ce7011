"""The MoE combine for tests: random rows on the ranks of their experts, and the expected results in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support.all_to_all_matmul_reference import Splits, assert_within

from weft.runtime.schedule_memory import TORCH_DTYPE


def received_of(rank: int, splits: Splits) -> torch.Tensor:
    """Return [ranks, experts]: the number of rows on `rank` from each rank, for each local expert."""
    experts = len(splits[0]) // len(splits)
    return torch.tensor([of_rank[rank * experts : (rank + 1) * experts] for of_rank in splits])


def inputs(splits: Splits, k: int, n: int, dtype: str, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return every rank's h, and the weights [experts of all ranks, k, n]. All ranks get the same values."""
    generator, world = torch.Generator().manual_seed(seed), len(splits)
    came = [int(received_of(rank, splits).sum()) for rank in range(world)]
    h = [torch.randn(count, k, generator=generator).to(TORCH_DTYPE[dtype]) for count in came]
    return h, torch.randn(len(splits[0]), k, n, generator=generator).to(TORCH_DTYPE[dtype])


def segments(rank: int, splits: Splits, h: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
    """Return {(source rank, global expert): rows} of the `h` of `rank`."""
    world, received = len(splits), received_of(rank, splits)
    experts = received.shape[1]
    parts = iter(h[: int(received.sum())].split(received.t().flatten().tolist()))
    return {(source, rank * experts + e): next(parts) for e in range(experts) for source in range(world)}


def expected(rank: int, splits: Splits, h: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """Return the expected result of `rank`: its tokens, sorted by global expert. It is computed in the dtype of `h` and
    `weights`.
    """
    world = len(splits)
    of_ranks = [segments(r, splits, h[r]) for r in range(world)]
    experts = weights.shape[0] // world
    return torch.cat([of_ranks[e // experts][rank, e] @ weights[e] for e in range(weights.shape[0])])


def assert_rows(
    found: torch.Tensor, rank: int, splits: Splits, h: Sequence[torch.Tensor], weights: torch.Tensor, what: str
) -> None:
    """Check that each element is rank `rank`'s result, except for a rounding to its dtype and the errors of sums in
    fp32.

    `assert_rows` of `all_to_all_matmul_reference` explains the bound.
    """
    wanted = expected(rank, splits, [part.double() for part in h], weights.double())
    magnitudes = expected(rank, splits, [part.double().abs() for part in h], weights.double().abs())
    limit = torch.finfo(found.dtype).eps * wanted.abs() + weights.shape[1] * 2.0**-24 * magnitudes
    assert_within(found, wanted, limit, f"{what}, rank {rank}")
