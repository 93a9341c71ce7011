"""The benchmark of matmul_all_to_all: its inputs, its variants, its records. The benchmark shares the other code with
all_to_all_matmul.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from support.bench import cpu_ranks, quick, records_of
from support.matmul_all_to_all_reference import expected, received_of

from weft.bench.core.options import BenchOptions
from weft.bench.ops.gemms import find_shapes, shapes_file
from weft.bench.ops.matmul_all_to_all import OPERATOR, CombineVariants
from weft.bench.ops.moe_shape import MoeShape
from weft.bench.report import markdown
from weft.launch import Pool

SHAPE = MoeShape(m=24, n=16, k=40, experts=6, top_k=2, skew=0.7, sources=("by hand",))
STORE, DMA = "combine[chunks=1,by=store]", "combine[chunks=1,by=dma]"


def test_its_layers_are_the_way_back_of_those_that_all_to_all_matmul_has() -> None:
    there, back = shapes_file("all_to_all_matmul"), shapes_file("matmul_all_to_all")
    for group in ("mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"):
        options = BenchOptions(OPERATOR.name, preset=group, device="cuda", modes=("queued",))
        first, last = find_shapes(MoeShape, there, options), find_shapes(MoeShape, back, options)
        assert {(2 * s.k, s.n, s.m, s.experts, s.top_k, s.skew) for s in last} == {
            (s.n, s.k, s.m, s.experts, s.top_k, s.skew) for s in first if s.sources == (f"{group} gate_up",)
        }


def _facts(group: dist.ProcessGroup) -> dict:
    """Return the errors of the variants' results against the tests' own reference."""
    work, world = CombineVariants(OPERATOR.spec, SHAPE, cpu_ranks(group), "fp32"), group.size()
    splits = tuple(tuple(map(int, row)) for row in work.all_splits[1])
    hs = [work.rows_at(1, rank) for rank in range(world)]
    weights = torch.stack([work.expert(rank, i) for rank in range(world) for i in range(3)])
    y = expected(group.rank(), splits, [h.double() for h in hs], weights.double())
    variants, _, _ = work.others([])
    variants |= {name: work.weft(name, None) for name in ("weft", "weft-bounded")}
    return {
        "received": torch.equal(work.received[1], received_of(group.rank(), splits)),
        "weights": torch.equal(work.w, weights.split(3)[group.rank()]),
        "reference": float((work.reference(1) - y).abs().max()),
        "errors": {name: float((variant(1) - y).abs().max()) for name, variant in variants.items()},
        "fresh": not torch.equal(work.all_splits[0], work.all_splits[1]),
    }


def test_inputs_and_variants(pool: Pool) -> None:
    for one in pool.run(_facts, ranks=2):
        assert one["received"]
        assert one["weights"]
        assert one["fresh"]
        assert one["reference"] == 0
        assert one["errors"].keys() == {"serial", "padded", "weft", "weft-bounded"}
        assert max(one["errors"].values()) < 1e-5


def _measured(group: dist.ProcessGroup) -> list[dict]:
    variants = ("weft", "weft-serial", STORE, DMA)
    return records_of(group, quick(OPERATOR.name, SHAPE.name, variants=variants), SHAPE)


def test_records(pool: Pool) -> None:
    rows = pool.run(_measured, ranks=2)[0]
    for mode in ("single", "queued"):
        of_mode = [r for r in rows if r["mode"] == mode]
        assert [r["variant"] for r in of_mode][:4] == ["serial", "padded", "weft", "weft-bounded"]
        assert {r["variant"] for r in of_mode[4:]} == {"weft-serial", STORE, STORE + "-bounded", DMA}
        assert {r["baseline"] for r in of_mode} == {"serial"}
        assert all(r["gemm_ms"] > 0 and r["exchange_ms"] > 0 and r["roofline_ms"] > 0 for r in of_mode)
    json.dumps(rows, allow_nan=False)
    assert f"| {SHAPE.name} |" in markdown([r | {"device": "cuda", "run": "a"} for r in rows])
