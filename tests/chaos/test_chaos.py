"""Test the chaos tests: a short campaign with every kind of fault (about half a minute), the draws, and the judgements.

Records of long campaigns are in benchmarks/chaos (docs/failures.md).
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import across_ranks

import weft
import weft.ops
from weft.operator import calls

from . import bad, report
from . import record as records
from .combine import MatmulAllToAll
from .draw import KINDS, MODULES, STEPS, TURN, Injection, applies, draw, kinds_of
from .jobs import compare
from .operators import ON_DEMAND, OPERATORS, TRAINING
from .training_reference import DENSE, RULES, SPARSE
from .training_tables import CutTables
from .trial import Seen
from .verdict import judge, outcome

ROOT = Path(__file__).parents[2]
HAS_TORCHREC = importlib.util.find_spec("torchrec") is not None and importlib.util.find_spec("fbgemm_gpu") is not None
SHORT = len(KINDS)
MANY = 4 * len(KINDS) * len(OPERATORS)


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "count"), [(1, SHORT), (2, SHORT // 3)])
def test_a_short_campaign(tmp_path: Path, hosts: int, count: int) -> None:
    """Run a short campaign like `make chaos`, on one host and on two pretended hosts. If it fails, show what was wrong."""
    path = tmp_path / "short.jsonl"
    options = ["-n", str(count), "--seed", "11", "--hosts", str(hosts), "--record", str(path)]
    command = [sys.executable, "-m", "tests.chaos", *options]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    wrong = "\n\n".join(path.read_text()[:2000] for path in sorted(tmp_path.glob("wrong-*/*/wrong.txt")))
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr[-3000:]}\n{wrong}"
    _, recorded = records.read(path)
    assert [one["index"] for one in recorded] == list(range(count))
    assert sum(one["right"] for one in recorded) > 10 * count


@pytest.mark.slow
def test_short_series() -> None:
    """Run two series of random calls like `make chaos`."""
    command = [sys.executable, "-m", "tests.chaos.series", "-n", "2", "--seed", "11"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr[-3000:]}"


# --- what is drawn ---


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_short_campaign_has_every_kind_and_every_operator(device: str) -> None:
    kinds = {name for name, kind in KINDS.items() if device in kind.devices}
    drawn = [draw(7, index, device) for index in range(max(len(kinds), len(OPERATORS)))]
    assert {one.kind for one in drawn} == kinds
    wanted = {name for name, work in OPERATORS.items() if device in work.devices and name not in ON_DEMAND}
    assert {one.operator for one in drawn} == wanted


def test_every_operator_is_drawn_and_can_be_called() -> None:
    for file in pkgutil.iter_modules(weft.ops.__path__):
        importlib.import_module(f"weft.ops.{file.name}")
    ours = calls.OPERATORS.keys() & set(weft.__all__)  # the other operators are parts of these, such as their backward
    assert {"all_gather_matmul", "matmul_all_to_all"} < ours
    assert ours - OPERATORS.keys() == set(), "without an entry in tests/chaos/operators.py"
    followed = [one for one in map(partial(draw, 1), range(MANY)) if one.options.get("norm")]
    assert {(one.backward, one.options["bias"]) for one in followed} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    backward = {one.operator for one in map(partial(draw, 1), range(MANY)) if one.backward}
    assert backward == {name for name in ours if calls.OPERATORS[name].gradients_of} | set(TRAINING) - set(ON_DEMAND)


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_can_be_called_in_each_bad_way(operator: str) -> None:
    of = OPERATORS[operator]
    assert not inspect.isabstract(of), f"it does not say all that Work asks for: {sorted(of.__abstractmethods__)}"
    options = of.drawn(random.Random(0), "cpu")
    for kind in bad.FORMED:
        names = [name for name, _ in bad.forms(kind, of, options)]
        assert len(names) == len(set(names)) > 1, kind


class Pair:
    """The part of a process group that `Work` uses, for rank 0 of 2."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def described(operator: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return {parameter: argument} of a call, with shape and dtype in place of tensors."""
    work = OPERATORS[operator](Pair(), torch.device("cpu"), 0, 0, TURN, options)  # type: ignore[arg-type]
    work.make()
    given = {
        name: value for name, value in options.items() if name in across_ranks.declared_by(operator)
    } | work.inputs(0)
    return {name: layout(value) for name, value in given.items()}


