"""embedding_all_to_all on CPU processes: its results.

Cheapest first: one process; every option on 1, 2, 3, 4 and 8 ranks, with the bits that one process computes; forms of
input; random shapes; repeated calls. Other files test waits and held results (test_embedding_calls.py), bad input
(test_embedding_bad_input.py), ranks that fail (test_embedding_failure.py), and the native kernel
(tests/unit/test_cpu_kernel.py).
"""

from __future__ import annotations

import itertools

import embedding_ranks as ranks
import pytest
import torch
from embedding_ranks import DTYPES, ORDERS, TRANSPORTS, assert_same_bits, pooled_here
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.reference import Problem, assert_as_exact_as_torch, assert_close, even, problem, tables_of
from support.slow import mostly

import weft
from weft.embedding import EmbeddingBagConfig
from weft.launch import Pool

INDEX_DTYPES = (torch.int64, torch.int32)
SIZES = (1, 2, 3, 4, 8)


# --- one process, with which the other cases are compared ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("hashed", [False, True])
def test_embedding_pool_is_as_exact_as_torch(dtype: torch.dtype, weighted: bool, hashed: bool) -> None:
    p = problem(1, (8, 3, 16, 1, 70), 50, longest=40, dtype=dtype, weighted=weighted, hash=hashed)
    output = pooled_here(p)
    assert_close(output, p)
    assert_as_exact_as_torch(output, p)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("offset_dtype", INDEX_DTYPES)
def test_embedding_pool_equals_an_embedding_bag_per_table(index_dtype: torch.dtype, offset_dtype: torch.dtype) -> None:
    p = problem(1, (4, 12), 9, index_dtype=index_dtype, offset_dtype=offset_dtype)
    bags = []
    for table, weight in zip(p.tables, p.weights, strict=True):
        bag = torch.nn.EmbeddingBag.from_pretrained(weight.double(), mode=table.pooling, include_last_offset=True)
        values, offsets = p.keyed(0, table.feature_names).values(), p.keyed(0, table.feature_names).offsets()
        bags.append(bag(values.long(), offsets.long()))
    torch.testing.assert_close(pooled_here(p).double(), torch.cat(bags, 1), rtol=1e-6, atol=1e-6)


def test_embedding_pool_reads_keys_in_any_order() -> None:
    p = problem(1, (4, 12, 2), 9)
    keyed = weft.embedding_pool(p.weights, p.keyed(0, ["f2", "f0", "f1"]), p.tables)
    assert torch.equal(keyed, pooled_here(p))


def test_embedding_pool_of_an_empty_batch() -> None:
    p = problem(1, (4, 12), 0)
    assert pooled_here(p).shape == (0, 16)


# --- every option on every number of ranks ---

VARIANTS = [
    {"transport": transport, "order": order, "slice_size": slice_size}
    for transport, order, slice_size in [
        *itertools.product(TRANSPORTS, ORDERS, (32,)),
        *itertools.product(("put",), ORDERS, (1, 2)),
    ]
]


@pytest.mark.parametrize("size", mostly(SIZES, 1, 2, 3, 4))
def test_bits_do_not_depend_on_ranks_transport_order_or_slices(pool: Pool, size: int) -> None:
    p = problem(size, (8, 3, 16, 1, 70, 5, 4), 21, weighted=True)
    per_rank = pool.run(ranks.results, p, VARIANTS, ranks=size)
    for number, variant in enumerate(VARIANTS):
        assert_same_bits([outputs[number] for outputs in per_rank], p, variant)
    assert_close(torch.cat([outputs[0] for outputs in per_rank]), p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("index_dtype", "offset_dtype"), list(itertools.product(INDEX_DTYPES, INDEX_DTYPES)))
