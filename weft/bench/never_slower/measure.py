"""The measurement of one random shape on all ranks. The result is a row for each timing mode.

The operator's benchmark makes the inputs, checks the results and times the variants.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch

from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Results, measure_variants
from weft.bench.core.operator import ChoosingVariants
from weft.bench.core.operators import operator
from weft.bench.core.options import BenchOptions
from weft.bench.core.records import environment
from weft.bench.core.tables import Record
from weft.bench.never_slower.draw import Drawn
from weft.bench.never_slower.judge import BENCHMARK
from weft.bench.never_slower.options import Options
from weft.bench.ops.any_operator import COMMUNICATION
from weft.bench.ops.embedding_presets import EmbeddingPreset
from weft.builders.problem import plain
from weft.words import counted

REPETITIONS = 5
_SECONDS = {"cuda": 0.03, "cpu": 0.05}
"""For each type of device, the time in seconds for which the slowest variant is measured in a mode."""
_WARM = 20
"""The number of sizes in mode `changing` that are called to warm up. weft compiles at least 16 sizes (`weft.operator.cache`)."""
_IN_A_ROW, _ROW_BYTES = 8, 4 << 30
"""In mode `changing` the calls of a variant with this many sizes follow each other. Their results take at most `_ROW_BYTES`."""
_FP8 = (8, 9)
"""The lowest compute capability with fp8 GEMMs."""
_LIMIT = 4.0
"""The limit on the difference of two rounded results, as a multiple of the allowed error of torch's GEMM."""


@dataclass(frozen=True)
class ShapeToMeasure:
    """A random shape to measure. index: its number in the sequence of random shapes. In mode `changing` index is -1, and
    `sizes` has the size of each call.
    """

    op: str
    index: int
    drawn: Drawn
    sizes: tuple[int, ...] = ()

    @property
    def config(self) -> str:
        return self.drawn.name + (f", {counted(len(self.sizes), 'size')}" if self.sizes else "")


def common(item: ShapeToMeasure, mode: str, again: bool, ranks: Ranks, options: Options) -> Record:
    """Return the record fields that every row of the shape `item` has.

    again: True for the second run of a shape.
    """
    device = options.device
    name, dtype = plain(item.op, None)
    return {
        "benchmark": BENCHMARK, "op": item.op, "config": item.config, "index": item.index, "seed": options.seed, "mode": mode,
        "again": again, "dtype": dtype or operator(name).default_dtype(device), "device": device, "ranks": ranks.world_size,
        "threads": torch.get_num_threads() if device == "cpu" else None, **environment(device),
    }  # fmt: skip


def measured(item: ShapeToMeasure, modes: Sequence[str], again: bool, ranks: Ranks, options: Options) -> list[Record]:
    """Measure a shape in `modes`. Return a row for each mode, equal on all ranks. All ranks must make this call.

    again: True for the second run of a shape.
    """
    if why := _cannot(item, ranks):
        return [common(item, mode, again, ranks, options) | {"skipped": why} for mode in modes]
    name, dtype = plain(item.op, None)
    op: Any = operator(name)
    drawn, is_tables = item.drawn, isinstance(item.drawn, EmbeddingPreset)
    work: ChoosingVariants = op.workload(
        drawn, ranks,
        BenchOptions(
            name, None if is_tables else drawn.name, ranks.world_size, options.device, quick=True,
            dtype=dtype or op.default_dtype(options.device), scale=1.0 if is_tables else None,
        ),
    )  # fmt: skip
    if item.sizes:
        return [common(item, "changing", again, ranks, options) | _changing(work, item, ranks)]
    known = op.modes(options.device)
    rows: dict[str, Record] = {
        mode: {"skipped": f"the benchmark of {item.op} does not capture calls"} for mode in modes
    }
    timed: tuple[Mode, ...] = tuple(m for m in get_args(Mode) if m in modes and m in known)  # graph is the last
    if timed:
        rows |= _timed(work, timed, options)
    return [common(item, mode, again, ranks, options) | found for mode, found in rows.items()]


def _cannot(item: ShapeToMeasure, ranks: Ranks) -> str:
    """Return the reason why the operator cannot run on this machine; "" if it can."""
    fp8 = "scaled" in item.op and ranks.device.type == "cuda"
    if fp8 and torch.cuda.get_device_capability(ranks.device) < _FP8:
        return f"fp8 GEMMs need a GPU of compute capability {'.'.join(map(str, _FP8))}"
    return ""


