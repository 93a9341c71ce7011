"""How ranks agree on a call of embedding_all_to_all before anybody writes: the same plan and batch, and nobody refuses.

On CPU this is one small exchange through shared memory per call, shared by all operators of a domain, so that ranks that
call different operators meet here and learn of it, rather than waiting for each other until a deadline. A rank with bad
input takes part with the text of its error: the call fails everywhere, and the group stays usable. On GPUs the host does
not wait for peers, so plans are compared when an operator is made, and a refusal poisons the group.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any, NoReturn, TypeVar

from weft.errors import DisagreementError, RefusedError
from weft.runtime.embedding_plan import EmbeddingPlan
from weft.symm import Domain, Exchange

_HEADER = struct.Struct("<qqq")  # state, fingerprints of the plan and of the batch sizes; a refusal's text follows
_BYTES = 2048
_REFUSED, _NEW = -1, -2  # states; from 0 on: the rank's output slot for the call
_PIECE_BYTES = 32 * 1024  # of a plan's text per message between ranks, which carry up to 64 KiB

T = TypeVar("T")
_exchanges: dict[Domain, Exchange] = {}


def drop_closed(of_domain: dict[Domain, T]) -> None:
    """What is kept per domain may hold the domain, so it goes when the next is made."""
    for domain in [domain for domain in of_domain if domain.closed]:
        del of_domain[domain]


def agree(
    domain: Domain, plan: EmbeddingPlan, slot: int, batch_sizes: tuple[int, ...], *, deadline_s: float | None
) -> list[int]:
    """Every rank's output slot for this call. Raises on every rank alike if one refuses or calls something else."""
    headers = _meet(domain, slot, plan, hash(batch_sizes), "", deadline_s)
    for rank, (_, _, theirs) in enumerate(headers):
        if theirs != headers[0][2]:
            raise DisagreementError(
                f"ranks 0 and {rank} called embedding_all_to_all with different batch_sizes (here, on rank {domain.rank}, "
                f"{batch_sizes}): pass the same global batch and batch_sizes on every rank"
            )
    return [state for state, _, _ in headers]


def agree_on_new(domain: Domain, plan: EmbeddingPlan, *, deadline_s: float | None) -> None:
    """Before an operator for `plan` is made: every rank is about to make it. Raises as `agree`, naming what differs."""
    if domain.device.type == "cpu":
        _meet(domain, _NEW, plan, 0, "", deadline_s)
    else:
        _compare(domain, plan)


def refuse(domain: Domain, text: str, *, deadline_s: float | None) -> NoReturn:
    """Take part in a call whose input is bad here: raises `RefusedError` with `text`, on CPU on every rank."""
    if domain.device.type == "cpu":
        _meet(domain, _REFUSED, None, 0, f"rank {domain.rank}: {text}", deadline_s)
    else:
        domain.check()
        domain.poison(text)
    raise RefusedError(f"rank {domain.rank}: {text}")


def _meet(
    domain: Domain, state: int, plan: EmbeddingPlan | None, batch: int, text: str, deadline_s: float | None
) -> list[tuple[int, int, int]]:
    """Every rank's header. A refusal counts before a difference: the rank that refuses may not know its plan."""
    exchange = _exchanges.get(domain)
    if exchange is None:
        drop_closed(_exchanges)
        exchange = _exchanges[domain] = Exchange(domain, _BYTES)
    header = _HEADER.pack(state, 0 if plan is None else plan.fingerprint, batch)
    payload = header + text.encode()[: _BYTES - _HEADER.size]
    payloads = exchange.exchange(payload, deadline_s=deadline_s, name="embedding_all_to_all ready")
    headers = [_HEADER.unpack_from(payload) for payload in payloads]
    for (theirs, _, _), payload in zip(headers, payloads, strict=True):
        if theirs == _REFUSED:
            raise RefusedError(payload[_HEADER.size :].decode(errors="replace"))
    if plan is not None and any((s == _NEW, p) != (state == _NEW, plan.fingerprint) for s, p, _ in headers):
        _compare(domain, plan)
    return headers


def _compare(domain: Domain, plan: EmbeddingPlan) -> None:
    """Raise `DisagreementError` on every rank if the ranks' plans differ, naming what differs."""
    mine = json.dumps(plan.text).encode()
    known = domain.all_gather((len(mine), hashlib.sha256(mine).hexdigest()), what="plans of embedding_all_to_all")
    if all(one == known[0] for one in known):
        return
    theirs = [b""] * domain.world_size
    for begin in range(0, max(length for length, _ in known), _PIECE_BYTES):
        pieces = domain.all_gather(mine[begin : begin + _PIECE_BYTES], what="what differs in embedding_all_to_all")
        theirs = [text + piece for text, piece in zip(theirs, pieces, strict=True)]
    texts: list[dict[str, Any]] = [json.loads(text) for text in theirs]
    for rank, text in enumerate(texts):
        for what in texts[0] | text:
            here, there = texts[0].get(what, "nothing"), text.get(what, "nothing")
            if here != there:
                raise DisagreementError(
                    f"ranks disagree on embedding_all_to_all: {what} is {here!r} on rank 0 and {there!r} on rank {rank}: "
                    f"pass the same tables, placement and options on every rank"
                )
