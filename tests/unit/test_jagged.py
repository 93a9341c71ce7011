"""The jagged containers: bags against plain lists, TorchRec's objects by duck typing, and refused input.

Cheapest first: shapes and names, then bags from lengths and offsets (hypothesis), then `as_jagged`.
"""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.embedding import JaggedInput, KeyedJaggedTensor, KeyedTensor, as_jagged
from weft.embedding.jagged import offsets_of


class TorchRecLike:
    """An object with the methods of a torchrec KeyedJaggedTensor, but without the fields of weft's class."""

    def __init__(self, keys, values, lengths, weights=None, variable=False, inverse=None):
        self.k, self.v, self.n, self.w, self.variable, self.inverse = keys, values, lengths, weights, variable, inverse

    def keys(self) -> list[str]:
        return self.k

    def values(self) -> torch.Tensor:
        return self.v

    def lengths(self) -> torch.Tensor:
        return self.n

    def offsets(self) -> torch.Tensor:
        return torch.cat([self.n.new_zeros(1), self.n.cumsum(0)])

    def weights_or_none(self) -> torch.Tensor | None:
        return self.w

    def stride(self) -> int:
        return self.n.numel() // len(self.k)

    def variable_stride_per_key(self) -> bool:
        return self.variable

    def inverse_indices_or_none(self):
        return self.inverse


