"""`ShardedEmbeddingBagCollection` on CPU processes, against the same tables on one rank in float64.

First the input distribution alone, exactly; then whole modules with both forms of input; then state. Last, refused
input: every rank must refuse it at once, and the next call must work.
"""

from __future__ import annotations

import re
import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import wait_for_failure
from support.on_ranks import told, waits_end_after

from weft import symm
from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, KeyedJaggedTensor, KeyedTensor, RowWise, hash_ids
from weft.embedding.jagged import offsets_of
from weft.errors import DisagreementError, RefusedError
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.nn.input_dist import InputDist

TABLES = (
    EmbeddingBagConfig(50, 8, "users", ("u", "friend")),
    EmbeddingBagConfig(20, 3, "items", ("i",), "mean"),
    EmbeddingBagConfig(9, 16, "pairs", ("i", "u")),
    EmbeddingBagConfig(1, 1, "bias", ("one",)),
)
FEATURES = {"u": 9, "friend": 50, "i": 9, "one": 1}  # for each feature, the rows of the smallest table that it reads


@pytest.fixture(scope="module")
def pool():
    with Pool(4) as workers:
        yield workers


class TorchRecLike:
    """An object with only those methods of torchrec's KeyedJaggedTensor that weft calls."""

    def __init__(self, ours: KeyedJaggedTensor):
        self.ours = ours

    def keys(self) -> list[str]:
        return self.ours.keys()

    def values(self) -> torch.Tensor:
        return self.ours.values()

    def lengths(self) -> torch.Tensor:
        return self.ours.lengths()

    def offsets(self) -> torch.Tensor:
        return self.ours.offsets()

    def weights_or_none(self) -> torch.Tensor | None:
        return self.ours.weights_or_none()

    def stride(self) -> int:
        return self.ours.stride()


def local_batch(
    seed: int, batch: int, keys: list[str] | None = None, dtype=torch.int64, rows: dict[str, int] = FEATURES
) -> KeyedJaggedTensor:
    """Return a rank's samples. A bag has 0 to 4 weighted ids."""
    rng = np.random.default_rng(seed)
    keys = list(rows) if keys is None else keys
    lengths = [rng.integers(0, 5, batch) for _ in keys]
    values = np.concatenate([rng.integers(0, rows[key], n.sum()) for key, n in zip(keys, lengths, strict=True)])
    return KeyedJaggedTensor(
        keys,
        torch.from_numpy(values).to(dtype),
        torch.from_numpy(rng.random(len(values), dtype=np.float32)),
        lengths=torch.from_numpy(np.concatenate(lengths)).to(dtype),
    )


def global_batch(parts: list[KeyedJaggedTensor], keys: list[str]) -> KeyedJaggedTensor:
    """Return the samples of all parts, by concatenation of bags."""
    bags = [bag for key in keys for part in parts for bag in part[key].to_dense()]
    weights = [part[key].weights_or_none() for key in keys for part in parts]
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    values = torch.cat(bags) if bags else parts[0].values()[:0]
    weight = torch.cat(weights) if weights else torch.empty(0)
    return KeyedJaggedTensor(keys, values, weight, lengths=lengths, stride=sum(part.stride() for part in parts))


