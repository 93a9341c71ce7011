"""The commands, what they take and how their help reads. What they do is elsewhere: `weft.bench`, `weft.cli.doctor`."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

import weft
from weft.cli.plan import plan

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="weft weaves communication through the computation that it depends on.\n\n"
    "Start with `weft doctor` (what can this machine do?), then `weft demo` (does it pay?).",
)


app.add_typer(plan, name="plan")


class Operator(enum.StrEnum):
    embedding_all_to_all = "embedding_all_to_all"


class Device(enum.StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Mode(enum.StrEnum):
    single = "single"
    queued = "queued"


class Dtype(enum.StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


def main() -> None:
    """The `weft` command. An argument or path that cannot be used is a sentence and exit code 2, not a traceback."""
    try:
        app()
    except (
        ValueError,
        FileNotFoundError,
        FileExistsError,
        IsADirectoryError,
        NotADirectoryError,
        PermissionError,
    ) as error:
        typer.secho(f"weft: {error}", fg="red", err=True)
        sys.exit(2)


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


@app.command()
def bench(
    operator: Annotated[Operator, typer.Argument(metavar="OP", help="What to measure: embedding_all_to_all.")],
    preset: Annotated[
        str | None,
        typer.Option(
            help="pgas-weak, pgas-strong, fused-inter, dcnv2, criteo-kaggle, meta-2021 or grid-...; none: all."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes to start. Default: 2 on CPU, every GPU on cuda. Not under torchrun.")
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Where to run. Default: cuda if there is a GPU, else cpu.")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, of: batched, fbgemm (baselines; embedding_bag always runs), direct, put, and these "
            "with -natural and -sliceN, such as put-natural-slice8."
        ),
    ] = None,
    mode: Annotated[
        list[Mode] | None, typer.Option(help="single: one call, one synchronisation. queued: many. Default: both.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="Shrink batch and tables, as 1/32 or 0.03. Default: what fits; it is printed.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the tables and the output.")] = Dtype.fp32,
    json: Annotated[Path | None, typer.Option(help="Append one JSON object per variant and mode to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small inputs, few repetitions: to try it out.")] = False,
) -> None:
    """Measure an operator against its baselines, after checking every variant against float64.

    Starts its own ranks, or is one of torchrun's. Each time is the slowest rank's median; "over floor" is that time over
    the least that this machine's bandwidth, measured in the same run, allows.

        weft bench embedding_all_to_all --preset dcnv2

        weft bench embedding_all_to_all --device cuda --ranks 2 --json results.jsonl

        weft bench embedding_all_to_all --preset pgas-weak --variants put-slice1,put-slice8,put-slice64 --mode queued

        torchrun --nproc-per-node 2 -m weft.cli bench embedding_all_to_all --device cuda --dtype fp16
    """
    from weft.bench.embedding_all_to_all import bench as run
    from weft.bench.options import BenchOptions

    assert operator is Operator.embedding_all_to_all
    run(
        BenchOptions.from_text(
            preset=preset,
            ranks=ranks,
            device=None if device is None else device.value,
            variants=variants,
            modes=[m.value for m in mode or []],
            scale=scale,
            dtype=dtype.value,
            json=json,
            quick=quick,
        )
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for overlap.png and trace.json.")] = Path("weft-demo"),
    ranks: Annotated[int, typer.Option(min=1, help="CPU processes.")] = 2,
    scale: Annotated[
        str | None, typer.Option(help="Shrink batch and tables, as 1/64. Default: what fits; it is printed.")
    ] = None,
) -> None:
    """Run embedding + all-to-all on CPU processes, check it, time it, and draw how it overlaps.

    The tables are MLPerf's DLRM-DCNv2, scaled to this machine. Takes under a minute and no GPU.
    """
    from weft.bench.demo import demo as run
    from weft.bench.options import parse_scale

    shown = run(out, ranks, None if scale is None else parse_scale(scale))
    typer.echo(
        f"\nChecked: every variant agrees with the unfused float64 reference (largest error {shown.error:.1e} of the "
        f"largest element).\nFused is {shown.speedup:.2f}x as fast as nn.EmbeddingBag + all_to_all here.\n\n"
        f"  {shown.picture}   when each rank computes and when its bytes leave: open it with any image viewer\n"
        f"  {shown.trace}    the same, to zoom into: drop it onto https://ui.perfetto.dev\n\n"
        f"All configurations: weft bench embedding_all_to_all"
    )


@app.command()
def doctor() -> None:
    """Say what this machine offers, what weft will therefore use, and how to get what is missing.

    Exit code 0 unless neither the CPU nor the GPU path can work.
    """
    from weft.cli.doctor import examine, print_report

    report = examine()
    print_report(report)
    raise typer.Exit(0 if report.works else 1)
