"""`python -m weft.bench OP ...`: `weft bench` for machines that have torch but not typer or rich.

The help does not import torch. Each operator checks presets and variants (`OperatorBenchmark.check_options`).
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
Measure an operator against its baselines, after checking every variant against float64.
Starts its own ranks, or uses torchrun's. Each time is the slowest rank's median. "over roofline" is this time divided by the time
of its bytes (and FLOPs) at the peak rates measured in the same run; with caches it can be less than 1.
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
  weft bench never-slower --help                           is weft ever slower? All operators, on shapes that a seed draws
  weft bench inefficiency --json losses.jsonl --pictures losses
  torchrun --nproc-per-node 2 -m weft.cli bench embedding_all_to_all --device cuda --dtype fp16
"""
_PRESET = """comma-separated. embedding_all_to_all: pgas-weak, pgas-strong, fused-inter, dcnv2, criteo-kaggle, meta-2021 or
grid-... embedding_training: pgas-weak, pgas-strong, 64x200k, 128x100k, dcnv2, dcnv2-zipf1.05. all_gather_matmul: measured,
llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x7b, cpu, or a shape as MxNxK, N columns on each rank; with -symmetric
behind either, on GPUs, inputs lie in symmetric memory; table-1, synthetic, g1 to g16, s1 to s16: FiCCO's GEMMs, N over the
ranks, M halved until it fits, or as in g1-m4 a quarter. Other GEMMs: the presets before FiCCO's; operators that end in
reduce_scatter have t3 in place of mixtral-8x7b. all_to_all_matmul: mixtral-8x7b, deepseek-v3, qwen3-30b-a3b, cpu, or
TOKENSxNxK-eEXPERTS-topK[-zipfS]: tokens on each rank, experts of all ranks, skew. matmul_all_to_all: the same names, their
last matrices. tensor_parallel: llama-3-8b, llama-3-70b, llama-3-405b, cpu: the MLP and the attention of each, forward and
backward. inefficiency: g1 to g16, the paper's GEMMs. Default: all presets for the device"""
_VARIANTS = """comma-separated; the baseline always runs. embedding_all_to_all: batched, fbgemm (baselines), direct, put, and
these with -natural and -sliceN, such as put-natural-slice8. embedding_training: weft, weft-push, fbgemm-deterministic,
fbgemm, torch (each runs only if named; default: FBGEMM's and weft). all_gather_matmul: asynctp (baseline), weft (the
planner's choice), autotune, heuristic (FiCCO's), all, or beginnings of schedules' names: shard, 'shard[chunks=2'.
all_to_all_matmul: padded (baseline, always runs), weft, all, or beginnings of names: dispatch; each also as ...-bounded.
matmul_all_to_all: weft, all, combine, likewise. tensor_parallel: serial (baseline), weft, weft-compiled, asynctp; default:
all variants for the device"""
_SCALE = """as 1/32 or 0.03; it is printed. Embeddings: shrink batch and tables. Default: the largest that fits.
inefficiency: shrink M, N and K. Default: 1/32 on CPU; GEMMs that are still too large shrink further"""


def options_of(arguments: Sequence[str], program: str = "python -m weft.bench") -> BenchOptions:
    """Parse the command line; raise ValueError for invalid options.

    Default device: cuda if there is a GPU. Default ranks: one per GPU, or 2 on CPU; under torchrun, its number of ranks.
    """
    parser = argparse.ArgumentParser(
        prog=program, description=_ABOUT, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("op", metavar="OP", help=f"the operator or study: {', '.join(measured())}")
    add("--preset", help=_PRESET)
    add(
        "--shape",
        action="append",
        metavar="M,N,K",
        default=[],
        help="or MxNxK: the same as --preset MxNxK. May be repeated",
    )
    add("--ranks", type=int, help="processes to start. Default: 2 on CPU, every GPU on cuda. Not under torchrun")
    add("--device", help="cpu or cuda. Default: cuda if there is a GPU")
    add("--variants", default="", help=_VARIANTS)
    add("--mode", dest="modes", action="append", choices=_MODES, default=[],
        help="single: one call, one synchronisation. queued: many. graph: captured and replayed. Default: all modes of the "
        "operator on this device")  # fmt: skip
    add("--scale", help=_SCALE)
    add("--option", action="append", metavar="NAME=VALUE", default=[],
        help="the operator's own option, from the list in `weft plan OP --help`: gather_dim=-1. May be repeated")  # fmt: skip
    add("--dtype", help="type of inputs and outputs: fp32, fp16, bf16; fp8: scaled_matmul_reduce_scatter, and the scaled variant "
        "of all_gather_matmul. Default: fp32; bf16 for GEMMs on GPUs")  # fmt: skip
    add("--json", type=Path, help="append one line of JSON per variant and mode to this file; existing lines stay")
    add("--quick", action="store_true", help="try it out: small inputs, few repetitions")
    add("--seconds", type=float, help="seconds for the slowest variant in each mode. Default: 1, with --quick 0.1")
    add("--pictures", type=Path, help="inefficiency: draw the paper's figures 7 to 10 into this folder")
    given = parser.parse_args(arguments)

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
