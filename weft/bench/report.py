"""Recorded results as Markdown, so that no number in a document is typed by hand.

    python -m weft.bench.report README.md benchmarks/results/*.jsonl

rewrites, in place, what stands between `<!-- results:NAME -->` and `<!-- /results -->`, where NAME is a results file's
name without ".jsonl"; a block stays empty until its results are recorded. For each dtype and mode there is a table with
a row per configuration: the time of every arm, and the default variant's speedup over each baseline and time over the
floor. A later run of a configuration replaces an earlier one; its arms are never mixed with another run's.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.bench import records
from weft.bench.arms import BASELINES

Record = dict[str, Any]
DEFAULT = "direct"  # what transport="auto" takes
_MARKED = re.compile(r"(<!-- results:(?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- /results -->)", re.DOTALL)


def markdown(found: Sequence[Record]) -> str:
    """The tables of one results file, with a line that says where and with what they were measured."""
    if not found:
        raise ValueError("no records: the results file is empty")
    latest = _latest_runs(found)
    last = latest[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    commits = ", ".join(dict.fromkeys(r["commit"] for r in latest))
    parts = [
        f"{last['ranks']} ranks, {last['machine']}; {versions}; commit {commits}, {last['date'][:10]}. Milliseconds are the "
        f"slowest rank's median."
    ]
    for dtype in dict.fromkeys(r["dtype"] for r in latest):
        for mode in ("queued", "single", "graph"):
            rows = [r for r in latest if r["dtype"] == dtype and r["mode"] == mode]
            if rows:
                parts.append(f"**{mode}**, {dtype}\n\n{_table(rows)}")
    return "\n\n".join(parts) + "\n"


def rewrite(document: str, results: Mapping[str, Sequence[Record]]) -> str:
    """`document` with every marked block regenerated. Raises ValueError where a block shows results that are not given."""

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in results:
            if not found["body"].strip():
                return found[0]
            raise ValueError(f"the document wants results:{name}, but only {', '.join(results) or 'none'} are given")
        return f"{found[1]}{markdown(results[name])}{found[4]}"

    return _MARKED.sub(block, document)


def _latest_runs(found: Sequence[Record]) -> list[Record]:
    """Of each (configuration, dtype) the records of its last run, in the order of first appearance."""
    last = {(r["config"], r["dtype"]): r["run"] for r in found}
    order = list(last)
    return sorted(
        (r for r in found if last[r["config"], r["dtype"]] == r["run"]),
        key=lambda r: order.index((r["config"], r["dtype"])),
    )


def _table(rows: Sequence[Record]) -> str:
    variants = list(dict.fromkeys(r["variant"] for r in rows))
    baselines = [v for v in BASELINES if v in variants]
    fused = [v for v in variants if v not in BASELINES]
    header = ["configuration", *(f"{v}, ms" for v in baselines + fused)]
    # Every arm's time is shown; ratios only of what the operator does when nobody chooses, or a reader drowns in them.
    judged = [DEFAULT] if DEFAULT in fused else fused[:1]
    header += [f"{f} vs {b}" for f in judged for b in baselines] + [f"{f} / floor" for f in judged]
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    gains: dict[tuple[str, str], list[float]] = {}
    for config in dict.fromkeys(r["config"] for r in rows):
        by_variant = {r["variant"]: r for r in rows if r["config"] == config}
        cells = [config.replace("|", "\\|") + _scale(next(iter(by_variant.values())))]
        cells += [_number(by_variant.get(v, {}).get("p50_ms")) for v in baselines + fused]
        for f in judged:
            for b in baselines:
                if f in by_variant and b in by_variant:
                    gain = by_variant[b]["p50_ms"] / by_variant[f]["p50_ms"]
                    gains.setdefault((f, b), []).append(gain)
                    cells.append(f"{gain:.2f}x")
                else:
                    cells.append("")
        cells += [f"{by_variant[f]['floor_ratio']:.2f}" if f in by_variant else "" for f in judged]
        lines.append("| " + " | ".join(cells) + " |")
    means = [_geomean(gains.get((f, b), [])) for f in judged for b in baselines]
    if len(lines) > 3:
        empty = [""] * (len(baselines) + len(fused))
        lines.append("| " + " | ".join(["geometric mean", *empty, *means, *([""] * len(judged))]) + " |")
    return "\n".join(lines)


def _scale(record: Record) -> str:
    batch, rows = (round(1 / record[what]) for what in ("scale", "rows_scale"))
    if batch == rows:
        return f" (1/{batch})" if batch > 1 else ""
    return f" (batch 1/{batch}, rows 1/{rows})"


def _number(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _geomean(gains: Sequence[float]) -> str:
    return f"{math.exp(sum(map(math.log, gains)) / len(gains)):.2f}x" if gains else ""


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        raise SystemExit("usage: python -m weft.bench.report DOCUMENT.md RESULTS.jsonl ...")
    document, *files = map(Path, arguments)
    results = {path.stem: records.read([path]) for path in files}
    document.write_text(rewrite(document.read_text(), results))


if __name__ == "__main__":
    main(sys.argv[1:])
