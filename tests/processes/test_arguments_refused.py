"""Refusals that all operators and the embedding module share.

Rank 1 alone passes tensors of other kinds, wrong dimensions, numbers of rows or deadlines, for a known shape (with few
checks) and for a new shape. Every rank must refuse the call, with the argument's name and the fix. Then the next call
must work.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import pkgutil
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from operators_called import FP8, OPERATORS, TABLES, Features, leaves
from support.on_ranks import resized, told
from support.slow import in_turn
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh

import weft
import weft.ops
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.nn.input_dist import InputDist
from weft.operator import calls


def test_every_operator_is_here() -> None:
    for file in pkgutil.iter_modules(weft.ops.__path__):
        importlib.import_module(f"weft.ops.{file.name}")
    ours = calls.OPERATORS.keys() & set(weft.__all__)  # other operators are parts of these, such as their backward
    assert {"all_gather_matmul", "matmul_all_to_all"} < ours
    assert (ours | {"embedding_all_to_all"}) - OPERATORS.keys() == set(), (
        "without an entry in tests/processes/operators_called.py"
    )


# --- tensors ---


class Elsewhere(torch.Tensor):
    """A subclass of Tensor whose values are in another tensor, like those of quantization libraries."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Elsewhere:
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise RuntimeError("nobody may look inside")


def as_dtensor(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate  # takes half a second, and every rank imports this file

    return DTensor.from_local(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()], run_check=False)


def nested(x: torch.Tensor, layout: torch.layout = torch.strided) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([x, x], layout=layout)


# (conversion of a tensor, words of the error). The error begins with the argument's name.
KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "DTensor": (as_dtensor, "is a DTensor: pass .to_local()"),
    "collective": (AsyncCollectiveTensor, "is an AsyncCollectiveTensor: pass .wait()"),
    "elsewhere": (
        Elsewhere,
        "is an Elsewhere, which does not hold its values itself: pass the torch.Tensor that holds them",
    ),
    "array": (lambda x: np.zeros(x.shape), "is a ndarray: pass torch.from_numpy("),
    "list": (lambda x: [[0.0]], "is a list: pass a torch.Tensor"),
    "nothing": (lambda x: None, "is a NoneType: pass a torch.Tensor"),
    "sparse": (lambda x: x.to_sparse(), "has layout torch.sparse_coo: pass a dense tensor, such as "),
    "nested": (nested, "is a nested tensor: pass a dense tensor"),
    "jagged": (partial(nested, layout=torch.jagged), "is a nested tensor: pass a dense tensor"),
    "freed": (resized, "has no memory: its storage holds 0 of "),
    "a view of freed memory": (partial(resized, before=64), "has no memory: its storage holds 0 of "),
    "cut": (partial(resized, keep=0.5), "has no memory: its storage holds "),
}
NOT_OF_FP8 = {"sparse", "nested"}
MAY_BE_NONE = {"biases[0]", "bias", "residual", "norm", "per_sample_weights", "weights", "lengths"}


def other_kinds(group: dist.ProcessGroup, operator: str, known: bool) -> dict[tuple[str, str], str]:
    """Let rank 1 pass each kind of tensor in each place. Return this rank's errors. known: True to make a good call
    first.
    """
    call, found = OPERATORS[operator](group), {}
    wanted = call() if known else None
    for name, place in call.tensors.items():
        given = place.given(call.arguments)
        for kind, (make, _) in KINDS.items():
            if (kind == "nothing" and name in MAY_BE_NONE) or (kind in NOT_OF_FP8 and given.dtype == FP8):
                continue
            bad = make(given)
            change = partial(place.put, value=bad) if group.rank() == 1 else None
            found[name, kind] = told(partial(call, change))
    again = call()
    assert not known or all(torch.equal(a, b) for a, b in zip(leaves(again), leaves(wanted), strict=True))
    return found


@pytest.mark.parametrize(("operator", "known"), in_turn(OPERATORS, [False, True]))
def test_tensors_of_other_kinds_are_refused_on_every_rank(pool: Pool, operator: str, known: bool) -> None:
    for found in pool.run(other_kinds, operator, known, ranks=2, timeout_s=60):
        assert {kind for _, kind in found} == KINDS.keys()
        for (name, kind), text in found.items():
            assert text.startswith("RefusedError: "), (name, kind, text)
            assert f"rank 1: {name} {KINDS[kind][1]}" in text, (name, kind, text)


