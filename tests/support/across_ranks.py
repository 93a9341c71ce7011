"""Calls that do not match across ranks, on CPU and on GPUs: tables of counts that disagree, and concurrent calls of two
threads of a rank. The functions run on the ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from support.on_ranks import error_of

import weft
from weft.operator import calls
from weft.operator.spec import Across
from weft.symm.calls import calls_of

COMPARED = ("alike", "layout", "given")


def declared_by(operator: str) -> Mapping[str, Across]:
    """Return {parameter of a public operator: rule for its values on different ranks, such as "alike" for equal values}."""
    return calls.operator_named(operator).across_ranks


def compared_by(operator: str) -> set[str]:
    """Return the parameters of a public operator whose values or layouts the ranks compare in every call."""
    return {name for name, across in declared_by(operator).items() if across in COMPARED}


def rows_that_nobody_expects(
    group: dist.ProcessGroup, device: str, schedule: str, by: int, known: bool
) -> tuple[tuple[str, str], bool]:
    """Call matmul_all_to_all with a wrong `received` on rank 0. Return this rank's error, and True if a correct call
    after it succeeds.

    by: the number of additional rows that rank 0 claims to have received from rank 1. 0: the number of rows is correct,
        but not the number for each expert.
    known: True to make a correct call first.
    """
    own = dist.new_group([0, 1])
    splits, received = torch.tensor([2, 2, 2, 2], device=device), torch.full((2, 2), 2, device=device)
    w, rows = torch.ones(2, 16, 12, device=device), None if "dma" in schedule else 8

    def call(received: torch.Tensor) -> torch.Tensor:
        h = torch.ones(int(received.sum()), 16, device=device)
        return weft.matmul_all_to_all(
            h, w, received, splits, group=own, rows=rows, capacity=16, schedule=schedule, deadline_s=10.0
        )

    if known:
        call(received)
    wrong = received.clone()
    if group.rank() == 0:
        wrong[1] += torch.tensor([by, 0] if by else [1, -1], device=device)
    found = error_of(lambda: call(wrong))
    after = bool((call(received) == 16).all())
    dist.destroy_process_group(own)
    return found, after


def said_of_tables(by: int) -> str:
    sent = [2 + by, 2] if by else [3, 1]
    rows = f"{sum(sent)} rows ({sent[0]}, {sent[1]} by expert)"
    return f"rank 0 sends {rows} to rank 1, which expects 4 rows (2, 2 by expert)"


def called_by_two_threads(group: dist.ProcessGroup, device: str, known: bool) -> list[tuple[str, str]]:
    """Call on a second thread of rank 0, while its first thread waits in a call that rank 1 has not made yet. Return the
    errors of this rank's calls: on rank 0 of the second thread, the first thread, and a later call.
    """
    own, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()
    x, w = torch.ones(4, 8, device=device), torch.ones(8, 6, device=device)
    call = partial(weft.matmul_all_reduce, x, w, own, deadline_s=20.0)
    if known:
        call()
    key = f"second thread {own.group_name}"
    if group.rank():
        store.wait([key])
        found = [error_of(call)]
    else:
        errors: list[tuple[str, str]] = []
        inside = calls_running(own)
        first = threading.Thread(target=lambda: errors.append(error_of(call)))
        first.start()
        inside()
        found = [error_of(call)]
        store.set(key, "refused")
        first.join()
        found += errors
    found.append(error_of(call))
    dist.destroy_process_group(own)
    return found


def calls_running(group: dist.ProcessGroup) -> Callable[[], None]:
    """Return a function that waits until another thread is in a call of `group`."""
    running = calls_of(group).running

    def wait() -> None:
        while running.acquire(blocking=False):
            running.release()
            time.sleep(0.001)

    return wait
