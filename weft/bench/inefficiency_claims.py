"""What the FiCCO paper observed of losses, asked of what was measured here: held or not, and the numbers.

A claim about a trend is a rank correlation (Spearman's rho) over the GEMMs. It holds if rho has the claimed sign and so
clear a one would come up by chance, values put to GEMMs at random, in at most 5% of cases. A claim about each GEMM
holds if at most one in ten is an exception: the other way round, by more than the 2% that repetitions may differ.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV-C and IV-D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from weft.bench.inefficiency_measure import CUTS, cut_name, gather_beside, gather_name, gemm_beside
from weft.bench.inefficiency_results import Row
from weft.bench.inefficiency_sides import TRANSPORTS
from weft.words import counted

LEAST_GEMMS = 5  # for a trend: of five in order 1 in 120 is by chance
_CHANCE = 0.05
_EXCEPTIONS = 0.1
_ALIKE = 1.02
_SHUFFLES = 20_000


@dataclass(frozen=True)
class Claim:
    """`held` is None where there are too few GEMMs to tell."""

    where: str
    text: str
    held: bool | None
    numbers: str

    @property
    def verdict(self) -> str:
        return {True: "held", False: "not held", None: "cannot tell"}[self.held]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The paper's observations, in its order; those of which nothing is recorded are left out."""
    found: list[Claim | None] = []
    for cut in ("rows", "columns"):
        few, many = cut_name(cut, 8), cut_name(cut, 64)
        found.append(_of_each("IV-C1", f"64 pieces by {cut} lose more than 8", [(r, few, many) for r in rows]))
    for pieces in (8, 64):
        both = cut_name("rows", pieces), cut_name("columns", pieces)
        pairs = [(r, *(both[::-1] if r.gemm.m < r.gemm.k else both)) for r in rows]
        found.append(_of_each("IV-C1", f"in {pieces}, rows lose more where M < K, columns else", pairs))
    for cut, pieces in CUTS:
        name = cut_name(cut, pieces)
        text = f"{name}: loss falls with the pieces' op-to-byte"
        found.append(_trend("IV-C1", text, rows, partial(Row.piece_op_to_byte, cut=cut, pieces=pieces), name, -1))
    for by in TRANSPORTS:
        name = gather_name(by)
        found.append(_trend("IV-C2", f"{name}: loss falls with size", rows, lambda r: r.gathered_bytes, name, -1))
    for by in ("library", "kernel"):
        pairs = [(r, gemm_beside("dma"), gemm_beside(by)) for r in rows]
        found.append(_of_each("IV-D1", f"a GEMM loses less beside dma than {by}", pairs))
    for by in TRANSPORTS:
        text = f"a GEMM's loss beside {by} grows with its traffic"
        found.append(_trend("IV-D1", text, rows, lambda r: r.traffic, gemm_beside(by), 1))
    for by in TRANSPORTS:
        text = f"{by}'s loss beside a GEMM grows with the GEMM's traffic"
        found.append(_trend("IV-D2", text, rows, lambda r: r.traffic, gather_beside(by), 1))
    return [claim for claim in found if claim is not None]


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Rank correlation, ties sharing their mean rank; NaN if one side does not vary. ValueError for unequal lengths."""
    a, b = ranks_of(x), ranks_of(y)
    if len(a) != len(b):
        raise ValueError(f"{counted(len(a), 'value')} cannot be correlated with {len(b)}: give as many")
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else float("nan")


def by_chance(x: ArrayLike, y: ArrayLike, sign: int) -> float:
    """How often `y`, put in any order, goes with `x` at least as clearly in the direction of `sign` (1 or -1)."""
    a, b = ranks_of(x), ranks_of(y)
    shuffled = np.random.default_rng(0).permuted(np.tile(b, (_SHUFFLES, 1)), axis=1)
    as_clear = sign * (shuffled @ a) >= sign * (b @ a) - 1e-9
    return (1 + int(as_clear.sum())) / (1 + _SHUFFLES)


def ranks_of(values: ArrayLike) -> np.ndarray:
    """1 for the least; the same for the same values: the mean of the places that they share."""
    _, which, count = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[which]


def _trend(
    where: str, text: str, rows: Sequence[Row], along: Callable[[Row], float], variant: str, sign: int
) -> Claim | None:
    rows = [row for row in rows if row.has(variant)]
    if not rows:
        return None
    x, y = [along(row) for row in rows], [row.loss(variant) for row in rows]
    if len(rows) < LEAST_GEMMS:
        return Claim(where, text, None, f"of {counted(len(rows), 'GEMM')}; it takes {LEAST_GEMMS}")
    rho = spearman(x, y)
    if np.isnan(rho):
        return Claim(where, text, None, "all GEMMs are alike in it")
    chance = by_chance(x, y, sign)
    return Claim(where, text, sign * rho > 0 and chance <= _CHANCE, f"rho {rho:+.2f}, by chance {chance:.1%}")


def _of_each(where: str, text: str, pairs: Sequence[tuple[Row, str, str]]) -> Claim | None:
    """Of (GEMM, variant, variant): that the first loses less than the second."""
    pairs = [(row, less, more) for row, less, more in pairs if row.has(less) and row.has(more)]
    if not pairs:
        return None
    exceptions = [row.name for row, less, more in pairs if row.loss(less) > _ALIKE * row.loss(more)]
    holding = [row.name for row, _, _ in pairs if row.name not in exceptions]
    numbers = f"{len(holding)} of {len(pairs)}"
    if exceptions and holding:
        numbers += f"; not {', '.join(exceptions)}" if len(exceptions) < len(holding) else f": {', '.join(holding)}"
    return Claim(where, text, len(exceptions) <= _EXCEPTIONS * len(pairs), numbers)
