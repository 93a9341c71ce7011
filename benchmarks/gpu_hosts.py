"""GEMMs with collectives on two GPUs of this machine that claim to be on different hosts: serial, and schedules of chunks.

    python benchmarks/gpu_hosts.py --json FILE

NCCL connects the ranks by sockets on loopback (`NCCL_HOSTID` differs, no peer access, no shared memory), at a few GB/s.
Each turn calls all variants, in another order. A variant is called twice, and the second call is timed. "weft" is the
unpinned call, whose schedule weft chose by measurement. A line has the slowest rank's median, and the median over all
turns of the speed relative to serial. The result of each variant is compared with serial's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft import symm
from weft.launch import Pool, share_gpus
from weft.runtime.links import network_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.pretended_hosts import on_two_hosts

CHUNKED = [f"collective[chunks={chunks}]" for chunks in (1, 2, 4)]
GATHERS = [f"ficco_1d_collective[start=hetero,gemms=unfused,steps={steps}]" for steps in (1, 2, 4)]
# (operator, rows of the whole matrix that is gathered or reduced, columns of that matrix, the third size of the GEMM)
SHAPES = [
    (op, rows, 4096, other)
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    for rows, other in ((256, 4096), (4096, 28672), (4096, 114688), (8192, 114688))
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="file for the records")
    parser.add_argument("--calls", type=int, default=7, help="turns")
    given = parser.parse_args()
    os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    with Pool(2, backend="nccl") as ranks:
        records = ranks.run(rank, given.calls, timeout_s=300)[0]
    if given.json:
        given.json.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")


def call_of(op: str, rows: int, columns: int, other: int, group: dist.ProcessGroup) -> Any:
    """Return a function that calls the operator with a given schedule, on random matrices."""

    def drawn(*shape: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(group.rank())
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) / shape[-1] ** 0.5

    if op == "all_gather_matmul":
        x, w = drawn(rows // 2, columns), drawn(other // 2, columns).t()
        return lambda schedule=None, **options: weft.all_gather_matmul(
            x, [w], 0, group, return_A=False, schedule=schedule, **options
        )[1][0]
    x, w = drawn(rows, other // 2), drawn(columns, other // 2).t()
    if op == "matmul_reduce_scatter":
        return partial(weft.matmul_reduce_scatter, x, w, "sum", 0, group)
    return partial(weft.matmul_all_reduce, x, w, group)


def rank(group: dist.ProcessGroup, calls: int) -> list[dict[str, Any]]:
    share_gpus(group.rank())
    found = []
    with on_two_hosts(group, measures_links=True) as own:
        for op, rows, columns, other in SHAPES:
            call = call_of(op, rows, columns, other, own)
            names = ["serial", *(GATHERS if op == "all_gather_matmul" else CHUNKED)]
            variants = {name: partial(call, schedule=name) for name in names} | {"weft": call}
            found += measured(own, variants, calls, {"op": op, "rows": rows, "columns": columns, "other": other})
        network = network_of(symm.communicator(own, "cuda"))
    if group.rank() == 0:
        print(f"links, measured by weft: {network}")
    return found


def measured(
    group: dist.ProcessGroup, variants: dict[str, Any], calls: int, about: dict[str, Any]
) -> list[dict[str, Any]]:
    wanted = variants["serial"]().float()
    for name, call in variants.items():
        error = ((call().float() - wanted).abs().max() / wanted.abs().max()).item()
        assert error < 0.02, f"{about}, {name}: differs from serial by {error:.3g}"
    comm = symm.communicator(group, "cuda")
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for turn in range(calls):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            call = variants[name]
            call()  # the variant before may use another NCCL communicator
            torch.cuda.synchronize()
            comm.meet(b"", name="a turn")  # without NCCL
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            mine = struct.pack("<d", 1e3 * (time.perf_counter() - begin))
            times[name].append(max(struct.unpack("<d", one)[0] for one in comm.meet(mine, name="times")))
    records = []
    for name, of_turns in times.items():
        speeds = [serial / ms for serial, ms in zip(times["serial"], of_turns, strict=True)]
        records.append({
            **about, "variant": name, "ms": statistics.median(of_turns), "speed": statistics.median(speeds),
            "not_slower": sum(speed >= 0.98 for speed in speeds), "calls": calls, "chunks": chunks(group, variants[name]),
            "gpu": torch.cuda.get_device_name(),
        })  # fmt: skip
        if group.rank() == 0:
            print(json.dumps(records[-1]), flush=True)
    return records


def chunks(group: dist.ProcessGroup, call: Any) -> int:
    """Return the number of collectives that a call runs beside its GEMMs; 0 for serial."""
    timeline = weft.Timeline()
    call(timeline=timeline)
    return sum(span.rank == group.rank() and span.lane == "library" and "->" in span.name for span in timeline)


if __name__ == "__main__":
    main()
