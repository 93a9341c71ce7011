"""GEMMs measured in this process: which GEMMs a choice needs, how long to measure them, and the known times.

Without measurements, the model's time of a GEMM is a formula, corrected by neighbouring grid points. Between grid points it is up
to 30% off. So on GPUs, the first call with weights of a shape times their GEMMs with the call's rows, half the rows, a quarter,
and so on (`ladder`, `measure`). All ranks agree on the slowest rank's times (`learn`). A model with these times (`informed`)
makes the choices for all sizes with such weights.

"autotune" also times the pieces of schedules with fast predictions (`wanted`). With these times, other schedules may become the
fastest, whose pieces are only predicted. So there is a second round.

The clock matters. An idle GPU starts at a higher clock, which its power limit lowers after 10 to 20 ms, but schedules are chosen
for sustained work. So if any GEMM is long, the longest is timed first and runs for 15 ms before its timing starts. The others
follow within a millisecond, while the device is warm. Sustained work is slower still: a long GEMM, and each piece of it, is
assumed to take longer than measured, by the factor `Model.sustained`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.builders import Problem
from weft.plan.choose import decide
from weft.plan.predict import library_gemms
from weft.sim import Model
from weft.sim.model import MatmulShape

Timer = Callable[[MatmulShape, int, int], float]
"""(shape, warm-up calls, timed calls) -> microseconds per call, queued back to back, with its launch."""

BUDGET_US = 60_000.0
"""Device time for one shape. GEMMs that would exceed it are skipped."""
_ENOUGH_US = 3000.0  # of calls of one GEMM
_LONG_US = 200.0  # shorter GEMMs do not reach the power limit
_WARM_US = 15_000.0
_SUSTAINED_US = 300.0  # longer GEMMs are slowed by `Model.sustained`, shorter GEMMs in proportion
_MOST_CALLS = 50
_SCHEDULES = 6  # number of schedules whose GEMMs are measured: the fastest predictions that add GEMMs
_WITHIN = 1.5  # times the fastest prediction: slower schedules do not win by errors of predicted GEMMs
_MOST = 12
_LEAST_ROWS = 32  # of a ladder: with fewer rows, a GEMM mostly reads its weights

_times: dict[str, dict[MatmulShape, float]] = {}
_informed: dict[tuple[str, int], tuple[Model, Mapping[MatmulShape, float], Model]] = {}
"""The last model, its known GEMM times, and the model with these times, by machine and number of ranks."""


def ladder(problem: Problem) -> tuple[MatmulShape, ...]:
    """Return the whole GEMMs of `problem`, and the same GEMMs with half the rows, a quarter, and so on.

    The times of all sizes of its family derive from them. Empty if weft's own kernels compute the GEMMs.
    """
    found: dict[MatmulShape, None] = {}
    for m, n, k, dtype in library_gemms(problem):
        while m >= _LEAST_ROWS or not found:
            found[m, n, k, dtype] = None
            m //= 2
    return tuple(found)


def wanted(problem: Problem, model: Model) -> tuple[MatmulShape, ...]:
    """Return the GEMMs to measure for `problem`: the whole GEMMs, then the GEMMs of schedules that may win, the best first.

    Empty if weft's own kernels compute all GEMMs.
    """
    whole = library_gemms(problem)
    if not whole:
        return ()
    found = dict.fromkeys(whole)
    most_m, most_n, most_k = max(s[0] for s in whole), max(s[1] for s in whole), max(s[2] for s in whole)
    rows = [row for row in decide(problem, model, mode="queued").rows if row.us is not None and not row.rough]
    schedules = 0
    for row in rows:
        if schedules == _SCHEDULES or (row.us or 0.0) > _WITHIN * (rows[0].us or 0.0):
            break
        # Keep GEMMs whose operands are parts of the whole ones: an external builder may stack operands.
        new = {(m, n, k, d) for m, n, k, d in row.matmuls if m <= most_m and n <= most_n and k <= most_k} - found.keys()
        if new and len(found) + len(new) <= _MOST:
            schedules += 1
            found |= dict.fromkeys(sorted(new, reverse=True))
    return tuple(found)


def measure(
    shapes: Sequence[MatmulShape], model: Model, time_us: Timer, budget_us: float = BUDGET_US
) -> tuple[dict[MatmulShape, float], float]:
    """Return (times of the GEMMs that fit into the budget, the remaining budget).

    Each GEMM has a warm-up call, and then the number of calls that fits into 3 ms: 3 to 50, or 2 if one call takes more than 3 ms.
    If any of the GEMMs is long, the first GEMM warms up for 15 ms.
    """
    expected = {shape: model.matmul_us(*shape) for shape in shapes}
    warm_us = _WARM_US if max(expected.values(), default=0.0) > _LONG_US else 0.0
    found: dict[MatmulShape, float] = {}
    for shape in shapes:
        calls = max(2 if expected[shape] > _ENOUGH_US else 3, min(_MOST_CALLS, int(_ENOUGH_US / expected[shape])))
        warm = max(1, int(warm_us / expected[shape]))
        if (warm + calls) * expected[shape] > budget_us:
            continue
        found[shape] = time_us(shape, warm, calls)
        budget_us -= (warm + calls) * found[shape]
        warm_us = 0.0
    return found, budget_us


def learn(machine: str, of_ranks: Sequence[Mapping[MatmulShape, float]]) -> None:
    """Store the GEMMs that all ranks have measured, each with the slowest rank's time."""
    common = set(of_ranks[0]).intersection(*of_ranks[1:])
    slowest = {shape: max(times[shape] for times in of_ranks) for shape in common}
    if changed := slowest.items() - measured_here(machine).items():
        _times[machine] = {**measured_here(machine), **dict(changed)}


def measured_here(machine: str) -> Mapping[MatmulShape, float]:
    """Return microseconds of the GEMMs that this process has measured on GPUs of this name."""
    return _times.get(machine, {})


def informed(model: Model, machine: str) -> Model:
    """Return `model`, which may be calibrated, with the times measured here.

    The result is the same object until new times are measured.
    """
    here = measured_here(machine)
    if not here:
        return model
    before, known, found = _informed.get((machine, model.world_size), (None, None, model))
    if before is not model or known is not here:
        found = model.with_measured({**model.measured_us, **_in_sustained_work(here, model.sustained)})
        _informed[machine, model.world_size] = model, here, found
    return found


def _in_sustained_work(known: Mapping[MatmulShape, float], sustained: float) -> dict[MatmulShape, float]:
    """Return the times of GEMMs in sustained work. The pieces of a long GEMM, one after the other, are as long as it is."""
    alike: dict[
        tuple[object, ...], list[tuple[int, float]]
    ] = {}  # GEMMs that differ in one size: that size, and the time
    for shape, us in known.items():
        for place, size in enumerate(shape[:3]):
            alike.setdefault((place, *shape[:place], *shape[place + 1 :]), []).append((size, us))
    found = {}
    for shape, us in known.items():
        whole_us = max(
            whole
            for place, least in enumerate(shape[:3])
            for size, whole in alike[(place, *shape[:place], *shape[place + 1 :])]
            if size >= least
        )
        found[shape] = us * (1 + (sustained - 1) * min(1.0, whole_us / _SUSTAINED_US))
    return found
