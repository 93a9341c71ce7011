"""Explanations: their contents, the machine that they are for, and refused arguments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft import plan
from weft.builders import AllGatherMatmul
from weft.builders.problem import PROBLEMS
from weft.hw import known_machines, load_machine, machine_of
from weft.plan.explain import HEADER
from weft.sim import inefficiencies, model_of

SHAPE = {"M": 8192, "N": 4096, "K": 8192}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


def explanation(**options: object) -> plan.Explanation:
    given = {**SHAPE, "ranks": 2, "hw": "h200", "dtype": "bf16", "mode": "queued", **options}
    return plan.explanation("all_gather_matmul", **given)  # type: ignore[arg-type]


def test_it_says_what_was_chosen_and_why() -> None:
    text = plan.explain("all_gather_matmul", **SHAPE, ranks=2, hw="h200")
    choice = plan.choose(AllGatherMatmul.even(8192, 4096, 8192, 2), model_of(load_machine("h200"), 2))
    assert re.search(rf"^choice +{re.escape(choice.candidate.name)}$", text, re.MULTILINE)
    assert choice.reason in text
    for words in (*HEADER, "[8192, 8192] gathered from 2 ranks @ [8192, 4096]", "NVIDIA H200; not calibrated"):
        assert words in text
    assert f"{choice.predicted_us:.1f}" in text


def test_ideal_exposed_and_heuristic_are_those_of_the_model() -> None:
    found = explanation(M=131072, ranks=8, hw="mi300x")
    facts = dict(found.facts())
    model = model_of(load_machine("mi300x"), 8)
    serial = inefficiencies(found.choice.row("serial").candidate.build(), found.choice.problem, model)
    assert f"= {max(serial.gemm_us, serial.communication_us):.1f} us" in facts["ideal"]
    assert facts["serial"] == f"{serial.exposed_us:.1f} us of communication exposed"
    pick = plan.static_pick(found.choice.problem, load_machine("mi300x"))
    assert facts["heuristic"].startswith(f"{pick}: {found.choice.row(pick).us:.1f} us, ")


def test_the_table_has_the_fastest_serial_and_the_heuristics() -> None:
    found = explanation()
    few, everything = found.cells(1), found.cells(None)
    assert {row[0] for row in few} == {found.choice.candidate.name, "serial", found.heuristic}
    assert len(everything) == sum(row.us is not None for row in found.choice.rows) > len(few)
    assert f"{len(everything) - len(few)} slower candidates are not shown" in found.left_out(1)
    assert found.left_out(None) == [
        "20 candidates of ficco_1d, ficco_2d, ficco_1d_collective: the same schedule as another",
        "8 candidates of shard: with 2 ranks there is only one peer, so send=at_once would be the same as send=in_turn: use "
        "send=in_turn",
    ]
    assert all(len(row) == len(HEADER) and row[1] for row in everything)


def test_single_mode_says_what_was_not_simulated() -> None:
    found = explanation(M=64, mode="single")
    assert any("not simulated, because even a lower bound" in line for line in found.left_out())
    assert dict(found.facts())["heuristic"].startswith("ficco_2d")


def test_autotuned_times_are_shown_and_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan.autotune.__globals__, "_known", {})
    choice = explanation().choice
    times = {"serial": 1000.0, "gather[by=dma]": 500.0}
    tuned = [row.candidate for row in choice.rows if row.candidate.name in times]
    plan.autotune(choice.problem, tuned, lambda c: times[c.name], lambda mine: mine, machine="NVIDIA H200")
    found = explanation()
    assert found.choice.candidate.name == "gather[by=dma]"
    assert {(row[0], row[2]) for row in found.cells() if row[2]} == {("serial", "1000.0"), ("gather[by=dma]", "500.0")}
    assert not any("launches ahead of the GPU" in line for line in found.legend())
    assert explanation(mode="single").choice.measured_us is None
    graph = explanation(mode="graph")  # no times of graphs are cached
    assert graph.choice.measured_us == 500.0
    assert any("launches ahead of the GPU" in line for line in graph.legend())


def test_json_has_every_candidate() -> None:
    found = explanation(M=512)
    data = json.loads(json.dumps(found.as_json()))
    assert data["choice"] == found.choice.candidate.name
    assert [row["candidate"] for row in data["candidates"]] == [row.candidate.name for row in found.choice.rows]
    assert data["candidates"][0]["losses"]["gemm_us"] > 0
    assert data["problem"]["rows"] == [256, 256]


@pytest.mark.parametrize("name", known_machines())
def test_every_machine_can_be_planned_for(name: str) -> None:
    assert load_machine(name).name in plan.explain("all_gather_matmul", M=1024, N=512, K=256, ranks=4, hw=name)


def test_a_machine_in_a_file(tmp_path: Path) -> None:
    source = Path(plan.__file__).parents[1] / "hw" / "h200.toml"
    mine = tmp_path / "mine.toml"
    mine.write_text(source.read_text().replace('name = "NVIDIA H200"', 'name = "Mine"'))
    assert "Mine; not calibrated" in plan.explain("all_gather_matmul", **SHAPE, ranks=2, hw=mine)
    text = mine.read_text()
    mine.write_text(text.replace("[copy_engine.latency]", "[copy_engine.latncy]"))
    with pytest.raises(ValueError, match=r"copy_engine\.latncy is not a known key: do you mean copy_engine\.latency\?"):
        plan.explain("all_gather_matmul", **SHAPE, ranks=2, hw=mine)
    mine.write_text(re.sub(r"\[copy_engine\.latency\]\n(.+\n)+", "", text))
    with pytest.raises(ValueError, match=r"Mine: add copy_engine\.latency to its machine file"):
        plan.explain("all_gather_matmul", **SHAPE, ranks=2, hw=mine)


def test_without_a_machine_it_is_this_one_or_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    function = plan.machine_and_model.__globals__
    monkeypatch.setitem(function, "machine_here", lambda: None)
    machine, _, notes = plan.machine_and_model(None, 2)
    assert machine.name == "NVIDIA H200"
    assert "weft has no machine file for" in notes[0]
    monkeypatch.setitem(function, "machine_here", lambda: load_machine("mi300x"))
    machine, _, notes = plan.machine_and_model(None, 2)
    assert (machine.name, len(notes)) == ("AMD Instinct MI300X", 1)
    monkeypatch.setitem(function, "machine_here", lambda: machine_of("NVIDIA RTX 9999"))
    machine, _, notes = plan.machine_and_model(None, 2)
    assert machine.name == "NVIDIA RTX 9999"
    assert "its numbers are derived" in notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hw": "h900"}, "no machine 'h900'"),
        ({"M": 1001}, "m=1001 must be divisible by world_size=2"),
        ({"dtype": "int32"}, "dtype='int32': NVIDIA H200 has matmul rates only for fp32, fp16, bf16, fp8"),
        ({"dtype": "bf8"}, "dtype='bf8': NVIDIA H200 has matmul rates only for fp32, fp16, bf16, fp8"),
        ({"M": 0}, "M=0, N=4096, K=8192: each must be at least 1"),
        ({"N": -8}, "n=-8"),
        ({"mode": "eager"}, "mode='eager' is unknown"),
    ],
)
def test_what_is_not_known_is_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        explanation(**options)


def test_only_bounded_dispatches_can_be_captured() -> None:
    with pytest.raises(
        ValueError, match=r"a CUDA graph cannot capture all_to_all_matmul .* plan it with --option bounded=true"
    ):
        plan.explain("all_to_all_matmul", **SHAPE, ranks=2, hw="h200", experts=8, mode="graph")
    assert "graph" in plan.explain(
        "all_to_all_matmul", **SHAPE, ranks=2, hw="h200", experts=8, mode="graph", bounded=True
    )


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(
        ValueError, match=("'all_reduce' is not an operator that can be planned: use one of all_gather_matmul")
    ):
        plan.explain("all_reduce", **SHAPE, ranks=2)


def test_an_fp8_operator_is_planned_by_its_own_name() -> None:
    plain, scaled = (
        plan.explain(op, **SHAPE, ranks=2, hw="h200", dtype="fp8")
        for op in ("all_gather_matmul", "all_gather_scaled_matmul")
    )
    assert plain == scaled
    with pytest.raises(ValueError, match="all_gather_scaled_matmul needs dtype fp8; use all_gather_matmul for bf16"):
        plan.explain("all_gather_scaled_matmul", **SHAPE, ranks=2, hw="h200")


def test_it_needs_no_torch() -> None:
    script = (
        "import sys, weft; text = weft.plan.explain('all_gather_matmul', M=512, N=512, K=512, ranks=2, hw='h200');"
        "assert 'choice' in text and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "scaled_matmul_reduce_scatter", "all_to_all_matmul"])
def test_a_choice_that_calls_on_gpus_do_not_take_is_not_said_to_be_taken(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROBLEMS[op], "tried_on_gpus", False)
    options = {"dtype": "fp8"} if "scaled" in op else {"experts": 8} if "all_to_all" in op else {}
    given = {"M": 8192, "N": 8192, "K": 4096, "ranks": 2, "hw": "h200", "dtype": "bf16", "mode": "queued", **options}
    found = plan.explanation(op, **given)  # type: ignore[arg-type]
    assert found.choice.candidate.name != "serial"
    said = dict(found.facts())["calls"]
    assert said.startswith("GPUs run serial for ")
    assert found.as_json()["only_asked_for"] is True
    assert {row[-1] for row in found.cells() if row[0] == found.choice.candidate.name} == {"the choice, if pinned"}
    assert said in str(found)


def test_a_choice_that_calls_take_is_said_to_be_taken() -> None:
    found = explanation()
    assert "calls" not in dict(found.facts())
    assert found.as_json()["only_asked_for"] is False
    assert {row[-1] for row in found.cells() if row[0] == found.choice.candidate.name} == {"taken"}


@pytest.mark.parametrize(
    ("op", "option", "said"),
    [
        ("all_to_all_matmul", "experts", "experts=0 must be a positive multiple of ranks=2"),
        ("matmul_reduce_scatter", "experts", "experts=0: matmul_reduce_scatter has no such option"),
        ("embedding_all_to_all", "tables", "tables=0: embedding_all_to_all needs the number of tables"),
    ],
)
def test_an_option_of_0_is_a_number(op: str, option: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan.explain(op, **SHAPE, ranks=2, hw="h200", **{option: 0})  # type: ignore[arg-type]


def test_a_faster_candidate_that_saves_too_little_is_explained_by_what_it_must_save() -> None:
    found = plan.explanation(
        "matmul_all_reduce", M=8192, N=15968, K=344, ranks=2, hw="h100", topology=None, dtype="bf16", mode="single"
    )
    choice = found.choice
    row = choice.row("tracked[chunks=2,to=dma]")
    assert row.us is not None
    assert row.us < 0.95 * choice.predicted_us
    assert row.why_not == "saves less than the required 35.0% of serial's time"
