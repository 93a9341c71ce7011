"""`python -m weft.bench OP ...`: `weft bench` for machines that have torch but not typer or rich.

`--help` does not import torch: presets and variants are checked later, by the operator's `OperatorBenchmark.check_options`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.bench.core.arguments import check_file, check_pictures, number_of_ranks, one_line, sizes
from weft.bench.core.operators import measured, operator, plain
from weft.bench.never_slower import options as never_slower

if TYPE_CHECKING:
    from weft.bench.core.options import BenchOptions

_MODES = ("single", "queued", "graph")
_ABOUT = """
Measure variants of an operator: weft with the schedule that it chooses, weft with other schedules, and baselines, such as calls
of NCCL (gloo) and cuBLAS without overlap. The result of every variant is first compared with a float64 reference.

The command starts its own ranks, or uses torchrun's ranks. Each time is the slowest rank's median. "over roofline" is this time
divided by the time that the call's bytes and FLOPs need at peak rates, which the same run measures. This quotient can be below 1
if data fit into a cache.
"""
_EXAMPLES = """examples:
  weft bench embedding_all_to_all --preset dcnv2
  weft bench embedding_all_to_all --device cuda --ranks 2 --json results.jsonl
  weft bench embedding_all_to_all --preset pgas-weak --variants put-slice1,put-slice8,put-slice64 --mode queued
  weft bench embedding_training --preset dcnv2,dcnv2-zipf1.05 --mode queued
  weft bench all_gather_matmul --preset llama-3-8b --mode queued --mode graph
  weft bench all_gather_matmul --shape 8192,4096,8192 --variants all --seconds 0.1
  weft bench all_to_all_matmul --preset mixtral-8x7b,4096x28672x4096-e8-top2-zipf1 --variants weft,dispatch
  weft bench matmul_all_to_all --preset deepseek-v3 --variants weft-bounded,combine --mode queued
  weft bench all_gather_matmul --preset table-1,synthetic --variants all --mode queued --json ficco.jsonl
  weft bench tensor_parallel --preset llama-3-8b,llama-3-70b --variants weft,weft-compiled,asynctp
  weft bench expert_parallel --preset qwen3-30b-a3b
  weft bench never-slower --help                           is weft ever slower than serial? Random shapes
  weft bench inefficiency --json losses.jsonl --pictures losses
  weft bench fused_embedding --json fused.jsonl            the figures of two papers, measured on 2 GPUs
  weft bench pgas --preset weak,strong --json pgas.jsonl
  torchrun --nproc-per-node 2 -m weft.cli bench embedding_all_to_all --device cuda --dtype fp16
"""
_PRESETS = """presets (--preset):
  embedding_all_to_all   pgas-weak, pgas-strong, fused-inter, dcnv2, criteo-kaggle, meta-2021, grid-...
  embedding_training     pgas-weak, pgas-strong, 64x200k, 128x100k, dcnv2, dcnv2-zipf1.05
  all_gather_matmul      measured, llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x7b, cpu
                         table-1, synthetic, g1 to g16, s1 to s16: FiCCO's GEMMs, with N divided by the ranks and M halved until it
                         fits. g1-m4 has a quarter of g1's M
                         MxNxK: any shape. N is the number of columns on each rank
                         NAME-symmetric: the inputs of preset or shape NAME are in symmetric memory (on GPUs)
  other GEMMs            as all_gather_matmul, without FiCCO's GEMMs. Operators that end in reduce_scatter have t3 in place of
                         mixtral-8x7b. matmul_reduce_scatter: append -rowmajor for row-major weights, as in backward
  all_to_all_matmul      mixtral-8x7b, deepseek-v3, qwen3-30b-a3b, cpu
                         TOKENSxNxK-eEXPERTS-topK[-zipfS]: tokens on each rank, experts of all ranks, skew S
  matmul_all_to_all      the presets of all_to_all_matmul, with the down projections of these models
  tensor_parallel        llama-3-8b, llama-3-70b, llama-3-405b, cpu: MLP and attention of the model, forward and backward
  expert_parallel        the presets and shapes of matmul_all_to_all: experts of the model, forward and backward
  inefficiency           g1 to g16
  fused_embedding        grid, grid-short, occupancy, slices, timeline, kernels, or one configuration, such as 'grid/1024|256'
  pgas                   weak, strong, batch, width, dlrm, or one configuration, such as weak/1 (one GPU) or weak/2