def _timed(work: ChoosingVariants, modes: tuple[Mode, ...], options: Options) -> dict[str, Record]:
    pairs = {mode: work.pair(mode) for mode in modes}
    wanted = dict.fromkeys([work.baselines[0], *(name for pair in pairs.values() for name in reversed(pair))])
    variants, beside, notes = work.variants([*wanted])
    variants, beside = {name: variants[name] for name in wanted if name in variants}, dict(beside)
    beside.pop(COMMUNICATION, None)
    work.claims = ()  # every repetition runs all variants, so repetitions are pairs
    found = measure_variants(
        work, variants, beside, modes=modes, seconds=_SECONDS[options.device], repetitions=(REPETITIONS, REPETITIONS),
        step=lambda what, share: None,
    )  # fmt: skip
    return {mode: _row(work, mode, *pairs[mode], found, notes) for mode in modes}


def _row(work: ChoosingVariants, mode: Mode, weft: str, base: str, found: Results, notes: Sequence[str]) -> Record:
    mine, serial = (found.timings.get((mode, name)) for name in (weft, base))
    if wrong := found.wrong.get(weft) or found.wrong.get(base):
        return {"error": wrong}
    if mine is None or serial is None:
        name = base if serial is None else weft
        waits = f"{name} synchronises with the device in each call" if name in work.waiting else ""
        return {"skipped": found.not_captured.get(name) or waits or "; ".join(notes) or f"{name} cannot run here"}
    computation, collective = work.alone_ms(mode, found)
    ideal = None if computation is None or collective is None else max(computation, collective)
    return {
        "weft_ms": list(mine.each_ms), "serial_ms": list(serial.each_ms), "computation_ms": computation,
        "collective_ms": collective, "ideal_ms": ideal, "variant": weft, "baseline": base, "chosen": work.taken(weft, mode),
        "host_us": mine.host_us, "serial_host_us": serial.host_us, "first_call_ms": found.first_call_ms[weft],
        "calls": mine.calls, "differs": found.errors[weft],
    }  # fmt: skip


def _changing(work: ChoosingVariants, item: ShapeToMeasure, ranks: Ranks) -> Record:
    """Measure mode `changing`, and return its record fields: for each of `item.sizes`, time one call of weft and one
    call of the serial baseline.

    work: the inputs and variants of the largest size.

    Calls of a variant follow each other, as in mode `single`, a row of sizes at a time. Untimed calls of serial with these sizes
    come first, because cuBLAS needs up to 5 ms more for the first GEMM of a size.
    """
    names = work.pair("single")
    times = list[list[float]]()
    apart = torch.zeros((), dtype=torch.float64, device=ranks.device)
    nbytes = ranks.most(float(work.resized(max(item.sizes)).variant(names[1])(0).nbytes))
    in_a_row = max(1, min(_IN_A_ROW, int(_ROW_BYTES / max(2 * nbytes, 1))))
    for first in range(0, len(item.sizes), in_a_row):
        of_sizes = [work.resized(size) for size in item.sizes[first : first + in_a_row]]
        variants = [[one.variant(name) for one in of_sizes] for name in names]
        took, made = [[0.0, 0.0] for _ in of_sizes], [[torch.empty(0)] * 2 for _ in of_sizes]
        for call in variants[1]:
            call(0)
        for which in (0, 1) if first // in_a_row % 2 else (1, 0):
            ranks.synchronize()
            ranks.start_together()
            for number, call in enumerate(variants[which]):
                start = time.perf_counter()
                result = call(0)
                ranks.synchronize()
                took[number][which] = 1e3 * (time.perf_counter() - start)
                made[number][which] = result.clone()  # the next call may need the result's memory
                del result
                ranks.synchronize()
        times += took
        for pair in made:
            apart = torch.maximum(apart, _apart(*pair))
        del made, variants, of_sizes
    limit = _LIMIT * work.limit(work.baselines[0], {})
    if not (worst := ranks.most(float(apart))) <= limit:
        raise RuntimeError(
            f"{item.config}: results of weft and serial differ by {worst:.3g} of the largest element (the limit is {limit:.3g})"
        )
    counted_from = min(_WARM, len(times) // 2)
    flat = ranks.gather([ms for took in times[counted_from:] for ms in took])
    slowest = np.asarray(flat).reshape(ranks.world_size, -1, 2).max(axis=0)
    weft, serial = (_spread(slowest[:, which]) for which in (0, 1))
    counts = {"sizes": len(slowest), "warm": counted_from, "in_a_row": in_a_row}
    return {"changing": {"weft_ms": weft, "serial_ms": serial, **counts}}


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the error of a result: max |one - other| / max |other|, as a float64 scalar tensor, without synchronising with the
    device. NaN counts as infinity.
    """
    if not one.numel():
        return torch.zeros((), dtype=torch.float64, device=one.device)
    largest = other.abs().max().double().clamp_min(1e-30)
    return torch.nan_to_num((one.float() - other.float()).abs().max().double() / largest, nan=torch.inf)


def _spread(ms: np.ndarray) -> dict[str, float]:
    p50, p99 = (float(np.percentile(ms, p)) for p in (50, 99))
    return {"mean": float(ms.mean()), "p50": p50, "p99": p99, "max": float(ms.max())}
