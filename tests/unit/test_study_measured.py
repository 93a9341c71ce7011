"""Pages of measured studies from made-up records: T3's pinned schedules and layouts, power and traffic, launch overhead."""

from __future__ import annotations

from typing import Any

import pytest

from weft.bench.core.tables import Record
from weft.studies import launches, power, t3

TRACKED, MAPPED = "tracked[chunks=2,to=dma]", "direct[chunks=1,by=store,add=reduce]"


def records(variants: dict[str, float], config: str = "16384x3072x1536", **other: Any) -> list[Record]:
    m, n, k = (int(size) for size in config.removesuffix("-rowmajor").split("x"))
    common = {
        "op": t3.OP, "mode": "queued", "device": "cuda", "config": config, "run": config + other.get("dtype", ""), "ranks": 2,
        "dtype": "bf16", "machine": "2 x NVIDIA H200", "m": m, "n": n, "k": k, "gemm_ms": 3.0, "collective_ms": 2.0,
        "commit": "abc", "date": "2026-01-01T00:00:00Z", "host_us": 50.0, **other,
    }  # fmt: skip
    chosen = {"weft": "direct[chunks=2,by=dma,add=gemm]"}
    return [{**common, "variant": name, "p50_ms": ms, "chosen": chosen.get(name)} for name, ms in variants.items()]


def test_pinned_schedules_layouts_and_dtypes_of_t3() -> None:
    times = {"serial": 5.0, "weft": 4.0, TRACKED: 6.0, "tracked[chunks=1,to=dma]": 8.0, MAPPED: 2.5}
    rows = t3.rows_of([
        *records(times), *records({"serial": 5.0, "weft": 4.0}, dtype="fp16"),
        *records({"serial": 9.0, "weft": 6.0}, "16384x3072x6144-rowmajor"),
        *records({"serial": 9.0, "weft": 6.0}, "16384x3072x6144"),
    ])  # fmt: skip
    assert [(row.layer, row.problem.dtype, row.row_major) for row in rows] == [
        ("OP", "bf16", False), ("OP", "fp16", False), ("FC-1", "bf16", True), ("FC-2, FC-1", "bf16", False),
    ]  # fmt: skip
    assert (rows[0].fastest("tracked"), rows[0].fastest("direct"), rows[1].fastest("direct")) == (
        (6.0, TRACKED), (2.5, MAPPED), None,
    )  # fmt: skip
    tables = t3.tables(rows)
    assert [table.title.partition(": ")[2].partition(" (")[0] for table in tables[:3]] == [
        "bf16", "fp16", "bf16, weights not transposed, as in backward",
    ]  # fmt: skip
    line = dict(zip(tables[0].columns, tables[0].cells[0], strict=True))
    assert (line["tracked ms"], line["fastest tracked"], line["mapped ms"]) == ("6", TRACKED, "2.5")
    assert "tracked ms" not in tables[1].columns
    claims = {claim.what: (claim.ours, claim.reproduced) for claim in t3.claims(rows)}
    assert claims["speedup of tracked GEMMs in software on 2 GPUs, geometric mean"] == (
        pytest.approx(100 * (5 / 6 - 1)),
        False,
    )
    assert claims["speedup of weft's choice on 2 GPUs, geometric mean"][0] == pytest.approx(
        100 * ((5 / 4 * 9 / 6) ** 0.5 - 1)
    )
    said = (
        "Tracked GEMMs have 0.83x the speed of serial, and 0.67x the speed of weft's choice (means of the first table)."
    )
    assert said in t3.conclusions(rows)
    assert "bf16 or fp16, queued" in t3.notes(records(times) + records(times, dtype="fp16"))[0]


def counters(**other: float | None) -> Record:
    known = {"copy": 0.98, "read": 0.99, "write": None}
    rates = {
        "call_ms": 0.5,
        "watts": 600.0,
        "joules": 0.3,
        "memory_bytes": 4e8,
        "sent_bytes": 5e7,
        "received_bytes": 5e7,
    }
    return {**rates, "idle_watts": 80.0, "counted_known": known, **other}


