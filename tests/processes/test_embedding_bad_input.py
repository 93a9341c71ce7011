"""Bad input of embedding_all_to_all is refused on every rank, before anything is written, and the group stays usable.

First errors in one rank's arguments, one line each. Then calls that differ between ranks, groups, and a result for
which there is no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import embedding_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from embedding_ranks import TRANSPORTS, assert_same_bits
from support.on_ranks import assert_error, assert_errors, error_of
from support.reference import Problem, problem, tables_of
from support.slow import in_turn

import weft
from weft.embedding import EmbeddingSharding, KeyedJaggedTensor
from weft.launch import Pool

BAD_RANK = 1  # this rank owns t1 (31 rows of 3, mean) and t2 (32 rows of 16), and has 5 of 11 samples
PROBLEM = Problem(tables_of((8, 3, 16, 1)), (0, 1, 1, 2), (4, 5, 2), weighted=True)

Arguments = dict[str, Any]
Spoiler = Callable[[Arguments], Any]


def put_at(name: str, index: int, value: int) -> Spoiler:
    return lambda a: a[name].__setitem__(index, value)


def replace(name: str, change: Callable[[Any], Any]) -> Spoiler:
    return lambda a: a.__setitem__(name, change(a[name]))


def keyed(*keys: str) -> Spoiler:
    """Return features with these keys. Each key has f1's bags."""

    def spoil(a: Arguments) -> None:
        one, ids = a["offsets"][:12], int(a["offsets"][11])
        offsets = torch.cat([one[:1], *(one[1:] + ids * i for i in range(len(keys)))])
        values, weights = a["values"][:ids].repeat(len(keys)), a["weights_of_ids"][:ids].repeat(len(keys))
        a["features"] = KeyedJaggedTensor(list(keys), values, weights, offsets=offsets)

    return spoil


