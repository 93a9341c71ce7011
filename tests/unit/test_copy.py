"""`_core.copy_2d` against numpy: it copies every byte of the rows, and writes no other byte."""

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
