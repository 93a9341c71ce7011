"""Measurement of the two embedding studies on GPUs: sizes, checked times of each rank, and the resources of kernels.

The studies run as benchmarks (`weft bench fused_embedding`, `weft bench pgas`). A part is one configuration of a figure
of the paper, with several variants (implementations of the same operator). First each variant's output is compared with
float64. Then the variants are timed in random order, one call at a time. A barrier on the devices starts the ranks of a
call together, and CUDA events measure the time of each rank. The last timed outputs are compared with float64 again.

CPU processes run the same code with tiny sizes, as a test. Their times have no meaning.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from weft import reading
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Call, HostClock, Mode, QueueClock, Ranks, summarise
from weft.bench.core.measure import Step, check
from weft.bench.core.operator import Measured, OperatorBenchmark
from weft.bench.core.options import BenchOptions
from weft.bench.core.records import common_fields
from weft.bench.core.tables import Record, cell, table, times
from weft.bench.ops.embedding_data import EmbeddingData
from weft.bench.ops.embedding_presets import Bag, EmbeddingPreset, TableShape
from weft.bench.ops.embedding_variants import FusedVariant, Variant, make_variant, why_not
from weft.embedding import as_jagged
from weft.embedding.check import check_jagged

TINY = {"batch": 32, "tables": 3, "rows": 60, "dim": 8, "longest": 4}
"""The largest sizes on CPU."""
_WARP = 32
_SM_WARPS, _SM_BLOCKS, _SM_REGISTERS = 64, 32, 65536  # limits of an SM since sm_80, except consumer GPUs
_MOST_TRACE_BYTES = 64 << 20
_BINS = 50  # intervals in curves of bytes over time


@dataclass(frozen=True)
class Part:
    """A configuration of a figure, with the name `figure/config`.

    batch: the global batch size.
    variants: the implementations to compare.
    tables: the number of tables of each rank, or if not `per_rank`, of all ranks together.
    dim, rows: the numbers of columns and rows of each table.
    bags: the distribution of the number of rows in a bag.
    ranks: the number of ranks that run together. None: all ranks. 1: each rank runs alone, and rank 0's times are recorded.
    """

    figure: str
    config: str
    batch: int
    tables: int
    dim: int
    rows: int
    bags: Bag
    per_rank: bool = True
    slice_size: int | None = None
    ranks: int | None = None
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.figure}/{self.config}"

    def preset(self, tiny: bool) -> EmbeddingPreset:
        """Return the tables, bags and batch of this part. tiny: True for small sizes, for tests on CPU."""
        one = self
        if tiny:
            bags = Bag(min(self.bags.least, 1), min(self.bags.most, TINY["longest"]))
            tables = min(self.tables, TINY["tables"]) + (0 if self.per_rank else 1)
            sizes = {name: min(getattr(self, name), TINY[name]) for name in ("batch", "rows", "dim")}
            one = replace(self, tables=tables, bags=bags, **sizes)
        shapes = (TableShape(one.rows, one.dim, one.bags),) * one.tables
        return EmbeddingPreset(self.name, self.figure, shapes, one.per_rank, one.batch, slice_size=one.slice_size)


def find_parts(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Return the parts with these names, all if `names` is empty. The name of a figure selects all its parts. Raise
    `ValueError` for an unknown name.
    """
    known = {part.name for part in parts} | {part.figure for part in parts}
    if unknown := [name for name in names if name not in known]:
        figures = ", ".join(dict.fromkeys(part.figure for part in parts))
        raise ValueError(
            f"no preset {unknown[0]!r}: give one of {figures}, or one of their configurations, such as {parts[0].name}"
        )
    return [part for part in parts if not names or {part.name, part.figure} & set(names)]


# --- times ---


@dataclass
class Times:
    """The times of the variants of a `Part` (a configuration of a figure).

    fields: the record fields with the times, by variant.
    errors: the largest error, as a fraction of the reference's largest element, by variant.
    wrong: the error texts, by variant, of variants with a wrong result. Such a variant has no times.
    """

    fields: dict[str, Record]
    errors: dict[str, float]
    wrong: dict[str, str]

    def ms(self, name: str) -> float | None:
        found = self.fields.get(name, {}).get("p50_ms")
        return None if found is None else float(found)


