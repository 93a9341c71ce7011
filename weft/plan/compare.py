"""A comparison of all schedules of a problem on a machine, with serial and with a lower bound.

`weft.plan.choose` simulates only schedules that may be the fastest. A comparison simulates every schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.builders import EmbeddingAllToAll, Problem, named
from weft.errors import ScheduleError
from weft.hw import Machine
from weft.hw.topology import hosts
from weft.hw.topology.infragraph import Graph
from weft.plan.explain import MOST_OF_A_TORUS, algorithms_text, problem_on_machine
from weft.plan.predict import Progress, Row, predicted_rows
from weft.schedule import RANK, Schedule
from weft.sim import Mode, Model, Simulated, simulate
from weft.sim.bounds import Bound, bound, bound_of
from weft.sim.chakra import Trace, chakra_trace
from weft.sim.orbits import MOST_RANKS, orbit, orbit_us
from weft.sim.orbits import NAMES as ORBITS
from weft.words import decimal_us, in_us

HEADER = ("schedule", "predicted us", "speedup", "exposed us", "x bound")


@dataclass(frozen=True)
class Compared:
    """The results for one schedule. If it was not simulated, times are None, and `why_not` has the reason."""

    name: str
    us: float | None = None
    speedup: float | None = None  # serial's time / us
    exposed_us: float | None = None  # time without computation; None if kernels send while they compute
    over_bound: float | None = None  # us / the bound
    why_not: str = ""
    algorithms: tuple[str, ...] = ()
    """The algorithms of the schedule's collectives, such as "all_gather by ring" (`weft.sim.collectives`)."""


@dataclass(frozen=True)
class Comparison:
    """The simulated times of the schedules of an operator on one machine, with a lower bound of the time."""

    problem: Problem
    machine: Machine
    model: Model = field(repr=False)
    mode: Mode
    notes: tuple[str, ...]
    """Sentences on the sources of the model's numbers."""
    bound: Bound
    rows: tuple[Compared, ...]
    """The schedules, the fastest first. Schedules without a time are last."""
    schedules: dict[str, Schedule] = field(repr=False)
    """{name: simulated schedule}; empty if one rank of a torus represents all ranks."""

    def simulated(self, name: str) -> Simulated:
        """Return one simulated run of the schedule `name`, with its timeline. Raise `ValueError` if the schedule was
        not simulated.
        """
        return simulate(self._schedule(name), self.model, mode=self.mode, trusted=True)

    def chakra(self, name: str, prefix: str = "weft") -> Trace:
        """Return the schedule `name` as a Chakra execution trace. The names of its files begin with `prefix`."""
        return chakra_trace(self._schedule(name), self.model, prefix)

    def _schedule(self, name: str) -> Schedule:
        if not self.schedules:
            raise ValueError(_untraceable(self.problem.world_size))
        if name not in self.schedules:
            row = next((row for row in self.rows if row.name == name), None)
            why = f": {row.why_not}" if row else f": use one of {', '.join(self.schedules)}"
            raise ValueError(f"schedule {name!r} was not simulated{why}")
        return self.schedules[name]

    def facts(self) -> list[tuple[str, str]]:
        """Return the lines that are printed above the table of schedules, as (label, text)."""
        each = f"GEMMs or pooling {decimal_us(self.bound.compute_us)}, links {decimal_us(self.bound.links_us)}"
        named = {row.name: row.algorithms for row in self.rows}
        return [
            ("operator", f"{self.problem.operator}: {self.problem.text}, {self.mode}"),
            ("machine", "; ".join([self.machine.name, *self.notes])),
            *([("collectives", algorithms_text(named))] if any(named.values()) else []),
            ("bound", f"max({each}) = {in_us(self.bound.us)}: no schedule is faster"),
        ]

    def cells(self) -> list[tuple[str, ...]]:
        """Return a row of the table for each schedule that has a time."""
        return [
            (row.name, decimal_us(row.us), _factor(row.speedup), "" if row.exposed_us is None else decimal_us(row.exposed_us),
             _factor(row.over_bound))
            for row in self.rows if row.us is not None
        ]  # fmt: skip

    def left_out(self) -> list[str]:
        """Return lines on the schedules that have no time, one for each reason."""
        by_reason: dict[str, list[str]] = {}
        for row in self.rows:
            if row.us is None:
                by_reason.setdefault(row.why_not, []).append(row.name)
        return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]

    def as_json(self) -> dict[str, Any]:
        """Return all results as JSON values, with times in microseconds."""
        rows = [
            {"schedule": row.name, "us": row.us, "speedup": row.speedup, "exposed_us": row.exposed_us,
             "over_bound": row.over_bound, "algorithms": row.algorithms, "why_not": row.why_not}
            for row in self.rows
        ]  # fmt: skip
        found = self.bound
        return {
            "op": self.problem.operator, "problem": self.problem.text, "ranks": self.problem.world_size, "mode": self.mode,
            "machine": self.machine.name, "notes": self.notes, "bound_us": found.us, "bound_compute_us": found.compute_us,
            "bound_links_us": found.links_us, "schedules": rows,
        }  # fmt: skip


