"""Write docs/reproduction.md from the recorded results: `python docs/reproduction.py`.

A row is a claim of a paper, with the paper's number, ours, and the verdict. `weft.studies` derives claims from simulated records;
the `_measured_...` functions here derive claims from GPU records. `reproduction.toml` gives the reason for each claim that is not
reproduced, and the parts that nobody implements. It has no results. The script refuses a claim without a reason. A test fails if
the page differs from the output of this script. The script is not installed with weft.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.bench.core import records as files
from weft.bench.core.tables import Record, by_config, geomean, markdown_table
from weft.bench.report import speedups
from weft.studies import (
    ficco,
    ficco_claims,
    fused_embedding,
    fused_embedding_measured,
    launches,
    losses,
    pgas,
    pgas_measured,
    power,
    t3_hardware,
)
from weft.studies import t3 as t3_software
from weft.studies.claims import LEAST_POINTS, POINTS, RATIO, Claim
from weft.studies.ficco_rows import EIGHT, KINDS, SHARD

HERE = Path(__file__).parent
PAGE, REASONS = HERE / "reproduction.md", HERE / "reproduction.toml"
_RESULTS = HERE.parent / "benchmarks" / "results"


_LOSSES = ("h100-inefficiency", "h200-inefficiency")
"""Records of losses, the newest first: only the newest has N divided by the ranks, and whole shards."""


class Row(NamedTuple):
    claim: Claim
    on: str


def read(name: str) -> list[Record]:
    return files.read([_RESULTS / f"{name}.jsonl"])


def _on(record: Record) -> str:
    """Return the name of a record's machine, and whether the record is simulated."""
    if record["device"] != "simulated":
        return f"measured, {record['machine']}"
    ranks = f"{record['ranks']} x " if record.get("study") is None else ""
    return f"simulated, {ranks}{record['machine']}"


# --- the papers' claims ---


def of_fused_embedding() -> Iterator[Row]:
    found = read("sim-fused-embedding")
    for claim in fused_embedding.claims(fused_embedding.rows_of(found)):
        yield Row(claim, _on(found[-1]))
    yield from _measured_zero_copy()
    yield from _measured_on_gpus(fused_embedding_measured, "fused-embedding")
    yield from _measured_peak()


def _measured_on_gpus(study: Any, name: str) -> Iterator[Row]:
    """Judge the records of a measured study, `GPU-NAME.jsonl`, of the newest GPU that has such a file."""
    for gpu in ("h200", "h100"):
        if (_RESULTS / f"{gpu}-{name}.jsonl").exists():
            found = read(f"{gpu}-{name}")
            yield from (Row(claim, _on(found[-1])) for claim in study.claims(study.rows_of(found)))
            return


def _measured_peak() -> Iterator[Row]:
    """Judge the fused kernel's peak bandwidth by the bytes over time that `weft bench pgas` records."""
    found = read("h100-pgas")
    for (figure, config), by in pgas_measured.rows_of(found).items():
        what = f"measured: the fused kernel needs less bandwidth at its peak, {figure} scaling of the paper on PGAS"
        if config == "2" and (claim := pgas_measured.peak_claim(what, "3.2", by)) is not None:
            yield Row(claim, _on(found[-1]))


def _measured_zero_copy() -> Iterator[Row]:
    """Judge figure 14. Its baseline (one kernel per table, all-to-all, shuffle) is the variant embedding_bag."""
    found = read("h200-2-ranks")
    gains = list(speedups(found, "queued", "fp32", "direct", "embedding_bag").values())
    where, on = "4.3, figure 14", _on(found[-1])
    mean = geomean(gains) or 1.0
    yield Row(
        Claim("zero-copy on two GPUs, measured: time saved, mean", where, 25, 100 * (1 - 1 / mean), "%"),
        on,
    )
    yield Row(
        Claim("zero-copy on two GPUs, measured: time saved, maximum", where, 35, 100 * (1 - 1 / max(gains)), "%"), on
    )
    for order, variant, paper in (("natural", "direct-natural", 7), ("remote first", "direct", 1)):
        mine = [r for r in found if (r["mode"], r["dtype"], r["variant"]) == ("queued", "fp32", variant)]
        skew = sum(r["skew_ms"] / r["p50_ms"] for r in mine) / len(mine)
        name = f"skew of ranks in a host, {order} order (the paper's is between nodes)"
        yield Row(Claim(name, "4.2, figure 13", paper, 100 * skew, "%"), on)


def t3() -> Iterator[Row]:
    found = read("sim-t3-hardware")
    for claim in t3_hardware.claims(t3_hardware.rows_of(found)):
        yield Row(claim, _on(found[-1]))
    yield from _measured_on_gpus(t3_software, "t3")
    yield from _measured_on_gpus(power, "t3-counters")