def layout(value: Any) -> Any:
    if isinstance(value, list):
        return [layout(one) for one in value]
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("operator", sorted(OPERATORS.keys() - set(MODULES)))
def test_ranks_differ_in_every_parameter_that_they_compare(operator: str) -> None:
    differ = set()
    for index in range(MANY):
        one = draw(1, index, families=("other option", "another call"))
        if one.operator == operator and one.second is not None and one.second[0] == operator:
            before, after = (described(operator, options) for options in (one.options, one.second[1]))
            differ |= {name for name in before | after if before.get(name) != after.get(name)}
    assert across_ranks.compared_by(operator) - differ == set()


def test_a_second_operator_always_uses_the_group() -> None:
    """A rank that calls an operator without communication in place of another call only skips a call."""
    seconds = [one.second for index in range(MANY) if (one := draw(1, index, families=("another call",))).second]
    assert {options["placement"] for _, options in seconds if "placement" in options} >= {"rows", "columns"}
    assert not [options for _, options in seconds if options.get("placement") == "replicated"]


@pytest.mark.parametrize("form", range(len(MatmulAllToAll.other_tables())))
def test_other_tables_come_with_their_rows(form: int) -> None:
    work = MatmulAllToAll(Pair(), torch.device("cpu"), 0, 1, TURN, {"rows": True, "deadline_s": 1.0})  # type: ignore[arg-type]
    before = work.inputs(0)
    after = MatmulAllToAll.other_tables()[form](before)
    differ = [name for name in ("received", "splits") if not torch.equal(before[name], after[name])]
    assert len(differ) == 1
    assert (len(after["h"]), after["rows"]) == (int(after["received"].sum()), int(after["splits"].sum()))
    assert all(int(after[name].min()) >= 0 for name in ("received", "splits"))


def test_a_campaign_may_be_of_some_families() -> None:
    families = ("other option", "other tables")
    drawn = [draw(1, index, "cpu", families) for index in range(40)]
    assert {one.kind for one in drawn} == {name for name, kind in KINDS.items() if kind.family in families}


def test_many_have_nearly_every_kind_on_every_operator_in_every_phase() -> None:
    drawn = [draw(1, index) for index in range(MANY)]
    possible = sum(applies(kind, name) for kind in KINDS for name in OPERATORS if name not in ON_DEMAND)
    assert len({(one.kind, one.operator) for one in drawn}) > 0.9 * possible
    assert {(one.kind, one.phase) for one in drawn} >= {
        (name, phase) for name, kind in KINDS.items() for phase in kind.phases if phase != "backward"
    }
    assert {one.world for one in drawn} == {2, 3, 4}
    assert {one.options.get("backward") for one in drawn} == {True, False, None}


def test_a_campaign_may_be_of_some_operators() -> None:
    drawn = [draw(1, index, "cpu", (), TRAINING) for index in range(MANY)]
    assert {one.operator for one in drawn} == set(TRAINING)
    assert {one.kind for one in drawn} == set(kinds_of("cpu", (), TRAINING)) < set(KINDS)
    training = [one.options for one in drawn]
    assert {one["optimizer"] for one in training} == {None, *RULES}
    assert {one["prefetch"] for one in training} == {None, "now", "ahead", "loop"}
    assert {one.get("torchs") for one in training if not one["optimizer"]} == {None, *DENSE, *SPARSE}
    assert {one.get("dtype") for one in training} == {None, "float16", "bfloat16"}
    assert {one.get("nonfinite", "propagate") for one in training} == {"propagate", "skip", "raise"}
    assert {one.get("gradient_dtype") for one in training} == {None, "fp16", "bf16"}
    clips_all = [
        one for one in training if one["batches"] == 2 and one.get("clip_norm") and one["nonfinite"] != "propagate"
    ]
    assert {one["nonfinite"] for one in clips_all} == {"skip", "raise"}
    assert {one.get("placement") for one in training} == {None, "whole", *CutTables.PLACEMENTS}
    assert not any(one["batches"] == 2 and one["prefetch"] in ("ahead", "loop") for one in training)
    assert all(one["optimizer"] and one["nonfinite"] == "raise" for one in training_of(drawn, "infinite gradient"))


