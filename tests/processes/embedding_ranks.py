"""What the tests of embedding_all_to_all run on the ranks: top-level functions, in a module that imports quickly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from reference import Problem

from weft.ops.embedding_all_to_all import compiled, embedding_all_to_all
from weft.runtime.cpu import EmbeddingAllToAllCpu
from weft.runtime.embedding_plan import EmbeddingPlan
from weft.timeline import Timeline

NAN_BYTE = 0xFF  # this byte repeated is a NaN in fp32, fp16 and bf16


def call(group: dist.ProcessGroup, p: Problem, features: Any = None, **options: Any) -> torch.Tensor:
    """This rank's part of `p`, as a tuple of tensors unless `features` says otherwise."""
    rank = group.rank()
    features = p.tupled(rank) if features is None else features
    batch_sizes = options.pop("batch_sizes", p.batch_sizes)
    return embedding_all_to_all(
        p.local_weights(rank), features, p.sharding, group=group, batch_sizes=batch_sizes, **options
    )


def operator_of(group: dist.ProcessGroup, p: Problem, **options: Any) -> EmbeddingAllToAllCpu:
    """The operator that `call` with these options uses, to look inside."""
    options.pop("deadline_s", None)
    plan = EmbeddingPlan(p.sharding, **{"transport": "direct"} | options)
    return compiled(plan, group, torch.device("cpu"))


def free_buffers(operator: EmbeddingAllToAllCpu) -> list[torch.Tensor]:
    """The bytes of each output buffer of this rank that is not lent."""
    pool, rank = operator.outputs, operator.domain.rank
    if not pool.slot_bytes:
        return []
    memory = pool._region.tensor(rank, (pool.count, pool.slot_bytes), torch.uint8)
    return [memory[slot] for slot in pool._free]


def poison(operator: EmbeddingAllToAllCpu) -> None:
    """NaN into every free output buffer. Peers write there only once this rank has joined the next call."""
    for buffer in free_buffers(operator):
        buffer.fill_(NAN_BYTE)


def outcome(action: Any, *args: Any, **options: Any) -> tuple[str, str]:
    """("", "") or the type and text of the error, so that an expected error does not end the pool's workers."""
    try:
        action(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# --- run on the ranks ---


def results(group: dist.ProcessGroup, p: Problem, variants: list[dict[str, Any]]) -> list[torch.Tensor]:
    """One result per variant of options; twice each, the second time into poisoned buffers."""
    outputs = []
    for options in variants:
        first = call(group, p, **options).clone()
        poison(operator_of(group, p, **options))
        again = call(group, p, **options).clone()
        assert torch.equal(first, again), f"{options}: the second call differs from the first"
        outputs.append(again)
    return outputs


def keyed_result(group: dist.ProcessGroup, p: Problem, keys_of_rank: list[list[str]]) -> torch.Tensor:
    return call(group, p, p.keyed(group.rank(), keys_of_rank[group.rank()])).clone()


def many_shapes(group: dist.ProcessGroup, problems: list[Problem], options: dict[str, Any]) -> list[torch.Tensor]:
    """Calls in a row, compared only afterwards, each into poisoned buffers."""
    outputs = []
    for p in problems:
        poison(operator_of(group, p, **options))
        outputs.append(call(group, p, **options))
    return [output.clone() for output in outputs]


def counted(group: dist.ProcessGroup, p: Problem, options: dict[str, Any]) -> tuple[int, int, int]:
    """(copies, flags raised, slices per sample) of one call after another."""
    operator = operator_of(group, p, **options)
    before = operator.copies, operator.flags_raised
    call(group, p, **options)
    slices = operator.plan.slices_per_sample[group.rank()]
    return operator.copies - before[0], operator.flags_raised - before[1], slices


def recorded(group: dist.ProcessGroup, p: Problem, options: dict[str, Any]) -> tuple[torch.Tensor, Timeline]:
    timeline = Timeline()
    return call(group, p, timeline=timeline, **options).clone(), timeline
