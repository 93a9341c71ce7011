"""Numbered calls on GPUs: the refusals that ranks send each other, and the mode in which ranks compare all calls."""

from __future__ import annotations

from weft.symm.calls import CallLog, GroupCalls, MadeCalls
from weft.symm.layers import differ


def test_a_refused_call_that_this_rank_has_made_ends_the_group() -> None:
    here, there = GroupCalls(), GroupCalls()
    assert here.begin() == here.end() == ""
    there.begin()
    assert here.heard(there.refuse("rank 1: bad")) == "rank 1: bad"


def test_a_refused_call_that_this_rank_has_not_come_to_is_refused_here_too() -> None:
    here, there = GroupCalls(), GroupCalls()
    there.begin()
    assert here.heard(there.refuse("rank 1: bad")) == ""
    assert here.begin() == "rank 1: bad"
    assert here.begin() == here.end() == ""


def test_a_call_that_all_refuse_ends_nothing() -> None:
    for late in (False, True):
        here, there = GroupCalls(), GroupCalls()
        here.begin()
        there.begin()
        message = there.refuse("rank 1: bad")
        if late:
            here.refuse("rank 0: bad")
        assert here.heard(message) == ""
        if not late:
            here.refuse("rank 0: bad")
        assert here.begin() == here.end() == ""


def test_a_refusal_that_comes_during_the_call_is_seen_at_its_end() -> None:
    here, there = GroupCalls(), GroupCalls()
    there.begin()
    assert here.begin() == ""
    assert here.heard(there.refuse("rank 1: bad")) == ""
    assert here.refused() == here.end() == "rank 1: bad"


def test_a_rank_that_refused_knows_when_no_peer_can_make_the_call_any_more() -> None:
    """A peer that has not made the call yet answers at once. A peer in the call answers when it refuses the call too. A
    peer that has made the call never answers.
    """
    for peer in ("behind", "at it, heard first", "at it, refused first", "done"):
        here, there = GroupCalls(), GroupCalls()
        there.begin()
        if peer != "behind":
            here.begin()
        if peer == "done":
            here.end()
        if peer == "at it, refused first":
            there.heard(here.refuse("rank 0: bad", 1))
        message = there.refuse("rank 1: bad", 1)
        assert there.unanswered == (0 if peer == "at it, refused first" else 1)
        here.heard(message)
        answer = here.answer(message)
        assert (answer is None) == (peer != "behind")
        if answer is not None:
            there.answered(answer)
        if peer == "at it, heard first":
            there.heard(here.refuse("rank 0: bad", 1))
        assert there.unanswered == here.unanswered + (1 if peer == "done" else 0)
        assert here.unanswered == 0


def test_compared_calls_that_are_the_same_say_nothing() -> None:
    said: list[str] = []
    one, other = CallLog(0, 2, said.append), CallLog(1, 2, said.append)
    for number in range(1, 4):
        message = one.note(number, f"op, called at train.py:{number}")
        if number != 2:
            other.heard(0, message)
        one.heard(1, other.note(number, f"op, called at train.py:{number}"))
        if number == 2:
            other.heard(0, message)
    assert said == []
    assert not one._mine
    assert not other._mine


def test_compared_calls_that_differ_are_named() -> None:
    said: list[str] = []
    one = CallLog(0, 3, said.append)
    one.note(7, "op, called at train.py:1")
    one.heard(1, CallLog(1, 3, said.append).note(7, "op, called at train.py:1"))
    one.heard(2, CallLog(2, 3, said.append).note(7, "backward of op, called at train.py:2"))
    (text,) = said
    assert (
        "call 7 of weft on this group, forward and backward counted, is op, called at train.py:1 on rank 0, and backward of op, "
        "called at train.py:2 on rank 2"
    ) in text


def made(*fingerprints: int) -> MadeCalls:
    calls = MadeCalls()
    for number, fingerprint in enumerate(fingerprints, 1):
        calls.note(fingerprint, f"op {fingerprint}")
        calls.end(number)
    return calls


def test_ranks_that_made_the_same_calls_agree_at_every_one() -> None:
    here = made(*range(1, 8))
    for count in range(1, 8):
        assert here.heard(1, made(*range(1, 1 + count)).news()) == ""


