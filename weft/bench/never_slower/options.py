"""The command line of `weft bench never-slower`. Its help does not import torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.bench.core.arguments import check_file, number_of_ranks, one_of
from weft.bench.core.operators import LAYERS, names
from weft.bench.provenance import provenance
from weft.builders.problem import PROBLEMS

COMMAND = "never-slower"
MODES = ("queued", "graph", "single", "changing")
SHAPES = 12
SIZES = {"cuda": 1000, "cpu": 60}
"""The number of consecutive sizes in `changing`, by type of device."""

_ABOUT = """
Test if weft is ever slower than hand-written calls of NCCL (gloo) and cuBLAS, called "serial".

The command measures every forward operator on random shapes. It compares the results of each shape with a float64 reference, then
times weft and serial in turn, five times. A shape counts as "below" if weft runs at less than 0.98 of serial's speed in at least
four of these five repetitions, and again in a second measurement. M is between 1 and 65536, and N and K are between 512 and 53248.
A GEMM takes at most 5 ms, and a shape at most a quarter of the memory. The last line of the output is the verdict. The exit status
is 0 for any verdict.

On CPU ranks, shapes are small, and times vary with the load of the machine. So no limit applies there, and the verdict only counts
errors. A shape that is "below" there may deserve a longer measurement by `weft bench OP`.
"""
_EXAMPLES = """modes:
  queued    the CPU launches calls ahead of the GPU, as in training
  graph     a CUDA graph is captured and replayed, as in decoding. Only on GPUs, for operators that can be captured
  single    the CPU synchronises after each call. The verdict on GPUs is on the microseconds that weft adds
  changing  each call has another size, and the CPU synchronises after it. Weft and serial take turns every 8 sizes. Before
            that, untimed serial calls load cuBLAS's kernels. The first 20 sizes are not counted. The verdict on GPUs is on
            mean and 99th percentile

examples:
  weft bench never-slower                                  5 minutes on two GPUs
  weft bench never-slower --ops all_gather_matmul,matmul_all_reduce --modes queued,graph
  weft bench never-slower --json never.jsonl               if interrupted, run it again: it measures only the missing shapes
  weft bench never-slower --shapes 40 --part 2/3 --seed 89614071 --json part-2.jsonl
  weft bench never-slower --seed 92c7fe8b --only 132x14848x25152-e4-top4 --modes graph
  torchrun --nproc-per-node 2 -m weft.cli bench never-slower --device cuda
"""


def forward_operators() -> list[str]:
    """Return the names of weft's own forward operators, without operators that users have registered."""
    own = [name for name in names() if name not in PROBLEMS or PROBLEMS[name].__module__.startswith("weft.")]
    return [name for name in own if name not in LAYERS and not name.endswith("_gradients")]


@dataclass(frozen=True)
class Options:
    """The options of a run. seed: hexadecimal digits. shapes: the number of shapes of each operator. part: the part of the
    shapes to measure: (i, n) for the i-th of n equal parts. sizes: the number of calls in mode `changing`, each with another
    size.
    """

    ops: tuple[str, ...]
    modes: tuple[str, ...]
    device: str
    ranks: int
    seed: str
    shapes: int = SHAPES
    sizes: int = SIZES["cpu"]
    part: tuple[int, int] = (1, 1)
    json: Path | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} must be 'cpu' or 'cuda'")
        for name in self.ops:
            if name not in forward_operators():
                raise one_of("operator", name, forward_operators())
        for mode in self.modes:
            if mode not in MODES:
                raise one_of("mode", mode, MODES)
        if self.modes == ("graph",) and self.device == "cpu":
            raise ValueError(
                "--modes graph: CPU calls cannot be captured: use queued, single or changing, or --device cuda"
            )
        if not re.fullmatch(r"[0-9a-f]{1,16}", self.seed):
            raise ValueError(f"--seed {self.seed}: pass 1 to 16 hexadecimal digits, such as 89614071")
        if self.ranks < 2:
            needed = (
                "--ranks 2 or more" if self.device == "cpu" else "at least 2 GPUs, one for each rank, or --device cpu"
            )
            raise ValueError(f"--ranks {self.ranks}: a single rank does not communicate: use {needed}")
        for name, count in (("--shapes", self.shapes), ("--sizes", self.sizes)):
            if count < 1:
                raise ValueError(f"{name} {count} must be at least 1")
        number, parts = self.part
        if not 1 <= number <= parts:
            raise ValueError(f"--part {number}/{parts}: parts are numbered from 1 to {parts}")


def options_of(arguments: Sequence[str], program: str) -> Options:
    """Parse the command line; raise `ValueError` for invalid options."""
    parser = argparse.ArgumentParser(
        prog=f"{program} {COMMAND}", description=_ABOUT, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--ops", metavar="A,B", help=f"operators. Default: all of {', '.join(forward_operators())}")
    add("--shapes", type=int, default=SHAPES, metavar="N", help=f"number of shapes of each operator. Default: {SHAPES}")
    add("--part", default="1/1", metavar="I/N", help="measure the I-th of N equal parts of all shapes")
    add("--only", metavar="A,B", default="", help=(
        "measure only the shapes with these names, such as 132x14848x25152-e4-top4; not in mode changing. Pass the seed "
        "of the run that printed the names"
    ))  # fmt: skip
    add("--seed", metavar="HEX", help="seed of the shapes. Default: the first 8 digits of the measured commit")
    add(
        "--modes",
        default=",".join(MODES),
        metavar="A,B",
        help=f"modes. Default: {','.join(MODES)}; on CPU without graph",
    )
    add("--sizes", type=int, metavar="N", help="number of consecutive sizes in mode changing. Default: "
        f"{SIZES['cuda']} on GPUs, {SIZES['cpu']} on CPU")  # fmt: skip
    add("--device", help="cpu or cuda. Default: cuda if there is a GPU")
    add(
        "--ranks",
        type=int,
        help="number of processes to start. Default: 2 on CPU, one per GPU on cuda. Do not pass it with torchrun",
    )
    add("--json", type=Path, metavar="FILE", help=(
        "append a line for each shape and mode. Shapes that FILE already "
        "has for this seed, code and machine are skipped"
    ))  # fmt: skip
    given = parser.parse_args(arguments)

    import torch

    if given.json is not None:
        check_file("--json", given.json)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if given.device is None else given.device
    modes = _list("--modes", given.modes)
    if device == "cpu" and modes != ("graph",):
        modes = tuple(mode for mode in modes if mode != "graph")
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", given.part)
    if found is None:
        raise ValueError(f"--part {given.part}: write it as I/N, such as 1/3")
    return Options(
        _list("--ops", given.ops) if given.ops is not None else tuple(forward_operators()), modes, device,
        number_of_ranks(given.ranks, device), (default_seed() if given.seed is None else given.seed).lower(), given.shapes,
        SIZES.get(device, SIZES["cpu"]) if given.sizes is None else given.sizes, (int(found[1]), int(found[2])), given.json,
        _list("--only", given.only) if given.only else (),
    )  # fmt: skip


def default_seed() -> str:
    """Return the first 8 hexadecimal digits of the commit, or of the hash of the sources if no commit is known."""
    code = provenance()
    return (code.source if code.commit == "unknown" else code.commit)[:8]


def _list(option: str, text: str) -> tuple[str, ...]:
    """Return the names in `text`, separated by commas. Raise `ValueError` if there are none."""
    found = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not found:
        raise ValueError(f"{option} {text!r} has no name: pass at least one, or omit {option}")
    return found