def time_ranks(
    calls: Mapping[str, Call], ranks: Ranks, *, input_sets: int, repetitions: int,
    advance: Callable[[float], object] = lambda share: None, inspect: Callable[[str, int, Any], None] | None = None,
    waits: bool = False,
) -> dict[str, Record]:  # fmt: skip
    """Time each call on every rank, one call at a time. Return {name of a call: fields of its record}. All ranks must
    make this call.

    The fields are as in `Timing`, and also rank_ms: the median time of each rank in ms.

    advance: called after each repetition with its fraction of all repetitions.
    inspect: called in the last repetition with each call's name, the index of its input set, and its output.
    waits: True to accept calls that take so long to enqueue that the device waits for the CPU.
    """
    kind = HostClock if ranks.device.type == "cpu" else QueueClock
    clocks = {name: kind(call, ranks, waits, 1, input_sets) for name, call in calls.items()}
    mine: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for repetition in range(
        -1, repetitions
    ):  # the first is discarded: it loads kernels, and finds the length of sleeps
        for number in np.random.default_rng(repetition + 1).permutation(len(names)):
            name, clock = names[number], clocks[names[number]]
            found = clock.measure(repetition + 1)[0]
            if repetition >= 0:
                mine[name].append(found)
            if inspect is not None and repetition == repetitions - 1:
                inspect(name, *clock.last)
            clock.last = (0, None)
        advance(1 / (repetitions + 1))
    fields = {}
    for name in names:
        of_ranks = ranks.gather(mine[name])
        timing = summarise(list(zip(*of_ranks, strict=True)), 1)
        fields[name] = timing.as_fields() | {"rank_ms": [float(np.median(times)) for times in of_ranks]}
    return fields


def checked_times(
    work: EmbeddingData, names: Sequence[str], beside: Callable[[dict[str, Variant]], Mapping[str, Call]], *,
    repetitions: int, step: Step,
) -> tuple[Times, dict[str, Variant]]:  # fmt: skip
    """Check the variants `names` against float64, time them, and check their last timed outputs. Return the times, and
    {name: variant} for the variants that passed the first check.

    beside: a function that gets the variants that passed, and returns further calls to time, such as pooling alone.
    Raise `RuntimeError` if the baseline is wrong.
    """
    step(f"{work.name}: checking every variant", 0)
    device = work.ranks.device
    built = {name: make_variant(name, work) for name in names if why_not(name, device) is None}
    found = check(built, work)
    right = {name: variant for name, variant in built.items() if name not in found.wrong}
    step(f"{work.name}: checking every variant", 0.5)
    references: dict[int, Any] = {}

    def inspect(name: str, which: int, output: Any) -> None:
        if name in right:
            if which not in references:
                references[which] = work.reference(which)
            error = work.error(name, output, which, references[which])
            found.errors[name] = max(found.errors[name], error)
            if not error <= work.limit(name, found.errors):
                found.wrong[name] = f"{work.name}: the last timed output of {name} is wrong by {error:.3g}"

    calls: dict[str, Call] = {**right, **beside(right)}
    fields = time_ranks(
        calls, work.ranks, input_sets=work.input_sets, repetitions=repetitions, inspect=inspect,
        advance=lambda share: step(f"{work.name}: timing", share),
    )  # fmt: skip
    return Times({n: f for n, f in fields.items() if n not in found.wrong}, found.errors, found.wrong), right


def solo(ranks: Ranks) -> Ranks:
    """Return `Ranks` with this rank as the only member, so that it can measure alone. All ranks must make this call."""
    me = [dist.get_process_group_ranks(ranks.group)[ranks.rank]]
    data, control = (
        dist.new_group(me, backend=backend, use_local_synchronization=True)
        for backend in (dist.get_backend(ranks.group), "gloo")
    )
    return Ranks(data, control, ranks.device)


# --- what ran when ---


