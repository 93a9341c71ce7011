"""What the benchmarks of operators with a GEMM measure and run: shapes, from `benchmarks/shapes/OP.toml`, each with where it comes
from, or as typed; which schedules run beside what the operator chooses; and what the planner says of them.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

import weft
from weft import plan
from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Workload
from weft.bench.core.run import free_bytes
from weft.operator import choosing
from weft.operator.calls import prepared_calls
from weft.plan.choose import decide
from weft.plan.predict import least_us, predict
from weft.schedule import ITEM_BYTES, Candidate, NotApplicableError, Schedule, candidates, named
from weft.sim import Model

BASELINE, WEFT, OWN_SERIAL = "serial", "weft", "weft-serial"
"""Variants: the baseline, what the operator chooses, and its serial schedule when pinned."""
ALL = "all"
CPU_GROUP = "cpu"
"""The group of shapes that run on CPUs by default; the others run on GPUs."""

_SYMMETRIC = "-symmetric"
_MEMORY_SHARE = 0.5  # of what is free, for the schedules of one run: each keeps its buffers


class Shape(ABC):
    """What is measured; of one name all are alike."""

    sources: tuple[str, ...]
    written: ClassVar[str]
    """How one is typed."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @classmethod
    @abstractmethod
    def named(cls, name: str, groups: Mapping[str, Any]) -> Sequence[Shape]:
        """Those of a group of the file, or the one that is typed; none if `name` is neither."""

    @property
    def about(self) -> str:
        return "; ".join(self.sources) or "as asked for"


@dataclass(frozen=True)
class MatmulShape(Shape):
    """[m, k] @ [k, n], n on each rank. symmetric: peers can read the input where it lies."""

    m: int
    n: int
    k: int
    sources: tuple[str, ...] = ()
    symmetric: bool = False

    written = f"MxNxK such as 8192x4096x8192; with {_SYMMETRIC} behind it, inputs lie in symmetric memory"

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}{_SYMMETRIC * self.symmetric}"

    @classmethod
    def named(cls, name: str, groups: Mapping[str, Any]) -> list[MatmulShape]:
        plain, symmetric = name.removesuffix(_SYMMETRIC), name.endswith(_SYMMETRIC)
        typed = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", plain)
        if typed and plain not in groups:
            return [cls(int(typed[1]), int(typed[2]), int(typed[3]), symmetric=symmetric)]
        return [replace(shape, symmetric=symmetric) for shape in cls._of_group(plain, groups.get(plain, {}))]

    @classmethod
    def _of_group(cls, name: str, group: Mapping[str, Any]) -> Iterator[MatmulShape]:
        for m, n, k in group.get("shapes", []):
            yield cls(m, n, k, (name,))
        for layer, given in group.get("layers", {}).items():
            for m in given.get("m", group.get("m", [])):
                yield cls(m, given["n"], given["k"], (f"{name} {layer}",))


S = TypeVar("S", bound=Shape)


def shapes_file(op: str) -> Path:
    return Path(weft.__file__).parents[1] / "benchmarks" / "shapes" / f"{op}.toml"


def find_shapes(kind: type[S], file: Path, preset: str | None, device: str) -> tuple[S, ...]:
    """Those of all groups that suit the device, or of the groups and shapes that `preset` names, with commas between; each once,
    with all its sources. Raises ValueError for a name that is neither."""
    groups = tomllib.loads(file.read_text()) if file.exists() else {}
    suiting = [group for group in groups if (group == CPU_GROUP) == (device == "cpu")]
    found: dict[str, Any] = {}
    for name in suiting if preset is None else map(str.strip, preset.split(",")):
        shapes = kind.named(name, groups)
        if not shapes:
            known = ", ".join(groups) or f"nothing (there is no {file}: shapes are in the repository, not in the wheel)"
            raise ValueError(f"no preset {name!r}: give one of {known}, or a shape {kind.written}")
        for shape in shapes:
            same = found.get(shape.name, shape)
            found[shape.name] = replace(same, sources=tuple(dict.fromkeys((*same.sources, *shape.sources))))
    return tuple(found.values())


Problems = Sequence[tuple[Any, str]]
"""Descriptions of the calls of a shape, each with the suffix of the variants that make it."""


class Pinned(NamedTuple):
    variant: str
    candidate: Candidate
    schedule: Schedule


def _candidates(problems: Problems, variants: Sequence[str]) -> Iterator[tuple[str, Candidate]]:
    """(variant, candidate) of those that the planner tries, and of `variants` that are names of others, with other numbers."""
    for p, suffix in problems:
        others = []
        for name in variants:
            with contextlib.suppress(ValueError):
                others.append(named(p, name))
        for candidate in (*candidates(p), *others):
            yield (OWN_SERIAL if candidate.name == "serial" else candidate.name) + suffix, candidate


def wanted_schedules(problems: Problems, wanted: Sequence[str], fixed: Sequence[str]) -> list[Pinned]:
    """Those that can be, whose variant begins like one of `wanted` that is not `fixed`, or all; of equal schedules under several
    names the first."""
    begins = tuple("" if v == ALL else v for v in wanted if v not in fixed)
    found: dict[tuple[Schedule, str], Pinned] = {}
    for p, suffix in problems:
        for variant, candidate in _candidates([(p, suffix)], wanted):
            if variant.startswith(begins):
                with contextlib.suppress(NotApplicableError):
                    schedule = candidate.build()
                    found.setdefault((schedule, suffix), Pinned(variant, candidate, schedule))
    return list(found.values())


def check_variants(variants: Sequence[str], shapes: Sequence[Problems], fixed: Sequence[str]) -> None:
    """Raise ValueError for one that is neither `fixed`, nor "all", nor how the variant of a schedule begins, or whose schedules can
    do none of the shapes."""
    for variant in _naming(variants, fixed) if shapes else ():
        if not any(one.startswith(variant) for one, _ in _candidates(shapes[0], [variant])):
            names = [candidate.name for candidate in candidates(shapes[0][0][0])]
            builders = ", ".join(dict.fromkeys(name.split("[")[0] for name in names if "[" in name))
            raise ValueError(
                f"no variant {variant!r}: give {', '.join((*fixed, OWN_SERIAL, ALL))}, or how names of schedules begin: "
                f"{builders}, such as {names[-1]}"
            )
        left = [_why_not(variant, problems) for problems in shapes]
        if all(left):
            raise ValueError(f"variant {variant!r} cannot do any of these shapes: {left[0]}")


def cannot(variants: Sequence[str], problems: Problems, fixed: Sequence[str]) -> list[str]:
    """Notes of a shape on those of `variants` that are left out because their schedules cannot do it."""
    found = {variant: _why_not(variant, problems) for variant in _naming(variants, fixed)}
    return [f"not measured, {variant}: {why}" for variant, why in found.items() if why]


def _naming(variants: Sequence[str], fixed: Sequence[str]) -> list[str]:
    """Those that name schedules."""
    return [variant for variant in variants if variant not in (*fixed, OWN_SERIAL, ALL)]


def _why_not(variant: str, problems: Problems) -> str:
    """Why none of the schedules that `variant` names can do a shape; empty if one can."""
    reasons: dict[str, None] = {}
    for one, candidate in _candidates(problems, [variant]):
        if one.startswith(variant):
            try:
                candidate.build()
                return ""
            except NotApplicableError as error:
                reasons[str(error)] = None
    return "; ".join(reasons) or "none of its schedules begins so"


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
