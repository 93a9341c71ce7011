"""Fused embedding + all-to-all, measured on the GPUs of a host: figures 9 to 14 of the paper, at its sizes.

The kernel has two transports. `direct` stores each pooled vector into the peer's memory ("zero-copy" in the paper).
`put` sends slices of vectors; one Triton program pools a slice. Programs pool the slices for peers first, or all slices
in natural order ("oblivious" in the paper).

| figure or section | name of the parts here | what is measured |
|---|---|---|
| 10, 13, 14 | grid | each rank's time by batch size and tables; both orders; `direct` with one kernel, or a kernel per table |
| 10, 14 | grid-short | the same with bags of 1 to 10 rows, the default of DLRM's data generator |
| 11 | occupancy | the time over the number of programs on a multiprocessor, and over the registers of a thread |
| 12 | slices | the time over the number of vectors in a slice |
| 9 | timeline | when each program pools, sends and waits; bytes sent over time |
| 3.4 | kernels | registers and occupancy of each variant's kernels |

The paper uses two nodes for `put`. Here the two GPUs are in one host, so `put` sends over NVLink instead of InfiniBand.
A slice has one sample's vectors of adjacent tables; the paper's slices have several samples' vectors of one table.

The variant `pipelined-N` is an alternative to fusion (2.2, 5). It splits pooling into N kernels. While a kernel runs,
NCCL's all-to-all sends the vectors of the previous kernel.

Source: "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.4, 4.2, 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Ranks
from weft.bench.core.measure import Step, first_calls
from weft.bench.core.operator import Measured
from weft.bench.core.options import BenchOptions
from weft.bench.core.tables import Record
from weft.bench.ops.embedding_data import BASELINE, EmbeddingData
from weft.bench.ops.embedding_presets import Bag
from weft.bench.ops.embedding_variants import FusedVariant, SerialVariant, Variant, limits_of, make_variant, why_not
from weft.studies.embedding_measure import (
    Lines,
    MeasuredStudy,
    Part,
    Times,
    checked_times,
    launched_kernels,
    occupancy_of,
    timeline_of,
)

STUDY = "fused_embedding_measured"
DIM, ROWS = 256, 100_000
LONG, SHORT = Bag(0, 140), Bag(1, 10)
"""The bag lengths of the paper's table 2, 70 rows on average, and the bag lengths of DLRM's default,
`--num-indices-per-lookup=10`.
"""
SLICE = 32
GRID = ((256, 256), (512, 64), (512, 256), (1024, 64), (1024, 256), (2048, 64), (2048, 256), (4096, 64), (4096, 256))
"""(global batch, tables of a rank). The paper's text names 1024|256, and batches of 256 and 512."""
VARIANTS = (
    BASELINE, "batched", "fbgemm", "pipelined-4", "per-table", "direct", "direct-natural", "put", "put-natural",
)  # fmt: skip
PROGRAMS = (1, 4, 8, 12, 14, 16)
"""Programs on a multiprocessor. As many as 16 fit with the kernels' own limits of registers, on GPUs from sm_80 on."""
REGISTERS = (96, 80, 64)
_COUNTED = 8  # the most programs of a multiprocessor that are counted: the kernel with a timeline has more registers
SLICES = (2, 4, 8, 16, 32, 64, 128)
TIMED = ("put-slice16", "put-natural-slice16", "direct", "direct-natural")
_SHOWN = 32  # programs whose spans are recorded, as many as in figure 9
_MOST_FBGEMM = 64  # tables: FBGEMM copies them, and 256 would not fit twice


def _part(figure: str, batch: int, tables: int, bags: Bag = LONG, **more: Any) -> Part:
    return Part(figure, f"{batch}|{tables}", batch, tables, DIM, ROWS, bags, slice_size=SLICE, **more)


PARTS = (
    *(_part("grid", *sizes, variants=VARIANTS) for sizes in GRID),
    *(_part("grid-short", *sizes, SHORT, variants=VARIANTS) for sizes in GRID),
    _part("occupancy", 1024, 256),
    _part("slices", 1024, 256, variants=(BASELINE, "direct", *(f"put-slice{size}" for size in SLICES))),
    _part("timeline", 1024, 256),
    _part("kernels", 1024, 64, variants=(BASELINE, "batched", "fbgemm", "direct", "put")),
)


