"""The native CPU kernel of embedding_all_to_all, several ranks inside one process: every rank's output is an ordinary
tensor here, and the kernel is called once per rank with all outputs' addresses.

Cheapest first: a known answer; bit-exact against a loop in bag order, over dtypes, widths and options; agreement with
nn.EmbeddingBag in float64; bad indices; the slice plan's copies and flags; waits; the timeline.

Bit-exact means: rows widened to fp32, added one after another from +0 in the bag's order, a weight's product rounded
before it is added (no fused multiply-add), the mean divided by the length, half types rounded to nearest even. The loop
below does just that with numpy, so transports, orders, rank counts, slice sizes, thread counts and instruction sets,
which must all equal it, equal each other.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import _core
from weft.embedding.hashing import hash_ids

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIRECT, PUT = 0, 1
IGNORE, WARNING, FATAL = 0, 1, 2
WIDTHS = (1, 2, 3, 5, 7, 16, 33, 64, 92, 100, 128, 256, 1000)


@dataclass
class Slot:
    table: int
    feature: int
    mean: bool
    owner: int
    column: int = 0


@dataclass
class Problem:
    """Tables, slots and the sparse input of every feature for the global batch."""

    tables: list[torch.Tensor]
    slots: list[Slot]
    lengths: list[np.ndarray]  # per feature, [batch]
    values: list[np.ndarray]  # per feature, [sum of lengths]
    weights: list[np.ndarray] | None
    batch_sizes: tuple[int, ...]
    index_dtype: type = np.int64
    offset_dtype: type = np.int64
    total_dim: int = field(init=False)

    def __post_init__(self) -> None:
        column = 0
        for slot in self.slots:
            slot.column = column
            column += self.tables[slot.table].shape[1]
        self.total_dim = column

    @property
    def world(self) -> int:
        return len(self.batch_sizes)

    def rows(self, feature: int, sample: int) -> slice:
        ends = np.cumsum(self.lengths[feature])
        return slice(int(ends[sample] - self.lengths[feature][sample]), int(ends[sample]))


def problem(
    seed: int = 0,
    *,
    dims: tuple[int, ...] = (16, 5, 64),
    rows: int = 37,
    batch_sizes: tuple[int, ...] = (6, 3),
    longest: int = 4,
    dtype: torch.dtype = torch.float32,
    weighted: bool = False,
    means: bool = True,
    shared_feature: bool = False,
    two_features_on_first: bool = False,
    index_dtype: type = np.int64,
    offset_dtype: type = np.int64,
    owners: tuple[int, ...] | None = None,
) -> Problem:
    rng = np.random.default_rng(seed)
    world, batch = len(batch_sizes), sum(batch_sizes)
    tables = [
        torch.from_numpy(rng.standard_normal((rows + t, d)).astype(np.float32)).to(dtype) for t, d in enumerate(dims)
    ]
    pairs = [(0, len(dims))] if two_features_on_first else []
    pairs += [(t, 0 if shared_feature else t) for t in range(len(dims))]
    slots = [
        Slot(
            table, feature, bool(means and i % 2), (owners or (lambda: tuple(rng.integers(0, world, len(pairs))))())[i]
        )
        for i, (table, feature) in enumerate(pairs)
    ]
    features = len(dims) + 1
    lengths = [rng.integers(0, longest + 1, batch) for _ in range(features)]
    values = [rng.integers(0, rows, int(n.sum())) for n in lengths]
    weights = [rng.standard_normal(len(v)).astype(np.float32) for v in values] if weighted else None
    return Problem(tables, slots, lengths, values, weights, batch_sizes, index_dtype, offset_dtype)


@dataclass
class Result:
    outputs: list[torch.Tensor]
    counts: list[tuple[int, ...]]  # per rank: what the kernel returned
    flags: list[list[np.ndarray]]  # [destination][source]
    slices: list[int]  # per rank: slices of a sample


def run(
    p: Problem,
    *,
    transport: int = DIRECT,
    remote_first: bool = True,
    slice_size: int = 32,
    hash: bool = False,
    bounds: int = WARNING,
    threads: int = 1,
    epoch: int = 1,
    isa: str = "",
    timelines: list[np.ndarray] | None = None,
) -> Result:
    """All ranks' calls, one after another, into outputs full of NaN with guard rows around them; around each rank's
    values lie indices that would be counted as bad."""
    dtype = p.tables[0].dtype
    guarded = [torch.full((n + 2, p.total_dim), torch.nan, dtype=dtype) for n in p.batch_sizes]
    outputs = [g[1:-1] for g in guarded]
    slots_of = [[s for s in p.slots if s.owner == rank] for rank in range(p.world)]
    arrays, slices = [], []
    for own in slots_of:
        keys = list(dict.fromkeys(s.feature for s in own))
        lines = [
            (p.tables[s.table].data_ptr(), *p.tables[s.table].shape, keys.index(s.feature), s.column, s.mean)
            for s in own
        ]
        arrays.append((keys, np.array(lines, dtype=np.int64).reshape(-1, 6)))
        slices.append(len(_core.slice_runs(arrays[-1][1], slice_size)))
    flags = [[np.zeros(max(n * slices[src], 1), dtype=np.int64) for src in range(p.world)] for n in p.batch_sizes]
    counts = []
    for rank, (keys, lines) in enumerate(arrays):
        outside = np.full(8, -(2**30))
        values = np.concatenate([outside, *(p.values[k] for k in keys), outside]).astype(p.index_dtype)
        lengths = np.concatenate([p.lengths[k] for k in keys] or [np.zeros(0)])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(p.offset_dtype)
        weights = (
            np.concatenate([p.weights[k] for k in keys] or [np.zeros(0)]).astype(np.float32) if p.weights else None
        )
        counts.append(
            _core.embedding_all_to_all(
                slots=lines,
                values=values[8:].ctypes.data,
                values_bits=values.itemsize * 8,
                n_values=len(values) - 16,
                offsets=offsets.ctypes.data,
                offsets_bits=offsets.itemsize * 8,
                per_sample_weights=0 if weights is None else weights.ctypes.data,
                batch_starts=np.concatenate([[0], np.cumsum(p.batch_sizes)]).astype(np.int64),
                rank=rank,
                outputs=np.array([o.data_ptr() for o in outputs], dtype=np.int64),
                output_stride=p.total_dim,
                dtype=DTYPES.index(dtype),
                transport=transport,
                remote_first=remote_first,
                slice_size=slice_size,
                hash=hash,
                bounds=bounds,
                n_threads=threads,
                flags=np.array([flags[dest][rank].ctypes.data for dest in range(p.world)], dtype=np.int64),
                epoch=epoch,
                timeline=None if timelines is None else timelines[rank],
                isa=isa,
            )
        )
    for g in guarded:
        assert g[0].isnan().all(), "the row before an output was written"
        assert g[-1].isnan().all(), "the row after an output was written"
    return Result(outputs, counts, flags, slices)


def reference(p: Problem, *, hash: bool = False) -> torch.Tensor:
    """The loop in bag order, [global batch, total_dim] in the tables' dtype."""
    out = torch.zeros(sum(p.batch_sizes), p.total_dim, dtype=p.tables[0].dtype)
    for slot in p.slots:
        table = p.tables[slot.table].float().numpy()
        for sample in range(len(out)):
            bag = p.rows(slot.feature, sample)
            ids = p.values[slot.feature][bag]
            picked = hash_ids(torch.from_numpy(ids), len(table)).numpy() if hash else ids
            total = np.zeros(table.shape[1], dtype=np.float32)
            for i, row in enumerate(picked):
                x = table[row] if 0 <= row < len(table) else np.zeros_like(total)
                total += x if p.weights is None else x * p.weights[slot.feature][bag][i]
            if slot.mean and len(ids) > 0:
                total /= np.float32(len(ids))
            out[sample, slot.column : slot.column + len(total)] = torch.from_numpy(total).to(out.dtype)
    return out


