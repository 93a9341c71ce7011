"""The ranks of `weft plan calibrate`: they measure this machine's GPUs and links, and save the numbers for the planner.

The measurements are in `weft.runtime.cuda.measure`, because self-calibration takes a few of them at an operator's first call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft import env, symm
from weft.hw import load_machine, machine_of
from weft.plan import calibrate
from weft.runtime.cuda.measure import GpuMeasure
from weft.sim import model_of


def calibrate_ranks(rank: int, world_size: int, dtypes: tuple[str, ...], budget_s: float) -> str:
    """Measure and save (rank 0) on every rank of `weft plan calibrate`. Return the path of the saved file as a message."""
    device = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD
    assert group is not None
    with symm.set_up_within(env.deadline_s()):  # ranks compile and measure between their exchanges
        measure = GpuMeasure(symm.communicator(group, device))
        # Another machine's numbers still tell which sizes are sensible.
        base = model_of(machine_of(measure.machine) or load_machine("h200"), world_size)
        found = calibrate(measure, base, dtypes=dtypes, budget_s=budget_s, say=_printed if rank == 0 else _ignored)
        measure.close()
    return str(found.save()) if rank == 0 else ""


def _printed(text: str) -> None:
    print(f"measuring {text}", flush=True)


def _ignored(text: str) -> None:
    """Print nothing: for ranks other than the first."""
