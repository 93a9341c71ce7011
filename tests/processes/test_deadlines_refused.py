"""Deadlines: every rank refuses those that no wait can have, in calls and in constructors; long deadlines are accepted."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from operators_called import OPERATORS, TABLES, Features, refused
from support.on_ranks import told

import weft
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.nn.input_dist import InputDist

NO_DEADLINE = "must be positive and at most 1000000: pass the number of seconds that a wait may take"

DEADLINES: list[Any] = [math.inf, math.nan, 0, -1, 1e7, 10**400, True, "5", [5], 5j, torch.tensor(5.0)]

# All operators accept a deadline; the module accepts it in its constructor.
DIRECT = [name for name in OPERATORS if not name.endswith("batch")]


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
