"""A configuration's results as JSON records and as a table on the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from weft.bench import records
from weft.bench.arms import BASELINE, BASELINES, Arm, FusedArm
from weft.bench.ceilings import Ceilings
from weft.bench.console import print_table
from weft.bench.harness import Mode, Timing
from weft.bench.options import BenchOptions
from weft.bench.presets import EmbeddingPreset
from weft.bench.workload import Traffic, Workload

OP = "embedding_all_to_all"
POOL = " pooling alone"
_LAST_COLUMNS = ("over\nfloor", "pool\nms", "extra\nMB", "error")


@dataclass(frozen=True)
class Measured:
    """A configuration's results: timings by (mode, arm), where `arm + POOL` is a serial arm's pooling alone."""

    work: Workload
    timings: dict[tuple[Mode, str], Timing]
    errors: dict[str, float]
    arms: dict[str, Arm]
    traffic: list[Traffic]
    ceilings: list[Ceilings]
    memory: dict[str, tuple[int, str]]
    kernels: dict[str, dict[str, int]]  # of fused arms on GPUs, on this rank

    @property
    def floor_ms(self) -> float:
        return max(t.floor_ms(c) for t, c in zip(self.traffic, self.ceilings, strict=True))

    def speedup(self, mode: Mode, name: str, over: str) -> float:
        return self.timings[mode, over].p50_ms / self.timings[mode, name].p50_ms

    def put_us_per_slice(self, mode: Mode, name: str) -> float | None:
        """What a program of `name` spends on a slice for staging, copy, fence and flag, beyond what `direct` takes.

        (put's time - direct's) x resident programs / slices sent, on this rank; None where there is no such pair.
        """
        arm, direct = self.arms[name], next((n for n in self.arms if n == name.replace("put", "direct", 1)), "direct")
        if not isinstance(arm, FusedArm) or name not in self.kernels or direct not in self.arms:
            return None
        slices = arm.slices_sent()
        longer_ms = self.timings[mode, name].p50_ms - self.timings[mode, direct].p50_ms
        return 1e3 * longer_ms * self.kernels[name]["grid"] / slices if slices else None


def to_records(measured: Measured, options: BenchOptions, run: str) -> list[dict[str, Any]]:
    """One JSON-ready object per (variant, mode)."""
    work, config = measured.work, measured.work.config
    floors = [t.floor_ms(c) for t, c in zip(measured.traffic, measured.ceilings, strict=True)]
    slowest = floors.index(max(floors))
    traffic = measured.traffic[slowest]
    common = {
        "op": OP,
        "config": config.name,
        "device": options.device,
        "ranks": work.ranks.world_size,
        "dtype": options.dtype,
        "baseline": BASELINE,
        "floor_ms": measured.floor_ms,
        "run": run,
        "scale": float(config.scale.batch),
        "rows_scale": float(config.scale.rows),
        "shape": config.describe(),
        "threads": torch.get_num_threads() if options.device == "cpu" else None,
        "traffic_bytes": {field: round(getattr(traffic, field)) for field in Traffic.__dataclass_fields__},
        "ceilings": [c.as_gbps() for c in measured.ceilings],
        **records.environment(options.device).as_fields(),
    }
    rows = []
    for mode in options.modes:
        for name in measured.arms:
            timing = measured.timings[mode, name]
            pool = measured.timings.get((mode, name + POOL))
            extra_bytes, how = measured.memory[name]
            rows.append(
                {
                    **common,
                    "variant": name,
                    "mode": mode,
                    "p20_ms": timing.p20_ms,
                    "p50_ms": timing.p50_ms,
                    "p80_ms": timing.p80_ms,
                    "skew_ms": timing.skew_ms,
                    "repetitions": timing.repetitions,
                    "calls": timing.calls,
                    "speedup": measured.speedup(mode, name, BASELINE),
                    "speedup_over": {
                        other: measured.speedup(mode, name, other) for other in BASELINES if other in measured.arms
                    },
                    "floor_ratio": timing.p50_ms / measured.floor_ms,
                    "pool_ms": pool.p50_ms if pool else None,
                    "error": measured.errors[name],
                    "extra_bytes": extra_bytes,
                    "extra_bytes_how": how,
                    "kernel": measured.kernels.get(name),
                    "put_us_per_slice": measured.put_us_per_slice(mode, name),
                }
            )
    return rows


def print_measured(measured: Measured, preset: EmbeddingPreset, options: BenchOptions) -> None:
    """Print a configuration's table."""
    config = measured.work.config
    others = [name for name in BASELINES if name in measured.arms]
    rows = []
    for mode in options.modes:
        for name in measured.arms:
            timing, pool = measured.timings[mode, name], measured.timings.get((mode, name + POOL))
            rows.append(
                (
                    name,
                    mode,
                    f"{timing.p50_ms:.3f}",
                    f"{timing.p20_ms:.3f} - {timing.p80_ms:.3f}",
                    f"{timing.skew_ms:.3f}",
                    *(f"{measured.speedup(mode, name, other):.2f}x" for other in others),
                    f"{timing.p50_ms / measured.floor_ms:.2f}",
                    f"{pool.p50_ms:.3f}" if pool else "",
                    f"{measured.memory[name][0] / 1e6:.1f}",
                    f"{measured.errors[name]:.1e}",
                )
            )
    ceilings = measured.ceilings[0].as_gbps()
    link = "" if ceilings["link_gbps"] is None else f", {ceilings['link_gbps']:.1f} GB/s to a peer"
    print_table(
        f"{OP} {config.name} ({preset.about}), {options.dtype}, {options.device}",
        ("variant", "mode", "ms", "p20 - p80", "skew", *(f"vs\n{o}" for o in others), *_LAST_COLUMNS),
        rows,
        (
            f"{config.describe()}; {config.scale}",
            f"floor {measured.floor_ms:.3f} ms from {ceilings['memory_gbps']:.1f} GB/s of memory a rank{link}",
            *kernel_notes(measured, options.modes),
        ),
        section=1,
        optional=("pool\nms", "p20 - p80", "skew", "extra\nMB", "error"),
    )