def test_a_difference_is_found_at_any_later_call() -> None:
    for wrong in ((1, 9, 3), (2, 1, 3), (1, 2, 4), (1, 2, 2)):
        for more in ((), (4, 5)):
            text = made(1, 2, 3, 4, 5, 6).heard(3, made(*wrong, *more).news())
            assert "between call 1 and call" in text
            assert "the last ones are op 6 here, and op" in text


def test_a_difference_is_found_behind_calls_that_agreed() -> None:
    here = made(1, 2, 3, 4)
    assert here.heard(1, made(1, 2).news()) == ""
    assert "between call 3 and call 4 of weft on this group, forward and backward counted: " in here.heard(
        1, made(1, 2, 3, 5).news()
    )


def test_news_of_a_call_that_is_still_to_come_waits_for_it() -> None:
    for last, differs in ((3, False), (4, True)):
        here = made(1, 2)
        assert here.heard(1, made(1, 2, 3).news()) == here.heard_early() == ""
        here.note(last, f"op {last}")
        assert here.heard_early() == "", "the call has not ended"
        here.end(3)
        assert bool(here.heard_early()) == differs
        assert here.heard_early() == "", "once"


def test_news_is_told_once() -> None:
    calls = made(1, 2)
    assert calls.news()
    assert calls.news() == b""
    assert MadeCalls().news() == b"", "on CPU nothing is noted, and nothing said"


def test_news_that_is_too_old_to_be_compared_says_nothing() -> None:
    here, old = made(*range(1, 40000)), made(7, 7)
    assert here.heard(1, old.news()) == ""


def layered(*steps: str, alone: str = "") -> GroupCalls:
    """Make calls with layers, and return their records. A layer is a letter: lower case if its forward is collective,
    else upper case.

    alone: a layer that only this rank calls, before all others.
    """
    calls = GroupCalls()
    for number, step in enumerate([alone + steps[0], *steps[1:]], 1):
        for layer in step:
            calls.layers.note(f"Layer({layer})", ord(layer), layer.islower())
        calls.made.note(number, f"op {number}")
        calls.begin()
        calls.end()
    return calls


def test_layers_of_the_same_options_agree() -> None:
    assert layered("a", "", "bC", "a").made.heard(1, layered("a", "", "bC", "a").made.news()) == ""


def test_layers_of_other_options_are_named() -> None:
    for wrong in ("b", "bC", "cC"):
        text = layered("a", "aC", "a").made.heard(3, layered("a", wrong, "a").made.news())
        assert "ranks have called layers with different options, between call 1 and call 3" in text
        assert f"only on rank 3 Layer({wrong[0]})" in text
    text = layered("a", "C", "a").made.heard(3, layered("a", "D", "a").made.news())
    assert "only here Layer(C), and only on rank 3 Layer(D)" in text
    assert "in a different order" in layered("a", "b").made.heard(3, layered("b", "a").made.news())


def test_a_layer_without_a_collective_may_be_called_alone() -> None:
    assert layered("a", "b").made.heard(1, layered("a", "b", alone="C").made.news()) == ""
    assert "Layer(d)" in layered("a", "b").made.heard(1, layered("a", "d", alone="C").made.news())


def test_a_call_of_a_compiled_graph_takes_nothing_along() -> None:
    assert layered("a", "a").made.heard(1, layered("a", "").made.news()) == ""
    assert not differ([(1, 0), (0, 2), (1, 2)])
    assert differ([(1, 0), (0, 2), (1, 3)])


def test_options_are_told_once_and_kept_until_their_call_is_made_here() -> None:
    here, there = layered("a"), layered("a", "b")
    assert here.made.heard(1, there.made.news()) == ""
    here.layers.note("Layer(c)", ord("c"), True)
    here.made.note(2, "op 2")
    here.begin()
    here.end()
    assert "only here Layer(c), and only on rank 1 Layer(b)" in here.made.heard_early()
    there.begin()
    there.end()
    assert b"Layer" not in there.made.news()


def test_a_refusal_drops_what_its_call_would_have_taken_along() -> None:
    calls = GroupCalls()
    calls.layers.note("Layer(a)", 1, True)
    calls.begin()
    calls.refuse("rank 0: bad")
    assert calls.layers.take().records == (0, 0)
