"""Operators of embedding_all_to_all: made once for each group and plan. If the transport is open, it is chosen once for each size
of batch.

"auto" is the planner's choice between `serial`, `direct` and `put` (`EmbeddingPlan.candidates`), for the middle of each half
octave of samples (`weft.plan.nearby`), on GPUs that have a model. Elsewhere, and with one rank, it is `direct`. Under
`weft.plan.use("autotune")` all of them are timed, on CPU too. All ranks take the same: a plan is the first rank's, and measured
times are the slowest rank's.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from weft import env, plan, symm
from weft.builders import Candidate, EmbeddingAllToAll, Problem, named
from weft.embedding.check import CheckedInput
from weft.embedding.jagged import JaggedInput
from weft.embedding.options import Transport
from weft.embedding.plan import EmbeddingPlan, problem_of
from weft.errors import DisagreementError, RefusedError, WeftError
from weft.operator import measure, this_machine
from weft.operator.together import agree
from weft.plan.autotune import remembered
from weft.plan.choose import CLEARLY_US, decide, warn_once
from weft.runtime.capture import refuse_capture
from weft.runtime.cpu.embedding import EmbeddingAllToAllCpu
from weft.runtime.embedding_unfused import EmbeddingAllToAllUnfused
from weft.runtime.meeting import drop_closed
from weft.symm import Domain
from weft.words import counted

OPERATOR = "embedding_all_to_all"
_MOST_BATCHES = 256

Input: TypeAlias = tuple[list[torch.Tensor], JaggedInput, CheckedInput]
"""The tables, ids, and checked input of a call."""


class _Chosen(dict[tuple[int, ...], Any]):
    """The state of a plan that leaves the transport open: operators by batch sizes, and the ranks' choices by half octave of
    these."""

    def __init__(self) -> None:
        super().__init__()
        self.transports: dict[int, Transport] = {}


_operators: dict[Domain, dict[EmbeddingPlan, Any]] = {}
_by_handle: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def known_operator(p: EmbeddingPlan, domain: Domain, batch_sizes: tuple[int, ...]) -> Any:
    """Return the operator of earlier calls of `p` with these batch sizes; None at the first one."""
    operators = _operators.get(domain)
    found = None if operators is None else operators.get(p)
    return found.get(batch_sizes) if found.__class__ is _Chosen else found


def new_operator(p: EmbeddingPlan, domain: Domain, given: Input, deadline_s: float | None) -> Any:
    """Choose the operator for calls of `p` with this call's batch sizes. The call may be made to measure. Collective."""
    refuse_capture(domain.device)
    if p.options.transport != "auto":
        return compiled(p, domain, deadline_s=deadline_s)
    operators = _of(domain)
    chosen = operators.get(p)
    if chosen is None and not _is_open(domain):
        operators[p] = operator = compiled(p.sent_by("direct"), domain, deadline_s=deadline_s)
        return operator
    if chosen is None:
        with symm.set_up_within(deadline_s):
            _agree_on_new(p, domain, deadline_s)
        operators[p] = chosen = _Chosen()
    batch_sizes = given[2].batch_sizes
    size = plan.octave_of(EmbeddingAllToAll.size_of(batch_sizes))
    if size not in chosen.transports:
        chosen.transports[size] = _transport(p, domain, size, given, deadline_s)
    if len(chosen) >= _MOST_BATCHES:
        chosen.clear()
    chosen[batch_sizes] = operator = compiled(p.sent_by(chosen.transports[size]), domain, deadline_s=deadline_s)
    return operator


def compiled(p: EmbeddingPlan, domain: Domain, *, deadline_s: float | None = None) -> Any:
    """Return the operator for `p`, whose transport is fixed, on `domain`.

    It is made at the first call, collectively; then ranks also compare their plans.
    """
    operators = _of(domain)
    operator: Any = operators.get(p)
    if operator is None:
        with symm.set_up_within(deadline_s):
            _agree_on_new(p, domain, deadline_s)
            if p.options.transport == "serial":
                operator = EmbeddingAllToAllUnfused(p, domain)
            elif domain.device.type == "cuda":
                from weft.runtime.cuda.embedding import (
                    EmbeddingAllToAllCuda,  # needs Triton, which a CPU machine may lack
                )

                operator = EmbeddingAllToAllCuda(p, domain)
            else:
                operator = EmbeddingAllToAllCpu(p, domain)
        operator.handle = next(_handles)
        _by_handle[operator.handle] = operator
        operators[p] = operator
    return operator


def operator_of_handle(handle: int) -> Any:
    operator = _by_handle.get(handle)
    if operator is None:
        raise WeftError(
            f"operator {handle} is gone: its group or its module was closed. Call weft.embedding_all_to_all with a live group"
        )
    return operator


