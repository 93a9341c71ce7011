"""Measurement of GEMMs in this process: which GEMMs to measure, and for how long.

Without measurements, the model computes the time of a GEMM by a formula, corrected at measured grid points. Between
grid points the formula is wrong by up to 30%. So on GPUs, the first call with weights of a new shape times their GEMMs
(`ladder`, `measure`): with the call's rows, with half the rows, a quarter, and so on. All ranks use the slowest rank's
times (`learn`). Choices for these weights, with any number of rows, then use a model with these times (`informed`).

"autotune" also times the smaller GEMMs of schedules that are predicted to be fast (`wanted`). With the new times, other
schedules may be predicted to be fast, so their GEMMs are timed in a second round.

Schedules are chosen for sustained work, in which the power limit lowers a GPU's clock after 10 to 20 ms. So if any GEMM
is long, a warm-up of 15 ms lowers the clock. Then the longest GEMM is timed, and the others follow within a
millisecond. In sustained work the clock is even lower. So the model multiplies the measured times of long GEMMs, and of
the pieces into which they are cut, by `Model.sustained`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.builders import Problem
from weft.plan.choose import decide
from weft.plan.predict import library_gemms
from weft.sim import Model
from weft.sim.model import MatmulShape

Timer = Callable[[MatmulShape, int, int], float]
"""A function (shape, number of warm-up calls, number of timed calls) -> us per call, of calls queued back to back."""

BUDGET_US = 60_000.0
"""The device time for the measurements of one shape of weights, in us. GEMMs beyond it are skipped."""
_ENOUGH_US = 3000.0  # the time to measure one GEMM
_LONG_US = 200.0  # shorter GEMMs do not reach the power limit
_WARM_US = 15_000.0
_SUSTAINED_US = 300.0  # GEMMs from this length on are slowed by `Model.sustained`, shorter GEMMs by a proportional part
_MOST_CALLS = 50
_SCHEDULES = 6  # number of schedules whose GEMMs are measured: the fastest predictions that add GEMMs
_WITHIN = 1.5  # the limit, as a multiple of the fastest prediction: prediction errors of GEMMs are smaller
_MOST = 12
_LEAST_ROWS = 32  # the fewest rows of a ladder: with fewer rows, reading the weights takes as long as the GEMM

_times: dict[str, dict[MatmulShape, float]] = {}
_informed: dict[tuple[str, int], tuple[Model, Mapping[MatmulShape, float], Model]] = {}
"""{(machine, number of ranks): (latest model, GEMM times, model with these times)}"""


def ladder(problem: Problem) -> tuple[MatmulShape, ...]:
    """Return the undivided GEMMs of `problem`, and the same GEMMs with half the rows, a quarter, and so on.

    Return () if weft's own kernels compute the GEMMs.
    """
    found: dict[MatmulShape, None] = {}
    for m, n, k, dtype in library_gemms(problem):
        while m >= _LEAST_ROWS or not found:
            found[m, n, k, dtype] = None
            m //= 2
    return tuple(found)


def wanted(problem: Problem, model: Model) -> tuple[MatmulShape, ...]:
    """Return the GEMMs to measure for `problem`: the undivided GEMMs, then the GEMMs of the schedules with the shortest
    predicted times.

    Return () if weft's own kernels compute all GEMMs.
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
        # Measure only parts of the undivided GEMMs. Users' builders may have other GEMMs, with concatenated operands.
        new = {(m, n, k, d) for m, n, k, d in row.matmuls if m <= most_m and n <= most_n and k <= most_k} - found.keys()
        if new and len(found) + len(new) <= _MOST:
            schedules += 1
            found |= dict.fromkeys(sorted(new, reverse=True))
    return tuple(found)


def measure(
    shapes: Sequence[MatmulShape], model: Model, time_us: Timer, budget_us: float = BUDGET_US
) -> tuple[dict[MatmulShape, float], float]:
    """Return ({GEMM: time in us}, remaining budget in us). GEMMs that exceed the budget are skipped.

    Before each GEMM there is a warm-up call. Before the first GEMM there are 15 ms of warm-up calls if any GEMM is
    predicted to take more than 200 us. The number of timed calls of a GEMM depends on its predicted time:

    - more than 3 ms: 2 calls
    - up to 3 ms: as many calls as fit into 3 ms, but at least 3 and at most 50
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
    """Store the slowest rank's time of each GEMM that all ranks have measured. of_ranks: each rank's times."""
    common = set(of_ranks[0]).intersection(*of_ranks[1:])
    slowest = {shape: max(times[shape] for times in of_ranks) for shape in common}
    if changed := slowest.items() - measured_here(machine).items():
        _times[machine] = {**measured_here(machine), **dict(changed)}


def measured_here(machine: str) -> Mapping[MatmulShape, float]:
    """Return {GEMM: time in us} of the GEMMs that this process has measured on GPUs with this name."""
    return _times.get(machine, {})


def informed(model: Model, machine: str) -> Model:
    """Return `model` with the times that this process has measured: the same object until new times are measured."""
    here = measured_here(machine)
    if not here:
        return model
    before, known, found = _informed.get((machine, model.world_size), (None, None, model))
    if before is not model or known is not here:
        found = model.with_measured({**model.measured_us, **_in_sustained_work(here, model.sustained)})
        _informed[machine, model.world_size] = model, here, found
    return found


def _in_sustained_work(known: Mapping[MatmulShape, float], sustained: float) -> dict[MatmulShape, float]:
    """Return {GEMM: its time in sustained work}, computed from the measured times `known`.

    Long GEMMs, and the pieces of long GEMMs, take `sustained` times the measured time.
    """
    alike: dict[
        tuple[object, ...], list[tuple[int, float]]
    ] = {}  # for GEMMs that differ only in one size: (this size, time)
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
