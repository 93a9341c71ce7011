"""The benchmark of all_to_all_matmul: names and refusals, inputs, variants, records, and graphs without a GPU.

Cheapest first: names without processes, then two ranks.
"""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import CallingRecorder, run_with_one_wrong
from support.all_to_all_matmul_reference import expected
from support.bench import FIELDS, cpu_ranks, quick, records_of
from support.slow import slow

from weft.bench.core import measure
from weft.bench.core.measure import check, measure_variants
from weft.bench.ops.all_to_all_matmul import OPERATOR, DispatchVariants
from weft.bench.ops.moe_shape import MoeShape
from weft.bench.report import markdown
from weft.builders import AllToAllMatmul, candidates
from weft.launch import Pool

SHAPE = MoeShape(m=24, n=40, k=16, experts=6, top_k=2, skew=0.7, sources=("by hand",))
ODD = "24x10x16-e6-top2"
KERNEL = "dispatch[by=kernel,rest=each]"
DMA = "dispatch[by=dma,rest=each]"


def test_variants_that_are_named() -> None:
    for variant in ("padded", "weft-bounded", "dispatch", DMA, KERNEL + "-bounded", "all"):
        assert quick(OPERATOR.name, SHAPE.name, variants=(variant,)).variants == (variant,)


def _workload(group: dist.ProcessGroup) -> DispatchVariants:
    return DispatchVariants(OPERATOR.spec, SHAPE, cpu_ranks(group), "fp32", input_sets=2)


def _facts(group: dist.ProcessGroup) -> dict:
    """Return facts about the inputs, and the errors of the variants against the tests' own reference."""
    work, world = _workload(group), group.size()
    tokens, weights = ([torch.empty_like(t) for _ in range(world)] for t in (work.tokens[1], work.w))
    dist.all_gather(tokens, work.tokens[1], group=group)
    dist.all_gather(weights, work.w, group=group)
    splits = tuple(tuple(map(int, row)) for row in work.all_splits[1])
    y, received = expected(group.rank(), splits, tokens, torch.cat(weights))
    variants = {"serial": work.serial, "padded": work.padded}
    variants |= {name: work.weft(name, None) for name in ("weft", "weft-bounded")}
    outputs = {name: variant(1) for name, variant in variants.items()}
    return {
        "counts": torch.equal(work.counts(1), received),
        "reference": float((work.reference(1) - y).abs().max()),
        "errors": {name: float((work.rows_of(name, out, 1) - y).abs().max()) for name, out in outputs.items()},
        "rows": {name: out.shape[0] for name, out in outputs.items()},
        "came": len(y),
        "fresh": not torch.equal(work.tokens[0], work.tokens[1]) and not torch.equal(*work.all_splits),
        "load": dataclasses.asdict(work.load),
        "splits": [splits.tolist() for splits in work.all_splits],
    }


