"""Process groups that a fork has copied into this process. They belong to the parent, and a child may not use their sockets.

`import weft` is enough to notice a fork, and costs nothing: torch is looked up among the loaded modules.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

MAKE_ANOTHER = (
    "this process was forked from the one that made the group: make a process group in the child, and start the child by "
    "multiprocessing's 'spawn' or 'forkserver', since torch.distributed can neither use nor replace what was forked"
)

_parents: weakref.WeakSet[Any] = weakref.WeakSet()


def is_the_parents(group: Any) -> bool:
    """True if `group` was made before this process was forked."""
    return group in _parents


def _in_child() -> None:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        _parents.update(c10d._world.pg_map)


os.register_at_fork(after_in_child=_in_child)
