"""Waits for gloo's collectives. The result of a wait that has timed out depends on the state of the collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from weft.errors import DeadlineError, WeftError
from weft.runtime.collectives import finish


class Work:
    """A collective whose waits all time out, as in a process that was stopped while the collective continued."""

    def __init__(self, completed: bool, success: bool) -> None:
        self.completed, self.success = completed, success

    def wait(self, timeout: Any) -> None:
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.completed

    def is_success(self) -> bool:
        return self.success


class Group:
    """A healthy group of two ranks."""

    rank, world_size, group = 0, 2, dist.ProcessGroup

    def __init__(self) -> None:
        self.causes: list[str] = []

    def check(self) -> None:
        pass

    def poison(self, text: str) -> None:
        self.causes.append(text)


def test_what_was_completed_when_its_wait_was_over_is_done() -> None:
    comm: Any = Group()
    finish(Work(completed=True, success=True), comm, "all_gather of x", 20.0)  # type: ignore[arg-type]
    assert comm.causes == []


@pytest.mark.parametrize(
    ("completed", "error", "text"), [(True, WeftError, "failed in torch.distributed"), (False, DeadlineError, "waited")]
)
def test_what_failed_or_did_not_come_ends_the_group(completed: bool, error: type[WeftError], text: str) -> None:
    comm: Any = Group()
    with pytest.raises(error, match=text):
        finish(Work(completed, success=False), comm, "all_gather of x", 0.3)  # type: ignore[arg-type]
    assert len(comm.causes) == 1
