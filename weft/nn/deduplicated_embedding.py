"""`ShardedEmbeddingBagCollection` with `dedup=True`: each distinct id of a rank's batch travels once, and the rank pools.

    ids      the distinct ids of this rank's samples -> owners of the rows -> distinct rows    (`weft.nn.row_dist`)
    forward  this rank pools the distinct rows, as if they were a small table of its own
    backward this rank sums the gradients of each distinct row. It sends one gradient for each, and the owner updates the row

Without `dedup`, the owner of a row-wise part pools its rows, and returns a partial vector for each bag. So each bag moves a
vector for every owner, in forward and in backward. With `dedup`, each distinct row moves once. This is less if bags share
most of their ids.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist

from weft.embedding.check import CheckedInput
from weft.embedding.forward_call import ForwardCall
from weft.embedding.jagged import JaggedInput, KeyedTensor
from weft.embedding.optimizers import EmbeddingOptimizer
from weft.embedding.options import BoundsCheck, EmbeddingOptions, Order, OutputDtype, Transport
from weft.embedding.partition import ColumnWise, DataParallel, Partition, TableSharding
from weft.embedding.plan import EmbeddingPlan
from weft.embedding.tables import EmbeddingBagConfig, EmbeddingSharding
from weft.embedding.training import check_module_options
from weft.nn.autocast import no_autocast
from weft.nn.embedding import ShardedEmbeddingBagCollection
from weft.nn.embedding_collection import ShardedEmbeddingCollection
from weft.nn.making import checked_input_options
from weft.operator.derivatives import once
from weft.operator.together import together
from weft.runtime.embedding_backward import device_code
from weft.runtime.embedding_unfused import pool_alone
from weft.runtime.opaque import opaque

_NAME = "ShardedEmbeddingBagCollection"


class DeduplicatedEmbeddingBagCollection(ShardedEmbeddingCollection, ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """A `ShardedEmbeddingBagCollection` with `dedup=True`.

    Do not construct it: the constructor of `ShardedEmbeddingBagCollection` returns it.
    """

    _container, _name = "embedding_bags", _NAME
    _expands = False

    def __init__(
        self, tables: Sequence[Any], *, group: dist.ProcessGroup, device: torch.device | str | None = None,
        placement: Mapping[str, int | TableSharding] | Sequence[int | TableSharding] | None = None,
        rows_read: Sequence[float] | Mapping[str, float] | None = None,
        input: Literal["local_batch", "global_batch"] = "local_batch", is_weighted: bool = False,
        optimizer: EmbeddingOptimizer | None = None, sparse: bool = False, deterministic: bool = True,
        gradients: Literal["mean", "sum"] = "mean", transport: Transport = "auto", order: Order = "remote_first",
        slice_size: int | None = None, bounds_check: BoundsCheck = "warning", hash: bool = False, outputs: int = 2,
        output_dtype: OutputDtype = "table", dedup: bool = True, max_ids: int | None = None,
        batch_size: int | None = None, deadline_s: float | None = None,
    ) -> None:  # fmt: skip
        self.input, self._is_weighted, self._prefetched = input, is_weighted, None
        self._deterministic = deterministic
        self._given: dict[str, Any] = {
            "transport": transport,
            "order": order,
            "slice_size": slice_size,
            "outputs": outputs,
        }
        self._given["output_dtype"], self._batch_size = output_dtype, batch_size
        self._said = {"input": input, "is_weighted": is_weighted, "deterministic": deterministic}
        ShardedEmbeddingCollection.__init__(
            self, tables, group=group, device=device, placement=placement, rows_read=rows_read, optimizer=optimizer,
            sparse=sparse, gradients=gradients, dedup=dedup, max_ids=max_ids, hash=hash, bounds_check=bounds_check,
            deadline_s=deadline_s,
        )  # fmt: skip
        self._length_per_key = [slot.dim for slot in self.partition.slots]
        self._on_device = _RowsOnDevice()

    def _check(self, partition: Partition) -> None:
        super()._check(partition)
        checked_input_options(self.input, self._is_weighted, None)
        if self._batch_size is not None:
            raise ValueError(f"batch_size={self._batch_size!r} does not work with dedup=True: do not pass it")
        check_module_options(self._optimizer, self._sparse, "mean", self._deterministic)
        for name, value in self._given.items():
            if value != getattr(EmbeddingOptions(), name):
                raise ValueError(
                    f"{name}={value!r} has no effect with dedup=True, because each rank pools its own bags: do not pass it"
                )
        if self.input != "local_batch":
            raise ValueError(
                f"input={self.input!r} does not work with dedup=True, because each rank needs the ids of its own samples: "
                "pass input='local_batch'"
            )
        first = partition.tables[0]
        for table, sharding in zip(partition.tables, partition.shardings, strict=True):
            if isinstance(sharding, ColumnWise | DataParallel):
                raise ValueError(
                    f"table {table.name!r} is {sharding}, which dedup=True does not support: place the table row-wise or on one "
                    "rank, or in a collection without dedup"
                )
            if table.pooling != first.pooling:
                raise ValueError(
                    f"table {table.name!r} has pooling {table.pooling!r}, but table {first.name!r} has {first.pooling!r}: with "
                    "dedup=True the tables of a collection must have the same pooling. Make a collection for each"
                )

    def forward(self, features: Any, *, batch_sizes: Sequence[int] | None = None) -> KeyedTensor:  # type: ignore[override]
        return self._pooled_rows(features, batch_sizes)

    @opaque
    def _pooled_rows(self, features: Any, batch_sizes: Sequence[int] | None) -> KeyedTensor:
        with together(self._name, self.group, lambda: self.device, self.deadline_s), no_autocast(self.device):
            if batch_sizes is not None:
                raise ValueError(
                    f"batch_sizes={batch_sizes} works only with input='global_batch': do not pass it, because ranks "
                    "exchange the sizes of local batches"
                )
            ids, trains = self._ids(features)
            weights = None
            if self._is_weighted:
                if any(of_slot is None for of_slot in ids.weights):
                    raise ValueError(
                        "is_weighted=True but the features have no weights: pass one float32 weight per value"
                    )
                weights = torch.cat(cast(list[torch.Tensor], ids.weights))
            rows = cast(torch.Tensor, self._rows(ids, trains))
            assert ids.route is not None
            slots, samples = len(self._keys), len(ids.offsets[0]) - 1
            ends = [of_slot[1:] + begin for of_slot, (begin, _) in zip(ids.offsets, ids.spans, strict=True)]
            offsets = torch.cat([ids.offsets[0][:1], *ends])
            jagged = JaggedInput(None, ids.route.to_sent, offsets, weights)
            call = _call(self.partition.tables[0], slots, samples, len(rows))
            raises = self._optimizer is not None and self._optimizer.nonfinite == "raise"
            finite_bags = ids.finite_bags if trains and raises else None
            values = _Pooled.apply(self._on_device, call, jagged, rows, weights, self.group, finite_bags)  # type: ignore[no-untyped-call]
            return KeyedTensor(self._keys, self._length_per_key, values)

    def prefetch(self, features: Any) -> NoReturn:
        """Raise `ValueError`: a collection with `dedup=True` cannot distribute ids ahead."""
        raise ValueError("prefetch does not support dedup=True: remove the call to prefetch")

    def cancel_prefetch(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: calls allocate no symmetric memory."""

    def _buffer_bytes(self) -> Sequence[int]:
        return (self._on_device.nbytes,)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self.partition.tables)

    def is_weighted(self) -> bool:
        """True if the features have one weight per id."""
        return self._is_weighted