def on_meta(group: dist.ProcessGroup, operator: str) -> str:
    """Return this rank's error if all tensors of rank 1 are on meta. The group must stay usable."""
    call = OPERATORS[operator](group)

    def move(arguments: Any) -> None:
        for place in call.tensors.values():
            place.put(arguments, place.given(arguments).to("meta"))

    said = told(partial(call, move if group.rank() == 1 else None))
    call()
    return said


@pytest.mark.parametrize("operator", OPERATORS)
def test_tensors_on_devices_that_weft_does_not_know_are_refused(pool: Pool, operator: str) -> None:
    for said in pool.run(on_meta, operator, ranks=2, timeout_s=60):
        assert said.startswith("RefusedError: ")
        assert re.search(
            "on meta: pass tensors on a GPU or on the CPU|on meta but|on meta and holds no values", said
        ), said


def mapped(group: dist.ProcessGroup, operator: str) -> str:
    """Return this rank's error for a call that rank 1 makes inside vmap. The group must stay usable."""
    call = OPERATORS[operator](group)
    said = told(call if group.rank() == 0 else lambda: torch.vmap(lambda _: leaves(call())[0])(torch.ones(2)))
    call()
    return said


@pytest.mark.parametrize("operator", OPERATORS)
def test_transforms_of_torch_func_are_refused_on_every_rank(pool: Pool, operator: str) -> None:
    for said in pool.run(mapped, operator, ranks=2, timeout_s=60):
        assert said.startswith("RefusedError: rank 1: ")
        assert "inside a torch.func transform (vmap, grad, jvp, ...)" in said


def on_a_destroyed_group(group: dist.ProcessGroup, operator: str) -> list[str]:
    """Destroy the group. Return the errors of a call whose shape is known, and of the backward of an earlier call."""
    own = dist.new_group(list(range(group.size())))
    call = OPERATORS[operator](own)
    given = [place.given(call.arguments) for place in call.tensors.values()]
    wanting = [t.requires_grad_() for t in given if t.dtype == torch.float32]
    try:
        results = leaves(call())
    except ValueError:  # without gradients
        for t in wanting:
            t.requires_grad_(False)
        results = leaves(call())
    name = own.group_name
    dist.destroy_process_group(own)
    backward = [results[-1].nan_to_num().sum().backward] if results[-1].requires_grad else []
    return [told(one).replace(repr(name), "NAME") for one in (call, *backward)]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_destroyed_group_is_refused(pool: Pool, operator: str) -> None:
    for found in pool.run(on_a_destroyed_group, operator, ranks=2, timeout_s=60):
        assert set(found) == {"ValueError: the process group NAME was destroyed: make a new one"}


# --- other arguments ---

