"""Benchmark of any operator that is registered (`weft.operator`), shapes x variants, and what those with baselines of their own
build on: how they are called, what is recorded and printed of each shape (`MeasuredGemms`), and of all of them (`GemmOperator`).

Variants are the serial schedule, which is the baseline, `weft`, the operator as it chooses, and names of schedules, or how they
begin. Calls are those that an operator's spec draws, and what must come out is what it says.

The ideal is the longer of the GEMM alone and the communication alone, where an operator measures these, in the same run and mode.
It is no bound: two halves of a GEMM may be faster than the whole, and each row runs at the clock that it finds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import torch

from weft.bench.core import remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Call, Mode, Ranks
from weft.bench.core.measure import Step, measure_arms
from weft.bench.core.operator import MeasuredArms, Operator
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.tables import Record, geomean, markdown_table, milliseconds, number, share, times
from weft.bench.ops.gemms import (
    BASELINE,
    OWN_SERIAL,
    WEFT,
    MatmulShape,
    Pinned,
    Planned,
    PlannedWorkload,
    Problems,
    S,
    cannot,
    check_room,
    check_variants,
    find_shapes,
    fitting,
    gemm_limit,
    schedule_of,
    shapes_file,
    wanted_schedules,
)
from weft.operator.calls import made
from weft.operator.spec import Operator as Spec
from weft.schedule import described
from weft.words import counted

GEMM, COMMUNICATION = "gemm", "communication"
Arm = Callable[[int], torch.Tensor]

NEVER_BELOW = 0.98
"""Of the baseline's speed: what counts as not slower."""
_NEAR_BEST = 0.03
_LARGE_M = 2048  # from here on a shape counts in the mean time over the ideal
_NEAR_PREDICTION = 0.10
_MANY_KINDS = 3
_BY_KIND = "the fastest of each kind of schedule, and of how many"


@dataclass(frozen=True)
class MeasuredGemms(MeasuredArms):
    """One shape's results, with single calls' times beside the baseline's."""

    fixed: ClassVar[tuple[str, ...]] = (BASELINE, WEFT)
    """Variants that pin no schedule."""
    columns: ClassVar[tuple[str, ...]] = ("added\nus",)

    def described(self, mode: Mode) -> Record:
        beside = {f"{name.replace('-', '_')}_ms": self.ms(mode, name) for name in self.beside}
        return {"sources": list(self.config.sources)} | beside

    def judged(self, mode: Mode, name: str) -> Record:
        """added_us: what a single call takes longer than the baseline's."""
        mine, base = self.ms(mode, name), self.ms(mode, self.baseline(mode))
        return {"added_us": 1e3 * (mine - base) if mode == "single" and mine is not None and base is not None else None}

    def cells(self, mode: Mode, name: str) -> list[str]:
        return [number(self.judged(mode, name)["added_us"], 1)]

    def ordered(self, mode: Mode) -> list[str]:
        """Those that are pinned behind the others, the fastest first."""
        first = [name for name in self.arms if name in self.fixed]
        return first + sorted(set(self.arms) - set(first), key=lambda name: self.ms(mode, name) or 0.0)


