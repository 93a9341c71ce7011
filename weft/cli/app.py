"""The commands with their arguments and help. `weft.bench`, `weft.studies` and other modules of `weft.cli` do the work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import weft
from weft.bench.core.arguments import check_folder, one_line
from weft.cli.names import Named
from weft.cli.plan import plan
from weft.cli.reproduce import reproduce
from weft.cli.sim import sim

app = typer.Typer(
    cls=Named,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help=(
        "weft overlaps collectives with GEMMs and embedding lookups in PyTorch.\n\nStart with `weft doctor` (what "
        "can this machine do?), then `weft demo` (is it faster?)."
    ),
)


app.add_typer(plan, name="plan")
app.add_typer(sim, name="sim")
app.add_typer(reproduce, name="reproduce")


def main() -> None:
    """Run the `weft` command. Print expected errors as one line, without a traceback (`one_line`)."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # it was already closed when the process started
            setattr(sys, stream, Path(os.devnull).open("w"))  # noqa: SIM115
    with one_line("weft"):
        app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {weft.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="OP [OPTIONS]",
)
def bench(context: typer.Context) -> None:
    """Measure an operator and its baselines, such as NCCL and cuBLAS without overlap. Every result is first compared with
    float64.
    """
    from weft.bench.__main__ import run

    run(context.args, "weft bench")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for overlap.png and trace.json.")] = Path(
        "weft-demo"
    ),
    ranks: Annotated[int, typer.Option(min=1, help="Number of CPU processes.")] = 2,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Factor of the batch and of large tables' rows, such as 1/64. Default: the largest that fits this machine."
        ),
    ] = None,
) -> None:
    """Run embedding + all-to-all on CPU processes, check the results, time the calls, and draw the overlap.

    The tables have the shapes of MLPerf's DLRM-DCNv2, scaled to this machine. The demo takes one or two minutes and
    needs no GPU.
    """
    check_folder("--out", out)
    from weft.bench.core.options import parse_scale
    from weft.bench.demo import demo as run

    shown = run(out, ranks, None if scale is None else parse_scale(scale))
    typer.echo(
        f"\nChecked: every variant matches the unfused float64 reference (largest error {shown.error:.1e} of the "
        f"largest element).\nBy default a call is {shown.gain.strip('()')} as fast as nn.EmbeddingBag + all_to_all here"
        f"{', but the difference is within twice its noise' if '(' in shown.gain else ''}.\n\n"
        f"  {shown.picture}   when each rank computes and when it sends: open it with any image viewer\n"
        f"  {shown.trace}    the same as a trace: drop it onto https://ui.perfetto.dev\n\n"
        f"All configurations: weft bench embedding_all_to_all"
    )


@app.command()
def doctor(
    group: Annotated[
        bool,
        typer.Option("--group", help="Report hosts, devices and connections of the ranks that torchrun has started."),
    ] = False,
    links: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --group: write the measured links between hosts to this topology file, for `weft plan --topology`.",
        ),
    ] = None,
) -> None:
    """Report what works on this machine, what weft will use, and how to get missing parts.

    The exit status is 0 if CPU processes or GPUs work. With `--group`, start the command on every rank, for example by torchrun.
    The exit status is then 0 if the ranks can reach each other.
    """
    if group:
        from weft.cli.doctor_group import run

        raise typer.Exit(run(links))
    if links:
        raise ValueError(f"--links needs --group: run weft doctor --group --links {links} on every rank")
    from weft.cli.doctor import examine, print_report

    report = examine()
    print_report(report)
    raise typer.Exit(0 if report.works else 1)
