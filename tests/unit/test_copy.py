"""`_core.copy_2d` and `_core.copy_columns` against numpy: they copy every byte of the rows, and write no other byte."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import _core


@given(
    rows=st.integers(0, 17),
    width=st.integers(0, 300),
    gaps=st.tuples(st.sampled_from([0, 0, 1, 7, 64]), st.sampled_from([0, 0, 1, 8, 100])),
    starts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_copies_the_rows_and_nothing_beside_them(rows, width, gaps, starts, seed):
    random = np.random.default_rng(seed)
    dst_pitch, src_pitch = width + gaps[0], width + gaps[1]
    dst = random.integers(0, 256, starts[0] + rows * dst_pitch + 16, dtype=np.uint8)
    src = random.integers(0, 256, starts[1] + rows * src_pitch + 16, dtype=np.uint8)
    want, unchanged = dst.copy(), src.copy()
    for row in range(rows):
        to, at = starts[0] + row * dst_pitch, starts[1] + row * src_pitch
        want[to : to + width] = src[at : at + width]
    _core.copy_2d(dst.ctypes.data + starts[0], dst_pitch, src.ctypes.data + starts[1], src_pitch, width, rows)
    np.testing.assert_array_equal(dst, want)
    np.testing.assert_array_equal(src, unchanged)


@pytest.mark.parametrize(
    ("dst_pitch", "src_pitch", "width", "rows", "named"),
    [
        (8, 8, -1, 2, "width_bytes=-1"),
        (8, 8, 4, -2, "rows=-2"),
        (3, 8, 4, 2, "dst_pitch=3"),
        (8, 3, 4, 2, "src_pitch=3"),
        (2**62, 8, 4, 2, "< 2^63"),
    ],
)
def test_sizes_that_make_no_copy_are_refused_with_their_values(dst_pitch, src_pitch, width, rows, named):
    with pytest.raises(ValueError, match=named.replace("^", r"\^")):
        _core.copy_2d(0, dst_pitch, 0, src_pitch, width, rows)


@given(
    rows=st.integers(0, 9),
    widths=st.lists(st.integers(0, 40), max_size=5),
    threads=st.integers(1, 3),
    repeated=st.sampled_from([1, 1, 1, 2000]),  # with 2000, several threads copy
    seed=st.integers(0, 2**32 - 1),
)
def test_columns_go_to_their_places_and_nothing_beside_them(rows, widths, threads, repeated, seed):
    random, rows = np.random.default_rng(seed), rows * repeated
    src = random.integers(0, 256, (rows, sum(widths) + 3), dtype=np.uint8)
    dst = random.integers(0, 256, (rows, sum(widths) + 5 * len(widths) + 2), dtype=np.uint8)
    want, unchanged, pieces, at = dst.copy(), src.copy(), [], 0
    for number in random.permutation(len(widths)):
        begin, width = sum(widths[:number]), widths[number]
        want[:, at : at + width] = src[:, begin : begin + width]
        pieces.append((dst.ctypes.data + at, dst.shape[1], src.ctypes.data + begin, src.shape[1], width))
        at += width + 5
    _core.copy_columns(np.array(pieces, dtype=np.int64).reshape(-1, 5), rows=rows, n_threads=threads)
    np.testing.assert_array_equal(dst, want)
    np.testing.assert_array_equal(src, unchanged)


def test_bad_pieces_of_columns_are_refused():
    with pytest.raises(ValueError, match="pieces has 4 columns"):
        _core.copy_columns(np.zeros((1, 4), dtype=np.int64), rows=1, n_threads=1)
    with pytest.raises(ValueError, match="n_threads=0"):
        _core.copy_columns(np.zeros((1, 5), dtype=np.int64), rows=1, n_threads=0)
    with pytest.raises(ValueError, match="src_pitch=3"):
        _core.copy_columns(np.array([[0, 8, 0, 3, 4]], dtype=np.int64), rows=2, n_threads=1)


def test_nothing_to_copy_touches_no_memory():
    _core.copy_2d(0, 0, 0, 0, 0, 5)
    _core.copy_2d(0, 8, 0, 8, 8, 0)


def test_a_signal_set_afterwards_covers_the_copy():
    """A thread that has waited for the signal reads the bytes of the same round, for 2,000 rounds on one buffer."""
    rounds, src, dst = 2000, np.zeros((4, 64), np.uint8), np.zeros((4, 96), np.uint8)
    counters = np.zeros(3 * _core.COUNTER_BYTES, np.uint8)  # space for two counters, aligned to their size
    base = -(-counters.ctypes.data // _core.COUNTER_BYTES) * _core.COUNTER_BYTES
    full, free = base, base + _core.COUNTER_BYTES
    wrong: list[int] = []

    def reader() -> None:
        for i in range(1, rounds + 1):
            if _core.signal_wait(full, i, 20.0, 0)[0] != 0 or not (dst[:, :64] == i % 256).all():
                wrong.append(i)
            _core.signal_set(free, i)

    thread = threading.Thread(target=reader)
    thread.start()
    for i in range(1, rounds + 1):
        src[:] = i % 256
        _core.copy_2d(dst.ctypes.data, 96, src.ctypes.data, 64, 64, 4)
        _core.signal_set(full, i)
        assert _core.signal_wait(free, i, 20.0, 0)[0] == 0
    thread.join()
    assert wrong == []
