"""Agreement of ranks on a call of embedding_all_to_all before any of them writes: same plan, same batch, and no refusal.

On CPU, ranks meet before every call (`weft.runtime.meeting`) and say which output buffer each offers. On GPUs the host does not
wait for peers, so ranks compare plans when an operator is made, and a refusal ends the group.
"""

from __future__ import annotations

import hashlib
import json
import struct
from functools import partial
from typing import Any, NoReturn

from weft.embedding.plan import EmbeddingPlan
from weft.errors import DisagreementError, RefusedError
from weft.runtime.meeting import Topic, meeting_of
from weft.symm import Domain

_EXTRA = struct.Struct("<qq")  # the rank's output slot for the call, the hash of the batch sizes
_PIECE_BYTES = 32 * 1024  # of a plan's text per message; a message carries up to 64 KiB


def topic_of(domain: Domain, plan: EmbeddingPlan, *, new: bool = False) -> Topic:
    """Return the topic of calls of embedding_all_to_all with this plan, or, if `new`, of the making of its operator."""
    details = f"{plan.fingerprint}{' is new' if new else ''}"
    return Topic("embedding_all_to_all", details, difference=partial(_difference, domain, plan))


def agree(
    domain: Domain, topic: Topic, slot: int, batch_sizes: tuple[int, ...], *, deadline_s: float | None
) -> list[int]:
    """Return every rank's output slot for this call. Raise on every rank if one refuses or calls something else."""
    meeting = meeting_of(domain)
    extras = meeting.meet(topic, deadline_s=deadline_s, extra=_EXTRA.pack(slot, hash(batch_sizes)))
    said = [_EXTRA.unpack(extra) for extra in extras]
    for rank, (_, theirs) in enumerate(said):
        if theirs != said[0][1]:
            meeting.disagree(
                f"ranks 0 and {rank} called embedding_all_to_all with different batch_sizes (here, on rank {domain.rank}, "
                f"{batch_sizes}): pass the same global batch and batch_sizes on every rank"
            )
    return [slot for slot, _ in said]


def agree_on_new(domain: Domain, plan: EmbeddingPlan, *, deadline_s: float | None) -> None:
    """Check, before an operator for `plan` is made, that every rank is about to make it. Raise as `agree`, naming what differs."""
    if domain.device.type == "cpu":
        meeting_of(domain).meet(topic_of(domain, plan, new=True), deadline_s=deadline_s)
    elif text := _difference(domain, plan):
        domain.end(text)
        raise DisagreementError(text)


def refuse(domain: Domain, text: str, *, deadline_s: float | None) -> NoReturn:
    """Take part in a call whose input is bad here. Raise `RefusedError` with `text`, on CPU on every rank."""
    if domain.device.type == "cpu":
        raise RefusedError(meeting_of(domain).refuse(text, deadline_s=deadline_s))
    domain.check()
    domain.poison(text)
    raise RefusedError(f"rank {domain.rank}: {text}")


def _difference(domain: Domain, plan: EmbeddingPlan) -> str:
    """Return how the ranks' plans differ; "" if they do not. Collective."""
    mine = json.dumps(plan.text).encode()
    known = domain.all_gather((len(mine), hashlib.sha256(mine).hexdigest()), what="plans of embedding_all_to_all")
    if all(one == known[0] for one in known):
        return ""
    theirs = [b""] * domain.world_size
    for begin in range(0, max(length for length, _ in known), _PIECE_BYTES):
        pieces = domain.all_gather(mine[begin : begin + _PIECE_BYTES], what="what differs in embedding_all_to_all")
        theirs = [text + piece for text, piece in zip(theirs, pieces, strict=True)]
    texts: list[dict[str, Any]] = [json.loads(text) for text in theirs]
    for rank, text in enumerate(texts):
        for what in texts[0] | text:
            here, there = texts[0].get(what, "nothing"), text.get(what, "nothing")
            if here != there:
                return (
                    f"ranks disagree on embedding_all_to_all: {what} is {here!r} on rank 0 and {there!r} on rank {rank}: "
                    f"pass the same tables, placement and options on every rank"
                )
    return "ranks disagree on embedding_all_to_all"