@dataclass(frozen=True)
class MeasuredMatmul(MeasuredGemms):
    """taken: which schedule the operator took."""

    planned: Mapping[Mode, Planned]
    taken: Mapping[Mode, str]
    least_ms: float

    baselines: ClassVar[tuple[str, ...]] = (BASELINE,)
    columns = ("over\nideal", "calibrated\nms", "blind\nms", *MeasuredGemms.columns)
    optional = (*columns[:3], *MeasuredArms.optional)
    beside: ClassVar[tuple[str, ...]] = (GEMM, COMMUNICATION)

    def roofline_ms(self, mode: Mode) -> float:
        return self.least_ms

    def ideal_ms(self, mode: Mode) -> float | None:
        alone = [self.ms(mode, name) for name in (GEMM, COMMUNICATION)]
        return max(ms for ms in alone if ms is not None) if None not in alone else None

    def described(self, mode: Mode) -> Record:
        m, n, k = self.config.m, self.config.n, self.config.k
        return super().described(mode) | {"m": m, "n": n, "k": k, "ideal_ms": self.ideal_ms(mode)}

    def judged(self, mode: Mode, name: str) -> Record:
        ms, ideal, taken = self.ms(mode, name), self.ideal_ms(mode), self.taken.get(mode, "serial")
        schedule, planned = schedule_of(name, taken), self.planned.get(mode)
        return super().judged(mode, name) | {
            "ideal_ratio": ms / ideal if ms and ideal else None,
            "chosen": taken if name == WEFT else None,
            "predicted_ms": planned.calibrated_ms.get(schedule) if planned else None,
            "predicted_blind_ms": planned.blind_ms.get(schedule) if planned else None,
        }

    def cells(self, mode: Mode, name: str) -> list[str]:
        found = self.judged(mode, name)
        predicted = [number(found[field], 4) for field in ("predicted_ms", "predicted_blind_ms")]
        return [number(found["ideal_ratio"], 2), *predicted, *super().cells(mode, name)]

    def said(self) -> list[str]:
        return [
            f"roofline {self.least_ms:.4f} ms from {self.ceilings[0]}; ideal: the longer of {GEMM} and {COMMUNICATION}",
            *(f"{WEFT}, {mode}, takes {name}" for mode, name in self.taken.items()),
        ]


