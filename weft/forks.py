"""A check for process groups that a forked child inherited. The child must not use them, because their sockets belong
to the parent.

`import weft` registers a hook that runs at a fork. The hook does not load torch.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

MAKE_ANOTHER = (
    "this process was forked from the process that made the group: make a new process group in the child. Start the child "
    "with multiprocessing's 'spawn' or 'forkserver', since torch.distributed cannot replace a group after a fork"
)

_parents: weakref.WeakSet[Any] = weakref.WeakSet()


def is_the_parents(group: Any) -> bool:
    """True if the parent process made `group` before it forked this process."""
    return group in _parents


def _in_child() -> None:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        _parents.update(c10d._world.pg_map)


os.register_at_fork(after_in_child=_in_child)