def of_ficco() -> Iterator[Row]:
    yield from _measured_losses()
    yield from _measured_schedules()
    yield from _measured_on_gpus(launches, "ficco-launches")
    yield from _measured_on_gpus(power, "ficco-power")
    yield from _measured_experts()
    found = read("sim-ficco")
    for claim in ficco_claims.claims(ficco.rows_of(found)):
        yield Row(claim, _on(found[-1]))


def _measured_losses() -> Iterator[Row]:
    found = read(next(name for name in _LOSSES if (_RESULTS / f"{name}.jsonl").exists()))
    rows, on = losses.rows_of(found), _on(found[-1])
    names = {
        losses.gather_name("dma"): ("decomposition loss of the all-gather, geomean", "IV-C2, figure 8"),
        losses.gemm_beside("dma"): ("contention loss of the GEMM, geomean", "IV-D1, figure 9"),
        losses.gather_beside("dma"): ("contention loss of the all-gather, geomean", "IV-D2, figure 9"),
    }
    shards = "of shard overlap (whole shards"
    names |= {
        losses.gemm_beside("dma", 1): (f"contention loss of the GEMM, geomean, {shards}", "IV-D1"),
        losses.gather_beside("dma", 1): (f"contention loss of the all-gather, geomean, {shards}", "IV-D2"),
    }
    for variant, (what, where) in names.items():
        mean = geomean([loss for row in rows if (loss := row.loss(variant)) is not None])
        if mean is None:
            continue
        paper = round(100 * (losses.PAPER_MEANS[variant] - 1), 9)
        of = ", by copy engines)" if shards in what else " (by copy engines)"
        yield Row(Claim(f"{what}{of}", where, paper, 100 * (mean - 1), "%"), on)
    for claim in losses.claims(rows):
        if claim.where != "not in the paper":
            yield Row(Claim(claim.text, claim.where, "yes", claim.numbers, held=bool(claim.held)), on)


def _measured_schedules() -> Iterator[Row]:
    """Judge figure 14 on the GEMMs that were measured with all schedules on two H200s."""
    found = read("h200-all_gather_matmul-schedules")
    cases = [of for of in by_config([r for r in found if r["mode"] == "queued"]).values() if EIGHT[0] in of]

    def mean(names: Sequence[str]) -> float:
        best = [min(of[name]["p50_ms"] for name in names if name in of) for of in cases]
        return geomean([of["serial"]["p50_ms"] / ms for of, ms in zip(cases, best, strict=True)]) or 1.0

    ours, rccl, shard = mean(EIGHT), mean(KINDS["FiCCO by all-gathers"]), mean((SHARD,))
    where, on = "VI-E, figure 14", f"{_on(found[-1])}, {len(cases)} GEMMs"
    said = f"geomean {ours:.2f}x by engines, {rccl:.2f}x by collectives"
    yield Row(
        Claim("FiCCO by copy engines is faster than FiCCO by RCCL, measured", where, "yes", said, held=ours > rccl), on
    )
    said = f"geomean {ours:.2f}x against {shard:.2f}x"
    yield Row(Claim("FiCCO is faster than shard overlap, measured", where, "yes", said, held=ours > shard), on)


def _measured_experts() -> Iterator[Row]:
    """Judge FiCCO before experts (g13 to g16): the fastest 2D schedule with one expert on each rank, against serial."""
    for gpu in ("h200", "h100"):
        if (_RESULTS / f"{gpu}-ficco-experts.jsonl").exists():
            found = read(f"{gpu}-ficco-experts")
            gains = {}
            for config, of in by_config([r for r in found if r["mode"] == "queued"]).items():
                best = min((r["p50_ms"] for name, r in of.items() if name.startswith("ficco_2d")), default=None)
                if best is not None:
                    gains[config] = of["serial"]["p50_ms"] / best
            said = ", ".join(f"{gain:.2f}x for {config}" for config, gain in gains.items())
            what = "FiCCO's 2D schedules before experts (shapes of g13 to g16) are faster than serial"
            yield Row(Claim(what, "VI-C, figure 13", "yes", said, held=min(gains.values()) > 1), _on(found[-1]))
            return


def of_pgas() -> Iterator[Row]:
    simulated = read("sim-pgas")
    for claim in pgas.claims(pgas.rows_of(simulated)):
        yield Row(claim, f"simulated, {simulated[-1]['machine']}")
    papers = {"pgas-weak": ("weak", "IV-A1", 2.10), "pgas-strong": ("strong", "IV-B1", 2.95)}
    for name, gpu in (("h200-2-ranks", "H200"), ("h100-embedding_all_to_all", "H100")):
        found = read(name)
        gains = speedups(found, "queued", "fp32", "direct", "embedding_bag")
        for config, (scaling, where, paper) in papers.items():
            if config in gains:
                what = f"{scaling} scaling, 2 GPUs: speedup over the baseline, measured on {gpu}"
                yield Row(Claim(what, where, paper, gains[config], "x"), _on(found[-1]))
    yield from _measured_on_gpus(pgas_measured, "pgas")


