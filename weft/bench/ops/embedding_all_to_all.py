"""Benchmark of embedding pooling fused with the all-to-all: presets x variants.

Tables and batches of a preset are scaled down to fit this machine. The roofline is the time to move the bytes of a call
at the peak rates that the same run measures. It counts every read of a row as a read from memory. A call can be faster
if it finds repeated rows in a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Mode, Ranks
from weft.bench.core.measure import Results
from weft.bench.core.operator import ChoosingVariants, Columns
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.run import free_bytes
from weft.bench.core.tables import Record, cell
from weft.bench.ops.embedding_data import BASELINE, EmbeddingData
from weft.bench.ops.embedding_operator import EmbeddingBenchmark, scale_for
from weft.bench.ops.embedding_presets import EmbeddingPreset, find_presets, shared_out
from weft.bench.ops.embedding_variants import (
    CHOOSES,
    FusedVariant,
    SerialVariant,
    Variant,
    make_variant,
    why_not,
)

BASELINES = (BASELINE, "batched", "fbgemm")
DEFAULT = "direct"  # selected by transport="auto" on CPU, and on H200s by the cost model
DEFAULT_VARIANTS = ("batched", "fbgemm", DEFAULT, "put")
POOL, EXCHANGE = " pooling alone", "exchange alone"


@dataclass(frozen=True)
class Traffic:
    """The bytes that one rank must move in a call, with any algorithm.

    rows: all reads of table rows. distinct_rows: one read of each distinct row, as with a perfect cache. ids, offsets:
    the jagged input. outputs: all pooled vectors that this rank writes. wire: the pooled vectors that leave the rank.
    """

    rows: float
    distinct_rows: float
    ids: float
    offsets: float
    outputs: float
    wire: float

    @property
    def memory(self) -> float:
        return self.rows + self.ids + self.offsets + self.outputs

    def roofline_ms(self, ceilings: Ceilings) -> float:
        """Return the roofline in ms: the time to move these bytes at the peak rates `ceilings`. A call can be faster if
        repeated rows are found in a cache.
        """
        return ceilings.ms(self.memory, self.wire)


class EmbeddingWorkload(EmbeddingData, ChoosingVariants):
    """The inputs, variants and record fields of one configuration."""

    baselines = BASELINES
    claims = tuple((DEFAULT, baseline) for baseline in BASELINES)

    # --- variants and their records ---

    def variants(self, wanted: Sequence[str]) -> tuple[Mapping[str, Variant], dict[str, Call], list[str]]:
        """Return (variants, other calls to time, an empty list of notes). The other calls are the pooling of each serial
        variant alone, and the baseline's all-to-all alone if variant `weft` is measured.
        """
        names = dict.fromkeys([BASELINE, *(wanted or DEFAULT_VARIANTS)])
        self.built = {name: make_variant(name, self) for name in names if why_not(name, self.ranks.device) is None}
        pools: dict[str, Call] = {
            name + POOL: variant.pool for name, variant in self.built.items() if isinstance(variant, SerialVariant)
        }
        baseline = self.built[BASELINE]
        if CHOOSES in self.built and isinstance(baseline, SerialVariant):
            pooled = baseline.pool(0)
            pools[EXCHANGE] = lambda which: baseline.exchange(pooled)
        return self.built, pools, []

    def pair(self, mode: Mode) -> tuple[str, str]:
        return CHOOSES, BASELINE

    def taken(self, variant: str, mode: Mode) -> str:
        chosen = self.built[variant]
        assert isinstance(chosen, FusedVariant)
        return chosen.transport

    def alone_ms(self, mode: Mode, found: Results) -> tuple[float | None, float | None]:
        return found.ms(mode, BASELINE + POOL), found.ms(mode, EXCHANGE)

    def variant(self, name: str) -> Variant:
        return make_variant(name, self)

    def resized(self, size: int) -> Self:
        """Return a workload on the same tables with one new random input set. size: the global batch size."""
        other = copy.copy(self)
        other.input_sets = 1
        other.config = replace(self.config, batch_sizes=shared_out(size, self.ranks.world_size))
        other.local_batch = other.config.batch_sizes[self.ranks.rank]
        other.draw_inputs()
        return other

    def roofline_ms(self, ceilings: Sequence[Ceilings]) -> float:
        return max(t.roofline_ms(c) for t, c in zip(self.traffics, ceilings, strict=True))

    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        """Return record fields that are equal for all variants. The field traffic_bytes has the bytes (`Traffic`) of the rank
        with the longest roofline, which is a lower bound of the time.

        ceilings: each rank's peak rates.
        """
        worst = max(zip(self.traffics, ceilings, strict=True), key=lambda of: of[0].roofline_ms(of[1]))[0]
        scale, traffic = self.config.scale, {field: round(value) for field, value in asdict(worst).items()}
        scales = {"scale": float(scale.batch), "rows_scale": float(scale.rows)}
        return scales | {"shape": self.config.describe(), "traffic_bytes": traffic}

    def derived(self, mode: Mode, name: str, found: Results) -> Record:
        extra_bytes, how = self.built[name].extra_bytes
        return {"pool_ms": found.ms(mode, name + POOL), "extra_bytes": extra_bytes, "extra_bytes_how": how}

    def notes(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        roofline = f"roofline {self.roofline_ms(ceilings):.3f} ms from {ceilings[0]}"
        return [f"{self.config.describe()}; {self.config.scale}", roofline]

    # --- bytes ---

    @cached_property
    def traffics(self) -> list[Traffic]:
        """The traffic of each rank. All ranks must make this call."""
        return [Traffic(*values) for values in self.ranks.gather(list(asdict(self.traffic()).values()))]

    def traffic(self) -> Traffic:
        """Return the bytes that this rank must move in a call, averaged over the input sets."""
        read, (values, offsets) = self.rows_read(), self.inputs[0]
        count = sum(v.numel() for v, _ in self.inputs) / self.input_sets
        pooled = self.local_dim * self.config.itemsize
        return Traffic(
            rows=read.bytes, distinct_rows=read.distinct_bytes, ids=count * values.element_size(),
            offsets=offsets.nbytes, outputs=self.config.global_batch * pooled,
            wire=(self.config.global_batch - self.local_batch) * pooled,
        )  # fmt: skip


class _EmbeddingAllToAll(EmbeddingBenchmark):
    name, baselines = "embedding_all_to_all", BASELINES
    columns: ClassVar[Columns] = {"pool\nms": cell("pool_ms", 3), "extra\nMB": cell("extra_bytes", 1, 1e6)}
    narrow = ("pool\nms", "p20 - p80", "skew", "CPU\nus", "first\nms", "extra\nMB", "error")
    head = ("configuration",)

    def check_options(self, options: BenchOptions) -> None:
        find_presets(options.preset)
        for name in options.variants:
            if reason := why_not(name, torch.device(options.device)):
                raise ValueError(f"variant {name!r} cannot run here: {reason}")

    def presets(self, options: BenchOptions) -> Sequence[EmbeddingPreset]:
        return find_presets(options.preset)

    def workload(self, preset: EmbeddingPreset, ranks: Ranks, options: BenchOptions) -> EmbeddingWorkload:
        on_gpu, free = ranks.device.type == "cuda", free_bytes(ranks)
        # FBGEMM copies the tables. All variants together keep about ten outputs, and the reference takes as much as
        # two.
        share = (0.43 if why_not("fbgemm", ranks.device) is None else 0.75) if on_gpu else 1 / 3
        scale = scale_for(preset, ranks, options, free / 16 if options.quick and not on_gpu else free, share)
        config = preset.config(ranks.world_size, scale, DTYPES[options.dtype])
        return EmbeddingWorkload(config, ranks, input_sets=2 if options.quick else 3)

    # --- tables in documents ---

    def compared(self, rows: Sequence[Record]) -> dict[str, tuple[str, ...]]:
        """Return the speedups that the table shows: {variant: its baselines}. Only the default variant has speedups,
        because the table has many variants.
        """
        variants = self.shown(rows)
        fused = [v for v in variants if v not in BASELINES]
        chosen = [DEFAULT] if DEFAULT in fused else fused[:1]
        return dict.fromkeys(chosen, tuple(v for v in variants if v in BASELINES))

    def lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        header, lines = super().lines(rows)
        for chosen in self.compared(rows):
            header.append(f"{chosen} / roofline")
            ratios = {r["config"]: f"{r['roofline_ratio']:.2f}" for r in rows if r["variant"] == chosen}
            for config, cells in zip(dict.fromkeys(r["config"] for r in rows), lines, strict=True):
                cells.append(ratios.get(config, ""))
        return header, lines


OPERATOR = _EmbeddingAllToAll()
