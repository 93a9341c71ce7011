"""The choice of schedules for tokens and experts: sizes that the CPU reads, and graphs."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from weft import plan
from weft.builders import AllToAllMatmul, candidates
from weft.hw import load_machine
from weft.plan.choose import ALIKE, decide
from weft.sim import model_of

H200 = model_of(load_machine("h200"), 2)
MIXTRAL = AllToAllMatmul.even(8192, 14336, 4096, 4, 2)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("weft.plan.choose"), "_choices", {})
    monkeypatch.setenv("WEFT_QUIET", "1")


@pytest.mark.parametrize("mode", plan.MODES)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "bounded"])
def test_every_schedule_for_experts_has_a_time_or_a_reason(exact: bool, mode: plan.Mode) -> None:
    problem = replace(MIXTRAL, exact=exact)
    choice = plan.choose(problem, H200, mode=mode)
    assert {row.candidate.name for row in choice.rows} == {candidate.name for candidate in candidates(problem)}
    assert choice.row("serial").us is not None
    for row in choice.rows:
        assert (row.why_not == "") == (row.candidate is choice.candidate)
        assert (row.losses is not None) == (row.us is not None)
        assert row.gemms > 0 if row.us is not None else row.why_not
        if row.losses is not None:
            least = H200.library_grouped[0] / H200.grouped_efficiency  # torch's kernel for experts is slower
            assert row.losses.gemm_decomposition >= min(1, least) - 1e-9
            assert row.us >= row.losses.ideal_us - H200.launch_us or mode == "single"


def test_a_graph_takes_what_the_host_reads_nothing_for_even_if_serial_is_faster() -> None:
    problem = replace(MIXTRAL, exact=False)
    slow_puts = replace(H200, put_bytes_per_us=((16, 1e3),))
    assert plan.choose(problem, slow_puts).candidate.name == "serial"
    choice = plan.choose(problem, slow_puts, mode="graph")
    assert "by=kernel" in choice.candidate.name
    assert choice.predicted_us > 2 * choice.row("serial").us
    assert choice.reason.endswith("cannot be captured, because the CPU reads sizes")
    assert choice.row("serial").why_not == "cannot be captured, because the CPU reads sizes"


def test_where_the_host_reads_in_any_case_no_graph_can_be_had() -> None:
    queued, graph = plan.choose(MIXTRAL, H200), plan.choose(MIXTRAL, H200, mode="graph")
    assert all(row.reads_on_host for row in graph.rows if row.us is not None)
    assert graph.predicted_us == graph.row(graph.candidate.name).us
    assert "it cannot be captured in a graph" in graph.reason
    assert "graph" not in queued.reason


def test_measured_times_of_a_graph_are_those_of_what_can_be_captured() -> None:
    problem, fast = replace(MIXTRAL, exact=False), "dispatch[by=kernel,rest=each]"
    measured = {"serial": 100.0, fast: 300.0, "dispatch_by_expert[by=kernel,chunks=1]": 290.0}
    choice = plan.choose(problem, H200, mode="graph", measured=measured)
    assert choice.candidate.name == "dispatch_by_expert[by=kernel,chunks=1]"


def test_where_the_host_reads_sizes_issuing_a_call_bounds_it() -> None:
    """If the result has exactly the arriving rows, the CPU is never far ahead of the GPU. So the time to issue a call
    is a lower bound.
    """
    p = AllToAllMatmul.even(8192, 1536, 2048, 64, 2)
    free = decide(p, replace(H200, host_late_us=0.0, host_dynamic_us=0.0), mode="queued")
    usual = decide(p, H200, mode="queued")
    name = "dispatch_by_expert[by=kernel,chunks=8]"
    assert usual.row(name).us == pytest.approx(H200.host_dynamic_us + 16 * H200.host_late_us)
    assert (free.row(name).us or 1e9) < 16 * H200.host_late_us
    assert usual.candidate.name != free.candidate.name != "serial"
    told = decide(replace(p, exact=False), replace(H200, host_dynamic_us=0.0, host_late_us=0.0), mode="queued")
    assert told.candidate.name == free.candidate.name


def test_steps_whose_sizes_only_the_run_knows_keep_the_host_busy() -> None:
    """Dynamic steps take CPU time. In a loop of calls, it must not make a schedule slower than serial.

    So the planner uses fewer dynamic steps than are optimal for the GPU.
    """
    p = replace(AllToAllMatmul.even(16384, 1024, 4096, 64, 2), exact=False)
    slow_host = replace(H200, host_late_us=8 * H200.host_late_us)
    found = decide(p, slow_host, mode="queued")
    fastest = next(row for row in found.rows if row.us is not None)
    serial = found.row("serial")
    assert fastest.host_us > max(serial.us or 0.0, serial.host_us)
    assert found.candidate.name != fastest.candidate.name
    assert found.row(found.candidate.name).host_us <= max(serial.us or 0.0, serial.host_us)
    graph = decide(p, slow_host, mode="graph")  # replays take no CPU time
    assert graph.row(graph.candidate.name).us == pytest.approx(graph.row(fastest.candidate.name).us, rel=ALIKE)


def test_no_tokens_are_serial() -> None:
    assert plan.choose(AllToAllMatmul.even(0, 8, 8, 2, 2), H200).candidate.name == "serial"


def test_few_tokens_are_sorted_before_a_long_gemm() -> None:
    """Sorted tokens of all ranks share tiles of 16 rows, which leave more room for weights in flight."""
    p = replace(AllToAllMatmul.even(14, 12032, 26624, 4, 2), exact=False)
    assert decide(p, model_of(load_machine("h100"), 2), mode="graph").candidate.name == "dispatch_sorted[chunks=1]"
