"""The choice of the transport of `embedding_all_to_all`, by a performance model of this machine or by measured times.

The transport is the way in which a call sends vectors to a peer: "direct", "put" or "serial". This module handles calls
with `transport="auto"`. Calls with similar numbers of samples (a size bucket, `weft.plan.octave`) share one choice.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from weft import plan
from weft.builders import Candidate, EmbeddingAllToAll, named
from weft.embedding.options import Transport
from weft.embedding.plan import EmbeddingPlan
from weft.errors import DisagreementError
from weft.operator import measure, this_machine
from weft.plan.autotune import remembered
from weft.plan.choose import CLEARLY_US, decide, warn_once
from weft.plan.nearby import between
from weft.runtime.embedding import executor_of, executors_on
from weft.symm import Communicator

_NAME = "embedding_all_to_all"


def is_open(device: torch.device, group: dist.ProcessGroup) -> bool:
    """True if weft must choose a transport. False if "auto" always means "direct": for one rank, and on CPU without a
    machine model or autotuning. All ranks return the same value.
    """
    world = group.size()
    return world > 1 and (device.type == "cuda" or _is_tuned() or this_machine.machine_model(device, world) is not None)


def _is_tuned() -> bool:
    return plan.pinned() == plan.AUTOTUNE


def settled(found: EmbeddingPlan, device: torch.device, group: dist.ProcessGroup) -> Transport | None:
    """Return the transport for calls of the plan `found` if it is the same for all batch sizes. Return None if the transport of
    a batch size has not been chosen yet.
    """
    if not is_open(device, group):
        return "direct"
    return None if _is_tuned() else _settled.get(group, {}).get(found)


def choose_transport(
    found: EmbeddingPlan, p: EmbeddingAllToAll, comm: Communicator, tensors: dict[str, Any], deadline_s: float | None
) -> Transport:
    """Return the transport of the plan `found` for batches in the size bucket of `p`. All ranks must make this call.

    tensors: the input of the call, on which "autotune" times the transports.
    """
    tuned, patience_s = _is_tuned(), comm.deadline_s if deadline_s is None else deadline_s
    this_machine.know_machine(comm, patience_s)
    planner = this_machine.planning_rank(p, comm, patience_s)
    planned = _planned(found, p, comm) if comm.rank == planner and not tuned else None
    for_all = planned is not None and _is_for_all(_planned_before.get(comm, {}).get(found, {}))
    said = comm.all_gather((tuned, planned, for_all), what=f"choosing a transport of {_NAME}", deadline_s=patience_s)
    if len({theirs for theirs, *_ in said}) > 1:
        text = f"only some ranks called {_NAME} under weft.plan.use: enter weft.plan.use on every rank or on none"
        comm.end(text)
        raise DisagreementError(text)
    transport: Transport = _fastest(found, p, comm, tensors, patience_s) if tuned else said[planner][1]
    if said[planner][2]:
        _settled.setdefault(comm.group, {})[found] = transport
    return transport


_MANY = 1 << 30  # more samples than any batch
# "put" is chosen if it takes at most this fraction of the time of "direct". The model omits some costs of each slice that
# "put" sends. Where it predicts equal times, "put" took 1.08 to 1.46 times as long as "direct" for six recommendation
# models on H200s, and 2.6 times as long for one table on H100s.
_CLEARLY_PUT = 0.6
_planned_before: weakref.WeakKeyDictionary[Communicator, dict[EmbeddingPlan, dict[int, Transport]]]
_planned_before = weakref.WeakKeyDictionary()
"""{plan: {size bucket: transport}}: the transports that this rank has chosen by prediction. Only the rank that chooses
for all ranks has entries.
"""
_settled: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[EmbeddingPlan, Transport]] = weakref.WeakKeyDictionary()
"""Transports that all ranks use for every batch size. For a plan without an entry, the first call in each size bucket
is collective, to choose a transport. This takes one or two milliseconds.
"""


def _is_for_all(known: Mapping[int, Transport]) -> bool:
    """True if the smallest and the largest size bucket have been planned, and all planned buckets have the same
    transport. Then other buckets need no plan.

    known: the transport of each planned size bucket.
    """
    return len(known) > 1 and len({*known.values()}) == 1


def _planned(found: EmbeddingPlan, p: EmbeddingAllToAll, comm: Communicator) -> Transport:
    """Return this rank's choice for `p`: by cached times if every transport has one, otherwise by this machine's model.

    A prediction takes milliseconds, many times as long as a call. So a size bucket between two planned buckets with the
    same choice uses this choice without a prediction. When calls use a second bucket, the smallest and the largest
    possible bucket are planned too. Every later bucket then lies between two planned buckets.
    """
    model, names = this_machine.machine_model(comm.device, comm.world_size), found.candidates
    if model is None:
        return "direct"
    times = remembered(p, this_machine.device_name(comm.device), "queued")
    if times.keys() >= names.keys():
        choice = decide(p, model, mode="queued", measured={name: times[name] for name in names}, among=frozenset(names))
        return _transport_of(p, choice, names)
    known = _planned_before.setdefault(comm, {}).setdefault(found, {})
    ends = (p.resized(1), p.resized(p.size_of((_MANY,)))) if known else ()
    for size in (*ends, p):
        if between(known, plan.octave(size)) is not None:
            continue
        choice = decide(size, model, mode="queued", among=frozenset(names))
        name, us = choice.candidate.name, choice.predicted_us
        direct_us = next((row.us for row in choice.rows if row.candidate.name == "direct"), None)
        if direct_us is not None and (
            # "direct" is one launch; serial takes several times as much CPU time
            (name == "serial" and direct_us - us < CLEARLY_US) or (name == "put" and us > _CLEARLY_PUT * direct_us)
        ):
            taken: Transport = "direct"
        else:
            taken = _transport_of(p, choice, names) if size is p else names[name]
        known[plan.octave(size)] = taken
    transport = between(known, plan.octave(p))
    assert transport is not None
    return transport


def _transport_of(p: EmbeddingAllToAll, choice: plan.Choice, names: Mapping[str, Transport]) -> Transport:
    """Return the transport that the planner has chosen. Warn once if it is "serial", which overlaps nothing.

    choice: the planner's result for `p`.
    names: {name of a candidate schedule: its transport}.
    """
    if choice.candidate.name == "serial":
        warn_once(p, "queued", f"{choice.reason}; weft.plan.explain gives details", near=True)
    return names[choice.candidate.name]


def _fastest(
    found: EmbeddingPlan, p: EmbeddingAllToAll, comm: Communicator, tensors: dict[str, Any], deadline_s: float
) -> Transport:
    """Return the fastest transport of the plan `found` for this input, by measured or cached times
    (`weft.plan.autotune`). Release the executors of the other transports. All ranks must make this call.
    """
    mode: plan.Mode = "queued" if comm.device.type == "cuda" else "single"
    names, made = found.candidates, executors_on(comm)
    before = {other for other, executor in made.items() if not executor.gone}

    def run(candidate: Candidate) -> float:
        executor = executor_of(found.sent_by(names[candidate.name]), comm)
        return measure.time_us(lambda: executor.run(tensors, deadline_s=deadline_s), comm, mode, deadline_s)

    def slowest(mine: list[float]) -> list[float]:
        times = comm.all_gather(mine, what=f"times of {_NAME}", deadline_s=deadline_s)
        return [max(of_one) for of_one in zip(*times, strict=True)]

    known = [named(p, name) for name in names]
    times = plan.autotune(p, known, run, slowest, machine=this_machine.device_name(comm.device), mode=mode)
    taken = names[min(names, key=lambda name: times[name])]
    for transport in names.values():
        other = found.sent_by(transport)
        if transport != taken and other in made and other not in before:
            made[other].close()
    return taken
