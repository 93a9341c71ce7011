"""A rank that makes the calls that its standard input lists, and prints their results. Tests of faults between hosts
use it.

    python tests/support/rank_on_host.py RANK WORLD_SIZE ADDRESS PORT

A line "GROUP DEADLINE [ROWS]" makes a call. GROUP is "all", or "two" for the first two ranks. ROWS is the number of rows of the
matrix that is reduced, by default 4 for each rank.
"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist

import weft
from weft.errors import WeftError


def main() -> None:
    rank, world, address, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=100),
    )
    groups = {"all": dist.group.WORLD, "two": dist.new_group([0, 1])}
    w = torch.eye(4)
    print(f"pid {os.getpid()}", flush=True)
    for line in sys.stdin:
        name, deadline_s, *rows = line.split()
        x = torch.full((int(rows[0]) if rows else 4 * world, 4), rank + 1.0)
        group = groups[name]
        assert group is not None
        try:
            y = weft.matmul_all_reduce(x, w, group, deadline_s=float(deadline_s))
            print(f"sum {y.unique().tolist()}", flush=True)
        except WeftError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)  # after a cut link, the connections of the store and of gloo would delay a normal exit


if __name__ == "__main__":
    main()