# bags[t][b] is a list of ids
bags_strategy = st.tuples(st.integers(1, 4), st.integers(0, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


def flatten(bags: list[list[list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor([i for key in bags for bag in key for i in bag], dtype=torch.int64)
    return values, torch.tensor([len(bag) for key in bags for bag in key], dtype=torch.int64)


def bags_of(jagged: KeyedJaggedTensor) -> list[list[list[int]]]:
    return [[bag.tolist() for bag in own.to_dense()] for own in jagged.to_dict().values()]


@given(bags_strategy, st.booleans())
def test_bags_come_back_from_lengths_and_from_offsets(bags, weighted):
    values, lengths = flatten(bags)
    weights = values * 0.5 if weighted else None
    keys = [f"f{t}" for t in range(len(bags))]
    by_lengths = KeyedJaggedTensor.from_lengths_sync(keys, values, lengths, weights)
    by_offsets = KeyedJaggedTensor.from_offsets_sync(keys, values, offsets_of(lengths), weights)
    for jagged in (by_lengths, by_offsets):
        assert bags_of(jagged) == bags
        assert jagged.stride() == len(bags[0])
        assert torch.equal(jagged.lengths(), lengths)
        assert torch.equal(jagged.offsets(), offsets_of(lengths))
        assert jagged.length_per_key() == [sum(map(len, key)) for key in bags]
        if weighted:
            for key in keys:
                assert torch.equal(jagged[key].weights_or_none(), jagged[key].values() * 0.5)


@given(bags_strategy, st.data())
def test_permute_picks_keys_in_any_order(bags, data):
    values, lengths = flatten(bags)
    jagged = KeyedJaggedTensor([f"f{t}" for t in range(len(bags))], values, values + 0.25, lengths=lengths)
    order = data.draw(st.lists(st.integers(0, len(bags) - 1), unique=True))
    picked = jagged.permute(order)
    assert picked.keys() == [f"f{t}" for t in order]
    assert picked.stride() == jagged.stride()
    assert bags_of(picked) == [bags[t] for t in order]
    assert torch.equal(picked.weights(), picked.values() + 0.25)


def test_the_feature_major_layout():
    # offsets[t * B + b]: T = 2 keys, B = 3 samples
    jagged = KeyedJaggedTensor(["f1", "f2"], torch.arange(8), offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8]))
    assert bags_of(jagged) == [[[0, 1], [], [2]], [[3], [4], [5, 6, 7]]]
    assert jagged["f2"].offsets().tolist() == [0, 1, 2, 5]
    assert jagged["f2"].lengths().tolist() == [1, 1, 3]
    assert jagged.offset_per_key() == [0, 3, 8]
    assert set(jagged.to_dict()) == {"f1", "f2"}
    there = jagged.to("cpu")
    assert bags_of(there) == bags_of(jagged)
    assert "2 keys x 3 samples, 8 ids" in repr(jagged)
    with pytest.raises(KeyError, match=r"'f3'.*f1.*f2"):
        jagged["f3"]
    with pytest.raises(ValueError, match="no weights"):
        jagged.weights()


def test_bags_that_are_a_part_of_the_values():
    offsets = torch.tensor([2, 3, 3, 4, 6])  # 2 keys x 2 samples, whose ids are a part of the 8 values
    part = KeyedJaggedTensor(["f1", "f2"], torch.arange(8), torch.arange(8) + 0.5, offsets=offsets)
    bags = [[[2], []], [[3], [4, 5]]]
    assert bags_of(part) == bags_of(part.permute([0, 1])) == bags_of(part.to("cpu")) == bags
    assert part.permute([1]).weights().tolist() == [3.5, 4.5, 5.5]
    assert part.offsets_or_none() is offsets
    assert part.lengths_or_none() is None
    # Lengths cover all values. This stays known after offsets have been computed from the lengths.
    whole = KeyedJaggedTensor.from_lengths_sync(["f1"], torch.arange(3), torch.tensor([1, 2]))
    assert whole.offsets_or_none() is None
    assert whole.to("cpu").offsets_or_none() is None


def test_an_offset_below_zero_does_not_count_from_the_end():
    below = KeyedJaggedTensor(["f1", "f2"], torch.arange(8), offsets=torch.tensor([-3, -1, 8]))
    # Two ids are missing; code that reads the bags refuses this input.
    assert below.permute([0]).values().tolist() == []


def test_no_keys_but_a_batch():
    empty = KeyedJaggedTensor(
        [], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64), stride=7
    )
    assert (empty.stride(), empty.keys(), empty.offsets().tolist(), empty.offset_per_key()) == (7, [], [0], [0])
    assert as_jagged(empty).stride == 7


IDS = torch.arange(6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keys": ["a", "b"], "lengths": torch.ones(5)}, ["5 bags", "2 keys"]),
        ({"keys": ["a", "b"], "offsets": torch.ones(5), "lengths": torch.ones(6)}, ["5 offsets", "6 lengths", "7"]),
        ({"keys": ["a", "b"]}, ["lengths", "offsets"]),
        ({"keys": ["a", "b", "a"], "lengths": torch.ones(6)}, ["'a'", "more than once"]),
        ({"keys": ["a"], "lengths": torch.ones(6), "weights": torch.ones(5)}, ["5 weights", "6 values"]),
        ({"keys": ["a"], "lengths": torch.ones(6), "stride": 5}, ["stride=5 and 1 key mean 5 bags, but there are 6"]),
        ({"keys": ["a"], "offsets": torch.ones(0)}, ["0 bags"]),
        ({"keys": [], "lengths": torch.ones(0)}, ["without keys", "stride="]),
    ],
)
def test_bags_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        KeyedJaggedTensor(values=IDS, **arguments)


@pytest.mark.parametrize("index", [-1, 3])
def test_permute_refuses_indices_out_of_range(index):
    jagged = KeyedJaggedTensor(["a", "b", "c"], IDS, lengths=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=rf"index {index} .*from 0 to 2"):
        jagged.permute([0, index])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keys": [1, 2]}, "key 1 in keys=[1, 2] is an int: pass the name"),
        ({"values": [1, 2]}, "values is a list: pass a tensor"),
        ({"lengths": [1, 2]}, "lengths is a list: pass a tensor"),
        ({"weights": [1.0]}, "weights is a list: pass a tensor"),
    ],
)
def test_arguments_of_wrong_types_are_refused(arguments, words):
    good = {"keys": ["a", "b"], "values": IDS, "lengths": torch.tensor([2, 4])}
    with pytest.raises(TypeError, match=re.escape(words)):
        KeyedJaggedTensor(**good | arguments)


