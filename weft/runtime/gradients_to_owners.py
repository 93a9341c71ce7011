"""The exchange of embeddings' gradients by collectives, from the ranks of samples to the owners of tables.

CPU ranks on several hosts compare their calls before gradients are sent, in one rendezvous. If the gradients are few, they
travel with its messages. If they are many, the gradients for other hosts are sent first, and ids are sorted meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import torch.distributed as dist

from weft.embedding import EmbeddingSharding
from weft.runtime.collectives import all_to_all_single
from weft.runtime.cpu import embedding_backward as cpu
from weft.runtime.meeting import meeting_of
from weft.runtime.rails import MOST_VECTORS_BYTES
from weft.runtime.rails_all_to_all import AllToAllInto
from weft.runtime.unfused.far_first import begin_far_first, ending_the_group
from weft.runtime.unfused.turn import Turn
from weft.symm import Communicator

NAME = "all_to_all of gradients"
_MANY_BYTES = 2 << 20  # a rank with fewer bytes of gradients sends them in one exchange, which costs less than two


def nothing() -> None:
    """Do nothing."""


def to_owners(
    grad: torch.Tensor, sharding: EmbeddingSharding, rank: int, batch_sizes: Sequence[int], group: dist.ProcessGroup, turn: Turn,
    dtype: torch.dtype, meanwhile: Callable[[], None] = nothing,
) -> torch.Tensor:  # fmt: skip
    """Send `grad`, the gradient of this rank's output, to the ranks that own the tables of its columns. Return the gradients of
    the vectors that this rank pooled, [global batch, columns of its tables], as `dtype`.

    meanwhile: as for `received`. CPU ranks on several hosts must have synchronised.
    """
    world = sharding.world_size
    if world == 1:
        return grad.to(dtype).contiguous()
    columns, comm = sharding.columns_of_ranks, turn.comm_between_hosts
    leaving = [batch_sizes[rank] * count for count in columns]
    arriving = [size * columns[rank] for size in batch_sizes]
    with contextlib.nullcontext() if comm is None else ending_the_group(comm, NAME):
        send = device_code(grad.device).by_owner(grad, sharding, dtype)
        received = send.new_empty(sum(arriving))
        if comm is None:
            turn.run(NAME, all_to_all_single, received, send, arriving, leaving, group=group)
        else:
            is_whole = _most_bytes(sharding, batch_sizes, dtype) < _MANY_BYTES
            works = begin_far_first(comm, turn, NAME, received, send, arriving, leaving, is_whole)
            meanwhile()
            for work in works:
                work.wait()
    turn.done(NAME, received, (sum(leaving) - leaving[rank]) * send.itemsize)
    return received.view(sum(batch_sizes), columns[rank])


def in_rails(
    grad: torch.Tensor, sharding: EmbeddingSharding, rank: int, batch_sizes: Sequence[int], comm: Communicator, dtype: torch.dtype
) -> tuple[AllToAllInto, torch.Tensor] | None:  # fmt: skip
    """Return two values: an all-to-all that does the work of `to_owners`, and its result. The data are sent with the
    messages by which CPU ranks on several hosts synchronise. The result is complete after `AllToAllInto.end`. Return
    None if the gradients are too many, or if there is no such rendezvous. Ranks make the same choice if their `batch_sizes`
    are equal.
    """
    rails, columns = meeting_of(comm).rails, sharding.columns_of_ranks
    if rails is None or _most_bytes(sharding, batch_sizes, dtype) > min(MOST_VECTORS_BYTES, rails.rows_bytes):
        return None
    send = device_code(grad.device).by_owner(grad, sharding, dtype).view(-1, 1)
    received = send.new_empty(sum(batch_sizes), columns[rank])
    leaving, arriving = (
        torch.tensor(numbers, device="cpu").view(-1, 1)
        for numbers in (
            [batch_sizes[rank] * count for count in columns],
            [size * columns[rank] for size in batch_sizes],
        )
    )
    return AllToAllInto(rails, leaving, lambda memory: memory.copy_(send), arriving, received.view(-1, 1)), received


def _most_bytes(sharding: EmbeddingSharding, batch_sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size in bytes of the gradients of the rank with the most samples, equal on all ranks."""
    return max(batch_sizes) * sum(sharding.columns_of_ranks) * dtype.itemsize


def device_code(device: torch.device) -> ModuleType:
    """Return the module with the local computation of embeddings' backward on `device`: the one for CPU or the one for GPUs."""
    if device.type == "cpu":
        return cpu
    from weft.runtime.cuda import embedding_backward  # needs Triton, which a CPU machine may lack

    return embedding_backward
