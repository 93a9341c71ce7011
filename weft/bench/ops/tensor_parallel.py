"""Benchmark of tensor-parallel Llama blocks, forward and backward: the fraction of the communication that is hidden.

A preset is a model. It has an MLP and an attention block, each run on one sequence. Variants:

    serial           the baseline: torch's all-gather before GEMMs and reduce-scatter after them
    weft             weft.nn.ParallelMLP, weft.nn.ParallelAttention
    weft-compiled    the same under torch.compile
    asynctp          torch's styles (parallelize_module) under torch.compile with its AsyncTP; GPUs only

The benchmark also times `compute`, the block without communication. Tables show the hidden fraction
(weft.bench.ops.layers) only for `weft`, because other gains of torch.compile would count as hidden communication.

Presets that end in -whole have no sequence parallelism: between blocks every rank has all activations. Their `serial`
has torch's all-reduce after the block in forward, and before it in backward. They run only if named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

import weft.nn
from weft.bench.core import remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Results
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.tables import Record, by_config, milliseconds, table
from weft.bench.ops.asynctp import ASYNCTP
from weft.bench.ops.gemms import BASELINE, WEFT
from weft.bench.ops.layers import COMPUTE, LayerBenchmark, LayerVariants, hidden_cell
from weft.bench.ops.tensor_parallel_variants import COMPILED, Block, ModelSizes, fused_by_torch, variants_of

MODELS = {
    "llama-3-8b": ModelSizes(4096, 14336, 32, 8, 8192),
    "llama-3-70b": ModelSizes(8192, 28672, 64, 8, 8192),
    "llama-3-405b": ModelSizes(16384, 53248, 128, 8, 8192),
    "cpu": ModelSizes(256, 768, 8, 4, 512),
}
MODELS |= {f"{name}-whole": model._replace(whole=True) for name, model in MODELS.items()}
VARIANTS = (BASELINE, WEFT, COMPILED, ASYNCTP)


class Comparison(LayerVariants):
    """The inputs and the variants of a block on one rank. All ranks must construct this object."""

    baselines, claims = (BASELINE, ASYNCTP), ((WEFT, BASELINE), (COMPILED, ASYNCTP))

    def __init__(self, block: Block, wanted: Sequence[str], ranks: Ranks, dtype: torch.dtype) -> None:
        torch.compiler.reset()
        model, device, self.length = block.model, ranks.device, block.model.length
        super().__init__(block.name, f"a sequence of {self.length}", ranks, dtype)
        self.layers = variants_of(block, wanted, ranks, dtype)
        torch.manual_seed(1 + (0 if model.whole else ranks.rank))
        rows = (1, model.length) if model.whole else (model.length // ranks.world_size, 1)
        shape = (*rows, model.hidden)
        self.inputs = {"x": torch.randn(shape, device=device).to(dtype).requires_grad_()}
        self.grad = torch.randn(shape, device=device).to(dtype)
        rotary = weft.nn.rotary_embedding(model.length, model.head_dim, device=device)
        self.rest = (rotary,) if block.kind == "attention" else ()

    # --- records ---

    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        return {"length": self.length}

    def derived(self, mode: Mode, name: str, found: Results) -> Record:
        derived = super().derived(mode, name, found)
        return derived | ({"fused_by_torch": fused_by_torch(partial(self.call, name))} if name == ASYNCTP else {})

    def notes(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        return OPERATOR.notes(records)


class _TensorParallel(LayerBenchmark[Block]):
    name, known, baselines = "tensor_parallel", VARIANTS, Comparison.baselines

    def check_options(self, options: BenchOptions) -> None:
        super().check_options(options)
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
        columns[f"{WEFT}: hidden"] = lambda of: hidden_cell(of.get(WEFT, {}))
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
