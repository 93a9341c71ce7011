"""`ShardedEmbeddingBagCollection` with column-wise, row-wise or data-parallel tables.

    PartitionedInput   splits the input: features for parts of tables, and features for data-parallel tables
    parts              an inner ShardedEmbeddingBagCollection, whose tables are the parts, pools them
    data-parallel      each rank pools its own samples
    output             columns of column-wise parts are concatenated; vectors of row-wise parts are summed in float32,
                       in the order of rows

The inner collection does all communication, except for the all-reduce of data-parallel gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, cast

import torch
import torch.distributed as dist

from weft.arguments import checked_deadline
from weft.embedding.check import CheckedInput, no_tables_on
from weft.embedding.jagged import KeyedTensor
from weft.embedding.optimizers import EmbeddingOptimizer
from weft.embedding.options import EmbeddingOptions
from weft.embedding.partition import Partition, RowWise, TablePart, partition_tables
from weft.embedding.tables import EmbeddingBagConfig, EmbeddingSharding
from weft.embedding.training import check_module_options
from weft.embedding.update import FusedUpdate
from weft.nn.autocast import no_autocast
from weft.nn.embedding import ShardedEmbeddingBagCollection
from weft.nn.embedding_memory import EmbeddingMemory, collected_bytes, memory_of, pooled_workspace
from weft.nn.embedding_table import Table, filler_of
from weft.nn.making import agree_on_parts, check_table_names, checked_input_options, device_for, fill_together
from weft.nn.partitioned_input import Arranged, PartitionedInput
from weft.nn.replicated_tables import require_sharded_norm
from weft.nn.table_parts import PartitionedTables
from weft.nn.trained_tables import TrainedTables
from weft.operator.together import together
from weft.ops.embedding_all_to_all import plan_in
from weft.ops.embedding_release import buffer_bytes
from weft.runtime.opaque import opaque


class PartitionedEmbeddingBagCollection(PartitionedTables, ShardedEmbeddingBagCollection):
    """A `ShardedEmbeddingBagCollection` in which at least one table is column-wise, row-wise or data-parallel.

    Do not construct it: the constructor of `ShardedEmbeddingBagCollection` returns it if `placement` contains a
    `TableSharding`.
    """

    def __init__(
        self, tables: Sequence[Any], *, group: dist.ProcessGroup, placement: Any, device: torch.device | str | None = None,
        rows_read: Sequence[float] | Mapping[str, float] | None = None,
        input: Literal["local_batch", "global_batch"] = "local_batch", is_weighted: bool = False,
        optimizer: EmbeddingOptimizer | None = None, sparse: bool = False, gradients: Literal["mean", "sum"] = "mean",
        deterministic: bool = True, hash: bool = False, dedup: bool = False, max_ids: int | None = None,
        deadline_s: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        TrainedTables.__init__(self, group, optimizer, sparse)
        self.input, self._is_weighted = input, is_weighted
        self._prefetched: Any = None
        partition, refusal = None, None
        try:
            self.deadline_s = checked_deadline(deadline_s)
            max_ids, _ = checked_input_options(input, is_weighted, max_ids)
            if options.pop("batch_size", None) is not None:
                raise ValueError(
                    "batch_size supports only whole tables: do not pass it, or place each table on one rank by its number"
                )
            check_module_options(optimizer, sparse, gradients, deterministic, dedup)
            device = device_for(group, device)
            partition = partition_tables(
                tables, group.size(), placement=placement, rows_read=rows_read, hash=hash is True
            )
            self._check(partition)
            self._options = EmbeddingOptions(hash=hash, **options)
            if self._options.output_dtype != "table":
                raise ValueError(
                    f"output_dtype={self._options.output_dtype!r} supports only whole tables, because vectors of parts and of "
                    "data-parallel tables keep the tables' dtype: do not pass it, or place each table on one rank"
                )
        except Exception as error:  # peers wait for this rank, so it must not raise alone
            refusal = error
        said: dict[str, Any] = {
            "input": input,
            "is_weighted": is_weighted,
            "optimizer": repr(optimizer),
            "sparse": sparse,
        }
        said |= {
            "gradients": gradients,
            "hash": hash,
            "max_ids": max_ids,
            "deterministic": deterministic,
            "dedup": dedup,
        }
        if refusal is None:
            said |= asdict(self._options)  # also the options that this rank has left out
        seed = agree_on_parts(group, device, partition, said, refusal, self.deadline_s, self._name)
        self.partition, self._seed = cast(Partition, partition), seed
        self._factor = 1 / group.size() if gradients == "mean" else 1.0
        self.device = cast(torch.device, device)
        self._make(gradients, {**options, "max_ids": max_ids, "deterministic": deterministic})
        self._ready()

    def _check(self, partition: Partition) -> None:
        """Raise `ValueError` for options that the shardings do not support."""
        check_table_names(partition.tables)
        local = partition.replicated_tables or [
            number for number, sharding in enumerate(partition.shardings) if isinstance(sharding, RowWise)
        ]
        if self.input == "global_batch" and local:
            raise ValueError(
                f"table {partition.tables[local[0]].name!r} is {partition.shardings[local[0]]}, which "
                "input='global_batch' does not support, because each rank needs the ids of its own samples: "
                "pass input='local_batch'"
            )
        require_sharded_norm(partition, self._optimizer)

    def _make(self, gradients: Any, options: dict[str, Any]) -> None:
        """Make the data-parallel tables, and the inner collection whose tables are the parts. All ranks must make this call."""
        partition, options = self.partition, {"hash": self._options.hash, **options}
        self._arrange = PartitionedInput(partition, self._is_weighted, self._options.refuses_bad_ids)
        self.sharding = cast(EmbeddingSharding, partition.sharding or partition.replicated)
        parts: ShardedEmbeddingBagCollection | None = None
        if (sharding := partition.sharding) is not None:
            configs = [
                replace(config, weight_init_min=None, weight_init_max=None, init_fn=self._filler(part))
                for part, config in zip(partition.parts, sharding.tables, strict=True)
            ]
            with torch.random.fork_rng(devices=[]):  # the outer collection has already drawn the seed
                parts = ShardedEmbeddingBagCollection(
                    configs, group=self.group, device=self.device, placement=list(sharding.rank_of_table),
                    rows_read=sharding.rows_read, input=cast(Any, self.input), is_weighted=self._is_weighted,
                    optimizer=self._optimizer, sparse=self._sparse, gradients=gradients, deadline_s=self.deadline_s,
                    **options | {"hash": self._options.hash and not partition.hashes_input},
                )  # fmt: skip
            self.embedding_bags._modules.update(parts.embedding_bags._modules)
        # Stored without registering a submodule, since its tables would then have two names.
        self.__dict__["_parts"] = parts
        if partition.replicated is not None:
            fill_together(self._make_replicated, self.group, self.device, self.deadline_s)
        self._make_updates(self._options)

    def _filler(self, part: TablePart) -> Any:
        """Return a function that fills `part` with the values of the same elements in the whole table."""
        return filler_of(self.partition.tables[part.table], self._seed + part.table, part.row, part.column)

    def _make_replicated(self) -> None:
        for number in self.partition.replicated_tables:
            table = self.partition.tables[number]
            self.embedding_bags._modules[table.name] = Table(table, self.device, self._seed + number)

    @property
    def _update_of_parts(self) -> FusedUpdate | None:  # type: ignore[override]
        return None if self._parts is None else self._parts._update

    @property
    def _parts(self) -> ShardedEmbeddingBagCollection | None:
        return self.__dict__["_parts"]  # type: ignore[no-any-return]

    # --- calls ---

    def forward(self, features: Any, *, batch_sizes: Sequence[int] | None = None) -> KeyedTensor:
        if torch.compiler.is_compiling():
            return self._opaque(features, batch_sizes)  # the graph breaks here
        parts = self._parts
        with together(self._name, self.group, self._exchange_device, self.deadline_s), no_autocast(self.device):
            if self._replicated is not None:
                self._replicated.count(self._trains)
            if self.device.type == "meta":
                raise ValueError(no_tables_on(self.device))
            if parts is not None and not self._arrange.is_needed:
                return self._output(parts(features, batch_sizes=batch_sizes).values(), None, {})
            if batch_sizes is not None:
                raise ValueError(
                    f"batch_sizes={batch_sizes} works only with input='global_batch': do not pass it, because ranks "
                    "exchange the sizes of local batches"
                )
            given, checked = self._arrived(features) if self._prefetched else self._arranged(features)
            return self._joined(None if parts is None else parts(given.parts).values(), given, checked)

    def _arranged(self, features: Any) -> tuple[Arranged, CheckedInput | None]:
        """Separate the input by kind of table. Return two values: the features for parts of sharded tables and for
        data-parallel tables, and the checked features of data-parallel tables. Raise `ValueError` for bad input. Ranks do not
        communicate.
        """
        given = self._arrange(features, self.device)
        return given, None if self._replicated is None else self._replicated.checked(given.replicated)

    def _joined(self, vectors: torch.Tensor | None, given: Arranged, checked: CheckedInput | None) -> KeyedTensor:
        """Pool data-parallel tables, and return the vectors of all tables.

        vectors: the pooled vectors of the parts of sharded tables. given, checked: the results of `_arranged`.
        """
        replicated, of_replicated = self._replicated, None
        if replicated is not None and checked is not None:
            vectors, of_replicated = replicated.pooled(given.replicated, checked, vectors, self._trains, self._step)
        return self._output(vectors, of_replicated, given.lengths)

    @property
    def _trains(self) -> bool:
        """True if backward of a call that begins now computes gradients or updates tables."""
        return torch.is_grad_enabled() and (self._is_trained if self._optimizer is None else not self._is_frozen)

    def prefetch(self, features: Any) -> None:
        if self._parts is not None and not self._arrange.is_needed:
            self._parts.prefetch(features)
        else:
            super().prefetch(features)

    def _begin_ahead(self, features: Any, refusal: Exception | None) -> None:
        arranged, given = None, features
        try:
            arranged = self._arranged(features)
            given = arranged[0].parts
        except Exception as error:  # the call raises it, on every rank
            refusal = error
        self._prefetched = _Ahead(features, arranged, refusal)
        if self._parts is not None:
            self._parts._begin_ahead(given, refusal)

    def _arrived(self, features: Any) -> tuple[Arranged, CheckedInput | None]:
        """Return the result of `_arranged` for a prefetched batch. If the batch is bad on any rank, raise on every
        rank.
        """
        ahead = cast(_Ahead, self._prefetched)
        self._require_prefetched(features)
        self._prefetched = None
        if ahead.refusal is not None and self._parts is not None:
            self._parts(features)  # raises on every rank
        if ahead.refusal is not None:
            raise ahead.refusal
        assert ahead.arranged is not None
        return ahead.arranged

    def cancel_prefetch(self) -> None:
        self._prefetched = None
        if self._parts is not None:  # only the parts exchange something ahead
            self._parts.cancel_prefetch()

    @opaque
    def _opaque(self, features: Any, batch_sizes: Sequence[int] | None) -> KeyedTensor:
        return PartitionedEmbeddingBagCollection.forward(self, features, batch_sizes=batch_sizes)

    def _output(
        self, of_parts: torch.Tensor | None, of_replicated: torch.Tensor | None, lengths: Mapping[tuple[int, str], torch.Tensor]
    ) -> KeyedTensor:  # fmt: skip
        """Return the vectors of all tables in table order. Concatenate the columns of column-wise tables, and sum the
        vectors of row-wise parts.

        of_parts, of_replicated: the pooled vectors of the parts, and of the data-parallel tables.
        lengths: for row-wise tables with mean pooling, the number of ids of each bag.
        """
        slots, order = self.partition.slots, self._order
        keys, dims = [slot.key for slot in slots], [slot.dim for slot in slots]
        if not lengths and self._is_in_order and (of_parts is None or of_replicated is None):
            return KeyedTensor(keys, dims, cast(torch.Tensor, of_replicated if of_parts is None else of_parts))
        pieces: list[torch.Tensor] = []
        for vectors, sharding in ((of_parts, self.partition.sharding), (of_replicated, self.partition.replicated)):
            if vectors is not None and sharding is not None:
                pieces += vectors.split([slot.dim for slot in sharding.slots], dim=1)
        columns = []
        for slot, numbers in zip(slots, order, strict=True):
            found = [pieces[number] for number in numbers]
            if isinstance(self.partition.shardings[slot.table], RowWise):
                found = [_summed(found, lengths.get((slot.table, slot.feature)))]
            columns += found
        return KeyedTensor(keys, dims, torch.cat(columns, dim=1))

    @cached_property
    def _is_in_order(self) -> bool:
        """True if the pooled vectors already are the output: each block of output columns is one pooled vector, in the same
        order.
        """
        return self._order == [[number] for number in range(len(self._order))]

    @cached_property
    def _order(self) -> list[list[int]]:
        """For each block of output columns, the indices of the pooled vectors that are concatenated or summed to make the
        block. The vectors of all parts are numbered first, then the vectors of data-parallel tables.
        """
        partition, place = self.partition, {}
        parts = () if partition.sharding is None else partition.sharding.slots
        for number, slot in enumerate(parts):
            place[slot.table, slot.feature] = number
        replicated = () if partition.replicated is None else partition.replicated.slots
        for number, slot in enumerate(replicated, len(parts)):
            place[-1 - partition.replicated_tables[slot.table], slot.feature] = number
        found = []
        for slot in partition.slots:
            numbers = partition.parts_of(slot.table)
            own = [place[n, partition.feature_of_part(partition.parts[n], slot.feature)] for n in numbers]
            found.append(own or [place[-1 - slot.table, slot.feature]])
        return found

    def _collecting_parts(self) -> AbstractContextManager[list[Any]]:
        return contextlib.nullcontext([]) if self._parts is None else self._parts._collecting()

    def _update_collected_parts(self, collected: list[Any]) -> None:
        cast(ShardedEmbeddingBagCollection, self._parts)._update_collected(collected)

    # --- parameters, memory and conversions ---

    def memory(self) -> EmbeddingMemory:
        """Return the memory of this module on this rank, in bytes. `workspace` does not include the gradients of
        data-parallel tables.
        """
        weights = dict(zip(self.embedding_bags, self._all_weights(), strict=True))
        in_flight = 0 if self._replicated is None else self._replicated.bytes_in_flight
        workspace, buffers = 0, list[int]()
        if (parts := self._parts) is not None:
            in_flight += parts._batches.nbytes + collected_bytes(parts._update)
            buffers = list(buffer_bytes(plan_in(*parts._form), self.group, self._exchange_device()))
            workspace = pooled_workspace(parts._batches, parts.sharding, self.rank, self.device)
        return memory_of(weights, self._update, in_flight, buffers, workspace)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if self._parts is not None:
            self._parts.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def close(self) -> None:
        if self._parts is not None:
            self._parts.close()

    def _exchange_device(self) -> torch.device:
        return device_for(self.group, None) if self.device.type == "meta" else self.device

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        if not recurse:
            return super()._apply(fn, recurse)
        dtype, device = self._after(fn)
        if self._parts is not None:
            self._parts._apply(fn)
        if self._replicated is not None:
            for number in self.partition.replicated_tables:
                self.embedding_bags[self.partition.tables[number].name]._apply(fn)
        self._set_dtype(dtype)
        self._converted(device)
        self.sharding = cast(EmbeddingSharding, self.partition.sharding or self.partition.replicated)
        return self

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self.partition.tables)

    def extra_repr(self) -> str:
        return (
            f"rank {self.rank} of {self.group.size()} on {self.device}, input={self.input!r}, "
            f"is_weighted={self._is_weighted}\n{self.partition.describe()}"
        )


class _Ahead(NamedTuple):
    """A prefetched batch: its features separated by kind of table (`_arranged`), or the error about a bad batch. The inner
    collection (`_parts`) distributes the ids.
    """

    features: Any
    arranged: tuple[Arranged, CheckedInput | None] | None
    refusal: Exception | None


def _summed(partial: list[torch.Tensor], lengths: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of partial vectors, in float32 and in their order. If `lengths` is given, divide the sum by the
    lengths.
    """
    total = partial[0].to(torch.float32)
    for one in partial[1:]:
        total = total + one.to(torch.float32)
    return (total if lengths is None else total / lengths[:, None]).to(partial[0].dtype)


ShardedEmbeddingBagCollection._of_parts = PartitionedEmbeddingBagCollection
