"""Runs of a compiled schedule that native code issues (`_core.KnownRun`), with a replacement for the program of native operations.

Native code and Python issue the same items with the same addresses. The results of native runs are new tensors.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, NoReturn

import pytest
import torch

from weft import _core
from weft.runtime.cuda import issue
from weft.runtime.cuda.calls import TorchCall
from weft.runtime.cuda.issue import StreamItems
from weft.runtime.cuda.regions import RegionView

INPUTS, RESULTS = ["x", "w"], ["y"]


class Program:
    """A replacement for `_core.StreamProgram`."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def run(self, first: int, last: int, bases: list[int], streams: list[int]) -> None:
        self.ran.append((first, last, tuple(bases), tuple(streams)))


class Broken(Exception):
    pass


class Items(StreamItems):
    """The items of y = x[1:] @ w + own, in 4 rows and 3 columns, between ranges of native operations."""

    def __init__(self) -> None:
        self.program: Any = Program()
        self.bases, self.streams, self._rows_at = [0, 0, 0, 0, 77], [0, 11], []
        self.names, self.stamps, self.device, self.leaves_main = (
            ["y", "x", "w", "part"],
            None,
            torch.device("cpu"),
            False,
        )
        self.own = torch.randn(4, 3)
        x, part = RegionView("x", key=slice(1, 5)), RegionView("part", key=(slice(0, 4), slice(1, 4)))
        y, w, own = RegionView("y"), RegionView("w"), RegionView("own", fixed=self.own)
        self.items = [
            issue._Item(issue._NATIVE, 0, 2),
            issue._Item(issue._CALL, TorchCall(torch.mm, (x, w), part, {}), 0),
            issue._Item(issue._CALL, TorchCall(torch.add, (part, own), y, {"alpha": 2}), 0),
            issue._Item(issue._CALL, TorchCall(torch.Tensor.addmm_, (y, x, w), None, {}), 0),
            issue._Item(issue._LAUNCH, lambda bases, stream: self.launched.append((tuple(bases), stream)), 1),
            issue._Item(issue._NATIVE, 2, 3),
        ]
        self.launched: list[tuple[tuple[int, ...], int]] = []
        self.side, self.entered = [], 0

    def enter(self) -> None:
        self.entered += 1

    @staticmethod
    def broke(error: BaseException) -> NoReturn:
        raise Broken from error

    def run_of(self, **changes: Any) -> _core.KnownRun | None:
        outputs = {"y": torch.empty(4, 3), "part": torch.empty(4, 5)}
        given = {
            "inputs": INPUTS,
            "outputs": outputs,
            "results": RESULTS,
            "enter": self.enter,
            "broke": self.broke,
        } | changes
        return self.known_run(**given)


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> Items:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    return Items()


def known(items: Items, **changes: Any) -> _core.KnownRun:
    run = items.run_of(**changes)
    assert run is not None
    return run


def test_native_code_issues_the_same_as_python(items: Items) -> None:
    run, before = known(items), set[int]()
    for number in range(5):
        x, w = torch.randn(6, 7), torch.randn(7, 3)
        (y,) = run.run([x, w])
        native, items.program.ran = items.program.ran, []
        assert items.entered == number + 1
        wanted = 2 * (x[1:5].double() @ w.double()) + 2 * items.own.double()
        torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-4)
        part = torch.empty(4, 5)
        tensors = {"x": x, "w": w, "y": torch.empty(4, 3), "part": part}
        items.issue(tensors, False)
        assert torch.equal(y, tensors["y"])
        assert [ran[:2] for ran in native] == [ran[:2] for ran in items.program.ran] == [(0, 2), (2, 3)]
        for (_, _, bases, streams), (_, _, in_python, _) in zip(native, items.program.ran, strict=True):
            assert bases[:3] == (y.data_ptr(), x.data_ptr(), w.data_ptr())
            assert bases[4] == in_python[4] == 77
            assert streams == (5, 11)
        assert items.launched == [(native[1][2], 11), (items.program.ran[1][2], 11)]
        items.launched.clear()
        assert y.data_ptr() not in before, "earlier results are overwritten"
        before.add(y.data_ptr())
        items.program.ran = []
        items.kept_results = [*getattr(items, "kept_results", []), y]  # type: ignore[attr-defined]


def test_an_error_ends_the_run_and_is_passed_on(items: Items) -> None:
    run = known(items)
    with pytest.raises(Broken) as found:
        run.run([torch.randn(6, 7), torch.randn(8, 3)])
    assert isinstance(found.value.__cause__, RuntimeError)
    assert len(items.program.ran) == 1, "items after the error are issued"
    with pytest.raises(ValueError, match="a call has 2 inputs"):
        run.run([torch.randn(6, 7)])
    run.run([torch.randn(6, 7), torch.randn(7, 3)])


def test_items_that_python_must_issue(items: Items) -> None:
    assert items.run_of() is not None
    items.items.append(issue._Item(issue._CALL, items.items[1].what, 1))  # on another stream
    assert items.run_of() is None
    items.items[-1] = issue._Item(issue._CALL, lambda tensors: None, 0)
    assert items.run_of() is None
    del items.items[-1]
    assert items.run_of(inputs=["x"]) is None
    items._rows_at = [("x", 4)]
    assert items.run_of() is None


def test_memory_is_let_go(items: Items) -> None:
    run, own = known(items), weakref.ref(items.own)
    del items.own, items.items[2]
    gc.collect()
    assert own() is not None
    run.let_go()
    assert own() is None
    with pytest.raises(RuntimeError, match="closed"):
        run.run([torch.randn(6, 7), torch.randn(7, 3)])
