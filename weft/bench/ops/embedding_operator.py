"""The base of benchmarks on embedding tables: timing modes, dtype, scale, and tables in documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.operator import OperatorBenchmark
from weft.bench.core.options import DTYPES, MOST_SHRUNK, BenchOptions
from weft.bench.core.tables import Record, by_config, geomean, times
from weft.bench.ops.embedding_presets import EmbeddingPreset, Scale, fitting_scale


class EmbeddingBenchmark(OperatorBenchmark[EmbeddingPreset]):
    """The benchmark of an operator on embedding tables. Presets are scaled down to fit this machine."""

    time = "{}, ms"

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("single", "queued")

    def default_dtype(self, device: str) -> str:
        return "fp32"

    def described(self, record: Record) -> list[str]:
        batch, rows = (round(1 / record[what]) for what in ("scale", "rows_scale"))
        scale = f"1/{batch}" if batch == rows else f"batch 1/{batch}, rows 1/{rows}"
        return [record["config"] + (f" ({scale})" if max(batch, rows) > 1 else "")]

    def summary(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """Return (header, rows) of `lines`, with geometric means of the speedups in the last row."""
        header, lines = self.lines(rows)
        if len(lines) > 1:
            cases, means = by_config(rows).values(), {}
            for v, overs in self.compared(rows).items():
                for over in overs:
                    gains = [of[over]["p50_ms"] / of[v]["p50_ms"] for of in cases if {v, over} <= of.keys()]
                    means[f"{v} vs {over}"] = times(geomean(gains))
            lines.append(["geometric mean", *(means.get(column, "") for column in header[1:])])
        return header, lines


def scale_for(preset: EmbeddingPreset, ranks: Ranks, options: BenchOptions, free: float, share: float) -> Scale:
    """Return `options.scale`, or the largest scale that fits this machine, equal on all ranks.

    free: the free memory of a rank in bytes. share: the fraction of the free memory that tables may take.
    """
    if options.scale is not None:
        scale = Fraction(options.scale).limit_denominator(MOST_SHRUNK)
        return Scale(scale, scale)
    if ranks.device.type == "cuda":
        rows_bytes = 2e9 if options.quick else math.inf
    else:
        rows_bytes = (
            (min(64, options.read_mib) if options.quick else options.read_mib) * 2**20 * torch.get_num_threads()
        )
    sizes = {"table_bytes": share * free, "rows_bytes": rows_bytes, "output_bytes": 0.05 * free}
    return fitting_scale(preset, ranks.world_size, DTYPES[options.dtype], **sizes)
