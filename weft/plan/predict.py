"""What each candidate takes on the model of a machine: every schedule is built, and simulated unless it is hopeless.

A prediction is the time of a run that follows another one ("queued"; "graph", where collectives and the run's end take
longer), or of a run that begins on idle devices, with the host's time for each step ("single"). Where the host reads sizes in
every run, a run takes at least as long as it needs to issue one.

A run cannot be shorter than the steps of one lane, each alone, and a single one not than the host needs to issue its steps.
So schedules are simulated by rising bounds, and those not at all of which the bound is `HOPELESS` times the best so far: what
comes near is shown with its time. Equal schedules under two names are simulated once. Those of the last problem are kept, as a
problem is often decided several times: for calls and for graphs, before and after its GEMMs were measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from weft.schedule import (
    ITEM_BYTES,
    MATMULS,
    Candidate,
    Collective,
    Compute,
    Copy,
    For,
    NotApplicableError,
    Problem,
    Read,
    Region,
    Schedule,
    Set,
    Step,
    Tiles,
    Wait,
    builders_of,
    candidates,
    named,
)
from weft.schedule.steps import put_in, variables_of
from weft.sim import Inefficiencies, Model, inefficiencies, simulate
from weft.sim.costs import Operand, cost
from weft.sim.losses import gemms_us
from weft.sim.model import MatmulShape
from weft.sim.numbers import key_of, regions_of, values_of_ranks

Mode: TypeAlias = Literal["queued", "graph", "single"]
MODES: tuple[Mode, ...] = get_args(Mode)

AT_LEAST = "takes at least"
"""How `Row.why_not` begins for a candidate that was not simulated, because it cannot be the fastest."""

SAME_AS = "the same schedule as "
"""How it begins for one that was simulated under another name."""

HOPELESS = 2.5
"""Times the fastest prediction: what takes longer for certain is not simulated."""

Progress: TypeAlias = Callable[[str, float], None]
"""Told what is done next, and which part of everything was done before."""


@dataclass(frozen=True)
class Row:
    """What is known of one candidate. Without a predicted time it has no schedule, or cannot be the fastest: `why_not`."""

    candidate: Candidate
    predicted_us: float | None = None
    measured_us: float | None = None
    why_not: str = ""
    """Empty for the one that is taken."""
    gemms: int = 0
    steps: int = 0
    """Of a rank, all lanes together."""
    collectives: int = 0
    """Of the library, likewise."""
    lanes: int = 1
    copies_by_kernel: int = 0
    """On lanes beside the computing ones."""
    reads_on_host: bool = False
    """Whether no CUDA graph can capture it, as the host takes sizes from the device in between."""
    stops_host: bool = False
    """Whether the host waits for them before it issues the rest, and what is queued runs out."""
    late: int = 0
    """Copies, GEMMs and collectives whose sizes only the run knows."""
    rough: bool = False
    """Whether it adds up in 16 bits or fewer, and so errs more than one GEMM (unless that is the problem's way anyway): it is
    taken only if it is pinned."""
    stages: bool = False
    """Whether kernels send or signal while they compute: tiles, or GEMMs that store in peers' memory. Of that models know least."""
    matmuls: frozenset[MatmulShape] = frozenset()
    """The different GEMMs of a rank that are the library's."""
    problem: Problem | None = field(default=None, repr=False)
    model: Model | None = field(default=None, repr=False)

    @property
    def us(self) -> float | None:
        return self.predicted_us if self.measured_us is None else self.measured_us

    @property
    def host_us(self) -> float:
        """Return about what the host needs to issue a run. In GEMMs, a collective takes half as long again and a signal or a copy a
        tenth; those of a single lane are one launch with its kernels. Steps whose sizes only the run knows are launched from
        Python."""
        if self.model is None:
            return 0.0
        calls = self.gemms + 1.5 * self.collectives + (0.1 * self.steps if self.lanes > 1 else 0.0)
        if self.late:
            return self.model.host_dynamic_us + self.late * self.model.host_late_us
        return calls * self.model.host_call_us

    @cached_property
    def losses(self) -> Inefficiencies | None:
        """Of a queued run: what decomposition and contention cost, and how much communication nothing hides. None without GEMMs."""
        if self.predicted_us is None or self.problem is None or self.model is None or not self.problem.has_work:
            return None
        if not gemms_us(self.problem, self.model):
            return None
        return inefficiencies(_schedule(self.problem, self.candidate), self.problem, self.model)


@dataclass(frozen=True)
class _Priced:
    """A step of a rank, without its place: what its cost depends on."""

    step: Step
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class _Built:
    """A candidate with its schedule, or in `row.why_not` why it has none; and of each lane of a rank how often it has which
    step."""

    row: Row
    schedule: Schedule | None = None
    lanes: tuple[Counter[_Priced], ...] = ()


def predict(schedule: Schedule, model: Model, mode: Mode, at_least_us: float = 0.0) -> float:
    """Microseconds of one run, and no less than that many."""
    if mode == "single":
        us = simulate(schedule, model, mode=mode).end_us
    else:
        us = simulate(schedule, model, mode=mode, runs=2).per_run_us
    us += _signals_of_tiles(schedule) * model.tile_signal_us
    us += model.graph_run_us if mode == "graph" and len(schedule.lanes) > 1 else 0.0
    if schedule.reads_on_host:
        us = max(us, _reading_host_us(schedule, model))
    return max(at_least_us, us)


def _reading_host_us(schedule: Schedule, model: Model) -> float:
    """What the host needs to issue a run in which it reads sizes. As it waits in every run it is never far ahead of the device,
    which would hide this."""
    return _late(schedule) * model.host_late_us + len(list(_steps(schedule))) * model.host_step_us


def _late(schedule: Schedule) -> int:
    """Return how many copies, GEMMs and collectives have sizes that only the run knows."""
    held = {contents.buffer for contents in schedule.contents}
    if not held:
        return 0
    steps = _steps(schedule)
    return sum(isinstance(step, Copy | Tiles | Collective) and bool(variables_of(step) & held) for step in steps)


def _signals_of_tiles(schedule: Schedule) -> int:
    """That tiles set, on the rank whose tiles set the most."""
    tiles = [step for lane in schedule.lanes for step in lane.steps if isinstance(step, Tiles)]
    sets = [(step.extent, count) for step in tiles if (count := sum(isinstance(one, Set) for one in step.body))]
    if not sets:
        return 0
    return max(sum(put_in(extent, v) * count for extent, count in sets) for v in values_of_ranks(schedule))


def least_us(problem: Problem, model: Model) -> float:
    """No schedule is faster than the GEMMs whole: pieces that are predicted to be, by measured times of small GEMMs at a
    higher clock, are not."""
    return gemms_us(problem, model, launches=False)


def library_gemms(problem: Problem) -> tuple[MatmulShape, ...]:
    """The whole GEMMs of a rank that are the library's, the largest first: those of the serial schedule."""
    (serial,) = candidates(problem, ("serial",))
    return tuple(sorted(_examined(serial, serial.build()).row.matmuls, reverse=True))


def predicted_rows(
    problem: Problem,
    model: Model,
    mode: Mode,
    needed: frozenset[str],
    progress: Progress,
    among: frozenset[str] | None = None,
) -> tuple[list[Row], dict[str, Schedule]]:
    """A row for each candidate, of all or of those `among` which it is, and the schedules by name. needed: those that are
    simulated in any case."""
    built = _built(problem, progress, needed, among)
    schedules = {one.row.candidate.name: one.schedule for one in built if one.schedule is not None}
    if not problem.has_work:
        times: dict[str, float | str] = dict.fromkeys(schedules, 0.0)
    else:
        times = _times(problem, built, model, mode, needed, progress)
    rows = [
        replace(one.row, problem=problem, model=model, rough=one.row.rough and not problem.rounds_sums) for one in built
    ]
    return [_timed(row, times.get(row.candidate.name)) for row in rows], schedules


# -- schedules

_kept: dict[tuple, list[_Built]] = {}


def _built(
    problem: Problem, progress: Progress, needed: frozenset[str] = frozenset(), among: frozenset[str] | None = None
) -> list[_Built]:
    """All candidates that calls take, or those `among` which they are, and `needed` others; those with the same schedule after
    the first one without it."""
    known = [one for one in candidates(problem) if (problem.takes(one) if among is None else one.name in among)]
    wanted = needed | (among or frozenset())
    known += [named(problem, name) for name in sorted(wanted - {candidate.name for candidate in known})]
    key = (problem, builders_of(type(problem)), tuple(candidate.name for candidate in known))
    if (kept := _kept.get(key)) is not None:
        return kept
    found: list[_Built] = []
    first: dict[tuple, list[tuple[Schedule, str]]] = {}  # by what is quickly compared
    for number, candidate in enumerate(known, 1):
        progress(f"building {number} of {len(known)}: {candidate.name}", 0.5 / len(known))
        try:
            schedule = candidate.build()
        except NotApplicableError as error:
            found.append(_Built(Row(candidate, why_not=str(error))))
            continue
        like = first.setdefault(_looks(schedule), [])
        if same := next((name for other, name in like if other == schedule), ""):
            found.append(_Built(Row(candidate, why_not=f"{SAME_AS}{same}")))
            continue
        like.append((schedule, candidate.name))
        found.append(_examined(candidate, schedule))
    _kept.clear()
    _kept[key] = found
    return found


def _looks(schedule: Schedule) -> tuple:
    """Equal for schedules that are, and mostly for no others. The hash of a large schedule takes as long as building it."""
    ends = tuple(
        (lane.name, lane.resource, len(lane.steps), lane.steps[:3], lane.steps[-3:]) for lane in schedule.lanes
    )
    return schedule.name, schedule.world_size, schedule.buffers, schedule.signals, ends


def _schedule(problem: Problem, candidate: Candidate) -> Schedule:
    kept = [one for key, built in _kept.items() if key[:2] == (problem, builders_of(type(problem))) for one in built]
    found = next((one.schedule for one in kept if one.row.candidate.name == candidate.name), None)
    return found or candidate.build()


def _examined(candidate: Candidate, schedule: Schedule) -> _Built:
    # Of rank 0, as others differ in empty steps at most. What a tile does is left out: it takes long to write in numbers.
    counts = _Counts(schedule)
    lanes = [(lane.resource, counts.of_lane(lane.steps)) for lane in schedule.lanes]
    each = [(on, priced.step, priced.operands, times) for on, lane in lanes for priced, times in lane.items()]
    matmuls = [(operands, times) for _, step, operands, times in each if _multiplies(step)]
    row = Row(
        candidate,
        gemms=sum(times for _, times in matmuls) + counts.grouped,
        steps=counts.steps,
        lanes=len(lanes),
        collectives=sum(times for _, step, _, times in each if isinstance(step, Collective)),
        copies_by_kernel=sum(
            times for on, step, _, times in each if on == "copy" and isinstance(step, Copy) and step.by == "kernel"
        ),
        reads_on_host=schedule.reads_on_host,
        late=_late(schedule),
        stops_host=schedule.stops_host,
        rough=any(
            isinstance(inner, Compute)
            and (inner.accumulate or inner.op == "addmm")
            and ITEM_BYTES[schedule.buffer(inner.out.buffer).dtype] <= 2
            for step in _steps(schedule)
            for inner in (step, *step.inner)
        ),
        stages=any(map(_stages, _steps(schedule)))
        or any(_multiplies(step) and ops[-1].at != 0 for _, step, ops, _ in each),
        matmuls=frozenset((o[-1].rows, o[-1].cols, o[0].cols, o[0].dtype) for o, _ in matmuls),
    )
    return _Built(row, schedule, tuple(lane for _, lane in lanes))


def _stages(step: Step) -> bool:
    if not isinstance(step, Tiles):
        return False
    kinds = set(map(type, step.body))
    return {Compute, Copy} <= kinds or (Set in kinds and any(map(_multiplies, step.body)))


def _multiplies(step: Step) -> bool:
    return isinstance(step, Compute) and step.op in MATMULS


def _steps(schedule: Schedule) -> Iterator[Step]:
    """Once each, however often loops turn, and loops too."""
    left = [step for lane in schedule.lanes for step in lane.steps]
    while left:
        step = left.pop()
        left += step.body if isinstance(step, For) else ()
        yield step


class _Counts:
    """What the lanes of rank 0 do, how often; empty steps are left out. Most steps have the same few sizes, which are put in
    numbers once."""

    def __init__(self, schedule: Schedule) -> None:
        self.steps = 0
        self.grouped = 0  # of tiles that multiply, each time that there are some
        self._values, self._world = values_of_ranks(schedule)[0], schedule.world_size
        self._buffers = {buffer.name: buffer for buffer in schedule.buffers}
        self._operands: dict[tuple, Operand] = {}
        self._known: dict[tuple, _Priced | None] = {}  # by what is quickly compared
        self._first: dict[tuple, _Priced] = {}  # by what it is in numbers

    def of_lane(self, steps: Sequence[Step]) -> Counter[_Priced]:
        times: Counter[int] = Counter()  # by identity: a step's hash goes through all that it has
        for step, turn in self._written_out(steps, {}):
            # Most are copies and GEMMs, whose accesses need not be put together to know that there are some.
            if isinstance(step, (Copy, Compute)) or (not isinstance(step, (Read, Set, Wait)) and step.accesses()):
                if (priced := self._priced(step, turn)) is None:
                    continue
                times[id(priced)] += 1
            elif isinstance(step, Tiles):
                if not put_in(step.extent, {**self._values, **turn}):
                    continue
                self.grouped += any(map(_multiplies, step.body))
            self.steps += 1
        return Counter({priced: times[id(priced)] for priced in self._first.values() if id(priced) in times})

    def _priced(self, step: Step, turn: dict[str, int]) -> _Priced | None:
        """The step without its place; None if it is empty."""
        if turn:
            return self._in_numbers(step, turn)
        key = key_of(step)
        if key not in self._known:
            self._known[key] = self._in_numbers(step, turn)
        return self._known[key]

    def _in_numbers(self, step: Step, turn: dict[str, int]) -> _Priced | None:
        operands = tuple(self._operand(region, turn) for region in regions_of(step))
        if isinstance(step, Collective):
            sent = enumerate(put_in(step.sent, {**self._values, **turn}))
            operands += tuple(operands[0]._replace(rows=rows, at=to) for to, rows in sent)
        else:
            if any(0 in (operands[number].rows, operands[number].cols) for number in step.decisive):
                return None
        kind = (type(step), step.settings, operands)
        return self._first.setdefault(kind, _Priced(step, operands))

    def _written_out(self, steps: Sequence[Step], turn: dict[str, int]) -> Iterator[tuple[Step, dict[str, int]]]:
        for step in steps:
            if isinstance(step, For):
                for i in range(put_in(step.extent, {**self._values, **turn})):
                    yield from self._written_out(step.body, {**turn, step.index: i})
            else:
                yield step, turn

    def _operand(self, region: Region, turn: dict[str, int]) -> Operand:
        key = (region.buffer, region.rows, region.cols, region.at)
        if (known := self._operands.get(key)) is not None:
            return known
        buffer, values = self._buffers[region.buffer], {**self._values, **turn}
        rows, cols, at = (put_in(n, values) for n in (region.rows, region.cols, region.at))
        found = Operand(rows, cols, buffer.dtype, at % self._world, cols == buffer.cols)
        if not turn:
            self._operands[key] = found
        return found


# -- times


def _timed(row: Row, time: float | str | None) -> Row:
    if isinstance(time, str):
        return replace(row, why_not=time)
    return row if time is None else replace(row, predicted_us=time)


def _times(
    problem: Problem, built: list[_Built], model: Model, mode: Mode, needed: frozenset[str], progress: Progress
) -> dict[str, float | str]:
    """Microseconds of runs, or why there is no need to know: compared with those of candidates that graphs can capture, too,
    where it is one."""
    least = 0.0 if mode == "single" else least_us(problem, model)
    there = {one.row.candidate.name: (one, one.schedule) for one in built if one.schedule is not None}
    bounds = {name: max(least, _least_us(one, model, mode)) for name, (one, _) in there.items()}
    best, best_captured = float("inf"), float("inf")
    times: dict[str, float | str] = {}
    for number, name in enumerate(sorted(bounds, key=lambda name: (name not in needed, bounds[name])), 1):
        progress(f"simulating {number} of {len(bounds)}: {name}", 0.5 / len(bounds))
        one, schedule = there[name]
        if bounds[name] > HOPELESS * (best if one.row.reads_on_host else best_captured) and name not in needed:
            times[name] = f"{AT_LEAST} {bounds[name]:.1f} us"
            continue
        times[name] = us = predict(schedule, model, mode, least)
        best = min(best, us)
        best_captured = best_captured if one.row.reads_on_host else min(best_captured, us)
    return times


def _least_us(built: _Built, model: Model, mode: Mode) -> float:
    """A run is no shorter: the longest lane's steps, each alone, and for a single one the host's time for all."""
    host_us = built.row.steps * model.host_step_us if mode == "single" else 0.0
    return max(host_us, _lanes_us(built, model))


def _lanes_us(built: _Built, model: Model) -> float:
    """Of the longest lane. Latencies of copies by kernel are not counted, since one kernel may do several of them."""
    assert built.schedule is not None
    longest = 0.0
    for lane in built.lanes:
        us = 0.0
        for priced, times in lane.items():
            found = cost(model, built.schedule.world_size, priced.step, priced.operands)
            one_kernel = isinstance(priced.step, Copy) and priced.step.by == "kernel"
            us += times * (found.work_us + (0.0 if one_kernel else found.latency_us))
        longest = max(longest, us)
    return longest
