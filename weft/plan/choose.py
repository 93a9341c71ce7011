"""The choice of a schedule: the fastest candidate on the machine's model, if it is clearly faster than serial.

Times are predicted (`weft.plan.predict`). If the caller passes measured times (`weft.plan.autotune`), only measured
times are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft import env
from weft.builders import Candidate, NotApplicableError, Problem, builders_of, named
from weft.builders.registry import cannot_do
from weft.caller import warn
from weft.plan import pin
from weft.plan.heuristic import pick_here
from weft.plan.predict import AT_LEAST, ROUGH, Progress, Row, least_us, predict, predicted_rows
from weft.schedule import Schedule
from weft.sim import Mode, Model
from weft.sim.engine import check_mode
from weft.words import counted, in_us, kind

CLEARLY, CLEARLY_US = 0.03, 3.0
"""The margin by which a schedule must beat serial: a fraction of serial's time or a time in us, whichever is larger.
Tuned on the times of about a hundred gathers on two H200s (benchmarks/results/h200-two-trees.json, recorded when
CLEARLY_US was 2).
"""

CLEARLY_OWN = 0.08
"""Like `CLEARLY`, for schedules whose GEMMs are weft's kernels. On H100s these kernels take 0.92 to 1.09 times as
long as torch's. One schedule that was predicted to be 6% faster than serial was 7% slower
(MxNxK = 1152x49024x38784, 8 experts).
"""

CLEARLY_ROUGH = 0.35
"""Like `CLEARLY`, for two schedules: `chunked` of matmul_all_reduce and `tracked` of matmul_reduce_scatter. The planner
chooses them only for a large predicted gain.

The model does not predict them well. On H100s `chunked`, whose copies to peers run concurrently with its copies from peers,
took 1.2 to 1.55 times its predicted time on two shapes (benchmarks/results/h100-never-slower.jsonl at commit c2c823e6).
`tracked` took 1.4 to 1.5 times its predicted time on a small shape (the same file now). On eight large shapes it took 0.63
to 0.78 times its predicted time, and was slower than `direct` (benchmarks/results/h100-t3.jsonl).
"""

CLEARLY_SENT = 0.08
"""Like `CLEARLY`, as a fraction of the time in which serial communicates, for schedules whose cuBLAS GEMMs are serial's, if this is
less. Wrong times of these GEMMs do not change the difference.

On two H100s, 87 such schedules were predicted to save at least 3 us, but less than 3% of serial's time (all versions of
benchmarks/results/h100-never-slower.jsonl). 84 were faster than serial, and 3 took up to 1.002 times as long. 66 of the 87, among
them these three, are of seeds to which the numbers of the machine file were not fitted.
"""

SPARED = 0.05
"""If a schedule is chosen because it needs little CPU time: the largest fraction of serial's time that may be lost if
the predicted time is wrong.
"""

ALIKE, ALIKE_US = 0.03, 3.0
"""Predictions that differ by less than this fraction or this time in us count as equal.

Among equal schedules the planner prefers, in this order: no CPU wait for sizes, no staging (`Row.stages`), fewest
GEMMs, fewest steps, copies without compute units.
"""

_KEPT = 256
"""The capacity of the cache of choices, larger than the number of shapes of a model.

A limit is needed because a service may call every sequence length, and each choice may keep its own `Model` alive
(`weft.plan.gemms`).
"""


class NoOverlapWarning(UserWarning):
    """An operator runs without overlap, although schedules with overlap exist."""


@dataclass(frozen=True)
class Choice:
    """The planner's choice for `problem` in `mode`: the schedule, the reason, and the results of all candidates."""

    problem: Problem
    mode: Mode
    candidate: Candidate
    schedule: Schedule
    predicted_us: float
    measured_us: float | None
    reason: str
    rows: tuple[Row, ...]
    """The results of all candidates, the fastest first."""

    def row(self, name: str) -> Row:
        """Return the results for the candidate `name`."""
        return next(row for row in self.rows if row.candidate.name == name)

    def __str__(self) -> str:
        return self.reason


_choices: dict[tuple, tuple[Model, Choice]] = {}


def choose(
    problem: Problem,
    model: Model,
    *,
    mode: Mode = "queued",
    pinned: str | None = None,
    measured: Mapping[str, float] | None = None,
    among: frozenset[str] | None = None,
    near: bool = False,
) -> Choice:
    """Choose a schedule for `problem` on `model`. The choice is cached for this model object.

    Args:
        mode: the kind of run: "queued", "graph" or "single" (`weft.plan.predict`).
        pinned: the name of the candidate to take. Default: the name from `weft.plan.use`. "heuristic" takes the
            schedule of FiCCO's heuristic, if it supports `problem`. "autotune" pins nothing.
        measured: {candidate: time in us}, including serial. Only these candidates are considered.
        among: the names of the candidates to consider. Default: all.
        near: True if the choice also applies to nearby sizes. The warning (see below) then mentions them.

    Warn (`NoOverlapWarning`), once per process, if serial is chosen although there are other candidates. Raise
    `ValueError` for an unknown mode or name, and `NotApplicableError` (a `ValueError`) if the pinned candidate does not
    support `problem`.
    """
    for name, given, wanted in (("problem", problem, Problem), ("model", model, Model)):
        if not isinstance(given, wanted):
            made = (
                "a problem of weft.builders, such as AllGatherMatmul" if wanted is Problem else "weft.sim.model_of(...)"
            )
            raise ValueError(f"{name} is {kind(given)}: pass {made}")
    check_mode(mode)
    if measured is not None and not isinstance(measured, Mapping):
        raise ValueError(f"measured is {kind(measured)}: pass a dict, {{candidate: time in us}}, or None")
    pinned = pin.pinned(pinned)
    if pinned == pin.HEURISTIC:
        pinned, _ = pick_here(problem, model.name)
    pinned = None if pinned == pin.AUTOTUNE else pinned
    times = tuple(measured.items()) if measured else ()
    key = (problem, id(model), mode, pinned, times, among, builders_of(type(problem)))
    found = _choices.get(key)
    if found is not None:
        return found[1]
    choice = decide(problem, model, mode=mode, pinned=pinned, measured=measured, among=among)
    if len(_choices) >= _KEPT:
        _choices.pop(next(iter(_choices)), None)
    _choices[key] = model, choice  # keeps the model alive, so that its id is not reused
    others = any(row.us is not None and row.candidate.name != "serial" for row in choice.rows)
    runs = mode != "graph" or not choice.schedule.reads_on_host
    if pinned is None and choice.candidate.name == "serial" and others and runs:
        warn_once(problem, mode, f"{choice.reason}; weft.plan.explain gives details", near=near)
    return choice


def decide(
    problem: Problem,
    model: Model,
    *,
    mode: Mode,
    pinned: str | None = None,
    measured: Mapping[str, float] | None = None,
    among: frozenset[str] | None = None,
    progress: Progress = lambda what, share: None,
) -> Choice:
    """Choose like `choose`, with the same arguments, but without the cache, without a warning, and independent of
    `weft.plan.use`.
    """
    check_mode(mode)
    measured = measured or {}
    for name in measured:
        named(problem, name)
    if pinned is not None:
        return _pinned_choice(problem, model, mode, named(problem, pinned), measured)
    if measured and "serial" not in measured:
        raise ValueError(
            f"measured={dict(measured)} lacks serial: measure it too, since the other candidates are compared with it"
        )
    rows, schedules = predicted_rows(problem, model, mode, frozenset(measured) | {"serial"}, progress, among)
    rows = [replace(row, measured_us=measured.get(row.candidate.name)) for row in rows]
    chosen, reason = _best(rows, mode, bool(measured))
    if mode == "graph" and chosen.reads_on_host:
        reason += "; it cannot be captured in a graph, nor can any other candidate: the CPU reads sizes"
    serial = next((row for row in rows if row.candidate.name == "serial"), None)
    reason += _too_busy_for(rows, chosen, serial) if mode == "queued" and not measured else ""
    rows = [replace(row, why_not=row.why_not or _why_not(row, chosen, serial, mode, bool(measured))) for row in rows]
    rows.sort(key=lambda row: (row.us is None, row.us or 0.0))
    assert chosen.predicted_us is not None
    return Choice(problem, mode, chosen.candidate, schedules[chosen.candidate.name], chosen.predicted_us,
                  chosen.measured_us, reason, tuple(rows))  # fmt: skip


