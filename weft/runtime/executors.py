"""The executor of a schedule on a device: threads on CPU processes, streams and copy engines on GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import torch

from weft.builders import Problem
from weft.runtime.executor import Executor
from weft.schedule import Schedule
from weft.symm import Communicator

Tensors: TypeAlias = dict[str, Any]
"""The tensors of a call, by buffer. An output with a dynamic number of rows has a function instead of a tensor. The
function gets the number of rows and returns the tensor.
"""


@torch.inference_mode(False)
def executor(
    schedule: Schedule, comm: Communicator, p: Problem | None = None, name: str = "", what: str = ""
) -> Executor:
    """Make an executor for `schedule`. All ranks must make this call.

    p: the problem (an operator's sizes) for which a builder made the schedule; None for a user's schedule.
    name: the builder's name with its parameters if the builder is one of weft's, else "". On GPUs, executors with the same
        name share memory if their problems differ only in the number of rows. Ranks then compare only the first executor's
        schedule. On CPU, all executors of a group share memory.
    what: a description of the call, for error texts.

    The executor works inside and outside of inference mode.
    """
    if p is not None:
        schedule = replace(schedule, name=f"{schedule.name} of {p.title}")
    if comm.device.type == "cuda":
        from weft.runtime.cuda.memory import shared  # needs Triton, which a CPU machine may lack
        from weft.runtime.cuda.schedule import CudaSchedule

        family = p if p is None else p.family[0]
        if p is None or family is p or not name:
            return CudaSchedule(schedule, comm)
        found = shared((family, name), schedule, comm)
        return CudaSchedule(schedule, comm) if found is None else CudaSchedule(schedule, comm, *found)
    from weft.runtime.cpu.schedule import CpuSchedule

    kind = None if p is None or not name else (p.measured_family[0], name)
    return CpuSchedule(schedule, comm, what or ("" if p is None else p.text), kind)
