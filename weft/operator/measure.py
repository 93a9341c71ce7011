"""Measurements for the choice of a schedule: whole schedules, and the GEMMs that the planner uses. All ranks must make
these calls together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from statistics import median

import torch

from weft import plan
from weft.builders import Candidate, Problem, named
from weft.operator import this_machine
from weft.plan import gemms, links
from weft.plan.predict import library_gemms
from weft.runtime.executors import Tensors, executor
from weft.schedule import Schedule
from weft.sim import Model
from weft.sim.model import MatmulShape
from weft.symm import Communicator
from weft.symm.device import synchronize

_REPETITIONS = 5
_IN_A_ROW_US, _MOST_IN_A_ROW = 3000.0, 20  # time 3 ms of queued calls, but at least 3 and at most 20 calls
_CYCLES_PER_US = 2000  # no current GPU has a higher clock rate


def _gpu_timer(p: Problem, tensors: Tensors) -> gemms.Timer:
    from weft.operator.gpu_gemms import GemmTimer

    return GemmTimer(p, tensors)


def _prepare_gpu(device: torch.device) -> None:
    from weft.runtime.cuda.move import prepare

    prepare(device)


_PREPARES: dict[str, Callable[[torch.device], None]] = {"cuda": _prepare_gpu}
"""Functions that compile kernels which schedules for other sizes will need, by type of device."""
TIMERS: dict[str, Callable[[Problem, Tensors], gemms.Timer]] = {"cuda": _gpu_timer}
"""Functions that make a GEMM timer, by type of device."""


def measure_gemms(p: Problem, comm: Communicator, tensors: Tensors, deadline_s: float | None) -> None:
    """Time the GEMMs of the candidate schedules that this process has not timed yet, in two rounds (see
    `weft.plan.gemms`). All ranks must make this call.
    """
    if comm.device.type not in TIMERS or not library_gemms(p):
        return
    left_us, timer = gemms.BUDGET_US, cache(partial(TIMERS[comm.device.type], p, tensors))
    for _ in range(2):
        left_us = _learn(p, comm, partial(gemms.wanted, p), timer, left_us, deadline_s)


def measure_ladder(
    p: Problem, comm: Communicator, tensors: Tensors, deadline_s: float | None, timed: dict[Hashable, float]
) -> None:
    """Time the call's GEMMs with all rows, half the rows, a quarter and so on (`gemms.ladder`), so that the planner can
    interpolate. All ranks must make this call.

    Do nothing if the same weights have been timed with at least half as many rows.

    timed: {problem family: largest timed size}, which this function updates. Problems of a family differ only in size.
    """
    family, size = p.family
    if comm.device.type not in TIMERS or not 0 < size > 2 * timed.get(family, 0.0) or not gemms.ladder(p):
        return
    timed[family] = size
    _PREPARES.get(comm.device.type, lambda device: None)(comm.device)
    timer = partial(TIMERS[comm.device.type], p, tensors)
    _learn(p, comm, lambda model: gemms.ladder(p), timer, gemms.BUDGET_US, deadline_s)


def _learn(
    p: Problem, comm: Communicator, wanted: Callable[[Model], Sequence[MatmulShape]], timer: Callable[[], gemms.Timer],
    budget_us: float, deadline_s: float | None,
) -> float:  # fmt: skip
    """Time the GEMMs that `wanted` returns, for at most `budget_us` microseconds. Store the times of the slowest rank for the
    planner. Return the rest of the budget in microseconds. All ranks must make this call.

    wanted: a function that returns the shapes of the GEMMs to time, given this machine's performance model.
    timer: a function that makes the timer of GEMMs. It is called only if there are GEMMs to time.
    """
    model, name = this_machine.machine_model(comm.device, p.world_size), this_machine.device_name(comm.device)
    mine: dict[MatmulShape, float] = {}
    if model is not None:
        shapes, known = wanted(model), gemms.measured_here(name)
        mine = {shape: known[shape] for shape in shapes if shape in known}
        if missing := [shape for shape in shapes if shape not in known]:
            # A rank without free memory contributes no times, and then no rank uses times. The call itself may need
            # less memory.
            with contextlib.suppress(torch.OutOfMemoryError):
                found, budget_us = gemms.measure(missing, model, timer(), budget_us)
                mine |= found
    gemms.learn(name, comm.all_gather(mine, what=f"GEMMs of {p}", deadline_s=deadline_s))
    return budget_us


def shared_name(p: Problem, candidate: Candidate) -> str:
    """Return a name for the executors of a candidate schedule. Executors with the same name share memory, for all problems
    that differ only in size.

    Return "" for a schedule of the user's own (`weft.builders.builder`), whose executors do not share memory.
    """
    return "" if plan.from_outside(p, candidate) else candidate.name


def measured(
    p: Problem,
    schedules: dict[str, Schedule],
    comm: Communicator,
    tensors: Tensors,
    deadline_s: float | None,
    serial: Callable[[], object] | None,
    mode: plan.Mode,
    rounds: int,
    *,
    anew: bool = False,
) -> dict[str, float]:
    """Return {name of a schedule: the slowest rank's time in microseconds}, measured now or cached on disk
    (`weft.plan.autotune`). All ranks must make this call.

    Times of a group on several hosts are cached under the names of the hosts, separately from times within one host.

    serial: a function that runs the operator unfused, to be timed as "serial". None: an executor runs the serial
        schedule.
    mode: how a schedule is timed, as for `time_us`.
    rounds: how often each schedule is timed.
    anew: True to measure now, without reading or storing cached times.
    """

    def run(candidate: Candidate) -> float:
        if serial is not None and candidate.name == "serial":
            return time_us(serial, comm, mode, deadline_s)
        # On a GPU only one of these executors exists at a time, so it need not share memory.
        name = shared_name(p, candidate) if comm.device.type == "cpu" else ""
        made = executor(schedules[candidate.name], comm, p, name)
        try:
            return time_us(lambda: made.run(tensors, deadline_s=deadline_s), comm, mode, deadline_s)
        finally:
            made.close()

    def agree(mine: list[float]) -> list[float]:
        times = comm.all_gather(mine, what=f"times of schedules for {p}", deadline_s=deadline_s)
        return [max(of_one) for of_one in zip(*times, strict=True)]

    found = [named(p, name) for name in schedules]
    if anew:
        times = [agree([run(candidate) for candidate in found]) for _ in range(rounds)]
        return dict(zip(schedules, map(median, zip(*times, strict=True)), strict=True))
    machine = this_machine.device_name(comm.device)
    if not comm.all_mapped:
        machine = f"{machine}, {links.name_of(comm.hosts)}"
    return plan.autotune(p, found, run, agree, machine=machine, mode=mode, rounds=rounds)


def time_us(call: Callable[[], object], comm: Communicator, mode: plan.Mode, deadline_s: float | None) -> float:
    """Time a call. Return its time on this rank, in microseconds. All ranks must make this call.

    Mode "queued" returns the mean of calls in a row. Other modes return the fastest of single calls.
    """
    return _queued_us(call, comm, deadline_s) if mode == "queued" else _time_us(call, comm.device)


def _time_us(call: Callable[[], object], device: torch.device) -> float:
    """Return the time in microseconds of the fastest of a few calls after a warm-up call."""
    times = []
    for _ in range(1 + _REPETITIONS):
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e6)
    return min(times[1:])


def _queued_us(call: Callable[[], object], comm: Communicator, deadline_s: float | None) -> float:
    """Return the mean time of several calls in a row, in microseconds. All ranks must make this call.

    A GPU sleeps until the CPU has enqueued all calls, so that CPU time is not measured.
    """
    device = comm.device
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    host_us = (time.perf_counter() - start) * 1e6
    synchronize(device)
    mine = (host_us, (time.perf_counter() - start) * 1e6)
    every = comm.all_gather(mine, what="how long a call takes", deadline_s=deadline_s)
    host_us, us = (max(of_ranks) for of_ranks in zip(*every, strict=True))
    calls = max(3, min(_MOST_IN_A_ROW, int(_IN_A_ROW_US / us)))
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1e6 / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(_CYCLES_PER_US * 1.5 * host_us * (1 + calls)))
    call()  # not timed: in this call, ranks wait until every rank's sleep has ended
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls
