"""Environment variables that are invalid or differ on one rank: every rank refuses its first call, or a module's constructor."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from operators_called import OPERATORS
from support.on_ranks import told
from torch import nn

import weft
from weft.launch import Pool

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
