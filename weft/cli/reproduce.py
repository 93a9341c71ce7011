"""`weft reproduce`: the figures of a paper, from a simulation or from recorded measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.bench.core.arguments import appended, check_file, check_pictures
from weft.cli.names import Named
from weft.cli.operators import without_collection

SAYS_EVERY_S = 2.0  # seconds between progress lines if there is no terminal
_SENSITIVE_RANKS = 16  # the most ranks for which the sensitivity of FiCCO's study is analysed without being asked for


class _Papers(Named):
    noun = "paper"


reproduce = typer.Typer(
    cls=_Papers,
    no_args_is_help=True,
    help="Reproduce a paper's tables and figures, by simulation on a machine's model or from recorded measurements.",
)


_Records = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Show the results in this file, which `weft bench` or --json wrote, instead of simulating.",
    ),
]
_Json = Annotated[
    Path | None, typer.Option(help="Append one line of JSON per figure to this file; existing lines stay.")
]


@reproduce.callback()
def _root() -> None:
    pass


@reproduce.command()
def ficco(
    hw: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help=(
            "Machine: a file of weft/hw, or another TOML file. Default: the paper's mi300x."
        ))
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=2, max=64, help=(
        "Number of GPUs. Default: 8, as in the paper. 8 take half a minute, 64 some minutes."
    ))] = None,
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="How GPUs are linked. Default: the machine file's topology."),
    ] = None,
    sensitivity: Annotated[bool | None, typer.Option(
        "--sensitivity/--no-sensitivity", show_default=False, help=(
            "Change each assumed number of the machine by 20%. This takes most of the time: with 64 GPUs, more than ten "
            f"minutes. Default: only for at most {_SENSITIVE_RANKS} GPUs."
        )
    )] = None,
    records: _Records = None,
    json: Annotated[
        Path | None, typer.Option(help="Append one line of JSON per GEMM and schedule to this file; existing lines stay.")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for pictures of figures 12(b), 13 and 14.")] = None,
) -> None:  # fmt: skip
    """Reproduce FiCCO's evaluation on its sixteen GEMMs and sixteen synthetic GEMMs.

    The paper is "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap".

    The output shows figures 12b, 13, 14 and the accuracy of the heuristic. By default, times are simulated with a
    machine file, in which many numbers are assumed; this takes a minute or two. To measure on a machine with GPUs instead:

        weft bench all_gather_matmul --preset table-1,synthetic --variants weft,asynctp,all --mode queued --json ficco.jsonl

        weft reproduce ficco --records ficco.jsonl --pictures ficco
    """
    from weft.studies import ficco as study

    _require_simulated(records, hw=hw, ranks=ranks, topology=topology, sensitivity=sensitivity)
    ranks = ranks or 8
    sensitive = ranks <= _SENSITIVE_RANKS if sensitivity is None else sensitivity
    _reproduce(
        study,
        lambda step: study.simulated(hw or "mi300x", ranks, topology, sensitive=sensitive, progress=step),
        records,
        json,
        pictures,
    )
    if records is None and not sensitive:
        print(f"The sensitivity to the machine's assumed numbers is omitted for {ranks} GPUs: add --sensitivity")


@reproduce.command()
def t3(
    hw: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help=(
            "Existing GPUs, which overlap in software: the name of a file in weft/hw, such as h200 or mi300x, or the path of such "
            "a TOML file. Default: the paper's own hardware."
        ))
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="With --hw: how GPUs are linked. Default: the machine file's topology."),
    ] = None,
    records: _Records = None,
    json: Annotated[
        Path | None, typer.Option(help="Append one line of JSON per sub-layer and variant to this file; existing lines stay.")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(
        file_okay=False, help="Folder for pictures of figures 16 to 18; with --hw of figure 16 only.")] = None,
) -> None:  # fmt: skip
    """Reproduce T3's evaluation, on the paper's hardware or in software on existing GPUs.

    The paper is "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives".

    By default the command simulates the paper's hardware: a ring of GPUs whose memory controllers track updates, trigger copies,
    add values and prioritise accesses. It compares all numbers of the paper's text with the simulation.

    With --hw the command simulates the same sub-layers in software on existing GPUs (figures 15, 16 and 18). To measure them on a
    machine with GPUs:

        weft bench matmul_reduce_scatter --preset t3 --mode queued --json t3.jsonl

        weft reproduce t3 --records t3.jsonl --pictures t3
    """
    from weft.studies import t3 as software
    from weft.studies import t3_hardware as hardware

    _require_simulated(records, hw=hw, topology=topology)
    if hw is None and topology is not None:
        raise ValueError(
            "--topology needs --hw, because the paper's GPUs always form a ring: add a machine, such as --hw h200"
        )
    if hw is None and (records is None or _has(records, hardware)):
        _reproduce(hardware, lambda step: hardware.simulated(progress=step), records, json, pictures)
    else:
        _reproduce(
            software, lambda step: software.simulated(hw or "h200", topology, progress=step), records, json, pictures
        )


@reproduce.command()
def fused_embedding(
    records: _Records = None, json: _Json = None,
    pictures: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for pictures of figures 11 to 13 and 15.")] = None,
) -> None:  # fmt: skip
    """Reproduce the evaluation of GPU-initiated fused embedding + all-to-all, on a model of its MI210 nodes.

    The paper is "GPU-initiated Fine-grained Overlap of Collective Communication with Computation".

    The evaluation covers slices, occupancy, skew and zero-copy kernels on two and four GPUs, and a DLRM training pass
    on 128 nodes. All numbers in the paper's text are compared with the model's. A sensitivity analysis changes each
    assumed number by 20%.

    To measure figures 9 to 14 on two GPUs, and show them:

        weft bench fused_embedding --json fused.jsonl

        weft reproduce fused-embedding --records fused.jsonl --pictures fused
    """
    from weft.studies import fused_embedding, fused_embedding_measured

    study = fused_embedding_measured if _has(records, fused_embedding_measured) else fused_embedding
    _reproduce(study, lambda step: fused_embedding.simulated(progress=step), records, json, pictures)


@reproduce.command()
def pgas(
    records: _Records = None, json: _Json = None,
    pictures: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for pictures of figures 5 to 10.")] = None,
) -> None:  # fmt: skip
    """Reproduce the scaling of PGAS embedding retrieval on 1 to 4 V100 (figures 5 to 10), by simulation.

    The paper is "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning
    Recommendation Systems".

    The output compares the paper's speedups with the model's. It also shows lower bounds of the times of pooling, exchange
    and unpacking, and the bandwidth that follows from the paper's baseline times. To measure on two GPUs, and show the figures:

        weft bench pgas --json pgas.jsonl

        weft reproduce pgas --records pgas.jsonl --pictures pgas
    """
    from weft.studies import pgas, pgas_measured

    study = pgas_measured if _has(records, pgas_measured) else pgas
    _reproduce(study, lambda step: pgas.simulated(progress=step), records, json, pictures)


@reproduce.command("all")
def all_studies(
    json: _Json = None,
    pictures: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for all pictures, with a folder in it for each study.")
    ] = None,
) -> None:  # fmt: skip
    """Simulate all four papers, and print which of their claims are reproduced. This takes a few minutes."""
    from weft.bench.core import records as files
    from weft.bench.core.console import print_table, progress
    from weft.studies import everything

    if json is not None:
        check_file("--json", json)
    if pictures is not None:
        check_pictures(pictures)
    with progress(1.0, True, "weft reproduce: ", every_s=SAYS_EVERY_S) as step:
        found = everything.simulated(step)
    for one in found:
        print(
            "\n".join(
                ["", one.study.name, *one.study.module.conclusions(one.rows), *one.study.module.notes(one.records)]
            )
        )
    for table in (everything.missed_table(found), everything.verdicts_table(found)):
        print_table(table.title, table.columns, table.cells)
    if json is not None:
        records = [record for one in found for record in one.records]
        files.append(json, records)
        print(appended(json, len(records)))
    if pictures is not None:
        for path in (path for one in found for path in one.draw(pictures)):
            print(f"drawn: {path}")


def _require_simulated(records: Path | None, **options: object) -> None:
    """Raise `ValueError` if `records` is given with options of a simulation."""
    if records is not None and (given := [f"--{name}" for name, value in options.items() if value is not None]):
        raise ValueError(
            f"{', '.join(given)} cannot be combined with --records, which shows stored results and simulates nothing: omit "
            f"--records or {', '.join(given)}"
        )


def _has(records: Path | None, study: Any) -> bool:
    """True if the file `records` has records of the study."""
    from weft.bench.core import records as files

    return records is not None and any(one.get("study") == study.STUDY for one in files.read([records]))


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
                "--json cannot be combined with --records, which shows stored results, so there is nothing to write: omit one"
            )
        check_file("--json", json)
    if pictures is not None:
        check_pictures(pictures)
    if records is None:
        with progress(1.0, True, "weft reproduce: ", every_s=SAYS_EVERY_S) as step, without_collection():
            found = simulated(step)
    else:
        found = files.read([records])
    try:
        with files.understood():
            rows, said = study.rows_of(found), study.notes(found)
            tables, conclusions = study.tables(rows), study.conclusions(rows)
            for cells in (cells for table in tables for cells in table.cells):
                "".join(cells)  # raises TypeError for a value that is no text
    except ValueError as error:
        raise error if records is None else ValueError(f"{records}: {error}") from error
    for table in tables:
        print_table(table.title, table.columns, table.cells)
    print("\n".join(["", *conclusions, *said]))
    if json is not None:
        files.append(json, found)
        print(appended(json, len(found)))
    if pictures is not None:
        for path in study.draw(pictures, rows, said[0].partition(";")[0]):
            print(f"drawn: {path}")