NO_DIMENSION = "pass the number of a dimension, an int"
NO_NUMBER = "pass a whole number for each rank"
NO_EPS = "must be a finite number of at least 0: it is added to the mean of a row's squares"
NO_DEADLINE = "must be positive and at most 1000000: pass the number of seconds that a wait may take"
# For operators that gather: (argument, the value on rank 1, words of the error).
GATHERS_REFUSE: list[tuple[str, Any, str]] = [
    ("gather_dim", "0", f"gather_dim='0' is a str: {NO_DIMENSION}"),
    ("gather_dim", True, f"gather_dim=True is a bool: {NO_DIMENSION}"),
    ("gather_dim", False, f"gather_dim=False is a bool: {NO_DIMENSION}"),
    ("gather_dim", 0.0, f"gather_dim=0.0 is a float: {NO_DIMENSION}"),
    ("gather_dim", None, f"gather_dim=None is a NoneType: {NO_DIMENSION}"),
    ("gather_dim", -1, "gather_dim=-1 is not allowed for A_shard (4, "),
    ("gather_dim", 2, "gather_dim=2 is not allowed for A_shard (4, "),
    ("gather_dim", -3, "gather_dim=-3 is not allowed for A_shard (4, "),
    ("rows", 4, "rows=4 is an int: pass a list with a number for each rank"),
    ("rows", "44", "rows='44' is a str: pass a list with a number for each rank"),
    ("rows", [4, 4.0], f"rows[1]=4.0 is a float: {NO_NUMBER}"),
    ("rows", [4, True], f"rows[1]=True is a bool: {NO_NUMBER}"),
    ("rows", [4, None], f"rows[1]=None is a NoneType: {NO_NUMBER}"),
    ("rows", [4], "rows=(4,): pass a number from 0 to 2**40 for each of 2 ranks"),
    (
        "rows",
        [3, 5],
        "rows=(3, 5): pass a number from 0 to 2**40 for each of 2 ranks. rows[1] must be 4",
    ),
    ("rows", [-4, 4], "rows=(-4, 4): pass a number from 0 to 2**40"),
    ("rows", [1 << 41, 4], "pass a number from 0 to 2**40 for each of 2 ranks"),
    ("rows", [1 << 63, 4], f"rows[0] is 9223372036854775808, which does not fit in 64 bits: {NO_NUMBER}"),
    ("rows", [10**5000, 4], f"rows[0] is a number of 16610 bits, which does not fit in 64 bits: {NO_NUMBER}"),
    ("gather_dim", 10**5000, f"gather_dim is a number of 16610 bits, which does not fit in 64 bits: {NO_DIMENSION}"),
    ("Bs", None, "Bs is a NoneType: pass a list"),
    ("Bs", torch.ones(8, 3), "Bs is one tensor of shape (8, 3): pass a list of tensors, [B]"),
    ("Bs", {"w": torch.ones(8, 3)}, "Bs is a dict: pass a list"),
    ("Bs", {torch.ones(8, 3)}, "Bs is a set: pass a list"),
    ("Bs", [], "Bs"),
    ("return_A", "no", "return_A='no' is a str: pass True or False"),
    ("timeline", 3, "timeline=3 is not a Timeline: pass weft.Timeline(), or None"),
]
SCATTERS_REFUSE: list[tuple[str, Any, str]] = [
    ("scatter_dim", "0", f"scatter_dim='0' is a str: {NO_DIMENSION}"),
    (
        "scatter_dim",
        1,
        "A @ B has shape (4, 3), whose size 3 in dimension scatter_dim=1 must be divisible by world_size=2: pad",
    ),
    ("scatter_dim", 2, "scatter_dim=2 is not a dimension of A (4, 8): pass a number from -2 to 1"),
    ("scatter_dim", -3, "scatter_dim=-3 is not a dimension of A (4, 8): pass a number from -2 to 1"),
    ("A", torch.ones(8), "A has shape (8,): pass at least two dimensions"),
    (
        "A",
        torch.ones(5, 8),
        "A has shape (5, 8), whose size 5 in dimension scatter_dim=0 must be divisible by world_size=2: pad",
    ),
    (
        "A",
        torch.ones(3, 2, 8),
        "A has shape (3, 2, 8), whose size 3 in dimension scatter_dim=0 must be divisible by world_size=2",
    ),
    ("B", [torch.ones(8, 3)], "B is a list: pass a torch.Tensor"),
    ("reduce_op", "max", 'reduce_op=\'max\': use "sum" or "avg"'),
    ("reduce_op", None, 'reduce_op=None: use "sum" or "avg"'),
    ("timeline", 3, "timeline=3 is not a Timeline: pass weft.Timeline(), or None"),
]
PRODUCTS_REFUSE: list[tuple[str, Any, str]] = [
    ("x", torch.ones(8), "x has shape (8,): pass at least two dimensions"),
    ("w", [torch.ones(8, 3)], "w is a list: pass a torch.Tensor"),
    ("timeline", 3, "timeline=3 is not a Timeline: pass weft.Timeline(), or None"),
]
ARGUMENTS_REFUSED = dict.fromkeys(["all_gather_matmul", "all_gather_scaled_matmul"], GATHERS_REFUSE) | {
    "matmul_reduce_scatter": SCATTERS_REFUSE,
    "scaled_matmul_reduce_scatter": [
        ("orig_scatter_dim", "0", f"orig_scatter_dim='0' is a str: {NO_DIMENSION}"),
        ("orig_scatter_dim", None, f"orig_scatter_dim=None is a NoneType: {NO_DIMENSION}"),
        ("scatter_dim_after_maybe_reshape", True, f"scatter_dim_after_maybe_reshape=True is a bool: {NO_DIMENSION}"),
        ("output_shape", 4, "output_shape is an int: pass a list"),
        (
            "output_shape",
            [],
            "output_shape=() does not match A (4, 32) @ B (32, 16): pass (4, 16), or flatten A to (4, 32)",
        ),
        ("output_shape", [-2, -2, 16], "output_shape=(-2, -2, 16) does not match A (4, 32) @ B (32, 16)"),
        ("output_shape", [4.0, 16], "output_shape[0]=4.0 is a float: pass a whole number"),
        ("B", [torch.ones(32, 16)], "B is a list: pass a torch.Tensor"),
        ("reduce_op", None, 'reduce_op=None: use "sum" or "avg"'),
        ("out_dtype", "bf16", "out_dtype=bf16: use one of torch.bfloat16"),
        ("out_dtype", [torch.bfloat16], "out_dtype=[torch.bfloat16]: use one of torch.bfloat16"),
        ("use_fast_accum", "no", "use_fast_accum='no' is a str: pass True or False"),
        ("timeline", 3, "timeline=3 is not a Timeline: pass weft.Timeline(), or None"),
    ],
    "matmul_all_gather": [
        ("gather_dim", "0", f"gather_dim='0' is a str: {NO_DIMENSION}"),
        ("gather_dim", True, f"gather_dim=True is a bool: {NO_DIMENSION}"),
        ("gather_dim", 2, "gather_dim=2 is not a dimension of x (4, 8): pass a number from -2 to 1"),
        ("gather_dim", -3, "gather_dim=-3 is not a dimension of x (4, 8): pass a number from -2 to 1"),
        *PRODUCTS_REFUSE,
    ],
    "matmul_all_reduce": [
        ("op", "max", 'op=\'max\': use "sum" or "avg"'),
        ("op", None, 'op=None: use "sum" or "avg"'),
        ("op", "avg", 'op="avg" does not support bias, residual and norm'),
        ("eps", None, f"eps=None {NO_EPS}"),
        ("eps", True, f"eps=True {NO_EPS}"),
        ("eps", math.nan, f"eps=nan {NO_EPS}"),
        ("eps", math.inf, f"eps=inf {NO_EPS}"),
        ("eps", 10**400, f"eps=1{'0' * 400} {NO_EPS}"),
        *PRODUCTS_REFUSE,
    ],
}
DEADLINES: list[Any] = [math.inf, math.nan, 0, -1, 1e7, 10**400, True, "5", [5], 5j, torch.tensor(5.0)]
# All operators accept a deadline; the module accepts it in its constructor.
DIRECT = [*ARGUMENTS_REFUSED, "all_to_all_matmul", "matmul_all_to_all", "embedding_all_to_all"]


