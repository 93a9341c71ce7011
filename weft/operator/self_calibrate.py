"""Self-calibration of GPUs (`weft.plan.self_calibration`): when ranks measure, and which rank's numbers they use.

The measured numbers are rates and times for the planner. A group measures at most once, at its first choice of a
schedule, where ranks synchronise anyway. A group that uses only pinned schedules never measures. The decision depends
on the numbers that the first rank has for its GPU:

    a calibration (`weft plan calibrate`), or a machine file    no rank measures
    a saved self-calibration                                    every rank uses it
    neither                                                     all ranks measure, if every rank can, and use the first
                                                                rank's numbers

A rank cannot measure:

- while a CUDA graph is being captured,
- with WEFT_SELF_CALIBRATION=0,
- if the ranks have different GPUs,
- on a part of a GPU (MIG), or on a GPU that another rank uses too.

If a rank cannot measure, all ranks plan with numbers derived from the driver, and the first rank warns with the reason.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from weft import env, symm
from weft.caller import warn_once
from weft.errors import OutOfSharedMemoryError, RefusedError, WeftError
from weft.hw import machine_of
from weft.plan import Measure, calibrated, self_calibration
from weft.plan.self_calibration import ProbeSizes, SelfCalibration
from weft.runtime.capture import is_captured
from weft.sim import model_of
from weft.symm import Communicator
from weft.words import by_rank

_CAPTURED = "a CUDA graph is being captured"
_settled: weakref.WeakSet[Communicator] = weakref.WeakSet()
_mixed: weakref.WeakSet[Communicator] = weakref.WeakSet()


@contextlib.contextmanager
def _gpu_measure(comm: Communicator, sizes: ProbeSizes) -> Iterator[Measure]:
    from weft.runtime.cuda.measure import QUICK, GpuMeasure  # needs Triton, which a CPU machine may lack

    with torch.cuda.device(comm.device), contextlib.closing(GpuMeasure(comm, QUICK, sizes.gemms)) as measure:
        yield measure


MEASURES: dict[str, Callable[[Communicator, ProbeSizes], AbstractContextManager[Measure]]] = {"cuda": _gpu_measure}
"""Context managers that return the functions for measuring, by type of device. If a rank cannot measure, they raise
`RefusedError` or `OutOfSharedMemoryError` on every rank.
"""


class _Stand(NamedTuple):
    """The facts about a rank's GPU that the rank sends to the others. From these facts, ranks decide together if they measure."""

    name: str  # the model of this rank's GPU
    gpu: str  # identifies the GPU on its host
    known: SelfCalibration | None
    """The first rank's saved self-calibration, if it has one; None on other ranks."""
    sizes: ProbeSizes | None
    """The sizes of the measurements, on the first rank if it wants a self-calibration; otherwise None."""
    unable: str
    """The reason why this rank cannot measure; "" if it can."""


@torch.inference_mode(False)
def self_calibrate(comm: Communicator, name: str, deadline_s: float | None = None) -> bool:
    """Measure this machine, or use the first rank's self-calibration, at a group's first choice of a schedule. All
    ranks must make this call.

    Return True if this rank has a new calibration. name: the name of this rank's GPU.
    """
    if comm in _settled or comm.world_size == 1 or comm.device.type not in MEASURES:
        return False
    with symm.set_up_within(deadline_s):
        stands = comm.all_gather(_stand(comm, name), what="what is known of this machine")
        if _kinds(stands) > 1:
            _mixed.add(comm)
        if all(stand.unable != _CAPTURED for stand in stands):
            _settled.add(comm)
        first, why = stands[0], _why_not(stands)
        found = first.known
        if first.sizes is not None and not why:
            found, why = _measured(comm, first.sizes)
    if comm.rank == 0 and why and found is None and (first.sizes is not None or _kinds(stands) > 1):
        warn_once(f"{name} was not self-calibrated, so weft plans with numbers derived from the driver: {why}")
    if found is None:
        return False
    self_calibration.adopt(found)
    return True


def gpus_differ(comm: Communicator) -> bool:
    """True if ranks have different models of GPUs. `self_calibrate` must have been called."""
    return comm in _mixed


def _why_not(stands: Sequence[_Stand]) -> str:
    """Return the reason why the ranks do not measure their GPUs; "" if they measure.

    stands: the facts that each rank has sent.
    """
    if _kinds(stands) > 1:
        names = by_rank(enumerate(stand.name for stand in stands))
        return f"the GPUs differ ({names}), so all ranks use the slowest GPU's schedules"
    if len({stand.gpu for stand in stands}) < len(stands):
        return "ranks share a GPU"
    return by_rank((rank, stand.unable) for rank, stand in enumerate(stands) if stand.unable)


def _kinds(stands: Sequence[_Stand]) -> int:
    return len({stand.name for stand in stands})


def _measured(comm: Communicator, sizes: ProbeSizes) -> tuple[SelfCalibration | None, str]:
    """Measure this machine. Return (the first rank's calibration, ""), or (None, the reason why ranks cannot measure).
    All ranks must make this call. The first rank saves its calibration.
    """
    try:
        with MEASURES[comm.device.type](comm, sizes) as measure:
            mine = self_calibration.measure(measure, sizes)
    except (RefusedError, OutOfSharedMemoryError) as error:  # on every rank
        return None, str(error)
    except WeftError:  # the group has failed
        raise
    except BaseException as error:  # raised on this rank only: its peers would wait for it
        comm.poison(f"self-calibration: {error!r}")
        raise
    found: SelfCalibration = comm.all_gather(mine if comm.rank == 0 else None, what="the first rank's numbers")[0]
    machine = machine_of(found.machine)
    if comm.rank == 0 and machine is not None:
        self_calibration.save(found)
        if dropped := found.apply(model_of(machine, found.world_size)).dropped:
            warn_once(
                f"self-calibration of {found.machine} is incomplete: {'; '.join(dropped)}. Run `weft plan calibrate` for a "
                "complete calibration"
            )
    return found, ""


def _stand(comm: Communicator, name: str) -> _Stand:
    gpu, unable = _gpu(comm), ""
    if is_captured(comm.device):
        unable = _CAPTURED
    elif not env.self_calibration():
        unable = "WEFT_SELF_CALIBRATION=0"
    elif " MIG " in name:
        unable = "a part of a GPU (MIG) has no peer access"
    elif not comm.all_mapped:
        unable = "memory of other ranks cannot be mapped"
    nothing = _Stand(name, gpu, None, None, unable)
    machine = machine_of(name)
    if comm.rank or machine is None or not machine.about or not env.self_calibration():
        return nothing
    if calibrated(machine, comm.world_size).source == "calibration":
        return nothing
    try:
        known = self_calibration.find(name, comm.world_size)
    except ValueError as error:
        known = None
        warn_once(f"the saved self-calibration is ignored: {error}")
    if known is not None:
        return nothing._replace(known=known)
    return nothing._replace(sizes=self_calibration.sizes_for(model_of(machine, comm.world_size)))


def _gpu(comm: Communicator) -> str:
    """Return an identifier of this rank's device that is unique on its host."""
    if comm.device.type != "cuda":
        return str(comm.rank)
    return str(torch.cuda.get_device_properties(comm.device).uuid)
