"""Benchmark of the experts of a mixture-of-experts layer, forward and backward: dispatch, two GEMMs and combine.

Presets and shapes are the same as for `matmul_all_to_all`: in TOKENSxNxK-eEXPERTS-topK, N is the hidden size and K the
width of an expert. Variants:

    serial          the baseline, by hand: all_to_all_single of the counts, which the CPU then reads; all_to_all_single of the
                    tokens; torch's grouped GEMMs; all_to_all_single of the results. Backward runs the same calls in reverse order
    weft            weft.nn.ExpertParallelMLP
    weft-bounded    the same with max_rows, so that the CPU does not wait for counts in forward

The benchmark also times `compute`, the layer without communication. Its experts multiply as many rows as in the other
variants, but not the rows that other ranks send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

import weft.nn
from weft.bench.core import remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Results
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.tables import Record, by_config, geomean, milliseconds, table
from weft.bench.ops.gemms import BASELINE, WEFT, check_room, find_shapes, shapes_file
from weft.bench.ops.layers import COMPUTE, Layer, LayerBenchmark, LayerVariants, Through, hidden_cell
from weft.bench.ops.moe_shape import BOUNDED, MoeShape
from weft.nn.expert_rows import GatherRows, inverse
from weft.runtime.collectives import all_to_all_single
from weft.symm.groups import group_of
from weft.words import counted

VARIANTS = (BASELINE, WEFT, WEFT + BOUNDED)
SHAPES_OF = "matmul_all_to_all"
_COPIES = 6
"""The memory for the layer's weights, their gradients, and the gradients to compare with, in multiples of the memory of the
down projection's weights.
"""


class PlainExperts(weft.nn.ExpertParallelMLP):
    """Experts that communicate by torch's collectives, before and after their GEMMs.

    known, room: both None to communicate. Without communication, `known` is the number of rows from each rank for each
        local expert, [ranks, local experts] on the CPU. `room` has rows to multiply in place of received rows.
    """

    known: torch.Tensor | None = None
    room: torch.Tensor | None = None

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, top_k_weights: torch.Tensor, top_k_index: torch.Tensor
    ) -> torch.Tensor:
        top_k = top_k_index.shape[1]
        expert, order = top_k_index.flatten().sort(stable=True)
        splits = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        splits = splits.scatter_add(0, expert, torch.ones_like(expert))
        place = inverse(order)
        (sent, came), received = self.sizes(splits)

        def out(rows: torch.Tensor) -> torch.Tensor:
            return self.move(rows, sent, came)

        def back(rows: torch.Tensor) -> torch.Tensor:
            return self.move(rows, came, sent)

        arrived = Through.apply(GatherRows.apply(x, order // top_k, place, top_k), out, back)
        expert = torch.arange(received.shape[1]).repeat(self.world_size)
        by_expert = expert.repeat_interleave(received.flatten()).argsort(stable=True).to(x.device)
        by_source, rows = inverse(by_expert), received.sum(0)
        h = self.multiply(GatherRows.apply(arrived, by_expert, by_source, 1), self.get_parameter("gate_up_proj"), rows)
        gate, up = h.chunk(2, dim=1)
        y = self.multiply(F.silu(gate) * up, self.down_proj, rows)
        y = Through.apply(GatherRows.apply(y, by_source, by_expert, 1), back, out)
        of_tokens = GatherRows.apply(y, place, order, 1).view(*top_k_weights.shape, self.hidden)
        return (of_tokens * top_k_weights.unsqueeze(2)).sum(1)  # type: ignore[no-any-return]

    def sizes(self, splits: torch.Tensor) -> tuple[list[list[int]], torch.Tensor]:
        """Return the numbers of rows to and from each rank, [2][ranks], and the table of rows from each rank for each local
        expert, on the CPU. `splits`: the number of rows for each expert.
        """
        if self.known is not None:
            tables = torch.stack([splits.view(self.world_size, -1).cpu(), self.known])
        else:
            received = torch.empty_like(splits)
            all_to_all_single(received, splits, group=group_of(self.group_name))
            tables = torch.stack([splits, received]).view(2, self.world_size, -1).cpu()
        return tables.sum(2).tolist(), tables[1]

    def move(self, rows: torch.Tensor, sent: list[int], came: list[int]) -> torch.Tensor:
        """Return the rows from all ranks. sent, came: the number of rows to and from each rank."""
        if self.room is not None:
            return self.room[: sum(came)]
        arrived = rows.new_empty(sum(came), rows.shape[1])
        all_to_all_single(arrived, rows.contiguous(), came, sent, group=group_of(self.group_name))
        return arrived

    def multiply(self, x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return x_e @ w_e.mT for the rows x_e of each expert. rows: the number of rows of each expert, on the CPU."""
        if x.is_cuda and x.dtype == torch.bfloat16:
            return F.grouped_mm(x, w.mT, offs=rows.cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True))
        return torch.cat([part @ of.mT for part, of in zip(x.split(rows.tolist()), w, strict=True)])


