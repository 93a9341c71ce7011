"""Shapes of operators with a GEMM, from `benchmarks/shapes/OP.toml`, each with where it comes from; or as typed, MxNxK.

With "-symmetric" behind it a group or a shape has its input in symmetric memory already, which is a shape of its own.
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
from statistics import median
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

import weft
from weft import plan
from weft.bench.core import records, remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Results, Workload
from weft.bench.core.operator import Operator, Preset, Record
from weft.bench.core.options import BenchOptions
from weft.bench.core.tables import markdown_table, milliseconds, number, share
from weft.operator import choosing
from weft.operator.calls import prepared_calls
from weft.plan.choose import decide
from weft.plan.predict import least_us, predict
from weft.schedule import ITEM_BYTES, Candidate, NotApplicableError, Schedule, candidates, named
from weft.sim import Model
from weft.words import counted

CPU_GROUP = "cpu"
"""The group that runs on CPUs by default; the others run on GPUs."""
_SYMMETRIC = "-symmetric"


@dataclass(frozen=True)
class MatmulShape:
    """[m, k] @ [k, n], n on each rank. symmetric: peers can read the input where it lies."""

    m: int
    n: int
    k: int
    sources: tuple[str, ...] = ()
    symmetric: bool = False

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}{_SYMMETRIC * self.symmetric}"


def shapes_file(op: str) -> Path:
    return Path(weft.__file__).parents[1] / "benchmarks" / "shapes" / f"{op}.toml"


def find_shapes(file: Path, preset: str | None, device: str) -> tuple[MatmulShape, ...]:
    """Those of all groups that suit the device, or of the groups and shapes that `preset` names, with commas between.

    Raises ValueError for a name that is neither.
    """
    groups = _groups(file)
    found: list[MatmulShape] = []
    for given in named_groups(tuple(groups), preset, device):
        name, symmetric = given.removesuffix(_SYMMETRIC), given.endswith(_SYMMETRIC)
        typed = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name)
        if name in groups:
            found += [replace(shape, symmetric=symmetric) for shape in groups[name]]
        elif typed:
            found.append(MatmulShape(int(typed[1]), int(typed[2]), int(typed[3]), symmetric=symmetric))
        else:
            raise ValueError(
                f"no preset {given!r}: give one of {known_groups(tuple(groups), file)}, or a shape MxNxK such as 8192x4096x8192; "
                f"with {_SYMMETRIC} behind it, inputs lie in symmetric memory"
            )
    return _merged(found)


def named_groups(groups: Sequence[str], preset: str | None, device: str) -> list[str]:
    """What `preset` names, with commas between; None: the groups that suit the device."""
    if preset is None:
        return [group for group in groups if (group == CPU_GROUP) == (device == "cpu")]
    return [part.strip() for part in preset.split(",")]


def known_groups(groups: Sequence[str], file: Path) -> str:
    """For an error: which groups there are."""
    return ", ".join(groups) or f"nothing (there is no {file}: shapes are in the repository, not in the wheel)"


def _merged(shapes: list[MatmulShape]) -> tuple[MatmulShape, ...]:
    """Each shape once, with all its sources."""
    sources: dict[MatmulShape, list[str]] = {}
    for shape in shapes:
        sources.setdefault(replace(shape, sources=()), []).extend(shape.sources)
    return tuple(replace(shape, sources=tuple(dict.fromkeys(found))) for shape, found in sources.items())


def _groups(file: Path) -> dict[str, list[MatmulShape]]:
    if not file.exists():
        return {}
    return {name: list(_shapes(name, group)) for name, group in tomllib.loads(file.read_text()).items()}


def _shapes(name: str, group: dict[str, Any]) -> Iterator[MatmulShape]:
    for m, n, k in group.get("shapes", []):
        yield MatmulShape(m, n, k, (name,))
    for layer, given in group.get("layers", {}).items():
        for m in given.get("m", group.get("m", [])):
            yield MatmulShape(m, given["n"], given["k"], (f"{name} {layer}",))


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


P = TypeVar("P", bound=Preset)

NEAR_BEST = 0.03
_MANY_KINDS = 3
_BY_KIND = "the fastest of each kind of schedule, and of how many"


class Tables(ABC):
    """Records of one mode as a table with a row for each shape, and sentences about all of them."""

    baselines: tuple[str, ...]
    compared: ClassVar[Mapping[str, tuple[str, ...]]]
    """Arms that choose: the baselines with which they are compared, their own first."""
    head: tuple[str, ...]
    tail: tuple[str, ...]
    """Columns before and after the times."""
    optional: tuple[str, ...] = ()
    """Columns that a narrow terminal leaves out, the last first."""

    @abstractmethod
    def described(self, record: Record) -> list[str]:
        """Cells of `head`, from any record of a shape."""

    @abstractmethod
    def judged(self, by_variant: Mapping[str, Record]) -> list[str]:
        """Cells of `tail`."""

    @abstractmethod
    def said(self, rows: Sequence[Record]) -> list[str]:
        """What the shapes say together, in sentences."""

    @abstractmethod
    def twin(self, record: Record) -> str | None:
        """Of an arm that chooses: the variant that runs the same schedule under its own name, if its choice is recorded."""

    def remarks(self, rows: Sequence[Record]) -> list[str]:
        """What has to be known of them, in sentences."""
        header, lines = self._lines(rows)
        gains = [cell for line in lines for name, cell in zip(header, line, strict=True) if " vs " in name]
        named = {(r["config"], r["variant"]): r for r in rows}
        pairs = [(r, other) for r in rows if (other := named.get((r["config"], self.twin(r) or "")))]
        return remarks.unclear(gains) + remarks.twins(pairs)

    def show(self, written: Sequence[Record], options: BenchOptions) -> None:
        """Print a table for each mode."""
        for mode in options.modes:
            rows = [r for r in written if r["mode"] == mode]
            if rows:
                title = f"{options.op}, {mode}, {options.dtype}, {options.device}, milliseconds"
                notes = self.said(rows) + self.remarks(rows) + self._on_host(rows)
                print_table(title, *self._lines(rows), notes, optional=self.optional)
                if by_kind := self._by_kind(rows):
                    print_table(f"{title}: {_BY_KIND}", *by_kind)

    def markdown(self, rows: Sequence[Record]) -> str:
        parts = [markdown_table(*self._lines(rows)), *self.said(rows), *self.remarks(rows), *self._on_host(rows)]
        if by_kind := self._by_kind(rows):
            parts += [f"{_BY_KIND.capitalize()}:", markdown_table(*by_kind)]
        return "\n\n".join(parts)

    def _by_kind(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]] | None:
        """(header, cells), where schedules of several kinds were pinned."""
        variants: dict[str, set[str]] = {}
        fastest: dict[str, dict[str, float]] = {}  # milliseconds by shape and kind
        for r in rows:
            if r["variant"] not in (*self.baselines, *self.compared):
                kind, of_shape = r["variant"].partition("[")[0], fastest.setdefault(r["config"], {})
                variants.setdefault(kind, set()).add(r["variant"])
                of_shape[kind] = min(r["p50_ms"], of_shape.get(kind, r["p50_ms"]))
        if len(variants) < _MANY_KINDS:
            return None
        header = [self.head[0], *(f"{kind} ({len(found)})" for kind, found in variants.items())]
        return header, [[config, *(milliseconds(ms.get(kind)) for kind in variants)] for config, ms in fastest.items()]

    def _on_host(self, rows: Sequence[Record]) -> list[str]:
        """What calls cost the host beside the device's time."""
        if rows[0]["mode"] != "queued":
            return []
        found = []
        for variant in (*self.baselines, *self.compared):
            busy = [r["host_us"] for r in rows if r["variant"] == variant and r.get("host_us")]
            first = [r["first_call_ms"] for r in rows if r["variant"] == variant and r.get("first_call_ms")]
            if busy and first:
                found.append(f"{median(busy):.0f} us and {median(first):.0f} ms with {variant}")
        if not found:
            return []
        return [
            f"A call keeps the host busy or waiting for, and the first one of a shape takes, in the median: {', '.join(found)}."
        ]

    def overs(self, rows: Sequence[Record], variant: str) -> list[str]:
        """Of the baselines with which `variant` is compared those that were measured."""
        there = {over for r in rows if r["variant"] == variant for over in r["speedup_over"]}
        return [over for over in self.compared[variant] if over in there]

    def pinned(self, rows: Sequence[Record], config: str) -> list[tuple[float, str]]:
        """(milliseconds, variant) of the schedules of a shape that were run under their names, the fastest first."""
        chosen = (*self.baselines, *self.compared)
        return sorted((r["p50_ms"], r["variant"]) for r in rows if r["config"] == config and r["variant"] not in chosen)

    def near_best(self, mine: Sequence[Record], rows: Sequence[Record]) -> tuple[float, int, int] | None:
        """On which share of shapes `mine` is about as fast as the fastest pinned schedule, and of how many, least and most."""
        others = [(r["p50_ms"], found) for r in mine if (found := self.pinned(rows, r["config"]))]
        if not others:
            return None
        near = share([ms <= (1 + NEAR_BEST) * found[0][0] for ms, found in others]) or 0.0
        return near, min(len(found) for _, found in others), max(len(found) for _, found in others)

    def _lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """(header, cells): shape, times, ratios, what they are judged by; where schedules were pinned the best of them."""
        variants = [v for v in (*self.baselines, *self.compared) if any(r["variant"] == v for r in rows)]
        compared = [(variant, over) for variant in self.compared for over in self.overs(rows, variant)]
        best = {r["config"]: self.pinned(rows, r["config"])[:1] for r in rows}
        pinned = any(best.values())
        header = [*self.head, *variants, *(f"{variant} vs {over}" for variant, over in compared), *self.tail]
        header += ["best schedule", "of them"] if pinned else []
        lines = []
        for config in best:
            by_variant = {r["variant"]: r for r in rows if r["config"] == config}
            cells = self.described(next(iter(by_variant.values())))
            cells += [milliseconds(by_variant.get(v, {}).get("p50_ms")) for v in variants]
            for v, over in compared:
                mine = by_variant.get(v)
                cells.append(remarks.gain(mine, by_variant.get(over), mine is not None and self.twin(mine) == over))
            cells += self.judged(by_variant)
            if pinned:
                cells += [cell for ms, name in best[config] for cell in (milliseconds(ms), name)] or ["", ""]
            lines.append(cells)
        return header, lines