class _FusedEmbedding(MeasuredStudy):
    name, study, parts = "fused_embedding", STUDY, PARTS

    def measure(
        self, preset: Part, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> Measured:
        part, on_gpu = preset, ranks.device.type == "cuda"
        if part.figure in ("occupancy", "timeline", "kernels") and not on_gpu:
            step(f"{part.name}: skipped", 1.5)
            return Measured(
                [], notes=[f"{part.name}: skipped, because only GPUs have an occupancy and a timeline of programs"]
            )
        step(f"{part.name}: making inputs", 0)
        work = EmbeddingData(part.preset(not on_gpu).config(ranks.world_size), ranks, input_sets=2)
        how = {"occupancy": _occupancy, "timeline": _timeline, "kernels": _kernels}.get(part.figure, _compare)
        found, more, notes = how(part, work, self.repetitions(options), step)
        records = self.records(part, found, ranks, options, ceilings, BASELINE, more)
        return Measured(records, notes=notes, wrong=tuple(found.wrong.values()))


Found = tuple[Times, Mapping[str, Record], list[str]]
"""(times, {variant: further fields of its record}, notes below the table)"""


def _baseline_alone(built: dict[str, Variant]) -> Mapping[str, Call]:
    """Return calls that run only the baseline's pooling, and only its exchange of pooled vectors."""
    baseline = built[BASELINE]
    assert isinstance(baseline, SerialVariant)
    pooled = baseline.pool(0)
    return {"pooling": baseline.pool, "exchange": lambda which: baseline.exchange(pooled)}


def _compare(part: Part, work: EmbeddingData, repetitions: int, step: Step) -> Found:
    names = [name for name in part.variants if name != "fbgemm" or part.tables <= _MOST_FBGEMM]
    found, _ = checked_times(work, names, _baseline_alone, repetitions=repetitions, step=step)
    return found, {}, []


def _occupancy(part: Part, work: EmbeddingData, repetitions: int, step: Step) -> Found:
    limits = [*(f"programs{count}" for count in PROGRAMS), *(f"registers{count}" for count in REGISTERS)]
    names = [f"{transport}-{limit}" for transport in ("put", "direct") for limit in limits]
    found, built = checked_times(work, [BASELINE, *names], lambda _: {}, repetitions=repetitions, step=step)
    more: dict[str, Record] = {}
    for name in (name for name in names if name in built):
        variant = built[name]
        assert isinstance(variant, FusedVariant)
        programs, registers = limits_of(name) or (None, None)
        kernel = variant.executor.kernel.footprints
        of = next(foot for key, foot in kernel.items() if key.registers == registers and not key.timeline)
        usual = next((foot for key, foot in kernel.items() if key.registers is None and not key.timeline), of)
        running = min(programs or of.programs, of.programs)
        more[name] = {
            "registers": of.registers, "spilled": of.spilled, "programs": running, "fit": of.programs,
            "of_usual": running / usual.programs, "occupancy": running / 64, "multiprocessors": of.multiprocessors,
        }  # fmt: skip
        if programs is not None and programs <= _COUNTED:  # are the programs spread evenly?
            each = np.bincount(timeline_of(variant).waits[:, 3].astype(int), minlength=of.multiprocessors)
            more[name] |= {"programs_of_multiprocessors": [int(each.min()), int(each.max())]}
    return found, more, []


def _timeline(part: Part, work: EmbeddingData, repetitions: int, step: Step) -> Found:
    found, built = checked_times(work, [BASELINE, *TIMED], _baseline_alone, repetitions=repetitions, step=step)
    more: dict[str, Record] = {}
    sent_mb = (work.config.global_batch - work.local_batch) * work.local_dim * work.config.itemsize / 1e6
    for name in (name for name in TIMED if name in built):
        variant = built[name]
        assert isinstance(variant, FusedVariant)
        lines = timeline_of(variant)
        us, mb = lines.bytes_by()
        steps = [(b - a) / (us[1] - us[0]) * 1e3 for a, b in pairwise(mb)]  # GB/s
        more[name] = {"us": us, "sent_mb": mb, "peak_gbps": max(steps), **waits_of(lines)}
        if name.startswith("put"):
            more[name] |= {"spans": spans_of(lines), **puts_of(lines)}
    exchange = found.ms("exchange")
    if exchange:
        more["exchange"] = {"peak_gbps": sent_mb / exchange}
    return found, more, []


def waits_of(lines: Lines) -> Record:
    """Return record fields on how long programs wait for peers: the shortest, median and longest wait in us, and the
    mean wait as a fraction of the kernel's time. Empty if no program waited.
    """
    took = lines.waits[:, 1] - lines.waits[:, 0]
    if not len(took):
        return {}
    return {
        "wait_us": [float(np.min(took)), float(np.median(took)), float(np.max(took))], "kernel_us": lines.end_us,
        "wait_share": float(took.mean() / lines.end_us), "n_programs": len(took),
    }  # fmt: skip


def puts_of(lines: Lines) -> Record:
    """Return record fields on a kernel's puts, the copies of slices to peers: their number, and the time of the last
    put in us. The third field is the fraction of programs that issue all puts before they pool slices for their own
    rank.
    """
    remote = lines.sent > 0
    before = []
    for program in np.unique(lines.program):
        mine = lines.program == program
        local = lines.start[mine & ~remote]
        puts = lines.put[mine & remote]
        if len(local) and len(puts):
            before.append(bool(puts.max() <= local.min() + 1e-9))
    return {
        "puts": int(remote.sum()), "last_put_us": float(lines.put.max(initial=0)),
        "puts_first": float(np.mean(before)) if before else None,
    }  # fmt: skip


def spans_of(lines: Lines) -> list[Any]:
    """Return (units, wait) for each of the first `_SHOWN` Triton programs, in us, for a picture.

    A unit is [start, end, start of its put or 0 without a put]. The wait for peers is [start, end], or None.
    """
    shown = []
    for program in range(_SHOWN):
        mine = np.flatnonzero(lines.program == program)
        ordered = mine[np.argsort(lines.start[mine])]
        units = [[round(float(x), 1) for x in (lines.start[i], lines.end[i], lines.put[i])] for i in ordered]
        wait = [[round(float(x), 1) for x in row[:2]] for row in lines.waits if row[2] == program]
        shown.append([units, wait[0] if wait else None])
    return shown


def _kernels(part: Part, work: EmbeddingData, repetitions: int, step: Step) -> Found:
    """Record the registers and the occupancy of each variant's kernels. Nothing is timed."""
    step(f"{part.name}: checking every variant", 1)
    names = [name for name in part.variants if why_not(name, work.ranks.device) is None]
    built = {name: make_variant(name, work) for name in names}
    first_calls(built, work.ranks)
    more: dict[str, Record] = {}
    notes: list[str] = []
    for name, variant in built.items():
        more[name] = {"kernels": []}
        if isinstance(variant, FusedVariant):
            of = next(foot for key, foot in variant.executor.kernel.footprints.items() if not key.timeline)
            occupancy = occupancy_of(of.registers, 32)
            more[name]["kernels"] = [
                {
                    "name": "weft",
                    "registers": of.registers,
                    "spilled": of.spilled,
                    "threads": 32,
                    "occupancy": occupancy,
                }
            ]
        work.ranks.meet()
        try:
            launched = launched_kernels(partial(variant, 0))
        except (RuntimeError, KeyError, ValueError, OSError) as error:
            notes.append(f"{part.name}: the kernels of {name} were not recorded: {error}")
            launched = []
        more[name]["kernels"] += launched
        work.ranks.meet()
    step(f"{part.name}: timing", 0.5)
    fields: dict[str, Record] = {name: {"p50_ms": None} for name in built}
    return Times(fields, {}, {}), more, notes


OPERATOR = _FusedEmbedding()
