"""What backward of embedding_all_to_all needs of a forward call, besides the tensors that autograd saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from weft.embedding.check import CheckedInput
from weft.embedding.optimizers import EmbeddingOptimizer
from weft.embedding.plan import EmbeddingPlan
from weft.errors import WeftError


class Tables(NamedTuple):
    """The memory of an update: this rank's tables and their states, the learning rate, and the number of updates so far.

    states: for each table, in the order of `EmbeddingOptimizer.states`.
    """

    optimizer: EmbeddingOptimizer
    weights: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    learning_rate: torch.Tensor
    step: torch.Tensor


@dataclass
class ForwardCall:
    """The parts of a forward call that backward needs, besides the tensors that autograd saves.

    number: of this call among the differentiated calls of the group; 0 in a compiled program. tables: None without an
    optimizer; then gradients are returned, as sparse COO tensors if `sparse`. factor: times every reduced gradient.
    """

    plan: EmbeddingPlan
    rank: int
    checked: CheckedInput
    number: int
    tables: Tables | None
    factor: float
    sparse: bool
    is_updated: bool = field(default=False)

    def require_first(self) -> None:
        """Raise `WeftError` if backward of this call has updated tables before."""
        if self.is_updated:
            raise WeftError(
                "backward through embedding_all_to_all a second time: its optimizer has updated the tables in the first backward. "
                "Sum the losses and call backward once, or make the call again; without an optimizer gradients accumulate in .grad"
            )

    @property
    def said(self) -> str:
        """The text that ranks compare before the exchange, apart from the number."""
        if self.tables is None:
            update = f"{'sparse' if self.sparse else 'dense'} gradients"
        else:
            learning_rate = float(self.tables.learning_rate)
            update = (
                f"{self.tables.optimizer.written}, learning rate {learning_rate!r}, update {int(self.tables.step) + 1}"
            )
        return f"{update}, factor {self.factor!r}, batch_sizes {self.checked.batch_sizes}"
