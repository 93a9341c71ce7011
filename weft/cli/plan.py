"""`weft plan OP`: print which schedule weft would select for a shape, on this or another machine, and why.

The command needs neither torch nor a GPU.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.bench.core.arguments import appended, check_file
from weft.cli.operators import (
    SAYS_EVERY_S,
    Dtype,
    Hw,
    Json,
    Mode,
    ModeOf,
    Operators,
    Ranks,
    Shape,
    Topology,
    arguments,
    without_collection,
)
from weft.files import append_json

if TYPE_CHECKING:
    from weft.plan import Explanation


_LOSSES = """Columns for operators with GEMMs: DIL (decomposition loss) is the time of an operation in pieces divided by its time in
one piece. CIL (contention loss) is the time of an operation during concurrent work divided by its time alone. 1 means no loss.
`comm` is the communication. Exposed is the time in which a rank has nothing to compute."""


def _run(
    op: str,
    shape: Shape,
    ranks: Ranks = None,
    hw: Hw = None,
    topology: Topology = None,
    dtype: Dtype = "bf16",
    mode: ModeOf = Mode.queued,
    option: list[str] | None = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all candidates, not only the fastest.")] = False,
    json: Json = None,
) -> None:
    from weft.bench.core.console import progress
    from weft.plan import explanation

    sized = arguments(op, shape, ranks, hw, topology, option)
    if json is not None:
        check_file("--json", json)
    shown = None if everything else 10
    # Show progress, because plans for hundreds of ranks take seconds.
    with progress(1.0, True, "weft plan: ", every_s=SAYS_EVERY_S) as step, without_collection():
        found = explanation(op, hw=hw, topology=topology, dtype=dtype, mode=mode.value, progress=step, **sized)
        step("simulating losses", 0.0)
        found.cells(shown)
    print_explanation(found, shown)
    if json is not None:
        append_json(json, [found.as_json()])
        print(appended(json, 1))


class _Plans(Operators):
    run = staticmethod(_run)
    command = "weft plan"
    epilog_of_operators = _LOSSES


plan = typer.Typer(
    cls=_Plans,
    no_args_is_help=True,
    help=(
        "Show which schedule weft chooses for a shape, on this machine or another, and why: candidates, predicted times, losses."
        "\n\nNeeds no GPU. A schedule is the order in which ranks compute, send and wait. `weft plan OP --help` says what M, N and "
        "K mean for operator OP."
        "\n\n    weft plan all_gather_matmul --shape 16384,8192,4096 --ranks 4"
        "\n\n    weft plan all_gather_matmul --shape 16384,8192,4096 --ranks 8 --hw mi300x"
    ),
)


@plan.command("calibrate")
def calibrate(
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Number of GPUs to measure with. Default: all GPUs of this machine.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32; may be repeated. Default: bf16.")] = None,
    seconds: Annotated[float, typer.Option(min=10, help="Start no further GEMM after this many seconds.")] = 60,
) -> None:
    """Measure this machine's GPUs for the planner: GEMMs, copies, signals, collectives, and GEMMs concurrent with copies.

    The command stores the numbers in WEFT_CACHE_DIR (default ~/.cache/weft). All later plans use them, until the versions of weft,
    torch or the driver change. Without a calibration the planner uses the machine file. For GPUs without a machine file, weft
    measures a few numbers at a group's first call, and derives the others from properties that the driver reports. `weft doctor`
    shows the source of the numbers.


        weft plan calibrate

        weft plan calibrate --ranks 4 --dtype bf16 --dtype fp16 --seconds 100
    """
    import torch

    found = torch.cuda.device_count()
    wanted = ranks or found
    if found < 2 or wanted > found:
        raise ValueError(
            f"calibration needs {max(2, wanted)} GPUs, but torch sees {found}. CPU processes need no "
            "calibration: they measure schedules at the first call of each shape"
        )
    from weft.bench.calibrate import calibrate_ranks
    from weft.launch import run_ranks

    saved = run_ranks(
        wanted, calibrate_ranks, tuple(dtype or ["bf16"]), seconds, backend="nccl", timeout_s=seconds + 300
    )
    print(f"saved {saved[0]}")


def print_explanation(found: Explanation, shown: int | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    facts = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    facts.add_column()
    facts.add_column(overflow="fold")
    for what, text in found.facts():
        facts.add_row(f"[dim]{what}[/dim]", escape(text), style="bold" if what == "choice" else "")
    console.print(facts)
    rows = found.cells(shown)
    widths: dict[int, int | None] = dict.fromkeys(range(len(found.header)))
    if sys.stdout.isatty():
        widths |= _widths(found.header, rows, console.width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
    kept = [i for i in widths if widths[i] != 0]
    for i in kept:
        justify: Literal["left", "right"] = "left" if i in (0, len(found.header) - 1) else "right"
        table.add_column(found.header[i], justify=justify, width=widths[i], overflow="fold", no_wrap=i == 0)
    for cells in rows:
        # Users copy names, so break a name only if it does not fit.
        name = cells[0] if widths[0] is None else _at_commas(cells[0], widths[0])
        texts = (escape(cell) for cell in (name, *(cells[i] for i in kept[1:])))
        table.add_row(*texts, style="green" if cells[-1] == "taken" else "")
    console.print()
    console.print(table)
    console.print()
    for line in (*found.legend(), *found.left_out(shown)):
        console.print(line, markup=False)
    if without := [title for i, title in enumerate(found.header) if widths[i] == 0]:
        console.print(
            f"columns that do not fit: {', '.join(without)}. To see all columns, use a wider terminal, a pipe or --json"
        )


_GAP = 2  # spaces between columns
_LEAST_WHY = 20  # the least width of the last column, which contains sentences
_LEFT_OUT_FIRST = ("comm CIL", "comm DIL", "GEMM CIL", "GEMM DIL", "exposed us")


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> dict[int, int]:
    """Return {index of a column: width in characters} for a terminal of width `room`; width 0 omits the column. Columns
    of text are wrapped at spaces, names of schedules at commas. Columns of numbers keep their width, or are omitted.
    """
    columns = list(zip(header, *rows, strict=True))
    last = len(columns) - 1
    full = {i: max(map(len, column)) for i, column in enumerate(columns)}
    words = {i: max(len(word) for cell in column for word in cell.split()) for i, column in enumerate(columns)}
    least_why = max(words[last], min(_LEAST_WHY, full[last]))

    def why(widths: dict[int, int]) -> int:
        """Return the width, in characters, that the other columns leave for the last column."""
        return room - sum(width + _GAP for i, width in widths.items() if width and i != last) - _GAP

    if why(full) >= least_why:
        return full | {last: min(full[last], why(full))}
    widths = words | {0: full[0]}
    unmeasured = [title for title, *cells in columns if title == "measured us" and not any(cells)]
    for title in (*unmeasured, *_LEFT_OUT_FIRST):
        if why(widths) >= least_why:
            break
        if title in header:
            widths[header.index(title)] = 0
    if why(widths) < least_why:
        pieces = max(len(piece) for name in columns[0] for piece in _pieces(name))
        widths[0] = max(pieces, full[0] - (least_why - why(widths)))
    return widths | {last: max(words[last], min(full[last], why(widths)))}


def _pieces(name: str) -> list[str]:
    return re.findall(r"[^\[,]+[\[,]?", name)


def _at_commas(name: str, width: int) -> str:
    """Return the name in lines of at most `width` characters, broken only at commas."""
    lines = [""]
    for piece in _pieces(name):
        if len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)