def test_dtypes(pool: Pool, dtype: torch.dtype, index_dtype: torch.dtype, offset_dtype: torch.dtype) -> None:
    p = problem(3, batch=40, longest=20, dtype=dtype, index_dtype=index_dtype, offset_dtype=offset_dtype)
    per_rank = pool.run(ranks.results, p, [{"transport": t} for t in TRANSPORTS], ranks=3)
    for number in range(len(TRANSPORTS)):
        output = torch.cat([outputs[number] for outputs in per_rank])
        assert_close(output, p)
        assert_as_exact_as_torch(output, p)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_pooling_weights_and_hashed_ids(pool: Pool, pooling: str, weighted: bool, hashed: bool) -> None:
    tables = tuple(EmbeddingBagConfig(40 + i, d, f"t{i}", (f"f{i}",), pooling) for i, d in enumerate((8, 5, 33)))
    p = Problem(tables, (1, 0, 1), (12, 13), longest=15, weighted=weighted, hash=hashed)
    per_rank = pool.run(ranks.results, p, [{"transport": t, "hash": hashed} for t in TRANSPORTS], ranks=2)
    for number in range(len(TRANSPORTS)):
        output = torch.cat([outputs[number] for outputs in per_rank])
        assert_close(output, p)
        assert_as_exact_as_torch(output, p)


def test_hashed_32_bit_ids(pool: Pool) -> None:
    p = problem(2, index_dtype=torch.int32, hash=True)
    outputs = [outputs[0] for outputs in pool.run(ranks.results, p, [{"hash": True}], ranks=2)]
    assert_close(torch.cat(outputs), p)