def refused(group: dist.ProcessGroup, operator: str, bad: list[tuple[str, Any]]) -> list[str]:
    """Return this rank's error for each argument that rank 1 passes, for a known shape. Good calls must work in
    between.
    """
    call, found = OPERATORS[operator](group), []
    call()
    for name, value in bad:
        found.append(told(partial(call, **({name: value} if group.rank() == 1 else {}))))
        call()
    return found


@pytest.mark.parametrize("operator", ARGUMENTS_REFUSED)
def test_arguments_of_other_kinds_are_refused_on_every_rank(pool: Pool, operator: str) -> None:
    refuses = ARGUMENTS_REFUSED[operator]
    bad = [(name, value) for name, value, _ in refuses]
    for found in pool.run(refused, operator, bad, ranks=2, timeout_s=60):
        for text, (name, value, words) in zip(found, refuses, strict=True):
            assert text.startswith("RefusedError: rank 1: "), (name, value, text)
            assert words in text, (name, value, text)


@pytest.mark.parametrize("operator", DIRECT)
def test_deadlines_that_no_wait_can_have_are_refused_on_every_rank(pool: Pool, operator: str) -> None:
    bad = [("deadline_s", value) for value in DEADLINES]
    for found in pool.run(refused, operator, bad, ranks=2, timeout_s=60):
        for text, value in zip(found, DEADLINES, strict=True):
            assert text.startswith(f"RefusedError: rank 1: deadline_s={value!r} {NO_DEADLINE}"), text