def _pinned_choice(
    problem: Problem, model: Model, mode: Mode, candidate: Candidate, measured: Mapping[str, float]
) -> Choice:
    try:
        schedule = candidate.build()
    except NotApplicableError as error:
        raise cannot_do(candidate.name, problem, error) from error
    us = predict(schedule, model, mode, least_us(problem, model)) if problem.has_work else 0.0
    row = Row(candidate, us, measured.get(candidate.name), problem=problem, model=model)
    return Choice(problem, mode, candidate, schedule, us, row.measured_us, f"{candidate.name} is pinned", (row,))


def _best(rows: list[Row], mode: Mode, measured: bool) -> tuple[Row, str]:
    """Return (the row of the chosen candidate, the reason as a sentence).

    measured: True if the rows have measured times, False for predicted times.
    """
    timed = [
        row for row in rows if row.us is not None and not row.rough and (row.measured_us is not None or not measured)
    ]
    serial = next((row for row in timed if row.candidate.name == "serial"), None)
    capturable = [row for row in timed if not row.reads_on_host]
    timed = capturable if mode == "graph" and capturable else timed
    if mode == "queued" and serial is not None and not measured:
        timed = [row for row in timed if not _outlasts(row, serial)]
    fastest = min(timed, key=lambda row: row.us or 0.0)
    how = "measured" if measured else "predicted"
    assert fastest.us is not None
    if serial is None or serial.us is None:
        return (
            fastest,
            f"{fastest.candidate.name} is the fastest: {in_us(fastest.us)} {how}. There is no serial schedule",
        )
    if serial not in timed:
        best, among = _simplest(timed, fastest, measured)
        return best, (
            f"{best.candidate.name} {among}: {in_us(best.us or 0.0)} {how}; serial, {in_us(serial.us)}, cannot be "
            "captured, because the CPU reads sizes"
        )
    clear = [row for row in timed if row.us is not None and serial.us - row.us >= _needed_us(row, serial, mode)]
    sparing = [row for row in timed if row is not serial and _spares_host(row, serial)]
    if mode == "queued" and not measured and not clear and sparing:
        best = min(sparing, key=_simplicity)
        return best, (
            f"{best.candidate.name} takes as long as serial, {in_us(best.us or 0.0)} {how}, and uses less CPU time: about "
            f"{best.host_us:.0f} us per call instead of {serial.host_us:.0f}"
        )
    if fastest is serial:
        others = [row.us for row in timed if row is not serial and row.us is not None]
        if others:
            return serial, f"serial is the fastest: {in_us(serial.us)} {how}, the next best {in_us(min(others))}"
        return serial, f"serial is taken, {in_us(serial.us)} {how}: {_no_other(rows, serial, mode, measured)}"
    if not clear:
        needed = _needed_us(fastest, serial, mode) / serial.us
        return serial, (
            f"nothing is clearly faster than serial, {in_us(serial.us)} {how}: {fastest.candidate.name} at "
            f"{in_us(fastest.us)} saves less than the required {needed:.1%} of serial's time"
        )
    best, among = _simplest(clear, min(clear, key=lambda row: row.us or 0.0), measured)
    assert best.us is not None
    return best, (
        f"{best.candidate.name} {among}: {in_us(best.us)} {how}, {1 - best.us / serial.us:.0%} less than serial's "
        f"{in_us(serial.us)}"
    )


