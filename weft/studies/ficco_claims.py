"""The claims of FiCCO's sections I to VI, except IV, compared with a simulated or measured run. `weft.studies.losses`
measures section IV.

Values that the paper shows only in its pictures (figures 12 to 14) are not compared.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", I, II-B, V-B, VI and figures
12 to 14.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.bench.core.tables import geomean
from weft.hw import load_machine
from weft.studies import ficco_losses as losses
from weft.studies.claims import Claim
from weft.studies.ficco_rows import EIGHT, KINDS, NEAR, SHARD, STUDIED, GemmRow
from weft.studies.losses import spearman

_FOUR = tuple(STUDIED.values())


def claims(rows: Sequence[GemmRow]) -> list[Claim]:
    """Return the paper's claims with the results of a run. rows: the rows of table I and of the synthetic GEMMs."""
    by_loss = losses.claims(rows) if all(row.losses for row in rows) else ()
    return [*_ideal_and_shard(rows), *_schedules(rows), *by_loss, *_heuristic(rows)]


def _ideal_and_shard(rows: Sequence[GemmRow]) -> Iterator[Claim]:
    yield Claim("ideal overlap, maximum", "I, II-B, figure 13", 1.7, max(row.ideal for row in rows), "x")
    yield _bell(rows)
    of = {row.config: shard for row in rows if (shard := row.speedup(SHARD)) is not None}
    yield Claim("slowdown of shard overlap against serial, maximum", "I, VI-B", 3.9, 1 / min(of.values()), "x")
    faster = [f"{name}: {gain:.2f}x" for name, gain in of.items() if gain > 1]
    said = ", ".join(faster) if faster else f"none of {len(of)}"
    yield Claim("shard overlap attains no speedup", "VI-B, figure 13", "none", said, held=not faster)
    machine = load_machine("mi300x")
    slower = machine["collective.all_gather"].si / machine["link.pair_usable"].si
    yield Claim("slowdown of shard overlap's communication against the all-gather", "VI-B", 7, slower, "x")


def _bell(rows: Sequence[GemmRow]) -> Claim:
    """Return the claim that the ideal speedup is largest for GEMMs that take as long as the communication, and smaller
    for longer and shorter GEMMs.
    """
    rising = [row for row in rows if row.ratio < 1]
    falling = [row for row in rows if row.ratio > 1]
    rho = [spearman([row.ratio for row in part], [row.ideal for row in part]) for part in (rising, falling)]
    said = f"rank correlation {rho[0]:+.2f} below a ratio of 1, {rho[1]:+.2f} above"
    held = rho[0] > 0.9 and rho[1] < -0.9
    return Claim("the ideal is a bell curve over GEMM / communication", "VI-B, figure 13", "yes", said, held=held)


def _schedules(rows: Sequence[GemmRow]) -> Iterator[Claim]:
    def most(names: Sequence[str]) -> float:
        return max(gain for row in rows if (gain := row.speedup(*names)) is not None)

    def mean(names: Sequence[str]) -> float:
        return geomean([gain for row in rows if (gain := row.speedup(*names)) is not None]) or 0.0

    yield Claim("FiCCO 1D, maximum", "VI-C, figure 12(b)", 1.6, most(KINDS["FiCCO 1D"]), "x")
    yield Claim("FiCCO 2D, maximum (emulated in the paper)", "VI-C, figure 12(b)", 1.7, most(KINDS["FiCCO 2D"]), "x")
    others = [row.config for row in rows if row.best(EIGHT) not in _FOUR]
    near = [row for row in rows if (lost := row.lost(row.best(_FOUR) or "", EIGHT)) is not None and lost <= NEAR]
    said = f"not for {len(others)} of {len(rows)}; within {NEAR:.0%} of the four's best for {len(near)}"
    yield Claim("the four schedules that the paper omits are strictly worse", "V-B", "yes", said, held=not others)
    by_engine, by_cores = mean(EIGHT), mean(KINDS["FiCCO by all-gathers"])
    said = f"geomean {by_engine:.2f}x by engines, {by_cores:.2f}x by collectives"
    yield Claim(
        "FiCCO by copy engines is faster than FiCCO by RCCL", "VI-E, figure 14", "yes", said, held=by_engine > by_cores
    )
    shard = mean((SHARD,))
    said = f"geomean {by_engine:.2f}x against {shard:.2f}x"
    yield Claim("FiCCO is faster than shard overlap", "VI-E, figure 14", "yes", said, held=by_engine > shard)


def _heuristic(rows: Sequence[GemmRow]) -> Iterator[Claim]:
    for begin, what, paper in (("g", "table I", 16), ("s", "the synthetic GEMMs", 13)):
        lost = [row.lost(row.pick, _FOUR) or 0.0 for row in rows if row.gemm.name.startswith(begin)]
        right = sum(not of for of in lost)
        said = f"{right} of {len(lost)}"
        yield Claim(
            f"the heuristic picks the fastest schedule, {what}", "VI-D", f"{paper} of 16", said, held=right >= paper
        )
        wrong = [of for of in lost if of]
        if begin == "s" and wrong:
            yield Claim("loss of the heuristic's wrong picks, mean", "VI-D", 14, 100 * sum(wrong) / len(wrong), "%")


def bars(rows: Sequence[GemmRow]) -> Iterator[Claim]:
    """Yield two targets of weft's own: the least number of GEMMs for which its closed form must pick a schedule near
    the fastest. The closed form is a formula that picks a schedule without simulation (`weft.plan.closed_form`).
    """
    for begin, what, wanted in (("g", "table I", 14), ("s", "the synthetic GEMMs", 13)):
        lost = [
            of for row in rows if row.gemm.name.startswith(begin) and (of := row.lost(row.closed, EIGHT)) is not None
        ]
        if lost:
            near = sum(of <= NEAR for of in lost)
            said = f"{near} of {len(lost)}, at most {max(lost):.1%} lost"
            held = near >= wanted and max(lost) <= 0.1
            bar = f"target: {wanted} of 16, at most 10% lost"
            yield Claim(f"closed form within {NEAR:.0%} of the best of eight, {what}", "ours", bar, said, held=held)
