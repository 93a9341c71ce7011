"""Shared code of the tests of embedding_all_to_all on several GPUs; most of it runs on the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from support.reference import Problem, assert_close

from weft import symm
from weft.embedding import as_jagged
from weft.embedding.check import check_jagged
from weft.embedding.options import EmbeddingOptions, Order
from weft.embedding.plan import plan_of
from weft.ops.embedding_all_to_all import embedding_all_to_all
from weft.ops.embedding_pool import embedding_pool
from weft.runtime.embedding import executor_of

FUSED, ORDERS = ("direct", "put"), get_args(Order)
TRANSPORTS = (*FUSED, "serial")
NAN_BYTE = 0xFF  # this byte repeated is a NaN in fp32, fp16 and bf16
MARKS = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: one is needed, ranks can share it"),
]


def device() -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", torch.cuda.current_device())


def here(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to(device()) for tensor in tensors]


def call(group: dist.ProcessGroup, p: Problem, features: Any = None, **options: Any) -> torch.Tensor:
    """Return this rank's part of `p`, as a tuple of tensors unless `features` says otherwise."""
    rank = group.rank()
    features = tuple(here(p.tupled(rank))) if features is None else features
    weights = here(p.local_weights(rank))
    batch_sizes = options.pop("batch_sizes", p.batch_sizes)
    return embedding_all_to_all(
        weights, features, p.sharding, group=group, batch_sizes=batch_sizes, hash=p.hash, **options
    )


def operator_of(group: dist.ProcessGroup, p: Problem, **options: Any) -> Any:
    """Return the executor that `call` uses with these options, for tests of its internals."""
    options.pop("deadline_s", None)
    plan = plan_of(p.sharding, EmbeddingOptions(**{"transport": "direct", "hash": p.hash} | options))
    return executor_of(plan, symm.communicator(group, device()))


def run(group: dist.ProcessGroup, p: Problem, operator: Any, **how: Any) -> torch.Tensor:
    """Call the operator without the public function, for options that only the operator has (`count`,
    `launch_per_table`)."""
    rank = group.rank()
    weights, jagged = here(p.local_weights(rank)), as_jagged(tuple(here(p.tupled(rank))))
    bags = jagged, check_jagged(jagged, p.sharding, rank, p.batch_sizes, weights)
    return operator.run({"tables": weights, "bags": bags}, **how)["out"]


def synchronize(operator: Any) -> None:
    """Wait for this rank's device, then raise any error of its communicator."""
    torch.cuda.synchronize(operator.comm.device)
    operator.check()


def poison(operator: Any) -> None:
    """Fill every output buffer of this rank that is not lent with NaN, in stream order: peers write only after it."""
    pool = getattr(operator, "outputs", None)
    if pool is not None and pool.slot_bytes:
        memory = pool._region.tensor(operator.comm.rank, (pool.count, pool.slot_bytes), torch.uint8)
        for slot in pool._free:
            memory[slot].fill_(NAN_BYTE)


def pooled_alone(p: Problem) -> torch.Tensor:
    """Compute all of `p` on this rank's GPU, without other ranks: [global batch, total_dim]."""
    return embedding_pool(here(p.weights), tuple(here(p.whole())), p.tables, hash=p.hash)


def assert_right(group: dist.ProcessGroup, p: Problem, output: torch.Tensor, what: str = "") -> None:
    """Assert that this rank's output has the bits that one GPU computes, and is right."""
    rows = p.rows_of(group.rank())
    assert_close(output.cpu(), p, rows)
    differs = output != pooled_alone(p)[rows]
    assert not differs.any(), f"{what}: {int(differs.sum())} elements are not the bits that one GPU computes"
