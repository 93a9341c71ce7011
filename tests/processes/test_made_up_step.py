"""A new step kind is one class, and an entry in each executor. All other code uses the properties of the class.

This file defines `Scale`, out = factor * x. It is stored, printed, verified, ordered, simulated, and run on CPU
processes. GPUs have no entry for it, and refuse it by name. Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from support.made_up import require_runnable_on_gpus

import weft.runtime
from weft.errors import ScheduleError
from weft.launch import Pool
from weft.runtime.cpu.places import Places
from weft.runtime.cpu.schedule import CpuSchedule
from weft.runtime.cpu.steps import bind
from weft.schedule import RANK, Draft, Index, Region, Schedule, Step
from weft.schedule.regions import Access, Declared, read, written
from weft.schedule.steps import base
from weft.schedule.text import from_json, to_json
from weft.schedule.verify import verify
from weft.schedule.verify.issue_order import issue_order
from weft.sim import NULL, simulate
from weft.symm import communicator


@dataclass(frozen=True, slots=True)
class Scale(Step):
    kind: ClassVar[str] = "scale"
    out: Region
    x: Region
    factor: Index

    def accesses(self) -> tuple[Access, ...]:
        return read(self.x), written(self.out)

    def faults(self, where: Declared) -> Iterator[str]:
        if (self.x.rows, self.x.cols) != (self.out.rows, self.out.cols):
            yield f"[{self.x.rows}, {self.x.cols}] does not fit into [{self.out.rows}, {self.out.cols}]"


@bind.register
def scale(step: Scale, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    return partial(torch.mul, places.view(step.x), step.factor, out=places.view(step.out))


def doubled_by_a_peer(world: int, *, waits: bool = True, rows: int = 4) -> Schedule:
    """Return a schedule in which each rank scales its x into the next rank's box. The next rank adds its own x."""
    d = Draft("doubled by a peer", world)
    x, y = d.buffer("x", 4, 6, "fp32", "input"), d.buffer("y", 4, 6, "fp32", "output")
    box = d.buffer("box", 4, 6, "fp32", "symmetric")
    there, credit = d.signals("there", 1), d.signals("credit", 1)
    lane, following = d.lane("compute"), (RANK + 1) % world
    if waits:
        lane.wait(credit, previous=True)
    lane.then(Scale(box.part(rows=(0, rows), at=following), x.part(), RANK + 2)).set(there, at=following)
    lane.wait(there).compute("add", y.part(), x.part(), box.part()).set(credit, at=(RANK - 1) % world)
    return d.schedule()


def run(group: dist.ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    made = CpuSchedule(doubled_by_a_peer(world), communicator(group, "cpu"))
    for call in range(5):
        xs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * call + r)) for r in range(world)]
        y = torch.full((4, 6), float("nan"))
        made.run({"x": xs[rank], "y": y})
        before = (rank - 1) % world
        assert torch.equal(y, xs[rank] + xs[before] * (before + 2))
    made.close()


def test_the_base_class_names_every_place_that_wants_an_entry() -> None:
    runtime, found = Path(weft.runtime.__file__).parent, []
    for file in runtime.rglob("*.py"):
        module = ".".join(("weft.runtime", *file.relative_to(runtime).with_suffix("").parts))
        entries = re.findall(r"^@singledispatch\ndef (\w+)\(step: Step\b", file.read_text(), re.MULTILINE)
        found += [f"`{module}.{name}`" for name in entries]
    assert len(found) >= 3
    assert [name for name in found if name not in (base.__doc__ or "")] == []


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_runs_on_processes(pool: Pool, world: int) -> None:
    pool.run(run, ranks=world)


def test_it_is_kept_printed_ordered_and_simulated() -> None:
    schedule = doubled_by_a_peer(2)
    verify(schedule)
    assert from_json(to_json(schedule)) == schedule
    assert "scale   " in schedule.table()
    assert "box@1[:, :]" in schedule.table(0) or "box@1" in schedule.table(0)
    assert [str(step).split()[0] for _, step in issue_order(schedule)[0]] == [
        "wait",
        "scale",
        "set",
        "wait",
        "add",
        "set",
    ]
    spans = [span.name for span in simulate(schedule, NULL).timeline if span.rank == 0]
    assert "scale box@1" in spans


def test_its_faults_are_found() -> None:
    with pytest.raises(ScheduleError, match=r"race on box@[01]: "):
        verify(doubled_by_a_peer(2, waits=False))
    with pytest.raises(ScheduleError, match=r"\[4, 6\] does not fit into \[3, 6\]"):
        verify(doubled_by_a_peer(2, rows=3))


def test_an_executor_without_an_entry_refuses_it_by_name() -> None:
    with pytest.raises(ScheduleError, match="the GPU executor runs no steps of kind 'scale': it runs copy, compute"):
        require_runnable_on_gpus(doubled_by_a_peer(2), 0)
