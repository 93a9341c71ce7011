"""Tables and a progress bar on the terminal: by the package rich if it is installed, otherwise as plain lines."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError:
    Console = None  # type: ignore[assignment,misc]

_ANY_WIDTH = 100_000
_FEWER = 5  # the factor by which the interval between progress lines grows


def end_quietly() -> NoReturn:
    """Exit with status 1 and without a message, after the reader of stdout has closed the pipe (`| head`)."""
    _drop_output()
    sys.exit(1)


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = (), section: int | None = None,
    optional: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print a table on stdout. The first column is left-aligned, the others right-aligned.

    section: the index of a column. A line is drawn between rows with different values in this column.
    optional: the columns to omit if the terminal is too narrow; the last name is omitted first. A pipe or file gets all
        columns.
    """
    if Console is None:
        header = [column.replace("\n", " ") for column in columns]
        widths = [max(len(r[i]) for r in (header, *rows)) for i in range(len(columns))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (header, *rows)]
        print("\n  ".join([f"\n{title}", *lines, *notes]), flush=True)
        return
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    console.on_broken_pipe = _broken_pipe  # type: ignore[method-assign]  # rich would exit the process, which a rank must not do
    for count in range(len(optional) + 1):
        table = _rich_table(columns, rows, section, optional[len(optional) - count :])
        needed = console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum
        if not sys.stdout.isatty():
            console.width = max(console.width, needed)
        if needed <= console.width:
            break
    console.print(f"\n[bold]{escape(title)}[/bold]", table, *(f"[dim]{escape(note)}[/dim]" for note in notes), sep="\n")
    sys.stdout.flush()


def _broken_pipe() -> NoReturn:
    _drop_output()
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], section: int | None, without: Sequence[str]
) -> Table:
    table = Table()
    for i, column in enumerate(columns):
        if column not in without:
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=False):
        ends = following is not None and section is not None and following[section] != row[section]
        shown = (escape(cell) for cell, name in zip(row, columns, strict=True) if name not in without)
        table.add_row(*shown, end_section=ends)
    return table


def has_bar() -> bool:
    """True if `progress` shows a bar, because the package rich is installed and stderr is a terminal."""
    return Console is not None and sys.stderr.isatty()


def _left(passed_s: float, done: float) -> str:
    """Return the estimated remaining time as text; "" if it is below a minute. done: the fraction of the work that is done."""
    minutes = passed_s * (1 - done) / done / 60 if done > 0 else 0.0
    return f", about {minutes:.0f} min left" if minutes >= 1 else ""


@contextlib.contextmanager
def progress(
    total: float, shown: bool, prefix: str = "", every_s: float = 0.0
) -> Iterator[Callable[[str, float], None]]:
    """Show progress on stderr: yield a function `step(what, amount)`. It shows the text `what` and adds `amount` to the
    progress, which is complete at `total`.

    On a terminal with rich installed, progress is a bar that disappears at the end. Otherwise each step prints a line.

    shown: False to show nothing. prefix: text before each `what`. every_s: if it is positive and there is no bar, the
    first line appears after `every_s` seconds, and later lines at longer intervals. If the rest takes more than a minute,
    these lines say how long.
    """
    if not shown:
        yield lambda what, share: None
    elif not has_bar():
        said: set[str] = set()
        start, said_at, done = time.monotonic(), 0.0, 0.0

        def line(what: str, share: float) -> None:
            nonlocal said_at, done
            passed = time.monotonic() - start
            if what not in said and passed - said_at >= (_FEWER * every_s if said_at else every_s):
                so_far = f" ({done / total:.0%} done, {passed:.0f} s{_left(passed, done / total)})" if every_s else ""
                print(f"{prefix}{what}{so_far}", file=sys.stderr, flush=True)
                said_at = passed
            said.add(what)
            done += share

        yield line
    else:
        columns = (BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        bar = Progress(
            *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
        )
        with bar:
            task = bar.add_task(prefix, total=total)
            yield lambda what, share: bar.update(task, description=escape(prefix + what), advance=share)
