"""all_gather_matmul with FiCCO's heuristic, on CPU processes and on GPUs. These functions run on the ranks."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import torch.distributed as dist
from support.operators.gemms import AllGatherMatmulCall, Gathered

import weft
from weft.operator import calls, select


def by_heuristic(group: dist.ProcessGroup) -> tuple[list[tuple[str, ...]], list[str]]:
    """Call with several shapes, twice each: with `schedule="heuristic"`, and inside `use("heuristic")`. Return (the two
    schedules for each shape, warnings). The shapes have M > K, M < K, and two shapes that FiCCO does not support.
    """
    found = []
    quiet = os.environ.pop("WEFT_QUIET", "0")
    select._said.clear()
    uneven = tuple(range(3, 3 + group.size()))
    cases = Gathered((24, 16)), Gathered((4, 96)), Gathered((4, 96), return_A=True), Gathered((3, 12), rows=uneven)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for case in cases:
            names = []
            for seed, given in enumerate(("heuristic", None)):
                call = AllGatherMatmulCall(replace(case, n=5 + seed), group, seed)
                with weft.plan.use("heuristic" if given is None else "serial"):
                    call.check(group, call(group, schedule=given))
                names.append(calls.TABLES["all_gather_matmul"].known(group)[-1].taken[0])
            found.append(tuple(names))
    os.environ["WEFT_QUIET"] = quiet
    return found, [text for w in caught if "heuristic" in (text := str(w.message))]