class Comparison(LayerVariants):
    """The inputs and the variants of a layer on one rank. All ranks must construct this object."""

    baselines = (BASELINE,)
    claims = ((WEFT, BASELINE), (WEFT + BOUNDED, BASELINE))

    def __init__(self, shape: MoeShape, wanted: Sequence[str], ranks: Ranks, dtype: torch.dtype) -> None:
        about = f"{counted(shape.m, 'token')} a rank, {shape.top_k} of {counted(shape.experts, 'expert')} each"
        super().__init__(shape.name, about, ranks, dtype)
        self.config, device = shape, ranks.device
        splits = shape.splits(ranks.world_size, 0).view(ranks.world_size, ranks.world_size, -1)
        most = int(splits.sum((0, 2)).max())
        torch.manual_seed(0)
        sizes = (shape.n, shape.k, shape.experts)
        given: dict[str, Any] = {"group": ranks.group, "dtype": dtype}
        serial = PlainExperts(*sizes, **given, device=device)
        alone = PlainExperts(*sizes, **given, device="meta")
        alone.known = splits[:, ranks.rank]
        alone.room = torch.randn(max(shape.rows, int(alone.known.sum())), shape.n, device=device).to(dtype)
        free = weft.nn.ExpertParallelMLP(*sizes, **given, device="meta")
        bounded = weft.nn.ExpertParallelMLP(*sizes, **given, device="meta", max_rows=-(-most // 128) * 128)
        made = {BASELINE: serial, COMPUTE: alone, WEFT: free, WEFT + BOUNDED: bounded}
        for module in (alone, free, bounded):  # one copy of the weights, which may fill a large part of the memory
            module.gate_up_proj, module.down_proj = serial.gate_up_proj, serial.down_proj
        calls = {name: (module if name in (BASELINE, COMPUTE) else _in_order(module)) for name, module in made.items()}
        self.layers = {n: Layer(made[n], calls[n]) for n in made if n in (BASELINE, COMPUTE, *(wanted or VARIANTS))}
        self.waiting = [*self.layers]  # backward reads the numbers of rows on the CPU
        torch.manual_seed(1 + ranks.rank)
        x = torch.randn(shape.m, shape.n, device=device).to(dtype).requires_grad_()
        self.grad = torch.randn(shape.m, shape.n, device=device).to(dtype)
        index = shape.chosen(ranks.rank, 0)
        weights = torch.rand(index.shape, device=device).softmax(1).to(dtype).requires_grad_()
        self.inputs, self.rest = {"x": x, "top_k_weights": weights}, (index.to(device),)

    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        fields = ("n", "k", "experts", "top_k", "skew", "rows")
        return {"tokens": self.config.m} | {field: getattr(self.config, field) for field in fields}

    def notes(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        return OPERATOR.notes(records)


def _in_order(module: weft.nn.ExpertParallelMLP) -> Any:
    return lambda x, weights, index: module(x, index, weights)


class _ExpertParallel(LayerBenchmark[MoeShape]):
    name, known, baselines = "expert_parallel", VARIANTS, Comparison.baselines

    def check_options(self, options: BenchOptions) -> None:
        super().check_options(options)
        for shape in self.presets(options):
            if shape.experts % options.ranks:
                raise ValueError(
                    f"experts={shape.experts} of {shape.name} must be divisible by ranks={options.ranks}: use fewer ranks"
                )

    def presets(self, options: BenchOptions) -> Sequence[MoeShape]:
        return find_shapes(MoeShape, shapes_file(SHAPES_OF), options)

    def workload(self, preset: MoeShape, ranks: Ranks, options: BenchOptions) -> Comparison:
        dtype = DTYPES[options.dtype]
        check_room(preset, ranks, _COPIES * dtype.itemsize)
        return Comparison(preset, options.variants, ranks, dtype)

    def lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """Return (header, rows) of a table with a row for each shape."""

        def ms(variant: str) -> Any:
            return lambda of: milliseconds(of[variant]["p50_ms"]) if variant in of else ""

        def gain(variant: str) -> Any:
            return lambda of: remarks.gain(of.get(variant), of.get(BASELINE))

        columns: dict[str, Any] = {"tokens x hidden x width": lambda of: next(iter(of.values()))["config"]}
        columns |= {v: ms(v) for v in (COMPUTE, *VARIANTS)}
        columns |= {f"{v} vs {BASELINE}": gain(v) for v in VARIANTS[1:]}
        columns[f"{WEFT}: hidden"] = lambda of: hidden_cell(of.get(WEFT, {}))
        _, header, lines = table("", [*by_config(rows).values()], columns)
        return [*header], [[*line] for line in lines]

    def notes(self, rows: Sequence[Record]) -> list[str]:
        said = []
        for variant in VARIANTS[1:]:
            faster = [r["speedup"] for r in rows if r["variant"] == variant and r["speedup"]]
            if faster:
                shapes = counted(len(faster), "shape")
                said.append(
                    f"{variant}: {geomean(faster):.2f}x {BASELINE} in the geometric mean of {shapes}, {min(faster):.2f}x at worst."
                )
        return [*said, *(remarks.of_nccl(rows) if rows else [])]


OPERATOR = _ExpertParallel()
