"""Look-up of process groups and their stores, by the group or the name that a caller passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_group_size_by_name,
    _get_process_group_store,
    _resolve_process_group,
)

from weft import forks
from weft.words import kind

NO_GROUP = (
    "group=None: pass dist.group.WORLD or your own group. (dist.new_group with use_local_synchronization=True returns None on "
    "ranks that are not in the new group: only its members may make this call)"
)


def is_not_a_member(group: Any) -> bool:
    """True for the value that torch returns in place of a group that this rank does not belong to. It may be a copy."""
    return type(group) is type(dist.GroupMember.NON_GROUP_MEMBER) and bool(group == dist.GroupMember.NON_GROUP_MEMBER)


def require_member(group: Any) -> None:
    """Raise `ValueError` if this rank cannot make calls on `group`."""
    store_of(group)


def store_of(group: Any) -> dist.Store:
    """Return the group's store. Raise `ValueError` if this rank cannot make calls on the group."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised: call dist.init_process_group first")
    if group is None:
        raise ValueError(NO_GROUP)
    if is_not_a_member(group):
        raise ValueError(f"rank {dist.get_rank()} is not in this group: only its members may make this call")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(_no_group(group))
    if forks.is_the_parents(group):
        raise ValueError(forks.MAKE_ANOTHER)
    try:
        return _get_process_group_store(group)
    except KeyError:
        raise ValueError(f"the process group {group.group_name!r} was destroyed: make a new one") from None


def is_registered(group: dist.ProcessGroup | None) -> bool:
    try:
        return group is not None and bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def group_of(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup:
    """Return the process group. group: a group, or the name of a group.

    Raise `ValueError` for None, since weft has no default group, and for a group without this rank.
    """
    if isinstance(group, str):
        if torch.compiler.is_dynamo_compiling():
            raise ValueError(
                f"torch.compile cannot look up group {group!r} by name: call weft.symm.groups.size_of(group) or "
                "rank_of(group) in the traced code"
            )
        try:
            return _resolve_process_group(group)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise ValueError(
                f"group={group!r} is not the name of a process group of this rank, or the group was destroyed: pass "
                "the group, or its group_name"
            ) from error
    if group is None:
        raise ValueError(NO_GROUP)
    if not isinstance(group, dist.ProcessGroup):
        if is_not_a_member(group):
            raise ValueError("this rank is not a member of the group: only its members may make this call")
        raise ValueError(_no_group(group))
    return group


def _no_group(group: Any) -> str:
    """Return the error text for a value that is no process group."""
    if hasattr(group, "get_group"):
        return f"group={group!r} is a {type(group).__name__}: pass the group of one dimension, its get_group(dim)"
    return f"group={group!r} is {kind(group)}: pass a torch.distributed.ProcessGroup"


def member_group(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup:
    """Return the group that `group_of` returns. Raise `ValueError` also if the group was destroyed.

    The constructor of a layer calls this function. A layer stores only its group's name. Without this check, the layer would be
    constructed, and only its first call would fail.
    """
    found = group_of(group)
    require_member(found)
    return found


def rank_of(group: dist.ProcessGroup | str | None) -> int:
    """Return this rank's number in the group, which is given as a group or by name. Works also while torch.compile traces."""
    if isinstance(group, str) and torch.compiler.is_compiling():
        return _rank_by_name(group)
    return group_of(group).rank()


def _rank_by_name(group: str) -> int:
    return group_of(group).rank()


_rank_by_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `assume_constant_result`, without Dynamo


def size_of(group: dist.ProcessGroup | str | None) -> int:
    """Return the world size of the group, which is given as a group or by name. Works also while torch.compile traces."""
    if isinstance(group, str) and torch.compiler.is_compiling():
        return int(_get_group_size_by_name(group))  # type: ignore[arg-type]
    return group_of(group).size()


def backend_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device type that the group's backend uses: cuda for NCCL, cpu for other backends.

    weft uses this device for a call that is refused before its device is known, for example because an argument is not a
    tensor. The communicator on this device then sends the refusal to the peers.
    """
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
