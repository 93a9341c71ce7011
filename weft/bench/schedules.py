"""Which schedules of an operator a benchmark runs beside what the operator chooses, and what the planner says of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from weft import plan
from weft.bench.harness import Mode, Ranks
from weft.bench.measure import Workload
from weft.operator import choosing
from weft.operator.calls import prepared_calls
from weft.plan.choose import decide
from weft.plan.predict import least_us, predict
from weft.schedule import ITEM_BYTES, Candidate, NotApplicableError, Schedule, candidates, named
from weft.sim import Model

WEFT, OWN_SERIAL = "weft", "weft-serial"
"""Variants: what the operator chooses, and its serial schedule when pinned."""
ALL = "all"

_MEMORY_SHARE = 0.5  # of what is free, for the schedules of one run: each keeps its buffers


class Pinned(NamedTuple):
    variant: str
    candidate: Candidate
    schedule: Schedule


def wanted_schedules(p: Any, wanted: Sequence[str], fixed: Sequence[str], suffix: str = "") -> list[Pinned]:
    """Of all that can do `p`, those whose variant begins like one of `wanted` that is not `fixed`, or all; of equal schedules
    under several names the first. A variant is the schedule's name and `suffix`."""
    found: dict[Schedule, Pinned] = {}
    for candidate in (*candidates(p), *_with_other_numbers(p, wanted)):
        variant = (OWN_SERIAL if candidate.name == "serial" else candidate.name) + suffix
        if not any(v == ALL or (v not in fixed and variant.startswith(v)) for v in wanted):
            continue
        try:
            schedule = candidate.build()
        except NotApplicableError:
            continue
        found.setdefault(schedule, Pinned(variant, candidate, schedule))
    return list(found.values())


def _with_other_numbers(p: Any, wanted: Sequence[str]) -> list[Candidate]:
    """Those of `wanted` that are names of schedules which the planner does not try."""
    found = []
    for name in wanted:
        with contextlib.suppress(ValueError):
            found.append(named(p, name))
    return found


def check_variants(variants: Sequence[str], p: Any, fixed: Sequence[str], suffixes: Sequence[str] = ("",)) -> None:
    """Raise ValueError for one that is neither `fixed`, nor "all", nor how the variant of a schedule begins."""
    names = [c.name for c in candidates(p)]
    for variant in variants:
        if variant in (*fixed, OWN_SERIAL, ALL):
            continue
        begins = any((name + suffix).startswith(variant) for name in (*names, OWN_SERIAL) for suffix in suffixes)
        if not (begins or _with_other_numbers(p, [variant])):
            builders = ", ".join(dict.fromkeys(name.split("[")[0] for name in names if "[" in name))
            raise ValueError(
                f"no variant {variant!r}: give {', '.join((*fixed, OWN_SERIAL, ALL))}, or how names of schedules begin: "
                f"{builders}, such as {names[-1]}"
            )


def check_applicable(
    variants: Sequence[str], shapes: Sequence[Sequence[tuple[Any, str]]], fixed: Sequence[str]
) -> None:
    """Raise ValueError for one that is the name of schedules of which none can do any shape. shapes: of each its descriptions,
    with the suffix of their variants."""
    left = [_not_applicable(variants, problems, fixed) for problems in shapes]
    for variant in variants:
        if left and all(variant in why for why in left):
            raise ValueError(f"variant {variant!r} cannot do any of these shapes: {left[0][variant]}")


def cannot(variants: Sequence[str], problems: Sequence[tuple[Any, str]], fixed: Sequence[str]) -> list[str]:
    """Notes of a shape on those of `variants` that are left out because their schedules cannot do it."""
    return [f"not measured, {variant}: {why}" for variant, why in _not_applicable(variants, problems, fixed).items()]


def _not_applicable(
    variants: Sequence[str], problems: Sequence[tuple[Any, str]], fixed: Sequence[str]
) -> dict[str, str]:
    """Of `variants` those that name schedules of which none can do a shape, and why."""
    found = {}
    for variant in variants:
        if variant in (*fixed, OWN_SERIAL, ALL):
            continue
        reasons: dict[str, None] = {}
        if not any(_applies(variant, p, suffix, reasons) for p, suffix in problems):
            found[variant] = "; ".join(reasons)
    return found


def _applies(variant: str, p: Any, suffix: str, reasons: dict[str, None]) -> bool:
    """Whether one of the schedules that `variant` names can do `p`; why those cannot that were tried is added to `reasons`."""
    for candidate in (*candidates(p), *_with_other_numbers(p, [variant])):
        if (candidate.name + suffix).startswith(variant):
            try:
                candidate.build()
                return True
            except NotApplicableError as error:
                reasons[str(error)] = None
    return False