def training_of(drawn: list[Injection], kind: str) -> list[dict[str, Any]]:
    found = [one.options for one in drawn if one.kind == kind]
    assert found
    return found


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("operator", [name for name in TRAINING if name not in ON_DEMAND or HAS_TORCHREC])
def test_other_tables_than_computed_are_recognised(operator: str, alone: dist.ProcessGroup, tmp_path: Path) -> None:
    """Train on one rank. The check must accept the tables, also after a checkpoint. It must reject them after an update
    with another learning rate, after a lost update, and if other tables were loaded.
    """
    options = OPERATORS[operator].drawn(random.Random(0), "cpu") | {
        "optimizer": "Adam",
        "hash": True,
        "deadline_s": 5.0,
    }
    if operator in ON_DEMAND:
        del options["hash"]
        options["placement"] = "rows"  # one rank cannot load column-wise tables in TorchRec's plans
    work: Any = OPERATORS[operator](alone, torch.device("cpu"), 0, 1, 2, options)
    work.make()

    def step(n: int) -> tuple[str, str]:
        given = work.inputs(n)
        results = work.forward(given)
        forward = compare(results, work.expected(n), False, work.tolerance)
        grads, wanted = work.grads(n)
        return forward, compare(work.gradients(n, given, results, grads), wanted, False, work.tolerance)

    for n in range(4):
        work.begin(n)
        assert step(n) == ("right", "right")
        work.succeeded()
    loads = work.save(str(tmp_path / "checkpoint"))
    assert compare(*loads(), False, work.tolerance) == "right"
    work.spoil()
    assert step(4) == ("right", "wrong")
    assert step(5) == ("wrong", "wrong")
    other = work.save(str(tmp_path / "other"))
    assert compare(*other(), False, work.tolerance) == "wrong"


def test_an_injection_is_the_same_whenever_it_is_drawn() -> None:
    assert [draw(2, index) for index in (7, 300)] == [draw(2, index) for index in (7, 300)]
    assert draw(2, 7) != draw(3, 7)


# --- judgements of made-up traces ---


def injection(kind: str) -> Injection:
    found = next(one for one in (draw(0, index) for index in range(400)) if one.kind == kind and one.world == 2)
    assert found.deadline_s in (2.0, 8.0)
    return found


def call(
    n: int,
    result: str = "right",
    *,
    lasts_s: float = 0.01,
    named: bool = True,
    injected: bool = False,
    said: str = "SomeError",
) -> dict[str, Any]:
    begin = 100.0 + n
    made = {
        "event": "call",
        "n": n,
        "call": "forward",
        "begin": begin,
        "end": begin + lasts_s,
        "result": result,
        "note": "",
    }
    if result == "error":
        made |= {"error": [said, "why"], "named": named, "injected": injected, "where": ""}
    return made


def seen(*ranks: list[dict[str, Any]], fault: bool = False, **others: Any) -> Seen:
    """Return the observations of a trial with these calls of each rank. fault: whether each rank recorded the fault."""
    left = {"event": "left", "descriptors": [], "mappings": [], "threads": []}
    events = [[*calls, *[{"event": "fault"}] * fault, left] for calls in ranks]
    return Seen(events=events, **{"codes": [0] * len(ranks), "said": [""] * len(ranks), **others})


def all_right(count: int = STEPS) -> list[dict[str, Any]]:
    return [call(n) for n in range(count)]


def names(kind: str, found: Seen) -> set[str]:
    return {name for name, _ in judge(injection(kind), found)}


def test_nothing_is_noticed_where_all_is_well() -> None:
    assert names("short straggler", seen(all_right(), all_right())) == set()
    ended = [*all_right(5), *[call(n, "error") for n in range(5, 9)]]
    assert names("kill", seen(ended, all_right(5), codes=[0, -9] if injection("kill").victim else [-9, 0])) == set()
    assert names("long straggler", seen(ended, ended)) == set()


def test_a_wrong_result_is_a_mix() -> None:
    for result in ("wrong", "nan"):
        wrong = [*all_right(5), call(5, result), *all_right()[6:]]
        assert names("interrupt", seen(wrong, all_right())) == {"mix"}


def test_a_healthy_group_that_ends_is_lost() -> None:
    ended = [*all_right(5), *[call(n, "error") for n in range(5, 9)]]
    assert names("short straggler", seen(ended, ended)) == {"lost"}
    assert names("fork, idle", seen(all_right(), all_right(20))) == {"lost"}  # rank 1 did not reach its last step