def full_weights(tables=TABLES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {t.name: torch.randn(t.num_embeddings, t.embedding_dim, generator=generator).to(t.dtype) for t in tables}


def reference(features: KeyedJaggedTensor, weighted: bool, tables=TABLES, full=None) -> torch.Tensor:
    """Compute [B, sum(D)] in float64: the weighted sum of each bag's rows, divided by the bag's length for "mean"."""
    columns = []
    for table in tables:
        weight = (full or full_weights(tables))[table.name].double()
        for feature in table.feature_names:
            jagged = features[feature]
            rows = weight[jagged.values().long()]
            if weighted:
                rows = rows * jagged.weights_or_none().double()[:, None]
            lengths = jagged.lengths().long()
            bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            pooled = torch.zeros(len(lengths), table.embedding_dim, dtype=torch.float64).index_add_(0, bag, rows)
            columns.append(pooled / lengths.clamp(min=1)[:, None] if table.pooling == "mean" else pooled)
    return torch.cat(columns, dim=1)


def distribute(group, sharding: EmbeddingSharding, parts: list[KeyedJaggedTensor], weighted: bool):
    jagged, batch_sizes = InputDist(sharding, group, torch.device("cpu"), is_weighted=weighted)(parts[group.rank()])
    return jagged.keys, jagged.values, jagged.offsets, jagged.weights, jagged.stride, batch_sizes


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    batches=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    ranks=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    keys=st.permutations([*FEATURES, "unused"]),
    narrow=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_input_distribution_is_exact(pool, batches, ranks, keys, narrow, weighted, seed):
    world_size = len(batches)
    sharding = EmbeddingSharding(TABLES, tuple(rank % world_size for rank in ranks), world_size)
    dtype = torch.int32 if narrow else torch.int64
    rows = {**FEATURES, "unused": 10**6}
    parts = [local_batch(seed + rank, batch, keys, dtype, rows) for rank, batch in enumerate(batches)]
    results = pool.run(distribute, sharding, parts, weighted, ranks=world_size)
    for rank, (own_keys, values, offsets, weights, stride, batch_sizes) in enumerate(results):
        assert batch_sizes == tuple(batches)
        assert stride == sum(batches)
        assert own_keys == tuple(dict.fromkeys(slot.feature for slot in sharding.local_slots(rank)))
        wanted = global_batch(parts, list(own_keys))
        assert values.dtype == dtype
        assert torch.equal(values, wanted.values())
        assert torch.equal(offsets, offsets_of(wanted.lengths()))
        assert (weights is None) if not weighted else torch.equal(weights, wanted.weights())


def weights_of_negated_views(group) -> tuple[list[float], list[float]]:
    """Send weights, and then their gradients, that are views of memory with the negated values. Rank 0 has all tables."""
    sharding, ones = EmbeddingSharding(TABLES, (0,) * len(TABLES), 2), torch.ones(4, dtype=torch.int64)
    weights = torch._neg_view(-torch.arange(1.0, 5.0) - 10 * group.rank()).requires_grad_()
    features = KeyedJaggedTensor(list(FEATURES), ones - 1, weights, ones)
    jagged, _ = InputDist(sharding, group, torch.device("cpu"), is_weighted=True)(features)
    arrived = jagged.weights
    arrived.backward(torch._neg_view(-10 * arrived.detach()))
    return arrived.tolist(), weights.grad.tolist()


def test_weights_and_gradients_that_are_negated_views(pool):
    (arrived, of_first), (none, of_second) = pool.run(weights_of_negated_views, ranks=2, timeout_s=60)
    assert sorted(arrived) == [1.0, 2.0, 3.0, 4.0, 11.0, 12.0, 13.0, 14.0]
    assert (none, of_first, of_second) == ([], [10.0, 20.0, 30.0, 40.0], [110.0, 120.0, 130.0, 140.0])


def forward(group, options: dict, parts: list, tables=TABLES) -> KeyedTensor:
    """Return this rank's output. `parts` are the local batches by rank, or the parts of the global batch that every
    rank passes.
    """
    options = dict(options)
    batch_sizes = options.pop("batch_sizes", None)
    module = ShardedEmbeddingBagCollection(tables, group=group, **options)
    module.load_full_weights(full_weights(tables))
    features = parts[group.rank()]
    first, again = module(features, batch_sizes=batch_sizes), module(features, batch_sizes=batch_sizes)
    assert torch.equal(first.values(), again.values())
    return KeyedTensor(first.keys(), first.length_per_key(), first.values().clone())


def assert_close(results: list[KeyedTensor], parts: list[KeyedJaggedTensor], weighted: bool, tables=TABLES) -> None:
    for result, part in zip(results, parts, strict=True):
        wanted = reference(part, weighted, tables)
        assert result.values().shape == wanted.shape
        # A bag has at most 4 rows of magnitude below 5. This gives three roundings in float32, and one of the stored
        # result.
        tolerance = 4 * 5 * max(torch.finfo(result.values().dtype).eps, 4 * torch.finfo(torch.float32).eps)
        torch.testing.assert_close(result.values().double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("batches", "weighted"), [((5,), False), ((3, 4), True), ((0, 6), False), ((2, 0, 5), True), ((1, 2, 3, 4), False)]
)
def test_local_batches(pool, batches, weighted):
    parts = [local_batch(rank, batch) for rank, batch in enumerate(batches)]
    results = pool.run(forward, {"is_weighted": weighted}, parts, ranks=len(batches))
    assert_close(results, parts, weighted)
    assert results[0].keys() == ["u@users", "friend", "i@items", "i@pairs", "u@pairs", "one"]
    assert results[0].length_per_key() == [8, 8, 3, 16, 16, 1]


def test_hashed_ids_and_the_put_transport(pool):
    raw = {"u": 2**62, "friend": 2**62, "i": 2**62, "one": 2**62}
    parts = [local_batch(rank, 5, rows=raw) for rank in range(3)]
    results = pool.run(forward, {"hash": True, "transport": "put", "slice_size": 2}, parts, ranks=3)
    for result, part in zip(results, parts, strict=True):
        columns = []
        for table in TABLES:  # table by table, because tables have different numbers of rows
            rows = {f: hash_ids(part[f].values(), table.num_embeddings) for f in table.feature_names}
            hashed = KeyedJaggedTensor(
                list(rows), torch.cat(list(rows.values())), lengths=torch.cat([part[f].lengths() for f in rows])
            )
            columns.append(reference(hashed, False, [table], full_weights()))
        torch.testing.assert_close(result.values().double(), torch.cat(columns, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_global_batch_gives_the_same(pool, weighted):
    # Every rank passes all features in another order than the tables', and a feature that no table uses.
    parts = [local_batch(rank, batch, rows={**FEATURES, "unused": 1000}) for rank, batch in enumerate((3, 0, 4))]
    whole = global_batch(parts, ["one", "unused", "i", "u", "friend"])
    options = {"input": "global_batch", "is_weighted": weighted, "batch_sizes": [3, 0, 4]}
    assert_close(pool.run(forward, options, [whole] * 3, ranks=3), parts, weighted)


def test_the_global_batch_is_divided_evenly_unless_told(pool):
    parts = [local_batch(rank, 3) for rank in range(2)]
    whole = global_batch(parts, list(FEATURES))
    assert_close(pool.run(forward, {"input": "global_batch"}, [whole] * 2, ranks=2), parts, False)


def test_torchrec_features_of_32_bits_and_the_users_placement(pool):
    parts = [local_batch(rank, 4, dtype=torch.int32) for rank in range(3)]
    options = {"placement": {"users": 2, "items": 2, "pairs": 0, "bias": 2}}  # rank 1 owns nothing
    assert_close(pool.run(forward, options, [TorchRecLike(part) for part in parts], ranks=3), parts, False)


def test_half_precision_tables(pool):
    tables = tuple(
        EmbeddingBagConfig(t.num_embeddings, t.embedding_dim, t.name, t.feature_names, t.pooling, torch.float16)
        for t in TABLES
    )
    parts = [local_batch(rank, 4) for rank in range(2)]
    results = pool.run(forward, {}, parts, tables, ranks=2)
    assert results[0].values().dtype == torch.float16
    assert_close(results, parts, False, tables)


def state(group) -> tuple:
    made = ShardedEmbeddingBagCollection(TABLES, group=group, placement=[0, 1, 0, 1])
    start = {name: value.clone() for name, value in made.state_dict().items()}
    other = ShardedEmbeddingBagCollection(TABLES, group=group, placement=[0, 1, 0, 1])
    other.load_state_dict(made.state_dict())
    same = all(torch.equal(value, other.state_dict()[name]) for name, value in start.items())
    grads = [name for name, parameter in made.named_parameters() if parameter.requires_grad]
    made.load_full_weights(full_weights())
    return start, same, grads, made.state_dict(), repr(made)


def test_state_is_this_ranks_share(pool):
    (start, same, grads, loaded, text), (start1, same1, *_) = pool.run(state, ranks=2)
    assert list(start) == ["embedding_bags.users.weight", "embedding_bags.pairs.weight"]
    assert list(start1) == ["embedding_bags.items.weight", "embedding_bags.bias.weight"]
    assert same
    assert same1
    assert grads == list(start)  # like nn.EmbeddingBag's gradients
    for table in (TABLES[0], TABLES[2]):
        weight, bound = start[f"embedding_bags.{table.name}.weight"], table.num_embeddings**-0.5
        assert weight.shape == (table.num_embeddings, table.embedding_dim)
        assert 0.9 * bound < weight.abs().max() <= bound
        assert torch.equal(loaded[f"embedding_bags.{table.name}.weight"], full_weights()[table.name])
    for words in ("rank 0 of 2 on cpu", "users, pairs", "items, bias", "transport='auto'", "input='local_batch'"):
        assert words in text


def try_forward(group, options: dict, parts: list, good: list) -> tuple[str, str, float, torch.Tensor]:
    """Return the error for `parts`, the time until the error, and the output of a good call afterwards."""
    module = ShardedEmbeddingBagCollection(TABLES, group=group, **options)
    module.load_full_weights(full_weights())
    begin = time.monotonic()
    caught: Exception = AssertionError("nothing was refused")
    try:
        module(parts[group.rank()])
    except (RefusedError, DisagreementError) as error:
        caught = error
    seconds = time.monotonic() - begin
    return type(caught).__name__, str(caught), seconds, module(good[group.rank()]).values().clone()


def without_one(group, parts: list) -> list[str]:
    """Return the errors of a forward that rank 1 skips, and of the next forward."""
    apart = dist.new_group(list(range(group.size())))
    module = ShardedEmbeddingBagCollection(TABLES, group=apart)
    module.load_full_weights(full_weights())
    module(parts[group.rank()])
    found = []
    for call in range(2):
        if call == 0 and group.rank() == 1:
            wait_for_failure(symm.communicator(apart, "cpu"))
            continue
        with waits_end_after(0.5):
            found.append(told(lambda: module(parts[group.rank()])))
    return found


def test_a_rank_that_does_not_come_is_missed_while_ids_are_distributed(pool):
    parts = [local_batch(rank, 3) for rank in range(3)]
    (first, *_), *others = pool.run(without_one, parts, ranks=3, timeout_s=60)
    assert "waited 0.5 s for all-to-all 0 of numbers of the input distribution of" in first
    assert "from rank 1" in first or "PoisonedGroupError" in first  # whoever is the first to miss it
    assert all(text.startswith(("DeadlineError", "PoisonedGroupError")) for texts in others for text in texts)
    assert [len(texts) for texts in others] == [1, 2]


def in_other_orders(group) -> list[str]:
    """Call two collections with different numbers of features. Rank 1 calls them in the opposite order."""
    apart = dist.new_group(list(range(group.size())))
    few = ShardedEmbeddingBagCollection(TABLES[:1], group=apart)
    many = ShardedEmbeddingBagCollection(TABLES, group=apart)
    part = local_batch(group.rank(), 3)
    few(part), many(part)
    return [told(partial(module, part)) for module in ((few, many) if group.rank() == 0 else (many, few))]


def test_collections_in_other_orders(pool):
    for texts in pool.run(in_other_orders, ranks=2, timeout_s=60):
        assert len(texts) == 2
        assert [text.split(":")[0] for text in texts] == ["DisagreementError", "PoisonedGroupError"]
        assert all("input distribution of" in text for text in texts), texts


def changed(part: KeyedJaggedTensor, what: str) -> object:
    keys, values, lengths = part.keys(), part.values(), part.lengths()
    if what == "missing":
        return part.permute([0, 1, 3])
    if what == "negative":
        lengths = lengths.clone()
        lengths[6] -= 10
    elif what == "short":
        values = values[:-2]
    elif what == "unweighted":
        return KeyedJaggedTensor(keys, values, lengths=lengths)
    elif what == "double":
        return KeyedJaggedTensor(keys, values, part.weights().double(), lengths=lengths)
    elif what == "float":
        values = values.float()
    elif what == "narrow":
        values = values.int()
    elif what == "dictionary":
        return {"u": values}
    return KeyedJaggedTensor(keys, values, part.weights()[: values.numel()], lengths=lengths)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", ["rank 1: ", "'items'", "'i'", "lacks", "'u', 'friend', 'one'"]),
        ("negative", ["rank 1: ", "'friend'", "'users'", "sample 1", "length -", "negative"]),
        ("short", ["rank 1: ", "lengths sum to", "values"]),
        ("unweighted", ["rank 1: ", "is_weighted=True", "no weights"]),
        ("double", ["rank 1: ", "weights", "float64", "float32"]),
        ("float", ["rank 1: ", "values", "float32", "int64"]),
        ("dictionary", ["rank 1: ", "dict", "KeyedJaggedTensor"]),
        ("narrow", ["int64 on rank 0", "int32 on rank 1", "one dtype"]),
    ],
)
def test_bad_features_of_one_rank_are_refused_by_all_at_once(pool, what, words):
    good = [local_batch(rank, 5) for rank in range(3)]
    parts = [good[0], changed(good[1], what), good[2]]
    for name, text, seconds, after in pool.run(try_forward, {"is_weighted": True}, parts, good, ranks=3):
        assert name == ("DisagreementError" if what == "narrow" else "RefusedError")
        assert re.search(".*".join(map(re.escape, words)), text), text
        assert seconds < 10  # no rank waits for a deadline (60 s) or the group's timeout (120 s)
        assert after.shape == (5, 52)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", ["rank 1: ", "'items'", "'i'", "lacks"]),
        ("negative", ["rank 1: ", "'users'", "'u'", "sample 6", "ascend"]),
        ("unweighted", ["rank 1: ", "0 per_sample_weights", "values"]),
    ],
)
def test_a_bad_global_batch_of_one_rank_is_refused_by_all_at_once(pool, what, words):
    good = global_batch([local_batch(rank, 5) for rank in range(3)], list(FEATURES))
    options = {"input": "global_batch", "is_weighted": True, "placement": [1, 1, 0, 2]}
    for name, text, seconds, after in pool.run(
        try_forward, options, [good, changed(good, what), good], [good] * 3, ranks=3
    ):
        assert name == "RefusedError"
        assert re.search(".*".join(map(re.escape, words)), text), text
        assert seconds < 10
        assert after.shape == (5, 52)


