"""Other uses of a `ShardedEmbeddingBagCollection`: offsets of another batch; copies, pickles, conversions and moves.

Each result is compared with `torch.nn.functional.embedding_bag` on one rank, and each refusal is checked on all ranks.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from support.on_ranks import assert_error, assert_errors, error_of
from support.slow import slow

import weft
from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, KeyedJaggedTensor
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

TABLES = (EmbeddingBagConfig(50, 8, "users", ("u", "friend")), EmbeddingBagConfig(20, 3, "items", ("i",), "mean"))
KEYS = ["u", "friend", "i"]
BATCH = 4
PLACEMENTS = [[0, 1], [1, 1]]  # with the second placement, rank 0 owns no table


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as workers:
        yield workers


def made(group, **options) -> ShardedEmbeddingBagCollection:
    module = ShardedEmbeddingBagCollection(TABLES, group=group, **options)
    module.load_full_weights(full_weights())
    return module


def full_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {t.name: torch.randn(t.num_embeddings, t.embedding_dim, generator=generator) for t in TABLES}


def features(seed: int, before: int = 0, after: int = 0, dtype=torch.int64, keys=KEYS) -> KeyedJaggedTensor:
    """Return `BATCH` samples with 0 to 4 ids per bag. Other values before and after them are out of range."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(keys) * BATCH,), generator=generator)
    count = int(lengths.sum())
    own = torch.randint(0, 20, (count,), generator=generator)
    weights = torch.rand(before + count + after, generator=generator)
    values = torch.cat([torch.full((before,), 10**6), own, torch.full((after,), -1)]).to(dtype)
    offsets = before + torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return KeyedJaggedTensor(list(keys), values, weights, offsets=offsets.to(dtype))


def reference(given: KeyedJaggedTensor, full: dict[str, torch.Tensor], weighted: bool = False) -> torch.Tensor:
    """Compute [batch, sum(D)] with `embedding_bag`, table by table. A weighted mean is divided by the bag's length
    afterwards.
    """
    columns = []
    for table in TABLES:
        for feature in table.feature_names:
            bags = given[feature]
            weights = bags.weights_or_none() if weighted else None
            mode = "sum" if weighted else table.pooling
            pooled = torch.nn.functional.embedding_bag(
                bags.values(), full[table.name], bags.offsets(), mode=mode, per_sample_weights=weights,
                include_last_offset=True,
            )  # fmt: skip
            mean = weighted and table.pooling == "mean"
            columns.append(pooled / bags.lengths().clamp(min=1)[:, None] if mean else pooled)
    return torch.cat(columns, dim=1)


def close(output: torch.Tensor, wanted: torch.Tensor) -> bool:
    # A bag has at most 4 rows of magnitude below 5. They are summed in float32, and rounded once to the output's dtype.
    tolerance = 4 * 5 * max(torch.finfo(output.dtype).eps, 4 * torch.finfo(torch.float32).eps)
    return output.shape == wanted.shape and bool((output.double() - wanted.double()).abs().max() <= tolerance)


# --- offsets of another batch ---


class TorchRecLike:
    """An object with only the required methods of a KeyedJaggedTensor. It cannot tell whether offsets were given."""

    def __init__(self, ours: KeyedJaggedTensor):
        for name in ("keys", "values", "lengths", "offsets", "weights_or_none", "stride"):
            setattr(self, name, getattr(ours, name))


def refused(
    group, bad: KeyedJaggedTensor, good: KeyedJaggedTensor, options: dict
) -> tuple[tuple[str, str], torch.Tensor]:
    module = made(group, **options)
    return error_of(lambda: module(bad if group.rank() == 1 else good)), module(good).values().clone()


