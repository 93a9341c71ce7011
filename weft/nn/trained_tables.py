"""The base class of modules with embedding tables that backward may update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn

from weft.embedding.optimizers import EmbeddingOptimizer
from weft.embedding.update import FusedUpdate
from weft.nn.fused_optimizer import FusedOptimizer
from weft.operator.together import together


class TrainedTables(nn.Module):
    """The base class of modules with embedding tables that backward may update."""

    _container: ClassVar[str]
    """The name of the submodule that contains the tables."""
    group: dist.ProcessGroup
    deadline_s: float | None
    _optimizer: EmbeddingOptimizer | None
    _update: FusedUpdate | None
    _fused_optimizer: FusedOptimizer | None
    _is_trained: bool
    _is_frozen: bool

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer of the tables as a `torch.optim.Optimizer` (`weft.nn.FusedOptimizer`), for schedulers and checkpoints.

        Raises `ValueError` without an `optimizer`.
        """
        if self._update is None:
            raise ValueError(
                "this module has no optimizer in backward: construct it with an optimizer, such as "
                "optimizer=weft.RowwiseAdagrad(lr=...)"
            )
        if self._fused_optimizer is None:
            tables: Any = getattr(self, self._container)
            updated = list(tables.items())[: len(self._update.states)]  # data-parallel tables with gradients come last
            self._fused_optimizer = FusedOptimizer(self._update, {name: table.weight for name, table in updated})
        return self._fused_optimizer

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Collect ids and gradients of every backward in this context, and update the tables once, at its end.

        Use this context to make one update from several micro-batches, or from several losses of one call. Scale the
        losses as you would to accumulate gradients for a torch optimizer. All ranks must enter the context. At its end,
        the CPU waits for the device, and CPU ranks compare the learning rate. After an error nothing is updated.
        Without an `optimizer` the context does nothing: gradients accumulate in `.grad`.

        Memory: the ids and the gradients of all backwards in the context. The update at its end needs as much again.
        """
        if self._update is None:
            yield
            return
        with self._collecting() as collected:
            yield
        with together(f"accumulate() of {type(self).__name__}", self.group, self._exchange_device, self.deadline_s):
            self._update_collected(collected)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Enable or disable training of the tables in backward. Return self.

        All ranks must make this call with the same value, even ranks without tables. With an `optimizer`, False freezes
        the tables, and True lets backward update them again. Call the method on this module itself. A parent's
        `requires_grad_` sets only the parameters' flags, and with an `optimizer` this module ignores these flags.
        """
        self._is_frozen = not requires_grad
        if self._optimizer is not None:
            return self
        self._is_trained = requires_grad
        return super().requires_grad_(requires_grad)

    def _collecting(self) -> AbstractContextManager[list[Any]]:
        """Return a context manager that yields a list. Inside the context manager, each backward appends the ids and gradients
        that it has received to this list.
        """
        raise NotImplementedError

    def _update_collected(self, collected: list[Any]) -> None:
        """Update the tables once, with the collected gradients. All ranks must make this call."""
        raise NotImplementedError

    def _exchange_device(self) -> torch.device:
        """Return the device on which ranks exchange tensors."""
        raise NotImplementedError
