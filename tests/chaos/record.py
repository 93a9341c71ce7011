"""The record of a campaign, a file of JSON lines.

The first line describes the campaign. Each further line describes an injection, in the order in which they ended. An
incomplete last line is ignored, because a stopped campaign may leave one. A file of another campaign is refused.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .draw import Injection
from .trial import Seen
from .verdict import Fault, judge, outcome, was_done

Record = dict[str, Any]
_VERSION = 7  # changes when `draw` changes, so that the same seed draws other injections


def header(seed: int, device: str, families: Sequence[str] = (), operators: Sequence[str] = ()) -> Record:
    from weft.bench.core.records import environment  # imported here, because it needs torch

    fields = environment(device)
    cores = len(os.sched_getaffinity(0))
    drawn = {"seed": seed, "families": list(families), "operators": list(operators)}
    return {"chaos": _VERSION, **drawn, "device": device, "cores": cores, **fields}


def of(injection: Injection, seen: Seen) -> Record:
    options = injection.options
    return {
        "index": injection.index, "kind": injection.kind, "operator": injection.operator, "world": injection.world,
        "phase": injection.phase, "backward": injection.backward, "schedule": options.get("schedule") or options.get("transport"),
        "took_s": round(seen.took_s, 2), "done": was_done(injection, seen), **outcome(seen),
        "wrong": _first_of_each(judge(injection, seen)),
    }  # fmt: skip


def _first_of_each(faults: list[Fault], most: int = 2) -> list[Fault]:
    """Return at most `most` faults of each kind, so that a fault in every step does not fill a record."""
    seen: Counter[str] = Counter()
    kept = []
    for name, text in faults:
        seen[name] += 1
        if seen[name] <= most:
            kept.append((name, text[:1500]))
    return kept


def read(path: Path) -> tuple[Record, list[Record]]:
    """Return the description of the campaign, and its injections in order. Raise `ValueError` if the file is empty."""
    lines = [line for line in path.read_text().split("\n")[:-1] if line]
    if not lines:
        raise ValueError(f"{path} has no line: run a campaign (make chaos), or leave the file out")
    head, *rest = map(json.loads, lines)
    return head, sorted({record["index"]: record for record in rest}.values(), key=lambda record: record["index"])


def go_on(
    path: Path, seed: int, device: str, families: Sequence[str] = (), operators: Sequence[str] = ()
) -> list[Record]:
    """Return the injections that are recorded in `path`. Create the file if it does not exist.

    Raise `ValueError` if the file belongs to another campaign.
    """
    wanted = header(seed, device, families, operators)
    if not path.exists() or not path.read_text().strip():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted) + "\n")
    head, records = read(path)
    for name in ("chaos", "seed", "families", "operators", "device", "source" if "source" in wanted else "commit"):
        if head.get(name) != wanted[name]:
            raise ValueError(
                f"{path} is of {name} {head.get(name)} and not {wanted[name]}: name another file (--record), or remove it"
            )
    text = path.read_text()
    if not text.endswith("\n"):
        path.write_text(text[: text.rindex("\n") + 1])
    return records


def append(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
