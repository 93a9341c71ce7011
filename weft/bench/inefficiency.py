"""What a GEMM and an all-gather lose by being cut up, and what they lose beside each other: the FiCCO paper's characterisation
on the machine at hand.

For each GEMM of its table I, made smaller where need be: the library's GEMM against its pieces, an all-gather of its A
against its pieces, and both at once, the all-gather by copy engines, by a copying kernel and by the library
(`weft.bench.inefficiency_measure`). In the end the paper's observations are held against the numbers.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from weft.bench.ceilings import Ceilings
from weft.bench.console import print_table
from weft.bench.harness import Mode, Ranks
from weft.bench.inefficiency_claims import claims
from weft.bench.inefficiency_gemms import Fitted, Gemm, find_gemms, fit
from weft.bench.inefficiency_measure import Effort, measure
from weft.bench.inefficiency_results import MeasuredGemm, markdown, rows_of, show_tables
from weft.bench.measure import Step
from weft.bench.operator import Operator, Record
from weft.bench.options import DTYPES, BenchOptions
from weft.bench.tables import markdown_table
from weft.hw import available_memory_bytes

_SCALE = {"cuda": Fraction(1), "cpu": Fraction(1, 32)}
_MOST_OPS = {"cuda": 1.25e13, "cpu": 1.1e9}  # of a GEMM: 17 ms at 750 TFLOP/s, 18 ms at 60 GFLOP/s
_MEMORY_SHARE = 0.5  # of what is free
_REPETITIONS = 5  # as in the paper


class _Inefficiency(Operator[Gemm]):
    name = "inefficiency"

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("queued",)

    def default_dtype(self, device: str) -> str:
        return "bf16" if device == "cuda" else "fp32"

    def check_options(self, options: BenchOptions) -> None:
        if options.ranks < 2:
            raise ValueError(f"ranks={options.ranks}: an all-gather takes at least 2")
        if options.scale is not None and not 0 < options.scale <= 1:
            raise ValueError(f"scale={options.scale} must be above 0 and at most 1: it shrinks M, N and K")
        if options.variants:
            raise ValueError(
                f"variants={options.variants}: inefficiency measures all of them, to compare them; give none"
            )
        if options.seconds is not None:
            raise ValueError(
                f"seconds={options.seconds}: inefficiency repeats each of its lanes {_REPETITIONS} times; give none, or --quick"
            )
        self.presets(options)

    def presets(self, options: BenchOptions) -> Sequence[Gemm]:
        return find_gemms([name.strip() for name in (options.preset or "").split(",") if name.strip()])

    def measure(
        self, preset: Gemm, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> MeasuredGemm:
        fitted = fitting(preset, ranks, options)
        found = measure(fitted.run, DTYPES[options.dtype], ranks, _effort(options), step)
        return MeasuredGemm(fitted, found, ranks.world_size, ceilings, alone=len(self.presets(options)) == 1)

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        rows = rows_of(written)
        show_tables(rows)
        print_table(
            "The paper's observations, here",
            ("observation", "section", "", "numbers"),
            [(c.text, c.where, c.verdict, c.numbers) for c in claims(rows)],
        )

    def table(self, rows: Sequence[Record]) -> str:
        measured = rows_of(rows)
        observed = [(c.text, c.where, c.verdict, c.numbers) for c in claims(measured)]
        return f"{markdown(measured)}\n\n{markdown_table(('observation', 'section', '', 'numbers'), observed)}"


OPERATOR = _Inefficiency()


def fitting(gemm: Gemm, ranks: Ranks, options: BenchOptions) -> Fitted:
    """`gemm` as it is run here; the same on all ranks. Collective."""
    if ranks.device.type == "cuda":
        free = -ranks.most(-torch.cuda.mem_get_info(ranks.device)[0])
    else:
        free = -ranks.most(-available_memory_bytes()) / ranks.world_size
    scale = _SCALE[ranks.device.type] if options.scale is None else Fraction(options.scale).limit_denominator(1 << 16)
    return fit(
        gemm,
        scale=scale,
        most_ops=_MOST_OPS[ranks.device.type] / (8 if options.quick else 1),
        most_bytes=_MEMORY_SHARE * free,
        item_bytes=DTYPES[options.dtype].itemsize,
    )


def _effort(options: BenchOptions) -> Effort:
    alone_s, beside_s = (0.004, 0.02) if options.device == "cuda" else (0.01, 0.06)
    return Effort(alone_s, beside_s, 2 if options.quick else _REPETITIONS)
