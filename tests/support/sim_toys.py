"""Models and schedules for tests of the simulator, with numbers that are easy to compute by hand."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from weft.builders import NotApplicableError, Problem, candidates
from weft.hw import load_machine
from weft.hw.topology import Wiring, mesh, switch
from weft.schedule import ITEM_BYTES, RANK, Collective, Copy, Draft, Schedule
from weft.sim import NULL, Model, model_of

TOY = replace(
    NULL, name="toy", hbm_bytes_per_us=1e6, wiring=Wiring(mesh, (100.0,)), copy_engines=8, copy_bytes_per_us=100.0,
    copy_latency_us=7.0, put_bytes_per_us=((1, 50.0), (2, 100.0)), compute_units=4, kernel_copy_units=1,
)  # fmt: skip
"""A mesh with links of 100 bytes/us. Memory is never a bottleneck, and kernels take no time."""

SWITCH = replace(TOY, wiring=Wiring(switch, (100.0,)))


def gpu(name: str, world: int) -> Model:
    return model_of(load_machine(name), world)


def applicable(p: Problem) -> dict[str, Schedule]:
    """Return {name: schedule} of all candidates that support `p`."""
    found = {}
    for candidate in candidates(p):
        with contextlib.suppress(NotApplicableError):
            found[candidate.name] = candidate.build()
    return found


def puts(world: int, *targets: int, rows: int = 10, by: str = "dma") -> Schedule:
    """Return a schedule in which each rank r puts `rows` rows of 100 bytes to rank r + distance, concurrently for each
    distance in `targets`.
    """
    d = Draft("puts", world)
    x = d.buffer("x", rows, 25, "fp32", "input")
    for i, distance in enumerate(targets):
        box = d.buffer(f"box{i}", rows, 25, "fp32", "symmetric")
        d.lane(f"lane {i}", "copy").copy(x.part(), box.part(at=(RANK + distance) % world), by)  # type: ignore[arg-type]
    return d.schedule()


def bytes_leaving(schedule: Schedule, rank: int) -> int:
    """Return the bytes that a rank sends in one run, summed over its steps."""
    total = 0
    for lane in schedule.of_rank(rank):
        for step in lane.steps:
            if isinstance(step, Copy) and step.src.at == rank != step.dst.at:
                total += step.src.rows * step.src.cols * ITEM_BYTES[schedule.buffer(step.src.buffer).dtype]
            if isinstance(step, Collective):
                item = ITEM_BYTES[schedule.buffer(step.src.buffer).dtype]
                total += step.src.rows * step.src.cols * item * (schedule.world_size - 1)
    return total