def make(group, options_of_rank: list[dict]) -> str:
    options = {"tables": TABLES, "group": group, **options_of_rank[group.rank()]}
    return told(partial(ShardedEmbeddingBagCollection, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tables": TABLES[:3], "placement": [0, 1, 0]}, ["4 tables", "3 tables"]),
        ({"tables": (*TABLES[:3], EmbeddingBagConfig(2, 1, "bias", ("one",)))}, ["table 3", "num_embeddings=2"]),
        ({"placement": [1, 1, 0, 0]}, ["'users'", "rank 0", "rank 1"]),
        ({"input": "global_batch"}, ["input='local_batch'", "'global_batch'"]),
        ({"is_weighted": True}, ["is_weighted=False", "True"]),
        ({"slice_size": 8}, ["slice_size=None", "8"]),
        ({"placement": [RowWise(), 1, 0, 1]}, ["placement=only whole tables and", "RowWise"]),
    ],
)
def test_ranks_that_disagree_all_learn_it_when_the_module_is_made(pool, options, words):
    for text in pool.run(make, [{"placement": [0, 1, 0, 1]}, {"placement": [0, 1, 0, 1], **options}], ranks=2):
        assert text.startswith("DisagreementError")
        assert re.search(".*".join(map(re.escape, words)), text), text