@functools.lru_cache(maxsize=256)
def _plan(columns: int, dtype: torch.dtype, pooling: Any, slots: int, rows: int) -> EmbeddingPlan:
    """Return a plan in which `slots` features read one table of distinct rows."""
    names = tuple(f"feature {number}" for number in range(slots))
    table = EmbeddingBagConfig(rows, columns, "distinct rows", names, pooling, dtype)
    return EmbeddingPlan(EmbeddingSharding((table,), (0,), 1), EmbeddingOptions("direct"))


def _call(table: EmbeddingBagConfig, slots: int, samples: int, rows: int) -> ForwardCall:
    """Describe the pooling of distinct rows as a forward call on one rank. rows: the number of distinct rows, which is rounded
    up, so that there are few different plans.
    """
    rounded = 1 << max(0, rows - 1).bit_length()
    plan = _plan(table.embedding_dim, table.dtype, table.pooling, slots, rounded)
    return ForwardCall(plan, 0, CheckedInput(tuple(range(slots)), (samples,), samples), None, 1.0, False)


class _RowsOnDevice:
    """Memory for distinct rows on a GPU, at an address that changes seldom. Kernels of pooling read a list of tables, which
    the CPU would otherwise have to copy to the device in each call. All streams share the memory, one after the other.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None  # the stream of the last call

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def of(self, rows: torch.Tensor, rounded: int) -> torch.Tensor:
        """Return `rows` as the first rows of a table of `rounded` rows; on CPU, a table of at least one row.

        The result is valid until the next call. Pool it on the current stream.
        """
        if rows.device.type == "cpu":
            return rows if len(rows) else rows.new_zeros(1, rows.shape[1])
        here, memory = torch.cuda.current_stream(rows.device), self._memory
        if self._stream is not None and self._stream != here:
            here.wait_stream(self._stream)  # the last call may still read the memory
            if memory is not None:
                memory.record_stream(here)
        self._stream = here
        if memory is None or len(memory) < rounded or memory.dtype != rows.dtype:
            memory = self._memory = rows.new_empty(rounded, rows.shape[1])
        memory[: len(rows)].copy_(rows)
        return memory[:rounded]

    def __deepcopy__(self, memo: dict[int, Any]) -> _RowsOnDevice:
        return _RowsOnDevice()


class _Pooled(torch.autograd.Function):
    """The pooling of distinct rows, with the gradients of the rows and of per-sample weights. Ranks do not communicate."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        memory: _RowsOnDevice,
        of: ForwardCall,
        jagged: JaggedInput,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        group: dist.ProcessGroup,
        finite_bags: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        kept = (rows,) if ctx.needs_input_grad[4] else ()  # only gradients of per-sample weights read the rows
        ctx.of, ctx.count, ctx.group, ctx.finite_bags = of, len(rows), group, finite_bags
        ctx.save_for_backward(jagged.values, jagged.offsets, weights, *kept)
        sharding = of.plan.sharding
        out = torch.empty(of.checked.global_batch, sharding.total_dim, dtype=rows.dtype, device=rows.device)
        table = memory.of(rows, sharding.tables[0].num_embeddings)
        pool_alone(of.plan, [table], jagged, of.checked, out, widest=rows.shape[1])
        return out

    @staticmethod
    @once(_NAME, lambda ctx: ctx.group)
    def backward(ctx: Any, saved: Sequence[Any], grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        values, offsets, weights, *rows = saved
        of, grad, device = ctx.of, grad.contiguous(), device_code(grad.device)
        jagged = JaggedInput(None, values, offsets, weights)
        of_rows = of_weights = None
        if ctx.finite_bags is not None:  # gradients of empty bags do not reach the backward of the rows
            ctx.finite_bags[:] = [grad.isfinite().all()]
        if ctx.needs_input_grad[4]:
            of_weights = device.gradients_of_weights(of, jagged, rows, grad)
        if ctx.needs_input_grad[3]:
            (of_rows,) = device.gradients_of_tables(of, device.sorted_rows(of, jagged), grad)
            of_rows = of_rows[: ctx.count]
        return None, None, None, of_rows, of_weights, None, None


ShardedEmbeddingBagCollection._of_rows = DeduplicatedEmbeddingBagCollection