# (change of rank 1's arguments, words of the error).
SPOILED: dict[str, tuple[Spoiler, list[str]]] = {
    "index beyond the table": (put_at("values", 3, 31), ["'t1'", "'f1'", "sample", "index 31", "[0, 31)", "hash=True"]),
    "index far beyond": (put_at("values", -1, 2**62), ["'t2'", "'f2'", f"index {2**62}", "[0, 32)"]),
    "negative index": (put_at("values", 0, -7), ["'t1'", "'f1'", "position 0", "index -7", "[0, 31)"]),
    "negative offset": (put_at("offsets", 0, -2), ["'t1'", "'f1'", "offsets[0]", "-2", "0 or more"]),
    "descending offsets": (put_at("offsets", 14, 0), ["'t2'", "'f2'", "sample 2", "offsets[13]", "next is 0", "ascend"]),
    "offsets beyond values": (put_at("offsets", -1, 1000), ["'t2'", "'f2'", "sample 10", "1000", "beyond"]),
    "too few offsets": (replace("offsets", lambda t: t[:-1]), ["22 offsets", "2 local features", "11 * 2 + 1 = 23"]),
    "too many offsets": (replace("offsets", lambda t: t.repeat(2)), ["46 offsets", "11 * 2 + 1 = 23"]),
    "no offset": (replace("offsets", lambda t: t[:0]), ["0 offsets", "11 * 2 + 1 = 23"]),
    "float ids": (replace("values", torch.Tensor.float), ["values is torch.float32", "int32 or torch.int64"]),
    "short offsets": (replace("offsets", torch.Tensor.short), ["offsets is torch.int16", "int32 or torch.int64"]),
    "double weights of ids": (
        replace("weights_of_ids", torch.Tensor.double),
        ["per_sample_weights is torch.float64", "pass torch.float32"],
    ),
    "too few weights of ids": (replace("weights_of_ids", lambda t: t[1:]), ["per_sample_weights for", "one weight per value"]),
    "two-dimensional ids": (replace("values", lambda t: t[None]), ["values has shape [1, ", "one-dimensional"]),
    "strided ids": (replace("values", lambda t: t.repeat_interleave(2)[::2]), ["values has strides (2,)", "contiguous()"]),
    "a list of ids": (replace("values", torch.Tensor.tolist), ["values is a list", "torch.Tensor"]),
    "ids elsewhere": (replace("values", lambda t: t.to("meta")), ["values is on meta", "tables are on cpu"]),
    "offsets elsewhere": (replace("offsets", lambda t: t.to("meta")), ["offsets is on meta", "tables are on cpu"]),
    "a table elsewhere": (
        lambda a: a["weights"].__setitem__(1, a["weights"][1].to("meta")),
        ["'t2' is on meta", "'t1' is on cpu", "one device"],
    ),
    "a table in fp16": (
        lambda a: a["weights"].__setitem__(1, a["weights"][1].half()),
        ["'t2'", "weight is torch.float16", "but the table is torch.float32"],
    ),
    "a table of another shape": (
        lambda a: a["weights"].__setitem__(0, a["weights"][0][1:]),
        ["'t1'", "weight is [30, 3]", "table is [31, 3]"],
    ),
    "a strided table": (
        lambda a: a["weights"].__setitem__(1, a["weights"][1].t().contiguous().t()),
        ["'t2'", "strides (1, 32)", "contiguous()"],
    ),
    "no list of tables": (replace("weights", lambda _: None), ["weights is a NoneType", "one tensor per table"]),
    "tables by name": (replace("weights", lambda w: dict(enumerate(w))), ["weights is a dict", "one tensor per table"]),
    "a table that is no tensor": (lambda a: a["weights"].__setitem__(0, None), ["weight of table 't1' is a NoneType", "Tensor"]),
    "a table too few": (lambda a: a["weights"].pop(), ["1 weight for", "owns 2 tables (t1, t2)"]),
    "updates by a value": (replace("update", lambda _: 0.1), ["update is a float", "FusedUpdate(weft.SGD(lr=...), weights)"]),
    "updates of other tables": (
        lambda a: a.update(update=weft.embedding.FusedUpdate(weft.Adam(lr=0.1), a["weights"][:1])),
        ["update was created for tables of shapes [(31, 3)]", "weights have shapes [(31, 3), (32, 16)]"],
    ),
    "sparse updates": (
        lambda a: a.update(update=weft.embedding.FusedUpdate(weft.SGD(lr=0.1), a["weights"]), sparse=True),
        ["sparse=True with an update"],
    ),
    "batch sizes of two ranks": (replace("batch_sizes", lambda s: s[:2]), ["batch_sizes=(4, 5)", "2 entries", "3"]),
    "a negative batch": (replace("batch_sizes", lambda s: (4, -1, 8)), ["(4, -1, 8)", "rank 1", "-1 samples"]),
    "another global batch": (replace("batch_sizes", lambda s: (4, 5, 13)), ["(4, 5, 13) sum to 22", "11 samples"]),
    "batch sizes that are no integers": (replace("batch_sizes", lambda s: (4.0, 5, 2)), ["[0]=4.0 is a float", "integer"]),
    "batch sizes in a text": (replace("batch_sizes", lambda s: "452"), ["batch_sizes='452' is a str", "pass a list"]),
    "a feature without a table": (keyed("f1", "f2", "stranger"), ["'stranger'", "no table", "'f0'"]),
    "a missing feature": (keyed("f1", "f0"), ["'t2'", "'f2'", "lacks", "'f1', 'f0'"]),
    "no features at all": (replace("features", lambda _: object()), ["object", "KeyedJaggedTensor"]),
    "a tuple of four": (replace("features", lambda _: (1, 2, 3, 4)), ["tuple of 4", "(values, offsets"]),
    "an unknown transport": (replace("transport", lambda _: "pigeon"), ["transport='pigeon'", "'direct', 'put'"]),
    "an unknown order": (replace("order", lambda _: "random"), ["order='random'", "'remote_first'", "'natural'"]),
    "an unknown bounds check": (replace("bounds_check", lambda _: "maybe"), ["bounds_check='maybe'", "'fatal'"]),
    "half a slice": (replace("slice_size", lambda _: 0.5), ["slice_size=0.5", "at least 1"]),
    "empty slices": (replace("slice_size", lambda _: 0), ["slice_size=0", "at least 1"]),
    "outputs that are a flag": (replace("outputs", lambda _: True), ["outputs=True is a bool", "between 1 and 255"]),
    "no outputs": (replace("outputs", lambda _: 0), ["outputs=0", "must be between 1 and 255"]),
    "no time": (replace("deadline_s", lambda _: -1.0), ["deadline_s=-1.0", "positive"]),
    "a timeline that is none": (lambda a: a.__setitem__("timeline", 3), ["timeline=3 is not a Timeline", "weft.Timeline()"]),
    "tables of two ranks": (
        replace("sharding", lambda s: EmbeddingSharding(s.tables, (0, 1, 1, 0), 2)),
        ["sharding is for 2 ranks", "group has 3", "place_tables(tables, 3)"],
    ),
}  # fmt: skip


