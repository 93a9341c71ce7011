"""`weft plan OP`: the schedule that would be selected for a shape, on this or another machine, and the reason. It needs neither
torch nor a GPU."""

from __future__ import annotations

import contextlib
import enum
import gc
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.main import get_command

from weft.bench.core.arguments import appended, check_file, sizes
from weft.bench.table_1 import SYNTHETIC, TABLE_1
from weft.cli.names import Named
from weft.files import append_json

if TYPE_CHECKING:
    from weft.builders import Problem
    from weft.plan import Explanation


class PlanMode(enum.StrEnum):
    queued = "queued"
    graph = "graph"
    single = "single"


# A schedule with a step for each rank has ranks^2 steps; all_to_all_matmul has as many for each expert of a rank. Every
# candidate is built and simulated. Around this number that takes minutes; beyond it, also gigabytes.
_MOST_RANKS = 256
_SAYS_EVERY_S = 2.0  # interval of progress lines without a terminal
_GEMMS_OF = "all_gather_matmul"  # its shape may be the name of one of FiCCO's GEMMs
_MANY = "The time to plan grows with their square: hundreds may take minutes."
_MOST_UNEVEN_RANKS = 72  # one NVLink domain; if ranks differ, each is simulated

_LOSSES = """With GEMMs, DIL and CIL are the factors of decomposition and contention loss; `comm` is communication;
exposed is the time in which a rank has nothing to compute."""


class _Operators(Named):
    """The group with a command for each operator. Operators are imported only for a plan: other commands do not need numpy."""

    noun = "operator"

    def list_commands(self, ctx: Any) -> list[str]:
        from weft.bench.core.operators import names

        return [*names(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from weft.bench.core.operators import LAYERS, SCALED
        from weft.builders.problem import PROBLEMS

        if cmd_name == LAYERS:
            return _layers()
        if (of := SCALED.get(cmd_name, cmd_name)) in PROBLEMS:
            return _command(cmd_name, PROBLEMS[of])
        return super().get_command(ctx, cmd_name)


plan = typer.Typer(
    cls=_Operators,
    no_args_is_help=True,
    help=(
        "Show the choice for a shape, on this machine or another, and the reason: candidates, predicted times, losses."
    ),
)


def _layers() -> Any:
    """Return the command for layers, which are not operators."""
    told = "Layers call several operators: plan each of them, such as all_gather_matmul and matmul_reduce_scatter."
    alone = typer.Typer(add_completion=False)

    @alone.command(
        "tensor_parallel",
        help=told,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def command() -> None:
        raise ValueError(
            f"tensor_parallel: {told[0].lower()}{told[1:-1]}; weft bench tensor_parallel measures whole layers"
        )

    return get_command(alone)


def _command(name: str, problem: type[Problem]) -> Any:
    """Return the command of an operator.

    Its help is the first paragraph of its problem and, if its problem has its own `sized`, that docstring, about M, N, K, with
    examples. `--option` lists the keywords of `sized` after the dtype.
    """
    from weft.bench.core.operators import plain
    from weft.builders.problem import Problem

    def command(**given: Any) -> None:
        op, given["dtype"] = plain(name, given["dtype"])
        _run(op, **given)

    sized = inspect.signature(problem.sized, eval_str=True).parameters
    dtype = sized["dtype"].default if name == problem.name else "fp8"
    replaced: dict[str, dict[str, Any]] = {"option": {"annotation": Annotated[list[str] | None, _own_options(problem)]}}
    if problem.name != _GEMMS_OF:
        replaced["shape"] = {"annotation": Annotated[str, _shape_option("")]}
    if dtype is not inspect.Parameter.empty:
        replaced["dtype"] = {"default": dtype}
    taken = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, **replaced.get(one.name, {}))
        for one in inspect.signature(_run, eval_str=True).parameters.values()
        if one.name != "op"
    ]
    command.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    first, _, rest = (inspect.getdoc(problem) or "").partition("\n\n")
    sizes = inspect.getdoc(problem.sized)
    if not sizes or sizes == inspect.getdoc(Problem.sized):  # the problem's docstring defines M, N and K
        sizes = f"{rest}\n\n    weft plan {problem.name} --shape 8192,8192,4096 --ranks 8 --all"
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    alone.command(name, help=f"{first}\n\n{sizes}", epilog=_LOSSES)(command)
    return get_command(alone)


def _own_options(problem: type[Problem]) -> Any:
    """Return the option for an operator's own options, whose help lists them; hidden if there are none."""
    from weft.builders.options import keywords

    listed = []
    for keyword in keywords(problem.sized):
        of = keyword.annotation
        text = "".join(get_args(of)[1:]) if get_origin(of) is Annotated else ""
        default = "" if keyword.default is None else f" [default: {keyword.default}]"
        listed.append(f"**{keyword.name}**: {text}{default}")
    return typer.Option(
        metavar="NAME=VALUE",
        hidden=not listed,
        help=" ".join(["An option of this operator; may be repeated.", *listed]),
    )


def _shape_option(also: str) -> Any:
    """Return the option `--shape`. also: further allowed forms."""
    sizes = (
        "M: rows, tokens, or samples. N: columns of one rank's weight, of an expert's weight, or of a table. "
        "K: the summed dimension."
    )
    return typer.Option(metavar="M,N,K", help=sizes + also)


def _run(
    op: str,
    shape: Annotated[
        str,
        _shape_option(" Also g1 to g16 and s1 to s16: FiCCO's GEMMs, with N divided by the ranks."),
    ],
    ranks: Annotated[
        int,
        typer.Option(
            min=1,
            max=_MOST_RANKS,
            help=f"Number of GPUs, which must divide gathered or scattered rows. {_MANY} It grows with experts too.",
        ),
    ] = 2,
    hw: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=(
                "A machine file of weft/hw, such as h100 or mi300x, or a TOML file of the same form. Default: "
                "this machine, or h200."
            ),
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=(
                "How GPUs are linked: switch, mesh, ring, torus, hosts, or a TOML file of the form of "
                "weft/hw/topology. Default: the machine file's."
            ),
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp16, fp32 or fp8, if the machine file has a rate for it.")
    ] = "bf16",
    mode: Annotated[
        PlanMode,
        typer.Option(
            help="queued: the host is ahead. graph: captured, replayed. single: a synchronisation around each call."
        ),
    ] = PlanMode.queued,
    option: list[str] | None = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all candidates, not only the fastest.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Append everything to this file, as one line of JSON; existing lines stay."),
    ] = None,
) -> None:
    from weft.bench.core.console import progress
    from weft.builders import described
    from weft.builders.problem import option_from_text
    from weft.plan import explanation

    m, n, k = _shape(shape, ranks if op == _GEMMS_OF else None)
    options = dict(option_from_text(op, one) for one in option or ())
    p = described(op, m=m, n=n, k=k, ranks=ranks, dtype=dtype, **options) if ranks > _MOST_UNEVEN_RANKS else None
    if p is not None and p.uneven:
        raise ValueError(
            f"{p.uneven}, and the simulation of more than {_MOST_UNEVEN_RANKS} different ranks takes too long: "
            "use fewer ranks, or even sizes"
        )
    if json is not None:
        check_file("--json", json)
    shown = None if everything else 10
    # Hundreds of ranks take minutes, so progress is shown.
    with progress(1.0, True, "weft plan: ", every_s=_SAYS_EVERY_S) as step, _without_collection():
        found = explanation(
            op, M=m, N=n, K=k, ranks=ranks, hw=hw, topology=topology, dtype=dtype, mode=mode.value, progress=step, **options
        )  # fmt: skip
        step("simulating losses", 0.0)
        found.cells(shown)
    print_explanation(found, shown)
    if json is not None:
        append_json(json, [found.as_json()])
        print(appended(json, 1))


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection: millions of steps have no cycles, and each search for cycles takes a third of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()  # later collections skip the remaining objects too
            gc.enable()