def fitting(found: Sequence[Pinned], ranks: Ranks) -> tuple[list[Pinned], list[str]]:
    """(those for which there is memory, a note on the others). Collective."""
    free, kept, left_out = _MEMORY_SHARE * -ranks.most(-free_bytes(ranks)), [], []
    for one in found:
        buffers = [b for b in one.schedule.buffers_of_rank(0) if b.role in ("symmetric", "scratch")]
        free -= sum(int(b.rows) * b.cols * ITEM_BYTES[b.dtype] for b in buffers)
        if free < 0:
            left_out.append(one.variant)
        else:
            kept.append(one)
    return kept, [f"not measured, no memory: {', '.join(left_out)}"] if left_out else []


def free_bytes(ranks: Ranks) -> float:
    """This rank's share of the memory that is free."""
    if ranks.device.type == "cuda":
        return float(torch.cuda.mem_get_info(ranks.device)[0])
    from weft.hw import available_memory_bytes

    return available_memory_bytes() / ranks.world_size


def check_room(name: str, input_bytes: float, output_elements: int, ranks: Ranks) -> None:
    """Raise ValueError where the inputs and the float64 reference of a rank take more than is free. Collective."""
    needed, free = input_bytes + 8 * output_elements, -ranks.most(-free_bytes(ranks))
    if needed > free:
        raise ValueError(
            f"{name} needs {needed / 1e9:.1f} GB on each rank for inputs and the float64 reference, and {free / 1e9:.1f} GB are "
            f"free: name a smaller shape"
        )


PLANNED_MODES: tuple[plan.Mode, ...] = ("queued", "graph")
"""An operator takes the same schedule for single calls as for queued ones."""


@dataclass(frozen=True)
class Planned:
    """What the planner predicts for each schedule: milliseconds of one of many calls, in a mode. Calibrated by GEMMs of the very
    shape that the first call has timed, and blind, by the machine's file (and `weft plan calibrate`) alone."""

    calibrated_ms: dict[str, float]
    blind_ms: dict[str, float]

    @staticmethod
    def of(choice: plan.Choice, model: Model, taken: str) -> Planned:
        """model: the machine's, which may know GEMMs. taken: a schedule that is wanted even if it is predicted to be hopeless."""
        blind, p = model.with_measured({}), choice.problem
        unseen = decide(p, blind, mode=choice.mode)
        times = [
            {row.candidate.name: row.predicted_us / 1e3 for row in rows if row.predicted_us is not None}
            for rows in (choice.rows, unseen.rows)
        ]
        if taken not in times[1]:
            times[1][taken] = predict(named(p, taken).build(), blind, choice.mode, least_us(p, blind)) / 1e3
        return Planned(*times)


class PlannedWorkload(Workload):
    """Of an operator's problem, with what its planner says of it."""

    problem: Any
    spec: Any

    @cached_property
    def choices(self) -> dict[Mode, plan.Choice]:
        """What the planner says of queued and of captured calls; nothing where it does not know the machine, and the operator
        measures instead. Look at it after the operator's first call, which is timed and should not find the choice made."""
        model = self._model()
        if model is None:
            return {}
        return {mode: choosing.planned(self.problem, model, self.ranks.device, mode) for mode in PLANNED_MODES}

    @cached_property
    def planned(self) -> dict[Mode, Planned]:
        model = self._model()
        return {m: Planned.of(choice, model, self.taken(m)) for m, choice in self.choices.items() if model is not None}

    def taken(self, mode: Mode) -> str:
        """Which schedule the operator took, where none was pinned; serial if it was not called."""
        calls = prepared_calls(self.spec, self.ranks.group)
        found = [call.taken for call in calls if call.pinned is None and call.p == self.problem]
        return found[-1][mode == "graph"] if found else "serial"

    def twins(self, mode: Mode) -> dict[str, str]:
        return {WEFT: "serial"} if self.taken(mode) == "serial" else {}

    def _model(self) -> Model | None:
        world = self.ranks.world_size
        return None if world == 1 else choosing.machine_model(self.ranks.device, world)


def schedule_of(variant: str, taken: str) -> str:
    """The name of what a variant runs, where the operator takes `taken` if nobody pins it."""
    return {WEFT: taken, OWN_SERIAL: "serial"}.get(variant, variant)


def gemm_limit(dtype: torch.dtype, k: int, of_torch: float | None, roundings: int = 1) -> float:
    """What a GEMM's output may err, relative to the largest element.

    of_torch: what torch's own GEMM errs in this dtype; twice that (but no less than half a rounding of the largest element),
    times how often an output is rounded. None: torch's own, a few roundings and those of k additions in fp32.
    """
    eps = torch.finfo(dtype).eps
    if of_torch is None:
        return 4 * eps + k * torch.finfo(torch.float32).eps
    return 2 * max(of_torch, eps / 4) * roundings
