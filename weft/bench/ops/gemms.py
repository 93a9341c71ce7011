"""Shapes and pinned schedules for the benchmarks of operators with a GEMM.

Shapes come from `benchmarks/shapes/OP.toml`, which gives their sources, or from the command line.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch

import weft
from weft import reading
from weft.bench.core.harness import Ranks
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import free_bytes
from weft.bench.core.tables import Record
from weft.builders import Candidate, NotApplicableError, candidates, described, named
from weft.schedule import ITEM_BYTES, Compute, Schedule

BASELINE, WEFT, OWN_SERIAL = "serial", "weft", "weft-serial"
"""Variants: the baseline, the operator with its selected schedule, and its pinned serial schedule."""
ALL = "all"
CPU_GROUP = "cpu"
"""The group of shapes that run on CPUs by default; the other groups run on GPUs."""

Problems = Sequence[tuple[Any, str]]
"""For each kind of call of a shape: (problem, suffix of the names of its variants, such as "-bounded")."""

_SYMMETRIC = "-symmetric"
MEMORY_SHARE = 0.5
"""The fraction of free memory that the buffers of all measured schedules may take: each schedule keeps its buffers."""


@dataclass(frozen=True)
class GemmShape:
    """A shape to measure, [m, k] @ [k, n]. n is the number of columns that one rank computes.

    sources: where the shape is from, such as a layer of a model.
    symmetric: True if the input is in symmetric memory, so that peers can read it there.
    own: the values of options that only this operator has, as pairs (name, value).
    written: how to write a shape on the command line. example: a small shape, written like this.
    """

    m: int
    n: int
    k: int
    sources: tuple[str, ...] = ()
    symmetric: bool = False
    own: tuple[tuple[str, Any], ...] = field(default=(), kw_only=True)

    written: ClassVar[str] = (
        f"MxNxK of integers above 0 such as 8192x4096x8192; append {_SYMMETRIC} to put the inputs into symmetric memory"
    )
    example: ClassVar[str] = "512x1024x256"

    @property
    def name(self) -> str:
        own = "".join(f" {name}={value}" for name, value in self.own)
        return f"{self.m}x{self.n}x{self.k}{_SYMMETRIC * self.symmetric}{own}"

    @property
    def about(self) -> str:
        return "; ".join(self.sources) or "from the command line"

    @classmethod
    def named(cls, name: str, groups: Mapping[str, Any]) -> list[Self]:
        """Return the shapes of group `name`, or the shape that `name` spells out, such as 8192x4096x8192. Empty for
        other names.

        groups: the content of the file of shapes.
        """
        plain, symmetric = name.removesuffix(_SYMMETRIC), name.endswith(_SYMMETRIC)
        typed = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", plain)
        if typed and plain not in groups:
            return [cls(int(typed[1]), int(typed[2]), int(typed[3]), symmetric=symmetric)]
        group = groups.get(plain, {})
        return [cls(m, n, k, (plain,), symmetric) for m, n, k in group.get("shapes", [])] + [
            cls(m, layer["n"], layer["k"], (f"{plain} {of_layer}",), symmetric)
            for of_layer, layer in group.get("layers", {}).items()
            for m in layer.get("m", group.get("m", []))
        ]

    def problems(self, op: str, ranks: int, dtype: str) -> Problems:
        return [(described(op, m=self.m, n=self.n, k=self.k, ranks=ranks, dtype=dtype, **dict(self.own)), "")]

    def bytes(self, ranks: int, item_bytes: int) -> float:
        """Return the bytes of a rank's inputs plus its output in float64."""
        return (self.m + self.n) * self.k * item_bytes + 8 * self.m * self.n


S = TypeVar("S", bound=GemmShape)


def serial_twin(record: Record) -> str | None:
    """Return the variant with which to compare `record`, a record of weft's own serial schedule: another variant that
    runs the same code. On GPUs this is the baseline. On CPU it is weft's pinned serial schedule, because weft's
    collectives use shared memory and the baseline uses gloo. None if there is no such variant.
    """
    if record["device"] == "cuda":
        return BASELINE
    return OWN_SERIAL if record["variant"] == WEFT else None


