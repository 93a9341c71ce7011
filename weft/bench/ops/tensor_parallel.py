"""Benchmark of whole blocks of tensor-parallel Llamas, forward and backward: how much of their communication is hidden.

Presets are models, with an MLP and an attention each, of one sequence of 8192 positions (preset cpu: 512). Variants:

    serial           the baseline: torch's all-gather before GEMMs and reduce-scatter behind them
    weft             weft.nn.ParallelMLP, weft.nn.ParallelAttention
    weft-compiled    the same under torch.compile
    asynctp          torch's styles (parallelize_module) under torch.compile with its AsyncTP; GPUs only

Beside them runs `compute`: the same GEMMs, attention and elementwise operations on one rank's part, without any communication, on
whatever data. `hidden` is (serial - variant) / (serial - compute): 0 is all communication exposed, 1 none. Of compiled
variants it also has what the compiler gains elsewhere, so tables show it of `weft` alone.

Before anything is timed, results and all gradients of each variant are compared with those of `serial`, in memory that was full of
NaN; those of the last timed call are too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

import weft.nn
from weft.bench.core import remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Mode, Ranks, Timing, time_arms
from weft.bench.core.measure import STEPS, Step, first_calls
from weft.bench.core.operator import Measured, Operator
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.records import common_fields
from weft.bench.core.tables import Record, milliseconds, number, times
from weft.bench.ops.asynctp import ASYNCTP
from weft.bench.ops.gemms import BASELINE, WEFT
from weft.bench.ops.tensor_parallel_arms import (
    COMPILED,
    COMPUTE,
    Block,
    Model,
    arms_of,
    fused_by_torch,
    local,
)
from weft.words import counted

MODELS = {
    "llama-3-8b": Model(4096, 14336, 32, 8, 8192),
    "llama-3-70b": Model(8192, 28672, 64, 8, 8192),
    "llama-3-405b": Model(16384, 53248, 128, 8, 8192),
    "cpu": Model(256, 768, 8, 4, 512),
}
VARIANTS = (BASELINE, WEFT, COMPILED, ASYNCTP)
_CLAIMS = ((WEFT, BASELINE), (COMPILED, ASYNCTP))


def limit(dtype: torch.dtype) -> float:
    """How far from serial's results a variant's may be, relative to the largest element: both round what they keep a few times, and
    add in orders of their own."""
    return 4 * torch.finfo(dtype).eps + 1e-4


class Comparison:
    """A block's inputs and arms on one rank, and what `serial` makes of them. Making one is collective."""

    def __init__(self, block: Block, wanted: Sequence[str], ranks: Ranks, dtype: torch.dtype) -> None:
        torch.compiler.reset()
        self.block, self.ranks, self.limit = block, ranks, limit(dtype)
        self.arms = arms_of(block, wanted, ranks, dtype)
        model, device = block.model, ranks.device
        torch.manual_seed(1 + ranks.rank)
        shape = (model.length // ranks.world_size, 1, model.hidden)
        self.x = torch.randn(shape, device=device).to(dtype).requires_grad_()
        self.grad = torch.randn(shape, device=device).to(dtype)
        rotary = weft.nn.rotary_embedding(model.length, model.head_dim, device=device)
        self.rest = (rotary,) if block.kind == "attention" else ()
        self.wrong: dict[str, str] = {}

    def call(self, name: str, which: int = 0) -> torch.Tensor:
        """Forward and backward. Gradients are new ones."""
        arm = self.arms[name]
        self.x.grad = None
        for parameter in arm.module.parameters():
            parameter.grad = None
        y = arm.call(self.x, *self.rest)
        y.backward(self.grad)
        return y

    def results(self, name: str, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of the last call, which was this arm's and returned `y`: this rank's part of that and of all gradients."""
        gradients = {f"the gradient of {n}": local(p.grad) for n, p in self.arms[name].module.named_parameters()}
        return {"y": local(y.detach()), "the gradient of x": local(self.x.grad)} | gradients

    def check(self, name: str) -> float:
        """Call it, on memory full of NaN, and compare; the error. Collective."""
        if name == BASELINE:
            self.wanted = {key: value.clone() for key, value in self.results(name, self.call(name)).items()}
        for value in self.results(name, self.call(name)).values():
            value.fill_(math.nan)
        return self.compare(name, self.call(name), "it was not timed")

    def compare(self, name: str, y: torch.Tensor, so: str) -> float:
        """The largest error of the last call's results, relative to the largest element of `serial`'s; what is too large is noted.
        Collective."""
        found = self.results(name, y)
        mine = [_distance(found[key], wanted) for key, wanted in self.wanted.items()]
        errors = dict(zip(self.wanted, map(max, zip(*self.ranks.gather(mine), strict=True)), strict=True))
        worst = max(errors, key=errors.__getitem__)
        if errors[worst] > self.limit:
            self.wrong[name] = (
                f"{self.block.name}: {worst} of {name} differs from {BASELINE}'s by {errors[worst]:.3g} of the largest element; at "
                f"most {self.limit:.3g} is allowed: {so}"
            )
        return errors[worst]

    def measured(self, options: BenchOptions, ceilings: list[Ceilings], step: Step) -> Measured:
        """Check and time the arms. Collective; the same times on every rank."""
        name, checking = self.block.name, f"{self.block.name}: comparing every variant with {BASELINE}"
        step(checking, 0)
        checked = [arm for arm in self.arms if arm != COMPUTE]
        first_call_ms = first_calls({arm: partial(self.call, arm) for arm in self.arms}, self.ranks)
        errors = {arm: self.check(arm) for arm in checked}
        fused = fused_by_torch(partial(self.call, ASYNCTP)) if ASYNCTP in self.arms else None
        step(checking, STEPS)

        def inspect(arm: str, which: int, y: Any) -> None:
            if arm != COMPUTE:
                errors[arm] = max(
                    errors[arm], self.compare(arm, y, "that was its last timed call, and no time is kept")
                )

        timings = time_arms(
            {arm: partial(self.call, arm) for arm in self.arms if arm not in self.wrong}, self.ranks, "queued", input_sets=1,
            seconds=options.time_s, repetitions=options.repetitions, claims=_CLAIMS,
            advance=partial(step, f"{name}: timing"), inspect=inspect,
        )  # fmt: skip
        timings = {arm: timing for arm, timing in timings.items() if arm not in self.wrong}
        world = self.ranks.world_size
        common = common_fields(options, name, world, BASELINE, None, ceilings)
        common |= {"mode": "queued", "length": self.block.model.length}
        rows = []
        for arm, timing in timings.items():
            of: Record = {"first_call_ms": first_call_ms[arm], "error": errors.get(arm), "hidden": hidden(arm, timings)}
            of |= {"fused_by_torch": fused} if arm == ASYNCTP else {}
            over = {o: timings[o].p50_ms / timing.p50_ms for o in (BASELINE, ASYNCTP) if o in timings}
            of |= {"speedup": over.get(BASELINE), "speedup_over": over}
            rows.append(common | {"variant": arm} | asdict(timing) | of)
        where = f"{options.dtype}, {counted(world, 'rank')}, {options.device}"
        title = f"{options.op} {name} (a sequence of {self.block.model.length}), forward and backward, {where}"
        return Measured(rows, (), title, OPERATOR.notes(rows), tuple(self.wrong.values()))


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest of `wanted`; infinite where one is not finite, or shape or dtype are others."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return math.inf
    error = float((found.float() - wanted.float()).abs().max()) / max(float(wanted.abs().max()), 1e-30)
    return error if math.isfinite(error) else math.inf


def hidden(arm: str, timings: Mapping[str, Timing]) -> float | None:
    """The share of the communication that it hides; None without what it is compared with, or if communication took no time."""
    if arm == COMPUTE or BASELINE not in timings:
        return None
    serial, compute, mine = (timings[name].p50_ms for name in (BASELINE, COMPUTE, arm))
    return (serial - mine) / (serial - compute) if serial > compute else None


class _TensorParallel(Operator[Block]):
    name = "tensor_parallel"
    refuses = {**Operator.refuses, "scale": "has sizes of models: give another preset"}  # noqa: RUF012
    baselines = (BASELINE, ASYNCTP)

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("queued",)

    def check_options(self, options: BenchOptions) -> None:
        if unknown := [name for name in options.variants if name not in VARIANTS]:
            raise ValueError(f"no variant {unknown[0]!r}: give some of {', '.join(VARIANTS)}")
        if ASYNCTP in options.variants and options.device != "cuda":
            raise ValueError(f"variant {ASYNCTP!r} cannot run here: torch has it for GPUs only")
        if options.ranks < 2:
            raise ValueError(f"ranks={options.ranks}: a block has nothing to communicate on fewer than 2")
        for block in self.presets(options):
            for what in ("length", "intermediate", "heads", "kv_heads"):
                if (size := getattr(block.model, what)) % options.ranks:
                    raise ValueError(f"ranks={options.ranks} do not divide {what}={size} of {block.of}: take 2 or 4")

    def presets(self, options: BenchOptions) -> Sequence[Block]:
        suiting = [name for name in MODELS if (name == "cpu") == (options.device == "cpu")]
        names = suiting if options.preset is None else [name.strip() for name in options.preset.split(",")]
        if unknown := [name for name in names if name not in MODELS]:
            raise ValueError(f"no preset {unknown[0]!r}: give some of {', '.join(MODELS)}")
        return [Block(name, kind, MODELS[name]) for name in dict.fromkeys(names) for kind in ("mlp", "attention")]

    def measure(
        self, preset: Block, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> Measured:
        step(f"{preset.name}: making inputs", 0)
        wanted = options.variants or tuple(v for v in VARIANTS if v != ASYNCTP or ranks.device.type == "cuda")
        return Comparison(preset, wanted, ranks, DTYPES[options.dtype]).measured(options, ceilings, step)

    def show(self, found: Measured, options: BenchOptions) -> None:
        by_name, rows = {r["variant"]: r for r in found.records}, []
        for name, r in by_name.items():
            took = [f"{r['p50_ms']:.4f}", f"{r['p20_ms']:.4f} - {r['p80_ms']:.4f}", f"{r['skew_ms']:.4f}"]
            gains = [times(1) if name == over else remarks.gain(r, by_name.get(over)) for over in self.baselines]
            others = [_hidden(r), number(r["host_us"], 1), number(r["first_call_ms"], 1)]
            rows.append([name, *took, *gains, *others, "" if r["error"] is None else f"{r['error']:.1e}"])
        gains = [f"vs\n{over}" for over in self.baselines]
        header = ["variant", "ms", "p20 - p80", "skew", *gains, "hidden", "host\nus", "first\nms", "error"]
        print_table(found.title, header, rows, (*found.notes, *found.wrong), optional=self.narrow)

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        title = f"{options.op}, {options.dtype}, {options.device}, milliseconds"
        print_table(title, *self.lines(written), self.notes(written))

    def lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """Without columns of what nobody measured."""
        header = ["block", COMPUTE, BASELINE, WEFT, f"{WEFT}: hidden", COMPILED, ASYNCTP, f"{COMPILED} vs {ASYNCTP}"]
        lines = []
        for config in dict.fromkeys(r["config"] for r in rows):
            of = {r["variant"]: r for r in rows if r["config"] == config}
            ms = {name: milliseconds(of[name]["p50_ms"]) for name in of}
            share = _hidden(of[WEFT]) if WEFT in of else ""
            cells = [*(ms.get(v, "") for v in (COMPUTE, BASELINE, WEFT)), share]
            cells += [*(ms.get(v, "") for v in (COMPILED, ASYNCTP)), _gain(of.get(COMPILED), of.get(ASYNCTP))]
            lines.append([config, *cells])
        kept = [i for i in range(len(header)) if any(line[i] for line in lines)]
        return [header[i] for i in kept], [[line[i] for i in kept] for line in lines]

    def notes(self, rows: Sequence[Record]) -> list[str]:
        header, lines = self.lines(rows)
        said = remarks.unclear([line[-1] for line in lines]) if header and " vs " in header[-1] else []
        counts: dict[int, list[str]] = {}
        torchs = [r for r in rows if r["variant"] == ASYNCTP]
        for r in torchs:
            counts.setdefault(r["fused_by_torch"], []).append(r["config"])
        for count, configs in counts.items():
            where = "" if len(counts) == 1 else f" ({', '.join(configs)})"
            none = ": its collectives did not overlap" if count == 0 else ""
            said.append(
                f"{ASYNCTP}: the compiler put {count or 'none'} of AsyncTP's operators into a call{none}{where}."
            )
        if few := [r for r in torchs if r["length"] <= remarks.MULTICAST_M]:
            said += remarks.of_asynctp(few)
        elif torchs:
            said.append(f"{ASYNCTP} gathers by NVLink multicast for M <= {remarks.MULTICAST_M} only, so not here.")
        return [*said, *(remarks.of_nccl(rows) if rows else [])]


def _hidden(r: Record) -> str:
    return f"{r['hidden']:.0%}" if r["variant"] == WEFT and r["hidden"] is not None else ""


def _gain(one: Record | None, base: Record | None) -> str:
    """In parentheses if it is unclear, where noise was recorded."""
    if one and base and "p20_ms" not in one:
        return times(base["p50_ms"] / one["p50_ms"])
    return remarks.gain(one, base)


OPERATOR = _TensorParallel()
