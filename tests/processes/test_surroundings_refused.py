"""Deadlines, process groups and environment variables that are refused on every rank."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from operators_called import OPERATORS, TABLES, Features, leaves, refused
from support.on_ranks import told
from torch import nn

import weft
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.nn.input_dist import InputDist

OUT_OF_RANGE = "must be positive and at most 1000000"

# {how an error names it: (deadline, what is wrong with it)}
DEADLINES: dict[str, tuple[Any, str]] = {
    **{repr(value): (value, OUT_OF_RANGE) for value in (math.inf, math.nan, 0, -1, 1e7)},
    "a number of 1329 bits": (10**400, OUT_OF_RANGE),
    "True": (True, "is a bool"),
    "'5'": ("5", "is a str"),
    "[5]": ([5], "is a list"),
    "5j": (5j, "is a complex"),
    "tensor(5.)": (torch.tensor(5.0), "is a Tensor"),
}
DEADLINE_ERRORS = [
    f"deadline_s={shown} {wrong}: pass the number of seconds that a wait may take"
    for shown, (_, wrong) in DEADLINES.items()
]

# All operators accept a deadline; the module accepts it in its constructor.
DIRECT = [name for name in OPERATORS if not name.endswith("batch")]


@pytest.mark.parametrize("operator", DIRECT)
def test_deadlines_that_no_wait_can_have_are_refused_on_every_rank(pool: Pool, operator: str) -> None:
    bad = [("deadline_s", value) for value, _ in DEADLINES.values()]
    for found in pool.run(refused, operator, bad, ranks=2, timeout_s=60):
        for text, error in zip(found, DEADLINE_ERRORS, strict=True):
            assert text.startswith(f"RefusedError: rank 1: {error}"), text


def made_with_deadlines(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """Make a module, and an input distribution, with each deadline. Return the outcomes. The first deadline is passed
    on rank 1 only.
    """
    found = []
    for value, _ in DEADLINES.values():
        of_rank = value if group.rank() == 1 else 5.0
        module = partial(ShardedEmbeddingBagCollection, TABLES, group=group, deadline_s=of_rank)
        sharding = weft.place_tables(TABLES, 2)
        distribution = partial(InputDist, sharding, group, torch.device("cpu"), is_weighted=False, deadline_s=value)
        found.append((told(module), told(distribution)))
    return found


def test_deadlines_are_looked_at_when_a_module_is_made(pool: Pool) -> None:
    for found in pool.run(made_with_deadlines, ranks=2, timeout_s=60):
        for (module, distribution), error in zip(found, DEADLINE_ERRORS, strict=True):
            assert module.startswith("RefusedError"), module
            assert f"rank 1: {error}" in module
            assert distribution == f"ValueError: {error}"


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


def test_a_pool_with_nccl_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="backend='nccl' needs GPUs, but torch sees none: pass backend='gloo'"):
        Pool(2, backend="nccl")


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


def with_later_variables(group: dist.ProcessGroup) -> list[str]:
    """Set variables after a group's first call. Return the errors of later calls: of a known shape and of new shapes, together
    and with rank 1 half a second late.
    """
    own, found = dist.new_group([0, 1]), []
    call = OPERATORS["all_gather_matmul"](own)
    for _ in range(4):  # the later ones are replayed
        call()
    for deadline, compares in (("soon", "maybe"), ("0.05", str(group.rank()))):
        variables = dict.fromkeys(("WEFT_DEADLINE_S", "WEFT_SETUP_DEADLINE_S"), deadline) | {
            "WEFT_CHECK_CALLS": compares
        }
        with mock.patch.dict(os.environ, variables):
            found += [told(call), told(lambda: OPERATORS["matmul_all_reduce"](own)())]
            time.sleep(0.5 * group.rank())
            found += [told(call), told(lambda: OPERATORS["matmul_reduce_scatter"](own)())]
    dist.destroy_process_group(own)
    return found


def test_a_group_keeps_the_variables_of_its_first_call(pool: Pool) -> None:
    assert pool.run(with_later_variables, ranks=2, timeout_s=60) == [["nothing"] * 8] * 2
