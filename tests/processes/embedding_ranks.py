"""Code that tests of embedding_all_to_all share: calls on the ranks, and their expected results."""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.distributed as dist
from support.reference import Problem

from weft import symm
from weft.embedding.options import EmbeddingOptions, Order
from weft.embedding.plan import plan_of
from weft.ops.embedding_all_to_all import embedding_all_to_all
from weft.ops.embedding_pool import embedding_pool
from weft.runtime.cpu.embedding import EmbeddingAllToAllCpu
from weft.runtime.embedding import executor_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FUSED, ORDERS = ("direct", "put"), get_args(Order)
TRANSPORTS = (*FUSED, "serial")
NAN_BYTE = 0xFF  # a NaN in fp32, fp16 and bf16 consists of these bytes


def call(group: dist.ProcessGroup, p: Problem, features: Any = None, **options: Any) -> torch.Tensor:
    """Call the operator on this rank's part of `p`. features: the input in another form; default: a tuple of tensors."""
    rank = group.rank()
    features = p.tupled(rank) if features is None else features
    batch_sizes = options.pop("batch_sizes", p.batch_sizes)
    return embedding_all_to_all(
        p.local_weights(rank), features, p.sharding, group=group, batch_sizes=batch_sizes, **options
    )


def operator_of(group: dist.ProcessGroup, p: Problem, **options: Any) -> EmbeddingAllToAllCpu:
    """Return the executor that `call` uses with these options."""
    options.pop("deadline_s", None)
    plan = plan_of(p.sharding, EmbeddingOptions(**{"transport": "direct"} | options))
    return executor_of(plan, symm.communicator(group, "cpu"))


def free_buffers(operator: EmbeddingAllToAllCpu) -> list[torch.Tensor]:
    """Return a view of each output buffer of this rank that is not lent."""
    pool, rank = getattr(operator, "outputs", None), operator.comm.rank
    if pool is None or not pool.slot_bytes:
        return []
    memory = pool._region.tensor(rank, (pool.count, pool.slot_bytes), torch.uint8)
    return [memory[slot] for slot in pool._free]


def poison(operator: EmbeddingAllToAllCpu) -> None:
    """Fill every free output buffer with NaN. Peers write there only after this rank has joined the next call."""
    for buffer in free_buffers(operator):
        buffer.fill_(NAN_BYTE)


def pooled_here(p: Problem, **options: Any) -> torch.Tensor:
    """Compute all of `p` in this process, without other ranks: [global batch, total_dim]."""
    return embedding_pool(p.weights, p.whole(), p.tables, hash=p.hash, **options)


def assert_same_bits(outputs: list[torch.Tensor], p: Problem, what: object = "") -> None:
    """Check that the concatenated outputs of the ranks have the same bits as one process computes."""
    for rank, output in enumerate(outputs):
        wanted = pooled_here(p)[p.rows_of(rank)]
        assert output.shape == (p.batch_sizes[rank], p.sharding.total_dim)
        assert torch.equal(output, wanted), f"{what}: rank {rank} differs from one process's result"


# --- run on the ranks ---


def results(group: dist.ProcessGroup, p: Problem, variants: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Call with each variant of options, twice: the second time into poisoned buffers. Return the results."""
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
    """Call one problem after the other, each into poisoned buffers. Compare afterwards."""
    outputs = []
    for p in problems:
        poison(operator_of(group, p, **options))
        outputs.append(call(group, p, **options))
    return [output.clone() for output in outputs]
