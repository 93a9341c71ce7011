"""A configuration's results as JSON records and as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench import records, remarks
from weft.bench.ceilings import Ceilings
from weft.bench.console import print_table
from weft.bench.embedding_arms import BASELINES, Arm, FusedArm
from weft.bench.embedding_presets import EmbeddingPreset
from weft.bench.embedding_workload import BASELINE, EmbeddingWorkload, Traffic
from weft.bench.harness import Mode
from weft.bench.measure import Results
from weft.bench.operator import Record
from weft.bench.options import BenchOptions
from weft.bench.tables import geomean, markdown_table, milliseconds, times
from weft.words import counted

POOL = " pooling alone"
DEFAULT = "direct"  # what transport="auto" takes
_LAST_COLUMNS = ("over\nroofline", "pool\nms", "extra\nMB", "error")


@dataclass(frozen=True)
class MeasuredEmbedding:
    """A configuration's results, where arm + POOL is a serial arm's pooling alone."""

    preset: EmbeddingPreset
    work: EmbeddingWorkload
    results: Results
    arms: dict[str, Arm]
    traffic: list[Traffic]
    ceilings: list[Ceilings]
    memory: dict[str, tuple[int, str]]
    kernels: dict[str, dict[str, int]]  # of fused arms on GPUs, on this rank

    @property
    def wrong(self) -> tuple[str, ...]:
        return self.results.wrong

    @property
    def roofline_ms(self) -> float:
        return max(t.roofline_ms(c) for t, c in zip(self.traffic, self.ceilings, strict=True))

    def put_us_per_slice(self, mode: Mode, name: str) -> float | None:
        """What a program of `name` spends on a slice for staging, copy, fence and flag, beyond what `direct` takes.

        (put's time - direct's) x resident programs / slices sent, on this rank; None where there is no such pair.
        """
        arm, direct = self.arms[name], next((n for n in self.arms if n == name.replace("put", "direct", 1)), "direct")
        timings = self.results.timings
        if not isinstance(arm, FusedArm) or name not in self.kernels or (mode, direct) not in timings:
            return None
        slices = arm.slices_sent()
        longer_ms = timings[mode, name].p50_ms - timings[mode, direct].p50_ms
        return 1e3 * longer_ms * self.kernels[name]["grid"] / slices if slices else None

    def records(self, options: BenchOptions, run: str) -> list[Record]:
        config = self.work.config
        times_ms = [t.roofline_ms(c) for t, c in zip(self.traffic, self.ceilings, strict=True)]
        traffic = self.traffic[times_ms.index(max(times_ms))]
        common = records.common_fields(
            options, config.name, self.work.ranks.world_size, BASELINE, self.roofline_ms, self.ceilings, run
        ) | {
            "scale": float(config.scale.batch),
            "rows_scale": float(config.scale.rows),
            "shape": config.describe(),
            "traffic_bytes": {field: round(getattr(traffic, field)) for field in Traffic.__dataclass_fields__},
        }
        rows = []
        for mode in options.modes:
            for name in self._timed(mode):
                pool = self.results.timings.get((mode, name + POOL))
                extra_bytes, how = self.memory[name]
                rows.append(
                    common
                    | records.arm_fields(self.results, mode, name, common, BASELINES)
                    | {
                        "pool_ms": pool.p50_ms if pool else None,
                        "extra_bytes": extra_bytes,
                        "extra_bytes_how": how,
                        "kernel": self.kernels.get(name),
                        "put_us_per_slice": self.put_us_per_slice(mode, name),
                    }
                )
        return rows

    def show(self, options: BenchOptions) -> None:
        config = self.work.config
        others = [name for name in BASELINES if self.results.timed(options.modes[0], name)]
        rows = []
        for mode in options.modes:
            for name in self._timed(mode):
                timing, pool = self.results.timings[mode, name], self.results.timings.get((mode, name + POOL))
                over = [self.results.gain(mode, name, o) for o in others]
                rows.append(
                    (
                        name,
                        mode,
                        f"{timing.p50_ms:.3f}",
                        f"{timing.p20_ms:.3f} - {timing.p80_ms:.3f}",
                        f"{timing.skew_ms:.3f}",
                        *over,
                        f"{timing.p50_ms / self.roofline_ms:.2f}",
                        f"{pool.p50_ms:.3f}" if pool else "",
                        f"{self.memory[name][0] / 1e6:.1f}",
                        f"{self.results.errors[name]:.1e}",
                    )
                )
        ceilings = self.ceilings[0].as_fields()
        link = "" if ceilings["link_gbps"] is None else f", {ceilings['link_gbps']:.1f} GB/s to a peer"
        print_table(
            f"{options.op} {config.name} ({self.preset.about}), {options.dtype}, {options.device}",
            ("variant", "mode", "ms", "p20 - p80", "skew", *(f"vs\n{o}" for o in others), *_LAST_COLUMNS),
            rows,
            (
                f"{config.describe()}; {config.scale}",
                f"roofline {self.roofline_ms:.3f} ms from {ceilings['memory_gbps']:.1f} GB/s of memory a rank{link}",
                *self._kernel_notes(options.modes),
                *self.wrong,
            ),
            section=1,
            optional=("pool\nms", "p20 - p80", "skew", "extra\nMB", "error"),
        )

    def _timed(self, mode: Mode) -> list[str]:
        return [name for name in self.arms if self.results.timed(mode, name)]

    def _kernel_notes(self, modes: tuple[Mode, ...]) -> list[str]:
        """A line for each fused GPU kernel: what the compiler made of it and, for `put`, what a slice costs."""
        notes = []
        for name, kernel in self.kernels.items():
            line = (
                f"{name}: {kernel['registers']} registers, {kernel['spills']} spilled, "
                f"{counted(kernel['programs_per_sm'], 'program')} on an SM, {kernel['grid']} in all"
            )
            costs = [(mode, self.put_us_per_slice(mode, name)) for mode in modes if self.results.timed(mode, name)]
            said = ", ".join(f"{cost:.3f} us ({mode})" for mode, cost in costs if cost is not None)
            notes.append(f"{line}; put, fence and flag of a slice: {said}" if said else line)
        return notes


def show_means(written: Sequence[Record], options: BenchOptions) -> None:
    """Print the geometric mean of each variant's speedup over all configurations."""
    others = [name for name in BASELINES if any(r["variant"] == name for r in written)]
    rows = []
    for mode in options.modes:
        for name in dict.fromkeys(r["variant"] for r in written):
            mine = [r["speedup_over"] for r in written if r["variant"] == name and r["mode"] == mode]
            over = [[s[o] for s in mine if o in s] for o in others]
            rows.append((name, mode, *(times(geomean(o)) for o in over), *(times(min(o, default=None)) for o in over)))
    columns = ("variant", "mode", *(f"vs\n{o}" for o in others), *(f"worst vs\n{o}" for o in others))
    count = len({r["config"] for r in written})
    print_table(f"Geometric mean over {counted(count, 'configuration')}", columns, rows, section=1)


