"""Builders that use output maps give the same schedules, step for step, as earlier builders that were written by hand.

`schedules_by_hand.json` has a digest for each number of ranks and each candidate. It covers the evaluated lanes of
every rank, tile by tile, for several problems. Scratch and symmetric buffers, and signals, get neutral names in the
order in which steps first use them. To rewrite the file: `WEFT_WRITE_SCHEDULES=1 pytest
tests/unit/test_schedule_from_maps.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.slow import slow

from weft.builders import (
    MatmulAllReduce,
    MatmulReduceScatter,
    NotApplicableError,
    ScaledMatmulReduceScatter,
    candidates,
)
from weft.schedule import Schedule, Step, Tiles
from weft.schedule.printing import describe

REFERENCE = Path(__file__).parent / "schedules_by_hand.json"
FROM_MAPS = {
    MatmulReduceScatter: ("direct", "ring", "tracked"),
    ScaledMatmulReduceScatter: ("direct", "ring", "tracked"),
    MatmulAllReduce: ("two_shot", "tracked"),
}


def problems(world: int) -> Iterator[MatmulReduceScatter | MatmulAllReduce]:
    for m, n in ((1200 * world, 640), (8 * world, 32), (8 * world + 1, 32), (world, 16)):
        if m % world == 0:
            yield MatmulReduceScatter(world, m, n, 16, "bf16")
            yield ScaledMatmulReduceScatter(world, m, n, 16, "bf16", "row", m > 1000, False)
        yield MatmulAllReduce(world, m, n, 16, "fp32")
    yield ScaledMatmulReduceScatter(world, 16 * world, 32, 16, "bf16", "tensor", True, True)
    yield MatmulAllReduce(world, 16 * world, 32, 16, "bf16", bias=True, residual=True, eps=1e-6)


def lines(schedule: Schedule) -> Iterator[str]:
    """Yield every evaluated step of every rank as text, with one line per tile. The schedule's own buffers and signals
    get neutral names.
    """
    roles = {buffer.name: buffer.role for buffer in schedule.buffers if buffer.role in ("scratch", "symmetric")}
    own = roles | dict.fromkeys((signals.name for signals in schedule.signals), "signals")
    neutral: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        return neutral.setdefault(match[0], f"{own[match[0]]} {len(neutral)}")

    def line(step: Step, rank: int) -> str:
        return re.sub(rf"\b({'|'.join(own)})\b", named, describe(step, rank))

    for rank in range(schedule.world_size):
        for lane in schedule.of_rank(rank):
            yield f"rank {rank}, {lane.name} ({lane.resource})"
            for step in lane.steps:
                if isinstance(step, Tiles):
                    yield from (line(inner, rank) for t in range(int(step.extent)) for inner in step.tile(t))
                else:
                    yield line(step, rank)


def digests(world: int) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for problem in problems(world):
        for candidate in candidates(problem, FROM_MAPS[type(problem)]):
            of = found.setdefault(f"{type(problem).__name__} {candidate.name}", [])
            try:
                of += lines(candidate.build())
            except NotApplicableError as error:
                of.append(type(error).__name__)
    return {name: hashlib.sha256("\n".join(of).encode()).hexdigest()[:16] for name, of in found.items()}


@pytest.mark.parametrize("world", [2, 3, slow(4)])
def test_schedules_are_those_that_were_written_by_hand(world: int) -> None:
    reference = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    found = digests(world)
    if os.environ.get("WEFT_WRITE_SCHEDULES"):
        REFERENCE.write_text(json.dumps(reference | {str(world): found}, indent=1) + "\n")
        return
    different = [name for name, digest in reference[str(world)].items() if found[name] != digest]
    assert found.keys() == reference[str(world)].keys()
    assert different == []
