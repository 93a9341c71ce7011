"""Shared code of the tests of embedding_all_to_all on several GPUs. Most functions run on the ranks."""

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
NAN_BYTE = 0xFF  # an element whose bytes all have this value is a NaN in fp32, fp16 and bf16
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
    """Call embedding_all_to_all for `p`, and return this rank's result. `features` replaces the features of `p`."""
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
    """Run the executor directly, for options that only the executor has (`count`, `launch_per_table`)."""
    rank = group.rank()
    weights, jagged = here(p.local_weights(rank)), as_jagged(tuple(here(p.tupled(rank))))
    bags = jagged, check_jagged(jagged, p.sharding, rank, p.batch_sizes, weights)
    return operator.run({"tables": weights, "bags": bags}, **how)["out"]


def synchronize(operator: Any) -> None:
    """Wait for this rank's device, then raise any error of its communicator."""
    torch.cuda.synchronize(operator.comm.device)
    operator.check()


def poison(operator: Any) -> None:
    """Fill all unused output buffers of this rank with NaN. Peers write into them only after that, because fills and
    calls are in stream order.
    """
    pool = getattr(operator, "outputs", None)
    if pool is not None and pool.slot_bytes:
        memory = pool._region.tensor(operator.comm.rank, (pool.count, pool.slot_bytes), torch.uint8)
        for slot in pool._free:
            memory[slot].fill_(NAN_BYTE)


def pooled_alone(p: Problem) -> torch.Tensor:
    """Return the results of `p` for all samples, [global batch, total_dim], computed on this rank's GPU alone."""
    return embedding_pool(here(p.weights), tuple(here(p.whole())), p.tables, hash=p.hash)


def assert_right(group: dist.ProcessGroup, p: Problem, output: torch.Tensor, what: str = "") -> None:
    """Assert that this rank's output is close to float64, and bit for bit what one GPU computes."""
    rows = p.rows_of(group.rank())
    assert_close(output.cpu(), p, rows)
    differs = output != pooled_alone(p)[rows]
    assert not differs.any(), f"{what}: {int(differs.sum())} elements are not the bits that one GPU computes"
