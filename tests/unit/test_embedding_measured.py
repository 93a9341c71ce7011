"""The pages of the measured studies of embeddings, from handmade records: numbers of claims, tables, and pictures."""

from pathlib import Path
from typing import Any

import pytest

from weft.bench.report import rewrite
from weft.studies import fused_embedding_measured as fused
from weft.studies import pgas_measured as pgas

COMMON = {
    "run": "1",
    "machine": "2 x GPU",
    "ranks": 2,
    "dtype": "fp32",
    "commit": "abc",
    "date": "2026-01-02T",
    "tiny": False,
    "batch": 256,
    "device": "cuda",
    "error": 0.0,
    "speedup": 1.0,
    "tables": 256,
    "dim": 256,
    "bag": 70.0,
    "ceilings": [{"memory_gbps": 3000.0}, {"memory_gbps": 2990.0}],
}


def record(study: str, figure: str, config: str, variant: str, ms: float | None, **more: Any) -> dict[str, Any]:
    of = {"study": study, "figure": figure, "config": config, "variant": variant, "p50_ms": ms, "rank_ms": [ms, ms]}
    return {**COMMON, **of, **more}


def fused_records() -> list[dict[str, Any]]:
    def one(figure: str, variant: str, ms: float | None, **more: Any) -> dict[str, Any]:
        return record(fused.STUDY, figure, "1024|256", variant, ms, **more)

    occupied = {"registers": 128, "spilled": 0, "occupancy": 0.1, "fit": 16, "programs_of_multiprocessors": [4, 4]}
    spans = [[[[0, 2, 1.5], [2, 4, 0]], [4, 8]]]
    curve = {"us": [0, 1, 2], "sent_mb": [0, 1, 1], "peak_gbps": 90.0}
    waits = {
        "wait_us": [1, 2, 9],
        "kernel_us": 100,
        "wait_share": 0.02,
        "puts": 7,
        "last_put_us": 50,
        "puts_first": 0.99,
    }
    fused_kernel = {
        "name": "embedding_all_to_all_kernel",
        "launches": 1,
        "registers": 128,
        "threads": 32,
        "occupancy": 0.25,
    }
    return [
        one("grid", "embedding_bag", 10),
        one("grid", "put", 5),
        one("grid", "per-table", 4),
        one("grid", "batched", 5),
        one("grid", "direct", 4.4),
        one("grid", "direct-natural", 4.0),
        one("grid", "pooling", 6),
        one("grid", "exchange", 3),
        one("grid", "pipelined-4", 6.25),
        one("grid", "put-natural", 6, rank_ms=[6, 5]),
        *(
            one("occupancy", f"put-programs{count}", ms, programs=count, of_usual=count / 16, **occupied)
            for count, ms in ((4, 10), (12, 6), (14, 9))
        ),
        one("slices", "put-slice4", 10),
        one("slices", "put-slice64", 4),
        one("slices", "put-slice128", 5),
        one("timeline", "put-slice16", 4, spans=spans, **curve, **waits),
        one("timeline", "direct", 4, **curve),
        one("timeline", "exchange", 1, peak_gbps=80.0),
        one(
            "kernels",
            "embedding_bag",
            None,
            kernels=[
                {
                    "name": "void at::(anonymous namespace)::EmbeddingBag_x<float>(int)",
                    "registers": 32,
                    "threads": 256,
                    "occupancy": 1.0,
                }
            ],
        ),
        one("kernels", "batched", None, kernels=[{**fused_kernel, "occupancy": 0.375, "registers": 80}]),
        one(
            "kernels",
            "put",
            None,
            kernels=[{"name": "weft", "registers": 128, "threads": 32, "occupancy": 0.25}, fused_kernel],
        ),
    ]


