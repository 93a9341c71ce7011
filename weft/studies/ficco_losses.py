"""The losses of FiCCO's schedules by decomposition (DIL) and by contention (CIL), and the order of the schedules by these losses.

The paper assigns a degree of DIL and of CIL to each schedule, by reasoning and without numbers (figure 11(b)). Its heuristic
relies on this order (figure 12(a)). Here the losses are simulated (`weft.sim.losses`).

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", V-B and V-C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.bench.core.tables import ResultTable, geomean, table
from weft.builders import Problem, named
from weft.sim import Model
from weft.sim.losses import inefficiencies
from weft.studies.claims import Claim
from weft.studies.ficco_rows import NAMED, NEAR, GemmRow

_EQUAL = 1e-3
"""Losses that differ by less than this fraction are equal."""


def losses_of(name: str, problem: Problem, model: Model) -> list[float]:
    """Return the GEMM's DIL and CIL, and the communication's CIL, as factors by which times grow."""
    found = inefficiencies(named(problem, name).build(), problem, model)
    return [found.gemm_decomposition, found.gemm_contention, found.communication_contention]


def losses_table(rows: Sequence[GemmRow]) -> ResultTable:
    lines = [
        (short, *(geomean([row.losses[name][i] for row in rows]) or 1.0 for i in range(3)))
        for short, name in NAMED.items()
    ]
    title = "Losses by decomposition (DIL) and by contention (CIL), as factors: geometric means over all GEMMs"
    columns = {
        "schedule": lambda line: line[0],
        "GEMM DIL": lambda line: f"{line[1]:.3f}",
        "GEMM CIL": lambda line: f"{line[2]:.3f}",
        "communication CIL": lambda line: f"{line[3]:.3f}",
    }
    return table(title, lines, columns)


def claims(rows: Sequence[GemmRow]) -> Iterator[Claim]:
    """Yield the claims about the order of 1D schedules, for GEMMs with M > K: the heuristic chooses 1D schedules only
    for these.
    """
    chosen = [row.losses for row in rows if row.gemm.m > row.gemm.k]
    uniform, hetero, unfused, more = (
        NAMED[name] for name in ("uniform-fused-1D", "hetero-fused-1D", "hetero-unfused-1D", "uniform-unfused-1D")
    )

    def at_most(i: int, low: str, high: str) -> int:
        return sum(of[low][i] <= of[high][i] * (1 + _EQUAL) for of in chosen)

    def ordered(what: str, i: int, names: tuple[str, str, str], said: str) -> Claim:
        first, second = at_most(i, names[0], names[1]), at_most(i, names[1], names[2])
        text = said.format(f"{first} of {len(chosen)}", f"{second} of {len(chosen)}")
        return Claim(what, "V-C, figure 11(b)", "yes", text, held=first == second == len(chosen))

    yield ordered(
        "1D schedules by the GEMM's DIL: uniform-fused, hetero-fused, hetero-unfused", 0, (uniform, hetero, unfused),
        "uniform-fused at most hetero-fused for {0}, and hetero-fused at most hetero-unfused for {1}",
    )  # fmt: skip
    yield ordered(
        "1D schedules by the GEMM's CIL: hetero-unfused, hetero-fused, uniform-fused", 1, (unfused, hetero, uniform),
        "hetero-unfused at most hetero-fused for {0}, and hetero-fused at most uniform-fused for {1}",
    )  # fmt: skip
    greater = at_most(0, unfused, more)
    same = sum(abs(of[more][1] / of[unfused][1] - 1) <= NEAR for of in chosen)
    said = f"DIL at least as high for {greater} of {len(chosen)}, CIL within {NEAR:.0%} for {same}"
    yield Claim(
        "uniform-unfused-1D has more DIL than hetero-unfused-1D, and the same CIL", "V-B", "yes", said,
        held=greater == same == len(chosen),
    )  # fmt: skip
