"""The optimizer, the learning rate and the states with which backward updates a rank's tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from weft.embedding.optimizers import EmbeddingOptimizer, state_shape
from weft.words import kind


class FusedUpdate:
    """An optimizer with its states for the tables of one rank. Pass it as `update` to `weft.embedding_all_to_all`.

    Backward of a call updates the tables and the states in place. `learning_rate` is a tensor on the tables' device,
    which the update reads when it runs, even in a CUDA graph.

    optimizer: `weft.SGD`, `weft.RowwiseAdagrad`, `weft.Adagrad`, `weft.Adam` or `weft.PartialRowwiseAdam`.
    weights: the tables, [num_embeddings, embedding_dim] each, on one device. They need not require gradients.
    factor: the number by which the sum of gradients over ranks is multiplied. For the mean over ranks, pass 1 / world
        size.
    deterministic: False allows updates whose bits differ from run to run, which are faster for some inputs. `weft.SGD` on
        GPUs then adds the gradient of each id to its row with atomics, without sorting ids. This needs fp32 tables, and no
        weight decay, clipping or nonfinite="skip". In all other cases, and on CPU, False means the same as True.

    Memory: the optimizer's states, in float32.

    Raises `TypeError` for another optimizer, a single tensor, or a `deterministic` that is not a bool, and `ValueError`
    for a factor that is not finite.
    """

    def __init__(
        self,
        optimizer: EmbeddingOptimizer,
        weights: Sequence[torch.Tensor],
        *,
        factor: float = 1.0,
        deterministic: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        """Create the optimizer's states for the tables `weights`. See the class for the arguments.

        device: the device of the states, for a rank without tables.
        """
        if not isinstance(optimizer, EmbeddingOptimizer):
            raise TypeError(f"optimizer is {kind(optimizer)}: pass weft.SGD(lr=...), weft.RowwiseAdagrad(lr=...), ...")
        if isinstance(weights, torch.Tensor):
            raise TypeError("weights is a tensor: pass a list with this rank's tables")
        if not isinstance(deterministic, bool):
            raise TypeError(f"deterministic={deterministic!r} must be True or False")
        self.optimizer, self.factor, self.deterministic = optimizer, float(factor), deterministic
        if not math.isfinite(self.factor):
            raise ValueError(f"factor={factor} must be a finite number, such as 1 / world size")
        device = weights[0].device if len(weights) else torch.device("cpu" if device is None else device)
        self._shapes = [weight.shape for weight in weights]
        self._written_lr = optimizer.lr  # for tables on meta, whose tensors have no values
        self.learning_rate = torch.tensor(optimizer.lr, dtype=torch.float32, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        """The number of updates so far."""
        self.states: list[dict[str, torch.Tensor]] = [
            {
                name: torch.zeros(state_shape(weight.shape, shape), dtype=torch.float32, device=weight.device)
                for name, shape in optimizer.states.items()
            }
            for weight in weights
        ]
        """The states of each table, by name."""
        self._flat: tuple[Any, list[torch.Tensor]] = None, []  # `states`, and all of them in a list

    @property
    def lr(self) -> float:
        """The learning rate. Reading it waits for the device."""
        return self._written_lr if self.learning_rate.is_meta else float(self.learning_rate)

    @lr.setter
    def lr(self, value: float) -> None:
        self._written_lr = value
        self.learning_rate.fill_(value)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All optimizer states, table by table. The list is shared: do not change it."""
        states = self.states
        if self._flat[0] is not states:  # each call with gradients reads the list
            self._flat = states, [state for of_table in states for state in of_table.values()]
        return self._flat[1]

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(state.nbytes for state in self.tensors)

    def require_tables(self, weights: Sequence[torch.Tensor]) -> None:
        """Raise `ValueError` unless the optimizer states fit the tables `weights`: their shapes and their device."""
        shapes = [getattr(weight, "shape", None) for weight in weights]
        if shapes != self._shapes:
            made, given = ([tuple(shape or ()) for shape in of] for of in (self._shapes, shapes))
            raise ValueError(
                f"update was created for tables of shapes {made}, but weights have shapes {given}: pass the same tables"
            )
        if shapes and weights[0].device != self.step.device:
            raise ValueError(
                f"the optimizer states of update are on {self.step.device}, but weights are on "
                f"{weights[0].device}: create the update again"
            )

    def move(self, device: torch.device) -> None:
        """Move learning rate, step and states to `device`. Tensors that were on the meta device are initialised."""

        def moved(tensor: torch.Tensor, first: float) -> torch.Tensor:
            return torch.full_like(tensor, first, device=device) if tensor.is_meta else tensor.to(device)

        self.learning_rate, self.step = moved(self.learning_rate, self._written_lr), moved(self.step, 0)
        self.states = [{name: moved(state, 0) for name, state in states.items()} for states in self.states]
