"""Benchmark of training embeddings: forward, backward and rowwise Adagrad in one step, presets x variants.

All variants update the same tables. A check refills the tables and runs two steps on two input sets. Then it compares
the output of the first step's forward, a sample of table rows, and their optimizer states with float64. Timed steps do
not refill the tables. After the timing, the check is repeated.

A step's time is compared with two lower bounds, from the bytes of a rank and the peak rates of the same run. They
differ in the bytes of table rows:

    once            each distinct row is read in forward, and read and written in the update
    per occurrence  for each id a row and a gradient are read; each distinct row is read and written in the update

In addition, each bound counts the bytes over the link, two reads of ids and offsets, one write of the pooled vectors, and one
read of their gradients. The update sorts ids. The bounds count only one pass of this sort, over pairs of a 4-byte key and a
4-byte index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Mode, Ranks, time_variants
from weft.bench.core.measure import STEPS, Results, Step, first_calls
from weft.bench.core.operator import Columns, Measured, VariantCalls, Variants
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.run import free_bytes
from weft.bench.core.tables import Record, cell
from weft.bench.ops.embedding_operator import EmbeddingBenchmark, scale_for
from weft.bench.ops.embedding_presets import PRESETS, EmbeddingPreset, Zipf
from weft.bench.ops.embedding_steps import (
    DETERMINISTIC,
    EPS,
    FBGEMM,
    LR,
    TORCH,
    WEFT,
    TrainingData,
    TrainingStep,
    WeftStep,
    make_step,
    why_no_fbgemm,
)

BASELINES = (DETERMINISTIC, FBGEMM, TORCH)
_SAMPLED = 64  # rows per table that are checked: this many that occur, and as many drawn from all rows
_BY_OTHERS = {DETERMINISTIC, FBGEMM}
_STEPS = 2  # steps of a check; the second step starts with nonzero states
_CHUNK_BYTES = 128 << 20  # bytes of float64 gradients per block of the reference
_ZIPF = 1.05
_SHORT = {"grid-64x200k-d256-b4096-l32": "64x200k", "grid-128x100k-d128-b1024-l20": "128x100k"}


def _presets() -> dict[str, EmbeddingPreset]:
    names = ("pgas-weak", "pgas-strong", *_SHORT, "dcnv2")
    found = [replace(PRESETS[name], name=_SHORT.get(name, name)) for name in names]
    skewed = f"dcnv2-zipf{_ZIPF}"
    found.append(replace(PRESETS["dcnv2"], name=skewed, about=f"the same, rows by Zipf {_ZIPF}", indices=Zipf(_ZIPF)))
    return {preset.name: preset for preset in found}


TRAINED: dict[str, EmbeddingPreset] = _presets()


class Expected(NamedTuple):
    """The rows of a table that a check of a training step compares, and their expected float64 values and optimizer states."""

    rows: torch.Tensor
    values: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True)
class StepTraffic:
    """The bytes that one rank must move in a step.

    rows: the bytes of table rows, counted once for each id.
    distinct_rows: the bytes of the distinct rows.
    rest: all other bytes that the rank reads or writes in its own memory.
    wire: bytes that leave the rank in forward and backward together; as many bytes arrive.
    """

    rows: float
    distinct_rows: float
    rest: float
    wire: float

    def once_ms(self, ceilings: Ceilings) -> float:
        return ceilings.ms(3 * self.distinct_rows + self.rest, self.wire)

    def per_occurrence_ms(self, ceilings: Ceilings) -> float:
        return ceilings.ms(2 * self.rows + 2 * self.distinct_rows + self.rest, self.wire)


class TrainingWorkload(TrainingData, Variants):
    """The inputs, the check, the variants and the record fields of one configuration."""

    baselines = BASELINES
    # --- the check ---

    def gradients_of_slot(self, number: int, which: int) -> torch.Tensor:
        """Return the gradients for this rank's feature `number`, [global batch, D]; empty if the rank has fewer
        features.

        The gradients come from the ranks that own the samples. which: the number of the input set. All ranks must make
        this call.
        """
        config, rank = self.config, self.ranks.rank
        slots = [config.sharding.local_slots(r) for r in range(self.ranks.world_size)]
        there = [of[number] if number < len(of) else None for of in slots]
        dims = [0 if slot is None else slot.dim for slot in there]
        grad = self.grads[which]
        send = torch.cat(
            [grad[:0, 0], *(grad[:, s.column : s.column + s.dim].reshape(-1) for s in there if s is not None)]
        )
        arriving = [size * dims[rank] for size in config.batch_sizes]
        received = send.new_empty(sum(arriving))
        dist.all_to_all_single(
            received, send, arriving, [self.local_batch * dim for dim in dims], group=self.ranks.group
        )
        return received.view(config.global_batch, dims[rank])

    def expected(self) -> list[Expected]:
        """Return, for each of this rank's tables, a sample of rows with the values that they should have after the
        steps of a check. All ranks must make this call.

        The tables must have their initial values, from which the float64 values are computed.
        """
        found = []
        most = max(len(self.config.sharding.local_slots(r)) for r in range(self.ranks.world_size))
        for number in range(most):
            grads = [self.gradients_of_slot(number, which) for which in self._check_sets]
            if number < len(self.weights):
                found.append(self._expected_rows(number, grads))
        return found

    @property
    def _check_sets(self) -> list[int]:
        return [step % self.input_sets for step in range(_STEPS)]

    def _expected_rows(self, number: int, grads: Sequence[torch.Tensor]) -> Expected:
        weight, batch = self.weights[number], self.config.global_batch
        generator = torch.Generator(weight.device).manual_seed(number)
        of_sets = []
        for which in self._check_sets:
            values, offsets = self.inputs[which]
            of_slot = offsets[number * batch : (number + 1) * batch + 1]
            of_sets.append((values[of_slot[0] : of_slot[-1]], of_slot - of_slot[0]))
        drawn = [torch.randint(0, len(weight), (_SAMPLED,), generator=generator, device=weight.device)]
        for ids, _ in of_sets:
            if ids.numel():
                drawn.append(ids[torch.randint(0, len(ids), (_SAMPLED,), generator=generator, device=weight.device)])
        rows = torch.cat(drawn).unique()
        values, states = weight[rows].double(), torch.zeros(len(rows), dtype=torch.float64, device=weight.device)
        for (ids, offsets), grad in zip(of_sets, grads, strict=True):
            place = torch.searchsorted(rows, ids).clamp(max=len(rows) - 1)
            at = (rows[place] == ids).nonzero()[:, 0]
            g = torch.zeros_like(values)
            for part in at.split(max(1, _CHUNK_BYTES // (8 * weight.shape[1]))):
                g.index_add_(0, place[part], grad[torch.searchsorted(offsets, part, right=True) - 1].double())
            hit = torch.zeros(len(rows), dtype=torch.bool, device=weight.device).index_fill_(0, place[at], True)
            states += g.square().mean(1)
            values -= torch.where(hit[:, None], LR * g / (states.sqrt() + EPS)[:, None], 0.0)
        return Expected(rows, values, states)

    def error_of_step(self, step: TrainingStep, expected: Sequence[Expected], pooled: torch.Tensor) -> float:
        """Check a variant, and return its largest error relative to the largest element. All ranks must make this call.

        pooled: the expected output of the first step's forward, in float64. The error is infinite if a row changed
        although no id selects it, or if an optimizer state is wrong.
        """
        self.fill_tables()
        step.reset()
        first = step(0).clone()
        for which in self._check_sets[1:]:
            step(which)
        self.ranks.synchronize()
        error = self.error(WEFT, first, 0, pooled)
        mine = 0.0
        for (rows, values, states), weight, state in zip(expected, self.weights, step.states, strict=True):
            wrong = (weight[rows].double() - values).abs().max() / values.abs().max()
            of_states = (state.view(-1)[rows].double() - states).abs().max() / states.abs().max().clamp(min=1e-30)
            untouched = (states == 0) & (weight[rows].double() != values).any(1)
            mine = max(mine, math.inf if untouched.any() or not wrong.isfinite() else float(wrong))
            mine = max(mine, 0.0 if of_states <= self._limit_of_states else math.inf)
        return max(error, self.ranks.most(mine))

    @property
    def _limit_of_states(self) -> float:
        return 1e-4 if self.dtype == torch.float32 else 1e-2

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """Return the error limit: the dtype's epsilon times 2 L or times 16, whichever is larger. L is the mean bag length of
        the table with the longest bags.
        """
        return torch.finfo(self.dtype).eps * max(16.0, *(2 * bag.mean for bag in self.config.bags))

    # --- variants and their records ---

    def variants(self, wanted: Sequence[str]) -> tuple[VariantCalls, Mapping[str, Call], list[str]]:
        why = why_no_fbgemm()
        names = list(wanted) or ([*DEFAULT_FBGEMM] if why is None else [TORCH]) + [WEFT]
        notes = [] if why is None or TORCH not in names else [f"FBGEMM: {why}; plain torch stands in"]
        self.steps: dict[str, TrainingStep] = {name: make_step(name, self) for name in _ordered(names)}
        beside: dict[str, Call] = {}
        for name, own in self.steps.items():
            if isinstance(own, WeftStep):
                parts = own.parts() if name == WEFT else {"exchange": own.parts()["exchange"]}
                beside |= {f"{name}: {part} alone": call for part, call in parts.items()}
        return self.steps, beside, notes

    def baseline(self, mode: Mode) -> str:
        return next(iter(self.steps))

    def roofline_ms(self, ceilings: Sequence[Ceilings]) -> float:
        return max(t.once_ms(c) for t, c in zip(self.traffics, ceilings, strict=True))

    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        per_occurrence = max(t.per_occurrence_ms(c) for t, c in zip(self.traffics, ceilings, strict=True))
        scale = self.config.scale
        of_parts = {name.removesuffix(" alone"): found.ms(mode, name) for name in self.beside}
        return {
            "scale": float(scale.batch), "rows_scale": float(scale.rows), "shape": self.config.describe(),
            "per_occurrence_ms": per_occurrence, "weft_parts_ms": of_parts, "fbgemm_missing": why_no_fbgemm(),
            "ids": max(float(n[0]) for n in self.ranks.gather([self.inputs[0][0].numel()])),
        }  # fmt: skip

    def derived(self, mode: Mode, name: str, found: Results) -> Record:
        return {"extra_bytes": self.extra_bytes.get(name)}

    def notes(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        once, each = self.roofline_ms(ceilings), records[0]["per_occurrence_ms"] if records else 0.0
        floors = f"floors: rows once {once:.3f} ms, per occurrence {each:.3f} ms, from {ceilings[0]}"
        return [f"{self.config.describe()}; {self.config.scale}", floors]

    def measured(self, options: BenchOptions, ceilings: list[Ceilings], step: Step) -> Measured:
        step(f"{self.name}: checking every variant", 0)
        variants, self.beside, notes = self.variants(options.variants)
        self.traffics = [StepTraffic(*of) for of in self.ranks.gather(list(vars(self.traffic()).values()))]
        self.fill_tables()
        pooled, expected = self.reference(0), self.expected()
        found = Results({})
        for name in [name for name in variants if name in _BY_OTHERS]:
            if why := self._failure(variants[name]):
                notes.append(f"{name} failed: {why}")
                del self.steps[name]
        found.first_call_ms = first_calls(variants, self.ranks)
        self.extra_bytes = {name: self._extra_bytes(variants[name]) for name in variants}
        for name in list(variants):
            self._check(name, found, expected, pooled, "")
        step(f"{self.name}: checking every variant", STEPS)
        for mode in options.modes:
            calls: dict[str, Call] = {name: one for name, one in variants.items() if name not in found.wrong}
            if not calls:
                break
            timed = time_variants(
                {**calls, **self.beside}, self.ranks, mode, input_sets=self.input_sets, seconds=options.time_s,
                repetitions=options.repetitions, waiting={TORCH},
                claims=[(WEFT, other) for other in BASELINES if {WEFT, other} <= set(calls)],
                advance=partial(step, f"{self.name}: timing, {mode}"),
            )  # fmt: skip
            found.timings |= {(mode, name): timing for name, timing in timed.items()}
        for name in list(variants):
            if name not in found.wrong and not self._check(name, found, expected, pooled, ", after timing,"):
                found.timings = {of: timing for of, timing in found.timings.items() if of[1] != name}
        rows = [row for mode in options.modes for row in self._records(mode, variants, found, options, ceilings)]
        return self.as_measured(rows, self.beside, found, [*self.notes(rows, ceilings), *notes], options)

    def _check(self, name: str, found: Results, expected: Sequence[Expected], pooled: torch.Tensor, how: str) -> bool:
        error = self.error_of_step(self.steps[name], expected, pooled)
        found.errors[name] = max(found.errors.get(name, 0.0), error)
        if error <= (limit := self.limit(name, found.errors)):
            return True
        found.wrong[name] = (
            f"{self.name}: {self.differs(name, how)} by {error:.3g} of the largest element; the limit is {limit:.3g}: its times "
            "are discarded"
        )
        return False

    def _failure(self, call: Callable[[int], torch.Tensor]) -> str:
        """Make `call`, a step of another library. Return the error text if it fails on any rank, else "". All ranks must make
        this call.
        """
        why = ""
        try:
            call(0)
            self.ranks.synchronize()
        except Exception as error:  # continue with the other variants
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        failed = self.ranks.most(float(bool(why)))
        return (why or "on another rank") if failed else ""

    def _extra_bytes(self, call: Callable[[int], torch.Tensor]) -> int | None:
        """Return the peak bytes that a step allocates on the worst rank; None on CPU. All ranks must make this call."""
        if self.ranks.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(0)
        torch.cuda.synchronize()
        return int(self.ranks.most(torch.cuda.max_memory_allocated() - before))

    def traffic(self) -> StepTraffic:
        """Return the bytes that this rank must move in a step, averaged over the input sets."""
        read, (values, offsets) = self.rows_read(), self.inputs[0]
        count = sum(v.numel() for v, _ in self.inputs) / self.input_sets
        pooled = self.config.global_batch * self.local_dim * self.config.itemsize
        sort = 2 * count * (4 + 4)
        rest = 2 * (count * values.element_size() + offsets.nbytes) + sort + 2 * pooled + 8 * read.distinct
        leaving = (self.config.global_batch - self.local_batch) * self.local_dim * self.config.itemsize
        others = self.local_batch * (self.config.sharding.total_dim - self.local_dim) * self.config.itemsize
        return StepTraffic(read.bytes, read.distinct_bytes, rest, leaving + others)


DEFAULT_FBGEMM = (DETERMINISTIC, FBGEMM)


def _ordered(names: Sequence[str]) -> list[str]:
    """Return the distinct variants in `names`, baselines first."""
    return [
        *(name for name in BASELINES if name in names),
        *(name for name in dict.fromkeys(names) if name not in BASELINES),
    ]


class _EmbeddingTraining(EmbeddingBenchmark):
    name, baselines = "embedding_training", BASELINES
    columns: ClassVar[Columns] = {
        "per occurrence\nms": cell("per_occurrence_ms", 3),
        "extra\nMB": cell("extra_bytes", 1, 1e6),
    }
    narrow = ("p20 - p80", "skew", "CPU\nus", "first\nms", "extra\nMB", "error")
    head = ("configuration", "floor, rows once, ms", "floor, per occurrence, ms")

    def check_options(self, options: BenchOptions) -> None:
        _find(options.preset)
        known = (*BASELINES, WEFT)
        for name in options.variants:
            if name not in known:
                raise ValueError(f"no variant {name!r}: give {', '.join(known)}")
            if name in DEFAULT_FBGEMM and (why := why_no_fbgemm()):
                raise ValueError(f"variant {name!r} cannot run here: {why}")

    def presets(self, options: BenchOptions) -> Sequence[EmbeddingPreset]:
        return _find(options.preset)

    def workload(self, preset: EmbeddingPreset, ranks: Ranks, options: BenchOptions) -> TrainingWorkload:
        share = 1 / 48 if options.quick else 1 / 3
        if ranks.device.type == "cuda":
            share = 0.78  # all variants share the tables
        # With enough memory for the outputs, GPUs keep the whole batch, also of skewed rows.
        scale = scale_for(replace(preset, indices=Zipf(0)), ranks, options, free_bytes(ranks), share)
        config = preset.config(ranks.world_size, scale, DTYPES[options.dtype])
        wanted = set(options.variants or DEFAULT_FBGEMM) & set(DEFAULT_FBGEMM)
        return TrainingWorkload(config, ranks, input_sets=2, with_fbgemm=bool(wanted) and why_no_fbgemm() is None)

    # --- tables in documents ---

    def compared(self, rows: Sequence[Record]) -> dict[str, tuple[str, ...]]:
        shown = self.shown(rows)
        return {WEFT: tuple(v for v in shown if v in BASELINES)} if WEFT in shown else {}

    def described(self, record: Record) -> list[str]:
        return super().described(record) + [f"{record[what]:.3f}" for what in ("roofline_ms", "per_occurrence_ms")]


def _find(names: str | None) -> tuple[EmbeddingPreset, ...]:
    wanted = list(TRAINED) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in TRAINED:
            raise ValueError(f"no preset {name!r}: give one of {', '.join(TRAINED)}")
    return tuple(TRAINED[name] for name in dict.fromkeys(wanted))


OPERATOR = _EmbeddingTraining()
