"""The base class of modules with embedding tables that backward may update."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from weft.embedding.optimizers import EmbeddingOptimizer
from weft.embedding.update import FusedUpdate
from weft.nn.autocast import no_autocast
from weft.nn.embedding_table import Table
from weft.nn.fused_optimizer import FusedOptimizer
from weft.nn.making import rank_in
from weft.nn.table_marks import mark_table
from weft.operator.together import together


class TrainedTables(nn.Module):
    """The base class of modules with embedding tables that backward may update."""

    _container: ClassVar[str]
    """The name of the submodule that contains the tables."""
    _name: ClassVar[str]
    """The public name of the class, for error texts."""
    _of_one_module: ClassVar[dict[str, Any]] = {"_fused_optimizer": None}
    """Attributes that a copy does not share with the original, with their values in the copy."""

    def __init__(self, group: dist.ProcessGroup, optimizer: EmbeddingOptimizer | None, sparse: bool) -> None:
        super().__init__()
        self.rank, self.group = rank_in(group), group
        self.deadline_s: float | None = None
        self._optimizer, self._sparse, self._factor = optimizer, sparse, 1.0
        self._update: FusedUpdate | None = None
        self._fused_optimizer: FusedOptimizer | None = None
        self._is_trained = optimizer is None  # tables require gradients, on ranks without tables too
        self._is_frozen = False
        setattr(self, self._container, nn.ModuleDict())

    def _ready(self) -> None:
        """Finish the constructor, after the tables have been made."""
        for parameter in self.parameters():
            parameter.requires_grad_(self._is_trained)
        self._mark_tables()
        self.register_load_state_dict_post_hook(_mark_again)

    def _table_modules(self) -> nn.ModuleDict:
        return getattr(self, self._container)  # type: ignore[no-any-return]

    def _mark_tables(self) -> None:
        """Mark the tables so that `ignore_tables` and DDP find them."""
        for table in self._table_modules().children():
            mark_table(table.weight)

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
            tables: Any = self._table_modules().items()
            updated = list(tables)[: len(self._update.states)]  # data-parallel tables with gradients come last
            self._fused_optimizer = FusedOptimizer(self._update, {name: table.weight for name, table in updated})
        return self._fused_optimizer

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Collect ids and gradients of every backward in this context, and update the tables once, at its end.

        Use this context to make one update from several micro-batches, or from several losses of one call. Scale the
        losses as you would to accumulate gradients for a torch optimizer. All ranks must enter the context. At its end,
        the CPU waits for the device, and CPU ranks compare the learning rate. After an error nothing is updated.
        Without an `optimizer` the context does nothing: gradients accumulate in `.grad`.

        Memory: the ids and the gradients of all backwards in the context. The update at the end of the context needs as
            much memory again.
        """
        if self._update is None:
            yield
            return
        with self._collecting() as collected:
            yield
        ends = together(f"accumulate() of {self._name}", self.group, self._exchange_device, self.deadline_s)
        with ends, no_autocast(self._exchange_device()):
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

    def reset_parameters(self) -> None:
        """Fill this rank's tables with their initial values, for use after `to_empty`. Ranks do not communicate."""
        for table in self._table_modules().children():
            cast(Table, table).reset_parameters()

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = self.__new__(type(self))
        memo[id(self.group)] = self.group  # a process group cannot be copied
        # The copy makes a new optimizer object, which writes the learning rate to the copied states.
        own = {name: value for name, value in self.__dict__.items() if name not in self._of_one_module}
        copied.__dict__.update(copy.deepcopy(own, memo), **self._of_one_module)
        copied._mark_tables()
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {self._name} cannot be pickled: it belongs to a process group, and rank {self.rank} of "
            f"{self.group.size()} has a part of the tables. Save module.state_dict() on every rank, make a "
            f"new module with the same arguments where it is needed, and load_state_dict() there"
        )


def _mark_again(module: Any, incompatible_keys: Any) -> None:
    """Mark the tables' parameters so that DDP ignores them. torch calls this hook after `load_state_dict`, because
    `assign=True` replaces the parameters.
    """
    module._mark_tables()
