"""Code that tests of schedules on CPU processes share: problems and data, runs into poisoned memory, a chain of GEMMs.

Tolerance. The error against float64, in the norm of the whole output, is at most twice that of torch's own matmul in
the same dtype, plus an fp32 rounding. The rounding is allowed because torch adds in a different order for different
shapes, and outputs may have few elements. A schedule that accumulates pieces of k in the output (FiCCO's 2D) may round
once more per piece.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from weft import symm
from weft.builders import AllGatherMatmul, AllToAllMatmul, Candidate, NotApplicableError, candidates
from weft.runtime.cpu.schedule import CpuSchedule
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import RANK, Copy, Draft, Schedule, Step
from weft.symm import Communicator

Tensors = dict[str, torch.Tensor]
NAN_BYTE = 0xFF  # a NaN of any floating-point type consists of these bytes


def comm_of(group: dist.ProcessGroup) -> Communicator:
    return symm.communicator(group, "cpu")


def applicable(
    p: AllGatherMatmul | AllToAllMatmul, builders: tuple[str, ...] | None = None
) -> Iterator[tuple[Candidate, Schedule]]:
    for candidate in candidates(p, builders):
        with contextlib.suppress(NotApplicableError):
            yield candidate, candidate.build()


def all_by_dma(schedule: Schedule) -> Schedule:
    def changed(step: Step) -> Step:
        return replace(step, by="dma") if isinstance(step, Copy) else step

    lanes = (replace(lane, steps=tuple(map(changed, lane.steps))) for lane in schedule.lanes)
    return replace(schedule, lanes=tuple(lanes))


def build(p: AllGatherMatmul, builder: str = "shard", **parameters: Any) -> Schedule:
    """Return the first schedule of a builder that has these parameters."""
    for candidate, schedule in applicable(p, (builder,)):
        if parameters.items() <= dict(candidate.parameters).items():
            return schedule
    raise AssertionError(f"{builder} with {parameters} has no schedule for {p}")


def inputs(p: AllGatherMatmul, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the whole x and the weights, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPE[p.dtype]
    x = torch.randn(p.m, p.k, generator=generator).to(dtype)
    return x, [torch.randn(p.k, n, generator=generator).to(dtype) for n in p.n]


def tensors_of(p: AllGatherMatmul, rank: int, seed: int) -> Tensors:
    """Return the tensors that `rank` passes to a run; outputs are NaN."""
    x, ws = inputs(p, seed)
    start = sum(p.rows[:rank])
    outputs = {f"y{i}": torch.full((p.m, n), torch.nan, dtype=x.dtype) for i, n in enumerate(p.n)}
    if p.return_gathered:
        outputs["x"] = torch.full((p.m, p.k), torch.nan, dtype=x.dtype)
    return {"x_shard": x[start : start + p.rows[rank]].clone()} | {f"w{i}": w for i, w in enumerate(ws)} | outputs


def error_of_product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    exact = x.double() @ w.double()
    return float((y.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def assert_right(p: AllGatherMatmul, tensors: Tensors, seed: int, what: object, roundings: int = 0) -> None:
    x, ws = inputs(p, seed)
    for i, w in enumerate(ws):
        error, of_torch = error_of_product(tensors[f"y{i}"], x, w), error_of_product(torch.mm(x, w), x, w)
        bound = 2 * of_torch + torch.finfo(torch.float32).eps / 2 + roundings * torch.finfo(x.dtype).eps / 2
        assert error <= bound, (
            f"{what}: the error of y{i} is {error:.2e}, torch's {of_torch:.2e}, the bound {bound:.2e}"
        )
    if p.return_gathered:
        assert torch.equal(tensors["x"], x), f"{what}: the gathered x differs"


def roundings_of(candidate: Candidate, p: AllGatherMatmul) -> int:
    return (dict(candidate.parameters)["steps"] or p.world_size) if candidate.builder.startswith("ficco_2d") else 0


def poison(executor: CpuSchedule) -> None:
    """Fill this rank's symmetric and scratch memory with NaN. Return when all ranks have done so."""
    comm, program = executor.comm, executor._program
    for (_, rank), place in program.places.known.items():
        if rank == comm.rank:
            place.flat.view(torch.uint8).fill_(NAN_BYTE)
    comm.all_gather(None, what="poisoned")


def run_once(executor: CpuSchedule, tensors: Tensors, last: int) -> None:
    """Run. Rank `last` returns only when the other ranks have finished the run, so that its next actions cannot disturb
    them.
    """
    comm = executor.comm
    done = symm.Signal(group=comm.group)
    executor.run(tensors)
    if comm.rank == last:
        done.wait(comm.world_size - 1)
    else:
        done.add(1, peer=last)


def intercept(executor: CpuSchedule, name: str, before: Callable[[], object]) -> None:
    """Call `before` before the first step of this name in this rank's timeline."""
    bound = next(b for _, steps in executor._program.lanes for b in steps if b.name == name)
    native = bound.call

    def call() -> None:
        before()
        native()

    bound.call = call