def arguments(p: Problem, rank: int, **options: Any) -> Arguments:
    values, offsets, *weights = (tensor.clone() for tensor in p.tupled(rank))
    return {
        "weights": p.local_weights(rank), "values": values, "offsets": offsets, "weights_of_ids": weights[0] if weights else None,
        "features": None, "sharding": p.sharding, "batch_sizes": p.batch_sizes, "transport": "direct", "order": "remote_first",
        "bounds_check": "fatal", "slice_size": 32, "outputs": 2, "deadline_s": 30.0, "update": None, "sparse": False,
    } | options  # fmt: skip


def called_with(group: dist.ProcessGroup, a: Arguments) -> torch.Tensor:
    a = dict(a)
    values, offsets, weights, features = (a.pop(name) for name in ("values", "offsets", "weights_of_ids", "features"))
    features = (values, offsets, weights) if features is None else features
    return weft.embedding_all_to_all(a.pop("weights"), features, a.pop("sharding"), group=group, **a)


def spoiled(group, p, what, options):
    """Make a good call, a call with bad arguments on one rank, and a good call. Return (the error, True if memory is
    unchanged, the last result).
    """
    good = arguments(p, group.rank(), **options)
    called_with(group, good)
    operator = ranks.operator_of(group, p, bounds_check="fatal", **options)
    ranks.poison(operator)
    a = arguments(p, group.rank(), **options)
    if group.rank() == BAD_RANK % group.size():
        SPOILED[what][0](a)
    error = error_of(lambda: called_with(group, a))
    buffers = ranks.free_buffers(operator)
    count = 0 if options.get("transport") == "serial" else 2  # memory that peers write
    untouched = len(buffers) == count and all(bool((buffer == ranks.NAN_BYTE).all()) for buffer in buffers)
    return error, untouched, called_with(group, good).clone()


@pytest.mark.parametrize("what", SPOILED)
def test_one_ranks_bad_input_is_refused_on_every_rank(pool: Pool, what: str) -> None:
    for transport in TRANSPORTS:
        answers = pool.run(spoiled, PROBLEM, what, {"transport": transport}, ranks=3)
        assert {error for error, *_ in answers} == {answers[0][0]}, "ranks raised different errors"
        kind, text = answers[0][0]
        assert kind == "RefusedError"
        assert text.startswith(f"rank {BAD_RANK}: ")
        for word in SPOILED[what][1]:
            assert word in text, f"{word!r} is not in {text!r}"
        assert all(untouched for _, untouched, _ in answers)
        assert_same_bits([output for *_, output in answers], PROBLEM)


@pytest.mark.parametrize("what", ["negative index", "descending offsets", "a table in fp16"])
def test_one_rank_refuses_itself(pool: Pool, what: str) -> None:
    p = Problem(tables_of((8, 3, 16))[1:], (0, 0), (11,), weighted=True)
    ((error, untouched, output),) = pool.run(spoiled, p, what, {}, ranks=1)
    assert_error(error, ("ValueError", "TypeError", "RefusedError"), *SPOILED[what][1])
    assert untouched
    assert_same_bits([output], p)