class GemmOperator(Operator[S]):
    """Its presets are shapes, or are typed as shapes. Tables have a row for each shape, and sentences about all of them."""

    matmul = True
    shape: type[S]
    results: Callable[..., MeasuredGemms]
    small: str
    """A preset."""
    baselines: tuple[str, ...]
    compared: ClassVar[Mapping[str, tuple[str, ...]]]
    """Arms that choose: the baselines with which they are compared, their own first."""
    head: tuple[str, ...]
    tail: tuple[str, ...]
    """Columns before and after the times."""
    optional: tuple[str, ...] = ()
    """Columns that a narrow terminal leaves out, the last first."""

    # --- what runs ---

    @abstractmethod
    def problems(self, shape: S, ranks: int, dtype: str) -> Problems: ...

    @abstractmethod
    def room(self, shape: S, ranks: Ranks, item_bytes: int) -> tuple[float, int]:
        """(bytes of a rank's inputs, elements of its output)"""

    @abstractmethod
    def workload(self, shape: S, ranks: Ranks, dtype: str) -> Any: ...

    @abstractmethod
    def arms(self, work: Any, wanted: Sequence[str]) -> tuple[dict[str, Arm], dict[str, Call], list[str]]:
        """(arms that pin no schedule, the baseline first; what runs beside them; what was left out). wanted: or the usual ones."""

    def can_be_pinned(self, one: Pinned) -> bool:
        return True

    def waits(self, name: str) -> bool:
        """Whether an arm waits for the device in each call."""
        return False

    @abstractmethod
    def pinned_arm(self, work: Any, one: Pinned) -> Arm: ...

    @abstractmethod
    def facts(
        self, work: Any, arms: Mapping[str, Arm], ceilings: list[Ceilings], modes: Sequence[Mode]
    ) -> tuple[Any, ...]:
        """Of `results` the fields beside those of `MeasuredArms`. After the calls."""

    @property
    def fixed(self) -> tuple[str, ...]:
        """Variants that pin no schedule."""
        return *self.baselines, *self.compared

    def presets(self, options: BenchOptions) -> Sequence[S]:
        return find_shapes(self.shape, shapes_file(self.name), options.preset, options.device)

    def check_options(self, options: BenchOptions) -> None:
        if options.scale is not None:
            raise ValueError(
                f"scale={options.scale} is for tables: name a smaller shape, such as --preset {self.small}"
            )
        problems = [self.problems(shape, options.ranks, options.dtype) for shape in self.presets(options)]
        check_variants(options.variants, problems, self.fixed)

    def measure(
        self, preset: S, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> MeasuredGemms:
        step(f"{preset.name}: making inputs", 0)
        check_room(preset.name, *self.room(preset, ranks, DTYPES[options.dtype].itemsize), ranks)
        work = self.workload(preset, ranks, options.dtype)
        problems, wanted = self.problems(preset, ranks.world_size, options.dtype), options.variants
        arms, beside, notes = self.arms(work, wanted)
        pinned = [one for one in wanted_schedules(problems, wanted, self.fixed) if self.can_be_pinned(one)]
        found, left_out = fitting(pinned, ranks)
        arms |= {one.variant: self.pinned_arm(work, one) for one in found}
        notes += left_out + cannot(wanted, problems, self.fixed)
        work.waiting = [name for name in arms if self.waits(name)]
        results = measure_arms(
            work, arms, beside, modes=options.modes, seconds=options.time_s, repetitions=options.repetitions, step=step
        )
        facts = self.facts(work, arms, ceilings, options.modes)
        return self.results(preset, ranks.world_size, tuple(arms), results, ceilings, tuple(notes), *facts)

    # --- what is said of the records of one mode ---

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

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        for mode in options.modes:
            rows = [r for r in written if r["mode"] == mode]
            if rows:
                title = f"{options.op}, {mode}, {options.dtype}, {options.device}, milliseconds"
                print_table(title, *self._lines(rows), self._notes(rows), optional=self.optional)
                if by_kind := self._by_kind(rows):
                    print_table(f"{title}: {_BY_KIND}", *by_kind)

    def table(self, rows: Sequence[Record]) -> str:
        parts = [markdown_table(*self._lines(rows)), *self._notes(rows)]
        if by_kind := self._by_kind(rows):
            parts += [f"{_BY_KIND.capitalize()}:", markdown_table(*by_kind)]
        return "\n\n".join(parts)

    def remarks(self, rows: Sequence[Record]) -> list[str]:
        """What has to be known of them, in sentences."""
        header, lines = self._lines(rows)
        gains = [cell for line in lines for name, cell in zip(header, line, strict=True) if " vs " in name]
        named = {(r["config"], r["variant"]): r for r in rows}
        pairs = [(r, other) for r in rows if (other := named.get((r["config"], self.twin(r) or "")))]
        return remarks.unclear(gains) + remarks.twins(pairs)

    def _notes(self, rows: Sequence[Record]) -> list[str]:
        return self.said(rows) + self.remarks(rows) + self._on_host(rows)

    def _by_kind(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]] | None:
        """(header, cells), where schedules of several kinds were pinned."""
        variants: dict[str, set[str]] = {}
        fastest: dict[str, dict[str, float]] = {}  # milliseconds by shape and kind
        for r in rows:
            if r["variant"] not in self.fixed:
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
        for variant in self.fixed:
            busy = [r["host_us"] for r in rows if r["variant"] == variant and r.get("host_us")]
            first = [r["first_call_ms"] for r in rows if r["variant"] == variant and r.get("first_call_ms")]
            if busy and first:
                found.append(f"{median(busy):.0f} us and {median(first):.0f} ms with {variant}")
        said = "A call keeps the host busy or waiting for, and the first one of a shape takes, in the median"
        return [f"{said}: {', '.join(found)}."] if found else []

    def overs(self, rows: Sequence[Record], variant: str) -> list[str]:
        """Of the baselines with which `variant` is compared those that were measured."""
        there = {over for r in rows if r["variant"] == variant for over in r["speedup_over"]}
        return [over for over in self.compared[variant] if over in there]

    def fastest(self, rows: Sequence[Record], config: str) -> list[tuple[float, str]]:
        """(milliseconds, variant) of the schedules of a shape that were run under their names, the fastest first."""
        return sorted(
            (r["p50_ms"], r["variant"]) for r in rows if r["config"] == config and r["variant"] not in self.fixed
        )

    def said_of_best(self, mine: Sequence[Record], rows: Sequence[Record]) -> list[str]:
        """On which share of shapes `mine` is about as fast as the fastest pinned schedule, where there are any."""
        others = [(r["p50_ms"], found) for r in mine if (found := self.fastest(rows, r["config"]))]
        if not others:
            return []
        near = share([ms <= (1 + _NEAR_BEST) * found[0][0] for ms, found in others])
        least, most = min(len(found) for _, found in others), max(len(found) for _, found in others)
        of = counted(most, "schedule") if least == most else f"{least} to {counted(most, 'schedule')}"
        return [f"within {_NEAR_BEST:.0%} of the fastest of {of} that ran under their names on {near:.0%}"]

    def _lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """(header, cells): shape, times, ratios, what they are judged by; where schedules were pinned the best of them."""
        variants = [v for v in self.fixed if any(r["variant"] == v for r in rows)]
        compared = [(variant, over) for variant in self.compared for over in self.overs(rows, variant)]
        best = {r["config"]: self.fastest(rows, r["config"])[:1] for r in rows}
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