def shapes_file(op: str) -> Path:
    """Return the path of the operator's file of shapes. Operators without their own file share one."""
    shapes = Path(weft.__file__).parents[1] / "benchmarks" / "shapes"
    return shapes / f"{op if (shapes / f'{op}.toml').exists() else 'all_gather_matmul'}.toml"


def find_shapes(kind: type[S], file: Path, options: BenchOptions) -> tuple[S, ...]:
    """Return the shapes that `options.preset` names, groups or single shapes; by default all groups for this device.

    kind: the class of the shapes. A shape that occurs in several groups is returned once. Each shape gets the
    operator's own options from `options.option`. Raises ValueError for an unknown name.
    """
    groups = reading.read_toml(file) if file.exists() else {}
    suiting = [group for group in groups if (group == CPU_GROUP) == (options.device == "cpu")]
    found: dict[str, Any] = {}
    for name in options.presets or suiting:
        shapes = kind.named(name, groups)
        if not shapes:
            known = ", ".join(groups) or f"nothing (there is no {file}: shapes are in the repository, not in the wheel)"
            if name[0].isdigit():
                raise ValueError(
                    f"{name!r} is not a known shape: write {kind.written}; or give one of the presets {known}"
                )
            raise ValueError(f"no preset {name!r}: give one of {known}, or a shape {kind.written}")
        for shape in shapes:
            same = found.get(shape.name, shape)
            found[shape.name] = replace(
                same, own=options.option, sources=tuple(dict.fromkeys((*same.sources, *shape.sources)))
            )
    return tuple(found.values())


def check_room(shape: GemmShape, ranks: Ranks, item_bytes: int) -> None:
    """Raise ValueError if the inputs and the float64 reference of a rank exceed the free memory. All ranks must make
    this call.
    """
    needed, free = shape.bytes(ranks.world_size, item_bytes), free_bytes(ranks)
    if needed > free:
        needs = f"{needed / 1e9:.1f} GB on each rank for inputs and the float64 reference"
        raise ValueError(f"{shape.name} needs {needs}, but {free / 1e9:.1f} GB are free: name a smaller shape")


class Pinned(NamedTuple):
    variant: str
    candidate: Candidate
    schedule: Schedule


def _beginning(problems: Problems, names: Sequence[str]) -> Iterator[tuple[str, str, Candidate]]:
    """Find the variants with a pinned schedule whose names begin with one of `names`. Yield (suffix, variant,
    candidate) for each. The candidate is the pinned schedule: a schedule that the planner would try, or whose full name
    is in `names`.

    problems: the kinds of calls of a shape, as pairs (problem, suffix of the variants' names, such as "-bounded").
    """
    begins = tuple("" if name == ALL else name for name in names)
    for p, suffix in problems:
        others = []
        for name in names:
            with contextlib.suppress(ValueError):
                others.append(named(p, name))
        for candidate in (*candidates(p), *others):
            variant = (OWN_SERIAL if candidate.name == "serial" else candidate.name) + suffix
            if variant.startswith(begins) and not (suffix and candidate.name == "serial"):
                yield suffix, variant, candidate


def pinned_schedules(problems: Problems, names: Sequence[str], ranks: Ranks) -> tuple[list[Pinned], list[str]]:
    """Return (the pinned variants whose names begin with one of `names`, notes). All ranks must make this call.

    Schedules that do not support the shape, or do not fit into memory, are left out with a note. If several names stand for
    equal schedules, only the first name is kept.
    """
    free, kept, left_out = MEMORY_SHARE * free_bytes(ranks), [], []
    for one in _distinct(problems, names):
        free -= _memory(one.schedule)
        if free < 0:
            left_out.append(one.variant)
        else:
            kept.append(one)
    notes = [f"not measured, not enough memory: {', '.join(left_out)}"] if left_out else []
    return kept, notes + cannot(names, problems)