def comparison(
    op: str, *, M: int, N: int, K: int, ranks: int, hw: str | Path | None, dtype: str, topology: str | Path | None = None,
    mode: Mode = "queued", schedules: Sequence[str] = (), written: Sequence[str] = (),
    progress: Progress = lambda what, share: None, **options: Any,
) -> Comparison:  # fmt: skip
    """Simulate the schedules of `op`, and return their times.

    op, M, N, K, hw, topology, mode, options: see `weft.plan.explain`.
    schedules: the names of the schedules to simulate in addition to the serial schedule. Default: all schedules that calls may use.
    written: the names of schedules that are simulated too, because the caller will write their traces.

    More than `MOST_RANKS` ranks are supported only for embeddings on a torus (`weft.sim.orbits`).

    Raise `ScheduleError` if no schedule fits in memory, `ValueError` for an unknown schedule, and the errors of
    `explain`. All arguments are checked before anything is built or simulated.
    """
    schedules, written = _names("schedules", schedules), _names("written", written)
    machine, model, notes, problem = problem_on_machine(
        op, M=M, N=N, K=K, ranks=ranks, hw=hw, topology=topology, dtype=dtype, mode=mode,
        most=MOST_OF_A_TORUS if op == EmbeddingAllToAll.name else MOST_RANKS, **options
    )  # fmt: skip
    for name in written:
        named(problem, name)
    schedules = (*schedules, *written) if schedules else ()
    if problem.world_size > MOST_RANKS:
        if written:
            raise ValueError(_untraceable(problem.world_size))
        return _of_orbits(problem, machine, model, mode, notes, schedules, progress)
    among = frozenset({"serial", *(named(problem, name).name for name in schedules)}) if schedules else None
    count = _hosts_of(model, problem.world_size)
    between = frozenset(problem.between_hosts(count)) if count > 1 and not schedules else frozenset()
    rows, built = predicted_rows(
        problem, model, mode, between, lambda what, share: progress(what, 0.8 * share), among, every=True
    )
    timed = [row for row in rows if row.us is not None]
    if not timed:
        raise ScheduleError(
            f"no schedule of {problem.name} can be simulated ({rows[0].candidate.name}: {rows[0].why_not})"
        )
    least = bound(problem, model)
    serial = next((row.us for row in timed if row.candidate.name == "serial"), None)
    compared = []
    for row in rows:
        progress(f"simulating {row.candidate.name} once", 0.2 / len(rows))
        compared.append(_compared(row, built, model, mode, least, serial))
    compared.sort(key=lambda row: (row.us is None, row.us or 0.0))
    kept = {row.candidate.name: built[row.candidate.name] for row in timed}
    return Comparison(problem, machine, model, mode, notes, least, tuple(compared), kept)


def _untraceable(ranks: int) -> str:
    return f"{ranks} ranks cannot be traced: use at most {MOST_RANKS} ranks"


def _hosts_of(model: Model, ranks: int) -> int:
    """Return the number of hosts of the topology. Return 0 unless all hosts have the same number of ranks, and at least
    two ranks each.
    """
    dims = model.wiring.of(ranks).dims
    builder = model.wiring.builder
    has_hosts = builder.hosts if isinstance(builder, Graph) else builder is hosts
    return dims[1] if has_hosts and dims and dims[0] > 1 else 0


def _names(what: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"{what}={given!r} must be a list of names of schedules, such as ['serial']")
    return tuple(given)


def _of_orbits(
    problem: Problem, machine: Machine, model: Model, mode: Mode, notes: tuple[str, ...], schedules: Sequence[str],
    progress: Progress,
) -> Comparison:  # fmt: skip
    if mode != "queued":
        raise ValueError(f"mode={mode!r} is not supported for {problem.world_size} ranks: use mode='queued'")
    names = [name for name in dict.fromkeys(schedules or ORBITS) if name != "serial"]
    share = 1 / (2 + len(names))
    progress("simulating serial", share)
    serial = orbit(problem, model, "serial")
    progress("simulating serial once", share)
    serial_us, least = orbit_us(serial, model), bound_of(serial.program)
    exposed_us = orbit(problem, model, "serial", runs=1).exposed_us
    rows = [Compared("serial", serial_us, 1.0, exposed_us, serial_us / least.us, algorithms=("all_to_all by direct",))]
    for name in names:
        progress(f"simulating {name}", share)
        us = orbit_us(orbit(problem, model, name), model)
        rows.append(Compared(name, us, serial_us / us, None, us / least.us))
    rows.sort(key=lambda row: row.us or 0.0)
    notes = (*notes, "one rank of the torus represents all")
    return Comparison(problem, machine, model, mode, notes, least, tuple(rows), {})


def _compared(
    row: Row, built: dict[str, Schedule], model: Model, mode: Mode, least: Bound, serial_us: float | None
) -> Compared:
    name = row.candidate.name
    if row.us is None:
        return Compared(name, why_not=row.why_not)
    sending = row.stages or _stores_at_peers(built[name])
    exposed_us = None if sending else simulate(built[name], model, mode=mode, trusted=True).exposed_us
    speedup = serial_us / row.us if serial_us else None
    over = row.us / least.us if least.us else None
    return Compared(name, row.us, speedup, exposed_us, over, algorithms=row.algorithms)


def _stores_at_peers(schedule: Schedule) -> bool:
    """True if a GEMM or another kernel stores its results in a peer's memory."""
    steps = (inner for step in schedule.walk() for inner in (step, *step.inner))
    return any(step.kind == "compute" and step.regions[-1].at != RANK for step in steps)


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