def test_power_and_traffic_of_calls() -> None:
    found = records({"serial": 5.0, "weft": 4.0, "asynctp": 4.5})
    for r in found:
        r |= {"counters": counters(), "counters_beside": {"gemm": counters(watts=None, joules=None)}}
    rows = power.rows_of(found)
    assert [row.name for row in rows] == [
        "serial", "weft: direct[chunks=2,by=dma,add=gemm]", "asynctp", "the GEMM alone",
    ]  # fmt: skip
    (table,) = power.tables(rows)
    serial, weft, asynctp, gemm = (dict(zip(table.columns, line, strict=True)) for line in table.cells)
    assert (serial["W"], serial["J"], serial["memory, MB counted"], serial["NVLink, MB sent"]) == (
        "600",
        "0.300",
        "400",
        "50",
    )
    assert serial["memory, MB computed"] != weft["memory, MB computed"] != ""
    assert (asynctp["memory, MB computed"], gemm["memory, MB computed"], gemm["W"]) == ("", "", "")
    assert (
        "the GPU draws 80 W. Test kernels with known traffic show how much of the traffic the driver counts: 98% for a copy, "
        "99% for a read." in power.notes(found)[0]
    )
    found[0]["counters"]["missing"] = "the calls ended early"
    assert power.notes(found)[0].endswith("There are no counters for serial at 16384x3072x1536: the calls ended early.")
    for r in found:
        r["counters"] = counters(idle_watts=None, counted_known={"copy": None})  # type: ignore[arg-type]
    assert "gives no memory traffic" in power.notes(found)[0]
    with pytest.raises(ValueError, match="no record has the driver's counters: run weft bench with --counters"):
        power.rows_of(records({"serial": 5.0}))


def test_claims_on_traffic_and_power() -> None:
    """Weft's choice saves a quarter of the memory accesses, and tracked GEMMs add a half. FiCCO by engines needs 0.3 J."""
    scattered = records({"serial": 5.0, "weft": 4.0, TRACKED: 4.0})
    for r, nbytes in zip(scattered, (4e8, 3e8, 6e8), strict=True):
        r["counters"] = counters(memory_bytes=nbytes)
    ficco = "ficco_1d[start=hetero,gemms=fused,steps=0,by={}]"
    gathered = records({"serial": 5.0, ficco.format("dma"): 4.0, ficco.format("kernel"): 4.5}, op="all_gather_matmul")
    for r, joules in zip(gathered, (0.4, 0.3, 0.35), strict=True):
        r["counters"] = counters(joules=joules, watts=650.0)
        r["counters_beside"] = {"gemm": counters(watts=660.0), "communication": counters(watts=200.0)}
    found = {
        claim.what: (claim.ours, claim.reproduced) for claim in power.claims(power.rows_of([*scattered, *gathered]))
    }
    assert found == {
        "memory accesses saved by weft's choice, mean, counted by the driver": (25.0, True),
        "memory accesses saved by tracked GEMMs, mean, counted by the driver": (-50.0, False),
        "overlap with copy engines needs less energy for a call than with copying kernels": ("0.300 and 0.350 J", True),
        "concurrent execution draws more power than the GEMM or the copies alone": ("650 and 660 W", False),
    }


def test_launches_of_finer_schedules() -> None:
    names = {"serial": 1.0, "weft": 0.9, MAPPED: 0.8, "direct[chunks=4,by=dma,add=gemm]": 0.7}
    single = records({name: 2 * ms for name, ms in names.items()}, mode="single")
    graph = records(names, mode="graph")
    rows = launches.rows_of([*records(names), *single, *graph])
    assert [row.schedule for row in rows] == [
        "serial",
        MAPPED,
        "direct[chunks=4,by=dma,add=gemm]",
    ]  # by steps, without "weft"
    assert rows[0].steps == 2
    assert rows[0].steps < rows[1].steps < rows[2].steps
    (table,) = launches.tables(rows)
    line = dict(zip(table.columns, table.cells[0], strict=True))
    assert (line["CPU us"], line["single ms"], line["queued ms"], line["single / graph"]) == ("50", "2", "1", "2.00x")
    assert not launches.claims(rows)  # one shape with three schedules is too little
    more = [f"direct[chunks={chunks},by={by},add=gemm]" for chunks in (1, 2, 4) for by in ("dma", "kernel")]
    found = []
    for config, factor in (("1024x512x512", 3.0), ("8192x4096x4096", 1.1)):
        steps = {row.schedule: row.steps for row in launches.rows_of(records(dict.fromkeys(more, 1.0), config))}
        for mode, ms in (("queued", 1.0), ("single", factor), ("graph", 1.0)):
            for name, many in steps.items():
                found += records({name: ms}, config, mode=mode, host_us=10.0 * many)
    cpu, graphs = launches.claims(launches.rows_of(found))
    assert (cpu.held, cpu.ours) == (True, "rank correlation of steps and CPU time +1.00 to +1.00")
    assert (graphs.held, graphs.ours) == (True, "3.00x for 1024x512x512, 1.10x for 8192x4096x4096")
    with pytest.raises(ValueError, match="no record has a pinned schedule"):
        launches.rows_of(records({"weft": 1.0}))
