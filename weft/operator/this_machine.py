"""The machine on which this process runs: its device name, and a performance model with calibrated and measured rates."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch

from weft import caller, plan
from weft.builders import Problem, named
from weft.hw import machine_of
from weft.operator.self_calibrate import gpus_differ, self_calibrate
from weft.plan import gemms
from weft.plan.machine import machine_name
from weft.plan.predict import predict
from weft.sim import Model
from weft.symm import Communicator


def know_machine(comm: Communicator, deadline_s: float | None) -> None:
    """Give all ranks the same measured rates of their GPUs (`weft.plan.self_calibration`), unless a calibration or a machine
    file already has them. All ranks must make this call.

    Either all ranks measure, or all use numbers that the first rank already has.
    """
    if self_calibrate(comm, device_name(comm.device), deadline_s):
        model_by_name.cache_clear()


def planning_rank(p: Problem, comm: Communicator, deadline_s: float | None) -> int:
    """Return the rank whose plan for `p` all ranks use. All ranks must make this call, after `know_machine`.

    If all GPUs are of the same model, this is rank 0. Otherwise it is the first rank whose own model predicts the
    longest serial time, because a collective waits for the slowest GPU. If some ranks have no model, it is the first of
    these ranks.
    """
    if not gpus_differ(comm):
        return 0
    model = machine_model(comm.device, p.world_size)
    mine = None if model is None else predict(named(p, "serial").build(), model, "queued")
    times = comm.all_gather(mine, what=f"predicted times of {p}", deadline_s=deadline_s)
    return max(range(len(times)), key=lambda rank: math.inf if times[rank] is None else times[rank])


def machine_model(device: torch.device, world_size: int) -> Model | None:
    """Return the performance model of this machine from the best source (`weft.plan.source`), with the GEMM times of
    this process. Return None on CPU, and on AMD GPUs without a machine file.

    The result is the same object until the source or the GEMM times change.
    """
    model = calibrated_model(device, world_size)
    return None if model is None else gemms.informed(model, device_name(device))


def calibrated_model(device: torch.device, world_size: int) -> Model | None:
    return model_by_name(device_name(device), world_size) if device.type == "cuda" else None


@lru_cache(maxsize=64)
def model_by_name(name: str, world_size: int) -> Model | None:
    machine = machine_of(name)
    if machine is None:
        return None
    found = plan.calibrated(machine, world_size)
    if found.refused:
        caller.warn_once(f"weft plans without a calibration: {found.note}")
    return found.model


def device_name(device: torch.device) -> str:
    """Return the device's name as machine files and calibrations spell it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


@cache
def _cpu_name() -> str:
    return machine_name()  # slow: it reads files