def test_bad_input_may_be_refused_once_and_by_all() -> None:
    n = injection("dtype").step
    refused = [*all_right(n), call(n, "error"), *all_right()[n + 1 :]]
    assert names("dtype", seen(refused, refused)) == set()
    assert names("dtype", seen(refused, all_right())) == {"lost"}
    twice = [*refused[: n + 1], call(n + 1, "error"), *all_right()[n + 2 :]]
    assert names("dtype", seen(twice, twice)) == {"lost"}


def test_a_process_that_the_c_library_ends_for_want_of_memory_has_died() -> None:
    for said, faults in (("cannot allocate memory for thread-local data: ABORT", set()), ("", {"unnamed", "split"})):
        victim = injection("no memory, RLIMIT_AS").victim
        ended = [*all_right(5), *[call(n, "error") for n in range(5, 9)]]
        ranks, codes, texts = [ended, ended], [0, 0], ["", ""]
        ranks[victim], codes[victim], texts[victim] = all_right(5), 127, said
        assert names("no memory, RLIMIT_AS", seen(*ranks, codes=codes, said=texts)) == faults


def test_an_error_on_some_ranks_while_others_go_on_is_a_split() -> None:
    ended = [*all_right(5), *[call(n, "error") for n in range(5, 9)]]
    assert names("other shape", seen(ended, all_right(12))) == {"split"}
    assert names("other shape", seen(ended, all_right())) == set()  # rank 1 had made its last step


def test_a_result_of_a_call_in_which_ranks_differ_is_silent() -> None:
    n = injection("other option").step
    before, poisoned = all_right(n), [call(n + 1, "error", said="PoisonedGroupError")]

    def found(*results: dict[str, Any], after: list[dict[str, Any]] = poisoned) -> set[str]:
        return names("other option", seen(*([*before, result, *after] for result in results), fault=True))

    told = call(n, "error", said="DisagreementError")
    assert found(told, told) == set()
    assert found(told, call(n)) == {"silent"}
    assert found(call(n), call(n), after=all_right()[n + 1 :]) == {"silent"}
    assert found(told, call(n, "error", said="DeadlineError")) == {"unnamed"}
    warm = {**call(-1, "error"), "call": "warm"}
    assert names("other option", seen([warm, *before, told], [warm, *before, told], fault=True)) == {"lost"}


def test_other_tables_are_refused_and_the_group_lives() -> None:
    n = injection("other tables").step
    ranks = [[*all_right(n), call(n, "error", said="RefusedError"), *all_right()[n + 1 :]]] * 2
    assert names("other tables", seen(*ranks, fault=True)) == set()
    assert names("other tables", seen(ranks[0], all_right(), fault=True)) == {"silent", "lost"}
    assert names("other tables", seen(ranks[0], ranks[0][: n + 1], fault=True)) == {"lost"}


def test_ranks_that_differ_in_backward_must_raise_there() -> None:
    told = {**call(injection("other learning rate").step, "error", said="DisagreementError"), "call": "backward"}
    before = all_right(told["n"] + 1)
    poisoned = call(told["n"] + 1, "error", said="PoisonedGroupError")
    assert names("other learning rate", seen(*[[*before, told, poisoned]] * 2, fault=True)) == set()
    right = {**told, "result": "right"}
    assert names("other learning rate", seen([*before, right, poisoned], [*before, told], fault=True)) == {"silent"}


def test_a_prefetch_may_succeed_where_the_call_after_it_raises() -> None:
    n = injection("other option").step
    ahead, told = {**call(n), "call": "prefetch"}, call(n, "error", said="DisagreementError")
    assert names("other option", seen(*[[*all_right(n), ahead, told]] * 2, fault=True)) == set()
    assert names("other option", seen(*[[*all_right(n), ahead, call(n)]] * 2, fault=True)) == {"silent"}


def test_wrong_tables_in_a_checkpoint_are_a_mix() -> None:
    found = seen(all_right(), all_right())
    found.events[0].append({"event": "loaded", "result": "right"})
    assert names("none", found) == set()
    found.events[1].append({"event": "loaded", "result": "wrong"})
    assert names("none", found) == {"mix"}


def test_a_second_thread_must_be_refused_and_end_the_group() -> None:
    ended = [*all_right(5), call(5, "error", said="PoisonedGroupError")]

    def found(error: list[str] | None, *ranks: list[dict[str, Any]]) -> set[str]:
        made = seen(*ranks, fault=True)
        made.events[0].append({"event": "thread", "error": error})
        return names("second thread", made)

    assert found(["PoisonedGroupError", ""], ended, ended) == set()
    assert found(["PoisonedGroupError", ""], all_right(), all_right()) == {"silent"}
    assert found(None, ended, ended) == {"silent"}
    assert found(["RuntimeError", ""], ended, ended) == {"unnamed"}


