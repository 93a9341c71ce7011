"""Names of schedules: valid names, errors for wrong names, and pinned names."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import pytest

from weft import plan
from weft.builders import AllGatherMatmul, AllToAllMatmul, NotApplicableError, candidates, described, named
from weft.builders.problem import PROBLEMS
from weft.hw import load_machine
from weft.sim import model_of

H200 = model_of(load_machine("h200"), 2)
LARGE = AllGatherMatmul.even(8192, 4096, 8192, 2)
HOUSE = [op for op, problem in PROBLEMS.items() if problem.__module__.startswith("weft.builders.")]
OPTIONS = {
    "all_to_all_matmul": {"experts": 8},
    "matmul_all_to_all": {"experts": 8},
    "embedding_all_to_all": {"tables": 8},
}


def test_a_pinned_schedule_is_taken_and_blocks_nest() -> None:
    slow, other = "ficco_1d[start=uniform,gemms=fused,steps=4,by=kernel]", "shard[chunks=2,send=in_turn,by=dma]"
    with plan.use(slow):
        assert plan.pinned() == slow
        assert plan.choose(LARGE, H200).candidate.name == slow
        with plan.use(other):
            assert plan.choose(LARGE, H200).candidate.name == other
        assert plan.choose(LARGE, H200, pinned="serial").candidate.name == "serial"
        assert plan.choose(LARGE, H200).reason == f"{slow} is pinned"
    assert plan.pinned() is None
    assert plan.choose(LARGE, H200).candidate.name not in (slow, other)


def test_a_pin_holds_in_its_own_thread() -> None:
    seen: list[str | None] = []
    with plan.use("serial"):
        thread = threading.Thread(target=lambda: seen.append(plan.pinned()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_what_is_no_name_is_refused_as_such() -> None:
    said = "schedule=3 is an int: pass the name of a schedule, a string such as 'serial', or None"
    with pytest.raises(ValueError, match=said):
        plan.pinned(3)
    for empty in ("", []):
        with pytest.raises(ValueError, match="pass the name of a schedule, a string such as 'serial', or None"):
            plan.use(empty).__enter__()  # type: ignore[arg-type]
    with plan.use(3), pytest.raises(ValueError, match=said):  # type: ignore[arg-type]
        plan.choose(LARGE, H200)


def test_unknown_names_give_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"nearest are .*shard\[chunks=2,send=in_turn,by=dma\]"):
        plan.choose(LARGE, H200, pinned="shard[chunk=2,send=in_turn,by=dma]")
    with plan.use("sereal"), pytest.raises(ValueError, match="nearest are serial"):
        plan.choose(LARGE, H200)


@pytest.mark.parametrize("op", HOUSE)
def test_what_is_proposed_for_an_unknown_name_can_be_pinned(op: str) -> None:
    """The proposed names must support the problem. Some builders do not support fp8, few ranks or few rows."""
    for m, ranks in ((64, 4), (64, 2), (64, 1), (0, 2)):
        p = described(op, m=m, n=64, k=64, ranks=ranks, **OPTIONS.get(op, {}))
        for name in ("nonsense", "ring", "direct[]", "tracked[chunk=8]"):
            if name in {candidate.name for candidate in candidates(p)}:
                continue
            with pytest.raises(ValueError, match="nearest are") as caught:
                named(p, name)
            nearest, _, listing = str(caught.value).partition("nearest are ")[2].partition("; ")
            assert listing == f"`weft plan {p.title} --shape M,N,K --all` lists all"
            proposed = re.findall(r"\w+(?:\[[^]]+\])?", nearest)
            assert 1 <= len(proposed) <= 3
            for one in proposed:
                named(p, one).build()


@pytest.mark.parametrize("chunks", ["3", "1:2:1"])
def test_numbers_that_are_not_tried_can_be_pinned_and_measured(chunks: str) -> None:
    name = f"shard[chunks={chunks},send=in_turn,by=dma]"
    choice = plan.choose(LARGE, H200, pinned=name)
    assert choice.candidate.name == name
    assert next(s.count for s in choice.schedule.signals if s.name == "arrived") == LARGE.world_size * 3
    assert name not in {row.candidate.name for row in plan.choose(LARGE, H200).rows}
    assert plan.choose(LARGE, H200, measured={"serial": 900.0, name: 100.0}).candidate.name == name


def test_what_a_builder_does_by_default_is_not_in_names() -> None:
    p = AllToAllMatmul.even(64, 8, 8, 3, 4)
    assert [candidate.name for candidate in candidates(p, ("dispatch",))][:4] == [
        "dispatch[by=dma,rest=each]",
        "dispatch[by=dma,rest=each,send=at_once]",
        "dispatch[by=dma,rest=each,send=together]",
        "dispatch[by=dma,rest=together]",
    ]
    with pytest.raises(ValueError, match=re.escape("write it as 'dispatch[by=dma,rest=each]'")):
        named(p, "dispatch[by=dma,rest=each,send=in_turn]")
    assert named(p, "dispatch_by_expert[by=dma,chunks=3,send=at_once]").build().lanes[-1].name == "to +3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "shard[chunks=0,send=in_turn,by=dma]",
            "chunks is '0': use a number from 1 to 999999 or a proportion such as 2:1:1",
        ),
        ("shard[chunks=03,send=in_turn,by=dma]", "chunks is '03'"),
        (
            "shard[chunks=1000000,send=in_turn,by=dma]",
            "chunks is '1000000': use a number from 1 to 999999",
        ),
        ("shard[chunks=2,send=in_turn,by=kernel,by=no,by=dma]", "by is given more than once"),
        ("shard[by=dma,chunks=3,send=in_turn]", "write it as 'shard[chunks=3,send=in_turn,by=dma]'"),
        ("shard[chunks=1:0,send=in_turn,by=dma]", "chunks is '1:0'"),
        ("shard[chunks=2,send=late,by=dma]", "send is 'late': use in_turn or at_once"),
        ("ficco_1d[start=uniform,gemms=fused,steps=1:2,by=dma]", "steps is '1:2': use a number from 0 to 999999"),
    ],
)
def test_values_that_a_parameter_cannot_have_are_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.choose(LARGE, H200, pinned=name)


def test_messages_name_splits_that_are_not_even_only() -> None:
    many = AllToAllMatmul.even(4096, 8, 8, 32, 8)
    assert len(str(many)) < 200
    assert "splits" not in str(many)
    assert "most=4096" in str(many)
    uneven = AllToAllMatmul(2, 1, (3, 3), 8, 8, "bf16", 3, splits=((1, 2), (3, 0)))
    assert "splits=((1, 2), (3, 0))" in str(uneven)
    assert str(replace(uneven, splits=())) != str(uneven)


@pytest.mark.parametrize(
    ("rows", "gathered", "remedy"),
    [
        (
            (3, 4),
            False,
            "shards of (3, 4) rows cannot be cut into equal chunks: give every rank 3 or 4 rows, or "
            'use the schedule "shard" or "gather"',
        ),
        ((3, 5), False, 'give every rank 4 rows, or use the schedule "shard" or "gather"'),
        (
            (4, 4),
            True,
            "chunks arrive in another order than the rows of the gathered input: call with return_A=False, "
            'or use the schedule "shard" or "gather"',
        ),
    ],
)
def test_what_ficco_cannot_do_is_said_with_the_remedy(rows: tuple[int, int], gathered: bool, remedy: str) -> None:
    p = AllGatherMatmul(2, rows, (8,), 8, "bf16", return_gathered=gathered)
    with pytest.raises(NotApplicableError, match=re.escape(remedy)):
        plan.choose(p, H200, pinned="ficco_2d[start=uniform,gemms=fused,steps=2,by=dma]")


def test_a_pinned_schedule_that_cannot_do_it_says_why() -> None:
    ragged = AllGatherMatmul(2, (5, 3), (8,), 8, "bf16")
    said = r"schedule 'shard\[chunks=2.*' does not support all_gather_matmul of \[8, 8\] .*equal shards.*Pass schedule=\"serial\""
    with pytest.raises(NotApplicableError, match=said):
        plan.choose(ragged, H200, pinned="shard[chunks=2,send=in_turn,by=dma]")


# -- memory