SHARED = (
    EmbeddingBagConfig(50, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(20, 3, "items", ("i",), "mean"),
    EmbeddingBagConfig(9, 16, "pairs", ("i", "u")),
    EmbeddingBagConfig(1, 1, "bias", ("one",)),
)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_features_share_tables_and_tables_share_features(pool: Pool, transport: str) -> None:
    p = Problem(SHARED, (0, 1, 1, 0), (4, 7), weighted=True)
    assert p.sharding.total_dim == 8 + 8 + 3 + 16 + 16 + 1
    outputs = [o[0] for o in pool.run(ranks.results, p, [{"transport": transport}], ranks=2)]
    assert_close(torch.cat(outputs), p)
    assert_same_bits(outputs, p)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("batch_sizes", [(5, 0, 3), (0, 0, 7), (0, 0, 0), (1, 0, 0)])
def test_uneven_batches(pool: Pool, transport: str, batch_sizes: tuple[int, ...]) -> None:
    p = Problem(tables_of((8, 3, 16, 1)), (2, 0, 1, 2), batch_sizes)
    outputs = [o[0] for o in pool.run(ranks.results, p, [{"transport": transport}], ranks=3)]
    assert_same_bits(outputs, p)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rank_of_table", [(3, 3), (0, 7), (5, 1)])
def test_ranks_without_tables(pool: Pool, transport: str, rank_of_table: tuple[int, ...]) -> None:
    p = Problem(tables_of((6, 10)), rank_of_table, even(19, 8))
    outputs = [o[0] for o in pool.run(ranks.results, p, [{"transport": transport}], ranks=8)]
    assert_same_bits(outputs, p)


def test_every_id_beside_empty_bags(pool: Pool) -> None:
    """Some features have no ids at all, next to a feature with ids."""
    p = Problem(tables_of((4, 4, 4)), (0, 1, 1), (3, 4), longest=0)
    outputs = [o[0] for o in pool.run(ranks.results, p, [{"transport": t} for t in TRANSPORTS], ranks=2)]
    assert not torch.cat(outputs).any()


# --- forms of input ---


def default_batch_sizes(group, p):
    return ranks.call(group, p, batch_sizes=None).clone()


@pytest.mark.parametrize("batch", [12, 15])
def test_batch_sizes_by_default(pool: Pool, batch: int) -> None:
    """If the batch does not divide evenly, the first ranks get one more sample."""
    p = problem(4, batch=batch)
    assert_same_bits(pool.run(default_batch_sizes, p, ranks=4), p)


@pytest.mark.parametrize("weighted", [False, True])
def test_keyed_features_in_any_order_with_extra_keys(pool: Pool, weighted: bool) -> None:
    p = Problem(SHARED, (0, 1, 1, 0), (4, 7), weighted=weighted)
    tupled = [o[0] for o in pool.run(ranks.results, p, [{}], ranks=2)]
    assert_close(torch.cat(tupled), p)
    keys = ["one", "i", "friend", "u"]  # features of both ranks, in another order than the tables
    for keys_of_rank in ([keys, keys], [["u", "friend", "one"], ["u", "i"]], [["one", "u", "friend"], keys[::-1]]):
        keyed = pool.run(ranks.keyed_result, p, keys_of_rank, ranks=2)
        for mine, wanted in zip(keyed, tupled, strict=True):
            assert torch.equal(mine, wanted), keys_of_rank


def torchrec_like(group, p):
    class TorchRecs:
        """An object with only those methods of torchrec's KeyedJaggedTensor that weft calls."""

        def __init__(self, ours):
            for name in ("keys", "values", "lengths", "offsets", "weights_or_none", "stride"):
                setattr(self, name, getattr(ours, name))

    return ranks.call(group, p, TorchRecs(p.keyed(group.rank()))).clone()


def test_torchrecs_features(pool: Pool) -> None:
    p = problem(2, weighted=True)
    assert_same_bits(pool.run(torchrec_like, p, ranks=2), p)


# --- shapes at random ---


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a problem. Skewed problems are frequent: one rank may own all tables or all samples, and other ranks none."""
    size = draw(st.sampled_from(SIZES))
    dtype = draw(st.sampled_from(DTYPES))
    features = [f"f{i}" for i in range(6)]
    tables = tuple(
        EmbeddingBagConfig(
            draw(st.sampled_from((1, 2, 17, 300))),
            draw(st.sampled_from((1, 2, 3, 4, 7, 16, 31, 64, 129, 700))),
            f"t{i}",
            tuple(draw(st.lists(st.sampled_from(features), min_size=1, max_size=3, unique=True))),
            draw(st.sampled_from(("sum", "mean"))),
            dtype,
        )
        for i in range(draw(st.integers(1, 7)))
    )
    favourite = draw(st.integers(0, size - 1))
    owner = st.just(favourite) | st.integers(0, size - 1)
    samples = st.sampled_from((0, 1, 2, 5, 11))
    return Problem(
        tables,
        tuple(draw(owner) for _ in tables),
        tuple(draw(samples) for _ in range(size)),
        longest=draw(st.sampled_from((0, 1, 4, 50))),
        weighted=draw(st.booleans()),
        hash=draw(st.booleans()),
        index_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        offset_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=10)
@given(p=problems(), slice_size=st.sampled_from((1, 2, 3, 32)), order=st.sampled_from(ORDERS))
@example(p=Problem(tables_of((1,), rows=1), (7,), (0,) * 7 + (1,)), slice_size=1, order="natural")
def test_any_problem(pool: Pool, p: Problem, slice_size: int, order: str) -> None:
    variants = [{"transport": t, "slice_size": slice_size, "order": order, "hash": p.hash} for t in TRANSPORTS]
    per_rank = pool.run(ranks.results, p, variants, ranks=len(p.batch_sizes))
    for number in range(len(variants)):
        outputs = [outputs[number] for outputs in per_rank]
        assert_close(torch.cat(outputs), p)
        assert_same_bits(outputs, p, variants[number])


# --- calls in a row ---


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ten_shapes_in_a_row_on_poisoned_buffers(pool: Pool, transport: str) -> None:
    """Alternate larger, smaller and empty batches with one executor. No call may see results of an earlier call."""
    tables, owners = tables_of((8, 3, 16, 1, 70)), (0, 1, 2, 0, 1)
    sizes = [
        (3, 4, 5),
        (1, 0, 0),
        (40, 1, 2),
        (2, 2, 2),
        (0, 0, 0),
        (7, 50, 3),
        (1, 1, 1),
        (9, 8, 120),
        (5, 0, 5),
        (2, 3, 4),
    ]
    calls = [Problem(tables, owners, s, seed=i, longest=1 + i) for i, s in enumerate(sizes)]
    per_rank = pool.run(ranks.many_shapes, calls, {"transport": transport, "outputs": 3}, ranks=3)
    for number, p in enumerate(calls):
        assert_same_bits([outputs[number] for outputs in per_rank], p, f"call {number}")
