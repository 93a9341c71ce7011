"""The benchmark `weft bench inefficiency`: decomposition and contention losses of a GEMM and an all-gather on this machine
(`weft.studies.losses`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Step
from weft.bench.core.operator import Measured, OperatorBenchmark
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.records import common_fields
from weft.bench.core.run import free_bytes
from weft.bench.core.tables import Record, markdown_table
from weft.bench.table_1 import Fitted, GatheredGemm, find_gemms, fit
from weft.studies.losses import claims, draw, rows_of, tables
from weft.studies.losses_measure import BASELINES, Found, MeasuringEffort, measure
from weft.words import counted

_SCALE = {"cuda": Fraction(1), "cpu": Fraction(1, 32)}
_MOST_OPS = {"cuda": 1.25e13, "cpu": 1.1e9}  # most FLOPs of a GEMM: 17 ms at 750 TFLOP/s, 18 ms at 60 GFLOP/s
_MEMORY_SHARE = 0.5  # fraction of the free memory
_REPETITIONS = 5  # as in the paper
_TRANSPORTS_ARE = {
    "cuda": "dma: copy engines; kernel: a copying kernel; library: NCCL",
    "cpu": "dma: a copying thread, since a CPU has no copy engine; kernel: copies by the compute threads, "
    "alternating with the GEMM; library: gloo",
}
_OBSERVATION = ("observation", "section of the paper", "here", "numbers")


def _records(fitted: Fitted, found: Found, ranks: int, ceilings: list[Ceilings], options: BenchOptions) -> list[Record]:
    gemm = fitted.run
    memory, link = (min(getattr(c, name) for c in ceilings) for name in ("memory", "link"))
    gather_ms = 1e3 * found.gathered_bytes / ranks * (ranks - 1) / link
    described = {
        "mode": "queued", "m": gemm.m, "n": gemm.n, "k": gemm.k,
        "paper": {k: v for k, v in asdict(fitted.paper).items() if k not in ("name", "item_bytes")}, "scaled": str(fitted),
        "n_over": fitted.ranks,
        "item_bytes": gemm.item_bytes, "op_to_byte": gemm.op_to_byte, "traffic_bytes": gemm.traffic,
        "gathered_bytes": found.gathered_bytes,
    }  # fmt: skip
    records = []
    for name, timing in found.timings.items():
        base = BASELINES.get(name, name)
        loss = timing.p50_ms / found.timings[base].p50_ms
        roofline_ms = gather_ms if name.startswith("gather") else 1e3 * gemm.traffic / memory
        common = common_fields(options, gemm.name, ranks, base, roofline_ms, ceilings)
        measured = {k: v for k, v in timing.as_fields().items() if k != "host_us"}
        judged = {"speedup": 1 / loss, "loss": loss, "roofline_ratio": timing.p50_ms / roofline_ms}
        beside = {"overlap": found.overlap.get(name), "error": found.errors.get(name)}
        records.append({**common, **described, "variant": name, **measured, **judged, **beside})
    return records


class _Losses(OperatorBenchmark[GatheredGemm]):
    name = "inefficiency"
    refuses = {  # noqa: RUF012
        "option": OperatorBenchmark.refuses["option"],
        "variants": "compares all variants: do not pass it",
        "counters": "reads no counters: do not pass it",
        "seconds": f"repeats each measurement {_REPETITIONS} times: do not pass it, or pass --quick",
    }

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("queued",)

    def check_options(self, options: BenchOptions) -> None:
        if options.ranks < 2:
            raise ValueError(f"ranks={options.ranks}: an all-gather needs at least 2: pass --ranks 2 or more")
        self.presets(options)

    def presets(self, options: BenchOptions) -> Sequence[GatheredGemm]:
        return find_gemms(options.presets)

    def measure(
        self, preset: GatheredGemm, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> Measured:
        device, dtype = ranks.device.type, DTYPES[options.dtype]
        fitted = fit(
            replace(preset, item_bytes=dtype.itemsize),
            ranks=ranks.world_size,
            scale=_SCALE[device] if options.scale is None else Fraction(options.scale).limit_denominator(1 << 16),
            most_ops=_MOST_OPS[device] / (8 if options.quick else 1),
            most_bytes=_MEMORY_SHARE * free_bytes(ranks),
        )
        alone_s, beside_s = (0.004, 0.02) if device == "cuda" else (0.01, 0.06)
        effort = (
            MeasuringEffort(alone_s / 4, beside_s / 4, 2)
            if options.quick
            else MeasuringEffort(alone_s, beside_s, _REPETITIONS)
        )
        found = measure(fitted.run, dtype, ranks, effort, step)
        return Measured(_records(fitted, found, ranks.world_size, ceilings, options))

    def show(self, found: Measured, options: BenchOptions) -> None:
        """Show the result of one GEMM. Show nothing if a summary of several GEMMs follows."""
        if len(self.presets(options)) == 1:
            self.show_summary(found.records, options)

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        """Print the tables and the verdict on the paper's observations, and draw pictures if the options ask for them."""
        rows = rows_of(written)
        for one in tables(rows):
            print_table(*one)
        observations = [claim.cells for claim in claims(rows)]
        print_table(
            "The paper's observations on this machine", _OBSERVATION, observations, [_TRANSPORTS_ARE[options.device]]
        )
        if options.pictures is not None:
            last = written[-1]
            ran = f"{counted(last['ranks'], 'rank')}, {last['dtype']}, {last['machine']}"
            title = f"{ran}; {last['date'][:10]}, {last['commit']}"
            for path in draw(options.pictures, rows, title):
                print(f"drawn: {path}")

    def table(self, rows: Sequence[Record]) -> str:
        whole = sorted({r["config"] for r in rows if "n_over" not in r}, key=lambda name: int(name[1:]))
        parts, measured = [], rows_of(rows)
        if whole:
            which = "These records" if len(whole) == len(measured) else f"The records of {', '.join(whole)}"
            parts.append(
                f"{which} predate a change: each rank computed all N columns of table I. Now it computes only its share of them."
            )
        for one in tables(measured):
            parts += [one.title, markdown_table([column.replace("\n", " ") for column in one.columns], one.cells)]
        return "\n\n".join([*parts, markdown_table(_OBSERVATION, [claim.cells for claim in claims(measured)])])


OPERATOR = _Losses()
