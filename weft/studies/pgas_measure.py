"""PGAS embedding retrieval, measured on one and two GPUs, at the paper's sizes: figures 4 to 10.

| figure or section | name of the parts here | what is measured |
|---|---|---|
| 5, 6, 7 | weak | weak scaling, with 64 tables on each GPU: times, the baseline's components, and bytes sent over time |
| 8, 9, 10 | strong | strong scaling, with 96 tables in all: the same measurements |
| III-A | batch | the baseline's components for small batches, in which launches and synchronisation dominate |
| IV-A | width | the cost of small messages: vectors of several widths with equal bytes in total, and one row in each bag |
| 4, IV | dlrm | inference over 100 batches, with the dense MLP before the retrieval or concurrent with it |

The baseline is the paper's: EmbeddingBagCollection (an `nn.EmbeddingBag` for each table), an all-to-all with
`async_op=True`, a wait, and unpacking. Its components are found by the paper's method. The phase after pooling is timed
as it is, and again with an all-to-all of a single float. The second time is "sync + unpack"; the difference of both
times is the communication. The `direct` and `put` kernels record when they send their bytes.

For times on one GPU, each rank runs without the other, and rank 0's times are recorded.

Source: "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning Recommendation
Systems", III-A, IV.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Ranks, time_variants
from weft.bench.core.measure import Step, check
from weft.bench.core.operator import Measured
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import release
from weft.bench.core.tables import Record
from weft.bench.ops.embedding_data import BASELINE, EmbeddingData
from weft.bench.ops.embedding_presets import Bag
from weft.bench.ops.embedding_variants import ASYNCHRONOUS, FusedVariant, SerialVariant, Variant, make_variant
from weft.studies.embedding_measure import MeasuredStudy, Part, Times, checked_times, solo, time_ranks, timeline_of

STUDY = "pgas_measured"
BATCH, DIM, ROWS = 16384, 64, 1_000_000
WEAK, STRONG = Bag(0, 128), Bag(0, 32)
VARIANTS = (BASELINE, ASYNCHRONOUS, "batched", "fbgemm", "pipelined-4", "direct", "put")
WIDTHS = (16, 32, 64, 128, 256)
COLUMNS = 2048  # columns of all tables of a rank, whatever their width
BATCHES = (256, 1024, 4096)
PIPELINES = ("baseline", "baseline, MLP beside", "batched", "direct", "direct, MLP beside")
_DENSE, _BOTTOM, _TOP = 13, (512, 256), (512, 256)  # the paper gives no sizes; these are usual for DLRM
_INFERENCE = 100  # batches, as in the paper


def _weak(figure: str, config: str, batch: int = BATCH, **more: Any) -> Part:
    return Part(figure, config, batch, 64, DIM, ROWS, WEAK, **more)


def _strong(figure: str, config: str, **more: Any) -> Part:
    return Part(figure, config, BATCH, 96, DIM, ROWS, STRONG, False, **more)


def _width(dim: int) -> Part:
    rows, variants = 12_800_000 // dim, (BASELINE, "batched", "direct", "put")
    return Part("width", str(dim), BATCH, COLUMNS // dim, dim, rows, Bag(1, 1), variants=variants)


PARTS = (
    _weak("weak", "1", ranks=1, variants=(BASELINE, ASYNCHRONOUS, "batched", "direct")),
    _weak("weak", "2", variants=VARIANTS),
    _strong("strong", "1", ranks=1, variants=(BASELINE, ASYNCHRONOUS, "batched", "direct")),
    _strong("strong", "2", variants=VARIANTS),
    *(_weak("batch", str(batch), batch, variants=(BASELINE, ASYNCHRONOUS, "batched", "direct")) for batch in BATCHES),
    *map(_width, WIDTHS),
    _strong("dlrm", "strong"),
    _weak("dlrm", "weak"),
)  # fmt: skip


class _Pgas(MeasuredStudy):
    name, study, parts = "pgas", STUDY, PARTS

    def measure(
        self, preset: Part, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> Measured:
        part, alone = preset, preset.ranks == 1
        step(f"{part.name}: making inputs", 0)
        here = solo(ranks) if alone else ranks
        tiny = ranks.device.type == "cpu"
        work = EmbeddingData(part.preset(tiny).config(here.world_size), here, input_sets=2)
        if part.figure == "dlrm":
            found, more = _inference(part, work, 1 if options.quick else 3, 2 if tiny else _INFERENCE, step)
            baseline = PIPELINES[0]
        else:
            found, more = _retrieval(part, work, self.repetitions(options), step)
            baseline = ASYNCHRONOUS if ASYNCHRONOUS in part.variants else BASELINE
        records = self.records(part, found, ranks, options, ceilings, baseline, more)
        del work
        if alone:
            release(here)
        return Measured(records, wrong=tuple(found.wrong.values()))


def components(built: Mapping[str, Variant]) -> dict[str, Call]:
    """Return the calls whose times give the paper's breakdown of its baseline. Also return the pooling of variant `batched`,
    which runs one kernel for all tables.

    computation: the baseline's pooling.
    phase: the baseline's all-to-all, wait and unpacking.
    one float: the same as phase, but each rank sends only a single float to each rank.
    exchange: the all-to-all alone.
    """
    baseline = built.get(ASYNCHRONOUS, built[BASELINE])
    assert isinstance(baseline, SerialVariant)
    work = baseline.work
    pooled = baseline.pool(0)
    received = baseline.exchange(pooled)
    world, group = work.ranks.world_size, work.ranks.group
    sent, arrived = (torch.zeros(world, dtype=work.dtype, device=work.ranks.device) for _ in range(2))

    def phase(which: int) -> torch.Tensor:
        return baseline.unpack(baseline.exchange(pooled))

    def one_float(which: int) -> torch.Tensor:
        running = dist.all_to_all_single(arrived, sent, group=group, async_op=True)
        running.wait()
        return baseline.unpack(received)

    calls: dict[str, Call] = {"computation": baseline.pool}
    if world > 1:
        calls |= {"phase": phase, "one float": one_float, "exchange": lambda which: baseline.exchange(pooled)}
    if isinstance(batched := built.get("batched"), SerialVariant):
        calls["batched computation"] = batched.pool
    return calls


def _retrieval(part: Part, work: EmbeddingData, repetitions: int, step: Step) -> tuple[Times, dict[str, Record]]:
    beside: dict[str, Call] = {}

    def calls(built: dict[str, Variant]) -> Mapping[str, Call]:
        beside.update(components(built))
        return beside

    found, built = checked_times(work, part.variants, calls, repetitions=repetitions, step=step)
    more: dict[str, Record] = {name: {} for name in found.fields}
    sent = (work.config.global_batch - work.local_batch) * work.local_dim * work.config.itemsize
    for name in found.fields:
        more[name]["sent_bytes"] = sent
    # The paper's host waits for the device in each call, so its times include launches and synchronisation.
    singles: dict[str, Call] = {**{n: v for n, v in built.items() if n in found.fields}, **beside}
    timed = time_variants(singles, work.ranks, "single", input_sets=work.input_sets, seconds=0.05, repetitions=(5, 7))
    for name, timing in timed.items():
        more[name]["single_ms"] = timing.p50_ms
    if work.ranks.device.type == "cuda" and part.figure in ("weak", "strong") and work.ranks.world_size > 1:
        for name in ("direct", "put"):
            if isinstance(variant := built.get(name), FusedVariant):
                lines = timeline_of(variant)
                us, mb = lines.bytes_by()
                more[name] |= {"us": us, "sent_mb": mb, "kernel_us": lines.end_us}
    return found, more


# --- inference ---


class _Dlrm(nn.Module):
    """A DLRM without its embeddings: the bottom MLP of the dense features, dot products of all pairs of vectors, the
    top MLP.
    """

    places: torch.Tensor

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        pairs = (features + 1) * features // 2
        self.bottom, self.top = _mlp((_DENSE, *_BOTTOM, dim)), _mlp((dim + pairs, *_TOP, 1))
        first, second = torch.tril_indices(features + 1, features + 1, offset=-1)
        self.register_buffer("places", first * (features + 1) + second)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Return the predictions [batch, 1].

        dense: the output of the bottom MLP [batch, dim].
        pooled: the pooled vectors of all tables [batch, features * dim].
        """
        vectors = torch.cat([dense, pooled], dim=1).view(len(dense), -1, dense.shape[1])
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        out: torch.Tensor = self.top(torch.cat([dense, products[:, self.places]], dim=1))
        return out