def assert_same_bits(result: Result, wanted: torch.Tensor) -> None:
    got = torch.cat(result.outputs)
    as_bits = torch.int32 if got.element_size() == 4 else torch.int16
    different = (got.view(as_bits) != wanted.view(as_bits)).nonzero()
    assert len(different) == 0, (
        f"first of {len(different)} differences at {different[0].tolist()}: {got[tuple(different[0])]}"
    )


def test_known_answer() -> None:
    table = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    p = Problem(
        [table], [Slot(0, 0, False, 0), Slot(0, 0, True, 0)], [np.array([2, 0])], [np.array([3, 1])], None, (1, 1)
    )
    result = run(p)
    assert result.outputs[0].tolist() == [[12, 14, 16, 6, 7, 8]]
    assert result.outputs[1].tolist() == [[0] * 6]
    assert result.counts[0] == (0, -1, -1, -1, 0, 0, 0, 0)


@pytest.mark.parametrize("isa", _core.isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_every_width_matches_the_loop(isa: str, dtype: torch.dtype, weighted: bool) -> None:
    p = problem(1, dims=WIDTHS, dtype=dtype, weighted=weighted, batch_sizes=(3, 4), longest=5)
    assert_same_bits(run(p, isa=isa), reference(p))


@pytest.mark.parametrize("isa", _core.isas())
def test_widths_around_the_registers(isa: str) -> None:
    p = problem(2, dims=(*range(1, 70), *range(248, 276, 3), 511, 512, 513, 528), batch_sizes=(2,), longest=3)
    assert_same_bits(run(p, isa=isa), reference(p))


@pytest.mark.parametrize("isa", _core.isas())
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_types_round_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    """Every bit pattern but NaN as a bag of one; sums of two that need rounding, overflow or are subnormal."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    patterns = torch.where(patterns.isnan(), torch.zeros_like(patterns), patterns)
    table = torch.cat([patterns, patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]]).reshape(
        -1, 16
    )
    half = len(table) // 2
    ids = np.stack([np.arange(half), np.arange(half) + half], axis=1)
    for length in (1, 2):
        p = Problem(
            [table], [Slot(0, 0, False, 0)], [np.full(half, length)], [ids[:, :length].reshape(-1)], None, (half,)
        )
        summed = table.float()[ids[:, :length]].cumsum(dim=1)[:, -1] + 0.0
        got, wanted = run(p, isa=isa).outputs[0], summed.to(dtype)
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(0, 1, -1), wanted.nan_to_num(0, 1, -1))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_options_match_the_loop(data: st.DataObject) -> None:
    draw = data.draw
    p = problem(
        draw(st.integers(0, 10**6)),
        dims=tuple(draw(st.lists(st.sampled_from((*range(1, 20), 33, 64, 92, 128, 260)), min_size=1, max_size=6))),
        rows=draw(st.sampled_from([1, 2, 50])),
        batch_sizes=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))),
        longest=draw(st.sampled_from([0, 1, 3, 20])),
        dtype=draw(st.sampled_from(DTYPES)),
        weighted=draw(st.booleans()),
        shared_feature=draw(st.booleans()),
        two_features_on_first=draw(st.booleans()),
        index_dtype=draw(st.sampled_from([np.int32, np.int64])),
        offset_dtype=draw(st.sampled_from([np.int32, np.int64])),
    )
    hashed = draw(st.booleans())
    result = run(
        p,
        transport=draw(st.sampled_from([DIRECT, PUT])),
        remote_first=draw(st.booleans()),
        slice_size=draw(st.sampled_from([1, 2, 3, 32])),
        hash=hashed,
        bounds=draw(st.sampled_from([IGNORE, WARNING, FATAL])),
        threads=draw(st.sampled_from([1, 2, 5])),
        isa=draw(st.sampled_from(_core.isas())),
    )
    assert_same_bits(result, reference(p, hash=hashed))


@pytest.mark.parametrize("transport", [DIRECT, PUT], ids=["direct", "put"])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_enough_for_many_blocks_and_streaming_stores(transport: int, threads: int) -> None:
    """Many blocks, batches of addresses and cache-bypassing stores (large aligned outputs)."""
    p = problem(
        3,
        dims=(64, 16, 128, 16, 256),
        rows=500,
        batch_sizes=(4500, 4400),
        longest=7,
        means=False,
        owners=(0, 0, 1, 0, 1),
    )
    result = run(p, transport=transport, threads=threads)
    for isa in _core.isas()[1:]:
        assert_same_bits(run(p, transport=transport, threads=threads, isa=isa), torch.cat(result.outputs))
    got = torch.cat(result.outputs)
    for slot in p.slots:
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(p.lengths[slot.feature])]))
        table = p.tables[slot.table].double()
        wanted = torch.nn.functional.embedding_bag(
            torch.from_numpy(p.values[slot.feature]), table, offsets, mode="sum", include_last_offset=True
        )
        torch.testing.assert_close(
            got[:, slot.column : slot.column + table.shape[1]].double(), wanted, rtol=0, atol=7 * 2**-24 * 30
        )


@pytest.mark.parametrize("longest", [9000, 150, 20])
def test_more_rows_than_a_batch_of_addresses(longest: int) -> None:
    """A bag alone, a block's bags of one slot, and those of several slots overflow the addresses found at once."""
    batch = max(3, 40_000 // longest)
    p = problem(4, dims=(8, 300, 3), rows=100, batch_sizes=(batch // 3, batch - batch // 3), longest=longest)
    assert_same_bits(run(p), reference(p))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("weighted", "mean"), [(False, False), (False, True), (True, False)], ids=["sum", "mean", "weighted"]
)
def test_error_against_float64_is_no_worse_than_embedding_bag(dtype: torch.dtype, weighted: bool, mean: bool) -> None:
    """At most twice the error of nn.EmbeddingBag in the tables' dtype, against nn.EmbeddingBag in float64 (which has no
    weighted mean: the loop in bag order covers that)."""
    p = problem(5, dims=(64,), rows=200, batch_sizes=(40,), longest=50, dtype=dtype, weighted=weighted, owners=(0,))
    p.slots[0].mean = mean
    table, ids = p.tables[0], torch.from_numpy(p.values[0])
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(p.lengths[0])]))

    def torch_bag(as_dtype: torch.dtype) -> torch.Tensor:
        bag = torch.nn.EmbeddingBag.from_pretrained(
            table.to(as_dtype), mode="mean" if mean else "sum", include_last_offset=True
        )
        weights = torch.from_numpy(p.weights[0]).to(as_dtype) if p.weights else None
        return bag(ids, offsets, weights).double()

    exact = torch_bag(torch.float64)
    ours = (run(p).outputs[0].double() - exact).abs().max()
    theirs = (torch_bag(dtype) - exact).abs().max()
    assert ours <= 2 * theirs + 1e-12


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_warning_counts_bad_indices_and_reads_zeros(threads: int, index_dtype: type) -> None:
    p = problem(6, dims=(16, 5), batch_sizes=(20, 20), longest=4, index_dtype=index_dtype, owners=(0, 0))
    p.lengths[1][:] = 3
    p.values[1] = np.zeros(120, dtype=np.int64)
    p.values[1][[31, 32, 100]] = [-1, len(p.tables[1]), 2**31 - 1]
    result = run(p, threads=threads)
    assert result.counts[0][:5] == (3, 1, 10, 1, -1)  # count, then slot, sample, position in the bag, value
    assert result.counts[1][:5] == (0, -1, -1, -1, 0)
    assert_same_bits(result, reference(p))