def test_a_call_that_lasts_too_long_is_a_hang() -> None:
    late = [*all_right(5), call(5, "error", lasts_s=7.5)]
    assert names("other shape", seen(late, late)) == {"hang"}
    assert names("other shape", seen(late, late, fault_at=106.0)) == set()  # the fault came later
    assert names("interrupt", seen(all_right(), all_right(), hung={1: "leaving"})) == {"hang"}


def test_a_rank_that_was_stopped_has_five_seconds_from_waking() -> None:
    for lasts_s, hangs in ((7.0, False), (7.8, True)):
        ranks = [all_right(5), all_right(5)]
        ranks[injection("long stop").victim].append(call(5, "error", lasts_s=lasts_s))
        found = seen(*ranks, fault_at=105.0, stopped=[(105.0, 107.5)])
        assert ("hang" in names("long stop", found)) == hangs


def test_errors_without_a_name_and_what_is_left_behind() -> None:
    unnamed = [*all_right(5), *[call(n, "error", named=False) for n in range(5, 9)]]
    own = [*all_right(5), *[call(n, "error", named=False, injected=True) for n in range(5, 9)]]
    assert names("no threads", seen(unnamed, unnamed)) == {"unnamed"}
    assert names("no threads", seen(own, own)) == set()
    leaves = seen(all_right(), all_right())
    leaves.events[1][-1]["mappings"] = ["memfd:weft"]
    leaves.names = ["weft-1"]
    assert names("none", leaves) == {"leak"}
    assert names("none", seen(all_right(), all_right(), codes=[0, -11])) == {"crash"}


def test_a_process_that_libc_ends_for_want_of_memory_is_as_one_that_is_killed() -> None:
    one, said = injection("no memory, RLIMIT_AS"), "Fatal glibc error: failed to register TLS destructor: out of memory"
    told = [*all_right(5), *[call(n, "error") for n in range(5, 9)]]

    def found(victim: int, code: int, text: str, peer: list[dict[str, Any]] = told) -> set[str]:
        ranks = [(peer, 0, ""), (all_right(5), code, text)]
        calls, codes, texts = zip(*(ranks if victim == 1 else ranks[::-1]), strict=True)
        return names(one.kind, seen(*calls, codes=list(codes), said=list(texts)))

    assert found(one.victim, -6, f"{said}\n") == set()
    assert found(one.victim, -6, f"{said}\n", [*all_right(5), call(5, "error", named=False)]) == {"unnamed"}
    assert found(one.victim, -6, "terminate called") == found(one.victim, -11, said) == {"crash", "split"}
    assert found(1 - one.victim, -6, said) == {"crash", "split"}


# --- records and documents ---


def test_a_campaign_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "build" / "one.jsonl"
    assert records.go_on(path, 4, "cpu") == []
    found = records.of(injection("none"), seen(all_right(), all_right(), took_s=1.0))
    for index in (0, 2):
        records.append(path, {**found, "index": index})
    with path.open("a") as file:
        file.write('{"index": 1, "cut o')
    assert [one["index"] for one in records.go_on(path, 4, "cpu")] == [0, 2]
    records.append(path, {**found, "index": 1})
    assert [one["index"] for one in records.go_on(path, 4, "cpu")] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"is of seed 4 and not 5: name another file \(--record\), or remove it"):
        records.go_on(path, 5, "cpu")
    with pytest.raises(ValueError, match=r"is of families \[\] and not \['kill'\]"):
        records.go_on(path, 4, "cpu", ["kill"])


def test_the_document_shows_the_records() -> None:
    path = ROOT / "docs" / "failures.md"
    found = {file.stem: records.read(file) for file in sorted((ROOT / "benchmarks" / "chaos").glob("*.jsonl"))}
    assert report.rewrite(path.read_text(), found) == path.read_text(), (
        "out of date: python -m tests.chaos.report docs/failures.md benchmarks/chaos/*.jsonl"
    )
    assert all(not one["wrong"] for _, recorded in found.values() for one in recorded)


def test_outcomes_are_counted() -> None:
    found = outcome(seen([call(0), call(1, "error")], [call(0), call(1, "nan")]))
    assert found == {"right": 2, "nan": 1, "errors": {"SomeError": 1}}
