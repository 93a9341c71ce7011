"""A new tile kernel is one class, and an entry in each executor that should not run its tiles.

This file defines `Rotated`, which copies the rows of x to y, each some rows further down. It is stored, printed,
verified and simulated by its tiles, and CPU processes run it by its entry. GPUs have no entry, and refuse it by name.
`Elsewhere` has no entry at all: CPU processes run its tiles one after the other. Both refuse `RotatedUp`.
Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from support.made_up import require_runnable_on_gpus
from support.on_ranks import assert_errors, error_of

from weft.errors import ScheduleError
from weft.launch import Pool
from weft.runtime.cpu.places import Places
from weft.runtime.cpu.schedule import CpuSchedule
from weft.runtime.cpu.steps import run_tiles
from weft.schedule import RANK, Copy, Draft, Expr, Index, Schedule, Tiles
from weft.schedule.kernels import TileKernel
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify
from weft.sim import NULL, simulate
from weft.symm import communicator

ROWS = 6


@dataclass(frozen=True, slots=True)
class Rotated(TileKernel):
    kind: ClassVar[str] = "rotated"
    x: str
    y: str
    by: Index


@dataclass(frozen=True, slots=True)
class Elsewhere(TileKernel):
    kind: ClassVar[str] = "elsewhere"


@dataclass(frozen=True, slots=True)
class RotatedUp(Rotated):
    """A kernel whose base class has an entry. The entry would rotate down."""

    kind: ClassVar[str] = "rotated up"


calls: list[int] = []  # the numbers of rows by which the kernel rotated on this rank


@run_tiles.register
def rotated(kernel: Rotated, step: Tiles, places: Places, known: Mapping[str, object]) -> None:
    (copy,) = step.body
    assert isinstance(copy, Copy)
    rank, by = places.rank, kernel.by
    assert isinstance(by, int)
    x, y = (places.view(replace(part, row=0, rows=ROWS, at=rank)) for part in (copy.src, copy.dst))
    y.copy_(torch.roll(x, by, 0))
    calls.append(by)


def turned(world: int, kernel: TileKernel | None = None, *, rows: int = ROWS) -> Schedule:
    """Return a schedule in which rank r copies its rows r + 1 rows further down."""
    d = Draft("turned", world)
    x, y = d.buffer("x", ROWS, 3, "fp32", "input"), d.buffer("y", ROWS, 3, "fp32", "output")
    t, by = Expr("t"), RANK + 1
    copy = Copy(x.part(rows=(t, 1)), y.part(rows=((t + by) % rows, 1)), "kernel")
    d.lane("compute").tiles(kernel or Rotated("x", "y", by), "t", ROWS, copy)
    return d.schedule()


def run(group: dist.ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    for kernel in (None, Elsewhere()):
        made = CpuSchedule(turned(world, kernel), communicator(group, "cpu"))
        calls.clear()
        for call in range(3):
            x, y = torch.full((ROWS, 3), float(call)) + torch.arange(ROWS)[:, None], torch.full((ROWS, 3), torch.nan)
            made.run({"x": x, "y": y})
            assert torch.equal(y, torch.roll(x, rank + 1, 0))
        assert calls == ([rank + 1] * 3 if kernel is None else [])
        made.close()


@pytest.mark.parametrize("world", [1, 3])
def test_it_runs_on_processes(pool: Pool, world: int) -> None:
    pool.run(run, ranks=world)


def test_it_is_kept_printed_verified_and_simulated() -> None:
    schedule = turned(2)
    verify(schedule)
    assert from_json(to_json(schedule)) == schedule
    assert "tiles of rotated, t in 0 .. 6 - 1" in schedule.table()
    names = [(span.rank, span.name) for span in simulate(schedule, NULL).timeline]
    assert sorted(names) == [(0, "rotated"), (1, "rotated")]
    (step,) = schedule.of_rank(1)[0].steps
    assert isinstance(step, Tiles)
    assert step.kernel == Rotated("x", "y", 2)


def test_faults_of_its_tiles_are_found() -> None:
    with pytest.raises(
        ScheduleError, match=r"race on y@0: the first step writes and the second writes the same elements"
    ):
        verify(turned(2, rows=ROWS - 1))


def test_an_executor_without_an_entry_refuses_it_by_name() -> None:
    with pytest.raises(ScheduleError, match=r"the GPU executor has no kernel rotated: it has .*grouped_matmul"):
        require_runnable_on_gpus(turned(2), 1)


def derived(group: dist.ProcessGroup) -> tuple[str, str]:
    comm = communicator(group, "cpu")
    return error_of(lambda: CpuSchedule(turned(group.size(), RotatedUp("x", "y", RANK + 1)), comm))


def test_an_entry_of_a_base_class_is_not_used(pool: Pool) -> None:
    assert_errors(
        pool.run(derived, ranks=2),
        "ScheduleError",
        "only the base class rotated of kernel rotated up has an implementation on CPUs: register",
    )
    with pytest.raises(ScheduleError, match=r"the GPU executor has no kernel rotated up"):
        require_runnable_on_gpus(turned(2, RotatedUp("x", "y", RANK + 1)), 1)


def test_a_kernel_is_no_string() -> None:
    with pytest.raises(ValueError, match=r"tiles of 'rotated': the kernel must be a TileKernel"):
        turned(2, "rotated")  # type: ignore[arg-type]


def test_a_text_with_an_unknown_kernel_is_refused() -> None:
    text = to_json(turned(2))
    with pytest.raises(ValueError, match=r"steps\[0\]\.kernel: 'turned round' is not known; use one of .*rotated"):
        from_json(text.replace('"kernel": "rotated"', '"kernel": "turned round"'))
    with pytest.raises(ValueError, match=r"steps\[0\]\.kernel: Rotated has the fields x, y: it must also have by"):
        from_json(text.replace('"by": "rank + 1"', '"x": "x"'))
