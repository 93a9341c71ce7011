"""Functions that measure and free the result buffers that `embedding_all_to_all` keeps between calls."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft import symm
from weft.embedding.plan import EmbeddingPlan
from weft.errors import DisagreementError, RefusedError
from weft.operator.calls import drop_calls, prepared_calls
from weft.operator.compiled_operator import CompiledOperator
from weft.operator.embedding_transport import settled
from weft.ops.embedding_all_to_all import OPERATOR
from weft.runtime.executor import Executor
from weft.symm import Communicator
from weft.words import counted


def calls_with(p: EmbeddingPlan, comm: Communicator) -> list[CompiledOperator]:
    """Return the compiled embedding operators for the plan `p` (tables and options) on the communicator `comm`."""
    plans = [p]
    if p.options.transport == "auto":  # `checked` may have replaced "auto"
        if (transport := settled(p, comm.device, comm.group)) is not None:
            plans.append(p.sent_by(transport))
        if (
            comm.device.type == "cpu" and transport != "direct"
        ):  # "auto" was "direct" because there was no model at the first call
            plans.append(p.sent_by("direct"))
    return [one for one in prepared_calls(OPERATOR, comm.group) if one.comm is comm and one.key[0][0] in plans]


def buffer_bytes(p: EmbeddingPlan, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the bytes of this rank's result buffers for calls with the plan `p`: an entry for each group of calls that share
    buffers. Ranks do not communicate.
    """
    if (comm := symm.open_communicator(group, device.type)) is None:
        return []
    executors = {executor for one in calls_with(p, comm) for executor in _executors(one)}
    return [outputs.nbytes for one in executors if (outputs := getattr(one, "outputs", None)) is not None]


def release(p: EmbeddingPlan, *, group: dist.ProcessGroup, device: torch.device, deadline_s: float | None) -> None:
    """Free the symmetric memory of all calls with the plan `p`, for `ShardedEmbeddingBagCollection.close`. All ranks
    must make this call.
    """
    comm = symm.communicator(group, device, deadline_s=deadline_s)
    prepared = calls_with(p, comm)
    executors = {executor for one in prepared for executor in _executors(one)}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for executor in executors:
        executor.check()
    mine = p.fingerprint, sum(executor.lent for executor in executors)
    closing = comm.all_gather(mine, what="closing an embedding_all_to_all", deadline_s=deadline_s)
    if len({fingerprint for fingerprint, _ in closing}) > 1:
        raise DisagreementError("ranks close different modules: close the same modules in the same order on all ranks")
    if held := [f"rank {rank} holds {counted(lent, 'result')}" for rank, (_, lent) in enumerate(closing) if lent]:
        raise RefusedError(
            f"this module cannot be closed while {', '.join(held)}: delete these results and all views of them first"
        )
    others = [one for one in prepared_calls(OPERATOR, group) if one not in prepared and executors & _executors(one)]
    drop_calls(OPERATOR, group, prepared + others)


def _executors(prepared: CompiledOperator) -> set[Executor]:
    return set() if prepared.chosen is None else set(prepared.chosen.executors())