def given_as(what: str) -> Any:
    good = features(1, before=5)
    keys, values, offsets = good.keys(), good.values(), good.offsets()
    if what == "values cut off":
        return KeyedJaggedTensor(keys, values[5:], offsets=offsets)
    if what == "below zero":
        return KeyedJaggedTensor(keys, values[5:], offsets=offsets - 7)
    if what == "dictionary":
        return {"u": values}
    if what.startswith("two stories"):
        told = KeyedJaggedTensor(keys, values, lengths=offsets.diff() + 1, offsets=offsets)
        return told if what == "two stories" else TorchRecLike(told)
    return KeyedJaggedTensor(keys, values, lengths=offsets.diff())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("values cut off", ["offsets go from 5 to", "pass offsets - 5"]),
        ("below zero", ["offsets go from -2 to", "0 or more"]),
        ("two stories", ["lengths and offsets disagree: bag 0 has", "pass only one of them"]),
        (
            "two stories, unseen before the headers",
            ["lengths sum to", "offsets go from 5 to", "pass only one of them"],
        ),
        ("lengths alone", ["lengths sum to", "correct the lengths"]),
    ],
)
def test_offsets_that_do_not_fit_are_refused_by_all(pool, what, words):
    good = features(0)
    for error, after in pool.run(refused, given_as(what), good, {}, ranks=2):
        assert_error(error, "RefusedError", "rank 1: ", *words)
        assert close(after, reference(good, full_weights()))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("values cut off", ["beyond the", "pass offsets - 5"]),
        ("below zero", ["offsets[0]", "is -2", "0 or more"]),
        ("two stories", ["lengths and offsets disagree: bag 0 has", "pass only one of them"]),
        ("dictionary", ["features is a dict, which has no lengths()", "pass a KeyedJaggedTensor"]),
    ],
)
def test_offsets_of_a_global_batch_that_do_not_fit_are_refused_by_all(pool, what, words):
    options = {"input": "global_batch", "placement": [1, 0]}
    assert_errors(
        [error for error, _ in pool.run(refused, given_as(what), features(0), options, ranks=2)],
        "RefusedError",
        "rank 1: ",
        *words,
    )


# --- copies ---


class Model(torch.nn.Module):
    def __init__(self, group, **options):
        super().__init__()
        self.embeddings, self.dense = made(group, **options), torch.nn.Linear(2, 1)


def copied(group, placement) -> tuple:
    model = Model(group, placement=placement)
    given = features(group.rank())
    model.embeddings(given)  # so that the module has memory when it is copied
    other = copy.deepcopy(model).embeddings
    with torch.no_grad():
        for weight in model.embeddings.parameters():
            weight.zero_()
    mine = model.embeddings(given).values().clone()
    shallow = copy.copy(other)
    shares = all(a is b for a, b in zip(shallow.parameters(), other.parameters(), strict=True))
    return mine, other(given).values().clone(), shares, other.group is group, list(other.state_dict())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_deep_copy_has_its_own_weights_on_the_same_group(pool, placement):
    for rank, (mine, others, shares, same_group, names) in enumerate(pool.run(copied, placement, ranks=2)):
        assert not mine.any()
        assert close(others, reference(features(rank), full_weights()))
        assert shares
        assert same_group
        assert names == [f"embedding_bags.{t.name}.weight" for t, r in zip(TABLES, placement, strict=True) if r == rank]


def pickled(group) -> list[tuple[str, str]]:
    model = Model(group)
    attempts = (
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: pickle.dumps(model.embeddings),
    )
    return [error_of(attempt) for attempt in attempts]


def test_pickling_is_refused_with_the_way_to_save(pool):
    for rank, errors in enumerate(pool.run(pickled, ranks=2)):
        assert_errors(
            errors,
            "TypeError",
            "ShardedEmbeddingBagCollection",
            f"rank {rank} of 2",
            "state_dict()",
            "load_state_dict()",
        )


def saved(group) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(made(group).state_dict(), file)
    file.seek(0)
    anew = ShardedEmbeddingBagCollection(TABLES, group=group)
    anew.load_state_dict(torch.load(file))
    return anew(features(group.rank())).values().clone()


def test_what_the_refusal_recommends_works(pool):
    for rank, output in enumerate(pool.run(saved, ranks=2)):
        assert close(output, reference(features(rank), full_weights()))


# --- conversions and moves ---

CONVERSIONS = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "to": (lambda m: m.to(torch.float16), torch.float16),
    "there and back": (lambda m: m.half().bfloat16().float(), torch.float32),
    "to where it is": (lambda m: m.to("cpu"), torch.float32),
    "shared memory": (lambda m: m.share_memory(), torch.float32),
}


