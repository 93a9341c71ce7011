"""Benchmark of tensor-parallel Llama blocks, forward and backward: the fraction of the communication that is hidden.

A preset is a model. It has an MLP and an attention block, each run on one sequence. Variants:

    serial           the baseline: torch's all-gather before GEMMs and reduce-scatter after them
    weft             weft.nn.ParallelMLP, weft.nn.ParallelAttention
    weft-compiled    the same under torch.compile
    asynctp          torch's styles (parallelize_module) under torch.compile with its AsyncTP; GPUs only

Also timed: `compute`, the block without communication. The hidden fraction is (serial - variant) / (serial - compute):
0 if nothing is hidden, 1 if all communication is hidden. Tables show it only for `weft`, because other gains of
torch.compile would count as hidden communication.

Presets that end in -whole have no sequence parallelism: between blocks every rank has all activations. Their `serial`
has torch's all-reduce after the block in forward, and before it in backward. They run only if named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import ClassVar

import torch

import weft.nn
from weft.bench.core import remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Mode, Ranks
from weft.bench.core.measure import Results
from weft.bench.core.operator import Columns, OperatorBenchmark, Variants
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.tables import Record, by_config, milliseconds, table
from weft.bench.ops.any_operator import Variant
from weft.bench.ops.asynctp import ASYNCTP
from weft.bench.ops.gemms import BASELINE, WEFT
from weft.bench.ops.tensor_parallel_variants import (
    COMPILED,
    COMPUTE,
    Block,
    ModelSizes,
    fused_by_torch,
    local,
    variants_of,
)

MODELS = {
    "llama-3-8b": ModelSizes(4096, 14336, 32, 8, 8192),
    "llama-3-70b": ModelSizes(8192, 28672, 64, 8, 8192),
    "llama-3-405b": ModelSizes(16384, 53248, 128, 8, 8192),
    "cpu": ModelSizes(256, 768, 8, 4, 512),
}
MODELS |= {f"{name}-whole": model._replace(whole=True) for name, model in MODELS.items()}
VARIANTS = (BASELINE, WEFT, COMPILED, ASYNCTP)


class Comparison(Variants):
    """The inputs and the variants of a block on one rank. All ranks must construct this object.

    The output and all gradients of a variant are compared with those of `serial`.
    """

    baselines, claims, input_sets = (BASELINE, ASYNCTP), ((WEFT, BASELINE), (COMPILED, ASYNCTP)), 1

    def __init__(self, block: Block, wanted: Sequence[str], ranks: Ranks, dtype: torch.dtype) -> None:
        torch.compiler.reset()
        self.name, self.ranks, self.dtype = block.name, ranks, dtype
        self.about = f"a sequence of {block.model.length}, forward and backward"
        self.blocks = variants_of(block, wanted, ranks, dtype)
        model, device, self.length = block.model, ranks.device, block.model.length
        torch.manual_seed(1 + (0 if model.whole else ranks.rank))
        rows = (1, model.length) if model.whole else (model.length // ranks.world_size, 1)
        shape = (*rows, model.hidden)
        self.x = torch.randn(shape, device=device).to(dtype).requires_grad_()
        self.grad = torch.randn(shape, device=device).to(dtype)
        rotary = weft.nn.rotary_embedding(model.length, model.head_dim, device=device)
        self.rest = (rotary,) if block.kind == "attention" else ()
        self.worst: dict[str, str] = {}

    def variants(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        return {name: partial(self.call, name) for name in self.blocks}, {}, []

    def call(self, name: str, which: int = 0) -> torch.Tensor:
        """Run forward and backward of a variant, and return the output. Gradients of earlier calls are dropped first."""
        variant = self.blocks[name]
        self.x.grad = None
        for parameter in variant.module.parameters():
            parameter.grad = None
        y = variant.call(self.x, *self.rest)
        y.backward(self.grad)
        return y

    # --- compared results ---

    def results(self, name: str, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {name: this rank's part} of the output `y` and all gradients, after a call of variant `name`."""
        gradients = {f"the gradient of {n}": local(p.grad) for n, p in self.blocks[name].module.named_parameters()}
        return {"y": local(y.detach()), "the gradient of x": local(self.x.grad)} | gradients

    @cached_property
    def wanted(self) -> dict[str, torch.Tensor]:
        """The output and all gradients of the baseline, with which other variants are compared. All ranks must make this call."""
        return {key: value.clone() for key, value in self.results(BASELINE, self.call(BASELINE)).items()}

    def reference(self, which: int) -> dict[str, torch.Tensor]:
        return self.wanted

    def poison(self, name: str, output: torch.Tensor) -> None:
        for value in self.results(name, output).values():
            value.fill_(math.nan)

    def error(self, name: str, output: torch.Tensor, which: int, reference: Mapping[str, torch.Tensor]) -> float:
        """Return the largest error of the output or of a gradient, relative to the largest element of the same tensor
        of `serial`.

        Return 0 for `compute`, whose results are wrong without communication.
        """
        if name == COMPUTE:
            return 0.0
        found = self.results(name, output)
        mine = [_distance(found[key], wanted) for key, wanted in reference.items()]
        errors = dict(zip(reference, map(max, zip(*self.ranks.gather(mine), strict=True)), strict=True))
        self.worst[name] = max(errors, key=errors.__getitem__)
        return errors[self.worst[name]]

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """Return the error limit: a few roundings, because `serial` rounds too, and sums in another order."""
        return 4 * torch.finfo(self.dtype).eps + 1e-4

    def differs(self, name: str, how: str) -> str:
        return f"{self.worst[name]} of {name} differs from {BASELINE}'s"

    # --- records ---

    def roofline_ms(self, ceilings: Sequence[Ceilings]) -> None:
        return None

    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        return {"length": self.length}

    def derived(self, mode: Mode, name: str, found: Results) -> Record:
        serial, compute, mine = (found.ms(mode, of) for of in (BASELINE, COMPUTE, name))
        derived: Record = (
            {"hidden": None, "error": None} if name == COMPUTE else {"hidden": hidden(serial, compute, mine)}
        )
        return derived | ({"fused_by_torch": fused_by_torch(partial(self.call, name))} if name == ASYNCTP else {})

    def notes(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        return OPERATOR.notes(records)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element of `wanted`.

    Return infinity if an element is not finite, or if shapes or dtypes differ."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return math.inf
    error = float((found.float() - wanted.float()).abs().max()) / max(float(wanted.abs().max()), 1e-30)
    return error if math.isfinite(error) else math.inf


def hidden(serial: float | None, compute: float | None, mine: float | None) -> float | None:
    """Return the fraction of the communication that is hidden; None if a time is missing, or if communication takes no
    time.

    serial, compute, mine: the times of `serial`, of the computation alone, and of the variant.
    """
    if serial is None or compute is None or mine is None or serial <= compute:
        return None
    return (serial - mine) / (serial - compute)


def _hidden(r: Record) -> str:
    return f"{r['hidden']:.0%}" if r.get("variant") == WEFT and r["hidden"] is not None else ""


class _TensorParallel(OperatorBenchmark[Block]):
    name = "tensor_parallel"
    refuses = {**OperatorBenchmark.refuses, "scale": "cannot be scaled: give another preset"}  # noqa: RUF012
    baselines = Comparison.baselines
    columns: ClassVar[Columns] = {"hidden": _hidden}

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("queued",)

    def check_options(self, options: BenchOptions) -> None:
        if unknown := [name for name in options.variants if name not in VARIANTS]:
            raise ValueError(f"no variant {unknown[0]!r}: give some of {', '.join(VARIANTS)}")
        if ASYNCTP in options.variants and options.device != "cuda":
            raise ValueError(f"variant {ASYNCTP!r} runs only on GPUs: use device='cuda', or leave the variant out")
        if options.ranks < 2:
            raise ValueError(f"ranks={options.ranks}: a tensor-parallel block needs at least 2 ranks")
        for block in self.presets(options):
            if ASYNCTP in options.variants and block.model.whole:
                raise ValueError(
                    f"variant {ASYNCTP!r} cannot run preset {block.of}, because AsyncTP has no all-reduce: leave the variant out"
                )
            for what in ("length", "intermediate", "heads", "kv_heads"):
                if (size := getattr(block.model, what)) % options.ranks:
                    raise ValueError(
                        f"{what}={size} of {block.of} must be divisible by ranks={options.ranks}: use 2 or 4"
                    )

    def presets(self, options: BenchOptions) -> Sequence[Block]:
        suiting = [n for n, model in MODELS.items() if (n == "cpu") == (options.device == "cpu") and not model.whole]
        names = options.presets or suiting
        if unknown := [name for name in names if name not in MODELS]:
            raise ValueError(f"no preset {unknown[0]!r}: give some of {', '.join(MODELS)}")
        return [Block(name, kind, MODELS[name]) for name in dict.fromkeys(names) for kind in ("mlp", "attention")]

    def workload(self, preset: Block, ranks: Ranks, options: BenchOptions) -> Comparison:
        wanted = options.variants or tuple(v for v in VARIANTS if v != ASYNCTP or ranks.device.type == "cuda")
        if preset.model.whole:
            wanted = tuple(v for v in wanted if v != ASYNCTP)  # AsyncTP has no all-reduce
        return Comparison(preset, wanted, ranks, DTYPES[options.dtype])

    def lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """Return (header, rows) of a table with a row for each block, without columns that were not measured."""

        def ms(variant: str) -> Callable[[Mapping[str, Record]], str]:
            return lambda of: milliseconds(of[variant]["p50_ms"]) if variant in of else ""

        columns = {
            "block": lambda of: next(iter(of.values()))["config"],
            **{v: ms(v) for v in (COMPUTE, BASELINE, WEFT)},
        }
        columns[f"{WEFT}: hidden"] = lambda of: _hidden(of.get(WEFT, {}))
        columns |= {v: ms(v) for v in (COMPILED, ASYNCTP)}
        columns[f"{COMPILED} vs {ASYNCTP}"] = lambda of: remarks.gain(of.get(COMPILED), of.get(ASYNCTP))
        _, header, lines = table("", [*by_config(rows).values()], columns)
        return [*header], [[*line] for line in lines]

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
            said.append(f"{ASYNCTP}: a compiled call contains {count or 'none'} of AsyncTP's operators{none}{where}.")
        if few := [r for r in torchs if r["length"] <= remarks.MULTICAST_M]:
            said += remarks.of_asynctp(few)
        elif torchs:
            said.append(f"{ASYNCTP} never gathers by NVLink multicast here, because M is above {remarks.MULTICAST_M}.")
        return [*said, *(remarks.of_nccl(rows) if rows else [])]


OPERATOR = _TensorParallel()