def refused_at_first(group, p):
    """Pass bad input in the first call of a plan, before its memory is allocated."""
    a = arguments(p, group.rank())
    if group.rank() == BAD_RANK:
        a["offsets"][0] = -1
    error = error_of(lambda: called_with(group, a))
    return error, called_with(group, arguments(p, group.rank())).clone()


def test_the_first_call_may_be_refused(pool: Pool) -> None:
    p = problem(3, (5, 6, 7, 8), weighted=True)
    answers = pool.run(refused_at_first, p, ranks=3)
    assert {kind for (kind, _), _ in answers} == {"RefusedError"}
    assert_same_bits([output for _, output in answers], p)


def without_tables(group, p, offsets):
    """Let a rank without tables pass no offsets."""
    values, own = p.tupled(group.rank())
    features = (values, own[:offsets] if group.rank() == 1 else own)
    return ranks.call(group, p, features).clone()


@pytest.mark.parametrize("offsets", [0, 1])
def test_a_rank_without_tables_needs_no_offset(pool: Pool, offsets: int) -> None:
    p = Problem(tables_of((8, 3)), (0, 0), (4, 5))
    assert_same_bits(pool.run(without_tables, p, offsets, ranks=2), p)


# --- calls that differ between ranks ---


def table(number: int, **changes: Any) -> Callable[[Problem], Problem]:
    def change(p: Problem) -> Problem:
        tables = list(p.tables)
        tables[number] = dataclasses.replace(tables[number], **changes)
        return dataclasses.replace(p, tables=tuple(tables))

    return change


def option(**changes: Any) -> Callable[[Problem], Arguments]:
    return lambda p: changes


# (difference of rank 1's call, words of the error).
DIFFERENT: dict[str, tuple[Callable[[Problem], Any], list[str]]] = {
    "rows": (table(2, num_embeddings=99), ["table 2", "t2 [32, 16]", "t2 [99, 16]"]),
    "columns": (table(0, embedding_dim=7), ["table 0", "t0 [30, 8]", "t0 [30, 7]"]),
    "name": (table(3, name="other"), ["table 3", "t3 ", "other "]),
    "feature": (table(3, feature_names=("g",)), ["table 3", "of f3", "of g"]),
    "pooling": (table(1, pooling="sum"), ["table 1", "mean", "sum"]),
    "dtype": (
        lambda p: dataclasses.replace(p, tables=tuple(dataclasses.replace(t, dtype=torch.float16) for t in p.tables)),
        ["torch.float32", "torch.float16"],
    ),
    "fewer tables": (
        lambda p: dataclasses.replace(p, tables=p.tables[:3], rank_of_table=p.rank_of_table[:3]),
        ["table 3", "'nothing'"],
    ),
    "placement": (lambda p: dataclasses.replace(p, rank_of_table=(0, 1, 1, 1)), ["table 3", "on rank 2", "on rank 1"]),
    "transport": (option(transport="put"), ["transport", "'direct'", "'put'"]),
    "order": (option(order="natural"), ["order", "'remote_first'", "'natural'"]),
    "slice_size": (option(slice_size=3), ["slice_size", "'32'", "'3'"]),
    "bounds_check": (option(bounds_check="none"), ["bounds_check", "'warning'", "'none'"]),
    "hash": (option(hash=True), ["hash", "'False'", "'True'"]),
    "outputs": (option(outputs=3), ["outputs", "'2'", "'3'"]),
}


def differ(group, p, what, known):
    """Let rank 1 make another call than the other ranks. known: True if all ranks have made both calls before."""
    group = dist.new_group(list(range(group.size())))
    change = DIFFERENT[what][0](p)
    other, options = (change, {}) if isinstance(change, Problem) else (p, change)
    if known:
        ranks.call(group, p)
        ranks.call(group, other, **options)
    if group.rank() == 1:
        return error_of(lambda: ranks.call(group, other, deadline_s=30.0, **options))
    return error_of(lambda: ranks.call(group, p, deadline_s=30.0))


