"""What a campaign shows: progress while it runs, and tables of its record."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from .draw import KINDS
from .verdict import COUNTED

Record = dict[str, Any]


class Progress:
    def __init__(self, seed: int, count: int, known: Collection[int]) -> None:
        from rich.console import Console

        self._console, self._count, self._seen, self._wrong = Console(stderr=True), count, 0, 0
        self._began = time.monotonic()
        done = f", {len(known)} are recorded" if known else ""
        self._console.print(f"seed {seed}: {count} injections{done}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, record: Record) -> None:
        self._seen += 1
        counted = sorted({kind for kind, _ in record["wrong"]})
        self._wrong += bool(counted)
        if counted or self._seen % 25 == 0:
            said = f"[red]{', '.join(counted)}[/red]" if counted else "ok"
            self._console.print(
                f"{self._seen}/{self._count} {time.monotonic() - self._began:.0f} s, wrong {self._wrong}: {record['index']} "
                f"{record['kind']}, {record['operator']}, {record['phase']}: {said}"
            )


def summary(records: Sequence[Record]) -> str:
    families = list(dict.fromkeys(kind.family for kind in KINDS.values()))
    lines = ["| fault | injections | took place | right results | named errors | " + " | ".join(COUNTED) + " |"]
    lines.append("|---" * (5 + len(COUNTED)) + "|")
    for family in [*families, "all"]:
        of = [r for r in records if family in ("all", KINDS[r["kind"]].family)]
        if of:
            numbers = [
                len(of),
                sum(r["done"] for r in of),
                sum(r["right"] for r in of),
                sum(sum(r["errors"].values()) for r in of),
            ]
            numbers += [sum(any(kind == name for kind, _ in r["wrong"]) for r in of) for name in COUNTED]
            lines.append(f"| {family} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)