def test_inputs_variants_and_load_by_hand(pool: Pool) -> None:
    found = pool.run(_facts, ranks=2)
    splits = torch.tensor(found[0]["splits"])  # [input set, rank, expert]
    between = splits.view(2, 2, 2, 3).sum(3)
    for one in found:
        load = one["load"]
        assert one["counts"]
        assert one["fresh"]
        assert one["reference"] == 0
        assert max(one["errors"].values()) < 1e-5
        assert one["rows"] == {
            "serial": one["came"],
            "weft": one["came"],
            "weft-bounded": 128,
            "padded": 6 * load["capacity"],
        }
        assert load["max_rows"] == 128
        assert load["capacity"] == -(-int(splits.max()) // 8) * 8
        assert SHAPE.rows == 48 == int(splits[0, 0].sum())
        assert load["rank_skew"] == pytest.approx(float((between.sum(1).amax(1) / 48).mean()))
        assert load["expert_skew"] == pytest.approx(float((splits.sum(1).amax(1) / 16).mean()))
        # With two ranks, the rows that one rank sends are those that the other receives.
        busiest = torch.stack([between[:, 0, 1], between[:, 1, 0]]).amax(0).double().mean()
        assert load["busiest_bytes"] == pytest.approx(float(busiest) * 16 * 4)


def _measured(group: dist.ProcessGroup, dtype: str) -> list[dict]:
    variants = ("weft", "weft-serial", "dispatch[")
    return records_of(group, quick(OPERATOR.name, SHAPE.name, variants=variants, dtype=dtype), SHAPE)


@pytest.mark.parametrize("dtype", ["fp32", slow("bf16")])
def test_records_have_every_field_and_agree_with_each_other(pool: Pool, dtype: str) -> None:
    rows = pool.run(_measured, dtype, ranks=2)[0]
    for mode in ("single", "queued"):
        of_mode = [r for r in rows if r["mode"] == mode]
        base, padded, *_ = of_mode
        names = [r["variant"] for r in of_mode]
        assert names[:4] == ["serial", "padded", "weft", "weft-bounded"]
        assert set(names[4:]) == {"weft-serial", DMA, KERNEL, KERNEL + "-bounded"}, "DMA needs sizes on the host"
        wanted = (
            "added_us chosen sources gemm_ms gemm_each_ms exchange_ms tokens top_k experts n k skew rows max_rows capacity "
            "rank_skew expert_skew busiest_bytes"
        )
        for row in of_mode:
            assert set(row) >= FIELDS | set(wanted.split())
            assert (row["config"], row["sources"], row["baseline"]) == (
                SHAPE.name,
                ["by hand"],
                "serial",
            )
            assert row["speedup"] == row["speedup_over"]["serial"] == pytest.approx(base["p50_ms"] / row["p50_ms"])
            assert row["speedup_over"]["padded"] == pytest.approx(padded["p50_ms"] / row["p50_ms"])
            came, item = row["rank_skew"] * row["rows"], 4 if dtype == "fp32" else 2
            bytes_ = (3 * 40 * 16 + came * (40 + 16)) * item
            needs = [
                (
                    bytes_ / c["memory_gbps"] / 1e6,
                    row["busiest_bytes"] / c["link_gbps"] / 1e6,
                    2 * came * 640 / c["matmul_tflops"] / 1e9,
                )
                for c in row["ceilings"]
            ]
            assert row["roofline_ms"] == pytest.approx(max(map(max, needs)))
            added = None if mode == "queued" else pytest.approx(1e3 * (row["p50_ms"] - base["p50_ms"]))
            assert row["added_us"] == added
    known = {c.name for c in candidates(AllToAllMatmul.even(48, 40, 16, 3, 2))}
    chosen = {r["variant"]: r["chosen"] for r in rows if r["chosen"]}
    assert set(chosen) == {"weft", "weft-bounded"}
    # The text has "..., in graphs ..." if a captured call uses another schedule.
    assert {name for text in chosen.values() for name in text.split(", in graphs ")} <= known
    json.dumps(rows, allow_nan=False)
    assert f"| {SHAPE.name} |" in markdown([r | {"device": "cuda", "run": "a"} for r in rows]), (
        "as if it took a millisecond"
    )


def _with_one_wrong(group: dist.ProcessGroup, path: Path) -> str:
    """Run the benchmark with a variant that has a wrong row on one of two ranks. Also run it with rows that torch's
    grouped GEMM does not support.
    """
    options = quick(OPERATOR.name, ODD, variants=("weft", "dispatch[by=kernel"), modes=("queued",), json=path)
    is_wrong, row = (
        lambda variant, _: variant == KERNEL + "-bounded",
        lambda work, which: int(work.counts(which).sum()) - 1,
    )
    return run_with_one_wrong(group, DispatchVariants, options, is_wrong, row)


@pytest.mark.slow
def test_a_wrong_variant_is_not_timed(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(_with_one_wrong, tmp_path / "results.jsonl", ranks=2):
        assert f"{KERNEL}-bounded differs from the float64 reference" in found
        assert found.count("differs") == 1
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {r["variant"] for r in rows} == {"serial", "padded", "weft", "weft-bounded", KERNEL}
    assert {(r["config"], r["gemm_ms"]) for r in rows} == {(ODD, None)}


def _captured(group: dist.ProcessGroup) -> dict:
    work = _workload(group)
    variants = {"serial": work.serial, "padded": work.padded, "weft-bounded": work.weft("weft-bounded", None)}
    work.waiting = ["serial"]
    with mock.patch.object(measure, "Recorder", CallingRecorder):
        results = measure_variants(
            work,
            variants,
            {},
            modes=("queued", "graph"),
            seconds=0.01,
            repetitions=(3, 3),
            step=lambda what, share: None,
        )
    errors = check(variants, work).errors
    return {"timed": sorted(results.timings), "wrong": results.wrong, "not": results.not_captured, "errors": errors}


def test_what_waits_for_the_device_is_not_captured(pool: Pool) -> None:
    for found in pool.run(_captured, ranks=2):
        queued = [("queued", name) for name in ("padded", "serial", "weft-bounded")]
        assert found["timed"] == [("graph", "padded"), ("graph", "weft-bounded"), *queued]
        assert not found["wrong"]
        assert not found["not"]
        assert all(0 < error < 1e-5 for error in found["errors"].values())