PAPERS = {
    "fused_embedding": (
        "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", of_fused_embedding,
        "The study is [fused embedding + all-to-all](studies/fused-embedding.md).",
    ),
    "t3": (
        "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", t3,
        "The study is [T3 on its own hardware](studies/t3-hardware.md).",
    ),
    "ficco": (
        "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", of_ficco,
        "The studies are [FiCCO's evaluation](studies/ficco.md) and [what overlap costs](characterisation.md).",
    ),
    "pgas": (
        "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning Recommendation Systems",
        of_pgas,
        "The study is [PGAS embedding retrieval](studies/pgas.md).",
    ),
}  # fmt: skip
"""{key in `reproduction.toml`: (title, claims, sentence on the study)}."""


# --- the page ---


def page() -> str:
    """Return the page. Raise `ValueError` for a claim that lacks a needed reason, or a reason without a claim."""
    reasons = tomllib.loads(REASONS.read_text())
    rows = {paper: list(of()) for paper, (_, of, _) in PAPERS.items()}
    for paper, found in rows.items():
        check(paper, [row.claim for row in found], reasons[paper]["why"])
    parts = [_HEAD.format(points=POINTS, least=LEAST_POINTS, ratio=100 * RATIO), _summary(rows)]
    for paper, (title, _, study) in PAPERS.items():
        parts.append(f"## {title}\n\n{study}".rstrip() + f"\n\n{_table(rows[paper], reasons[paper]['why'])}")
        items = [(one["item"], one["what"], one["why"]) for one in reasons[paper]["not_built"]]
        header = ("figure, section or feature", "what it is", "why")
        parts.append(f"Parts of the paper for which weft has no number:\n\n{_left(header, items)}")
    return "\n\n".join(parts) + "\n"


_HEAD = """<!-- Generated from benchmarks/results and docs/reproduction.toml by `python docs/reproduction.py`: edit there. -->

# The four papers, claim by claim

weft builds on four papers. Which of their numbers does it reproduce? Each row of the tables below is a claim of a paper: a number
from a figure, a table or the text, or a statement. weft's numbers come from recorded runs. *Simulated* numbers come from a model of
the paper's machine; `weft reproduce all` repeats these simulations. *Measured* numbers come from GPUs that the papers do not use.

A claim with a number counts as reproduced if weft's number deviates from the paper's by less than a limit. The limit is
{ratio:g}% of the paper's number. For percentages the limit is {points:g} percentage points. For small percentages it is half of the
paper's percentage, but at least {least:g} point. Only the study of T3's hardware sets other limits, for some claims (`weft
reproduce t3` prints them in the column "allowed"). A claim without a number counts as reproduced if it also holds in weft's run.
Values that the paper shows only in a plot, without a number, are not compared. "(Used to derive ...)" marks a number of the
paper from which the model derives one of its own numbers, so its agreement proves nothing."""


def check(paper: str, claims: Sequence[Claim], why: dict[str, str]) -> None:
    """Raise `ValueError` for a name of two claims, a claim that lacks a needed reason, or a reason without a claim."""
    names = [claim.what for claim in claims]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{paper}: several claims have the name {twice[0]!r}: give each claim its own name")
    if bare := [claim.what for claim in claims if not claim.reproduced and claim.what not in why]:
        raise ValueError(f"{paper}: not reproduced, without a reason in {REASONS.name}: {'; '.join(bare)}")
    if unknown := sorted(set(why) - set(names)):
        raise ValueError(f"{paper}: {REASONS.name} has reasons for no claim: {'; '.join(unknown)}")


def _summary(rows: dict[str, list[Row]]) -> str:
    cells: list[Sequence[str]] = []
    for paper, (title, _, _) in PAPERS.items():
        of = rows[paper]
        yes = sum(bool(row.claim.reproduced) for row in of)
        simulated = [row for row in of if row.on.startswith("simulated")]
        cells.append((
            title, str(len(of)), str(yes), str(len(of) - yes),
            f"{sum(bool(row.claim.reproduced) for row in simulated)} of {len(simulated)}",
        ))  # fmt: skip
    return markdown_table(("paper", "claims", "reproduced", "not reproduced", "simulated: reproduced"), cells)


def _table(rows: Sequence[Row], why: dict[str, str]) -> str:
    cells = [
        (
            one.what, one.where, one.number(one.paper), one.number(one.ours), one.deviation,
            "yes" if one.reproduced else "**no**", on, why.get(one.what, ""),
        )
        for one, on in rows
    ]  # fmt: skip
    return _left(
        (
            "claim",
            "section",
            "paper",
            "weft",
            "deviation",
            "reproduced",
            "simulated or measured on",
            "why, or what differs",
        ),
        cells,
    )


def _left(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    return markdown_table(header, cells).replace("|---:", "|---")


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