@pytest.mark.parametrize(("what", "known"), in_turn(DIFFERENT, [False, True]))
def test_ranks_that_disagree(pool: Pool, what: str, known: bool) -> None:
    p = Problem(tables_of((8, 3, 16, 1)), (0, 1, 1, 2), (4, 5, 2))
    answers = pool.run(differ, p, what, known, ranks=3)
    assert set(answers) == {answers[0]}, "ranks raised different errors"
    assert_error(answers[0], "DisagreementError", "rank 0", "rank 1", *DIFFERENT[what][1])


def differ_in_batch(group, p, sizes, known):
    own = dist.new_group(list(range(group.size())))
    if known:
        ranks.call(own, p, batch_sizes=sizes[0])
    return error_of(lambda: ranks.call(own, p, batch_sizes=sizes[group.rank()], deadline_s=30.0))


def test_ranks_that_divide_the_batch_otherwise(pool: Pool) -> None:
    p = problem(3, batch=12)
    assert_errors(
        pool.run(differ_in_batch, p, [(4, 4, 4), (4, 4, 4), (4, 5, 3)], False, ranks=3),
        "DisagreementError",
        "batch_sizes is '(4, 4, 4)' on rank 0 and '(4, 5, 3)' on rank 2",
    )
    p = problem(3, batch=30)
    answers = pool.run(differ_in_batch, p, [(10, 10, 10), (10, 10, 10), (10, 11, 9)], True, ranks=3)
    for rank, (kind, text) in enumerate(answers):
        assert kind == "DisagreementError"
        assert "ranks 0 and 2" in text
        assert "batch_sizes" in text
        assert f"on rank {rank}" in text


# --- groups ---


def in_no_group(group, p):
    outsider = dist.new_group([0])
    error = ("", "") if group.rank() == 0 else error_of(lambda: ranks.call(outsider, p, deadline_s=30.0))
    none = error_of(
        lambda: weft.embedding_all_to_all(p.local_weights(0), p.tupled(0), p.sharding, group=None)  # type: ignore[arg-type]
    )
    return error, none


def test_groups_that_are_none_of_this_ranks(pool: Pool) -> None:
    p = problem(1)
    answers = pool.run(in_no_group, p, ranks=2)
    assert_errors([error for _, error in answers], "ValueError", "dist.group.WORLD")


def test_a_rank_outside_the_group(pool: Pool) -> None:
    """torch returns NON_GROUP_MEMBER to a rank that is not in a new group. `call` first asks this object for its rank."""
    assert_error(pool.run(outside, problem(1), ranks=2)[1], "ValueError", "this rank is not a member of the group")


def outside(group, p):
    one = dist.new_group([0])
    if group.rank() == 0:
        return "", ""
    return error_of(lambda: weft.embedding_all_to_all(p.local_weights(0), p.tupled(0), p.sharding, group=one))


# --- no memory ---


def too_large(group, small, large):
    outputs = [ranks.call(group, small).clone()]
    error = error_of(lambda: ranks.call(group, large, deadline_s=30.0))
    ranks.poison(ranks.operator_of(group, small))
    outputs += [ranks.call(group, small) for _ in range(3)]
    return error, [output.clone() for output in outputs]


def test_a_result_for_which_there_is_no_memory(pool: Pool) -> None:
    """Every rank must refuse it, and the existing buffers must stay usable."""
    tables = (weft.EmbeddingBagConfig(1, 1 << 20, "wide", ("f",)),)
    small, large = (Problem(tables, (0,), sizes, longest=1) for sizes in [(2, 3), (1 << 20, 1 << 19)])
    answers = pool.run(too_large, small, large, ranks=2)
    assert_errors([error for error, _ in answers], "OutOfSharedMemoryError", "smaller batches")
    for number in range(4):
        assert_same_bits([outputs[number] for _, outputs in answers], small)
