"""A job of four ranks, on one host or on two. It runs the examples with few steps, and `weft doctor --group`.

torchrun ... tests/support/examples_job.py FILE        # rank 0 writes the results to FILE
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.scripts import EXAMPLES, load

ARGUMENTS = {
    "tp_transformer": "--steps 4 --layers 1 --hidden 64 --head-dim 8 --length 32 --batch 2 --unfused",
    "moe": "--device cpu --shrink 256 --tokens 16 --repetitions 1 --steps 3",
    "dlrm": "--device cpu --steps 8 --every 4 --batch 256 --held-out 1 --rows 100",
}
LOSSES = {
    "tp_transformer": r"^step +\d+  loss (\S+)",
    "moe": r"training: loss (\S+) -> (\S+);",
    "dlrm": r"loss (\S+)  AUC (\S+)",
}


def printed(name: str) -> str:
    """Run an example on the ranks of the default group. Return its output."""
    said = io.StringIO()
    changes: dict[str, Any] = {"init_process_group": lambda *_: None, "destroy_process_group": lambda *_: None}
    ranks = {"RANK": str(dist.get_rank()), "LOCAL_RANK": "0", "WORLD_SIZE": str(dist.get_world_size())}
    with (
        mock.patch.multiple(dist, **changes), mock.patch.dict(os.environ, ranks),
        mock.patch.object(sys, "argv", [name, *ARGUMENTS[name].split()]),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        contextlib.redirect_stdout(said),
    ):  # fmt: skip
        load(EXAMPLES / f"{name}.py").main()
    return said.getvalue()


def losses() -> dict[str, list[float]]:
    """Return the losses that rank 0 prints, by example. Other ranks print no losses."""
    found = {name: re.findall(LOSSES[name], printed(name), re.MULTILINE) for name in ARGUMENTS}
    return {
        name: [float(x) for line in lines for x in ([line] if isinstance(line, str) else line)]
        for name, lines in found.items()
    }


def bytes_sent() -> int:
    """Return the bytes that this host has sent to the other host, headers included."""
    (line,) = (one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith("weft0:"))
    return int(line.split(":")[1].split()[8])


def crossing(group: dist.ProcessGroup) -> dict[str, int]:
    """Return {schedule: bytes that this host sends to the other host in a reduce-scatter of fp32 [4096, 512]}."""
    import weft

    found, x, w = {}, torch.ones(4096, 8), torch.ones(8, 512)
    for schedule in ("serial", "two_levels[hosts=2,chunks=1]", "two_levels[hosts=2,chunks=2]"):
        for _ in range(2):  # the first call also opens connections
            dist.barrier()
            before = bytes_sent()
            y = weft.matmul_reduce_scatter(x, w, "sum", 0, group, schedule=schedule)
            dist.barrier()
            found[schedule] = bytes_sent() - before
        assert bool((y == 8.0 * group.size()).all()), y
    return found


def main() -> None:
    from weft import symm
    from weft.cli.doctor_group import examine_group, print_group

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = losses()
    report = examine_group(group)
    sent = crossing(group)
    said = [
        f"{one.filename}: {one.message}"
        for one in caught
        if "weft" in str(one.filename) or "serial" in str(one.message)
    ]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (os.uname().nodename, symm.communicator(group, "cpu").mapped, said))
    if dist.get_rank() == 0:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            print_group(report)
        Path(sys.argv[1]).write_text(
            json.dumps({"losses": found, "ranks": everybody, "sent": sent, "doctor": shown.getvalue()})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
