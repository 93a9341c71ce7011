"""Memory traffic of a schedule: the bytes that are read from and written to one rank's memory in a run, by kind of step.

The bytes are computed by the simulator's cost model. A GEMM reads an operand once for each block of tiles that uses it.
A copy or a collective counts its reads and its writes. Stores by peers into this memory are included.
"""

from __future__ import annotations

from weft.schedule import Schedule
from weft.sim.lower import lower
from weft.sim.lowered import Work
from weft.sim.model import Model


def traffic(schedule: Schedule, model: Model) -> dict[str, float]:
    """Return {kind of step: bytes read and written in the memory of rank 0}. The kinds are `weft.sim.uses.What`."""
    program, found = lower(schedule, model, alike=False), dict[str, float]()
    here = program.places.get(("hbm", 0))
    for lane in program.lanes:
        for task in lane.tasks:
            if isinstance(task, Work):
                part = sum(amount for place, amount in program.loads[task.load].share if place == here)
                if part:
                    found[task.what] = found.get(task.what, 0.0) + part * task.work_us * model.hbm_bytes_per_us
    return found
