"""The benchmark of all_gather_matmul: its names, counts, refusals and records, and graphs with a recorder that needs no
GPU. Also a short test of the benchmark of matmul_reduce_scatter.

Cheapest first: names and numbers without processes, then two ranks.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import run_with_one_wrong
from support.bench import FIELDS, cpu_ranks, quick, records_of
from support.pretended_hosts import on_two_hosts
from support.slow import slow

import weft
from weft import symm
from weft.bench.__main__ import options_of
from weft.bench.core import measure
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Ranks
from weft.bench.core.measure import check, measure_variants
from weft.bench.core.operators import measured, operator
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.bench.ops.all_gather_matmul import OPERATOR, GatherVariants
from weft.bench.ops.gemms import GemmShape, cannot, roundings
from weft.bench.ops.matmul_reduce_scatter import OPERATOR as scattering
from weft.bench.ops.matmul_reduce_scatter import ScatterVariants
from weft.builders import AllGatherMatmul, AllToAllMatmul, NotApplicableError, candidates, described, named
from weft.builders.problem import PROBLEMS, SCALED
from weft.hw import load_machine
from weft.launch import Pool
from weft.operator import this_machine
from weft.plan import choose
from weft.sim import model_of

SHAPE = GemmShape(24, 10, 16, ("by hand",))
PUT = "shard[chunks=1,send=in_turn,by=dma]"
UNCUT = "shard[chunks=500,send=in_turn,by=dma]"
ONE_PEER = "shard[chunks=1,send=at_once,by=dma]"
TWO_D = "ficco_2d[start=uniform,gemms=fused,steps=4,by=dma]"


def test_every_operator_that_users_call_is_measured() -> None:
    called = {name for name in weft.__all__ if name in PROBLEMS}
    assert {"matmul_all_gather", "embedding_all_to_all"} < called < set(measured())
    for name in measured():
        assert operator(name).name == SCALED.get(name, name)


def _typed(variants: str) -> tuple[str, ...]:
    given = ["--preset", "24x10x16", "--ranks", "2", "--device", "cpu", "--quick", "--variants", variants]
    return options_of([OPERATOR.name, *given]).variants


def test_a_comma_inside_a_schedules_name_belongs_to_it() -> None:
    assert _typed(f"weft, {PUT},gather") == ("weft", PUT, "gather")
    assert _typed("shard[chunks=2,send=in_turn,weft") == ("shard[chunks=2,send=in_turn", "weft")


def test_a_variant_that_cannot_do_a_shape_is_a_note_of_that_shape() -> None:
    options = quick(OPERATOR.name, "24x10x16,1024x10x16", variants=(UNCUT, PUT))
    problems = [described("all_gather_matmul", m=m, n=10, k=16, ranks=2, dtype="fp32") for m in (24, 1024)]
    few, many = (cannot(options.variants, [(p, "")]) for p in problems)
    assert len(few) == 1
    assert few[0].startswith(f"not measured, {UNCUT}: ")
    assert "500" in few[0]
    assert many == []


def test_a_2d_schedule_rounds_at_every_step() -> None:
    steps_of_2d = set()
    for p in (AllGatherMatmul.even(24, 10, 16, 3), AllToAllMatmul.even(24, 10, 16, 6, 3)):
        for candidate in candidates(p):
            with contextlib.suppress(NotApplicableError):
                schedule, steps = candidate.build(), dict(candidate.parameters).get("steps") or 3
                assert roundings(schedule) == (steps if "2d" in candidate.name else 1), candidate.name
                steps_of_2d |= {(p.name, steps)} if "2d" in candidate.name else set()
    assert steps_of_2d == {*((AllGatherMatmul.name, steps) for steps in (2, 3, 4)), (AllToAllMatmul.name, 3)}


def _workload(group: dist.ProcessGroup) -> GatherVariants:
    return GatherVariants(OPERATOR.spec, SHAPE, cpu_ranks(group), "fp32", input_sets=2)


def _facts(group: dist.ProcessGroup) -> dict:
    work = _workload(group)
    p = AllGatherMatmul.even(24, 10, 16, 3)
    work.schedules["2d"] = named(p, TWO_D).build()  # this schedule rounds four times
    errors = {"serial": 1e-6}
    gathered = [torch.empty(12, 16) for _ in range(2)]
    dist.all_gather(gathered, work.x_shards[1], group=group)
    return {
        "strides": work.w.stride(),
        "whole": torch.equal(torch.cat(gathered), work.whole(1)),
        "fresh": not torch.equal(work.x_shards[0], work.x_shards[1]),
        "reference": float((work.reference(1) - torch.cat(gathered).double() @ work.w.double()).abs().max()),
        "limits": [work.limit(name, errors) for name in ("put", "2d")],
        "rooflines": [
            work.roofline_ms([Ceilings(memory, link, flops)] * 2)
            for memory, link, flops in ((1e6, 1e12, 1e12), (1e12, 1e6, 1e12), (1e12, 1e12, 1e6))
        ],
    }


def test_inputs_limits_and_rooflines_by_hand(pool: Pool) -> None:
    for found in pool.run(_facts, ranks=2):
        assert found["strides"] == (1, 16), "as nn.Linear has it, transposed"
        assert found["whole"]
        assert found["fresh"]
        assert found["reference"] == 0
        assert found["limits"] == pytest.approx([2e-6, 8e-6])
        memory, wire, flops = (24 * 16 + 16 * 10 + 24 * 10) * 4, 12 * 16 * 4, 2 * 24 * 10 * 16
        assert found["rooflines"] == pytest.approx([1e3 * count / 1e6 for count in (memory, wire, flops)])


def _measured(group: dist.ProcessGroup, dtype: str) -> list[dict]:
    variants = ("weft", "weft-serial", "shard", TWO_D)
    return records_of(group, quick(OPERATOR.name, SHAPE.name, variants=variants, dtype=dtype), SHAPE)


@pytest.mark.parametrize("dtype", ["fp32", slow("bf16")])
def test_records_have_every_field_and_agree_with_each_other(pool: Pool, dtype: str) -> None:
    rows = pool.run(_measured, dtype, ranks=2)[0]
    singles, queued = ([r for r in rows if r["mode"] == mode] for mode in ("single", "queued"))
    assert [r["variant"] for r in singles] == [r["variant"] for r in queued]
    names = [r["variant"] for r in queued]
    assert names[:2] == ["serial", "weft"]
    assert {PUT, TWO_D, "weft-serial"} <= set(names)
    assert not [name for name in names if name.startswith(("gather", "ficco_1d"))]
    wanted = "ideal_ms ideal_ratio gemm_ms communication_ms collective_ms added_us chosen predicted_ms predicted_blind_ms m n k "
    for of_mode in (singles, queued):
        base = of_mode[0]
        for row in of_mode:
            assert set(row) >= FIELDS | {"sources", *wanted.split()}
            assert (row["config"], row["sources"], row["ranks"]) == ("24x10x16", ["by hand"], 2)
            assert row["speedup"] == pytest.approx(base["p50_ms"] / row["p50_ms"])
            assert row["ideal_ms"] == max(row["gemm_ms"], row["communication_ms"])
            assert row["ideal_ratio"] == pytest.approx(row["p50_ms"] / row["ideal_ms"])
            assert row["ceilings"][0]["matmul_tflops"] > 0
            added = None if row["mode"] == "queued" else pytest.approx(1e3 * (row["p50_ms"] - base["p50_ms"]))
            assert row["added_us"] == added
    json.dumps(rows, allow_nan=False)


def _between_hosts(group: dist.ProcessGroup, op: str) -> list[dict]:
    with on_two_hosts(group) as own:
        return records_of(own, quick(op, "64x64x64", variants=("weft",)))


@pytest.mark.parametrize("op", ["all_gather_matmul", slow("matmul_reduce_scatter"), slow("matmul_all_reduce")])
def test_presets_run_on_several_hosts_without_copies_to_peers(pool: Pool, op: str) -> None:
    rows = pool.run(_between_hosts, op, ranks=4, timeout_s=120)[0]
    assert {row["variant"] for row in rows} == {"serial", "weft"}
    for row in rows:
        assert row["ideal_ms"] is None
        assert row.get("communication_ms") is None
        assert row["ceilings"][0]["link_gbps"] is None
        assert row["collective_ms"] > 0
        assert row["speedup"] > 0


def _scaled(group: dist.ProcessGroup) -> list[dict]:
    return records_of(group, quick(OPERATOR.name, "24x16x32", variants=("weft", PUT), dtype="fp8"))


def _ruled(group: dist.ProcessGroup, preset: str) -> list[dict]:
    variants = ("autotune", "heuristic")
    return records_of(group, quick(OPERATOR.name, preset, variants=variants, modes=("queued",)))


@pytest.mark.parametrize(("preset", "cut"), [slow("24x10x16", "1d"), ("24x10x32", "2d")])
def test_the_heuristic_and_autotuning_run_under_their_names(pool: Pool, preset: str, cut: str) -> None:
    by_variant = {r["variant"]: r for r in pool.run(_ruled, preset, ranks=2)[0]}
    assert set(by_variant) == {"serial", "autotune", "heuristic"}
    assert by_variant["heuristic"]["chosen"] == f"ficco_{cut}[start=uniform,gemms=fused,steps=0,by=dma]"
    assert by_variant["autotune"]["chosen"] is not None


@pytest.mark.slow
def test_fp8_is_the_scaled_operator(pool: Pool) -> None:
    rows = pool.run(_scaled, ranks=2)[0]
    assert {(r["variant"], r["dtype"]) for r in rows} == {(name, "fp8") for name in ("serial", "weft", PUT)}
    assert all(0 < row["error"] < 0.01 for row in rows)


def _scattered(group: dist.ProcessGroup) -> tuple[tuple[float, float, float], list[dict]]:
    options = quick(scattering.name, SHAPE.name, variants=("weft", "scatter"))
    return ScatterVariants(scattering.spec, SHAPE, cpu_ranks(group), "fp32").moved(), records_of(group, options)


def test_a_gemm_before_a_reduce_scatter_has_its_own_bytes_and_baseline(pool: Pool) -> None:
    moved, rows = pool.run(_scattered, ranks=2)[0]
    # x and w and this rank's 12 rows of y; the peer's 12 rows; all rows
    assert moved == (4 * (24 * 16 + 16 * 10 + 12 * 10), 4 * 12 * 10, 2 * 24 * 10 * 16)
    assert {r["variant"] for r in rows} == {"serial", "weft", "scatter"}
    assert all(r["collective_ms"] > 0 and r["ideal_ms"] == max(r["gemm_ms"], r["communication_ms"]) for r in rows)


def _planned(group: dist.ProcessGroup) -> list[dict]:
    """Measure as on a machine with a model."""
    symm.communicator(group, "cpu").close()  # this also drops choices of other tests for this shape
    model = model_of(load_machine("h200"), group.size())
    try:
        with mock.patch.object(this_machine, "machine_model", return_value=model):
            return _measured(group, "fp32")
    finally:
        symm.communicator(group, "cpu").close()  # this also drops the choice


@pytest.mark.slow
def test_records_say_what_was_chosen_and_predicted(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_QUIET", "1")
    rows = [r for r in pool.run(_planned, ranks=2)[0] if r["mode"] == "queued"]
    choice = choose(AllGatherMatmul.even(24, 10, 16, 2, "fp32"), model_of(load_machine("h200"), 2))
    by_variant = {r["variant"]: r for r in rows}
    assert by_variant["weft"]["chosen"] == choice.candidate.name
    assert by_variant["weft"]["predicted_ms"] == pytest.approx(choice.predicted_us / 1e3)
    for name in ("serial", "weft-serial"):
        assert by_variant[name]["predicted_ms"] == pytest.approx(choice.row("serial").predicted_us / 1e3)
    assert by_variant[PUT]["predicted_ms"] == pytest.approx(choice.row(PUT).predicted_us / 1e3)
    assert by_variant[PUT]["predicted_blind_ms"] == by_variant[PUT]["predicted_ms"], "no GEMM was timed here"
    assert by_variant["serial"]["chosen"] is by_variant[PUT]["chosen"] is None


def _with_one_wrong(group: dist.ProcessGroup, path: Path) -> str:
    """Run two shapes with a pinned schedule that is wrong on one of two ranks."""
    options = quick(OPERATOR.name, "24x10x16,8x4x8", variants=("weft", "shard[chunks=1"), modes=("queued",), json=path)
    return run_with_one_wrong(group, GatherVariants, options, lambda _, schedule: schedule == PUT, lambda *_: -1)


def test_a_wrong_variant_is_not_timed_and_the_run_goes_on(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(_with_one_wrong, tmp_path / "results.jsonl", ranks=2):
        for shape in ("24x10x16", "8x4x8"):
            assert f"{shape}: {PUT} differs from the float64 reference" in found
        assert found.count("differs") == 2
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {r["config"] for r in rows} == {"24x10x16", "8x4x8"}
    assert {r["variant"] for r in rows} >= {"serial", "weft", "shard[chunks=1,send=in_turn,by=kernel]"}
    assert PUT not in {r["variant"] for r in rows}


def _too_large(group: dist.ProcessGroup, op: str, preset: str) -> str:
    try:
        run_rank(group.rank(), group.size(), BenchOptions(op, preset=preset, quick=True))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("op", "preset"),
    [slow("all_gather_matmul", "1000000000000x8x8"), ("all_to_all_matmul", "100000000000x8x8-e2-top1")],
)
def test_a_shape_for_which_there_is_no_memory_is_refused(pool: Pool, op: str, preset: str) -> None:
    for found in pool.run(_too_large, op, preset, ranks=2):
        assert f"{preset} needs " in found
        assert "GB are free: name a smaller shape" in found


class _Graph:
    """A replacement for a CUDA graph: it makes the same call again, into the same memory. late: True to omit a part of
    it.
    """

    def __init__(self, call, which: int, late: bool) -> None:
        self.call, self.which, self.late, self.output = call, which, late, call(which)

    def replay(self) -> None:
        found = self.call(self.which)
        if isinstance(self.output, torch.Tensor):
            self.output[: -1 if self.late else None] = found[: -1 if self.late else None]


class _Recorder:
    """A recorder that captures all variants except `refuses`."""

    def __init__(self, ranks: Ranks) -> None: ...

    def capture(self, call, which: int):
        kind = getattr(call, "kind", "")
        if kind == "refuses":
            return "RuntimeError: not while capturing"
        graph = _Graph(call, which, kind == "late")
        return graph, graph.output


class _Serial:
    def __init__(self, work: GatherVariants, kind: str) -> None:
        self.serial, self.kind = work.serial, kind

    def __call__(self, which: int) -> torch.Tensor:
        return self.serial(which)


def _captured(group: dist.ProcessGroup) -> dict:
    work = _workload(group)
    work.others(())
    variants = {name: _Serial(work, name) for name in ("serial", "refuses", "late")}
    eager = check(variants, work)
    wrong = dict(eager.wrong)
    found = check(variants, work, _Recorder(work.ranks), eager)  # type: ignore[arg-type]
    with mock.patch.object(measure, "Recorder", _Recorder):
        results = measure_variants(
            work, variants, {"beside": work.gather}, modes=("queued", "graph"), seconds=0.01, repetitions=(3, 3),
            step=lambda what, share: None,
        )  # fmt: skip
    checked = found.errors, found.not_captured, sorted(found.graphs)
    return {"eager": wrong, "checked": checked, "results": results}


def test_a_captured_call_is_checked_and_one_that_cannot_be_is_named(pool: Pool) -> None:
    first, second = pool.run(_captured, ranks=2)
    assert first == second
    assert not first["eager"]
    errors, not_captured, graphs = first["checked"]
    assert errors["serial"] < 1e-5
    assert errors["late"] == math.inf, "a row that a replay leaves poisoned"
    assert not_captured == {"refuses": "RuntimeError: not while capturing"}
    assert graphs == ["serial"]
    results = first["results"]
    assert {name for mode, name in results.timings if mode == "graph"} == {"serial", "beside"}
    assert {name for mode, name in results.timings if mode == "queued"} == {"serial", "refuses", "late", "beside"}
    assert results.not_captured == not_captured
    assert len(results.wrong) == 1
    assert "late as a graph differs" in results.wrong["late"]


@pytest.mark.slow
def test_bench_prints_a_table_and_a_summary(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [
        sys.executable,
        "-m",
        "weft.cli",
        "bench",
        OPERATOR.name,
        "--device",
        "cpu",
        "--quick",
        "--seconds",
        "0.01",
    ]
    command += ["--preset", "24x10x16,8x4x8", "--variants", f"weft,{PUT}", "--json", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["config"], r["mode"], r["variant"]) for r in rows] == [
        (config, mode, variant)
        for config in ("24x10x16", "8x4x8")
        for mode in ("single", "queued")
        for variant in ("serial", "weft", PUT)
    ]
    assert PUT in found.stdout
    for line in ("gemm", "communication", "collective", "2 shapes"):
        assert line in found.stdout
