"""The measurements of `weft plan calibrate`: every rank measures its GPU and links, and rank 0 saves the results.

The code that measures is in `weft.runtime.cuda.measure`, which an operator's first call on an unknown GPU uses too.
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
    """Measure on all ranks, and save the results. Return the path of the saved file on rank 0, and "" on other ranks.

    dtypes: the GEMM dtypes to measure. budget_s: after this many seconds no further GEMM is started.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD
    assert group is not None
    with symm.set_up_within(env.deadline_s()):  # setup includes compilation and measurements between exchanges
        measure = GpuMeasure(symm.communicator(group, device))
        # Another machine's numbers are good enough to choose the sizes to measure on an unknown machine.
        base = model_of(machine_of(measure.machine) or load_machine("h200"), world_size)
        found = calibrate(
            measure, base, dtypes=dtypes, budget_s=budget_s, say=_printed if rank == 0 else lambda text: None
        )
        measure.close()
    return str(found.save()) if rank == 0 else ""


def _printed(text: str) -> None:
    print(f"measuring {text}", flush=True)