def pgas_records() -> list[dict[str, Any]]:
    def one(config: str, variant: str, ms: float, **more: Any) -> dict[str, Any]:
        return record(pgas.STUDY, *config.split("/"), variant, ms, **({"single_ms": ms, "sent_bytes": 1e6} | more))  # type: ignore[arg-type]

    curve = {"us": [0, 500, 1000], "sent_mb": [0, 7, 7]}
    found = []
    for scaling, times in {
        "weak/1": (4, 4, 3.8),
        "weak/2": (8, 4, 3.8),
        "strong/1": (6, 6, 6),
        "strong/2": (6, 3, 2),
    }.items():
        base, direct, batched = times
        found += [
            one(scaling, "embedding_bag-async", base),
            one(scaling, "batched", 5),
            one(scaling, "exchange", 0.05),
            one(scaling, "computation", 4),
            one(scaling, "direct", direct, **curve),
            one(scaling, "batched computation", batched),
            one(scaling, "phase", 3.5),
            one(scaling, "one float", 0.5),
        ]
    found += [
        one("batch/256", name, ms)
        for name, ms in (
            ("computation", 0.1),
            ("phase", 0.5),
            ("one float", 0.3),
            ("embedding_bag-async", 1),
            ("direct", 0.1),
            ("batched computation", 0.1),
        )
    ]
    for dim, ms in ((16, 2), (256, 1)):
        found += [one(f"width/{dim}", name, ms) for name in ("direct", "batched computation")]
    pipelines = {"direct": 3, "direct, MLP beside": 2, "baseline, MLP beside": 5}
    return found + [one("dlrm/weak", name, ms, batches=100, retrieval_ms=ms) for name, ms in pipelines.items()]


def of(claims: list[Any]) -> dict[str, Any]:
    return {claim.what: claim.ours if claim.held is None else claim.held for claim in claims}