def release(p: EmbeddingPlan, *, group: dist.ProcessGroup, device: torch.device, deadline_s: float | None) -> None:
    """Return the symmetric memory of calls with this plan, as `ShardedEmbeddingBagCollection.close` documents. Collective."""
    domain = symm.domain(group, device, deadline_s=deadline_s)
    operators = _operators.get(domain, {})
    found = operators.get(p)
    plans = {p.sent_by(t) for t in found.transports.values()} if isinstance(found, _Chosen) else {p}
    made = [operators[one] for one in plans if one in operators]
    for operator in made:
        operator.synchronize()
    mine = p.fingerprint, sum(operator.outputs.lent for operator in made if operator.outputs is not None)
    closing = domain.all_gather(mine, what="closing an embedding_all_to_all", deadline_s=deadline_s)
    if len({fingerprint for fingerprint, _ in closing}) > 1:
        raise DisagreementError("ranks close different embedding_all_to_alls: close the same modules in the same order")
    if held := [f"rank {rank} holds {counted(lent, 'result')}" for rank, (_, lent) in enumerate(closing) if lent]:
        raise RefusedError(
            f"{', '.join(held)} in the memory that is to be given back: drop them, and all views of them, first"
        )
    for operator in made:
        operator.close()
    for key, one in [*operators.items()]:
        if isinstance(one, _Chosen):
            one.clear()
        if one is found or one in made:
            del operators[key]


def _of(domain: Domain) -> dict[EmbeddingPlan, Any]:
    operators = _operators.get(domain)
    if operators is None:
        drop_closed(_operators)
        operators = _operators[domain] = {}
    return operators


def _agree_on_new(p: EmbeddingPlan, domain: Domain, deadline_s: float | None) -> None:
    agree(OPERATOR, domain.group, domain.device, lambda: ("a plan", p.said, 0), deadline_s)


# --- the choice of a transport ---


def _is_open(domain: Domain) -> bool:
    """True if there is a transport to choose. On GPUs ranks find out together: one may know a machine file that others do not."""
    if domain.world_size == 1:
        return False
    return (
        domain.device.type == "cuda"
        or _is_tuned()
        or this_machine.machine_model(domain.device, domain.world_size) is not None
    )


def _is_tuned() -> bool:
    return plan.pinned() == plan.AUTOTUNE


def _transport(p: EmbeddingPlan, domain: Domain, size: int, given: Input, deadline_s: float | None) -> Transport:
    """Return the transport for batches of this half octave. Collective."""
    typical, tuned = plan.typical(problem_of(p.sharding, given[2].batch_sizes)), _is_tuned()
    patience_s = env.deadline_s() if deadline_s is None else deadline_s
    this_machine.know_machine(domain, patience_s)
    planned = _planned(p, typical, domain) if domain.rank == 0 and not tuned else None
    said = domain.all_gather((size, tuned, planned), what=f"choosing a transport of {OPERATOR}", deadline_s=patience_s)
    if len({mine[:2] for mine in said}) > 1:
        text = f"ranks called {OPERATOR} with other batch_sizes, or not all under weft.plan.use: make the same calls on every rank"
        domain.end(text)
        raise DisagreementError(text)
    transport: Transport = _fastest(p, typical, domain, given, patience_s) if tuned else said[0][2]
    return transport


def _planned(p: EmbeddingPlan, typical: Problem, domain: Domain) -> Transport:
    """Return the choice by this machine's model, if there is one; by cached times, if there are some of each transport."""
    model = this_machine.machine_model(domain.device, domain.world_size)
    if model is None:
        return "direct"
    times = remembered(typical, this_machine.device_name(domain.device), "queued")
    measured = {name: times[name] for name in p.candidates} if times.keys() >= p.candidates.keys() else None
    choice = decide(typical, model, mode="queued", measured=measured, among=frozenset(p.candidates))
    direct_us = next((row.us for row in choice.rows if row.candidate.name == "direct"), None)
    is_close = direct_us is not None and direct_us - choice.predicted_us < CLEARLY_US
    if choice.candidate.name == "serial" and measured is None and is_close:
        return "direct"  # one launch: pooling, an all-to-all and copies keep the host busy several times as long
    if choice.candidate.name == "serial":
        warn_once(typical, "queued", f"{choice.reason}; weft.plan.explain says more", near=True)
    return p.candidates[choice.candidate.name]


def _fastest(p: EmbeddingPlan, typical: Problem, domain: Domain, given: Input, deadline_s: float) -> Transport:
    """Return the fastest transport for calls with this input, timed now or before (`weft.plan.autotune`). Losing operators are
    closed."""
    mode: plan.Mode = "queued" if domain.device.type == "cuda" else "single"
    before = set(_of(domain))

    def run(candidate: Candidate) -> float:
        operator = compiled(p.sent_by(p.candidates[candidate.name]), domain, deadline_s=deadline_s)
        return measure.time_us(lambda: operator(*given, deadline_s=deadline_s), domain, mode, deadline_s)

    def slowest(mine: list[float]) -> list[float]:
        times = domain.all_gather(mine, what=f"times of {OPERATOR}", deadline_s=deadline_s)
        return [max(of_one) for of_one in zip(*times, strict=True)]

    known = [named(typical, name) for name in p.candidates]
    times = plan.autotune(typical, known, run, slowest, machine=this_machine.device_name(domain.device), mode=mode)
    taken = p.candidates[min(p.candidates, key=lambda name: times[name])]
    for transport in p.candidates.values():
        if transport != taken and (other := p.sent_by(transport)) in _of(domain).keys() - before:
            release(other, group=domain.group, device=domain.device, deadline_s=deadline_s)
    return taken