def test_arguments_that_one_rank_refuses_are_refused_by_all(pool):
    for text in pool.run(make, [{}, {"placement": [0]}], ranks=2):
        assert re.search(r"RefusedError.*rank 1: placement has 1 entry for 4 tables", text), text


def make_on_a_destroyed_group(group) -> tuple[str, str]:
    own = dist.new_group([0])
    name = own.group_name
    dist.destroy_process_group(own)
    return make(own, [{}]), name


def test_a_destroyed_group_is_refused_by_weft(pool):
    ((text, name),) = pool.run(make_on_a_destroyed_group, ranks=1)
    assert text == f"ValueError: the process group {name!r} was destroyed: make a new one"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group": None}, ["group=None", "dist.group.WORLD"]),
        ({"group": dist.GroupMember.NON_GROUP_MEMBER}, ["not in the group"]),
        ({"input": "local"}, ["input='local'", "'global_batch'"]),
        ({"tables": [EmbeddingBagConfig(5, 4, "a.b", ("f",))]}, ["'a.b'", "choose another"]),
        ({"placement": {"users": 0}}, ["placement", "'items'"]),
    ],
)
def test_bad_arguments(pool, options, words):
    (text,) = pool.run(make, [options], ranks=1)
    assert re.search(".*".join(["Error: ", *map(re.escape, words)]), text), text


def misuse(group) -> list[str]:
    module = ShardedEmbeddingBagCollection(TABLES, group=group)
    full, texts = full_weights(), []
    for call in (
        lambda: module(local_batch(0, 2), batch_sizes=[2]),
        lambda: module.load_full_weights({**full, "extra": full["users"]}),
        lambda: module.load_full_weights({"users": full["users"]}),
        lambda: module.load_full_weights({**full, "pairs": full["users"]}),
    ):
        try:
            call()
        except ValueError as error:
            texts.append(str(error))
    return [*texts, str(torch.equal(module.embedding_bags["users"].weight, full["users"]))]


def test_misuse_is_explained(pool):
    ((sizes, unknown, missing, shape, copied),) = pool.run(misuse, ranks=1)
    assert re.search(r"batch_sizes.*global_batch", sizes)
    assert re.search(r"'extra'.*users, items", unknown)
    assert re.search(r"not table 'items' of rank 0", missing)
    assert re.search(r"'pairs'.*has shape \[50, 8\].*\[9, 16\]", shape)
    assert copied == "False"  # everything is checked before anything is copied
