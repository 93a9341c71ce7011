"""The memory that a schedule needs on one rank, and a check that a GPU has as much memory."""

from __future__ import annotations

import numpy as np

from weft.errors import ScheduleError
from weft.schedule import ITEM_BYTES, Schedule
from weft.sim.model import Model
from weft.sim.vectorised import Numbers


def memory_bytes(schedule: Schedule) -> int:
    """Return the total bytes of one rank's buffers, for the rank that needs the most."""
    even = sum(b.rows * b.cols * ITEM_BYTES[b.dtype] for b in schedule.buffers if isinstance(b.rows, int))
    if all(isinstance(b.rows, int) for b in schedule.buffers):
        return even
    numbers = Numbers(schedule)
    sizes = (numbers.vector(b.rows, ()) * b.cols * ITEM_BYTES[b.dtype] for b in schedule.buffers)
    return int(np.max(sum(sizes)))


def too_large(schedule: Schedule, model: Model) -> str:
    """Return the reason why `schedule` does not fit in a GPU's memory; "" if it fits."""
    needed = memory_bytes(schedule)
    if needed <= model.memory_bytes:
        return ""
    return (
        f"it needs {needed / 1000000000.0:,.1f} GB on a rank, but {model.name} has "
        f"{model.memory_bytes / 1000000000.0:,.0f} GB"
    )


def require_memory(schedule: Schedule, model: Model) -> None:
    """Raise `ScheduleError` if `schedule` does not fit in a GPU's memory."""
    if why := too_large(schedule, model):
        raise ScheduleError(f"schedule {schedule.name}: {why}: use more ranks or smaller sizes")
