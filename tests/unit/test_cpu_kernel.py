"""The results of the native CPU kernel of embedding_all_to_all (`cpu_kernel`).

Cheapest first: a known answer; bit-exact against a loop in bag order, over dtypes, widths and options; agreement with
nn.EmbeddingBag in float64; bad indices.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_kernel import (
    DIRECT,
    DTYPES,
    FATAL,
    IGNORE,
    PUT,
    WARNING,
    Problem,
    Slot,
    assert_same_bits,
    problem,
    reference,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slow import in_turn

from weft import _core

WIDTHS = (1, 2, 3, 5, 7, 16, 33, 64, 92, 100, 128, 256, 1000)


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


@pytest.mark.parametrize(("isa", "dtype"), in_turn(_core.isas(), DTYPES[1:]), ids=str)
def test_half_types_round_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    """Bags of one id with every bit pattern except NaN, and bags of two ids whose sums round, overflow, or are
    subnormal.
    """
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


@settings(max_examples=60)
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


@pytest.mark.parametrize(("transport", "threads"), in_turn([DIRECT, PUT], [1, 3]))
def test_large_enough_for_many_blocks_and_streaming_stores(transport: int, threads: int) -> None:
    """The input needs many blocks and many batches of addresses. Large aligned outputs use cache-bypassing stores."""
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
    """The addresses of a single bag, of one slot's bags in a block, or of several slots' bags are more than one batch."""
    batch = max(3, 40_000 // longest)
    p = problem(4, dims=(8, 300, 3), rows=100, batch_sizes=(batch // 3, batch - batch // 3), longest=longest)
    assert_same_bits(run(p), reference(p))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("weighted", "mean"), [(False, False), (False, True), (True, False)], ids=["sum", "mean", "weighted"]
)
def test_error_against_float64_is_no_worse_than_embedding_bag(dtype: torch.dtype, weighted: bool, mean: bool) -> None:
    """The error is at most twice that of nn.EmbeddingBag in the tables' dtype. The reference is nn.EmbeddingBag in
    float64, which has no weighted mean.
    """
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
    assert result.counts[0][0] == 0  # indices outside of the bags would have counted as bad
    assert result.outputs[0].abs().max() <= p.tables[0][1:4].abs().sum(0).max()