def table(rows: Sequence[Record]) -> str:
    """Markdown: the time of every arm, and the default variant's speedup over each baseline and time over the roofline."""
    variants = list(dict.fromkeys(r["variant"] for r in rows))
    baselines = [v for v in BASELINES if v in variants]
    fused = [v for v in variants if v not in BASELINES]
    # Every arm's time is shown; ratios only of what the operator does when nobody chooses, or a reader drowns in them.
    judged = [DEFAULT] if DEFAULT in fused else fused[:1]
    pairs = [(f, b) for f in judged for b in baselines]
    header = ["configuration", *(f"{v}, ms" for v in baselines + fused)]
    header += [f"{f} vs {b}" for f, b in pairs] + [f"{f} / roofline" for f in judged]
    lines, gains = [], []
    factors: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    for config in dict.fromkeys(r["config"] for r in rows):
        by_variant = {r["variant"]: r for r in rows if r["config"] == config}
        cells = [config + _scale(next(iter(by_variant.values())))]
        cells += [milliseconds(by_variant.get(v, {}).get("p50_ms")) for v in baselines + fused]
        gains += (mine := [remarks.gain(by_variant.get(f), by_variant.get(b)) for f, b in pairs])
        for (f, b), found in factors.items():
            found += [by_variant[b]["p50_ms"] / by_variant[f]["p50_ms"]] if {f, b} <= set(by_variant) else []
        ratios = [f"{by_variant[f]['roofline_ratio']:.2f}" if f in by_variant else "" for f in judged]
        lines.append(cells + mine + ratios)
    if len(lines) > 1:
        empty = [""] * len(baselines + fused)
        lines.append(["geometric mean", *empty, *(times(geomean(f)) for f in factors.values()), *([""] * len(judged))])
    return "\n\n".join([markdown_table(header, lines), *remarks.unclear(gains)])


def _scale(record: Record) -> str:
    batch, rows = (round(1 / record[what]) for what in ("scale", "rows_scale"))
    if batch == rows:
        return f" (1/{batch})" if batch > 1 else ""
    return f" (batch 1/{batch}, rows 1/{rows})"