class SpecWorkload(PlannedWorkload):
    """Random calls, other ones for each input set; of the results the first is compared."""

    claims = ((WEFT, BASELINE),)

    def __init__(self, spec: Spec[Any], shape: MatmulShape, ranks: Ranks, dtype: str, input_sets: int) -> None:
        self.spec, self.shape, self.ranks, self.input_sets, self.name = spec, shape, ranks, input_sets, shape.name
        self.problem = described(spec.name, m=shape.m, n=shape.n, k=shape.k, ranks=ranks.world_size, dtype=dtype)
        self.dtype = DTYPES[dtype]
        self.calls = [self._drawn(which, ranks.rank) for which in range(input_sets)]

    def reference(self, which: int) -> torch.Tensor:
        calls = [self._drawn(which, rank) for rank in range(self.ranks.world_size)]
        return self.spec.expected(self.problem, self.ranks.rank, calls)[0]

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        return gemm_limit(self.dtype, self.shape.k, None if name == BASELINE else errors[BASELINE])

    def roofline_ms(self, ceilings: Ceilings) -> float:
        """Inputs and results once through memory."""
        outputs = self.spec.outputs(self.calls[0], self.ranks.world_size).values()
        tensors = [t for t in (*self.spec.tensors(self.calls[0]), *outputs) if isinstance(t, torch.Tensor)]
        return 1e3 * sum(t.nbytes for t in tensors) / ceilings.memory

    def _drawn(self, which: int, rank: int) -> Any:
        generator = torch.Generator(self.ranks.device).manual_seed(1000 * which + rank)
        return self.spec.drawn(self.problem, rank, generator)


class Weft:
    """The operator, with a schedule or as it chooses."""

    def __init__(self, work: SpecWorkload, schedule: str | None) -> None:
        self.work, self.schedule = work, schedule

    def __call__(self, which: int) -> torch.Tensor:
        call, work = self.work.calls[which], self.work
        like = next(t for t in work.spec.tensors(call) if t is not None)
        return made(work.spec, work.ranks.group, like, lambda _: call, schedule=self.schedule)[0]


