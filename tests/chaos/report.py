"""The output of a campaign: progress while it runs, and tables of its record, in a terminal or in a document.

    python -m tests.chaos.report docs/failures.md benchmarks/chaos/*.jsonl

The command rewrites the tables between `<!-- chaos:NAME -->` and `<!-- /chaos -->`. NAME is a record's name without ".jsonl".
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .draw import KINDS
from .operators import OPERATORS
from .record import Record, read
from .verdict import COUNTED

_MARKED = re.compile(r"(<!-- chaos:(?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- /chaos -->)", re.DOTALL)


@contextlib.contextmanager
def progress(seed: int, count: int, known: int) -> Iterator[Callable[[Record], None]]:
    """Yield a function to call with each record. It prints progress to stderr: a bar in a terminal, otherwise
    occasional lines.
    """
    begin, seen, wrong = time.monotonic(), 0, 0
    said = f"seed {seed}: {count} injections" + (f", {known} more are recorded already" if known else "")
    print(said, file=sys.stderr, flush=True)
    bar = _bar(count) if sys.stderr.isatty() else None

    def add(record: Record) -> None:
        nonlocal seen, wrong
        seen, wrong = seen + 1, wrong + bool(record["wrong"])
        if record["wrong"]:
            names = ", ".join(sorted({name for name, _ in record["wrong"]}))
            tell(f"{record['index']} {record['kind']} on {record['operator']}, {record['phase']}: {names}")
        if bar is not None:
            bar.update(bar.task_ids[0], advance=1)
        elif seen % 25 == 0 or seen == count:
            tell(f"{seen} of {count} after {time.monotonic() - begin:.0f} s, {wrong} wrong")

    def tell(text: str) -> None:
        if bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            bar.console.print(text)

    with bar if bar is not None else contextlib.nullcontext():
        yield add


def _bar(count: int) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:  # rich is optional
        return None
    bar = Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    bar.add_task("injections", total=count)
    return bar


# --- tables ---


def tables(records: Sequence[Record]) -> str:
    """Return two tables in Markdown: one by family of faults, one by operator. Only wrong outcomes that occurred have a
    column.
    """
    families = list(dict.fromkeys(kind.family for kind in KINDS.values()))
    by_fault = [(family, [r for r in records if KINDS[r["kind"]].family == family]) for family in families]
    by_operator = [(name, [r for r in records if r["operator"] == name]) for name in OPERATORS]
    found = f"{_table('fault', [*by_fault, ('all', records)])}\n\n{_table('operator', by_operator)}\n"
    return found if any(r["wrong"] for r in records) else f"No injection had a wrong outcome.\n\n{found}"


def _table(what: str, rows: Sequence[tuple[str, Sequence[Record]]]) -> str:
    columns: dict[str, Callable[[Sequence[Record]], int]] = {
        "injections": len,
        "took place": lambda of: sum(r["done"] for r in of),
        "right results": lambda of: sum(r["right"] for r in of),
        "errors": lambda of: sum(sum(r["errors"].values()) for r in of),
    }
    if any(r["nan"] for _, of in rows for r in of):
        columns["NaN results"] = lambda of: sum(r["nan"] for r in of)
    occurred = {kind for _, of in rows for r in of for kind, _ in r["wrong"]}
    for name in [name for name in COUNTED if name in occurred]:
        columns[name] = lambda of, name=name: sum(any(kind == name for kind, _ in r["wrong"]) for r in of)
    lines = [f"| {what} | " + " | ".join(columns) + " |", "|---" + "|--:" * len(columns) + "|"]
    lines += [
        f"| {name} | " + " | ".join(f"{count(of)}" for count in columns.values()) + " |" for name, of in rows if of
    ]
    return "\n".join(lines)


def quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def markdown(head: Record, records: Sequence[Record]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    mean_s = sum(r["took_s"] for r in records) / len(records)
    only = f" Only the faults {quoted(head['families'])}." if head.get("families") else ""
    only += f" Only the calls of {quoted(head['operators'])}." if head.get("operators") else ""
    return (
        f"{len(records)} injections of seed {head['seed']}, {mean_s:.1f} s each, on {head['machine']}, "
        f"{head['cores']} cores; {versions}; commit {head['commit']}, {head['date'][:10]}.{only}\n\n{tables(records)}"
    )


def rewrite(document: str, found: Mapping[str, tuple[Record, Sequence[Record]]]) -> str:
    """Return `document` with the contents of every marked block made again. Raise `ValueError` if a block's record is
    missing.
    """

    def block(marked: re.Match[str]) -> str:
        if marked["name"] not in found:
            if not marked["body"].strip():
                return marked[0]
            raise ValueError(
                f"the document wants chaos:{marked['name']}, and there is {', '.join(found) or 'no record'}"
            )
        return f"{marked[1]}{markdown(*found[marked['name']])}{marked[4]}"

    return _MARKED.sub(block, document)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("document", type=Path, metavar="DOCUMENT.md")
    parser.add_argument("records", type=Path, nargs="*", metavar="RECORD.jsonl")
    given = parser.parse_args(arguments)
    try:
        found = {path.stem: read(path) for path in given.records}
        given.document.write_text(rewrite(given.document.read_text(), found))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
