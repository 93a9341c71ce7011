"""TorchRec's `EmbeddingCollection` with sharded tables.

    ids of this rank's samples -> owners of the rows -> rows of this rank's samples    (`weft.nn.row_dist`)
    gradients of rows -> owners, which reduce them by row and update the tables        (`weft.runtime.embedding_rows`)

A call returns a row for each id, without pooling.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from weft import symm
from weft.arguments import checked_deadline
from weft.embedding.check import CheckedInput, no_tables_on
from weft.embedding.forward_call import ForwardCall, Tables
from weft.embedding.jagged import JaggedTensor
from weft.embedding.optimizers import EmbeddingOptimizer
from weft.embedding.options import BoundsCheck, EmbeddingOptions
from weft.embedding.partition import Partition, TablePart, TableSharding, partition_tables
from weft.embedding.placement import place_tables
from weft.embedding.plan import EmbeddingPlan
from weft.embedding.tables import EmbeddingBagConfig, listed_tables
from weft.embedding.training import check_module_options
from weft.embedding.update import FusedUpdate
from weft.errors import BackwardError
from weft.nn.autocast import no_autocast
from weft.nn.embedding_memory import BatchesInFlight, EmbeddingMemory, memory_of, rows_workspace
from weft.nn.embedding_table import Table, filler_of
from weft.nn.id_bound import checked_max_ids
from weft.nn.making import agree_on_parts, check_table_names, device_for, fill_together
from weft.nn.replicated_tables import require_sharded_norm, rows_or_zero
from weft.nn.row_dist import RowDist, RowRoute
from weft.nn.row_ids import RowIds
from weft.nn.table_parts import PartitionedTables, parts_of_rank
from weft.nn.trained_tables import TrainedTables
from weft.operator.derivatives import once
from weft.operator.together import together
from weft.runtime.embedding_backward import compare_ranks, refuse_nonfinite
from weft.runtime.embedding_rows import RowGradients, gradient_of_table, update_rows
from weft.runtime.meeting import in_backward, published_on
from weft.runtime.opaque import opaque
from weft.symm import Communicator
from weft.words import counted

NAME = "ShardedEmbeddingCollection"


class ShardedEmbeddingCollection(PartitionedTables):
    """Embedding tables that are sharded over `group`. On each rank, a call returns a row for each id of that rank's
    samples.

    All ranks must construct the module with equal arguments, make every call, and run every backward. A call sends ids
    to the owners of their rows, and returns the rows. Backward sends the gradient of each returned row to the owner of
    the row. The owner sums all gradients of a row in a fixed order, in float32. So equal inputs give equal bits. With
    an `optimizer`, backward updates the tables. Set the learning rate in `fused_optimizer.param_groups[0]["lr"]`.

    The parameters are `embeddings.<table>.weight`. For a part of a table, <table> is a name such as "table[rows,
    columns]". A rank has only its own parts. Initial values depend only on the first rank's default generator and on
    the table, not on the placement.

    tables: `weft.EmbeddingBagConfig` (its pooling is ignored) or TorchRec's `EmbeddingConfig`, all with the same
        `embedding_dim` and dtype.
    group: a process group that contains this rank.
    device: the device of this rank's tables and features (default: the current GPU for an NCCL group, otherwise the
        CPU).
    placement: the rank of each table, or a `weft.embedding.TableWise`, `RowWise`, `ColumnWise` or `DataParallel`, by
        name or in table order. Default: whole tables, balanced by `rows_read` (`weft.place_tables`). If tables are
        sharded by columns, all parts of the collection must have the same number of columns.
    optimizer, sparse, gradients: as for `ShardedEmbeddingBagCollection`.
    dedup: True to send each distinct id of a rank once, and one summed gradient for it. This is faster if ids repeat
        often. Sums of gradients are rounded to the tables' dtype before they are sent.
    max_ids: the largest number of ids that a rank may receive in a call (default: no limit). An id that reads several
        parts of a column-wise table counts several times. If any rank would receive more, every rank raises
        `RefusedError` with the numbers of all ranks, before ids are sent.
    hash: True to map any 64-bit id to a row of its whole table (`weft.embedding.hash_ids`).
    bounds_check: how ids out of range are treated. "warning" reads them as zero rows, and warns. "fatal" refuses the
        call on every rank. "ignore" and "none" read them as zero rows, without a warning.
    deadline_s: the longest wait for a peer, in seconds. The default is WEFT_DEADLINE_S on CPU, and the process group's
        timeout on GPUs. On GPUs of one host this deadline applies to the exchange of the numbers of ids, from the second
        batch on. Ids, rows and gradients are sent by NCCL, for which the group's timeout applies.

    Memory: a call needs its ids, and the rows that this rank sends and receives. Backward needs the same for gradients.
    """

    _container, _name = "embeddings", NAME
    embeddings: nn.ModuleDict
    _expands: ClassVar[bool] = True
    """True if `_looked_up` returns a row for each id, False if it returns a row for each id that was sent."""
    _said: Mapping[str, Any] = types.MappingProxyType({})
    """Further options of a subclass that ranks compare."""

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        group: dist.ProcessGroup,
        device: torch.device | str | None = None,
        placement: Mapping[str, int | TableSharding] | Sequence[int | TableSharding] | None = None,
        rows_read: Sequence[float] | Mapping[str, float] | None = None,
        optimizer: EmbeddingOptimizer | None = None,
        sparse: bool = False,
        gradients: Literal["mean", "sum"] = "mean",
        dedup: bool = False,
        max_ids: int | None = None,
        hash: bool = False,
        bounds_check: BoundsCheck = "warning",
        deadline_s: float | None = None,
    ) -> None:
        TrainedTables.__init__(self, group, optimizer, sparse)
        self._bounds_check = bounds_check
        self._collected: list[_Received] | None = None
        self._dist: RowDist | None = None
        self._update_of_parts: FusedUpdate | None = None
        partition, refusal = None, None
        try:
            self.deadline_s = checked_deadline(deadline_s)
            check_module_options(optimizer, sparse, gradients, dedup=dedup)
            EmbeddingOptions(bounds_check=bounds_check, hash=hash)
            max_ids = checked_max_ids(max_ids)
            device = device_for(group, device)
            configs = [config_of(table) for table in listed_tables(tables)]
            if placement is None:
                placement = list(place_tables(configs, group.size(), rows_read=rows_read).rank_of_table)
            partition = partition_tables(configs, group.size(), placement=placement, rows_read=rows_read, hash=hash)
            self._check(partition)
        except Exception as error:  # peers wait for this rank, so it must not raise alone
            refusal = error
        said: dict[str, Any] = {"optimizer": repr(optimizer), "sparse": sparse, "gradients": gradients, "hash": hash}
        said |= {"dedup": dedup, "max_ids": max_ids, "bounds_check": bounds_check, **self._said}
        seed = agree_on_parts(group, device, partition, said, refusal, self.deadline_s, self._name)
        self.partition, self.device = cast(Partition, partition), cast(torch.device, device)
        self._factor = 1 / group.size() if gradients == "mean" else 1.0
        self._keys = [slot.key for slot in self.partition.slots]
        self._own = [part for part in self.partition.parts if part.rank == self.rank]
        fill_together(lambda: self._make_tables(seed), group, self.device, self.deadline_s)
        self._batches, self._exchanged = BatchesInFlight(), (0, 0)
        if (sharding := self.partition.sharding) is not None:
            self._of_said = EmbeddingPlan(sharding, EmbeddingOptions(hash=hash))
            self._dist = RowDist(self.partition, group, dedup, max_ids, self.deadline_s, said)
            if optimizer is not None:
                weights = self._weights()
                self._update_of_parts = FusedUpdate(optimizer, weights, factor=self._factor, device=self.device)
        self._make_updates(EmbeddingOptions(hash=hash))
        self._ready()

    def _check(self, partition: Partition) -> None:
        """Raise `ValueError` for tables or shardings that this class does not support."""
        check_table_names(partition.tables)
        first = partition.tables[0]
        for table in partition.tables:
            if table.embedding_dim != first.embedding_dim:
                raise ValueError(
                    f"table {table.name!r} has {table.embedding_dim} columns, but table {first.name!r} has "
                    f"{first.embedding_dim}: the tables of a collection must have the same embedding_dim. Make a "
                    "collection for each dimension"
                )
        require_sharded_norm(partition, self._optimizer)
        if len(widths := {part.columns for part in partition.parts}) > 1:
            raise ValueError(
                f"parts have {' and '.join(map(str, sorted(widths)))} columns, but all parts of a {self._name} must have the "
                "same number of columns: divide the tables into parts of one width, or make a collection for each number of columns"
            )

    def _make_tables(self, seed: int) -> None:
        for part in parts_of_rank(self.partition, self.rank):
            table = self.partition.tables[part.table]
            config = replace(
                table, num_embeddings=part.rows, embedding_dim=part.columns, name=part.name_in(table), weight_init_min=None,
                weight_init_max=None, init_fn=filler_of(table, seed + part.table, part.row, part.column),
            )  # fmt: skip
            self._table_modules()._modules[config.name] = Table(config, self.device, seed)

    def _weights(self) -> list[torch.Tensor]:
        return self._all_weights()[: len(self._own)]

    # --- calls ---

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Return the rows of all ids, [number of ids, embedding_dim] for each feature. All ranks must make this call.

        features: a KeyedJaggedTensor, weft's or TorchRec's, of this rank's samples. Keys without a table are ignored.

        Returns a dict of JaggedTensors. A key is the feature's name, or "feature@table" if several tables use the
        feature.

        Raises `RefusedError` on every rank for bad input on any rank.
        """
        return self._called(features)

    @opaque
    def _called(self, features: Any) -> dict[str, JaggedTensor]:
        with together(self._name, self.group, lambda: self.device, self.deadline_s), no_autocast(self.device):
            ids, trains = self._ids(features)
            rows, of_replicated = self._rows(ids, trains), None
            if self._replicated is not None:
                rows, of_replicated = self._replicated.looked_up(ids.of_replicated, rows, trains, self._step)
            blocks = ids.split(rows, of_replicated)
            bags = zip(self._keys, blocks, ids.offsets, ids.weights, strict=True)
            return {key: JaggedTensor(values, offsets, weights) for key, values, offsets, weights in bags}

    def _ids(self, features: Any) -> tuple[RowIds, bool]:
        """Begin a call. Return its ids, and True if backward must compute gradients or update tables."""
        trains = torch.is_grad_enabled() and not (self._is_frozen and self._optimizer is not None)
        if self._replicated is not None:
            self._replicated.count(trains)
        if self.device.type == "meta":
            raise ValueError(no_tables_on(self.device))
        return RowIds(self.partition, self._dist, self.device, self._bounds_check, features), trains

    def _rows(self, ids: RowIds, trains: bool) -> torch.Tensor | None:
        """Return the rows of the ids of sharded tables; None if all tables are data-parallel. All ranks must make this call.

        trains: True if backward must compute gradients or update tables.
        """
        if self._dist is None:
            self._warn(int(ids.bad.sum()), ids)
            return None
        if not trains:
            return self._looked_up(ids)[0]
        anchor = torch.empty(0, device=self.device, requires_grad=bool(self._update_of_parts or self._is_trained))
        weights = self._weights()
        inputs = weights if self._update_of_parts is None else [weight.detach() for weight in weights]
        return _Rows.apply(self, ids, anchor, *inputs)  # type: ignore[no-any-return, no-untyped-call]

    def _looked_up(self, ids: RowIds) -> tuple[torch.Tensor, RowRoute, list[torch.Tensor]]:
        """Send this rank's ids to the owners of their rows, and receive the rows. Return three values: the rows of this
        rank's ids (without `_expands`, of the sent ids), the routing of the ids, and the row numbers that ranks requested
        from each part of this rank. All ranks must make this call.
        """
        distribution = cast(RowDist, self._dist)
        route, arrived, (bad,) = distribution.send(ids.places, ids.rows, [ids.bad.sum()])
        self._warn(bad, ids)
        rows = [rows_or_zero(weight, asked) for asked, weight in zip(arrived, self._weights(), strict=True)]
        if not rows:
            rows = [torch.empty(0, self.partition.parts[0].columns, dtype=self._dtype, device=self.device)]
            route = route if self._own else replace(route, counts=[0] * self.group.size())
        ids.route, found = route, distribution.back(rows, route)
        if self._expands:  # the pieces of an id's row are adjacent
            found = route.of_ids(found).view(-1, self.partition.tables[0].embedding_dim)
        return found, route, arrived

    def _warn(self, bad: int, ids: RowIds) -> None:
        if bad and self._bounds_check == "warning":
            warnings.warn(
                f"{counted(bad, 'id')} out of range on rank {self.rank}, read as zero rows: {ids.first_bad()}",
                stacklevel=3,
            )

    @property
    def _dtype(self) -> torch.dtype:
        return self.partition.tables[0].dtype

    def _record(self) -> ForwardCall:
        """Return the record of a forward call for backward: the tables and states to update, and a description of the
        call. Ranks compare the descriptions before they exchange gradients.
        """
        tables, update = None, self._update_of_parts
        if update is not None:
            states = [list(of_table.values()) for of_table in update.states]
            tables = Tables(update.optimizer, self._weights(), states, update.learning_rate, update.step)
        return ForwardCall(self._of_said, self.rank, CheckedInput((), (), 0), tables, self._factor, self._sparse)

    @property
    def _compared_on(self) -> Communicator | None:
        """The communicator on which CPU ranks compare their backward calls; None on GPUs and for one rank, where
        nothing is compared.
        """
        is_compared = self.device.type == "cpu" and self.group.size() > 1
        return symm.communicator(self.group, self.device) if is_compared else None

    def _compare(self, of: ForwardCall, what: str) -> None:
        if (comm := self._compared_on) is not None:
            tables = counted(len(self.partition.tables), "table")
            compare_ranks(comm, f"{what} of {self._name} of {tables}", of, self.deadline_s)

    def _finish(self, of: ForwardCall, received: Sequence[_Received]) -> None:
        """Update the tables once, with the received gradients.

        of: the result of `_record`.
        received: the ids and gradients that arrived in one backward, or in all backwards of `accumulate()`.
        """
        tables = of.tables
        assert tables is not None
        given = []
        for place, (part, weight) in enumerate(zip(self._own, tables.weights, strict=True)):
            config = self._config_of(part)
            if (weight.dtype, tuple(weight.shape)) != (config.dtype, (config.num_embeddings, config.embedding_dim)):
                raise ValueError(
                    f"backward of {self._name}: table {config.name!r} has become {weight.dtype} {list(weight.shape)} "
                    "since forward: convert the table before forward"
                )
            ids = torch.cat([one.ids[place] for one in received])
            number = self.partition.parts.index(part)
            given.append(RowGradients(config, number, ids, torch.cat([one.grads[place] for one in received])))
        tables.step.add_(1)
        with torch.no_grad():
            update_rows(given, tables, self._factor, self.group, self.deadline_s)

    def _config_of(self, part: TablePart) -> EmbeddingBagConfig:
        table = self.partition.tables[part.table]
        name = part.name_in(table)
        return replace(table, num_embeddings=part.rows, embedding_dim=part.columns, name=name, init_fn=None)

    @contextlib.contextmanager
    def _collecting_parts(self) -> Iterator[list[Any]]:
        if self._collected is not None:
            raise ValueError("accumulate() was called inside accumulate() of the same module: remove the inner call")
        self._collected = collected = list[Any]()
        try:
            yield collected
        finally:
            self._collected = None

    def _update_collected_parts(self, collected: list[Any]) -> None:
        of = self._record()
        self._compare(of, "the end of accumulate()")
        if collected:
            self._finish(of, collected)

    def _exchange_device(self) -> torch.device:
        return self.device

    # --- parameters and conversions ---

    def memory(self) -> EmbeddingMemory:
        """Return the memory of this module on this rank, in bytes. `print` shows the result as text, with a line for
        each part of a table. Ranks do not communicate.

        `buffers` is 0, because ranks exchange rows in ordinary memory. `ShardedEmbeddingBagCollection(dedup=True)` on GPUs
        counts the memory from which it pools the distinct rows. `workspace` does not include the gradients of
        data-parallel tables.
        """
        weights = dict(zip(self._table_modules(), self._all_weights(), strict=True))
        in_flight = self._batches.nbytes
        in_flight += sum(one.nbytes for one in self._collected or ())
        in_flight += 0 if self._replicated is None else self._replicated.bytes_in_flight
        columns = self.partition.parts[0].columns if self.partition.parts else 0
        workspace = rows_workspace(*self._exchanged, columns, self._dtype, self.device)
        return memory_of(weights, self._update, in_flight, self._buffer_bytes(), workspace)

    def _buffer_bytes(self) -> Sequence[int]:
        return ()

    def _note(self, route: RowRoute, arrived: Sequence[torch.Tensor]) -> None:
        """Record the ids of a call with gradients, for `memory`."""
        self._batches.keep([*arrived, route.to_sent, route.order])
        self._exchanged = sum(route.out), sum(route.into)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        after = fn(torch.empty(0, 1, dtype=self._dtype, device=self.device))
        if recurse:
            if after.device != self.device and self.device.type != "meta":
                raise ValueError(
                    f"the tables are on {self.device} and cannot move to {after.device}: construct "
                    f"the module with device={after.device}"
                )
            self._set_dtype(after.dtype)
        nn.Module._apply(self, fn, recurse)
        if self._update_of_parts is not None and self._update_of_parts.step.device != after.device:
            self._update_of_parts.move(after.device)
        self._converted(after.device)
        return self

    def embedding_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of all tables on all ranks."""
        return list(self.partition.tables)

    def extra_repr(self) -> str:
        return f"rank {self.rank} of {self.group.size()} on {self.device}\n{self.partition.describe()}"


class _Received:
    """The ids and gradients that arrived in one backward, for each part of a table on this rank."""

    def __init__(self, ids: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        self.ids, self.grads = ids, grads

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in [*self.ids, *self.grads])


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        module: ShardedEmbeddingCollection,
        ids: RowIds,
        anchor: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        rows, ctx.route, ctx.arrived = module._looked_up(ids)
        module._note(ctx.route, ctx.arrived)
        # The number of rendezvous is equal on all ranks, even if some ranks have called the module without gradients.
        ctx.module, ctx.number, ctx.is_done = module, published_on(module.group), False
        ctx.finite_bags = ids.finite_bags
        return rows

    @staticmethod
    @once(NAME, lambda ctx: ctx.module.group)
    def backward(ctx: Any, saved: Sequence[Any], grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        module: ShardedEmbeddingCollection = ctx.module
        found: list[Any] = [None] * len(module._own)
        of_backward = together(f"backward of {module._name}", module.group, grad, module.deadline_s)
        with of_backward, in_backward(module._compared_on, ctx.number), no_autocast(grad.device):
            if ctx.is_done:
                raise BackwardError(
                    f"second backward of the same call of {module._name}: the first backward has already updated the "
                    "tables. Sum the losses and call backward once, or call the module again"
                )
            of = module._record()
            module._compare(of, "backward" if module._collected is None else "backward in accumulate()")
            if of.tables is not None and of.tables.optimizer.nonfinite == "raise":
                finite = torch.stack([grad.isfinite().all(), *ctx.finite_bags])
                bad = [] if bool(finite.all()) else [f"rows for rank {module.rank}"]
                refuse_nonfinite(bad, module.group, grad.device, module.deadline_s)
            columns = module.partition.parts[0].columns
            grad = grad.reshape(-1, columns)
            of_sent = ctx.route.of_sent(grad) if module._expands else grad
            grads = cast(RowDist, module._dist).to_owners(of_sent, ctx.route)
            if of.tables is None:
                own = zip(module._own, ctx.arrived, grads, strict=True)
                for place, (part, ids, of_part) in enumerate(own):
                    given = RowGradients(module._config_of(part), 0, ids, of_part)
                    found[place] = gradient_of_table(given, module._factor, module._sparse)
            elif module._collected is not None:
                ctx.is_done = True
                module._collected.append(_Received(ctx.arrived, grads))
            else:
                ctx.is_done = True
                module._finish(of, [_Received(ctx.arrived, grads)])
        return None, None, None, *found


def config_of(table: Any) -> EmbeddingBagConfig:
    """Convert `table` to an `EmbeddingBagConfig`. TorchRec's `EmbeddingConfig` has no pooling: the result has "sum",
    which is ignored.
    """
    if isinstance(table, EmbeddingBagConfig) or hasattr(table, "pooling"):
        return EmbeddingBagConfig.of(table)
    if not hasattr(table, "__dict__"):
        raise TypeError(f"{table!r} is not a table config: pass weft.EmbeddingBagConfig or TorchRec's EmbeddingConfig")
    return EmbeddingBagConfig.of(types.SimpleNamespace(**vars(table), pooling="sum"))
