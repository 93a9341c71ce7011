"""`weft demo`: check and time the embeddings of DLRM-DCNv2, scaled to this machine, and draw a timeline of each variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from weft.bench.core import records
from weft.bench.core.console import progress
from weft.bench.core.measure import STEPS
from weft.bench.core.options import BenchOptions
from weft.bench.core.remarks import gain
from weft.bench.core.run import ceilings_for, make_ranks
from weft.bench.core.tables import Record
from weft.bench.ops.embedding_all_to_all import DEFAULT, OPERATOR
from weft.bench.ops.embedding_data import BASELINE
from weft.bench.ops.embedding_presets import PRESETS
from weft.errors import WeftError
from weft.launch import run_ranks
from weft.timeline import Timeline
from weft.trace import draw_overlap, write_trace

_TRACED = {
    BASELINE: "nn.EmbeddingBag per table, all_to_all, unpack",
    DEFAULT: "weft, direct: each vector is stored into the output of its owner",
}
_TRACES = 5
LEGEND = (
    "skew: slowest rank minus fastest, in ms; extra MB: memory besides tables and input, output included; first "
    "ms: the first call, with set-up; in parentheses: differs from 1 by less than twice the noise"
)
"""The explanation of unclear columns, printed below the table."""


@dataclass(frozen=True)
class Shown:
    """The results of `weft demo`. error: the largest relative error of weft's variants.

    gain: the speedup of weft's default variant over the baseline, as text; in parentheses if it is within twice its
    noise.
    """

    picture: Path
    trace: Path
    gain: str
    error: float


def demo(directory: Path, ranks: int = 2, scale: float | None = None) -> Shown:
    """Run on `ranks` CPU processes, print the table, and write `overlap.png` and `trace.json` into `directory`.

    Return the results and the paths of both files. scale: the factor by which batch sizes and table rows are multiplied
    (`BenchOptions.scale`).
    """
    options = BenchOptions(
        OPERATOR.name, "dcnv2", ranks=ranks, variants=("batched", "direct", "put"), scale=scale, read_mib=128
    )
    directory.mkdir(parents=True, exist_ok=True)  # fails now, not after the run
    timelines, title, gain, error = run_ranks(ranks, _rank, options)[0]
    picture, trace = directory / "overlap.png", directory / "trace.json"
    draw_overlap(picture, timelines, title)
    write_trace(trace, timelines, configuration=title)
    return Shown(picture, trace, gain, error)


def headline(written: Sequence[Record]) -> str:
    """Return the speedup of weft's default variant over the baseline in mode `queued`, as text."""
    queued = {r["variant"]: r for r in written if r["mode"] == "queued"}
    return gain(queued[DEFAULT], queued[BASELINE])


def _rank(rank: int, world_size: int, options: BenchOptions) -> tuple[dict[str, Timeline], str, str, float]:
    """Run one rank of the demo. Return ({variant: timeline of all ranks}, title of the picture, speedup as text, largest
    error). Only rank 0 gets timelines.
    """
    ranks = make_ranks(options.device)
    preset = PRESETS["dcnv2"]
    with progress(STEPS + len(options.modes), shown=rank == 0) as step:
        ceilings = ceilings_for(options, ranks)
        work = OPERATOR.workload(preset, ranks, options)
        measured = work.measured(options, ceilings, step)
    if measured.wrong:
        raise WeftError("\n".join(measured.wrong))
    timelines = {}
    for name, label in _TRACED.items():
        traces = []
        for i in range(_TRACES):
            mine = Timeline()
            ranks.start_together()
            work.built[name].traced(i % work.input_sets, mine)
            everybody: list[Timeline] = [Timeline()] * world_size
            dist.all_gather_object(everybody, mine, group=ranks.control)
            traces.append(Timeline([span for timeline in everybody for span in timeline]))
        # Other processes may disturb some calls, so keep the trace of median length.
        traces.sort(key=lambda t: max(s.end_us for s in t) - min(s.start_us for s in t))
        timelines[label] = traces[len(traces) // 2]
    config, here = work.config, records.environment("cpu")
    title = f"{OPERATOR.name}, {work.name}, {config.scale}:\n{config.describe()}\n{here['machine']}; commit {here['commit']}"
    if rank == 0:
        OPERATOR.show(replace(measured, notes=(*measured.notes, LEGEND)), options)
    error = max(r["error"] for r in measured.records if r["variant"] in ("direct", "put"))
    return (timelines if rank == 0 else {}), title, headline(measured.records), error