class AnyOperator(GemmOperator[MatmulShape]):
    """Of [m, k] @ [k, n] in some way. What it says of many shapes is what all such operators say."""

    shape, small = MatmulShape, "512x1024x256"
    baselines: tuple[str, ...] = (BASELINE,)
    compared: ClassVar[Mapping[str, tuple[str, ...]]] = {WEFT: (BASELINE,)}
    head, tail = ("M x N x K",), ("ideal", f"{WEFT} / ideal")
    results: type[MeasuredMatmul] = MeasuredMatmul  # type: ignore[assignment]

    def __init__(self, spec: Spec[Any]) -> None:
        self.name, self.spec = spec.name, spec

    def presets(self, options: BenchOptions) -> Sequence[MatmulShape]:
        return find_shapes(MatmulShape, shapes_file("all_gather_matmul"), options.preset, options.device)

    def problems(self, shape: MatmulShape, ranks: int, dtype: str) -> Problems:
        return [(described(self.name, m=shape.m, n=shape.n, k=shape.k, ranks=ranks, dtype=dtype), "")]

    def room(self, shape: MatmulShape, ranks: Ranks, item_bytes: int) -> tuple[float, int]:
        return 0.0, 0  # nobody knows

    def workload(self, shape: MatmulShape, ranks: Ranks, dtype: str) -> Any:
        return SpecWorkload(self.spec, shape, ranks, dtype, input_sets=2)

    def arms(self, work: Any, wanted: Sequence[str]) -> tuple[dict[str, Arm], dict[str, Call], list[str]]:
        arms: dict[str, Arm] = {BASELINE: Weft(work, "serial")}
        if WEFT in (wanted or (WEFT,)):
            arms[WEFT] = Weft(work, None)
        return arms, {}, []

    def pinned_arm(self, work: Any, one: Pinned) -> Arm:
        return Weft(work, one.candidate.name)

    def facts(
        self, work: Any, arms: Mapping[str, Arm], ceilings: list[Ceilings], modes: Sequence[Mode]
    ) -> tuple[Any, ...]:
        taken = {mode: work.taken(mode) for mode in modes} if WEFT in arms else {}
        return work.planned, taken, max(work.roofline_ms(c) for c in ceilings)

    def described(self, record: Record) -> list[str]:
        return [record["config"]]

    def judged(self, by_variant: Mapping[str, Record]) -> list[str]:
        of_any = next(iter(by_variant.values()))
        return [milliseconds(of_any["ideal_ms"]), number(by_variant.get(WEFT, {}).get("ideal_ratio"), 2)]

    def twin(self, record: Record) -> str | None:
        if record["variant"] == OWN_SERIAL:
            return BASELINE
        return {"serial": BASELINE}.get(record["chosen"], record["chosen"]) if record["variant"] == WEFT else None

    def said(self, rows: Sequence[Record]) -> list[str]:
        mine = [r for r in rows if r["variant"] == WEFT]
        overs = [(r["speedup"], r["config"]) for r in mine if r["speedup"] is not None]
        if not overs:
            return []
        speed, shape = min(overs)
        not_slower = share([speed >= NEVER_BELOW for speed, _ in overs])
        said = [
            f"{WEFT} over {counted(len(mine), 'shape')}: {times(geomean([speed for speed, _ in overs]))} {BASELINE} in the "
            f"geometric mean, at worst {times(speed)} ({shape}), at least {NEVER_BELOW}x on {not_slower:.0%} of them",
            *self.said_of_peers(mine),
        ]
        over_ideal = geomean([r["ideal_ratio"] for r in mine if r["m"] >= _LARGE_M and r["ideal_ratio"] is not None])
        if over_ideal is not None:
            said.append(f"{over_ideal:.3f} of the ideal time for M >= {_LARGE_M}")
        if added := [(r["added_us"], r["config"]) for r in mine if r["added_us"] is not None]:
            us, shape = max(added)
            said.append(
                f"at most {us:.1f} us more than {BASELINE} ({shape})" if us > 0 else f"never longer than {BASELINE}"
            )
        return ["; ".join([*said, *self.said_of_best(mine, rows), *_said_of_predictions(mine)]) + "."]

    def said_of_peers(self, mine: Sequence[Record]) -> list[str]:
        """How the operator as it chooses compares with baselines beside the first."""
        return []


def _said_of_predictions(mine: Sequence[Record]) -> list[str]:
    ratios = {
        field: [r[field] / r["p50_ms"] for r in mine if r[field] is not None]
        for field in ("predicted_ms", "predicted_blind_ms")
    }
    calibrated, blind = (share([abs(ratio - 1) <= _NEAR_PREDICTION for ratio in of]) for of in ratios.values())
    error = geomean([max(ratio, 1 / ratio) for ratio in ratios["predicted_blind_ms"]])
    if calibrated is None:
        return []
    said = (
        f"within {_NEAR_PREDICTION:.0%} of the predicted time on {calibrated:.0%} where predictions were calibrated by the shape's "
        f"own GEMMs"
    )
    if blind is None or error is None:
        return [f"{said}; blind ones were not recorded"]
    return [f"{said}, on {blind:.0%} blind, which are {error - 1:.1%} off in the geometric mean"]
