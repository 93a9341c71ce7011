"""Calls that native code replays, with fakes for a group, its compiled operators and torch's collectives.

The tests check what replayed calls run, count and return, when they take the slow path, and the state after an error in
any step. Cheapest first.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from native_calls import BUFFERS, STEPS, WORLD, Group, Played, Sizes, Torch, Work

from weft import _core
from weft.operator.across import of_size
from weft.runtime.layouts import READER
from weft.symm.calls import GroupCalls

pytestmark = pytest.mark.skipif(READER is None, reason="tensors of this torch offer no DLPack exchange API")


def test_recipes_make_what_they_say() -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.arange(4.0)
    named = {"y": y, "ys": [x, y]}

    def made(recipe: tuple[Any, ...]) -> Any:
        return _core.Recipe(recipe)((x, [y]), named)

    assert made(("given", 0)) is made(("named", "ys", 0)) is x
    assert made(("given", 1, 0)) is made(("named", "y")) is y
    assert made(("view", ("given", 0), (6,))).shape == (6,)
    assert made(("as_strided", ("named", "y"), (2,), (2,))).tolist() == [0, 2]
    divided = y.clone()
    assert _core.Recipe(("div_", ("given", 0), 2))([divided], {}) is divided
    assert torch.equal(divided, y / 2)
    assert made(("tuple", [("constant", None), ("list", [("given", 0)])])) == (None, [x])
    assert made(("dict", {"a": ("given", 0)})) == {"a": x}
    assert made(("call", divmod, [("constant", 7), ("constant", 2)])) == (3, 1)
    for wrong in (("given", -1), ("unknown", 1), ("view", ("given", 0))):
        with pytest.raises(ValueError, match="not a recipe"):
            _core.Recipe(wrong)
    with pytest.raises(KeyError, match="z"):
        made(("named", "z"))
    with pytest.raises(IndexError):
        made(("given", 2))


def test_steps_run_in_order_and_return_every_buffer() -> None:
    played = Torch()
    steps = _core.PlainSteps(played.calls(), BUFFERS, STEPS, WORLD)
    x, w, waited = torch.randn(2, 3), torch.randn(3, 4), Work.waited
    found = steps.run({"w": w, "x_shard": x}, Group())
    assert played.ran == ["gather", "mm", "scatter", "reduce"]
    assert Work.waited == waited + 1
    assert list(found) == BUFFERS
    assert torch.equal(found["x"], torch.cat([x, x]))
    assert torch.equal(found["part"], (torch.cat([x, x]) @ w)[:2] * 4)
    with pytest.raises(ValueError, match="no step has written"):
        steps.run({"w": w}, Group())
    with pytest.raises(ValueError, match="no buffer has the name"):
        steps.run({"v": w}, Group())
    for wrong in (("addmm", "y", ("x", "w"), None), ("matmul", "y", ("x",), None), ("matmul", "z", ("x", "w"), None)):
        with pytest.raises(ValueError, match=r"not a plain step|no buffer"):
            _core.PlainSteps(played.calls(), BUFFERS, [wrong], WORLD)


def test_a_step_may_be_a_function() -> None:
    step = ("called", "y", ("x", "w"), lambda x, w: x - w)
    steps = _core.PlainSteps(Torch().calls(), ["x", "w", "y"], [step], WORLD)
    x, w = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(steps.run({"x": x, "w": w}, Group())["y"], x - w)


@pytest.mark.parametrize("rows", [0, 3])
def test_fp8_is_gathered_as_bytes_and_multiplied_with_its_scales(rows: int) -> None:
    played = Torch()
    fp8 = torch.float8_e4m3fn
    x, w = torch.randn(rows, 16).to(fp8), torch.randn(32, 16).to(fp8).t()
    scale_x, scale_w, bias = torch.tensor(0.5), torch.tensor([[2.0]]), torch.randn(1, 32)
    buffers = ["x_shard", "w", "sx", "sw", "b", "x", "y"]
    made = ("scaled_matmul", "y", ("x", "w", "sx", "sw", "b"), torch.float32)
    steps = _core.PlainSteps(played.calls(), buffers, [("all_gather", "x", ("x_shard",), fp8), made], WORLD)
    found = steps.run({"x_shard": x, "w": w, "sx": scale_x, "sw": scale_w, "b": bias}, Group())
    assert found["x"].dtype == fp8
    assert found["y"].shape == (2 * rows, 32)
    assert torch.equal(found["y"], torch.cat([x.float(), x.float()]) @ w.float() + bias)


def test_scales_are_passed_where_cublas_can_read_them() -> None:
    scales, bias, given = torch.rand(9, 1), torch.rand(1, 4), []

    def function(*arguments: Any, **named: Any) -> str:
        given.append((arguments, named))
        return "product"

    for scale_a in (scales[:4], scales[1:5]):
        assert _core.scaled_mm(function, "a", "b", scale_a, "sb", bias, "bf16", True, None) == "product"
        (_, _, scale, _, added), named = given.pop()
        assert scale.data_ptr() % 16 == 0
        assert (scale is scale_a) == (scale_a.data_ptr() % 16 == 0)
        assert torch.equal(scale, scale_a)
        assert torch.equal(added, bias[0])
        assert named == {"out_dtype": "bf16", "use_fast_accum": True}
    _core.scaled_mm(function, "a", "b", scales, "sb", None, "bf16", False, "out")
    assert given.pop() == (("a", "b", scales, "sb", None), {"out_dtype": "bf16", "use_fast_accum": False, "out": "out"})


def test_a_call_runs_and_counts() -> None:
    played = Played()
    like = GroupCalls()
    for number in range(1, 5):
        assert torch.equal(played(), played.expected())
        like.made.note(7, "op")
        like.begin()
        like.end()
        assert played.counts() == (number, number, number, like.made.digest)
        assert played.of.prepared.called_at == played.of.here.calls == number
        assert played.of.counts.made.what == "op"
        assert played.is_free()
    assert played.of.counts.made.news() == like.made.news()


def test_options_of_layers_travel_with_the_next_call() -> None:
    played = Played()
    played.of.counts.layers.note("Layer(a)", 5, True)
    played()
    words = played.of.counts.made.words
    assert words != (0, 0)
    assert not played.of.counts.has_layers
    played()
    assert played.of.counts.made.words_at(2) == words
    assert b"Layer(a)" in played.of.counts.made.news()


def test_what_has_changed_since_takes_the_slow_path() -> None:
    played = Played()
    of, counts = played.of, played.of.counts
    assert not played.is_slow()
    del played.groups[played.group]
    assert played.is_slow()
    played.groups[played.group] = None
    of.prepared.chosen = "other"
    assert played.is_slow()
    of.prepared.chosen = of.chosen
    played.autocast = True
    assert played.is_slow()
    played.autocast = False
    played.forward["_current_level"] = 0
    assert played.is_slow()
    played.forward["_current_level"] = -1
    played.coalescing[played.group] = []
    assert played.is_slow()
    played.coalescing.clear()
    counts.unanswered = 1
    assert played.is_slow()
    counts.unanswered = 0
    other = GroupCalls()
    for _ in range(counts.begun + 1):
        other.begin()
    assert counts.heard(other.refuse("rank 1: bad")) == ""
    assert played.is_slow(), "a peer has refused it"
    counts.begin()
    assert not played.is_slow(), "that was another call"
    assert not played.is_slow()


def test_a_group_in_trouble_takes_the_slow_path() -> None:
    played = Played()
    health = played.of.health
    word = ctypes.c_int64.from_address(health.failed_address)
    assert not played.is_slow()
    word.value = 1
    assert played.is_slow()
    word.value = 0
    looked: list[int] = []

    def look() -> None:
        looked.append(word.value)
        word.value = len(looked) > 1

    health.looks.append(lambda: look)  # a weak reference to a method that may detect a failed call
    assert not played.is_slow()
    assert played.is_slow()
    assert looked == [0, 0]
    word.value = 0
    health.looks[:] = [lambda: None]  # the object of this method no longer exists
    assert not played.is_slow()
    health.looks.clear()
    health.looked_at -= 61
    assert health.is_stale()
    assert played.is_slow()


def test_a_group_that_is_gone_takes_the_slow_path() -> None:
    played = Played()
    known = next(iter(played.calls.values()))
    played.groups.clear()
    played.group = Group()
    assert played.of.group_ref() is None
    assert isinstance(played(), _core.UnknownCall)
    played.calls[played().key] = known  # a new group has the address of the old one
    assert isinstance(played(), _core.UnknownCall)


def test_another_thread_takes_the_slow_path_during_a_call() -> None:
    played = Played()
    slow: list[bool] = []

    def other(name: str) -> None:
        played.torch.at = lambda name: None
        thread = threading.Thread(target=lambda: slow.append(isinstance(played(), _core.UnknownCall)))
        thread.start()
        thread.join()

    played.torch.at = other
    played()
    assert slow == [True]
    assert played.counts()[:2] == (1, 1)
    assert played.is_free()


def test_a_call_inside_of_a_call_is_another_call() -> None:
    played = Played()
    inner: list[torch.Tensor] = []

    def nested(name: str) -> None:
        played.torch.at = lambda name: None
        kept = played.x
        inner.extend((played(), played.expected()))
        played.x = kept

    played.torch.at = nested
    assert torch.equal(played(), played.expected())
    assert torch.equal(*inner)
    assert played.counts()[:2] == (2, 2)
    assert played.is_free()


@pytest.mark.parametrize("step", ["gather", "mm", "scatter", "reduce"])
def test_an_error_in_a_step_is_told_and_leaves_the_call(step: str) -> None:
    played = Played()
    played()

    def fail(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt(name)

    played.torch.at = fail
    with pytest.raises(KeyboardInterrupt, match=step) as caught:
        played()
    assert played.of.told == [("failed", id(caught.value))]
    assert "fail" in [one.name for one in caught.traceback]
    assert played.counts()[:2] == (2, 1)
    assert played.is_free()
    played.torch.at = lambda name: None
    assert torch.equal(played(), played.expected())


def test_an_error_of_torch_is_told() -> None:
    played = Played()
    w = played.w
    played.torch.at = lambda name: w.resize_(5, 4) if name == "gather" else None
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        played()
    assert played.of.told[0][0] == "failed"
    assert played.is_free()


def test_a_call_that_is_forgotten_meanwhile_ends() -> None:
    played = Played()
    entry = weakref.ref(played.of)
    calls = played.calls
    played.torch.at = lambda name: calls.clear()
    assert torch.equal(played(), played.expected())
    played.of = None  # type: ignore[assignment]
    assert entry() is None


def test_a_peers_refusal_during_the_call_ends_the_group() -> None:
    played = Played()
    other = GroupCalls()
    other.begin()
    message = other.refuse("rank 1: bad")
    counts = played.of.counts
    played.torch.at = lambda name: counts.heard(message) if name == "mm" else None
    played()
    assert played.of.told == [("refused", "rank 1: bad")]
    assert played.of.counts.heard(message) == "rank 1: bad", "this rank has made the call"


def test_python_runs_what_overlaps() -> None:
    played = Played(overlapped=True, notes=True)
    for capturing in (False, True):
        played.capturing = capturing
        assert torch.equal(played(), played.x + 1)
        assert played.of.told == [("run", capturing), "noted"]
        played.of.told.clear()
    assert played.counts()[:2] == (2, 2)
    played.of.ready = False
    assert played.is_slow()
    before = played.of.counts.made.digest
    played = Played(overlapped=True, differentiated=True)
    played()
    assert played.of.counts.made.digest == 0 != before, "its forward notes it"
    assert Played(overlapped=True, kind="cpu")() == "on CPU"


def test_a_call_that_passes_takes_any_number_of_rows() -> None:
    played, like = Played(any_rows=True, number=2**63 + 5), GroupCalls()
    for rows in (2, 5):
        assert torch.equal(played(rows), played.expected())
        like.made.note(of_size(2**63 + 5, rows), "op")
    assert played.of.counts.made.digest == like.made.digest
    assert played.of.here.calls == 0
    assert played.is_slow(2), "a size that comes back is compiled"
    assert list(played.of.sizes.served) == [2, 5]


def test_a_call_that_python_runs_takes_any_number_of_rows_on_gpus() -> None:
    played = Played(overlapped=True, any_rows=True)
    for rows in (2, 5, 2):
        assert torch.equal(played(rows), played.x + 1)
    assert played.of.told == [("run", False)] * 3
    assert (played.counts()[:2], played.of.here.calls) == ((3, 3), 3)
    played.of.ready = False
    assert played.is_slow(5)
    played.of.ready, played.of.prepared.chosen = True, "another schedule"
    assert played.is_slow(5)
    played.of.prepared.chosen, played.capturing = "serial", True
    assert played.is_slow(5)
    assert Played(overlapped=True, any_rows=True, kind="cpu")() == "on CPU"


def test_a_size_that_the_family_does_not_take_is_slow() -> None:
    played = Played(any_rows=True, multiple=3, sizes=Sizes(2, 8))
    assert played.is_slow(6), "fewer sizes than 2 were called only once"
    played.of.sizes.once = 2
    assert played.is_slow(4)
    assert (dict(played.of.sizes.served), played.of.counts.begun) == ({}, 0)
    assert torch.equal(played(6), played.expected())
    assert dict(played.of.sizes.served) == {6: None}


def test_unfused_calls_are_the_same_under_capture() -> None:
    for played in (Played(), Played(any_rows=True)):
        played.capturing = True
        assert torch.equal(played(), played.expected())


def test_a_size_that_recurs_too_early_runs_unfused() -> None:
    played = Played(any_rows=True)
    played(2)
    played.of.counts.compile_from = 4
    for _ in range(2):
        assert torch.equal(played(2), played.expected())
    assert played.is_slow(2)
    assert torch.equal(played(5), played.expected()), "a new size still runs unfused"


def test_a_size_that_would_run_unfused_too_is_never_too_late() -> None:
    played = Played(any_rows=True)
    played(4)
    played.of.sizes.unfused_from, played.of.sizes.unfused_to = 2, 4
    assert torch.equal(played(4), played.expected())
    played(5)
    assert played.is_slow(5)


def test_a_weight_with_as_many_rows_as_the_shard_is_no_other_family() -> None:
    played = Played(any_rows=True)
    assert len(played.w) == 3
    assert not played.is_slow(3)
    played.of.sizes.served.clear()
    assert torch.equal(played(3), played.expected())
    played.w = torch.randn(3, 3)
    assert played.is_slow(3), "a weight of another shape is another family"


def test_only_calls_that_enter_python_are_slow_while_dynamo_looks_at_frames() -> None:
    native, overlapped, of_any_size = Played(), Played(overlapped=True), Played(any_rows=True)
    for played in (native, overlapped, of_any_size):
        played.looks = True
    assert torch.equal(native(), native.expected())
    assert overlapped.is_slow()
    assert torch.equal(of_any_size(2), of_any_size.expected())
    of_any_size.of.sizes.recur = frozenset({2})
    assert of_any_size.is_slow(2), "Python decides on a size that recurs"
    native.of.counts.has_layers = True
    assert native.is_slow()


def test_a_size_that_runs_unfused_again_is_served_once() -> None:
    played = Played(any_rows=True)
    played(2)
    played.of.sizes.recur = frozenset({2})
    assert torch.equal(played(2), played.expected())
    assert list(played.of.sizes.served) == [2]


def test_a_size_whose_call_fails_is_not_served() -> None:
    played = Played(any_rows=True)
    played(2)

    def refuse(name: str) -> None:
        raise ValueError("refused")

    played.torch.at = refuse
    with pytest.raises(ValueError, match="refused"):
        played(5)
    assert list(played.of.sizes.served) == [2]


def test_a_family_remembers_the_latest_sizes() -> None:
    sizes = _core.FamilySizes(0, 4)
    assert [sizes.add(rows) for rows in (9, 2, 7, 4, 1, 4)] == [True] * 5 + [False]
    assert list(sizes.served) == [7, 4, 1]


def test_calls_keep_nothing() -> None:
    played = Played(what="".join(["o", "p"]))
    for _ in range(10):
        played()
    of = played.of
    watched = [played.group, played.w, of, of.counts, of.counts.running, of.prepared, of.what]
    gc.collect()
    before, blocks = [sys.getrefcount(one) for one in watched], sys.getallocatedblocks()
    for _ in range(2000):
        played()
        assert played.of.told == []
    gc.collect()
    assert [sys.getrefcount(one) for one in watched] == before
    assert sys.getallocatedblocks() - blocks < 500
    played.torch.at = lambda name: 1 / 0
    for _ in range(300):
        with pytest.raises(ZeroDivisionError):
            played()
        played.of.told.clear()
    gc.collect()
    assert [sys.getrefcount(one) for one in watched] == before
    assert sys.getallocatedblocks() - blocks < 1500