def test_as_jagged_reads_ours_torchrecs_and_tuples():
    lengths, weights = torch.tensor([1, 2, 0, 3]), torch.rand(6)
    for features in (
        KeyedJaggedTensor(["a", "b"], IDS, weights, lengths=lengths),
        TorchRecLike(["a", "b"], IDS, lengths, weights),
    ):
        jagged = as_jagged(features)
        assert jagged.keys == ("a", "b")
        assert jagged.stride == 2
        assert jagged.values is IDS
        assert jagged.weights is weights
        assert jagged.offsets.tolist() == [0, 1, 3, 3, 6]
        assert as_jagged(jagged) is jagged
    offsets = torch.tensor([0, 6])
    assert as_jagged((IDS, offsets)) == JaggedInput(None, IDS, offsets, None)
    assert as_jagged([IDS, offsets, weights]).weights is weights


def test_as_jagged_refuses_what_it_cannot_read():
    with pytest.raises(TypeError, match=r"features is an int, which has no keys\(\), values\(\)"):
        as_jagged(3)
    lengths = torch.tensor([1, 2, 0, 3])
    with pytest.raises(ValueError, match=r"variable stride.*same batch"):
        as_jagged(TorchRecLike(["a"], IDS, lengths, variable=True))
    with pytest.raises(ValueError, match="inverse indices"):
        as_jagged(TorchRecLike(["a"], IDS, lengths, inverse=(["a"], IDS)))
    with pytest.raises(TypeError, match=r"dict, which has no .*weights_or_none\(\).*KeyedJaggedTensor"):
        as_jagged({"a": IDS})
    with pytest.raises(ValueError, match=r"tuple of 4.*per_sample_weights"):
        as_jagged((IDS, IDS, IDS, IDS))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 4))
def test_keyed_tensor_finds_its_columns(dims, batch):
    values = torch.arange(batch * sum(dims)).view(batch, sum(dims))
    keyed = KeyedTensor([f"f{i}" for i in range(len(dims))], dims, values)
    column = 0
    for i, dim in enumerate(dims):
        assert torch.equal(keyed[f"f{i}"], values[:, column : column + dim])
        assert torch.equal(keyed.to_dict()[f"f{i}"], keyed[f"f{i}"])
        assert keyed.offset_per_key()[i] == column
        column += dim
    assert keyed.offset_per_key()[-1] == column
    assert keyed.length_per_key() == dims


def test_keyed_tensor_refuses_columns_that_do_not_add_up():
    with pytest.raises(ValueError, match=r"summing to 5.*\(2, 4\)"):
        KeyedTensor(["a", "b"], [2, 3], torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"'b' has length -1"):
        KeyedTensor(["a", "b"], [5, -1], torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"'a' appears more than once"):
        KeyedTensor(["a", "a"], [2, 2], torch.zeros(2, 4))
    with pytest.raises(KeyError, match=r"'c'.*'a'"):
        KeyedTensor(["a"], [4], torch.zeros(2, 4))["c"]


def test_lengths_and_offsets_that_differ_bag_by_bag_are_refused_though_their_sums_agree():
    ids, offsets = torch.arange(4), torch.tensor([0, 1, 4])
    as_jagged(KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([1, 3], dtype=torch.int32), offsets=offsets))
    with pytest.raises(
        ValueError, match=r"disagree: bag 0 has 2 ids by lengths, but 1 by offsets: pass only one of them"
    ):
        as_jagged(KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([2, 2]), offsets=offsets))


def test_offsets_go_on_where_lengths_of_32_bits_end() -> None:
    lengths = torch.full((3,), 2**30, dtype=torch.int32)
    assert offsets_of(lengths).tolist() == [0, 2**30, 2**31, 3 * 2**30]
