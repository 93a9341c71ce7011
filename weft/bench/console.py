"""Tables and a progress bar on the terminal: rich, or plain lines on a GPU machine that has little but torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:
    Console = None  # type: ignore[assignment,misc]


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    section: int | None = None,
) -> None:
    """A table on stdout: the first column left, the others right; a line where the value of column `section` changes."""
    if Console is None:
        header = [column.replace("\n", " ") for column in columns]
        widths = [max(len(r[i]) for r in (header, *rows)) for i in range(len(columns))]
        print(f"\n{title}")
        for row in (header, *rows):
            cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            print("  " + "  ".join(cells))
        for note in notes:
            print(f"  {note}")
    else:
        table = Table(
            title=title, title_justify="left", title_style="bold", caption="\n".join(notes), caption_justify="left"
        )
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        for i, row in enumerate(rows):
            table.add_row(
                *row, end_section=i + 1 < len(rows) and section is not None and rows[i + 1][section] != row[section]
            )
        console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
        console.print(table)
    sys.stdout.flush()


@contextlib.contextmanager
def progress(total: float, shown: bool) -> Iterator[Callable[[str, float], None]]:
    """Yields `step(what, share)`, which says what is going on and advances the bar by `share` of `total`."""
    if not shown:
        yield lambda what, share: None
    elif Console is None or not sys.stderr.isatty():
        last = ""

        def line(what: str, share: float) -> None:
            nonlocal last
            if what != last:
                print(f"... {what}", file=sys.stderr, flush=True)
            last = what

        yield line
    else:
        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda what, share: bar.update(task, description=what, advance=share)
