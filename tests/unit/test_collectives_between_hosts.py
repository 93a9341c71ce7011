"""Schedules of collectives on GPUs of several hosts, without GPUs: the choice, the communicator of weft's own, its deadline,
and the warm-up that must not send.

`tests/multigpu/test_gpu_overlap_between_hosts.py` runs them on GPUs.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="Triton is not installed here: it compiles the kernels that programs launch")

import modelled_gpus
from modelled_gpus import SymmetricMemory, compiled, model
from support.sim_toys import applicable

from weft.builders import AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter, Problem, named
from weft.errors import DeadlineError
from weft.operator import between_hosts
from weft.runtime import own_nccl
from weft.runtime.cuda.calls import _collective
from weft.runtime.cuda.compile import COLLECTS_AT, compile_streams
from weft.runtime.cuda.memory import ScheduleMemory
from weft.runtime.cuda.schedule import CudaSchedule
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import Collective
from weft.schedule.steps import of_kind
from weft.symm.cuda import CudaRegion, allocate_own

PROBLEMS: list[Problem] = [
    AllGatherMatmul(4, (16,) * 4, (24,), 16, "bf16"),
    MatmulReduceScatter(4, 64, 24, 16, "bf16"),
    MatmulAllReduce(4, 64, 24, 16, "bf16", bias=True, eps=1e-6),
]
each_problem = pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p.name)


class Comm(SimpleNamespace):
    """A communicator of GPU rank 1 of 4, two on each host."""

    __hash__ = object.__hash__

    def __init__(self, device: str = "cuda") -> None:
        super().__init__(rank=1, world_size=4, device=torch.device(device), hosts=("a", "a", "b", "b"))
        self.mapped, self.all_mapped, self.closed = (True, True, False, False), False, False
        self.callbacks: list[Any] = []
        self.poisoned: list[str] = []
        self._holders: set[Any] = set()

    def on_failure(self, callback: Any) -> Any:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    @property
    def failed(self) -> bool:
        return bool(self.poisoned)

    def poison(self, text: str) -> None:
        self.poisoned.append(text)


# -- the choice


def chosen(
    p: Problem, pinned: str | None, times: dict[str, float], by_nccl: bool = True
) -> tuple[str, list[str], list[str]]:
    """Return the chosen schedule, the schedules that were timed, and the warnings.

    times: {end of a schedule's name: time in us}.
    """
    asked: list[str] = []
    warnings: list[str] = []

    def measured(p: Problem, schedules: dict[str, Any], *_: Any) -> dict[str, float]:
        asked.extend(schedules)
        return {name: us for name in schedules for end, us in times.items() if name.endswith(end)}

    with (
        mock.patch.object(between_hosts.measure, "measured", measured),
        mock.patch.object(between_hosts, "know_links"),
        mock.patch.object(between_hosts.caller, "warn_once", warnings.append),
        mock.patch.object(between_hosts.env, "quiet", return_value=False),
        mock.patch.object(between_hosts, "uses_nccl", return_value=by_nccl),
    ):
        name = between_hosts.choose_between_hosts(
            p, Comm(), {}, pinned, deadline_s=None, serial=None, built=lambda candidate: candidate.build()  # type: ignore[arg-type]
        )  # fmt: skip
    return name, asked, warnings


@each_problem
def test_schedules_of_collectives_are_timed_also_if_there_are_rails(p: Problem) -> None:
    names = list(p.between_hosts(0))
    assert len(names) == 3
    times = {"serial": 5000.0, "1]": 4900.0, "2]": 3000.0, "4]": 3500.0}
    assert chosen(p, None, times) == (names[1], ["serial", *names], [])
    assert chosen(p, None, times | {"2]": 4400.0, "4]": 4400.0}) == ("", ["serial", *names], [])
    assert chosen(replace(p, k=0), None, times) == ("", [], [])
    assert chosen(p, None, times, by_nccl=False) == ("", [], [])


@each_problem
def test_only_schedules_of_collectives_can_be_pinned(p: Problem) -> None:
    """A rank addresses no memory of ranks on its own host either."""
    kept = set()
    for name in applicable(p):
        found, _, warnings = chosen(p, name, {})
        if found:
            kept.add(name)
            assert (found, warnings) == (name, [])
        elif name != "serial":
            assert "serial runs instead" in warnings[0]
            assert "is not mapped on rank 0" in warnings[0]
    assert kept == {name for name in applicable(p) if "collective" in name}
    assert len(kept) >= 3
    found, _, warnings = chosen(p, min(kept), {}, by_nccl=False)
    assert found == ""
    assert warnings[0].endswith("on GPUs, schedules between hosts need a group that uses NCCL")


# -- compilation


@each_problem
def test_a_run_is_marked_from_its_begin_to_its_end(monkeypatch: pytest.MonkeyPatch, p: Problem) -> None:
    model(monkeypatch)
    schedule = named(p, p.between_hosts(0)[1]).build()
    region = SymmetricMemory(4, 0)
    context, items = compiled(schedule, 1, region)
    assert not any(offset == COLLECTS_AT for _, offset, _ in written(items))  # on one host
    items = compile_streams(replace(context, own_group=object()), False)  # type: ignore[arg-type]
    begun = items.program.operations[0][2][0][1]
    name, stream, parts = items.program.operations[0]
    assert (name, stream, parts) == ("signal", 0, [(False, begun, 0, 1), (False, begun, COLLECTS_AT, 1)])
    assert items.bases[begun] == context.begun_word.data_ptr()
    assert items.program.operations[-1] == ("signal", 0, [(False, begun, COLLECTS_AT, 0)])
    joined = [one for one in items.program.operations[:-1] if one[0] == "wait_event" and one[1] == 0]
    assert joined[-1] == items.program.operations[-2]  # the mark ends after the library's lane


def written(items: Any) -> list[tuple[int, int, int]]:
    return [part[1:] for name, _, *what in items.program.operations if name == "signal" for part in what[0]]


def test_collectives_use_the_group_of_wefts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model(monkeypatch)
    schedule = named(PROBLEMS[1], "collective[chunks=2]").build()
    context, _ = compiled(schedule, 1, SymmetricMemory(4, 0))
    (step, *_) = (step for _, step in context.order if isinstance(step, Collective))
    used = []
    monkeypatch.setattr("weft.runtime.cuda.calls.reduce_scatter_single", lambda out, x, group: used.append(group))
    for own in (None, "weft's"):
        given = replace(context, own_group=own, comm=SimpleNamespace(group="the user's", world_size=4))  # type: ignore[arg-type]
        regions = SimpleNamespace(view=lambda region: lambda t: None, place=lambda region: None)
        _collective(step, regions, given)({})  # type: ignore[arg-type]
    assert used == ["the user's", "weft's"]


@each_problem
def test_only_the_first_warm_up_sends(monkeypatch: pytest.MonkeyPatch, p: Problem) -> None:
    """Later warm-ups are for tensors with other strides, which may come on one rank only."""
    model(monkeypatch)
    for what in ("current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, what, lambda *_: contextlib.nullcontext())
    sent = []
    monkeypatch.setattr(modelled_gpus.Together, "__call__", lambda self, tensors: sent.append(self.nth))
    native = modelled_gpus._collective_call
    monkeypatch.setattr("weft.runtime.cuda.compile.collective_call", lambda *given: native(*given)._replace(meets=True))
    schedule = named(p, p.between_hosts(0)[1]).build()
    context, items = compiled(schedule, 1, SymmetricMemory(4, 0))
    tensors = {b.name: torch.ones(int(b.rows), b.cols, dtype=TORCH_DTYPE[b.dtype]) for b in context.given}
    items.warm_up(tensors, first=True)
    count = len(of_kind([step for _, step in context.order], Collective))
    assert len(sent) == count > 0
    items.warm_up(tensors, first=False)
    assert len(sent) == count


# -- memory and deadlines


def test_memory_of_this_rank_only() -> None:
    region = allocate_own(Comm("cpu"), 100)  # type: ignore[arg-type]
    assert isinstance(region, CudaRegion)
    mine = region.tensor(1, (5, 5), torch.float32)
    assert mine.eq(0).all()
    assert region.address(1) == mine.data_ptr()
    for rank in (0, 2, 3):
        assert region.address(rank) == 0
    region.give_back()


def test_a_run_whose_collectives_do_not_end_makes_the_group_fail() -> None:
    memory, comm = ScheduleMemory.__new__(ScheduleMemory), Comm()
    memory.comm, memory.rank, memory.name, memory.own_group = comm, 1, "s", object()  # type: ignore[assignment]
    memory.run, memory._begun = SimpleNamespace(failure=None), torch.zeros(3, dtype=torch.int64).numpy()  # type: ignore[assignment]
    memory.standing_still(2.0)
    assert not comm.poisoned
    memory._begun[2] = 1
    memory.standing_still(2.0)
    assert isinstance(memory.run.failure, DeadlineError)
    assert comm.poisoned == ["rank 1 waited 2 s for collectives of schedule s. Check that all ranks made the same call"]


@pytest.mark.parametrize(("failed", "wanted"), [(True, DeadlineError), (False, dist.DistBackendError)])
def test_a_collective_on_the_aborted_communicator_raises_the_groups_error(
    monkeypatch: pytest.MonkeyPatch, failed: bool, wanted: type[Exception]
) -> None:
    """weft may abort its communicator while a rank enqueues collectives."""
    executor, comm = CudaSchedule.__new__(CudaSchedule), Comm()
    executor.comm, executor.schedule = comm, named(PROBLEMS[1], "collective[chunks=2]").build()  # type: ignore[assignment]
    failures: list[Exception] = []

    def issue(*_: Any) -> None:
        failures.extend([DeadlineError("late")] * failed)
        raise dist.DistBackendError("aborted")

    def check() -> None:
        if failures:
            raise failures[0]

    executor.context = SimpleNamespace(check=check)  # type: ignore[assignment]
    executor.memory, executor._captured, executor._usual_deadline_s = mock.Mock(), False, 1.0
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(executor, "_program", lambda *_: SimpleNamespace(issue=issue))
    with pytest.raises(wanted):
        executor.run({}, like_before=True)
    assert bool(comm.poisoned) != failed


class Nccl:
    """A replacement for ProcessGroupNCCL."""

    def __init__(self, *_: Any) -> None:
        self.called: list[str] = []
        self.ends = threading.Event()

    def abort(self) -> None:
        self.called.append("abort")
        self.ends.set()

    def shutdown(self) -> None:
        self.called.append("shutdown")
        self.ends.wait(5.0)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> tuple[Comm, Nccl, Any]:
    nccl, comm = Nccl(), Comm()
    monkeypatch.setattr(own_nccl, "_connect", lambda _: (object(), nccl))
    monkeypatch.setattr(own_nccl, "_CLOSE_S", 0.1)
    return comm, nccl, own_nccl._OwnNccl(comm)  # type: ignore[arg-type]


def test_wefts_communicator_is_aborted_if_the_group_fails(connected: tuple[Comm, Nccl, Any]) -> None:
    comm, nccl, own = connected
    assert own in comm._holders
    (callback,) = comm.callbacks
    callback()
    own.close()
    own.close()
    assert nccl.called == ["abort"]


@pytest.mark.parametrize("blocked", [False, True])
def test_wefts_communicator_ends_with_its_group(connected: tuple[Comm, Nccl, Any], blocked: bool) -> None:
    """A collective that does not end does not delay the end for long."""
    comm, nccl, own = connected
    if not blocked:
        nccl.ends.set()
    own.close()
    own.close()
    assert nccl.called == ["shutdown"]
    assert not comm.callbacks
    nccl.ends.set()
