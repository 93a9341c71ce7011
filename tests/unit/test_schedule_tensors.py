"""The check that memory which a run writes overlaps no other tensor of the run. Matrices in one tensor, with any
strides, are compared with sets of elements.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.on_ranks import told

from weft.operator.schedule_tensors import _check_apart, _memory_of
from weft.schedule import Buffer

BASE = torch.zeros(400, dtype=torch.float16)


@st.composite
def matrices(draw: st.DrawFn, pitch: int | None = None) -> torch.Tensor:
    """Draw a matrix in `BASE`: stored by rows or by columns, with or without gaps, or with overlapping rows."""
    rows, cols = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    pitch = draw(st.integers(0, 12)) if pitch is None else pitch
    strides = (pitch, 1) if draw(st.booleans()) else (1, pitch)
    return BASE.as_strided((rows, cols), strides, draw(st.integers(0, 40)))


def addresses(t: torch.Tensor) -> set[int]:
    (rows, cols), (by_row, by_col) = t.shape, t.stride()
    return {t.storage_offset() + i * by_row + j * by_col for i in range(rows) for j in range(cols)}


def is_refused(a: torch.Tensor, b: torch.Tensor, written: tuple[str, str]) -> bool:
    buffers = [Buffer(name, 1, 1, "fp16", role) for name, role in zip("ab", written, strict=True)]  # type: ignore[arg-type]
    error = told(lambda: _check_apart([_memory_of(buffer, t) for buffer, t in zip(buffers, (a, b), strict=True)]))
    assert error == "nothing" or "overlap in memory" in error
    return error != "nothing"


WRITTEN = st.sampled_from([("output", "input"), ("input", "output"), ("output", "output")])


@settings(max_examples=200, deadline=None)
@given(matrices(), matrices(), WRITTEN)
def test_memory_in_common_is_refused(a: torch.Tensor, b: torch.Tensor, written: tuple[str, str]) -> None:
    if addresses(a) & addresses(b):
        assert is_refused(a, b, written)


@settings(max_examples=200, deadline=None)
@given(matrices(pitch=7), matrices(pitch=7), WRITTEN)
def test_rows_and_columns_of_one_matrix_are_refused_only_if_they_overlap(
    a: torch.Tensor, b: torch.Tensor, written: tuple[str, str]
) -> None:
    assert is_refused(a, b, written) == bool(addresses(a) & addresses(b))


@pytest.mark.parametrize("second", ["input", "output"])
def test_inputs_may_share_memory(second: str) -> None:
    assert is_refused(BASE[:6].view(2, 3), BASE[5:11].view(2, 3), ("input", second)) == (second == "output")
