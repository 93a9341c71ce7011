"""The benchmark of any registered operator (`weft.operator`), and the base of benchmarks with their own baselines.

The operator's spec (`weft.operator.spec.Operator`) draws random inputs and computes the expected results. The command
line selects variants by these names:

    serial                    the baseline
    weft                      the operator, which selects its schedule
    the name of a schedule    this schedule, pinned; "weft-serial" is weft's serial schedule
    a prefix of such names    all schedules with this prefix, pinned
    all                       all schedules, pinned
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any, ClassVar, Self

import torch

from weft import plan
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Call, Mode, Ranks
from weft.bench.core.measure import Results
from weft.bench.core.operator import ChoosingVariants, Columns, OperatorBenchmark
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.tables import Record, cell, geomean, markdown_table, milliseconds, number, share, times
from weft.bench.ops import gemms
from weft.bench.ops.gemms import BASELINE, OWN_SERIAL, WEFT, GemmShape, S, serial_twin
from weft.builders import named
from weft.operator import select, this_machine
from weft.operator.calls import made, prepared_calls
from weft.operator.spec import Operator as Spec
from weft.plan.choose import decide
from weft.plan.predict import least_us, predict
from weft.schedule import Schedule
from weft.sim import Model
from weft.words import counted

GEMM, COMMUNICATION, COLLECTIVE = "gemm", "communication", "collective"
PLANNED_MODES: tuple[plan.Mode, ...] = ("queued", "graph")
"""The timing modes for which weft chooses a schedule. Mode "single" uses the schedule of mode "queued"."""
NEVER_BELOW = 0.98
"""A variant counts as not slower than its baseline if it reaches this fraction of the baseline's speed."""
Variant = Callable[[int], torch.Tensor]

_NEAR_BEST = 0.03
_LARGE_M = 2048  # the mean of time / ideal covers shapes with at least this M
_NEAR_PREDICTION = 0.10
_MANY_KINDS = 3
_BY_KIND = "milliseconds of the fastest pinned schedule of each kind (in parentheses: schedules of this kind)"
_PREDICTED = ("predicted_ms", "predicted_blind_ms")


