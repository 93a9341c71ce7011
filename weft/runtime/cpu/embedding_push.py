"""The exchange of embeddings' gradients between CPU ranks of one host. Each rank copies its gradients directly into the
inbox of the rank that owns the table, a buffer in symmetric memory. All modules of a group share one exchange.

    inbox      of each rank: [global batch, columns of its tables]
    arrived    of each rank: for each peer, the number of the last exchange whose gradients have arrived from the peer

Memory order. A rank copies its gradients, then stores the number of the exchange into `arrived` at every peer, with
release. The peer acquires it, and then reads its inbox. Inboxes are free when an exchange begins: ranks synchronise
before each exchange (`weft.runtime.embedding_backward`), and a rank has used its inbox before it makes its next call.

Compared with gloo's all-to-all, this needs no copy into a send buffer, and no sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from weft import _core
from weft.embedding import EmbeddingSharding
from weft.embedding.tables import column_runs
from weft.errors import WeftError
from weft.runtime.per_communicator import of_communicator
from weft.symm import Communicator, Region

_NAME = "gradients of embeddings"


class PushedGradients:
    """The exchange of embeddings' gradients between the CPU ranks of one host, by copies into the memory of the ranks that own
    the tables. All ranks must construct this object, and make the same calls.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self._exchanges = comm, 0
        self._arrived = comm.allocate(_core.COUNTER_BYTES * comm.world_size, what=f"signals of {_NAME}")
        self._inbox: Region | None = None

    def run(
        self, grad: torch.Tensor, sharding: EmbeddingSharding, batch_sizes: Sequence[int], deadline_s: float | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Exchange gradients. Return the gradients of the vectors that this rank pooled, [global batch, columns of its
        tables], as `dtype`. They are valid until the next exchange.

        grad: the gradient of this rank's output, [samples, columns of all tables].

        Raises the errors of `Communicator.allocate`, if memory must grow, and of `Communicator.wait`.
        """
        comm, columns, batch = self.comm, sharding.columns_of_ranks, sum(batch_sizes)
        inbox = self._reserved(batch * max(columns) * dtype.itemsize, deadline_s)
        self._exchanges += 1
        try:
            self._push(grad, sharding, batch_sizes, inbox, dtype)
            others = [rank for rank in range(comm.world_size) if rank != comm.rank]
            for peer in others:
                _core.signal_set(self._arrived.address(peer) + _core.COUNTER_BYTES * comm.rank, self._exchanges)
            for peer in others:
                address = self._arrived.address(comm.rank) + _core.COUNTER_BYTES * peer
                comm.wait(address, self._exchanges, name=_NAME, peer=peer, deadline_s=deadline_s)
        except BaseException as error:
            if not isinstance(error, WeftError):  # all ranks raise a WeftError, but peers do not know of other errors
                comm.poison(f"the exchange of {_NAME} failed: {error!r}")
            raise
        return inbox.tensor(comm.rank, (batch, columns[comm.rank]), dtype)

    def _push(
        self, grad: torch.Tensor, sharding: EmbeddingSharding, batch_sizes: Sequence[int], inbox: Region, dtype: torch.dtype
    ) -> None:  # fmt: skip
        grad = grad.to(dtype)
        if grad.stride(-1) != 1 or grad.stride(0) < grad.shape[1]:  # for example, the gradient of a sum has stride 0
            grad = grad.contiguous()
        rank, size = self.comm.rank, dtype.itemsize
        owners, pieces = _pieces(sharding)
        first = sum(batch_sizes[:rank])
        starts = [inbox.address(o) + first * c * size for o, c in enumerate(sharding.columns_of_ranks)]
        pieces = pieces * size
        pieces[:, 0] += np.array(starts, dtype=np.int64)[owners]
        pieces[:, 2] += grad.data_ptr()
        # With less than 2 samples, every stride counts as contiguous, also 0.
        pieces[:, 3] = max(grad.stride(0), grad.shape[1]) * size
        _core.copy_columns(pieces, rows=len(grad), n_threads=torch.get_num_threads())

    def _reserved(self, nbytes: int, deadline_s: float | None) -> Region:
        """Return the ranks' inboxes (receive buffers), each of at least `nbytes` bytes. All ranks must make this call with the
        same size.
        """
        if self._inbox is None or nbytes > self._inbox.nbytes:
            most = max(nbytes, 1) if self._inbox is None else max(nbytes, self._inbox.nbytes * 3 // 2)  # to grow seldom
            larger = self.comm.allocate(most, what=_NAME, deadline_s=deadline_s)
            if self._inbox is not None:
                self._inbox.close()
            self._inbox = larger
        return self._inbox


@lru_cache(maxsize=64)
def _pieces(sharding: EmbeddingSharding) -> tuple[np.ndarray, np.ndarray]:
    """Divide the columns of a gradient into runs of adjacent columns with one owner. Return two int64 arrays:

    - The owner of each run, [runs].
    - The arguments of `_core.copy_columns` for each run, [runs, 5]: first column in the inbox, columns of the inbox, first
      column in the gradient, 0, and columns of the run. The inbox belongs to the owner.
    """
    runs, columns = column_runs(sharding), sharding.columns_of_ranks
    begins = accumulate((end - begin for _, begin, end in runs), initial=0)
    lines = [(begin, columns[o], here, 0, end - begin) for (o, begin, end), here in zip(runs, begins, strict=False)]
    owners = np.array([owner for owner, _, _ in runs], dtype=np.int64)
    return owners, np.array(lines, dtype=np.int64).reshape(-1, 5)


_exchanges: dict[Communicator, PushedGradients] = {}


def pushed_on(comm: Communicator) -> PushedGradients:
    """Return the exchange of embeddings' gradients (`PushedGradients`) on `comm`. The first call constructs it, so all ranks
    must make this call together.
    """
    return of_communicator(_exchanges, comm, PushedGradients)