@plan.command("calibrate")
def calibrate(
    ranks: Annotated[
        int | None, typer.Option(min=2, help="GPUs to measure with. Default: all of this machine.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32; may be repeated. Default: bf16.")] = None,
    seconds: Annotated[float, typer.Option(min=10, help="No further GEMM is measured after this many seconds.")] = 60,
) -> None:
    """Measure this machine's GPUs for the planner: GEMMs, copies, signals, collectives, and GEMMs concurrent with copies.

    The numbers are stored in WEFT_CACHE_DIR (default ~/.cache/weft) with the installed versions, and are used from then on.
    Without them the planner uses the machine's file. Without a file, it uses a few numbers measured at a first call, and derives
    the others from the driver's numbers. `weft doctor` shows the source of the numbers.

        weft plan calibrate

        weft plan calibrate --ranks 4 --dtype bf16 --dtype fp16 --seconds 100
    """
    import torch

    found = torch.cuda.device_count()
    wanted = ranks or found
    if found < 2 or wanted > found:
        raise ValueError(
            f"torch sees {found} GPUs, but {max(2, wanted)} are needed to calibrate. On CPU processes no "
            "calibration is needed: schedules are measured at the first call of each shape"
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
        # Users copy names, so names are not broken if they fit.
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
            f"columns that do not fit: {', '.join(without)}: a wider terminal, a pipe and --json have all columns"
        )


_GAP = 2  # between columns
_LEAST_WHY = 20  # columns for the sentences in the last column
_LEFT_OUT_FIRST = ("comm CIL", "comm DIL", "GEMM CIL", "GEMM DIL", "exposed us")


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> dict[int, int]:
    """Return the width of each column by its index; 0: omitted.

    Numbers get at least the width of their longest word, so they are never cut. The last column wraps, and names if needed.
    """
    columns = list(zip(header, *rows, strict=True))
    last = len(columns) - 1
    full = {i: max(map(len, column)) for i, column in enumerate(columns)}
    words = {i: max(len(word) for cell in column for word in cell.split()) for i, column in enumerate(columns)}
    least_why = max(words[last], min(_LEAST_WHY, full[last]))

    def why(widths: dict[int, int]) -> int:
        """Return the width that is left for the last column."""
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
    """Return the name in lines of at most `width`, broken only between its pieces."""
    lines = [""]
    for piece in _pieces(name):
        if len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _shape(text: str, ranks: int | None) -> tuple[int, int, int]:
    """Parse `--shape`. ranks: given if the text may name one of FiCCO's GEMMs, whose N is divided by the ranks."""
    for gemm in (*TABLE_1, *SYNTHETIC) if ranks else ():
        if gemm.name == text:
            return gemm.m, gemm.sharded(ranks or 1).n, gemm.k
    named = ", or one of g1 to g16 and s1 to s16" if ranks else ""
    m, n, k, suffix = sizes(text, named)
    if suffix:
        raise ValueError(
            f"--shape {text!r}: leave out {suffix!r}, which plans do not support; options are --option NAME=VALUE"
        )
    return m, n, k