"""
_VARIANTS = """variants (--variants):
  embedding_all_to_all   baselines: batched, fbgemm, embedding_bag-async, pipelined-N (pooling in N kernels, overlapped with NCCL).
                         weft: direct, put, also with -natural and -sliceN, such as put-natural-slice8, and on GPUs with
                         -programsN (per multiprocessor) and -registersN (per thread), which limit the occupancy
  embedding_training     weft, fbgemm-deterministic, fbgemm, torch. Default: weft and FBGEMM
  all_gather_matmul      asynctp, prefetch (baselines); weft (the planner's choice); autotune; heuristic (FiCCO's); all (every
                         schedule); the beginning of schedules' names, such as shard or 'shard[chunks=2'
  all_to_all_matmul      padded (a baseline, which always runs); weft; all; the beginning of names, such as dispatch.
                         NAME-bounded passes max_rows
  matmul_all_to_all      the same, such as combine. NAME-bounded passes rows
  tensor_parallel        serial (the baseline), weft, weft-compiled, asynctp. Default: all that run on the device
  expert_parallel        serial (the baseline), weft, weft-bounded (max_rows). Default: all
"""
_SCALE = """shrink the configuration by this factor, such as 1/32 or 0.03. For embeddings: batch and tables (default: the
largest that fits). For inefficiency: M, N and K (default: 1/32 on CPU). The output shows the factor"""


def options_of(arguments: Sequence[str], program: str = "python -m weft.bench") -> BenchOptions:
    """Parse the command line; raise ValueError for invalid options.

    Default device: cuda if there is a GPU. Default number of ranks: as many as torchrun has started, else one per GPU,
    or 2 on CPU.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=_ABOUT,
        epilog="\n".join([_PRESETS, _VARIANTS, _EXAMPLES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("op", metavar="OP", help=f"the operator or study: {', '.join(measured())}")
    add("--preset", help="comma-separated presets or shapes, listed below. Default: all presets for the device")
    add(
        "--shape",
        action="append",
        metavar="M,N,K",
        default=[],
        help="a shape, as M,N,K or MxNxK; the same as --preset MxNxK. May be repeated",
    )
    add(
        "--ranks",
        type=int,
        help="number of processes to start. Default: 2 on CPU, one per GPU on cuda. Do not pass it with torchrun",
    )
    add("--device", help="cpu or cuda. Default: cuda if there is a GPU")
    add("--variants", default="", help="comma-separated variants, listed below. The baseline always runs")
    add("--mode", dest="modes", action="append", choices=_MODES, default=[],
        help="single: the CPU synchronises after each call. queued: the CPU launches calls ahead of the GPU. graph: a CUDA graph "
        "is replayed. Default: all modes of the operator on this device")  # fmt: skip
    add("--scale", help=_SCALE)
    add("--option", action="append", metavar="NAME=VALUE", default=[],
        help="an option of this operator, such as gather_dim=-1; `weft plan OP --help` lists them. May be repeated")  # fmt: skip
    add("--dtype", help="dtype of inputs and outputs: fp32, fp16, bf16, or fp8 for scaled operators. Default: bf16 for GEMMs on "
        "GPUs, otherwise fp32")  # fmt: skip
    add("--json", type=Path, help="append one line of JSON per variant and mode to this file; existing lines stay")
    add("--quick", action="store_true", help="use small inputs and few repetitions, to try the command out")
    add(
        "--seconds",
        type=float,
        help="time to measure the slowest variant in each mode, in seconds. Default: 1; with --quick 0.1",
    )
    add("--pictures", type=Path, help="for inefficiency: draw the paper's figures 7 to 10 into this folder")
    add("--counters", action="store_true", help="also record power and memory traffic of each variant, from the driver's counters "
        "(about a second per variant). Needs NVIDIA GPUs; traffic needs Hopper or later")  # fmt: skip
    # argparse takes -1,2,3 for an option, and would only say that --shape lacks an argument.
    joined = re.sub(r"(^|\0)--shape\0", r"\1--shape=", "\0".join(arguments))
    given = parser.parse_args(joined.split("\0"))

    import torch

    from weft.bench.core.options import BenchOptions, parse_option, parse_scale

    given.op, given.dtype = plain(given.op, given.dtype)
    op = operator(given.op)
    if given.json is not None:
        check_file("--json", given.json)
    if given.pictures is not None:
        check_pictures(given.pictures)
    if given.shape:
        shapes = ["x".join(map(str, mnk)) + suffix for *mnk, suffix in map(sizes, given.shape)]
        given.preset = ",".join([*([given.preset] if given.preset else []), *shapes])
    del given.shape
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given.modes = tuple(mode for mode in _MODES if mode in (given.modes or op.modes(given.device)))
    given.dtype = given.dtype or op.default_dtype(given.device)
    given.scale = None if given.scale is None else parse_scale(given.scale)
    given.option = tuple(parse_option(given.op, one) for one in given.option)
    # A comma before `parameter=` is part of a schedule's name: "weft, shard[chunks=2,send=in_turn,put" has three variants.
    given.variants = tuple(name for part in re.split(r",(?!\s*\w+=)", given.variants) if (name := part.strip()))
    given.ranks = number_of_ranks(given.ranks, given.device)
    return BenchOptions(**vars(given))


def run(arguments: Sequence[str], program: str = "python -m weft.bench") -> None:
    """Parse the command line and run the benchmarks. Raise `ValueError` for invalid options."""
    if arguments and arguments[0] == never_slower.COMMAND:
        asked = never_slower.options_of(arguments[1:], program)
        from weft.bench.never_slower.run import never_slower as measure

        measure(asked)
        return
    options = options_of(arguments, program)
    from weft.bench.core.run import bench

    bench(options)


def main() -> None:
    with one_line("weft bench"):
        run(sys.argv[1:])


if __name__ == "__main__":
    main()