class Lines(NamedTuple):
    """The timeline of a fused embedding kernel. Times are in us from the start of the first unit of work.

    A unit is a slice (`put`), or some features of a sample (`direct`); one Triton program pools it. All arrays except
    `waits` have an element for each unit.

    sent: the bytes that the unit sends to peers.
    program: the index of the program that ran the unit.
    """

    start: np.ndarray
    end: np.ndarray
    sent: np.ndarray
    program: np.ndarray
    put: np.ndarray
    """The start of the copy of each slice to its peer; 0 without a copy."""
    waits: np.ndarray
    """For each program, its wait for its peers: [programs, (start us, end us, program, multiprocessor)]."""

    @property
    def end_us(self) -> float:
        return float(max(self.end.max(initial=0), self.waits[:, 1].max(initial=0)))

    def bytes_by(self) -> tuple[list[float], list[float]]:
        """Return (times in us, MB sent until each time), at `_BINS` + 1 equidistant times. The bytes of a unit of work
        count from the end of the unit.
        """
        edges = np.linspace(0, self.end_us, _BINS + 1)
        totals = [float(self.sent[self.end <= edge].sum()) / 1e6 for edge in edges]
        return [round(float(edge), 2) for edge in edges], totals


def timeline_of(variant: FusedVariant) -> Lines:
    """Run a fused variant on a GPU with its first inputs, and return its kernel's timeline. All ranks must make this call."""
    work = variant.work
    executor = variant.executor
    jagged = as_jagged(work.inputs[0])
    checked = check_jagged(jagged, work.config.sharding, work.ranks.rank, work.config.batch_sizes, work.weights)
    tensors = {"tables": work.weights, "bags": (jagged, checked)}
    lines = executor.timeline_lines(tensors)
    for _ in range(2):  # the first call compiles the kernel
        lines.zero_()
        work.ranks.meet()
        executor.run(tensors, lines=lines, **variant.how)
    work.ranks.synchronize()
    return lines_of(lines.cpu().numpy(), executor.kernel.n_units(jagged, checked))


def lines_of(found: np.ndarray, units: int) -> Lines:
    """Return the `Lines` of the array that a kernel wrote as its timeline.

    found: a row for each of `units` units of work, then a row for each program's wait for its peers. Times are in ns.
    `weft.kernels.embedding_all_to_all` defines the columns. Rows that no program wrote are zero, and are left out.
    """
    done, waits = (part[part[:, 1] > 0] for part in (found[:units], found[units:]))
    begin = done[:, 0].min()

    def us(ns: np.ndarray) -> np.ndarray:
        return np.asarray((ns - begin) / 1e3)

    put = np.where(done[:, 4] > 0, us(done[:, 4]), 0.0)
    of_waits = np.stack([us(waits[:, 0]), us(waits[:, 1]), waits[:, 3], waits[:, 4]], axis=1)
    return Lines(us(done[:, 0]), us(done[:, 1]), done[:, 2], done[:, 3], put, of_waits)


# --- kernels ---


