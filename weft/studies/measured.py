"""Helpers for studies that were measured on GPUs: the records of the last run, and a sentence that describes the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.bench.core.records import last_runs
from weft.bench.core.tables import Record

Rows = Mapping[tuple[str, str], Mapping[str, Record]]
"""{(figure, configuration): {variant: record}}"""


def rows_of_study(records: Sequence[Record], study: str, what: str) -> Rows:
    """Return the last run of each configuration of `study`. Raise `ValueError` if there are no records.

    what: the study's subject, for the error text.
    """
    mine = [record for record in records if record.get("study") == study]
    if not mine:
        raise ValueError(
            f"no measured records of {what}: run weft bench {study.removesuffix('_measured')} --json FILE on 2 GPUs"
        )
    last = last_runs(mine, lambda r: (r["figure"], r["config"]))
    return {(of[0]["figure"], of[0]["config"]): {r["variant"]: r for r in of} for of in last.values()}


def note_on_run(records: Sequence[Record], study: str, *, ranks: bool) -> str:
    """Return a sentence that describes the runs of `study` in the report: the machine, and the commits, each with the figures
    that were measured at it.

    ranks: True to mention the number of ranks.
    """
    rows = rows_of_study(records, study, study)
    figures: dict[str, list[str]] = {}
    for (figure, _), by in rows.items():
        for record in by.values():
            of = figures.setdefault(f"commit {record['commit']}, {record['date'][:10]}", [])
            if figure not in of:
                of.append(figure)
    last = [record for by in rows.values() for record in by.values()][-1]
    said = f"{last['machine']}, {last['ranks']} ranks" if ranks else last["machine"]
    runs = [f"{run} ({', '.join(of)})" for run, of in figures.items()] if len(figures) > 1 else [*figures]
    tiny = " Tiny sizes for a test: the times say nothing." if last["tiny"] else ""
    return f"Measured on {said}, {last['dtype']}, each call alone after a barrier; {'; '.join(runs)}.{tiny}"
