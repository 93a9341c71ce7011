"""The exchange of embeddings' gradients between GPUs, with `weft.kernels.embedding_push`. A kernel stores gradients into
the inbox of the rank that owns the table: a buffer in symmetric memory. All modules of a group share one exchange.

The CPU waits for the device only to allocate larger inboxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from weft import env
from weft.embedding import EmbeddingSharding
from weft.embedding.tables import column_runs
from weft.kernels import embedding_push as device_code
from weft.runtime.capture import is_captured, keep_for_graphs, refuse_capture
from weft.runtime.cuda.direct import Call, Kernel, alignments, launch_all
from weft.runtime.cuda.peer_exchange import PeerExchange
from weft.runtime.cuda.tensor_maps import TRITON_TYPE, tma_and_multiprocessors
from weft.runtime.per_communicator import of_communicator
from weft.symm import Communicator, Region, set_up_within
from weft.symm.lasting import lasting

_TILE = 4096  # elements that a program copies at a time
_WIDEST = 1024  # most columns of a piece
_WARPS = 4
_PROGRAMS_PER_SM = 4
_WAITED_FOR = {
    device_code.WAIT_FREE: "that the last gradients are no longer in use",
    device_code.WAIT_ARRIVED: "that gradients have arrived",
}


class Pieces(NamedTuple):
    """The columns of a rank's gradients, divided into pieces: ranges of columns with one destination.

    table: the pieces, int64 [pieces, `weft.kernels.embedding_push.PIECE_FIELDS`] on the device.
    block: the width of the widest piece, in columns, rounded up to a power of two (at least 16).
    align: the alignment of pieces in elements, a power of two of at most 16 bytes.
    """

    table: torch.Tensor
    block: int
    align: int


@lru_cache(maxsize=64)
def pieces_of(sharding: EmbeddingSharding, rank: int, itemsize: int, device: torch.device) -> Pieces:
    """Return the pieces of a rank's gradients. A piece is a range of columns with one destination rank.

    Pieces for other ranks are ordered by destination: the next rank first, then the others in cyclic order. This rank's own
    pieces are evenly distributed among them, because memory copies own pieces while links are busy.

    itemsize: the number of bytes of an element.
    """
    columns, found, here = sharding.columns_of_ranks, list[list[int]](), 0
    align = 16 // itemsize
    for owner, begin, end in column_runs(sharding):
        for first in range(begin, end, _WIDEST):
            width = min(_WIDEST, end - first)
            found.append([owner, here, first, width, columns[owner]])
            here += width
    while any(number % align for piece in found for number in piece[1:]):
        align //= 2
    world = sharding.world_size
    far = sorted([piece for piece in found if piece[0] != rank], key=lambda piece: (piece[0] - rank - 1) % world)
    own = [piece for piece in found if piece[0] == rank]
    places = [(place / len(far), piece) for place, piece in enumerate(far)]
    places += [((place + 0.5) / len(own), piece) for place, piece in enumerate(own)]
    found = [piece for _, piece in sorted(places, key=lambda placed: placed[0])]
    block = triton.next_power_of_2(max((piece[3] for piece in found), default=1))
    table = lasting(device, lambda: torch.tensor(found, dtype=torch.int64, device=device))
    return Pieces(table, max(16, block), align)


def launch_push(
    grad: torch.Tensor, sharding: EmbeddingSharding, rank: int, batch_sizes: Sequence[int], inboxes: torch.Tensor,
    signals: torch.Tensor, state: torch.Tensor, record: torch.Tensor, deadline_s: float, dtype: torch.dtype,
    wait: bool = True,
) -> None:  # fmt: skip
    """Launch `push_kernel` on the current stream.

    grad: the gradient of this rank's output, [batch_sizes[rank], columns of all ranks' tables], contiguous.
    batch_sizes: the number of samples of each rank.
    inboxes, signals: the addresses of each rank's inbox and of its signals, as mapped on this device, int64 [world_size].
    state: device memory in which the kernel keeps the number of the call and counters, int64 [STATE_WORDS].
    record: pinned memory in which the kernel reports a missed deadline, int64 [RECORD_WORDS].
    dtype: the dtype of the elements in the inboxes.
    wait: False if one process runs all ranks, so that the kernel cannot wait for peers.
    """
    device, itemsize = grad.device, min(grad.itemsize, dtype.itemsize)
    pieces = pieces_of(sharding, rank, itemsize, device)
    rows, samples, count = max(1, _TILE // pieces.block), len(grad), len(pieces.table)
    programs = max(1, min(count * -(-samples // rows), tma_and_multiprocessors(device)[1] * _PROGRAMS_PER_SM))
    first = sum(batch_sizes[:rank])
    numbers = samples, first, count, grad.shape[1], int(1e9 * deadline_s)
    given = [grad, keep_for_graphs(pieces.table), inboxes, signals, state, record]
    addresses = [tensor.data_ptr() for tensor in given]
    align = pieces.align if addresses[0] % 16 == 0 else 1

    def kernels() -> list[Kernel]:
        of_tile = {"ROWS": rows, "BLOCK": pieces.block, "ALIGN": align, "DTYPE": TRITON_TYPE[dtype]}
        of_tile |= {"ITEM_BYTES": dtype.itemsize, "WAIT": wait}
        ranks = {"RANK": rank, **_of_world(sharding.world_size, device)}
        return [Kernel(device_code.push_kernel, _WARPS, ranks | of_tile)]

    def calls(are_tensors: bool) -> list[Call]:
        return [((programs, 1), (*(given if are_tensors else addresses), *numbers))]

    key = "push", rank, sharding.world_size, grad.dtype, dtype, pieces.block, align, wait, alignments(addresses)
    launch_all(key if max(numbers[:4]) >> 31 == 0 else None, kernels, calls)


def launch_free(signals: torch.Tensor, state: torch.Tensor, rank: int, world: int) -> None:
    """Launch `free_kernel` on the current stream. It notifies every peer that the peer may overwrite this rank's inbox (the
    buffer for gradients from peers).
    """
    given = signals, state
    addresses = [tensor.data_ptr() for tensor in given]

    def kernels() -> list[Kernel]:
        return [Kernel(device_code.free_kernel, 1, {"RANK": rank, **_of_world(world, state.device)})]

    key = "free", rank, world, alignments(addresses)
    launch_all(key, kernels, lambda are_tensors: [((1, 1), given if are_tensors else addresses)])


def _of_world(world: int, device: torch.device) -> dict[str, Any]:
    ptx = device.type == "cuda" and torch.version.hip is None
    return {"WORLD": world, "WORLD_P2": triton.next_power_of_2(world), "PTX": ptx}


class PushedGradients(PeerExchange):
    """The exchange of embeddings' gradients between GPUs, by stores into the memory of the ranks that own the tables. All ranks
    must construct this object, and make the same calls.
    """

    def __init__(self, comm: Communicator) -> None:
        device, world = comm.device, comm.world_size
        self._signals = comm.allocate(8 * 2 * world, what="signals of gradients")
        self._inbox: Region | None = None
        self._kept: list[tuple[Region, torch.Tensor]] = []  # inboxes that captured graphs use, with their addresses
        self._captured = False
        self._state = lasting(device, lambda: torch.zeros(device_code.STATE_WORDS, dtype=torch.int64, device=device))
        super().__init__(comm, 2 * world)
        self._signals_at = self.addresses(self._signals)
        self._inboxes_at = self._signals_at

    def signals(self) -> torch.Tensor:
        return self._signals.tensor(self.comm.rank, (2 * self.comm.world_size,), torch.int64)

    def missed(self, status: int, epoch: int, peer: int) -> str:
        return (
            f"exchange {epoch} of embeddings' gradients waited for rank {peer} to say {_WAITED_FOR[status]}, and missed its "
            "deadline: check that all ranks ran backward of the same call"
        )

    def run(
        self, grad: torch.Tensor, sharding: EmbeddingSharding, batch_sizes: Sequence[int], deadline_s: float | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Enqueue the exchange of gradients on the current stream. Return the gradients of the vectors that this rank pooled,
        [global batch, columns of this rank's tables], as `dtype`. They are valid until `free`.
        """
        self.check()
        comm, patience_s = self.comm, deadline_s or env.deadline_s()
        columns, batch = sharding.columns_of_ranks, sum(batch_sizes)
        self._reserve(batch * max(columns) * dtype.itemsize, patience_s)
        assert self._inbox is not None
        self.follow_last()
        self._captured = self._captured or is_captured(comm.device)
        launch_push(
            grad.contiguous(), sharding, comm.rank, batch_sizes, self._inboxes_at, self._signals_at, self._state,
            self.record, patience_s, dtype,
        )  # fmt: skip
        return self._inbox.tensor(comm.rank, (batch, columns[comm.rank]), dtype)

    @property
    def ok(self) -> torch.Tensor:
        """A device tensor, int64 [1]: 1 if all gradients of the last exchange have arrived, else 0."""
        return self._state[device_code.OK : device_code.OK + 1]

    def free(self) -> None:
        """Enqueue signals that allow all peers to overwrite the gradients of the last exchange."""
        launch_free(self._signals_at, self._state, self.comm.rank, self.comm.world_size)
        self.note_last()

    def _reserve(self, nbytes: int, patience_s: float) -> None:
        if self._inbox is not None and nbytes <= self._inbox.nbytes:
            return
        refuse_capture(self.comm.device)
        with set_up_within(patience_s):
            # Work of any rank may still use the smaller memory.
            torch.cuda.synchronize(self.comm.device)
            self.comm.all_gather(None, what="larger memory for gradients")
            smaller = self._inbox
            most = max(nbytes, 1) if smaller is None else max(nbytes, smaller.nbytes * 3 // 2)  # to grow seldom
            self._inbox = self.comm.allocate(most, what="gradients of embeddings")
        if smaller is not None and self._captured:
            self._kept.append((smaller, self._inboxes_at))
        elif smaller is not None:
            smaller.give_back()
        self._inboxes_at = self.addresses(self._inbox)


_exchanges: dict[Communicator, PushedGradients] = {}


def pushed_on(comm: Communicator) -> PushedGradients:
    """Return the exchange of embeddings' gradients (`PushedGradients`) on `comm`. The first call constructs it, so all ranks
    must make this call together.
    """
    return of_communicator(_exchanges, comm, PushedGradients)
