"""`python -m weft.bench OP ...`: `weft bench` for machines that have torch but not typer or rich.

`--help` does not import torch: presets and variants are checked later, by the operator's `OperatorBenchmark.check_options`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench import help
from weft.bench.core.arguments import check_file, check_pictures, given_once, number_of_ranks, one_line, sizes
from weft.bench.core.operators import operator
from weft.bench.never_slower import options as never_slower
from weft.builders.problem import plain

if TYPE_CHECKING:
    from weft.bench.core.options import BenchOptions

_MODES = ("single", "queued", "graph")
_SCALE = """shrink the configuration by this factor, such as 1/32 or 0.03. For embeddings: batch and tables (default: the
largest that fits). For inefficiency: M, N and K (default: 1/32 on CPU). The output shows the factor"""


def options_of(arguments: Sequence[str], program: str = "python -m weft.bench") -> BenchOptions:
    """Parse the command line; raise ValueError for invalid options.

    Default device: cuda if there is a GPU. Default number of ranks: as many as torchrun has started, else one per GPU,
    or 2 on CPU.
    """
    name = help.asked_for(arguments)
    if name is None and {"-h", "--help"} & {*arguments} and not arguments[0].startswith("-"):
        operator(plain(arguments[0], None)[0], never_slower.COMMAND)  # general help would hide a misspelt name
    parser = argparse.ArgumentParser(
        prog=program if name is None else f"{program} {name}",
        usage=None if name is None else "%(prog)s [options]",
        description=help.about(name),
        epilog=None if name is None else help.lists(name, program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    below = "" if name is None else ", listed below"

    def add(flag: str, text: str, **how: Any) -> None:
        is_hidden = name is not None and flag.removeprefix("--") in help.HELP[name].without
        parser.add_argument(flag, help=argparse.SUPPRESS if is_hidden else text, **how)

    add(
        "op",
        "the operator or study; `weft bench --help` lists them" if name is None else argparse.SUPPRESS,
        metavar="OP",
    )
    add(
        "--preset",
        f"comma-separated presets or shapes{below}. Default: all presets for the device",
    )
    add("--shape", "a shape, as M,N,K or MxNxK; the same as --preset MxNxK. May be repeated", action="append", metavar="M,N,K",
        default=[])  # fmt: skip
    add(
        "--ranks",
        "number of processes to start. Default: 2 on CPU, one per GPU on cuda. Do not pass it with torchrun",
        type=int,
    )
    add("--device", "cpu or cuda. Default: cuda if there is a GPU")
    add("--variants", f"comma-separated variants{below}. The baseline always runs")
    add("--mode", "single: the CPU synchronises after each call. queued: the CPU launches calls ahead of the GPU. graph: a CUDA "
        "graph is replayed. Default: all modes of the operator on this device", dest="modes", action="append", choices=_MODES,
        default=[])  # fmt: skip
    add("--scale", _SCALE)
    add("--option", "an option of this operator, such as gather_dim=-1; `weft plan OP --help` lists them. May be repeated",
        action="append", metavar="NAME=VALUE", default=[])  # fmt: skip
    add("--dtype", "dtype of inputs and outputs: fp32, fp16, bf16, or fp8 for scaled operators. Default: bf16 for GEMMs on "
        "GPUs, otherwise fp32")  # fmt: skip
    add("--json", "append one line of JSON per variant and mode to this file; existing lines stay", type=Path)
    add("--quick", "use small inputs and few repetitions, to try the command out", action="store_true")
    add(
        "--seconds",
        "time to measure the slowest variant in each mode, in seconds. Default: 1; with --quick 0.1",
        type=float,
    )
    add("--pictures", "for inefficiency: draw the paper's figures 7 to 10 into this folder", type=Path)
    add("--counters", "also record power and memory traffic of each variant, from the driver's counters (about a second per "
        "variant). Needs NVIDIA GPUs; traffic needs Hopper or later", action="store_true")  # fmt: skip
    # argparse takes -1,2,3 for an option, and would only say that --shape lacks an argument.
    joined = re.sub(r"(^|\0)--shape\0", r"\1--shape=", "\0".join(arguments))
    given, unknown = parser.parse_known_args(joined.split("\0"))

    import torch

    from weft.bench.core.options import BenchOptions, parse_option, parse_scale

    given.op, given.dtype = plain(given.op, given.dtype)
    op = operator(given.op, never_slower.COMMAND)  # before the options, which may be those of a misspelt operator
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if given.json is not None:
        check_file("--json", given.json)
    if given.pictures is not None:
        check_pictures(given.pictures)
    if given.shape:
        shapes = ["x".join(map(str, mnk)) + suffix for *mnk, suffix in map(sizes, given.shape)]
        given.preset = ",".join([*([given.preset] if given.preset else []), *shapes])
    del given.shape
    if given.device is None:
        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    given.modes = tuple(mode for mode in _MODES if mode in (given.modes or op.modes(given.device)))
    given.dtype = op.default_dtype(given.device) if given.dtype is None else given.dtype
    given.scale = None if given.scale is None else parse_scale(given.scale)
    given.option = tuple(given_once([parse_option(given.op, one) for one in given.option]).items())
    # A comma before `parameter=` is part of a schedule's name: "weft, shard[chunks=2,send=in_turn,put" has three variants.
    names = tuple(name for part in re.split(r",(?!\s*\w+=)", given.variants or "") if (name := part.strip()))
    if given.variants is not None and not names:
        raise ValueError(
            f"--variants {given.variants!r} names no variant: pass a name, or omit it for the default variants"
        )
    given.variants = names
    given.ranks = number_of_ranks(given.ranks, given.device)
    return BenchOptions(**vars(given))


def run(arguments: Sequence[str], program: str = "python -m weft.bench") -> None:
    """Parse the command line and run the benchmarks. Raise `ValueError` for invalid options."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(help.overview(program))
        return
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
