"""GEMMs that were measured in this process: which ones a choice rests on, for how long each is timed, what is known of them.

The model's time of a GEMM that was not measured is a formula's, corrected by its neighbours on a grid, and between the grid's
points up to 30% off. So the first call with weights of a shape on GPUs times their GEMMs, of the call's rows, of half of them, of a
quarter ... (`ladder`, `measure`). All ranks agree on the slowest rank's times (`learn`), and the choices for all sizes with such
weights are made by a model that knows them (`informed`).

On demand ("autotune") the pieces of the schedules that are predicted to be fast are timed too (`wanted`). What was measured may
make others the fast ones, by times that only were predicted: so there is a second round.

What a time means: a GPU that has rested runs at a higher clock until its power limit ends that, some 10 to 20 ms later, and
schedules are chosen for sustained work. So if any of the GEMMs is a long one, the first that is timed, the longest, runs for
15 ms before its clock starts; the others follow within a millisecond, and are timed as warm as it left the device. That is
still short of long work: a long GEMM is taken to be slower than it was measured by what the machine's model says
(`Model.sustained`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.plan.choose import decide
from weft.plan.predict import library_gemms
from weft.schedule import Problem
from weft.sim import Model
from weft.sim.model import MatmulShape

Timer = Callable[[MatmulShape, int, int], float]
"""(shape, calls to warm up, calls to time) -> microseconds of a call, queued behind others, with its launch."""

BUDGET_US = 60_000.0
"""Of device time for one shape: no GEMM is begun that is predicted to go beyond."""
_ENOUGH_US = 3000.0  # of calls of one GEMM
_LONG_US = 200.0  # from here on the clock matters, below the power limit is not reached
_WARM_US = 15_000.0
_SUSTAINED_US = 300.0  # of GEMMs: shorter ones by less
_MOST_CALLS = 50
_SCHEDULES = 6  # whose GEMMs are measured: the fastest by prediction that have GEMMs of their own
_WITHIN = 1.5  # of the fastest prediction: what is slower will not win by what GEMMs are mispredicted
_MOST = 12
_LEAST_ROWS = 32  # of a ladder: below, a GEMM reads its weights and does little else

_times: dict[str, dict[MatmulShape, float]] = {}
_informed: dict[tuple[str, int], tuple[Model, Mapping[MatmulShape, float], Model]] = {}
"""Of a machine and its ranks, the last model, what was known of GEMMs, and the model with that."""


def ladder(problem: Problem) -> tuple[MatmulShape, ...]:
    """The whole GEMMs of `problem`, and the same of half the rows, a quarter ...: what the times of all sizes of its family rest
    on. None where kernels of our own do the work."""
    found: dict[MatmulShape, None] = {}
    for m, n, k, dtype in library_gemms(problem):
        while m >= _LEAST_ROWS or not found:
            found[m, n, k, dtype] = None
            m //= 2
    return tuple(found)


def wanted(problem: Problem, model: Model) -> tuple[MatmulShape, ...]:
    """The GEMMs to measure for `problem`: the whole ones, then those of the schedules that may win, the best first. None where
    kernels of our own do the work."""
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
        # Operands are parts of the whole ones (a builder of one's own may stack them).
        new = {(m, n, k, d) for m, n, k, d in row.matmuls if m <= most_m and n <= most_n and k <= most_k} - found.keys()
        if new and len(found) + len(new) <= _MOST:
            schedules += 1
            found |= dict.fromkeys(sorted(new, reverse=True))
    return tuple(found)


def measure(
    shapes: Sequence[MatmulShape], model: Model, time_us: Timer, budget_us: float = BUDGET_US
) -> tuple[dict[MatmulShape, float], float]:
    """(times of those that fit into the budget, what is left of it): of each one call to warm up, and then as many as take 3
    ms, at least 3 (2 of those that take more than 3 ms each)."""
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
    """Keep what all ranks have measured: the slowest rank's time is everybody's."""
    common = set(of_ranks[0]).intersection(*of_ranks[1:])
    slowest = {shape: max(times[shape] for times in of_ranks) for shape in common}
    if changed := slowest.items() - measured_here(machine).items():
        _times[machine] = {**measured_here(machine), **dict(changed)}


def measured_here(machine: str) -> Mapping[MatmulShape, float]:
    """Microseconds of the GEMMs that this process has measured on GPUs of that name."""
    return _times.get(machine, {})


def informed(model: Model, machine: str) -> Model:
    """`model`, which may be calibrated, with what was measured here: the same object, if nothing was in the meantime."""
    here = measured_here(machine)
    if not here:
        return model
    before, known, found = _informed.get((machine, model.world_size), (None, None, model))
    if before is not model or known is not here:
        slower = {shape: us * (1 + (model.sustained - 1) * min(1.0, us / _SUSTAINED_US)) for shape, us in here.items()}
        found = model.with_measured({**model.measured_us, **slower})
        _informed[machine, model.world_size] = model, here, found
    return found
