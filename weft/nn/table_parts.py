"""Modules whose tables are sharded into parts or data-parallel, and how to copy parts from whole tables."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist

from weft.arguments import check_tensor
from weft.embedding.options import EmbeddingOptions
from weft.embedding.partition import Partition, TablePart
from weft.embedding.tables import EmbeddingBagConfig
from weft.embedding.update import FusedUpdate
from weft.errors import DisagreementError
from weft.nn.embedding_table import weights_of
from weft.nn.making import on_all_ranks
from weft.nn.replicated_tables import ReplicatedTables, joint_update
from weft.nn.trained_tables import TrainedTables


class PartitionedTables(TrainedTables):
    """A module whose tables are sharded into parts, or data-parallel. The data-parallel tables are the last tables in
    the container.
    """

    partition: Partition
    device: torch.device
    _replicated: ReplicatedTables | None = None
    _update_of_parts: FusedUpdate | None

    def _make_updates(self, options: EmbeddingOptions) -> None:
        """Make `ReplicatedTables` if there are data-parallel tables, and the optimizer of all tables."""
        fuses = self.partition.fuses_replicated
        if self.partition.replicated is not None:
            self._replicated = ReplicatedTables(
                self.partition.replicated, self.group, options, self._optimizer if fuses else None, self._replicated_weights,
                self._factor if fuses else 1 / self.group.size(), self._sparse, self.deadline_s, self._name,
            )  # fmt: skip
        self._update = joint_update(self._update_of_parts, self._replicated)

    def _ready(self) -> None:
        super()._ready()
        self._require_gradients(True)

    def _mark_tables(self) -> None:
        TrainedTables._mark_tables(self)  # `_make_updates` has made the optimizer's states

    def _all_weights(self) -> list[torch.Tensor]:
        """Return the weights of this rank's parts, followed by the weights of the data-parallel tables."""
        return weights_of(self._table_modules().children())

    def _replicated_weights(self) -> list[torch.Tensor]:
        weights = self._all_weights()
        return weights[len(weights) - len(self.partition.replicated_tables) :]

    @property
    def _step(self) -> torch.Tensor | None:
        """The number of updates of the sharded tables, from which data-parallel tables continue."""
        return None if self._update_of_parts is None else self._update_of_parts.step

    def _require_gradients(self, requires_grad: bool) -> None:
        """Set `requires_grad` of data-parallel tables that the optimizer does not update."""
        if self._replicated is not None and not self.partition.fuses_replicated:
            for weight in self._replicated_weights():
                weight.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._require_gradients(requires_grad)
        return super().requires_grad_(requires_grad)

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[list[Any]]:
        if (replicated := self._replicated) is not None:
            if replicated.collected is not None:
                raise ValueError(
                    "accumulate() was called inside accumulate() of the same module: remove the inner call"
                )
            replicated.collected = []
        try:
            with self._collecting_parts() as collected:
                yield collected
        except BaseException:
            if replicated is not None:
                replicated.collected = None
            raise

    def _update_collected(self, collected: list[Any]) -> None:
        if self._replicated is not None:  # before the update of the parts, which counts updates
            self._replicated.end_accumulation(self._step)
        if self._update_of_parts is not None:
            self._update_collected_parts(collected)

    def _collecting_parts(self) -> AbstractContextManager[list[Any]]:
        """Return a context in which backward collects the gradients of this rank's parts, instead of updating the parts. The
        context's value is the list of collected gradients.
        """
        raise NotImplementedError

    def _update_collected_parts(self, collected: list[Any]) -> None:
        """Update the parts once, with the collected gradients. All ranks must make this call."""
        raise NotImplementedError

    def parts(self) -> list[tuple[TablePart, torch.Tensor]]:
        """Return this rank's parts and their weights, in the order of the submodules that hold them. The part of a
        data-parallel table is the whole table.
        """
        return list(zip(parts_of_rank(self.partition, self.rank), self._all_weights(), strict=True))

    def load_full_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's parts from whole tables, by table name. Values are converted to the tables' dtype.

        If the collection has data-parallel tables, all ranks must call this method with equal values for these tables.
        Otherwise ranks do not communicate.

        Raises `ValueError` for missing, unknown or misshapen tables, and `DisagreementError` on every rank if values of a
        data-parallel table differ between ranks, before anything is copied. With data-parallel tables, a rank that calls
        this method alone raises `DeadlineError`.
        """
        load_full(self.partition, self.parts(), weights, self.group, self.device, self.deadline_s)

    def _set_dtype(self, dtype: torch.dtype) -> None:
        """Store the dtype that a conversion such as `half()` gives the tables. Raise `ValueError` for an unsupported dtype."""
        if dtype != self.partition.tables[0].dtype:
            tables = tuple(replace(table, dtype=dtype) for table in self.partition.tables)
            self.partition = replace(self.partition, tables=tables)

    def _converted(self, device: torch.device) -> None:
        """Adapt the module to tables that a conversion, such as `cuda()`, has replaced. `device` is the tables' new device."""
        if device != self.device:
            self.device, self._fused_optimizer = device, None
        if self._replicated is not None and self.partition.replicated is not None:
            self._replicated.settle(self.partition.replicated)
        self._mark_tables()