def _mlp(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Inference(EmbeddingData):
    """The data of DLRM inference: tables and bags, and a `_Dlrm` with the same weights on all ranks."""

    def __init__(self, work: EmbeddingData) -> None:
        self.__dict__.update(work.__dict__)
        self.of_pooled = work
        dim = self.config.sharding.slots[0].dim
        device, features = self.ranks.device, len(self.config.sharding.slots)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(5)
            self.model = _Dlrm(features, dim).to(device).requires_grad_(False)
            self.dense = [torch.rand(self.local_batch, _DENSE, device=device) for _ in range(self.input_sets)]

    def reference(self, which: int) -> torch.Tensor:
        """Return the predictions for input set `which`, computed in float64."""
        model = self.model.double()
        out: torch.Tensor = model(model.bottom(self.dense[which].double()), self.of_pooled.reference(which))
        self.model.float()
        return out

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """Return the error limit: for the baseline 1e-4, because fp32 rounds sums of 64 rows and of 8,000 features; for
        other variants twice the baseline's error, but at least 1e-5.
        """
        return 1e-4 if name == PIPELINES[0] else max(2 * errors[PIPELINES[0]], 1e-5)


class _Pipeline:
    """A way to run inference on a batch.

    retrieve: the variant that pools and exchanges the vectors.
    beside: True to run the bottom MLP concurrently, on another stream.
    """

    def __init__(self, work: _Inference, retrieve: Variant, beside: bool) -> None:
        self.work, self.retrieve = work, retrieve
        self.stream = torch.cuda.Stream(work.ranks.device) if beside and work.ranks.device.type == "cuda" else None
        self.events: list[tuple[Any, Any]] | None = None

    def __call__(self, which: int) -> torch.Tensor:
        work, model = self.work, self.work.model
        with torch.no_grad():
            if self.stream is None:
                dense = model.bottom(work.dense[which])
                pooled = self._retrieved(which)
            else:
                here = torch.cuda.current_stream(work.ranks.device)
                self.stream.wait_stream(here)
                with torch.cuda.stream(self.stream):
                    dense = model.bottom(work.dense[which])
                dense.record_stream(here)
                pooled = self._retrieved(which)
                here.wait_stream(self.stream)
            out: torch.Tensor = model(dense, pooled)
            return out

    def _retrieved(self, which: int) -> torch.Tensor:
        if self.events is None:
            return self.retrieve(which)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        pooled = self.retrieve(which)
        after.record()
        self.events.append((before, after))
        return pooled


def _inference(
    part: Part, work: EmbeddingData, repetitions: int, batches: int, step: Step
) -> tuple[Times, dict[str, Record]]:
    """Time DLRM inference over `batches` batches with each pipeline. Return (times per batch, {pipeline: further record
    fields}).
    """
    step(f"{part.name}: checking every variant", 0)
    model = _Inference(work)
    by = {"baseline": ASYNCHRONOUS, "batched": "batched", "direct": "direct"}
    retrieve = {name: make_variant(variant, work) for name, variant in by.items()}
    pipelines = {name: _Pipeline(model, retrieve[name.partition(",")[0]], "beside" in name) for name in PIPELINES}
    found = check(pipelines, model)
    step(f"{part.name}: checking every variant", 0.5)
    right = {name: pipeline for name, pipeline in pipelines.items() if name not in found.wrong}

    def row(pipeline: _Pipeline) -> Callable[[int], object]:
        def call(which: int) -> torch.Tensor:
            for number in range(batches):
                out = pipeline((which + number) % work.input_sets)
            return out

        return call

    calls: dict[str, Call] = {name: row(pipeline) for name, pipeline in right.items()}
    fields = time_ranks(
        calls, work.ranks, input_sets=1, repetitions=repetitions, waits=True,
        advance=lambda share: step(f"{part.name}: timing", share),
    )  # fmt: skip
    more: dict[str, Record] = {}
    for name, pipeline in right.items():
        for key in ("p20_ms", "p50_ms", "p80_ms", "skew_ms"):
            fields[name][key] /= batches
        fields[name]["rank_ms"] = [ms / batches for ms in fields[name]["rank_ms"]]
        more[name] = {"batches": batches}
        if work.ranks.device.type == "cuda":  # the accumulated time of the retrieval, as the paper reports it
            pipeline.events = []
            work.ranks.meet()
            row(pipeline)(0)
            work.ranks.synchronize()
            took = [before.elapsed_time(after) for before, after in pipeline.events]
            pipeline.events = None
            more[name]["retrieval_ms"] = work.ranks.most(math.fsum(took) / batches)
    return Times(fields, found.errors, found.wrong), more


OPERATOR = _Pgas()
