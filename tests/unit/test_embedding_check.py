"""Bad input, one case each: the error gives table, feature, value and fix. Then the interpretation of valid input.
Index bounds are checked with random input, against a plain loop.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, JaggedInput, hash_ids
from weft.embedding.check import CheckedInput, bad_index_message, check_jagged, check_offsets, first_bad_index
from weft.embedding.jagged import offsets_of

SHARDING = EmbeddingSharding(
    (
        EmbeddingBagConfig(10, 4, "users", ("u", "friend")),
        EmbeddingBagConfig(20, 8, "items", ("i",)),
        EmbeddingBagConfig(30, 4, "pairs", ("i", "u")),
    ),
    (0, 1, 0),
    2,
)
WEIGHTS = [torch.zeros(10, 4), torch.zeros(30, 4)]  # rank 0 owns users and pairs
KEYS = ("i", "u", "friend")


def jagged(keys: tuple[str, ...] | None = KEYS, batch: int = 4, blocks: int | None = None, **more) -> JaggedInput:
    """Return an input with one id per bag. All ids are 0."""
    bags = batch * (blocks if blocks is not None else len(keys or ()))
    fields = {"values": torch.zeros(bags, dtype=torch.int64), "offsets": torch.arange(bags + 1), "weights": None}
    return JaggedInput(keys, **(fields | more))


def _resized(rows: int, dim: int, bytes_: int) -> torch.Tensor:
    table = torch.zeros(rows, dim)
    table.untyped_storage().resize_(bytes_)
    return table


def refused(*words: str):
    return pytest.raises(ValueError, match=".*".join(map(re.escape, words)))


def test_good_input_is_understood():
    checked = check_jagged(jagged(), SHARDING, 0, None, WEIGHTS)
    assert checked == CheckedInput(key_of_slot=(1, 2, 0, 1), batch_sizes=(2, 2), global_batch=4)
    # Without keys there is a block of offsets per local slot. The caller must pass uneven batch sizes.
    assert check_jagged(jagged(None, blocks=4), SHARDING, 0, [1, 3], WEIGHTS) == CheckedInput((0, 1, 2, 3), (1, 3), 4)
    # Rank 1 needs only "i"; keys that only rank 0's tables use are allowed.
    assert check_jagged(jagged(), SHARDING, 1, None, [torch.zeros(20, 8)]).key_of_slot == (0,)
    narrow = jagged(offsets=torch.arange(13, dtype=torch.int32), values=torch.zeros(12, dtype=torch.int32))
    assert check_jagged(narrow, SHARDING, 0, None, WEIGHTS).global_batch == 4
    assert check_jagged(jagged(batch=5), SHARDING, 0, None, WEIGHTS).batch_sizes == (3, 2)
    assert check_jagged(jagged(batch=0), SHARDING, 0, None, WEIGHTS) == CheckedInput((1, 2, 0, 1), (0, 0), 0)


def test_a_rank_without_tables_learns_the_batch_elsewhere():
    lonely = replace(SHARDING, rank_of_table=(0, 0, 0))
    nothing = jagged(None, blocks=0)
    assert check_jagged(nothing, lonely, 1, (3, 2), []) == CheckedInput((), (3, 2), 5)
    assert check_jagged(nothing._replace(keys=(), stride=6), lonely, 1, None, []).batch_sizes == (3, 3)
    assert check_jagged(jagged(), lonely, 1, None, []).global_batch == 4  # from features of other ranks
    with refused("no features", "batch_sizes"):
        check_jagged(nothing, lonely, 1, None, [])
    with refused("5 offsets", "without features"):
        check_jagged(nothing._replace(offsets=torch.arange(5)), lonely, 1, (3, 2), [])


@pytest.mark.parametrize(
    ("given_input", "batch_sizes", "words"),
    [
        (jagged(("i", "u")), None, ["'users'", "'friend'", "lacks", "'i', 'u'"]),
        (jagged(("i", "u", "friend", "age")), None, ["'age'", "no table", "feature_names", "'friend'"]),
        (jagged(offsets=torch.arange(12)), None, ["12 offsets", "3 keys", "samples * features + 1"]),
        (jagged(offsets=torch.arange(12)), [1, 3], ["12 offsets", "3 keys", "4 * 3 + 1 = 13"]),
        (jagged(None, blocks=3, batch=3), None, ["10 offsets", "4 local features"]),
        (jagged(offsets=torch.arange(0)), None, ["0 offsets"]),
        (jagged(values=torch.zeros(12)), None, ["values", "float32", "int32", "int64"]),
        (jagged(offsets=torch.zeros(13, dtype=torch.int16)), None, ["offsets", "int16", "int32", "int64"]),
        (jagged(values=torch.zeros(6, 2, dtype=torch.int64)), None, ["values", "[6, 2]", "one-dimensional"]),
        (jagged(values=torch.zeros(24, dtype=torch.int64)[::2]), None, ["values", "(2,)", "values.contiguous()"]),
        (jagged(values=[0] * 12), None, ["values", "list", "torch.Tensor"]),
        (jagged(weights=torch.zeros(12, dtype=torch.float64)), None, ["per_sample_weights", "float64", "float32"]),
        (jagged(weights=torch.zeros(11)), None, ["11 per_sample_weights", "12 values"]),
        (jagged(values=torch.zeros(12, dtype=torch.int64, device="meta")), None, ["values", "meta", "cpu", "move"]),
        (jagged(offsets=torch.zeros(13, dtype=torch.int64, device="meta")), None, ["offsets", "meta", "cpu", "move"]),
        (jagged(), [1, 2], ["(1, 2)", "sum to 3", "4 samples"]),
        (jagged(), [5, -1], ["(5, -1)", "rank 1", "-1 samples"]),
        (jagged(), [4], ["(4,)", "one for each of the 2 ranks"]),
    ],
)
def test_bad_input_is_refused_with_values_and_the_fix(given_input, batch_sizes, words):
    with refused(*words):
        check_jagged(given_input, SHARDING, 0, batch_sizes, WEIGHTS)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (WEIGHTS[:1], ["1 weight for", "rank 0", "2 tables", "users, pairs"]),
        ([WEIGHTS[0], torch.zeros(30, 5)], ["'pairs'", "[30, 5]", "[30, 4]"]),
        ([WEIGHTS[0].half(), WEIGHTS[1]], ["'users'", "float16", "float32"]),
        ([WEIGHTS[0], torch.zeros(4, 30).t()], ["'pairs'", "strides (1, 30)", "contiguous()"]),
        ([WEIGHTS[0], _resized(30, 4, 0)], ["'pairs'", "holds 0 of 480 bytes", "freed"]),
        ([_resized(10, 4, 159), WEIGHTS[1]], ["'users'", "holds 159 of 160 bytes"]),
        ([torch._neg_view(WEIGHTS[0]), WEIGHTS[1]], ["'users'", "negated", "resolve_neg()"]),
        ([WEIGHTS[0], WEIGHTS[1].to("meta")], ["'pairs'", "meta", "'users'", "cpu"]),
        ([weight.to("meta") for weight in WEIGHTS], ["'users'", "meta", "no values", "to_empty"]),
    ],
)
def test_bad_tables_are_refused(weights, words):
    with refused(*words):
        check_jagged(jagged(), SHARDING, 0, None, weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # The offsets are blocks of 4 samples: i (read by table pairs), u, friend.
        ({0: -1}, ["'pairs'", "'i'", "offsets[0]", "-1", "0 or more"]),
        ({6: 2}, ["'users'", "'u'", "offsets[5]", "sample 1", "is 5", "2", "ascend"]),
        ({9: 99}, ["'users'", "'friend'", "offsets[9]", "sample 1", "is 99", "10"]),
        (dict(enumerate(range(2, 15))), ["'users'", "'friend'", "ends at 13", "begin at 2", "pass offsets - 2"]),
        ({12: 14}, ["'users'", "'friend'", "offsets[11]", "sample 3", "ends at 14", "12 values"]),
        ({12: 13}, ["'users'", "'friend'", "offsets[11]", "sample 3", "ends at 13", "12 values"]),
        ({1: -7}, ["'pairs'", "'i'", "offsets[0]", "next is -7"]),
    ],
)
def test_offsets_that_make_no_bags_are_refused(change, words):
    bad = jagged()
    for position, value in change.items():
        bad.offsets[position] = value
    checked = check_jagged(bad, SHARDING, 0, None, WEIGHTS)
    with refused(*words):
        check_offsets(bad, SHARDING, 0, checked)


def test_a_fault_beyond_the_first_look_and_in_a_foreign_block():
    count = 100_000
    keys = ("u", "friend", "i")
    large = jagged(keys, batch=count)
    checked = check_jagged(large, SHARDING, 1, None, [torch.zeros(20, 8)])
    check_offsets(large, SHARDING, 1, checked)
    large.offsets[2 * count + 70_001] = 5
    with refused("'items'", "'i'", "sample 70000"):
        check_offsets(large, SHARDING, 1, checked)
    large.offsets[count + 1] = 7
    with refused("'friend' (of another rank's table)", "sample 0"):
        check_offsets(large, SHARDING, 1, checked)


@pytest.mark.parametrize("position", [65_535, 65_536, 65_537, 131_072])
def test_offsets_may_fall_nowhere_where_one_look_ends_and_the_next_begins(position):
    count = 70_000
    large = jagged(("u", "friend"), batch=count)
    checked = CheckedInput((0, 1), (count, 0), count)
    check_offsets(large, SHARDING, 0, checked)
    large.offsets[position:] -= 5
    with refused(f"offsets[{position - 1}]", f"is {position - 1} and the next is {position - 5}", "ascend"):
        check_offsets(large, SHARDING, 0, checked)


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (3, ["go from 3 to 15", "20 values", "pass values[3:15] and offsets - 3"]),
        (0, ["go from 0 to 12", "20 values", "pass values[0:12]"]),
        (8, ["go from 8 to 20", "20 values", "pass values[8:20] and offsets - 8"]),
    ],
)
def test_bags_of_a_part_of_the_values_are_refused(begin, words):
    part = jagged(values=torch.zeros(20, dtype=torch.int64), offsets=torch.arange(13) + begin)
    checked = check_jagged(part, SHARDING, 0, None, WEIGHTS)
    with refused(*words):
        check_offsets(part, SHARDING, 0, checked)


@given(st.integers(1, 6), st.data())
def test_the_first_bad_index_is_found(batch, data):
    bags = 3 * batch
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=bags, max_size=bags)), dtype=torch.int64)
    count = int(lengths.sum())
    ids = st.one_of(st.integers(0, 9), st.sampled_from([-1, 10, 29, 30, 2**40]))
    values = torch.tensor(data.draw(st.lists(ids, min_size=count, max_size=count)), dtype=torch.int64)
    given_input = jagged(values=values, offsets=offsets_of(lengths), batch=batch)
    checked = check_jagged(given_input, SHARDING, 0, [batch, 0], WEIGHTS)
    wanted = None
    offsets = given_input.offsets.tolist()
    for number, (slot, block) in enumerate(zip(SHARDING.local_slots(0), checked.key_of_slot, strict=True)):
        for sample in range(batch):
            begin, end = offsets[block * batch + sample : block * batch + sample + 2]
            for position, value in enumerate(values[begin:end].tolist()):
                if wanted is None and not 0 <= value < SHARDING.tables[slot.table].num_embeddings:
                    wanted = bad_index_message(SHARDING, 0, number, sample, position, value)
    assert first_bad_index(given_input, SHARDING, 0, checked) == wanted
    assert first_bad_index(given_input, SHARDING, 0, checked, hash=True) is None


def test_the_index_message_names_everything():
    message = bad_index_message(SHARDING, 0, 2, sample=17, position=3, value=31)
    for word in ("'pairs'", "'i'", "sample 17", "position 3", "31", "[0, 30)", "hash=True"):
        assert word in message
    assert hash_ids(torch.tensor([31]), 30).item() < 30
