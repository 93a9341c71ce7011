"""all-gather -> GEMM -> activation -> GEMM as one schedule, on GPUs or CPU processes.

    python examples/gemm_chain.py                   # 2 ranks: prints the schedule, runs it, checks the result
    python examples/gemm_chain.py --trace chain/    # also draws a timeline
    python examples/gemm_chain.py --device cuda --rows 4096 --width 4096 --hidden 8192

This is the MLP of a transformer with tensor parallelism. Each rank has some rows of x, some columns of w0 and some rows of w1. It
computes y = silu(gathered x @ w0) @ w1; the result of the MLP is the sum of y over ranks. Ranks send their shards of x in chunks.
When a chunk has arrived, the first GEMM multiplies its rows by w0, and the activation runs. Then the second GEMM, on another lane,
immediately multiplies these rows by w1. No GEMM waits for all of x or for the whole hidden matrix. (See "Design Space Exploration
of DMA based Finer-Grain Compute Communication Overlap", figure 5.)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from weft.builders.operands import peer
from weft.launch import run_ranks
from weft.schedule import RANK, Draft, Schedule
from weft.schedule.verify import verify
from weft.timeline import Timeline
from weft.trace import draw_overlap, write_trace


def chain(world: int, rows: int, width: int, hidden: int, chunks: int) -> Schedule:
    """Return the schedule of y [world * rows, width] = silu(gathered x @ w0) @ w1: x [rows, width], w0 [width, hidden], w1
    [hidden, width]."""
    d = Draft("gemm chain", world)
    x = d.buffer("x", rows, width, "fp32", "input")
    w0 = d.buffer("w0", width, hidden, "fp32", "input")
    w1 = d.buffer("w1", hidden, width, "fp32", "input")
    y = d.buffer("y", world * rows, width, "fp32", "output")
    box = d.buffer("box", world * rows, width, "fp32", "symmetric")  # peers put their rows of x here
    h = d.buffer("h", world * rows, hidden, "fp32", "scratch")
    arrived = d.signals("arrived", world * chunks)  # one for each rank's chunk: set when the chunk is in the box
    active = d.signals("active", world * chunks)  # one for each chunk: set when its rows of h are computed
    credit = d.signals("credit", world)  # one for each reader: set when it has read this rank's rows
    first, second = d.lane("GEMM 1"), d.lane("GEMM 2")
    size = rows // chunks

    def send(distance: int, c: int) -> None:
        to = peer(world, distance)
        lane = d.lane(f"to +{distance}", "copy")
        if c == 0:
            lane.wait(credit, to, previous=True)
        part = x.part(rows=(c * size, size))
        lane.copy(part, box.part(rows=(RANK * rows + c * size, size), at=to)).set(arrived, RANK * chunks + c, at=to)

    def use(distance: int, c: int) -> None:
        source = peer(world, -distance) if distance else RANK
        these, number = (source * rows + c * size, size), source * chunks + c
        if distance:
            first.wait(arrived, number)
        first.matmul(h.part(rows=these), box.part(rows=these) if distance else x.part(rows=(c * size, size)), w0.part())
        first.compute("silu", h.part(rows=these), h.part(rows=these)).set(active, number)
        second.wait(active, number).matmul(y.part(rows=these), h.part(rows=these), w1.part())

    for c in range(chunks):  # the rank's own rows first, because they need no wait
        use(0, c)
    for c in range(chunks):  # then the other ranks' rows, in their order of arrival
        for distance in range(1, world):
            send(distance, c)
            use(distance, c)
    for distance in range(1, world):
        first.set(credit, RANK, at=peer(world, -distance))
    return d.schedule()


def on_a_rank(rank: int, world: int, schedule: Schedule, device: str = "cpu") -> tuple[float, float, Timeline]:
    """Run the schedule three times.

    Return (error of y against float64, error of torch's y in fp32 against float64, timeline of the last run)."""
    group = dist.group.WORLD
    assert group is not None
    here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    given = {b.name: (int(b.rows), b.cols) for b in schedule.buffers_of_rank(rank) if b.role in ("input", "output")}
    torch.manual_seed(rank)  # different weights and rows on every rank
    tensors = {name: torch.randn(size, device=here) / size[1] ** 0.5 for name, size in given.items()}
    for _ in range(3):
        tensors["y"].fill_(torch.nan)
        timeline = Timeline()
        dist.barrier()  # only for the picture, in which ranks then begin together
        weft.run_schedule(schedule, tensors, group, timeline=timeline)
    shards = [torch.empty_like(tensors["x"]) for _ in range(world)]
    dist.all_gather(shards, tensors["x"])

    def mlp(x: torch.Tensor, w0: torch.Tensor, w1: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x @ w0) @ w1

    operands = [torch.cat(shards), tensors["w0"], tensors["w1"]]
    exact = mlp(*(t.double() for t in operands))
    ours, usual = ((y - exact).norm().item() / exact.norm().item() for y in (tensors["y"], mlp(*operands)))
    return ours, usual, timeline


def parser() -> argparse.ArgumentParser:
    about, _, why = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(description=about, epilog=why, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU per rank (default: %(default)s)"
    )
    made.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: %(default)s)")
    made.add_argument("--rows", type=int, default=512, help="rows of x on each rank (default: %(default)s)")
    made.add_argument("--width", type=int, default=512, help="columns of x and of y (default: %(default)s)")
    made.add_argument("--hidden", type=int, default=1024, help="columns between the GEMMs (default: %(default)s)")
    made.add_argument("--chunks", type=int, default=2, help="number of chunks of a shard (default: %(default)s)")
    made.add_argument("--trace", type=Path, metavar="DIR", help="write a picture and a Perfetto trace of the run there")
    return made


def main() -> None:
    arguments = parser().parse_args()
    for name in ("ranks", "rows", "width", "hidden", "chunks"):
        if getattr(arguments, name) < 1:
            parser().error(f"--{name} {getattr(arguments, name)} must be at least 1")
    if arguments.rows % arguments.chunks:
        parser().error(f"--rows {arguments.rows} must be divisible by --chunks {arguments.chunks}")
    schedule = chain(arguments.ranks, arguments.rows, arguments.width, arguments.hidden, arguments.chunks)
    verify(schedule)
    print(schedule, end="\n\n")
    timeline = Timeline()
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    found = run_ranks(arguments.ranks, on_a_rank, schedule, arguments.device, backend=backend)
    for rank, (ours, usual, spans) in enumerate(found):
        print(f"rank {rank}: error {ours:.2e} against float64; torch, one step after the other: {usual:.2e}")
        if not ours <= 2 * usual:
            raise SystemExit(f"rank {rank}: the result is wrong")
        timeline.extend(spans)
    if arguments.trace:
        write_trace(arguments.trace / "gemm_chain.json", {"gemm chain": timeline})
        where = f"{arguments.ranks} ranks, {arguments.device}, {arguments.chunks} chunks"
        title = f"all-gather, GEMM, silu, GEMM as one schedule: {where}"
        draw_overlap(arguments.trace / "gemm_chain.png", {"gemm chain": timeline}, title)
        print(f"{arguments.trace}/gemm_chain.png; gemm_chain.json is for https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
