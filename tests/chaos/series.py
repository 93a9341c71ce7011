"""Run series of random calls without faults: `python -m tests.chaos.series --seed 7`.

A series makes some hundred calls in a row on one group of 2 to 4 ranks. They are calls of operators, embedding modules
and layers. Each has other sizes, dtypes, options and schedules, and other calls come between its forward and its
backward (`series_calls`). The seed and the index of a series determine all calls, so a series can be repeated alone.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from weft.launch import Pool

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `support` is, as in pytest
from .series_calls import CALLS_OF, play

STEPS, MOST_S = 300, 300.0
WORLDS = (2, 2, 3, 4)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.series", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=20, help="how many series (default: %(default)s)")
    parser.add_argument("--only", type=int, action="append", metavar="INDEX", help="run only this series")
    parser.add_argument("--kind", action="append", choices=list(CALLS_OF), help="only calls of this kind")
    given = parser.parse_args(arguments)
    sys.exit(run(given.seed, given.only or range(given.n), given.kind or list(CALLS_OF)))


def run(seed: int, indices: Sequence[int], kinds: list[str]) -> int:
    """Run the series. Print how to repeat each series that failed. Return the exit status."""
    calls, failed, begin = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-series-") as cache, Pool(max(WORLDS)) as pool:
        os.environ |= {"WEFT_QUIET": "1", "WEFT_CACHE_DIR": cache}
        for index in indices:
            world = random.Random(f"{seed}:{index}").choice(WORLDS)
            try:
                calls += pool.run(play, seed, index, kinds, STEPS, ranks=world, timeout_s=MOST_S)[0]
            except Exception as error:
                failed += 1
                only = "".join(f" --kind {shlex.quote(kind)}" for kind in kinds) if len(kinds) < len(CALLS_OF) else ""
                print(f"{type(error).__name__}: {str(error)[:3000]}\n{str(error.__cause__)[-3000:]}")
                print(f"again by python -m tests.chaos.series --seed {seed}{only} --only {index}", flush=True)
    took_s = time.monotonic() - begin
    print(f"seed {seed}: {calls} calls in {len(indices)} series, {failed} failed, {took_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    main()