def memory_of_schedules(problems: Problems, names: Sequence[str]) -> int:
    """Return the bytes that a rank needs for the schedules of all pinned variants whose names begin with one of `names`."""
    return sum(_memory(one.schedule) for one in _distinct(problems, names))


def _distinct(problems: Problems, names: Sequence[str]) -> list[Pinned]:
    found: dict[tuple[Schedule, str], Pinned] = {}
    for suffix, variant, candidate in _beginning(problems, names):
        with contextlib.suppress(NotApplicableError):
            schedule = candidate.build()
            found.setdefault((schedule, suffix), Pinned(variant, candidate, schedule))
    return list(found.values())


def _memory(schedule: Schedule) -> int:
    buffers = [b for b in schedule.buffers_of_rank(0) if b.role in ("symmetric", "scratch")]
    return sum(int(b.rows) * b.cols * ITEM_BYTES[b.dtype] for b in buffers)


def check_variants(names: Sequence[str], shapes: Sequence[Problems], fixed: Sequence[str]) -> None:
    """Raise ValueError if one of `names` selects no variant with a pinned schedule. A name selects all variants whose names
    begin with it, and which support at least one of `shapes`.

    fixed: the names of variants without a pinned schedule, for the error text.
    """
    for name in names if shapes else ():
        if next(_beginning(shapes[0], [name]), None) is None:
            known = [candidate.name for candidate in candidates(shapes[0][0][0])]
            begin = ", ".join(dict.fromkeys(one.split("[")[0] for one in known if "[" in one))
            said = (
                f"give {', '.join((*fixed, OWN_SERIAL, ALL))}, or prefixes of schedule names: {begin}, such as "
                f"{known[-1]}"
            )
            raise ValueError(f"no variant {name!r}: {said}")
        left = [_why_not(name, problems) for problems in shapes]
        if all(left):
            raise ValueError(
                f"variant {name!r} supports none of these shapes (first shape: {left[0]}): choose another shape or variant"
            )


def cannot(names: Sequence[str], problems: Problems) -> list[str]:
    """Return a note for each of `names` that is not the prefix of a schedule that supports the shape."""
    found = {name: _why_not(name, problems) for name in names}
    return [f"not measured, {name}: {why}" for name, why in found.items() if why]


def _why_not(name: str, problems: Problems) -> str:
    """Return the reason why no schedule whose name begins with `name` supports the shape; "" if there is such a schedule."""
    reasons: dict[str, None] = {}
    for _, _, candidate in _beginning(problems, [name]):
        try:
            candidate.build()
            return ""
        except NotApplicableError as error:
            reasons[str(error)] = None
    return "; ".join(reasons) or "no schedule has this prefix"


def roundings(schedule: Schedule) -> int:
    """Return the largest number of times that an output element is rounded to its dtype. Each step or tile that adds to
    the element rounds it again.
    """
    steps = (inner for lane in schedule.of_rank(0) for step in lane.steps for inner in step.inner or (step,))
    added = Counter(step.out for step in steps if isinstance(step, Compute) and step.accumulate)
    return 1 + max(added.values(), default=0)


def gemm_limit(dtype: torch.dtype, k: int, of_torch: float | None, roundings: int = 1) -> float:
    """Return the largest allowed error of a GEMM's output, as a fraction of the largest element.

    of_torch: the error of torch's GEMM in this dtype. roundings: how often an output element is rounded. The limit is
    `roundings` times the larger of twice torch's error and half the dtype's epsilon.

    With of_torch=None, return the limit for torch's GEMM itself: four epsilons of the dtype, plus k epsilons of fp32.
    """
    eps = torch.finfo(dtype).eps
    if of_torch is None:
        return 4 * eps + k * torch.finfo(torch.float32).eps
    return 2 * max(of_torch, eps / 4) * roundings