def kernel_notes(measured: Measured, modes: tuple[Mode, ...]) -> list[str]:
    """A line for each fused GPU kernel: what the compiler made of it and, for `put`, what a slice costs."""
    notes = []
    for name, kernel in measured.kernels.items():
        line = (
            f"{name}: {kernel['registers']} registers, {kernel['spills']} spilled, {kernel['programs_per_sm']} programs on "
            f"an SM, {kernel['grid']} in all"
        )
        costs = [(mode, measured.put_us_per_slice(mode, name)) for mode in modes]
        said = ", ".join(f"{cost:.3f} us ({mode})" for mode, cost in costs if cost is not None)
        notes.append(f"{line}; put, fence and flag of a slice: {said}" if said else line)
    return notes


def print_means(written: list[dict[str, Any]], options: BenchOptions) -> None:
    """Print the geometric mean of each variant's speedup over all configurations."""
    others = [name for name in BASELINES if any(r["variant"] == name for r in written)]
    rows = []
    for mode in options.modes:
        for name in dict.fromkeys(r["variant"] for r in written):
            mine = [r["speedup_over"] for r in written if r["variant"] == name and r["mode"] == mode]
            means = [math.exp(sum(math.log(s[o]) for s in mine) / len(mine)) for o in others]
            worst = [min(s[o] for s in mine) for o in others]
            rows.append((name, mode, *(f"{m:.2f}x" for m in means), *(f"{w:.2f}x" for w in worst)))
    columns = ("variant", "mode", *(f"vs\n{o}" for o in others), *(f"worst vs\n{o}" for o in others))
    count = len({r["config"] for r in written})
    print_table(f"Geometric mean over {count} configurations", columns, rows, section=1)