def test_claims_of_fused_embedding() -> None:
    found = of(fused.claims(fused.rows_of(fused_records())))
    put = "two GPUs of a host, 70 rows a bag, slices of 32: time saved, mean"
    skews = "skew of two GPUs of a host, put, {} order, mean (the paper's is between nodes)"
    wanted = {
        put: 50,
        skews.format("natural"): 20,
        skews.format("remote first"): 0,
        "measured: slices of 64 instead of 4: time saved": 60,
        "measured: slices of 128 instead of 64: time saved": -25,
        "measured, put: time saved with 75% of the programs that fit on an SM, instead of 25%": 40,
        "measured, put: time added with 87.5% of the programs that fit on an SM, instead of 75%": 50,
        "measured: occupancy of the fused kernel below that of torch's EmbeddingBag, in points": 75,
        "measured: the fused kernel needs less bandwidth at its peak": False,
        "measured: programs wait for different times": True,
        "measured, 70 rows a bag: at the smallest batch, fusion saves more than perfect overlap would": True,
        "measured, 70 rows a bag: one fused kernel (put) is faster than 4 pooling kernels overlapped with NCCL (pipelined-4)": True,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_claims_of_pgas() -> None:
    found = of(pgas.claims(pgas.rows_of(pgas_records())))
    wanted = {
        "measured: weak scaling, 2 GPUs: speedup over EmbeddingBagCollection": 2,
        "measured: weak scaling factor of the baseline, 2 GPUs": 0.5,
        "measured: weak scaling of PGAS is close to ideal": True,
        "measured: strong scaling, 2 GPUs: speedup over EmbeddingBagCollection": 2,
        "measured: strong scaling of the baseline, 2 GPUs: its time over one GPU's": 1.5,
        "measured: strong scaling of PGAS, 2 GPUs: speedup over one GPU": 2,
        "measured: communication takes less time than computation, weak, 2 GPUs": True,
        "measured: PGAS takes only slightly longer than its computation, strong, 2 GPUs": False,
        "measured: bytes leave a GPU during the whole kernel, weak, 2 GPUs": False,
        "measured: synchronisation dominates small batches": True,
        "measured: running the dense MLP concurrently with the lookup saves time, weak": True,
        "measured: PGAS uses the links more evenly than the baseline, weak, 2 GPUs": True,
        "measured: inference over 100 batches, weak scaling, 2 GPUs: speedup of the lookup": 2.5,
        "measured: small messages reach a lower rate on the links": True,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_the_gain_of_fusion_is_told_apart_from_the_gain_of_one_kernel() -> None:
    said = " ".join(fused.conclusions(fused.rows_of(fused_records())))
    assert "(`batched`) are 2.00 to 2.00 times as fast as the baseline. `direct` is 1.14 to 1.14 times" in said
    assert "`per-table`) takes less time than `direct` in 1 of 1 configurations, by at most 9%" in said
    assert "remote first changes the time of `direct` by +10.0% to +10.0%" in said
    said = " ".join(pgas.conclusions(pgas.rows_of(pgas_records())))
    assert "In weak scaling on one GPU, which sends nothing, `direct` is 1.00 times as fast" in said
    assert "(`batched`) are 1.20 times as fast as the baseline, and `direct` is 1.67 times" in said
    assert "pooling alone takes 2.0 times as long" in said


def test_rates_of_rows_are_bytes_over_time() -> None:
    rates = next(table for table in fused.tables(fused.rows_of(fused_records())) if table.title.startswith("Rows read"))
    assert "Copies in memory reach 2990 GB/s" in rates.title
    # 256 samples, 70 rows of 1 KiB: 18.35 MB a table; 256 tables in 4.4 ms and 4 ms
    assert rates.cells == [("1024|256", "18", "17.2", "15.6", "1068", "1174")]


def test_kernels_have_short_names_and_one_row_each() -> None:
    rows = fused.rows_of(fused_records())
    kernels = next(table for table in fused.tables(rows) if table.title.startswith("Kernels of a call"))
    names = [(cells[0], cells[1]) for cells in kernels.cells]
    mine = "embedding_all_to_all_kernel"
    assert names == [("embedding_bag", "EmbeddingBag_x"), ("batched", mine), ("put", mine)]
    said = " ".join(fused.conclusions(rows))
    assert (
        "is 25.0% with puts, and 37.5% if it only pools (`batched`). So communication lowers it by 12.5 points" in said
    )


def test_the_note_gives_each_commit_with_its_figures() -> None:
    records = fused_records()
    (note,) = fused.notes(records)
    assert "after a barrier; commit abc, 2026-01-02." in note
    later = {**records[-1], "commit": "def", "date": "2026-01-03T", "run": "2"}
    (note,) = fused.notes([*records, later])
    assert "commit abc, 2026-01-02 (grid, occupancy, slices, timeline); commit def, 2026-01-03 (kernels)." in note


def test_a_smaller_gain_than_a_percent_is_none() -> None:
    records = pgas_records()
    for record_ in records:
        if record_["variant"] == "direct, MLP beside":
            record_["p50_ms"] = 2.98
    claims = of(pgas.claims(pgas.rows_of(records)))
    assert claims["measured: running the dense MLP concurrently with the lookup saves time, weak"] is False


@pytest.mark.parametrize(
    ("study", "records"), [(fused, fused_records()), (pgas, pgas_records())], ids=["fused", "pgas"]
)
def test_a_page_has_tables_and_pictures(study: Any, records: list[dict[str, Any]], tmp_path: Path) -> None:
    name = study.__name__.rpartition(".")[2]
    page = rewrite(f"<!-- study:{name} x -->\n<!-- /study -->\n", {"x": records})
    rows = study.rows_of(records)
    assert all(table.title in page for table in study.tables(rows))
    assert "Measured on 2 x GPU" in page
    drawn = study.draw(tmp_path / "pictures", rows, "title")
    assert drawn
    assert all(path.stat().st_size > 5000 for path in drawn)
    with pytest.raises(ValueError, match="no measured records"):
        study.rows_of([])
