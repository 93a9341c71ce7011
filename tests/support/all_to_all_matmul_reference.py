"""Mixture of experts for tests: random splits, tokens and weights, and the expected results in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.builders import AllToAllMatmul, Candidate
from weft.runtime.schedule_memory import TORCH_DTYPE

Splits = tuple[tuple[int, ...], ...]


def random_splits(world: int, experts: int, rows: Sequence[int], seed: int) -> Splits:
    """Return very uneven splits: most experts of a rank get few tokens or none."""
    random = np.random.default_rng(seed)
    return tuple(
        tuple(map(int, random.multinomial(count, random.dirichlet(np.full(world * experts, 0.3))))) for count in rows
    )


def inputs(p: AllToAllMatmul, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return every rank's tokens, and the weights [experts of all ranks, k, n]. All ranks get the same values."""
    generator, dtype = torch.Generator().manual_seed(seed), TORCH_DTYPE[p.dtype]
    tokens = [torch.randn(count, p.k, generator=generator).to(dtype) for count in p.rows]
    return tokens, torch.randn(p.world_size * p.experts, p.k, p.n, generator=generator).to(dtype)


def expected(
    rank: int, splits: Splits, tokens: Sequence[torch.Tensor], weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected result of rank `rank`: y [rows that arrive, n] in float64, and received [ranks, experts]."""
    world = len(splits)
    experts = weights.shape[0] // world
    parts = [part.double().split(list(of_rank)) for part, of_rank in zip(tokens, splits, strict=True)]
    mine = range(rank * experts, (rank + 1) * experts)
    y = torch.cat([parts[source][expert] @ weights[expert].double() for expert in mine for source in range(world)])
    return y, torch.tensor([list(of_rank)[mine.start : mine.stop] for of_rank in splits])


def added_to(candidate: Candidate, p: AllToAllMatmul) -> int:
    """Return the number of times that a schedule accumulates into an element of its result, with a rounding each time.
    Only FiCCO's schedules by columns accumulate.
    """
    return (dict(candidate.parameters)["steps"] or p.world_size) - 1 if candidate.builder == "ficco_2d" else 0


def assert_rows(
    found: torch.Tensor, rank: int, splits: Splits, tokens: Sequence[torch.Tensor], weights: torch.Tensor, what: str, added: int = 0
) -> None:  # fmt: skip
    """Check that each element of `found` is rank `rank`'s result, except for rounding errors.

    The bound allows one rounding to the dtype of `found`, `added` more such roundings, and the errors of sums in fp32.
    The check is per element, because a wrong row or column hardly changes the norm of the whole. A sum of k products in
    fp32, in any order, errs by at most k roundings of the sum of their magnitudes.
    """
    wanted, _ = expected(rank, splits, tokens, weights)
    magnitudes, _ = expected(rank, splits, [part.abs() for part in tokens], weights.abs())
    eps = torch.finfo(found.dtype).eps
    limit = eps * wanted.abs() + (weights.shape[1] * 2.0**-24 + added * eps) * magnitudes
    assert_within(found, wanted, limit, f"{what}, rank {rank}")


def assert_within(found: torch.Tensor, wanted: torch.Tensor, limit: torch.Tensor, what: str) -> None:
    """Check that each element of `found` differs from `wanted` by at most its `limit`."""
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    wrong = ~((found.double() - wanted).abs() <= limit)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, first [{row}, {column}]: "
            f"{found[row, column]:.6g} instead of {wanted[row, column]:.6g}"
        )
