"""FiCCO's static heuristic, which chooses a schedule by the shape and the machine's peak rate, without a cost model.

    M <= K                  uniform-fused-2D
    2MNK < threshold        uniform-fused-1D
    2MNK > 5 threshold      hetero-unfused-1D
    between                 hetero-fused-1D

2MNK is the paper's combined metric: op-to-byte ratio times memory traffic, in FLOP. The paper's threshold is the
machine's peak rate, in FLOP/s: its op-to-byte ratio times its memory bandwidth. The paper does not give the time that
converts FLOP/s to FLOP. weft takes this time from `heuristic.threshold` in the machine file. So the heuristic compares
the GEMM's time at the peak rate with a fixed time.

`schedule="heuristic"` runs the chosen schedule (`pick_here`). If the heuristic chooses none, or its choice does not
support the problem, the planner's choice applies.

M is the number of gathered rows. For experts, M is the number of tokens of all ranks, counted once for each of their
experts. All ranks are assumed to receive equal numbers of tokens. N is the number of columns that one GPU computes.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", V-C and figure 12(a).
"""

from __future__ import annotations

from functools import lru_cache

from weft.builders import AllGatherMatmul, AllToAllMatmul, NotApplicableError, Problem, named
from weft.hw import Machine, load_machine, machine_of

_ABOVE = 5.0
"""The heuristic chooses hetero-unfused-1D if the GEMM has more FLOPs than this multiple of the machine's threshold (key
`heuristic.threshold` of machine files).
"""

_PAPERS = "mi300x"
"""The paper's machine. Machines without a machine file, such as CPUs, use its threshold."""


def static_pick(problem: Problem, machine: Machine) -> str | None:
    """Return the name of the chosen schedule; None if the heuristic does not cover this operator.

    As in the paper, the schedule has W steps for W ranks, and copy engines copy. If the CPU does not read dynamic
    sizes, kernels copy instead. The schedule may not support the problem, which `pick_here` checks.
    """
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
    """Return (schedule, "") for the machine of this name; (None, reason) if the heuristic has no choice, or its choice
    does not support `problem`.
    """
    try:
        pick = static_pick(problem, _machine(machine_name))
    except KeyError as error:  # machine files have no rate for fp64, which CPU ranks may use
        return None, f"it needs the machine's matmul rates, but {error.args[0].partition(';')[0]}"
    if pick is None:
        return None, f"it does not cover {problem.title}"
    try:
        named(problem, pick).build()
    except NotApplicableError as error:
        return None, f"it picks {pick}, which does not support this problem: {error}"
    return pick, ""


@lru_cache(maxsize=8)
def _machine(name: str) -> Machine:
    return machine_of(name) or load_machine(_PAPERS)


def peak_flops(machine: Machine, dtype: str) -> float:
    """Return the datasheet's FLOP/s for `dtype`.

    If the datasheet lacks the dtype, return the FLOP/s of bf16, scaled by the ratio of the two dtypes' measured matmul
    rates.
    """
    if f"compute.{dtype}_dense" in machine.quantities:
        return machine[f"compute.{dtype}_dense"].si
    size = "best" if f"compute.{dtype}_matmul_best" in machine.quantities else "8192"
    reached = machine[f"compute.{dtype}_matmul_{size}"].si / machine[f"compute.bf16_matmul_{size}"].si
    return machine["compute.bf16_dense"].si * reached


def _ficco(shape: str, start: str, gemms: str, problem: Problem) -> str:
    by = "kernel" if isinstance(problem, AllToAllMatmul) and not problem.exact else "dma"
    return f"ficco_{shape}[start={start},gemms={gemms},steps=0,by={by}]"