def said_of_best(near: float, least: int, most: int) -> str:
    """Of `Tables.near_best`."""
    of = counted(most, "schedule") if least == most else f"{least} to {counted(most, 'schedule')}"
    return f"within {NEAR_BEST:.0%} of the fastest of {of} that ran under their names on {near:.0%}"


class MatmulOperator(Operator[P]):
    """Its presets are shapes, or are typed as shapes."""

    matmul = True
    small: str
    """A preset."""
    tables: Tables

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("single", "queued", "graph") if device == "cuda" else ("single", "queued")

    def default_dtype(self, device: str) -> str:
        return "bf16" if device == "cuda" else "fp32"

    def check_options(self, options: BenchOptions) -> None:
        if options.scale is not None:
            raise ValueError(
                f"scale={options.scale} is for tables: name a smaller shape, such as --preset {self.small}"
            )

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        self.tables.show(written, options)

    def table(self, rows: Sequence[Record]) -> str:
        return self.tables.markdown(rows)


@dataclass(frozen=True)
class MeasuredArms(ABC):
    """One shape's results."""

    shape: Any
    world_size: int
    arms: tuple[str, ...]
    results: Results
    ceilings: list[Ceilings]
    notes: tuple[str, ...]

    tables: ClassVar[Tables]
    beside: ClassVar[tuple[str, ...]]
    """What was timed beside the arms."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Of an arm, beside those that all operators have."""

    @abstractmethod
    def roofline_ms(self, mode: Mode) -> float:
        """What bytes and operations take at the rates that were measured in the same run."""

    @abstractmethod
    def described(self, mode: Mode) -> Record:
        """Fields that all records of a mode share, beside those that all operators have."""

    @abstractmethod
    def judged(self, mode: Mode, name: str) -> Record:
        """Fields of an arm, beside those that all operators have."""

    @abstractmethod
    def said(self) -> list[str]:
        """Notes below the table."""

    def cells(self, mode: Mode, name: str) -> list[str]:
        """Of `columns`."""
        return []

    def baseline(self, mode: Mode) -> str:
        return self.tables.baselines[0]

    @property
    def wrong(self) -> tuple[str, ...]:
        return self.results.wrong

    def ms(self, mode: Mode, name: str) -> float | None:
        timing = self.results.timings.get((mode, name))
        return None if timing is None else timing.p50_ms

    def added_us(self, mode: Mode, name: str) -> float | None:
        """What a single call takes longer than the baseline's."""
        mine, base = self.ms(mode, name), self.ms(mode, self.baseline(mode))
        return 1e3 * (mine - base) if mode == "single" and mine is not None and base is not None else None

    def records(self, options: BenchOptions, run: str) -> list[Record]:
        rows = []
        for mode in options.modes:
            common = records.common_fields(
                options,
                self.shape.name,
                self.world_size,
                self.baseline(mode),
                self.roofline_ms(mode),
                self.ceilings,
                run,
            )
            common |= {"sources": list(self.shape.sources)} | self.described(mode)
            common |= {f"{name.replace('-', '_')}_ms": self.ms(mode, name) for name in self.beside}
            for name in self.arms:
                if self.results.timed(mode, name):
                    fields = records.arm_fields(self.results, mode, name, common, self.tables.baselines)
                    rows.append(common | fields | {"added_us": self.added_us(mode, name)} | self.judged(mode, name))
        return rows

    def show(self, options: BenchOptions) -> None:
        overs = [name for name in self.tables.baselines if name in self.arms]
        known = [name for name in self.arms if name in (*overs, *self.tables.compared)]
        rows = []
        for mode in options.modes:
            pinned = sorted(set(self.arms) - set(known), key=lambda name: self.ms(mode, name) or 0.0)
            timed = [name for name in (*known, *pinned, *self.beside) if self.results.timed(mode, name)]
            rows += [self._row(mode, name, overs) for name in timed]
        print_table(
            f"{options.op} {self.shape.name} ({'; '.join(self.shape.sources) or 'as asked for'}), {options.dtype}, "
            f"{counted(self.world_size, 'rank')}, {options.device}",
            ("variant", "mode", "ms", "p20 - p80", "skew", *(f"vs\n{over}" for over in overs), *self.columns, "over\nroofline",
             "added\nus", "host\nus", "first\nms", "error"),
            rows,
            (
                *self.said(),
                *(f"{name} cannot be captured: {why}" for name, why in self.results.not_captured.items()),
                *self.notes,
                *self.wrong,
            ),
            section=1,
            optional=(*self.columns, "p20 - p80", "skew", "first\nms", "error"),
        )  # fmt: skip

    def _row(self, mode: Mode, name: str, overs: Sequence[str]) -> list[str]:
        timing, results = self.results.timings[mode, name], self.results
        cells = [name, mode, f"{timing.p50_ms:.4f}", f"{timing.p20_ms:.4f} - {timing.p80_ms:.4f}"]
        cells.append(f"{timing.skew_ms:.4f}")
        host = number(timing.host_us, 1)
        if name not in self.arms:
            return [*cells, *[""] * (len(overs) + len(self.columns) + 2), host, "", ""]
        return [
            *cells,
            *(results.gain(mode, name, over) for over in overs),
            *self.cells(mode, name),
            f"{timing.p50_ms / self.roofline_ms(mode):.2f}",
            number(self.added_us(mode, name), 1),
            host,
            f"{results.first_call_ms[name]:.1f}",
            f"{results.errors[name]:.1e}",
        ]
