"""Which schedule FiCCO's static heuristic picks: from the shape and the machine's peak rate, with no model of what anything costs.

    M <= K                  uniform-fused-2D
    2MNK < threshold        uniform-fused-1D
    2MNK > 5 threshold      hetero-unfused-1D
    between                 hetero-fused-1D

2MNK is the combined metric of the paper, op-to-byte ratio times memory traffic. Its threshold is the machine's: op-to-byte
ratio times memory bandwidth, the peak rate. One is FLOP and the other FLOP/s, and the time between them is not given: here
it is `heuristic.threshold` in the machine file, so that the question is how long the GEMM takes at the peak rate.

`schedule="heuristic"` runs the pick (`pick_here`). Where there is none, or it cannot do the problem, the choice is the usual one.

M is the gathered rows; before experts the tokens of all ranks, each once for each of its experts, of which every rank is taken to
get as many. N is what the caller gives, the columns that one GPU computes: of a weight sharded over W of them, N / W.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", V-C and figure 12(a).
"""

from __future__ import annotations

from functools import lru_cache

from weft.hw import Machine, load_machine, machine_of
from weft.schedule import AllGatherMatmul, AllToAllMatmul, NotApplicableError, Problem, named

_ABOVE = 5.0
"""Times the threshold: where hetero-unfused-1D begins."""

_PAPERS = "mi300x"
"""The paper's machine, whose threshold holds for machines of which nothing is known, as CPUs."""


def static_pick(problem: Problem, machine: Machine) -> str | None:
    """The candidate's name, with as many steps as ranks and copies by the copy engine, as the paper has them; by a kernel where the
    host may not know sizes. None: it says nothing of this operator. It may be one that cannot do the problem (`pick_here`)."""
    if isinstance(problem, AllGatherMatmul):
        m, flops = problem.m, problem.flops
    elif isinstance(problem, AllToAllMatmul):
        m = sum(problem.rows)
        flops = 2.0 * m / problem.world_size * problem.n * problem.k
    else:
        return None
    if m <= problem.k:
        return _ficco("2d", "uniform", "fused", problem)
    threshold = peak_flops(machine, problem.dtype) * machine["heuristic.threshold"].si
    if flops < threshold:
        return _ficco("1d", "uniform", "fused", problem)
    return _ficco("1d", "hetero", "unfused" if flops > _ABOVE * threshold else "fused", problem)


def pick_here(problem: Problem, machine_name: str) -> tuple[str | None, str]:
    """(the pick for the machine of this name, "") if it can do `problem`; else (None, why there is none)."""
    try:
        pick = static_pick(problem, _machine(machine_name))
    except KeyError as error:  # machine files have no rate of fp64, which CPU processes multiply
        return None, f"it goes by the machine's rates, and {error.args[0].partition(';')[0]}"
    if pick is None:
        return None, f"it says nothing of {problem.title}"
    try:
        named(problem, pick).build()
    except NotApplicableError as error:
        return None, f"it picks {pick}, which cannot do this: {error}"
    return pick, ""


@lru_cache(maxsize=8)
def _machine(name: str) -> Machine:
    return machine_of(name) or load_machine(_PAPERS)


def peak_flops(machine: Machine, dtype: str) -> float:
    """FLOP/s by the datasheet; where that is not in the file, bf16's in proportion to what matmuls reach."""
    if f"compute.{dtype}_dense" in machine.quantities:
        return machine[f"compute.{dtype}_dense"].si
    size = "best" if f"compute.{dtype}_matmul_best" in machine.quantities else "8192"
    reached = machine[f"compute.{dtype}_matmul_{size}"].si / machine[f"compute.bf16_matmul_{size}"].si
    return machine["compute.bf16_dense"].si * reached


def _ficco(shape: str, start: str, gemms: str, problem: Problem) -> str:
    by = "kernel" if isinstance(problem, AllToAllMatmul) and not problem.exact else "dma"
    return f"ficco_{shape}[start={start},gemms={gemms},steps=0,by={by}]"
