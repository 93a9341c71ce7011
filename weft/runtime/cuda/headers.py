"""The exchange of headers between GPUs (batch sizes and numbers of ids of a batch), with
`weft.kernels.input_dist.exchange_kernel`.

One small kernel stores the headers into peers' memory and waits for the peers' headers. NCCL's all-to-all takes several times the
CPU time. It would also wait for all earlier collectives of the group, such as the all-reduce of DDP in the preceding step.

All input distributions of a group share one exchange.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton

from weft.errors import DisagreementError, RefusedError, WeftError
from weft.kernels import input_dist as device_code
from weft.runtime.cuda.direct import Call, Kernel, alignments, launch_all
from weft.runtime.cuda.peer_exchange import PeerExchange
from weft.runtime.per_communicator import of_communicator
from weft.symm import Communicator, Region, open_communicator, set_up_within
from weft.symm.lasting import lasting

_BLOCK = 256
_FEWEST = 1024  # words of a box, so that it seldom grows


def launch_exchange(
    headers: torch.Tensor, starts: torch.Tensor, regions: torch.Tensor, state: torch.Tensor, record: torch.Tensor,
    arrived: torch.Tensor, most: int, deadline_s: float, rank: int, world: int, wait: bool = True,
) -> None:  # fmt: skip
    """Launch `exchange_kernel` on the current stream; see there for the tensors.

    wait: False if one process runs all ranks, so that the kernel cannot wait for peers.
    """
    given = [headers, starts, regions, state, record, arrived]
    addresses = [tensor.data_ptr() for tensor in given]
    numbers = most, int(1e9 * deadline_s)

    def kernels() -> list[Kernel]:
        of_device = {"PTX": headers.device.type == "cuda" and torch.version.hip is None, "BLOCK": _BLOCK, "WAIT": wait}
        ranks = {"RANK": rank, "WORLD": world, "WORLD_P2": triton.next_power_of_2(world)}
        return [Kernel(device_code.exchange_kernel, 4, ranks | of_device)]

    def calls(are_tensors: bool) -> list[Call]:
        return [((1, 1), (*(given if are_tensors else addresses), *numbers))]

    launch_all(("headers", rank, world, wait, alignments(addresses)), kernels, calls)


class HeaderExchange(PeerExchange):
    """The exchange of headers between the GPUs of a group. All ranks must construct this object, and make the same calls."""

    def __init__(self, comm: Communicator) -> None:
        self.state = lasting(comm.device, lambda: torch.zeros(1, dtype=torch.int64, device=comm.device))
        self._most = _FEWEST
        self._region = self._allocate(comm)
        super().__init__(comm, comm.world_size)
        self._regions_at = self.addresses(self._region)

    def signals(self) -> torch.Tensor:
        return self._region.tensor(self.comm.rank, (self.comm.world_size,), torch.int64)

    def missed(self, status: int, epoch: int, peer: int) -> str:
        return (
            f"input distribution {epoch} of embeddings waited for the numbers of ids of rank {peer}, and missed its deadline: "
            "check that all ranks have the same number of batches, and called the module or prefetched a batch"
        )

    def failure(self, status: int, epoch: int, peer: int, wanted: int, found: int) -> WeftError:
        if status != device_code.BAD_BATCH:
            return super().failure(status, epoch, peer, wanted, found)
        of_batch = f"rank {self.comm.rank} dropped the ids of input distribution {epoch} of embeddings: "
        if wanted == device_code.OTHER_BITS:
            return DisagreementError(f"{of_batch}ids have another dtype on rank {peer}: use one dtype on all ranks")
        if wanted == device_code.OTHER_BATCH:
            return DisagreementError(
                f"{of_batch}rank {peer} has {found} samples: all ranks must have batch_size samples"
            )
        if wanted == device_code.TOO_MANY:
            return RefusedError(
                f"{of_batch}it would receive {found} ids, more than max_ids: use a smaller batch, a larger max_ids, or place "
                "tables on other ranks"
            )
        return RefusedError(
            f"{of_batch}lengths on rank {peer} are negative, or do not match the values: lengths must be 0 or more, and sum to at "
            "most the number of values"
        )

    def run(
        self, headers: torch.Tensor, starts: torch.Tensor, most: int, arrived: torch.Tensor, deadline_s: float
    ) -> None:
        """Enqueue the exchange on the current stream.

        headers: int64, the headers for all ranks, one after the other.
        starts: the index of each rank's first word, and the end, int64 `[world size + 1]` on the device.
        most: the number of words of the longest header of any rank.
        arrived: int64, receives the headers from all ranks.
        """
        self.check()
        self._reserve(most)
        self.follow_last()
        launch_exchange(
            headers, starts, self._regions_at, self.state, self.record, arrived, self._most, deadline_s, self.comm.rank,
            self.comm.world_size,
        )  # fmt: skip
        self.note_last()

    def _allocate(self, comm: Communicator) -> Region:
        words = comm.world_size * (1 + 2 * self._most)
        return comm.allocate(8 * words, what="numbers of ids of embeddings")

    def _reserve(self, most: int) -> None:
        if most <= self._most:
            return
        with set_up_within(None):
            torch.cuda.synchronize(self.comm.device)  # work of any rank may still use the smaller memory
            self.comm.all_gather(None, what="larger memory for numbers of ids")
            self._most, smaller = max(most, 2 * self._most), self._region
            self._region = self._allocate(self.comm)
        self._regions_at = self.addresses(self._region)
        smaller.give_back()


_exchanges: dict[Communicator, HeaderExchange] = {}


def headers_on(comm: Communicator) -> HeaderExchange:
    """Return the `HeaderExchange` of `comm`. The first call constructs it, so all ranks must make this call together."""
    return of_communicator(_exchanges, comm, HeaderExchange)


def known_headers(group: dist.ProcessGroup) -> HeaderExchange | None:
    """Return the group's `HeaderExchange`, even after the group has failed; None if `headers_on` has not constructed it."""
    comm = open_communicator(group, "cuda")
    return None if comm is None else _exchanges.get(comm)