def made_with_deadlines(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """Make a module, and an input distribution, with each deadline. Return the outcomes. The first deadline is passed
    on rank 1 only.
    """
    found = []
    for value in DEADLINES:
        of_rank = value if group.rank() == 1 else 5.0
        module = partial(ShardedEmbeddingBagCollection, TABLES, group=group, deadline_s=of_rank)
        sharding = weft.place_tables(TABLES, 2)
        distribution = partial(InputDist, sharding, group, torch.device("cpu"), is_weighted=False, deadline_s=value)
        found.append((told(module), told(distribution)))
    return found


def test_deadlines_are_looked_at_when_a_module_is_made(pool: Pool) -> None:
    for found in pool.run(made_with_deadlines, ranks=2, timeout_s=60):
        for (module, distribution), value in zip(found, DEADLINES, strict=True):
            assert module.startswith("RefusedError"), module
            assert f"rank 1: deadline_s={value!r} {NO_DEADLINE}" in module
            assert distribution == f"ValueError: deadline_s={value!r} {NO_DEADLINE}"


def deadlines_taken(group: dist.ProcessGroup) -> None:
    """Check that every wait uses the deadline: in set-up, in calls of a new and of a known shape, in gloo's all-to-all,
    and in `close`.
    """
    for seconds in (1e6, 5, 0.9e6, np.float32(7), np.int64(7), Fraction(7, 2)):
        own = dist.new_group([0, 1])
        for make in map(OPERATORS.__getitem__, DIRECT):
            for _ in range(2):
                make(own)(deadline_s=seconds)
        for input in ("local_batch", "global_batch"):
            ebc = ShardedEmbeddingBagCollection(TABLES, group=own, input=input, deadline_s=seconds)  # type: ignore[arg-type]
            for _ in range(2):
                ebc(Features(torch.arange(6), torch.tensor([1, 2, 0, 3]), None))
            ebc.close()
        dist.destroy_process_group(own)


def test_long_deadlines_are_taken(pool: Pool) -> None:
    pool.run(deadlines_taken, ranks=2, timeout_s=100)


def test_weights_that_are_no_tensors_are_refused_before_any_is_copied(pool: Pool) -> None:
    for found in pool.run(full_weights_of_other_kinds, ranks=2, timeout_s=60):
        for kind, (text, copied) in found.items():
            assert text.startswith(f"ValueError: weights['items'] {KINDS[kind][1]}"), kind
            assert not copied


def full_weights_of_other_kinds(group: dist.ProcessGroup) -> dict[str, tuple[str, bool]]:
    # another table before this one
    ebc = ShardedEmbeddingBagCollection(TABLES, group=group, placement=[group.size() - 1] * 2)
    if group.rank() != group.size() - 1:
        return {}
    before, found = ebc.embedding_bags["users"].weight.clone(), {}
    for kind, (make, _) in KINDS.items():
        if kind != "DTensor":  # all ranks must make a module together
            full = {"users": torch.ones(10, 4), "items": make(torch.ones(20, 3))}
            text = told(partial(ebc.load_full_weights, full))
            found[kind] = text, not torch.equal(ebc.embedding_bags["users"].weight, before)
    return found


def without_group(group: dist.ProcessGroup, operator: str) -> tuple[bool, str]:
    """Return True if the signature has a default for `group`, and the error for None."""
    call = OPERATORS[operator](group)
    default = inspect.signature(call.call).parameters["group"].default
    return default is None, told(lambda: call(group=None))


@pytest.mark.parametrize("operator", [name for name in OPERATORS if "matmul" in name])
def test_no_group_is_the_world_where_the_signature_says_so(pool: Pool, operator: str) -> None:
    for is_default, text in pool.run(without_group, operator, ranks=2, timeout_s=60):
        assert text == "nothing" if is_default else text.startswith("ValueError: group=None: pass dist.group.WORLD"), (
            operator
        )


def test_a_name_of_no_group_is_told_where_it_is_given(pool: Pool) -> None:
    (text,) = pool.run(no_group, ranks=1, timeout_s=60)
    assert text.startswith(
        "ValueError: group='none' is not the name of a process group of this rank, or the group was destroyed: pass the"
    )


def no_group(group: dist.ProcessGroup) -> str:
    return told(lambda: weft.all_gather_matmul(torch.ones(4, 8), [torch.ones(8, 3)], 0, "none"))


# --- memory for copies ---


def without_memory(group: dist.ProcessGroup, first: bool) -> tuple[str, str]:
    """Let rank 0 fail to copy an input. Return the error of this call, and that of the next call."""
    own, x, w = dist.new_group([0, 1]), torch.ones(8, 4).t(), torch.ones(8, 3)

    def call(t: torch.Tensor) -> Any:
        return weft.all_gather_matmul(t, [w], 0, own)

    if not first:
        call(x)
    full = mock.patch("weft.ops.all_gather_matmul.contiguous", side_effect=MemoryError("no room for a copy"))
    with full if group.rank() == 0 else nullcontext():
        found = told(partial(call, x))
    dist.barrier(group)
    after = told(partial(call, x))
    dist.destroy_process_group(own)
    return found, after


@pytest.mark.parametrize(("first", "other"), [(True, "PoisonedGroupError"), (False, "RefusedError")])
def test_only_a_first_call_without_memory_for_a_copy_ends_the_group(pool: Pool, first: bool, other: str) -> None:
    here, there = pool.run(without_memory, first, ranks=2, timeout_s=60)
    assert here[0] == "MemoryError: no room for a copy"
    assert re.match(f"{other}: .*rank 0: .*no room for a copy", there[0])
    assert [after.startswith("PoisonedGroupError: ") for _, after in (here, there)] == [first, first]
    assert first or here[1] == there[1] == "nothing"


# --- environment variables ---

SWITCH = "must be one of 1, true, yes, on, 0, false, no, off"


def with_variables(
    group: dist.ProcessGroup, variables: dict[str, str], made: Callable[[dist.ProcessGroup], Any] | None = None
) -> tuple[str, str]:
    """Set variables on rank 0 only. Return the error of the first call, and that of the next call, without variables.

    made: a function that constructs a module, to call in place of an operator.
    """
    own = dist.new_group([0, 1])
    call = OPERATORS["all_gather_matmul"](own) if made is None else lambda: made(own)
    with mock.patch.dict(os.environ, variables if group.rank() == 0 else {}):
        found = told(call)
    dist.barrier(group)
    after = told(call)
    dist.destroy_process_group(own)
    return found, after


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WEFT_QUIET": "y"}, f"invalid values: rank 0: WEFT_QUIET='y' {SWITCH}. Correct the variables, or unset them"),
        ({"WEFT_CHECK_CALLS": "2"}, f"rank 0: WEFT_CHECK_CALLS='2' {SWITCH}"),
        (
            {"WEFT_DEADLINE_S": "0", "WEFT_SELF_CALIBRATION": "abc"},
            "rank 0: WEFT_DEADLINE_S='0' must be a positive number, at most 1000000: it limits how many seconds a wait may take; "
            f"WEFT_SELF_CALIBRATION='abc' {SWITCH}",
        ),
        ({"WEFT_SETUP_DEADLINE_S": "-1"}, "rank 0: WEFT_SETUP_DEADLINE_S='-1' must be a positive number"),
        (
            {"WEFT_CHECK_CALLS": "1"},
            "WEFT_CHECK_CALLS is 1 on ranks [0] and 0 on ranks [1]: set the same value on all ranks",
        ),
    ],
)
def test_variables_of_one_rank_are_refused_by_name_before_the_first_call(
    pool: Pool, variables: dict[str, str], text: str
) -> None:
    for found, after in pool.run(with_variables, variables, ranks=2, timeout_s=60):
        assert found.startswith("RefusedError: ")
        assert text in found
        assert after == "nothing"