def occupancy_of(registers: int, threads: int, shared_bytes: int = 0) -> float:
    """Return the theoretical occupancy of a kernel: the fraction of an SM's warps that can be resident.

    registers: the number per thread.
    threads: the number per block.
    shared_bytes: shared memory per block; 0 if it does not limit the occupancy.
    """
    warps = -(-threads // _WARP)
    blocks = min(_SM_BLOCKS, _SM_WARPS // warps)
    if registers:
        blocks = min(blocks, _SM_REGISTERS // (-(-registers * _WARP // 256) * 256 * warps))
    if shared_bytes:
        blocks = min(blocks, (227 << 10) // (shared_bytes + 1024))
    return blocks * warps / _SM_WARPS


def launched_kernels(call: Callable[[], object]) -> list[Record]:
    """Run `call`, and return a record for each different kernel that it launches: name, registers per thread, threads
    per block, theoretical occupancy and number of launches.

    torch's profiler (Kineto) records the launches. Raise `RuntimeError` if it records no kernels.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        content = reading.read_bytes(path, _MOST_TRACE_BYTES)
    found = kernels_of(reading.parse_json(content, "torch's profile")["traceEvents"])
    if not found:
        raise RuntimeError(
            "torch's profiler recorded no kernels: install CUPTI, and permit profiling by users "
            "(options nvidia NVreg_RestrictProfilingToAdminUsers=0)"
        )
    return found


def kernels_of(events: Sequence[Any]) -> list[Record]:
    """Return a record for each different kernel among the events of a Kineto trace (see `launched_kernels`)."""
    found: dict[str, Record] = {}
    for event in events:
        if event.get("cat") == "kernel":
            of = event["args"]
            threads = int(np.prod(of["block"]))
            one = found.setdefault(event["name"], {
                "name": event["name"][:120], "launches": 0, "registers": of["registers per thread"], "threads": threads,
                "shared_bytes": of["shared memory"], "grid": int(np.prod(of["grid"])),
                "occupancy": occupancy_of(of["registers per thread"], threads, of["shared memory"]),
            })  # fmt: skip
            one["launches"] += 1
    return list(found.values())


# --- the benchmark of a study ---


class MeasuredStudy(OperatorBenchmark[Part]):
    """The benchmark of an embedding study. Subclasses define its `parts`, its name in records (`study`), and `measure`."""

    parts: Sequence[Part]
    study: str
    refuses = {  # noqa: RUF012
        "option": OperatorBenchmark.refuses["option"],
        "variants": "compares all variants: do not pass it",
        "seconds": "has a fixed number of repetitions: do not pass it, or pass --quick",
        "scale": "cannot be scaled: it has the sizes of the paper, and tiny sizes on CPU. Do not pass it",
        "pictures": "draws pictures with `weft reproduce`: do not pass it",
    }

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("queued",)

    def default_dtype(self, device: str) -> str:
        return "fp32"

    def check_options(self, options: BenchOptions) -> None:
        if options.ranks < 2:
            raise ValueError(f"ranks={options.ranks}: an all-to-all needs at least 2: pass --ranks 2 or more")
        if options.dtype != "fp32":
            raise ValueError(f"dtype={options.dtype!r}: the papers' tables are fp32: pass --dtype fp32")
        find_parts(self.parts, options.presets)

    def presets(self, options: BenchOptions) -> Sequence[Part]:
        return find_parts(self.parts, options.presets)

    def repetitions(self, options: BenchOptions) -> int:
        return 3 if options.quick else 9

    def records(
        self, part: Part, found: Times, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], baseline: str,
        more: Mapping[str, Record] | None = None,
    ) -> list[Record]:  # fmt: skip
        """Return a record for each timed call of `part`, with its times in `found`.

        baseline: the variant to which speedups are relative.
        ceilings: the peak rates of each rank.
        more: further record fields, by variant.
        """
        world = part.ranks or ranks.world_size
        common = common_fields(options, part.config, world, baseline, None, ceilings)
        common |= {"study": self.study, "figure": part.figure, "mode": "queued", "tiny": ranks.device.type == "cpu"}
        common |= {"batch": part.batch, "tables": part.tables, "dim": part.dim, "bag": part.bags.mean}
        base = found.ms(baseline)
        return [
            common | fields | {
                "variant": name, "error": found.errors.get(name), "speedup": base / fields["p50_ms"] if base else None,
            } | (more or {}).get(name, {})
            for name, fields in found.fields.items()
        ]  # fmt: skip

    def show(self, found: Measured, options: BenchOptions) -> None:
        columns: dict[str, Callable[[Record], str]] = {
            "variant": lambda r: r["variant"], "ms": cell("p50_ms", 3),
            "ranks' ms": lambda r: ", ".join(f"{ms:.3f}" for ms in r.get("rank_ms", ())),
            "skew": lambda r: f"{r['skew_ms'] / r['p50_ms']:.1%}" if r.get("skew_ms") is not None else "",
            "speedup": lambda r: times(r.get("speedup")),
            "error": lambda r: "" if r.get("error") is None else f"{r['error']:.1e}",
        }  # fmt: skip
        rows = [record for record in found.records if record.get("p50_ms") is not None]
        if rows:
            title = f"{rows[0]['figure']}, {rows[0]['config']}, {rows[0]['ranks']} x {options.device}"
            print_table(*table(title, rows, columns), (*found.notes, *found.wrong), section=1)
        elif found.notes:
            print("\n".join(found.notes))

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        return
