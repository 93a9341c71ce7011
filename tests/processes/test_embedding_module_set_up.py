"""Construction of a `ShardedEmbeddingBagCollection` when a rank fails: weft's deadline applies, and weft's errors are
raised.

Functions with a `group` argument run on the ranks. Deadlines are LONG_S unless a wait must end by its deadline.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch.distributed as dist
from pool import assert_deadline
from support.on_ranks import error_of

import weft
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection
from weft.symm import bootstrap

TABLES = [weft.EmbeddingBagConfig(10, 4, f"t{i}", [f"f{i}"]) for i in range(3)]
BAD_RANK = 1
LONG_S = 50.0
PROMPT_S = 10.0  # far below LONG_S, and enough for a busy machine


def make(group: dist.ProcessGroup, deadline_s: float | None) -> ShardedEmbeddingBagCollection:
    return ShardedEmbeddingBagCollection(TABLES, group=group, deadline_s=deadline_s)


def absent(group, is_first):
    own = dist.new_group(list(range(group.size())))
    if not is_first:
        make(own, LONG_S)
    error = None if group.rank() == BAD_RANK else error_of(lambda: make(own, 0.5))
    dist.barrier(group)
    return error


@pytest.mark.parametrize("is_first", [True, False], ids=["of the group's first module", "of the second"])
def test_a_rank_that_does_not_come(pool: Pool, is_first: bool) -> None:
    errors = pool.run(absent, is_first, ranks=3, timeout_s=40)
    what = r"ranks \[1\] to set up" if is_first else r"the part of rank 1 \(pid \d+\) in making a ShardedEmbeddingBag"
    said = [error for error in errors if error is not None]
    if is_first:  # the first rank that gives up notifies the other
        assert {kind for kind, _ in said} <= {"DeadlineError", "PeerLostError"}
        assert all(re.search(f"waited 0.5 s for {what}", text) for _, text in said)
    else:
        assert_deadline(said, f"rank [02] waited 0.5 s for {what}")


def killed(group, is_first):
    if not is_first:
        make(group, LONG_S)
    if group.rank() == BAD_RANK:
        if is_first:
            bootstrap._Setup._accept = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            make(group, LONG_S)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    return error_of(lambda: make(group, LONG_S)), time.monotonic() - start


@pytest.mark.parametrize("is_first", [True, False], ids=["of the group's first module", "of the second"])
def test_a_rank_that_is_killed_while_others_make_one(is_first: bool) -> None:
    with Pool(3) as mortals:
        pid = mortals.pids()[BAD_RANK]
        found = mortals.run(killed, is_first, return_exceptions=True, timeout_s=40)
    for (kind, text), seconds in (found[0], found[2]):
        assert kind == "PeerLostError"
        assert f"rank 1 (pid {pid}) died" in text
        assert is_first or "in making a ShardedEmbeddingBagCollection" in text
        assert seconds < PROMPT_S


def refuses(group):
    errors = [error_of(lambda: make(group, -1.0 if group.rank() == BAD_RANK else LONG_S))]
    # Another type of device than the other rank's, and a device that does not exist.
    device = "cuda" if group.rank() == BAD_RANK else "cpu"
    errors.append(error_of(lambda: ShardedEmbeddingBagCollection(TABLES, group=group, device=device)))
    make(group, LONG_S)  # the group stays usable
    return errors


def test_what_one_rank_refuses_all_ranks_are_told(pool: Pool) -> None:
    for deadline, device in pool.run(refuses, ranks=3, timeout_s=40):
        assert deadline[0] == device[0] == "RefusedError"
        assert "rank 1: deadline_s=-1.0 must be positive" in deadline[1]
        assert "rank 1: device='cuda'" in device[1]