def parts_of_rank(partition: Partition, rank: int) -> list[TablePart]:
    """Return the parts of sharded tables on `rank`, followed by the data-parallel tables as whole parts."""
    found = [part for part in partition.parts if part.rank == rank]
    for number in partition.replicated_tables:
        table = partition.tables[number]
        found.append(TablePart(number, rank, 0, table.num_embeddings, 0, table.embedding_dim))
    return found


def load_full(
    partition: Partition, parts: Sequence[tuple[TablePart, torch.Tensor]], weights: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup, device: torch.device, deadline_s: float | None,
) -> None:  # fmt: skip
    """Copy this rank's parts from whole tables. If the partition has data-parallel tables, all ranks must make this call,
    so that the copies of these tables cannot become different.

    Raise `ValueError` for missing, unknown or misshapen tables, and `DisagreementError` on every rank if ranks have
    different values for a data-parallel table, before anything is copied.

    parts: (part, its weight) for each part of this rank. weights: whole tables, by table name.
    """
    dtypes = {partition.tables[part.table].name: weight.dtype for part, weight in parts}
    replicated = sorted(partition.tables[number].name for number in partition.replicated_tables)

    def digests() -> dict[str, bytes]:
        check_full(partition.tables, dtypes, dist.get_rank(group), weights)
        return {name: _digest(weights[name].to(dtypes[name])) for name in replicated}

    if not replicated:
        digests()
    else:
        what, failure = "loading weights of data-parallel tables", "weights could not be loaded"
        first, *others = on_all_ranks(digests, what, failure, group, device, deadline_s)
        for other_rank, other in enumerate(others, 1):
            for name, digest in first.items():
                if other[name] != digest:
                    raise DisagreementError(
                        f"ranks 0 and {other_rank} load different values into data-parallel table {name!r}: pass the same "
                        "weights on all ranks"
                    )
    with torch.no_grad():
        for part, weight in parts:
            whole = weights[partition.tables[part.table].name]
            weight.copy_(whole[part.row : part.row + part.rows, part.column : part.column + part.columns])


def check_full(
    tables: Sequence[EmbeddingBagConfig], own: Iterable[str], rank: int, weights: Mapping[str, torch.Tensor]
) -> None:
    """Raise `ValueError` if `weights` has an unknown table, or lacks the whole table for a name in `own`.

    tables: all tables. own: the names of this rank's tables.
    """
    shapes = {table.name: [table.num_embeddings, table.embedding_dim] for table in tables}
    if unknown := [name for name in weights if name not in shapes]:
        raise ValueError(f"weights has {unknown[0]!r}, which is not a table: the tables are {', '.join(shapes)}")
    for name in own:
        if name not in weights:
            given = ", ".join(weights) or "no tables"
            raise ValueError(
                f"weights has {given}, but not table {name!r} of rank {rank}: pass all tables of this rank"
            )
        check_tensor(f"weights[{name!r}]", weights[name])
        if (shape := list(weights[name].shape)) != shapes[name]:
            raise ValueError(f"weights[{name!r}] has shape {shape}: pass the whole table, {shapes[name]}")


def _digest(values: torch.Tensor) -> bytes:
    """Return a hash of the bits of a tensor, by which ranks compare their copies. The CPU waits for the device."""
    return hashlib.blake2b(values.detach().cpu().contiguous().view(torch.uint8).numpy().data, digest_size=16).digest()
