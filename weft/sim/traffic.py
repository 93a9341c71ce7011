"""Memory traffic of a schedule: bytes that one rank's memory reads and writes in a run, by kind of step.

Steps count as the simulator prices them. A GEMM reads its operands as often as its blocks of tiles need them. A copy reads and
writes. A library collective moves the bytes of its algorithm. A peer's stores into this memory count here, under the peer's kind.
"""

from __future__ import annotations

from weft.schedule import Schedule
from weft.sim.lower import Work, lower
from weft.sim.model import Model


def traffic(schedule: Schedule, model: Model) -> dict[str, float]:
    """Return the bytes through the memory of rank 0, by `weft.sim.costs.What` ("matmul", "compute", "peer", "engine")."""
    program, found = lower(schedule, model, alike=False), dict[str, float]()
    here = program.places.get(("hbm", 0))
    for lane in program.lanes:
        for task in lane.tasks:
            if isinstance(task, Work):
                part = sum(amount for place, amount in program.loads[task.load].share if place == here)
                if part:
                    found[task.what] = found.get(task.what, 0.0) + part * task.work_us * model.hbm_bytes_per_us
    return found