class GemmVariants(ChoosingVariants):
    """Variants of an operator with a GEMM: baselines, the operator with the schedule that it selects, and pinned schedules."""

    config: Any
    """The shape of the calls, a `GemmShape`."""
    baselines: ClassVar[tuple[str, ...]] = (BASELINE,)
    compared: ClassVar[Mapping[str, tuple[str, ...]]] = {WEFT: (BASELINE,)}
    """{variant that selects its schedule: the baselines with which it is compared}. The main baseline comes first."""
    rules: ClassVar[tuple[str, ...]] = ()
    """Variants with a selection rule other than the default (`weft.plan.use`); they run only if named."""
    beside: ClassVar[tuple[str, ...]] = ()
    """The names of further calls to time, such as the GEMM alone. Every record has the times of these calls."""

    def __init__(self, spec: Spec[Any], shape: GemmShape, ranks: Ranks, dtype: str, input_sets: int = 2) -> None:
        self.spec, self.config, self.ranks, self.input_sets = spec, shape, ranks, input_sets
        self.name, self.about, self.dtype, self.operands = shape.name, shape.about, DTYPES[dtype], DTYPES[dtype]
        self._describe: Callable[[GemmShape], gemms.Problems] = lambda of: of.problems(
            spec.name, ranks.world_size, dtype
        )
        self.problems = self._describe(shape)
        self.problem = self.problems[0][0]
        self.claims = [(variant, over) for variant, overs in self.compared.items() for over in overs]
        self.schedules: dict[str, Schedule] = {}  # {variant: pinned schedule}
        self._taken: dict[str, tuple[str, str]] = {}  # {variant: selected schedules}, after a call
        self.draw()

    @abstractmethod
    def draw(self) -> None:
        """Make the random inputs of all input sets."""

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.ranks.device).manual_seed(seed)

    def normal(self, seed: int, *size: int) -> torch.Tensor:
        """Return normally distributed fp32 numbers of this size on the device."""
        return torch.randn(size, generator=self.generator(seed), device=self.ranks.device)

    @abstractmethod
    def weft(self, variant: str, schedule: str | None) -> Variant:
        """Return the function that calls the operator. schedule: the schedule to pin; None lets the operator select."""

    @abstractmethod
    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        """Return (baselines, other calls to time, notes on omitted variants). Other calls are parts of the operator, such
        as the GEMM alone.

        wanted: names of variants; empty for the default variants.
        """

    def waits(self, name: str) -> bool:
        """True if variant `name` synchronises with the device in each call."""
        return False

    def variants(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        variants, beside, notes = self.others(wanted)
        for name in self.compared:
            if not wanted or WEFT in wanted or name in wanted:
                variants[name] = self.weft(name, None)
        variants |= {rule: self.weft(rule, rule) for rule in self.rules if rule in wanted}
        names = [name for name in wanted if name not in (*self.baselines, *self.compared, *self.rules)]
        pinned, left_out = gemms.pinned_schedules(self.problems, names, self.ranks)
        variants |= {one.variant: self.weft(one.variant, one.candidate.name) for one in pinned}
        self.schedules = {one.variant: one.schedule for one in pinned}
        self.waiting = [name for name in variants if self.waits(name)]
        return variants, beside, notes + left_out

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        return gemms.gemm_limit(self.dtype, self.config.k, None if name == BASELINE else errors[BASELINE])

    def is_mine(self, p: Any, variant: str) -> bool:
        """True if `p` is the problem (sizes and options) with which this variant calls the operator."""
        return bool(p == self.problem)

    def called(self, name: str) -> None:
        """Remember the schedule that the operator selected in the first call of variant `name`.

        Raise RuntimeError if the operator ran another problem than the benchmark measures, because the record would then be
        wrong.
        """
        if name not in self.compared and name not in self.rules:
            return
        calls, rule = prepared_calls(self.spec, self.ranks.group), name if name in self.rules else None
        of_rule = [call for call in calls if call.pinned == rule]
        found = [call.taken for call in of_rule if self.is_mine(call.p, name)]
        if not found:
            made = "; ".join(str(call.p) for call in of_rule) or "nothing"
            raise RuntimeError(
                f"variant {name} of {self.spec.name} called the operator with {made}, but its record is about {self.problem}: "
                "let the spec's drawn() return calls of this problem"
            )
        self._taken[name] = found[-1]

    def taken(self, variant: str, mode: Mode) -> str:
        return self._taken[variant][mode == "graph"]

    def pair(self, mode: Mode) -> tuple[str, str]:
        return WEFT, self.baseline(mode)

    def alone_ms(self, mode: Mode, found: Results) -> tuple[float | None, float | None]:
        return found.ms(mode, GEMM), found.ms(mode, COLLECTIVE)

    def variant(self, name: str) -> Variant:
        return self.weft(WEFT, None) if name == WEFT else self.serial

    @abstractmethod
    def serial(self, which: int) -> torch.Tensor:
        """Run the baseline: NCCL's collective and cuBLAS's GEMM, one after the other."""

    def resized(self, size: int) -> Self:
        other = copy.copy(self)
        other.config = replace(self.config, m=size)
        other.problems = self._describe(other.config)
        other.problem = other.problems[0][0]
        other.cut_to(self)
        return other

    @abstractmethod
    def cut_to(self, whole: Self) -> None:
        """Set the inputs to the first rows of the inputs of a larger shape. whole: the variants of that shape."""

    def twins(self, mode: Mode) -> dict[str, str]:
        alike = self.ranks.device.type == "cuda" and WEFT in self._taken and self.taken(WEFT, mode) == "serial"
        return {WEFT: BASELINE} if alike else {}

    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        beside = {f"{name.replace('-', '_')}_ms": found.ms(mode, name) for name in self.beside}
        return {"sources": list(self.config.sources)} | beside

    def derived(self, mode: Mode, name: str, found: Results) -> Record:
        """Return record fields of a variant. added_us: the time of a single call minus the baseline's. chosen: the
        selected schedule; None if it was pinned.
        """
        mine, base = found.ms(mode, name), found.ms(mode, self.baseline(mode))
        added_us = 1e3 * (mine - base) if mode == "single" and mine is not None and base is not None else None
        chooses = name in self.compared or name in self.rules
        return {"added_us": added_us, "chosen": self.taken(name, mode) if chooses else None}

    def notes(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        ideal = f"; ideal: the longer of {GEMM} and {COMMUNICATION}" if COMMUNICATION in self.beside else ""
        takes = [f"{r['variant']}, {r['mode']}: selected {r['chosen']}" for r in records if r["chosen"] is not None]
        return [f"roofline {self.roofline_ms(ceilings):.4f} ms from {ceilings[0]}{ideal}", *takes]


class MatmulVariants(GemmVariants):
    """Variants of [m, k] @ [k, n], with or without a collective.

    Each input set has random arguments for one call of the operator. If a call has several results, only the first is
    checked.
    """

    def draw(self) -> None:
        self.calls = [self._drawn(which, self.ranks.rank) for which in range(self.input_sets)]

    def _drawn(self, which: int, rank: int) -> Any:
        return self.spec.drawn(self.problem, rank, self.generator(1000 * which + rank))

    def cut_to(self, whole: Self) -> None:
        self.calls = [call._replace(x=call.x[: self.config.m]) for call in whole.calls]

    def reference(self, which: int) -> torch.Tensor:
        calls = [self._drawn(which, rank) for rank in range(self.ranks.world_size)]
        return self.spec.expected(self.problem, self.ranks.rank, calls)[0]

    def weft(self, variant: str, schedule: str | None) -> Variant:
        def call(which: int) -> torch.Tensor:
            found = self.calls[which]
            like = next(t for t in self.spec.tensors(found) if t is not None)
            return made(self.spec, self.ranks.group, like, lambda _: found, schedule=schedule)[0]

        return call

    def serial(self, which: int) -> torch.Tensor:
        return self.weft(BASELINE, "serial")(which)

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        return {BASELINE: self.serial}, {}, []

    def roofline_ms(self, ceilings: Sequence[Ceilings]) -> float:
        """Return a lower bound in ms: the time to read all inputs and write all results once at peak rates."""
        outputs = self.spec.outputs(self.calls[0], self.ranks.world_size).values()
        tensors = [t for t in (*self.spec.tensors(self.calls[0]), *outputs) if isinstance(t, torch.Tensor)]
        return max(c.ms(sum(t.nbytes for t in tensors)) for c in ceilings)

    def ideal_ms(self, mode: Mode, found: Results) -> float | None:
        gemm, communication = (found.ms(mode, name) for name in (GEMM, COMMUNICATION))
        return None if gemm is None or communication is None else max(gemm, communication)

    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        shape = self.config
        sizes = {"m": shape.m, "n": shape.n, "k": shape.k, "ideal_ms": self.ideal_ms(mode, found)}
        return super().shared(mode, found, ceilings) | sizes

    def derived(self, mode: Mode, name: str, found: Results) -> Record:
        ms, ideal = found.ms(mode, name), self.ideal_ms(mode, found)
        schedule = self.taken(WEFT, mode) if name == WEFT else "serial" if name == OWN_SERIAL else name
        predicted = {
            field: of.get(schedule) for field, of in zip(_PREDICTED, self.predicted.get(mode, ({}, {})), strict=True)
        }
        return super().derived(mode, name, found) | {"ideal_ratio": ms / ideal if ms and ideal else None} | predicted

    # --- the planner's choice ---

    @cached_property
    def choices(self) -> dict[Mode, plan.Choice]:
        """The schedule that the planner chose for each mode: {mode: choice}. Empty if the planner does not know the machine:
        the operator then autotunes.

        Read this property only after the operator's first call, because the time of the first call should include the planning.
        """
        model = self._model()
        if model is None:
            return {}
        return {mode: select.planned(self.problem, model, self.ranks.device, mode) for mode in PLANNED_MODES}

    @cached_property
    def predicted(self) -> dict[Mode, tuple[dict[str, float], dict[str, float]]]:
        """The predicted times of schedules, per call in a series of consecutive calls: {mode: ({schedule: calibrated ms},
        {schedule: blind ms})}.

        Calibrated predictions use GEMM times that the operator's first call measured for this shape. Blind predictions
        use only the machine's description (`weft.hw`) and the results of `weft plan calibrate`.
        """
        found = {}
        for mode, choice in self.choices.items():
            model, p = self._model(), choice.problem
            assert model is not None
            blind = model.with_measured({})
            calibrated_ms, blind_ms = (
                {row.candidate.name: row.predicted_us / 1e3 for row in rows if row.predicted_us is not None}
                for rows in (choice.rows, decide(p, blind, mode=choice.mode).rows)
            )
            taken = self.taken(WEFT, mode) if WEFT in self._taken else None
            if taken is not None and taken not in blind_ms:  # pruned as too slow
                blind_ms[taken] = predict(named(p, taken).build(), blind, choice.mode, least_us(p, blind)) / 1e3
            found[mode] = calibrated_ms, blind_ms
        return found

    def _model(self) -> Model | None:
        world = self.ranks.world_size
        return None if world == 1 else this_machine.machine_model(self.ranks.device, world)


class GemmOperator(OperatorBenchmark[S]):
    """The benchmark of an operator with a GEMM.

    A preset is the name of a group of shapes, or a shape. Tables have a row for each shape.
    """

    matmul = True
    variants: type[GemmVariants]
    shape: type[S]
    shapes_of: ClassVar[str] = ""
    """The operator whose shapes this benchmark uses; empty if it has its own."""
    columns: ClassVar[Columns] = {"added\nus": cell("added_us", 1)}

    def __init__(self, spec: Spec[Any], variants: type[GemmVariants] | None = None) -> None:
        self.name, self.spec, self.variants = spec.name, spec, variants or self.variants
        self.baselines = self.variants.baselines
        self.fixed = *self.baselines, *self.variants.compared, *self.variants.rules
        """Variants that pin no schedule."""
        smaller = f"cannot be scaled; only tables can: name a smaller shape, such as --preset {self.shape.example}"
        self.refuses = {**type(self).refuses, "scale": smaller}

    def pinned(self, variant: str) -> bool:
        return variant not in self.fixed

    def presets(self, options: BenchOptions) -> Sequence[S]:
        return gemms.find_shapes(self.shape, gemms.shapes_file(self.shapes_of or self.name), options)

    def check_options(self, options: BenchOptions) -> None:
        shapes = self.presets(options)
        problems = [shape.problems(self.name, options.ranks, options.dtype) for shape in shapes]
        gemms.check_variants([name for name in options.variants if self.pinned(name)], problems, self.fixed)

    def workload(self, preset: S, ranks: Ranks, options: BenchOptions) -> GemmVariants:
        gemms.check_room(preset, ranks, DTYPES[options.dtype].itemsize)
        return self.variants(self.spec, preset, ranks, options.dtype)

    # --- sentences about the records of one mode ---

    @abstractmethod
    def sentences(self, rows: Sequence[Record]) -> list[str]:
        """Return sentences that summarise the records of all shapes."""

    def compared(self, rows: Sequence[Record]) -> dict[str, tuple[str, ...]]:
        """Return the speedups that the table shows: {variant: the measured baselines with which it is compared}."""
        there = {(r["variant"], over) for r in rows for over in r["speedup_over"]}
        return {v: tuple(o for o in overs if (v, o) in there) for v, overs in self.variants.compared.items()}

    def lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """Return (header, rows) of a table with a row for each shape. If schedules were pinned, the last columns show
        the fastest of them.
        """
        header, lines = super().lines(rows)
        best = [self.fastest(rows, config) for config in dict.fromkeys(r["config"] for r in rows)]
        if not any(best):
            return header, lines
        named = [(milliseconds(found[0][0]), found[0][1]) if found else ("", "") for found in best]
        return [*header, "best pinned, ms", "best pinned schedule"], [
            [*line, *of] for line, of in zip(lines, named, strict=True)
        ]

    def notes(self, rows: Sequence[Record]) -> list[str]:
        return self.sentences(rows) + super().notes(rows) + self.remarks(rows) + self._on_host(rows)

    def remarks(self, rows: Sequence[Record]) -> list[str]:
        """Return remarks to print below the table. They name the features of other libraries that were used."""
        return []

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        super().show_summary(written, options)
        for mode in options.modes:
            if by_kind := self._by_kind([r for r in written if r["mode"] == mode]):
                print_table(f"{options.op}, {mode}: {_BY_KIND}", *by_kind)

    def table(self, rows: Sequence[Record]) -> str:
        by_kind = self._by_kind(rows)
        parts = [f"{_BY_KIND.capitalize()}:", markdown_table(*by_kind)] if by_kind else []
        return "\n\n".join([super().table(rows), *parts])

    def _by_kind(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]] | None:
        """Return (header, rows) of a table with the fastest pinned schedule of each kind; None if there are fewer than
        `_MANY_KINDS` kinds. The kind is the part of a schedule's name before its parameters.
        """
        variants: dict[str, set[str]] = {}
        fastest: dict[str, dict[str, float]] = {}  # milliseconds by shape and kind
        for r in rows:
            if self.pinned(r["variant"]):
                kind, of_shape = r["variant"].partition("[")[0], fastest.setdefault(r["config"], {})
                variants.setdefault(kind, set()).add(r["variant"])
                of_shape[kind] = min(r["p50_ms"], of_shape.get(kind, r["p50_ms"]))
        if len(variants) < _MANY_KINDS:
            return None
        header = [self.head[0], *(f"{kind} ({len(found)})" for kind, found in variants.items())]
        return header, [[config, *(milliseconds(ms.get(kind)) for kind in variants)] for config, ms in fastest.items()]

    def _on_host(self, rows: Sequence[Record]) -> list[str]:
        """Return a sentence on how long calls keep the CPU busy."""
        if rows[0]["mode"] != "queued":
            return []
        calls, firsts, fields = [], [], ("host_us", "first_call_ms")
        for variant in self.fixed:
            busy, first = ([r[field] for r in rows if r["variant"] == variant and r.get(field)] for field in fields)
            if busy and first:
                calls.append(f"{median(busy):.0f} us with {variant}")
                firsts.append(f"{median(first):.0f} ms with {variant}")
        said = f"a call keeps the CPU busy for {', '.join(calls)}. The first call of a shape takes {', '.join(firsts)}."
        return [f"Medians: {said}"] if calls else []

    def fastest(self, rows: Sequence[Record], config: str) -> list[tuple[float, str]]:
        """Return (milliseconds, variant) for each pinned schedule of a shape, the fastest first."""
        return sorted((r["p50_ms"], r["variant"]) for r in rows if r["config"] == config and self.pinned(r["variant"]))

    def summary_of_best(self, mine: Sequence[Record], rows: Sequence[Record]) -> list[str]:
        """Return a sentence on how often weft's own choice is about as fast as the fastest pinned schedule. mine:
        weft's records.
        """
        others = [(r["p50_ms"], found) for r in mine if (found := self.fastest(rows, r["config"]))]
        if not others:
            return []
        near = share([ms <= (1 + _NEAR_BEST) * found[0][0] for ms, found in others])
        least, most = (of(len(found) for _, found in others) for of in (min, max))
        of = f"{most}" if least == most else f"{least} to {most}"
        best = "the only schedule" if most == 1 else f"the fastest of {of} schedules"
        return [f"On {near:.0%} of the shapes the time is within {_NEAR_BEST:.0%} of the time of {best} pinned by name"]


class AnyOperator(GemmOperator[GemmShape]):
    """The benchmark of operators that compute [m, k] @ [k, n], with or without a collective."""

    variants, shape = MatmulVariants, GemmShape
    refuses = {name: why for name, why in GemmOperator.refuses.items() if name != "option"}  # noqa: RUF012
    columns: ClassVar[Columns] = {
        "over\nideal": cell("ideal_ratio", 2), "calibrated\nms": cell(_PREDICTED[0], 4), "blind\nms": cell(_PREDICTED[1], 4),
        **GemmOperator.columns,
    }  # fmt: skip
    narrow = ("over\nideal", "calibrated\nms", "blind\nms", *GemmOperator.narrow)
    head, tail = ("M x N x K",), ("ideal", f"{WEFT} / ideal")

    def derived_cells(self, by_variant: Mapping[str, Record]) -> list[str]:
        of_any = next(iter(by_variant.values()))
        return [milliseconds(of_any["ideal_ms"]), number(by_variant.get(WEFT, {}).get("ideal_ratio"), 2)]

    def twin(self, record: Record) -> str | None:
        if record["variant"] == WEFT and record["chosen"] != "serial":
            return str(record["chosen"]) if record["chosen"] else None
        return serial_twin(record) if record["variant"] in (WEFT, OWN_SERIAL) else None

    def sentences(self, rows: Sequence[Record]) -> list[str]:
        mine = [r for r in rows if r["variant"] == WEFT]
        overs = {r["config"]: r["speedup"] for r in mine if r["speedup"] is not None}
        if not overs:
            return []
        shape, mean = min(overs, key=lambda config: overs[config]), geomean([*overs.values()])
        not_slower = share([speed >= NEVER_BELOW for speed in overs.values()])
        parts = [
            f"Speed of {WEFT} on {counted(len(mine), 'shape')}: the geometric mean is {times(mean)} the speed of {BASELINE}, "
            f"the worst {times(overs[shape])} ({shape})",
            f"{not_slower:.0%} of the shapes reach at least {NEVER_BELOW}x",
            *self.summary_of_peers(mine),
        ]
        over_ideal = geomean([r["ideal_ratio"] for r in mine if r["m"] >= _LARGE_M and r["ideal_ratio"] is not None])
        if over_ideal is not None:
            parts.append(f"For M >= {_LARGE_M}, {WEFT} takes {over_ideal:.3f} times the ideal time")
        if added := [(r["added_us"], r["config"]) for r in mine if r["added_us"] is not None]:
            us, shape = max(added)
            parts.append(
                f"A call takes at most {us:.1f} us more than {BASELINE} ({shape})"
                if us > 0
                else f"No call takes longer than {BASELINE}"
            )
        return [". ".join([*parts, *self.summary_of_best(mine, rows), *_summary_of_predictions(mine)]) + "."]

    def summary_of_peers(self, mine: Sequence[Record]) -> list[str]:
        """Return sentences on weft's speedup over baselines other than serial. mine: weft's record of each shape."""
        return []


def _summary_of_predictions(mine: Sequence[Record]) -> list[str]:
    ratios = [[r[field] / r["p50_ms"] for r in mine if r[field] is not None] for field in _PREDICTED]
    calibrated, blind = (share([abs(ratio - 1) <= _NEAR_PREDICTION for ratio in of]) for of in ratios)
    error = geomean([max(ratio, 1 / ratio) for ratio in ratios[1]])
    if calibrated is None:
        return []
    on_blind = (
        f". Of the predictions from the machine file alone (blind), {blind:.0%} are within {_NEAR_PREDICTION:.0%}, with a "
        f"geometric mean error of {error - 1:.1%}"
        if error and blind is not None
        else ""
    )
    return [
        f"On {calibrated:.0%} of the shapes the prediction from measured GEMMs is within {_NEAR_PREDICTION:.0%} of the measured "
        f"time{on_blind or '. Predictions from the machine file alone were not recorded'}"
    ]
