"""`weft reproduce`: a paper's figures, simulated or drawn from recorded measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.bench.core.arguments import appended, check_file, check_pictures
from weft.cli.names import Named

SAYS_EVERY_S = 2.0  # interval of progress lines without a terminal


class _Papers(Named):
    noun = "paper"


reproduce = typer.Typer(
    cls=_Papers,
    no_args_is_help=True,
    help="A paper's tables and figures: simulated on a machine's model, or from recorded measurements.",
)


@reproduce.callback()
def _root() -> None:
    pass


@reproduce.command()
def ficco(
    hw: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=(
            "Machine: a file of weft/hw, such as the paper's mi300x, or "
            "another TOML file."
        ))
    ] = "mi300x",
    ranks: Annotated[int, typer.Option(min=2, max=64, help="GPUs; the paper has 8.")] = 8,
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="How GPUs are linked. Default: the machine file's topology."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False,
            help="Show these records, from `weft bench` or --json, and simulate nothing.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Append one line of JSON per GEMM and schedule to this file; existing lines stay.")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(file_okay=False, help="Draw figures 12(b), 13 and 14 here.")] = None,
) -> None:  # fmt: skip
    """Reproduce FiCCO's evaluation (figures 12b, 13, 14, accuracy of its heuristic) on its sixteen GEMMs and sixteen synthetic
    ones.

    It is simulated on a machine file, many of whose numbers are assumed. To measure, on a machine with GPUs:

        weft bench all_gather_matmul --preset table-1,synthetic --variants weft,asynctp,all --mode queued --json ficco.jsonl

        weft reproduce ficco --records ficco.jsonl --pictures ficco
    """
    from weft.studies import ficco as study

    _reproduce(study, lambda step: study.simulated(hw, ranks, topology, progress=step), records, json, pictures)


@reproduce.command()
def t3(
    hw: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=(
            "Machine: a file of weft/hw, such as h200 or mi300x, or a TOML "
            "file of the same form."
        ))
    ] = "h200",
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="How GPUs are linked. Default: the machine file's topology."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False,
            help="Show these records, from `weft bench` or --json, and simulate nothing.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Append one line of JSON per sub-layer and variant to this file; existing lines stay.")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(file_okay=False, help="Draw figure 16 here.")] = None,
) -> None:  # fmt: skip
    """Reproduce T3's sub-layers (figures 15, 16 and 18): GEMM, reduce-scatter and all-gather of its Transformers, overlapped in
    software.

    They are simulated for the paper's 8, 16 and 32 ranks on a machine file. To measure, on a machine with GPUs:

        weft bench matmul_reduce_scatter --preset t3 --mode queued --json t3.jsonl

        weft reproduce t3 --records t3.jsonl --pictures t3
    """
    from weft.studies import t3 as study

    _reproduce(study, lambda step: study.simulated(hw, topology, progress=step), records, json, pictures)


def _reproduce(
    study: Any,
    simulated: Callable[[Callable[[str, float], None]], list[dict[str, Any]]],
    records: Path | None,
    json: Path | None,
    pictures: Path | None,
) -> None:
    from weft.bench.core import records as files
    from weft.bench.core.console import print_table, progress

    if json is not None:
        if records is not None:
            raise ValueError(
                "--json with --records: nothing is simulated, so there is nothing new to write: leave one of them out"
            )
        check_file("--json", json)
    if pictures is not None:
        check_pictures(pictures)
    if records is None:
        with progress(1.0, True, "weft reproduce: ", every_s=SAYS_EVERY_S) as step:
            found = simulated(step)
    else:
        found = files.read([records])
    with files.understood():
        rows, said = study.rows_of(found), study.notes(found)
        tables, conclusions = study.tables(rows), study.conclusions(rows)
    for table in tables:
        print_table(table.title, table.columns, table.cells)
    print("\n".join(["", *conclusions, *said]))
    if json is not None:
        files.append(json, found)
        print(appended(json, len(found)))
    if pictures is not None:
        for path in study.draw(pictures, rows, said[0].partition(";")[0]):
            print(f"drawn: {path}")
