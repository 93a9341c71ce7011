"""The exchange of ids without the CPU, for batches of a known size with a bound on the numbers of ids.

Without a bound, the CPU must read the numbers of ids, because it allocates memory for the ids and tells NCCL how many to send. With
`max_ids` and `batch_size`, all memory has a fixed size. Kernels pack ids into boxes in symmetric memory, exchange headers, and read
the boxes of all ranks (`weft.kernels.input_dist`). So a call enqueues four kernels, waits for nothing, and can be captured into a
CUDA graph.

The device finds errors that the CPU would have to wait for: negative lengths, lengths with a wrong sum, too many ids. All bags of
the batch are then empty, and a later call raises the error. The group has then failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.embedding.jagged import JaggedInput, offsets_of
from weft.nn.id_batches import HEAD, LocalBatch
from weft.nn.number_exchange import NumberExchange
from weft.runtime.capture import refuse_capture
from weft.symm import set_up_within
from weft.words import counted


class IdBound(NamedTuple):
    """The sizes that all batches of a module have. max_ids: the largest number of ids that a rank receives. batch_size: the number
    of samples of each rank.
    """

    max_ids: int
    batch_size: int

    def check(self, batch_size: int, weights: torch.Tensor | None) -> None:
        """Raise `ValueError` for a batch of another size, and for per-sample weights that require gradients."""
        if batch_size != self.batch_size:
            raise ValueError(
                f"the batch has {counted(batch_size, 'sample')}, but the module was made with batch_size={self.batch_size}: pad "
                "the batch, or leave out batch_size"
            )
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "per-sample weights require gradients, which a module with batch_size does not send back: detach the weights, or "
                "leave out batch_size"
            )


class BoxedBatch(NamedTuple):
    """A batch whose ids have arrived, in stream order."""

    jagged: JaggedInput
    batch_sizes: tuple[int, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with the ids, which were allocated on the stream of the exchange."""
        return [tensor for tensor in self.jagged[1:4] if tensor is not None]


class BoxedIds:
    """The exchange of ids through boxes, for a group of GPUs of one host. All ranks must make every call.

    features: the numbers of features that each rank receives. numbers: the exchange of headers.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, features_of_rank: Sequence[tuple[str, ...]], is_weighted: bool,
        bound: IdBound, numbers: NumberExchange,
    ) -> None:  # fmt: skip
        self._group, self._device, self._features, self.bound, self._numbers = (
            group,
            device,
            features_of_rank,
            bound,
            numbers,
        )
        self._is_weighted = is_weighted
        most = max(len(features) for features in features_of_rank)
        self._box = bound.max_ids * (2 + is_weighted) + most * bound.batch_size
        self._exchange: Any = None  # the exchange of headers for which `_boxes` were made
        self._boxes: Any = None

    @property
    def is_ready(self) -> bool:
        """True after the first batch, which must be exchanged without boxes."""
        return self._numbers.is_ready

    def run(self, local: LocalBatch) -> BoxedBatch:
        """Exchange the ids of a batch, on the current stream."""
        from weft.runtime.cuda.input_dist import header, pack, unpack

        boxes, numbers, world = self._made(), self._numbers, self._group.size()
        layout, mine = local.layout, numbers.words[self._group.rank()]
        own = torch.empty(HEAD + len(layout.keys) + 1, dtype=torch.int64, device=self._device)
        arrived = torch.empty(world * mine, dtype=torch.int64, device=self._device)
        with numbers.in_order():
            of_keys = len(layout.keys), local.batch_size
            send = header(local.lengths, local.offsets, *of_keys, local.values, layout.header_index, own, True)
            pack(local.values, local.lengths, local.weights, own, layout.pieces, local.batch_size, 0, boxes)
            numbers.run(send, arrived)
            features = self._features[self._group.rank()]
            stride, dtype = world * local.batch_size, local.values.dtype
            if features:
                sizes = world, len(features), self.bound.max_ids, len(features) * stride
                values, offsets, weights = unpack(arrived, arrived, *sizes, dtype, self._is_weighted, boxes)
            else:
                values, offsets = local.values[:0], offsets_of(local.lengths[:0])
                weights = None if local.weights is None else local.weights[:0]
        jagged = JaggedInput(features, values, offsets, weights, stride=stride)
        return BoxedBatch(jagged, (local.batch_size,) * world)

    def _made(self) -> Any:
        """Return the boxes. The first call allocates the boxes, so all ranks must make this call together."""
        exchange = self._numbers.known
        if self._exchange is not exchange:
            from weft.runtime.cuda.input_dist import Boxes

            refuse_capture(self._device)
            comm = exchange.comm
            words = 2 * comm.world_size * self._box
            with set_up_within(None):
                region = comm.allocate(4 * words, what="boxes for ids of embeddings")
            own = region.tensor(comm.rank, (words,), torch.int32)
            self._boxes = Boxes(own, exchange.addresses(region), exchange.state, exchange.record, self._box, comm.rank)
            self._exchange = exchange
        return self._boxes
