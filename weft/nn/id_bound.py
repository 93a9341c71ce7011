"""`max_ids`: a bound on the number of ids that a rank may receive in a call.

If a skewed batch exceeds the bound, every rank raises an error before ids are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft import symm
from weft.arguments import checked_within
from weft.errors import RefusedError
from weft.runtime.collectives import all_gather_single
from weft.runtime.unfused.turn import turn_on
from weft.words import counted


def checked_max_ids(max_ids: Any) -> int | None:
    """Return `max_ids` as an integer; None if it is None. Raise `ValueError` unless it is at least 1."""
    if max_ids is None:
        return None
    return checked_within("max_ids", max_ids, 1, 2**63 - 1, "at least 1, or None for no limit")


def require_bound(totals: Sequence[int], max_ids: int, advice: str) -> None:
    """Raise `RefusedError` if a rank would receive more than `max_ids` ids.

    totals: the number of ids that each rank would receive. All ranks pass the same numbers, so all raise.
    advice: a further fix for the error's text.
    """
    if max(totals) > max_ids:
        worst = totals.index(max(totals))
        raise RefusedError(
            f"rank {worst} would receive {counted(totals[worst], 'id')}, more than max_ids={max_ids} (ranks would "
            f"receive {list(totals)}). Use a smaller batch, {advice}or place the tables of rank {worst} on other ranks"
        )


def totals_of_ranks(
    features: Any, features_of_rank: Sequence[Sequence[str]], group: dist.ProcessGroup, device: torch.device,
    deadline_s: float | None,
) -> list[int]:  # fmt: skip
    """Return the number of ids that each rank would receive from all ranks. All ranks must make this call. On GPUs the
    CPU waits for the device.

    features: the features of this rank's samples. Invalid features count as 0 ids, and a later check refuses them.
    features_of_rank: for each rank, the names of the features that its tables read.
    """
    try:
        counts = dict(zip(features.keys(), features.length_per_key(), strict=True))
        leaving = [sum(counts[feature] for feature in own) for own in features_of_rank]
    except Exception:
        leaving = [0] * len(features_of_rank)
    if group.size() == 1:
        return leaving
    if device.type == "cpu":
        # The exchange is no rendezvous: a rank that refuses its call would wait for peers that are already in the exchange.
        turn_on(group, device, "embeddings with max_ids", deadline_s).meet("numbers of ids")
        lines = symm.communicator(group, device).all_gather(leaving, what="numbers of ids", deadline_s=deadline_s)
    else:
        gathered = torch.empty(group.size(), group.size(), dtype=torch.int64, device=device)
        all_gather_single(gathered, torch.tensor(leaving, device=device), group=group)
        lines = gathered.tolist()
    return [sum(line[rank] for line in lines) for rank in range(group.size())]
