"""The native CPU kernel of embedding_all_to_all (`cpu_kernel`), except for sums: copies and flags of slices, waits, its
timeline, and refused input.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from cpu_kernel import DIRECT, PUT, assert_same_bits, problem, reference, run

from weft import _core


@pytest.mark.parametrize("remote_first", [True, False])
@pytest.mark.parametrize("slice_size", [1, 2, 32])
@pytest.mark.parametrize("threads", [1, 2])
def test_put_copies_and_flags_each_slice_once(remote_first: bool, slice_size: int, threads: int) -> None:
    owners = (
        0,
        0,
        1,
        0,
        0,
        0,
        2,
        2,
    )  # adjacent runs: rank 0 has 2 and 3 slots, rank 1 has 1, rank 2 has 2, rank 3 none
    p = problem(10, dims=(4, 16, 8, 3, 5, 16, 7, 9), batch_sizes=(5, 0, 70, 2), owners=owners)
    wanted_slices = [sum(-(-n // slice_size) for n in runs) for runs in ([2, 3], [1], [2], [])]
    result = run(p, transport=PUT, slice_size=slice_size, remote_first=remote_first, threads=threads, epoch=7)
    assert result.slices == wanted_slices
    for rank, (counts, slices) in enumerate(zip(result.counts, wanted_slices, strict=True)):
        assert counts[5] == slices * (sum(p.batch_sizes) - p.batch_sizes[rank])
        assert counts[6] == slices * sum(p.batch_sizes)
        for dest, n in enumerate(p.batch_sizes):
            assert (result.flags[dest][rank][: n * slices] == 7).all()
            assert not result.flags[dest][rank][n * slices :].any()
    assert_same_bits(result, reference(p))


def test_direct_copies_nothing_and_raises_no_flag() -> None:
    result = run(problem(11))
    assert all(counts[5:7] == (0, 0) for counts in result.counts)
    assert not any(flags.any() for block in result.flags for flags in block)


def test_slice_runs() -> None:
    # column and dim of each slot; between the second and the third another rank owns columns
    lines = [(0, 1, dim, 0, column, 0) for column, dim in [(0, 4), (4, 8), (20, 4), (24, 4), (28, 4)]]
    slots = np.array(lines, dtype=np.int64)
    assert _core.slice_runs(slots, 2) == [(0, 2, 0, 12), (2, 2, 20, 8), (4, 1, 28, 4)]
    assert _core.slice_runs(slots[:0], 2) == []
    with pytest.raises(ValueError, match="slice_size=0"):
        _core.slice_runs(slots, 0)


def test_wait_flags_waits_for_the_last_one() -> None:
    flags = np.full(1000, 5, dtype=np.int64)
    failed = np.zeros(1, dtype=np.int64)
    wait = (flags.ctypes.data, len(flags), 5)
    assert _core.wait_flags(*wait, 1.0, failed.ctypes.data)[0] == 0
    flags[700] = 4
    assert _core.wait_flags(*wait, 0.01, failed.ctypes.data) == (1, 700, 4)
    raiser = threading.Thread(target=lambda: (time.sleep(0.05), flags.__setitem__(700, 6)))
    raiser.start()
    assert _core.wait_flags(*wait, 10.0, failed.ctypes.data)[0] == 0
    raiser.join()
    flags[3], failed[0] = 0, 1
    assert _core.wait_flags(*wait, 10.0, failed.ctypes.data) == (2, 3, 0)
    assert (
        _core.wait_flags(*wait[:2], 0, 10.0, failed.ctypes.data)[0] == 0
    )  # all flags are set, so the failure is not reported


@pytest.mark.parametrize("transport", [DIRECT, PUT], ids=["direct", "put"])
@pytest.mark.parametrize("threads", [1, 2])
def test_timeline_accounts_for_every_byte(transport: int, threads: int) -> None:
    p = problem(12, dims=(4, 16, 8, 3), batch_sizes=(130, 70), owners=(0, 0, 1, 0))
    timelines = [np.full((100, 5), -1, dtype=np.int64) for _ in range(2)]
    before = time.monotonic_ns()
    result = run(p, transport=transport, threads=threads, timelines=timelines)
    after = time.monotonic_ns()
    for rank, (counts, records) in enumerate(zip(result.counts, timelines, strict=True)):
        events = counts[7]
        assert 0 < events <= 100
        kind, thread, start, end, left = records[:events].T
        assert (records[events:] == -1).all()
        assert 1 in kind
        assert set(kind) <= {0, 1}
        assert (thread >= 0).all()
        assert (thread < threads).all()
        assert (before <= start).all()
        assert (start <= end).all()
        assert (end <= after).all()
        assert (left[kind == 0] == 0).all()
        own_dims = sum(p.tables[s.table].shape[1] for s in p.slots if s.owner == rank)
        assert left.sum() == 4 * own_dims * (sum(p.batch_sizes) - p.batch_sizes[rank])


def test_remote_samples_come_first() -> None:
    """Samples are processed in groups of at most 4096. With remote_first, samples for other ranks are in the first
    groups.
    """
    p = problem(12, dims=(4, 4), batch_sizes=(4200, 4200), owners=(0, 1))
    for remote_first, rank, expected in ((True, 0, [1, 1, 0]), (True, 1, [1, 1, 0]), (False, 0, [0, 1, 1])):
        timelines = [np.zeros((100, 5), dtype=np.int64) for _ in range(2)]
        result = run(p, transport=DIRECT, remote_first=remote_first, timelines=timelines)
        assert timelines[rank][: result.counts[rank][7], 0].tolist() == expected


def test_timeline_that_is_too_short_counts_on() -> None:
    p = problem(12, batch_sizes=(130, 70))
    full = [np.zeros((100, 5), dtype=np.int64) for _ in range(2)]
    short = [np.zeros((1, 5), dtype=np.int64) for _ in range(2)]
    assert [c[7] for c in run(p, timelines=full).counts] == [c[7] for c in run(p, timelines=short).counts]


def test_bad_arguments_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="isa='sse9' cannot run on this machine"):
        run(problem(), isa="sse9")
    with pytest.raises(ValueError, match="n_threads=0"):
        run(problem(), threads=0)
    with pytest.raises(ValueError, match="slice_size=0"):
        run(problem(), slice_size=0)
