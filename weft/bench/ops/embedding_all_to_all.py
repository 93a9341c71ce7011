"""Benchmark of embedding pooling fused with the all-to-all: presets x variants.

For each configuration all ranks build the same tables and inputs, scaled to what fits this machine. The roofline is
what the bytes that move take at the rates measured in the same run; what a cache holds can take less.
"""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Call, Mode, Ranks
from weft.bench.core.measure import Results
from weft.bench.core.operator import Column, Variants, VariantsOperator
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.tables import Record, geomean, markdown_table, times
from weft.bench.ops.embedding_presets import (
    EmbeddingConfig,
    EmbeddingPreset,
    Scale,
    find_presets,
    fitting_scale,
    jagged_input,
)
from weft.embedding import as_jagged
from weft.embedding.check import check_jagged
from weft.embedding.options import EmbeddingOptions, Order
from weft.embedding.plan import plan_of
from weft.embedding.tables import column_runs
from weft.hw import available_memory_bytes
from weft.operator.embedding import compiled
from weft.ops.embedding_all_to_all import embedding_all_to_all
from weft.ops.embedding_pool import embedding_pool
from weft.symm import domain
from weft.timeline import Timeline
from weft.words import counted

BASELINE = "embedding_bag"
BASELINES = (BASELINE, "batched", "fbgemm")
PER_TABLE = "per-table"
DEFAULT = "direct"  # what transport="auto" takes on CPU, and on H200s by their model
POOL = " pooling alone"
_CHUNK_BYTES = 128 << 20  # of gathered rows in float64 while the reference is computed


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank must move in a call, whatever the algorithm.

    Every row read counts, repeated or not (caches may do better: `distinct_rows` counts each row once); ids and offsets
    are read; pooled vectors are written, here or at a peer; `wire` is the part of them that leaves the rank.
    """

    rows: float
    distinct_rows: float
    ids: float
    offsets: float
    outputs: float
    wire: float

    @property
    def memory(self) -> float:
        return self.rows + self.ids + self.offsets + self.outputs

    def roofline_ms(self, ceilings: Ceilings) -> float:
        """The larger of memory traffic and wire traffic over what this rank was measured to do. Rows that are read again may come
        from a cache, and then a call takes less."""
        return 1e3 * max(self.memory / ceilings.memory, self.wire / ceilings.link)


class EmbeddingWorkload(Variants):
    """Tables (uniform in [-1, 1)), `input_sets` inputs of the global batch for this rank's features."""

    baselines = BASELINES
    claims = tuple((DEFAULT, baseline) for baseline in BASELINES)

    def __init__(self, config: EmbeddingConfig, ranks: Ranks, *, input_sets: int, seed: int = 0):
        self.config, self.ranks, self.input_sets = config, ranks, input_sets
        self.name, self.dtype = config.name, config.sharding.dtype
        sharding, device, rank = config.sharding, ranks.device, ranks.rank
        self.slots = sharding.local_slots(rank)
        self.local_dim = sum(slot.dim for slot in self.slots)
        self.local_batch = config.batch_sizes[rank]
        owned = sharding.local_tables(rank)
        generator = torch.Generator(device)
        self.weights: list[torch.Tensor] = []
        for t in owned:
            shape = (sharding.tables[t].num_embeddings, sharding.tables[t].embedding_dim)
            weight = torch.empty(shape, dtype=sharding.dtype, device=device)
            self.weights.append(weight.uniform_(-1, 1, generator=generator.manual_seed(77 + t)))
        bags = [config.bags[t] for t in owned]
        rows = [sharding.tables[t].num_embeddings for t in owned]
        self.inputs = [
            jagged_input(bags, rows, config.preset.indices, config.global_batch, list(owned), seed + i, device)
            for i in range(input_sets)
        ]

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """A variant may err at most twice as much as plain torch in the same dtype (`nn.EmbeddingBag`), or by one rounding
        of the largest element; plain torch by one rounding for each row of the longest bag."""
        eps = torch.finfo(self.dtype).eps
        if name == BASELINE:
            return eps * max(2 * bag.mean for bag in self.config.bags)
        return max(2 * errors[BASELINE], eps)

    # --- variants, and what is recorded of them ---

    def arms(self, wanted: Sequence[str]) -> tuple[Mapping[str, Arm], dict[str, Call], list[str]]:
        """Beside serial variants runs their pooling alone."""
        names = dict.fromkeys([BASELINE, *(wanted or DEFAULT_VARIANTS)])
        self.built = {name: make_arm(name, self) for name in names if why_not(name, self.ranks.device) is None}
        pools: dict[str, Call] = {
            name + POOL: arm.pool for name, arm in self.built.items() if isinstance(arm, SerialArm)
        }
        return self.built, pools, []

    def roofline_ms(self, ceilings: Sequence[Ceilings]) -> float:
        return max(t.roofline_ms(c) for t, c in zip(self.traffics, ceilings, strict=True))

    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        """traffic_bytes: of the rank that needs longest."""
        worst = max(zip(self.traffics, ceilings, strict=True), key=lambda of: of[0].roofline_ms(of[1]))[0]
        scale, traffic = self.config.scale, {field: round(value) for field, value in asdict(worst).items()}
        scales = {"scale": float(scale.batch), "rows_scale": float(scale.rows)}
        return scales | {"shape": self.config.describe(), "traffic_bytes": traffic}

    def judged(self, mode: Mode, name: str, found: Results) -> Record:
        extra_bytes, how = self.built[name].peak_bytes
        return {
            "pool_ms": found.ms(mode, name + POOL),
            "extra_bytes": extra_bytes,
            "extra_bytes_how": how,
            "kernel": self.built[name].resources,
            "put_us_per_slice": self.put_us_per_slice(mode, name, found),
        }

    def put_us_per_slice(self, mode: Mode, name: str, found: Results) -> float | None:
        """What a program of `name` spends on a slice for staging, copy, fence and flag, beyond what `direct` takes.

        (put's time - direct's) x resident programs / slices sent, on this rank; None where there is no such pair.
        """
        arm, direct = self.built[name], next((n for n in self.built if n == name.replace("put", "direct", 1)), DEFAULT)
        longer, base = found.ms(mode, name), found.ms(mode, direct)
        if not isinstance(arm, FusedArm) or arm.resources is None or longer is None or base is None:
            return None
        slices = arm.slices_sent()
        return 1e3 * (longer - base) * arm.resources["grid"] / slices if slices else None

    def said(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        """With a line for each fused GPU kernel: what the compiler made of it and, for `put`, what a slice costs."""
        roofline = f"roofline {self.roofline_ms(ceilings):.3f} ms from {ceilings[0]}"
        said = [f"{self.config.describe()}; {self.config.scale}", roofline]
        for name, arm in self.built.items():
            if (kernel := arm.resources) is None:
                continue
            line = (
                f"{name}: {kernel['registers']} registers, {kernel['spills']} spilled, "
                f"{counted(kernel['programs_per_sm'], 'program')} on an SM, {kernel['grid']} in all"
            )
            costs = [(r["mode"], r["put_us_per_slice"]) for r in records if r["variant"] == name]
            costing = ", ".join(f"{cost:.3f} us ({mode})" for mode, cost in costs if cost is not None)
            said.append(f"{line}; put, fence and flag of a slice: {costing}" if costing else line)
        return said

    # --- bytes ---

    @cached_property
    def traffics(self) -> list[Traffic]:
        """Of all ranks. Collective."""
        return [Traffic(*values) for values in self.ranks.gather(list(asdict(self.traffic()).values()))]

    def traffic(self) -> Traffic:
        """This rank's bytes, exact for its inputs, in the mean over the input sets."""
        sharding, itemsize = self.config.sharding, self.config.itemsize
        rows = distinct = 0.0
        for values, offsets in self.inputs:
            cuts = offsets[:: self.config.global_batch].tolist()
            for slot, start, end in zip(self.slots, cuts, cuts[1:], strict=False):
                rows += (end - start) * slot.dim * itemsize
                seen = torch.zeros(sharding.tables[slot.table].num_embeddings, dtype=torch.bool, device=values.device)
                seen[values[start:end]] = True
                distinct += float(seen.sum()) * slot.dim * itemsize
        values, offsets = self.inputs[0]
        count = sum(v.numel() for v, _ in self.inputs) / self.input_sets
        pooled = self.local_dim * itemsize
        return Traffic(
            rows=rows / self.input_sets,
            distinct_rows=distinct / self.input_sets,
            ids=count * values.element_size(),
            offsets=offsets.numel() * offsets.element_size(),
            outputs=self.config.global_batch * pooled,
            wire=(self.config.global_batch - self.local_batch) * pooled,
        )

    def reference(self, which: int) -> torch.Tensor:
        """float64 [local batch, sum of D]: what this rank must receive. Collective.

        In round i every rank pools its i-th slot and sends it off, which keeps the memory for it small.
        """
        config, (values, offsets) = self.config, self.inputs[which]
        batch, device = config.global_batch, self.ranks.device
        output = torch.empty(self.local_batch, config.sharding.total_dim, dtype=torch.float64, device=device)
        slots_of_rank = [config.sharding.local_slots(r) for r in range(self.ranks.world_size)]
        for i in range(max(len(slots) for slots in slots_of_rank)):
            current = [slots[i] if i < len(slots) else None for slots in slots_of_rank]
            dims = [0 if slot is None else slot.dim for slot in current]
            mine = dims[self.ranks.rank]
            pooled = torch.empty(0, dtype=torch.float64, device=device)
            if mine:
                pooled = pooled_float64(self.weights[i], values, offsets[i * batch : (i + 1) * batch + 1]).view(-1)
            received = torch.empty(self.local_batch * sum(dims), dtype=torch.float64, device=device)
            dist.all_to_all_single(
                received,
                pooled,
                output_split_sizes=[self.local_batch * dim for dim in dims],
                input_split_sizes=[size * mine for size in config.batch_sizes],
                group=self.ranks.group,
            )
            for slot, part in zip(current, received.split([self.local_batch * dim for dim in dims]), strict=True):
                if slot is not None:
                    output[:, slot.column : slot.column + slot.dim] = part.view(self.local_batch, slot.dim)
        return output


def pooled_float64(weight: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums of bags in float64: `values[offsets[b]:offsets[b + 1]]` name the rows of bag b. [len(offsets) - 1, D]."""
    bags, ends = offsets.numel() - 1, offsets.cpu()
    gathered = 8 * weight.shape[1] * int(ends[-1] - ends[0])
    pooled = []
    for part in torch.arange(bags).chunk(1 + gathered // _CHUNK_BYTES):
        first, last = int(part[0]), int(part[-1]) + 1
        rows = weight[values[ends[first] : ends[last]]].double()
        which = torch.arange(rows.shape[0], device=weight.device)
        begins = offsets[first : last + 1] - ends[first]
        pooled.append(F.embedding_bag(which, rows, begins, mode="sum", include_last_offset=True))
    return torch.cat(pooled)


_OUTPUT_BUFFERS = 1  # no result is held across calls


Pool = Callable[[int], torch.Tensor]
"""This rank's pooled vectors of an input set, [global batch, local columns], contiguous."""


class Arm(ABC):
    """One way to compute the output of a workload's input set: [local batch, sum of D], on the current stream."""

    resources: Mapping[str, int] | None = None
    """GPU: what the compiler made of the fused kernel that the calls launch, and how many programs of it are resident."""

    def __init__(self, work: EmbeddingWorkload):
        self.work = work

    @abstractmethod
    def __call__(self, which: int) -> torch.Tensor: ...

    @abstractmethod
    def extra_bytes(self) -> int:
        """Bytes held at the worst moment beyond tables and inputs, output included, counted from the arm's buffers."""

    @cached_property
    def peak_bytes(self) -> tuple[int, str]:
        """The same on the worst rank, and how that is known. Collective."""
        return int(self.work.ranks.most(self.extra_bytes())), "counted"

    @abstractmethod
    def traced(self, which: int, timeline: Timeline) -> None:
        """One call whose spans go into `timeline`; CPU only, times on the monotonic clock that all ranks share."""


class SerialArm(Arm):
    """Pool, then exchange, then unpack."""

    def __init__(self, work: EmbeddingWorkload, pooling: Callable[[EmbeddingWorkload], Pool]):
        super().__init__(work)
        sharding = work.config.sharding
        dims = [sum(s.dim for s in sharding.local_slots(r)) for r in range(sharding.world_size)]
        self.send_splits = [size * work.local_dim for size in work.config.batch_sizes]
        self.receive_splits = [work.local_batch * dim for dim in dims]
        self.shapes = [(work.local_batch, dim) for dim in dims]
        self.runs = column_runs(sharding)
        nothing = torch.empty((work.config.global_batch, 0), dtype=work.dtype, device=work.ranks.device)
        self._pool = pooling(work) if work.weights else lambda which: nothing
        self.pooled_twice = pooling is embedding_bags

    def pool(self, which: int) -> torch.Tensor:
        with torch.no_grad():
            return self._pool(which)

    def exchange(self, pooled: torch.Tensor) -> torch.Tensor:
        """What all ranks pooled for this rank's samples, rank after rank, flat."""
        received, group = pooled.new_empty(sum(self.receive_splits)), self.work.ranks.group
        dist.all_to_all_single(received, pooled.view(-1), self.receive_splits, self.send_splits, group=group)
        return received

    def unpack(self, received: torch.Tensor) -> torch.Tensor:
        parts = [p.view(s) for p, s in zip(received.split(self.receive_splits), self.shapes, strict=True)]
        return torch.cat([parts[rank][:, start:end] for rank, start, end in self.runs], dim=1)

    def __call__(self, which: int) -> torch.Tensor:
        with torch.no_grad():
            return self.unpack(self.exchange(self.pool(which)))

    def extra_bytes(self) -> int:
        """Of tables one by one and put together; sent and received; received and output."""
        config = self.work.config
        pooled = config.global_batch * self.work.local_dim * config.itemsize
        output = self.work.local_batch * config.sharding.total_dim * config.itemsize
        return max(2 * pooled * self.pooled_twice, pooled + output, 2 * output)

    @cached_property
    def peak_bytes(self) -> tuple[int, str]:
        """On GPUs it is measured."""
        if self.work.ranks.device.type != "cuda":
            return super().peak_bytes
        self(0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = self(0)
        torch.cuda.synchronize()
        del output
        return int(self.work.ranks.most(torch.cuda.max_memory_allocated() - before)), "measured"

    def traced(self, which: int, timeline: Timeline) -> None:
        work = self.work
        wire = (work.config.global_batch - work.local_batch) * work.local_dim * work.config.itemsize
        steps = (
            ("compute", "pool", 0, self.pool), ("send", "all_to_all", wire, self.exchange),
            ("compute", "unpack", 0, self.unpack),
        )  # fmt: skip
        done: Any = which
        for lane, name, sent, step in steps:
            start = time.perf_counter()
            done = step(done)
            timeline.add(work.ranks.rank, lane, name, 1e6 * start, 1e6 * time.perf_counter(), sent)


def embedding_bags(work: EmbeddingWorkload) -> Pool:
    """One `nn.EmbeddingBag` per table: what a user of plain torch writes. (The PGAS paper starts from TorchRec's
    EmbeddingBagCollection and an asynchronous all-to-all; here nothing could run beside the exchange.)"""
    bags = [
        nn.EmbeddingBag.from_pretrained(weight, freeze=True, mode="sum", include_last_offset=True)
        for weight in work.weights
    ]
    batch, per_table = work.config.global_batch, []
    for values, offsets in work.inputs:
        cuts = enumerate(pairwise(offsets[::batch].tolist()))
        per_table.append([(values[a:b], offsets[i * batch : (i + 1) * batch + 1] - a) for i, (a, b) in cuts])
    return lambda which: torch.cat([bag(*of) for bag, of in zip(bags, per_table[which], strict=True)], dim=1)


def batched(work: EmbeddingWorkload) -> Pool:
    """Our own kernel pools all tables in one launch; then the same exchange. The honest strong baseline."""
    sharding = work.config.sharding
    tables = tuple(sharding.tables[t] for t in sharding.local_tables(work.ranks.rank))
    return lambda which: embedding_pool(work.weights, work.inputs[which], tables)


def fbgemm(work: EmbeddingWorkload) -> Pool:
    """FBGEMM's table-batched kernel (the one under TorchRec) with tables on the device, forward only."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    precision = SparseType.from_dtype(work.dtype)
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(*weight.shape, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for weight in work.weights],
        optimizer=EmbOptimType.EXACT_SGD,  # no state beside the tables
        pooling_mode=PoolingMode.SUM,
        weights_precision=precision,
        output_dtype=precision,
        device=work.ranks.device,
    )
    for theirs, ours in zip(kernel.split_embedding_weights(), work.weights, strict=True):
        theirs.copy_(ours)
    return lambda which: kernel(*work.inputs[which])


def parse(name: str) -> EmbeddingOptions | None:
    """A fused variant, written as its name: `direct`, `put`, with `-natural` and `-slice8` as wanted; without, the preset's."""
    found = re.fullmatch(r"(direct|put)(-natural)?(?:-slice([1-9]\d*))?", name)
    if found is None:
        return None
    order: Order = "natural" if found[2] else "remote_first"
    slice_size = int(found[3]) if found[3] else None
    return EmbeddingOptions("put" if found[1] == "put" else "direct", order, slice_size, outputs=_OUTPUT_BUFFERS)


class FusedArm(Arm):
    """weft's operator. per_table: its kernel launched once for each table instead of once for all. (So does the fused paper within
    a node, by a kernel that is not persistent; this one is.)"""

    def __init__(self, work: EmbeddingWorkload, options: EmbeddingOptions, per_table: bool = False):
        super().__init__(work)
        self.per_table, config, rank = per_table, work.config, work.ranks.rank
        self.options = replace(options, slice_size=options.slice_size or config.preset.slice_size)
        if per_table:
            self.inputs = [as_jagged(features) for features in work.inputs]
            self.checked = check_jagged(self.inputs[0], config.sharding, rank, config.batch_sizes, work.weights)
            self.launching = self.operator()

    def __call__(self, which: int, timeline: Timeline | None = None) -> torch.Tensor:
        work = self.work
        if self.per_table:
            output: torch.Tensor = self.launching(
                work.weights, self.inputs[which], self.checked, timeline=timeline, launch_per_table=True
            )
            return output
        return embedding_all_to_all(
            work.weights, work.inputs[which], work.config.sharding, group=work.ranks.group,
            batch_sizes=work.config.batch_sizes, timeline=timeline, **vars(self.options),
        )  # fmt: skip

    def extra_bytes(self) -> int:
        config = self.work.config
        return _OUTPUT_BUFFERS * max(config.batch_sizes) * config.sharding.total_dim * config.itemsize

    def traced(self, which: int, timeline: Timeline) -> None:
        self(which, timeline)

    def operator(self) -> Any:
        """What runs the calls. Collective where there has been no call yet."""
        plan = plan_of(self.work.config.sharding, self.options)
        return compiled(plan, domain(self.work.ranks.group, self.work.ranks.device))

    @cached_property
    def resources(self) -> dict[str, int] | None:  # type: ignore[override]
        """Of a launch that opens the call, and, unless others follow for the other tables, closes it."""
        if self.work.ranks.device.type != "cuda":
            return None
        closes = not self.per_table or len(self.work.slots) == 1
        return asdict(
            next(o for key, o in self.operator().kernel.occupancy.items() if key.enter and key.leave == closes)
        )

    def slices_sent(self) -> int:
        """Slices that this rank puts to its peers in a call."""
        if self.options.transport == "direct":
            return 0
        per_sample: int = self.operator().plan.slices_per_sample[self.work.ranks.rank]
        return (self.work.config.global_batch - self.work.local_batch) * per_sample


POOLS: Mapping[str, Callable[[EmbeddingWorkload], Pool]] = {
    BASELINE: embedding_bags, "batched": batched, "fbgemm": fbgemm,
}  # fmt: skip
DEFAULT_VARIANTS = ("batched", "fbgemm", "direct", "put")


def why_not(name: str, device: torch.device) -> str | None:
    """Why arm `name` cannot run here, None if it can. Raises ValueError on a name that is no arm."""
    if name not in (*POOLS, PER_TABLE) and parse(name) is None:
        raise ValueError(
            f"no variant {name!r}: give {', '.join((*POOLS, PER_TABLE))}, or direct or put, optionally with -natural and -sliceN, "
            f"such as put-natural-slice8"
        )
    if name == PER_TABLE and device.type != "cuda":
        return "only GPU kernels are launched"
    if name == "fbgemm":
        if device.type != "cuda":
            return "it is compared on GPUs"
        try:
            import fbgemm_gpu  # noqa: F401
        except Exception as error:  # it loads shared objects: many things can be wrong with those
            return f"fbgemm_gpu does not import ({type(error).__name__})"
    return None


def make_arm(name: str, work: EmbeddingWorkload) -> Arm:
    if name in POOLS:
        return SerialArm(work, POOLS[name])
    return FusedArm(
        work, parse(name) or EmbeddingOptions("direct", outputs=_OUTPUT_BUFFERS), per_table=name == PER_TABLE
    )


def choose_scale(preset: EmbeddingPreset, ranks: Ranks, options: BenchOptions) -> Scale:
    """`options.scale`, or the largest that fits here; all ranks choose the same."""
    if options.scale is not None:
        scale = Fraction(options.scale).limit_denominator(1 << 16)
        return Scale(scale, scale)
    if ranks.device.type == "cuda":
        free = -ranks.most(-torch.cuda.mem_get_info(ranks.device)[0])
        # FBGEMM holds a copy of the tables. All arms together hold about ten outputs, the reference counts as two.
        share = 0.43 if why_not("fbgemm", ranks.device) is None else 0.75
        rows_bytes = 2e9 if options.quick else math.inf
    else:
        free = -ranks.most(-available_memory_bytes()) / ranks.world_size / (16 if options.quick else 1)
        share = 1 / 3
        mib = min(64, options.read_mib) if options.quick else options.read_mib
        rows_bytes = mib * 2**20 * torch.get_num_threads()
    sizes = {"table_bytes": share * free, "rows_bytes": rows_bytes, "output_bytes": 0.05 * free}
    return fitting_scale(preset, ranks.world_size, DTYPES[options.dtype], **sizes)


class _EmbeddingAllToAll(VariantsOperator[EmbeddingPreset]):
    name, baselines = "embedding_all_to_all", BASELINES
    columns: ClassVar = (Column("pool\nms", "pool_ms", 3), Column("extra\nMB", "extra_bytes", 1, 1e6))
    narrow = ("pool\nms", "p20 - p80", "skew", "host\nus", "first\nms", "extra\nMB", "error")
    head, time = ("configuration",), "{}, ms"

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("single", "queued")

    def default_dtype(self, device: str) -> str:
        return "fp32"

    def check_options(self, options: BenchOptions) -> None:
        find_presets(options.preset)
        for name in options.variants:
            reason = why_not(name, torch.device(options.device))
            if reason is not None:
                raise ValueError(f"variant {name!r} cannot run here: {reason}")

    def presets(self, options: BenchOptions) -> Sequence[EmbeddingPreset]:
        return find_presets(options.preset)

    def workload(self, preset: EmbeddingPreset, ranks: Ranks, options: BenchOptions) -> EmbeddingWorkload:
        config = preset.config(ranks.world_size, choose_scale(preset, ranks, options), DTYPES[options.dtype])
        return EmbeddingWorkload(config, ranks, input_sets=2 if options.quick else 3)

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        """Print the geometric mean of each variant's speedup over all configurations."""
        others = [name for name in BASELINES if any(r["variant"] == name for r in written)]
        rows = []
        for mode in options.modes:
            for name in dict.fromkeys(r["variant"] for r in written):
                mine = [r["speedup_over"] for r in written if r["variant"] == name and r["mode"] == mode]
                over = [[s[o] for s in mine if o in s] for o in others]
                rows.append(
                    (name, mode, *(times(geomean(o)) for o in over), *(times(min(o, default=None)) for o in over))
                )
        columns = ("variant", "mode", *(f"vs\n{o}" for o in others), *(f"worst vs\n{o}" for o in others))
        count = len({r["config"] for r in written})
        print_table(f"Geometric mean over {counted(count, 'configuration')}", columns, rows, section=1)

    # --- tables in documents ---

    def shown(self, rows: Sequence[Record]) -> list[str]:
        variants = dict.fromkeys(r["variant"] for r in rows)
        return [v for v in BASELINES if v in variants] + [v for v in variants if v not in BASELINES]

    def compared(self, rows: Sequence[Record]) -> dict[str, tuple[str, ...]]:
        """Every arm's time is shown; ratios only of what the operator does when nobody chooses, or a reader drowns in them."""
        variants = self.shown(rows)
        fused = [v for v in variants if v not in BASELINES]
        chosen = [DEFAULT] if DEFAULT in fused else fused[:1]
        return dict.fromkeys(chosen, tuple(v for v in variants if v in BASELINES))

    def described(self, record: Record) -> list[str]:
        batch, rows = (round(1 / record[what]) for what in ("scale", "rows_scale"))
        scale = f"1/{batch}" if batch == rows else f"batch 1/{batch}, rows 1/{rows}"
        return [record["config"] + (f" ({scale})" if max(batch, rows) > 1 else "")]

    def lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        header, lines = super().lines(rows)
        for chosen in self.compared(rows):
            header.append(f"{chosen} / roofline")
            ratios = {r["config"]: f"{r['roofline_ratio']:.2f}" for r in rows if r["variant"] == chosen}
            for config, cells in zip(dict.fromkeys(r["config"] for r in rows), lines, strict=True):
                cells.append(ratios.get(config, ""))
        return header, lines

    def table(self, rows: Sequence[Record]) -> str:
        header, lines = self.lines(rows)
        if len(lines) > 1:
            ms = {(r["config"], r["variant"]): r["p50_ms"] for r in rows}
            configs = dict.fromkeys(r["config"] for r in rows)
            means = {
                f"{v} vs {over}": [ms[c, over] / ms[c, v] for c in configs if {(c, v), (c, over)} <= ms.keys()]
                for v, overs in self.compared(rows).items()
                for over in overs
            }
            lines.append(["geometric mean", *(times(geomean(means.get(column, []))) for column in header[1:])])
        return "\n\n".join([markdown_table(header, lines), *self.notes(rows)])


OPERATOR = _EmbeddingAllToAll()
