"""`weft bench`: what it takes and how its help reads. What it does is in `weft.bench`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from weft.bench.core.operators import OPERATORS
from weft.cli.paths import check_writable

Operator = enum.StrEnum("Operator", list(OPERATORS))  # type: ignore[misc]


class Device(enum.StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Mode(enum.StrEnum):
    single = "single"
    queued = "queued"
    graph = "graph"


class Dtype(enum.StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    fp8 = "fp8"


def bench(
    operator: Annotated[Operator, typer.Argument(metavar="OP", help=f"What to measure: {' or '.join(OPERATORS)}.")],
    preset: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated. embedding_all_to_all: pgas-weak, pgas-strong, fused-inter, dcnv2, criteo-kaggle, "
            "meta-2021 or grid-... all_gather_matmul: measured, llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x7b, cpu, "
            "or a shape as MxNxK, N columns on each rank; with -symmetric behind either, on GPUs, inputs lie in symmetric "
            "memory. all_to_all_matmul: mixtral-8x7b, deepseek-v3, qwen3-30b-a3b, cpu, or "
            "TOKENSxNxK-eEXPERTS-topK[-zipfS]: tokens on each rank, experts of all ranks, skew. inefficiency: g1 to g16, the "
            "paper's GEMMs. None: all that suit the device."
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
            help="Comma-separated; the baseline always runs. embedding_all_to_all: batched, fbgemm (baselines), direct, "
            "put, and these with -natural and -sliceN, such as put-natural-slice8. all_gather_matmul: asynctp (baseline), "
            "weft (what the planner takes), all, or how names of schedules begin: shard, 'shard[chunks=2'. all_to_all_matmul: "
            "padded (baseline, always runs), weft, all, or how names begin: dispatch; each also as ...-bounded."
        ),
    ] = None,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(
            help="single: one call, one synchronisation. queued: many. graph: captured and replayed. Default: all that the "
            "operator has here."
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="As 1/32 or 0.03; it is printed. embedding_all_to_all: shrink batch and tables. Default: what fits. "
            "inefficiency: shrink M, N and K. Default: 1/32 on CPU; what is still too large shrinks on."
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of inputs and outputs; fp8: all_gather_matmul's scaled sibling. Default: fp32; bf16 for GEMMs on GPUs."
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(dir_okay=False, writable=True, help="Append one JSON object per variant and mode to this file."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small inputs, few repetitions: to try it out.")] = False,
    seconds: Annotated[
        float | None, typer.Option(max=3600, help="For the slowest variant in each mode. Default: 1, with --quick 0.1.")
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="inefficiency: draw the paper's figures 7 to 10 into this folder."),
    ] = None,
) -> None:
    """Measure an operator against its baselines, after checking every variant against float64.

    Starts its own ranks, or is one of torchrun's. Each time is the slowest rank's median; "over roofline" is that
    time over what its bytes (and operations) take at the rates measured in the same run; a cache can take less.

        weft bench embedding_all_to_all --preset dcnv2

        weft bench embedding_all_to_all --device cuda --ranks 2 --json results.jsonl

        weft bench embedding_all_to_all --preset pgas-weak --variants put-slice1,put-slice8,put-slice64 --mode queued

        weft bench all_gather_matmul --preset llama-3-8b --mode queued --mode graph

        weft bench all_gather_matmul --preset 8192x4096x8192 --variants all --seconds 0.1

        weft bench all_to_all_matmul --preset mixtral-8x7b,4096x28672x4096-e8-top2-zipf1 --variants weft,dispatch

        weft bench inefficiency --json losses.jsonl --pictures losses

        torchrun --nproc-per-node 2 -m weft.cli bench embedding_all_to_all --device cuda --dtype fp16
    """
    from weft.bench.core.options import BenchOptions
    from weft.bench.core.run import bench as run

    options = BenchOptions.from_text(
        operator.value, preset=preset, ranks=ranks, device=device and device.value, variants=variants,
        modes=[m.value for m in mode or []], scale=scale, dtype=dtype and dtype.value, json=json, quick=quick,
        seconds=seconds, pictures=pictures,
    )  # fmt: skip
    if json is not None:
        check_writable("--json", json)
    run(options)
