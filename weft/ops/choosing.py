"""Which schedule a call takes: pinned, planned on a known machine, or measured on an unknown one.

All ranks must take the same. A pinned name and a plan are functions of what all ranks know; measured times are agreed on by
taking the slowest rank's.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from weft import plan
from weft.hw import file_of, load_machine
from weft.plan.calibration import find
from weft.plan.pin import named
from weft.schedule import AllGatherMatmul, NotApplicableError, Schedule
from weft.sim import Model, model_of
from weft.symm import Domain

_MEASURED = (
    "serial",
    "gather[by=kernel]",
    "shard[chunks=1,send=in_turn,by=dma]",
    "shard[chunks=2,send=in_turn,by=dma]",
)
_REPETITIONS = 5
_MODES: tuple[plan.Mode, plan.Mode] = ("queued", "graph")
_CLEARLY = 0.97  # of the serial schedule's time: what another one must beat to be taken


def check_name(name: str, p: AllGatherMatmul) -> None:
    """`ValueError` if there is no such schedule, or it cannot do `p`."""
    named(p, name).build()


@dataclass(frozen=True)
class Chosen:
    """What runs calls, and what runs those that a CUDA graph captures; None: the serial schedule, which needs nothing."""

    usual: Any
    captured: Any

    def close(self) -> None:
        for one in {id(e): e for e in (self.usual, self.captured) if e is not None}.values():
            one.close()


def choose(
    p: AllGatherMatmul,
    domain: Domain,
    tensors: dict[str, torch.Tensor],
    pinned: str | None,
    *,
    deadline_s: float | None,
) -> Chosen:
    """What runs `p` here. Collective. `tensors` are the first call's; they are computed with, to measure or to warm up."""
    if pinned is not None:
        names = (pinned, pinned)
    else:
        model = machine_model(domain.device, p.world_size)
        # Ranks may have calibrated differently, or know different machine files: the first rank's choice is everybody's.
        mine = None if model is None else tuple(plan.choose(p, model, mode=mode).candidate.name for mode in _MODES)
        names = domain.all_gather(mine, what=f"choices for {p}")[0]
        if names is None:
            fastest = _fastest(p, domain, tensors, deadline_s)
            return Chosen(fastest, fastest)
    made = {name: executor(named(p, name).build(), domain) for name in dict.fromkeys(names) if name != "serial"}
    chosen = Chosen(made.get(names[0]), made.get(names[1]))
    if chosen.captured is not None and chosen.captured is not chosen.usual:
        chosen.captured.run(tensors, deadline_s=deadline_s)  # a capture may not be its first run
    return chosen


def executor(schedule: Schedule, domain: Domain) -> Any:
    if domain.device.type == "cuda":
        from weft.runtime.schedule_cuda import CudaSchedule  # needs Triton, which a CPU machine may lack

        return CudaSchedule(schedule, domain)
    from weft.runtime.schedule_cpu import CpuSchedule

    return CpuSchedule(schedule, domain)


@lru_cache(maxsize=64)
def machine_model(device: torch.device, world_size: int) -> Model | None:
    """The model of this machine, if there is a file for it; calibrated, if it has been (`weft plan calibrate`)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    file = file_of(name)
    if file is None:
        return None
    model = model_of(load_machine(file), world_size)
    try:
        calibration = find(name, world_size)
    except ValueError as error:
        warnings.warn(f"planning with the machine file's numbers: {error}", stacklevel=2)
        return model
    return model if calibration is None else calibration.apply(model)


def _fastest(p: AllGatherMatmul, domain: Domain, tensors: dict[str, torch.Tensor], deadline_s: float | None) -> Any:
    """Run the usual ones a few times each, on the tensors of the first call, and keep the fastest."""
    best, best_s, serial_s = None, float("inf"), float("inf")
    for name in _MEASURED:
        try:
            made = executor(named(p, name).build(), domain)
        except NotApplicableError:
            continue
        seconds = max(domain.all_gather(_time(made, tensors, deadline_s), what=f"times of {name}"))
        if name == "serial":
            serial_s = seconds
        if seconds < min(best_s, _CLEARLY * serial_s):
            if best is not None:
                best.close()
            best, best_s = (None if name == "serial" else made), seconds
        if best is not made:
            made.close()
    return best


def _time(made: Any, tensors: dict[str, torch.Tensor], deadline_s: float | None) -> float:
    """Median seconds of a run, after one to warm up."""
    times = []
    for _ in range(1 + _REPETITIONS):
        start = time.perf_counter()
        made.run(tensors, deadline_s=deadline_s)
        if made.domain.device.type == "cuda":
            torch.cuda.synchronize(made.domain.device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[_REPETITIONS // 2]