def pooled(group: dist.ProcessGroup, placement: Any = None) -> nn.Module:
    tables = [weft.EmbeddingBagConfig(4, 4, "t", ["f"])]
    return weft.nn.ShardedEmbeddingBagCollection(tables, group=group, placement=placement)


def partitioned(group: dist.ProcessGroup) -> nn.Module:
    return pooled(group, [weft.embedding.RowWise()])


def unpooled(group: dist.ProcessGroup) -> nn.Module:
    return weft.nn.ShardedEmbeddingCollection([weft.EmbeddingBagConfig(4, 4, "t", ["f"])], group=group)


@pytest.mark.parametrize("made", [pooled, partitioned, unpooled], ids=lambda made: made.__name__)
def test_variables_of_one_rank_are_refused_by_constructors_of_embeddings(pool: Pool, made: Any) -> None:
    text = "WEFT_DEADLINE_S='soon' must be a positive number"
    for found, after in pool.run(with_variables, {"WEFT_DEADLINE_S": "soon"}, made, ranks=2, timeout_s=60):
        assert found.startswith("RefusedError: ")
        assert f"rank 0: {text}" in found
        assert after == "nothing"


def with_a_later_variable(group: dist.ProcessGroup) -> str:
    """Set a variable on rank 0 after a module was constructed. Return the error of another module's constructor."""
    own = dist.new_group([0, 1])
    pooled(own)
    with mock.patch.dict(os.environ, {"WEFT_DEADLINE_S": "soon"} if group.rank() == 0 else {}):
        found = told(lambda: pooled(own))
    pooled(own)
    dist.destroy_process_group(own)
    return found


def test_a_later_variable_of_one_rank_is_refused_by_constructors_of_embeddings(pool: Pool) -> None:
    for found in pool.run(with_a_later_variable, ranks=2, timeout_s=60):
        assert found.startswith("RefusedError: arguments refused by rank 0: WEFT_DEADLINE_S='soon' must be")
