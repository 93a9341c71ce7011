"""Bad arguments, which all operators and the embedding module refuse.

Rank 1 alone passes tensors of other kinds, wrong dimensions or numbers of rows, for a known shape (with few checks) and
for a new shape. Every rank must refuse the call, with the argument's name and the fix. Then the next call must work.
`test_surroundings_refused.py` has the refusals of deadlines, groups and environment variables.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from operators_called import FP8, OPERATORS, TABLES, leaves, refused
from support.on_ranks import own_group, resized, told, waits_end_after
from support.slow import in_turn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh

import weft
import weft.ops
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
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


# --- other arguments ---

NO_DIMENSION = "pass the number of a dimension, an int"
NO_NUMBER = "pass an integer for each rank"
NO_EPS = "must be a finite number of at least 0: it is added to the mean of a row's squares"
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
    ("Bs", np.ones(()), "Bs is a ndarray: pass a list"),
    ("Bs", [], "Bs"),
    ("rows", torch.tensor(4), "rows=tensor(4) is a Tensor: pass a list with a number for each rank"),
    ("rows", {4: 0}, "rows={4: 0} is a dict: pass a list with a number for each rank"),
    ("return_A", "no", "return_A='no' is a str: pass True or False"),
    # equal to True, and so found in the caches of calls
    ("return_A", 1, "return_A=1 is an int: pass True or False"),
    ("return_A", [], "return_A=[] is a list: pass True or False"),
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
    (
        "w",
        torch.nn.UninitializedParameter(requires_grad=False),
        "w is a UninitializedParameter, which has no shape yet: run a forward of its module first",
    ),
    ("timeline", 3, "timeline=3 is not a Timeline: pass weft.Timeline(), or None"),
]
ARGUMENTS_REFUSED = {
    "all_gather_matmul": GATHERS_REFUSE,
    "all_gather_scaled_matmul": [
        *GATHERS_REFUSE,
        ("result_scales", 3, "result_scales is an int: pass a list"),
        ("use_fast_accum", [0], "use_fast_accum[0]=0 is an int: pass True or False"),
        ("out_dtypes", [[]], "out_dtypes has []: use one of torch.bfloat16"),
    ],
    "all_to_all_matmul": [
        ("tokens", torch.tensor(1.0), "tokens has shape (): pass [T, K]"),
        ("return_received", None, "return_received=None is a NoneType: pass True or False"),
        ("max_rows", True, "max_rows=True is a bool: pass an integer from 0 to 2**40"),
    ],
    "matmul_reduce_scatter": SCATTERS_REFUSE,
    "scaled_matmul_reduce_scatter": [
        ("orig_scatter_dim", "0", f"orig_scatter_dim='0' is a str: {NO_DIMENSION}"),
        ("orig_scatter_dim", None, f"orig_scatter_dim=None is a NoneType: {NO_DIMENSION}"),
        ("scatter_dim_after_maybe_reshape", True, f"scatter_dim_after_maybe_reshape=True is a bool: {NO_DIMENSION}"),
        ("output_shape", 4, "output_shape is an int: pass a list"),
        ("output_shape", np.array(4), "output_shape is a ndarray: pass a list"),
        (
            "output_shape",
            [],
            "output_shape=() does not match A (4, 32) @ B (32, 16): pass (4, 16), or flatten A to (4, 32)",
        ),
        ("output_shape", [-2, -2, 16], "output_shape=(-2, -2, 16) does not match A (4, 32) @ B (32, 16)"),
        ("output_shape", [4.0, 16], "output_shape[0]=4.0 is a float: pass an integer"),
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
        ("reduce_op", "max", 'reduce_op=\'max\': use "sum" or "avg"'),
        ("reduce_op", None, 'reduce_op=None: use "sum" or "avg"'),
        ("reduce_op", "avg", 'reduce_op="avg" does not support bias, residual and norm'),
        ("eps", None, f"eps=None {NO_EPS}"),
        ("eps", np.timedelta64(5, "s"), f"eps=np.timedelta64(5,'s') {NO_EPS}"),
        ("eps", True, f"eps=True {NO_EPS}"),
        ("eps", math.nan, f"eps=nan {NO_EPS}"),
        ("eps", math.inf, f"eps=inf {NO_EPS}"),
        ("eps", 10**400, f"eps=1{'0' * 400} {NO_EPS}"),
        *PRODUCTS_REFUSE,
    ],
    "embedding_all_to_all": [
        ("transport", [], "transport=[] must be one of 'auto', 'serial', "),
        ("hash", 1, "hash=1 must be True or False"),
        ("outputs", [2], "outputs=[2] is a list: pass an integer, between 1 and 255"),
        ("output_dtype", {}, "output_dtype={} must be one of 'table', 'fp16', 'bf16'"),
    ],
}


@pytest.mark.parametrize("operator", ARGUMENTS_REFUSED)
def test_arguments_of_other_kinds_are_refused_on_every_rank(pool: Pool, operator: str) -> None:
    refuses = ARGUMENTS_REFUSED[operator]
    bad = [(name, value) for name, value, _ in refuses]
    for found in pool.run(refused, operator, bad, ranks=2, timeout_s=60):
        for text, (name, value, words) in zip(found, refuses, strict=True):
            assert text.startswith("RefusedError: rank 1: "), (name, value, text)
            assert words in text, (name, value, text)


def refused_once(group: dist.ProcessGroup, operator: str, name: str, value: Any) -> str:
    """Return this rank's error if rank 1 passes `value`. After a refusal, a good call must work."""
    call = OPERATORS[operator](own_group(group))
    call()
    with waits_end_after(20):
        error = told(partial(call, **({name: value} if group.rank() == 1 else {})))
    if error.startswith("RefusedError"):
        call()
    return error


FIRST = {"all_gather_matmul": "A_shard", "matmul_all_reduce": "x", "all_to_all_matmul": "tokens"}


@pytest.mark.parametrize("operator", FIRST)
def test_callables_in_place_of_a_tensor_are_refused_on_every_rank(pool: Pool, operator: str) -> None:
    """Layers pass functions that return the call's device. An argument of the user is not such a function."""
    bad = [(FIRST[operator], value) for value in (np.float32, told, math.sqrt, torch.nn.Linear(8, 8))]
    kinds = "type", "function", "builtin_function_or_method", "Linear"
    for given, kind in zip(bad, kinds, strict=True):
        for text in pool.run(refused_once, operator, *given, ranks=2, timeout_s=60):
            assert text == f"RefusedError: rank 1: {FIRST[operator]} is a {kind}: pass a torch.Tensor"


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
