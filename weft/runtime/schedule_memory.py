"""Where a schedule's own memory lies: symmetric buffers and counters, at the same offsets on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from weft.errors import DisagreementError
from weft.schedule import Schedule
from weft.schedule.steps import ITEM_BYTES
from weft.schedule.text import to_json
from weft.symm import Domain

TORCH_DTYPE = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn,
    "int64": torch.int64, "int32": torch.int32,
}  # fmt: skip
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets: of each symmetric buffer in one region, and the number of each signal array's first counter."""

    buffers: dict[str, int]
    buffer_bytes: int
    counters: dict[str, int]
    n_counters: int


def layout_of(schedule: Schedule) -> Layout:
    buffers, end = {}, 0
    for buffer in schedule.buffers:
        if buffer.role == "symmetric":
            assert isinstance(buffer.rows, int)
            buffers[buffer.name] = end
            end += -(-buffer.rows * buffer.cols * ITEM_BYTES[buffer.dtype] // _ALIGNMENT) * _ALIGNMENT
    counters, count = {}, 0
    for signals in schedule.signals:
        counters[signals.name] = count
        count += signals.count
    return Layout(buffers, end, counters, count)


def agree_on_schedule(schedule: Schedule, domain: Domain) -> None:
    """Collective, before anything is allocated: `DisagreementError` on every rank if the ranks' schedules differ."""
    mine = (schedule.name, hashlib.sha256(to_json(schedule).encode()).hexdigest())
    for rank, theirs in enumerate(domain.all_gather(mine, what="schedules to run")):
        if theirs != mine:
            raise DisagreementError(
                f"rank {domain.rank} runs schedule {mine[0]} ({mine[1][:8]}) and rank {rank} runs {theirs[0]} ({theirs[1][:8]}): "
                f"call with the same shapes, dtypes and schedule on every rank"
            )
