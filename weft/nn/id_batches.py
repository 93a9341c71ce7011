"""The stages of a batch whose ids are distributed (`weft.nn.input_dist`): checked, headers sent, ids sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

HEAD = 3  # the first words of a header: refused (0 or 1), bits of an id, batch size. Counts follow


@dataclass(frozen=True)
class Layout:
    """The order in which ranks send features to each other, for inputs with the feature names `keys`.

    blocks: the index in `keys` of each feature to send, grouped by destination rank.
    header_index: how to make the headers for other ranks from this rank's own header. The own header has the number of
        ids of every feature. The header for a rank has only the numbers of the features that this rank needs. For each
        number in the headers for all ranks, one header after the other, `header_index` has the index of the same number
        in the own header.
    """

    keys: tuple[str, ...]
    blocks: tuple[int, ...]
    header_index: torch.Tensor
    pieces: Any  # `weft.runtime.cuda.input_dist.Pieces` if kernels write messages, else None


@dataclass(frozen=True)
class LocalBatch:
    """The input of this rank's samples, after the checks that need not wait for the device."""

    layout: Layout
    values: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    batch_size: int


class Route(NamedTuple):
    """The routing of one batch's ids: what this rank sent to each rank, and received from each rank. Gradients of
    per-sample weights take the reverse way.

    blocks: the features that this rank sent, in sending order, as indices into the input's keys.
    counts: the number of ids of each feature (key) of the input.
    begin: the index of the first id in the input's values.
    ids_out, ids_in: the number of ids sent to each rank, and received from each rank.
    heads: the header (batch size, numbers of ids) received from each rank.
    """

    blocks: tuple[int, ...]
    counts: list[int]
    begin: int
    ids_out: list[int]
    ids_in: list[int]
    heads: list[list[int]]

    @property
    def ids(self) -> list[int]:
        """The number of received ids for each (source rank, feature), as one list."""
        return [count for head in self.heads for count in head[HEAD:]]

    @property
    def order(self) -> list[int]:
        """The permutation that reorders received blocks of ids from [source rank][feature] to [feature][source rank]."""
        features = len(self.heads[0]) - HEAD
        return [source * features + feature for feature in range(features) for source in range(len(self.heads))]


class Exchange(NamedTuple):
    """All-to-alls that have begun: the tensors to receive into, and the work handles to wait for."""

    received: list[torch.Tensor]
    works: list[Any]

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class BegunBatch:
    """A batch whose headers (batch size, numbers of ids) are being exchanged.

    numbers: one tensor, which the CPU reads in one copy. First come the headers received from all ranks. Then comes
        this rank's own header, with the number of ids of every feature. The last number is `offsets[0]`: the index in
        `values` of this rank's first id, which may be above 0.
    """

    local: LocalBatch | None
    refusal: Exception | None
    numbers: torch.Tensor
    headers: Exchange


@dataclass(frozen=True)
class SentBatch:
    """A batch whose features this rank has sent, while the features from other ranks may not have arrived. numbers: the
    exchanged headers, as in `BegunBatch`.
    """

    local: LocalBatch
    numbers: torch.Tensor
    route: Route
    features: Exchange

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that `InputDist.arrive` reads."""
        return [*self.features.received, self.numbers]