def chain(world_size: int, rows: int, k: int, hidden: int, n: int, chunks: int) -> Schedule:
    """Return a schedule of y = silu(x @ w0) @ w1 for the gathered x, in chunks of rows. One lane sends, one computes
    the first GEMM, and one the rest.
    """
    d = Draft("chain", world_size)
    x, w0, w1 = (
        d.buffer(name, r, c, "fp32", "input") for name, r, c in [("x", rows, k), ("w0", k, hidden), ("w1", hidden, n)]
    )
    y = d.buffer("y", world_size * rows, n, "fp32", "output")
    box = d.buffer("box", world_size * rows, k, "fp32", "symmetric")
    h = d.buffer("h", world_size * rows, hidden, "fp32", "scratch")
    arrived, done = d.signals("arrived", world_size * chunks), d.signals("done", world_size * chunks)
    credit = d.signals("credit", 1)
    size = rows // chunks
    first, second, send = d.lane("compute"), d.lane("compute 1"), d.lane("send", "copy")
    send.wait(credit, count=world_size, previous=True)
    for c in range(chunks):
        for distance in range(world_size):
            to, source = (RANK + distance) % world_size, (RANK + world_size - distance) % world_size
            piece = (RANK * rows + c * size, size)
            send.copy(x.part(rows=(c * size, size)), box.part(rows=piece, at=to)).set(arrived, RANK * chunks + c, at=to)
            number, piece = source * chunks + c, (source * rows + c * size, size)
            first.wait(arrived, number).matmul(h.part(rows=piece), box.part(rows=piece), w0.part()).set(done, number)
            second.wait(done, number).compute("silu", h.part(rows=piece), h.part(rows=piece))
            second.matmul(y.part(rows=piece), h.part(rows=piece), w1.part())
    for rank in range(world_size):
        first.set(credit, at=rank)
    return d.schedule()


# --- run on the ranks ---


def all_candidates(group: dist.ProcessGroup, p: AllGatherMatmul, seed: int, runs: int) -> int:
    """Run every candidate several times with new data. Return the number of candidates.

    On CPU `by` makes no difference. So on more than two ranks, only one of the schedules that differ only in `by` is
    run.
    """
    comm, rank, count = comm_of(group), group.rank(), 0
    tried: set[Schedule] = set()
    for candidate, schedule in applicable(p):
        alike = all_by_dma(schedule)
        if alike in tried and p.world_size > 2:
            continue
        tried.add(alike)
        with CpuSchedule(schedule, comm) as executor:
            poison(executor)
            for run in range(seed, seed + runs):
                tensors = tensors_of(p, rank, run)
                executor.run(tensors)
                assert_right(p, tensors, run, f"{candidate.name}, run {run - seed}, {p}", roundings_of(candidate, p))
        count += 1
    return count


def shape_after_shape(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    """Call a new random shape and schedule each time. Ranks are delayed now and then."""
    comm, rank, same = comm_of(group), group.rank(), random.Random(seed)
    late = random.Random(seed + 1 + rank)
    for call in range(calls):
        rows = tuple(same.randint(0, 20) for _ in range(group.size()))
        p = AllGatherMatmul(group.size(), rows, (same.randint(1, 9),), same.randint(1, 30), "fp32", same.random() < 0.5)
        candidate, schedule = same.choice(list(applicable(p)))
        with CpuSchedule(schedule, comm) as executor:
            for run in range(2):
                tensors = tensors_of(p, rank, seed + call + run)
                time.sleep(0.01 * (late.random() < 0.2))
                executor.run(tensors)
                assert_right(p, tensors, seed + call + run, f"{candidate.name}, {p}", roundings_of(candidate, p))


def alternate(group: dist.ProcessGroup, p: AllGatherMatmul, straggler: int) -> None:
    """Use three executors alternately on one communicator. Two have the same schedule. One rank is always late."""
    comm, rank = comm_of(group), group.rank()
    executors = [CpuSchedule(build(p, builder), comm) for builder in ("shard", "serial", "ficco_1d", "shard")]
    for run in range(12):
        if rank == straggler:
            time.sleep(0.02)
        tensors = tensors_of(p, rank, run)
        executors[run % len(executors)].run(tensors)
        assert_right(p, tensors, run, f"run {run}")
    for executor in executors:
        executor.close()


def run_chain(group: dist.ProcessGroup, chunks: int) -> None:
    world, rank = group.size(), group.rank()
    rows, k, hidden, n = 4 * chunks, 12, 20, 7
    with CpuSchedule(chain(world, rows, k, hidden, n, chunks), comm_of(group)) as executor:
        poison(executor)
        for seed in range(5):
            g = torch.Generator().manual_seed(seed)
            x, w0, w1 = (torch.randn(*s, generator=g) for s in [(world * rows, k), (k, hidden), (hidden, n)])
            y = torch.full((world * rows, n), torch.nan)
            executor.run({"x": x[rank * rows : (rank + 1) * rows], "w0": w0, "w1": w1, "y": y})
            silu, exact = torch.nn.functional.silu, torch.mm(x.double(), w0.double())
            exact = silu(exact) @ w1.double()
            of_torch = float((silu(x @ w0) @ w1 - exact).norm())
            assert float((y - exact).norm()) <= 2 * of_torch