def _clearly(row: Row) -> float:
    """Return the margin by which `row` must beat the serial schedule to be chosen, as a fraction of the serial schedule's time."""
    if row.measured_us is not None:
        return CLEARLY
    if row.candidate.builder in ("chunked", "tracked"):
        return CLEARLY_ROUGH
    return CLEARLY_OWN if row.own_gemms else CLEARLY


def _needed_us(row: Row, serial: Row, mode: Mode) -> float:
    """Return the margin in us by which `row` must beat the predicted time of `serial`, the serial schedule, to be chosen.

    Usually this is a fraction of serial's time (`_clearly`), but at least `CLEARLY_US`. The result is smaller if serial
    makes the CPU wait for sizes, and `row` does not. After such a wait the device is idle until the CPU has issued more work.
    The predicted time of serial does not contain this idle time, which was 7% of serial's time on H100s
    (1204x14336x30336, 32 experts). So the idle time, estimated by serial's CPU time, is subtracted from the result.
    """
    needed_us = min(_clearly(row) * (serial.us or 0.0), _needed_of_sent_us(row, serial))
    if mode == "queued" and serial.stops_host and not row.stops_host:
        needed_us -= serial.host_us
    return max(needed_us, CLEARLY_US)


def _needed_of_sent_us(row: Row, serial: Row) -> float:
    """Return the required gain of `row` if it differs from `serial` only in communication (`CLEARLY_SENT`); otherwise infinity.

    Predictions for more than two ranks are less exact, so there the result is infinity too.
    """
    problem, model = row.problem, row.model
    alike = bool(row.matmuls) and (row.matmuls, row.gemms) == (serial.matmuls, serial.gemms)
    if (
        not alike
        or row.own_gemms
        or row.measured_us is not None
        or problem is None
        or model is None
        or problem.world_size > 2
    ):
        return math.inf
    return CLEARLY_SENT * max(0.0, (serial.us or 0.0) - least_us(problem, model))


def _no_other(rows: list[Row], serial: Row, mode: Mode, measured: bool) -> str:
    """Return the reasons why no candidate except the serial schedule can be chosen, as a phrase.

    measured: True if the rows have measured times, False for predicted times.
    """
    if measured:
        return "no other candidate was measured"
    reasons = {
        "certainly take longer": any(row.why_not.startswith(AT_LEAST) for row in rows),
        "have a larger rounding error": any(row.rough for row in rows),
        "keep the CPU busy longer": mode == "queued" and any(_outlasts(row, serial) for row in rows),
        "cannot be captured": mode == "graph" and any(row.reads_on_host for row in rows if row is not serial),
    }
    held = [reason for reason, holds in reasons.items() if holds]
    return f"all others {', or '.join(held)}" if held else "there is no other candidate"


def _too_busy_for(rows: list[Row], chosen: Row, serial: Row | None) -> str:
    """Return a note on the fastest candidate that needs too much CPU time to be chosen. Return "" if no such candidate
    is faster than the chosen schedule.
    """
    if serial is None or chosen.us is None:
        return ""
    faster = [
        row for row in rows if row.us is not None and row.us < chosen.us and not row.rough and _outlasts(row, serial)
    ]
    if not faster:
        return ""
    best = min(faster, key=lambda row: row.us or 0.0)
    return (
        f"; {best.candidate.name}, {in_us(best.us or 0.0)}, would keep the CPU busy for {best.host_us:.0f} us per call"
    )


def _outlasts(row: Row, serial: Row) -> bool:
    """True if the CPU time of `row` is longer than three other times: its device time, and the CPU time and the device time of
    `serial`, the serial schedule.

    In a loop of such calls the device would always wait for the CPU.
    """
    longest_us = max(serial.us or 0.0, serial.host_us, row.us or 0.0)
    return row is not serial and not row.reads_on_host and row.host_us > longest_us


