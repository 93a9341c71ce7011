"""Process groups as torch keeps them: whether this rank can make calls on a group, and the store that its ranks share."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from weft import forks

NO_GROUP = (
    "group=None: pass dist.group.WORLD or your own group. (dist.new_group with use_local_synchronization=True returns None on "
    "ranks that are not in the new group: only its members may make this call)"
)


def require_member(group: Any) -> None:
    """Raise `ValueError` if this rank cannot make calls on `group`."""
    store_of(group)


def store_of(group: Any) -> dist.Store:
    """Return the group's key-value store. Raise `ValueError` if this rank cannot use the group."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised: call dist.init_process_group first")
    if group is None:
        raise ValueError(NO_GROUP)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in this group: only its members may make this call")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group={group!r} must be a torch.distributed.ProcessGroup")
    if forks.is_the_parents(group):
        raise ValueError(forks.MAKE_ANOTHER)
    try:
        return _get_process_group_store(group)
    except KeyError:
        raise ValueError("this process group was destroyed: make a new one") from None


def is_registered(group: dist.ProcessGroup | None) -> bool:
    try:
        return group is not None and bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False