def converted(group, what: str, options: dict) -> tuple:
    model = Model(group, **options)
    given = features(0) if "input" in options else features(group.rank())
    model.embeddings(given)
    CONVERSIONS[what][0](model)
    module = model.embeddings
    weights = {name: bag.weight.detach() for name, bag in module.embedding_bags.items()}
    return module(given).values().clone(), weights, {table.dtype for table in module.embedding_bag_configs()}


@pytest.mark.parametrize("what", CONVERSIONS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("given", ["local_batch", "global_batch"])
def test_converted_tables(pool, what, placement, given):
    local, dtype = given == "local_batch", CONVERSIONS[what][1]
    options = {"placement": placement} if local else {"placement": placement, "input": given}
    answers = pool.run(converted, what, options, ranks=2)
    full = {name: weight for _, weights, _ in answers for name, weight in weights.items()}
    for rank, (output, _, dtypes) in enumerate(answers):
        rows = slice(None) if local else slice(2 * rank, 2 * rank + 2)
        assert output.dtype == dtype
        assert dtypes == {dtype}
        # The reference is computed in float64 from the converted weights, because torch does the conversion.
        in_double = {name: weight.double() for name, weight in full.items()}
        assert close(output, reference(features(rank if local else 0), in_double)[rows])


def unconvertible(group, what: str) -> tuple:
    module = made(group)
    calls = {
        "double": lambda: module.double(),
        "to float64": lambda: module.to(torch.float64),
        "complex": lambda: module.to(torch.complex64),
        "float8": lambda: module.to(torch.float8_e4m3fn),
    }
    return error_of(calls[what]), module(features(group.rank())).values().clone()


@pytest.mark.parametrize(
    ("what", "dtype"),
    [("double", "float64"), ("to float64", "float64"), ("complex", "complex64"), ("float8", "float8_e4m3fn")],
)
def test_dtypes_that_no_table_can_have_are_refused_and_leave_all_as_it_was(pool, what, dtype):
    for rank, ((kind, text), after) in enumerate(pool.run(unconvertible, what, ranks=2)):
        assert kind == "ValueError"
        for word in (f"torch.{dtype}", "torch.float32, torch.float16, torch.bfloat16", "module(features)"):
            assert word in text
        assert close(after, reference(features(rank), full_weights()))


def converted_by_one(group) -> tuple[str, str]:
    module = made(torch.distributed.new_group(list(range(group.size()))))
    if group.rank() == 1:
        module.half()
    return error_of(lambda: module(features(group.rank())))


def test_a_conversion_on_one_rank_alone_is_a_disagreement(pool):
    assert_errors(pool.run(converted_by_one, ranks=2), "DisagreementError", "torch.float16")


def on_meta(group, placement, given, only) -> tuple:
    module = made(group, placement=placement, input=given)
    if group.rank() in only:
        module.to("meta")
    error = error_of(lambda: module(features(0)))
    module.to_empty(device="cpu")
    module.load_full_weights(full_weights())
    return error, module(features(0)).values().clone()


@pytest.mark.parametrize("given", ["local_batch", "global_batch"])
@pytest.mark.parametrize("only", [[0, 1], [1]])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tables_on_meta_are_refused_by_all_until_they_are_back(pool, given, only, placement):
    wanted = reference(features(0), full_weights())
    for rank, ((kind, text), after) in enumerate(pool.run(on_meta, placement, given, only, ranks=2)):
        assert kind == "RefusedError"
        by = (
            "ranks 0, 1"
            if given == "local_batch" and len(only) == 2
            else f"rank {only[0] if only[0] in placement else 1}"
        )
        # If both ranks own tables on meta, both refuse at once, or one receives the other's refusal first.
        by_both = "ranks 0, 1" if len(only) == 2 and set(placement) == {0, 1} else by
        assert f"{by}: " in text or f"{by_both}: " in text
        assert "on meta" in text
        assert "to_empty" in text
        assert close(after, wanted if given == "local_batch" else wanted[2 * rank : 2 * rank + 2])


def made_on_meta(group) -> tuple:
    module = ShardedEmbeddingBagCollection(TABLES, group=group, device="meta")
    module.to_empty(device="cpu")
    module.load_full_weights(full_weights())
    return module(features(group.rank())).values().clone(), error_of(lambda: made(group, device="xpu"))


def test_a_module_made_on_meta_and_a_device_that_is_none(pool):
    for rank, (output, (kind, text)) in enumerate(pool.run(made_on_meta, ranks=2)):
        assert close(output, reference(features(rank), full_weights()))
        assert kind == "RefusedError"
        assert "device='xpu'" in text
        assert "cpu or cuda" in text


def reinterpreted(group) -> tuple[str, str]:
    """Change the dtype of a tensor that was checked, while its address and strides stay the same."""
    sharding, memory = EmbeddingSharding(TABLES[1:], (0,), 1), torch.rand(20 * 3)
    weight, given = memory.view(20, 3), features(0, keys=["i"])
    weft.embedding_all_to_all([weight], given, sharding, group=group)
    weight.data = memory.view(torch.float16)[: 20 * 3].view(20, 3)
    return error_of(lambda: weft.embedding_all_to_all([weight], given, sharding, group=group))


def test_a_table_that_was_checked_is_checked_again_when_its_dtype_changes(pool):
    ((kind, text),) = pool.run(reinterpreted, ranks=1)
    assert kind == "ValueError"
    assert "the weight is torch.float16" in text


def compiled(group, what: str) -> list[float]:
    """Return the largest differences between compiled calls, each with other ids, and eager calls."""
    module = made(group, input="local_batch" if what == "local" else "global_batch").requires_grad_(False)
    own = [slot.feature for slot in module.sharding.local_slots(group.rank())]
    weights = [bag.weight.detach() for bag in module.embedding_bags.values()]

    def by_operator(given: KeyedJaggedTensor) -> torch.Tensor:
        return weft.embedding_all_to_all(weights, given, module.sharding, group=group)

    plain = by_operator if what == "operator" else lambda given: module(given).values()
    call, found = torch.compile(plain, fullgraph=True), []
    for seed in range(4):
        given = features(seed + group.rank() * (what == "local"))
        given = given.permute([KEYS.index(key) for key in own]) if what == "operator" else given
        found.append(float((call(given) - plain(given).clone()).abs().max()))
    return found


@pytest.mark.parametrize("what", [slow("module"), slow("local"), slow("operator")])
def test_compiled_programs_call_it_with_other_ids(what):
    with Pool(2) as alone:  # Dynamo stays loaded
        assert alone.run(compiled, what, timeout_s=120) == [[0.0] * 4] * 2


def compiled_whole(group) -> tuple[list[bool], list[str], list[tuple[str, str]]]:
    """Return (True if compiled calls equal eager calls, Dynamo's warnings, errors of calls with an id out of range)."""
    alike, errors = [], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for input, given in (("local_batch", features(group.rank())), ("global_batch", features(0))):
            module = made(group, input=input, bounds_check="fatal").requires_grad_(False)
            call = torch.compile(module, backend="aot_eager", fullgraph=True)
            alike.append(torch.equal(call(given).values(), module(given).values().clone()))
            bad = KeyedJaggedTensor(
                KEYS, torch.full((3 * BATCH,), 99), lengths=torch.ones(3 * BATCH, dtype=torch.int64)
            )
            errors.append(error_of(partial(call, bad if group.rank() else given)))
            alike.append(torch.equal(call(given).values(), module(given).values().clone()))
    return alike, [str(one.message) for one in warned if "Dynamo" in str(one.message)], errors


def test_a_module_compiles_in_one_graph():
    with Pool(2) as alone:  # Dynamo stays loaded
        answers = alone.run(compiled_whole, timeout_s=120)
    for alike, warned, errors in answers:
        assert (alike, warned) == ([True] * 4, [])
        assert [kind for kind, _ in errors] == ["RefusedError"] * 2
        assert all("index 99 is not in [0, " in text for _, text in errors)
