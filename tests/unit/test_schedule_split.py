"""Cuts of a shard: pieces are contiguous and cover the shard, none is empty, and they have the requested sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.builders import NotApplicableError
from weft.builders.operands import WHOLE_TILES, split

PROPORTIONS = st.lists(st.integers(1, 9), min_size=2, max_size=5)


@given(st.integers(0, 10**5), st.integers(1, 9) | PROPORTIONS)
def test_pieces_are_all_of_it_in_the_sizes_that_were_asked_for(extent: int, pieces: int | list[int]) -> None:
    parts = [1] * pieces if isinstance(pieces, int) else pieces
    try:
        found = split(extent, pieces if isinstance(pieces, int) else ":".join(map(str, parts)), what="rows")
    except NotApplicableError:
        assert extent < 9 * len(parts), "some piece has less than one row"
        return
    assert [begin for begin, _ in found] == [0, *itertools.accumulate(count for _, count in found)][:-1]
    assert sum(count for _, count in found) == extent
    rounded = WHOLE_TILES if isinstance(pieces, list) and extent >= WHOLE_TILES * sum(parts) else 1
    for (begin, count), part in zip(found, parts, strict=True):
        assert begin % rounded == 0
        assert extent == 0 or count > 0
        assert abs(count - extent * part / sum(parts)) <= rounded


@pytest.mark.parametrize(
    ("extent", "pieces", "sizes"),
    [
        (8192, "2:1:1", [4096, 2048, 2048]),
        (8192, "3:1", [6144, 2048]),
        (4000, "3:1", [2944, 1056]),
        (10, "2:1:1", [5, 2, 3]),
        (10, 3, [4, 3, 3]),
    ],
)
def test_sizes(extent: int, pieces: int | str, sizes: list[int]) -> None:
    assert [count for _, count in split(extent, pieces, what="rows")] == sizes


@pytest.mark.parametrize(("extent", "pieces", "how"), [(2, "2:1:1", "as 2:1:1"), (2, 3, "into 3 pieces")])
def test_what_cannot_be_cut(extent: int, pieces: int | str, how: str) -> None:
    with pytest.raises(NotApplicableError, match=rf"rows of a shard \({extent}\) cannot be cut {how}"):
        split(extent, pieces, what="rows of a shard")


def test_no_pieces() -> None:
    with pytest.raises(NotApplicableError, match="the number of pieces of rows is 0: it must be at least 1"):
        split(2, 0, what="rows")
