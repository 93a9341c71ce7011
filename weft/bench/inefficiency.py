"""What a GEMM and an all-gather lose by being cut up, and what they lose beside each other: the FiCCO paper's characterisation
on the machine at hand.

For each GEMM of its table I, made smaller where need be: the library's GEMM against its pieces, an all-gather of its A
against its pieces, and both at once, the all-gather by copy engines, by a copying kernel and by the library
(`weft.bench.inefficiency_measure`). In the end the paper's observations are held against the numbers.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

import torch

from weft.bench.ceilings import Ceilings
from weft.bench.console import print_table
from weft.bench.harness import Mode, Ranks
from weft.bench.inefficiency_claims import claims
from weft.bench.inefficiency_gemms import Fitted, Gemm, find_gemms, fit
from weft.bench.inefficiency_measure import BASELINES, Effort, Found, measure
from weft.bench.inefficiency_pictures import draw, title_of
from weft.bench.inefficiency_results import Row, markdown, rows_of, show_tables
from weft.bench.measure import Step
from weft.bench.operator import Operator, Record
from weft.bench.options import DTYPES, BenchOptions
from weft.bench.records import common_fields
from weft.bench.tables import markdown_table
from weft.hw import available_memory_bytes

_SCALE = {"cuda": Fraction(1), "cpu": Fraction(1, 32)}
_MOST_OPS = {"cuda": 1.25e13, "cpu": 1.1e9}  # of a GEMM: 17 ms at 750 TFLOP/s, 18 ms at 60 GFLOP/s
_MEMORY_SHARE = 0.5  # of what is free
_REPETITIONS = 5  # as in the paper
_TRANSPORTS_ARE = {
    "cuda": ("dma: copy engines; kernel: a copying kernel; library: NCCL",),
    "cpu": (
        "dma: a copying thread, for there is no engine; kernel: copies by the threads that compute, in turns with the GEMM; "
        "library: gloo",
    ),
}
_OBSERVATION = ("observation", "section", "", "numbers")


class _Inefficiency(Operator[Gemm]):
    name = "inefficiency"
    pictures = True

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
        show(written, options)

    def table(self, rows: Sequence[Record]) -> str:
        measured = rows_of(rows)
        return f"{markdown(measured)}\n\n{markdown_table(_OBSERVATION, _observations(measured))}"


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


@dataclass(frozen=True)
class MeasuredGemm:
    """One GEMM's results, as the benchmark hands them on. `alone`: it is the only one of the run, which has no summary."""

    fitted: Fitted
    found: Found
    world_size: int
    ceilings: list[Ceilings]
    alone: bool

    @property
    def wrong(self) -> Sequence[str]:
        return ()  # a wrong result ends the run

    def records(self, options: BenchOptions, run: str) -> list[Record]:
        gemm, found, item = self.fitted.run, self.found, DTYPES[options.dtype].itemsize
        memory, link = (min(getattr(c, name) for c in self.ceilings) for name in ("memory", "link"))
        gather_ms = 1e3 * found.gathered_bytes / self.world_size * (self.world_size - 1) / link
        described = {
            "mode": "queued",
            "m": gemm.m,
            "n": gemm.n,
            "k": gemm.k,
            "paper": {k: v for k, v in asdict(self.fitted.paper).items() if k != "name"},
            "scaled": str(self.fitted),
            "item_bytes": item,
            "op_to_byte": gemm.op_to_byte(item),
            "traffic_bytes": gemm.traffic(item),
            "gathered_bytes": found.gathered_bytes,
        }
        records = []
        for name, timing in found.timings.items():
            base = BASELINES.get(name, name)
            loss = timing.p50_ms / found.timings[base].p50_ms
            roofline_ms = gather_ms if name.startswith("gather") else 1e3 * gemm.traffic(item) / memory
            common = common_fields(options, gemm.name, self.world_size, base, roofline_ms, self.ceilings, run)
            measured = {k: v for k, v in asdict(timing).items() if k != "host_us"}
            judged = {"speedup": 1 / loss, "loss": loss, "roofline_ratio": timing.p50_ms / roofline_ms}
            beside = {"overlap": found.overlap.get(name), "error": found.errors.get(name)}
            records.append({**common, **described, "variant": name, **measured, **judged, **beside})
        return records

    def show(self, options: BenchOptions) -> None:
        if self.alone:
            show(self.records(options, ""), options)


def show(records: Sequence[Record], options: BenchOptions) -> None:
    """Print tables and what they say of the paper's observations, and draw the pictures that were asked for."""
    rows = rows_of(records)
    show_tables(rows, _TRANSPORTS_ARE[options.device])
    print_table("The paper's observations, here", _OBSERVATION, _observations(rows))
    if options.pictures is not None:
        for path in draw(options.pictures, rows, title_of(records[-1])):
            print(f"drawn: {path}")


def _observations(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [(claim.text, claim.where, claim.verdict, claim.numbers) for claim in claims(rows)]


def _effort(options: BenchOptions) -> Effort:
    alone_s, beside_s = (0.004, 0.02) if options.device == "cuda" else (0.01, 0.06)
    return Effort(alone_s / 4, beside_s / 4, 2) if options.quick else Effort(alone_s, beside_s, _REPETITIONS)
