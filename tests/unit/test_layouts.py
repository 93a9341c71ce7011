"""Signatures of calls, and layouts of tensors.

Signatures are equal if and only if calls differ only in tensor addresses. A call has no signature if a tensor's type
may store its values elsewhere, or if a gradient is wanted. Layouts also contain addresses.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.runtime.layouts import READER, layout_of

pytestmark = pytest.mark.skipif(READER is None, reason="tensors of this torch offer no DLPack exchange API")

NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False))
SHAPES = st.lists(st.integers(0, 4), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    made = torch.zeros(draw(SHAPES)).to(draw(DTYPES))
    return made.t() if made.dim() == 2 and draw(st.booleans()) else made


CALLS = st.lists(st.one_of(NUMBERS, tensors(), st.lists(st.one_of(NUMBERS, tensors()), max_size=3)), max_size=4).map(
    tuple
)


def described(item: Any) -> Any:
    """Return the contents of a signature, read from torch."""
    if isinstance(item, torch.Tensor):
        return "tensor", tuple(item.shape), item.stride(), item.dtype, item.device
    if isinstance(item, list | tuple):
        return [described(one) for one in item]
    return type(item).__name__, item.hex() if isinstance(item, float) else item  # distinguishes -0.0 from 0.0


def signature(call: tuple[Any, ...], gradients: bool = True) -> bytes | None:
    assert READER is not None
    return READER.signature(call, gradients)


@given(CALLS, CALLS)
def test_equal_signatures_are_equal_calls(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (signature(one) == signature(other)) == (described(one) == described(other))


@given(CALLS)
def test_where_tensors_lie_does_not_count(call: tuple[Any, ...]) -> None:
    def elsewhere(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype)
        return [elsewhere(one) for one in item] if isinstance(item, list) else item

    assert signature(tuple(elsewhere(item) for item in call)) == signature(call) is not None


class Other(torch.Tensor):
    pass


NEGATED = torch._neg_view(torch.zeros(2))


@pytest.mark.parametrize(
    "item", [Other(), "text", 1j, 2**64, (1,), torch.float32, torch.zeros(2, device="meta"), NEGATED], ids=str
)
def test_of_anything_else_there_is_none(item: Any) -> None:
    assert signature((torch.zeros(2), item)) is None
    assert signature((torch.zeros(2), [item])) is None


def test_of_tensors_whose_storage_does_not_hold_them_there_is_none() -> None:
    whole = torch.zeros(12)
    given = {
        "begin": whole[:4], "middle": whole[4:8], "rows": whole.view(3, 4)[:2], "columns": whole.view(3, 4)[:, :1].t(),
        "repeated": whole[3:4].expand(5), "empty": whole[12:],
    }  # fmt: skip

    def held() -> set[str]:
        found = {name for name, one in given.items() if signature((1, one)) is not None}
        assert found == {name for name, one in given.items() if signature(([one],)) is not None}
        return found

    assert held() == given.keys()
    whole.untyped_storage().resize_(4 * 8)
    assert held() == given.keys() - {"columns"}
    whole.untyped_storage().resize_(4 * 8 - 1)
    assert held() == {"begin", "repeated", "empty"}
    whole.untyped_storage().resize_(0)
    assert held() == {"empty"}


def test_gradients() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert None is not signature((weight,)) != signature((weight.detach(),))
    assert signature(([weight],)) != signature(([weight.detach()],))
    assert signature((weight,), False) == signature((weight.detach(),), True)


def test_layouts_say_where() -> None:
    assert READER is not None
    one = [torch.zeros(4, 4) for _ in range(3)]
    before = READER.read(one, True)
    assert READER.read(one, False) == before is not None
    assert READER.read([*one, torch.nn.Parameter(torch.zeros(1))], True) is None
    for change in (
        lambda t: t.set_(torch.zeros(4, 4)),
        lambda t: t.resize_(3, 4),
        lambda t: t.t_(),
        lambda t: setattr(t, "data", t.data.view(torch.int32)),
    ):
        changed = [torch.empty(0).set_(t) for t in one]
        assert READER.read(changed, True) == before
        change(changed[1])
        assert READER.read(changed, True) != before


@pytest.mark.parametrize("item", [Other(), "text", None, torch.zeros(2, device="meta")], ids=str)
def test_layouts_of_anything_else_there_are_none(item: Any) -> None:
    assert layout_of([torch.zeros(2), torch.nn.Parameter(torch.zeros(2), requires_grad=False)]) is not None
    assert layout_of([torch.zeros(2), item]) is None


def test_threads_do_not_read_among_each_other() -> None:
    """Inside a torch mode, reading an attribute runs Python code, so threads can alternate in the middle of a read."""
    calls = [tuple(torch.zeros(rows, cols) for cols in range(1, 5)) for rows in (3, 5)]
    wanted, wrong = [signature(call) for call in calls], []

    def read(number: int) -> None:
        with torch.device("cpu"):
            for _ in range(5_000):
                assert READER is not None
                if READER.signature(calls[number], True) != wanted[number]:
                    wrong.append(number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=read, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