@pytest.mark.parametrize("transport", [DIRECT, PUT], ids=["direct", "put"])
def test_fatal_writes_nothing(transport: int) -> None:
    p = problem(7, dims=(16, 5), batch_sizes=(4, 4), longest=4, owners=(0, 0))
    p.lengths[1] = np.array([0, 2, 0, 1, 1, 1, 1, 1])
    p.values[1] = np.array([0, 1, 2, 99, 0, 0, -5])
    result = run(p, bounds=FATAL, transport=transport)
    assert result.counts[0] == (2, 1, 4, 0, 99, 0, 0, 0)
    assert torch.cat(result.outputs).isnan().all()
    assert not any(flags.any() for block in result.flags for flags in block)


def test_hash_takes_any_64_bit_id() -> None:
    p = problem(8, dims=(16, 4), batch_sizes=(5,), longest=3)
    rng = np.random.default_rng(0)
    p.values = [rng.integers(-(2**63), 2**63 - 1, len(v)) for v in p.values]
    result = run(p, hash=True, bounds=FATAL)
    assert result.counts[0][0] == 0
    assert_same_bits(result, reference(p, hash=True))


@pytest.mark.parametrize("batch", [4, 400])
def test_offsets_that_lie_read_nothing_outside(batch: int) -> None:
    p = problem(9, dims=(4,), batch_sizes=(batch,), longest=1, means=False, owners=(0,))
    p.lengths[0] = np.tile(
        [-3, 10**12, -(10**12), 10**12 - 1], batch // 4
    )  # offsets 0, -3, about 10**12, -3, 10**12 ...
    p.values[0] = np.array([1, 2, 3])
    result = run(p)
    assert result.counts[0][0] == 0  # what lies outside would have counted as bad
    assert result.outputs[0].abs().max() <= p.tables[0][1:4].abs().sum(0).max()


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
    )  # nothing missing: a failure does not matter


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
    """Samples are worked on in groups of at most 4096; what leaves the rank is in the first ones."""
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
