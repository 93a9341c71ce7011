"""`python -m weft.bench OP ...`: `weft bench` for machines that have torch but neither typer nor rich.

The same options and the same run; only the help is plainer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.bench.core.harness import MODES
from weft.bench.core.operators import OPERATORS
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.run import bench


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weft.bench", description=__doc__)
    parser.add_argument("op", choices=list(OPERATORS))
    parser.add_argument("--preset")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--variants", help="comma-separated")
    parser.add_argument("--mode", dest="modes", action="append", choices=MODES, default=[])
    parser.add_argument("--scale", help="as 1/32 or 0.03")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--pictures", type=Path)
    try:
        options = BenchOptions.from_text(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))
    bench(options)


if __name__ == "__main__":
    main()