def _spares_host(row: Row, serial: Row) -> bool:
    """True if `row` is predicted to be no slower than `serial`, the serial schedule, and to take clearly less CPU time.

    Return False in two cases in which a wrong prediction could cost much:
    - Serial is so short that `CLEARLY_US` is more than the fraction `SPARED` of its time.
    - weft's kernels compute the GEMMs, and serial's CPU time is at most half of its device time.
    """
    assert row.us is not None
    assert serial.us is not None
    sure = SPARED * serial.us >= CLEARLY_US and (not row.own_gemms or serial.host_us > 0.5 * serial.us)
    return sure and not row.reads_on_host and row.us <= serial.us and serial.host_us - row.host_us >= CLEARLY_US


def _simplest(timed: list[Row], fastest: Row, measured: bool) -> tuple[Row, str]:
    """Return (row, reason): the row of the schedule to prefer among the fastest, and why.

    With measured times, the row is `fastest`. Predicted times are less exact, so with these it is the simplest of the
    rows that are about as fast as `fastest`. Rows without a CPU wait for sizes are the simplest. After that, fewer GEMMs
    and fewer steps are simpler (`_simplicity` has the full order).
    """
    if measured:
        return fastest, "is the fastest"
    least_us = fastest.us or 0.0
    alike = [row for row in timed if (row.us or 0.0) <= max(least_us * (1 + ALIKE), least_us + ALIKE_US)]
    best = min(alike, key=_simplicity)
    if best is fastest:
        return fastest, "is the fastest"
    return (
        best,
        f"is the simplest of the {len(alike)} fastest, which are within {ALIKE:.0%} or {ALIKE_US:g} us of each other",
    )


def _simplicity(row: Row) -> tuple[float, ...]:
    return (row.stops_host, row.stages, row.gemms, row.steps, row.copies_by_kernel, row.us or 0.0)


def _why_not(row: Row, chosen: Row, serial: Row | None, mode: Mode, measured: bool) -> str:
    if row is chosen or row.us is None or chosen.us is None:
        return ""
    if measured and row.measured_us is None:
        return "not measured"
    if mode == "graph" and row.reads_on_host and not chosen.reads_on_host:
        return "cannot be captured, because the CPU reads sizes"
    if row.rough:
        return ROUGH
    if row.us < chosen.us and mode == "queued" and serial is not None and _outlasts(row, serial):
        return f"keeps the CPU busy for {row.host_us:.0f} us per call"
    if row.us < chosen.us and chosen is serial:
        return "not clearly faster than serial"
    if row.us < chosen.us and serial is not None and serial.us is not None:
        needed_us = _needed_us(row, serial, mode)
        if serial.us - row.us < needed_us:
            return f"saves less than the required {needed_us / serial.us:.1%} of serial's time"
    if row.us < chosen.us:
        more = "copies in tiles" if row.stages else f"{counted(row.gemms, 'GEMM')} and {counted(row.steps, 'step')}"
        return f"not clearly faster than the choice, with {more}"
    return f"{row.us / chosen.us - 1:.1%} slower" if chosen.us else ""


_warned = False


def warn_once(problem: Problem, mode: Mode | None, reason: str, *, near: bool = False) -> None:
    """Warn (`NoOverlapWarning`), once per process, that `problem` takes the serial schedule although other schedules
    exist.

    mode: the mode for which serial was chosen; None if the choice is the same in all modes.
    reason: the reason of the choice, for the text of the warning.
    near: True if the choice was made for a nearby size, not for a call of `problem` itself.
    """
    global _warned
    if _warned or env.quiet() or not problem.has_work:
        return
    _warned = True
    warn(
        f"weft runs {problem.title} without overlap for {'sizes near ' if near else ''}{problem.text}"
        f"{'' if mode is None else f', {mode}'}: {reason}. This warning appears once per process; WEFT_QUIET=1 disables it",
        NoOverlapWarning,
    )
