"""`weft reproduce all`: run all simulated studies, and show which of the papers' claims are reproduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.bench.core.tables import Record, ResultTable, table
from weft.studies import ficco, fused_embedding, pgas, t3_hardware
from weft.studies.claims import Claim

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Study:
    """A study that `weft reproduce` can simulate.

    name: its name on the command line.
    share: its fraction of the time of `weft reproduce all`, for the progress display.
    """

    name: str
    module: ModuleType
    share: float
    simulate: Callable[[Progress], list[Record]]
    claims: Callable[[Any], list[Claim]]


STUDIES = (
    Study("t3", t3_hardware, 0.3, lambda step: t3_hardware.simulated(progress=step), t3_hardware.claims),
    Study("ficco", ficco, 0.64, lambda step: ficco.simulated("mi300x", 8, progress=step), ficco.claims),
    Study(
        "fused-embedding", fused_embedding, 0.01, lambda step: fused_embedding.simulated(progress=step),
        fused_embedding.claims,
    ),
    Study("pgas", pgas, 0.05, lambda step: pgas.simulated(progress=step), pgas.claims),
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A study that has been simulated.

    rows: its results, from which tables, pictures and claims are made.
    """

    study: Study
    records: list[Record]
    rows: Any
    claims: list[Claim]

    def draw(self, directory: Path) -> list[Path]:
        """Write the study's pictures into a folder in `directory` that has the study's name."""
        title = self.study.module.notes(self.records)[0].partition(";")[0]
        drawn: list[Path] = self.study.module.draw(directory / self.study.name, self.rows, title)
        return drawn


def simulated(progress: Progress = lambda what, share: None) -> list[Done]:
    """Run all studies one after the other, and return the results of each.

    progress: called with a description of the next piece of work, and the fraction of all work done since the last
    call.
    """
    found = []
    for study in STUDIES:
        done = 0.0

        def step(what: str, share: float, study: Study = study) -> None:
            nonlocal done
            share = min(share, 1 - done)
            done += share
            progress(f"{study.name}: {what}", study.share * share)

        records = study.simulate(step)
        progress(study.name, study.share * (1 - done))
        rows = study.module.rows_of(records)
        found.append(Done(study, records, rows, study.claims(rows)))
    return found


def missed_table(found: Sequence[Done]) -> ResultTable:
    """Return a table of the claims that are not reproduced."""
    lines = [(one.study.name, claim) for one in found for claim in one.claims if not claim.reproduced]
    columns: dict[str, Callable[[Any], str]] = {
        "study": lambda line: line[0],
        "claim": lambda line: line[1].what,
        "section": lambda line: line[1].where,
        "paper": lambda line: line[1].number(line[1].paper),
        "ours": lambda line: line[1].number(line[1].ours),
        "deviation": lambda line: line[1].deviation,
    }
    return table("Not reproduced; docs/reproduction.md has the reasons", lines, columns)


def verdicts_table(found: Sequence[Done]) -> ResultTable:
    """Return a table with the number of reproduced claims of each study."""
    columns: dict[str, Callable[[Done], str]] = {
        "study": lambda one: one.study.name,
        "claims": lambda one: str(len(one.claims)),
        "reproduced": lambda one: str(sum(bool(claim.reproduced) for claim in one.claims)),
        "not": lambda one: str(sum(not claim.reproduced for claim in one.claims)),
    }
    every = [claim for one in found for claim in one.claims]
    yes = sum(bool(claim.reproduced) for claim in every)
    last = {"study": "all", "claims": str(len(every)), "reproduced": str(yes), "not": str(len(every) - yes)}
    return table("The papers' claims, simulated", found, columns, [last])
