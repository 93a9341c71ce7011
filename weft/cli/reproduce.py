"""`weft reproduce`: a paper's figures, simulated here or made from records of a machine that measured them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.paths import check_writable

reproduce = typer.Typer(
    no_args_is_help=True,
    help="A paper's tables and figures: simulated on a machine's model, or from recorded measurements.",
)


@reproduce.callback()
def _root() -> None:
    pass


@reproduce.command()
def ficco(
    machine: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="mi300x, the paper's, h200, or a TOML file like those.")
    ] = "mi300x",
    ranks: Annotated[int, typer.Option(min=2, max=64, help="GPUs; the paper has 8.")] = 8,
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="How they are linked. Default: as the machine file says."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False,
            help="Show these records, of `weft bench` or of --json, and simulate nothing.",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Append a JSON object for each GEMM and schedule.")] = None,
    pictures: Annotated[Path | None, typer.Option(file_okay=False, help="Draw figures 12(b), 13 and 14 here.")] = None,
) -> None:  # fmt: skip
    """FiCCO's evaluation (figures 12b, 13, 14, accuracy of its heuristic) on its sixteen GEMMs and sixteen synthetic ones.

    Simulated on a machine file, many of whose numbers are assumed. To measure, on a machine with GPUs:

        weft bench all_gather_matmul --preset table-1,synthetic --variants weft,asynctp,all --mode queued --json ficco.jsonl

        weft reproduce ficco --records ficco.jsonl --pictures ficco
    """
    from weft.studies import ficco as study

    _reproduce(study, lambda: study.simulated(machine, ranks, topology), records, json, pictures)


@reproduce.command()
def t3(
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="h200, mi300x, or a TOML file like those.")] = "h200",
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="How they are linked. Default: as the machine file says."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False,
            help="Show these records, of `weft bench` or of --json, and simulate nothing.",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Append a JSON object for each sub-layer and variant.")] = None,
    pictures: Annotated[Path | None, typer.Option(file_okay=False, help="Draw figure 16 here.")] = None,
) -> None:  # fmt: skip
    """T3's sub-layers (figures 15, 16 and 18): GEMM, reduce-scatter and all-gather of its Transformers, as software overlaps them.

    Simulated for the paper's 8, 16 and 32 ranks on a machine file. To measure, on a machine with GPUs:

        weft bench matmul_reduce_scatter --preset t3 --mode queued --json t3.jsonl

        weft reproduce t3 --records t3.jsonl --pictures t3
    """
    from weft.studies import t3 as study

    _reproduce(study, lambda: study.simulated(machine, topology), records, json, pictures)


def _reproduce(
    study: Any,
    simulated: Callable[[], list[dict[str, Any]]],
    records: Path | None,
    json: Path | None,
    pictures: Path | None,
) -> None:
    from weft.bench.core import records as files
    from weft.bench.core.console import print_table

    if json is not None:
        if records is not None:
            raise ValueError(
                "--json with --records: nothing is simulated, so there is nothing new to write; leave one out"
            )
        check_writable("--json", json)
    found = simulated() if records is None else files.read([records])
    with files.understood():
        rows, said = study.rows_of(found), study.notes(found)
        tables, conclusions = study.tables(rows), study.conclusions(rows)
    for table in tables:
        print_table(table.title, table.columns, table.cells)
    print("\n".join(["", *conclusions, *said]))
    if json is not None:
        files.append(json, found)
    if pictures is not None:
        for path in study.draw(pictures, rows, said[0].partition(";")[0]):
            print(f"drawn: {path}")
