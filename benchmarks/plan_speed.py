"""The CPU time of plans and simulations of many ranks, which users wait for.

    python benchmarks/plan_speed.py [--json FILE]

Each case runs as a command of its own. It measures the CPU time of the command in user mode, including the start of
Python, because other work on the machine hardly changes this time. `limit` is the time that a case should stay below.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.bench.core.records import environment
from weft.files import write_whole

GEMM, EXPERTS, TABLES = "65536,8192,8192", "8192,4096,7168", "65536,64,32"


class Case(NamedTuple):
    name: str
    command: tuple[str, ...]
    limit_s: float


def _plan(op: str, shape: str, ranks: int, topology: str, limit_s: float, *options: str) -> Case:
    hw = "h200" if topology.startswith(("switch", "hosts")) else "mi300x"
    command = ("plan", op, "--shape", shape, "--hw", hw, "--ranks", str(ranks), "--topology", topology)
    return Case(f"plan of {op}, {ranks} ranks, {topology}", (*command, *options), limit_s)


def cases() -> list[Case]:
    found = []
    for ranks, limit_s, torus, hosts in ((64, 3.0, "torus:8x8", "hosts:8x8"), (256, 6.0, "torus:16x16", "hosts:32x8")):
        for topology in ("switch", "mesh", "ring", torus, hosts):
            for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
                found.append(_plan(op, GEMM, ranks, topology, limit_s))
            for op in ("all_to_all_matmul", "matmul_all_to_all"):
                found.append(_plan(op, EXPERTS, ranks, topology, limit_s, "--option", "experts=256"))
            found.append(_plan("embedding_all_to_all", TABLES, ranks, topology, limit_s, "--option", f"tables={ranks}"))
    uneven = ("--option", "tables=100")
    found.append(_plan("embedding_all_to_all", TABLES, 64, "switch", 2.0, *uneven))
    for torus, limit_s in (("torus:16x8", 1.0), ("torus:128x128", 20.0)):
        sim = ("sim", "embedding_all_to_all", "--shape", TABLES, "--hw", "mi300x", "--topology", torus)
        found.append(Case(f"simulation of embeddings, {torus}", (*sim, "--option", "tables=16384"), limit_s))
    return found


def cpu_s(command: Sequence[str]) -> float:
    """Run `weft` with these arguments; return the CPU time in user mode."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    program = "from weft.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", program, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the times to this file")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in cases():
        rows.append({"case": case.name, "cpu_s": round(cpu_s(case.command), 2), "limit_s": case.limit_s})
        late = "" if rows[-1]["cpu_s"] <= case.limit_s else "  above its limit"
        print(f"{rows[-1]['cpu_s']:7.2f} s of {case.limit_s:4.0f}  {case.name}{late}", flush=True)
    if given.json:
        write_whole(given.json, json.dumps({**environment("cpu"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
